"""Draws runs: learning curves, searches, and every agent on every task.

    python benchmark/plot.py --runs runs/minigrid-quick --out minigrid-quick
    python benchmark/plot.py --search --runs runs/skills-tune --out search
    python benchmark/plot.py --search --measure win_rate --runs runs/llm --methods "*-ppo_*"
    python benchmark/plot.py --from-csv --out benchmark/results/sb3  # again, from CSV files

Writes OUT.csv and, from it, OUT.png. A curve is the training return, the mean of the last 100
episodes, or the reward of a step's completions, averaged over the agents of a run; then runs with
different seeds give mean and interval. A panel is a task: agents with different tasks have one
each. OUT_runs.csv has a row per run, which table.py tabulates.
"""

import math
import os
import re
import textwrap
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from arguments import read_flags, refuse
from runs import (
    Groups,
    Run,
    comments_of,
    expected_best,
    group_runs,
    has_diverged,
    header,
    make_rows,
    mean_interval,
    read_runs,
    read_table,
    refuse_repeats,
    report,
    split_search,
    with_interval,
    write,
)
from styles import count_seeds, find_place, name_task, style_methods

plt.switch_backend("Agg")  # of files: there may be no display
POINTS = 100  # of a curve
AXES = {
    "timesteps": (
        "environment steps per agent (millions)",
        "training return\n(last 100 episodes, ",
    ),
    "step": ("steps", "training reward or success\n(of a step, "),
    "iteration": ("iterations", "training return\n(last 100 episodes, "),
    "settings": ("settings tried", "evaluation of the best\n("),
}
WIN_RATES = ("win_rate", "sampled_win_rate")


@dataclass
class Args:
    runs: tuple[str, ...] = ("runs",)
    """folders to search for runs, at any depth"""
    out: str = "curves"
    """beginning of the names of the files that are written"""
    methods: tuple[str, ...] = ("*",)
    """only the experiments with these names, in which * stands for anything"""
    task: str = ""
    """judge all agents of a run by this task of its evaluations, instead of each by its own"""
    matrix: bool = False
    """also OUT_matrix.csv and OUT_matrix.png: every agent's evaluation on every task"""
    # draw what a search finds: the best evaluation to be expected of 1, 2, ... settings that are
    # tried
    search: bool = False
    # of --search: the win rates are those of benchmark/judge.py (the paper's figures 2 and 3)
    measure: Literal["evaluation", "win_rate", "sampled_win_rate"] = "evaluation"
    from_csv: bool = False
    """only draw the figures again, from OUT.csv and, where it is, OUT_matrix.csv"""


# Tables


def make_curves(groups: Groups) -> pd.DataFrame:
    """Each task's curves on a common grid, where all runs of a method have data.

    The grid is of what these runs are counted in: timesteps, steps or iterations. A run of which an
    agent has diverged has no curve.
    """
    longest = defaultdict(int)
    curves = {}
    for key, runs in groups.items():
        of_method = []
        for run in runs:
            if has_diverged(run):
                report(run.folder, "no curve, because an agent has diverged")
            else:
                of_method.append(run.curve)
        if of_method:
            curves[key] = of_method
    if not curves:
        refuse("--runs: in every run an agent has diverged")
    for (env, _), of_method in curves.items():
        longest[env] = max(longest[env], *(curve.index[-1] for curve in of_method))
    tables = []
    for (env, method), of_method in curves.items():
        grid = np.linspace(longest[env] / POINTS, longest[env], POINTS)
        grid = np.unique(grid.round().astype(int))
        first = max(curve.index[0] for curve in of_method)
        last = min(curve.index[-1] for curve in of_method)
        grid = grid[(grid >= first) & (grid <= last)]
        seeds = {k: np.interp(grid, curve.index, curve) for k, curve in enumerate(of_method)}
        start = pd.DataFrame({"env": env, "method": method, of_method[0].index.name: grid})
        interval = with_interval(pd.DataFrame(seeds))
        tables.append(pd.concat((start, interval), axis=1).assign(seeds=len(of_method)))
    return pd.concat(tables)


def make_search(rows: pd.DataFrame, measure: str = "evaluation") -> pd.DataFrame:
    """Expected validation performance (paper, figures 2 and 3) over the settings that are tried.

    The mean over the seeds' searches; the limits are a standard deviation within a search away.
    """
    if measure not in rows:
        refuse(f"--measure {measure}: the runs have none; see benchmark/judge.py")
    curves = []
    for (env, method), search in split_search(rows).items():
        bests = expected_best(search, measure, f"{env}, {method}")
        mean, variance = bests.mean(axis=0)
        curve = {"env": env, "method": method, "settings": np.arange(1, len(mean) + 1)}
        curve |= {"mean": mean, "ci_low": mean - variance**0.5, "ci_high": mean + variance**0.5}
        curves.append(pd.DataFrame(curve).assign(seeds=len(bests)))
    return pd.concat(curves)


def make_matrix(runs: list[Run]) -> pd.DataFrame:
    """Every agent's evaluation on every task: the mean over seeds and its interval."""
    key = ["method", "agent", "task"]
    rows = []
    for run in runs:
        for agent, row in enumerate(run.summary["evaluation"]["agents"]):
            for task, cell in row.items():
                rows.append([run.name, agent, task, run.seed, cell["mean"]])
    if not rows:
        refuse("--matrix: the runs have no evaluations")
    cells = refuse_repeats(pd.DataFrame(rows, columns=[*key, "seed", "value"]), [*key, "seed"])
    groups = cells.groupby(key, sort=False).value
    table = pd.DataFrame([[*names, *mean_interval(values)] for names, values in groups])
    return table.set_axis([*key, "mean", "ci_low", "ci_high"], axis=1)


# Figures


def make_axes(down: int, across: int, width: float, height: float, **options):
    """A figure with this many panels."""
    options = {"squeeze": False, "layout": "constrained"} | options
    return plt.subplots(down, across, figsize=(width, height), **options)


def save(figure, path: Path, **options) -> None:
    """Write a figure, and close it."""
    figure.savefig(path, **{"dpi": 150} | options)
    plt.close(figure)
    print(f"wrote {path}")


def spread(heights: list[float], gap: float) -> list[float]:
    """These heights moved down until all are `gap` apart."""
    places = {}
    highest = np.inf
    for number in np.argsort(heights)[::-1]:
        places[number] = min(heights[number], highest)
        highest = places[number] - gap
    return [places[number] for number in range(len(heights))]


def draw_curves(curves: pd.DataFrame, png_path: Path, measure: str = "evaluation"):
    """A panel per task, a line per method; returns the figure.

    Intervals lie behind all curves, and do not decide what part of the axis is shown: those of two
    or three seeds can be huge. measure: of a search.
    """
    styles = style_methods(curves.method.unique())
    envs = list(curves.env.unique())
    figure, axes = make_axes(1, len(envs), 4.6 * len(envs), 4.2)
    lines = {}  # method -> its line in the legend
    counts = defaultdict(set)  # method -> numbers of its seeds
    for axis, env in zip(axes[0], envs, strict=True):
        panel = curves[curves.env == env]
        x = next(name for name in AXES if name in panel and panel[name].notna().all())
        control = x == "timesteps"
        unit = 1e6 if control else 1
        for method, rows in panel.groupby("method", sort=False):
            style = styles[method]
            xs = rows[x] / unit
            band = axis.fill_between(xs, rows.ci_low, rows.ci_high, color=style.colour, zorder=1)
            band.set(alpha=0.1 if len(styles) <= 4 else 0.06, linewidth=0)
            (line,) = axis.plot(xs, rows["mean"], style.dashes, color=style.colour, zorder=3)
            lines.setdefault(method, line)
            counts[method].add(str(rows.seeds.iloc[0]))
        axis.set_title(name_task(env))
        x_label, y_label = AXES[x]
        axis.set_xlabel(x_label)
        if measure in WIN_RATES:
            y_label = y_label.replace("evaluation", measure.replace("_", " "))
        if axis is axes[0][0]:
            axis.set_ylabel(f"{y_label}mean over agents)")
        axis.set_xlim(left=1 if x == "settings" else 0)
        low = min(0, panel["mean"].min())
        high = max(1 if control else 0.3, panel["mean"].max())
        if measure in WIN_RATES:
            low = curves.ci_low.min()
            high = curves.ci_high.max()
        axis.set_ylim(low - 0.03 * (high - low), high + 0.03 * (high - low))
        axis.grid(alpha=0.3)
    for method, line in lines.items():
        number = ", ".join(sorted(counts[method]))
        line.set_label(f"{styles[method].label} ({count_seeds(number)})")
    handles = [lines[method] for method in styles]
    columns = min(3, 2 * len(envs), len(lines))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
    save(figure, png_path, bbox_inches="tight")  # a legend may be wider than a panel
    return figure


def draw_matrix(table: pd.DataFrame):
    """A panel per method, at most seven in a row, agents down and tasks across. Returns the
    figure.
    """
    methods = sorted(table.method.unique(), key=find_place)
    tasks = list(table.task.unique())
    styles = style_methods(methods)
    start = 0
    if len(tasks) > 1:  # what differs is enough: 5x5 of DoorKey-5x5, S3R1 of KeyCorridorS3R1
        start = re.match(r"(.*[a-z\- ])?", os.path.commonprefix(tasks)).end()
    highest = max(1, table["mean"].max())
    down = math.ceil(len(methods) / 7)
    across = math.ceil(len(methods) / down)
    figure, axes = make_axes(down, across, 2.6 * across, 3.1 * down)
    for axis in axes.flat[len(methods) :]:
        axis.set_axis_off()
    for axis, method in zip(axes.flat, methods, strict=False):
        rows = table[table.method == method]
        values = rows.pivot(index="agent", columns="task", values="mean").reindex(columns=tasks)
        values.columns = [task[start:].removesuffix("-v0") for task in tasks]
        draw_cells(axis, values, highest)
        axis.set_title(textwrap.fill(styles[method].label, 20))
    figure.supxlabel(tasks[0][:start].rstrip("-"), fontsize="medium")
    return figure


def draw_cells(axis, values: pd.DataFrame, highest: float) -> None:
    """A panel with a coloured number for each agent, down, and task, across; colours up to
    `highest`.
    """
    axis.imshow(values, vmin=0, vmax=highest, cmap="cividis")
    digits = 2 if highest <= 1 else 0
    for (row, column), value in np.ndenumerate(values):
        colour = "white" if value < 0.6 * highest else "black"
        axis.text(column, row, f"{value:.{digits}f}", ha="center", va="center", color=colour)
    axis.set_xticks(range(len(values.columns)), values.columns, rotation=20)
    axis.set_yticks(range(len(values)), [f"agent {agent}" for agent in values.index])


def draw(csv_path: Path, png_path: Path):
    """OUT.png from OUT.csv; returns the figure."""
    table = read_table(csv_path, ("env", "method", "mean", "ci_low", "ci_high", "seeds"))
    measure = re.search("^# measure: (.*)$", comments_of(csv_path), re.MULTILINE)
    return draw_curves(table, png_path, measure[1] if measure else "evaluation")


def main(args: Args) -> None:
    path = Path(f"{args.out}.csv")
    matrix = Path(f"{args.out}_matrix.csv")
    if args.from_csv:
        if not path.is_file():
            refuse(f"--from-csv: there is no {path}")
    else:
        runs = read_runs(args.runs, args.methods)
        groups = group_runs(runs, per_task=not args.search, task=args.task)
        rows = make_rows(groups)
        comments = header(runs)
        if args.search:
            curves = make_search(rows, args.measure)
            comments += f"# measure: {args.measure}\n"
        else:
            curves = make_curves(groups)
        write(path, comments, curves)
        write(Path(f"{args.out}_runs.csv"), header(runs), rows)
        if args.matrix:
            write(matrix, header(runs), make_matrix(runs))
    if matrix.is_file() and (args.matrix or args.from_csv):
        save(draw_matrix(read_table(matrix)), matrix.with_suffix(".png"))
    draw(path, path.with_suffix(".png"))


if __name__ == "__main__":
    main(read_flags(Args))
