"""The user's own tasks, and playing the agents of a finished run."""

import hashlib
import itertools
import json
import re
import shutil
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import (
    FEDAVG_MINIGRID,
    PRPO_ATARI,
    PRPO_MINIGRID,
    PRTRPO_MINIGRID,
    REPOSITORY,
    SCRIPTS,
    Child,
    copy_config,
    flags,
    on,
    only_run,
    outcomes,
    rows_of,
    run_ranks,
)

MINIGRID_SCRIPTS = on([PRPO_MINIGRID, PRTRPO_MINIGRID])
EXAMPLE = re.search(
    r"```python\n(import gymnasium.*?)```",
    (REPOSITORY / "docs" / "prpo_minigrid.md").read_text(),
    re.S,
)[1]
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


# As environments stepped long ago
class Old(Bare):
    def step(self, action):
        return super().step(action)[:4]


gym.register("Varied-v0", Varied)
gym.register("Odd-v0", Odd)
gym.register("OddFrames-v0", OddFrames)
gym.register("Pair-v0", Pair)
gym.register("PairOfFrames-v0", PairOfFrames)
gym.register("Unpaid-v0", Unpaid)
gym.register("UnpaidFrames-v0", UnpaidFrames)
gym.register("Old-v0", Old)
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


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture
def my_tasks(tmp_path, monkeypatch):
    """The folder of a module with the page's example and with tasks that cannot be used."""
    (tmp_path / "my_tasks.py").write_text(EXAMPLE)
    (tmp_path / "my_other_tasks.py").write_text(OTHER_TASKS)
    (tmp_path / "my_copies.py").write_text("import my_tasks\n")
    (tmp_path / "my_broken_tasks.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(gym.envs.registration, "registry", dict(gym.envs.registration.registry))
    yield tmp_path
    for name in ("my_tasks", "my_other_tasks", "my_copies", "my_broken_tasks"):
        sys.modules.pop(name, None)


def test_the_page_s_example_trains_on_ranks_resumes_and_plays(my_tasks, tmp_path):
    """One agent's task has another reward than its two peers'.

    Names are logged without the module, and only that agent's returns contain the costs.
    """
    assert 8 <= len(EXAMPLE.splitlines()) <= 12
    changes = {
        "env_ids": "",
        "iterations": 2,
        "num_steps": 256,
        "communicator": "uniform",
        "local_updates": 1,
        "save_every": 1,
        "eval_episodes": 1,
    }
    args = flags(PRPO_MINIGRID, tmp_path / "runs", **changes)
    at = args.index("--env-ids")
    args[at + 1 : at + 2] = [FRUGAL, DOOR_KEY, DOOR_KEY]
    env = {"PYTHONPATH": f"{REPOSITORY}:{my_tasks}", "cwd": tmp_path}
    run_ranks(3, REPOSITORY / "prpo_minigrid.py", *args, "--capture-video", **env)
    folder = only_run(tmp_path / "runs")
    assert folder.name.startswith(f"FrugalDoorKey-v0+{DOOR_KEY}__")
    assert [row["env_id"] for row in rows_of(folder)[:3]] == [
        "FrugalDoorKey-v0",
        DOOR_KEY,
        DOOR_KEY,
    ]
    assert len(list(folder.glob("videos/*.mp4"))) == 3
    longer = ["--resume", str(folder), "--total-timesteps", str(3 * 512)]
    summary = PRPO_MINIGRID.main(PRPO_MINIGRID.parse_args(longer))
    assert summary["env_backend"] == "gymnasium"
    assert summary["iterations"] == 3
    names = [list(row) for row in summary["evaluation"]["agents"]]
    assert names == [["FrugalDoorKey-v0", DOOR_KEY]] * 3
    # After the time limit of 250 steps the costs are 0.25; elsewhere no return is below 0
    returns = np.array([float(row["episodic_return"]) for row in rows_of(folder)]).reshape(3, 3)
    assert np.nanmin(returns[:, 0]) == pytest.approx(-0.25)
    assert np.nanmin(returns[:, 1:]) >= 0

    before = contents(folder)
    play = ["--eval-only", folder, "--env-id", FRUGAL, "--eval-episodes", "1", "--greedy"]
    play += ["--capture-video"]
    [((output, errors), code)] = outcomes([Child(REPOSITORY / "prpo_minigrid.py", *play, **env)])
    assert code == 0, errors
    assert "FrugalDoorKey-v0" in output
    assert f"videos in {folder / 'videos'}" in output
    after = contents(folder)
    films = after.keys() - before.keys()
    names = [f"eval_agent_{i}_FrugalDoorKey-v0.mp4" for i in range(3)]
    assert sorted(path.name for path in films) == names
    assert before.items() <= after.items()


def contents(folder):
    """Every file of a folder, with its content's hash."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


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
        (["--env-id", "CartPole-v1"], ["shows no 7x7x3 array (uint8)", "4 (float32)"]),
        (["--env-id", "my_other_tasks:Bare-v0", "--levels-per-agent", "2"], ["has no grid"]),
        (["--env-id", "my_other_tasks:Bare-v0", "--capture-video"], ["my_other_tasks:Bare-v0"]),
        (["--env-id", FRUGAL, "--env-backend", "envpool"], ["--env-backend envpool"]),
        (
            ["--num-agents", "2", "--env-ids", FRUGAL, "my_copies:FrugalDoorKey-v0"],
            ["has the name of another task"],
        ),
        (["--env-id", "my_other_tasks:Pair-v0"], ["Pair-v0", "array of size 1"]),
        (["--env-id", "my_other_tasks:Unpaid-v0"], ["Unpaid-v0", "NoneType"]),
        (["--env-id", "my_other_tasks:Old-v0"], ["Old-v0", "expected 5, got 4"]),
        (["--greedy"], ["--greedy", "--eval-only"]),
    ],
    ids=str,
)
def test_tasks_that_cannot_be_used_are_refused_in_one_line(script, argv, words, my_tasks):
    with pytest.raises(SystemExit) as end:
        script.parse_args(argv)
    message = str(end.value.args[0]) if end.value.code != 2 else ""
    message = message or REFUSED[-1]
    assert "\n" not in message.strip(), message
    assert all(word in message for word in words), message


REFUSED = []


@pytest.fixture(autouse=True)
def refusals(monkeypatch):
    """Record each error line in REFUSED, whatever prints it."""
    import communicators

    stop = communicators.stop

    def record(message, *more):
        REFUSED.append(message)
        stop(message, *more)

    monkeypatch.setattr(communicators, "stop", record)


@MINIGRID_SCRIPTS
def test_a_task_may_show_its_codes_alone(script, my_tasks, tmp_path):
    """It has no grid, mission or images, and another agent has one of MiniGrid's tasks.

    Actions and rewards are the task's.
    """
    changes = {"num_agents": 2, "communicator": "uniform", "iterations": 2}
    args = flags(script, tmp_path / "runs", env_ids="", **changes)
    at = args.index("--env-ids")
    args[at + 1 : at + 2] = ["my_other_tasks:Bare-v0", DOOR_KEY]
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


def test_a_users_game_trains_and_plays(my_tasks, tmp_path):
    """Another agent has one of ALE's games.

    Scores are not clipped, a lost life ends an episode, names have no module, and films are made.
    """
    script = PRPO_ATARI
    changes = {"num_agents": 2, "communicator": "uniform", "iterations": 2, "local_updates": 1}
    changes |= {"num_steps": 40, "eval_episodes": 1}
    args = flags(script, tmp_path / "runs", env_ids="", **changes)
    at = args.index("--env-ids")
    args[at + 1 : at + 2] = ["my_other_tasks:Frames-v0", "BreakoutNoFrameskip-v4"]
    summary = script.main(script.parse_args([*args, "--capture-video"]))
    folder = only_run(tmp_path / "runs")
    assert folder.name.startswith("Frames-v0+BreakoutNoFrameskip-v4__")
    assert summary["env_backend"] == "gymnasium"
    assert len(list(folder.glob("videos/*.mp4"))) == 2
    rows = [row for row in rows_of(folder) if row["agent"] == "0"]
    assert [row["env_id"] for row in rows] == ["Frames-v0"] * 2
    outcomes = [(float(row["episodic_length"]), float(row["episodic_return"])) for row in rows]
    # One of the nine steps only resets after a lost life: its action is not the agent's
    assert all(length == 8 and 0 < score < 63 for length, score in outcomes), outcomes
    for row in summary["evaluation"]["agents"]:
        assert row["Frames-v0"]["mean"] % 7 == 0 <= row["Frames-v0"]["greedy_return"] <= 63
    play = ["--eval-only", str(folder), "--env-id", "my_other_tasks:Frames-v0"]
    play += ["--eval-episodes", "2"]
    returns = script.evaluate_run(script.parse_args([*play, "--capture-video"]))
    assert [list(row) for row in returns.values()] == [["Frames-v0"]] * 2
    assert {path.name for path in folder.glob("videos/eval*")} == {
        f"eval_agent_{i}_Frames-v0.mp4" for i in range(2)
    }


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
        ("my_other_tasks:Bare-v0", "shows no 4x84x84 frames (uint8), but 7x7x3"),
        ("my_other_tasks:PairOfFrames-v0", "array of size 1"),
        ("my_other_tasks:UnpaidFrames-v0", "NoneType"),
        ("MiniGrid-Empty-5x5-v0", "module:id"),
    ],
)
def test_games_that_cannot_be_used_are_refused_in_one_line(env_id, words, my_tasks):
    with pytest.raises(SystemExit):
        PRPO_ATARI.parse_args(["--env-id", env_id])
    assert words in REFUSED[-1]
    assert f"--env-id {env_id}" in REFUSED[-1]
    assert "\n" not in REFUSED[-1]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_games_of_ale_have_the_same_actions_beside_ones_own(order, my_tasks):
    """Whatever the order: two of ALE's games have three actions each, and not the same.

    The number of actions is all that can be compared with a game of one's own.
    """
    games = ["my_other_tasks:Three-v0", "FreewayNoFrameskip-v4", "SkiingNoFrameskip-v4"]
    with pytest.raises(SystemExit):
        PRPO_ATARI.parse_args(["--env-ids", *[games[k] for k in order]])
    assert "need the same actions" in REFUSED[-1]
    pairs = [games[0], games[1], games[1]]
    args = PRPO_ATARI.parse_args(["--env-ids", *[pairs[k] for k in order]])
    assert len(args.env_ids) == 3


def test_a_game_with_other_actions_than_in_training_is_not_played(whole_run, tmp_path):
    """Two games with nine actions each, which are not the same: scores would mean nothing."""
    folder = shutil.copytree(whole_run(PRPO_ATARI), tmp_path / "run")
    copy_config(folder, folder, "--env-id=BeamRiderNoFrameskip-v4")
    play = ["--eval-only", str(folder)]
    with pytest.raises(SystemExit):
        PRPO_ATARI.parse_args([*play, "--env-id", "AsterixNoFrameskip-v4"])
    assert "need the actions of the games that the agents were trained on" in REFUSED[-1]
    assert PRPO_ATARI.parse_args(play).env_id == "BeamRiderNoFrameskip-v4"
    copy_config(folder, folder, "--full-action-space")
    args = PRPO_ATARI.parse_args([*play, "--env-id", "AsterixNoFrameskip-v4"])
    assert args.env_id == "AsterixNoFrameskip-v4"


def test_tasks_without_an_end_get_one(my_tasks, monkeypatch):
    """An evaluation plays whole episodes."""
    monkeypatch.setattr(PRPO_MINIGRID.module, "LONGEST_EPISODE", 6)
    monkeypatch.setattr(PRPO_ATARI.module, "LONGEST_EPISODE", 6)
    agent = PRPO_MINIGRID.new_agent()
    task = "my_other_tasks:Endless-v0"
    returns = PRPO_MINIGRID.evaluate(PRPO_MINIGRID.Args(), agent, task, [1, 2], 0, greedy=True)
    assert (returns <= 6).all()
    game = "my_other_tasks:EndlessFrames-v0"
    agent = PRPO_ATARI.new_agent()
    returns = PRPO_ATARI.evaluate(PRPO_ATARI.Args(), agent, game, [1, 2], 0, greedy=True)
    assert (returns <= 42).all()


@on([*SCRIPTS, PRTRPO_MINIGRID])
def test_playing_a_run_gives_its_own_evaluation_and_writes_nothing(script, whole_run, capsys):
    folder = whole_run(script)
    before = contents(folder)
    evaluation = summary_of(folder)["evaluation"]["agents"]
    task = script.tiny["env_id"]
    for argv, measure in (([], "mean"), (["--greedy"], "greedy_return")):
        args = script.parse_args(["--eval-only", str(folder), *argv])
        returns = script.evaluate_run(args)
        for i in range(3):
            assert len(returns[i][task]) == 2
            assert returns[i][task].mean() == pytest.approx(evaluation[i][task][measure], abs=1e-6)
        output = capsys.readouterr().out
        assert task in output
        assert ("greedy" in output) == bool(argv)
        for i in range(3):
            assert f"\n{i:>5}  " in output
            assert f"{returns[i][task].mean():.3f} ± " in output
    assert contents(folder) == before
    more = script.parse_args(["--eval-only", str(folder), "--eval-episodes", "1", "--seed", "5"])
    assert all(len(row[task]) == 1 for row in script.evaluate_run(more).values())
    output = capsys.readouterr().out  # one episode has no interval
    assert "nan" not in output and "±" not in output
    assert contents(folder) == before


@on([PRPO_MINIGRID, FEDAVG_MINIGRID])
def test_playing_needs_no_folder_to_write_to(script, whole_run, tmp_path, monkeypatch):
    """Nor space on the disk, or a short path: it writes nothing."""
    (tmp_path / "file").write_text("")
    folder = str(whole_run(script))
    monkeypatch.setenv("HOME", str(Path(folder).parent))
    for played in (folder, f"~/{Path(folder).name}"):
        argv = ["--eval-only", played, "--run-dir", str(tmp_path / "file")]
        assert script.parse_args(argv).eval_only == folder


@MINIGRID_SCRIPTS
def test_agents_play_other_tasks_than_their_own(script, whole_run):
    folder = whole_run(script)
    other = "MiniGrid-DoorKey-5x5-v0"
    play = ["--eval-only", str(folder), "--eval-episodes", "4"]
    args = script.parse_args([*play, "--env-id", other, "--levels-per-agent", "2"])
    names = [other] + [f"{other} levels of agent {i}" for i in range(3)]
    assert [list(row) for row in script.evaluate_run(args).values()] == [names] * 3
    tasks = [other, script.tiny["env_id"]]
    args = script.parse_args([*play, "--env-ids", *tasks, other])
    assert [list(row) for row in script.evaluate_run(args).values()] == [tasks] * 3


def test_what_belongs_to_a_task_is_replaced_with_it(whole_run, tmp_path):
    """Missions, private levels and the backend of a run are those of its own tasks only.

    What agents do not need to play, the file of a matrix, may be gone.
    """
    script = PRPO_MINIGRID
    task = "BabyAI-GoToLocalS5N2-v0"
    words = ["red", "green", "blue"]
    more = ["--levels-per-agent=2", "--env-backend=gymnasium", "--communicator=gone.csv"]
    copy_config(whole_run(script), tmp_path, f"--env-id={task}", "--missions", *words, *more)
    play = ["--eval-only", str(tmp_path)]

    def parse(*argv):
        args = script.parse_args([*play, *argv])
        return args.env_id, args.env_ids, args.missions, args.levels_per_agent, args.env_backend

    assert parse() == (task, (), tuple(words), 2, "gymnasium")
    for env_id in (DOOR_KEY, task):
        assert parse("--env-id", env_id) == (env_id, (), (), 0, "auto")
    assert parse("--env-ids", *[DOOR_KEY] * 3) == (task, (DOOR_KEY,) * 3, (), 0, "auto")
    assert parse("--env-id", DOOR_KEY, "--levels-per-agent", "3")[3] == 3
    with pytest.raises(SystemExit):
        parse("--seed", "5")
    assert REFUSED[-1].startswith(f"--seed 5: must be 1 as in {tmp_path}")
    elsewhere = ["--env-id", DOOR_KEY, "--levels-per-agent", "2"]
    assert script.parse_args([*play, "--seed", "5", *elsewhere]).seed == 5


def test_a_run_on_envpool_is_played_without_it(whole_run, tmp_path, monkeypatch):
    """Evaluations are in the official environment."""
    script = PRPO_MINIGRID
    copy_config(whole_run(script), tmp_path, "--env-backend=envpool")
    script.patch(monkeypatch, "find_spec", lambda name: None)
    assert script.parse_args(["--eval-only", str(tmp_path)]).env_backend == "envpool"
    with pytest.raises(SystemExit):
        script.parse_args(["--env-backend", "envpool"])
    assert "envpool is not installed" in REFUSED[-1]


@on([PRPO_MINIGRID, PRPO_ATARI, PRTRPO_MINIGRID])
def test_what_cannot_be_played_is_refused_in_one_line(script, whole_run, tmp_path, monkeypatch):
    folder = whole_run(script)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text((folder / "config.json").read_text())
    play = ["--eval-only", str(folder)]
    for argv, words in (
        (["--eval-only", str(tmp_path)], ["--eval-only", "config.json"]),
        ([*play, "--resume", str(folder)], ["--resume", "--eval-only"]),
        ([*play, "--num-agents", "2"], ["--num-agents 2", "must be 3"]),
        ([*play, "--eval-episodes", "0"], ["--eval-episodes 0"]),
    ):
        with pytest.raises(SystemExit):
            script.parse_args(argv)
        assert all(word in REFUSED[-1] for word in words), REFUSED[-1]
    for write in (lambda path: None, lambda path: path.write_bytes(b"damaged")):
        write(empty / "agent_0.safetensors")
        REFUSED.clear()
        with pytest.raises(SystemExit):
            script.evaluate_run(script.parse_args(["--eval-only", str(empty)]))
        assert "agent_0.safetensors cannot be loaded" in REFUSED[-1]
        assert "\n" not in REFUSED[-1]
    if script.family == "MiniGrid":
        fewer = [*play, "--env-id", "MiniGrid-Dynamic-Obstacles-6x6-v0"]
        with pytest.raises(SystemExit):
            script.evaluate_run(script.parse_args(fewer))
        assert "agent_0.safetensors" in REFUSED[-1]
        assert "\n" not in REFUSED[-1]
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert script.parse_args(play).eval_only  # without a rank it is not torchrun's
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit):
        script.parse_args(play)
    assert "without torchrun" in REFUSED[-1]


def test_greedy_actions_are_the_most_probable_ones():
    """On MiniGrid, step by step. Greedy returns do not depend on the seed, sampled ones do."""
    script = PRPO_MINIGRID
    env_id = "MiniGrid-Empty-Random-5x5-v0"
    torch.manual_seed(2)
    agent = script.new_agent()
    torch.nn.init.orthogonal_(agent.actor.weight)
    levels = list(range(20))
    expected = []
    for level in levels:
        env = script.make_env(env_id)
        total = 0.0
        over = False
        obs, _ = env.reset(seed=level)
        while not over:
            action = int(agent.predict(torch.from_numpy(obs)[None])[0].argmax())
            obs, reward, terminated, truncated, _ = env.step(action)
            total += reward
            over = terminated or truncated
        expected.append(total)
    for seed in (0, 1):
        greedy = script.evaluate(script.Args(), agent, env_id, levels, seed, greedy=True)
        assert greedy.tolist() == pytest.approx(expected)
    sampled = [script.evaluate(script.Args(), agent, env_id, levels, seed) for seed in (0, 1)]
    assert not np.array_equal(*sampled)


def test_greedy_games_draw_nothing_at_random(monkeypatch):
    """On Atari scores do not depend on the seed, and each action is that of the largest logit."""
    script = PRPO_ATARI
    env_id = "BreakoutNoFrameskip-v4"
    torch.manual_seed(0)
    agent = script.new_agent()
    predict = script.Agent.predict
    predictions = []
    step = script.Games.step
    taken = []

    def record(agent, obs):
        predictions.append(predict(agent, obs))
        return predictions[-1]

    def follow(games, actions):
        taken.append(actions[0].copy())
        return step(games, actions)

    monkeypatch.setattr(script.Agent, "predict", record)
    monkeypatch.setattr(script.Games, "step", follow)
    scores = [
        script.evaluate(script.Args(), agent, env_id, [1, 2], seed, greedy=True) for seed in (0, 1)
    ]
    assert np.array_equal(*scores)
    assert np.array_equal(
        np.stack(taken), torch.stack([logits.argmax(-1) for logits, _ in predictions]).numpy()
    )


def test_an_evaluation_begins_with_every_level(monkeypatch):
    """And an agent that has diverged has no return."""
    env_id = "MiniGrid-DoorKey-6x6-v0"
    args = PRPO_MINIGRID.Args(env_id=env_id, device="cpu")
    agent = PRPO_MINIGRID.new_agent()
    seen = []
    predict = agent.predict

    def spy(obs):
        seen.append(obs.numpy().copy())
        return predict(obs)

    monkeypatch.setattr(agent, "predict", spy)
    levels = [5, 6, 7]
    PRPO_MINIGRID.evaluate(args, agent, env_id, levels, 0)
    env = PRPO_MINIGRID.make_env(env_id)
    starts = [env.reset(seed=level)[0] for level in levels]
    assert np.array_equal(seen[0], starts)
    assert not np.array_equal(starts[0], starts[1])
    agent.critic.weight.data[0, 0] = torch.nan
    assert np.isnan(PRPO_MINIGRID.evaluate(args, agent, env_id, levels, 0)).all()


def test_every_agent_is_tested_on_the_levels_of_every_task():
    """Unseen levels of each task, and the private ones of each agent on this agent's task."""
    env_ids = ("MiniGrid-Fetch-5x5-N2-v0", "MiniGrid-Fetch-6x6-N2-v0")
    settings = {"num_agents": 2, "env_ids": env_ids, "missions": ("key", "ball")}
    args = PRPO_MINIGRID.Args(**settings, levels_per_agent=4, eval_episodes=3)
    tests = PRPO_MINIGRID.make_tests(args)
    tasks = PRPO_MINIGRID.list_tasks(args)
    levels = [PRPO_MINIGRID.list_test_levels(args, task) for task in tasks]
    assert levels[0] != levels[1]
    private = [PRPO_MINIGRID.list_private_levels(args, i)[:3] for i in range(2)]
    assert list(tests.values()) == [
        (env_ids[0], levels[0]),
        (env_ids[1], levels[1]),
        (env_ids[0], private[0]),
        (env_ids[1], private[1]),
    ]
