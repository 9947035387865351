"""Communication rounds: what is sent, what arrives and who uses it, which snapshots count, and what
a communicator reads.
"""

import contextlib
import gc
import json
import math
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from exchange import DTYPES, SIZES, make_flat, play
from helpers import (
    FEDAVG_ATARI,
    FEDAVG_MINIGRID,
    FEDAVG_MUJOCO,
    PRPO_ATARI,
    PRPO_MINIGRID,
    PRPO_MUJOCO,
    PRTRPO_MINIGRID,
    REPOSITORY,
    SLOW_ATARI,
    assert_same_run,
    config_of,
    flags,
    gate_by_hand,
    notes_of,
    on,
    only_run,
    refusal,
    resume,
    rows_of,
    run_ranks,
    scalars_of,
    summary_of,
    table_of,
    tiny,
    told_to_launcher,
    total_variation,
    weights_of,
)
from spoil import SPOILS, spoil

import communicators
import prpo_minigrid
from communicators import Exchange

NAN = math.nan
ON_MINIGRID = [PRPO_MINIGRID, FEDAVG_MINIGRID, PRTRPO_MINIGRID]
ON_MUJOCO = [PRPO_MUJOCO, FEDAVG_MUJOCO]
ALL = [*ON_MINIGRID, PRPO_ATARI, FEDAVG_ATARI, *ON_MUJOCO]
SLOW_FEDAVG_ATARI = pytest.param(FEDAVG_ATARI, marks=pytest.mark.slow)
QUICK = [*ON_MINIGRID, PRPO_ATARI, SLOW_FEDAVG_ATARI, *ON_MUJOCO]
TOOLS = REPOSITORY / "tests" / "tools"

# A round after every iteration of one short rollout
SHORT = {
    "iterations": 1,
    "local_updates": 1,
    "save_every": 100,
    "communicator": "uniform",
    "num_envs": 1,
    "num_steps": 8,
    "num_minibatches": 1,
    "update_epochs": 1,
    "eval_episodes": 0,
}


def short_settings(script, changes):
    """The settings of a short run with small networks."""
    settings = SHORT | changes
    if script.family != "Atari":
        settings = {"hidden_sizes": (8,) * settings.get("num_agents", 3)} | settings
    return settings


def train(script, run_dir, **changes):
    """A short run in this process. Returns its folder."""
    script.main(tiny(script, run_dir, **short_settings(script, changes)))
    return only_run(run_dir)


def count_parameters(script, hidden=8):
    """How many parameters an agent of a short run sends."""
    if script.family == "Atari":
        return script.parameters
    return len(communicators.flatten(script.of_family.Agent(*script.sizes, hidden)))


def matrices_of(folder):
    """communicator.csv: iteration -> (C, distances), each as rows of numbers."""
    rows = table_of(folder, "communicator")
    n = 1 + max(int(row["listener"]) for row in rows)
    matrices = {}
    for row in rows:
        pair = matrices.setdefault(int(row["iteration"]), torch.full((2, n, n), NAN))
        place = int(row["listener"]), int(row["peer"])
        pair[0][place] = float(row["weight"])
        pair[1][place] = float(row["distance"] or "nan")
    return {number: tuple(pair) for number, pair in matrices.items()}


def flat_policy(agent):
    """What an agent sends: in PR-TRPO its policy alone."""
    return communicators.flatten(getattr(agent, "policy", agent))


# --- a round of the exchange ---


@pytest.fixture(scope="module")
def rounds_of_ranks(once):
    """What each of three processes has received, see tools/exchange.py; and all that they print."""

    def make(folder):
        return run_ranks(3, TOOLS / "exchange.py", cwd=folder)

    _, output = once("exchange", make)
    lines = [line for line in output.splitlines() if line]
    results = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(results) == 3
    return results, [line for line in lines if not line.startswith("{")]


@pytest.fixture(params=["one process", "three ranks"])
def placement(request, capsys):
    """What each process has received, and what they print apart from it."""
    if request.param == "three ranks":
        return request.getfixturevalue("rounds_of_ranks")
    results = play(Exchange(len(SIZES)))
    return [results], capsys.readouterr().out.split("\n")[1:-1]


DROPPED = "dropped the invalid snapshots of agents [1, 4] for this round"


def test_a_round_gives_all_what_each_has_sent(placement):
    """Tensors of different sizes and of these types, exactly; one number of each agent; copies,
    which stay as they are while the agents go on.
    """
    results, _ = placement
    for result in results:
        for dtype in DTYPES:
            there = result[str(dtype)]
            assert there["received"] == [make_flat(i, dtype).tolist() for i in range(6)]
            assert there["dtypes"] == [str(dtype)] * 6
            assert there["reports"] == [0, 0.5, 1, 1.5, None, 2.5]
            assert there["reports' dtype"] == "torch.float64"
            assert there["later"] == there["recalled"] == there["received"]
        equal = result["equal sizes"]
        assert equal["received"] == [[i] * 3 for i in range(6)]


def test_what_is_not_finite_is_missing_with_one_line(placement):
    """Where nobody reads numbers none is sent: all that moves are the tensors."""
    results, printed = placement
    assert printed == [DROPPED]
    held = 6 // len(results)
    for result in results:
        there = result["spoiled"]
        expected = [make_flat(i, torch.float32).tolist() for i in range(6)]
        expected[1] = expected[4] = None
        assert there["received"] == there["recalled"] == there["later"] == expected
        assert there["reports"] == [None] * 6
        if len(results) > 1:
            assert there["gathers"] == [[[held, max(SIZES)], "float32"]]
            with_numbers = [[[held, 1], "float64"], [[held, max(SIZES)], "uint8"]]
            assert result["torch.uint8"]["gathers"] == with_numbers


def test_isolated_agents_gather_nothing(placement):
    """Each process has what its own agents have sent, also after a resume."""
    results, _ = placement
    for rank, result in enumerate(results):
        there = result["isolated"]
        held = range(6)[rank * 6 // len(results) : (rank + 1) * 6 // len(results)]
        expected = [make_flat(i, torch.float32).tolist() if i in held else None for i in range(6)]
        assert there["received"] == there["later"] == there["recalled"] == expected
        assert there["reports"] == [None] * 6
        assert there["gathers"] == []


@contextlib.contextmanager
def watching(monkeypatch, script):
    """Within this context of a run: what agents are, and what rounds and references are made of."""
    seen = SimpleNamespace(sent=[], numbers=[], before=[], after=[], references=[])
    play_round = Exchange.round
    update = script.update

    def watch_round(exchange, sent, numbers=None, sizes=None):
        seen.sent.append([flat.clone() for flat in sent])
        seen.numbers.append(None if numbers is None else numbers.tolist())
        return play_round(exchange, sent, numbers, sizes)

    def watch_update(agent, *inputs):
        seen.before.append(flat_policy(agent))
        result = update(agent, *inputs)
        seen.after.append(flat_policy(agent))
        return result

    def watch_statistics(agent, obs):
        update_statistics(agent, obs)
        seen.after[-1] = flat_policy(agent)

    monkeypatch.setattr(Exchange, "round", watch_round)
    script.patch(monkeypatch, "update", watch_update)
    if script.family == "MuJoCo":  # statistics of observations follow the update
        update_statistics = script.of_family.Agent.update_statistics
        monkeypatch.setattr(script.of_family.Agent, "update_statistics", watch_statistics)
    if not script.averages:
        compute_reference = script.compute_reference

        def watch_reference(i, *inputs):
            snapshots = inputs[-3]
            flat = {j: communicators.flatten(network) for j, network in snapshots.items()}
            seen.references.append((i, flat))
            return compute_reference(i, *inputs)

        script.patch(monkeypatch, "compute_reference", watch_reference)
    yield seen


def average_by_hand(script, sent):
    """What [agents, numbers] become in FedAvg, of equal weights: the mean, but on MuJoCo the mean
    and variance of observations are those of all samples.
    """
    average = sent.mean(0)
    if script.family == "MuJoCo":  # log_std of 3 actions, a count, means and variances
        counts, means, variances, _ = sent[:, 3:].split([1, 11, 11, sent.shape[1] - 26], dim=1)
        shares = counts / counts.sum()
        mean = (shares * means).sum(0)
        average[4:15] = mean
        average[15:26] = (shares * (variances + means**2)).sum(0) - mean**2
    return average


@on(QUICK)
def test_rounds_send_what_agents_are_then_and_the_interval_uses_it(script, tmp_path, monkeypatch):
    """Each round the present parameters; references, or averages, are made of those of the last
    round, however far agents have gone on since.
    """
    n = 3
    with watching(monkeypatch, script) as seen:
        train(script, tmp_path, iterations=5, local_updates=2)
    after = [seen.after[k : k + n] for k in range(0, 5 * n, n)]  # of each iteration
    before = [seen.before[k : k + n] for k in range(0, 5 * n, n)]
    assert len(seen.sent) == 2
    assert seen.numbers == [None, None]  # which the uniform communicator does not read
    for number, iteration in enumerate((2, 4)):
        for i in range(n):
            assert torch.equal(seen.sent[number][i], after[iteration - 1][i])
            assert not torch.equal(seen.sent[number][i], after[iteration - 2][i])
    if script.averages:
        for number, iteration in enumerate((2, 4)):
            average = average_by_hand(script, torch.stack(seen.sent[number]))
            for i in range(n):
                torch.testing.assert_close(before[iteration][i], average, rtol=1e-6, atol=1e-6)
                assert not torch.equal(before[iteration][i], after[iteration - 1][i])
        return
    assert [i for i, _ in seen.references] == [*range(n)] * 5
    for number, (i, snapshots) in enumerate(seen.references):
        last_round = (0, 0, 1, 1, 2)[number // n]
        if last_round == 0:  # nobody has sent anything: an agent has its own start
            assert torch.equal(snapshots[i], before[0][i])
            continue
        assert sorted(snapshots) == [0, 1, 2]
        for j, flat in snapshots.items():
            assert torch.equal(flat, seen.sent[last_round - 1][j])


# --- bytes ---

WITHOUT_TRANSPOSE = "0.5,0.5,0\n0,1,0\n0.2,0.3,0.5\n"  # column 1 has two listeners, row 1 none


@pytest.mark.parametrize(
    ("settings", "listeners"),
    [
        ({"num_agents": 4}, [3, 3, 3, 3]),
        ({"num_agents": 5, "topology": "ring"}, [2, 2, 2, 2, 2]),
        ({"num_agents": 4, "top_k": 1}, [1, 1, 1, 1]),
        ({"communicator": "matrix.csv", "hidden_sizes": (8, 16, 24)}, [1, 2, 0]),
        ({"hidden_sizes": (8, 16, 24)}, [2, 2, 2]),
        # All neighbours are compared before the heaviest is known
        ({"num_agents": 4, "communicator": "similarity", "top_k": 1}, [3, 3, 3, 3]),
        ({"num_agents": 5, "communicator": "surrogate", "topology": "ring"}, [2, 2, 2, 2, 2]),
        ({"communicator": "identity"}, [0, 0, 0]),
        ({"communicator": "self-preferred", "self_preference": 1.0}, [0, 0, 0]),
        # No return yet: uniform rows
        ({"communicator": "reward"}, [2, 2, 2]),
    ],
    ids=str,
)
def test_bytes_are_the_senders_sizes_times_its_listeners(settings, listeners, tmp_path):
    """By hand: column j of C says who listens to agent j."""
    (tmp_path / "matrix.csv").write_text(WITHOUT_TRANSPOSE)
    if settings.get("communicator") == "matrix.csv":
        settings = settings | {"communicator": str(tmp_path / "matrix.csv")}
    folder = train(PRPO_MINIGRID, tmp_path / "runs", **settings, iterations=2)
    hidden_sizes = settings.get("hidden_sizes", (8,) * len(listeners))
    sizes = [count_parameters(PRPO_MINIGRID, hidden) for hidden in hidden_sizes]
    expected = sum(4 * size * number for size, number in zip(sizes, listeners, strict=True))
    assert summary_of(folder)["communication_bytes"] == 2 * expected
    per_iteration = [int(row["communication_bytes"]) for row in rows_of(folder)[:: len(listeners)]]
    assert per_iteration == [expected, 2 * expected]


@on([FEDAVG_MINIGRID, PRTRPO_MINIGRID, PRPO_ATARI, FEDAVG_ATARI, *ON_MUJOCO])
def test_every_script_counts_bytes_by_listeners(script, tmp_path):
    """Agent 1 listens to agent 0 and agent 2 to both; agent 1's snapshot is not usable."""
    (tmp_path / "matrix.csv").write_text("1,0,0\n0.5,0.5,0\n0.2,0.3,0.5\n")
    settings = {"communicator": str(tmp_path / "matrix.csv")}
    if script in (PRTRPO_MINIGRID, PRPO_MUJOCO):  # which may have different sizes, as on MiniGrid
        settings["hidden_sizes"] = (8, 16, 24)
    with spoil("value", [1], [1]):
        folder = train(script, tmp_path / "runs", **settings)
    summary = summary_of(folder)
    assert summary["communication_bytes"] == 4 * 2 * count_parameters(script)


@on(ON_MINIGRID)
@pytest.mark.parametrize(("name", "pairs"), [("uniform", 4), ("similarity", 6), ("surrogate", 6)])
@pytest.mark.parametrize("kind", ["nan", "value"])
def test_bytes_of_an_unusable_snapshot_count_where_it_is_read(script, name, pairs, kind, tmp_path):
    """Nobody listens to agent 1; where policies are compared, each peer has looked at it."""
    with spoil(kind, [1], [1]):
        folder = train(script, tmp_path, communicator=name)
    summary = summary_of(folder)
    assert summary["communication_bytes"] == 4 * pairs * count_parameters(script)


def test_who_takes_an_invalid_agents_place_is_counted(tmp_path):
    """With top-k the next peer is chosen: its parameters are sent instead."""
    settings = {"num_agents": 5, "top_k": 1}
    with spoil("nan", [1], [1]):
        folder = train(PRPO_MINIGRID, tmp_path, **settings)
    C, _ = matrices_of(folder)[1]
    chosen = [(C[i] > 0).nonzero().flatten().tolist() for i in range(5)]
    assert chosen == [[0, 2], [2], [2, 3], [3, 4], [0, 4]]
    summary = summary_of(folder)
    assert summary["communication_bytes"] == 5 * 4 * count_parameters(PRPO_MINIGRID)


# --- snapshots that cannot be used ---

OVERFLOW = (
    "dropped agents [1] for this round: their policies or values are not finite, or too large"
)
LINES = {
    "nan": DROPPED.replace("[1, 4]", "[1]"),
    "infinity": DROPPED.replace("[1, 4]", "[1]"),
    "policy": OVERFLOW,
    "value": OVERFLOW,
}
CASES = [(script, kind) for script in ON_MINIGRID for kind in SPOILS]
CASES += [(PRPO_ATARI, "policy"), (FEDAVG_ATARI, "value")]
CASES += [(script, kind) for script in ON_MUJOCO for kind in SPOILS]


@pytest.mark.parametrize(("script", "kind"), CASES, ids=str)
def test_an_unusable_snapshot_counts_for_nobody_in_its_round(script, kind, tmp_path, capsys):
    """The listeners' rows are renormalised, its sender listens to the others, one line says so, and
    the log has it; the next round is an ordinary one.
    """
    with spoil(kind, [1], [2]):
        folder = train(script, tmp_path, iterations=3)
    assert capsys.readouterr().out.count(LINES[kind]) == 1
    matrices = matrices_of(folder)
    for number in (1, 3):
        C, distances = matrices[number]
        torch.testing.assert_close(C, torch.full((3, 3), 1 / 3), rtol=0, atol=1e-5)
        assert distances.isfinite().all()
    C, distances = matrices[2]
    torch.testing.assert_close(C, torch.tensor([[0.5, 0.0, 0.5]] * 3))
    assert distances[1].isnan().all() and distances[:, 1].isnan().all()
    assert distances[[0, 2]][:, [0, 2]].isfinite().all()
    rows = rows_of(folder)
    assert [int(row["dropped"]) for row in rows] == [0] * 3 + [1] * 3 + [0] * 3
    assert [value for _, value in scalars_of(folder)["communication/dropped"]] == [0, 1, 0]
    assert all(math.isfinite(float(row["policy_loss"])) for row in rows)
    assert all(weights.isfinite().all() for weights in weights_of(folder).values())


# Finite numbers by which listeners would diverge: far means, wide and narrow policies, and
# statistics of observations
HOSTILE = [
    ("actor.bias", 1e18),
    ("actor_log_std", 40.0),
    ("actor_log_std", -40.0),
    ("obs_count", -256.0),
    ("obs_mean", 3e38),
    ("obs_var", -1.0),
]


@on(ON_MUJOCO)
def test_gaussians_that_would_ruin_listeners_are_left_out(script, tmp_path, capsys):
    """The others learn, bit for bit, as beside an agent that sends NaN."""

    def learn(name):
        return weights_of(train(script, tmp_path / name, iterations=3, num_steps=32))

    with spoil("nan", [1], [1, 2, 3]):
        expected = learn("nan")
    for number, (name, value) in enumerate(HOSTILE):
        capsys.readouterr()

        def change(flat, name=name, value=value):
            network = script.new_agent(hidden=8)
            communicators.unflatten(flat, network)
            network.state_dict()[name].fill_(value)
            flat[:] = communicators.flatten(network)

        with mock.patch.dict(SPOILS, hostile=change), spoil("hostile", [1], [1, 2, 3]):
            weights = learn(str(number))
        assert capsys.readouterr().out.count(LINES["policy"]) == 3, name
        assert all(torch.equal(weights[i], expected[i]) for i in expected), name
    assert all(of_agent.isfinite().all() for of_agent in expected.values())


@on([PRPO_MINIGRID, PRPO_MUJOCO])
@pytest.mark.parametrize(
    ("mixture", "direction"),
    [("arithmetic", "forward"), ("arithmetic", "reverse"), ("geometric", "reverse")],
)
@pytest.mark.parametrize("bad", [NAN, -math.inf, -3e38, 1e12])
def test_who_hears_only_a_ruinous_policy_goes_on_learning(
    script, mixture, direction, bad, tmp_path, monkeypatch
):
    """On public states it looks like any other; in some of the listener's it is bad."""
    (tmp_path / "matrix.csv").write_text("0,1,0\n0,1,0\n0,0.5,0.5\n")
    compute_reference = script.module.compute_reference

    def ruin(i, *others):
        *_, peers, _, _ = others
        if 1 not in peers:  # before the first round
            return compute_reference(i, *others)
        predict = peers[1].predict

        def predict_badly(obs):
            policy, values = predict(obs)
            policy[::3, 0] = bad
            return policy, values

        with mock.patch.object(peers[1], "predict", predict_badly):
            return compute_reference(i, *others)

    monkeypatch.setattr(script.module, "compute_reference", ruin)
    settings = {"communicator": str(tmp_path / "matrix.csv"), "kl_direction": direction}
    folder = train(script, tmp_path / "runs", iterations=2, mixture=mixture, **settings)
    for row in rows_of(folder):
        for name in ("policy_loss", "kl_reference"):
            assert math.isfinite(float(row[name]))


@pytest.mark.parametrize("mixture", communicators.MIXTURES)
@pytest.mark.parametrize("direction", communicators.KL_DIRECTIONS)
def test_a_reference_without_a_policy_in_a_state_is_nan_there(mixture, direction):
    """Also of one sender, whose policy the reference is elsewhere. So is the agent's own there."""
    script = PRPO_MUJOCO
    agent, peer = (script.new_agent(hidden=8) for _ in range(2))
    obs = script.random_obs(3)
    obs[1, 2] = NAN
    batch = {"obs": obs, "policy": agent.predict(obs)[0], "values": torch.zeros(3)}
    C = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    args = script.Args(mixture=mixture, kl_direction=direction)
    reference, _ = script.compute_reference(0, agent, batch, {1: peer}, C, args)
    policy = torch.zeros(3, 3), torch.zeros(3)
    kl = communicators.kl_to_gaussians(*policy, reference, direction)
    assert kl.isnan().tolist() == [False, True, False]


PLACED = [
    (PRPO_MINIGRID, "nan"),
    pytest.param(FEDAVG_MINIGRID, "policy", marks=pytest.mark.slow),
    pytest.param(PRTRPO_MINIGRID, "value", marks=pytest.mark.slow),
    pytest.param(PRPO_ATARI, "value", marks=pytest.mark.slow),
    pytest.param(FEDAVG_ATARI, "policy", marks=pytest.mark.slow),
    (PRPO_MUJOCO, "policy"),
    pytest.param(FEDAVG_MUJOCO, "value", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("script", "kind"), PLACED, ids=str)
def test_ranks_leave_out_what_one_process_leaves_out(script, kind, tmp_path):
    """The same rows of C, metrics and weights; all processes together print one line."""
    settings = SHORT | {"iterations": 3, "communicator": "surrogate"}
    if script.family == "MuJoCo":  # the product for a single environment rounds otherwise
        settings["num_envs"] = 2
    with spoil(kind, [1], [2]):
        script.main(tiny(script, tmp_path / "whole", **settings))
    words = script.__name__, kind, 1, 2, *flags(script, tmp_path / "ranks", **settings)
    output = run_ranks(3, TOOLS / "spoil.py", *words, cwd=tmp_path)
    assert output.count(LINES[kind]) == 1
    whole = only_run(tmp_path / "whole")
    ranks = only_run(tmp_path / "ranks")
    # On Atari the agents of a process are one product, which rounds otherwise than one agent's
    exactly = script.family != "Atari"
    assert_same_run(ranks, whole, exactly)
    if exactly:
        logged = [(folder / "communicator.csv").read_text() for folder in (ranks, whole)]
        assert logged[0] == logged[1]
    C, _ = matrices_of(ranks)[2]
    assert not C[:, 1].any() and (C[:, [0, 2]] > 0).all()


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        *((script, "nan") for script in (*ON_MINIGRID, *ON_MUJOCO)),
        (PRPO_MINIGRID, "policy"),
        (FEDAVG_MINIGRID, "value"),
        pytest.param(PRPO_ATARI, "nan", marks=pytest.mark.slow),
        pytest.param(FEDAVG_ATARI, "nan", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_rounds_in_which_all_snapshots_are_unusable_leave_agents_alone(
    script, kind, tmp_path, capsys
):
    """They go on as isolated agents do, bit for bit; an agent's part of its reference is its
    present policy, also with --self-reference snapshot if its snapshot is not finite.
    """
    iterations = 2 if script.family == "Atari" else 3
    settings = {"iterations": iterations}
    alone = train(script, tmp_path / "alone", **settings, communicator="identity")
    capsys.readouterr()
    if kind == "nan" and not script.averages:
        settings["self_reference"] = "snapshot"
    with spoil(kind, [0, 1, 2], [1, 2, 3]):
        folder = train(script, tmp_path / "spoiled", **settings)
    line = LINES[kind].replace("[1]", "[0, 1, 2]")
    assert capsys.readouterr().out.count(line) == iterations
    assert [int(row["dropped"]) for row in rows_of(folder)] == [3] * 3 * iterations
    C, _ = matrices_of(folder)[1]
    assert torch.equal(C, torch.eye(3))
    expected = weights_of(alone)
    for i, weights in weights_of(folder).items():
        assert torch.equal(weights, expected[i])


def answer(logits, values):
    """A network that has these outputs, whatever it is shown."""
    return SimpleNamespace(predict=lambda obs: (logits, values))


@pytest.mark.parametrize("gate", ["none", "value"])
def test_an_agents_missing_snapshot_is_replaced_by_its_present_policy(gate):
    """In its own reference, with its present critic; else --self-reference says which of the two it
    is.
    """
    log_probs = torch.randn(3, 5, 7).log_softmax(-1)
    policies = log_probs.exp()
    values = torch.rand(3, 5)
    peer, snapshot, _ = map(answer, log_probs, values)
    batch = {"obs": None, "policy": log_probs[2], "state_values": values[2]}
    batch["returns"] = torch.tensor([values.min() - 0.1, values.max()])
    batch["obs_inds"] = torch.tensor([0, 1, 1, 4])
    C = torch.tensor([[0.25, 0.75], [0.0, 1.0]])
    for self_reference, snapshots, kind in (
        ("behaviour", {0: snapshot, 1: peer}, 2),
        ("snapshot", {0: snapshot, 1: peer}, 1),
        ("snapshot", {1: peer}, 2),
        ("behaviour", {1: peer}, 2),
    ):
        args = prpo_minigrid.Args(self_reference=self_reference, gate=gate)
        reference, _ = prpo_minigrid.compute_reference(0, batch, snapshots, C, args)
        rows = [[0.25, 0.75]] * 5
        if gate == "value":
            promised = values[[kind, 0]].tolist()
            rows = gate_by_hand(rows[0], promised, batch["returns"].tolist(), batch["obs_inds"])
        own_weight, of_peer = torch.tensor(rows).T[..., None]
        expected = own_weight * policies[kind] + of_peer * policies[0]
        torch.testing.assert_close(reference.exp(), expected)


@pytest.mark.parametrize("mixture", communicators.MIXTURES)
def test_a_peer_without_a_policy_in_a_state_has_no_vote_there(mixture):
    """Where it promises most and the agent itself nothing, the reference is the agent's policy."""
    policy, logits = torch.randn(2, 5, 7).log_softmax(-1)
    logits[[1, 3]] = NAN
    promised = torch.tensor([[0.5, 0.5, 0.0, 0.0, 1.0], [0.9, 1.0, 0.2, 1.0, 0.4]])
    peer = answer(logits, promised[1])
    batch = {"obs": None, "policy": policy, "state_values": promised[0]}
    batch["returns"] = torch.tensor([0.0, 1.0])
    batch["obs_inds"] = torch.arange(5)
    C = torch.full((2, 2), 0.5)
    args = prpo_minigrid.Args(gate="value", mixture=mixture)
    reference, weights = prpo_minigrid.compute_reference(0, batch, {1: peer}, C, args)
    assert reference.isfinite().all()
    torch.testing.assert_close(reference[[1, 3]], policy[[1, 3]])
    promised[1, [1, 3]] = NAN
    expected = gate_by_hand([0.5, 0.5], promised.tolist(), [0.0, 1.0])
    expected[3] = [0.5, 0.5]  # where nobody has a vote
    torch.testing.assert_close(weights.T, torch.tensor(expected))


@pytest.mark.parametrize("kind", ["policy", "value"])
def test_what_is_finite_but_no_policy_is_nan_on_the_public_states(kind, capsys):
    """Parameters of 3e38 are finite; their log-probabilities, or the squares of their values, are
    not.
    """
    script = PRPO_MINIGRID
    networks = {j: script.new_agent() for j in (0, 1, 3)}
    flat = communicators.flatten(networks[1])
    SPOILS[kind](flat)
    communicators.unflatten(flat, networks[1])
    states = script.random_obs(4)
    log_probs = script.compute_public_log_probs(networks, states, 4, script.num_actions)
    assert log_probs.shape == (4, 4, script.num_actions)
    assert log_probs[[1, 2]].isnan().all()
    for j in (0, 3):
        expected = networks[j].predict(states)[0].log_softmax(-1)
        assert torch.equal(log_probs[j], expected)
    assert capsys.readouterr().out.split("\n")[1:-1] == [LINES[kind]]


# --- whose policies are evaluated, and what is kept ---


class Half(Exchange):
    """The first of two ranks; the agents of the other one are copies of those held here."""

    def __init__(self, num_agents):
        super().__init__(num_agents)
        self.agents = range(num_agents // 2)

    def all_gather(self, local):
        """Row i for every agent i."""
        return torch.cat((local, local))

    def _gather(self, sent, sizes):
        """The tensors of all agents."""
        return [tensor.clone() for tensor in [*sent, *sent]]


@pytest.mark.parametrize("n", [6, 24])
def test_a_rank_compares_those_to_whom_its_agents_may_listen(n):
    """On a ring of 24, shared by two, the 12 held and a neighbour at each end; of few agents all,
    for the log; isolated ones nobody else.
    """
    held = range(n // 2)
    near = [*range(n // 2 + 1), n - 1]
    ring = communicators.ring(n)
    compared = communicators.find_compared(ring)
    assert communicators.find_senders(compared, held) == ([*range(n)] if n == 6 else near)
    assert communicators.find_senders(ring.float() / 3, held) == near
    alone = torch.eye(n, dtype=torch.bool)
    assert torch.equal(communicators.find_compared(alone), alone)
    for agents in (held, range(n // 2, n)):
        assert communicators.find_senders(alone.float(), agents) == list(agents)
    one_way = alone.clone()
    one_way[1, n - 1] = True  # agent 1 listens to the last one, not the other way round
    assert communicators.find_senders(one_way.float(), range(n // 2, n)) == [*range(n // 2, n)]
    assert communicators.find_senders(one_way.float(), held) == [*held, n - 1]


@pytest.mark.parametrize("n", [6, 18])
def test_distances_are_total_variations_on_the_public_states(n):
    """Of few agents all, of many those of neighbours; NaN of unusable snapshots, and of all peers
    of isolated agents.
    """
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.randn(n, 5, 3, generator=generator).log_softmax(-1)
    log_probs[2] = NAN
    compared = communicators.find_compared(communicators.ring(n))
    expected = total_variation(log_probs)
    if n > communicators.FEW_AGENTS:
        expected = expected.masked_fill(~communicators.ring(n), NAN)
    distances = communicators.measure_distances(log_probs, compared, range(n))
    torch.testing.assert_close(distances, expected, equal_nan=True)
    assert distances[1, 0] > 0 and distances[1, 2].isnan() and distances[0, 0] == 0
    rows = communicators.measure_distances(log_probs, compared, range(3, 6))
    torch.testing.assert_close(rows[3:6], expected[3:6], equal_nan=True)
    assert rows[[0, 1, 2, *range(6, n)]].isnan().all()
    compared = communicators.find_compared(torch.eye(n, dtype=torch.bool))
    alone = communicators.measure_distances(log_probs, compared, range(n))
    assert alone.isfinite().nonzero().tolist() == [[i, i] for i in range(n) if i != 2]


def watch_networks(script, monkeypatch):
    """Note whose networks are loaded, how many of them are there during each rollout, and how many
    policies each function evaluates.
    """
    seen = SimpleNamespace(agents=[], networks=[], alive=[], evaluated={})
    load_networks = communicators.load_networks
    rollout = script.rollout
    predict = script.of_family.Agent.predict
    inside = []

    def watch_load(snapshots, networks, agents):
        loaded = load_networks(snapshots, networks, agents)
        seen.agents.append(sorted(loaded))
        seen.networks += [weakref.ref(network) for network in loaded.values()]
        return loaded

    def watch_rollout(*inputs):
        gc.collect()
        seen.alive.append(sum(network() is not None for network in seen.networks))
        return rollout(*inputs)

    def watch_predict(agent, obs):
        if inside:
            seen.evaluated[inside[-1]] = seen.evaluated.get(inside[-1], 0) + 1
        return predict(agent, obs)

    def count(name):
        function = getattr(script, name)

        def counted(*inputs):
            inside.append(name)
            try:
                return function(*inputs)
            finally:
                inside.pop()

        script.patch(monkeypatch, name, counted)

    monkeypatch.setattr(communicators, "load_networks", watch_load)
    monkeypatch.setattr(script.of_family.Agent, "predict", watch_predict)
    script.patch(monkeypatch, "rollout", watch_rollout)
    for name in ("compute_public_log_probs", "compute_reference", "estimate_gains"):
        if hasattr(script.module, name):
            count(name)
    return seen


def test_agents_on_a_ring_cost_what_one_costs_times_their_number(tmp_path, monkeypatch):
    """One evaluation of each policy on the public states, two of peers for each reference and for
    each row of gains; listeners share the networks of their senders.
    """
    n = 40
    seen = watch_networks(PRPO_MINIGRID, monkeypatch)
    settings = {"num_agents": n, "communicator": "surrogate", "topology": "ring"}
    train(PRPO_MINIGRID, tmp_path, **settings, iterations=2)
    assert seen.evaluated == {
        "compute_public_log_probs": 2 * n,
        "estimate_gains": 2 * 2 * n,
        "compute_reference": 2 * n,  # in the second iteration; before, agents are alone
    }
    assert seen.agents == [[*range(n)]] * 3  # at the start, and in each round
    assert seen.alive == [n, n]  # in each iteration


@on([PRPO_MINIGRID, FEDAVG_MINIGRID, pytest.param(PRTRPO_MINIGRID, marks=pytest.mark.slow)])
def test_a_rank_keeps_networks_of_its_neighbours_only(script, tmp_path, monkeypatch):
    """However many agents there are elsewhere."""
    seen = watch_networks(script, monkeypatch)
    halves = []

    def make_half(args, *_):
        halves.append(Half(args.num_agents))
        return halves[-1]

    monkeypatch.setattr(communicators, "exchange_of_launcher", make_half)
    for n in (18, 18 + 6):
        seen.agents.clear()
        seen.alive.clear()
        settings = {"num_agents": n, "topology": "ring", "iterations": 2}
        train(script, tmp_path / str(n), **settings)
        held = n // 2
        near = [*range(held + 1), n - 1]
        assert seen.agents[-2:] == [near] * 2
        assert max(seen.alive) <= held + 2
        assert seen.evaluated.pop("compute_public_log_probs") == 2 * (held + 2)
        assert seen.evaluated == ({} if script.averages else {"compute_reference": 2 * held})
        seen.evaluated.clear()
    assert len(halves) == 2


def test_gains_are_estimated_of_usable_neighbours(tmp_path, monkeypatch):
    """Of those to whom an agent may listen, without itself."""
    estimate_gains = PRPO_MINIGRID.estimate_gains
    candidates = {}

    def watch(i, batch, snapshots, n):
        candidates[i] = sorted(snapshots)
        return estimate_gains(i, batch, snapshots, n)

    PRPO_MINIGRID.patch(monkeypatch, "estimate_gains", watch)
    settings = {"num_agents": 6, "communicator": "surrogate", "topology": "ring"}
    with spoil("value", [2], [1]):
        train(PRPO_MINIGRID, tmp_path, **settings)
    assert candidates == {0: [1, 5], 1: [0], 2: [1, 3], 3: [4], 4: [3, 5], 5: [0, 4]}


@on(QUICK)
def test_isolated_agents_gather_no_parameters(script, tmp_path, monkeypatch):
    """Their distances are not known to anybody."""
    gathered = notes_of(monkeypatch, Exchange, "all_gather", lambda exchange, local: local.numel())
    with watching(monkeypatch, script) as seen:
        folder = train(script, tmp_path, communicator="identity")
    assert seen.numbers == [None]
    assert 0 < max(gathered) < 100
    C, distances = matrices_of(folder)[1]
    assert torch.equal(C, torch.eye(3))
    assert torch.equal(distances.isnan(), torch.eye(3) == 0)


@pytest.mark.parametrize(
    ("script", "settings", "needs"),
    [
        (PRPO_MINIGRID, {}, (False, "", "")),
        (PRPO_MINIGRID, {"communicator": "identity"}, (True, "", "")),
        (PRPO_MINIGRID, {"num_agents": 1}, (True, "", "")),
        (PRPO_ATARI, {"communicator": "self-preferred"}, (False, "", "")),
        (FEDAVG_MINIGRID, {}, (False, "replace", "")),
        (FEDAVG_MINIGRID, {"prox_coef": 0.1}, (False, "pull", "")),
        (FEDAVG_ATARI, {}, (False, "replace", "")),
        (PRTRPO_MINIGRID, {}, (False, "", "")),
        (PRPO_MUJOCO, {}, (False, "", "")),
        (FEDAVG_MUJOCO, {}, (False, "replace", "")),
    ],
    ids=str,
)
def test_a_launcher_is_told_what_agents_exchange(script, settings, needs, tmp_path, monkeypatch):
    assert told_to_launcher(monkeypatch, train, script, tmp_path, **settings) == needs


def test_a_launcher_is_told_that_a_bound_needs_all_agents(tmp_path, monkeypatch):
    *_, together = told_to_launcher(monkeypatch, train, PRTRPO_MINIGRID, tmp_path, delta=0.1)
    assert together.startswith("--delta needs")


# --- what a communicator reads ---

INPUTS = {
    "identity": set(),
    "uniform": set(),
    "self-preferred": set(),
    "matrix.csv": set(),
    "similarity": {"policies"},
    "reward": {"returns"},
    "softmax-reward": {"returns"},
    "rank-reward": {"returns"},
    "best": {"returns"},
    "surrogate": {"gains"},
}


# The others import make_communicator, or have the same lines: see test_scripts.py
@on([PRPO_MINIGRID, PRPO_MUJOCO])
@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("sparse", [{}, {"topology": "ring"}, {"top_k": 1}, {"num_agents": 2}])
def test_the_inputs_of_a_communicator_are_found_by_trying(script, name, sparse, tmp_path):
    (tmp_path / "matrix.csv").write_text(WITHOUT_TRANSPOSE)
    if name == "matrix.csv" and "num_agents" in sparse:
        (tmp_path / "matrix.csv").write_text("0.5,0.5\n0,1\n")
    communicator = str(tmp_path / name) if name == "matrix.csv" else name
    args = script.Args(**{"num_agents": 3} | sparse, communicator=communicator)
    inputs = communicators.find_inputs(args, script.make_communicator)
    if script.family != "MuJoCo":  # where policies are lists of probabilities
        inputs = {"policies" if each == "log_probs" else each for each in inputs}
    assert inputs == INPUTS[name]


@on([PRPO_MINIGRID, PRPO_MUJOCO])
def test_an_input_that_a_rule_can_do_without_is_an_input(script, monkeypatch):
    """It gives another C without."""

    def follow(returns):
        if returns is None:
            return torch.eye(3)
        return torch.eye(3)[returns.argmax()].expand(3, 3)

    monkeypatch.setattr(communicators, "rank_reward", follow)
    args = script.Args(num_agents=3, communicator="rank-reward")
    assert communicators.find_inputs(args, script.make_communicator) == {"returns"}


def test_a_rule_of_ones_own_that_reads_policies_gets_those_of_all_neighbours(tmp_path, monkeypatch):
    """Though each agent listens to one peer only."""

    def follow_the_next(args, returns=None, log_probs=None, gains=None, usable=None):
        assert len(log_probs) == 3  # fails without them
        return torch.eye(3).roll(1, 1)

    PRPO_MINIGRID.patch(monkeypatch, "make_communicator", follow_the_next)
    folder = train(PRPO_MINIGRID, tmp_path)
    assert summary_of(folder)["communication_bytes"] == 6 * 4 * count_parameters(PRPO_MINIGRID)


@on(ALL)
def test_a_rule_that_gives_no_communicator_is_refused_at_the_start(script, monkeypatch, capsys):
    bad = torch.tensor([[1.43, -0.43, 0], [0, 1, 0], [0, 0, 1]])
    monkeypatch.setattr(communicators, "uniform", lambda n: bad)
    line = refusal(script.parse_args, ["--communicator", "uniform"])
    assert line.startswith("--communicator uniform: has a row that is not on the simplex, agent 0")


@on(QUICK)
def test_a_rule_that_gives_no_communicator_in_a_round_ends_the_run(script, tmp_path, monkeypatch):
    """Nobody has finished an episode, so that no return is a number."""
    monkeypatch.setattr(communicators, "bound_returns", lambda returns: returns)
    monkeypatch.setattr(communicators, "reward", lambda r: (r / r.sum()).expand(3, 3))
    monkeypatch.setattr(communicators, "update_means", lambda means, returns: None)
    line = refusal(train, script, tmp_path, communicator="reward")
    assert line.startswith("--communicator reward: has a row that is not on the simplex, agent 0")


@pytest.mark.filterwarnings("ignore:the reward communicator counts negative")
@pytest.mark.parametrize(
    ("script", "name"),
    [
        *((PRPO_MINIGRID, name) for name in INPUTS if name != "matrix.csv"),
        *((script, "rank-reward") for script in ALL[1:]),
    ],
    ids=str,
)
def test_returns_are_reported_only_where_they_are_read(script, name, tmp_path, monkeypatch):
    """One number of each agent: the mean of its returns since the last round."""
    update_means = communicators.update_means

    def end_episodes(means, returns):
        returns[0] += [1.0, NAN, 2.0]
        returns[2] += [-5.0]
        update_means(means, returns)

    monkeypatch.setattr(communicators, "update_means", end_episodes)
    with watching(monkeypatch, script) as seen:
        train(script, tmp_path, communicator=name)
    expected = None
    if INPUTS[name] == {"returns"}:
        expected = pytest.approx([1.5, NAN, -5.0], nan_ok=True)
    assert seen.numbers == [expected]


def test_means_are_those_of_an_interval_and_stay_without_episodes():
    means = torch.full((3,), NAN, dtype=torch.double)
    first = means[0]  # a view, as a checkpoint has it
    returns = [[1.0, 2.0, NAN], [math.inf], []]
    communicators.update_means(means, returns)
    assert means.tolist() == pytest.approx([1.5, NAN, NAN], nan_ok=True)
    assert returns == [[], [], []]
    returns[2] += [1e-3, 3e-3]
    communicators.update_means(means, returns)
    assert means.tolist() == pytest.approx([1.5, NAN, 2e-3], nan_ok=True)
    assert first.item() == 1.5


@on([*ON_MINIGRID, SLOW_ATARI, SLOW_FEDAVG_ATARI, *ON_MUJOCO])
def test_an_agent_without_an_episode_reports_its_last_mean(script, crashing, tmp_path, monkeypatch):
    """Also after a resume."""
    update_means = communicators.update_means

    def end_one_episode(means, returns):
        for of_agent in returns:
            of_agent.clear()
        if not seen.numbers:
            returns[0].append(0.5)
        update_means(means, returns)

    monkeypatch.setattr(communicators, "update_means", end_one_episode)
    settings = {"iterations": 3, "save_every": 1, "communicator": "rank-reward"}
    with watching(monkeypatch, script) as seen:
        crashing("complete", 2, 2, lambda: train(script, tmp_path, **settings))
        folder = only_run(tmp_path)
        resume(script, folder)
    assert seen.numbers == [pytest.approx([0.5, NAN, NAN], nan_ok=True)] * 3


# --- communicators that do not exist ---


@on(ALL)
@pytest.mark.parametrize("name", ["uniforn", "", "gone.csv", "/", "samples"])
def test_an_unknown_communicator_is_refused_before_a_folder_exists(script, name, tmp_path):
    words = "--communicator", name, "--run-dir", str(tmp_path / "runs")
    message = refusal(script.parse_args, [*words, *other_words(script)])
    assert message.startswith(f"--communicator {name}: ")
    if not name.endswith(".csv"):
        problem = "is neither a communicator of this script, see --help, nor the CSV file of C"
        assert message.endswith(problem)
    assert list(tmp_path.iterdir()) == []


def other_words(script):
    """The words that a script needs to be checked on this machine."""
    return ["--device", "cpu", "--env-id", script.tiny["env_id"]]


# --- reports ---


def test_reports_are_bounded_by_the_others_magnitude():
    nan = math.nan
    cases = [
        ([1.0, 2.0, 1e30], [1.0, 2.0, 15.0]),
        ([1.0, 2.0, -1e30], [1.0, 2.0, -15.0]),
        # Nothing to compare with: by Example 4 any positive return has the row
        ([0.0, 0.0, 0.9], [0.0, 0.0, 0.9]),
        ([0.0, 0.0, 0.0, 0.3, 1e30], [0.0, 0.0, 0.0, 0.3, 0.75]),
        ([0.01, 0.02, 0.1], [0.01, 0.02, 0.1]),
        ([nan, nan, 5.0], [nan, nan, 5.0]),
        ([-3.0, 2.0, 20.0], [-3.0, 2.0, 20.0]),
        ([1e308, 1e308, 1e308], [1e308, 1e308, 1e308]),
        ([7.0], [7.0]),
    ]
    for reported, expected in cases:
        bounded = communicators.bound_returns(torch.tensor(reported, dtype=torch.float64))
        assert bounded.tolist() == pytest.approx(expected, nan_ok=True, rel=1e-6), reported


BOUND = torch.tensor([1.0, 15.0, 2.0])
BOUNDED = {
    # As ten times the usual return of the others
    "reward": ([1.0, 1e30, 2.0], [1 / 18, 15 / 18, 2 / 18]),
    "softmax-reward": ([1.0, 1e30, 2.0], (BOUND / BOUND.std(correction=0)).softmax(0).tolist()),
    "rank-reward": ([1.0, 1e30, 2.0], [1 / 6, 3 / 6, 2 / 6]),
    # Nothing that is reported counts
    "uniform": ([1.0, 1e30, 2.0], [1 / 3] * 3),
}


@pytest.mark.parametrize(
    ("script", "communicator"),
    [
        *((PRPO_MINIGRID, name) for name in BOUNDED),
        (FEDAVG_MINIGRID, "reward"),
        (PRPO_MUJOCO, "reward"),
        (PRTRPO_MINIGRID, "reward"),
    ],
    ids=str,
)
def test_an_inflated_report_does_not_own_a_row(script, communicator, tmp_path, monkeypatch):
    """Agent 1 reports 1e30, which counts as ten times the others' usual return."""
    reported, expected = BOUNDED[communicator]

    def report(means, returns):
        means[:] = torch.tensor(reported)

    monkeypatch.setattr(communicators, "update_means", report)
    settings = {"iterations": 1, "local_updates": 1, "eval_episodes": 0, "num_steps": 16}
    settings["communicator"] = communicator
    script.main(tiny(script, tmp_path, **settings))
    points = scalars_of(only_run(tmp_path))
    row = [points[f"communicator/c_0_{j}"][-1][1] for j in range(3)]
    assert row == pytest.approx(expected, abs=1e-5)


# --- a matrix of one's own ---


def test_a_zero_of_ones_own_matrix_forbids(tmp_path):
    """Row [0, 1, 0] without agent 1 falls back on oneself, and no excluded peer gets weight."""
    file = tmp_path / "C.csv"
    file.write_text("0,1,0\n0.5,0,0.5\n0.2,0.3,0.5\n")
    for script in (PRPO_MINIGRID, PRTRPO_MINIGRID, PRPO_MUJOCO):
        args = script.Args(num_agents=3, communicator=str(file))
        usable = torch.tensor([True, False, True])
        C = script.make_communicator(args, torch.ones(3), usable=usable)
        torch.testing.assert_close(C[0], torch.tensor([1.0, 0, 0]))
        torch.testing.assert_close(C[1], torch.tensor([0.5, 0, 0.5]))
        torch.testing.assert_close(C[2], torch.tensor([2 / 7, 0, 5 / 7]))
        alone = script.make_communicator(
            args, torch.ones(3), usable=torch.tensor([False, False, True])
        )
        assert alone.tolist() == [[1, 0, 0], [0, 0, 1], [0, 0, 1]]
        assert (
            communicators.find_neighbours(args) == torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 1]])
        ).all()


@pytest.mark.parametrize("change", ["other content", "gone"])
def test_a_matrix_belongs_to_its_run(change, crashing, tmp_path):
    """Its content is in config.json and is used on resume, whatever has become of the file."""
    text = "0.5,0.5,0\n0.25,0.5,0.25\n0,0.1,0.9\n"
    settings = {"iterations": 4, "local_updates": 1, "save_every": 2, "eval_episodes": 0}
    settings["num_steps"] = 16
    for name in ("whole", "resumed"):
        (tmp_path / f"{name}.csv").write_text(text)
    file = tmp_path / "resumed.csv"
    PRPO_MINIGRID.main(
        tiny(PRPO_MINIGRID, tmp_path / "a", **settings, communicator=str(tmp_path / "whole.csv"))
    )
    args = tiny(PRPO_MINIGRID, tmp_path / "b", **settings, communicator=str(file))
    crashing("complete", 2, 2, lambda: PRPO_MINIGRID.main(args))
    folder = only_run(tmp_path / "b")
    if change == "gone":
        file.unlink()
    else:
        file.write_text("1,0,0\n0,1,0\n0,0,1\n")
    again = PRPO_MINIGRID.parse_args(["--resume", str(folder)])
    assert again.communicator_matrix == config_of(folder)["communicator_matrix"] != ""
    PRPO_MINIGRID.main(again)
    assert_same_run(folder, only_run(tmp_path / "a"))


# --- isolated agents, PR-TRPO's radius, averages of adapters ---


def test_an_agent_that_has_diverged_leaves_the_others_their_radius():
    args = PRTRPO_MINIGRID.Args(num_agents=3, delta=0.2)
    C = communicators.uniform(3)
    finite = torch.tensor([[0.01, 0.02], [0.03, 0.01]], dtype=torch.float64)
    lost = torch.tensor([[math.nan, math.nan]], dtype=torch.float64)
    expected = PRTRPO_MINIGRID.compute_radius(C, finite, args)
    assert PRTRPO_MINIGRID.compute_radius(C, torch.cat((finite, lost)), args) == expected
    assert all(math.isfinite(value) for value in PRTRPO_MINIGRID.compute_radius(C, lost, args))
    inflated = torch.tensor([[1e30, 0.0]], dtype=torch.float64)  # no total variation
    assert PRTRPO_MINIGRID.compute_radius(C, torch.cat((finite, inflated)), args) == (
        args.epsilon_min,
        args.delta,
    )


def test_an_average_of_adapters_keeps_a_far_from_singular():
    """Of (a, b) and (a, -b) the mean is (a, 0): without a floor that rank could never learn
    again.
    """
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 9, generator=generator)
    A = torch.stack((torch.stack((a, b)), torch.stack((a, -b))))
    B = torch.randn(1, 7, 2, generator=generator).repeat(2, 1, 1)
    B[1, :, 1] *= -1.0  # the products are equal
    C = torch.full((2, 2), 0.5)
    new_A, new_B, *_ = communicators.average_products(C, A, B)
    torch.testing.assert_close(new_B @ new_A, B @ A, rtol=0, atol=1e-4)
    scales = torch.linalg.svdvals(new_A[0])
    assert scales.min() > 0.05 * scales.max() and new_B.abs().max() < 100


# --- the log of many agents ---


def test_logs_of_many_agents_are_linear(tmp_path):
    """communicator.csv has positive weights only, TensorBoard a summary, both only where C
    changes.
    """
    n = 18
    settings = {
        "num_agents": n,
        "communicator": "uniform",
        "topology": "ring",
        "hidden_sizes": (8,) * n,
    }
    settings |= {
        "iterations": 3,
        "local_updates": 2,
        "eval_episodes": 0,
        "num_envs": 1,
        "num_steps": 8,
    }
    settings |= {"num_minibatches": 1, "update_epochs": 1}
    PRPO_MINIGRID.main(tiny(PRPO_MINIGRID, tmp_path, **settings))
    folder = only_run(tmp_path)
    lines = (folder / "communicator.csv").read_text().splitlines()[1:]
    assert [line.split(",")[0] for line in lines] == ["1"] * n + ["2"] * 3 * n
    points = scalars_of(folder)
    assert not [tag for tag in points if tag.startswith(("communicator/c_", "distances/agent"))]
    summary = {
        tag: [value for _, value in values]
        for tag, values in points.items()
        if tag.startswith("communicator/")
    }
    assert summary == {
        "communicator/self_weight": pytest.approx([1, 1 / 3]),
        "communicator/peers": [0, 2],
        "communicator/largest_peer_weight": pytest.approx([0, 1 / 3]),
        "communicator/most_listeners": [0, 2],
    }
    ((step, mean_distance),) = points["distances/mean"]
    assert step == 16 and 0 < mean_distance <= points["distances/largest"][0][1] < 1
