"""benchmark/pooled.py: one agent's episodes are of the tasks of several."""

import subprocess

import gymnasium as gym
import numpy as np
import pytest
from helpers import PRPO_MINIGRID, REPOSITORY, assert_same_run, resume, rows_of, table_of, train
from test_goals import FORWARD, PICKUP, face, find_objects

from benchmark import pooled

NUMBERS = {"DoorKey-5x5-6x6-8x8-v0": 3, "DoorKeyGoals-v0": 4, "UnlockGoals-v0": 4}
on_pools = pytest.mark.parametrize("pool", NUMBERS)


def make(env_id):
    """An environment, as scripts make it."""
    return PRPO_MINIGRID.make_env(env_id)


def task_of(env):
    """What distinguishes the task of the present episode."""
    return env.unwrapped.width, getattr(
        env.unwrapped, "goals", getattr(env.unwrapped, "goal", None)
    )


def show(env):
    """The present level."""
    level = env.unwrapped
    return level.grid.encode().tolist(), tuple(level.agent_pos), level.agent_dir


def list_goals(env):
    """What ends an episode: (cell, the action that takes it from the cell before)."""
    goals = [(cell, FORWARD) for cell, _ in find_objects(env, "goal")]
    return goals + [
        (cell, PICKUP) for kind in ("ball", "box") for cell, _ in find_objects(env, kind)
    ]


@on_pools
def test_an_episode_is_one_of_the_task(pool):
    """The same level for the same seed, the same observations and the same rewards."""
    env = make(f"benchmark.pooled:{pool}")
    tasks = {}
    for env_id in pooled.POOLS[pool]:
        task = make(env_id)
        task.reset(seed=0)
        tasks[task_of(task)] = task
    assert len(tasks) == NUMBERS[pool]
    generator = np.random.default_rng(0)
    rewards = {name: [] for name in tasks}
    for seed in range(60):
        obs, _ = env.reset(seed=seed)
        task = tasks[task_of(env)]
        assert np.array_equal(task.reset(seed=seed)[0], obs)
        assert show(env) == show(task)
        for action in generator.integers(7, size=20):
            for ours, theirs in zip(env.step(action), task.step(action), strict=True):
                assert np.array_equal(ours, theirs)
        for number in range(len(list_goals(task))):
            ends = []
            for one in (env, task):
                one.reset(seed=seed)
                cell, action = list_goals(one)[number]
                face(one, cell)
                ends.append(one.step(action))
            for ours, theirs in zip(*ends, strict=True):
                assert np.array_equal(ours, theirs)
            _, reward, terminated, *_ = ends[0]
            assert terminated
            rewards[task_of(task)].append(reward > 0)
    # The goal pays, and of two goals one, which other tasks of the pool do not pay for
    share = 1 if pool.startswith("DoorKey-") else 0.5
    assert [np.mean(paid) for paid in rewards.values()] == [share] * NUMBERS[pool]


@on_pools
def test_tasks_are_drawn_evenly_and_alike_for_equal_seeds(pool):
    """By resets with seeds and without."""
    episodes = {}
    for name, first in (("one", 0), ("again", 0), ("other", 1)):
        env = make(f"benchmark.pooled:{pool}")
        episodes[name] = []
        for seed in (first, *[None] * 300):
            env.reset(seed=seed)
            episodes[name].append((task_of(env), show(env)))
    assert episodes["one"] == episodes["again"] != episodes["other"]
    of_seeds = []
    for seed in range(300):
        env.reset(seed=seed)
        of_seeds.append(task_of(env))
    without_seeds = [task for task, _ in episodes["one"]]
    share = 1 / NUMBERS[pool]
    for drawn in (of_seeds, without_seeds):
        counts = np.unique_counts([str(task) for task in drawn]).counts
        assert len(counts) == NUMBERS[pool]
        assert abs(counts / len(drawn) - share).max() < 4 * (share * (1 - share) / 300) ** 0.5
    # Levels differ, also those of one task
    assert len({str(episode) for episode in episodes["one"]}) > 100


def test_the_task_is_independent_of_the_level():
    """A level's first draw is the column of its door, which a common generator would tie to it."""
    env = make("benchmark.pooled:DoorKey-5x5-6x6-8x8-v0")
    columns = {8: [], 6: [], 5: []}
    for seed in range(300):
        env.reset(seed=seed)
        ((column, _), _), *_ = find_objects(env, "door")
        columns[env.unwrapped.width].append(column)
    for width, seen in columns.items():
        shares = np.bincount(seen, minlength=width - 2)[2:] / len(seen)
        assert abs(shares - 1 / (width - 4)).max() < 0.2


@pytest.mark.parametrize("pool", ["DoorKeyGoals-v0", "UnlockGoals-v0"])
def test_a_pool_has_the_tasks_of_its_sweep(pool):
    sweep = {"DoorKeyGoals-v0": "goals.sh", "UnlockGoals-v0": "unlock_goals.sh"}[pool]
    words = ["bash", f"benchmark/{sweep}"]
    output = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    tasks = {word for word in output.stdout.split() if word.startswith("benchmark.goals:")}
    assert tasks == set(pooled.POOLS[pool])


def test_one_agent_learns_on_a_pool_and_goes_on(tmp_path, monkeypatch):
    """It is evaluated on each task; a run that goes on is the same one."""
    script = PRPO_MINIGRID
    monkeypatch.setattr(script.collect_public_states, "__defaults__", (4, 2))
    pool = "DoorKeyGoals-v0"
    tasks = pooled.POOLS[pool]
    changes = {"num_agents": 1, "env_id": f"benchmark.pooled:{pool}", "eval_env_ids": tasks}
    changes |= {"num_steps": 24, "save_every": 1, "eval_episodes": 1, "anneal_lr": False}
    folder = train(script, tmp_path / "whole", **changes, iterations=3)
    names = [env_id.rpartition(":")[2] for env_id in tasks]
    assert [row["task"] for row in table_of(folder, "evaluations")] == [pool, *names]
    assert {row["env_id"] for row in rows_of(folder)} == {pool}
    resumed = train(script, tmp_path / "parts", **changes, iterations=2)
    resume(script, resumed, "--total-timesteps", 3 * 48)
    assert_same_run(resumed, folder)
    assert table_of(resumed, "evaluations")[-5:] == table_of(folder, "evaluations")


def test_a_pool_can_be_drawn_and_closed():
    """Whatever task is played."""
    env = gym.make("benchmark.pooled:DoorKey-5x5-6x6-8x8-v0", render_mode="rgb_array")
    sizes = set()
    for seed in range(12):
        env.reset(seed=seed)
        sizes.add(env.render().shape)
        assert env.spec.id == "DoorKey-5x5-6x6-8x8-v0"
    assert len(sizes) == 3
    env.close()
