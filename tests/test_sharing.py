"""Sharing: networks of different sizes, surrogate, isolated agents."""

import itertools
import math

import numpy as np
import pytest
import torch
from helpers import (
    FEDAVG_MINIGRID,
    PRPO_MINIGRID,
    PRTRPO_MINIGRID,
    REPOSITORY,
    SLOW_ATARI,
    assert_same_run,
    assert_weights,
    flags,
    on,
    only_run,
    resume,
    run_ranks,
    summary_of,
    tiny,
    train,
    weights_of,
)
from torch.distributions import Categorical

import communicators
from communicators import Exchange

MIXED = {
    "num_agents": 3,
    "hidden_sizes": (32, 16, 24),
    "communicator": "surrogate",
}
GATED = {"communicator": "uniform", "gate": "value"}


# --- networks of different sizes, surrogate: with resume and on several ranks ---


MIXED_RUNS = {
    "PR-PPO, surrogate": (PRPO_MINIGRID, MIXED | {"kl_schedule": "linear"}),
    "PR-PPO, gated": (PRPO_MINIGRID, MIXED | GATED),
    "PR-TRPO, gated": (PRTRPO_MINIGRID, MIXED | GATED),
    "isolated": (PRPO_MINIGRID, MIXED | {"communicator": "identity"}),
    "FedAvg, rank-reward": (
        FEDAVG_MINIGRID,
        MIXED | {"communicator": "rank-reward", "hidden_sizes": (16, 16, 16)},
    ),
    "pulled to averages, similarity": (
        FEDAVG_MINIGRID,
        MIXED | {"communicator": "similarity", "hidden_sizes": (16, 16, 16), "prox_coef": 0.5},
    ),
}


SLOW_RUNS = ("isolated", "pulled to averages, similarity")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.slow if name in SLOW_RUNS else ())
        for name in MIXED_RUNS
    ],
)
def mixed(request):
    """A script and settings.

    One communicator depends on the agents' last rollouts, another on their last known returns.
    """
    script, settings = MIXED_RUNS[request.param]
    short = {"iterations": 5, "local_updates": 1, "num_steps": 32, "eval_episodes": 0}
    return script, settings | short


@pytest.fixture(scope="module")
def mixed_run(mixed, tmp_path_factory):
    """One process, never interrupted."""
    script, settings = mixed
    folder = tmp_path_factory.mktemp("mixed")
    return train(script, folder, **settings)


def test_mixed_agents_resume_exactly(mixed, mixed_run, crashing, tmp_path):
    script, settings = mixed
    args = tiny(script, tmp_path, **settings)
    crashing("complete", 0, 4, lambda: script.main(args))
    folder = only_run(tmp_path)
    resume(script, folder)
    assert_same_run(folder, mixed_run)
    assert (folder / "communicator.csv").read_text() == (mixed_run / "communicator.csv").read_text()


def test_mixed_agents_train_alike_on_three_ranks(mixed, mixed_run, tmp_path):
    """Each rank holds one agent, whose index there differs from its index in the group."""
    script, settings = mixed
    args = flags(script, tmp_path / "runs", **settings | {"hidden_sizes": ""})
    at = args.index("--hidden-sizes")
    args[at + 1 : at + 2] = map(str, settings["hidden_sizes"])
    run_ranks(3, REPOSITORY / f"{script.__name__}.py", *args, cwd=tmp_path)
    folder = only_run(tmp_path / "runs")
    assert_same_run(folder, mixed_run)
    assert summary_of(folder)["communication_bytes"] == summary_of(mixed_run)["communication_bytes"]
    # Also what is known of distances between policies
    assert (folder / "communicator.csv").read_text() == (mixed_run / "communicator.csv").read_text()


@on([PRPO_MINIGRID, PRTRPO_MINIGRID])
def test_two_agents_exchange_and_a_third_is_isolated(script, tmp_path):
    """--communicator FILE: an agent without peers trains like an isolated one, bit for bit.

    Nothing is sent to or by it.
    """
    (tmp_path / "pair.csv").write_text("0.5,0.5,0\n0.5,0.5,0\n0,0,1\n")
    weights = {}
    settings = {"local_updates": 1, "eval_episodes": 0, "iterations": 3}
    settings["hidden_sizes"] = (16, 16, 16)
    for name, communicator in (("pair", str(tmp_path / "pair.csv")), ("isolated", "identity")):
        changes = settings | {"communicator": communicator}
        weights[name] = weights_of(train(script, tmp_path / name, **changes))
    assert torch.equal(weights["pair"][2], weights["isolated"][2])
    for i in range(2):
        assert not torch.allclose(weights["pair"][i], weights["isolated"][i], atol=1e-6)
    summary = summary_of(only_run(tmp_path / "pair"))
    assert summary["communication_rounds"] == 3
    size = len(communicators.flatten(PRPO_MINIGRID.new_agent(hidden=16)))  # PR-TRPO's policy, too
    assert summary["communication_bytes"] == 3 * 2 * size * 4  # rounds, listeners, float32


def test_row_i_of_the_surrogate_consists_of_agent_is_gains(tmp_path, monkeypatch):
    script = PRPO_MINIGRID
    gains = torch.tensor([[0.0, 0.1, -0.2], [0.05, 0.0, 0.02], [-0.3, -0.1, 0.0]])
    script.patch(monkeypatch, "estimate_gains", lambda i, *_: gains[i])
    settings = {
        "communicator": "surrogate",
        "communicator_temperature": 2.0,
        "eval_episodes": 0,
        "iterations": 1,
    }
    folder = train(script, tmp_path, num_agents=3, local_updates=1, **settings)
    rows = np.genfromtxt(folder / "communicator.csv", delimiter=",", names=True)
    expected = (5 * gains).softmax(-1).flatten().tolist()
    assert rows["weight"].tolist() == pytest.approx(expected, abs=1e-5)


def test_an_agent_reports_its_last_known_mean_return_and_nothing_else(
    crashing, tmp_path, monkeypatch
):
    """Rounds have no, one or several episodes, whose returns are given here.

    A crash in the middle of an interval changes nothing.
    """
    script = PRPO_MINIGRID
    returns = {
        0: [[5.0, 7.0], [9.0], [9.0, 9.5], [], [8.0], [6.0]],  # large and noisy
        1: [[], [], [2.5], [3.0, 3.5], [3.0], []],  # begins late
        2: [[-1.0], [-1.5], [], [], [-3.0], [-2.0]],  # keeps its last mean
    }
    rollout = script.rollout
    gather = Exchange.all_gather
    make = script.make_communicator
    iterations = itertools.count()
    reported = []
    exchanged = []

    def give_episodes(*inputs):
        iteration = next(iterations)
        given = [[(value, 9.0) for value in returns[k][iteration]] for k in returns]
        return [(data, given[k]) for k, (data, _) in enumerate(rollout(*inputs))]

    def record_returns(args, returns=None, *rest):
        if rest:  # in a round
            reported.append(returns.tolist())
        return make(args, returns, *rest)

    def record_numbers(exchange, local):
        if local.shape[1] == 1 and local.is_floating_point():
            exchanged.append(local[:, 0].tolist())
        return gather(exchange, local)

    script.patch(monkeypatch, "rollout", give_episodes)
    monkeypatch.setattr(Exchange, "all_gather", record_numbers)
    script.patch(monkeypatch, "make_communicator", record_returns)
    settings = {
        "communicator": "softmax-reward",
        "iterations": 6,
        "local_updates": 2,
        "save_every": 1,
    }
    crashing(
        "complete", 2, 3, lambda: script.main(tiny(script, tmp_path, **settings, eval_episodes=0))
    )
    folder = only_run(tmp_path)
    resume(script, folder)
    means = [[7.0, math.nan, -1.25], [9.25, 3.0, -1.25], [7.0, 3.0, -2.5]]
    expected = [pytest.approx(row, nan_ok=True) for row in means]
    assert reported == expected
    assert exchanged == expected
    rows = np.genfromtxt(folder / "communicator.csv", delimiter=",", names=True)
    weights = communicators.softmax_reward(torch.tensor(means[-1])).flatten().tolist()
    assert rows["weight"][-9:].tolist() == pytest.approx(weights, abs=1e-5)


def test_gains_of_peers_are_estimated_on_the_agents_own_rollout():
    script = PRPO_MINIGRID
    agents = [script.new_agent() for _ in range(3)]
    for agent in agents:
        torch.nn.init.orthogonal_(agent.actor.weight)
    obs = script.random_obs(6)
    behaviour = agents[0].predict(obs)[0].log_softmax(-1)
    states = torch.randint(6, (60,))
    actions = Categorical(logits=behaviour[states]).sample()
    logprobs = behaviour[states].gather(1, actions[:, None])[:, 0]
    batch = {
        "obs": obs,
        "policy": behaviour,
        "obs_inds": states,
        "actions": actions,
        "logprobs": logprobs,
        "advantages": torch.randn(60),
    }
    expected = []
    centred = batch["advantages"] - batch["advantages"].mean()
    advantages = centred / batch["advantages"].std(correction=0)
    for agent in agents:
        policy = Categorical(logits=agent.predict(batch["obs"])[0][batch["obs_inds"]])
        taken = policy.log_prob(batch["actions"])
        expected.append(((taken - batch["logprobs"]).exp().clamp(max=10) * advantages).mean())
    gains = script.estimate_gains(0, batch, dict(enumerate(agents)), 3)
    torch.testing.assert_close(gains, torch.stack(expected), rtol=1e-4, atol=1e-5)
    assert gains[0] == 0
    assert gains[1:].abs().min() > 1e-4
    of_last = script.estimate_gains(2, batch, {0: agents[0]}, 3)
    assert of_last[2] == 0
    assert of_last[1].isnan()
    assert of_last[0] == pytest.approx(expected[0].item(), abs=1e-5)


# --- clones ---


@on([PRPO_MINIGRID, SLOW_ATARI])
@pytest.mark.usefixtures("smooth_adam")
def test_clones_with_a_round_after_every_iteration_learn_like_isolated_agents(
    script, tmp_path, monkeypatch
):
    """Clones have equal policies, so only the age of the snapshots can change their training.

    With a round after every iteration snapshots are current. With one after every third, the
    reference pulls towards older policies.
    """
    original = communicators.derive_seed
    weights = {}
    script.patch(monkeypatch, "derive_seed", lambda seed, agent, *key: original(seed, 0, *key))
    settings = {"num_agents": 2, "eval_episodes": 0, "kl_coef": 5.0, "kl_direction": "reverse"}
    settings["num_envs"] = 2
    if script.family == "MiniGrid":
        settings["num_steps"] = 32
    for communicator, interval in (("identity", 1), ("uniform", 1), ("uniform", 3)):
        name = f"{communicator}{interval}"
        changes = {"communicator": communicator, "local_updates": interval}
        args = tiny(script, tmp_path / name, **settings, **changes)
        script.main(args)
        first, second = weights_of(only_run(tmp_path / name)).values()
        assert torch.equal(first, second)
        weights[name] = first
    assert_weights(weights["uniform1"], weights["identity1"])
    with pytest.raises(AssertionError):
        assert_weights(weights["uniform3"], weights["identity1"])
