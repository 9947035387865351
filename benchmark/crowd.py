"""What more agents are good for: how many of them learn a task that one rarely solves, and when
most of them have.

    bash benchmark/crowd.sh | python benchmark/run.py
    python benchmark/crowd.py --runs runs/crowd-results
    python benchmark/crowd.py --from-csv  # the table again, from the CSV file

An --exp-name is a method and its number of agents, as in pr-reward-8. Isolated agents do not know
of each other, so a run of eight also has four pairs and eight single ones: each such crowd is a
row. A run of six has three pairs, six single ones, and itself.

Writes OUT.csv, a row per crowd: the share of its agents whose evaluation is at least 0.8, its mean,
and the steps after which 80 % of them have a training return of at least 0.8, empty if they never
do. The printed table has the mean share, with Wilson's interval, where a seed is a trial. A figure
of it is in benchmark/figures.py.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from arguments import read_flags, refuse
from runs import SOLVED, Run, header, read_runs, read_table, refuse_repeats, wilson_interval, write

COLUMNS = "method", "agents", "seed", "first_agent", "share", "evaluation", "steps"  # of OUT.csv
MOST = 0.8  # share of a crowd whose steps are reported


@dataclass
class Args:
    runs: tuple[str, ...] = ("runs/crowd-results",)
    """folders to search for runs, at any depth"""
    out: str = "benchmark/results/crowd"
    """beginning of the names of the files that are written"""
    from_csv: bool = False
    """only print the table, from OUT.csv"""


def sizes_of_crowds(method: str, num_agents: int) -> list[int]:
    """The sizes of the crowds that a run is divided into: powers of two for isolated agents, and
    the whole run.
    """
    sizes = []
    if method == "isolated":
        powers = [2**k for k in range(num_agents.bit_length())]
        sizes = [size for size in powers if num_agents % size == 0 and size < num_agents]
    return [*sizes, num_agents]


def make_rows(runs: list[Run]) -> pd.DataFrame:
    """A row per crowd."""
    rows = []
    for run in runs:
        method = run.name.rpartition("-")[0]
        if not method:
            refuse(f"--runs: --exp-name {run.name} has no number of agents behind a hyphen")
        # Not the last that there is: an agent that has diverged has none
        evaluation = run.table.groupby("agent").evaluation.last(skipna=False)
        evaluation[evaluation.index.isin(run.diverged)] = np.nan
        solved = evaluation >= SOLVED
        above = run.table[run.table.return_last_100 >= SOLVED]
        reached = above.groupby("agent").timesteps.min().reindex(solved.index)
        num_agents = len(solved)
        for size in sizes_of_crowds(method, num_agents):
            last = math.ceil(MOST * size - 1e-9) - 1
            for first in range(0, num_agents, size):
                crowd = slice(first, first + size)
                row = {"method": method, "agents": size, "seed": run.seed, "first_agent": first}
                row["share"] = solved.iloc[crowd].mean()
                row["evaluation"] = evaluation.iloc[crowd].mean(skipna=False)
                # Agents that never get there are sorted behind the others
                row["steps"] = reached.iloc[crowd].sort_values().iloc[last]
                rows.append(row)
    key = ["method", "agents", "seed", "first_agent"]
    return refuse_repeats(pd.DataFrame(rows).sort_values(key), key)


def average_by_seed(crowds: pd.DataFrame) -> pd.DataFrame:
    """A row per method, size and seed: share of agents that learned, and median of steps, because
    some crowds never get there.
    """
    crowds = crowds.assign(steps=crowds.steps.fillna(np.inf))
    seeds = crowds.groupby(["method", "agents", "seed"])
    return seeds.agg({"share": "mean", "steps": "median"}).reset_index()


def format_share(shares: pd.Series) -> str:
    """The mean over seeds of the share of a run's agents, with Wilson's interval."""
    low, high = wilson_interval(shares.mean(), len(shares))
    return f"{shares.mean():.2f} [{low:.2f}, {high:.2f}]"


def main(args: Args) -> None:
    path = Path(f"{args.out}.csv")
    if not args.from_csv:
        runs = read_runs(args.runs, needed=("return_last_100", "evaluation"))
        write(path, f"{header(runs)}# threshold {SOLVED}\n", make_rows(runs))
    crowds = read_table(path, COLUMNS)
    shares = average_by_seed(crowds).groupby(["method", "agents"]).share.agg(format_share)
    print(shares.unstack(fill_value="").to_string())


if __name__ == "__main__":
    main(read_flags(Args))
