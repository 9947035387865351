"""A toy on `Run`: every agent fits a line to noise. python toy.py flags...

It holds one of everything that a checkpoint can hold, and takes milliseconds.
"""

import os
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

import communicators
from communicators import Count, Exchange, Run, RunArgs


@dataclass
class Args(RunArgs):
    num_agents: Count = 3
    """number of agents"""
    iterations: Count = 6
    """length of the run"""
    save_every: Count = 2
    """iterations between checkpoints"""
    eval_every: Count = 2
    """iterations between evaluations"""


def check_args(args):
    """Nothing more to check."""


def main(args, name="toy", at=lambda iteration: None):
    """Train; at(iteration) is called in the middle of each iteration."""
    torch.manual_seed(args.seed)
    exchange = Exchange(args.num_agents, "cpu", args.timeout)
    held = exchange.agents
    env_ids = [f"line {i}" for i in range(args.num_agents)]
    run = Run(
        args,
        exchange,
        name,
        total=args.iterations,
        units_per_iteration=10,
        steps_per_iteration=5,
        main_metric="charts/x",
        env_ids=env_ids,
    )
    modules = [torch.nn.Linear(2, 1) for _ in range(args.num_agents)][held.start : held.stop]
    optimizers = [torch.optim.Adam(module.parameters(), 0.1) for module in modules]
    generators = [torch.Generator().manual_seed(100 * args.seed + i) for i in held]
    C = torch.eye(args.num_agents)
    table = torch.zeros(len(held), 50_000, 2)  # of which each agent's checkpoint holds two numbers
    state = {
        "module": modules,
        "optimizer": optimizers,
        "generator": generators,
        "tensor": [row[0] for row in table],
        "list": [[0.5] for _ in held],
        "deque": [deque(maxlen=3) for _ in held],
        "communicator": [C for _ in held],
    }
    run.restore(state)
    for iteration in run.iterations():
        C[0, -1] = iteration // 2 / 10  # a new C in every second iteration
        C[0, 0] = 1 - iteration // 2 / 10
        rows = []
        for k, i in enumerate(held):
            x = torch.randn(8, 2, generator=generators[k])
            loss = (modules[k](x) - x.sum(1, keepdim=True) * i).square().mean()
            optimizers[k].zero_grad()
            loss.backward()
            optimizers[k].step()
            objects = {name: column[k] for name, column in state.items()}
            objects["tensor"] += x[0]
            objects["list"].append(x[0, 0].item())
            objects["deque"].append(iteration)
            value = sum(objects["list"]) + sum(objects["deque"]) + objects["tensor"].sum().item()
            rows.append({"charts/x": value, "losses/policy_loss": loss.item()})
        at(iteration)
        exchange.bytes_sent += 7
        run.tick("all")
        run.log(rows, C, torch.full_like(C, torch.nan), {"charts/learning_rate": 1 / iteration})
        if run.due(args.eval_every):
            run.log_evaluation(
                [
                    {"line": {"return": np.array([value, iteration])}}
                    for value in objects["list"][-1:] * len(held)
                ]
            )
        if run.saves():
            run.save(state)
    for k, i in enumerate(held):
        torch.save(modules[k].state_dict(), run.folder / f"agent_{i}.pt")
    return run.finish()


if __name__ == "__main__":
    print("pid", os.getpid(), flush=True)
    main(communicators.parse_args(Args, check_args))
