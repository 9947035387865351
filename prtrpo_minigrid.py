"""PR-TRPO on MiniGrid: agents that share no data learn together inside a trust region around their reference policy.

Eq. 9 of the PRPO paper: agent i maximises its surrogate objective subject to E[KL(C_i pi^k || pi)] <= epsilon, where
PR-PPO adds the KL as a penalty. Environments, networks, rollouts, references and evaluation are those of
`prpo_minigrid.py`, by import: here stands what differs.

    python prtrpo_minigrid.py --env-id MiniGrid-DoorKey-6x6-v0                # three agents in one process
    python prtrpo_minigrid.py --communicator identity                         # the same agents, isolated: TRPO
    python prtrpo_minigrid.py --delta 0.1                                     # bounded updates, by Observation 1
    torchrun --nproc-per-node 3 prtrpo_minigrid.py --num-agents 3             # one agent per process, same training
    python prtrpo_minigrid.py --resume runs/<name>                            # go on where a run was cut off
"""

import copy
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn as nn
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils import parameters_to_vector

import communicators
import prpo_minigrid
from communicators import (
    Count,
    Exchange,
    Fraction,
    Natural,
    Peers,
    Positive,
    PositiveFraction,
    Run,
    RunArgs,
    derive_seed,
    mean,
)
from prpo_minigrid import (
    Envs,
    choose_backend,
    diagnose,
    evaluate,
    evaluate_all,
    film_levels,
    gae,
    gains_of_peers,
    make_actors,
    make_agents,
    make_communicator,
    public_states,
    refer,
    rollout,
    share_cores,
    task_ids,
    task_names,
)

REJECTED, NORMAL, RECOVERY = 0, 1, -1  # kinds of steps, as the logs have them


@dataclass
class Args(RunArgs):
    device: str = "auto"
    """cpu, cuda, cuda:N, or auto: the processor, where each distinct observation is computed once"""

    # The environments
    env_id: str = "MiniGrid-FourRooms-v0"  # the task of all agents; of your own as module:id, as Gymnasium has it
    env_ids: tuple[str, ...] = ()  # one task per agent, instead of --env-id
    missions: tuple[str, ...] = ()
    """one word per agent, which meets only levels whose mission has it, which it does not see; gymnasium only"""
    hidden_sizes: tuple[int, ...] = ()
    """width of each agent's hidden layer, a multiple of 8, its convolutions in proportion (default: 128 for all)"""
    levels_per_agent: Natural = 0  # agent i trains on K private levels only (0: unlimited); needs the gymnasium backend
    env_backend: Literal["auto", "envpool", "gymnasium"] = "auto"
    """envpool is several times faster; auto takes it where it is installed and knows the task"""
    num_envs: Count = 4  # parallel environments per agent
    eval_episodes: Natural = 100  # episodes per agent and task in the official environment at the end (0: none)
    capture_video: bool = False  # record one episode per agent in the official environment at the end
    eval_only: str = ""
    """folder of a run: load its agents and play, also on another task, instead of training; prints a table"""
    greedy: bool = False  # with --eval-only: play and film the most probable actions instead of sampled ones

    # Communication
    local_updates: Count = 1  # iterations between communication rounds; Observation 1 is about one
    kl_direction = "forward"  # of eq. 9; no flag
    mixture: Literal["arithmetic", "geometric"] = "arithmetic"  # how the reference mixes the agents' distributions
    self_reference: Literal["behaviour", "snapshot"] = "behaviour"
    """an agent's own part of its reference: its policy before this update, or its snapshot of the last round"""
    participation: PositiveFraction = 1.0
    """fraction of the agents, drawn anew, that takes part in a communication round"""

    # The trust region: KL divergences are in nats, total variations lie in [0, 1]
    epsilon: Positive = 0.01  # the largest KL(reference || policy), as a mean over the rollout's states
    delta: Positive | None = None
    """instead: the largest total variation of an update, from which Observation 1 makes each update's epsilon"""
    epsilon_min: Positive = 1e-4  # with --delta: the smallest epsilon, a KL as --epsilon is
    cg_iters: Count = 10  # iterations of conjugate gradients for each of the two systems
    damping_coef: Positive = 0.1  # what is added to the diagonal of the Fisher matrix
    backtrack_iters: Count = 10  # candidates of the line search
    backtrack_coef: Fraction = 0.8  # length of each candidate step, relative to the one before it

    # Rollouts, and the value function, a network of its own
    total_timesteps: Count = 5_000_000  # environment steps of each agent
    learning_rate: Positive = 1e-3  # learning rate of Adam, for the value function
    num_steps: Count = 512  # steps per environment and rollout
    anneal_lr: bool = True  # anneal the learning rate linearly to 0
    gamma: Fraction = 0.99  # discount factor
    gae_lambda: Fraction = 0.95  # lambda of generalized advantage estimation
    num_minibatches: Count = 4  # minibatches per epoch of the value function
    update_epochs: Count = 5  # epochs of the value function per rollout
    norm_adv: bool = True  # normalise advantages over the rollout
    max_grad_norm: Positive = 0.5  # maximum norm of each value function's gradient
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """of the convolutions (autocast), heads and losses are always float32; auto: float32 for so small a network"""
    compile = False  # no flag


def check_args(args: Args) -> None:
    """What the types above cannot say; `refuse` ends with one line that names the flag, its value and what is valid."""
    if args.delta is not None and args.delta > 1:
        communicators.refuse(args, "delta", "is a total variation and must lie in (0, 1]")
    if not 0 < args.backtrack_coef < 1:
        communicators.refuse(args, "backtrack_coef", "must lie between 0 and 1")
    prpo_minigrid.check_args(args)


# --- PR-TRPO ---


class Agent(nn.Module):
    """PR-PPO's network for the policy, and a second one for the value function: fitting it must not move the policy.

    What peers get is the policy.
    """

    predict = prpo_minigrid.Agent.predict

    def __init__(self, policy: prpo_minigrid.Agent):
        super().__init__()
        self.policy, self.baseline = policy, copy.deepcopy(policy)

    def see(self, obs: Tensor) -> Tensor | prpo_minigrid.Patches:
        """As of the policy."""
        return self.policy.see(obs)

    @property
    def actor(self) -> nn.Linear:
        """The policy's last layer."""
        return self.policy.actor

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """obs: [batch, 7, 7, 3] uint8. Returns (logits [batch, actions], value [batch]), float32."""
        return self.policy(obs)[0], self.baseline(obs)[1]


def radius(communicator: Tensor, variations: Tensor, args: Args) -> tuple[float, float]:
    """epsilon of an update, a KL in nats, and the bound on how far it moves a policy, a total variation.

    variations [agents, 2], of the last update: |pi_j^k-1 - pi_j^k|, and |C_j pi^k-1 - pi_j^k|, how far from its
    reference it ended. Observation 1 wants a level of at most (delta - gamma |pi^k-1 - pi^k|) / 2, a total variation,
    for this update *and* the last one, whose level was set before its movement was known. What the proof needs is
    level + gamma |pi^k-1 - pi^k| + |C pi^k-1 - pi^k| <= delta, suprema over the agents. The level that shares what is
    left by two satisfies it, and is never negative: the next update is left as much. Pinsker's inequality makes total
    variations and KL divergences of each other: TV <= sqrt(KL / 2), also of means over states. Without --delta epsilon
    is given, and the bound is what the same sum allows.
    """
    reported = variations.nan_to_num(nan=0.0).clamp(0.0, 1.0)  # nobody listens to an agent that has diverged
    moved, apart = reported.max(0).values.tolist()
    used = communicators.non_expansion(communicator) * moved + apart
    if args.delta is None:
        return args.epsilon, math.sqrt(args.epsilon / 2) + used
    return max(2 * (max(args.delta - used, 0.0) / 2) ** 2, args.epsilon_min), args.delta


def conjugate_gradients(product: Callable, b: Tensor, iterations: int, tolerance: float = 1e-10) -> Tensor:
    """x with product(x) = b, for a linear, symmetric and positive definite `product`; ends at |residual|^2 < tolerance.

    From x = 0, so that x^T b = x^T product(x) after any number of iterations.
    """
    x, residual, direction = torch.zeros_like(b), b.clone(), b.clone()
    error = residual @ residual
    for _ in range(iterations):
        if not error >= tolerance:
            break
        image = product(direction)
        length = error / (direction @ image)
        x, residual = x + length * direction, residual - length * image
        error, before = residual @ residual, error
        direction = residual + error / before * direction
    return x


def fisher_product(logits: Tensor, weights: Tensor, parameters: list[Tensor], damping: float) -> Callable:
    """v -> (H + damping) v, H the Fisher matrix of the policy: the mean over states of J^T (diag(pi) - pi pi^T) J.

    It is the Gauss-Newton Hessian of KL(r || pi) for every r. logits [states, actions] with their graph, J their
    Jacobian; weights [states]: the share of each state. J v is the derivative of J^T y, which is linear in y.
    """
    y, probs = torch.zeros_like(logits, requires_grad=True), logits.detach().softmax(-1)
    transposed = flat_grad(logits, parameters, y, create_graph=True)

    def product(v: Tensor) -> Tensor:
        (change,) = torch.autograd.grad(transposed, y, v, retain_graph=True)  # J v
        curved = weights[:, None] * probs * (change - (probs * change).sum(-1, keepdim=True))
        return flat_grad(logits, parameters, curved) + damping * v

    return product


def flat_grad(output: Tensor, parameters: list[Tensor], weight: Tensor | None = None, create_graph=False) -> Tensor:
    """The gradient of `output` (weighted, if it is no number), flat, with zeros for what has no influence."""
    options = {"retain_graph": True, "create_graph": create_graph, "materialize_grads": True}
    return parameters_to_vector(torch.autograd.grad(output, parameters, weight, **options))


def solve(product: Callable, g: Tensor, b: Tensor, c: float, epsilon: float, iterations: int) -> tuple:
    """Eq. 9 near pi^k: maximise g^T x subject to c + b^T x + x^T H x / 2 <= epsilon.

    g, b: gradients of the surrogate and of the KL, whose value is c; product(v) = H v. In y = x + u, u = H^-1 b, the
    region is a ball: y^T H y / 2 <= slack = epsilon - c + b^T u / 2. With slack, x goes from its centre -u along H^-1 g
    to its edge; without, no x is good enough, and -u is the best. With b = 0 this is TRPO's step. Returns
    (x, the centre -u, slack).
    """
    u = conjugate_gradients(product, b, iterations)
    slack = epsilon - c + (b @ u).item() / 2
    if not slack > 0:
        return -u, -u, slack
    s = conjugate_gradients(product, g, iterations)
    return (2 * slack / (g @ s).clamp(min=1e-12)).sqrt() * s - u, -u, slack


def improve(policy: nn.Module, obs: Tensor, reference: Tensor, batch: dict[str, Tensor], epsilon: float, args: Args):
    """One step of eq. 9: closed form, then a line search on the exact KL and surrogate. Returns its metrics.

    obs, reference: distinct observations and the reference's log-probabilities there [states, actions]; batch:
    [samples], its `states` are rows of obs. A policy is a function of the observation: all means are over distinct
    ones, weighted by their counts, which is exact.
    """
    rows, states, counts = batch["states"].unique(return_inverse=True, return_counts=True)
    obs, reference, weights = obs[rows], reference[rows], counts.to(reference) / len(states)
    advantages = batch["advantages"]
    if args.norm_adv and len(advantages) > 1:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    # The surrogate E[ratio A] is linear in the policy: sum over states and actions of pi(a|s) gains(s, a)
    gains = advantages / batch["logprobs"].exp() / len(states)
    gains = torch.zeros_like(reference).index_put((states, batch["actions"]), gains, accumulate=True)
    parameters = list(policy.parameters())
    start = parameters_to_vector(parameters).detach()

    def measure(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        log_probs = logits.log_softmax(-1)
        return (log_probs.exp() * gains).sum(), weights @ communicators.categorical_kl(reference, log_probs), log_probs

    @torch.no_grad()
    def at(step: Tensor | float) -> tuple[float, float, Tensor]:
        communicators.unflatten((start + step)[None], [policy])
        surrogate, kl, log_probs = measure(policy(obs)[0])
        return surrogate.item(), kl.item(), log_probs

    with torch.enable_grad():
        logits = policy(obs)[0]
        surrogate, kl, before = measure(logits)
        g, b = flat_grad(surrogate, parameters), flat_grad(kl, parameters)
        product = fisher_product(logits, weights, parameters, args.damping_coef)
    c, kind = kl.item(), REJECTED
    step, centre, slack = solve(product, g, b, c, epsilon, args.cg_iters)
    shrunk = [args.backtrack_coef**power for power in range(args.backtrack_iters)]
    if slack > 0:  # towards a point that satisfies the constraint: where we are, or else the centre of the region
        origin = torch.zeros_like(centre) if c <= epsilon else centre
        least, *_ = at(origin)
        for length in shrunk:
            surrogate, kl, after = at(origin + length * (step - origin))
            if kl <= epsilon and surrogate > least:
                kind = NORMAL
                break
    if kind == REJECTED and c > epsilon:  # towards the reference, as far as it comes nearer
        for length in shrunk:
            surrogate, kl, after = at(length * centre)
            if kl < c:
                kind = RECOVERY
                break
    if kind == REJECTED:
        surrogate, kl, after = at(0.0)
    moved, apart = ((after.exp() - other.exp()).abs().sum(-1) @ weights / 2 for other in (before, reference))
    return {
        "policy_loss": -surrogate, "entropy": -(weights @ (after.exp() * after).sum(-1)).item(), "step": kind,
        "kl_reference_before": c, "kl_reference_after": kl, "epsilon": epsilon, "slack": slack,
        "tv_update": moved.item(), "tv_reference": apart.item(),
    }  # fmt: skip


@torch.enable_grad()
def learn(agent: Agent, optimizer, generator, obs: Tensor, reference: Tensor, batch: dict[str, Tensor],
          epsilon: float, args: Args) -> Iterator[dict]:  # fmt: skip
    """One agent's step of eq. 9, whose metrics come first; then its value function's epochs, a loss per minibatch.

    obs: the distinct observations; batch: [samples, ...], its `states` are rows of obs.
    """
    yield improve(agent.policy, obs, reference, batch, epsilon, args)
    for _ in range(args.update_epochs):
        b_inds = torch.randperm(len(batch["states"]), generator=generator).to(batch["states"].device)
        for mb_inds in filter(len, b_inds.tensor_split(args.num_minibatches)):
            distinct, states = batch["states"][mb_inds].unique(return_inverse=True)
            newvalue = agent.baseline(obs[distinct])[1].index_select(0, states)
            v_loss = 0.5 * ((newvalue - batch["returns"][mb_inds]) ** 2).mean()
            finite = bool(v_loss.isfinite())
            if finite:
                optimizer.zero_grad()
                v_loss.backward()
                grad_norm = nn.utils.clip_grad_norm_(agent.baseline.parameters(), args.max_grad_norm)
                finite = bool(grad_norm.isfinite())  # else the optimizer's moments would be ruined for good
                if finite:
                    optimizer.step()
                else:  # reported like a loss that is not finite
                    v_loss = torch.full_like(v_loss, torch.nan)
            yield {"value_loss": v_loss.item()}
            if not finite:  # this agent has diverged and learns no more, but its peers do
                return


def main(args: Args) -> dict:
    """Train, evaluate, and return what summary.json holds."""
    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size
    n, num_rounds, tasks = args.num_agents, num_iterations // args.local_updates, task_names(args)
    exchange = Exchange(args.num_agents, args.device, args.timeout)  # who holds which agents, what passes between them
    held, device = exchange.agents, exchange.device  # agent i of all is the k-th held; lists are in the order of k
    run = Run(args, exchange, "+".join(dict.fromkeys(tasks)), total=num_iterations, work=batch_size * n,
              headline="charts/return_last_100", env_ids=tasks, stride=batch_size,
              about=f"{args.communicator} communicator, {num_rounds or 'NO'} communication rounds")  # fmt: skip
    workers, threads = share_cores(args, held, device)

    # Agents: all start from the same parameters, and what is random is keyed by (seed, agent)
    first = [agent.to(device) for agent in make_agents(args)]
    sizes = [sum(parameter.numel() for parameter in agent.parameters()) for agent in first]
    communicators.unflatten(exchange.broadcast(communicators.flatten(first, max(sizes))), first)
    agents = [Agent(copy.deepcopy(first[i])) for i in held]
    fitted = [agent.baseline.parameters() for agent in agents]  # the policies take steps of their own
    optimizers = [torch.optim.Adam(own, args.learning_rate, eps=1e-5, fused=True) for own in fitted]
    generators = [torch.Generator().manual_seed(derive_seed(args.seed, i)) for i in held]

    # Communication: C, what agents have received in the last round, and how far apart policies are on public states
    reference_states = public_states(args).to(device) if num_rounds else None
    peers = Peers(exchange, first, reference_states, communicators.neighbours(args))
    communicator = peers.communicator  # [agents, agents], changed in place
    last_returns = [deque(maxlen=100) for _ in held]
    variations = torch.zeros(n, 3, dtype=torch.float64)  # of the last update, see `radius`; updates within the bound

    # Resume: what a checkpoint holds of each agent; the rest follows from the settings
    state = {
        i: {"agent": agents[k], "optimizer": optimizers[k], "generator": generators[k]}
        | {"last_returns": last_returns[k]}
        | {"variations": variations[i]}
        | peers.state(k)
        for k, i in enumerate(held)
    }
    run.restore(state)
    if run.iteration:
        peers.restore()
        variations[:] = exchange.all_gather(variations[list(held)])
    envs, actors = Envs(args, held, run.iteration), make_actors(args, agents)

    for iteration in run.iterations():
        for optimizer in optimizers if args.anneal_lr else ():
            optimizer.param_groups[0]["lr"] = (1.0 - (iteration - 1) / num_iterations) * args.learning_rate

        # Rollout
        storage, obs, behaviour, episodes = rollout(args, envs, actors, generators, run)  # [agents, steps, envs, ...]

        # Advantages; then flat, without the steps that only reset an environment
        outcomes = (storage.pop(name) for name in ("rewards", "terminations", "dones"))
        advantages = gae(*outcomes, storage["values"], storage.pop("next_values"), args.gamma, args.gae_lambda)
        storage |= {"advantages": advantages, "returns": advantages + storage["values"]}
        valid = storage.pop("valid")
        batches = [{name: tensor[k][valid[k]] for name, tensor in storage.items()} for k in range(len(held))]
        run.tick("advantages")

        # Reference policies, frozen for this update: row i of C applied to the policies, on agent i's own states
        references = [refer(i, obs[k], behaviour[k], peers.views[k], communicator, args) for k, i in enumerate(held)]
        references = [reference for *_, reference in communicators.take_turns(references, workers, threads)]
        for batch, reference in zip(batches, references, strict=True):
            batch["reference"] = reference[batch["states"]]
        run.tick("reference")

        # Update: the policy's step, the value function's minibatches; the agents take turns, so that all cores work
        groups = [variations[[i] if args.communicator == "identity" else slice(n), :2] for i in held]
        epsilons, bounds = zip(*(radius(communicator, group, args) for group in groups), strict=True)
        learners = zip(agents, optimizers, generators, obs, references, batches, epsilons, strict=True)
        steps = communicators.take_turns([learn(*own, args) for own in learners], workers, threads)
        moved = zip(held, agents, obs, behaviour, batches, peers.views, strict=True)
        moved = [diagnose(*own, communicator, args) for own in moved]
        # What the next epsilons need: two scalars of each agent, and a third for the log
        told = zip(steps, bounds, strict=True)
        told = [[own["tv_update"], own["tv_reference"], own["tv_update"] <= bound] for (own, *_), bound in told]
        told = torch.tensor(told, dtype=torch.float64)
        told[:, 2] += variations[list(held), 2]
        variations[:] = exchange.all_gather(told)
        run.tick("update")

        # Communication round: exchange snapshots, refresh the communicator
        for k, own in enumerate(episodes):
            last_returns[k].extend(total for total, _ in own)
            peers.round_returns[k].extend(total for total, _ in own)
        if iteration % args.local_updates == 0:
            peers.remember_returns()
            participating = torch.ones(n, dtype=torch.bool)
            reported_returns = None
            if args.communicator != "identity":  # isolated agents report nothing
                participating = communicators.participants(n, args.participation, derive_seed(args.seed, iteration, 7))
                if args.communicator == "relative-gain":
                    reported_returns = peers.report(peers.records[:, 1])
                else:
                    reported_returns = communicators.bound_returns(peers.report(peers.records[:, 0]))
            receives = make_communicator(args, reported_returns, usable=participating) > 0
            peers.exchange_snapshots([agent.policy for agent in agents], participating, receives, iteration)
            gains = None
            if args.communicator == "surrogate":
                gains = torch.full((n, n), torch.nan)
                for k, i in enumerate(held):
                    gains[i] = gains_of_peers(i, obs[k], batches[k], peers.candidates(i), n)
            usable = peers.usable
            new_communicator = make_communicator(args, reported_returns, peers.log_probs, gains, usable)
            peers.update(new_communicator)
        run.tick("exchange")

        # Metrics: declared scalars, one row per agent
        rows = []
        for k, own in enumerate(episodes):
            y_pred, y_true, (step, *fits) = batches[k]["values"], batches[k]["returns"], steps[k]
            row = {
                "charts/episodic_return": mean([total for total, _ in own]),
                "charts/episodic_length": mean([length for _, length in own]),
                "charts/episodes": len(own),
                "charts/return_last_100": mean(last_returns[k]),
                "losses/explained_variance": (1 - (y_true - y_pred).var() / y_true.var()).item(),
                "losses/value_loss": mean([loss["value_loss"] for loss in fits]),
            }
            row |= {f"losses/{name}": step[name] for name in ("policy_loss", "entropy")}
            row |= {f"policy/{name}": step.get(name, value) for name, value in moved[k].items()}  # exact where known
            row |= {f"trust_region/{name}": step[name] for name in ("epsilon", "slack", "step", "tv_reference")}
            share = variations[held[k], 2].item() / iteration
            rows.append(row | {"trust_region/bound": bounds[k], "trust_region/share_within_bound": share})
        scalars = {"charts/learning_rate": optimizers[0].param_groups[0]["lr"]}
        scalars["communication/rounds"] = iteration // args.local_updates
        run.log(rows, communicator, peers.distances, scalars)

        # Evaluation
        if args.eval_episodes and run.due(args.eval_every) and iteration < num_iterations:
            run.log_evaluation(evaluate_all(args, agents, held))

        # Checkpoint; every run, interrupted or not, starts its environments anew here
        if run.saves():
            run.save(state)
            envs.close()
            envs, actors = Envs(args, held, iteration), make_actors(args, agents)

    # Weights, videos, and the evaluation of every agent on every task in the official environments
    envs.close()
    for k, i in enumerate(held):
        save_file(agents[k].state_dict(), run.folder / f"agent_{i}.safetensors")
        if args.capture_video and not run.interrupted:
            film = str(run.folder / "videos" / f"agent_{i}")
            seed = derive_seed(args.seed, i, 6)
            evaluate(args, agents[k], task_ids(args)[i], film_levels(args, i), seed, film)
    if args.eval_episodes and not run.interrupted:
        run.log_evaluation(evaluate_all(args, agents, held))
    return run.finish(env_backend=choose_backend(args), communication_rounds=run.iteration // args.local_updates)


def evaluate_run(args: Args) -> list[dict]:
    """--eval-only: play the agents of a run."""
    return prpo_minigrid.evaluate_run(args, [Agent(policy) for policy in make_agents(args)])


if __name__ == "__main__":
    args = communicators.parse_args(Args, check_args, may_change=("capture_video", "eval_episodes", "total_timesteps"))
    if args.eval_only:
        evaluate_run(args)
    else:
        main(args)
