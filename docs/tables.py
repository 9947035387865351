"""Writes the tables of README.md and docs/ that a program can write: flags from the scripts,
figures from benchmark/results/.

    python docs/tables.py  # after a change of a flag, of its help, or of a result

A table stands between <!-- table NAME --> and <!-- end -->; NAME is a function below, with its
arguments.
"""

import dataclasses
import functools
import importlib
import re
import sys
import typing
from pathlib import Path

import numpy as np
import pandas as pd
from tyro._docstrings import get_field_docstring

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results"
sys.path.insert(0, str(ROOT / "benchmark"))
from conditions import order_conditions  # noqa: E402
from methods import METHODS, name_task  # noqa: E402
from plot import comments_of, count_seeds, with_interval  # noqa: E402
from stats import SOLVED, is_all_or_nothing, success_rate, wilson_interval  # noqa: E402

PAGES = [ROOT / "README.md", *sorted(Path(__file__).parent.glob("*.md"))]


def format_table(header: list[str], rows: list[list[str]]) -> str:
    """A table."""
    return "\n".join(
        f"| {' | '.join(map(str, cells))} |".replace("|  |", "| |").replace("|  |", "| |")
        for cells in (header, ["---"] * len(header), *rows)
    )


# Flags


@functools.cache
def read_help_texts(Args: type) -> dict[str, str | None]:
    """The help text of every field, as tyro finds it: the comment beside it or the docstring below
    it.
    """
    texts = {}
    for field in dataclasses.fields(Args):
        text = get_field_docstring(Args, field.name, ())
        texts[field.name] = " ".join(text.split()) if text else text
    return texts


def list_choices(hint) -> tuple[str, ...]:
    """The choices of a type, also inside `... | None`."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return arguments
    for inner in arguments:
        choices = list_choices(inner)
        if choices:
            return choices
    return ()


def flags(script: str, family: str = "communicators") -> str:
    """The flags of a script, without those that its family's script has in the same way; what every
    script has stands under `communicators`.
    """
    Args = find_args(script)
    FamilyArgs = find_args(family)
    common = {}  # name -> help text, default and choices, where they are left out
    if Args is not FamilyArgs:
        texts = read_help_texts(FamilyArgs)
        hints = typing.get_type_hints(FamilyArgs)
        for field in list_fields(FamilyArgs):
            common[field.name] = (texts[field.name], field.default, list_choices(hints[field.name]))
    texts = read_help_texts(Args)
    hints = typing.get_type_hints(Args)
    rows = []
    for field in list_fields(Args):
        text = texts[field.name]
        choices = list_choices(hints[field.name])
        if (text, field.default, choices) == common.get(field.name):
            continue
        flag = f"`--{field.name.replace('_', '-')}`"
        default = format_default(field.default, choices)
        rows.append([flag, default, text.replace("|", "\\|").replace("<", "&lt;")])
    return format_table(["flag", "default (or)", "meaning"], rows)


def find_args(script: str) -> type:
    """The arguments of a script; of communicators.py those that every script has."""
    module = importlib.import_module(script)
    return module.RunArgs if script == "communicators" else module.Args


def list_fields(Args: type) -> list[dataclasses.Field]:
    """The fields that are flags; what a file held, such as a matrix, is for config.json."""
    held = ("communicator_matrix", "reward_matrix")
    return [field for field in dataclasses.fields(Args) if field.name not in held]


def format_default(value, choices: tuple[str, ...]) -> str:
    """A flag's default, with the other choices in brackets."""
    if isinstance(value, tuple):
        value = " ".join(map(str, value))
    shown = []
    if value not in ("", None):
        shown.append(f"`{value}`")
    if choices:
        others = ", ".join(f"`{choice}`" for choice in choices if choice != value)
        shown.append(f"({others})")
    return " ".join(shown)


# Metrics: TensorBoard's key -> meaning

SHARED = {
    "losses/policy_loss": "the clipped surrogate objective, negated, averaged over the minibatches",
    "losses/value_loss": "half the squared error of the value function (language models: PPO only)",
    "losses/entropy": "entropy of the policy, in nats",
    "losses/kl_reference": "KL between policy and reference policy, in nats: what `--kl-coef`"
    " multiplies",
    "losses/approx_kl": "distance from the policy that collected the rollout, estimated (k3)",
    "losses/clipfrac": "share of ratios outside the clip range; 0 without clipping",
}
CONTROL = {
    "charts/episodic_return": "mean over the episodes that ended in this iteration",
    "charts/episodic_length": "their mean length, in steps of the agent",
    "charts/episodes": "how many they are",
    "charts/return_last_100": "mean over the last 100 episodes: the training return of figures and"
    " tables",
    **SHARED,
    "losses/old_approx_kl": "the same distance, estimated without correction (k1)",
    "losses/explained_variance": "how much of the returns' variance the value function explains",
    "charts/learning_rate": "the annealed learning rate",
    "charts/kl_coefficient": "the coefficient of the KL penalty, `--kl-coef` by `--kl-schedule`",
    "charts/SPS": "all agents' steps per second of training so far (`agent_steps_per_second` in the"
    " CSV file)",
}
# Written only with the flag that its meaning names
WITH_FLAGS = (
    "communication/bytes_received",
    "communication/rejected",
    "communication/age_j",
)
ZEROTH = {
    "charts/episodic_return": "mean over the agent's episodes of the unperturbed policy, in this"
    " iteration",
    "charts/episodic_length": "their mean length, in steps",
    "charts/perturbed_return": "mean over the episodes of its perturbed policy",
    "charts/return_last_100": "mean over the last 100 unperturbed episodes",
    "charts/environment_steps": "the agent's environment steps so far",
    "charts/learning_rate": "the step size of this update, eta / sqrt(1 + eta_decay * t)",
    "charts/trajectories": "episodes of all agents so far",
    "charts/trajectories_per_second": "the same per second of training"
    " (`trajectories_per_second` in the CSV file)",
    "panel/vote": "the agent's vote: 1 for the perturbed policy, -1 against it",
    "panel/agreement": "share of answers that are as the vote",
    "panel/accuracy": "share of answers for the batch with the higher mean return; equal returns or"
    " answers do not count",
    "panel/difference": "mean return of the perturbed policy minus that of the unperturbed one",
    "communication/bits": "bits of signs and votes that all agents have sent, each counted once:"
    " d + K an update with par",
    "communication/statistics_bits": "bits of the statistics for normalisation, 64 a number, each"
    " counted once",
    "communication/rounds": "updates so far",
    "communication/bytes": "all these messages times their receivers, bits padded to bytes"
    " (`communication_bytes` in the CSV file)",
    "eval/TASK/agent_i": "mean of an evaluation, the same for all agents, which have one policy; in"
    " evaluations.csv",
}
PENALTY_AND_CLIPPING = (
    "losses/kl_reference",
    "losses/approx_kl",
    "losses/clipfrac",
    "losses/old_approx_kl",
    "charts/kl_coefficient",
    *WITH_FLAGS,
)
TRPO = {name: meaning for name, meaning in CONTROL.items() if name not in PENALTY_AND_CLIPPING} | {
    "losses/policy_loss": "the surrogate objective of the new policy, negated; where nothing"
    " moved minus the mean advantage, which --norm-adv makes 0",
    "losses/entropy": "entropy of the new policy, in nats",
    "policy/kl_reference_before": "c, KL between reference and policy before the update: what"
    " epsilon bounds",
    "policy/kl_reference_after": "the same after it",
    "policy/tv_update": "how far the update moved the policy, in total variation: what the bound"
    " is on",
    "policy/tv_reference": "total variation of the policy after the update and its reference: how"
    " far it is from what it is pulled to",
    "trust_region/epsilon": "the largest KL between reference and policy after the update, in nats",
    "trust_region/slack": "epsilon - c + b H⁻¹ b / 2; if it is not positive no step is good enough",
    "trust_region/step": "kind of the step: 1 normal, -1 recovery, towards the reference only, 0"
    " rejected",
    "trust_region/bound": "largest total variation of the update by Observation 1: `--delta`, or"
    " what epsilon allows",
    "trust_region/share_within_bound": "share of the agent's updates so far that kept the bound",
}
LANGUAGE = {
    "objective/reward": "mean reward of the step's completions: the training reward of figures and"
    " tables",
    "objective/score": "the same before penalties: the weighted sum of the rewards",
    "objective/reward_NAME": "the score of each `--reward` by itself, such as `reward_rouge`",
    "objective/reward_std": "standard deviation of the reward over the completions",
    "objective/nan_rewards": "completions whose reward is NaN; their advantages are 0",
    "objective/groups_without_signal": "GRPO: share of groups with equal rewards (`no_signal` in"
    " the CSV file)",
    "completions/length": "mean length in tokens (`response_length` in the CSV file)",
    "completions/eos_rate": "share of completions that end by themselves",
    **SHARED,
    "losses/kl_anchor": "KL of the policy and that from which all agents started: what"
    " `--sft-anchor` multiplies",
    "losses/ratio": "mean probability ratio",
    "losses/first_log_ratio": "largest log-ratio in the first minibatch: 0 but for rounding",
    "losses/grad_norm": "norm of the policy's gradient before clipping",
    "losses/value_grad_norm": "PPO: norm of the value model's gradient before clipping",
    "losses/skipped_steps": "optimizer steps of policy or value model left out because their"
    " gradient was not finite",
    "losses/sampling_gap": "mean absolute difference, in nats, of the completions' token"
    " log-probabilities in sampling"
    " and in training, both before the update",
    "charts/learning_rate": "the learning rate of the step",
    "charts/kl_coefficient": "the coefficient of the KL penalty, `--kl-coef` by `--kl-schedule`",
    "communication/lost_by_average": "FedAvg, `--lora-average exact`, in a step with a round: what"
    " rank r cuts off",
    "time/tokens_per_second": "tokens of completions per second of the whole step",
    "time/completions_per_second": "all agents' completions per second of training",
    "time/peak_memory": "the most memory that rank 0's process has had, in GiB (the GPU's, or the"
    " processor's)",
}
EPISODES = (
    "losses/kl_anchor",
    "losses/ratio",
    "losses/first_log_ratio",
    "losses/grad_norm",
    "losses/skipped_steps",
    "losses/sampling_gap",
    "charts/learning_rate",
    "charts/kl_coefficient",
    "communication/lost_by_average",
    "time/tokens_per_second",
    "time/peak_memory",
)
AGENTS = {
    "episode/client": "the number of the client that the agent has been in this step",
    "episode/success": "share of the step's episodes that succeed: the training success of tables",
    "episode/return": "their mean return: what the world gives, less penalties",
    "episode/length": "their mean length in turns",
    "episode/invalid": "share of answers that name no admissible action",
    "episode/answer_tokens": "mean length of an answer in tokens",
    "episode/groups_without_signal": "share of groups with equal returns",
    "episode/success_CATEGORY": "`episode/success` of one category; nan where none was played",
    **{name: meaning for name, meaning in SHARED.items() if name != "losses/value_loss"},
    **{name: LANGUAGE[name] for name in EPISODES},
    "losses/first_log_ratio": "largest log-ratio in the first minibatch of an agent: 0 but for"
    " rounding; in float32 also by sampling",
    "losses/sampling_gap": LANGUAGE["losses/sampling_gap"] + "; with `--precision bfloat16` only",
    "time/episodes_per_second": "all agents' episodes per second of training",
}
COMMUNICATION = {
    "communication/rounds": "communication rounds so far; isolated agents count theirs too",
    "communication/dropped": "agents of this run whose snapshot was not usable in this iteration's"
    " round",
    "communication/bytes": "parameters times listeners so far, in bytes (`communication_bytes` in"
    " the CSV file)",
    "communication/bytes_received": "under `federate.py`: bytes read from the store",
    "communication/rejected": "under `federate.py`: files of peers that were ignored because they"
    " are damaged or of another kind",
    "communication/age_j": "under `federate.py`: this agent's rounds since peer j's snapshot"
    " arrived; nan if none has",
    "communication/non_expansion": "the norm of C (Definition 1): 1 for a row-stochastic matrix;"
    " TensorBoard only",
    "communicator/c_i_j": "every entry of C; in communicator.csv: `listener`, `peer`, `weight`",
    "distances/agent_i_agent_j": "total variation of two policies on public states; in"
    " communicator.csv: `distance`",
    "eval/TASK/agent_i": "mean of an evaluation; in evaluations.csv",
}


def metrics(kind: str) -> str:
    """What TensorBoard and the CSV files hold, of `control`, `trpo`, `language` models, `agents` or
    `zeroth`.
    """
    tables_of_kinds = {"control": CONTROL, "trpo": TRPO, "language": LANGUAGE, "agents": AGENTS}
    tables_of_kinds["zeroth"] = ZEROTH
    of_kind = tables_of_kinds[kind]
    meanings = of_kind if kind == "zeroth" else of_kind | COMMUNICATION
    if kind == "agents":  # whose script does not run under federate.py
        for name in ("bytes_received", "rejected", "age_j"):
            del meanings[f"communication/{name}"]
    rows = [[f"`{name}`", meaning] for name, meaning in meanings.items()]
    return format_table(["metric", "meaning"], rows)


# Results


def read_result(name: str) -> pd.DataFrame:
    """A file of benchmark/results/."""
    return pd.read_csv(RESULTS / f"{name}.csv", comment="#")


def read_comments(name: str) -> list[str]:
    """Its comments: commands, versions, date and cores."""
    return [line.removeprefix("# ") for line in comments_of(RESULTS / f"{name}.csv").splitlines()]


def read_setting(name: str, experiment: str, flag: str) -> str:
    """The value of a flag in the runs of an --exp-name, from the comments of a file."""
    (command,) = (line for line in read_comments(name) if f" --exp-name {experiment} " in line)
    return re.search(rf" --{flag} (\S+)", command)[1]


def format_mean(
    row: pd.Series,
    name: str,
    digits: int = 2,
    low: float = -float("inf"),
    high: float = float("inf"),
) -> str:
    """A mean with its 95 % interval, cut at what is possible."""
    try:
        mean, *limits = (float(row[f"{name}{end}"]) for end in ("", "_ci_low", "_ci_high"))
    except ValueError:
        return str(row[name])
    bounds = ", ".join(f"{min(max(limit, low), high):.{digits}f}" for limit in limits)
    text = f"{round(mean, digits) + 0.0:.{digits}f} [{bounds}]"
    for limit in (low, high):  # possible values are integers: 0, not 0.00
        text = text.replace(f"{limit:.{digits}f}", f"{limit:.0f}")
    return text


def read_runs(name: str) -> pd.DataFrame:
    """The rows per run behind a table, empty where they are not kept."""
    if not (RESULTS / f"{name}_runs.csv").is_file():
        return pd.DataFrame({"env": [], "method": [], "evaluation": []})
    return read_result(f"{name}_runs")


def format_share(successes: int, trials: int) -> str:
    """How many of the seeds solve a task, with Wilson's interval."""
    limits = wilson_interval(successes / trials, trials)
    low, high = (f"{limit:.2f}" for limit in limits)
    return f"{successes} of {trials}, [{low}, {high}]".replace("[0.00", "[0").replace("1.00]", "1]")


def format_result(row: pd.Series, name: str, runs: pd.DataFrame, **form) -> str:
    """A mean with its interval; the share of seeds that solve the task where each either does or
    fails.

    runs: all rows per run; of those of the row's method and task the evaluation decides.
    """
    seeds = runs[(runs.method == row["method"]) & (runs.env == row.env)].evaluation
    if not is_all_or_nothing(seeds):
        return format_mean(row, name, **form)
    share, *_ = success_rate(seeds, SOLVED)
    mean = f"{float(row[name]):.{form.get('digits', 2)}f}"
    return f"{mean}; {format_share(round(share * len(seeds)), len(seeds))}"


def sb3() -> str:
    """One isolated agent here and there; in how many seeds the training return reaches 0.8."""
    table = read_result("sb3_table").set_index("method")
    rows = []
    for method in ("isolated", "sb3"):
        row = table.loc[method]
        cells = [
            format_mean(row, name, low=0, high=1) for name in ("evaluation", "mean_training_return")
        ]
        steps = row.steps_per_seed.split()
        reached = len(steps) - steps.count("-")
        rows.append([METHODS[method].label, *cells, format_share(reached, len(steps))])
    header = ["", "evaluation", "training return, mean over the run", "seeds that reach 0.8"]
    return format_table(header, rows)


def atari() -> str:
    """Methods on BeamRider."""
    table = read_result("atari_table").set_index("method")
    rows = []
    for method in ("isolated", "pr-reward"):
        row = table.loc[method]
        steps = " and ".join(f"{int(steps):,}" for steps in row.steps_per_seed.split())
        cells = [format_mean(row, name, 0) for name in ("evaluation", "mean_training_return")]
        rows.append([METHODS[method].label, *cells, steps])
    header = ["", "evaluation, whole games", "training return, mean over the run"]
    return format_table([*header, "steps to 500, each seed"], rows)


def precision() -> str:
    """bfloat16 against float32."""
    rows = []
    for name, runs in read_result("atari_precision").groupby("precision"):
        row = [name, len(runs)]
        for column in ("training_return", "evaluation"):
            row.append(f"{runs[column].mean():.0f} ± {runs[column].sem():.0f}")
        rows.append(row)
    header = ["", "agents", "training return ± standard error", "evaluation ± standard error"]
    return format_table(header, rows)


def llm() -> str:
    """Methods on documentation."""
    table = read_result("llm_table").set_index("method")
    rows = []
    for algorithm in ("grpo", "ppo"):
        for method in ("pr", "fedavg", "isolated"):
            name = f"{method}-{algorithm}"
            columns = ("evaluation", "own_topic", "mean_training_return")
            cells = [format_mean(table.loc[name], column) for column in columns]
            rows.append([METHODS[name].label, *cells])
    return format_table(
        ["", "common held-out prompts", "of the own library", "training, mean of all steps"], rows
    )


def tasks(name: str, column: str = "mean_training_return") -> str:
    """When does sharing pay: methods x tasks."""
    runs = read_runs(name)
    table = read_result(f"{name}_table")
    envs = list(dict.fromkeys(table.env))
    form = {"digits": 0}  # scores
    if table[column].max() <= 1:  # returns of MiniGrid
        form = {"low": 0, "high": 1}
    results = {(row["method"], row.env): row for _, row in table.iterrows()}
    rows = []
    for method, style in METHODS.items():
        if (method, envs[0]) in results:
            cells = [format_result(results[method, env], column, runs, **form) for env in envs]
            rows.append([style.label, *cells])
    return format_table(["", *map(name_task, envs)], rows)


RANKS = ("best", "second", "third", "fourth")


def settings(name: str) -> str:
    """What a search compared in its longest runs: the settings of each method, best first, with the
    training return over the run.
    """
    runs = read_runs(name)
    runs = runs[runs.timesteps == runs.timesteps.max()]
    parts = runs.method.str.extract("(?P<method>[^_]+)(?:_lr(?P<rate>[^_]+))?_coef(?P<coef>.+)")
    runs = runs.assign(**parts).sort_values("mean_training_return", ascending=False)
    rows = []
    for method, style in METHODS.items():
        cells = []
        for run in runs[runs.method == method].itertuples():
            rate = f"{run.rate} and " if isinstance(run.rate, str) else ""
            cells.append(f"{rate}{run.coef}: {run.mean_training_return:.3f}")
        if cells:
            rows.append([style.label, *cells])
    width = max(map(len, rows))
    rows = [row + [""] * (width - len(row)) for row in rows]
    return format_table(["", *RANKS[: width - 1]], rows)


def ends(name: str) -> str:
    """Training return at the end and over the run, and how far policies have moved: methods of one
    task.
    """
    curves = read_result(name).rename(columns={"ci_low": "mean_ci_low", "ci_high": "mean_ci_high"})
    last = curves.groupby("method").last()
    runs = read_result(f"{name}_runs").groupby("method")
    digits_of = {"mean_training_return": 0, "reference_entropy": 3, "tv_update": 4}
    rows = []
    for method in METHODS:
        if method in last.index:
            of_method = runs.get_group(method)
            cells = [format_mean(last.loc[method], "mean", 0)]
            for column, digits in digits_of.items():
                cells.append(summarise(of_method[column], digits))
            rows.append([METHODS[method].label, *cells])
    header = ["", "return at the end", "over the run", "entropy of the reference", "tv_update"]
    return format_table(header, rows)


def levels(column: str = "evaluation", numbers: tuple = (4, 16, 64)) -> str:
    """Limited data: methods x levels of each agent."""
    table = read_result("levels_table").set_index("method")
    rows = []
    for method, style in METHODS.items():
        if f"{method}-{numbers[0]}" in table.index:
            results = [table.loc[f"{method}-{number}"] for number in numbers]
            rows.append(
                [style.label, *(format_mean(row, column, low=0, high=1) for row in results)]
            )
    return format_table(["levels of each agent", *map(str, numbers)], rows)


def conditions(name: str, measure: str = "final") -> str:
    """Methods x conditions of `benchmark/conditions.py`: training return at the end, or its mean
    over the run ("auc").
    """
    table = pd.read_csv(RESULTS / f"{name}.csv", comment="#", dtype={"condition": str})
    names = order_conditions(table.condition)
    rows = []
    for method, style in METHODS.items():
        of_method = table[table.method == method]
        if of_method.empty:
            continue
        cells = [
            summarise_few(of_method[of_method.condition == condition][measure])
            for condition in names
        ]
        rows.append([style.label, *cells])
    return format_table(["", *names], rows)


def summarise_few(values: pd.Series) -> str:
    """A mean of returns with its interval; of fewer than three seeds, with their number."""
    if values.empty:
        return ""
    if len(values) == 1:
        return f"{values.mean():.2f} (1 seed)"
    if len(values) == 2:
        return f"{values.mean():.2f} (2 seeds)"
    return summarise(values, low=0, high=1)


def reward_accuracy() -> str:
    """How often reward models prefer the chosen text of held-out pairs, by what is wrong with the
    rejected one.
    """
    rows = []
    for kind, table in read_result("reward_accuracy").groupby("rejected", sort=False):
        table = table.set_index("reward_model")
        row = [kind, table.pairs.iloc[0]]
        for name in ("reward", "judge"):
            row.append(format_mean(table.loc[f"runs/docstrings/{name}"], "accuracy", low=0, high=1))
        rows.append(row)
    return format_table(["rejected", "pairs", "reward model", "judge"], rows)


# Names in files of table.py -> names in the text
SEARCHES = {
    "isolated": METHODS["isolated"].label,
    "FedAvg": METHODS["fedavg-exact"].label,
    "FedAvg, naive": METHODS["fedavg-naive"].label,
    "PR, p = 0.6": "PR, self-preferred 0.6",
    "PR, p = 0.2": "PR, self-preferred 0.2",
}


def docstrings() -> str:
    """Table 1's runs on docstrings: rewards, and win rates of all agents against references and
    isolated agents.
    """
    table = read_result("docstrings_table1").set_index("method")
    rates = read_result("docstrings_win_rates").query("agent == 'all'")
    alone = rates.run[rates.step == 0].iloc[0]
    rows = []
    for name, run in (("before training", alone), *table["best setting"].items()):
        scores = ["", "", ""]
        if name in table.index:
            columns = ("held-out", "own topic", "others' topics")
            scores = [f"{table[column][name]:.1f}" for column in columns]
        of_run = rates[rates.run.str.contains(run, regex=False)]
        of_run = of_run[(of_run.step == 0) == (run == alone)]
        wins = {
            row.against: format_mean(row, "win_rate", low=0, high=1) for _, row in of_run.iterrows()
        }
        wins_alone = wins.get(alone, "")
        rows.append([SEARCHES.get(name, name), *scores, wins["references"], wins_alone])
    header = ["", "reward, common prompts", "own topic", "others' topics"]
    return format_table([*header, "wins against references", "against isolated"], rows)


def table1_gains(name: str) -> str:
    """Over all algorithms and data of table 1: how far each method is above isolated agents, paired
    by seed.
    """
    scores = {}  # method -> [algorithms and data, seeds]
    for method, searches in read_result(name).groupby("method", sort=False):
        words = [text.split() for text in searches["EVP per seed"]]
        scores[method] = np.array(words, dtype=float)
    rows = []
    for method, of_method in scores.items():
        if method != "isolated":
            gains = of_method - scores["isolated"]
            positive = f"{(gains > 0).sum()} of {gains.size}"
            rows.append([SEARCHES.get(method, method), summarise(gains.mean(0), 3), positive])
    return format_table(["", "above isolated agents", "in how many pairs"], rows)


def summarise(values, digits: int = 2, **limits: float) -> str:
    """A mean over seeds with its interval by Student's t, cut at the limits `low` and `high`."""
    mean, low, high = with_interval(pd.DataFrame([[*values]])).iloc[0]
    row = pd.Series({"x": mean, "x_ci_low": low, "x_ci_high": high})
    return format_mean(row, "x", digits, **limits)


def skills(skill: str = "mirror_after") -> str:
    """A rare skill: methods x agents, the agents' mean, and how far it is above that of isolated
    ones, seed by seed.
    """
    table = read_result("skills_rare").pivot(
        index="seed", columns=["method", "agent"], values=skill
    )
    alone = table["isolated"].mean(axis=1)
    agents = sorted({agent for _, agent in table})
    methods = {method for method, _ in table}
    rows = []
    for method, style in METHODS.items():
        if method not in methods:
            continue
        rate = float(read_setting("skills_rare", method, "learning-rate"))
        coef = float(read_setting("skills_rare", method, "kl-coef"))
        of_agents = table[method]  # [seeds, agents]
        mean = of_agents.mean(axis=1)
        cells = [summarise(of_agents[agent]) for agent in agents]
        cells.append(summarise(mean))
        cells.append(summarise(mean - alone) if method != "isolated" else "")
        rows.append([style.label, f"{rate:.0e}, {coef:g}".replace("e-0", "e-"), *cells])
    header = ["", "rate, coefficient"]
    for agent, share in zip(agents, (5, 20, 80), strict=True):
        header.append(f"agent {agent}, {share} %")
    return format_table([*header, "mean of the agents", "its gain over isolated, paired"], rows)


def preferences(algorithm: str) -> str:
    """Preferences of an algorithm: methods x agents, their own rewards, the mean, how far it is
    above that of isolated agents, seed by seed, and what is right in any style.
    """
    table = read_result("preferences_styles")
    wide = table.pivot(index="seed", columns=["method", "agent"])
    reward = wide["reward_after"]
    isolated = f"isolated-{algorithm}"
    alone = reward[isolated].mean(axis=1)
    methods = set(table.method)
    rows = []
    for name, style in METHODS.items():
        if name not in methods or not name.endswith(f"-{algorithm}"):
            continue
        rate = read_setting("preferences_styles", name, "learning-rate")
        coef = read_setting("preferences_styles", name, "kl-coef")
        mean = reward[name].mean(axis=1)
        content = wide["content_after"][name].mean(axis=1)
        cells = [
            summarise(reward[name][agent], low=0, high=1) for agent in sorted(table.agent.unique())
        ]
        cells.append(summarise(mean, low=0, high=1))
        cells.append(summarise(mean - alone) if name != isolated else "")
        cells.append(summarise(content, low=0, high=1))
        setting = f"{float(rate):.0e}, {float(coef):g}".replace("e-0", "e-")
        rows.append([style.label, setting, *cells])
    header = ["", "rate, coefficient", "mark", "capitals", "quotes", "mean of the agents"]
    header += ["its gain over isolated, paired", "right in any style"]
    return format_table(header, rows)


def format_all_learn(row: pd.Series) -> str:
    """In which share of crowds all learn, with its interval, and when most agents have."""
    percent = row[["all_learn", "all_learn_ci_low", "all_learn_ci_high"]] * 100
    steps = "never" if pd.isna(row.median_steps) else f"after {row.median_steps:,.0f}"
    share, low, high = (f"{value:.0f}" for value in percent)
    return f"{share}% [{low}, {high}], {steps}"


def crowd(sizes: tuple = (1, 2, 4, 8)) -> str:
    """More agents: methods x agents. The share of them that learn."""
    table = read_result("crowd_table")
    rows = []
    for method, style in METHODS.items():
        cells = {}
        for _, row in table[table.method == method].iterrows():
            cells[row.agents] = format_mean(row, "share", low=0, high=1)
        if cells:
            rows.append([style.label, *(cells.get(size, "") for size in sizes)])
    return format_table(["agents", *map(str, sizes)], rows)


def crowd_tuned() -> str:
    """Eight agents, each method with the coefficient that was chosen for it, beside that of all
    others' section 1.
    """
    before = read_result("crowd_table").set_index(["method", "agents"])
    table = read_result("crowd_tuned_table").set_index(["method", "agents"])
    rows = []
    for method, style in METHODS.items():
        if (method, 8) not in table.index:
            continue
        row = table.loc[method, 8]
        cells = [read_setting("crowd_tuned", f"{method}-8", "kl-coef")]
        for name in ("evaluation", "share"):
            for result in (before.loc[method, 8], row):
                cells.append(format_mean(result, name, low=0, high=1))
        rows.append([style.label, *cells, format_all_learn(row)])
    header = ["eight agents", "coefficient", "return with 0.5", "return", "share with 0.5", "share"]
    return format_table([*header, "all learn"], rows)


# Of returns, where a task has any
ZEROTH_LIMITS = {"CartPole-v1": {"low": 0, "high": 500}}


def zeroth(column: str = "evaluation") -> str:
    """Bits instead of parameters: tasks x algorithms, over the shared grid and at the best cell."""
    names = {"par": "Par-S²ZPO", "fedavg": "FedAvg-S²ZPO", "central": "central"}
    rows = []
    for _, row in read_result("s2zpo_table").iterrows():
        cells = [row.task, names[row.algorithm], f"{row.cells}, {row.seeds}"]
        for name in (f"{column}_grid", f"{column}_best"):
            limits = ZEROTH_LIMITS.get(row.task, {})
            cells.append(format_mean(row, name, 0, **limits).replace(" [nan, nan]", ""))
        mu, eta = row[f"{column}_cell"].split()
        rows.append([*cells, f"{mu}, {eta}", f"{row.bits_per_update:,.0f}"])
    header = ["", "", "cells, seeds", "over the grid", "best cell", "its µ, η", "bits per update"]
    return format_table(header, rows)


def text_worlds(*columns: str) -> str:
    """Agents in text worlds: methods x what was solved after training; a column is how tasks were
    dealt, and a category.
    """
    table = read_result("text_worlds_table").set_index(["partition", "category", "method"])
    table = table.sort_index()
    places = [tuple(column.split()) for column in columns]

    def format_cell(row: pd.Series, name: str) -> str:
        number = len(str(row.seeds).split())
        if number < 3:  # an interval of two seeds covers everything
            return f"{row[name]:.2f} ({count_seeds(number)})"
        return format_mean(row, name, low=0, high=1)

    # The first policy, with the same random numbers in all methods
    before = [format_cell(table.loc[place].iloc[0], "before") for place in places]
    rows = [["before training", *before]]
    methods = set(table.index.unique("method"))
    for method, style in METHODS.items():
        if method not in methods:
            continue
        cells = []
        for place in places:
            cell = ""
            if (*place, method) in table.index:
                cell = format_cell(table.loc[*place, method], "after")
            cells.append(cell)
        rows.append([style.label, *cells])
    header = [column.replace(" ", ", ") for column in columns]
    return format_table(["", *header], rows)


# Speed


def speed(name: str, table: str = "comparison") -> str:
    """Medians over repeats; speed as a multiple of the yardstick's in the same repeat."""
    runs = read_result(name).query("table == @table")
    ratio = next(column for column in runs if column.startswith("ratio"))
    yardstick = runs.contender.iloc[0]
    header = ["", "speed", "peak memory"]
    if "communication_rounds" in runs:
        header.insert(2, "rounds")
    rows = []
    for contender, repeats in runs.groupby("contender", sort=False):
        row = [contender]
        if contender == yardstick:
            row.append("1")
        else:
            least = f" (least {repeats[ratio].min():.1f})" if len(repeats) > 1 else ""
            row.append(f"{repeats[ratio].median():.1f}{least}")
        if "communication_rounds" in runs:
            row.append(f"{repeats.communication_rounds.iloc[0]:.0f}".replace("nan", ""))
        rows.append([*row, f"{repeats.peak_memory_mb.median():,.0f} MB"])
    command, versions, machine = read_comments(name)[:3]  # machine: date and cores
    repeats = runs.seed.nunique()
    times = "once" if repeats == 1 else f"{repeats} repeats"
    note = f"`{command.split(' --csv')[0]}`, {machine}, {times}; {versions}."
    return f"{format_table(header, rows)}\n\n{note}"


def phases(name: str, contender: str) -> str:
    """Where the time of a contender goes."""
    runs = read_result(name).query("contender == @contender").filter(regex="_us$").median().dropna()
    shares = (runs / runs.sum()).sort_values(ascending=False)
    header = ["phase", *(phase.removesuffix("_us") for phase in shares.index)]
    return format_table(header, [["share", *(f"{share:.1%}" for share in shares)]])


def gpu(work: str) -> str:
    """Runs on a GPU: speed, if there is a yardstick also as a multiple of its speed, and memory."""
    runs = read_result("gpu").query("work == @work")
    table = pd.DataFrame({"": runs.contender})
    if work != "sizes":
        yardstick, *others = runs.speed
        table["speed"] = ["1", *(f"{speed / yardstick:.1f}" for speed in others)]
    table["per second"] = [f"{speed:,.4g}" for speed in runs.speed]
    if work == "sizes":
        for column in ("allocated", "counted"):
            gigabytes = runs[f"{column}_gb"]
            table[f"{column}, GB"] = [f"{number:.1f}".replace("nan", "") for number in gigabytes]
    return format_table([*table], table.values.tolist())


def rounds() -> str:
    """What a communication round costs each agent, as agents are added."""
    rows = []
    runs = read_result("rounds")
    if "participation" in runs:  # of a file from before version 0.2
        runs = runs[runs.participation == 1]
    for run in runs.itertuples():
        rows.append(
            [
                run.agents,
                f"{run.round_ms:.1f} ms",
                f"{run.iteration_ms:.0f} ms",
                f"{run.peak_memory_mb:,.0f} MB",
                f"{run.checkpoint_kb:.0f} kB",
                f"{run.tensorboard_kb:.1f} kB",
                f"{run.csv_kb:.2f} kB",
            ]
        )
    header = ["agents", "round", "whole iteration", "peak memory, all"]
    of_files = ["checkpoint", "TensorBoard, an iteration", "CSV files, an iteration"]
    return format_table(header + of_files, rows)


def scaling() -> str:
    """Microseconds per agent-step, and memory, as agents are added."""
    runs = read_result("scaling").assign(us=lambda runs: 1e6 / runs.agent_steps_per_second)
    runs["topology"] = runs.contender.str.split().str[1]
    cost = runs.pivot(index="topology", columns="agents", values="us")
    memory = runs.pivot(index="topology", columns="agents", values="peak_memory_mb")
    rows = []
    for topology, flag in (("dense", "full"), ("ring", "ring")):
        row = [f"`--topology {flag}`", *(f"{us:.0f}" for us in cost.loc[topology])]
        rows.append(row)
    rows.append(["peak memory, full", *(f"{mb:,.0f} MB" for mb in memory.loc["dense"])])
    return format_table(["agents", *cost.columns], rows)


def memory() -> str:
    """What a process of prpo_llm.py takes of a GPU's memory: what for x models, in GB."""
    table = pd.read_csv(RESULTS / "llm_memory.csv", comment="#", dtype=str)
    return format_table([*table.columns], table.to_numpy().tolist())


def render(text: str) -> str:
    """The page with its tables written anew."""

    def write_table(match: re.Match) -> str:
        call = match[1]
        function, *arguments = re.split(r" (?=\S)", call.strip(), maxsplit=1)
        arguments = arguments[0].split("; ") if arguments else []
        return f"<!-- table {call} -->\n{globals()[function](*arguments)}\n<!-- end -->"

    return re.sub(r"<!-- table (.*?) -->\n.*?<!-- end -->", write_table, text, flags=re.S)


def main() -> None:
    """Write what has changed."""
    for page in PAGES:
        old = page.read_text()
        new = render(old)
        if new != old:
            page.write_text(new)
            print(f"wrote {page.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
