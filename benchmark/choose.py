"""Chooses each method's setting on tuning seeds, with equal effort, and prints its commands for
fresh seeds.

    bash benchmark/sweep.sh doorkey --tune > tuning.txt && python benchmark/run.py tuning.txt
    python benchmark/choose.py --runs runs/doorkey-tune --commands tuning.txt --seeds 1 2 3 4 5

A method is the beginning of --exp-name, before the first `_`; what follows is the setting. For each
task and method the setting with the best mean over the tuning seeds is chosen, the first of equal
ones; a setting without a score for every seed is never chosen. What was compared goes to stderr;
the commands go to stdout, seeds outermost, with the method as --exp-name. Never tune on the seeds
you report: seeds of any tuning run or command are refused.

All methods must have the same number of settings, each with the same number of seeds. The paper's
own grids differ (`sweep.sh minigrid`: 35 settings for isolated agents and FedAvg, 30 for PR-PPO):
--unequal-grids allows that alone.

--halve is a rung of successive halving, for grids that are too large for whole runs: it prints the
better half of each method's settings, with more steps, to be executed and compared again.

    python benchmark/choose.py --runs runs/short --commands short.txt --halve --steps 500000 \\
        --out-dir runs/longer > longer.txt
"""

import re
import shlex
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import pandas as pd
import plot
from arguments import list_commands, read_flags, read_text, refuse


@dataclass
class Args:
    runs: tuple[str, ...]  # folders with the finished runs of the grid
    commands: str = "-"  # file with the commands of these runs, one per line (-: standard input)
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)  # fresh ones, which no tuning run had
    out_dir: str = "runs/selected"  # --run-dir of the printed commands
    steps: int = 0  # of the printed commands (0: as many as the runs have)
    # print the better half of each method's settings, rounded up, with the seeds of tuning, instead
    # of one setting with fresh ones
    halve: bool = False
    # auc: mean training return; final: the last one; evaluation: the mean over the agents at the
    # end
    criterion: Literal["auc", "final", "evaluation"] = "auc"
    method: str = "[^_]+"  # regular expression for the part of --exp-name that is the method
    # allow different numbers of settings, as in the paper's grids: seeds must be equal still, and
    # no run missing
    unequal_grids: bool = False
    unequal: bool = False
    """go on where methods have different numbers of settings or seeds, or runs are missing"""


def score_run(run: plot.Run, criterion: str) -> float:
    """What a run is judged by, the mean over its agents; NaN where there is nothing, or where an
    agent has diverged, whatever it was worth before.
    """
    if run.summary.get("diverged"):
        return float("nan")
    if criterion == "evaluation":
        return pd.to_numeric(run.summary["evaluation"]["group"])
    if criterion == "auc":
        return run.curve.mean()
    return run.curve.iloc[-1]


def parse_line(line: str) -> dict[str, list[str]]:
    """--flag-name value ... -> {flag_name: [value, ...]}, under the present names of flags."""
    flags = {}
    for text in re.split(r"\s--", line)[1:]:
        try:
            name, *values = shlex.split(re.sub("^([a-z_-]+)=", r"\1 ", text))
        except ValueError as error:
            sys.exit(f"{line}: is no command ({error})")
        name = name.replace("-", "_")
        flags[plot.FORMER.get(name, name)] = values
    return flags


def equals(value, words: list[str]) -> bool:
    """Whether a setting has the value that these words of a command line are."""
    values = value if isinstance(value, list) else [value]
    try:
        return list(map(float, values)) == list(map(float, words))
    except (TypeError, ValueError):
        return list(map(str, values)) == words


def comes_from(run: plot.Run, line: str) -> bool:
    """Whether `run` has this command's name and settings, apart from the seed and the like."""
    flags = parse_line(line)
    common = flags.keys() & run.settings.keys()
    compared = {name for name in common if flags[name]} - plot.UNCOMPARED
    if "exp_name" not in compared:
        return False
    return all(equals(run.settings[name], flags[name]) for name in compared)


def replace_flag(line: str, flag: str, value: str) -> str:
    """The command with another value of a flag, all else as it was written."""
    old = rf"(?<=\s)--{flag.replace('-', '[-_]')}[ =]+('[^']*'|\S+)"
    new = f"--{flag} {shlex.quote(value)}"
    if not re.search(old, line):
        return f"{line} {new}"
    return re.sub(old, lambda _: new, line)


def check_effort(scores: pd.DataFrame, args: Args) -> None:
    """Ends with one line unless all methods have been tuned alike."""
    if args.unequal:
        return
    seeds = scores.groupby(["task", "method", "setting"]).size()  # of each setting
    efforts = {}
    for group, counts in seeds.groupby(level=["task", "method"]):
        efforts[group] = (len(counts), tuple(sorted(set(counts))))
    if args.unequal_grids:
        compared = {num_seeds for _, num_seeds in efforts.values()}
        equal = len(compared) == 1 and len(compared.pop()) == 1
    else:
        equal = len(set(efforts.values())) == 1
    if equal:
        return
    shown = []
    for (_, method), (num_settings, num_seeds) in efforts.items():
        shown.append(f"{method} {num_settings} x {' or '.join(map(str, num_seeds))}")
    hint = "--unequal to go on"
    if not args.unequal_grids:
        hint += "; --unequal-grids if only the numbers of settings may differ"
    sys.exit(f"unequal effort, settings x seeds: {', '.join(shown)} ({hint})")


def compare(groups: dict[tuple[str, str], list[plot.Run]], args: Args) -> pd.DataFrame:
    """A row per task, method and setting: its mean, whether it is chosen (with --halve: kept), the
    score of every tuning seed.
    """
    key = ["task", "method", "setting"]
    rows = []
    for (task, name), runs in groups.items():
        match = re.match(args.method, name)
        method = match[0] if match else name
        for run in runs:
            rows.append((task, method, name, run.settings["seed"], score_run(run, args.criterion)))
    scores = pd.DataFrame(rows, columns=[*key, "seed", "score"])
    check_effort(scores, args)
    mean = scores.groupby(key).score.agg(lambda seeds: seeds.mean(skipna=False))
    seeds = scores.groupby(key).seed.nunique()
    seeds_of_method = scores.groupby(key[:2]).seed.nunique()
    incomplete = seeds < seeds_of_method.reindex(seeds.index.droplevel("setting")).to_numpy()
    for _, _, name in mean.index[incomplete]:
        print(f"{name} is not chosen: it lacks a seed that other settings have", file=sys.stderr)
    mean[incomplete] = float("nan")
    of_method = mean.groupby(level=key[:2])
    ranks = of_method.rank(ascending=False, method="first")  # NaN where there is no score
    last_rank = 1
    if args.halve:
        last_rank = of_method.transform("size").add(1) // 2
    chosen = ranks <= last_rank
    if not chosen.groupby(level=key[:2]).any().all():
        sys.exit(f"--criterion {args.criterion}: a method has no setting with it")
    table = pd.DataFrame({"mean": mean, "chosen": chosen.map({True: "*", False: ""})})
    return table.join(scores.pivot(index=key, columns="seed", values="score"))


def replace_steps(line: str, run: plot.Run, args: Args) -> str:
    """The command of `run` with --steps, by the name that its script has for them."""
    names = ("total_timesteps", "total_steps", "total_iterations")
    name = next(name for name in names if name in run.settings)
    if args.halve and args.steps <= run.settings[name]:
        refuse(
            f"--steps {args.steps}: --halve needs more than the {run.settings[name]} of the runs"
        )
    return replace_flag(line, name.replace("_", "-"), str(args.steps))


def main(args: Args) -> None:
    if args.steps < 0:
        refuse(f"--steps {args.steps}: must not be negative")
    try:
        re.compile(args.method)
    except re.error as error:
        refuse(f"--method {args.method}: is no regular expression ({error})")
    text = sys.stdin.read() if args.commands == "-" else read_text(args.commands)
    named = [line for line in list_commands(text) if re.search(r"--exp[-_]name", line)]
    lines = [line for line in named if "--seed" in line]
    planned = Counter()
    for line in lines:
        flags = parse_line(line)
        try:
            planned[flags["exp_name"][0], int(flags["seed"][0])] += 1
        except (LookupError, ValueError):
            sys.exit(f"{line}: must have an --exp-name and a number behind --seed")
    tuned = {seed for _, seed in planned}
    for folder in plot.run_folders(args.runs):  # unfinished runs too
        tuned.add(plot.read_settings(folder)[1].get("seed"))
    seen = sorted(tuned & set(args.seeds))
    if seen and not args.halve:
        seeds = " ".join(map(str, seen))
        refuse(f"--seeds {seeds}: tuned on; never tune on the seeds you report")
    groups = plot.read_groups(plot.Args(runs=args.runs))
    finished = Counter()
    for (_, name), runs in groups.items():
        finished.update((name, run.settings["seed"]) for run in runs)
    missing = planned - finished
    if not groups or (missing and not args.unequal):
        counts = f"{missing.total()} of {len(lines)}"
        sys.exit(f"{counts} --commands have no finished run in --runs (--unequal to go on)")
    table = compare(groups, args)
    print(table.to_string(float_format="%.4f", na_rep="-"), file=sys.stderr)
    chosen = []
    for task, method, name in table.index[table.chosen == "*"]:
        run = groups[task, name][0]
        origins = [line for line in lines if comes_from(run, line)]
        if not origins:
            sys.exit(f"--commands {args.commands}: none has the name and settings of {run.folder}")
        line = replace_flag(origins[0], "run-dir", args.out_dir)
        if args.halve or args.steps:
            line = replace_steps(line, run, args)
        if not args.halve:
            line = replace_flag(line, "exp-name", method)
        chosen.append((lines.index(origins[0]), line))
    seeds = args.seeds
    if args.halve:
        seeds = sorted({run.settings["seed"] for runs in groups.values() for run in runs})
    for seed in seeds:
        for _, line in sorted(chosen):
            print(replace_flag(line, "seed", str(seed)))


if __name__ == "__main__":
    main(read_flags(Args))
