"""The mathematics of communicators, mixtures, divergences and averaging, and the exchange between
agents.
"""

import inspect
import itertools
import json
import math
import re
import statistics
import typing
import warnings
from types import SimpleNamespace

import pytest
import torch
from helpers import gate_by_hand, refusal, run_ranks, total_variation
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from ports import free_port
from torch.distributions import Categorical, kl_divergence

import communicators
import prpo_minigrid
from communicators import Exchange, average_parameters, categorical_kl, mix_log_probs

INF = math.inf
NAN = math.nan
# The names that a script knows, each in a branch of its own
SOURCE = inspect.getsource(prpo_minigrid.make_communicator)
COMMUNICATORS = sorted(set(re.findall('name == "([a-z-]+)"', SOURCE)))
TOPOLOGIES = typing.get_args(typing.get_type_hints(prpo_minigrid.Args)["topology"])
REWARD_FAMILY = ("reward", "softmax-reward", "rank-reward")
examples = settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
ignore_negative_returns = pytest.mark.filterwarnings(
    "ignore:the reward communicator counts negative"
)
seeds = st.integers(0, 2**32)
scales = st.sampled_from([0.0, 1e-3, 1.0, 10.0, 1e4])


def policies(seed, *shape, scale=1.0):
    """Log-probabilities of random policies; scale 0 makes them uniform and 1e4 all but
    deterministic.
    """
    return torch.log_softmax(
        scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed)), dim=-1
    )


def gains_on(log_probs):
    """What peers might gain on each agent's states, [agents, agents]: the less, the further they
    are.
    """
    return -total_variation(log_probs.double())


def make_communicator(name, n, returns=None, log_probs=None, valid=None, **options):
    """C as a script's communication round makes it; options: those of its flags."""
    renamed = {"temperature": "communicator_temperature", "num_peers": "top_k"}
    options = {renamed.get(flag, flag): value for flag, value in options.items()}
    args = prpo_minigrid.Args(num_agents=n, communicator=name, **options)
    returns = torch.ones(n) if returns is None else returns
    gains = None if log_probs is None else gains_on(log_probs)
    return prpo_minigrid.make_communicator(args, returns, log_probs, gains, valid)


def simplex(seed, n, rows=1):
    """Random weights [rows, n] on the simplex, some of them exactly 0."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(rows, n, generator=generator) * (
        torch.rand(rows, n, generator=generator) < 0.7
    )
    weights[torch.arange(rows), torch.randint(n, (rows,), generator=generator)] = 1.0
    return weights / weights.sum(1, keepdim=True)


def mean_returns(n):
    """Returns [n] as the reward family may meet them: huge, tiny, negative, equal, zero, or NaN (no
    episode ended).
    """
    number = st.floats(allow_infinity=False)
    few = st.sampled_from([-1.0, 0.0, 0.5, 1.0, NAN])  # ties
    values = st.lists(number, min_size=n, max_size=n) | st.lists(few, min_size=n, max_size=n)
    return (values | number.map(lambda value: [value] * n)).map(
        lambda v: torch.tensor(v, dtype=torch.float64)
    )


def assert_communicator(matrix, n):
    assert matrix.shape == (n, n) and matrix.dtype == torch.float32 and not matrix.requires_grad
    assert matrix.isfinite().all() and (matrix >= 0).all()
    torch.testing.assert_close(matrix.sum(1), torch.ones(n), rtol=0, atol=1e-6)
    assert communicators.non_expansion(matrix) <= 1 + 1e-6


def assert_rows(matrix, rows):
    torch.testing.assert_close(matrix, torch.tensor(rows, dtype=torch.float32), rtol=0, atol=1e-6)


# --- communicators ---


@ignore_negative_returns
@pytest.mark.parametrize("name", COMMUNICATORS)
@examples
@given(data=st.data())
def test_rows_on_simplex_for_any_input(name, data):
    """Also with the ring, top-k and invalid peers, and then exactly 0 where none is allowed."""
    n = data.draw(st.integers(1, 6), "n")
    peers = data.draw(st.integers(0, 6), "num_peers")
    topology = data.draw(st.sampled_from(TOPOLOGIES), "topology")
    valid = data.draw(
        st.none() | st.lists(st.booleans(), min_size=n, max_size=n).map(torch.tensor), "valid"
    )
    matrix = make_communicator(
        name,
        n,
        self_preference=data.draw(st.floats(0, 1), "self_preference"),
        returns=data.draw(mean_returns(n), "returns"),
        log_probs=data.draw(
            st.builds(policies, seeds, st.just(n), st.just(3), st.just(4), scale=scales),
            "log_probs",
        ),
        temperature=data.draw(st.floats(min_value=1e-300, allow_infinity=False), "temperature"),
        topology=topology,
        num_peers=peers,
        valid=valid,
    )
    assert_communicator(matrix, n)
    if topology == "ring":
        assert not matrix[~communicators.ring(n)].any()
    if peers:
        assert ((matrix > 0).sum(1) <= peers + 1).all()
    if valid is not None:
        others = matrix.clone().fill_diagonal_(0.0)
        assert not others[:, ~valid].any()
        # Oneself only where no peer is left
        assert not matrix.diagonal()[~valid & (others.sum(1) > 0)].any()


@pytest.mark.parametrize(
    ("constructor", "data"),
    [
        (communicators.similarity, policies(0, 4, 3, 5)),
        *(
            (make, torch.tensor([0.5, NAN, 2.0, 0.0]))
            for make in (communicators.reward, communicators.softmax_reward)
        ),
        (communicators.rank_reward, torch.tensor([0.5, NAN, 2.0, 0.0])),
        (communicators.best, torch.tensor([0.5, NAN, 2.0, 0.0])),
        (communicators.samples, torch.tensor([0.5, NAN, 2.0, 0.0])),
        (lambda matrix: communicators.sparsify(matrix, communicators.ring(4)), simplex(0, 4, 4)),
        (
            lambda matrix: communicators.drop_invalid(
                matrix, torch.tensor([True, False, True, True])
            ),
            simplex(0, 4, 4),
        ),
    ],
)
def test_communicator_is_detached_and_leaves_its_input_alone(constructor, data):
    before = data.clone()
    assert_communicator(constructor(data.requires_grad_()), 4)
    torch.testing.assert_close(data.detach(), before, rtol=0, atol=0, equal_nan=True)


@ignore_negative_returns
@pytest.mark.parametrize("name", COMMUNICATORS)
@examples
@given(data=st.data())
def test_permutation_equivariance(name, data):
    n = data.draw(st.integers(2, 6))
    order = data.draw(st.permutations(range(n)))
    returns = data.draw(mean_returns(n))
    log_probs = policies(data.draw(seeds), n, 3, 4, scale=data.draw(scales))
    valid = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    matrix = make_communicator(name, n, returns=returns, log_probs=log_probs, valid=valid)
    other = make_communicator(
        name, n, returns=returns[order], log_probs=log_probs[order], valid=valid[order]
    )
    torch.testing.assert_close(other, matrix[order][:, order], rtol=0, atol=1e-6)


@ignore_negative_returns
@pytest.mark.parametrize("name", ["uniform", "self-preferred", "best", *REWARD_FAMILY])
@examples
@given(data=st.data())
def test_rotation_equivariance_of_sparse_communicators(name, data):
    """Ties and neighbourhoods go by the place on the ring, so only its rotations leave them as they
    are.
    """
    n = data.draw(st.integers(2, 7))
    k = data.draw(st.integers(0, 3))
    shift = data.draw(st.integers(0, 6))
    returns = torch.tensor(
        data.draw(st.lists(st.sampled_from([-1.0, 0.0, 1.0, 2.0, NAN]), min_size=n, max_size=n))
    )
    sparse = {"topology": data.draw(st.sampled_from(TOPOLOGIES)), "num_peers": k}
    matrix = make_communicator(name, n, returns=returns, **sparse).roll((shift, shift), dims=(0, 1))
    torch.testing.assert_close(
        make_communicator(name, n, returns=returns.roll(shift), **sparse), matrix
    )


@pytest.mark.parametrize(
    ("constructor", "arguments", "rows"),
    [
        (communicators.identity, [2], [[1, 0], [0, 1]]),
        (communicators.uniform, [4], [[0.25] * 4] * 4),
        # Example 2
        (
            communicators.self_preferred,
            [3, 0.6],
            [[0.6, 0.2, 0.2], [0.2, 0.6, 0.2], [0.2, 0.2, 0.6]],
        ),
        (communicators.self_preferred, [2, 0.0], [[0, 1], [1, 0]]),
        (communicators.self_preferred, [3, 1.0], [[1, 0, 0], [0, 1, 0], [0, 0, 1]]),
        (communicators.self_preferred, [1, 0.2], [[1]]),
        (communicators.reward, [(1, 2, 5)], [[0.125, 0.25, 0.625]] * 3),  # Example 4
        (communicators.reward, [(1, NAN, 3)], [[1 / 6, 1 / 3, 1 / 2]] * 3),
        (communicators.reward, [(1e308, 1e308, 0)], [[0.5, 0.5, 0]] * 3),  # whose sum overflows
        (communicators.reward, [(1.5e308, 1e308, NAN)], [[0.4, 4 / 15, 1 / 3]] * 3),
        (communicators.reward, [(5e-324, 5e-324, 0)], [[0.5, 0.5, 0]] * 3),
        (communicators.reward, [(0, 0, 0, NAN)], [[0.25] * 4] * 4),
        (communicators.samples, [(1, 2, 5)], [[0.125, 0.25, 0.625]] * 3),
        (communicators.samples, [(3, NAN, -1, 1)], [[0.75, 0, 0, 0.25]] * 4),
        (communicators.samples, [(1e308, 1e308, 0)], [[0.5, 0.5, 0]] * 3),
        (communicators.samples, [(0, 0, NAN)], [[1 / 3] * 3] * 3),
        (communicators.rank_reward, [(3, 1, 3, 0)], [[0.35, 0.2, 0.35, 0.1]] * 4),
        (communicators.rank_reward, [(-3, NAN, -7)], [[4 / 9, 1 / 3, 2 / 9]] * 3),
        (communicators.rank_reward, [(-2, -2, -2)], [[1 / 3] * 3] * 3),
        (communicators.best, [(1, 2, 5)], [[0, 0, 1]] * 3),
        (communicators.best, [(-3, NAN, -7)], [[1, 0, 0]] * 3),
        (
            communicators.best,
            [(3, 1, 3, NAN)],
            [[1, 0, 0, 0], [0.5, 0, 0.5, 0], [0, 0, 1, 0], [0.5, 0, 0.5, 0]],
        ),
        (communicators.best, [(-2, -2, -2)], torch.eye(3).tolist()),
        (communicators.best, [(NAN, NAN)], [[1, 0], [0, 1]]),
        (communicators.best, [(1e300, -1e300)], [[1, 0]] * 2),
        (communicators.best, [(NAN,)], [[1]]),
        # Their standard deviation is half of what two returns differ by
        (communicators.softmax_reward, [(0, 7), 2 / math.log(3)], [[0.25, 0.75]] * 2),
        (
            communicators.softmax_reward,
            [(0, 7, NAN), 2 / math.log(4)],
            [[1 / 7, 4 / 7, 2 / 7]] * 3,
        ),
        (communicators.softmax_reward, [(1e4, 1e4 + 400), 2 / math.log(3)], [[0.25, 0.75]] * 2),
        (communicators.softmax_reward, [(-1e4, -1e4 + 0.1), 2 / math.log(3)], [[0.25, 0.75]] * 2),
        (communicators.softmax_reward, [(400, 400, 400), 0.1], [[1 / 3] * 3] * 3),
        (communicators.softmax_reward, [(NAN, NAN), 0.1], [[0.5, 0.5]] * 2),
        (communicators.softmax_reward, [(NAN, 3), 0.1], [[0.5, 0.5]] * 2),
        (communicators.softmax_reward, [(1e300, -1e300), 1e-300], [[1, 0]] * 2),
        (communicators.relative_gain, [(0.25, -0.5), 0.75 / math.log(3)], [[0.75, 0.25]] * 2),
        (communicators.relative_gain, [(0, NAN, 0.5), 0.5 / math.log(2)], [[0.25, 0.25, 0.5]] * 3),
        # Inflated gains are clipped
        (
            communicators.relative_gain,
            [(1e9, 1, -INF), 2 / math.log(3)],
            [[3 / 7, 3 / 7, 1 / 7]] * 3,
        ),
        (communicators.relative_gain, [(NAN, NAN), 0.1], [[0.5, 0.5]] * 2),
    ],
)
def test_literal_communicators(constructor, arguments, rows):
    arguments = [
        torch.tensor(a, dtype=torch.float64) if isinstance(a, tuple) else a for a in arguments
    ]
    assert_rows(constructor(*arguments), rows)


@examples
@given(
    seeds,
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([0.0, 1.0, 10.0]),
)
def test_similarity_is_example_3(seed, n, states, actions, scale):
    """Against an explicit double loop over agents and the public states."""
    log_probs = policies(seed, n, states, actions, scale=scale)
    pi = log_probs.double().exp().tolist()
    inner = [
        [
            sum(pi[i][s][a] * pi[j][s][a] for s in range(states) for a in range(actions))
            for j in range(n)
        ]
        for i in range(n)
    ]
    assert_rows(
        communicators.similarity(log_probs), [[value / sum(row) for value in row] for row in inner]
    )


def test_similarity_gives_no_weight_to_an_unknown_policy():
    log_probs = policies(0, 3, 4, 5)
    known_alone = communicators.similarity(log_probs[[0, 2]])
    log_probs[1] = NAN
    matrix = communicators.similarity(log_probs)
    assert not matrix[[0, 2], 1].any()
    torch.testing.assert_close(matrix[[0, 2]][:, [0, 2]], known_alone)


@examples
@given(
    st.lists(st.floats(-50, 50) | st.floats(-1e5, 1e5), min_size=1, max_size=6),
    st.sampled_from([0.1, 1.0, 7.0]),
)
def test_softmax_reward_is_softmax(values, temperature):
    """Of returns in units of their spread: neither the points of a game nor their zero matter."""
    returns = torch.tensor(values, dtype=torch.float64)
    matrix = communicators.softmax_reward(returns, temperature)
    spread = returns.std(correction=0)
    if spread > 1e-9 * (1 + returns.abs().max()):
        expected = (
            torch.softmax(returns / spread / temperature, dim=0).float().expand(len(values), -1)
        )
        torch.testing.assert_close(matrix, expected, rtol=1e-4, atol=1e-6)
        other = communicators.softmax_reward(1000 * returns, temperature)
        torch.testing.assert_close(other, matrix, rtol=1e-4, atol=1e-6)
    elif len(set(values)) == 1:
        torch.testing.assert_close(matrix, communicators.uniform(len(values)))


@pytest.mark.parametrize(
    ("name", "values", "count"),
    [
        ("reward", [-5.0, -2.0, 1.0, 3.0], 1),
        ("reward", [0.0, NAN, 1.0, 3.0], 0),
        ("softmax-reward", [-5.0, -2.0, 1.0, 3.0], 0),
        ("rank-reward", [-5.0, -2.0, 1.0, 3.0], 0),
    ],
)
def test_negative_return_counts_as_zero_with_exactly_one_warning(name, values, count):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        matrix = make_communicator(name, 4, returns=torch.tensor(values))
    assert len(caught) == count
    if name == "reward":
        assert_rows(matrix, [[0, 0.25, 0.1875, 0.5625] if count == 0 else [0, 0, 0.25, 0.75]] * 4)
    else:
        assert (matrix > 0).all()


@pytest.mark.parametrize("name", REWARD_FAMILY)
@examples
@example([NAN, 43.383611671012986, 43.383611671012986, 43.383611671012986])
@given(st.lists(st.floats(0, 100, allow_subnormal=False) | st.just(NAN), min_size=1, max_size=6))
def test_agents_without_data(name, values):
    """They count as an average agent and change nothing between the others; if no agent has data
    every row is uniform. Subnormal numbers are left out: half of the smallest one is 0.
    """
    returns = torch.tensor(values, dtype=torch.float64)
    matrix = make_communicator(name, len(values), returns=returns)
    unknown = returns.isnan()
    if unknown.all():
        torch.testing.assert_close(matrix, communicators.uniform(len(values)))
        return
    weights = matrix[:, ~unknown]
    alone = make_communicator(name, weights.shape[1], returns=returns[~unknown])
    normalised = weights / weights.sum(1, keepdim=True)
    torch.testing.assert_close(normalised, alone[:1].expand_as(normalised), rtol=1e-5, atol=1e-6)
    average = weights.mean(1)
    if name == "softmax-reward":  # of a mean return the weight is the geometric mean
        average = weights.log().mean(1).exp()
    expected = average[:, None].expand(-1, int(unknown.sum()))
    torch.testing.assert_close(matrix[:, unknown], expected, rtol=1e-4, atol=1e-6)


@examples
@given(mean_returns(5), st.lists(st.booleans(), min_size=5, max_size=5).map(torch.tensor))
def test_everybody_listens_to_the_best_that_are_there(returns, usable):
    """Against a loop over agents. The best themselves listen to nobody else."""
    matrix = communicators.best(returns, usable)
    assert_communicator(matrix, 5)
    reports = {j: returns[j].item() for j in range(5) if usable[j] and not returns[j].isnan()}
    leaders = {j for j in reports if reports[j] == max(reports.values())}
    for i in range(5):
        followed = leaders or {i}
        if i in leaders:
            followed = {i}
        expected = [(j in followed) / len(followed) for j in range(5)]
        assert matrix[i].tolist() == pytest.approx(expected)


def test_the_next_best_follows_an_invalid_best():
    """On a ring everybody follows the best of its neighbourhood."""
    returns = torch.tensor([1.0, 9.0, 2.0, 3.0, 2.5])
    valid = torch.tensor([True, False, True, True, True])
    matrix = make_communicator("best", 5, returns=returns)
    assert_rows(matrix, [[0, 1, 0, 0, 0]] * 5)
    assert_rows(make_communicator("best", 5, returns=returns, valid=valid), [[0, 0, 0, 1, 0]] * 5)
    ring = make_communicator("best", 5, returns=returns, topology="ring")
    assert_rows(ring[:3], [[0, 1, 0, 0, 0]] * 3)
    assert_rows(ring[3:], [[0, 0, 0, 1, 0]] * 2)
    ring = make_communicator("best", 5, returns=returns, topology="ring", valid=valid)
    assert_rows(ring[:3], [[0, 0, 0, 0, 1], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0]])


@pytest.mark.parametrize("name", ["best", "reward", "rank-reward", "uniform"])
@pytest.mark.parametrize("i", [0, 7, 17])
def test_a_row_on_a_ring_depends_on_the_neighbourhood_alone(name, i):
    """Of many agents a process of torchrun evaluates the snapshots of its agents' neighbours only;
    the others count as unusable there, and the row must be that of all agents in one process.
    """
    n = 18
    returns = torch.rand(n, generator=torch.Generator().manual_seed(i))
    everybody = torch.ones(n, dtype=torch.bool)
    near = communicators.ring(n)[i]
    rows = [
        make_communicator(name, n, returns=returns, valid=valid, topology="ring")[i]
        for valid in (everybody, near)
    ]
    torch.testing.assert_close(*rows)


def test_similarity_must_receive_all_before_it_can_choose():
    """The snapshots of all agents in the topology count as sent, also with top-k."""
    for topology, expected in (("full", torch.ones(4, 4) > 0), ("ring", communicators.ring(4))):
        args = prpo_minigrid.Args(
            num_agents=4, communicator="similarity", top_k=1, topology=topology
        )
        assert torch.equal(communicators.find_neighbours(args), expected)


def test_every_name_makes_its_own_communicator():
    log_probs = policies(0, 3, 4, 5)
    returns = torch.tensor([0.5, 3.0, 1.0])
    expected = {
        "identity": communicators.identity(3),
        "uniform": communicators.uniform(3),
        "self-preferred": communicators.self_preferred(3, 0.7),
        "similarity": communicators.similarity(log_probs),
        "reward": communicators.reward(returns),
        "softmax-reward": communicators.softmax_reward(returns, 2.0),
        "rank-reward": communicators.rank_reward(returns),
        "best": communicators.best(returns),
        "surrogate": communicators.surrogate(gains_on(log_probs), 2.0),
    }
    options = {
        "self_preference": 0.7,
        "temperature": 2.0,
        "returns": returns,
        "log_probs": log_probs,
    }
    assert set(expected) == set(COMMUNICATORS)
    source = inspect.getsource(communicators.RunArgs)
    help_text = re.search(r"# who listens to whom: (.*?) communicator: str", source, re.S)[1]
    assert set(expected) <= set(re.findall("[a-z-]+", help_text))
    for name, matrix in expected.items():
        assert torch.equal(make_communicator(name, 3, **options), matrix), name


# Relative gain: how much better an agent has become than its own past

ROUNDS = st.lists(
    st.lists(st.integers(-40, 40).map(lambda k: k / 8), max_size=5), min_size=1, max_size=6
)


def gains_of(rounds, scale=1.0):
    """The gain after every round of one agent; a round is a list of returns."""
    record = torch.full((3,), NAN, dtype=torch.float64)
    gains = []
    for returns in rounds:
        record = communicators.remember(record, [scale * value for value in returns])
        gains.append(record[1].item())
    return gains


def plain_gains(rounds):
    """The same by the definition, with the baseline written out as a weighted sum over all rounds
    before.
    """
    gains = []
    means = []
    for returns in filter(None, rounds):
        r = statistics.fmean(returns)
        weights = [
            0.2 * 0.8 ** (len(means) - 1 - k) if k else 0.8 ** (len(means) - 1)
            for k in range(len(means))
        ]
        b = (
            sum(weight * value for weight, value in zip(weights, means, strict=True))
            if means
            else r
        )
        se = statistics.stdev(returns) / len(returns) ** 0.5 if len(returns) > 1 else 0.0
        gains.append(
            max(-1.0, min(1.0, (r - b) / (abs(b) + se)))
            if abs(b) + se
            else math.copysign(r != b, r - b)
        )
        means.append(r)
    return [gains.pop(0) if returns else 0.0 for returns in rounds]


@examples
@given(ROUNDS)
def test_gains_are_over_ones_own_history(rounds):
    assert gains_of(rounds) == pytest.approx(plain_gains(rounds), abs=1e-6)


@examples
@given(ROUNDS, st.sampled_from([2.0**-30, 0.5, 8.0, 2.0**40]), st.floats(1e-6, 1e6))
def test_gains_do_not_depend_on_the_scale_of_rewards(rounds, power, scale):
    """Exactly, where multiplication is exact."""
    assert gains_of(rounds, power) == gains_of(rounds)
    assert gains_of(rounds, scale) == pytest.approx(gains_of(rounds), abs=1e-6)


def test_gains_by_hand():
    """The baseline moves after the gain is taken; noise makes gains small; what is not finite is
    left out.
    """
    assert gains_of([[1.0], [1.5], [1.5]]) == pytest.approx([0, 0.5, 0.4 / 1.1])
    assert gains_of([[2.0], [1.0], [7.0]]) == pytest.approx([0, -0.5, 1.0])
    assert gains_of([[1.0, 1.0], [0.0, 4.0]]) == pytest.approx([0, 1 / (1 + 2)])
    assert gains_of([[-4.0], [-3.0], [-30.0]]) == pytest.approx([0, 0.25, -1.0])
    assert gains_of([[0.0], [0.0], [1e-9], []]) == [0, 0, 1, 0]
    assert gains_of([[], [NAN], [3.0, NAN, INF], [], [4.5]]) == pytest.approx([0, 0, 0, 0, 0.5])


def test_a_round_without_returns_keeps_the_last_mean_and_the_baseline():
    record = torch.full((3,), NAN, dtype=torch.float64)
    for returns in ([1.0], [2.0], [], [NAN]):
        record = communicators.remember(record, returns)
    assert record.tolist() == pytest.approx([2.0, 0.0, 1.2])


def test_an_easy_agent_with_large_rewards_does_not_dominate():
    """Agents that stand still in large units, improve in small ones, and have only begun."""
    rounds = [[[1000.0, 1010.0]] * 3, [[0.1, 0.2], [0.2, 0.3], [0.4, 0.5]], [[], [], [5.0]]]
    gains = torch.tensor([gains_of(agent_rounds)[-1] for agent_rounds in rounds])
    still, improves, begins = communicators.relative_gain(gains)[0].tolist()
    assert improves > 2 * still and still == pytest.approx(begins)
    returns = torch.tensor(
        [sum(agent_rounds[-1]) / len(agent_rounds[-1]) for agent_rounds in rounds]
    )
    assert communicators.reward(returns)[0, 0] > 0.99


# Surrogate: whom one's own data recommend


def bandit(seed, peers, states=3, actions=4):
    """Exact policies [1 + peers, states, actions], and advantages of every action under the first
    one's values.
    """
    log_probs = policies(seed, 1 + peers, states, actions).double()
    rewards = torch.rand(
        states, actions, generator=torch.Generator().manual_seed(seed + 1)
    ).double()
    probs = log_probs[0].exp()
    return log_probs, rewards, rewards - (probs * rewards).sum(-1, keepdim=True)


def samples_of(policy, number=40_000):
    """(states, actions) in exactly the proportions of a policy [states, actions], with states
    equally often.
    """
    counts = (policy.exp() * number).round().long().flatten()
    cells = torch.arange(policy.numel()).repeat_interleave(counts)
    return cells // policy.shape[1], cells % policy.shape[1]


@examples
@given(seeds, st.integers(1, 4))
def test_surrogate_gains_are_what_peers_would_earn(seed, peers):
    """Oracle: J(pi_j) - J(pi_i) of a bandit, in standard deviations of the advantage; of equal
    policies it is 0.
    """
    log_probs, rewards, advantages = bandit(seed % 2**31, peers)
    log_probs[-1] = log_probs[0]
    states, actions = samples_of(log_probs[0])
    taken = log_probs[:, states, actions]
    gains = communicators.surrogate_gains(
        taken, taken[0], advantages[states, actions], max_ratio=INF
    )
    value = (log_probs.exp() * rewards).sum(-1).mean(-1)
    spread = advantages[states, actions].std(correction=0)
    torch.testing.assert_close(gains, (value - value[0]) / spread, rtol=0, atol=2e-2)
    assert gains[0].item() == pytest.approx(0, abs=1e-9) and gains[-1].item() == pytest.approx(
        0, abs=1e-9
    )
    weights = communicators.surrogate(gains.expand(1 + peers, -1), 1.0)
    # A peer equal to oneself: as for L = 0
    assert weights[0, -1].item() == pytest.approx(weights[0, 0].item())
    for better in range(1 + peers):
        for worse in range(1 + peers):
            if value[better] > value[worse] + 0.05 * spread:
                assert weights[0, better] > weights[0, worse]


def test_surrogate_gains_ignore_scale_and_offset_of_advantages_and_bound_ratios():
    behaviour = torch.full((100,), -5.0)
    advantages = torch.linspace(-1, 2, 100)
    peers = torch.stack((behaviour, torch.zeros(100), torch.full((100,), NAN)))
    gains = communicators.surrogate_gains(peers, behaviour, advantages)
    torch.testing.assert_close(
        gains, communicators.surrogate_gains(peers, behaviour, 7 * advantages - 3), equal_nan=True
    )
    picky = torch.where(advantages > 1.9, 0.0, -30.0)
    gain = communicators.surrogate_gains(picky[None], behaviour, advantages, max_ratio=10.0)
    normalised = (advantages - advantages.mean()) / advantages.std(correction=0)
    assert gain.item() == pytest.approx(
        (10 * normalised * (advantages > 1.9)).mean().item(), rel=1e-4
    )
    assert gains[2].isnan()


def test_surrogate_is_personal_and_ignores_nan():
    gains = torch.tensor([[0.0, 0.1, NAN], [-0.1, 0.0, NAN], [NAN, NAN, NAN]])
    e = math.e
    assert_rows(
        communicators.surrogate(gains),
        [[1 / (1 + e), e / (1 + e), 0], [1 / (1 + e), e / (1 + e), 0], [1 / 3] * 3],
    )
    hot = communicators.surrogate(gains, temperature=2.0)[0]
    assert hot[1] / hot[0] == pytest.approx(math.exp(0.5))
    with pytest.raises(ValueError, match="-1"):
        communicators.surrogate(gains, -1.0)


# A matrix of one's own


@examples
@given(seeds, st.integers(1, 5))
def test_a_matrix_from_a_file_is_used_as_it_is(tmp_path_factory, seed, n):
    matrix = simplex(seed, n, n)
    file = tmp_path_factory.mktemp("csv") / "pairs.csv"
    file.write_text(
        "# who listens to whom\n"
        + "\n".join(",".join(f"{w:.9f}" for w in row) for row in matrix.tolist())
    )
    communicator = make_communicator(str(file), n)
    assert_communicator(communicator, n)
    torch.testing.assert_close(communicator, matrix, rtol=0, atol=1e-6)
    valid = torch.arange(n) > 0
    dropped = make_communicator(str(file), n, valid=valid)
    has_valid_peer = matrix[:, valid].sum(1) > 0
    torch.testing.assert_close(
        dropped[has_valid_peer],
        communicators.drop_invalid(matrix, valid)[has_valid_peer],
        rtol=0,
        atol=1e-6,
    )


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("1,0\n0,1", "2 x 2 weights, not 3 x 3"),
        ("1,0,0\n0,1,0", "2 x 3"),
        ("1,0,0\n0,0.9,0\n0,0,1", "sum to 1"),
        ("1,0,0\n0,0.9999,0\n0,0,1", "sum to 1"),
        ("1,0,0\n0,1.5,-0.5\n0,0,1", "at least 0"),
        ("1,0,0\n0,nan,1\n0,0,1", "simplex"),
        ("1,0,0\n0,one,0\n0,0,1", "one"),
        ("0,5;0,5;0\n0,1,0\n0,0,1", "columns changed"),  # decimal commas
    ],
)
def test_a_file_without_a_communicator_is_refused(tmp_path, text, named):
    file = tmp_path / "matrix.csv"
    file.write_text(text)
    with pytest.raises(ValueError, match=named):
        communicators.from_csv(str(file), 3)


@pytest.mark.parametrize(("separator", "point"), [(",", "."), (";", "."), (";", ",")])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_matrix_may_come_from_a_spreadsheet(tmp_path, separator, point, encoding):
    """With a byte-order mark, and semicolons where the comma is for decimals; a comment's mean
    nothing.
    """
    file = tmp_path / "matrix.csv"
    rows = [separator.join(row).replace(".", point) for row in (["0.25", "0.75"], ["0.5", "0.5"])]
    file.write_text("\n".join(["# a; b", *rows]), encoding=encoding)
    assert communicators.from_csv(str(file), 2).tolist() == [[0.25, 0.75], [0.5, 0.5]]


# No communicators: a matrix of three agents each, and what the line says of it
BAD_MATRICES = {
    "vector": ([0.2, 0.3, 0.5], "has 3 weights, not 3 x 3"),
    "too small": ([[0.5, 0.5], [0.5, 0.5]], "has 2 x 2 weights, not 3 x 3"),
    "negative": ([[1, 0, 0], [-0.43, 0.9, 0.53], [0, 0, 1]], "agent 1's"),
    "sum": ([[1, 0, 0], [0, 1, 0], [0.5, 0.5, 1]], "agent 2's"),
    "almost": ([[0.9998, 0, 0], [0, 1, 0], [0, 0, 1]], "agent 0's"),
    "nan": ([[1, 0, 0], [0, 1, 0], [NAN, 0, 1]], "agent 2's"),
    "infinite": ([[1, 0, 0], [INF, -INF, 1], [0, 0, 1]], "agent 1's"),
}


@pytest.mark.parametrize("kind", BAD_MATRICES)
@pytest.mark.parametrize("usable", [None, torch.tensor([True, True, True])], ids=str)
def test_what_is_no_communicator_is_refused(kind, usable):
    matrix, named = BAD_MATRICES[kind]
    args = prpo_minigrid.Args(num_agents=3, communicator="mine")
    message = refusal(communicators.check_matrix, args, torch.tensor(matrix), usable)
    assert message.startswith("--communicator mine: has ")
    assert named in message


def test_rows_that_nobody_can_know_are_not_checked(monkeypatch):
    """Of an agent without a usable snapshot, and of those of other processes."""
    args = prpo_minigrid.Args(num_agents=3, communicator="mine")
    matrix = torch.eye(3)
    matrix[0] = 0.33333  # rounded
    matrix[2] = NAN
    communicators.check_matrix(args, matrix, torch.tensor([True, True, False]))
    everybody = torch.tensor([True, True, True])
    assert "agent 2's" in refusal(communicators.check_matrix, args, matrix, everybody)
    monkeypatch.setattr(communicators, "get_world_size", lambda: 3)
    monkeypatch.setenv("RANK", "1")
    communicators.check_matrix(args, matrix, everybody)
    matrix[0] = NAN
    communicators.check_matrix(args, matrix, everybody)
    matrix[1] = NAN  # also the row of this process
    communicators.check_matrix(args, matrix, torch.tensor([True, False, True]))
    assert "agent 1's" in refusal(communicators.check_matrix, args, matrix, everybody)
    matrix[2] = 1 / 3
    assert "agent 1's" in refusal(communicators.check_matrix, args, matrix, everybody)
    # Another launcher does not say which agents are held
    monkeypatch.setattr(communicators, "exchange_of_launcher", object())
    communicators.check_matrix(args, matrix, everybody)
    monkeypatch.setenv("RANK", "0")
    matrix[:] = NAN
    assert "agent 0's" in refusal(communicators.check_matrix, args, matrix, everybody)
    monkeypatch.setattr(communicators, "exchange_of_launcher", None)
    assert "agent 0's" in refusal(communicators.check_matrix, args, matrix, everybody)


@pytest.mark.parametrize("p", [-0.1, 1.0001, 7.0, NAN, INF])
def test_self_preference_outside_the_unit_interval_is_refused(p):
    with pytest.raises(ValueError, match=f"{p}"):
        communicators.self_preferred(3, p)
    with pytest.raises(ValueError, match=f"{p}"):
        communicators.self_preferred(1, p)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: communicators.softmax_reward(torch.ones(2), 0.0), "0.0"),
        (lambda: communicators.softmax_reward(torch.ones(2), -1.0), "-1.0"),
        (lambda: communicators.softmax_reward(torch.ones(2), NAN), "nan"),
        (
            lambda: mix_log_probs(policies(0, 2, 3), torch.tensor([0.5, 0.5]), "harmonic"),
            "harmonic",
        ),
        (
            lambda: communicators.kl_to_reference(policies(0, 3), policies(1, 3), "sideways"),
            "sideways",
        ),
    ],
)
def test_bad_value_is_refused_by_name(call, named):
    with pytest.raises(ValueError, match=named):
        call()


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_ring_hears_oneself_and_two_neighbours(n):
    rows = [set(row.nonzero().flatten().tolist()) for row in communicators.ring(n)]
    assert rows == [{(i - 1) % n, i, (i + 1) % n} for i in range(n)]


def test_sparse_rows_are_renormalised():
    row = [0.4, 0.3, 0, 0.3]  # Example 2 fixes c_ii = p, whatever the other weights are
    assert_rows(
        make_communicator("self-preferred", 4, self_preference=0.4, topology="ring"),
        [row[-i:] + row[:-i] for i in range(4)],
    )
    # Agents 0, 3 and 4 have no positive return in their neighbourhood: it gets uniform weights
    third = 1 / 3
    assert_rows(
        make_communicator(
            "reward", 5, returns=torch.tensor([0.0, 0.0, 4.0, 0.0, 0.0]), topology="ring"
        ),
        [
            [third, third, 0, 0, third],
            [0, 0, 1, 0, 0],
            [0, 0, 1, 0, 0],
            [0, 0, 1, 0, 0],
            [third, 0, 0, third, third],
        ],
    )


@examples
@given(data=st.data())
def test_self_preference_is_kept_in_every_neighbourhood(data):
    """c_ii = p with the ring, top-k and invalid peers, and the rest is shared evenly, as long as a
    peer is left.
    """
    n = data.draw(st.integers(2, 7), "n")
    p = data.draw(st.floats(0.01, 0.99), "p")
    valid = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n), "valid"))
    sparse = {
        "topology": data.draw(st.sampled_from(TOPOLOGIES)),
        "num_peers": data.draw(st.integers(0, 3)),
    }
    matrix = make_communicator("self-preferred", n, self_preference=p, valid=valid, **sparse)
    near = (
        communicators.ring(n)
        if sparse["topology"] == "ring"
        else torch.ones(n, n, dtype=torch.bool)
    )
    for i in range(n):
        peers = [j for j in range(n) if j != i and near[i, j] and valid[j]]
        weighted = [j for j in range(n) if j != i and matrix[i, j] > 0]
        assert set(weighted) <= set(peers) and len(weighted) == min(
            len(peers), sparse["num_peers"] or n
        )
        if valid[i] or not peers:
            assert matrix[i, i].item() == pytest.approx(p if peers else 1.0, abs=1e-6)
        assert matrix[i, weighted].numel() < 2 or matrix[i, weighted].std() < 1e-6


@pytest.mark.parametrize("name", sorted(set(COMMUNICATORS) - {"identity", "best"}))
def test_invalid_peers_leave_their_place_to_valid_ones(name):
    """Agent 1 is the first choice of all and invalid: with top-k each still has a peer."""
    policy = policies(0, 1, 6, 4, scale=3.0)
    log_probs = torch.cat((policy, policy, policies(1, 3, 6, 4, scale=3.0)))
    returns = torch.tensor([1.0, 9.0, 2.0, 3.0, 2.5])
    valid = torch.tensor([True, False, True, True, True])
    before = make_communicator(name, 5, returns=returns, log_probs=log_probs, num_peers=1)
    assert before[0, 1] > 0
    matrix = make_communicator(
        name, 5, returns=returns, log_probs=log_probs, num_peers=1, valid=valid
    )
    for i in (0, 2, 3, 4):
        assert matrix[i, 1] == 0 and matrix[i, i] > 0 and matrix[i].count_nonzero() == 2


@examples
@given(seeds, st.integers(1, 8), st.integers(1, 9))
def test_top_k_keeps_oneself_and_the_heaviest_peers(seed, n, k):
    weights = simplex(seed, n, n)  # its zeros are ties
    mask = communicators.top_k(weights, k)
    assert mask.diagonal().all()
    for i in range(n):
        peers = sorted((-weights[i, j].item(), (j - i) % n, j) for j in range(n) if j != i)
        assert set(mask[i].nonzero().flatten().tolist()) == {i, *(j for *_, j in peers[:k])}


def test_non_expansion_is_the_largest_absolute_row_sum():
    matrix = torch.tensor([[0.5, -0.75], [0.5, 0.25]])
    assert communicators.non_expansion(matrix) == pytest.approx(1.25)


def test_the_summary_of_an_asymmetric_matrix():
    """Agents 1 and 2 listen to agent 0, which listens to agent 2; distances may be unknown."""
    matrix = torch.tensor([[0.5, 0.0, 0.5], [0.25, 0.75, 0.0], [1.0, 0.0, 0.0]])
    distances = torch.tensor([[0.0, 0.9, 0.2], [NAN, 0.0, 0.9], [0.4, 0.9, 0.0]])
    assert communicators.summarize_communicator(matrix, distances) == pytest.approx(
        {
            "communicator/self_weight": 1.25 / 3,
            "communicator/peers": 1.0,
            "communicator/largest_peer_weight": 1.0,
            "communicator/most_listeners": 2,
            "distances/mean": 0.3,
            "distances/largest": 0.4,
        }
    )
    matrix[1] = NAN  # an agent of another process
    distances[1] = NAN
    assert communicators.summarize_communicator(matrix, distances) == pytest.approx(
        {
            "communicator/self_weight": 0.25,
            "communicator/peers": 1.0,
            "communicator/largest_peer_weight": 1.0,
            "communicator/most_listeners": 1,
            "distances/mean": 0.3,
            "distances/largest": 0.4,
        }
    )


@examples
@given(seeds, st.integers(1, 5), scales)
def test_definition_1_non_expansion_in_total_variation(seed, n, scale):
    """max_i ||C_i x - C_i y|| <= ||C|| max_j ||x_j - y_j||, with equality where all agents agree on
    x and on y.
    """
    matrix = simplex(seed, n, n)
    # [x or y, agents, states, actions]
    pairs = torch.stack([policies(seed + k, n, 3, 4, scale=scale) for k in (1, 2)])

    def distance(pair):
        return total_variation(pair)[0, 1].item()

    for both, tight in ((pairs, False), (pairs[:, :1].expand_as(pairs), True)):
        bound = communicators.non_expansion(matrix) * max(distance(both[:, j]) for j in range(n))
        mixed = max(
            distance(torch.stack([mix_log_probs(policy, row) for policy in both])) for row in matrix
        )
        assert mixed <= bound + 1e-5
        assert not tight or mixed == pytest.approx(bound, abs=1e-5)


# --- gates ---


def numbers(**options):
    """Floats of 32 bits, among them equal ones."""
    few = st.sampled_from([-1.0, 0.0, 0.5, 1.0, 1e30])
    return st.floats(width=32, **options) | few


def critics(n, states, element):
    """V_j of each state, [policies, states]."""
    rows = st.lists(element, min_size=n * states, max_size=n * states)
    return rows.map(lambda values: torch.tensor(values).view(n, states))


@examples
@given(data=st.data())
def test_a_gates_rows_lie_on_the_simplex_for_any_values(data):
    """Also NaN, infinite, huge and equal ones, and returns of no width; a peer of weight 0 stays
    at 0.
    """
    n = data.draw(st.integers(1, 5), "n")
    weights = simplex(data.draw(seeds, "seed"), n)[0]
    values = data.draw(critics(n, 3, numbers()), "values")
    returns = torch.tensor(data.draw(st.lists(numbers(), min_size=1, max_size=4), "returns"))
    gated = communicators.gate_by_value(weights, values, returns)
    assert gated.shape == (n, 3)
    assert (gated >= 0).all()
    torch.testing.assert_close(gated.sum(0), torch.ones(3), rtol=0, atol=1e-6)
    assert not gated[weights == 0].any()


@examples
@given(data=st.data())
def test_a_gate_is_what_loops_compute(data):
    """Values and returns are those of games with rewards around 1."""
    n = data.draw(st.integers(1, 5), "n")
    weights = simplex(data.draw(seeds, "seed"), n)[0].double()
    element = st.sampled_from([NAN, INF, -INF]) | st.floats(-3, 3).map(lambda x: round(x, 3))
    values = data.draw(critics(n, 4, element), "values").double()
    element = st.floats(-2, 2).map(lambda x: round(x, 3))
    returns = data.draw(st.lists(element, min_size=1, max_size=5), "returns")
    visited = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=6), "visited")
    for samples in (None, torch.tensor(visited)):
        gated = communicators.gate_by_value(
            weights, values, torch.tensor(returns, dtype=torch.double), samples
        )
        rows = gate_by_hand(weights.tolist(), values.tolist(), returns, samples)
        for state, row in enumerate(rows):
            assert gated[:, state].tolist() == pytest.approx(row, abs=1e-5)


def test_a_gate_by_hand():
    """Promises of 1/2, 1 and 0 of the range of returns in the first state; those of the first
    critic differ half as much between the states, the last one promises as much everywhere.
    """
    weights = torch.tensor([0.5, 0.25, 0.25, 0.25])
    values = torch.tensor([[1.0, -1.0], [3.0, -2.0], [-1.0, 3.0], [3.0, 3.0]])
    gated = communicators.gate_by_value(weights, values, torch.tensor([0.0, 2.0, -1.0, 3.0]))
    assert gated.T.tolist() == [pytest.approx([0.2, 0.8, 0, 0]), pytest.approx([0, 0, 1, 0])]


def test_a_critic_that_is_nan_in_a_sample_has_no_vote():
    values = torch.tensor([[0.5, 0.7, NAN], [0.2, 0.4, 0.6]])
    returns = torch.tensor([0.0, 1.0])
    gated = communicators.gate_by_value(torch.tensor([0.5, 0.5]), values, returns)
    assert gated.tolist() == [[0, 0, 0], [1, 1, 1]]
    visited = torch.tensor([0, 1])
    gated = communicators.gate_by_value(torch.tensor([0.5, 0.5]), values, returns, visited)
    assert gated[0, 2] == 0 < gated[0, 0]


@examples
@given(seeds, st.integers(1, 5), numbers())
def test_equal_votes_give_the_communicator_back(seed, n, value):
    """Whatever the critics agree on, also that nothing is to be expected."""
    weights = simplex(seed, n)[0]
    values = torch.tensor([value, 0.2, 0.7]).expand(n, 3)
    for returns in ([0.0, 1.0], [0.5, 0.5], [-1e30, 1e30]):
        gated = communicators.gate_by_value(weights, values, torch.tensor(returns))
        torch.testing.assert_close(gated, weights[:, None].expand(n, 3), rtol=0, atol=1e-6)


def some_gate(seed, n, states=6):
    """weights [n], values [n, states] and returns [9] in double precision, some values out of the
    range of the returns.
    """
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n, states, generator=generator, dtype=torch.double)
    returns = torch.randn(9, generator=generator, dtype=torch.double)
    return simplex(seed, n)[0].double(), values, returns


@examples
@given(seeds, st.integers(1, 6), st.floats(1e-3, 1e3), st.floats(-100, 100))
def test_a_gate_does_not_depend_on_units_that_all_share(seed, n, scale, offset):
    """The same affine change of all values and returns changes no weight."""
    weights, values, returns = some_gate(seed, n)
    gated = communicators.gate_by_value(weights, values, returns)
    changed = communicators.gate_by_value(
        weights, scale * values + offset, scale * returns + offset
    )
    torch.testing.assert_close(changed, gated, rtol=1e-6, atol=1e-6)


@examples
@given(seeds, st.integers(2, 6), st.floats(0, 1e30))
def test_a_critic_gains_nothing_by_promising_more_than_all_others(seed, n, excess):
    """In one state: one that promises the same everywhere has no vote at all."""
    weights, values, returns = some_gate(seed, n)
    most = torch.cat((values[1:].flatten(), returns)).max()
    shares = []
    for promise in (most, most + excess, INF):
        values[0, 0] = promise
        shares.append(communicators.gate_by_value(weights, values, returns)[0])
    assert torch.equal(shares[0], shares[1])
    assert torch.equal(shares[0], shares[2])


def test_a_beginner_hears_most_of_its_peers_and_not_one_alone():
    """Beside two trained critics and one that always says the maximum the range ends at 0.8, what
    the lower of the trained promises. With one trained critic it ends with the listener's returns,
    above which both peers lie.
    """
    weights = torch.full((4,), 0.25)
    returns = torch.tensor([0.0, 0.1])
    trained = [[0.5, 0.9], [0.4, 0.8]]
    beginner = [0.0, 0.05]
    values = torch.tensor([beginner, *trained, [1e3, 1e3]])
    gated = communicators.gate_by_value(weights, values, returns)
    votes = torch.tensor([0.0, 0.625**2 * 0.1875, 0.5**2 * 0.25, 0.0])
    torch.testing.assert_close(gated[:, 0], votes / votes.sum())
    values = torch.tensor([beginner, beginner, trained[0], [1e3, 1e3]])
    gated = communicators.gate_by_value(weights, values, returns)
    torch.testing.assert_close(gated[:, 1], torch.tensor([0.5, 0.5, 0.0, 0.0]))


def test_a_gates_log_has_every_agent():
    """Means and standard deviations over samples of the senders, 0 for the others."""
    senders = torch.tensor([True, False, True])
    weights = torch.tensor([[0.25, 0.75, 0.5, 0.5], [0.75, 0.25, 0.5, 0.5]])
    summary = communicators.summarize_gate(senders, weights)
    spread = math.sqrt(0.125 / 4)
    assert summary == pytest.approx(
        {
            "gate/weight_0": 0.5,
            "gate/weight_1": 0.0,
            "gate/weight_2": 0.5,
            "gate/spread_0": spread,
            "gate/spread_1": 0.0,
            "gate/spread_2": spread,
        }
    )
    many = torch.ones(communicators.FEW_AGENTS + 1, dtype=torch.bool)
    assert communicators.summarize_gate(many, torch.full((len(many), 2), 1 / len(many))) == {}


# --- mixtures and divergences ---


@examples
@given(seeds, st.integers(1, 5), st.sampled_from([0.0, 1.0, 10.0]))
def test_mixtures_are_the_weighted_mean_and_the_normalised_product(seed, n, scale):
    log_probs = policies(seed, n, 2, 3, 4, scale=scale)
    weights = simplex(seed, n)[0]
    probs = log_probs.double().exp()
    column = weights.double().view(n, 1, 1, 1)
    arithmetic = (column * probs).sum(0)
    product = (probs**column).prod(0)
    geometric = product / product.sum(-1, keepdim=True)
    for mixture, expected in (("arithmetic", arithmetic), ("geometric", geometric)):
        mixed = mix_log_probs(log_probs, weights, mixture)
        torch.testing.assert_close(mixed, expected.log().float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(
        mix_log_probs(log_probs, weights), mix_log_probs(log_probs, weights, "arithmetic")
    )


@pytest.mark.parametrize("mixture", communicators.MIXTURES)
@examples
@given(seeds, st.integers(1, 5), scales)
def test_mixture_sums_to_one_at_extreme_logits(mixture, seed, n, scale):
    logits = scale * (
        2.0 * torch.randint(2, (n, 3, 6), generator=torch.Generator().manual_seed(seed)) - 1
    )
    for log_probs in (logits.log_softmax(-1), policies(seed, n, 3, 6, scale=scale)):
        mixed = mix_log_probs(log_probs, simplex(seed, n)[0], mixture)
        assert not mixed.isnan().any()
        torch.testing.assert_close(mixed.exp().sum(-1), torch.ones(3), rtol=0, atol=1e-5)


@pytest.mark.parametrize("mixture", communicators.MIXTURES)
@pytest.mark.parametrize("garbage", [-INF, NAN, INF])
@pytest.mark.parametrize("position", [0, 2])
def test_policy_of_weight_zero_has_no_influence(mixture, garbage, position):
    log_probs = policies(0, 3, 4, 5)
    weights = torch.tensor([0.2, 0.3, 0.5])
    weights[position] = 0.0
    weights /= weights.sum()
    others = [j for j in range(3) if j != position]
    log_probs[position] = garbage
    mixed = mix_log_probs(log_probs, weights, mixture)
    assert mixed.isfinite().all()
    assert torch.equal(mixed, mix_log_probs(log_probs[others], weights[others], mixture))


@pytest.mark.parametrize("mixture", communicators.MIXTURES)
@examples
@given(seeds, st.integers(2, 4), st.integers(0, 2))
def test_a_policy_that_is_nan_in_a_state_has_no_influence_there(mixture, seed, n, dimensions):
    """A peer may send weights that overflow in states that only the reader has."""
    generator = torch.Generator().manual_seed(seed)
    shape = (3, 2)[:dimensions]
    log_probs = policies(seed, n, *shape, 4)
    missing = torch.rand(n, *shape, generator=generator) < 0.4
    log_probs[missing] = NAN
    weights = simplex(seed, n)[0]
    mixed = mix_log_probs(log_probs, weights, mixture)
    for state in itertools.product(*map(range, shape)):
        there = ~missing[(slice(None), *state)] & (weights > 0)
        if there.any():
            of_state = log_probs[(there, *state)]
            kept = weights[there] / weights[there].sum()
            expected = mix_log_probs(of_state, kept, mixture)
            torch.testing.assert_close(mixed[state], expected)
        else:
            assert mixed[state].isnan().all()


@pytest.mark.parametrize("mixture", communicators.MIXTURES)
@examples
@given(seeds, st.integers(1, 4), st.integers(1, 2), st.booleans())
def test_weights_by_state_mix_each_state_with_its_own(mixture, seed, n, dimensions, damaged):
    """A policy that is NaN in a state, or has no weight there, has no influence there."""
    generator = torch.Generator().manual_seed(seed)
    shape = (5, 2)[:dimensions]
    log_probs = policies(seed, n, *shape, 4)
    rows = math.prod(shape)
    weights = simplex(seed, n, rows).T.reshape(n, *shape)
    if damaged:
        log_probs[torch.rand(n, *shape, generator=generator) < 0.3] = NAN
        log_probs[weights == 0] = INF
    mixed = mix_log_probs(log_probs, weights, mixture)
    assert mixed.shape == (*shape, 4)
    for state in itertools.product(*map(range, shape)):
        of_state = log_probs[(slice(None), *state)]
        row = weights[(slice(None), *state)]
        there = ~of_state[:, 0].isnan() & (row > 0)
        if there.any():
            kept = row[there] / row[there].sum()
            expected = mix_log_probs(of_state[there], kept, mixture)
            torch.testing.assert_close(mixed[state], expected)
        else:
            assert mixed[state].isnan().all()


@pytest.mark.parametrize("mixture", communicators.MIXTURES)
def test_one_policy_with_all_weight_in_every_state_is_the_reference(mixture):
    """Bit for bit as with a vector of weights: a gate does not change isolated training."""
    log_probs = policies(0, 2, 50, 7)
    weights = torch.tensor([1.0, 0.0])
    mixed = mix_log_probs(log_probs, weights[:, None].expand(2, 50), mixture)
    assert torch.equal(mixed, mix_log_probs(log_probs, weights, mixture))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_weight_that_vanishes_in_the_policies_dtype_has_no_influence(dtype):
    log_probs = torch.tensor([[0.0, -INF], [-1.0, -0.5]]).log_softmax(-1).to(dtype)
    mixed = mix_log_probs(log_probs, torch.tensor([1e-60, 1.0], dtype=torch.float64), "geometric")
    torch.testing.assert_close(mixed, log_probs[1])


def test_disjoint_policies_mix_arithmetically_and_are_refused_geometrically():
    log_probs = torch.eye(2).log()
    weights = torch.tensor([0.25, 0.75])
    torch.testing.assert_close(mix_log_probs(log_probs, weights).exp(), weights)
    with pytest.raises(ValueError, match="no action in common"):
        mix_log_probs(log_probs, weights, "geometric")
    # [policies, states, actions]
    one_bad_state = torch.stack([policies(0, 2, 2), log_probs], dim=1)
    with pytest.raises(ValueError, match="no action in common"):
        mix_log_probs(one_bad_state, weights, "geometric")
    partly = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]).log()
    torch.testing.assert_close(
        mix_log_probs(partly, weights, "geometric").exp(), torch.tensor([0.0, 1.0, 0.0])
    )


@pytest.mark.parametrize("mixture", communicators.MIXTURES)
@examples
@given(seeds, st.integers(0, 2), scales)
def test_one_policy_of_weight_one_is_the_reference(mixture, seed, j, scale):
    log_probs = policies(seed, 3, 4, 5, scale=scale)
    mixed = mix_log_probs(log_probs, communicators.identity(3)[j], mixture)
    torch.testing.assert_close(mixed, log_probs[j], rtol=1e-6, atol=1e-6)
    if mixture == "arithmetic":  # isolated training must not differ even by rounding
        assert torch.equal(mixed, log_probs[j])


@examples
@given(seeds, scales, scales)
def test_categorical_kl_is_exact(seed, scale_p, scale_q):
    log_p = policies(seed, 3, 4, 5, scale=scale_p)
    log_q = policies(seed + 1, 3, 4, 5, scale=scale_q)
    kl = categorical_kl(log_p, log_q)
    assert (kl >= -1e-5).all()
    p = log_p.double().exp()
    log_ratio = log_p.double() - log_q.double()
    torch.testing.assert_close(kl, (p * log_ratio).sum(-1).float(), rtol=1e-5, atol=1e-5)
    expected = kl_divergence(Categorical(logits=log_p), Categorical(logits=log_q))
    is_finite = expected.isfinite()  # torch has infinity where q underflows to 0
    torch.testing.assert_close(kl[is_finite], expected[is_finite], rtol=1e-5, atol=1e-5)
    variation = (log_p.exp() - log_q.exp()).abs().sum(-1) / 2
    # Pinsker: no divergence only between equal policies
    assert (kl >= 2 * variation**2 - 1e-5).all()
    assert torch.equal(categorical_kl(log_p, log_p), torch.zeros(3, 4))


@pytest.mark.parametrize(
    ("p", "q", "expected"),
    [
        ([0.5, 0.5, 0.0], [0.25, 0.25, 0.5], math.log(2)),
        ([0.5, 0.5, 0.0], [0.5, 0.5, 0.0], 0.0),
        ([1.0, 0.0, 0.0], [0.5, 0.5, 0.0], math.log(2)),
        ([0.5, 0.5, 0.0], [1.0, 0.0, 0.0], INF),
    ],
)
def test_categorical_kl_with_impossible_actions(p, q, expected):
    assert categorical_kl(torch.tensor(p).log(), torch.tensor(q).log()).item() == pytest.approx(
        expected
    )


def test_categorical_kl_where_p_underflows_to_zero():
    assert categorical_kl(torch.tensor([0.0, -200.0]), torch.tensor([0.0, -INF])).item() == 0.0


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("direction", communicators.KL_DIRECTIONS)
def test_kl_to_reference_value_and_gradient(direction, masked):
    """Against the closed forms in the learner's logits z: forward p - r, reverse p (log p/r -
    KL).
    """
    logits = torch.tensor([[0.3, -1.0, 0.7]])
    reference = torch.tensor([[0.5, 0.5, 0.0]] if masked else [[0.6, 0.3, 0.1]])
    if masked and direction == "reverse":
        # Where the reference is 0 the policy must be, or the divergence is infinite
        logits[:, 2] = -INF
    logits.requires_grad_()
    log_reference = reference.log().requires_grad_()
    log_policy = logits.log_softmax(-1)
    kl = communicators.kl_to_reference(log_policy, log_reference, direction)
    kl.sum().backward()
    p = log_policy.detach().double().exp()
    r = reference.double()
    first, second = (r, p) if direction == "forward" else (p, r)
    expected = torch.where(first > 0, first * (first / second).log(), 0.0).sum(-1)
    gradient = p - r
    if direction == "reverse":
        gradient = torch.where(p > 0, p * ((p / r).log() - expected[:, None]), 0.0)
    torch.testing.assert_close(kl.detach().double(), expected, rtol=1e-5, atol=1e-6)
    assert log_reference.grad is None
    assert logits.grad.isfinite().all()
    torch.testing.assert_close(logits.grad.double(), gradient, rtol=1e-5, atol=1e-6)


def test_a_policy_that_equals_its_reference_is_not_moved():
    """The reverse KL's gradient there is exactly 0: AdamW would scale up rounding errors."""
    logits = torch.randn(64, 1000).mul(3).requires_grad_()
    log_policy = logits.log_softmax(-1)
    kl = communicators.kl_to_reference(log_policy, log_policy.detach().clone(), "reverse")
    kl.sum().backward()
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_forward_is_the_default_direction():
    log_policy = policies(0, 4, 3)
    log_reference = policies(1, 4, 3)
    forward = communicators.kl_to_reference(log_policy, log_reference, "forward")
    assert torch.equal(communicators.kl_to_reference(log_policy, log_reference), forward)


@pytest.mark.parametrize("mixture", communicators.MIXTURES)
@pytest.mark.parametrize("direction", communicators.KL_DIRECTIONS)
def test_gradient_reaches_only_the_learner(mixture, direction):
    """Nor through its own part of the reference: its gradient is that of a constant reference."""
    torch.manual_seed(0)
    agents = [torch.nn.Linear(4, 3) for _ in range(3)]
    public = torch.randn(5, 4)
    states = torch.randn(6, 4)

    def learn(live):
        for agent in agents:
            agent.zero_grad()
        with torch.set_grad_enabled(live):
            matrix = communicators.similarity(
                torch.stack([agent(public).log_softmax(-1) for agent in agents])
            )
            pi = torch.stack([agent(states).log_softmax(-1) for agent in agents])
            reference = mix_log_probs(pi, matrix[1], mixture)
        assert reference.requires_grad == live
        log_policy = agents[1](states).log_softmax(-1)
        communicators.kl_to_reference(log_policy, reference, direction).mean().backward()
        return [[parameter.grad for parameter in agent.parameters()] for agent in agents]

    (peer, learner, other) = learn(live=True)
    constant = learn(live=False)[1]
    assert peer == other == [None, None]
    assert all(gradient.isfinite().all() and gradient.any() for gradient in learner)
    torch.testing.assert_close(learner, constant, rtol=0, atol=0)


# --- parameters ---


@examples
@given(seeds, st.integers(1, 6), st.sampled_from([torch.float32, torch.float64]))
def test_averaged_parameters_are_the_matrix_product(seed, n, dtype):
    matrix = simplex(seed, n, n)
    parameters = torch.randn(n, 17, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    averaged = average_parameters(matrix, parameters)
    assert averaged.dtype == dtype
    torch.testing.assert_close(
        averaged, (matrix.double() @ parameters.double()).to(dtype), rtol=1e-5, atol=1e-6
    )
    assert torch.equal(average_parameters(communicators.identity(n), parameters), parameters)
    equal = parameters[:1].expand(n, -1)
    torch.testing.assert_close(average_parameters(matrix, equal), equal, rtol=1e-6, atol=1e-6)


def test_averaging_with_a_row_that_sums_to_zero_is_refused():
    with pytest.raises(ValueError, match="sum"):
        average_parameters(torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.ones(2, 3))


@pytest.mark.parametrize("snapshot", [(1, 1, NAN, 1), (INF, 1, 1, 1), (1, 1, 1, -INF)])
def test_invalid_snapshot_is_dropped_and_rows_renormalised(alone, snapshot, capsys):
    first = torch.full((4,), 4.0)
    last = torch.full((4,), 8.0)
    sent = [first, torch.tensor(snapshot), last]
    received, reports = alone(3).round(sent, torch.tensor([0.5, 9.0, 0.25]))
    assert received[1] is None
    assert reports.tolist() == pytest.approx([0.5, NAN, 0.25], nan_ok=True)  # no say in C either
    assert sent[1].tolist() == pytest.approx(list(snapshot), nan_ok=True)
    assert "invalid snapshots of agents [1]" in capsys.readouterr().out
    assert torch.equal(received[0], first) and torch.equal(received[2], last)
    valid = torch.tensor([x is not None for x in received])
    matrix = communicators.drop_invalid(communicators.self_preferred(3, 0.6), valid)
    assert_rows(matrix, [[0.75, 0, 0.25], [0.5, 0, 0.5], [0.25, 0, 0.75]])
    parameters = torch.stack([first, torch.tensor(snapshot), last])
    assert_rows(average_parameters(matrix, parameters), [[5.0] * 4, [6.0] * 4, [7.0] * 4])


def test_row_with_nobody_left_falls_back_on_the_agent_itself():
    matrix = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.0, 0.5], [0.0, 0.5, 0.5]])
    valid = torch.tensor([True, False, True])
    assert_rows(communicators.drop_invalid(matrix, valid), [[1, 0, 0], [0.5, 0, 0.5], [0, 0, 1]])
    assert_rows(
        communicators.drop_invalid(matrix, torch.zeros(3, dtype=torch.bool)), torch.eye(3).tolist()
    )


@pytest.mark.parametrize("name", sorted(set(COMMUNICATORS) - {"best"}))
def test_every_communicator_drops_invalid_peers(name):
    """The others keep their proportions, whatever the invalid agent's policy or return would have
    been.
    """
    log_probs = policies(0, 4, 3, 5)
    returns = torch.tensor([1.0, 9.0, 2.0, 3.0])
    valid = torch.tensor([1, 0, 1, 1]) > 0
    full = make_communicator(name, 4, log_probs=log_probs, returns=returns)
    log_probs[1] = NAN
    matrix = make_communicator(name, 4, log_probs=log_probs, returns=returns, valid=valid)
    for i in (0, 2, 3):
        kept = full[i] * valid
        if name == "self-preferred":  # which fixes c_ii: only what the others get changes
            kept[i] *= (kept.sum() - kept[i]) / (full[i].sum() - full[i, i])
        torch.testing.assert_close(matrix[i], kept / kept.sum())
    assert_communicator(matrix, 4)
    assert matrix[1, 1] == (name == "identity")
    nobody = make_communicator(
        name, 4, log_probs=log_probs, returns=returns, valid=torch.zeros(4, dtype=torch.bool)
    )
    assert_rows(nobody, torch.eye(4).tolist())


# --- exchange ---


@pytest.fixture
def alone(monkeypatch):
    """One process, as if not started by torchrun."""
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    return lambda num_agents: Exchange(num_agents, torch.device("cpu"))


@pytest.mark.parametrize("n", [1, 3])
def test_one_process_holds_all_agents_and_moves_nothing(alone, n):
    exchange = alone(n)
    local = torch.arange(4.0 * n).view(n, 4)
    assert exchange.agents == range(n) and (exchange.rank, exchange.world_size) == (0, 1)
    gathered = exchange.all_gather(local)
    assert torch.equal(gathered, local)
    gathered += 1.0
    # Snapshots stay, while the agents go on learning
    assert torch.equal(local, torch.arange(4.0 * n).view(n, 4))
    assert torch.equal(exchange.broadcast(local), local)
    exchange.barrier()
    exchange.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("reads", "listeners"),
    [
        (torch.ones(3, 3, dtype=torch.bool), 6),
        (communicators.ring(8), 16),
        (torch.eye(4, dtype=torch.bool), 0),
        (~torch.eye(2, dtype=torch.bool), 2),
    ],
)
def test_snapshots_count_the_bytes_that_agents_send_each_other(alone, reads, listeners, dtype):
    """Also one that cannot be used has been sent to those who read it."""
    exchange = alone(len(reads))
    local = torch.ones(len(reads), 5, dtype=dtype)
    local[-1, 2] = NAN
    for rounds in (1, 2):
        *received, last = exchange.round(list(local))[0]
        exchange.count_bytes(reads)
        assert exchange.bytes_sent == rounds * listeners * 5 * local.element_size()
        assert last is None
        assert torch.equal(torch.stack(received), local[:-1])


@pytest.mark.parametrize("evaluated", [(), (1, 2)])
def test_agents_without_a_usable_policy_report_nothing(alone, monkeypatch, evaluated):
    """Agent 2, which is held here, and agent 1, elsewhere, if its policy has been evaluated."""
    exchange = alone(3)
    # As federate.py does, which knows of the agents held only
    exchange.agents = range(2, 3)
    monkeypatch.setattr(
        exchange, "all_gather", lambda row: torch.nn.functional.pad(row, (0, 0, 2, 0))
    )
    reports = torch.ones(3)
    assert exchange.drop_reports(reports, torch.tensor([True, False, False]), evaluated) == 1
    assert reports.isnan().tolist() == [False, 1 in evaluated, True]


def test_agents_that_ranks_cannot_share_equally_are_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="3 agents .* 2 ranks"):
        Exchange(3, torch.device("cpu"), timeout=1)


def test_world_size_without_rank_is_one_process(alone, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert alone(4).agents == range(4)


RANK_PROGRAM = """
import json, os, sys, time
import torch
import communicators
from communicators import Exchange

def connect(port, timeout):
    os.environ["MASTER_PORT"] = port
    return Exchange(4, torch.device("cpu"), timeout=timeout)

def fail(wait):
    start = time.monotonic()
    try:
        wait()
    except RuntimeError as error:
        return str(error), time.monotonic() - start

exchange = connect(sys.argv[1], 30)
result = {}
local = torch.zeros(2, 3)
mine = torch.tensor([[7.0, 8.0], [9.0, 10.0]]).T if exchange.rank == 0 else torch.zeros(2, 2)
result["broadcast"] = exchange.broadcast(mine).tolist()
networks = [torch.nn.Linear(2, 1), torch.nn.Linear(3, 2)]
for network in networks:
    for parameter in network.parameters():
        parameter.data.fill_(exchange.rank + 5.0)
exchange.broadcast_networks(networks)
result["networks"] = [communicators.flatten(network).sum().item() for network in networks]
exchange.barrier()
exchange.close()

exchange = connect(sys.argv[2], 2)
for busy_rank in (1, 0):
    if exchange.rank == busy_rank:
        time.sleep(2.3)  # longer than the time-out, but alive
    exchange.wait_for_all()
result["waited"] = True
if exchange.rank == 0:  # a rank that comes too late
    result["late"] = fail(lambda: exchange.all_gather(local))
else:
    time.sleep(2.3)
exchange.close()

exchange = connect(sys.argv[3], 30)  # a rank that dies
if exchange.rank == 0:
    result["dead"] = fail(lambda: exchange.all_gather(local))
    result["dead while others wait"] = fail(exchange.wait_for_all)
print(json.dumps(result), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What two processes on this machine report of their collectives, rank by rank."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "program.py").write_text(RANK_PROGRAM)
    ports = [free_port() for _ in range(3)]
    output = run_ranks(2, folder / "program.py", *ports, cwd=folder)
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def test_broadcast_gives_every_rank_the_values_of_rank_0(ranks):
    assert [result["broadcast"] for result in ranks] == [[[7.0, 9.0], [8.0, 10.0]]] * 2
    assert [result["networks"] for result in ranks] == [[3 * 5.0, 8 * 5.0]] * 2


@pytest.mark.parametrize(
    ("missing", "shortest", "longest"),
    [("late", 1.5, 20.0), ("dead", 0.0, 20.0), ("dead while others wait", 0.0, 20.0)],
)
def test_missing_rank_is_named_in_time(ranks, missing, shortest, longest):
    message, waited = ranks[0][missing]
    assert re.search(r"\branks? 1\b", message, re.IGNORECASE), message
    assert shortest <= waited <= longest


def test_ranks_wait_for_one_that_works_longer_than_the_timeout(ranks):
    assert [result["waited"] for result in ranks] == [True, True]


class Place:
    """Rank `rank` of two, whose peer the test plays: no process, no socket."""

    def __init__(self, monkeypatch, rank=0, gpus=("none", "none")):
        self.store = torch.distributed.HashStore()
        self.backend = None
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", "1")
        stores = iter([(self.store, rank, 2)])
        monkeypatch.setattr(torch.distributed, "rendezvous", lambda *_, **__: stores)
        monkeypatch.setattr(torch.distributed, "init_process_group", self.start)
        for name in ("new_group", "destroy_process_group"):
            monkeypatch.setattr(torch.distributed, name, lambda **_: None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        gpu = SimpleNamespace(uuid=gpus[rank])
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
        self.store.set(f"attempt_0/gpu_{1 - rank}", gpus[1 - rank])
        device = "cpu" if gpus[rank] == "none" else "cuda"
        self.exchange = Exchange(2, device, timeout=100)

    def start(self, backend, **_):
        self.backend = backend


@pytest.mark.parametrize(
    ("gpus", "backend"),
    [
        (("A", "B"), "nccl"),
        (("A", "A"), "gloo"),
        (("A", "none"), "gloo"),
        (("none", "none"), "gloo"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_nccl_is_chosen_by_all_ranks_or_by_none(gpus, backend, rank, monkeypatch):
    """Across machines too, which may have different numbers of GPUs: it needs one for every
    rank.
    """
    # Each is alone on its machine, where there are GPUs enough
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    place = Place(monkeypatch, rank, gpus)
    assert place.backend == backend
    assert place.exchange._wire == (
        place.exchange.device if backend == "nccl" else torch.device("cpu")
    )
    place.exchange.close()


@pytest.mark.parametrize(("local_rank", "device"), [(0, "cuda:0"), (2, "cuda:2"), (5, "cuda:1")])
def test_each_rank_of_a_machine_takes_a_gpu(local_rank, device, monkeypatch):
    """By its number there, whatever its number among all."""
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    place = Place(monkeypatch, 1, ("A", "B"))
    assert place.exchange.device == torch.device(device)
    place.exchange.close()


def test_float32_is_float32_on_a_gpu(alone, monkeypatch):
    """Convolutions of an update must not round to TF32 where the matrix products of a rollout do
    not.
    """
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        alone(1)
        assert torch.backends.cudnn.allow_tf32 and torch.get_float32_matmul_precision() == "high"
        assert Exchange(1, "cuda:0").device == torch.device("cuda:0")
        assert (
            not torch.backends.cudnn.allow_tf32
            and torch.get_float32_matmul_precision() == "highest"
        )
    finally:
        torch.set_float32_matmul_precision(precision)


def test_parameters_stay_where_they_are():
    """`unflatten` undoes `flatten`, and in place: rounding may depend on where."""
    network = torch.nn.Linear(3, 5)
    addresses = [parameter.data_ptr() for parameter in network.parameters()]
    kept = communicators.flatten(network)
    communicators.unflatten(torch.arange(20.0), network)
    assert network.weight.flatten().tolist() == [*range(15)]
    assert network.bias.tolist() == [*range(15, 20)]
    communicators.unflatten(kept, network)
    assert torch.equal(communicators.flatten(network), kept) and kept.count_nonzero() == 20
    assert addresses == [parameter.data_ptr() for parameter in network.parameters()]
    assert all(parameter.requires_grad for parameter in network.parameters())


def test_flat_tensors_have_buffers_and_are_copies():
    """In the order of the network's state, whatever its layers are called."""
    network = torch.nn.BatchNorm1d(2, dtype=torch.float64)
    network.running_mean += torch.tensor([5.0, 6.0])
    network.num_batches_tracked += 7
    flat = communicators.flatten(network)
    assert flat.tolist() == [1, 1, 0, 0, 5, 6, 1, 1, 7]
    flat += 1.0
    assert network.weight.tolist() == [1, 1]
    communicators.unflatten(flat, network)
    flat += 1.0
    assert network.running_mean.tolist() == [6, 7] and network.num_batches_tracked == 8


def test_networks_of_snapshots_have_their_own_sizes():
    """Of those agents whose snapshot is there; they are copies that learn nothing."""
    networks = [torch.nn.Linear(3, size) for size in (5, 2, 4)]
    snapshots = [torch.arange(20.0), torch.arange(8.0), None]
    loaded = communicators.load_networks(snapshots, networks, [1, 2])
    assert list(loaded) == [1]
    assert loaded[1].weight.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert loaded[1].bias.tolist() == [6, 7]
    assert not any(parameter.requires_grad for parameter in loaded[1].parameters())
    assert all(parameter.requires_grad for parameter in networks[1].parameters())
    snapshots[1] += 1.0
    assert loaded[1].bias.tolist() == [6, 7]
    assert not torch.equal(communicators.flatten(networks[1]), communicators.flatten(loaded[1]))
