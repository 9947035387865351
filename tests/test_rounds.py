"""Communication rounds without a script: who sends what to whom, who judges it, and what a
checkpoint holds of it.
"""

import copy
import json
import math
import threading
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    FEDAVG_MINIGRID,
    PRPO_MINIGRID,
    PRTRPO_MINIGRID,
    assert_same_run,
    only_run,
    scalars_of,
    tiny,
)

import communicators
from communicators import Exchange, Peers

# Ranks are threads, and initialisation draws from the common generator
GENERATOR = threading.Lock()


class Policy(torch.nn.Module):
    """A small network; its width may differ between agents."""

    evaluated = None  # a list takes note of every network that is evaluated

    def __init__(self, width=3):
        super().__init__()
        self.hidden = torch.nn.Linear(4, width)
        self.head = torch.nn.Linear(width, 3)
        self.critic = torch.nn.Linear(width, 1)

    def predict(self, states):
        """Logits and values."""
        if Policy.evaluated is not None:
            Policy.evaluated.append(self)
        with torch.no_grad():
            hidden = self.hidden(states).tanh()
            return self.head(hidden), self.critic(hidden).squeeze(-1)


class Place(Exchange):
    """The exchange of one of several ranks, which are threads of this process."""

    def __init__(self, num_agents, rank, world):
        self.num_agents = num_agents
        self.rank = rank
        self.world_size = len(world.tables)
        self.bytes_sent = 0
        held = num_agents // self.world_size
        self.agents = range(rank * held, (rank + 1) * held)
        self.world = world

    def all_gather(self, local):
        """Row i for every agent i."""
        self.world.tables[self.rank] = local.clone()
        self.world.barrier.wait(20)
        gathered = torch.cat(self.world.tables)
        self.world.barrier.wait(20)
        return gathered


def in_ranks(number, num_agents, train):
    """`train(exchange)` in so many ranks. Returns what each rank returns."""
    world = SimpleNamespace(tables=[None] * number, barrier=threading.Barrier(number))
    results = [None] * number

    def work(rank):
        try:
            results[rank] = train(Place(num_agents, rank, world))
        except BaseException as error:
            results[rank] = error
            world.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def policies(number, widths=(3,), seed=0):
    """Networks of all agents, all different."""
    with GENERATOR:
        torch.manual_seed(seed)
        return [Policy(widths[i % len(widths)]) for i in range(number)]


def draw_participants(num_agents, fraction, seed):
    """Who takes part in a round, bool [agents]: with --exchange, whose snapshot is there."""
    order = torch.randperm(num_agents, generator=torch.Generator().manual_seed(seed))
    drawn = order[: round(fraction * num_agents)]
    return torch.zeros(num_agents, dtype=torch.bool).index_fill(0, drawn, True)


def play(
    exchange,
    topology="ring",
    fraction=1.0,
    rounds=5,
    widths=(3,),
    resume_after=None,
    invalid=(),
    top_k=0,
):
    """Rounds in which every agent's network is a new one each time.

    Returns the last state of it all.
    """
    n = exchange.num_agents
    args = PRPO_MINIGRID.Args(
        num_agents=n, communicator="similarity", topology=topology, top_k=top_k
    )
    held = exchange.agents
    states = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))

    def start():
        return Peers(exchange, policies(n, widths), states, communicators.find_neighbours(args))

    peers = start()
    for number in range(1, rounds + 1):
        networks = policies(n, widths, seed=number)
        for j in invalid:
            networks[j].head.bias.data.fill_(math.nan)
        participating = draw_participants(n, fraction, number)
        receives = peers.neighbours
        if args.communicator != "similarity":
            receives = (
                PRPO_MINIGRID.make_communicator(args, torch.ones(n), usable=participating) > 0
            )
        peers.exchange_snapshots([networks[i] for i in held], participating, receives, number)
        peers.update(
            PRPO_MINIGRID.make_communicator(
                args, torch.ones(n), peers.log_probs, None, peers.usable
            )
        )
        if number == resume_after:
            stored = stored_of(peers.state())
            peers = start()
            load(peers.state(), stored)
            peers.restore()
    return peers


def stored_of(state):
    """What `Run.save` writes."""
    stored = {name: copy.deepcopy(column) for name, column in state.items() if name != "view"}
    return stored | {"view": [copy.deepcopy(view.state_dict()) for view in state["view"]]}


def load(state, stored):
    """What `Run.restore` does."""
    for name, targets in state.items():
        for target, value in zip(targets, stored[name], strict=True):
            match target:
                case torch.Tensor():
                    target.copy_(value)
                case list():
                    target[:] = value
                case _:
                    target.load_state_dict(value)


def snapshots_of(peers):
    """listener -> sender -> parameters."""
    views = zip(peers.held, peers.views, strict=True)
    return {
        i: {j: communicators.flatten([network], 99)[0] for j, network in sorted(view.items())}
        for i, view in views
    }


def count_networks(peers):
    """How many networks the agents of this process hold together."""
    return len({id(network) for view in peers.views for network in view.values()})


def alone(num_agents):
    """One process that holds all agents."""
    return Place(num_agents, 0, SimpleNamespace(tables=[None], barrier=threading.Barrier(1)))


CASES = [("ring", 1.0, 8), ("ring", 0.5, 8), ("full", 0.5, 6), ("ring", 0.5, 24), ("full", 0.5, 18)]


@pytest.mark.parametrize(("topology", "fraction", "n"), CASES)
def test_a_view_is_what_came_in_the_last_round_of_its_agent(topology, fraction, n):
    """Of positive weight only, replaced whole; who sits out keeps its row and its view, and agents
    share networks.
    """
    peers = play(alone(n), topology, fraction, widths=(3, 5))
    snapshots = snapshots_of(peers)
    last = torch.zeros(n, dtype=torch.long)
    for number in range(1, 6):
        last[draw_participants(n, fraction, number)] = number
    distinct = set()
    for i, view in enumerate(peers.views):
        senders = set(peers.communicator[i].nonzero().flatten().tolist())
        assert set(view) == senders | {i} and view.round == last[i]
        for j in view:
            networks = policies(n, (3, 5), seed=int(last[i]))
            assert torch.equal(snapshots[i][j], communicators.flatten([networks[j]], 99)[0])
            distinct.add((j, int(last[i])))
        if last[i]:
            present = draw_participants(n, fraction, int(last[i]))
            assert all(present[j] for j in senders)
    assert count_networks(peers) == len(distinct)
    assert (peers.communicator.sum(1) - 1).abs().max() < 1e-6 and (
        fraction == 1 or len(set(last.tolist())) > 1
    )


@pytest.mark.parametrize(("topology", "fraction", "n"), CASES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_rounds_are_the_same_in_every_placement_and_over_a_restart(topology, fraction, n, ranks):
    """C, distances, views and bytes; a rank may hold agents that do not start at 0."""
    options = {"topology": topology, "fraction": fraction, "widths": (3, 5), "invalid": (n - 1,)}
    expected = play(alone(n), **options)
    views = snapshots_of(expected)
    for peers in in_ranks(ranks, n, lambda exchange: play(exchange, **options, resume_after=3)):
        torch.testing.assert_close(peers.communicator, expected.communicator, rtol=0, atol=1e-6)
        torch.testing.assert_close(
            peers.distances, expected.distances, rtol=0, atol=1e-6, equal_nan=True
        )
        assert torch.equal(peers.last_rounds, expected.last_rounds)
        assert peers.exchange.bytes_sent == expected.exchange.bytes_sent > 0
        for i, view in snapshots_of(peers).items():
            assert view.keys() == views[i].keys()
            assert all(torch.equal(view[j], views[i][j]) for j in view)


def test_a_checkpoint_holds_what_no_other_has():
    """With everybody in every round its own snapshot; else also the older ones that it still
    listens to.
    """
    for topology in ("ring", "full"):
        assert all(view.stored == [i] for i, view in enumerate(play(alone(20), topology).views))
    peers = play(alone(20), "full", 0.5)
    for i, view in enumerate(peers.views):
        assert set(view.stored) == {i} | {
            j for j in view if peers.last_rounds[j] > peers.last_rounds[i]
        }
        assert set(view.state_dict()["received"]) == set(view.stored)
    assert (
        20 < sum(len(view.stored) for view in peers.views) < sum(len(view) for view in peers.views)
    )


@pytest.mark.parametrize(("n", "expected"), [(8, 8), (24, 14)])
def test_a_rank_evaluates_only_those_to_whom_its_agents_may_listen(n, expected, monkeypatch):
    """On a ring of 24, shared by two, the 12 held and a neighbour at each end; of few agents all,
    for the log.
    """
    monkeypatch.setattr(Policy, "evaluated", [])
    first, second = in_ranks(2, n, lambda exchange: play(exchange, rounds=1))
    assert len(Policy.evaluated) == 2 * expected
    assert len(first.received) == len(second.received) == expected
    measured = ~first.distances.isnan()
    assert measured.sum() == (n * n if n == 8 else 3 * n)


@pytest.mark.parametrize("n", [6, 18])
def test_distances_are_total_variations_on_the_public_states(n):
    """Of few agents all, of many those that C connects."""
    peers = play(alone(n), rounds=1)
    expected = communicators.total_variation(peers.log_probs)
    if n > communicators.FEW_AGENTS:
        expected = expected.masked_fill(peers.communicator == 0, math.nan)
    torch.testing.assert_close(peers.distances, expected, equal_nan=True)


def test_a_resumed_run_shares_networks_as_before():
    """Also older ones, which every agent that still listens to their sender has stored."""
    peers = play(alone(20), "full", 0.5)
    resumed = play(alone(20), "full", 0.5, resume_after=5)
    stored = sum(len(view.stored) for view in peers.views)
    assert count_networks(resumed) == count_networks(peers) < stored


def test_a_rank_whose_agents_all_sit_out_goes_on():
    """One of many agents per rank: in its first round such a rank evaluates no network, and
    receives C.
    """
    n = 18
    expected = play(alone(n), fraction=0.5, rounds=1)
    participating = draw_participants(n, 0.5, 1)
    assert not participating.all()
    for peers in in_ranks(n, n, lambda exchange: play(exchange, fraction=0.5, rounds=1)):
        torch.testing.assert_close(peers.communicator, expected.communicator, rtol=0, atol=1e-6)
        (i,) = peers.held
        assert peers.log_probs.isnan().all() == (not participating[i])
        assert peers.log_probs.shape == expected.log_probs.shape


@pytest.mark.parametrize("ranks", [1, 3, 6])
def test_participants_without_a_neighbour_among_them_keep_to_themselves(ranks):
    """On a ring of six, 0 and 3 alone in a round: nothing is sent, and nobody else gets weight."""
    n = 6
    args = PRPO_MINIGRID.Args(num_agents=n, communicator="uniform", topology="ring")
    pair = torch.tensor([True, False, False, True, False, False])
    states = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))

    def play_two_rounds(exchange):
        peers = Peers(exchange, policies(n), states, communicators.find_neighbours(args))
        for number, participating in ((1, torch.ones_like(pair)), (2, pair)):
            before = exchange.bytes_sent
            networks = [policies(n, seed=number)[i] for i in exchange.agents]
            peers.exchange_snapshots(networks, participating, peers.neighbours, number)
            C = PRPO_MINIGRID.make_communicator(args, None, peers.log_probs, None, peers.usable)
            peers.update(C)
        assert exchange.bytes_sent == before > 0
        return peers

    expected = communicators.ring(n) / 3
    expected[pair] = torch.eye(n)[pair]
    for peers in in_ranks(ranks, n, play_two_rounds):
        torch.testing.assert_close(peers.communicator, expected, rtol=0, atol=1e-6)
        seen = peers.log_probs.isfinite().flatten(1).all(1)
        assert torch.equal(seen, pair)
        for i, senders in snapshots_of(peers).items():
            assert set(senders) == set(expected[i].nonzero().flatten().tolist())
            newest = policies(n, seed=2 if pair[i] else 1)[i]
            assert torch.equal(senders[i], communicators.flatten([newest], 99)[0])


def test_candidates_are_those_to_whom_an_agent_may_listen():
    """Its neighbours that took part; an agent that sits out has none."""
    n = 6
    exchange = alone(n)
    peers = Peers(exchange, policies(n), torch.randn(6, 4), communicators.ring(n))
    participating = torch.tensor([True, True, False, True, True, True])
    peers.exchange_snapshots(policies(n, seed=1), participating, communicators.ring(n), 1)
    assert [sorted(peers.find_candidates(i)) for i in range(n)] == [
        [1, 5],
        [0],
        [],
        [4],
        [3, 5],
        [0, 4],
    ]
    # 0-1, 3-4, 4-5, 5-0: four pairs, each of which sends both ways
    assert exchange.bytes_sent == 8 * communicators.flatten([Policy()], 31).numel() * 4


def test_isolated_agents_send_log_probabilities_for_the_log_and_nothing_else(monkeypatch):
    """And of many agents not even these."""
    sent = []
    gather = Place.all_gather

    def watch(exchange, local):
        sent.append(tuple(local.shape))
        return gather(exchange, local)

    monkeypatch.setattr(Place, "all_gather", watch)
    for n in (4, 20):
        sent.clear()
        exchange = alone(n)
        peers = Peers(exchange, policies(n), torch.randn(6, 4), torch.eye(n, dtype=torch.bool))
        everybody = torch.ones(n, dtype=torch.bool)
        networks = policies(n, seed=1)
        peers.exchange_snapshots(networks, everybody, torch.eye(n, dtype=torch.bool), 1)
        peers.update(torch.eye(n))
        assert sent == ([(4, 18)] if n == 4 else []) and exchange.bytes_sent == 0
        assert (~peers.distances.isnan()).all() == (n == 4)
        for i, view in enumerate(peers.views):
            assert list(view) == [i]
            assert torch.equal(view[i].head.bias, networks[i].head.bias)


def test_an_agent_that_sits_out_sends_zeros(monkeypatch):
    sent = []
    gather = Place.all_gather

    def watch(exchange, local):
        sent.append(local.clone())
        return gather(exchange, local)

    monkeypatch.setattr(Place, "all_gather", watch)
    n = 4
    peers = Peers(alone(n), policies(n), torch.randn(6, 4), torch.ones(n, n, dtype=torch.bool))
    participating = torch.tensor([True, False, True, True])
    peers.exchange_snapshots(policies(n, seed=1), participating, peers.neighbours, 1)
    (parameters,) = sent
    assert torch.equal(parameters.any(1), participating)


@pytest.mark.parametrize("spoiled", ["nan", "huge weight", "huge value"])
def test_what_is_finite_but_no_policy_is_dropped(spoiled, capsys):
    """Parameters of 3e38 are finite; their log-probabilities, or the squares of their values, are
    not.
    """
    n = 4
    exchange = alone(n)
    peers = Peers(exchange, policies(n), torch.ones(2, 4), torch.ones(n, n, dtype=torch.bool))
    networks = policies(n, seed=1)
    if spoiled == "nan":
        networks[2].head.bias.data[1] = math.nan
    elif spoiled == "huge weight":
        # Its units are all 1, so that their weighted sum overflows
        networks[2].hidden.bias.data.fill_(10.0)
        networks[2].head.weight.data.fill_(3e38)
    else:
        networks[2].critic.bias.data.fill_(1e25)
    receives = torch.ones(n, n, dtype=torch.bool)
    peers.exchange_snapshots(networks, torch.ones(n, dtype=torch.bool), receives, 1)
    assert peers.usable.tolist() == [True, True, False, True] and set(peers.received) == {0, 1, 3}
    assert capsys.readouterr().out.count("agents [2]") == 1
    peers.update(torch.full((n, n), 0.25))  # the script may ignore what is usable
    third = 1 / 3
    assert peers.communicator[0].tolist() == pytest.approx([third, third, 0, third])
    assert 2 not in peers.views[0] and set(peers.views[2]) == {0, 1, 2, 3}
    # Its last valid snapshot
    assert torch.equal(peers.views[2][2].head.bias, policies(n)[2].head.bias)


def test_who_takes_an_invalid_agents_place_is_counted():
    """With top-k the next peer is chosen: its parameters are sent too."""
    n = 5
    size = communicators.flatten([Policy()], 31).numel()
    for invalid in ((), (1,)):
        peers = play(alone(n), "full", rounds=1, invalid=invalid)
        peers.exchange.bytes_sent = 0
        args = PRPO_MINIGRID.Args(num_agents=n, communicator="uniform", top_k=1)
        everybody = torch.ones(n, dtype=torch.bool)
        receives = PRPO_MINIGRID.make_communicator(args) > 0
        networks = policies(n)
        for j in invalid:
            networks[j].head.bias.data.fill_(math.nan)
        peers.exchange_snapshots(networks, everybody, receives, 2)
        peers.update(PRPO_MINIGRID.make_communicator(args, usable=peers.usable))
        extra = ((peers.communicator > 0) & ~torch.eye(n, dtype=torch.bool) & ~receives).sum()
        assert peers.exchange.bytes_sent == (n + extra) * size * 4 and (extra > 0) == bool(invalid)


def test_bytes_are_the_senders_sizes_times_its_listeners():
    """Column j says who listens to agent j: with sizes 7, 5, 3 and an asymmetric matrix rows would
    give another sum.
    """
    exchange = alone(3)
    receives = torch.tensor([[1, 1, 1], [0, 1, 0], [0, 1, 1]], dtype=torch.bool)
    exchange.gather_snapshots(torch.ones(3, 7), receives, [7, 5, 3])
    assert exchange.bytes_sent == (0 * 7 + 2 * 5 + 1 * 3) * 4


# --- reports ---


def test_reports_are_bounded_by_the_others_magnitude():
    nan = math.nan
    cases = [
        ([1.0, 2.0, 1e30], [1.0, 2.0, 15.0]),
        ([1.0, 2.0, -1e30], [1.0, 2.0, -15.0]),
        ([1.0, 2.0, math.inf], [1.0, 2.0, nan]),
        # Nothing to compare with: by Example 4 any positive return has the row
        ([0.0, 0.0, 0.9], [0.0, 0.0, 0.9]),
        ([0.0, 0.0, 0.0, 0.3, 1e30], [0.0, 0.0, 0.0, 0.3, 0.75]),
        ([0.01, 0.02, 0.1], [0.01, 0.02, 0.1]),
        ([nan, nan, 5.0], [nan, nan, 5.0]),
        ([-3.0, 2.0, 20.0], [-3.0, 2.0, 20.0]),
        ([1e308, 1e308, 1e308], [1e308, 1e308, 1e308]),
        ([7.0], [7.0]),
    ]
    for reported, expected in cases:
        bounded = communicators.bound_returns(torch.tensor(reported, dtype=torch.float64))
        assert bounded.tolist() == pytest.approx(expected, nan_ok=True, rel=1e-6), reported


BOUND = torch.tensor([1.0, 15.0, 2.0])
BOUNDED = {
    # As ten times the usual return of the others
    "reward": ([1.0, 1e30, 2.0], [1 / 18, 15 / 18, 2 / 18]),
    "softmax-reward": ([1.0, 1e30, 2.0], (BOUND / BOUND.std(correction=0)).softmax(0).tolist()),
    "rank-reward": ([1.0, 1e30, 2.0], [1 / 6, 3 / 6, 2 / 6]),
    # Nothing that is reported counts
    "uniform": ([1.0, 1e30, 2.0], [1 / 3] * 3),
}


@pytest.mark.parametrize(
    ("script", "communicator"),
    [
        *((PRPO_MINIGRID, name) for name in BOUNDED),
        (FEDAVG_MINIGRID, "reward"),
        (PRTRPO_MINIGRID, "reward"),
    ],
    ids=str,
)
def test_an_inflated_report_does_not_own_a_row(script, communicator, tmp_path, monkeypatch):
    """Agent 1 reports 1e30, which counts as ten times the others' usual return."""
    reported, expected = BOUNDED[communicator]

    def report(peers):
        peers.mean_returns[:] = torch.tensor(reported)

    monkeypatch.setattr(Peers, "remember_returns", report)
    settings = {"iterations": 1, "local_updates": 1, "eval_episodes": 0, "num_steps": 16}
    settings["communicator"] = communicator
    script.main(tiny(script, tmp_path, **settings))
    points = scalars_of(only_run(tmp_path))
    row = [points[f"communicator/c_0_{j}"][-1][1] for j in range(3)]
    assert row == pytest.approx(expected, abs=1e-5)


# --- a matrix of one's own ---


def test_a_zero_of_ones_own_matrix_forbids(tmp_path):
    """Row [0, 1, 0] without agent 1 falls back on oneself, and no excluded peer gets weight."""
    file = tmp_path / "C.csv"
    file.write_text("0,1,0\n0.5,0,0.5\n0.2,0.3,0.5\n")
    for script in (PRPO_MINIGRID, PRTRPO_MINIGRID):
        args = script.Args(num_agents=3, communicator=str(file))
        usable = torch.tensor([True, False, True])
        C = script.make_communicator(args, torch.ones(3), usable=usable)
        torch.testing.assert_close(C[0], torch.tensor([1.0, 0, 0]))
        torch.testing.assert_close(C[1], torch.tensor([0.5, 0, 0.5]))
        torch.testing.assert_close(C[2], torch.tensor([2 / 7, 0, 5 / 7]))
        alone = script.make_communicator(
            args, torch.ones(3), usable=torch.tensor([False, False, True])
        )
        assert alone.tolist() == [[1, 0, 0], [0, 0, 1], [0, 0, 1]]
        assert (
            communicators.find_neighbours(args) == torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 1]])
        ).all()


@pytest.mark.parametrize("change", ["other content", "gone"])
def test_a_matrix_belongs_to_its_run(change, crashing, tmp_path):
    """Its content is in config.json and is used on resume, whatever has become of the file."""
    text = "0.5,0.5,0\n0.25,0.5,0.25\n0,0.1,0.9\n"
    settings = {"iterations": 4, "local_updates": 1, "save_every": 2, "eval_episodes": 0}
    for name in ("whole", "resumed"):
        (tmp_path / f"{name}.csv").write_text(text)
    file = tmp_path / "resumed.csv"
    PRPO_MINIGRID.main(
        tiny(PRPO_MINIGRID, tmp_path / "a", **settings, communicator=str(tmp_path / "whole.csv"))
    )
    args = tiny(PRPO_MINIGRID, tmp_path / "b", **settings, communicator=str(file))
    crashing("complete", 2, 2, lambda: PRPO_MINIGRID.main(args))
    folder = only_run(tmp_path / "b")
    if change == "gone":
        file.unlink()
    else:
        file.write_text("1,0,0\n0,1,0\n0,0,1\n")
    again = PRPO_MINIGRID.parse_args(["--resume", str(folder)])
    assert (
        again.communicator_matrix
        == json.loads((folder / "config.json").read_text())["communicator_matrix"]
        != ""
    )
    PRPO_MINIGRID.main(again)
    assert_same_run(folder, only_run(tmp_path / "a"))


def test_ranks_compare_the_content_of_a_matrix(tmp_path):
    """The same path may hold another matrix on another machine."""
    file = tmp_path / "C.csv"
    numbers = []

    def find_different_ranks(number):
        numbers.append(number)
        return []

    for text in ("1,0\n0,1\n", "1,0\n0,1\n", "0.5,0.5\n0,1\n"):
        file.write_text(text)
        args = PRPO_MINIGRID.Args(num_agents=2, communicator=str(file))
        run = SimpleNamespace(
            args=args, exchange=SimpleNamespace(find_different_ranks=find_different_ranks)
        )
        communicators.Run._compare_ranks(run)
    assert numbers[0] == numbers[1] != numbers[2]


# --- isolated agents, PR-TRPO's radius, averages of adapters ---


def test_an_agent_that_has_diverged_leaves_the_others_their_radius():
    args = PRTRPO_MINIGRID.Args(num_agents=3, delta=0.2)
    C = communicators.uniform(3)
    finite = torch.tensor([[0.01, 0.02], [0.03, 0.01]], dtype=torch.float64)
    lost = torch.tensor([[math.nan, math.nan]], dtype=torch.float64)
    expected = PRTRPO_MINIGRID.compute_radius(C, finite, args)
    assert PRTRPO_MINIGRID.compute_radius(C, torch.cat((finite, lost)), args) == expected
    assert all(math.isfinite(value) for value in PRTRPO_MINIGRID.compute_radius(C, lost, args))
    inflated = torch.tensor([[1e30, 0.0]], dtype=torch.float64)  # no total variation
    assert PRTRPO_MINIGRID.compute_radius(C, torch.cat((finite, inflated)), args) == (
        args.epsilon_min,
        args.delta,
    )


def test_an_average_of_adapters_keeps_a_far_from_singular():
    """Of (a, b) and (a, -b) the mean is (a, 0): without a floor that rank could never learn
    again.
    """
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 9, generator=generator)
    A = torch.stack((torch.stack((a, b)), torch.stack((a, -b))))
    B = torch.randn(1, 7, 2, generator=generator).repeat(2, 1, 1)
    B[1, :, 1] *= -1.0  # the products are equal
    C = torch.full((2, 2), 0.5)
    new_A, new_B, *_ = communicators.average_products(C, A, B)
    torch.testing.assert_close(new_B @ new_A, B @ A, rtol=0, atol=1e-4)
    scales = torch.linalg.svdvals(new_A[0])
    assert scales.min() > 0.05 * scales.max() and new_B.abs().max() < 100


# --- the log of many agents ---


def test_logs_of_many_agents_are_linear(tmp_path):
    """communicator.csv has positive weights only, TensorBoard a summary, both only where C
    changes.
    """
    n = 18
    settings = {
        "num_agents": n,
        "communicator": "uniform",
        "topology": "ring",
        "hidden_sizes": (8,) * n,
    }
    settings |= {
        "iterations": 3,
        "local_updates": 2,
        "eval_episodes": 0,
        "num_envs": 1,
        "num_steps": 8,
    }
    settings |= {"num_minibatches": 1, "update_epochs": 1}
    PRPO_MINIGRID.main(tiny(PRPO_MINIGRID, tmp_path, **settings))
    folder = only_run(tmp_path)
    lines = (folder / "communicator.csv").read_text().splitlines()[1:]
    assert [line.split(",")[0] for line in lines] == ["1"] * n + ["2"] * 3 * n
    points = scalars_of(folder)
    assert not [tag for tag in points if tag.startswith(("communicator/c_", "distances/agent"))]
    summary = {
        tag: [value for _, value in values]
        for tag, values in points.items()
        if tag.startswith("communicator/")
    }
    assert summary == {
        "communicator/self_weight": pytest.approx([1, 1 / 3]),
        "communicator/peers": [0, 2],
        "communicator/largest_peer_weight": pytest.approx([0, 1 / 3]),
        "communicator/most_listeners": [0, 2],
    }
    ((step, mean_distance),) = points["distances/mean"]
    assert step == 16 and 0 < mean_distance <= points["distances/largest"][0][1] < 1
