"""Play the agents of a run of a control script, and film them: a table of mean returns, MP4 files.

    python benchmark/play.py runs/NAME                         # as in the run's last evaluation
    python benchmark/play.py runs/NAME --video films           # and film each agent's first episode
    python benchmark/play.py runs/NAME --video films/all.gif   # ... and a small one of all together
    python benchmark/play.py runs/NAME --env-id MiniGrid-DoorKey-16x16-v0 --greedy --episodes 20

Plays in the official environments, on the tasks that the run was evaluated on or on those given.
Writes nothing but films: FOLDER/agent_I_TASK.mp4, and a GIF whose name is given with the folder.
"""

import contextlib
import importlib
import inspect
import io
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated

import numpy as np
import tyro
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (Path.cwd(), ROOT, ROOT / "benchmark")  # of scripts, and of tasks as module:id
sys.path[:0] = map(str, FOLDERS)

from arguments import refuse  # noqa: E402

import communicators  # noqa: E402


@dataclass
class Args:
    run: tyro.conf.Positional[str]
    """folder of a run that has ended"""
    # tasks to play, also such as the agents were not trained on (default: those of the run's
    # evaluations)
    env_id: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--eval-env-ids"])] = ()
    greedy: bool = False  # play the most probable actions instead of sampled ones
    episodes: communicators.Natural = 0
    """episodes per agent and task (0: as many as in the run's evaluations, or 1)"""
    seed: communicators.Natural | None = None  # of levels and actions (default: the run's)
    # folder for films of the first episode of every agent on every task; FOLDER/NAME.gif: also one
    # small film of each agent on its own task, side by side
    video: str = ""


# --- films ---


def check_frame(frame: np.ndarray) -> None:
    """Raise an error for what is no picture."""
    is_picture = getattr(frame, "dtype", None) == np.uint8 and frame.shape[2:] == (3,)
    if not is_picture:
        raise ValueError("draws no pictures [height, width, 3] of uint8")


class Film:
    """An MP4 file that browsers play: H.264 in yuv420p, which needs even sizes.

    It is made in a folder for unfinished films, and comes to its place when it is whole.
    """

    def __init__(self, path: Path, fps: float, unfinished: Path):
        self.path = path
        self.fps = fps
        self.unfinished = unfinished / path.name
        self.encoder = None
        self.length = 0

    def add(self, frame: np.ndarray) -> None:
        """Add a picture, [height, width, 3] uint8."""
        check_frame(frame)
        height, width, _ = frame.shape
        frame = np.pad(frame, [(0, height % 2), (0, width % 2), (0, 0)])  # a black line
        if self.encoder is None:
            self.shape = frame.shape
            self.encoder = importlib.import_module("imageio_ffmpeg").write_frames(
                str(self.unfinished.absolute()),
                (frame.shape[1], frame.shape[0]),
                fps=self.fps,
                codec="libx264",
                macro_block_size=1,  # sizes stay as they are
                ffmpeg_log_level="quiet",
            )
            self.encoder.send(None)
        if frame.shape != self.shape:
            raise ValueError("draws pictures of different sizes")
        self.encoder.send(np.ascontiguousarray(frame))
        self.length += 1

    def close(self) -> None:
        """Wait for the encoder."""
        if self.encoder:
            self.encoder.close()

    def finish(self) -> None:
        """Put the film in its place. Raises an error where it is not whole."""
        self.close()
        count = importlib.import_module("imageio_ffmpeg").count_frames_and_secs
        number, _ = count(self.unfinished)
        if number != self.length:
            raise OSError(f"the film has {number} of {self.length} pictures")
        self.unfinished.replace(self.path)


class Camera:
    """Films one environment of `evaluate`, which calls it after the reset and after each step."""

    def __init__(self, path: Path, unfinished: Path):
        self.path = path
        self.unfinished = unfinished
        self.film = None

    def __call__(self, env) -> None:
        """Add a picture of the environment."""
        if self.film is None:
            fps = env.metadata.get("render_fps") or 30
            self.film = Film(self.path, fps, self.unfinished)
        self.film.add(env.render())

    def close(self) -> None:
        """Free what is used."""
        if self.film:
            self.film.close()


class AtariCamera(Camera):
    """Films a game by pressing the same buttons in one that shows colours and full size."""

    def __init__(
        self, path: Path, unfinished: Path, script: ModuleType, args, env_id: str, level: int
    ):
        self.film = Film(path, 15, unfinished)  # 60 Hz, 4 frames a step
        self.level = level
        self.custom = script.is_custom(env_id)
        self.started = False
        if self.custom:
            self.game = script.make_custom(env_id, render_mode="rgb_array")
        else:
            screen = {"grayscale": False, "img_height": 210, "img_width": 160, "stack_num": 1}
            self.game = script.make_games(args, env_id, 1, **screen)

    def __call__(self, games) -> None:
        """Repeat the last step of these games' first one, and add its picture."""
        pressed = games.pressed[0, :1]
        seed = np.array([self.level])
        if self.custom:
            pressed = int(pressed[0])
            seed = self.level
        if self.started:
            frames, *_ = self.game.step(pressed)
        else:
            frames, _ = self.game.reset(seed=seed)
        self.started = True
        self.film.add(self.game.render() if self.custom else frames[0, 0])

    def close(self) -> None:
        """Free what is used."""
        super().close()
        self.game.close()


def check_films(script: ModuleType, env_ids: list[str]) -> None:
    """Refuse --video where nothing encodes films, or a task cannot be drawn."""
    try:
        importlib.import_module("imageio_ffmpeg").get_ffmpeg_version()
    except Exception as error:
        refuse(f"--video: films need imageio-ffmpeg; {communicators.first_line(error)}")
    for env_id in env_ids:
        problem = find_drawing_problem(script, env_id)
        if problem:
            refuse(f"--video: {env_id} cannot be drawn; {problem}")


def explain_drawing(problem: str) -> str:
    """An error's line, in plain words where a task has no pictures: no such argument or method."""
    if "NotImplementedError" in problem or "render_mode" in problem:
        return "it has no render_mode rgb_array"
    return problem


def find_drawing_problem(script: ModuleType, env_id: str) -> str:
    """What keeps a task from being drawn, nothing ("") if it is drawn."""
    if hasattr(script, "import_mujoco"):  # OpenGL may be missing
        problem = importlib.import_module("s2zpo_mujoco").find_drawing_problem(env_id)
        if problem:
            return explain_drawing(problem)
    if hasattr(script, "make_games") and not script.is_custom(env_id):
        return ""  # ALE draws its games
    try:
        make = script.make_custom if hasattr(script, "make_custom") else script.make_env
        env = make(env_id, render_mode="rgb_array")
        env.reset(seed=0)
        check_frame(env.render())
    except Exception as error:
        return explain_drawing(communicators.first_line(error))
    return ""


def write_gif(films: list[Path], path: Path, unfinished: Path, seconds: float = 8) -> None:
    """The first seconds of films side by side, small enough for a page."""
    program = importlib.import_module("imageio_ffmpeg").get_ffmpeg_exe()
    command = [program, "-loglevel", "error"]
    panels = []
    for k, film in enumerate(films):
        command += ["-t", str(seconds), "-i", str(film.absolute())]
        panels.append(f"[{k}]fps=10,scale=-1:200,pad=iw+8:ih:4:0:white[p{k}]")
    inputs = "".join(f"[p{k}]" for k in range(len(films)))
    beside = f"hstack={len(films)}" if len(films) > 1 else "null"
    colours = "split[a][b];[a]palettegen=48[c];[b][c]paletteuse=dither=none"
    command += ["-filter_complex", ";".join([*panels, f"{inputs}{beside},{colours}"])]
    command.append(str(unfinished.absolute() / path.name))
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        refuse(f"--video {path}: {done.stderr.strip().splitlines()[-1]}")
    Path(command[-1]).replace(path)


@contextlib.contextmanager
def make_unfinished(given: Args):
    """A folder for films that are not whole, within that of films; a run is played without it."""
    if not given.video:
        yield None
        return
    folder = find_folder(given)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = tempfile.TemporaryDirectory(prefix=".", dir=folder)
    except OSError as error:
        refuse(f"--video {folder}: cannot be written to ({error.strerror})")
    with unfinished as name:
        yield Path(name)


def find_folder(given: Args) -> Path:
    """The folder for films."""
    return Path(given.video).parent if given.video.endswith(".gif") else Path(given.video)


def name_film(given: Args, i: int, task: str) -> Path:
    """The file of agent i's film on a task."""
    name = re.sub(r"[^a-zA-Z0-9_.-]", "-", task)
    return find_folder(given) / f"agent_{i}_{name}.mp4"


# --- the run ---


def read_config(given: Args) -> dict:
    """The run's config.json."""
    try:
        return dict(json.loads(Path(given.run, "config.json").read_text()))
    except (TypeError, ValueError, OSError, RecursionError) as error:
        refuse(f"{given.run}: must be the folder of a run, with its config.json ({error})")


def load_script(config: dict, given: Args) -> ModuleType:
    """The script of a run, which must be one of control.

    The run may be someone else's, so that no other module is imported.
    """
    name = str(config.get("script"))
    files = [folder / f"{name}.py" for folder in FOLDERS]
    if re.fullmatch(r"\w+", name):
        for path in files:
            if path.is_file() and "evaluate_agents" in path.read_text():
                try:
                    script = importlib.import_module(name)
                except Exception as error:  # a package is missing
                    refuse(f"{path}: {communicators.first_line(error)}")
                if hasattr(script, "evaluate_agents") and hasattr(script, "Args"):
                    return script
    where = "a control script that is here, or in the folder where play.py was started"
    refuse(f"{given.run}: is no run of {where}, but of {name!r}")


def load_settings(script: ModuleType, config: dict, given: Args):
    """The settings of the run, with the tasks, episodes and seed that are given."""
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            # A flag comes first, because the first word could have tyro write a file
            args = communicators.read_config(script.Args, config, before=["--device=cpu"])
    except (SystemExit, KeyError, TypeError):
        refuse(f"{given.run}: is no run of this version of {script.__name__}.py")
    args.device = "auto"
    args.env_backend = "auto"  # evaluations are in the official environments
    if hasattr(args, "human"):
        args.human = False  # nobody is asked, so that nothing has to be drawn
    args.eval_episodes = given.episodes or args.eval_episodes or 1
    if given.seed is not None:
        args.seed = given.seed
    if given.env_id and hasattr(args, "eval_env_ids"):
        args.eval_env_ids = given.env_id
    elif given.env_id:
        args.env_id = given.env_id[0]
    # Agents play alone, so that the communicator is not checked
    source = inspect.getmodule(script.evaluate_agents)
    check = source.check_task if hasattr(source, "check_task") else source.check_args
    check(args)
    return args


def load_agents(script: ModuleType, args, config: dict, given: Args) -> dict:
    """The networks of the run's agents; under federate.py a run has those of its process only."""
    if hasattr(script, "make_agents"):
        agents = script.make_agents(args)
    else:  # one policy for all
        policy = script.make_policy(args)
        agents = [policy] * args.num_agents
    held = config.get("agents") or list(range(len(agents)))
    everybody = range(len(agents))
    if not isinstance(held, list) or any(type(i) is not int or i not in everybody for i in held):
        refuse(f"{given.run}: config.json names agents that are none of the run's")
    if not hasattr(script, "make_agents"):
        held = held[:1]
    device = communicators.set_device(args.device)
    loaded = {}
    for i in held:
        path = Path(given.run, f"agent_{i}.safetensors")
        try:
            agents[i].load_state_dict(load_file(path))
        except Exception as error:  # missing, damaged, or of another number of actions
            reason = str(error).strip().splitlines()[-1].strip()
            refuse(f"{path}: cannot be loaded for these tasks: {reason}")
        if not all(weight.isfinite().all() for weight in agents[i].state_dict().values()):
            refuse(f"{path}: has weights that are not finite")
        loaded[i] = agents[i].to(device).requires_grad_(False)
    return loaded


# --- playing ---


def list_tests(script: ModuleType, args, given: Args) -> list[str]:
    """The environment ids to play."""
    if given.env_id:
        return list(given.env_id)
    return script.list_tests(args) if hasattr(script, "list_tests") else [args.env_id]


def list_own_tests(script: ModuleType, args, tests: list[str]) -> list[str]:
    """Of what is played, each agent's own task, or the first."""
    own_tasks = [args.env_id] * args.num_agents
    if hasattr(script, "list_env_ids"):
        own_tasks = script.list_env_ids(args)
    return [env_id if env_id in tests else tests[0] for env_id in own_tasks]


def play(
    script: ModuleType, args, agents: dict, tests: list[str], given: Args, unfinished: Path | None
) -> dict[int, dict[str, np.ndarray]]:
    """Every agent on every task. Returns agent -> task -> returns [episodes]."""
    levels = script.list_test_levels(args)
    results = {}
    for i, agent in agents.items():
        results[i] = {}
        for number, env_id in enumerate(tests):
            # As in the run's own evaluation
            key = (i, number) if hasattr(args, "env_ids") else ()
            seed = communicators.derive_seed(args.seed, *key, script.TEST_ACTIONS)
            task = script.strip_module(env_id)
            camera = None
            if given.video:
                path = name_film(given, i, task)
                camera = Camera(path, unfinished)
                if hasattr(script, "make_games"):
                    camera = AtariCamera(path, unfinished, script, args, env_id, levels[0])
            try:
                returns = script.evaluate(args, agent, env_id, levels, seed, given.greedy, camera)
                if camera:
                    camera.film.finish()
            except Exception as error:
                refuse(f"{env_id}: {communicators.first_line(error)}")
            finally:
                if camera:
                    camera.close()
            results[i][task] = returns
    return results


def print_returns(results: dict[int, dict[str, np.ndarray]], args, given: Args) -> None:
    """The table of mean returns."""
    actions = "greedy" if given.greedy else "sampled"
    print(f"{given.run}: mean return of {args.eval_episodes} episodes, {actions} actions")
    print("agent" + "".join(f"  {task:>17}" for task in next(iter(results.values()))))
    for i, tasks in results.items():
        line = f"{i:>5}"
        for task, returns in tasks.items():
            mean, half = communicators.mean_and_half_interval(returns)
            cell = communicators.format_interval(mean, half)
            line += f"  {cell:>{max(17, len(task))}}"
        print(line)


def main(given: Args) -> dict[int, dict[str, np.ndarray]]:
    """Play, print the table, and return agent -> task -> returns [episodes]."""
    config = read_config(given)
    script = load_script(config, given)
    args = load_settings(script, config, given)
    agents = load_agents(script, args, config, given)
    source = inspect.getmodule(script.evaluate_agents)  # variants import their evaluation
    tests = list_tests(source, args, given)
    if given.video:
        check_films(source, tests)
    with make_unfinished(given) as unfinished:
        results = play(source, args, agents, tests, given, unfinished)
        if given.video.endswith(".gif"):
            own_tasks = list_own_tests(source, args, tests)
            films = [name_film(given, i, source.strip_module(own_tasks[i])) for i in agents]
            write_gif(films, Path(given.video), unfinished)
    print_returns(results, args, given)
    if given.video:
        print(f"films in {find_folder(given)}")
    return results


if __name__ == "__main__":
    main(communicators.read_flags(Args))
