"""MiniGrid with one agent that lies: what the last agent sends is not what it has learned.

    python benchmark/liars.py --lie flipped                            # mixed policies
    python benchmark/liars.py --lie flipped --aggregation weights      # FedAvg
    python benchmark/liars.py --lie random --boast --communicator reward

Everything else is `prpo_minigrid.py`, whose flags all apply. The honest agents are on DoorKey-5x5,
6x6 and 8x8.

| --lie | what the last agent sends |
| --- | --- |
| none | its policy, as the others do |
| random | new random weights in every round, each layer's as large as its own |
| flipped | its weights, with the signs of the actor's turned |
| opposite | its policy, trained with the rewards' signs turned |
"""

import copy
import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
import communicators
import prpo_minigrid
from communicators import Count

RANDOM_WEIGHTS = 8  # what a derived seed is for, as in prpo_minigrid.py
BOAST = 1000.0


@dataclass
class Args(prpo_minigrid.Args):
    lie: Literal["none", "random", "flipped", "opposite"] = "none"
    """what the last agent sends instead of its policy"""
    boast: bool = False
    """the last agent reports a mean return of 1,000"""
    num_agents: Count = 4
    env_ids: tuple[str, ...] = (
        "MiniGrid-DoorKey-5x5-v0",
        "MiniGrid-DoorKey-6x6-v0",
        "MiniGrid-DoorKey-8x8-v0",
        "MiniGrid-DoorKey-6x6-v0",
    )


@torch.no_grad()
def distort(network: nn.Module, lie: str, seed: int) -> nn.Module:
    """What a liar with this network sends."""
    sent = copy.deepcopy(network)
    if lie == "random":
        generator = torch.Generator().manual_seed(seed)
        for parameter in sent.parameters():
            scale = parameter.square().mean().sqrt()
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.copy_(scale * noise)
    elif lie == "flipped":
        for parameter in sent.actor.parameters():
            parameter.neg_()
    return sent


class LyingPeers(communicators.Peers):
    """As `Peers`, but what the last agent sends and reports is a lie."""

    def __init__(self, args: Args, *inputs):
        super().__init__(*inputs)
        self.args = args

    def report(self, numbers: Tensor, networks: list[nn.Module]) -> Tensor:
        if self.args.boast and holds_liar(self.args, self.held):
            numbers = numbers.clone()
            numbers[-1] = BOAST
        return super().report(numbers, networks)

    def exchange_snapshots(
        self, networks: list[nn.Module], participating: Tensor, receives: Tensor, iteration: int
    ) -> None:
        networks = list(networks)
        if holds_liar(self.args, self.held):
            seed = communicators.derive_seed(self.args.seed, iteration, RANDOM_WEIGHTS)
            networks[-1] = distort(networks[-1], self.args.lie, seed)
        super().exchange_snapshots(networks, participating, receives, iteration)


class Envs(prpo_minigrid.Envs):
    """As there, but with --lie opposite the last agent learns from rewards with turned signs."""

    def __init__(self, args: Args, agents: range, checkpoint: int):
        super().__init__(args, agents, checkpoint)
        self.opposite = args.lie == "opposite" and holds_liar(args, agents)

    def step(self, actions: np.ndarray) -> tuple:
        """The returns of episodes stay as they are."""
        rewards, *others = super().step(actions)
        if self.opposite:
            rewards[-1] = -rewards[-1]
        return rewards, *others


def holds_liar(args: Args, held: range) -> bool:
    """Whether this process holds the last agent, which then is the last of those held."""
    return args.num_agents - 1 in held


def main(args: Args) -> dict:
    """Train as `prpo_minigrid.py`."""
    honest_envs = prpo_minigrid.Envs
    prpo_minigrid.Peers = functools.partial(LyingPeers, args)
    prpo_minigrid.Envs = Envs
    try:
        return prpo_minigrid.main(args)
    finally:
        prpo_minigrid.Peers = communicators.Peers
        prpo_minigrid.Envs = honest_envs


def check_args(args: Args) -> None:
    """Raise one-line errors, as `prpo_minigrid.py`."""
    prpo_minigrid.check_args(args)
    if args.exchange:
        communicators.refuse(args, "exchange", "lies are sent without a folder only; leave it out")


if __name__ == "__main__":
    args = communicators.parse_args(
        Args, check_args, may_change=("capture_video", "eval_episodes", "total_timesteps")
    )
    if args.eval_only:
        prpo_minigrid.evaluate_run(args)
    else:
        main(args)
