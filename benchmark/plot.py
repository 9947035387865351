"""Runs as one table; learning curves and results from them: mean over seeds with its 95 % interval.

    python benchmark/plot.py --runs runs/minigrid-quick --out minigrid-quick
    python benchmark/plot.py --search --runs runs/skills-tune --out search  # expected validation performance
    python benchmark/plot.py --from-csv --out benchmark/results/minigrid  # figure and table again, from the CSV files

    from benchmark.plot import load_runs  # every iteration of each agent, for pandas
    load_runs("runs").groupby(["exp_name", "timesteps"]).return_last_100.mean().unstack(0).plot()

The same without this file, but for evaluations and settings; every row names its run:

    import pandas as pd; from pathlib import Path
    runs = pd.concat(map(pd.read_csv, Path("runs").rglob("metrics.csv")), ignore_index=True)

Writes OUT.csv (curves) and OUT_runs.csv (a row per run), and from these OUT.png and OUT_table.csv. Runs are grouped by
environment and --exp-name; a run without summary.json, or cut off, is left out, and of repeated runs the newest counts.
A curve is the training return, the mean of the last 100 episodes, or the reward of a step's completions, averaged over
the agents of a run; then runs with different seeds give mean and interval.
"""

import fnmatch
import json
import os
import re
import shlex
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import tyro
from scipy import stats

# Okabe and Ito's colours, which colour-blind readers can tell apart; the dashes help from the eighth method on
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", ":", "-.")
# What may differ between the runs of a group, and does not belong into its command
UNCOMPARED = {"seed", "run_dir", "resume", "save_every", "timeout", "track", "capture_video"}
UNCOMPARED |= {"wandb_project_name", "wandb_entity"}
FORMER = {"communication_coef": "kl_coef", "update_every": "local_updates"}  # flags that had another name
# Of metrics.csv, into the rows per run: means over the run and its agents
DIAGNOSTICS = ("kl_reference_before", "kl_reference_after", "reference_entropy", "tv_update", "tv_snapshot", "tv_peers")
BOTH = {"env_id", "learning_rate", "epsilon", "reward", "response_length"}  # what is a setting and a metric


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
    per_task: bool = False
    """agents that have different tasks: a panel for each, with the agents that have it, instead of their mean"""
    matrix: bool = False
    """also OUT_matrix.csv and OUT_matrix.png: every agent's evaluation on every task"""
    search: bool = False
    """draw what a search finds instead: the best evaluation to be expected of 1, 2, ... settings that are tried"""
    from_csv: bool = False
    """only write OUT.png from OUT.csv, and OUT_table.csv and OUT_matrix.png where OUT_runs.csv, OUT_matrix.csv are"""


def run_folders(folders: tuple[str, ...]) -> list[Path]:
    """The folders of runs below these, at any depth, the oldest first."""
    found = {path.parent for folder in folders for path in Path(folder).rglob("metrics.csv")}
    return sorted(found, key=lambda folder: (int((re.findall(r"\d+$", folder.name) or [0])[0]), folder))


def read_settings(folder: Path) -> tuple[dict, dict]:
    """summary.json, empty for a run that did not end, and the settings under their present names."""
    files = folder / "summary.json", folder / "config.json"
    summary, config = (json.loads(path.read_text()) if path.is_file() else {} for path in files)
    settings = summary.get("settings") or {name: config[name] for name in config.keys() - {"script", "elastic_run"}}
    return summary, {FORMER.get(name, name): value for name, value in settings.items()}


def load_run(folder: Path) -> pd.DataFrame:
    """One run as a table, see `load_runs`."""
    summary, settings = read_settings(folder)
    table, evaluated = pd.read_csv(folder / "metrics.csv"), folder / "evaluations.csv"
    if evaluated.is_file() and evaluated.stat().st_size:
        by, names = [table.columns[0], "agent"], {"mean_return": "evaluation", "mean_reward": "evaluation"}
        rows = pd.read_csv(evaluated).rename(columns=names | {"ci95": "evaluation_ci95"})
        if "env_id" in table:  # an agent is judged by its own task; a language model by the first, the common prompts
            rows = rows.merge(table[[*by, "env_id"]], on=by).query("task == env_id")
        table = table.merge(rows.drop_duplicates(by)[[*by, "evaluation", "evaluation_ci95"]], on=by, how="left")
    values = {"run": str(folder), "completed": summary.get("completed", False)}
    for name, value in settings.items():
        own = f"{name}_setting" if name in BOTH else name
        values[own] = " ".join(map(str, value)) if isinstance(value, list) else value
    return table.assign(**values)


def load_runs(*folders: str) -> pd.DataFrame:
    """All runs below `folders` as one table: a row per iteration and agent.

    Columns: those of metrics.csv; `evaluation` and `evaluation_ci95` where the agent was evaluated, on its own task;
    `run` (the folder), `completed` (whether it ended by itself), and every setting. A setting with the name of a metric
    ends in `_setting`, as the rate from which `learning_rate` was annealed.
    """
    tables = [load_run(folder) for folder in run_folders(folders)]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


@dataclass
class Run:
    folder: Path
    summary: dict
    settings: dict
    curve: pd.Series
    """training return, or reward, averaged over agents, by environment steps per agent, or steps"""
    diagnostics: dict[str, float]
    """their means over the run and its agents"""
    part: str = ""
    """the task of the agents that this is about, if not of all"""

    @property
    def task(self) -> str:
        """What was trained on."""
        if self.part:
            return self.part
        if "base_model" in self.settings:
            data = self.settings["dataset"]
            return f"{data if isinstance(data, str) else ' '.join(data)}, {self.settings['partition']}"
        return "+".join(dict.fromkeys(self.settings.get("env_ids") or [self.settings["env_id"]]))

    @property
    def common(self) -> dict:
        """The settings that all runs of a group have in common."""
        return {name: value for name, value in self.settings.items() if name not in UNCOMPARED}


def make_run(folder: Path, summary: dict, settings: dict, table: pd.DataFrame, part: str = "") -> Run:
    """A run, or the part of it that is in `table`."""
    x, y = ("timesteps", "return_last_100") if "timesteps" in table else ("step", "reward")
    curve = table.groupby(x)[y].agg(lambda agents: agents.mean(skipna=False))
    diagnostics = {name: table[name].mean() for name in DIAGNOSTICS if name in table}
    return Run(folder, summary, settings, curve.dropna(), diagnostics, part)  # no return before the first episode ends


def read_run(folder: Path) -> Run:
    """A run from its summary.json and metrics.csv."""
    return make_run(folder, *read_settings(folder), load_run(folder))


def by_task(run: Run) -> list[Run]:
    """The same run once for each of its agents' tasks: curve and evaluation of the agents that have it."""
    parts = []
    for task, own in load_run(run.folder).groupby("env_id", sort=False):
        last = own[own.timesteps == own.timesteps.max()]
        value = last.evaluation.mean() if "evaluation" in last else np.nan
        parts.append(make_run(run.folder, run.summary | {"evaluation": {"group": value}}, run.settings, own, task))
    return parts


def split_groups(groups: dict[tuple[str, str], list[Run]]) -> dict[tuple[str, str], list[Run]]:
    """(task of an agent, method) -> the parts of its runs."""
    parts = [(name, part) for (_, name), runs in groups.items() for run in runs for part in by_task(run)]
    split = {(task, name): [] for task in dict.fromkeys(part.task for _, part in parts) for _, name in groups}
    for name, part in parts:
        split[part.task, name].append(part)
    return split


def read_groups(args: Args) -> dict[tuple[str, str], list[Run]]:
    """(env, method) -> its runs, one per seed, in the order of the methods asked for."""
    groups = defaultdict(dict)
    for folder in run_folders(args.runs):
        if not (folder / "summary.json").exists():
            print(f"{folder}: not finished, left out", file=sys.stderr)
            continue
        run = read_run(folder)
        key, seed = (run.task, run.settings["exp_name"]), run.settings["seed"]
        if args.methods and not any(fnmatch.fnmatchcase(key[1], pattern) for pattern in args.methods):
            continue
        if not run.summary["completed"] or run.curve.empty:
            print(f"{folder}: cut off or without a single episode, left out", file=sys.stderr)
            continue
        if run.summary.get("diverged"):
            print(f"{folder}: agents {run.summary['diverged']} have diverged", file=sys.stderr)
        if seed in groups[key]:
            older = groups[key][seed].folder
            print(f"{older}: left out, {folder} has the same name and seed and is newer", file=sys.stderr)
        groups[key][seed] = run
    for first, *others in (list(runs.values()) for runs in groups.values() if runs):
        for run in others:
            if any(run.common[name] != first.common[name] for name in run.common.keys() & first.common.keys()):
                sys.exit(f"{run.folder}: the same name as {first.folder}, but other settings; name them differently")

    def order(key: tuple[str, str]) -> tuple:
        matches = [k for k, pattern in enumerate(args.methods) if fnmatch.fnmatchcase(key[1], pattern)]
        return key[0], matches[:1], key[1]

    keys = sorted((key for key in groups if groups[key]), key=order)
    return {key: [groups[key][seed] for seed in sorted(groups[key])] for key in keys}


def command(run: Run) -> str:
    """The command, with every setting, that `run` and the other seeds of its group come from."""
    words = ["python", f"{run.summary['script']}.py"]
    if (Path(__file__).parent / "baselines" / words[1]).exists():
        words[1] = f"benchmark/baselines/{words[1]}"
    for name, value in run.common.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            words += [f"--{flag}", *map(str, value)] if value else []
        elif value not in (None, ""):
            words += [f"--{flag}", str(value)]
    return shlex.join(words)


def header(groups: dict[tuple[str, str], list[Run]]) -> str:
    """Comment lines: every group's command, its seeds, and the versions."""
    lines = []
    for runs in groups.values():
        seeds = " ".join(str(run.settings["seed"]) for run in runs)
        lines.append(f"# {command(runs[0])}  (--seed {seeds})\n")
    versions = defaultdict(set)
    for run in (run for runs in groups.values() for run in runs):
        for name, version in run.summary["versions"].items():
            versions[name].add(version)
    backends = {run.summary.get("env_backend", "none") for runs in groups.values() for run in runs}
    named = (f"{name} {' or '.join(sorted(each))}" for name, each in versions.items())
    return "".join([*lines, f"# {', '.join(named)}\n", f"# environments: {', '.join(sorted(backends))}\n"])


def finished_runs(folders: tuple[str, ...]) -> tuple[pd.DataFrame, str]:
    """The runs below `folders` that count for `read_groups`, as one table like `load_runs`, and their `header`."""
    groups = read_groups(Args(runs=folders))
    if not groups:
        sys.exit(f"--runs {' '.join(folders)}: no finished run in there")
    tables = [load_run(run.folder) for runs in groups.values() for run in runs]
    return pd.concat(tables, ignore_index=True), header(groups)


def comments_of(path: Path) -> str:
    """The comment lines of a CSV file."""
    return "".join(line for line in path.read_text().splitlines(keepends=True) if line.startswith("#"))


def with_interval(values: pd.DataFrame) -> pd.DataFrame:
    """Mean over the columns (seeds) and its 95 % interval by Student's t; NaN limits for a single seed."""
    half = stats.t.ppf(0.975, values.shape[1] - 1) * values.sem(axis=1)
    mean = values.mean(axis=1, skipna=False)
    return pd.DataFrame({"mean": mean, "ci_low": mean - half, "ci_high": mean + half})


def make_curves(groups: dict[tuple[str, str], list[Run]], points: int) -> pd.DataFrame:
    """Each environment's curves on a common grid of timesteps, where all runs of a method have data."""
    curves = []
    for (env, method), runs in groups.items():
        longest = max(run.curve.index[-1] for key, others in groups.items() if key[0] == env for run in others)
        grid = np.unique(np.linspace(longest / points, longest, points).round().astype(int))
        first, last = max(run.curve.index[0] for run in runs), min(run.curve.index[-1] for run in runs)
        grid = grid[(grid >= first) & (grid <= last)]
        seeds = pd.DataFrame({k: np.interp(grid, run.curve.index, run.curve) for k, run in enumerate(runs)})
        start = pd.DataFrame({"env": env, "method": method, "timesteps": grid})
        curves.append(pd.concat((start, with_interval(seeds)), axis=1).assign(seeds=len(runs)))
    return pd.concat(curves)


def own_topic(run: Run) -> float:
    """The mean over agents of the evaluation on their own topics, which follow the common prompts."""
    matrix = [[task["mean"] for task in row.values()] for row in run.summary["evaluation"]["agents"]]
    return float(np.mean([row[1 + agent] for agent, row in enumerate(matrix)] or [np.nan]))


def make_rows(groups: dict[tuple[str, str], list[Run]], threshold: float) -> pd.DataFrame:
    """A row per run: evaluation at the end, means over the run of return and diagnostics, steps to `threshold`."""
    rows = []
    for (env, method), runs in groups.items():
        for run in runs:
            row = {"env": env, "method": method, "seed": run.settings["seed"]}
            row["timesteps"] = run.summary.get("timesteps_per_agent", run.curve.index[-1])
            row["evaluation"] = run.summary["evaluation"]["group"]
            if any(env.endswith(", topic") for env, _ in groups):  # language models: each agent on its own topic
                row["own_topic"] = own_topic(run) if env.endswith(", topic") else np.nan
            row["mean_training_return"] = run.curve.mean()
            row |= run.diagnostics
            reached = run.curve.index[run.curve >= threshold]
            rows.append(row | {f"steps_to_{threshold:g}": reached[0] if len(reached) else np.nan})
    return pd.DataFrame(rows).astype({"evaluation": float})


def make_search(runs: pd.DataFrame) -> pd.DataFrame:
    """Expected validation performance (paper, figures 2 and 3): a curve per method over the settings that are tried.

    runs: of `make_rows`. A method is the beginning of --exp-name, before the first `_`, as in choose.py; a search is a
    run of each of its settings with one seed. The mean over the seeds' searches; the limits are a standard deviation
    within a search away.
    """
    from stats import expected_maximum  # in this folder, which is no package

    for _, run in runs[runs.evaluation.isna()].iterrows():
        sys.exit(f"{run.env}, {run.method}, seed {run.seed}: has no evaluation")
    curves = []
    for (env, method), own in runs.groupby(["env", runs.method.str.partition("_")[0]], sort=False):
        searches = own.pivot(index="seed", columns="method", values="evaluation")
        if searches.isna().any(axis=None):
            sys.exit(f"{env}, {method}: not every seed has tried the same settings")
        mean, variance = np.mean([expected_maximum(scores) for scores in searches.to_numpy()], axis=0)
        curve = {"mean": mean, "ci_low": mean - variance**0.5, "ci_high": mean + variance**0.5, "seeds": len(searches)}
        start = {"env": env, "method": method, "settings": np.arange(1, len(mean) + 1)}
        curves.append(pd.DataFrame(start | curve))
    return pd.concat(curves)


def make_matrix(groups: dict[tuple[str, str], list[Run]]) -> pd.DataFrame:
    """Every agent's evaluation on every task: the mean over seeds and its interval."""
    rows = [
        {"method": method, "agent": agent, "task": task, "seed": run.settings["seed"], "value": cell["mean"]}
        for (_, method), runs in groups.items()
        for run in runs
        for agent, row in enumerate(run.summary["evaluation"]["agents"])
        for task, cell in row.items()
    ]
    cells = pd.DataFrame(rows).drop_duplicates().groupby(["method", "agent", "task"], sort=False).value
    table = {key: with_interval(values.to_frame().T).iloc[0] for key, values in cells}
    return pd.DataFrame(table).T.rename_axis(["method", "agent", "task"]).reset_index()


def make_table(rows: pd.DataFrame) -> pd.DataFrame:
    """From rows per run: means and intervals of each method. Steps: `not reached` unless every seed got there."""
    table = []
    for (env, method), runs in rows.groupby(["env", "method"], sort=False):
        row = {"env": env, "method": method, "timesteps": runs.timesteps.iloc[0]}
        for name in rows.columns[rows.columns.get_loc("evaluation") :].difference(DIAGNOSTICS, sort=False):
            interval = with_interval(runs[[name]].T).iloc[0]
            mean, low, high = (f"{x:.0f}" if name.startswith("steps") else f"{x:.6g}" for x in interval)
            if name.startswith("steps") and runs[name].isna().any():  # a mean over the lucky seeds would flatter
                mean, low, high = "not reached", "", ""
            row |= {name: mean, f"{name}_ci_low": low, f"{name}_ci_high": high}
        row["steps_per_seed"] = " ".join("-" if x != x else f"{x:.0f}" for x in runs[rows.columns[-1]])
        table.append(row | {"seeds": " ".join(map(str, runs.seed))})
    return pd.DataFrame(table).replace("nan", "")


def write(path: Path, comments: str, table: pd.DataFrame) -> None:
    """A CSV file with comments on top."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        file.write(comments)
        table.to_csv(file, index=False, float_format="%.6g", lineterminator="\r\n")


def draw(csv_path: Path, png_path: Path) -> None:
    """OUT.png from OUT.csv: one panel per environment, one colour per method."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves = pd.read_csv(csv_path, comment="#")
    x = curves.columns[2]  # timesteps, or settings
    curves = {env: dict(list(own.groupby("method", sort=False))) for env, own in curves.groupby("env", sort=False)}
    methods = list(dict.fromkeys(method for env in curves.values() for method in env))
    figure, axes = plt.subplots(1, len(curves), figsize=(4.6 * len(curves), 4.2), squeeze=False, layout="constrained")
    handles, counts = {}, defaultdict(set)
    for axis, (env, by_method) in zip(axes[0], curves.items(), strict=True):
        longest = max(rows[x].max() for rows in by_method.values())
        unit = 1e6 if longest > 1e4 else 1  # a language model takes tens of steps
        for method, rows in by_method.items():
            xs = rows[x] / unit
            k = methods.index(method)
            style = {"color": COLOURS[k % len(COLOURS)], "linestyle": DASHES[k // len(COLOURS) % len(DASHES)]}
            line = handles.setdefault(method, axis.plot(xs, rows["mean"], **style)[0])
            counts[method].add(str(rows.seeds.iloc[0]))
            line.set_label(f"{method} ({', '.join(sorted(counts[method]))} seeds)")
            axis.fill_between(xs, rows.ci_low, rows.ci_high, color=style["color"], alpha=0.1, linewidth=0)
        axis.set_title(env)
        label = "environment steps per agent (millions)" if unit > 1 else "steps"
        axis.set_xlabel("settings tried" if x == "settings" else label)
        axis.set_xlim(left=int(x == "settings"))
        means = [rows["mean"].agg(f) for rows in by_method.values() for f in ("min", "max")]
        # Not the intervals: those of two or three seeds can be huge
        low, high = min(0, *means), max(1 if unit > 1 else 0.3, *means)
        axis.set_ylim(low - 0.03 * (high - low), high + 0.03 * (high - low))
        axis.grid(alpha=0.3)
    kind = "return\n(last 100 episodes, mean over agents)" if unit > 1 else "reward\n(of a step, mean over agents)"
    axes[0][0].set_ylabel("evaluation of the best\n(mean over agents)" if x == "settings" else f"training {kind}")
    columns = min(3, 2 * len(curves), len(handles))
    figure.legend(handles=list(handles.values()), loc="outside lower center", ncols=columns, frameon=False)
    figure.savefig(png_path, dpi=150, bbox_inches="tight")  # a legend may be wider than a panel


def draw_matrix(csv_path: Path, png_path: Path) -> None:
    """OUT_matrix.png from OUT_matrix.csv: a panel per method, agents down and tasks across."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    table = pd.read_csv(csv_path, comment="#")
    methods, tasks = table.method.unique(), list(table.task.unique())
    start = len(os.path.commonprefix(tasks)) if len(tasks) > 1 else 0  # what differs is enough
    figure, axes = plt.subplots(1, len(methods), figsize=(2.6 * len(methods), 2.9), squeeze=False, layout="constrained")
    for axis, method in zip(axes[0], methods, strict=True):
        values = table[table.method == method].pivot(index="agent", columns="task", values="mean")[tasks]
        axis.imshow(values, vmin=0, vmax=max(1, table["mean"].max()), cmap="cividis")
        for (row, column), value in np.ndenumerate(values):
            colour = "white" if value < 0.6 * max(1, table["mean"].max()) else "black"
            axis.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour)
        axis.set_title(method)
        axis.set_xticks(range(len(tasks)), [task[start:].removesuffix("-v0") for task in tasks], rotation=20)
        axis.set_yticks(range(len(values)), [f"agent {agent}" for agent in values.index])
    figure.savefig(png_path, dpi=150)


def main(args: Args) -> None:
    curves, rows, table, picture = (Path(args.out + end) for end in (".csv", "_runs.csv", "_table.csv", ".png"))
    if not args.from_csv:
        whole = read_groups(args)
        groups = split_groups(whole) if args.per_task else whole
        if not groups:
            sys.exit(f"--runs {' '.join(args.runs)}: no finished run of these methods in there")
        runs = make_rows(groups, args.threshold)
        write(curves, header(groups), make_search(runs) if args.search else make_curves(groups, args.points))
        write(rows, header(groups), runs)
        if args.matrix:
            write(Path(f"{args.out}_matrix.csv"), header(whole), make_matrix(whole))
    elif not curves.is_file():
        sys.exit(f"--from-csv: there is no {curves}")
    if rows.is_file():
        comments = comments_of(rows)
        comments += "# intervals: 95 %, Student's t over seeds; steps: `not reached` unless every seed got there\n"
        results = make_table(pd.read_csv(rows, comment="#"))
        write(table, comments, results)
        print(results.to_string(index=False))
    if Path(f"{args.out}_matrix.csv").is_file():
        draw_matrix(Path(f"{args.out}_matrix.csv"), Path(f"{args.out}_matrix.png"))
    draw(curves, picture)
    print(f"wrote {picture}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
