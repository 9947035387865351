"""Reads runs: their folders as tables, the commands and versions behind them, and statistics.

    from benchmark.runs import load_runs  # every iteration of each agent, for pandas
    load_runs("runs").groupby(["exp_name", "timesteps"]).return_last_100.mean().unstack(0).plot()

The same without this file, but for evaluations and settings:

    import pandas as pd; from pathlib import Path
    runs = pd.concat(map(pd.read_csv, Path("runs").rglob("metrics.csv")), ignore_index=True)

These have all runs. The tools leave out a run without summary.json, or cut off (`completed` is
false), and of repeated runs all but the newest. A seed is one sample: agents of a run learn from
each other, so a run is averaged over its agents first. Intervals are of 95 %, by Student's t. Where
a seed either solves its task or fails, the share of seeds that solve it has Wilson's interval: with
five seeds Student's t covers 41 % if the probability of a success is 0.1, and 94 % if it is 0.5.
"""

import fnmatch
import io
import re
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

sys.path.insert(0, str(Path(__file__).parent))  # for `from benchmark.runs import load_runs`
from arguments import Damaged, read_json, refuse

# Settings that may differ between the runs of a method, and do not belong into its command
UNCOMPARED = {"seed", "run_dir", "resume", "timeout", "track", "capture_video"}
UNCOMPARED |= {"wandb_project_name", "wandb_entity"}
UNCOMPARED |= {"start_from"}  # of newcomer.py: a run of the same seed
CHANGED_ON_RESUME = {"device", "save_every", "eval_every"}
CHANGED_ON_RESUME |= {"generate_with", "save_adapters", "log_completions"}
HELD = ("communicator_matrix", "reward_matrix")  # what a flag's file held
# Of metrics.csv the first that there is
STEPS = ("timesteps", "step", "iteration")
TRAINING_RETURNS = ("return_last_100", "reward", "success")
SOLVED = 0.8  # evaluation from which on a seed counts as a success
FAILED = 0.4  # evaluation below which it counts as a failure


@dataclass
class Run:
    """A run, or the agents of a run that have one task."""

    folder: Path
    summary: dict
    settings: dict
    table: pd.DataFrame
    """metrics.csv, with columns `evaluation` and `evaluation_ci95` of the agents' own tasks"""
    task: str
    evaluation: float
    """mean over the agents, at the end"""

    @property
    def name(self) -> str:
        return self.settings["exp_name"]

    @property
    def seed(self) -> int:
        return self.settings["seed"]

    @property
    def diverged(self) -> list[int]:
        """The agents that have diverged."""
        return self.summary.get("diverged", [])

    @property
    def curve(self) -> pd.Series:
        """Mean training return, reward or success of the agents by their environment steps, or by
        steps; it begins where all agents have one.
        """
        x, *_ = (name for name in STEPS if name in self.table)
        y, *_ = (name for name in TRAINING_RETURNS if name in self.table)
        return self.table.groupby(x)[y].mean(skipna=False).dropna()

    @property
    def common(self) -> dict:
        """The settings that all runs of a method have in common."""
        return {name: value for name, value in self.settings.items() if name not in UNCOMPARED}


Groups = dict[tuple[str, str], list[Run]]  # (task, --exp-name) -> its runs, one per seed


# Files


def read_table(path: Path, columns: tuple[str, ...] = (), **options) -> pd.DataFrame:
    """A CSV file with at least these columns, without its comment lines; raises Damaged."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            lines = [line for line in file if not line.startswith("#")]
        table = pd.read_csv(io.StringIO("".join(lines)), **options)
    except (OSError, ValueError) as error:
        raise Damaged(f"{path}: cannot be read ({' '.join(str(error).split())})") from error
    missing = [name for name in columns if name not in table]
    if missing:
        raise Damaged(f"{path}: has no column {', '.join(missing)}, it is of another tool")
    return table


def comments_of(path: Path) -> str:
    """The comment lines of a CSV file: those that begin with #."""
    with open(path) as file:
        return "".join(line for line in file if line.startswith("#"))


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


def report(place: Path | str, problem: str) -> None:
    """A line on stderr about a run."""
    print(f"{place}: {problem}", file=sys.stderr)


# Runs


def read_settings(folder: Path) -> tuple[dict, dict]:
    """summary.json, empty for a run that did not end, and the settings; raises Damaged."""
    paths = [folder / name for name in ("summary.json", "config.json")]
    summary, config = (read_json(path) if path.is_file() else {} for path in paths)
    others = {"script", "command", "elastic_run"}
    settings = {name: config[name] for name in config.keys() - others}
    settings = summary.get("settings") or settings
    if settings.get("env_backend") == "auto":  # of runs of before the settings had the choice
        settings["env_backend"] = summary.get("env_backend", "auto")
    return summary, settings


def name_data(settings: dict) -> str:
    """What was trained on: the agents' tasks, or the data of language models."""
    if "base_model" in settings:
        data = settings.get("dataset") or settings["env"]
        if not isinstance(data, str):
            data = " ".join(data)
        return f"{data}, {settings['partition']}"
    env_ids = settings.get("env_ids") or [settings["env_id"]]
    names = [env_id.rpartition(":")[2] for env_id in env_ids]  # as metrics.csv has them
    return "+".join(dict.fromkeys(names))


def read_evaluations(path: Path, metrics: pd.DataFrame) -> pd.DataFrame:
    """Columns `evaluation` and `evaluation_ci95` by iteration, or step, and agent."""
    key = [metrics.columns[0], "agent"]
    columns = {name: "evaluation" for name in ("mean_return", "mean_reward", "mean_success")}
    rows = read_table(path).rename(columns={**columns, "ci95": "evaluation_ci95"})
    # An agent is judged by its own task; a language model by the first, the common prompts
    if "env_id" in metrics:
        rows = rows.merge(metrics[[*key, "env_id"]], on=key)
        rows = rows[rows["task"] == rows["env_id"]]
    return rows.drop_duplicates(key)[[*key, "evaluation", "evaluation_ci95"]]


def read_metrics(folder: Path) -> pd.DataFrame:
    """metrics.csv, with evaluations where there are any; raises Damaged."""
    table = read_table(folder / "metrics.csv")
    for name in STEPS:
        if name in table:
            table[name] = pd.to_numeric(table[name])
    path = folder / "evaluations.csv"
    if path.is_file() and path.stat().st_size:
        evaluations = read_evaluations(path, table)
        table = table.merge(evaluations, on=[table.columns[0], "agent"], how="left")
    return table


def read_each(folders: tuple[str, ...], read: Callable[[Path], Any]) -> Iterator[Any]:
    """What `read` makes of each run below these folders, at any depth, the oldest first.

    A run whose files have not what they should is reported and left out, and so is one of which it
    makes None.
    """

    def started(folder: Path) -> tuple[int, Path]:
        stamps = re.findall(r"\d+$", folder.name)  # the second in which the run started
        return (int(stamps[0]) if stamps else 0), folder

    run_paths = {path.parent for folder in folders for path in Path(folder).rglob("metrics.csv")}
    for folder in sorted(run_paths, key=started):
        try:
            run = read(folder)
        except (Damaged, LookupError, TypeError, ValueError, AttributeError) as error:
            problem = " ".join(f"{type(error).__name__}: {error}".split())
            report(folder, f"damaged, left out ({problem})")
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

    def load(folder: Path) -> pd.DataFrame:
        summary, settings = read_settings(folder)
        table = read_metrics(folder)
        values = {"run": str(folder), "completed": summary.get("completed", False)}
        for name, value in settings.items():
            is_metric = name in table and name not in ("seed", "exp_name")
            column = f"{name}_setting" if is_metric else name
            values[column] = " ".join(map(str, value)) if isinstance(value, list) else value
        return table.assign(**values)

    tables = list(read_each(folders, load))
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def read_finished(folder: Path) -> Run | None:
    """A run; None, and a report, for one that has not finished or is a part of one."""
    if not (folder / "summary.json").exists():
        return report(folder, "not finished, left out")
    summary, settings = read_settings(folder)
    evaluation = summary["evaluation"]["group"]
    evaluation = float("nan") if evaluation is None else float(evaluation)
    task = name_data(settings)
    run = Run(folder, summary, settings, read_metrics(folder), task, evaluation)
    if run.settings.get("exchange"):
        return report(folder, "one process of a federation, with its own agents only, left out")
    if not run.summary["completed"]:
        return report(folder, "cut off, left out")
    if run.curve.empty:
        return report(folder, "an agent ended no episode, left out")
    # These raise where it has not what the tools need
    header([run])
    make_rows(group_runs([run]))
    format(run.seed, "d")
    return run


def is_wanted(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether an --exp-name matches one of these patterns, in which * stands for anything."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def read_runs(
    folders: tuple[str, ...],
    methods: tuple[str, ...] = ("*",),
    needed: tuple[str, ...] = (),
) -> list[Run]:
    """The finished runs below `folders` whose --exp-name matches one of these patterns, by task,
    method and seed. Of repeated runs the newest counts.

    Ends with one line where there is none, where one lacks a column that is needed, or where runs
    of one method and task had different settings.
    """
    newest = {}
    for run in read_each(folders, read_finished):
        if not is_wanted(run.name, methods):
            continue
        key = run.task, run.name, run.seed
        if key in newest:
            problem = f"left out, {run.folder} has the same name and seed and is newer"
            report(newest[key].folder, problem)
        newest[key] = run
    runs = [newest[key] for key in sorted(newest)]
    if not runs:
        sys.exit(f"--runs {' '.join(folders)}: no finished run in there")
    first = {}
    for run in runs:
        if run.diverged:
            report(run.folder, f"agents {run.diverged} have diverged")
        missing = [name for name in needed if name not in run.table]
        if missing:
            refuse(f"--runs: {run.folder} has no {missing[0]}")
        other = first.setdefault((run.task, run.name), run)
        values = find_difference(other, run, CHANGED_ON_RESUME)
        if values:
            problem = f"the same name as {other.folder}, but other settings ({values})"
            sys.exit(f"{run.folder}: {problem}; name them differently")
    return runs


def find_difference(run: Run, other: Run, apart: set[str]) -> str:
    """The first setting, but for these, in which two runs differ, with both values; or nothing."""
    for name in sorted((run.common.keys() & other.common.keys()) - apart):
        if run.common[name] != other.common[name]:
            return f"--{name.replace('_', '-')} {run.common[name]} and {other.common[name]}"
    return ""


def split_run(run: Run) -> list[Run]:
    """A run whose agents have different tasks, once for each, with the agents that have it."""
    if "env_id" not in run.table or run.table.env_id.nunique() == 1:
        return [run]
    parts = []
    for task, rows in run.table.groupby("env_id", sort=False):
        evaluation = np.nan
        if "evaluation" in rows:
            last = rows[rows.timesteps == rows.timesteps.max()]
            evaluation = last.evaluation.mean(skipna=False)  # NaN where an agent has diverged
        parts.append(replace(run, table=rows, task=task, evaluation=evaluation))
    return parts


def judge_by(run: Run, task: str) -> Run:
    """The run, judged by the mean of all its agents on one task, such as levels unseen before."""
    agents = run.summary["evaluation"]["agents"]
    if not agents or any(task not in row for row in agents):
        refuse(f"--task {task}: {run.folder} has no evaluation on it")
    scores = np.array([row[task]["mean"] for row in agents], dtype=float)
    return replace(run, task=task, evaluation=scores.mean())


def group_runs(runs: list[Run], per_task: bool = True, task: str = "") -> Groups:
    """(task, --exp-name) -> its runs.

    per_task: of agents with different tasks each on its own; task: all agents by this one instead.
    """
    if task:
        runs = [judge_by(run, task) for run in runs]
    elif per_task:
        runs = [of_task for run in runs for of_task in split_run(run)]
    groups = defaultdict(list)
    for run in runs:
        groups[run.task, run.name].append(run)
    return groups


# What files say about the runs behind them


def make_command(script: str, settings: dict) -> str:
    """The command of a script with these settings."""
    path = f"{script}.py"
    for folder in ("benchmark", "benchmark/baselines"):
        if (Path(__file__).parents[1] / folder / path).exists():
            path = f"{folder}/{path}"
    words = ["python", path]
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value not in (None, "", []) and name not in HELD:
            values = value if isinstance(value, list) else [value]
            words += [f"--{flag}", *map(str, values)]
    return shlex.join(words)


def header(runs: list[Run]) -> str:
    """Comment lines: the command of each method and task, its seeds, and the versions."""
    seeds = defaultdict(list)
    versions = defaultdict(set)
    backends = set()
    for run in runs:
        seeds[run.task, run.name].append(run)
        backends.add(run.summary.get("env_backend", "none"))
        for name, version in run.summary["versions"].items():
            versions[name].add(version)
    lines = []
    for first, *others in seeds.values():
        command = make_command(first.summary["script"], first.common)
        numbers = " ".join(str(run.seed) for run in (first, *others))
        lines.append(f"# {command}  (--seed {numbers})\n")
    packages = [f"{name} {' or '.join(sorted(each))}" for name, each in versions.items()]
    lines.append(f"# {', '.join(packages)}\n")
    lines.append(f"# environments: {', '.join(sorted(backends))}\n")
    return "".join(lines)


# Statistics


def with_interval(values: pd.DataFrame) -> pd.DataFrame:
    """Mean over the columns (seeds) and its 95 % interval by Student's t; NaN limits for a single
    seed. NaN where a seed is missing.
    """
    half = stats.t.ppf(0.975, values.shape[1] - 1) * values.sem(axis=1)
    mean = values.mean(axis=1, skipna=False)
    return pd.DataFrame({"mean": mean, "ci_low": mean - half, "ci_high": mean + half})


def mean_interval(values: Any) -> tuple[float, float, float]:
    """The mean of one number per seed, and the limits of its interval."""
    return tuple(with_interval(pd.DataFrame([[*values]], dtype=float)).iloc[0])


def wilson_interval(share: float, trials: float) -> tuple[float, float]:
    """Limits of Wilson's 95 % score interval for a share of `trials`.

    A share of a run's agents takes the seed as the trial: over seeds its variance is at most
    p (1 - p), that of runs whose agents all succeed or all fail, whatever their dependence.
    """
    z = stats.norm.ppf(0.975)
    centre = (share + z**2 / (2 * trials)) / (1 + z**2 / trials)
    variance = share * (1 - share) / trials + z**2 / (4 * trials**2)
    half = z * np.sqrt(variance) / (1 + z**2 / trials)
    return float(max(centre - half, 0)), float(min(centre + half, 1))


def is_all_or_nothing(scores: Any) -> bool:
    """Whether seeds either solve the task or fail: both occur, at most one seed lies between.

    Never of scores below 0 or above 1, as returns of MuJoCo and of games are.
    """
    scores = np.asarray(scores, float)
    if (scores < 0).any() or (scores > 1).any():
        return False
    solved = (scores >= SOLVED).sum()
    failed = (scores < FAILED).sum()
    return bool(solved and failed and solved + failed >= len(scores) - 1)


def expected_maximum(scores: Any) -> tuple[np.ndarray, np.ndarray]:
    """Expected validation performance: mean and variance of the best of n = 1..N out of N results,
    drawn without replacement, arrays [N] (Tang et al. 2020; Dodge et al. 2021).

    P(all n draws are among the i lowest) is C(i, n) / C(N, n), computed draw by draw; its
    differences weigh the order statistics, so that ties need no care.
    """
    scores = np.sort(np.asarray(scores, float))
    total = len(scores)
    drawn_before = np.arange(total)[:, None]
    lowest = np.arange(total + 1)
    draws = np.maximum(lowest - drawn_before, 0) / (total - drawn_before)
    probability = np.cumprod(draws, axis=0)  # [n, i]
    weights = np.diff(probability, axis=1)
    mean = weights @ scores
    variance = (weights * (scores - mean[:, None]) ** 2).sum(axis=1)
    return mean, variance


# A row per run


def score_topics(run: Run) -> tuple[float, float]:
    """Mean evaluation of a language model's agents on their own topics, and on the others', which
    follow the common prompts in order.
    """
    if not run.task.endswith(", topic"):
        return np.nan, np.nan
    agents = run.summary["evaluation"]["agents"]
    cells = [[cell["mean"] for cell in row.values()][1:] for row in agents]
    if not all(cells):  # it was not evaluated
        return np.nan, np.nan
    matrix = np.array(cells, dtype=float)  # [agents, topics]; NaN where an agent has diverged
    diagonal = np.eye(*matrix.shape, dtype=bool)
    others = matrix[~diagonal].mean() if len(matrix) > 1 else np.nan
    return matrix[diagonal].mean(), others


def read_win_rate(run: Run, file: str) -> float:
    """The share of common prompts that benchmark/judge.py found a run's agents to win, at the end
    of its training; NaN where it has not judged them.
    """
    path = run.folder / file
    if not path.is_file():
        return np.nan
    rates = read_table(path)
    rates = rates[(rates.task == "validation") & (rates.agent == "all")]
    rates = rates[rates.step == run.summary["steps"]]
    return rates.win_rate.iloc[-1] if len(rates) else np.nan


def has_diverged(run: Run) -> bool:
    """Whether an agent of this table has diverged: of a run on several tasks one that has this."""
    return not set(run.table.agent).isdisjoint(run.diverged)


def make_rows(groups: Groups) -> pd.DataFrame:
    """A row per run: evaluation at the end, training return over the run and at its end, steps
    until that is SOLVED; of language models also topics and win rates.
    """
    rows = []
    for (task, method), runs in groups.items():
        for run in runs:
            curve = run.curve
            row = {"env": task, "method": method, "seed": run.seed}
            row["timesteps"] = run.table[curve.index.name].max()
            scores = {"evaluation": run.evaluation}
            scores["own_topic"], scores["others_topics"] = score_topics(run)
            scores["win_rate"] = read_win_rate(run, "win_rates.csv")
            scores["sampled_win_rate"] = read_win_rate(run, "sampled_win_rates.csv")
            scores["mean_training_return"] = curve.mean()
            scores["final"] = curve.iloc[-1]
            reached = curve.index[curve >= SOLVED]
            scores["steps_to_0.8"] = reached[0] if len(reached) else np.nan
            if has_diverged(run):  # whatever its agents were worth before
                scores = dict.fromkeys(scores, np.nan)
            rows.append(row | scores)
    table = refuse_repeats(pd.DataFrame(rows), ["env", "method", "seed"])
    optional = ["own_topic", "others_topics", "win_rate", "sampled_win_rate"]
    return table.drop(columns=[name for name in optional if table[name].isna().all()])


def refuse_repeats(rows: pd.DataFrame, key: list[str]) -> pd.DataFrame:
    """The rows; ends with one line where two of them have one key, as of runs on two tasks."""
    for row in rows[rows.duplicated(key)][key].to_dict("records"):
        refuse(f"two runs are {row}; give those of one task and length")
    return rows


def make_conditions(runs: list[Run], agents: int = 0) -> pd.DataFrame:
    """A row per run whose --exp-name is a method and, behind the last hyphen, a condition: the
    training return of its first agents (0: all) over the run (`auc`) and at its end (`final`).
    """
    rows = []
    for run in runs:
        method, _, condition = run.name.rpartition("-")
        if not method:
            refuse(f"--runs: --exp-name {run.name} has no condition behind a hyphen")
        if agents:
            run = replace(run, table=run.table[run.table.agent < agents])
        row = {"method": method, "condition": condition, "seed": run.seed}
        row |= {"auc": run.curve.mean(), "final": run.curve.iloc[-1]}
        if has_diverged(run):
            row |= {"auc": np.nan, "final": np.nan}
        rows.append(row)
    key = ["method", "condition", "seed"]
    return refuse_repeats(pd.DataFrame(rows).sort_values(key), key)


def split_search(rows: pd.DataFrame) -> dict[tuple[str, str], pd.DataFrame]:
    """(task, method) -> the rows of its search. A method is the beginning of --exp-name, before the
    first `_`; what follows is the setting. Of a search's runs the longest count.
    """
    names = rows.method.str.partition("_")
    searches = {}
    for key, search in rows.assign(setting=names[2]).groupby([rows.env, names[0]], sort=False):
        searches[key] = search[search.timesteps == search.timesteps.max()]
    return searches


def expected_best(search: pd.DataFrame, measure: str, name: str) -> np.ndarray:
    """Mean and variance of the best of 1, 2, ... settings that are tried, [seeds, 2, settings]."""
    scores = search.pivot(index="seed", columns="method", values=measure)
    if scores.isna().any(axis=None):
        sys.exit(f"{name}: not every seed has the {measure} of the same settings")
    return np.array([expected_maximum(row) for row in scores.to_numpy()])
