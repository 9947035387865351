"""What --dp-clip and --dp-noise make of a snapshot before it is sent, and what epsilon follows."""

import json
import math
import sys

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from helpers import (
    FEDAVG_MINIGRID,
    PRPO_ATARI,
    PRPO_MINIGRID,
    PRTRPO_MINIGRID,
    SLOW_ATARI,
    assert_same_run,
    on,
    only_run,
    refusal,
    rows_of,
    tiny,
    weights_of,
)
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from scipy.stats import kstest, norm
from test_rounds import alone, draw_participants, in_ranks, load, policies, stored_of

import communicators
from communicators import Peers, Privacy, clip_update

NOISY = {"communicator": "uniform", "dp_clip": 0.5, "dp_noise": 0.01}


def settings(**changes):
    """Settings with a clip and a noise."""
    return PRPO_MINIGRID.Args(**{"dp_clip": 0.5, "dp_noise": 0.2, "seed": 7} | changes)


def random_vectors(number, size, seed=0):
    """Different vectors of parameters."""
    return torch.randn(number, size, generator=torch.Generator().manual_seed(seed))


# --- the mechanism ---


@given(
    st.lists(st.tuples(*[st.floats(-1e3, 1e3, width=32)] * 2), min_size=1, max_size=20),
    st.floats(1e-3, 1e3),
)
def test_the_clip_is_numpys(pairs, max_norm):
    """before + u min(1, max_norm / |u|) for the update u, which is `after` where u is short."""
    before, after = np.array(pairs, dtype=np.float64).T
    clipped = clip_update(
        torch.tensor(before, dtype=torch.float32),
        torch.tensor(after, dtype=torch.float32),
        max_norm,
    )
    length = np.linalg.norm(after - before)
    factor = min(1.0, max_norm / length) if length else 1.0
    np.testing.assert_allclose(clipped, before + factor * (after - before), rtol=1e-4, atol=1e-3)


def test_a_short_update_is_left_as_it_is_bit_for_bit():
    """Also where subtracting and adding again would round; and what is not finite is not sent."""
    before, after = random_vectors(2, 1000) * torch.tensor([[1e3], [1e-3]])
    assert not torch.equal(before + (after - before), after)
    assert torch.equal(clip_update(before, after, 1e30), after)
    for value in (math.nan, math.inf):
        after[3] = value
        assert torch.equal(clip_update(before, after, 1e30), before)


def test_the_noise_is_gaussian_with_its_standard_deviation():
    """dp_noise * dp_clip on every parameter, around the clipped update, whatever its length."""
    theta, last_sent = random_vectors(2, 40_000)
    privacy = Privacy(settings(dp_clip=3.0, dp_noise=0.5))
    noise = privacy.protect(theta, last_sent, 1, 4) - clip_update(last_sent, theta, 3.0)
    assert kstest(noise / 1.5, norm.cdf).pvalue > 1e-3
    assert noise.std() == pytest.approx(1.5, rel=0.02)


def test_noise_is_drawn_anew_for_every_agent_snapshot_and_seed():
    """And the same again for the same one, so that a resumed run is the same run."""
    theta, last_sent = random_vectors(2, 5000)
    keys = [(7, 0, 0), (7, 0, 1), (7, 1, 0), (8, 0, 0)]
    noises = []
    for seed, agent, number in keys:
        privacy = Privacy(settings(seed=seed))
        first, second = (privacy.protect(theta, last_sent, agent, number) for _ in range(2))
        assert torch.equal(first, second)
        noises.append(first - clip_update(last_sent, theta, 0.5))
    correlations = torch.corrcoef(torch.stack(noises)) - torch.eye(len(keys))
    assert correlations.abs().max() < 0.1


def test_a_secret_key_hides_the_noise_from_those_who_know_the_seed(tmp_path):
    """Then it depends on what it hides too: a snapshot sent again has other noise if it differs."""
    paths = [tmp_path / name for name in ("a", "b")]
    for path in paths:
        path.write_bytes(path.name.encode() * 32)
    theta, other, last_sent = random_vectors(3, 5000)
    noises = []
    for path, sent in [(paths[0], theta), (paths[1], theta), (paths[0], other), ("", theta)]:
        privacy = Privacy(settings(dp_key=str(path)))
        first, second = (privacy.protect(sent, last_sent, 0, 0) for _ in range(2))
        assert torch.equal(first, second)
        noises.append(first - clip_update(last_sent, sent, 0.5))
    correlations = torch.corrcoef(torch.stack(noises)) - torch.eye(len(noises))
    assert correlations.abs().max() < 0.1


def test_secret_noise_is_gaussian_and_has_no_seed_that_can_be_guessed(tmp_path, monkeypatch):
    """Of a seed of torch's generator only 32 bits count: whoever has a noisy snapshot could try
    them all.
    """
    path = tmp_path / "key"
    path.write_bytes(bytes(range(32)))
    privacy = Privacy(settings(dp_clip=3.0, dp_noise=0.5, dp_key=str(path)))
    theta, last_sent = random_vectors(2, 40_000)
    clipped = clip_update(last_sent, theta, 3.0)
    noises = [privacy.protect(theta, last_sent, 0, 0) - clipped]
    assert kstest(noises[0] / 1.5, norm.cdf).pvalue > 1e-3
    assert noises[0].std() == pytest.approx(1.5, rel=0.02)
    for last in (b"1", b"2"):  # equal in all bytes that fit into a seed
        digest = b"x" * 31 + last
        monkeypatch.setattr(communicators.hmac, "digest", lambda *_, digest=digest: digest)
        noises.append(privacy.protect(theta, last_sent, 0, 0) - clipped)
    correlations = torch.corrcoef(torch.stack(noises)) - torch.eye(3)
    assert correlations.abs().max() < 0.05


# --- the rounds ---


def send(exchange, privacy, rounds=4, fraction=1.0, resume_after=None):
    """Rounds of uniform mixing in which every agent's network is a new one each time.

    Returns the peers, and what each agent held has got from every sender in each round.
    """
    n = exchange.num_agents
    states = random_vectors(6, 4)
    everybody = torch.ones(n, n, dtype=torch.bool)

    def start():
        return Peers(exchange, policies(n, (3, 5)), states, everybody, privacy)

    peers = start()
    received = []
    for number in range(1, rounds + 1):
        networks = policies(n, (3, 5), seed=number)
        networks = [networks[i] for i in exchange.agents]
        participating = draw_participants(n, fraction, number)
        peers.exchange_snapshots(networks, participating, everybody, number)
        uniform = communicators.uniform(n)
        peers.update(communicators.sparsify(uniform, participating.expand(n, n)))
        views = zip(exchange.agents, peers.views, strict=True)
        received.append({i: {j: flat(view[j]) for j in view} for i, view in views})
        if number == resume_after:
            stored = stored_of(peers.state())
            peers = start()
            load(peers.state(), stored)
            peers.restore()
    return peers, received


def test_snapshots_sent_since_the_checkpoint_count(monkeypatch):
    """Epsilon is about all that others may have seen, also what a run that was killed had sent."""
    exchange = alone(3)
    privacy = Privacy(settings())
    whole, _ = send(exchange, privacy)
    monkeypatch.setattr(exchange, "skip_rounds", lambda: 2)
    resumed, _ = send(exchange, privacy, resume_after=2)
    for k in range(3):
        epsilon = whole.describe_privacy(k)["privacy/epsilon"]
        assert epsilon == pytest.approx(privacy.compute_epsilon(4))
        epsilon = resumed.describe_privacy(k)["privacy/epsilon"]
        assert epsilon == pytest.approx(privacy.compute_epsilon(6))


def flat(network):
    """A network's parameters [numel]."""
    return communicators.flatten([network])[0]


@pytest.mark.parametrize(("ranks", "resume_after"), [(1, None), (2, None), (2, 2)])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_what_arrives_is_a_chain_of_clipped_and_noisy_updates(ranks, resume_after, fraction):
    """From the last snapshot *as it was sent*; who sits out sends nothing, and no noise is used up.

    In every placement and over a restart.
    """
    n = 4
    privacy = Privacy(settings(dp_clip=0.3))
    last_sent = [flat(network).numpy() for network in policies(n, (3, 5))]
    numbers = [0] * n
    expected = []
    for number in range(1, 5):
        participating = draw_participants(n, fraction, number)
        for i, network in enumerate(policies(n, (3, 5), seed=number)):
            if participating[i]:
                update = flat(network).numpy() - last_sent[i]
                assert np.linalg.norm(update) > 0.3
                clipped = last_sent[i] + update * (0.3 / np.linalg.norm(update))
                seed = communicators.derive_seed(7, i, numbers[i], communicators.PRIVACY)
                generator = torch.Generator().manual_seed(seed)
                noise = torch.randn(len(clipped), generator=generator).numpy()
                last_sent[i] = clipped + 0.2 * 0.3 * noise
                numbers[i] += 1
        expected.append(list(last_sent))

    def run(exchange):
        return send(exchange, privacy, fraction=fraction, resume_after=resume_after)

    for peers, received in in_ranks(ranks, n, run):
        held = list(peers.held)
        assert peers.sent[:, 0].tolist() == [numbers[i] for i in held]
        for number, views in enumerate(received, 1):
            participating = draw_participants(n, fraction, number)
            for i, view in views.items():
                if participating[i]:
                    assert set(view) == set(participating.nonzero().flatten().tolist())
                    for j, parameters in view.items():
                        sent = expected[number - 1][j]
                        np.testing.assert_allclose(parameters, sent, rtol=1e-4, atol=1e-5)


def test_without_noise_and_with_a_wide_clip_nothing_changes():
    """Bit for bit, and as many bytes: what is sent has the same size with noise too."""
    plain, expected = send(alone(3), None)
    wide, received = send(alone(3), Privacy(settings(dp_clip=1e30, dp_noise=0.0)))
    noisy, _ = send(alone(3), Privacy(settings()))
    for views, expected_views in zip(received, expected, strict=True):
        for i, view in views.items():
            assert all(torch.equal(view[j], expected_views[i][j]) for j in range(3))
    assert wide.exchange.bytes_sent == plain.exchange.bytes_sent > 0
    assert noisy.exchange.bytes_sent == plain.exchange.bytes_sent


def test_an_agent_that_has_diverged_sends_noise_around_its_last_snapshot():
    """Whether an update is finite is about data too, so that nobody is told."""
    privacy = Privacy(settings())
    networks = policies(2, (3,))
    everybody = torch.ones(2, 2, dtype=torch.bool)
    peers = Peers(alone(2), networks, random_vectors(6, 4), everybody, privacy)
    before = flat(networks[0])
    spoiled = policies(2, (3,), seed=1)
    spoiled[0].head.bias.data.fill_(math.nan)
    peers.exchange_snapshots(spoiled, everybody[0], everybody, 1)
    assert peers.usable.all()
    assert torch.equal(flat(peers.received[0]), privacy.protect(before, before, 0, 0))
    assert not torch.equal(flat(peers.received[0]), before)


def test_with_an_epsilon_no_number_is_reported(monkeypatch):
    """A mean return without noise would cross; elsewhere reports are what they were."""
    numbers = torch.tensor([1.0, 2.0], dtype=torch.float64)
    for communicator, crosses in (("uniform", False), ("similarity", False), ("reward", True)):
        exchange = alone(2)
        gathered = []
        monkeypatch.setattr(exchange, "all_gather", lambda x, to=gathered: to.append(x) or x)
        privacy = Privacy(settings(communicator=communicator))
        everybody = torch.ones(2, 2, dtype=torch.bool)
        peers = Peers(exchange, policies(2), random_vectors(6, 4), everybody, privacy)
        report = peers.report(numbers, policies(2))
        (sent,) = gathered
        assert bool(sent.isnan().all()) == (not crosses)
        assert report.tolist() == (
            [1, 2] if crosses else pytest.approx([math.nan] * 2, nan_ok=True)
        )


# --- epsilon ---


@pytest.mark.parametrize("noise", [2.0, 40.0])
def test_epsilon_is_that_of_the_gaussian_mechanism(noise):
    """Of theorem 8 of Balle and Wang (2018), and of an accountant that composes the snapshots.

    The sensitivity is twice the clip: an agent's clipped update may be replaced by its opposite.
    """
    epsilons = []
    for number in (1, 4, 30):
        epsilon = Privacy(settings(dp_noise=noise, dp_delta=1e-4)).compute_epsilon(number)
        mu = 2 * math.sqrt(number) / noise
        delta = norm.cdf(mu / 2 - epsilon / mu)
        delta -= math.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu))
        assert delta == pytest.approx(1e-4, rel=1e-3)
        accountant = PLDAccountant(value_discretization_interval=1e-3)
        accountant.compose(dp_event.GaussianDpEvent(noise / 2), number)
        assert epsilon == pytest.approx(accountant.get_epsilon(1e-4), rel=1e-2, abs=1e-3)
        epsilons.append(epsilon)
    assert 0 < epsilons[0] < epsilons[1] < epsilons[2]
    assert Privacy(settings()).compute_epsilon(0) == 0


def test_more_noise_or_a_larger_delta_is_a_smaller_epsilon():
    def epsilon(**changes):
        return Privacy(settings(**changes)).compute_epsilon(10)

    assert epsilon(dp_noise=2.0) < epsilon(dp_noise=1.0) < epsilon(dp_noise=0.001)
    assert epsilon(dp_delta=1e-2) < epsilon(dp_delta=1e-8)
    assert math.isfinite(epsilon(dp_noise=1e-6))


@pytest.mark.parametrize(
    ("communicator", "accounted"),
    [("uniform", True), ("self-preferred", True), ("similarity", True)]
    + [(name, False) for name in ("reward", "softmax-reward", "rank-reward", "surrogate")],
)
def test_there_is_no_epsilon_where_anything_crosses_without_noise(communicator, accounted):
    """Reported numbers, and weights from an agent's own rollout; nor is there one without noise."""
    assert Privacy(settings(communicator=communicator)).is_accounted == accounted
    assert not Privacy(settings(communicator=communicator, dp_noise=0.0)).is_accounted


def test_every_communicator_is_classified():
    """One that is new has no epsilon until somebody has thought about it."""
    names = set(communicators.list_communicators(PRPO_MINIGRID.Args))
    assert set(communicators.WITHOUT_REPORTS) < names


# --- runs ---


@pytest.fixture(scope="module")
def noisy_run(once):
    """noisy_run(script): the folder of a tiny run with noise."""

    def run(script):
        short = {"iterations": 3, "eval_episodes": 0}  # whole games are long
        changes = NOISY | (short if script is PRPO_ATARI else {})
        folder, _ = once(f"noisy_{script}", lambda out: script.main(tiny(script, out, **changes)))
        return only_run(folder)

    return run


@pytest.mark.parametrize(
    "script",
    [PRPO_MINIGRID, FEDAVG_MINIGRID, SLOW_ATARI],
    ids=str,
)
def test_a_run_logs_epsilon_and_the_updates(script, noisy_run):
    """For each agent after each round, in the log and the summary; a round every three updates."""
    folder = noisy_run(script)
    rows = rows_of(folder)
    privacy = Privacy(settings(**NOISY))
    for row in rows:
        sent = int(row["iteration"]) // 3
        assert float(row["epsilon"]) == pytest.approx(privacy.compute_epsilon(sent), rel=1e-5)
        assert (float(row["update_norm"]) > 0) == (sent > 0)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["privacy"]["delta"] == 1e-5
    rounds = summary["communication_rounds"]
    assert rounds == (1 if script is PRPO_ATARI else 2)
    assert summary["privacy"]["epsilon"] == pytest.approx([privacy.compute_epsilon(rounds)] * 3)


@pytest.mark.parametrize("script", [PRPO_MINIGRID, FEDAVG_MINIGRID], ids=str)
def test_a_resumed_run_sends_what_an_uninterrupted_one_sends(script, noisy_run, crashing, tmp_path):
    """After a crash between the rounds: its last snapshot and their number are in checkpoints."""
    args = tiny(script, tmp_path, **NOISY)
    crashing("complete", 2, 4, lambda: script.main(args))
    folder = only_run(tmp_path)
    script.main(script.parse_args(["--resume", str(folder)]))
    assert_same_run(folder, noisy_run(script), exactly=True)


@pytest.mark.parametrize("script", [PRPO_MINIGRID, FEDAVG_MINIGRID], ids=str)
def test_a_run_with_a_wide_clip_is_the_run_without(script, tmp_path):
    """Bit for bit, with as many bytes; its metrics are two more columns at most."""
    folders = []
    for name, changes in (("plain", {}), ("wide", {"dp_clip": 1e30})):
        script.main(tiny(script, tmp_path / name, iterations=3, communicator="uniform", **changes))
        folders.append(only_run(tmp_path / name))
    weights, expected = map(weights_of, folders)
    assert all(torch.equal(weights[i], expected[i]) for i in expected)
    plain, wide = (json.loads((folder / "summary.json").read_text()) for folder in folders)
    assert plain["communication_bytes"] == wide["communication_bytes"] > 0
    assert "privacy" not in wide
    columns = [set(rows_of(folder)[0]) for folder in folders]
    assert columns[1] - columns[0] == {"update_norm"}


@on([PRPO_MINIGRID, SLOW_ATARI])
def test_an_agent_without_peers_is_not_replaced_by_what_it_would_send(script, tmp_path):
    """Self-preference 1 is isolated training, whatever a snapshot of averages would hold."""
    folders = []
    for name, changes in (("plain", {}), ("noisy", {"dp_clip": 0.01, "dp_noise": 1.0})):
        changes |= {"communicator": "self-preferred", "self_preference": 1.0, "eval_episodes": 0}
        changes |= {"aggregation": "weights", "local_updates": 1, "iterations": 1}
        args = tiny(script, tmp_path / name, **changes)
        script.main(args)
        folders.append(only_run(tmp_path / name))
    weights, expected = map(weights_of, folders)
    assert all(torch.equal(weights[i], expected[i]) for i in expected)


@on([PRPO_MINIGRID, PRTRPO_MINIGRID])
def test_rounds_before_the_first_checkpoint_count_after_a_crash(script, tmp_path, crashing):
    """Peers may have read them: their numbers are not used again, and epsilon counts them."""
    place = {"exchange": str(tmp_path / "store"), "agents": (0,), "num_agents": 2}
    settings = place | {"local_updates": 1, "save_every": 3, "eval_episodes": 0, "iterations": 4}
    if script is PRPO_MINIGRID:  # PR-TRPO sends without a clip
        settings |= NOISY
    args = tiny(script, tmp_path / "runs", **settings)
    crashing("not in its place", 0, 3, lambda: script.main(args))
    folder = only_run(tmp_path / "runs")
    assert not list(folder.glob("checkpoints/*/*.pt"))
    summary = script.main(script.parse_args(["--resume", str(folder)]))
    assert summary["completed"]
    newest = max((tmp_path / "store" / "prpo" / "agent_0").glob("round_*"))
    assert newest.name == f"round_{3 + 4:08}.safetensors"
    if script is PRPO_MINIGRID:
        logged = float(rows_of(folder)[-1]["epsilon"])
        assert logged == pytest.approx(Privacy(args).compute_epsilon(7), rel=1e-4)


def test_the_files_of_a_federation_hold_what_is_clipped_and_noisy(tmp_path):
    """Nothing else leaves an agent: a file follows from the one before and its parameters."""
    script = PRPO_MINIGRID
    place = {"exchange": str(tmp_path / "store"), "agents": (1,), "num_agents": 2}
    args = tiny(script, tmp_path / "runs", **NOISY | place | {"eval_episodes": 0})
    script.main(args)
    agent = script.make_agents(args)[1]
    agent.load_state_dict(load_file(only_run(tmp_path / "runs") / "agent_1.safetensors"))
    theta = flat(agent)
    snapshots = []
    for number in (1, 2):
        path = tmp_path / "store" / "prpo" / "agent_1" / f"round_{number:08}.safetensors"
        about = {"federation": "prpo", "agent": "1", "round": str(number)}
        parameters, about = communicators.decode_snapshot(path.read_bytes(), about, len(theta))
        assert about["report"] == "nan"
        snapshots.append(parameters)
    expected = Privacy(args).protect(theta, snapshots[0], 1, 1)
    assert torch.equal(snapshots[1], expected)
    assert not torch.equal(expected, theta)
    summary = json.loads((only_run(tmp_path / "runs") / "summary.json").read_text())
    assert summary["privacy"]["epsilon"] == [pytest.approx(Privacy(args).compute_epsilon(2))]


def test_averages_are_of_what_was_sent(tmp_path, monkeypatch):
    """FedAvg: after a round all agents are the mean of the noisy snapshots, of their own too."""
    seen = []
    update = Peers.update

    def watch(peers, communicator):
        seen.append(torch.stack([flat(peers.received[j]) for j in range(3)]))
        update(peers, communicator)

    monkeypatch.setattr(Peers, "update", watch)
    FEDAVG_MINIGRID.main(tiny(FEDAVG_MINIGRID, tmp_path, **NOISY | {"iterations": 3}))
    (snapshots,) = seen
    weights = weights_of(only_run(tmp_path))
    for i in range(3):
        torch.testing.assert_close(weights[i].sort()[0], snapshots.mean(0).sort()[0])
    assert (snapshots[0] - snapshots[1]).norm() > 0.5


def test_an_agent_trains_on_without_noise(tmp_path, monkeypatch):
    """Mixing policies: noise changes what peers see, and not the agent that sends it."""
    seen = []
    exchange_snapshots = Peers.exchange_snapshots

    def watch(peers, networks, *inputs):
        before = communicators.flatten(networks)
        exchange_snapshots(peers, networks, *inputs)
        assert torch.equal(communicators.flatten(networks), before)
        seen.append((before[0], flat(peers.received[0])))

    monkeypatch.setattr(Peers, "exchange_snapshots", watch)
    PRPO_MINIGRID.main(tiny(PRPO_MINIGRID, tmp_path, **NOISY))
    assert len(seen) == 2
    assert not any(torch.equal(agent, sent) for agent, sent in seen)


def test_the_agents_of_a_private_run_can_be_played(noisy_run, capsys):
    """--eval-only sends nothing, so that neither communicator nor key matters."""
    folder = noisy_run(PRPO_MINIGRID)
    args = PRPO_MINIGRID.parse_args(["--eval-only", str(folder), "--eval-episodes", "2"])
    PRPO_MINIGRID.evaluate_run(args)
    assert "mean return of 2 episodes" in capsys.readouterr().out


# --- arguments ---

BAD = {
    "noise without clip": (["--dp-noise", "1"], "--dp-noise 1.0: needs --dp-clip"),
    "delta without clip": (["--dp-delta", "0.1"], "--dp-delta 0.1: needs --dp-clip"),
    "key without clip": (["--dp-key", "x"], "--dp-key x: needs --dp-clip"),
    "clip of 0": (["--dp-clip", "0"], "--dp-clip 0.0: must be positive"),
    "infinite clip": (["--dp-clip", "inf"], "--dp-clip inf: must be finite"),
    "negative noise": (["--dp-clip", "1", "--dp-noise", "-1"], "--dp-noise -1.0: must not be"),
    "noise of NaN": (["--dp-clip", "1", "--dp-noise", "nan"], "--dp-noise nan: must be finite"),
    "delta of 0": (["--dp-clip", "1", "--dp-delta", "0"], "--dp-delta 0.0: must lie in (0, 1)"),
    "delta of 1": (["--dp-clip", "1", "--dp-delta", "1"], "--dp-delta 1.0: must lie in (0, 1)"),
    "no such key": (
        ["--dp-clip", "1", "--dp-key", "/nowhere"],
        "--dp-key /nowhere: must be a file",
    ),
    "isolated agents": (["--dp-clip", "1", "--communicator", "identity"], "--dp-clip 1.0: has no"),
}


@on([PRPO_MINIGRID, PRPO_ATARI])
@pytest.mark.parametrize("case", BAD)
def test_nonsense_ends_in_one_line(script, case):
    argv, beginning = BAD[case]
    assert refusal(script.parse_args, argv).startswith(beginning)


def test_a_key_that_can_be_guessed_is_refused(tmp_path):
    (tmp_path / "key").write_bytes(b"secret")
    argv = ["--dp-clip", "1", "--dp-key", str(tmp_path / "key")]
    assert "16 bytes" in refusal(PRPO_MINIGRID.parse_args, argv)


def test_without_the_accountant_one_line_says_so(monkeypatch):
    """Where an epsilon would be computed; noise alone does not need it."""
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    argv = ["--dp-clip", "1", "--dp-noise", "1"]
    assert "dp-accounting" in refusal(PRPO_MINIGRID.parse_args, argv)
    assert PRPO_MINIGRID.parse_args([*argv, "--communicator", "reward"]).dp_noise == 1
