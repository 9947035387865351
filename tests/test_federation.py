"""Agents of independent processes that share a folder: files, rounds, whole runs, bad stores."""

import io
import itertools
import json
import math
import os
import struct
import time
from pathlib import Path
from types import SimpleNamespace

import fsspec
import language_models
import numpy as np
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from helpers import (
    FEDAVG_MINIGRID,
    FEDAVG_MUJOCO,
    PRPO_ATARI,
    PRPO_MINIGRID,
    PRPO_MUJOCO,
    PRTRPO_MINIGRID,
    REPOSITORY,
    Child,
    assert_same_rows,
    call,
    config_of,
    copy_config,
    flags,
    on,
    only_run,
    outcomes,
    refusal,
    resume,
    rows_of,
    scalars_of,
    summary_of,
    tiny,
    train,
    weights_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

import communicators
import federate
import prpo_llm
from benchmark import play
from federate import FolderExchange, Rejected, Store, decode_snapshot, encode_snapshot

ON_MUJOCO = [PRPO_MUJOCO, FEDAVG_MUJOCO]
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
@settings(max_examples=200)
def test_random_bytes_are_rejected(data):
    assert is_rejected(data)
    assert is_rejected(FILE[:8] + data)
    assert is_rejected(struct.pack("<Q", len(data)) + data + bytes(24))


@given(ONE_FILE, st.data())
@settings(max_examples=200)
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
@settings(max_examples=200)
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
        assert [*store.list("a")] == ["file"]
        assert store.read("a/file", 10) == bytes([number])
    assert Flaky.requests > 60
    assert capsys.readouterr().out == ""
    assert store.list("b") == {}
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
    assert store.list("a") == {}
    assert store.list("a") == {}
    assert capsys.readouterr().out.count("can be read again") == 1


def test_a_folder_that_cannot_be_read_is_reported_once(flaky, capsys, monkeypatch):
    """Whatever other folders answer meanwhile; the store can be read again when this one can."""
    store = Store(flaky)
    monkeypatch.setattr(Flaky, "_fail", lambda self: None)
    closed = ["a"]

    def list_unless_closed(self, path, **kwargs):
        Flaky.requests += 1
        if path.endswith(tuple(closed)):
            raise PermissionError(path)
        return LocalFileSystem.ls(self, path, **kwargs)

    monkeypatch.setattr(Flaky, "ls", list_unless_closed)
    for tries in (4, 2, 2):
        before = Flaky.requests
        with pytest.raises(OSError):
            store.list("a")
        assert Flaky.requests == before + tries
        assert store.list("b") == {}
    output = capsys.readouterr().out
    assert output.count("cannot be read") == 1 and "again" not in output
    closed.clear()
    assert store.list("a") == {}
    assert store.list("b") == {}
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


def join(place, agents, averages="", resume="", **changes):
    """The exchange of a process of three agents; `changes` are flags of either side."""
    script = {"num_agents": 3, "device": "cpu", "timeout": 0.3, "save_every": 4, "local_updates": 2}
    args = {name: changes.pop(name, value) for name, value in script.items()}
    flags = federate.Args(str(place), agents, **{"max_age": 2} | changes)
    keys = federate.load_keys(flags)
    args = SimpleNamespace(resume=resume, **args)
    return FolderExchange(args, flags, Store(flags.exchange), averages, *keys)


def go(exchange, value, number=0.0, numel=4):
    """A round in which the agents of a process send parameters of this value.

    Returns what it has of all agents: these values, None for those that are missing; and reports.
    """
    sent = [torch.full((numel,), float(value)) for _ in exchange.agents]
    numbers = None
    if number is not None:
        numbers = torch.full((len(sent),), float(number), dtype=torch.float64)
    received, reports = exchange.round(sent, numbers)
    again = exchange.recall(sent)
    for i, tensor in enumerate(received):
        assert (tensor is None) == (again[i] is None)
        assert tensor is None or (torch.equal(tensor, again[i]) and (tensor == tensor[0]).all())
    return [None if tensor is None else tensor[0].item() for tensor in received], reports.tolist()


def restore(exchange, other):
    """What a checkpoint of the one holds becomes the state of the other."""
    file = io.BytesIO()
    for name, objects in exchange.state().items():
        assert len(objects) == len(exchange.agents)
        for source, target in zip(objects, other.state()[name], strict=True):
            torch.save(communicators._to_stored(source), file)
            file.seek(0)
            communicators._restore_in_place(target, torch.load(file, weights_only=True))
            file = io.BytesIO()
    return other


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
            values, _ = go(late, 200 + step, number=-step)
            assert values == [step - 1, 100 + (step - 1) // 3 * 3 + 1, 200 + step]
        values, reports = go(fast, step, number=step)
        assert (values[0], reports[0]) == (step, step)
        seen.append((values[1:], reports[1:], ages(fast)))
        last = (step - 1) // 3 * 3 + 1
        if step >= 1:
            assert (values[1], reports[1], ages(fast)[0]) == (100 + last, last, step - last)
        if step >= 5:
            last = min(step, 7)
            assert ages(fast)[1] == step - last
            if step - last <= 2:  # --max-age
                assert (values[2], reports[2]) == (200 + last, -last)
            else:
                assert values[2] is None and math.isnan(reports[2])
    assert seen[0][0] == [None, None]
    assert np.isnan(seen[0][1:]).all()
    assert capsys.readouterr().out == ""
    kept = sorted(path.name for path in (tmp_path / "prpo" / "agent_0").iterdir())
    assert kept == [f"round_{number:08}.safetensors" for number in (10, 11, 12)]
    size = (tmp_path / "prpo" / "agent_0" / kept[0]).stat().st_size
    assert 12 * (size - 8) <= fast.bytes_sent <= 12 * size
    late.close()


def test_only_what_the_communicator_needs_is_reported(tmp_path):
    """Without reports a file names none."""
    for name, number in (("reward", 0.5), ("uniform", None)):
        go(join(tmp_path / name, (0,)), 1, number)
        _, reports = go(join(tmp_path / name, (1,)), 1, number)
        expected = math.nan if number is None else number
        assert reports == pytest.approx([expected, expected, math.nan], nan_ok=True)
    text = (tmp_path / "uniform/prpo/agent_0/round_00000001.safetensors").read_bytes()
    header = json.loads(text[8 : 8 + int.from_bytes(text[:8], "little")])
    assert header["__metadata__"].keys() == {*ABOUT, "format", "digest"}
    assert len(text) - len(json.dumps(header)) < 40  # numbers, and nothing else


def test_own_parameters_that_are_not_finite_are_dropped(tmp_path, capsys):
    """Here as at their readers."""
    writer, reader = (join(tmp_path, (i,)) for i in (0, 1))
    assert go(writer, math.inf)[0] == [None, None, None]
    assert go(reader, 2)[0] == [None, 2, None]
    assert "not finite" in capsys.readouterr().out


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
        encode_snapshot(torch.ones(4), other | {"federation": "prpo", "round": "8", "report": "?"}),
        b"",
    ]
    for number, data in enumerate(bad, 2):
        (folder / f"round_{number:08}.safetensors").write_bytes(data)
        for _ in range(1 + number % 2):
            values, _ = go(reader, 0)
        assert values[1] == 5
        assert reader.describe()["communication/rejected"] == number - 1
    lines = capsys.readouterr().out.strip().splitlines()
    assert len([line for line in lines if line.startswith("ignored ")]) == len(bad)
    assert "\n".join(lines).count("Traceback") == 0
    for name in ("round_9.safetensors", "round_000000012.safetensors", "writing.tmp", "x"):
        (folder / name).write_bytes(whole)
    assert go(reader, 0)[0][1] == 5
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
    """Where it has no files, or does not answer, rounds are counted from the checkpoint; once it
    answers, from the last file.
    """
    exchange = join(tmp_path, (0,), resume="runs/x")
    assert go(exchange, 1)[0] == [1, None, None]
    assert exchange.number == 1
    go(exchange, 2)
    resumed = join(tmp_path, (0,), resume="runs/x")

    def fail(path):
        raise federate.StoreError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(resumed.store, "list", fail)
        assert go(resumed, 3)[0] == [3, None, None]
    assert resumed.number == 1
    go(resumed, 4)
    assert resumed.number == 3
    go(resumed, 5)
    assert resumed.number == 4


def test_a_signal_ends_the_wait_for_peers(tmp_path, capsys):
    """Of a round of averages, which else lasts --timeout seconds; the run then saves and ends."""
    exchange = join(tmp_path, (0,), "replace", timeout=60.0)
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
    assert go(single, 2, number=0.75) == ([1, 1, 2], [0.5, 0.5, 0.75])
    assert go(pair, 3)[0] == [3, 3, 2]
    assert [*pair.peers] == [2]
    assert (pair.label, single.label) == ("agents_0-1", "agent_2")
    # What is known of peers is in one of the two checkpoints, for both
    resumed = restore(pair, join(tmp_path, (0, 1)))
    first, second = resumed.state()["peers"]
    assert first is resumed and second == []
    assert resumed.recall([torch.ones(4)] * 2)[2].tolist() == [2] * 4


def test_agents_of_different_sizes_send_no_padding(tmp_path):
    pair = join(tmp_path, (0, 1))
    single = join(tmp_path, (2,))
    sizes = [3, 7, 5]
    pair.round([torch.ones(3), torch.ones(7)], None, sizes)
    received, _ = single.round([torch.ones(5)], None, sizes)
    assert list(map(len, received)) == sizes


def test_a_run_goes_on_while_its_store_is_gone(flaky, capsys):
    reader, writer = (join(flaky, (i,), max_age=3) for i in (0, 1))
    go(writer, 1)
    assert go(reader, 0)[0][1] == 1
    Flaky.gone = True
    for number in range(5):
        go(writer, 10 + number)
        assert go(reader, 0)[0] == [0, 1 if number < 3 else None, None]
    Flaky.gone = False
    for value in range(7, 11):  # every third request still fails
        go(writer, value)
        values, _ = go(reader, 0)
    assert values[:2] == [0, 10]
    output = capsys.readouterr().out
    assert output.count("cannot be written") == output.count("can be written again") == 2
    assert output.count("cannot be read") == output.count("can be read again") == 2


def test_every_third_request_fails_and_no_round_is_lost(flaky, capsys):
    exchanges = [join(flaky, (i,)) for i in range(3)]
    for value in range(12):
        results = [go(exchange, 10 * i + value) for i, exchange in enumerate(exchanges)]
        assert results[2][0] == [value, 10 + value, 20 + value]
    assert capsys.readouterr().out == ""


def test_a_checkpoint_keeps_what_is_known_of_peers(tmp_path):
    """After a resume no file of a peer is needed; what was read last is as old as it was."""
    reader = join(tmp_path, (0,))
    writer = join(tmp_path, (1,))
    go(writer, 1, number=0.5)
    go(reader, 0)
    go(reader, 0)
    assert ages(reader)[0] == 1
    described = reader.describe()
    for path in (tmp_path / "prpo" / "agent_1").iterdir():
        path.unlink()
    resumed = restore(reader, join(tmp_path, (0,)))
    recalled = resumed.recall([torch.zeros(4)])
    assert recalled[1].tolist() == [1] * 4 and recalled[2] is None
    assert resumed.describe() | {"communication/bytes": reader.bytes_sent} == pytest.approx(
        described, nan_ok=True
    )
    values, reports = go(resumed, 0)
    assert (values[1], reports[1]) == (1, 0.5)
    assert ages(resumed)[0] == 2
    assert resumed.number == 3
    assert (tmp_path / "prpo" / "agent_0" / "round_00000003.safetensors").exists()


def test_a_recall_is_what_the_round_returned(tmp_path):
    """Also where --max-age has changed since."""
    reader, writer = (join(tmp_path, (i,)) for i in (0, 1))
    go(writer, 1)
    for _ in range(3):
        go(reader, 0)
    resumed = restore(reader, join(tmp_path, (0,), max_age=1))
    assert resumed.recall([torch.zeros(4)])[1].tolist() == [1] * 4
    assert go(resumed, 0)[0][1] is None
    assert restore(resumed, join(tmp_path, (0,))).recall([torch.zeros(4)])[1] is None


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
    saved = restore(reader, join(tmp_path, (0,), wait=wait))
    go(reader, 0)
    go(reader, 0)
    for _ in range(2):  # killed twice behind the same checkpoint
        resumed = restore(saved, join(tmp_path, (0,), wait=wait, resume="runs/x"))
        assert go(resumed, 0)[0][1] == 1
        assert resumed.number == 3 + skipped
        assert ages(resumed)[0] == 2
        skipped += more
    newest = max((tmp_path / "prpo" / "agent_0").iterdir())
    assert newest.name == f"round_{6 if more else 4:08}.safetensors"


def test_a_round_that_others_could_have_written_is_not_counted(tmp_path):
    """A file of that name would silence the agent for as many rounds."""
    writer = join(tmp_path, (0,))
    go(writer, 1)
    (tmp_path / "prpo" / "agent_0" / "round_99999999.safetensors").write_bytes(b"")
    go(writer, 2)
    resumed = restore(writer, join(tmp_path, (0,), resume="runs/x"))
    resumed.number = 1  # of the last checkpoint
    go(resumed, 3)
    assert resumed.number == 3
    assert (resumed.rejected, resumed.bytes_received) == (0, 0)  # files of its own


def test_what_is_no_file_is_not_read(tmp_path):
    """A named pipe would never end, a folder hide the good file below it; links to them, too."""
    reader = join(tmp_path, (0,))
    writer = join(tmp_path, (1,))
    folder = tmp_path / "prpo" / "agent_1"
    go(writer, 5)
    (folder / "round_00000007.safetensors").mkdir()
    (folder / "round_00000008.safetensors").symlink_to(tmp_path)
    if hasattr(os, "mkfifo"):  # not on Windows
        os.mkfifo(folder / "round_00000009.safetensors")
        (folder / "round_00000010.safetensors").symlink_to(folder / "round_00000009.safetensors")
    assert go(reader, 0)[0][1] == 5
    assert (reader.rejected, go(reader, 0)[0][1]) == (0, 5)


def test_a_link_to_a_file_is_read(tmp_path):
    reader = join(tmp_path, (0,))
    writer = join(tmp_path, (1,))
    go(writer, 5)
    path = tmp_path / "prpo" / "agent_1" / "round_00000001.safetensors"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert go(reader, 0)[0][1] == 5


def test_a_file_that_cannot_be_read_hides_no_other(tmp_path, monkeypatch):
    reader = join(tmp_path, (0,))
    writer = join(tmp_path, (1,))
    go(writer, 5)
    go(writer, 6)
    read = Store.read

    def read_or_fail(self, path, limit):
        if path.endswith("2.safetensors"):
            raise federate.StoreError("Permission denied")
        return read(self, path, limit)

    monkeypatch.setattr(Store, "read", read_or_fail)
    assert go(reader, 0)[0][1] == 5


def test_a_file_without_permission_is_ignored_once(tmp_path, monkeypatch, capsys):
    """The store is well: nothing is repeated, and the file before it counts."""
    reader = join(tmp_path, (0,))
    writer = join(tmp_path, (1,))
    go(writer, 5)
    go(writer, 6)
    cat_file = LocalFileSystem.cat_file
    paths = []

    def cat_or_fail(self, path, *args, **kwargs):
        paths.append(path)
        if path.endswith("2.safetensors"):
            raise PermissionError(path)
        return cat_file(self, path, *args, **kwargs)

    monkeypatch.setattr(LocalFileSystem, "cat_file", cat_or_fail)
    for _ in range(2):
        assert go(reader, 0)[0][1] == 5
    assert reader.rejected == 1 and len(paths) == 2
    output = capsys.readouterr().out
    assert output.count("ignored") == 1 and "cannot be read" not in output


def test_rounds_are_skipped_when_the_store_answers(tmp_path, monkeypatch):
    """One request that fails is no reason to write over rounds that peers have read."""
    writer = join(tmp_path, (0,))
    for value in (1, 2, 3):
        go(writer, value)
    resumed = restore(writer, join(tmp_path, (0,), resume="runs/x"))
    resumed.number = 0  # of the last checkpoint
    read = Store.read
    failing = [True]

    def read_or_fail(self, path, limit):
        if failing[0]:
            raise federate.StoreError("no answer")
        return read(self, path, limit)

    monkeypatch.setattr(Store, "read", read_or_fail)
    go(resumed, 4)
    assert resumed.number == 1
    failing.clear()
    failing.append(False)
    go(resumed, 5)
    assert resumed.number == 4


def test_a_file_for_which_an_agent_waits_may_appear_in_parts(tmp_path, capsys):
    reader = join(tmp_path, (0,), wait=30.0)
    data = encode_snapshot(torch.full((4,), 7.0), ABOUT | {"round": "1", "report": "0.5"})
    other = encode_snapshot(torch.full((4,), 8.0), {**ABOUT, "agent": "2", "round": "1"})
    for agent, content in ((1, data[:50]), (2, other)):
        path = tmp_path / "prpo" / f"agent_{agent}" / "round_00000001.safetensors"
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
    polls = itertools.count()
    path = tmp_path / "prpo" / "agent_1" / "round_00000001.safetensors"

    def poll():
        if next(polls) == 2:
            path.write_bytes(data)
        return 0

    reader.interrupted = poll
    assert go(reader, 0)[0] == [0, 7, 8]
    assert reader.rejected == 1
    assert reader.bytes_received == 50 + len(data) + len(other)  # the part was read once
    assert capsys.readouterr().out.count("ignored") == 1


def test_averages_take_new_snapshots_only(tmp_path, capsys):
    """They wait for --timeout, then go on without the peers that sent nothing new."""
    first, second = (join(tmp_path, (i,), "replace", timeout=0.2) for i in (0, 1))
    assert go(first, 1)[0] == [1, None, None]
    assert go(second, 2)[0] == [1, 2, None]
    began = time.monotonic()
    values, reports = go(second, 2)
    assert values == [None, 2, None] and math.isnan(reports[0])
    assert time.monotonic() - began >= 0.2
    assert "averages without agents 0 2" in capsys.readouterr().out


def test_how_long_a_round_waits(tmp_path):
    """By default averages that replace wait for --timeout, and others not at all."""
    waits = [join(tmp_path, (0,), averages).wait for averages in ("", "pull", "replace")]
    assert waits == [0, 0, 0.3]
    for averages in ("", "pull", "replace"):
        for wait in (0.0, 7.0):
            assert join(tmp_path, (0,), averages, wait=wait).wait == wait


@pytest.mark.parametrize(
    ("quorum", "agents", "sent", "enough"),
    [
        (1.0, (0,), 1, False),
        (1.0, (0,), 2, True),
        (0.67, (0,), 1, False),  # ceil(0.67 * 3) = 3
        (0.66, (0,), 1, True),  # ceil(0.66 * 3) = 2
        (0.66, (0,), 0, False),
        (0.66, (0, 1), 0, True),  # those held are among them
        (0.1, (0,), 0, True),
    ],
)
@pytest.mark.parametrize("averages", ["", "replace"])
def test_a_round_waits_for_a_quorum(tmp_path, quorum, agents, sent, enough, averages, capsys):
    """It goes on as soon as so many have sent something new, with those that have."""
    exchange = join(tmp_path, agents, averages, quorum=quorum, wait=60.0)
    polls = []

    def give_up():
        polls.append(None)
        return len(polls) > 1

    exchange.interrupted = give_up
    peers = [*exchange.peers][:sent]
    for j in peers:
        go(join(tmp_path, (j,)), 10 + j)
    values, _ = go(exchange, 1)
    assert (not polls) == enough
    assert values == [1 if i in agents else 10 + i if i in peers else None for i in range(3)]


def test_a_quorum_is_of_what_is_new(tmp_path):
    """A snapshot that was read before does not count, but is used."""
    exchange = join(tmp_path, (0,), quorum=0.5, wait=60.0)
    for i in (1, 2):
        go(join(tmp_path, (i,)), 10 + i)
    assert go(exchange, 1)[0] == [1, 11, 12]
    polls = iter((False, False, True))
    exchange.interrupted = lambda: next(polls)
    assert go(exchange, 2)[0] == [2, 11, 12]
    assert next(polls, None) is None


@pytest.mark.parametrize(("averages", "wait"), [("replace", None), ("", 0.1)])
def test_an_agent_that_is_far_behind_uses_what_peers_send_now(tmp_path, averages, wait, capsys):
    """A peer whose round is far above its own counts; what it sent since is read all the same."""
    options = {"num_agents": 2, "timeout": 0.1, "wait": wait}
    ahead, behind = (join(tmp_path, (i,), averages, **options) for i in (0, 1))
    ahead.wait = 0
    for value in range(30):
        go(ahead, value)
    for value in range(30, 36):
        go(ahead, value)
        assert go(behind, 0)[0][0] == value
    # One that has finished still counts, and is not waited for
    behind.wait = 60.0
    began = time.monotonic()
    assert go(behind, 0)[0][0] == 35
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("averages", ["replace", "pull"])
def test_averages_start_from_the_first_snapshot_of_agent_0(tmp_path, averages):
    networks = [torch.nn.Linear(2, 2) for _ in range(3)]
    others = [torch.nn.Linear(2, 2) for _ in range(3)]
    with pytest.raises(SystemExit) as end:
        join(tmp_path, (1,), averages).broadcast_networks(others)
    assert "start agent 0" in str(end.value)
    first = communicators.flatten(networks[0])
    join(tmp_path, (0,), averages).broadcast_networks(networks)
    join(tmp_path, (1,), averages).broadcast_networks(others)
    for network in networks + others:
        assert torch.equal(communicators.flatten(network), first)
    # Mixtures of policies need no common start
    other = torch.nn.Linear(2, 2)
    before = communicators.flatten(other)
    join(tmp_path, (1,)).broadcast_networks([other])
    assert torch.equal(communicators.flatten(other), before)


# Whole runs

PATIENT = ("--wait", 100)


def words_of(share, agents, *extra):
    """The words of the launcher for a process of a federation, up to the script."""
    return [federate.__file__, "--exchange", share, "--agents", *agents, *extra]


def start(script, tmp_path, agents, *extra, more=(), **changes):
    """A process of a federation in tmp_path/share; its run is in tmp_path/AGENTS."""
    run_dir = tmp_path / "".join(map(str, agents))
    words = words_of(f"file://{tmp_path / 'share'}", agents, *extra)
    words += [script.__file__, *flags(script, run_dir, **changes), *more]
    return Child(*words, cwd=tmp_path)


def go_on(script, folder, *extra):
    """A process that goes on with a run."""
    words = [federate.__file__, *extra, script.__file__, "--resume", folder]
    return Child(*words, cwd=folder.parents[1])


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
        assert summary_of(folder)["completed"]


@pytest.mark.parametrize(
    ("script", "changes", "processes"),
    [
        (PRPO_MINIGRID, {}, [(0,), (1,), (2,)]),
        (PRPO_MINIGRID, {"communicator": "surrogate", "hidden_sizes": "64 128 32"}, [(0, 1), (2,)]),
        pytest.param(
            FEDAVG_MINIGRID,
            {"communicator": "reward"},
            [(0,), (1, 2)],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            PRTRPO_MINIGRID,
            {"communicator": "similarity"},
            [(0,), (1, 2)],
            marks=pytest.mark.slow,
        ),
        pytest.param(PRPO_ATARI, {"num_envs": 2}, [(0,), (1,), (2,)], marks=pytest.mark.slow),
        (PRPO_MUJOCO, {"communicator": "similarity"}, [(0,), (1, 2)]),
        pytest.param(
            FEDAVG_MUJOCO,
            {"communicator": "surrogate"},
            [(0, 1), (2,)],
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: str(value) if value in (PRPO_ATARI, *ON_MUJOCO) else None,
)
def test_processes_that_wait_train_as_one_process(script, changes, processes, tmp_path):
    changes = changes | {"num_steps": 32, "eval_episodes": 0}
    widths = changes.get("hidden_sizes")
    here = changes | ({"hidden_sizes": tuple(map(int, widths.split()))} if widths else {})
    script.main(tiny(script, tmp_path / "whole", **here))
    more = ("--hidden-sizes", *widths.split()) if widths else ()
    there = {name: value for name, value in changes.items() if name != "hidden_sizes"}
    extra = () if script.averages else PATIENT  # averages wait anyway
    children = [start(script, tmp_path, agents, *extra, more=more, **there) for agents in processes]
    results = outcomes(children)
    assert [code for _, code in results] == [0] * len(processes), results
    assert_same_training(tmp_path, processes, only_run(tmp_path / "whole"))
    # Rows of C are those of the agents held
    for agents in processes:
        tags = scalars_of(folder_of(tmp_path, agents))
        rows = {tag.split("_")[1] for tag in tags if tag.startswith("communicator/c_")}
        assert rows == set(map(str, agents))
        pairs = {tag for tag in tags if tag.startswith("distances/agent_")}
        all_pairs = itertools.combinations(range(3), 2)
        of_members = [pair for pair in all_pairs if {*pair} & {*agents}]
        expected = {f"distances/agent_{i}_agent_{j}" for i, j in of_members}
        assert pairs == expected


def test_a_killed_agent_goes_on_from_its_checkpoint(tmp_path, whole_run):
    """Killed after the round of iteration 3, before the checkpoint of iteration 4 was complete: it
    goes on from iteration 2, and sends the first round again. The others wait meanwhile.
    """
    crash = REPOSITORY / "tests" / "tools" / "crash.py"
    words = words_of(f"file://{tmp_path / 'share'}", (1,), *PATIENT)
    words += [crash, "prpo_minigrid", "not in its place", 1, 4]
    victim = Child(*words, *flags(PRPO_MINIGRID, tmp_path / "1"), cwd=tmp_path)
    others = [start(PRPO_MINIGRID, tmp_path, (i,), *PATIENT) for i in (0, 2)]
    ((_, code),) = outcomes([victim])
    assert code == -9
    folder = folder_of(tmp_path, (1,))
    assert [path.name for path in (folder / "checkpoints" / "agent_1").glob("*.pt")] == ["2.pt"]
    results = outcomes([go_on(PRPO_MINIGRID, folder), *others])
    assert [code for _, code in results] == [0, 0, 0], results
    assert "resuming after iteration 2 of 6" in results[0][0][0]
    for i in range(3):
        weights = weights_of(folder_of(tmp_path, (i,)))
        assert torch.equal(weights[i], weights_of(whole_run(PRPO_MINIGRID))[i])


SLOW = [
    pytest.param(script, marks=pytest.mark.slow)
    for script in (FEDAVG_MINIGRID, PRTRPO_MINIGRID, *ON_MUJOCO)
]


@on([PRPO_MINIGRID, *SLOW])
def test_a_resume_needs_no_file_of_a_peer(script, tmp_path):
    """In the middle of an interval: the snapshots of the round before are in the checkpoint."""
    extra = () if script.averages else PATIENT
    changes = {"iterations": 5, "save_every": 1, "num_steps": 32, "eval_episodes": 0}
    children = [start(script, tmp_path, agents, *extra, **changes) for agents in ((0, 1), (2,))]
    assert [code for _, code in outcomes(children)] == [0, 0]
    for path in tmp_path.glob("share/prpo/*/round_*"):
        if path.name != "round_00000000.safetensors":  # the common start of averages
            path.unlink()
    for agents in ((0, 1), (2,)):
        folder = folder_of(tmp_path, agents)
        weights = weights_of(folder)
        for path in folder.glob("checkpoints/*/5.pt"):
            path.unlink()
        (((output, errors), code),) = outcomes([go_on(script, folder)])
        assert code == 0, errors
        assert "resuming after iteration 4 of 5" in output
        assert all(torch.equal(weights_of(folder)[i], weights[i]) for i in agents)


PACED_AGENT = """
import json, pathlib, sys, time
import communicators, prpo_minigrid
agent, pace = sys.argv.pop(1), json.loads(sys.argv.pop(1))
honest = prpo_minigrid.rollout
def newest(agent):
    files = pathlib.Path("share/prpo").glob(f"agent_{agent}/round_*")
    return max((int(path.stem.removeprefix("round_")) for path in files), default=0)
def rollout(*inputs):
    peer, number = pace.get(str(newest(agent)), (0, 0))
    while newest(peer) < number:
        time.sleep(0.02)
    return honest(*inputs)
prpo_minigrid.rollout = rollout
prpo_minigrid.main(communicators.parse_args(prpo_minigrid.Args, prpo_minigrid.check_args))
"""


@pytest.mark.slow
def test_nobody_waits_for_anybody(tmp_path):
    """One agent is killed and resumed, one is five times slower, one comes at half time.

    Their paces are set by each other's rounds, not by the clock: behind which of its own rounds an
    agent is idle until a peer has sent which.
    """
    (tmp_path / "agent.py").write_text(PACED_AGENT)
    share = tmp_path / "share"
    changes = {"iterations": 60, "local_updates": 1, "save_every": 4}
    paces = [
        {50: (2, 1)},  # sees the late one before it ends
        {k: (0, 5 * (k - 2)) for k in range(5, 15)},
        {40: (0, 60)},  # is there when the first one has ended
    ]

    def begin(i, *words):
        launcher = words_of(f"file://{share}", (i,), "--max-age", 10)
        words = words or flags(PRPO_MINIGRID, tmp_path / str(i), **changes)
        pace = json.dumps(paces[i])
        return Child(*launcher, tmp_path / "agent.py", i, pace, *words, cwd=tmp_path)

    def wait_for(agent, number):
        deadline = time.monotonic() + 100
        while True:
            names = [path.name for path in (share / "prpo" / f"agent_{agent}").glob("round_*")]
            if names and max(names) >= f"round_{number:08}":
                return
            assert time.monotonic() < deadline
            time.sleep(0.05)

    first = begin(0)
    slow = begin(1)
    wait_for(0, 10)
    first.send_signal(9)
    first.communicate()
    wait_for(1, 5)
    first = begin(0, "--resume", folder_of(tmp_path, (0,)))
    wait_for(0, 30)
    late = begin(2)
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
    ages_of_slow = [int(row["age_1"]) for row in rows[20:40]]
    assert max(ages_of_slow) >= 2 and min(ages_of_slow) == 0  # it sends now and then
    assert rows[15]["age_2"] == "nan" and rows[-1]["age_2"] != "nan"
    rows = rows_of(folder_of(tmp_path, (2,)))
    assert rows[0]["age_0"] == rows[0]["age_1"] == "0"  # both were there before
    assert float(rows[-1]["age_0"]) > 10  # ended before, and was dropped
    tags = scalars_of(folder_of(tmp_path, (2,)))
    assert tags["communicator/c_2_0"][-1][1] == 0


def test_rounds_before_the_first_checkpoint_are_not_used_anew(tmp_path, crashing, launched):
    """Peers may have read them."""
    script = PRPO_MINIGRID
    launched("--exchange", tmp_path / "store", "--agents", 0)
    settings = {"num_agents": 2, "local_updates": 1, "save_every": 3, "eval_episodes": 0}
    args = tiny(script, tmp_path / "runs", **settings, iterations=4)
    crashing("not in its place", 0, 3, lambda: script.main(args))
    folder = only_run(tmp_path / "runs")
    assert not list(folder.glob("checkpoints/*/*.pt"))
    launched()
    assert resume(script, folder)["completed"]
    newest = max((tmp_path / "store" / "prpo" / "agent_0").glob("round_*"))
    assert newest.name == f"round_{3 + 4:08}.safetensors"


def test_a_run_of_one_agent_is_played(tmp_path, capsys, launched):
    """play.py knows which agents a run has."""
    launched("--exchange", tmp_path / "share", "--agent", 1)
    folder = train(PRPO_MINIGRID, tmp_path / "runs", iterations=1, local_updates=1)
    assert "__agent_1__" in folder.name
    capsys.readouterr()
    assert play.main(play.Args(str(folder))).keys() == {1}
    assert capsys.readouterr().out.splitlines()[-1].split()[0] == "1"


# The launcher, and bad input


@pytest.mark.parametrize(
    ("words", "number"),
    [
        ("--exchange x --agents 0 1 a.py --y b.py", 5),
        ("a.py --resume b.py", 0),
        ("--identity key.py --trust t.py --exchange=u.py a.py", 5),
        ("--agents 0 dir/a.py", 2),
        ("--help", 1),
        ("--federation a.py", 2),
    ],
)
def test_the_script_ends_the_launchers_words(words, number):
    words = words.split()
    assert federate.split_words(words) == (words[:number], words[number:])


def test_a_script_runs_as_by_itself(tmp_path):
    """Its name, words and folder are its own, and its exit code is the launcher's."""
    (tmp_path / "at").mkdir()
    (tmp_path / "at" / "beside.py").write_text("NAME = 'beside'\n")
    (tmp_path / "at" / "own.py").write_text(
        "import sys, beside\nprint(__name__, sys.argv, beside.NAME)\nsys.exit(7)\n"
    )
    command = federate.__file__, "--exchange", "x", "--agent", 0, "at/own.py", "--agent", "5"
    process = call(*command, cwd=tmp_path)
    assert process.returncode == 7, process.stderr
    assert process.stdout == "__main__ ['at/own.py', '--agent', '5'] beside\n"
    assert not (tmp_path / "x").exists()


def test_launching_ends_in_one_line(tmp_path, monkeypatch):
    words = ["--exchange", str(tmp_path), "--agent", "0"]
    script = str(REPOSITORY / "prpo_minigrid.py")
    assert "prpo_minigrid.py" in refusal(federate.launch, words)
    assert refusal(federate.launch, [*words, "no.py"]) == "no.py: there is no such script"
    for extra, problem in (
        (["--quorum", "0"], "--quorum 0.0: must lie in (0, 1]"),
        (["--quorum", "1.1"], "--quorum 1.1: must lie in (0, 1]"),
        (["--wait", "-1"], "--wait -1.0: must not be negative"),
        (["--wait", "inf"], "--wait inf: must be finite and not be negative"),
        (["--max-age", "-1"], "--max-age -1: must not be negative"),
    ):
        assert refusal(federate.launch, [*words, *extra, script]) == problem
    assert "--num-agents" in refusal(federate.launch, [*words, "--num-agents", "3", script])
    monkeypatch.setenv("RANK", "0")
    assert "torchrun" in refusal(federate.launch, [*words, script])


def test_an_exchange_that_cannot_be_used_is_refused(tmp_path, launched):
    url = f"file://{tmp_path}"
    agent = ("--agent", 0)

    def refused(*words, script=PRPO_MINIGRID, **changes):
        launched(*words)
        return refusal(script.main, tiny(script, tmp_path / "runs", **changes))

    assert refused(*agent).startswith("--exchange : must be the URL")
    assert refused("--exchange", url).startswith("--agents : must be the agents of this process")
    for numbers in ((3,), (0, 2), (1, 0), (-1,), (1, 1)):
        assert refused("--exchange", url, "--agents", *numbers).startswith("--agents")
    assert "Protocol not known" in refused("--exchange", "nowhere://x", *agent)
    assert "gcsfs" in refused("--exchange", "gs://bucket/path", *agent)
    (tmp_path / "file").write_text("")
    assert "--exchange" in refused("--exchange", f"{url}/file", *agent)
    for name in ("a/b", "..", "", "ä", "\udcff"):
        line = refused("--exchange", url, *agent, "--federation", name)
        assert line.startswith("--federation")
    assert "isolated" in refused("--exchange", url, *agent, communicator="identity")
    assert "isolated" in refused("--exchange", url, *agent, num_agents=1)
    old = ("--max-age", 2)
    message = refused("--exchange", url, *agent, *old, script=FEDAVG_MINIGRID)
    assert message.startswith("--max-age 2: has no effect on averages")
    for store in ("sftp://me:secret@host/path", "simplecache::sftp://me:secret@host/path"):
        line = refused("--exchange", store, *agent)
        assert "password" in line and "secret" not in line
    assert "is no URL: Invalid IPv6 URL" in refused("--exchange", "s3://[bucket/path", *agent)
    assert "delta" in refused("--exchange", url, *agent, script=PRTRPO_MINIGRID, delta=0.1)
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_cannot_be_written_to_is_one_line(tmp_path):
    """Nothing on stdout promises to go on without it."""
    (tmp_path / "file").write_text("")
    words = words_of(tmp_path / "file", (0,))
    child = Child(*words, PRPO_MINIGRID.__file__, *flags(PRPO_MINIGRID, tmp_path), cwd=tmp_path)
    (((output, errors), code),) = outcomes([child])
    assert (output, code) == ("", 2)
    assert errors.count("\n") == 1 and errors.startswith(f"--exchange {tmp_path}/file: must be")


def test_proximal_averages_keep_old_ones(tmp_path, launched):
    """--max-age has an effect on averages that pull."""
    launched("--exchange", tmp_path / "store", "--agents", 0, "--max-age", 2)
    settings = {"prox_coef": 0.1, "iterations": 1, "eval_episodes": 0}
    assert FEDAVG_MINIGRID.main(tiny(FEDAVG_MINIGRID, tmp_path / "runs", **settings))["completed"]


def test_a_second_agent_of_the_same_number_is_refused(tmp_path):
    args = SimpleNamespace(num_agents=3, device="cpu", timeout=1.0, resume="", save_every=1)
    args.local_updates = 1

    def make(*words):
        words = ["--exchange", str(tmp_path), "--agent", "0", *words]
        return federate.make_exchange(words, args, False, "", "")

    assert isinstance(make(), FolderExchange)
    assert not list(tmp_path.rglob("*probe*"))
    go(join(tmp_path, (0,)), 1)
    assert "has files of agent 0 in prpo already: go on with the script's --resume" in refusal(make)
    make("--federation", "other")


@pytest.fixture
def begun(whole_run, tmp_path):
    """begun(**settings): a folder whose config.json is that of a run under federate.py."""

    def begin(**settings):
        folder = tmp_path / "run"
        folder.mkdir()
        copy_config(whole_run(PRPO_MINIGRID), folder)
        config = config_of(folder)
        of_launcher = vars(federate.Args(str(tmp_path / "store"), (1,))) | settings
        (folder / "config.json").write_text(json.dumps(config | of_launcher))
        return folder

    return begin


def resumed(folder, *words):
    """The exchange of a run that is resumed with these words of the launcher."""
    args = PRPO_MINIGRID.Args(resume=str(folder), device="cpu")
    return federate.make_exchange([*map(str, words)], args, False, "", "")


@pytest.mark.parametrize(("before", "after", "valid"), [(0, 5, "0"), (5, 0, "positive")])
def test_a_run_that_is_resumed_waits_as_before(begun, launched, before, after, valid):
    """Whether rounds are repeated or skipped depends on it; how long it waits may change."""
    folder = begun(wait=float(before))
    line = refusal(resumed, folder, "--wait", after)
    assert line == f"--wait {after:.1f}: must be {valid} as in {folder}"
    assert resumed(folder, "--wait", 2 * before).wait == 2 * before
    assert resumed(folder).wait == before


def test_what_a_resumed_run_may_change(begun, tmp_path, monkeypatch):
    """Where it is, how old snapshots may be and who is trusted, not who it is. A relative path is
    of the folder where it was given.
    """
    folder = begun(max_age=3, quorum=0.5)
    assert resumed(folder).settings["exchange"] == str(tmp_path / "store")
    assert (resumed(folder).max_age, resumed(folder).quorum) == (3, 0.5)
    monkeypatch.chdir(tmp_path)
    other = resumed(folder, "--exchange", "moved", "--max-age", 8, "--quorum", 1)
    assert other.settings["exchange"] == str(tmp_path / "moved")
    assert (other.max_age, other.quorum) == (8, 1)
    for agents in (("--agent", 0), ("--agents", 1, 2)):
        line = refusal(resumed, folder, *agents)
        numbers = " ".join(map(str, agents[1:]))
        assert line == f"--agents {numbers} must be 1, as in {folder}, or left out"
    line = refusal(resumed, folder, "--federation", "other")
    assert line == f"--federation other must be prpo, as in {folder}, or left out"
    resumed(folder, "--agent", 1, "--federation", "prpo")


def test_a_run_goes_on_as_it_was_begun(begun, whole_run, tmp_path, launched):
    """Under federate.py, or without it."""
    folder = begun()
    line = refusal(PRPO_MINIGRID.parse_args, ["--resume", str(folder)])
    assert line == f"--resume {folder}: was begun under federate.py; go on as it was begun"
    launched()
    assert PRPO_MINIGRID.parse_args(["--resume", str(folder)]).resume == str(folder)
    copy_config(whole_run(PRPO_MINIGRID), tmp_path)
    line = refusal(PRPO_MINIGRID.parse_args, ["--resume", str(tmp_path)])
    assert line == f"--resume {tmp_path}: was begun without federate.py; go on as it was begun"


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
        values, reports = go(second, 10 + value)
        assert values == [value, 10 + value, None]
        assert reports[0] == value
    assert not first.store.renames
    assert sorted(first.store.list("prpo/agent_0")) == [
        f"round_{number:08}.safetensors" for number in (3, 4, 5)
    ]
    flags = federate.Args(bucket, (0,))
    assert "has files of agent 0 in prpo already" in refusal(federate.open_store, flags, False)
    federate.open_store(flags, True)
    federate.open_store(federate.Args(bucket, (0,), "other"), False)
    flags.exchange = "s3://nobodys/x"
    assert "can be written to" in refusal(federate.open_store, flags, False)


def test_processes_share_a_bucket(bucket, tmp_path, whole_run):
    """Three processes that wait for each other end as one process does."""
    children = []
    for i in range(3):
        words = [*words_of(bucket, (i,), *PATIENT), PRPO_MINIGRID.__file__]
        words += flags(PRPO_MINIGRID, tmp_path / str(i))
        children.append(Child(*words, cwd=tmp_path))
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
def test_language_models_train_as_in_one_process(changes, files, tmp_path):
    """Also an agent that loses its last checkpoint, and sends a round again."""
    whole, _ = language_models.train(files, tmp_path / "whole", **changes)
    expected = language_models.weights_of(whole)
    script = prpo_llm.__file__
    children = []
    for i in range(2):
        words = words_of(tmp_path / "share", (i,))
        if "aggregation" not in changes:
            words += PATIENT
        args = language_models.tiny(files, tmp_path / str(i), **changes)
        words += [script, *language_models.flags(args)]
        children.append(Child(*words, cwd=tmp_path))
    results = outcomes(children)
    assert [code for _, code in results] == [0, 0], results
    for i in range(2):
        (weights,) = language_models.weights_of(folder_of(tmp_path, (i,)))
        torch.testing.assert_close(weights, expected[i], rtol=0, atol=1e-4)
    folder = folder_of(tmp_path, (1,))
    (folder / "checkpoints" / "agent_1" / "4.pt").unlink()
    again = Child(federate.__file__, script, *language_models.to_resume(folder), cwd=tmp_path)
    (((output, errors), code),) = outcomes([again])
    assert code == 0, errors
    assert "resuming after step 2 of 4" in output
    assert "ignored" not in output  # a peer's file
    (resumed_weights,) = language_models.weights_of(folder)
    assert torch.equal(resumed_weights, weights)


def test_what_needs_all_language_models_in_one_place_is_refused(files, tmp_path, launched):
    launched("--exchange", tmp_path / "store", "--agents", 0)
    settings = {"aggregation": "weights", "lora_average": "frozen-a"}
    args = language_models.tiny(files, tmp_path / "runs", **settings)
    assert "--lora-average frozen-a" in refusal(prpo_llm.main, args)
    assert not (tmp_path / "runs").exists()
