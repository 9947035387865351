"""Draws the figures of docs/results/ from the files in benchmark/results/, one point each.

    python benchmark/figures.py               # all of them
    python benchmark/figures.py own_goals     # one

A small dot is a seed, a large one the mean over seeds with its 95 % interval by Student's t.
Methods have the names and colours of benchmark/styles.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import tyro
from arguments import read_flags, refuse
from crowd import average_by_seed
from plot import draw_matrix, make_axes, save, spread
from runs import mean_interval, read_table, wilson_interval
from styles import BLACK, GREY, Method, find_method, name_task

RESULTS = Path(__file__).parent / "results"
AFTER = "return after training"
OVER = "training return, mean over the run"
AT_END = "training return at the end"


@dataclass
class Args:
    names: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """figures (default: all)"""
    out: str = str(RESULTS)
    """folder that the figures are written to"""


# --- rows: a value per panel, method and seed ---


def read_rows(name: str, measure: str = "evaluation", panel: str | None = None) -> pd.DataFrame:
    """Rows of a file with what they measure as `value`; a panel per task, or one of this name."""
    rows = read_table(RESULTS / f"{name}.csv", ("method", "seed", measure))
    panels = rows.env.map(name_task) if panel is None else panel
    return rows.assign(value=rows[measure], panel=panels)


def average(rows: pd.DataFrame) -> pd.DataFrame:
    """One value per panel, method and seed: the mean over agents, or over tasks."""
    return (
        rows.groupby(["panel", "method", "seed"], sort=False).value.mean(skipna=False).reset_index()
    )


def read_panels(files: dict[str, str]) -> pd.DataFrame:
    """Means of the runs of several files, each a panel. files: name -> its title."""
    return pd.concat(average(read_rows(name, panel=panel)) for name, panel in files.items())


def sort_panels(rows: pd.DataFrame, panels: dict[str, str]) -> pd.DataFrame:
    """Rows in the order of these titles."""
    return rows.sort_values("panel", key=lambda names: names.map([*panels.values()].index))


def subtract(rows: pd.DataFrame, other: str) -> pd.DataFrame:
    """Each method minus another one, paired by panel and seed."""
    values = rows.set_index(["panel", "seed", "method"]).value.unstack("method")
    values = values.reindex(dict.fromkeys(rows.panel), level="panel")
    differences = values.sub(values[other], axis=0).drop(columns=other)
    return differences.stack().rename("value").reset_index()


# --- shapes ---


def find_styles(methods: dict[str, str]) -> dict[str, Method]:
    """Names, colours and dashes of methods, or of tasks; a label replaces the usual name."""
    styles = {}
    for name, label in methods.items():
        style = find_method(name)
        styles[name] = style._replace(label=label or style.label, colour=style.colour or BLACK)
    return styles


def cut(values: pd.Series) -> tuple[float, float, float]:
    """Mean and interval, cut at 0 and 1 where values lie between, as in the tables."""
    mean, low, high = mean_interval(values)
    if values.between(0, 1).all():
        low, high = np.clip((low, high), 0, 1)
    return mean, low, high


def trials(shares: pd.Series) -> tuple[float, float, float]:
    """Mean and Wilson's interval of shares of agents, with one trial per seed."""
    return shares.mean(), *wilson_interval(shares.mean(), len(shares))


def draw_dots(rows: pd.DataFrame, methods: dict[str, str], label: str, line: str = ""):
    """A panel per value of `panel`, in which each method has a row of dots, the first on top.

    methods: --exp-name -> what it is called, "" for its usual name. line: a method, at whose mean a
    line is drawn; "0" for differences, which have it at 0. Returns the figure.
    """
    panels = list(dict.fromkeys(rows.panel))
    width = 7.6 if len(panels) < 3 else 8.8
    height = 1.0 + 0.34 * len(methods)
    figure, axes = make_axes(1, len(panels), width, height, sharex=True, sharey=True)
    styles = find_styles(methods)
    for axis, panel in zip(axes[0], panels, strict=True):
        of_panel = rows[rows.panel == panel]
        for place, (method, style) in enumerate(styles.items()):
            values = of_panel[of_panel.method == method].value.dropna()
            if not len(values):
                continue
            mean, low, high = mean_interval(values) if line == "0" else cut(values)
            colour = style.colour
            axis.plot(values, [place] * len(values), "o", color=colour, alpha=0.35, markersize=4)
            axis.plot([low, high], [place, place], color=colour, linewidth=1.5)
            axis.plot(mean, place, "o", color=colour, markersize=7)
        if line:
            at = 0.0 if line == "0" else of_panel[of_panel.method == line].value.mean()
            axis.axvline(at, color=GREY, linestyle="--", linewidth=1, zorder=0)
        if len(panels) > 1:
            axis.set_title(panel)
        axis.grid(axis="x", alpha=0.3)
    axes[0][0].set_yticks(range(len(styles)), [style.label for style in styles.values()])
    axes[0][0].invert_yaxis()
    figure.supxlabel(label, fontsize="medium")
    return figure


def draw_lines(
    rows: pd.DataFrame,
    methods: dict[str, str],
    x_label: str,
    y_label: str,
    interval: Callable = mean_interval,
):
    """A panel per value of `panel`, a line per method over the column x, means with intervals.
    Returns the figure.
    """
    panels = list(dict.fromkeys(rows.panel))
    places = {x: place for place, x in enumerate(sorted(rows.x.unique()))}
    figure, axes = make_axes(1, len(panels), 3.4 + 2.2 * len(panels), 3.2, sharey=True)
    styles = find_styles(methods)
    for axis, panel in zip(axes[0], panels, strict=True):
        ends = {}
        for number, (method, style) in enumerate(styles.items()):
            of_method = rows[(rows.panel == panel) & (rows.method == method)]
            values = of_method.groupby("x").value.agg(interval)
            table = pd.DataFrame(values.tolist(), values.index, columns=["mean", "low", "high"])
            # So that intervals do not cover each other
            at = np.array([places[x] for x in table.index]) + 0.05 * number
            axis.plot(at, table["mean"], style.dashes, marker="o", color=style.colour, markersize=5)
            axis.vlines(at, table.low, table.high, color=style.colour, linewidth=1)
            ends[method] = table["mean"].iloc[-1]
        axis.set_xticks(list(places.values()), [f"{x:g}" for x in places])
        axis.grid(axis="y", alpha=0.3)
        if len(panels) > 1:
            axis.set_title(panel)
    axes[0][0].set_ylabel(y_label)
    figure.supxlabel(x_label, fontsize="medium")
    name_ends(axes[0][-1], ends, styles)
    return figure


def name_ends(axis, ends: dict[str, float], styles: dict[str, Method]) -> None:
    """Write the methods' names beside the ends of their lines."""
    low, high = axis.get_ylim()
    heights = spread(list(ends.values()), 0.08 * (high - low))
    for method, height in zip(ends, heights, strict=True):
        axis.annotate(
            styles[method].label,
            (1.02, height),
            xycoords=("axes fraction", "data"),
            color=styles[method].colour,
            va="center",
        )


def draw_curves(curves: pd.DataFrame, methods: dict[str, str], tasks: dict[str, str]):
    """Learning curves, a panel per task; names stand at their ends in the last. Returns the
    figure.
    """
    figure, axes = make_axes(1, len(tasks), 3.4 + 2.2 * len(tasks), 3.2, sharey=True)
    styles = find_styles(methods)
    for axis, (task, title) in zip(axes[0], tasks.items(), strict=True):
        ends = {}
        for method, style in styles.items():
            rows = curves[(curves.env == task) & (curves.method == method)]
            x = rows.timesteps / 1000
            band = {"color": style.colour, "alpha": 0.1, "linewidth": 0, "zorder": 1}
            axis.fill_between(x, rows.ci_low, rows.ci_high, **band)
            axis.plot(x, rows["mean"], style.dashes, color=style.colour, zorder=3)
            ends[method] = rows["mean"].iloc[-1]
        axis.set_title(title)
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
    low = min(0, curves["mean"].min())
    high = max(1, curves["mean"].max())
    axes[0][0].set_ylim(low - 0.02 * (high - low), high + 0.02 * (high - low))
    axes[0][0].set_ylabel("training return")
    figure.supxlabel("environment steps per agent (thousands)", fontsize="medium")
    name_ends(axes[0][-1], ends, styles)
    return figure


def usual(*methods: str) -> dict[str, str]:
    """These methods with their usual names."""
    return dict.fromkeys(methods, "")


# --- figures ---


def own_goals():
    """Mixing minus averaging with the same weights, by the share of common goals."""
    table = read_table(RESULTS / "agreement.csv", ("method", "condition", "seed", "final"))
    values = table.pivot(index=["condition", "seed"], columns="method", values="final")
    rows = []
    for weights in ("uniform", "surrogate"):
        gains = values[f"pr-{weights}"] - values[f"fedavg-{weights}"]
        rows.append(gains.rename("value").reset_index().assign(method=f"pr-{weights}"))
    rows = pd.concat(rows).rename(columns={"condition": "x"}).assign(panel="")
    methods = {"pr-uniform": "uniform weights", "pr-surrogate": "surrogate weights"}
    y_label = "mixing policies minus\naveraging parameters"
    figure = draw_lines(rows, methods, "levels in which all agents have the same goal (%)", y_label)
    figure.axes[0].axhline(0, color=GREY, linestyle="--", linewidth=1, zorder=0)
    return figure


def own_goals_methods():
    """Two tasks with own goals: return after training, minus isolated agents."""
    files = {"goals_runs": "a green or a blue goal", "unlock_goals_runs": "a ball or a box"}
    rows = read_panels(files)
    methods = usual(
        "pr-reward",
        "pr-surrogate",
        "pr-uniform",
        "proximal-reward",
        "fedper-uniform",
        "fedavg-uniform",
        "fedavg-reward",
    )
    return draw_dots(subtract(rows, "isolated"), methods, f"{AFTER}, minus isolated agents", "0")


def draw_confirmation(name: str):
    """On fresh seeds: the gated mixture minus each rival, return after training."""
    rows = subtract(average(read_rows(name, panel="")), "pr-gate-linear")
    rivals = (
        "pr-reward-linear",
        "kickstarting",
        "fedavg-uniform",
        "fedavg-reward",
        "pr-uniform",
        "isolated",
        "distral",
        "fedper-uniform",
        "exploit",
    )
    methods = usual(*(method for method in rivals if method in set(rows.method)))
    rows = rows.assign(value=-rows.value)
    return draw_dots(rows, methods, f"gated by value minus this method, {AFTER}", "0")


def headline():
    """The README's: of the same runs what a newcomer compares, in plain words."""
    methods = {
        "pr-gate-linear": "mixing policies, gated by critics",
        "pr-reward-linear": "mixing policies, weighed by returns",
        "pr-uniform": "mixing policies, equal weights",
        "kickstarting": "following the best agent (kickstarting)",
        "fedavg-uniform": "averaging parameters (FedAvg)",
        "isolated": "learning alone",
        "exploit": "copying the best agent",
    }
    rows = average(read_rows("confirm_goals", panel=""))
    label = "return after training, mean of the four agents; a small dot is a run"
    return draw_dots(rows, methods, label, "isolated")


def easy_tasks():
    """The agents on the easy and on the hard task."""
    tasks = {
        "MiniGrid-DoorKey-5x5-v0": "the easy task, DoorKey-5x5",
        "MiniGrid-DoorKey-8x8-v0": "the hard task, DoorKey-8x8",
    }
    methods = usual("fedavg-reward", "fedavg-uniform", "pr-reward", "pr-uniform", "isolated")
    chosen = read_table(RESULTS / "doorkey_chosen.csv")  # averages with coefficients of their own
    others = read_table(RESULTS / "doorkey.csv")
    curves = pd.concat((chosen, others[~others.method.isin(chosen.method)]))
    curves[["ci_low", "ci_high"]] = curves[["ci_low", "ci_high"]].clip(0, 1)
    return draw_curves(curves, methods, tasks)


def keycorridor():
    """Where the easy task teaches little: the agent on the second task."""
    rows = read_rows("keycorridor_runs")
    rows = rows[rows.panel == "KeyCorridorS3R2"]
    methods = usual("fedavg-uniform", "fedavg-reward", "pr-uniform", "pr-reward", "isolated")
    return draw_dots(rows, methods, f"{AFTER} on KeyCorridorS3R2", "isolated")


def one_task():
    """FourRooms for 1 M and 5 M steps, minus isolated agents."""
    files = {"fourrooms_runs": "1 M steps", "fourrooms_5m_runs": "5 M steps"}
    rows = read_panels(files)
    methods = usual("fedavg-uniform", "pr-uniform", "pr-uniform-forward", "pr-similarity")
    return draw_dots(subtract(rows, "isolated"), methods, f"{AFTER}, minus isolated agents", "0")


def broken_peers():
    """What one of four agents sends: the three honest ones."""
    liars = read_table(RESULTS / "liars.csv", ("method", "condition", "seed", "final"))
    lies = {
        "random": "random weights",
        "flipped": "flipped signs",
        "flipped+boast": "flipped signs and a boast",
    }
    liars = liars[liars.condition.isin(lies)]
    # Who reads no reports meets a boast as if there were none
    silent = liars[
        (liars.condition == "flipped") & liars.method.isin(["fedavg-uniform", "pr-gate"])
    ]
    liars = pd.concat((liars, silent.assign(condition="flipped+boast")))
    alone = read_table(RESULTS / "strength.csv", ("experiment", "method", "seed", "final"))
    alone = alone[(alone.experiment == "doorkey") & (alone.method == "isolated")]
    alone = pd.concat(alone.assign(condition=lie) for lie in lies)
    rows = pd.concat((liars, alone))
    rows = rows.assign(value=rows.final, panel=rows.condition.map(lies))
    rows = sort_panels(rows, lies)
    methods = usual("pr-gate", "pr-reward", "isolated", "fedavg-reward", "fedavg-uniform")
    return draw_dots(rows, methods, AT_END, "isolated")


def rounds():
    """Training return by the interval between rounds."""
    rows = read_rows("anchor_doorkey_runs", "mean_training_return")
    intervals = {"": 4, "-every1": 1, "-every16": 16, "-every32": 32}
    parts = []
    methods = usual("fedavg-uniform", "pr-uniform")
    for method in methods:
        for end, interval in intervals.items():
            of_setting = rows[rows.method == f"{method}{end}"]
            parts.append(of_setting.assign(method=method, x=interval))
    return draw_lines(pd.concat(parts), methods, "iterations between rounds", OVER)


def trust_region():
    """Isolated TRPO and PR-TRPO on three tasks."""
    methods = {
        "pr-trpo-every1": "PR-TRPO, a round after every update",
        "pr-trpo": "PR-TRPO, a round every 4 updates",
        "pr-uniform": "",
        "isolated-trpo": "",
    }
    return draw_dots(read_rows("trpo_doorkey_runs"), methods, AFTER, "isolated-trpo")


def levels():
    """Return on unseen levels by the number of levels of each agent."""
    rows = read_rows("levels_runs", panel="")
    parts = rows.method.str.rsplit("-", n=1, expand=True)
    rows = rows.assign(method=parts[0], x=parts[1].astype(int))
    methods = usual("fedavg-uniform", "pr-uniform", "isolated")
    return draw_lines(rows, methods, "levels of each agent", "return on unseen levels")


def crowd():
    """Share of the agents that learn, by their number."""
    rows = read_table(RESULTS / "crowd.csv", ("method", "agents", "seed", "share", "steps"))
    rows = average_by_seed(rows).rename(columns={"agents": "x", "share": "value"}).assign(panel="")
    methods = usual("fedavg-uniform", "pr-reward", "isolated", "pr-uniform")
    return draw_lines(rows, methods, "agents", "share of the agents that learn", trials)


def networks():
    """Agents whose networks have equal and unequal sizes."""
    rows = average(read_rows("networks_runs"))
    kinds = {"equal": "three equal networks", "unequal": "networks of different sizes"}
    parts = rows.method.str.rsplit("-", n=1, expand=True)
    rows = rows.assign(method=parts[0], panel=parts[1].map(kinds))
    methods = usual("fedavg-uniform", "pr-reward", "pr-uniform", "isolated")
    return draw_dots(rows, methods, AFTER, "isolated")


def missions():
    """Agents that fetch different objects."""
    rows = average(read_rows("missions_runs", panel=""))
    methods = usual("isolated", "pr-self0.6", "pr-similarity", "pr-surrogate", "pr-uniform")
    return draw_dots(rows, methods | usual("fedavg-uniform"), AFTER, "isolated")


def bits():
    """S²ZPO on five tasks: return at the end, mean over the cells of the grid."""
    rows = read_table(RESULTS / "s2zpo_runs.csv", ("task", "algorithm", "seed", "evaluation"))
    cells = (
        rows.groupby(["task", "algorithm", "seed"])
        .evaluation.mean(skipna=False)
        .unstack("algorithm")
    )
    gains = (cells.fedavg - cells.par).rename("value").reset_index()
    rows = gains.rename(columns={"task": "method"}).assign(panel="")
    label = "FedAvg-S²ZPO minus Par-S²ZPO, return at the end"
    return draw_dots(rows, usual(*dict.fromkeys(rows.method)), label, "0")


def bodies():
    """Cars with motors of different strength: the weak one, and all four."""
    rows = read_rows("mujoco_cars_runs")
    weak = rows[rows.panel.str.endswith("0.5")].assign(panel="the weak car")
    rows = pd.concat((weak, average(rows.assign(panel="mean of four cars"))))
    methods = usual(
        "fedavg-uniform",
        "pr-gate-linear",
        "pr-reward-linear",
        "pr-uniform",
        "pr-gate",
        "kickstarting",
        "exploit",
        "fedper-uniform",
        "isolated",
    )
    return draw_dots(rows, methods, AFTER, "isolated")


def bodies_curves():
    """The cars with a usual and with a weak motor."""
    tasks = {
        "MountainCarContinuous-motor-1.0-v0": "the motor × 1",
        "MountainCarContinuous-motor-0.5-v0": "the motor × 0.5",
    }
    methods = usual("fedavg-uniform", "pr-gate-linear", "pr-reward-linear", "exploit", "isolated")
    curves = read_table(RESULTS / "mujoco_cars_curves.csv")
    return draw_curves(curves[curves.env.isin(tasks)], methods, tasks)


def bodies_matrix():
    """Every car on every body."""
    return draw_matrix(read_table(RESULTS / "mujoco_cars_matrix.csv"))


def draw_agents(name: str, panels: dict[str, tuple[int, ...]], *methods: str):
    """A panel for the mean return of some agents. panels: what it is called -> the agents."""
    rows = read_rows(name, panel="")
    parts = [rows[rows.agent.isin(agents)].assign(panel=panel) for panel, agents in panels.items()]
    return draw_dots(average(pd.concat(parts)), usual(*methods), AFTER, "isolated")


WITH_A_NEWCOMER = {"the newcomer": (3,), "the three trained": (0, 1, 2)}


def newcomers_cars():
    """A newcomer with a weak motor beside three trained cars."""
    return draw_agents(
        "mujoco_newcomers_cars",
        WITH_A_NEWCOMER,
        "fedavg-uniform",
        "pr-gate-linear",
        "pr-reward-linear",
        "pr-uniform-linear",
        "fedper-uniform",
        "kickstarting",
        "exploit",
        "isolated",
    )


def newcomers_hoppers():
    """A newcomer with more gravity beside three trained hoppers."""
    return draw_agents(
        "mujoco_newcomers_hoppers",
        WITH_A_NEWCOMER,
        "fedavg-uniform",
        "pr-reward-linear",
        "pr-gate-linear",
        "kickstarting",
        "isolated",
    )


def hoppers():
    """Hoppers with gravity of their own."""
    return draw_agents(
        "mujoco_hoppers",
        {"gravity × 0.5": (0,), "gravity × 1.25": (3,), "mean of all four": (0, 1, 2, 3)},
        "fedavg-uniform",
        "pr-uniform",
        "pr-gate-linear",
        "pr-reward-linear",
        "kickstarting",
        "fedper-uniform",
        "isolated",
    )


def cheetahs():
    """Cheetahs with target velocities of their own."""
    return draw_agents(
        "mujoco_cheetahs",
        {"1 m/s": (0,), "4 m/s": (3,), "mean of all four": (0, 1, 2, 3)},
        "fedavg-uniform",
        "pr-gate-linear",
        "fedper-uniform",
        "isolated",
    )


def skills():
    """Language models: the rare skill after training, mean of the agents."""
    rows = average(read_rows("skills_rare", "mirror_after", panel=""))
    methods = usual("fedavg-naive", "fedavg-exact", "pr-reverse", "pr-forward", "isolated")
    return draw_dots(
        rows,
        methods,
        "share of the prompts for the rare skill that are completed exactly",
        "isolated",
    )


def preferences():
    """Language models with styles of their own: own reward after training, mean of the agents."""
    rows = average(read_rows("preferences_styles", "reward_after", panel=""))
    methods = usual("fedavg-private-grpo", "pr-self0.6-grpo", "pr-uniform-grpo", "fedavg-grpo")
    return draw_dots(rows, methods | usual("isolated-grpo"), "own reward", "isolated-grpo")


def text_worlds():
    """Agents in text worlds: tasks solved after training, where there are three seeds."""
    rows = read_table(RESULTS / "text_worlds.csv", ("method", "partition", "seed", "success"))
    rows = rows[(rows.step == rows.step.max()) & (rows.category == "all")]
    kinds = {
        "iid": "even shares",
        "coverage0.2": "unequal numbers",
        "hardness0.2": "unequal hardness",
    }
    rows = rows[rows.partition.isin(kinds)]
    rows = average(rows.assign(value=rows.success, panel=rows.partition.map(kinds)))
    rows = sort_panels(rows, kinds)
    methods = usual("fedagent", "pr-uniform-grpo", "local")
    return draw_dots(rows, methods, "held-out tasks solved after training", "local")


FIGURES: dict[str, Callable] = {
    function.__name__: function
    for function in (
        own_goals,
        own_goals_methods,
        headline,
        easy_tasks,
        keycorridor,
        one_task,
        broken_peers,
        rounds,
        trust_region,
        levels,
        crowd,
        networks,
        missions,
        bits,
        bodies,
        bodies_curves,
        bodies_matrix,
        newcomers_cars,
        newcomers_hoppers,
        hoppers,
        cheetahs,
        skills,
        preferences,
        text_worlds,
    )
}
FIGURES |= {
    "confirmation": partial(draw_confirmation, "confirm_goals"),  # own goals
    "confirmation_skills": partial(draw_confirmation, "confirm_skills"),  # other parts of a skill
    "confirmation_doorkey": partial(draw_confirmation, "confirm_doorkey"),  # three rooms
    "confirmation_unlock": partial(draw_confirmation, "confirm_unlock"),  # a ball or a box
}


def main(args: Args) -> None:
    unknown = [name for name in args.names if name not in FIGURES]
    if unknown:
        refuse(f"{unknown[0]}: no such figure; there are {', '.join(FIGURES)}")
    Path(args.out).mkdir(parents=True, exist_ok=True)
    for name in args.names or FIGURES:
        save(FIGURES[name](), Path(args.out) / f"{name}.png")


if __name__ == "__main__":
    main(read_flags(Args))
