"""PR-PPO on MuJoCo: agents that share no data learn together through their KL penalty.

Eq. 4 of the PRPO paper, for continuous actions, which the paper does not have:

    maximise  E[clipped surrogate] - kl_coef E[KL],  KL of agent i's policy and its reference
    reference = C_i pi = sum_j C[i, j] pi_j          frozen for an update; C is new in every round

Policies are Gaussians. The forward KL of eq. 4 reads the mean and the variance of the reference
only, and is exact but for a constant; so is the KL to a geometric mixture, which is a Gaussian. The
reverse KL to an arithmetic mixture is estimated from samples (--kl-samples).

Each agent trains on its own environments. What leaves it: its parameters in a round and the
number, mean and variance of its observations (with --gate value the deviation of its returns, too),
its mean return where C depends on it, its row of C, its distances to peers, and metrics; never an
observation, an action or a reward of a step.

    python prpo_mujoco.py                                      # three agents in one process
    python prpo_mujoco.py --communicator identity              # the same agents, isolated
    torchrun --nproc-per-node 3 prpo_mujoco.py                 # one agent per process
    python prpo_mujoco.py --resume runs/<name>                 # continue an interrupted run
"""

import copy
import functools
import importlib
import itertools
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor

import communicators
from communicators import (
    Count,
    Fraction,
    Natural,
    NonNegative,
    Positive,
    Run,
    RunArgs,
    Stacked,
    derive_seed,
    mean,
    refuse,
)

# What a derived seed is for: the last number of its key
ENVIRONMENTS = 1
TEST_LEVELS = 3
TEST_ACTIONS = 4


@dataclass
class TaskArgs(RunArgs):
    """The flags of every script on MuJoCo: environments, rollout, advantages."""

    device: str = "auto"
    """cpu, cuda, cuda:N, or auto: the CPU, because the networks are small"""

    # The environments
    env_id: str = "HalfCheetah-v5"
    """the task of all agents; write one of your own as module:id"""
    env_ids: tuple[str, ...] = ()  # one task per agent, instead of --env-id
    eval_env_ids: tuple[str, ...] = ()
    """further tasks, such as unseen bodies, that every agent is evaluated on"""
    env_backend: Literal["auto", "envpool", "gymnasium"] = "auto"
    """envpool is faster; auto takes it where it is installed and knows the task"""
    num_envs: Count = 4  # parallel environments per agent
    # width of each agent's two hidden layers, of the policy and of the value function (default: 64
    # for all)
    hidden_sizes: tuple[int, ...] = ()
    eval_episodes: Natural = 10
    """episodes per agent and task of an evaluation, in gymnasium's environment (0: none)"""

    # Rollout and advantages
    total_timesteps: Count = 1_000_000  # environment steps of each agent
    num_steps: Count = 512  # steps per environment and rollout
    gamma: Fraction = 0.99  # discount factor
    gae_lambda: Fraction = 0.95  # lambda of generalized advantage estimation


@dataclass
class Args(TaskArgs):
    # Reference policy

    # an agent's own component of its reference: its policy before this update, or its snapshot of
    # the last round
    self_reference: Literal["behaviour", "snapshot"] = "behaviour"
    mixture: Literal["arithmetic", "geometric"] = "arithmetic"
    """how the reference mixes the agents' distributions"""
    gate: Literal["none", "value"] = "none"
    """value: in each state a peer counts by what its critic expects there"""
    kl_direction: Literal["forward", "reverse"] = "forward"
    """forward: KL(reference || policy), eq. 4; reverse: KL(policy || reference), mirror descent"""
    kl_coef: Annotated[NonNegative, tyro.conf.arg(aliases=["--communication-coef"])] = 0.1
    """coefficient of the KL penalty towards the reference (without peers: the old policy)"""
    kl_schedule: Literal["constant", "linear"] = "constant"
    """linear: the coefficient falls to 0 over the run"""
    # samples of the policy in each state that estimate the reverse KL to an arithmetic mixture
    kl_samples: Count = 4

    # Update
    learning_rate: Positive = 3e-4  # learning rate of Adam
    anneal_lr: bool = True  # anneal the learning rate linearly to 0
    update_epochs: Count = 10  # epochs per rollout
    num_minibatches: Count = 32  # minibatches per epoch
    norm_adv: bool = True  # normalise advantages in each minibatch
    clip_coef: NonNegative = 0.2  # clip range of the surrogate objective (0: no clipping)
    clip_vloss: bool = True  # clip the value loss with the same range
    ent_coef: NonNegative = 0.0  # coefficient of the entropy bonus
    vf_coef: NonNegative = 0.5  # coefficient of the value loss
    max_grad_norm: Positive = 0.5  # maximum norm of each agent's gradient

    # Communication round
    local_updates: Count = 2  # iterations between communication rounds


# --- the network ---


def layer_init(layer: nn.Module, std: float = np.sqrt(2)) -> nn.Module:
    """Orthogonal weights of gain `std`, zero bias."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


def pool_statistics(
    counts: Tensor, means: Tensor, variances: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The count, mean and variance of several sets of samples together.

    counts: [sets], weighted as you like, not all 0; means, variances: [sets, ...]. Returns float64.
    """
    shape = -1, *[1] * (means.dim() - 1)
    shares = (counts.double() / counts.double().sum()).view(shape)
    mean = (shares * means.double()).sum(0)
    variance = (shares * (variances.double() + (means.double() - mean).square())).sum(0)
    return counts.double().sum(), mean, variance


def normalise(obs: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Observations in running standard deviations, clipped to [-10, 10]."""
    return ((obs - mean) / (variance + 1e-8).sqrt()).clamp(-10, 10)


class Agent(nn.Module):
    """Policy and value function: a Gaussian whose spread is the same in every state.

    Its snapshot brings along the running statistics by which it normalises observations.
    """

    def __init__(self, num_obs: int, num_actions: int, hidden: int = 64):
        super().__init__()
        self.policy_network = nn.Sequential(
            layer_init(nn.Linear(num_obs, hidden)),
            nn.Tanh(),
            layer_init(nn.Linear(hidden, hidden)),
            nn.Tanh(),
        )
        self.actor = layer_init(nn.Linear(hidden, num_actions), std=0.01)
        self.actor_log_std = nn.Parameter(torch.zeros(num_actions))
        self.value_network = nn.Sequential(
            layer_init(nn.Linear(num_obs, hidden)),
            nn.Tanh(),
            layer_init(nn.Linear(hidden, hidden)),
            nn.Tanh(),
        )
        self.critic = layer_init(nn.Linear(hidden, 1), std=1)
        self.register_buffer("obs_count", torch.zeros(()))
        self.register_buffer("obs_mean", torch.zeros(num_obs))
        self.register_buffer("obs_var", torch.ones(num_obs))
        # --gate value: what a value of 1 is in the task's rewards
        self.register_buffer("value_scale", torch.ones(()))

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """obs: [batch, obs], as the task shows them.

        Returns (the policy's mean [batch, actions], value [batch]); its spread is actor_log_std.
        """
        obs = normalise(obs, self.obs_mean, self.obs_var)
        mean_action = self.actor(self.policy_network(obs))
        return mean_action, self.critic(self.value_network(obs)).squeeze(-1)

    @torch.no_grad()
    def predict(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """`forward` for many states, without gradient."""
        return self(obs)

    @torch.no_grad()
    def update_statistics(self, obs: Tensor) -> None:
        """Add observations [samples, obs] to the running statistics."""
        # Larger ones, of which float32 has no variance, are left out like NaN and infinity
        obs = obs[(obs.abs() < 1e16).all(-1)]
        if len(obs) == 0:
            return
        counts = torch.stack([self.obs_count, self.obs_count.new_tensor(len(obs))])
        means = torch.stack([self.obs_mean, obs.mean(0)])
        variances = torch.stack([self.obs_var, obs.var(0, correction=0)])
        self.set_statistics(*pool_statistics(counts, means, variances))

    @torch.no_grad()
    def set_statistics(self, count: Tensor, mean: Tensor, variance: Tensor) -> None:
        """Normalise observations by these from now on."""
        self.obs_count.copy_(count)
        self.obs_mean.copy_(mean)
        self.obs_var.copy_(variance)


def make_agents(args: Args) -> list[Agent]:
    """Every agent's network at the start, equal ones for agents of equal size."""
    env = make_env(list_env_ids(args)[0])
    num_obs = env.observation_space.shape[0]
    num_actions = env.action_space.shape[0]
    env.close()
    agents = []
    for size in args.hidden_sizes or [64] * args.num_agents:
        torch.manual_seed(args.seed)
        agents.append(Agent(num_obs, num_actions, size))
    return agents


class Actors:
    """The policies of all agents at once, each on its own observations.

    Networks of equal size are one product per layer, which is three times as fast in a rollout.
    """

    def __init__(self, agents: list[Agent]):
        self.agents = agents
        self.groups = []  # (slice of the agents, their layers)
        widths = [agent.actor.in_features for agent in agents]
        for _, members in itertools.groupby(range(len(agents)), key=widths.__getitem__):
            members = list(members)
            group = slice(members[0], members[-1] + 1)
            layers = [nn.Sequential(*agent.policy_network, agent.actor) for agent in agents[group]]
            self.groups.append((group, Stacked(layers)))

    def read(self) -> None:
        """Read the agents' weights and statistics, after every update."""
        for _, layers in self.groups:
            layers.read()
        self.obs_mean = torch.stack([agent.obs_mean for agent in self.agents])[:, None]
        self.obs_var = torch.stack([agent.obs_var for agent in self.agents])[:, None]

    def forward(self, obs: Tensor) -> Tensor:
        """obs: [agents, envs, obs]. Returns the policies' means, [agents, envs, actions]."""
        obs = normalise(obs, self.obs_mean, self.obs_var)
        return torch.cat([layers(obs[group]) for group, layers in self.groups])


# --- PR-PPO ---


def rollout(
    args: Args, actors: Actors, envs: "Envs", generators: list[torch.Generator]
) -> list[tuple[dict[str, Tensor], list[tuple[float, float]]]]:
    """All agents play num_steps in their environments, from where they stand.

    Returns of each agent data and the episodes that ended, [(return, length)]. data: its
    observations, `obs` [steps, envs, obs], its actions, as sampled, and the means of its policy,
    `actions`, `policy` [steps, envs, actions]; the rest is [steps, envs]. `discounted_returns` are
    the discounted sums of the rewards of an episode so far.
    """
    agents = actors.agents
    shape = len(agents), args.num_steps, args.num_envs
    num_actions = agents[0].actor.out_features
    device = agents[0].actor.weight.device
    obs = torch.zeros(shape[0], shape[1] + 1, shape[2], envs.obs.shape[-1], device=device)
    rewards = np.zeros(shape, dtype=np.float32)
    discounted_returns = np.zeros(shape, dtype=np.float32)
    terminations = np.zeros(shape, dtype=bool)
    truncations = np.zeros(shape, dtype=bool)
    valid = np.zeros(shape, dtype=bool)
    episodes = [[] for _ in agents]

    # A Gaussian's sample is its mean plus its standard deviation times standard normal noise
    noise = []
    for agent, generator in zip(agents, generators, strict=True):
        normal = torch.randn(*shape[1:], num_actions, generator=generator).to(device)
        noise.append(normal * agent.actor_log_std.detach().exp())
    noise = torch.stack(noise)
    actions = torch.zeros_like(noise)

    actors.read()
    with torch.inference_mode():
        for step in range(args.num_steps):
            now = slice(None), step
            obs[now] = torch.from_numpy(envs.obs)
            actions[now] = actors.forward(obs[now]) + noise[now]
            *signals, ended = envs.step(actions[now].cpu().numpy())
            rewards[now], terminations[now], truncations[now], valid[now] = signals
            discounted_returns[now] = envs.discounted_returns
            for k, episode_return, length in ended:
                episodes[k].append((float(episode_return), float(length)))
        obs[:, -1] = torch.from_numpy(envs.obs)

    # Values and log-probabilities, all at once
    rollouts = []
    for k, agent in enumerate(agents):
        policy, value = agent.predict(obs[k].flatten(0, 1))
        policy = policy.view(*obs[k].shape[:2], num_actions)[:-1]
        value = value.view(obs[k].shape[:2])
        log_std = agent.actor_log_std.detach()
        data = {
            "obs": obs[k, :-1],
            "actions": actions[k],
            "policy": policy,
            "logprobs": communicators.gaussian_log_prob(actions[k], policy, log_std),
            "values": value[:-1],
            # After an episode's end the next observation is its final one: its value bootstraps
            "next_values": value[1:],
            "rewards": torch.from_numpy(rewards[k]).to(device),
            "discounted_returns": torch.from_numpy(discounted_returns[k]).to(device),
            "terminations": torch.from_numpy(terminations[k]).to(device),
            "dones": torch.from_numpy(terminations[k] | truncations[k]).to(device),
            "valid": torch.from_numpy(valid[k]).to(device),
        }
        rollouts.append((data, episodes[k]))
    return rollouts


def scale_rewards(data: dict[str, Tensor], statistics: Tensor) -> float:
    """Divide an agent's rewards by the running standard deviation of its discounted returns.

    data: of `rollout`; statistics: [3], the count, mean and variance of discounted returns so far,
    to which this rollout's are added; both are changed. Returns the standard deviation.
    """
    samples = data["discounted_returns"][data["valid"]].double().cpu()
    samples = samples[samples.isfinite()]
    if len(samples):
        new = samples.new_tensor([len(samples), samples.mean(), samples.var(correction=0)])
        statistics[:] = torch.stack(pool_statistics(*torch.stack([statistics, new], dim=1)))
    deviation = float((statistics[2] + 1e-8).sqrt())
    data["rewards"] = (data["rewards"] / deviation).clamp(-10, 10)
    return deviation


def compute_advantages(data: dict[str, Tensor], gamma: float, gae_lambda: float) -> Tensor:
    """Generalized advantage estimation that never leaks across episodes, [steps, envs].

    data: of `rollout`; its next_values are V of the state that each step led to, the episode's
    *final* state where one ended. A termination is worth nothing more; a truncation bootstraps;
    both cut the recursion.
    """
    next_values = data["next_values"] * ~data["terminations"]
    deltas = data["rewards"] + gamma * next_values - data["values"]
    decay = gamma * gae_lambda * ~data["dones"]
    advantages = torch.empty_like(deltas)
    last = torch.zeros_like(deltas[0])
    for step in reversed(range(len(deltas))):
        last = deltas[step] + decay[step] * last
        advantages[step] = last
    return advantages


def make_batch(data: dict[str, Tensor]) -> dict[str, Tensor]:
    """The samples to learn from: all steps but those that only reset an environment.

    Returns [samples, ...].
    """
    names = "obs", "actions", "policy", "logprobs", "values", "advantages", "returns"
    return {name: data[name][data["valid"]] for name in names}


def compute_reference(
    i: int, agent: Agent, batch: dict[str, Tensor], peers: dict[int, Agent], C: Tensor, args: Args
) -> tuple[communicators.Gaussians, Tensor]:
    """Agent i's reference policy C_i pi on its own states: row i of C applied to the policies.

    peers: agent -> network, of the senders of positive weight; where an agent's own is missing, its
    present policy is its part. Each normalises the listener's observations by its own statistics.
    Returns a mixture of Gaussians in each sample, frozen for the update, and the senders' weights:
    [senders], with --gate [senders, samples].
    """
    senders = C[i].nonzero().flatten().tolist()  # never a peer of weight 0
    means = []
    log_stds = []
    values = []
    for j in senders:
        if j == i and (args.self_reference == "behaviour" or i not in peers):
            means.append(batch["policy"])
            log_stds.append(agent.actor_log_std.detach().clone())
            values.append(batch["values"] * agent.value_scale)
        else:
            mean_action, value = peers[j].predict(batch["obs"])
            means.append(mean_action)
            log_stds.append(peers[j].actor_log_std)
            values.append(value * peers[j].value_scale)
    means = torch.stack(means)
    log_stds = torch.stack(log_stds)[:, None].expand_as(means)
    # The agent's own policy is the reference where no sender's is bounded
    unknown = ~communicators.are_bounded(means, log_stds)
    nobody = unknown.all(0)[:, None]
    means = torch.where(nobody, batch["policy"], means)
    log_stds = torch.where(nobody, agent.actor_log_std.detach(), log_stds)
    weights = C[i, senders].to(means.device)
    if args.gate == "value":
        # A policy that is unbounded in a state has no vote in any, whatever its critic promises
        values = torch.stack(values).masked_fill(unknown, torch.nan)
        returns = batch["returns"] * agent.value_scale
        weights = communicators.gate_by_value(weights, values, returns)
    reference = communicators.mix_gaussians(means, log_stds, weights, args.mixture)
    if args.kl_direction == "forward":  # reads no more of the mixture
        reference = communicators.match_moments(reference)
    return reference, weights


def update(
    agent: Agent,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
    batch: dict[str, Tensor],
    kl_coef: float,
    args: Args,
) -> dict[str, float]:
    """PPO's epochs over an agent's rollout, with the KL penalty of eq. 4. Returns mean losses.

    batch: of `make_batch`, and the reference policy of each sample, `reference`.
    """
    losses = []
    for _ in range(args.update_epochs):
        b_inds = torch.randperm(len(batch["obs"]), generator=generator)
        b_inds = b_inds.to(batch["obs"].device)
        for mb_inds in b_inds.tensor_split(args.num_minibatches):
            if len(mb_inds) == 0:
                continue
            new_mean, newvalue = agent(batch["obs"][mb_inds])
            log_std = agent.actor_log_std
            mb_actions = batch["actions"][mb_inds]
            newlogprob = communicators.gaussian_log_prob(mb_actions, new_mean, log_std)
            logratio = newlogprob - batch["logprobs"][mb_inds]
            ratio = logratio.exp()

            mb_advantages = batch["advantages"][mb_inds]
            if args.norm_adv and len(mb_advantages) > 1:
                centred = mb_advantages - mb_advantages.mean()
                mb_advantages = centred / (mb_advantages.std() + 1e-8)

            # Policy loss
            pg_loss = -mb_advantages * ratio
            if args.clip_coef > 0:
                clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                pg_loss = torch.max(pg_loss, -mb_advantages * clipped_ratio)
            pg_loss = pg_loss.mean()

            # Value loss
            mb_values = batch["values"][mb_inds]
            mb_returns = batch["returns"][mb_inds]
            v_loss = (newvalue - mb_returns) ** 2
            if args.clip_vloss and args.clip_coef > 0:
                v_change = (newvalue - mb_values).clamp(-args.clip_coef, args.clip_coef)
                v_loss = torch.max(v_loss, (mb_values + v_change - mb_returns) ** 2)
            v_loss = 0.5 * v_loss.mean()

            # Entropy bonus
            entropy = communicators.gaussian_entropy(log_std)

            # Distance to the reference policy: the peers' influence
            reference = batch["reference"].take(mb_inds)
            noise = None
            if args.kl_direction == "reverse" and len(reference.weights) > 1:
                shape = args.kl_samples, *new_mean.shape
                noise = torch.randn(shape, generator=generator).to(new_mean.device)
            kl_reference = communicators.kl_to_gaussians(
                new_mean, log_std, reference, args.kl_direction, noise
            )
            kl_reference = kl_reference.mean()

            loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
            loss = loss + kl_coef * kl_reference

            optimizer.zero_grad()
            loss.backward()
            grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)

            approx_kl = (ratio - 1 - logratio).mean()  # http://joschu.net/blog/kl-approx.html
            clipfrac = torch.zeros_like(approx_kl)
            if args.clip_coef > 0:
                clipfrac = ((ratio - 1).abs() > args.clip_coef).float().mean()
            losses.append(
                {
                    "losses/value_loss": v_loss.item(),
                    "losses/policy_loss": pg_loss.item(),
                    "losses/entropy": entropy.item(),
                    "losses/old_approx_kl": -logratio.mean().item(),
                    "losses/approx_kl": approx_kl.item(),
                    "losses/clipfrac": clipfrac.item(),
                    "losses/kl_reference": kl_reference.item(),
                }
            )
            if not (loss.isfinite() & grad_norm.isfinite()):
                # This agent has diverged: no step, which would ruin Adam's moments; peers go on
                losses[-1]["losses/policy_loss"] = torch.nan
                return average_losses(losses)
            optimizer.step()
    return average_losses(losses)


def average_losses(losses: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each term over minibatches."""
    return {name: mean([loss[name] for loss in losses]) for name in losses[0]}


def make_communicator(args: Args, returns=None, policies=None, gains=None, usable=None) -> Tensor:
    """The matrix C of a round, [agents, agents]: row i, on the simplex, weights agent i's peers.

    returns [agents]: reported means; policies [agents, states, 2, actions]: means and log standard
    deviations on the public states; gains [agents, agents]: see `estimate_gains`; usable, bool
    [agents]: whose snapshot is usable. Another communicator is another branch.
    """
    n = args.num_agents
    name = args.communicator
    if name == "identity":
        C = communicators.identity(n)
    elif name == "uniform":
        C = communicators.uniform(n)
    elif name == "self-preferred":
        C = communicators.self_preferred(n, args.self_preference)
    elif name == "similarity":
        C = communicators.similarity_of_gaussians(policies)
    elif name == "reward":
        C = communicators.reward(communicators.bound_returns(returns))
    elif name == "softmax-reward":
        bounded = communicators.bound_returns(returns)
        C = communicators.softmax_reward(bounded, args.communicator_temperature)
    elif name == "rank-reward":
        C = communicators.rank_reward(returns)
    elif name == "best":
        C = communicators.best(returns, usable, args.topology)
    elif name == "surrogate":
        C = communicators.surrogate(gains, args.communicator_temperature)
    else:
        C = communicators.load_matrix(args)
    communicators.check_matrix(args, C, usable)
    keep_self = name == "self-preferred"
    return communicators.restrict(args, C, usable, keep_self)


def estimate_gains(i: int, batch: dict[str, Tensor], peers: dict[int, Agent], n: int) -> Tensor:
    """L_i(pi_j): the gain from each peer's policy that agent i's own rollout predicts.

    peers: agent -> network, of those that may get weight. Returns [agents], NaN for others.
    """
    gains = torch.full((n,), torch.nan)
    for j, peer in peers.items():
        mean_action, _ = peer.predict(batch["obs"])
        log_std = peer.actor_log_std
        log_probs = communicators.gaussian_log_prob(batch["actions"], mean_action, log_std)
        gains[j] = communicators.surrogate_gains(log_probs, batch["logprobs"], batch["advantages"])
    gains[i] = 0.0  # of the policy of the rollout, which the others are compared with
    return gains


def compute_public_policies(
    networks: dict[int, Agent], states: Tensor, num_agents: int, num_actions: int
) -> Tensor:
    """The policies of snapshots on the public states, [agents, states, 2, actions].

    Each is its means and its log standard deviations. networks: agent -> network. NaN for an agent
    without one, and for one whose policy, or squares of what peers compute with, are not finite:
    finite parameters can overflow, and with them a listener's gradient or average.
    """
    policies = torch.full((num_agents, len(states), 2, num_actions), torch.nan)
    overflowing = []
    for j, network in networks.items():
        mean_action, values = network.predict(states)
        policy = torch.stack([mean_action, network.actor_log_std.expand_as(mean_action)], dim=1)
        sizes = torch.cat([values, network.obs_mean])
        is_bounded = communicators.are_bounded(*policy.unbind(1)).all()
        if is_bounded and sizes.square().isfinite().all() and network.obs_count > 0:
            policies[j] = policy.cpu()
        else:
            overflowing.append(j)
    if overflowing:
        problem = "their policies or values are not finite, or too large"
        communicators.announce(f"\ndropped agents {overflowing} for this round: {problem}")
    return policies


def main(args: Args) -> dict:
    """Train, evaluate, and return what summary.json holds."""
    n = args.num_agents
    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size
    num_rounds = num_iterations // args.local_updates
    task_names = name_tasks(args)
    exchange = communicators.make_exchange(args)
    held = exchange.agents  # the agents of this process: agent i of all is the k-th held
    rows_held = slice(held.start, held.stop)
    run = Run(
        args,
        exchange,
        "+".join(dict.fromkeys(task_names)),
        total=num_iterations,
        units_per_iteration=batch_size * len(exchange.members),
        main_metric="charts/return_last_100",
        env_ids=task_names,
        steps_per_iteration=batch_size,
        about=f"{args.communicator} communicator, {num_rounds or 'NO'} communication rounds",
    )

    # Agents: all start from the same parameters, and what is random is keyed by (seed, agent)
    first = [agent.to(exchange.device) for agent in make_agents(args)]
    num_actions = first[0].actor.out_features
    exchange.broadcast_networks(first)
    agents = [copy.deepcopy(first[i]) for i in held]
    optimizers = [
        torch.optim.Adam(agent.parameters(), args.learning_rate, eps=1e-5, fused=True)
        for agent in agents
    ]
    generators = [torch.Generator().manual_seed(derive_seed(args.seed, i)) for i in held]
    last_returns = [deque(maxlen=100) for _ in held]

    # Communication: C, what was sent in the last round, how far policies are from each other
    public_states = collect_public_states(args).to(exchange.device) if num_rounds else None
    neighbours = communicators.find_neighbours(args)  # who may ever listen to whom
    compared = communicators.find_compared(neighbours)  # whose policies they compare
    inputs = communicators.find_inputs(args, make_communicator)
    sizes = [len(communicators.flatten(network)) for network in first]
    sent = [communicators.flatten(agent) for agent in agents]
    C = communicators.identity(n)  # [agents, agents]; before the first round nobody has sent
    distances = torch.full((n, n), torch.nan)
    round_returns = [[] for _ in held]  # since the last round
    mean_returns = torch.full((len(held),), torch.nan, dtype=torch.double)

    # Rewards are scaled by the deviation of the discounted returns of each agent
    return_statistics = [torch.zeros(3, dtype=torch.double) for _ in held]

    # Resume: what a checkpoint holds of each agent; the rest follows from the settings. These
    # objects are changed in place, as in `C[:] = ...`
    state = {
        "agent": agents,
        "optimizer": optimizers,
        "generator": generators,
        "last_returns": last_returns,
        "round_returns": round_returns,
        "mean_return": [*mean_returns],
        "return_statistics": return_statistics,
        "sent": sent,
        "row": [C[i] for i in held],
        "distances": [distances[i] for i in held],
    }
    run.restore(state)
    C[:] = exchange.all_gather(C[rows_held])
    distances[:] = exchange.all_gather(distances[rows_held])
    senders = communicators.find_senders(C, held)
    peers = communicators.load_networks(exchange.recall(sent, sizes), first, senders)
    envs = Envs(args, held, run.iteration)
    actors = Actors(agents)
    if args.eval_episodes and run.misses_evaluation():
        run.log_evaluation(evaluate_agents(args, agents, held))

    for iteration in run.iterations():
        remaining = 1.0 - (iteration - 1) / num_iterations
        kl_coef = args.kl_coef
        if args.kl_schedule == "linear":
            kl_coef = remaining * args.kl_coef

        # Rollout
        rollouts = rollout(args, actors, envs, generators)
        run.tick("rollout")

        batches = []  # kept for the round: `surrogate` reads them
        rows = []  # metrics
        for k, i in enumerate(held):
            if args.anneal_lr:
                optimizers[k].param_groups[0]["lr"] = remaining * args.learning_rate

            # Advantages
            data, episodes = rollouts[k]
            value_scale = scale_rewards(data, return_statistics[k])
            if args.gate == "value":  # critics are compared in rewards of the task
                agents[k].value_scale.fill_(value_scale)
            data["advantages"] = compute_advantages(data, args.gamma, args.gae_lambda)
            data["returns"] = data["advantages"] + data["values"]
            batch = make_batch(data)
            run.tick("advantages")

            # Reference policy, frozen for this update: row i of C applied to the policies
            batch["reference"], weights = compute_reference(i, agents[k], batch, peers, C, args)
            run.tick("reference")

            # Update
            losses = update(agents[k], optimizers[k], generators[k], batch, kl_coef, args)
            agents[k].update_statistics(batch["obs"])  # frozen until now
            run.tick("update")

            # Metrics: declared scalars
            returns = [episode_return for episode_return, _ in episodes]
            last_returns[k].extend(returns)
            round_returns[k].extend(returns)
            y_pred = batch["values"]
            y_true = batch["returns"]
            row = {
                "charts/episodic_return": mean(returns),
                "charts/episodic_length": mean([length for _, length in episodes]),
                "charts/episodes": len(episodes),
                "charts/return_last_100": mean(last_returns[k]),
                "losses/explained_variance": (1 - (y_true - y_pred).var() / y_true.var()).item(),
                **losses,
            }
            if args.gate != "none":
                row |= communicators.summarize_gate(C[i] > 0, weights)
            rows.append(row)
            batches.append(batch)

        # Communication round: exchange snapshots, refresh the communicator
        dropped = 0
        if iteration % args.local_updates == 0:
            communicators.update_means(mean_returns, round_returns)
            numbers = mean_returns if "returns" in inputs else None
            sent[:] = [communicators.flatten(agent) for agent in agents]
            received, reported_returns = exchange.round(sent, numbers, sizes)

            # Policies on the public states: whose snapshot is usable, who is similar to whom
            evaluated = communicators.find_senders(compared, held)
            networks = communicators.load_networks(received, first, evaluated)
            policies = compute_public_policies(networks, public_states, n, num_actions)
            usable = policies.flatten(1).isfinite().all(1)
            dropped = exchange.drop_reports(reported_returns, usable, evaluated)

            # The new communicator; each agent estimates its own row of gains
            gains = torch.full((n, n), torch.nan)
            if "gains" in inputs:
                for k, i in enumerate(held):
                    candidates = (neighbours[i] & usable).nonzero().flatten().tolist()
                    of_candidates = {j: networks[j] for j in candidates if j != i}
                    gains[i] = estimate_gains(i, batches[k], of_candidates, n)
            new_C = make_communicator(args, reported_returns, policies, gains, usable)
            new_distances = communicators.measure_gaussians(policies, compared, held)
            # Rows of agents held elsewhere may be wrong here: their gains and policies are unknown
            C[:] = exchange.all_gather(new_C[rows_held])
            distances[:] = exchange.all_gather(new_distances[rows_held])
            # Who reads whose snapshot: all neighbours' if C is computed from snapshots
            reads = C > 0
            if inputs & {"policies", "gains"}:
                reads = neighbours
            exchange.count_bytes(reads)
            senders = communicators.find_senders(C, held)
            peers = {j: networks[j] for j in senders if j in networks}
            del received, networks  # they need not stay in memory
        run.tick("exchange")

        scalars = {
            "charts/learning_rate": optimizers[0].param_groups[0]["lr"],
            "charts/kl_coefficient": kl_coef,
            "communication/rounds": iteration // args.local_updates,
            "communication/dropped": dropped,
        }
        run.log(rows, C, distances, scalars)

        # Evaluation
        if args.eval_episodes and run.evaluates():
            run.log_evaluation(evaluate_agents(args, agents, held))

        # Checkpoint. Every run starts its environments anew here, so that a resumed one is the same
        if run.saves():
            run.save(state)
            envs.close()
            envs = Envs(args, held, iteration)

    # Weights, and the final evaluation of every agent on every task
    envs.close()
    for k, i in enumerate(held):
        run.save_weights(f"agent_{i}", agents[k])
    if args.eval_episodes and not run.interrupted:
        run.log_evaluation(evaluate_agents(args, agents, held))
    return run.finish(
        env_backend=choose_backend(args),
        communication_rounds=run.iteration // args.local_updates,
    )


# --- tasks: environments ---


def list_env_ids(args: Args) -> list[str]:
    """The environment id of every agent."""
    return list(args.env_ids) or [args.env_id] * args.num_agents


def strip_module(env_id: str) -> str:
    """A task's name in logs and folders: its id without the module that registers it."""
    return env_id.rpartition(":")[2]


def name_tasks(args: Args) -> list[str]:
    """The name of every agent's task."""
    return [strip_module(env_id) for env_id in list_env_ids(args)]


@functools.cache
def import_mujoco() -> None:
    """Import MuJoCo, if it is there, without its warnings about gymnasium's models.

    It would write each to the terminal and to MUJOCO_LOG.TXT in the working directory.
    """

    def warn(message: str) -> None:
        if "deprecated" not in str(message):
            warnings.warn(str(message), stacklevel=2)

    if find_spec("mujoco"):
        importlib.import_module("mujoco").set_mju_user_warning(warn)


class CustomTask(gym.Wrapper):
    """A task of your own whose rewards are numbers, also those of shape (1,), and without info.

    Gymnasium's vector environments fail on other rewards, and on arrays in the info that differ in
    shape.
    """

    def reset(self, **options) -> tuple[np.ndarray, dict]:
        """Like the task's."""
        obs, _ = self.env.reset(**options)
        return obs, {}

    def step(self, action: np.ndarray) -> tuple:
        """Like the task's."""
        obs, reward, terminated, truncated, _ = self.env.step(action)
        return obs, np.asarray(reward).item(), terminated, truncated, {}


# Steps after which an episode of your own task ends that has no time limit
LONGEST_EPISODE = 1000


def make_env(env_id: str, **options) -> gym.Env:
    """One environment of gymnasium, or one of your own, as module:id.

    One of your own that has no time limit gets one, because an evaluation plays whole episodes.
    options: of gym.make; one of your own may not know them.
    """
    import_mujoco()
    env = gym.make(env_id, disable_env_checker=True, **options)
    if ":" in env_id:
        env = CustomTask(env)
        if env.spec.max_episode_steps is None:
            env = gym.wrappers.TimeLimit(env, LONGEST_EPISODE)
    return env


# Tasks of envpool whose dynamics, returns and ends a test compares with gymnasium's
ENVPOOL_IDS = {"HalfCheetah-v5", "Hopper-v5", "Walker2d-v5"}


def choose_backend(args: Args) -> str:
    """The environment backend that this run uses."""
    if args.env_backend != "auto":
        return args.env_backend
    if not find_spec("envpool"):
        return "gymnasium"
    return "envpool" if set(list_env_ids(args)) <= ENVPOOL_IDS else "gymnasium"


class Envs:
    """The environments of some agents: arrays are [agents, envs, ...].

    Each environment starts anew in the step *after* its episode's end; that step ignores the action
    and is not valid. Seeds are keyed by (seed, agent, environment, checkpoint), so that nothing
    depends on which process holds which agent.
    """

    def __init__(self, args: Args, agents: range, checkpoint: int):
        shape = len(agents), args.num_envs
        self.envpool = choose_backend(args) == "envpool"
        env = make_env(list_env_ids(args)[0])
        self.obs = np.zeros((*shape, *env.observation_space.shape), np.float32)  # the latest
        env.close()
        self.ended = np.zeros(shape, dtype=bool)
        self.returns = np.zeros(shape)
        self.gamma = args.gamma
        self.discounted_returns = np.zeros(shape)  # of the episodes so far, which scale rewards
        self.lengths = np.zeros(shape)
        self.pools = []  # (pool, its rows, the bounds of its actions)
        # One large pool is faster than many small ones: one for all agents of a task
        for env_id, members in itertools.groupby(agents, key=list_env_ids(args).__getitem__):
            members = list(members)
            rows = slice(members[0] - agents.start, members[-1] + 1 - agents.start)
            owners = list(itertools.product(members, range(args.num_envs)))
            seeds = [derive_seed(args.seed, *owner, checkpoint, ENVIRONMENTS) for owner in owners]
            if self.envpool:
                make = importlib.import_module("envpool").make
                # Its first reset warns about the precision of bounds that nothing here reads
                with warnings.catch_warnings(action="ignore"):
                    pool = make(env_id, env_type="gymnasium", num_envs=len(seeds), seed=seeds)
                    obs = pool.reset()[0]
            else:
                thunks = [functools.partial(make_env, env_id)] * len(seeds)
                pool = SyncVectorEnv(thunks, copy=False, autoreset_mode=AutoresetMode.NEXT_STEP)
                obs = pool.reset(seed=seeds)[0]
            self.obs[rows] = obs.reshape(self.obs[rows].shape)
            env = make_env(env_id)
            self.pools.append((pool, rows, env.action_space))
            env.close()

    def step(self, actions: np.ndarray) -> tuple:
        """Step all environments, actions [agents, envs, actions], which are clipped to the bounds.

        Returns rewards, terminations, truncations, valid, [agents, envs] each, and the episodes
        that ended: [(k, return, length)].
        """
        rewards = np.zeros(self.ended.shape)
        terminations = np.zeros(self.ended.shape, dtype=bool)
        truncations = np.zeros(self.ended.shape, dtype=bool)
        for pool, rows, bounds in self.pools:
            clipped = actions[rows].clip(bounds.low, bounds.high)
            obs, *signals, _ = pool.step(clipped.reshape(-1, *bounds.shape))
            self.obs[rows] = obs.reshape(self.obs[rows].shape)
            signals = [signal.reshape(self.ended[rows].shape) for signal in signals]
            rewards[rows], terminations[rows], truncations[rows] = signals
        valid = ~self.ended
        self.discounted_returns[self.ended] = 0.0  # a NaN, too, ends with its episode
        self.discounted_returns = self.gamma * self.discounted_returns + rewards
        self.ended = terminations | truncations
        self.returns += rewards
        self.lengths += valid
        ended = []
        for k, e in np.argwhere(self.ended):
            ended.append((k, self.returns[k, e], self.lengths[k, e]))
        self.returns[self.ended] = 0.0
        self.lengths[self.ended] = 0.0
        return rewards, terminations, truncations, valid, ended

    def close(self) -> None:
        """Free the environments."""
        for pool, *_ in self.pools:
            pool.close()


def collect_public_states(args: Args, num_steps: int = 64, num_envs: int = 8) -> Tensor:
    """S_ref of Example 3: what a fixed-seed random policy sees in gymnasium's environments.

    Every agent can regenerate these states alone, so using them reveals nothing. Returns
    [states, obs].
    """
    states = []
    generator = np.random.default_rng(0)
    for env_id in sorted(set(list_env_ids(args))):
        envs = SyncVectorEnv([functools.partial(make_env, env_id)] * num_envs)
        bounds = envs.action_space
        obs, _ = envs.reset(seed=list(range(num_envs)))
        for _ in range(num_steps):
            states.append(obs)
            actions = generator.uniform(bounds.low, bounds.high)
            obs, *_ = envs.step(actions.astype(bounds.dtype))
        envs.close()
    return torch.as_tensor(np.concatenate(states), dtype=torch.float32)


# --- evaluation ---


def evaluate(
    args: Args,
    agent: Agent,
    env_id: str,
    levels: list[int],
    seed: int,
    greedy: bool = False,
    watch: Callable | None = None,
) -> np.ndarray:
    """One episode in gymnasium's environment for each level, a seed: their returns [levels].

    Actions are sampled, or the policy's means (greedy). watch: receives the first environment
    after its reset and after each step, to draw it. An agent that has diverged has no return: NaN.
    """
    if not all(parameter.isfinite().all() for parameter in agent.parameters()):
        return np.full(len(levels), np.nan)
    options = {"render_mode": "rgb_array"} if watch else {}
    envs = [make_env(env_id, **options) for _ in levels]
    obs = [env.reset(seed=level)[0] for env, level in zip(envs, levels, strict=True)]
    if watch:
        watch(envs[0])
    returns = np.zeros(len(envs))
    running = list(range(len(envs)))
    generator = torch.Generator().manual_seed(seed)
    device = agent.actor.weight.device
    while running:
        batch = torch.as_tensor(np.stack([obs[k] for k in running]), dtype=torch.float32)
        actions = agent.predict(batch.to(device))[0].cpu()
        if not greedy:
            noise = torch.randn(actions.shape, generator=generator)
            actions = actions + agent.actor_log_std.detach().exp().cpu() * noise
        if not actions.isfinite().all():  # finite parameters can overflow
            return np.full(len(levels), np.nan)
        for k, action in zip(list(running), actions.numpy(), strict=True):
            bounds = envs[k].action_space
            obs[k], reward, terminated, truncated, _ = envs[k].step(
                action.clip(bounds.low, bounds.high)
            )
            returns[k] += reward
            if watch and k == 0:
                watch(envs[0])
            if terminated or truncated:
                running.remove(k)
                envs[k].close()
    return returns


def list_tests(args: Args) -> list[str]:
    """The environment ids that every agent is evaluated on: those of all agents, and the others."""
    return list(dict.fromkeys([*list_env_ids(args), *args.eval_env_ids]))


def list_test_levels(args: Args) -> list[int]:
    """The seeds of the levels of an evaluation, the same on every task."""
    return [derive_seed(args.seed, level, TEST_LEVELS) for level in range(args.eval_episodes)]


def evaluate_agents(args: Args, agents: list[Agent], held: range) -> Iterator[dict]:
    """Evaluate every agent on every task: yields of each agent held {task: {column: [episodes]}}.

    Sampled actions are what agents train with; the policy's means are played on the same levels.
    """
    levels = list_test_levels(args)
    for agent, i in zip(agents, held, strict=True):
        columns = {}
        for number, env_id in enumerate(list_tests(args)):
            seed = derive_seed(args.seed, i, number, TEST_ACTIONS)
            columns[strip_module(env_id)] = {
                "return": evaluate(args, agent, env_id, levels, seed),
                "greedy_return": evaluate(args, agent, env_id, levels, seed, greedy=True),
            }
        yield columns


# --- checks of arguments ---


def check_args(args: Args) -> None:
    """What types cannot express. `refuse` ends with one line: flag, value and what is valid."""
    check_task(args)
    communicators.check_communicator(args, make_communicator, has_influence=args.kl_coef > 0)


def check_task(args: TaskArgs) -> None:
    """What types cannot express of the flags of every script on MuJoCo."""
    if args.device == "auto":
        args.device = "cpu"
    n = args.num_agents
    batch_size = args.num_envs * args.num_steps
    if args.num_steps < 2:
        valid = "must be at least 2: a step that only starts an episode is no sample"
        refuse(args, "num_steps", valid)
    if batch_size % args.num_minibatches:
        refuse(args, "num_minibatches", f"must divide num_envs * num_steps = {batch_size}")
    if args.total_timesteps < batch_size:
        refuse(args, "total_timesteps", f"must be at least one rollout, {batch_size} steps")
    if len(args.env_ids) not in (0, n):
        refuse(args, "env_ids", f"must name one task for each of {n} agents")
    if len(args.hidden_sizes) not in (0, n) or min(args.hidden_sizes, default=1) < 1:
        refuse(args, "hidden_sizes", f"must be {n} widths of at least 1")
    check_envs(args)


def check_envs(args: Args) -> None:
    """Every task can be made, is continuous, has the sizes of the others, is in the backend."""
    sizes = {}  # of observations and actions -> a task
    for env_id in list_tests(args):
        flag = "env_ids" if args.env_ids else "env_id"
        if env_id not in list_env_ids(args):
            flag = "eval_env_ids"
        try:
            env = make_env(env_id)
            problem = find_env_problem(args, env, env_id)
        except Exception as error:  # unknown, maybe with a suggestion, or a package is missing
            problem = f"cannot be used: {communicators.first_line(error)}"
        if problem:
            problem = problem.partition("\n")[0]  # a space with many bounds has several lines
            valid = "must be a MuJoCo task, or another with continuous actions, as module:id"
            refuse(args, flag, f"{valid}; {env_id} {problem}")
        sizes[env.observation_space.shape + env.action_space.shape] = env_id
        env.close()
        if len(sizes) > 1:
            shapes = ", ".join(
                f"{name} {obs} and {actions}" for (obs, actions), name in sizes.items()
            )
            valid = "need the same numbers of observations and actions, not"
            refuse(args, flag, f"{valid} {shapes}")
    if args.env_backend == "envpool":
        if not find_spec("envpool"):
            refuse(args, "env_backend", "envpool is not installed")
        unknown = set(list_env_ids(args)) - ENVPOOL_IDS
        if unknown:
            valid = f"has no usable {', '.join(unknown)}; choose auto or gymnasium"
            refuse(args, "env_backend", valid)
    args.env_backend = choose_backend(args)  # the settings say which


def find_env_problem(args: Args, env: gym.Env, env_id: str) -> str:
    """What makes an environment unusable here, nothing ("") if it is not."""
    space = env.observation_space
    name = strip_module(env_id)
    if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
        return f"shows no list of numbers, but {space}"
    bounds = env.action_space
    is_list = isinstance(bounds, gym.spaces.Box) and len(bounds.shape) == 1
    if not is_list or bounds.dtype.kind != "f":
        return f"has no list of continuous actions, but {bounds}"
    if not (np.isfinite(bounds.low).all() and np.isfinite(bounds.high).all()):
        return f"has actions without bounds: {bounds}"
    if env.spec.id != name:  # envpool knows full names only
        return f"is {env.spec.id}"
    if len({other for other in list_tests(args) if strip_module(other) == name}) > 1:
        # The second module replaced what the first had registered
        return "has the name of another task here"
    first_obs, _ = env.reset(seed=0)
    next_obs, reward, *_ = env.step(bounds.low)
    for obs in (first_obs, next_obs):
        if np.shape(obs) != space.shape:
            return f"shows {np.shape(obs)} numbers, not {space.shape}"
    float(reward)  # an error is a problem, too
    return ""


if __name__ == "__main__":
    may_change = ("eval_episodes", "total_timesteps")
    main(communicators.parse_args(Args, check_args, may_change=may_change))
