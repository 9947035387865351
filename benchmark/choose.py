"""Chooses each method's setting on tuning seeds, with equal effort, and prints its commands for fresh seeds.

    bash benchmark/sweep.sh doorkey --tune > tuning.txt && python benchmark/run.py tuning.txt
    python benchmark/choose.py --runs runs/doorkey-tune --commands tuning.txt --out-dir runs/doorkey --seeds 1 2 3 4 5

A method is the beginning of --exp-name, before the first `_`; what follows tells the setting. For each task and method
the setting with the best mean over the tuning seeds is chosen, the first of equal ones. What was compared goes to
stderr; the commands go to stdout, seeds outermost, with the method as --exp-name. Never tune on the seeds you report:
seeds of any tuning run or command are refused.
"""

import re
import shlex
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pandas as pd
import plot
import tyro


@dataclass
class Args:
    runs: tuple[str, ...]  # folders with the finished runs of the grid
    commands: str = "-"  # file with the commands of these runs, one per line (-: standard input)
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)  # fresh ones, which no tuning run had
    out_dir: str = "runs/selected"  # --run-dir of the printed commands
    criterion: Literal["auc", "final", "evaluation"] = "auc"  # auc: mean training return; final: the last one
    method: str = "[^_]+"  # regular expression for the part of --exp-name that is the method
    unequal: bool = False  # go on where methods have different numbers of settings or seeds, or runs are missing


def score(run: plot.Run, criterion: str) -> float:
    """What a run is judged by, the mean over its agents; NaN where there is nothing."""
    if criterion == "evaluation":
        return pd.to_numeric(run.summary["evaluation"]["group"])
    return run.curve.mean() if criterion == "auc" else run.curve.iloc[-1]


def read_flags(line: str) -> dict[str, list[str]]:
    """--flag-name value ... -> {flag_name: [value, ...]}, under the present names of flags."""
    parts = [shlex.split(re.sub("^([a-z_-]+)=", r"\1 ", part)) for part in re.split(r"\s--", line)[1:]]
    return {plot.FORMER.get(name := words[0].replace("-", "_"), name): words[1:] for words in parts}


def comes_from(run: plot.Run, line: str) -> bool:
    """Whether `run` has the name and all settings of this command, but for the seed and the like."""

    def same(value, words: list[str]) -> bool:
        values = value if isinstance(value, list) else [value]
        try:
            return list(map(float, values)) == list(map(float, words))
        except (TypeError, ValueError):
            return list(map(str, values)) == words

    flags = read_flags(line)
    compared = {name for name in flags.keys() & run.settings.keys() if flags[name]} - plot.UNCOMPARED
    return "exp_name" in compared and all(same(run.settings[name], flags[name]) for name in compared)


def replace(line: str, flag: str, value: str) -> str:
    """The command with another value of a flag, all else as it was written."""
    old, new = rf"(?<=\s)--{flag.replace('-', '[-_]')}[ =]+('[^']*'|\S+)", f"--{flag} {shlex.quote(value)}"
    return re.sub(old, lambda _: new, line) if re.search(old, line) else f"{line} {new}"


def compare(groups: dict[tuple[str, str], list[plot.Run]], args: Args) -> pd.DataFrame:
    """A row per task, method and setting: its mean, whether it is chosen, the score of every tuning seed."""
    key, rows = ["task", "method", "setting"], []
    for (task, name), runs in groups.items():
        own = (task, (re.match(args.method, name) or [name])[0], name)
        rows += [(*own, run.settings["seed"], score(run, args.criterion)) for run in runs]
    rows = pd.DataFrame(rows, columns=[*key, "seed", "score"])
    effort = rows.groupby(key).size().groupby(level=key[:2]).agg(lambda seeds: (len(seeds), *sorted(set(seeds))))
    if effort.nunique() > 1 and not args.unequal:
        told = (f"{method} {n} x {' or '.join(map(str, seeds))}" for (_, method), (n, *seeds) in effort.items())
        sys.exit(f"unequal effort, settings x seeds: {', '.join(told)} (--unequal to go on)")
    mean = rows.groupby(key).score.agg(lambda seeds: seeds.mean(skipna=False))
    best = mean.fillna(-float("inf")).groupby(level=key[:2]).idxmax()  # of equal ones the first
    if mean[best].isna().any():
        sys.exit(f"--criterion {args.criterion}: a method has no setting with it")
    table = pd.DataFrame({"mean": mean, "chosen": ["*" if own in set(best) else "" for own in mean.index]})
    return table.join(rows.pivot(index=key, columns="seed", values="score"))


def main(args: Args) -> None:
    text = sys.stdin.read() if args.commands == "-" else Path(args.commands).read_text()
    lines = [line for line in text.splitlines() if re.search(r"--exp[-_]name", line) and "--seed" in line]
    asked = Counter((flags["exp_name"][0], int(flags["seed"][0])) for flags in map(read_flags, lines))
    tuned = {seed for _, seed in asked}
    tuned |= {
        plot.read_settings(folder)[1].get("seed") for folder in plot.run_folders(args.runs)
    }  # unfinished ones too
    if seen := sorted(tuned & set(args.seeds)):
        sys.exit(f"--seeds {' '.join(map(str, seen))}: tuned on; never tune on the seeds you report")
    groups = plot.read_groups(plot.Args(runs=args.runs))
    missing = asked - Counter((name, run.settings["seed"]) for (_, name), runs in groups.items() for run in runs)
    if not groups or missing and not args.unequal:
        sys.exit(f"{missing.total()} of {len(lines)} --commands have no finished run in --runs (--unequal to go on)")
    table = compare(groups, args)
    print(table.to_string(float_format="%.4f", na_rep="-"), file=sys.stderr)
    chosen = []
    for task, method, name in table.index[table.chosen == "*"]:
        if not (found := [line for line in lines if comes_from(groups[task, name][0], line)]):
            sys.exit(f"--commands {args.commands}: none has the name and settings of {groups[task, name][0].folder}")
        chosen.append((lines.index(found[0]), replace(replace(found[0], "exp-name", method), "run-dir", args.out_dir)))
    for seed in args.seeds:
        for _, line in sorted(chosen):
            print(replace(line, "seed", str(seed)))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
