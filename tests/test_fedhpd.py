"""benchmark/fedhpd.py: distillation on public states, and what is exchanged, by hand."""

import dataclasses
import re
import subprocess

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import REPOSITORY, assert_same_run, only_run, refusal, rows_of, scalars_of, weights_of

import communicators
import prpo_minigrid
from benchmark import fedhpd, play

PUBLIC_STEPS = fedhpd.PUBLIC_STEPS


@pytest.fixture(autouse=True)
def fewer_public_states(monkeypatch):
    """80 instead of 5,000."""
    monkeypatch.setattr(fedhpd, "PUBLIC_STEPS", 10)


def train(run_dir, **settings):
    """Train four agents for a few iterations of 64 steps. Returns the folder of the run."""
    defaults = {"num_agents": 4, "num_envs": 4, "num_steps": 16, "eval_episodes": 0, "seed": 7}
    args = fedhpd.Args(run_dir=str(run_dir), exp_name="same", **defaults | settings)
    args = dataclasses.replace(args, total_timesteps=64 * args.total_timesteps)
    fedhpd.check_args(args)
    fedhpd.main(args)
    return only_run(run_dir)


@pytest.fixture
def agents():
    """Ten agents whose policies are not uniform."""
    agents = fedhpd.make_agents(fedhpd.Args())
    torch.manual_seed(0)
    for agent in agents:
        torch.nn.init.normal_(agent.actor.weight)
    return agents


def test_ten_networks_differ_and_share_no_layer(agents):
    sizes = [len(communicators.flatten(agent)) for agent in agents]
    for (widths, _), size in zip(fedhpd.NETWORKS, sizes, strict=True):
        trunk = sum((a + 1) * b for a, b in zip((4, *widths), widths, strict=False))
        heads = (widths[-1] + 1) * (2 + 1)
        assert size == 2 * trunk + heads
    assert len(set(sizes)) == 10
    states = torch.randn(5, 4)
    for agent in agents:
        logits, value = agent(states)
        assert (logits.shape, value.shape) == ((5, 2), (5,))
        value.sum().backward()
        assert all(p.grad is None for p in [*agent.network.parameters(), *agent.actor.parameters()])


def test_the_consensus_is_the_mean_of_the_probabilities(agents):
    states = torch.randn(6, 4)
    received = [fedhpd.compute_public_probs(agent, states) for agent in agents]
    consensus = fedhpd.compute_consensus(received, 6)
    with torch.no_grad():
        expected = sum(agent(states)[0].softmax(-1) for agent in agents) / 10
        without_one = sum(agent(states)[0].softmax(-1) for agent in agents[1:]) / 9
    torch.testing.assert_close(consensus.exp(), expected)
    torch.testing.assert_close(
        fedhpd.compute_consensus([None, *received[1:]], 6).exp(), without_one
    )


def test_a_step_of_distillation_follows_the_gradient_of_the_kl(agents):
    """That of KL(consensus || policy) by the logits is the policy minus the consensus."""
    states = torch.randn(6, 4)
    consensus = torch.randn(6, 2).log_softmax(-1)
    for agent in agents:
        before = {name: value.clone() for name, value in agent.state_dict().items()}
        with torch.no_grad():
            policy = agent(states)[0].softmax(-1)
            features = agent.network(states)
        optimizer = torch.optim.SGD(agent.parameters(), 0.1)
        fedhpd.distill(agent, optimizer, states, consensus, 1)
        gradient = (policy - consensus.exp()) / 6
        after = agent.state_dict()
        moved = (before["actor.weight"] - after["actor.weight"]) / 0.1
        torch.testing.assert_close(moved, gradient.T @ features, atol=1e-5, rtol=1e-4)
        moved = (before["actor.bias"] - after["actor.bias"]) / 0.1
        torch.testing.assert_close(moved, gradient.sum(0), atol=1e-5, rtol=1e-4)
        for name in before:
            if name.startswith("critic"):
                assert torch.equal(before[name], after[name])
            elif name.startswith("network.0"):
                assert not torch.equal(before[name], after[name])


def test_distillation_brings_networks_of_all_sizes_together(agents):
    states = torch.randn(50, 4)
    received = [fedhpd.compute_public_probs(agent, states) for agent in agents]
    consensus = fedhpd.compute_consensus(received, 50)
    for agent, flat in zip(agents, received, strict=True):
        optimizer = torch.optim.Adam(agent.parameters(), 1e-2)
        fedhpd.distill(agent, optimizer, states, consensus, 100)
        before = communicators.categorical_kl(consensus, flat.view(50, 2).log()).mean()
        logits, _ = agent.predict(states)
        after = communicators.categorical_kl(consensus, logits.log_softmax(-1)).mean()
        assert after < 0.3 * before


def test_a_policy_that_is_no_number_in_a_public_state_takes_no_step(agents):
    """So that neither its weights nor the moments of Adam are lost."""
    states = torch.randn(6, 4)
    states[2] = torch.inf
    agent = agents[0]
    before = communicators.flatten(agent)
    optimizer = torch.optim.Adam(agent.parameters(), 1e-2)
    fedhpd.distill(agent, optimizer, states, torch.randn(6, 2).log_softmax(-1), 3)
    assert torch.equal(communicators.flatten(agent), before) and not optimizer.state


def test_agents_send_nothing_but_probabilities_on_the_same_public_states(tmp_path, monkeypatch):
    """The states are those of a random policy, whatever the run's seed is."""
    sent = []
    states = []
    send = communicators.Exchange.round
    compute = fedhpd.compute_public_probs

    def spy_on_sending(self, tensors, numbers=None, sizes=None):
        sent.extend(tensors)
        assert numbers is None
        return send(self, tensors, numbers, sizes)

    def spy_on_computing(agent, public_states):
        states.append(public_states.clone())
        expected.append(agent.predict(public_states)[0].softmax(-1))
        return compute(agent, public_states)

    expected = []
    monkeypatch.setattr(communicators.Exchange, "round", spy_on_sending)
    monkeypatch.setattr(fedhpd, "compute_public_probs", spy_on_computing)
    for seed in (1, 2):
        train(tmp_path / str(seed), distill=True, total_timesteps=4, seed=seed)
    assert len(sent) == len(states) == 2 * 2 * 4  # seeds, rounds, agents
    for flat, of_agent, probs in zip(sent, states, expected, strict=True):
        assert torch.equal(of_agent, states[0])
        assert torch.equal(flat.view(80, 2), probs)
    assert states[0].shape == (80, 4)
    monkeypatch.undo()
    assert torch.equal(states[0], fedhpd.prpo_cartpole.collect_public_states(fedhpd.Args(), 10))


def test_bytes_are_counted_by_hand(tmp_path):
    """Numbers of four bytes, times three listeners, times three rounds."""
    assert PUBLIC_STEPS * 8 == 5000
    public = train(tmp_path / "distilled", distill=True, total_timesteps=7)
    parameters = train(tmp_path / "mixed", total_timesteps=7)
    alone = train(tmp_path / "alone", communicator="identity", total_timesteps=7)
    agents = fedhpd.make_agents(fedhpd.Args(num_agents=4))
    numel = sum(parameter.numel() for agent in agents for parameter in agent.parameters())
    expected = {public: 4 * 80 * 2, parameters: numel, alone: 0}
    for folder, numbers in expected.items():
        last = rows_of(folder)[-1]
        assert int(last["communication_bytes"]) == 3 * 3 * 4 * numbers


def test_without_steps_fedhpd_is_isolated(tmp_path):
    """Bit for bit, over a checkpoint, but for what is sent; with steps it is not."""
    settings = {"total_timesteps": 5, "save_every": 3, "kl_coef": 0.3}
    alone = train(tmp_path / "alone", communicator="identity", **settings)
    without = train(tmp_path / "without", distill=True, distill_steps=0, **settings)
    distilled = train(tmp_path / "distilled", distill=True, **settings)
    weights = weights_of(alone)
    for i, others in weights_of(without).items():
        assert torch.equal(others, weights[i])
        assert not torch.equal(weights_of(distilled)[i], weights[i])
    rows = rows_of(alone)
    others = rows_of(without)
    assert len(rows) == len(others) == 5 * 4
    for row, other in zip(rows, others, strict=True):
        different = {name for name in row if row[name] != other[name]}
        assert different <= {"communication_bytes"}
    assert scalars_of(without)["communication/rounds"][-1][1] == 2


def test_a_round_in_which_all_have_diverged_distils_nothing(tmp_path, monkeypatch):
    """The agents are those of isolated runs."""
    settings = {"total_timesteps": 5, "save_every": 3}
    alone = train(tmp_path / "alone", communicator="identity", **settings)
    monkeypatch.setattr(fedhpd, "compute_public_probs", lambda *_: torch.full((80 * 2,), torch.nan))
    diverged = train(tmp_path / "diverged", distill=True, **settings)
    for i, of_agent in weights_of(diverged).items():
        assert torch.equal(of_agent, weights_of(alone)[i])
    assert [int(row["dropped"]) for row in rows_of(diverged)[4:8]] == [4] * 4


def test_a_resumed_run_is_the_same_run(tmp_path):
    settings = {"distill": True, "save_every": 3, "anneal_lr": False}
    whole = train(tmp_path / "whole", total_timesteps=6, **settings)
    half = train(tmp_path / "half", total_timesteps=3, **settings)
    for _ in range(2):  # the second time nothing is left to do
        train(tmp_path / "half", total_timesteps=6, resume=str(half), **settings)
        assert_same_run(half, whole)


def test_agents_learn_and_play(tmp_path):
    """Ten agents; and MiniGrid's script is as it was."""
    args = fedhpd.Args(
        distill=True,
        total_timesteps=9216,
        distill_steps=2,
        eval_episodes=3,
        run_dir=str(tmp_path),
    )
    summary = fedhpd.main(args)
    folder = only_run(tmp_path)
    rows = rows_of(folder)
    assert summary["diverged"] == []
    first = [float(row["return_last_100"]) for row in rows[:10]]
    last = [float(row["return_last_100"]) for row in rows[-10:]]
    assert np.mean(last) > 1.3 * np.mean(first)
    returns = play.main(play.Args(str(folder)))
    for i, result in enumerate(summary["evaluation"]["agents"]):
        assert returns[i]["CartPole-v1"].mean() == pytest.approx(result["CartPole-v1"]["mean"])
    assert prpo_minigrid.OBSERVATIONS.shape == (7, 7, 3)
    assert prpo_minigrid.make_agents is not fedhpd.make_agents


def test_flags_without_a_meaning_here(capsys):
    """Sizes are refused; a coefficient of 0, with which peers have influence, is not announced."""
    argv = ["--distill", "--kl-coef", "0"]
    assert communicators.parse_args(fedhpd.Args, fedhpd.check_args, argv).distill
    assert capsys.readouterr().out == ""
    message = refusal(
        communicators.parse_args,
        fedhpd.Args,
        fedhpd.check_args,
        ["--hidden-sizes", *["8"] * 10],
    )
    assert "NETWORKS" in message


def test_the_sweep_has_the_settings_that_the_tuning_seed_chose():
    """Each method's best by the training return over the run."""
    results = REPOSITORY / "benchmark" / "results" / "fedhpd_tuning_runs.csv"
    tuned = pd.read_csv(results, comment="#")
    best = tuned.loc[
        tuned.mean_training_return.groupby(tuned.method.str.split("_").str[0]).idxmax()
    ]
    chosen = {}
    for mode in ("", "tune"):
        words = ["bash", "benchmark/fedhpd.sh", *mode.split()]
        output = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True).stdout
        for line in output.splitlines():
            settings, _, name = line.partition(" --exp-name ")
            settings = re.sub(r" --seed.*", "", settings)
            chosen.setdefault(mode, {}).setdefault(settings, set()).add(name)
    assert len(tuned) == len(chosen["tune"]) == 12
    for settings, (name,) in chosen[""].items():
        (setting,) = chosen["tune"][settings]
        assert setting.split("_")[0] == name
        assert setting in best.method.tolist()
    assert len(chosen[""]) == len(best) == 3
