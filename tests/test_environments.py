"""Advantages, which never cross the end of an episode in any autoreset mode, and environments."""

import copy
import importlib
import re
import sys
from collections import Counter
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers import (
    HAS_ENVPOOL,
    PRPO_ATARI,
    PRPO_MINIGRID,
    PRPO_MUJOCO,
    REPOSITORY,
    notes_of,
    only_run,
    refusal,
    rows_of,
    tiny,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import communicators

GAMMA = 0.97
LAMBDA = 0.9
BACKENDS = ["gymnasium"] + ["envpool"] * HAS_ENVPOOL
needs_envpool = pytest.mark.skipif("envpool" not in BACKENDS, reason="envpool is for Linux")
every_backend = pytest.mark.parametrize("backend", BACKENDS)
RUNNING, TERMINATED, TRUNCATED = range(3)


def oracle(rewards, values, terminated, gamma=GAMMA, gae_lambda=LAMBDA):
    """Advantages of one episode, or of its part in one rollout, by the definition in O(T^2).

    rewards: [T]; values: [T + 1], the last one of the state where the data end; terminated: whether
    that is the end.
    """
    bootstrap = [*values[1:-1], 0.0 if terminated else values[-1]]
    deltas = [
        r + gamma * after - before
        for r, after, before in zip(rewards, bootstrap, values[:-1], strict=True)
    ]
    return [
        sum((gamma * gae_lambda) ** (k - t) * deltas[k] for k in range(t, len(deltas)))
        for t in range(len(deltas))
    ]


def random_episodes(seed, kinds):
    """Rewards, values, values of the next states and kinds [steps, envs] as tensors, in float64."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.tensor(kinds)
    rewards, values, finals = (
        torch.randn(kinds.shape, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    following = torch.cat((values[1:], finals[-1:]))
    return rewards, values, torch.where(kinds == RUNNING, following, finals), kinds


def advantages_of(rewards, values, next_values, kinds):
    """What `compute_advantages`, equal in all scripts, gives for [steps, envs]."""
    data = {"rewards": rewards, "values": values, "next_values": next_values}
    data |= {"terminations": kinds == TERMINATED, "dones": kinds != RUNNING}
    return PRPO_MINIGRID.compute_advantages(data, GAMMA, LAMBDA)


some_kinds = st.integers(1, 3).flatmap(
    lambda envs: st.lists(
        st.lists(
            st.sampled_from([RUNNING, RUNNING, RUNNING, TERMINATED, TRUNCATED]),
            min_size=envs,
            max_size=envs,
        ),
        min_size=1,
        max_size=25,
    )
)


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), kinds=some_kinds)
def test_gae_equals_the_definition_episode_by_episode(seed, kinds):
    """Running, terminated and truncated steps in any order.

    The value after a termination is never used, that after a truncation is.
    """
    rewards, values, next_values, kinds = random_episodes(seed, kinds)
    advantages = advantages_of(rewards, values, next_values, kinds)
    for env in range(kinds.shape[1]):
        ends = [t for t in range(len(kinds)) if kinds[t, env] != RUNNING or t == len(kinds) - 1]
        start = 0
        for end in ends:
            episode = slice(start, end + 1)
            states = [*values[episode, env].tolist(), next_values[end, env].item()]
            expected = oracle(rewards[episode, env].tolist(), states, kinds[end, env] == TERMINATED)
            expected = torch.tensor(expected, dtype=torch.float64)
            torch.testing.assert_close(advantages[episode, env], expected, rtol=0, atol=1e-5)
            start = end + 1


class Corridor(gym.Env):
    """Deterministic episodes of lengths 1, 2, ..., ending alternately at the goal and a time limit.

    Observations of all states of all episodes differ; the reward depends on the state and
    the action.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = gym.spaces.Discrete(5)

    def __init__(self, number):
        self.number = number
        self.episode = -1

    def state(self):
        return np.array([self.number, self.episode, self.time], dtype=np.float64)

    def reset(self, *, seed=None, options=None):
        self.episode += 1
        self.time = 0
        return self.state(), {}

    def step(self, action):
        reward = float(np.cos(self.state().sum() + 2 * action))
        self.time += 1
        over = self.time == 1 + (self.number + self.episode) % 6
        terminated = bool(over and self.episode % 2)
        return self.state(), reward, terminated, over and not terminated, {}


def value_of(state):
    """A value function that gives every state of every corridor another value."""
    return np.sin(np.asarray(state) @ [1.7, 0.9, 0.4])


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_gae_through_gymnasium_vector_environments(mode):
    """In both autoreset modes advantages of real steps are those of corridors walked separately."""
    number = 4
    steps = 50
    envs = SyncVectorEnv([lambda k=k: Corridor(k) for k in range(number)], autoreset_mode=mode)
    actions = np.random.default_rng(0).integers(5, size=(steps, number))
    obs, _ = envs.reset()
    values = []
    next_values = []
    rewards = []
    kinds = []
    valid = []
    seen = []
    ended = np.zeros(number, dtype=bool)
    for action in actions:
        seen.append(obs.copy())
        values.append(value_of(obs))
        valid.append(~ended)
        obs, reward, terminations, truncations, infos = envs.step(action)
        # With NEXT_STEP an ended episode's final observation, with SAME_STEP the next one's first
        after = obs.copy()
        if mode is AutoresetMode.SAME_STEP:
            for k in np.flatnonzero(terminations | truncations):
                after[k] = infos["final_obs"][k]
        else:
            ended = terminations | truncations
        next_values.append(value_of(after))
        rewards.append(reward)
        kinds.append(np.where(terminations, TERMINATED, np.where(truncations, TRUNCATED, RUNNING)))
    arrays = (torch.tensor(np.array(array)) for array in (rewards, values, next_values, kinds))
    advantages = advantages_of(*arrays).numpy()
    valid = np.array(valid)
    assert valid.all() == (mode is AutoresetMode.SAME_STEP)

    for k in range(number):
        env = Corridor(k)
        # The action of a step that only resets is ignored
        own_actions = iter(actions[valid[:, k], k])
        computed = dict(
            zip(map(tuple, np.array(seen)[valid[:, k], k]), advantages[valid[:, k], k], strict=True)
        )
        expected = {}
        remaining = int(valid[:, k].sum())
        while remaining:
            state, _ = env.reset()
            states = [state]
            gains = []
            over = False
            while not over and remaining:
                state, reward, terminated, truncated, _ = env.step(next(own_actions))
                states.append(state)
                gains.append(reward)
                over = terminated or truncated
                remaining -= 1
            of_episode = oracle(gains, [value_of(state) for state in states], terminated)
            expected |= zip(map(tuple, states[:-1]), of_episode, strict=True)
        assert computed.keys() == expected.keys()
        assert len(computed) > 30
        for state in computed:
            assert computed[state] == pytest.approx(expected[state], abs=1e-5)


@every_backend
def test_training_advantages_equal_those_of_separate_episodes(backend, tmp_path, monkeypatch):
    """The update receives, over several rollouts, what a plain loop over one environment gives.

    The room is always the same, so the recorded actions can be replayed; the values are those of
    the agent that acted. The logged episodes are those of the replay too: reset steps count in
    neither returns nor lengths.
    """
    script = PRPO_MINIGRID
    acted = notes_of(monkeypatch, script.Envs, "step", lambda envs, actions: actions.copy())
    batches = {}
    policies = {}
    update = script.update

    def record_batch(agent, optimizer, generator, batch, *rest):
        samples = {name: tensor.clone() for name, tensor in batch.items()}
        samples["obs"] = batch["obs"][batch["obs_inds"]]
        batches.setdefault(id(agent), []).append(samples)
        policies.setdefault(id(agent), []).append(copy.deepcopy(agent))
        return update(agent, optimizer, generator, batch, *rest)

    script.patch(monkeypatch, "update", record_batch)
    monkeypatch.setattr(torch, "randperm", lambda number, generator=None: torch.arange(number))
    shape = {
        "num_agents": 2,
        "num_envs": 4,
        "num_steps": 50,
        "update_epochs": 1,
        "num_minibatches": 1,
    }
    changes = {
        "env_id": "MiniGrid-Empty-5x5-v0",
        "total_timesteps": 5 * 4 * 50,
        "save_every": 9,
        "eval_episodes": 0,
    }
    args = tiny(
        script, tmp_path, env_backend=backend, gamma=GAMMA, gae_lambda=LAMBDA, **shape | changes
    )
    script.main(args)
    actions = np.array(acted).reshape(5, args.num_steps, args.num_agents, args.num_envs)
    assert [len(samples) for samples in batches.values()] == [5, 5]  # of each agent

    ends = Counter()
    rows = rows_of(only_run(tmp_path))
    for i, (samples, agents) in enumerate(zip(batches.values(), policies.values(), strict=True)):
        envs = [script.make_env(args.env_id) for _ in range(args.num_envs)]
        states = [env.reset()[0] for env in envs]
        overs = [False] * args.num_envs
        totals = [0.0] * args.num_envs
        lengths = [0] * args.num_envs
        for iteration, (batch, agent) in enumerate(zip(samples, agents, strict=True)):
            expected = {}  # (step, env) -> observation, action, advantage, value
            ended = []  # (return, length)
            for k, env in enumerate(envs):
                episodes = [[]]
                for step in range(args.num_steps):
                    if overs[k]:
                        states[k], _ = env.reset()
                        overs[k] = False
                        episodes.append([])
                        continue
                    action = actions[iteration, step, i, k]
                    after, reward, terminated, truncated, _ = env.step(action)
                    episodes[-1].append((step, states[k], action, reward, after, terminated))
                    states[k] = after
                    overs[k] = terminated or truncated
                    ends.update(terminated=terminated, truncated=truncated)
                    totals[k] += reward
                    lengths[k] += 1
                    if overs[k]:
                        ends["in the last step of a rollout"] += step == args.num_steps - 1
                        ended.append((totals[k], lengths[k]))
                        totals[k] = 0.0
                        lengths[k] = 0
                for episode in filter(None, episodes):
                    path = np.stack([obs for _, obs, *_ in episode] + [episode[-1][4]])
                    with torch.no_grad():
                        values = agent(torch.from_numpy(path))[1].double().tolist()
                    advantages = oracle(
                        [reward for *_, reward, _, _ in episode], values, episode[-1][5]
                    )
                    for (step, obs, action, *_), advantage, value in zip(
                        episode, advantages, values[:-1], strict=True
                    ):
                        expected[step, k] = obs, action, advantage, value
            obs, action, advantages, values = zip(
                *(expected[key] for key in sorted(expected)), strict=True
            )
            assert np.array_equal(batch["obs"].numpy(), np.stack(obs))
            assert np.array_equal(batch["actions"].numpy(), np.stack(action))
            torch.testing.assert_close(batch["values"], torch.tensor(values), rtol=0, atol=1e-5)
            torch.testing.assert_close(
                batch["advantages"], torch.tensor(advantages), rtol=0, atol=1e-5
            )
            torch.testing.assert_close(batch["returns"], batch["advantages"] + batch["values"])
            row = rows[iteration * args.num_agents + i]
            assert int(float(row["episodes"])) == len(ended)
            logged = float(row["episodic_return"]), float(row["episodic_length"])
            assert logged == pytest.approx(
                tuple(np.mean(ended or [(np.nan, np.nan)], axis=0)), rel=1e-4, nan_ok=True
            )
    assert ends["terminated"] > 3
    assert ends["truncated"] > 3
    assert ends["in the last step of a rollout"] > 0


def first_episodes(env_id, backend, number):
    """One episode of a random policy in each of `number` environments.

    Returns lengths, returns and truncated [number] and the codes of each channel.
    """
    args = PRPO_MINIGRID.Args(
        env_id=env_id, num_agents=1, num_envs=number, env_backend=backend, seed=7
    )
    envs = PRPO_MINIGRID.make_envs(args, 0)
    generator = np.random.default_rng(7)
    lengths = np.zeros(number)
    returns = np.zeros(number)
    truncated = np.zeros(number, dtype=bool)
    running = np.ones(number, dtype=bool)
    codes = [set(), set(), set()]
    while running.any():
        for channel, seen in enumerate(codes):
            seen.update(np.unique(envs.obs[running][..., channel]).tolist())
        rewards, terminations, truncations, *_ = envs.step(generator.integers(7, size=number))
        lengths += running
        returns += rewards * running
        truncated |= truncations & running
        running &= ~(terminations | truncations)
    assert envs.obs.dtype == np.uint8
    assert envs.obs.shape == (number, 7, 7, 3)
    envs.close()
    return lengths, returns, truncated, codes


@needs_envpool
@pytest.mark.parametrize(
    "env_id",
    ["MiniGrid-FourRooms-v0", pytest.param("MiniGrid-DoorKey-6x6-v0", marks=pytest.mark.slow)],
)
def test_envpool_and_official_environments_agree_statistically(env_id):
    """For a random policy: means within four standard errors, and the same codes."""
    *official, official_codes = first_episodes(env_id, "gymnasium", 100)
    *pooled, pooled_codes = first_episodes(env_id, "envpool", 400)
    for ours, theirs in zip(pooled, official, strict=True):
        spread = np.concatenate((ours, theirs)).std() + 1e-9
        standard_error = spread * np.sqrt(1 / len(ours) + 1 / len(theirs))
        assert abs(ours.mean() - theirs.mean()) <= 4 * standard_error
    assert pooled_codes == official_codes
    assert pooled[0].max() == official[0].max()  # the time limit


def doors_into_walls(env_id, backend):
    """Open doors that a random policy sees with all four neighbours.

    Returns their number, and how many of them have a wall on both axes.
    """
    args = PRPO_MINIGRID.Args(env_id=env_id, num_agents=1, num_envs=64, env_backend=backend, seed=7)
    envs = PRPO_MINIGRID.make_envs(args, 0)
    generator = np.random.default_rng(7)
    counts = np.zeros(2, dtype=int)
    for _ in range(120):
        seen = envs.obs[..., 0] > 0
        wall = envs.obs[..., 0] == 2
        inner = np.s_[:, 1:-1, 1:-1]
        pairs = (
            (np.s_[:, :-2, 1:-1], np.s_[:, 2:, 1:-1]),
            (np.s_[:, 1:-1, :-2], np.s_[:, 1:-1, 2:]),
        )
        doors = (envs.obs[..., 0] == 4)[inner] & np.all(
            [seen[side] for pair in pairs for side in pair], axis=0
        )
        blocked = np.all([wall[one] | wall[other] for one, other in pairs], axis=0)
        counts += doors.sum(), (doors & blocked).sum()
        envs.step(generator.choice([0, 1, 2, 2, 5, 5], size=64))
    envs.close()
    return counts


@needs_envpool
def test_doors_lead_somewhere():
    """In envpool's MultiRoom some do not, so it is never chosen.

    If this test fails, it may be usable again.
    """
    task = "MiniGrid-MultiRoom-N2-S4-v0"
    doors, blocked = doors_into_walls(task, "gymnasium")
    assert doors > 50
    assert blocked == 0
    doors, blocked = doors_into_walls(task, "envpool")
    assert doors > 50
    assert blocked > 0.1 * doors
    assert PRPO_MINIGRID.choose_backend(PRPO_MINIGRID.Args(env_id=task)) == "gymnasium"
    assert (
        PRPO_MINIGRID.choose_backend(PRPO_MINIGRID.Args(env_id="MiniGrid-KeyCorridorS3R2-v0"))
        == "envpool"
    )
    with pytest.raises(SystemExit, match=f"--env-backend envpool.* no usable {task}"):
        PRPO_MINIGRID.check_envs(PRPO_MINIGRID.Args(env_id=task, env_backend="envpool"))


@needs_envpool
@pytest.mark.parametrize(
    ("env_id", "kind", "column"),
    [("MiniGrid-ObstructedMaze-1Dlh-v0", 7, 1), ("BabyAI-ActionObjDoor-v0", 4, 2)],
)
def test_boxes_and_doors_are_those_of_minigrid(env_id, kind, column):
    """In envpool boxes are blue in place of grey, and doors locked: it is never chosen there.

    If this test fails, it may be usable again.
    """

    def list_codes(backend):
        args = PRPO_MINIGRID.Args(
            env_id=env_id, num_agents=1, num_envs=60, env_backend=backend, seed=7
        )
        envs = PRPO_MINIGRID.make_envs(args, 0)
        codes = envs.obs.reshape(-1, 3)
        envs.close()
        return set(codes[codes[:, 0] == kind][:, column].tolist())

    assert list_codes("gymnasium") != list_codes("envpool")
    assert PRPO_MINIGRID.choose_backend(PRPO_MINIGRID.Args(env_id=env_id)) == "gymnasium"


def test_babyai_prints_no_rejected_layouts(capsys):
    env = PRPO_MINIGRID.make_env("BabyAI-PickupLoc-v0")
    for seed in range(20):
        env.reset(seed=seed)
    assert capsys.readouterr().out == ""


@every_backend
def test_a_goal_on_the_last_allowed_step_is_a_termination(backend):
    """The official environment reports both, envpool a truncation only, which would bootstrap."""
    args = PRPO_MINIGRID.Args(
        env_id="MiniGrid-Empty-5x5-v0", num_agents=1, num_envs=2, env_backend=backend
    )
    envs = PRPO_MINIGRID.make_envs(args, 0)
    ends = []
    turn = 1
    forward = 2
    wait = 6
    for action in [wait] * 95 + [forward, forward, turn, forward, forward]:
        rewards, terminations, truncations, _, episodes = envs.step(np.array([action, wait]))
        ends.append((terminations | truncations).tolist())
    envs.close()
    assert ends == [[False, False]] * 99 + [[True, True]]
    assert rewards[0] == pytest.approx(0.1)
    assert rewards[1] == 0
    assert terminations.tolist() == [True, False]
    assert truncations[1]
    assert episodes == [(pytest.approx(0.1), 100), (0, 100)]


class StepCost(gym.Wrapper):
    """Every step costs 0.1, so that the last reward before a time limit is not 0."""

    def step(self, action):
        obs, reward, *ends, info = self.env.step(action)
        return obs, reward - 0.1, *ends, info


def test_a_time_limit_with_a_cost_per_step_keeps_its_bootstrap(tmp_path, monkeypatch):
    """On gymnasium a truncation stays one whatever its reward.

    Its advantage contains the value of the next state.
    """
    script = PRPO_MINIGRID
    make = script.make_env
    steps = []
    script.patch(monkeypatch, "make_env", lambda *key, **more: StepCost(make(*key, **more)))
    gae = script.compute_advantages

    def record(data, *factors):
        advantages = gae(data, *factors)
        steps.append(data | {"advantages": advantages})
        return advantages

    script.patch(monkeypatch, "compute_advantages", record)
    changes = {
        "env_id": "MiniGrid-Empty-5x5-v0",
        "env_backend": "gymnasium",
        "num_agents": 2,
        "iterations": 4,
    }
    script.main(tiny(script, tmp_path, **changes, eval_episodes=0, local_updates=9, gamma=GAMMA))
    names = "rewards", "terminations", "dones", "values", "next_values", "advantages"
    rewards, terminations, dones, values, next_values, advantages = (
        torch.cat([data[name] for data in steps]) for name in names
    )
    truncated = dones & ~terminations
    assert truncated.sum() >= 4
    assert torch.allclose(rewards[truncated], torch.tensor(-0.1))
    assert (next_values[truncated] != 0).all()
    expected = (rewards + GAMMA * next_values - values)[truncated]
    torch.testing.assert_close(advantages[truncated], expected)
    assert torch.allclose(rewards[terminations], rewards[terminations].clamp(min=0.0))
    assert terminations.sum() >= 1


@needs_envpool
def test_envpool_and_official_environments_agree_step_by_step():
    """DistShift2 has one level, so equal actions give equal observations, rewards and ends."""
    both = []
    script = PRPO_MINIGRID
    for backend in BACKENDS:
        args = script.Args(
            env_id="MiniGrid-DistShift2-v0", num_agents=2, num_envs=8, env_backend=backend
        )
        both.append(script.make_envs(args, 1))
    official, pooled = both
    assert np.array_equal(official.obs, pooled.obs)
    assert official.obs.shape == (8, 7, 7, 3)
    generator = np.random.default_rng(3)
    totals = np.zeros(3)
    for _ in range(600):
        actions = generator.choice(7, p=[0.2, 0.2, 0.5, 0.02, 0.02, 0.03, 0.03], size=8)
        actions[:2] %= 2  # these only turn, up to the time limit
        *expected, episodes = official.step(actions)
        *results, episodes_of_pool = pooled.step(actions)
        for ours, theirs in zip([pooled.obs, *results], [official.obs, *expected], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
        episodes_of_pool = np.array(episodes_of_pool)
        np.testing.assert_allclose(episodes_of_pool, np.array(episodes), rtol=0, atol=1e-5)
        totals += [array.sum() for array in expected[:3]]
    assert (totals > 0).all()  # goals, ends and time limits were all among them


def place(env, obs):
    """Put an environment of gymnasium into the state that an observation shows.

    The place along the track, which it does not show, is 0.
    """
    model = env.unwrapped.model
    hidden = model.nq + model.nv - len(obs)
    state = np.concatenate((np.zeros(hidden), obs.astype(float)))
    env.unwrapped.set_state(state[: model.nq], state[model.nq :])


@needs_envpool
@pytest.mark.parametrize("env_id", sorted(PRPO_MUJOCO.ENVPOOL_IDS))
def test_envpool_and_gymnasium_have_the_same_bodies(env_id):
    """From the same states equal actions, some of them beyond the bounds, lead to equal
    observations, rewards and ends; the step after an end ignores its action.

    Small differences grow, so gymnasium's environment is put beside envpool's every few steps.
    """
    script = PRPO_MUJOCO
    is_cheetah = env_id == "HalfCheetah-v5"
    args = script.Args(env_id=env_id, num_agents=2, num_envs=2, env_backend="envpool")
    envs = script.Envs(args, range(1, 2), 0)
    peers = [script.make_env(env_id) for _ in range(2)]
    for peer, obs in zip(peers, envs.obs[0], strict=True):
        peer.reset(seed=1)
        place(peer, obs)
    generator = np.random.default_rng(3)
    total = np.zeros(2)
    length = np.zeros(2)
    ended = np.zeros(2, dtype=bool)
    kinds = Counter()
    for step in range(1010):
        actions = generator.uniform(-1.5, 1.5, (1, 2, *peers[0].action_space.shape))
        actions = actions.astype(np.float32)
        before = envs.obs[0].copy()
        rewards, terminations, truncations, valid, episodes = envs.step(actions)
        expected_episodes = []
        for e, peer in enumerate(peers):
            if ended[e]:
                assert not valid[0, e]
                assert rewards[0, e] == 0.0
                assert not (terminations[0, e] or truncations[0, e])
                peer.reset()
                place(peer, envs.obs[0, e])
                total[e] = length[e] = ended[e] = 0
                continue
            assert valid[0, e]
            # All but the cheetah's speeds are shown as 10 at most
            if step % 5 == 0 and (is_cheetah or np.abs(before[e]).max() < 10):
                place(peer, before[e])
            obs, reward, terminated, truncated, _ = peer.step(actions[0, e].clip(-1, 1))
            np.testing.assert_allclose(envs.obs[0, e], obs, rtol=0.02, atol=0.02)
            assert rewards[0, e] == pytest.approx(reward, rel=0.01, abs=0.01)
            assert (terminations[0, e], truncations[0, e]) == (terminated, truncated)
            total[e] += reward
            length[e] += 1
            ended[e] = terminated or truncated
            kinds["terminated"] += terminated
            kinds["truncated"] += truncated
            if ended[e]:
                expected_episodes.append((0, pytest.approx(total[e], rel=0.01), length[e]))
        assert episodes == expected_episodes
    envs.close()
    # A cheetah does not fall, the others do not stand for long
    if is_cheetah:
        assert kinds == {"terminated": 0, "truncated": 2}
    else:
        assert kinds["terminated"] > 20
    limit = importlib.import_module("envpool").make_spec(env_id).config.max_episode_steps
    assert limit == gym.spec(env_id).max_episode_steps


@needs_envpool
@pytest.mark.parametrize("env_id", sorted(PRPO_MUJOCO.ENVPOOL_IDS))
def test_envpool_and_gymnasium_begin_episodes_alike(env_id):
    """The first observations of a hundred episodes have the same mean and spread."""
    script = PRPO_MUJOCO
    starts = []
    for backend in BACKENDS:
        args = script.Args(env_id=env_id, num_agents=1, num_envs=100, env_backend=backend)
        envs = script.Envs(args, range(1), 0)
        starts.append(envs.obs[0].astype(float))
        envs.close()
    of_gymnasium, of_envpool = starts
    spreads = of_gymnasium.std(0)
    assert (spreads > 1e-3).all()
    difference = of_envpool.mean(0) - of_gymnasium.mean(0)
    assert (np.abs(difference) < 5 * spreads * np.sqrt(2 / 100)).all()
    np.testing.assert_allclose(of_envpool.std(0), spreads, rtol=0.35)
    # Uniform places, and speeds that are Gaussian for the cheetah only
    farthest = [np.abs(obs - obs.mean(0)).max(0) / spreads for obs in starts]
    np.testing.assert_allclose(farthest[1], farthest[0], rtol=0.5)


@needs_envpool
def test_auto_takes_envpool_where_it_was_compared():
    script = PRPO_MUJOCO
    for env_ids, backend in (
        (("Hopper-v5", "Hopper-v5"), "envpool"),
        (("Walker2d-v5", "HalfCheetah-v5"), "envpool"),
        (("Hopper-v5", "Hopper-v4"), "gymnasium"),
        (("Ant-v5", "Ant-v5"), "gymnasium"),
    ):
        assert script.choose_backend(script.Args(num_agents=2, env_ids=env_ids)) == backend
    args = script.Args(env_id="Hopper-v5", env_backend="gymnasium")
    assert script.choose_backend(args) == "gymnasium"


def walk(script, args, agents, checkpoint=0):
    """The observations of a fixed sequence of actions as bytes [agents][environments]."""
    steps = {"MiniGrid": 250, "Atari": 170, "MuJoCo": 40}[script.family]
    envs = script.Envs(args, agents, checkpoint)
    frames = [envs.obs.copy()]
    for action in np.random.default_rng(0).choice(4, p=[0.25, 0.2, 0.45, 0.1], size=steps):
        actions = np.full((len(agents), args.num_envs), action)
        if script.family == "MuJoCo":
            actions = np.repeat(actions[..., None] / 2 - 1, script.num_actions, axis=-1)
        envs.step(actions)
        frames.append(envs.obs.copy())
    envs.close()
    shown = np.stack(frames, axis=2)
    return [[frames.tobytes() for frames in of_agent] for of_agent in shown]


TASKS = {
    "MiniGrid": ("MiniGrid-FourRooms-v0", "MiniGrid-FourRooms-v0", "MiniGrid-DoorKey-6x6-v0"),
    "Atari": ("BreakoutNoFrameskip-v4", "BreakoutNoFrameskip-v4", "PongNoFrameskip-v4"),
    "MuJoCo": ("Hopper-v5", "Hopper-v5", "Hopper-v5"),
}


@pytest.mark.parametrize(
    ("script", "changes"),
    [
        *((PRPO_MINIGRID, {"env_backend": backend}) for backend in BACKENDS),
        *((PRPO_MUJOCO, {"env_backend": backend}) for backend in BACKENDS),
        pytest.param(PRPO_ATARI, {"sticky_actions": False}, marks=pytest.mark.slow),
        pytest.param(PRPO_ATARI, {"sticky_actions": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_agents_environments_depend_on_its_own_seeds_only(script, changes):
    """Levels or games, resets included, do not depend on which others share the pool.

    Another agent, another of its environments, another seed or checkpoint gives others.
    """
    args = script.Args(env_ids=TASKS[script.family], num_envs=2, **changes)
    together = walk(script, args, range(3))
    for i in range(3):
        assert walk(script, args, range(i, i + 1)) == together[i : i + 1]
    assert walk(script, replace(args, num_envs=1), range(3)) == [envs[:1] for envs in together]
    others = [walk(script, replace(args, seed=2), range(2)), walk(script, args, range(2), 5)]
    histories = [env for run in (together[:2], *others) for agent in run for env in agent]
    assert len(histories) == 12
    if script.family != "Atari" or args.sticky_actions:
        assert len(set(histories)) == 12
    else:  # only the 30 possible beginnings distinguish games
        assert len(set(histories)) > 4


# --- other observations ---

OBSERVATIONS_BEGIN = (
    "# --- observations and network: what another kind of observation changes ---\n"
)


@pytest.fixture
def cartpole(tmp_path, monkeypatch):
    """The copy of prpo_minigrid.py that its page describes, as a module."""
    page = (REPOSITORY / "docs" / "prpo_minigrid.md").read_text()
    (block,) = re.findall(r"### Other observations\n.*?```python\n(.*?)```", page, re.S)
    assert OBSERVATIONS_BEGIN.strip() in " ".join(page.split())
    head, rest = (REPOSITORY / "prpo_minigrid.py").read_text().split(OBSERVATIONS_BEGIN)
    _, tail = rest.split("def make_agents")
    copied = f"{head}{OBSERVATIONS_BEGIN}\n{block}\n\ndef make_agents{tail}"
    name = "prpo_cartpole"
    (tmp_path / f"{name}.py").write_text(copied)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)


def test_the_page_s_copy_learns_from_other_observations(cartpole, tmp_path, monkeypatch):
    """CartPole-v1, whose return is its length; the page's command, shortened."""
    page = (REPOSITORY / "docs" / "prpo_minigrid.md").read_text()
    (command,) = re.findall(r"python prpo_cartpole.py (.*)", page)
    shorter = "--total-timesteps 10240 --num-agents 2 --eval-episodes 4 --local-updates 2 --run-dir"
    argv = [*command.split(), *shorter.split(), str(tmp_path / "runs")]
    args = communicators.parse_args(cartpole.Args, cartpole.check_args, argv)
    batches = notes_of(monkeypatch, cartpole, "update", lambda *inputs: inputs[3])
    summary = cartpole.main(args)
    folder = only_run(tmp_path / "runs")
    rows = rows_of(folder)
    assert summary["env_backend"] == "gymnasium"
    assert summary["diverged"] == []
    assert len(rows) == len(batches) == 2 * 20
    for row, batch in zip(rows, batches, strict=True):
        assert float(row["episodic_return"]) == float(row["episodic_length"]) > 9
        # Beyond these an episode is over, whose last observation is not learned from
        samples = batch["obs"][batch["obs_inds"]]
        assert samples.dtype == torch.float32
        assert samples[:, 0].abs().max() <= 2.4
        assert samples[:, 2].abs().max() <= 0.2095
        # A step that only resets an environment follows, maybe in the next rollout
        assert abs(len(samples) + float(row["episodes"]) - 512) <= args.num_envs
    for agent in range(2):
        first, *_, last = (float(row["return_last_100"]) for row in rows[agent::2])
        assert last > 1.3 * first
    entries = np.genfromtxt(folder / "communicator.csv", delimiter=",", names=True)
    assert np.nanmax(entries["distance"]) > 0  # agents have exchanged networks, and compare them
    states = cartpole.collect_public_states(args)
    assert states.shape == (512, 4)
    assert states.dtype == torch.float32
    for result in summary["evaluation"]["agents"]:
        assert 9 < result["CartPole-v1"]["mean"] <= 500


def test_the_page_s_copy_refuses_the_observations_of_minigrid(cartpole):
    argv = ["--env-id", "MiniGrid-Empty-5x5-v0"]
    message = refusal(communicators.parse_args, cartpole.Args, cartpole.check_args, argv)
    assert "--env-id MiniGrid-Empty-5x5-v0" in message
    assert "shows no 4 array (float32), but dict" in message
    assert message.endswith('see "Other observations" in docs/prpo_minigrid.md')
