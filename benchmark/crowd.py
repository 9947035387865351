"""What more agents are good for: how many of them learn a task that one rarely solves, and when
most of them have.

    bash benchmark/sweep.sh crowd | python benchmark/run.py
    python benchmark/crowd.py --runs runs/crowd-results
    python benchmark/crowd.py --from-csv  # table and figure again, from the CSV file

An --exp-name is a method and its number of agents, as in pr-reward-8. Isolated agents do not know
of each other, so a run of eight also has four pairs and eight single ones: each such crowd is a
row. A run of six has three pairs, six single ones, and itself.

Writes OUT.csv, a row per crowd: the share of its agents whose evaluation reaches the threshold, its
mean, and the steps after which the training return of 80 % of them has, empty if it never does.
From this come OUT_table.csv (means over seeds, share of crowds in which all learn, median steps)
and OUT.png, which shows every seed too. Intervals of shares are Wilson's, with the seed as the
trial (stats.py explains why); those of the evaluation are Student's.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from arguments import read_flags, refuse
from methods import style_methods
from plot import (
    check_names,
    count_seeds,
    finished_runs,
    read_table,
    save_with_legend,
    with_interval,
    write,
    write_results,
)
from stats import mean_share

COLUMNS = "method", "agents", "seed", "first_agent", "share", "evaluation", "steps"  # of OUT.csv
MOST = 0.8  # share of a crowd whose steps are reported


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


def sizes_of_crowds(method: str, num_agents: int) -> list[int]:
    """The sizes of the crowds that a run is divided into: powers of two for isolated agents, and
    the whole run.
    """
    sizes = []
    if method == "isolated":
        powers = [2**k for k in range(num_agents.bit_length())]
        sizes = [size for size in powers if num_agents % size == 0 and size < num_agents]
    return [*sizes, num_agents]


def make_rows(runs: pd.DataFrame, threshold: float) -> pd.DataFrame:
    """A row per crowd, from `load_runs`."""
    rows = []
    for (name, seed), run in runs.groupby(["exp_name", "seed"]):
        # Not the last that there is: an agent that has diverged has none
        evaluation = run.groupby("agent").evaluation.agg(lambda values: values.iloc[-1])
        solved = evaluation >= threshold
        above = run[run.return_last_100 >= threshold]
        reached = above.groupby("agent").timesteps.min().reindex(solved.index)
        method = name.rpartition("-")[0]
        if not method:
            refuse(f"--runs: --exp-name {name} has no number of agents behind a hyphen")
        num_agents = len(solved)
        for size in sizes_of_crowds(method, num_agents):
            last = math.ceil(MOST * size - 1e-9) - 1
            for first in range(0, num_agents, size):
                crowd = slice(first, first + size)
                row = {"method": method, "agents": size, "seed": seed, "first_agent": first}
                row["share"] = solved.iloc[crowd].mean()
                row["evaluation"] = evaluation.iloc[crowd].mean(skipna=False)
                # Agents that never get there are sorted behind the others
                row["steps"] = reached.iloc[crowd].sort_values().iloc[last]
                rows.append(row)
    return pd.DataFrame(rows).sort_values(["method", "agents", "seed", "first_agent"])


def average_by_seed(crowds: pd.DataFrame) -> pd.DataFrame:
    """A row per method, size and seed: share of agents that learned, of crowds in which all did,
    median of steps.
    """
    crowds = crowds.assign(all_learn=crowds.share == 1, steps=crowds.steps.fillna(np.inf))
    columns = {"share": "mean", "evaluation": "mean", "all_learn": "mean", "steps": "median"}
    return crowds.groupby(["method", "agents", "seed"]).agg(columns).reset_index()


def make_table(crowds: pd.DataFrame) -> pd.DataFrame:
    """A row per method and size. Steps are a median because some crowds never get there; empty if
    most do not.
    """
    rows = []
    for (method, size), seeds in average_by_seed(crowds).groupby(["method", "agents"]):
        row = {"method": method, "agents": size}
        intervals = {
            "share": mean_share(seeds.share),
            "evaluation": with_interval(seeds[["evaluation"]].T).iloc[0],
            "all_learn": mean_share(seeds.all_learn),
        }
        for name, interval in intervals.items():
            row[name], row[f"{name}_ci_low"], row[f"{name}_ci_high"] = interval
        row["median_steps"] = seeds.steps.median()
        row["seeds"] = " ".join(map(str, seeds.seed))
        rows.append(row)
    return pd.DataFrame(rows).replace(np.inf, np.nan)


def draw(csv_path: Path, png_path: Path):
    """OUT.png from OUT.csv; returns the figure."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    crowds = read_table(csv_path)
    table = average_by_seed(crowds)
    never = 1.1 * crowds.steps.max() / 1000
    figure, axes = plt.subplots(1, 2, figsize=(9.2, 4.2), layout="constrained")
    sizes = sorted(table.agents.unique())
    styles = style_methods(table.method.unique())
    for number, (method, seeds) in enumerate(table.groupby("method")):
        style = styles[method]
        position = [sizes.index(size) for size in seeds.agents]
        x = np.array(position) + 0.06 * (number - 1.5)
        steps = (seeds.steps / 1000).clip(upper=never)
        for axis, y, centre in ((axes[0], seeds.share, "mean"), (axes[1], steps, "median")):
            axis.plot(x, y, "o", color=style.colour, alpha=0.35, markersize=4, linewidth=0)
            line = y.groupby(x).agg(centre)
            axis.plot(
                line.index,
                line,
                color=style.colour,
                linestyle=style.dashes,
                label=f"{style.label} ({count_seeds(seeds.seed.nunique())})",
            )
    labels = "share of the agents that learn the task", "steps until 80 % of them have (thousands)"
    for axis, label in zip(axes, labels, strict=True):
        axis.set_xticks(range(len(sizes)), sizes)
        axis.set_xlabel("agents")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axes[1].axhline(never, color="0.5", linestyle=":")
    bottom = axes[1].get_ylim()[0]
    ticks = [tick for tick in axes[1].get_yticks() if bottom < tick < 0.95 * never]
    axes[1].set_yticks([*ticks, never], [*(f"{tick:.0f}" for tick in ticks), "never"])
    save_with_legend(figure, png_path)
    return figure


def main(args: Args) -> None:
    rows = Path(f"{args.out}.csv")
    if not args.from_csv:
        runs, comments = finished_runs(args.runs, ("return_last_100", "evaluation"))
        check_names(runs, ["exp_name", "seed"])
        comments += f"# threshold {args.threshold}\n"
        write(rows, comments, make_rows(runs, args.threshold))
    table = make_table(read_table(rows, COLUMNS))
    note = "# intervals: 95 %; of share and all_learn Wilson's, where a seed is a trial;"
    note += " of evaluation Student's t\n"
    write_results(args.out, table, note, draw)


if __name__ == "__main__":
    main(read_flags(Args))
