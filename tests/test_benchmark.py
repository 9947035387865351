"""benchmark/: what is made of runs, and that what is measured is what is said."""

import importlib
import json
import shutil
import sys

import numpy as np
import pandas as pd
import pytest
import tyro
from helpers import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmark"))
plot, throughput = importlib.import_module("plot"), importlib.import_module("throughput")
RESULTS = REPOSITORY / "benchmark" / "results"


def fake_run(root, seed, curve, evaluation=0.5, stamp=1, old=False, completed=True, **settings):
    """A run folder as the scripts leave it, of two agents whose training returns are `curve` and a little more.

    old: as earlier versions left it, without the columns seed and exp_name, and with other names of flags.
    """
    settings = {"exp_name": "pr", "seed": seed, "env_id": "Task", "env_ids": [], "learning_rate": 0.5} | settings
    settings |= {"communication_coef" if old else "kl_coef": settings.pop("kl_coef", 2.0)}
    folder = root / f"Task__{settings['exp_name']}__{seed}__{stamp}"
    folder.mkdir(parents=True)
    rows = [
        {"iteration": k + 1, "agent": i, "env_id": "Task", "timesteps": 100 * (k + 1)}
        | ({} if old else {"seed": seed, "exp_name": settings["exp_name"], "learning_rate": 0.1})
        | {"return_last_100": value + 0.02 * i}
        for k, value in enumerate(curve)
        for i in range(2)
    ]
    pd.DataFrame(rows).to_csv(folder / "metrics.csv", index=False)
    tests = [
        {"iteration": len(curve), "agent": i, "task": task, "timesteps": 100 * len(curve), "episodes": 9}
        | {"mean_return": evaluation + 0.1 * i + 0.5 * (task == "Other"), "ci95": 0.01}
        for i in range(2)
        for task in ("Other", "Task")
    ]
    pd.DataFrame(tests).to_csv(folder / "evaluations.csv", index=False)
    (folder / "config.json").write_text(json.dumps({"script": "prpo_minigrid"} | settings))
    summary = {"script": "prpo_minigrid", "completed": completed, "seed": seed, "settings": settings}
    summary |= {"versions": {"torch": "2"}, "timesteps_per_agent": 100 * len(curve)}
    (folder / "summary.json").write_text(json.dumps(summary | {"evaluation": {"group": evaluation, "agents": []}}))
    return folder


@pytest.fixture
def plotted(tmp_path, capsys):
    """plotted(**options): the three CSV files that plot.py makes of tmp_path/runs, and what it says."""

    def run(**options):
        plot.main(plot.Args(runs=(str(tmp_path / "runs"),), out=str(tmp_path / "x"), **options))
        assert (tmp_path / "x.png").stat().st_size > 5_000
        tables = (pd.read_csv(tmp_path / f"x{end}.csv", comment="#") for end in ("", "_runs", "_table"))
        return *tables, capsys.readouterr().err

    return run


def test_mean_and_interval_are_those_of_student(tmp_path, plotted):
    """By hand: t of two degrees of freedom is 4.30265, the deviation is a sample's. A single seed has no limits."""
    curves = {1: [0.0, 0.2], 2: [0.1, 0.6], 3: [0.5, 0.7]}
    for (seed, curve), evaluation in zip(curves.items(), (0.2, 0.4, 0.9), strict=True):
        fake_run(tmp_path / "runs", seed, curve, evaluation)
    fake_run(tmp_path / "runs", 7, [0.3, 0.4], exp_name="alone")
    drawn, runs, table, _ = plotted(points=2, threshold=0.61)
    deviation = np.sqrt(((0.2 - 0.5) ** 2 + (0.4 - 0.5) ** 2 + (0.9 - 0.5) ** 2) / 2)
    half = 4.302652729911275 * deviation / np.sqrt(3)
    alone, row = table.set_index("method").loc["alone"], table.set_index("method").loc["pr"]
    assert [row.evaluation, row.evaluation_ci_low, row.evaluation_ci_high] == pytest.approx(
        [0.5, 0.5 - half, 0.5 + half], 1e-5
    )
    assert alone.evaluation == 0.5 and np.isnan([alone.evaluation_ci_low, alone.evaluation_ci_high]).all()
    assert row.mean_training_return == pytest.approx(np.mean(list(curves.values())) + 0.01)
    points = drawn[drawn.method == "pr"]  # the curve is the mean over agents, 0.01 above the first agent's
    assert list(points.timesteps) == [100, 200] and list(points["mean"]) == pytest.approx([0.21, 0.51], 1e-5)
    half = 4.302652729911275 * np.std([0.0, 0.1, 0.5], ddof=1) / np.sqrt(3)
    assert list(points.ci_low)[0] == pytest.approx(0.21 - half, 1e-5)
    assert list(points.ci_high)[0] == pytest.approx(0.21 + half, 1e-5)
    # Steps to 0.61: what reaches it exactly counts, and a mean over the lucky seeds alone would flatter
    assert list(runs[runs.method == "pr"]["steps_to_0.61"].fillna(-1)) == [-1, 200, 200]
    assert row["steps_to_0.61"] == "not reached" and row.steps_per_seed == "- 200 200" and row.seeds == "1 2 3"


def test_steps_to_the_threshold_have_an_interval_once_all_seeds_are_there(tmp_path, plotted):
    """The first time counts, and the mean is over seeds."""
    fake_run(tmp_path / "runs", 1, [0.9, 0.1, 0.9])
    fake_run(tmp_path / "runs", 2, [0.1, 0.1, 0.9])
    *_, table, _ = plotted()
    assert float(table["steps_to_0.8"][0]) == 200 and table.steps_per_seed[0] == "100 300"
    half = 12.706204736432095 * np.std([100, 300], ddof=1) / np.sqrt(2)
    assert float(table["steps_to_0.8_ci_low"][0]) == pytest.approx(200 - half, abs=1)


def test_of_repeated_runs_the_newest_counts(tmp_path, plotted):
    """With a warning; other settings under the same name end with one line; unfinished runs are left out."""
    newest = fake_run(tmp_path / "runs", 1, [0.1, 0.2], evaluation=0.7, stamp=10)  # ten is newer than nine
    older = fake_run(tmp_path / "runs", 1, [0.1, 0.2], evaluation=0.2, stamp=9, kl_coef=5.0)
    fake_run(tmp_path / "runs", 2, [0.1, 0.2], evaluation=0.9, stamp=11, completed=False)
    _, runs, _, said = plotted()
    assert list(runs.evaluation) == [0.7] and f"{older}: left out, {newest} has the same name and seed" in said
    assert "cut off" in said
    fake_run(tmp_path / "runs", 3, [0.1, 0.2], kl_coef=3.0)
    with pytest.raises(SystemExit, match="the same name as .*, but other settings"):
        plotted()


def test_all_runs_are_one_table(tmp_path):
    """Metrics, evaluations on the own task and settings; runs of earlier versions too."""
    fake_run(tmp_path / "a", 1, [0.1, 0.2], evaluation=0.7)
    fake_run(tmp_path / "b", 2, [0.3, 0.4], evaluation=0.5, old=True, env_ids=["Task", "Task"])
    (fake_run(tmp_path / "b", 3, [0.6], old=True) / "summary.json").unlink()  # it has not ended
    table = plot.load_runs(tmp_path / "a", tmp_path / "b").set_index(["seed", "iteration", "agent"])
    assert len(table) == 4 + 4 + 2 and table.index.is_unique and set(table.exp_name) == {"pr"}
    assert table.evaluation[1, 2, 1] == pytest.approx(0.8) and table.evaluation[2, 2, 0] == pytest.approx(0.5)
    assert table.evaluation[:, 1, :].isna().sum() == 4  # of the iterations before the last ones
    assert set(table.kl_coef) == {2.0} and set(table.learning_rate_setting) == {0.5}
    assert table.learning_rate.groupby("seed").max()[1] == 0.1  # the metric is another thing than the setting
    assert table.env_ids[2, 1, 0] == "Task Task" and table.completed.groupby("seed").all().tolist() == [
        True,
        True,
        False,
    ]
    assert plot.load_runs(tmp_path / "nothing").empty


def test_methods_are_chosen_and_ordered(tmp_path, plotted):
    """--methods takes patterns, in this order."""
    for name in ("pr-a", "pr-b", "isolated"):
        fake_run(tmp_path / "runs", 1, [0.1, 0.2], exp_name=name)
    *_, table, _ = plotted(methods=("isolated", "pr-b"))
    assert list(table.method) == ["isolated", "pr-b"]


@pytest.mark.parametrize("name", sorted(path.stem for path in RESULTS.glob("*.png")))
def test_committed_figures_come_from_committed_data(name, tmp_path):
    """Every figure is drawn again from the curves beside it, and a table from the rows per run where these are kept."""
    import matplotlib.pyplot as plt

    for path in RESULTS.glob(f"{name}*.csv"):
        shutil.copy(path, tmp_path)
    before = {path: path.read_text() for path in tmp_path.glob("*_table.csv")}
    plot.main(plot.Args(out=str(tmp_path / name), from_csv=True))
    drawn, committed = (plt.imread(folder / f"{name}.png") for folder in (tmp_path, RESULTS))
    assert drawn.shape == committed.shape and np.abs(drawn - committed).mean() < 0.01
    assert {path: path.read_text() for path in tmp_path.glob("*_table.csv")} == before


@pytest.mark.parametrize("env_id", ["MiniGrid-FourRooms-v0", "BeamRiderNoFrameskip-v4"])
def test_speed_is_measured_with_communication_rounds(env_id):
    """Before the first round nobody is heard: agents that communicate have several in a run."""
    args = throughput.Args(env_id=env_id)
    commands = {**throughput.contenders(args), **throughput.scaling_contenders(args)}.values()
    script = importlib.import_module(throughput.script(env_id).removesuffix(".py"))
    runs = [tyro.cli(script.Args, args=argv) for name, *argv in commands if name == throughput.script(env_id)]
    talking = [run for run in runs if run.communicator != "identity" and run.num_agents > 1]
    assert len(talking) > 8
    for run in talking:
        assert run.total_timesteps // (run.num_envs * run.num_steps) >= 3 * run.local_updates
