"""Tabulates runs in Markdown, as the pages have it.

    python benchmark/table.py --runs runs/doorkey-results --measure auc      # methods x tasks
    python benchmark/table.py --runs runs/doorkey-results --minus isolated   # paired by seed
    python benchmark/table.py --search --runs runs/doorkey-tune              # settings, best first
    python benchmark/table.py --evp 5 --runs runs/table1                     # the paper's table 1
    python benchmark/table.py --from-csv benchmark/results/doorkey_runs.csv  # rows of plot.py
    python benchmark/table.py --conditions --runs runs/agreement-results     # methods x conditions

Values are means over seeds with 95 % intervals by Student's t. If all values of a task lie between
0 and 1, intervals are cut there; those of differences never are. Where each seed either solves the
task or fails, the number of seeds that solve it follows the mean, with Wilson's interval. In a
search an --exp-name is a method and, behind the first underscore, its setting. With --conditions it
is a method and, behind the last hyphen, a condition, as in pr-surrogate-25.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from arguments import end_with_reader, read_flags, refuse
from runs import (
    SOLVED,
    expected_best,
    group_runs,
    header,
    is_all_or_nothing,
    is_wanted,
    make_conditions,
    make_rows,
    mean_interval,
    read_runs,
    read_table,
    refuse_repeats,
    split_search,
    wilson_interval,
    write,
)
from styles import count_seeds, find_method, find_place, name_task, order_conditions


@dataclass
class Args:
    runs: tuple[str, ...] = ("runs",)
    """folders to search for runs, at any depth"""
    from_csv: str = ""
    """a file with a row per run, instead: OUT_runs.csv of plot.py, or of --csv"""
    methods: tuple[str, ...] = ("*",)
    """only the experiments with these names, in which * stands for anything"""
    # evaluation: after training; auc: training return, mean over the run; final: at its end;
    # win_rate, sampled_win_rate: of language models, by benchmark/judge.py
    measure: Literal["evaluation", "auc", "final", "win_rate", "sampled_win_rate"] = "evaluation"
    task: str = ""
    """judge all agents of a run by this task of its evaluations, instead of each by its own"""
    conditions: bool = False
    """methods x conditions, which --exp-name ends in, by the training return"""
    agents: int = 0
    """of --conditions: only the first agents of each run count (0: all)"""
    minus: str = ""
    """differences from this method, paired by seed, and in how many seeds they are positive"""
    search: bool = False
    """settings of each method, best first"""
    evp: int = 0
    """what searches over this many settings find: expected validation performance (0: no)"""
    csv: str = ""
    """write the rows per run to this file, for --from-csv"""


def format_mean(values: Any, digits: int = 2, bounded: bool = False) -> str:
    """The mean of one number per seed with its interval, cut at 0 and 1 where values are; of fewer
    than three seeds with their number, because intervals of two cover everything.
    """
    mean, *limits = mean_interval(values)
    text = f"{round(mean, digits) + 0.0:.{digits}f}"
    if len(values) < 3:
        return f"{text} ({count_seeds(len(values))})"
    if bounded:
        limits = np.clip(limits, 0, 1)
    text += f" [{', '.join(f'{round(limit, digits) + 0.0:.{digits}f}' for limit in limits)}]"
    if bounded:  # possible values are integers: 0, not 0.00
        text = text.replace(f"{0:.{digits}f}", "0").replace(f"{1:.{digits}f}", "1")
    return text


def format_share(successes: int, trials: int) -> str:
    """How many seeds succeed, with Wilson's interval."""
    low, high = (f"{limit:.2f}" for limit in wilson_interval(successes / trials, trials))
    return f"{successes} of {trials} [{low}, {high}]".replace("[0.00", "[0").replace("1.00]", "1]")


def print_table(rows: list[dict[str, str]]) -> None:
    """Rows, each a cell by column, in Markdown."""
    table = pd.DataFrame(rows).fillna("")
    for line in ([*table], ["---" for _ in table], *table.to_numpy()):
        print(f"| {' | '.join(line)} |".replace("|  |", "| |").replace("|  |", "| |"))


def tabulate_methods(rows: pd.DataFrame, args: Args) -> list[dict]:
    """Methods x tasks, or x conditions."""

    def format_cell(task: str, seeds: pd.DataFrame, others: pd.DataFrame) -> str:
        values = rows[rows.env == task][args.measure].dropna()  # of all methods
        digits = 2 if values.abs().max() < 20 else 0
        if args.minus:
            gains = (seeds[args.measure] - others[args.measure]).dropna()
            positive = f"{(gains > 0).sum()} of {len(gains)}"
            return f"{format_mean(gains, digits)}, {positive}" if len(gains) else ""
        if "evaluation" in seeds and is_all_or_nothing(seeds.evaluation):
            solved = format_share((seeds.evaluation >= SOLVED).sum(), len(seeds))
            mean = seeds[args.measure].mean(skipna=False)
            return f"{mean:.{digits}f}; solved in {solved}"
        bounded = values.between(0, 1).all()
        return format_mean(seeds[args.measure], digits, bounded) if len(seeds) else ""

    of_method = {name: table.set_index("seed") for name, table in rows.groupby("method")}
    if args.minus and args.minus not in of_method:
        refuse(f"--minus {args.minus}: there is no such method")
    others = of_method.pop(args.minus, rows)
    tasks = list(rows.env.unique())
    columns = list(map(name_task, tasks))
    if len(set(columns)) < len(tasks):  # two versions of a task
        columns = tasks
    table = []
    for name in sorted(of_method, key=find_place):
        seeds = of_method[name]
        row = {"": find_method(name).label}
        for task, column in zip(tasks, columns, strict=True):
            row[column] = format_cell(task, seeds[seeds.env == task], others[others.env == task])
        table.append(row)
    return table


def tabulate_settings(rows: pd.DataFrame, args: Args) -> list[dict]:
    """A row per search: its settings by the mean over the seeds, best first. A setting that lacks a
    seed has no mean and comes last.
    """
    table = []
    for (task, method), search in split_search(rows).items():
        scores = search.pivot(index="seed", columns="setting", values=args.measure)
        means = scores.mean(skipna=False).sort_values(ascending=False)
        row = {"": find_method(method).label, "data": name_task(task)}
        row["seeds"] = " ".join(map(str, scores.index))
        for rank, (setting, mean) in enumerate(means.items(), 1):
            row[str(rank)] = f"{setting}: {'-' if np.isnan(mean) else format(mean, '.3f')}"
        table.append(row)
    return table


def tabulate_best(rows: pd.DataFrame, args: Args) -> list[dict]:
    """A row per search: the score of the setting that is best in training, and the best score to be
    expected of --evp settings (table 1 of the paper).
    """
    table = []
    for (task, method), search in split_search(rows).items():
        bests = expected_best(search, args.measure, f"{task}, {method}")[:, 0]  # [seeds, settings]
        if args.evp > bests.shape[1]:
            sys.exit(f"{task}, {method}: fewer settings than --evp {args.evp}")
        # By training: the best held-out score would flatter
        chosen = search.groupby("setting").auc.mean().idxmax()
        of_chosen = search[search.setting == chosen]
        row = {"": find_method(method).label, "data": name_task(task)}
        row |= {"settings": str(bests.shape[1]), "best setting": chosen}
        for column in (args.measure, "own_topic", "others_topics"):
            if column in search:
                row[column.replace("_", " ")] = format_mean(of_chosen[column])
        expected = bests[:, args.evp - 1]
        row[f"EVP of {args.evp}"] = format_mean(expected)
        row["EVP per seed"] = " ".join(f"{value:.4f}" for value in expected)
        table.append(row)
    return table


def read_rows(args: Args) -> pd.DataFrame:
    """A row per run; of methods under conditions these are in place of the task."""
    if args.from_csv:
        if args.csv:
            refuse("--csv writes the rows of --runs; leave out --from-csv")
        if args.task:
            refuse("--task is for --runs, whose evaluations are there; leave out --from-csv")
        names = {"condition": str, "method": str}
        rows = read_table(Path(args.from_csv), ("method", "seed"), dtype=names)
        if "agent" in rows:  # which would count as seeds
            refuse(f"--from-csv {args.from_csv}: has a row per agent, for benchmark/confirm.py")
        rows = rows[[is_wanted(name, args.methods) for name in rows.method]]
        if not len(rows):
            refuse(f"--from-csv {args.from_csv}: has no run of --methods")
    elif args.conditions:
        runs = read_runs(args.runs, args.methods, needed=("return_last_100",))
        rows = make_conditions(runs, args.agents)
    else:
        runs = read_runs(args.runs, args.methods)
        per_task = not (args.search or args.evp)
        rows = make_rows(group_runs(runs, per_task, args.task))
    if args.csv:
        write(Path(args.csv), header(runs), rows)
    rows = rows.rename(columns={"mean_training_return": "auc", "condition": "env"})
    is_search = args.search or args.evp
    if "env" not in rows:
        refuse(f"--from-csv {args.from_csv}: has no column env or condition, it is of another tool")
    if is_search and "timesteps" not in rows:
        refuse(f"--from-csv {args.from_csv}: has no column timesteps, it is of no search")
    if not is_search:
        refuse_repeats(rows, ["env", "method", "seed"])
    if args.measure not in rows:
        refuse(f"--measure {args.measure}: the runs have no such column")
    if "timesteps" not in rows:
        order = order_conditions(rows.env)
        return rows.sort_values("env", key=lambda names: names.map(order.index), kind="stable")
    return rows


def main(args: Args) -> None:
    if args.evp < 0:
        refuse(f"--evp {args.evp}: must not be negative")
    tabulate = tabulate_methods
    if args.search:
        tabulate = tabulate_settings
    if args.evp:
        tabulate = tabulate_best
    print_table(tabulate(read_rows(args), args))


if __name__ == "__main__":
    end_with_reader()
    main(read_flags(Args))
