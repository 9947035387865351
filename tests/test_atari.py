"""Atari: the environments step by step against the usual wrappers, whole games, the network in blocks, CUDA graphs."""

import contextlib
import shutil
from collections import Counter

import gymnasium as gym
import numpy as np
import pytest
import torch
from crash import crash
from helpers import (
    ATARI,
    MINIGRID,
    PRPO_ATARI,
    PRPO_MINIGRID,
    assert_same_run,
    evaluations_of,
    every_script,
    on_atari,
    on_minigrid,
    only_run,
    rows_of,
    scalars_of,
    tiny,
    weights_of,
)

GAME = "BreakoutNoFrameskip-v4"


def frames_of(obs):
    """Blocks [21, 21, 64] -> the last four frames [4, 84, 84], written out."""
    blocks = np.asarray(obs).reshape(21, 21, 4, 4, 4)  # row, column, frame, row in the block, column in the block
    return np.stack([np.block([[blocks[y, x, k] for x in range(21)] for y in range(21)]) for k in range(4)])


def shrink(frame):
    cv2 = pytest.importorskip("cv2")
    return cv2.resize(frame, (84, 84), interpolation=cv2.INTER_AREA)


# --- the environments ---


class Spy:
    """A vector environment that keeps what it told last."""

    def __init__(self, envs, info):
        self.envs, self.info = envs, info

    def __getattr__(self, name):
        return getattr(self.envs, name)

    def step(self, actions):
        *results, self.info = self.envs.step(actions)
        return *results, self.info


def reference_game(env_id, obs_type="grayscale"):
    """A game in gymnasium: (inside stable-baselines3's wrappers but for the frame's size, the one that starts it)."""
    wrappers = pytest.importorskip("stable_baselines3.common.atari_wrappers")
    env = start = wrappers.NoopResetEnv(gym.wrappers.RecordEpisodeStatistics(gym.make(env_id, obs_type=obs_type)))
    env = wrappers.EpisodicLifeEnv(wrappers.MaxAndSkipEnv(env, 4))
    if "FIRE" in env.unwrapped.get_action_meanings():
        env = wrappers.FireResetEnv(env)
    return wrappers.ClipRewardEnv(env), start


@pytest.mark.parametrize(
    ("env_id", "games", "lives", "most"),
    [
        ("BreakoutNoFrameskip-v4", 2, 4, 1),
        ("BeamRiderNoFrameskip-v4", 1, 2, 44),
        ("SeaquestNoFrameskip-v4", 1, 3, 20),
        ("QbertNoFrameskip-v4", 2, 3, 25),
        ("PongNoFrameskip-v4", 1, 0, 1),
    ],
)
def test_pool_equals_the_usual_wrappers_step_by_step(env_id, games, lives, most):
    """The same actions give the same frames, rewards, episodes and whole games as gymnasium's and other people's code.

    The frames are those of a reference that takes the brighter of two *grey* frames (see the next test). The number of
    no-ops is drawn here from 0-29 and in stable-baselines3 from 1-30; the reference is given what was drawn. Steps that
    the wrappers take by themselves are the ones that are not valid; their score counts in the game.
    """
    args = PRPO_ATARI.Args(env_id=env_id)
    pool, seen, highest = PRPO_ATARI.Pool(args, env_id, [5]), Counter(), 0.0
    env, start = reference_game(env_id)
    pool.envs = Spy(pool.envs, pool.envs.reset(seed=np.array([5]))[1])  # equal seeds: the same game again
    generator, obs = np.random.default_rng(0), pool.obs
    while seen["games"] < games:
        start.override_num_noops = int(pool.envs.info["episode_frame_number"][0])
        assert start.override_num_noops > 0  # none would be fine, but the reference asks for one
        frame, _ = env.reset()
        total, finished = 0.0, False
        while not finished:
            # What the wrappers did in `reset`: the action here does not matter
            for _ in range(len(pool.buttons)):
                if pool.countdown[0] == 0:
                    break
                obs, *_, scores, finished, valid = pool.step(generator.integers(3, size=1))
                assert not valid[0] and not finished[0]
                total, seen["forced"] = total + scores[0], seen["forced"] + 1
            assert np.array_equal(frames_of(obs[0])[-1], shrink(frame))
            ended = False
            while not ended:
                action = generator.integers(pool.envs.single_action_space.n, size=1)
                previous = frames_of(obs[0])
                obs, rewards, terminations, truncations, scores, finished, valid = pool.step(action)
                frame, reward, terminated, truncated, info = env.step(action[0])
                assert valid[0] and (rewards[0], terminations[0], truncations[0]) == (reward, terminated, truncated)
                frames = frames_of(obs[0])
                assert np.array_equal(frames[:3], previous[1:])
                assert finished[0] or np.array_equal(frames[3], shrink(frame))  # a game's last frame is not used
                total, highest, ended = total + scores[0], max(highest, abs(scores[0])), terminated or truncated
            seen["lives"] += not finished[0]
            if not finished[0]:
                frame, _ = env.reset()
        assert total == info["episode"]["r"]
        seen["games"] += 1
        obs, *_, scores, finished, valid = pool.step(action)  # a new game begins
        assert not valid[0] and not finished[0] and scores[0] == 0
    pool.close()
    assert seen["lives"] == games * lives and highest >= most
    assert seen["forced"] == games * len(pool.buttons[2:]) + seen["lives"] * (len(pool.buttons) - 1)


def test_frames_are_close_to_those_of_stable_baselines3():
    """ale-py takes the brighter of two grey frames, stable-baselines3 greys the brighter of two in colour."""
    cv2, env_id = pytest.importorskip("cv2"), "BeamRiderNoFrameskip-v4"
    pool = PRPO_ATARI.Pool(PRPO_ATARI.Args(env_id=env_id), env_id, [5])
    env, start = reference_game(env_id, obs_type="rgb")
    start.override_num_noops = int(pool.envs.reset(seed=np.array([5]))[1]["frame_number"][0])
    env.reset()
    while pool.countdown[0]:
        pool.step(np.zeros(1, dtype=int))
    worst, generator = [], np.random.default_rng(1)
    for action in generator.integers(9, size=100):
        obs, *_ = pool.step(np.array([action]))
        frame, *_ = env.step(action)
        grey = shrink(cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY)).astype(int)
        worst.append(np.abs(frames_of(obs[0])[-1] - grey).max())
    assert 0 < max(worst) <= 40 and np.median(worst) <= 10
    pool.close()


@pytest.mark.parametrize("fire", [True, False])
def test_forced_steps_follow_lives_and_games(fire, monkeypatch):
    """A made-up game: when buttons are pressed by themselves, which steps are episodes' ends, and which are valid.

    As in Qbert, the game may linger at no lives before it ends; as in BeamRider, lives can be won.
    """
    lives = [
        3,
        3,
        3,
        3,
        2,
        2,
        2,
        2,
        2,
        3,
        1,
        1,
        1,
        1,
        0,
        0,
        3,
        3,
        3,
        3,
    ]  # after each step; the game ends at the second 0
    pressed = []

    class Game(Spy):
        def __init__(self, *game, **options):
            actions = PRPO_ATARI.ale_py.Action
            self.ale = self
            self.get_action_set = lambda: [actions.NOOP, *[actions.FIRE] * fire, actions.RIGHT, actions.LEFT]

        def told(self, count):
            return np.zeros((1, 4, 84, 84), dtype=np.uint8), {"lives": np.array([count])}

        def reset(self, seed):
            return self.told(3)

        def step(self, actions):
            pressed.append(int(actions[0]))
            obs, info = self.told(lives[len(pressed) - 1])
            return obs, np.array([-7.0]), np.array([len(pressed) == 16]), np.array([False]), info

    monkeypatch.setattr(PRPO_ATARI.module, "AtariVectorEnv", Game)
    pool = PRPO_ATARI.Pool(PRPO_ATARI.Args(), GAME, [1])
    results = [pool.step(np.array([9])) for _ in lives]
    _, rewards, terminations, truncations, scores, finished, valid = zip(*results, strict=True)
    assert np.flatnonzero(terminations).tolist() == [4, 10, 15] and np.flatnonzero(finished).tolist() == [15]
    assert not np.any(truncations) and set(np.ravel(rewards)) == {-1.0} and set(np.ravel(scores)) == {-7.0}
    if fire:
        expected = [1, 2, 9, 9, 9, 0, 1, 2, 9, 9, 9, 0, 1, 2, 9, 9, "reset", 1, 2, 9]
    else:
        expected = [9, 9, 9, 9, 9, 0, 9, 9, 9, 9, 9, 0, 9, 9, 9, 9, "reset", 9, 9, 9]
    assert [button for button, wanted in zip(pressed, expected, strict=True) if wanted != "reset"] == [
        wanted for wanted in expected if wanted != "reset"
    ]
    assert np.ravel(valid).tolist() == [wanted == 9 for wanted in expected]


@on_atari
def test_a_time_limit_is_a_truncation(script, monkeypatch):
    """It ends the game, and is no termination, although lives are left; evaluation ends there too."""
    make = script.AtariVectorEnv
    limited = {"max_num_frames_per_episode": 200}
    monkeypatch.setattr(script.module, "AtariVectorEnv", lambda *game, **options: make(*game, **options | limited))
    pool, ends = script.Pool(script.Args(env_id=GAME), GAME, [1, 2]), []
    for step in range(1, 121):
        _, _, terminations, truncations, _, finished, valid = pool.step(np.zeros(2, dtype=int))
        if truncations[0]:
            assert finished[0] and valid[0] and not terminations[0] and pool.lives[0] > 0
            ends.append(step)
            assert not pool.step(np.zeros(2, dtype=int))[-1][0]
    assert len(ends) == 2 and 40 <= ends[0] <= 50  # of four frames each, some of which were no-ops
    assert script.evaluate(tiny(script, ""), script.new_agent(), GAME, [1, 2], 0).shape == (2,)


@on_atari
def test_reported_games_are_whole_and_unclipped(script, tmp_path, monkeypatch):
    """metrics.csv adds up scores, not what is learned from, until the game ends, not a life."""
    told, step_envs = [], script.step_envs

    def tell(pools, actions):
        *results, scores, finished, valid = step_envs(pools, actions)
        scores = scores * 10 + 0.5
        told.append((results[2].copy(), scores, finished.copy(), valid.copy()))
        return *results, scores, finished, valid

    monkeypatch.setattr(script.module, "step_envs", tell)
    changes = {"num_agents": 2, "num_steps": 220, "save_every": 9, "iterations": 2, "eval_episodes": 0}
    script.main(tiny(script, tmp_path, communicator="identity", **changes))
    steps, lives = iter(told), 0
    totals, lengths = np.zeros(4), np.zeros(4)
    rows = rows_of(only_run(tmp_path))
    for iteration in range(2):
        games = [[], []]
        for _ in range(220):
            terminations, scores, finished, valid = next(steps)
            totals, lengths, lives = totals + scores, lengths + valid, lives + (terminations & ~finished).sum()
            for k in np.flatnonzero(finished):
                games[k // 2].append((totals[k], lengths[k]))
                totals[k] = lengths[k] = 0.0
        for i, own in enumerate(games):
            row = rows[2 * iteration + i]
            assert (row["iteration"], row["agent"], float(row["episodes"])) == (str(iteration + 1), str(i), len(own))
            logged = float(row["episodic_return"]), float(row["episodic_length"])
            assert logged == pytest.approx(tuple(np.mean(own or [(np.nan, np.nan)], axis=0)), rel=1e-4, nan_ok=True)
    assert lives > 10 and float(rows[-1]["episodes"]) + float(rows[0]["episodes"]) > 1


def history(script, seeds, env_id=GAME, **changes):
    """What 150 fixed random actions lead to: frames, rewards, ends."""
    pool = script.Pool(script.Args(env_id=env_id, **changes), env_id, seeds)
    actions = np.random.default_rng(2).integers(4, size=(150, len(seeds)))
    results = [[array.copy() for array in pool.step(action)] for action in actions]
    pool.close()
    return [np.stack(column) for column in zip(*results, strict=True)]


def same(history, other):
    return all(np.array_equal(ours, theirs) for ours, theirs in zip(history, other, strict=True))


@on_atari
def test_sticky_actions(script):
    """With them the same actions do not always have the same effect; without them, equal seeds make equal games."""
    plain = history(script, [3, 4])
    assert same(plain, history(script, [3, 4]))
    sticky = history(script, [3, 4], sticky_actions=True)
    assert not same(sticky, plain) and same(sticky, history(script, [3, 4], sticky_actions=True))
    assert not same(sticky, history(script, [13, 14], sticky_actions=True))


@on_atari
def test_both_names_of_a_game_mean_the_same(script):
    """ALE/<Game>-v5 has other defaults in gymnasium; here it is <Game>NoFrameskip-v4."""
    assert same(history(script, [3, 4]), history(script, [3, 4], env_id="ALE/Breakout-v5"))


# --- the network ---


@on_atari
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_network_in_blocks_equals_the_plain_nature_network(script, precision):
    """Mnih et al.'s network as CleanRL writes it, with the same names and shapes of weights, on the plain frames."""
    torch.manual_seed(3)
    agent = script.new_agent(bfloat16=precision == "bfloat16")
    for parameter in agent.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, std=0.2)
    torch.nn.init.orthogonal_(agent.actor.weight)
    nn = torch.nn
    network = nn.Sequential(
        nn.Conv2d(4, 32, 8, stride=4), nn.ReLU(),
        nn.Conv2d(32, 64, 4, stride=2), nn.ReLU(),
        nn.Conv2d(64, 64, 3, stride=1), nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 512), nn.ReLU(),
    )  # fmt: skip
    plain = nn.ModuleDict({"network": network, "actor": nn.Linear(512, 4), "critic": nn.Linear(512, 1)})
    plain.load_state_dict(agent.state_dict())
    obs = torch.randint(0, 256, (5, 21, 21, 64), dtype=torch.uint8)
    frames = torch.from_numpy(np.stack([frames_of(own) for own in obs]))
    assert np.array_equal(script.Pool.blocks(frames.numpy()), obs.numpy())
    hidden = plain["network"](frames / 255.0)
    logits, values = agent(obs)
    tolerance = 1e-5 if precision == "float32" else 0.05
    torch.testing.assert_close(logits, plain["actor"](hidden), rtol=0, atol=tolerance)
    torch.testing.assert_close(values, plain["critic"](hidden)[:, 0], rtol=0, atol=tolerance)
    assert logits.std() > 0.1 and values.std() > 0.05
    # The gradient reaches the weights through the blocks
    (logits.sum() + values.sum()).backward()
    (plain["actor"](hidden).sum() + plain["critic"](hidden).sum()).backward()
    for name, parameter in plain.named_parameters():
        found = agent.get_parameter(name).grad
        assert (found - parameter.grad).norm() <= (1e-4 if precision == "float32" else 0.1) * parameter.grad.norm()


@every_script
def test_cuda_graph_follows_observations_and_weights(script, monkeypatch):
    """What is captured is replayed on each new observation, with the weights that lie where the old ones lay.

    CUDA is played by fakes: a replay computes again, from the very tensors and into the very tensors of the capture.
    """
    recorded = []

    class Fake:
        def __init__(self, *args):
            pass

        def __enter__(self):
            recorded.append("capture")

        def __exit__(self, *args):
            pass

        def wait_stream(self, stream):
            pass

        def replay(self):
            inputs, outputs = recorded[-1]
            for old, new in zip(outputs, script.Agent.stacked_forward(*inputs), strict=True):
                old.copy_(new)

    def policy(*inputs):
        outputs = script.Agent.stacked_forward(*inputs)
        if recorded:
            recorded.append((inputs, outputs))
        return outputs

    for name in ("Stream", "CUDAGraph", "graph", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Fake)
    warm = []

    def stream(side):
        warm.append(side)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "stream", stream)
    agents = [script.new_agent() for _ in range(2)]
    stacked = [[tensor.detach().clone() for tensor in pair] for pair in script.Agent.stack(agents)]
    with torch.no_grad():
        replay = script.capture(policy, stacked, script.random_obs(2, 3))
        assert len(warm) == 1 and len(recorded) == 2  # nothing of the warm-up was captured, and one forward was
        for _ in range(3):
            for pair in stacked:
                for tensor in pair:
                    tensor.add_(torch.randn_like(tensor) / 100)
            obs = script.random_obs(2, 3)
            expected = script.Agent.stacked_forward(stacked, obs)
            for found, wanted in zip(replay(stacked, obs), expected, strict=True):
                assert torch.equal(found, wanted)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_networks_learn_the_same(tmp_path):
    """--compile changes rounding only."""
    script, found = PRPO_MINIGRID, []
    for compile in (False, True):
        changes = {"num_agents": 1, "iterations": 3, "eval_episodes": 0, "compile": compile}
        script.main(tiny(script, tmp_path / str(compile), **changes))
        found.append(weights_of(only_run(tmp_path / str(compile)))[0])
    torch.testing.assert_close(*found, rtol=0, atol=1e-4)


# --- evaluation ---


@pytest.mark.parametrize("env_id", ["SeaquestNoFrameskip-v4"])
def test_evaluation_plays_whole_games_and_films_the_first(env_id, tmp_path, monkeypatch):
    """Unclipped scores of whole games, the same for equal seeds; the film shows the very game that was played."""
    cv2, moviepy = pytest.importorskip("cv2"), pytest.importorskip("moviepy")
    script, made, films = PRPO_ATARI, [], []

    class Recorded(script.Pool):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append((self, [], [self.obs]))

        def step(self, actions):
            obs, *results, scores, finished, valid = super().step(actions)
            made[-1][1].append(actions.copy())
            made[-1][2].append(obs)
            return obs, *results, scores + 1, finished, valid  # so that every step shows in the total

    class Clip:
        def __init__(self, frames, fps):
            films.append((frames, fps))

        def write_videofile(self, path, **options):
            films[-1] += (path,)

    monkeypatch.setattr(script.module, "Pool", Recorded)
    monkeypatch.setattr(moviepy, "ImageSequenceClip", Clip)
    torch.manual_seed(0)
    args, agent = tiny(script, tmp_path, env_id=env_id), script.Agent(18)
    scores = script.evaluate(args, agent, env_id, [3, 4], 5)
    assert np.array_equal(scores, script.evaluate(args, agent, env_id, [3, 4], 5)) and scores.max() > 10
    (_, actions, _), (_, again, _) = made
    assert np.array_equal(actions, again)
    for k, seed in enumerate([3, 4]):  # each game alone, with what was pressed in it
        pool, total, steps, finished = script.Pool(args, env_id, [seed]), 0.0, 0, [False]
        while not finished[0]:
            *_, gained, finished, _ = pool.step(actions[steps][k : k + 1])
            total, steps = total + gained[0], steps + 1
        assert total == scores[k]
        pool.close()

    alone = script.evaluate(args, agent, env_id, [3], 5)
    assert script.evaluate(args, agent, env_id, [3], 5, str(tmp_path / "videos" / "agent_0")) == alone
    *_, (_, actions, _), (_, again, seen) = made
    assert np.array_equal(actions, again)
    ((frames, fps, path),) = films
    assert (fps, path) == (15, str(tmp_path / "videos" / "agent_0.mp4"))
    assert len(frames) == len(actions) + 1 and all(frame.shape == (210, 160, 3) for frame in frames)
    differences = [
        np.abs(shrink(cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY)).astype(int) - frames_of(obs[0])[-1]).mean()
        for frame, obs in zip(frames, seen, strict=True)
    ]
    shifted = [np.abs(a.astype(int) - b).mean() for a, b in zip(frames[:-8], frames[8:], strict=True)]
    assert max(differences) < 1 < np.mean(shifted)


@pytest.mark.parametrize("scripts", [MINIGRID, ATARI], ids=["MiniGrid", "Atari"])
def test_public_states_are_public(scripts):
    """The same whenever, by whomever and in whatever run they are made: a function of the task alone."""
    first, second = scripts
    states = first.public_states(tiny(first, ""))
    assert states.dtype == torch.uint8 and states.shape[1:] == first.shape and len(states.unique(dim=0)) > 20
    np.random.seed(3)
    torch.manual_seed(3)
    assert torch.equal(states, first.public_states(tiny(first, "", seed=9, num_envs=4, num_agents=2)))
    assert torch.equal(states, second.public_states(tiny(second, "")))


@on_minigrid
def test_evaluations_during_training_change_nothing_and_survive_a_crash(script, whole_run, tmp_path):
    """Weights and metrics are those of a run without them; after a crash no row is missing and none is there twice.

    The crash leaves the evaluation of an iteration whose checkpoint is not complete.
    """

    class Crash(BaseException):
        pass

    def die():
        raise Crash

    script.main(tiny(script, tmp_path / "whole", eval_every=2))
    whole = only_run(tmp_path / "whole")
    assert_same_run(whole, whole_run(script), exactly=True)
    rows = evaluations_of(whole)
    assert [(row["iteration"], row["agent"]) for row in rows] == [(str(k), str(i)) for k in (2, 4, 6) for i in range(3)]
    assert rows[-3:] == evaluations_of(whole_run(script))

    with pytest.raises(Crash), crash(script.module, "complete", 0, 4, die):
        script.main(tiny(script, tmp_path / "crashed", eval_every=2))
    folder = only_run(tmp_path / "crashed")
    script.main(script.parse_args(["--resume", str(folder)]))
    assert evaluations_of(folder) == rows
    charts, expected = scalars_of(folder), scalars_of(whole)
    for tag in (tag for tag in expected if tag.startswith("eval/")):
        assert charts[tag] == expected[tag] and [step for step, _ in charts[tag]] == [256, 512, 768]


def test_evaluations_during_training_change_nothing_on_atari(tmp_path):
    """The same there, where evaluation uses the same kind of pool as training."""
    changes = {"num_agents": 1, "iterations": 2, "num_steps": 32, "communicator": "identity", "eval_episodes": 1}
    script = PRPO_ATARI
    for eval_every in (0, 1):
        script.main(tiny(script, tmp_path / str(eval_every), eval_every=eval_every, **changes))
    without, during = (only_run(tmp_path / name) for name in ("0", "1"))
    assert_same_run(during, without, exactly=True)
    assert [row["iteration"] for row in evaluations_of(during)] == ["1", "2"]
    assert evaluations_of(during)[1:] == evaluations_of(without)
