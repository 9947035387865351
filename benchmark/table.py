"""Tables of methods from finished runs: Markdown, and with --csv all digits, limits, commands and
versions.

    python benchmark/table.py --runs runs/final --csv final.csv        # control: methods x tasks
    python benchmark/table.py --runs runs/llm --evp 5 --csv table1.csv # the paper's table 1

Control: interquartile mean over seeds, chance of a run to beat one of --reference, share of seeds
that succeed. A seed is one sample: a run's agents on one task are averaged, on several resampled
together. Language models: an --exp-name is a setting; the held-out score of the best in training,
and expected validation performance, of rewards or, with --measure win_rate, of what
benchmark/judge.py found before. Intervals are of 95 %.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from arguments import read_flags, refuse
from plot import Args as PlotArgs
from plot import Run, header, load_run, read_groups, read_table, with_interval, write
from stats import expected_maximum, interquartile_mean, probability_of_improvement, success_rate


@dataclass
class Args:
    runs: tuple[str, ...] = ("runs",)  # folders to search for runs, at any depth
    methods: tuple[str, ...] = ()
    """only these experiments, in this order; * stands for anything (empty: all)"""
    reference: str = "isolated"  # the method that others are compared with, where it is there
    # auc: mean training return; final: the last one; win_rate: language models, all agents' against
    # the references
    measure: Literal["evaluation", "auc", "final", "win_rate"] = "evaluation"
    threshold: float = 0.8  # score of a success
    success: Literal["min", "mean", "max"] = "min"
    """of a run's agents: has every one to reach it, their mean, or one"""
    evp: int = 0  # language models: settings that are tried (0: as many as the smallest search has)
    replacement: bool = False  # they are drawn with replacement (biased, as in Dodge et al. 2019)
    csv: str = ""  # file to write too


Groups = dict[tuple[str, str], list[Run]]  # of plot.read_groups


def score_agents(run: Run, measure: str) -> pd.Series:
    """The score of every agent of a run, by its task."""
    agents = load_run(run.folder).groupby("agent")
    column = "evaluation" if measure == "evaluation" else "return_last_100"
    if "env_id" not in agents.obj:
        sys.exit(f"{run.folder}: agents have no tasks in there; see benchmark/text_worlds.py")
    if column not in agents.obj:
        scores = pd.Series([np.nan])
    elif measure == "auc":
        scores = agents[column].mean()
    else:  # not the last that there is: an agent that has diverged has none
        scores = agents[column].agg(lambda values: values.iloc[-1])
    if scores.isna().any():
        sys.exit(f"{run.folder}: not every agent has --measure {measure}")
    return scores.set_axis(agents.env_id.first())


def collect_scores(groups: Groups, args: Args) -> pd.DataFrame:
    """A row per run and task: the mean of its agents that have the task, and `run`, what success is
    judged by.
    """
    rows = []
    for (kind, method), runs in groups.items():
        for run in runs:
            agents = score_agents(run, args.measure)
            of_run = agents.agg(args.success)
            for task, scores in agents.groupby(level=0, sort=False):
                row = {"kind": kind, "method": method, "seed": run.settings["seed"], "run": of_run}
                rows.append(row | {"task": task, "score": scores.mean()})
    scores = pd.DataFrame(rows)
    if scores.duplicated(["method", "seed", "task"]).any():
        folders = " ".join(args.runs)
        sys.exit(f"--runs {folders}: one task in runs of several kinds; give one kind at a time")
    return scores


def make_control_table(groups: Groups, args: Args) -> list[dict]:
    """A row per method: its estimates by column."""
    scores = collect_scores(groups, args)
    paired = scores.kind.nunique() == 1  # whether one run trains on all tasks
    tasks = list(scores.task.unique())
    by_task = {}  # method -> scores [seeds, tasks]
    complete = {}  # the same, only of the seeds that have all tasks
    for method, rows in scores.groupby("method"):
        by_task[method] = rows.pivot(index="seed", columns="task", values="score")
        complete[method] = by_task[method].reindex(columns=tasks).dropna()
    reference = complete.get(args.reference, ())
    if not len(reference):
        print(
            f"--reference {args.reference}: not in there, nothing is compared with it",
            file=sys.stderr,
        )
    table = []
    for method in scores.method.unique():
        row = {"method": method, "seeds": " ".join(map(str, by_task[method].index))}
        for task in tasks:
            if task in by_task[method]:
                row[task] = interquartile_mean(by_task[method][[task]].dropna())
        if len(tasks) > 1 and len(complete[method]):
            row["all tasks"] = interquartile_mean(complete[method], paired)
        if len(reference) and len(complete[method]) and method != args.reference:
            improvement = probability_of_improvement(complete[method], reference, paired)
            row[f"better than {args.reference}"] = improvement
        runs = scores[scores.method == method].drop_duplicates(["kind", "seed"])
        for kind, of_kind in runs.groupby("kind", sort=False):
            column = "success" if paired else f"success in {kind}"
            row[column] = success_rate(of_kind.run, args.threshold)
        table.append(row)
    return table


def score_held_out(run: Run, measure: str) -> float:
    """The score of a language model's run on the common held-out prompts; NaN where it was not
    evaluated.
    """
    if measure != "win_rate":
        score = run.summary["evaluation"]["group"]
        return float("nan") if score is None else float(score)
    path = run.folder / "win_rates.csv"
    if not path.is_file():
        sys.exit(f"{run.folder}: has no win_rates.csv; run benchmark/judge.py first")
    rates = read_table(path, comment=None)
    rates = rates[(rates.task == "validation") & (rates.agent == "all")]
    if rates.empty:
        sys.exit(f"{path}: has no --tasks validation of benchmark/judge.py")
    if rates.step.iloc[-1] != run.summary["steps"]:
        sys.exit(f"{path}: is of an earlier evaluation; run benchmark/judge.py again")
    return rates.win_rate.iloc[-1]


def score_topics(run: Run) -> tuple[float, float]:
    """Mean reward of the agents on their own topics, and on the others', which follow the common
    prompts in order.
    """
    agents = run.summary["evaluation"]["agents"]
    matrix = np.array([[cell["mean"] for cell in row.values()] for row in agents])
    matrix = matrix[:, 1:]
    diagonal = np.eye(*matrix.shape, dtype=bool)
    others = matrix[~diagonal].mean() if len(matrix) > 1 else np.nan
    return matrix[diagonal].mean(), others


def name_search(settings: dict) -> tuple:
    """What a search of a language model is sorted by, in the paper's order; its name comes last."""
    kind = ["none", "weights", "policy"].index(settings["aggregation"])
    preference = settings["self_preference"]
    if settings["aggregation"] == "none":
        name = "isolated"
    elif settings["aggregation"] == "weights":
        average = settings.get("lora_average", "exact")
        name = "FedAvg" if average == "exact" else f"FedAvg, {average}"
    elif settings["communicator"] == "self-preferred":
        name = f"PR, p = {preference:g}"
    else:
        name = f"PR, {settings['communicator']}"
    if kind == 1 and settings["communicator"] != "uniform":
        name += f", {settings['communicator']}"
    if settings.get("private_layers"):
        name += ", last layers private"
    if settings.get("kl_schedule") == "linear":
        name += ", falls to 0"
    if settings.get("kl_direction", "auto") != "auto":
        name += f", {settings['kl_direction']} KL"
    return kind, -preference, name


def make_search_table(groups: Groups, args: Args) -> list[dict]:
    """A row per algorithm, data and method: what its search over settings found."""
    searches = {}
    for (data, name), runs in groups.items():
        settings = runs[0].settings
        key = (settings["algorithm"] != "ppo", data, *name_search(settings))
        searches.setdefault(key, {})[name] = runs
    tried = args.evp or min(map(len, searches.values()))
    table = []
    expected = {}  # (GRPO, data, method) -> mean over seeds of the best of `tried` settings
    for (grpo, data, *_, method), by_name in sorted(searches.items()):
        runs = {name: {run.settings["seed"]: run for run in runs} for name, runs in by_name.items()}
        runs = pd.DataFrame(runs)  # [seeds, settings]
        held_out = runs.map(lambda run: score_held_out(run, args.measure), na_action="ignore")
        held_out = held_out.astype(float)
        if held_out.isna().any(axis=None) or tried > len(by_name):
            problem = f"fewer settings than --evp {tried}, or one without evaluation for every seed"
            sys.exit(f"{data}, {method}: {problem}")
        bests = [expected_maximum(scores, args.replacement) for scores in held_out.to_numpy()]
        mean = np.array([means[tried - 1] for means, _ in bests])
        variance = np.array([variances[tried - 1] for _, variances in bests])
        # By training: the best held-out score would flatter
        best = runs.map(lambda run: run.curve.mean()).mean().idxmax()
        row = {"algorithm": "GRPO" if grpo else "PPO", "data": data, "method": method}
        row |= {"settings": len(by_name), "seeds": " ".join(map(str, held_out.index))}
        row["best setting"] = best
        row["held-out"] = tuple(with_interval(held_out[[best]].T).iloc[0])
        # Whose rewards are those of the evaluation
        if runs[best].iloc[0].settings["partition"] == "topic" and args.measure != "win_rate":
            topics = pd.DataFrame([score_topics(run) for run in runs[best]]).T
            intervals = with_interval(topics)
            row["own topic"] = tuple(intervals.iloc[0])
            row["others' topics"] = tuple(intervals.iloc[1])
        row[f"EVP of {tried}"] = tuple(with_interval(pd.DataFrame([mean])).iloc[0])
        row["EVP per seed"] = " ".join(f"{value:.4f}" for value in mean)
        # Within a seed: the shades of the paper's figures
        row["deviation"] = f"{np.sqrt(variance.mean()):.3f}"
        expected[grpo, data, method] = mean.mean()
        for other in ("isolated", "FedAvg"):
            if other != method and expected.get((grpo, data, other), 0) > 0:
                gain = mean.mean() / expected[grpo, data, other] - 1
                row[f"gain over {other}"] = f"{gain:+.1%}"
        table.append(row)
    return table


def format_cell(value) -> str:
    """A value, or an estimate with its interval, for reading."""
    if not isinstance(value, tuple):
        return "" if pd.isna(value) else str(value)
    mean, *limits = (f"{x:.{0 if abs(x) >= 100 else 2}f}" for x in value)
    return mean if "nan" in limits else f"{mean} [{', '.join(limits)}]"


def split_estimates(table: pd.DataFrame) -> pd.DataFrame:
    """The table with estimates in three columns: the value and the limits of its interval."""
    table = table.copy()
    for name in table.columns[table.map(type).eq(tuple).any()]:
        position = table.columns.get_loc(name)
        table.insert(position + 1, f"{name}_ci_low", table[name].str[1])
        table.insert(position + 2, f"{name}_ci_high", table[name].str[2])
        table[name] = table[name].str[0]
    return table


def main(args: Args) -> None:
    if args.evp < 0:
        refuse(f"--evp {args.evp}: must not be negative")
    groups = read_groups(PlotArgs(runs=args.runs, methods=args.methods))
    languages = {"algorithm" in runs[0].settings for runs in groups.values()}
    if len(languages) != 1:
        folders = " ".join(args.runs)
        sys.exit(f"--runs {folders}: needs finished runs, of control or of language models")
    if languages == {True}:
        rows = make_search_table(groups, args)
    elif args.measure == "win_rate":
        refuse("--measure win_rate: is for language models")
    else:
        rows = make_control_table(groups, args)
    table = pd.DataFrame(rows)
    for line in ([*table], ["---" for _ in table], *table.map(format_cell).to_numpy()):
        print(f"| {' | '.join(line)} |")
    if args.csv:
        comments = f"{header(groups)}# {replace(args, csv='')}\n"
        write(Path(args.csv), comments, split_estimates(table))


if __name__ == "__main__":
    main(read_flags(Args))
