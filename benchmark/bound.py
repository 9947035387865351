"""How far PR-TRPO's updates move the policies, and the bound on it, over training: a panel per experiment.

    python benchmark/bound.py --runs runs/trpo-results/bound
    python benchmark/bound.py --from-csv  # the figure again, from the CSV file

Writes OUT.csv (a row per run and iteration) and from it OUT.png: the movement of the agent that moved most, in total
variation, and the bound on it, the line and its band the mean and the range over the seeds.
"""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import tyro
from plot import COLOURS, finished_runs, write

TITLES = {"fixed": "ε = 0.01", "bounded": "δ = 0.2", "tight": "δ = 0.1"}
SHOWN = {"tv_update": "largest movement of an agent", "bound": "bound on it"}


@dataclass
class Args:
    runs: tuple[str, ...] = ("runs/trpo-results/bound",)
    """folders to search for runs of prtrpo_minigrid.py, at any depth"""
    out: str = "benchmark/results/trpo_bound"
    """beginning of the names of the files that are written"""
    from_csv: bool = False
    """only draw OUT.png from OUT.csv"""


def make_rows(runs: pd.DataFrame) -> pd.DataFrame:
    """Of each iteration of a run: largest movement and distance from a reference, bound, share within it, return."""
    runs = runs.assign(within=runs.tv_update <= runs.bound, method=runs.exp_name)
    kinds = {"tv_update": "max", "tv_reference": "max", "epsilon": "min", "bound": "min", "within": "mean"}
    by = runs.groupby(["method", "seed", "timesteps"], sort=False)
    return by.agg(kinds | {"return_last_100": "mean"}).reset_index()


def draw(csv_path: Path, png_path: Path) -> None:
    """OUT.png from OUT.csv."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    table = pd.read_csv(csv_path, comment="#")
    methods = [method for method in TITLES if method in set(table.method)]
    figure, axes = plt.subplots(1, len(methods), figsize=(4.6 * len(methods), 3.8), sharey=True, squeeze=False)
    for axis, method in zip(axes[0], methods, strict=True):
        own = table[table.method == method]
        for (name, label), colour in zip(SHOWN.items(), COLOURS, strict=False):
            curve = own.groupby("timesteps")[name].agg(["mean", "min", "max"])
            axis.plot(curve.index / 1000, curve["mean"], color=colour, label=label)
            axis.fill_between(curve.index / 1000, curve["min"], curve["max"], color=colour, alpha=0.15, linewidth=0)
        seeds = own.seed.nunique()
        axis.set_title(f"{TITLES[method]}: {own.within.mean():.0%} within ({seeds} seed{'s' * (seeds > 1)})")
        axis.set_xlabel("environment steps per agent (thousands)")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylim(0)
    axes[0][0].set_ylabel("total variation")
    axes[0][0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(png_path, dpi=150)


def main(args: Args) -> None:
    rows, picture = Path(f"{args.out}.csv"), Path(f"{args.out}.png")
    if not args.from_csv:
        runs, comments = finished_runs(args.runs)
        write(rows, comments, make_rows(runs))
    draw(rows, picture)
    print(f"wrote {picture}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
