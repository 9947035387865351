"""Tasks of one's own, and playing the agents of a finished run."""

import hashlib
import json
import re
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import (
    FEDAVG_ATARI,
    PRPO_ATARI,
    PRPO_MINIGRID,
    PRTRPO_MINIGRID,
    REPOSITORY,
    SCRIPTS,
    call,
    flags,
    on,
    only_run,
    rows_of,
    torchrun,
)

MINIGRID_SCRIPTS = on(
    [script for script in SCRIPTS if script.family == "MiniGrid"] + [PRTRPO_MINIGRID]
)
EXAMPLE = re.search(
    r"```python\n(import gymnasium.*?)```",
    (REPOSITORY / "docs" / "prpo_minigrid.md").read_text(),
    re.S,
)[1]
OWN, PLAIN = "my_tasks:FrugalDoorKey-v0", "MiniGrid-DoorKey-5x5-v0"


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture
def my_tasks(tmp_path, monkeypatch):
    """The folder of a module with the page's example and with tasks that cannot be used."""
    (tmp_path / "my_tasks.py").write_text(EXAMPLE)
    wrong = """
import gymnasium as gym
import numpy as np
from minigrid.envs import DoorKeyEnv
from minigrid.wrappers import ImgObsWrapper, RGBImgPartialObsWrapper


class Bare(gym.Env):  # the codes alone, no grid, no mission, no film
    observation_space = gym.spaces.Box(0, 10, (7, 7, 3), np.uint8)
    action_space = gym.spaces.Discrete(7)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.full((7, 7, 3), 1, np.uint8), {}
    def step(self, action):
        self.time += 1
        return np.full((7, 7, 3), self.time % 10, np.uint8), float(action == 3), False, self.time == 9, {}


class Frames(gym.Env):  # a game of nine steps, in which the action with the number of the brightness scores
    observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = gym.spaces.Discrete(4)
    def __init__(self, render_mode=None):
        self.render_mode = render_mode
    def frames(self):
        return np.full((4, 84, 84), 60 * (self.time % 4), np.uint8)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.count = int(self.np_random.integers(4)), 0
        return self.frames(), {"lives": 2}
    def step(self, action):
        reward = 7.0 * (action == self.time % 4)
        self.time, self.count = self.time + 1, self.count + 1
        return self.frames(), reward, self.count == 9, False, {"lives": 2 - self.count // 5}
    def render(self):
        return np.full((40, 60, 3), self.time, np.uint8)


gym.register("Frames-v0", Frames)
gym.register("Bare-v0", Bare)
gym.register("Pixels-v0", lambda **more: RGBImgPartialObsWrapper(DoorKeyEnv(size=5, **more)))
gym.register("MiniGrid-Mine-v0", Bare)
"""
    (tmp_path / "my_other_tasks.py").write_text(wrong)
    (tmp_path / "my_copies.py").write_text("import my_tasks\n")
    (tmp_path / "my_broken_tasks.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(gym.envs.registration, "registry", dict(gym.envs.registration.registry))
    yield tmp_path
    for name in ("my_tasks", "my_other_tasks", "my_copies", "my_broken_tasks"):
        sys.modules.pop(name, None)


def test_the_page_s_example_trains_on_ranks_resumes_and_plays(my_tasks, tmp_path):
    """An agent with a reward of its own beside two others: names without the module, costs in its returns alone."""
    assert 8 <= len(EXAMPLE.splitlines()) <= 12
    changes = {
        "env_ids": "",
        "iterations": 4,
        "num_steps": 256,
        "communicator": "uniform",
        "save_every": 1,
    }
    args = flags(PRPO_MINIGRID, tmp_path / "runs", **changes)
    at = args.index("--env-ids")
    args[at + 1 : at + 2] = [OWN, PLAIN, PLAIN]
    env = {"PYTHONPATH": f"{REPOSITORY}:{my_tasks}", "cwd": tmp_path}
    run = torchrun(3, REPOSITORY / "prpo_minigrid.py", *args, "--capture-video", **env)
    assert run.returncode == 0, run.stderr
    folder = only_run(tmp_path / "runs")
    assert folder.name.startswith(f"FrugalDoorKey-v0+{PLAIN}__")
    assert [row["env_id"] for row in rows_of(folder)[:3]] == ["FrugalDoorKey-v0", PLAIN, PLAIN]
    assert len(list(folder.glob("videos/*.mp4"))) == 3
    (longer,) = (["--total-timesteps", str(6 * 512)],)
    run = call(REPOSITORY / "prpo_minigrid.py", "--resume", folder, *longer, **env)
    assert run.returncode == 0, run.stderr
    summary = summary_of(folder)
    assert summary["env_backend"] == "gymnasium" and summary["iterations"] == 6
    assert [list(row) for row in summary["evaluation"]["agents"]] == [
        ["FrugalDoorKey-v0", PLAIN]
    ] * 3
    # After the time limit of 250 steps the costs are 0.25; elsewhere no return is below 0
    returns = np.array([float(row["episodic_return"]) for row in rows_of(folder)]).reshape(6, 3)
    assert np.nanmin(returns[:, 0]) == pytest.approx(-0.25) and np.nanmin(returns[:, 1:]) >= 0

    before = contents(folder)
    play = [
        "--eval-only",
        folder,
        "--env-id",
        OWN,
        "--eval-episodes",
        "1",
        "--capture-video",
        "--greedy",
    ]
    run = call(REPOSITORY / "prpo_minigrid.py", *play, **env)
    assert run.returncode == 0, run.stderr
    assert "FrugalDoorKey-v0" in run.stdout and f"videos in {folder / 'videos'}" in run.stdout
    after = contents(folder)
    films = after.keys() - before.keys()
    assert {
        re.match(r"eval_agent_(\d)_FrugalDoorKey-v0.*\.mp4$", path.name)[1] for path in films
    } == {"0", "1", "2"}
    assert len(films) == 3 and before.items() <= after.items()


def contents(folder):
    """Every file of a folder, with its content's hash."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@MINIGRID_SCRIPTS
@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (
            ["--env-id", "no_such_module:Task-v0"],
            ["--env-id no_such_module:Task-v0", "no_such_module"],
        ),
        (["--env-id", "my_broken_tasks:Task-v0"], ["no_such_package"]),
        (["--env-id", "my_tasks:NoSuchTask-v0"], ["NoSuchTask"]),
        (["--env-id", "my_other_tasks:Pixels-v0"], ["shows no 7x7x3 codes", "56x56x3"]),
        (["--env-id", "CartPole-v1"], ["shows no 7x7x3 codes", "4 (float32)"]),
        (["--env-id", "my_other_tasks:Bare-v0", "--levels-per-agent", "2"], ["has no grid"]),
        (["--env-id", "my_other_tasks:Bare-v0", "--capture-video"], ["my_other_tasks:Bare-v0"]),
        (["--env-id", OWN, "--env-backend", "envpool"], ["--env-backend envpool"]),
        (
            ["--num-agents", "2", "--env-ids", OWN, "my_copies:FrugalDoorKey-v0"],
            ["has the name of another task"],
        ),
        (["--greedy"], ["--greedy", "--eval-only"]),
    ],
    ids=str,
)
def test_tasks_that_cannot_be_used_are_refused_in_one_line(script, argv, parts, my_tasks):
    with pytest.raises(SystemExit) as end:
        script.parse_args(argv)
    message = str(end.value.args[0]) if end.value.code != 2 else ""
    message = message or REFUSED[-1]
    assert "\n" not in message.strip() and all(part in message for part in parts), message


REFUSED = []


@pytest.fixture(autouse=True)
def refusals(monkeypatch):
    """What was refused, however the line is written."""
    import communicators

    stop = communicators.stop

    def record(message, *more):
        REFUSED.append(message)
        stop(message, *more)

    monkeypatch.setattr(communicators, "stop", record)


@MINIGRID_SCRIPTS
def test_a_task_may_show_its_codes_alone(script, my_tasks, tmp_path):
    """Without grid, mission and images; mixed with one of MiniGrid's. Actions and rewards are the task's."""
    args = flags(
        script, tmp_path / "runs", env_ids="", num_agents=2, communicator="uniform", iterations=2
    )
    at = args.index("--env-ids")
    args[at + 1 : at + 2] = ["my_other_tasks:Bare-v0", PLAIN]
    args = [word for word in args if word not in ()]
    summary = script.main(script.parse_args(args))
    evaluation = summary["evaluation"]["agents"][0]["Bare-v0"]
    assert 0 <= evaluation["mean"] <= 9 and evaluation["greedy_return"] in (0, 9)


@on([PRPO_ATARI, FEDAVG_ATARI])
def test_a_game_of_ones_own_trains_and_plays(script, my_tasks, tmp_path):
    """Beside one of ALE's: scores are plain, a life lost ends an episode; names without the module; films."""
    settings = {
        "env_ids": "",
        "num_agents": 2,
        "communicator": "uniform",
        "iterations": 2,
        "local_updates": 1,
    }
    args = flags(script, tmp_path / "runs", **settings, num_steps=40, eval_episodes=1)
    at = args.index("--env-ids")
    args[at + 1 : at + 2] = ["my_other_tasks:Frames-v0", "BreakoutNoFrameskip-v4"]
    summary = script.main(script.parse_args([*args, "--capture-video"]))
    folder = only_run(tmp_path / "runs")
    assert (
        folder.name.startswith("Frames-v0+BreakoutNoFrameskip-v4__")
        and summary["env_backend"] == "gymnasium"
    )
    assert len(list(folder.glob("videos/*.mp4"))) == 2
    rows = [row for row in rows_of(folder) if row["agent"] == "0"]
    assert [row["env_id"] for row in rows] == ["Frames-v0"] * 2
    outcomes = [(float(row["episodic_length"]), float(row["episodic_return"])) for row in rows]
    # One of the nine steps only follows a lost life: it is not the agent's
    assert all(length == 8 and 0 < score < 63 for length, score in outcomes), outcomes
    for row in summary["evaluation"]["agents"]:
        assert row["Frames-v0"]["mean"] % 7 == 0 <= row["Frames-v0"]["greedy_return"] <= 63
    play = [
        "--eval-only",
        str(folder),
        "--env-id",
        "my_other_tasks:Frames-v0",
        "--eval-episodes",
        "2",
    ]
    returns = script.evaluate_run(script.parse_args([*play, "--capture-video"]))
    assert [list(row) for row in returns] == [["Frames-v0"]] * 2
    assert {path.name for path in folder.glob("videos/eval*")} == {
        f"eval_agent_{i}_Frames-v0.mp4" for i in range(2)
    }


def test_lives_of_a_game_of_ones_own_end_episodes(my_tasks):
    script = PRPO_ATARI
    games = script.Games(script.Args(), ["my_other_tasks:Frames-v0"], [[1, 2]])
    ends = []
    for _ in range(20):
        rewards, terminations, truncations, valid, ended = games.step(
            slice(0, 2), np.zeros((1, 2), dtype=int)
        )
        assert set(np.unique(rewards)) <= {0.0, 1.0} and not truncations.any()
        ends.append((bool(terminations[0, 0]), bool(valid[0, 0]), [length for *_, length in ended]))
    games.close()
    assert [number for number, (end, *_) in enumerate(ends) if end] == [4, 8, 14, 18]
    assert [number for number, (_, valid, _) in enumerate(ends) if not valid] == [5, 9, 15, 19]
    assert [number for number, (*_, lengths) in enumerate(ends) if lengths] == [8, 18]


@on([PRPO_ATARI])
@pytest.mark.parametrize(
    ("env_id", "part"),
    [
        ("no_such_module:Game-v0", "no_such_module"),
        ("my_other_tasks:Bare-v0", "shows no 4x84x84 frames (uint8), but 7x7x3"),
        ("MiniGrid-Empty-5x5-v0", "module:id"),
    ],
)
def test_games_that_cannot_be_used_are_refused_in_one_line(script, env_id, part, my_tasks):
    with pytest.raises(SystemExit):
        script.parse_args(["--env-id", env_id])
    assert part in REFUSED[-1] and f"--env-id {env_id}" in REFUSED[-1] and "\n" not in REFUSED[-1]


EVERY_SCRIPT = on([*SCRIPTS, PRTRPO_MINIGRID])


@EVERY_SCRIPT
def test_playing_a_run_gives_its_own_evaluation_and_writes_nothing(script, whole_run, capsys):
    folder = whole_run(script)
    before, evaluation = contents(folder), summary_of(folder)["evaluation"]["agents"]
    task = script.tiny["env_id"]
    for argv, measure in (([], "mean"), (["--greedy"], "greedy_return")):
        args = script.parse_args(["--eval-only", str(folder), *argv])
        returns = script.evaluate_run(args)
        for i in range(3):
            assert len(returns[i][task]) == 2
            assert returns[i][task].mean() == pytest.approx(evaluation[i][task][measure], abs=1e-6)
        output = capsys.readouterr().out
        assert task in output and ("greedy" in output) == bool(argv)
        for i in range(3):
            assert f"\n{i:>5}  " in output and f"{returns[i][task].mean():.3f} ± " in output
    assert contents(folder) == before
    more = script.parse_args(["--eval-only", str(folder), "--eval-episodes", "3", "--seed", "5"])
    assert (
        all(len(row[task]) == 3 for row in script.evaluate_run(more)) and contents(folder) == before
    )


@MINIGRID_SCRIPTS
def test_agents_play_other_tasks_than_their_own(script, whole_run):
    folder, other = whole_run(script), "MiniGrid-DoorKey-5x5-v0"
    play = ["--eval-only", str(folder), "--eval-episodes", "4"]
    args = script.parse_args([*play, "--env-id", other, "--levels-per-agent", "2"])
    names = [other] + [f"{other} levels of agent {i}" for i in range(3)]
    assert [list(row) for row in script.evaluate_run(args)] == [names] * 3
    args = script.parse_args([*play, "--env-ids", other, script.tiny["env_id"], other])
    assert [list(row) for row in script.evaluate_run(args)] == [[other, script.tiny["env_id"]]] * 3


@EVERY_SCRIPT
def test_what_cannot_be_played_is_refused_in_one_line(script, whole_run, tmp_path, monkeypatch):
    folder, empty = whole_run(script), tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text((folder / "config.json").read_text())
    play = ["--eval-only", str(folder)]
    for argv, parts in (
        (["--eval-only", str(tmp_path)], ["--eval-only", "config.json"]),
        ([*play, "--resume", str(folder)], ["--resume", "--eval-only"]),
        ([*play, "--num-agents", "2"], ["--num-agents 2", "must be 3"]),
        ([*play, "--eval-episodes", "0"], ["--eval-episodes 0"]),
    ):
        with pytest.raises(SystemExit):
            script.parse_args(argv)
        assert all(part in REFUSED[-1] for part in parts), REFUSED[-1]
    with pytest.raises(SystemExit):
        script.evaluate_run(script.parse_args(["--eval-only", str(empty)]))
    assert "agent_0.safetensors" in REFUSED[-1] and "\n" not in REFUSED[-1]
    if script.family == "MiniGrid":
        fewer = [*play, "--env-id", "MiniGrid-Dynamic-Obstacles-6x6-v0"]
        with pytest.raises(SystemExit):
            script.evaluate_run(script.parse_args(fewer))
        assert "agent_0.safetensors" in REFUSED[-1] and "\n" not in REFUSED[-1]
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit):
        script.parse_args(play)
    assert "without torchrun" in REFUSED[-1]


def test_greedy_actions_are_the_most_probable_ones():
    """Step by step on MiniGrid; equal whatever the seed, where sampled ones are not."""
    script, env_id = PRPO_MINIGRID, "MiniGrid-Empty-Random-5x5-v0"
    torch.manual_seed(2)
    agent = script.new_agent()
    torch.nn.init.orthogonal_(agent.actor.weight)
    levels = list(range(20))
    expected = []
    for level in levels:
        env, total, over = script.make_env(env_id), 0.0, False
        obs, _ = env.reset(seed=level)
        while not over:
            action = int(agent.predict(torch.from_numpy(obs)[None])[0].argmax())
            obs, reward, terminated, truncated, _ = env.step(action)
            total, over = total + reward, terminated or truncated
        expected.append(total)
    for seed in (0, 1):
        found = script.evaluate(script.Args(), agent, env_id, levels, seed, greedy=True)
        assert found.tolist() == pytest.approx(expected)
    sampled = [script.evaluate(script.Args(), agent, env_id, levels, seed) for seed in (0, 1)]
    assert not np.array_equal(*sampled)


def test_greedy_games_draw_nothing_at_random(monkeypatch):
    """On Atari: equal whatever the seed, and in every step the action of the largest logit."""
    script, env_id = PRPO_ATARI, "BreakoutNoFrameskip-v4"
    torch.manual_seed(0)
    agent, predict, asked = script.new_agent(), script.Agent.predict, []
    step, taken = script.Games.step, []

    def record(agent, obs):
        asked.append(predict(agent, obs))
        return asked[-1]

    def follow(games, part, actions):
        taken.append(actions[0].copy())
        return step(games, part, actions)

    monkeypatch.setattr(script.Agent, "predict", record)
    monkeypatch.setattr(script.Games, "step", follow)
    scores = [
        script.evaluate(script.Args(), agent, env_id, [1, 2], seed, greedy=True) for seed in (0, 1)
    ]
    assert np.array_equal(*scores)
    assert np.array_equal(
        np.stack(taken), torch.stack([logits.argmax(-1) for logits, _ in asked]).numpy()
    )
