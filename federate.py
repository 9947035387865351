"""Agents of different owners, who share nothing but a folder: a launcher, as torchrun is one.

    python federate.py --exchange shared --agents 0 prpo_minigrid.py --communicator reward
    python federate.py --exchange s3://bucket/path --agents 1 2 prpo_minigrid.py --num-agents 5
    python federate.py prpo_minigrid.py --resume runs/<name>  # continue an interrupted run

Every owner starts a process of its own, whenever, on whatever machine. The flags of this launcher
stand before the script, those of the script behind it. docs/federation.md explains them.

Contents: snapshots as files; signatures; the store; the exchange; flags and checks; the launcher.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
import re
import runpy
import sys
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import fsspec
import torch
import torch.nn as nn
import tyro
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

import communicators
from communicators import Natural, NonNegative, PositiveFraction, first_line, refuse

# --- snapshots as files ---
# Whatever a peer, or the store, makes of a file, reading it ends in a tensor of the size that was
# expected or in `Rejected`

SNAPSHOT_FORMAT = "prpo-snapshot-1"
# The largest header of a file, in bytes
MAX_HEADER = 4096
SNAPSHOT_NAME = re.compile(r"round_(\d{8})\.safetensors")


class Rejected(Exception):
    """A snapshot that must not be used, and why."""


def encode_snapshot(parameters: Tensor, about: dict[str, str], identity=None) -> bytes:
    """A snapshot as a safetensors file: flat float32 parameters, and metadata with their digest.

    about: what `decode_snapshot` will compare (federation, agent, round), and the reported number,
    if any; identity: the private key that signs the digest, and with it all of this.
    """
    parameters = parameters.detach().float().cpu().contiguous()
    about = {"format": SNAPSHOT_FORMAT, **about}
    seal = {"digest": compute_digest(about, parameters)}
    if identity is not None:
        seal["signature"] = identity.sign(_to_be_signed(seal["digest"])).hex()
    return save({"parameters": parameters}, about | seal)


def decode_snapshot(
    data: bytes, expected: dict[str, str], numel: int, key=None
) -> tuple[Tensor, dict[str, str]]:
    """The inverse of `encode_snapshot`: parameters [numel] and metadata, or `Rejected`.

    expected: entries that the metadata must have; key: the public key whose signature it must have,
    if any. Nothing is allocated or parsed beyond the sizes that `numel` implies, and nothing is
    executed.
    """
    header_size = int.from_bytes(data[:8], "little")
    if header_size > MAX_HEADER:
        raise Rejected(f"has a header of more than {MAX_HEADER} bytes")
    if len(data) != 8 + header_size + 4 * numel:
        raise Rejected(f"has not the bytes of {numel} float32 numbers and a header")
    try:
        header = json.loads(data[8 : 8 + header_size])
        about = header.pop("__metadata__")
        layout = {"dtype": "F32", "shape": [numel], "data_offsets": [0, 4 * numel]}
        if header != {"parameters": layout}:
            raise Rejected("holds other tensors than flat parameters")
        if not all(isinstance(value, str) for value in about.values()):
            raise Rejected("has metadata that are no texts")
        parameters = load(data)["parameters"]
    except (SafetensorError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise Rejected("is no safetensors file of a snapshot") from e
    for name, value in ({"format": SNAPSHOT_FORMAT} | expected).items():
        if about.get(name) != value:
            raise Rejected(f"has the {name} {about.get(name, 'nothing')[:40]!r}, not {value!r}")
    digest = about.pop("digest", "")
    signature = about.pop("signature", "")
    if digest != compute_digest(about, parameters):
        raise Rejected("is damaged: its digest is another")
    if key is not None:
        _verify(key, signature, digest)
    if not parameters.isfinite().all():
        raise Rejected("has parameters that are not finite")
    return parameters, about


def compute_digest(about: dict[str, str], parameters: Tensor) -> str:
    """SHA-256 of a snapshot: its metadata, in the order of their names, and its parameters."""
    text = json.dumps(about, sort_keys=True).encode()
    return hashlib.sha256(text + parameters.numpy().tobytes()).hexdigest()


# --- signatures ---


def _to_be_signed(digest: str) -> bytes:
    """What a signature of a snapshot is of: its digest, and that it is one of a snapshot."""
    return f"{SNAPSHOT_FORMAT} {digest}".encode()


def _verify(key, signature: str, digest: str) -> None:
    """Raise `Rejected` unless the owner of this public key has signed the digest."""
    from cryptography.exceptions import InvalidSignature

    if not signature:
        raise Rejected("is not signed")
    try:
        key.verify(bytes.fromhex(signature), _to_be_signed(digest))
    except (ValueError, InvalidSignature) as error:
        raise Rejected("has a signature that its agent's key has not made") from error


def load_identity(path: str):
    """The private key of --identity, which `openssl genpkey -algorithm ed25519` makes.

    Raises OSError or ValueError if the file holds no such key, ImportError without cryptography.
    """
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    data = Path(path).read_bytes()
    try:
        key = load_pem_private_key(data, password=None)
    except Exception as error:  # of several libraries, also where the key is encrypted
        raise ValueError("is no PEM file of a private key without password") from error
    _check_is_ed25519(key)
    return key


def load_trust(folder: str) -> dict:
    """The public keys of --trust: agent -> the key in agent_J.pem.

    Raises OSError or ValueError if there is none, or a file holds no such key, ImportError without
    cryptography.
    """
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    keys = {}
    for path in sorted(Path(folder).iterdir()):
        match = re.fullmatch(r"agent_(\d+)\.pem", path.name)
        if match:
            try:
                key = load_pem_public_key(path.read_bytes())
            except Exception as error:
                raise ValueError(f"{path.name} is no PEM file of a public key") from error
            _check_is_ed25519(key)
            keys[int(match[1])] = key
    if not keys:
        raise ValueError("has no public key agent_J.pem of any agent J")
    return keys


def _check_is_ed25519(key) -> None:
    """Raise ValueError for a key of another algorithm."""
    if "Ed25519" not in type(key).__name__:
        raise ValueError(f"holds a key of another algorithm than Ed25519 ({type(key).__name__})")


# --- the store ---


class StoreError(OSError):
    """A store that did not answer, even when asked again."""


class Store:
    """Files at a URL, through fsspec, in a store that may fail for a while.

    A request that fails is repeated with back-off, then it is a `StoreError`. One line says so when
    a store begins to fail, and one when it answers again; meanwhile requests are repeated once.
    """

    delays = 0.1, 0.4, 1.6  # seconds before a request is repeated
    # One put is atomic there; elsewhere a file is written under another name, then renamed
    object_stores = "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci", "oss"

    def __init__(self, url: str):
        self.url = url
        self.fs, self.root = fsspec.core.url_to_fs(url)
        protocols = [self.fs.protocol] if isinstance(self.fs.protocol, str) else self.fs.protocol
        self.renames = not set(protocols) & set(self.object_stores)
        self._failing = {"read": set(), "written": set()}  # the folders of which a request failed

    def _request(self, verb: str, folder: str, request: Callable) -> object:
        """The result of a request about a folder or a file in it."""
        failing = self._failing[verb]
        delays = self.delays[:1] if failing else self.delays
        for delay in (*delays, None):
            try:
                result = request()
            except Exception as error:  # drivers have errors of their own
                if delay is None:
                    if not failing:
                        line = f"{self.url} cannot be {verb} ({first_line(error)})"
                        print(f"\n{line}, going on without", flush=True)
                    failing.add(folder)
                    raise StoreError(str(error)) from error
                time.sleep(delay)
            else:
                if failing == {folder}:
                    print(f"\n{self.url} can be {verb} again", flush=True)
                failing.discard(folder)
                return result

    def list(self, folder: str) -> dict[str, int | None]:
        """The names and sizes of the files in a folder; none if it is not there."""

        def list_folder() -> dict[str, int | None]:
            path = f"{self.root}/{folder}"
            self.fs.invalidate_cache(path)
            try:
                entries = self.fs.ls(path, detail=True)
            except FileNotFoundError:
                return {}
            sizes = {}
            for entry in entries:
                # To read a named pipe, or a link to one, would never end
                is_file = entry.get("type", "file") in ("file", "link")
                if is_file or self.fs.isfile(entry["name"]):
                    sizes[entry["name"].rpartition("/")[2]] = entry.get("size")
            return sizes

        return self._request("read", folder, list_folder)

    def read(self, path: str, limit: int) -> bytes | None:
        """The first `limit` bytes of a file; None if it is not there."""

        def read_file() -> bytes | None:
            try:
                return self.fs.cat_file(f"{self.root}/{path}", start=0, end=limit)
            except FileNotFoundError:
                return None
            except (PermissionError, IsADirectoryError):  # of this file; the store is well
                return b""

        return self._request("read", os.path.dirname(path), read_file)

    def write(self, path: str, data: bytes) -> None:
        """Write a file, which appears as a whole or not at all."""

        def write_file() -> None:
            whole = f"{self.root}/{path}"
            if not self.renames:
                self.fs.pipe_file(whole, data)
                return
            folder, _, _ = whole.rpartition("/")
            self.fs.makedirs(folder, exist_ok=True)
            self.fs.pipe_file(f"{folder}/writing.tmp", data)
            self.fs.mv(f"{folder}/writing.tmp", whole)

        self._request("written", os.path.dirname(path), write_file)

    def delete(self, path: str) -> None:
        """Delete a file, if it is there."""

        def delete_file() -> None:
            with contextlib.suppress(FileNotFoundError):
                self.fs.rm_file(f"{self.root}/{path}")

        self._request("written", os.path.dirname(path), delete_file)


# --- the exchange ---


@dataclass
class Peer:
    """What is known of an agent elsewhere: its newest snapshot that was believed."""

    snapshot: Tensor | None = None  # flat [numel]
    report: float = math.nan
    round: int = 0  # in which it was sent, by its agent's count
    arrival: int = 0  # the round of this process in which it was read
    used: bool = False  # whether the last round returned it


class FolderExchange(communicators.Exchange):
    """The exchange of a federation: independent processes that share a folder.

    This process holds the agents of --agents, and what it knows of others is in the store: at
    FEDERATION/agent_J/round_R.safetensors, snapshots by the number of agent J's round, of which the
    newest few are kept. A round writes the files of the agents held, then reads the newest of every
    peer. It waits for --wait seconds at most until --quorum of all agents have sent something new.

    Each process counts its own rounds, because agents differ in speed and in when they began. The
    age of a snapshot is the number of rounds that its *reader* has had since it arrived. Everything
    of agents elsewhere that is not known here is NaN, see `all_gather`.

    args: the script's; averages: as in `communicators.make_exchange`; identity: the key that signs;
    trust: agent -> public key, None to believe everybody.
    """

    def __init__(
        self, args, flags: "Args", store: Store, averages: str = "", identity=None, trust=None
    ):
        super().__init__(args.num_agents, args.device, args.timeout)
        self.agents = range(min(flags.agents), max(flags.agents) + 1)
        self.members = self.agents
        self.label = f"agent_{self.agents[0]}"
        if len(self.agents) > 1:
            self.label = f"agents_{self.agents[0]}-{self.agents[-1]}"
        self.settings = vars(flags) | {"agents": list(self.agents)}
        self.federation = flags.federation
        self.store = store
        self.averages = averages
        self.wait = find_wait(flags, args, averages)
        self.quorum = flags.quorum
        self.max_age = flags.max_age
        self.identity = identity
        self.trust = trust
        # A process that resumes reads the files of the same rounds again, if it waits for them
        self.kept = 3
        if self.wait:
            self.kept += args.save_every // args.local_updates
        # Without waiting peers have read other files since: skip to the round behind the last file
        self.skips = bool(args.resume) and not self.wait
        self.number = 0  # of this process's last round
        self.peers = {j: Peer() for j in range(args.num_agents) if j not in self.agents}
        self.bytes_received = 0
        self.rejected = 0  # files
        self._known_as_bad = {}  # paths and sizes

    # What the run keeps and logs

    def state(self) -> dict[str, list]:
        """What `Run` keeps of the exchange: all of it, in the first held agent's checkpoint."""
        return {"peers": [self, *([] for _ in self.agents[1:])]}

    def state_dict(self) -> dict:
        """All that a resumed process needs; of peers' files averages read agent 0's first one."""
        return {
            "number": self.number,
            "bytes_received": self.bytes_received,
            "rejected": self.rejected,
            "peers": {j: vars(peer) for j, peer in self.peers.items()},
        }

    def load_state_dict(self, stored: dict) -> None:
        """The inverse of `state_dict`."""
        self.number = stored["number"]
        self.bytes_received = stored["bytes_received"]
        self.rejected = stored["rejected"]
        self.peers = {j: Peer(**values) for j, values in stored["peers"].items()}

    def describe(self) -> dict[str, float]:
        """Scalars about the communication, for the log."""
        scalars = super().describe() | {
            "communication/bytes_received": self.bytes_received,
            "communication/rejected": self.rejected,
        }
        for j, peer in self.peers.items():
            age = math.nan if peer.snapshot is None else self.number - peer.arrival
            scalars[f"communication/age_{j}"] = age
        return scalars

    def count_bytes(self, reads: Tensor) -> None:
        """Nothing: `bytes_sent` counts what is written to the store."""

    # Between processes

    def all_gather(self, local: Tensor) -> Tensor:
        """Rows of the agents held; those of agents elsewhere are NaN, or 0 if they are integers."""
        unknown = torch.nan if local.is_floating_point() else 0
        gathered = local.new_full((self.num_agents, *local.shape[1:]), unknown)
        gathered[list(self.agents)] = local
        return gathered

    def broadcast_networks(self, networks: list[nn.Module]) -> None:
        """Averages of parameters start from agent 0's first snapshot, its round 0."""
        if self.averages:
            start = self.broadcast_start(communicators.flatten(networks[0]))
            for network in networks:
                communicators.unflatten(start, network)

    def broadcast_start(self, parameters: Tensor) -> Tensor:
        """Agent 0's `parameters` [numel], from its file, for which others wait up to --timeout."""
        if not self.averages:
            return parameters
        path = self._path(0, 0)
        deadline = time.monotonic() + self.timeout.total_seconds()
        while True:
            with contextlib.suppress(StoreError):
                start = self._read(0, 0, len(parameters))
                if start is not None:
                    return start[0].to(parameters)
                if 0 in self.agents:
                    self.store.write(path, self._encode(0, 0, parameters))
            if self.interrupted():
                problem = "interrupted while waiting for agent 0, nothing was trained"
                communicators.stop(f"{self.store.url}: {problem}", 128 + self.interrupted())
            if time.monotonic() > deadline:
                problem = f"no usable {path} after {self.timeout.total_seconds():g} seconds"
                problem = f"{problem}; averages start from it, start agent 0"
                communicators.stop(f"{self.store.url}: {problem}")
            time.sleep(0.2)

    def round(
        self, sent: list[Tensor], numbers: Tensor | None = None, sizes: list[int] | None = None
    ) -> tuple[list[Tensor | None], Tensor]:
        """As `Exchange.round`: write the files of the agents held, read the newest of every peer.

        A peer whose snapshot is missing or too old is None, its report NaN.
        """
        if self.skips:
            with contextlib.suppress(StoreError):
                self._skip_rounds(sent)
                self.skips = False
        self.number += 1
        reports = torch.full((self.num_agents,), torch.nan, dtype=torch.double)
        if numbers is not None:
            reports[list(self.agents)] = numbers.double()
        for i, tensor in zip(self.agents, sent, strict=True):
            report = None if numbers is None else reports[i].item()
            with contextlib.suppress(StoreError):
                self._write(i, tensor, report)
        self._read_peers(sizes or [len(sent[0])] * self.num_agents)
        for j, peer in self.peers.items():
            peer.used = self._is_usable(peer)
            if peer.used:
                reports[j] = peer.report
        absent = [str(j) for j, peer in self.peers.items() if not peer.used]
        if absent and self.averages == "replace":
            print(f"\nround {self.number} averages without agents {' '.join(absent)}", flush=True)
        return self.recall(sent, sizes), reports.where(reports.isfinite(), torch.nan)

    def _gather(self, sent: list[Tensor], sizes: list[int] | None) -> list[Tensor | None]:
        """The tensors of the agents held, and those of peers that the last round has found."""
        tensors = super()._gather(sent, sizes)
        for j, peer in self.peers.items():
            if peer.used:
                tensors[j] = peer.snapshot.to(sent[0])
        return tensors

    def _is_new(self, peer: Peer) -> bool:
        """Whether a peer's snapshot is as new as this round, or has arrived in it."""
        return peer.round >= self.number or peer.arrival == self.number

    def _is_usable(self, peer: Peer) -> bool:
        """Whether a peer takes part in this round."""
        if self.averages == "replace":  # an old average would undo what was learned since
            return self._is_new(peer)
        return peer.snapshot is not None and self.number - peer.arrival <= self.max_age

    def _skip_rounds(self, sent: list[Tensor]) -> None:
        """The next round is the one behind the last file. What is here keeps its age.

        sent: as in `round`. A file that others could have written does not count.
        """
        newest = self.number
        for i, tensor in zip(self.agents, sent, strict=True):
            for number in self._list_rounds(i):
                with contextlib.suppress(Rejected):
                    data = self._fetch(i, number, len(tensor)) or b""
                    self._decode(i, number, len(tensor), data)
                    newest = max(newest, number)
                    break
        for peer in self.peers.values():
            peer.arrival += newest - self.number
        self.number = newest

    # Files

    def _path(self, agent: int, number: int) -> str:
        """The file of an agent's round in the store."""
        return f"{self.federation}/agent_{agent}/round_{number:08}.safetensors"

    def _identify(self, agent: int, number: int) -> dict[str, str]:
        """What the metadata of an agent's round must say."""
        return {"federation": self.federation, "agent": str(agent), "round": str(number)}

    def _encode(
        self, agent: int, number: int, parameters: Tensor, report: float | None = None
    ) -> bytes:
        """The file of an agent's round."""
        about = self._identify(agent, number)
        if report is not None:
            about["report"] = repr(report)
        return encode_snapshot(parameters, about, self.identity)

    def _write(self, i: int, parameters: Tensor, report: float | None) -> None:
        """Write the file of this round of an agent held; delete the one that is too old."""
        data = self._encode(i, self.number, parameters, report)
        self.store.write(self._path(i, self.number), data)
        self.bytes_sent += len(data)
        if self.number > self.kept:
            self.store.delete(self._path(i, self.number - self.kept))

    def _read_peers(self, sizes: list[int]) -> None:
        """Read what is new of every peer, until it is enough or the wait is over."""
        deadline = time.monotonic() + self.wait
        pause = 0.05
        while True:
            for j, peer in self.peers.items():
                # A peer that was far ahead, and counts, may have sent more since
                is_read = self.number in (peer.round, peer.arrival)
                if not (self.wait and is_read):
                    with contextlib.suppress(StoreError):
                        self._read_newest(j, sizes[j])
            num_new = len(self.agents) + sum(map(self._is_new, self.peers.values()))
            is_enough = num_new / self.num_agents >= self.quorum
            if is_enough or self.interrupted() or time.monotonic() >= deadline:
                return
            time.sleep(pause)
            pause = min(2 * pause, 1.0)

    def _read_newest(self, j: int, numel: int) -> None:
        """Read a peer's newest snapshot, if it has not been read."""
        peer = self.peers[j]
        sizes = self._list_rounds(j)
        numbers = []
        for number, size in sizes.items():
            # One that has grown is read again: a file may be moved in parts
            is_bad = self._known_as_bad.get(self._path(j, number), -1) == size
            if number > peer.round and not is_bad:
                numbers.append(number)
        # A peer for which this agent waits may be a round ahead already
        numbers.sort(key=lambda number: self.wait > 0 and number == self.number, reverse=True)
        for number in numbers[: self.kept]:
            try:
                contents = self._read(j, number, numel, sizes[number])
            except StoreError:  # of this file, another may be readable
                continue
            if contents is not None:
                peer.snapshot, peer.report = contents
                peer.round = number
                peer.arrival = self.number
                return

    def _list_rounds(self, j: int) -> dict[int, int | None]:
        """The rounds of which an agent's files are in the store, the newest first: their sizes."""
        sizes = {}
        for name, size in self.store.list(f"{self.federation}/agent_{j}").items():
            match = SNAPSHOT_NAME.fullmatch(name)
            if match:
                sizes[int(match[1])] = size
        return dict(sorted(sizes.items(), reverse=True))

    def _read(
        self, j: int, number: int, numel: int, size: int | None = None
    ) -> tuple[Tensor, float] | None:
        """An agent's snapshot and the number it reports; None if it is missing or rejected.

        size: of the file, as listed.
        """
        path = self._path(j, number)
        data = self._fetch(j, number, numel)
        if data is None:
            return None
        self.bytes_received += len(data)
        try:
            return self._decode(j, number, numel, data)
        except Rejected as reason:
            if path not in self._known_as_bad:
                print(f"\nignored {path}, which {reason}", flush=True)
                self.rejected += 1
            self._known_as_bad[path] = size  # one that has grown is read again
            return None

    def _fetch(self, j: int, number: int, numel: int) -> bytes | None:
        """The file of an agent's round; of one that is too large a byte more than is allowed."""
        return self.store.read(self._path(j, number), 8 + MAX_HEADER + 4 * numel + 1)

    def _decode(self, j: int, number: int, numel: int, data: bytes) -> tuple[Tensor, float]:
        """What the file of an agent's round holds, and the number it reports, or `Rejected`."""
        expected = self._identify(j, number)
        parameters, about = decode_snapshot(data, expected, numel, self._find_key(j))
        try:
            return parameters, float(about.get("report", "nan"))
        except ValueError as error:
            raise Rejected("reports no number") from error

    def _find_key(self, j: int):
        """The public key with which an agent has to sign; None without --trust, or `Rejected`."""
        if self.trust is None:
            return None
        if j in self.agents:
            return self.identity.public_key()
        if j not in self.trust:
            raise Rejected(f"is of agent {j}, whose key is not in --trust")
        return self.trust[j]


# --- flags and checks ---


@dataclass
class Args:
    exchange: str = ""
    """URL of the folder that all agents share: a path, s3://bucket/path, sftp://host/path, ..."""
    agents: Annotated[tuple[int, ...], tyro.conf.arg(aliases=["--agent"])] = ()
    """the agents of this process, one or consecutive ones, counted from 0"""
    federation: str = "prpo"
    """name of the common experiment, a folder at the URL"""
    # seconds that a round waits at most for new snapshots of its peers (default: 0, but where an
    # average replaces an agent's parameters the script's --timeout)
    wait: NonNegative | None = None
    # a round that waits goes on as soon as this fraction of all agents, those of this process
    # included, has sent something new
    quorum: PositiveFraction = 1.0
    # rounds after which the last snapshot of a peer that sends nothing new gets no more weight; an
    # average that replaces takes none of an earlier round, unless it has just come
    max_age: Natural = 8
    # PEM file of the private key (Ed25519) that signs what the agents of this process send
    identity: str = ""
    # folder of public keys, agent_J.pem of agent J; what they have not signed is ignored
    trust: str = ""


def find_wait(flags: Args, args, averages: str) -> float:
    """The seconds that a round waits at most, see --wait."""
    if flags.wait is not None:
        return flags.wait
    return args.timeout if averages == "replace" else 0.0


def make_exchange(
    words: list[str], args, isolated: bool, averages: str, together: str
) -> FolderExchange:
    """What `communicators.make_exchange` returns under this launcher, whose own words these are.

    The other inputs are those of that function. Ends with one line where the exchange cannot be
    used.
    """
    flags = read_settings(words, args, averages)
    if together:
        refuse(flags, "exchange", f"agents cannot be apart: {together}")
    if isolated:
        refuse(flags, "exchange", "has no effect on isolated agents; start the script by itself")
    check_flags(flags, args, averages)
    identity, trust = load_keys(flags)
    store = open_store(flags, resumes=bool(args.resume))
    return FolderExchange(args, flags, store, averages, identity, trust)


def read_settings(words: list[str], args, averages: str) -> Args:
    """The flags; of a run that is resumed its own, of which some may be given anew."""
    if not args.resume:
        return communicators.read_flags(Args, words)
    config = json.loads(Path(args.resume, "config.json").read_text())
    stored = Args(**{name: config[name] for name in vars(Args()) if name in config})
    stored_words = communicators.list_words(stored)
    stored = communicators.read_flags(Args, stored_words)
    flags = communicators.read_flags(Args, [*stored_words, *words])
    free = vars(flags).keys() - {"agents", "federation"}
    communicators.refuse_changes(flags, stored, free, args.resume)
    # Whether rounds are repeated or skipped depends on it
    waited = find_wait(stored, args, averages) > 0
    if (find_wait(flags, args, averages) > 0) != waited:
        refuse(flags, "wait", f"must be {'positive' if waited else 0} as in {args.resume}")
    return flags


def check_flags(flags: Args, args, averages: str) -> None:
    """What types cannot express."""
    communicators.check_texts(flags)
    if not flags.exchange:
        refuse(flags, "exchange", "must be the URL of a folder that all agents share")
    held = range(min(flags.agents, default=0), max(flags.agents, default=-1) + 1)
    exist = held and held.start >= 0 and held.stop <= args.num_agents
    if not exist or flags.agents != tuple(held):
        valid = "must be the agents of this process, one or consecutive ones of"
        refuse(flags, "agents", f"{valid} 0..{args.num_agents - 1}")
    if not re.fullmatch(r"\w[\w.-]{0,79}", flags.federation, re.ASCII):
        refuse(flags, "federation", "must be a name of letters, digits, _, - and .")
    if flags.max_age != Args.max_age and averages == "replace":
        refuse(flags, "max_age", "has no effect on averages that replace; leave it out")
    try:
        urls = map(urllib.parse.urlsplit, flags.exchange.split("::"))  # the parts of a chained one
        passwords = [url.password for url in urls]
    except ValueError as error:
        refuse(flags, "exchange", f"is no URL: {first_line(error)}")
    if any(passwords):
        flags.exchange = flags.exchange.replace("@", " ").split()[-1]  # not shown
        valid = "must not have a password, which would be stored with the run's settings"
        refuse(flags, "exchange", f"{valid}; give it as the driver of the store documents")
    # The run may be resumed far from here
    for name in ("exchange", "identity", "trust"):
        path = getattr(flags, name)
        if path and "://" not in path:
            setattr(flags, name, os.path.abspath(os.path.expanduser(path)))


def load_keys(flags: Args) -> tuple:
    """The private key of --identity and the public keys of --trust, None for what is not given."""
    keys = []
    for flag, load_key in (("identity", load_identity), ("trust", load_trust)):
        path = getattr(flags, flag)
        try:
            keys.append(load_key(path) if path else None)
        except ImportError:
            refuse(flags, flag, "needs the package cryptography, which is not installed")
        except (OSError, ValueError) as error:
            refuse(flags, flag, str(error))
    identity, trust = keys
    if trust and not identity:
        valid = "needs --identity: peers that trust keys only believe what is signed"
        refuse(flags, "trust", valid)
    for i in flags.agents:
        if trust and i in trust and trust[i] != identity.public_key():
            refuse(flags, "trust", f"agent_{i}.pem is not the key of --identity {flags.identity}")
    return identity, trust


def open_store(flags: Args, resumes: bool) -> Store:
    """The store; refuses one that cannot be written to, or where other processes are these agents.

    Nothing shows these before their first round.
    """
    try:
        store = Store(flags.exchange)
        for i in flags.agents:
            folder = f"{flags.federation}/agent_{i}"
            with contextlib.redirect_stdout(None):  # a failure is reported below
                names = store.list(folder)
                store.write(f"{folder}/probe", b"")
                store.delete(f"{folder}/probe")
            if not resumes and any(map(SNAPSHOT_NAME.fullmatch, names)):
                problem = f"has files of agent {i} in {flags.federation} already: go on with"
                valid = "the script's --resume, or choose another --agents or --federation"
                refuse(flags, "exchange", f"{problem} {valid}")
    except Exception as error:  # of a driver, or its missing package
        problem = f"must be a folder that can be written to ({first_line(error)})"
        refuse(flags, "exchange", problem)
    return store


# --- the launcher ---


def split_words(words: list[str]) -> tuple[list[str], list[str]]:
    """This launcher's own words, and those from the script on, the first .py that is no value."""
    for k, word in enumerate(words):
        is_value = k > 0 and re.fullmatch(r"--[^=]+", words[k - 1])
        if word.endswith(".py") and not word.startswith("-") and not is_value:
            return words[:k], words[k:]
    return words, []


def launch(words: list[str]) -> None:
    """Execute the script, whose exchange will be `make_exchange`'s."""
    communicators.open_streams()
    own_words, script_words = split_words(words)
    flags = communicators.read_flags(Args, own_words)
    if not script_words:
        usage = "python federate.py --exchange URL --agents 0 prpo_minigrid.py"
        communicators.stop(f"name the script behind the flags: {usage}", communicators.WRONG_VALUE)
    script = script_words[0]
    if not Path(script).is_file():
        communicators.stop(f"{script}: there is no such script", communicators.WRONG_VALUE)
    if "RANK" in os.environ:
        valid = "is for processes that are started one by one, without torchrun"
        refuse(flags, "exchange", valid)
    communicators.exchange_of_launcher = functools.partial(make_exchange, own_words)
    sys.argv = script_words
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    import federate  # under its own name, because "__main__" becomes the script

    federate.launch(sys.argv[1:])
