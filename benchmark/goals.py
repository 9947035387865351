"""MiniGrid tasks of agents that share skills and have goals of their own.

All agents see the same levels in the same way; what differs is which of two goals an agent is paid
for. An episode ends at either.

    python prpo_minigrid.py --num-agents 2 --env-ids \\
        benchmark.goals:DoorKeyGoals-5x5-green-v0 benchmark.goals:DoorKeyGoals-5x5-blue-v0

| task | what is common | what is the agent's own |
| --- | --- | --- |
| DoorKeyGoals-SIZE-COLOUR-v0 | key and door | the goal: green (lower corner) or blue (upper one) |
| DoorKeyGoals-SIZE-COLOUR-PERCENT-v0 | also the goal, in PERCENT of the levels | as above |
| UnlockGoals-SIZE-OBJECT-v0 | key and door | the object to pick up: ball or box |

Two tasks are parts of DoorKeyGoals, on the same levels: KeyDoor-SIZE-v0 pays for opening the door
and ends there, BehindDoor-SIZE-v0 begins behind the open door and pays for either goal.
"""

import functools

import gymnasium as gym
import numpy as np
from minigrid.core.constants import COLOR_TO_IDX, OBJECT_TO_IDX, STATE_TO_IDX
from minigrid.core.grid import Grid
from minigrid.core.mission import MissionSpace
from minigrid.core.world_object import Ball, Box, Door, Goal, Key, Wall
from minigrid.minigrid_env import MiniGridEnv

VIEW = 7  # cells, the side of what an agent sees
EMPTY = (OBJECT_TO_IDX["empty"], 0, 0)
WALL = (OBJECT_TO_IDX["wall"], COLOR_TO_IDX["grey"], 0)
# np.rot90(view, -1 - direction), which alone takes a third of a step
TURNS = (
    lambda view: view.transpose(1, 0, 2)[:, ::-1],
    lambda view: view[::-1, ::-1],
    lambda view: view.transpose(1, 0, 2)[::-1],
    lambda view: view,
)


@functools.cache
def find_visible(opaque: bytes) -> np.ndarray:
    """Which cells of a view are seen, bool [7, 7, 1]; opaque: bytes of bool [7, 7]."""
    grid = Grid(VIEW, VIEW)
    for i, j in np.argwhere(np.frombuffer(opaque, dtype=bool).reshape(VIEW, VIEW)):
        grid.set(i, j, Wall())
    return grid.process_vis(agent_pos=(VIEW // 2, VIEW - 1))[..., None]


class TwoGoals(MiniGridEnv):
    """MiniGrid's environment with a faster view: cells are encoded when they change.

    A subclass makes its level in `make_level`.
    """

    def __init__(self, size: int, mission: str, **options):
        super().__init__(
            mission_space=MissionSpace(mission_func=lambda: mission),
            grid_size=size,
            max_steps=10 * size**2,
            agent_view_size=VIEW,
            **options,
        )
        self.mission = mission

    def make_level(self, width: int, height: int) -> None:
        """Set `grid` and the agent's place."""
        raise NotImplementedError

    def _gen_grid(self, width: int, height: int) -> None:
        self.make_level(width, height)
        # Beyond the grid a view shows walls
        self.codes = np.full((width + 2 * VIEW, height + 2 * VIEW, 3), WALL, dtype=np.uint8)
        self.codes[VIEW:-VIEW, VIEW:-VIEW] = self.grid.encode()

    def gen_obs(self) -> dict:
        """The observation of MiniGridEnv."""
        # An action changes no cell but the one in front
        i, j = self.front_pos
        cell = self.grid.get(i, j)
        self.codes[i + VIEW, j + VIEW] = cell.encode() if cell else EMPTY

        left, top, _, _ = self.get_view_exts()
        view = self.codes[left + VIEW : left + 2 * VIEW, top + VIEW : top + 2 * VIEW]
        view = TURNS[self.agent_dir](view)
        kind = view[..., 0]
        closed = (kind == OBJECT_TO_IDX["door"]) & (view[..., 2] != STATE_TO_IDX["open"])
        opaque = (kind == OBJECT_TO_IDX["wall"]) | closed
        image = view * find_visible(opaque.tobytes())
        # The agent sees what it carries at its own place
        image[VIEW // 2, VIEW - 1] = self.carrying.encode() if self.carrying else EMPTY
        return {"image": image, "direction": self.agent_dir, "mission": self.mission}

    def make_rooms(self, width: int, height: int) -> tuple[int, int]:
        """A room with the agent and a key, and another one behind a locked door.

        The door is in the rows 2 to height - 3, so that it is beside no corner. Returns its column,
        that of the wall between the rooms, and its row.
        """
        self.grid = Grid(width, height)
        self.grid.wall_rect(0, 0, width, height)
        column = self._rand_int(2, width - 2)
        self.grid.vert_wall(column, 0)
        row = self._rand_int(2, height - 2)
        self.door = Door("yellow", is_locked=True)
        self.key = Key("yellow")
        self.put_obj(self.door, column, row)
        self.place_obj(self.key, top=(0, 0), size=(column, height))
        self.place_agent(size=(column, height))
        return column, row


class DoorKeyGoals(TwoGoals):
    """DoorKey with a green goal in the lower right corner and a blue one in the upper right.

    goals: the colours of the goals that pay. agreement: the share of levels where agents of both
    colours want the same: these levels have one purple goal, in a corner drawn at random.
    """

    def __init__(self, size: int, goals: tuple[str, ...], agreement: float = 0.0, **options):
        self.goals = goals
        self.agreement = agreement
        super().__init__(size, "use the key to open the door and then get to your goal", **options)

    def make_level(self, width: int, height: int) -> None:
        corners = {"green": (width - 2, height - 2), "blue": (width - 2, 1)}
        agrees = self.np_random.random() < self.agreement
        only = self._rand_elem(sorted(corners))
        self.make_rooms(width, height)
        for colour, corner in corners.items():
            if not agrees:
                self.put_obj(Goal(), *corner)
                self.grid.get(*corner).color = colour
            elif colour == only:
                self.put_obj(Goal(), *corner)
                self.grid.get(*corner).color = "purple"

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        if terminated:
            reached = self.grid.get(*self.agent_pos).color
            reward *= reached in (*self.goals, "purple")
        return obs, reward, terminated, truncated, info


class KeyDoor(DoorKeyGoals):
    """The levels of DoorKeyGoals up to the door: opening it pays and ends the episode."""

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        if self.door.is_open:
            terminated = True
            reward = self._reward()
        return obs, reward, terminated, truncated, info


class BehindDoor(DoorKeyGoals):
    """The levels of DoorKeyGoals from the door on: the agent begins somewhere in the second room.

    It holds the key and the door is open, as for an agent that has come through it.
    """

    def make_level(self, width: int, height: int) -> None:
        super().make_level(width, height)
        self.grid.set(*self.key.cur_pos, None)
        self.door.is_locked = False
        self.door.is_open = True
        column, _ = self.door.cur_pos
        self.place_agent(top=(column + 1, 0), size=(width - column - 1, height))

    def reset(self, *, seed=None, options=None):
        _, info = super().reset(seed=seed, options=options)
        self.carrying = self.key
        self.key.cur_pos = np.array([-1, -1])  # as MiniGrid's step does
        return self.gen_obs(), info


class UnlockGoals(TwoGoals):
    """Two rooms with a locked door, a ball and a box in the second; one of them pays.

    goal: "ball" or "box". The episode ends when either is picked up, which needs free hands: the
    key has to be dropped. Colours are drawn at random and have no meaning.
    """

    def __init__(self, size: int, goal: str, **options):
        self.goal = goal
        super().__init__(size, "unlock the door and pick up your object", **options)

    def make_level(self, width: int, height: int) -> None:
        door = self.make_rooms(width, height)
        column, _ = door
        room = {"top": (column + 1, 0), "size": (width - column - 1, height)}
        places = []
        while not self.are_reachable(places, door):
            for place in places:
                self.grid.set(*place, None)
            places = [self.place_obj(kind(self._rand_color()), **room) for kind in (Ball, Box)]

    def are_reachable(self, places: list[tuple[int, int]], door: tuple[int, int]) -> bool:
        """Whether each of these places, not empty, is beside a cell that the door leads to."""
        reached = {door}
        waiting = [door]
        beside = set()
        while waiting:
            i, j = waiting.pop()
            for cell in ((i + 1, j), (i - 1, j), (i, j + 1), (i, j - 1)):
                beside.add(cell)
                if cell[0] > door[0] and cell not in reached and self.grid.get(*cell) is None:
                    reached.add(cell)
                    waiting.append(cell)
        return bool(places) and beside.issuperset(places)

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        if self.carrying is not None and self.carrying.type != "key":
            terminated = True
            if self.carrying.type == self.goal:
                reward = self._reward()
        return obs, reward, terminated, truncated, info


def register() -> None:
    """Make the tasks known to Gymnasium."""
    for size in (5, 6, 8):
        for colour in ("green", "blue"):
            options = {"size": size, "goals": (colour,)}
            name = f"DoorKeyGoals-{size}x{size}-{colour}"
            gym.register(f"{name}-v0", DoorKeyGoals, kwargs=options)
            for percent in (25, 50, 75, 100):
                agreement = {"agreement": percent / 100}
                gym.register(f"{name}-{percent}-v0", DoorKeyGoals, kwargs=options | agreement)
        for kind in ("ball", "box"):
            options = {"size": size, "goal": kind}
            gym.register(f"UnlockGoals-{size}x{size}-{kind}-v0", UnlockGoals, kwargs=options)
        options = {"size": size, "goals": ("green", "blue")}
        gym.register(f"KeyDoor-{size}x{size}-v0", KeyDoor, kwargs=options)
        gym.register(f"BehindDoor-{size}x{size}-v0", BehindDoor, kwargs=options)


register()
