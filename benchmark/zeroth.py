"""Runs of s2zpo_mujoco.py: returns over updates, trajectories and bits, and over a shared grid.

    bash benchmark/sweep.sh s2zpo --quick | python benchmark/run.py
    python benchmark/zeroth.py --runs runs/s2zpo-quick --out s2zpo-quick
    python benchmark/zeroth.py --from-csv --out benchmark/results/s2zpo  # again, from CSV files

Writes OUT_runs.csv (a row per run), OUT.csv (curves) and from these OUT.png and OUT_table.csv. A
method is an algorithm; a cell is a pair of mu and eta, which all algorithms of a task have in
common; a seed that has not all cells is left out. The grid is the mean over all cells, within a
seed. The best cell of a seed is the one with the highest mean over the *other* seeds, so that
chance is not rewarded; with one seed it is that seed's best. Curves are means over seeds of the
best cells, with 95 % intervals by Student's t.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from arguments import read_flags, read_json, refuse
from methods import BLACK, BLUE, VERMILION
from plot import (
    UNCOMPARED,
    comments_of,
    make_command,
    read_each,
    read_table,
    with_interval,
    write,
)

ALGORITHMS = {
    "par": ("Par-S2ZPO", BLUE),
    "fedavg": ("FedAvg-S2ZPO", VERMILION),
    "central": ("central S2ZPO", BLACK),
}
AXES = {"iteration": "updates", "trajectories": "trajectories", "bits": "bits"}
SETTINGS = ["task", "algorithm", "mu", "eta", "seed"]
IN_ROWS = {"mu", "eta", "exp_name"}  # settings that are not those of all runs of a method


@dataclass
class Args:
    runs: tuple[str, ...] = ("runs",)  # folders to search for runs, at any depth
    out: str = "benchmark/results/s2zpo"  # beginning of the names of the files that are written
    from_csv: bool = False
    """only write OUT.png and OUT_table.csv, from OUT.csv and OUT_runs.csv"""


def read_run(folder: Path) -> tuple[dict, pd.DataFrame, dict, str] | None:
    """A finished run of s2zpo_mujoco.py: its row, its curve by iteration, the settings that all
    runs of its method have in common, and the versions of packages; None for other runs.
    """
    path = folder / "summary.json"
    if not path.is_file():
        return None
    summary = read_json(path)
    if summary["script"] != "s2zpo_mujoco" or not summary["completed"]:
        return None
    settings = summary["settings"]
    curve = read_table(folder / "metrics.csv", comment=None).groupby("iteration")
    curve = curve[["episodic_return", "trajectories", "bits"]].mean().reset_index()
    row = {
        "task": settings["env_id"],
        "algorithm": settings["algorithm"],
        "mu": settings["mu"] or "default",
        "eta": settings["eta"] or "default",
        "seed": summary["seed"],
        "parameters": summary["parameters"],
        "iterations": summary["iterations"],
        "trajectories": summary["trajectories"],
        "bits": summary["communication_bits"],
        "statistics_bits": summary["statistics_bits"],
        "over_the_run": curve.episodic_return.mean(),
        "evaluation": summary["evaluation"]["group"],
    }
    versions = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
    common = {}
    for name, value in settings.items():
        if name not in UNCOMPARED | IN_ROWS:
            common[name] = value
    return row, curve, common, versions


def read_runs(folders: tuple[str, ...]) -> tuple[pd.DataFrame, dict[tuple, pd.DataFrame], str]:
    """A row per run, the curves by their settings, and comments with commands and versions.

    Of repeated runs the newest counts. Ends with one line if runs of one task and algorithm had
    different settings.
    """
    where = f"--runs {' '.join(folders)}"
    rows = {}
    curves = {}
    settings = {}  # (task, algorithm) -> those that its runs have in common
    versions = set()
    for row, curve, common, packages in read_each(folders, read_run):
        key = tuple(row[name] for name in SETTINGS)
        rows[key] = row
        curves[key] = curve
        first = settings.setdefault(key[:2], common)
        for name in sorted(common.keys() & first.keys()):
            if common[name] != first[name]:
                values = f"--{name.replace('_', '-')} {first[name]} and {common[name]}"
                sys.exit(f"{where}: {row['task']}, {row['algorithm']} has runs with {values}")
        versions.add(packages)
    if not rows:
        sys.exit(f"{where}: no finished run of s2zpo_mujoco.py in there")
    ordered = sorted(rows, key=str)  # by task, whatever ran first
    runs = keep_complete(pd.DataFrame([rows[key] for key in ordered]))
    lines = [f"# {' or '.join(sorted(versions))}\n"]
    for (task, algorithm), group in runs.groupby(["task", "algorithm"]):
        command = make_command("s2zpo_mujoco", settings[task, algorithm])
        lines.append(f"# {command}  (--seed {' '.join(map(str, sorted({*group.seed})))})\n")
    return runs, curves, "".join(lines)


def keep_complete(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs of the seeds that have all cells of their task and algorithm; reports the others.

    Ends with one line where these are most: maybe one run of another cell lies among them.
    """
    kept = []
    for (task, algorithm), group in runs.groupby(["task", "algorithm"], sort=False):
        name = f"{task}, {algorithm}"
        cells = len(group[["mu", "eta"]].drop_duplicates())
        sizes = group.groupby("seed").size()
        if (sizes < cells).mean() > 0.5:
            sys.exit(f"{name}: most of {len(sizes)} seeds have not all of {cells} cells")
        for seed, size in sizes[sizes < cells].items():
            print(f"{name}: seed {seed} has {size} of {cells} cells, left out", file=sys.stderr)
        kept.append(group[group.seed.map(sizes) == cells])
    return pd.concat(kept)


def choose_cells(runs: pd.DataFrame, column: str) -> pd.Series:
    """The best cell of each seed: seed -> (mu, eta). runs: of one task and algorithm."""
    scores = runs.pivot_table(index="seed", columns=["mu", "eta"], values=column)
    chosen = {}
    for seed in scores.index:
        others = scores.drop(index=seed) if len(scores) > 1 else scores
        chosen[seed] = others.mean().idxmax()
    return pd.Series(chosen)


def take_best(runs: pd.DataFrame, column: str) -> pd.DataFrame:
    """The rows of the best cells, one for each seed."""
    chosen = choose_cells(runs, column)
    keep = [chosen[row.seed] == (row.mu, row.eta) for row in runs.itertuples()]
    return runs[keep]


def make_table(runs: pd.DataFrame) -> pd.DataFrame:
    """A row per task and algorithm: the grid's means and the best cell's, with intervals."""
    rows = []
    for (task, algorithm), group in runs.groupby(["task", "algorithm"], sort=False):
        row = {
            "task": task,
            "algorithm": algorithm,
            "cells": len(group[["mu", "eta"]].drop_duplicates()),
            "seeds": group.seed.nunique(),
            "iterations": group.iterations.iloc[0],
            "trajectories": group.trajectories.iloc[0],
            "bits_per_update": group.bits.iloc[0] / group.iterations.iloc[0],
            "bits": group.bits.iloc[0],
            "statistics_bits": group.statistics_bits.iloc[0],
        }
        for column in ("over_the_run", "evaluation"):
            if group[column].isna().all():  # --eval-episodes 0
                continue
            best = take_best(group, column)
            samples = {
                f"{column}_grid": group.groupby("seed")[column].mean(),
                f"{column}_best": best.set_index("seed")[column],
            }
            for name, values in samples.items():
                average, low, high = with_interval(pd.DataFrame([[*values]])).iloc[0]
                row |= {name: average, f"{name}_ci_low": low, f"{name}_ci_high": high}
            mu, eta = best[["mu", "eta"]].value_counts().index[0]
            row[f"{column}_cell"] = f"{mu} {eta}"
        rows.append(row)
    return pd.DataFrame(rows)


def make_curves(runs: pd.DataFrame, curves: dict[tuple, pd.DataFrame]) -> pd.DataFrame:
    """The best cells' returns, best over the run, as means over seeds."""
    tables = []
    for (task, algorithm), group in runs.groupby(["task", "algorithm"], sort=False):
        best = take_best(group, "over_the_run")
        of_seeds = [curves[tuple(row[name] for name in SETTINGS)] for _, row in best.iterrows()]
        returns = pd.concat([curve.episodic_return for curve in of_seeds], axis=1)
        table = with_interval(returns)
        table.columns = ["mean", "ci_low", "ci_high"]
        first = of_seeds[0]
        table.insert(0, "bits", first.bits)
        table.insert(0, "trajectories", first.trajectories)
        table.insert(0, "iteration", first.iteration)
        table.insert(0, "algorithm", algorithm)
        table.insert(0, "task", task)
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def draw(csv_path: Path, png_path: Path):
    """OUT.png from OUT.csv: a row of panels for each task, over updates, trajectories and bits.

    Returns the figure.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves = read_table(csv_path)
    tasks = list(dict.fromkeys(curves.task))
    size = (11, 2.6 * len(tasks))
    figure, panels = plt.subplots(len(tasks), 3, figsize=size, squeeze=False, sharey="row")
    for row, task in zip(panels, tasks, strict=True):
        for panel, (axis, label) in zip(row, AXES.items(), strict=True):
            for algorithm, (name, colour) in ALGORITHMS.items():
                curve = curves[(curves.task == task) & (curves.algorithm == algorithm)]
                if len(curve):
                    panel.plot(curve[axis], curve["mean"], color=colour, label=name)
                    band = {"color": colour, "alpha": 0.15, "linewidth": 0}
                    panel.fill_between(curve[axis], curve.ci_low, curve.ci_high, **band)
            if axis == "bits":
                panel.set_xscale("log")
            panel.set_xlabel(label)
            panel.grid(alpha=0.3)
        means = curves[curves.task == task]["mean"]
        margin = 0.1 * (means.max() - means.min())
        row[0].set_ylim(means.min() - margin, means.max() + margin)  # intervals may be far wider
        row[0].set_ylabel(f"{task}\nreturn")
    panels[0, 0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(png_path, dpi=100)
    plt.close(figure)
    return figure


def main(args: Args) -> None:
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    runs_path = Path(f"{out}_runs.csv")
    if not args.from_csv:
        runs, of_runs, comments = read_runs(args.runs)
        write(runs_path, comments, runs)
        write(Path(f"{out}.csv"), comments, make_curves(runs, of_runs))
    elif not runs_path.is_file():
        refuse(f"--from-csv: there is no {runs_path}")
    comments = comments_of(runs_path)
    table = make_table(read_table(runs_path, ("task", "algorithm", *SETTINGS)))
    write(Path(f"{out}_table.csv"), comments, table)
    draw(Path(f"{out}.csv"), Path(f"{out}.png"))
    print(table.to_string(index=False, float_format=lambda value: f"{value:.4g}"))


if __name__ == "__main__":
    main(read_flags(Args))
