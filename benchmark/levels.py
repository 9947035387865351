"""MiniGrid tasks with levels of their own: private ones, unseen ones, and those of one mission.

    python prpo_minigrid.py --num-agents 2 --env-ids \\
        benchmark.levels:MultiRoom-N2-S4-16-levels-0-v0 \\
        benchmark.levels:MultiRoom-N2-S4-16-levels-1-v0 \\
        --eval-env-ids benchmark.levels:MultiRoom-N2-S4-unseen-v0

| task | levels |
| --- | --- |
| TASK-unseen-v0 | the first 100 of the list of MiniGrid-TASK-v0 |
| TASK-K-levels-B-v0 | block B of the K levels that follow: K is 1, 4, 16, 64 or 256, B 0 to 31 |
| TASK-WORD-v0 | every level with this word in its mission (MISSIONS has tasks and words) |

The list of a task has its *different* layouts, in the order in which the seeds 0, 1, ... show them:
many seeds show the same one. Blocks of equal K are disjoint, and no level of a block is unseen.
`reset(seed=s)` plays level s mod K, `reset()` one at random.
"""

import functools

import gymnasium as gym
import minigrid  # noqa: F401 - registers its tasks
import numpy as np
from gymnasium.envs.registration import EnvSpec

UNSEEN = 100
# Few, because gymnasium looks through all registered names whenever it makes an environment
SIZES = (1, 4, 16, 64, 256)
BLOCKS = 32
# Task -> words of its missions
MISSIONS = {
    "Fetch-5x5-N2": ("key", "ball"),
    "Fetch-6x6-N2": ("key", "ball"),
    "Fetch-8x8-N3": ("key", "ball"),
    "GoToObject-6x6-N2": ("key", "ball", "box"),
    "GoToObject-8x8-N2": ("key", "ball", "box"),
}
# Seeds in a row without a new layout after which a task is taken to have no more
PATIENCE = 2000


def read_layout(env: gym.Env) -> tuple:
    """What distinguishes the present level, just reset, from others."""
    level = env.unwrapped
    cells = level.grid.encode().tobytes()
    return level.grid.width, cells, tuple(level.agent_pos), level.agent_dir, level.mission


class Layouts:
    """The numbered list of a task's different layouts, found as far as it is needed."""

    def __init__(self, env_id: str):
        self.env_id = env_id
        self.env = gym.make(env_id, disable_env_checker=True)
        self.seeds = []  # of each layout the first
        self.known = set()
        self.next_seed = 0

    def find_seeds(self, first: int, number: int) -> list[int]:
        """The seeds of `number` layouts from number `first`. Raises ValueError for too few."""
        while len(self.seeds) < first + number:
            last = self.seeds[-1] if self.seeds else 0
            if self.next_seed - last > PATIENCE:
                needed = f"layouts {first} to {first + number - 1} are needed"
                raise ValueError(f"{self.env_id} has {len(self.seeds)} different layouts; {needed}")
            self.env.reset(seed=self.next_seed)
            layout = read_layout(self.env)
            if layout not in self.known:
                self.known.add(layout)
                self.seeds.append(self.next_seed)
            self.next_seed += 1
        return self.seeds[first : first + number]


list_layouts = functools.cache(Layouts)  # one list of each task in a process


class Levels(gym.Wrapper):
    """Every episode is one of these levels, given by their seeds."""

    def __init__(self, env: gym.Env, levels: list[int]):
        super().__init__(env)
        self.levels = levels
        self.generator = np.random.default_rng()

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """Play level `seed` mod their number, without a seed one at random."""
        if seed is None:
            number = self.generator.integers(len(self.levels))
        else:
            self.generator = np.random.default_rng(seed)
            number = seed % len(self.levels)
        return self.env.reset(seed=self.levels[number], options=options)


class Mission(gym.Wrapper):
    """Every episode is a level whose mission has a word."""

    def __init__(self, env: gym.Env, word: str):
        super().__init__(env)
        self.word = word
        self.generator = np.random.default_rng()

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """Play levels' first moments until a mission has the word."""
        if seed is not None:
            self.generator = np.random.default_rng(seed)
        while True:
            level = int(self.generator.integers(2**31))
            obs, info = self.env.reset(seed=level, options=options)
            if self.word in self.env.unwrapped.mission:
                return obs, info


def make_task(env_id: str, options: dict) -> gym.Env:
    """One environment of MiniGrid, by its specification, for which no names are looked through."""
    return gym.make(gym.registry[env_id], disable_env_checker=True, **options)


def make_levels(env_id: str, first: int, number: int, **options) -> gym.Env:
    """A task with some levels of its list."""
    levels = list_layouts(env_id).find_seeds(first, number)
    return Levels(make_task(env_id, options), levels)


def make_mission(env_id: str, word: str, **options) -> gym.Env:
    """A task with the levels of one kind of mission."""
    return Mission(make_task(env_id, options), word)


def register_levels(env_id: str, name: str) -> None:
    """Register unseen levels and blocks of a task under names that begin with `name`."""
    blocks = {f"{name}-unseen-v0": (0, UNSEEN)}
    for size in SIZES:
        for block in range(BLOCKS):
            blocks[f"{name}-{size}-levels-{block}-v0"] = (UNSEEN + block * size, size)
    for new_id, (first, number) in blocks.items():
        kwargs = {"env_id": env_id, "first": first, "number": number}
        # Not by gym.register, which looks through all names for each of these thousands
        gym.registry[new_id] = EnvSpec(new_id, make_levels, kwargs=kwargs)


for env_id in list(gym.registry):
    if env_id.startswith("MiniGrid-"):
        register_levels(env_id, env_id.removeprefix("MiniGrid-").removesuffix("-v0"))
for name, words in MISSIONS.items():
    for word in words:
        kwargs = {"env_id": f"MiniGrid-{name}-v0", "word": word}
        gym.register(f"{name}-{word}-v0", make_mission, kwargs=kwargs)
