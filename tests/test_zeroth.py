"""benchmark/zeroth.py: what it makes of the runs of s2zpo_mujoco.py."""

import importlib
import sys

import numpy as np
import pandas as pd
import pytest
from fabricated import write_run
from helpers import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmark"))
runs = importlib.import_module("runs")
zeroth = importlib.import_module("zeroth")


def zeroth_run(root, seed, mu, returns, evaluation=0.0, stamp=1, **changes):
    """A finished run as s2zpo_mujoco.py leaves it, with the returns of its iterations."""
    settings = {"env_id": "Task-v5", "algorithm": "par", "num_agents": 4, "mu": mu, "eta": 0.1}
    settings |= {"seed": seed, "exp_name": f"par_{mu}", "horizon": 1000} | changes
    numbers = range(1, len(returns) + 1)
    metrics = pd.DataFrame({"iteration": numbers, "agent": 0, "episodic_return": returns})
    metrics = metrics.assign(trajectories=10.0, bits=20.0, return_last_100=0.0)
    summary = {"parameters": 7, "iterations": len(returns), "trajectories": 10}
    summary |= {"communication_bits": 20, "statistics_bits": 1}
    summary["evaluation"] = {"group": evaluation}
    return write_run(root, "s2zpo_mujoco", settings, metrics, stamp=stamp, **summary)


def read_rows(root):
    """The runs below a folder, and their rows."""
    whole = runs.read_runs((str(root),))
    return whole, zeroth.make_rows(whole)


def test_the_best_cell_of_a_seed_is_chosen_by_the_other_seeds(tmp_path):
    """Seed 1 is lucky with 0.2, which is not best for the others, and does not profit from it."""
    returns = {0.1: [1.0, 5.0, 6.0], 0.2: [90.0, 2.0, 1.0]}  # mu -> of each seed
    for mu, of_seeds in returns.items():
        for seed, value in enumerate(of_seeds, start=1):
            zeroth_run(tmp_path, seed, mu, [value - 1, value + 1])
    whole, rows = read_rows(tmp_path)
    chosen = {1: (0.1, 0.1), 2: (0.2, 0.1), 3: (0.2, 0.1)}
    assert zeroth.choose_cells(rows, "over_the_run") == chosen
    best = zeroth.take_best(rows, "over_the_run")
    assert best.over_the_run.tolist() == [1, 2, 1]
    (row,) = zeroth.tabulate(rows)
    assert row["cells, seeds"] == "2, 3"
    assert row["over the run, best cell"].startswith("1 [")
    assert row["over the run, grid"].startswith("18 [")  # of 91 / 2, 7 / 2 and 7 / 2
    assert row["over the run, its µ, η"] == "0.2, 0.1"
    curve = zeroth.make_curves(rows, whole)
    assert curve["mean"].tolist() == pytest.approx([1 / 3, 7 / 3])
    assert curve.bits.tolist() == [20, 20]


def test_a_run_that_has_diverged_has_no_score(tmp_path):
    """No mean over its grid has one, and no other seed chooses its cell."""
    for mu, of_seeds in {0.1: [1.0, 5.0, 6.0], 0.2: [90.0, 92.0, 91.0]}.items():
        for seed, value in enumerate(of_seeds, start=1):
            has_diverged = (mu, seed) == (0.2, 1)
            last = np.nan if has_diverged else value
            evaluation = None if has_diverged else value
            zeroth_run(tmp_path, seed, mu, [value, last], evaluation)
    _, rows = read_rows(tmp_path)
    for column in ("over_the_run", "evaluation"):
        chosen = {1: (0.2, 0.1), 2: (0.1, 0.1), 3: (0.1, 0.1)}
        assert zeroth.choose_cells(rows, column) == chosen
    (row,) = zeroth.tabulate(rows)
    assert row["evaluation, grid"] == row["over the run, grid"] == "nan [nan, nan]"


def test_a_grid_may_have_one_cell_and_a_seed_that_has_diverged(tmp_path):
    for seed, evaluation in enumerate([1.0, 2.0, None], start=1):
        zeroth_run(tmp_path, seed, 0.1, [evaluation or np.nan], evaluation)
    _, rows = read_rows(tmp_path)
    assert zeroth.choose_cells(rows, "evaluation") == dict.fromkeys([1, 2, 3], (0.1, 0.1))
    assert zeroth.tabulate(rows)[0]["evaluation, best cell"] == "nan [nan, nan]"


def test_the_cell_that_is_named_is_one_that_seeds_chose(tmp_path, monkeypatch):
    """The most frequent pair, not the most frequent mu and the most frequent eta."""
    for seed in range(1, 6):
        zeroth_run(tmp_path, seed, 0.1, [1.0])
    _, rows = read_rows(tmp_path)
    columns = {"mu": [0.1, 0.1, 0.1, 0.2, 0.2], "eta": [0.3, 0.3, 0.4, 0.4, 0.5]}
    best = rows.assign(**columns)
    monkeypatch.setattr(zeroth, "take_best", lambda *_: best)
    assert zeroth.tabulate(rows)[0]["over the run, its µ, η"] == "0.1, 0.3"


def test_a_seed_without_all_cells_is_left_out(tmp_path, capsys):
    """Where these are most, maybe one run of another cell lies among them."""
    for mu in (0.1, 0.2):
        for seed in (1, 2):
            zeroth_run(tmp_path, seed, mu, [100.0])
    zeroth_run(tmp_path, 3, 0.2, [-500.0])
    _, rows = read_rows(tmp_path)
    assert capsys.readouterr().err == "Task-v5, par: seed 3 has 1 of 2 cells, left out\n"
    assert rows.over_the_run.tolist() == [100] * 4
    zeroth_run(tmp_path, 4, 0.3, [1.0])
    line = "^Task-v5, par: most of 4 seeds have not all of 3 cells$"
    with pytest.raises(SystemExit, match=line):
        read_rows(tmp_path)


def test_runs_with_other_settings_are_not_mixed(tmp_path):
    """Nor two runs of one cell and seed under two names."""
    zeroth_run(tmp_path, 1, 0.1, [1.0])
    zeroth_run(tmp_path, 1, 0.1, [2.0], stamp=2)
    assert read_rows(tmp_path)[1].over_the_run.tolist() == [2]
    again = zeroth_run(tmp_path, 1, 0.1, [2.0], exp_name="again")
    with pytest.raises(SystemExit, match="^two runs are .*; give those of one task and length$"):
        read_rows(tmp_path)
    (again / "summary.json").unlink()
    zeroth_run(tmp_path, 2, 0.1, [3.0], exp_name="other", num_agents=8)
    with pytest.raises(SystemExit, match="^Task-v5, par has runs with --num-agents 8 and 4$"):
        read_rows(tmp_path)


def test_runs_without_evaluation_have_returns_only(tmp_path):
    zeroth_run(tmp_path, 1, 0.1, [2.0, 4.0], evaluation=None)
    out = str(tmp_path / "x")
    zeroth.main(zeroth.Args(runs=(str(tmp_path),), out=out))
    (row,) = zeroth.tabulate(pd.read_csv(f"{out}_runs.csv", comment="#"))
    assert row["over the run, best cell"] == "3 (1 seed)"
    assert not [name for name in row if name.startswith("evaluation")]
