"""What is installed decides what runs: a small set of packages, and systems other than Linux."""

import importlib
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import REPOSITORY, call, environment

import communicators
import prpo_llm

NAMES = ("prpo_minigrid", "fedavg_ppo", "distral_minigrid", "prtrpo_minigrid")
SCRIPTS = [REPOSITORY / f"{name}.py" for name in NAMES]
ON_MUJOCO = ("prpo_mujoco", "fedavg_mujoco")  # with continuous tasks that need no MuJoCo
TINY = "--num-agents 2 --num-envs 2 --num-steps 32 --total-timesteps 128 --local-updates 1"
TINY += " --num-minibatches 2 --eval-episodes 2 --env-id MiniGrid-Empty-5x5-v0 --run-dir runs"


def read_pins(name):
    """The packages of a file of requirements, with their versions."""
    lines = (REPOSITORY / name).read_text().splitlines()
    return {line for line in lines if line and not line.startswith("#")}


def read_summaries(folder):
    """summary.json of every run in a folder: script -> content."""
    summaries = [json.loads(path.read_text()) for path in folder.glob("runs/*/summary.json")]
    return {summary["script"]: summary for summary in summaries}


def test_the_small_set_has_the_versions_of_the_large_one():
    """So that what is tested with the large set holds for the small one."""
    assert read_pins("requirements-minigrid.txt") < read_pins("requirements.txt")


def read_installation():
    """The page's commands, joined by &&, on continued lines."""
    page = (REPOSITORY / "docs" / "runs.md").read_text()
    (commands,) = re.findall(r"^python3 (?:.*\\\n)*.*requirements-minigrid\.txt$", page, re.M)
    return commands


def test_the_page_installs_as_the_readme_does():
    """Both begin with the same three commands."""
    commands = read_installation()
    assert commands.count(" && ") == 2
    assert f"```bash\n{commands} && " in (REPOSITORY / "README.md").read_text()


@pytest.mark.slow
def test_the_small_set_suffices_for_minigrid_and_is_about_1_gb(tmp_path):
    """A fresh environment with nothing more, made as the page says, runs these scripts."""
    command = read_installation().replace("\\\n", "")
    # The index of wheels for the CPU is left out: where it is out of reach, pip's own settings
    # have to name such wheels
    command = re.sub(r" --extra-index-url \S+", "", command)
    command = command.replace(
        "requirements-minigrid.txt", f"{REPOSITORY}/requirements-minigrid.txt"
    )
    for step in command.split(" && "):
        words = shlex.split(step)
        words[0] = {"python3": sys.executable}.get(words[0], words[0])
        subprocess.run(words, cwd=tmp_path, check=True)
    python = tmp_path / ".venv" / "bin" / "python"
    env = environment()
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    for script in SCRIPTS:
        subprocess.run([python, script, *TINY.split()], cwd=tmp_path, env=env, check=True)
    summaries = read_summaries(tmp_path)
    assert summaries.keys() == {script.stem for script in SCRIPTS}
    assert all(summary["completed"] for summary in summaries.values())
    assert {summary["env_backend"] for summary in summaries.values()} == {"gymnasium"}
    program = "import torch; print(torch.version.cuda)"
    cuda = subprocess.run([python, "-c", program], capture_output=True, text=True).stdout.strip()
    if cuda != "None":
        pytest.skip("pip's index has torch with CUDA only, which alone is larger")
    paths = (tmp_path / ".venv").rglob("*")
    assert sum(path.lstat().st_size for path in paths if path.is_file()) < 1.1e9


@pytest.mark.slow
@pytest.mark.parametrize("system", ["win32", "darwin"])
@pytest.mark.parametrize(
    ("names", "task"),
    [(NAMES, "MiniGrid-Empty-5x5-v0"), (ON_MUJOCO, "Pendulum-v1")],
    ids=["MiniGrid", "MuJoCo"],
)
def test_scripts_run_without_what_only_linux_has(names, task, system, tmp_path):
    """Nor with a package that the small set leaves out: a run of each script, and its summary."""
    tool = REPOSITORY / "tests" / "tools" / "elsewhere.py"
    scripts = " ".join(str(REPOSITORY / f"{name}.py") for name in names)
    process = call(tool, system, scripts, *TINY.split(), "--env-id", task, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    summaries = read_summaries(tmp_path)
    assert summaries.keys() == {*names}
    assert {summary["env_backend"] for summary in summaries.values()} == {"gymnasium"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "task", "problem"),
    [
        ("prpo_atari", "BeamRiderNoFrameskip-v4", ": ale-py is not installed"),
        ("fedavg_atari", "BeamRiderNoFrameskip-v4", ": ale-py is not installed"),
        ("prpo_mujoco", "Hopper-v5", " cannot be used: MuJoCo is not installed"),
        ("fedavg_mujoco", "Hopper-v5", " cannot be used: MuJoCo is not installed"),
    ],
)
def test_tasks_without_their_simulator_end_in_one_line(name, task, problem, tmp_path):
    tool = REPOSITORY / "tests" / "tools" / "elsewhere.py"
    process = call(tool, "linux", str(REPOSITORY / f"{name}.py"), "--env-id", task, cwd=tmp_path)
    assert process.returncode == communicators.WRONG_VALUE
    assert process.stderr.startswith(f"--env-id {task}: ")
    assert f"{task}{problem}" in process.stderr
    assert process.stderr.count("\n") == 1


ALONE = {
    "prpo_minigrid": (),
    "prpo_atari": (),
    "fedavg_ppo": ("prpo_minigrid",),
    "fedavg_atari": ("prpo_atari",),
    "distral_minigrid": ("prpo_minigrid",),
    "prtrpo_minigrid": ("prpo_minigrid",),
    "prpo_mujoco": (),
    "fedavg_mujoco": ("prpo_mujoco",),
}
# Run in a folder of copies; the packages of the other family are missing
PROGRAM = """
import runpy, sys
script, *missing = sys.argv[1:]
sys.modules |= dict.fromkeys(missing)
sys.argv = [script, "--help"]
runpy.run_path(script, run_name="__main__")
"""


# The others import the same
QUICK = ("prpo_minigrid", "prpo_atari", "prpo_mujoco")


@pytest.mark.parametrize(
    "name",
    [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in ALONE if name not in QUICK)],
)
def test_a_copy_of_a_script_runs_beside_few_others(name, tmp_path):
    """communicators.py, and for a variant its family's script, without which it names that.

    No family needs what is another's.
    """
    for module in ("communicators", name):
        shutil.copy(REPOSITORY / f"{module}.py", tmp_path)
    (tmp_path / "run.py").write_text(PROGRAM)
    packages = {"minigrid": ["minigrid"], "atari": ["ale_py", "cv2"], "mujoco": ["mujoco"]}
    packages["ppo"] = packages["minigrid"]
    in_use = packages[name.rpartition("_")[2]]
    missing = [package for package in sum(packages.values(), []) if package not in in_use]
    command = ["run.py", f"{name}.py", *missing]
    for needed in ALONE[name]:
        process = call(*command, cwd=tmp_path, PYTHONPATH="")
        assert process.returncode == 1
        assert process.stderr.endswith(f"No module named '{needed}'\n")
        shutil.copy(REPOSITORY / f"{needed}.py", tmp_path)
    process = call(*command, cwd=tmp_path, PYTHONPATH="")
    assert process.returncode == 0, process.stderr
    assert "--communicator" in process.stdout


def test_lists_of_commands_are_not_executed_on_windows(monkeypatch, tmp_path, capsys):
    """One line says where they are; they are printed there."""
    monkeypatch.syspath_prepend(REPOSITORY / "benchmark")
    run = importlib.import_module("run")
    monkeypatch.setattr(run, "fcntl", None)
    (tmp_path / "list").write_text("python train.py --seed 1\n")
    run.main(run.Args(str(tmp_path / "list"), dry_run=True))
    assert capsys.readouterr().out == "python train.py --seed 1\n"
    with pytest.raises(SystemExit) as end:
        run.main(run.Args(str(tmp_path / "list")))
    assert end.value.code == run.refuse.__globals__["WRONG_VALUE"]
    message = capsys.readouterr().err
    assert "WSL" in message
    assert message.count("\n") == 1


@pytest.mark.parametrize("name", ["rounds", "throughput"])
def test_memory_is_not_measured_on_windows(name, monkeypatch, capsys):
    """The tools that read it from the system end in one line."""
    monkeypatch.syspath_prepend(REPOSITORY / "benchmark")
    tool = importlib.import_module(name)
    monkeypatch.delattr(tool.os, "wait4")
    with pytest.raises(SystemExit):
        tool.main(tool.Args())
    message = capsys.readouterr().err
    assert message.startswith(f"{name}.py ")
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("system", "counted", "gib"),
    [("linux", 3 * 2**20, 3.0), ("darwin", 3 * 2**30, 3.0), ("win32", None, math.nan)],
)
def test_peak_memory_is_in_gib_everywhere(system, counted, gib, monkeypatch):
    """Linux counts KiB, macOS bytes, and Windows has no such module."""
    module = None
    if counted is not None:
        usage = SimpleNamespace(ru_maxrss=counted)
        module = SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda who: usage)
    monkeypatch.setattr(prpo_llm, "resource", module)
    monkeypatch.setattr(sys, "platform", system)
    measured = prpo_llm.measure_peak_memory(torch.device("cpu"))
    assert measured == pytest.approx(gib, nan_ok=True)


def test_hosted_ci_runs_the_same_program():
    """The workflow's steps are pinned by commit, and the only command is .ci/run."""
    text = (REPOSITORY / ".github" / "workflows" / "ci.yml").read_text()
    assert re.findall(r"- run: (.*)", text) == [".ci/run"]
    uses = re.findall(r"uses: (.*)", text)
    assert uses
    assert all(re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40} # v[\d.]+", use) for use in uses)
