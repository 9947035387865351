"""The mathematics of training: an independent plain version, configurations that must be equivalent, and learning."""

import copy

import numpy as np
import pytest
import torch
from helpers import (
    FEDAVG_ATARI,
    FEDAVG_MINIGRID,
    MINIGRID,
    PRPO_ATARI,
    PRPO_MINIGRID,
    assert_same_run,
    every_script,
    every_variant,
    on_minigrid,
    only_run,
    rows_of,
    scalars_of,
    tiny,
    weights_of,
)
from safetensors.torch import load_file
from torch.distributions import Categorical, kl_divergence
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import communicators
import fedavg_ppo


def train(script, run_dir, **changes):
    """A tiny run in this process. Returns (its folder, what summary.json holds)."""
    summary = script.main(tiny(script, run_dir, **{"eval_episodes": 0} | changes))
    return only_run(run_dir), summary


# --- an independent plain version: one agent after the other, no stacking, no threads, nothing shared but the model ---


def plain_rollout(script, args, agent, envs, generator):
    """One rollout as lists over environments of episodes, each a dict of equally long lists; the last may be cut."""
    noise = torch.empty(args.num_steps, args.num_envs, script.num_actions).exponential_(generator=generator)
    episodes = [[new_episode()] for _ in range(args.num_envs)]
    for step in range(args.num_steps):
        obs = torch.from_numpy(envs["obs"].copy())
        with torch.no_grad():
            logits, values = agent(obs)
        policy = Categorical(logits=logits)
        actions = (policy.probs / noise[step]).argmax(-1)
        results = script.step_envs(envs["pools"], actions.numpy())
        envs["obs"], rewards, terminations, truncations, *_, valid = results
        for k in np.flatnonzero(valid):
            episode = episodes[k][-1]
            for name, value in (("obs", obs[k]), ("action", actions[k]), ("value", values[k]), ("time", step)):
                episode[name].append(value)
            episode["logprob"].append(policy.log_prob(actions)[k])
            episode["policy"].append(policy.probs[k])
            episode["reward"].append(float(rewards[k]))
            if terminations[k] or truncations[k] or step == args.num_steps - 1:
                with torch.no_grad():
                    final = agent(torch.from_numpy(envs["obs"][k : k + 1].copy()))[1].item()
                episode["bootstrap"] = 0.0 if terminations[k] else final
            if terminations[k] or truncations[k]:
                episodes[k].append(new_episode())
    return episodes


def new_episode():
    return {name: [] for name in ("obs", "action", "value", "time", "logprob", "policy", "reward")}


def plain_batch(args, episodes):
    """The samples of a rollout in the order of time, with advantages by the definition."""
    samples = []
    for k, own in enumerate(episodes):
        for episode in own:
            values = [*map(float, episode["value"]), episode.get("bootstrap", 0.0)]
            deltas = [r + args.gamma * values[t + 1] - values[t] for t, r in enumerate(episode["reward"])]
            for t, time in enumerate(episode["time"]):
                decay = args.gamma * args.gae_lambda
                advantage = sum(decay ** (j - t) * deltas[j] for j in range(t, len(deltas)))
                one = {name: episode[name][t] for name in ("obs", "action", "value", "logprob", "policy")}
                samples.append((time, k, one | {"advantage": torch.tensor(advantage)}))
    samples = [sample for *_, sample in sorted(samples, key=lambda sample: sample[:2])]
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def plain_reference(args, batch, i, communicator, snapshots):
    """The reference policy of agent i on its own states: (C_i pi)(.|s), arithmetic or geometric."""
    policies = [batch["policy"]] * len(snapshots)
    for j, snapshot in enumerate(snapshots):
        if j != i or args.self_reference == "snapshot":
            with torch.no_grad():
                policies[j] = snapshot(batch["obs"])[0].softmax(-1)
    if args.mixture == "arithmetic":
        return sum(c * policy for c, policy in zip(communicator[i], policies, strict=True))
    product = torch.stack([policy**c for c, policy in zip(communicator[i], policies, strict=True)]).prod(0)
    return product / product.sum(-1, keepdim=True)


def plain_loss(script, args, agent, batch):
    """PPO's loss with the KL penalty of eq. 3 or 4."""
    logits, value = agent(batch["obs"])
    policy, reference = Categorical(logits=logits), Categorical(probs=batch["reference"])
    advantage = batch["advantage"]
    if args.norm_adv:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    ratio = (policy.log_prob(batch["action"]) - batch["logprob"]).exp()
    objective, target = ratio * advantage, batch["advantage"] + batch["value"]
    value_loss = (value - target) ** 2
    if args.clip_coef > 0:
        objective = torch.minimum(objective, ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef) * advantage)
        if args.clip_vloss:
            near = batch["value"] + (value - batch["value"]).clamp(-args.clip_coef, args.clip_coef)
            value_loss = torch.maximum(value_loss, (near - target) ** 2)
    forward = args.kl_direction == "forward"
    penalty = kl_divergence(reference, policy) if forward else kl_divergence(policy, reference)
    loss = -objective + args.vf_coef * value_loss / 2 - args.ent_coef * policy.entropy()
    return (loss + getattr(args, script.coef) * penalty).mean()


def plain_training(script, args, communicator):
    """Train as the script does, with a constant communicator, and return the agents."""
    n, iterations = args.num_agents, args.total_timesteps // (args.num_envs * args.num_steps)
    torch.manual_seed(args.seed)
    agents = [script.new_agent()]
    agents += [copy.deepcopy(agents[0]) for _ in range(n - 1)]
    snapshots = copy.deepcopy(agents)
    optimizers = [torch.optim.Adam(agent.parameters(), eps=1e-5) for agent in agents]
    generators = [torch.Generator().manual_seed(script.derive_seed(args.seed, i)) for i in range(n)]
    for iteration in range(iterations):
        if iteration % args.save_every == 0:
            made = [script.make_envs(args, range(i, i + 1), range(args.num_envs), iteration) for i in range(n)]
            envs = [{"pools": pools, "obs": obs} for pools, obs in made]
        for i, agent in enumerate(agents):
            batch = plain_batch(args, plain_rollout(script, args, agent, envs[i], generators[i]))
            batch["reference"] = batch["policy"]
            if script.module is not fedavg_ppo:
                batch["reference"] = plain_reference(args, batch, i, communicator, snapshots)
            for _ in range(args.update_epochs):
                order = torch.randperm(len(batch["obs"]), generator=generators[i])
                for part in np.array_split(order.numpy(), args.num_minibatches):
                    loss = plain_loss(script, args, agent, {name: tensor[part] for name, tensor in batch.items()})
                    optimizers[i].zero_grad()
                    loss.backward()
                    norm = sum((parameter.grad**2).sum() for parameter in agent.parameters()).sqrt()
                    for parameter in agent.parameters():
                        parameter.grad *= min(1.0, args.max_grad_norm / norm)
                    annealed = args.learning_rate * (1 - iteration / iterations)
                    optimizers[i].param_groups[0]["lr"] = annealed if args.anneal_lr else args.learning_rate
                    optimizers[i].step()
        if (iteration + 1) % args.local_updates == 0:
            if script.module is fedavg_ppo:
                theta = communicator @ torch.stack([parameters_to_vector(agent.parameters()) for agent in agents])
                for agent, row in zip(agents, theta.detach(), strict=True):
                    vector_to_parameters(row, agent.parameters())
            snapshots = copy.deepcopy(agents)
    return agents


THREE = {"num_agents": 3, "local_updates": 1, "iterations": 4}
PREFERRED = torch.full((3, 3), 0.35).fill_diagonal_(0.3)
NEXT_ONE = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5]])  # not symmetric
PLAIN = {
    "one agent": ([*MINIGRID, FEDAVG_ATARI], {"num_agents": 1, "communicator": "uniform"}, torch.ones(1, 1)),
    "one agent, other options": (
        MINIGRID,
        {"num_agents": 1, "anneal_lr": False, "norm_adv": False, "clip_vloss": False, "kl_direction": "reverse"},
        torch.ones(1, 1),
    ),
    "one agent, no clipping": (MINIGRID, {"num_agents": 1, "clip_coef": 0.0, "max_grad_norm": 0.05}, torch.ones(1, 1)),
    "isolated": (MINIGRID, THREE | {"communicator": "identity"}, torch.eye(3)),
    "uniform": (MINIGRID, THREE | {"communicator": "uniform", "local_updates": 2}, torch.full((3, 3), 1 / 3)),
    "two agents": (
        [PRPO_ATARI],
        {"num_agents": 2, "local_updates": 1, "communicator": "uniform"},
        torch.full((2, 2), 1 / 2),
    ),
    "one peer": (MINIGRID, THREE | {"communicator": "uniform", "top_k": 1}, NEXT_ONE),
    "geometric, reverse, snapshots": (
        [PRPO_MINIGRID],
        THREE
        | {"communicator": "self-preferred", "self_preference": 0.3, "mixture": "geometric"}
        | {"kl_direction": "reverse", "self_reference": "snapshot", "local_updates": 2},
        PREFERRED,
    ),
}


@pytest.mark.parametrize(
    ("script", "changes", "communicator"),
    [
        pytest.param(script, changes, communicator, id=f"{name}-{script}")
        for name, (scripts, changes, communicator) in PLAIN.items()
        for script in scripts
    ],
)
def test_training_equals_the_plain_version(script, changes, communicator, tmp_path):
    """The same parameters, after several iterations and a restart of the environments, as an independent plain loop.

    With one agent or the identity communicator that loop is plain PPO with a KL penalty to its own old policy.
    """
    changes = {"iterations": 3, script.coef: 5.0, "eval_episodes": 0} | changes
    folder, _ = train(script, tmp_path, **changes)
    agents = plain_training(script, tiny(script, tmp_path, **changes), communicator)
    weights = weights_of(folder)
    assert len(weights) == len(agents)
    for i, agent in enumerate(agents):
        expected = torch.cat([tensor.flatten() for _, tensor in sorted(agent.state_dict().items())])
        found = load_file(folder / f"agent_{i}.safetensors")
        found = torch.cat([tensor.flatten() for _, tensor in sorted(found.items())])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


# --- equivalences ---


@every_variant
@pytest.mark.parametrize(("number", "envs"), [(4, 5), (1, 1), (3, 1), (1, 16)])
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.05)])
def test_stacked_forward_equals_every_agents_own(script, number, envs, precision, tolerance):
    """One forward for all agents is each agent's forward on its own observations, up to rounding.

    Orthogonal initialisation makes small heads and no biases; here every layer must matter.
    """
    torch.manual_seed(number)
    agents = [script.new_agent(bfloat16=precision == "bfloat16") for _ in range(number)]
    for agent in agents:
        for parameter in agent.parameters():
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, std=0.2)
        torch.nn.init.orthogonal_(agent.actor.weight)
    obs = script.random_obs(number, envs)
    with torch.no_grad():
        logits, values = script.Agent.stacked_forward(script.Agent.stack(agents), obs)
        expected = [agent(own) for agent, own in zip(agents, obs, strict=True)]
    assert logits.dtype == values.dtype == torch.float32
    torch.testing.assert_close(logits, torch.stack([own for own, _ in expected]), rtol=0, atol=tolerance)
    torch.testing.assert_close(values, torch.stack([own for _, own in expected]), rtol=0, atol=tolerance)
    assert len({row.numpy().tobytes() for row in logits.flatten(0, 1)}) == number * envs
    assert logits.std() > 10 * tolerance or precision == "bfloat16"  # what is compared is not small


@every_script
def test_isolated_agents_do_not_depend_on_how_many_others_exist(script, tmp_path):
    """Agent 0 of three isolated ones has the rows and weights of agent 0 alone, and the others are not copies of it."""
    changes = {"communicator": "identity", "iterations": 6 if script.family == "MiniGrid" else 3}
    three, _ = train(script, tmp_path / "three", **changes)
    one, _ = train(script, tmp_path / "one", num_agents=1, **changes)
    weights = weights_of(three)
    torch.testing.assert_close(weights[0], weights_of(one)[0], rtol=0, atol=1e-5)
    assert not torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])
    for row, expected in zip(rows_of(three)[::3], rows_of(one), strict=True):
        assert row["agent"] == expected["agent"] == "0"
        for column in row.keys() - {"env_id"}:
            assert float(row[column]) == pytest.approx(float(expected[column]), rel=1e-5, abs=1e-5, nan_ok=True)


@on_minigrid
def test_self_preference_one_is_isolated(script, tmp_path):
    """C = I by the self-preferred communicator: the run of the identity communicator, and not one byte is sent."""
    isolated, _ = train(script, tmp_path / "identity", communicator="identity")
    preferred, summary = train(script, tmp_path / "self", communicator="self-preferred", self_preference=1.0)
    assert_same_run(preferred, isolated, exactly=True)
    assert summary["communication_bytes"] == 0


def test_coefficient_zero_is_isolated_without_penalty(tmp_path):
    """In PR-PPO peers act through the penalty alone: without it their presence changes no weight; with it, it does."""
    runs = {
        (name, coef): weights_of(train(PRPO_MINIGRID, tmp_path / f"{name}{coef}", **changes)[0])
        for name in ("identity", "uniform")
        for coef in (0.0, 1.0)
        for changes in [{"communicator": name, "communication_coef": coef}]
    }
    for i in range(3):
        assert torch.equal(runs["uniform", 0.0][i], runs["identity", 0.0][i])
        assert (runs["uniform", 1.0][i] - runs["identity", 1.0][i]).abs().max() > 1e-4
        assert (runs["identity", 1.0][i] - runs["identity", 0.0][i]).abs().max() > 1e-4


@pytest.mark.parametrize(("name", "preference"), [("uniform", 1 / 3), ("self-preferred", 0.6)])
def test_fedavg_averages_the_parameters_of_isolated_agents(name, preference, tmp_path):
    """At the first round the parameters become C theta, theta being those of a run that has no round.

    With the uniform communicator all agents leave the round as one.
    """
    changes = {"iterations": 3, "communicator": name, "self_preference": preference}
    averaged = weights_of(train(FEDAVG_MINIGRID, tmp_path / "averaged", **changes)[0])
    separate = weights_of(train(FEDAVG_MINIGRID, tmp_path / "separate", local_updates=4, **changes)[0])
    theta = torch.stack([separate[i] for i in range(3)])
    expected = communicators.self_preferred(3, preference) @ theta
    torch.testing.assert_close(torch.stack([averaged[i] for i in range(3)]), expected, rtol=0, atol=1e-6)
    assert (theta[0] - theta[1]).abs().max() > 1e-3
    assert torch.equal(averaged[0], averaged[1]) == (name == "uniform")


def test_pr_ppo_exchanges_policies_and_keeps_parameters(tmp_path):
    """A round by itself changes no parameter of PR-PPO: agents stay different, and follow their peers only after it."""
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


@every_variant
def test_communicators_are_computed_from_what_agents_may_tell(script, tmp_path):
    """In real runs the logged C is the similarity of the exchanged policies, or the agents' returns since the round."""
    changes = {"num_steps": 128 if script.family == "MiniGrid" else 192, "iterations": 3}
    folder, summary = train(script, tmp_path / "similarity", communicator="similarity", **changes)
    assert summary["communication_rounds"] == 1 and summary["communication_bytes"] == 6 * script.parameters * 4
    logged = communicator_of(folder)
    states = script.public_states(script.Args(**summary["settings"]))
    agents = [script.new_agent() for _ in range(3)]
    exchanged = folder
    if script.module is fedavg_ppo:  # it has averaged since: the agents that were exchanged are those of no round
        exchanged, _ = train(script, tmp_path / "parent", communicator="similarity", local_updates=4, **changes)
    for i, agent in enumerate(agents):
        agent.load_state_dict(load_file(exchanged / f"agent_{i}.safetensors"))
    with torch.no_grad():
        probs = torch.stack([agent(states)[0].softmax(-1).double() for agent in agents])
    expected = torch.einsum("isa,jsa->ij", probs, probs)
    expected = (expected / expected.sum(1, keepdim=True)).float()
    torch.testing.assert_close(logged, expected, rtol=0, atol=1e-5)
    assert logged.unique().numel() > 3

    folder, _ = train(script, tmp_path / "reward", communicator="reward", **changes)
    totals, episodes = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for row in rows_of(folder):
        count = float(row["episodes"])
        episodes[int(row["agent"])] += count
        totals[int(row["agent"])] += count * float(row["episodic_return"]) if count else 0.0
    means = totals / episodes
    torch.testing.assert_close(communicator_of(folder), (means / means.sum()).expand(3, 3).float(), rtol=0, atol=1e-5)
    assert means.unique().numel() > 1


def communicator_of(folder):
    """The matrix that TensorBoard shows last."""
    scalars = scalars_of(folder)
    return torch.tensor([[scalars[f"communicator/c_{i}_{j}"][-1][1] for j in range(3)] for i in range(3)])


@on_minigrid
@pytest.mark.parametrize(("target_kl", "epochs"), [(0.0, 1), (1e9, 3)])
def test_target_kl_skips_an_agents_further_epochs(script, target_kl, epochs, tmp_path, monkeypatch):
    """Epochs are never cut in the middle, and one agent's decision is its own."""
    calls, update = {}, script.update

    def count(agent, *rest):
        calls[id(agent)] = calls.get(id(agent), 0) + 1
        return update(agent, *rest)

    monkeypatch.setattr(script.module, "update", count)
    train(script, tmp_path, target_kl=target_kl, update_epochs=3, num_minibatches=4)
    assert list(calls.values()) == [6 * epochs * 4] * 3


# --- numerics ---


@every_script
def test_threads_change_nothing(script, tmp_path):
    """Agents that learn at the same time do not share generators: equal seeds give equal runs, as with one thread.

    On Atari the environments are played in one part with one thread, and in two with two.
    """
    folders, threads = [], torch.get_num_threads()
    most, changes = (3, {}) if script.family == "MiniGrid" else (2, {"num_agents": 2, "iterations": 2})
    for number in (1, most, most):
        torch.set_num_threads(number)
        folders.append(train(script, tmp_path / str(len(folders)), **changes)[0])
        torch.set_num_threads(threads)
    assert_same_run(folders[2], folders[1], exactly=True)
    assert_same_run(folders[1], folders[0])


def first_log_ratios(script, run_dir, monkeypatch, **changes):
    """max |log ratio| of the first minibatch of every agent and iteration, and old_approx_kl as it is logged."""
    ratios, logged, calls, update = [], [], {}, script.update
    names = list(script.METRICS)

    def record(agent, optimizer, batch, args):
        first = calls.setdefault(id(agent), 0) % (args.update_epochs * args.num_minibatches) == 0
        calls[id(agent)] += 1
        if first:
            with torch.no_grad():
                logprobs = agent(batch["obs"])[0].log_softmax(-1)
            now = logprobs.gather(1, batch["actions"][:, None])[:, 0]
            ratios.append((now - batch["logprobs"]).abs().max().item())
        stats = update(agent, optimizer, batch, args)
        if first:
            logged.append(abs(stats[names.index("old_approx_kl") - names.index("value_loss")].item()))
        return stats

    with monkeypatch.context() as patch:
        patch.setattr(script.module, "update", record)
        folder, _ = train(script, run_dir, **changes)
    assert len(ratios) == len(logged) == changes["iterations"] * 3
    return ratios, logged, folder


@every_script
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_first_minibatch_has_ratio_one(script, precision, tmp_path, monkeypatch):
    """Before the first gradient step the policy is the behaviour policy, rounding included; weights stay float32."""
    ratios, logged, folder = first_log_ratios(script, tmp_path, monkeypatch, precision=precision, iterations=3)
    assert max(ratios) < 1e-4 and max(logged) < 1e-5
    for tensor in load_file(folder / "agent_0.safetensors").values():
        assert tensor.dtype == torch.float32
    rough, exact = script.new_agent(bfloat16=precision == "bfloat16"), script.new_agent()
    exact.load_state_dict(rough.state_dict())
    obs = script.random_obs(16)
    difference = (rough(obs)[1] - exact(obs)[1]).abs().max()
    assert rough(obs)[0].dtype == rough(obs)[1].dtype == torch.float32
    assert 1e-4 < difference < 0.1 if precision == "bfloat16" else difference == 0  # the precision is in effect


@pytest.mark.parametrize(
    ("script", "seed"), [pytest.param(script, seed, id=str(script)) for seed, script in enumerate(MINIGRID, 11)]
)
def test_three_agents_learn_a_room(script, seed, tmp_path):
    """Three agents that talk solve a small room in which untrained ones seldom find the goal."""
    changes = {"communicator": "uniform", "seed": seed, "num_envs": 4, "total_timesteps": 40 * 256, "local_updates": 4}
    changes |= {"update_epochs": 4, "num_minibatches": 4, "save_every": 40, "eval_episodes": 20}
    _, summary = train(script, tmp_path, **changes)
    task = summary["settings"]["env_id"]
    torch.manual_seed(seed)
    args = script.Args(**summary["settings"])
    untrained = script.evaluate(args, script.new_agent(), task, list(range(20)), seed)
    assert untrained.mean() < 0.6
    assert summary["evaluation"]["group"] > 0.85
    assert all(agent[task]["mean"] > 0.8 for agent in summary["evaluation"]["agents"])
