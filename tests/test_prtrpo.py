"""PR-TRPO: the step of eq. 9 against other solvers, runs, and the theory on small problems."""

import copy
import json
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn as nn
from helpers import (
    PRTRPO_MINIGRID,
    REPOSITORY,
    assert_same_run,
    flags,
    gate_by_hand,
    notes_of,
    only_run,
    resume,
    rows_of,
    run_ranks,
    summary_of,
    tiny,
    train,
    write_matrix,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from sb3_contrib import TRPO
from scipy.optimize import minimize
from torch.distributions import Categorical, kl_divergence
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import communicators
import prpo_minigrid
import prtrpo_minigrid
from prtrpo_minigrid import NORMAL, RECOVERY, REJECTED

EXACT = {"cg_iters": 300, "norm_adv": False}


class Small(nn.Module):
    """A policy in double precision: [states, features] -> (logits [states, actions], nothing)."""

    def __init__(self, features=3, hidden=5, actions=4):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, actions)
        ).double()

    def forward(self, obs):
        return self.layers(obs), None


def problem(seed, distance, policy=None, states=6, samples=80, actions=4):
    """A policy, its samples, and a reference at some distance: (policy, batch)."""
    torch.manual_seed(seed)
    policy = policy or Small(actions=actions)
    obs = torch.randn(states, 3, dtype=torch.double)
    with torch.no_grad():
        behaviour = policy(obs)[0].log_softmax(-1)
    peer = torch.randn(states, actions, dtype=torch.double).log_softmax(-1)
    weights = torch.tensor([1 - distance, distance], dtype=torch.double)
    reference = (
        communicators.mix_log_probs(torch.stack((behaviour, peer)), weights)
        if distance
        else behaviour
    )
    rows = torch.randint(states - 1, (samples,))  # one of the observations was not valid
    taken = Categorical(logits=behaviour[rows]).sample()
    batch = {
        "obs": obs,
        "reference": reference,
        "obs_inds": rows,
        "actions": taken,
        "advantages": torch.randn(samples, dtype=torch.double),
    }
    return policy, batch | {"logprobs": behaviour[rows, taken]}


def on_samples(policy, batch, reference=None):
    """Surrogate and KL of eq. 9 as written: means over all samples, none of them merged."""
    obs = batch["obs"]
    reference = batch["reference"] if reference is None else reference
    probs = policy(obs[batch["obs_inds"]])[0].softmax(-1)
    ratio = probs.gather(1, batch["actions"][:, None])[:, 0] / batch["logprobs"].exp()
    kl = kl_divergence(Categorical(logits=reference[batch["obs_inds"]]), Categorical(probs))
    return (ratio * batch["advantages"]).mean(), kl.mean()


def dense_step(policy, batch, epsilon, damping):
    """g, b, damped H, c, slack, step and recovery step, from all samples and a dense solve."""
    start = {name: parameter.detach() for name, parameter in policy.named_parameters()}
    split = [parameter.numel() for parameter in start.values()]

    def at(flat):
        pieces = zip(start.items(), flat.split(split), strict=True)
        parameters = {name: piece.view_as(parameter) for (name, parameter), piece in pieces}
        return lambda obs: torch.func.functional_call(policy, parameters, (obs,))

    flat = parameters_to_vector(start.values())
    before = policy(batch["obs"])[0].log_softmax(-1).detach()
    g = torch.func.grad(lambda x: on_samples(at(x), batch)[0])(flat)
    b = torch.func.grad(lambda x: on_samples(at(x), batch)[1])(flat)
    fisher = torch.func.hessian(lambda x: on_samples(at(x), batch, before)[1])(flat)
    H = fisher + damping * torch.eye(len(flat), dtype=torch.double)
    c = on_samples(policy, batch)[1].item()
    u = torch.linalg.solve(H, b)
    s = torch.linalg.solve(H, g)
    slack = epsilon - c + (b @ u).item() / 2
    step = math.sqrt(2 * slack / (g @ s).item()) * s - u if slack > 0 else -u
    return g, b, H, c, slack, step, -u


# --- the step ---


@settings(max_examples=60)
@given(seed=st.integers(0, 2**31), size=st.integers(1, 6), epsilon=st.floats(0.01, 2.0))
def test_the_closed_form_is_what_a_generic_solver_finds(seed, size, epsilon):
    """scipy maximises g x in the region c + b x + x H x / 2 <= epsilon.

    If the region is empty, the step minimises the left side.
    """
    generator = np.random.default_rng(seed)
    root = generator.normal(size=(size, size))
    H = root @ root.T + 0.3 * np.eye(size)
    g, b = generator.normal(size=(2, size))
    c = generator.uniform(0, 1.5)

    def excess(x):
        return c + b @ x + x @ H @ x / 2 - epsilon

    tensors = (torch.from_numpy(x) for x in (g, b))
    product = torch.from_numpy(H).__matmul__
    step, centre, slack = prtrpo_minigrid.solve(product, *tensors, c, epsilon, 10 * size)
    step = step.numpy()
    centre = centre.numpy()
    nearest = minimize(excess, np.zeros(size), jac=lambda x: b + H @ x, tol=1e-10)
    assert excess(centre) == pytest.approx(nearest.fun, abs=1e-4)
    assert slack == pytest.approx(-nearest.fun, abs=1e-4)
    if slack <= 0:
        assert np.array_equal(step, centre)
    elif slack > 1e-2:
        region = {"type": "ineq", "fun": lambda x: -excess(x), "jac": lambda x: -(b + H @ x)}
        options = {"maxiter": 1000, "ftol": 1e-12}
        best = minimize(
            lambda x: -g @ x,
            nearest.x,
            jac=lambda x: -g,
            constraints=region,
            method="SLSQP",
            options=options,
        )
        assert excess(best.x) < 1e-6
        assert excess(step) == pytest.approx(0, abs=1e-3)
        assert g @ step == pytest.approx(g @ best.x, rel=2e-3, abs=2e-3)


@pytest.mark.parametrize("distance", [0.0, 0.3])
def test_products_over_distinct_observations_are_those_of_the_dense_matrix(distance):
    """H is the Hessian over all samples at the policy itself, whatever the reference is."""
    policy, batch = problem(0, distance)
    g, b, H, *_ = dense_step(policy, batch, 0.01, damping=0.1)
    rows, counts = batch["obs_inds"].unique(return_counts=True)
    parameters = list(policy.parameters())
    product = prtrpo_minigrid.make_fisher_product(
        policy(batch["obs"][rows])[0], counts / counts.sum(), parameters, 0.1
    )
    for v in torch.randn(5, len(g), dtype=torch.double):
        torch.testing.assert_close(product(v), H @ v, rtol=1e-5, atol=1e-7)
    assert (b.norm() < 1e-12) == (distance == 0)


CASES = {
    "TRPO": (0.0, 0.01),
    "inside": (0.2, 0.05),
    "outside, with slack": (0.4, 0.05),
    "no slack": (0.6, 1e-3),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_that_of_a_dense_solve(case):
    """With C = I the step is TRPO's; references further off give the other cases.

    The damping is so large that all steps are accepted.
    """
    distance, epsilon = CASES[case]
    policy, batch = problem(2, distance)
    start = parameters_to_vector(policy.parameters()).detach()
    *_, c, slack, step, _ = dense_step(policy, batch, epsilon, damping=0.3)
    args = prtrpo_minigrid.Args(damping_coef=0.3, **EXACT)
    step_metrics = prtrpo_minigrid.improve(policy, batch, epsilon, args)
    torch.testing.assert_close(
        parameters_to_vector(policy.parameters()) - start, step, rtol=1e-3, atol=1e-5
    )
    assert (
        step_metrics["policy/kl_reference_before"],
        step_metrics["trust_region/slack"],
    ) == pytest.approx((c, slack), rel=1e-4, abs=1e-8)
    assert step_metrics["trust_region/step"] == (RECOVERY if case == "no slack" else NORMAL)
    assert (c > epsilon) == (case in ("outside, with slack", "no slack"))
    assert (slack > 0) == (case != "no slack")
    if distance == 0:
        assert abs(c) < 1e-12
        assert slack == pytest.approx(epsilon)


def test_a_step_moves_parameters_and_no_buffer():
    """A policy with a buffer takes the same step as one without."""
    policy, batch = problem(2, 0.2)
    counting = copy.deepcopy(policy)
    counting.register_buffer("count", torch.tensor([3.0, 4.0]))
    for network in (policy, counting):
        start = parameters_to_vector(network.parameters()).detach()
        step_metrics = prtrpo_minigrid.improve(network, batch, 0.05, prtrpo_minigrid.Args(**EXACT))
        assert step_metrics["trust_region/step"] == NORMAL
        assert not torch.equal(parameters_to_vector(network.parameters()), start)
    moved, expected = (parameters_to_vector(x.parameters()) for x in (counting, policy))
    assert torch.equal(moved, expected)
    assert counting.count.tolist() == [3.0, 4.0]


def test_isolated_agents_take_the_steps_of_sb3_contrib():
    """The same network and rollout give the same parameters, line search included."""
    env = gym.make("CartPole-v1")
    options = {"net_arch": {"pi": [8], "vf": [8]}}
    # With the second pair the first candidates are rejected
    for epsilon, damping in ((0.01, 0.1), (0.3, 1e-3)):
        model = TRPO(
            "MlpPolicy",
            env,
            n_steps=256,
            seed=3,
            target_kl=epsilon,
            cg_damping=damping,
            n_critic_updates=1,
            learning_rate=0.0,
            policy_kwargs=options,
            device="cpu",
        )
        nn.init.orthogonal_(model.policy.action_net.weight)
        update = model.train
        model.train = lambda: None
        model.learn(256)
        actor = copy.deepcopy(
            nn.Sequential(model.policy.mlp_extractor.policy_net, model.policy.action_net)
        )
        (data,) = model.rollout_buffer.get(batch_size=None)
        start = parameters_to_vector(actor.parameters()).detach()

        class Policy(nn.Module):
            def __init__(self, actor):
                super().__init__()
                self.actor = actor

            def forward(self, obs):
                return self.actor(obs), None

        policy = Policy(actor)
        steps = torch.arange(256)
        batch = {
            "obs_inds": steps,
            "actions": data.actions.long().flatten(),
            "logprobs": data.old_log_prob,
        }
        batch["advantages"] = data.advantages
        batch["obs"] = data.observations
        batch["reference"] = policy(data.observations)[0].log_softmax(-1).detach()
        args = prtrpo_minigrid.Args(damping_coef=damping, cg_iters=15)
        metrics = prtrpo_minigrid.improve(policy, batch, epsilon, args)
        update()
        ours = parameters_to_vector(actor.parameters()) - start
        trained = nn.Sequential(model.policy.mlp_extractor.policy_net, model.policy.action_net)
        theirs = parameters_to_vector(trained.parameters()) - start
        assert metrics["trust_region/step"] == NORMAL
        assert theirs.norm() > 0.05
        assert (ours - theirs).norm() < 0.02 * theirs.norm()
        # The whole step would move the policy by about Pinsker's bound
        shrunk = math.sqrt(2 * epsilon) / metrics["policy/tv_update"]
        assert shrunk > 1


def searched(policy, step, centre, slack, c, epsilon, args, batch):
    """The line search, naively: (kind, accepted step, number of misleading candidates).

    A misleading candidate lies inside the region but does not raise the surrogate.
    """
    start = parameters_to_vector(policy.parameters()).detach().clone()
    misleading = 0

    def at(step):
        vector_to_parameters(start + step, policy.parameters())
        values = [value.item() for value in on_samples(policy, batch)]
        vector_to_parameters(start, policy.parameters())
        return values

    lengths = [args.backtrack_coef**k for k in range(args.backtrack_iters)]
    origin = centre if c > epsilon else torch.zeros_like(centre)
    if slack > 0:
        for length in lengths:
            candidate = origin + length * (step - origin)
            surrogate, kl = at(candidate)
            if kl <= epsilon:
                if surrogate > at(origin)[0]:
                    return NORMAL, candidate, misleading
                misleading += 1
    if c > epsilon:
        for length in lengths:
            if at(length * centre)[1] < c:
                return RECOVERY, length * centre, misleading
    return REJECTED, torch.zeros_like(centre), misleading


def test_the_constraint_holds_after_every_accepted_step():
    """On all samples: normal steps end inside and gain, recoveries reduce the KL, others stay.

    Each kind occurs.

    Little damping and large regions make the first candidates bad, by KL or by surrogate.
    """
    kinds = {NORMAL: 0, RECOVERY: 0, REJECTED: 0}
    shorter = 0
    all_misleading = 0
    for seed in range(60):
        generator = np.random.default_rng(seed)
        policy, batch = problem(seed, generator.choice([0.0, 0.2, 0.5, 0.9]))
        with torch.no_grad():
            for misleading in policy.parameters():
                misleading.mul_(2.0)  # far from where the model is good
        behaviour = policy(batch["obs"])[0].log_softmax(-1).detach()
        batch["logprobs"] = behaviour[batch["obs_inds"], batch["actions"]]
        epsilon = 10 ** generator.uniform(-3, 0.7)
        args = prtrpo_minigrid.Args(
            damping_coef=1e-3, backtrack_iters=int(generator.integers(1, 9)), **EXACT
        )
        start = parameters_to_vector(policy.parameters()).detach().clone()
        first, c = (value.item() for value in on_samples(policy, batch))
        *_, slack, step, centre = dense_step(policy, batch, epsilon, damping=1e-3)
        kind, expected_change, misleading = searched(
            policy, step, centre, slack, c, epsilon, args, batch
        )
        metrics = prtrpo_minigrid.improve(policy, batch, epsilon, args)
        change = parameters_to_vector(policy.parameters()).detach() - start
        assert metrics["trust_region/step"] == kind, seed
        assert (change - expected_change).norm() <= 0.02 * expected_change.norm(), seed
        surrogate, kl = (value.item() for value in on_samples(policy, batch))
        if kind == NORMAL:
            assert kl <= epsilon + 1e-12
            assert surrogate > first or c > epsilon
        elif kind == RECOVERY:
            assert epsilon < c
            assert kl < c
        else:
            assert not change.any()
            assert surrogate == pytest.approx(first)
        kinds[kind] += 1
        all_misleading += misleading
        shorter += kind == NORMAL and bool((change - step).norm() > 0.05 * step.norm())

        after = policy(batch["obs"])[0].log_softmax(-1).detach()
        reported = [
            metrics[name]
            for name in (
                "policy/kl_reference_before",
                "policy/kl_reference_after",
                "losses/policy_loss",
                "policy/tv_update",
            )
        ]
        rows = batch["obs_inds"]
        movements = [
            ((after.exp() - x.exp()).abs().sum(-1) / 2)[rows].mean().item()
            for x in (behaviour, batch["reference"])
        ]
        assert reported == pytest.approx([c, kl, -surrogate, movements[0]], rel=1e-5, abs=1e-8)
        entropy = Categorical(logits=after[rows]).entropy().mean().item()
        assert (metrics["policy/tv_reference"], metrics["losses/entropy"]) == pytest.approx(
            (movements[1], entropy), rel=1e-5
        )
    assert min(kinds.values()) >= 3, kinds
    assert shorter >= 5
    assert all_misleading >= 2


def test_a_policy_that_is_no_number_takes_no_step():
    policy, batch = problem(0, 0.3)
    before = parameters_to_vector(policy.parameters()).detach().clone()
    batch["advantages"][3] = torch.nan
    metrics = prtrpo_minigrid.improve(policy, batch, 0.5, prtrpo_minigrid.Args())
    assert metrics["trust_region/step"] == REJECTED
    assert metrics["policy/tv_update"] == 0
    assert math.isnan(metrics["losses/policy_loss"])
    assert torch.equal(parameters_to_vector(policy.parameters()), before)


def test_fitting_the_value_function_leaves_the_policy_alone(monkeypatch):
    """It has a network of its own; its loss is half the squared error over samples, and falls."""
    torch.manual_seed(0)
    agent = prtrpo_minigrid.Agent(prpo_minigrid.Agent(7, hidden=16))
    optimizer = torch.optim.Adam(agent.baseline.parameters(), 1e-3)
    obs = PRTRPO_MINIGRID.random_obs(9)
    states = torch.randint(9, (64,))
    batch = {"obs": obs, "obs_inds": states}
    batch["returns"] = torch.randn(9)[states] + 0.1 * torch.randn(64)
    monkeypatch.setattr(prtrpo_minigrid, "improve", lambda *_: {"step": NORMAL})
    args = prtrpo_minigrid.Args(num_minibatches=1, update_epochs=1)
    policy = copy.deepcopy(agent.policy)
    expected_loss = 0.5 * (agent(obs)[1][states] - batch["returns"]).square().mean().item()
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(60):
        given = agent, optimizer, generator, batch, 0.01, args
        step, value_loss = prtrpo_minigrid.update(*given)
        assert step == {"step": NORMAL}
        losses.append(value_loss)
    assert losses[0] == pytest.approx(expected_loss, rel=1e-5)
    assert losses[-1] < 0.5 * losses[0]
    # The loss of an update is the mean over its minibatches
    twin = copy.deepcopy(agent)
    optimizers = [torch.optim.SGD(one.baseline.parameters(), 0.0) for one in (agent, twin)]
    four = prtrpo_minigrid.Args(num_minibatches=4, update_epochs=3)
    _, of_four = prtrpo_minigrid.update(agent, optimizers[0], generator, batch, 0.01, four)
    _, of_one = prtrpo_minigrid.update(twin, optimizers[1], generator, batch, 0.01, args)
    assert of_four == pytest.approx(of_one, rel=1e-5)
    for parameter, other in zip(agent.policy.parameters(), policy.parameters(), strict=True):
        assert torch.equal(parameter, other)
    assert torch.equal(agent(obs)[0], policy(obs)[0])
    assert not torch.allclose(agent(obs)[1], policy(obs)[1])
    # A gradient that is clipped
    batch["returns"] = batch["returns"] + 9
    optimizer = torch.optim.SGD(agent.baseline.parameters(), 1.0)
    clipped = prtrpo_minigrid.Args(num_minibatches=1, update_epochs=1, max_grad_norm=0.05)
    before = parameters_to_vector(agent.baseline.parameters()).detach()
    prtrpo_minigrid.update(agent, optimizer, generator, batch, 0.01, clipped)
    norm = (parameters_to_vector(agent.baseline.parameters()).detach() - before).norm()
    assert float(norm) == pytest.approx(0.05, rel=1e-3)


def test_a_value_gradient_that_is_not_finite_makes_no_step(monkeypatch):
    """The weights and Adam's moments stay as they are, and the loss is reported as NaN."""
    torch.manual_seed(0)
    agent = prtrpo_minigrid.Agent(prpo_minigrid.Agent(7, hidden=16))
    optimizer = torch.optim.Adam(agent.baseline.parameters(), 1e-3)
    batch = {"obs": PRTRPO_MINIGRID.random_obs(8), "obs_inds": torch.arange(8)}
    batch["returns"] = torch.randn(8)
    monkeypatch.setattr(prtrpo_minigrid, "improve", lambda *_: {})
    args = prtrpo_minigrid.Args(num_minibatches=1, update_epochs=2)
    generator = torch.Generator().manual_seed(0)
    given = agent, optimizer, generator, batch, 0.01, args
    minibatches = []
    agent.baseline.register_forward_pre_hook(lambda *_: minibatches.append(0))
    assert math.isfinite(prtrpo_minigrid.update(*given)[1])
    assert len(minibatches) == 2
    weights = parameters_to_vector(agent.baseline.parameters()).detach().clone()
    moments = copy.deepcopy(optimizer.state_dict()["state"])
    next(agent.baseline.parameters()).register_hook(lambda gradient: gradient * torch.inf)
    assert math.isnan(prtrpo_minigrid.update(*given)[1])
    assert len(minibatches) == 3
    assert torch.equal(parameters_to_vector(agent.baseline.parameters()), weights)
    torch.testing.assert_close(optimizer.state_dict()["state"], moments, rtol=0, atol=0)


# --- runs ---

# Agents that differ, and whose epsilons depend on all agents' last updates. Delta
# is too small for any update, but epsilon has a floor: some updates of each agent exceed the bound
MIXED = {
    "num_agents": 3,
    "hidden_sizes": (32, 16, 24),
    "communicator": "surrogate",
    "local_updates": 1,
    "delta": 0.01,
    "epsilon_min": 1e-3,
}
QUICK = {"hidden_sizes": (16, 16, 16), "local_updates": 1, "eval_episodes": 0}


@pytest.fixture(scope="module")
def mixed_run(tmp_path_factory):
    """One process, never interrupted."""
    folder = tmp_path_factory.mktemp("mixed")
    return train(PRTRPO_MINIGRID, folder, **MIXED)


# Where epsilon depends on what the last updates of all agents did, instead of on its minimum
BOUNDED = MIXED | {"delta": 0.2, "epsilon_min": 1e-6, "iterations": 3, "eval_episodes": 0}


def test_resume_after_a_crash_equals_a_whole_run(crashing, tmp_path):
    """N + resume + N = 2N, bit for bit.

    This includes the movements that set the next epsilon.
    """
    changes = BOUNDED | {"iterations": 6}
    whole = train(PRTRPO_MINIGRID, tmp_path / "whole", **changes)
    args = tiny(PRTRPO_MINIGRID, tmp_path / "parts", **changes)
    crashing("complete", 0, 4, lambda: prtrpo_minigrid.main(args))
    folder = only_run(tmp_path / "parts")
    resume(PRTRPO_MINIGRID, folder)
    assert_same_run(folder, whole)
    epsilons = {row["iteration"]: float(row["epsilon"]) for row in rows_of(whole)}
    assert len(set(epsilons.values())) == 6


@pytest.mark.slow
def test_three_ranks_train_like_one_process(mixed_run, tmp_path):
    """Also where what ranks report sets the next epsilon of all."""
    runs = {}
    for name, changes in (("mixed", MIXED), ("bounded", BOUNDED)):
        argv = flags(PRTRPO_MINIGRID, tmp_path / name, **changes | {"hidden_sizes": ""})
        at = argv.index("--hidden-sizes")
        argv[at + 1 : at + 2] = map(str, changes["hidden_sizes"])
        runs[name] = ["prtrpo_minigrid", *argv]
    wire = REPOSITORY / "tests" / "tools" / "wire.py"
    run_ranks(3, wire, tmp_path / "{rank}.json", json.dumps(runs), cwd=tmp_path)
    bounded_run = train(PRTRPO_MINIGRID, tmp_path / "one process", **BOUNDED)
    assert_same_run(only_run(tmp_path / "bounded"), bounded_run)
    epsilons = {float(row["epsilon"]) for row in rows_of(bounded_run)}
    assert len(epsilons) == 3 and min(epsilons) > 1e-6
    folder = only_run(tmp_path / "mixed")
    assert_same_run(folder, mixed_run)
    shares = [row["share_within_bound"] for row in rows_of(mixed_run)[-3:]]
    assert len(set(shares)) > 1  # so that it matters whose is whose
    summaries = [summary_of(path) for path in (folder, mixed_run)]
    assert summaries[0]["communication_bytes"] == summaries[1]["communication_bytes"] > 0


def expected_epsilon(rows, args, gamma=1.0):
    """The schedule from the last iteration's rows of the group: (epsilon, bound)."""
    moved, apart = (
        max((float(row[name]) for row in rows), default=0.0)
        for name in ("tv_update", "tv_reference")
    )
    level = max(0.0, args.delta - gamma * moved - apart) / 2
    return max(2 * level * level, args.epsilon_min), args.delta


@pytest.mark.parametrize("communicator", ["identity", "asymmetric"])
def test_a_run_measures_moves_and_bounds_as_it_says(communicator, tmp_path, monkeypatch):
    """Every update's reference is row i of C applied to the *present* policies.

    Its epsilon is that of the schedule. C is not symmetric, and a round follows every update; an
    isolated agent's epsilon comes from
    itself alone.
    """
    matrix = (
        torch.eye(3)
        if communicator == "identity"
        else torch.tensor([[0.5, 0.4, 0.1], [0, 0.7, 0.3], [0.6, 0, 0.4]])
    )
    if communicator == "asymmetric":
        communicator = write_matrix(tmp_path / "C.csv", matrix)
    args = tiny(PRTRPO_MINIGRID, tmp_path / "runs", communicator=communicator, delta=0.2, **QUICK)
    steps = []
    numbers = {}
    improve = prtrpo_minigrid.improve

    def note(policy, batch, epsilon, args):
        numbers.setdefault(id(policy), len(numbers))  # agents come in order
        steps.append((policy, copy.deepcopy(policy), batch, epsilon))
        return improve(policy, batch, epsilon, args)

    monkeypatch.setattr(prtrpo_minigrid, "improve", note)
    prtrpo_minigrid.main(args)
    rows = rows_of(only_run(tmp_path / "runs"))
    assert len(steps) == len(rows) == 18
    for k in range(6):
        now = {numbers[id(policy)]: rest for policy, *rest in steps[3 * k : 3 * k + 3]}
        assert now.keys() == {0, 1, 2}
        C = matrix if k else torch.eye(3)
        for i, (_, batch, epsilon) in now.items():
            obs = batch["obs"]
            policies = torch.stack([now[j][0].predict(obs)[0].softmax(-1) for j in range(3)])
            torch.testing.assert_close(
                batch["reference"].exp(), (C[i, :, None, None] * policies).sum(0), rtol=0, atol=1e-5
            )
            group = [
                row
                for row in rows[3 * k - 3 : 3 * k]
                if communicator != "identity" or int(row["agent"]) == i
            ]
            expected = expected_epsilon(group if k else [], args)
            row = rows[3 * k + i]
            assert (float(row["epsilon"]), float(row["bound"])) == pytest.approx(expected, rel=2e-3)
            assert epsilon == pytest.approx(float(row["epsilon"]), rel=1e-5)
            within_bound = [
                float(r["tv_update"]) <= float(r["bound"]) for r in rows[i : 3 * k + i + 1 : 3]
            ]
            assert float(row["share_within_bound"]) == pytest.approx(
                np.mean(within_bound), abs=1e-5
            )
    kinds = {float(row["step"]) for row in rows}
    for row in rows:
        number = {column: float(row[column]) for column in row.keys() - {"env_id", "exp_name"}}
        if number["step"] == NORMAL:
            assert number["kl_reference_after"] <= number["epsilon"] * (1 + 1e-4)
        elif number["step"] == RECOVERY:
            assert number["kl_reference_before"] > number["kl_reference_after"]
        else:
            assert number["tv_update"] == 0
    assert NORMAL in kinds
    assert len({row["epsilon"] for row in rows}) > 5


@pytest.mark.parametrize("self_reference", ["behaviour", "snapshot"])
def test_with_a_gate_peers_get_value_functions_that_vote(self_reference, tmp_path, monkeypatch):
    """References by loops from what agents were at the last round; both networks are sent."""
    matrix = [[0.5, 0.4, 0.1], [0, 0.7, 0.3], [0.6, 0, 0.4]]
    settings = QUICK | {"communicator": write_matrix(tmp_path / "C.csv", matrix), "gate": "value"}
    settings |= {"self_reference": self_reference, "local_updates": 2}

    def copy_agent(agent, optimizer, generator, batch, *_):
        return copy.deepcopy(agent), batch

    before = notes_of(monkeypatch, prtrpo_minigrid, "update", copy_agent)
    summary = prtrpo_minigrid.main(tiny(PRTRPO_MINIGRID, tmp_path / "runs", **settings))
    assert len(before) == 6 * 3
    apart = 0.0
    for iteration in range(2, 6):
        at_round = 3 * (iteration // 2 * 2)  # a round follows the second and the fourth iteration
        for i in range(3):
            now, batch = before[3 * iteration + i]
            networks = [agent for agent, _ in before[at_round : at_round + 3]]
            if self_reference == "behaviour":
                networks[i] = now
            outputs = [network.predict(batch["obs"]) for network in networks]
            returns = batch["returns"].tolist()
            values = [value.tolist() for _, value in outputs]
            rows = gate_by_hand(matrix[i], values, returns, batch["obs_inds"])
            weights = torch.tensor(rows).T[..., None]
            policies = torch.stack([logits.softmax(-1) for logits, _ in outputs])
            expected = (weights * policies).sum(0)
            torch.testing.assert_close(batch["reference"].exp(), expected, rtol=0, atol=1e-5)
            apart = max(apart, (weights[..., 0].T - torch.tensor(matrix[i])).abs().max().item())
    assert apart > 0.3
    size = len(communicators.flatten(before[0][0]))
    policy_size = len(communicators.flatten(before[0][0].policy))
    assert size == 2 * policy_size
    assert summary["communication_bytes"] == 3 * 4 * size * 4  # rounds, listeners, float32


def test_defaults_stand():
    parsed = vars(PRTRPO_MINIGRID.parse_args([]))
    expected = vars(prtrpo_minigrid.Args())
    assert parsed.pop("device") == "cpu"
    assert expected.pop("device") == "auto"
    assert parsed.pop("env_backend") in ("envpool", "gymnasium")
    assert expected.pop("env_backend") == "auto"
    assert parsed == expected


# --- theory ---


def stochastic(generator, n):
    """A row-stochastic matrix that is not symmetric, some of its entries 0."""
    C = generator.dirichlet(np.full(n, 0.5), size=n)
    C[C < 0.1] = 0
    return C / C.sum(1, keepdims=True)


def tv(x, y):
    """|x_i - y_i| of policies [agents, states, actions], the mean over states."""
    return np.abs(x - y).sum(-1).mean(-1) / 2


def towards(reference, target, distance):
    """From the reference to the target, but no further than `distance` [agents]."""
    share = np.minimum(1, distance / np.maximum(tv(reference, target), 1e-12))[:, None, None]
    return reference + share * (target - reference)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**31), n=st.integers(2, 5), delta=st.floats(0.02, 0.9))
def test_observation_1_holds_along_sequences(seed, n, delta):
    """Policies use up every radius in the worst directions; each movement stays within delta.

    With a constant epsilon it is |pi^k - pi^k+1| <= 2 epsilon + gamma |pi^k-1 - pi^k| (B.5), so
    Observation 1 itself.
    """
    generator = np.random.default_rng(seed)
    C = stochastic(generator, n)
    corners = np.eye(3)
    args = prtrpo_minigrid.Args(delta=delta, epsilon_min=1e-300)
    policies = np.broadcast_to(generator.dirichlet(np.ones(3), size=2), (n, 2, 3))
    variations = torch.zeros(n, 2)
    levels = set()
    for _ in range(25):
        epsilon, bound = prtrpo_minigrid.compute_radius(
            torch.from_numpy(C), variations.double(), args
        )
        reference = np.einsum("ij,jsa->isa", C, policies)
        target = corners[generator.integers(3, size=(n, 2))]
        if generator.random() < 0.3:  # away from where the agent is
            target = corners[policies.argmin(-1)]
        after = towards(reference, target, np.full(n, math.sqrt(epsilon / 2)))
        variations = torch.from_numpy(np.stack((tv(policies, after), tv(reference, after)), axis=1))
        assert variations[:, 0].max() <= bound + 1e-9 == delta + 1e-9
        levels.add(round(epsilon, 9))
        policies = after
    assert len(levels) > 1

    epsilon = 0.1 * delta
    moved = 0.0
    # All policies are equal, so each is its own reference
    policies = np.broadcast_to(policies[:1], policies.shape)
    for _ in range(25):
        reference = np.einsum("ij,jsa->isa", C, policies)
        target = corners[generator.integers(3, size=(n, 2))]
        after = towards(reference, target, np.full(n, epsilon))
        assert tv(policies, after).max() <= 2 * epsilon + moved + 1e-9
        if epsilon <= (delta - moved) / 2:
            assert tv(policies, after).max() <= delta + 1e-9
        moved = tv(policies, after).max()
        policies = after


def test_the_level_of_observation_1_alone_is_not_enough_if_it_changes():
    """epsilon_k = (delta - |pi^k-1 - pi^k|) / 2, two agents that swap policies.

    The second update moves by 1.25 delta: the proof needs the level also in the update before,
    where it was still larger. Our schedule stops that update at delta.
    """
    delta = 0.4
    C = np.array([[0.0, 1.0], [1.0, 0.0]])
    start = np.full((2, 1, 2), 0.5)
    first = towards(start, np.array([[[1.0, 0.0]], [[0.0, 1.0]]]), np.full(2, delta / 2))
    reference = np.einsum("ij,jsa->isa", C, first)
    level = (delta - tv(start, first).max()) / 2
    second = towards(reference, np.array([[[0.0, 1.0]], [[1.0, 0.0]]]), np.full(2, level))
    assert tv(first, second).max() == pytest.approx(1.25 * delta)
    variations = torch.from_numpy(np.stack((tv(start, first), tv(start, first)), axis=1))
    args = prtrpo_minigrid.Args(delta=delta, epsilon_min=1e-300)
    assert prtrpo_minigrid.compute_radius(torch.from_numpy(C), torch.zeros(2, 2), args)[
        0
    ] == pytest.approx(2 * (delta / 2) ** 2)
    assert prtrpo_minigrid.compute_radius(torch.from_numpy(C), variations, args)[
        0
    ] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_pr_trpo_in_small_mdps_stays_within_the_bound_and_improves(seed):
    """Tabular policies, exact advantages, random C.

    No update moves a policy by more than delta, and all agents' returns rise.
    """
    generator = np.random.default_rng(seed)
    n = 3
    S = 5
    A = 3
    discount = 0.9
    C = torch.from_numpy(stochastic(generator, n))
    transitions = generator.dirichlet(np.full(S, 0.3), size=(S, A))
    rewards = generator.random(S)
    policies = [Small(S, 4, A) for _ in range(n)]
    for policy in policies:
        policy.layers = nn.Sequential(nn.Linear(S, A, bias=False))
        nn.init.zeros_(policy.double().layers[0].weight)
    obs = torch.eye(S, dtype=torch.double)
    every = torch.cartesian_prod(torch.arange(S), torch.arange(A))
    args = prtrpo_minigrid.Args(delta=0.15, epsilon_min=1e-9, damping_coef=1e-6, **EXACT)
    variations = torch.zeros(n, 2, dtype=torch.double)
    returns = []
    kinds = set()
    for _ in range(40):
        with torch.no_grad():
            log_probs = torch.stack([policy(obs)[0].log_softmax(-1) for policy in policies])
        epsilon, bound = prtrpo_minigrid.compute_radius(C, variations, args)
        steps = []
        for i, policy in enumerate(policies):
            pi = log_probs[i].exp().numpy()
            values = np.linalg.solve(
                np.eye(S) - discount * np.einsum("sa,sat->st", pi, transitions), rewards
            )
            advantages = rewards[:, None] + discount * transitions @ values - values[:, None]
            # Each pair once, as if drawn with probability 1 / A
            batch = {"obs_inds": every[:, 0], "actions": every[:, 1]}
            batch["logprobs"] = torch.full((S * A,), -math.log(A), dtype=torch.double)
            batch["advantages"] = torch.from_numpy(advantages)[every[:, 0], every[:, 1]]
            batch["obs"] = obs
            batch["reference"] = communicators.mix_log_probs(log_probs, C[i])
            steps.append(prtrpo_minigrid.improve(policy, batch, epsilon, args))
            returns.append(values.mean())
        variations = torch.tensor(
            [[step["policy/tv_update"], step["policy/tv_reference"]] for step in steps],
            dtype=torch.double,
        )
        assert bound == 0.15
        assert variations[:, 0].max() <= bound + 1e-9
        kinds |= {step["trust_region/step"] for step in steps}
        for step in steps:
            # Pinsker: the KL that is constrained bounds the total variation
            if step["trust_region/step"] == NORMAL:
                assert step["policy/tv_reference"] <= math.sqrt(epsilon / 2) + 1e-9
    assert NORMAL in kinds
    assert min(returns[-n:]) > max(returns[:n]) + 0.1


def mirror_descent(K, step, gradient, targets, rng, noise):
    """Eq. 12 with C = 1/n: K iterations from uniform policies.

    Returns the average of all policies of all agents.
    """
    n, A = targets.shape
    log_probs = torch.full((n, 1, A), -math.log(A), dtype=torch.double)
    total = np.zeros(A)
    mean = communicators.uniform(n)[0].double()
    for _ in range(K):
        policies = log_probs.exp().numpy()[:, 0]
        total += policies.mean(0)
        slope = gradient(policies, targets) + noise * rng.normal(size=(n, A))
        reference = communicators.mix_log_probs(log_probs, mean)
        log_probs = (reference - step * torch.from_numpy(slope)[:, None]).log_softmax(-1)
    return total / K


@pytest.mark.parametrize(
    ("noise", "expected_slope"), [(1.0, -0.5), (0.0, -1.0)], ids=["stochastic", "exact"]
)
def test_mirror_descent_converges_at_the_stated_rate(noise, expected_slope):
    """Theorem C.1 on f_i(x) = |x - t_i|^2 / 2, L = 1: error <= 2 D^2 / (step K) + 2 step M^2.

    The slope of the error over K is checked too. Noisy gradients of different agents: step D /
    (sqrt(K) M), slope -1/2 or steeper. Exact and
    equal ones: step 1 / (2 L), the first term alone, slope -1.
    """
    rng = np.random.default_rng(0)
    n = 4
    A = 5
    targets = (
        rng.dirichlet(np.ones(A), size=n) if noise else np.tile(rng.dirichlet(np.ones(A)), (n, 1))
    )
    best = targets.mean(0)
    D2 = math.log(A)  # the largest KL from uniform
    M = math.sqrt(1 + noise**2 * 2 * math.log(2 * A)) if noise else 0.0  # of the largest entry
    lengths = [2**k for k in range(4, 12)]
    errors = []
    for K in lengths:
        step = min(0.5, math.sqrt(D2 / K) / M) if noise else 0.5
        repetitions = 4 if noise else 1
        averages = [
            mirror_descent(K, step, lambda x, t: x - t, targets, rng, noise)
            for _ in range(repetitions)
        ]
        errors.append(np.mean([((x - best) ** 2).sum() / 2 for x in averages]))
        assert errors[-1] <= 2 * D2 / (step * K) + 2 * step * M**2
    slope = np.polyfit(np.log(lengths), np.log(errors), 1)[0]
    assert slope <= expected_slope + 0.1, (slope, errors)
