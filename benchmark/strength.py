"""How strongly methods pull agents together, and what they learn.

    bash benchmark/sweep.sh strength | python benchmark/run.py
    python benchmark/strength.py --runs runs/strength-results
    python benchmark/strength.py --from-csv  # table and figure again, from the CSV file

An experiment is the folder of its runs, a method their --exp-name. Writes OUT.csv, a row per run:
the training return of its agents, as a mean over the run and at its end, and how far their policies
are from those that their peers sent in the last round, as total variation, after the first, second
and fourth update behind a round: means over agents and rounds. From it come OUT_table.csv (means
and Student's 95 % intervals over seeds) and OUT.png.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from arguments import read_flags
from conditions import MEASURES, measure_returns, summarise_seeds
from methods import style_methods
from plot import (
    check_names,
    finished_runs,
    read_table,
    save_with_legend,
    write,
    write_results,
)

UPDATES = (1, 2, 4)  # behind a round
DISTANCES = [f"tv_{name}_{number}" for name in ("peers", "reference") for number in UPDATES]


@dataclass
class Args:
    runs: tuple[str, ...] = ("runs/strength-results",)
    """folders to search for runs, at any depth"""
    out: str = "benchmark/results/strength"
    """beginning of the names of the files that are written"""
    from_csv: bool = False
    """only write OUT_table.csv and OUT.png from OUT.csv"""


def measure_distances(run: pd.DataFrame) -> dict[str, float]:
    """Mean total variation from the peers' snapshots and from the reference, after each of the
    first updates behind a round; NaN where agents have no peers.

    run: a row per iteration and agent, of `load_runs`. What precedes the first round does not
    count, because no agent has sent anything by then.
    """
    interval = run.local_updates.iloc[0]
    after_first_round = run[run.iteration > interval]
    update = (after_first_round.iteration - 1) % interval + 1
    distances = {}
    for name in ("peers", "reference"):
        means = after_first_round.groupby(update)[f"tv_{name}"].mean()
        for number in UPDATES:
            distances[f"tv_{name}_{number}"] = means.get(number)
    return distances


def make_rows(runs: pd.DataFrame) -> pd.DataFrame:
    """A row per run, from `load_runs`."""
    rows = []
    experiments = runs.run.map(lambda folder: Path(folder).parent.name)
    keys = [experiments.rename("experiment"), "exp_name", "seed"]
    check_names(runs, keys)
    for (experiment, method, seed), run in runs.groupby(keys):
        row = {"experiment": experiment, "method": method, "seed": seed}
        rows.append(row | measure_returns(run) | measure_distances(run))
    return pd.DataFrame(rows)


def make_table(rows: pd.DataFrame) -> pd.DataFrame:
    """A row per experiment and method: means over seeds, of the returns with intervals."""
    table = []
    for (experiment, method), seeds in rows.groupby(["experiment", "method"]):
        row = {"experiment": experiment, "method": method} | summarise_seeds(seeds)
        for distance in DISTANCES:
            row[distance] = seeds[distance].mean()
        table.append(row)
    return pd.DataFrame(table)


def draw(csv_path: Path, png_path: Path):
    """OUT.png from OUT.csv: the return of each method against its distance from the peers.
    Returns the figure.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    table = make_table(read_table(csv_path))
    experiments = list(table.experiment.unique())
    size = (max(4.6 * len(experiments), 7.4), 6.4)
    figure, axes = plt.subplots(1, len(experiments), figsize=size, layout="constrained")
    styles = style_methods(table.method.unique())
    markers = dict(zip(styles, itertools.cycle("osD^v<>phX*Pd")))
    for axis, experiment in zip(figure.axes, experiments, strict=True):
        rows = table[table.experiment == experiment].set_index("method")
        for method, row in rows.iterrows():
            style = styles[method]
            drawn = {"color": style.colour, "zorder": 3}
            drawn["label"] = f"{style.label} ({len(row.seeds.split())} seeds)"
            if pd.isna(row.tv_peers_1):  # no peers
                axis.axhline(row.final, linestyle=style.dashes, **drawn)
                continue
            _, _, (bars,) = axis.errorbar(
                row.tv_peers_1,
                row.final,
                yerr=[[row.final - row.final_ci_low], [row.final_ci_high - row.final]],
                marker=markers[method],
                linestyle="none",
                elinewidth=0.8,
                capsize=2,
                **drawn,
            )
            bars.set_zorder(2)
        axis.set_title(experiment)
        axis.set_xlabel("total variation from the peers, one update after a round")
        axis.set_ylabel(MEASURES["final"])
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.3)
    save_with_legend(figure, png_path, columns=2)
    return figure


def main(args: Args) -> None:
    path = Path(f"{args.out}.csv")
    if not args.from_csv:
        runs, comments = finished_runs(args.runs, ("return_last_100",))
        write(path, comments, make_rows(runs))
    table = make_table(read_table(path, ("experiment", "method", "seed", *MEASURES, *DISTANCES)))
    write_results(args.out, table, "# intervals: 95 %, Student's t over seeds\n", draw)


if __name__ == "__main__":
    main(read_flags(Args))
