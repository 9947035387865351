"""Training: an independent plain version, configurations that must be equivalent, learning."""

import copy
import dataclasses
import math
import re

import numpy as np
import pytest
import torch
from helpers import (
    ATARI,
    FEDAVG_MINIGRID,
    MINIGRID,
    PRPO_ATARI,
    PRPO_MINIGRID,
    PRTRPO_MINIGRID,
    SLOW_ATARI,
    assert_metrics,
    assert_weights,
    gate_by_hand,
    measure_minibatch,
    measure_update,
    on,
    on_minigrid,
    only_run,
    plain_objective,
    plain_step,
    rows_of,
    scalars_of,
    table_of,
    tiny,
    weights_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributions import Categorical, kl_divergence
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import communicators


def train(script, run_dir, **changes):
    """A tiny run in this process. Returns (its folder, what summary.json holds)."""
    summary = script.main(tiny(script, run_dir, **{"eval_episodes": 0} | changes))
    return only_run(run_dir), summary


# --- an independent plain version ---
#
# No table, no stacking; only the network is the script's.


def plain_rollout(script, args, agent, envs, generator):
    """One rollout: for each environment its episodes, each a dict of equally long lists.

    The last episode may be cut.
    """
    noise = torch.empty(args.num_steps, args.num_envs, script.num_actions).exponential_(
        generator=generator
    )
    episodes = [[new_episode()] for _ in range(args.num_envs)]
    for step in range(args.num_steps):
        obs = torch.from_numpy(envs.obs.copy())
        with torch.no_grad():
            logits, values = agent(obs)
        policy = Categorical(logits=logits)
        actions = (policy.probs / noise[step]).argmax(-1)
        rewards, terminations, truncations, valid, _ = envs.step(actions.numpy())
        for k in np.flatnonzero(valid):
            episode = episodes[k][-1]
            for name, value in (
                ("obs", obs[k]),
                ("action", actions[k]),
                ("value", values[k]),
                ("time", step),
            ):
                episode[name].append(value)
            episode["logprob"].append(policy.log_prob(actions)[k])
            episode["policy"].append(policy.probs[k])
            episode["reward"].append(float(rewards[k]))
            if terminations[k] or truncations[k] or step == args.num_steps - 1:
                with torch.no_grad():
                    final = agent(torch.from_numpy(envs.obs[k : k + 1].copy()))[1].item()
                episode["bootstrap"] = 0.0 if terminations[k] else final
            if terminations[k] or truncations[k]:
                episodes[k].append(new_episode())
    return episodes


def new_episode():
    return {name: [] for name in ("obs", "action", "value", "time", "logprob", "policy", "reward")}


def plain_batch(args, episodes):
    """The samples of a rollout in the order of time, with advantages by the definition."""
    samples = []
    for k, of_env in enumerate(episodes):
        for episode in of_env:
            values = [*map(float, episode["value"]), episode.get("bootstrap", 0.0)]
            deltas = [
                r + args.gamma * values[t + 1] - values[t] for t, r in enumerate(episode["reward"])
            ]
            for t, time in enumerate(episode["time"]):
                decay = args.gamma * args.gae_lambda
                advantage = sum(decay ** (j - t) * deltas[j] for j in range(t, len(deltas)))
                one = {
                    name: episode[name][t]
                    for name in ("obs", "action", "value", "logprob", "policy")
                }
                samples.append((time, k, one | {"advantage": torch.tensor(advantage)}))
    samples = [sample for *_, sample in sorted(samples, key=lambda sample: sample[:2])]
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def plain_reference(args, batch, i, communicator, snapshots):
    """The reference policy of agent i on its own states: (C_i pi)(.|s), arithmetic or geometric."""
    policies = [batch["policy"]] * len(snapshots)
    values = [batch["value"]] * len(snapshots)
    for j, snapshot in enumerate(snapshots):
        if j != i or args.self_reference == "snapshot":
            with torch.no_grad():
                logits, values[j] = snapshot(batch["obs"])
            policies[j] = logits.softmax(-1)
    rows = [communicator[i].tolist()] * len(batch["obs"])
    if args.gate == "value":
        returns = (batch["advantage"] + batch["value"]).tolist()
        rows = gate_by_hand(rows[0], torch.stack(values).tolist(), returns)
    columns = torch.tensor(rows).T[..., None]  # [agents, samples, 1]
    if args.mixture == "arithmetic":
        return sum(c * policy for c, policy in zip(columns, policies, strict=True))
    product = torch.stack([policy**c for c, policy in zip(columns, policies, strict=True)]).prod(0)
    return product / product.sum(-1, keepdim=True)


def plain_average(row, snapshots):
    """The average of the parameters of the agents of positive weight."""
    vectors = [parameters_to_vector(agent.parameters()).detach() for agent in snapshots]
    return sum(weight * vector for weight, vector in zip(row, vectors, strict=True))


def plain_loss(script, args, agent, batch, kl_coef, anchor=None):
    """PPO's loss with the KL penalty of eq. 3 or 4, and the metrics of its minibatch."""
    logits, value = agent(batch["obs"])
    policy = Categorical(logits=logits)
    reference = Categorical(probs=batch["reference"])
    logprob = policy.log_prob(batch["action"])
    ratio, objective, value_loss = plain_objective(args, batch, logprob, value)
    forward = args.kl_direction == "forward"
    penalty = kl_divergence(reference, policy) if forward else kl_divergence(policy, reference)
    loss = -objective + args.vf_coef * value_loss / 2 - args.ent_coef * policy.entropy()
    loss = (loss + kl_coef * penalty).mean()
    metrics = measure_minibatch(args, ratio, objective, value_loss, policy.entropy())
    metrics["kl_reference"] = penalty.mean().item()
    if anchor is not None:
        for name, parameter in agent.named_parameters():
            pull = (parameter - anchor.get_parameter(name)) ** 2
            loss = loss + args.prox_coef / 2 * pull.sum()
    return loss, metrics


def plain_training(script, args, communicator):
    """Train as the script does: isolated up to the first round, then with this communicator.

    Returns the agents, and a row of metrics per iteration and agent.
    """
    n = args.num_agents
    rows = []
    iterations = args.total_timesteps // (args.num_envs * args.num_steps)
    agents = []
    for i in range(n):
        torch.manual_seed(args.seed)
        agents.append(
            script.new_agent(
                **({"hidden": args.hidden_sizes[i]} if vars(args).get("hidden_sizes") else {})
            )
        )
    views = [copy.deepcopy(agents) for _ in range(n)]
    matrix = torch.eye(n)  # no round has taken place
    optimizers = [torch.optim.Adam(agent.parameters(), eps=1e-5) for agent in agents]
    generators = [torch.Generator().manual_seed(script.derive_seed(args.seed, i)) for i in range(n)]

    for iteration in range(iterations):
        left = (iterations - iteration) / iterations
        kl_coef = args.kl_coef * (left if args.kl_schedule == "linear" else 1)
        if iteration % args.save_every == 0:
            envs = [script.make_envs(args, i, iteration) for i in range(n)]
        for i, agent in enumerate(agents):
            batch = plain_batch(args, plain_rollout(script, args, agent, envs[i], generators[i]))
            anchor = None
            if script.averages and matrix[i, i] < 1 and vars(args).get("prox_coef"):
                anchor = copy.deepcopy(agent)
                vector_to_parameters(plain_average(matrix[i], views[i]), anchor.parameters())
                anchor.requires_grad_(False)
            batch["reference"] = batch["policy"]
            if not script.averages:
                batch["reference"] = plain_reference(args, batch, i, matrix, views[i])
            minibatches = []
            for _ in range(args.update_epochs):
                order = torch.randperm(len(batch["obs"]), generator=generators[i])
                for indices in np.array_split(order.numpy(), args.num_minibatches):
                    minibatch = {name: tensor[indices] for name, tensor in batch.items()}
                    rate = args.learning_rate * (left if args.anneal_lr else 1)
                    optimizers[i].param_groups[0]["lr"] = rate
                    loss, metrics = plain_loss(script, args, agent, minibatch, kl_coef, anchor)
                    minibatches.append(metrics)
                    plain_step(args, agent, optimizers[i], loss)
            more = {"kl_coefficient": kl_coef, "learning_rate": rate}
            rows.append(measure_update(minibatches, batch, **more))
        if (iteration + 1) % args.local_updates == 0:
            matrix = communicator
            for i in range(n):
                for j in range(n):
                    views[i][j] = copy.deepcopy(agents[j])
            if script.averages and not vars(args).get("prox_coef"):
                for i in range(n):
                    before = copy.deepcopy(agents[i])
                    theta = plain_average(matrix[i], views[i])
                    vector_to_parameters(theta, agents[i].parameters())
                    for head in vars(args).get("private_heads", ()):
                        agents[i].get_submodule(head).load_state_dict(
                            before.get_submodule(head).state_dict()
                        )
    return agents, rows


THREE = {"num_agents": 3, "local_updates": 1, "iterations": 3}
PREFERRED = torch.full((3, 3), 0.35).fill_diagonal_(0.3)
NEXT_ONE = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5]])  # not symmetric
RING = communicators.sparsify(torch.ones(4, 4), communicators.ring(4))
# No communicator gives these matrices: `make_communicator` is replaced. They are not symmetric, so
# that a transposed matrix or another diagonal would change the result
OF_THREE = torch.tensor([[0.6, 0.3, 0.1], [0.0, 0.5, 0.5], [0.2, 0.1, 0.7]])
NO_SELF_WEIGHT = torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.0, 0.5], [0.2, 0.1, 0.7]])
TWO_ON_ATARI = {"num_agents": 2, "local_updates": 1, "iterations": 3, "num_steps": 40}
TWO_ON_ATARI |= {"num_envs": 2}
OF_TWO = torch.tensor([[0.7, 0.3], [0.1, 0.9]])
SNAPSHOTS = {
    "mixture": "geometric",
    "kl_direction": "reverse",
    "self_reference": "snapshot",
    "local_updates": 2,
    "iterations": 4,
}
FALLING = {"kl_schedule": "linear"}
GATED = {"gate": "value"}
APART = {"learning_rate": 3e-3}  # then policies differ so much that it matters how they are mixed
PLAIN = {
    "one agent": (
        MINIGRID,
        {"num_agents": 1, "communicator": "uniform"},
        torch.ones(1, 1),
    ),
    "one agent, other options": (
        [PRPO_MINIGRID],
        {
            "num_agents": 1,
            "anneal_lr": False,
            "norm_adv": False,
            "clip_vloss": False,
            "kl_direction": "reverse",
            "kl_schedule": "linear",
        },
        torch.ones(1, 1),
    ),
    "one agent, no clipping": (
        [PRPO_MINIGRID],
        {"num_agents": 1, "clip_coef": 0.0, "max_grad_norm": 0.05},
        torch.ones(1, 1),
    ),
    "isolated": (MINIGRID, THREE | {"communicator": "identity"}, torch.eye(3)),
    "uniform": (
        [FEDAVG_MINIGRID],
        THREE | {"communicator": "uniform", "local_updates": 2},
        torch.full((3, 3), 1 / 3),
    ),
    "one peer": ([PRPO_MINIGRID], THREE | {"communicator": "uniform", "top_k": 1}, NEXT_ONE),
    "ring": (
        [PRPO_MINIGRID],
        THREE | {"num_agents": 4, "communicator": "uniform", "topology": "ring"},
        RING,
    ),
    "geometric, reverse, snapshots": (
        [PRPO_MINIGRID],
        THREE | {"communicator": "self-preferred", "self_preference": 0.3} | SNAPSHOTS,
        PREFERRED,
    ),
    "any matrix": (
        MINIGRID,
        THREE | {"local_updates": 2, "iterations": 4},
        OF_THREE,
    ),
    "averages, one without weight for itself": (
        [FEDAVG_MINIGRID],
        THREE | APART,
        NO_SELF_WEIGHT,
    ),
    "networks of three sizes": (
        [PRPO_MINIGRID],
        THREE | APART | {"hidden_sizes": (32, 64, 16)},
        OF_THREE,
    ),
    "private heads": (
        [FEDAVG_MINIGRID],
        THREE | APART | {"private_heads": ("actor", "critic")},
        OF_THREE,
    ),
    "pulled to averages": (
        [FEDAVG_MINIGRID],
        THREE | APART | {"prox_coef": 2.0, "local_updates": 2, "iterations": 4},
        OF_THREE,
    ),
    "any matrix, two agents": (
        ATARI,
        TWO_ON_ATARI | {"kl_schedule": "linear"},
        OF_TWO,
    ),
    "any matrix, snapshots": ([PRPO_MINIGRID], THREE | SNAPSHOTS | APART | FALLING, OF_THREE),
    "gated": ([PRPO_MINIGRID], THREE | APART | GATED, OF_THREE),
    "gated, snapshots": ([PRPO_MINIGRID], THREE | SNAPSHOTS | APART | GATED, OF_THREE),
    "gated, two agents": ([PRPO_ATARI], TWO_ON_ATARI | GATED, OF_TWO),
}
# In the others the same lines are at work, or functions that have tests of their own
QUICK = {
    "one agent-prpo_minigrid",
    "one agent, other options-prpo_minigrid",
    "one agent, no clipping-prpo_minigrid",
    "any matrix-fedavg_ppo",
    "networks of three sizes-prpo_minigrid",
    "private heads-fedavg_ppo",
    "pulled to averages-fedavg_ppo",
    "any matrix, two agents-prpo_atari",
    "any matrix, snapshots-prpo_minigrid",
    "gated-prpo_minigrid",
    "gated, snapshots-prpo_minigrid",
}


def plain_case(script, name, changes, communicator):
    """A case of the test below."""
    label = f"{name}-{script}"
    marks = () if label in QUICK else pytest.mark.slow
    return pytest.param(script, changes, communicator, id=label, marks=marks)


@pytest.mark.parametrize(
    ("script", "changes", "communicator"),
    [
        plain_case(script, name, changes, communicator)
        for name, (scripts, changes, communicator) in PLAIN.items()
        for script in scripts
    ],
)
@pytest.mark.usefixtures("smooth_adam")
def test_training_equals_the_plain_version(script, changes, communicator, tmp_path, monkeypatch):
    """Parameters equal those of an independent plain loop after several iterations and a restart.

    With one agent or the identity communicator that loop is plain PPO with a KL penalty to its own
    old policy.
    """
    if "communicator" not in changes and len(communicator) > 1:
        script.patch(monkeypatch, "make_communicator", fixed(communicator))
    assert_trains_like_the_plain_version(script, communicator, tmp_path, **changes)


def fixed(communicator):
    """A replacement of `make_communicator`: this matrix from the first round on."""

    def make(args, returns=None, log_probs=None, gains=None, usable=None):
        if usable is None or usable.all():
            return communicator
        return communicators.drop_invalid(communicator, usable)

    return make


def assert_trains_like_the_plain_version(script, matrix, run_dir, **changes):
    """A short run has metrics and ends with parameters of the plain version, up to rounding.

    With the usual entropy coefficient, 0.01, the bonus would hardly count.
    """
    changes = {"iterations": 3, "kl_coef": 5.0, "ent_coef": 0.1, "eval_episodes": 0} | changes
    folder, _ = train(script, run_dir, **changes)
    args = tiny(script, run_dir, **changes)
    agents, rows = plain_training(script, args, matrix)
    assert_metrics(folder, rows)
    assert len(weights_of(folder)) == len(agents)
    for i, agent in enumerate(agents):
        expected = torch.cat([tensor.flatten() for _, tensor in sorted(agent.state_dict().items())])
        weights = load_file(folder / f"agent_{i}.safetensors")
        weights = torch.cat([tensor.flatten() for _, tensor in sorted(weights.items())])
        assert_weights(weights, expected)


# --- equivalences ---


def lively_agents(script, number, **options):
    """Agents in which every layer matters: the scripts start with small heads and no biases."""
    agents = [script.new_agent(**options) for _ in range(number)]
    for agent in agents:
        for parameter in agent.parameters():
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, std=0.2)
        torch.nn.init.orthogonal_(agent.actor.weight)
    return agents


def test_no_output_of_an_old_policy_is_looked_up():
    """Neither for screens of the last eight rollouts nor for one that was last seen before."""
    torch.manual_seed(0)
    (agent,) = lively_agents(PRPO_MINIGRID, 1)
    table = PRPO_MINIGRID.PolicyTable(agent)
    screens = PRPO_MINIGRID.random_obs(10, 2).numpy()
    for rollout in range(10):
        table.renew()
        recent = {key for keys in table.met for key in keys}
        assert table.logits.keys() == recent
        assert len(recent) == 2 * min(rollout, 8)
        first_seen_again = 0 if rollout == 9 else rollout
        for screen in (screens[rollout], screens[max(rollout - 1, 0)], screens[first_seen_again]):
            expected, _ = agent.predict(torch.from_numpy(screen))
            logits = table.look_up([obs.tobytes() for obs in screen])
            torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=0, atol=1e-5)
        table.met.append([obs.tobytes() for obs in screens[rollout]])
        with torch.no_grad():
            agent.actor.weight.mul_(-1.0)  # what an update does


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.05)])
def test_chunks_of_states_stay_in_order(precision, tolerance):
    """`predict` for many states is the network's output for each state, in their order."""
    script = PRPO_ATARI
    torch.manual_seed(0)
    (agent,) = lively_agents(script, 1, bfloat16=precision == "bfloat16")
    obs = script.random_obs(600)
    exact = script.new_agent()
    exact.load_state_dict(agent.state_dict())
    with torch.no_grad():
        expected, others = (
            [torch.cat(parts) for parts in zip(*map(network, obs.split(97)), strict=True)]
            for network in (agent, exact)
        )
    for predicted, expected_output, other in zip(agent.predict(obs), expected, others, strict=True):
        assert len(predicted) == len(obs)
        assert not predicted.requires_grad
        torch.testing.assert_close(predicted, expected_output, rtol=0, atol=tolerance)
        assert expected_output.std() > 2 * tolerance  # chunks in another order would differ
        if precision == "bfloat16":  # every chunk is computed in it
            errors = (predicted - expected_output).abs()
            sizes = (other - expected_output).abs()
            assert all(
                error.mean() < size.mean() / 4
                for error, size in zip(errors.split(97), sizes.split(97), strict=True)
            )


@pytest.mark.parametrize("mixture", communicators.MIXTURES)
@pytest.mark.parametrize("self_reference", ["behaviour", "snapshot"])
@pytest.mark.parametrize("gate", ["none", "value"])
def test_references_are_rows_of_the_communicator_applied_to_policies(mixture, self_reference, gate):
    """On agent i's own states, by the definition; policies of weight 0 are not evaluated. With a
    gate each state has a row of its own, in which an agent's critic votes with its policy.
    """
    script = PRPO_MINIGRID
    args = script.Args(mixture=mixture, self_reference=self_reference, gate=gate)
    snapshots = dict(enumerate(lively_agents(script, 3)))
    (agent,) = lively_agents(script, 1)
    snapshots[0].critic.register_forward_pre_hook(lambda *_: evaluations.append(0))
    obs = script.random_obs(20)
    votes = set()
    for i, row in enumerate(OF_THREE):
        evaluations = []
        with torch.no_grad():
            logits, state_values = agent(obs)
            behaviour = logits.log_softmax(-1)
            returns = torch.linspace(-0.3, 0.3, 5)  # some critics promise more, and others less
            batch = {"obs": obs, "policy": behaviour}
            batch |= {"state_values": state_values, "returns": returns}
            batch["obs_inds"] = torch.tensor([0, 0, 0, 3, 7, 19])
            reference, weights = script.compute_reference(i, batch, snapshots, OF_THREE, args)
            assert len(evaluations) == (row[0] > 0 and (i > 0 or self_reference == "snapshot"))
            outputs = [peer(obs) for peer in snapshots.values()]
        policies = [logits.softmax(-1) for logits, _ in outputs]
        values = [value for _, value in outputs]
        if self_reference == "behaviour":
            policies[i] = behaviour.exp()
            values[i] = state_values
        senders = row.nonzero().flatten().tolist()
        if gate == "none":
            assert torch.equal(weights, row[senders])
        promised = [value.tolist() for value in values]
        gated = gate_by_hand(row.tolist(), promised, returns.tolist(), batch["obs_inds"])
        for state in range(20):
            of_state = row.tolist()
            if gate == "value":
                of_state = gated[state]
                expected = [of_state[j] for j in senders]
                assert weights[:, state].tolist() == pytest.approx(expected, abs=1e-5)
                votes.add(tuple(round(vote, 3) for vote in expected))
            there = zip(of_state, policies, strict=True)
            if mixture == "arithmetic":
                expected = sum(weight * policy[state] for weight, policy in there)
            else:
                expected = math.prod(policy[state] ** weight for weight, policy in there)
                expected /= expected.sum()
            torch.testing.assert_close(reference[state].exp(), expected, rtol=0, atol=1e-5)
    assert gate == "none" or len(votes) > 9  # states differ


def without_gate(rows):
    """Rows of metrics.csv without the columns of --gate."""
    kept = []
    for row in rows:
        kept.append({k: v for k, v in row.items() if not k.startswith(("weight_", "spread_"))})
    return kept


@on([PRPO_MINIGRID, SLOW_ATARI])
@pytest.mark.parametrize(
    "changes", [{"num_agents": 1}, {"communicator": "identity"}], ids=["one agent", "identity"]
)
def test_a_gate_changes_nothing_for_agents_that_are_alone(script, changes, tmp_path):
    """Bit for bit; all weight is logged to be theirs."""
    settings = {"iterations": 2, "local_updates": 1, "communicator": "uniform"} | changes
    plain, _ = train(script, tmp_path / "plain", **settings)
    gated, summary = train(script, tmp_path / "gated", **settings, gate="value")
    expected = weights_of(plain)
    for i, weights in weights_of(gated).items():
        assert torch.equal(weights, expected[i])
    assert without_gate(rows_of(gated)) == rows_of(plain)
    assert summary["communication_bytes"] == 0
    for row in rows_of(gated):
        for j in range(len(expected)):
            assert float(row[f"weight_{j}"]) == (row["agent"] == str(j))
            assert float(row[f"spread_{j}"]) == 0


@on([PRPO_MINIGRID, PRTRPO_MINIGRID, SLOW_ATARI])
def test_a_gates_weights_are_logged_as_means_and_spreads_over_samples(
    script, tmp_path, monkeypatch
):
    """By loops over the samples of each rollout, which meet some states more often than others."""
    expected = []
    compute_reference = script.compute_reference

    def watch(i, batch, peers, C, args):
        reference, weights = compute_reference(i, batch, peers, C, args)
        row = dict.fromkeys(range(3), [0.0])
        for k, j in enumerate(C[i].nonzero().flatten().tolist()):
            row[j] = [weights[k, state].item() for state in batch["obs_inds"]]
        expected.append(row)
        return reference, weights

    script.patch(monkeypatch, "compute_reference", watch)
    monkeypatch.setattr(script.module, "compute_reference", watch)
    script.patch(monkeypatch, "make_communicator", fixed(OF_THREE))
    settings = THREE | GATED | {"num_steps": 32} if script.family == "MiniGrid" else THREE | GATED
    folder, _ = train(script, tmp_path, **settings)
    rows = rows_of(folder)
    charts = scalars_of(folder)
    assert len(rows) == len(expected) == 9
    for number, (row, weights) in enumerate(zip(rows, expected, strict=True)):
        for j, of_samples in weights.items():
            mean = np.mean(of_samples)
            assert float(row[f"weight_{j}"]) == pytest.approx(mean, abs=1e-5)
            assert float(row[f"spread_{j}"]) == pytest.approx(np.std(of_samples), abs=1e-5)
            _, point = charts[f"gate/weight_{j}/agent_{row['agent']}"][number // 3]
            assert point == pytest.approx(mean, abs=1e-5)
    spreads = [float(row[f"spread_{j}"]) for row in rows[3:] for j in range(3)]
    assert max(spreads) > 0.05
    assert all(float(row["weight_0"]) == 0 for row in rows[4::3])  # whom agent 1 never hears


class Screens:
    """Environments of agents whose observations are given, of each [steps + 1, envs, 7, 7, 3]."""

    def __init__(self, *rollouts):
        self.rows = zip(*rollouts, strict=True)
        self.obs = np.stack(next(self.rows))

    def step(self, actions):
        self.obs = np.stack(next(self.rows))
        nothing = np.zeros(self.obs.shape[:2])
        return nothing, nothing > 0, nothing > 0, nothing == 0, []


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), number=st.integers(1, 30), envs=st.integers(1, 3))
def test_each_observation_is_computed_once_and_kept_for_eight_rollouts(seed, number, envs):
    """Observations that differ in a single code are different.

    A rollout's own observations and log-probabilities are found again under `obs_inds`.
    """
    script = PRPO_MINIGRID
    computed = []
    args = script.Args(num_agents=1, num_envs=envs, num_steps=6)
    generator = np.random.default_rng(seed)
    (agent,) = lively_agents(script, 1)
    screens = np.repeat(
        generator.integers(0, 11, size=(1, 7, 7, 3), dtype=np.uint8), number, axis=0
    )
    screens.reshape(number, 147)[np.arange(number), np.arange(number) * 5] += 1
    table = script.PolicyTable(agent)
    history = []

    def record_keys(keys, add=table.add):
        computed[-1] += keys
        return add(keys)

    table.add = record_keys
    for _ in range(11):
        rollout = screens[generator.integers(number, size=(args.num_steps + 1, envs))]
        computed.append([])
        seeded = torch.Generator().manual_seed(seed % 2**31)
        # Another agent's observations are its own
        other = screens[generator.integers(number, size=(args.num_steps + 1, envs))]
        tables = [table, script.PolicyTable(agent)]
        seeds = [seeded, torch.Generator().manual_seed(1)]
        rollouts = script.rollout(args, tables, Screens(rollout, other), seeds)
        (data, _), (of_other, _) = rollouts
        assert np.array_equal(of_other["obs"][of_other["obs_inds"]].numpy(), other[:-1])
        shown = [row.tobytes() for row in rollout.reshape(-1, 147)]
        remembered = set().union(*history[-8:])
        assert len(computed[-1]) == len(set(computed[-1]))  # nothing twice
        # After the last step no action is looked up
        assert set(computed[-1]) == remembered | set(shown[:-envs])
        assert set(computed[-1][: len(remembered)]) == remembered
        history.append(set(shown))
        assert np.array_equal(data["obs"][data["obs_inds"]].numpy(), rollout[:-1])
        assert len(data["obs"]) == len(set(shown))
        with torch.no_grad():
            logits, values = agent(torch.from_numpy(rollout).flatten(0, 1))
        log_probs = data["policy"][data["obs_inds"]].flatten(0, 1)
        torch.testing.assert_close(log_probs, logits.log_softmax(-1)[:-envs], rtol=0, atol=1e-5)
        for name, expected in (("values", values[:-envs]), ("next_values", values[envs:])):
            torch.testing.assert_close(data[name].flatten(), expected, rtol=0, atol=1e-5)
        chosen = log_probs.gather(1, data["actions"].flatten()[:, None])[:, 0]
        torch.testing.assert_close(data["logprobs"].flatten(), chosen, rtol=0, atol=1e-5)


@settings(max_examples=15)
@given(seed=st.integers(0, 2**31), distinct=st.integers(1, 9), samples=st.integers(2, 24))
def test_learning_from_distinct_observations_has_the_gradient_of_all_rows(seed, distinct, samples):
    """The network computes each observation of a minibatch once, and every sample counts."""
    script = PRPO_MINIGRID
    torch.manual_seed(seed)
    args = script.Args(update_epochs=1, num_minibatches=1, max_grad_norm=1e9, vf_coef=0.1)
    (agent,) = lively_agents(script, 1)
    obs = script.random_obs(distinct)
    other = copy.deepcopy(agent)
    sizes = []
    states = torch.randint(distinct, (samples,))
    batch = {
        "obs": obs,
        "actions": torch.randint(7, (samples,)),
        "logprobs": -torch.rand(samples) - 1,
        "obs_inds": states,
    }
    batch |= {"advantages": torch.randn(samples), "values": torch.randn(samples)}
    batch |= {
        "returns": batch["advantages"] + batch["values"],
        "reference": torch.randn(distinct, 7).log_softmax(-1),
    }
    agent.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    optimizer = torch.optim.SGD(agent.parameters(), 0.0)
    generator = torch.Generator().manual_seed(seed)
    script.update(agent, optimizer, generator, batch, 3.0, args)
    assert sizes == [len(states.unique())]
    plain = {"obs": obs[states], "reference": batch["reference"][states].exp()}
    plain |= {name: batch[f"{name}s"] for name in ("action", "logprob", "advantage", "value")}
    plain_loss(script, args, other, plain, 3.0)[0].backward()
    gradients, expected = (
        [parameter.grad for parameter in network.parameters()] for network in (agent, other)
    )
    torch.testing.assert_close(gradients, expected, rtol=1e-3, atol=1e-4)
    assert any(gradient.abs().max() > 1e-2 for gradient in gradients)


@on([PRPO_MINIGRID, PRPO_ATARI])
def test_a_loss_or_gradient_that_is_not_finite_makes_no_step(script):
    """Weights and Adam's moments stay, and the policy loss is NaN, though no term of the loss is.

    With finite gradients the agent learns again.
    """
    torch.manual_seed(0)
    args = script.Args(update_epochs=2, num_minibatches=2)
    (agent,) = lively_agents(script, 1)
    batch = {"obs": script.random_obs(6), "obs_inds": torch.arange(6)}
    batch |= {"actions": torch.randint(script.num_actions, (6,)), "logprobs": -torch.rand(6) - 1}
    batch |= {"advantages": torch.randn(6), "values": torch.randn(6)}
    batch |= {
        "returns": batch["advantages"],
        "reference": torch.randn(6, script.num_actions).log_softmax(-1),
    }
    optimizer = torch.optim.Adam(agent.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(0)
    minibatches = []
    agent.register_forward_pre_hook(lambda *_: minibatches.append(0))

    def update(args):
        minibatches.clear()
        losses = script.update(agent, optimizer, generator, batch, 1.0, args)
        return len(minibatches), losses["losses/policy_loss"], losses["losses/value_loss"]

    number, policy_loss, _ = update(args)
    assert number == 4
    assert math.isfinite(policy_loss)
    weights = parameters_to_vector(agent.parameters()).detach().clone()
    moments = copy.deepcopy(optimizer.state_dict()["state"])
    hook = next(agent.parameters()).register_hook(lambda gradient: gradient * torch.inf)
    infinite_gradient = update(args)
    hook.remove()
    infinite_loss = update(dataclasses.replace(args, vf_coef=math.inf))
    for number, policy_loss, value_loss in (infinite_gradient, infinite_loss):
        assert number == 1
        assert math.isnan(policy_loss)
        assert math.isfinite(value_loss)
    assert torch.equal(parameters_to_vector(agent.parameters()), weights)
    torch.testing.assert_close(optimizer.state_dict()["state"], moments, rtol=0, atol=0)
    assert update(args)[0] == 4
    changed = parameters_to_vector(agent.parameters())
    assert changed.isfinite().all()
    assert not torch.equal(changed, weights)


@pytest.mark.usefixtures("smooth_adam")
def test_a_layer_that_is_added_acts_and_learns(tmp_path, monkeypatch):
    """The network is defined once, so one with another layer also equals the plain loop."""
    script = PRPO_MINIGRID

    class Deeper(script.Agent):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.network.extend([torch.nn.Linear(128, 96), torch.nn.Tanh()])
            self.actor = torch.nn.Linear(96, self.actor.out_features)
            self.critic = torch.nn.Linear(96, 1)

    script.patch(monkeypatch, "Agent", Deeper)
    script.patch(monkeypatch, "make_communicator", fixed(OF_THREE))
    assert_trains_like_the_plain_version(script, OF_THREE, tmp_path / "plain", **THREE)
    ratios, logged, _ = first_log_ratios(script, tmp_path / "ratios", monkeypatch, iterations=3)
    assert max(ratios) < 1e-4
    assert max(logged) < 1e-5


def test_isolated_agents_do_not_depend_on_how_many_others_exist(tmp_path):
    """Agent 0 of three isolated ones has the rows and weights of agent 0 alone.

    The others are no copies of it.
    """
    script = PRPO_MINIGRID
    changes = {"communicator": "identity", "iterations": 3}
    three, _ = train(script, tmp_path / "three", **changes)
    one, _ = train(script, tmp_path / "one", num_agents=1, **changes)
    weights = weights_of(three)
    assert torch.equal(weights[0], weights_of(one)[0])
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
    assert rows_of(three)[::3] == rows_of(one)


def test_coefficient_zero_is_isolated_without_penalty(tmp_path):
    """In PR-PPO peers act through the penalty alone: without it they change no weight."""
    short = {"local_updates": 1, "iterations": 2}
    runs = {
        (name, coef): weights_of(train(PRPO_MINIGRID, tmp_path / f"{name}{coef}", **changes)[0])
        for name in ("identity", "uniform")
        for coef in (0.0, 1.0)
        for changes in [short | {"communicator": name, "kl_coef": coef}]
    }
    for i in range(3):
        assert torch.equal(runs["uniform", 0.0][i], runs["identity", 0.0][i])
        assert (runs["uniform", 1.0][i] - runs["identity", 1.0][i]).abs().max() > 1e-4
        assert (runs["identity", 1.0][i] - runs["identity", 0.0][i]).abs().max() > 1e-4


def test_pr_ppo_exchanges_policies_and_keeps_parameters(tmp_path):
    """A round changes no parameter of PR-PPO; only later updates depend on the peers."""
    changes = {"communicator": "uniform", "iterations": 3}
    rounds, never, after = (
        weights_of(train(PRPO_MINIGRID, tmp_path / name, anneal_lr=False, **changes | more)[0])
        for name, more in {
            "rounds": {},
            "never": {"local_updates": 5},
            "after": {"local_updates": 2},
        }.items()
    )
    for i in range(3):
        assert torch.equal(rounds[i], never[i])
        assert (after[i] - never[i]).abs().max() > 1e-4
        assert (rounds[i] - rounds[(i + 1) % 3]).abs().max() > 1e-3


@on([PRPO_MINIGRID, SLOW_ATARI, FEDAVG_MINIGRID])
def test_similarity_is_computed_from_exchanged_policies(script, tmp_path):
    """In real runs the logged C is their similarity on the public states."""
    n = 3 if script.family == "MiniGrid" else 2
    changes = {
        "num_agents": n,
        "communicator": "similarity",
        "iterations": 1,
        "local_updates": 1,
        "num_steps": 64,
    }
    folder, summary = train(script, tmp_path / "similarity", **changes)
    sent = n * (n - 1) * script.parameters * 4
    assert summary["communication_rounds"] == 1
    assert summary["communication_bytes"] == sent
    logged = communicator_of(folder)
    states = script.collect_public_states(script.Args(**summary["settings"]))
    agents = [script.new_agent() for _ in range(n)]
    exchanged = folder
    if script.averages:  # since the exchange: the agents that were exchanged are those of no round
        exchanged, _ = train(script, tmp_path / "parent", **changes | {"local_updates": 2})
    for i, agent in enumerate(agents):
        agent.load_state_dict(load_file(exchanged / f"agent_{i}.safetensors"))
    with torch.no_grad():
        probs = torch.stack([agent(states)[0].softmax(-1).double() for agent in agents])
    expected = torch.einsum("isa,jsa->ij", probs, probs)
    expected = (expected / expected.sum(1, keepdim=True)).float()
    torch.testing.assert_close(logged, expected, rtol=0, atol=1e-5)
    assert logged.unique().numel() > n


def communicator_of(folder):
    """The matrix that TensorBoard shows last."""
    scalars = scalars_of(folder)
    n = math.isqrt(sum(tag.startswith("communicator/c_") for tag in scalars))
    return torch.tensor(
        [[scalars[f"communicator/c_{i}_{j}"][-1][1] for j in range(n)] for i in range(n)]
    )


# --- agents that fail ---


def poison(script, monkeypatch, agents, calls):
    """After their update number `calls` a parameter of these agents is NaN."""
    update = script.update
    seen = []

    def spoil(agent, *rest):
        seen.append(agent)
        position = list(dict.fromkeys(map(id, seen))).index(id(agent))  # they come in order
        losses = update(agent, *rest)
        if position in agents and sum(other is agent for other in seen) == calls:
            with torch.no_grad():
                agent.critic.bias.fill_(torch.nan)
        return losses

    script.patch(monkeypatch, "update", spoil)


@on_minigrid
def test_an_agent_that_diverges_is_named_and_its_peers_go_on(script, tmp_path, monkeypatch, capsys):
    """It gets no weight, learns no more and is recorded as NaN; the others train as before."""
    n = 4
    poison(script, monkeypatch, {1}, 2)
    changes = {
        "num_agents": n,
        "communicator": "self-preferred",
        "self_preference": 0.4,
        "top_k": 1,
    }
    changes |= {"local_updates": 3, "eval_episodes": 1, "eval_every": 4}
    folder, summary = train(script, tmp_path, **changes)
    output = capsys.readouterr().out
    assert output.count("agent 1 has diverged") == 1
    assert output.count("has diverged") == 1
    heals = script.averages  # agent 1 leaves the round with the average of its peers
    assert summary["completed"]
    assert summary["diverged"] == ([] if heals else [1])
    for i in range(n):
        result = summary["evaluation"]["agents"][i][summary["settings"]["env_id"]]["mean"]
        finite = heals or i != 1
        assert (result is not None) == finite
        # It has not taken another step
        assert weights_of(folder)[i].isnan().sum() == (0 if finite else 1)
    if not heals:
        evaluations = [row for row in table_of(folder, "evaluations") if row["agent"] == "1"]
        assert {row["mean_return"] for row in evaluations} == {"nan"}
    diverged_iterations = {"3"} if heals else {"3", "4", "5", "6"}
    for row in rows_of(folder):
        diverged = row["agent"] == "1" and row["iteration"] in diverged_iterations
        assert (row["policy_loss"] == "nan") == diverged
    expected = torch.zeros(n, n)
    for i in range(n):
        # The peer is the next agent that has not diverged
        expected[i, i] = 0.4
        expected[i, 2 if i == 0 else (i + 1) % n] = 0.6
    points = scalars_of(folder)
    for i in (0, 2, 3):
        for j in range(n):
            _, entry = points[f"communicator/c_{i}_{j}"][2]
            assert entry == pytest.approx(expected[i, j].item(), abs=1e-6)


@on_minigrid
def test_a_run_in_which_all_agents_diverge_ends_well(script, tmp_path, monkeypatch):
    """Weights and summary record it; averaging does not turn unusable parameters into zeros."""
    poison(script, monkeypatch, {0, 1, 2}, 3)
    folder, summary = train(script, tmp_path, eval_episodes=1)
    assert summary["diverged"] == [0, 1, 2]
    assert summary["evaluation"]["group"] is None
    for weights in weights_of(folder).values():
        assert weights.isnan().sum() == 1
        assert weights.count_nonzero() > len(weights) / 2


def test_minibatches_without_a_sample_are_skipped(tmp_path):
    """With more minibatches than valid samples agents learn, and nothing becomes NaN."""
    changes = {
        "num_agents": 1,
        "communicator": "identity",
        "num_envs": 1,
        "num_steps": 8,
        "num_minibatches": 8,
    }
    changes |= {"env_id": "MiniGrid-Empty-5x5-v0", "iterations": 24, "save_every": 99}
    folder, summary = train(PRPO_MINIGRID, tmp_path, **changes)
    assert weights_of(folder)[0].isfinite().all()
    assert summary["diverged"] == []
    assert all(row["policy_loss"] != "nan" for row in rows_of(folder))
    # When an episode ends, a step only resets
    assert any(float(row["episodes"]) for row in rows_of(folder))


# --- rounds ---


def test_a_run_shorter_than_an_interval_says_so(tmp_path, capsys):
    _, summary = train(PRPO_MINIGRID, tmp_path, local_updates=7, iterations=2)
    assert re.search(r"\bno\b.*\brounds?\b", capsys.readouterr().out, re.IGNORECASE)
    assert summary["communication_rounds"] == summary["communication_bytes"] == 0


# --- numerics ---


def first_log_ratios(script, run_dir, monkeypatch, **changes):
    """max |log ratio| before the only step of every agent and iteration, and old_approx_kl as it
    is logged there.
    """
    ratios = []
    logged = []
    update = script.update

    def record(agent, optimizer, generator, batch, *rest):
        with torch.no_grad():
            logprobs = agent(batch["obs"])[0].log_softmax(-1)[batch["obs_inds"]]
        now = logprobs.gather(1, batch["actions"][:, None])[:, 0]
        ratios.append((now - batch["logprobs"]).abs().max().item())
        losses = update(agent, optimizer, generator, batch, *rest)
        logged.append(abs(losses["losses/old_approx_kl"]))
        return losses

    changes = changes | {"update_epochs": 1, "num_minibatches": 1}
    with monkeypatch.context() as patch:
        script.patch(patch, "update", record)
        folder, _ = train(script, run_dir, **changes)
    assert len(ratios) == len(logged) == changes["iterations"] * 3
    return ratios, logged, folder


@on([PRPO_MINIGRID, PRPO_ATARI])
def test_the_shortest_rollouts_have_a_step_to_learn_from(script, tmp_path):
    """The other ones may start an episode or a game, at the beginning and in the middle."""
    steps = {"MiniGrid": 2, "Atari": 4}[script.family]
    changes = {"num_agents": 1, "communicator": "identity", "num_envs": 1, "num_steps": steps}
    iterations = {"MiniGrid": 60, "Atari": 50}[script.family]
    changes |= {"num_minibatches": 1, "iterations": iterations, "save_every": iterations - 1}
    folder, summary = train(script, tmp_path, **changes)
    assert summary["completed"]
    assert sum(int(float(row["episodes"])) for row in rows_of(folder)) > 0


@pytest.mark.parametrize(
    ("script", "changes"),
    [(PRPO_MINIGRID, {}), (PRPO_ATARI, {"precision": "bfloat16"})],
    ids=str,
)
def test_the_first_minibatch_has_ratio_one(script, changes, tmp_path, monkeypatch):
    """Before the first gradient step the policy is the behaviour policy, rounding included.

    Weights stay float32.
    """
    shape = {"iterations": 2, "num_steps": 32}
    ratios, logged, folder = first_log_ratios(script, tmp_path, monkeypatch, **shape, **changes)
    assert max(ratios) < 1e-4
    assert max(logged) < 1e-5
    for tensor in load_file(folder / "agent_0.safetensors").values():
        assert tensor.dtype == torch.float32


def test_bfloat16_is_in_effect_up_to_the_heads():
    script = PRPO_ATARI
    rough = script.new_agent(bfloat16=True)
    exact = script.new_agent()
    exact.load_state_dict(rough.state_dict())
    obs = PRPO_ATARI.random_obs(16)
    difference = (rough(obs)[1] - exact(obs)[1]).abs().max()
    assert rough(obs)[0].dtype == rough(obs)[1].dtype == torch.float32
    assert 1e-4 < difference < 0.1


@pytest.mark.parametrize(
    ("script", "seed"),
    [(PRPO_MINIGRID, 11), pytest.param(FEDAVG_MINIGRID, 12, marks=pytest.mark.slow)],
    ids=str,
)
def test_three_agents_learn_a_room(script, seed, tmp_path):
    """Three agents that exchange solve a small room in which untrained ones seldom do."""
    changes = {
        "communicator": "uniform",
        "seed": seed,
        "num_envs": 4,
        "total_timesteps": 28 * 256,
        "local_updates": 4,
    }
    changes |= {"update_epochs": 4, "num_minibatches": 4, "save_every": 40, "eval_episodes": 12}
    _, summary = train(script, tmp_path, **changes)
    task = summary["settings"]["env_id"]
    torch.manual_seed(seed)
    args = script.Args(**summary["settings"])
    untrained = script.evaluate(args, script.new_agent(), task, list(range(12)), seed)
    assert untrained.mean() < 0.6
    assert summary["evaluation"]["group"] > 0.85
    assert all(agent[task]["mean"] > 0.8 for agent in summary["evaluation"]["agents"])
