"""The sweeps, benchmark/*.sh: what they print is parsed by the scripts that it calls."""

import csv
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command import parse_args
from helpers import REPOSITORY

import communicators

sys.path[:0] = [str(REPOSITORY / "benchmark"), str(REPOSITORY / "benchmark" / "baselines")]
FILES = sorted((REPOSITORY / "benchmark").glob("*.sh"))
SWEEPS = [file.name for file in FILES if file.name not in ("gpu.sh", "pipeline.sh")]
# Whose checks want models, data or runs that the sweep's comment says how to make, or which have
# none
UNCHECKED = ("prpo_llm", "prpo_babyai", "newcomer", "sb3_ppo")


def call(*words):
    """A finished process of a sweep."""
    command = ["bash", f"benchmark/{words[0]}", *words[1:]]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


def print_sweep(*words):
    """The commands that a sweep prints."""
    process = call(*words)
    assert (process.returncode, process.stderr) == (0, "")
    return process.stdout.splitlines()


def list_modes(name):
    """The arguments that a sweep takes, by its usage, `[MODE | MODE]`; "" for none, which a usage
    without brackets does not allow.
    """
    usage = call(name, "--help").stderr.strip().removeprefix(f"usage: bash benchmark/{name}")
    modes = [mode for mode in usage.strip(" []").split(" | ") if mode]
    return modes if modes and "[" not in usage else ["", *modes]


def mask(line):
    """What remains of a command without names and the numbers that sweeps loop over."""
    line = re.sub(r"-levels-\d+-", "-levels-BLOCK-", line)
    line = re.sub(r"--(run-dir|exp-name) \S+", r"--\1 NAME", line)
    return re.sub(r"(?<= )\d[\d.]*(e-\d+)?(?= )", "NUMBER", line)


def read_command(line):
    """The arguments of a command, as its script's own parser reads and checks them."""
    start = r"(?:OMP_NUM_THREADS=1 )?(?:python|torchrun --nproc-per-node (\d)) (\S+)\.py (.*)"
    processes, script, words = re.fullmatch(start, line).groups()
    name = Path(script).name
    module = importlib.import_module(name)
    if name in UNCHECKED:
        args = communicators.read_flags(module.Args, shlex.split(words))
    else:
        args = parse_args(module, shlex.split(words))
    if processes:
        assert args.agents_at_once % int(processes) == 0
    return args


@pytest.mark.parametrize("name", SWEEPS)
def test_sweeps_print_different_commands_that_are_understood(name):
    """Each mode prints as many commands as its comment says, seeds outermost; of commands that
    differ in numbers only, one is parsed.
    """
    text = (REPOSITORY / "benchmark" / name).read_text()
    commands = {}
    for mode in list_modes(name):
        lines = print_sweep(name, *mode.split())
        call_of_mode = re.escape(f"bash benchmark/{name} {mode}".strip())
        (number,) = re.findall(rf"#   {call_of_mode} \| python .*?  +([\d,]+) runs", text)
        assert len(lines) == len(set(lines)) == int(number.replace(",", ""))
        seeds = [int(seed) for seed in re.findall(r" --seed (\d+) ", "\n".join(lines))]
        assert len(seeds) == len(lines)
        assert seeds == sorted(seeds)
        for line in lines:
            commands.setdefault(mask(line), line)
    for line in commands.values():
        args = read_command(line)
        assert f" --seed {args.seed} " in line
        assert line.endswith(f" --exp-name {args.exp_name}")


@pytest.mark.parametrize("name", SWEEPS)
def test_sweeps_refuse_other_arguments(name):
    *_, last = list_modes(name)
    for words in (["other"], [last, "other"], ["--help"]):
        process = call(name, *words)
        assert process.returncode == 2
        assert process.stdout == ""
        assert re.fullmatch(rf"usage: bash benchmark/{name}.*\n", process.stderr)


def read_runs(name):
    """The rows per run of a result."""
    table = REPOSITORY / "benchmark" / "results" / f"{name}_runs.csv"
    with table.open(newline="") as file:
        return list(csv.DictReader(row for row in file if not row.startswith("#")))


def read_search(name):
    """Of every run of a search: method, (training return, rate, coefficient) and steps."""
    for row in read_runs(name):
        method, rate, coef = row["method"].split("_")
        result = float(row["mean_training_return"]), rate[2:], coef[4:]
        yield method, result, int(row["timesteps"])


def read_settings(line):
    """The name, rate and coefficient of a command of fourrooms_5m.sh."""
    pattern = r"--learning-rate (\S+) --kl-coef (\S+) .*--exp-name (\S+)"
    rate, coef, name = re.search(pattern, line).groups()
    return name, rate, coef


def test_the_papers_length_has_the_settings_that_the_search_chose():
    """Each method's best of the search's last rung, by the training return over the run; but not
    that of isolated agents that the first rung dropped.
    """
    best = {}
    for method, result, steps in read_search("fourrooms_tuning"):
        if steps > 900_000 and (method, *result[1:]) != ("isolated", "1e-3", "0.5"):
            best[method] = max(result, best.get(method, (0, "", "")))
    chosen = {(method, *setting) for method, (_, *setting) in best.items()}
    assert len(chosen) == 4
    listed = set()
    for line in print_sweep("fourrooms_5m.sh") + print_sweep("fourrooms_5m.sh", "searched"):
        name, *setting = read_settings(line)
        listed.add((name.removesuffix("-searched"), *setting))
    assert chosen <= listed


def test_the_papers_rounds_have_the_settings_that_the_search_chose():
    """Each method's best of nine, by the training return over the run."""
    searches = {}
    for method, result, _ in read_search("fourrooms_search"):
        searches.setdefault(method, []).append(result)
    assert {len(results) for results in searches.values()} == {9}
    for line in print_sweep("fourrooms_5m.sh", "paper"):
        name, *setting = read_settings(line)
        assert [*max(searches[name])[1:]] == setting


@pytest.mark.parametrize("name", ["goals", "unlock_goals"])
def test_tasks_of_own_goals_have_the_coefficients_that_the_search_chose(name):
    """Each method's best on the tuning seed, by the training return over the run."""
    best = {}
    for row in read_runs(f"{name}_tuning"):
        method, coef = row["method"].split("_coef")
        result = float(row["mean_training_return"]), coef
        best[method] = max(result, best.get(method, (0, "")))
    listed = {}
    for line in print_sweep(f"{name}.sh"):
        pattern = r"--(?:kl|prox)-coef (\S+) .*--exp-name (\S+)"
        coef, method = re.search(pattern, line).groups()
        listed[method] = coef
    for gone in ("both-surrogate", "fedavg-then-alone"):  # their code went
        del best[gone]
    assert listed == {method: coef for method, (_, coef) in best.items()}
    assert len(listed) == 17


TO_CONFIRM = {"goals": 10, "skills": 10, "doorkey": 9, "unlock": 10}  # tasks, number of methods
TUNED_ON = {
    "goals": "DoorKeyGoals",
    "skills": "DoorKeyGoals",
    "doorkey": "MiniGrid-DoorKey",
    "unlock": "UnlockGoals",
}


def list_settings(*mode):
    """Of a mode of confirm.sh: method -> [(name, seed, the rest of the command)]."""
    settings = {}
    task = mode[-1]
    for line in print_sweep("confirm.sh", *mode):
        name = line.split(" --exp-name ")[1]
        seed = int(re.search(r" --seed (\d+) ", line)[1])
        command = re.sub(r" --(seed|eval-episodes|run-dir|exp-name) \S+", "", line)
        settings.setdefault(name.partition("_")[0], []).append((name, seed, command))
        assert ("--hidden-sizes" in line) == (task == "skills" and "fedavg_ppo.py" not in line)
        assert f" --run-dir runs/confirm-{'-'.join(mode)} " in line
    assert len(settings) == TO_CONFIRM[task]
    return settings


@pytest.mark.parametrize("task", TO_CONFIRM)
def test_confirmation_tries_four_settings_of_each_method(task):
    for tried in list_settings("tune", task).values():
        assert [seed for _, seed, _ in tried] == [101] * 4
        assert len({command for _, _, command in tried}) == 4


@pytest.mark.parametrize("task", TO_CONFIRM)
def test_confirmation_runs_what_was_tuned_on_fresh_seeds(task):
    """The setting with most training return on seeds 6 to 15, of four methods to 25; averages are
    those of equal networks.
    """
    returns = {}
    for name in ("goals_tuning", "unlock_goals_tuning", "confirm_tuning"):
        for row in read_runs(name):
            if TUNED_ON[task] in row["env"]:
                setting = row["method"].replace("coef", "")
                returns[setting] = float(row["mean_training_return"])
    tuning = list_settings("tune", task)
    lasts = []
    for method, runs in list_settings(task).items():
        best = max(tuning[method], key=lambda setting: returns[setting[0]])
        assert {command for _, _, command in runs} == {best[2]}, method
        lasts.append(runs[-1][1])
        assert [seed for _, seed, _ in runs] == list(range(6, lasts[-1] + 1))
    assert sorted(lasts) == [15] * (TO_CONFIRM[task] - 4) + [25] * 4
