"""What PRPO's scripts share: communicators, exchange between agents, and what surrounds training.

A communicator C is a row-stochastic matrix [agents, agents]. Row i says which peers agent i's
reference policy is built from, C_i pi = sum_j c_ij pi_j: agent i listens to agent j where c_ij > 0,
and column j shows agent j's listeners. Equation, example, definition and remark numbers are those
of the PRPO paper.

Contents: 1 mathematics (communicators, who may listen to whom, policies, parameters), 2 exchange,
3 arguments, 4 the run, 5 speed.

There is no algorithm, no environment and no network here, and nothing here calls back into a
script, but for its `make_communicator` and its checks of arguments.
"""

import atexit
import contextlib
import copy
import csv
import dataclasses
import datetime
import functools
import hashlib
import importlib.util
import inspect
import io
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import time
import typing
import warnings
import zipfile
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal, NamedTuple, NoReturn

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import tyro
from safetensors import SafetensorError
from safetensors.torch import save_file
from scipy.special import stdtrit
from torch import Tensor

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None

MIXTURES = ("arithmetic", "geometric")
KL_DIRECTIONS = ("forward", "reverse")
# Up to this number, logs hold all pairs of agents; beyond it, only what is linear in the number
FEW_AGENTS = 16
# The tool that plays the agents of a run
PLAY = Path(__file__).parent / "benchmark" / "play.py"

# The packages whose versions a summary records, where they are imported
PACKAGES = (
    "torch",
    "numpy",
    "gymnasium",
    "minigrid",
    "ale-py",
    "mujoco",
    "envpool",
    "transformers",
    "peft",
)

# --- 1. mathematics ---
# Communicators: every constructor returns a detached float32 tensor [agents, agents] with rows on
# the simplex


def identity(num_agents: int) -> Tensor:
    """C = I: isolated training (Example 2 with p = 1). Returns [agents, agents]."""
    return torch.eye(num_agents)


def uniform(num_agents: int) -> Tensor:
    """c_ij = 1/n: the paper's classic average. Returns [agents, agents]."""
    return torch.full((num_agents, num_agents), 1.0 / num_agents)


def self_preferred(num_agents: int, self_preference: float) -> Tensor:
    """Example 2: c_ii = p and c_ij = (1 - p) / (n - 1). A single agent gets C = [[1]].

    Returns [agents, agents]. Raises ValueError if p is outside [0, 1].
    """
    if not 0.0 <= self_preference <= 1.0:
        raise ValueError(f"self-preference {self_preference} is outside [0, 1]")
    self_weight = self_preference if num_agents > 1 else 1.0
    peer_weight = (1.0 - self_preference) / max(num_agents - 1, 1)
    return torch.full((num_agents, num_agents), peer_weight).fill_diagonal_(self_weight)


def similarity(log_probs: Tensor) -> Tensor:
    """Example 3: c_ij proportional to the sum over S_ref of <pi_i(.|s), pi_j(.|s)>, row-normalised.

    log_probs: [agents, states, actions], every agent's log-probabilities on the *public* reference
    states S_ref. Returns [agents, agents].
    """
    probs = log_probs.detach().double().exp().nan_to_num(nan=0.0)
    probs = probs.flatten(1)  # [agents, states * actions]
    return _normalise_rows(probs @ probs.T)


def reward(returns: Tensor) -> Tensor:
    """Example 4: c_ij = r_j / sum_k r_k, the same row for every agent.

    returns: [agents], mean whole-episode unclipped returns; NaN, for an agent that has never had
    data, is replaced by the mean of the others. A negative return counts as 0 (with a warning); if
    no return is positive, the rows are uniform. Returns [agents, agents].
    """
    returns = _fill_unknown(returns)
    if (returns < 0).any():
        message = (
            "the reward communicator counts negative mean returns as 0; "
            "softmax-reward and rank-reward rank them"
        )
        warnings.warn(message, stacklevel=2)
    return _same_rows(returns.clamp(min=0.0))


def softmax_reward(returns: Tensor, temperature: float = 1.0) -> Tensor:
    """Example 4 for signed rewards: c_ij = softmax_j(r_j / (temperature * spread)).

    returns: [agents], NaN as in `reward`. The spread is the standard deviation of all that are
    known, so that the scale of a task's rewards does not matter; equal returns give uniform rows.
    Returns [agents, agents].
    """
    reported = ~returns.isnan()
    returns = _fill_unknown(returns)
    # Scaled first, so that the spread stays finite
    returns = returns / returns.abs().max().clamp(min=torch.finfo(returns.dtype).tiny)
    spread = returns[reported].std(correction=0) if reported.any() else 0.0
    scores = torch.zeros_like(returns)
    if spread > 1e-9:
        scores = returns / spread
    return _softmax_rows(scores, temperature)


def rank_reward(returns: Tensor) -> Tensor:
    """Example 4 for signed rewards: weights proportional to the rank of r_j.

    The worst rank is 1, the best n; ties share their mean. returns: [agents]; NaN, as in `reward`,
    gets the mean rank of the others. Returns [agents, agents].
    """
    reported = returns[~returns.isnan()]
    below = (reported[None] < returns[:, None]).sum(1)
    ties = (reported[None] == returns[:, None]).sum(1)
    ranks = below + (ties + 1) / 2
    ranks[returns.isnan()] = (len(reported) + 1) / 2
    return _normalise_rows(ranks.double().expand(len(ranks), -1))


def best(returns: Tensor, usable: Tensor | None = None, topology: str = "full") -> Tensor:
    """One-hot on the highest return: every agent listens to the best one only.

    With averages this is the exploit step of population-based training (Jaderberg et al., 2017),
    with references it is kickstarting (Schmitt et al., 2018). On a ring it is the best one of an
    agent and its two neighbours, because nobody knows whether the others are usable. Agents with
    the same highest return each listen to themselves, and the others share their weight evenly
    among these. returns: [agents], NaN for no report, which is never the best; usable: bool
    [agents], who may be the best (None: all). An agent with nobody to choose from has the row of
    the identity. Returns [agents, agents].
    """
    n = len(returns)
    returns = returns.detach().double()
    candidates = ~returns.isnan().expand(n, n)
    if usable is not None:
        candidates = candidates & usable
    if topology == "ring":
        candidates = candidates & ring(n)
    scores = returns.expand(n, n).masked_fill(~candidates, -math.inf)
    is_best = (scores == scores.max(1, keepdim=True).values) & candidates
    oneself = torch.eye(n, dtype=torch.double)
    weights = torch.where(is_best.diagonal()[:, None], oneself, is_best.double())
    return _normalise_rows(weights, oneself)


def relative_gain(gains: Tensor, temperature: float = 1.0) -> Tensor:
    """FGRPO's adaptive weights: c_ij = softmax_j(g_j / temperature), the same row for every agent.

    gains: [agents], see `remember`. They are clipped to [-1, 1], so that inflated gains cannot
    attract weight; NaN counts as 0, an unchanged return. Returns [agents, agents].
    """
    gains = gains.detach().double().nan_to_num(nan=0.0)
    return _softmax_rows(gains.clamp(-1, 1), temperature)


def samples(numbers: Tensor) -> Tensor:
    """c_ij = m_j / sum_k m_k: each agent by its amount of data, the same row for every agent.

    With averages of parameters this is FedAvg (McMahan et al., 2017), and FedRLHF's rule. numbers:
    [agents], environment steps or completions that counted since the last round; what is not finite
    counts as 0. If no agent has any, the rows are uniform. Returns [agents, agents].
    """
    numbers = numbers.detach().double()
    numbers = torch.where(numbers.isfinite(), numbers, 0.0)
    return _same_rows(numbers.clamp(min=0.0))


def surrogate(gains: Tensor, temperature: float = 1.0) -> Tensor:
    """c_ij = softmax_j(10 L_i(pi_j) / temperature): weights from agent i's *own* data.

    gains: [agents, agents], row i is L_i of `surrogate_gains`, in standard deviations of the
    advantage, of which the temperature counts tenths; c_ii belongs to L_i = 0 of the policy that
    played. NaN, for a peer that is invalid, gets weight 0; a row of NaN becomes uniform. No agent
    reports a return here, so a false report cannot attract weight. Returns [agents, agents].
    """
    scores = 10 * gains.detach().double()
    scores = scores.nan_to_num(nan=-math.inf, posinf=-math.inf)
    return _softmax_rows(scores, temperature)


def from_csv(path: str, num_agents: int) -> Tensor:
    """A matrix from a file: a row of comma-separated weights for each agent, # begins a comment.

    Returns [agents, agents]. Raises ValueError if it is not finite, row-stochastic and of this
    size, and OSError if the file cannot be read.
    """
    communicator = read_table(path)
    _check_matrix(communicator, num_agents)
    return _normalise_rows(communicator)


def read_table(path: str) -> Tensor:
    """Numbers in a local file, separated by "," or, as some spreadsheets do, by ";".

    # begins a comment. Returns float64 [rows, columns]. Raises ValueError and OSError if it cannot
    be read.
    """
    # Spreadsheets also write a byte-order mark
    with open(os.path.expanduser(path), encoding="utf-8-sig") as file:
        text = "\n".join(line.partition("#")[0] for line in file)
    if ";" in text:  # then a comma is for decimals
        text = text.replace(",", ".").replace(";", ",")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a file without numbers, whose size tells
        return torch.from_numpy(np.loadtxt(io.StringIO(text), delimiter=",", ndmin=2))


def _check_matrix(matrix: Tensor, num_agents: int, tolerance: float = 1e-6) -> None:
    """ValueError if it is not finite, row-stochastic and of this size."""
    if matrix.shape != (num_agents, num_agents):
        size = " x ".join(map(str, matrix.shape))
        raise ValueError(f"has {size} weights, not {num_agents} x {num_agents}")
    row_errors = (matrix.sum(1) - 1).abs()
    valid = (matrix >= 0).all(1) & (row_errors < tolerance)
    if not valid.all():
        first = valid.long().argmin()
        problem = f"has a row that is not on the simplex, agent {first}'s"
        raise ValueError(f"{problem}: weights must be at least 0 and sum to 1")


def check_matrix(args: "RunArgs", communicator: Tensor, usable: Tensor | None = None) -> None:
    """Refuse what is no communicator: not [agents, agents], not finite, negative, or of rows whose
    sums are more than 1e-4 from 1.

    Raises SystemExit, behind one line. usable: bool [agents], in a round (None: at the start, where
    every row is known). In a round a row may have NaN if its agent has no usable snapshot, or if it
    is held elsewhere: what such a row is computed from is unknown here.
    """
    n = args.num_agents
    rows = communicator.detach().double()
    if usable is not None and rows.shape == (n, n):
        has_nan = rows.isnan().any(1)
        is_held = torch.zeros(n, dtype=torch.bool)
        is_held[list(find_held(n))] = True
        if exchange_of_launcher is not None:  # it knows which agents are held
            is_held[:] = has_nan.all()
        unknown = has_nan & ~(usable & is_held)
        rows = torch.where(unknown[:, None], torch.eye(n, dtype=torch.double), rows)
    try:
        _check_matrix(rows, n, tolerance=1e-4)
    except ValueError as error:
        refuse(args, "communicator", str(error), any_rank=usable is not None)


def write_matrix(matrix: Tensor) -> str:
    """A matrix [rows, columns] as exact text: spaces between weights, semicolons between rows."""
    return "; ".join(" ".join(map(repr, row)) for row in matrix.tolist())


def load_matrix(args: "RunArgs") -> Tensor:
    """The matrix of --communicator FILE.csv, as the file was at the start of the run.

    Returns [agents, agents]. Ends with one line if there is no such file or matrix.
    """
    if not args.communicator.endswith(".csv"):
        valid = "is neither a communicator of this script, see --help, nor the CSV file of C"
        refuse(args, "communicator", valid)
    try:
        if not args.communicator_matrix:
            return from_csv(args.communicator, args.num_agents)
        communicator = read_matrix(args.communicator_matrix)
        _check_matrix(communicator, args.num_agents)
    except (OSError, ValueError) as error:
        refuse(args, "communicator", getattr(error, "strerror", None) or str(error))
    return communicator.float()


@functools.lru_cache(maxsize=4)
def read_matrix(text: str) -> Tensor:
    """The inverse of `write_matrix`, float64 [rows, columns]; not to be written to."""
    rows = [[float(weight) for weight in row.split()] for row in text.split(";")]
    return torch.tensor(rows, dtype=torch.float64)


def _same_rows(weights: Tensor) -> Tensor:
    """The same normalised row for every agent; weights: [agents], finite and at least 0."""
    # Scaled first, so that the sum stays finite
    weights = weights / weights.max().clamp(min=torch.finfo(weights.dtype).tiny)
    return _normalise_rows(weights.expand(len(weights), -1))


def _softmax_rows(scores: Tensor, temperature: float) -> Tensor:
    """softmax(scores / temperature); a row of -inf is uniform.

    scores: [agents], the same for every row, or [agents, agents].
    """
    if not temperature > 0:
        raise ValueError(f"temperature {temperature} must be positive")
    best = scores.max(-1, keepdim=True).values.nan_to_num(neginf=0.0)
    weights = ((scores - best) / temperature).exp()
    return _normalise_rows(weights.expand(scores.shape[-1], -1))


def _normalise_rows(weights: Tensor, fallback: Tensor | None = None) -> Tensor:
    """Rows divided by their sums.

    A row that sums to 0 becomes the normalised row of `fallback` (default: uniform).
    """
    if fallback is None:
        fallback = torch.ones_like(weights)
    weights = torch.where(weights.sum(1, keepdim=True) > 0, weights, fallback)
    return (weights / weights.sum(1, keepdim=True)).float()


# What communicators are computed from: returns and gains


def bound_returns(returns: Tensor) -> Tensor:
    """Reported returns, bounded by ten times the usual magnitude of the other reports.

    returns: [agents], NaN for an agent without data. A value beyond ten times the median magnitude
    of the *other* agents' reports is clipped to that, so that a report of 1e30 has the weight of at
    most ten ordinary ones; where that median is 0, the mean magnitude of the others replaces it.
    Where all others report 0, or nothing, there is no scale to compare with, and the report stays:
    of (0, 0, r) Example 4 makes the same row for every positive r. Returns [agents], double.
    """
    returns = returns.detach().double()
    bounded = returns.clone()
    for j in range(len(returns)):
        others = torch.cat((returns[:j], returns[j + 1 :]))
        magnitudes = others[~others.isnan()].abs()
        if not magnitudes.any():
            continue
        scale = magnitudes.quantile(0.5)
        if scale == 0:
            # Divided first: the sum of huge numbers may be infinite
            scale = (magnitudes / len(magnitudes)).sum()
        bounded[j] = returns[j].clamp(-10 * scale, 10 * scale)
    return bounded


def _fill_unknown(returns: Tensor) -> Tensor:
    """Returns [agents], double, with NaN replaced by the mean of the others (0 if all are NaN)."""
    returns = returns.detach().double()
    reported = returns[~returns.isnan()]
    scale = reported.abs().max() if len(reported) else 0.0
    substitute = 0.0
    if scale:
        # Scaled first, so that the mean stays finite, and that of equal returns is exact
        substitute = float((reported / scale).mean() * scale)
    return returns.nan_to_num(nan=substitute)


def remember(record: Tensor, returns: list[float]) -> Tensor:
    """An agent's record [mean return, gain, baseline], NaN at first, after a round of `returns`.

    The gain over the agent's own history is g = (r - b) / (|b| + se) in [-1, 1]: r is the mean of
    these returns, se its standard error, and b the baseline, an exponential average of the earlier
    means, which is updated only afterwards. So the scale of the rewards does not matter. The first
    gain is 0, and so is that of a round without a finite return: the last mean still shows how good
    an agent is, but the last gain does not show how much better it has become.
    """
    finite_returns = np.array([value for value in returns if math.isfinite(value)])
    last_mean, _, baseline = record.tolist()
    if not len(finite_returns):
        return record.new_tensor([last_mean, 0.0, baseline])
    mean_return = finite_returns.mean()
    if math.isnan(baseline):
        baseline = mean_return
    ddof = 1 if len(finite_returns) > 1 else 0
    standard_error = finite_returns.std(ddof=ddof) / math.sqrt(len(finite_returns))
    scale = abs(baseline) + standard_error
    difference = mean_return - baseline
    gain = np.sign(difference)
    if abs(difference) < scale:
        gain = difference / scale
    return record.new_tensor([mean_return, gain, baseline + 0.2 * difference])


def update_means(means: Tensor, returns: list[list[float]]) -> None:
    """Close an interval: each agent's mean return in it, in place; an agent without one keeps its
    last.

    means: [agents held], NaN at first; returns: of each agent held, since the last round; cleared.
    """
    for k, of_agent in enumerate(returns):
        finite = [value for value in of_agent if math.isfinite(value)]
        if finite:
            means[k] = np.mean(finite)
        of_agent.clear()


def surrogate_gains(
    log_probs: Tensor, behaviour: Tensor, advantages: Tensor, max_ratio: float = 10.0
) -> Tensor:
    """L_i(pi_j) = E[min(rho_j, max_ratio) A], over the actions of agent i's last rollout.

    rho_j = pi_j / pi_i. By the performance difference lemma J(pi_j) - J(pi_i) = E[A_i(s, a)] over
    the states and actions of pi_j. Over agent i's own states, as in TRPO's surrogate, and its own
    actions, weighted by rho_j, it is what agent i can estimate alone. Advantages are normalised, so
    that the constant ratio rho = 1 has L = 0; the truncation bounds the variance.
    log_probs: [policies, samples], of the actions under the peers; behaviour: [samples], under the
    policy that took them; advantages: [samples]. Returns [policies]; NaN for a policy that is NaN.
    """
    centred = advantages - advantages.mean()
    normalised = centred / (advantages.std(correction=0) + 1e-8)
    ratios = (log_probs - behaviour).exp().clamp(max=max_ratio)
    return (ratios * normalised).mean(-1)


# Who may listen to whom


def find_neighbours(args: "RunArgs") -> Tensor:
    """Who may ever listen to whom.

    Each agent to itself, and to the peers that --communicator FILE and --topology allow.
    Returns a bool mask [agents, agents].
    """
    n = args.num_agents
    oneself = torch.eye(n, dtype=torch.bool)
    if args.communicator == "identity":
        return oneself
    mask = torch.ones(n, n, dtype=torch.bool)
    if args.topology == "ring":
        mask = ring(n)
    if args.communicator_matrix:
        # A weight of 0 in the file excludes that peer for good
        mask = mask & (load_matrix(args) > 0)
    return mask | oneself


def ring(num_agents: int) -> Tensor:
    """The ring topology: each agent listens to itself and its two neighbours.

    Returns a bool mask [agents, agents].
    """
    oneself = torch.eye(num_agents, dtype=torch.bool)
    return oneself | oneself.roll(1, 0) | oneself.roll(-1, 0)


def top_k(communicator: Tensor, k: int) -> Tensor:
    """Each agent and its k heaviest peers; of equal peers, the next ones along the ring.

    communicator: [agents, agents]. Returns a bool mask [agents, agents] with at most k + 1 entries
    in a row.
    """
    n = len(communicator)
    index = torch.arange(n)
    places_ahead = (index[None] - index[:, None]) % n  # of agent j, seen from agent i
    # Along the ring, without oneself
    peers = places_ahead.argsort(dim=1)[:, 1:]  # [agents, agents - 1]
    weights = communicator.gather(1, peers)
    heaviest = weights.argsort(dim=1, descending=True, stable=True)[:, :k]
    oneself = torch.eye(n, dtype=torch.bool)
    return oneself.scatter(1, peers.gather(1, heaviest), True)


def find_senders(communicator: Tensor, listeners: range) -> list[int]:
    """The agents that any of these listens to."""
    rows = communicator[listeners.start : listeners.stop]
    return (rows > 0).any(0).nonzero().flatten().tolist()


def sparsify(communicator: Tensor, mask: Tensor, keep_self: bool = False) -> Tensor:
    """C with zeros outside the neighbourhood `mask` (bool [agents, agents]), rows renormalised.

    keep_self: c_ii is kept, and the neighbours share the rest (an agent without neighbours gets all
    of it). Where the remaining weights sum to 0, they are shared evenly in the neighbourhood.
    Returns [agents, agents].
    """
    communicator = communicator.detach().double()
    mask = mask.double()
    if not keep_self:
        return _normalise_rows(communicator * mask, mask)
    oneself = torch.eye(len(mask), dtype=torch.double)
    peers = mask * (1 - oneself)
    has_no_peers = peers.sum(1, keepdim=True) == 0
    fallback = torch.where(has_no_peers, oneself, peers)
    shared = _normalise_rows(communicator * peers, fallback).double()
    self_weights = communicator.diagonal()[:, None]
    return (self_weights * oneself + (1 - self_weights) * shared).float()


def drop_invalid(communicator: Tensor, valid: Tensor) -> Tensor:
    """C without the peers whose snapshot is missing or invalid, rows renormalised.

    valid: bool [agents]. A row without any weight left becomes the agent's own row of the identity.
    Returns [agents, agents].
    """
    oneself = torch.eye(len(valid), dtype=torch.double)
    return _normalise_rows(communicator.detach().double() * valid, oneself)


def restrict(
    args: "RunArgs", communicator: Tensor, usable: Tensor | None = None, keep_self: bool = False
) -> Tensor:
    """C among the usable ones of the peers that are allowed, of these the --top-k heaviest.

    usable: bool [agents] (None: all); keep_self as in `sparsify`. An agent without any such peer
    listens to itself. Returns [agents, agents].
    """
    n = args.num_agents
    if usable is None:
        usable = torch.ones(n, dtype=torch.bool)
    mask = (find_neighbours(args) & usable) | torch.eye(n, dtype=torch.bool)
    communicator = sparsify(communicator, mask, keep_self)
    if args.top_k:
        communicator = sparsify(communicator, top_k(communicator, args.top_k), keep_self)
    return drop_invalid(communicator, usable)


# What is logged of C


def non_expansion(communicator: Tensor) -> float:
    """The uniform non-expansion coefficient of C, its norm max_i sum_j |c_ij|: at most 1.

    Definition 1, Remark 3.
    """
    return communicator.abs().sum(1).max().item()


def find_compared(neighbours: Tensor) -> Tensor:
    """Whose policies each agent compares with its own, a bool mask [agents, agents].

    neighbours: of `find_neighbours`. Up to FEW_AGENTS agents compare all policies, for the log;
    isolated agents, to whom nothing is sent, have only their own.
    """
    n = len(neighbours)
    if n <= FEW_AGENTS and int(neighbours.sum()) > n:
        return torch.ones_like(neighbours)
    return neighbours


def measure_distances(log_probs: Tensor, compared: Tensor, listeners: range) -> Tensor:
    """The total variation of policies on the public states, [agents, agents]; NaN if not measured.

    log_probs: [agents, states, actions], NaN for agents without a usable snapshot; compared: of
    `find_compared`, of which the listeners' rows count.
    """
    distances = torch.full(compared.shape, torch.nan)
    probs = log_probs.exp()
    for i in listeners:
        differences = (probs[compared[i]] - probs[i]).abs().sum(-1)
        distances[i, compared[i]] = differences.mean(-1) / 2
    return distances


def summarize_communicator(communicator: Tensor, distances: Tensor) -> dict[str, float]:
    """What TensorBoard shows of C and of the distances of many agents; NaN where nothing is known.

    communicator, distances: [agents, agents]; rows of agents of other processes may be NaN.
    """
    is_here = ~communicator.isnan().any(1)
    rows = communicator[is_here]
    oneself = torch.eye(len(communicator), dtype=torch.bool)[is_here]
    peer_weights = rows * ~oneself
    connected = peer_weights > 0
    distances = distances[is_here]
    measured = distances[connected & ~distances.isnan()]
    return {
        "communicator/self_weight": rows[oneself].mean().item(),
        "communicator/peers": connected.sum(1).double().mean().item(),
        "communicator/largest_peer_weight": peer_weights.max().item(),
        "communicator/most_listeners": connected.sum(0).max().item(),
        "distances/mean": measured.mean().item(),
        "distances/largest": measured.max().item() if len(measured) else math.nan,
    }


def summarize_gate(senders: Tensor, weights: Tensor) -> dict[str, float]:
    """What is logged of C_i(s): the mean weight of each agent and its spread over samples.

    senders: bool [agents], row i of C > 0; weights: [senders, samples]. The spread is a standard
    deviation. Of many agents nothing is logged.
    """
    if len(senders) > FEW_AGENTS:
        return {}
    means = torch.zeros(len(senders))
    spreads = torch.zeros(len(senders))
    means[senders] = weights.mean(1).cpu()
    spreads[senders] = weights.std(1, correction=0).cpu()
    summary = {f"gate/weight_{j}": weight for j, weight in enumerate(means.tolist())}
    return summary | {f"gate/spread_{j}": spread for j, spread in enumerate(spreads.tolist())}


# Policies: mixtures and divergences


def gate_by_value(
    weights: Tensor, values: Tensor, returns: Tensor, visited: Tensor | None = None
) -> Tensor:
    """C_i(s): row i of C, each weight times its critic's vote in a state, normalised.

    The critic of peer j votes u_j(s)^2 d_j. u_j(s) in [0, 1] is V_j(s) in a range: Example 4 with
    the return of a state in place of the mean return. d_j is the standard deviation of u_j over the
    listener's samples. The range is that of the listener's own returns, and ends with the median of
    what critics promise at most, if that is more. So a beginner hears most of its peers, no critic
    gains by promising more than most others, and one that promises the same everywhere has no vote.
    weights: [policies], on the simplex; values: [policies, states]; returns: the listener's,
    [samples]; visited: the state of each sample, [samples] (None: each state once). Where nobody
    has a vote in a state, all weights are those of C there. A critic that is NaN in a sample has no
    vote. Returns [policies, states], on the simplex in every state.
    """
    lowest, highest = returns.aminmax()
    promises = values[weights > 0].amax(1)
    highest = torch.fmax(highest, promises.nanmedian())  # more than half of the critics go so far
    # Without a range this is NaN everywhere, and nobody has a vote
    promised = (values.clamp(lowest, highest) - lowest) / (highest - lowest)
    of_samples = promised if visited is None else promised[:, visited]
    spreads = of_samples.std(1, correction=0, keepdim=True)
    spreads = torch.where(spreads > 1e-6, spreads, 0.0)  # rounding, and NaN
    weights = weights.to(values.dtype)[:, None].expand_as(values)
    votes = (weights * promised.square() * spreads).nan_to_num(nan=0.0)
    votes = torch.where(votes.sum(0) > 0, votes, weights)
    return votes / votes.sum(0)


# A peer's log-probability counts as at least this: the gradient towards it cannot overflow
LOWEST_LOG_PROB = -100.0


def mix_log_probs(log_probs: Tensor, weights: Tensor, mixture: str = "arithmetic") -> Tensor:
    """The reference policy C_i pi (eq. 4) as log-probabilities: row i of C applied to policies.

    log_probs: [policies, ..., actions]; weights: [policies], on the simplex, or [policies, ...], on
    the simplex in every state.
    arithmetic: log sum_j c_j pi_j. geometric: sum_j c_j log pi_j, renormalised. A policy of weight
    0 has no influence, whatever its log-probabilities are, and one that is NaN in a state (its
    network overflows there) none in this state.
    Returns [..., actions], whose probabilities sum to 1, maybe a view; NaN where all policies are.
    Raises ValueError if a geometric mixture has no common support.
    """
    if mixture not in MIXTURES:
        raise ValueError(f"unknown mixture {mixture!r}; choose from {', '.join(MIXTURES)}")
    if all(torch.equal(policy, log_probs[0]) for policy in log_probs[1:]):
        return log_probs[0]  # rounding errors of a mixture would move agents without a signal
    if weights.dim() == 1:  # the same in every state
        weights = weights.view(-1, *[1] * (log_probs.dim() - 2)).expand(log_probs.shape[:-1])
    # A policy that is NaN in a state has no weight there
    weights = weights.to(log_probs).masked_fill(log_probs[..., 0].isnan(), 0.0)
    weights = (weights / weights.sum(0))[..., None]  # NaN where no policy is left
    # One policy after the other, because the vocabulary of a language model is large
    pairs = zip(log_probs, weights, strict=True)
    if mixture == "arithmetic":
        weighted = (
            (policy + weight.log()).masked_fill_(weight == 0, -math.inf) for policy, weight in pairs
        )
        return functools.reduce(torch.logaddexp, weighted)
    unnormalised = sum((weight * policy).masked_fill_(weight == 0, 0.0) for policy, weight in pairs)
    if unnormalised.isneginf().all(-1).any():
        raise ValueError("the policies of a geometric mixture have no action in common")
    return torch.log_softmax(unnormalised, dim=-1)


def categorical_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Exact KL(p || q) over the whole action set, in nats.

    log_p, log_q: [..., actions], normalised. Returns [...]. Actions with p = 0 add 0; p > 0 = q
    gives infinity.
    """
    return _average_log_ratio(log_p.exp(), log_p, log_q)


def _average_log_ratio(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """The mean under p of log(p / q). All [..., actions]. Returns [...]."""
    log_ratio = (log_p - log_q).masked_fill(p == 0, 0.0)
    return (p * log_ratio).sum(-1)


def kl_to_reference(
    log_policy: Tensor, log_reference: Tensor, direction: str = "forward"
) -> Tensor:
    """The penalty of eq. 4, KL(reference || policy), or of eq. 7, KL(policy || reference).

    direction: "forward" for eq. 4, "reverse" for eq. 7. log_policy, log_reference: [..., actions].
    Returns [...], in nats, to be differentiated once. The reference is a constant: no gradient.
    """
    if direction == "forward":
        return categorical_kl(log_reference.detach(), log_policy)
    if direction == "reverse":
        # The gradient of sum p log(p / r) is sum dp log(p / r) + sum dp, of which the last is 0:
        # without it rounding errors move no policy that equals its reference
        policy = log_policy.exp()
        return _average_log_ratio(policy, log_policy.detach(), log_reference.detach())
    raise ValueError(f"unknown KL direction {direction!r}; choose from {', '.join(KL_DIRECTIONS)}")


# Policies: Gaussians, whose dimensions are independent


class Gaussians(NamedTuple):
    """A mixture of Gaussians in each of some states."""

    weights: Tensor  # [policies, states], on the simplex in every state
    means: Tensor  # [policies, states, actions]
    log_stds: Tensor  # [policies, states, actions]

    def take(self, states: Tensor) -> "Gaussians":
        """The mixtures of these states, by their numbers."""
        return Gaussians(*(values[:, states] for values in self))


def gaussian_log_prob(actions: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """The log-densities of actions. All [..., actions] or broadcast to it. Returns [...]."""
    z = (actions - mean) * (-log_std).exp()
    return (-0.5 * z.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


def gaussian_entropy(log_std: Tensor) -> Tensor:
    """The differential entropy in nats, which may be negative. log_std: [..., actions]."""
    return (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)


def gaussian_kl(mean_p: Tensor, log_std_p: Tensor, mean_q: Tensor, log_std_q: Tensor) -> Tensor:
    """Exact KL(p || q), in nats. All [..., actions] or broadcast to it. Returns [...]."""
    log_ratio = log_std_p - log_std_q
    z = (mean_p - mean_q) * (-log_std_q).exp()
    return (0.5 * ((2 * log_ratio).exp() + z.square() - 1) - log_ratio).sum(-1)


# The square of such a gradient, summed over a network, is finite in float32
LARGEST_SIZE = 1e15


def are_bounded(means: Tensor, log_stds: Tensor) -> Tensor:
    """Whether a listener can learn from these Gaussians, bool [...]. Both [..., actions].

    A KL to huge moments, precisions or squares of mean / deviation may be finite, while the norm of
    its gradient overflows.
    """
    squares = means.square()
    variances = (2 * log_stds).exp()
    sizes = torch.cat([squares, variances, 1 / variances, squares / variances], dim=-1)
    return (sizes < LARGEST_SIZE).all(-1)


def mix_gaussians(
    means: Tensor, log_stds: Tensor, weights: Tensor, mixture: str = "arithmetic"
) -> Gaussians:
    """The reference policy C_i pi (eq. 4): row i of C applied to Gaussian policies.

    means, log_stds: [policies, states, actions]; weights: [policies], on the simplex, or [policies,
    states], on the simplex in every state. A policy that is not bounded in a state (see
    `are_bounded`) has no weight in this state.
    arithmetic: the mixture of all. geometric: the Gaussian proportional to prod_j pi_j^c_j, whose
    precision is the sum of the weighted precisions: a mixture of one. NaN where no policy is left.
    """
    if mixture not in MIXTURES:
        raise ValueError(f"unknown mixture {mixture!r}; choose from {', '.join(MIXTURES)}")
    if weights.dim() == 1:
        weights = weights[:, None].expand(means.shape[:2])
    weights = weights.to(means).masked_fill(~are_bounded(means, log_stds), 0.0)
    weights = weights / weights.sum(0)
    is_mixed = weights[..., None] > 0
    others = 0.0 * weights[..., None]  # NaN where no policy is left
    means = means.where(is_mixed, others)
    log_stds = log_stds.where(is_mixed, others)
    if mixture == "arithmetic":
        return Gaussians(weights, means, log_stds)
    precisions = weights[..., None] * (-2 * log_stds).exp()
    precision = precisions.sum(0)
    mean_action = (precisions * means).sum(0) / precision
    return Gaussians(weights.sum(0)[None], mean_action[None], -0.5 * precision.log()[None])


def match_moments(mixture: Gaussians) -> Gaussians:
    """In each state the Gaussian with the mean and the variances of the mixture.

    For a policy that is a Gaussian too, KL(mixture || policy) exceeds KL(this || policy) by a
    number that does not depend on the policy: it reads the mixture's moments only. A mixture of one
    stays as it is, without rounding.
    """
    if len(mixture.weights) == 1:
        return mixture
    weights = mixture.weights[..., None]
    mean_action = (weights * mixture.means).sum(0)
    squares = (2 * mixture.log_stds).exp() + (mixture.means - mean_action).square()
    log_std = 0.5 * (weights * squares).sum(0).log()
    return Gaussians(mixture.weights.sum(0)[None], mean_action[None], log_std[None])


def kl_to_gaussians(
    mean: Tensor,
    log_std: Tensor,
    reference: Gaussians,
    direction: str = "forward",
    noise: Tensor | None = None,
) -> Tensor:
    """The penalty of eq. 4, KL(reference || policy), or of eq. 7, KL(policy || reference).

    mean: [states, actions], of the policy; log_std: [actions]; noise: [samples, states, actions],
    standard normal, for the reverse KL to several Gaussians.
    Exact for a mixture of one, with `match_moments` in the forward direction also of more. The
    reverse KL to several is the mean of log policy - log reference over samples of the policy, mean
    + exp(log_std) noise, through which it is differentiated. Returns [states] or [samples, states],
    in nats. No gradient reaches the reference.
    """
    weights, means, log_stds = (values.detach() for values in reference)
    if direction == "forward":
        (mean_p,) = means  # of one Gaussian, see `match_moments`
        (log_std_p,) = log_stds
        return gaussian_kl(mean_p, log_std_p, mean, log_std)
    if direction != "reverse":
        valid = ", ".join(KL_DIRECTIONS)
        raise ValueError(f"unknown KL direction {direction!r}; choose from {valid}")
    if len(weights) == 1:
        return gaussian_kl(mean, log_std, means[0], log_stds[0])
    actions = mean + log_std.exp() * noise
    log_policy = gaussian_log_prob(actions, mean, log_std)  # [samples, states]
    log_peers = gaussian_log_prob(actions[:, None], means, log_stds)  # [samples, policies, states]
    log_reference = (log_peers + weights.log()).logsumexp(1)
    return log_policy - log_reference


def similarity_of_gaussians(policies: Tensor) -> Tensor:
    """Example 3 for densities: c_ij proportional to the sum over S_ref of the integral pi_i pi_j.

    policies: [agents, states, 2, actions], means and log standard deviations on the *public*
    reference states S_ref; an agent whose policy is NaN gets no weight. Returns [agents, agents].
    """
    means, log_stds = policies.detach().double().unbind(2)
    log_overlaps = []
    for mean, log_std in zip(means, log_stds, strict=True):
        # The integral of two Gaussians' product: a density of their distance, with both variances
        log_variances = torch.logaddexp(2 * log_std, 2 * log_stds)
        overlaps = gaussian_log_prob(mean, means, 0.5 * log_variances)  # [agents, states]
        log_overlaps.append(overlaps.logsumexp(-1))
    return _softmax_rows(torch.stack(log_overlaps).nan_to_num(nan=-math.inf), 1.0)


def measure_gaussians(policies: Tensor, compared: Tensor, listeners: range) -> Tensor:
    """The Hellinger distance of policies on the public states, [agents, agents].

    It lies in [0, 1], and the total variation between its square and 1.42 times itself; NaN if not
    measured. policies: as in `similarity_of_gaussians`; compared, listeners: as in
    `measure_distances`.
    """
    distances = torch.full(compared.shape, torch.nan)
    means, log_stds = policies.double().unbind(2)
    for i in listeners:
        peers = compared[i]
        # The mean of both variances is their geometric mean times the cosh, which is 1 for equals
        log_ratios = log_stds[peers] - log_stds[i]
        log_cosh = torch.logaddexp(log_ratios, -log_ratios) - math.log(2)
        log_variances = log_stds[peers] + log_stds[i] + log_cosh
        z = (means[peers] - means[i]).square() * (-log_variances).exp()
        log_affinity = -0.5 * log_cosh - z / 8
        affinity = log_affinity.sum(-1).exp().clamp(max=1)
        distances[i, peers] = (1 - affinity).sqrt().mean(-1).float()
    return distances


# Parameters


def flatten(network: nn.Module) -> Tensor:
    """A network's parameters and buffers, copied, as one flat tensor [numel]."""
    return torch.cat([values.detach().flatten() for values in network.state_dict().values()])


@torch.no_grad()
def unflatten(flat: Tensor, network: nn.Module) -> None:
    """The inverse of `flatten`: the network takes a copy of `flat` [numel].

    In place: views would lie at other addresses, and on some processors these change how a sum is
    rounded. Whole numbers, such as counters in buffers, are rounded, since averages have fractions.
    """
    start = 0
    for values in network.state_dict().values():
        end = start + values.numel()
        new_values = flat[start:end].view_as(values)
        values.copy_(new_values if values.is_floating_point() else new_values.round())
        start = end


def load_networks(
    snapshots: list[Tensor | None], networks: list[nn.Module], agents: Iterable[int]
) -> dict[int, nn.Module]:
    """The networks of these agents' snapshots, as far as they are there: agent -> network.

    snapshots: of all agents, flat; networks: of all agents, of which the shapes count.
    """
    loaded = {}
    for j in agents:
        if snapshots[j] is not None:
            loaded[j] = copy.deepcopy(networks[j]).requires_grad_(False)
            unflatten(snapshots[j], loaded[j])
    return loaded


def average_parameters(communicator: Tensor, parameters: Tensor) -> Tensor:
    """FedAvg with a communicator: row i is sum_j c_ij theta_j.

    parameters: [agents, numel]. Parameters of weight 0 are not read, so NaN of a dropped peer
    cannot spread.
    Returns [agents, numel]. Raises ValueError if a row of the communicator sums to 0.
    """
    if not (communicator.sum(1) > 0).all():
        raise ValueError("a row of the communicator sums to 0: its agent would lose its parameters")
    weights = communicator.to(parameters)
    return torch.stack([row[row > 0] @ parameters[row > 0] for row in weights])


def take_server_step(begin: Tensor, average: Tensor, server_lr: float) -> Tensor:
    """FedOpt's server step with SGD (Reddi et al., 2021): begin + server_lr (average - begin).

    begin: what an agent went on from in the round before; average: of parameters, in this round;
    [numel] each. A rate of 1 is FedAvg and gives the average itself. Returns [numel].
    """
    if server_lr == 1:
        return average
    return begin + server_lr * (average - begin)


def average_products(
    communicator: Tensor, A: Tensor, B: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """FedAvg of adapters: the product of rank r that is nearest to sum_j c_ij B_j A_j.

    communicator: [rows, agents]; A: [agents, r, in]; B: [agents, out, r]. The rank of the sum may
    be agents times r, and no other product of rank r is nearer to it (Eckart and Young). Of all
    factors of that product, A is the one nearest to sum_j c_ij A_j, the orthogonal projection of
    that (which must not become singular), so that an optimizer's moments keep their meaning: equal
    A stay as they are, and then B is sum_j c_ij B_j.
    Returns A [rows, r, in], B [rows, out, r], and the squared norms [rows] of the sum and of what
    is lost of it.
    """
    # Often all rows are the same: each distinct one is computed once
    rows, index = communicator.to(A).double().unique(dim=0, return_inverse=True)
    rank = A.shape[1]
    # All sums lie in the space that the rows of all A_j span: there they are small matrices
    basis, coordinates = torch.linalg.qr(A.double().flatten(0, 1).mT)  # [in, m], [m, agents * r]
    coordinates = coordinates.unflatten(1, A.shape[:2])  # [m, agents, r]
    sums = torch.einsum("kn,nor,mnr->kom", rows, B.double(), coordinates)  # sum_j c_ij B_j A_j
    mean_A = torch.einsum("kn,mnr->krm", rows, coordinates)
    sum_norm = sums.square().sum((1, 2))
    mean_norm = mean_A.square().sum((1, 2)).clamp(min=1e-30)
    # The directions that are kept: those of the largest eigenvalues; where B is 0, mean_A decides
    small = (1e-12 * sum_norm / mean_norm).clamp(min=1e-30)
    gram = sums.mT @ sums + small[:, None, None] * (mean_A.mT @ mean_A)
    V = torch.linalg.eigh(gram).eigenvectors[..., -rank:]  # [rows, m, r]
    # The projection of mean_A on them, its singular values bounded because B is divided by them
    left, scales, right = torch.linalg.svd(mean_A @ V, full_matrices=False)
    scales = scales.maximum(0.1 * scales[:, :1] + 1e-12)[:, None]
    new_A = (left * scales) @ right @ V.mT @ basis.mT
    new_B = sums @ V @ right.mT @ (left / scales).mT
    lost_norm = (sums - sums @ V @ V.mT).square().sum((1, 2))
    return new_A[index].to(A), new_B[index].to(B), sum_norm[index], lost_norm[index]


# --- 2. exchange ---

A_DAY = datetime.timedelta(days=1)


def set_device(name: str) -> torch.device:
    """The device of this process, prepared for computations."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{get_local_rank() % torch.cuda.device_count()}"
    if name.startswith("cuda"):
        torch.cuda.set_device(name)  # before anything is captured or sent from the wrong one
        # The same float32 products in rollouts (matrix products) and updates (convolutions): by
        # default only cuDNN rounds to TF32, and the first ratio of an update would not be 1
        torch.backends.cudnn.allow_tf32 = False
        torch.set_float32_matmul_precision("highest")
    return torch.device(name)


class Exchange:
    """Which process holds which agents, and all communication between them.

    In one process it holds all agents and nothing moves; under torchrun each rank holds num_agents
    / world_size of them. What leaves a rank is a flat tensor of parameters or other declared
    numbers, never an observation, an action or a reward of a step, and nothing that arrives is
    unpickled. `bytes_sent` counts what agents have to send each other by C, which is the same in
    both placements; between ranks it is gathered as one flat tensor, so that there all of it
    reaches every rank.

    device, timeout: as the flags; the attribute `device` is the device that was chosen. isolated:
    the agents send nothing. Raises ValueError if num_agents is not divisible by the world size, and
    RuntimeError if a peer does not arrive at a collective in time (rank 0's names those that are
    missing).

    A launcher may put another one in its place, see `make_exchange`; these then differ:
    label, settings: part of the run's folder name, and what the launcher adds to its settings;
    members: the agents in this run's logs and checkpoints.
    """

    label = ""
    settings = {}

    def __init__(
        self,
        num_agents: int,
        device: str | torch.device = "cpu",
        timeout: float = 600.0,
        isolated: bool = False,
    ):
        self.distributed = "RANK" in os.environ  # torchrun sets it
        self.world_size = get_world_size()
        self.rank = int(os.environ["RANK"]) if self.distributed else 0
        if num_agents % self.world_size:
            message = f"{num_agents} agents cannot be shared by {self.world_size} ranks"
            raise ValueError(f"{message}; use a divisor")
        self.num_agents = num_agents
        self.agents = find_held(num_agents)  # the agents this process holds
        self.members = range(num_agents)
        self.device = set_device(str(device))
        self.timeout = datetime.timedelta(seconds=timeout)
        self.isolated = isolated
        self.bytes_sent = 0
        self._sent_bytes = [0] * num_agents  # of each agent's tensor in the last round
        self.interrupted = lambda: 0  # the signal that is to end the run, see `Run`
        if self.distributed:
            self._connect()

    # A communication round

    def round(
        self, sent: list[Tensor], numbers: Tensor | None = None, sizes: list[int] | None = None
    ) -> tuple[list[Tensor | None], Tensor]:
        """Send a flat tensor and a number of each agent held; get those of all agents.

        sent: [numel] of each agent held; numbers: [agents held], None if nobody reads them; sizes:
        how many numbers each agent sends (default: all as many as the first one held).
        Returns (the tensors of all agents, None for one that is missing or not finite; the reported
        numbers [agents], double, NaN where there is no finite one). What arrives is shared, not to
        be written to.
        """
        reports = torch.full((self.num_agents,), torch.nan, dtype=torch.double)
        if numbers is not None and not self.isolated:
            reports = self.all_gather(numbers[:, None].double()).flatten()
        gathered = self._gather(sent, sizes)
        self._sent_bytes = [0 if x is None else x.numel() * x.element_size() for x in gathered]
        snapshots = _keep_finite(gathered)
        invalid = [j for j in range(self.num_agents) if snapshots[j] is not gathered[j]]
        if invalid:
            reports[invalid] = torch.nan
            announce(f"\ndropped the invalid snapshots of agents {invalid} for this round")
        return snapshots, reports.where(reports.isfinite(), torch.nan)

    def recall(self, sent: list[Tensor], sizes: list[int] | None = None) -> list[Tensor | None]:
        """After a resume: what `round` returned last; sent, sizes: as given to it then."""
        return _keep_finite(self._gather(sent, sizes))

    def drop_reports(self, reports: Tensor, usable: Tensor, evaluated: Iterable[int]) -> int:
        """Make the reports of agents without a usable policy NaN, in place, so that they have no
        influence on C. Returns how many agents of this run these are.

        reports: [agents], of `round`; usable: bool [agents], known here of the agents held and of
        those in `evaluated`.
        """
        rows_held = slice(self.agents.start, self.agents.stop)
        useless = self.all_gather((~usable[rows_held, None]).long()).flatten().bool()
        reports[useless] = torch.nan
        # Under federate.py only the agents held are known so far
        reports[[j for j in evaluated if not usable[j]]] = torch.nan
        return int(useless.sum())

    def _gather(self, sent: list[Tensor], sizes: list[int] | None) -> list[Tensor | None]:
        """The tensors of all agents; None of the peers of isolated agents."""
        if self.isolated or not self.distributed:
            tensors = [None] * self.num_agents
            for i, tensor in zip(self.agents, sent, strict=True):
                tensors[i] = tensor.clone()
            return tensors
        if sizes is None:
            sizes = [len(sent[0])] * self.num_agents
        padded = [nn.functional.pad(tensor, (0, max(sizes) - len(tensor))) for tensor in sent]
        gathered = self.all_gather(torch.stack(padded))
        return [gathered[j, :size] for j, size in enumerate(sizes)]

    def count_bytes(self, reads: Tensor) -> None:
        """Add to `bytes_sent` the tensors of the last round, each times the agents that read it.

        reads: bool [agents, agents], whose tensor each agent reads.
        """
        listeners = reads.sum(0) - reads.diagonal().long()
        self.bytes_sent += int(listeners @ torch.tensor(self._sent_bytes))

    def state(self) -> dict[str, list]:
        """What `Run` keeps of the exchange in each agent's checkpoint: nothing."""
        return {}

    def describe(self) -> dict[str, float]:
        """Scalars about the communication, for the log."""
        return {"communication/bytes": self.bytes_sent}

    # Between ranks

    def _connect(self) -> None:
        """Join the process group."""
        address = os.environ.get("MASTER_ADDR", "")
        port = os.environ.get("MASTER_PORT", "")
        if not address or not port.isdecimal():
            message = (
                f"RANK is set, but MASTER_ADDR={address} and MASTER_PORT={port} are no address"
            )
            stop(f"{message}: start with torchrun, or unset RANK", WRONG_VALUE, any_rank=True)
        # Rank 0 holds the store, unless torchrun does
        store, _, _ = next(dist.rendezvous("env://", timeout=self.timeout))
        # torchrun's own store outlives a restart: the prefix hides the addresses of dead processes
        attempt = f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        self._store = dist.PrefixStore(attempt, store)
        backend = "nccl" if self._has_gpu_per_rank() else "gloo"
        # Where tensors are when they are sent and received
        self._wire = self.device if backend == "nccl" else torch.device("cpu")
        dist.init_process_group(
            backend,
            timeout=self.timeout,
            store=self._store,
            rank=self.rank,
            world_size=self.world_size,
        )
        # Two groups, because a rank waits for rank 0 as long as its group's time-out, whatever a
        # barrier's is
        self._control = dist.new_group(backend="gloo", timeout=self.timeout)
        self._patient = dist.new_group(backend="gloo", timeout=A_DAY)
        self._barriers = 0
        atexit.register(self.close)  # gloo's threads abort a process that ends with them

    def _has_gpu_per_rank(self) -> bool:
        """Whether every rank has a GPU that no other rank has, which nccl needs.

        The answer is the same on every rank. Ranks that share a GPU communicate through the
        processor.
        """
        gpu = "none"
        if self.device.type == "cuda":
            gpu = str(torch.cuda.get_device_properties(self.device).uuid)
        self._store.set(f"gpu_{self.rank}", gpu)
        gpus = [self._store.get(f"gpu_{rank}").decode() for rank in range(self.world_size)]
        return "none" not in gpus and len(set(gpus)) == self.world_size

    def wait_for_all(self) -> None:
        """As `barrier`, but for a day, for work whose length differs between ranks.

        Such as evaluations. A rank that dies breaks its connections, which ends the others at once.
        """
        if self.distributed:
            self._meet(self._patient, A_DAY)

    def barrier(self) -> None:
        """Wait until every rank is here.

        On rank 0 a RuntimeError names those that did not come in time.
        """
        if self.distributed:
            self._meet(self._control, self.timeout)

    def _meet(self, group: dist.ProcessGroup, timeout: datetime.timedelta) -> None:
        """The barrier of a group of all ranks."""
        self._barriers += 1
        barrier = f"barrier_{self._barriers}"
        self._store.set(f"{barrier}_{self.rank}", "here")
        try:
            dist.monitored_barrier(group, timeout, wait_all_ranks=True)
        except RuntimeError as error:
            if self.rank > 0 or "Rank" in str(error):
                raise
            # A connection broke before any rank waited: ranks that are alive will arrive soon
            time.sleep(1)
            ranks = range(self.world_size)
            missing = [str(rank) for rank in ranks if not self._store.check([f"{barrier}_{rank}"])]
            message = f"Ranks {', '.join(missing)} failed to arrive: {error}"
            raise RuntimeError(message) from error

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's `tensor`, on every rank."""
        if not self.distributed:
            return tensor
        self.barrier()
        sent = tensor.to(self._wire).clone(memory_format=torch.contiguous_format)
        dist.broadcast(sent, src=0)
        return sent.to(tensor.device)

    def broadcast_start(self, parameters: Tensor) -> Tensor:
        """What all agents start from: rank 0's `parameters` [numel]."""
        return self.broadcast(parameters)

    def broadcast_networks(self, networks: list[nn.Module]) -> None:
        """Give `networks`, in place, the parameters that rank 0's have, on every rank."""
        flat = [flatten(network) for network in networks]
        start = self.broadcast(torch.cat(flat))
        of_networks = start.split([len(parameters) for parameters in flat])
        for network, parameters in zip(networks, of_networks, strict=True):
            unflatten(parameters, network)

    def find_different_ranks(self, number: int) -> list[int]:
        """The ranks whose `number` differs from rank 0's; the same list on every rank."""
        if not self.distributed:
            return []
        self.barrier()
        numbers = torch.empty(self.world_size, dtype=torch.long, device=self._wire)
        dist.all_gather(list(numbers.split(1)), torch.tensor([number], device=self._wire))
        return (numbers != numbers[0]).nonzero().flatten().tolist()

    def all_gather(self, local: Tensor) -> Tensor:
        """Row i for every agent i.

        local: [agents held, numel], of the same size on all ranks. Returns [agents, numel].
        """
        if not self.distributed:
            return local.clone()
        self.barrier()
        gathered = local.new_empty(self.num_agents * local.shape[1], device=self._wire)
        dist.all_gather(list(gathered.chunk(self.world_size)), local.to(self._wire).flatten())
        return gathered.view(self.num_agents, -1).to(local.device)

    def close(self) -> None:
        """Leave the process group."""
        if self.distributed:
            atexit.unregister(self.close)
            # A group that outlives this call may abort the process at its end
            del self._control, self._patient
            dist.destroy_process_group()


def _keep_finite(tensors: list[Tensor | None]) -> list[Tensor | None]:
    """The tensors, None in place of those that are not finite."""
    return [x if x is None or x.isfinite().all() else None for x in tensors]


# Set by a launcher, such as federate.py: called as `make_exchange`, it returns the exchange
exchange_of_launcher = None


def make_exchange(
    args: "RunArgs", isolated: bool | None = None, averages: str = "", together: str = ""
) -> Exchange:
    """The exchange of a run: the launcher's, else between the ranks of torchrun or in one process.

    isolated: the agents send nothing (default: if none may listen to another). For launchers:
    averages: what averages of parameters do to an agent, "replace" (FedAvg) or "pull", "" without
    any; together: why all agents have to be started together, such as "--delta needs the movement
    of all agents at every update", "" if they need not.
    """
    if isolated is None:
        isolated = int(find_neighbours(args).sum()) == args.num_agents
    if exchange_of_launcher is not None:
        return exchange_of_launcher(args, isolated, averages, together)
    return Exchange(args.agents_at_once, args.device, args.timeout, isolated)


# --- 3. arguments: every flag declares its bounds in its type ---


class Bound(NamedTuple):
    """A bound of a flag: what its value must be or do, as the message has it, and the test."""

    requirement: str
    holds: Callable[[float], bool]


Count = Annotated[int, Bound("be at least 1", lambda value: value >= 1)]
Natural = Annotated[int, Bound("not be negative", lambda value: value >= 0)]
Seed = Annotated[Natural, Bound("be below 2^63", lambda value: value < 2**63)]
NonNegative = Annotated[float, Bound("not be negative", lambda value: value >= 0)]
Positive = Annotated[float, Bound("be positive", lambda value: value > 0)]
Seconds = Annotated[Positive, Bound("be at most 1e9", lambda value: value <= 1e9)]
ZeroOrAboveOne = Annotated[float, Bound("be 0 or above 1", lambda x: x == 0 or x > 1)]
Fraction = Annotated[float, Bound("lie in [0, 1]", lambda value: 0 <= value <= 1)]
PositiveFraction = Annotated[float, Bound("lie in (0, 1]", lambda value: 0 < value <= 1)]
Probability = Annotated[float, Bound("lie in (0, 1)", lambda value: 0 < value < 1)]


@dataclass
class RunArgs:
    """The flags of every script: how a run is named, stored, resumed and tracked, and C."""

    # the name of this experiment, part of the run's folder name (default: the script's)
    exp_name: str = ""
    seed: Seed = 1  # seed of everything random, keyed with the agent's number
    device: str = "auto"  # cpu, cuda, cuda:N, or auto: cuda where there is one
    run_dir: str = "runs"  # folder that holds one folder per run
    resume: str = ""  # folder of a run that was cut off: go on in it, with its settings
    # iterations between checkpoints; the environments start anew at each, so that a resumed run is
    # the same run, and an episode that is cut off there counts in no return
    save_every: Count = 32
    eval_every: Natural = 0  # iterations between evaluations during training (0: only at the end)
    # torchrun: seconds until the run ends and names a rank that does not come (after evaluations a
    # day); federate.py: seconds that averages wait for the peers
    timeout: Seconds = 600.0
    track: bool = False  # also log to Weights & Biases
    wandb_project_name: str = "prpo"  # the W&B project
    wandb_entity: str | None = None  # the W&B team or user
    num_agents: Count = 3  # number of agents
    # who listens to whom: identity (isolated agents), uniform, self-preferred, similarity, reward,
    # softmax-reward, rank-reward, best, surrogate, or FILE.csv, a matrix of your own
    communicator: str = "uniform"
    # no flag: the content of FILE.csv when the run began, which belongs to the run's settings
    communicator_matrix: tyro.conf.Suppress[str] = ""
    self_preference: Fraction = 0.6  # c_ii of the self-preferred communicator
    # higher makes weights more equal; in standard deviations of returns (softmax-reward), or in
    # tenths of that of the advantages (surrogate)
    communicator_temperature: Positive = 1.0
    # who may listen to whom: every agent to all, or to its two neighbours on a ring
    topology: Literal["full", "ring"] = "full"
    top_k: Natural = 0  # keep only the k heaviest peers of each agent (0: all)

    def __post_init__(self):
        self.exp_name = self.exp_name or find_script(self).stem
        # A shell leaves the "~" of --run-dir=~/runs as it is
        for name in ("run_dir", "resume"):
            setattr(self, name, os.path.expanduser(getattr(self, name)))
        if self.communicator.endswith(".csv") and not self.communicator_matrix:
            # `load_matrix` refuses what cannot be read
            with contextlib.suppress(OSError, ValueError):
                matrix = from_csv(self.communicator, self.num_agents)
                self.communicator_matrix = write_matrix(matrix)

    @property
    def agents_at_once(self) -> int:
        """How many agents train at the same time: all, unless a script draws some of them."""
        return self.num_agents


def get_local_rank() -> int:
    """The number of this rank on its machine."""
    return int(os.environ.get("LOCAL_RANK", 0))


def find_held(num_agents: int) -> range:
    """The agents that this rank holds; all without torchrun."""
    agents_per_rank = num_agents // get_world_size()  # get_world_size has checked RANK
    rank = int(os.environ.get("RANK", 0))
    return range(rank * agents_per_rank, (rank + 1) * agents_per_rank)


def get_world_size() -> int:
    """The number of torchrun's processes; 1 without torchrun."""
    if "RANK" not in os.environ:
        return 1
    rank = os.environ["RANK"]
    world_size = os.environ.get("WORLD_SIZE", "")
    are_numbers = rank.isdecimal() and world_size.isdecimal()
    if not are_numbers or int(rank) >= int(world_size):
        message = f"RANK={rank} must be a whole number below WORLD_SIZE={world_size}"
        stop(f"{message}: start with torchrun, or unset RANK", WRONG_VALUE, any_rank=True)
    return int(world_size)


def find_script(args: RunArgs) -> Path:
    """The file of the script whose arguments these are."""
    return Path(sys.modules[type(args).__module__].__file__)


def _list_code(args: RunArgs) -> list[Path]:
    """The script, this module, and what has been imported from the script's folder."""
    script = find_script(args).resolve()  # as in sys.path, where imports come from
    files = {script, Path(__file__)}
    folder = str(script.parent)
    for module in sys.modules.copy().values():
        file = getattr(module, "__file__", None) or ""
        if os.path.dirname(file) == folder and os.path.isfile(file):
            files.add(Path(file))
    return sorted(files, key=lambda path: path.name)


# Ends in one line

# Exit code of a wrong value, as argparse and tyro have it; a run that cannot go on ends with 1
WRONG_VALUE = 2


def stop(message: str, code: int = 1, any_rank: bool = False) -> NoReturn:
    """End with one line on stderr.

    The first rank of each machine reports, since another machine may lack a file or a GPU; any rank
    that may be the only one with this problem, too (any_rank).
    """
    if any_rank or _is_first_here():
        print(message.strip(), file=sys.stderr, flush=True)
    end = SystemExit(message.strip())
    end.code = code
    raise end


def _is_first_here() -> bool:
    """Whether this rank is the first of its machine."""
    rank = os.environ.get("RANK", "0")
    return rank == "0" or os.environ.get("LOCAL_RANK", rank) == "0"


def first_line(error: BaseException) -> str:
    """The first line of an error's message; the error itself where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else repr(error)


def refuse(args: RunArgs, flag: str, valid: str, any_rank: bool = False) -> NoReturn:
    """End with one line that names the flag, its value and what would be valid, as `stop`."""
    value = _show(getattr(args, flag))
    stop(f"--{flag.replace('_', '-')} {value}: {valid}", WRONG_VALUE, any_rank)


def refuse_others(args: RunArgs, script: ModuleType, more_flags: set[str]) -> None:
    """Refuse flags that are given and are neither the script's nor among more_flags."""
    flags = {field.name for field in dataclasses.fields(script.Args)} | more_flags
    for field in dataclasses.fields(args):
        if field.name not in flags and getattr(args, field.name) != field.default:
            refuse(args, field.name, f"is no flag of {script.__name__}.py")


def _show(value: object) -> str:
    """A flag's value as on the command line, with escapes for what cannot be printed."""
    text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    characters = [c if c.isprintable() else c.encode("unicode_escape").decode() for c in text]
    return "".join(characters)


# The command line


def read_flags(Args: type, argv: list[str] | None = None, **options):
    """tyro's arguments, within the bounds of their types; what it refuses, tyro says itself."""
    words = sys.argv[1:] if argv is None else argv
    hints = typing.get_type_hints(Args, include_extras=True)
    _refuse_true_and_false(words, hints)
    description = sys.modules[Args.__module__].__doc__
    args = tyro.cli(
        Args, args=words, description=description, console_outputs=_is_first_here(), **options
    )
    for name, hint in hints.items():
        _check_bounds(args, name, hint)
    return args


def _refuse_true_and_false(words: list[str], hints: dict) -> None:
    """Refuse `--anneal-lr False`, of which tyro would not name the flag."""
    for word, next_word in itertools.pairwise([*words, ""]):
        flag, _, value = word.partition("=")
        value = value or next_word
        name = flag.removeprefix("--").replace("-", "_").removeprefix("no_")
        if hints.get(name) is bool and value.lower() in ("true", "false"):
            on = f"--{name.replace('_', '-')}"
            off = on.replace("--", "--no-", 1)
            stop(f"{flag} {value}: takes no value; write {on} or {off}", WRONG_VALUE)


def _check_bounds(args: RunArgs, flag: str, hint) -> None:
    """Refuse a value outside the bounds that its type declares, also inside `... | None`."""
    value = getattr(args, flag)
    if value is None:  # an optional flag that was left out
        return
    bounds = []
    for inner in (hint, *typing.get_args(hint)):
        metadata = getattr(inner, "__metadata__", ())
        bounds += [entry for entry in metadata if isinstance(entry, Bound)]
    if isinstance(value, float) and not math.isfinite(value):
        requirements = ["be finite", *(bound.requirement for bound in bounds)]
        refuse(args, flag, f"must {' and '.join(requirements)}")
    for bound in bounds:
        if not bound.holds(value):
            refuse(args, flag, f"must {bound.requirement}")


def parse_args(Args: type, check: Callable, argv: list[str] | None = None, may_change=(), again=()):
    """The arguments of the command line, checked before anything expensive starts.

    First the bounds in the types, then what is common to all scripts (device, folder, disk,
    packages, ranks), then `check(args)`, which calls `refuse`. --resume takes the settings of the
    run's folder, see `_read_resumed_settings` for `may_change` and `again`.
    """
    open_streams()
    args = read_flags(Args, argv)
    if args.resume:
        args = _read_resumed_settings(args, argv, may_change, again)
    check_texts(args)
    if re.search(r"[\x00-\x1f\x7f-\x9f]", args.exp_name):
        refuse(args, "exp_name", "must not have control characters")
    world_size = get_world_size()
    if args.agents_at_once % world_size:
        flag = "num_agents"
        valid = f"must be a multiple of the {world_size} processes"
        if args.agents_at_once != args.num_agents:
            flag = "centralised" if args.centralised else "agents_per_round"
            valid = f"{valid}, but {args.agents_at_once} agents train at once"
        refuse(args, flag, valid)
    if args.top_k >= args.num_agents:
        refuse(args, "top_k", f"must lie in 0..{args.num_agents - 1}")
    _check_device(args)
    if args.track and not importlib.util.find_spec("wandb"):
        refuse(args, "track", "wandb is not installed")
    _check_run_dir(args)
    check(args)
    return args


def check_texts(args: RunArgs) -> None:
    """Refuse texts that logs cannot hold: what is not UTF-8."""
    for name, value in vars(args).items():
        texts = value if isinstance(value, tuple | list) else [value]
        for text in texts:
            # Bytes that the locale does not know are read as surrogates
            if isinstance(text, str) and re.search(r"[\ud800-\udfff]", text):
                refuse(args, name, "must be UTF-8, in a locale that has it")


def find_inputs(args: RunArgs, make_communicator: Callable) -> set[str]:
    """What a script's communicator is computed from, of returns, log_probs (policies) and gains.

    Each is replaced by None in turn: C depends on it if that fails or gives another C. Ends with
    one line if --communicator is none.
    """
    inputs = _draw_inputs(args, make_communicator)
    C = make_communicator(args, **inputs)
    needed = set()
    for name in inputs:
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                without = make_communicator(args, **inputs | {name: None})
        except (Exception, SystemExit):  # whatever comes of computing with None
            needed.add(name)
            continue
        if not torch.equal(without, C):
            needed.add(name)
    return needed


def _draw_inputs(args: RunArgs, make_communicator: Callable) -> dict[str, Tensor]:
    """Values of the right shapes for what the communicator may depend on."""
    n = args.num_agents
    shapes = {
        "returns": (n,),
        "log_probs": (n, 2, 3),
        "policies": (n, 2, 2, 3),
        "gains": (n, n),
    }
    names = inspect.signature(make_communicator).parameters.keys() & shapes.keys()
    generator = torch.Generator().manual_seed(0)
    return {name: torch.rand(shapes[name], generator=generator) for name in sorted(names)}


def check_communicator(args: RunArgs, make_communicator: Callable, has_influence: bool) -> None:
    """Refuse a --communicator that is none, and say what has no effect.

    make_communicator: the script's; has_influence: whether peers are more than heard.
    """
    inputs = _draw_inputs(args, make_communicator)
    C = make_communicator(args, **inputs)
    if not has_influence and args.communicator != "identity" and args.agents_at_once > 1:
        announce("--kl-coef 0: policies are sent, and peers have no influence")
    if args.num_agents == 1:  # C is 1, whatever the flags
        return
    for flag in ("self_preference", "communicator_temperature"):
        value = getattr(args, flag)
        default = getattr(type(args), flag)
        without = dataclasses.replace(args, **{flag: default})
        if value != default and torch.equal(make_communicator(without, **inputs), C):
            flag = f"--{flag.replace('_', '-')} {value}"
            announce(f"{flag}: is not read by --communicator {args.communicator}")


def refuse_communicator(args: RunArgs, reason: str) -> None:
    """Refuse the flags of C in a script that reads none; reason: why they have no effect."""
    for flag in (
        "communicator",
        "self_preference",
        "communicator_temperature",
        "topology",
        "top_k",
    ):
        if getattr(args, flag) != getattr(type(args), flag):
            refuse(args, flag, f"has no effect: {reason}; leave it out")


def announce(line: str) -> None:
    """Print a line, once for all processes of torchrun."""
    if os.environ.get("RANK", "0") == "0":
        print(line, flush=True)


def _check_device(args: RunArgs) -> None:
    """Refuse a device that this machine does not have."""
    devices = ["auto", "cpu"]
    if torch.cuda.is_available():
        devices += ["cuda", *(f"cuda:{k}" for k in range(torch.cuda.device_count()))]
    if args.device not in devices:
        refuse(args, "device", f"choose {', '.join(devices)}")


def _check_run_dir(args: RunArgs) -> None:
    """Refuse a folder for the run that cannot be written to, or has too little disk space."""
    flag = "resume" if args.resume else "run_dir"
    run_dir = Path(getattr(args, flag)).absolute()
    try:
        folder = next(path for path in (run_dir, *run_dir.parents) if path.exists())
        is_writable = folder.is_dir() and os.access(folder, os.W_OK)
    except OSError:  # it may not even be looked at, or has too long a name
        is_writable = False
    if not is_writable:
        refuse(args, flag, "must be a folder that can be written to")
    if args.resume:
        for checkpoints in sorted(run_dir.glob("checkpoints/agent_*")):
            if not os.access(checkpoints, os.W_OK):
                refuse(args, flag, f"{checkpoints} cannot be written to")
    megabytes = 64 + 64 * args.agents_at_once
    if shutil.disk_usage(folder).free < megabytes * 2**20:
        refuse(args, flag, f"needs {megabytes} MB of free disk space")


# The settings of an existing run: --resume


def list_words(args: RunArgs) -> list[str]:
    """The words of a command line that give these settings, where they differ from the defaults.

    Without --resume, which the settings do not depend on.
    """
    defaults = vars(type(args)())
    no_flags = {"resume", *_list_contents(type(args))}
    words = []
    for name, value in vars(args).items():
        if value == defaults[name] or name in no_flags:
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, tuple | list):
            elements = [str(element) for element in value]
            # The first one may begin with a dash
            words.append("=".join([f"--{flag}", *elements[:1]]))
            words += elements[1:]
        else:
            words.append(f"--{flag}={value}")
    return words


def _list_contents(Args: type) -> list[str]:
    """The settings that are no flags: what a flag's file held when the run began."""
    hints = typing.get_type_hints(Args, include_extras=True)
    return [
        name for name in hints if tyro.conf.Suppress in getattr(hints[name], "__metadata__", ())
    ]


def read_run(given: RunArgs, words: Iterable[str] = ()) -> RunArgs:
    """The arguments of the run whose folder --resume names, with these words behind its own."""
    try:
        config = dict(json.loads(Path(given.resume, "config.json").read_text()))
    except (TypeError, ValueError, OSError, RecursionError) as error:
        valid = f"must be the folder of a run, with its config.json ({error})"
        refuse(given, "resume", valid)
    script = find_script(given)
    of_this_version = f"must be a run of this version of {script.name}"
    name = config.get("script")
    if name not in (None, script.stem):
        refuse(given, "resume", f"is a run of {name}.py, not of {script.name}")
    command = config.get("command")
    is_list_of_words = isinstance(command, list) and all(isinstance(word, str) for word in command)
    if name is None or not is_list_of_words:
        refuse(given, "resume", f"{of_this_version}; those of version 0.1 need commit 9627f85")
    launched = exchange_of_launcher is not None
    if bool(config.get("exchange")) != launched:
        began = "without" if launched else "under"
        refuse(given, "resume", f"was begun {began} federate.py; go on as it was begun")
    try:
        # The folder comes first, because the first word could have tyro write a file
        return read_config(type(given), config, [f"--resume={given.resume}"], words)
    except SystemExit:
        refuse(given, "resume", of_this_version)


def read_config(Args: type, config: dict, before: Iterable[str], behind: Iterable[str] = ()):
    """The arguments that config.json holds, with these words before and behind its own."""
    contents = {name: str(config.get(name, "")) for name in _list_contents(Args)}
    words = [*before, *config["command"], *behind]
    return read_flags(Args, words, default=Args(**contents))


def _read_resumed_settings(
    given: RunArgs, argv: list[str] | None, may_change: Iterable[str], again: Iterable[str]
) -> RunArgs:
    """The arguments of --resume: the run's settings, of which only some may be given anew.

    These are where the run stands, how often it is saved and evaluated, the device, tracking and
    `may_change`. Flags in `again` may name code: it is executed only if the flag is given again,
    because the run may be someone else's.
    """
    stored = read_run(given)
    for name in again:
        value = getattr(stored, name)
        if ".py" in str(value) and getattr(given, name) != value:
            problem = f"is code that {given.resume} names; give the flag again to have it executed"
            refuse(stored, name, problem)
    args = read_run(given, sys.argv[1:] if argv is None else argv)
    free = {"resume", "run_dir", "device", "timeout", "save_every", "eval_every", "track"}
    free |= {"wandb_project_name", "wandb_entity", *may_change}
    refuse_changes(args, stored, free, given.resume)
    return args


def refuse_changes(args: RunArgs, stored: RunArgs, free: set[str], folder: str) -> None:
    """Refuse flags, other than those in `free`, whose values are not the stored ones of the run."""
    changes = []
    for name, value in vars(args).items():
        before = getattr(stored, name)
        if name not in free and value != before:
            flag = f"--{name.replace('_', '-')}"
            changes.append(f"{flag} {_show(value)} must be {_show(before)}")
    if changes:
        stop(f"{'; '.join(changes)}, as in {folder}, or left out", WRONG_VALUE)


# Seeds and statistics


def derive_seed(*key: int) -> int:
    """A 31-bit seed for a key such as (seed, agent, environment, checkpoint).

    A key never holds a rank, and no seed is global.
    """
    return int(np.random.SeedSequence(key).generate_state(1)[0] >> 1)


def mean(values) -> float:
    """The mean, NaN of no values: an agent without a finished episode has no return."""
    return float(np.mean(values)) if len(values) else math.nan


def mean_and_half_interval(values) -> tuple[float, float]:
    """The mean of an evaluation's samples, and half its 95 % interval by Student's t.

    NaN is left out; of fewer than two samples the interval is NaN.
    """
    samples = np.asarray(values, dtype=float)
    samples = samples[~np.isnan(samples)]
    half = math.nan
    with np.errstate(invalid="ignore"):  # of infinite samples
        if len(samples) > 1:
            quantile = stdtrit(len(samples) - 1, 0.975)
            half = float(quantile * samples.std(ddof=1) / math.sqrt(len(samples)))
        return mean(samples), half


def format_interval(mean: float, half: float) -> str:
    """A mean and half its interval as in "0.500 ± 0.100"; without an interval the mean alone."""
    if math.isnan(half):
        return f"{mean:.3f}"
    return f"{mean:.3f} ± {half:.3f}"


# --- 4. the run: folder, logs, checkpoints, signals, timing, summary ---


def write_atomically(path: Path, write: Callable) -> None:
    """`write(file)` to a temporary file beside `path`, which it then replaces.

    A crash leaves the old file whole, an error no temporary one, which may fill the disk.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        # torch.save hides the file's error behind one of its own
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _write_text(path: Path, text: str) -> None:
    """As `write_atomically`, a text."""
    write_atomically(path, lambda file: file.write(text.encode()))


# Output, which never decides about a run


class _Stream(io.TextIOWrapper):
    """A standard stream that loses what cannot be written, as into a pipe that nobody reads."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


def open_streams() -> None:
    """Make standard streams accept all text: closed ones, broken ones and those in ASCII."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # Closed: else a log would get the number, and with it the output of libraries
            nothing = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115
            os.set_inheritable(nothing.fileno(), True)
            setattr(sys, name, nothing)
            setattr(sys, f"__{name}__", nothing)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):
            continue  # replaced, by a test for example
        with contextlib.suppress(OSError):
            stream.flush()
        options = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
        lenient = _Stream(stream.buffer, stream.encoding, "backslashreplace", **options)
        setattr(sys, name, lenient)


def _format_value(value: object) -> object:
    """A value for a CSV file: six digits, but all of a whole number, which may be a counter."""
    if not isinstance(value, float):
        return value
    is_whole = value.is_integer() and abs(value) < 2**53
    return f"{value:.0f}" if is_whole else f"{value:.6g}"


# Divergence

# The terms of a loss. Other metrics may be infinite or NaN without harm, as the explained variance
# of equal returns is
LOSS_TERMS = (
    "losses/policy_loss",
    "losses/value_loss",
    "losses/entropy",
    "losses/kl_reference",
    "losses/kl_anchor",
    "losses/proximal_loss",
)
# What is finite while an agent's policy and its reference are: with Gaussians entropy is not enough
POLICY_METRICS = ("losses/entropy", "losses/approx_kl", "losses/kl_reference")


# What a checkpoint holds


def _to_stored(source: object) -> object:
    """What a checkpoint holds of an object of the state."""
    match source:
        case torch.Generator():
            return source.get_state()
        case Tensor():
            return source.clone()  # a view would take all of its storage along
        case list() | deque():
            return list(source)
        case _:
            return source.state_dict()


def _restore_in_place(target: object, stored: object) -> None:
    """The inverse of `_to_stored`: the object of the state takes what a checkpoint holds of it."""
    match target:
        case torch.Generator():
            target.set_state(stored.cpu())
        case Tensor():
            target.copy_(stored)
        case list() | deque():
            target.clear()
            target.extend(stored)
        case _:
            target.load_state_dict(stored)


def _is_whole(path: Path) -> bool:
    """Whether a checkpoint is all there, unchanged, and no larger in memory than on the disk."""
    data = path.read_bytes()  # an error of the disk says nothing about the file
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            entries = file.infolist()
            is_stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
            # torch does not read a file in which something stands before the first entry
            begins = min(entry.header_offset for entry in entries) == 0
            return begins and is_stored and file.testzip() is None  # by checksums, unlike torch
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile, EOFError):
        return False


def stop_at_file(folder: Path, error: OSError) -> NoReturn:
    """End with one line where a file of a run cannot be read or written, as on a full disk."""
    message = f"{folder}: {error}"
    if any(folder.glob("checkpoints/*/*.pt")):
        message += "; what was saved before is kept, go on with --resume"
    stop(message, any_rank=True)


def _end_in_one_line(method: Callable) -> Callable:
    """A method of `Run` that ends with one line where a file cannot be read or written."""

    @functools.wraps(method)
    def guarded(self, *args, **kwargs):
        try:
            return method(self, *args, **kwargs)
        except OSError as error:
            stop_at_file(self.folder, error)

    return guarded


def _report_error_of_thread(arguments: threading.ExceptHookArgs) -> None:
    """As `threading.excepthook`, but for errors that a thread keeps for those who wait for it.

    TensorBoard's thread keeps that of a full disk, which the next write raises again.
    """
    if getattr(arguments.thread, "exception", None) is not arguments.exc_value:
        threading.__excepthook__(arguments)


# The signals that end a run after its iteration, with a checkpoint
SIGNALS = [signal.SIGINT, signal.SIGTERM]
if hasattr(signal, "SIGHUP"):  # not on Windows
    SIGNALS += [signal.SIGHUP, signal.SIGUSR1]  # as Slurm sends them before a time limit
# Seconds in which the same signal, other than Ctrl-C, is one request
SAME_REQUEST = 10.0


@dataclass(eq=False, repr=False)
class Run:
    """What surrounds training, the same for every algorithm; every script's `main` shows its use.

    state: {name: [object of each agent held]}, all that a resumed run needs and the settings do not
    determine. Modules and optimizers, generators, tensors, lists and deques are saved as
    they are and restored *in place*, so that one dict is used for both. Every agent has its own
    folder; a checkpoint counts once all agents have completed it.
    """

    args: RunArgs
    exchange: Exchange
    title: dataclasses.InitVar[str]  # the beginning of the folder's name
    _: dataclasses.KW_ONLY
    total: int  # iterations of the whole run
    units_per_iteration: int  # what all agents together do in one, counted in `unit`
    main_metric: str  # that of the progress line and of the final table
    env_ids: list[str] = ()  # each agent's task, in control
    steps_per_iteration: int = 1  # of an agent, in control; the horizontal axis counts them
    unit: str = "agent-steps"
    speed: str = "charts/SPS"  # the metric for units per second
    measure: str = "return"  # what the main metric and an evaluation measure
    samples: str = "episodes"  # over what an evaluation measures it
    main_column: str = "last 100 episodes"  # of the main metric in the final table
    counter: str = "iteration"  # what an iteration is called
    finite: tuple[str, ...] = LOSS_TERMS  # metrics that are finite unless an agent has diverged
    # names in metrics.csv of metrics that are not called there by the last part of their key
    columns: dict[str, str] = dataclasses.field(default_factory=dict)
    about: str = ""  # more to print at the start

    def __post_init__(self, title: str):
        exchange = self.exchange
        self.settings = exchange.settings | vars(self.args)
        self.chief = exchange.rank == 0  # writes the common logs
        self._compare_ranks()
        # Long names are cut, since file systems allow 255 bytes, and none leaves the folder of runs
        names = []
        for text in (title, self.args.exp_name):
            allowed = re.sub(r"[^\w.+-]", "-", text)
            names.append(allowed.encode()[:80].decode(errors="ignore"))
        prefix = f"{'__'.join(names)}__{self.args.seed}__"
        if exchange.label:
            prefix += f"{exchange.label}__"
        self.folder = self._open(prefix)
        self.iteration = 0
        self.interrupted = False
        self.latest = {}  # the last metrics {key: [agents]}
        self.results = {}  # the last evaluation {task: [agents, measures]}
        self.measures = ()  # names of the columns of an evaluation
        self.clock = Counter()  # phase -> seconds
        self.train_seconds = 0.0
        self._wall_seconds = 0.0  # before this process
        self._started = time.monotonic()
        self._last_progress = -math.inf  # when the last line of progress was printed
        self._matrix_digest = None  # of C and distances as logged last
        # A second Ctrl-C, or another signal again after SAME_REQUEST, ends the run at once
        self._trained = False
        self._signals = {}  # their numbers, and when they first came
        exchange.interrupted = lambda: next(iter(self._signals), 0)
        self._handlers = {}
        for number in SIGNALS:
            if number != signal.SIGINT and signal.getsignal(number) == signal.SIG_IGN:
                continue  # by nohup
            self._handlers[number] = signal.signal(number, self._request_stop)

    def _request_stop(self, number: int, frame) -> None:
        """The handler of signals."""
        if self.chief and not self._signals:
            work = f"this {self.counter}, then a checkpoint"
            if self._trained:
                work = "the evaluation"
            times = "again" if number == signal.SIGINT else "twice"
            # Not by print, which may be what the signal has interrupted
            with contextlib.suppress(OSError):
                os.write(2, f"\nfinishing {work}; Ctrl-C {times} to end at once\n".encode())
        now = time.monotonic()
        first = self._signals.setdefault(number, now)
        # The next one ends the run; but Slurm sends its own to all, and torchrun passes them on
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
        elif now - first > SAME_REQUEST:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _compare_ranks(self) -> None:
        """End where ranks differ from rank 0 in settings, code or torch: it writes config.json."""
        may_differ = ("device", "run_dir", "resume")
        settings = {
            name: value for name, value in vars(self.args).items() if name not in may_differ
        }
        code = [path.read_bytes() for path in _list_code(self.args)]
        self._code_digest = hashlib.sha256(repr(code).encode()).hexdigest()
        compared = settings, self._code_digest, torch.__version__
        digest = hashlib.sha256(repr(compared).encode()).digest()
        different_ranks = self.exchange.find_different_ranks(int.from_bytes(digest[:7], "big"))
        if different_ranks:
            ranks = ", ".join(map(str, different_ranks))
            what = "settings, code or version of torch"
            stop(f"ranks {ranks} differ from rank 0 in {what}; start all alike")

    # The folder

    @property
    def name(self) -> str:
        """The name of the run's folder, also where --resume is "."."""
        return self.folder.absolute().name

    @_end_in_one_line
    def _open(self, prefix: str) -> Path:
        """The folder of --resume, of this torchrun's last attempt, or a new one (as CleanRL)."""
        self.folder = Path(self.args.resume or self.args.run_dir)  # for the line of an error here
        elastic_run = os.environ.get("TORCHELASTIC_RUN_ID")
        if elastic_run == "none":  # torchrun without --rdzv-id: its process tells runs apart
            elastic_run = f"none {os.getppid()}"
        origin = {
            "script": find_script(self.args).stem,
            "command": list_words(self.args),
            "elastic_run": elastic_run,
        }
        config = json.dumps(origin | self.settings | {"resume": ""}, indent=2)
        self._config = config
        if self.args.resume:
            if self.chief:
                self._lock_folder(self.folder)
            return self.folder
        runs = Path(self.args.run_dir)
        stamp = torch.zeros(1, dtype=torch.long)
        if self.chief:
            last_attempt = self._find_last_attempt(runs, prefix, config)
            stamp += last_attempt or self._make_folder(runs, prefix)
            folder = runs / f"{prefix}{stamp.item()}"
            self._lock_folder(folder)
            _write_text(folder / "config.json", config)
        stamp = self.exchange.broadcast(stamp)
        folder = runs / f"{prefix}{stamp.item()}"
        if get_local_rank() == 0 and not folder.exists():  # a machine with a disk of its own
            folder.mkdir(parents=True, exist_ok=True)
            _write_text(folder / "config.json", config)
        return folder

    def _lock_folder(self, folder: Path) -> None:
        """End if another process trains in this folder, else keep others out until `finish`.

        The system frees the lock of a process that is killed.
        """
        # Never opened again: a process loses its lock when it closes any handle of the file
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if fcntl is None:
                raise OSError("this system has none")
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            stop(f"{folder}: another process is training in this folder")
        except OSError as error:
            warning = "no file locks here, so let one process at a time train in it"
            print(f"{folder}: {warning} ({error})", flush=True)

    @staticmethod
    def _find_last_attempt(runs: Path, prefix: str, config: str) -> int:
        """The time in the name of the run that this torchrun began; 0 if this is no restart.

        torchrun --max-restarts starts its processes again after a crash, unattended.
        """
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) == 0:
            return 0
        last = 0
        for path in runs.glob(f"{prefix}*/config.json"):
            stamp = path.parent.name.removeprefix(prefix)
            if stamp.isdecimal() and path.read_text() == config:  # not a copy, such as ..._backup
                last = max(last, int(stamp))
        return last

    @staticmethod
    def _make_folder(runs: Path, prefix: str) -> int:
        """Make the folder of a new run. Returns the time in its name."""
        stamp = int(time.time())
        while True:
            try:
                Path(runs, f"{prefix}{stamp}").mkdir(parents=True)
                return stamp
            except FileExistsError:  # a run of the same second
                stamp += 1

    # Checkpoints

    def _checkpoints(self, agent: int) -> Path:
        """The folder of an agent's checkpoints."""
        return self.folder / "checkpoints" / f"agent_{agent}"

    def _list_checkpoints(self, agent: int) -> list[Path]:
        """The files of an agent's checkpoints, oldest first."""
        paths = self._checkpoints(agent).glob("*.pt")
        return sorted((path for path in paths if path.stem.isdecimal()), key=lambda p: int(p.stem))

    def _candidates(self, agent: int) -> list[int]:
        """The iterations that an agent can go on from, newest first.

        0, the start, is among them where the agent has not written two checkpoints.
        """
        files = self._list_checkpoints(agent)[::-1]
        iterations = []
        for path in files:
            if _is_whole(path):
                iterations.append(int(path.stem))
            else:
                print(f"{path} is damaged, looking for one before it", flush=True)
        if len(files) < 2:
            iterations.append(0)
        return iterations

    @_end_in_one_line
    def restore(self, state: dict[str, list]) -> None:
        """Go on from the newest checkpoint that all agents completed, if any, and open the logs.

        A checkpoint that cannot be read is passed over for the one before it. An agent without any,
        while others are past their first, is an error: it would start anew beside them.
        """
        state = state | self.exchange.state()
        self.iteration = self._find_common_iteration()
        if self.iteration > self.total:
            done = f"has {self.iteration} {self.counter}s already"
            message = f"{self.folder}: {done}, more than the {self.total} asked for"
            stop(message, WRONG_VALUE)
        if self.iteration:
            self._restore_from_checkpoints(state)
        if self.chief:
            self._open_logs()
            # All that may fail has succeeded: only now is a finished run no longer what it was
            if self.args.resume:
                # Settings changed now are kept when the run is resumed again
                _write_text(self.folder / "config.json", self._config)
            # A run that is resumed, perhaps extended, is not completed, even if it is killed before
            # its end
            (self.folder / "summary.json").unlink(missing_ok=True)
        self._remove_newer_checkpoints()

    def _find_common_iteration(self) -> int:
        """The newest iteration that all agents of all ranks can go on from."""
        local = []
        for i in self.exchange.agents:
            padded = self._candidates(i) + [-1, -1, -1]
            local.append(padded[:3])
        gathered = self.exchange.all_gather(torch.tensor(local)).tolist()  # [agents, 3]
        candidates = {i: gathered[i] for i in self.exchange.members}
        common = set.intersection(*map(set, candidates.values())) - {-1}
        if not common:
            descriptions = []
            for i, row in candidates.items():
                checkpoints = sorted(set(row) - {-1, 0})
                descriptions.append(f"agent {i}: {checkpoints or 'none'}")
            problem = f"no checkpoint is there for all agents ({'; '.join(descriptions)})"
            stop(f"{self.folder}: {problem}; bring back what is missing")
        return max(common)

    def _restore_from_checkpoints(self, state: dict[str, list]) -> None:
        """Restore the agents held, the totals of the run, and the last metrics of all agents."""
        latest = []  # of each agent held
        for k, i in enumerate(self.exchange.agents):
            path = self._checkpoints(i) / f"{self.iteration}.pt"
            try:
                stored = torch.load(path, map_location=self.exchange.device, weights_only=True)
                missing = ", ".join(sorted(state.keys() - stored.keys()))
                if missing:
                    problem = f"is of another version, its checkpoints have no {missing}"
                    stop(f"{self.folder}: {problem}", any_rank=True)
                for name, objects in state.items():
                    _restore_in_place(objects[k], stored[name])
                totals = stored["run"]
                latest.append(list(totals["latest"].values()))
            except Exception as error:  # a foreign file may raise anything, but executes nothing
                stop(f"{path}: cannot be restored: {first_line(error)}", any_rank=True)
        self.train_seconds = totals["train"]
        self._wall_seconds = totals["wall"]
        self.clock = Counter(totals["clock"])
        self.exchange.bytes_sent = totals["bytes"]
        self._matrix_digest = totals["shown"]
        if self.chief and totals.get("code") != self._code_digest:
            print(f"{self.folder}: the code is no longer that of its last checkpoint", flush=True)
        gathered = self.exchange.all_gather(torch.tensor(latest, dtype=torch.float64))
        self.latest = dict(zip(totals["latest"], gathered.T.tolist(), strict=True))

    def _remove_newer_checkpoints(self) -> None:
        """Remove the checkpoints of agents that were ahead.

        Or their next save would delete what the others may need again.
        """
        for i in self.exchange.agents:
            for path in self._list_checkpoints(i):
                if int(path.stem) > self.iteration:
                    path.unlink()

    def saves(self) -> bool:
        """Whether a checkpoint is due: a scheduled one, the last, or that of an interrupted run."""
        self._note_interruption()
        return self.due(self.args.save_every) or self.iteration == self.total or self.interrupted

    @_end_in_one_line
    def save(self, state: dict[str, list]) -> None:
        """Write each agent's checkpoint; the one before it is kept. Returns when all ranks have."""
        state = state | self.exchange.state()
        totals = {
            "train": self.train_seconds,
            "wall": self._wall(),
            "shown": self._matrix_digest,
            "code": self._code_digest,
            "clock": dict(self.clock),
            "bytes": self.exchange.bytes_sent,
        }
        if self.chief:
            for log in self._logs:
                log.flush()
        for k, i in enumerate(self.exchange.agents):
            latest = {key: column[i] for key, column in self.latest.items()}
            values = {"run": totals | {"latest": latest}}
            values |= {name: _to_stored(objects[k]) for name, objects in state.items()}
            folder = self._checkpoints(i)
            folder.mkdir(parents=True, exist_ok=True)
            write = functools.partial(torch.save, values)
            write_atomically(folder / f"{self.iteration}.pt", write)
            for path in self._list_checkpoints(i)[:-2]:
                path.unlink()
        self._note_interruption()
        self.exchange.barrier()

    @_end_in_one_line
    def save_weights(self, name: str, network: nn.Module) -> None:
        """Write a network's parameters and buffers to NAME.safetensors."""
        try:
            save_file(network.state_dict(), self.folder / f"{name}.safetensors")
        except SafetensorError as error:  # also of a full disk
            raise OSError(str(error)) from error

    def _note_interruption(self) -> None:
        """In one process a signal during an evaluation or a checkpoint needs no other iteration.

        Ranks agree on an interruption in `log` only. Behind the last iteration the run ends anyway.
        """
        if not self.exchange.distributed and self.iteration < self.total:
            self.interrupted = self.interrupted or bool(self._signals)

    # The loop

    def iterations(self) -> Iterator[int]:
        """The iterations that are left, from 1; an interruption makes the current one the last."""
        if self.iteration:  # a resumed run may have made up for an evaluation
            self._note_interruption()
        while self.iteration < self.total and not self.interrupted:
            self.iteration += 1
            self._began = time.perf_counter()
            self._tock = self._began
            yield self.iteration
        self._trained = True

    def evaluates(self) -> bool:
        """Whether an evaluation during training is due. One of an interrupted run waits for its
        resume.
        """
        is_due = self.due(self.args.eval_every) and self.iteration < self.total
        return is_due and not self.interrupted

    @_end_in_one_line
    def misses_evaluation(self) -> bool:
        """Whether a resumed run lacks the evaluation of its last iteration: it was interrupted or
        failed there.
        """
        if not self.iteration or not self.evaluates():
            return False
        misses = torch.zeros(len(self.exchange.agents), 1)
        if self.chief:  # which has the file
            with open(self.folder / "evaluations.csv", newline="") as file:
                evaluated = {row[self.counter] for row in csv.DictReader(file)}
            misses[:] = str(self.iteration) not in evaluated
        return bool(self.exchange.all_gather(misses).nansum() > 0)

    def due(self, every: int) -> bool:
        """Whether this iteration is one of every `every`; 0 is never."""
        return every > 0 and self.iteration % every == 0

    def tick(self, phase: str) -> None:
        """Count the time since the last tick for `phase`."""
        if self.exchange.device.type == "cuda":
            # Kernels that were only launched belong to this phase
            torch.cuda.synchronize(self.exchange.device)
        now = time.perf_counter()
        self.clock[phase] += now - self._tock
        self._tock = now

    def _wall(self) -> float:
        """Seconds since the start of the run, without the time between an end and a resume."""
        return self._wall_seconds + time.monotonic() - self._started

    # Logs

    def _open_logs(self) -> None:
        """Open TensorBoard, W&B and the CSV files, without rows after the current iteration."""
        start = self.iteration
        about = f"{self.exchange.num_agents} agents on {self.exchange.device}"
        if self.exchange.label:
            about = f"{self.exchange.label.replace('_', ' ')} of {about}"
        if self.about:
            about = f"{about}, {self.about}"
        if getattr(self.args, "gate", "none") != "none":
            about = f"{about}, gated by {self.args.gate}"
        print(f"{self.folder}: {about}", flush=True)
        if start:
            print(f"resuming after {self.counter} {start} of {self.total}", flush=True)
        if self.args.track:
            self._open_wandb()
        from torch.utils.tensorboard import SummaryWriter

        threading.excepthook = _report_error_of_thread
        self.writer = SummaryWriter(self.folder, purge_step=start * self.steps_per_iteration + 1)
        table = "\n".join(f"|{key}|{value}|" for key, value in self.settings.items())
        self.writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{table}")
        self._metrics = self._open_csv("metrics.csv", start)
        self._communicators = self._open_csv("communicator.csv", start)
        # The last evaluation is done again
        self._evaluations = self._open_csv("evaluations.csv", min(start, self.total - 1))
        self._logs = (self.writer, self._metrics, self._communicators, self._evaluations)

    def _open_wandb(self) -> None:
        """Begin or go on with the run on Weights & Biases, which reads TensorBoard's logs."""
        import wandb

        name = self.name
        if len(name) > 128:  # W&B's limit
            digest = hashlib.sha256(name.encode()).hexdigest()
            name = f"{name[:111]}-{digest[:16]}"
        try:
            wandb.init(
                project=self.args.wandb_project_name,
                entity=self.args.wandb_entity,
                config=self.settings,
                name=name,
                id=name,
                resume="allow",
                sync_tensorboard=True,
            )
        except Exception as error:  # of the login, the network or the server
            stop(f"--track: Weights & Biases cannot be used: {first_line(error)}")

    def _open_csv(self, name: str, last: int):
        """Open a log whose rows begin with the iteration, with its rows up to iteration `last`."""
        path = self.folder / name
        text = io.StringIO(newline="")
        if self.iteration and path.exists():
            text_there = path.read_text(errors="replace").replace("\0", "")
            lines = re.split("[\r\n]+", text_there)
            # Each for itself: a damaged one may open a quotation that never ends
            rows = [next(csv.reader([line])) for line in lines if 0 < len(line) < 2**17]
            kept = rows[:1]
            for row in rows[1:]:
                is_whole = re.fullmatch("[0-9]{1,18}", row[0]) and len(row) == len(rows[0])
                if is_whole and int(row[0]) <= last:
                    kept.append(row)
            csv.writer(text).writerows(kept)
        _write_text(path, text.getvalue())
        return open(path, "a", newline="")

    @staticmethod
    def _write_row(file, row: dict) -> None:
        """Add a row to a CSV file, after the header if it is the first."""
        writer = csv.writer(file)
        if file.tell() == 0:
            writer.writerow(row)
        writer.writerow(_format_value(value) for value in row.values())

    @_end_in_one_line
    def log(
        self,
        rows: list[dict[str, float]],
        communicator: Tensor,
        distances: Tensor,
        scalars: dict[str, float],
    ) -> None:
        """Write this iteration to TensorBoard and W&B, both CSV files and the screen.

        rows: metrics of each agent held, under TensorBoard's keys, in the same order everywhere.
        TensorBoard has them per agent and as the group's mean, in which NaN is left out.
        communicator, distances: [agents, agents]. scalars: of all agents together. Training time
        stops here. Ranks agree here on an interruption.
        """
        diverged_before = self._find_diverged_agents()
        self._gather_metrics(rows)
        matrix_changed = self._note_matrices(communicator, distances)
        if not self.chief:
            return
        for i, problem in self._find_diverged_agents().items():
            if i not in diverged_before:
                of_policy = [self.latest[name][i] for name in POLICY_METRICS if name in self.latest]
                if self.env_ids and of_policy and all(map(math.isfinite, of_policy)):
                    problem = f"{problem}; its policy is finite: check the rewards of its task"
                place = f"{self.counter} {self.iteration}"
                print(f"\n{place}: agent {i} has diverged: {problem}", flush=True)
        rate = self._rate()
        scalars = scalars | self.exchange.describe()
        self._log_to_tensorboard(scalars, rate, communicator, distances, matrix_changed)
        self._log_metrics(scalars, rate)
        if matrix_changed:
            self._log_communicator(communicator, distances)
        self._print_progress(self._describe_progress(rate), is_due=self.iteration == self.total)

    def _gather_metrics(self, rows: list[dict[str, float]]) -> None:
        """The last metrics of all agents, and whether any rank was interrupted; stop the clock."""
        local = [[*row.values(), len(self._signals)] for row in rows]
        gathered = self.exchange.all_gather(torch.tensor(local, dtype=torch.float64))
        *columns, signals = gathered.T.tolist()  # [metrics + 1, agents]
        self.interrupted = any(signals[i] for i in self.exchange.members)
        self.train_seconds += time.perf_counter() - self._began
        self.latest = dict(zip(rows[0], columns, strict=True))

    def _find_diverged_agents(self) -> dict[int, str]:
        """The agents that have diverged, with the first of their metrics that is not finite."""
        diverged = {}
        for i in self.exchange.members:
            for key in self.finite:
                if key in self.latest and not math.isfinite(self.latest[key][i]):
                    diverged.setdefault(i, f"{key} is {self.latest[key][i]}")
        return diverged

    def _note_matrices(self, communicator: Tensor, distances: Tensor) -> bool:
        """Whether C or the distances are others than in the last iteration."""
        # NaN is replaced, so that it is equal to NaN
        values = torch.stack((communicator, distances)).double().nan_to_num(nan=-1.0)
        digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()
        changed = digest != self._matrix_digest
        self._matrix_digest = digest
        return changed

    def _log_to_tensorboard(
        self,
        scalars: dict[str, float],
        rate: float,
        communicator: Tensor,
        distances: Tensor,
        matrix_changed: bool,
    ) -> None:
        """Write this iteration's scalars to TensorBoard."""
        n = self.exchange.num_agents
        members = self.exchange.members
        scalars = scalars | {
            self.speed: rate,
            "communication/non_expansion": non_expansion(communicator[list(members)]),
        }
        if n <= FEW_AGENTS:
            for i in members:
                for j in range(n):
                    scalars[f"communicator/c_{i}_{j}"] = communicator[i, j].item()
                    # Of two members the first one has the pair, of others the member
                    if j > i or j not in members:
                        pair = "_".join(f"agent_{number}" for number in sorted((i, j)))
                        scalars[f"distances/{pair}"] = distances[i, j].item()
        elif matrix_changed:
            scalars |= summarize_communicator(communicator, distances)
        for key, column in self.latest.items():
            for i, value in enumerate(column):
                scalars[f"{key}/agent_{i}"] = value
            scalars[key] = mean([value for value in column if not math.isnan(value)])
        step = self.iteration * self.steps_per_iteration
        for key, value in scalars.items():
            if not math.isnan(value):
                self.writer.add_scalar(key, value, step)

    def _log_metrics(self, scalars: dict[str, float], rate: float) -> None:
        """Write a row of metrics.csv for each agent."""
        common = {}
        for key, value in scalars.items():
            if not key.startswith("rewards/"):  # of a reward function's own, not in every step
                common[key.rpartition("/")[2]] = value
        common["communication_bytes"] = common.pop("bytes")
        common[f"{self.unit.replace('-', '_')}_per_second"] = rate
        for i in self.exchange.members:
            row = {self.counter: self.iteration, "agent": i}
            if self.env_ids:
                row["env_id"] = self.env_ids[i]
                row["timesteps"] = self.iteration * self.steps_per_iteration
            row["seed"] = self.args.seed
            row["exp_name"] = self.args.exp_name
            for key, column in self.latest.items():
                name = self.columns.get(key, key.rpartition("/")[2])
                row[name] = column[i]
            self._write_row(self._metrics, row | common)
        self._metrics.flush()

    def _log_communicator(self, communicator: Tensor, distances: Tensor) -> None:
        """Write C and the distances to communicator.csv: all pairs of few agents, else of C's."""
        n = self.exchange.num_agents
        pairs = torch.ones(n, n) if n <= FEW_AGENTS else communicator
        for i, j in pairs.nonzero().tolist():
            if i not in self.exchange.members:
                continue
            row = {
                self.counter: self.iteration,
                "listener": i,
                "peer": j,
                "weight": communicator[i, j].item(),
                "distance": distances[i, j].item(),
            }
            self._write_row(self._communicators, row)

    def _describe_progress(self, rate: float) -> str:
        """The line of progress."""
        seconds = round((self.total - self.iteration) * self.train_seconds / self.iteration)
        time_left = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        decimals = 0 if rate > 20 else 2
        headlines = self.latest[self.main_metric]
        values = " ".join(f"{headlines[i]:.2f}" for i in self.exchange.members)
        return (
            f"{self.counter} {self.iteration}/{self.total}  {rate:,.{decimals}f} {self.unit}/s  "
            f"{time_left} left  {self.measure} {values}"
        )

    def _print_progress(self, text: str, is_due: bool = False) -> None:
        """Print a line of progress that is due, or the first one for ten seconds.

        In a terminal each replaces the one before.
        """
        if sys.stdout.isatty():
            print(f"\r\033[K{text}", end="", flush=True)
        elif is_due or time.monotonic() - self._last_progress > 10:
            print(text, flush=True)
        else:
            return
        self._last_progress = time.monotonic()

    # Evaluation and end

    def print_evaluated(self, done: int, total: int, what: str) -> None:
        """Print how far an evaluation is, which may take as long as the training."""
        if self.chief and done < total:
            self._print_progress(f"evaluated {done} of {total} {what}")

    def log_evaluation(self, results: Iterable[dict[str, dict[str, np.ndarray]]]) -> None:
        """Write an evaluation.

        results: of each agent held, task -> column -> a value per sample, the measure first; a
        generator may evaluate one agent after another. Means, and half the 95 % interval of the
        measure (Student's t; NaN for fewer than two values), go to TensorBoard, evaluations.csv and
        the summary. An evaluation may take one rank much longer than another.
        """
        finished = []
        for columns_of_tasks in results:
            finished.append(columns_of_tasks)
            if not isinstance(results, list):
                self.print_evaluated(len(finished), len(self.exchange.agents), "agents")
        self.exchange.wait_for_all()
        self._write_evaluation(finished)

    @_end_in_one_line
    def _write_evaluation(self, results: list[dict[str, dict[str, np.ndarray]]]) -> None:
        """Gather the evaluation's means and write them."""
        tasks = results[0]
        names = [name for name in next(iter(tasks.values())) if name != self.measure]
        self.measures = ("mean", "ci95", *names)
        local = []  # [agents held, tasks * measures]
        for columns_of_tasks in results:
            row = []
            for columns in columns_of_tasks.values():
                row += mean_and_half_interval(columns[self.measure])
                row += [mean_and_half_interval(columns[name])[0] for name in names]
            local.append(row)
        gathered = self.exchange.all_gather(torch.tensor(local, dtype=torch.float64))
        gathered = gathered.unflatten(1, (len(tasks), len(self.measures)))
        self.results = {task: gathered[:, k].tolist() for k, task in enumerate(tasks)}
        if not self.chief:
            return
        step = self.iteration * self.steps_per_iteration
        for i in self.exchange.members:
            for task, columns in tasks.items():
                value, half, *others = self.results[task][i]
                self.writer.add_scalar(f"eval/{task}/agent_{i}", value, step)
                row = {self.counter: self.iteration, "agent": i, "task": task}
                if self.env_ids:
                    row["timesteps"] = step
                row[self.samples] = len(columns[self.measure])
                row[f"mean_{self.measure}"] = value
                row["ci95"] = half
                row |= dict(zip(names, others, strict=True))
                self._write_row(self._evaluations, row)

    @_end_in_one_line
    def write_json_lines(self, name: str, rows: list[dict]) -> None:
        """Add rows to a log of JSON lines in the run's folder.

        Each begins with this iteration, under the name in `counter`, and an "agent" of this
        process. Rows that an interrupted run wrote behind its last checkpoint are replaced. Ranks
        write in turn, because they may share the file.
        """
        path = self.folder / name
        pattern = rf'({{"{self.counter}": (\d+), "agent": (\d+), .*}}\n)'
        for rank in range(self.exchange.world_size):
            if rank == self.exchange.rank:
                text = path.read_text(errors="replace") if path.exists() else ""
                lines = [json.dumps(row) + "\n" for row in rows]
                kept = []
                for line, iteration, agent in re.findall(pattern, text):
                    if int(iteration) < self.iteration or int(agent) not in self.exchange.agents:
                        kept.append(line)
                path.parent.mkdir(parents=True, exist_ok=True)
                _write_text(path, "".join(kept + lines))
            self.exchange.barrier()

    @_end_in_one_line
    def finish(self, **more) -> dict:
        """Close everything, write and return summary.json (with `more`), print the final table.

        An interrupted run ends here, with the signal's exit code and how to go on.
        """
        summary = json.dumps(self._summarize() | more)
        summary = json.loads(summary, parse_constant=lambda _: None)  # JSON has no NaN
        if self.chief:
            for log in self._logs:
                log.close()
            _write_text(self.folder / "summary.json", json.dumps(summary, indent=2))
            if self.args.track:
                sys.modules["wandb"].finish()
            self._print_end()
            os.close(self._lock)
        self.exchange.close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self.interrupted:
            sys.exit(128 + (self.exchange.interrupted() or signal.SIGTERM))
        return summary

    def _rate(self) -> float:
        """Units of work per second of training."""
        return self.iteration * self.units_per_iteration / max(self.train_seconds, 1e-9)

    def _evaluation_of(self, agent: int) -> dict[str, dict[str, float]]:
        """An agent's last evaluation: task -> measure -> value."""
        tasks = {}
        for task, rows in self.results.items():
            tasks[task] = dict(zip(self.measures, rows[agent], strict=True))
        return tasks

    def _summarize(self) -> dict:
        """What summary.json holds of every run."""
        agents = self.exchange.members
        recent = [self.latest[self.main_metric][i] for i in agents]
        evaluations = [self._evaluation_of(i) for i in agents]
        group = []
        for i, evaluation in zip(agents, evaluations, strict=True):
            # Each agent is judged by its own task
            task = self.env_ids[i] if self.env_ids else next(iter(evaluation), None)
            if task in evaluation:
                group.append(evaluation[task]["mean"])
        versions = {"python": sys.version.split()[0]}
        for package in PACKAGES:
            module = sys.modules.get(package.replace("-", "_"))
            if module is not None:
                versions[package] = str(getattr(module, "__version__", "unknown"))
        summary = {
            "script": find_script(self.args).stem,
            "run": self.name,
            "completed": not self.interrupted,
            "diverged": list(self._find_diverged_agents()),
            "settings": self.settings,
            "seed": self.args.seed,
            "versions": versions,
            "device": str(self.exchange.device),
            "world_size": self.exchange.world_size,
            f"{self.counter}s": self.iteration,
        }
        if self.env_ids:
            summary["timesteps_per_agent"] = self.iteration * self.steps_per_iteration
        return summary | {
            f"{self.unit.replace('-', '_')}_per_second": self._rate(),
            "train_seconds": self.train_seconds,
            "wall_seconds": self._wall(),
            "seconds": dict(self.clock),
            "communication_bytes": self.exchange.bytes_sent,
            f"training_{self.measure}": {
                "over": self.main_column,
                "group": mean(recent),
                "agents": recent,
            },
            "evaluation": {
                self.samples: getattr(self.args, f"eval_{self.samples}", None),
                "group": mean(group),
                "agents": evaluations,
            },
        }

    def _print_end(self) -> None:
        """Print the last evaluation, the speed, and how to go on with an interrupted run."""
        print(f"\nagent  {self.main_column}" + "".join(f"  {task:>17}" for task in self.results))
        recent = self.latest[self.main_metric]
        for i in self.exchange.members:
            line = f"{i:>5}  {recent[i]:>{len(self.main_column)}.3f}"
            for task, measures in self._evaluation_of(i).items():
                cell = format_interval(measures["mean"], measures["ci95"])
                line += f"  {cell:>{max(17, len(task))}}"
            print(line)
        decimals = 0 if self.steps_per_iteration > 1 else 2
        rate = f"{self._rate():,.{decimals}f} {self.unit}/s"
        print(f"{rate}, {self.exchange.bytes_sent:,} bytes sent, everything in {self.folder}")
        if self.interrupted:
            last = f"{self.iteration} of {self.total}"
            print(f"interrupted after {self.counter} {last}; go on with --resume {self.folder}")
        elif hasattr(self.args, "env_id") and PLAY.is_file():
            what = "play"
            words = [sys.executable, os.path.relpath(PLAY), str(self.folder)]
            if importlib.util.find_spec("imageio_ffmpeg"):
                what = "film"
                words += ["--video", str(self.folder / "videos")]
            print(f"to {what} its agents: {shlex.join(words)}")


# --- 5. speed: networks side by side ---


class Stacked:
    """Networks with the same layers as one product per layer, which makes small batches fast.

    It reads the networks' own layers, so these may be changed freely within `supported`; anything
    else is refused. A convolution of another kind has a `kernel()`, by which its input is
    multiplied instead of its weight.
    """

    supported = (
        nn.Conv2d,
        nn.Linear,
        nn.Flatten,
        # Functions of one number
        nn.ReLU,
        nn.LeakyReLU,
        nn.ELU,
        nn.GELU,
        nn.SiLU,
        nn.Tanh,
    )

    def __init__(self, networks: list[nn.Module], dtype: torch.dtype = torch.float32):
        """networks: layers, or sequences of layers, of the same sizes. dtype: of the products."""
        self.networks = []
        for network in networks:
            self.networks.append([*network] if isinstance(network, nn.Sequential) else [network])
        self.dtype = dtype
        for layer in self.networks[0]:
            is_plain = True  # a convolution is, if it is a product over patches
            if isinstance(layer, nn.Conv2d):
                kind = layer.padding, layer.dilation, layer.groups
                is_plain = kind == ((0, 0), (1, 1), 1)
            is_known = type(layer) in self.supported or hasattr(layer, "kernel")
            has_bias = getattr(layer, "bias", True) is not None
            if not (is_plain and is_known and has_bias):
                raise NotImplementedError(f"{layer} cannot be stacked")

    @torch.no_grad()
    def read(self) -> None:
        """Read the weights, after every update: of each layer (itself, size, weight, bias)."""
        self.layers = []
        channels = 0  # of the last convolution, until its output is flattened
        for layers in zip(*self.networks, strict=True):
            layer = layers[0]
            if not hasattr(layer, "weight"):
                self.layers.append((layer, None, None, None))
                continue
            kernels = [each.kernel() if hasattr(each, "kernel") else each.weight for each in layers]
            weight = torch.stack(kernels).to(self.dtype)
            bias = torch.stack([each.bias for each in layers]).to(self.dtype)
            size = None
            if isinstance(layer, nn.Conv2d):  # a product over patches: rows, columns, channels
                channels = weight.shape[1]
                size = weight.shape[3:]
                weight = weight.permute(0, 3, 4, 2, 1).flatten(1, 3).contiguous()
                bias = bias[:, None]
            else:
                if channels:  # what was flattened had its channels last
                    weight = weight.unflatten(2, (channels, -1)).mT.flatten(2)
                    channels = 0
                bias = bias[..., None]
            self.layers.append((layer, size, weight, bias))

    def __call__(self, x: Tensor) -> Tensor:
        """x: [networks, batch, features] or [networks, batch, rows, columns, channels].

        Returns the networks' outputs in the same form.
        """
        x = x.to(self.dtype)
        for layer, size, weight, bias in self.layers:
            if isinstance(layer, nn.Conv2d):
                patches = self.unfold(x, size, layer.stride)
                rows = patches.reshape(len(x), -1, weight.shape[1])
                x = torch.baddbmm(bias, rows, weight).view(*patches.shape[:4], -1)
            elif isinstance(layer, nn.Linear):  # few columns times many rows is fastest this way
                x = torch.baddbmm(bias, weight, x.mT).mT
            elif isinstance(layer, nn.Flatten):
                x = x.flatten(2)
            else:
                x = layer(x)
        return x

    @staticmethod
    def unfold(x: Tensor, size: torch.Size, stride: tuple[int, int]) -> Tensor:
        """Patches of x [networks, batch, rows, columns, patch row, patch column * channels]."""
        n, batch, height, width, _ = x.shape
        network, sample, row, column, _ = x.stride()
        down, right = stride
        rows = (height - size[0]) // down + 1
        columns = (width - size[1]) // right + 1
        shape = n, batch, rows, columns, size[0], size[1] * x.shape[-1]
        return x.as_strided(shape, (network, sample, down * row, right * column, row, 1))
