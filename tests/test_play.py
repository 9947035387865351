"""benchmark/play.py: the agents of a run play again, and are filmed."""

import hashlib
import importlib
import json
import shutil
from pathlib import Path

import gymnasium as gym
import imageio_ffmpeg
import numpy as np
import pytest
import torch
from helpers import (
    DISTRAL_MINIGRID,
    FEDAVG_ATARI,
    FEDAVG_MINIGRID,
    PRPO_ATARI,
    PRPO_MINIGRID,
    PRPO_MUJOCO,
    PRTRPO_MINIGRID,
    REPOSITORY,
    SLOW_FEDAVG_MUJOCO,
    Child,
    config_of,
    copy_config,
    notes_of,
    on,
    only_run,
    outcomes,
    refusal,
    results_of,
    table_of,
    tiny,
)
from PIL import Image
from safetensors.torch import load_file, save_file

import prpo_mujoco
import s2zpo_mujoco
from benchmark import play

DOOR_KEY = "MiniGrid-DoorKey-5x5-v0"


class Vectors:
    """The tiny run of a script on tasks of vectors, as those of `helpers.Variant`."""

    def __init__(self, module, env_id, **settings):
        self.module = module
        self.tiny = {"env_id": env_id}
        self.settings = {"env_id": env_id, "num_agents": 2, "eval_episodes": 2} | settings

    def make(self, folder):
        """Train in this folder."""
        return self.module.main(self.module.Args(**self.settings, run_dir=str(folder)))

    def __repr__(self):
        return f"{self.module.__name__}-{self.tiny['env_id']}"


SMALL = {"total_timesteps": 64, "num_envs": 2, "num_steps": 16, "num_minibatches": 1}
SMALL |= {"local_updates": 1, "communicator": "self-preferred", "device": "cpu"}
S2ZPO = Vectors(s2zpo_mujoco, "CartPole-v1", horizon=20, total_iterations=1)
PENDULUM = Vectors(prpo_mujoco, "Pendulum-v1", **SMALL)  # drawn without OpenGL
EVERY_SCRIPT = [PRPO_MINIGRID, FEDAVG_MINIGRID, PRTRPO_MINIGRID, PRPO_ATARI, S2ZPO]
EVERY_SCRIPT += [DISTRAL_MINIGRID, pytest.param(FEDAVG_ATARI, marks=pytest.mark.slow)]
EVERY_SCRIPT += [PRPO_MUJOCO, SLOW_FEDAVG_MUJOCO]


@pytest.fixture(scope="session")
def run_of(whole_run, once):
    """run_of(script): the folder of its tiny run."""

    def get(script):
        if isinstance(script, Vectors):
            folder, _ = once(f"whole_run_{script}", script.make)
            return only_run(folder)
        if script is FEDAVG_ATARI:  # a smaller one
            args = {"iterations": 1, "num_agents": 2}
            folder, _ = once("short_run", lambda folder: script.main(tiny(script, folder, **args)))
            return only_run(folder)
        return whole_run(script)

    return get


@pytest.fixture
def copied_run(whole_run, tmp_path):
    """A run that a test may damage."""
    return shutil.copytree(whole_run(PRPO_MINIGRID), tmp_path / "run")


def play_run(folder, **given):
    """Play, and return what is returned."""
    return play.main(play.Args(str(folder), **given))


def contents(folder):
    """Every file of a folder, with its content's hash."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def forbid_playing(monkeypatch):
    """Whatever is refused is refused before this."""
    for module in (PRPO_MINIGRID.module, PRPO_ATARI.module, prpo_mujoco, s2zpo_mujoco):
        monkeypatch.setattr(module, "evaluate", lambda *_: pytest.fail("plays"))


# --- returns ---


@on(EVERY_SCRIPT)
def test_playing_a_run_gives_its_own_evaluation_and_writes_nothing(script, run_of, capsys):
    """Of every agent, sampled and greedy; the table has the means and intervals."""
    folder = run_of(script)
    before = contents(folder)
    last = {}
    for row in table_of(folder, "evaluations"):
        last[int(row["agent"])] = row
    if script is S2ZPO:  # one policy for all
        del last[1]
    expected = {"mean_return": [], "greedy_return": []}
    for greedy, column in enumerate(expected):
        results = play_run(folder, greedy=bool(greedy))
        assert results.keys() == last.keys()
        lines = capsys.readouterr().out.splitlines()
        assert ("greedy" in lines[-len(last) - 2]) == greedy
        for i, row in last.items():
            returns = results[i][script.tiny["env_id"]]
            assert len(returns) == 2
            assert returns.mean() == pytest.approx(float(row[column]), rel=1e-5, abs=1e-4)
            assert lines[i - len(last)].split()[:3] == [str(i), f"{returns.mean():.3f}", "±"]
            expected[column].append(row[column])
    assert contents(folder) == before
    if script in (PRPO_MINIGRID, PRPO_ATARI, PRPO_MUJOCO):  # so that the right agents show
        assert len(set(expected["mean_return"])) > 1
        assert expected["mean_return"] != expected["greedy_return"]


def test_tasks_episodes_and_seed_may_be_given(whole_run, capsys):
    """Several tasks, the agents' own once more, and of one episode no interval."""
    tasks = (DOOR_KEY, PRPO_MINIGRID.tiny["env_id"])
    folder = whole_run(PRPO_MINIGRID)
    results = play_run(folder, env_id=tasks, episodes=1, seed=5)
    assert [[(task, len(of)) for task, of in row.items()] for row in results.values()] == [
        [(task, 1) for task in tasks]
    ] * 3
    output = capsys.readouterr().out
    assert "nan" not in output and "±" not in output
    task = tasks[1]
    seeds = [play_run(folder, env_id=(task,), episodes=8, seed=seed)[0][task] for seed in (5, 6)]
    assert not np.array_equal(*seeds)


def test_what_playing_does_not_need_may_be_missing(copied_run, monkeypatch):
    """envpool, a matrix's file, evaluations, and agents that another process held."""
    expected = play_run(copied_run, episodes=1)[1]
    words = ["--env-backend=envpool", "--communicator=gone.csv", "--eval-episodes=0"]
    copy_config(copied_run, copied_run, *words)
    for i in (0, 2):
        (copied_run / f"agent_{i}.safetensors").unlink()
    config = config_of(copied_run) | {"agents": [1]}
    (copied_run / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(PRPO_MINIGRID.module, "find_spec", lambda name: None)
    assert str(play_run(copied_run)) == str({1: expected})


def test_a_script_of_ones_own_is_found_where_one_is(copied_run, tmp_path):
    """The tool is started from another folder than its own."""
    names = "Args, evaluate_agents, make_agents"
    (tmp_path / "mine.py").write_text(f"from prpo_minigrid import {names}")
    change_config(copied_run, script="mine")
    tool = REPOSITORY / "benchmark" / "play.py"
    [((output, errors), code)] = outcomes([Child(tool, "run", "--episodes", "1", cwd=tmp_path)])
    assert code == 0, errors
    assert output.splitlines()[-5] == "run: mean return of 1 episodes, sampled actions"


# --- what cannot be played ---


def damage_weights(folder):
    (folder / "agent_2.safetensors").write_bytes(b"damaged")


def lose_weights(folder):
    (folder / "agent_2.safetensors").unlink()


def spoil_weights(folder):
    weights = load_file(folder / "agent_2.safetensors")
    weights["critic.bias"][0] = torch.inf
    save_file(weights, folder / "agent_2.safetensors")


def change_config(folder, **changes):
    config = config_of(folder) | changes
    (folder / "config.json").write_text(json.dumps(config))


REFUSED = {
    "no run": (lambda folder: (folder / "config.json").unlink(), {}, "with its config.json"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("[" * 9**5), {}, "config.json"),
    "a list": (lambda folder: (folder / "config.json").write_text("[1]"), {}, "config.json"),
    "another script": (lambda folder: change_config(folder, script="prpo_llm"), {}, "'prpo_llm'"),
    "no script": (lambda folder: change_config(folder, script=["x"]), {}, "no run of a control"),
    "a path": (lambda folder: change_config(folder, script="../prpo_llm"), {}, "'../prpo_llm'"),
    "no command": (lambda folder: change_config(folder, command=None), {}, "of this version of"),
    "an old flag": (
        lambda folder: change_config(folder, command=["--levels-per-agent=3"]),
        {},
        "is no run of this version of prpo_minigrid.py",
    ),
    "a word for tyro": (
        lambda folder: change_config(folder, command=["--tyro-write-completion", "bash", "x"]),
        {},
        "is no run of this version",
    ),
    "help": (lambda folder: change_config(folder, command=["--help"]), {}, "is no run of this"),
    "agents": (lambda folder: change_config(folder, agents=[-1]), {}, "none of the run's"),
    "a number of agents": (lambda folder: change_config(folder, agents=2), {}, "none of the run's"),
    "no weights": (lose_weights, {}, "agent_2.safetensors: cannot be loaded"),
    "damaged weights": (damage_weights, {}, "agent_2.safetensors: cannot be loaded"),
    "infinite weights": (spoil_weights, {}, "agent_2.safetensors: has weights that are not finite"),
    "no task": (None, {"env_id": ("MiniGrid-Nope-v0",)}, "--eval-env-ids MiniGrid-Nope-v0"),
    "other actions": (
        None,
        {"env_id": ("MiniGrid-Dynamic-Obstacles-6x6-v0",)},
        "need the same number of actions",
    ),
    "no folder": (None, {"video": "README.md/films"}, "--video README.md/films: cannot be written"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_played_is_one_line(case, copied_run, monkeypatch, tmp_path):
    """Nothing is played before, or written."""
    damage, given, words = REFUSED[case]
    if damage:
        damage(copied_run)
    monkeypatch.chdir(tmp_path)
    if "video" in given:
        (tmp_path / "README.md").write_text("")
    forbid_playing(monkeypatch)
    before = contents(tmp_path)
    assert words in refusal(play_run, copied_run, **given)
    assert contents(tmp_path) == before


def test_no_other_module_is_imported(copied_run, monkeypatch, tmp_path):
    """Only a file that is a control script, whatever name config.json has."""
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'done')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(play, "FOLDERS", (tmp_path, *play.FOLDERS))
    for name in ("evil", "json", "play", "federate", "tests.helpers"):
        change_config(copied_run, script=name)
        assert f"{name!r}" in refusal(play_run, copied_run)
    assert not (tmp_path / "done").exists()


def test_a_game_with_other_actions_than_in_training_is_not_played(copied_run):
    """Two games with nine actions each, which are not the same: scores would mean nothing."""
    command = ["--env-id=BeamRiderNoFrameskip-v4", "--num-agents=2"]
    change_config(copied_run, script="prpo_atari", command=command)
    line = refusal(play_run, copied_run, env_id=("AsterixNoFrameskip-v4",))
    assert "need the same actions" in line
    change_config(copied_run, command=[*command, "--full-action-space"])
    line = refusal(play_run, copied_run, env_id=("AsterixNoFrameskip-v4",))
    assert "agent_0.safetensors: cannot be loaded" in line


# --- films ---


def pictures(number, height=20, width=31):
    """Frames of one colour each, ever brighter."""
    return [np.full((height, width, 3), 20 * k, dtype=np.uint8) for k in range(number)]


@pytest.fixture
def broken_encoder(tmp_path, monkeypatch):
    """An ffmpeg that reads a little and gives up."""
    program = tmp_path / "ffmpeg"
    program.write_text("#!/bin/sh\nhead -c 9 >/dev/null\necho gave up >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(program))
    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_version", lambda: "7.0")


@pytest.mark.parametrize("size", [(20, 32), (21, 33), (20, 31), (1, 2)])
def test_films_play_in_browsers(size, tmp_path, capfd):
    """H.264 in yuv420p with even sizes, whatever the frames' are; every frame is in it."""
    path = tmp_path / "film %d: 1.mp4"
    (tmp_path / "unfinished").mkdir()
    film = play.Film(path, 10, tmp_path / "unfinished")
    for frame in pictures(7, *size):
        film.add(frame)
    assert not path.exists()
    film.finish()
    reader = imageio_ffmpeg.read_frames(path)
    meta = next(reader)
    assert meta["codec"] == "h264"
    assert meta["pix_fmt"].startswith("yuv420p")
    assert meta["fps"] == 10
    width, height = meta["source_size"]
    assert (height, width) == (size[0] + size[0] % 2, size[1] + size[1] % 2)
    decoded = [np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader]
    assert len(decoded) == 7
    for k, frame in enumerate(decoded):
        assert abs(frame[: size[0], : size[1]].mean() - 20 * k) < 10
    assert list((tmp_path / "unfinished").iterdir()) == []
    assert capfd.readouterr() == ("", "")


@on([PRPO_MINIGRID, PENDULUM, S2ZPO])
def test_films_show_the_first_episodes(script, run_of, tmp_path, monkeypatch):
    """Whole ones, picture by picture, of each agent on each task; the returns are the same."""
    folder = run_of(script)
    module = script.module
    expected = play_run(folder)
    episodes = []
    shown = {}
    make_env = module.make_env

    class Recorder(gym.Wrapper):
        def reset(self, **options):
            result = self.env.reset(**options)
            episodes.append([self.env.render()])
            self.pictures = episodes[-1]
            return result

        def step(self, action):
            result = self.env.step(action)
            self.pictures.append(self.env.render())
            return result

    class Film(play.Film):
        def add(self, frame):
            shown.setdefault(self.path.name, []).append(frame)
            super().add(frame)

    def record(*arguments, **options):
        return Recorder(make_env(*arguments, **options))

    monkeypatch.setattr(play, "Film", Film)
    monkeypatch.setattr(play, "check_films", lambda *_: None)
    monkeypatch.setattr(module, "make_env", record)
    films = tmp_path / "films"
    results = play_run(folder, video=str(films))
    assert str(results) == str(expected)
    names = [f"agent_{i}_{script.tiny['env_id']}.mp4" for i in expected]
    assert sorted(path.name for path in films.iterdir()) == names
    first = [episode for episode in episodes if episode[0] is not None][-2 * len(names) :: 2]
    for name, pictures in zip(names, first, strict=True):
        assert np.array_equal(shown[name], pictures)
        number, _ = imageio_ffmpeg.count_frames_and_secs(films / name)
        assert number == len(pictures) > 3


def test_a_film_that_fails_is_one_line(whole_run, broken_encoder, tmp_path, capfd):
    """While pictures are written, and no part of it remains."""
    films = tmp_path / "films"
    line = refusal(play_run, whole_run(PRPO_MINIGRID), video=str(films))
    assert line.startswith(PRPO_MINIGRID.tiny["env_id"])
    assert list(films.iterdir()) == []


def test_a_film_that_is_not_whole_is_an_error(broken_encoder, tmp_path, monkeypatch):
    """Of an encoder that gives up at its end, or leaves out a picture."""
    film = play.Film(tmp_path / "film.mp4", 10, tmp_path)
    film.add(pictures(1)[0])
    with pytest.raises((OSError, RuntimeError)):
        film.finish()
    monkeypatch.delenv("IMAGEIO_FFMPEG_EXE")
    (tmp_path / "unfinished").mkdir()
    film = play.Film(tmp_path / "film.mp4", 10, tmp_path / "unfinished")
    film.add(pictures(1)[0])
    film.length = 2
    with pytest.raises(OSError, match="1 of 2 pictures"):
        film.finish()
    assert not (tmp_path / "film.mp4").exists()


def test_other_sizes_and_what_is_no_picture_are_errors(tmp_path):
    film = play.Film(tmp_path / "film.mp4", 10, tmp_path)
    for frame in (None, np.zeros((4, 4, 3)), np.zeros((4, 4), np.uint8)):
        with pytest.raises(ValueError, match="no pictures"):
            film.add(frame)
    film.add(pictures(1)[0])
    with pytest.raises(ValueError, match="different sizes"):
        film.add(pictures(1, 22)[0])
    film.close()


@on([PRPO_MINIGRID, PRPO_ATARI, PENDULUM, S2ZPO])
def test_films_without_an_encoder_are_refused_first(script, run_of, tmp_path, monkeypatch):
    """Where ffmpeg is missing, and where it does not start."""
    folder = run_of(script)
    forbid_playing(monkeypatch)
    films = str(tmp_path / "films")
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(tmp_path / "nowhere"))
    line = refusal(play_run, folder, video=films)
    assert line.startswith("--video: films need imageio-ffmpeg; ")
    assert "nowhere" in line
    monkeypatch.delenv("IMAGEIO_FFMPEG_EXE")
    monkeypatch.setattr(imageio_ffmpeg._utils, "_get_ffmpeg_exe", lambda: None)
    assert "No ffmpeg exe could be found" in refusal(play_run, folder, video=films)
    assert not Path(films).exists()


def test_a_gif_shows_every_agent_on_its_own_task(tmp_path, monkeypatch, whole_run):
    """Side by side, at ten pictures a second, for as long as the longest film and not too long."""
    args = PRPO_MINIGRID.Args(env_ids=(DOOR_KEY, "MiniGrid-Empty-5x5-v0"), num_agents=2)
    tests = ["MiniGrid-Empty-5x5-v0", DOOR_KEY]
    own_tasks = play.list_own_tests(PRPO_MINIGRID.module, args, tests)
    assert own_tasks == [DOOR_KEY, "MiniGrid-Empty-5x5-v0"]
    assert play.list_own_tests(PRPO_MINIGRID.module, args, tests[:1]) == tests[:1] * 2
    assert play.list_own_tests(s2zpo_mujoco, s2zpo_mujoco.Args(), ["X"]) == ["X"] * 4

    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    films = []
    for number, grey in ((20, 40), (60, 200), (1000, 120)):
        film = play.Film(tmp_path / f"{grey}.mp4", 20, unfinished)
        for _ in range(number):
            film.add(np.full((80, 80, 3), grey, dtype=np.uint8))
        film.finish()
        films.append(film.path)
    for shown, length in ((films[:2], 30), (films[:1], 10), (films[1:], 80)):
        path = tmp_path / "all.gif"
        play.write_gif(shown, path, unfinished)
        with Image.open(path) as image:
            assert image.size == (208 * len(shown), 200)
            total = 0
            for frame in range(image.n_frames):  # equal pictures are one that lasts
                image.seek(frame)
                total += image.info["duration"]
                greys = np.asarray(image.convert("L"))[100, 104::208]
                expected = [int(film.stem) for film in shown]
                assert np.abs(greys - np.array(expected)).max() < 12
            assert total == pytest.approx(100 * length, abs=100)
    monkeypatch.syspath_prepend(REPOSITORY / "benchmark")
    gif = importlib.import_module("gif")
    gif.main(gif.Args(tuple(map(str, films[:2])), out=str(tmp_path / "new" / "both.gif")))
    with Image.open(tmp_path / "new" / "both.gif") as image:
        assert image.size == (416, 200)
    line = refusal(gif.main, gif.Args((str(tmp_path / "gone.mp4"),), out=str(path)))
    assert line == f"{tmp_path / 'gone.mp4'}: there is no such film"
    line = refusal(play.write_gif, [tmp_path / "gone.mp4"], path, unfinished)
    assert line.startswith(f"--video {path}: ")

    films = tmp_path / "films"
    monkeypatch.setattr(play, "write_gif", lambda films, path, _: path.write_text(str(films)))
    play_run(whole_run(PRPO_MINIGRID), video=str(films / "all.gif"), episodes=1)
    names = [films / f"agent_{i}_{PRPO_MINIGRID.tiny['env_id']}.mp4" for i in range(3)]
    assert (films / "all.gif").read_text() == str(names)
    assert sorted(films.iterdir()) == [*names, films / "all.gif"]


def test_a_renderer_that_is_missing_is_one_line(run_of, tmp_path, monkeypatch):
    """Before anything is played; without films it is not needed."""
    for script in (PENDULUM, S2ZPO):  # mujoco refuses to be imported with such a renderer
        run_of(script)
    monkeypatch.setenv("MUJOCO_GL", "nonsense")
    forbid_playing(monkeypatch)
    monkeypatch.setattr(s2zpo_mujoco, "DRAW", "import os; raise OSError(os.environ['MUJOCO_GL'])")
    for script in (PENDULUM, S2ZPO):
        line = refusal(play_run, run_of(script), video=str(tmp_path / "films"))
        assert line.startswith(f"--video: {script.tiny['env_id']} cannot be drawn; MUJOCO_GL")
        assert line.endswith("OSError: nonsense")
    config = config_of(run_of(S2ZPO))
    config["command"] = [*config["command"], "--human"]
    assert not play.load_settings(s2zpo_mujoco, config, play.Args("run")).human
    monkeypatch.delenv("MUJOCO_GL")
    monkeypatch.undo()
    play_run(run_of(PENDULUM), episodes=1)
    assert not (tmp_path / "films").exists()


class Undrawn(gym.Env):
    """Draws nothing."""

    observation_space = gym.spaces.Box(0, 10, (7, 7, 3), np.uint8)
    action_space = gym.spaces.Discrete(7)

    def reset(self, *, seed=None, options=None):
        return np.zeros((7, 7, 3), np.uint8), {}

    def step(self, action):
        return np.zeros((7, 7, 3), np.uint8), 0.0, True, False, {}


class Undrawable(Undrawn):
    """Takes the mode, and has no `render`."""

    def __init__(self, render_mode=None):
        self.render_mode = render_mode


class Colourless(Undrawn):
    """Draws in grey."""

    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def render(self):
        return np.zeros((8, 8), np.uint8)


@pytest.mark.parametrize("task", [Undrawn, Undrawable, Colourless])
def test_a_task_that_cannot_be_drawn_is_played_and_not_filmed(
    task, whole_run, tmp_path, monkeypatch
):
    spec = gym.envs.registration.EnvSpec("Plain-v0", task)
    monkeypatch.setitem(gym.registry, "Plain-v0", spec)
    given = {"env_id": (DOOR_KEY, "Plain-v0"), "episodes": 1}
    folder = whole_run(PRPO_MINIGRID)
    assert play_run(folder, **given)[0]["Plain-v0"] == [0.0]
    forbid_playing(monkeypatch)
    line = refusal(play_run, folder, **given, video=str(tmp_path / "films"))
    reason = "draws no pictures" if task is Colourless else "it has no render_mode rgb_array"
    assert line.startswith(f"--video: Plain-v0 cannot be drawn; {reason}")
    assert not (tmp_path / "films").exists()


# --- evaluations ---


def play_level(script, agent, env_id, level, choose):
    """The return of an episode, step by step; choose: the action for logits [1, actions]."""
    env = script.make_env(env_id)
    total = 0.0
    over = False
    obs, _ = env.reset(seed=level)
    while not over:
        logits, _ = agent.predict(torch.from_numpy(obs)[None])
        obs, reward, terminated, truncated, _ = env.step(choose(logits))
        total += reward
        over = terminated or truncated
    return total


def test_greedy_actions_are_the_most_probable_ones():
    """On MiniGrid, step by step. Greedy returns do not depend on the seed, sampled ones do."""
    script = PRPO_MINIGRID
    env_id = "MiniGrid-Empty-Random-5x5-v0"
    torch.manual_seed(2)
    agent = script.new_agent()
    torch.nn.init.orthogonal_(agent.actor.weight)
    levels = list(range(20))
    played = script, agent, env_id
    expected = [play_level(*played, level, lambda logits: int(logits.argmax())) for level in levels]
    for seed in (0, 1):
        greedy = script.evaluate(script.Args(), agent, env_id, levels, seed, greedy=True)
        assert greedy.tolist() == pytest.approx(expected)
    sampled = [script.evaluate(script.Args(), agent, env_id, levels, seed) for seed in (0, 1)]
    assert not np.array_equal(*sampled)
    # A level at a time; actions have the policy's probabilities
    for level in levels:
        generator = torch.Generator().manual_seed(5)

        def draw(logits, generator=generator):
            return int(torch.multinomial(logits.softmax(-1), 1, generator=generator))

        (sampled,) = script.evaluate(script.Args(), agent, env_id, [level], 5)
        assert sampled == pytest.approx(play_level(*played, level, draw))


def test_greedy_games_draw_nothing_at_random(monkeypatch):
    """On Atari scores do not depend on the seed, and each action is that of the largest logit."""
    script = PRPO_ATARI
    env_id = "BreakoutNoFrameskip-v4"
    torch.manual_seed(0)
    agent = script.new_agent()
    predictions = results_of(monkeypatch, script.Agent, "predict")
    taken = notes_of(monkeypatch, script.Games, "step", lambda games, actions: actions[0].copy())
    scores = [
        script.evaluate(script.Args(), agent, env_id, [1, 2], seed, greedy=True) for seed in (0, 1)
    ]
    assert np.array_equal(*scores)
    assert np.array_equal(
        np.stack(taken), torch.stack([logits.argmax(-1) for logits, _ in predictions]).numpy()
    )


def test_sampled_games_have_the_probabilities_of_the_policy(monkeypatch):
    script = PRPO_ATARI
    torch.manual_seed(0)
    agent = script.new_agent()
    predicted = results_of(monkeypatch, script.Agent, "predict")
    drawn_from = notes_of(monkeypatch, torch, "multinomial", lambda probs, *_: probs)
    torch.nn.init.orthogonal_(agent.actor.weight)
    script.evaluate(script.Args(), agent, "BreakoutNoFrameskip-v4", [1, 2], 0)
    expected = torch.stack([logits.softmax(-1) for logits, _ in predicted])
    torch.testing.assert_close(torch.stack(drawn_from), expected)
    assert expected.std(-1).max() > 0.05


def test_an_evaluation_begins_with_every_level(monkeypatch):
    """And an agent that has diverged has no return."""
    env_id = "MiniGrid-DoorKey-6x6-v0"
    args = PRPO_MINIGRID.Args(env_id=env_id, device="cpu")
    agent = PRPO_MINIGRID.new_agent()
    seen = notes_of(monkeypatch, agent, "predict", lambda obs: obs.numpy().copy())
    levels = [5, 6, 7]
    PRPO_MINIGRID.evaluate(args, agent, env_id, levels, 0)
    env = PRPO_MINIGRID.make_env(env_id)
    starts = [env.reset(seed=level)[0] for level in levels]
    assert np.array_equal(seen[0], starts)
    assert not np.array_equal(starts[0], starts[1])
    agent.critic.weight.data[0, 0] = torch.nan
    assert np.isnan(PRPO_MINIGRID.evaluate(args, agent, env_id, levels, 0)).all()
