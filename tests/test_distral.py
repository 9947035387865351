"""Distral: what the central policy learns, from whom, and what the agents have of it."""

import copy
import math

import pytest
import torch
from helpers import (
    DISTRAL_MINIGRID,
    PRPO_MINIGRID,
    assert_same_run,
    flags,
    only_run,
    refusal,
    resume,
    rows_of,
    scalars_of,
    summary_of,
    table_of,
    tiny,
    told_to_launcher,
    weights_of,
)
from safetensors.torch import load_file

import communicators
import distral_minigrid
from prpo_minigrid import Agent

OWN = {"distillation"}  # the columns that PR-PPO has not


def train(run_dir, script=DISTRAL_MINIGRID, **changes):
    """The folder of a short run without evaluations."""
    script.main(tiny(script, run_dir, **{"eval_episodes": 0} | changes))
    return only_run(run_dir)


def lively_agent(**options):
    """A policy whose probabilities differ between actions and states, as after training."""
    agent = Agent(7, **options)
    torch.nn.init.orthogonal_(agent.actor.weight, 2.0)
    torch.nn.init.normal_(agent.actor.bias)
    return agent


def visit(agent, obs, samples):
    """What `rollout` returns of an agent that has been in these rows of obs, valid or not.

    samples: [(row, valid)].
    """
    logits, _ = agent.predict(obs)
    return {
        "obs": obs,
        "policy": logits.log_softmax(-1),
        "obs_inds": torch.tensor([[row] for row, _ in samples]),  # [steps, 1]
        "valid": torch.tensor([[valid] for _, valid in samples]),
    }


@pytest.fixture
def rollouts():
    """Those of two agents that share three of their states, in the other order."""
    torch.manual_seed(0)
    obs = PRPO_MINIGRID.random_obs(5)
    samples = [(0, True)] * 5 + [(1, True), (2, False), (3, True), (3, True), (0, False)]
    others = [(0, True)] * 3 + [(1, True), (1, False), (2, True), (3, True)]
    # The last state of each is only where a rollout ended
    return [visit(lively_agent(), obs, samples), visit(lively_agent(), obs.flip(0), others)]


def fit(central, rollouts, steps=300):
    """Train a central policy until its gradient is small. Returns the last loss."""
    args = distral_minigrid.Args(central_epochs=steps)
    optimizer = torch.optim.Adam(central.parameters(), 3e-3)
    states = distral_minigrid.pool_states(rollouts)
    distral_minigrid.distil(central, optimizer, states, args)
    optimizer = torch.optim.Adam(central.parameters(), 3e-4)
    distral_minigrid.distil(central, optimizer, states, args)
    args = distral_minigrid.Args(central_epochs=1)
    return distral_minigrid.distil(central, optimizer, states, args)


# --- the central policy ---


def test_one_agent_is_fit_exactly(rollouts):
    """In the states that it has been in."""
    data = rollouts[0]
    central = Agent(7, hidden=32)
    before = fit(copy.deepcopy(central), [data], steps=1)
    after = fit(central, [data])
    assert before > 0.1
    assert after == pytest.approx(0, abs=1e-3)
    policy = central.predict(data["obs"])[0].softmax(-1)
    visited = [0, 1, 3]
    torch.testing.assert_close(policy[visited], data["policy"].exp()[visited], rtol=0, atol=1e-2)


def test_of_several_agents_it_is_the_mixture_weighted_by_visits(rollouts):
    """sum_i d_i(s) pi_i(a|s) / sum_i d_i(s); steps that only reset an environment do not count."""
    central = Agent(7, hidden=32)
    fit(central, rollouts)
    obs = rollouts[0]["obs"]
    of_first = rollouts[0]["policy"].exp()
    of_second = rollouts[1]["policy"].exp().flip(0)
    visits = torch.tensor([[5, 0], [1, 1], [0, 1], [2, 1], [0, 3]])
    weights = visits / visits.sum(1, keepdim=True)
    expected = weights[:, :1] * of_first + weights[:, 1:] * of_second
    policy = central.predict(obs)[0].softmax(-1)
    torch.testing.assert_close(policy, expected, rtol=0, atol=1e-2)
    assert (policy[3] - (of_first + of_second)[3] / 2).abs().max() > 0.05


def test_its_gradient_is_that_of_the_cross_entropy_over_all_samples(rollouts):
    """By hand: that of a state's logits is pi_0 - pi_i, once for each valid sample of each agent.

    One step of plain gradient descent shows it at the last layer.
    """
    central = lively_agent(hidden=16)
    before = copy.deepcopy(central)
    weight = torch.zeros_like(central.actor.weight)
    bias = torch.zeros_like(central.actor.bias)
    number = 0
    loss = 0.0
    for data in rollouts:
        for (row,), (valid,) in zip(data["obs_inds"].tolist(), data["valid"].tolist(), strict=True):
            if valid:
                obs = data["obs"][row : row + 1]
                log_probs = central.predict(obs)[0][0].log_softmax(-1)
                of_agent = data["policy"][row]
                with torch.no_grad():
                    hidden = central.network(obs.permute(0, 3, 1, 2).float())[0]
                weight += torch.outer(log_probs.exp() - of_agent.exp(), hidden)
                bias += log_probs.exp() - of_agent.exp()
                loss += (of_agent.exp() * (of_agent - log_probs)).sum().item()
                number += 1
    args = distral_minigrid.Args(central_epochs=1, max_grad_norm=1e9)
    optimizer = torch.optim.SGD(central.parameters(), 1.0)
    states = distral_minigrid.pool_states(rollouts)
    returned = distral_minigrid.distil(central, optimizer, states, args)
    assert number == 8 + 6
    assert returned == pytest.approx(loss / number, rel=1e-5)
    step = before.actor.weight - central.actor.weight
    torch.testing.assert_close(step, weight / number, rtol=1e-4, atol=1e-5)
    step = before.actor.bias - central.actor.bias
    torch.testing.assert_close(step, bias / number, rtol=1e-4, atol=1e-5)
    assert not torch.equal(before.network[0].weight, central.network[0].weight)
    assert torch.equal(before.critic.weight, central.critic.weight)
    # A gradient that is clipped
    args = distral_minigrid.Args(central_epochs=1, max_grad_norm=0.05)
    before = communicators.flatten(central)
    distral_minigrid.distil(central, optimizer, states, args)
    norm = (communicators.flatten(central) - before).norm()
    assert float(norm) == pytest.approx(0.05, rel=1e-3)


def test_a_loss_or_gradient_that_is_not_finite_makes_no_step(rollouts):
    """Weights and Adam's moments stay; the loss is NaN."""
    args = distral_minigrid.Args(central_epochs=3)
    central = lively_agent(hidden=16)
    optimizer = torch.optim.Adam(central.parameters(), 1e-2)
    states = distral_minigrid.pool_states(rollouts)
    assert distral_minigrid.distil(central, optimizer, states, args) > 0
    weights = communicators.flatten(central)
    moments = copy.deepcopy(optimizer.state_dict()["state"])
    infinite = states | {"policy": torch.full_like(states["policy"], torch.inf)}
    assert math.isnan(distral_minigrid.distil(central, optimizer, infinite, args))
    hook = central.actor.weight.register_hook(lambda gradient: gradient * torch.inf)
    assert math.isnan(distral_minigrid.distil(central, optimizer, states, args))
    hook.remove()
    assert torch.equal(communicators.flatten(central), weights)
    torch.testing.assert_close(optimizer.state_dict()["state"], moments, rtol=0, atol=0)
    assert distral_minigrid.distil(central, optimizer, states, args) > 0
    assert not torch.equal(communicators.flatten(central), weights)


def record(monkeypatch, name, watch):
    """Call `watch(returned, *arguments)` after each call of a function of the script."""
    function = getattr(distral_minigrid, name)

    def call(*arguments):
        returned = function(*arguments)
        watch(returned, *arguments)
        return returned

    monkeypatch.setattr(distral_minigrid, name, call)


def test_it_learns_from_the_data_of_every_agent(tmp_path, monkeypatch):
    """Every valid sample of every agent counts once, with the policy of the agent that made it."""
    played = []
    learned = []
    record(monkeypatch, "rollout", lambda returned, *_: played.append(returned))
    record(monkeypatch, "distil", lambda _, *arguments: learned.append(arguments[2]))
    train(tmp_path, iterations=3)
    assert len(played) == len(learned) == 3
    for rollouts, states in zip(played, learned, strict=True):
        assert len(rollouts) == 3
        expected = []
        for data, _ in rollouts:
            for row in data["obs_inds"][data["valid"]].tolist():
                expected.append(
                    [*data["obs"][row].flatten().tolist(), *data["policy"][row].tolist()]
                )
        seen = []
        for obs, policy, visits in zip(*states.values(), strict=True):
            seen += [[*obs.flatten().tolist(), *policy.tolist()]] * visits
        assert sorted(seen) == sorted(expected)


# --- the agents ---


@pytest.mark.parametrize("local_updates", [1, 2])
def test_the_reference_of_all_agents_is_the_central_policy_of_the_last_round(
    local_updates, tmp_path, monkeypatch
):
    """As it was after its own training in the first iteration of the interval."""
    trained = []
    updates = []
    record(monkeypatch, "distil", lambda _, central, *__: trained.append(copy.deepcopy(central)))
    record(monkeypatch, "update", lambda _, *arguments: updates.append(arguments[3]))
    folder = train(tmp_path, iterations=5, local_updates=local_updates)
    assert len(trained) == 5
    assert len(updates) == 15
    for number, batch in enumerate(updates):
        iteration = number // 3  # from 0
        central = trained[iteration - iteration % local_updates]
        expected = central.predict(batch["obs"])[0].log_softmax(-1)
        assert torch.equal(batch["reference"], expected)
        assert not batch["reference"].requires_grad
    stored = load_file(folder / "central.safetensors")
    torch.testing.assert_close(stored, dict(trained[-1].state_dict()), rtol=0, atol=0)
    rounds = [int(row["rounds"]) for row in rows_of(folder)[::3]]
    assert rounds == ([1, 2, 3, 4, 5] if local_updates == 1 else [1, 1, 2, 2, 3])
    summary = summary_of(folder)
    assert summary["communication_rounds"] == rounds[-1]


def test_the_coefficient_falls_to_0(tmp_path, monkeypatch):
    """In the agents' updates and in the log."""
    given = []
    record(monkeypatch, "update", lambda _, *arguments: given.append(arguments[4]))
    folder = train(tmp_path, iterations=3, kl_coef=0.6, kl_schedule="linear")
    expected = [0.6] * 3 + [0.4] * 3 + [0.2] * 3  # of three agents each
    assert given == pytest.approx(expected)
    logged = [float(row["kl_coefficient"]) for row in rows_of(folder)]
    assert logged == pytest.approx(expected)


def test_coefficient_zero_is_isolated_ppo(tmp_path):
    """Bit for bit, in the metrics that do not depend on the central policy."""
    changes = {"kl_coef": 0.0, "iterations": 4}
    ours = train(tmp_path / "distral", **changes)
    isolated = train(tmp_path / "isolated", PRPO_MINIGRID, communicator="identity", **changes)
    weights = weights_of(ours)
    expected = weights_of(isolated)
    assert len(weights) == 3
    for i in weights:
        assert torch.equal(weights[i], expected[i])
    apart = OWN | {"kl_reference", "exp_name", "rounds"}
    for row, other in zip(rows_of(ours), rows_of(isolated), strict=True):
        assert row.keys() - other.keys() == OWN
        assert other.keys() <= row.keys()
        assert all(row[name] == other[name] for name in other.keys() - apart)
    pulled = weights_of(train(tmp_path / "pulled", iterations=4))
    assert not torch.equal(pulled[0], weights[0])


def test_agents_may_have_networks_of_different_sizes(tmp_path):
    """The central policy has the default size whatever theirs is, and is learned well."""
    folder = train(tmp_path, hidden_sizes=(16, 128, 8), iterations=3)
    central = load_file(folder / "central.safetensors")
    sizes = [len(load_file(folder / f"agent_{i}.safetensors")["actor.weight"][0]) for i in range(3)]
    assert sizes == [16, 128, 8]
    assert central["actor.weight"].shape == (7, 128)
    assert 0 < float(rows_of(folder)[-1]["distillation"]) < 0.1


def test_an_agent_that_diverges_is_left_out(tmp_path, monkeypatch):
    """Of the others' central policy, which stays finite; when all have, nothing is learned."""
    for number in (1, 3):
        updates = []

        def spoil(_, agent, *__, number=number, updates=updates):
            updates.append(agent)
            if len(updates) in range(4, 4 + number):
                torch.nn.init.constant_(agent.actor.bias, torch.nan)

        with monkeypatch.context() as context:
            record(context, "update", spoil)
            folder = train(tmp_path / str(number), iterations=4)
        rows = rows_of(folder)[::3]
        assert [int(row["dropped"]) for row in rows] == [0, 0, number, number]
        assert [row["distillation"] == "nan" for row in rows] == [False] * 2 + [number == 3] * 2
        summary = summary_of(folder)
        assert summary["diverged"] == list(range(number))
        for weights in load_file(folder / "central.safetensors").values():
            assert weights.isfinite().all()
        for i, weights in weights_of(folder).items():
            assert weights.isfinite().all() == (i >= number)


# --- runs ---


@pytest.mark.parametrize("last_checkpoint", [2, 4])
def test_a_resumed_run_is_the_uninterrupted_one(last_checkpoint, crashing, tmp_path):
    """In the middle of an interval and at its end: agents, central policy, its optimizer, and what
    agents have of it; bit for bit.
    """
    settings = {"local_updates": 3, "eval_episodes": 1}
    whole = train(tmp_path / "whole", **settings)
    args = tiny(DISTRAL_MINIGRID, tmp_path / "parts", **settings)
    crashing("complete", 2, last_checkpoint, lambda: distral_minigrid.main(args))
    folder = only_run(tmp_path / "parts")
    resume(DISTRAL_MINIGRID, folder)
    assert_same_run(folder, whole)
    for name in ("central.safetensors", "evaluations.csv", "communicator.csv"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()
    assert len(table_of(folder, "evaluations")) == 3


def test_metrics_are_those_of_pr_ppo(whole_run):
    """And one of its own; C is uniform, and policies are not compared on public states."""
    ours, theirs = (scalars_of(whole_run(script)) for script in (DISTRAL_MINIGRID, PRPO_MINIGRID))
    distances = {tag for tag in theirs if tag.startswith("distances/")}
    assert len(distances) == 3
    assert ours.keys() - theirs.keys() == {"losses/distillation"}
    assert theirs.keys() - ours.keys() == distances
    assert all(value == pytest.approx(1 / 3) for _, value in ours["communicator/c_0_1"])
    assert {value for _, value in ours["communication/bytes"]} == {0}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"communicator": "reward"}, "--communicator reward: has no effect"),
        ({"topology": "ring"}, "--topology ring: has no effect"),
        ({"top_k": 1}, "--top-k 1: has no effect"),
        ({"self_preference": 0.5}, "--self-preference 0.5: has no effect"),
        ({"communicator_temperature": 2.0}, "--communicator-temperature 2.0: has no effect"),
        ({"central_epochs": 0}, "--central-epochs 0: must be at least 1"),
        ({"central_learning_rate": 0.0}, "--central-learning-rate 0.0: must be positive"),
        ({"env_id": "MiniGrid-Door-v0"}, "--env-id MiniGrid-Door-v0: must be a MiniGrid"),
        ({"num_minibatches": 3}, "--num-minibatches 3: must divide"),
    ],
    ids=str,
)
def test_bad_input_ends_in_one_line(changes, line, tmp_path):
    words = flags(DISTRAL_MINIGRID, tmp_path / "runs", **changes)
    assert refusal(DISTRAL_MINIGRID.parse_args, words).startswith(line)
    assert not (tmp_path / "runs").exists()


def test_agents_in_several_processes_are_refused(tmp_path, monkeypatch):
    """Those of torchrun by the arguments, those of a launcher by what it is told."""
    words = flags(DISTRAL_MINIGRID, tmp_path / "runs")
    args = DISTRAL_MINIGRID.parse_args(words)
    with monkeypatch.context() as context:
        context.setenv("RANK", "0")
        context.setenv("WORLD_SIZE", "3")
        line = refusal(DISTRAL_MINIGRID.parse_args, words)
    assert line.startswith("--num-agents 3: must be in one process")
    needs = told_to_launcher(monkeypatch, distral_minigrid.main, args)
    assert needs == (False, "", "the central policy learns from the states of all agents")
    assert not (tmp_path / "runs").exists()


def test_a_coefficient_without_effect_is_said(tmp_path, capsys):
    for kl_coef, number_of_lines in ((0.0, 1), (0.5, 0)):
        DISTRAL_MINIGRID.parse_args(flags(DISTRAL_MINIGRID, tmp_path, kl_coef=kl_coef))
        assert capsys.readouterr().out.count("--kl-coef 0: the central") == number_of_lines


def test_three_agents_learn_a_room(tmp_path):
    """In which untrained ones seldom reach the goal."""
    changes = {"seed": 11, "num_envs": 4, "total_timesteps": 28 * 256, "local_updates": 1}
    changes |= {"update_epochs": 4, "num_minibatches": 4, "save_every": 40, "eval_episodes": 12}
    folder = train(tmp_path, **changes)
    summary = summary_of(folder)
    task = summary["settings"]["env_id"]
    args = distral_minigrid.Args(**summary["settings"])
    untrained = DISTRAL_MINIGRID.evaluate(args, Agent(7), task, list(range(12)), 11)
    assert untrained.mean() < 0.6
    assert all(agent[task]["mean"] > 0.8 for agent in summary["evaluation"]["agents"])
