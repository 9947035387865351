"""Communicators, mixtures of policies, divergences and exchange: the mathematics that PRPO's scripts share.

A communicator C is a row-stochastic matrix [agents, agents]: row i says whom agent i listens to, column j who hears
agent j. Row i turns the policies of all agents into agent i's reference policy, C_i pi = sum_j c_ij pi_j.
Equation, example, definition and remark numbers are those of the PRPO paper. Everything here is a pure function,
except `Exchange`, which moves parameters and declared scalars between agents and nothing else.
"""

import datetime
import functools
import math
import os
import time
import warnings

import torch
import torch.distributed as dist
from torch import Tensor

COMMUNICATORS = ("identity", "uniform", "self-preferred", "similarity", "reward", "softmax-reward", "rank-reward")
TOPOLOGIES = ("full", "ring")
MIXTURES = ("arithmetic", "geometric")
KL_DIRECTIONS = ("forward", "reverse")

# --- constructors: every one returns a detached float32 tensor [agents, agents] with rows on the simplex ---


def identity(num_agents: int) -> Tensor:
    """C = I: isolated training (Example 2 with p = 1). Returns [agents, agents]."""
    return torch.eye(num_agents)


def uniform(num_agents: int) -> Tensor:
    """c_ij = 1/n: the paper's classic average. Returns [agents, agents]."""
    return torch.full((num_agents, num_agents), 1.0 / num_agents)


def self_preferred(num_agents: int, self_preference: float) -> Tensor:
    """Example 2: c_ii = p and c_ij = (1 - p) / (n - 1). One agent alone gets C = [[1]]. Returns [agents, agents].

    Raises ValueError if p is outside [0, 1].
    """
    if not 0.0 <= self_preference <= 1.0:
        raise ValueError(f"self-preference {self_preference} is outside [0, 1]")
    if num_agents == 1:
        return torch.ones(1, 1)
    others = (1.0 - self_preference) / (num_agents - 1)
    return torch.full((num_agents, num_agents), others).fill_diagonal_(self_preference)


def similarity(log_probs: Tensor) -> Tensor:
    """Example 3: c_ij proportional to the sum over S_ref of <pi_i(.|s), pi_j(.|s)>, row-normalised.

    log_probs: [agents, states, actions], every agent's log-probabilities on the *public* reference states S_ref.
    Returns [agents, agents].
    """
    probs = log_probs.detach().double().exp().flatten(1)  # [agents, states * actions]
    return _normalise_rows(probs @ probs.T)


def reward(returns: Tensor) -> Tensor:
    """Example 4: c_ij = r_j / sum_k r_k, the same row for every agent.

    returns: [agents], mean whole-episode unclipped returns since the last round; NaN where no episode ended.
    A negative return counts as 0 (with a warning), and so does an agent without data; if nothing positive is left the
    rows are uniform. Returns [agents, agents].
    """
    returns = returns.detach().double()
    if (returns < 0).any():
        message = "the reward communicator counts negative mean returns as 0; softmax-reward and rank-reward rank them"
        warnings.warn(message, stacklevel=2)
    returns = returns.nan_to_num(nan=0.0).clamp(min=0.0)
    returns = returns / returns.max().clamp(min=torch.finfo(returns.dtype).tiny)  # keeps the sum finite
    return _normalise_rows(returns.expand(len(returns), -1))


def softmax_reward(returns: Tensor, temperature: float = 1.0) -> Tensor:
    """Example 4 for signed rewards: c_ij = softmax_j(r_j / temperature), `temperature` in units of return.

    returns: [agents], NaN where no episode ended (weight 0; uniform if nobody has data). Returns [agents, agents].
    """
    if not temperature > 0:
        raise ValueError(f"temperature {temperature} must be positive")
    returns = returns.detach().double().nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    weights = ((returns - returns.max()) / temperature).exp().nan_to_num(nan=0.0)
    return _normalise_rows(weights.expand(len(weights), -1))


def rank_reward(returns: Tensor) -> Tensor:
    """Example 4 for signed rewards: weights proportional to the rank of r_j (worst 1, best n; ties share their mean).

    returns: [agents], NaN where no episode ended (weight 0; uniform if nobody has data). Returns [agents, agents].
    """
    returns = returns.detach().double()
    known = ~returns.isnan()
    below = ((returns[None] < returns[:, None]) & known[None]).sum(1)
    ties = (returns[None] == returns[:, None]).sum(1)
    rank = torch.where(known, below + (ties + 1) / 2, 0.0)
    return _normalise_rows(rank.expand(len(rank), -1))


def ring(num_agents: int) -> Tensor:
    """The ring topology: each agent hears itself and its two neighbours. Returns a bool mask [agents, agents]."""
    index = torch.arange(num_agents)
    distance = (index[None] - index[:, None]) % num_agents
    return (distance <= 1) | (distance == num_agents - 1)


def top_k(communicator: Tensor, k: int) -> Tensor:
    """Where each agent keeps itself and its k heaviest peers; of equal peers, the next ones along the ring.

    communicator: [agents, agents]. Returns a bool mask [agents, agents] with at most k + 1 entries in a row.
    """
    n = len(communicator)
    if k < 1:
        raise ValueError(f"top-k {k} must be positive")
    ahead = (torch.arange(n)[None] - torch.arange(n)[:, None]) % n  # how many places agent j stands after agent i
    by_distance = ahead.argsort(dim=1)[:, 1:]  # [agents, agents - 1], without oneself
    heaviest = communicator.gather(1, by_distance).argsort(dim=1, descending=True, stable=True)[:, :k]
    return torch.eye(n, dtype=torch.bool).scatter(1, by_distance.gather(1, heaviest), True)


def sparsify(communicator: Tensor, mask: Tensor) -> Tensor:
    """Zero outside the neighbourhood `mask` (bool [agents, agents]), rows renormalised. Returns [agents, agents].

    A row whose remaining weights are all 0 becomes uniform over its neighbourhood.
    """
    return _normalise_rows(communicator.detach().double() * mask, mask.double())


def drop_invalid(communicator: Tensor, valid: Tensor) -> Tensor:
    """Drop the peers whose snapshot is missing or invalid (`valid` bool [agents]) from every row and renormalise.

    A row with nobody left falls back on the agent itself. Returns [agents, agents].
    """
    return _normalise_rows(communicator.detach().double() * valid, torch.eye(len(valid), dtype=torch.double))


def make_communicator(
    name: str,
    num_agents: int,
    *,
    self_preference: float = 0.6,
    returns: Tensor | None = None,
    log_probs: Tensor | None = None,
    temperature: float = 1.0,
    topology: str = "full",
    num_peers: int = 0,
    valid: Tensor | None = None,
) -> Tensor:
    """The communicator `name` of this round, sparse where asked, without invalid peers. Returns [agents, agents].

    returns [agents] serves the reward family, log_probs [agents, states, actions] serves similarity; before the first
    round neither exists and those communicators are uniform. num_peers > 0 keeps the k heaviest peers.
    """
    if name not in COMMUNICATORS:
        raise ValueError(f"unknown communicator {name!r}; choose from {', '.join(COMMUNICATORS)}")
    if topology not in TOPOLOGIES:
        raise ValueError(f"unknown topology {topology!r}; choose from {', '.join(TOPOLOGIES)}")
    if name == "identity":
        return identity(num_agents)
    elif name == "self-preferred":
        matrix = self_preferred(num_agents, self_preference)
    elif name == "similarity" and log_probs is not None:
        log_probs = log_probs if valid is None else log_probs.masked_fill(~valid[:, None, None], 0.0)
        matrix = similarity(log_probs)
    elif name == "reward" and returns is not None:
        matrix = reward(returns)
    elif name == "softmax-reward" and returns is not None:
        matrix = softmax_reward(returns, temperature)
    elif name == "rank-reward" and returns is not None:
        matrix = rank_reward(returns)
    else:
        matrix = uniform(num_agents)
    if topology == "ring":
        matrix = sparsify(matrix, ring(num_agents))
    if num_peers > 0:
        matrix = sparsify(matrix, top_k(matrix, num_peers))
    return matrix if valid is None or valid.all() else drop_invalid(matrix, valid)


def non_expansion(communicator: Tensor) -> float:
    """The uniform non-expansion coefficient of C, its norm max_i sum_j |c_ij| (Definition 1, Remark 3): <= 1."""
    return communicator.abs().sum(1).max().item()


def _normalise_rows(weights: Tensor, fallback: Tensor | None = None) -> Tensor:
    """Rows divided by their sums; a row that sums to 0 becomes the normalised row of `fallback` (default: uniform)."""
    fallback = torch.ones_like(weights) if fallback is None else fallback
    weights = torch.where(weights.sum(1, keepdim=True) > 0, weights, fallback)
    return (weights / weights.sum(1, keepdim=True)).float()


# --- policies: mixtures and divergences ---


def mix_log_probs(log_probs: Tensor, weights: Tensor, mixture: str = "arithmetic") -> Tensor:
    """The reference policy C_i pi (eq. 4) as log-probabilities: row i of C applied to distributions.

    log_probs: [policies, ..., actions]; weights: [policies], on the simplex. Returns [..., actions], which sum to 1.
    arithmetic: log sum_j c_j pi_j. geometric: sum_j c_j log pi_j, renormalised. A policy of weight 0 has no influence,
    whatever its log-probabilities are. Raises ValueError if a geometric mixture has no common support.
    """
    if mixture not in MIXTURES:
        raise ValueError(f"unknown mixture {mixture!r}; choose from {', '.join(MIXTURES)}")
    heard = [(weight, log_probs[j]) for j, weight in enumerate(weights.to(log_probs).tolist()) if weight > 0]
    if mixture == "arithmetic":  # one policy after the other, because the vocabulary of a language model is large
        weighted = (own + math.log(weight) if weight != 1 else own for weight, own in heard)
        return functools.reduce(torch.logaddexp, weighted)
    unnormalised = sum(weight * own for weight, own in heard)
    if unnormalised.isneginf().all(-1).any():
        raise ValueError("the policies of a geometric mixture have no action in common")
    return torch.log_softmax(unnormalised, dim=-1)


def categorical_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Exact KL(p || q) over the whole action set, in nats.

    log_p, log_q: [..., actions], normalised. Returns [...]. Actions with p = 0 add 0; p > 0 = q gives infinity.
    """
    p = log_p.exp()
    return (p * (log_p - log_q).masked_fill(p == 0, 0.0)).sum(-1)


def kl_to_reference(log_policy: Tensor, log_reference: Tensor, direction: str = "forward") -> Tensor:
    """The penalty of eq. 4, KL(reference || policy) ("forward"), or of eq. 7, KL(policy || reference) ("reverse").

    log_policy, log_reference: [..., actions]. Returns [...], in nats. The reference is a constant: no gradient.
    """
    if direction == "forward":
        return categorical_kl(log_reference.detach(), log_policy)
    if direction == "reverse":
        return categorical_kl(log_policy, log_reference.detach())
    raise ValueError(f"unknown KL direction {direction!r}; choose from {', '.join(KL_DIRECTIONS)}")


def total_variation(log_probs: Tensor) -> Tensor:
    """Pairwise distance of policies: total variation, averaged over states.

    log_probs: [agents, states, actions]. Returns [agents, agents] in [0, 1].
    """
    probs = log_probs.exp()
    return (probs[:, None] - probs[None]).abs().sum(-1).mean(-1) / 2


# --- parameters ---


def average_parameters(communicator: Tensor, parameters: Tensor) -> Tensor:
    """FedAvg with a communicator: row i is sum_j c_ij theta_j. parameters: [agents, numel]. Returns [agents, numel].

    Parameters of weight 0 are not read, so a dropped peer's NaN cannot spread. Raises ValueError if a row sums to 0.
    """
    if not (communicator.sum(1) > 0).all():
        raise ValueError("a row of the communicator sums to 0: its agent would lose its parameters")
    weights = communicator.to(parameters)
    return torch.stack([row[row > 0] @ parameters[row > 0] for row in weights])


def check_snapshots(snapshots: list[Tensor | None], like: Tensor) -> tuple[Tensor, Tensor]:
    """Sort received snapshots into usable and invalid ones.

    snapshots: one flat tensor [numel] per agent, None where it is missing; like: a tensor of the right shape and dtype.
    Returns (parameters [agents, numel], with zeros in place of invalid ones; valid, bool [agents]).
    """

    def usable(snapshot: Tensor | None) -> bool:
        fits = snapshot is not None and snapshot.shape == like.shape and snapshot.dtype == like.dtype
        return bool(fits and snapshot.isfinite().all())

    valid = torch.tensor([usable(snapshot) for snapshot in snapshots])
    rows = [s if ok else torch.zeros_like(like) for s, ok in zip(snapshots, valid.tolist(), strict=True)]
    return torch.stack(rows), valid


class Exchange:
    """Who holds which agents, and everything that passes between them.

    In one process it holds all agents and nothing moves; under torchrun each rank holds num_agents / world_size of
    them. What leaves a rank is a flat tensor of parameters or of declared scalars, never an observation, an action or
    a reward, and nothing that arrives is unpickled. `bytes_sent` counts what the agents send each other, parameters
    times listeners, the same in both placements.

    Raises ValueError if num_agents is not divisible by the world size, and RuntimeError if a peer does not arrive at a
    collective within `timeout` seconds (rank 0's says which ranks are missing).
    """

    def __init__(self, num_agents: int, device: torch.device, timeout: float = 600.0):
        self.distributed = "RANK" in os.environ  # torchrun sets it
        self.rank = int(os.environ["RANK"]) if self.distributed else 0
        self.world_size = int(os.environ["WORLD_SIZE"]) if self.distributed else 1
        if num_agents % self.world_size:
            raise ValueError(f"{num_agents} agents cannot be shared by {self.world_size} ranks; use a divisor")
        self.num_agents, self.device, self.bytes_sent = num_agents, device, 0
        held = num_agents // self.world_size
        self.agents = range(self.rank * held, (self.rank + 1) * held)  # the agents this process holds
        self.timeout = datetime.timedelta(seconds=timeout)
        if self.distributed:
            backend = "nccl" if device.type == "cuda" else "gloo"
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            # torchrun's own store outlives a restart: the prefix drops the addresses of the dead
            leads = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
            store = dist.TCPStore(*address, self.world_size, is_master=leads, timeout=self.timeout, multi_tenant=True)
            self._store = dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
            place = {"store": self._store, "rank": self.rank, "world_size": self.world_size}
            dist.init_process_group(backend, timeout=self.timeout, **place)
            self._barriers = 0
            self._control = dist.new_group(backend="gloo", timeout=self.timeout)

    def barrier(self) -> None:
        """Wait until every rank is here; on rank 0 a RuntimeError names those that did not come in time."""
        if not self.distributed:
            return
        self._barriers += 1
        self._store.set(f"arrived_{self.rank}_{self._barriers}", "")
        try:
            dist.monitored_barrier(self._control, self.timeout, wait_all_ranks=True)
        except RuntimeError as error:
            if self.rank > 0 or "Rank" in str(error):
                raise
            time.sleep(1)  # a connection that broke before anybody waited: who is alive will arrive soon
            keys = {rank: f"arrived_{rank}_{self._barriers}" for rank in range(self.world_size)}
            missing = ", ".join(str(rank) for rank, key in keys.items() if not self._store.check([key]))
            raise RuntimeError(f"Ranks {missing} failed to arrive: {error}") from error

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's `tensor`, on every rank."""
        if self.distributed:
            self.barrier()
            tensor = tensor.to(self.device).clone(memory_format=torch.contiguous_format)
            dist.broadcast(tensor, src=0)
        return tensor

    def all_gather(self, local: Tensor) -> Tensor:
        """Row i for every agent i. local: [agents held, numel], equal on all ranks. Returns [agents, numel]."""
        if not self.distributed:
            return local.clone()
        self.barrier()
        gathered = local.new_empty(self.num_agents * local.shape[1], device=self.device)
        dist.all_gather(list(gathered.chunk(self.world_size)), local.to(self.device).flatten())
        return gathered.view(self.num_agents, -1).to(local.device)

    def snapshots(self, local: Tensor, heard: Tensor) -> tuple[Tensor, Tensor]:
        """One communication round: every agent's flat parameters, and which of them are usable.

        local: [agents held, numel]; heard: bool [agents, agents], whom each agent may listen to (for the byte counter).
        Returns (parameters [agents, numel], valid bool [agents]) as `check_snapshots` does.
        """
        gathered = self.all_gather(local)
        listeners = int(heard.sum() - heard.diagonal().sum())
        self.bytes_sent += listeners * local.shape[1] * local.element_size()
        return check_snapshots(list(gathered), local[0])

    def close(self) -> None:
        """Leave the process group."""
        if self.distributed:
            dist.destroy_process_group()
