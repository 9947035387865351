"""Learning curves and a table from run folders: mean over seeds with its 95 % interval.

    python benchmark/plot.py --runs runs/minigrid-quick --out benchmark/results/minigrid
    python benchmark/plot.py --from-csv --out benchmark/results/minigrid       # only draw again

Writes OUT.csv (the curves), OUT.png (drawn from OUT.csv) and OUT_table.csv. Runs are grouped by environment and
--exp-name; a run without summary.json, or cut off, is left out. A curve is the training return, the mean of the last
100 episodes, or the reward of a step's completions, averaged over the agents of a run; then runs with different seeds
give mean and interval.
"""

import csv
import fnmatch
import json
import shlex
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

# 97.5 % quantile of Student's t for 1, 2, ..., 30 degrees of freedom
T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
# Okabe and Ito's colours, which colour-blind readers can tell apart; the dashes help from the eighth method on
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", ":", "-.")
# What may differ between the runs of a group, and does not belong into its command
UNCOMPARED = {"seed", "run_dir", "resume", "save_every", "track", "wandb_project_name", "wandb_entity", "capture_video"}


@dataclass
class Args:
    runs: tuple[str, ...] = ("runs",)
    """folders to search for runs, at any depth"""
    out: str = "benchmark/results/minigrid"
    """beginning of the names of the files that are written"""
    methods: tuple[str, ...] = ()
    """only the experiments with these names, in this order; * stands for anything (empty: all)"""
    threshold: float = 0.8
    """training return of the table's steps to threshold"""
    points: int = 100
    """points of a curve"""
    from_csv: bool = False
    """only draw OUT.png from OUT.csv"""


@dataclass
class Run:
    folder: Path
    summary: dict
    timesteps: np.ndarray
    """environment steps per agent [iterations]; of a language model: steps"""
    returns: np.ndarray
    """training return, or reward, averaged over agents [iterations]"""

    @property
    def task(self) -> str:
        """What was trained on."""
        settings = self.summary["settings"]
        if "base_model" in settings:
            return f"{settings['dataset']}, {settings['partition']}"
        return "+".join(dict.fromkeys(settings.get("env_ids") or [settings["env_id"]]))


def read_run(folder: Path) -> Run:
    """A run from its summary.json and metrics.csv."""
    by_step = defaultdict(list)
    with open(folder / "metrics.csv", newline="") as file:
        for row in csv.DictReader(file):
            x, y = ("timesteps", "return_last_100") if "timesteps" in row else ("step", "reward")
            by_step[int(row[x])].append(float(row[y]))
    timesteps = np.array(sorted(by_step))
    returns = np.array([np.mean(by_step[step]) for step in timesteps])
    known = ~np.isnan(returns)  # before its first episode ends an agent has no return
    return Run(folder, json.loads((folder / "summary.json").read_text()), timesteps[known], returns[known])


def read_groups(args: Args) -> dict[tuple[str, str], list[Run]]:
    """(env, method) -> its runs, one per seed, in the order of the methods asked for."""
    groups = defaultdict(dict)
    for path in sorted(path for folder in args.runs for path in Path(folder).rglob("metrics.csv")):
        folder = path.parent
        if not (folder / "summary.json").exists():
            print(f"{folder}: not finished, left out", file=sys.stderr)
            continue
        run = read_run(folder)
        key = run.task, run.summary["settings"]["exp_name"]
        if args.methods and not any(fnmatch.fnmatchcase(key[1], pattern) for pattern in args.methods):
            continue
        if not run.summary["completed"] or not len(run.returns):
            print(f"{folder}: cut off or without a single episode, left out", file=sys.stderr)
        elif run.summary["seed"] in groups[key]:
            sys.exit(f"{folder}: the same seed and name as {groups[key][run.summary['seed']].folder}; keep one of them")
        else:
            groups[key][run.summary["seed"]] = run
            first = next(iter(groups[key].values()))
            if group_settings(run) != group_settings(first):
                sys.exit(f"{folder}: the same name as {first.folder}, but other settings; give them different names")

    def order(key: tuple[str, str]) -> tuple:
        matches = [k for k, pattern in enumerate(args.methods) if fnmatch.fnmatchcase(key[1], pattern)]
        return key[0], matches[:1], key[1]

    keys = sorted((key for key in groups if groups[key]), key=order)
    return {key: [groups[key][seed] for seed in sorted(groups[key])] for key in keys}


def group_settings(run: Run) -> dict:
    """The settings that all runs of a group have in common."""
    return {name: value for name, value in run.summary["settings"].items() if name not in UNCOMPARED}


def command(run: Run) -> str:
    """The command, with every setting, that `run` and the other seeds of its group come from."""
    words = ["python", f"{run.summary['script']}.py"]
    if Path(__file__).with_name(words[1]).exists():
        words[1] = f"benchmark/{words[1]}"
    for name, value in group_settings(run).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            words += [f"--{flag}", *map(str, value)] if value else []
        elif value not in (None, ""):
            words += [f"--{flag}", str(value)]
    return shlex.join(words)


def interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean over the first axis (seeds) and its 95 % interval by Student's t; NaN limits for a single seed."""
    mean, freedom = values.mean(0), len(values) - 1
    if freedom == 0:
        return mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan)
    t = T_975[freedom - 1] if freedom <= len(T_975) else 1.96 + 2.4 / freedom
    half = t * values.std(0, ddof=1) / np.sqrt(len(values))
    return mean, mean - half, mean + half


def number(value: float) -> str:
    """Six digits, nothing for NaN."""
    return "" if np.isnan(value) else f"{value:.6g}"


def header(groups: dict[tuple[str, str], list[Run]]) -> list[str]:
    """Comment lines: every group's command, its seeds, and the versions."""
    lines = []
    for runs in groups.values():
        seeds = " ".join(str(run.summary["seed"]) for run in runs)
        lines.append(f"# {command(runs[0])}  (--seed {seeds})\n")
    versions = defaultdict(set)
    for run in (run for runs in groups.values() for run in runs):
        for name, version in run.summary["versions"].items():
            versions[name].add(version)
    backends = {run.summary.get("env_backend", "none") for runs in groups.values() for run in runs}
    named = (f"{name} {' or '.join(sorted(each))}" for name, each in versions.items())
    lines.append(f"# {', '.join(named)}\n")
    return [*lines, f"# environments: {', '.join(sorted(backends))}\n"]


def write_curves(path: Path, groups: dict[tuple[str, str], list[Run]], points: int) -> None:
    """OUT.csv: each environment's curves on a common grid of timesteps, where all runs of a method have data."""
    with open(path, "w", newline="") as file:
        file.writelines(header(groups))
        writer = csv.writer(file)
        writer.writerow(("env", "method", "timesteps", "mean", "ci_low", "ci_high", "seeds"))
        for (env, method), runs in groups.items():
            longest = max(run.timesteps[-1] for key, others in groups.items() if key[0] == env for run in others)
            grid = np.unique(np.linspace(longest / points, longest, points).round())
            first, last = max(run.timesteps[0] for run in runs), min(run.timesteps[-1] for run in runs)
            grid = grid[(grid >= first) & (grid <= last)]
            curves = np.stack([np.interp(grid, run.timesteps, run.returns) for run in runs])
            for step, *row in zip(grid, *interval(curves), strict=True):
                writer.writerow((env, method, int(step), *map(number, row), len(runs)))


def own_topic_mean(run: Run) -> float:
    """The mean over agents of the evaluation on their own topics, which follow the common prompts; NaN if none."""
    if not run.task.endswith(", topic"):
        return np.nan
    matrix = [[task["mean"] for task in row.values()] for row in run.summary["evaluation"]["agents"]]
    return float(np.mean([row[1 + agent] for agent, row in enumerate(matrix)] or [np.nan]))


def write_table(path: Path, groups: dict[tuple[str, str], list[Run]], threshold: float) -> None:
    """OUT_table.csv: the evaluation at the end, the mean training return over the budget, the steps to `threshold`."""
    columns, topics = ["env", "method", "timesteps"], any(env.endswith(", topic") for env, _ in groups)
    own_topic = ["own_topic"] if topics else []  # of language models: each agent on the prompts of its own topic
    for name in ("evaluation", *own_topic, "mean_training_return", f"steps_to_{threshold:g}"):
        columns += [name, f"{name}_ci_low", f"{name}_ci_high"]
    columns += ["steps_per_seed", "seeds"]
    rows = []
    for (env, method), runs in groups.items():
        evaluations = np.array([run.summary["evaluation"]["group"] for run in runs], dtype=float)  # None becomes NaN
        areas = np.array([run.returns.mean() for run in runs])
        reached = [run.timesteps[run.returns >= threshold] for run in runs]
        steps = [each[0] if len(each) else np.inf for each in reached]
        row = [env, method, runs[0].summary.get("timesteps_per_agent", runs[0].timesteps[-1])]
        row += map(number, interval(evaluations))
        if topics:
            row += map(number, interval(np.array([own_topic_mean(run) for run in runs])))
        row += map(number, interval(areas))
        if np.isfinite(steps).all():
            row += [f"{value:.0f}" if np.isfinite(value) else "" for value in interval(np.array(steps))]
        else:  # a mean over the lucky seeds alone would flatter
            row += ["not reached", "", ""]
        row.append(" ".join("-" if np.isinf(step) else str(step) for step in steps))
        rows.append([*row, " ".join(str(run.summary["seed"]) for run in runs)])
    with open(path, "w", newline="") as file:
        file.writelines(header(groups))
        file.write("# intervals: 95 %, Student's t over seeds; steps: `not reached` unless every seed got there\n")
        csv.writer(file).writerows([columns, *rows])
    widths = [max(len(str(cell)) for cell in column) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        print("  ".join(f"{cell!s:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def draw(csv_path: Path, png_path: Path) -> None:
    """OUT.png from OUT.csv: one panel per environment, one colour per method."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves = defaultdict(lambda: defaultdict(list))  # env -> method -> rows
    with open(csv_path, newline="") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            values = (row["timesteps"], row["mean"], row["ci_low"], row["ci_high"], row["seeds"])
            curves[row["env"]][row["method"]].append([float(value or "nan") for value in values])
    methods = list(dict.fromkeys(method for env in curves.values() for method in env))
    figure, axes = plt.subplots(1, len(curves), figsize=(4.6 * len(curves), 4.2), squeeze=False, layout="constrained")
    handles, counts = {}, defaultdict(set)
    for axis, (env, by_method) in zip(axes[0], curves.items(), strict=True):
        longest = max(timesteps for rows in by_method.values() for timesteps, *_ in rows)
        unit = 1e6 if longest > 1e4 else 1  # a language model takes tens of steps
        for method, rows in by_method.items():
            timesteps, mean, low, high, seeds = np.array(rows).T
            k = methods.index(method)
            style = {"color": COLOURS[k % len(COLOURS)], "linestyle": DASHES[k // len(COLOURS) % len(DASHES)]}
            line = handles.setdefault(method, axis.plot(timesteps / unit, mean, **style)[0])
            counts[method].add(f"{seeds[0]:.0f}")
            line.set_label(f"{method} ({', '.join(sorted(counts[method]))} seeds)")
            axis.fill_between(timesteps / unit, low, high, color=style["color"], alpha=0.1, linewidth=0)
        axis.set_title(env)
        axis.set_xlabel("environment steps per agent (millions)" if unit > 1 else "steps")
        axis.set_xlim(left=0)
        means = [mean for rows in by_method.values() for _, mean, *_ in rows]
        # Not the intervals: those of two or three seeds can be huge
        low, high = min(0, *means), max(1 if unit > 1 else 0.3, *means)
        axis.set_ylim(low - 0.03 * (high - low), high + 0.03 * (high - low))
        axis.grid(alpha=0.3)
    kind = "return\n(last 100 episodes, mean over agents)" if unit > 1 else "reward\n(of a step, mean over agents)"
    axes[0][0].set_ylabel(f"training {kind}")
    columns = min(3, 2 * len(curves), len(handles))
    figure.legend(handles=list(handles.values()), loc="outside lower center", ncols=columns, frameon=False)
    figure.savefig(png_path, dpi=150)


def main(args: Args) -> None:
    curves, table, picture = (Path(args.out + end) for end in (".csv", "_table.csv", ".png"))
    if not args.from_csv:
        groups = read_groups(args)
        if not groups:
            sys.exit(f"--runs {' '.join(args.runs)}: no finished run of these methods in there")
        curves.parent.mkdir(parents=True, exist_ok=True)
        write_curves(curves, groups, args.points)
        write_table(table, groups, args.threshold)
    elif not curves.is_file():
        sys.exit(f"--from-csv: there is no {curves}")
    draw(curves, picture)
    print(f"wrote {picture}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
