"""MiniGrid with one agent that lies: what the last agent sends is not what it has learned.

    python benchmark/liars.py --lie flipped                            # mixed policies
    python benchmark/liars.py --lie flipped --averages                 # FedAvg
    python benchmark/liars.py --lie random --boast --communicator reward

Everything else is `prpo_minigrid.py`, or with --averages `fedavg_ppo.py`, whose flags all apply.
The honest agents are on DoorKey-5x5, 6x6 and 8x8.

| --lie | what the last agent sends |
| --- | --- |
| none | its policy, as the others do |
| random | new random weights in every round, each layer's as large as its own |
| flipped | its weights, with the signs of the actor's turned |
| opposite | its policy, trained with the rewards' signs turned |
| inflated | what `random` sends, with 1 added to its critic: more than an episode here returns |
| maximal | what `random` sends, with a critic that expects 1,000 in every state |

The last two lie to --gate value as well, with a policy that does harm to those who believe them.
With --averages the liar's own next parameters are an average that has its lie, too.
"""

import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
import communicators
import fedavg_ppo
import prpo_minigrid
from communicators import Count
from prpo_minigrid import evaluate_agents, make_agents  # noqa: F401 - what play.py needs

RANDOM_WEIGHTS = 8  # what a derived seed is for, as in prpo_minigrid.py
BOAST = 1000.0
INFLATION = 1.0
MAXIMUM = 1000.0


@dataclass
class Args(prpo_minigrid.Args, fedavg_ppo.Args):
    averages: bool = False
    """agents average their parameters, as in fedavg_ppo.py, instead of mixing policies"""
    lie: Literal["none", "random", "flipped", "opposite", "inflated", "maximal"] = "none"
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
def distort(network: nn.Module, lie: str, seed: int) -> None:
    """Turn a liar's network into what it sends, in place."""
    if lie in ("random", "inflated", "maximal"):
        generator = torch.Generator().manual_seed(seed)
        for parameter in network.parameters():
            scale = parameter.square().mean().sqrt()
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.copy_(scale * noise)
    if lie == "inflated":
        network.critic.bias.add_(INFLATION)
    if lie == "maximal":
        network.critic.weight.zero_()
        network.critic.bias.fill_(MAXIMUM)
    if lie == "flipped":
        for parameter in network.actor.parameters():
            parameter.neg_()


class LyingExchange(communicators.Exchange):
    """As `Exchange`, but what the last agent sends and reports is a lie. In a launcher's place."""

    def __init__(self, args: Args, isolated: bool, averages: str, together: str):
        super().__init__(args.num_agents, args.device, args.timeout, isolated)
        self.args = args
        self.network = prpo_minigrid.make_agents(args)[-1].to(self.device)

    def round(
        self, sent: list[Tensor], numbers: Tensor | None = None, sizes: list[int] | None = None
    ) -> tuple[list[Tensor | None], Tensor]:
        if numbers is not None and self.args.boast and holds_liar(self.args, self.agents):
            numbers = numbers.clone()
            numbers[-1] = BOAST
        return super().round(self.lie(sent), numbers, sizes)

    def recall(self, sent: list[Tensor], sizes: list[int] | None = None) -> list[Tensor | None]:
        return super().recall(self.lie(sent), sizes)

    def lie(self, sent: list[Tensor]) -> list[Tensor]:
        """What leaves this process instead of `sent`; equal for equal tensors."""
        if not holds_liar(self.args, self.agents):
            return sent
        *others, honest = sent
        communicators.unflatten(honest, self.network)
        checksum = zlib.crc32(honest.cpu().numpy().tobytes())  # another one in every round
        seed = communicators.derive_seed(self.args.seed, checksum, RANDOM_WEIGHTS)
        distort(self.network, self.args.lie, seed)
        return [*others, communicators.flatten(self.network)]


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


def choose_script(args: Args):
    """The script whose agents these are."""
    return fedavg_ppo if args.averages else prpo_minigrid


def main(args: Args) -> dict:
    """Train as the script does."""
    script = choose_script(args)
    honest_envs = script.Envs
    script.Envs = Envs
    communicators.exchange_of_launcher = LyingExchange
    try:
        return script.main(args)
    finally:
        script.Envs = honest_envs
        communicators.exchange_of_launcher = None


def check_args(args: Args) -> None:
    """Raise one-line errors, as the script does."""
    script = choose_script(args)
    script.check_args(args)
    communicators.refuse_others(args, script, {"averages", "lie", "boast"})
    if communicators.exchange_of_launcher is not None:
        problem = "liars.py starts all agents itself, or under torchrun; leave out federate.py"
        communicators.stop(problem, communicators.WRONG_VALUE)


if __name__ == "__main__":
    may_change = ("eval_episodes", "total_timesteps")
    main(communicators.parse_args(Args, check_args, may_change=may_change))
