"""benchmark/run.py: every command of a list is executed, once, and a list that was cut off goes
on.
"""

import ast
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import REPOSITORY

TOOL = str(REPOSITORY / "benchmark" / "run.py")
# Behaves like our scripts: it first prints the folder of its run, goes on with --resume, and saves
# when it is interrupted
SCRIPT = """
import json, pathlib, signal, sys, time
words, interrupted = dict(zip(sys.argv[1::2], sys.argv[2::2])), []
signal.signal(signal.SIGINT, lambda *_: interrupted.append(130))
new = f"{words.get('--run-dir')}/Task__{words.get('--exp-name')}__1__{time.time_ns()}"
folder = pathlib.Path(words.get("--resume") or new)
checkpoint = folder / "checkpoints" / "agent_0" / "1.pt"
print("a warning: of something")
print(f"{folder}: 3 agents on cpu", flush=True)
checkpoint.parent.mkdir(parents=True, exist_ok=True)
(folder / "calls").open("a").write(" ".join(sys.argv[1:]) + "\\n")
began = time.time()
while "wait" in words.get("--exp-name", "") and not interrupted and time.time() < began + 30:
    time.sleep(0.01)
if interrupted or "save" in words.get("--exp-name", ""):
    checkpoint.touch()
completed = not interrupted and "cut" not in words.get("--exp-name", "")
(folder / "summary.json").write_text(json.dumps({"completed": completed}))
sys.exit(0 if completed else 130 if interrupted else 3)
"""
# Executes its array at once, in order, like a Slurm of one core, and writes down its arguments
SBATCH = """#!/bin/sh
cat > script
echo "call $*" >> sbatch_calls
cat script >> sbatch_calls
number=$(sed -n 's/.*--array=1-\\([0-9]*\\).*/\\1/p' script)
for k in $(seq $number); do SLURM_ARRAY_TASK_ID=$k sh script || true; done
"""


@pytest.fixture
def tool(tmp_path):
    """tool(lines, *flags): the finished process, started in tmp_path, where train.py behaves like
    our scripts.

    wait=False: the process as it runs.
    """
    (tmp_path / "train.py").write_text(SCRIPT)

    def run(lines, *flags, wait=True, **environment):
        (tmp_path / "list").write_text("\n".join(lines) + "\n")
        command = [sys.executable, TOOL, "list", *flags]
        options = {"cwd": tmp_path, "env": os.environ | environment, "text": True}
        if not wait:
            return subprocess.Popen(command, stdout=subprocess.PIPE, **options)
        return subprocess.run(command, capture_output=True, timeout=60, **options)

    return run


def train(name):
    return f"python train.py --run-dir runs --exp-name {name}"


def calls(tmp_path):
    """What each run was called with, oldest run first: name of experiment -> calls."""
    files = sorted(
        tmp_path.glob("runs/Task__*/calls"), key=lambda path: path.parent.name.split("__")[-1]
    )
    return {path.parent.name.split("__")[1]: path.read_text().splitlines() for path in files}


def until(condition):
    """Wait for something to become true."""
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never happened")


def test_every_command_is_executed_once_and_with_the_next_call_none(tmp_path, tool):
    """Whether it is one of our scripts, another program or a line for a shell; `echo` here counts
    the executions.
    """
    lines = [
        "# comment",
        "",
        train("one"),
        "NAME='a b' sh -c 'echo $NAME >> said'",
        "echo shell | cat >> said",
        "env",
    ]
    first = tool([*lines, train("one")], "--cores", "1", "--jobs", "2")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "[4/4] 0 running, 0 failed, 00:00:00 left" in first.stdout
    assert first.stdout.count("[") == 4 and "Task__one__1__" in first.stdout
    again = tool(lines)
    assert (
        again.returncode == 0 and "4 of 4 have finished before" in again.stderr and not again.stdout
    )
    assert sorted((tmp_path / "said").read_text().split("\n")) == ["", "a b", "shell"]
    assert calls(tmp_path) == {"one": ["--run-dir runs --exp-name one"]}
    logs = [path.read_text() for path in (tmp_path / "runs" / ".commands").iterdir()]
    assert any("OMP_NUM_THREADS=1\n" in log for log in logs) and all(
        log.endswith("# exit code 0\n") for log in logs
    )


def test_commands_come_from_standard_input_too_and_from_any_run_dir(tmp_path, tool):
    command = f"{train('one')} --run-dir=elsewhere/runs"
    tool([command])  # for train.py itself
    again = subprocess.run(
        [sys.executable, TOOL], input=command, text=True, cwd=tmp_path, capture_output=True
    )
    assert (
        "1 of 1 have finished before" in again.stderr
        and (tmp_path / "elsewhere/runs/.commands").is_dir()
    )


def test_logs_are_in_the_home_as_the_runs_are(tmp_path, tool):
    lines = ["true --run-dir ~/a", "true --run-dir=$HOME/b"]
    assert tool(lines, HOME=str(tmp_path / "home")).returncode == 0
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "list", "home"}
    assert {path.parent.name for path in (tmp_path / "home").glob("*/.commands")} == {"a", "b"}


def test_no_more_run_at_a_time_than_asked_for_each_on_cores_of_its_own(tmp_path, tool):
    """Each command writes when it began and ended, and its cores, after the other one of its pair
    has begun; pytest-xdist would have us all on one, and here there are two.
    """
    if pin := hasattr(os, "sched_setaffinity"):
        affinity = os.sched_getaffinity(0)
        os.sched_setaffinity(0, range(os.cpu_count()))
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    (tmp_path / "note.py").write_text(
        "import os, pathlib, sys, time\n"
        "began, cores = time.time(), []\n"
        "pathlib.Path('began' + sys.argv[1]).touch()\n"
        "other = pathlib.Path(f'began{int(sys.argv[1]) ^ 1}')\n"
        "while not other.exists() and time.time() < began + 30:\n"
        "    time.sleep(0.01)\n"
        "if hasattr(os, 'sched_getaffinity'):\n"
        "    cores = sorted(os.sched_getaffinity(0))\n"
        "time.sleep(0.3)\n"
        "open('note' + sys.argv[1], 'w').write(repr((began, time.time(), cores)))\n"
    )
    try:
        assert tool([f"python note.py {k}" for k in range(6)], "--jobs", "2").returncode == 0
        several = pin and len(os.sched_getaffinity(0)) > 1
    finally:
        if pin:
            os.sched_setaffinity(0, affinity)
    notes = [ast.literal_eval((tmp_path / f"note{k}").read_text()) for k in range(6)]
    together = [
        [cores for began, ended, cores in notes if began <= moment < ended]
        for moment, _, _ in notes
    ]
    assert max(map(len, together)) == 2
    if several:
        assert all(len(cores) == 1 for _, _, cores in notes)
        assert all(len(set(map(tuple, some))) == len(some) for some in together)


def test_a_list_that_leaves_cores_free_may_share_the_machine(tmp_path, tool):
    """Two lists side by side, one command at a time each, would be pinned to the same core."""
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("nothing is pinned here")
    (tmp_path / "note.py").write_text(
        "import os\nopen('note', 'w').write(repr(sorted(os.sched_getaffinity(0))))\n"
    )
    affinity = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count()))
    try:
        cores = sorted(os.sched_getaffinity(0))
        assert tool(["python note.py"], "--jobs", "1").returncode == 0
    finally:
        os.sched_setaffinity(0, affinity)
    assert ast.literal_eval((tmp_path / "note").read_text()) == cores


def test_what_was_cut_off_is_resumed_from_its_checkpoint_or_started_anew(tmp_path, tool):
    """With the words before the script; a run without checkpoint, or whose folder was deleted, has
    to start anew.
    """
    lines = ["A=1 " + train("cut-save"), train("cut"), train("deleted")]
    assert tool(lines).returncode == 1
    (deleted,) = tmp_path.glob("runs/Task__deleted__*")
    shutil.rmtree(deleted)
    planned = tool(lines, "--dry-run").stdout.splitlines()
    assert re.fullmatch(r"A=1 python train.py --resume runs/Task__cut-save__1__\d+", planned[0])
    assert planned[1:] == lines[1:]
    named = f"{train('cut-save-named')} --reward own.py:good rouge --reward-weights 1 2 --seed 2"
    assert tool([named]).returncode == 1
    (planned,) = tool([named], "--dry-run").stdout.splitlines()
    # Code has to be named again
    assert planned.endswith(" --reward own.py:good rouge --reward-weights 1 2")
    world = f"{train('cut-save-world')} --env house.py:make --env-id x"
    assert tool([world]).returncode == 1
    (planned,) = tool([world], "--dry-run").stdout.splitlines()
    assert planned.endswith(" --env house.py:make")
    # A federation has its files already, from which only --resume goes on
    (tmp_path / "federate.py").write_text(
        "import runpy, sys\n"
        "sys.argv[1:] = sys.argv[sys.argv.index('train.py') + 1 :]\n"
        "runpy.run_path('train.py', run_name='__main__')\n"
    )
    launcher = "python federate.py --trust x.py --agents 0"
    federated = train("cut-federated").replace("python", launcher)
    assert tool([federated]).returncode == 1
    (started,) = tmp_path.glob("runs/Task__cut-federated__*")
    (started / "config.json").write_text(json.dumps({"script": "train"}))
    (planned,) = tool([federated], "--dry-run").stdout.splitlines()
    assert planned == f"{launcher} train.py --resume runs/{started.name}"
    assert tool(lines).returncode == 1  # cut is cut again; the resumed one completes
    resumed = calls(tmp_path)
    assert [call.split()[0] for call in resumed["cut-save"]] == ["--run-dir", "--resume"]
    assert len(list(tmp_path.glob("runs/Task__cut__*"))) == 2 and "deleted" in resumed
    assert tool(lines, "--dry-run").stdout.splitlines() == [lines[1]]


def test_a_program_that_starts_a_script_is_not_resumed_in_its_place(tmp_path, tool):
    """Its log names the run's folder too; it has finished if its own exit code was 0."""
    (tmp_path / "demo.py").write_text(
        "import subprocess, sys\n"
        "subprocess.run([sys.executable, 'train.py', *sys.argv[1:]])\n"
        "sys.exit('save' in sys.argv[-1])\n"
    )
    lines = ["python demo.py --run-dir runs --exp-name cut-save", train("cut-save-too")]
    lines += ["python demo.py --run-dir runs --exp-name whole"]
    (tmp_path / "demo.sh").write_text('python demo.py "$@"; exit 1\n')
    lines += ["sh demo.sh --run-dir runs --exp-name whole-too"]
    assert tool(lines).returncode == 1
    for folder in tmp_path.glob("runs/Task__*"):
        (folder / "config.json").write_text(json.dumps({"script": "train"}))
    planned = tool(lines, "--dry-run").stdout.splitlines()
    assert planned[0] == lines[0]
    assert re.fullmatch(r"python train.py --resume runs/Task__cut-save-too__1__\d+", planned[1])
    assert planned[2:] == lines[3:]


def test_a_failure_is_listed_and_stops_nobody(tmp_path, tool):
    # What the first one leaves behind does not pass for the command itself when it is tried again
    lines = [
        "sh -c 'sleep 5 & echo why >&2; echo try >> tries; exit 7'",
        "no-such-program",
        "touch there",
    ]
    failed = tool(lines, "--jobs", "1", "--retries", "1")
    assert failed.returncode == 1 and (tmp_path / "there").exists()
    # A folder that cannot be made; what stands behind it is executed
    (tmp_path / "file").touch()
    unstarted = tool(["true --run-dir file/runs", "touch behind"])
    assert unstarted.returncode == 1 and (tmp_path / "behind").exists()
    assert unstarted.stdout.startswith("cannot be started: true --run-dir file/runs (")
    assert "1 could not be started" in unstarted.stdout
    assert "failed with exit code 7: sh -c" in failed.stdout and "\n    why\n" in failed.stdout
    assert (
        "failed with exit code 127: no-such-program" in failed.stdout
        and "[3/3] 0 running, 2 failed" in failed.stdout
    )
    assert (tmp_path / "tries").read_text() == "try\n" * 2
    ten = "sh -c 'exit 10'"
    # It ends in a 0 too
    assert tool([ten]).returncode == 1 and tool([ten], "--dry-run").stdout == f"{ten}\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_full_disk_ends_no_list(monkeypatch):
    """The exit code of a command cannot be written to its log."""
    monkeypatch.syspath_prepend(REPOSITORY / "benchmark")
    run = importlib.import_module("run")
    job = run.Job("true")
    job.file = open("/dev/full", "a")  # noqa: SIM115
    job.process = subprocess.Popen(["true"])
    job.process.wait()
    assert job.has_ended()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_the_runs_and_waits_for_their_checkpoints(tmp_path, tool, number):
    """A second list does not touch what runs; afterwards the same list resumes it, and what waited
    is still to do.
    """
    lines = [train("wait-1"), train("wait-2"), train("later")]
    process = tool(lines, "--jobs", "2", wait=False)
    until(lambda: len(calls(tmp_path)) == 2)
    elsewhere = tool(lines[:1])
    assert elsewhere.stdout.startswith("running elsewhere: Task__wait-1__1__")
    assert elsewhere.stdout.endswith("\n1 still running elsewhere\n")
    assert elsewhere.returncode == 1
    process.send_signal(number)
    if number == signal.SIGHUP:  # by the shell and by the kernel
        process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    assert (
        process.returncode == 130
        and "stopping (2 running)" in output
        and output.endswith("go on\n")
    )
    assert "failed with" not in output and ", 0 failed" in output
    assert len(
        list(tmp_path.glob("runs/*/checkpoints/agent_0/1.pt"))
    ) == 2 and "later" not in calls(tmp_path)
    assert tool(lines).returncode == 0
    assert [len(words) for words in calls(tmp_path).values()] == [2, 2, 1]


def test_a_reader_that_goes_away_stops_nobody(tmp_path, tool):
    """As `| head -1` does."""
    process = tool([train("one"), train("two"), train("three")], "--jobs", "1", wait=False)
    process.stdout.close()
    assert process.wait(timeout=20) == 0
    assert calls(tmp_path).keys() == {"one", "two", "three"}


def test_a_second_signal_kills(tmp_path, tool):
    """A program that ignores signals, and its child processes."""
    process = tool(
        ["sh -c 'trap \"\" INT TERM; touch there; for k in $(seq 300); do sleep 0.1; done'"],
        wait=False,
    )
    until((tmp_path / "there").exists)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == 130


@pytest.fixture
def slurm(tmp_path, tool):
    """slurm(lines, *flags): the tool's process with an sbatch that executes at once, and what
    sbatch was given.
    """
    path = tmp_path / "bin" / "sbatch"
    path.parent.mkdir()
    path.write_text(SBATCH)
    path.chmod(0o755)

    def run(lines, *flags):
        process = tool(lines, "--slurm", *flags, PATH=f"{path.parent}:{os.environ['PATH']}")
        given = tmp_path / "sbatch_calls"
        return process, given.read_text() if given.exists() else ""

    return run


def test_slurm_arrays_are_split_and_execute_every_command_once(tmp_path, slurm):
    """Seven commands in arrays of three; one of them has finished with the next submission, of the
    others none.
    """
    lines = [f"sh -c 'echo {k} >> said; test {k} != 4'" for k in range(7)]
    process, given = slurm(
        ["# comment", *lines], "--array-limit", "3", "--jobs", "2", "--time", "1:00", "--cores", "1"
    )
    assert process.returncode == 0, process.stderr
    assert re.findall(r"--array=(\S+)", given) == ["1-3%2", "1-3%2", "1-1%2"]
    assert (
        given.count("call \n")
        == given.count("--time=1:00\n")
        == given.count("--cpus-per-task=1\n")
        == 3
    )
    assert (tmp_path / "said").read_text().split() == list("0123456")
    process, given = slurm(lines, "--array-limit", "3")
    assert (
        re.findall(r"--array=(\S+)", given)[3:] == ["1-1"]
        and "6 of 7 have finished before" in process.stderr
    )
    assert (tmp_path / "said").read_text().split() == list("01234564")


def test_slurm_takes_a_template_and_a_dry_run_submits_nothing(tmp_path, slurm):
    (tmp_path / "template").write_text(
        "#!/bin/sh\n#SBATCH --array=@ARRAY@ --gres=gpu:@CORES@\n@COMMAND@\n"
    )
    flags = "--template", "template", "--dry-run", "--retries", "3"
    process, given = slurm(["true"], *flags)
    assert process.returncode == 0 and not given and not (tmp_path / "runs").exists()
    assert " --cores 1 --retries 3 --line" in process.stdout
    assert process.stdout.startswith("#!/bin/sh\n#SBATCH --array=1-1 --gres=gpu:1\n")
    assert process.stdout.rstrip().endswith("--line $((0 + SLURM_ARRAY_TASK_ID))")


@pytest.mark.parametrize(
    ("lines", "flags", "error"),
    [
        (["# nothing"], [], "list: there is no command in it"),
        (["echo 'x"], [], "echo 'x: No closing quotation"),
        (["true"], ["--line", "2"], "--line 2: there are 1 commands"),
        (["true"], ["--cores", "4096"], "--cores 4096: there are "),
        (["true"], ["--jobs", "-1"], "--jobs -1: must be at least 0"),
        (["true"], ["--array-limit", "0"], "--array-limit 0: must be at least 1"),
        (["true"], ["--slurm"], "--slurm: there is no sbatch in PATH"),
        (
            ["true"],
            ["--slurm", "--template", "list"],
            "--template list: has to contain @ARRAY@ and @COMMAND@",
        ),
        (["true"], ["--slurm", "--template", "nowhere"], "nowhere: cannot be read"),
    ],
)
def test_bad_input_ends_in_one_line(tool, lines, flags, error):
    process = tool(lines, *flags, PATH="")
    cannot = "no sbatch" in error  # all others are wrong values
    assert process.returncode == (1 if cannot else 2)
    assert process.stderr.startswith(error)
    assert process.stderr.count("\n") == 1


def test_the_time_left_is_a_mean_of_the_commands_so_far(monkeypatch):
    """By hand: 20 s each; three wait, one has 15 s left and another takes longer than the mean, in
    two slots.
    """
    monkeypatch.syspath_prepend(REPOSITORY / "benchmark")
    run = importlib.import_module("run")
    monkeypatch.setattr(run.time, "monotonic", lambda: 7400.0)
    running = [SimpleNamespace(began=7395.0), SimpleNamespace(began=100.0)]
    assert run.estimate_time_left([10, 30], 3, running, 2) == "00:00:37 left"
    assert run.estimate_time_left([7400], 1, running[:1], 1) == "04:06:35 left"
    assert run.estimate_time_left([], 3, running, 2) == "--:--:-- left"


def test_a_list_that_is_not_there_ends_in_one_line(tmp_path):
    process = subprocess.run(
        [sys.executable, TOOL, "nowhere"], cwd=tmp_path, capture_output=True, text=True
    )
    assert process.returncode == 2
    assert process.stderr.startswith("nowhere: cannot be read")


def test_our_scripts_say_what_the_tool_looks_for(tmp_path, tool):
    """The real thing: a tiny run, which the tool finds finished, and then without its summary
    resumes.
    """
    line = f"python {REPOSITORY}/prpo_minigrid.py --env-id MiniGrid-Empty-5x5-v0"
    line += " --num-envs 2 --num-steps 8"
    line += (
        " --total-timesteps 32 --num-minibatches 1 --eval-episodes 0 --run-dir runs --exp-name tiny"
    )
    assert tool([line]).returncode == 0
    (summary,) = tmp_path.glob("runs/*/summary.json")
    assert json.loads(summary.read_text())["completed"] and not tool([line], "--dry-run").stdout
    summary.unlink()
    assert tool([line], "--dry-run").stdout.endswith(
        f"--resume {summary.parent.relative_to(tmp_path)}\n"
    )


@pytest.mark.parametrize("agents", ["1 2", pytest.param("1", marks=pytest.mark.slow)])
def test_a_process_of_a_federation_is_resumed(agents, tmp_path, tool):
    line = f"python {REPOSITORY}/federate.py --wait 0 --exchange share --agents {agents}"
    line += f" {REPOSITORY}/prpo_minigrid.py --env-id MiniGrid-Empty-5x5-v0"
    start, _, _ = line.partition(" --env-id")
    line += " --num-envs 2 --num-steps 8 --total-timesteps 32 --num-minibatches 1 --save-every 1"
    line += " --eval-episodes 0 --run-dir runs"
    assert tool([line]).returncode == 0
    assert not tool([line], "--dry-run").stdout
    (summary,) = tmp_path.glob("runs/*/summary.json")
    summary.unlink()
    folder = summary.parent.relative_to(tmp_path)
    assert tool([line], "--dry-run").stdout == f"{start} --resume {folder}\n"
    shutil.rmtree(summary.parent / "checkpoints")  # its files are in the store all the same
    assert tool([line], "--dry-run").stdout == f"{start} --resume {folder}\n"
    assert tool([line]).returncode == 0
    assert json.loads(summary.read_text())["completed"]
