"""Compares one method with its rivals, paired by seed, as benchmark/confirm.md has it.

    python benchmark/confirm.py --runs runs/confirm-goals --csv goals.csv
    python benchmark/confirm.py --from-csv goals.csv --lead pr-reward-linear  # again, another lead
    python benchmark/confirm.py --from-csv goals.csv more.csv --methods pr-gate-linear pr-means*

Differences are those of runs, which are averaged over their agents first, with 95 % intervals and
p-values of the paired t test. Holm's adjustment is over the rivals, for each endpoint. The verdict
is `above` or `below` where the adjusted p is below --significance, `equal` where the interval lies
within 0.05 around 0, and otherwise `undecided`. Every seed that cannot be paired is named.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from arguments import end_with_reader, read_flags, refuse
from runs import (
    Run,
    header,
    is_wanted,
    mean_interval,
    read_runs,
    read_table,
    refuse_repeats,
    write,
)
from scipy import stats
from styles import find_method, find_place, name_task
from table import print_table

MARGIN = 0.05  # of return, within which methods are equal
COLUMNS = ("env", "method", "seed", "agent", "evaluation", "auc")


@dataclass
class Args:
    runs: tuple[str, ...] = ("runs",)
    """folders to search for runs, at any depth"""
    from_csv: tuple[str, ...] = ()
    """files that --csv has written, instead"""
    lead: str = "pr-gate-linear"
    """the method that is compared with each other one"""
    methods: tuple[str, ...] = ("*",)
    """only the experiments with these names, in which * stands for anything"""
    seeds: tuple[int, ...] = ()
    """only these seeds (default: all)"""
    agents: tuple[int, ...] = ()
    """only the returns of these agents, as of a newcomer (default: of all)"""
    hardest: int = -1
    """number of the hardest agent (-1: the one whose return is lowest in isolated runs)"""
    significance: float = 0.05
    """adjusted p below which a difference counts (0.025 for a second look at more seeds)"""
    csv: str = ""
    """write the rows per run and agent to this file"""


def make_agent_rows(runs: list[Run]) -> pd.DataFrame:
    """A row per run and agent: return after training, and training return over the run (`auc`)."""
    rows = []
    for run in runs:
        # From where all agents have a return, as in the curve
        curve = run.curve
        table = run.table[run.table[curve.index.name].isin(curve.index)]
        for agent, of_agent in table.groupby("agent"):
            row = {"env": run.task, "method": run.name, "seed": run.seed, "agent": agent}
            row["evaluation"] = of_agent.evaluation.iloc[-1]
            row["auc"] = of_agent.return_last_100.mean()
            if agent in run.diverged:  # whatever it was worth before
                row |= {"evaluation": np.nan, "auc": np.nan}
            rows.append(row)
    return pd.DataFrame(rows)


def find_hardest(rows: pd.DataFrame) -> int:
    """The agent of a task whose return after training is lowest in isolated runs, averaged over
    their seeds; of two that are equal the one with the lower training return.
    """
    isolated = rows[rows.method == "isolated"]
    if not len(isolated):
        refuse("--hardest: there is no isolated run; give the agent's number")
    means = isolated.groupby("agent")[["evaluation", "auc"]].mean()
    return means.sort_values(["evaluation", "auc"]).index[0]


def make_endpoints(rows: pd.DataFrame, hardest: int) -> list[pd.Series]:
    """The endpoints by method and seed, NaN where an agent that counts has no return."""
    by_run = rows.groupby(["method", "seed"])
    after = by_run.evaluation.mean(skipna=False)
    over_run = by_run.auc.mean(skipna=False)
    of_hardest = rows[rows.agent == hardest].set_index(["method", "seed"]).evaluation
    return [
        after.rename("return after training"),
        over_run.rename("return over the run"),
        of_hardest.rename(f"return of agent {hardest}, the hardest"),
    ]


def compute_p_value(differences: np.ndarray) -> float:
    """Of the paired t test, two-sided; 1 where all differences are 0, NaN for fewer than two."""
    if len(differences) < 2:
        return np.nan
    if not differences.any():
        return 1.0
    return float(stats.ttest_1samp(differences, 0).pvalue)


def adjust_by_holm(p_values: list[float]) -> np.ndarray:
    """Holm's adjusted p-values of one family of tests (Holm 1979): the i-th smallest of m times
    m - i + 1, none below its predecessor. A test that could not be made counts with p = 1.
    """
    p = np.nan_to_num(np.asarray(p_values, float), nan=1.0)
    order = np.argsort(p, kind="stable")
    scaled = p[order] * np.arange(len(p), 0, -1)
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1)
    return adjusted


def judge(mean: float, low: float, high: float, adjusted: float, significance: float) -> str:
    """The verdict on a difference with this interval and adjusted p-value."""
    if adjusted < significance:
        return "above" if mean > 0 else "below"
    if low >= -MARGIN and high <= MARGIN:
        return "equal"
    return "undecided"


def list_unpaired(endpoint: pd.Series, lead: str, rival: str) -> list[str]:
    """A line for the seeds that only one of two methods has, and for those without a return."""
    lines = []
    for method, other in ((lead, rival), (rival, lead)):
        label = find_method(method).label
        missing = endpoint[other].index.difference(endpoint[method].index)
        if len(missing):
            seeds = " ".join(map(str, missing))
            lines.append(f"{label} has no run of seed {seeds}, {find_method(other).label} has.")
        unknown = endpoint[method].index[endpoint[method].isna()]
        if len(unknown):
            seeds = " ".join(map(str, unknown))
            reason = "an agent diverged, or was not evaluated on its task"
            lines.append(f"{label} has no {endpoint.name} in seed {seeds}: {reason}.")
    return lines


def compare(
    endpoint: pd.Series, lead: str, rivals: list[str], significance: float
) -> list[dict[str, str]]:
    """Rows of the table: the lead minus each rival."""
    differences = [(endpoint[lead] - endpoint[rival]).dropna().to_numpy() for rival in rivals]
    p_values = [compute_p_value(of_rival) for of_rival in differences]
    rows = []
    for rival, gains, p, adjusted in zip(
        rivals, differences, p_values, adjust_by_holm(p_values), strict=True
    ):
        mean, low, high = mean_interval(gains)
        row = {"difference": f"{mean:.3f} [{low:.3f}, {high:.3f}]".replace("-0.000", "0.000")}
        row["positive"] = f"{(gains > 0).sum()} of {len(gains)}"
        row |= {"p": f"{p:.4f}", "p, Holm": f"{adjusted:.4f}"}
        row = {name: cell.replace("nan", "-") for name, cell in row.items()}
        row["verdict"] = judge(mean, low, high, adjusted, significance)
        rows.append({endpoint.name: find_method(rival).label} | row)
    return rows


def read_rows(args: Args) -> pd.DataFrame:
    """A row per run and agent."""
    if args.from_csv:
        if args.csv:
            refuse("--csv writes the rows of --runs; leave out --from-csv")
        types = {"evaluation": float, "auc": float}
        rows = pd.concat(read_table(Path(path), COLUMNS, dtype=types) for path in args.from_csv)
        names = [name for name in set(rows.method) if is_wanted(name, args.methods)]
        rows = rows[rows.method.isin(names)]
        refuse_repeats(rows, ["env", "method", "seed", "agent"])
        if not len(rows):
            refuse(f"--from-csv {' '.join(args.from_csv)}: has no run of --methods")
    else:
        runs = read_runs(args.runs, args.methods, needed=("evaluation", "return_last_100"))
        rows = make_agent_rows(runs)
        if args.csv:
            write(Path(args.csv), header(runs), rows)
    rows = keep_only(rows, "seed", args.seeds, "run")
    return keep_only(rows, "agent", args.agents, "agent")


def keep_only(rows: pd.DataFrame, column: str, numbers: tuple[int, ...], what: str) -> pd.DataFrame:
    """The rows with these numbers in a column, all if none are given; what: has such a number."""
    if not numbers:
        return rows
    missing = set(numbers) - set(rows[column])
    if missing:
        refuse(f"--{column}s {' '.join(map(str, sorted(missing)))}: there is no such {what}")
    return rows[rows[column].isin(numbers)]


def main(args: Args) -> None:
    if not 0 < args.significance < 1:
        refuse(f"--significance {args.significance}: a probability between 0 and 1")
    for task, rows in read_rows(args).groupby("env", sort=False):
        if args.lead not in set(rows.method):
            refuse(f"--lead {args.lead}: {task} has no run of it")
        # Means over different agents are no pair
        agents = set(rows.agent)
        for (method, seed), of_run in rows.groupby(["method", "seed"]):
            if set(of_run.agent) != agents:
                refuse(f"{task}: {method}, seed {seed}, has not the agents that others have")
        hardest = args.hardest
        if hardest < 0:
            hardest = find_hardest(rows)
        if hardest not in set(rows.agent):
            refuse(f"--hardest {hardest}: {task} has no such agent")
        rivals = sorted(set(rows.method) - {args.lead}, key=find_place)
        if not rivals:
            refuse(f"--lead {args.lead}: {task} has no other method to compare it with")
        print(f"{name_task(task)}: {find_method(args.lead).label} minus its rivals\n")
        lines = []
        for endpoint in make_endpoints(rows, hardest):
            print_table(compare(endpoint, args.lead, rivals, args.significance))
            print()
            for rival in rivals:
                lines += list_unpaired(endpoint, args.lead, rival)
        # Each once: a method's seeds are the same for every endpoint
        for line in dict.fromkeys(lines):
            print(line)


if __name__ == "__main__":
    end_with_reader()
    main(read_flags(Args))
