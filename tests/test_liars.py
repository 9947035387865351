"""benchmark/liars.py: what a lying agent sends and reports, and that the others are honest."""

import dataclasses
import subprocess

import pytest
import torch
from helpers import (
    PRPO_MINIGRID,
    REPOSITORY,
    assert_same_run,
    notes_of,
    on_minigrid,
    only_run,
    refusal,
    rows_of,
    table_of,
    tiny,
    weights_of,
)

import communicators
import prpo_minigrid
from benchmark import liars, play
from communicators import parse_args

EMPTY = "MiniGrid-Empty-Random-5x5-v0"


def tiny_liar(run_dir, **changes):
    """The arguments of a tiny run of four agents."""
    settings = PRPO_MINIGRID.tiny | {"num_agents": 4, "env_ids": (), "eval_episodes": 0}
    settings = settings | changes | {"run_dir": str(run_dir)}
    batch_size = settings["num_envs"] * settings["num_steps"]
    steps = settings.pop("iterations") * batch_size
    return liars.Args(total_timesteps=steps, **settings)


def make_networks():
    """Four agents whose policies are not uniform."""
    torch.manual_seed(0)
    networks = [prpo_minigrid.Agent(7) for _ in range(4)]
    for network in networks:
        torch.nn.init.normal_(network.actor.weight, std=0.3)
        torch.nn.init.normal_(network.actor.bias, std=0.3)
    return networks


def make_exchange(**settings):
    """The exchange of four agents in this process."""
    args = liars.Args(device="cpu", env_id=EMPTY, env_ids=(), **settings)
    return liars.LyingExchange(args, isolated=False, averages="", together="")


LIES = "none", "random", "flipped", "opposite", "inflated", "maximal"


@pytest.mark.parametrize("lie", LIES)
def test_only_the_last_agent_sends_a_lie(lie):
    networks = make_networks()
    sent = [communicators.flatten(network) for network in networks]
    before = [flat.clone() for flat in sent]
    changed = [*sent[:3], sent[3] * 1.01]
    exchange = make_exchange(lie=lie)
    received, reports = exchange.round(sent)
    other, _ = exchange.round(changed)
    again, _ = make_exchange(lie=lie).round(sent)
    recalled = make_exchange(lie=lie).recall(sent)  # as after a resume
    assert reports.isnan().all()
    for i in range(4):
        assert torch.equal(sent[i], before[i])
        assert torch.equal(received[i], sent[i]) == (i < 3 or lie in ("opposite", "none"))
        assert torch.equal(received[i], again[i])  # as the seed has it
        assert torch.equal(received[i], recalled[i])
    states = torch.randint(0, 11, (16, 7, 7, 3), dtype=torch.uint8)
    liar = prpo_minigrid.Agent(7)
    communicators.unflatten(received[3], liar)
    with torch.no_grad():
        logits, value = networks[3](states)
        lied_logits, lied_value = liar(states)
    if lie == "flipped":
        torch.testing.assert_close(lied_logits, -logits)
        torch.testing.assert_close(lied_value, value)
    elif lie == "random":
        for honest in (received[3], sent[3]):  # other weights in every round
            assert torch.corrcoef(torch.stack((other[3], honest)))[0, 1].abs() < 0.05
        assert received[3].norm() == pytest.approx(sent[3].norm().item(), rel=0.1)
    elif lie in ("inflated", "maximal"):  # the policy of `random`, whose critic lies besides
        random, _ = make_exchange(lie="random").round(sent)
        communicators.unflatten(random[3], liar)
        with torch.no_grad():
            random_logits, random_value = liar(states)
        assert torch.equal(lied_logits, random_logits)
        expected = random_value + 1 if lie == "inflated" else torch.full((16,), 1000.0)
        torch.testing.assert_close(lied_value, expected)


def test_only_the_last_agent_boasts():
    sent = [communicators.flatten(network) for network in make_networks()]
    numbers = torch.tensor([0.5, 0.1, 0.2, 0.3], dtype=torch.float64)
    for boast, expected in ((False, 0.3), (True, 1000.0)):
        received, reports = make_exchange(boast=boast).round(sent, numbers)
        assert reports.tolist() == pytest.approx([0.5, 0.1, 0.2, expected])
        assert numbers[3] == 0.3
        assert torch.equal(received[3], sent[3])


def test_a_rank_without_the_liar_is_honest():
    exchange = make_exchange(lie="flipped", boast=True)
    exchange.agents = range(1, 3)  # as under torchrun
    sent = [communicators.flatten(network) for network in make_networks()[1:3]]
    assert exchange.lie(sent) is sent
    assert exchange.round(sent, torch.arange(2.0))[1].tolist() == [0, 1]


@on_minigrid
def test_without_a_lie_it_is_the_script(script, tmp_path):
    options = {"iterations": 3, "exp_name": "same"}
    args = tiny_liar(tmp_path / "liars", env_id=EMPTY, averages=script.averages, **options)
    liars.main(args)
    script.main(tiny(script, tmp_path / "honest", num_agents=4, eval_episodes=0, **options))
    assert_same_run(only_run(tmp_path / "liars"), only_run(tmp_path / "honest"))


@on_minigrid
def test_peers_receive_the_lie(script, tmp_path):
    """The lie changes what the honest agents do, behind the first round."""
    rows = []
    for lie in ("none", "flipped"):
        options = {"averages": script.averages, "lie": lie, "communicator": "uniform"}
        run_dir = tmp_path / lie
        liars.main(tiny_liar(run_dir, env_id=EMPTY, iterations=4, local_updates=3, **options))
        rows.append(rows_of(only_run(run_dir)))
    honest, lied = rows
    for before, after in zip(honest, lied, strict=True):
        if before["agent"] != "3":
            assert (before == after) == (int(before["iteration"]) < 4)
    assert communicators.exchange_of_launcher is None  # nothing is left behind


def test_only_a_gate_reads_critics(tmp_path):
    """Without one the lies about values change nothing, with one they change the honest agents."""
    policies = {}
    for gate in ("none", "value"):
        for lie in ("random", "inflated", "maximal"):
            run_dir = tmp_path / gate / lie
            options = {"communicator": "uniform", "gate": gate, "lie": lie}
            liars.main(tiny_liar(run_dir, env_id=EMPTY, iterations=12, local_updates=1, **options))
            policies[gate, lie] = weights_of(only_run(run_dir))
    for lie in ("inflated", "maximal"):
        for i in range(3):
            assert torch.equal(policies["none", lie][i], policies["none", "random"][i])
            assert not torch.equal(policies["value", lie][i], policies["value", "random"][i])


@on_minigrid
def test_an_opposite_agent_learns_from_turned_rewards(script, tmp_path, monkeypatch):
    honest = script.module.Envs

    def add_rewards(data, *_):
        return data["rewards"].sum()

    rewards = notes_of(monkeypatch, script.module, "compute_advantages", add_rewards)
    options = {"averages": script.averages, "lie": "opposite"}
    liars.main(tiny_liar(tmp_path, env_id=EMPTY, iterations=3, **options))
    of_agents = torch.stack(rewards).view(3, 4).sum(0)
    assert (of_agents[:3] > 0).all()
    assert of_agents[3] < 0
    assert script.module.Envs is honest  # nothing is left behind


def test_a_resumed_liar_tells_the_same_lie(tmp_path):
    """A checkpoint holds what the agent has learned; what peers received follows from it."""
    options = {"env_id": EMPTY, "lie": "random", "local_updates": 2, "save_every": 3}
    options |= {"exp_name": "same", "anneal_lr": False}
    liars.main(tiny_liar(tmp_path / "whole", iterations=6, **options))
    half = tiny_liar(tmp_path / "resumed", iterations=3, **options)
    liars.main(half)
    folder = only_run(tmp_path / "resumed")
    whole = tiny_liar(tmp_path / "resumed", iterations=6, **options)
    liars.main(dataclasses.replace(whole, resume=str(folder)))
    whole_weights = weights_of(only_run(tmp_path / "whole"))
    for i, weights in weights_of(folder).items():
        assert torch.equal(weights, whole_weights[i])


def test_the_sweep_has_every_lie_and_boasts_only_where_returns_are_reported():
    words = ["bash", "benchmark/liars.sh"]
    output = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True).stdout
    lines = [line for line in output.splitlines() if "--seed 1 " in line]
    boasting = set()
    gated = set()
    for line in lines:
        argv = line.partition("benchmark/liars.py ")[2].split()
        args = parse_args(liars.Args, liars.check_args, argv)
        method, _, condition = args.exp_name.rpartition("-")
        assert condition == args.lie + "+boast" * args.boast
        assert args.averages == method.startswith("fedavg")
        assert args.communicator in method or method == "pr-gate"
        assert (args.gate == "value") == (method == "pr-gate")
        if args.boast:
            boasting.add(args.communicator)
        if args.gate == "value":
            gated.add((args.communicator, args.lie))
    assert boasting == {"reward"}
    assert gated == {("uniform", lie) for lie in LIES}
    assert len(lines) == 8 * 4 + 2 * 3 + len(LIES)


def test_a_launcher_is_refused(monkeypatch):
    """Its exchange would be honest."""
    monkeypatch.setattr(communicators, "exchange_of_launcher", communicators.Exchange)
    assert "federate.py" in refusal(parse_args, liars.Args, liars.check_args, [])


@pytest.mark.parametrize(
    ("averages", "flag", "value"),
    [
        (True, "gate", "value"),
        (True, "mixture", "geometric"),
        (False, "server_lr", 0.5),
        (False, "private_heads", ("actor",)),
    ],
)
def test_flags_of_the_other_script_are_refused(averages, flag, value):
    args = liars.Args(averages=averages, **{flag: value})
    name = "fedavg_ppo.py" if averages else "prpo_minigrid.py"
    assert refusal(liars.check_args, args).endswith(f": is no flag of {name}")


def test_a_run_is_played_and_not_trained_again(tmp_path):
    runs = tmp_path / "runs"
    liars.main(tiny_liar(runs, env_id=EMPTY, iterations=1, eval_episodes=2))
    folder = only_run(runs)
    last = table_of(folder, "evaluations")[-1]
    returns = play.main(play.Args(str(folder)))[int(last["agent"])][last["task"]]
    assert returns.mean() == pytest.approx(float(last["mean_return"]), abs=1e-4)
    assert only_run(runs) == folder
