"""How methods compare under different conditions, such as the share of levels where all agents want
the same, or what a lying agent sends.

    bash benchmark/sweep.sh agreement | python benchmark/run.py
    python benchmark/conditions.py --runs runs/agreement-results
    python benchmark/conditions.py --from-csv  # table and figure again, from the CSV file

An --exp-name is a method and, behind the last hyphen, a condition, as in pr-surrogate-25. Writes
OUT.csv, a row per run: the training return of its agents, as a mean over the
run and at its end. From it come OUT_table.csv (means and Student's 95 % intervals over seeds) and
OUT.png.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from arguments import read_flags, refuse
from methods import MARKERS, style_methods
from plot import (
    check_names,
    comments_of,
    count_seeds,
    finished_runs,
    read_table,
    save_with_legend,
    with_interval,
    write,
    write_results,
)

LABEL = "# conditions: "
MEASURES = {"auc": "training return, mean over the run", "final": "training return at the end"}


@dataclass
class Args:
    runs: tuple[str, ...] = ("runs/agreement-results",)
    """folders to search for runs, at any depth"""
    out: str = "benchmark/results/agreement"
    """beginning of the names of the files that are written"""
    agents: int = 0
    """only the first agents of each run count (0: all)"""
    label: str = "levels where all agents have the same goal (%)"
    """what the conditions are, under the figure"""
    from_csv: bool = False
    """only write OUT_table.csv and OUT.png from OUT.csv"""


def measure_returns(run: pd.DataFrame) -> dict[str, float]:
    """The measures of a run, from its rows of `load_runs`."""
    returns = run.groupby("agent").return_last_100
    return {"auc": returns.mean().mean(), "final": returns.last().mean()}


def summarise_seeds(rows: pd.DataFrame) -> dict[str, float | str]:
    """The seeds of these rows per run, and their measures' means with intervals."""
    summary = {"seeds": " ".join(map(str, rows.seed))}
    for measure in MEASURES:
        interval = with_interval(rows[[measure]].T).iloc[0]
        summary[measure], summary[f"{measure}_ci_low"], summary[f"{measure}_ci_high"] = interval
    return summary


def make_rows(runs: pd.DataFrame, agents: int) -> pd.DataFrame:
    """A row per run, from `load_runs`: the means of its first agents' training returns (0: all)."""
    if agents:
        runs = runs[runs.agent < agents]
    rows = []
    for (name, seed), run in runs.groupby(["exp_name", "seed"], sort=False):
        method, _, condition = name.rpartition("-")
        if not method:
            refuse(f"--runs: --exp-name {name} has no condition behind a hyphen")
        row = {"method": method, "condition": condition, "seed": seed}
        rows.append(row | measure_returns(run))
    return pd.DataFrame(rows).sort_values(["method", "condition", "seed"])


def make_table(rows: pd.DataFrame) -> pd.DataFrame:
    """A row per method and condition: means over seeds, with intervals."""
    table = []
    for (method, condition), seeds in rows.groupby(["method", "condition"]):
        row = {"method": method, "condition": condition}
        table.append(row | summarise_seeds(seeds))
    return pd.DataFrame(table)


def read_rows(path: Path) -> pd.DataFrame:
    """OUT.csv."""
    return read_table(path, ("method", "condition", "seed", *MEASURES), dtype={"condition": str})


def describe_seeds(seeds: pd.Series) -> str:
    """How many seeds a method's conditions have: "3 seeds", or "2 to 3 seeds" where they differ."""
    numbers = seeds.str.split().str.len()
    if numbers.min() == numbers.max():
        return count_seeds(numbers.max())
    return f"{numbers.min()} to {count_seeds(numbers.max())}"


def order_conditions(names: Iterable[str]) -> list[str]:
    """Numbers by their size, then words by the alphabet, "none" before the others."""

    def key(name: str) -> tuple:
        number = pd.to_numeric(name, errors="coerce")
        if pd.isna(number):
            return 1, name != "none", name
        return 0, number

    return sorted(set(names), key=key)


def draw(csv_path: Path, png_path: Path):
    """OUT.png from OUT.csv; conditions that are numbers are drawn to scale. Returns the figure.

    Fewer than three seeds get no interval.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    table = make_table(read_rows(csv_path))
    label = re.search(f"^{LABEL}(.*)$", comments_of(csv_path), re.MULTILINE)[1]
    figure, axes = plt.subplots(1, 2, figsize=(9.2, 4.6), layout="constrained", sharey=True)
    styles = style_methods(table.method.unique())
    conditions = order_conditions(table.condition)
    places = pd.to_numeric(pd.Series(conditions, index=conditions), errors="coerce")
    to_scale = places.notna().all()
    if not to_scale:
        places = pd.Series(range(len(conditions)), index=conditions)
    # So that intervals do not cover each other
    shift = 0.01 * (places.max() - places.min()) if to_scale else 0.75 / len(styles)
    table["few"] = table.seeds.str.split().str.len() < 3
    for axis, (measure, title) in zip(axes, MEASURES.items(), strict=True):
        for number, (method, rows) in enumerate(table.groupby("method")):
            rows = rows.set_index("condition")
            rows = rows.loc[[condition for condition in conditions if condition in rows.index]]
            style = styles[method]
            low = rows[measure] - rows[f"{measure}_ci_low"]
            high = rows[f"{measure}_ci_high"] - rows[measure]
            _, _, (bars,) = axis.errorbar(
                places[rows.index] + shift * (number - (len(styles) - 1) / 2),
                rows[measure],
                yerr=(low.mask(rows.few), high.mask(rows.few)),
                color=style.colour,
                linestyle=style.dashes if to_scale else "none",
                elinewidth=0.8,
                capsize=2,
                marker="o" if to_scale else MARKERS[style.dashes],
                markersize=4,
                label=f"{style.label} ({describe_seeds(rows.seeds)})",
                zorder=3,
            )
            bars.set_zorder(2)
        axis.set_ylim(0, 1)
        if to_scale:
            axis.set_xticks(places, conditions)
        else:
            axis.set_xticks(places, conditions, rotation=30, ha="right", rotation_mode="anchor")
            axis.set_xticks(places[:-1] + 0.5, minor=True)
            axis.tick_params(axis="x", which="minor", length=0)
        axis.set_xlabel(label)
        axis.set_ylabel(title)
        axis.grid(axis="y", alpha=0.3)
        axis.grid(axis="x", which="major" if to_scale else "minor", alpha=0.3)
    save_with_legend(figure, png_path, columns=3)
    return figure


def main(args: Args) -> None:
    path = Path(f"{args.out}.csv")
    if args.agents < 0:
        refuse(f"--agents {args.agents}: must not be negative")
    if not args.from_csv:
        runs, comments = finished_runs(args.runs, ("return_last_100",))
        check_names(runs, ["exp_name", "seed"])
        if args.agents:
            comments += f"# agents: the first {args.agents}\n"
        comments += f"{LABEL}{args.label}\n"
        write(path, comments, make_rows(runs, args.agents))
    table = make_table(read_rows(path))
    write_results(args.out, table, "# intervals: 95 %, Student's t over seeds\n", draw)


if __name__ == "__main__":
    main(read_flags(Args))
