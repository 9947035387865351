"""Par-S2ZPO on MuJoCo: agents that send bits, not parameters, learn from comparisons of behaviour.

Zhang, Wang and Ying, Efficient Federated RLHF via Zeroth-Order Policy Optimization, whose authors
have released no code. There is no reward for the learner and no gradient: in each iteration every
agent perturbs the policy on its block of the parameters, a panel compares episodes of the policy
before and after, and all agents move the policy along the perturbations, by the signs of the votes.

    python s2zpo_mujoco.py --env-id CartPole-v1                  # a minute
    python s2zpo_mujoco.py --env-id HalfCheetah-v5               # four agents, d + 4 bits an update
    python s2zpo_mujoco.py --algorithm fedavg                    # every agent perturbs everything
    torchrun --nproc-per-node 4 s2zpo_mujoco.py                  # one agent per process
    python s2zpo_mujoco.py --env-id CartPole-v1 --human --num-agents 1   # you are the panel
    python s2zpo_mujoco.py --resume runs/<name>                  # continue an interrupted run
"""

import copy
import functools
import importlib
import itertools
import math
import os
import subprocess
import sys
import warnings
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from PIL import Image
from torch import Tensor

import communicators
from communicators import (
    Bound,
    Count,
    Exchange,
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
from prpo_mujoco import import_mujoco, layer_init, strip_module

# What a derived seed is for: the last number of its key
ENVIRONMENTS = 1
PARTITION = 2
PERTURBATION = 3
ACTIONS = 4
ANSWERS = 5
TEST_EPISODES = 6
TEST_ACTIONS = 7

# The defaults of --link-scale: on MuJoCo a tenth of a good return in 250 steps; 10 for other tasks.
# With the logistic link an evaluator prefers the better of two batches that differ by this much in
# 73 of 100 cases
LINK_SCALES = {
    "HalfCheetah-v5": 50.0,
    "Hopper-v5": 30.0,
    "Walker2d-v5": 30.0,
    "Swimmer-v5": 5.0,
}


@dataclass
class Args(RunArgs):
    device: str = "auto"
    """cpu, or auto, which is the same: the networks are too small for a GPU"""
    num_agents: Count = 4  # K, the number of agents
    save_every: Count = 50
    """iterations between checkpoints; the environments start anew at each"""

    # The environments
    env_id: str = "HalfCheetah-v5"
    """the task of all agents: MuJoCo's, another one with continuous actions, or CartPole-v1"""
    # envpool is 1.3 to 1.9 times as fast on MuJoCo; auto takes it for HalfCheetah-v5, Hopper-v5,
    # Walker2d-v5 and Swimmer-v5 where it is installed
    env_backend: Literal["auto", "envpool", "gymnasium"] = "auto"
    # most steps of an episode, also in evaluations (default: the task's, but 250 where it has none
    # or 1,000 and more)
    horizon: Count | None = None
    # normalise observations, with statistics of unperturbed episodes that agents share; either way
    # they are clipped to [-10, 10]
    norm_obs: bool = True
    eval_episodes: Natural = 20
    """episodes of an evaluation, in gymnasium's environment (0: none)"""

    # The policy
    hidden_sizes: tuple[int, ...] = (32, 32)
    """widths of the hidden layers, with tanh"""
    # log of the standard deviation of continuous actions, which are Gaussian; it is not learned
    log_std: Annotated[float, Bound("be at most 10", lambda x: x <= 10)] = -1.0

    # The panel, which compares N pairs of batches of episodes in every iteration of every agent
    num_pairs: Count = 8  # N, pairs of batches that are compared
    num_trajectories: Count = 1  # D, episodes in a batch
    num_evaluators: Count = 3  # M, evaluators who compare each pair, with an answer of one bit
    # how evaluators answer: an evaluator prefers the second batch with probability sigma(x), where
    # x is its mean return minus the first's, over --link-scale; the learner does not know sigma
    link: Literal["logistic", "linear", "probit", "noiseless"] = "logistic"
    # the difference of mean returns at which x of --link is 1 (default: HalfCheetah-v5 50,
    # Hopper-v5 and Walker2d-v5 30, Swimmer-v5 5, other tasks 10)
    link_scale: Positive | None = None
    # you answer instead of the evaluators, in the terminal, after a film of each pair, both batches
    # side by side; every iteration ends with a checkpoint
    human: bool = False

    # S2ZPO
    total_iterations: Count = 300  # updates of the policy
    # par: every agent perturbs its block of the parameters; fedavg: every agent perturbs all;
    # central: one agent with all pairs
    algorithm: Literal["par", "fedavg", "central"] = "par"
    # par: the parameters are split into equal blocks, at random, in their order, or with an equal
    # share of every layer
    partition: Literal["random", "contiguous", "layer"] = "random"
    # a perturbation adds mu or -mu to each of an agent's parameters (default: 2 over the root of
    # their number, a perturbation of norm 2)
    mu: Positive | None = None
    # a step adds eta or -eta to each parameter; fedavg: that times the mean over agents (default:
    # a first step of norm 2; fedavg: as a root mean square, of independent agents)
    eta: Positive | None = None
    eta_decay: NonNegative = 0.02
    """after t updates the step size is eta / sqrt(1 + eta_decay * t)"""


# --- the policy ---


class Policy(nn.Module):
    """The mean of a Gaussian, or logits: a tanh MLP of normalised observations."""

    def __init__(self, obs_size: int, num_outputs: int, hidden_sizes: tuple[int, ...]):
        super().__init__()
        sizes = [obs_size, *hidden_sizes]
        layers = []
        for inputs, outputs in itertools.pairwise(sizes):
            layers += [layer_init(nn.Linear(inputs, outputs)), nn.Tanh()]
        layers.append(layer_init(nn.Linear(sizes[-1], num_outputs), std=0.01))
        self.network = nn.Sequential(*layers)
        # Statistics, not parameters: neither perturbed nor learned
        self.register_buffer("obs_mean", torch.zeros(obs_size))
        self.register_buffer("obs_std", torch.ones(obs_size))

    def normalise(self, obs: Tensor) -> Tensor:
        """obs: [..., obs]. Returns [..., obs]."""
        return ((obs - self.obs_mean) / self.obs_std).clamp(-10, 10)

    def forward(self, obs: Tensor) -> Tensor:
        """obs: [..., obs], as the environment has them. Returns [..., outputs]."""
        return self.network(self.normalise(obs))


def make_policy(args: Args) -> Policy:
    """The policy from which all agents start."""
    env = make_env(args.env_id, args.horizon)
    obs_size = env.observation_space.shape[0]
    if isinstance(env.action_space, gym.spaces.Discrete):
        num_outputs = int(env.action_space.n)
    else:
        num_outputs = env.action_space.shape[0]
    env.close()
    torch.manual_seed(args.seed)
    return Policy(obs_size, num_outputs, args.hidden_sizes)


class Actions:
    """How outputs of the policy become actions: samples of a Gaussian, clipped, or of a softmax."""

    def __init__(self, args: Args, space: gym.Space):
        self.space = space
        self.std = math.exp(args.log_std)
        self.discrete = isinstance(space, gym.spaces.Discrete)

    def draw_noise(self, *shape: int, generator: torch.Generator) -> np.ndarray:
        """What makes actions random, for each output of the policy. Returns [*shape, outputs]."""
        if self.discrete:
            # The largest of logits plus Gumbel noise is a sample of their softmax
            noise = torch.empty(*shape, int(self.space.n)).exponential_(generator=generator)
            return -noise.log().numpy()
        return torch.randn(*shape, self.space.shape[0], generator=generator).numpy()

    def choose(self, outputs: np.ndarray, noise: np.ndarray | float) -> np.ndarray:
        """outputs, noise: [..., outputs]; noise 0 gives the most probable action."""
        if self.discrete:
            return (outputs + noise).argmax(-1)
        return (outputs + self.std * noise).clip(self.space.low, self.space.high)


# --- S2ZPO: the panel's vote, the perturbation, the step ---


def compute_preference(differences: Tensor, link: str) -> Tensor:
    """sigma: the probability that an evaluator prefers the second batch of each pair.

    differences: mean return of the second batch minus that of the first, over the link's scale.
    sigma(0) = 1/2, and sigma(-x) = 1 - sigma(x).
    """
    if link == "logistic":
        return differences.sigmoid()
    if link == "linear":
        return (0.5 + differences / 2).clamp(0, 1)
    if link == "probit":
        return torch.special.ndtr(differences)
    return 0.5 + differences.sign() / 2  # noiseless


def draw_answers(
    returns: Tensor, args: Args, scale: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """A simulated panel: what M evaluators answer about each pair of batches.

    returns: [2, pairs, trajectories], of the policy before and after the perturbation. Returns the
    answers [pairs, evaluators], 1 for the perturbed policy, -1 against it, 0 where a return is NaN,
    and the differences of mean returns [pairs].
    """
    before, after = returns.mean(-1)  # [pairs]
    differences = after - before
    preference = compute_preference(differences / scale, args.link)
    uniform = torch.rand(
        len(differences), args.num_evaluators, generator=generator, dtype=returns.dtype
    )
    answers = torch.where(uniform < preference[:, None], 1, -1)
    answers[differences.isnan()] = 0  # nobody can tell
    return answers, differences


def count_votes(answers: Tensor, generator: torch.Generator) -> int:
    """The sign of all answers, 1, -1 or 0 each; a fair coin decides a tie."""
    total = int(answers.sum())
    if total == 0:
        total = 2 * int(torch.randint(2, (), generator=generator)) - 1
    return int(math.copysign(1, total))


def split_parameters(args: Args, policy: Policy) -> list[Tensor]:
    """I_1, ..., I_K: which parameters each agent perturbs, as indices into the flat parameters.

    par: a disjoint cover, of sizes that differ by at most one, or with `layer` one for every tensor
    of the policy. Otherwise every agent has all.
    """
    d = len(communicators.flatten(policy.network))
    n = args.num_agents
    if args.algorithm != "par":
        return [torch.arange(d)] * n
    if args.partition == "contiguous":
        return list(torch.arange(d).tensor_split(n))
    if args.partition == "random":
        generator = torch.Generator().manual_seed(derive_seed(args.seed, PARTITION))
        shuffled = torch.randperm(d, generator=generator)
        return [block.sort().values for block in shuffled.tensor_split(n)]
    owners = torch.empty(d, dtype=torch.long)
    first = 0
    for parameter in policy.parameters():  # of each, every agent has neighbours of equal number
        size = parameter.numel()
        shares = torch.arange(size) * n // size
        owners[first : first + size] = (shares + first) % n  # what is left over goes round
        first += size
    return [(owners == i).nonzero().flatten() for i in range(n)]


def draw_signs(args: Args, agent: int, iteration: int, number: int) -> Tensor:
    """v_k: the agent's binary perturbation of its `number` parameters, -1 or 1 with equal chances.

    It is drawn anew for each iteration from the agent's key alone. Returns [number], int8.
    """
    seed = derive_seed(args.seed, agent, iteration, PERTURBATION)
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(2, (number,), generator=generator, dtype=torch.int8)
    return 2 * bits - 1


def pack(signs: Tensor, vote: int, num_bytes: int) -> Tensor:
    """An agent's message: the signs of its perturbation and its vote, a bit each.

    signs: [number], -1 or 1; the message is padded to `num_bytes`. Returns uint8 [num_bytes].
    """
    packed = np.packbits(np.append(signs.numpy() > 0, vote > 0))
    return torch.from_numpy(np.pad(packed, (0, num_bytes - len(packed))))


def unpack(message: Tensor, number: int) -> tuple[Tensor, int]:
    """The inverse of `pack`: signs [number], int8, and the vote."""
    bits = np.unpackbits(message.numpy(), count=number + 1)
    values = torch.from_numpy(2 * bits.astype(np.int8) - 1)
    return values[:-1], int(values[-1])


def combine(messages: list[Tensor], blocks: list[Tensor], d: int) -> Tensor:
    """sum_k o_k v_k: every agent's perturbation, by the sign of its own vote.

    messages: of each agent, as `pack` makes them; blocks: of each agent. Returns [d].
    """
    direction = torch.zeros(d)
    for message, block in zip(messages, blocks, strict=True):
        signs, vote = unpack(message, len(block))
        direction[block] += vote * signs
    return direction


def choose_step_sizes(args: Args, d: int) -> tuple[float, float]:
    """mu and eta: as given, or those with which a perturbation and a step have the norm 2.

    par: |mu v_k| = mu sqrt(d / K), |eta sum_k o_k v_k| = eta sqrt(d). fedavg: |mu v_k| = mu
    sqrt(d); the K perturbations are independent, so that their mean has the norm eta sqrt(d / K),
    as a root mean square.
    """
    perturbed = d / args.num_agents if args.algorithm == "par" else d
    moved = d / args.num_agents if args.algorithm == "fedavg" else d
    mu = args.mu or 2 / math.sqrt(perturbed)
    eta = args.eta or 2 / math.sqrt(moved)
    return mu, eta


# --- the loop ---


def rollout(
    args: Args, envs: "Envs", stacked: Stacked, policy: Policy, iteration: int, run: Run
) -> tuple[Tensor, Tensor, Tensor]:
    """One episode in every environment, all stepped together.

    stacked: the policies before and after the perturbation, of each agent held in turn. Returns
    returns and lengths [agents, 2, pairs, trajectories], and the sums of the unperturbed episodes'
    observations, see `sum_observations`.
    """
    shape = len(envs.agents), 2, args.num_pairs, args.num_trajectories
    episodes = args.num_pairs * args.num_trajectories  # of one policy
    noise = []
    for i in envs.agents:
        seed = derive_seed(args.seed, i, iteration, ACTIONS)
        generator = torch.Generator().manual_seed(seed)
        noise.append(envs.actions.draw_noise(envs.horizon, 2 * episodes, generator=generator))
    noise = np.concatenate(noise, axis=1)  # [steps, rows, outputs]

    obs = envs.reset()  # [rows, obs]
    running = np.arange(len(obs))
    returns = np.zeros(len(obs))
    lengths = np.zeros(len(obs), dtype=int)
    unperturbed = []  # of each step [agents, episodes, obs]
    run.tick("environments")
    for step in range(envs.horizon):
        obs_of_policies = torch.from_numpy(obs).view(-1, episodes, obs.shape[1])
        if args.norm_obs:
            unperturbed.append(obs_of_policies[::2].clone())  # `obs` changes in place
        outputs = stacked(policy.normalise(obs_of_policies)).flatten(0, 1).numpy()
        actions = envs.actions.choose(outputs, noise[step])
        run.tick("policies")
        obs[running], rewards, ended = envs.step(running, actions[running])
        returns[running] += rewards
        lengths[running] += 1
        running = running[~ended]
        run.tick("environments")
        if not len(running):
            break

    returns = torch.from_numpy(returns).view(shape)
    lengths = torch.from_numpy(lengths).view(shape)
    sums = torch.zeros(len(envs.agents), 0)
    if args.norm_obs:
        unperturbed = torch.stack(unperturbed, dim=2)  # [agents, episodes, steps, obs]
        sums = sum_observations(unperturbed, lengths[:, 0].flatten(1))
        run.tick("policies")
    return returns, lengths, sums


def sum_observations(obs: Tensor, lengths: Tensor) -> Tensor:
    """What normalisation needs: number, sum and sum of squares of the observations.

    obs: [agents, episodes, steps, obs], of which the first `lengths` [agents, episodes] steps
    count. Returns [agents, 1 + 2 * obs], double.
    """
    steps = torch.arange(obs.shape[2])
    counts = steps < lengths[..., None]  # [agents, episodes, steps]
    # One infinite observation would make the policy of all agents NaN; huge ones, too
    counts &= obs.square().isfinite().all(-1)
    obs = torch.where(counts[..., None], obs.double(), 0.0)
    number = counts.double().sum((1, 2))[:, None]
    total = obs.sum((1, 2))
    squares = obs.square().sum((1, 2))
    return torch.cat((number, total, squares), dim=1)


def set_normalisation(policy: Policy, sums: list[Tensor], keep_policy: bool) -> None:
    """Normalise with the statistics of all agents: sums, of each [1 + 2 * obs].

    keep_policy: the first layer takes up the change, W' (x - m') / s' + b' = W (x - m) / s + b, so
    that actions remain what they were, but where inputs are clipped.
    """
    obs_size = len(policy.obs_mean)
    number, total, squares = sum(sums).split([1, obs_size, obs_size])
    if number == 0:
        return
    average = total / number
    std = (squares / number - average.square()).clamp(min=0).sqrt()
    std[std < 1e-4] = 1.0  # constants
    obs_mean = average.float()
    obs_std = std.float()
    if keep_policy:
        first = policy.network[0]
        first.bias += first.weight @ ((obs_mean - policy.obs_mean) / policy.obs_std)
        first.weight *= obs_std / policy.obs_std
    policy.obs_mean.copy_(obs_mean)
    policy.obs_std.copy_(obs_std)


def main(args: Args) -> dict:
    """Train, evaluate, and return what summary.json holds."""
    n = args.num_agents
    together = "all agents share one vector of parameters at every step"
    exchange = communicators.make_exchange(args, isolated=False, together=together)
    held = exchange.agents  # the agents of this process: agent i of all is the k-th held
    policy = make_policy(args).requires_grad_(False)
    d = len(communicators.flatten(policy.network))
    mu, eta = choose_step_sizes(args, d)
    scale = args.link_scale or LINK_SCALES.get(args.env_id, 10.0)
    trajectories = 2 * n * args.num_pairs * args.num_trajectories  # of an iteration
    run = Run(
        args,
        exchange,
        strip_module(args.env_id),
        total=args.total_iterations,
        units_per_iteration=trajectories,
        main_metric="charts/return_last_100",
        finite=("charts/episodic_return", "charts/perturbed_return"),
        unit="trajectories",
        speed="charts/trajectories_per_second",
        about=f"{args.algorithm}, {d} parameters, mu {mu:.3g}, eta {eta:.3g}",
    )
    torch.set_num_threads(1)  # for so small networks

    # All agents have the same policy at the start, and remain equal because they take equal steps
    exchange.broadcast_networks([policy.network])
    blocks = split_parameters(args, policy)
    num_bytes = max(math.ceil((len(block) + 1) / 8) for block in blocks)  # of a message
    everybody = torch.ones(n, n, dtype=torch.bool)  # reads what everybody sends
    networks = [copy.deepcopy(policy.network) for _ in range(2 * len(held))]
    stacked = Stacked(networks)

    # Resume: what a checkpoint holds of each agent; the rest follows from the settings, for what is
    # random is keyed by (seed, agent, iteration)
    last_returns = [deque(maxlen=100) for _ in held]
    statistics = [torch.zeros(1 + 2 * len(policy.obs_mean), dtype=torch.double) for _ in held]
    steps = [torch.zeros((), dtype=torch.long) for _ in held]  # in environments
    bits = torch.zeros(2, dtype=torch.long)  # sent by all agents: votes, statistics
    state = {
        "policy": [policy] * len(held),
        "last_returns": last_returns,
        "statistics": statistics,
        "steps": steps,
        "bits": [bits] * len(held),
    }
    run.restore(state)
    envs = Envs(args, held, run.iteration)
    if args.eval_episodes and run.misses_evaluation():
        run.log_evaluation(evaluate_agents(args, policy, held))

    for iteration in run.iterations():
        eta_t = eta / math.sqrt(1 + args.eta_decay * (iteration - 1))

        # Perturbation: each agent's signs on its block of the parameters, 0 elsewhere
        parameters = communicators.flatten(policy.network)  # [d]
        signs = [draw_signs(args, i, iteration, len(blocks[i])) for i in held]
        for k, i in enumerate(held):
            perturbed = parameters.clone()
            perturbed[blocks[i]] += mu * signs[k]
            communicators.unflatten(parameters, networks[2 * k])
            communicators.unflatten(perturbed, networks[2 * k + 1])
        stacked.read()

        # Rollout: fresh episodes of both policies for every pair
        returns, lengths, sums = rollout(args, envs, stacked, policy, iteration, run)

        # Votes: the panel compares the batches of each pair, and the majority of answers counts
        votes = []
        panel = []
        for k, i in enumerate(held):
            seed = derive_seed(args.seed, i, iteration, ANSWERS)
            generator = torch.Generator().manual_seed(seed)
            answers, differences = draw_answers(returns[k], args, scale, generator)
            if args.human:
                clips = envs.list_clips(k)
                folder = run.folder / "clips"
                answers = collect_answers(clips, folder, f"{iteration}_agent_{i}", generator)
            votes.append(count_votes(answers, generator))
            panel.append(describe_panel(answers, differences, votes[k]))
        run.tick("panel")

        # Communication: signs and votes, packed as bits; whoever has them can take the step
        messages = [pack(signs[k], votes[k], num_bytes) for k in range(len(held))]
        received, _ = exchange.round(messages)  # of all agents
        bits[0] += sum(len(block) + 1 for block in blocks)
        exchange.count_bytes(everybody)

        # Update: along each perturbation, or against it
        direction = combine(received, blocks, d)
        if args.algorithm == "fedavg":
            direction /= n
        communicators.unflatten(parameters + eta_t * direction, policy.network)

        # Statistics for normalisation, in iterations 1, 2, 4, 8, ...: few numbers, rarely. The
        # first ones make inputs alike in size; later ones must not change what has been learned
        for k in range(len(held)):
            steps[k] += lengths[k].sum()
            if args.norm_obs:
                statistics[k] += sums[k]
        if args.norm_obs and iteration.bit_count() == 1:
            received, _ = exchange.round(statistics)
            set_normalisation(policy, received, keep_policy=iteration > 1)
            bits[1] += n * len(statistics[0]) * 64
            exchange.count_bytes(everybody)
        run.tick("exchange")

        # A policy that is not finite has no return, which marks the agents as diverged
        if not is_finite(policy):
            returns.fill_(torch.nan)

        # Metrics: declared scalars, one row per agent
        rows = []
        for k in range(len(held)):
            unperturbed = returns[k, 0].flatten().tolist()
            last_returns[k].extend(unperturbed)
            row = {
                "charts/episodic_return": mean(unperturbed),
                "charts/episodic_length": lengths[k, 0].double().mean().item(),
                "charts/perturbed_return": returns[k, 1].mean().item(),
                "charts/return_last_100": mean(last_returns[k]),
                "charts/environment_steps": steps[k].item(),
            }
            rows.append(row | panel[k])
        scalars = {
            "charts/learning_rate": eta_t,
            "charts/trajectories": iteration * trajectories,
            "communication/bits": bits[0].item(),
            "communication/statistics_bits": bits[1].item(),
            "communication/rounds": iteration,
        }
        run.log(rows, communicators.uniform(n), torch.full((n, n), torch.nan), scalars)

        # Evaluation
        if args.eval_episodes and run.evaluates():
            run.log_evaluation(evaluate_agents(args, policy, held))

        # Checkpoint; every run, interrupted or not, starts its environments anew here
        if run.saves():
            check_equality(exchange, policy)
            run.save(state)
            envs.close()
            envs = Envs(args, held, iteration)

    # Weights, and the evaluation in gymnasium's environment
    envs.close()
    for i in held:
        run.save_weights(f"agent_{i}", policy)
    if args.eval_episodes and not run.interrupted:
        run.log_evaluation(evaluate_agents(args, policy, held))
    total_steps = sum(run.latest.get("charts/environment_steps", [0]))
    return run.finish(
        env_backend=choose_backend(args),
        parameters=d,
        trajectories=run.iteration * trajectories,
        communication_bits=bits[0].item(),
        statistics_bits=bits[1].item(),
        timesteps_per_agent=round(total_steps / n),
        agent_steps_per_second=total_steps / max(run.train_seconds, 1e-9),
    )


def is_finite(policy: Policy) -> bool:
    """Whether a policy's parameters and normalisation are finite."""
    return bool(communicators.flatten(policy).isfinite().all())


def describe_panel(answers: Tensor, differences: Tensor, vote: int) -> dict[str, float]:
    """What the panel did, for the log: the learner knows the vote alone.

    answers: [pairs, evaluators]; differences: of mean returns [pairs].
    """
    correct = answers * differences.sign()[:, None]  # 0 where returns or answers are equal
    return {
        "panel/vote": vote,
        "panel/agreement": (answers == vote).double().mean().item(),
        "panel/accuracy": (correct[correct != 0] > 0).double().mean().item(),
        "panel/difference": differences.mean().item(),
    }


def check_equality(exchange: Exchange, policy: Policy) -> None:
    """End where ranks have come apart: equal steps from an equal start must give equal policies."""
    digest = zlib.crc32(communicators.flatten(policy).numpy().tobytes())
    different_ranks = exchange.find_different_ranks(digest)
    if different_ranks:
        ranks = ", ".join(map(str, different_ranks))
        communicators.stop(f"the policies of ranks {ranks} differ from rank 0's; start all alike")


# --- a person as the panel ---


def collect_answers(clips: list, folder: Path, name: str, generator: torch.Generator) -> Tensor:
    """A person's answers: for each pair, a film of both batches side by side, and a question.

    clips: of each pair the frames of both batches. Sides are drawn, so that preferring one side
    teaches nothing. Returns [pairs, 1]: 1 for the second batch, -1 for the first, 0 for neither.
    """
    answers = torch.zeros(len(clips), 1, dtype=torch.long)
    print()  # the progress line is still open
    for number, (before, after) in enumerate(clips):
        swapped = bool(torch.randint(2, (), generator=generator))
        sides = (after, before) if swapped else (before, after)
        path = folder / f"{name}_pair_{number}.gif"
        write_clip(join_clips(*sides), path)
        question = (
            f"{path}, pair {number + 1} of {len(clips)}: left (l), right (r), equal (Enter)? "
        )
        answer = read_answer(question)
        if answer:
            prefers_right = answer == "r"
            answers[number] = 1 if prefers_right != swapped else -1
    return answers


def read_answer(question: str) -> str:
    """l, r or nothing, from the terminal."""
    while True:
        try:
            answer = input(question).strip().lower()[:1]
        except EOFError:
            communicators.stop("--human needs answers in the terminal; go on with --resume")
        if answer in ("", "l", "r"):
            return answer


def join_clips(left: list[np.ndarray], right: list[np.ndarray]) -> list[np.ndarray]:
    """Two films side by side, with a grey line between them; the shorter one's end stands still.

    left, right: frames [height, width, 3] uint8.
    """
    line = np.full((left[0].shape[0], 4, 3), 128, dtype=np.uint8)
    frames = []
    for k in range(max(len(left), len(right))):
        pair = left[min(k, len(left) - 1)], line, right[min(k, len(right) - 1)]
        frames.append(np.concatenate(pair, axis=1))
    return frames


def write_clip(frames: list[np.ndarray], path: Path) -> None:
    """Frames [height, width, 3] uint8 as a GIF that repeats."""
    images = [Image.fromarray(frame) for frame in frames]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        images[0].save(path, save_all=True, append_images=images[1:], duration=70, loop=0)
    except OSError as error:
        communicators.stop(f"{path}: {error}; go on with --resume")


# --- the environments ---


@functools.cache
def find_horizon(env_id: str) -> int:
    """The most steps of an episode by default: the task's, but 250 where it has none, or 1,000 and
    more."""
    import_mujoco()
    env = gym.make(env_id, disable_env_checker=True)
    env.close()
    steps = env.spec.max_episode_steps
    return steps if steps and steps < 1000 else 250


def make_env(env_id: str, horizon: int | None, **options) -> gym.Env:
    """One environment of gymnasium. horizon: most steps of an episode; options: of gym.make."""
    import_mujoco()
    horizon = horizon or find_horizon(env_id)
    return gym.make(env_id, max_episode_steps=horizon, disable_env_checker=True, **options)


# Tasks of envpool whose dynamics, returns and ends a test compares with gymnasium's
ENVPOOL_IDS = ("CartPole-v1", "HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Swimmer-v5")


def choose_backend(args: Args) -> str:
    """The environment backend that this run uses; only gymnasium's can be drawn."""
    if args.env_backend != "auto":
        return args.env_backend
    if args.human or not find_spec("envpool"):
        return "gymnasium"
    if args.env_id == "CartPole-v1":  # so cheap that threads cost more than they save
        return "gymnasium"
    return "envpool" if args.env_id in ENVPOOL_IDS else "gymnasium"


class Envs:
    """An environment for each episode of an iteration: rows [agents, 2, pairs, trajectories].

    Seeds are keyed by (seed, agent, environment, checkpoint), so that nothing depends on which
    process holds which agent. An environment whose episode has ended waits for the others, without
    a step, so that its next episode does not depend on theirs.
    """

    def __init__(self, args: Args, agents: range, checkpoint: int):
        self.agents = agents
        env = make_env(args.env_id, args.horizon)
        self.horizon = env.spec.max_episode_steps
        self.actions = Actions(args, env.action_space)
        env.close()
        self.pairs = args.num_pairs
        self.trajectories = args.num_trajectories
        seeds = []
        for agent in agents:
            for number in range(2 * self.pairs * self.trajectories):
                seeds.append(derive_seed(args.seed, agent, number, checkpoint, ENVIRONMENTS))
        self.pool = None
        self.envs = []
        self.films = args.human
        if choose_backend(args) == "envpool":
            make = importlib.import_module("envpool").make
            options = {"num_envs": len(seeds), "seed": seeds, "max_episode_steps": self.horizon}
            # Its first reset warns about the precision of bounds that nothing here reads
            with warnings.catch_warnings(action="ignore"):
                self.pool = make(args.env_id, env_type="gymnasium", **options)
                self.pool.reset()
        else:
            options = {"render_mode": "rgb_array"} if self.films else {}
            self.envs = [make_env(args.env_id, args.horizon, **options) for _ in seeds]
            self.seeds = seeds

    def reset(self) -> np.ndarray:
        """Begin an episode in every environment. Returns observations [rows, obs], float32."""
        if self.pool:
            return self.pool.reset()[0].astype(np.float32)
        self.frames = [[] for _ in self.envs]
        self.lengths = [0] * len(self.envs)
        obs = [env.reset(seed=seed)[0] for env, seed in zip(self.envs, self.seeds, strict=True)]
        self.seeds = [None] * len(self.envs)  # later episodes follow from the first
        return np.array(obs, dtype=np.float32)

    def step(self, rows: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, ...]:
        """Step some environments. Returns their observations, rewards, and whether they ended."""
        if self.pool:
            rows = rows.astype(np.int32)
            obs, rewards, terminations, truncations, _ = self.pool.step(actions, rows)
            return obs, rewards, terminations | truncations
        obs = []
        rewards = []
        ended = []
        for row, action in zip(rows, actions, strict=True):
            env = self.envs[row]
            next_obs, reward, terminated, truncated, _ = env.step(action)
            obs.append(next_obs)
            rewards.append(np.asarray(reward).item())  # of your own task also [1]
            ended.append(terminated or truncated)
            # Films show every third step and the last one
            if self.films and (self.lengths[row] % 3 == 0 or ended[-1]):
                picture = env.render()[::2, ::2]  # at half its size
                self.frames[row].append(picture.copy())  # a view would keep the whole picture
            self.lengths[row] += 1
        return np.array(obs), np.array(rewards), np.array(ended)

    def list_clips(self, k: int) -> list[tuple[list, list]]:
        """The frames of both batches of each pair, of the k-th agent held."""
        clips = []
        for pair in range(self.pairs):
            clips.append((self.join_episodes(k, 0, pair), self.join_episodes(k, 1, pair)))
        return clips

    def join_episodes(self, k: int, policy: int, pair: int) -> list[np.ndarray]:
        """The frames of a batch, one episode after the other."""
        first = ((2 * k + policy) * self.pairs + pair) * self.trajectories
        return list(itertools.chain(*self.frames[first : first + self.trajectories]))

    def close(self) -> None:
        """Free the environments."""
        if self.pool:
            self.pool.close()
        for env in self.envs:
            env.close()


# --- evaluation ---


def evaluate(
    args: Args,
    policy: Policy,
    env_id: str,
    levels: list[int],
    seed: int,
    greedy: bool = False,
    watch: Callable | None = None,
) -> np.ndarray:
    """One episode in gymnasium's environment for each level, a seed: their returns [levels].

    Actions are sampled, or the most probable ones (greedy). watch: receives the first environment
    after its reset and after each step, to draw it. A policy that is not finite has no return: NaN.
    """
    if not is_finite(policy):
        return np.full(len(levels), np.nan)
    options = {"render_mode": "rgb_array"} if watch else {}
    envs = [make_env(env_id, args.horizon, **options) for _ in levels]
    actions = Actions(args, envs[0].action_space)
    obs = [env.reset(seed=level)[0] for env, level in zip(envs, levels, strict=True)]
    if watch:
        watch(envs[0])
    returns = np.zeros(len(envs))
    running = list(range(len(envs)))
    generator = torch.Generator().manual_seed(seed)
    while running:
        batch = np.array([obs[k] for k in running], dtype=np.float32)
        outputs = policy(torch.from_numpy(batch)).numpy()
        if not np.isfinite(outputs).all():  # finite parameters can overflow
            return np.full(len(levels), np.nan)
        noise = 0.0
        if not greedy:
            noise = actions.draw_noise(len(running), generator=generator)
        chosen = actions.choose(outputs, noise)
        for k, action in zip(list(running), chosen, strict=True):
            obs[k], reward, terminated, truncated, _ = envs[k].step(action)
            returns[k] += np.asarray(reward).item()
            if watch and k == 0:
                watch(envs[0])
            if terminated or truncated:
                running.remove(k)
                envs[k].close()
    return returns


def list_test_levels(args: Args) -> list[int]:
    """The seeds of the levels of an evaluation."""
    return [derive_seed(args.seed, level, TEST_EPISODES) for level in range(args.eval_episodes)]


def evaluate_agents(args: Args, policy: Policy, held: range) -> list[dict]:
    """The policy, which all agents have in common: of each agent held {task: {column: [episodes]}}.

    Sampled actions are what agents train with; the most probable ones are played on the same
    levels.
    """
    levels = list_test_levels(args)
    seed = derive_seed(args.seed, TEST_ACTIONS)
    columns = {
        "return": evaluate(args, policy, args.env_id, levels, seed),
        "greedy_return": evaluate(args, policy, args.env_id, levels, seed, greedy=True),
    }
    return [{strip_module(args.env_id): columns}] * len(held)


# --- checks of arguments ---


def check_args(args: Args) -> None:
    """What types cannot express. `refuse` ends with one line: flag, value and what is valid."""
    if args.device == "auto":
        args.device = "cpu"
    if args.device != "cpu":
        refuse(args, "device", "must be cpu: the networks are too small for a GPU")
    communicators.refuse_communicator(args, "all votes count alike, for all agents")
    world_size = communicators.get_world_size()
    if args.algorithm == "central":  # one agent that has the pairs of all
        if world_size > 1:
            refuse(args, "algorithm", "is one agent, in one process")
        args.num_pairs *= args.num_agents
        args.num_agents = 1
    if any(size < 1 for size in args.hidden_sizes):
        refuse(args, "hidden_sizes", "must be at least 1")
    if args.human:
        if world_size > 1:
            refuse(args, "human", "answers in one process, without torchrun")
        args.num_evaluators = 1
        args.save_every = 1
    check_env(args)
    d = len(communicators.flatten(make_policy(args).network))
    if args.algorithm == "par" and args.num_agents > d:
        refuse(args, "num_agents", f"must be at most {d}, a parameter for each")
    if args.human:
        problem = find_drawing_problem(args.env_id)
        if problem:
            refuse(args, "human", f"{args.env_id} cannot be drawn here; {problem}")


def check_env(args: Args) -> None:
    """The task can be made, is continuous or CartPole, and is in the backend."""
    valid = "must be a task of vectors with continuous actions, as MuJoCo's, or CartPole-v1"
    try:
        problem = find_env_problem(make_env(args.env_id, args.horizon), args.env_id)
    except Exception as error:  # unknown, maybe with a suggestion, or a package is missing
        problem = f"cannot be used: {communicators.first_line(error)}"
    if problem:
        refuse(args, "env_id", f"{valid}; {problem}")
    if args.env_backend == "envpool":
        if not find_spec("envpool"):
            refuse(args, "env_backend", "envpool is not installed")
        if args.env_id not in ENVPOOL_IDS:
            tasks = ", ".join(ENVPOOL_IDS)
            refuse(args, "env_backend", f"is for {tasks}; choose auto or gymnasium")
        if args.human:
            refuse(args, "env_backend", "cannot be filmed; choose auto or gymnasium")
    args.env_backend = choose_backend(args)  # the settings say which


def find_env_problem(env: gym.Env, env_id: str) -> str:
    """What makes an environment unusable here, nothing ("") if it is not."""
    observations = env.observation_space
    if not isinstance(observations, gym.spaces.Box) or len(observations.shape) != 1:
        return f"it shows no vectors, but {observations}"
    is_cart_pole = env.spec.id.startswith("CartPole-")
    is_list = isinstance(env.action_space, gym.spaces.Box) and len(env.action_space.shape) == 1
    if not is_cart_pole and not (is_list and env.action_space.dtype.kind == "f"):
        return f"its actions are {env.action_space}"
    if env.spec.id != strip_module(env_id):  # the panel's scale and envpool know full names only
        return f"{env_id} is {env.spec.id}"
    env.reset(seed=0)
    _, reward, *_ = env.step(env.action_space.sample())  # an error is a problem, too
    if np.size(reward) != 1 or reward is None:
        return f"its rewards are {reward}"
    return ""


# Draws one picture of a task
DRAW = """
import sys
import gymnasium
env = gymnasium.make(sys.argv[1], render_mode="rgb_array")
env.reset()
env.render()
"""


def find_drawing_problem(env_id: str) -> str:
    """What keeps gymnasium's renderer from drawing the task, nothing ("") if it draws."""
    if sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # draws without a screen
    # In a process of its own, because without a screen OpenGL may abort the process. It imports a
    # task of your own from where this one has
    command = [sys.executable, "-c", DRAW, env_id]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run(command, env=env, capture_output=True, text=True, errors="replace")
    if child.returncode == 0:
        return ""
    renderer = os.environ.get("MUJOCO_GL", "not set")
    lines = child.stderr.strip().splitlines() or [f"exit code {child.returncode}"]
    return f"MUJOCO_GL, which is {renderer}, may be egl, osmesa or glfw; {lines[-1]}"


if __name__ == "__main__":
    may_change = ("eval_episodes", "total_iterations")
    main(communicators.parse_args(Args, check_args, may_change=may_change))
