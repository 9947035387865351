"""ALFWorld's text games for prpo_babyai.py: the world of the FedAgent paper.

    pip install alfworld==0.4.2 && alfworld-download
    python prpo_babyai.py --env benchmark/worlds/alfworld.py:make --max-turns 50

The package and its data are not installed here: it has been written to its interface, and only the
message without it is tested.
"""

import functools
import importlib.util
import json
import os
import random
from pathlib import Path

import gymnasium as gym
from gymnasium import spaces

CHARACTERS = "".join(map(chr, (*range(32, 127), 10)))
FOLDERS = {"train": "train", "test": "valid_seen"}
# The beginning of a game's folder -> the paper's name of the category
CATEGORIES = {
    "pick_and_place_simple": "Pick",
    "look_at_obj_in_light": "Look",
    "pick_clean_then_place_in_recep": "Clean",
    "pick_heat_then_place_in_recep": "Heat",
    "pick_cool_then_place_in_recep": "Cool",
    "pick_two_obj_and_place": "Pick2",
}


@functools.cache
def list_games(split: str) -> list[Path]:
    """The solvable games of a split.

    Their order mixes the categories, because --tasks takes the first.
    """
    if not importlib.util.find_spec("alfworld"):
        raise ImportError("ALFWorld is not installed: pip install alfworld, then alfworld-download")
    data = Path(os.environ.get("ALFWORLD_DATA", Path.home() / ".cache" / "alfworld"))
    folder = data / "json_2.1.1" / FOLDERS[split]
    games = []
    for path in sorted(folder.glob("*/*/game.tw-pddl")):
        name = path.parent.parent.name
        if name.split("-")[0] not in CATEGORIES or "Sliced" in name:
            continue
        if json.loads(path.read_text()).get("solvable", True):
            games.append(path)
    if not games:
        raise FileNotFoundError(f"{folder} has no games: alfworld-download, or set ALFWORLD_DATA")
    random.Random(0).shuffle(games)
    return games


def make(split: str, index: int) -> gym.Env:
    """A game: split is train or test (ALFWorld's valid_seen)."""
    return Game(list_games(split)[index])


class Game(gym.Env):
    """A game of ALFWorld, with its admissible commands."""

    observation_space = spaces.Text(20_000, charset=CHARACTERS)
    action_space = spaces.Text(200, charset=CHARACTERS)

    def __init__(self, path: Path):
        self.path = path
        self.category = CATEGORIES[path.parent.parent.name.split("-")[0]]
        self.game = None

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """The first observation, without the task, which is in `info`."""
        super().reset(seed=seed)
        textworld = importlib.import_module("textworld")
        wrappers = importlib.import_module("alfworld.agents.environment.alfred_tw_env")
        infos = textworld.EnvInfos(won=True, admissible_commands=True)
        demangler = wrappers.AlfredDemangler(shuffle=False)
        self.game = textworld.start(str(self.path), infos, wrappers=[demangler])
        state = self.game.reset()
        text, _, task = state.feedback.partition("Your task is to:")
        self.task = task.strip()
        return self.tidy(text), self.inform(state)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """One command; the reward is 10 for success."""
        state, _, done = self.game.step(action)
        info = self.inform(state)
        reward = 10.0 * info["success"]
        return self.tidy(state.feedback), reward, bool(done), False, info

    def close(self) -> None:
        """Free the planner: every game loads a copy of its library."""
        if self.game is not None:
            fast_downward = importlib.import_module("fast_downward")
            fast_downward.close_lib(self.game.unwrapped.downward_lib)
            self.game = None

    def inform(self, state) -> dict:
        """What goes with every observation."""
        actions = [command for command in state.admissible_commands if command != "help"]
        return {"task": self.task, "actions": actions, "success": bool(state.won)}

    @staticmethod
    def tidy(text: str) -> str:
        """A text without its banner."""
        return text.replace("-= Welcome to TextWorld, ALFRED! =-", "").strip()
