"""benchmark/levels.py: private and unseen levels, and missions, as environment ids."""

import itertools
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
from helpers import (
    PRPO_MINIGRID,
    REPOSITORY,
    assert_same_run,
    environment,
    refusal,
    resume,
    rows_of,
    table_of,
    train,
)

from benchmark import levels

# In the first one seeds repeat layouts, in the second all of these differ
TASKS = ["SimpleCrossingS9N2", "FourRooms"]


def make(name):
    """One environment, as scripts make it."""
    return PRPO_MINIGRID.make_env(f"benchmark.levels:{name}-v0")


def layout_of(env):
    """What an episode shows that has just begun."""
    level = env.unwrapped
    cells = level.grid.encode().tolist()
    return str((cells, [int(x) for x in level.agent_pos], level.agent_dir, level.mission))


def layouts_of(name, number):
    """The layouts of the first levels of a task, in their order."""
    env = make(name)
    layouts = []
    for seed in range(number):
        env.reset(seed=seed)
        layouts.append(layout_of(env))
    return layouts


@pytest.mark.parametrize("task", TASKS)
def test_levels_are_the_first_appearances_of_different_layouts(task):
    """The first hundred are the unseen ones, then come the blocks, one after the other."""
    env = gym.make(f"MiniGrid-{task}-v0")
    expected = []
    for seed in range(250):
        env.reset(seed=seed)
        layout = layout_of(env)
        if layout not in expected:
            expected.append(layout)
    assert (len(expected) < 250) == (task == TASKS[0])
    assert layouts_of(f"{task}-unseen", 100) == expected[:100]
    blocks = [layouts_of(f"{task}-16-levels-{block}", 16) for block in range(3)]
    assert sum(blocks, []) == expected[100:148]
    assert layouts_of(f"{task}-4-levels-3", 4) == expected[112:116]


@pytest.mark.parametrize("task", TASKS)
def test_no_level_is_in_two_blocks_or_unseen(task):
    """All have the mission's rewards and steps, and are counted by layout."""
    blocks = [layouts_of(f"{task}-4-levels-{block}", 4) for block in (0, 1, 2, 5)]
    layouts = sum([*blocks, layouts_of(f"{task}-unseen", 100)], [])
    assert len(layouts) == len(set(layouts)) == 116


def test_a_seed_is_the_number_of_a_level():
    """Modulo the number of levels; a reset without a seed draws one of all of them."""
    env = make("FourRooms-4-levels-1")
    block = layouts_of("FourRooms-4-levels-1", 4)
    for seed in (7, 10**9 + 2):
        env.reset(seed=seed)
        assert layout_of(env) == block[seed % 4]
    orders = []
    for seed in (0, 0, 1):
        env.reset(seed=seed)
        order = []
        for _ in range(40):
            env.reset()
            order.append(block.index(layout_of(env)))
        orders.append(order)
    assert set(orders[0]) == {0, 1, 2, 3}
    assert orders[0] == orders[1] != orders[2]
    fresh = make("FourRooms-1-levels-0")
    fresh.reset()
    assert layout_of(fresh) == layouts_of("FourRooms-1-levels-0", 1)[0]


def test_another_process_has_the_same_levels():
    """So do ranks, and the tool that plays a run; another task that came before changes nothing."""
    code = (
        "from benchmark import levels as l; l.list_layouts('MiniGrid-Unlock-v0').find_seeds(0, 9);"
    )
    code += "print(l.list_layouts('MiniGrid-SimpleCrossingS9N2-v0').find_seeds(100, 20))"
    words = [sys.executable, "-c", code]
    options = {"cwd": REPOSITORY, "env": environment(PYTHONHASHSEED="5"), "text": True}
    output = subprocess.run(words, capture_output=True, check=True, **options).stdout
    layouts = levels.Layouts("MiniGrid-SimpleCrossingS9N2-v0")
    assert output.strip() == str(layouts.find_seeds(100, 20))


@pytest.mark.parametrize(
    ("name", "number"), [("SimpleCrossingS9N1", 42), ("DoorKey-5x5", 48), ("DistShift2", 1)]
)
def test_too_few_layouts_are_an_error_that_gives_their_number(name, number, monkeypatch):
    monkeypatch.setattr(levels, "PATIENCE", 600)
    message = f"MiniGrid-{name}-v0 has {number} different layouts; layouts 0 to 99 are needed"
    with pytest.raises(ValueError, match=message):
        make(f"{name}-unseen")
    with pytest.raises(ValueError, match=f"has {number} different layouts"):
        make(f"{name}-64-levels-31")
    env_id = f"benchmark.levels:{name}-unseen-v0"
    for flag in ("--env-id", "--eval-env-ids"):
        line = refusal(PRPO_MINIGRID.parse_args, [flag, env_id])
        assert line.startswith(f"{flag} {env_id}: ")
        assert line.endswith(message)


@pytest.mark.parametrize(("task", "words"), levels.MISSIONS.items())
def test_missions_have_their_word(task, words):
    """Equal seeds give equal levels, each reset another one."""
    for word in words:
        env = make(f"{task}-{word}")
        seen = []
        for seed in (3, 3, None, None, None, None):
            env.reset(seed=seed)
            assert word in env.unwrapped.mission
            seen.append(layout_of(env))
        assert seen[0] == seen[1]
        assert len(set(seen[1:])) > 3


def test_agents_train_on_their_levels_only():
    """Also over many restarts, and each on all of its own."""
    names = [f"Fetch-5x5-N2-4-levels-{block}" for block in range(2)]
    env_ids = tuple(f"benchmark.levels:{name}-v0" for name in (*names, "Fetch-5x5-N2-ball"))
    args = PRPO_MINIGRID.Args(env_ids=env_ids, num_envs=2)
    assert PRPO_MINIGRID.choose_backend(args) == "gymnasium"
    envs = PRPO_MINIGRID.Envs(args, range(3), 0)
    games = [pool.envs for pool, _ in envs.pools]
    generator = np.random.default_rng(0)
    seen = [set(), set(), set()]
    begins = np.ones((3, 2), dtype=bool)
    for _ in range(400):
        for k, e in np.argwhere(begins):
            seen[k].add(layout_of(games[k][e]))
        begins = envs.ended.copy()
        envs.step(generator.integers(4, size=(3, 2)))
    envs.close()
    assert seen[:2] == [set(layouts_of(name, 4)) for name in names]
    assert len(seen[2]) > 6
    assert all("ball" in layout for layout in seen[2])


def test_a_run_is_evaluated_on_unseen_levels_and_goes_on(tmp_path, monkeypatch):
    """--eval-env-ids adds rows to evaluations.csv; a run that goes on is the same one."""
    script = PRPO_MINIGRID
    monkeypatch.setattr(script.collect_public_states, "__defaults__", (4, 2))
    names = [f"MultiRoom-N2-S4-1-levels-{block}-v0" for block in range(2)]
    names.append("MultiRoom-N2-S4-unseen-v0")
    *private, unseen = [f"benchmark.levels:{name}" for name in names]
    changes = {"num_agents": 2, "env_ids": tuple(private), "eval_env_ids": (unseen,)}
    changes |= {"num_steps": 24, "local_updates": 1, "save_every": 1, "anneal_lr": False}
    changes |= {"eval_episodes": 1, "update_epochs": 1}
    folder = train(script, tmp_path / "whole", **changes, iterations=3)
    rows = [(row["agent"], row["task"]) for row in table_of(folder, "evaluations")]
    assert rows == list(itertools.product("01", names))
    assert [row["env_id"] for row in rows_of(folder)[:2]] == names[:2]
    resumed = train(script, tmp_path / "parts", **changes, iterations=2)
    resume(script, resumed, "--total-timesteps", 3 * 48)
    assert_same_run(resumed, folder)
    assert table_of(resumed, "evaluations")[-6:] == table_of(folder, "evaluations")
