"""A house of rooms in words, of which one may be locked: a text world for prpo_babyai.py.

    prpo_babyai.py --env benchmark/worlds/house.py:make --base-model smollm2 --response-length 32

Some thing of the house is to be taken; where its room is locked, a key is to be found first. It
needs no download, and shows what a world of your own has to have.
"""

import random

import gymnasium as gym
from gymnasium import spaces

ROOMS = ("hall", "kitchen", "bedroom", "cellar", "attic", "garden")
THINGS = ("lamp", "book", "rope", "coin", "cup", "ring")
CATEGORIES = ("fetch", "unlock")
CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ,.()"


def make(split: str, index: int) -> gym.Env:
    """A task: split is train or test, which have no seed in common; both categories in turn."""
    seed = 2 * index + (split == "test")
    return House(CATEGORIES[index % 2], seed)


class House(gym.Env):
    """Four rooms that form a tree, with three things in them; a seed determines it all."""

    observation_space = spaces.Text(400, charset=CHARACTERS)
    action_space = spaces.Text(40, charset=CHARACTERS)

    def __init__(self, category: str, seed: int):
        self.category = category
        self.house_seed = seed

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """The first observation of this house, which no other seed changes."""
        super().reset(seed=seed)
        rng = random.Random(self.house_seed)
        rooms = rng.sample(ROOMS, 4)
        self.doors = {name: [] for name in rooms}
        for k, room in enumerate(rooms[1:], 1):
            other = rng.choice(rooms[:k])
            self.doors[room].append(other)
            self.doors[other].append(room)
        things = rng.sample(THINGS, 3)
        # The last room has one door, so that no other room is behind it
        self.places = {things[0]: rooms[-1], things[1]: rooms[0], things[2]: rng.choice(rooms[:-1])}
        self.goal = things[0]
        self.locked = set()
        if self.category == "unlock":
            self.locked = {rooms[-1]}
            self.places["key"] = rng.choice(rooms[:-1])
        self.room = rooms[0]
        self.carried = []
        return self.describe(), self.inform()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """One of the admissible actions; any other text does nothing."""
        verb, _, name = action.rpartition(" ")
        if action in self.list_actions():
            if verb == "go to":
                self.room = name
            elif verb == "take":
                del self.places[name]
                self.carried.append(name)
            else:
                self.locked.remove(name)
        success = self.goal in self.carried
        return self.describe(), 10.0 * success, success, False, self.inform()

    def describe(self) -> str:
        """The room, what is in it, where its doors lead, and what is carried."""
        things = [name for name, room in self.places.items() if room == self.room]
        doors = []
        for name in self.doors[self.room]:
            doors.append(f"{name} (locked)" if name in self.locked else name)
        seen = ", ".join(sorted(things)) or "nothing"
        carried = ", ".join(self.carried) or "nothing"
        place = f"You are in the {self.room}. You see {seen}."
        return f"{place} Doors lead to {', '.join(sorted(doors))}. You carry {carried}."

    def list_actions(self) -> list[str]:
        """The admissible actions."""
        actions = []
        for name in sorted(self.doors[self.room]):
            if name not in self.locked:
                actions.append(f"go to {name}")
            elif "key" in self.carried:
                actions.append(f"unlock {name}")
        things = [name for name, room in self.places.items() if room == self.room]
        return actions + [f"take {name}" for name in sorted(things)]

    def inform(self) -> dict:
        """What goes with every observation."""
        success = self.goal in self.carried
        return {"task": f"take the {self.goal}", "actions": self.list_actions(), "success": success}
