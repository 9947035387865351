"""Atari: environments against the usual wrappers, whole games, the network in blocks, stacked."""

import copy
import shutil
from collections import Counter
from types import SimpleNamespace

import cv2
import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn as nn
from helpers import (
    PRPO_ATARI,
    PRPO_MINIGRID,
    assert_same_run,
    every_family,
    only_run,
    resume,
    rows_of,
    scalars_of,
    table_of,
    tiny,
    train,
    weights_of,
)
from stable_baselines3.common import atari_wrappers as wrappers

from benchmark import play

GAME = "BreakoutNoFrameskip-v4"


def frames_of(obs):
    """Blocks [21, 21, 64] -> the last four frames [4, 84, 84], written out."""
    # Row, column, frame, row in the block, column in the block
    blocks = np.asarray(obs).reshape(21, 21, 4, 4, 4)
    return np.stack(
        [np.block([[blocks[y, x, k] for x in range(21)] for y in range(21)]) for k in range(4)]
    )


def shrink(frame):
    return cv2.resize(frame, (84, 84), interpolation=cv2.INTER_AREA)


def games_of(env_id, seeds, **changes):
    """Games of one agent."""
    return PRPO_ATARI.Games(PRPO_ATARI.Args(env_id=env_id, **changes), [env_id], [seeds])


def step(games, actions):
    """Step the games of one agent.

    Returns rewards, terminations, truncations, valid, each [games], and the games that ended.
    """
    *signals, ended = games.step(np.asarray(actions)[None])
    return *(signal[0] for signal in signals), ended


# --- the environments ---


class Spy:
    """A vector environment that records its last scores, ends and infos."""

    def __init__(self, envs, info):
        self.envs = envs
        self.info = info
        self.total = 0.0

    def __getattr__(self, name):
        return getattr(self.envs, name)

    def step(self, actions):
        obs, scores, *rest, self.info = self.envs.step(actions)
        self.scores = scores
        self.over = rest[0] | rest[1]
        return obs, scores, *rest, self.info


def reference_game(env_id, obs_type="grayscale"):
    """A game in gymnasium: (with stable-baselines3's wrappers but that of the frame's size, start).

    `start` is the wrapper that draws the number of no-ops.
    """
    env = start = wrappers.NoopResetEnv(
        gym.wrappers.RecordEpisodeStatistics(gym.make(env_id, obs_type=obs_type))
    )
    env = wrappers.EpisodicLifeEnv(wrappers.MaxAndSkipEnv(env, 4))
    if "FIRE" in env.unwrapped.get_action_meanings():
        env = wrappers.FireResetEnv(env)
    return wrappers.ClipRewardEnv(env), start


@pytest.mark.parametrize(
    ("env_id", "number", "lives", "most"),
    [
        ("BreakoutNoFrameskip-v4", 2, 4, 1),
        pytest.param("BeamRiderNoFrameskip-v4", 1, 2, 44, marks=pytest.mark.slow),
        ("QbertNoFrameskip-v4", 1, 3, 25),
        pytest.param("PongNoFrameskip-v4", 1, 0, 1, marks=pytest.mark.slow),
    ],
)
def test_games_equal_the_usual_wrappers_step_by_step(env_id, number, lives, most, monkeypatch):
    """The same actions give the same frames, rewards, episodes and games as the usual wrappers.

    The frames are those of a reference that takes the brighter of two *grey* frames (see the next
    test). The number of no-ops is drawn here from 0-29 and in stable-baselines3 from 1-30; the
    reference is given what was drawn. Steps that the wrappers take by themselves are the ones that
    are not valid; their score counts in the game.
    """
    make = PRPO_ATARI.make_games

    def spy(*game, **options):
        envs = make(*game, **options)
        return Spy(envs, envs.reset(seed=np.array([5]))[1])  # equal seeds: the same game again

    PRPO_ATARI.patch(monkeypatch, "make_games", spy)
    games = games_of(env_id, [5])
    seen = Counter()
    highest = 0.0
    ((pool, _, fire),) = games.pools
    env, start = reference_game(env_id)
    generator = np.random.default_rng(0)
    obs = games.obs[0]
    while seen["games"] < number:
        start.override_num_noops = int(pool.info["episode_frame_number"][0])
        assert start.override_num_noops > 0  # the reference needs at least one
        frame, _ = env.reset()
        total = 0.0
        length = 0
        ended = []
        while not ended:
            # What the wrappers did in `reset`: the action here does not matter
            for _ in range(2 * fire + 1):
                if games.countdown[0, 0] == 0:
                    break
                *_, valid, ended = step(games, generator.integers(3, size=1))
                assert not valid[0]
                assert not ended
                total += pool.scores[0]
                seen["forced"] += 1
            assert np.array_equal(frames_of(obs[0])[-1], shrink(frame))
            over = False
            while not over:
                action = generator.integers(pool.single_action_space.n, size=1)
                previous = frames_of(obs[0])
                rewards, terminations, truncations, valid, ended = step(games, action)
                frame, reward, terminated, truncated, info = env.step(action[0])
                assert valid[0]
                assert (rewards[0], terminations[0], truncations[0]) == (
                    reward,
                    terminated,
                    truncated,
                )
                frames = frames_of(obs[0])
                assert np.array_equal(frames[:3], previous[1:])
                if not ended:  # a game's last frame is not used
                    assert np.array_equal(frames[3], shrink(frame))
                total += pool.scores[0]
                highest = max(highest, pool.scores[0])
                over = terminated or truncated
                length += 1
            highest = max(highest, -total)
            seen["lives"] += not ended
            if not ended:
                frame, _ = env.reset()
        assert total == info["episode"]["r"]
        assert ended == [(0, 0, total, length)]
        seen["games"] += 1
        *_, valid, ended = step(games, action)  # a new game begins
        assert not valid[0]
        assert not ended
        assert pool.scores[0] == 0
    games.close()
    assert seen["lives"] == number * lives
    assert highest >= most
    assert seen["forced"] == number * 2 * fire + seen["lives"] * (2 * fire + 1)


def test_frames_are_close_to_those_of_stable_baselines3():
    """ale-py takes the maximum of two grey frames, stable-baselines3 of two frames in colour."""
    env_id = "BeamRiderNoFrameskip-v4"
    games = games_of(env_id, [5])
    env, start = reference_game(env_id, obs_type="rgb")
    start.override_num_noops = int(
        games.pools[0][0].reset(seed=np.array([5]))[1]["frame_number"][0]
    )
    env.reset()
    while games.countdown[0, 0]:
        step(games, [0])
    worst = []
    generator = np.random.default_rng(1)
    for action in generator.integers(9, size=100):
        step(games, [action])
        frame, *_ = env.step(action)
        grey = shrink(cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY)).astype(int)
        worst.append(np.abs(frames_of(games.obs[0, 0])[-1] - grey).max())
    assert 0 < max(worst) <= 40
    assert np.median(worst) <= 10
    games.close()


def play_given_lives(monkeypatch, fire, lives, ends, truncated=False):
    """A game with given lives after each step that ends at the steps `ends`.

    Returns the buttons that are pressed in it and the results of its steps.
    """
    pressed = []
    actions = PRPO_ATARI.ale_py.Action

    class Game:
        def __init__(self, *game, **options):
            self.ale = SimpleNamespace(
                get_action_set=lambda: [
                    actions.NOOP,
                    *[actions.FIRE] * fire,
                    actions.RIGHT,
                    actions.LEFT,
                ]
            )

        def observe(self, count):
            return np.zeros((1, 4, 84, 84), dtype=np.uint8), {"lives": np.array([count])}

        def reset(self, seed):
            return self.observe(3)

        def step(self, chosen):
            pressed.append(int(chosen[0]))
            obs, info = self.observe(lives[len(pressed) - 1])
            end = len(pressed) - 1 in ends
            return (
                obs,
                np.array([-7.0]),
                np.array([end and not truncated]),
                np.array([end and truncated]),
                info,
            )

    PRPO_ATARI.patch(monkeypatch, "AtariVectorEnv", Game)
    games = games_of(GAME, [1])
    return pressed, [step(games, [9]) for _ in lives]


@pytest.mark.parametrize("fire", [True, False])
def test_forced_steps_follow_lives_and_games(fire, monkeypatch):
    """When forced steps press buttons, which steps end episodes, and which are valid.

    As in Qbert, the game may linger at no lives before it ends; as in BeamRider, lives can be won.
    """
    # The game ends at the second 0
    lives = list(map(int, "33332222231111003333"))
    pressed, results = play_given_lives(monkeypatch, fire, lives, [15])
    rewards, terminations, truncations, valid, ended = zip(*results, strict=True)
    assert np.flatnonzero(terminations).tolist() == [4, 10, 15]
    assert not np.any(truncations)
    assert set(np.ravel(rewards)) == {-1.0}
    assert ended == ([],) * 15 + ([(0, 0, 16 * -7.0, np.sum(valid[:16]))],) + ([],) * 4
    if fire:
        expected = [1, 2, 9, 9, 9, 0, 1, 2, 9, 9, 9, 0, 1, 2, 9, 9, "reset", 1, 2, 9]
    else:
        expected = [9, 9, 9, 9, 9, 0, 9, 9, 9, 9, 9, 0, 9, 9, 9, 9, "reset", 9, 9, 9]
    for button, entry in zip(pressed, expected, strict=True):
        assert button == entry or entry == "reset"
    assert np.ravel(valid).tolist() == [entry == 9 for entry in expected]


def test_a_new_game_has_lost_no_life(monkeypatch):
    """A time limit may end a game with bonus lives; the next one then starts with fewer.

    That is no life lost.
    """
    lives = [3, 3, 4, 5, 5, 3, 3, 3, 3, 2, 2]
    pressed, results = play_given_lives(monkeypatch, True, lives, [4], truncated=True)
    _, terminations, truncations, valid, _ = zip(*results, strict=True)
    assert np.flatnonzero(truncations).tolist() == [4]
    assert np.flatnonzero(terminations).tolist() == [9]
    # FIRE at once, as after any start
    assert pressed[:5] + pressed[6:] == [1, 2, 9, 9, 9, 1, 2, 9, 9, 0]
    assert np.flatnonzero(valid).tolist() == [2, 3, 4, 8, 9]


def test_a_time_limit_is_a_truncation(monkeypatch):
    """It ends the game with lives left and is no termination. Evaluation ends there too."""
    script = PRPO_ATARI
    make = PRPO_ATARI.AtariVectorEnv
    limited = {"max_num_frames_per_episode": 200}
    script.patch(
        monkeypatch, "AtariVectorEnv", lambda *game, **options: make(*game, **options | limited)
    )
    games = games_of(GAME, [1, 2])
    ends = []
    for number in range(1, 121):
        _, terminations, truncations, valid, ended = step(games, [0, 0])
        if truncations[0]:
            assert ended[0][:2] == (0, 0)
            assert valid[0]
            assert not terminations[0]
            assert games.lives[0, 0] > 0
            ends.append(number)
            assert not step(games, [0, 0])[3][0]
    assert len(ends) == 2
    # Of four frames each, some of which were no-ops
    assert 40 <= ends[0] <= 50
    assert script.evaluate(tiny(script, ""), script.new_agent(), GAME, [1, 2], 0).shape == (2,)


def test_reported_games_are_whole_and_unclipped(tmp_path, monkeypatch):
    """metrics.csv adds up scores, not what is learned from, until the game ends, not a life."""
    script = PRPO_ATARI
    reported = []
    make = script.make_games
    play = script.Envs.step

    class Ten(Spy):
        def step(self, actions):
            obs, scores, *rest = super().step(actions)
            self.scores = scores * 10.0 + 0.5
            return obs, self.scores, *rest

    def step_and_record(envs, actions):
        rewards, terminations, truncations, valid, ended = play(envs, actions)
        ((pool, *_),) = envs.pools
        assert np.array_equal(rewards.ravel(), np.sign(pool.scores))
        reported.append((terminations.ravel(), pool.scores.copy(), pool.over.copy(), valid.ravel()))
        return rewards, terminations, truncations, valid, ended

    script.patch(
        monkeypatch, "make_games", lambda *game, **options: Ten(make(*game, **options), {})
    )
    monkeypatch.setattr(script.Envs, "step", step_and_record)
    changes = {
        "num_agents": 2,
        "num_envs": 2,
        "num_steps": 220,
        "save_every": 9,
        "iterations": 2,
        "eval_episodes": 0,
    }
    script.main(tiny(script, tmp_path, communicator="identity", **changes))
    steps = iter(reported)
    lives = 0
    totals = np.zeros(4)
    lengths = np.zeros(4)
    rows = rows_of(only_run(tmp_path))
    for iteration in range(2):
        games = [[], []]
        for _ in range(220):
            terminations, scores, finished, valid = next(steps)
            totals += scores
            lengths += valid
            lives += (terminations & ~finished).sum()
            for k in np.flatnonzero(finished):
                games[k // 2].append((totals[k], lengths[k]))
                totals[k] = lengths[k] = 0.0
        for i, games_of_agent in enumerate(games):
            row = rows[2 * iteration + i]
            assert (row["iteration"], row["agent"], float(row["episodes"])) == (
                str(iteration + 1),
                str(i),
                len(games_of_agent),
            )
            logged = float(row["episodic_return"]), float(row["episodic_length"])
            assert logged == pytest.approx(
                tuple(np.mean(games_of_agent or [(np.nan, np.nan)], axis=0)), rel=1e-4, nan_ok=True
            )
    assert lives > 10
    assert float(rows[-1]["episodes"]) + float(rows[0]["episodes"]) > 1


def history(games, steps=150):
    """What fixed random actions lead to: frames, rewards, ends, what follows the action."""
    actions = np.random.default_rng(2).integers(4, size=(steps, *games.lives.shape))
    signals_of_steps = []
    for action in actions:
        *signals, _ = games.step(action)
        signals_of_steps.append((games.obs.copy(), *signals))
    games.close()
    return [np.stack(column) for column in zip(*signals_of_steps, strict=True)]


def same(history, other):
    return all(np.array_equal(ours, theirs) for ours, theirs in zip(history, other, strict=True))


def test_sticky_actions():
    """With them equal actions may have different effects; without them, equal seeds make equal
    games.
    """
    plain = history(games_of(GAME, [3, 4]))
    assert same(plain, history(games_of(GAME, [3, 4])))
    sticky = history(games_of(GAME, [3, 4], sticky_actions=True))
    assert not same(sticky, plain)
    assert same(sticky, history(games_of(GAME, [3, 4], sticky_actions=True)))
    assert not same(sticky, history(games_of(GAME, [13, 14], sticky_actions=True)))


def test_both_names_of_a_game_mean_the_same():
    """ALE/<Game>-v5 has other defaults in gymnasium; here it is <Game>NoFrameskip-v4."""
    assert same(history(games_of(GAME, [3, 4])), history(games_of("ALE/Breakout-v5", [3, 4])))


def test_environments_use_the_cores_that_are_this_process_s(monkeypatch):
    """Under torchrun torch has one thread; environments use the process's share of the cores."""
    script = PRPO_ATARI
    used_threads = []
    make = PRPO_ATARI.AtariVectorEnv

    def record(*game, num_threads, **options):
        used_threads.append(num_threads)
        return make(*game, num_threads=1, **options)

    script.patch(monkeypatch, "AtariVectorEnv", record)
    monkeypatch.setattr(
        script.of_family.os, "sched_getaffinity", lambda process: range(12), raising=False
    )
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for processes, threads in ((None, 12), ("3", 4), ("12", 1), ("16", 1)):
        if processes:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        script.Envs(tiny(script, ""), range(1), 0).close()
        assert used_threads.pop() == threads
        assert not used_threads


# --- the network ---


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_network_in_blocks_equals_the_plain_nature_network(precision):
    """Mnih et al.'s network as CleanRL writes it, with equal names and shapes, on plain frames."""
    script = PRPO_ATARI
    torch.manual_seed(3)
    agent = script.new_agent(bfloat16=precision == "bfloat16")
    for parameter in agent.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, std=0.2)
    torch.nn.init.orthogonal_(agent.actor.weight)
    network = nn.Sequential(
        nn.Conv2d(4, 32, 8, stride=4), nn.ReLU(),
        nn.Conv2d(32, 64, 4, stride=2), nn.ReLU(),
        nn.Conv2d(64, 64, 3, stride=1), nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 512), nn.ReLU(),
    )  # fmt: skip
    plain = nn.ModuleDict(
        {"network": network, "actor": nn.Linear(512, 4), "critic": nn.Linear(512, 1)}
    )
    plain.load_state_dict(agent.state_dict())
    obs = torch.randint(0, 256, (5, 21, 21, 64), dtype=torch.uint8)
    frames = torch.from_numpy(np.stack([frames_of(blocks) for blocks in obs]))
    games = games_of(GAME, list(range(5)))
    assert np.array_equal(games.arrange_blocks(frames.numpy(), slice(0, 1))[0], obs.numpy())
    games.close()
    hidden = plain["network"](frames / 255.0)
    logits, values = agent(obs)
    tolerance = 1e-5 if precision == "float32" else 0.05
    torch.testing.assert_close(logits, plain["actor"](hidden), rtol=0, atol=tolerance)
    torch.testing.assert_close(values, plain["critic"](hidden)[:, 0], rtol=0, atol=tolerance)
    assert logits.std() > 0.1
    assert values.std() > 0.05
    # The gradient reaches the weights through the blocks
    (logits.sum() + values.sum()).backward()
    (plain["actor"](hidden).sum() + plain["critic"](hidden).sum()).backward()
    for name, parameter in plain.named_parameters():
        gradient = agent.get_parameter(name).grad
        assert (gradient - parameter.grad).norm() <= (
            1e-4 if precision == "float32" else 0.1
        ) * parameter.grad.norm()


def changed(*layers, at=6):
    """An Agent with more layers before layer `at`; before the flattening, 6, sizes adapt."""

    class Changed(PRPO_ATARI.Agent):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            added = copy.deepcopy(layers)
            for layer in added:
                if hasattr(layer, "reset_parameters"):  # by the test's seed, which comes later
                    layer.reset_parameters()
            self.network = nn.Sequential(*self.network[:at], *added, *self.network[at:])
            with torch.no_grad():
                flat = (
                    self.network[: at + len(layers)](torch.zeros(1, 64, 21, 21)).flatten(1).shape[1]
                )
            if at == 6:
                self.network[-2] = nn.Linear(flat, 512)

    return Changed


LAYERS = {
    "as it is": changed(),
    "convolution": changed(nn.Conv2d(64, 48, (3, 2), stride=(1, 2)), nn.Tanh()),
    "linear": changed(nn.Linear(512, 300), nn.GELU(), nn.Linear(300, 512), nn.LeakyReLU(0.3), at=9),
    "activation": changed(nn.SiLU(), at=1),
}


@pytest.mark.parametrize(
    ("layers", "precision"),
    [(name, "float32") for name in LAYERS] + [("as it is", "bfloat16"), ("activation", "bfloat16")],
)
def test_a_layer_added_to_the_network_acts_in_rollouts(layers, precision):
    """In the first minibatch the ratio is 1.

    Rollouts play the policy that the update computes, rounding included.
    """
    script = PRPO_ATARI
    Agent = LAYERS[layers]
    bfloat16 = precision == "bfloat16"
    torch.manual_seed(1)
    args = tiny(script, "", num_agents=3, num_steps=20, precision=precision)
    agents = [Agent(script.num_actions, bfloat16) for _ in range(3)]
    for agent in agents:
        nn.init.orthogonal_(agent.actor.weight, 5.0)
    envs = script.Envs(args, range(3), 0)
    actors = script.Actors(args, agents)
    generators = [torch.Generator().manual_seed(i) for i in range(3)]
    tolerance = 3e-3 if bfloat16 else 1e-5
    for _ in range(2):
        rollouts = script.rollout(args, actors, envs, generators)
        for agent, (data, _) in zip(agents, rollouts, strict=True):
            logits, values = agent.predict(data["obs"])
            log_probs = logits.log_softmax(-1)
            states = data["obs_inds"]
            torch.testing.assert_close(data["policy"], log_probs, rtol=0, atol=tolerance)
            torch.testing.assert_close(
                data["logprobs"], log_probs[states, data["actions"]], rtol=0, atol=tolerance
            )
            torch.testing.assert_close(data["values"], values[states], rtol=0, atol=tolerance)
            torch.testing.assert_close(
                data["next_values"][:-1], values[states][1:], rtol=0, atol=tolerance
            )
            assert logits.std() > 0.02
            assert values.abs().max() > 1e-3
            with torch.no_grad():  # what was learned acts in the next rollout
                for parameter in agent.parameters():
                    parameter += 0.01 * torch.randn_like(parameter)
            changed_log_probs = agent.predict(data["obs"])[0].log_softmax(-1)
            assert (changed_log_probs - data["policy"]).abs().max() > 0.05
    envs.close()


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(64, 64, 3, padding=1),
        nn.Conv2d(64, 64, 2, dilation=2),
        nn.Conv2d(64, 64, 2, groups=2),
        nn.Conv2d(64, 64, 2, bias=False),
        nn.MaxPool2d(2),
        nn.BatchNorm2d(64),
        nn.Dropout(0.1),
        nn.LayerNorm(7),
    ],
    ids=str,
)
def test_a_layer_that_rollouts_do_not_know_is_refused(layer):
    """Rather than left out, or taken for another one."""
    agents = [changed(layer)(4) for _ in range(2)]
    with pytest.raises(NotImplementedError, match=type(layer).__name__):
        PRPO_ATARI.Actors(tiny(PRPO_ATARI, ""), agents)


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("envs", [1, 4])
def test_stacked_networks_equal_every_agents_own(number, envs):
    """Also after the weights have changed where they lie."""
    script = PRPO_ATARI
    args = tiny(PRPO_ATARI, "", num_envs=envs)
    torch.manual_seed(0)
    agents = [script.new_agent() for _ in range(number)]
    actors = script.Actors(args, agents)
    for _ in range(2):
        actors.read()
        obs = script.random_obs(number, envs)
        with torch.no_grad():
            logits, values = actors.forward(obs)
            outputs = [agent(obs[k]) for k, agent in enumerate(agents)]
        for stacked, separate in zip((logits, values), zip(*outputs, strict=True), strict=True):
            torch.testing.assert_close(stacked, torch.stack(separate), rtol=0, atol=1e-5)
        for parameter in (parameter for agent in agents for parameter in agent.parameters()):
            parameter.data += 0.02 * torch.randn_like(parameter)


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx512_bf16": True}, "bfloat16"),
        ({"avx512_bf16": False, "avx2": True}, "float32"),
        ({}, "float32"),
    ],
)
def test_precision_is_what_the_processor_computes_with(
    capabilities, expected, monkeypatch, tmp_path
):
    """`auto` is replaced while arguments are parsed, so config.json contains the choice."""
    script = PRPO_ATARI
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert script.parse_args(["--run-dir", str(tmp_path)]).precision == expected
    for precision in ("float32", "bfloat16"):
        assert (
            script.parse_args(["--precision", precision, "--run-dir", str(tmp_path)]).precision
            == precision
        )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert script.parse_args(["--run-dir", str(tmp_path)]).precision == "float32"
    assert script.parse_args(["--device", "cpu", "--run-dir", str(tmp_path)]).precision == expected


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.usefixtures("smooth_adam")
def test_compiled_networks_learn_the_same(tmp_path, monkeypatch):
    """--compile compiles the network, and changes rounding only."""
    script = PRPO_ATARI
    weights = []
    compiled = []
    compile_module = nn.Module.compile
    monkeypatch.setattr(
        nn.Module,
        "compile",
        lambda *arguments, **options: compiled.append(compile_module(*arguments, **options)),
    )
    for compile in (False, True):
        changes = {"num_agents": 1, "iterations": 3, "eval_episodes": 0, "compile": compile}
        weights.append(weights_of(train(script, tmp_path / str(compile), **changes))[0])
        assert len(compiled) == compile  # by this run
    torch.testing.assert_close(*weights, rtol=0, atol=1e-5)


# --- evaluation ---


def test_evaluation_plays_whole_games_and_films_the_first(tmp_path, monkeypatch):
    """Unclipped scores of whole games, the same for equal seeds; the film shows the game played.

    Every frame goes to the encoder before the next step: a game up to the time limit would not fit
    in memory.
    """
    script = PRPO_ATARI
    env_id = "SeaquestNoFrameskip-v4"
    recordings = []
    films = []

    class Recorded(script.Games):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            recordings.append((self, [], [self.obs[0].copy()], [], []))

        def step(self, actions):
            *results, ended = super().step(actions)
            recording = recordings[-1]
            recording[1].append(actions[0].copy())
            recording[2].append(self.obs[0].copy())
            recording[3].append(len(films[-1][2]) if films else 0)
            recording[4].append(self.pressed[0].copy())
            # so that every step shows in the total
            return *results, [
                (k, game, total + len(recording[1]), length) for k, game, total, length in ended
            ]

    class Video:
        def __init__(self, path, fps, unfinished):
            films.append([path, fps, []])

        def add(self, frame):
            films[-1][2].append(frame.copy())

    script.patch(monkeypatch, "Games", Recorded)
    monkeypatch.setattr(play, "Film", Video)
    torch.manual_seed(0)
    args = tiny(script, tmp_path, env_id=env_id)
    agent = script.Agent(18)
    scores = script.evaluate(args, agent, env_id, [3, 4], 5)
    assert np.array_equal(scores, script.evaluate(args, agent, env_id, [3, 4], 5))
    assert scores.max() > 10
    (_, actions, *_), (_, again, *_) = recordings
    assert np.array_equal(actions, again)
    for k, seed in enumerate([3, 4]):  # each game alone, with what was pressed in it
        games = games_of(env_id, [seed])
        steps = 0
        ended = []
        while not ended:
            *_, ended = step(games, actions[steps][k : k + 1])
            steps += 1
        assert ended[0][2] == scores[k]
        games.close()

    alone = script.evaluate(args, agent, env_id, [3], 5)
    camera = play.AtariCamera("film.mp4", tmp_path, script.module, args, env_id, 3)
    assert script.evaluate(args, agent, env_id, [3], 5, watch=camera) == alone
    *_, (_, actions, *_), (_, again, seen, written, pressed) = recordings
    assert np.array_equal(actions, again)
    ((_, fps, frames),) = films
    assert fps == 15
    assert len(frames) == len(actions) + 1
    assert all(frame.shape == (210, 160, 3) for frame in frames)
    assert written == list(range(1, len(frames)))
    differences = [
        np.abs(
            shrink(cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY)).astype(int) - frames_of(obs[0])[-1]
        ).mean()
        for frame, obs in zip(frames, seen, strict=True)
    ]
    shifted = [
        np.abs(a.astype(int) - b).mean() for a, b in zip(frames[:-8], frames[8:], strict=True)
    ]
    assert max(differences) < 1
    assert np.mean(shifted) > 1
    # Frame by frame what the very buttons lead to, also those that are pressed by themselves
    camera = script.make_games(
        args, env_id, 1, grayscale=False, img_height=210, img_width=160, stack_num=1
    )
    replayed = [
        camera.reset(seed=np.array([3]))[0],
        *(camera.step(buttons)[0] for buttons in pressed),
    ]
    assert np.array_equal(np.stack(frames), np.concatenate(replayed)[:, 0])
    assert not np.array_equal(pressed, actions)


@every_family
def test_public_states_are_public(script):
    """They depend on the task alone, not on the run or on random states."""
    collect = script.collect_public_states.__wrapped__  # not what other tests have collected
    states = collect(tiny(script, ""))
    assert states.dtype == (torch.float32 if script.family == "MuJoCo" else torch.uint8)
    assert states.shape[1:] == script.shape
    assert len(states.unique(dim=0)) > 20
    np.random.seed(3)
    torch.manual_seed(3)
    other = tiny(script, "", seed=9, num_envs=4, num_agents=2)
    assert torch.equal(states, collect(other))


@every_family
def test_public_states_are_those_of_every_task(script):
    """One task after the other, each as it is alone, whatever agents have it."""
    tasks = {
        "MiniGrid": ("MiniGrid-DoorKey-5x5-v0", "MiniGrid-FourRooms-v0"),
        "Atari": (GAME, "PongNoFrameskip-v4"),
        "MuJoCo": ("HalfCheetah-v5", "Walker2d-v5"),
    }[script.family]
    options = {"full_action_space": True} if script.family == "Atari" else {}
    collect = script.collect_public_states.__wrapped__
    first, second = (collect(script.Args(env_id=env_id, **options), 16, 3) for env_id in tasks)
    states = collect(script.Args(env_ids=tasks, **options), 16, 3)
    mirrored = script.Args(env_ids=(tasks[1], tasks[1], tasks[0]), **options)
    assert torch.equal(states, collect(mirrored, 16, 3))
    of_first, of_second = states.split([len(first), len(second)])
    assert torch.equal(of_first, first)  # then the same random policy goes on elsewhere
    distances = [
        (states_of_task.float().mean(0) - of_second.float().mean(0)).abs().mean()
        for states_of_task in (first, second)
    ]
    assert distances[1] < distances[0] / 2


def test_only_the_first_game_of_a_level_is_its_score(monkeypatch):
    """Games go on until the longest is over; later games on other levels do not count."""
    ends = {1: [(0, 5.0)], 2: [(2, 7.0)], 3: [(0, 100.0), (2, -3.0)], 5: [(0, 50.0), (1, 9.0)]}

    class Made(PRPO_ATARI.Games):
        def __init__(self, args, env_ids, seeds):
            self.obs = np.zeros((1, 3, *PRPO_ATARI.shape), dtype=np.uint8)
            self.steps = 0

        def step(self, actions):
            self.steps += 1
            return *[None] * 4, [
                (0, level, total, 10.0) for level, total in ends.get(self.steps, [])
            ]

        def close(self):
            assert self.steps == 5

    PRPO_ATARI.patch(monkeypatch, "Games", Made)
    scores = PRPO_ATARI.evaluate(PRPO_ATARI.Args(), PRPO_ATARI.new_agent(), GAME, [1, 2, 3], 0)
    assert scores.tolist() == [5.0, 9.0, 7.0]


def test_evaluations_during_training_change_nothing_and_survive_a_crash(
    whole_run, tmp_path, crashing
):
    """Weights and metrics are those of a run without them; after a crash every row exists once.

    The crash leaves the evaluation of an iteration whose checkpoint is not complete.
    """
    script = PRPO_MINIGRID
    whole = train(script, tmp_path / "whole", eval_every=2)
    assert_same_run(whole, whole_run(script))
    rows = table_of(whole, "evaluations")
    assert [(row["iteration"], row["agent"]) for row in rows] == [
        (str(k), str(i)) for k in (2, 4, 6) for i in range(3)
    ]
    assert rows[-3:] == table_of(whole_run(script), "evaluations")

    args = tiny(script, tmp_path / "crashed", eval_every=2)
    crashing("complete", 0, 4, lambda: script.main(args))
    folder = only_run(tmp_path / "crashed")
    resume(script, folder)
    assert table_of(folder, "evaluations") == rows
    charts = scalars_of(folder)
    expected = scalars_of(whole)
    tags = [tag for tag in expected if tag.startswith("eval/")]
    assert len(tags) >= 3  # of each agent
    for tag in tags:
        assert charts[tag] == expected[tag]
        assert [step for step, _ in charts[tag]] == [256, 512, 768]


@pytest.mark.slow
def test_evaluations_during_training_change_nothing_on_atari(tmp_path):
    """The same there, where evaluation uses the same kind of pool as training."""
    changes = {
        "num_agents": 1,
        "iterations": 2,
        "num_steps": 32,
        "communicator": "identity",
        "eval_episodes": 1,
    }
    script = PRPO_ATARI
    for eval_every in (0, 1):
        script.main(tiny(script, tmp_path / str(eval_every), eval_every=eval_every, **changes))
    without, during = (only_run(tmp_path / name) for name in ("0", "1"))
    assert_same_run(during, without)
    assert [row["iteration"] for row in table_of(during, "evaluations")] == ["1", "2"]
    assert table_of(during, "evaluations")[1:] == table_of(without, "evaluations")
