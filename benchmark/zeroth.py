"""Runs of s2zpo_mujoco.py: returns over trajectories and bits, and over a shared grid.

    bash benchmark/cartpole.sh quick | python benchmark/run.py
    python benchmark/zeroth.py --runs runs/s2zpo-quick --out s2zpo-quick
    python benchmark/zeroth.py --from-csv --out benchmark/results/s2zpo  # again, from CSV files

Writes OUT_runs.csv (a row per run) and OUT.csv (curves), draws OUT.png from it and prints a table.
A method is an algorithm; a cell is a pair of mu and eta, which all algorithms of a task have in
common; a seed that has not all cells is left out. The grid is the mean over all cells, within a
seed. The best cell of a seed is the one with the highest mean over the *other* seeds, so that
chance is not rewarded; with one seed it is that seed's best. Curves are means over seeds of the
best cells, with 95 % intervals by Student's t.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from arguments import read_flags, refuse
from plot import make_axes, save
from runs import (
    CHANGED_ON_RESUME,
    Run,
    find_difference,
    header,
    read_runs,
    read_table,
    refuse_repeats,
    with_interval,
    write,
)
from styles import BLACK, BLUE, VERMILION
from table import format_mean, print_table

ALGORITHMS = {
    "par": ("Par-S2ZPO", BLUE),
    "fedavg": ("FedAvg-S2ZPO", VERMILION),
    "central": ("central S2ZPO", BLACK),
}
COUNTS = ["iteration", "trajectories", "bits"]
AXES = ("trajectories", "bits")  # of the figure; updates are proportional to trajectories
CELL = ["mu", "eta"]
KEY = ["task", "algorithm", *CELL, "seed"]


@dataclass
class Args:
    runs: tuple[str, ...] = ("runs",)  # folders to search for runs, at any depth
    out: str = "benchmark/results/s2zpo"  # beginning of the names of the files that are written
    from_csv: bool = False
    """only print the table and draw OUT.png, from OUT_runs.csv and OUT.csv"""


def average_agents(run: Run) -> pd.DataFrame:
    """The curve of a run: mean return of its agents by iteration, with what was sent by then."""
    curve = run.table.groupby("iteration")[["episodic_return", "trajectories", "bits"]]
    return curve.mean().reset_index()


def make_row(run: Run) -> dict:
    """The row of a run in OUT_runs.csv."""
    settings = run.settings
    row = {"task": run.task, "algorithm": settings["algorithm"]}
    row |= {name: settings[name] or "default" for name in CELL}
    row |= {"seed": run.seed, "parameters": run.summary["parameters"]}
    row |= {"iterations": run.summary["iterations"], "trajectories": run.summary["trajectories"]}
    row["bits"] = run.summary["communication_bits"]
    row["statistics_bits"] = run.summary["statistics_bits"]
    row["over_the_run"] = average_agents(run).episodic_return.mean(skipna=False)
    return row | {"evaluation": run.evaluation}


def make_rows(runs: list[Run]) -> pd.DataFrame:
    """A row per run, of the seeds that have all cells of their task and algorithm.

    Ends with one line where runs of one task and algorithm had different settings, apart from the
    cell.
    """
    first = {}
    for run in runs:
        other = first.setdefault((run.task, run.settings["algorithm"]), run)
        values = find_difference(other, run, {*CELL, "exp_name"} | CHANGED_ON_RESUME)
        if values:
            sys.exit(f"{run.task}, {run.settings['algorithm']} has runs with {values}")
    rows = refuse_repeats(pd.DataFrame(map(make_row, runs)), KEY)
    return keep_complete(rows.sort_values(KEY, key=lambda values: values.map(str)))


def keep_complete(rows: pd.DataFrame) -> pd.DataFrame:
    """The runs of the seeds that have all cells of their task and algorithm; reports the others.

    Ends with one line where these are most: maybe one run of another cell lies among them.
    """
    kept = []
    for (task, algorithm), group in rows.groupby(["task", "algorithm"], sort=False):
        name = f"{task}, {algorithm}"
        cells = len(group[CELL].drop_duplicates())
        sizes = group.groupby("seed").size()
        if (sizes < cells).mean() > 0.5:
            sys.exit(f"{name}: most of {len(sizes)} seeds have not all of {cells} cells")
        for seed, size in sizes[sizes < cells].items():
            print(f"{name}: seed {seed} has {size} of {cells} cells, left out", file=sys.stderr)
        kept.append(group[group.seed.map(sizes) == cells])
    return pd.concat(kept)


def choose_cells(rows: pd.DataFrame, column: str) -> dict[int, tuple]:
    """The best cell of each seed: seed -> (mu, eta). rows: of one task and algorithm."""
    scores = rows.pivot(index="seed", columns=CELL, values=column)
    chosen = {}
    for seed in scores.index:
        others = scores.drop(index=seed) if len(scores) > 1 else scores
        means = others.mean(skipna=False).fillna(-math.inf)
        chosen[seed] = means.idxmax()
    return chosen


def take_best(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """The rows of the best cells, one for each seed."""
    chosen = choose_cells(rows, column)
    return rows[[chosen[row.seed] == (row.mu, row.eta) for row in rows.itertuples()]]


def tabulate(rows: pd.DataFrame) -> list[dict]:
    """A row per task and algorithm: means over the grid and of the best cell."""
    table = []
    for (task, algorithm), group in rows.groupby(["task", "algorithm"], sort=False):
        cells = len(group[CELL].drop_duplicates())
        row = {"": task, " ": ALGORITHMS[algorithm][0]}
        row["cells, seeds"] = f"{cells}, {group.seed.nunique()}"
        for column in ("evaluation", "over_the_run"):
            if group[column].isna().all():  # --eval-episodes 0
                continue
            name = column.replace("_", " ")
            best = take_best(group, column)
            of_grid = group.groupby("seed")[column].mean(skipna=False)
            row[f"{name}, grid"] = format_mean(of_grid, digits=0)
            row[f"{name}, best cell"] = format_mean(best[column], digits=0)
            row[f"{name}, its µ, η"] = ", ".join(map(str, best[CELL].value_counts().index[0]))
        row["bits per update"] = f"{group.bits.iloc[0] / group.iterations.iloc[0]:,.0f}"
        table.append(row)
    return table


def make_curves(rows: pd.DataFrame, runs: list[Run]) -> pd.DataFrame:
    """The best cells' returns, best over the run, as means over seeds."""
    curves = {tuple(make_row(run)[name] for name in KEY): average_agents(run) for run in runs}
    tables = []
    for (task, algorithm), group in rows.groupby(["task", "algorithm"], sort=False):
        best = take_best(group, "over_the_run")
        of_seeds = [curves[key] for key in best[KEY].itertuples(index=False, name=None)]
        returns = pd.concat([curve.episodic_return for curve in of_seeds], axis=1)
        table = of_seeds[0][COUNTS].join(with_interval(returns.set_axis(range(len(best)), axis=1)))
        table.insert(0, "algorithm", algorithm)
        table.insert(0, "task", task)
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def draw(curves: pd.DataFrame, png_path: Path):
    """OUT.png: a row of panels for each task, over trajectories and bits; returns the
    figure.
    """
    tasks = list(dict.fromkeys(curves.task))
    figure, panels = make_axes(len(tasks), 2, 8, 2.6 * len(tasks), sharey="row", layout=None)
    for row, task in zip(panels, tasks, strict=True):
        for panel, axis in zip(row, AXES, strict=True):
            for algorithm, (name, colour) in ALGORITHMS.items():
                curve = curves[(curves.task == task) & (curves.algorithm == algorithm)]
                if len(curve):
                    panel.plot(curve[axis], curve["mean"], color=colour, label=name)
                    band = {"color": colour, "alpha": 0.15, "linewidth": 0}
                    panel.fill_between(curve[axis], curve.ci_low, curve.ci_high, **band)
            if axis == "bits":
                panel.set_xscale("log")
            panel.set_xlabel(axis)
            panel.grid(alpha=0.3)
        means = curves[curves.task == task]["mean"]
        margin = 0.1 * (means.max() - means.min())
        row[0].set_ylim(means.min() - margin, means.max() + margin)  # intervals may be far wider
        row[0].set_ylabel(f"{task}\nreturn")
    panels[0, 0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    save(figure, png_path, dpi=100)
    return figure


def main(args: Args) -> None:
    path = Path(f"{args.out}.csv")
    rows_path = Path(f"{args.out}_runs.csv")
    if not args.from_csv:
        runs = read_runs(args.runs, needed=("episodic_return", "bits"))
        rows = make_rows(runs)
        write(rows_path, header(runs), rows)
        write(path, header(runs), make_curves(rows, runs))
    elif not rows_path.is_file():
        refuse(f"--from-csv: there is no {rows_path}")
    print_table(tabulate(read_table(rows_path, tuple(KEY))))
    draw(read_table(path, ("task", "algorithm", *COUNTS)), path.with_suffix(".png"))


if __name__ == "__main__":
    main(read_flags(Args))
