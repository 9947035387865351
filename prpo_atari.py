"""PR-PPO on Atari: agents that share no data learn together through their KL penalty.

Eq. 4 of the PRPO paper:

    maximise  E[clipped surrogate] - kl_coef E[KL],  KL of agent i's policy and its reference
    reference = C_i pi = sum_j C[i, j] pi_j          frozen for an update; C is new in every round

Each agent trains on its own games. What leaves it: its parameters in a round, its mean return where
C depends on it, its row of C, its distances to peers, and metrics; never an observation, an action
or a reward of a step.

    python prpo_atari.py --communicator reward                   # three agents in one process
    python prpo_atari.py --communicator identity                 # the same agents, isolated
    torchrun --nproc-per-node 3 prpo_atari.py                    # one agent per process
    python prpo_atari.py --resume runs/<name>                    # continue an interrupted run
"""

import copy
import functools
import itertools
import os
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

# requirements-minigrid.txt leaves the emulator out
if find_spec("ale_py"):
    import ale_py
    from ale_py.vector_env import AtariVectorEnv

# What a derived seed is for: the last number of its key
ENVIRONMENTS = 1
TEST_LEVELS = 3
TEST_ACTIONS = 4


@dataclass
class TaskArgs(RunArgs):
    """The flags of every script on Atari: environments, rollout, advantages."""

    # The environments

    # the game of all agents, as <Game>NoFrameskip-v4 or ALE/<Game>-v5; either way with the usual
    # wrappers; of your own as module:id, as Gymnasium has it, showing its last four 84x84 frames
    env_id: str = "BeamRiderNoFrameskip-v4"
    env_ids: tuple[str, ...] = ()
    """one game per agent, instead of --env-id; they must have the same actions"""
    eval_env_ids: tuple[str, ...] = ()
    """further games that every agent is evaluated on"""
    sticky_actions: bool = False
    """repeat the last action with probability 0.25, as in the newer protocol"""
    full_action_space: bool = False
    """all 18 actions of the console instead of those that the game needs"""
    num_envs: Count = 4  # parallel environments per agent
    # of all layers but the heads (autocast); heads and losses are always float32. auto: bfloat16 on
    # a processor that has it, else float32
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    compile: bool = False  # compile the networks with torch.compile
    # iterations between checkpoints; the environments start anew at each, so that a resumed run is
    # the same run, and an episode that is cut off there counts in no return
    save_every: Count = 128
    eval_episodes: Natural = 10
    """whole games per agent and task in an evaluation, with unclipped scores (0: none)"""

    # Rollout and advantages
    total_timesteps: Count = 10_000_000  # environment steps of each agent; a step is four frames
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
    kl_coef: Annotated[NonNegative, tyro.conf.arg(aliases=["--communication-coef"])] = 1.0
    """coefficient of the KL penalty towards the reference (without peers: the old policy)"""
    kl_schedule: Literal["constant", "linear"] = "constant"
    """linear: the coefficient falls to 0 over the run"""

    # Update
    learning_rate: Positive = 2.5e-4  # learning rate of Adam
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
    local_updates: Count = 16  # iterations between communication rounds


# --- the network ---


def layer_init(layer: nn.Module, std: float = np.sqrt(2)) -> nn.Module:
    """Orthogonal weights of gain `std`, zero bias."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class BlockConv2d(nn.Conv2d):
    """A convolution of stride 4 over bytes in blocks of 4x4 pixels, with the division by 255.

    8x8 with stride 4 over 4 channels becomes 2x2 with stride 1 over 64: the same sums, about twice
    as fast on a CPU.
    """

    def kernel(self) -> Tensor:
        """The weight for blocks, [out, 16 * in, size / 4, size / 4]."""
        weight = self.weight / 255
        # [out, frame, row, row in block, column, column in block]
        weight = weight.unflatten(3, (-1, 4)).unflatten(2, (-1, 4))
        return weight.permute(0, 1, 3, 5, 2, 4).flatten(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 64, 21, 21]."""
        return self._conv_forward(x, self.kernel(), self.bias)


class Agent(nn.Module):
    """Policy and value function on Atari frames, with the trunk of Mnih et al. (2015) in common."""

    def __init__(self, num_actions: int, bfloat16: bool = False):
        super().__init__()
        self.bfloat16 = bfloat16
        self.network = nn.Sequential(
            layer_init(BlockConv2d(4, 32, 8)),
            nn.ReLU(inplace=True),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(inplace=True),
            layer_init(nn.Conv2d(64, 64, 3)),
            nn.ReLU(inplace=True),
            nn.Flatten(),
            layer_init(nn.Linear(64 * 7 * 7, 512)),
            nn.ReLU(inplace=True),
        )
        self.actor = layer_init(nn.Linear(512, num_actions), std=0.01)
        self.critic = layer_init(nn.Linear(512, 1), std=1)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """obs: [batch, 21, 21, 64] uint8. Returns (logits [batch, actions], value [batch])."""
        x = obs.to(torch.bfloat16 if self.bfloat16 else torch.float32)
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bfloat16):
            hidden = self.network(x.permute(0, 3, 1, 2))  # in memory channels stay last
        hidden = hidden.float()
        return self.actor(hidden), self.critic(hidden).squeeze(-1)

    @torch.no_grad()
    def predict(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """`forward` for many states, without gradient, in chunks that stay in the cache."""
        logits, value = zip(*map(self, obs.split(256)), strict=True)
        return torch.cat(logits), torch.cat(value)


def make_agents(args: Args) -> list[Agent]:
    """Every agent's network at the start, all equal."""
    torch.manual_seed(args.seed)
    first = Agent(count_actions(args), args.precision == "bfloat16")
    return [copy.deepcopy(first) for _ in range(args.num_agents)]


class Actors:
    """`Agent.forward` of all agents at once, each on its own observations.

    obs: where a rollout's observations are kept, [agents, steps, envs, 21, 21, 64].
    """

    def __init__(self, args: Args, agents: list[Agent]):
        shape = len(agents), args.num_steps, args.num_envs, 21, 21, 64
        device = agents[0].actor.weight.device
        dtype = torch.bfloat16 if agents[0].bfloat16 else torch.float32
        self.num_actions = agents[0].actor.out_features
        self.obs = torch.zeros(shape, dtype=torch.uint8, device=device)
        self.network = Stacked([agent.network for agent in agents], dtype)
        self.actor = Stacked([agent.actor for agent in agents])
        self.critic = Stacked([agent.critic for agent in agents])
        if args.compile:  # on a GPU each step is one launch of a CUDA graph
            mode = "reduce-overhead" if uses_gpu(args) else None
            self.forward = torch.compile(self.forward, mode=mode)

    def read(self) -> None:
        """Read the agents' weights, after every update."""
        self.network.read()
        self.actor.read()
        self.critic.read()

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """obs: [agents, envs, 21, 21, 64] uint8.

        Returns (logits [agents, envs, actions], value [agents, envs]).
        """
        hidden = self.network(obs)
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


# --- PR-PPO ---


def rollout(
    args: Args, actors: Actors, envs: "Envs", generators: list[torch.Generator]
) -> list[tuple[dict[str, Tensor], list[tuple[float, float]]]]:
    """All agents play num_steps in their environments, from where they stand.

    Returns of each agent data and the games that ended, [(return, length)]. data: its observations,
    `obs` [states, ...], the policy's log-probabilities there, `policy` [states, actions], and
    values, `state_values` [states]; the rest is [steps, envs]. `obs_inds` are rows of obs:
    obs[obs_inds] is what each step showed.
    """
    shape = len(generators), args.num_steps, args.num_envs
    obs = actors.obs
    device = obs.device
    rewards = np.zeros(shape, dtype=np.float32)
    terminations = np.zeros(shape, dtype=bool)
    truncations = np.zeros(shape, dtype=bool)
    valid = np.zeros(shape, dtype=bool)
    episodes = [[] for _ in generators]

    # The largest of logits plus Gumbel noise is a sample of their softmax
    gumbel = []
    for generator in generators:
        noise = torch.empty(*shape[1:], actors.num_actions)
        gumbel.append(-noise.exponential_(generator=generator).log())
    gumbel = torch.stack(gumbel).to(device)
    logits = torch.zeros_like(gumbel)
    actions = torch.zeros(shape, dtype=torch.long, device=device)
    values = torch.zeros(shape[0], shape[1] + 1, shape[2], device=device)  # and after the last step

    actors.read()
    with torch.inference_mode():
        for step in range(args.num_steps):
            now = slice(None), step
            obs[now] = torch.from_numpy(envs.obs)
            logits[now], values[now] = actors.forward(obs[now])
            actions[now] = (logits[now] + gumbel[now]).argmax(-1)
            *signals, ended = envs.step(actions[now].cpu().numpy())
            rewards[now], terminations[now], truncations[now], valid[now] = signals
            for k, _, episode_return, length in ended:
                episodes[k].append((float(episode_return), float(length)))
        _, values[:, -1] = actors.forward(torch.from_numpy(envs.obs).to(device))

    rollouts = []
    policies = logits.log_softmax(-1)
    logprobs = policies.gather(-1, actions[..., None]).squeeze(-1)
    obs_inds = torch.arange(args.num_steps * args.num_envs, device=device).view(shape[1:])
    for k in range(len(generators)):
        data = {
            "obs": obs[k].flatten(0, 1),
            "policy": policies[k].flatten(0, 1),
            "state_values": values[k, :-1].flatten(),
            "obs_inds": obs_inds,
            "actions": actions[k],
            "logprobs": logprobs[k],
            "values": values[k, :-1],
            # After a game's end the next observation is its final one: its value bootstraps
            "next_values": values[k, 1:],
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
            logits, newvalue = agent(batch["obs"][batch["obs_inds"][mb_inds]])
            newlogprobs = logits.log_softmax(-1)  # [minibatch, actions]
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
    if args.compile:
        for agent in agents:
            agent.compile()
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
    actors = Actors(args, agents)
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


# --- tasks: games and their environments ---


def list_env_ids(args: Args) -> list[str]:
    """The environment id of every agent."""
    return list(args.env_ids) or [args.env_id] * args.num_agents


def strip_module(env_id: str) -> str:
    """A task's name in logs and folders: its id without the module that registers it."""
    return env_id.rpartition(":")[2]


def name_tasks(args: Args) -> list[str]:
    """The name of every agent's task."""
    return [strip_module(env_id) for env_id in list_env_ids(args)]


def is_custom(env_id: str) -> bool:
    """Whether a game is one of your own, module:id."""
    return ":" in env_id


class CustomGame(gym.Wrapper):
    """A game of your own whose rewards are numbers, also those of shape (1,).

    Its info has the lives alone, 0 where it counts none. Gymnasium's vector environments fail on
    other rewards, and on arrays in the info that differ in shape.
    """

    def reset(self, **options) -> tuple[np.ndarray, dict]:
        """Like the game's."""
        obs, info = self.env.reset(**options)
        return obs, {"lives": int(info.get("lives", 0))}

    def step(self, action: int) -> tuple:
        """Like the game's."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        lives = int(info.get("lives", 0))
        return obs, np.asarray(reward).item(), terminated, truncated, {"lives": lives}


# Steps after which a game of your own ends that has no time limit: ALE's 108,000 frames
LONGEST_EPISODE = 27_000


def make_custom(env_id: str, **options) -> gym.Env:
    """A game of your own, with a time limit: an evaluation plays whole games."""
    env = CustomGame(gym.make(env_id, disable_env_checker=True, **options))
    if env.spec.max_episode_steps is None:
        env = gym.wrappers.TimeLimit(env, LONGEST_EPISODE)
    return env


def list_actions(env_id: str, args: Args) -> "list[ale_py.Action] | list[int]":
    """The actions of a game, in the order of their numbers."""
    if is_custom(env_id):
        env = make_custom(env_id)
        return list(range(int(env.action_space.n)))
    return list(make_games(args, env_id, 1).ale.get_action_set())


def count_actions(args: Args) -> int:
    """The number of actions of every task."""
    return len(list_actions(list_env_ids(args)[0], args))


def uses_gpu(args: Args) -> bool:
    """Whether the networks are on a GPU."""
    return args.device != "cpu" and torch.cuda.is_available()


def choose_backend(args: Args) -> str:
    """The environment backend that this run uses."""
    return "gymnasium" if any(map(is_custom, list_env_ids(args))) else "ale-py"


def make_games(args: Args, env_id: str, number: int, **screen) -> "AtariVectorEnv":
    """Whole games of one title with plain scores: 0-29 random no-ops first, 4 frames per step."""
    # The cores that this process may use: torchrun sets OMP_NUM_THREADS to 1
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return AtariVectorEnv(
        gym.spec(env_id).kwargs["game"],
        number,
        num_threads=max(1, cores // processes),
        reward_clipping=False,
        use_fire_reset=False,
        full_action_space=args.full_action_space,
        repeat_action_probability=0.25 if args.sticky_actions else 0.0,
        **screen,
    )


class Games:
    """Games with the frames, episodes and rewards of the usual wrappers: [agents, games, ...].

    84x84 grey frames, the last 4 of them, the brighter of the last two of each step. For learning,
    a lost life ends the episode and rewards are signs; the game itself goes on, and its score is
    the plain sum. After the start and after a lost life the buttons that start play are pressed, as
    the wrappers of stable-baselines3 do; these steps and those that only start a new game do not
    follow the action: they are not valid.

    env_ids: the title of each row; seeds: [agents][games].
    """

    def __init__(self, args: Args, env_ids: list[str], seeds: list[list[int]]):
        shape = np.shape(seeds)
        self.obs = np.zeros((*shape, 21, 21, 64), dtype=np.uint8)  # the latest observations
        self.pressed = np.zeros(shape, dtype=int)  # the buttons of the last step
        self.lives = np.zeros(shape, dtype=int)
        self.countdown = np.zeros(shape, dtype=int)  # steps until actions are followed
        self.over = np.zeros(shape, dtype=bool)
        self.returns = np.zeros(shape)
        self.lengths = np.zeros(shape)
        self.pools = []  # (pool, its rows, whether FIRE starts play)
        # One large pool is faster than many small ones
        for _, members in itertools.groupby(range(shape[0]), key=env_ids.__getitem__):
            members = list(members)
            rows = slice(members[0], members[-1] + 1)
            env_id = env_ids[rows.start]
            of_games = np.array(seeds)[rows].ravel()
            fire = False
            if is_custom(env_id):  # shows the last four frames itself
                thunks = [functools.partial(make_custom, env_id)] * len(of_games)
                pool = SyncVectorEnv(thunks, copy=False, autoreset_mode=AutoresetMode.NEXT_STEP)
                obs, info = pool.reset(seed=of_games.tolist())
            else:
                pool = make_games(args, env_id, len(of_games))
                fire = ale_py.Action.FIRE in list(pool.ale.get_action_set())[1:2]
                obs, info = pool.reset(seed=of_games)
            self.obs[rows] = self.arrange_blocks(obs, rows)
            self.lives[rows] = info["lives"].reshape(self.lives[rows].shape)
            self.countdown[rows] = 2 * fire
            self.pools.append((pool, rows, fire))

    def arrange_blocks(self, obs: np.ndarray, rows: slice) -> np.ndarray:
        """[games, 4, 84, 84] -> [agents, games, 21, 21, 64]: 4x4 pixels of 4 frames each.

        See `BlockConv2d`.
        """
        fours = obs.view(np.uint32).reshape(-1, 4, 21, 4, 21)  # four pixels of a row are one number
        blocks = np.ascontiguousarray(fours.transpose(0, 2, 4, 1, 3))
        return blocks.view(np.uint8).reshape(self.obs[rows].shape)

    def step(self, actions: np.ndarray) -> tuple:
        """Step all games, actions [agents, games].

        Returns rewards, terminations, truncations, valid, and the games that ended:
        [(k, game, return, length)].
        """
        signals = []
        for pool, rows, fire in self.pools:
            valid = ~self.over[rows] & (self.countdown[rows] == 0)
            # While a countdown runs: nothing (after a lost life only), FIRE, the third action
            buttons = np.array([0, 2, 1, 0])[self.countdown[rows]] * fire
            self.pressed[rows] = np.where(valid, actions[rows], buttons)
            obs, *results, info = pool.step(self.pressed[rows].ravel())
            self.obs[rows] = self.arrange_blocks(obs, rows)
            scores, terminations, truncations = (x.reshape(valid.shape) for x in results)
            lives = info["lives"].reshape(valid.shape)
            # Some games linger at 0 lives before they end; a new game has lost no life, though
            # bonus lives are gone
            lost = (lives < self.lives[rows]) & (lives > 0) & ~self.over[rows]
            running = np.maximum(self.countdown[rows] - 1, 0)
            running = np.where(lost, 2 * fire + 1, running)
            self.countdown[rows] = np.where(self.over[rows], 2 * fire, running)
            self.lives[rows] = lives
            self.over[rows] = terminations | truncations
            self.returns[rows] += scores
            self.lengths[rows] += valid
            signals.append((np.sign(scores), terminations | lost, truncations, valid))
        ended = []
        for k, game in np.argwhere(self.over):
            ended.append((k, game, self.returns[k, game], self.lengths[k, game]))
            self.returns[k, game] = 0.0
            self.lengths[k, game] = 0.0
        rewards, terminations, truncations, valid = map(np.concatenate, zip(*signals, strict=True))
        return rewards, terminations, truncations, valid, ended

    def close(self) -> None:
        """Free the games."""
        for pool, _, _ in self.pools:
            pool.close()


class Envs(Games):
    """The environments of some agents.

    Each environment starts anew in the step *after* its game's end; that step ignores the action
    and is not valid. Seeds are keyed by (seed, agent, environment, checkpoint), so that nothing
    depends on which process holds which agent.
    """

    def __init__(self, args: Args, agents: range, checkpoint: int):
        seeds = []
        for agent in agents:
            keys = [(args.seed, agent, number, checkpoint) for number in range(args.num_envs)]
            seeds.append([derive_seed(*key, ENVIRONMENTS) for key in keys])
        env_ids = [list_env_ids(args)[i] for i in agents]
        super().__init__(args, env_ids, seeds)


def collect_public_states(args: Args, num_steps: int = 256, num_envs: int = 8) -> Tensor:
    """S_ref of Example 3: what a fixed-seed random policy sees, every eighth step of it.

    Every agent can regenerate these states alone, so using them reveals nothing. Returns
    [states, 21, 21, 64] uint8.
    """
    states = []
    generator = np.random.default_rng(0)
    num_actions = count_actions(args)
    for env_id in sorted(set(list_env_ids(args))):
        games = Games(args, [env_id], [list(range(num_envs))])
        for step in range(num_steps):
            games.step(generator.integers(num_actions, size=(1, num_envs)))
            if step % 8 == 7:
                states.append(games.obs[0].copy())
        games.close()
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
    """One whole game for each level, a seed. Returns their unclipped scores [levels].

    Actions are sampled, or the most probable ones (greedy). watch: receives the games after their
    reset and after each step of the first one. An agent that has diverged has no return: NaN.
    """
    if not all(parameter.isfinite().all() for parameter in agent.parameters()):
        return np.full(len(levels), np.nan)
    games = Games(args, [env_id], [levels])
    if watch:
        watch(games)
    returns = np.zeros(len(levels))
    running = np.ones(len(levels), dtype=bool)
    generator = torch.Generator().manual_seed(seed)
    device = agent.actor.weight.device
    while running.any():
        logits, _ = agent.predict(torch.from_numpy(games.obs[0]).to(device))
        probs = logits.softmax(-1).cpu()
        if probs.isnan().any():  # finite parameters can overflow
            return np.full(len(levels), np.nan)
        if greedy:
            actions = logits.argmax(-1).cpu()
        else:
            actions = torch.multinomial(probs, 1, generator=generator)[:, 0]
        *_, ended = games.step(actions.numpy()[None])
        if watch and running[0]:
            watch(games)
        for _, level, total, _ in ended:
            if running[level]:  # the game that starts after it does not count
                returns[level] = total
                running[level] = False
    games.close()
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
    """What types cannot express of the flags of every script on Atari."""
    if args.precision == "auto":
        # On a GPU most of the time is the launching of kernels, of which bfloat16 needs more
        has_bfloat16 = torch.cpu.get_capabilities().get("avx512_bf16") and not uses_gpu(args)
        args.precision = "bfloat16" if has_bfloat16 else "float32"
    n = args.num_agents
    batch_size = args.num_envs * args.num_steps
    if args.num_steps < 4:
        valid = "must be at least 4: three may only start a game and press its button"
        refuse(args, "num_steps", valid)
    if batch_size % args.num_minibatches:
        refuse(args, "num_minibatches", f"must divide num_envs * num_steps = {batch_size}")
    if args.total_timesteps < batch_size:
        refuse(args, "total_timesteps", f"must be at least one rollout, {batch_size} steps")
    if len(args.env_ids) not in (0, n):
        refuse(args, "env_ids", f"must name one task for each of {n} agents")
    check_envs(args)


def check_envs(args: Args) -> None:
    """Every game is known and installed, and all have the same actions."""
    actions = {}  # of each game
    for env_id in list_tests(args):
        flag = "env_ids" if args.env_ids else "env_id"
        if env_id not in list_env_ids(args):
            flag = "eval_env_ids"
        try:
            problem = find_game_problem(args, env_id)
            if not problem:
                actions[env_id] = list_actions(env_id, args)
        except Exception as error:  # unknown, maybe with a suggestion
            problem = f"cannot be used: {communicators.first_line(error)}"
        if problem:
            valid = "must be <Game>NoFrameskip-v4 or ALE/<Game>-v5, or one of your own as module:id"
            refuse(args, flag, f"{valid}; {env_id}: {problem}")
        # Those of your own games have no names, only their number can be compared
        named = [names for game, names in actions.items() if not is_custom(game)]
        if len(set(map(len, actions.values()))) > 1 or any(names != named[0] for names in named):
            valid = "need the same actions; give all 18 to each with --full-action-space"
            refuse(args, flag, valid)


def find_game_problem(args: Args, env_id: str) -> str:
    """What makes an environment unusable here, nothing ("") if it is not."""
    name = strip_module(env_id)
    if not is_custom(env_id):
        if not (env_id.endswith("NoFrameskip-v4") or env_id.startswith("ALE/")):
            return "is none"
        return "" if find_spec("ale_py") else "ale-py is not installed"
    env = make_custom(env_id)
    space = env.observation_space
    if space.shape != (4, 84, 84) or space.dtype != np.uint8:
        return f"has no space of 4x84x84 frames (uint8), but {space}"
    obs, _ = env.reset(seed=0)
    problem = find_frames_problem(obs)
    if problem:
        return problem
    if not isinstance(env.action_space, gym.spaces.Discrete) or env.action_space.start != 0:
        return f"has no actions 0 to n - 1, but {env.action_space}"
    if len({other for other in list_tests(args) if strip_module(other) == name}) > 1:
        # The second module replaced what the first had registered
        return "has the name of another task here"
    obs, reward, *_ = env.step(0)
    float(reward)  # an error is a problem, too
    return find_frames_problem(obs)


def find_frames_problem(obs: object) -> str:
    """What makes an observation unusable here, nothing ("") if it is not."""
    obs = np.asarray(obs)
    if obs.shape == (4, 84, 84) and obs.dtype == np.uint8:
        return ""
    shape = "x".join(map(str, obs.shape))
    return f"shows no 4x84x84 frames (uint8), but {shape} ({obs.dtype})"


if __name__ == "__main__":
    may_change = ("eval_episodes", "total_timesteps")
    main(communicators.parse_args(Args, check_args, may_change=may_change))
