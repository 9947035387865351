"""What agents of a federation sign, and what is believed of what arrives: --identity, --trust."""

import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from helpers import FEDAVG_MINIGRID, PRPO_MINIGRID, REPOSITORY, on, only_run, refusal, tiny
from safetensors.torch import save
from test_federation import go, join, restore

import communicators
import federate
from federate import Rejected, decode_snapshot, encode_snapshot

ABOUT = {"federation": "prpo", "agent": "1", "round": "7"}
PARAMETERS = torch.arange(6.0)


def write_private(key, path, password=None):
    """A private key as `openssl genpkey` writes it."""
    encryption = serialization.NoEncryption()
    if password:
        encryption = serialization.BestAvailableEncryption(password)
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
    path.write_bytes(key.private_bytes(*form))


def write_public(key, path):
    """A public key as `openssl pkey -pubout` writes it."""
    form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    path.write_bytes(key.public_key().public_bytes(*form))


@pytest.fixture
def keys(tmp_path):
    """Keys of three agents: their private files, and the folder of public ones."""
    trust = tmp_path / "trust"
    trust.mkdir()
    private = []
    for i in range(3):
        key = Ed25519PrivateKey.generate()
        private.append(tmp_path / f"key_{i}.pem")
        write_private(key, private[i])
        write_public(key, trust / f"agent_{i}.pem")
    return SimpleNamespace(private=private, trust=trust)


def sit(tmp_path, keys, i, signs=None, trusts=True):
    """The exchange of agent i, which signs with the key of agent `signs` (i by default)."""
    identity = "" if signs is False else str(keys.private[i if signs is None else signs])
    trust = str(keys.trust) if trusts else ""
    return join(tmp_path / "store", (i,), identity=identity, trust=trust, max_age=99)


def path_of(tmp_path, agent, number):
    """The file of an agent's round."""
    return tmp_path / "store" / "prpo" / f"agent_{agent}" / f"round_{number:08}.safetensors"


def reads(reader, value, rejected):
    """A round of agent 0 has this value of agent 1, or None, and so many rejections."""
    assert go(reader, 0)[0][1] == value
    assert reader.describe()["communication/rejected"] == rejected


def test_what_is_signed_is_believed(tmp_path, keys):
    """A reader without --trust does not mind signatures."""
    reader = sit(tmp_path, keys, 0)
    writer = sit(tmp_path, keys, 1)
    careless = sit(tmp_path, keys, 2, trusts=False)
    for value in (5, 6):
        go(writer, value)
        reads(reader, value, 0)
        assert go(careless, 1)[0] == [0, value, 1]


@pytest.mark.parametrize("signs", [False, 2])
def test_what_another_has_signed_or_nobody_is_ignored(tmp_path, keys, signs, capsys):
    """Also if the other is trusted as an agent of its own; each file is counted once."""
    reader = sit(tmp_path, keys, 0)
    honest = sit(tmp_path, keys, 1)
    go(honest, 5)
    reads(reader, 5, 0)
    impostor = sit(tmp_path, keys, 1, signs=signs, trusts=False)
    impostor.number = 1
    go(impostor, 6)
    reads(reader, 5, 1)
    reads(reader, 5, 1)
    lines = capsys.readouterr().out.split("\n")
    assert len([line for line in lines if "sign" in line]) == 1
    honest.number = 2
    go(honest, 7)
    reads(reader, 7, 1)


def test_an_agent_without_a_known_key_is_ignored(tmp_path, keys):
    (keys.trust / "agent_1.pem").unlink()
    go(sit(tmp_path, keys, 1), 5)
    reads(sit(tmp_path, keys, 0), None, 1)


def test_a_resumed_agent_does_not_go_back(tmp_path, keys):
    """Behind the last round that its checkpoint knows."""
    reader = sit(tmp_path, keys, 0)
    writer = sit(tmp_path, keys, 1)
    go(writer, 5)
    first = path_of(tmp_path, 1, 1).read_bytes()
    go(writer, 6)
    reads(reader, 6, 0)
    resumed = restore(reader, sit(tmp_path, keys, 0))
    path_of(tmp_path, 1, 2).unlink()
    path_of(tmp_path, 1, 1).write_bytes(first)
    reads(resumed, 6, 0)


def test_an_older_round_is_not_taken_for_a_newer_one(tmp_path, keys):
    """Neither under a newer name, nor under its own where the newer one was deleted."""
    reader = sit(tmp_path, keys, 0)
    writer = sit(tmp_path, keys, 1)
    go(writer, 5)
    first = path_of(tmp_path, 1, 1).read_bytes()
    go(writer, 6)
    reads(reader, 6, 0)
    path_of(tmp_path, 1, 3).write_bytes(first)
    reads(reader, 6, 1)
    path_of(tmp_path, 1, 2).unlink()
    path_of(tmp_path, 1, 1).write_bytes(first)
    reads(reader, 6, 1)


def test_what_was_signed_elsewhere_is_ignored(tmp_path, keys):
    """Of another federation, or of another agent of the same process, with the same key."""
    key = federate.load_identity(keys.private[1])
    reader = sit(tmp_path, keys, 0)
    path_of(tmp_path, 1, 1).parent.mkdir(parents=True)
    here = {"federation": "prpo", "agent": "1", "round": "1", "report": "0.0"}
    for number, change in enumerate(({"federation": "other"}, {"agent": "2"}), 1):
        about = here | {"round": str(number)} | change
        data = encode_snapshot(torch.full((4,), 5.0), about, key)
        path_of(tmp_path, 1, number).write_bytes(data)
        reads(reader, None, number)
    data = encode_snapshot(torch.full((4,), 5.0), here | {"round": "3"}, key)
    path_of(tmp_path, 1, 3).write_bytes(data)
    reads(reader, 5, 2)


@pytest.mark.parametrize("change", ["parameters", "report", "signature", "digest"])
def test_a_signature_is_of_everything_in_a_file(change):
    """Whoever changes a file, and makes its digest anew, cannot sign it."""
    key = Ed25519PrivateKey.generate()
    about = ABOUT | {"report": "0.5"}
    data = encode_snapshot(PARAMETERS, about, key)
    assert torch.equal(decode_snapshot(data, ABOUT, 6, key.public_key())[0], PARAMETERS)
    signature = re.search(rb'"signature":"([0-9a-f]{128})"', data)[1]
    forged = encode_snapshot(PARAMETERS, about, Ed25519PrivateKey.generate())
    if change == "parameters":
        forged = encode_snapshot(PARAMETERS + 1, about, Ed25519PrivateKey.generate())
    if change == "report":
        forged = encode_snapshot(
            PARAMETERS, ABOUT | {"report": "9.5"}, Ed25519PrivateKey.generate()
        )
    if change != "signature":
        forged = re.sub(rb"(?<=\"signature\":\")[0-9a-f]{128}", signature, forged)
    if change == "digest":  # the signature of another file's digest
        other = encode_snapshot(PARAMETERS, about, key)
        digest = re.search(rb'"digest":"([0-9a-f]{64})"', other)[1]
        forged = encode_snapshot(PARAMETERS + 1, about, key)
        forged = re.sub(rb"(?<=\"digest\":\")[0-9a-f]{64}", digest, forged)
    with pytest.raises(Rejected):
        decode_snapshot(forged, ABOUT, 6, key.public_key())


@pytest.mark.parametrize("signature", ["", "zz", "00", "00" * 64, "ff" * 64])
def test_nonsense_is_no_signature(signature):
    key = Ed25519PrivateKey.generate()
    about = {"format": federate.SNAPSHOT_FORMAT, **ABOUT}
    seal = {"digest": federate.compute_digest(about, PARAMETERS), "signature": signature}
    data = save({"parameters": PARAMETERS}, about | seal)
    decode_snapshot(data, ABOUT, 6)
    with pytest.raises(Rejected, match="sign"):
        decode_snapshot(data, ABOUT, 6, key.public_key())


def test_the_common_start_of_averages_is_signed_too(tmp_path, keys):
    """Round 0 of agent 0: a planted one is ignored, and agent 0 replaces it by its own."""
    path_of(tmp_path, 0, 0).parent.mkdir(parents=True)
    about = {"federation": "prpo", "agent": "0", "round": "0", "report": "nan"}
    planted = encode_snapshot(torch.full((4,), 9.0), about, Ed25519PrivateKey.generate())
    path_of(tmp_path, 0, 0).write_bytes(planted)
    options = {"trust": str(keys.trust), "averages": "replace"}
    impatient = join(tmp_path / "store", (1,), identity=str(keys.private[1]), **options)
    with pytest.raises(SystemExit):
        impatient.broadcast_start(torch.zeros(4))
    assert impatient.describe()["communication/rejected"] == 1  # though it has read it again
    options["timeout"] = 2.0
    first = join(tmp_path / "store", (0,), identity=str(keys.private[0]), **options)
    assert first.broadcast_start(torch.ones(4)).tolist() == [1] * 4
    second = join(tmp_path / "store", (1,), identity=str(keys.private[1]), **options)
    assert second.broadcast_start(torch.zeros(4)).tolist() == [1] * 4


def test_ctrl_c_ends_the_wait_for_the_common_start(tmp_path):
    waiting = join(tmp_path / "store", (1,), "replace", timeout=20.0)
    waiting.interrupted = lambda: signal.SIGINT
    with pytest.raises(SystemExit) as end:
        waiting.broadcast_start(torch.zeros(4))
    assert end.value.code == 130


def test_the_documented_commands_make_keys(tmp_path, monkeypatch):
    """The lines of the page make a key and its public part, which are loaded."""
    page = (REPOSITORY / "docs" / "federation.md").read_text()
    commands = re.findall(r"^openssl .*$", page, re.M)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trust").mkdir()
    for command in commands:
        subprocess.run(command.split("#")[0].split(), check=True)
    key = federate.load_identity("key.pem")
    assert federate.load_trust("trust") == {0: key.public_key()}


@on([PRPO_MINIGRID, FEDAVG_MINIGRID])
def test_two_agents_that_sign_train_as_two_that_do_not(script, tmp_path, keys, launched):
    """Agent 0 in this process, after agent 1 has finished: what it has read is the same."""
    settings = {"num_agents": 2, "eval_episodes": 0, "timeout": 0.1, "iterations": 3}
    for name in ("plain", "signed"):
        for i in (0, 1):
            words = ["--exchange", tmp_path / name, "--agent", i]
            if name == "signed":
                words += ["--identity", keys.private[i], "--trust", keys.trust]
            launched(*words)
            script.main(tiny(script, tmp_path / f"{name}_{i}", communicator="uniform", **settings))
    weights = [
        only_run(tmp_path / f"{name}_1") / "agent_1.safetensors" for name in ("plain", "signed")
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def complain(*words):
    """The one line on keys of agent 0 that cannot be used."""
    words = ["--exchange", "share", "--agent", "0", *map(str, words)]
    return refusal(federate.load_keys, communicators.read_flags(federate.Args, words))


def test_keys_that_cannot_be_used_end_in_one_line(tmp_path, keys):
    """Missing, encrypted, of another algorithm, or not the agent's own."""
    encrypted = tmp_path / "encrypted.pem"
    other = tmp_path / "rsa.pem"
    write_private(Ed25519PrivateKey.generate(), encrypted, password=b"secret")
    write_private(rsa.generate_private_key(public_exponent=65537, key_size=2048), other)
    assert "--identity" in complain("--identity", tmp_path / "nothing")
    assert "without password" in complain("--identity", encrypted)
    assert "Ed25519" in complain("--identity", other)
    assert "private key" in complain("--identity", keys.trust / "agent_0.pem")
    assert "needs --identity" in complain("--trust", keys.trust)
    identity = ["--identity", keys.private[0]]
    assert "agent_J.pem" in complain(*identity, "--trust", tmp_path)
    message = complain("--identity", keys.private[1], "--trust", keys.trust)
    assert message.startswith(f"--trust {keys.trust}: agent_0.pem is not the key")
    (keys.trust / "agent_2.pem").write_text("nonsense")
    assert "agent_2.pem" in complain(*identity, "--trust", keys.trust)


def test_bad_keys_are_refused_before_anything_is_trained(tmp_path, keys, launched):
    launched("--exchange", tmp_path / "store", "--agent", 0, "--trust", keys.trust)
    line = refusal(PRPO_MINIGRID.main, tiny(PRPO_MINIGRID, tmp_path / "runs"))
    assert line.startswith(f"--trust {keys.trust}: needs --identity")
    assert not (tmp_path / "runs").exists()


def test_keys_need_a_package(keys, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert "needs the package cryptography" in complain("--identity", keys.private[0])
