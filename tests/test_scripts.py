"""The command line, what a run leaves behind, and the agreement between the scripts."""

import ast
import contextlib
import csv
import difflib
import inspect
import io
import json
import math
import re
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from helpers import (
    ATARI,
    FEDAVG_ATARI,
    FEDAVG_MINIGRID,
    MINIGRID,
    PRPO_ATARI,
    PRPO_MINIGRID,
    REPOSITORY,
    SCRIPTS,
    call,
    evaluations_of,
    every_script,
    flags,
    on_atari,
    on_minigrid,
    only_run,
    rows_of,
    scalars_of,
    tiny,
)
from safetensors.torch import load_file

ROOMS, GAME = "MiniGrid-FourRooms-v0", "BreakoutNoFrameskip-v4"


# --- bad input ---

BAD = {
    "unknown communicator": (["--communicator", "uniforn"], ["--communicator uniforn", "uniform", "rank-reward"]),
    "self-preference above 1": (["--self-preference", "1.5"], ["--self-preference 1.5", "[0, 1]"]),
    "self-preference below 0": (["--self-preference", "-0.1"], ["--self-preference -0.1", "[0, 1]"]),
    "gamma above 1": (["--gamma", "1.01"], ["--gamma 1.01", "[0, 1]"]),
    "no number": (["--gae-lambda", "nan"], ["--gae-lambda nan", "[0, 1]"]),
    "batch not divisible": (
        ["--num-minibatches", "3", "--num-envs", "2", "--num-steps", "5"],
        ["--num-minibatches 3", "10"],
    ),
    "shorter than a rollout": (["--total-timesteps", "2047"], ["--total-timesteps 2047", "2048"]),
    "no agents": (["--num-agents", "0"], ["--num-agents 0", "at least 1"]),
    "no rounds": (["--local-updates", "0"], ["--local-updates 0", "at least 1"]),
    "more peers than there are": (["--top-k", "3"], ["--top-k 3", "0..2"]),
    "negative seed": (["--seed", "-1"], ["--seed -1", "not be negative"]),
    "no learning rate": (["--learning-rate", "0"], ["--learning-rate 0", "positive"]),
    "negative clip range": (["--clip-coef", "-0.1"], ["--clip-coef -0.1", "not be negative"]),
    "temperature zero": (["--communicator-temperature", "0"], ["--communicator-temperature 0", "positive"]),
    "unknown device": (["--device", "gpu"], ["--device gpu", "cpu"]),
    "negative evaluations": (["--eval-every", "-1"], ["--eval-every -1", "not be negative"]),
}
BAD_MINIGRID = {
    "unknown environment": (["--env-id", "MiniGrid-FourRoom-v0"], ["--env-id MiniGrid-FourRoom-v0", ROOMS]),
    "unknown environment of an agent": (
        ["--num-agents", "2", "--env-ids", ROOMS, "MiniGrid-DoorKey-6x6"],
        ["--env-ids", "MiniGrid-DoorKey-6x6 ", "MiniGrid-DoorKey-6x6-v0"],
    ),
    "wrong number of environments": (["--env-ids", ROOMS, ROOMS], ["--env-ids", ROOMS, "3 agents"]),
    "private levels in envpool": (
        ["--levels-per-agent", "3", "--env-backend", "envpool"],
        ["--levels-per-agent 3", "--env-backend gymnasium"],
    ),
}
BAD_ATARI = {
    "unknown game": (["--env-id", "BreakotNoFrameskip-v4"], ["--env-id BreakotNoFrameskip-v4", GAME]),
    "unknown game of an agent": (
        ["--num-agents", "2", "--env-ids", GAME, "ALE/Breakot-v5"],
        ["--env-ids", "ALE/Breakot-v5 ", "ALE/Breakout-v5"],
    ),
    "wrong number of games": (["--env-ids", GAME, GAME], ["--env-ids", GAME, "3 agents"]),
    "games with other actions": (
        ["--num-agents", "2", "--env-ids", GAME, "PongNoFrameskip-v4"],
        ["--env-ids", "PongNoFrameskip-v4", "same actions", "--full-action-space"],
    ),
}
BAD_FEDAVG = {
    "a room and a game": (
        ["--num-agents", "2", "--env-ids", ROOMS, GAME],
        ["--env-ids", ROOMS, GAME, "must all be of MiniGrid or all of Atari"],
    ),
    "a game and a room": (
        ["--num-agents", "2", "--env-ids", GAME, ROOMS],
        ["--env-ids", ROOMS, GAME, "must all be of MiniGrid or all of Atari"],
    ),
    "private levels of a game": (
        ["--env-id", GAME, "--levels-per-agent", "2"],
        ["--levels-per-agent 2", "is for MiniGrid"],
    ),
    "backend of a game": (
        ["--env-id", GAME, "--env-backend", "gymnasium"],
        ["--env-backend gymnasium", "is for MiniGrid"],
    ),
    "sticky actions in a room": (["--sticky-actions"], ["--sticky-actions True", "is for Atari"]),
    "all actions in a room": (["--full-action-space"], ["--full-action-space True", "is for Atari"]),
}
CASES = [(script, case, *BAD[case]) for script in SCRIPTS for case in BAD]
CASES += [(script, case, *BAD_MINIGRID[case]) for script in MINIGRID for case in BAD_MINIGRID]
CASES += [(script, case, *BAD_ATARI[case]) for script in ATARI for case in BAD_ATARI]
CASES += [(FEDAVG_MINIGRID, case, *BAD_FEDAVG[case]) for case in BAD_FEDAVG]


def complaint(script, argv):
    """The one line with which parse_args ends."""
    with pytest.raises(SystemExit) as end:
        script.parse_args([str(part) for part in argv])
    message = end.value.code
    assert isinstance(message, str) and message == message.strip() and "\n" not in message
    return message


@pytest.mark.parametrize(
    ("script", "argv", "parts"), [pytest.param(script, *rest, id=f"{case}-{script}") for script, case, *rest in CASES]
)
def test_bad_input_ends_with_one_line(script, argv, parts):
    """It names the flag, the value and what would be valid."""
    message = complaint(script, argv)
    assert all(part in message for part in parts), message
    assert script.parse_args([]) == script.Args()  # and good input passes


@on_atari
def test_games_with_other_actions_can_share_all_eighteen(script):
    """What the complaint about different actions recommends is accepted, and so is one game under both its names."""
    games = ["--num-agents", "2", "--env-ids", GAME, "PongNoFrameskip-v4", "--full-action-space"]
    args = script.parse_args(games)
    assert [len(script.action_set(env_id, args)) for env_id in args.env_ids] == [18, 18]
    args = script.parse_args(["--num-agents", "2", "--env-ids", GAME, "ALE/Breakout-v5"])
    assert len(script.action_set(GAME, args)) == 4


@every_script
def test_bad_penalty_coefficient(script):
    """Each script knows the other's name for the coefficient too."""
    flag = f"--{script.coef.replace('_', '-')}"
    for alias in ("--communication-coef", "--kl-coef"):
        message = complaint(script, [alias, "-1"])
        assert f"{flag} -1" in message and "not be negative" in message
        assert getattr(script.parse_args([alias, "2.5"]), script.coef) == 2.5


def test_agents_must_not_swap_networks():
    """FedAvg without self weight is refused (in PR-PPO it is a reference like any other)."""
    argv = ["--communicator", "self-preferred", "--self-preference", "0"]
    assert "--self-preference 0.0: must be positive" in complaint(FEDAVG_MINIGRID, argv)
    assert PRPO_MINIGRID.parse_args(argv).self_preference == 0


@every_script
def test_agents_must_be_shared_evenly_by_the_ranks(script, monkeypatch):
    """One rank speaks for all, and all end."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    message = complaint(script, [])
    assert "--num-agents 3" in message and "multiple of the 2 processes" in message
    assert script.parse_args(["--num-agents", "4"]).num_agents == 4
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as end:
        script.parse_args([])
    assert end.value.code == 1


@every_script
def test_device_that_is_not_there(script, monkeypatch):
    """cuda is not offered where there is none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for value in ("cuda", "cuda:1"):
        message = complaint(script, ["--device", value])
        assert f"--device {value}" in message and "choose auto, cpu" in message
    assert "--cudagraphs True: needs a CUDA device" in complaint(script, ["--cudagraphs"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert script.parse_args(["--device", "cuda"]).device == "cuda"
    assert script.parse_args(["--cudagraphs"]).cudagraphs
    assert "--cudagraphs True: needs a CUDA device" in complaint(script, ["--cudagraphs", "--device", "cpu"])


@every_script
def test_disk_is_checked_before_anything_starts(script, tmp_path, monkeypatch):
    """A run folder that is a file, that may not be written to, or without space for two checkpoints per agent."""
    file = tmp_path / "file"
    file.write_text("")
    for run_dir in (file, file / "below"):
        message = complaint(script, ["--run-dir", run_dir])
        assert f"--run-dir {run_dir}" in message and "folder that can be written to" in message
    deep = tmp_path / "not" / "there"
    assert script.parse_args(["--run-dir", str(deep)]).run_dir == str(deep) and not deep.exists()
    usage = namedtuple("usage", "total used free")
    for free, fits in ((1, False), (80 * 2**20, False), (10**10, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage(10**11, 10**11 - free, free))
        if fits:
            assert script.parse_args(["--run-dir", str(tmp_path)])
        else:
            message = complaint(script, ["--run-dir", tmp_path])
            assert f"--run-dir {tmp_path}" in message and re.search(r"needs \d+ MB of free disk space", message)


@every_script
def test_missing_packages_are_named(script, monkeypatch):
    """What is optional is asked for before training, not after."""
    find = script.importlib.util.find_spec
    missing = {"envpool", "wandb", "moviepy"}
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: None if name in missing else find(name))
    cases = {"wandb": ["--track"], "moviepy": ["--capture-video"]}
    if script.family == "MiniGrid":
        cases["envpool"] = ["--env-backend", "envpool"]
        assert script.choose_backend(script.parse_args([])) == "gymnasium"
    for package, argv in cases.items():
        message = complaint(script, argv)
        assert argv[0] in message and f"{package} is not installed" in message


@every_script
def test_resume_of_something_else(script, finished, tmp_path):
    """A folder that is missing, is no run, belongs to another script or has other settings."""
    other = SCRIPTS[SCRIPTS.index(script) - 1]
    (tmp_path / "config.json").write_text("{}")
    cases = {tmp_path / "nowhere": "config.json", tmp_path: script.__name__, finished(other)[0]: script.__name__}
    for folder, valid in cases.items():
        message = complaint(script, ["--resume", folder])
        assert f"--resume {folder}" in message and valid in message
    folder, _ = finished(script)
    elsewhere = ROOMS if script.family == "MiniGrid" else "PongNoFrameskip-v4"
    for flag, value, valid in (("--num-envs", "4", "2"), ("--env-id", elsewhere, TASKS[script.family][0])):
        message = complaint(script, ["--resume", folder, flag, value])
        assert f"{flag} {value}" in message and f"must be {valid}" in message and str(folder) in message
    settings = json.loads((folder / "config.json").read_text())
    args = script.parse_args(["--resume", str(folder), "--eval-episodes", "7"])  # this may change, and the rest is kept
    kept = {name: value for name, value in vars(args).items() if name not in ("resume", "eval_episodes")}
    assert (args.resume, args.eval_episodes) == (str(folder), 7)
    assert {name: list(value) if name == "env_ids" else value for name, value in kept.items()} == {
        name: value for name, value in settings.items() if name in kept
    }


@on_minigrid
def test_environments_that_cannot_be_made(script):
    """Tasks that are registered but whose files are not installed, or that the chosen backend does not know."""
    message = complaint(script, ["--env-id", "MiniGrid-WFC-MazeSimple-v0"])
    assert "--env-id MiniGrid-WFC-MazeSimple-v0" in message
    pytest.importorskip("envpool")
    message = complaint(script, ["--env-id", "MiniGrid-MultiRoom-N4-S5-v1", "--env-backend", "envpool"])
    assert "MiniGrid-MultiRoom-N4-S5-v1" in message and "gymnasium" in message


@every_script
def test_bad_input_on_the_command_line_writes_nothing(script, tmp_path):
    """From a shell: one line on stderr, exit code 1, no folder."""
    run = call(REPOSITORY / f"{script.__name__}.py", "--communicator", "nobody", cwd=tmp_path)
    assert run.returncode == 1 and run.stdout == ""
    assert run.stderr.count("\n") == 1 and "--communicator nobody" in run.stderr
    assert not list(tmp_path.iterdir())


@every_script
def test_help_explains_every_flag(script, capsys):
    """Every field of Args has its line of explanation, and --help shows it."""
    with pytest.raises(SystemExit) as end:
        script.parse_args(["--help"])
    assert end.value.code == 0
    shown = re.sub(r"[^\w:,.()\[\]/*+-]+", "", capsys.readouterr().out)  # without frames, colours and line breaks
    (body,) = [node.body for node in ast.parse(inspect.getsource(script.Args)).body]
    body = [node for node in body if not isinstance(node, ast.FunctionDef)]
    for field, explanation in zip(body[::2], body[1::2], strict=True):
        text = explanation.value.value
        assert len(text.split()) >= 2
        assert f"--{field.target.id.replace('_', '-')}" in shown
        assert re.sub(r"[^\w:,.()\[\]/*+-]+", "", text) in shown, text


# --- what a run leaves ---

TASKS = {
    "MiniGrid": ("MiniGrid-Empty-5x5-v0", "MiniGrid-Empty-Random-5x5-v0", "MiniGrid-Empty-5x5-v0"),
    "Atari": (GAME, "ALE/Breakout-v5", GAME),
}
EPISODES = {"MiniGrid": 6, "Atari": 3}


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """finished(script): (folder, stdout) of a small run of three agents on two tasks, with evaluation and videos."""
    runs = {}

    def run(script):
        if script not in runs:
            run_dir, output = tmp_path_factory.mktemp(str(script)), io.StringIO()
            tasks = TASKS[script.family]
            changes = {"communicator": "uniform", "eval_episodes": EPISODES[script.family], "eval_every": 4}
            changes |= {"capture_video": True, "env_id": tasks[0], "env_ids": tasks}
            with contextlib.redirect_stdout(output):
                script.main(tiny(script, run_dir, **changes))
            runs[script] = only_run(run_dir), output.getvalue()
        return runs[script]

    return run


@every_script
def test_summary(script, finished):
    """summary.json: settings, versions, speed, bytes, returns and the evaluation matrix, all as they were."""
    folder, output = finished(script)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["script"] == script.__name__ and summary["run"] == folder.name
    assert summary["completed"] is True and summary["seed"] == 1 and summary["world_size"] == 1
    assert summary["settings"].keys() == vars(script.Args()).keys()
    assert summary["settings"]["local_updates"] == 3 and summary["settings"]["num_agents"] == 3
    of_family = {"MiniGrid": "minigrid", "Atari": "ale-py"}[script.family]
    assert {"python", "torch", "numpy", "gymnasium", of_family} <= summary["versions"].keys()
    assert (summary["env_backend"] == "ale-py") == (script.family == "Atari")
    assert summary["versions"]["torch"] == torch.__version__ and summary["device"] == "cpu"
    steps = 6 * 2 * summary["settings"]["num_steps"]
    assert summary["timesteps_per_agent"] == steps
    assert summary["agent_steps_per_second"] == pytest.approx(3 * steps / summary["train_seconds"])
    assert 0 < summary["train_seconds"] < summary["wall_seconds"]
    assert summary["train_seconds"] == pytest.approx(sum(summary["seconds"].values()), rel=0.2)
    assert summary["communication_rounds"] == 2
    assert summary["communication_bytes"] == 2 * 6 * script.parameters * 4  # rounds, listeners, parameters, float32
    assert f"{summary['communication_bytes']:,} bytes sent" in output and str(folder) in output

    returns = summary["training_return"]
    assert returns["group"] == pytest.approx(sum(returns["agents"]) / 3)
    last = rows_of(folder)[-3:]
    assert returns["agents"] == pytest.approx([float(row["return_last_100"]) for row in last], abs=1e-5)

    evaluation, tasks = summary["evaluation"], summary["settings"]["env_ids"]
    episodes = EPISODES[script.family]
    assert evaluation["episodes"] == episodes and len(evaluation["agents"]) == 3
    assert all(row.keys() == set(tasks) for row in evaluation["agents"])  # every agent on every task
    own = [row[task]["mean"] for row, task in zip(evaluation["agents"], tasks, strict=True)]
    assert evaluation["group"] == pytest.approx(sum(own) / 3)
    for i, row in enumerate(evaluation["agents"]):
        agent = script.new_agent()
        agent.load_state_dict(load_file(folder / f"agent_{i}.safetensors"))
        args = script.Args(**summary["settings"])
        for test, (task, levels) in enumerate(script.make_tests(args).values()):
            found = script.evaluate(args, agent, task, levels, script.derive_seed(args.seed, i, test, 4))
            assert len(found) == episodes and row[task]["mean"] == pytest.approx(found.mean())
            assert row[task]["ci95"] == pytest.approx(1.96 * found.std(ddof=1) / math.sqrt(episodes))


@every_script
def test_evaluations_table(script, finished):
    """evaluations.csv and TensorBoard: every agent on every task at each --eval-every and at the end, as summarised."""
    folder, _ = finished(script)
    rows, summary = evaluations_of(folder), json.loads((folder / "summary.json").read_text())
    tasks, batch_size = list(dict.fromkeys(TASKS[script.family])), 2 * summary["settings"]["num_steps"]
    assert list(rows[0]) == ["iteration", "agent", "task", "timesteps", "episodes", "mean_return", "ci95"]
    assert [(row["iteration"], row["agent"], row["task"]) for row in rows] == [
        (iteration, str(i), task) for iteration in ("4", "6") for i in range(3) for task in tasks
    ]
    for row in rows:
        assert int(row["timesteps"]) == int(row["iteration"]) * batch_size
        assert int(row["episodes"]) == EPISODES[script.family]
    for row in rows[-6:]:
        told = summary["evaluation"]["agents"][int(row["agent"])][row["task"]]
        assert (float(row["mean_return"]), float(row["ci95"])) == pytest.approx((told["mean"], told["ci95"]), abs=1e-5)
    scalars = scalars_of(folder)
    for i in range(3):
        for task in tasks:
            own = [row for row in rows if (row["agent"], row["task"]) == (str(i), task)]
            points = scalars[f"eval/{task}/agent_{i}"]
            assert [step for step, _ in points] == [int(row["timesteps"]) for row in own]
            assert [value for _, value in points] == pytest.approx([float(row["mean_return"]) for row in own], abs=1e-5)


@every_script
def test_metrics_table(script, finished):
    """metrics.csv: one row per iteration and agent, whose numbers fit together."""
    folder, _ = finished(script)
    with open(folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    columns = ["iteration", "agent", "env_id", "timesteps", *script.METRICS]
    assert list(rows[0]) == [*columns, "communication_bytes", "agent_steps_per_second"]
    assert [(row["iteration"], row["agent"]) for row in rows] == [
        (str(k), str(i)) for k in range(1, 7) for i in range(3)
    ]
    seen = [[] for _ in range(3)]
    for row in rows:
        number = {name: float(value) for name, value in row.items() if name != "env_id"}
        assert row["env_id"] == TASKS[script.family][int(row["agent"])]
        assert number["timesteps"] == 2 * script.tiny["num_steps"] * number["iteration"]
        assert number["communication_bytes"] == 6 * script.parameters * 4 * (number["iteration"] // 3)
        assert 0 < number["entropy"] <= math.log(script.num_actions) + 1e-6 and number["value_loss"] >= 0
        assert number["approx_kl"] >= -1e-6 and number["kl_reference"] >= -1e-6 and 0 <= number["clipfrac"] <= 1
        assert number["explained_variance"] <= 1 and number["agent_steps_per_second"] > 0
        if number["episodes"]:
            best, longest = {"MiniGrid": (1, 100), "Atari": (20, 192)}[script.family]
            assert 0 <= number["episodic_return"] <= best and 1 <= number["episodic_length"] <= longest
            seen[int(row["agent"])].append((number["episodes"], number["episodic_return"]))
            total = sum(count * mean for count, mean in seen[int(row["agent"])])
            episodes = sum(count for count, _ in seen[int(row["agent"])])
            assert number["return_last_100"] == pytest.approx(total / episodes, abs=1e-4)  # not yet a hundred
        else:
            assert math.isnan(number["episodic_return"]) and math.isnan(number["episodic_length"])
    assert sum(map(len, seen)) > (6 if script.family == "MiniGrid" else 3)


@every_script
def test_tensorboard(script, finished):
    """CleanRL's keys for the group and per agent, every entry of C, distances, rounds, bytes; the same numbers."""
    folder, _ = finished(script)
    scalars, rows = scalars_of(folder), rows_of(folder)
    pairs = [(i, j) for i in range(3) for j in range(3)]
    expected = {f"communicator/c_{i}_{j}" for i, j in pairs}
    expected |= {f"distances/agent_{i}_agent_{j}" for i, j in pairs if i < j}
    expected |= {f"{tag}/agent_{i}" for tag in script.METRICS.values() for i in range(3)} | set(script.METRICS.values())
    expected |= {"charts/SPS", "charts/learning_rate", "communication/rounds", "communication/bytes"}
    assert expected <= scalars.keys()
    assert {"charts/episodic_return", "losses/policy_loss", "losses/approx_kl", "losses/kl_reference"} <= expected
    for i, j in pairs:
        assert [value for _, value in scalars[f"communicator/c_{i}_{j}"]] == pytest.approx([1 / 3] * 6)
    assert [value for _, value in scalars["communication/rounds"]] == [0, 0, 1, 1, 1, 2]
    assert [value for _, value in scalars["communication/bytes"]] == [
        float(r["communication_bytes"]) for r in rows[::3]
    ]
    rates = [script.tiny["learning_rate"] * (1 - k / 6) for k in range(6)]  # annealed linearly, to 0 after the end
    assert [value for _, value in scalars["charts/learning_rate"]] == pytest.approx(rates)
    for column, tag in script.METRICS.items():
        for i in range(3):
            known = [(int(row["timesteps"]), float(row[column])) for row in rows[i::3] if row[column] != "nan"]
            found = scalars.get(f"{tag}/agent_{i}", [])
            assert [step for step, _ in found] == [step for step, _ in known]
            assert [value for _, value in found] == pytest.approx([value for _, value in known], rel=1e-4, abs=1e-6)
    for tag in ("distances/agent_0_agent_1", "distances/agent_1_agent_2"):
        assert [step for step, _ in scalars[tag]] == [
            k * 2 * script.tiny["num_steps"] for k in range(3, 7)
        ]  # known since the first round
        assert all(0 < value < 1 for _, value in scalars[tag])


@every_script
def test_one_video_per_agent(script, finished):
    """--capture-video leaves one playable file for each agent, and nothing else in its folder."""
    folder, _ = finished(script)
    videos = sorted((folder / "videos").iterdir())
    assert [re.match(r"agent_(\d)(-.*)?\.mp4$", path.name)[1] for path in videos] == ["0", "1", "2"]
    assert all(b"ftyp" in path.read_bytes()[:32] and path.stat().st_size > 1000 for path in videos)


@every_script
def test_a_run_leaves_no_litter(script, finished):
    """The folder is named as CleanRL does, and holds what is documented."""
    folder, _ = finished(script)
    tasks = "\\+".join(dict.fromkeys(TASKS[script.family])).replace("/", "-")
    assert re.fullmatch(rf"{tasks}__{script.__name__}__1__\d+", folder.name)
    names = {re.sub(r"\d+", "N", path.name) for path in folder.iterdir() if "tfevents" not in path.name}
    assert names == {"agent_N.safetensors", "checkpoints", "videos", "config.json", "summary.json"} | {
        "metrics.csv",
        "evaluations.csv",
    }
    assert not list(folder.rglob("*.tmp"))
    for path in folder.glob("checkpoints/agent_*/*.pt"):
        torch.load(path, weights_only=True)  # nothing in it needs unpickling


@on_minigrid
def test_private_levels_are_evaluated_too(script, tmp_path):
    """With --levels-per-agent every agent meets unseen levels, its own and every other agent's."""
    changes = {"num_agents": 2, "total_timesteps": 128, "num_minibatches": 1, "update_epochs": 1}
    summary = script.main(tiny(script, tmp_path, levels_per_agent=2, eval_episodes=3, **changes))
    task = summary["settings"]["env_id"]
    names = {task, f"{task} levels of agent 0", f"{task} levels of agent 1"}
    assert [row.keys() for row in summary["evaluation"]["agents"]] == [names, names]
    args = script.Args(**summary["settings"])
    tests = script.make_tests(args)
    for i in range(2):
        own = script.level_seeds(args, i)
        assert tests[f"{task} levels of agent {i}"] == (task, [own[0], own[1], own[0]])
        assert not set(own) & set(tests[task][1])


@pytest.mark.slow
@on_minigrid
def test_wandb_offline(script, tmp_path):
    """--track works without a network: an offline run of the run's name, with the same charts."""
    pytest.importorskip("wandb")
    changes = {"num_agents": 1, "total_timesteps": 128, "eval_episodes": 0}
    settings = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    run = call(
        REPOSITORY / f"{script.__name__}.py",
        *flags(script, tmp_path / "runs", **changes),
        "--track",
        cwd=tmp_path,
        **settings,
    )
    assert run.returncode == 0, run.stderr
    folder = only_run(tmp_path / "runs")
    (offline,) = tmp_path.glob("wandb/offline-run-*")
    assert offline.name.endswith(folder.name)
    (log,) = offline.glob("*.wandb")
    assert all(tag.encode() in log.read_bytes() for tag in ("charts/episodic_return", "losses/policy_loss"))


# --- the scripts agree ---

# What may differ between definitions of the same name: only lines that contain one of these words
ALGORITHMS = {
    "Args": ("communication_coef", "kl_coef", "KL", "mixture", "mixes", "self_reference", "own part"),
    "check_args": ("communication_coef", "kl_coef", "swap"),
    "update": ("eq. 4", "eq. 3", "distance", "_coef * kl_reference", "def update"),
}
FAMILIES = {
    "Args": ("precision", "save_every", "start anew", "record one", "eval_episodes", "per agent and task", "env_id")
    + ("the task of all agents", "the game of all agents", "per agent, instead", "levels", "env_backend", "envpool")
    + ("sticky_actions", "with probability", "full_action_space", "of the console", "local_updates")
    + ("between communication rounds", "total_timesteps", "environment steps of each"),
    "check_args": ("levels_per_agent", "envpool", "known =", "flag", "action", "shape", "needed", "try:", "except")
    + ("MiniGrid", "same =", "list_all_envs", "does not know", "seed communication_coef"),
    "make_envs": ("Pool",),
}
BOTH = {  # FedAvg has both families
    "Args": (*FAMILIES["Args"], "identity", "__post_init__", "is_atari", "getattr", "setattr"),
    "check_args": (*FAMILIES["check_args"], "is_atari", "continue", "check(flag"),
    "make_envs": ("Pool", "is_atari", "else", "def "),
    "step_envs": ("def ",),
    "choose_backend": ("is_atari", "ale-py"),
}
OF_FAMILY = {"Pool", "Agent", "evaluate", "public_states"}


def definitions(script):
    """name -> source of everything at the top level of a script; an unnamed statement goes by its own text.

    In FedAvg what belongs to the other family is left out, and the rest has the names of the PR-PPO scripts.
    """
    text, found = Path(script.__file__).read_text(), {}
    own = {theirs: ours for ours, theirs in script.names.items()}
    others = {name for variant in (*MINIGRID, *ATARI) for name in variant.names.values()} - own.keys()
    for node in ast.parse(text).body[1:]:  # without the docstring
        source = ast.get_source_segment(text, node)
        targets = [target.id for target in getattr(node, "targets", [])]
        name = getattr(node, "name", None) or ", ".join(targets) or source
        if not script.names or name not in others:
            for theirs, ours in own.items():
                source = re.sub(rf"\b{theirs}\b", ours, source)
            source = re.sub(r"\(\n +([^\n]*)\n\)", r"(\1)", source)  # what is wrapped only as the name was longer
            found[own.get(name, name)] = source
    return found


def assert_same_definitions(script, other, *may_differ, apart=()):
    """What both scripts define is equal line by line, in the same order, but for `apart` and the named lines."""
    ours, theirs = definitions(script), definitions(other)
    common = [name for name in ours if name in theirs]
    assert common == [name for name in theirs if name in ours]
    assert {"gae", "step_envs", "save_checkpoint", "open_run", "parse_args", "Agent", "METRICS"} <= set(common)
    for name in set(common) - {"main", *apart}:
        words = [word for table in may_differ for word in table.get(name, ())]
        lines = difflib.ndiff(ours[name].splitlines(), theirs[name].splitlines())
        for line in (line for line in lines if line[0] in "+-" and line[1:].strip()):
            assert any(word in line for word in words), f"{name}: {line}"


def imports(script):
    """What a script imports at its top, one by one."""
    nodes = [node for node in ast.parse(Path(script.__file__).read_text()).body if hasattr(node, "names")]
    return {(getattr(node, "module", None), alias.name, alias.asname) for node in nodes for alias in node.names}


def test_what_has_the_same_name_is_the_same():
    """Imports, tables, functions and classes of all scripts are equal line by line, but for a few named lines.

    Pool, network, evaluation and public states depend on the family only. The main programs take the same steps in
    the same order, and PR-PPO has one more: the reference policies.
    """
    assert_same_definitions(PRPO_MINIGRID, PRPO_ATARI, FAMILIES, apart={*OF_FAMILY, "make_tests"})
    assert_same_definitions(PRPO_MINIGRID, FEDAVG_MINIGRID, ALGORITHMS, BOTH)
    assert_same_definitions(PRPO_ATARI, FEDAVG_ATARI, ALGORITHMS, BOTH, apart={"make_tests"})
    settings = {"env_ids": ("PongNoFrameskip-v4", GAME, GAME), "eval_episodes": 3, "seed": 7}
    assert PRPO_ATARI.make_tests(PRPO_ATARI.Args(**settings)) == FEDAVG_ATARI.make_tests(FEDAVG_ATARI.Args(**settings))
    assert imports(FEDAVG_MINIGRID) == imports(PRPO_MINIGRID) | imports(PRPO_ATARI)

    of_their_own = {"Reference", "What", "Many", "Few"}  # the last three are about the family
    steps = [re.findall(r"^ +# ([A-Z][a-z]+)", definitions(script)["main"], re.MULTILINE) for script in SCRIPTS]
    common = [[step for step in own if step not in of_their_own] for own in steps]
    assert common[0] == common[1] == common[2]
    assert ["Reference" in own for own in steps] == [True, True, False]
    assert {"Rollout", "Advantages", "Update", "Communication", "Checkpoint", "Evaluation"} <= set(common[0])
