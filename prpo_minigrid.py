"""PR-PPO on MiniGrid: agents that share no data learn together through their KL penalty.

Eq. 4 of the PRPO paper, by default with the reverse KL (--kl-direction forward: the paper's):

    maximise  E[clipped surrogate] - kl_coef E[KL],  KL of agent i's policy and its reference
    reference = C_i pi = sum_j C[i, j] pi_j          frozen for an update; C is new in every round

Each agent trains on its own environments. What leaves it: its parameters in a round, its mean
return where C depends on it, its row of C, its distances to peers, and metrics; never an
observation, an action or a reward of a step.

    python prpo_minigrid.py                                      # three agents in one process
    python prpo_minigrid.py --communicator identity              # the same agents, isolated
    torchrun --nproc-per-node 3 prpo_minigrid.py                 # one agent per process
    python prpo_minigrid.py --resume runs/<name>                 # continue an interrupted run
"""

import contextlib
import copy
import functools
import importlib
import io
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Literal

import gymnasium as gym
import minigrid.wrappers
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
    """The flags of every script on MiniGrid: environments, rollout, advantages."""

    device: str = "auto"
    """cpu, cuda, cuda:N, or auto: the CPU, because each distinct observation is evaluated once"""

    # The environments
    env_id: str = "MiniGrid-DoorKey-6x6-v0"
    """the task of all agents; write one of your own as module:id"""
    env_ids: tuple[str, ...] = ()  # one task per agent, instead of --env-id
    eval_env_ids: tuple[str, ...] = ()
    """further tasks, such as unseen levels, that every agent is evaluated on"""
    env_backend: Literal["auto", "envpool", "gymnasium"] = "auto"
    """envpool is faster; auto takes it where it is installed and knows the task"""
    num_envs: Count = 4  # parallel environments per agent
    # width of each agent's hidden layer, a multiple of 8, with its convolutions in
    # proportion (default: 128 for all)
    hidden_sizes: tuple[int, ...] = ()
    eval_episodes: Natural = 100
    """episodes per agent and task of an evaluation, in the official environment (0: none)"""

    # Rollout and advantages
    total_timesteps: Count = 250_000  # environment steps of each agent
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
    kl_direction: Literal["forward", "reverse"] = "reverse"
    """forward: KL(reference || policy), eq. 4; reverse: KL(policy || reference), mirror descent"""
    kl_coef: Annotated[NonNegative, tyro.conf.arg(aliases=["--communication-coef"])] = 0.5
    """coefficient of the KL penalty towards the reference (without peers: the old policy)"""
    kl_schedule: Literal["constant", "linear"] = "constant"
    """linear: the coefficient falls to 0 over the run"""

    # Update
    learning_rate: Positive = 1e-3  # learning rate of Adam
    anneal_lr: bool = True  # anneal the learning rate linearly to 0
    update_epochs: Count = 4  # epochs per rollout
    num_minibatches: Count = 4  # minibatches per epoch
    norm_adv: bool = True  # normalise advantages in each minibatch
    clip_coef: NonNegative = 0.1  # clip range of the surrogate objective (0: no clipping)
    clip_vloss: bool = True  # clip the value loss with the same range
    ent_coef: NonNegative = 0.01  # coefficient of the entropy bonus
    vf_coef: NonNegative = 0.5  # coefficient of the value loss
    max_grad_norm: Positive = 0.5  # maximum norm of each agent's gradient

    # Communication round
    local_updates: Count = 4  # iterations between communication rounds


# --- observations and network: what another kind of observation changes ---

# What an environment shows, and `Agent` reads: MiniGrid's codes of object, colour and state
OBSERVATIONS = gym.spaces.Box(0, 255, (7, 7, 3), np.uint8)


def show_observations(env: gym.Env) -> gym.Env:
    """`env`, showing `OBSERVATIONS`: its image, without direction and mission."""
    if isinstance(env.observation_space, gym.spaces.Dict):
        env = minigrid.wrappers.ImgObsWrapper(env)
    return env


def layer_init(layer: nn.Module, std: float = np.sqrt(2)) -> nn.Module:
    """Orthogonal weights of gain `std`, zero bias."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Policy and value function, with a common trunk.

    Both are functions of one observation: `PolicyTable` and `update` evaluate each distinct one
    once.
    """

    def __init__(self, num_actions: int, hidden: int = 128):
        super().__init__()
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(3, hidden // 8, 2)),
            nn.Tanh(),
            layer_init(nn.Conv2d(hidden // 8, hidden // 4, 2)),
            nn.Tanh(),
            layer_init(nn.Conv2d(hidden // 4, hidden // 2, 2)),
            nn.Tanh(),
            nn.Flatten(),
            layer_init(nn.Linear(hidden // 2 * 4 * 4, hidden)),
            nn.Tanh(),
        )
        self.actor = layer_init(nn.Linear(hidden, num_actions), std=0.01)
        self.critic = layer_init(nn.Linear(hidden, 1), std=1)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """obs: [batch, 7, 7, 3] uint8. Returns (logits [batch, actions], value [batch])."""
        hidden = self.network(obs.permute(0, 3, 1, 2).float().contiguous())
        return self.actor(hidden), self.critic(hidden).squeeze(-1)

    @torch.no_grad()
    def predict(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """`forward` for many states, without gradient."""
        return self(obs)


def make_agents(args: Args) -> list[Agent]:
    """Every agent's network at the start, equal ones for agents of equal size."""
    num_actions = int(make_env(list_env_ids(args)[0]).action_space.n)
    agents = []
    for size in args.hidden_sizes or [128] * args.num_agents:
        torch.manual_seed(args.seed)
        agents.append(Agent(num_actions, size))
    return agents


# --- PR-PPO ---


class PolicyTable:
    """A policy while it does not change: the logits of each distinct observation once.

    MiniGrid shows few: of the 2,048 observations of a rollout some 4 to 16 % are distinct, and half
    of these were met in the rollouts before. This is three times as fast as calling the agent in
    every step.
    """

    def __init__(self, agent: Agent):
        self.agent = agent
        self.logits = {}  # an observation, as bytes -> [actions]
        self.met = deque(maxlen=8)  # the distinct observations of as many rollouts

    def renew(self) -> None:
        """After an update: compute what the last rollouts met, all at once, and forget the rest."""
        self.logits = {}
        met = dict.fromkeys(itertools.chain(*self.met))
        if met:
            self.add(list(met))

    def add(self, keys: list[bytes]) -> None:
        """Compute the logits of these observations."""
        logits, _ = self.agent.predict(self.decode(keys))
        self.logits.update(zip(keys, logits.cpu().numpy(), strict=True))

    def look_up(self, keys: list[bytes]) -> np.ndarray:
        """The logits of these observations, [keys, actions]."""
        missing = [key for key in dict.fromkeys(keys) if key not in self.logits]
        if missing:
            self.add(missing)
        return np.array([self.logits[key] for key in keys])

    def decode(self, keys: list[bytes]) -> Tensor:
        """The observations with these bytes, [keys, ...], on the agent's device."""
        obs = np.frombuffer(bytearray(b"".join(keys)), OBSERVATIONS.dtype)
        obs = torch.from_numpy(obs.reshape(-1, *OBSERVATIONS.shape))
        return obs.to(self.agent.actor.weight.device)


def rollout(
    args: Args, tables: list[PolicyTable], envs: "Envs", generators: list[torch.Generator]
) -> list[tuple[dict[str, Tensor], list[tuple[float, float]]]]:
    """All agents play num_steps in their environments, from where they stand.

    Returns of each agent data and the episodes that ended, [(return, length)]. data: its distinct
    observations, `obs` [states, ...], the policy's log-probabilities there, `policy`
    [states, actions], and values, `state_values` [states]; the rest is [steps, envs]. `obs_inds`
    are rows of obs: obs[obs_inds] is what each step showed.
    """
    shape = len(tables), args.num_steps, args.num_envs
    keys = [[] for _ in tables]  # of the observations before each step, and after the last one
    actions = np.zeros(shape, dtype=int)
    rewards = np.zeros(shape, dtype=np.float32)
    terminations = np.zeros(shape, dtype=bool)
    truncations = np.zeros(shape, dtype=bool)
    valid = np.zeros(shape, dtype=bool)
    episodes = [[] for _ in tables]

    # The largest of logits plus Gumbel noise is a sample of their softmax
    gumbel = []
    for table, generator in zip(tables, generators, strict=True):
        noise = torch.empty(*shape[1:], table.agent.actor.out_features)
        gumbel.append(-noise.exponential_(generator=generator).log().numpy())
        table.renew()

    for step in range(args.num_steps):
        now = slice(None), step
        for k, table in enumerate(tables):
            next_keys = [obs.tobytes() for obs in envs.obs[k]]
            keys[k] += next_keys
            actions[k, step] = (table.look_up(next_keys) + gumbel[k][step]).argmax(-1)
        *signals, ended = envs.step(actions[now])
        rewards[now], terminations[now], truncations[now], valid[now] = signals
        for k, episode_return, length in ended:
            episodes[k].append((float(episode_return), float(length)))

    # Values and log-probabilities, once for each distinct observation
    rollouts = []
    for k, table in enumerate(tables):
        keys[k] += [obs.tobytes() for obs in envs.obs[k]]
        rows = {key: row for row, key in enumerate(dict.fromkeys(keys[k]))}
        table.met.append(list(rows))
        obs = table.decode(list(rows))
        logits, value = table.agent.predict(obs)
        policy = logits.log_softmax(-1)
        device = obs.device
        obs_inds = torch.tensor([rows[key] for key in keys[k]], device=device)
        obs_inds = obs_inds.view(-1, args.num_envs)  # [steps + 1, envs]
        agent_actions = torch.from_numpy(actions[k]).to(device)
        data = {
            "obs": obs,
            "policy": policy,
            "state_values": value,
            "obs_inds": obs_inds[:-1],
            "actions": agent_actions,
            "logprobs": policy[obs_inds[:-1], agent_actions],
            "values": value[obs_inds[:-1]],
            # After an episode's end the next observation is its final one: its value bootstraps
            "next_values": value[obs_inds[1:]],
            "rewards": torch.from_numpy(rewards[k]).to(device),
            "terminations": torch.from_numpy(terminations[k]).to(device),
            "dones": torch.from_numpy(terminations[k] | truncations[k]).to(device),
            "valid": torch.from_numpy(valid[k]).to(device),
        }
        rollouts.append((data, episodes[k]))
    return rollouts


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

    Returns obs and policy as in `data`, and the rest as [samples].
    """
    batch = {name: data[name] for name in ("obs", "policy", "state_values")}
    for name in ("obs_inds", "actions", "logprobs", "values", "advantages", "returns"):
        batch[name] = data[name][data["valid"]]
    return batch


def compute_reference(
    i: int, batch: dict[str, Tensor], peers: dict[int, Agent], C: Tensor, args: Args
) -> tuple[Tensor, Tensor]:
    """Agent i's reference policy C_i pi on its own states: row i of C applied to the policies.

    peers: agent -> network, of the senders of positive weight; where an agent's own is missing, its
    present policy is its part. Returns log-probabilities [states, actions], frozen for the update,
    and the senders' weights: [senders], with --gate [senders, states].
    """
    senders = C[i].nonzero().flatten().tolist()  # never a peer of weight 0
    policies = []
    values = []
    for j in senders:
        if j == i and (args.self_reference == "behaviour" or i not in peers):
            policies.append(batch["policy"])
            values.append(batch["state_values"])
        else:
            logits, value = peers[j].predict(batch["obs"])
            policies.append(logits.log_softmax(-1))
            values.append(value)
    # A log-probability of -1e38 is finite, the gradient towards it is not
    policies = torch.stack(policies).clamp(min=communicators.LOWEST_LOG_PROB)
    # The agent's own policy is the reference where no sender's is a number
    unknown = policies[..., 0].isnan()
    policies = torch.where(unknown.all(0)[:, None], batch["policy"], policies)
    weights = C[i, senders].to(policies.device)
    if args.gate == "value":
        # A policy that is NaN in a state has no vote in any, whatever its critic promises
        values = torch.stack(values).masked_fill(unknown, torch.nan)
        visited = batch["obs_inds"]
        weights = communicators.gate_by_value(weights, values, batch["returns"], visited)
    return communicators.mix_log_probs(policies, weights, args.mixture), weights


def update(
    agent: Agent,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
    batch: dict[str, Tensor],
    kl_coef: float,
    args: Args,
) -> dict[str, float]:
    """PPO's epochs over an agent's rollout, with the KL penalty of eq. 4. Returns mean losses.

    batch: of `make_batch`, and the reference policy's log-probabilities, `reference`
    [states, actions].
    """
    losses = []
    for _ in range(args.update_epochs):
        b_inds = torch.randperm(len(batch["obs_inds"]), generator=generator)
        b_inds = b_inds.to(batch["obs"].device)
        for mb_inds in b_inds.tensor_split(args.num_minibatches):
            if len(mb_inds) == 0:
                continue
            # Each distinct observation is evaluated once; loss and gradient stay the same
            states, inverse = batch["obs_inds"][mb_inds].unique(return_inverse=True)
            logits, value = agent(batch["obs"][states])
            newlogprobs = logits.log_softmax(-1).index_select(0, inverse)  # [minibatch, actions]
            newvalue = value.index_select(0, inverse)
            newlogprob = newlogprobs.gather(-1, batch["actions"][mb_inds, None]).squeeze(-1)
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
            entropy = -(newlogprobs.exp() * newlogprobs).sum(-1).mean()

            # Distance to the reference policy, exact over the action set: the peers' influence
            reference = batch["reference"][batch["obs_inds"][mb_inds]]
            kl_reference = communicators.kl_to_reference(newlogprobs, reference, args.kl_direction)
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


def make_communicator(args: Args, returns=None, log_probs=None, gains=None, usable=None) -> Tensor:
    """The matrix C of a round, [agents, agents]: row i, on the simplex, weights agent i's peers.

    returns [agents]: reported means; log_probs [agents, states, actions]: on the public states;
    gains [agents, agents]: see `estimate_gains`; usable, bool [agents]: whose snapshot is usable.
    Another communicator is another branch.
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
        C = communicators.similarity(log_probs)
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
        logits, _ = peer.predict(batch["obs"])
        log_probs = logits.log_softmax(-1)[batch["obs_inds"], batch["actions"]]  # [samples]
        gains[j] = communicators.surrogate_gains(log_probs, batch["logprobs"], batch["advantages"])
    gains[i] = 0.0  # of the policy of the rollout, which the others are compared with
    return gains


def compute_public_log_probs(
    networks: dict[int, Agent], states: Tensor, num_agents: int, num_actions: int
) -> Tensor:
    """The log-probabilities of snapshots on the public states, [agents, states, actions].

    networks: agent -> network. NaN for an agent without one, and for one whose log-probabilities,
    or squares of values, are not finite: finite parameters can overflow.
    """
    log_probs = torch.full((num_agents, len(states), num_actions), torch.nan)
    overflowing = []
    for j, network in networks.items():
        logits, values = network.predict(states)
        policy = logits.log_softmax(-1)
        if policy.isfinite().all() and values.square().isfinite().all():
            log_probs[j] = policy.cpu()
        else:
            overflowing.append(j)
    if overflowing:
        problem = "their policies or values are not finite, or too large"
        communicators.announce(f"\ndropped agents {overflowing} for this round: {problem}")
    return log_probs


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

    # Resume: what a checkpoint holds of each agent; the rest follows from the settings. These
    # objects are changed in place, as in `C[:] = ...`
    state = {
        "agent": agents,
        "optimizer": optimizers,
        "generator": generators,
        "last_returns": last_returns,
        "round_returns": round_returns,
        "mean_return": [*mean_returns],
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
    tables = [PolicyTable(agent) for agent in agents]
    if args.eval_episodes and run.misses_evaluation():
        run.log_evaluation(evaluate_agents(args, agents, held))

    for iteration in run.iterations():
        remaining = 1.0 - (iteration - 1) / num_iterations
        kl_coef = args.kl_coef
        if args.kl_schedule == "linear":
            kl_coef = remaining * args.kl_coef

        # Rollout
        rollouts = rollout(args, tables, envs, generators)
        run.tick("rollout")

        batches = []  # kept for the round: `surrogate` reads them
        rows = []  # metrics
        for k, i in enumerate(held):
            if args.anneal_lr:
                optimizers[k].param_groups[0]["lr"] = remaining * args.learning_rate

            # Advantages
            data, episodes = rollouts[k]
            data["advantages"] = compute_advantages(data, args.gamma, args.gae_lambda)
            data["returns"] = data["advantages"] + data["values"]
            batch = make_batch(data)
            run.tick("advantages")

            # Reference policy, frozen for this update: row i of C applied to the policies
            batch["reference"], weights = compute_reference(i, batch, peers, C, args)
            run.tick("reference")

            # Update
            losses = update(agents[k], optimizers[k], generators[k], batch, kl_coef, args)
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
                row |= communicators.summarize_gate(C[i] > 0, weights[:, batch["obs_inds"]])
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
            log_probs = compute_public_log_probs(networks, public_states, n, num_actions)
            usable = log_probs.flatten(1).isfinite().all(1)
            dropped = exchange.drop_reports(reported_returns, usable, evaluated)

            # The new communicator; each agent estimates its own row of gains
            gains = torch.full((n, n), torch.nan)
            if "gains" in inputs:
                for k, i in enumerate(held):
                    candidates = (neighbours[i] & usable).nonzero().flatten().tolist()
                    of_candidates = {j: networks[j] for j in candidates if j != i}
                    gains[i] = estimate_gains(i, batches[k], of_candidates, n)
            new_C = make_communicator(args, reported_returns, log_probs, gains, usable)
            new_distances = communicators.measure_distances(log_probs, compared, held)
            # Rows of agents held elsewhere may be wrong here: their gains and policies are unknown
            C[:] = exchange.all_gather(new_C[rows_held])
            distances[:] = exchange.all_gather(new_distances[rows_held])
            # Who reads whose snapshot: all neighbours' if C is computed from snapshots
            reads = C > 0
            if inputs & {"log_probs", "gains"}:
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
            tables = [PolicyTable(agent) for agent in agents]

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


class CustomTask(gym.Wrapper):
    """A task of your own whose rewards are numbers, also those of shape (1,), and without info.

    Gymnasium's vector environments fail on other rewards, and on arrays in the info that differ in
    shape.
    """

    def reset(self, **options) -> tuple[np.ndarray, dict]:
        """Like the task's."""
        obs, _ = self.env.reset(**options)
        return obs, {}

    def step(self, action: int) -> tuple:
        """Like the task's."""
        obs, reward, terminated, truncated, _ = self.env.step(action)
        return obs, np.asarray(reward).item(), terminated, truncated, {}


class QuietTask(gym.Wrapper):
    """A level of BabyAI, which prints the layouts that it rejects."""

    def reset(self, **options) -> tuple[dict, dict]:
        """Like the task's."""
        with contextlib.redirect_stdout(io.StringIO()):
            return self.env.reset(**options)


# Steps after which an episode of your own task ends that has no time limit; by default fewer than
# between checkpoints, at which environments start anew
LONGEST_EPISODE = 10_000


def make_env(env_id: str, **options) -> gym.Env:
    """One environment of the official package, showing its image only: [7, 7, 3] uint8 codes.

    Or one of your own, as module:id, which may show just that image. One that has no time limit
    gets one, because an evaluation plays whole episodes.
    options: of gym.make; one of your own may not know them.
    """
    env = gym.make(env_id, disable_env_checker=True, **options)
    if env_id.startswith("BabyAI-"):
        env = QuietTask(env)
    if ":" in env_id:
        env = CustomTask(env)
        if env.spec.max_episode_steps is None:
            env = gym.wrappers.TimeLimit(env, LONGEST_EPISODE)
    return show_observations(env)


# Tasks that differ in envpool 1.2.5: some doors lead into walls, boxes have another colour, doors
# are locked
UNLIKE_MINIGRID = ("MultiRoom", "ObstructedMaze", "ActionObjDoor")


def list_envpool_ids() -> set[str]:
    """MiniGrid's in envpool, but those that differ there."""
    names = importlib.import_module("envpool").list_all_envs()
    names = {name for name in names if name.startswith(("MiniGrid-", "BabyAI-"))}
    return {name for name in names if not any(word in name for word in UNLIKE_MINIGRID)}


def choose_backend(args: Args) -> str:
    """The environment backend that this run uses."""
    if args.env_backend != "auto":
        return args.env_backend
    if not find_spec("envpool"):
        return "gymnasium"
    return "envpool" if set(list_env_ids(args)) <= list_envpool_ids() else "gymnasium"


class Envs:
    """The environments of some agents: arrays are [agents, envs, ...].

    Each environment starts anew in the step *after* its episode's end; that step ignores the action
    and is not valid. Seeds are keyed by (seed, agent, environment, checkpoint), so that nothing
    depends on which process holds which agent.
    """

    def __init__(self, args: Args, agents: range, checkpoint: int):
        shape = len(agents), args.num_envs
        self.envpool = choose_backend(args) == "envpool"
        self.obs = np.zeros((*shape, *OBSERVATIONS.shape), OBSERVATIONS.dtype)  # the latest
        self.ended = np.zeros(shape, dtype=bool)
        self.returns = np.zeros(shape)
        self.lengths = np.zeros(shape)
        self.pools = []  # (pool, its rows)
        # One large pool is faster than many small ones: one for all agents of a task
        for env_id, members in itertools.groupby(agents, key=list_env_ids(args).__getitem__):
            members = list(members)
            rows = slice(members[0] - agents.start, members[-1] + 1 - agents.start)
            owners = list(itertools.product(members, range(args.num_envs)))
            seeds = [derive_seed(args.seed, *owner, checkpoint, ENVIRONMENTS) for owner in owners]
            if self.envpool:
                make = importlib.import_module("envpool").make
                pool = make(env_id, env_type="gymnasium", num_envs=len(seeds), seed=seeds)
                obs = pool.reset()[0]["image"]
            else:
                thunks = [functools.partial(make_env, env_id)] * len(seeds)
                pool = SyncVectorEnv(thunks, copy=False, autoreset_mode=AutoresetMode.NEXT_STEP)
                obs = pool.reset(seed=seeds)[0]
            self.obs[rows] = obs.reshape(self.obs[rows].shape)
            self.pools.append((pool, rows))

    def step(self, actions: np.ndarray) -> tuple:
        """Step all environments, actions [agents, envs].

        Returns rewards, terminations, truncations, valid, [agents, envs] each, and the episodes
        that ended: [(k, return, length)].
        """
        rewards = np.zeros(actions.shape)
        terminations = np.zeros(actions.shape, dtype=bool)
        truncations = np.zeros(actions.shape, dtype=bool)
        for pool, rows in self.pools:
            moves = actions[rows].ravel()
            if not self.envpool:  # MiniGrid's own step is twice as fast with Python's integers
                moves = moves.tolist()
            obs, *signals, _ = pool.step(moves)
            if self.envpool:
                obs = obs["image"]
            self.obs[rows] = obs.reshape(self.obs[rows].shape)
            signals = [signal.reshape(actions[rows].shape) for signal in signals]
            rewards[rows], terminations[rows], truncations[rows] = signals
        if self.envpool:  # a goal on the last allowed step, which it reports as a truncation
            terminations = terminations | (truncations & (rewards != 0))
        valid = ~self.ended
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
        for pool, _ in self.pools:
            pool.close()


def collect_public_states(args: Args, num_steps: int = 64, num_envs: int = 8) -> Tensor:
    """S_ref of Example 3: what a fixed-seed random policy sees in the official environments.

    Every agent can regenerate these states alone, so using them reveals nothing. Returns
    [states, 7, 7, 3] uint8.
    """
    states = []
    generator = np.random.default_rng(0)
    for env_id in sorted(set(list_env_ids(args))):
        envs = SyncVectorEnv([functools.partial(make_env, env_id)] * num_envs)
        num_actions = envs.single_action_space.n
        obs, _ = envs.reset(seed=list(range(num_envs)))
        for _ in range(num_steps):
            states.append(obs)
            obs, *_ = envs.step(generator.integers(num_actions, size=num_envs))
        envs.close()
    return torch.as_tensor(np.concatenate(states))


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
    """One episode in the official environment for each level, a seed: their returns [levels].

    Actions are sampled, or the most probable ones (greedy). watch: receives the first environment
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
    table = PolicyTable(agent)
    while running:
        logits = torch.from_numpy(table.look_up([obs[k].tobytes() for k in running]))
        probs = logits.softmax(-1)
        if probs.isnan().any():  # finite parameters can overflow
            return np.full(len(levels), np.nan)
        if greedy:
            actions = logits.argmax(-1)
        else:
            actions = torch.multinomial(probs, 1, generator=generator)[:, 0]
        for k, action in zip(list(running), actions.tolist(), strict=True):
            obs[k], reward, terminated, truncated, _ = envs[k].step(action)
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

    Sampled actions are what agents train with; the most probable ones are played on the same
    levels.
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
    """What types cannot express of the flags of every script on MiniGrid."""
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
    if len(args.hidden_sizes) not in (0, n) or any(x < 8 or x % 8 for x in args.hidden_sizes):
        refuse(args, "hidden_sizes", f"must be {n} multiples of 8")
    check_envs(args)


def check_envs(args: Args) -> None:
    """Every task can be made, is one of MiniGrid's, has the same actions, and is in the backend."""
    actions = {}  # their number -> a task
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
            valid = "must be a MiniGrid or BabyAI task, or one of your own as module:id"
            refuse(args, flag, f"{valid}; {env_id} {problem}")
        actions[int(env.action_space.n)] = env_id
        if len(actions) > 1:
            numbers = ", ".join(f"{name} has {number}" for number, name in actions.items())
            refuse(args, flag, f"need the same number of actions, but {numbers}")
        warn_of_missions(env, env_id)
    if args.env_backend == "envpool":
        if not find_spec("envpool"):
            refuse(args, "env_backend", "envpool is not installed")
        unknown = set(list_env_ids(args)) - list_envpool_ids()
        if unknown:
            valid = f"has no usable {', '.join(unknown)}; choose auto or gymnasium"
            refuse(args, "env_backend", valid)
    args.env_backend = choose_backend(args)  # the settings say which


def find_env_problem(args: Args, env: gym.Env, env_id: str) -> str:
    """What makes an environment unusable here, nothing ("") if it is not."""
    obs, _ = env.reset(seed=0)
    problem = find_obs_problem(obs)
    if problem:
        return problem
    name = strip_module(env_id)
    if not isinstance(env.action_space, gym.spaces.Discrete) or env.action_space.start != 0:
        return f"has no actions 0 to n - 1, but {env.action_space}"
    if env.spec.id != name:  # envpool knows full names only
        return f"is {env.spec.id}"
    if len({other for other in list_tests(args) if strip_module(other) == name}) > 1:
        # The second module replaced what the first had registered
        return "has the name of another task here"
    obs, reward, *_ = env.step(0)
    float(reward)  # an error is a problem, too
    return find_obs_problem(obs)


def find_obs_problem(obs: object) -> str:
    """What makes an observation unusable here, nothing ("") if it is not."""
    is_typed = isinstance(obs, np.ndarray) and obs.dtype == OBSERVATIONS.dtype
    if is_typed and obs in OBSERVATIONS:
        return ""
    shape = "x".join(map(str, np.shape(obs))) or type(obs).__name__
    dtype = getattr(obs, "dtype", "no array")
    valid = "x".join(map(str, OBSERVATIONS.shape))
    problem = f"shows no {valid} array ({OBSERVATIONS.dtype}), but {shape} ({dtype})"
    return f'{problem}; see "Other observations" in docs/prpo_minigrid.md'


def warn_of_missions(env: gym.Env, env_id: str) -> None:
    """Say that missions differ, because agents are not shown them."""
    missions = set()
    for level in range(9):
        env.reset(seed=level)
        missions.add(getattr(env.unwrapped, "mission", ""))
    if len(missions) > 1:
        message = f"{env_id}: levels have different missions, which agents are not shown"
        communicators.announce(message)


if __name__ == "__main__":
    may_change = ("eval_episodes", "total_timesteps")
    main(communicators.parse_args(Args, check_args, may_change=may_change))
