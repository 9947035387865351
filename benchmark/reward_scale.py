"""prpo_minigrid.py where every agent's rewards, and so the returns that it reports, are in units of
its own.

    python benchmark/reward_scale.py | python benchmark/run.py  # the runs behind docs/results.md
    python benchmark/reward_scale.py --scales 1 1 10 --communicator reward ...  # one of them

Everything else is `prpo_minigrid.py`, whose flags all apply. The evaluation is in the official
environments, whose units are the same for all. Without flags it prints commands, one per line.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import communicators
import prpo_minigrid

COMMAND = (
    "python benchmark/reward_scale.py --scales {scales} --communicator reward"
    " --env-ids MiniGrid-DoorKey-5x5-v0 MiniGrid-DoorKey-6x6-v0 MiniGrid-DoorKey-8x8-v0"
    " --seed {seed} --total-timesteps 150000 --learning-rate 1e-3 --kl-coef 0.5"
    " --kl-direction reverse --local-updates 4 --eval-episodes 50 --run-dir runs/reward-scale"
    " --exp-name reward-{name}"
)
SEEDS = range(1, 6)
SCALES = {"equal": "1 1 1", "easy-times-10": "10 1 1", "hard-times-10": "1 1 10"}


@dataclass
class Args(prpo_minigrid.Args):
    scales: tuple[float, ...] = ()
    """what each agent's rewards are multiplied with (empty: all 1)"""


class Envs(prpo_minigrid.Envs):
    """Environments in which an agent's rewards and returns are multiplied with its scale."""

    def __init__(self, args: Args, agents: range, checkpoint: int):
        super().__init__(args, agents, checkpoint)
        scales = args.scales or [1.0] * args.num_agents
        self.scales = np.array([scales[i] for i in agents])[:, None]  # [agents, 1]

    def step(self, actions: np.ndarray) -> tuple:
        """As there, in each agent's units."""
        rewards, *signals, episodes = super().step(actions)
        scaled_episodes = [(k, total * self.scales[k, 0], length) for k, total, length in episodes]
        return rewards * self.scales, *signals, scaled_episodes


def print_commands() -> None:
    """The runs behind docs/results.md, seeds outermost."""
    for seed in SEEDS:
        for name, scales in SCALES.items():
            print(COMMAND.format(seed=seed, name=name, scales=scales))


def check_args(args: Args) -> None:
    """Raise one-line errors, as `prpo_minigrid.py`."""
    prpo_minigrid.check_args(args)
    if args.scales and len(args.scales) != args.num_agents:
        communicators.refuse(args, "scales", f"must be {args.num_agents}, one for each agent")


def main() -> None:
    if len(sys.argv) == 1:
        print_commands()
        return
    args = communicators.parse_args(
        Args, check_args, may_change=("capture_video", "eval_episodes", "total_timesteps")
    )
    if args.eval_only:
        prpo_minigrid.evaluate_run(args)
        return
    prpo_minigrid.Envs = Envs
    prpo_minigrid.main(args)


if __name__ == "__main__":
    main()
