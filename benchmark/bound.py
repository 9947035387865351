"""How far PR-TRPO's updates move the policies, and the bound on it, over training: a panel per
experiment.

    python benchmark/bound.py --runs runs/trpo-results/bound
    python benchmark/bound.py --from-csv  # the figure again, from the CSV file

Writes OUT.csv (a row per run and iteration) and from it OUT.png: the movement of the agent that
moved most, in total variation, and the bound on it, the line and its band the mean and the range
over the seeds.
"""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from arguments import read_flags, refuse
from methods import BLACK, METHODS
from plot import count_seeds, finished_runs, read_table, write

TITLES = {"fixed": "ε = 0.01", "bounded": "δ = 0.2", "tight": "δ = 0.1"}
# Column -> what it is called, its colour
SHOWN = {
    "tv_update": ("largest movement of an agent", METHODS["pr-trpo"].colour),
    "bound": ("bound on it", BLACK),
}


@dataclass
class Args:
    runs: tuple[str, ...] = ("runs/trpo-results/bound",)
    """folders to search for runs of prtrpo_minigrid.py, at any depth"""
    out: str = "benchmark/results/trpo_bound"
    """beginning of the names of the files that are written"""
    from_csv: bool = False
    """only draw OUT.png from OUT.csv"""


def make_rows(runs: pd.DataFrame) -> pd.DataFrame:
    """Of each iteration of a run: largest movement and distance from a reference, bound, share
    within it, return.
    """
    runs = runs.assign(within=runs.tv_update <= runs.bound, method=runs.exp_name)
    columns = {
        "tv_update": "max",
        "tv_reference": "max",
        "epsilon": "min",
        "bound": "min",
        "within": "mean",
        "return_last_100": "mean",
    }
    iterations = runs.groupby(["method", "seed", "timesteps"], sort=False)
    return iterations.agg(columns).reset_index()


def draw(csv_path: Path, png_path: Path):
    """OUT.png from OUT.csv; returns the figure."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    table = read_table(csv_path, ("method", "seed", "timesteps", "within", *SHOWN))
    methods = [method for method in TITLES if method in set(table.method)]
    size = (4.6 * len(methods), 3.8)
    figure, axes = plt.subplots(1, len(methods), figsize=size, sharey=True, squeeze=False)
    for axis, method in zip(axes[0], methods, strict=True):
        rows = table[table.method == method]
        for name, (label, colour) in SHOWN.items():
            curve = rows.groupby("timesteps")[name].agg(["mean", "min", "max"])
            x = curve.index / 1000
            band = axis.fill_between(x, curve["min"], curve["max"], color=colour, zorder=1)
            band.set(alpha=0.15, linewidth=0)
            axis.plot(x, curve["mean"], color=colour, label=label, zorder=3)
        seeds = rows.seed.nunique()
        within = f"{rows.within.mean():.0%} within"
        axis.set_title(f"{TITLES[method]}: {within} ({count_seeds(seeds)})")
        axis.set_xlabel("environment steps per agent (thousands)")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylim(0)
    axes[0][0].set_ylabel("total variation")
    axes[0][0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(png_path, dpi=150)
    plt.close(figure)
    return figure


def main(args: Args) -> None:
    rows = Path(f"{args.out}.csv")
    picture = Path(f"{args.out}.png")
    if not args.from_csv:
        runs, comments = finished_runs(args.runs, ("bound", "return_last_100"))
        if not set(runs.exp_name) & set(TITLES):
            refuse(f"--runs: no run with the --exp-name {' or '.join(TITLES)}")
        write(rows, comments, make_rows(runs))
    draw(rows, picture)
    print(f"wrote {picture}")


if __name__ == "__main__":
    main(read_flags(Args))
