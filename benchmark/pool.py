"""Adds runs with other seeds to results, whose own runs may be gone.

    python benchmark/plot.py --runs runs/goals-results --out new --per-task --matrix
    python benchmark/pool.py --out benchmark/results/goals --new new

OUT.csv, OUT_runs.csv and, if it is there, OUT_matrix.csv become those of all seeds, and plot.py
draws OUT.png, OUT_table.csv and OUT_matrix.png from them. A mean with its interval is that of all
seeds exactly, because the interval of a set of seeds determines its variance. Of a curve those
points stay that both sets have. A method must have had the same settings in both.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import plot
from arguments import read_flags, refuse
from plot import comments_of, read_table, write
from scipy import stats

SEEDS = re.compile(r"^# (.+)  \(--seed ([\d ]+)\)$")
# What names a group of runs in its command
NAMES = ("--exp-name", "--env-id", "--env-ids", "--base-model", "--dataset", "--partition")


@dataclass
class Args:
    out: str = "benchmark/results/goals"
    """beginning of the names of the results' files"""
    new: str = "new"
    """the same of the results of other seeds"""


def sum_squares(half: pd.Series, seeds: pd.Series) -> pd.Series:
    """The sum of squared deviations from the mean behind half an interval by Student's t."""
    quantile = stats.t.ppf(0.975, seeds - 1)
    return ((half / quantile) ** 2 * seeds * (seeds - 1)).fillna(0)


def pool_means(old: pd.DataFrame, new: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Means and intervals of two sets of seeds as those of all of them.

    Columns: keys, mean, ci_low, ci_high, seeds. A method, named by all keys but the last, that one
    table only has stays as it is; of others the rows that both have. No mean (NaN) on one side
    gives none.
    """
    order = pd.concat((old[keys], new[keys])).drop_duplicates()
    both = order.merge(old, how="left", on=keys)
    both = both.merge(new, how="left", on=keys, suffixes=("_old", "_new"))
    has_row = both[["seeds_old", "seeds_new"]].notna()
    methods = [both[key] for key in keys[:-1]]
    in_both = has_row.groupby(methods).transform("any").all(axis=1)
    kept = has_row.all(axis=1) | ~in_both
    fewer_rows = has_row.groupby(methods).sum().min(axis=1)
    if (kept.groupby(methods).sum() < 0.5 * fewer_rows).any():
        refuse("--new: its curves are at other points than those of --out")
    both = both[kept]
    parts = []
    for name in ("old", "new"):
        seeds = both[f"seeds_{name}"].fillna(0)
        half = both[f"ci_high_{name}"] - both[f"mean_{name}"]
        mean = both[f"mean_{name}"].where(seeds > 0, 0)  # NaN where an agent has diverged
        parts.append((seeds, mean, sum_squares(half, seeds)))
    (n, mean, squares), (m, other_mean, other_squares) = parts
    seeds = n + m
    pooled = (n * mean + m * other_mean) / seeds
    squares = squares + other_squares + n * m / seeds * (mean - other_mean) ** 2
    half = stats.t.ppf(0.975, seeds - 1) * np.sqrt(squares / (seeds - 1) / seeds)
    result = both[keys].assign(mean=pooled, ci_low=pooled - half, ci_high=pooled + half)
    return result.assign(seeds=seeds.astype(int)).reset_index(drop=True)


def pool_runs(old: pd.DataFrame, new: pd.DataFrame) -> pd.DataFrame:
    """The rows per run of both, in the order of the old ones, each method's by seed."""
    keys = ["env", "method", "seed"]
    steps = [name for name in old if name.startswith("steps_to_")]
    if steps != [name for name in new if name.startswith("steps_to_")]:
        refuse(f"--new: has another --threshold than {' '.join(steps)}")
    for method in {*old.method} & {*new.method}:
        tasks = [{*rows[rows.method == method].env} for rows in (old, new)]
        if tasks[0] != tasks[1]:
            names = [", ".join(sorted(each)) for each in tasks]
            refuse(f"--new: {method} has the tasks {names[1]}, not {names[0]}; see --per-task")
    rows = pd.concat((old, new), ignore_index=True)
    for _, row in rows[rows.duplicated(keys)].iterrows():
        refuse(f"--new: seed {row.seed} of {row.method} is there already")
    groups = rows.groupby(keys[:2], sort=False).ngroup()
    return rows.assign(group=groups).sort_values(["group", "seed"]).drop(columns="group")


def read_flags_of(command: str) -> dict[str, list[str]]:
    """The flags of a command with their values; those of --no-x are the value "no" of --x."""
    flags = {}
    for word in shlex.split(command):
        if word.startswith("--no-"):
            flags[f"--{word.removeprefix('--no-')}"] = ["no"]
        elif word.startswith("--"):
            values = flags[word] = []
        elif flags:
            values.append(word)
    if flags.get("--aggregation") in (["policy"], ["weights"]):  # of version 0.1
        flags.pop("--prox-coef", None)  # had no effect
    return flags


def pool_comments(old: str, new: str) -> str:
    """The comment lines of both files; a command that both have names all its seeds.

    Ends with one line where a group had other settings. Flags that only one command has are newer
    than the other; --device auto of early runs on MiniGrid is the cpu that later ones record.
    """
    commands = {}  # group -> command, seeds
    others = []
    for line in (old + new).splitlines():
        match = SEEDS.match(line)
        if not match:
            others.append(line)
            continue
        command, seeds = match.groups()
        flags = read_flags_of(command)
        group = tuple(tuple(flags.get(name, ())) for name in NAMES)
        before, seeds_before = commands.get(group, (command, ""))
        flags_before = read_flags_of(before)
        for name in flags.keys() & flags_before.keys():
            both = flags[name], flags_before[name]
            if name == "--device" and sorted(both) == [["auto"], ["cpu"]]:
                continue
            if flags[name] != flags_before[name]:
                value_before = " ".join(flags_before[name]) or "yes"
                value_now = " ".join(flags[name]) or "yes"
                values = f"{value_before} before, {value_now} now"
                refuse(f"--new: {' '.join(flags['--exp-name'])} has another {name}: {values}")
        numbers = {*map(int, seeds.split()), *map(int, seeds_before.split())}
        commands[group] = command, " ".join(map(str, sorted(numbers)))
    lines = [f"# {command}  (--seed {seeds})" for command, seeds in commands.values()]
    return "".join(f"{line}\n" for line in (*lines, *dict.fromkeys(others)))


def main(args: Args) -> None:
    old_runs = read_table(f"{args.out}_runs.csv")
    new_runs = read_table(f"{args.new}_runs.csv")
    tables = {"_runs": pool_runs(old_runs, new_runs)}
    old_curves = read_table(f"{args.out}.csv")
    if "settings" in old_curves:
        refuse(f"--out {args.out}: is of a search, whose limits are no intervals over seeds")
    new_curves = read_table(f"{args.new}.csv")
    if "settings" in new_curves:
        refuse(f"--new {args.new}: is of a search, whose limits are no intervals over seeds")
    keys = [*old_curves.columns[:3]]
    tables[""] = pool_means(old_curves, new_curves, keys)
    if Path(f"{args.out}_matrix.csv").is_file():
        matrices = []
        for name, runs in ((args.out, old_runs), (args.new, new_runs)):
            matrix = read_table(f"{name}_matrix.csv")
            numbers = runs.groupby("method").seed.nunique()
            matrices.append(matrix.assign(seeds=matrix.method.map(numbers)))
        pooled = pool_means(*matrices, ["method", "agent", "task"])
        tables["_matrix"] = pooled.drop(columns="seeds")
    comments = {}
    for name in tables:
        pair = [comments_of(Path(f"{folder}{name}.csv")) for folder in (args.out, args.new)]
        comments[name] = pool_comments(*pair)
    for name, table in tables.items():
        write(Path(f"{args.out}{name}.csv"), comments[name], table)
    plot.main(plot.Args(out=args.out, from_csv=True))


if __name__ == "__main__":
    main(read_flags(Args))
