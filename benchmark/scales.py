"""MiniGrid's DoorKey tasks whose rewards, and so an agent's returns, are in larger units.

    python prpo_minigrid.py --communicator reward --env-ids MiniGrid-DoorKey-5x5-v0 \\
        MiniGrid-DoorKey-6x6-v0 benchmark.scales:DoorKey-8x8-times-10-v0
"""

import functools

import gymnasium as gym
from gymnasium.wrappers import TransformReward

FACTOR = 10


def make(size: int, **options) -> gym.Env:
    """DoorKey with every reward times FACTOR."""
    env = gym.make(f"MiniGrid-DoorKey-{size}x{size}-v0", disable_env_checker=True, **options)
    return TransformReward(env, lambda reward: FACTOR * reward)


for side in (5, 6, 8):
    gym.register(f"DoorKey-{side}x{side}-times-{FACTOR}-v0", functools.partial(make, side))
