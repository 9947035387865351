"""PR-TRPO on MiniGrid: agents that share no data learn together inside a trust region.

Eq. 9 of the PRPO paper: agent i maximises its surrogate objective subject to
E[KL(C_i pi^k || pi)] <= epsilon, where PR-PPO adds the KL as a penalty. Environments, networks,
rollouts, references and evaluation are those of `prpo_minigrid.py`, by import: this file contains
what differs.

    python prtrpo_minigrid.py                                    # three agents in one process
    python prtrpo_minigrid.py --communicator identity            # the same agents, isolated: TRPO
    python prtrpo_minigrid.py --delta 0.1                        # bounded updates, Observation 1
    torchrun --nproc-per-node 3 prtrpo_minigrid.py               # one agent per process
    python prtrpo_minigrid.py --resume runs/<name>               # continue an interrupted run
"""

import copy
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.utils import parameters_to_vector

import communicators
import prpo_minigrid
from communicators import (
    Count,
    Positive,
    PositiveFraction,
    Probability,
    Run,
    derive_seed,
    mean,
    refuse,
)
from prpo_minigrid import (
    Envs,
    PolicyTable,
    TaskArgs,
    choose_backend,
    collect_public_states,
    compute_advantages,
    compute_public_log_probs,
    compute_reference,
    estimate_gains,
    evaluate_agents,
    make_batch,
    make_communicator,
    name_tasks,
    rollout,
)

# Kinds of steps, as the logs have them
REJECTED = 0
NORMAL = 1
RECOVERY = -1


@dataclass
class Args(TaskArgs):
    # Reference policy

    # an agent's own component of its reference: its policy before this update, or its snapshot of
    # the last round
    self_reference: Literal["behaviour", "snapshot"] = "behaviour"
    mixture: Literal["arithmetic", "geometric"] = "arithmetic"
    """how the reference mixes the agents' distributions"""
    gate: Literal["none", "value"] = "none"
    """value: in each state a peer counts by what its critic, which is sent, too, expects there"""

    # Update: the trust region; KL divergences are in nats, total variations lie in [0, 1]
    epsilon: Positive = 0.01
    """the largest KL(reference || policy), as a mean over the rollout's states"""
    # instead: the largest total variation of an update, from which Observation 1 makes each
    # update's epsilon
    delta: PositiveFraction | None = None
    epsilon_min: Positive = 1e-4  # with --delta: the smallest epsilon, a KL as --epsilon is
    norm_adv: bool = True  # normalise advantages over the rollout
    cg_iters: Count = 10  # iterations of conjugate gradients for each of the two systems
    damping_coef: Positive = 0.1  # what is added to the diagonal of the Fisher matrix
    backtrack_iters: Count = 10  # candidates of the line search
    backtrack_coef: Probability = 0.8
    """length of each candidate step, relative to the one before it"""

    # Update: the value function, a network of its own
    learning_rate: Positive = 1e-3  # learning rate of Adam
    anneal_lr: bool = True  # anneal the learning rate linearly to 0
    update_epochs: Count = 5  # epochs per rollout
    num_minibatches: Count = 4  # minibatches per epoch
    max_grad_norm: Positive = 0.5  # maximum norm of each value function's gradient

    # Communication round
    local_updates: Count = 1
    """iterations between communication rounds; Observation 1 is about one"""


# --- the networks ---


class Agent(nn.Module):
    """PR-PPO's network for the policy, and a second one for the value function.

    Fitting the value function must not move the policy. What peers get is the policy, with --gate
    both.
    """

    def __init__(self, policy: prpo_minigrid.Agent):
        super().__init__()
        self.policy = policy
        self.baseline = copy.deepcopy(policy)

    @property
    def actor(self) -> nn.Linear:
        """The policy's last layer."""
        return self.policy.actor

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """obs: [batch, 7, 7, 3] uint8. Returns (logits [batch, actions], value [batch])."""
        logits, _ = self.policy(obs)
        _, value = self.baseline(obs)
        return logits, value

    @torch.no_grad()
    def predict(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """`forward` for many states, without gradient."""
        return self(obs)


def make_agents(args: Args) -> list[Agent]:
    """Every agent's networks at the start, equal ones for agents of equal size."""
    return [Agent(policy) for policy in prpo_minigrid.make_agents(args)]


def choose_sent(agent: Agent, args: Args) -> nn.Module:
    """The networks that peers get: the policy, with --gate the value function, too."""
    return agent.policy if args.gate == "none" else agent


# --- PR-TRPO ---


def compute_radius(communicator: Tensor, variations: Tensor, args: Args) -> tuple[float, float]:
    """epsilon of an update, a KL in nats, and the bound on its total variation.

    variations [agents, 2], of the last update: how far it moved each policy, |pi_j^k-1 - pi_j^k|,
    and how far from its reference it ended, |C_j pi^k-1 - pi_j^k|. The proof of Observation 1 needs

        level + used <= delta,  where used = |C| |pi^k-1 - pi^k| + |C pi^k-1 - pi^k|,

    with suprema over the agents and the norm |C| of Definition 1. The level here is half of what
    is left, max(delta - used, 0) / 2, so that the next update has as much. (Observation 1 bounds
    the levels of this *and* the last update by (delta - |C| |pi^k-1 - pi^k|) / 2, but the last
    one's was set before that movement was known.) Pinsker's inequality, TV <= sqrt(KL / 2),
    converts between level and epsilon, also for means over states. Without --delta epsilon is
    given, and the bound is what the same sum allows.
    """
    # An agent that has diverged has no influence on the others
    reported = variations.nan_to_num(nan=0.0).clamp(0.0, 1.0)
    update, distance = reported.max(0).values.tolist()
    used = communicators.non_expansion(communicator) * update + distance
    if args.delta is None:
        return args.epsilon, math.sqrt(args.epsilon / 2) + used
    level = max(args.delta - used, 0.0) / 2
    return max(2 * level**2, args.epsilon_min), args.delta


def compute_conjugate_gradients(
    product: Callable, b: Tensor, iterations: int, tolerance: float = 1e-10
) -> Tensor:
    """x with product(x) = b, for a linear, symmetric and positive definite `product`.

    It ends at |residual|^2 < tolerance. From x = 0, so that x^T b = x^T product(x) after any number
    of iterations.
    """
    x = torch.zeros_like(b)
    residual = b.clone()
    direction = b.clone()
    error = residual @ residual
    for _ in range(iterations):
        if not error >= tolerance:
            break
        image = product(direction)
        length = error / (direction @ image)
        x = x + length * direction
        residual = residual - length * image
        previous_error = error
        error = residual @ residual
        direction = residual + error / previous_error * direction
    return x


def make_fisher_product(
    logits: Tensor, weights: Tensor, parameters: list[Tensor], damping: float
) -> Callable:
    """v -> (H + damping) v, H the policy's Fisher matrix: the mean of J^T (diag(pi) - pi pi^T) J.

    It is the Gauss-Newton Hessian of KL(r || pi) for every r. logits [states, actions] with their
    graph, J their Jacobian; weights [states]: the share of each state. J v is the derivative of
    J^T y, which is linear in y.
    """
    y = torch.zeros_like(logits, requires_grad=True)
    probs = logits.detach().softmax(-1)
    transposed = compute_flat_grad(logits, parameters, y, create_graph=True)

    def product(v: Tensor) -> Tensor:
        (change,) = torch.autograd.grad(transposed, y, v, retain_graph=True)  # J v
        curved = weights[:, None] * probs * (change - (probs * change).sum(-1, keepdim=True))
        return compute_flat_grad(logits, parameters, curved) + damping * v

    return product


def compute_flat_grad(
    output: Tensor, parameters: list[Tensor], weight: Tensor | None = None, create_graph=False
) -> Tensor:
    """The gradient of `output` (weighted, if no scalar), flat, with zeros where it is constant."""
    gradients = torch.autograd.grad(
        output,
        parameters,
        weight,
        retain_graph=True,
        create_graph=create_graph,
        materialize_grads=True,
    )
    return parameters_to_vector(gradients)


def solve(
    product: Callable, g: Tensor, b: Tensor, c: float, epsilon: float, iterations: int
) -> tuple[Tensor, Tensor, float]:
    """Eq. 9 near pi^k: maximise g^T x subject to c + b^T x + x^T H x / 2 <= epsilon.

    g, b: gradients of the surrogate and of the KL, whose value is c; product(v) = H v. In
    y = x + u, u = H^-1 b, the region is a ball: y^T H y / 2 <= slack = epsilon - c + b^T u / 2.
    With slack, x goes from its centre -u along H^-1 g to its edge; without, no x is good enough,
    and -u is the best. With b = 0 this is TRPO's step. Returns (x, the centre -u, slack).
    """
    u = compute_conjugate_gradients(product, b, iterations)
    slack = epsilon - c + (b @ u).item() / 2
    if not slack > 0:
        return -u, -u, slack
    s = compute_conjugate_gradients(product, g, iterations)
    length = (2 * slack / (g @ s).clamp(min=1e-12)).sqrt()
    return length * s - u, -u, slack


def improve(
    policy: nn.Module, batch: dict[str, Tensor], epsilon: float, args: Args
) -> dict[str, float]:
    """One step of eq. 9: closed form, then a line search on the exact KL and surrogate.

    batch: of `make_batch`, and the reference policy's log-probabilities, `reference`
    [states, actions]. A policy is a function of the observation: all means are over distinct ones,
    weighted by their counts, which is exact. Returns the step's metrics.
    """
    distinct, inverse, counts = batch["obs_inds"].unique(return_inverse=True, return_counts=True)
    obs = batch["obs"][distinct]
    reference = batch["reference"][distinct]
    weights = counts.to(reference) / len(inverse)
    advantages = batch["advantages"]
    if args.norm_adv and len(advantages) > 1:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    # The surrogate E[ratio A] is linear in the policy: the sum over states and actions of
    # pi(a|s) gains(s, a)
    gains = advantages / batch["logprobs"].exp() / len(inverse)
    index = inverse, batch["actions"]
    gains = torch.zeros_like(reference).index_put(index, gains, accumulate=True)
    parameters = list(policy.parameters())
    start = parameters_to_vector(parameters).detach()

    def measure(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The surrogate, the KL from the reference, and the log-probabilities."""
        log_probs = logits.log_softmax(-1)
        surrogate = (log_probs.exp() * gains).sum()
        return surrogate, weights @ communicators.categorical_kl(reference, log_probs), log_probs

    @torch.no_grad()
    def move(step: Tensor | float) -> tuple[float, float, Tensor]:
        """Give the policy its parameters at the start plus this step, and measure it there."""
        moved = (start + step).split([parameter.numel() for parameter in parameters])
        for parameter, values in zip(parameters, moved, strict=True):
            parameter.copy_(values.view_as(parameter))
        logits, _ = policy(obs)
        surrogate, kl, log_probs = measure(logits)
        return surrogate.item(), kl.item(), log_probs

    logits, _ = policy(obs)
    surrogate, kl, before = measure(logits)
    g = compute_flat_grad(surrogate, parameters)
    b = compute_flat_grad(kl, parameters)
    product = make_fisher_product(logits, weights, parameters, args.damping_coef)
    c = kl.item()
    step, centre, slack = solve(product, g, b, c, epsilon, args.cg_iters)
    lengths = [args.backtrack_coef**power for power in range(args.backtrack_iters)]
    kind = REJECTED
    if slack > 0:
        # Towards the solution, from a point that satisfies the constraint: the present policy, or
        # else the centre of the region
        origin = torch.zeros_like(centre) if c <= epsilon else centre
        least, *_ = move(origin)
        for length in lengths:
            surrogate, kl, after = move(origin + length * (step - origin))
            if kl <= epsilon and surrogate > least:
                kind = NORMAL
                break
    if kind == REJECTED and c > epsilon:
        # Towards the reference, as far as the KL falls
        for length in lengths:
            surrogate, kl, after = move(length * centre)
            if kl < c:
                kind = RECOVERY
                break
    if kind == REJECTED:
        surrogate, kl, after = move(0.0)

    def distance(log_probs: Tensor) -> float:
        """The mean total variation from the new policy."""
        return ((after.exp() - log_probs.exp()).abs().sum(-1) @ weights / 2).item()

    return {
        "losses/policy_loss": -surrogate,
        "losses/entropy": -(weights @ (after.exp() * after).sum(-1)).item(),
        "policy/kl_reference_before": c,
        "policy/kl_reference_after": kl,
        "policy/tv_update": distance(before),
        "policy/tv_reference": distance(reference),
        "trust_region/epsilon": epsilon,
        "trust_region/slack": slack,
        "trust_region/step": kind,
    }


def update(
    agent: Agent,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
    batch: dict[str, Tensor],
    epsilon: float,
    args: Args,
) -> tuple[dict[str, float], float]:
    """One agent's step of eq. 9, then its value function's epochs.

    batch: as of `improve`. Returns the metrics of the step, and the mean value loss.
    """
    step = improve(agent.policy, batch, epsilon, args)
    parameters = list(agent.baseline.parameters())
    losses = []
    for _ in range(args.update_epochs):
        b_inds = torch.randperm(len(batch["obs_inds"]), generator=generator)
        b_inds = b_inds.to(batch["obs"].device)
        for mb_inds in b_inds.tensor_split(args.num_minibatches):
            if len(mb_inds) == 0:
                continue
            # Each distinct observation is evaluated once; loss and gradient stay the same
            states, inverse = batch["obs_inds"][mb_inds].unique(return_inverse=True)
            _, value = agent.baseline(batch["obs"][states])
            newvalue = value.index_select(0, inverse)

            # Value loss
            v_loss = (newvalue - batch["returns"][mb_inds]) ** 2
            v_loss = 0.5 * v_loss.mean()

            optimizer.zero_grad()
            v_loss.backward()
            grad_norm = nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
            losses.append(v_loss.item())
            if not (v_loss.isfinite() & grad_norm.isfinite()):
                # This agent has diverged: no step, which would ruin Adam's moments; peers go on
                return step, math.nan
            optimizer.step()
    return step, mean(losses)


def main(args: Args) -> dict:
    """Train, evaluate, and return what summary.json holds."""
    n = args.num_agents
    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size
    num_rounds = num_iterations // args.local_updates
    task_names = name_tasks(args)
    together = ""
    if args.delta is not None:
        together = "--delta needs the movement of all agents at every update; set --epsilon"
    exchange = communicators.make_exchange(args, together=together)
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
    first = [policy.to(exchange.device) for policy in prpo_minigrid.make_agents(args)]
    num_actions = first[0].actor.out_features
    exchange.broadcast_networks(first)
    agents = [Agent(copy.deepcopy(first[i])) for i in held]
    first = [choose_sent(Agent(policy), args) for policy in first]
    optimizers = [  # of the value functions; policies take steps of their own
        torch.optim.Adam(agent.baseline.parameters(), args.learning_rate, eps=1e-5, fused=True)
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
    sent = [communicators.flatten(choose_sent(agent, args)) for agent in agents]
    C = communicators.identity(n)  # [agents, agents]; before the first round nobody has sent
    distances = torch.full((n, n), torch.nan)
    round_returns = [[] for _ in held]  # since the last round
    mean_returns = torch.full((len(held),), torch.nan, dtype=torch.double)
    # Of each agent's last update: how far it moved the policy, how far from the reference it ended
    # (see `compute_radius`); and the number of updates within their bound
    variations = torch.zeros(n, 3, dtype=torch.float64)

    # Resume: what a checkpoint holds of each agent; the rest follows from the settings. These
    # objects are changed in place, as in `C[:] = ...`
    state = {
        "agent": agents,
        "optimizer": optimizers,
        "generator": generators,
        "last_returns": last_returns,
        "variations": [variations[i] for i in held],
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
    variations[:] = exchange.all_gather(variations[rows_held])
    envs = Envs(args, held, run.iteration)
    tables = [PolicyTable(agent) for agent in agents]
    if args.eval_episodes and run.misses_evaluation():
        run.log_evaluation(evaluate_agents(args, agents, held))

    for iteration in run.iterations():
        remaining = 1.0 - (iteration - 1) / num_iterations

        # Rollout
        rollouts = rollout(args, tables, envs, generators)
        run.tick("rollout")

        batches = []  # kept for the round: `surrogate` reads them
        rows = []  # metrics
        new_variations = []
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
            group = list(exchange.members)
            if args.communicator == "identity":
                group = [i]
            epsilon, bound = compute_radius(C[group], variations[group, :2], args)
            step, value_loss = update(agents[k], optimizers[k], generators[k], batch, epsilon, args)
            # What the next radii need: two scalars of each agent, and a third for the log
            within = variations[i, 2].item() + (step["policy/tv_update"] <= bound)
            new_variations.append([step["policy/tv_update"], step["policy/tv_reference"], within])
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
                "losses/value_loss": value_loss,
                **step,
                "trust_region/bound": bound,
                "trust_region/share_within_bound": within / iteration,
            }
            if args.gate != "none":
                row |= communicators.summarize_gate(C[i] > 0, weights[:, batch["obs_inds"]])
            rows.append(row)
            batches.append(batch)
        new_variations = torch.tensor(new_variations, dtype=torch.float64)
        variations[:] = exchange.all_gather(new_variations)

        # Communication round: exchange snapshots, refresh the communicator
        dropped = 0
        if iteration % args.local_updates == 0:
            communicators.update_means(mean_returns, round_returns)
            numbers = mean_returns if "returns" in inputs else None
            sent[:] = [communicators.flatten(choose_sent(agent, args)) for agent in agents]
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


# --- checks of arguments ---


def check_args(args: Args) -> None:
    """What types cannot express. `refuse` ends with one line: flag, value and what is valid."""
    prpo_minigrid.check_task(args)
    communicators.check_communicator(args, make_communicator, has_influence=True)
    if args.delta is not None and (args.mixture == "geometric" or args.gate != "none"):
        valid = "needs weights that are the same in all states and --mixture arithmetic, as eq. 3"
        refuse(args, "delta", f"{valid}: other references may move further")


if __name__ == "__main__":
    may_change = ("eval_episodes", "total_timesteps")
    main(communicators.parse_args(Args, check_args, may_change=may_change))
