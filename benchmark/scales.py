"""MiniGrid's DoorKey tasks whose rewards, and so an agent's returns, are in larger units.

    python prpo_minigrid.py --communicator reward --env-ids MiniGrid-DoorKey-5x5-v0 \\
        MiniGrid-DoorKey-6x6-v0 benchmark.scales:DoorKey-8x8-times-10-v0
"""

import functools

import gymnasium as gym

FACTOR = 10


class Scaled(gym.RewardWrapper):
    """A task with every reward times FACTOR."""

    def reward(self, reward: float) -> float:
        """A scaled reward."""
        return FACTOR * reward


def make(size: int, **options) -> gym.Env:
    """DoorKey with scaled rewards."""
    env = gym.make(f"MiniGrid-DoorKey-{size}x{size}-v0", disable_env_checker=True, **options)
    return Scaled(env)


for side in (5, 6, 8):
    gym.register(f"DoorKey-{side}x{side}-times-{FACTOR}-v0", functools.partial(make, side))
