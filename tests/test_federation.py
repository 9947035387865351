"""Agents of independent processes that share a folder: files, rounds, whole runs, bad stores."""

import contextlib
import json
import math
import os
import struct
import time
from pathlib import Path
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest
import test_llm
import torch
from command import parse_args
from fsspec.implementations.local import LocalFileSystem
from helpers import (
    FEDAVG_MINIGRID,
    PRPO_ATARI,
    PRPO_MINIGRID,
    PRTRPO_MINIGRID,
    REPOSITORY,
    Child,
    assert_same_rows,
    copy_config,
    flags,
    on,
    only_run,
    outcomes,
    refusal,
    rows_of,
    scalars_of,
    tiny,
    weights_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from test_llm import files  # noqa: F401

import communicators
from communicators import FolderExchange, Rejected, Store, decode_snapshot, encode_snapshot

ABOUT = {"federation": "prpo", "agent": "1", "round": "7"}
PARAMETERS = torch.arange(6.0) / 7
FILE = encode_snapshot(PARAMETERS, ABOUT | {"report": "0.25"})
ONE_FILE = st.sampled_from([FILE, encode_snapshot(torch.full((6,), -1e30), ABOUT)])


def is_rejected(data, expected=ABOUT, numel=6):
    """Whether a file is refused, with one line and without another exception."""
    try:
        decode_snapshot(data, expected, numel)
    except Rejected as reason:
        assert str(reason) and "\n" not in str(reason)
        return True
    return False


# Files


def test_a_file_holds_what_was_sent():
    parameters, about = decode_snapshot(FILE, ABOUT, 6)
    assert torch.equal(parameters, PARAMETERS)
    assert about == {"format": "prpo-snapshot-1", **ABOUT, "report": "0.25"}


@given(st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_random_bytes_are_rejected(data):
    assert is_rejected(data)
    assert is_rejected(FILE[:8] + data)
    assert is_rejected(struct.pack("<Q", len(data)) + data + bytes(24))


@given(ONE_FILE, st.data())
@settings(max_examples=200, deadline=None)
def test_damaged_files_are_rejected(whole, data):
    assert is_rejected(whole[: data.draw(st.integers(0, len(whole) - 1))])
    damaged = bytearray(whole)
    damaged[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert is_rejected(bytes(damaged))
    assert is_rejected(whole + data.draw(st.binary(min_size=1, max_size=9)))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
LAYOUT = {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]}


@given(
    JSON
    | st.fixed_dictionaries({"__metadata__": JSON, "parameters": JSON | st.just(LAYOUT)})
    | st.fixed_dictionaries(
        {
            "__metadata__": st.fixed_dictionaries({name: JSON for name in (*ABOUT, "format")}),
            "parameters": st.just(LAYOUT),
        }
    )
)
@settings(max_examples=200, deadline=None)
def test_any_header_ends_in_a_rejection(header):
    text = json.dumps(header).encode()
    assert is_rejected(struct.pack("<Q", len(text)) + text + bytes(24))


def test_what_is_not_expected_is_rejected():
    for name, value in (("federation", "other"), ("agent", "2"), ("round", "8")):
        assert is_rejected(FILE, ABOUT | {name: value})
    assert is_rejected(FILE, numel=5)
    assert is_rejected(FILE, numel=7)
    for value in (math.nan, math.inf):
        assert is_rejected(encode_snapshot(torch.tensor([1.0, value]), ABOUT), numel=2)
    # Tensors of another kind, whose sizes in bytes are right
    for tensors in (
        {"parameters": PARAMETERS.view(2, 3)},
        {"other": PARAMETERS},
        {"parameters": PARAMETERS.int()},
        {"parameters": PARAMETERS[:3], "more": PARAMETERS[3:]},
    ):
        assert is_rejected(save(tensors, ABOUT | {"format": "prpo-snapshot-1"}))
    # Nested too deeply for a parser, and a header as large as the machine
    deep = b"[" * 4000
    assert is_rejected(struct.pack("<Q", len(deep)) + deep + bytes(24))
    assert is_rejected(struct.pack("<Q", 2**63) + FILE[8:])


# A store that fails


class Flaky(LocalFileSystem):
    """Local files; of all requests every third fails, or all while `gone`."""

    protocol = "flaky"
    cachable = False
    requests = 0
    gone = False

    def _fail(self):
        Flaky.requests += 1
        if Flaky.gone or Flaky.requests % 3 == 0:
            raise RuntimeError("no answer")  # drivers have errors of their own

    def ls(self, path, detail=False, **kwargs):
        self._fail()
        return super().ls(path, detail=detail, **kwargs)

    def cat_file(self, path, start=None, end=None, **kwargs):
        self._fail()
        return super().cat_file(path, start, end, **kwargs)

    def pipe_file(self, path, value, **kwargs):
        self._fail()
        return super().pipe_file(path, value, **kwargs)

    def mv(self, path1, path2, **kwargs):
        self._fail()
        return super().mv(path1, path2, **kwargs)


@pytest.fixture
def flaky(tmp_path, monkeypatch):
    """The URL of a store that fails."""
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    monkeypatch.setattr(Flaky, "requests", 0)
    monkeypatch.setattr(Flaky, "gone", False)
    monkeypatch.setattr(Store, "delays", (0.0, 0.0, 0.0))
    return f"flaky://{tmp_path}"


def test_a_request_that_fails_is_repeated(flaky, capsys):
    store = Store(flaky)
    for number in range(20):
        store.write("a/file", bytes([number]))
        assert store.list("a") == ["file"]
        assert store.read("a/file", 10) == bytes([number])
    assert Flaky.requests > 60
    assert capsys.readouterr().out == ""
    assert store.list("b") == []
    assert store.read("a/other", 10) is None
    store.delete("a/other")


def test_a_store_that_is_gone_is_reported_once(flaky, capsys):
    store = Store(flaky)
    Flaky.gone = True
    for tries in (4, 2, 2):  # repeated once while it is gone: rounds must go on
        before = Flaky.requests
        with pytest.raises(OSError):
            store.list("a")
        assert Flaky.requests == before + tries
    assert capsys.readouterr().out.count("cannot be read (no answer)") == 1
    Flaky.gone = False
    Flaky.requests = 0
    assert store.list("a") == []
    assert store.list("a") == []
    assert capsys.readouterr().out.count("can be read again") == 1


def test_a_file_appears_as_a_whole(tmp_path, monkeypatch):
    """Where there are renames, nothing stands under its name before it is complete."""
    store = Store(f"file://{tmp_path}")
    store.write("a/file", b"old")

    def write_half(path, value, **kwargs):
        Path(path).write_bytes(value[: len(value) // 2])
        raise OSError("disk full")

    monkeypatch.setattr(store.fs, "pipe_file", write_half)
    monkeypatch.setattr(Store, "delays", ())
    with pytest.raises(OSError):
        store.write("a/file", b"new and longer")
    assert store.read("a/file", 20) == b"old"
    assert store.read("a/file", 2) == b"ol"


# Rounds


def join(tmp_path, agents, **changes):
    """The exchange of a process of three agents."""
    options = {
        "num_agents": 3,
        "device": "cpu",
        "timeout": 0.3,
        "agents": agents,
        "exchange": str(tmp_path),
        "federation": "prpo",
        "wait": 0.0,
        "max_age": 2,
        "identity": "",
        "trust": "",
        "aggregation": "policy",
        "communicator": "reward",
        "save_every": 4,
        "local_updates": 2,
    }
    return FolderExchange(SimpleNamespace(**options | changes))


def go(exchange, value, number=0.0, numel=4, agents=3):
    """A round in which the agents of a process send parameters of this value."""
    held = len(exchange.agents)
    local = torch.full((held, numel), float(value))
    numbers = torch.full((held,), float(number), dtype=torch.float64)
    reported = exchange.report(numbers, local)
    present = exchange.find_participants()
    listeners = torch.ones(agents, agents, dtype=torch.bool)
    parameters, usable = exchange.gather_snapshots(local, listeners)
    assert torch.equal(usable, present)
    return parameters[:, 0].tolist(), usable.tolist(), reported.tolist()


def ages(exchange):
    """The ages of the peers' snapshots, by the log."""
    described = exchange.describe()
    return [described[f"communication/age_{j}"] for j in exchange.peers]


def test_peers_come_late_slowly_and_go(tmp_path, capsys):
    """Agent 0 has a round at every step, agent 1 at every third, agent 2 from the fifth to the
    seventh.
    """
    fast, slow, late = (join(tmp_path, (i,)) for i in range(3))
    seen = []
    for step in range(12):
        if step % 3 == 1:
            go(slow, 100 + step, number=step)
        if 5 <= step < 8:
            parameters, usable, _ = go(late, 200 + step, number=-step)
            assert usable == [True] * 3
            assert parameters[:2] == [step - 1, 100 + (step - 1) // 3 * 3 + 1]
        parameters, usable, reported = go(fast, step, number=step)
        assert (parameters[0], usable[0], reported[0]) == (step, True, step)
        seen.append((parameters[1:], usable[1:], ages(fast)))
        last = (step - 1) // 3 * 3 + 1
        if step >= 1:
            assert (parameters[1], reported[1], ages(fast)[0]) == (100 + last, last, step - last)
        if step >= 5:
            last = min(step, 7)
            assert ages(fast)[1] == step - last
            assert usable[2] == (step - last <= 2)  # --max-age
            assert parameters[2] == (200 + last if usable[2] else 0.0)
    assert seen[0][:2] == ([0.0, 0.0], [False, False])
    assert np.isnan(seen[0][2]).all()
    assert capsys.readouterr().out == ""
    kept = sorted(path.name for path in (tmp_path / "prpo" / "agent_0").iterdir())
    assert kept == [f"round_{number:08}.safetensors" for number in (10, 11, 12)]
    size = (tmp_path / "prpo" / "agent_0" / kept[0]).stat().st_size
    assert 12 * (size - 8) <= fast.bytes_sent <= 12 * size
    late.close()


def test_only_what_the_communicator_needs_is_reported(tmp_path):
    for communicator, expected in (("reward", 0.5), ("uniform", math.nan)):
        folder = tmp_path / communicator
        go(join(folder, (0,), communicator=communicator), 1, number=0.5)
        _, _, reported = go(join(folder, (1,), communicator=communicator), 1)
        assert reported[0] == pytest.approx(expected, nan_ok=True)
    text = (tmp_path / "uniform/prpo/agent_0/round_00000001.safetensors").read_bytes()
    header = json.loads(text[8 : 8 + int.from_bytes(text[:8], "little")])
    assert header["__metadata__"].keys() == {*ABOUT, "format", "report", "digest"}
    assert len(text) - len(json.dumps(header)) < 40  # numbers, and nothing else


def test_bad_files_are_ignored_and_counted(tmp_path, capsys):
    """Each bad file costs one line; the snapshot before it is used until it is too old."""
    reader = join(tmp_path, (0,), max_age=99)
    writer = join(tmp_path, (1,))
    folder = tmp_path / "prpo" / "agent_1"
    go(writer, 5)
    go(reader, 0)
    whole = (folder / "round_00000001.safetensors").read_bytes()
    other = {"federation": "other", "agent": "1", "round": "4", "report": "0.0"}
    bad = [
        whole[: len(whole) // 2],
        whole,  # replayed as a later round
        encode_snapshot(torch.ones(4), other),
        encode_snapshot(torch.ones(7), other | {"federation": "prpo", "round": "5"}),
        encode_snapshot(torch.tensor([1, 1, 1, math.nan]), other | {"federation": "prpo"}),
        bytes(10**6),
        encode_snapshot(torch.ones(4), {"federation": "prpo", "agent": "1", "round": "8"}),
        b"",
    ]
    for number, data in enumerate(bad, 2):
        (folder / f"round_{number:08}.safetensors").write_bytes(data)
        for _ in range(1 + number % 2):
            parameters, usable, _ = go(reader, 0)
        assert (parameters[1], usable[1]) == (5, True)
        assert reader.describe()["communication/rejected"] == number - 1
    lines = capsys.readouterr().out.strip().splitlines()
    assert len([line for line in lines if line.startswith("ignored ")]) == len(bad)
    assert "\n".join(lines).count("Traceback") == 0
    for name in ("round_9.safetensors", "round_000000012.safetensors", "writing.tmp", "x"):
        (folder / name).write_bytes(whole)
    assert go(reader, 0)[1][1]
    assert reader.describe()["communication/rejected"] == len(bad)
    # Only as much was read as a snapshot may have
    assert reader.describe()["communication/bytes_received"] < 50_000
    # A good one counts again, although newer ones are bad
    good = {"federation": "prpo", "agent": "1", "round": "10", "report": "1.0"}
    (folder / "round_00000010.safetensors").write_bytes(encode_snapshot(torch.ones(4), good))
    (folder / "round_00000011.safetensors").write_bytes(whole)
    assert go(reader, 0)[0][1] == 1
    assert ages(reader)[0] == 0


def test_bad_files_do_not_hide_good_ones(tmp_path, capsys):
    """However many there are, under numbers above all rounds."""
    reader = join(tmp_path, (0,))
    writer = join(tmp_path, (1,))
    go(writer, 1)
    for number in range(9):
        path = tmp_path / "prpo" / "agent_1" / f"round_{90 + number:08}.safetensors"
        path.write_bytes(b"?")
    seen = []
    for value in range(2, 8):
        go(writer, value)
        seen.append(go(reader, 0)[0][1])
    assert seen[-3:] == [5, 6, 7]
    assert capsys.readouterr().out.count("ignored") == 9


def test_a_resume_does_not_need_an_answer_of_the_store(tmp_path, monkeypatch):
    """Where it has no files, or does not answer, rounds are counted from the checkpoint."""

    def fail(path):
        raise communicators.StoreError("no answer")

    exchange = join(tmp_path, (0,))
    exchange.rounds[0] = 2
    exchange.skip_rounds()
    monkeypatch.setattr(exchange.store, "list", fail)
    exchange.skip_rounds()
    assert exchange.rounds.tolist() == [2, 0, 0]


def test_a_signal_ends_the_wait_for_peers(tmp_path, capsys):
    """Of a round of averages, which else lasts --timeout seconds; the run then saves and ends."""
    exchange = join(tmp_path, (0,), timeout=60.0, aggregation="weights")
    polls = iter((False, False, True))
    exchange.interrupted = lambda: next(polls)
    began = time.monotonic()
    go(exchange, 1)
    assert time.monotonic() - began < 30
    assert "round 1 averages without agents 1 2" in capsys.readouterr().out


def test_an_older_round_is_not_read_again(tmp_path):
    reader = join(tmp_path, (0,))
    writer = join(tmp_path, (1,))
    for value in (1, 2, 3):
        go(writer, value)
    assert go(reader, 0)[0][1] == 3
    (tmp_path / "prpo" / "agent_1" / "round_00000003.safetensors").unlink()
    assert go(reader, 0)[0][1] == 3
    assert ages(reader)[0] == 1


def test_agents_of_one_process_are_two_agents(tmp_path):
    pair = join(tmp_path, (0, 1))
    single = join(tmp_path, (2,))
    go(pair, 1, number=0.5)
    parameters, usable, reported = go(single, 2, number=0.75)
    assert (parameters, usable, reported) == ([1, 1, 2], [True] * 3, [0.5, 0.5, 0.75])
    assert go(pair, 3)[:2] == ([3, 3, 2], [True] * 3)
    assert pair.peers == [2]


def test_a_run_goes_on_while_its_store_is_gone(flaky, capsys):
    reader, writer = (join(flaky, (i,), max_age=3) for i in (0, 1))
    go(writer, 1)
    assert go(reader, 0)[0][1] == 1
    Flaky.gone = True
    for number in range(5):
        go(writer, 10 + number)
        assert go(reader, 0)[1] == [True, number < 3, False]
    Flaky.gone = False
    for value in range(7, 11):  # every third request still fails
        go(writer, value)
        parameters, _, _ = go(reader, 0)
    assert parameters[:2] == [0, 10]
    output = capsys.readouterr().out
    assert output.count("cannot be written") == output.count("can be written again") == 2
    assert output.count("cannot be read") == output.count("can be read again") == 2


def test_every_third_request_fails_and_no_round_is_lost(flaky, capsys):
    exchanges = [join(flaky, (i,)) for i in range(3)]
    for value in range(12):
        results = [go(exchange, 10 * i + value) for i, exchange in enumerate(exchanges)]
        assert results[2][:2] == ([value, 10 + value, 20 + value], [True] * 3)
    assert capsys.readouterr().out == ""


def test_a_checkpoint_keeps_rounds_and_ages(tmp_path):
    """After a resume the snapshot that was read last is read again, as old as it was."""
    reader = join(tmp_path, (0,))
    writer = join(tmp_path, (1,))
    go(writer, 1)
    go(reader, 0)
    go(reader, 0)
    assert ages(reader)[0] == 1
    stored = {name: tensors[0].clone() for name, tensors in reader.state().items()}
    resumed = join(tmp_path, (0,))
    for name, (tensor,) in resumed.state().items():
        tensor.copy_(stored[name])
    assert go(resumed, 0)[0][1] == 1
    assert ages(resumed)[0] == 2
    assert resumed.round == 3
    assert (tmp_path / "prpo" / "agent_0" / "round_00000003.safetensors").exists()


@pytest.mark.parametrize(("wait", "skipped"), [(0.0, 2), (0.3, 0)])
def test_rounds_since_the_checkpoint_are_not_sent_as_others(tmp_path, wait, skipped):
    """An agent that does not wait may have other snapshots after a resume: they are new rounds, and
    what it holds of others gets no older. One that waits sends the same again.
    """
    more = skipped > 0
    reader = join(tmp_path, (0,), wait=wait)
    writer = join(tmp_path, (1,))
    go(writer, 1)
    go(reader, 0)
    go(reader, 0)
    stored = {name: tensors[0].clone() for name, tensors in reader.state().items()}
    go(reader, 0)
    go(reader, 0)
    for _ in range(2):  # killed twice behind the same checkpoint
        resumed = join(tmp_path, (0,), wait=wait)
        for name, (tensor,) in resumed.state().items():
            tensor.copy_(stored[name])
        resumed.skip_rounds()
        assert resumed.round == 2 + skipped
        assert go(resumed, 0)[0][1] == 1
        assert ages(resumed)[0] == 2
        skipped += more
    newest = max((tmp_path / "prpo" / "agent_0").iterdir())
    assert newest.name == f"round_{6 if more else 4:08}.safetensors"


def test_averages_take_new_snapshots_only(tmp_path, capsys):
    """They wait for --timeout, then go on without the peers that sent nothing new."""
    options = {"aggregation": "weights", "timeout": 0.2}
    first, second = (join(tmp_path, (i,), **options) for i in (0, 1))
    assert go(first, 1)[1] == [True, False, False]
    assert go(second, 2)[1] == [True, True, False]
    began = time.monotonic()
    assert go(second, 2)[1] == [False, True, False]
    assert time.monotonic() - began >= 0.2
    assert "averages without agents 0 2" in capsys.readouterr().out


@pytest.mark.parametrize("changes", [{"aggregation": "weights"}, {"wait": 0.1}])
def test_an_agent_that_is_far_behind_uses_what_peers_send_now(tmp_path, changes, capsys):
    """A peer whose round is far above its own counts; what it sent since is read all the same."""
    options = {"num_agents": 2, "timeout": 0.1} | changes
    ahead, behind = (join(tmp_path, (i,), **options) for i in (0, 1))
    ahead.wait = 0
    for value in range(30):
        go(ahead, value, agents=2)
    for value in range(30, 36):
        go(ahead, value, agents=2)
        assert go(behind, 0, agents=2)[0][0] == value
    # One that has finished still counts, and is not waited for
    behind.wait = 60.0
    began = time.monotonic()
    assert go(behind, 0, agents=2)[0][0] == 35
    assert time.monotonic() - began < 30


def test_averages_start_from_the_first_snapshot_of_agent_0(tmp_path):
    networks = [torch.nn.Linear(2, 2) for _ in range(3)]
    others = [torch.nn.Linear(2, 2) for _ in range(3)]
    options = {"aggregation": "weights", "timeout": 0.3}
    with pytest.raises(SystemExit) as end:
        join(tmp_path, (1,), **options).broadcast_networks(others)
    assert "start agent 0" in str(end.value)
    join(tmp_path, (0,), **options).broadcast_networks(networks)
    join(tmp_path, (1,), **options).broadcast_networks(others)
    first = communicators.flatten(networks[:1])
    assert torch.equal(communicators.flatten(others), first.expand(3, -1))
    # Mixtures of policies need no common start
    other = torch.nn.Linear(2, 2)
    before = communicators.flatten([other])
    join(tmp_path, (1,)).broadcast_networks([other])
    assert torch.equal(communicators.flatten([other]), before)


# Whole runs

SHARED = {"wait": 100.0}


def start(script, tmp_path, agents, *more, **changes):
    """A process of a federation in tmp_path/share; its run is in tmp_path/AGENTS."""
    name = "".join(map(str, agents))
    words = flags(script, tmp_path / name, **changes)
    words += ["--exchange", f"file://{tmp_path / 'share'}", "--agents", *map(str, agents), *more]
    return Child(script.__file__, *words, cwd=tmp_path)


def folder_of(tmp_path, agents):
    """The folder of a process's run."""
    return only_run(tmp_path / "".join(map(str, agents)))


def assert_same_training(tmp_path, processes, whole):
    """The agents of these processes end exactly as those of one process; so do their logs."""
    expected = weights_of(whole)
    rows = rows_of(whole)
    for agents in processes:
        folder = folder_of(tmp_path, agents)
        weights = weights_of(folder)
        assert sorted(weights) == list(agents)
        assert all(torch.equal(weights[i], expected[i]) for i in agents)
        own_rows = []
        for row in rows_of(folder):
            for name in [name for name in row if name.startswith("age_")]:
                assert row.pop(name) == ("nan" if int(row["iteration"]) < 3 else "0")
            assert row.pop("rejected") == "0"
            row.pop("bytes_received")
            own_rows.append(row)
        same = [row for row in rows if int(row["agent"]) in agents]
        # The bound on PR-TRPO's updates is that of the agents held
        apart = {"communication_bytes", "bound", "share_within_bound"}
        assert_same_rows(own_rows, same, 0.0, apart)
        assert json.loads((folder / "summary.json").read_text())["completed"]


@pytest.mark.parametrize(
    ("script", "changes", "processes"),
    [
        (PRPO_MINIGRID, {}, [(0,), (1,), (2,)]),
        (PRPO_MINIGRID, {"communicator": "surrogate", "hidden_sizes": "64 128 32"}, [(0, 1), (2,)]),
        (FEDAVG_MINIGRID, {"communicator": "reward"}, [(0,), (1, 2)]),
        pytest.param(
            PRTRPO_MINIGRID,
            {"communicator": "similarity"},
            [(0,), (1, 2)],
            marks=pytest.mark.slow,
        ),
        pytest.param(PRPO_ATARI, {}, [(0,), (1,), (2,)], marks=pytest.mark.slow),
    ],
    ids=lambda value: str(value) if value in (PRPO_ATARI,) else None,
)
def test_processes_that_wait_train_as_one_process(script, changes, processes, tmp_path):
    widths = changes.get("hidden_sizes")
    here = changes | ({"hidden_sizes": tuple(map(int, widths.split()))} if widths else {})
    script.main(tiny(script, tmp_path / "whole", **here))
    more = ("--hidden-sizes", *widths.split()) if widths else ()
    there = {name: value for name, value in changes.items() if name != "hidden_sizes"}
    if script is not FEDAVG_MINIGRID:
        there |= SHARED
    children = [start(script, tmp_path, agents, *more, **there) for agents in processes]
    results = outcomes(children)
    assert [code for _, code in results] == [0] * len(processes), results
    assert_same_training(tmp_path, processes, only_run(tmp_path / "whole"))
    # Rows of C are those of the agents held
    for agents in processes:
        tags = scalars_of(folder_of(tmp_path, agents))
        rows = {tag.split("_")[1] for tag in tags if tag.startswith("communicator/c_")}
        assert rows == set(map(str, agents))


def test_a_killed_agent_goes_on_from_its_checkpoint(tmp_path, whole_run):
    """Killed after the round of iteration 3, before the checkpoint of iteration 4 was complete: it
    goes on from iteration 2, and sends the first round again. The others wait meanwhile.
    """
    words = flags(PRPO_MINIGRID, tmp_path / "1", **SHARED)
    words += ["--exchange", f"file://{tmp_path / 'share'}", "--agent", "1"]
    crash = REPOSITORY / "tests" / "tools" / "crash.py"
    tools = os.pathsep.join((str(REPOSITORY), str(crash.parent)))
    victim = Child(
        crash, "prpo_minigrid", "not in its place", 1, 4, *words, cwd=tmp_path, PYTHONPATH=tools
    )
    others = [start(PRPO_MINIGRID, tmp_path, (i,), **SHARED) for i in (0, 2)]
    ((_, code),) = outcomes([victim])
    assert code == -9
    folder = folder_of(tmp_path, (1,))
    assert [path.name for path in (folder / "checkpoints" / "agent_1").glob("*.pt")] == ["2.pt"]
    again = Child(PRPO_MINIGRID.__file__, "--resume", folder, cwd=tmp_path)
    results = outcomes([again, *others])
    assert [code for _, code in results] == [0, 0, 0], results
    assert "resuming after iteration 2 of 6" in results[0][0][0]
    for i in range(3):
        weights = weights_of(folder_of(tmp_path, (i,)))
        assert torch.equal(weights[i], weights_of(whole_run(PRPO_MINIGRID))[i])


SLOW_AGENT = """
import sys, time
import communicators, prpo_minigrid
seconds = float(sys.argv.pop(1))
honest = prpo_minigrid.rollout
def rollout(*inputs):
    time.sleep(seconds)
    return honest(*inputs)
prpo_minigrid.rollout = rollout
prpo_minigrid.main(communicators.parse_args(prpo_minigrid.Args, prpo_minigrid.check_args))
"""


@pytest.mark.slow
def test_nobody_waits_for_anybody(tmp_path):
    """One agent is killed and resumed, one is five times slower, one comes at half time."""
    (tmp_path / "agent.py").write_text(SLOW_AGENT)
    share = tmp_path / "share"
    changes = {"iterations": 60, "local_updates": 1, "save_every": 4, "max_age": 10}

    def begin(i, seconds, *words):
        words = words or (
            *flags(PRPO_MINIGRID, tmp_path / str(i), **changes),
            *("--exchange", f"file://{share}", "--agent", i),
        )
        return Child(tmp_path / "agent.py", seconds, *words, cwd=tmp_path)

    def wait_for(agent, number):
        deadline = time.monotonic() + 100
        while True:
            names = [path.name for path in (share / "prpo" / f"agent_{agent}").glob("round_*")]
            if names and max(names) >= f"round_{number:08}":
                return
            assert time.monotonic() < deadline
            time.sleep(0.05)

    first = begin(0, 0.2)
    slow = begin(1, 1.0)
    wait_for(0, 10)
    first.send_signal(9)
    first.communicate()
    wait_for(1, 5)
    first = begin(0, 0.2, "--resume", folder_of(tmp_path, (0,)))
    wait_for(0, 30)
    late = begin(2, 0.2)
    results = outcomes([first, slow, late], timeout=300)
    assert [code for _, code in results] == [0, 0, 0], results
    for i in range(3):
        folder = folder_of(tmp_path, (i,))
        assert weights_of(folder)[i].isfinite().all()
        rows = rows_of(folder)
        assert len(rows) == 60 and rows[-1]["rejected"] == "0"
        tags = scalars_of(folder)
        for values in zip(*(tags[f"communicator/c_{i}_{j}"] for j in range(3)), strict=True):
            assert sum(value for _, value in values) == pytest.approx(1)
    rows = rows_of(folder_of(tmp_path, (0,)))
    ages_of_slow = [int(row["age_1"]) for row in rows[20:30]]
    assert max(ages_of_slow) >= 2 and min(ages_of_slow) == 0  # it sends now and then
    assert rows[15]["age_2"] == "nan" and rows[-1]["age_2"] != "nan"
    rows = rows_of(folder_of(tmp_path, (2,)))
    assert rows[0]["age_0"] == rows[0]["age_1"] == "0"  # both were there before
    assert float(rows[-1]["age_0"]) > 10  # ended before, and was dropped
    tags = scalars_of(folder_of(tmp_path, (2,)))
    assert tags["communicator/c_2_0"][-1][1] == 0


# Bad input


def refused(*words, script=PRPO_MINIGRID):
    """The one line on a command line."""
    return refusal(script.parse_args, [*map(str, words)])


def test_an_exchange_that_cannot_be_used_is_refused(tmp_path, monkeypatch):
    url = f"file://{tmp_path}"
    agent = ("--agent", 0)
    assert "--exchange" in refused(*agent)
    assert "needs --exchange" in refused("--wait", 3)
    assert refused("--exchange", url).startswith("--agents : must be the agents of this process")
    for numbers in ((3,), (0, 2), (1, 0), (-1,), (1, 1)):
        assert refused("--exchange", url, "--agents", *numbers).startswith("--agents")
    assert "Protocol not known" in refused("--exchange", "nowhere://x", *agent)
    assert "gcsfs" in refused("--exchange", "gs://bucket/path", *agent)
    (tmp_path / "file").write_text("")
    assert "--exchange" in refused("--exchange", f"{url}/file", *agent)
    for name in ("a/b", "..", "", "ä"):
        assert refused("--exchange", url, *agent, "--federation", name).startswith("--federation")
    assert "isolated" in refused("--exchange", url, *agent, "--communicator", "identity")
    assert "isolated" in refused("--exchange", url, *agent, "--aggregation", "none")
    weights = ("--aggregation", "weights")
    assert "--wait" in refused("--exchange", url, *agent, *weights, "--wait", 1)
    message = refused("--exchange", url, *agent, *weights, "--max-age", 2)
    assert message.startswith("--max-age 2: has no effect on averages")
    for store in ("sftp://me:secret@host/path", "simplecache::sftp://me:secret@host/path"):
        line = refused("--exchange", store, *agent)
        assert "password" in line and "secret" not in line
    assert "is no URL: Invalid IPv6 URL" in refused("--exchange", "s3://[bucket/path", *agent)
    assert "delta" in refused("--exchange", url, *agent, "--delta", 0.1, script=PRTRPO_MINIGRID)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "torchrun" in refused("--exchange", url, *agent)


def test_a_second_agent_of_the_same_number_is_refused(tmp_path):
    words = ("--exchange", tmp_path, "--agent", 0)
    PRPO_MINIGRID.parse_args([*map(str, words)])
    assert not list(tmp_path.rglob("*probe*"))
    go(join(tmp_path, (0,)), 1)
    assert "has files of agent 0 in prpo already: go on with --resume" in refused(*words)
    PRPO_MINIGRID.parse_args([*map(str, words), "--federation", "other"])


@pytest.mark.parametrize(("before", "after", "valid"), [(0, 5, "0"), (5, 0, "positive")])
def test_a_run_that_is_resumed_waits_as_before(whole_run, tmp_path, before, after, valid):
    """Whether rounds are repeated or skipped depends on it; how long it waits may change."""
    words = [f"--exchange=file://{tmp_path}", "--agents=0", f"--wait={before}"]
    copy_config(whole_run(PRPO_MINIGRID), tmp_path, *words)
    resume = ("--resume", tmp_path, "--wait")
    assert refused(*resume, after) == f"--wait {after:.1f}: must be {valid} as in {tmp_path}"
    assert PRPO_MINIGRID.parse_args([*map(str, (*resume, 2 * before))]).wait == 2 * before


def test_a_run_of_one_agent_is_played(tmp_path, capsys):
    """--eval-only knows which agents a run has."""
    words = flags(PRPO_MINIGRID, tmp_path / "runs", iterations=1, local_updates=1)
    words += ["--exchange", str(tmp_path / "share"), "--agent", "1"]
    PRPO_MINIGRID.main(PRPO_MINIGRID.parse_args(words))
    folder = only_run(tmp_path / "runs")
    assert "__agent_1__" in folder.name
    capsys.readouterr()
    args = PRPO_MINIGRID.parse_args(["--eval-only", str(folder), "--eval-episodes", "2"])
    with contextlib.redirect_stderr(None):
        assert len(PRPO_MINIGRID.evaluate_run(args)) == 1
    assert capsys.readouterr().out.splitlines()[-1].split()[0] == "1"


# An object store: optional packages, `pip install s3fs "moto[server]"`


@pytest.fixture
def bucket(monkeypatch):
    """The URL of an empty bucket of moto's S3 server on this machine."""
    moto = pytest.importorskip("moto.server", reason='pip install s3fs "moto[server]"')
    s3fs = pytest.importorskip("s3fs", reason='pip install s3fs "moto[server]"')
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    address, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{address}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    name = f"bucket-{port}"  # buckets outlive a server of this process
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir(name)
    yield f"s3://{name}/prefix"
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def test_rounds_over_s3(bucket):
    """As on a disk: one put per round, the newest of every peer, old files deleted."""
    first = join(bucket, (0,))
    second = join(bucket, (1,))
    for value in range(5):
        go(first, value, number=value)
        parameters, usable, reported = go(second, 10 + value)
        assert parameters == [value, 10 + value, 0]
        assert usable == [True, True, False]
        assert reported[0] == value
    assert not first.store.renames
    assert sorted(first.store.list("prpo/agent_0")) == [
        f"round_{number:08}.safetensors" for number in (3, 4, 5)
    ]
    words = ("--exchange", bucket, "--agent", 0)
    assert "has files of agent 0 in prpo already" in refused(*words)
    PRPO_MINIGRID.parse_args([*map(str, words), "--federation", "other"])
    assert "can be written to" in refused("--exchange", "s3://nobodys/x", "--agent", 0)


def test_processes_share_a_bucket(bucket, tmp_path, whole_run):
    """Three processes that wait for each other end as one process does."""
    children = []
    for i in range(3):
        words = flags(PRPO_MINIGRID, tmp_path / str(i), **SHARED)
        words += ["--exchange", bucket, "--agent", str(i)]
        children.append(Child(PRPO_MINIGRID.__file__, *words, cwd=tmp_path))
    results = outcomes(children)
    assert [code for _, code in results] == [0, 0, 0], results
    assert_same_training(tmp_path, [(0,), (1,), (2,)], whole_run(PRPO_MINIGRID))


# Language models


@pytest.mark.parametrize(
    "changes",
    [
        {"communicator": "relative-gain"},
        pytest.param({"aggregation": "weights"}, marks=pytest.mark.slow),
        pytest.param({"aggregation": "weights", "algorithm": "ppo"}, marks=pytest.mark.slow),
    ],
    ids=["policy", "weights", "weights of value models too"],
)
def test_language_models_train_as_in_one_process(changes, files, tmp_path):  # noqa: F811
    """Also an agent that loses its last checkpoint, and reads its peer's files again."""
    whole, _ = test_llm.train(files, tmp_path / "whole", **changes)
    expected = test_llm.weights_of(whole)
    script = test_llm.prpo_llm.__file__
    children = []
    for i in range(2):
        words = test_llm.flags(test_llm.tiny(files, tmp_path / str(i), **changes))
        words += ["--exchange", str(tmp_path / "share"), "--agent", str(i)]
        if "aggregation" not in changes:
            words += ["--wait", "100"]
        children.append(Child(script, *words, cwd=tmp_path))
    results = outcomes(children)
    assert [code for _, code in results] == [0, 0], results
    for i in range(2):
        (weights,) = test_llm.weights_of(folder_of(tmp_path, (i,)))
        torch.testing.assert_close(weights, expected[i], rtol=0, atol=1e-4)
    folder = folder_of(tmp_path, (1,))
    (folder / "checkpoints" / "agent_1" / "4.pt").unlink()
    again = Child(script, *test_llm.to_resume(folder), cwd=tmp_path)
    (((output, errors), code),) = outcomes([again])
    assert code == 0, errors
    assert "resuming after step 2 of 4" in output
    assert "ignored" not in output  # a peer's file
    (resumed,) = test_llm.weights_of(folder)
    assert torch.equal(resumed, weights)


@on([PRPO_MINIGRID, PRTRPO_MINIGRID])
def test_rounds_before_the_first_checkpoint_are_not_used_anew(script, tmp_path, crashing):
    """Peers may have read them."""
    place = {"exchange": str(tmp_path / "store"), "agents": (0,), "num_agents": 2}
    settings = place | {"local_updates": 1, "save_every": 3, "eval_episodes": 0, "iterations": 4}
    args = tiny(script, tmp_path / "runs", **settings)
    crashing("not in its place", 0, 3, lambda: script.main(args))
    folder = only_run(tmp_path / "runs")
    assert not list(folder.glob("checkpoints/*/*.pt"))
    assert script.main(script.parse_args(["--resume", str(folder)]))["completed"]
    newest = max((tmp_path / "store" / "prpo" / "agent_0").glob("round_*"))
    assert newest.name == f"round_{3 + 4:08}.safetensors"


def test_language_models_use_no_round_anew(files, tmp_path, crashing):  # noqa: F811
    """Of a run that was killed before its first checkpoint."""
    place = {"exchange": str(tmp_path / "store"), "agents": (0,), "eval_prompts": 0}
    script = test_llm.prpo_llm
    args = test_llm.tiny(files, tmp_path / "runs", local_updates=1, save_every=3, **place)
    crashing("not in its place", 0, 3, lambda: script.main(args))
    (folder,) = (tmp_path / "runs").iterdir()
    assert script.main(parse_args(script, test_llm.to_resume(folder)))["completed"]
    newest = max((tmp_path / "store" / "prpo" / "agent_0").glob("round_*"))
    assert newest.name == f"round_{3 + args.total_steps:08}.safetensors"
