"""What more agents are good for: how many of them learn a task that one rarely solves, and when most of them have.

    bash benchmark/sweep.sh crowd | python benchmark/run.py
    python benchmark/crowd.py --runs runs/crowd-results
    python benchmark/crowd.py --from-csv  # table and figure again, from the CSV file

An --exp-name is a method and its number of agents, as in pr-reward-8. Isolated agents do not know of each other, so a
run of eight also has four pairs and eight single ones: each such crowd is a row.

Writes OUT.csv, a row per crowd: the share of its agents whose evaluation reaches the threshold, its mean, and the steps
after which the training return of 80 % of them has, empty if it never does. From this come OUT_table.csv (means over
seeds with 95 % intervals, share of crowds in which all learn, median steps) and OUT.png, which shows every seed too.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import tyro
from plot import COLOURS, comments_of, finished_runs, with_interval, write

MOST = 0.8  # share of a crowd whose steps are told


@dataclass
class Args:
    runs: tuple[str, ...] = ("runs/crowd-results",)
    """folders to search for runs, at any depth"""
    out: str = "benchmark/results/crowd"
    """beginning of the names of the files that are written"""
    threshold: float = 0.8
    """return of an agent that has learned the task"""
    from_csv: bool = False
    """only write OUT_table.csv and OUT.png from OUT.csv"""


def make_rows(runs: pd.DataFrame, threshold: float) -> pd.DataFrame:
    """A row per crowd, from `load_runs`."""
    rows = []
    for (name, seed), run in runs.groupby(["exp_name", "seed"]):
        agents = run.groupby("agent")
        final = agents.evaluation.last()
        solved = final >= threshold
        reached = run[run.return_last_100 >= threshold].groupby("agent").timesteps.min().reindex(solved.index)
        method, largest = name.rpartition("-")[0], len(solved)
        sizes = [2**k for k in range(largest.bit_length()) if largest % 2**k == 0]
        for size in sizes if method == "isolated" else [largest]:
            for first in range(0, largest, size):
                own = slice(first, first + size)
                last = math.ceil(MOST * size - 1e-9) - 1
                steps = reached.iloc[own].sort_values().iloc[last]  # those that never get there stand behind the others
                row = {"method": method, "agents": size, "seed": seed, "first_agent": first}
                means = {"share": solved.iloc[own].mean(), "evaluation": final.iloc[own].mean()}
                rows.append(row | means | {"steps": steps})
    return pd.DataFrame(rows).sort_values(["method", "agents", "seed", "first_agent"])


def by_seed(crowds: pd.DataFrame) -> pd.DataFrame:
    """A row per method, size and seed: share of agents that learned, of crowds in which all did, median of steps."""
    crowds = crowds.assign(all_learn=crowds.share == 1, steps=crowds.steps.fillna(np.inf))
    rows = crowds.groupby(["method", "agents", "seed"])
    return rows.agg({"share": "mean", "evaluation": "mean", "all_learn": "mean", "steps": "median"}).reset_index()


def make_table(crowds: pd.DataFrame) -> pd.DataFrame:
    """A row per method and size. Steps are a median because some crowds never get there; empty if most do not."""
    rows = []
    for (method, size), seeds in by_seed(crowds).groupby(["method", "agents"]):
        row = {"method": method, "agents": size}
        for name in ("share", "evaluation"):
            row[name], row[f"{name}_ci_low"], row[f"{name}_ci_high"] = with_interval(seeds[[name]].T).iloc[0]
        row |= {"all_learn": seeds.all_learn.mean(), "median_steps": seeds.steps.median()}
        rows.append(row | {"seeds": " ".join(map(str, seeds.seed))})
    return pd.DataFrame(rows).replace(np.inf, np.nan)


def draw(csv_path: Path, png_path: Path) -> None:
    """OUT.png from OUT.csv."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    crowds = pd.read_csv(csv_path, comment="#")
    table = by_seed(crowds)
    never = 1.1 * crowds.steps.max() / 1000
    figure, axes = plt.subplots(1, 2, figsize=(9.2, 4.2), layout="constrained")
    sizes = sorted(table.agents.unique())
    for k, (method, own) in enumerate(table.groupby("method")):
        x = np.array([sizes.index(size) for size in own.agents]) + 0.06 * (k - 1.5)
        for axis, y, centre in (
            (axes[0], own.share, "mean"),
            (axes[1], (own.steps / 1000).clip(upper=never), "median"),
        ):
            axis.plot(x, y, "o", color=COLOURS[k], alpha=0.35, markersize=4, linewidth=0)
            line = y.groupby(x).agg(centre)
            axis.plot(line.index, line, color=COLOURS[k], label=f"{method} ({own.seed.nunique()} seeds)")
    labels = "share of the agents that learn the task", "steps until 80 % of them have (thousands)"
    for axis, label in zip(axes, labels, strict=True):
        axis.set_xticks(range(len(sizes)), sizes)
        axis.set_xlabel("agents")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axes[1].axhline(never, color="0.5", linestyle=":")
    ticks = [tick for tick in axes[1].get_yticks() if axes[1].get_ylim()[0] < tick < 0.95 * never]
    axes[1].set_yticks([*ticks, never], [*(f"{tick:.0f}" for tick in ticks), "never"])
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(png_path, dpi=150)


def main(args: Args) -> None:
    rows, picture = Path(f"{args.out}.csv"), Path(f"{args.out}.png")
    if not args.from_csv:
        runs, comments = finished_runs(args.runs)
        write(rows, f"{comments}# threshold {args.threshold}\n", make_rows(runs, args.threshold))
    table = make_table(pd.read_csv(rows, comment="#"))
    write(Path(f"{args.out}_table.csv"), comments_of(rows), table)
    print(table.to_string(index=False))
    draw(rows, picture)
    print(f"wrote {picture}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
