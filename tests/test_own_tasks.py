"""Tasks of one's own, as module:id."""

import dataclasses
import itertools
import re
import sys

import gymnasium as gym
import imageio_ffmpeg
import numpy as np
import pytest
import torch
from helpers import (
    PRPO_ATARI,
    PRPO_MINIGRID,
    PRPO_MUJOCO,
    PRTRPO_MINIGRID,
    REPOSITORY,
    SLOW_FEDAVG_MUJOCO,
    flags,
    on,
    only_run,
    refusal,
    rows_of,
)

import prpo_minigrid
from benchmark import play

MINIGRID_SCRIPTS = on([PRPO_MINIGRID, PRTRPO_MINIGRID])


def read_example(page):
    """The tasks of one's own of a page in docs."""
    text = (REPOSITORY / "docs" / page).read_text()
    return re.search(r"```python\n(import gymnasium.*?)```", text, re.S)[1]


EXAMPLE = read_example("prpo_minigrid.md")
BODIES = read_example("prpo_mujoco.md")
# Its own reward: every step costs
FRUGAL_TASK = """
from minigrid.envs import DoorKeyEnv


class FrugalDoorKey(DoorKeyEnv):
    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward - 0.001, terminated, truncated, info


gym.register("FrugalDoorKey-v0", FrugalDoorKey, kwargs={"size": 5})
"""
OTHER_TASKS = """
import gymnasium as gym
import numpy as np
from minigrid.envs import DoorKeyEnv
from minigrid.wrappers import ImgObsWrapper, RGBImgPartialObsWrapper


# Shows codes only: no grid, no mission, no images
class Bare(gym.Env):
    observation_space = gym.spaces.Box(0, 10, (7, 7, 3), np.uint8)
    action_space = gym.spaces.Discrete(7)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.full((7, 7, 3), 1, np.uint8), {}

    def step(self, action):
        self.time += 1
        codes = np.full((7, 7, 3), self.time % 10, np.uint8)
        return codes, float(action == 3), False, self.time == 9, {}


# A game of nine steps, in which the action whose number is that of the brightness scores
class Frames(gym.Env):
    observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = gym.spaces.Discrete(4)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def frames(self):
        return np.full((4, 84, 84), 60 * (self.time % 4), np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = int(self.np_random.integers(4))
        self.count = 0
        return self.frames(), {"lives": 2}

    def step(self, action):
        reward = 7.0 * (action == self.time % 4)
        self.time += 1
        self.count += 1
        return self.frames(), reward, self.count == 9, False, {"lives": 2 - self.count // 5}

    def render(self):
        return np.full((40, 60, 3), self.time, np.uint8)


class Three(Frames):
    action_space = gym.spaces.Discrete(3)


# Codes and a game that never end; the error is that of a test, which would wait for them
class Endless(Bare):
    def step(self, action):
        assert self.time < 100
        return *super().step(action)[:3], False, {}


class EndlessFrames(Frames):
    def step(self, action):
        assert self.count < 100
        obs, reward, *_, info = super().step(action)
        return obs, reward, False, False, info


# Rewards of shape (1,), which some tasks have, and an info that grows, at another time in each
# environment; the same without these
class Varied(Bare):
    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        self.time = int(self.np_random.integers(9))
        return obs, info


class Odd(Varied):
    def reset(self, **options):
        obs, _ = super().reset(**options)
        return obs, {"path": np.zeros(self.time)}

    def step(self, action):
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, np.array([reward]), terminated, truncated, {"path": np.zeros(self.time)}


class OddFrames(Frames):
    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, np.array([reward]), terminated, truncated, info | {"path": np.zeros(self.time)}


class Pair(Bare):
    def step(self, action):
        obs, reward, *more = super().step(action)
        return obs, np.array([reward, reward]), *more


class PairOfFrames(Frames):
    def step(self, action):
        obs, reward, *more = super().step(action)
        return obs, np.array([reward, reward]), *more


class Unpaid(Bare):
    def step(self, action):
        obs, _, *more = super().step(action)
        return obs, None, *more


class UnpaidFrames(Frames):
    def step(self, action):
        obs, _, *more = super().step(action)
        return obs, None, *more


# Rewards that are no numbers, but for the first, which a start sees
class Undefined(Bare):
    def step(self, action):
        obs, reward, *more = super().step(action)
        return obs, reward if self.time == 1 else np.nan, *more


class UndefinedFrames(Frames):
    def step(self, action):
        obs, reward, *more = super().step(action)
        return obs, reward if self.count == 1 else np.nan, *more


# As environments stepped long ago
class Old(Bare):
    def step(self, action):
        return super().step(action)[:4]


# After a step they show other numbers than after a reset
class Changing(Bare):
    def step(self, action):
        obs, *more = super().step(action)
        return obs.astype(np.float64), *more


class UndeclaredFrames(Frames):
    observation_space = gym.spaces.Box(0, 255, (4, 84, 84))


class ChangingFrames(Frames):
    def step(self, action):
        obs, *more = super().step(action)
        return obs.astype(np.float64), *more


# A point of nine steps, pushed on a plane; what pays is the first push, which has other bounds
# than the second
class Point(gym.Env):
    observation_space = gym.spaces.Box(-9, 9, (2,), np.float64)
    action_space = gym.spaces.Box(np.array([-1.0, 0.0]), np.array([0.5, 2.0]), dtype=np.float64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = int(self.np_random.integers(5))
        self.place = self.np_random.uniform(-1, 1, 2)
        return self.place.copy(), {}

    def step(self, action):
        assert self.action_space.contains(np.asarray(action, np.float64)), action
        self.time += 1
        self.place = np.clip(self.place + action, -9, 9)
        return self.place.copy(), float(action[0]), False, self.time >= 9, {}


class OddPoint(Point):
    def step(self, action):
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, np.array([reward]), terminated, truncated, {"path": np.zeros(self.time)}


class PairOfPoints(Point):
    def step(self, action):
        obs, reward, *more = super().step(action)
        return obs, np.array([reward, reward]), *more


class UndefinedPoint(Point):
    def step(self, action):
        obs, reward, *more = super().step(action)
        return obs, np.nan, *more


class OldPoint(Point):
    def step(self, action):
        return super().step(action)[:4]


class ChangingPoint(Point):
    def step(self, action):
        obs, *more = super().step(action)
        return np.append(obs, 0.0), *more


class EndlessPoint(Point):
    def step(self, action):
        assert self.time < 100
        return *super().step(action)[:3], False, {}


class NamedPoint(Point):
    observation_space = gym.spaces.Dict({"place": Point.observation_space})


class SquarePoint(Point):
    observation_space = gym.spaces.Box(np.arange(60.0).reshape(6, 10), np.full((6, 10), 99.0))


class FreePoint(Point):
    action_space = gym.spaces.Box(-np.inf, np.inf, (2,))


class HalfFreePoint(Point):
    action_space = gym.spaces.Box(-np.arange(40.0) - 1, np.full(40, np.inf))


class SteppedPoint(Point):
    action_space = gym.spaces.MultiDiscrete([3, 3])


class WholePoint(Point):
    action_space = gym.spaces.Box(-2, 2, (2,), np.int64)


class OtherPoint(Point):
    observation_space = gym.spaces.Box(-9, 9, (3,))


gym.register("Point-v0", Point)
gym.register("OddPoint-v0", OddPoint)
gym.register("PairOfPoints-v0", PairOfPoints)
gym.register("OldPoint-v0", OldPoint)
gym.register("EndlessPoint-v0", EndlessPoint)
gym.register("NamedPoint-v0", NamedPoint)
gym.register("SquarePoint-v0", SquarePoint)
gym.register("FreePoint-v0", FreePoint)
gym.register("HalfFreePoint-v0", HalfFreePoint)
gym.register("SteppedPoint-v0", SteppedPoint)
gym.register("WholePoint-v0", WholePoint)
gym.register("OtherPoint-v0", OtherPoint)
gym.register("Varied-v0", Varied)
gym.register("Odd-v0", Odd)
gym.register("OddFrames-v0", OddFrames)
gym.register("Pair-v0", Pair)
gym.register("PairOfFrames-v0", PairOfFrames)
gym.register("Undefined-v0", Undefined)
gym.register("UndefinedFrames-v0", UndefinedFrames)
gym.register("UndefinedPoint-v0", UndefinedPoint)
gym.register("Unpaid-v0", Unpaid)
gym.register("UnpaidFrames-v0", UnpaidFrames)
gym.register("Old-v0", Old)
gym.register("Changing-v0", Changing)
gym.register("ChangingFrames-v0", ChangingFrames)
gym.register("UndeclaredFrames-v0", UndeclaredFrames)
gym.register("ChangingPoint-v0", ChangingPoint)
gym.register("Endless-v0", Endless)
gym.register("EndlessFrames-v0", EndlessFrames)
gym.register("Frames-v0", Frames)
gym.register("Three-v0", Three)
gym.register("Bare-v0", Bare)
gym.register("Pixels-v0", lambda **more: RGBImgPartialObsWrapper(DoorKeyEnv(size=5, **more)))
gym.register("MiniGrid-Mine-v0", Bare)
"""
FRUGAL = "my_tasks:FrugalDoorKey-v0"
DOOR_KEY = "MiniGrid-DoorKey-5x5-v0"


@pytest.fixture
def my_tasks(tmp_path, monkeypatch):
    """The folder of modules with the pages' examples, and of one with tasks that cannot be used."""
    (tmp_path / "my_tasks.py").write_text(EXAMPLE + FRUGAL_TASK)
    (tmp_path / "my_bodies.py").write_text(BODIES)
    (tmp_path / "my_other_tasks.py").write_text(OTHER_TASKS)
    (tmp_path / "my_copies.py").write_text("import my_tasks\n")
    (tmp_path / "my_broken_tasks.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(gym.envs.registration, "registry", dict(gym.envs.registration.registry))
    yield tmp_path
    for name in ("my_tasks", "my_bodies", "my_other_tasks", "my_copies", "my_broken_tasks"):
        sys.modules.pop(name, None)


def test_the_page_s_example_is_learned(my_tasks, tmp_path):
    """Beside one of MiniGrid's tasks; a return is 0 or 1."""
    assert 20 <= len(EXAMPLE.splitlines()) <= 26
    changes = {"num_agents": 2, "iterations": 6, "num_steps": 1024, "eval_episodes": 5}
    args = flags(PRPO_MINIGRID, tmp_path / "runs", **changes)
    args += ["--env-ids", "my_tasks:Corridor-v0", DOOR_KEY]
    summary = PRPO_MINIGRID.main(PRPO_MINIGRID.parse_args(args))
    returns = [float(row["episodic_return"]) for row in rows_of(only_run(tmp_path / "runs"))]
    assert 0 < returns[0] < returns[-2] <= 1
    assert 0.8 < summary["evaluation"]["agents"][0]["Corridor-v0"]["mean"] <= 1


def test_a_task_with_another_reward_trains_resumes_and_plays(my_tasks, tmp_path):
    """One agent's task has another reward than its peer's.

    Names are logged without the module, and only that agent's returns contain the costs.
    """
    changes = {
        "num_agents": 2,
        "iterations": 1,
        "num_steps": 256,
        "communicator": "uniform",
        "local_updates": 1,
        "save_every": 1,
        "eval_episodes": 1,
    }
    args = flags(PRPO_MINIGRID, tmp_path / "runs", **changes)
    args += ["--env-ids", FRUGAL, DOOR_KEY]
    PRPO_MINIGRID.main(PRPO_MINIGRID.parse_args(args))
    folder = only_run(tmp_path / "runs")
    assert folder.name.startswith(f"FrugalDoorKey-v0+{DOOR_KEY}__")
    assert [row["env_id"] for row in rows_of(folder)] == ["FrugalDoorKey-v0", DOOR_KEY]
    longer = ["--resume", str(folder), "--total-timesteps", str(2 * 512)]
    summary = PRPO_MINIGRID.main(PRPO_MINIGRID.parse_args(longer))
    assert summary["env_backend"] == "gymnasium"
    assert summary["iterations"] == 2
    names = [list(row) for row in summary["evaluation"]["agents"]]
    assert names == [["FrugalDoorKey-v0", DOOR_KEY]] * 2
    # After the time limit of 250 steps the costs are 0.25; elsewhere no return is below 0
    returns = np.array([float(row["episodic_return"]) for row in rows_of(folder)]).reshape(2, 2)
    assert np.nanmin(returns[:, 0]) == pytest.approx(-0.25)
    assert np.nanmin(returns[:, 1:]) >= 0

    given = play.Args(str(folder), env_id=(FRUGAL,), greedy=True, episodes=1)
    results = play.main(given)
    assert [list(row) for row in results.values()] == [["FrugalDoorKey-v0"]] * 2


def test_observations_have_the_type_of_the_block(monkeypatch):
    """Which a copy of the script may change; a cast that is safe would end later."""
    space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    monkeypatch.setattr(prpo_minigrid, "OBSERVATIONS", space)
    assert not prpo_minigrid.find_obs_problem(np.zeros(4, np.float32))
    for dtype in ("uint8", "int16", "float16"):
        assert f"(float32), but 4 ({dtype});" in prpo_minigrid.find_obs_problem(np.zeros(4, dtype))


@MINIGRID_SCRIPTS
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["--env-id", "no_such_module:Task-v0"],
            ["--env-id no_such_module:Task-v0", "no_such_module"],
        ),
        (["--env-id", "my_broken_tasks:Task-v0"], ["no_such_package"]),
        (["--env-id", "my_tasks:NoSuchTask-v0"], ["NoSuchTask"]),
        (["--env-id", "my_other_tasks:Pixels-v0"], ["shows no 7x7x3 array (uint8)", "56x56x3"]),
        (["--env-id", "CartPole-v1"], ["shows no 7x7x3 array (uint8)", "4 (float32); see "]),
        (["--env-id", FRUGAL, "--env-backend", "envpool"], ["--env-backend envpool"]),
        (
            ["--num-agents", "2", "--env-ids", FRUGAL, "my_copies:FrugalDoorKey-v0"],
            ["has the name of another task"],
        ),
        (["--env-id", "my_other_tasks:Pair-v0"], ["Pair-v0", "array of size 1"]),
        (["--env-id", "my_other_tasks:Unpaid-v0"], ["Unpaid-v0", "NoneType"]),
        (["--env-id", "my_other_tasks:Old-v0"], ["Old-v0", "expected 5, got 4"]),
        (["--env-id", "my_other_tasks:Changing-v0"], ["no 7x7x3 array (uint8)", "(float64)"]),
        (["--eval-env-ids", "my_tasks:NoSuchTask-v0"], ["--eval-env-ids", "NoSuchTask"]),
    ],
    ids=str,
)
def test_tasks_that_cannot_be_used_are_refused_in_one_line(script, argv, words, my_tasks):
    message = refusal(script.parse_args, argv)
    assert all(word in message for word in words), message


@MINIGRID_SCRIPTS
def test_a_task_may_show_its_codes_alone(script, my_tasks, tmp_path):
    """It has no grid, mission or images, and another agent has one of MiniGrid's tasks.

    Actions and rewards are the task's.
    """
    changes = {"num_agents": 2, "communicator": "uniform", "iterations": 2}
    args = flags(script, tmp_path / "runs", **changes)
    args += ["--env-ids", "my_other_tasks:Bare-v0", DOOR_KEY]
    summary = script.main(script.parse_args(args))
    evaluation = summary["evaluation"]["agents"][0]["Bare-v0"]
    assert 0 <= evaluation["mean"] <= 9
    assert evaluation["greedy_return"] in (0, 9)


@pytest.mark.parametrize(
    ("script", "task", "plain_task"),
    [
        (PRPO_MINIGRID, "Odd-v0", "Varied-v0"),
        (PRTRPO_MINIGRID, "Odd-v0", "Varied-v0"),
        (PRPO_ATARI, "OddFrames-v0", "Frames-v0"),
        (PRPO_MUJOCO, "OddPoint-v0", "Point-v0"),
    ],
    ids=str,
)
def test_rewards_of_shape_1_and_a_growing_info_change_nothing(
    script, task, plain_task, my_tasks, tmp_path
):
    """Gymnasium's vector environments fail on both."""
    changes = {"num_agents": 2, "communicator": "reward", "iterations": 2, "local_updates": 1}
    changes |= {"num_steps": 40, "num_envs": 3, "num_minibatches": 1, "eval_episodes": 2}
    rows = []
    for name in (task, plain_task):
        changes["env_id"] = f"my_other_tasks:{name}"
        args = flags(script, tmp_path / name, **changes)
        summary = script.main(script.parse_args(args))
        rows.append([row | {"env_id": ""} for row in rows_of(only_run(tmp_path / name))])
        rows[-1].append([row[name] for row in summary["evaluation"]["agents"]])
    assert rows[0] == rows[1]


@pytest.mark.parametrize(
    ("script", "task", "plain_task"),
    [
        (PRPO_MINIGRID, "Undefined-v0", "Bare-v0"),
        (PRTRPO_MINIGRID, "Undefined-v0", "Bare-v0"),
        (PRPO_ATARI, "UndefinedFrames-v0", "Frames-v0"),
        (PRPO_MUJOCO, "UndefinedPoint-v0", "Point-v0"),
    ],
    ids=str,
)
def test_rewards_that_are_no_numbers_are_named(
    script, task, plain_task, my_tasks, tmp_path, capsys
):
    """On the line of the agent that has diverged; its policy is as it was."""
    changes = {"num_agents": 2, "communicator": "uniform", "iterations": 1, "eval_episodes": 0}
    args = flags(script, tmp_path, **changes | {"num_steps": 16})
    args += ["--env-ids", f"my_other_tasks:{task}", f"my_other_tasks:{plain_task}"]
    summary = script.main(script.parse_args(args))
    assert summary["diverged"] == [0]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "has diverged" in line]
    assert line.startswith("iteration 1: agent 0 has diverged: losses/")
    assert line.endswith("; its policy is finite: check the rewards of its task")


def test_a_users_game_trains_and_plays(my_tasks, tmp_path):
    """Another agent has one of ALE's games.

    Scores are not clipped, a lost life ends an episode, names have no module.
    """
    script = PRPO_ATARI
    changes = {"num_agents": 2, "communicator": "uniform", "iterations": 2, "local_updates": 1}
    changes |= {"num_steps": 40, "eval_episodes": 1}
    args = flags(script, tmp_path / "runs", **changes)
    args += ["--env-ids", "my_other_tasks:Frames-v0", "BreakoutNoFrameskip-v4"]
    summary = script.main(script.parse_args(args))
    folder = only_run(tmp_path / "runs")
    assert folder.name.startswith("Frames-v0+BreakoutNoFrameskip-v4__")
    assert summary["env_backend"] == "gymnasium"
    rows = [row for row in rows_of(folder) if row["agent"] == "0"]
    assert [row["env_id"] for row in rows] == ["Frames-v0"] * 2
    outcomes = [(float(row["episodic_length"]), float(row["episodic_return"])) for row in rows]
    # One of the nine steps only resets after a lost life: its action is not the agent's
    assert all(length == 8 and 0 < score < 63 for length, score in outcomes), outcomes
    for row in summary["evaluation"]["agents"]:
        assert row["Frames-v0"]["mean"] % 7 == 0 <= row["Frames-v0"]["greedy_return"] <= 63
    given = play.Args(str(folder), env_id=("my_other_tasks:Frames-v0",), episodes=2)
    results = play.main(dataclasses.replace(given, video=str(tmp_path / "films")))
    assert [list(row) for row in results.values()] == [["Frames-v0"]] * 2
    for i in range(2):
        number, _ = imageio_ffmpeg.count_frames_and_secs(
            tmp_path / f"films/agent_{i}_Frames-v0.mp4"
        )
        assert number == 1 + 9


def test_lives_of_a_users_game_end_episodes(my_tasks):
    script = PRPO_ATARI
    games = script.Games(script.Args(), ["my_other_tasks:Frames-v0"], [[1, 2]])
    ends = []
    for _ in range(20):
        actions = np.zeros((1, 2), dtype=int)
        rewards, terminations, truncations, valid, ended = games.step(actions)
        assert set(np.unique(rewards)) <= {0.0, 1.0}
        assert not truncations.any()
        ends.append((bool(terminations[0, 0]), bool(valid[0, 0]), [length for *_, length in ended]))
    games.close()
    assert [number for number, (end, *_) in enumerate(ends) if end] == [4, 8, 14, 18]
    assert [number for number, (_, valid, _) in enumerate(ends) if not valid] == [5, 9, 15, 19]
    assert [number for number, (*_, lengths) in enumerate(ends) if lengths] == [8, 18]


@pytest.mark.parametrize(
    ("env_id", "words"),
    [
        ("no_such_module:Game-v0", "no_such_module"),
        ("my_other_tasks:Bare-v0", "has no space of 4x84x84 frames (uint8), but Box("),
        ("my_other_tasks:UndeclaredFrames-v0", "has no space of 4x84x84 frames (uint8), but Box("),
        ("my_other_tasks:PairOfFrames-v0", "array of size 1"),
        ("my_other_tasks:UnpaidFrames-v0", "NoneType"),
        ("my_other_tasks:ChangingFrames-v0", "frames (uint8), but 4x84x84 (float64)"),
        ("MiniGrid-Empty-5x5-v0", "module:id"),
    ],
)
def test_games_that_cannot_be_used_are_refused_in_one_line(env_id, words, my_tasks):
    message = refusal(PRPO_ATARI.parse_args, ["--env-id", env_id])
    assert words in message
    assert f"--env-id {env_id}" in message


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_games_of_ale_have_the_same_actions_beside_ones_own(order, my_tasks):
    """Whatever the order: two of ALE's games have three actions each, and not the same.

    The number of actions is all that can be compared with a game of one's own.
    """
    games = ["my_other_tasks:Three-v0", "FreewayNoFrameskip-v4", "SkiingNoFrameskip-v4"]
    message = refusal(PRPO_ATARI.parse_args, ["--env-ids", *[games[k] for k in order]])
    assert "need the same actions" in message
    pairs = [games[0], games[1], games[1]]
    args = PRPO_ATARI.parse_args(["--env-ids", *[pairs[k] for k in order]])
    assert len(args.env_ids) == 3


def test_bodies_are_closed_at_every_checkpoint(my_tasks, tmp_path, monkeypatch):
    """All that were made: a body may hold a simulator's process."""
    opened = []
    closed = []
    make = PRPO_MUJOCO.module.make_env

    def make_and_watch(*inputs, **options):
        env = make(*inputs, **options)
        opened.append(env)
        close = env.close

        def close_and_watch():
            closed.append(env)
            close()

        env.close = close_and_watch
        return env

    monkeypatch.setattr(PRPO_MUJOCO.module, "make_env", make_and_watch)
    changes = {"num_agents": 2, "iterations": 2, "save_every": 1, "eval_episodes": 1}
    changes |= {"env_id": "my_other_tasks:Point-v0"}
    args = flags(PRPO_MUJOCO, tmp_path / "runs", **changes)
    PRPO_MUJOCO.main(PRPO_MUJOCO.parse_args(args))
    assert len(opened) > 6
    assert {*map(id, opened)} == {*map(id, closed)}


def test_tasks_without_an_end_get_one(my_tasks, monkeypatch):
    """An evaluation plays whole episodes."""
    monkeypatch.setattr(PRPO_MINIGRID.module, "LONGEST_EPISODE", 6)
    monkeypatch.setattr(PRPO_ATARI.module, "LONGEST_EPISODE", 6)
    monkeypatch.setattr(PRPO_MUJOCO.module, "LONGEST_EPISODE", 6)
    agent = PRPO_MINIGRID.new_agent()
    task = "my_other_tasks:Endless-v0"
    returns = PRPO_MINIGRID.evaluate(PRPO_MINIGRID.Args(), agent, task, [1, 2], 0, greedy=True)
    assert (returns <= 6).all()
    game = "my_other_tasks:EndlessFrames-v0"
    agent = PRPO_ATARI.new_agent()
    returns = PRPO_ATARI.evaluate(PRPO_ATARI.Args(), agent, game, [1, 2], 0, greedy=True)
    assert (returns <= 42).all()
    body = "my_other_tasks:EndlessPoint-v0"
    agent = PRPO_MUJOCO.of_family.Agent(2, 2)
    torch.nn.init.constant_(agent.actor.bias, 9.0)  # beyond the bounds, of which the first is 0.5
    returns = PRPO_MUJOCO.evaluate(PRPO_MUJOCO.Args(), agent, body, [1, 2], 0, greedy=True)
    assert returns.tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--env-id no_such_module:Body-v0", "no_such_module"),
        ("--env-id my_other_tasks:NamedPoint-v0", "shows no list of numbers, but Dict("),
        ("--env-id my_other_tasks:SquarePoint-v0", "shows no list of numbers, but Box("),
        ("--env-id my_other_tasks:FreePoint-v0", "has actions without bounds: Box(-inf, inf"),
        ("--env-id my_other_tasks:HalfFreePoint-v0", "has actions without bounds: Box("),
        ("--env-id my_other_tasks:SteppedPoint-v0", "no list of continuous actions, but MultiDis"),
        ("--env-id my_other_tasks:WholePoint-v0", "no list of continuous actions, but Box(-2, 2, "),
        ("--env-id my_other_tasks:OtherPoint-v0", "shows (2,) numbers, not (3,)"),
        ("--env-id my_other_tasks:PairOfPoints-v0", "array of size 1"),
        ("--env-id my_other_tasks:OldPoint-v0", "expected 5, got 4"),
        ("--env-id my_other_tasks:ChangingPoint-v0", "shows (3,) numbers, not (2,)"),
        ("--env-id my_other_tasks:Point-v0 --env-backend envpool", "no usable my_other_tasks:Poin"),
        ("--num-agents 2 --env-ids my_other_tasks:Point-v0 Hopper-v5", "Point-v0 2 and 2, Hopper"),
        ("--eval-env-ids my_other_tasks:Point-v0", "Point-v0 2 and 2"),
    ],
)
def test_bodies_that_cannot_be_used_are_refused_in_one_line(argv, words, my_tasks):
    message = refusal(PRPO_MUJOCO.parse_args, argv.split())
    assert words in message
    assert message.startswith(argv[argv.rindex("--") :].split(" ")[0])


def test_the_page_s_bodies_learn_goals_of_their_own(my_tasks, tmp_path):
    """Each agent is better at its own task than at its peer's."""
    changes = {"num_agents": 2, "iterations": 8, "num_steps": 512, "num_minibatches": 4}
    changes |= {"eval_episodes": 20, "learning_rate": 2e-3}
    args = flags(PRPO_MUJOCO, tmp_path / "runs", **changes)
    args += ["--env-ids", "my_bodies:ReachLeft-v0", "my_bodies:ReachRight-v0"]
    agents = PRPO_MUJOCO.main(PRPO_MUJOCO.parse_args(args))["evaluation"]["agents"]
    left, right = ([row[f"Reach{side}-v0"]["mean"] for row in agents] for side in ("Left", "Right"))
    assert left[0] > right[0] + 8
    assert right[1] > left[1] + 8


@on([PRPO_MUJOCO, SLOW_FEDAVG_MUJOCO])
def test_a_users_body_trains_and_plays(script, my_tasks, tmp_path):
    """Actions stay in the task's bounds, of which each has its own; names have no module."""
    changes = {"num_agents": 2, "communicator": "similarity", "iterations": 2, "local_updates": 1}
    changes |= {"env_id": "my_other_tasks:Point-v0", "eval_episodes": 3}
    args = flags(script, tmp_path / "runs", **changes)
    summary = script.main(script.parse_args(args))
    folder = only_run(tmp_path / "runs")
    assert folder.name.startswith("Point-v0__")
    assert summary["env_backend"] == "gymnasium"
    for row in rows_of(folder):
        assert row["env_id"] == "Point-v0"
        assert -9 <= float(row["episodic_return"]) <= 4.5
        assert 5 <= float(row["episodic_length"]) <= 9
    for row in summary["evaluation"]["agents"]:
        assert -9 <= row["Point-v0"]["mean"] <= 4.5
