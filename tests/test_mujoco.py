"""PR-PPO and FedAvg-PPO for continuous actions: an independent plain version, and each step alone.

Tasks are small, their agents have goals of their own.
"""

import copy
import itertools
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.wrappers.utils import RunningMeanStd
from helpers import (
    assert_metrics,
    gate_by_hand,
    measure_minibatch,
    measure_update,
    networks_of,
    notes_of,
    only_run,
    plain_objective,
    plain_step,
    rows_of,
    weights_of,
    write_matrix,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributions import (
    Categorical,
    Independent,
    MixtureSameFamily,
    Normal,
    kl_divergence,
)

import communicators
import fedavg_mujoco
import prpo_mujoco

# --- tasks ---


class Point(gym.Env):
    """A point in the plane, paid for being near to a goal that it is not shown.

    Bounds of actions differ, what it sees has different units, and far away the episode ends.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = gym.spaces.Box(np.float32([-1.0, -0.5]), np.float32([0.8, 0.5]))

    def __init__(self, goal, pay=1.0):
        self.goal = np.array(goal)
        self.pay = pay

    def show(self):
        x, y = self.place
        return np.array([10 * x + 5, y, 0.1 * x * y])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.uniform(-1, 1, 2)
        return self.show(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.place = self.place + 0.4 * action
        reward = self.pay * (1 - np.abs(self.place - self.goal).sum())
        return self.show(), float(reward), bool(np.abs(self.place).max() > 1.7), False, {}


GOALS = {"Point-a-v0": (1.0, 0.5), "Point-b-v0": (-1.0, 0.5), "Point-c-v0": (0.0, -1.0)}
for name, goal in GOALS.items():
    gym.register(name, Point, max_episode_steps=11, kwargs={"goal": goal})
gym.register("Point-paid-v0", Point, max_episode_steps=11, kwargs={"goal": (1.0, 0.5), "pay": 64.0})
TASKS = tuple(GOALS)
NUM_OBS = 3
NUM_ACTIONS = 2
# Not symmetric, so that a transposed matrix would change the result; one agent listens to nobody
# else, but is listened to; one has no weight for itself
OF_THREE = torch.tensor([[0.5, 0.2, 0.3], [0.6, 0.0, 0.4], [0.0, 0.0, 1.0]])
# No row is that of an isolated agent
ALL_LISTEN = torch.tensor([[0.6, 0.3, 0.1], [0.0, 0.5, 0.5], [0.2, 0.1, 0.7]])


def make_args(script=prpo_mujoco, run_dir="runs", iterations=3, **changes):
    """Settings of a tiny run: a round after each iteration, environments start anew after two."""
    values = {"device": "cpu", "num_agents": 3, "num_envs": 2, "num_steps": 32, "save_every": 2}
    values |= {"num_minibatches": 2, "update_epochs": 2, "local_updates": 1, "eval_episodes": 0}
    values |= changes
    values.setdefault("env_ids", TASKS[: values["num_agents"]])
    values["total_timesteps"] = iterations * values["num_envs"] * values["num_steps"]
    return script.Args(run_dir=str(run_dir), **values)


def train(script, run_dir, **changes):
    """The folder of a tiny run."""
    script.main(make_args(script, run_dir, **changes))
    return only_run(run_dir)


def lively_agents(number, sizes=None):
    """Agents in which every layer and every statistic matters, each its own."""
    agents = []
    for k in range(number):
        agent = prpo_mujoco.Agent(NUM_OBS, NUM_ACTIONS, (sizes or [8] * number)[k])
        for parameter in agent.parameters():
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, std=0.3)
        torch.nn.init.orthogonal_(agent.actor.weight)
        agent.set_statistics(torch.tensor(10.0 + k), torch.randn(NUM_OBS), 1 + torch.rand(NUM_OBS))
        agent.value_scale.fill_(1.0 + 3 * k)
        agents.append(agent)
    return agents


def outputs_of(agent, obs, statistics=None):
    """What a policy's mean and value are, in plain words. statistics: mean and variance."""
    center, variance = statistics or (agent.obs_mean, agent.obs_var)
    shown = ((obs - center) / torch.sqrt(variance + 1e-8)).clamp(-10, 10)
    value = agent.critic(agent.value_network(shown))[..., 0]
    return agent.actor(agent.policy_network(shown)), value


def gaussian(center, log_std):
    return Independent(Normal(center, log_std.exp().expand_as(center)), 1)


# --- an independent plain version ---
#
# One environment after the other, no pools, nothing stacked; statistics are moments of all samples.
# Only the layers are the script's.


class PlainEnv:
    def __init__(self, args, i, e, checkpoint):
        seed = communicators.derive_seed(args.seed, i, e, checkpoint, prpo_mujoco.ENVIRONMENTS)
        self.env = gym.make(args.env_ids[i])
        self.obs, _ = self.env.reset(seed=seed)
        self.ended = False
        self.discounted = 0.0

    def step(self, action, gamma):
        """Reward, termination, end; None in the step that only begins another episode."""
        if self.ended:
            self.obs, _ = self.env.reset()
            self.ended = False
            self.discounted = 0.0
            return None
        bounds = self.env.action_space
        self.obs, reward, terminated, truncated, _ = self.env.step(
            np.minimum(np.maximum(action, bounds.low), bounds.high)
        )
        self.ended = terminated or truncated
        self.discounted = gamma * self.discounted + reward
        return reward, terminated, self.ended


class Moments:
    """Running moments: the number of samples, their mean and the mean of their squares."""

    def __init__(self):
        self.values = 0.0, np.zeros(NUM_OBS), np.ones(NUM_OBS)

    def add(self, samples):
        samples = samples.double().numpy()
        self.pool([(1.0, self), (1.0, (len(samples), samples.mean(0), (samples**2).mean(0)))])

    def pool(self, weighted):
        """Become those of all of these, [(weight, moments)]."""
        rows = []
        for weight, moments in weighted:
            number, first, second = getattr(moments, "values", moments)
            rows.append((weight * number, first, second))
        total = sum(number for number, *_ in rows)
        first = sum(number * first for number, first, _ in rows) / total
        second = sum(number * second for number, _, second in rows) / total
        self.values = total, first, second

    def read(self):
        """Mean and variance."""
        _, first, second = self.values
        variance = np.ones(NUM_OBS) if self.values[0] == 0 else second - first**2
        return torch.tensor(first).float(), torch.tensor(variance).float()


def plain_rollout(args, agent, moments, envs, generator):
    """The samples in the order of time, each a dict."""
    noise = torch.randn(args.num_steps, args.num_envs, NUM_ACTIONS, generator=generator)
    samples = []
    for step, e in itertools.product(range(args.num_steps), range(args.num_envs)):
        obs = torch.tensor(envs[e].obs).float()
        with torch.no_grad():
            center, value = outputs_of(agent, obs, moments.read())
            action = center + agent.actor_log_std.exp() * noise[step, e]
        outcome = envs[e].step(action.numpy(), args.gamma)
        if outcome is None:
            continue
        reward, terminated, done = outcome
        with torch.no_grad():
            _, next_value = outputs_of(agent, torch.tensor(envs[e].obs).float(), moments.read())
        samples.append(
            {
                "env": e,
                "obs": obs,
                "action": action,
                "policy": center,
                "logprob": gaussian(center, agent.actor_log_std.detach()).log_prob(action),
                "value": value,
                "next_value": torch.tensor(0.0) if terminated else next_value,
                "reward": reward,
                "discounted": envs[e].discounted,
                "done": done,
            }
        )
    return samples


def plain_batch(args, samples, discounted):
    """The samples with advantages by the definition. Returns it and the rewards' deviation.

    discounted: of all rollouts before, to which those of this one are added.
    """
    discounted += [sample["discounted"] for sample in samples]
    scale = math.sqrt(np.var(discounted) + 1e-8)
    for e in range(args.num_envs):
        of_env = [sample for sample in samples if sample["env"] == e]
        deltas = []
        for sample in of_env:
            reward = min(max(sample["reward"] / scale, -10), 10)
            deltas.append(reward + args.gamma * sample["next_value"] - sample["value"])
        for t, sample in enumerate(of_env):
            total = torch.tensor(0.0)
            for j in range(t, len(of_env)):
                total = total + (args.gamma * args.gae_lambda) ** (j - t) * deltas[j]
                if of_env[j]["done"]:
                    break
            sample["advantage"] = total
    names = "obs", "action", "policy", "logprob", "value", "advantage"
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in names}
    return batch, scale


def plain_references(args, i, agent, scale, batch, matrix, snapshots):
    """Whom agent i is pulled to: the weights [senders, samples] and policies of the senders."""
    senders = matrix[i].nonzero().flatten().tolist()
    policies = []
    values = []
    for j in senders:
        if j == i and args.self_reference == "behaviour":
            policies.append(gaussian(batch["policy"], agent.actor_log_std.detach().clone()))
            values.append(batch["value"] * scale)
            continue
        other, statistics, other_scale = snapshots[j]
        with torch.no_grad():
            center, value = outputs_of(other, batch["obs"], statistics)
        policies.append(gaussian(center, other.actor_log_std.detach()))
        values.append(value * other_scale)
    rows = [matrix[i, senders].tolist()] * len(batch["obs"])
    if args.gate == "value":
        returns = ((batch["advantage"] + batch["value"]) * scale).tolist()
        rows = gate_by_hand(rows[0], torch.stack(values).tolist(), returns)
    return torch.tensor(rows).T, policies


def plain_penalty(args, policy, weights, policies, generator):
    """The KL of eq. 4 or 7 but for a constant. weights: [senders, samples]."""
    if vars(args).get("mixture", "arithmetic") == "arithmetic":
        if args.kl_direction == "forward":  # the cross entropies
            kls = [kl_divergence(each, policy) for each in policies]
            return (weights * torch.stack(kls)).sum(0).mean()
        if len(policies) == 1:
            return kl_divergence(policy, policies[0]).mean()
        shape = args.kl_samples, *policy.mean.shape
        actions = policy.mean + policy.stddev * torch.randn(shape, generator=generator)
        mixed = mixture_of(weights, policies)
        return (policy.log_prob(actions) - mixed.log_prob(actions)).mean()
    if args.kl_direction == "reverse":
        kls = [kl_divergence(policy, each) for each in policies]
        return (weights * torch.stack(kls)).sum(0).mean()
    return kl_divergence(product_of(weights, policies), policy).mean()


def mixture_of(weights, policies):
    """weights: [policies, samples]."""
    centers = torch.stack([policy.mean for policy in policies], dim=1)
    spreads = torch.stack([policy.stddev for policy in policies], dim=1)
    components = Independent(Normal(centers, spreads), 1)
    return MixtureSameFamily(Categorical(probs=weights.T), components)


def product_of(weights, policies):
    """The Gaussian that is proportional to the product of powers."""
    precision = sum(w[:, None] / p.variance for w, p in zip(weights, policies, strict=True))
    centers = sum(w[:, None] * p.mean / p.variance for w, p in zip(weights, policies, strict=True))
    return Independent(Normal(centers / precision, precision**-0.5), 1)


def plain_loss(args, agent, statistics, batch, kl_coef, weights, policies, generator):
    """PPO's loss with the KL penalty, and the metrics of its minibatch."""
    center, value = outputs_of(agent, batch["obs"], statistics)
    policy = gaussian(center, agent.actor_log_std)
    logprob = policy.log_prob(batch["action"])
    ratio, objective, value_loss = plain_objective(args, batch, logprob, value)
    loss = -objective.mean() + args.vf_coef * value_loss.mean() / 2
    loss = loss - args.ent_coef * policy.entropy().mean()
    penalty = plain_penalty(args, policy, weights, policies, generator)
    metrics = measure_minibatch(args, ratio, objective, value_loss, policy.entropy())
    if len(policies) == 1:  # else the penalty is another one but for a constant
        metrics["kl_reference"] = penalty.item()
    return loss + kl_coef * penalty, metrics


def plain_training(args, communicator, averages):
    """Train as the script does: isolated up to the first round, then with this communicator.

    Returns of each agent its parameters and statistics, name -> values, and a row of metrics per
    iteration and agent.
    """
    n = args.num_agents
    rows_of_metrics = []
    iterations = args.total_timesteps // (args.num_envs * args.num_steps)
    agents = []
    for size in args.hidden_sizes or [64] * n:
        torch.manual_seed(args.seed)
        agents.append(prpo_mujoco.Agent(NUM_OBS, NUM_ACTIONS, size))
    moments = [Moments() for _ in range(n)]
    discounted = [[] for _ in range(n)]
    scales = [1.0] * n
    snapshots = [(copy.deepcopy(agent), Moments().read(), 1.0) for agent in agents]
    matrix = torch.eye(n)  # no round has taken place
    optimizers = [torch.optim.Adam(agent.parameters(), eps=1e-5) for agent in agents]
    generators = []
    for i in range(n):
        seed = communicators.derive_seed(args.seed, i)
        generators.append(torch.Generator().manual_seed(seed))

    for iteration in range(iterations):
        left = (iterations - iteration) / iterations
        kl_coef = args.kl_coef * (left if args.kl_schedule == "linear" else 1)
        if iteration % args.save_every == 0:
            envs = []
            for i in range(n):
                envs.append([PlainEnv(args, i, e, iteration) for e in range(args.num_envs)])
        for i, agent in enumerate(agents):
            samples = plain_rollout(args, agent, moments[i], envs[i], generators[i])
            batch, scales[i] = plain_batch(args, samples, discounted[i])
            if averages:
                before = gaussian(batch["policy"], agent.actor_log_std.detach().clone())
                references = torch.ones(1, len(batch["obs"])), [before]
            else:
                reference = i, agent, scales[i], batch, matrix, snapshots
                references = plain_references(args, *reference)
            minibatches = []
            for _ in range(args.update_epochs):
                order = torch.randperm(len(batch["obs"]), generator=generators[i])
                for rows in np.array_split(order.numpy(), args.num_minibatches):
                    minibatch = {name: tensor[rows] for name, tensor in batch.items()}
                    weights, policies = references
                    policies = [
                        Independent(Normal(p.mean[rows], p.stddev[rows]), 1) for p in policies
                    ]
                    rate = args.learning_rate * (left if args.anneal_lr else 1)
                    optimizers[i].param_groups[0]["lr"] = rate
                    pull = kl_coef, weights[:, rows], policies, generators[i]
                    loss, metrics = plain_loss(args, agent, moments[i].read(), minibatch, *pull)
                    minibatches.append(metrics)
                    plain_step(args, agent, optimizers[i], loss)
            more = {"kl_coefficient": kl_coef, "learning_rate": rate}
            rows_of_metrics.append(measure_update(minibatches, batch, **more))
            moments[i].add(batch["obs"])
        if (iteration + 1) % args.local_updates == 0:
            matrix = communicator
            snapshots = []
            for agent, of_agent, scale in zip(agents, moments, scales, strict=True):
                snapshots.append((copy.deepcopy(agent), of_agent.read(), scale))
            if averages:
                average_plainly(args, matrix, agents, moments)

    results = []
    for agent, of_agent, scale in zip(agents, moments, scales, strict=True):
        values = {name: parameter.detach() for name, parameter in agent.named_parameters()}
        values["obs_count"] = torch.tensor(float(of_agent.values[0]))
        values["obs_mean"], values["obs_var"] = of_agent.read()
        gated = vars(args).get("gate") == "value"
        values["value_scale"] = torch.tensor(scale if gated else 1.0)
        results.append(values)
    return results, rows_of_metrics


def average_plainly(args, matrix, agents, moments):
    """FedAvg in place: parameters but for private heads, and moments."""
    old = [copy.deepcopy(agent.state_dict()) for agent in agents]
    old_moments = copy.deepcopy(moments)
    for i, agent in enumerate(agents):
        if matrix[i, i] == 1:
            continue
        for name, parameter in agent.named_parameters():
            if not any(name.split(".")[0].startswith(head) for head in args.private_heads):
                averaged = sum(c * values[name] for c, values in zip(matrix[i], old, strict=True))
                parameter.data.copy_(averaged)
        moments[i].pool(list(zip(matrix[i].tolist(), old_moments, strict=True)))


APART = {"learning_rate": 3e-3}  # then policies differ so much that it matters how they are mixed
ONE = {"num_agents": 1}, torch.ones(1, 1)
REVERSE = {"kl_direction": "reverse"}
PRODUCT = {"mixture": "geometric"}
GATED = {"gate": "value"}
PLAIN = {
    "one agent": (prpo_mujoco, *ONE),
    "one agent, reverse, other options": (
        prpo_mujoco,
        {
            "num_agents": 1,
            "anneal_lr": False,
            "norm_adv": False,
            "clip_vloss": False,
            "kl_schedule": "linear",
            **REVERSE,
        },
        torch.ones(1, 1),
    ),
    "one agent, no clipping": (
        prpo_mujoco,
        {"num_agents": 1, "clip_coef": 0.0, "max_grad_norm": 0.05},
        torch.ones(1, 1),
    ),
    "isolated": (prpo_mujoco, {"communicator": "identity"}, torch.eye(3)),
    "any matrix": (prpo_mujoco, {"kl_schedule": "linear"}, ALL_LISTEN),
    "any matrix, every second iteration": (
        prpo_mujoco,
        {"local_updates": 2, "iterations": 4},
        OF_THREE,
    ),
    "networks of three sizes": (prpo_mujoco, {"hidden_sizes": (16, 16, 8)}, ALL_LISTEN),
    "reverse": (prpo_mujoco, {"kl_samples": 3, **REVERSE}, OF_THREE),
    "reverse, geometric, snapshots": (
        prpo_mujoco,
        {"self_reference": "snapshot", "local_updates": 2, "iterations": 4, **REVERSE, **PRODUCT},
        ALL_LISTEN,
    ),
    "geometric": (prpo_mujoco, PRODUCT, OF_THREE),
    "gated": (prpo_mujoco, GATED, ALL_LISTEN),
    "gated, reverse, snapshots": (
        prpo_mujoco,
        {"self_reference": "snapshot", **GATED, **REVERSE},
        ALL_LISTEN,
    ),
    "averages, one agent": (fedavg_mujoco, *ONE),
    "averages": (fedavg_mujoco, {}, OF_THREE),
    "averages, private heads": (
        fedavg_mujoco,
        {"private_heads": ("actor", "critic"), **REVERSE},
        ALL_LISTEN,
    ),
}


@pytest.mark.parametrize(("script", "changes", "communicator"), PLAIN.values(), ids=PLAIN.keys())
@pytest.mark.usefixtures("smooth_adam")
def test_training_equals_the_plain_version(script, changes, communicator, tmp_path, monkeypatch):
    """Parameters and statistics after several iterations and a restart of the environments.

    With one agent or the identity communicator the plain version is PPO with a KL penalty to its
    own old policy.
    """
    if "communicator" not in changes and len(communicator) > 1:
        monkeypatch.setattr(script, "make_communicator", lambda *inputs, **more: communicator)
    changes = {"iterations": 3, "kl_coef": 2.0, "ent_coef": 0.1, **APART} | changes
    folder = train(script, tmp_path, **changes)
    args = make_args(script, tmp_path, **changes)
    averages = script is fedavg_mujoco
    expected, rows = plain_training(args, communicator, averages)
    assert_metrics(folder, rows)
    for i, values in enumerate(expected):
        trained = load_file(folder / f"agent_{i}.safetensors")
        assert trained.keys() == values.keys()
        for name in values:
            torch.testing.assert_close(
                trained[name],
                values[name],
                rtol=1e-5,
                atol=1e-6,
                msg=lambda m, name=name: f"{name} {m}",
            )
    has_peers = len(communicator) > 1 and "communicator" not in changes
    assert (float(rows_of(folder)[-1]["communication_bytes"]) > 0) == has_peers


# --- agents without peers ---


@pytest.mark.parametrize("communicator", ["reward", "similarity", "surrogate", "best", "identity"])
def test_one_agent_is_the_same_with_any_communicator(communicator, tmp_path):
    """Bit for bit."""
    changes = {"num_agents": 1, "learning_rate": 3e-3}
    expected = weights_of(train(prpo_mujoco, tmp_path / "uniform", **changes))
    folder = train(prpo_mujoco, tmp_path / "runs", communicator=communicator, **changes)
    assert torch.equal(weights_of(folder)[0], expected[0])


# --- statistics of observations ---


@settings(max_examples=40)
@given(
    st.integers(0, 2**32),
    st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any),
    st.sampled_from([(), (3,)]),
)
def test_pooled_statistics_are_those_of_all_samples_together(seed, sizes, shape):
    """Of sets of other sizes, of which some are empty, and far from each other."""
    generator = np.random.default_rng(seed)
    sets = [generator.normal(9 * k, 1 + k, (size, *shape)) for k, size in enumerate(sizes)]
    means = torch.zeros(len(sizes), *shape).double()
    variances = torch.ones(len(sizes), *shape).double()
    for k, samples in enumerate(sets):
        if len(samples):
            means[k] = torch.tensor(samples.mean(0))
            variances[k] = torch.tensor(samples.var(0))
    counts = torch.tensor(sizes, dtype=torch.float32)
    count, center, variance = prpo_mujoco.pool_statistics(counts, means, variances)
    together = np.concatenate(sets)
    assert count == len(together)
    assert count.dtype == center.dtype == variance.dtype == torch.double
    np.testing.assert_allclose(center.numpy(), together.mean(0), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(variance.numpy(), together.var(0), rtol=1e-9, atol=1e-9)


def test_running_statistics_are_those_of_all_rollouts():
    """Without rows that are not finite, or huge; an agent that sees no others keeps what it has."""
    torch.manual_seed(0)
    agent = prpo_mujoco.Agent(NUM_OBS, NUM_ACTIONS)
    seen = []
    for k, size in enumerate((40, 7, 1, 300)):
        obs = torch.randn(size, NUM_OBS) * torch.tensor([0.1, 1.0, 50.0]) + 3 * k
        seen.append(obs)
        bad = obs[:1].repeat(3, 1)
        bad[0, 1] = math.nan
        bad[1, 0] = -1e21  # of which float32 has no variance
        bad[2, 2] = math.inf
        agent.update_statistics(torch.cat([bad[:2], obs, bad[2:]]))
        everything = torch.cat(seen).double().numpy()
        assert agent.obs_count == len(everything)
        np.testing.assert_allclose(agent.obs_mean, everything.mean(0), rtol=1e-5)
        np.testing.assert_allclose(agent.obs_var, everything.var(0), rtol=1e-5, atol=1e-7)
    before = communicators.flatten(agent)
    agent.update_statistics(torch.full((5, NUM_OBS), math.nan))
    assert torch.equal(communicators.flatten(agent), before)


def test_observations_are_shown_in_deviations():
    """At most 10 of them, also where nothing ever changes."""
    agent = prpo_mujoco.Agent(NUM_OBS, NUM_ACTIONS)
    agent.set_statistics(
        torch.tensor(5.0), torch.tensor([1.0, -2.0, 3.0]), torch.tensor([4.0, 1, 0])
    )
    obs = torch.tensor([[5.0, -2.5, 3.0], [-99.0, 99.0, 4.0]])
    torch.testing.assert_close(
        prpo_mujoco.normalise(obs, agent.obs_mean, agent.obs_var),
        torch.tensor([[2.0, -0.5, 0.0], [-10.0, 10.0, 10.0]]),
    )
    policy, value = agent(obs)
    expected_policy, expected_value = outputs_of(agent, obs)
    torch.testing.assert_close(policy, expected_policy)
    torch.testing.assert_close(value, expected_value)


@pytest.mark.parametrize("script", [prpo_mujoco, fedavg_mujoco], ids=lambda script: script.__name__)
def test_statistics_change_between_iterations_only(script, tmp_path, monkeypatch):
    """What acts, what is compared, and what learns normalise alike: each ratio begins at 1."""
    read = prpo_mujoco.Actors.read
    update = script.update
    acting = []
    learning = []

    def record_reading(actors):
        read(actors)
        for center, variance in zip(actors.obs_mean, actors.obs_var, strict=True):
            acting.append((center[0].clone(), variance[0].clone()))

    def record_update(agent, optimizer, generator, batch, *more):
        values = [(agent.obs_mean.clone(), agent.obs_var.clone())]
        policy, _ = agent.predict(batch["obs"])
        log_probs = communicators.gaussian_log_prob(batch["actions"], policy, agent.actor_log_std)
        ratios = (log_probs - batch["logprobs"]).exp()
        assert (ratios - 1).abs().max() < 1e-5
        losses = update(agent, optimizer, generator, batch, *more)
        values.append((agent.obs_mean.clone(), agent.obs_var.clone()))
        learning.append(values)
        return losses

    monkeypatch.setattr(prpo_mujoco.Actors, "read", record_reading)
    monkeypatch.setattr(script, "update", record_update)
    train(script, tmp_path, num_agents=2, learning_rate=3e-3)
    assert len(acting) == len(learning) == 6
    for expected, values in zip(acting, learning, strict=True):
        for pair in values:
            torch.testing.assert_close(pair, expected)
    for number in range(4):
        assert (acting[number + 2][0] - acting[number][0]).abs().max() > 1e-4


def test_a_snapshot_brings_its_statistics_along():
    """So that it is the same policy, on observations as the task shows them."""
    torch.manual_seed(0)
    agent, other = lively_agents(2)
    obs = 5 * torch.randn(20, NUM_OBS)
    assert (agent.predict(obs)[0] - other.predict(obs)[0]).abs().max() > 0.1
    communicators.unflatten(communicators.flatten(agent), other)
    for values, expected in zip(other.predict(obs), agent.predict(obs), strict=True):
        assert torch.equal(values, expected)
    for name in ("obs_count", "obs_mean", "obs_var", "value_scale", "actor_log_std"):
        assert torch.equal(other.state_dict()[name], agent.state_dict()[name])


# --- rewards ---


def test_rewards_are_scaled_as_gymnasium_does():
    """By the deviation of the discounted returns of all rollouts, this one's among them."""
    args = make_args(gamma=0.9, num_steps=30, num_envs=3, num_agents=2)
    torch.manual_seed(0)
    actors = prpo_mujoco.Actors(lively_agents(2))
    envs = prpo_mujoco.Envs(args, range(2), 0)
    generators = [torch.Generator().manual_seed(i) for i in range(2)]
    statistics = torch.zeros(2, 3).double()
    running = [RunningMeanStd(epsilon=0) for _ in range(2)]
    discounted = np.zeros((2, 3))
    for _ in range(3):
        rollouts = prpo_mujoco.rollout(args, actors, envs, generators)
        for k, (data, _) in enumerate(rollouts):
            rewards = data["rewards"].clone()
            samples = []
            for step, e in itertools.product(range(30), range(3)):
                if data["valid"][step, e]:
                    discounted[k, e] = 0.9 * discounted[k, e] + rewards[step, e]
                    samples.append(discounted[k, e])
                if data["dones"][step, e]:
                    discounted[k, e] = 0.0
            running[k].update(np.array(samples))
            deviation = prpo_mujoco.scale_rewards(data, statistics[k])
            expected = np.sqrt(running[k].var + 1e-8)
            assert deviation == pytest.approx(expected, rel=1e-5)
            scaled = (rewards / expected).clamp(-10, 10).float()
            torch.testing.assert_close(data["rewards"], scaled, rtol=1e-5, atol=1e-6)
            assert data["terminations"].any()
            assert (data["dones"] & ~data["terminations"]).any()
            assert not data["valid"].all()
    envs.close()


def test_scaled_rewards_are_at_most_10():
    data = {"discounted_returns": torch.tensor([[1.0], [-1.0], [5.0]])}
    data["valid"] = torch.tensor([[True], [True], [False]])
    data["rewards"] = torch.tensor([[50.0], [-50.0], [0.5]])
    statistics = torch.zeros(3).double()
    assert prpo_mujoco.scale_rewards(data, statistics) == pytest.approx(1)
    assert data["rewards"].flatten().tolist() == pytest.approx([10, -10, 0.5])
    assert statistics.tolist() == [2, 0, 1]  # the step that is not valid has no part in it


def test_a_reward_that_is_no_number_ends_with_its_episode(monkeypatch):
    """The statistics leave it out, and those of the next episodes are numbers again."""
    args = make_args(num_agents=1, num_steps=60)
    step = Point.step

    def pay_nothing(env, action):
        obs, reward, *more = step(env, action)
        first = not getattr(env, "has_paid", False)
        env.has_paid = True
        return obs, math.nan if first else reward, *more

    monkeypatch.setattr(Point, "step", pay_nothing)
    envs = prpo_mujoco.Envs(args, range(1), 0)
    actors = prpo_mujoco.Actors(lively_agents(1))
    generators = [torch.Generator().manual_seed(0)]
    ((data, episodes),) = prpo_mujoco.rollout(args, actors, envs, generators)
    unknown = data["discounted_returns"].isnan()
    assert unknown.any()
    assert not unknown[12:].any()
    assert sum(math.isnan(episode_return) for episode_return, _ in episodes) == 2
    statistics = torch.zeros(3).double()
    assert math.isfinite(prpo_mujoco.scale_rewards(data, statistics))
    assert statistics[0] == (data["valid"] & ~unknown).sum()


@pytest.fixture
def all_sent(monkeypatch):
    """What agents send in rounds, [rounds][agents] flat snapshots."""

    def copy_all(exchange, sent, *_):
        return [snapshot.clone() for snapshot in sent]

    return notes_of(monkeypatch, communicators.Exchange, "round", copy_all)


@pytest.mark.parametrize("gate", ["none", "value"])
def test_the_scale_of_rewards_stays_at_home(gate, all_sent, tmp_path):
    """64 times the reward changes nothing that is sent, but for the scale that a gate reads."""
    for name in ("Point-a-v0", "Point-paid-v0"):
        tasks = name, "Point-b-v0", "Point-c-v0"
        train(prpo_mujoco, tmp_path / name, env_ids=tasks, gate=gate, communicator="identity")
    agent = prpo_mujoco.Agent(NUM_OBS, NUM_ACTIONS)
    assert len(all_sent) == 6
    for plain, paid in zip(all_sent[:3], all_sent[3:], strict=True):
        assert torch.equal(plain[1], paid[1])
        values = []
        for snapshot in (plain[0], paid[0]):
            communicators.unflatten(snapshot, agent)
            values.append({name: value.clone() for name, value in agent.state_dict().items()})
        scales = [each.pop("value_scale").item() for each in values]
        torch.testing.assert_close(values[0], values[1], rtol=0, atol=1e-5)
        if gate == "value":
            assert scales[1] == pytest.approx(64 * scales[0], rel=1e-4)
            assert scales[0] != 1
        else:
            assert scales == [1, 1]


# --- rollouts ---


@pytest.mark.parametrize("sizes", [[8, 8, 8], [8, 8, 16], [8, 16, 8]], ids=str)
def test_actors_are_the_agents(sizes):
    """Networks side by side have the means that each has alone, also after updates."""
    torch.manual_seed(0)
    agents = lively_agents(3, sizes)
    actors = prpo_mujoco.Actors(agents)
    for _ in range(2):
        actors.read()
        obs = 8 * torch.randn(3, 5, NUM_OBS)
        means = actors.forward(obs)
        assert means.shape == (3, 5, NUM_ACTIONS)
        for k, agent in enumerate(agents):
            torch.testing.assert_close(means[k], agent.predict(obs[k])[0], rtol=1e-5, atol=1e-6)
        for agent, other in zip(agents, lively_agents(3, sizes), strict=True):
            agent.load_state_dict(other.state_dict())


def test_returns_and_lengths_of_episodes():
    """Undiscounted sums of the task's rewards, across rollouts."""
    args = make_args(num_steps=8, num_envs=2, num_agents=1)
    torch.manual_seed(0)
    envs = prpo_mujoco.Envs(args, range(1), 0)
    actors = prpo_mujoco.Actors(lively_agents(1))
    generators = [torch.Generator().manual_seed(0)]
    totals = np.zeros(2)
    lengths = np.zeros(2)
    ended = []
    logged = []
    for _ in range(6):
        ((data, episodes),) = prpo_mujoco.rollout(args, actors, envs, generators)
        logged += episodes
        for step, e in itertools.product(range(8), range(2)):
            totals[e] += data["rewards"][step, e]
            lengths[e] += data["valid"][step, e]
            if data["dones"][step, e]:
                ended.append((totals[e], lengths[e]))
                totals[e] = 0
                lengths[e] = 0
    assert len(logged) > 5
    np.testing.assert_allclose(logged, ended, rtol=1e-5)
    envs.close()


# --- references ---


def make_case(seed=0):
    """Agents, their older snapshots, and a batch of agent 0's, 1's and 2's."""
    torch.manual_seed(seed)
    agents = lively_agents(3, [8, 8, 16])
    peers = dict(enumerate(lively_agents(3, [8, 8, 16])))
    for j, peer in peers.items():
        peer.value_scale.fill_(0.5 + j)
    batches = []
    for agent in agents:
        obs = 3 * torch.randn(30, NUM_OBS)
        policy, values = agent.predict(obs)
        returns = values + torch.randn(30)
        batches.append({"obs": obs, "policy": policy, "values": values, "returns": returns})
    return agents, peers, batches


def assert_same_reference(reference, weights, policies, args):
    """A reference has the densities of these policies' mixture. weights: [senders, samples]."""
    weights = torch.as_tensor(weights).float()
    if args.mixture == "geometric":
        expected = product_of(weights, policies)
    elif args.kl_direction == "forward":
        first = sum(w[:, None] * p.mean for w, p in zip(weights, policies, strict=True))
        second = sum(
            w[:, None] * (p.variance + p.mean**2) for w, p in zip(weights, policies, strict=True)
        )
        expected = Independent(Normal(first, (second - first**2).sqrt()), 1)
    else:
        expected = mixture_of(weights, policies)
    actions = torch.randn(7, 30, NUM_ACTIONS)
    log_probs = communicators.gaussian_log_prob(
        actions[:, None], reference.means, reference.log_stds
    )
    log_probs = (log_probs + reference.weights.log()).logsumexp(1)
    torch.testing.assert_close(log_probs, expected.log_prob(actions), rtol=1e-3, atol=1e-4)


KINDS = pytest.mark.parametrize(
    ("mixture", "direction"),
    [*itertools.product(["arithmetic", "geometric"], ["forward", "reverse"])],
)


@KINDS
@pytest.mark.parametrize("self_reference", ["behaviour", "snapshot"])
@pytest.mark.parametrize("gate", ["none", "value"])
@pytest.mark.parametrize("matrix", [OF_THREE, ALL_LISTEN], ids=["some", "all"])
def test_references_are_mixtures_of_peers(mixture, direction, self_reference, gate, matrix):
    """Each peer normalises the listener's observations by its own statistics.

    A gate compares what critics promise in the rewards of the task, each by its own scale.
    """
    agents, peers, batches = make_case()
    options = {"mixture": mixture, "kl_direction": direction, "gate": gate}
    args = make_args(self_reference=self_reference, **options)
    for i in range(3):
        batch = batches[i]
        senders = matrix[i].nonzero().flatten().tolist()
        policies = []
        values = []
        for j in senders:
            is_itself = j == i and self_reference == "behaviour"
            policy, value = outputs_of(agents[i] if is_itself else peers[j], batch["obs"])
            scaled = agents[i] if is_itself else peers[j]
            policies.append(gaussian(policy.detach(), scaled.actor_log_std.detach()))
            values.append((value * scaled.value_scale).tolist())
        row = matrix[i, senders].tolist()
        expected = [[c] * 30 for c in row]
        if gate == "value":
            returns = (batch["returns"] * agents[i].value_scale).tolist()
            expected = list(zip(*gate_by_hand(row, values, returns), strict=True))
        given = {j: peers[j] for j in senders}
        reference, weights = prpo_mujoco.compute_reference(i, agents[i], batch, given, matrix, args)
        by_state = weights.view(len(senders), -1).expand(-1, 30)
        torch.testing.assert_close(by_state, torch.tensor(expected).float(), rtol=1e-4, atol=1e-5)
        assert_same_reference(reference, expected, policies, args)


@KINDS
def test_an_agent_whose_snapshot_is_missing_counts_as_it_is(mixture, direction):
    agents, peers, batches = make_case()
    options = {"mixture": mixture, "kl_direction": direction}
    matrix = OF_THREE
    references = []
    for self_reference in ("behaviour", "snapshot"):
        args = make_args(self_reference=self_reference, **options)
        given = {1: peers[1], 2: peers[2]}
        reference, _ = prpo_mujoco.compute_reference(0, agents[0], batches[0], given, matrix, args)
        references.append(reference)
    for values, expected in zip(*references, strict=True):
        assert torch.equal(values, expected)


@pytest.mark.parametrize("mixture", ["arithmetic", "geometric"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30, 1e10])
def test_a_policy_that_overflows_has_neither_vote_nor_influence(mixture, bad):
    """In one dimension of one state, whose critic promises most."""
    agents, peers, batches = make_case()
    args = make_args(mixture=mixture, kl_direction="reverse", gate="value")
    expected, _ = prpo_mujoco.compute_reference(0, agents[0], batches[0], peers, ALL_LISTEN, args)
    predict = peers[1].predict

    def overflow(obs):
        policy, values = predict(obs)
        policy = policy.clone()
        policy[4, 1] = bad
        return policy, values

    peers[1].predict = overflow
    reference, weights = prpo_mujoco.compute_reference(
        0, agents[0], batches[0], peers, ALL_LISTEN, args
    )
    assert weights.isfinite().all()
    assert weights[1, 4] == 0
    assert all(values.isfinite().all() for values in reference)
    assert not torch.equal(reference.means[:, 4], expected.means[:, 4])
    assert not torch.equal(reference.log_stds[:, 4], expected.log_stds[:, 4])
    if mixture == "arithmetic":  # a geometric one is a single Gaussian, of weight 1
        assert not torch.equal(reference.weights[:, 4], expected.weights[:, 4])


# --- evaluation ---


@pytest.mark.parametrize("greedy", [False, True])
def test_evaluations_are_those_of_a_plain_loop(greedy):
    """A level at a time; actions have the policy's spread, unless they are its means."""
    torch.manual_seed(0)
    (agent,) = lively_agents(1)
    task = TASKS[0]
    levels = [3, 1, 2]
    returns = prpo_mujoco.evaluate(make_args(), agent, task, levels, 5, greedy)
    envs = [gym.make(task, disable_env_checker=True) for _ in levels]
    shown = {
        k: env.reset(seed=level)[0] for k, (env, level) in enumerate(zip(envs, levels, strict=True))
    }
    expected = np.zeros(3)
    generator = torch.Generator().manual_seed(5)
    while shown:
        # Levels draw their noise together
        noise = torch.randn(len(shown), NUM_ACTIONS, generator=generator)
        for row, k in enumerate(list(shown)):
            obs = torch.tensor(shown[k], dtype=torch.float32)
            policy, _ = outputs_of(agent, obs)
            spread = 0 if greedy else agent.actor_log_std.exp() * noise[row]
            action = (policy + spread).detach().numpy()
            space = envs[k].action_space
            shown[k], reward, *ends, _ = envs[k].step(np.clip(action, space.low, space.high))
            expected[k] += reward
            if any(ends):
                del shown[k]
    assert returns == pytest.approx(expected, abs=1e-4)


# --- communication ---


def test_policies_on_public_states():
    """Means and spreads, on states as tasks show them; NaN where anything overflows."""
    torch.manual_seed(0)
    networks = dict(enumerate(lively_agents(3)))
    states = prpo_mujoco.collect_public_states(make_args(), 5, 2)
    assert states.shape == (3 * 5 * 2, NUM_OBS)
    policies = prpo_mujoco.compute_public_policies(networks, states, 4, NUM_ACTIONS)
    assert policies.shape == (4, 30, 2, NUM_ACTIONS)
    for j, network in networks.items():
        policy, _ = outputs_of(network, states)
        torch.testing.assert_close(policies[j, :, 0], policy.detach())
        assert torch.equal(policies[j, 5, 1], network.actor_log_std.detach())
    assert policies[3].isnan().all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("actor_log_std", 46.0),
        ("actor_log_std", -46.0),
        ("actor.bias", 1e20),
        ("actor.bias", 1e8),
        ("critic.bias", 1e20),
        ("obs_var", -1.0),
        ("obs_count", 0.0),
    ],
)
def test_policies_whose_moments_overflow_are_dropped(name, value, capsys):
    """As numbers they are finite. Their peers' losses would not be."""
    torch.manual_seed(0)
    networks = dict(enumerate(lively_agents(2)))
    with torch.no_grad():
        networks[1].state_dict()[name].fill_(value)
    states = torch.randn(6, NUM_OBS)
    policies = prpo_mujoco.compute_public_policies(networks, states, 2, NUM_ACTIONS)
    assert policies[0].isfinite().all()
    assert policies[1].isnan().all()
    assert "dropped agents [1]" in capsys.readouterr().out


def test_gains_are_those_that_the_listeners_rollout_predicts():
    agents, peers, batches = make_case()
    batch = batches[0]
    log_std = agents[0].actor_log_std.detach()
    batch["actions"] = batch["policy"] + log_std.exp() * torch.randn(30, NUM_ACTIONS)
    batch["logprobs"] = gaussian(batch["policy"], log_std).log_prob(batch["actions"])
    batch["advantages"] = torch.randn(30)
    gains = prpo_mujoco.estimate_gains(0, batch, {2: peers[2]}, 4)
    assert gains[0] == 0
    assert gains[[1, 3]].isnan().all()
    policy, _ = outputs_of(peers[2], batch["obs"])
    peer = gaussian(policy.detach(), peers[2].actor_log_std.detach())
    ratios = (peer.log_prob(batch["actions"]) - batch["logprobs"]).exp().clamp(max=10)
    advantages = batch["advantages"]
    normalised = (advantages - advantages.mean()) / advantages.std(correction=0)
    assert gains[2].item() == pytest.approx((ratios * normalised).mean().item(), abs=1e-5)
    assert abs(gains[2]) > 1e-3


# --- FedAvg ---


def pooled_by_hand(row, networks):
    """Count, mean and variance of all samples, each agent's counted by its weight."""
    numbers = [c * network["obs_count"].double() for c, network in zip(row, networks, strict=True)]
    total = sum(numbers)
    shares = [number / total for number in numbers]
    first = sum(s * x["obs_mean"].double() for s, x in zip(shares, networks, strict=True))
    second = sum(
        s * (x["obs_var"].double() + x["obs_mean"].double() ** 2)
        for s, x in zip(shares, networks, strict=True)
    )
    return total.float(), first.float(), (second - first**2).float()


def test_statistics_are_averaged_by_their_counts():
    """Of an asymmetric C; the count stays that of one agent."""
    torch.manual_seed(0)
    networks = dict(enumerate(lively_agents(3)))
    for j, network in networks.items():
        network.obs_count.fill_(10.0 ** (j + 1))
    for i in range(3):
        values = fedavg_mujoco.average_statistics(i, networks, ALL_LISTEN)
        states = [network.state_dict() for network in networks.values()]
        expected = pooled_by_hand(ALL_LISTEN[i].tolist(), states)
        for value, expected_value in zip(values, expected, strict=True):
            torch.testing.assert_close(value.float(), expected_value, rtol=1e-5, atol=1e-5)
    alone = {1: networks[1]}
    C = torch.eye(3)
    count, center, variance = fedavg_mujoco.average_statistics(1, alone, C)
    assert count == 100
    torch.testing.assert_close(center.float(), networks[1].obs_mean)
    torch.testing.assert_close(variance.float(), networks[1].obs_var)


@pytest.mark.parametrize("C", [ALL_LISTEN[:1], torch.tensor([[0.5, 0.5, 0.0]])], ids=["all", "two"])
def test_a_false_count_buys_no_more_than_ten_agents(C):
    """Whatever a sender says of its number of samples."""
    torch.manual_seed(0)
    networks = dict(enumerate(lively_agents(3)))
    for network in networks.values():
        network.obs_count.fill_(50.0)
    states = []
    for count in (1e30, 500.0):
        networks[1].obs_count.fill_(count)
        states.append(fedavg_mujoco.average_statistics(0, networks, C))
    for value, of_ten_agents in zip(*states, strict=True):
        torch.testing.assert_close(value, of_ten_agents)


@pytest.mark.parametrize("heads", [(), ("actor",), ("critic",), ("actor", "critic")], ids=str)
def test_a_round_averages_all_but_private_heads(heads, tmp_path):
    """The policy's head has the spread, too. Agents that listen to nobody else stay as they are."""
    changes = {"communicator": write_matrix(tmp_path / "C.csv", OF_THREE), "iterations": 2}
    changes |= {"private_heads": heads, "learning_rate": 3e-3, "num_steps": 48}
    after = networks_of(train(fedavg_mujoco, tmp_path / "round", local_updates=2, **changes))
    before = networks_of(train(fedavg_mujoco, tmp_path / "none", local_updates=3, **changes))
    assert len({network["obs_count"].item() for network in before}) > 1
    for name, values in after[2].items():
        assert torch.equal(values, before[2][name])
    private = set()
    for head in heads:
        private |= {
            name for name in before[0] if name.split(".")[0].removesuffix("_log_std") == head
        }
    assert ("actor_log_std" in private) == ("actor" in heads)
    for name in before[0].keys() - {"obs_count", "obs_mean", "obs_var", "value_scale"}:
        new, old = (torch.stack([network[name] for network in run]) for run in (after, before))
        if name in private:
            assert torch.equal(new, old)
            assert not torch.equal(new[0], new[1])
        else:
            expected = torch.einsum("ij,j...->i...", OF_THREE, old)
            torch.testing.assert_close(new, expected, rtol=0, atol=1e-6)
            transposed = torch.einsum("ji,j...->i...", OF_THREE, old)
            assert (new - transposed).abs().max() > 1e-4
    for i in range(2):
        statistics = [after[i][name] for name in ("obs_count", "obs_mean", "obs_var")]
        expected = pooled_by_hand(OF_THREE[i].tolist(), before)
        for value, expected_value in zip(statistics, expected, strict=True):
            torch.testing.assert_close(value, expected_value, rtol=1e-4, atol=1e-5)


def test_counts_do_not_multiply_from_round_to_round(tmp_path):
    """Agents that average all have the count of one agent's samples, about as many as steps."""
    folder = train(fedavg_mujoco, tmp_path, iterations=5)
    counts = [network["obs_count"].item() for network in networks_of(folder)]
    assert counts == pytest.approx([counts[0]] * 3, rel=1e-5)
    assert 0.8 * 5 * 64 < counts[0] < 5 * 64


@pytest.mark.parametrize("server_lr", [0.5, 1.0, 2.0])
def test_the_server_step_is_of_parameters(server_lr, tmp_path, monkeypatch):
    """From what the last round left; statistics are the average's, at any rate."""
    update = fedavg_mujoco.update
    agents = []
    before = []

    def record(agent, *more):
        agents.append(agent)
        before.append(copy.deepcopy(agent.state_dict()))
        return update(agent, *more)

    update_statistics = prpo_mujoco.Agent.update_statistics
    after = []

    def record_statistics(agent, obs):
        update_statistics(agent, obs)
        after.append(copy.deepcopy(agent.state_dict()))

    monkeypatch.setattr(fedavg_mujoco, "update", record)
    monkeypatch.setattr(prpo_mujoco.Agent, "update_statistics", record_statistics)
    changes = {"communicator": write_matrix(tmp_path / "C.csv", OF_THREE), "learning_rate": 3e-3}
    train(fedavg_mujoco, tmp_path / "runs", iterations=2, server_lr=server_lr, **changes)
    final = [agent.state_dict() for agent in agents[3:]]
    rounds = ((before[:3], after[:3], before[3:]), (before[3:], after[3:], final))
    for begin, trained, new in rounds:
        for i in range(2):
            for name in ("policy_network.0.weight", "actor_log_std", "critic.bias"):
                average = sum(
                    c * values[name] for c, values in zip(OF_THREE[i], trained, strict=True)
                )
                expected = begin[i][name] + server_lr * (average - begin[i][name])
                torch.testing.assert_close(new[i][name], expected, rtol=0, atol=1e-6)
                assert (average - begin[i][name]).abs().max() > 1e-4
            statistics = pooled_by_hand(OF_THREE[i].tolist(), trained)
            for name, expected in zip(
                ("obs_count", "obs_mean", "obs_var"), statistics, strict=True
            ):
                torch.testing.assert_close(new[i][name], expected, rtol=1e-4, atol=1e-5)
        for name, values in new[2].items():
            assert torch.equal(values, trained[2][name])


# --- learning ---


@pytest.mark.parametrize(
    ("script", "changes"),
    [
        (prpo_mujoco, {}),
        pytest.param(prpo_mujoco, REVERSE, marks=pytest.mark.slow),
        pytest.param(prpo_mujoco, GATED, marks=pytest.mark.slow),
        (fedavg_mujoco, {"env_ids": TASKS[:1] * 3}),
    ],
    ids=["own goals", "own goals, reverse", "own goals, gated", "averages, one goal"],
)
def test_agents_learn(script, changes, tmp_path):
    """Agents that pull each other reach goals of their own; those of others cost them.

    The largest return is 11; one that stays where it begins has about -5.
    """
    size = {"iterations": 25, "num_envs": 4, "num_steps": 64, "save_every": 25, "eval_episodes": 5}
    size |= {"learning_rate": 3e-3, "update_epochs": 4, "num_minibatches": 4, "local_updates": 2}
    args = make_args(script, tmp_path, **size | changes)
    summary = script.main(args)
    rows = rows_of(only_run(tmp_path))
    assert all(float(row["episodic_return"]) < -4 for row in rows[:3])
    assert all(float(row["return_last_100"]) > 1 for row in rows[-3:])
    for task, evaluation in zip(args.env_ids, summary["evaluation"]["agents"], strict=True):
        means = {name: of_task["mean"] for name, of_task in evaluation.items()}
        assert means.pop(task) > 1
        assert all(mean < -4 for mean in means.values())
        assert evaluation[task]["greedy_return"] > 2
