"""Tasks that pool those of several agents, for one agent that has what they would share: all data.

    python prpo_minigrid.py --num-agents 1 --env-id benchmark.pooled:DoorKey-5x5-6x6-8x8-v0 \\
        --eval-env-ids MiniGrid-DoorKey-5x5-v0 MiniGrid-DoorKey-6x6-v0 MiniGrid-DoorKey-8x8-v0

With the steps of all three agents: --total-timesteps 750000. The task of every episode is drawn at
random, so that tasks with long episodes take more of the steps.

Goals of agents differ in DoorKeyGoals and UnlockGoals, and an observation does not show whose goal
pays. Each goal pays in half of the episodes, and so no policy is paid in more than that on average.
"""

import functools

import gymnasium as gym
import minigrid  # noqa: F401 - registers its tasks
import numpy as np

# Pool -> the tasks of its agents
POOLS = {
    "DoorKey-5x5-6x6-8x8-v0": tuple(f"MiniGrid-DoorKey-{size}x{size}-v0" for size in (5, 6, 8)),
    # Those of goals.sh and unlock_goals.sh
    "DoorKeyGoals-v0": tuple(
        f"benchmark.goals:DoorKeyGoals-{size}x{size}-{goal}-v0"
        for goal in ("green", "blue")
        for size in (5, 8)
    ),
    "UnlockGoals-v0": tuple(
        f"benchmark.goals:UnlockGoals-{size}x{size}-{goal}-v0"
        for goal in ("ball", "box")
        for size in (5, 6)
    ),
}


class Pooled(gym.Wrapper):
    """Every episode is one of some tasks, in its own level, with its own rewards and steps."""

    def __init__(self, tasks: list[gym.Env]):
        super().__init__(tasks[0])
        self.tasks = tasks
        self.generator = np.random.default_rng()

    @property
    def spec(self):
        """That of the pool, which gymnasium gives the first task."""
        return self.tasks[0].spec

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """Draw a task and play its level `seed`, without a seed one at random."""
        level = seed
        if seed is None:
            level = int(self.generator.integers(2**31))
        else:
            # Not by the seed alone, which is that of the level's own draws
            self.generator = np.random.default_rng((seed, 1))
        self.env = self.tasks[self.generator.integers(len(self.tasks))]
        return self.env.reset(seed=level, options=options)

    def close(self) -> None:
        """Close all tasks."""
        for task in self.tasks:
            task.close()


def make(env_ids: tuple[str, ...], **options) -> gym.Env:
    """The pool of these tasks."""
    return Pooled([gym.make(env_id, disable_env_checker=True, **options) for env_id in env_ids])


for pool_id, task_ids in POOLS.items():
    gym.register(pool_id, functools.partial(make, task_ids))
