"""benchmark/goals.py: what agents with goals of their own see, and what they are paid for."""

import hashlib

import gymnasium as gym
import numpy as np
import pytest
from minigrid.minigrid_env import MiniGridEnv

import benchmark.goals  # noqa: F401, registers the tasks
from prpo_minigrid import make_env

LEFT, RIGHT, FORWARD, PICKUP, DROP, TOGGLE = range(6)
DOOR_KEY = ["DoorKeyGoals-5x5-green-v0", "DoorKeyGoals-8x8-blue-v0", "DoorKeyGoals-6x6-blue-50-v0"]
UNLOCK = ["UnlockGoals-5x5-ball-v0", "UnlockGoals-8x8-box-v0"]
PARTS = ["KeyDoor-5x5-v0", "KeyDoor-8x8-v0", "BehindDoor-5x5-v0", "BehindDoor-8x8-v0"]


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


def take_key(env):
    """Pick the key up, from beside it."""
    ((cell, _),) = find_objects(env, "key")
    face(env, cell)
    return env.step(PICKUP)


def find_path(env, start, end):
    """The cells of a shortest way that an agent can walk, without start; the end may be a goal."""
    grid = env.unwrapped.grid
    paths = {start: []}
    waiting = [start]
    for cell in waiting:
        for i, j in ((1, 0), (0, 1), (-1, 0), (0, -1)):
            beside = cell[0] + i, cell[1] + j
            obj = grid.get(*beside)
            is_free = obj is None or (obj.type == "door" and obj.is_open) or beside == end
            if beside not in paths and is_free:
                paths[beside] = [*paths[cell], beside]
                waiting.append(beside)
    return paths[end]


def walk(env, path):
    """Go along a path; what the last step returned, and the number of steps."""
    count = 0
    for cell in path:
        level = env.unwrapped
        step = cell[0] - level.agent_pos[0], cell[1] - level.agent_pos[1]
        while level.agent_dir != [(1, 0), (0, 1), (-1, 0), (0, -1)].index(step):
            env.step(RIGHT)
            count += 1
        result = env.step(FORWARD)
        count += 1
        assert tuple(level.agent_pos) == cell
    return result, count


@pytest.mark.parametrize("env_id", DOOR_KEY + UNLOCK + PARTS)
def test_view_is_that_of_minigrid(env_id):
    env = gym.make(env_id)
    generator = np.random.default_rng(0)
    seen = set()
    for seed in range(8):
        obs, _ = env.reset(seed=seed)
        # Half of the episodes begin in an open door with the key in the hand
        if seed % 2 and find_objects(env, "key"):
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
    assert len(seen) > (6 if "BehindDoor" in env_id else 8)  # there no door is locked


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


@pytest.mark.parametrize(
    ("env_id", "digest"),
    [
        ("DoorKeyGoals-8x8-green-v0", "2ad38816b3043bab"),
        ("DoorKeyGoals-6x6-blue-50-v0", "1c5045fce36f7079"),
        ("UnlockGoals-8x8-box-v0", "d80a3fc2cf3e68cc"),
    ],
)
def test_levels_of_reported_tasks_stay_as_they_were(env_id, digest):
    """Results were made on them: a new task must not change what a seed draws."""
    env = gym.make(env_id)
    levels = hashlib.sha256()
    for seed in range(20):
        env.reset(seed=seed)
        level = env.unwrapped
        levels.update(level.codes.tobytes())
        levels.update(bytes([*map(int, level.agent_pos), int(level.agent_dir)]))
    assert levels.hexdigest()[:16] == digest


@pytest.mark.parametrize("size", [5, 6, 8])
def test_key_and_door_are_those_of_the_whole_chain_and_the_open_door_pays(size):
    env = make_env(f"KeyDoor-{size}x{size}-v0")
    whole = make_env(f"DoorKeyGoals-{size}x{size}-green-v0")
    for seed in range(20):
        np.testing.assert_array_equal(env.reset(seed=seed)[0], whole.reset(seed=seed)[0])
        np.testing.assert_array_equal(env.unwrapped.codes, whole.unwrapped.codes)
        ((door, _),) = find_objects(env, "door")
        # A locked door does not open without the key
        face(env, door)
        _, reward, terminated, *_ = env.step(TOGGLE)
        assert (reward, terminated) == (0, False)
        _, reward, terminated, *_ = take_key(env)
        assert (reward, terminated) == (0, False)
        face(env, door)
        _, reward, terminated, truncated, _ = env.step(TOGGLE)
        assert terminated and not truncated
        assert reward == pytest.approx(1 - 0.9 * 3 / (10 * size**2))


@pytest.mark.parametrize("size", [5, 6, 8])
def test_behind_the_door_either_goal_pays(size):
    env = make_env(f"BehindDoor-{size}x{size}-v0")
    whole = make_env(f"DoorKeyGoals-{size}x{size}-blue-v0")
    places = set()
    for seed in range(40):
        for colour, corner in (("green", (size - 2, size - 2)), ("blue", (size - 2, 1))):
            env.reset(seed=seed)
            level = env.unwrapped
            ((door, _),) = find_objects(env, "door")
            assert door[0] < level.agent_pos[0] < size - 1
            places.add(tuple(level.agent_pos))
            assert level.grid.get(*corner).color == colour
            path = find_path(env, tuple(level.agent_pos), corner)
            (_, reward, terminated, truncated, _), steps = walk(env, path)
            assert terminated and not truncated
            assert reward == pytest.approx(1 - 0.9 * steps / (10 * size**2))
            assert 0 < steps < 6 * size
        # Everything else is as in the whole chain after key and door
        obs, _ = env.reset(seed=seed)
        whole.reset(seed=seed)
        take_key(whole)
        ((cell, _),) = find_objects(whole, "door")
        face(whole, cell)
        whole.step(TOGGLE)
        assert cell == door
        whole.unwrapped.agent_pos = level.agent_pos
        whole.unwrapped.agent_dir = level.agent_dir
        np.testing.assert_array_equal(level.codes, whole.unwrapped.codes)
        np.testing.assert_array_equal(obs, whole.unwrapped.gen_obs()["image"])
    assert len(places) > 1 or size == 5


def test_agent_behind_the_door_gets_nothing_for_going_back():
    env = make_env("BehindDoor-8x8-v0")
    env.reset(seed=0)
    level = env.unwrapped
    ((door, _),) = find_objects(env, "door")
    path = find_path(env, tuple(level.agent_pos), (1, 1))
    assert door in path
    (_, reward, terminated, *_), _ = walk(env, path)
    assert (reward, terminated) == (0, False)
