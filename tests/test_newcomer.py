"""benchmark/newcomer.py: who begins as whom, and that a newcomer is new."""

import math
from dataclasses import replace

import pytest
import torch
from helpers import (
    FEDAVG_MUJOCO,
    PRPO_MUJOCO,
    assert_same_run,
    networks_of,
    on,
    only_run,
    refusal,
    train,
    weights_of,
)
from safetensors.torch import load_file

import communicators
import prpo_mujoco
from benchmark import newcomer


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of two agents."""
    folder = tmp_path_factory.mktemp("trained")
    settings = {"num_agents": 2, "iterations": 3, "eval_episodes": 0, "communicator": "identity"}
    return train(PRPO_MUJOCO, folder, **settings)


def tiny_newcomer(run_dir, start_from, **changes):
    """The arguments of three agents, of which two have been trained."""
    settings = PRPO_MUJOCO.tiny | {"num_agents": 3, "eval_episodes": 0, "local_updates": 1}
    settings = settings | changes | {"run_dir": str(run_dir), "start_from": str(start_from)}
    steps = settings.pop("iterations") * settings["num_envs"] * settings["num_steps"]
    return newcomer.Args(total_timesteps=steps, **settings)


both = on([PRPO_MUJOCO, FEDAVG_MUJOCO])


@both
def test_agents_begin_as_those_of_the_run_and_newcomers_anew(
    script, trained, tmp_path, monkeypatch
):
    """Networks, statistics of observations, and the scale of rewards."""
    seen = {}
    rollout = script.module.rollout
    scale_rewards = script.module.scale_rewards

    def watch_rollout(args, actors, *others):
        seen.setdefault("agents", [communicators.flatten(agent) for agent in actors.agents])
        return rollout(args, actors, *others)

    def watch_rewards(data, statistics):
        seen.setdefault("statistics", []).append(statistics.clone())
        return scale_rewards(data, statistics)

    monkeypatch.setattr(script.module, "rollout", watch_rollout)
    monkeypatch.setattr(script.module, "scale_rewards", watch_rewards)
    args = tiny_newcomer(tmp_path, trained, iterations=1, averages=script is FEDAVG_MUJOCO)
    newcomer.main(args)
    new = prpo_mujoco.make_agents(args)[2]
    for i in range(2):
        new.load_state_dict(load_file(trained / f"agent_{i}.safetensors"))
        assert torch.equal(seen["agents"][i], communicators.flatten(new))
        path = trained / "checkpoints" / f"agent_{i}" / "3.pt"
        stored = torch.load(path, weights_only=True)["return_statistics"]
        assert stored[0] > 0 and torch.equal(seen["statistics"][i], stored)
    assert not torch.equal(seen["agents"][0], seen["agents"][1])
    fresh = communicators.flatten(prpo_mujoco.make_agents(args)[2])
    assert torch.equal(seen["agents"][2], fresh)
    assert not seen["statistics"][2].any()
    assert script.module.Run is communicators.Run  # as it was


@pytest.mark.parametrize(("averages", "name"), [(False, "sent"), (True, "begin")])
def test_what_counts_as_sent_is_of_the_trained_agent(
    averages, name, trained, tmp_path, monkeypatch
):
    """An agent's snapshot before the first round, and what a server's step begins from."""
    copies = []
    restore = newcomer.Run.restore

    def watch(self, state):
        restore(self, state)
        for agent, begun in zip(state["agent"], state[name], strict=True):
            copies.append((communicators.flatten(agent), begun.clone()))

    monkeypatch.setattr(newcomer.Run, "restore", watch)
    args = tiny_newcomer(tmp_path, trained, iterations=1, averages=averages, server_lr=0.5)
    newcomer.main(args)
    assert len(copies) == 3
    assert all(torch.equal(agent, begun) for agent, begun in copies)


@pytest.fixture
def cut(trained, crashing, tmp_path):
    """cut(moment, agent, iteration): a run up to that moment, and a whole one.

    Returns the arguments that resume it, its folder, and that of the whole one.
    """

    def train(*moment):
        settings = {"iterations": 4, "save_every": 2}
        newcomer.main(tiny_newcomer(tmp_path / "whole", trained, **settings))
        args = tiny_newcomer(tmp_path / "cut", trained, **settings)
        crashing(*moment, lambda: newcomer.main(args))
        folder = only_run(tmp_path / "cut")
        return replace(args, resume=str(folder)), folder, only_run(tmp_path / "whole")

    return train


def test_a_resumed_run_goes_on_from_its_own_checkpoint(cut):
    """And is the run that it would have been."""
    resumed, folder, whole = cut("complete", 2, 2)
    moved = replace(resumed, start_from="moved")
    newcomer.check_args(moved)
    newcomer.main(moved)
    assert_same_run(whole, folder)
    assert weights_of(folder)


def test_a_run_without_checkpoints_is_resumed_from_the_trained_run(cut):
    """Not from new agents, where that run is gone."""
    resumed, folder, whole = cut("update", 0, 1)
    newcomer.check_args(resumed)
    moved = replace(resumed, start_from="moved")
    assert "must be a run's folder with its checkpoints" in refusal(newcomer.main, moved)
    newcomer.main(resumed)
    assert_same_run(whole, folder)


def test_bad_input_ends_in_one_line(trained, tmp_path):
    args = tiny_newcomer(tmp_path, tmp_path / "nowhere", iterations=1)
    assert "--start-from" in refusal(newcomer.check_args, args)
    other = tiny_newcomer(tmp_path, trained, iterations=1, hidden_sizes=(64, 32, 64))
    message = refusal(newcomer.check_args, other)
    assert "agent 1 is another network there" in message and "\n" not in message.strip()
    newcomer.check_args(tiny_newcomer(tmp_path, trained, iterations=1, hidden_sizes=(64, 64, 32)))
    broken = tmp_path / "broken" / "checkpoints" / "agent_0" / "3.pt"
    broken.parent.mkdir(parents=True)
    broken.write_bytes((trained / "checkpoints" / "agent_0" / "3.pt").read_bytes()[:-100])
    args = tiny_newcomer(tmp_path, tmp_path / "broken", iterations=1)
    assert "cannot read 3.pt of agent 0" in refusal(newcomer.check_args, args)
    checkpoint = torch.load(trained / "checkpoints" / "agent_0" / "3.pt", weights_only=True)
    next(iter(checkpoint["agent"].values())).fill_(math.nan)
    torch.save(checkpoint, broken)
    (broken.parent / "._3.pt").touch()  # as some systems leave beside a copy
    assert "agent 0 has diverged there" in refusal(newcomer.check_args, args)
    del checkpoint["return_statistics"]
    torch.save(checkpoint, broken)
    assert "cannot read 3.pt of agent 0" in refusal(newcomer.check_args, args)


@pytest.mark.parametrize(
    ("averages", "flag", "value"),
    [
        (True, "gate", "value"),
        (True, "mixture", "geometric"),
        (True, "kl_samples", 9),
        (False, "server_lr", 0.5),
        (False, "private_heads", ("actor",)),
    ],
)
def test_flags_of_the_other_script_are_refused(averages, flag, value, trained, tmp_path):
    args = tiny_newcomer(tmp_path, trained, iterations=1, averages=averages, **{flag: value})
    name = "fedavg_mujoco.py" if averages else "prpo_mujoco.py"
    line = refusal(newcomer.check_args, args)
    assert line.startswith(f"--{flag.replace('_', '-')} ") and f"is no flag of {name}" in line
    newcomer.check_args(
        tiny_newcomer(tmp_path, trained, iterations=1, averages=not averages, **{flag: value})
    )


def test_the_scale_of_a_gates_critics_is_not_sent_without_a_gate(tmp_path):
    settings = {"num_agents": 2, "iterations": 3, "eval_episodes": 0, "gate": "value"}
    gated = train(PRPO_MUJOCO, tmp_path / "gated", **settings)
    assert load_file(gated / "agent_0.safetensors")["value_scale"] != 1
    newcomer.main(tiny_newcomer(tmp_path / "new", gated, iterations=2))
    networks = networks_of(only_run(tmp_path / "new"))
    assert [network["value_scale"] for network in networks] == [1, 1, 1]
