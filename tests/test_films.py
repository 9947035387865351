"""Films: files that browsers play, and runs that do without them."""

import shutil

import imageio_ffmpeg
import numpy as np
import pytest
import torch
from command import parse_args
from helpers import (
    PRPO_ATARI,
    PRPO_MINIGRID,
    PRTRPO_MINIGRID,
    copy_config,
    evaluations_of,
    on,
    only_run,
    refusal,
    tiny,
    weights_of,
)

import communicators
import s2zpo_mujoco

FILMED = [PRPO_MINIGRID, PRTRPO_MINIGRID, PRPO_ATARI]


def pictures(number, height=20, width=31):
    """Frames of one colour each, ever brighter."""
    return [np.full((height, width, 3), 20 * k, dtype=np.uint8) for k in range(number)]


def make_film(path, frames):
    """Film these frames, given as functions or as arrays."""
    film = communicators.Film(path, 10)
    for frame in frames:
        film.take(frame if callable(frame) else lambda frame=frame: frame)
    film.close()


@pytest.fixture
def broken_encoder(tmp_path, monkeypatch):
    """An ffmpeg that reads a little and gives up."""
    program = tmp_path / "ffmpeg"
    program.write_text(
        "#!/bin/sh\nhead -c 9 >/dev/null\necho first >&2\necho gave up >&2\nexit 3\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(program))


@pytest.mark.parametrize("size", [(20, 32), (21, 33), (20, 31), (1, 2)])
def test_films_play_in_browsers(size, tmp_path):
    """H.264 in yuv420p with even sizes, whatever the frames' are; every frame is in it."""
    path = tmp_path / "new" / "100%s %d" / "film.mp4"  # nobody formats the path
    make_film(path, pictures(7, *size))
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
        assert abs(frame[: size[0], : size[1]].mean() - 20 * k) < 8
    assert [file.name for file in path.parent.iterdir()] == ["film.mp4"]


def fail():
    raise RuntimeError("the screen is gone\nin many lines")


PROBLEMS = {
    "a render that fails": ([*pictures(2), fail], "the screen is gone"),
    "nothing": ([lambda: None], "not [height, width, 3] uint8 but [1] object"),
    "floats": ([lambda: np.zeros((4, 4, 3))], "not [height, width, 3] uint8 but [4, 4, 3] float64"),
    "grey": ([lambda: np.zeros((4, 4), np.uint8)], "not [height, width, 3] uint8 but [4, 4] uint8"),
    "another size": ([*pictures(1), *pictures(1, 22)], "frames have different sizes"),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_film_that_fails_is_one_line(problem, tmp_path, capfd):
    """And no file; what would come after it is not rendered."""
    frames, reason = PROBLEMS[problem]
    path = tmp_path / "film.mp4"
    make_film(path, [*frames, lambda: pytest.fail("rendered")])
    output, errors = capfd.readouterr()
    assert output.startswith(f"{path}: no film, ")
    assert reason in output
    assert output.count("\n") == 1
    assert errors == ""
    assert not path.exists()


@pytest.mark.parametrize("number", [1, 400])
def test_an_encoder_that_gives_up_is_one_line(number, broken_encoder, tmp_path, capfd):
    """While it is written to, or at the end of a short film; the line is its last word."""
    make_film(tmp_path / "film.mp4", pictures(1, 100, 100) * number)
    output, errors = capfd.readouterr()
    assert output == f"{tmp_path / 'film.mp4'}: no film, gave up\n"
    assert errors == ""


def test_a_film_without_an_encoder_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(tmp_path / "nowhere"))
    make_film(tmp_path / "film.mp4", pictures(3))
    output = capsys.readouterr().out
    assert "film.mp4: no film, " in output
    assert "nowhere" in output
    assert output.count("\n") == 1


@on(FILMED)
def test_a_run_is_whole_without_its_films(script, broken_encoder, tmp_path, capsys):
    """Weights, evaluation and summary are there, and a line for each film that is not."""
    changes = {"num_agents": 2, "iterations": 1, "eval_episodes": 1, "capture_video": True}
    summary = script.main(tiny(script, tmp_path / "runs", **changes))
    folder = only_run(tmp_path / "runs")
    assert summary["completed"]
    assert len(evaluations_of(folder)) == 2
    assert weights_of(folder).keys() == {0, 1}
    lines = [line for line in capsys.readouterr().out.splitlines() if "no film" in line]
    videos = folder / "videos"
    assert lines == [f"{videos / f'agent_{i}.mp4'}: no film, gave up" for i in range(2)]
    assert list(videos.iterdir()) == []


def test_a_run_of_s2zpo_is_whole_without_its_film(broken_encoder, tmp_path, capsys):
    settings = {"env_id": "CartPole-v1", "num_agents": 2, "horizon": 5, "total_iterations": 1}
    args = s2zpo_mujoco.Args(**settings, eval_episodes=1, capture_video=True, run_dir=str(tmp_path))
    summary = s2zpo_mujoco.main(args)
    (folder,) = tmp_path.glob("CartPole*")
    assert summary["completed"]
    assert len(evaluations_of(folder)) == 2
    assert "videos/policy.mp4: no film, gave up\n" in capsys.readouterr().out


def test_playing_without_films_has_its_table(whole_run, broken_encoder, tmp_path, capsys):
    """A film that fails in the middle of --eval-only does not end it."""
    script = PRPO_MINIGRID
    folder = shutil.copytree(whole_run(script), tmp_path / "run")
    play = ["--eval-only", str(folder), "--eval-episodes", "2"]
    expected = script.evaluate_run(script.parse_args(play))
    args = script.parse_args(play)
    args.capture_video = True
    capsys.readouterr()
    assert str(script.evaluate_run(args)) == str(expected)
    output = capsys.readouterr().out
    assert output.count(".mp4: no film, gave up\n") == 3
    assert "videos in" not in output  # where there are none


@on(FILMED)
def test_a_filmed_run_is_played_without_films_unless_they_are_asked_for(
    script, whole_run, tmp_path, monkeypatch
):
    """And goes on without an encoder, if it is told to."""
    copy_config(whole_run(script), tmp_path, "--capture-video")
    play = ["--eval-only", str(tmp_path)]
    assert script.parse_args([*play, "--capture-video"]).capture_video
    resume = ["--resume", str(tmp_path)]
    assert script.parse_args(resume).capture_video
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(tmp_path / "nowhere"))
    assert not script.parse_args(play).capture_video
    message = refusal(script.parse_args, resume)
    assert message.endswith("; --no-capture-video goes on without them")
    assert not script.parse_args([*resume, "--no-capture-video"]).capture_video


@on([*FILMED, s2zpo_mujoco])
def test_films_without_an_encoder_are_refused_before_training(script, tmp_path, monkeypatch):
    """Where ffmpeg is missing, and where it does not start."""
    argv = ["--capture-video", "--run-dir", str(tmp_path / "runs")]
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(tmp_path / "nowhere"))
    message = refusal(parse_args, script, argv)
    assert message.startswith("--capture-video True: films need ffmpeg; ")
    assert "nowhere" in message
    monkeypatch.delenv("IMAGEIO_FFMPEG_EXE")
    monkeypatch.setattr(imageio_ffmpeg._utils, "_get_ffmpeg_exe", lambda: None)
    message = refusal(parse_args, script, argv)
    assert "No ffmpeg exe could be found" in message
    assert not (tmp_path / "runs").exists()


@on([PRPO_MINIGRID, PRPO_ATARI])
def test_a_film_shows_the_whole_episode(script, tmp_path, monkeypatch):
    """A frame before the first step and one after each; the returns are those without a film."""
    taken = []

    class Film(communicators.Film):
        def take(self, render, *inputs):
            frame = render(*inputs)
            taken.append(frame.copy())
            super().take(lambda: frame)

    monkeypatch.setattr(communicators, "Film", Film)
    torch.manual_seed(0)
    agent = script.new_agent()
    env_id = script.tiny["env_id"]
    args = tiny(script, tmp_path)
    plain = script.evaluate(args, agent, env_id, [3], 5)
    filmed = script.evaluate(args, agent, env_id, [3], 5, str(tmp_path / "film"))
    assert np.array_equal(plain, filmed)
    number, _ = imageio_ffmpeg.count_frames_and_secs(tmp_path / "film.mp4")
    assert number == len(taken) > 5
