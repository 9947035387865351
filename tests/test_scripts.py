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
    COEF,
    PARAMETERS,
    REPOSITORY,
    SCRIPTS,
    call,
    every_script,
    flags,
    only_run,
    rows_of,
    scalars_of,
    tiny,
)
from safetensors.torch import load_file

import fedavg_ppo
import prpo_minigrid

ROOMS = "MiniGrid-FourRooms-v0"


# --- bad input ---

BAD = {
    "unknown environment": (["--env-id", "MiniGrid-FourRoom-v0"], ["--env-id MiniGrid-FourRoom-v0", ROOMS]),
    "unknown environment of an agent": (
        ["--num-agents", "2", "--env-ids", ROOMS, "MiniGrid-DoorKey-6x6"],
        ["--env-ids", "MiniGrid-DoorKey-6x6 ", "MiniGrid-DoorKey-6x6-v0"],
    ),
    "wrong number of environments": (["--env-ids", ROOMS, ROOMS], ["--env-ids", ROOMS, "3 agents"]),
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
    "private levels in envpool": (
        ["--levels-per-agent", "3", "--env-backend", "envpool"],
        ["--levels-per-agent 3", "--env-backend gymnasium"],
    ),
    "unknown device": (["--device", "gpu"], ["--device gpu", "cpu"]),
}


def complaint(script, argv):
    """The one line with which parse_args ends."""
    with pytest.raises(SystemExit) as end:
        script.parse_args([str(part) for part in argv])
    message = end.value.code
    assert isinstance(message, str) and message == message.strip() and "\n" not in message
    return message


@every_script
@pytest.mark.parametrize("case", BAD)
def test_bad_input_ends_with_one_line(script, case):
    """It names the flag, the value and what would be valid."""
    argv, parts = BAD[case]
    message = complaint(script, argv)
    assert all(part in message for part in parts), message
    assert script.parse_args([]) == script.Args()  # and good input passes


@every_script
def test_bad_penalty_coefficient(script):
    """Each script knows the other's name for the coefficient too."""
    flag = f"--{COEF[script].replace('_', '-')}"
    for alias in ("--communication-coef", "--kl-coef"):
        message = complaint(script, [alias, "-1"])
        assert f"{flag} -1" in message and "not be negative" in message
        assert getattr(script.parse_args([alias, "2.5"]), COEF[script]) == 2.5


def test_agents_must_not_swap_networks():
    """FedAvg without self weight is refused (in PR-PPO it is a reference like any other)."""
    argv = ["--communicator", "self-preferred", "--self-preference", "0"]
    assert "--self-preference 0.0: must be positive" in complaint(fedavg_ppo, argv)
    assert prpo_minigrid.parse_args(argv).self_preference == 0


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
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert script.parse_args(["--device", "cuda"]).device == "cuda"


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
    cases = {"envpool": ["--env-backend", "envpool"], "wandb": ["--track"], "moviepy": ["--capture-video"]}
    for package, argv in cases.items():
        message = complaint(script, argv)
        assert argv[0] in message and f"{package} is not installed" in message
    assert script.choose_backend(script.parse_args([])) == "gymnasium"


@every_script
def test_resume_of_something_else(script, finished, tmp_path):
    """A folder that is missing, is no run, belongs to the other script or has other settings."""
    other = SCRIPTS[1 - SCRIPTS.index(script)]
    (tmp_path / "config.json").write_text("{}")
    cases = {tmp_path / "nowhere": "config.json", tmp_path: script.__name__, finished(other)[0]: script.__name__}
    for folder, valid in cases.items():
        message = complaint(script, ["--resume", folder])
        assert f"--resume {folder}" in message and valid in message
    folder, _ = finished(script)
    for flag, value, valid in (("--num-envs", "4", "2"), ("--env-id", ROOMS, "MiniGrid-Empty-5x5-v0")):
        message = complaint(script, ["--resume", folder, flag, value])
        assert f"{flag} {value}" in message and f"must be {valid}" in message and str(folder) in message
    settings = json.loads((folder / "config.json").read_text())
    args = script.parse_args(["--resume", str(folder), "--eval-episodes", "7"])  # this may change, and the rest is kept
    kept = {name: value for name, value in vars(args).items() if name not in ("resume", "eval_episodes")}
    assert (args.resume, args.eval_episodes) == (str(folder), 7)
    assert {name: list(value) if name == "env_ids" else value for name, value in kept.items()} == {
        name: value for name, value in settings.items() if name in kept
    }


@every_script
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
    for field, explanation in zip(body[::2], body[1::2], strict=True):
        text = explanation.value.value
        assert len(text.split()) >= 2
        assert f"--{field.target.id.replace('_', '-')}" in shown
        assert re.sub(r"[^\w:,.()\[\]/*+-]+", "", text) in shown, text


# --- what a run leaves ---


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """finished(script): (folder, stdout) of a small run of three agents on two tasks, with evaluation and videos."""
    runs = {}

    def run(script):
        if script not in runs:
            run_dir, output = tmp_path_factory.mktemp(script.__name__), io.StringIO()
            tasks = ("MiniGrid-Empty-5x5-v0", "MiniGrid-Empty-Random-5x5-v0", "MiniGrid-Empty-5x5-v0")
            changes = {"communicator": "uniform", "eval_episodes": 6, "capture_video": True, "env_ids": tasks}
            changes |= {"env_id": "MiniGrid-Empty-5x5-v0"}
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
    assert summary["settings"]["learning_rate"] == 1e-3 and summary["settings"]["num_agents"] == 3
    assert {"python", "torch", "numpy", "gymnasium", "minigrid"} <= summary["versions"].keys()
    assert summary["versions"]["torch"] == torch.__version__ and summary["device"] == "cpu"
    assert summary["timesteps_per_agent"] == 6 * 128
    assert summary["agent_steps_per_second"] == pytest.approx(3 * 6 * 128 / summary["train_seconds"])
    assert 0 < summary["train_seconds"] < summary["wall_seconds"]
    assert summary["train_seconds"] == pytest.approx(sum(summary["seconds"].values()), rel=0.2)
    assert summary["communication_rounds"] == 2
    assert summary["communication_bytes"] == 2 * 6 * PARAMETERS * 4  # rounds, listeners, parameters, float32
    assert f"{summary['communication_bytes']:,} bytes sent" in output and str(folder) in output

    returns = summary["training_return"]
    assert returns["group"] == pytest.approx(sum(returns["agents"]) / 3)
    last = rows_of(folder)[-3:]
    assert returns["agents"] == pytest.approx([float(row["return_last_100"]) for row in last], abs=1e-5)

    evaluation, tasks = summary["evaluation"], summary["settings"]["env_ids"]
    assert evaluation["episodes"] == 6 and len(evaluation["agents"]) == 3
    assert all(row.keys() == set(tasks) for row in evaluation["agents"])  # every agent on every task
    own = [row[task]["mean"] for row, task in zip(evaluation["agents"], tasks, strict=True)]
    assert evaluation["group"] == pytest.approx(sum(own) / 3)
    for i, row in enumerate(evaluation["agents"]):
        agent = script.Agent()
        agent.load_state_dict(load_file(folder / f"agent_{i}.safetensors"))
        args = script.Args(**summary["settings"])
        for test, (task, levels) in enumerate(script.make_tests(args).values()):
            envs = [script.make_env(task) for _ in levels]
            found = script.evaluate(agent, envs, levels, script.derive_seed(args.seed, i, test, 4))
            assert len(found) == 6 and row[task]["mean"] == pytest.approx(found.mean())
            assert row[task]["ci95"] == pytest.approx(1.96 * found.std(ddof=1) / math.sqrt(6))


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
        assert row["env_id"] == f"MiniGrid-Empty-{'Random-' * (row['agent'] == '1')}5x5-v0"
        assert number["timesteps"] == 128 * number["iteration"]
        assert number["communication_bytes"] == 6 * PARAMETERS * 4 * (number["iteration"] // 3)
        assert 0 < number["entropy"] <= math.log(7) + 1e-6 and number["value_loss"] >= 0
        assert number["approx_kl"] >= -1e-6 and number["kl_reference"] >= -1e-6 and 0 <= number["clipfrac"] <= 1
        assert number["explained_variance"] <= 1 and number["agent_steps_per_second"] > 0
        if number["episodes"]:
            assert 0 <= number["episodic_return"] <= 1 and 1 <= number["episodic_length"] <= 100
            seen[int(row["agent"])].append((number["episodes"], number["episodic_return"]))
            total = sum(count * mean for count, mean in seen[int(row["agent"])])
            episodes = sum(count for count, _ in seen[int(row["agent"])])
            assert number["return_last_100"] == pytest.approx(total / episodes, abs=1e-4)  # not yet a hundred
        else:
            assert math.isnan(number["episodic_return"]) and math.isnan(number["episodic_length"])
    assert sum(map(len, seen)) > 6


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
    rates = [1e-3 * (1 - k / 6) for k in range(6)]  # annealed linearly, to 0 after the end
    assert [value for _, value in scalars["charts/learning_rate"]] == pytest.approx(rates)
    for column, tag in script.METRICS.items():
        for i in range(3):
            known = [(int(row["timesteps"]), float(row[column])) for row in rows[i::3] if row[column] != "nan"]
            found = scalars.get(f"{tag}/agent_{i}", [])
            assert [step for step, _ in found] == [step for step, _ in known]
            assert [value for _, value in found] == pytest.approx([value for _, value in known], rel=1e-4, abs=1e-6)
    for tag in ("distances/agent_0_agent_1", "distances/agent_1_agent_2"):
        assert [step for step, _ in scalars[tag]] == [k * 128 for k in range(3, 7)]  # known since the first round
        assert all(0 < value < 1 for _, value in scalars[tag])


@every_script
def test_one_video_per_agent(script, finished):
    """--capture-video leaves one playable file for each agent, and nothing else in its folder."""
    folder, _ = finished(script)
    videos = sorted((folder / "videos").iterdir())
    assert [re.match(r"agent_(\d)-.*\.mp4$", path.name)[1] for path in videos] == ["0", "1", "2"]
    assert all(b"ftyp" in path.read_bytes()[:32] and path.stat().st_size > 1000 for path in videos)


@every_script
def test_a_run_leaves_no_litter(script, finished):
    """The folder is named as CleanRL does, and holds what is documented."""
    folder, _ = finished(script)
    name = rf"MiniGrid-Empty-5x5-v0\+MiniGrid-Empty-Random-5x5-v0__{script.__name__}__1__\d+"
    assert re.fullmatch(name, folder.name)
    names = {re.sub(r"\d+", "N", path.name) for path in folder.iterdir() if "tfevents" not in path.name}
    assert names == {"agent_N.safetensors", "checkpoints", "config.json", "metrics.csv", "summary.json", "videos"}
    assert not list(folder.rglob("*.tmp"))
    for path in folder.glob("checkpoints/agent_*/*.pt"):
        torch.load(path, weights_only=True)  # nothing in it needs unpickling


@every_script
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
@every_script
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
MAY_DIFFER = {
    "Args": ("identity", "communication_coef", "kl_coef", "KL", "mixture", "mixes", "self_reference", "own part"),
    "check_args": ("communication_coef", "kl_coef", "swap"),
    "update": ("eq. 4", "eq. 3", "distance", "_coef * kl_reference"),
}


def definitions(script):
    """name -> source of everything at the top level of a script; an unnamed statement goes by its own text."""
    text, found = Path(script.__file__).read_text(), {}
    for node in ast.parse(text).body[1:]:  # without the docstring
        source = ast.get_source_segment(text, node)
        targets = [target.id for target in getattr(node, "targets", [])]
        found[getattr(node, "name", None) or ", ".join(targets) or source] = source
    return found


def test_what_has_the_same_name_is_the_same():
    """Imports, tables, functions and classes of both scripts are equal line by line, but for a few named lines.

    Their main programs take the same steps in the same order, and PR-PPO has one more: the reference policies.
    """
    ours, theirs = map(definitions, SCRIPTS)
    assert list(ours) == list(theirs)
    assert {"gae", "step_envs", "save_checkpoint", "open_run", "parse_args", "Agent", "METRICS"} <= ours.keys()
    for name in ours.keys() - {"main"}:
        lines = difflib.ndiff(ours[name].splitlines(), theirs[name].splitlines())
        for line in (line for line in lines if line[0] in "+-"):
            assert any(word in line for word in MAY_DIFFER.get(name, ())), f"{name}: {line}"

    steps = [re.findall(r"^ +# ([A-Z][a-z]+)", source["main"], re.MULTILINE) for source in (ours, theirs)]
    assert [step for step in steps[0] if step != "Reference"] == steps[1]
    assert {"Rollout", "Advantages", "Reference", "Update", "Communication", "Checkpoint"} <= set(steps[0])
