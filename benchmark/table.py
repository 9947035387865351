"""Tables of methods from finished runs: Markdown, and with --csv all digits, limits, commands and versions.

    python benchmark/table.py --runs runs/final --csv final_table.csv           # control: methods x tasks
    python benchmark/table.py --runs runs/llm --evp 5 --csv llm_table1.csv      # language models: the paper's table 1

Control: interquartile mean over seeds, chance of a run to beat one of --reference, share of seeds that succeed. A seed
is one sample: a run's agents on one task are averaged, on several resampled together. Language models: an --exp-name is
a setting; the held-out score of the best in training, and expected validation performance, of rewards or, with
--measure win_rate, of what benchmark/judge.py found before. Intervals are of 95 %.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import tyro
from plot import Args as PlotArgs
from plot import Run, header, load_run, read_groups, with_interval, write
from stats import expected_maximum, interquartile_mean, probability_of_improvement, success_rate


@dataclass
class Args:
    runs: tuple[str, ...] = ("runs",)  # folders to search for runs, at any depth
    methods: tuple[str, ...] = ()  # only these experiments, in this order; * stands for anything (empty: all)
    reference: str = "isolated"  # the method that others are compared with, where it is there
    measure: Literal["evaluation", "auc", "final", "win_rate"] = "evaluation"
    """auc: mean training return; final: the last one; win_rate: language models, all agents' against the references"""
    threshold: float = 0.8  # score of a success
    success: Literal["min", "mean", "max"] = "min"  # of a run's agents: has every one to reach it, their mean, or one
    evp: int = 0  # language models: settings that are tried (0: as many as the smallest search has)
    replacement: bool = False  # they are drawn with replacement (biased, as in Dodge et al. 2019)
    csv: str = ""  # file to write too


def agent_scores(run: Run, measure: str) -> pd.Series:
    """The score of every agent of a run, by its task."""
    by, column = load_run(run.folder).groupby("agent"), "evaluation" if measure == "evaluation" else "return_last_100"
    scores = by[column].agg("mean" if measure == "auc" else "last") if column in by.obj else pd.Series([np.nan])
    if scores.isna().any():
        sys.exit(f"{run.folder}: not every agent has --measure {measure}")
    return scores.set_axis(by.env_id.first())


def control_table(groups: dict[tuple[str, str], list[Run]], args: Args) -> list[dict]:
    """A row per method: its estimates by column."""
    rows = []
    for (kind, method), runs in groups.items():
        for run in runs:
            agents = agent_scores(run, args.measure)
            row = {"kind": kind, "method": method, "seed": run.settings["seed"], "run": getattr(agents, args.success)()}
            rows += [row | {"task": task, "score": own.mean()} for task, own in agents.groupby(level=0, sort=False)]
    scores, paired = pd.DataFrame(rows), len({kind for kind, _ in groups}) == 1  # whether one run trains on all tasks
    if scores.duplicated(["method", "seed", "task"]).any():
        sys.exit(f"--runs {' '.join(args.runs)}: one task in runs of several kinds; give one kind at a time")
    tasks, rows = list(scores.task.unique()), []
    wide = {name: own.pivot(index="seed", columns="task", values="score") for name, own in scores.groupby("method")}
    whole = {name: own.reindex(columns=tasks).dropna() for name, own in wide.items()}  # the seeds that have all tasks
    base = whole.get(args.reference, ())
    if not len(base):
        print(f"--reference {args.reference}: not in there, nothing is compared with it", file=sys.stderr)
    for method in scores.method.unique():
        row = {"method": method, "seeds": " ".join(map(str, wide[method].index))}
        row |= {task: interquartile_mean(wide[method][[task]].dropna()) for task in tasks if task in wide[method]}
        if len(tasks) > 1 and len(whole[method]):
            row["all tasks"] = interquartile_mean(whole[method], paired)
        if len(base) and len(whole[method]) and method != args.reference:
            row[f"better than {args.reference}"] = probability_of_improvement(whole[method], base, paired)
        for kind, own in scores[scores.method == method].drop_duplicates(["kind", "seed"]).groupby("kind", sort=False):
            row["success" if paired else f"success in {kind}"] = success_rate(own.run, args.threshold)
        rows.append(row)
    return rows


def held_out(run: Run, measure: str) -> float:
    """The score of a language model's run on the common held-out prompts."""
    if measure != "win_rate":
        return float("nan" if run.summary["evaluation"]["group"] is None else run.summary["evaluation"]["group"])
    if not (path := run.folder / "win_rates.csv").is_file():
        sys.exit(f"{run.folder}: has no win_rates.csv; run benchmark/judge.py first")
    rates = pd.read_csv(path)
    return rates[(rates.task == "validation") & (rates.agent == "all")].win_rate.iloc[-1]


def on_topics(run: Run) -> tuple[float, float]:
    """Mean reward of the agents on their own topics, and on the others', which follow the common prompts in order."""
    matrix = np.array([[cell["mean"] for cell in row.values()] for row in run.summary["evaluation"]["agents"]])[:, 1:]
    own = np.eye(*matrix.shape, dtype=bool)
    return matrix[own].mean(), matrix[~own].mean() if len(matrix) > 1 else np.nan


def search_table(groups: dict[tuple[str, str], list[Run]], args: Args) -> list[dict]:
    """A row per algorithm, data and method: what its search over settings found."""
    searches = {}
    for (data, name), runs in groups.items():
        own = runs[0].settings
        p, kind = own["self_preference"], ["none", "weights", "policy"].index(own["aggregation"])
        how = f"p = {p:g}" if own["communicator"] == "self-preferred" else own["communicator"]
        average = own.get("lora_average", "exact")
        methods = "isolated", "FedAvg" + f", {average}" * (average != "exact"), f"PR, {how}"
        key = own["algorithm"] != "ppo", data, kind, -p, methods[kind]  # the paper's order
        searches.setdefault(key, {})[name] = runs
    n, rows, found = args.evp or min(map(len, searches.values())), [], {}
    for (grpo, data, *_, method), settings in sorted(searches.items()):
        runs = pd.DataFrame({name: {run.settings["seed"]: run for run in runs} for name, runs in settings.items()})
        held = runs.map(lambda run: held_out(run, args.measure), na_action="ignore").astype(float)
        if held.isna().any(axis=None) or n > len(settings):
            sys.exit(f"{data}, {method}: fewer settings than --evp {n}, or one without evaluation for every seed")
        mean, variance = np.array([expected_maximum(own, args.replacement) for own in held.to_numpy()])[:, :, n - 1].T
        best = runs.map(lambda run: run.curve.mean()).mean().idxmax()  # the best held-out score would flatter
        row = {"algorithm": "GRPO" if grpo else "PPO", "data": data, "method": method, "settings": len(settings)}
        row |= {"seeds": " ".join(map(str, held.index)), "best setting": best}
        row["held-out"] = tuple(with_interval(held[[best]].T).iloc[0])
        if runs[best].iloc[0].settings["partition"] == "topic":
            topics = pd.DataFrame([on_topics(run) for run in runs[best]]).T
            row |= dict(
                zip(("own topic", "others' topics"), with_interval(topics).itertuples(False, None), strict=True)
            )
        row[f"EVP of {n}"] = tuple(with_interval(pd.DataFrame([mean])).iloc[0])
        row["EVP per seed"] = " ".join(f"{value:.4f}" for value in mean)
        row["deviation"] = f"{np.sqrt(variance.mean()):.3f}"  # within a seed: the shades of the paper's figures
        found[grpo, data, method] = mean.mean()
        others = [name for name in ("isolated", "FedAvg") if name != method and found.get((grpo, data, name), 0) > 0]
        row |= {f"gain over {name}": f"{mean.mean() / found[grpo, data, name] - 1:+.1%}" for name in others}
        rows.append(row)
    return rows


def cell(value) -> str:
    """A value, or an estimate with its interval, for reading."""
    if not isinstance(value, tuple):
        return "" if pd.isna(value) else str(value)
    mean, *limits = (f"{x:.{0 if abs(x) >= 100 else 2}f}" for x in value)
    return mean if "nan" in limits else f"{mean} [{', '.join(limits)}]"


def main(args: Args) -> None:
    groups = read_groups(PlotArgs(runs=args.runs, methods=args.methods))
    kinds = {search_table if "algorithm" in runs[0].settings else control_table for runs in groups.values()}
    if len(kinds) != 1:
        sys.exit(f"--runs {' '.join(args.runs)}: needs finished runs, of control or of language models")
    if kinds == {control_table} and args.measure == "win_rate":
        sys.exit("--measure win_rate: is for language models")
    table = pd.DataFrame(kinds.pop()(groups, args))
    for line in ([*table], ["---" for _ in table], *table.map(cell).to_numpy()):
        print(f"| {' | '.join(line)} |")
    if args.csv:
        for name in table.columns[table.map(type).eq(tuple).any()]:
            for k, end in ((1, "_ci_low"), (2, "_ci_high")):
                table.insert(table.columns.get_loc(name) + k, name + end, table[name].str[k])
            table[name] = table[name].str[0]
        write(Path(args.csv), f"{header(groups)}# {replace(args, csv='')}\n", table)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
