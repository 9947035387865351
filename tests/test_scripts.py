"""The command line, what a run leaves behind, and the agreement between the scripts."""

import ast
import contextlib
import difflib
import functools
import importlib.util
import inspect
import io
import itertools
import math
import re
import shlex
import shutil
import sys
import typing
import warnings
from collections import namedtuple
from pathlib import Path
from unittest import mock

import pytest
import torch
from gymnasium.error import DependencyNotInstalled
from helpers import (
    DISTRAL_MINIGRID,
    FEDAVG_ATARI,
    FEDAVG_MINIGRID,
    FEDAVG_MUJOCO,
    HAS_ENVPOOL,
    PRPO_ATARI,
    PRPO_MINIGRID,
    PRPO_MUJOCO,
    PRTRPO_MINIGRID,
    REPOSITORY,
    SCRIPTS,
    SLOW_ATARI,
    SLOW_FEDAVG,
    WORDS,
    call,
    config_of,
    every_family,
    every_script,
    flags,
    on,
    on_minigrid,
    only_run,
    refusal,
    rows_of,
    scalars_of,
    summary_of,
    table_of,
    tiny,
    train,
)
from safetensors import SafetensorError
from safetensors.torch import load_file
from scipy import stats
from tyro._docstrings import get_field_docstring

import communicators
import prpo_atari
from benchmark import play

ROOMS = "MiniGrid-FourRooms-v0"
GAME = "BreakoutNoFrameskip-v4"


# --- bad input ---

BAD = {
    "unknown communicator": (
        ["--communicator", "uniforn"],
        ["--communicator uniforn", "neither a communicator", "--help", "CSV file"],
    ),
    "no such matrix": (
        ["--communicator", "nowhere.csv"],
        ["--communicator nowhere.csv: No such file or directory"],
    ),
    "rollouts that may only start a game": (
        ["--num-steps", "1", "--num-envs", "4"],
        ["--num-steps 1", "at least"],
    ),
    "self-preference above 1": (["--self-preference", "1.5"], ["--self-preference 1.5", "[0, 1]"]),
    "self-preference below 0": (
        ["--self-preference", "-0.1"],
        ["--self-preference -0.1", "[0, 1]"],
    ),
    "gamma above 1": (["--gamma", "1.01"], ["--gamma 1.01", "[0, 1]"]),
    "no number": (["--gae-lambda", "nan"], ["--gae-lambda nan", "[0, 1]"]),
    "unknown flag": (["--nonsense", "3"], ["--nonsense"]),
    "misspelt flag": (["--num-env", "3"], ["--num-env,", "--num-envs"]),
    "a word that belongs nowhere": (["stray"], ["stray"]),
    "a word instead of a number": (["--num-envs", "four"], ["--num-envs", "'four'", "int"]),
    "no whole number": (["--seed", "1.5"], ["--seed", "'1.5'", "int"]),
    "a word instead of a fraction": (
        ["--learning-rate", "1e-4x"],
        ["--learning-rate", "'1e-4x'", "float"],
    ),
    "no value": (["--seed"], ["--seed", "value"]),
    "unknown mixture or direction": (
        ["--kl-direction", "up"],
        ["--kl-direction", "'up'", "'forward', 'reverse'"],
    ),
    "unknown topology": (["--topology", "star"], ["--topology", "'star'", "'full', 'ring'"]),
    "no time": (["--timeout", "0"], ["--timeout 0", "positive"]),
    "too much time": (["--timeout", "1e300"], ["--timeout 1e+300", "be at most 1e9"]),
    "batch not divisible": (
        ["--num-minibatches", "3", "--num-envs", "2", "--num-steps", "5"],
        ["--num-minibatches 3", "10"],
    ),
    "shorter than a rollout": (["--total-timesteps", "2047"], ["--total-timesteps 2047", "2048"]),
    "no agents": (["--num-agents", "0"], ["--num-agents 0", "at least 1"]),
    "no rounds": (["--local-updates", "0"], ["--local-updates 0", "at least 1"]),
    "more peers than there are": (["--top-k", "3"], ["--top-k 3", "0..2"]),
    "negative seed": (["--seed", "-1"], ["--seed -1", "not be negative"]),
    "a seed of 64 bits": (["--seed", str(2**63)], [f"--seed {2**63}", "be below 2^63"]),
    "no learning rate": (["--learning-rate", "0"], ["--learning-rate 0", "positive"]),
    "negative clip range": (["--clip-coef", "-0.1"], ["--clip-coef -0.1", "not be negative"]),
    "temperature zero": (
        ["--communicator-temperature", "0"],
        ["--communicator-temperature 0", "positive"],
    ),
    "negative evaluations": (["--eval-every", "-1"], ["--eval-every -1", "not be negative"]),
}
# The others are refused by lines that the scripts share
ALSO_ELSEWHERE = (
    "unknown communicator",
    "rollouts that may only start a game",
    "misspelt flag",
    "no rounds",
    "no learning rate",
)
BAD_MINIGRID = {
    "unknown environment": (
        ["--env-id", "MiniGrid-FourRoom-v0"],
        ["--env-id MiniGrid-FourRoom-v0", ROOMS.removesuffix("-v0")],
    ),
    "unknown environment of an agent": (
        ["--num-agents", "2", "--env-ids", ROOMS, "MiniGrid-DoorKey-6x6"],
        ["--env-ids", "MiniGrid-DoorKey-6x6 ", "MiniGrid-DoorKey-6x6-v0"],
    ),
    "wrong number of environments": (["--env-ids", ROOMS, ROOMS], ["--env-ids", ROOMS, "3 agents"]),
    "tasks with other actions": (
        ["--num-agents", "2", "--env-ids", ROOMS, "MiniGrid-Dynamic-Obstacles-6x6-v0"],
        ["--env-ids", "MiniGrid-Dynamic-Obstacles-6x6-v0", "same number of actions", "7", "3"],
    ),
    "sizes for some": (
        ["--hidden-sizes", "64", "32"],
        ["--hidden-sizes 64 32", "3 multiples of 8"],
    ),
    "an odd size": (
        ["--hidden-sizes", "64", "32", "12"],
        ["--hidden-sizes 64 32 12", "3 multiples of 8"],
    ),
}
BAD_ATARI = {
    "unknown game": (
        ["--env-id", "BreakotNoFrameskip-v4"],
        ["--env-id BreakotNoFrameskip-v4", GAME.removesuffix("-v4")],
    ),
    "unknown game of an agent": (
        ["--num-agents", "2", "--env-ids", GAME, "ALE/Breakot-v5"],
        ["--env-ids", "ALE/Breakot-v5", "`Breakout`"],
    ),
    "wrong number of games": (["--env-ids", GAME, GAME], ["--env-ids", GAME, "3 agents"]),
    "games with other actions": (
        ["--num-agents", "2", "--env-ids", GAME, "PongNoFrameskip-v4"],
        ["--env-ids", "PongNoFrameskip-v4", "same actions", "--full-action-space"],
    ),
}
BAD_MUJOCO = {
    "unknown task": (["--env-id", "HalfCheeta-v5"], ["--env-id HalfCheeta-v5", "`HalfCheetah`"]),
    "unknown task of an agent": (
        ["--num-agents", "2", "--env-ids", "Hopper-v5", "Hoper-v5"],
        ["--env-ids", "Hoper-v5", "`Hopper`"],
    ),
    "wrong number of tasks": (["--env-ids", "Hopper-v5"], ["--env-ids Hopper-v5", "3 agents"]),
    "discrete actions": (
        ["--env-id", "CartPole-v1"],
        ["--env-id CartPole-v1", "no list of continuous actions, but Discrete(2)"],
    ),
    "a room": (["--env-id", ROOMS], [f"--env-id {ROOMS}", "no list of numbers, but Dict("]),
    "a game": (["--env-id", GAME], [f"--env-id {GAME}", "no list of numbers, but Box("]),
    "bodies of other sizes": (
        ["--num-agents", "2", "--env-ids", "HalfCheetah-v5", "Hopper-v5"],
        ["--env-ids HalfCheetah-v5 Hopper-v5", "HalfCheetah-v5 17 and 6, Hopper-v5 11 and 3"],
    ),
    "an evaluation on a body of other sizes": (
        ["--eval-env-ids", "Hopper-v5"],
        ["--eval-env-ids Hopper-v5", "need the same numbers", "Hopper-v5 11 and 3"],
    ),
    "sizes for some": (["--hidden-sizes", "64", "32"], ["--hidden-sizes 64 32", "3 widths"]),
    "no width": (["--hidden-sizes", "64", "0", "64"], ["--hidden-sizes 64 0 64", "at least 1"]),
    "no samples": (["--kl-samples", "0"], ["--kl-samples 0", "at least 1"]),
}
SWAPPED = {
    "swapped networks": (
        ["--communicator", "self-preferred", "--self-preference", "0"],
        ["--self-preference 0", "must be positive"],
    ),
    "policies": (["--mixture", "geometric"], ["--mixture"]),
}
OF_ATARI = "games of the Atari 2600 are trained by fedavg_atari.py"
BAD_FEDAVG = SWAPPED | {
    "no average": (
        ["--hidden-sizes", "64", "64", "32"],
        ["--hidden-sizes 64 64 32", "must be equal"],
    ),
    "a game": (["--env-id", GAME], [f"--env-id {GAME}: {OF_ATARI}"]),
    "a game by its other name": (
        ["--env-id", "ALE/Breakout-v5"],
        [f"--env-id ALE/Breakout-v5: {OF_ATARI}"],
    ),
    "a room and a game": (
        ["--num-agents", "2", "--env-ids", ROOMS, GAME],
        [f"--env-ids {ROOMS} {GAME}: {OF_ATARI}"],
    ),
    "a private trunk": (
        ["--private-heads", "network"],
        ["--private-heads", "'network'", "'actor', 'critic'"],
    ),
    "private heads beside a pull": (
        ["--prox-coef", "0.1", "--private-heads", "critic"],
        ["--private-heads critic", "--prox-coef"],
    ),
    "a push": (["--prox-coef", "-0.1"], ["--prox-coef -0.1", "not be negative"]),
    "a server step beside a pull": (
        ["--prox-coef", "0.1", "--server-lr", "0.5"],
        ["--server-lr 0.5: does not go with --prox-coef"],
    ),
    "no server step": (["--server-lr", "0"], ["--server-lr 0", "must be positive"]),
}
BAD_FEDAVG_ATARI = SWAPPED | {
    "a room": (["--env-id", ROOMS], [f"--env-id {ROOMS}", "must be <Game>NoFrameskip-v4"]),
}
BAD_FEDAVG_MUJOCO = SWAPPED | {
    "no average": (
        ["--hidden-sizes", "64", "64", "32"],
        ["--hidden-sizes 64 64 32", "must be equal"],
    ),
    "a room": BAD_MUJOCO["a room"],
    "private deviations": (
        ["--private-heads", "actor_log_std"],
        ["--private-heads", "'actor_log_std'", "'actor', 'critic'"],
    ),
    "no server step": (["--server-lr", "0"], ["--server-lr 0", "must be positive"]),
}
BAD_PRTRPO = {
    "no region": (["--epsilon", "0"], ["--epsilon 0", "positive"]),
    "no bound": (["--delta", "-0.1"], ["--delta -0.1", "(0, 1]"]),
    "more than everything": (["--delta", "1.5"], ["--delta 1.5", "(0, 1]"]),
    "no floor": (["--epsilon-min", "0"], ["--epsilon-min 0", "positive"]),
    "no iterations": (["--cg-iters", "0"], ["--cg-iters 0", "at least 1"]),
    "no line search": (["--backtrack-iters", "0"], ["--backtrack-iters 0", "at least 1"]),
    "no backtracking": (["--backtrack-coef", "1"], ["--backtrack-coef 1", "(0, 1)"]),
    "a bound that another mixture breaks": (
        ["--delta", "0.2", "--mixture", "geometric"],
        ["--delta 0.2", "--mixture arithmetic"],
    ),
    "a bound with weights of states": (
        ["--delta", "0.2", "--gate", "value"],
        ["--delta 0.2", "the same in all states"],
    ),
    "negative damping": (["--damping-coef", "-1"], ["--damping-coef -1", "positive"]),
    "a flag of PR-PPO": (["--clip-coef", "0.1"], ["--clip-coef"]),
    "no number": (["--epsilon", "nan"], ["--epsilon nan", "finite"]),
    "unknown task": (
        ["--env-id", "MiniGrid-FourRoom-v0"],
        ["--env-id MiniGrid-FourRoom-v0", "MiniGrid-FourRooms"],
    ),
    "batch not divisible": (["--num-minibatches", "3"], ["--num-minibatches 3", "2048"]),
}
PRPO = [PRPO_MINIGRID, PRPO_ATARI, PRPO_MUJOCO]
CASES = [(PRPO_MINIGRID, case, *BAD[case]) for case in BAD]
CASES += [(script, case, *BAD[case]) for script in PRPO[1:] for case in ALSO_ELSEWHERE]
CASES += [(PRPO_MINIGRID, case, *BAD_MINIGRID[case]) for case in BAD_MINIGRID]
CASES += [(PRPO_ATARI, case, *BAD_ATARI[case]) for case in BAD_ATARI]
CASES += [(PRPO_MUJOCO, case, *BAD_MUJOCO[case]) for case in BAD_MUJOCO]
CASES += [(FEDAVG_MINIGRID, case, *BAD_FEDAVG[case]) for case in BAD_FEDAVG]
CASES += [(FEDAVG_ATARI, case, *BAD_FEDAVG_ATARI[case]) for case in BAD_FEDAVG_ATARI]
CASES += [(FEDAVG_MUJOCO, case, *BAD_FEDAVG_MUJOCO[case]) for case in BAD_FEDAVG_MUJOCO]
CASES += [(PRTRPO_MINIGRID, case, *BAD_PRTRPO[case]) for case in BAD_PRTRPO]


def complaint(script, argv):
    """The one line with which parse_args ends the process."""
    return refusal(script.parse_args, [str(word) for word in argv])


@every_family
def test_bounds_include_their_ends(script):
    args = script.parse_args(["--gamma", "1", "--gae-lambda", "0"])
    assert (args.gamma, args.gae_lambda) == (1, 0)


@pytest.mark.parametrize(
    ("script", "argv", "words"),
    [pytest.param(script, *rest, id=f"{case}-{script}") for script, case, *rest in CASES],
)
def test_bad_input_ends_with_one_line(script, argv, words):
    """Or tyro's box. It names the flag, the value and what would be valid."""
    message = complaint(script, argv)
    assert all(word in message for word in words), message


@every_family
def test_true_and_false_are_refused_with_a_hint(script):
    """tyro would name neither the flag nor the remedy."""
    hint = "takes no value; write --anneal-lr or --no-anneal-lr"
    for argv in (["--anneal-lr", "False"], ["--anneal-lr=False"], ["--anneal_lr", "False"]):
        assert complaint(script, argv) == f"{argv[0].split('=')[0]} False: {hint}"
    assert complaint(script, ["--no-anneal-lr", "true"]) == f"--no-anneal-lr true: {hint}"
    assert not script.parse_args(["--no-anneal-lr", "--exp-name", "False"]).anneal_lr


def test_only_the_first_rank_prints_a_box(monkeypatch, capsys):
    """Or torchrun would print one for each process."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank, printed in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as end:
            PRPO_MINIGRID.parse_args(["--num-envz", "3"])
        assert end.value.code == 2
        assert ("--num-envz" in capsys.readouterr().err) == printed


@every_script
def test_good_input_passes(script):
    """The command line without flags gives the defaults, and `auto` is replaced by a choice."""
    parsed = vars(script.parse_args([]))
    expected = vars(script.Args())
    if script.family != "Atari":
        assert parsed.pop("device") == "cpu"
        assert expected.pop("device") == "auto"
    else:
        assert parsed.pop("precision") in ("float32", "bfloat16")
        assert expected.pop("precision") == "auto"
        for precision in ("float32", "bfloat16"):
            assert script.parse_args(["--precision", precision]).precision == precision
    if "env_backend" in expected:
        assert expected.pop("env_backend") == "auto"
        assert parsed.pop("env_backend") in ("envpool", "gymnasium")
    assert parsed == expected


def test_games_with_other_actions_can_share_all_eighteen():
    """The remedy that the error line recommends is accepted.

    So is one game under both its names.
    """
    script = PRPO_ATARI
    games = ["--num-agents", "2", "--env-ids", GAME, "PongNoFrameskip-v4", "--full-action-space"]
    args = script.parse_args(games)
    assert [len(script.list_actions(env_id, args)) for env_id in args.env_ids] == [18, 18]
    args = script.parse_args(["--num-agents", "2", "--env-ids", GAME, "ALE/Breakout-v5"])
    assert len(script.list_actions(GAME, args)) == 4


@every_family
def test_bad_penalty_coefficient(script):
    """It has the same two names everywhere."""
    for alias in ("--communication-coef", "--kl-coef"):
        message = complaint(script, [alias, "-1"])
        assert "--kl-coef -1" in message
        assert "not be negative" in message
        assert script.parse_args([alias, "2.5"]).kl_coef == 2.5


@every_family
def test_numbers_must_be_finite(script):
    """Infinity and nan are refused for every flag that takes a fraction."""
    hints = typing.get_type_hints(script.Args)
    number = 0
    for name in hints:
        if hints[name] in (float, float | None):
            number += 1
            for value in ("inf", "-inf", "nan"):
                flag = f"--{name.replace('_', '-')}"
                message = complaint(script, [f"{flag}={value}"])
                assert f"{flag} {value}" in message
                assert "must be finite" in message
    assert number >= 11


def test_tasks_with_other_numbers_of_actions(tmp_path):
    """Dynamic obstacles have three actions, and so have agents there."""
    script = PRPO_MINIGRID
    args = script.parse_args(["--env-id", "MiniGrid-Dynamic-Obstacles-6x6-v0"])
    for settings, number in ((args, 3), (script.Args(), 7)):
        assert script.make_agents(settings)[0].actor.out_features == number
    changes = {"env_id": args.env_id, "iterations": 1, "num_agents": 2, "local_updates": 1}
    changes["eval_episodes"] = 0
    folder = train(script, tmp_path, **changes)
    assert load_file(folder / "agent_0.safetensors")["actor.bias"].shape == (3,)
    assert 0 < float(rows_of(folder)[0]["entropy"]) <= math.log(3) + 1e-6


@pytest.mark.parametrize(
    ("env_id", "warned"),
    [
        ("BabyAI-GoToObj-v0", True),
        ("MiniGrid-Fetch-5x5-N2-v0", True),
        ("MiniGrid-GoToDoor-5x5-v0", True),
        (ROOMS, False),
        ("MiniGrid-DoorKey-6x6-v0", False),
        ("MiniGrid-SimpleCrossingS9N1-v0", False),
    ],
)
def test_missions_that_agents_do_not_see(env_id, warned, capfd):
    """Agents see the image only, so tasks with several missions are accepted with a warning."""
    script = PRPO_MINIGRID
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        script.parse_args(["--env-id", env_id])
    lines = [str(warning.message) for warning in caught if "mission" in str(warning.message)]
    lines += [line for line in "".join(capfd.readouterr()).splitlines() if "mission" in line]
    assert len(lines) == warned
    assert all(env_id in line for line in lines)


def test_policies_may_be_swapped():
    """FedAvg without self weight is refused; in PR-PPO it is a reference like any other.

    A single agent has nobody to swap with.
    """
    argv = ["--communicator", "self-preferred", "--self-preference", "0"]
    assert PRPO_MINIGRID.parse_args(argv).self_preference == 0
    assert FEDAVG_MINIGRID.parse_args([*argv, "--num-agents", "1"]).self_preference == 0


def test_a_parameter_of_another_communicator_is_announced(capsys, monkeypatch):
    """The run goes on; of several ranks the first one reports. What is read is not named."""
    flags = "--self-preference 0.3", "--communicator-temperature 2.0"
    reads = {"self-preferred": 0, "surrogate": 1, "softmax-reward": 1, "uniform": None}
    for communicator, read in reads.items():
        argv = ["--communicator", communicator, *" ".join(flags).split()]
        for script in PRPO:
            script.parse_args(argv)
            expected = [
                f"{flag}: is not read by --communicator {communicator}"
                for k, flag in enumerate(flags)
                if k != read
            ]
            assert capsys.readouterr().out.splitlines() == expected
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    PRPO_MINIGRID.parse_args(argv)
    assert capsys.readouterr().out == ""


def test_other_flags_without_effect_are_accepted_in_silence(capsys):
    """--help says what each of them needs."""
    for words in ("--topology ring", "--top-k 1", "--mixture geometric"):
        PRPO_MINIGRID.parse_args(["--communicator", "identity", *words.split()])
    PRPO_MINIGRID.parse_args(["--kl-schedule", "linear", "--kl-coef", "0", "--num-agents", "1"])
    PRPO_MINIGRID.parse_args(["--self-preference", "0.5", "--num-agents", "1"])
    PRTRPO_MINIGRID.parse_args([])  # whose peers need no penalty
    assert capsys.readouterr().out == ""


def test_a_coefficient_of_zero_is_reported_where_nothing_else_pulls(capsys):
    """Policies would be sent for nothing."""
    line = "--kl-coef 0: policies are sent, and peers have no influence\n"
    for script in PRPO:
        script.parse_args(["--kl-coef", "0"])
        assert capsys.readouterr().out == line
        for other in ("--num-agents 1", "--communicator identity"):
            script.parse_args(["--kl-coef", "0", *other.split()])
        script.parse_args(["--kl-coef", "0.1"])
        assert capsys.readouterr().out == ""
    for script in (
        FEDAVG_MINIGRID,
        FEDAVG_ATARI,
        FEDAVG_MUJOCO,
    ):  # whose agents' parameters are averaged
        script.parse_args(["--kl-coef", "0"])
    assert capsys.readouterr().out == ""


@every_family
def test_agents_must_be_shared_evenly_by_the_ranks(script, monkeypatch, capsys):
    """One rank prints the error line, and all ranks end."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert script.parse_args([]).num_agents == 3  # without a rank it is not torchrun's
    monkeypatch.setenv("RANK", "0")
    message = complaint(script, [])
    assert "--num-agents 3" in message
    assert "multiple of the 2 processes" in message
    assert script.parse_args(["--num-agents", "4"]).num_agents == 4
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as end:
        script.parse_args([])
    assert end.value.code == 2
    assert capsys.readouterr() == ("", "")


@every_family
def test_device_that_is_not_there(script, monkeypatch):
    """cuda is not offered where there is none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for value in ("cuda", "cuda:1"):
        message = complaint(script, ["--device", value])
        assert f"--device {value}" in message
        assert "choose auto, cpu" in message
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for value in ("cuda", "cuda:0", "cuda:1"):
        assert script.parse_args(["--device", value]).device == value
    for value in ("cuda:2", "cuda:-1", "cuda:01", "cuda:", "cuda:x", "cuda:300", "gpu"):
        message = complaint(script, ["--device", value])
        assert message == f"--device {value}: choose auto, cpu, cuda, cuda:0, cuda:1"


def test_a_device_that_one_machine_lacks_is_reported_by_its_first_rank(monkeypatch, capsys):
    """Rank 0 may be on another machine, which has it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("RANK", "8")
    monkeypatch.setenv("WORLD_SIZE", "16")
    argv = ["--num-agents", "16", "--device", "cuda"]
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert complaint(PRPO_MINIGRID, argv) == "--device cuda: choose auto, cpu"
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit) as end:
        PRPO_MINIGRID.parse_args(argv)
    assert end.value.code == 2
    assert capsys.readouterr().err == ""


@on([PRPO_MINIGRID, PRTRPO_MINIGRID, PRPO_ATARI, PRPO_MUJOCO])
def test_auto_is_the_processor_for_small_networks(script, monkeypatch):
    """Also where there is a GPU, which Atari takes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)
    args = script.parse_args(["--env-id", script.tiny["env_id"]])
    assert args.device == ("auto" if script.family == "Atari" else "cpu")


@every_family
def test_disk_is_checked_before_anything_starts(script, tmp_path, monkeypatch):
    """The run folder must be a folder, writable, with space for two checkpoints per agent."""
    file = tmp_path / "file"
    file.write_text("")
    for run_dir in (file, file / "below", tmp_path / ("long" * 100)):
        message = complaint(script, ["--run-dir", run_dir])
        assert f"--run-dir {run_dir}" in message
        assert "folder that can be written to" in message
    deep = tmp_path / "not" / "there"
    assert script.parse_args(["--run-dir", str(deep)]).run_dir == str(deep)
    assert not deep.exists()
    usage = namedtuple("usage", "total used free")
    for free, fits in ((1, False), (80 * 2**20, False), (10**10, True)):
        monkeypatch.setattr(
            shutil, "disk_usage", lambda path, free=free: usage(10**11, 10**11 - free, free)
        )
        if fits:
            assert script.parse_args(["--run-dir", str(tmp_path)])
        else:
            message = complaint(script, ["--run-dir", tmp_path])
            assert f"--run-dir {tmp_path}" in message
            assert re.search(r"needs \d+ MB of free disk space", message)


@every_family
def test_missing_packages_are_named(script, monkeypatch):
    """Optional packages are checked before training, not after."""
    find = importlib.util.find_spec
    missing = {"envpool", "wandb"}

    def find_spec(name):
        return None if name in missing else find(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    script.patch(monkeypatch, "find_spec", find_spec)
    cases = {"wandb": ["--track"]}
    if script.family != "Atari":
        cases["envpool"] = ["--env-backend", "envpool"]
        assert script.choose_backend(script.parse_args([])) == "gymnasium"
    for package, argv in cases.items():
        message = complaint(script, argv)
        assert argv[0] in message
        assert f"{package} is not installed" in message
    if script.family == "MuJoCo":

        def fail(*_, **__):
            raise DependencyNotInstalled("MuJoCo is not installed, run `pip install`\nnow")

        monkeypatch.setattr(script.gym, "make", fail)
        message = complaint(script, ["--env-id", "Hopper-v5"])
        assert message.startswith("--env-id Hopper-v5: ")
        problem = "MuJoCo is not installed, run `pip install`"
        assert message.endswith(f"; Hopper-v5 cannot be used: {problem}")


@every_script
def test_resume_of_something_else(script, finished, whole_run, tmp_path):
    """A folder that is missing, is no run, belongs to another script or has other settings."""

    def run_of(script):
        return finished(script)[0] if script is PRPO_MINIGRID else whole_run(script)

    folder = run_of(script)
    folder_of_other = run_of(SCRIPTS[SCRIPTS.index(script) - 1])
    (tmp_path / "config.json").write_text("{}")
    cases = {
        tmp_path / "nowhere": "config.json",
        tmp_path: script.__name__,
        folder_of_other: script.__name__,
    }
    for wrong_folder, valid in cases.items():
        message = complaint(script, ["--resume", wrong_folder])
        assert f"--resume {wrong_folder}" in message
        assert valid in message
    settings = config_of(folder)
    elsewhere = {"MiniGrid": ROOMS, "Atari": "PongNoFrameskip-v4", "MuJoCo": "Walker2d-v5"}
    for flag, value, valid in (
        ("--num-envs", "4", settings["num_envs"]),
        ("--env-id", elsewhere[script.family], settings["env_id"]),
    ):
        message = complaint(script, ["--resume", folder, flag, value])
        assert f"{flag} {value}" in message
        assert f"must be {valid}" in message
        assert str(folder) in message
    # The number of evaluation episodes may change; all other settings are those of the run
    args = script.parse_args(["--resume", str(folder), "--eval-episodes", "7"])
    assert (args.resume, args.eval_episodes) == (str(folder), 7)
    assert getattr(args, "env_backend", "") != "auto"  # these runs have not chosen one
    for name, value in vars(args).items():
        if name not in ("resume", "eval_episodes", "env_backend") and name in settings:
            assert (list(value) if isinstance(value, tuple) else value) == settings[name], name
    assert len(vars(args).keys() & settings.keys()) > 40


def test_environments_that_cannot_be_made():
    """Registered tasks whose files are not installed, or that the chosen backend lacks."""
    script = PRPO_MINIGRID
    message = complaint(script, ["--env-id", "MiniGrid-WFC-MazeSimple-v0"])
    assert "--env-id MiniGrid-WFC-MazeSimple-v0" in message
    if not HAS_ENVPOOL:
        pytest.skip("envpool is for Linux")
    for script, env_id in ((PRPO_MINIGRID, "MiniGrid-MultiRoom-N4-S5-v1"), (PRPO_MUJOCO, "Ant-v5")):
        message = complaint(script, ["--env-id", env_id, "--env-backend", "envpool"])
        valid = f"has no usable {env_id}; choose auto or gymnasium"
        assert message == f"--env-backend envpool: {valid}"


@on([PRPO_MINIGRID, SLOW_FEDAVG])
def test_bad_input_on_the_command_line_writes_nothing(script, tmp_path):
    """From a shell: one line on stderr, exit code 2, no folder."""
    run = call(REPOSITORY / f"{script.__name__}.py", "--communicator", "nobody", cwd=tmp_path)
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr.count("\n") == 1
    assert "--communicator nobody" in run.stderr
    assert not list(tmp_path.iterdir())


@on(PRPO)
def test_help_names_every_communicator(script):
    """Each of them is understood, and there are no others."""
    text = get_field_docstring(script.Args, "communicator", ())
    _, names = text.replace(" (isolated agents)", "").split(": ")
    names, _ = names.split(", or FILE.csv")
    names = names.split(", ")
    assert names == re.findall(r'name == "([a-z-]+)":\n', definitions(script)["make_communicator"])
    assert len(names) == 9
    for name in names:
        assert script.parse_args(["--communicator", name]).communicator == name


# --- what a run leaves ---

# Columns of metrics.csv and the keys that they have in TensorBoard
CHARTS = ("episodic_return", "episodic_length", "episodes", "return_last_100")
LOSSES = (
    "explained_variance",
    "value_loss",
    "policy_loss",
    "entropy",
    "old_approx_kl",
    "approx_kl",
    "clipfrac",
)
METRICS = {name: f"charts/{name}" for name in CHARTS} | {
    name: f"losses/{name}" for name in (*LOSSES, "kl_reference")
}
TASKS = {
    "MiniGrid": ("MiniGrid-Empty-5x5-v0", "MiniGrid-Empty-Random-5x5-v0", "MiniGrid-Empty-5x5-v0"),
    "Atari": (GAME, "ALE/Breakout-v5", GAME),
    "MuJoCo": ("Hopper-v5", "Hopper-v4", "Hopper-v5"),
}
EPISODES = {"MiniGrid": 3, "Atari": 2, "MuJoCo": 3}
NUM_ENVS = {"MiniGrid": 2, "Atari": 1, "MuJoCo": 2}
# Iterations between evaluations; 0 evaluates at the end only
EVAL_EVERY = {"MiniGrid": 4, "Atari": 0, "MuJoCo": 4}
# The highest return of an episode in these runs, the most steps
LARGEST = {"MiniGrid": (1, 100), "Atari": (20, 192), "MuJoCo": (400, 300)}


def short_games():
    """Within this context games end after 60 steps at the latest."""
    games = functools.partial(prpo_atari.AtariVectorEnv, max_num_frames_per_episode=240)
    return mock.patch.object(prpo_atari, "AtariVectorEnv", games)


@pytest.fixture(scope="session")
def finished(once):
    """finished(script): (folder, stdout) of a small run of three agents on two tasks, with
    evaluation.
    """

    def make(script, run_dir):
        output = io.StringIO()
        tasks = TASKS[script.family]
        changes = {
            "communicator": "uniform",
            "eval_episodes": EPISODES[script.family],
            "eval_every": EVAL_EVERY[script.family],
        }
        changes |= {"env_id": tasks[0], "env_ids": tasks}
        changes["num_envs"] = NUM_ENVS[script.family]
        with contextlib.redirect_stdout(output), short_games():
            script.main(tiny(script, run_dir, **changes))
        return output.getvalue()

    def run(script):
        folder, output = once(f"finished_{script}", lambda run_dir: make(script, run_dir))
        return only_run(folder), output

    return run


def test_runs_of_fedavg_have_its_name(whole_run):
    """In the folder's name, in summary.json and in metrics.csv."""
    folder = whole_run(FEDAVG_MINIGRID)
    summary = summary_of(folder)
    assert "__fedavg_ppo__1__" in folder.name
    assert summary["script"] == "fedavg_ppo"
    assert {row["exp_name"] for row in rows_of(folder)} == {"fedavg_ppo"}


@on([PRPO_MINIGRID, SLOW_ATARI, PRPO_MUJOCO])
def test_summary(script, finished):
    """summary.json: settings, versions, speed, bytes, returns and the evaluation matrix."""
    folder, output = finished(script)
    summary = summary_of(folder)
    assert summary["script"] == script.__name__
    assert summary["run"] == folder.name
    assert summary["completed"] is True
    assert summary["seed"] == 1
    assert summary["world_size"] == 1
    assert summary["settings"].keys() == vars(script.Args()).keys()
    assert summary["settings"]["local_updates"] == 3
    assert summary["settings"]["num_agents"] == 3
    of_family = {"MiniGrid": "minigrid", "Atari": "ale-py", "MuJoCo": "mujoco"}[script.family]
    assert {"python", "torch", "numpy", "gymnasium", of_family} <= summary["versions"].keys()
    assert (summary["env_backend"] == "ale-py") == (script.family == "Atari")
    assert summary["versions"]["torch"] == torch.__version__
    assert summary["device"] == "cpu"
    steps = 6 * NUM_ENVS[script.family] * summary["settings"]["num_steps"]
    assert summary["timesteps_per_agent"] == steps
    assert summary["agent_steps_per_second"] == pytest.approx(3 * steps / summary["train_seconds"])
    assert 0 < summary["train_seconds"] < summary["wall_seconds"]
    assert summary["train_seconds"] == pytest.approx(sum(summary["seconds"].values()), rel=0.2)
    assert summary["communication_rounds"] == 2
    # Rounds, listeners, parameters, bytes of float32
    assert summary["communication_bytes"] == 2 * 6 * script.parameters * 4
    assert f"{summary['communication_bytes']:,} bytes sent" in output
    assert str(folder) in output
    python, tool, *words = shlex.split(output.splitlines()[-1].partition("film its agents: ")[2])
    given = communicators.read_flags(play.Args, words)
    assert Path(python).samefile(sys.executable) and Path(tool).samefile(play.__file__)
    assert given == play.Args(run=str(folder), video=str(folder / "videos"))

    returns = summary["training_return"]
    assert returns["group"] == pytest.approx(sum(returns["agents"]) / 3)
    last = [float(row["return_last_100"]) for row in rows_of(folder)[-3:]]
    assert returns["agents"] == pytest.approx(last, rel=1e-5, abs=1e-5)

    evaluation = summary["evaluation"]
    tasks = summary["settings"]["env_ids"]
    episodes = EPISODES[script.family]
    assert evaluation["episodes"] == episodes
    assert len(evaluation["agents"]) == 3
    # Every agent is evaluated on every task
    assert all(row.keys() == set(tasks) for row in evaluation["agents"])
    own_means = [row[task]["mean"] for row, task in zip(evaluation["agents"], tasks, strict=True)]
    assert evaluation["group"] == pytest.approx(sum(own_means) / 3)
    i = 2
    row = evaluation["agents"][i]
    agent = script.new_agent()
    agent.load_state_dict(load_file(folder / f"agent_{i}.safetensors"))
    args = script.Args(**summary["settings"])
    levels = script.list_test_levels(args)
    for test, task in enumerate(script.list_tests(args)):
        seed = script.derive_seed(args.seed, i, test, 4)
        with short_games():
            totals = script.evaluate(args, agent, task, levels, seed)
            greedy = script.evaluate(args, agent, task, levels, 0, greedy=True)
        assert len(totals) == episodes
        assert row[task]["mean"] == pytest.approx(totals.mean())
        half = stats.t.ppf(0.975, episodes - 1) * totals.std(ddof=1) / math.sqrt(episodes)
        assert row[task]["ci95"] == pytest.approx(half)
        assert row[task]["greedy_return"] == pytest.approx(greedy.mean())


@on([PRPO_MINIGRID, PRPO_ATARI, PRPO_MUJOCO])
@pytest.mark.parametrize("greedy", [False, True])
def test_an_agent_whose_policy_overflows_has_no_return(script, greedy):
    """Its parameters are finite."""
    args = script.Args(device="cpu")
    agent = script.make_agents(args)[0]
    for parameter in agent.parameters():
        parameter.data.fill_(3e38)
    returns = script.evaluate(args, agent, args.env_id, [1, 2], 0, greedy)
    assert [math.isnan(number) for number in returns] == [True, True]


@on(
    [
        PRPO_MINIGRID,
        FEDAVG_MINIGRID,
        PRTRPO_MINIGRID,
        PRPO_MUJOCO,
        FEDAVG_MUJOCO,
        SLOW_ATARI,
    ]
)
def test_an_agent_whose_policy_overflows_reports_nothing(script, tmp_path, monkeypatch):
    """Its return would move the weights among the others."""
    load = communicators.load_networks
    make = script.module.make_communicator
    reports = []

    def spoil(*inputs):
        networks = load(*inputs)
        if 2 in networks:
            for parameter in networks[2].parameters():
                parameter.data.fill_(3e38)
        return networks

    def record(args, returns=None, *others):
        if returns is not None:
            reports.append(returns.isnan().tolist())
        return make(args, returns, *others)

    monkeypatch.setattr(communicators, "load_networks", spoil)
    monkeypatch.setattr(script.module, "make_communicator", record)
    train(script, tmp_path, iterations=3, local_updates=3, eval_episodes=0, num_envs=4)
    assert reports[-1] == [False, False, True]


def test_a_full_disk_at_the_last_weights_ends_in_one_line(tmp_path, monkeypatch):
    def fail(*_):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(communicators, "save_file", fail)
    args = tiny(PRPO_MINIGRID, tmp_path, iterations=2, eval_episodes=0)
    message = refusal(PRPO_MINIGRID.main, args, code=1)
    expected = "No space left on device; what was saved before is kept, go on with --resume"
    assert message == f"{only_run(tmp_path)}: {expected}"


@on([PRPO_MINIGRID, SLOW_ATARI, PRPO_MUJOCO])
def test_evaluations_table(script, finished):
    """evaluations.csv and TensorBoard: every agent on every task at each --eval-every.

    The evaluation at the end is that of summary.json.
    """
    folder, _ = finished(script)
    rows = table_of(folder, "evaluations")
    summary = summary_of(folder)
    tasks = list(dict.fromkeys(TASKS[script.family]))
    batch_size = NUM_ENVS[script.family] * summary["settings"]["num_steps"]
    measures = ["mean_return", "ci95", "greedy_return"]
    assert list(rows[0]) == ["iteration", "agent", "task", "timesteps", "episodes", *measures]
    iterations = ["4", "6"] if EVAL_EVERY[script.family] else ["6"]
    assert [(row["iteration"], row["agent"], row["task"]) for row in rows] == list(
        itertools.product(iterations, ["0", "1", "2"], tasks)
    )
    for row in rows:
        assert int(row["timesteps"]) == int(row["iteration"]) * batch_size
        assert int(row["episodes"]) == EPISODES[script.family]
    for row in rows[-6:]:
        of_summary = summary["evaluation"]["agents"][int(row["agent"])][row["task"]]
        expected = [of_summary[name] for name in ("mean", "ci95", "greedy_return")]
        shown = [float(row[measure]) for measure in measures]
        assert shown == pytest.approx(expected, rel=1e-5, abs=1e-5)
    scalars = scalars_of(folder)
    for i in range(3):
        for task in tasks:
            own_rows = [row for row in rows if (row["agent"], row["task"]) == (str(i), task)]
            points = scalars[f"eval/{task}/agent_{i}"]
            assert [step for step, _ in points] == [int(row["timesteps"]) for row in own_rows]
            means = [float(row["mean_return"]) for row in own_rows]
            values = [value for _, value in points]
            assert values == pytest.approx(means, rel=1e-5, abs=1e-5)


@on([*SCRIPTS, PRTRPO_MINIGRID, DISTRAL_MINIGRID, FEDAVG_ATARI, FEDAVG_MUJOCO])
def test_the_mean_return_is_of_the_last_100_episodes(script, tmp_path, monkeypatch):
    """Of 60 that have paid nothing and then 60 that have paid 1."""
    rollout = script.module.rollout
    rollouts = []

    def pay(*inputs):
        rollouts.append(rollout(*inputs))
        episode = float(len(rollouts) - 1), 5
        return [(data, [episode] * 60) for data, _ in rollouts[-1]]

    monkeypatch.setattr(script.module, "rollout", pay)
    rows = rows_of(train(script, tmp_path, iterations=2, num_agents=1, eval_episodes=0))
    assert [float(row["return_last_100"]) for row in rows] == pytest.approx([0.0, 0.6])


@on([PRPO_MINIGRID, SLOW_ATARI, PRPO_MUJOCO])
def test_metrics_table(script, finished):
    """metrics.csv: one row per iteration and agent, whose numbers fit together."""
    folder, _ = finished(script)
    rows = table_of(folder, "metrics")
    columns = ["iteration", "agent", "env_id", "timesteps", "seed", "exp_name", *METRICS]
    columns += [
        "learning_rate",
        "kl_coefficient",
        "rounds",
        "dropped",
        "communication_bytes",
        "agent_steps_per_second",
    ]
    assert list(rows[0]) == columns
    assert [(row["iteration"], row["agent"]) for row in rows] == [
        (str(k), str(i)) for k in range(1, 7) for i in range(3)
    ]
    seen = [[] for _ in range(3)]
    for row in rows:
        number = {name: float(value) for name, value in row.items() if name not in WORDS}
        assert row["exp_name"] == script.__name__
        assert row["seed"] == "1"
        assert row["env_id"] == TASKS[script.family][int(row["agent"])]
        batch_size = NUM_ENVS[script.family] * script.tiny["num_steps"]
        assert number["timesteps"] == batch_size * number["iteration"]
        rounds = number["iteration"] // 3
        assert number["communication_bytes"] == 6 * script.parameters * 4 * rounds
        assert number["dropped"] == 0
        most = math.log(script.num_actions)
        if script.family == "MuJoCo":
            most = 1.02 * script.num_actions * math.log(2 * math.pi * math.e) / 2
        assert 0 < number["entropy"] <= most + 1e-6
        assert number["value_loss"] >= 0
        assert number["approx_kl"] >= -1e-6
        assert number["kl_reference"] >= -1e-6
        assert 0 <= number["clipfrac"] <= 1
        assert number["explained_variance"] <= 1
        assert number["agent_steps_per_second"] > 0
        if number["episodes"]:
            best, longest = LARGEST[script.family]
            assert 0 <= number["episodic_return"] <= best
            assert 1 <= number["episodic_length"] <= longest
            seen[int(row["agent"])].append((number["episodes"], number["episodic_return"]))
            total = sum(count * mean for count, mean in seen[int(row["agent"])])
            episodes = sum(count for count, _ in seen[int(row["agent"])])
            # There are not yet a hundred episodes
            assert number["return_last_100"] == pytest.approx(total / episodes, abs=1e-4)
        else:
            assert math.isnan(number["episodic_return"])
            assert math.isnan(number["episodic_length"])
    assert sum(map(len, seen)) > 3 * NUM_ENVS[script.family]


@on([PRPO_MINIGRID, SLOW_ATARI, PRPO_MUJOCO])
def test_tensorboard(script, finished):
    """CleanRL's keys for the group and per agent, entries of C, distances, rounds and bytes.

    The numbers are those of metrics.csv.
    """
    folder, _ = finished(script)
    scalars = scalars_of(folder)
    rows = rows_of(folder)
    pairs = [(i, j) for i in range(3) for j in range(3)]
    expected = {f"communicator/c_{i}_{j}" for i, j in pairs}
    expected |= {f"distances/agent_{i}_agent_{j}" for i, j in pairs if i < j}
    expected |= {f"{tag}/agent_{i}" for tag in METRICS.values() for i in range(3)}
    expected |= set(METRICS.values())
    expected |= {"charts/SPS", "charts/learning_rate", "charts/kl_coefficient"}
    expected |= {"communication/rounds", "communication/dropped", "communication/bytes"}
    assert expected <= scalars.keys()
    for i, j in pairs:  # C is the identity before the first round
        entries = [value for _, value in scalars[f"communicator/c_{i}_{j}"]]
        assert entries == pytest.approx([float(i == j)] * 2 + [1 / 3] * 4)
    assert [value for _, value in scalars["communication/rounds"]] == [0, 0, 1, 1, 1, 2]
    sent = [float(row["communication_bytes"]) for row in rows[::3]]
    assert [value for _, value in scalars["communication/bytes"]] == sent
    # Annealed linearly, to 0 after the end
    rates = [script.tiny["learning_rate"] * (1 - k / 6) for k in range(6)]
    assert [value for _, value in scalars["charts/learning_rate"]] == pytest.approx(rates)
    for column, tag in METRICS.items():
        for i in range(3):
            points = [
                (int(row["timesteps"]), float(row[column]))
                for row in rows[i::3]
                if row[column] != "nan"
            ]
            logged = scalars.get(f"{tag}/agent_{i}", [])
            assert [step for step, _ in logged] == [step for step, _ in points]
            values = [value for _, value in points]
            assert [value for _, value in logged] == pytest.approx(values, rel=1e-4, abs=1e-6)
    for tag in ("distances/agent_0_agent_1", "distances/agent_1_agent_2"):
        # Distances are known since the first round
        batch_size = NUM_ENVS[script.family] * script.tiny["num_steps"]
        steps = [k * batch_size for k in range(3, 7)]
        assert [step for step, _ in scalars[tag]] == steps
        assert all(0 < value < 1 for _, value in scalars[tag])


@on([PRPO_MINIGRID, SLOW_ATARI, PRPO_MUJOCO])
def test_a_run_leaves_no_litter(script, finished):
    """The folder is named as CleanRL does, and holds what is documented."""
    folder, _ = finished(script)
    tasks = "\\+".join(dict.fromkeys(TASKS[script.family])).replace("/", "-")
    assert re.fullmatch(rf"{tasks}__{script.__name__}__1__\d+", folder.name)
    names = {
        re.sub(r"\d+", "N", path.name) for path in folder.iterdir() if "tfevents" not in path.name
    }
    assert names == {
        "agent_N.safetensors",
        "checkpoints",
        "lock",
        "config.json",
        "summary.json",
    } | {f"{name}.csv" for name in ("metrics", "communicator", "evaluations")}
    assert not list(folder.rglob("*.tmp"))
    for path in folder.glob("checkpoints/agent_*/*.pt"):
        torch.load(path, weights_only=True)  # nothing in it needs unpickling


@pytest.mark.slow
@on_minigrid
def test_wandb_offline(script, tmp_path):
    """--track works without a network: an offline run of the run's name, with the same charts."""
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
    assert all(
        tag.encode() in log.read_bytes() for tag in ("charts/episodic_return", "losses/policy_loss")
    )


# --- the scripts agree ---

# What depends on the family of environments
OF_FAMILY = {
    "Agent",
    "Envs",
    "check_envs",
    "choose_backend",
    "collect_public_states",
    "evaluate",
    "make_agents",
    "name_tasks",
    "rollout",
}
# What may differ between definitions of the same name: only lines that contain one of these words
FAMILIES = {
    "TaskArgs": (
        "The flags of every script on",
        "device",
        "cpu, cuda",
        "env_id",
        "Gymnasium has it",
        "write one of your own",
        "wrappers",
        "either way",
        "per agent",
        "gymnasium",
        "envpool",
        "hidden",
        "proportion (default: 128",
        "sticky_actions",
        "probability 0.25",
        "full_action_space",
        "of the console",
        "of all layers but the heads",
        "a processor that has it",
        "precision:",
        "compile:",
        "save_every",
        "iterations between checkpoints",
        "the same run",
        "eval_episodes",
        "that every agent is evaluated on",
        "total_timesteps",
    ),
    "Args": ("kl_direction:", "kl_coef:", "learning_rate:", "local_updates"),
    "LONGEST_EPISODE": ("LONGEST_EPISODE",),
    "check_task": (
        "What types cannot express of the flags",
        "precision",
        "bfloat16",
        "args.device",
        "num_steps <",
        "only start",
        "hidden_sizes",
    ),
    # MiniGrid's observations repeat
    "update": ("agent(batch[", "distinct", "unique(", "index_select", "newlogprobs = logits"),
    # Atari plays all agents together
    "main": ("compile", "for agent in agents:", "tables", "actors"),
}
# Of these the lines that differ stand in ON_MUJOCO
OF_GAUSSIANS = {"compute_reference", "estimate_gains", "main", "update"}
GAUSSIANS = {
    "TaskArgs": (
        "The flags of every script on",
        "cpu, cuda",
        "env_id: ",
        "that every agent is evaluated on",
        "hidden layer",
        "proportion (default: 128",
        "# for all)",
        "eval_episodes",
        "episodes per agent and task",
        "total_timesteps",
    ),
    "Args": (
        "kl_direction:",
        "kl_coef:",
        "# samples of the policy",
        "kl_samples:",
        "learning_rate:",
        "update_epochs:",
        "num_minibatches:",
        "clip_coef:",
        "ent_coef:",
        "local_updates",
    ),
    "make_batch": ("Returns", "batch", "obs_inds", "names"),
    "make_communicator": (
        "log_probs",
        "policies",
        "deviations on the public states",
        "gains [agents, agents]",
        "Another communicator is",
    ),
    "LONGEST_EPISODE": ("LONGEST_EPISODE",),
    "CustomTask": ("def step(",),
    "make_env": (
        '"""',
        "evaluation plays",
        "of your own",
        "import_mujoco",
        "return",
        "Its own",
        "BabyAI",
        "QuietTask",
    ),
    "evaluate_agents": ("Sampled actions", "levels."),
    "check_task": ("What types cannot express of the flags", "hidden_sizes"),
    "find_env_problem": (
        "obs",
        "problem",
        'return ""',
        "space",
        "bounds",
        "dtype",
        "shape",
        "valid",
        "Discrete",
        "no actions",
        "env.step",
    ),
}
# Lines of PR-PPO's that are its own, and those of PR-TRPO
TRUST_REGION = {
    "Args": (
        "kl_",
        "KL",
        "epsilon",
        "delta",
        "instead: the largest",
        "update's epsilon",
        "falls to 0",
        "epochs",
        "minibatch",
        "over the rollout",
        "in each state a peer counts",
        "norm",
        "clip_",
        "_coef",
        "cg_iters",
        "damping",
        "backtrack",
        "length of each",
        "# Update",
        "local_updates",
        "between communication rounds",
    ),
    "main": (
        "Agent(",
        "optimizers = ",
        "Adam(",
        "variations",
        "# Of each agent's last update",
        "compute_radius",
        "kl_",
        "group",
        '"identity":',
        "update(",
        "# What the next",
        "within",
        "losses",
        "step",
        "trust_region/",
        "deepcopy(first[i])",
        "make_agents(args)",
        "together",
        "args.delta",
        "make_exchange(",
        "flatten(agent",
        "choose_sent(",
    ),
    "update": (
        "kl_coef",
        "epsilon",
        "->",
        '"""',
        "batch: ",
        "[states, actions]",
        "step",
        "agent.baseline",
        "parameters",
        "value",
        "v_",
        "losses",
        "loss.backward",
        "loss.isfinite",
    ),
}


def definitions(script):
    """name -> source of every function, class and table at the top level of a script."""
    text = Path(script.__file__).read_text()
    nodes = [
        node
        for node in ast.parse(text).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Assign))
    ]
    names = [getattr(node, "name", None) or ast.unparse(node.targets[0]) for node in nodes]
    lines = text.splitlines()
    return {
        name: "\n".join(lines[node.lineno - 1 : node.end_lineno])
        for name, node in zip(names, nodes, strict=True)
    }


def assert_same_definitions(ours, theirs, may_differ, apart=()):
    """What both define is equal line by line, in the same order, but for `apart` and some lines."""
    common = [name for name in ours if name in theirs and name not in apart]
    assert common == [name for name in theirs if name in ours and name not in apart]
    for name in common:
        for line in difflib.ndiff(ours[name].splitlines(), theirs[name].splitlines()):
            if line[0] in "+-" and line[1:].strip():
                allowed = any(word in line for word in may_differ.get(name, ()))
                assert allowed, f"{name}: {line}"
    return set(common)


def imports(script):
    """The modules that a script imports at its top."""
    nodes = [
        node for node in ast.parse(Path(script.__file__).read_text()).body if hasattr(node, "names")
    ]
    return {getattr(node, "module", None) or alias.name for node in nodes for alias in node.names}


def test_what_has_the_same_name_is_the_same():
    """Functions and classes of the scripts are equal line by line, but for a few named lines.

    Environments, network, rollout, evaluation and public states depend on the family. The main
    programs take the same steps in the same order.
    """
    scripts = PRPO_MINIGRID, PRPO_ATARI, PRTRPO_MINIGRID, PRPO_MUJOCO
    minigrid, atari, trpo, mujoco = map(definitions, scripts)
    same = assert_same_definitions(minigrid, atari, FAMILIES, apart=OF_FAMILY)
    assert same >= {
        "Args",
        "TaskArgs",
        "check_args",
        "check_task",
        "compute_advantages",
        "compute_reference",
        "estimate_gains",
        "evaluate_agents",
        "layer_init",
        "list_env_ids",
        "list_test_levels",
        "list_tests",
        "main",
        "make_batch",
        "make_communicator",
        "update",
    }
    apart = {"check_args", "Agent", "make_agents", "update"}
    assert_same_definitions(minigrid, trpo, TRUST_REGION, apart=apart)
    # PR-TRPO's fit of the value function has the steps of PR-PPO's update, in their order
    lines = []
    for line in difflib.ndiff(minigrid["update"].splitlines(), trpo["update"].splitlines()):
        if line[0] == "+" and line[1:].strip():
            assert any(word in line for word in TRUST_REGION["update"]), line
        lines.append(line[0])
    assert lines.count(" ") > 20
    # Gaussians are mixed, sampled and compared in other words, their Adam has other settings
    same = assert_same_definitions(minigrid, mujoco, GAUSSIANS, apart=OF_FAMILY | OF_GAUSSIANS)
    assert same >= {
        "check_args",
        "check_task",
        "compute_advantages",
        "evaluate_agents",
        "layer_init",
        "list_env_ids",
        "list_test_levels",
        "list_tests",
        "make_communicator",
    }
    assert ON_MUJOCO.keys() == OF_GAUSSIANS
    for name, lines in ON_MUJOCO.items():
        assert list_differences(minigrid[name], mujoco[name]) == lines.strip().splitlines(), name
    assert minigrid.keys() & mujoco.keys() >= OF_FAMILY
    # Rollouts return the same, which is made in the same order
    names = [re.findall(r'^ +"(\w+)": ', source["rollout"], re.M) for source in (minigrid, atari)]
    assert names[0] == names[1]
    assert len(names[0]) == 12
    assert minigrid.keys() & atari.keys() >= OF_FAMILY
    for name in OF_FAMILY - {"Agent", "rollout"}:  # both are called alike
        signatures = []
        for script in PRPO:
            parameters = inspect.signature(getattr(script.module, name)).parameters
            signatures.append([parameter for parameter in parameters if parameter != "num_steps"])
        assert signatures[0] == signatures[1] == signatures[2], name

    steps = []
    fedavg = map(definitions, (FEDAVG_MINIGRID, FEDAVG_ATARI, FEDAVG_MUJOCO))
    for source in (minigrid, atari, trpo, mujoco, *fedavg):
        steps.append(re.findall(r"^ {8,12}# ([A-Z][A-Za-z]+)", source["main"], re.MULTILINE))
    assert steps[0] == [
        "Rollout",
        "Advantages",
        "Reference",
        "Update",
        "Metrics",
        "Communication",
        "Policies",
        "The",
        "Rows",
        "Who",
        "Evaluation",
        "Checkpoint",
    ]
    assert steps[1] == steps[0]
    distral = re.findall(r"^ {8,12}# ([A-Z][A-Za-z]+)", definitions(DISTRAL_MINIGRID)["main"], re.M)
    assert distral == ["Rollout", "Distillation", "Communication", *steps[0][1:5], *steps[0][-2:]]
    assert [step for step in steps[2] if step != "What"] == steps[0]
    assert steps[3] == steps[0]
    for of_fedavg in steps[4:]:
        assert of_fedavg == [*steps[0][:-2], "FedAvg", *steps[0][-2:]]


def list_differences(ours, theirs):
    """The lines that differ, in their order, as "- ours" and "+ theirs", without indentation."""
    lines = [*difflib.unified_diff(ours.splitlines(), theirs.splitlines(), n=0, lineterm="")]
    kept = [line for line in lines[2:] if line[0] in "+-" and line[1:].strip()]
    return [f"{line[0]} {line[1:].strip()}" for line in kept]


# PR-PPO with Gaussians in the place of categories: the lines that differ, without indentation
ON_MUJOCO = {
    "compute_reference": """
- i: int, batch: dict[str, Tensor], peers: dict[int, Agent], C: Tensor, args: Args
- ) -> tuple[Tensor, Tensor]:
+ i: int, agent: Agent, batch: dict[str, Tensor], peers: dict[int, Agent], C: Tensor, args: Args
+ ) -> tuple[communicators.Gaussians, Tensor]:
- present policy is its part. Returns log-probabilities [states, actions], frozen for the update,
- and the senders' weights: [senders], with --gate [senders, states].
+ present policy is its part. Each normalises the listener's observations by its own statistics.
+ Returns a mixture of Gaussians in each sample, frozen for the update, and the senders' weights:
+ [senders], with --gate [senders, samples].
- policies = []
+ means = []
+ log_stds = []
- policies.append(batch["policy"])
- values.append(batch["state_values"])
+ means.append(batch["policy"])
+ log_stds.append(agent.actor_log_std.detach().clone())
+ values.append(batch["values"] * agent.value_scale)
- logits, value = peers[j].predict(batch["obs"])
- policies.append(logits.log_softmax(-1))
- values.append(value)
- # A log-probability of -1e38 is finite, the gradient towards it is not
- policies = torch.stack(policies).clamp(min=communicators.LOWEST_LOG_PROB)
- # The agent's own policy is the reference where no sender's is a number
- unknown = policies[..., 0].isnan()
- policies = torch.where(unknown.all(0)[:, None], batch["policy"], policies)
- weights = C[i, senders].to(policies.device)
+ mean_action, value = peers[j].predict(batch["obs"])
+ means.append(mean_action)
+ log_stds.append(peers[j].actor_log_std)
+ values.append(value * peers[j].value_scale)
+ means = torch.stack(means)
+ log_stds = torch.stack(log_stds)[:, None].expand_as(means)
+ # The agent's own policy is the reference where no sender's is bounded
+ unknown = ~communicators.are_bounded(means, log_stds)
+ nobody = unknown.all(0)[:, None]
+ means = torch.where(nobody, batch["policy"], means)
+ log_stds = torch.where(nobody, agent.actor_log_std.detach(), log_stds)
+ weights = C[i, senders].to(means.device)
- # A policy that is NaN in a state has no vote in any, whatever its critic promises
+ # A policy that is unbounded in a state has no vote in any, whatever its critic promises
- visited = batch["obs_inds"]
- weights = communicators.gate_by_value(weights, values, batch["returns"], visited)
- return communicators.mix_log_probs(policies, weights, args.mixture), weights
+ returns = batch["returns"] * agent.value_scale
+ weights = communicators.gate_by_value(weights, values, returns)
+ reference = communicators.mix_gaussians(means, log_stds, weights, args.mixture)
+ if args.kl_direction == "forward":  # reads no more of the mixture
+ reference = communicators.match_moments(reference)
+ return reference, weights
""",
    "estimate_gains": """
- logits, _ = peer.predict(batch["obs"])
- log_probs = logits.log_softmax(-1)[batch["obs_inds"], batch["actions"]]  # [samples]
+ mean_action, _ = peer.predict(batch["obs"])
+ log_std = peer.actor_log_std
+ log_probs = communicators.gaussian_log_prob(batch["actions"], mean_action, log_std)
""",
    "update": """
- batch: of `make_batch`, and the reference policy's log-probabilities, `reference`
- [states, actions].
+ batch: of `make_batch`, and the reference policy of each sample, `reference`.
- b_inds = torch.randperm(len(batch["obs_inds"]), generator=generator)
+ b_inds = torch.randperm(len(batch["obs"]), generator=generator)
- # Each distinct observation is evaluated once; loss and gradient stay the same
- states, inverse = batch["obs_inds"][mb_inds].unique(return_inverse=True)
- logits, value = agent(batch["obs"][states])
- newlogprobs = logits.log_softmax(-1).index_select(0, inverse)  # [minibatch, actions]
- newvalue = value.index_select(0, inverse)
- newlogprob = newlogprobs.gather(-1, batch["actions"][mb_inds, None]).squeeze(-1)
+ new_mean, newvalue = agent(batch["obs"][mb_inds])
+ log_std = agent.actor_log_std
+ mb_actions = batch["actions"][mb_inds]
+ newlogprob = communicators.gaussian_log_prob(mb_actions, new_mean, log_std)
- entropy = -(newlogprobs.exp() * newlogprobs).sum(-1).mean()
+ entropy = communicators.gaussian_entropy(log_std)
- # Distance to the reference policy, exact over the action set: the peers' influence
- reference = batch["reference"][batch["obs_inds"][mb_inds]]
- kl_reference = communicators.kl_to_reference(newlogprobs, reference, args.kl_direction)
+ # Distance to the reference policy: the peers' influence
+ reference = batch["reference"].take(mb_inds)
+ noise = None
+ if args.kl_direction == "reverse" and len(reference.weights) > 1:
+ shape = args.kl_samples, *new_mean.shape
+ noise = torch.randn(shape, generator=generator).to(new_mean.device)
+ kl_reference = communicators.kl_to_gaussians(
+ new_mean, log_std, reference, args.kl_direction, noise
+ )
""",
    "main": """
+ # Rewards are scaled by the deviation of the discounted returns of each agent
+ return_statistics = [torch.zeros(3, dtype=torch.double) for _ in held]
+ "return_statistics": return_statistics,
- tables = [PolicyTable(agent) for agent in agents]
+ actors = Actors(agents)
- rollouts = rollout(args, tables, envs, generators)
+ rollouts = rollout(args, actors, envs, generators)
+ value_scale = scale_rewards(data, return_statistics[k])
+ if args.gate == "value":  # critics are compared in rewards of the task
+ agents[k].value_scale.fill_(value_scale)
- batch["reference"], weights = compute_reference(i, batch, peers, C, args)
+ batch["reference"], weights = compute_reference(i, agents[k], batch, peers, C, args)
+ agents[k].update_statistics(batch["obs"])  # frozen until now
- row |= communicators.summarize_gate(C[i] > 0, weights[:, batch["obs_inds"]])
+ row |= communicators.summarize_gate(C[i] > 0, weights)
- log_probs = compute_public_log_probs(networks, public_states, n, num_actions)
- usable = log_probs.flatten(1).isfinite().all(1)
+ policies = compute_public_policies(networks, public_states, n, num_actions)
+ usable = policies.flatten(1).isfinite().all(1)
- new_C = make_communicator(args, reported_returns, log_probs, gains, usable)
- new_distances = communicators.measure_distances(log_probs, compared, held)
+ new_C = make_communicator(args, reported_returns, policies, gains, usable)
+ new_distances = communicators.measure_gaussians(policies, compared, held)
- if inputs & {"log_probs", "gains"}:
+ if inputs & {"policies", "gains"}:
- tables = [PolicyTable(agent) for agent in agents]
""",
}
# What FedAvg has in place of PR-PPO's reference: the lines that differ, without indentation
ARGS = '''
- # Reference policy
- # an agent's own component of its reference: its policy before this update, or its snapshot of
- # the last round
- self_reference: Literal["behaviour", "snapshot"] = "behaviour"
- mixture: Literal["arithmetic", "geometric"] = "arithmetic"
- """how the reference mixes the agents' distributions"""
- gate: Literal["none", "value"] = "none"
- """value: in each state a peer counts by what its critic expects there"""
+ # Distance to the policy before the update
- """forward: KL(reference || policy), eq. 4; reverse: KL(policy || reference), mirror descent"""
+ """forward: KL(old policy || policy); reverse: KL(policy || old policy)"""
- """coefficient of the KL penalty towards the reference (without peers: the old policy)"""
+ """coefficient of the KL penalty towards the policy before the update"""
'''
SERVER_STEP = """
+ # share of the way from what agents had after the last round to the average: 1 is FedAvg,
+ # others are FedOpt with SGD
+ server_lr: Positive = 1.0
"""
RELATIVES = '''
+ private_heads: tuple[Literal["actor", "critic"], ...] = ()
+ """heads that are not averaged, but sent (actor critic: FedPer)"""
+ # above 0 the average replaces nothing, but pulls: coefficient of half the squared distance to
+ # it in the loss
+ prox_coef: NonNegative = 0.0
'''
UPDATE = '''
+ anchor: Tensor | None,
- """PPO's epochs over an agent's rollout, with the KL penalty of eq. 4. Returns mean losses.
+ """PPO's epochs over an agent's rollout, with the KL penalty of eq. 3. Returns mean losses.
- [states, actions].
+ [states, actions]; anchor: the average of parameters that --prox-coef pulls towards [numel],
+ None if the agent listens to nobody else.
- # Distance to the reference policy, exact over the action set: the peers' influence
+ # Distance to the reference policy, exact over the action set: the one before the update
+ # Distance to the average of parameters (proximal); buffers have no gradient
+ if args.prox_coef:
+ proximal_loss = torch.zeros_like(pg_loss)
+ if anchor is not None:
+ values = agent.state_dict(keep_vars=True).values()
+ theta = torch.cat([parameter.flatten() for parameter in values])
+ proximal_loss = 0.5 * (theta - anchor).square().sum()
+ loss = loss + args.prox_coef * proximal_loss
+ if args.prox_coef:
+ losses[-1]["losses/proximal_loss"] = proximal_loss.item()
'''
LOOP = """
- exchange = communicators.make_exchange(args)
+ exchange = communicators.make_exchange(args, averages="pull" if args.prox_coef else "replace")
+ begin = [communicators.flatten(agent) for agent in agents]  # what the last round left them
+ if args.server_lr != 1:
+ state["begin"] = begin
- senders = communicators.find_senders(C, held)
- peers = communicators.load_networks(exchange.recall(sent, sizes), first, senders)
+ received = exchange.recall(sent, sizes)
+ averages = [compute_average(i, received, C) for i in held]
- for k, i in enumerate(held):
+ for k in range(len(held)):
- # Reference policy, frozen for this update: row i of C applied to the policies
- batch["reference"], weights = compute_reference(i, batch, peers, C, args)
+ # Reference policy, frozen for this update: its own (eq. 3)
+ batch["reference"] = batch["policy"]
- losses = update(agents[k], optimizers[k], generators[k], batch, kl_coef, args)
+ anchor = averages[k]
+ losses = update(agents[k], optimizers[k], generators[k], batch, kl_coef, args, anchor)
- if args.gate != "none":
- row |= communicators.summarize_gate(C[i] > 0, weights[:, batch["obs_inds"]])
- senders = communicators.find_senders(C, held)
- peers = {j: networks[j] for j in senders if j in networks}
+ # FedAvg: agents go on from the average of what they received, with their optimizers
+ averages = [compute_average(i, received, C) for i in held]
+ for k, average in enumerate(averages):
+ if average is not None and not args.prox_coef:
+ new = communicators.take_server_step(begin[k], average, args.server_lr)
+ replace_parameters(agents[k], new, args.private_heads)
+ begin[:] = [communicators.flatten(agent) for agent in agents]
"""
LOOP_ON_ATARI = """
- exchange = communicators.make_exchange(args)
+ exchange = communicators.make_exchange(args, averages="replace")
- sent = [communicators.flatten(agent) for agent in agents]
+ begin = [communicators.flatten(agent) for agent in agents]  # what the last round left them
- "sent": sent,
+ if args.server_lr != 1:
+ state["begin"] = begin
- senders = communicators.find_senders(C, held)
- peers = communicators.load_networks(exchange.recall(sent, sizes), first, senders)
- for k, i in enumerate(held):
+ for k in range(len(held)):
- # Reference policy, frozen for this update: row i of C applied to the policies
- batch["reference"], weights = compute_reference(i, batch, peers, C, args)
+ # Reference policy, frozen for this update: its own (eq. 3)
+ batch["reference"] = batch["policy"]
- if args.gate != "none":
- row |= communicators.summarize_gate(C[i] > 0, weights[:, batch["obs_inds"]])
- sent[:] = [communicators.flatten(agent) for agent in agents]
+ sent = [communicators.flatten(agent) for agent in agents]
- senders = communicators.find_senders(C, held)
- peers = {j: networks[j] for j in senders if j in networks}
+ # FedAvg: agents go on from the average of what they received, with their optimizers
+ for k, i in enumerate(held):
+ average = compute_average(i, received, C)
+ if average is not None:
+ new = communicators.take_server_step(begin[k], average, args.server_lr)
+ communicators.unflatten(new, agents[k])
+ begin[:] = [communicators.flatten(agent) for agent in agents]
"""
LOOP_OF_FAMILIES = """
- exchange = communicators.make_exchange(args, averages="pull" if args.prox_coef else "replace")
+ exchange = communicators.make_exchange(args, averages="replace")
+ if args.compile:
+ for agent in agents:
+ agent.compile()
- sent = [communicators.flatten(agent) for agent in agents]
- "sent": sent,
- received = exchange.recall(sent, sizes)
- averages = [compute_average(i, received, C) for i in held]
- tables = [PolicyTable(agent) for agent in agents]
+ actors = Actors(args, agents)
- rollouts = rollout(args, tables, envs, generators)
+ rollouts = rollout(args, actors, envs, generators)
- anchor = averages[k]
- losses = update(agents[k], optimizers[k], generators[k], batch, kl_coef, args, anchor)
+ losses = update(agents[k], optimizers[k], generators[k], batch, kl_coef, args)
- sent[:] = [communicators.flatten(agent) for agent in agents]
+ sent = [communicators.flatten(agent) for agent in agents]
- averages = [compute_average(i, received, C) for i in held]
- for k, average in enumerate(averages):
- if average is not None and not args.prox_coef:
+ for k, i in enumerate(held):
+ average = compute_average(i, received, C)
+ if average is not None:
- replace_parameters(agents[k], new, args.private_heads)
+ communicators.unflatten(new, agents[k])
- tables = [PolicyTable(agent) for agent in agents]
"""
HEADS = """
+ # heads that are not averaged, but sent: the last layers, the actor's with its standard
+ # deviations (actor critic: FedPer)
+ private_heads: tuple[Literal["actor", "critic"], ...] = ()
"""
SAMPLES = """
- # samples of the policy in each state that estimate the reverse KL to an arithmetic mixture
- kl_samples: Count = 4
"""
ARGS_ON_MUJOCO = ARGS + SAMPLES + SERVER_STEP + HEADS
LOOP_ON_MUJOCO = """
- exchange = communicators.make_exchange(args)
+ exchange = communicators.make_exchange(args, averages="replace")
- sent = [communicators.flatten(agent) for agent in agents]
+ begin = [communicators.flatten(agent) for agent in agents]  # what the last round left them
- "sent": sent,
+ if args.server_lr != 1:
+ state["begin"] = begin
- senders = communicators.find_senders(C, held)
- peers = communicators.load_networks(exchange.recall(sent, sizes), first, senders)
- for k, i in enumerate(held):
+ for k in range(len(held)):
- value_scale = scale_rewards(data, return_statistics[k])
- if args.gate == "value":  # critics are compared in rewards of the task
- agents[k].value_scale.fill_(value_scale)
+ scale_rewards(data, return_statistics[k])
- # Reference policy, frozen for this update: row i of C applied to the policies
- batch["reference"], weights = compute_reference(i, agents[k], batch, peers, C, args)
+ # Reference policy, frozen for this update: its own (eq. 3)
+ means = batch["policy"][None]
+ log_stds = agents[k].actor_log_std.detach().expand_as(means)
+ batch["reference"] = communicators.mix_gaussians(means, log_stds, torch.ones(1))
- if args.gate != "none":
- row |= communicators.summarize_gate(C[i] > 0, weights)
- sent[:] = [communicators.flatten(agent) for agent in agents]
+ sent = [communicators.flatten(agent) for agent in agents]
- senders = communicators.find_senders(C, held)
- peers = {j: networks[j] for j in senders if j in networks}
+ # FedAvg: agents go on from the average of what they received, with their optimizers
+ for k, i in enumerate(held):
+ average = compute_average(i, received, C)
+ if average is not None:
+ new = communicators.take_server_step(begin[k], average, args.server_lr)
+ replace_parameters(agents[k], new, args.private_heads)
+ agents[k].set_statistics(*average_statistics(i, networks, C))
+ begin[:] = [communicators.flatten(agent) for agent in agents]
"""
LOOP_OF_GAUSSIANS = """
- if args.compile:
- for agent in agents:
- agent.compile()
+ # Rewards are scaled by the deviation of the discounted returns of each agent
+ return_statistics = [torch.zeros(3, dtype=torch.double) for _ in held]
+ "return_statistics": return_statistics,
- actors = Actors(args, agents)
+ actors = Actors(agents)
+ scale_rewards(data, return_statistics[k])
- batch["reference"] = batch["policy"]
+ means = batch["policy"][None]
+ log_stds = agents[k].actor_log_std.detach().expand_as(means)
+ batch["reference"] = communicators.mix_gaussians(means, log_stds, torch.ones(1))
+ agents[k].update_statistics(batch["obs"])  # frozen until now
- log_probs = compute_public_log_probs(networks, public_states, n, num_actions)
- usable = log_probs.flatten(1).isfinite().all(1)
+ policies = compute_public_policies(networks, public_states, n, num_actions)
+ usable = policies.flatten(1).isfinite().all(1)
- new_C = make_communicator(args, reported_returns, log_probs, gains, usable)
- new_distances = communicators.measure_distances(log_probs, compared, held)
+ new_C = make_communicator(args, reported_returns, policies, gains, usable)
+ new_distances = communicators.measure_gaussians(policies, compared, held)
- if inputs & {"log_probs", "gains"}:
+ if inputs & {"policies", "gains"}:
- communicators.unflatten(new, agents[k])
+ replace_parameters(agents[k], new, args.private_heads)
+ agents[k].set_statistics(*average_statistics(i, networks, C))
"""
DIFFERENCES = {
    (FEDAVG_MINIGRID, PRPO_MINIGRID): {
        "Args": ARGS + SERVER_STEP + RELATIVES,
        "update": UPDATE,
        "main": LOOP,
    },
    (FEDAVG_ATARI, PRPO_ATARI): {"Args": ARGS + SERVER_STEP, "main": LOOP_ON_ATARI},
    (FEDAVG_ATARI, FEDAVG_MINIGRID): {"compute_average": "", "main": LOOP_OF_FAMILIES},
    (FEDAVG_MUJOCO, PRPO_MUJOCO): {"Args": ARGS_ON_MUJOCO, "main": LOOP_ON_MUJOCO},
    (FEDAVG_MUJOCO, FEDAVG_ATARI): {"compute_average": "", "main": LOOP_OF_GAUSSIANS},
}


@pytest.mark.parametrize(("script", "other"), DIFFERENCES, ids=str)
def test_fedavg_is_pr_ppo_with_averages(script, other):
    """What has the same name differs in these lines only.

    But for `check_args`, and the defaults of the two families.
    """
    expected = DIFFERENCES[script, other]
    theirs = definitions(script)
    ours = definitions(other)
    apart = {"check_args"} if "Args" in expected else {"check_args", "Args"}
    common = [name for name in ours if name in theirs and name not in apart]
    assert common == [name for name in theirs if name in ours and name not in apart]
    assert expected.keys() <= set(common)
    for name in common:
        lines = [line for line in expected.get(name, "").splitlines() if line]
        assert list_differences(ours[name], theirs[name]) == lines, name


def test_comparisons_compare_one_thing_only():
    """FedAvg, Distral and PR-TRPO define their own loop; PR-PPO's scripts stand alone."""
    taken = OF_FAMILY | {
        "compute_advantages",
        "compute_reference",
        "evaluate_agents",
        "list_env_ids",
        "main",
        "make_batch",
        "make_communicator",
        "update",
    }
    scripts = {path.stem for path in REPOSITORY.glob("*.py")} - {"communicators"}
    for script, family, defined in (
        (FEDAVG_MINIGRID, PRPO_MINIGRID, {"update", "main"}),
        (FEDAVG_ATARI, PRPO_ATARI, {"main"}),
        (FEDAVG_MUJOCO, PRPO_MUJOCO, {"main"}),
        (DISTRAL_MINIGRID, PRPO_MINIGRID, {"main"}),
        (PRTRPO_MINIGRID, PRPO_MINIGRID, {"update", "Agent", "make_agents", "main"}),
    ):
        assert imports(script) & scripts == {family.__name__}
        assert not imports(family) & scripts
        assert taken & definitions(script).keys() == defined


# What Distral has in place of PR-PPO's reference and rounds
DISTRAL_ARGS = '''
- # an agent's own component of its reference: its policy before this update, or its snapshot of
- # the last round
- self_reference: Literal["behaviour", "snapshot"] = "behaviour"
- mixture: Literal["arithmetic", "geometric"] = "arithmetic"
- """how the reference mixes the agents' distributions"""
- gate: Literal["none", "value"] = "none"
- """value: in each state a peer counts by what its critic expects there"""
- """forward: KL(reference || policy), eq. 4; reverse: KL(policy || reference), mirror descent"""
+ """forward: KL(central policy || policy); reverse: KL(policy || central policy), Distral's"""
- """coefficient of the KL penalty towards the reference (without peers: the old policy)"""
+ """coefficient of the KL penalty towards the central policy"""
- # Communication round
- local_updates: Count = 4  # iterations between communication rounds
+ # Central policy
+ central_learning_rate: Positive = 1e-3
+ """learning rate of the central policy's Adam, which is not annealed"""
+ central_epochs: Count = 16
+ """steps of the central policy per iteration, each over the states of all agents"""
+ local_updates: Count = 1
+ """iterations after which agents get the central policy anew"""
'''
DISTRAL_LOOP = """
+ together = "the central policy learns from the states of all agents"
+ exchange = communicators.make_exchange(args, together=together)
+ held = exchange.agents  # all agents
+ about="one central policy learns from the data of all",
+ agents = [agent.to(exchange.device) for agent in make_agents(args)]
+ # Central policy, of the default size and with an idle critic, and what the agents have of it
+ torch.manual_seed(args.seed)
+ central = Agent(agents[0].actor.out_features).to(exchange.device)
+ central_optimizer = torch.optim.Adam(
+ central.parameters(), args.central_learning_rate, eps=1e-5, fused=True
+ )
+ snapshot = copy.deepcopy(central)
+ # objects are changed in place
+ "central": [central] * n,
+ "central_optimizer": [central_optimizer] * n,
+ "snapshot": [snapshot] * n,
+ # Distillation: the central policy learns from the states of all agents that are finite
+ finite = [data for data, _ in rollouts if data["policy"].isfinite().all()]
+ distillation = math.nan
+ if finite:
+ distillation = distil(central, central_optimizer, pool_states(finite), args)
+ run.tick("distillation")
+ # Communication round: all agents get the central policy
+ if (iteration - 1) % args.local_updates == 0:
+ snapshot.load_state_dict(central.state_dict())
+ for k in range(len(held)):
+ # Reference policy, frozen for this update: the central policy
+ logits, _ = snapshot.predict(batch["obs"])
+ batch["reference"] = logits.log_softmax(-1)
+ "losses/distillation": distillation,
+ "communication/rounds": 1 + (iteration - 1) // args.local_updates,
+ "communication/dropped": n - len(finite),
+ run.log(rows, communicators.uniform(n), torch.full((n, n), torch.nan), scalars)
+ run.save_weights("central", central)
+ communication_rounds=math.ceil(run.iteration / args.local_updates),
"""


def test_distral_is_pr_ppo_with_a_central_policy():
    """Its loop has these lines that PR-PPO's has not; by default a round is in every iteration."""
    ours = definitions(PRPO_MINIGRID)
    theirs = definitions(DISTRAL_MINIGRID)
    assert ours.keys() & theirs.keys() == {"Args", "main", "check_args"}
    lines = list_differences(ours["Args"], theirs["Args"])
    assert lines == DISTRAL_ARGS.strip().splitlines()
    added = [line for line in list_differences(ours["main"], theirs["main"]) if line[0] == "+"]
    assert added == DISTRAL_LOOP.strip().splitlines()
