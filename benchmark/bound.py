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
from arguments import read_flags
from plot import make_axes, save
from runs import Run, header, read_runs, read_table, write
from styles import BLACK, METHODS, count_seeds

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


def make_rows(runs: list[Run]) -> pd.DataFrame:
    """Of each iteration of a run: largest movement and distance from a reference, bound, share
    within it, return.
    """
    tables = [run.table.assign(method=run.name, seed=run.seed) for run in runs]
    rows = pd.concat(tables)
    rows = rows.assign(within=rows.tv_update <= rows.bound)
    columns = {
        "tv_update": "max",
        "tv_reference": "max",
        "epsilon": "min",
        "bound": "min",
        "within": "mean",
        "return_last_100": "mean",
    }
    return rows.groupby(["method", "seed", "timesteps"], sort=False).agg(columns).reset_index()


def draw(table: pd.DataFrame, png_path: Path):
    """OUT.png; returns the figure."""
    methods = [method for method in TITLES if method in set(table.method)]
    size = (4.6 * len(methods), 3.8)
    figure, axes = make_axes(1, len(methods), *size, sharey=True, layout=None)
    for axis, method in zip(axes[0], methods, strict=True):
        rows = table[table.method == method]
        for name, (label, colour) in SHOWN.items():
            curve = rows.groupby("timesteps")[name].agg(["mean", "min", "max"])
            x = curve.index / 1000
            band = axis.fill_between(x, curve["min"], curve["max"], color=colour, zorder=1)
            band.set(alpha=0.15, linewidth=0)
            axis.plot(x, curve["mean"], color=colour, label=label, zorder=3)
        within = f"{rows.within.mean():.0%} within"
        axis.set_title(f"{TITLES[method]}: {within} ({count_seeds(rows.seed.nunique())})")
        axis.set_xlabel("environment steps per agent (thousands)")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylim(0)
    axes[0][0].set_ylabel("total variation")
    axes[0][0].legend(frameon=False)
    figure.tight_layout()
    save(figure, png_path)
    return figure


def main(args: Args) -> None:
    path = Path(f"{args.out}.csv")
    if not args.from_csv:
        runs = read_runs(args.runs, tuple(TITLES), needed=("bound", "return_last_100"))
        write(path, header(runs), make_rows(runs))
    table = read_table(path, ("method", "seed", "timesteps", "within", *SHOWN))
    draw(table, path.with_suffix(".png"))


if __name__ == "__main__":
    main(read_flags(Args))
