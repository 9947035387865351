"""The mathematics of training: an independent plain version, configurations that must be equivalent, and learning."""

import copy
import math
import re

import numpy as np
import pytest
import torch
from helpers import (
    ATARI,
    FEDAVG_ATARI,
    FEDAVG_MINIGRID,
    MINIGRID,
    PRPO_ATARI,
    PRPO_MINIGRID,
    assert_same_rows,
    assert_same_run,
    assert_weights,
    evaluations_of,
    every_script,
    every_variant,
    on,
    on_minigrid,
    only_run,
    rows_of,
    scalars_of,
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


# --- an independent plain version: one agent after the other, no stacking, no threads, nothing shared but the model ---


def plain_rollout(script, args, agent, envs, generator):
    """One rollout as lists over environments of episodes, each a dict of equally long lists; the last may be cut."""
    noise = torch.empty(args.num_steps, args.num_envs, script.num_actions).exponential_(
        generator=generator
    )
    episodes = [[new_episode()] for _ in range(args.num_envs)]
    for step in range(args.num_steps):
        obs = torch.from_numpy(envs.obs[0].copy())
        with torch.no_grad():
            logits, values = agent(obs)
        policy = Categorical(logits=logits)
        actions = (policy.probs / noise[step]).argmax(-1)
        results = script.step(envs, actions.numpy()[None])
        rewards, terminations, truncations, valid = (signal[0] for signal in results[:4])
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
                    final = agent(torch.from_numpy(envs.obs[0, k : k + 1].copy()))[1].item()
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
    for j, snapshot in enumerate(snapshots):
        if j != i or args.self_reference == "snapshot":
            with torch.no_grad():
                policies[j] = snapshot(batch["obs"])[0].softmax(-1)
    if args.mixture == "arithmetic":
        return sum(c * policy for c, policy in zip(communicator[i], policies, strict=True))
    product = torch.stack(
        [policy**c for c, policy in zip(communicator[i], policies, strict=True)]
    ).prod(0)
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
        objective = torch.minimum(
            objective, ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef) * advantage
        )
        if args.clip_vloss:
            near = batch["value"] + (value - batch["value"]).clamp(-args.clip_coef, args.clip_coef)
            value_loss = torch.maximum(value_loss, (near - target) ** 2)
    forward = args.kl_direction == "forward"
    penalty = kl_divergence(reference, policy) if forward else kl_divergence(policy, reference)
    loss = -objective + args.vf_coef * value_loss / 2 - args.ent_coef * policy.entropy()
    return (loss + args.kl_coef * penalty).mean()


def plain_training(script, args, communicator):
    """Train as the script does, isolated up to the first round and with this communicator from then on: the agents."""
    n, iterations = args.num_agents, args.total_timesteps // (args.num_envs * args.num_steps)
    agents = []
    for i in range(n):
        torch.manual_seed(args.seed)
        agents.append(
            script.new_agent(
                **({"hidden": args.hidden_sizes[i]} if vars(args).get("hidden_sizes") else {})
            )
        )
    views, matrix = [copy.deepcopy(agents) for _ in range(n)], torch.eye(n)  # nobody has spoken yet
    optimizers = [torch.optim.Adam(agent.parameters(), eps=1e-5) for agent in agents]
    generators = [torch.Generator().manual_seed(script.derive_seed(args.seed, i)) for i in range(n)]
    for iteration in range(iterations):
        if iteration % args.save_every == 0:
            envs = [script.Envs(args, range(i, i + 1), iteration) for i in range(n)]
        for i, agent in enumerate(agents):
            batch = plain_batch(args, plain_rollout(script, args, agent, envs[i], generators[i]))
            batch["reference"] = batch["policy"]
            if not script.averages:
                batch["reference"] = plain_reference(args, batch, i, matrix, views[i])
            for _ in range(args.update_epochs):
                order = torch.randperm(len(batch["obs"]), generator=generators[i])
                for part in np.array_split(order.numpy(), args.num_minibatches):
                    loss = plain_loss(
                        script, args, agent, {name: tensor[part] for name, tensor in batch.items()}
                    )
                    optimizers[i].zero_grad()
                    loss.backward()
                    norm = sum((parameter.grad**2).sum() for parameter in agent.parameters()).sqrt()
                    for parameter in agent.parameters():
                        parameter.grad *= min(1.0, args.max_grad_norm / norm)
                    annealed = args.learning_rate * (1 - iteration / iterations)
                    optimizers[i].param_groups[0]["lr"] = (
                        annealed if args.anneal_lr else args.learning_rate
                    )
                    optimizers[i].step()
        if (iteration + 1) % args.local_updates == 0:
            seed = script.derive_seed(args.seed, iteration + 1, 7)
            participating = communicators.draw_participants(n, args.participation, seed)
            part = participating.nonzero().flatten().tolist()
            present = communicator * participating  # nobody listens to who sits out
            present = present / present.sum(1, keepdim=True)
            if script.averages:
                theta = present @ torch.stack(
                    [parameters_to_vector(agent.parameters()) for agent in agents]
                )
                for i in part:
                    vector_to_parameters(theta[i].detach(), agents[i].parameters())
            for i in part:
                matrix[i] = present[i]
                for j in part:
                    views[i][j] = copy.deepcopy(agents[j])
    return agents


THREE = {"num_agents": 3, "local_updates": 1, "iterations": 4}
PREFERRED = torch.full((3, 3), 0.35).fill_diagonal_(0.3)
NEXT_ONE = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5]])  # not symmetric
RING = communicators.sparsify(torch.ones(4, 4), communicators.ring(4))
# Nobody makes these two: `make_communicator` is replaced. Transposed, or with another diagonal, they would be others
OF_THREE = torch.tensor([[0.6, 0.3, 0.1], [0.0, 0.5, 0.5], [0.2, 0.1, 0.7]])
NO_SELF_WEIGHT = torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.0, 0.5], [0.2, 0.1, 0.7]])
OF_TWO = torch.tensor([[0.7, 0.3], [0.1, 0.9]])
SNAPSHOTS = {
    "mixture": "geometric",
    "kl_direction": "reverse",
    "self_reference": "snapshot",
    "local_updates": 2,
}
APART = {"learning_rate": 3e-3}  # then policies differ so much that it matters how they are mixed
PLAIN = {
    "one agent": (
        [*MINIGRID, FEDAVG_ATARI],
        {"num_agents": 1, "communicator": "uniform"},
        torch.ones(1, 1),
    ),
    "one agent, other options": (
        MINIGRID,
        {
            "num_agents": 1,
            "anneal_lr": False,
            "norm_adv": False,
            "clip_vloss": False,
            "kl_direction": "reverse",
        },
        torch.ones(1, 1),
    ),
    "one agent, no clipping": (
        MINIGRID,
        {"num_agents": 1, "clip_coef": 0.0, "max_grad_norm": 0.05},
        torch.ones(1, 1),
    ),
    "isolated": (MINIGRID, THREE | {"communicator": "identity"}, torch.eye(3)),
    "uniform": (
        MINIGRID,
        THREE | {"communicator": "uniform", "local_updates": 2},
        torch.full((3, 3), 1 / 3),
    ),
    "two agents": (
        [PRPO_ATARI],
        {"num_agents": 2, "local_updates": 1, "communicator": "uniform", "num_steps": 48},
        torch.full((2, 2), 1 / 2),
    ),
    "one peer": (MINIGRID, THREE | {"communicator": "uniform", "top_k": 1}, NEXT_ONE),
    "ring": (
        MINIGRID,
        THREE | {"num_agents": 4, "communicator": "uniform", "topology": "ring"},
        RING,
    ),
    "geometric, reverse, snapshots": (
        [PRPO_MINIGRID],
        THREE | {"communicator": "self-preferred", "self_preference": 0.3} | SNAPSHOTS,
        PREFERRED,
    ),
    "any matrix": (MINIGRID, THREE | {"local_updates": 2}, OF_THREE),
    "two of three take part": (
        [PRPO_MINIGRID],
        THREE | APART | {"participation": 0.67, "iterations": 6},
        OF_THREE,
    ),
    "two of three take part, one counts for nothing": (
        [FEDAVG_MINIGRID],
        THREE | APART | {"participation": 0.67, "iterations": 6},
        NO_SELF_WEIGHT,
    ),
    "networks of three sizes": (
        [PRPO_MINIGRID],
        THREE | APART | {"hidden_sizes": (32, 64, 16)},
        OF_THREE,
    ),
    "any matrix, two agents": (
        ATARI,
        {"num_agents": 2, "local_updates": 1, "num_steps": 64},
        OF_TWO,
    ),
    "any matrix, snapshots": ([PRPO_MINIGRID], THREE | SNAPSHOTS | APART, OF_THREE),
}


@pytest.mark.parametrize(
    ("script", "changes", "communicator"),
    [
        pytest.param(script, changes, communicator, id=f"{name}-{script}")
        for name, (scripts, changes, communicator) in PLAIN.items()
        for script in scripts
    ],
)
def test_training_equals_the_plain_version(script, changes, communicator, tmp_path, monkeypatch):
    """The same parameters, after several iterations and a restart of the environments, as an independent plain loop.

    With one agent or the identity communicator that loop is plain PPO with a KL penalty to its own old policy.
    """
    if "communicator" not in changes and len(communicator) > 1:
        script.patch(monkeypatch, "make_communicator", fixed(communicator))
    assert_trains_like_the_plain_version(script, communicator, tmp_path, **changes)


def fixed(communicator):
    """In the place of `make_communicator`: this matrix, as soon as anything is known of the agents."""

    def make(args, returns=None, log_probs=None, gains=None, usable=None):
        if returns is None:
            return torch.eye(args.num_agents)
        return communicator if usable.all() else communicators.drop_invalid(communicator, usable)

    return make


def assert_trains_like_the_plain_version(script, matrix, run_dir, **changes):
    """A short run ends with the parameters of the plain version, but for what rounding makes of them.

    Adam turns the sign of a vanishing gradient into a step: a few parameters differ by a small part of all steps.
    """
    changes = {"iterations": 3, "kl_coef": 5.0, "eval_episodes": 0} | changes
    folder, _ = train(script, run_dir, **changes)
    args = tiny(script, run_dir, **changes)
    agents = plain_training(script, args, matrix)
    assert len(weights_of(folder)) == len(agents)
    for i, agent in enumerate(agents):
        expected = torch.cat([tensor.flatten() for _, tensor in sorted(agent.state_dict().items())])
        found = load_file(folder / f"agent_{i}.safetensors")
        found = torch.cat([tensor.flatten() for _, tensor in sorted(found.items())])
        assert_weights(found, expected, args)


# --- equivalences ---


def lively_agents(script, number, **options):
    """Agents in which every layer matters: orthogonal initialisation makes small heads and no biases."""
    agents = [script.new_agent(**options) for _ in range(number)]
    for agent in agents:
        for parameter in agent.parameters():
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, std=0.2)
        torch.nn.init.orthogonal_(agent.actor.weight)
    return agents


TOLERANCES = pytest.mark.parametrize(
    ("precision", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.05)]
)


@pytest.mark.parametrize(("number", "envs"), [(4, 5), (1, 1), (3, 1), (1, 16)])
@TOLERANCES
def test_what_acts_for_agents_is_every_agents_own_forward(number, envs, precision, tolerance):
    """Looked up, asked before or not, it is each agent's forward on its own observations, up to rounding."""
    torch.manual_seed(number)
    script = PRPO_MINIGRID
    agents = lively_agents(script, number, bfloat16=precision == "bfloat16")
    obs, before = script.random_obs(number, envs), script.random_obs(number, 3)
    found = []
    for table, own, earlier in zip(script.make_actors(None, agents), obs, before, strict=True):
        table.refresh()
        table.look_up(earlier.numpy())
        found.append(
            [
                table.look_up(torch.cat((part, earlier)).numpy())[1][: len(part)]
                for part in own.split(2)
            ]
        )
    found = torch.stack([torch.from_numpy(np.concatenate(parts)) for parts in found])
    with torch.no_grad():
        expected = torch.stack([agent(own)[0] for agent, own in zip(agents, obs, strict=True)])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    assert len({row.numpy().tobytes() for row in found.flatten(0, 1)}) == number * envs
    assert found.std() > 10 * tolerance or precision == "bfloat16"  # what is compared is not small


def test_no_answer_of_an_old_policy_is_looked_up():
    """Neither of a screen of the last eight rollouts nor of one that was seen before them, and not since."""
    torch.manual_seed(0)
    (agent,) = lively_agents(PRPO_MINIGRID, 1)
    (table,) = PRPO_MINIGRID.make_actors(None, [agent])
    screens = PRPO_MINIGRID.random_obs(10, 2).numpy()
    for rollout in range(10):
        table.refresh()
        recent = {key for keys in table.met for key in keys}
        assert table.keys() == recent and len(recent) == 2 * min(rollout, 8)
        first_seen_again = 0 if rollout == 9 else rollout
        for screen in (screens[rollout], screens[max(rollout - 1, 0)], screens[first_seen_again]):
            expected, _ = agent.predict(torch.from_numpy(screen))
            torch.testing.assert_close(
                torch.from_numpy(table.look_up(screen)[1]), expected, rtol=0, atol=1e-5
            )
        table.met.append([screen.tobytes() for screen in screens[rollout]])
        with torch.no_grad():
            agent.actor.weight.mul_(-1.0)  # what an update does


@on([PRPO_MINIGRID, PRPO_ATARI])
@TOLERANCES
def test_chunks_of_states_stay_in_order(script, precision, tolerance):
    """`predict` for many states is the network's answer state by state, in their order."""
    torch.manual_seed(0)
    (agent,) = lively_agents(script, 1, bfloat16=precision == "bfloat16")
    obs = script.random_obs({"MiniGrid": 2500, "Atari": 600}[script.family])
    exact = script.new_agent()
    exact.load_state_dict(agent.state_dict())
    with torch.no_grad():
        expected, others = (
            [torch.cat(parts) for parts in zip(*map(own, obs.split(97)), strict=True)]
            for own in (agent, exact)
        )
    for found, wanted, other in zip(agent.predict(obs), expected, others, strict=True):
        assert len(found) == len(obs) and not found.requires_grad
        torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)
        assert wanted.std() > 2 * tolerance  # chunks in another order would differ
        if precision == "bfloat16":  # every chunk is computed in it
            errors, sizes = (found - wanted).abs(), (other - wanted).abs()
            assert all(
                error.mean() < size.mean() / 4
                for error, size in zip(errors.split(97), sizes.split(97), strict=True)
            )


@on([PRPO_MINIGRID, PRPO_ATARI])
@pytest.mark.parametrize("mixture", communicators.MIXTURES)
@pytest.mark.parametrize("self_reference", ["behaviour", "snapshot"])
def test_references_are_rows_of_the_communicator_applied_to_policies(
    script, mixture, self_reference
):
    """On agent i's own states, by the definition; agents of weight 0 are not even asked."""
    torch.manual_seed(0)
    args = script.Args(mixture=mixture, self_reference=self_reference)
    snapshots, (agent,) = lively_agents(script, 3), lively_agents(script, 1)
    snapshots[0].critic.register_forward_pre_hook(lambda *_: asked.append(0))
    obs = script.random_obs(20)
    for i, row in enumerate(OF_THREE):
        asked = []
        with torch.no_grad():
            behaviour = agent(obs)[0].log_softmax(-1)
            found = script.compute_reference(i, obs, behaviour, snapshots, OF_THREE, args)
            assert len(asked) == (row[0] > 0 and (i > 0 or self_reference == "snapshot"))
            policies = torch.stack([peer(obs)[0].softmax(-1) for peer in snapshots])
        if self_reference == "behaviour":
            policies[i] = behaviour.exp()
        weights = row[:, None, None]
        if mixture == "arithmetic":
            expected = (weights * policies).sum(0)
        else:
            expected = (policies**weights).prod(0)
            expected /= expected.sum(-1, keepdim=True)
        torch.testing.assert_close(found.exp(), expected, rtol=0, atol=1e-5)


class Screens:
    """Environments that show given screens: one of them per rollout, row by row [steps + 1, envs, 7, 7, 3]."""

    def __init__(self, rollout):
        self.rows = iter(rollout)
        self.obs, self.groups = next(self.rows)[None], [slice(0, 1)]

    def send(self, part, actions):
        self.obs = None  # what is shown next is not known before it is received

    def receive(self, part):
        self.obs = next(self.rows)[None]
        nothing = np.zeros(self.obs.shape[:2])
        return nothing, nothing > 0, nothing > 0, nothing == 0, []


class NoRun:
    cores = 1

    def tick(self, phase):
        pass


CONVOLUTIONS = {
    "default": None,
    "strides and other kernels": [
        torch.nn.Conv2d(3, 8, (3, 2)), torch.nn.ReLU(), torch.nn.Conv2d(8, 16, 2, stride=(1, 2)), torch.nn.ELU(),
    ],
    "one, without a bias": [torch.nn.Conv2d(3, 8, 3, stride=2, bias=False), torch.nn.Tanh()],
    "none": [],
    "a module of one's own": None,
    "padding": [torch.nn.Conv2d(3, 8, 2, padding=1), torch.nn.Tanh(), torch.nn.Conv2d(8, 8, 3)],
    "groups": [torch.nn.Conv2d(3, 6, 2), torch.nn.Conv2d(6, 6, 2, groups=3)],
    "pooling": [torch.nn.Conv2d(3, 8, 2), torch.nn.MaxPool2d(2)],
    "statistics": [torch.nn.Conv2d(3, 8, 2), torch.nn.GroupNorm(2, 8), torch.nn.Conv2d(8, 8, 2)],
}  # fmt: skip


class Own(torch.nn.Module):
    """No sequence of layers."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return self.layers(x)


PLAIN = "padding", "groups", "pooling", "statistics", "a module of one's own"


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_patches_are_the_same_network(name):
    """Outputs and gradients are those of the plain convolutions; a network that is no function of patches is plain."""
    torch.manual_seed(0)
    (agent,) = lively_agents(PRPO_MINIGRID, 1)
    if layers := CONVOLUTIONS[name]:
        layers = copy.deepcopy(layers)
        size = torch.nn.Sequential(*layers, torch.nn.Flatten())(torch.zeros(1, 3, 7, 7)).shape[1]
        agent.network = communicators.ImageNetwork(
            *layers, torch.nn.Flatten(), torch.nn.Linear(size, 128), torch.nn.Tanh()
        )
    elif layers == []:
        agent.network = communicators.ImageNetwork(
            torch.nn.Flatten(), torch.nn.Linear(147, 128), torch.nn.Tanh()
        )
    if name == "a module of one's own":
        agent.network = Own(agent.network)
    agent.double()
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 4, (60, 7, 7, 3), dtype=torch.uint8, generator=generator)
    rows[30:, 2:] = rows[:30, 2:]  # some patches are known, others differ in a single code
    chosen = torch.randint(0, 60, (45,), generator=generator)
    seen = communicators.as_patches(rows, agent.network)
    assert isinstance(seen, torch.Tensor) == (name in PLAIN)
    few = communicators.as_patches(rows[:8], agent.network)
    assert len(seen) == 60 and isinstance(few, torch.Tensor)
    if not isinstance(seen, torch.Tensor):
        wasted = [len(table) - len(table.unique(dim=0)) for table in seen.tables]
        assert all(0 <= number < 16 for number in wasted)
        seen.cells = seen.cells.double()
    layers = getattr(agent.network, "layers", agent.network)
    plain = torch.nn.Sequential(*layers)(rows[chosen].permute(0, 3, 1, 2).double())
    found = seen[chosen].compute(agent.network) if not isinstance(seen, torch.Tensor) else plain
    torch.testing.assert_close(found, plain, rtol=1e-9, atol=1e-9)
    weights = torch.randn(plain.shape, generator=generator, dtype=torch.double)
    parameters = list(agent.network.parameters())
    gradients = [
        torch.autograd.grad((own * weights).sum(), parameters, retain_graph=True)
        for own in (found, plain)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)
    agent.float()
    with torch.no_grad():
        for own, wanted in zip(agent.predict(rows), agent(rows), strict=True):
            torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-4)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 40),
    columns=st.integers(1, 9),
    most=st.sampled_from([1, 3, 2**20]),
)
def test_distinct_rows(seed, rows, columns, most):
    """Exactly, also where a row does not fit into one number."""
    generator = np.random.default_rng(seed)
    table = torch.from_numpy(generator.integers(0, most, size=(rows, columns)))
    table = torch.cat((table, table[generator.integers(rows, size=rows)]))
    distinct, names = communicators.find_distinct_rows(table)
    assert torch.equal(distinct[names], table)
    assert len(distinct) == len(table.unique(dim=0))
    wide = torch.zeros(40, 9, dtype=torch.long).index_copy(
        1, torch.tensor([0]), torch.arange(40)[:, None]
    )
    wide[0, 8] = (
        2**20 - 1
    )  # in numbers of 64 bits that grow by 20 with every column, the first one would be lost
    distinct, names = communicators.find_distinct_rows(wide)
    assert torch.equal(distinct[names], wide)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**32), number=st.integers(1, 30), envs=st.integers(1, 3))
def test_each_observation_is_asked_once_and_remembered_for_eight_rollouts(seed, number, envs):
    """Observations are told apart by all their bytes, also where one code is all that differs.

    A rollout's own observations and log-probabilities are found again under `states`.
    """
    script, asked = PRPO_MINIGRID, []
    args = script.Args(num_agents=1, num_envs=envs, num_steps=6)
    generator, (agent,) = np.random.default_rng(seed), lively_agents(script, 1)
    screens = np.repeat(
        generator.integers(0, 11, size=(1, 7, 7, 3), dtype=np.uint8), number, axis=0
    )
    screens.reshape(number, 147)[np.arange(number), np.arange(number) * 5] += 1
    actors, history = script.make_actors(args, [agent]), []

    def tell(keys, ask=actors[0].compute):
        asked[-1] += keys
        return ask(keys)

    actors[0].compute = tell
    for _ in range(11):
        rollout = screens[generator.integers(number, size=(args.num_steps + 1, envs))]
        asked.append([])
        generators = [torch.Generator().manual_seed(seed % 2**31)]
        storage, obs, behaviour, _ = script.rollout(
            args, Screens(rollout), actors, generators, NoRun()
        )
        shown = [own.tobytes() for own in rollout.reshape(-1, 147)]
        remembered = set().union(*history[-8:])
        assert len(asked[-1]) == len(set(asked[-1]))  # nothing twice
        assert set(asked[-1]) == remembered | set(shown)
        assert (
            asked[-1][: len(remembered)]
            and set(asked[-1][: len(remembered)]) == remembered
            or not remembered
        )
        history.append(set(shown))
        assert np.array_equal(obs[0][storage["states"][0]].numpy(), rollout[:-1])
        assert len(obs[0]) == len(set(shown))
        with torch.no_grad():
            logits, values = agent(torch.from_numpy(rollout).flatten(0, 1))
        found = behaviour[0][storage["states"][0]].flatten(0, 1)
        torch.testing.assert_close(found, logits.log_softmax(-1)[:-envs], rtol=0, atol=1e-5)
        for name, part in (("values", values[:-envs]), ("next_values", values[envs:])):
            torch.testing.assert_close(storage[name].flatten(), part, rtol=0, atol=1e-5)
        chosen = found.gather(1, storage["actions"].flatten()[:, None])[:, 0]
        torch.testing.assert_close(storage["logprobs"].flatten(), chosen, rtol=0, atol=1e-5)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**31), distinct=st.integers(1, 9), samples=st.integers(2, 24))
def test_learning_from_distinct_observations_has_the_gradient_of_all_rows(seed, distinct, samples):
    """The network sees each observation of a minibatch once, and every sample counts, as in the plain loss."""
    script = PRPO_MINIGRID
    torch.manual_seed(seed)
    args = script.Args(
        update_epochs=1, num_minibatches=1, max_grad_norm=1e9, kl_coef=3.0, vf_coef=0.1
    )
    (agent,), obs = lively_agents(script, 1), script.random_obs(distinct)
    other, sizes, states = copy.deepcopy(agent), [], torch.randint(distinct, (samples,))
    batch = {
        "actions": torch.randint(7, (samples,)),
        "logprobs": -torch.rand(samples) - 1,
        "states": states,
    }
    batch |= {"advantages": torch.randn(samples), "values": torch.randn(samples)}
    batch |= {
        "returns": batch["advantages"] + batch["values"],
        "reference": torch.randn(samples, 7).log_softmax(-1),
    }
    agent.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    optimizer, generator = (
        torch.optim.SGD(agent.parameters(), 0.0),
        torch.Generator().manual_seed(seed),
    )
    (_,) = script.learn(agent, optimizer, generator, obs, batch, args)
    assert sizes == [len(states.unique())]
    plain = {"obs": obs[states], "reference": batch["reference"].exp()}
    plain |= {name: batch[f"{name}s"] for name in ("action", "logprob", "advantage", "value")}
    plain_loss(script, args, other, plain).backward()
    found, expected = ([parameter.grad for parameter in own.parameters()] for own in (agent, other))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert any(gradient.abs().max() > 1e-2 for gradient in found)


@pytest.mark.parametrize("script", [PRPO_MINIGRID, PRPO_ATARI], ids=repr)
def test_a_gradient_that_is_not_finite_makes_no_step(script):
    """The loss is finite: the weights and Adam's moments stay as they are, the policy loss is NaN; then it learns."""
    torch.manual_seed(0)
    args = script.Args(update_epochs=2, num_minibatches=2)
    (agent,), obs = lively_agents(script, 1), script.random_obs(6)
    batch = {"actions": torch.randint(script.num_actions, (6,)), "logprobs": -torch.rand(6) - 1}
    batch |= {"states": torch.arange(6), "advantages": torch.randn(6), "values": torch.randn(6)}
    batch |= {
        "returns": batch["advantages"],
        "reference": torch.randn(6, script.num_actions).log_softmax(-1),
    }
    optimizer, generator = (
        torch.optim.Adam(agent.parameters(), 1e-2),
        torch.Generator().manual_seed(0),
    )
    learn = [*script.learn(agent, optimizer, generator, obs, batch, args)]
    assert len(learn) == 4 and all(math.isfinite(losses["policy_loss"]) for losses in learn)
    weights = parameters_to_vector(agent.parameters()).detach().clone()
    moments = copy.deepcopy(optimizer.state_dict()["state"])
    hook = next(agent.parameters()).register_hook(lambda gradient: gradient * torch.inf)
    (losses,) = script.learn(agent, optimizer, generator, obs, batch, args)
    assert math.isnan(losses["policy_loss"]) and math.isfinite(losses["value_loss"])
    assert torch.equal(parameters_to_vector(agent.parameters()), weights)
    torch.testing.assert_close(optimizer.state_dict()["state"], moments, rtol=0, atol=0)
    hook.remove()
    assert len([*script.learn(agent, optimizer, generator, obs, batch, args)]) == 4
    changed = parameters_to_vector(agent.parameters())
    assert changed.isfinite().all() and not torch.equal(changed, weights)


@on_minigrid
def test_a_layer_that_is_added_acts_and_learns(script, tmp_path, monkeypatch):
    """The network is defined once: with another layer, and a wider one, all is as with the plain loop."""

    class Deeper(script.Agent):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.network.extend([torch.nn.Linear(128, 96), torch.nn.Tanh()])
            self.actor, self.critic = (
                torch.nn.Linear(96, self.actor.out_features),
                torch.nn.Linear(96, 1),
            )

    script.patch(monkeypatch, "Agent", Deeper)
    script.patch(monkeypatch, "make_communicator", fixed(OF_THREE))
    monkeypatch.setattr(
        communicators.Patches, "least", 1
    )  # every answer comes from patches, as in longer rollouts
    assert_trains_like_the_plain_version(script, OF_THREE, tmp_path / "plain", **THREE)
    ratios, logged, _ = first_log_ratios(script, tmp_path / "ratios", monkeypatch, iterations=3)
    assert max(ratios) < 1e-4 and max(logged) < 1e-5


@every_script
def test_isolated_agents_do_not_depend_on_how_many_others_exist(script, tmp_path):
    """Agent 0 of three isolated ones has the rows and weights of agent 0 alone, and the others are not copies of it."""
    changes = {"communicator": "identity"} | (
        {"iterations": 3, "num_steps": 48} if script.family == "Atari" else {}
    )
    three, _ = train(script, tmp_path / "three", **changes)
    one, _ = train(script, tmp_path / "one", num_agents=1, **changes)
    weights = weights_of(three)
    assert_weights(weights[0], weights_of(one)[0], tiny(script, tmp_path, **changes))
    assert not torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])
    assert_same_rows(rows_of(three)[::3], rows_of(one), 1e-4, apart={"explained_variance"})
    assert {row["agent"] for row in rows_of(one)} == {"0"}


@on_minigrid
def test_self_preference_one_is_isolated(script, tmp_path):
    """C = I by the self-preferred communicator: the run of the identity communicator, and not one byte is sent."""
    isolated, _ = train(script, tmp_path / "identity", communicator="identity")
    preferred, summary = train(
        script, tmp_path / "self", communicator="self-preferred", self_preference=1.0
    )
    assert_same_run(preferred, isolated, exactly=True)
    assert summary["communication_bytes"] == 0


def test_coefficient_zero_is_isolated_without_penalty(tmp_path):
    """In PR-PPO peers act through the penalty alone: without it their presence changes no weight; with it, it does."""
    runs = {
        (name, coef): weights_of(train(PRPO_MINIGRID, tmp_path / f"{name}{coef}", **changes)[0])
        for name in ("identity", "uniform")
        for coef in (0.0, 1.0)
        for changes in [{"communicator": name, "kl_coef": coef}]
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
    separate = weights_of(
        train(FEDAVG_MINIGRID, tmp_path / "separate", local_updates=4, **changes)[0]
    )
    theta = torch.stack([separate[i] for i in range(3)])
    expected = communicators.self_preferred(3, preference) @ theta
    torch.testing.assert_close(
        torch.stack([averaged[i] for i in range(3)]), expected, rtol=0, atol=1e-6
    )
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
def test_similarity_is_computed_from_what_agents_may_tell(script, tmp_path):
    """In real runs the logged C is the similarity of the exchanged policies on the public states."""
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
    assert summary["communication_rounds"] == 1 and summary["communication_bytes"] == sent
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


@every_variant
def test_rewards_are_means_since_the_last_round(script, tmp_path, monkeypatch):
    """In real runs C is made of the whole-episode returns of the interval that a round closes, not of all.

    Where no episode ended in an interval, the mean before it counts, and the group's where there is none.
    """
    n, told, make = (3 if script.family == "MiniGrid" else 2), [], script.make_communicator
    changes = {
        "num_agents": n,
        "communicator": "reward",
        "num_steps": 110,
        "iterations": 4,
        "local_updates": 2,
    }
    if script.family == "Atari":
        changes |= {"num_steps": 130, "iterations": 3, "local_updates": 1}

    def watch(args, returns=None, *known, **more):
        if returns is not None:
            told.append(returns.clone())
        return make(args, returns, *known, **more)

    script.patch(monkeypatch, "make_communicator", watch)
    folder, summary = train(script, tmp_path, **changes | {"save_every": 9})
    rows, rounds = rows_of(folder), summary["communication_rounds"]
    expected, every = torch.full((n,), torch.nan, dtype=torch.float64), changes["local_updates"]
    histories = []
    for k in range(rounds):
        own = [row for row in rows if every * k < int(row["iteration"]) <= every * (k + 1)]
        for i in range(n):
            ended = [row for row in own if row["agent"] == str(i) and float(row["episodes"])]
            count = sum(float(row["episodes"]) for row in ended)
            if count:
                total = sum(float(row["episodes"]) * float(row["episodic_return"]) for row in ended)
                expected[i] = total / count
        histories.append(expected.clone())
    found = torch.stack(told)[:: len(told) // rounds]
    torch.testing.assert_close(found, torch.stack(histories), rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(
        communicator_of(folder), communicators.reward(histories[-1]), rtol=0, atol=1e-5
    )
    assert not torch.equal(histories[-1], histories[0]) and histories[-1].unique().numel() > 1


def communicator_of(folder):
    """The matrix that TensorBoard shows last."""
    scalars = scalars_of(folder)
    n = math.isqrt(sum(tag.startswith("communicator/c_") for tag in scalars))
    return torch.tensor(
        [[scalars[f"communicator/c_{i}_{j}"][-1][1] for j in range(n)] for i in range(n)]
    )


@on_minigrid
@pytest.mark.parametrize(("target_kl", "epochs"), [(1e-12, 1), (1e9, 3)])
def test_target_kl_skips_an_agents_further_epochs(script, target_kl, epochs, tmp_path, monkeypatch):
    """Epochs are never cut in the middle, and one agent's decision is its own."""
    calls, learn = [], script.learn

    def count(*batch):
        calls.append(0)
        k = len(calls) - 1
        for losses in learn(*batch):
            calls[k] += 1
            yield losses

    script.patch(monkeypatch, "learn", count)
    train(script, tmp_path, target_kl=target_kl, update_epochs=3, num_minibatches=4)
    assert calls == [epochs * 4] * 3 * 6


# --- agents that fail ---


def poison(script, monkeypatch, agents, calls):
    """After their update number `calls` a parameter of these agents is NaN."""
    learn, seen = script.learn, []

    def spoil(agent, *rest):
        seen.append(agent)
        own = list(dict.fromkeys(map(id, seen))).index(id(agent))  # they come in order
        yield from learn(agent, *rest)
        if own in agents and sum(other is agent for other in seen) == calls:
            with torch.no_grad():
                agent.critic.bias.fill_(torch.nan)

    script.patch(monkeypatch, "learn", spoil)


@every_script
def test_an_agent_that_diverges_is_named_and_its_peers_go_on(script, tmp_path, monkeypatch, capsys):
    """Nobody hears it any more, it learns no more, and it is recorded as NaN; the others train, and are evaluated."""
    n, most = (4, 6) if script.family == "MiniGrid" else (3, 4)
    poison(script, monkeypatch, {1}, 2)
    changes = {
        "num_agents": n,
        "communicator": "self-preferred",
        "self_preference": 0.4,
        "top_k": 1,
    }
    changes |= {"iterations": most, "local_updates": 3, "eval_episodes": 1, "eval_every": 4}
    folder, summary = train(script, tmp_path, **changes)
    output = capsys.readouterr().out
    assert output.count("agent 1 has diverged") == 1 and output.count("has diverged") == 1
    heals = script.averages  # agent 1 leaves the round with the average of its peers
    assert summary["completed"] and summary["diverged"] == ([] if heals else [1])
    for i in range(n):
        result = summary["evaluation"]["agents"][i][summary["settings"]["env_id"]]["mean"]
        finite = heals or i != 1
        assert (result is not None) == finite
        assert weights_of(folder)[i].isnan().sum() == (
            0 if finite else 1
        )  # it has not taken another step
    (lost,) = (
        {row["mean_return"] for row in evaluations_of(folder) if row["agent"] == "1"}
        if not heals
        else {"nan"}
    )
    assert lost == "nan"
    for row in rows_of(folder):
        of_agent_1 = row["agent"] == "1" and (
            int(row["iteration"]) == 3 if heals else int(row["iteration"]) > 2
        )
        assert (row["policy_loss"] == "nan") == of_agent_1
    expected = torch.zeros(n, n)
    for i in range(n):
        expected[i, i], expected[i, 2 if i == 0 else (i + 1) % n] = (
            0.4,
            0.6,
        )  # the next agent that can be heard
    points = scalars_of(folder)
    for i, j in ((i, j) for i in range(n) for j in range(n) if i != 1):
        assert points[f"communicator/c_{i}_{j}"][2][1] == pytest.approx(
            expected[i, j].item(), abs=1e-6
        )


@on_minigrid
def test_a_run_in_which_everybody_diverges_ends_well(script, tmp_path, monkeypatch):
    """With weights and a summary that say so; averaging does not make zeros of what nobody can use."""
    poison(script, monkeypatch, {0, 1, 2}, 3)
    folder, summary = train(script, tmp_path, eval_episodes=1)
    assert summary["diverged"] == [0, 1, 2] and summary["evaluation"]["group"] is None
    for weights in weights_of(folder).values():
        assert weights.isnan().sum() == 1 and weights.count_nonzero() > len(weights) / 2


@on([FEDAVG_MINIGRID])
def test_fedavg_without_a_valid_peer_keeps_parameters(script, tmp_path, monkeypatch):
    """Agent 0 hears only agent 1, whose parameters are NaN: it leaves the round as it came."""
    poison(script, monkeypatch, {1}, 3)
    only_others = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    changes = {"num_agents": 2, "iterations": 3}

    def make(args, returns=None, log_probs=None, gains=None, usable=None):
        if usable is None:
            return only_others.clone()
        return communicators.drop_invalid(only_others, usable)

    script.patch(monkeypatch, "make_communicator", make)
    heard = weights_of(train(script, tmp_path / "round", **changes)[0])
    poison(script, monkeypatch, {1}, 3)
    alone = weights_of(train(script, tmp_path / "no round", local_updates=4, **changes)[0])
    assert torch.equal(heard[0], alone[0]) and heard[0].isfinite().all()


def test_minibatches_without_a_sample_are_skipped(tmp_path):
    """More minibatches than valid samples: what is there is learned from, and nothing becomes NaN."""
    changes = {
        "num_agents": 1,
        "communicator": "identity",
        "num_envs": 1,
        "num_steps": 8,
        "num_minibatches": 8,
    }
    changes |= {"env_id": "MiniGrid-Empty-5x5-v0", "iterations": 24, "save_every": 99}
    folder, summary = train(PRPO_MINIGRID, tmp_path, **changes)
    assert weights_of(folder)[0].isfinite().all() and summary["diverged"] == []
    assert all(row["policy_loss"] != "nan" for row in rows_of(folder))
    assert any(
        float(row["episodes"]) for row in rows_of(folder)
    )  # then a step is lost to the reset


# --- rounds ---


@on_minigrid
def test_before_the_first_round_agents_are_isolated(script, tmp_path, capsys):
    """Nobody has spoken yet: rows and C are those of the identity communicator; then C is what was asked for."""
    together, _ = train(script, tmp_path / "uniform", communicator="uniform", local_updates=4)
    isolated, _ = train(script, tmp_path / "identity", communicator="identity", local_updates=4)
    rows, expected = rows_of(together), rows_of(isolated)
    learned = [
        {name: value for name, value in row.items() if name != "communication_bytes"}
        for row in rows
    ]
    expected = [
        {name: value for name, value in row.items() if name != "communication_bytes"}
        for row in expected
    ]
    assert learned[:12] == expected[:12] and learned[12:] != expected[12:]
    entries = scalars_of(together)["communicator/c_0_1"]
    assert [value for _, value in entries] == pytest.approx([0, 0, 0, 1 / 3, 1 / 3, 1 / 3])
    capsys.readouterr()
    _, summary = train(script, tmp_path / "never", local_updates=7, iterations=2)
    assert re.search(r"\bno\b.*\brounds?\b", capsys.readouterr().out, re.IGNORECASE)
    assert summary["communication_rounds"] == summary["communication_bytes"] == 0


@pytest.mark.parametrize("name", ["reward", "softmax-reward", "rank-reward"])
def test_agents_without_an_episode_keep_their_last_mean(name, tmp_path, monkeypatch):
    """Also over a restart; who never had one counts as the others' mean."""
    script, receive, told = PRPO_MINIGRID, PRPO_MINIGRID.Envs.receive, []
    make = script.make_communicator
    rounds = [
        [0.5, None, 0.3],
        [None, None, 0.9],
        [None, 0.2, None],
    ]  # mean return of each agent, if there is one
    known = torch.tensor(
        [[0.5, torch.nan, 0.3], [0.5, torch.nan, 0.9], [0.5, 0.2, 0.9]], dtype=torch.float64
    )
    clock = [0]

    def tell(envs, part):
        *signals, _ = receive(envs, part)
        clock[0] += part == 0
        of_round = rounds[(clock[0] - 1) // 64 % 3]
        games = [
            (k, value, 9.0)
            for k, value in enumerate(of_round)
            if value is not None and clock[0] % 64 == 5
        ]
        return *signals, [game for game in games if game[0] in range(3)[envs.groups[part]]]

    def watch(args, returns=None, *rest, **more):
        if returns is not None:
            told.append((returns.clone(), make(args, returns, *rest, **more)))
        return make(args, returns, *rest, **more)

    monkeypatch.setattr(script.Envs, "receive", tell)
    script.patch(monkeypatch, "make_communicator", watch)
    changes = {"communicator": name, "iterations": 3, "local_updates": 1, "save_every": 1}
    train(script, tmp_path, **changes)
    returns, matrices = zip(*told[1 :: len(told) // 3], strict=True)
    torch.testing.assert_close(torch.stack(returns), known, equal_nan=True, rtol=1e-6, atol=1e-6)
    filled = known.clone()
    filled[:, 1] = torch.tensor([0.4, 0.7, 0.2])
    for row, matrix in zip(filled, matrices, strict=True):
        torch.testing.assert_close(matrix, make(script.Args(num_agents=3, communicator=name), row))
        assert (matrix > 0).all()


# --- numerics ---


@every_script
def test_threads_change_nothing(script, tmp_path):
    """Agents that learn at the same time do not share generators: equal seeds give equal runs, as with one core.

    On Atari the environments are played in one part on one core, and in two on two.
    """
    folders, threads = [], torch.get_num_threads()
    most, changes = (
        (3, {}) if script.family == "MiniGrid" else (2, {"num_agents": 2, "iterations": 2})
    )
    for number in (1, most, most):
        torch.set_num_threads(number)
        folders.append(train(script, tmp_path / str(len(folders)), **changes)[0])
        torch.set_num_threads(threads)
    assert_same_run(folders[2], folders[1], exactly=True)
    assert_same_run(folders[1], folders[0])


def first_log_ratios(script, run_dir, monkeypatch, **changes):
    """max |log ratio| before the first step of every agent and iteration, and old_approx_kl as it is logged there."""
    ratios, logged, learn = [], [], script.learn

    def record(agent, optimizer, generator, obs, batch, args):
        with torch.no_grad():
            logprobs = agent(obs)[0].log_softmax(-1)[batch["states"]]
        now = logprobs.gather(1, batch["actions"][:, None])[:, 0]
        ratios.append((now - batch["logprobs"]).abs().max().item())
        for number, losses in enumerate(learn(agent, optimizer, generator, obs, batch, args)):
            if number == 0:
                logged.append(abs(losses["old_approx_kl"].item()))
            yield losses

    with monkeypatch.context() as patch:
        script.patch(patch, "learn", record)
        folder, _ = train(script, run_dir, **changes)
    assert len(ratios) == len(logged) == changes["iterations"] * 3
    return ratios, logged, folder


@every_script
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_first_minibatch_has_ratio_one(script, precision, tmp_path, monkeypatch):
    """Before the first gradient step the policy is the behaviour policy, rounding included; weights stay float32."""
    ratios, logged, folder = first_log_ratios(
        script, tmp_path, monkeypatch, precision=precision, iterations=3
    )
    assert max(ratios) < 1e-4 and max(logged) < 1e-5
    for tensor in load_file(folder / "agent_0.safetensors").values():
        assert tensor.dtype == torch.float32
    rough, exact = script.new_agent(bfloat16=precision == "bfloat16"), script.new_agent()
    exact.load_state_dict(rough.state_dict())
    obs = script.random_obs(16)
    difference = (rough(obs)[1] - exact(obs)[1]).abs().max()
    assert rough(obs)[0].dtype == rough(obs)[1].dtype == torch.float32
    assert (
        1e-4 < difference < 0.1 if precision == "bfloat16" else difference == 0
    )  # the precision is in effect


@pytest.mark.parametrize(
    ("script", "seed"),
    [pytest.param(script, seed, id=str(script)) for seed, script in enumerate(MINIGRID, 11)],
)
def test_three_agents_learn_a_room(script, seed, tmp_path):
    """Three agents that talk solve a small room in which untrained ones seldom find the goal."""
    changes = {
        "communicator": "uniform",
        "seed": seed,
        "num_envs": 4,
        "total_timesteps": 40 * 256,
        "local_updates": 4,
    }
    changes |= {"update_epochs": 4, "num_minibatches": 4, "save_every": 40, "eval_episodes": 20}
    _, summary = train(script, tmp_path, **changes)
    task = summary["settings"]["env_id"]
    torch.manual_seed(seed)
    args = script.Args(**summary["settings"])
    untrained = script.evaluate(args, script.new_agent(), task, list(range(20)), seed)
    assert untrained.mean() < 0.6
    assert summary["evaluation"]["group"] > 0.85
    assert all(agent[task]["mean"] > 0.8 for agent in summary["evaluation"]["agents"])
