"""benchmark/goals.py: what agents with goals of their own see, and what they are paid for."""

import gymnasium as gym
import numpy as np
import pytest
from minigrid.minigrid_env import MiniGridEnv

import benchmark.goals  # noqa: F401, registers the tasks
from prpo_minigrid import make_env

LEFT, RIGHT, FORWARD, PICKUP, DROP, TOGGLE = range(6)
DOOR_KEY = ["DoorKeyGoals-5x5-green-v0", "DoorKeyGoals-8x8-blue-v0", "DoorKeyGoals-6x6-blue-50-v0"]
UNLOCK = ["UnlockGoals-5x5-ball-v0", "UnlockGoals-8x8-box-v0"]


def find_objects(env, kind):
    """The cells of the level that hold such an object: [((column, row), object)]."""
    grid = env.unwrapped.grid
    cells = [(i, j) for i in range(grid.width) for j in range(grid.height)]
    objects = [(cell, grid.get(*cell)) for cell in cells]
    return [(cell, obj) for cell, obj in objects if obj is not None and obj.type == kind]


def face(env, cell):
    """Put the agent on a free neighbour of a cell, or in the door beside it, facing it."""
    level = env.unwrapped
    for direction, step in enumerate([(1, 0), (0, 1), (-1, 0), (0, -1)]):
        place = cell[0] - step[0], cell[1] - step[1]
        neighbour = level.grid.get(*place)
        if neighbour is None or neighbour.type == "door":
            level.agent_pos = place
            level.agent_dir = direction
            return
    raise AssertionError("no free neighbour")


@pytest.mark.parametrize("env_id", DOOR_KEY + UNLOCK)
def test_view_is_that_of_minigrid(env_id):
    env = gym.make(env_id)
    generator = np.random.default_rng(0)
    seen = set()
    for seed in range(8):
        obs, _ = env.reset(seed=seed)
        # Half of the episodes begin in an open door with the key in the hand
        if seed % 2:
            (cell, door), *_ = find_objects(env, "door")
            (place, key), *_ = find_objects(env, "key")
            door.is_locked = False
            face(env, cell)
            env.step(TOGGLE)
            env.unwrapped.grid.set(*place, None)
            env.unwrapped.codes[place[0] + 7, place[1] + 7] = (1, 0, 0)
            env.unwrapped.carrying = key
        for _ in range(60):
            obs, _, terminated, truncated, _ = env.step(generator.integers(7))
            official = MiniGridEnv.gen_obs(env.unwrapped)
            np.testing.assert_array_equal(obs["image"], official["image"])
            assert obs["image"].dtype == np.uint8
            seen.update(map(tuple, obs["image"].reshape(-1, 3)))
            if terminated or truncated:
                env.reset()
    assert len(seen) > 8


@pytest.mark.parametrize("ids", [("6x6-green", "6x6-blue"), ("6x6-green-50", "6x6-blue-50")])
def test_agents_with_different_goals_see_the_same_levels(ids):
    green, blue = (make_env(f"DoorKeyGoals-{name}-v0") for name in ids)
    for seed in range(20):
        np.testing.assert_array_equal(green.reset(seed=seed)[0], blue.reset(seed=seed)[0])
        np.testing.assert_array_equal(green.unwrapped.codes, blue.unwrapped.codes)


@pytest.mark.parametrize(("goal", "other"), [("green", "blue"), ("blue", "green")])
@pytest.mark.parametrize("size", [5, 8])
def test_only_the_own_goal_pays_and_either_ends(size, goal, other):
    env = gym.make(f"DoorKeyGoals-{size}x{size}-{goal}-v0")
    corners = {"green": (size - 2, size - 2), "blue": (size - 2, 1)}
    for seed in range(20):
        env.reset(seed=seed)
        assert {obj.color: cell for cell, obj in find_objects(env, "goal")} == corners
        for colour, pays in ((goal, True), (other, False)):
            env.reset(seed=seed)
            face(env, corners[colour])
            _, reward, terminated, truncated, _ = env.step(FORWARD)
            assert terminated and not truncated
            assert reward == pytest.approx((1 - 0.9 / (10 * size**2)) * pays)


def test_share_of_levels_where_goals_agree():
    for percent in (25, 75, 100):
        envs = [gym.make(f"DoorKeyGoals-5x5-{colour}-{percent}-v0") for colour in ("green", "blue")]
        upper = []
        for seed in range(400):
            for env in envs:
                env.reset(seed=seed)
                goals = find_objects(env, "goal")
                if len(goals) == 1:
                    ((cell, goal),) = goals
                    assert goal.color == "purple"
                    face(env, cell)
                    _, reward, terminated, *_ = env.step(FORWARD)
                    assert terminated and reward > 0.9  # for both
            if len(goals) == 1:
                upper.append(cell[1] == 1)
        share = percent / 100
        assert abs(len(upper) - 400 * share) <= 4 * (400 * share * (1 - share)) ** 0.5
        assert 0.3 < np.mean(upper) < 0.7  # either corner


@pytest.mark.parametrize("env_id", DOOR_KEY + UNLOCK)
def test_key_and_agent_are_before_the_door_and_the_goals_behind(env_id):
    env = gym.make(env_id)
    rows = set()
    for seed in range(60):
        env.reset(seed=seed)
        ((column, row), door), *_ = find_objects(env, "door")
        ((key_column, _), key), *_ = find_objects(env, "key")
        assert door.is_locked and door.color == key.color
        assert env.unwrapped.agent_pos[0] < column and key_column < column
        kinds = ("goal",) if env_id in DOOR_KEY else ("ball", "box")
        assert all(cell[0] > column for kind in kinds for cell, _ in find_objects(env, kind))
        rows.add(row)
    assert rows == set(range(2, env.unwrapped.height - 2))


@pytest.mark.parametrize(("goal", "other"), [("ball", "box"), ("box", "ball")])
def test_unlock_pays_for_the_own_object(goal, other):
    env = gym.make(f"UnlockGoals-6x6-{goal}-v0")
    for seed in range(20):
        for kind, expected in (("key", False), (goal, True), (other, True)):
            env.reset(seed=seed)
            (cell, _), *_ = find_objects(env, kind)
            face(env, cell)
            _, reward, terminated, _, _ = env.step(PICKUP)
            assert env.unwrapped.carrying.type == kind
            assert terminated == expected
            assert (reward > 0.9) == (kind == goal)
    # With the key in the hand nothing else can be picked up
    env.reset(seed=0)
    (cell, _), *_ = find_objects(env, "key")
    face(env, cell)
    env.step(PICKUP)
    (cell, _), *_ = find_objects(env, goal)
    face(env, cell)
    _, reward, terminated, _, _ = env.step(PICKUP)
    assert not terminated and reward == 0
