"""benchmark/text_worlds.py: success of agents in text worlds, from the files of their runs."""

import csv
import importlib
import json
import sys
from pathlib import Path

import pandas as pd
import pytest
from helpers import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmark"))
choose = importlib.import_module("choose")
plot = importlib.import_module("plot")
text_worlds = importlib.import_module("text_worlds")

CATEGORIES = ("open", "walk")
# Client -> its tasks in each category
CLIENTS = {0: {"walk": 3, "open": 1}, 1: {"open": 4}, 2: {"walk": 2, "open": 2}, 3: {"walk": 4}}


def write_rows(path, rows):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def success(method, seed, step, agent, category):
    """What an agent of these runs solves: each number is visible in the result."""
    if step < 10:
        return 0.1 + 0.01 * step
    value = 0.2 + 0.05 * agent + 0.01 * seed
    if method == "fedagent":
        value += 0.3
    return value + 0.1 * (category == "walk")


def fake_run(root, method, partition, seed, clients, stamp=1, completed=True):
    """A run folder as prpo_babyai.py leaves it, of two agents."""
    settings = {"exp_name": f"{method}_{partition}", "seed": seed, "aggregation": method}
    settings |= {"base_model": "model", "env": "babyai", "partition": partition}
    folder = root / f"model__{method}_{partition}__{seed}__{stamp}"
    folder.mkdir(parents=True)
    metrics = []
    evaluations = []
    for step in (0, 5, 10):
        for agent, client in enumerate(clients):
            if step:
                # Only the last step's clients count
                number = client if step == 10 else 3 - client
                row = {"step": step, "agent": agent, "client": float(number)}
                metrics.append(row | {"success": success(method, seed, step, agent, "open")})
            values = [success(method, seed, step, agent, category) for category in CATEGORIES]
            values = {"all": sum(values) / 2, **dict(zip(CATEGORIES, values, strict=True))}
            for task, value in values.items():
                row = {"step": step, "agent": agent, "task": task, "episodes": 20}
                evaluations.append(row | {"mean_success": value, "ci95": 0.2})
    write_rows(folder / "metrics.csv", metrics)
    write_rows(folder / "evaluations.csv", evaluations)
    rows = []
    dealt = {0: {"walk": 9, "open": 7}} if method == "centralised" else CLIENTS
    for client, tasks in dealt.items():
        for category, number in tasks.items():
            rows.append({"client": client, "category": category, "tasks": number})
    write_rows(folder / "clients.csv", rows)
    summary = {"script": "prpo_babyai", "completed": completed, "seed": seed}
    summary |= {"settings": settings, "versions": {"torch": "2"}, "evaluation": {"group": 0.5}}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_success_of_methods_by_category(tmp_path, capsys):
    import matplotlib.pyplot as plt

    root = tmp_path / "runs"
    for seed in (1, 2, 3):
        fake_run(root, "local", "preference2", seed, (0, 3))
        fake_run(root, "fedagent", "preference2", seed, (1, 2))
        fake_run(root, "local", "iid", seed, (0, 1))
    fake_run(root, "local", "iid", 4, (0, 1), completed=False)
    (fake_run(root, "local", "iid", 5, (0, 1)) / "clients.csv").write_text("")
    out = str(tmp_path / "text")
    text_worlds.main(text_worlds.Args(runs=(str(root),), out=out))
    problems = capsys.readouterr().err.splitlines()
    assert len(problems) == 2 and "not a finished run" in problems[0]
    assert "damaged" in problems[1]

    table = pd.read_csv(f"{out}_table.csv", comment="#")
    table = table.set_index(["partition", "method", "category"])
    assert set(table.seeds) == {"1 2 3"} and set(table.steps) == {10}
    # Means over agents 0 and 1, and over seeds 1 to 3; their shares of "walk" are 0.75 and 1 with
    # preferences, else 0.75 and 0
    weighted = {"preference2": 0.0875, "iid": 0.0375}
    for (partition, method, category), row in table.iterrows():
        assert row.before == pytest.approx(0.1)
        expected = 0.2 + 0.025 + 0.02 + 0.3 * (method == "fedagent")
        expected += {"walk": 0.1, "open": 0.0, "all": 0.05, "own": weighted[partition]}[category]
        assert row.after == pytest.approx(expected)
        # 0.01 / sqrt(3) times the quantile of Student's t with two degrees of freedom
        half = 0.01 / 3**0.5 * 4.302653
        assert row.after_ci_high - row.after == pytest.approx(half, rel=1e-4)
    comments = Path(f"{out}.csv").read_text().splitlines()[:2]
    assert any("prpo_babyai.py" in line and "--seed 1 2 3" in line for line in comments)

    picture = plt.imread(f"{out}.png")
    matrix = plt.imread(f"{out}_matrix.png")
    text_worlds.main(text_worlds.Args(out=out, from_csv=True))
    assert (plt.imread(f"{out}.png") == picture).all()
    assert (plt.imread(f"{out}_matrix.png") == matrix).all()


def test_agents_and_categories(tmp_path):
    """The matrix after training, and the training tasks of the clients that the agents are."""
    root = tmp_path / "runs"
    for seed in (1, 2):
        fake_run(root, "local", "preference2", seed, (0, 3))
        fake_run(root, "fedagent", "preference2", seed, (1, 2))
    rows, clients, _ = text_worlds.read_runs((str(root),))
    matrix = text_worlds.make_matrix(rows)
    assert matrix.loc[(1, 1), ("local", "walk")] == pytest.approx(0.2 + 0.05 + 0.01 + 0.1)
    assert matrix.loc[(2, 0), ("fedagent", "open")] == pytest.approx(0.2 + 0.02 + 0.3)
    # Clients 0 and 3; FedAgent's agents are nobody in particular
    shares = text_worlds.share_tasks(rows, clients).loc["preference2"]
    assert shares.loc[1, 0].to_dict() == {"walk": 0.75, "open": 0.25}
    assert shares.loc[2, 1].to_dict() == {"walk": 1.0, "open": 0.0}


def test_an_agent_that_has_diverged_leaves_no_mean(tmp_path, capsys):
    """Else its method would be judged by the others; the run is reported."""
    root = tmp_path / "runs"
    fake_run(root, "local", "iid", 1, (0, 1))
    folder = fake_run(root, "local", "iid", 2, (0, 1))
    path = folder / "evaluations.csv"
    rows = list(csv.DictReader(path.open()))
    for row in rows:
        if row["step"] == "10" and row["agent"] == "0":
            row["mean_success"] = "nan"
    write_rows(path, rows)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"diverged": [0]}))
    rows, clients, _ = text_worlds.read_runs((str(root),))
    assert "agents [0] have diverged" in capsys.readouterr().err
    of_all = text_worlds.average_agents(rows).query("category == 'all' and step == 10")
    first, second = of_all.sort_values("seed").success
    assert first == pytest.approx(0.2 + 0.025 + 0.01 + 0.05)
    assert pd.isna(second)


def test_the_matrix_of_any_partition_is_drawn(tmp_path, capsys):
    """With fewer categories than others have, and without isolated agents; one that is not there
    is named."""
    root = tmp_path / "runs"
    fake_run(root, "local", "preference2", 1, (0, 3))
    fake_run(root, "fedagent", "iid", 1, (1, 2))
    out = str(tmp_path / "text")
    text_worlds.main(text_worlds.Args(runs=(str(root),), out=out))
    table = pd.read_csv(f"{out}.csv", comment="#")
    table = table[(table.partition != "iid") | (table.category != "open")]
    table.to_csv(f"{out}.csv", index=False)
    for partition in ("preference2", "iid"):
        Path(f"{out}_matrix.png").unlink()
        text_worlds.main(text_worlds.Args(out=out, from_csv=True, matrix=partition))
        assert Path(f"{out}_matrix.png").is_file()
    capsys.readouterr()
    text_worlds.main(text_worlds.Args(out=out, from_csv=True, matrix="none"))
    assert "--matrix none: no such runs" in capsys.readouterr().err


def test_runs_of_one_name_have_the_same_settings(tmp_path):
    root = tmp_path / "runs"
    fake_run(root, "local", "iid", 1, (0, 1))
    path = fake_run(root, "local", "iid", 2, (0, 1)) / "summary.json"
    summary = json.loads(path.read_text())
    summary["settings"]["env"] = "house.py:make"
    path.write_text(json.dumps(summary))
    with pytest.raises(SystemExit, match="the same name as .*, but other settings"):
        text_worlds.read_runs((str(root),))


def test_success_in_own_categories(tmp_path):
    """Weighted by the shares of training tasks; of FedAgent by those of the other methods."""
    root = tmp_path / "runs"
    fake_run(root, "local", "preference2", 1, (0, 3))
    fake_run(root, "fedagent", "preference2", 1, (1, 2))
    fake_run(root, "centralised", "preference2", 1, (0,))
    rows, clients, _ = text_worlds.read_runs((str(root),))
    rows = text_worlds.add_own(rows, clients)
    last = rows[(rows.category == "own") & (rows.step == 10)]
    success_of_agents = last.set_index(["method", "agent"]).success.to_dict()
    # Agent 0 is client 0, agent 1 is client 3: "walk" is 0.75 and 1 of their tasks
    expected = {0: 0.2 + 0.01 + 0.075, 1: 0.2 + 0.05 + 0.01 + 0.1}
    assert success_of_agents == {
        ("local", 0): pytest.approx(expected[0]),
        ("local", 1): pytest.approx(expected[1]),
        ("fedagent", 0): pytest.approx(expected[0] + 0.3),
        ("fedagent", 1): pytest.approx(expected[1] + 0.3),
    }


def test_the_newest_of_repeated_runs_counts(tmp_path):
    root = tmp_path / "runs"
    fake_run(root, "local", "iid", 1, (0, 1), stamp=1)
    new = fake_run(root, "local", "iid", 1, (2, 3), stamp=2)
    rows, _, _ = text_worlds.read_runs((str(root),))
    assert set(rows.client) == {2, 3} and new.is_dir()
    with pytest.raises(SystemExit, match="no finished run"):
        text_worlds.read_runs((str(tmp_path / "empty"),))


def test_a_name_without_a_partition_has_that_of_the_settings(tmp_path):
    for method in ("local", "fedagent"):
        for seed in (1, 2):
            folder = fake_run(tmp_path / "runs", method, "iid", seed, (0, 1))
            summary = json.loads((folder / "summary.json").read_text())
            summary["settings"]["exp_name"] = method
            (folder / "summary.json").write_text(json.dumps(summary))
    text_worlds.main(text_worlds.Args(runs=(str(tmp_path / "runs"),), out=str(tmp_path / "out")))
    table = pd.read_csv(tmp_path / "out_table.csv", comment="#")
    assert {*table.method} == {"local", "fedagent"}
    assert {*table.partition} == {"iid"}


def test_what_was_not_measured_before_training_is_unknown(tmp_path):
    """A run that is evaluated for the first time after a resume."""
    for seed in (1, 2):
        folder = fake_run(tmp_path / "runs", "local", "iid", seed, (0, 1))
        rows = pd.read_csv(folder / "evaluations.csv")
        rows[rows.step > 0].to_csv(folder / "evaluations.csv", index=False)
    text_worlds.main(text_worlds.Args(runs=(str(tmp_path / "runs"),), out=str(tmp_path / "out")))
    table = pd.read_csv(tmp_path / "out_table.csv", comment="#")
    assert table.before.isna().all() and table.after.notna().all()


def test_names_of_partitions():
    assert text_worlds.name_partition("preference0.5") == "preference 0.5"
    assert text_worlds.name_partition("iid") == "iid"


def test_settings_are_chosen_by_training_success(tmp_path, capsys):
    """choose.py reads these runs as it does the others."""
    root = tmp_path / "runs"
    lines = []
    # Agents 0 and 1 are at 0.225 + 0.01 * seed at the end, 0.3 more with FedAgent
    for method in ("local", "fedagent"):
        fake_run(root, method, "low", 101, (0, 1))
        command = f"python prpo_babyai.py --aggregation {method} --seed 101"
        lines.append(f"{command} --exp-name {method}_low")
    (tmp_path / "tuning.txt").write_text("\n".join(lines))
    inputs = {"runs": (str(root),), "commands": str(tmp_path / "tuning.txt"), "seeds": (1,)}
    choose.main(choose.Args(criterion="final", **inputs))
    output = capsys.readouterr()
    assert "--aggregation fedagent --seed 1 --exp-name fedagent" in output.out
    scores = [line.split() for line in output.err.splitlines() if "_low" in line]
    assert sorted(words[-1] for words in scores) == ["1.2350", "1.5350"]


def test_a_run_without_a_training_return_is_left_out(tmp_path, capsys):
    root = tmp_path / "runs"
    fake_run(root, "local", "low", 101, (0, 1))
    damaged = fake_run(root, "local", "low", 102, (0, 1)) / "metrics.csv"
    damaged.write_text(damaged.read_text().replace("success", "x"))
    groups = plot.read_groups(plot.Args(runs=(str(root),)))
    assert [run.settings["seed"] for runs in groups.values() for run in runs] == [101]
    assert "there is none of return_last_100" in capsys.readouterr().err
