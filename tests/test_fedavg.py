"""FedAvg: what a round leaves of parameters, buffers and optimizers, and the pull to averages."""

import copy

import pytest
import torch
from helpers import (
    FEDAVG_ATARI,
    FEDAVG_MINIGRID,
    FEDAVG_MUJOCO,
    PRPO_ATARI,
    PRPO_MINIGRID,
    PRPO_MUJOCO,
    assert_same_run,
    networks_of,
    on,
    only_run,
    resume,
    rows_of,
    summary_of,
    tiny,
    weights_of,
    write_matrix,
)
from torch.nn.utils import parameters_to_vector

import communicators

BOTH = on([FEDAVG_MINIGRID, FEDAVG_ATARI])
# Not symmetric, so that a transposed matrix would change the result; the last agent listens to
# nobody else, but is listened to
C = torch.tensor([[0.5, 0.2, 0.3], [0.6, 0.3, 0.1], [0.0, 0.0, 1.0]])
SHORT = {"MiniGrid": {}, "Atari": {"num_steps": 32, "num_envs": 1}, "MuJoCo": {}}


@pytest.fixture
def matrix(tmp_path):
    """C as the file of --communicator."""
    return write_matrix(tmp_path / "C.csv", C)


def train(script, run_dir, **changes):
    """The folder of a short run without evaluations."""
    script.main(tiny(script, run_dir, **SHORT[script.family] | {"eval_episodes": 0} | changes))
    return only_run(run_dir)


def optimizers_of(folder, iteration):
    """The optimizers of all agents in the checkpoints of an iteration."""
    paths = [folder / "checkpoints" / f"agent_{i}" / f"{iteration}.pt" for i in range(3)]
    return [torch.load(path, weights_only=True)["optimizer"] for path in paths]


def assert_averaged(new, old):
    """New values [agents, ...] are averages of the old ones; a transposed C has others."""
    expected = torch.einsum("ij,j...->i...", C, old)
    torch.testing.assert_close(new, expected, rtol=0, atol=1e-6)
    transposed = torch.einsum("ji,j...->i...", C, old)
    assert (new - transposed).abs().max() > 1e-4


# --- averages ---


@BOTH
def test_a_round_applies_rows_of_the_communicator_to_parameters(script, matrix, tmp_path):
    """To those of a run without a round. Optimizers go on as they are.

    An agent that listens to nobody else keeps its parameters, bit for bit.
    """
    changes = {"communicator": matrix, "iterations": 2}
    after = train(script, tmp_path / "round", local_updates=2, **changes)
    before = train(script, tmp_path / "no round", local_updates=3, **changes)
    new, old = (torch.stack([*weights_of(folder).values()]) for folder in (after, before))
    assert_averaged(new, old)
    assert torch.equal(new[2], old[2])
    optimizers = optimizers_of(after, 2)
    torch.testing.assert_close(optimizers, optimizers_of(before, 2), rtol=0, atol=0)
    assert all(moments["exp_avg_sq"].any() for moments in optimizers[0]["state"].values())


@pytest.mark.parametrize("heads", [("actor",), ("critic",), ("actor", "critic")], ids=str)
def test_private_heads_stay(heads, matrix, tmp_path):
    """Bit for bit; everything else is averaged."""
    changes = {"communicator": matrix, "iterations": 2, "private_heads": heads}
    after = networks_of(train(FEDAVG_MINIGRID, tmp_path / "round", local_updates=2, **changes))
    before = networks_of(train(FEDAVG_MINIGRID, tmp_path / "none", local_updates=3, **changes))
    for name in before[0]:
        new, old = (torch.stack([network[name] for network in run]) for run in (after, before))
        if name.startswith(heads):
            assert torch.equal(new, old)
            assert not torch.equal(new[0], new[1])
        else:
            assert_averaged(new, old)


@pytest.fixture
def with_buffers(monkeypatch):
    """Networks of MiniGrid that keep count of what they learn from, as batch normalisation does."""

    class WithBuffers(PRPO_MINIGRID.Agent):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.register_buffer("mean", torch.zeros(3))
            self.register_buffer("batches", torch.tensor(0))

        def forward(self, obs):
            if torch.is_grad_enabled():
                self.mean += 0.1 * (obs.float().mean((0, 1, 2)) - self.mean)
                # Different numbers, whose averages have fractions
                self.batches += 1 + int(obs[0, 0, 0, 0]) + len(obs)
            return super().forward(obs)

    PRPO_MINIGRID.patch(monkeypatch, "Agent", WithBuffers)


@pytest.mark.usefixtures("with_buffers")
def test_buffers_are_averaged_too(matrix, tmp_path):
    """Whole numbers are rounded."""
    changes = {"communicator": matrix, "iterations": 2}
    after = networks_of(train(FEDAVG_MINIGRID, tmp_path / "round", local_updates=2, **changes))
    before = networks_of(train(FEDAVG_MINIGRID, tmp_path / "none", local_updates=3, **changes))
    for name in ("mean", "batches", "network.0.weight"):
        new, old = (torch.stack([network[name] for network in run]) for run in (after, before))
        if name == "batches":
            assert new.dtype == old.dtype == torch.int64
            assert torch.equal(new, (C.double() @ old.double()).round().long())
            assert not torch.equal(new, (C.double() @ old.double()).long())
        else:
            assert_averaged(new, old)


def test_all_copy_the_best(tmp_path, monkeypatch):
    """Bit for bit, and go on with their own optimizers: population-based training's exploit."""

    def report(means, returns):
        means[:] = torch.tensor([0.2, 0.9, torch.nan])

    monkeypatch.setattr(communicators, "update_means", report)
    changes = {"communicator": "best", "iterations": 2}
    after = train(FEDAVG_MINIGRID, tmp_path / "round", local_updates=2, **changes)
    before = train(FEDAVG_MINIGRID, tmp_path / "no round", local_updates=3, **changes)
    expected = weights_of(before)
    for weights in weights_of(after).values():
        assert torch.equal(weights, expected[1])
    assert not torch.equal(expected[0], expected[1])
    optimizers = optimizers_of(after, 2)
    torch.testing.assert_close(optimizers, optimizers_of(before, 2), rtol=0, atol=0)


# --- the server step ---


@BOTH
@pytest.mark.parametrize("server_lr", [0.5, 1.0, 2.0])
def test_the_server_step_begins_where_the_last_round_ended(
    script, server_lr, matrix, tmp_path, monkeypatch
):
    """Two rounds of two agents that average, and of one that listens to nobody else.

    At 1 the next parameters are the averages, bit for bit, and no checkpoint holds more than today.
    """
    update = script.update
    agents = []
    before = []
    after = []

    def record(agent, *rest):
        agents.append(agent)
        before.append(communicators.flatten(agent))
        losses = update(agent, *rest)
        after.append(communicators.flatten(agent))
        return losses

    script.patch(monkeypatch, "update", record)
    changes = {"communicator": matrix, "local_updates": 1, "iterations": 2, "learning_rate": 3e-3}
    folder = train(script, tmp_path / "runs", server_lr=server_lr, **changes)
    before, after = (torch.stack(x).unflatten(0, (2, 3)) for x in (before, after))
    final = torch.stack([communicators.flatten(agent) for agent in agents[3:]])
    for begin, theta, new in ((before[0], after[0], before[1]), (before[1], after[1], final)):
        assert torch.equal(new[2], theta[2])
        for i, (c_0, c_1, c_2) in enumerate([(0.5, 0.2, 0.3), (0.6, 0.3, 0.1)]):
            average = c_0 * theta[0] + c_1 * theta[1] + c_2 * theta[2]
            expected = begin[i] + server_lr * (average - begin[i])
            torch.testing.assert_close(new[i], expected, rtol=0, atol=1e-6)
            assert (average - begin[i]).abs().max() > 1e-3
        if server_lr == 1:
            assert torch.equal(new[:2], communicators.average_parameters(C[:2], theta))
    # A second step from the common start would lead elsewhere
    assert (before[1, :2] - before[0, :2]).abs().max() > 1e-3
    for i in range(3):
        path = folder / "checkpoints" / f"agent_{i}" / "2.pt"
        checkpoint = torch.load(path, weights_only=True)
        assert ("begin" in checkpoint) == (server_lr != 1)


# --- the pull ---


def pulled_gradient(args, agent, anchor):
    """The gradient of an update of one minibatch, and its losses; the weights stay."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.arange(24) % 6
    batch = {"obs": PRPO_MINIGRID.random_obs(6), "obs_inds": rows}
    batch |= {"actions": rows, "logprobs": -torch.rand(24) - 1}
    batch |= {"advantages": torch.randn(24), "values": torch.randn(24), "returns": torch.randn(24)}
    batch["reference"] = torch.randn(6, 7).log_softmax(-1)
    optimizer = torch.optim.SGD(agent.parameters(), 0.0)
    losses = FEDAVG_MINIGRID.update(agent, optimizer, generator, batch, 0.5, args, anchor)
    return torch.cat([parameter.grad.flatten() for parameter in agent.parameters()]), losses


@pytest.mark.parametrize("buffers", [False, True])
def test_the_pull_adds_the_distance_to_the_average_to_the_gradient(buffers, request):
    """PPO's gradient plus prox_coef (theta - average), of parameters: buffers are not learned."""
    if buffers:
        request.getfixturevalue("with_buffers")
    options = {"update_epochs": 1, "num_minibatches": 1, "max_grad_norm": 1e9}
    torch.manual_seed(0)
    agent, other = (PRPO_MINIGRID.of_family.Agent(7) for _ in range(2))
    gradients = []
    for prox_coef in (0.0, 3.0):
        args = FEDAVG_MINIGRID.Args(prox_coef=prox_coef, **options)
        torch.manual_seed(1)
        gradient, losses = pulled_gradient(args, copy.deepcopy(agent), communicators.flatten(other))
        gradients.append(gradient)
    theta, average = (parameters_to_vector(x.parameters()).detach() for x in (agent, other))
    expected = gradients[0] + 3.0 * (theta - average)
    torch.testing.assert_close(gradients[1], expected, rtol=0, atol=1e-5)
    assert (theta - average).abs().max() > 0.1
    if not buffers:
        half = (theta - average).square().sum().item() / 2
        assert losses["losses/proximal_loss"] == pytest.approx(half, rel=1e-5)


def test_the_pull_is_towards_the_average_of_the_last_round(matrix, tmp_path, monkeypatch):
    """Not of present parameters, which have moved on; without a round, or peers, there is none."""
    script = FEDAVG_MINIGRID
    update = script.update
    anchors = []
    before = []
    after = []

    def record(agent, *rest):
        *_, anchor = rest
        anchors.append(anchor)
        before.append(communicators.flatten(agent))
        losses = update(agent, *rest)
        after.append(communicators.flatten(agent))
        return losses

    script.patch(monkeypatch, "update", record)
    changes = {"communicator": matrix, "prox_coef": 1.0, "local_updates": 2, "iterations": 5}
    train(script, tmp_path / "runs", **changes)
    before, after = (torch.stack(x).unflatten(0, (5, 3)) for x in (before, after))
    # [iterations, agents, numel]; the rounds replace nothing
    assert torch.equal(before[1:], after[:-1])
    assert len(anchors) == 15
    assert anchors[:6] == [None] * 6
    for iteration, last_round in ((2, 1), (3, 1), (4, 3)):
        *pulling, of_last = anchors[3 * iteration : 3 * iteration + 3]
        assert of_last is None
        assert_averaged(torch.stack([*pulling, after[last_round, 2]]), after[last_round])
    # Parameters move on within an interval, of which the average is another one
    assert (torch.stack(anchors[9:11]) - (C @ after[2])[:2]).abs().max() > 1e-4


def test_a_pull_without_peers_is_isolated_training(tmp_path):
    """Bit for bit; otherwise agents are nearer to each other."""
    pulled = {"prox_coef": 3.0}
    cases = {
        "isolated": {"communicator": "identity"},
        "isolated, coefficient": {"communicator": "identity"} | pulled,
        "alone": {"num_agents": 1} | pulled,
        "pulled": pulled,
    }
    settings = {"communicator": "uniform", "iterations": 4, "local_updates": 1}
    runs = {}
    for name, changes in cases.items():
        folder = train(FEDAVG_MINIGRID, tmp_path / name, **settings | changes)
        runs[name] = weights_of(folder)
        rows = rows_of(folder)
        assert ("proximal_loss" in rows[0]) == ("prox_coef" in changes)
        losses = [float(row.get("proximal_loss", 0)) for row in rows]
        # No agent has peers before the first round, which ends the first iteration
        assert losses[0] == 0
        assert (max(losses) > 0) == (name == "pulled")
    for i in range(3):
        assert torch.equal(runs["isolated, coefficient"][i], runs["isolated"][i])
    assert torch.equal(runs["alone"][0], runs["isolated"][0])
    apart, near = ((runs[name][0] - runs[name][1]).norm() for name in ("isolated", "pulled"))
    assert near < 0.9 * apart


@pytest.mark.parametrize(
    "settings",
    [{"prox_coef": 1.0}, {"private_heads": ("critic",)}, {"server_lr": 0.5}],
    ids=lambda settings: [*settings][0],
)
def test_averages_survive_crashes(settings, crashing, tmp_path):
    """In the middle of intervals: after the first round, of three, and after the second."""
    script = FEDAVG_MINIGRID
    settings = settings | {"local_updates": 2, "save_every": 1, "eval_episodes": 0}
    script.main(tiny(script, tmp_path / "whole", **settings))
    whole = only_run(tmp_path / "whole")
    summary = summary_of(whole)
    assert summary["communication_rounds"] == 3
    crashing("complete", 0, 3, lambda: script.main(tiny(script, tmp_path / "again", **settings)))
    folder = only_run(tmp_path / "again")
    args = script.parse_args(["--resume", str(folder)])
    crashing("complete", 0, 5, lambda: script.main(args))
    resume(script, folder)
    assert_same_run(folder, whole)
    assert (folder / "communicator.csv").read_text() == (whole / "communicator.csv").read_text()


# --- without peers FedAvg-PPO and PR-PPO are PPO ---


@pytest.mark.parametrize(
    ("fedavg", "script"),
    [
        (FEDAVG_MINIGRID, PRPO_MINIGRID),
        pytest.param(FEDAVG_ATARI, PRPO_ATARI, marks=pytest.mark.slow),
        (FEDAVG_MUJOCO, PRPO_MUJOCO),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "changes",
    [
        {"num_agents": 1, "communicator": "uniform"},
        {"num_agents": 2, "communicator": "identity"},
        {"num_agents": 2, "communicator": "identity", "kl_direction": "reverse"},
    ],
    ids=["one agent", "identity", "reverse KL"],
)
def test_agents_without_peers_are_the_same_in_both_scripts(fedavg, script, changes, tmp_path):
    """Weights and metrics bit for bit, but for the script's name."""
    settings = changes | {"iterations": 3, "local_updates": 1, "kl_schedule": "linear"}
    runs = [train(x, tmp_path / str(x), **settings) for x in (fedavg, script)]
    weights, expected = map(weights_of, runs)
    assert len(weights) == changes["num_agents"]
    for i in weights:
        assert torch.equal(weights[i], expected[i])
    rows, expected_rows = (
        [row | {"exp_name": "", "env_id": ""} for row in rows_of(folder)] for folder in runs
    )
    assert rows == expected_rows
    assert {row["communication_bytes"] for row in rows} == {"0"}
    assert max(float(row["kl_reference"]) for row in rows) > 0
