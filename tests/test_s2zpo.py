"""Par-S2ZPO: the panel's vote, blocks and steps, bits on the wire, and runs from end to end."""

import copy
import dataclasses
import json
import math
import re

import gymnasium as gym
import numpy as np
import pytest
import torch
from command import parse_args
from helpers import (
    HAS_ENVPOOL,
    REPOSITORY,
    assert_same_run,
    metrics_of_page,
    name_in_page,
    only_run,
    refusal,
    rows_of,
    run_ranks,
    scalars_of,
    table_of,
    told_to_launcher,
    weights_of,
)
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import communicators
import s2zpo_mujoco
from s2zpo_mujoco import Args

# Numbers that differ from each other. Episodes of CartPole with a hardly trained policy last 9 to
# 30 steps: some end before the horizon, some at it
TINY = {
    "env_id": "CartPole-v1",
    "num_agents": 3,
    "hidden_sizes": (5,),
    "horizon": 25,
    "num_pairs": 4,
    "num_trajectories": 2,
    "num_evaluators": 1,
    "total_iterations": 4,
    "save_every": 2,
    "eval_episodes": 2,
}
TINY_D = 4 * 5 + 5 + 5 * 2 + 2
HOPPER = TINY | {"env_id": "Hopper-v5", "horizon": 12, "num_agents": 2, "num_pairs": 2}
BACKENDS = ["gymnasium", "envpool"] if HAS_ENVPOOL else ["gymnasium"]


def to_flags(**settings):
    """Settings as a command line."""
    words = []
    for name, value in settings.items():
        values = value if isinstance(value, tuple) else (value,)
        words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return words


def parse(**settings):
    """Arguments as the command line reads them."""
    return parse_args(s2zpo_mujoco, to_flags(**settings))


def train(run_dir, **changes):
    """A tiny run. Returns its summary and its folder."""
    summary = s2zpo_mujoco.main(parse(**TINY | {"run_dir": run_dir} | changes))
    return summary, only_run(run_dir)


def seeded(*key):
    """A generator for this key."""
    return torch.Generator().manual_seed(communicators.derive_seed(*key))


# --- the panel ---


@pytest.mark.parametrize("link", ["logistic", "linear", "probit", "noiseless"])
def test_links(link):
    """Strictly increasing until they are certain, symmetric, one half at no difference."""
    x = torch.tensor([-0.9, -0.5, -0.2, 0.0, 0.2, 0.5, 0.9], dtype=torch.double)
    chance = s2zpo_mujoco.compute_preference(x, link)
    torch.testing.assert_close(chance + chance.flip(0), torch.ones(7, dtype=torch.double))
    assert chance[3] == 0.5
    expected = {
        "logistic": 1 / (1 + np.exp(-x.numpy())),
        "probit": stats.norm.cdf(x.numpy()),
        "linear": 0.5 + x.numpy() / 2,
        "noiseless": np.array([0, 0, 0, 0.5, 1, 1, 1]),
    }
    np.testing.assert_allclose(chance, expected[link])
    far = s2zpo_mujoco.compute_preference(torch.tensor([-50.0, 50.0]), link)
    assert far.tolist() == pytest.approx([0, 1])


def test_answers_have_the_chances_of_the_link():
    """Bernoulli(sigma(difference of the mean returns / scale)), each answer of its own."""
    args = Args(num_evaluators=20000)
    returns = torch.tensor([[[1.0, 3.0], [5.0, 5.0]], [[10.0, 6.0], [0.0, 4.0]]]).double()
    answers, differences = s2zpo_mujoco.draw_answers(returns, args, 4.0, seeded(3))
    assert differences.tolist() == [6.0, -3.0]
    assert answers.shape == (2, 20000)
    assert set(answers.unique().tolist()) == {-1, 1}
    share = (answers == 1).double().mean(1)
    expected = 1 / (1 + np.exp([-6 / 4, 3 / 4]))
    np.testing.assert_allclose(share, expected, atol=0.015)


def test_more_pairs_and_evaluators_vote_right_more_often():
    """The share of right votes rises with N and with M, as far as D noisy episodes allow."""

    def share_of_right_votes(pairs, evaluators, trials=400):
        args = Args(num_evaluators=evaluators)
        generator = seeded(5, pairs, evaluators)
        right = 0
        for _ in range(trials):
            returns = torch.randn(2, pairs, 1, generator=generator, dtype=torch.double)
            returns[1] += 0.5  # the perturbed policy is better
            answers, _ = s2zpo_mujoco.draw_answers(returns, args, 1.0, generator)
            right += s2zpo_mujoco.count_votes(answers, generator) == 1
        return right / trials

    of_pairs = [share_of_right_votes(pairs, 1) for pairs in (1, 9, 65)]
    assert of_pairs[0] + 0.1 < of_pairs[1]
    assert of_pairs[1] + 0.1 < of_pairs[2]
    of_evaluators = [share_of_right_votes(9, evaluators) for evaluators in (1, 9)]
    assert of_evaluators[0] + 0.04 < of_evaluators[1]


@pytest.mark.parametrize("answers", [[0, 0], [1, -1], [1, -1, -1, 1]])
def test_ties_are_fair(answers):
    """A tie, and a panel without an opinion, is a fair coin."""
    votes = [s2zpo_mujoco.count_votes(torch.tensor(answers), seeded(7, k)) for k in range(2000)]
    assert set(votes) == {-1, 1}
    assert abs(np.mean(votes)) < 0.07


@pytest.mark.parametrize(("answers", "vote"), [([1, 1, -1], 1), ([-1, 0, 0], -1), ([1], 1)])
def test_the_majority_decides(answers, vote):
    votes = {s2zpo_mujoco.count_votes(torch.tensor(answers), seeded(k)) for k in range(8)}
    assert votes == {vote}


# --- blocks, messages, steps ---


def test_nobody_can_tell_which_of_two_is_better_if_one_has_no_return():
    """Or NaN before the perturbation would count against it."""
    returns = torch.tensor([[[math.nan], [0.0]], [[1.0], [5.0]]])  # [2, pairs, trajectories]
    args = Args(link="noiseless", num_evaluators=3)
    answers, _ = s2zpo_mujoco.draw_answers(returns, args, 1.0, seeded(1))
    assert answers.tolist() == [[0, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "InvertedPendulum-v5"])
def test_a_policy_that_overflows_has_no_return(env_id, greedy):
    """Its parameters are finite."""
    args = Args(env_id=env_id)
    policy = s2zpo_mujoco.make_policy(args).requires_grad_(False)
    for parameter in policy.parameters():
        parameter.fill_(3e38)
    returns = s2zpo_mujoco.evaluate(args, policy, env_id, [1, 2], 0, greedy)
    assert [math.isnan(number) for number in returns] == [True, True]


@given(
    partition=st.sampled_from(["random", "contiguous", "layer"]),
    n=st.integers(1, 12),
    hidden=st.lists(st.integers(1, 7), max_size=2).map(tuple),
    seed=st.integers(0, 3),
)
def test_the_partition_is_a_disjoint_cover_of_equal_blocks(partition, n, hidden, seed):
    policy = s2zpo_mujoco.Policy(4, 3, hidden)
    d = sum(parameter.numel() for parameter in policy.parameters())
    args = Args(partition=partition, num_agents=n, seed=seed)
    blocks = s2zpo_mujoco.split_parameters(args, policy)
    assert torch.cat(blocks).sort().values.tolist() == list(range(d))
    sizes = [len(block) for block in blocks]
    tensors = len(list(policy.parameters()))
    assert max(sizes) - min(sizes) <= (tensors if partition == "layer" else 1)


def test_partitions_differ_in_what_blocks_hold():
    """In order; an equal share of every layer; at random, another one for another seed."""
    policy = s2zpo_mujoco.Policy(4, 2, (6,))
    sizes = [parameter.numel() for parameter in policy.parameters()]  # 24, 6, 12, 2
    layers = torch.arange(4).repeat_interleave(torch.tensor(sizes))

    def split(**changes):
        return s2zpo_mujoco.split_parameters(Args(num_agents=2, **changes), policy)

    contiguous = split(partition="contiguous")
    assert contiguous[1].tolist() == list(range(22, 44))
    for block in split(partition="layer"):
        assert torch.bincount(layers[block]).tolist() == [12, 3, 6, 1]
    shuffled = split(seed=1)[0].tolist()
    assert shuffled not in (contiguous[0].tolist(), split(partition="layer")[0].tolist())
    assert shuffled != split(seed=2)[0].tolist()
    for algorithm in ("fedavg", "central"):
        assert [len(block) for block in split(algorithm=algorithm)] == [44, 44]


def test_greedy_actions_do_not_depend_on_the_seed():
    """Sampled ones do."""
    torch.manual_seed(0)
    policy = s2zpo_mujoco.Policy(4, 2, (6,)).requires_grad_(False)
    args = Args(env_id="CartPole-v1", horizon=50)

    def play(seed, greedy):
        levels = list(range(8))
        return s2zpo_mujoco.evaluate(args, policy, "CartPole-v1", levels, seed, greedy).tolist()

    assert play(0, True) == play(1, True)
    assert play(0, False) != play(1, False)


def test_perturbations_are_binary_and_independent():
    """Of agents, of iterations and of seeds; -1 and 1 have equal chances."""
    args = Args(seed=3)
    number = 4000
    draws = [
        s2zpo_mujoco.draw_signs(args, 0, 1, number),
        s2zpo_mujoco.draw_signs(args, 1, 1, number),
        s2zpo_mujoco.draw_signs(args, 0, 2, number),
        s2zpo_mujoco.draw_signs(Args(seed=4), 0, 1, number),
    ]
    signs = torch.stack(draws).double()
    assert set(signs.unique().tolist()) == {-1, 1}
    correlation = signs @ signs.T / number
    assert (correlation - torch.eye(4)).abs().max() < 0.06
    assert signs.mean(1).abs().max() < 0.06
    assert torch.equal(draws[0], s2zpo_mujoco.draw_signs(args, 0, 1, number))


@given(number=st.integers(1, 40), seed=st.integers(0, 100), vote=st.sampled_from([-1, 1]))
def test_messages_are_bits(number, seed, vote):
    """number + 1 bits, padded to bytes, say everything."""
    signs = s2zpo_mujoco.draw_signs(Args(), 2, seed, number)
    num_bytes = math.ceil((number + 1) / 8)
    message = s2zpo_mujoco.pack(signs, vote, num_bytes + 1)
    assert message.dtype == torch.uint8
    assert message.shape == (num_bytes + 1,)
    assert message[-1] == 0
    received, received_vote = s2zpo_mujoco.unpack(message, number)
    assert torch.equal(received, signs)
    assert received_vote == vote


def test_every_agent_moves_its_block_by_its_vote():
    """sum_k o_k v_k, with blocks of different sizes and votes that differ."""
    blocks = [torch.tensor([4, 0]), torch.tensor([1, 2, 3])]
    signs = [torch.tensor([1, -1]), torch.tensor([-1, 1, 1])]
    messages = torch.stack([s2zpo_mujoco.pack(signs[0], -1, 1), s2zpo_mujoco.pack(signs[1], 1, 1)])
    assert s2zpo_mujoco.combine(messages, blocks, 5).tolist() == [1, -1, 1, 1, -1]
    every = [torch.arange(3)] * 2
    signs = [torch.tensor([1, -1, 1]), torch.tensor([1, 1, -1])]
    messages = torch.stack([s2zpo_mujoco.pack(signs[0], 1, 1), s2zpo_mujoco.pack(signs[1], 1, 1)])
    assert s2zpo_mujoco.combine(messages, every, 3).tolist() == [2, 0, 0]


@pytest.mark.parametrize("algorithm", ["par", "fedavg", "central"])
def test_the_rules_of_step_sizes(algorithm):
    """Perturbations and steps have the norm 2, fedavg's steps as a root mean square."""
    d = 1200
    n = 1 if algorithm == "central" else 4
    args = Args(algorithm=algorithm, num_agents=n)
    mu, eta = s2zpo_mujoco.choose_step_sizes(args, d)
    squares_of_steps = []
    for trial in range(50):
        step = torch.zeros(d)
        for i in range(n):
            block = torch.arange(d).tensor_split(n)[i] if algorithm == "par" else torch.arange(d)
            v = torch.zeros(d)
            v[block] = s2zpo_mujoco.draw_signs(args, i, trial, len(block)).float()
            assert (mu * v).norm().item() == pytest.approx(2, rel=1e-5)
            step += v if algorithm == "par" else v / n
        squares_of_steps.append((eta * step).square().sum().item())
    assert np.mean(squares_of_steps) == pytest.approx(4, rel=0.03)
    given_sizes = dataclasses.replace(args, mu=0.3, eta=0.7)
    assert s2zpo_mujoco.choose_step_sizes(given_sizes, d) == (0.3, 0.7)
    if algorithm == "par":
        assert mu == pytest.approx(2 / math.sqrt(d / n))
        assert eta == pytest.approx(2 / math.sqrt(d))


TARGET = torch.linspace(-1, 1, TINY_D)


def value(parameters):
    """A quadratic with condition 9: the return of a policy with these parameters."""
    weights = torch.linspace(1, 9, TINY_D)
    return -(weights * (parameters - TARGET).square()).sum(-1)


def play_quadratic(args, envs, stacked, policy, iteration, run):
    """In place of `rollout`: a policy's return is a function of its parameters."""
    shape = len(envs.agents), 2, args.num_pairs, args.num_trajectories
    layers = [
        [layer for layer in network if hasattr(layer, "weight")] for network in stacked.networks
    ]
    parameters = torch.stack(
        [torch.cat([p.flatten() for layer in each for p in layer.parameters()]) for each in layers]
    )
    returns = value(parameters).double().view(*shape[:2], 1, 1).expand(shape)
    lengths = torch.ones(shape, dtype=torch.long)
    return returns, lengths, torch.zeros(shape[0], 0)


@pytest.mark.parametrize("algorithm", ["par", "fedavg", "central"])
def test_a_quadratic_decreases_as_in_a_plain_loop(algorithm, tmp_path, monkeypatch):
    """A noiseless panel: every step is that of a loop in NumPy, and the loss falls."""
    monkeypatch.setattr(s2zpo_mujoco, "rollout", play_quadratic)
    settings = {
        "algorithm": algorithm,
        "link": "noiseless",
        "norm_obs": False,
        "mu": 0.01,
        "eta": 0.04,
        "total_iterations": 60,
        "save_every": 60,
        "eval_episodes": 0,
        "run_dir": tmp_path,
    }
    flags = to_flags(**{k: v for k, v in (TINY | settings).items() if k != "norm_obs"})
    args = parse_args(s2zpo_mujoco, [*flags, "--no-norm-obs"])
    s2zpo_mujoco.main(args)
    policy = s2zpo_mujoco.make_policy(args)
    blocks = s2zpo_mujoco.split_parameters(args, policy)
    theta = communicators.flatten(policy.network).numpy()
    first = value(torch.from_numpy(theta)).item()
    for t in range(60):
        step = np.zeros(TINY_D, dtype=np.float32)
        for i, block in enumerate(blocks):
            v = np.zeros(TINY_D, dtype=np.float32)
            v[block.numpy()] = s2zpo_mujoco.draw_signs(args, i, t + 1, len(block)).numpy()
            after = value(torch.from_numpy(theta + np.float32(0.01) * v)).item()
            sign = 1 if after > value(torch.from_numpy(theta)).item() else -1
            step += sign * v / (len(blocks) if algorithm == "fedavg" else 1)
        theta = theta + np.float32(0.04 / math.sqrt(1 + 0.02 * t)) * step
    (final, *_) = weights_of(only_run(tmp_path)).values()
    saved = torch.load(only_run(tmp_path) / "checkpoints" / "agent_0" / "60.pt")["policy"]
    policy.load_state_dict(saved)
    learned = communicators.flatten(policy.network)
    np.testing.assert_allclose(learned, theta, atol=1e-5)
    assert len(final) == TINY_D + 2 * 4  # and statistics of observations
    assert value(learned).item() > 0.6 * first  # a loss that was 1 is below 0.6
    rows = rows_of(only_run(tmp_path))
    assert {row["accuracy"] for row in rows} == {"1"}


# --- episodes ---


def play_plainly(args, agents, iteration, parameters):
    """What `rollout` does, with one environment and one call of the policy at a time."""
    policy = s2zpo_mujoco.make_policy(args)
    returns = []
    observations = []
    number = args.num_pairs * args.num_trajectories
    for k, i in enumerate(agents):
        space = s2zpo_mujoco.make_env(args.env_id, args.horizon).action_space
        actions = s2zpo_mujoco.Actions(args, space)
        generator = seeded(args.seed, i, iteration, s2zpo_mujoco.ACTIONS)
        noise = actions.draw_noise(args.horizon, 2 * number, generator=generator)
        for row in range(2 * number):
            communicators.unflatten(parameters[2 * k + row // number], policy.network)
            env = s2zpo_mujoco.make_env(args.env_id, args.horizon)
            seed = communicators.derive_seed(args.seed, i, row, 0, s2zpo_mujoco.ENVIRONMENTS)
            obs, _ = env.reset(seed=seed)
            total = 0
            for step in range(args.horizon):
                if row < number:
                    observations.append(np.float32(obs))
                outputs = policy(torch.from_numpy(np.float32(obs))).detach().numpy()
                action = actions.choose(outputs, noise[step, row])
                obs, reward, terminated, truncated, _ = env.step(action)
                total += reward
                if terminated or truncated:
                    break
            returns.append(total)
    shape = len(agents), 2, args.num_pairs, args.num_trajectories
    return np.array(returns).reshape(shape), np.array(observations)


@pytest.mark.parametrize("settings", [TINY, HOPPER], ids=["CartPole", "Hopper"])
def test_episodes_side_by_side_are_those_of_a_plain_loop(settings):
    """All policies as one product, environments that end at different times."""
    args = Args(**settings, env_backend="gymnasium", seed=4)
    agents = range(1, args.num_agents)
    policy = s2zpo_mujoco.make_policy(args).requires_grad_(False)
    networks = [s2zpo_mujoco.make_policy(args).network for _ in range(2 * len(agents))]
    start = communicators.flatten(policy.network)
    parameters = start + 0.3 * torch.randn(len(networks), len(start), generator=seeded(8))
    for network, of_network in zip(networks, parameters, strict=True):
        communicators.unflatten(of_network, network)
    stacked = communicators.Stacked(networks)
    stacked.read()
    envs = s2zpo_mujoco.Envs(args, agents, 0)

    class Clock:
        def tick(self, phase):
            pass

    returns, lengths, sums = s2zpo_mujoco.rollout(args, envs, stacked, policy, 5, Clock())
    expected, observations = play_plainly(args, agents, 5, parameters)
    np.testing.assert_allclose(returns, expected, rtol=1e-4)
    assert lengths.min() < lengths.max() <= args.horizon or settings is HOPPER
    if settings is TINY:
        np.testing.assert_array_equal(returns, lengths)  # CartPole's reward is 1 for each step
    s2zpo_mujoco.set_normalisation(policy, sums, keep_policy=False)
    np.testing.assert_allclose(policy.obs_mean, observations.mean(0), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(policy.obs_std, observations.std(0), rtol=1e-3, atol=2e-4)
    normalised = policy.normalise(torch.from_numpy(observations))
    assert normalised.mean(0).abs().max() < 1e-2


def test_the_accuracy_of_a_panel_leaves_out_what_is_equal():
    """Pairs of equal returns, and answers of a person who sees no difference."""
    answers = torch.tensor([[1, -1], [1, 1], [0, -1]])
    measures = s2zpo_mujoco.describe_panel(answers, torch.tensor([2.0, 0.0, -1.0]), vote=1)
    assert measures["panel/accuracy"] == pytest.approx(2 / 3)
    measures = s2zpo_mujoco.describe_panel(answers, torch.zeros(3), vote=1)
    assert math.isnan(measures["panel/accuracy"])


def test_normalisation_joins_the_statistics_of_agents():
    """Agents with different numbers of observations count by them; a constant does no harm."""
    generator = np.random.default_rng(2)
    obs = torch.from_numpy(generator.normal(3, 2, size=(2, 3, 5, 4)))  # agents, episodes, steps
    obs[..., 3] = 7
    lengths = torch.tensor([[5, 1, 2], [4, 4, 5]])
    obs[0, 1, 1:] = math.nan  # behind the end of an episode
    sums = s2zpo_mujoco.sum_observations(obs, lengths)
    rows = np.concatenate([obs[i, e, : lengths[i, e]] for i in range(2) for e in range(3)])
    assert sums[:, 0].tolist() == [8, 13]
    policy = s2zpo_mujoco.Policy(4, 1, (2,))
    s2zpo_mujoco.set_normalisation(policy, sums, keep_policy=False)
    np.testing.assert_allclose(policy.obs_mean, rows.mean(0), rtol=1e-5)
    np.testing.assert_allclose(policy.obs_std[:3], rows.std(0)[:3], rtol=1e-5)
    assert policy.obs_std[3] == 1
    assert policy.normalise(torch.tensor([3.0, 3.0, 3.0, 7.0])).isfinite().all()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 1e30])
def test_statistics_leave_out_what_is_not_finite(bad):
    """Whole observations, also those whose squares are too large."""
    generator = np.random.default_rng(5)
    obs = torch.from_numpy(generator.normal(3, 2, size=(2, 3, 5, 4)).astype(np.float32))
    obs[1, 2, 3, 0] = bad
    sums = s2zpo_mujoco.sum_observations(obs, torch.full((2, 3), 5))
    assert sums[:, 0].tolist() == [15, 14]
    rows = obs.flatten(0, 2).double()
    rows = rows[rows.abs().amax(1) < 1e20]
    assert len(rows) == 29
    policy = s2zpo_mujoco.Policy(4, 1, (2,)).requires_grad_(False)
    s2zpo_mujoco.set_normalisation(policy, sums, keep_policy=True)
    np.testing.assert_allclose(policy.obs_mean, rows.mean(0), rtol=1e-5)
    np.testing.assert_allclose(policy.obs_std, rows.std(0, correction=0), rtol=1e-5)


class Burst(gym.Env):
    """A task of one's own. One observation of it is infinite, of the environment that `bad` is."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    bad = None  # its seed

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.seed = seed
            self.episode = 0
        self.episode += 1
        self.count = 0
        return self.observe(), {}

    def observe(self):
        obs = self.np_random.normal(1, 2, 3).astype(np.float32)
        if (self.seed, self.episode, self.count) == (self.bad, 1, 2):
            obs[1] = np.inf
        return obs

    def step(self, action):
        self.count += 1
        return self.observe(), float(action[0]), False, False, {}


def test_one_infinite_observation_spoils_nothing(tmp_path, monkeypatch):
    """The policy is finite, the peer's statistics are those of the run without it.

    Agent 1's are less one observation.
    """
    spec = gym.envs.registration.EnvSpec("Burst-v0", Burst)
    monkeypatch.setitem(gym.registry, "Burst-v0", spec)
    changes = {"env_id": "Burst-v0", "num_agents": 2, "horizon": 6}
    statistics = []
    for bad in (None, communicators.derive_seed(1, 1, 3, 0, s2zpo_mujoco.ENVIRONMENTS)):
        monkeypatch.setattr(Burst, "bad", bad)
        _, folder = train(tmp_path / str(bad), **changes)
        assert weights_of(folder)[0].isfinite().all()
        checkpoints = [folder / "checkpoints" / f"agent_{i}" / "4.pt" for i in range(2)]
        statistics.append([torch.load(path)["statistics"] for path in checkpoints])
    (peers, agents), (peers_beside, agents_with_it) = statistics
    assert torch.equal(peers, peers_beside)
    assert peers[0] == agents[0] == agents_with_it[0] + 1 == 4 * 4 * 2 * 6
    assert agents_with_it.isfinite().all()


def draw_sums(low, high, generator):
    """Statistics of two agents whose observations are uniform; the last of five is constant."""
    obs = low + (high - low) * torch.rand(2, 3, 50, 5, generator=generator)
    obs[..., 4] = 7
    return s2zpo_mujoco.sum_observations(obs, torch.full((2, 3), 50))


def test_new_statistics_keep_the_policy():
    """Outputs are what they were, while inputs have other sizes from then on."""
    generator = seeded(3)
    policy = s2zpo_mujoco.Policy(5, 2, (6, 3)).requires_grad_(False)
    for parameter in policy.parameters():
        parameter += 0.5 * torch.randn(parameter.shape, generator=generator)
    low = torch.tensor([0.0, -1.0, 2.0, 100.0, 0.0])
    obs = low + torch.rand(40, 5, generator=generator)
    s2zpo_mujoco.set_normalisation(policy, draw_sums(low, low + 1, generator), keep_policy=False)
    outputs = policy(obs)
    sums = draw_sums(low - 2, low + torch.tensor([1.0, 2.0, 4.0, 0.5, 1.0]), generator)
    kept = copy.deepcopy(policy)
    s2zpo_mujoco.set_normalisation(kept, sums, keep_policy=True)
    s2zpo_mujoco.set_normalisation(policy, sums, keep_policy=False)
    torch.testing.assert_close(kept(obs), outputs, rtol=1e-4, atol=1e-4)
    assert (policy(obs) - outputs).abs().max() > 0.1
    torch.testing.assert_close(kept.obs_mean, policy.obs_mean)
    torch.testing.assert_close(kept.obs_std, policy.obs_std)


def test_a_run_keeps_its_policy_through_new_statistics(tmp_path, monkeypatch):
    """In iterations 2 and 4; the first statistics do change it."""
    set_normalisation = s2zpo_mujoco.set_normalisation
    changes = []

    def measure(policy, sums, **options):
        obs = 0.1 * torch.randn(20, 4, generator=seeded(1))  # not clipped
        before = policy(obs)
        set_normalisation(policy, sums, **options)
        changes.append(float((policy(obs) - before).abs().max()))

    monkeypatch.setattr(s2zpo_mujoco, "set_normalisation", measure)
    train(tmp_path)
    first, *later = changes
    assert first > 1e-2
    assert len(later) == 2
    assert max(later) < 1e-4


@pytest.mark.skipif(not HAS_ENVPOOL, reason="envpool is for Linux")
@pytest.mark.parametrize("env_id", s2zpo_mujoco.ENVPOOL_IDS)
def test_envpool_has_the_dynamics_of_gymnasium(env_id):
    """From the same state, the same actions lead to the same observations and rewards."""
    args = Args(env_id=env_id, num_agents=1, num_pairs=1, horizon=40, env_backend="envpool")
    envs = s2zpo_mujoco.Envs(args, range(1), 0)
    obs = envs.reset()
    env = s2zpo_mujoco.make_env(args.env_id, args.horizon)
    env.reset(seed=1)
    start = obs[1].astype(float)
    if env_id == "CartPole-v1":
        env.unwrapped.state = start
    else:
        model = env.unwrapped.model
        hidden = model.nq + model.nv - len(start)  # places, which are not observed
        state = np.concatenate((np.zeros(hidden), start))
        env.unwrapped.set_state(state[: model.nq], state[model.nq :])
    generator = np.random.default_rng(3)
    rows = np.array([1])
    for step in range(40):
        if env_id == "CartPole-v1":
            actions = np.array([step % 3 % 2])
        else:
            actions = generator.uniform(-1, 1, (1, *env.action_space.shape))
        next_obs, rewards, ended = envs.step(rows, actions)
        expected, reward, terminated, truncated, _ = env.step(actions[0])
        np.testing.assert_allclose(next_obs[0], expected, rtol=0.02, atol=0.02)
        assert rewards[0] == pytest.approx(reward, rel=0.02, abs=0.02)
        assert ended[0] == (terminated or truncated)
        if ended[0]:
            break
    assert ended[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_environments_do_not_depend_on_each_other(backend):
    """An agent's episodes are the same beside others, whose episodes are longer, and in turn."""
    args = Args(**TINY, env_backend=backend)

    def play(agents, pushes):
        envs = s2zpo_mujoco.Envs(args, agents, 3)
        starts = []
        for iteration in range(3):
            obs = envs.reset()
            starts.append(obs[-16:].copy())
            running = np.arange(len(obs))
            for step in range(args.horizon):
                pushed = np.array([pushes if row < len(obs) - 16 else 0 for row in running])
                actions = (step + pushed * iteration) % 2 * pushed
                _, _, ended = envs.step(running, actions)
                running = running[~ended]
                if not len(running):
                    break
        return np.array(starts)

    alone = play(range(2, 3), 0)
    np.testing.assert_array_equal(alone, play(range(1, 3), 1))
    assert len(np.unique(alone.reshape(-1, 4), axis=0)) == 3 * 16


# --- runs ---


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The tiny run: its summary and its folder."""
    return train(tmp_path_factory.mktemp("finished"))


def test_bits_are_d_plus_k(finished, tmp_path):
    """In every iteration of par; K (d + 1) of fedavg, d + 1 of central."""
    summary, folder = finished
    assert summary["parameters"] == TINY_D
    assert summary["communication_bits"] == 4 * (TINY_D + 3)
    rows = rows_of(folder)
    assert [row["bits"] for row in rows[::3]] == [str(t * (TINY_D + 3)) for t in (1, 2, 3, 4)]
    # Statistics in iterations 1, 2 and 4: of each agent a number, 4 sums and 4 of squares
    assert summary["statistics_bits"] == 3 * 3 * 9 * 64
    num_bytes = math.ceil((math.ceil(TINY_D / 3) + 1) / 8)
    assert summary["communication_bytes"] == 2 * (4 * 3 * num_bytes + 3 * 3 * 9 * 8)
    expected = {"fedavg": 3 * (TINY_D + 1), "central": TINY_D + 1}
    for algorithm, bits in expected.items():
        changes = {"algorithm": algorithm, "total_iterations": 1}
        summary, _ = train(tmp_path / algorithm, **changes)
        assert summary["communication_bits"] == bits
        assert summary["trajectories"] == 2 * 3 * 4 * 2


def test_one_agent_is_central(tmp_path):
    """par with K = 1 is central with the pairs of all agents, bit by bit; so is fedavg."""
    train(tmp_path / "central", algorithm="central", num_agents=3, num_pairs=2)
    for algorithm in ("par", "fedavg"):
        train(tmp_path / algorithm, algorithm=algorithm, num_agents=1, num_pairs=6)
        assert_same_run(only_run(tmp_path / algorithm), only_run(tmp_path / "central"))


def test_metrics(finished):
    """What a run leaves: steps and trajectories are counted, every agent has the same policy."""
    summary, folder = finished
    rows = rows_of(folder)
    assert len(rows) == 4 * 3
    assert rows[-1]["trajectories"] == str(4 * 2 * 3 * 4 * 2) == str(summary["trajectories"])
    steps = [int(row["environment_steps"]) for row in rows[-3:]]
    assert summary["timesteps_per_agent"] == round(sum(steps) / 3)
    of_iteration = [float(row["episodic_length"]) for row in rows if row["agent"] == "0"]
    assert all(row["episodic_length"] == row["episodic_return"] for row in rows)
    assert max(of_iteration) <= 25
    assert 4 * 16 * 8 < steps[0] < 4 * 16 * 25
    weights = weights_of(folder)
    assert torch.equal(weights[0], weights[2])
    tags = scalars_of(folder)
    assert {name_in_page(tag) for tag in tags} == metrics_of_page("s2zpo_mujoco")
    assert [step for step, _ in tags["communication/bits"]] == [1, 2, 3, 4]
    rates = [value for _, value in tags["charts/learning_rate"]]
    eta = 2 / math.sqrt(TINY_D)
    assert rates == pytest.approx([eta / math.sqrt(1 + 0.02 * t) for t in range(4)])
    for row in rows:
        assert row["vote"] in ("-1", "1")
        assert 0.5 <= float(row["agreement"]) <= 1
    (task,) = {row["task"] for row in table_of(folder, "evaluations")}
    assert task == "CartPole-v1"


def test_a_resumed_run_makes_a_missed_evaluation(tmp_path):
    """As in the scripts of PR-PPO, where it is missing after a signal."""
    _, whole = train(tmp_path / "whole", eval_every=2)
    _, folder = train(tmp_path / "resumed", eval_every=2, total_iterations=2)
    (folder / "evaluations.csv").unlink()
    argv = ["--resume", str(folder), "--total-iterations", "4"]
    s2zpo_mujoco.main(parse_args(s2zpo_mujoco, argv))
    assert table_of(folder, "evaluations") == table_of(whole, "evaluations")


@pytest.mark.parametrize("changes", [{}, {"env_backend": "gymnasium", "algorithm": "fedavg"}])
def test_a_resumed_run_is_the_same_run(changes, tmp_path):
    """Two iterations, then two more, are four."""
    train(tmp_path / "whole", **changes)
    train(tmp_path / "resumed", total_iterations=2, **changes)
    folder = only_run(tmp_path / "resumed")
    argv = ["--resume", str(folder), "--total-iterations", "4"]
    summary = s2zpo_mujoco.main(parse_args(s2zpo_mujoco, argv))
    assert summary["completed"]
    assert_same_run(folder, only_run(tmp_path / "whole"))


def test_a_central_run_resumes_with_its_pairs(tmp_path):
    """The pairs of all agents are counted once."""
    train(tmp_path, algorithm="central", total_iterations=2)
    argv = ["--resume", str(only_run(tmp_path)), "--total-iterations", "3"]
    args = parse_args(s2zpo_mujoco, argv)
    assert (args.num_agents, args.num_pairs) == (1, 12)


@pytest.mark.parametrize("damaged", ["network.0.bias", "obs_mean"])
@pytest.mark.parametrize("iteration", [2, 4])
def test_a_policy_that_is_not_finite_is_reported(damaged, iteration, tmp_path, monkeypatch, capsys):
    """In CartPole, whose returns are finite whatever is done; in the last iteration, too."""
    is_finite = s2zpo_mujoco.is_finite
    calls = []

    def poison(policy):
        calls.append(1)
        if len(calls) == iteration:  # it is asked once in every iteration
            policy.state_dict()[damaged][0] = math.nan
        return is_finite(policy)

    monkeypatch.setattr(s2zpo_mujoco, "is_finite", poison)
    settings = TINY | {"run_dir": str(tmp_path), "norm_obs": False}
    summary = s2zpo_mujoco.main(Args(**settings))
    folder = only_run(tmp_path)
    output = capsys.readouterr().out
    assert summary["completed"] and summary["diverged"] == [0, 1, 2]
    for i in range(3):
        line = f"iteration {iteration}: agent {i} has diverged: charts/episodic_return is nan"
        assert output.count(line) == output.count(f"agent {i} has diverged") == 1
    returns = [row["episodic_return"] for row in rows_of(folder)]
    expected = [k < iteration for k in range(1, 5) for _ in range(3)]
    assert [value != "nan" for value in returns] == expected
    assert summary["evaluation"]["group"] is None


def test_returns_that_are_not_finite_are_reported(tmp_path, monkeypatch):
    """Of the perturbed policy alone, of one agent alone."""
    rollout = s2zpo_mujoco.rollout

    def poison(*inputs):
        returns, *rest = rollout(*inputs)
        returns[1, 1, 0, 0] = math.inf
        return returns, *rest

    monkeypatch.setattr(s2zpo_mujoco, "rollout", poison)
    summary, _ = train(tmp_path)
    assert summary["diverged"] == [1] and summary["evaluation"]["group"] is not None


def test_cart_pole_is_learned(tmp_path):
    """Thirty updates by comparisons, of two agents with few parameters."""
    changes = {"num_agents": 2, "num_pairs": 8, "total_iterations": 30, "save_every": 30}
    summary, folder = train(tmp_path, horizon=100, **changes)
    first = float(rows_of(folder)[0]["episodic_return"])
    evaluation = summary["evaluation"]["group"]
    assert first < 35
    assert evaluation > 60


def test_hopper_runs(tmp_path):
    """Continuous actions, in every backend."""
    for backend in BACKENDS:
        summary, folder = train(tmp_path / backend, **HOPPER | {"env_backend": backend})
        assert summary["env_backend"] == backend
        assert summary["completed"]
    assert weights_of(folder)[0].isfinite().all()


def test_processes_train_as_one_and_send_bits(tmp_path):
    """Two ranks give the same run; between them go packed bits, statistics and metrics."""
    for algorithm in ("par", "fedavg"):
        train(tmp_path / "one" / algorithm, num_agents=4, algorithm=algorithm)
    runs = {}
    for algorithm in ("par", "fedavg"):
        settings = TINY | {"num_agents": 4, "algorithm": algorithm}
        settings["run_dir"] = str(tmp_path / "two" / algorithm)
        runs[algorithm] = ["s2zpo_mujoco", *to_flags(**settings)]
    tool = REPOSITORY / "tests" / "tools" / "wire.py"
    report = tmp_path / "report_{rank}.json"
    run_ranks(2, tool, report, json.dumps(runs), cwd=tmp_path)
    calls_of = json.loads((tmp_path / "report_0.json").read_text())
    for algorithm in ("par", "fedavg"):
        assert_same_run(
            only_run(tmp_path / "two" / algorithm), only_run(tmp_path / "one" / algorithm)
        )
        sent = [
            (name, [tensors[-1][0], math.prod(tensors[-1][1])])
            for name, tensors in calls_of[algorithm]
            if tensors and name != "monitored_barrier"
        ]
        # The common start, and the folder's name
        broadcasts = [tensor for name, tensor in sent if name == "broadcast"]
        assert sorted(broadcasts) == [["float32", TINY_D], ["int64", 1]]
        gathered = [tensor for name, tensor in sent if name == "all_gather"]
        assert len(gathered) + 2 == len(sent)
        number = TINY_D / 4 if algorithm == "par" else TINY_D
        num_bytes = math.ceil((math.ceil(number) + 1) / 8)
        assert gathered.count(["uint8", 2 * num_bytes]) == 4
        assert {kind for kind, _ in gathered} == {"uint8", "int64", "float64"}
        # Of both agents of a process: declared statistics (9 each), metrics and evaluations
        largest = max(numel for kind, numel in gathered if kind == "float64")
        assert gathered.count(["float64", 18]) >= 3
        assert largest < TINY_D


def test_a_launcher_knows_that_agents_must_be_together(tmp_path, monkeypatch):
    """Every step needs the votes of all, also a single agent's."""
    expected = (False, "", "all agents share one vector of parameters at every step")
    for n in (3, 1):
        assert told_to_launcher(monkeypatch, train, tmp_path, num_agents=n) == expected


# --- a person as the panel ---


def test_answers_of_a_person_count_for_the_side_that_was_seen(tmp_path, monkeypatch):
    """Whoever always prefers the white clip prefers the second batch, left or right."""
    black = [np.zeros((2, 3, 3), dtype=np.uint8)] * 2
    white = [np.full((2, 3, 3), 9, dtype=np.uint8)] * 5
    sides = []

    def look(frames, path):
        assert len(frames) == 5  # the shorter clip waits for the longer one
        assert frames[0].shape == (2, 3 + 4 + 3, 3)
        sides.append("l" if frames[-1][0, 0, 0] == 9 else "r")

    monkeypatch.setattr(s2zpo_mujoco, "write_clip", look)
    monkeypatch.setattr("builtins.input", lambda question: sides[-1].upper())
    collect = s2zpo_mujoco.collect_answers
    assert collect([(black, white)] * 12, tmp_path, "x", seeded(1)).tolist() == [[1]] * 12
    assert set(sides) == {"l", "r"}
    assert collect([(white, black)] * 3, tmp_path, "x", seeded(1)).tolist() == [[-1]] * 3
    monkeypatch.setattr("builtins.input", lambda question: "")
    assert collect([(black, white)] * 2, tmp_path, "x", seeded(1)).tolist() == [[0], [0]]


def test_a_run_with_a_person(tmp_path, monkeypatch, capsys):
    """Every pair is shown as a film, and answered once."""
    questions = []

    def answer(question):
        questions.append(question)
        return ("left", "what?", "r", "")[len(questions) % 4]

    monkeypatch.setattr("builtins.input", answer)
    changes = {"num_agents": 1, "num_pairs": 2, "total_iterations": 1, "horizon": 9}
    flags = to_flags(**TINY | changes | {"run_dir": tmp_path})
    args = parse_args(s2zpo_mujoco, [*flags, "--human", "--link", "probit"])
    assert (args.num_evaluators, s2zpo_mujoco.choose_backend(args)) == (1, "gymnasium")
    s2zpo_mujoco.main(args)
    folder = only_run(tmp_path)
    clips = sorted((folder / "clips").iterdir())
    assert [clip.name for clip in clips] == ["1_agent_0_pair_0.gif", "1_agent_0_pair_1.gif"]
    assert all(clip.read_bytes()[:3] == b"GIF" for clip in clips)
    assert str(clips[0]) in questions[0]


def test_the_answers_of_a_person_who_leaves_are_kept(tmp_path, monkeypatch):
    """The run ends at the first question without an answer, and goes on with that iteration."""
    questions = []

    def answer(question):
        questions.append(question)
        if len(questions) == 3:
            raise EOFError
        return "l"

    monkeypatch.setattr("builtins.input", answer)
    changes = {"num_agents": 1, "num_pairs": 1, "total_iterations": 3, "horizon": 9}
    changes["save_every"] = 50
    flags = to_flags(**TINY | changes | {"run_dir": tmp_path})
    args = parse_args(s2zpo_mujoco, [*flags, "--human"])
    message = refusal(s2zpo_mujoco.main, args, code=1)
    assert "--human" in message and "go on with --resume" in message
    s2zpo_mujoco.main(parse_args(s2zpo_mujoco, ["--resume", str(only_run(tmp_path))]))
    iterations = [re.search(r"(\d)_agent_0_pair_0.gif", question)[1] for question in questions]
    assert iterations == ["1", "2", "3", "3"]


def test_films_hold_every_third_picture_and_the_last_and_nothing_more():
    """Not the whole picture of which a frame is a part: there is one for each step."""
    args = s2zpo_mujoco.Args(env_id="CartPole-v1", human=True, num_pairs=1, horizon=8)
    envs = s2zpo_mujoco.Envs(args, range(1), 0)
    envs.reset()
    rows = np.arange(2)
    pictures = []
    for step in range(8):
        ended = envs.step(rows, np.array([step % 2] * 2))[2]
        pictures.append(envs.envs[0].render()[::2, ::2])
    assert ended.all()
    ((clip, other),) = envs.list_clips(0)
    assert len(other) == 4
    expected = [pictures[step] for step in (0, 3, 6, 7)]
    np.testing.assert_array_equal(clip, expected)
    assert all(frame.base is None for frame in clip)
    envs.close()


def test_a_clip_has_the_episodes_of_its_batch():
    """Rows are [agents, 2, pairs, trajectories]."""
    settings = {"env_id": "CartPole-v1", "num_pairs": 2, "num_trajectories": 3, "horizon": 5}
    envs = s2zpo_mujoco.Envs(Args(**settings, human=True), range(3, 5), 0)
    rows = np.arange(24).reshape(2, 2, 2, 3)
    envs.frames = [[f"{row}a", f"{row}b"] for row in range(24)]
    for k in range(2):
        for pair, batches in enumerate(envs.list_clips(k)):
            for policy, frames in enumerate(batches):
                assert frames == [f"{row}{x}" for row in rows[k, policy, pair] for x in "ab"]
    envs.close()


DRAWN = """
import gymnasium as gym
import numpy as np


class Drawn(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, False, False, {}

    def render(self):
        return np.zeros((16, 16, 3), np.uint8)


class Undrawn(Drawn):
    def render(self):
        raise ValueError("no paint")


gym.register("Drawn-v0", Drawn, max_episode_steps=4)
gym.register("Undrawn-v0", Undrawn, max_episode_steps=4)
"""


def test_a_task_of_ones_own_is_drawn_from_another_folder(tmp_path, monkeypatch):
    """The process that tries to draw it finds its module; its error is reported."""
    (tmp_path / "drawn_tasks.py").write_text(DRAWN)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(gym.envs.registration, "registry", dict(gym.registry))
    flags = ["--human", "--run-dir", str(tmp_path / "runs"), "--env-id"]
    assert parse_args(s2zpo_mujoco, [*flags, "drawn_tasks:Drawn-v0"]).human
    message = refusal(parse_args, s2zpo_mujoco, [*flags, "drawn_tasks:Undrawn-v0"])
    assert message.startswith("--human True: drawn_tasks:Undrawn-v0 cannot be drawn here")
    assert message.endswith("ValueError: no paint")


class Odd(gym.Env):
    """Rewards have the shape (1,), as some tasks have them, or another one."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    shape = (1,)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), np.full(self.shape, action[0]), False, False, {}


def test_rewards_of_a_task_may_have_the_shape_of_one(tmp_path, monkeypatch):
    """Others are refused before anything is written."""
    spec = gym.envs.registration.EnvSpec("Odd-v0", Odd, max_episode_steps=4)
    monkeypatch.setitem(gym.registry, "Odd-v0", spec)
    summary, folder = train(tmp_path / "one", env_id="Odd-v0", total_iterations=1)
    assert summary["completed"]
    assert len({row["episodic_return"] for row in rows_of(folder)}) == 3
    monkeypatch.setattr(Odd, "shape", (2,))
    flags = ["--env-id", "Odd-v0", "--run-dir", str(tmp_path / "two")]
    message = refusal(parse_args, s2zpo_mujoco, flags)
    assert "--env-id Odd-v0" in message
    assert "its rewards are [" in message
    assert not (tmp_path / "two").exists()
    monkeypatch.setattr(Odd, "step", lambda self, action: (np.zeros(3), None, False, False, {}))
    assert refusal(parse_args, s2zpo_mujoco, flags).endswith("; its rewards are None")
    whole = gym.spaces.Box(0, 5, (2,), np.int64)
    monkeypatch.setattr(Odd, "action_space", whole)
    assert refusal(parse_args, s2zpo_mujoco, flags).endswith(f"; its actions are {whole}")


# --- bad input ---

BAD = {
    "unknown task": (["--env-id", "HalfChetah-v5"], ["--env-id HalfChetah-v5", "HalfCheetah"]),
    "discrete actions": (["--env-id", "Acrobot-v1"], ["--env-id Acrobot-v1", "Discrete(3)"]),
    "no version": (["--env-id", "Hopper"], ["--env-id Hopper", "Hopper is Hopper-v5"]),
    "no finite deviation": (["--log-std", "710"], ["--log-std 710", "at most 10"]),
    "no vectors": (["--env-id", "Blackjack-v1"], ["--env-id Blackjack-v1", "vectors"]),
    "more agents than parameters": (
        ["--env-id", "CartPole-v1", "--hidden-sizes", "1", "--num-agents", "10"],
        ["--num-agents 10", "at most 9"],
    ),
    "a communicator": (["--communicator", "reward"], ["--communicator reward", "no effect"]),
    "a topology": (["--topology", "ring"], ["--topology ring", "no effect"]),
    "an empty layer": (["--hidden-sizes", "8", "0"], ["--hidden-sizes 8 0", "at least 1"]),
    "no radius": (["--mu", "0"], ["--mu 0", "positive"]),
    "no step": (["--eta", "-1"], ["--eta -1", "positive"]),
    "unknown link": (["--link", "cauchit"], ["--link", "'cauchit'", "'probit'"]),
    "no pairs": (["--num-pairs", "0"], ["--num-pairs 0", "at least 1"]),
    "no scale": (["--link-scale", "nan"], ["--link-scale nan", "positive"]),
    "a task that envpool lacks": (
        ["--env-id", "Pendulum-v1", "--env-backend", "envpool"],
        ["--env-backend envpool", "HalfCheetah-v5"],
    ),
    "a film of envpool": (
        ["--env-id", "CartPole-v1", "--env-backend", "envpool", "--human"],
        ["--env-backend envpool", "filmed"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_ends_with_one_line(case, tmp_path):
    """It names the flag, its value and what would be valid."""
    argv, words = BAD[case]
    message = refusal(parse_args, s2zpo_mujoco, [*argv, "--run-dir", str(tmp_path)])
    assert all(word in message for word in words), message


def test_missing_packages_are_named(monkeypatch):
    """MuJoCo and envpool."""

    def fail(*_, **__):
        raise gym.error.DependencyNotInstalled("MuJoCo is not installed, run `pip install`\nnow")

    monkeypatch.setattr(s2zpo_mujoco, "make_env", fail)
    message = refusal(parse_args, s2zpo_mujoco, ["--env-id", "Hopper-v5"])
    assert "--env-id Hopper-v5" in message
    assert "MuJoCo is not installed" in message
    monkeypatch.undo()
    monkeypatch.setattr(s2zpo_mujoco, "find_spec", lambda name: None)
    flags = ["--env-id", "CartPole-v1"]
    message = refusal(parse_args, s2zpo_mujoco, [*flags, "--env-backend", "envpool"])
    assert message == "--env-backend envpool: envpool is not installed"
    assert s2zpo_mujoco.choose_backend(Args()) == "gymnasium"


def test_a_machine_that_cannot_draw(monkeypatch):
    """The renderer is tried in a process of its own, which it may abort."""
    monkeypatch.setenv("MUJOCO_GL", "nonsense")
    message = refusal(parse_args, s2zpo_mujoco, ["--env-id", "Hopper-v5", "--human"])
    assert "--human True: Hopper-v5 cannot be drawn here" in message
    assert "nonsense" in message


def test_central_and_people_need_one_process(monkeypatch):
    flags = ["--env-id", "CartPole-v1"]
    monkeypatch.setenv("WORLD_SIZE", "2")  # without a rank it is not torchrun's
    assert parse_args(s2zpo_mujoco, [*flags, "--algorithm", "central"]).num_agents == 1
    monkeypatch.setenv("RANK", "0")
    message = refusal(parse_args, s2zpo_mujoco, [*flags, "--algorithm", "central"])
    assert "--algorithm central" in message
    assert "--human True" in refusal(parse_args, s2zpo_mujoco, [*flags, "--human"])


def test_defaults_of_tasks():
    """CartPole has its own length, MuJoCo's 1,000 steps are cut; the scale of the link follows."""
    assert s2zpo_mujoco.find_horizon("CartPole-v1") == 500
    assert s2zpo_mujoco.find_horizon("HalfCheetah-v5") == 250
    assert s2zpo_mujoco.find_horizon("Pendulum-v1") == 200
    assert s2zpo_mujoco.make_env("HalfCheetah-v5", None).spec.max_episode_steps == 250


@pytest.mark.skipif(not HAS_ENVPOOL, reason="envpool is for Linux")
def test_backends_of_tasks():
    """envpool where it is faster; a flag overrules it."""
    backends = {"HalfCheetah-v5": "envpool", "CartPole-v1": "gymnasium", "Ant-v5": "gymnasium"}
    for env_id, backend in backends.items():
        assert s2zpo_mujoco.choose_backend(Args(env_id=env_id)) == backend
    args = Args(env_id="CartPole-v1", env_backend="envpool")
    assert s2zpo_mujoco.choose_backend(args) == "envpool"


def test_commands_of_the_page_are_understood():
    """Every command of the page and of the docstring, as its flags are read."""
    page = (REPOSITORY / "docs" / "s2zpo_mujoco.md").read_text() + s2zpo_mujoco.__doc__
    commands = re.findall(r"s2zpo_mujoco\.py (--[^#\n`]*)", page)
    assert len(commands) >= 8
    for command in commands:
        if "--resume" not in command:
            communicators.read_flags(Args, command.split())
