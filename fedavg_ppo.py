"""FedAvg-PPO on MiniGrid: agents that share no data average their parameters.

The baseline of PR-PPO (`prpo_minigrid.py`), whose environments, network, rollout and advantages
this script imports, so that a comparison compares one thing only. In a round each agent goes on
from the average sum_j C[i, j] theta_j; its KL penalty pulls it towards its own policy before the
update (eq. 3 of the PRPO paper). Two relatives: --private-heads are not averaged (FedPer), and with
--prox-coef the average does not replace an agent's parameters, but pulls them.

    python fedavg_ppo.py                                         # three agents in one process
    python fedavg_ppo.py --communicator similarity               # a weighted average (WeightedAvg)
    python fedavg_ppo.py --communicator best                     # all copy the best (PBT's exploit)
    python fedavg_ppo.py --private-heads actor critic            # only the trunk is averaged
    torchrun --nproc-per-node 3 fedavg_ppo.py                    # one agent per process
    python fedavg_ppo.py --resume runs/<name>                    # continue an interrupted run
"""

import copy
from collections import deque
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn as nn
import tyro
from torch import Tensor

import communicators
import prpo_minigrid
from communicators import Count, NonNegative, Positive, Run, derive_seed, mean, refuse
from prpo_minigrid import (
    Agent,
    Envs,
    PolicyTable,
    TaskArgs,
    average_losses,
    choose_backend,
    collect_public_states,
    compute_advantages,
    compute_public_log_probs,
    estimate_gains,
    evaluate_agents,
    list_env_ids,
    make_agents,
    make_batch,
    make_communicator,
    name_tasks,
    rollout,
)


@dataclass
class Args(TaskArgs):
    # Distance to the policy before the update
    kl_direction: Literal["forward", "reverse"] = "reverse"
    """forward: KL(old policy || policy); reverse: KL(policy || old policy)"""
    kl_coef: Annotated[NonNegative, tyro.conf.arg(aliases=["--communication-coef"])] = 0.5
    """coefficient of the KL penalty towards the policy before the update"""
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
    # share of the way from what agents had after the last round to the average: 1 is FedAvg,
    # others are FedOpt with SGD
    server_lr: Positive = 1.0
    private_heads: tuple[Literal["actor", "critic"], ...] = ()
    """heads that are not averaged, but sent (actor critic: FedPer)"""
    # above 0 the average replaces nothing, but pulls: coefficient of half the squared distance to
    # it in the loss
    prox_coef: NonNegative = 0.0


# --- FedAvg-PPO ---


def compute_average(i: int, received: list[Tensor | None], C: Tensor) -> Tensor | None:
    """Row i of C applied to the parameters, [numel]; None if agent i listens to nobody else.

    received: flat parameters of all agents, None where they are missing.
    """
    senders = C[i].nonzero().flatten().tolist()
    if senders == [i]:
        return None
    parameters = torch.stack([received[j] for j in senders])
    return C[i, senders].to(parameters) @ parameters


def replace_parameters(agent: Agent, average: Tensor, private_heads: tuple[str, ...]) -> None:
    """Give an agent an average of parameters [numel], but for its private heads."""
    values = agent.state_dict()
    kept = {name: values[name].clone() for name in values if name.startswith(private_heads)}
    communicators.unflatten(average, agent)
    agent.load_state_dict(kept, strict=False)


def update(
    agent: Agent,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
    batch: dict[str, Tensor],
    kl_coef: float,
    args: Args,
    anchor: Tensor | None,
) -> dict[str, float]:
    """PPO's epochs over an agent's rollout, with the KL penalty of eq. 3. Returns mean losses.

    batch: of `make_batch`, and the reference policy's log-probabilities, `reference`
    [states, actions]; anchor: the average of parameters that --prox-coef pulls towards [numel],
    None if the agent listens to nobody else.
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

            # Distance to the reference policy, exact over the action set: the one before the update
            reference = batch["reference"][batch["obs_inds"][mb_inds]]
            kl_reference = communicators.kl_to_reference(newlogprobs, reference, args.kl_direction)
            kl_reference = kl_reference.mean()

            loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
            loss = loss + kl_coef * kl_reference

            # Distance to the average of parameters (proximal); buffers have no gradient
            if args.prox_coef:
                proximal_loss = torch.zeros_like(pg_loss)
                if anchor is not None:
                    values = agent.state_dict(keep_vars=True).values()
                    theta = torch.cat([parameter.flatten() for parameter in values])
                    proximal_loss = 0.5 * (theta - anchor).square().sum()
                loss = loss + args.prox_coef * proximal_loss

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
            if args.prox_coef:
                losses[-1]["losses/proximal_loss"] = proximal_loss.item()
            if not (loss.isfinite() & grad_norm.isfinite()):
                # This agent has diverged: no step, which would ruin Adam's moments; peers go on
                losses[-1]["losses/policy_loss"] = torch.nan
                return average_losses(losses)
            optimizer.step()
    return average_losses(losses)


def main(args: Args) -> dict:
    """Train, evaluate, and return what summary.json holds."""
    n = args.num_agents
    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size
    num_rounds = num_iterations // args.local_updates
    task_names = name_tasks(args)
    exchange = communicators.make_exchange(args, averages="pull" if args.prox_coef else "replace")
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
    begin = [communicators.flatten(agent) for agent in agents]  # what the last round left them

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
    if args.server_lr != 1:
        state["begin"] = begin
    run.restore(state)
    C[:] = exchange.all_gather(C[rows_held])
    distances[:] = exchange.all_gather(distances[rows_held])
    received = exchange.recall(sent, sizes)
    averages = [compute_average(i, received, C) for i in held]
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
        for k in range(len(held)):
            if args.anneal_lr:
                optimizers[k].param_groups[0]["lr"] = remaining * args.learning_rate

            # Advantages
            data, episodes = rollouts[k]
            data["advantages"] = compute_advantages(data, args.gamma, args.gae_lambda)
            data["returns"] = data["advantages"] + data["values"]
            batch = make_batch(data)
            run.tick("advantages")

            # Reference policy, frozen for this update: its own (eq. 3)
            batch["reference"] = batch["policy"]
            run.tick("reference")

            # Update
            anchor = averages[k]
            losses = update(agents[k], optimizers[k], generators[k], batch, kl_coef, args, anchor)
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

            # FedAvg: agents go on from the average of what they received, with their optimizers
            averages = [compute_average(i, received, C) for i in held]
            for k, average in enumerate(averages):
                if average is not None and not args.prox_coef:
                    new = communicators.take_server_step(begin[k], average, args.server_lr)
                    replace_parameters(agents[k], new, args.private_heads)
            begin[:] = [communicators.flatten(agent) for agent in agents]
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


# --- checks of arguments ---


def check_args(args: Args) -> None:
    """What types cannot express. `refuse` ends with one line: flag, value and what is valid."""
    flag = "env_ids" if args.env_ids else "env_id"
    if any(env_id.startswith("ALE/") or "NoFrameskip" in env_id for env_id in list_env_ids(args)):
        refuse(args, flag, "games of the Atari 2600 are trained by fedavg_atari.py")
    prpo_minigrid.check_task(args)
    communicators.check_communicator(args, make_communicator, has_influence=True)
    if args.communicator == "self-preferred" and args.self_preference == 0 and args.num_agents > 1:
        refuse(args, "self_preference", "must be positive, or agents would swap networks")
    if len(set(args.hidden_sizes)) > 1:
        refuse(args, "hidden_sizes", "must be equal: networks of different sizes have no average")
    for flag in ("private_heads", "server_lr"):
        if args.prox_coef and getattr(args, flag) != getattr(Args, flag):
            valid = "does not go with --prox-coef, with which nothing is replaced"
            refuse(args, flag, valid)


if __name__ == "__main__":
    may_change = ("eval_episodes", "total_timesteps")
    main(communicators.parse_args(Args, check_args, may_change=may_change))
