"""Federated distillation on public states (FedHPD), with PR-PPO and isolated agents beside it.

    python benchmark/fedhpd.py --distill                      # FedHPD
    python benchmark/fedhpd.py                                # PR-PPO on the same
    python benchmark/fedhpd.py --communicator identity        # isolated agents

Ten agents on CartPole-v1 with ten networks, the set-up of Jiang et al., "FedHPD: Heterogeneous
Federated Reinforcement Learning via Policy Distillation" (AAMAS 2025). In a round of FedHPD agents
send their action probabilities on public states, nothing else; each then moves towards their mean:

    consensus(.|s) = sum_j pi_j(.|s) / n        minimise  E_s KL(consensus(.|s) || pi_i(.|s))

All else is `prpo_minigrid.py` with other observations and networks: PPO is the learner of all three
methods, also where the paper has REINFORCE.
"""

import importlib.util
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import communicators  # noqa: E402
import prpo_minigrid  # noqa: E402
from communicators import Count, Natural, Positive, Run, derive_seed, mean  # noqa: E402


@dataclass
class Args(prpo_minigrid.Args):
    distill: bool = False
    """FedHPD instead of PR-PPO: its consensus is uniform, whatever --communicator is"""
    distill_steps: Natural = 10
    """FedHPD: gradient steps towards the consensus in a round, on all public states"""
    num_agents: Count = 10
    env_id: str = "CartPole-v1"
    num_envs: Count = 32
    num_steps: Count = 32
    total_timesteps: Count = 40_960
    learning_rate: Positive = 2.5e-3
    clip_vloss: bool = False
    local_updates: Count = 2


# --- ten networks for CartPole ---

# Hidden layers and activations of the paper's agents
NETWORKS = (
    ((128,), nn.ReLU),
    ((32, 32), nn.ReLU),
    ((16, 16, 32), nn.Tanh),
    ((8, 8, 8), nn.ReLU),
    ((32, 32, 32), nn.Tanh),
    ((8, 8), nn.ReLU),
    ((64, 64), nn.Tanh),
    ((16, 16), nn.ReLU),
    ((16, 32, 16), nn.Tanh),
    ((32,), nn.ReLU),
)
PUBLIC_STEPS = 625  # of 8 environments: the paper's 5,000 public states

OBSERVATIONS = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)


def show_observations(env: gym.Env) -> gym.Env:
    """`env`, showing `OBSERVATIONS`."""
    return env


def make_trunk(widths: tuple[int, ...], activation: type[nn.Module]) -> nn.Sequential:
    """Hidden layers of these widths, which read an observation."""
    layers = []
    for inputs, outputs in zip((4, *widths), widths, strict=False):
        layers += [prpo_minigrid.layer_init(nn.Linear(inputs, outputs)), activation()]
    return nn.Sequential(*layers)


class Agent(nn.Module):
    """Policy and value function, which share nothing: distillation leaves the values alone."""

    def __init__(self, num_actions: int, widths: tuple[int, ...], activation: type[nn.Module]):
        super().__init__()
        self.network = make_trunk(widths, activation)
        self.actor = prpo_minigrid.layer_init(nn.Linear(widths[-1], num_actions), std=0.01)
        self.critic = nn.Sequential(
            make_trunk(widths, activation),
            prpo_minigrid.layer_init(nn.Linear(widths[-1], 1), std=1),
        )

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """obs: [batch, 4] float32. Returns (logits [batch, actions], value [batch])."""
        return self.actor(self.network(obs)), self.critic(obs).squeeze(-1)

    @torch.no_grad()
    def predict(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """`forward` for many states, without gradient."""
        return self(obs)


def make_agents(args: Args) -> list[Agent]:
    """Every agent's network at the start; after ten agents the networks repeat."""
    num_actions = int(prpo_cartpole.make_env(args.env_id).action_space.n)
    agents = []
    for i in range(args.num_agents):
        torch.manual_seed(args.seed)
        agents.append(Agent(num_actions, *NETWORKS[i % len(NETWORKS)]))
    return agents


def copy_script() -> ModuleType:
    """prpo_minigrid.py as another module, with CartPole's parts in their places."""
    spec = importlib.util.spec_from_file_location("copied_prpo_minigrid", ROOT / "prpo_minigrid.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.OBSERVATIONS = OBSERVATIONS
    module.show_observations = show_observations
    module.make_agents = make_agents
    return module


prpo_cartpole = copy_script()
evaluate_agents = prpo_cartpole.evaluate_agents  # what play.py needs


# --- FedHPD ---


def compute_public_probs(agent: Agent, public_states: Tensor) -> Tensor:
    """All that an agent sends: its action probabilities on the public states, flat."""
    logits, _ = agent.predict(public_states)
    return logits.softmax(-1).flatten()


def compute_consensus(received: list[Tensor | None], num_states: int) -> Tensor:
    """The mean of the agents' distributions, as log-probabilities [states, actions].

    received: what each agent sent, None for one that has diverged.
    """
    probs = torch.stack([flat.view(num_states, -1) for flat in received if flat is not None])
    return probs.mean(0).log()


def distill(
    agent: Agent, optimizer: torch.optim.Optimizer, states: Tensor, consensus: Tensor, steps: int
) -> None:
    """Move a policy towards the consensus on all public states, with the optimizer of PPO."""
    for _ in range(steps):
        logits, _ = agent(states)
        kl = communicators.kl_to_reference(logits.log_softmax(-1), consensus, "forward").mean()
        if not kl.isfinite():  # its step would ruin Adam's moments
            return
        optimizer.zero_grad()
        kl.backward()
        optimizer.step()


def train_fedhpd(args: Args) -> dict:
    """As `main` of prpo_minigrid.py, but a round distils instead of exchanging references."""
    n = args.num_agents
    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size
    num_rounds = num_iterations // args.local_updates
    task_names = prpo_cartpole.name_tasks(args)
    together = "--distill needs the probabilities of all agents in every round"
    exchange = communicators.make_exchange(args, isolated=False, together=together)
    held = exchange.agents  # the agents of this process: agent i of all is the k-th held
    run = Run(
        args,
        exchange,
        "+".join(dict.fromkeys(task_names)),
        total=num_iterations,
        units_per_iteration=batch_size * len(exchange.members),
        main_metric="charts/return_last_100",
        env_ids=task_names,
        steps_per_iteration=batch_size,
        about=f"FedHPD, {num_rounds or 'NO'} communication rounds",
    )

    # Agents: what is random is keyed by (seed, agent)
    first = [agent.to(exchange.device) for agent in make_agents(args)]
    agents = [first[i] for i in held]
    optimizers = [
        torch.optim.Adam(agent.parameters(), args.learning_rate, eps=1e-5, fused=True)
        for agent in agents
    ]
    generators = [torch.Generator().manual_seed(derive_seed(args.seed, i)) for i in held]
    last_returns = [deque(maxlen=100) for _ in held]

    public_states = prpo_cartpole.collect_public_states(args, PUBLIC_STEPS).to(exchange.device)
    distances = torch.full((n, n), torch.nan)  # not measured

    # Resume: what a checkpoint holds of each agent; the rest follows from the settings
    state = {
        "agent": agents,
        "optimizer": optimizers,
        "generator": generators,
        "last_returns": last_returns,
    }
    run.restore(state)
    envs = prpo_cartpole.Envs(args, held, run.iteration)
    tables = [prpo_cartpole.PolicyTable(agent) for agent in agents]
    if args.eval_episodes and run.misses_evaluation():
        run.log_evaluation(evaluate_agents(args, agents, held))

    for iteration in run.iterations():
        remaining = 1.0 - (iteration - 1) / num_iterations
        kl_coef = args.kl_coef
        if args.kl_schedule == "linear":
            kl_coef = remaining * args.kl_coef

        # Rollout
        rollouts = prpo_cartpole.rollout(args, tables, envs, generators)
        run.tick("rollout")

        rows = []  # metrics
        for k in range(len(held)):
            if args.anneal_lr:
                optimizers[k].param_groups[0]["lr"] = remaining * args.learning_rate

            # Advantages
            data, episodes = rollouts[k]
            advantages = prpo_cartpole.compute_advantages(data, args.gamma, args.gae_lambda)
            data["advantages"] = advantages
            data["returns"] = data["advantages"] + data["values"]
            batch = prpo_cartpole.make_batch(data)
            run.tick("advantages")

            # Reference policy, frozen for this update: its own (eq. 3)
            batch["reference"] = batch["policy"]
            run.tick("reference")

            # Update
            losses = prpo_cartpole.update(
                agents[k], optimizers[k], generators[k], batch, kl_coef, args
            )
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

        # Communication round: distributions on public states, then distillation
        dropped = 0
        if iteration % args.local_updates == 0:
            sent = [compute_public_probs(agent, public_states) for agent in agents]
            received, _ = exchange.round(sent)
            dropped = sum(flat is None for flat in received)
            if dropped < n:
                consensus = compute_consensus(received, len(public_states))
                for agent, optimizer in zip(agents, optimizers, strict=True):
                    distill(agent, optimizer, public_states, consensus, args.distill_steps)
            exchange.count_bytes(torch.ones(n, n, dtype=torch.bool))
        run.tick("exchange")

        scalars = {
            "charts/learning_rate": optimizers[0].param_groups[0]["lr"],
            "charts/kl_coefficient": kl_coef,
            "communication/rounds": iteration // args.local_updates,
            "communication/dropped": dropped,
        }
        C = communicators.identity(n)
        if iteration >= args.local_updates:
            C = communicators.uniform(n)
        run.log(rows, C, distances, scalars)

        # Evaluation
        if args.eval_episodes and run.evaluates():
            run.log_evaluation(evaluate_agents(args, agents, held))

        # Checkpoint. Every run starts its environments anew here, so that a resumed one is the same
        if run.saves():
            run.save(state)
            envs.close()
            envs = prpo_cartpole.Envs(args, held, iteration)
            tables = [prpo_cartpole.PolicyTable(agent) for agent in agents]

    # Weights, and the evaluation of every agent in the official environments
    envs.close()
    for k, i in enumerate(held):
        run.save_weights(f"agent_{i}", agents[k])
    if args.eval_episodes and not run.interrupted:
        run.log_evaluation(evaluate_agents(args, agents, held))
    return run.finish(
        env_backend="gymnasium",
        communication_rounds=run.iteration // args.local_updates,
    )


def main(args: Args) -> dict:
    """Train by the method, evaluate, and return what summary.json holds."""
    return train_fedhpd(args) if args.distill else prpo_cartpole.main(args)


def check_args(args: Args) -> None:
    """Raise one-line errors, as prpo_minigrid.py does."""
    if args.distill:  # no communicator is read
        prpo_cartpole.check_task(args)
    else:
        prpo_cartpole.check_args(args)
    if args.hidden_sizes:
        communicators.refuse(args, "hidden_sizes", "is not read here: see NETWORKS in fedhpd.py")


if __name__ == "__main__":
    may_change = ("eval_episodes", "total_timesteps")
    main(communicators.parse_args(Args, check_args, may_change=may_change))
