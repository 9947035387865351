"""Runs as one table; learning curves and results from them: mean over seeds with its 95 % interval.

    python benchmark/plot.py --runs runs/minigrid-quick --out minigrid-quick
    python benchmark/plot.py --search --runs runs/skills-tune --out search
    python benchmark/plot.py --from-csv --out benchmark/results/minigrid  # again, from CSV files

    from benchmark.plot import load_runs  # every iteration of each agent, for pandas
    load_runs("runs").groupby(["exp_name", "timesteps"]).return_last_100.mean().unstack(0).plot()

The same without this file, but for evaluations and settings; every row names its run:

    import pandas as pd; from pathlib import Path
    runs = pd.concat(map(pd.read_csv, Path("runs").rglob("metrics.csv")), ignore_index=True)

Writes OUT.csv (curves) and OUT_runs.csv (a row per run), and from these OUT.png and OUT_table.csv.
Runs are grouped by environment and --exp-name; a run without summary.json, or cut off, is left out,
and of repeated runs the newest counts. A curve is the training return, the mean of the last 100
episodes, or the reward of a step's completions, averaged over the agents of a run; then runs with
different seeds give mean and interval. methods.py has the methods' names, colours.
"""

import contextlib
import fnmatch
import math
import os
import re
import shlex
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

sys.path.insert(0, str(Path(__file__).parent))  # for `from benchmark.plot import load_runs`
from arguments import Damaged, read_flags, read_json, refuse
from methods import find_place, name_task, style_methods

# What may differ between the runs of a group, and does not belong into its command
UNCOMPARED = {"seed", "run_dir", "resume", "timeout", "track", "capture_video"}
UNCOMPARED |= {"wandb_project_name", "wandb_entity"}
FORMER = {
    "communication_coef": "kl_coef",
    "update_every": "local_updates",
}  # flags that had another name
# Of metrics.csv, what a curve shows: the first that there is
TRAINING_RETURNS = ("return_last_100", "reward", "success")
# Of metrics.csv, into the rows per run: means over the run and its agents. Version 0.1 had them all
DIAGNOSTICS = (
    "kl_reference_before",
    "kl_reference_after",
    "reference_entropy",
    "tv_update",
    "tv_reference",
    "tv_snapshot",
    "tv_peers",
)
BOTH = {"env_id", "learning_rate", "epsilon", "reward", "response_length"}  # a setting and a metric


@dataclass
class Args:
    runs: tuple[str, ...] = ("runs",)
    """folders to search for runs, at any depth"""
    out: str = "benchmark/results/minigrid"
    """beginning of the names of the files that are written"""
    methods: tuple[str, ...] = ()
    """only the experiments with these names, in this order; * stands for anything (empty: all)"""
    threshold: float = 0.8
    """training return of the table's steps to threshold"""
    points: int = 100
    """points of a curve"""
    # agents that have different tasks: a panel for each, with the agents that have it, instead of
    # their mean
    per_task: bool = False
    matrix: bool = False
    """also OUT_matrix.csv and OUT_matrix.png: every agent's evaluation on every task"""
    # draw what a search finds instead: the best evaluation to be expected of 1, 2, ... settings
    # that are tried
    search: bool = False
    # only write OUT.png from OUT.csv, and OUT_table.csv and OUT_matrix.png where OUT_runs.csv,
    # OUT_matrix.csv are
    from_csv: bool = False


# Reading runs


def run_folders(folders: tuple[str, ...]) -> list[Path]:
    """The folders of runs below these, at any depth, the oldest first."""
    run_paths = {path.parent for folder in folders for path in Path(folder).rglob("metrics.csv")}

    def age(folder: Path) -> tuple[int, Path]:
        stamps = re.findall(r"\d+$", folder.name)  # the second in which the run started
        return (int(stamps[0]) if stamps else 0), folder

    return sorted(run_paths, key=age)


def read_settings(folder: Path) -> tuple[dict, dict]:
    """summary.json, empty for a run that did not end, and settings under their present names.

    Raises Damaged.
    """
    summary = {}
    config = {}
    if (folder / "summary.json").is_file():
        summary = read_json(folder / "summary.json")
    if (folder / "config.json").is_file():
        config = read_json(folder / "config.json")
    settings = summary.get("settings")
    if not isinstance(settings, dict):
        others = {"script", "command", "elastic_run"}
        settings = {name: config[name] for name in config.keys() - others}
    return summary, {FORMER.get(name, name): value for name, value in settings.items()}


def read_table(path: Path, columns: tuple[str, ...] = (), **options) -> pd.DataFrame:
    """A CSV file with at least these columns, in which # begins a comment; raises Damaged."""
    try:
        table = pd.read_csv(path, **{"comment": "#"} | options)
    except (OSError, ValueError) as error:
        raise Damaged(f"{path}: cannot be read ({' '.join(str(error).split())})") from error
    missing = [name for name in columns if name not in table]
    if missing:
        raise Damaged(f"{path}: has no column {', '.join(missing)}, it is of another tool")
    return table


def read_evaluations(path: Path, metrics: pd.DataFrame) -> pd.DataFrame:
    """Columns `evaluation` and `evaluation_ci95` by iteration, or step, and agent."""
    key = [metrics.columns[0], "agent"]
    columns = {
        "mean_return": "evaluation",
        "mean_reward": "evaluation",
        "mean_success": "evaluation",
        "ci95": "evaluation_ci95",
    }
    rows = read_table(path, comment=None).rename(columns=columns)
    # An agent is judged by its own task; a language model by the first, the common prompts
    if "env_id" in metrics:
        rows = rows.merge(metrics[[*key, "env_id"]], on=key)
        rows = rows[rows["task"] == rows["env_id"]]
    return rows.drop_duplicates(key)[[*key, "evaluation", "evaluation_ci95"]]


@contextlib.contextmanager
def naming_damage(folder: Path) -> Iterator[None]:
    """Raise Damaged where a file of this run has not what it should."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        raise Damaged(f"{folder}: {problem}") from error


def load_run(folder: Path) -> pd.DataFrame:
    """One run as a table, see `load_runs`; raises Damaged."""
    with naming_damage(folder):
        return join_files(folder)


def join_files(folder: Path) -> pd.DataFrame:
    """One run as a table, from its files."""
    summary, settings = read_settings(folder)
    table = read_table(folder / "metrics.csv", comment=None)
    path = folder / "evaluations.csv"
    if path.is_file() and path.stat().st_size:
        evaluations = read_evaluations(path, table)
        table = table.merge(evaluations, on=[table.columns[0], "agent"], how="left")
    values = {"run": str(folder), "completed": summary.get("completed", False)}
    for name, value in settings.items():
        column = f"{name}_setting" if name in BOTH else name
        values[column] = " ".join(map(str, value)) if isinstance(value, list) else value
    return table.assign(**values)


def read_each(folders: tuple[str, ...], read: Callable[[Path], Any]) -> Iterator[Any]:
    """What `read` makes of each run below these folders, the oldest first.

    A run whose files have not what they should is reported and left out, and so is one of which it
    makes None.
    """
    for folder in run_folders(folders):
        try:
            with naming_damage(folder):
                run = read(folder)
        except Damaged as error:
            report(folder, f"damaged, left out ({error})")
            continue
        if run is not None:
            yield run


def load_runs(*folders: str) -> pd.DataFrame:
    """All runs below `folders` as one table: a row per iteration and agent.

    Columns: those of metrics.csv; `evaluation` and `evaluation_ci95` where the agent was evaluated,
    on its own task; `run` (the folder), `completed` (whether it ended by itself), and every
    setting. A setting with the name of a metric ends in `_setting`, as the rate from which
    `learning_rate` was annealed.
    """
    tables = list(read_each(folders, load_run))
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


@dataclass
class Run:
    folder: Path
    summary: dict
    settings: dict
    curve: pd.Series
    """training return, reward or success, averaged over agents, by environment steps per agent, or
    steps
    """
    diagnostics: dict[str, float]
    """their means over the run and its agents"""
    only_task: str = ""
    """the task of the agents that this is about, if not of all"""

    @property
    def task(self) -> str:
        """What was trained on."""
        if self.only_task:
            return self.only_task
        if "base_model" in self.settings:
            data = self.settings.get("dataset") or self.settings["env"]
            if not isinstance(data, str):
                data = " ".join(data)
            return f"{data}, {self.settings['partition']}"
        tasks = self.settings.get("env_ids") or [self.settings["env_id"]]
        return "+".join(dict.fromkeys(tasks))

    @property
    def common(self) -> dict:
        """The settings that all runs of a group have in common.

        Early runs recorded `--device auto` where later ones have what it stands for. A checkpoint
        changes nothing in the training of language models.
        """
        settings = {name: value for name, value in self.settings.items() if name not in UNCOMPARED}
        if settings.get("device") == "auto":
            settings["device"] = self.summary.get("device", "auto")
        if "base_model" in settings:
            settings.pop("save_every", None)
        return settings


def make_run(
    folder: Path,
    summary: dict,
    settings: dict,
    table: pd.DataFrame,
    only_task: str = "",
) -> Run:
    """A run, or only the agents with one task, which are in `table`."""
    x = "timesteps" if "timesteps" in table else "step"
    returns = [name for name in TRAINING_RETURNS if name in table]
    if not returns:
        raise LookupError(f"there is none of {', '.join(TRAINING_RETURNS)}")
    curve = table.groupby(x)[returns[0]].agg(lambda agents: agents.mean(skipna=False))
    curve = curve.dropna()  # there is no return before the first episode ends
    diagnostics = {name: table[name].mean() for name in DIAGNOSTICS if name in table}
    return Run(folder, summary, settings, curve, diagnostics, only_task)


def read_run(folder: Path) -> Run | None:
    """A run from its summary.json and metrics.csv, for `read_each`; None, and a report, for one
    that has not finished or is a part of one.
    """
    if not (folder / "summary.json").exists():
        report(folder, "not finished, left out")
        return None
    summary, settings = read_settings(folder)
    if summary.get("script") == "s2zpo_mujoco":
        report(folder, "a run of s2zpo_mujoco.py, for benchmark/zeroth.py, left out")
        return None
    run = make_run(folder, summary, settings, load_run(folder))
    if run.settings.get("exchange"):
        report(folder, "one process of a federation, with its own agents only, left out")
        return None
    # What else the tools need of it
    name = run.settings["exp_name"] + run.task
    header({(run.task, name): [run]})
    float(run.settings["seed"] + run.summary["completed"])
    return run


def split_run(run: Run) -> list[Run]:
    """The same run once for each of its agents' tasks: curve and evaluation of the agents that have
    it.
    """
    table = load_run(run.folder)
    if "env_id" not in table:
        refuse(f"--per-task: the agents of {run.folder} have no tasks of their own")
    runs = []
    for task, rows in table.groupby("env_id", sort=False):
        last = rows[rows.timesteps == rows.timesteps.max()]
        value = np.nan
        if "evaluation" in last:
            value = last.evaluation.mean(skipna=False)  # NaN where an agent has diverged
        summary = run.summary | {"evaluation": {"group": value}}
        runs.append(make_run(run.folder, summary, run.settings, rows, task))
    return runs


Groups = dict[tuple[str, str], list[Run]]  # (task, method) -> its runs


def split_groups(groups: Groups) -> Groups:
    """(task of an agent, method) -> its runs, with the agents that have the task."""
    split_runs = []
    for (_, name), runs in groups.items():
        for run in runs:
            split_runs += [(name, of_task) for of_task in split_run(run)]
    split = {}
    for task in dict.fromkeys(of_task.task for _, of_task in split_runs):
        for _, name in groups:
            split[task, name] = []
    for name, of_task in split_runs:
        split[of_task.task, name].append(of_task)
    return split


def match_pattern(name: str, patterns: tuple[str, ...]) -> int | None:
    """The number of the first pattern that an --exp-name matches."""
    for number, pattern in enumerate(patterns):
        if fnmatch.fnmatchcase(name, pattern):
            return number
    return None


def report(folder: Path | str, problem: str) -> None:
    """A line on stderr about a run."""
    print(f"{folder}: {problem}", file=sys.stderr)


def check_settings(runs: list[Run]) -> None:
    """Ends with one line if runs of one group had different settings."""
    first = runs[0]
    for run in runs[1:]:
        common = run.common.keys() & first.common.keys()
        if any(run.common[name] != first.common[name] for name in common):
            problem = f"the same name as {first.folder}, but other settings; name them differently"
            sys.exit(f"{run.folder}: {problem}")


def read_groups(args: Args) -> Groups:
    """(env, method) -> its runs, one per seed, in the order of --methods."""
    groups = defaultdict(dict)
    for run in read_each(args.runs, read_run):
        name = run.settings["exp_name"]
        seed = run.settings["seed"]
        if args.methods and match_pattern(name, args.methods) is None:
            continue
        if not run.summary["completed"] or run.curve.empty:
            report(run.folder, "cut off or without a single episode, left out")
            continue
        if run.summary.get("diverged"):
            report(run.folder, f"agents {run.summary['diverged']} have diverged")
        by_seed = groups[run.task, name]
        if seed in by_seed:
            problem = f"left out, {run.folder} has the same name and seed and is newer"
            report(by_seed[seed].folder, problem)
        by_seed[seed] = run
    for by_seed in groups.values():
        check_settings(list(by_seed.values()))

    def order(key: tuple[str, str]) -> tuple:
        task, name = key
        return task, match_pattern(name, args.methods) or 0, name

    ordered = {}
    for key in sorted(groups, key=order):
        ordered[key] = [groups[key][seed] for seed in sorted(groups[key])]
    return ordered


# What files say about the runs behind them


def make_command(script: str, settings: dict) -> str:
    """The command of a script with these settings, which a group's runs have in common."""
    path = f"{script}.py"
    for folder in ("benchmark", "benchmark/baselines"):
        if (Path(__file__).parents[1] / folder / path).exists():
            path = f"{folder}/{path}"
    words = ["python", path]
    for name, value in settings.items():
        if name in ("communicator_matrix", "reward_matrix"):  # what a flag's file held
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            if value:
                words += [f"--{flag}", *map(str, value)]
        elif value not in (None, ""):
            words += [f"--{flag}", str(value)]
    return shlex.join(words)


def header(groups: Groups) -> str:
    """Comment lines: every group's command, its seeds, and the versions.

    Groups of one run's agents on different tasks have one command.
    """
    lines = []
    versions = defaultdict(set)
    backends = set()
    for runs in groups.values():
        seeds = " ".join(str(run.settings["seed"]) for run in runs)
        command = make_command(runs[0].summary["script"], runs[0].common)
        lines.append(f"# {command}  (--seed {seeds})\n")
        for run in runs:
            backends.add(run.summary.get("env_backend", "none"))
            for name, version in run.summary["versions"].items():
                versions[name].add(version)
    packages = [f"{name} {' or '.join(sorted(each))}" for name, each in versions.items()]
    lines.append(f"# {', '.join(packages)}\n")
    lines.append(f"# environments: {', '.join(sorted(backends))}\n")
    return "".join(dict.fromkeys(lines))


def finished_runs(folders: tuple[str, ...], needed: tuple[str, ...]) -> tuple[pd.DataFrame, str]:
    """The runs below `folders` that count for `read_groups`, as one table like `load_runs`, and
    their `header`. Ends with one line where they have not the columns that are needed.
    """
    groups = read_groups(Args(runs=folders))
    if not groups:
        sys.exit(f"--runs {' '.join(folders)}: no finished run in there")
    tables = [load_run(run.folder) for runs in groups.values() for run in runs]
    for table in tables:
        missing = [name for name in needed if name not in table]
        if missing:
            refuse(f"--runs: {table.run[0]} has no {missing[0]}")
    return pd.concat(tables, ignore_index=True), header(groups)


def check_names(runs: pd.DataFrame, keys: list) -> None:
    """Ends with one line where runs of different folders have equal keys: they would be one row."""
    for folders in runs.groupby(keys).run.unique():
        if len(folders) > 1:
            first, second, *_ = sorted(folders)
            names = f"{first} and {second} have the same --exp-name and --seed"
            refuse(f"--runs: {names}; give the folders of one task")


def count_seeds(number: int) -> str:
    """1 seed, 2 seeds, ..."""
    return "1 seed" if number == 1 else f"{number} seeds"


def comments_of(path: Path) -> str:
    """The comment lines of a CSV file."""
    lines = path.read_text().splitlines(keepends=True)
    return "".join(line for line in lines if line.startswith("#"))


def format_number(value: float) -> str:
    """Six digits, but all of a whole number, which may be a counter."""
    is_whole = value.is_integer() and abs(value) < 2**53
    return f"{value:.0f}" if is_whole else f"{value:.6g}"


def write(path: Path, comments: str, table: pd.DataFrame) -> None:
    """A CSV file with comments on top."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        file.write(comments)
        table.to_csv(file, index=False, float_format=format_number, lineterminator="\r\n")


# Tables


def with_interval(values: pd.DataFrame) -> pd.DataFrame:
    """Mean over the columns (seeds) and its 95 % interval by Student's t; NaN limits for a single
    seed.
    """
    half = stats.t.ppf(0.975, values.shape[1] - 1) * values.sem(axis=1)
    mean = values.mean(axis=1, skipna=False)
    return pd.DataFrame({"mean": mean, "ci_low": mean - half, "ci_high": mean + half})


def make_curves(groups: Groups, points: int) -> pd.DataFrame:
    """Each environment's curves on a common grid of timesteps, where all runs of a method have
    data.
    """
    longest = defaultdict(int)
    for (env, _), runs in groups.items():
        longest[env] = max(longest[env], *(run.curve.index[-1] for run in runs))
    curves = []
    for (env, method), runs in groups.items():
        grid = np.linspace(longest[env] / points, longest[env], points)
        grid = np.unique(grid.round().astype(int))
        first = max(run.curve.index[0] for run in runs)
        last = min(run.curve.index[-1] for run in runs)
        grid = grid[(grid >= first) & (grid <= last)]
        seeds = {k: np.interp(grid, run.curve.index, run.curve) for k, run in enumerate(runs)}
        start = pd.DataFrame({"env": env, "method": method, "timesteps": grid})
        interval = with_interval(pd.DataFrame(seeds))
        curves.append(pd.concat((start, interval), axis=1).assign(seeds=len(runs)))
    return pd.concat(curves)


def own_topic(run: Run) -> float:
    """The agents' mean evaluation on their own topics, which follow the common prompts."""
    values = []
    for agent, row in enumerate(run.summary["evaluation"]["agents"]):
        means = [task["mean"] for task in row.values()]
        if means:  # it was evaluated
            values.append(means[1 + agent])  # None where it has diverged
    return float(np.mean(np.array(values, dtype=float))) if values else float("nan")


def make_rows(groups: Groups, threshold: float) -> pd.DataFrame:
    """A row per run: evaluation at the end, means over the run of return and diagnostics, steps to
    `threshold`.
    """
    by_topic = any(env.endswith(", topic") for env, _ in groups)  # language models
    rows = []
    for (env, method), runs in groups.items():
        for run in runs:
            row = {"env": env, "method": method, "seed": run.settings["seed"]}
            row["timesteps"] = run.summary.get("timesteps_per_agent", run.curve.index[-1])
            row["evaluation"] = run.summary["evaluation"]["group"]
            if by_topic:
                row["own_topic"] = own_topic(run) if env.endswith(", topic") else np.nan
            row["mean_training_return"] = run.curve.mean()
            row |= run.diagnostics
            reached = run.curve.index[run.curve >= threshold]
            row[f"steps_to_{threshold:g}"] = reached[0] if len(reached) else np.nan
            rows.append(row)
    return pd.DataFrame(rows).astype({"evaluation": float})


def make_search(runs: pd.DataFrame) -> pd.DataFrame:
    """Expected validation performance (paper, figures 2 and 3): a curve per method over the
    settings that are tried.

    runs: of `make_rows`. A method is the beginning of --exp-name, before the first `_`, as in
    choose.py; a search is a run of each of its settings with one seed. The mean over the seeds'
    searches; the limits are a standard deviation within a search away.
    """
    from stats import expected_maximum  # in this folder, which is no package

    for _, run in runs[runs.evaluation.isna()].iterrows():
        sys.exit(f"{run.env}, {run.method}, seed {run.seed}: has no evaluation")
    curves = []
    names = runs.method.str.partition("_")[0]
    for (env, method), rows in runs.groupby(["env", names], sort=False):
        searches = rows.pivot(index="seed", columns="method", values="evaluation")
        if searches.isna().any(axis=None):
            sys.exit(f"{env}, {method}: not every seed has tried the same settings")
        bests = [expected_maximum(scores) for scores in searches.to_numpy()]
        mean, variance = np.mean(bests, axis=0)
        curve = {"env": env, "method": method, "settings": np.arange(1, len(mean) + 1)}
        curve["mean"] = mean
        curve["ci_low"] = mean - variance**0.5
        curve["ci_high"] = mean + variance**0.5
        curve["seeds"] = len(searches)
        curves.append(pd.DataFrame(curve))
    return pd.concat(curves)


def make_matrix(groups: Groups) -> pd.DataFrame:
    """Every agent's evaluation on every task: the mean over seeds and its interval."""
    rows = [
        {
            "method": method,
            "agent": agent,
            "task": task,
            "seed": run.settings["seed"],
            "value": cell["mean"],
        }
        for (_, method), runs in groups.items()
        for run in runs
        for agent, row in enumerate(run.summary["evaluation"]["agents"])
        for task, cell in row.items()
    ]
    if not rows:
        refuse("--matrix: the runs have no evaluations")
    key = ["method", "agent", "task"]
    cells = pd.DataFrame(rows).drop_duplicates().groupby(key, sort=False).value
    table = {cell: with_interval(values.to_frame().T).iloc[0] for cell, values in cells}
    return pd.DataFrame(table).T.rename_axis(key).reset_index()


def make_table(rows: pd.DataFrame) -> pd.DataFrame:
    """From rows per run: means and intervals of each method. Steps: `not reached` unless every seed
    got there.
    """
    results = rows.columns[rows.columns.get_loc("evaluation") :].difference(DIAGNOSTICS, sort=False)
    (steps,) = [name for name in results if name.startswith("steps_to_")]
    table = []
    for (env, method), runs in rows.groupby(["env", "method"], sort=False):
        row = {"env": env, "method": method, "timesteps": runs.timesteps.iloc[0]}
        for name in results:
            form = ".0f" if name.startswith("steps") else ".6g"
            interval = with_interval(runs[[name]].T).iloc[0]
            texts = [format(value, form) for value in interval]
            # A mean over the seeds that get there would flatter
            if name.startswith("steps") and runs[name].isna().any():
                texts = ["not reached", "", ""]
            row |= dict(zip((name, f"{name}_ci_low", f"{name}_ci_high"), texts, strict=True))
        per_seed = ["-" if np.isnan(value) else f"{value:.0f}" for value in runs[steps]]
        row["steps_per_seed"] = " ".join(per_seed)
        row["seeds"] = " ".join(map(str, runs.seed))
        table.append(row)
    return pd.DataFrame(table).replace("nan", "")


# Figures


def describe_axes(x: str, control: bool) -> tuple[str, str]:
    """Labels of the two axes; x: the column that the curves are over."""
    if x == "settings":
        return "settings tried", "evaluation of the best\n(mean over agents)"
    if control:
        x_label = "environment steps per agent (millions)"
        return x_label, "training return\n(last 100 episodes, mean over agents)"
    return "steps", "training reward\n(of a step, mean over agents)"


def draw(csv_path: Path, png_path: Path):
    """OUT.png from OUT.csv: one panel per environment, one colour per method; returns the figure.

    Intervals lie behind all curves, and do not decide what part of the axis is shown: those of two
    or three seeds can be huge.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves = read_table(csv_path, ("env", "method", "mean", "ci_low", "ci_high", "seeds"))
    x = curves.columns[2]  # timesteps, or settings
    styles = style_methods(curves.method.unique())
    envs = list(curves.env.unique())
    size = (4.6 * len(envs), 4.2)
    figure, axes = plt.subplots(1, len(envs), figsize=size, squeeze=False, layout="constrained")
    lines = {}  # method -> its line in the legend
    counts = defaultdict(set)  # method -> numbers of its seeds
    for axis, env in zip(axes[0], envs, strict=True):
        panel = curves[curves.env == env]
        control = panel[x].max() > 1e4  # a language model takes tens of steps
        unit = 1e6 if control else 1
        for method, rows in panel.groupby("method", sort=False):
            style = styles[method]
            xs = rows[x] / unit
            band = axis.fill_between(xs, rows.ci_low, rows.ci_high, color=style.colour, zorder=1)
            band.set(alpha=0.1 if len(styles) <= 4 else 0.06, linewidth=0)
            (line,) = axis.plot(xs, rows["mean"], style.dashes, color=style.colour, zorder=3)
            lines.setdefault(method, line)
            counts[method].add(str(rows.seeds.iloc[0]))
        axis.set_title(name_task(env))
        x_label, y_label = describe_axes(x, control)
        axis.set_xlabel(x_label)
        if axis is axes[0][0]:
            axis.set_ylabel(y_label)
        axis.set_xlim(left=1 if x == "settings" else 0)
        low = min(0, panel["mean"].min())
        high = max(1 if control else 0.3, panel["mean"].max())
        axis.set_ylim(low - 0.03 * (high - low), high + 0.03 * (high - low))
        axis.grid(alpha=0.3)
    for method, line in lines.items():
        line.set_label(f"{styles[method].label} ({', '.join(sorted(counts[method]))} seeds)")
    columns = min(3, 2 * len(envs), len(lines))
    handles = [lines[method] for method in styles]
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
    figure.savefig(png_path, dpi=150, bbox_inches="tight")  # a legend may be wider than a panel
    plt.close(figure)
    return figure


def draw_matrix(csv_path: Path, png_path: Path):
    """OUT_matrix.png from OUT_matrix.csv: a panel per method, at most seven in a row, agents down
    and tasks across; returns the figure.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    table = read_table(csv_path)
    methods = sorted(table.method.unique(), key=find_place)
    tasks = list(table.task.unique())
    styles = style_methods(methods)
    start = 0
    if len(tasks) > 1:  # what differs is enough: 5x5 of DoorKey-5x5, S3R1 of KeyCorridorS3R1
        start = re.match(r"(.*[a-z\- ])?", os.path.commonprefix(tasks)).end()
    highest = max(1, table["mean"].max())
    down = math.ceil(len(methods) / 7)
    across = math.ceil(len(methods) / down)
    size = (2.6 * across, 3.1 * down)
    figure, axes = plt.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[len(methods) :]:
        axis.set_axis_off()
    for axis, method in zip(axes.flat, methods, strict=False):
        rows = table[table.method == method]
        values = rows.pivot(index="agent", columns="task", values="mean")[tasks]
        values.columns = [task[start:].removesuffix("-v0") for task in tasks]
        draw_cells(axis, values, highest)
        axis.set_title(textwrap.fill(styles[method].label, 24))
    figure.savefig(png_path, dpi=150)
    plt.close(figure)
    return figure


def draw_cells(axis, values: pd.DataFrame, highest: float) -> None:
    """A panel with a coloured number for each agent, down, and task, across; colours up to
    `highest`.
    """
    axis.imshow(values, vmin=0, vmax=highest, cmap="cividis")
    for (row, column), value in np.ndenumerate(values):
        colour = "white" if value < 0.6 * highest else "black"
        axis.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour)
    axis.set_xticks(range(len(values.columns)), values.columns, rotation=20)
    axis.set_yticks(range(len(values)), [f"agent {agent}" for agent in values.index])


def save_with_legend(figure, png_path: Path, columns: int = 4) -> None:
    """Write the figure, under it the legend of its first axis, and close it."""
    import matplotlib.pyplot as plt

    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    figure.savefig(png_path, dpi=150)
    plt.close(figure)


def write_results(out: str, table: pd.DataFrame, note: str, draw: Callable) -> None:
    """Write OUT_table.csv, print it, and draw OUT.png from OUT.csv.

    note: comment lines of the table, after those of OUT.csv.
    """
    path = Path(f"{out}.csv")
    write(Path(f"{out}_table.csv"), comments_of(path) + note, table)
    print(table.to_string(index=False))
    picture = Path(f"{out}.png")
    draw(path, picture)
    print(f"wrote {picture}")


def main(args: Args) -> None:
    if args.points < 1:
        refuse(f"--points {args.points}: must be at least 1")
    curves = Path(f"{args.out}.csv")
    rows = Path(f"{args.out}_runs.csv")
    matrix = Path(f"{args.out}_matrix.csv")
    if not args.from_csv:
        whole = read_groups(args)
        groups = split_groups(whole) if args.per_task else whole
        if not groups:
            folders = " ".join(args.runs)
            sys.exit(f"--runs {folders}: no finished run of these methods in there")
        runs = make_rows(groups, args.threshold)
        table = make_search(runs) if args.search else make_curves(groups, args.points)
        write(curves, header(groups), table)
        write(rows, header(groups), runs)
        if args.matrix:
            write(matrix, header(whole), make_matrix(whole))
    elif not curves.is_file():
        refuse(f"--from-csv: there is no {curves}")
    if rows.is_file():
        comments = comments_of(rows)
        comments += "# intervals: 95 %, Student's t over seeds;"
        comments += " steps: `not reached` unless every seed got there\n"
        results = make_table(read_table(rows, ("env", "method", "timesteps", "evaluation", "seed")))
        write(Path(f"{args.out}_table.csv"), comments, results)
        print(results.to_string(index=False))
    if matrix.is_file():
        draw_matrix(matrix, matrix.with_suffix(".png"))
    picture = Path(f"{args.out}.png")
    draw(curves, picture)
    print(f"wrote {picture}")


if __name__ == "__main__":
    main(read_flags(Args))
