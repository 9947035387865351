"""Distral on MiniGrid: a central policy is distilled from the data of all agents.

This pools data: pi_0 learns from the states that all agents visit. It is a baseline of PR-PPO
(`prpo_minigrid.py`) that shows what sharing data would give; environments, network, rollout,
advantages and the agents' update are imported from there, so that a comparison compares one thing
only. Distral (Teh et al. 2017, arXiv:1707.04175, eq. 1) alternates two steps, here in every
iteration in this order:

    pi_0 = argmin sum_i E_s~pi_i[KL(pi_i || pi_0)]      the mixture of the agents, by their visits
    maximise  E[clipped surrogate] - kl_coef E[KL(pi_i || pi_0)]      of each agent i, pi_0 frozen

    python distral_minigrid.py                                   # three agents, one central policy
    python distral_minigrid.py --kl-coef 1 --kl-schedule linear  # a pull that falls to 0
    python distral_minigrid.py --resume runs/<name>              # continue an interrupted run
"""

import copy
import math
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
    choose_backend,
    compute_advantages,
    evaluate_agents,
    make_agents,
    make_batch,
    name_tasks,
    rollout,
    update,
)


@dataclass
class Args(TaskArgs):
    # Reference policy
    kl_direction: Literal["forward", "reverse"] = "reverse"
    """forward: KL(central policy || policy); reverse: KL(policy || central policy), Distral's"""
    kl_coef: Annotated[NonNegative, tyro.conf.arg(aliases=["--communication-coef"])] = 0.5
    """coefficient of the KL penalty towards the central policy"""
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

    # Central policy
    central_learning_rate: Positive = 1e-3
    """learning rate of the central policy's Adam, which is not annealed"""
    central_epochs: Count = 16
    """steps of the central policy per iteration, each over the states of all agents"""
    local_updates: Count = 1
    """iterations after which agents get the central policy anew"""


# --- Distral ---


def pool_states(rollouts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The states of all agents, which the central policy learns from.

    rollouts: of each agent the data of `rollout`. Returns obs [states, ...]; policy, the
    log-probabilities of the agent whose states they are [states, actions]; visits, the number of
    its samples there [states].
    """
    obs = []
    policy = []
    visits = []
    for data in rollouts:
        obs_inds = data["obs_inds"][data["valid"]]
        obs.append(data["obs"])
        policy.append(data["policy"])
        visits.append(obs_inds.bincount(minlength=len(data["obs"])))
    return {"obs": torch.cat(obs), "policy": torch.cat(policy), "visits": torch.cat(visits)}


def distil(
    central: Agent, optimizer: torch.optim.Optimizer, states: dict[str, Tensor], args: Args
) -> float:
    """Train the central policy on the states of all agents. Returns the mean loss.

    The loss is E_s~pi_i[KL(pi_i || pi_0)] over all samples of all agents: the cross entropy
    E[-sum_a pi_i(a|s) log pi_0(a|s)] less the agents' entropy, which does not depend on pi_0. Its
    minimum is the mixture of the agents' policies, weighted by their visits to the state.
    states: of `pool_states`.
    """
    weights = states["visits"] / states["visits"].sum()
    losses = []
    for _ in range(args.central_epochs):
        logits, _ = central(states["obs"])
        loss = weights @ communicators.categorical_kl(states["policy"], logits.log_softmax(-1))
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(central.parameters(), args.max_grad_norm)
        if not (loss.isfinite() & grad_norm.isfinite()):
            return math.nan  # without a step, which would ruin Adam's moments
        optimizer.step()
    return mean(losses)


def main(args: Args) -> dict:
    """Train, evaluate, and return what summary.json holds."""
    n = args.num_agents
    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size
    task_names = name_tasks(args)
    together = "the central policy learns from the states of all agents"
    exchange = communicators.make_exchange(args, together=together)
    held = exchange.agents  # all agents
    run = Run(
        args,
        exchange,
        "+".join(dict.fromkeys(task_names)),
        total=num_iterations,
        units_per_iteration=batch_size * len(exchange.members),
        main_metric="charts/return_last_100",
        env_ids=task_names,
        steps_per_iteration=batch_size,
        about="one central policy learns from the data of all",
    )

    # Agents: all start from the same parameters, and what is random is keyed by (seed, agent)
    agents = [agent.to(exchange.device) for agent in make_agents(args)]
    optimizers = [
        torch.optim.Adam(agent.parameters(), args.learning_rate, eps=1e-5, fused=True)
        for agent in agents
    ]
    generators = [torch.Generator().manual_seed(derive_seed(args.seed, i)) for i in held]
    last_returns = [deque(maxlen=100) for _ in held]

    # Central policy, of the default size and with an idle critic, and what the agents have of it
    torch.manual_seed(args.seed)
    central = Agent(agents[0].actor.out_features).to(exchange.device)
    central_optimizer = torch.optim.Adam(
        central.parameters(), args.central_learning_rate, eps=1e-5, fused=True
    )
    snapshot = copy.deepcopy(central)

    # Resume: what a checkpoint holds of each agent; the rest follows from the settings. These
    # objects are changed in place
    state = {
        "agent": agents,
        "optimizer": optimizers,
        "generator": generators,
        "last_returns": last_returns,
        "central": [central] * n,
        "central_optimizer": [central_optimizer] * n,
        "snapshot": [snapshot] * n,
    }
    run.restore(state)
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

        # Distillation: the central policy learns from the states of all agents that are finite
        finite = [data for data, _ in rollouts if data["policy"].isfinite().all()]
        distillation = math.nan
        if finite:
            distillation = distil(central, central_optimizer, pool_states(finite), args)
        run.tick("distillation")

        # Communication round: all agents get the central policy
        if (iteration - 1) % args.local_updates == 0:
            snapshot.load_state_dict(central.state_dict())

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

            # Reference policy, frozen for this update: the central policy
            logits, _ = snapshot.predict(batch["obs"])
            batch["reference"] = logits.log_softmax(-1)
            run.tick("reference")

            # Update
            losses = update(agents[k], optimizers[k], generators[k], batch, kl_coef, args)
            run.tick("update")

            # Metrics: declared scalars
            returns = [episode_return for episode_return, _ in episodes]
            last_returns[k].extend(returns)
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

        scalars = {
            "charts/learning_rate": optimizers[0].param_groups[0]["lr"],
            "charts/kl_coefficient": kl_coef,
            "losses/distillation": distillation,
            "communication/rounds": 1 + (iteration - 1) // args.local_updates,
            "communication/dropped": n - len(finite),
        }
        run.log(rows, communicators.uniform(n), torch.full((n, n), torch.nan), scalars)

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
    run.save_weights("central", central)
    if args.eval_episodes and not run.interrupted:
        run.log_evaluation(evaluate_agents(args, agents, held))
    return run.finish(
        env_backend=choose_backend(args),
        communication_rounds=math.ceil(run.iteration / args.local_updates),
    )


# --- checks of arguments ---


def check_args(args: Args) -> None:
    """What types cannot express. `refuse` ends with one line: flag, value and what is valid."""
    prpo_minigrid.check_task(args)
    reason = "the reference of all agents is the central policy"
    communicators.refuse_communicator(args, reason)
    if communicators.get_world_size() > 1:
        valid = "must be in one process, as the central policy learns from the states of all"
        refuse(args, "num_agents", valid)
    if args.kl_coef == 0 and args.num_agents > 1:
        communicators.announce("--kl-coef 0: the central policy has no influence on the agents")


if __name__ == "__main__":
    may_change = ("eval_episodes", "total_timesteps")
    main(communicators.parse_args(Args, check_args, may_change=may_change))
