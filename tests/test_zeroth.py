"""benchmark/zeroth.py: what it makes of the runs of s2zpo_mujoco.py."""

import importlib
import json
import sys

import pandas as pd
import pytest
from helpers import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmark"))
plot = importlib.import_module("plot")
zeroth = importlib.import_module("zeroth")


def fake_run(root, seed, mu, returns, evaluation=0.0, **changes):
    """A finished run as s2zpo_mujoco.py leaves it, with the returns of its iterations."""
    settings = {"env_id": "Task-v5", "algorithm": "par", "num_agents": 4, "num_pairs": 8}
    settings |= {"mu": mu, "eta": 0.1, "seed": seed, "exp_name": f"par_{mu}", "horizon": 1000}
    settings |= changes
    folder = root / f"Task-v5__par_{mu}__{seed}__{len(list(root.glob('*')))}"
    folder.mkdir(parents=True)
    numbers = range(1, len(returns) + 1)
    metrics = pd.DataFrame({"iteration": numbers, "episodic_return": returns})
    metrics.assign(trajectories=10.0, bits=20.0).to_csv(folder / "metrics.csv", index=False)
    summary = {
        "script": "s2zpo_mujoco",
        "completed": True,
        "settings": settings,
        "seed": seed,
        "parameters": 7,
        "iterations": len(returns),
        "trajectories": 10,
        "communication_bits": 20,
        "statistics_bits": 1,
        "versions": {"torch": "2"},
        "evaluation": {"group": evaluation},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_the_best_cell_of_a_seed_is_chosen_by_the_other_seeds(tmp_path):
    """Seed 1 is lucky with 0.2, which is not best for the others, and does not profit from it."""
    returns = {0.1: [1.0, 5.0, 6.0], 0.2: [90.0, 2.0, 1.0]}  # mu -> of each seed
    for mu, of_seeds in returns.items():
        for seed, value in enumerate(of_seeds, start=1):
            fake_run(tmp_path, seed, mu, [value - 1, value + 1])
    runs, curves, comments = zeroth.read_runs((str(tmp_path),))
    assert zeroth.choose_cells(runs, "over_the_run").to_dict() == {
        1: (0.1, 0.1),
        2: (0.2, 0.1),
        3: (0.2, 0.1),
    }
    row = zeroth.make_table(runs).iloc[0]
    assert (row.cells, row.seeds, row.over_the_run_cell) == (2, 3, "0.2 0.1")
    assert row.over_the_run_best == pytest.approx((1 + 2 + 1) / 3)
    assert row.over_the_run_grid == pytest.approx((91 + 7 + 7) / 6)
    curve = zeroth.make_curves(runs, curves)
    assert curve["mean"].tolist() == pytest.approx([1 / 3, 7 / 3])
    (command,) = [line for line in comments.splitlines() if "s2zpo_mujoco.py" in line]
    assert "--horizon 1000" in command and command.endswith("(--seed 1 2 3)")
    assert "--mu" not in command and "--seed 1 " not in command.partition("(")[0]


def test_the_cell_that_is_named_is_one_that_seeds_chose(tmp_path, monkeypatch):
    """The most frequent pair, not the most frequent mu and the most frequent eta."""
    for seed in range(1, 6):
        fake_run(tmp_path, seed, 0.1, [1.0])
    runs, _, _ = zeroth.read_runs((str(tmp_path),))
    columns = {"mu": [0.1, 0.1, 0.1, 0.2, 0.2], "eta": [0.3, 0.3, 0.4, 0.4, 0.5]}
    best = runs.assign(**columns)
    monkeypatch.setattr(zeroth, "take_best", lambda *_: best)
    assert zeroth.make_table(runs).iloc[0].over_the_run_cell == "0.1 0.3"


def test_a_seed_without_all_cells_is_left_out(tmp_path, capsys):
    for mu in (0.1, 0.2):
        for seed in (1, 2):
            fake_run(tmp_path, seed, mu, [100.0])
    fake_run(tmp_path, 3, 0.2, [-500.0])
    runs, _, comments = zeroth.read_runs((str(tmp_path),))
    assert capsys.readouterr().err == "Task-v5, par: seed 3 has 1 of 2 cells, left out\n"
    row = zeroth.make_table(runs).iloc[0]
    assert (row.seeds, row.over_the_run_grid) == (2, 100)
    assert "(--seed 1 2)" in comments


def test_seeds_that_share_no_cell_have_no_table(tmp_path):
    fake_run(tmp_path, 1, 0.1, [1.0])
    fake_run(tmp_path, 2, 0.2, [1.0])
    line = "^Task-v5, par: most of 2 seeds have not all of 2 cells$"
    with pytest.raises(SystemExit, match=line):
        zeroth.read_runs((str(tmp_path),))


def test_runs_with_other_settings_are_not_mixed(tmp_path):
    """Of repeated runs the newest counts, so others with the same mu and eta would replace them."""
    fake_run(tmp_path, 1, 0.1, [1.0])
    fake_run(tmp_path, 1, 0.1, [2.0], exp_name="again")
    runs, _, _ = zeroth.read_runs((str(tmp_path),))
    assert runs.over_the_run.tolist() == [2]
    fake_run(tmp_path, 1, 0.1, [3.0], num_agents=8)
    line = f"--runs {tmp_path}: Task-v5, par has runs with --num-agents 4 and 8"
    with pytest.raises(SystemExit, match=f"^{line}$"):
        zeroth.read_runs((str(tmp_path),))


def test_runs_without_evaluation_have_returns_only(tmp_path):
    fake_run(tmp_path, 1, 0.1, [3.0], evaluation=None)
    table = zeroth.make_table(zeroth.read_runs((str(tmp_path),))[0])
    assert table.over_the_run_best.tolist() == [3]
    assert not [name for name in table if name.startswith("evaluation")]


def test_other_tools_leave_these_runs_to_zeroth(tmp_path, capsys):
    folder = fake_run(tmp_path, 1, 0.1, [3.0])
    assert plot.read_run(folder) is None
    assert "for benchmark/zeroth.py, left out" in capsys.readouterr().err
