"""What more agents are good for: how many of them learn a task that one rarely solves, and when
most of them have.

    bash benchmark/crowd.sh | python benchmark/run.py
    python benchmark/crowd.py --runs runs/crowd-results
    python benchmark/crowd.py --from-csv  # table and figure again, from the CSV file

An --exp-name is a method and its number of agents, as in pr-reward-8. Isolated agents do not know
of each other, so a run of eight also has four pairs and eight single ones: each such crowd is a
row. A run of six has three pairs, six single ones, and itself.

Writes OUT.csv, a row per crowd: the share of its agents whose evaluation reaches the threshold, its
mean, and the steps after which the training return of 80 % of them has, empty if it never does.
From this come OUT.png, which shows every seed too, and the printed table: the mean share, with
Wilson's interval, where a seed is a trial.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from arguments import read_flags, refuse
from plot import add_legend, make_axes, save
from runs import Run, header, read_runs, read_table, refuse_repeats, wilson_interval, write
from styles import count_seeds, style_methods

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
    """only print the table and draw OUT.png, from OUT.csv"""


def sizes_of_crowds(method: str, num_agents: int) -> list[int]:
    """The sizes of the crowds that a run is divided into: powers of two for isolated agents, and
    the whole run.
    """
    sizes = []
    if method == "isolated":
        powers = [2**k for k in range(num_agents.bit_length())]
        sizes = [size for size in powers if num_agents % size == 0 and size < num_agents]
    return [*sizes, num_agents]


def make_rows(runs: list[Run], threshold: float) -> pd.DataFrame:
    """A row per crowd."""
    rows = []
    for run in runs:
        method = run.name.rpartition("-")[0]
        if not method:
            refuse(f"--runs: --exp-name {run.name} has no number of agents behind a hyphen")
        # Not the last that there is: an agent that has diverged has none
        evaluation = run.table.groupby("agent").evaluation.agg(lambda values: values.iloc[-1])
        solved = evaluation >= threshold
        above = run.table[run.table.return_last_100 >= threshold]
        reached = above.groupby("agent").timesteps.min().reindex(solved.index)
        num_agents = len(solved)
        for size in sizes_of_crowds(method, num_agents):
            last = math.ceil(MOST * size - 1e-9) - 1
            for first in range(0, num_agents, size):
                crowd = slice(first, first + size)
                row = {"method": method, "agents": size, "seed": run.seed, "first_agent": first}
                row["share"] = solved.iloc[crowd].mean()
                row["evaluation"] = evaluation.iloc[crowd].mean(skipna=False)
                # Agents that never get there are sorted behind the others
                row["steps"] = reached.iloc[crowd].sort_values().iloc[last]
                rows.append(row)
    key = ["method", "agents", "seed", "first_agent"]
    return refuse_repeats(pd.DataFrame(rows).sort_values(key), key)


def average_by_seed(crowds: pd.DataFrame) -> pd.DataFrame:
    """A row per method, size and seed: share of agents that learned, and median of steps, because
    some crowds never get there.
    """
    crowds = crowds.assign(steps=crowds.steps.fillna(np.inf))
    seeds = crowds.groupby(["method", "agents", "seed"])
    return seeds.agg({"share": "mean", "steps": "median"}).reset_index()


def format_share(shares: pd.Series) -> str:
    """The mean over seeds of the share of a run's agents, with Wilson's interval."""
    low, high = wilson_interval(shares.mean(), len(shares))
    return f"{shares.mean():.2f} [{low:.2f}, {high:.2f}]"


def draw(crowds: pd.DataFrame, png_path: Path):
    """OUT.png; returns the figure."""
    table = average_by_seed(crowds)
    never = 1.1 * crowds.steps.max() / 1000
    figure, axes = make_axes(1, 2, 9.2, 4.2, squeeze=True)
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
    add_legend(figure, columns=4)
    save(figure, png_path)
    return figure


def main(args: Args) -> None:
    path = Path(f"{args.out}.csv")
    if not args.from_csv:
        runs = read_runs(args.runs, needed=("return_last_100", "evaluation"))
        comments = f"{header(runs)}# threshold {args.threshold}\n"
        write(path, comments, make_rows(runs, args.threshold))
    crowds = read_table(path, COLUMNS)
    shares = average_by_seed(crowds).groupby(["method", "agents"]).share.agg(format_share)
    print(shares.unstack(fill_value="").to_string())
    draw(crowds, path.with_suffix(".png"))


if __name__ == "__main__":
    main(read_flags(Args))
