"""benchmark/scales.py: MiniGrid's tasks in other units."""

import numpy as np
import pytest

from prpo_minigrid import Args, Envs, make_env


# Seeds of levels that these random actions solve within 100 steps
@pytest.mark.parametrize(("size", "seed"), [(5, 4), (6, 42)])
def test_rewards_are_multiplied_and_nothing_else_changes(size, seed):
    plain = make_env(f"MiniGrid-DoorKey-{size}x{size}-v0")
    scaled = make_env(f"benchmark.scales:DoorKey-{size}x{size}-times-10-v0")
    obs, _ = plain.reset(seed=seed)
    same_obs, _ = scaled.reset(seed=seed)
    assert np.array_equal(same_obs, obs)
    generator = np.random.default_rng(seed)
    ended = False
    while not ended:
        action = int(generator.integers(6))
        obs, reward, *ends, _ = plain.step(action)
        same_obs, scaled_reward, *same_ends, _ = scaled.step(action)
        assert np.array_equal(same_obs, obs)
        assert same_ends == ends
        assert scaled_reward == 10 * reward
        ended = any(ends)
    assert reward > 0


def test_agents_report_returns_in_their_own_units():
    """Of two agents only the one on the scaled task reports ten times as much."""
    tasks = ("MiniGrid-DoorKey-5x5-v0", "benchmark.scales:DoorKey-5x5-times-10-v0")
    args = Args(num_agents=2, env_ids=tasks, num_envs=1, env_backend="gymnasium")
    envs = Envs(args, range(2), 0)
    # The same level, and actions that solve it
    for pool, _ in envs.pools:
        pool.reset(seed=4)
    generator = np.random.default_rng(4)
    episodes = []
    while not episodes:
        *_, episodes = envs.step(np.full((2, 1), generator.integers(6)))
    (plain, of_plain, steps), (scaled, of_scaled, same_steps) = episodes
    assert (plain, scaled) == (0, 1)
    assert same_steps == steps
    assert of_scaled == pytest.approx(10 * of_plain)
    assert of_plain > 0
    envs.close()
