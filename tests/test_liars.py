"""benchmark/liars.py: what a lying agent sends and reports, and that the others are honest."""

import copy
import runpy
import subprocess
import sys

import pytest
import torch
from helpers import PRPO_MINIGRID, REPOSITORY, assert_same_run, only_run, tiny

import communicators
import prpo_minigrid
from benchmark import liars
from communicators import parse_args

EMPTY = "MiniGrid-Empty-Random-5x5-v0"


def tiny_liar(run_dir, **changes):
    """The arguments of a tiny run of four agents."""
    settings = PRPO_MINIGRID.tiny | {"num_agents": 4, "env_ids": (), "eval_episodes": 0}
    settings = settings | changes | {"run_dir": str(run_dir)}
    batch_size = settings["num_envs"] * settings["num_steps"]
    steps = settings.pop("iterations") * batch_size
    return liars.Args(total_timesteps=steps, **settings)


@pytest.mark.parametrize("lie", ["random", "flipped", "opposite", "none"])
def test_only_the_last_agent_sends_a_lie(lie):
    torch.manual_seed(0)
    networks = [prpo_minigrid.Agent(7) for _ in range(4)]
    for network in networks:
        torch.nn.init.normal_(network.actor.weight, std=0.3)
        torch.nn.init.normal_(network.actor.bias, std=0.3)
    before = copy.deepcopy(networks)
    states = torch.randint(0, 11, (16, 7, 7, 3), dtype=torch.uint8)
    args = liars.Args(lie=lie, boast=True)
    everybody = torch.ones(4, dtype=torch.bool)
    neighbours = torch.ones(4, 4, dtype=torch.bool)
    sent = []
    for iteration in (4, 8, 4):
        exchange = communicators.Exchange(4, "cpu")
        inputs = exchange, copy.deepcopy(networks), states, neighbours
        peers = liars.LyingPeers(args, *inputs)
        peers.exchange_snapshots(networks, everybody, neighbours, iteration)
        sent.append(peers.received[3])
        for i in range(3):
            assert torch.equal(
                communicators.flatten([peers.received[i]]), communicators.flatten([networks[i]])
            )
    assert torch.equal(communicators.flatten(networks), communicators.flatten(before))
    flat = communicators.flatten(sent)
    honest = communicators.flatten([networks[3]])[0]
    with torch.no_grad():
        logits, value = networks[3](states)
        lied_logits, lied_value = sent[0](states)
    if lie == "flipped":
        torch.testing.assert_close(lied_logits, -logits)
        torch.testing.assert_close(lied_value, value)
    elif lie == "random":
        assert not torch.equal(flat[0], flat[1])  # in every round
        assert torch.equal(flat[0], flat[2])  # but as the seed has it
        assert torch.corrcoef(torch.stack((flat[0], honest)))[0, 1].abs() < 0.05
        assert flat[0].norm() == pytest.approx(honest.norm().item(), rel=0.1)
    else:
        assert torch.equal(flat[0], honest)


def test_only_the_last_agent_boasts():
    states = torch.zeros(1, 7, 7, 3, dtype=torch.uint8)
    networks = [prpo_minigrid.Agent(7) for _ in range(4)]
    neighbours = torch.ones(4, 4, dtype=torch.bool)
    numbers = torch.tensor([0.5, 0.1, 0.2, 0.3], dtype=torch.float64)
    for boast, expected in ((False, 0.3), (True, 1000.0)):
        inputs = communicators.Exchange(4, "cpu"), networks, states, neighbours
        peers = liars.LyingPeers(liars.Args(boast=boast), *inputs)
        assert peers.report(numbers, networks).tolist() == pytest.approx([0.5, 0.1, 0.2, expected])
        assert numbers[3] == 0.3


def test_without_a_lie_it_is_prpo_minigrid(tmp_path):
    args = tiny_liar(tmp_path / "liars", env_id=EMPTY, iterations=3, exp_name="same")
    liars.main(args)
    honest = tiny(
        PRPO_MINIGRID,
        tmp_path / "honest",
        num_agents=4,
        eval_episodes=0,
        iterations=3,
        exp_name="same",
    )
    prpo_minigrid.main(honest)
    assert_same_run(only_run(tmp_path / "liars"), only_run(tmp_path / "honest"))


def test_an_opposite_agent_learns_from_turned_rewards(tmp_path, monkeypatch):
    rewards = []
    honest = prpo_minigrid.Envs
    compute = prpo_minigrid.compute_advantages

    def spy(data, *inputs):
        rewards.append(data["rewards"].sum())
        return compute(data, *inputs)

    monkeypatch.setattr(prpo_minigrid, "compute_advantages", spy)
    liars.main(tiny_liar(tmp_path, env_id=EMPTY, iterations=3, lie="opposite"))
    of_agents = torch.stack(rewards).view(3, 4).sum(0)
    assert (of_agents[:3] > 0).all()
    assert of_agents[3] < 0
    assert prpo_minigrid.Peers is communicators.Peers  # nothing is left behind
    assert prpo_minigrid.Envs is honest


def test_the_sweep_has_every_lie_and_boasts_only_where_returns_are_reported():
    words = ["bash", "benchmark/sweep.sh", "liars"]
    output = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True).stdout
    lines = [line for line in output.splitlines() if "--seed 1 " in line]
    boasting = set()
    for line in lines:
        argv = line.partition("benchmark/liars.py ")[2].split()
        args = parse_args(liars.Args, prpo_minigrid.check_args, argv)
        method, _, condition = args.exp_name.rpartition("-")
        assert condition == args.lie + "+boast" * args.boast
        assert (args.aggregation == "weights") == method.startswith("fedavg")
        assert args.communicator in method
        if args.boast:
            boasting.add(args.communicator)
    assert boasting == {"reward"}
    assert len(lines) == 8 * 4 + 2 * 3


def test_files_for_a_folder_are_refused(tmp_path, capsys):
    """`LyingPeers` turns what is gathered; the files of --exchange would be honest."""
    argv = ["--exchange", f"file://{tmp_path}", "--agents", "0"]
    with pytest.raises(SystemExit):
        parse_args(liars.Args, liars.check_args, argv)
    assert f"--exchange file://{tmp_path}: lies are sent" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_a_run_is_played_and_not_trained_again(tmp_path, monkeypatch, capsys):
    runs = tmp_path / "runs"
    liars.main(tiny_liar(runs, env_id=EMPTY, iterations=1))
    folder = only_run(runs)
    argv = ["liars.py", "--eval-only", str(folder), "--eval-episodes", "2"]
    monkeypatch.setattr(sys, "argv", argv)
    capsys.readouterr()
    runpy.run_path(liars.__file__, run_name="__main__")
    assert f"{folder}: mean return of 2 episodes" in capsys.readouterr().out
    assert only_run(runs) == folder
