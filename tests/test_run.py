"""`Run`, with a toy in the place of training: checkpoints, crashes, logs, signals, ranks, and what
is refused.
"""

import dataclasses
import errno
import functools
import importlib
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Literal
from unittest import mock

import numpy as np
import pandas
import pytest
import torch
import toy
from helpers import (
    REPOSITORY,
    Child,
    config_of,
    copy_config,
    environment,
    only_run,
    outcomes,
    place_in_group,
    refusal,
    scalars_of,
    summary_of,
    table_of,
    torchrun,
)
from ports import free_port
from scipy import stats

import communicators

sys.path.insert(0, str(REPOSITORY / "benchmark"))
runs = importlib.import_module("runs")

TOY = Path(toy.__file__)


def args_of(run_dir, *argv, **changes):
    """The toy's arguments."""
    return communicators.parse_args(toy.Args, toy.check_args, ["--run-dir", str(run_dir), *argv])


def resume(folder, *argv):
    """Go on with a run."""
    return toy.main(
        communicators.parse_args(
            toy.Args, toy.check_args, ["--resume", str(folder), *map(str, argv)]
        )
    )


def logs_of(folder):
    """All CSV files as text, without the column that depends on the clock."""
    tables = {path.name: pandas.read_csv(path) for path in sorted(folder.glob("*.csv"))}
    return {
        name: table.drop(columns="agent_steps_per_second", errors="ignore").to_csv()
        for name, table in tables.items()
    }


def assert_same(folder, other):
    """The same weights, bit for bit, the same rows, the same points in TensorBoard, none missing
    and none twice.
    """
    for path in sorted(other.glob("agent_*.pt")):
        for ours, theirs in zip(
            torch.load(folder / path.name).values(), torch.load(path).values(), strict=True
        ):
            assert torch.equal(ours, theirs)
    assert logs_of(folder) == logs_of(other)
    charts = scalars_of(folder)
    expected = scalars_of(other)
    assert {
        tag for tag in charts.keys() | expected.keys() if charts.get(tag) != expected.get(tag)
    } <= {"charts/SPS"}
    assert len(charts["charts/SPS"]) == len(expected["charts/SPS"])
    summaries = [summary_of(path) for path in (folder, other)]
    same = (
        "iterations",
        "communication_bytes",
        "training_return",
        "evaluation",
        "completed",
        "diverged",
    )
    assert [[summary[name] for name in same] for summary in summaries][0] == [
        summaries[1][name] for name in same
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that nothing interrupts."""
    run_dir = tmp_path_factory.mktemp("whole")
    toy.main(args_of(run_dir))
    return only_run(run_dir)


def files_of(folder):
    """The iterations of every agent's checkpoints."""
    agents = sorted(folder.glob("checkpoints/agent_*"))
    return [sorted(int(path.stem) for path in agent.glob("*.pt")) for agent in agents]


# --- crashes ---


@pytest.mark.parametrize(
    ("moment", "agent", "iteration", "left", "newest"),
    [
        ("half a file", 1, 4, [[2, 4], [2], [2]], 2),
        ("not in its place", 1, 4, [[2, 4], [2], [2]], 2),
        ("complete", 0, 4, [[2, 4], [2], [2]], 2),
        ("complete", 2, 4, [[2, 4]] * 3, 4),
        ("complete", 0, 6, [[2, 4, 6], [2, 4], [2, 4]], 4),
        ("complete", 0, 2, [[2]], 0),
        ("half a file", 0, 2, [[]], 0),
    ],
)
def test_a_crash_anywhere_in_a_save_changes_nothing(
    moment, agent, iteration, left, newest, whole, crashing, tmp_path, capsys
):
    """All agents go on from the newest checkpoint that all completed, and the run becomes the
    uninterrupted one.
    """
    crashing(moment, agent, iteration, lambda: toy.main(args_of(tmp_path)))
    folder = only_run(tmp_path)
    assert files_of(folder) == left
    if agent < 2:  # and again in the same place
        crashing(moment, agent, iteration, lambda: resume(folder))
    capsys.readouterr()
    resume(folder)
    started = re.findall(r"resuming after iteration (\d) of 6", capsys.readouterr().out)
    expected = [str(newest)] if newest > 0 else []
    assert started == expected
    assert_same(folder, whole)
    assert files_of(folder) == [[4, 6]] * 3


def test_an_agent_that_was_ahead_keeps_no_newer_checkpoint(whole, crashing, tmp_path):
    """Or its next save would delete the one that the others still need, where they are cut off
    again before theirs.
    """
    crashing("complete", 0, 4, lambda: toy.main(args_of(tmp_path)))
    folder = only_run(tmp_path)
    assert files_of(folder) == [[2, 4], [2], [2]]
    crashing("complete", 0, 3, lambda: resume(folder, "--save-every", "1"))
    assert files_of(folder) == [[2, 3], [2], [2]]
    resume(folder)
    assert (
        pandas.read_csv(folder / "metrics.csv").x.tolist()
        == pandas.read_csv(whole / "metrics.csv").x.tolist()
    )


def test_a_checkpoint_holds_its_own_agent(whole, tmp_path):
    """Without what a view shares its memory with; and it continues the clocks of the run."""
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    for path in folder.glob("checkpoints/*/6.pt"):
        assert path.stat().st_size < 50_000
        stored = torch.load(path)
        stored["run"] |= {"train": 500.0, "wall": 1000.0, "clock": {"all": 400.0}}
        torch.save(stored, path)
    summary = resume(folder)
    assert (summary["train_seconds"], summary["seconds"]) == (500.0, {"all": 400.0})
    assert 1000 <= summary["wall_seconds"] < 1100
    expected = summary_of(whole)
    assert summary["training_return"] == expected["training_return"]


def test_a_truncated_checkpoint_gives_way_to_the_one_before(whole, tmp_path, capsys):
    """With a message; the others step back with it."""
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    (folder / "checkpoints/agent_1/6.pt").write_bytes(
        (folder / "checkpoints/agent_1/6.pt").read_bytes()[:-100]
    )
    resume(folder)
    assert_same(folder, whole)
    assert re.search(r"agent_1/6.pt is damaged", capsys.readouterr().out)


def test_checkpoints_of_another_version_are_refused_in_one_line(whole, tmp_path):
    """One that lacks something which this version keeps, though its settings are the same."""
    folder = shutil.copytree(whole, tmp_path / whole.name)
    for path in folder.glob("checkpoints/*/*.pt"):
        stored = torch.load(path)
        del stored["deque"], stored["list"]
        torch.save(stored, path)
    with pytest.raises(
        SystemExit, match="^.*: is of another version, its checkpoints have no deque, list$"
    ):
        resume(folder)


@pytest.mark.parametrize("missing", ["one agent", "its newest two"])
def test_missing_checkpoints_of_one_agent_are_an_error(missing, whole, tmp_path):
    """It must not start anew, silently, beside the others."""
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    if missing == "one agent":
        shutil.rmtree(folder / "checkpoints/agent_1")
    for path in folder.glob("checkpoints/agent_1/*.pt"):
        path.write_bytes(b"")
    message = refusal(resume, folder, code=1)
    assert "agent 1: none" in message and "agent 0: [4, 6]" in message
    assert logs_of(folder) == logs_of(whole)


def test_damaged_logs_lose_only_what_is_damaged(whole, crashing, tmp_path):
    """Half a line and NUL bytes at the end of a log, as a power cut leaves them."""
    crashing("complete", 2, 4, lambda: toy.main(args_of(tmp_path)))
    folder = only_run(tmp_path)
    for name in ("metrics.csv", "communicator.csv"):
        with open(folder / name, "ab") as file:
            file.write(b"4,1,lin" + bytes(100))
    resume(folder)
    assert_same(folder, whole)


@pytest.mark.parametrize("text", ["", "{", '{"script": "toy"}', "[1]", "\0\0"])
def test_a_damaged_config_is_refused_in_one_line(text, whole, tmp_path):
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    (folder / "config.json").write_text(text)
    assert str(folder) in refusal(resume, folder)


@pytest.mark.parametrize(
    ("command", "names_commit"), [({}, True), ({"command": ["--no-such-flag"]}, False)]
)
def test_only_runs_of_the_first_version_are_told_of_its_commit(command, names_commit, tmp_path):
    """Which kept no words of their command."""
    config = {"script": TOY.stem, "seed": 1} | command
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = refusal(resume, tmp_path)
    assert f"must be a run of this version of {TOY.name}" in message
    assert message.endswith("; those of version 0.1 need commit 9627f85") == names_commit


def test_a_run_of_another_script_is_refused_by_its_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"script": "my_copy", "command": []}))
    message = refusal(resume, tmp_path)
    assert message == f"--resume {tmp_path}: is a run of my_copy.py, not of {TOY.name}"


def test_a_resume_says_whether_the_code_has_changed(whole, tmp_path, monkeypatch, capsys):
    """As after an edit or an update between checkpoint and resume."""
    line = "the code is no longer that of its last checkpoint"
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    resume(folder)
    assert line not in capsys.readouterr().out
    edited = tmp_path / "edited.py"
    edited.touch()
    monkeypatch.setattr(communicators, "_list_code", lambda args: [edited])
    resume(folder)
    assert line in capsys.readouterr().out


def test_a_full_disk_ends_with_one_line_and_keeps_what_was_saved(whole, tmp_path, monkeypatch):
    """When a checkpoint, a log or the summary cannot be written; then there is room again."""
    fsync = os.fsync
    full = []

    def no_space(descriptor):
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", no_space)
    for moment, saved in ((2, False), (4, True)):
        run_dir = tmp_path / str(moment)
        args = args_of(run_dir)
        at = functools.partial(lambda due, now: full.append(1) if now == due else None, moment)
        message = refusal(toy.main, args, at=at, code=1)
        full.clear()
        folder = only_run(run_dir)
        assert "No space left" in message
        assert ("go on with --resume" in message) == saved == any(files_of(folder))
    assert files_of(folder) == [[2]] * 3
    resume(folder)
    assert logs_of(folder) == logs_of(whole)


def test_a_run_whose_logs_cannot_be_closed_is_not_completed(tmp_path, monkeypatch):
    """What is buffered would be lost, and sweeps would leave the run out as finished."""
    finish = communicators.Run.finish

    def finish_on_a_full_disk(run):
        monkeypatch.setattr(run.writer, "close", no_space)
        return finish(run)

    def no_space():
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(communicators.Run, "finish", finish_on_a_full_disk)
    assert "No space left" in refusal(toy.main, args_of(tmp_path), code=1)
    folder = only_run(tmp_path)
    assert not (folder / "summary.json").exists()
    monkeypatch.setattr(communicators.Run, "finish", finish)
    assert resume(folder)["completed"]


def test_a_run_is_resumed_elsewhere(tmp_path):
    """Where the folder of its former runs cannot be: it is not written to."""
    toy.main(args_of(tmp_path / "runs"))
    folder = only_run(tmp_path / "runs")
    (tmp_path / "file").write_text("")
    copy_config(folder, folder, f"--run-dir={tmp_path / 'file' / 'runs'}")
    assert resume(folder)["completed"]


def test_the_exchange_knows_that_a_signal_has_come(tmp_path, monkeypatch):
    """A round of averages would else wait for peers."""
    exchange = communicators.Exchange(3)
    monkeypatch.setattr(toy, "Exchange", lambda *inputs: exchange)
    interrupted = []

    def send(iteration):
        interrupted.append(exchange.interrupted())
        if iteration == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            interrupted.append(exchange.interrupted())

    with pytest.raises(SystemExit):
        toy.main(args_of(tmp_path), at=send)
    assert interrupted == [0, 0, signal.SIGTERM]


def test_a_file_is_on_the_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    """Or a power cut could leave a file without content where there was a whole one."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    synced = []
    fsync = os.fsync

    def note(descriptor):
        fsync(descriptor)
        synced.append((os.fstat(descriptor).st_size, path.read_bytes()))

    monkeypatch.setattr(os, "fsync", note)
    communicators.write_atomically(path, lambda file: file.write(b"new content"))
    assert synced == [(11, b"old")]
    assert path.read_bytes() == b"new content"


# --- output ---


@pytest.mark.parametrize(
    "streams",
    [
        "<&- >&- 2>&-",  # closed
        pytest.param(">/dev/full 2>/dev/full", marks=pytest.mark.slow),
        pytest.param("2>&1 | true", marks=pytest.mark.slow),  # a pipe that nobody reads
        "> out 2>&1",  # in ASCII
    ],
)
def test_output_does_not_decide_about_a_run(streams, whole, tmp_path):
    """Nor does it get into its logs: not the line by which a signal is answered, either."""
    program = tmp_path / "program.py"
    program.write_text(
        "import contextlib, os, signal, subprocess, sys, toy, communicators\n"
        "args = communicators.parse_args(toy.Args, toy.check_args)\n"
        "print('—' * 100_000, sys.stdin.read(), flush=True)\n"
        "print('—' * 100_000, file=sys.stderr, flush=True)\n"
        "def interrupt(iteration):\n"
        "    if iteration == 3:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        with contextlib.suppress(OSError):\n"
        "            os.write(2, b'from a library')\n"
        "        subprocess.run(['sh', '-c', 'exec 3>&2'], check=True)\n"  # children have it, too
        "toy.main(args, at=interrupt)\n"
    )
    path = os.pathsep.join([str(TOY.parent), environment()["PYTHONPATH"]])
    settings = environment(PYTHONPATH=path, PYTHONIOENCODING="ascii")
    start = shlex.join([sys.executable, str(program), "--run-dir", "runs"])
    command = f"({start}; echo $? > code) {streams}"
    nothing = subprocess.DEVNULL
    subprocess.run(["sh", "-c", command], cwd=tmp_path, env=settings, stdin=nothing, check=True)
    assert int((tmp_path / "code").read_text()) == 128 + signal.SIGTERM
    folder = only_run(tmp_path / "runs")
    assert files_of(folder) == [[2, 3]] * 3
    for path in folder.glob("events.*"):  # names of the same second are in the order of processes
        path.rename(path.with_name(path.name.replace("tfevents.1", "tfevents.0")))
    resume(folder)
    assert_same(folder, whole)
    if "out" in streams:
        output = (tmp_path / "out").read_text()
        assert "\\u2014" * 100_000 in output and "\\xb1" in output


# --- the lock ---


@pytest.fixture
def running(tmp_path):
    """(folder, process): a run in a process of its own, waiting in its third iteration for a file
    `go`.
    """
    program = tmp_path / "program.py"
    program.write_text(
        "import pathlib, time, toy, communicators\n"
        "def wait(iteration):\n"
        "    if iteration == 3:\n"
        "        pathlib.Path('waiting').touch()\n"
        "        while not pathlib.Path('go').exists():\n"
        "            time.sleep(0.05)\n"
        "toy.main(communicators.parse_args(toy.Args, toy.check_args), at=wait)\n"
    )
    process = Child(program, "--run-dir", tmp_path / "runs", cwd=tmp_path)
    try:
        limit = time.monotonic() + 60
        while not (tmp_path / "waiting").exists():
            assert process.poll() is None and time.monotonic() < limit, process.communicate()
            time.sleep(0.05)
        yield only_run(tmp_path / "runs"), process
    finally:
        process.kill()


def test_a_second_process_cannot_go_on_with_a_live_run(running, whole, tmp_path):
    """It ends before it changes anything, and the run's logs are complete."""
    folder, process = running
    before = contents_of(folder)
    second = Child(TOY, "--resume", folder, "--save-every", 1, cwd=tmp_path)
    [((_, errors), code)] = outcomes([second])
    assert (errors, code) == (f"{folder}: another process is training in this folder\n", 1)
    assert contents_of(folder) == before
    (tmp_path / "go").touch()
    [((_, errors), code)] = outcomes([process])
    assert code == 0, errors
    assert_same(folder, whole)


def test_a_killed_process_and_a_finished_run_free_the_folder(running, tmp_path):
    """This process, which goes on with the run twice, too, lives on when another one does."""
    folder, process = running
    process.send_signal(signal.SIGKILL)
    assert outcomes([process])[0][1] == -signal.SIGKILL
    (tmp_path / "go").touch()
    for _ in range(2):
        assert resume(folder)["completed"]
    [((_, errors), code)] = outcomes([Child(TOY, "--resume", folder, cwd=tmp_path)])
    assert code == 0, errors


@pytest.mark.parametrize("system", ["Windows", "a file system without locks"])
def test_without_file_locks_a_line_says_so(system, tmp_path, monkeypatch, capsys):
    if system == "Windows":
        monkeypatch.setattr(communicators, "fcntl", None)
    else:
        no_locks = OSError(errno.ENOLCK, "No locks available")
        monkeypatch.setattr(communicators.fcntl, "lockf", mock.Mock(side_effect=no_locks))
    assert toy.main(args_of(tmp_path))["completed"]
    assert capsys.readouterr().out.count("no file locks here") == 1


# --- names, folders, logs ---


def test_runs_of_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 9.5)
    stamps = [communicators.Run._make_folder(tmp_path, "toy__1__") for _ in range(3)]
    assert stamps == [9, 10, 11]
    assert {path.name for path in tmp_path.iterdir()} == {f"toy__1__{stamp}" for stamp in stamps}


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    """A shell leaves that of --run-dir=~/runs as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "C.csv").write_text("1,0,0\n0,1,0\n0,0,1\n")
    toy.main(args_of("~/runs", "--communicator", "~/C.csv"))
    folder = only_run(tmp_path / "runs")
    assert resume(f"~/runs/{folder.name}")["completed"]
    assert not (tmp_path / "~").exists()


def test_a_restart_finds_the_newest_run_with_its_settings(tmp_path, monkeypatch):
    """The newest by number; the first start of a torchrun makes a new folder."""
    configs = {"toy__1__9": "mine", "toy__1__10": "mine", "toy__1__11": "other"}
    configs["toy__1__12_copied"] = "mine"
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
    find = functools.partial(communicators.Run._find_last_attempt, tmp_path, "toy__1__")
    assert find("mine") == 0
    for attempt, last in (("0", 0), ("1", 10), ("2", 10)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        assert find("mine") == last
        assert find("new") == 0


@pytest.mark.parametrize(
    ("rate", "text"),
    [(1234.56, "1,235"), (20.6, "21"), (19.96, "19.96"), (0.054, "0.05")],
)
def test_slow_progress_has_decimals(rate, text, monkeypatch, capsys):
    """Few completions a second, thousands of steps; and the time left, of half of the run."""
    run = SimpleNamespace(
        iteration=3,
        total=6,
        train_seconds=3725.4,
        latest={"x": [1.0, math.nan]},
        main_metric="x",
        counter="step",
        unit="completions",
        measure="reward",
        exchange=SimpleNamespace(members=range(2)),
    )
    for is_terminal in (False, True):
        monkeypatch.setattr(sys.stdout, "isatty", lambda is_terminal=is_terminal: is_terminal)
        shown = communicators.Run._describe_progress(run, rate)
        communicators.Run._print_progress(run, shown, is_due=True)
    line = f"step 3/6  {text} completions/s  01:02:05 left  reward 1.00 nan"
    assert capsys.readouterr().out == f"{line}\n\r\033[K{line}"


@pytest.mark.parametrize(
    ("is_terminal", "shown"),
    [
        (False, "evaluated 1 of 3 agents\nevaluated 2 of 3 agents\n"),
        (True, "\r\033[Kevaluated 1 of 3 agents\r\033[Kevaluated 2 of 3 agents"),
    ],
)
def test_an_evaluation_shows_its_progress(is_terminal, shown, tmp_path, monkeypatch, capsys):
    """After every agent, of whom the next is evaluated then; in a file at most every 10 s."""
    log = communicators.Run.log_evaluation
    now = [0.0]
    outputs = {}

    def evaluate_slowly(results, seconds):
        for columns in results:
            now[0] += seconds
            yield columns

    def log_slowly(self, results):
        for seconds in (11, 1):
            capsys.readouterr()
            now[0] += 10  # the last line of training's progress is as old
            log(self, evaluate_slowly(results, seconds))
            outputs[seconds] = capsys.readouterr().out
        now[0] += 20
        log(self, results)  # of all agents at once
        assert not capsys.readouterr().out

    monkeypatch.setattr(communicators.Run, "log_evaluation", log_slowly)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    toy.main(args_of(tmp_path, "--iterations", "2"))
    assert outputs[11] == shown
    if not is_terminal:
        assert outputs[1] == "evaluated 1 of 3 agents\n"


class LaunchedExchange(communicators.Exchange):
    """What a launcher may put in the place of the exchange: some agents' logs are elsewhere."""

    label = "agents_0_1"
    settings = {"exchange": "there", "seed": "the script's counts"}

    def __init__(self, *inputs):
        super().__init__(*inputs)
        self.members = range(2)
        self.arrived = [[] for _ in self.agents]

    def state(self):
        return {"arrived": self.arrived}

    def describe(self):
        return super().describe() | {"communication/age": 3.0}


def test_an_exchange_of_a_launcher_has_a_say_in_the_run(tmp_path, monkeypatch, crashing, capsys):
    """In the folder's name, settings, logs and checkpoints."""
    exchanges = []

    def make_exchange(*inputs):
        exchanges.append(LaunchedExchange(*inputs))
        return exchanges[-1]

    def receive(iteration):
        for i, arrived in enumerate(exchanges[-1].arrived):
            arrived.append([iteration, i])

    monkeypatch.setattr(toy, "Exchange", make_exchange)
    crashing("complete", 2, 4, lambda: toy.main(args_of(tmp_path), at=receive))
    folder = only_run(tmp_path)
    assert re.fullmatch(r"toy__toy__1__agents_0_1__\d+", folder.name)
    assert "agents 0 1 of 3 agents on cpu" in capsys.readouterr().out
    monkeypatch.setattr(communicators, "exchange_of_launcher", make_exchange)
    args = communicators.parse_args(toy.Args, toy.check_args, ["--resume", str(folder)])
    summary = toy.main(args, at=receive)
    assert exchanges[-1].arrived == [[[k, i] for k in range(1, 7)] for i in range(3)]
    config = config_of(folder)
    for settings in (config, summary["settings"]):
        assert (settings["exchange"], settings["seed"]) == ("there", 1)
    assert not [word for word in config["command"] if word.startswith("--exchange")]
    metrics = pandas.read_csv(folder / "metrics.csv")
    assert set(metrics["agent"]) == {0, 1} and set(metrics["age"]) == {3.0}
    assert set(pandas.read_csv(folder / "communicator.csv")["listener"]) == {0, 1}
    assert set(pandas.read_csv(folder / "evaluations.csv")["agent"]) == {0, 1}
    assert len(summary["evaluation"]["agents"]) == 2


@pytest.mark.parametrize(
    "name", ["../..", "/etc", "a/b\\c", "x" * 300, "..", "ü?*:", "学" * 80, "a" + "学" * 80]
)
def test_no_name_leaves_the_folder_of_runs(name, tmp_path):
    """Long ones are cut, in the middle of no character, and whatever is no good in a file's name is
    replaced.
    """
    (tmp_path / "runs").mkdir()
    args = args_of(tmp_path / "runs", "--exp-name", name, "--iterations", "1")
    toy.main(args, name="+".join(["MiniGrid-KeyCorridorS3R3-v0"] * 20))
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    folder = only_run(tmp_path / "runs")
    assert len(folder.name.encode()) <= 255 and (folder / "summary.json").exists()
    assert set(pandas.read_csv(folder / "metrics.csv")["exp_name"]) == {name}


@pytest.mark.parametrize("flag", ["--run-dir", "--exp-name", "--wandb-project-name"])
def test_bytes_that_are_not_utf_8_are_refused_before_anything_is_written(flag, tmp_path):
    """Python reads them as surrogates, which logs cannot hold."""
    words = "--run-dir", "runs", flag, os.fsdecode(b"caf\xe9")
    [((_, errors), code)] = outcomes([Child(TOY, *words, cwd=tmp_path)])
    assert code == 2
    assert errors == f"{flag} caf\\udce9: must be UTF-8, in a locale that has it\n"
    assert list(tmp_path.iterdir()) == []
    # As in a locale of ASCII, where Python reads each byte so
    words = os.fsencode("日本").decode("ascii", "surrogateescape")
    assert refusal(args_of, tmp_path, flag, words).startswith(rf"{flag} \udce6\udc97")


@pytest.mark.parametrize("name", ["a\nb", "a\rb", "a\tb", "a\x85b"])
def test_names_with_control_characters_are_refused(name, tmp_path):
    """A resumed run reads the rows of its logs at line breaks."""
    escaped = name.encode("unicode_escape").decode()
    message = f"--exp-name {escaped}: must not have control characters"
    assert refusal(args_of, tmp_path, "--exp-name", name) == message
    assert args_of(tmp_path, "--exp-name", "日本\u3000é").exp_name == "日本\u3000é"


def test_tables_that_a_person_analyses(whole):
    """metrics.csv says whose row it is, of which seed and experiment; communicator.csv has C
    whenever it changed.
    """
    metrics = pandas.read_csv(whole / "metrics.csv")
    assert list(metrics.columns[:6]) == [
        "iteration",
        "agent",
        "env_id",
        "timesteps",
        "seed",
        "exp_name",
    ]
    assert list(metrics["timesteps"]) == [5 * k for k in range(1, 7) for _ in range(3)]
    assert set(metrics["env_id"]) == {"line 0", "line 1", "line 2"} and set(
        metrics["exp_name"]
    ) == {"toy"}
    summary = summary_of(whole)
    assert metrics["agent_steps_per_second"].iloc[-1] == pytest.approx(
        summary["agent_steps_per_second"], rel=1e-5
    )
    communicator = pandas.read_csv(whole / "communicator.csv")
    weights = communicator.query("listener == 0 and peer == 2").set_index("iteration")["weight"]
    assert weights.to_dict() == pytest.approx({1: 0.0, 2: 0.1, 4: 0.2, 6: 0.3})
    assert communicator.query("listener == 2 and peer == 0")["weight"].eq(0).all()


def test_counters_keep_their_digits(tmp_path, monkeypatch):
    """Of metrics, of what all agents have in common, of matrices and of evaluations."""
    log = communicators.Run.log
    log_evaluation = communicators.Run.log_evaluation

    def count(self, rows, C, distances, scalars):
        for row in rows:
            row["charts/steps"] = 5_675_562
            row["charts/fraction"] = 1 / 3
        self.exchange.bytes_sent = 123_456_789_012
        far = torch.full_like(C, 12_345_677.0)
        log(self, rows, C, far, scalars | {"charts/bits": 7_654_321.0})

    def count_evaluation(self, results):
        return_of = {"return": np.array([2_345_677.0, 2_345_679.0])}
        log_evaluation(self, [{"line": return_of}] * len(results))

    monkeypatch.setattr(communicators.Run, "log", count)
    monkeypatch.setattr(communicators.Run, "log_evaluation", count_evaluation)
    toy.main(args_of(tmp_path))
    folder = only_run(tmp_path)
    rows = {}
    for name in ("metrics", "communicator", "evaluations"):
        rows[name] = table_of(folder, name)[-1]
    expected = {
        "steps": "5675562",
        "fraction": "0.333333",
        "bits": "7654321",
        "communication_bytes": "123456789012",
    }
    assert {column: rows["metrics"][column] for column in expected} == expected
    assert rows["communicator"]["distance"] == "12345677"
    assert rows["evaluations"]["mean_return"] == "2345678"
    table = pandas.DataFrame({"steps": [5_675_562.0, math.nan], "fraction": [1 / 3, -2.5e-7]})
    runs.write(tmp_path / "table.csv", "# a comment\n", table)
    text = (tmp_path / "table.csv").read_text()
    assert text == "# a comment\nsteps,fraction\n5675562,0.333333\n,-2.5e-07\n"


def test_time_left_beyond_a_day(tmp_path, monkeypatch, capsys):
    """Hours go on counting."""
    now = iter(range(0, 10**9, 10_000))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(now)))
    toy.main(args_of(tmp_path, "--iterations", "20"), at=lambda iteration: None)
    left = re.findall(r"iteration 1/20 .* (\d+):(\d\d):(\d\d) left", capsys.readouterr().out)
    assert (
        left
        and int(left[0][0]) >= 24
        and (int(left[0][0]) * 3600 + int(left[0][1]) * 60 + int(left[0][2])) % 19 == 0
    )


def test_a_clock_that_is_set_back_changes_no_duration(tmp_path, monkeypatch, capsys):
    """An hour at every look; the name of the folder shows the clock."""
    clock = itertools.count(10**9, -3600)
    seconds = itertools.count(5.0, 11.0)
    monkeypatch.setattr(time, "time", lambda: next(clock))
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))
    summary = toy.main(args_of(tmp_path))
    assert only_run(tmp_path).name.endswith(f"__{10**9}")
    assert summary["wall_seconds"] > 60
    assert re.findall(r"iteration (\d)/6 ", capsys.readouterr().out) == list("123456")


@pytest.mark.parametrize(
    "term", ["policy_loss", "value_loss", "entropy", "kl_reference", "proximal_loss"]
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_diverged_agent_is_named_once(term, value, tmp_path, capsys):
    """Whichever term of its loss is not finite; the others go on, and summary.json knows which."""

    def poison(iteration):
        if iteration == 3:
            raise_nan.append(1)

    raise_nan = []
    log = communicators.Run.log

    def with_nan(self, rows, *rest):
        for i, row in enumerate(rows):
            row |= {"losses/value_loss": 1.0, "losses/entropy": 1.0, "losses/kl_reference": 0.0}
            row["losses/proximal_loss"] = 0.0
            row["losses/explained_variance"] = -math.inf  # of equal returns: no divergence
            if raise_nan and i == 1:
                row[f"losses/{term}"] = value
        return log(self, rows, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(communicators.Run, "log", with_nan)
        summary = toy.main(args_of(tmp_path), at=poison)
    output = capsys.readouterr().out
    line = f"iteration 3: agent 1 has diverged: losses/{term} is {value}"
    if term not in ("entropy", "kl_reference"):
        line += "; its policy is finite: check the rewards of its task"
    assert output.count("has diverged") == 1 and f"{line}\n" in output
    assert summary["diverged"] == [1] and summary["completed"]
    losses = pandas.read_csv(only_run(tmp_path) / "metrics.csv").query("agent == 1")[term]
    assert [math.isfinite(loss) for loss in losses] == [True, True, False, False, False, False]


# --- extending a run ---

OTHER = {
    "exp_name": "other",
    "seed": "2",
    "device": "cpu",
    "save_every": "3",
    "eval_every": "1",
    "timeout": "5",
}
OTHER |= {
    "wandb_project_name": "other",
    "wandb_entity": "other",
    "num_agents": "4",
    "communicator": "identity",
}
OTHER |= {
    "self_preference": "0.5",
    "communicator_temperature": "2",
    "topology": "ring",
    "top_k": "1",
}
OTHER |= {"iterations": "9", "run_dir": "other", "track": "True"}
FREE = {
    "run_dir",
    "device",
    "timeout",
    "save_every",
    "eval_every",
    "wandb_project_name",
    "wandb_entity",
    "track",
}


@pytest.mark.parametrize("name", OTHER)
def test_what_a_resumed_run_may_change(name, whole, monkeypatch):
    """Where it runs and how often it is saved, evaluated and tracked; nothing that training depends
    on.
    """
    # Which is no flag
    assert OTHER.keys() == vars(toy.Args()).keys() - {"resume", "communicator_matrix"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: package)  # wandb is installed
    argv = [
        "--resume",
        str(whole),
        f"--{name.replace('_', '-')}",
        *([] if name == "track" else [OTHER[name]]),
    ]
    if name in FREE:
        args = communicators.parse_args(toy.Args, toy.check_args, argv)
        assert str(getattr(args, name)).removesuffix(".0") == OTHER[name]
    else:
        message = refusal(communicators.parse_args, toy.Args, toy.check_args, argv)
        assert message.startswith(argv[2]) and message.endswith(f", as in {whole}, or left out")


def test_all_changes_of_a_resumed_run_are_named_in_one_line(whole):
    """Those that are allowed are not among them."""
    argv = ["--seed", "2", "--top-k", "1", "--device", "cpu"]
    changes = "--seed 2 must be 1; --top-k 1 must be 0"
    assert refusal(resume, whole, *argv) == f"{changes}, as in {whole}, or left out"


@dataclasses.dataclass
class AllTypes(communicators.RunArgs):
    """A flag of every type that the scripts have."""

    texts: tuple[str, ...] = ("a", "b")
    """words"""
    numbers: tuple[float | str, ...] = ()
    """numbers or the name of a file"""
    sizes: tuple[int, ...] = (1, 2)
    """whole numbers"""
    target: communicators.Positive | None = None
    """a number or none"""
    limit: float | None = 0.5
    """a number or none"""
    text: str = "x"
    """a text"""
    on: bool = True
    """a switch"""
    off: bool = False
    """a switch"""
    kind: Literal["a", "b"] = "a"
    """a choice"""


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"texts": (), "sizes": (), "text": "", "limit": None, "exp_name": "toy"},
        {"texts": ("-a", "b c", "-1"), "numbers": (-1.5, 2e-300), "text": "--on é\n", "seed": 5},
        {"numbers": ("weights.csv",), "sizes": (3,), "target": 1 / 3, "on": False, "off": True},
        {"kind": "b", "text": "None", "run_dir": "../there", "wandb_entity": "x"},
        {"communicator": "gone.csv", "communicator_matrix": "1", "num_agents": 1},
    ],
)
def test_settings_are_read_back_from_a_command(settings, tmp_path):
    """A run that was started from Python has none but that which is derived from its settings."""
    args = AllTypes(**settings)
    config = {"script": Path(__file__).stem, "command": communicators.list_words(args)}
    config |= vars(args)
    (tmp_path / "config.json").write_text(json.dumps(config))
    args.resume = str(tmp_path)
    read = communicators.read_run(AllTypes(resume=str(tmp_path)))
    assert read == args


def test_a_resumed_run_begins_with_the_settings_that_auto_stood_for(tmp_path):
    """Not with those that another machine would choose."""

    def choose(args):
        if args.device == "auto":
            args.device = "cpu"

    args = communicators.parse_args(toy.Args, choose, ["--run-dir", str(tmp_path)])
    toy.main(args)
    folder = only_run(tmp_path)
    resumed = communicators.parse_args(toy.Args, toy.check_args, ["--resume", str(folder)])
    assert resumed.device == "cpu"


def test_a_run_can_be_extended(whole, tmp_path):
    """More iterations, other intervals; the folder remembers what was asked for last, and a shorter
    run is refused.
    """
    toy.main(args_of(tmp_path))
    folder = only_run(tmp_path)

    def parse(*argv):
        argv = ["--resume", str(folder), *argv]
        return communicators.parse_args(toy.Args, toy.check_args, argv, may_change=("iterations",))

    toy.main(parse("--iterations", "9", "--save-every", "4", "--eval-every", "3"))
    again = parse()
    assert (again.iterations, again.save_every, again.eval_every) == (9, 4, 3)
    metrics = pandas.read_csv(folder / "metrics.csv")
    assert list(metrics["iteration"].unique()) == list(range(1, 10))
    assert (
        metrics[metrics["iteration"] <= 6]["x"].to_list()
        == pandas.read_csv(whole / "metrics.csv")["x"].to_list()
    )
    assert "9 iterations already" in refusal(toy.main, parse("--iterations", "5"))


def test_a_run_that_goes_on_is_not_completed(whole, crashing, tmp_path):
    """Killed while it is extended, it has no summary of before, by which tools would take it for
    finished.
    """
    folder = Path(shutil.copytree(whole, tmp_path / "runs" / whole.name))
    before = (folder / "summary.json").read_bytes()
    refusal(resume_longer, folder, 5)
    assert (folder / "summary.json").read_bytes() == before  # nothing was resumed
    crashing("half a file", 0, 8, lambda: resume_longer(folder, 9))
    assert not (folder / "summary.json").exists()
    table = runs.load_runs(str(tmp_path / "runs"))
    assert len(table) == 8 * 3 and not table["completed"].any()
    with pytest.raises(SystemExit, match="no finished run in there"):
        runs.read_runs((str(tmp_path / "runs"),))
    resume_longer(folder, 9)
    assert summary_of(folder)["completed"]
    assert runs.load_runs(str(tmp_path / "runs"))["completed"].all()


def resume_longer(folder, iterations):
    """Go on with a run to another length."""
    argv = ["--resume", str(folder), "--iterations", str(iterations)]
    toy.main(communicators.parse_args(toy.Args, toy.check_args, argv, may_change=("iterations",)))


def test_checkpoints_that_cannot_be_written_leave_a_finished_run_as_it_was(
    whole, tmp_path, monkeypatch
):
    """Their folders may have other permissions than the run's."""
    folder = Path(shutil.copytree(whole, tmp_path / whole.name))
    before = contents_of(folder)
    checkpoints = folder / "checkpoints" / "agent_1"
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, *mode: path != checkpoints and access(path, *mode)
    )
    message = refusal(resume_longer, folder, 9)
    assert message == f"--resume {folder}: {checkpoints} cannot be written to"
    assert contents_of(folder) == before


@pytest.mark.parametrize("failure", ["login", "TensorBoard", "a log"])
def test_a_start_that_fails_leaves_a_finished_run_as_it_was(failure, whole, tmp_path, monkeypatch):
    """Completed, with its settings: without --track the folder can be resumed as before."""
    folder = Path(shutil.copytree(whole, tmp_path / whole.name))
    before = contents_of(folder)

    def fail(*arguments, **options):
        raise OSError("no connection\nand more")

    wandb = SimpleNamespace(init=lambda **_: None, finish=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: package)
    owner, name = {
        "login": (wandb, "init"),
        "TensorBoard": (torch.utils.tensorboard, "SummaryWriter"),
        "a log": (communicators.Run, "_open_csv"),
    }[failure]
    monkeypatch.setattr(owner, name, fail)
    if failure == "login":
        line = refusal(resume, folder, "--track", code=1)
        assert line == "--track: Weights & Biases cannot be used: no connection"
    else:
        with pytest.raises(SystemExit, match="no connection"):  # and more
            resume(folder, "--track")
    after = contents_of(folder)
    assert {path: after[path] for path in before} == before
    assert not config_of(folder)["track"]


def contents_of(folder):
    """The content of each file in a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("length", [128, 129])
def test_names_above_the_limit_of_wandb_are_cut_and_stay_different(length, monkeypatch):
    received = []
    wandb = SimpleNamespace(init=lambda **options: received.append(options))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    names = ["x" * (length - 1) + end for end in "12"]
    for name in names:
        run = SimpleNamespace(name=name, args=toy.Args(), settings={"seed": 1})
        communicators.Run._open_wandb(run)
    assert [options["config"] for options in received] == [{"seed": 1}] * 2
    used = [options["id"] for options in received]
    assert used == [options["name"] for options in received]
    assert [len(name) for name in used] == [128, 128] and used[0] != used[1]
    assert (used == names) == (length == 128)


# --- evaluations ---


def test_seeds_of_different_keys_differ():
    """Whatever the order of the numbers; they have 31 bits."""
    keys = list(itertools.product(range(1, 6), repeat=3))
    seeds = [communicators.derive_seed(*key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert 2**30 < max(seeds) < 2**31


@pytest.mark.parametrize(
    ("samples", "quantile"),
    [(2, 12.7062), (3, 4.3027), (5, 2.7764), (10, 2.2622), (31, 2.0423), (100, 1.9842)],
)
def test_intervals_have_the_quantiles_of_students_t(samples, quantile):
    """Those of printed tables, of one degree of freedom less than samples."""
    values = np.arange(samples)
    expected = quantile * values.std(ddof=1) / math.sqrt(samples)
    _, half = communicators.mean_and_half_interval(values)
    assert half == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("infinity", [math.inf, -math.inf])
def test_infinite_returns_have_no_interval_and_no_warning(infinity):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mean, half = communicators.mean_and_half_interval([1.0, infinity])
        assert (mean, math.isnan(half)) == (infinity, True)
        results = communicators.mean_and_half_interval([math.inf, -math.inf])
        assert np.isnan(results).all()


@pytest.mark.parametrize(
    ("values", "mean", "half"),
    [
        ([1.0, 2.0, 6.0], 3.0, stats.t.ppf(0.975, 2) * 7**0.5 / 3**0.5),
        # The standard deviation is 3 / sqrt(2)
        ([1.0, math.nan, 4.0], 2.5, stats.t.ppf(0.975, 1) * 1.5),
        ([5.0], 5.0, math.nan),
        ([math.nan], math.nan, math.nan),
    ],
)
def test_interval_of_an_evaluation(values, mean, half, tmp_path, monkeypatch):
    """Half of Student's 95 % interval over the games that have a value; a single game has none."""
    log = communicators.Run.log_evaluation
    given = [{"line": {"return": np.array(values)}}] * 3
    monkeypatch.setattr(communicators.Run, "log_evaluation", lambda self, results: log(self, given))
    summary = toy.main(args_of(tmp_path, "--iterations", "2"))
    expected = {"mean": pytest.approx(mean, nan_ok=True), "ci95": pytest.approx(half, nan_ok=True)}
    logged = [
        {name: math.nan if x is None else x for name, x in tasks["line"].items()}
        for tasks in evaluations_in(summary)
    ]
    assert logged == [expected] * 3


def test_ranks_wait_for_each_other_before_they_exchange_an_evaluation(tmp_path, monkeypatch):
    """However long it took the others: the exchange itself has a time-out."""
    events = []
    logged = []
    gather = communicators.Exchange.all_gather
    log = communicators.Run.log_evaluation

    def note_gather(self, local):
        events.append("gather")
        return gather(self, local)

    def note_log(self, results):
        events.clear()
        log(self, results)
        logged.append(list(events))

    monkeypatch.setattr(communicators.Exchange, "wait_for_all", lambda self: events.append("wait"))
    monkeypatch.setattr(communicators.Exchange, "all_gather", note_gather)
    monkeypatch.setattr(communicators.Run, "log_evaluation", note_log)
    toy.main(args_of(tmp_path))
    assert logged == [["wait", "gather"]] * 3


def evaluations_in(summary):
    """Of every agent, task -> mean and interval."""
    return summary["evaluation"]["agents"]


def test_phases_end_when_the_gpu_has_finished(monkeypatch):
    """Kernels are only launched: without waiting for them a phase would pay for the one before
    it.
    """
    events = []
    monkeypatch.setattr(torch.cuda, "synchronize", events.append)
    monkeypatch.setattr(time, "perf_counter", lambda: events.append("clock") or 5.0)
    for device, expected in (("cuda:1", [torch.device("cuda:1"), "clock"]), ("cpu", ["clock"])):
        exchange = SimpleNamespace(device=torch.device(device))
        run = SimpleNamespace(exchange=exchange, clock=Counter({"update": 1.0}), _tock=2.0)
        events.clear()
        communicators.Run.tick(run, "update")
        assert events == expected and run.clock == {"update": 4.0} and run._tock == 5.0


# --- signals and ranks ---

OF_SLURM = [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1]


def test_a_signal_is_answered_at_once_and_once(tmp_path, capfd):
    """Before the iteration has ended, and however many signals follow, as under torchrun, which
    passes SIGTERM on.
    """
    output = []

    def interrupt(iteration):
        if iteration == 3:
            os.kill(os.getpid(), signal.SIGINT)
            output.append(capfd.readouterr().err)
            assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL  # again to end at once
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as end:
        toy.main(args_of(tmp_path), at=interrupt)
    assert end.value.code == 128 + signal.SIGINT  # the first one's
    assert output == [
        "\nfinishing this iteration, then a checkpoint; Ctrl-C again to end at once\n"
    ]
    assert "finishing" not in capfd.readouterr().err


@pytest.mark.parametrize("number", OF_SLURM)
def test_a_signal_that_comes_twice_at_once_is_one_request(number, tmp_path, capfd, monkeypatch):
    """Slurm sends it to every process, and torchrun passes its own on: the checkpoint is written.

    Later it ends the process, as a second Ctrl-C does.
    """
    killed = []

    def interrupt(iteration):
        if iteration == 3:
            for _ in range(3):
                os.kill(os.getpid(), number)
            monkeypatch.setattr(communicators, "SAME_REQUEST", -1.0)
            kill = os.kill
            monkeypatch.setattr(os, "kill", lambda *arguments: killed.append(arguments))
            kill(os.getpid(), number)
            assert signal.getsignal(number) == signal.SIG_DFL

    with pytest.raises(SystemExit) as end:
        toy.main(args_of(tmp_path), at=interrupt)
    assert end.value.code == 128 + number
    assert files_of(only_run(tmp_path)) == [[2, 3]] * 3
    assert capfd.readouterr().err.count("finishing this iteration") == 1
    assert killed == [(os.getpid(), number)]


@pytest.mark.parametrize("number", OF_SLURM)
def test_after_another_signal_ctrl_c_ends_a_run_when_it_comes_twice(number, tmp_path, capfd):
    """As the line says: the first may be torchrun's."""

    def interrupt(iteration):
        if iteration == 3:
            os.kill(os.getpid(), number)
            assert "; Ctrl-C twice to end at once\n" in capfd.readouterr().err
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL

    with pytest.raises(SystemExit):
        toy.main(args_of(tmp_path), at=interrupt)


def test_nohup_is_respected(tmp_path, monkeypatch):
    """A run started with it goes on when its terminal is closed."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        at = functools.partial(lambda number, _: os.kill(os.getpid(), number), signal.SIGHUP)
        assert toy.main(args_of(tmp_path), at=at)["completed"]
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_run_that_starts_anew_forgets_what_was_saved_before(whole, tmp_path):
    """Killed during the first save: a checkpoint of one agent would count among its last two."""
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    for agent in range(3):
        for path in folder.glob(f"checkpoints/agent_{agent}/*.pt"):
            path.unlink()
    stale = folder / "checkpoints" / "agent_0" / "32.pt"
    shutil.copy(next(whole.glob("checkpoints/agent_0/*.pt")), stale)
    resume(folder)
    assert files_of(folder) == files_of(whole)


def test_a_run_is_resumed_from_its_own_folder(whole, tmp_path, monkeypatch):
    """Its name, by which W&B and servers know it, is not empty."""
    folder = Path(shutil.copytree(whole, tmp_path / whole.name))
    monkeypatch.chdir(folder)
    assert resume(".", "--iterations", 6)["run"] == folder.name


def test_a_signal_during_the_last_evaluation_says_so(tmp_path, capfd, monkeypatch):
    finish = communicators.Run.finish

    def interrupt(self):
        os.kill(os.getpid(), signal.SIGINT)
        return finish(self)

    monkeypatch.setattr(communicators.Run, "finish", interrupt)
    handlers = [signal.getsignal(number) for number in communicators.SIGNALS]
    assert toy.main(args_of(tmp_path))["completed"]
    assert [signal.getsignal(number) for number in communicators.SIGNALS] == handlers
    assert "\nfinishing the evaluation; Ctrl-C again to end at once\n" in capfd.readouterr().err


@pytest.mark.parametrize("method", ["log_evaluation", "save"])
def test_a_signal_behind_the_log_costs_no_other_iteration(
    method, whole, tmp_path, capsys, monkeypatch
):
    """During an evaluation, after which a checkpoint is written, or during that checkpoint."""
    original = getattr(communicators.Run, method)

    def interrupt(self, *arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *arguments)

    monkeypatch.setattr(communicators.Run, method, interrupt)
    with pytest.raises(SystemExit) as end:
        toy.main(args_of(tmp_path))
    assert end.value.code == 128 + signal.SIGTERM
    assert "interrupted after iteration 2 of 6" in capsys.readouterr().out
    monkeypatch.undo()
    folder = only_run(tmp_path)
    assert files_of(folder) == [[2]] * 3
    resume(folder)
    assert_same(folder, whole)


def test_a_signal_that_comes_again_at_the_end_costs_no_summary(tmp_path, monkeypatch):
    """torchrun passes on what Slurm has sent to all."""
    summarize = communicators.Run._summarize

    def interrupt(self):
        os.kill(os.getpid(), signal.SIGTERM)
        return summarize(self)

    def interrupt_first(iteration):
        if iteration == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(communicators.Run, "_summarize", interrupt)
    with pytest.raises(SystemExit) as end:
        toy.main(args_of(tmp_path), at=interrupt_first)
    assert end.value.code == 128 + signal.SIGTERM
    assert (only_run(tmp_path) / "summary.json").exists()


def test_an_error_of_the_disk_is_no_damage(whole, tmp_path, monkeypatch):
    """Or it would cost every agent its newest checkpoint."""
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    saved = files_of(folder)
    read_bytes = Path.read_bytes

    def read_or_fail(path):
        if path.suffix == ".pt":
            raise OSError(errno.ESTALE, "Stale file handle")
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", read_or_fail)
    assert "Stale file handle" in refusal(lambda: resume(folder), code=1)
    assert files_of(folder) == saved


@pytest.mark.parametrize("number", OF_SLURM)
def test_a_signal_ends_the_run_after_its_iteration(number, whole, tmp_path, capsys):
    """With a checkpoint, a summary and the signal's exit code; the resumed run is the whole one."""
    with pytest.raises(SystemExit) as end:
        toy.main(
            args_of(tmp_path),
            at=lambda iteration: os.kill(os.getpid(), number) if iteration == 3 else None,
        )
    assert end.value.code == 128 + number
    folder = only_run(tmp_path)
    assert (
        f"interrupted after iteration 3 of 6; go on with --resume {folder}"
        in capsys.readouterr().out
    )
    assert files_of(folder) == [[2, 3]] * 3 and not summary_of(folder)["completed"]
    resume(folder)
    assert_same(folder, whole)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "1"}, "RANK=1 must be a whole number below WORLD_SIZE="),
        ({"RANK": "0", "WORLD_SIZE": "x"}, "RANK=0 must be a whole number below WORLD_SIZE=x"),
        ({"RANK": "1", "WORLD_SIZE": "1"}, "RANK=1 must be a whole number below WORLD_SIZE=1"),
        ({"RANK": "x", "WORLD_SIZE": "1"}, "RANK=x must be a whole number below WORLD_SIZE=1"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK=0 must be a whole number below WORLD_SIZE=0"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "MASTER_ADDR= and MASTER_PORT= are no address"),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "::1", "MASTER_PORT": "x"},
            "MASTER_ADDR=::1 and MASTER_PORT=x are no address",
        ),
    ],
    ids=str,
)
def test_half_of_torchruns_variables_is_refused_in_one_line(
    variables, words, tmp_path, monkeypatch
):
    """Before a folder is made."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    message = refusal(lambda: toy.main(args_of(tmp_path)))
    assert words in message
    assert message.endswith(": start with torchrun, or unset RANK")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("other", [["--seed", "2"], ["--eval-every", "3"], ["--exp-name", "x"]])
def test_ranks_with_other_settings_are_refused(other, tmp_path):
    """Before there is a folder: rank 0's config.json would not be true."""
    port = free_port()
    ranks = []
    for rank in range(2):
        argv = "--num-agents", "2", "--run-dir", tmp_path / "runs", *(other if rank else [])
        ranks.append(Child(TOY, *argv, cwd=tmp_path, **place_in_group(2, rank, port)))
    results = outcomes(ranks)
    assert [code for _, code in results] == [1, 1]
    assert "ranks 1 differ from rank 0 in settings" in results[0][0][1] and results[1][0][1] == ""
    assert not (tmp_path / "runs").exists()


def test_ranks_compare_settings_code_and_torch(tmp_path, monkeypatch):
    """But not where each of them runs."""

    def digest(**settings):
        numbers = []
        exchange = SimpleNamespace(find_different_ranks=lambda number: numbers.append(number) or [])
        communicators.Run._compare_ranks(
            SimpleNamespace(args=toy.Args(**settings), exchange=exchange)
        )
        return numbers[0]

    first = digest()
    assert digest(device="cpu", run_dir="other", resume="run") == first
    others = [digest(seed=2), digest(exp_name="other"), digest(timeout=5.0)]
    # The same path may hold another matrix on another machine
    others.append(digest(communicator_matrix="1 0; 0 1"))
    other_code = tmp_path / "code.py"
    other_code.write_text("other")
    for owner, name, value in (
        (torch, "__version__", "0.0"),
        (communicators, "__file__", str(other_code)),
        (communicators, "find_script", lambda args: other_code),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            others.append(digest())
    # Of fedavg_ppo.py the loop is in a module that it imports
    imported = tmp_path / "imported.py"
    monkeypatch.setitem(sys.modules, "imported", SimpleNamespace(__file__=str(imported)))
    monkeypatch.setattr(communicators, "find_script", lambda args: other_code)
    for text in ("a = 1", "a = 2"):
        imported.write_text(text)
        others.append(digest())
    assert len({first, *others}) == 10


def test_a_rank_that_ends_early_leaves_its_group(tmp_path):
    """Whatever ends it: a process that goes down while gloo's threads still hold a result is
    sometimes aborted.
    """
    program = (
        "import atexit, sys, torch.distributed as dist\n"
        "from communicators import Exchange\n"
        # What is registered first runs last
        "atexit.register(lambda: print('left', not dist.is_initialized()))\n"
        "Exchange(1)\n"
        "sys.exit('a line')\n"
    )
    command = [sys.executable, "-c", program]
    place = environment(**place_in_group(1, 0, free_port()))
    ended = subprocess.run(
        command, env=place, cwd=Path(communicators.__file__).parent, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "left True\n", "a line\n")


@pytest.mark.parametrize("name", ["none", "mine"])
def test_torchruns_without_an_id_are_told_apart(name, tmp_path, monkeypatch):
    """All of them are called none: the process that starts the ranks is named, too."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
    toy.main(args_of(tmp_path))
    config = config_of(only_run(tmp_path))
    assert config["elastic_run"] == (f"none {os.getppid()}" if name == "none" else name)


def test_torchrun_recognises_its_own_run_after_a_restart(tmp_path):
    """Beside a newer run with the same settings that another torchrun made."""
    once = tmp_path / "died"
    program = tmp_path / "dying.py"
    program.write_text(
        "import os, shutil, sys, pathlib, toy, communicators, json\n"
        f"once = pathlib.Path({str(once)!r})\n"
        "def die(iteration):\n"
        "    if iteration == 5 and os.environ['RANK'] == '0' and not once.exists():\n"
        "        own = next(pathlib.Path('runs').iterdir())\n"
        "        prefix, _, stamp = own.name.rpartition('__')\n"
        "        other = shutil.copytree(own, own.with_name(f'{prefix}__{int(stamp) + 5}'))\n"
        "        file = other / 'config.json'\n"
        "        config = json.loads(file.read_text()) | {'elastic_run': 'another'}\n"
        "        file.write_text(json.dumps(config, indent=2))\n"
        "        once.touch()\n"
        "        os._exit(1)\n"
        "toy.main(communicators.parse_args(toy.Args, toy.check_args), at=die)\n"
    )
    flags = ["--num-agents", 2, "--run-dir", "runs"]
    path = os.pathsep.join([str(TOY.parent), environment()["PYTHONPATH"]])
    run = torchrun(1, program, *flags, options=("--max-restarts", 1), cwd=tmp_path, PYTHONPATH=path)
    assert run.returncode == 0, run.stderr
    assert "resuming after iteration 4 of 6" in run.stdout
    folder, other = sorted((tmp_path / "runs").iterdir())
    assert (folder / "summary.json").exists() and not (other / "summary.json").exists()
    assert [row["iteration"] for row in table_of(folder, "metrics")] == [
        str(k) for k in range(1, 7) for _ in range(2)
    ]
