"""benchmark/text_worlds.py: success of agents in text worlds, from the files of their runs."""

import importlib
import sys

import pandas as pd
import pytest
from fabricated import write_run
from helpers import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmark"))
runs = importlib.import_module("runs")
text_worlds = importlib.import_module("text_worlds")

CATEGORIES = ("open", "walk")
# Client -> its tasks in each category
CLIENTS = {0: {"walk": 3, "open": 1}, 1: {"open": 4}, 2: {"walk": 2, "open": 2}, 3: {"walk": 4}}


def success(method, seed, step, agent, category):
    """What an agent of these runs solves: each number is visible in the result."""
    if step < 10:
        return 0.1
    value = 0.2 + 0.05 * agent + 0.01 * seed + 0.3 * (method == "fedagent")
    return value + 0.1 * (category == "walk")


def world_run(root, method, partition, seed, clients, steps=(0, 5, 10), name=None):
    """A run folder as prpo_babyai.py leaves it, of agents that are these clients in the end."""
    settings = {"exp_name": name or f"{method}_{partition}", "seed": seed, "base_model": "model"}
    settings |= {"env": "babyai", "partition": partition}
    metrics = []
    evaluations = []
    for step in steps:
        for agent, client in enumerate(clients):
            if step:
                number = client if step == 10 else 3 - client
                row = {"step": step, "agent": agent, "client": float(number)}
                metrics.append(row | {"success": success(method, seed, step, agent, "open")})
            values = {name: success(method, seed, step, agent, name) for name in CATEGORIES}
            for task, value in {"all": sum(values.values()) / 2, **values}.items():
                row = {"step": step, "agent": agent, "task": task, "episodes": 20}
                evaluations.append(row | {"mean_success": value, "ci95": 0.2})
    evaluation = {"group": 0.5}
    folder = write_run(root, "prpo_babyai", settings, metrics, evaluations, evaluation=evaluation)
    dealt = {0: {"walk": 9, "open": 7}} if method == "centralised" else CLIENTS
    rows = [(client, name, number) for client, of in dealt.items() for name, number in of.items()]
    table = pd.DataFrame(rows, columns=["client", "category", "tasks"])
    table.to_csv(folder / "clients.csv", index=False)
    return folder


def read_tables(root):
    """Evaluations and clients of the runs below a folder."""
    return text_worlds.read_tables(runs.read_runs((str(root),)))


def test_success_of_methods_by_category(tmp_path, capsys):
    """By hand, and again from the files."""
    for seed in (1, 2, 3):
        world_run(tmp_path / "runs", "local", "preference2", seed, (0, 3))
        world_run(tmp_path / "runs", "fedagent", "preference2", seed, (1, 2))
        world_run(tmp_path / "runs", "local", "iid", seed, (0, 1))
    out = str(tmp_path / "text")
    text_worlds.main(text_worlds.Args(runs=(str(tmp_path / "runs"),), out=out))
    lines = capsys.readouterr().out.splitlines()
    # Means over agents 0 and 1, and over seeds 1 to 3; their shares of "walk" are 0.75 and 1 with
    # preferences, else 0.75 and 0
    weighted = {"preference 2": 0.0875, "iid": 0.0375}
    half = 0.01 / 3**0.5 * 4.302653  # by Student's t with two degrees of freedom
    for line in lines[2:14]:
        partition, category, method, before, after, seeds = line.strip("| ").split(" | ")
        assert (before, seeds) == ("0.10 [0.10, 0.10]", "1 2 3")
        mean = 0.2 + 0.025 + 0.02 + 0.3 * (method == "FedAgent")
        mean += {"walk": 0.1, "open": 0.0, "all": 0.05, "own": weighted[partition]}[category]
        value, low, high = (float(text.strip("[],")) for text in after.split())
        assert (value, low, high) == pytest.approx((mean, mean - half, mean + half), abs=0.0051)
    text_worlds.main(text_worlds.Args(out=out, from_csv=True))
    assert capsys.readouterr().out.splitlines() == lines


def test_agents_and_categories(tmp_path):
    """The training tasks of the clients that the agents are, and success weighted by these;
    FedAgent's agents, which are nobody in particular, count for the others.
    """
    for seed in (1, 2):
        world_run(tmp_path, "local", "preference2", seed, (0, 3))
        world_run(tmp_path, "fedagent", "preference2", seed, (1, 2))
    world_run(tmp_path, "centralised", "preference2", 1, (0,))
    rows, clients = read_tables(tmp_path)
    shares = text_worlds.share_tasks(rows, clients).loc["preference2"]
    assert shares.loc[1, 0].to_dict() == {"walk": 0.75, "open": 0.25}
    assert shares.loc[2, 1].to_dict() == {"walk": 1.0, "open": 0.0}
    weighted = text_worlds.add_own(rows, clients)
    weighted = weighted.query("category == 'own' and step == 10 and seed == 1")
    expected = {0: 0.2 + 0.01 + 0.075, 1: 0.2 + 0.05 + 0.01 + 0.1}
    assert weighted.set_index(["method", "agent"]).success.to_dict() == {
        ("local", 0): pytest.approx(expected[0]),
        ("local", 1): pytest.approx(expected[1]),
        ("fedagent", 0): pytest.approx(expected[0] + 0.3),
        ("fedagent", 1): pytest.approx(expected[1] + 0.3),
    }


def test_an_agent_that_has_diverged_leaves_no_mean(tmp_path):
    """Else its method would be judged by the others."""
    world_run(tmp_path, "local", "iid", 1, (0, 1))
    folder = world_run(tmp_path, "local", "iid", 2, (0, 1))
    rows = pd.read_csv(folder / "evaluations.csv")
    rows.loc[(rows.step == 10) & (rows.agent == 0), "mean_success"] = float("nan")
    rows.to_csv(folder / "evaluations.csv", index=False)
    means = text_worlds.average_agents(read_tables(tmp_path)[0])
    first, second = means.query("category == 'all' and step == 10").sort_values("seed").success
    assert first == pytest.approx(0.2 + 0.025 + 0.01 + 0.05)
    assert pd.isna(second)


def test_what_was_not_measured_before_training_is_unknown(tmp_path):
    """A run that is evaluated for the first time after a resume, under a name without a
    partition.
    """
    for seed in (1, 2):
        world_run(tmp_path, "local", "iid", seed, (0, 1), steps=(5, 10), name="local")
    for row in text_worlds.tabulate(read_tables(tmp_path)[0]):
        assert (row["tasks"], row["method"], row["before"]) == ("iid", "isolated", "")
        assert row["after"].endswith("(2 seeds)")
    assert text_worlds.name_partition("preference0.5") == "preference 0.5"
