"""prpo_minigrid.py where every agent's rewards, and so the returns that it reports, are in units of
its own.

    python benchmark/reward_scale.py | python benchmark/run.py  # the runs behind docs/results.md
    REWARD_SCALES="1 1 10" python benchmark/reward_scale.py --communicator reward ...  # one of them

REWARD_SCALES are what the agents' rewards are multiplied with, all 1 where it is left out. The
evaluation is in the official environments, whose units are the same for all. Without flags it
prints commands, one per line.
"""

import os
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import communicators
import prpo_minigrid

COMMAND = (
    "REWARD_SCALES='{scales}' python benchmark/reward_scale.py --communicator {communicator}"
    " --env-ids MiniGrid-DoorKey-5x5-v0 MiniGrid-DoorKey-6x6-v0 MiniGrid-DoorKey-8x8-v0"
    " --seed {seed} --total-timesteps 150000 --learning-rate 1e-3 --kl-coef 0.5"
    " --kl-direction reverse --local-updates 4 --eval-episodes 50 --run-dir runs/reward-scale"
    " --exp-name {communicator}-{name}"
)
SEEDS = range(1, 6)
SCALES = {"equal": "1 1 1", "easy-times-10": "10 1 1", "hard-times-10": "1 1 10"}
COMMUNICATORS = ("reward", "relative-gain")


class Envs(prpo_minigrid.Envs):
    """Environments in which agent i's rewards and returns are multiplied with the i-th of
    REWARD_SCALES.
    """

    def __init__(self, args: prpo_minigrid.Args, agents: range, checkpoint: int):
        super().__init__(args, agents, checkpoint)
        scales = os.environ.get("REWARD_SCALES", "1 " * args.num_agents)
        self.scales = np.array(scales.split(), dtype=float)[agents]

    def receive(self, number: int) -> tuple:
        """As there, in the agents' units."""
        rewards, *signals, episodes = super().receive(number)
        scaled_rewards = rewards * self.scales[self.groups[number], None]
        scaled_episodes = [(k, total * self.scales[k], length) for k, total, length in episodes]
        return scaled_rewards, *signals, scaled_episodes


def print_commands() -> None:
    """The runs behind docs/results.md, seeds outermost."""
    for seed in SEEDS:
        for name, scales in SCALES.items():
            for communicator in COMMUNICATORS:
                values = {"seed": seed, "name": name, "scales": scales}
                print(COMMAND.format(communicator=communicator, **values))


def main() -> None:
    if len(sys.argv) == 1:
        print_commands()
        return
    args = communicators.parse_args(prpo_minigrid.Args, prpo_minigrid.check_args)
    if args.eval_only:
        prpo_minigrid.evaluate_run(args)
        return
    prpo_minigrid.Envs = Envs
    prpo_minigrid.main(args)


if __name__ == "__main__":
    main()
