"""benchmark/: tables and figures of runs, and that a measurement is of what its name says."""

import importlib
import itertools
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
import tyro
from helpers import REPOSITORY, refusal

sys.path.insert(0, str(REPOSITORY / "benchmark"))
arguments = importlib.import_module("arguments")
bound = importlib.import_module("bound")
choose = importlib.import_module("choose")
conditions = importlib.import_module("conditions")
pool = importlib.import_module("pool")
crowd = importlib.import_module("crowd")
methods = importlib.import_module("methods")
plot = importlib.import_module("plot")
table = importlib.import_module("table")
throughput = importlib.import_module("throughput")
text_worlds = importlib.import_module("text_worlds")
zeroth = importlib.import_module("zeroth")
RESULTS = REPOSITORY / "benchmark" / "results"


def fake_run(root, seed, curve, evaluation=0.5, stamp=1, old=False, completed=True, **settings):
    """A run folder as the scripts leave it, of two agents whose training returns are `curve` and a
    little more.

    old: as earlier versions left it, without the columns seed and exp_name, and with other names of
    flags.
    """
    defaults = {"env_id": "Task", "env_ids": [], "learning_rate": 0.5}
    settings = {"exp_name": "pr", "seed": seed} | defaults | settings
    settings |= {"communication_coef" if old else "kl_coef": settings.pop("kl_coef", 2.0)}
    folder = root / f"Task__{settings['exp_name']}__{seed}__{stamp}"
    folder.mkdir(parents=True)
    tasks = settings["env_ids"] or ["Task", "Task"]
    rows = []
    for k, value in enumerate(curve):
        for agent, task in enumerate(tasks):
            row = {"iteration": k + 1, "agent": agent, "env_id": task, "timesteps": 100 * (k + 1)}
            if not old:
                row |= {"seed": seed, "exp_name": settings["exp_name"], "learning_rate": 0.1}
            rows.append(row | {"return_last_100": value + 0.02 * agent, "tv_update": 0.1 * value})
    pd.DataFrame(rows).to_csv(folder / "metrics.csv", index=False)
    last = {"iteration": len(curve), "timesteps": 100 * len(curve), "episodes": 9, "ci95": 0.01}
    evaluations = []
    cells = []  # of summary.json
    for agent in range(2):
        means = {task: evaluation + 0.1 * agent for task in tasks}
        means = {"Other": evaluation + 0.1 * agent + 0.5} | means
        for task, mean in means.items():
            evaluations.append({"agent": agent, "task": task, "mean_return": mean} | last)
        cells.append({task: {"mean": mean} for task, mean in means.items()})
    columns = ["iteration", "agent", "task", "timesteps", "episodes", "mean_return", "ci95"]
    pd.DataFrame(evaluations)[columns].to_csv(folder / "evaluations.csv", index=False)
    (folder / "config.json").write_text(json.dumps({"script": "prpo_minigrid"} | settings))
    summary = {
        "script": "prpo_minigrid",
        "completed": completed,
        "seed": seed,
        "settings": settings,
        "versions": {"torch": "2"},
        "timesteps_per_agent": 100 * len(curve),
        "evaluation": {"group": evaluation, "agents": cells},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.fixture
def plotted(tmp_path, capsys):
    """plotted(**options): the three CSV files that plot.py makes of tmp_path/runs, and what it
    says.
    """

    def run(**options):
        plot.main(plot.Args(runs=(str(tmp_path / "runs"),), out=str(tmp_path / "x"), **options))
        assert (tmp_path / "x.png").stat().st_size > 5_000
        tables = (
            pd.read_csv(tmp_path / f"x{end}.csv", comment="#") for end in ("", "_runs", "_table")
        )
        return *tables, capsys.readouterr().err

    return run


def test_mean_and_interval_are_those_of_student(tmp_path, plotted):
    """By hand: t of two degrees of freedom is 4.30265, the deviation is a sample's. A single seed
    has no limits.
    """
    curves = {1: [0.0, 0.2], 2: [0.1, 0.6], 3: [0.5, 0.7]}
    for (seed, curve), evaluation in zip(curves.items(), (0.2, 0.4, 0.9), strict=True):
        fake_run(tmp_path / "runs", seed, curve, evaluation)
    fake_run(tmp_path / "runs", 7, [0.3, 0.4], exp_name="alone")
    drawn, runs, results, _ = plotted(points=2, threshold=0.61)
    deviation = np.sqrt(((0.2 - 0.5) ** 2 + (0.4 - 0.5) ** 2 + (0.9 - 0.5) ** 2) / 2)
    half = 4.302652729911275 * deviation / np.sqrt(3)
    alone, row = (results.set_index("method").loc[name] for name in ("alone", "pr"))
    assert [row.evaluation, row.evaluation_ci_low, row.evaluation_ci_high] == pytest.approx(
        [0.5, 0.5 - half, 0.5 + half], 1e-5
    )
    assert alone.evaluation == 0.5
    assert np.isnan([alone.evaluation_ci_low, alone.evaluation_ci_high]).all()
    assert row.mean_training_return == pytest.approx(np.mean(list(curves.values())) + 0.01)
    points = drawn[
        drawn.method == "pr"
    ]  # the curve is the mean over agents, 0.01 above the first agent's
    assert list(points.timesteps) == [100, 200]
    assert list(points["mean"]) == pytest.approx([0.21, 0.51], 1e-5)
    half = 4.302652729911275 * np.std([0.0, 0.1, 0.5], ddof=1) / np.sqrt(3)
    assert list(points.ci_low)[0] == pytest.approx(0.21 - half, 1e-5)
    assert list(points.ci_high)[0] == pytest.approx(0.21 + half, 1e-5)
    # Steps to 0.61: what reaches it exactly counts, and a mean over the lucky seeds alone would
    # flatter
    assert list(runs[runs.method == "pr"]["steps_to_0.61"].fillna(-1)) == [-1, 200, 200]
    assert row["steps_to_0.61"] == "not reached"
    assert row.steps_per_seed == "- 200 200"
    assert row.seeds == "1 2 3"


def test_steps_to_the_threshold_have_an_interval_once_all_seeds_are_there(tmp_path, plotted):
    """The first time counts, and the mean is over seeds."""
    fake_run(tmp_path / "runs", 1, [0.9, 0.1, 0.9])
    fake_run(tmp_path / "runs", 2, [0.1, 0.1, 0.9])
    *_, results, _ = plotted()
    assert float(results["steps_to_0.8"][0]) == 200
    assert results.steps_per_seed[0] == "100 300"
    half = 12.706204736432095 * np.std([100, 300], ddof=1) / np.sqrt(2)
    assert float(results["steps_to_0.8_ci_low"][0]) == pytest.approx(200 - half, abs=1)


def test_a_search_is_drawn_by_the_settings_that_are_tried(tmp_path, plotted):
    """Of three settings, two seeds each: by hand, the mean of one, of the better of each pair, and
    the best.
    """
    for seed, scores in {1: (0.1, 0.4, 0.7), 2: (0.3, 0.3, 0.6)}.items():
        for setting, score in zip("abc", scores, strict=True):
            fake_run(
                tmp_path / "runs",
                seed,
                [0.2, 0.3],
                score,
                exp_name=f"pr_{setting}",
                kl_coef=ord(setting),
            )
    fake_run(tmp_path / "runs", 1, [0.2, 0.3], 0.5, exp_name="alone_a")
    drawn = plotted(search=True)[0].set_index(["method", "settings"])
    assert drawn["mean"].tolist() == pytest.approx(
        [0.5, 0.4, (0.4 + 0.7 + 0.7 + 0.3 + 0.6 + 0.6) / 6, 0.65]
    )
    deviation = np.sqrt(np.mean([np.var([0.1, 0.4, 0.7]), np.var([0.3, 0.3, 0.6])]))
    assert drawn.ci_low["pr", 1] == pytest.approx(0.4 - deviation)
    assert drawn.ci_high["pr", 1] == pytest.approx(0.4 + deviation)
    assert drawn.ci_low["pr", 3] == pytest.approx(0.65)
    fake_run(tmp_path / "runs", 2, [0.2, 0.3], 0.5, exp_name="pr_d", kl_coef=7)
    with pytest.raises(SystemExit, match="not every seed has tried the same settings"):
        plotted(search=True)
    folder = fake_run(tmp_path / "runs", 1, [0.2, 0.3], exp_name="pr_d", kl_coef=7)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(
        json.dumps(summary | {"evaluation": {"group": None, "agents": []}})
    )
    with pytest.raises(SystemExit, match="has no evaluation"):
        plotted(search=True)


def test_of_repeated_runs_the_newest_counts(tmp_path, plotted):
    """With a warning; other settings under the same name end with one line; unfinished runs are
    left out.
    """
    # Ten is newer than nine
    newest = fake_run(tmp_path / "runs", 1, [0.1, 0.2], evaluation=0.7, stamp=10)
    older = fake_run(tmp_path / "runs", 1, [0.1, 0.2], evaluation=0.2, stamp=9, kl_coef=5.0)
    fake_run(tmp_path / "runs", 2, [0.1, 0.2], evaluation=0.9, stamp=11, completed=False)
    _, runs, _, shown = plotted()
    assert list(runs.evaluation) == [0.7]
    assert f"{older}: left out, {newest} has the same name and seed" in shown
    assert "cut off" in shown
    # --save-every decides where environments start anew
    for different in ({"kl_coef": 3.0}, {"save_every": 16}):
        other = fake_run(tmp_path / "runs", 3, [0.1, 0.2], **{"save_every": 128} | different)
        same = fake_run(tmp_path / "runs", 4, [0.1, 0.2], save_every=128)
        with pytest.raises(SystemExit, match="the same name as .*, but other settings"):
            plotted()
        shutil.rmtree(other)
        shutil.rmtree(same)
    # Early runs recorded --device auto, later ones what it stands for
    auto = fake_run(tmp_path / "runs", 3, [0.1, 0.2], device="auto")
    fake_run(tmp_path / "runs", 4, [0.1, 0.2], device="cpu")
    summary = json.loads((auto / "summary.json").read_text())
    (auto / "summary.json").write_text(json.dumps(summary | {"device": "cpu"}))
    assert list(plotted()[1].seed) == [1, 3, 4]
    (auto / "summary.json").write_text(json.dumps(summary | {"device": "cuda"}))
    with pytest.raises(SystemExit, match="the same name as .*, but other settings"):
        plotted()


def test_a_curve_reaches_as_far_as_every_run(tmp_path, plotted):
    """It begins where all agents of all seeds have a return, and ends with the shortest run; seeds
    are in order.

    A run that did not end and one without an episode are left out, with a line each.
    """
    late = fake_run(tmp_path / "runs", 2, [0.1, 0.2, 0.3], stamp=1)
    metrics = pd.read_csv(late / "metrics.csv")
    metrics.loc[1, "return_last_100"] = np.nan  # the second agent has ended no episode yet
    metrics.to_csv(late / "metrics.csv", index=False)
    fake_run(tmp_path / "runs", 1, [0.5, 0.6, 0.7, 0.8], stamp=2)  # the newer one
    fake_run(tmp_path / "runs", 1, [0.1] * 7, exp_name="longer")
    unfinished = fake_run(tmp_path / "runs", 3, [0.9, 0.9])
    (unfinished / "summary.json").unlink()
    empty = fake_run(tmp_path / "runs", 4, [np.nan, np.nan])
    drawn, runs, results, shown = plotted(points=8)
    points = drawn[drawn.method == "pr"]
    assert points.timesteps.tolist() == [262]  # of 88, 175, 262, 350, ... up to 700
    late_value = 0.2 + 0.1 * 0.62 + 0.01
    early_value = 0.6 + 0.1 * 0.62 + 0.01
    assert points["mean"].tolist() == pytest.approx([(late_value + early_value) / 2])
    runs = runs[runs.method == "pr"].set_index("seed")
    assert runs.index.tolist() == [1, 2]
    assert results.set_index("method").seeds["pr"] == "1 2"
    # Of the iterations in which both agents have a return
    assert runs.mean_training_return[2] == pytest.approx(0.26)
    assert f"{unfinished}: not finished, left out" in shown
    assert f"{empty}: cut off or without a single episode, left out" in shown


def test_commands_in_files_have_every_setting(tmp_path):
    """Switches with their negation, lists, and nothing for what is empty; seeds stand behind,
    versions below.
    """
    settings = {
        "anneal_lr": False,
        "norm_adv": True,
        "hidden_sizes": [64, 32],
        "wandb_entity": None,
        "adapter": "",
    }
    for seed in (1, 2):
        fake_run(tmp_path, seed, [0.1], **settings)
    lines = plot.header(plot.read_groups(plot.Args(runs=(str(tmp_path),)))).splitlines()
    command = "python prpo_minigrid.py --exp-name pr --env-id Task --learning-rate 0.5"
    command += " --no-anneal-lr --norm-adv"
    assert lines == [
        f"# {command} --hidden-sizes 64 32 --kl-coef 2.0  (--seed 1 2)",
        "# torch 2",
        "# environments: none",
    ]


def test_all_runs_are_one_table(tmp_path):
    """Metrics, evaluations on the own task and settings; runs of earlier versions too."""
    fake_run(tmp_path / "a", 1, [0.1, 0.2], evaluation=0.7)
    fake_run(tmp_path / "b", 2, [0.3, 0.4], evaluation=0.5, old=True, env_ids=["Task", "Task"])
    (fake_run(tmp_path / "b", 3, [0.6], old=True) / "summary.json").unlink()  # it has not ended
    runs = plot.load_runs(tmp_path / "a", tmp_path / "b").set_index(["seed", "iteration", "agent"])
    assert len(runs) == 4 + 4 + 2
    assert runs.index.is_unique
    assert set(runs.exp_name) == {"pr"}
    assert runs.evaluation[1, 2, 1] == pytest.approx(0.8)
    assert runs.evaluation[2, 2, 0] == pytest.approx(0.5)
    assert runs.evaluation[:, 1, :].isna().sum() == 4  # of the iterations before the last ones
    assert set(runs.kl_coef) == {2.0}
    assert set(runs.learning_rate_setting) == {0.5}
    # The metric is another thing than the setting
    assert runs.learning_rate.groupby("seed").max()[1] == 0.1
    assert runs.env_ids[2, 1, 0] == "Task Task"
    assert runs.completed.groupby("seed").all().tolist() == [True, True, False]
    assert plot.load_runs(tmp_path / "nothing").empty


def test_one_line_for_notebooks_reads_all_runs(tmp_path, monkeypatch):
    """The line in plot.py's docstring, as it stands there: whose row it is needs no reading of
    folder names.
    """
    for seed in (1, 2):
        fake_run(tmp_path / "runs" / "deeper", seed, [0.1, 0.2])
    monkeypatch.chdir(tmp_path)
    lines = re.findall(r"^    (import pandas.*|runs = .*)$", plot.__doc__, re.M)
    names = {}
    exec("\n".join(lines), names)
    runs = names["runs"].set_index(["exp_name", "seed", "agent", "timesteps"])
    assert len(lines) == 2
    assert len(runs) == 8
    assert runs.index.is_unique
    assert runs.return_last_100["pr", 2, 1, 200] == pytest.approx(0.22)


@pytest.fixture
def tabled(tmp_path, capsys):
    """tabled(**options): the table of tmp_path/runs, as Markdown's cells by row and as CSV, by
    method.
    """

    def run(**options):
        table.main(
            table.Args(runs=(str(tmp_path / "runs"),), csv=str(tmp_path / "t.csv"), **options)
        )
        head, _, *rows = (
            [cell.strip() for cell in line.split("|")[1:-1]]
            for line in capsys.readouterr().out.splitlines()
        )
        shown = [dict(zip(head, row, strict=True)) for row in rows]
        return {row["method"]: row for row in shown}, pd.read_csv(
            tmp_path / "t.csv", comment="#"
        ).set_index("method")

    return run


def test_table_of_methods_takes_a_seed_as_one_sample(tmp_path, tabled):
    """Two agents of a run, on one task or two, are no two samples: all figures by hand from a
    number per seed.
    """
    for seed, value in enumerate((0.2, 0.5, 0.6, 0.75), start=1):
        fake_run(tmp_path / "runs", seed, [0.1], evaluation=value)
        fake_run(tmp_path / "runs", seed, [0.1], evaluation=0.5, exp_name="isolated")
    shown, exact = tabled(threshold=0.7)
    assert exact.Task["pr"] == pytest.approx(
        (0.5 + 0.6) / 2 + 0.05
    )  # the agents' mean is 0.05 above the first's
    limits = table.interquartile_mean([[0.25], [0.55], [0.65], [0.8]])[1:]
    assert list(exact[["Task_ci_low", "Task_ci_high"]].loc["pr"]) == pytest.approx(limits)
    assert exact.Task["isolated"] == exact.Task_ci_low["isolated"] == 0.55
    assert exact["better than isolated"]["pr"] == pytest.approx((0 + 0.5 + 1 + 1) / 4)
    assert shown["isolated"]["better than isolated"] == ""
    assert "all tasks" not in shown["pr"]
    assert exact.success["pr"] == 0.25  # every agent has to reach it
    assert tabled(threshold=0.7, success="max")[1].success["pr"] == 0.5  # 0.6 + 0.1 does exactly
    assert exact.success_ci_low["pr"] == pytest.approx(
        0.0456, abs=1e-4
    )  # of one in four, not of two in eight
    assert shown["pr"]["success"] == "0.25 [0.05, 0.70]"
    assert shown["pr"]["seeds"] == "1 2 3 4"
    assert "# python prpo_minigrid.py --exp-name pr" in (tmp_path / "t.csv").read_text()
    shown, exact = tabled(measure="final", methods=("pr",))
    assert exact.Task["pr"] == pytest.approx(0.11)
    assert list(shown) == ["pr"]
    fake_run(tmp_path / "runs", 1, [0.1, 0.2, 0.6], exp_name="longer")
    assert tabled(measure="auc", methods=("longer",))[1].Task["longer"] == pytest.approx(0.31)
    assert tabled(measure="final", methods=("longer",))[1].Task["longer"] == pytest.approx(0.61)


def test_table_has_a_column_per_task(tmp_path, tabled):
    """Agents with different tasks: each on its own; and all tasks together, whose seeds are
    resampled together.
    """
    for seed, value in enumerate((0.1, 0.3, 0.5, 0.9), start=1):
        for name in ("isolated", "pr"):
            fake_run(
                tmp_path / "runs",
                seed,
                [0.1],
                evaluation=value,
                exp_name=name,
                env_ids=["Easy", "Hard"],
            )
    _, exact = tabled()
    assert exact.Easy["pr"] == pytest.approx(0.4)
    assert exact.Hard["pr"] == pytest.approx(0.5)
    assert exact["all tasks"]["pr"] == pytest.approx((0.3 + 0.4 + 0.5 + 0.6) / 4)
    whole, apart = (
        table.interquartile_mean(np.array([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6], [0.9, 1]]), p)
        for p in (1, 0)
    )
    limits = exact[["all tasks_ci_low", "all tasks_ci_high"]].loc["pr"]
    assert list(limits) == pytest.approx(whole[1:])
    assert list(limits) != pytest.approx(apart[1:])
    # one of four
    assert exact.success["pr"] == 0.25
    assert exact.success_ci_low["pr"] == pytest.approx(0.0456, abs=1e-4)
    fake_run(tmp_path / "runs", 1, [0.1], env_ids=["Easy", "Easy"], exp_name="pr", stamp=2)
    with pytest.raises(SystemExit, match="one task in runs of several kinds"):
        tabled()


def test_tasks_of_separate_runs_are_strata(tmp_path, tabled):
    """They are resampled on their own; a seed without all tasks counts where it has one."""
    for seed, value in enumerate((0.1, 0.3, 0.5, 0.9, 0.7), start=1):
        for task in ("Easy", "Hard")[: 2 - (seed == 5)]:
            fake_run(tmp_path / "runs", seed, [0.1], evaluation=value, env_ids=[task] * 2)
            shutil.move(
                next((tmp_path / "runs").glob(f"Task__pr__{seed}__*")),
                tmp_path / "runs" / f"{task}{seed}__1",
            )
    _, exact = tabled()
    scores = np.array([[value + 0.05] * 2 for value in (0.1, 0.3, 0.5, 0.9)])
    expected = table.interquartile_mean(scores)
    assert list(exact.filter(like="all tasks").loc["pr"]) == pytest.approx(expected)
    assert expected != table.interquartile_mean(scores, paired=True)
    assert exact.Easy["pr"] == pytest.approx((0.35 + 0.55 + 0.75) / 3)
    assert exact.Hard["pr"] == pytest.approx(0.45)
    assert exact["success in Easy"]["pr"] == 0.2
    assert exact["success in Hard"]["pr"] == 0.25


def fake_language_run(root, seed, name, training, held_out, agents=(), **settings):
    """A run of language models as prpo_llm.py leaves it."""
    folder = root / f"x__{name}__{seed}__1"
    folder.mkdir(parents=True)
    settings = {
        "exp_name": name,
        "seed": seed,
        "base_model": "smollm2",
        "dataset": ["docstrings"],
    } | settings
    settings = {
        "communicator": "uniform",
        "self_preference": 0.6,
        "partition": "iid",
        "algorithm": "ppo",
    } | settings
    rows = [
        {"step": k + 1, "agent": i, "reward": training, "seed": seed, "exp_name": name}
        for k in (0, 1)
        for i in (0, 1)
    ]
    pd.DataFrame(rows).to_csv(folder / "metrics.csv", index=False)
    summary = {
        "script": "prpo_llm",
        "completed": True,
        "seed": seed,
        "settings": settings,
        "versions": {},
        "steps": 2,
    }
    (folder / "summary.json").write_text(
        json.dumps(summary | {"evaluation": {"group": held_out, "agents": agents}})
    )
    return folder


def test_table_of_searches_is_the_papers(tmp_path, tabled):
    """The setting chosen in training with its held-out score, not the best of these; EVP for each
    seed.
    """
    # Of two of the three, without replacement; 0.1 more with the second seed
    best = (0.5 + 0.5 + 0.4) / 3
    kinds = {"isolated": {"aggregation": "none"}, "fedavg": {"aggregation": "weights"}}
    kinds["pr0.2"] = {
        "aggregation": "policy",
        "communicator": "self-preferred",
        "self_preference": 0.2,
    }
    kinds["pr0.6"] = kinds["pr0.2"] | {"self_preference": 0.6}
    for name, settings in kinds.items():
        for k, (training, held_out) in enumerate([(0.9, 0.3), (0.1, 0.5), (0.2, 0.4)]):
            for seed in (1, 2):
                value = held_out + 0.1 * (seed == 2) + 0.3 * (name == "pr0.2")
                if name == "pr0.6" and seed == 2:
                    value = best + 0.1
                run_name = f"{name}_{k}"
                fake_language_run(tmp_path / "runs", seed, run_name, training, value, **settings)
    shown, exact = tabled(evp=2)
    assert list(shown) == ["isolated", "FedAvg", "PR, p = 0.6", "PR, p = 0.2"]
    assert exact["best setting"]["isolated"] == "isolated_0"
    assert exact["held-out"]["isolated"] == pytest.approx(0.35)
    assert exact["EVP of 2"]["isolated"] == pytest.approx(best + 0.05, abs=1e-5)
    assert exact["EVP per seed"]["isolated"] == f"{best:.4f} {best + 0.1:.4f}"
    half = 12.706204736432095 * np.std([best, best + 0.1], ddof=1) / np.sqrt(2)
    assert exact["EVP of 2_ci_high"]["isolated"] == pytest.approx(best + 0.05 + half, abs=1e-5)
    assert exact.deviation["isolated"] == pytest.approx(np.std([0.5, 0.5, 0.4]), abs=1e-3)
    variance = (
        np.var([0.5, 0.5, 0.4]) / 2
    )  # of the second seed, whose settings are all alike, it is 0
    assert exact.deviation["PR, p = 0.6"] == pytest.approx(np.sqrt(variance), abs=1e-3)
    assert shown["PR, p = 0.2"]["gain over isolated"] == f"{0.3 / (best + 0.05):+.1%}"
    assert shown["PR, p = 0.6"]["gain over FedAvg"] == "+0.0%"
    assert shown["isolated"]["gain over FedAvg"] == ""
    with_replacement = (5 * 0.5 + 3 * 0.4 + 0.3) / 9
    assert tabled(evp=2, replacement=True)[1]["EVP of 2"]["isolated"] == pytest.approx(
        with_replacement + 0.05, abs=1e-5
    )
    assert "EVP of 3" in tabled()[1]
    with pytest.raises(SystemExit, match="fewer settings than --evp 4"):
        tabled(evp=4)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"private_layers": 1}, "FedAvg, last layers private"),
        ({"communicator": "reward"}, "FedAvg, reward"),
        ({"aggregation": "policy", "kl_schedule": "linear"}, "PR, uniform, falls to 0"),
        ({"aggregation": "policy", "kl_direction": "forward"}, "PR, uniform, forward KL"),
    ],
)
def test_other_methods_are_no_settings_of_one_search(changes, name, tmp_path, tabled):
    usual = {"aggregation": "weights", "communicator": "uniform"}
    for settings in (usual, usual | changes):
        folder = "-".join(map(str, settings.values()))
        fake_language_run(tmp_path / "runs", 1, folder, 0.5, 0.5, **settings)
    shown, _ = tabled(evp=1)
    assert list(shown) == ["FedAvg", name]


def test_language_models_are_judged_by_common_prompts_and_their_own_topics(tmp_path, plotted):
    """evaluations.csv has a row per agent and task, the common prompts first; own topics follow in
    order.
    """
    rewards = {0: {"common": 0.5, "a": 0.1, "b": 0.2}, 1: {"common": 0.7, "a": 0.3, "b": 0.6}}
    agents = [{task: {"mean": value} for task, value in row.items()} for row in rewards.values()]
    rows = [
        {"step": 2, "agent": agent, "task": task, "mean_reward": value, "ci95": 0}
        for agent, row in rewards.items()
        for task, value in row.items()
    ]
    for seed in (1, 2):
        folder = fake_language_run(
            tmp_path / "runs", seed, "pr", 0.5, 0.6, agents, partition="topic"
        )
        pd.DataFrame(rows).to_csv(folder / "evaluations.csv", index=False)
    _, runs, results, _ = plotted()
    assert runs.own_topic.tolist() == pytest.approx([0.35, 0.35])
    assert results.evaluation[0] == pytest.approx(0.6)
    loaded = plot.load_run(folder)
    assert loaded[["step", "agent"]].values.tolist() == [[1, 0], [1, 1], [2, 0], [2, 1]]
    assert loaded.evaluation.tolist()[2:] == [0.5, 0.7]
    assert loaded.evaluation.isna().tolist() == [True] * 2 + [False] * 2


def test_table_of_win_rates_and_topics(tmp_path, tabled):
    """What a judge found, of all agents on the common prompts; else rewards, also on own topics and
    those of others; both averages.
    """
    kinds = {
        "isolated": {"aggregation": "none"},
        "fedavg": {"aggregation": "weights", "lora_average": "exact"},
    }
    kinds["fedavg-naive"] = {"aggregation": "weights", "lora_average": "naive"}
    for k, (name, settings) in enumerate(kinds.items()):
        rewards = [0.9, 0.1 * k, 0.2], [0.9, 0.4, 0.3 + k]  # common, first topic, second topic
        agents = [
            {task: {"mean": value} for task, value in zip("cxy", row, strict=True)}
            for row in rewards
        ]
        for seed in (1, 2):
            folder = fake_language_run(
                tmp_path / "runs", seed, name, 0.5, 0.9, agents, partition="topic", **settings
            )
            rates = {"agent": [0, "all", "all"], "task": ["validation", "x", "validation"]}
            rates["step"] = 2
            pd.DataFrame(rates | {"win_rate": [0.1, 0.2, 0.4 + 0.1 * k]}).to_csv(
                folder / "win_rates.csv", index=False
            )
    shown, exact = tabled(measure="win_rate")
    assert list(shown) == ["isolated", "FedAvg", "FedAvg, naive"]
    assert exact["held-out"].tolist() == pytest.approx([0.4, 0.5, 0.6])
    assert "own topic" not in exact and "others' topics" not in exact
    assert shown["FedAvg, naive"]["gain over FedAvg"] == "+20.0%"
    _, rewards = tabled()
    assert rewards["held-out"].tolist() == pytest.approx([0.9] * 3)
    assert rewards["own topic"].tolist() == pytest.approx([0.15, 0.7, 1.25])
    assert rewards["others' topics"].tolist() == pytest.approx([0.3] * 3)
    rates = pd.read_csv(folder / "win_rates.csv")
    rates.assign(step=1).to_csv(folder / "win_rates.csv", index=False)
    with pytest.raises(SystemExit, match="is of an earlier evaluation"):
        tabled(measure="win_rate")
    rates[rates.task == "x"].to_csv(folder / "win_rates.csv", index=False)
    with pytest.raises(SystemExit, match="has no --tasks validation"):
        tabled(measure="win_rate")
    (folder / "win_rates.csv").unlink()
    with pytest.raises(SystemExit, match="run benchmark/judge.py first"):
        tabled(measure="win_rate")


@pytest.fixture
def selected(tmp_path, capsys):
    """selected(**options): the commands that choose.py prints for the grid below tmp_path/runs, and
    its table on stderr.
    """

    def run(**options):
        options = {"seeds": (1, 2), "commands": str(tmp_path / "tuning.txt")} | options
        choose.main(choose.Args(runs=(str(tmp_path / "runs"),), **options))
        printed = capsys.readouterr()
        return printed.out.splitlines(), printed.err

    return run


def fake_grid(root, left_out=(), **common):
    """Two methods, two settings, two tuning seeds, and the commands of these runs."""
    curves = {
        "pr_coef0.5": [0.1, 0.9],
        "pr_coef2": [0.6, 0.7],
        "isolated_coef0.5": [0.2, 0.2],
        "isolated_coef2": [0.1, 0],
    }
    evaluations = {
        "pr_coef0.5": 0.6,
        "pr_coef2": 0.5,
        "isolated_coef0.5": 0.1,
        "isolated_coef2": 0.1,
    }
    lines = []
    for seed in (101, 102):
        for name, curve in curves.items():
            coef = float(name.partition("coef")[2])
            line = f"OMP_NUM_THREADS=1 python prpo_minigrid.py --seed {seed} --kl-coef {coef:.1e}"
            line += " --env-id Task --run-dir runs/tuning"
            lines.append(f"{line} --exp-name {name} --kl-direction 'reverse'")
            if (name, seed) in left_out:
                continue
            settings = {"exp_name": name, "kl_coef": coef, "kl_direction": "reverse"}
            settings |= {"run_dir": "elsewhere"} | common
            higher = [value + 0.2 * (seed == 102) for value in curve]
            fake_run(root / "runs", seed, higher, evaluations[name], **settings)
    (root / "tuning.txt").write_text("\n".join(lines))


def test_settings_are_chosen_on_tuning_seeds(tmp_path, selected):
    """The best mean of each method; its command with a fresh seed, the method's name and a folder,
    else as it was.
    """
    fake_grid(tmp_path)
    commands, shown = selected(seeds=(3, 1), out_dir="runs/final")
    expected = []
    for seed in (3, 1):
        for name, coef in (("pr", "2.0e+00"), ("isolated", "5.0e-01")):
            line = f"OMP_NUM_THREADS=1 python prpo_minigrid.py --seed {seed} --kl-coef {coef}"
            line += " --env-id Task --run-dir runs/final"
            expected.append(f"{line} --exp-name {name} --kl-direction 'reverse'")
    assert commands == expected  # by the mean over training the second of PR's
    row = next(line for line in shown.splitlines() if "pr_coef2" in line)
    # Mean, chosen, seeds; 0.01 is of the agents' mean
    assert row.split()[-4:] == ["0.7600", "*", "0.6600", "0.8600"]
    assert shown.count("*") == 2
    # Lines are read as by run.py
    lines = (tmp_path / "tuning.txt").read_text()
    left_out = lines.splitlines()[0].replace("--seed 101", "--seed 3")
    (tmp_path / "tuning.txt").write_text(f"# {left_out}\n {lines}\n{lines}")
    assert selected(seeds=(3, 1), out_dir="runs/final")[0] == expected
    # By these the first, and of isolated's equal ones the first
    for criterion in ("final", "evaluation"):
        commands, _ = selected(criterion=criterion)
        assert [re.search("kl-coef (.*?) ", line)[1] for line in commands] == ["5.0e-01"] * 4


def test_tuning_seeds_are_not_reported_and_effort_is_equal(tmp_path, selected):
    """Refused, in one line: a seed of any tuning run or command, missing runs, a method that was
    tuned less.
    """
    fake_grid(tmp_path, left_out=[("pr_coef2", 102)])
    with pytest.raises(SystemExit, match="--seeds 102: tuned on"):
        selected(seeds=(1, 102))
    with pytest.raises(SystemExit, match="1 of 8 --commands have no finished run"):
        selected()
    (tmp_path / "tuning.txt").write_text(
        (tmp_path / "tuning.txt").read_text().replace("--seed 101", "--seed 103")
    )
    with pytest.raises(SystemExit, match="--seeds 103: tuned on"):  # whose run is not there yet
        selected(seeds=(103,))
    (tmp_path / "tuning.txt").write_text(
        (tmp_path / "tuning.txt").read_text().replace("--seed 103", "--seed 101")
    )
    commands = (tmp_path / "tuning.txt").read_text().splitlines()
    (tmp_path / "tuning.txt").write_text(
        "\n".join(line for line in commands if "--seed 101" in line)
    )
    with pytest.raises(
        SystemExit, match="unequal effort, settings x seeds: isolated 2 x 2, pr 2 x 1 or 2"
    ):
        selected()
    with pytest.raises(
        SystemExit, match="--seeds 102: tuned on"
    ):  # by a run that is no longer in the list
        selected(seeds=(102,))
    # The setting with the best mean lacks a seed
    lines, shown = selected(unequal=True)
    assert len(lines) == 4
    assert all("--kl-coef 5.0e-01" in line for line in lines)
    assert "pr_coef2 is not chosen: it lacks a seed that other settings have" in shown
    changed = (
        (tmp_path / "tuning.txt")
        .read_text()
        .replace("--kl-coef", "--gamma 0.9 --kl-coef")
        .replace("5.0e-01", "3")
    )
    (tmp_path / "tuning.txt").write_text(changed)
    with pytest.raises(SystemExit, match="none has the name and settings of .*coef0.5"):
        selected(unequal=True)


def test_grids_of_different_sizes_are_allowed_by_name_only(tmp_path, selected):
    """As in the paper's: --unequal-grids allows more settings for a method, but no seed less, and
    no missing run.
    """
    fake_grid(tmp_path)
    line = (tmp_path / "tuning.txt").read_text().splitlines()[1]
    extra = []
    for seed in (101, 102):
        settings = {"exp_name": "pr_coef9", "kl_coef": 9.0, "kl_direction": "reverse"}
        fake_run(tmp_path / "runs", seed, [0.9, 0.9], **settings)
        words = line.replace("--seed 101", f"--seed {seed}").replace("pr_coef2", "pr_coef9")
        extra.append(words.replace("2.0e+00", "9"))
    commands = tmp_path / "tuning.txt"
    commands.write_text("\n".join([commands.read_text(), *extra]))
    with pytest.raises(SystemExit, match=r"unequal effort.*pr 3 x 2.*--unequal-grids"):
        selected()
    lines, _ = selected(unequal_grids=True)
    assert [re.search(r"--kl-coef (\S+)", line)[1] for line in lines[:2]] == ["5.0e-01", "9"]
    shutil.rmtree(next((tmp_path / "runs").glob("Task__pr_coef9__102__*")))
    with pytest.raises(SystemExit, match="1 of 10 --commands have no finished run"):
        selected(unequal_grids=True)
    commands.write_text(
        "\n".join(line for line in commands.read_text().splitlines() if line != extra[1])
    )
    with pytest.raises(
        SystemExit, match="unequal effort, settings x seeds: isolated 2 x 2, pr 3 x 1 or 2"
    ):
        selected(unequal_grids=True)


def test_halving_keeps_the_better_half_of_each_method(tmp_path, selected):
    """Rounded up, with the seeds, names and settings of tuning, and more steps."""
    fake_grid(tmp_path, total_timesteps=1000)
    lines = (tmp_path / "tuning.txt").read_text().splitlines()
    extra = []
    for seed in (101, 102):  # the best of three settings of PR
        settings = {"exp_name": "pr_coef9", "kl_coef": 9.0, "kl_direction": "reverse"}
        fake_run(tmp_path / "runs", seed, [0.9, 0.9], total_timesteps=1000, **settings)
        words = lines[1].replace("--seed 101", f"--seed {seed}").replace("pr_coef2", "pr_coef9")
        extra.append(words.replace("2.0e+00", "9"))
    (tmp_path / "tuning.txt").write_text("\n".join([*lines, *extra]))
    options = {"out_dir": "runs/longer", "unequal_grids": True}
    # A seed of tuning is none that is reported
    commands, shown = selected(seeds=(101,), halve=True, steps=4000, **options)
    expected = []
    for seed in (101, 102):
        for name, coef in (
            ("pr_coef2", "2.0e+00"),
            ("isolated_coef0.5", "5.0e-01"),
            ("pr_coef9", "9"),
        ):
            line = f"OMP_NUM_THREADS=1 python prpo_minigrid.py --seed {seed} --kl-coef {coef}"
            line += f" --env-id Task --run-dir runs/longer --exp-name {name}"
            expected.append(f"{line} --kl-direction 'reverse' --total-timesteps 4000")
    assert commands == expected
    assert shown.count("*") == 3
    for steps in (0, 1000):
        problem = f"--steps {steps}: --halve needs more than the 1000 of the runs"
        with pytest.raises(SystemExit, match=problem):
            selected(halve=True, steps=steps, **options)
    # The last rung is followed by fresh seeds with the length of the results
    commands, _ = selected(seeds=(3,), steps=500, **options)
    assert [re.search(r"--kl-coef (\S+)", line)[1] for line in commands] == ["5.0e-01", "9"]
    assert all(line.endswith("--total-timesteps 500") for line in commands)


def test_a_setting_of_which_a_seed_failed_is_not_chosen(tmp_path, selected):
    """Its mean over the other seeds would compare luck: the best of the complete settings is
    chosen.
    """
    fake_grid(tmp_path)
    path = next((tmp_path / "runs").glob("Task__pr_coef0.5__102__*")) / "summary.json"
    summary = json.loads(path.read_text())
    path.write_text(json.dumps(summary | {"evaluation": {"group": None, "agents": []}}))
    lines, shown = selected(criterion="evaluation")
    assert (
        re.search(r"--kl-coef (\S+)", lines[0])[1] == "2.0e+00"
    )  # 0.5, where the other has 0.6 in its one seed
    row = next(line for line in shown.splitlines() if "pr_coef0.5" in line)
    assert row.split()[-3:] == ["-", "0.6000", "-"]
    path = next((tmp_path / "runs").glob("Task__pr_coef2__101__*")) / "summary.json"
    summary = json.loads(path.read_text())
    path.write_text(json.dumps(summary | {"evaluation": {"group": None, "agents": []}}))
    with pytest.raises(SystemExit, match="--criterion evaluation: a method has no setting with it"):
        selected(criterion="evaluation")


@pytest.mark.parametrize(
    ("criterion", "best", "other"),
    [("auc", "pr_coef2", "5.0e-01"), ("final", "pr_coef0.5", "2.0e+00")],
)
def test_a_setting_that_has_diverged_is_not_chosen(tmp_path, selected, criterion, best, other):
    """However good it was before; without this it is the best by this criterion."""
    fake_grid(tmp_path)
    lines, _ = selected(criterion=criterion)
    assert re.search(r"--kl-coef (\S+)", lines[0])[1] != other
    path = next((tmp_path / "runs").glob(f"Task__{best}__102__*")) / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"diverged": [1]}))
    lines, _ = selected(criterion=criterion)
    assert re.search(r"--kl-coef (\S+)", lines[0])[1] == other


def test_settings_are_compared_on_the_same_seeds(tmp_path, selected):
    """With --unequal too: each of these two lacks a seed, though they have as many."""
    fake_grid(tmp_path, left_out=[("pr_coef0.5", 101), ("pr_coef2", 102)])
    with pytest.raises(SystemExit, match="a method has no setting with it"):
        selected(unequal=True)


def test_a_method_of_which_a_seed_failed_has_no_mean(tmp_path, plotted, tabled):
    """In plot.py's table it is empty; table.py ends in one line, of control and of language
    models.
    """
    fake_run(tmp_path / "runs", 1, [0.1, 0.2], evaluation=0.9)
    folder = fake_run(tmp_path / "runs", 2, [0.1, 0.2])
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(
        json.dumps(summary | {"evaluation": {"group": None, "agents": []}})
    )
    (folder / "evaluations.csv").unlink()
    _, _, results, _ = plotted()
    row = results.iloc[0]
    assert np.isnan([row.evaluation, row.evaluation_ci_low]).all()
    assert row.seeds == "1 2"
    assert row.mean_training_return == pytest.approx(0.16)
    with pytest.raises(SystemExit, match=f"{folder}: not every agent has --measure evaluation"):
        tabled()
    shutil.rmtree(tmp_path / "runs")
    for seed, held_out in ((1, 0.9), (2, None)):
        for name in ("pr_a", "pr_b"):
            settings = {"aggregation": "policy", "kl_coef": ord(name[-1])}
            fake_language_run(
                tmp_path / "runs", seed, name, 0.5, held_out if name == "pr_a" else 0.5, **settings
            )
    with pytest.raises(SystemExit, match="or one without evaluation for every seed"):
        tabled()


def test_tasks_have_panels_of_their_own_and_agents_a_matrix(tmp_path, plotted):
    """--per-task: curves and evaluations of the agents that have a task; --matrix: every agent on
    every task.
    """
    for seed, curve in ((1, [0.1, 0.2]), (2, [0.3, 0.8])):
        fake_run(tmp_path / "runs", seed, curve, evaluation=0.1 * seed, env_ids=["Easy", "Hard"])
    # With fewer seeds
    fake_run(tmp_path / "runs", 1, [0.1, 0.2], 0.7, exp_name="zzz", env_ids=["Easy", "Hard"])
    *tables, _ = plotted(points=2, per_task=True, matrix=True, threshold=0.82)
    drawn, runs, results = (rows[rows.method == "pr"] for rows in tables)
    assert list(results.env) == ["Easy", "Hard"]
    assert list(drawn.env.unique()) == ["Easy", "Hard"]
    easy, hard = (drawn[drawn.env == env]["mean"].tolist() for env in ("Easy", "Hard"))
    assert easy == pytest.approx([0.2, 0.5])
    assert hard == pytest.approx([0.22, 0.52])
    assert results.evaluation.tolist() == pytest.approx([0.15, 0.25])
    assert results.steps_per_seed.tolist() == ["- -", "- 200"]
    assert len(runs) == 4
    assert runs.tv_update.tolist() == pytest.approx([0.015, 0.055] * 2)
    assert "tv_update" not in results
    matrix = pd.read_csv(tmp_path / "x_matrix.csv", comment="#").set_index("method")
    assert matrix.loc["zzz", "mean"].tolist() == pytest.approx([1.2, 0.7, 0.7, 1.3, 0.8, 0.8])
    matrix = matrix.loc["pr"].set_index(["agent", "task"])
    assert matrix.loc[(1, "Other"), "mean"] == pytest.approx(0.15 + 0.1 + 0.5)  # off the diagonal
    assert matrix.loc[(0, "Hard"), "mean"] == pytest.approx(0.15)
    assert len(matrix) == 6
    path = next((tmp_path / "runs").glob("Task__zzz__1__*")) / "evaluations.csv"
    earlier = pd.read_csv(path).assign(
        iteration=1, timesteps=100, mean_return=0.0
    )  # of --eval-every
    pd.concat((earlier, pd.read_csv(path))).to_csv(path, index=False)
    _, runs, _, _ = plotted(per_task=True, methods=("zzz",))
    assert runs.evaluation.tolist() == pytest.approx([0.7, 0.8])
    assert (tmp_path / "x_matrix.png").stat().st_size > 5_000


def test_an_agent_that_has_diverged_leaves_its_seed_without_an_evaluation(tmp_path, plotted):
    """Also in the panel of its task: the mean of the others is that of other agents."""
    for seed in (1, 2):
        folder = fake_run(tmp_path / "runs", seed, [0.1, 0.2], evaluation=0.5)
    rows = pd.read_csv(folder / "evaluations.csv")
    rows.loc[rows.agent == 1, "mean_return"] = np.nan
    rows.to_csv(folder / "evaluations.csv", index=False)
    *_, results, _ = plotted(per_task=True)
    assert np.isnan(results.evaluation.item())
    args = crowd.Args(runs=(str(tmp_path / "runs"),))
    runs, _ = plot.finished_runs(args.runs, ())
    crowds = crowd.make_rows(runs.assign(exp_name="pr-2"), 0.4).set_index("seed")
    assert crowds.evaluation.tolist() == pytest.approx([0.55, np.nan], nan_ok=True)


def test_processes_of_a_federation_are_no_runs_of_a_method(tmp_path, plotted):
    """They have the same task, name and seed, and each has its own agents only."""
    fake_run(tmp_path / "runs", 1, [0.1, 0.2])
    for stamp in (2, 3):
        fake_run(tmp_path / "runs", 1, [0.8, 0.9], stamp=stamp, exchange="file:///share")
    *_, results, messages = plotted()
    assert results.mean_training_return.tolist() == pytest.approx([0.16])
    assert messages.count("one process of a federation") == 2


def test_runs_that_lack_what_a_figure_shows_end_in_one_line(tmp_path):
    """Language models have no tasks of their own; --eval-episodes 0 leaves no evaluation."""
    runs = (str(tmp_path / "runs"),)
    folder = fake_run(tmp_path / "runs", 1, [0.1, 0.2], exp_name="pr-2")
    (folder / "evaluations.csv").unlink()
    summary = json.loads((folder / "summary.json").read_text())
    summary["evaluation"] = {"group": None, "agents": []}
    (folder / "summary.json").write_text(json.dumps(summary))
    out = str(tmp_path / "x")
    line = "--matrix: the runs have no evaluations"
    assert refusal(plot.main, plot.Args(runs=runs, out=out, matrix=True)) == line
    line = f"--runs: {folder} has no evaluation"
    assert refusal(crowd.main, crowd.Args(runs=runs, out=out)) == line
    line = "--points 0: must be at least 1"
    assert refusal(plot.main, plot.Args(runs=runs, out=out, points=0)) == line
    shutil.rmtree(folder)
    fake_language_run(tmp_path / "runs", 1, "pr-2", 0.5, 0.5, aggregation="policy")
    (folder,) = (tmp_path / "runs").iterdir()
    line = f"--per-task: the agents of {folder} have no tasks of their own"
    assert refusal(plot.main, plot.Args(runs=runs, out=out, per_task=True)) == line
    for tool in (conditions, crowd):
        line = f"--runs: {folder} has no return_last_100"
        assert refusal(tool.main, tool.Args(runs=runs, out=out)) == line


def test_methods_are_chosen_and_ordered(tmp_path, plotted):
    """--methods takes patterns, in this order."""
    for name in ("pr-a", "pr-b", "isolated"):
        fake_run(tmp_path / "runs", 1, [0.1, 0.2], exp_name=name)
    *_, results, _ = plotted(methods=("pr-*", "isolated"))
    assert list(results.method) == ["pr-a", "pr-b", "isolated"]
    *_, results, _ = plotted(methods=("pr-b", "isolated"))
    assert list(results.method) == ["pr-b", "isolated"]


def test_a_matrix_has_its_panels_in_rows_and_in_the_usual_order(tmp_path):
    """At most seven in a row; those that nobody lists are last."""
    names = ["mine", "pr-reward", "pr-uniform", "isolated", "fedavg-uniform"]
    for more in ([], ["pr-pairs", "pr-surrogate", "pr-self0.2"]):
        rows = []
        for method, agent, task in itertools.product(names + more, (0, 1), ("Easy-v0", "Hard-v0")):
            rows.append({"method": method, "agent": agent, "task": task, "mean": 0.5})
        pd.DataFrame(rows).to_csv(tmp_path / "x.csv", index=False)
        figure = plot.draw_matrix(tmp_path / "x.csv", tmp_path / "x.png")
        titles = [axis.get_title() for axis in figure.axes if axis.axison]
        assert titles[:2] == ["isolated", "FedAvg, uniform"]
        assert titles[-1] == "mine" and len(titles) == len(names + more)
        rows = {round(axis.get_position().y0, 2) for axis in figure.axes}
        assert len(rows) == (2 if more else 1)


FIGURES = sorted({path.stem.removesuffix("_matrix") for path in RESULTS.glob("*.png")})


def name_in_legend(text):
    """A method's name, without the number of its seeds."""
    return re.sub(r" \([^(]* seeds?\)$", "", text)


@pytest.mark.parametrize("name", FIGURES)
def test_committed_figures_come_from_committed_data(name, tmp_path, monkeypatch):
    """Every figure is drawn again from the curves beside it, and a table from the rows per run
    where these are kept.

    A method has the name and the colour of methods.py in all of them, and curves lie in front of
    all intervals.
    """
    import matplotlib.pyplot as plt
    from matplotlib.container import ErrorbarContainer

    for path in RESULTS.glob(f"{name}*.csv"):
        shutil.copy(path, tmp_path)
    before = {path: path.read_text() for path in tmp_path.glob("*_table.csv")}
    tools = {
        "trpo_bound": bound,
        "crowd": crowd,
        "agreement": conditions,
        "liars": conditions,
        "privacy": conditions,
        "privacy_goals": conditions,
        "s2zpo": zeroth,
        "text_worlds": text_worlds,
    }
    tool = tools.get(name, plot)
    figures = []
    draw = tool.draw
    monkeypatch.setattr(tool, "draw", lambda *paths: figures.append(draw(*paths)))
    tool.main(tool.Args(out=str(tmp_path / name), from_csv=True))
    for path in (RESULTS / f"{name}.png", *RESULTS.glob(f"{name}_matrix.png")):
        drawn = plt.imread(tmp_path / path.name)
        committed = plt.imread(path)
        assert drawn.shape == committed.shape
        assert np.abs(drawn - committed).mean() < 0.01
    assert {path: path.read_text() for path in tmp_path.glob("*_table.csv")} == before
    (figure,) = figures
    for axis in figure.axes:
        bands = [band.get_zorder() for band in axis.collections]
        assert max(bands, default=0) < min(line.get_zorder() for line in axis.lines)
    if tool in (bound, zeroth):
        return
    names = pd.read_csv(tmp_path / f"{name}.csv", comment="#").method.unique()
    expected = {method.label: method for method in map(methods.find_method, names)}
    assert len(expected) == len(names)
    (legend,) = figure.legends
    shown = {name_in_legend(text.get_text()) for text in legend.get_texts()}
    assert shown == set(expected)
    drawn = set()
    for handle, label in zip(*figure.axes[0].get_legend_handles_labels(), strict=True):
        method = expected[name_in_legend(label)]
        line = handle[0] if isinstance(handle, ErrorbarContainer) else handle
        drawn.add((line.get_color(), line.get_linestyle(), line.get_marker()))
        assert line.get_color() == method.colour
        assert method.label.startswith("isolated") == (method.colour == methods.GREY)
    assert len(drawn) == len(names)


def test_a_method_has_one_name_and_one_colour():
    """In figures, tables and pages; variants have the colour of their method, and names that nobody
    knows another.
    """
    styles = methods.style_methods(
        ["pr-uniform-4", "mine", "isolated", "pr-uniform", "yours", "pr-uniform-16"]
    )
    assert list(styles) == [
        "pr-uniform-4",
        "mine",
        "isolated",
        "pr-uniform",
        "yours",
        "pr-uniform-16",
    ]
    assert styles["pr-uniform-16"].label == "PR-PPO, uniform, 16"
    assert styles["mine"].label == "mine"
    assert styles["pr-uniform"] == methods.METHODS["pr-uniform"]
    assert styles["isolated"].colour == methods.GREY
    dashes = [styles[name].dashes for name in ("pr-uniform", "pr-uniform-4", "pr-uniform-16")]
    assert dashes == ["-", "--", ":"]
    assert len({method.colour for method in styles.values()}) == 4
    # The longest
    label = methods.find_method("pr-uniform-every1-8").label
    assert label.endswith("after every iteration, 8")
    assert methods.find_method("pr-uniforms") is None
    # Dashes that nothing else has are kept
    assert methods.style_methods(["pr-self0.2-8"])["pr-self0.2-8"].dashes == "--"
    labels = {method.label for method in methods.METHODS.values()}
    labels |= {"PR, self-preferred 0.6", "PR, self-preferred 0.2"}  # of PPO and of GRPO
    for text in (path.read_text() for path in (REPOSITORY / "docs").glob("*.md")):
        for label in re.findall(
            r"^\| (?:(?:PPO|GRPO), \w+ \| )?((?:isolated|FedAvg|PR)[^|]*) \| \d", text, re.M
        ):
            assert label in labels, label


def test_tasks_have_the_names_of_the_text():
    names = {
        "MiniGrid-DoorKey-5x5-v0": "DoorKey-5x5",
        "BeamRiderNoFrameskip-v4": "BeamRider",
        "BabyAI-GoToLocalS5N2-v0": "GoToLocalS5N2",
        "runs/skills/train.jsonl, topic": "skills, topic",
    }
    assert {task: methods.name_task(task) for task in names} == names


def test_movements_are_the_largest_of_an_iterations_agents():
    """bound.py keeps, per run and iteration, who moved most, the smallest bound, and the share of
    agents that kept theirs.
    """
    agents = {
        "exp_name": "bounded",
        "seed": 3,
        "timesteps": [64, 64, 128, 128],
        "tv_update": [0.1, 0.3, 0.2, 0.1],
        "tv_reference": [0.4, 0.3, 0.2, 0.1],
        "epsilon": [0.005, 0.01, 0.02, 0.015],
        "bound": [0.2, 0.25, 0.2, 0.3],
        "return_last_100": [0.0, 0.5, 0.25, 1.0],
    }
    rows = bound.make_rows(pd.DataFrame(agents))
    assert rows.to_dict("list") == {
        "method": ["bounded", "bounded"],
        "seed": [3, 3],
        "timesteps": [64, 128],
        "tv_update": [0.3, 0.2],
        "tv_reference": [0.4, 0.2],
        "epsilon": [0.005, 0.015],
        "bound": [0.2, 0.2],
        "within": [0.5, 1.0],
        "return_last_100": [0.25, 0.625],
    }


@pytest.mark.parametrize(
    ("names", "agents", "bonus"),
    [((0, 50, 100), 0, 0.01), ((0, 50, 100), 1, 0.0), (("none", "flipped"), 2, 0.01)],
)
def test_methods_are_compared_under_every_condition(names, agents, bonus, tmp_path, capsys):
    """conditions.py: means over the run and at its end, of the agents that count; each agent of
    these runs has 0.02 more than the one before.
    """
    import matplotlib.pyplot as plt

    for number, name in enumerate(names):
        for seed in (1, 2, 3):
            for stamp, method in enumerate(("isolated", "pr-surrogate")):
                curve = [0.1, 0.1 * number + 0.01 * seed + 0.3 * stamp]
                exp_name = f"{method}-{name}"
                fake_run(tmp_path / "runs", seed, curve, stamp=stamp, exp_name=exp_name)
    out = str(tmp_path / "compared")
    args = conditions.Args(runs=(str(tmp_path / "runs"),), out=out, agents=agents, label="lies")
    conditions.main(args)
    table = pd.read_csv(f"{out}_table.csv", comment="#", dtype={"condition": str})
    table = table.set_index(["method", "condition"])
    for number, name in enumerate(names):
        for stamp, method in enumerate(("isolated", "pr-surrogate")):
            row = table.loc[method, str(name)]
            final = 0.1 * number + 0.02 + 0.3 * stamp
            assert row.final == pytest.approx(final + bonus)
            assert row.auc == pytest.approx((0.1 + final) / 2 + bonus)
            # 0.01 / sqrt(3) times the quantile of Student's t with two degrees of freedom
            half = 0.01 / 3**0.5 * 4.302653
            assert row.final_ci_high - row.final == pytest.approx(half, rel=1e-4)
            assert row.seeds == "1 2 3"
    picture = plt.imread(f"{out}.png")
    before = Path(f"{out}_table.csv").read_text()
    conditions.main(conditions.Args(out=out, from_csv=True))  # with the same label
    assert np.array_equal(plt.imread(f"{out}.png"), picture)
    assert Path(f"{out}_table.csv").read_text() == before


@pytest.mark.parametrize("tool", [conditions, crowd])
def test_runs_that_a_table_cannot_keep_apart_are_refused(tool, tmp_path):
    """The same method and seed on two tasks; a row of both would be of neither."""
    for stamp, task in enumerate(("Task", "Other")):
        settings = {"exp_name": "pr-4", "env_id": task, "local_updates": 4}
        fake_run(tmp_path, 1, [0.1, 0.2], stamp=stamp, **settings)
    args = tool.Args(runs=(str(tmp_path),), out=str(tmp_path / "out"))
    folders = f"{tmp_path}/Task__pr-4__1__0 and {tmp_path}/Task__pr-4__1__1"
    reason = "have the same --exp-name and --seed; give the folders of one task"
    assert refusal(tool.main, args) == f"--runs: {folders} {reason}"


@pytest.mark.parametrize("tool", [conditions, crowd])
def test_names_without_a_condition_are_refused(tool, tmp_path):
    fake_run(tmp_path, 1, [0.1, 0.2], exp_name="isolated")
    args = tool.Args(runs=(str(tmp_path),), out=str(tmp_path / "out"))
    assert refusal(tool.main, args).startswith("--runs: --exp-name isolated has no ")


@pytest.mark.parametrize(
    ("tool", "name", "column"),
    [
        (conditions, "strength", "condition"),
        (crowd, "liars", "agents"),
        (plot, "strength", "env"),
        (bound, "strength", "timesteps"),
        (zeroth, "fourrooms", "task"),
    ],
)
def test_files_of_other_tools_are_refused(tool, name, column, tmp_path):
    for path in RESULTS.glob(f"{name}*.csv"):
        shutil.copy(path, tmp_path / path.name.replace(name, "out"))
    args = tool.Args(out=str(tmp_path / "out"), from_csv=True)
    with pytest.raises(arguments.Damaged, match=rf"out(_runs)?\.csv: has no column {column}"):
        tool.main(args)


def test_negative_numbers_are_refused():
    line = "--agents -1: must not be negative"
    assert refusal(conditions.main, conditions.Args(agents=-1)) == line
    assert refusal(table.main, table.Args(evp=-1)) == "--evp -1: must not be negative"


def test_commands_name_the_file_of_their_script():
    paths = {
        "prpo_minigrid": "prpo_minigrid.py",
        "liars": "benchmark/liars.py",
        "sb3_ppo": "benchmark/baselines/sb3_ppo.py",
    }
    for script, path in paths.items():
        assert plot.make_command(script, {}) == f"python {path}"
        assert (REPOSITORY / path).is_file()


def test_steps_are_found_wherever_their_column_stands():
    """Diagnostics that only later runs have stand behind it."""
    rows = {"env": "Task", "method": "pr", "seed": [1, 2], "timesteps": 9, "evaluation": 0.5}
    rows |= {"steps_to_0.8": [7, np.nan], "tv_reference": [np.nan, 0.1]}
    (line,) = plot.make_table(pd.DataFrame(rows)).itertuples()
    assert line.steps_per_seed == "7 -"


def test_conditions_are_drawn_in_order():
    names = ["opposite", "none", "random+boast", "0.5", "random", "10", "2"]
    expected = ["0.5", "2", "10", "none", "opposite", "random", "random+boast"]
    assert conditions.order_conditions(names) == expected


def test_isolated_agents_are_crowds_of_every_size():
    """crowd.py: who learned, and when four fifths had, in every crowd; agents that never learn come
    last.
    """

    def make_agents(name: str, seed: int, reached: list[int]) -> list[dict]:
        rows = []
        for steps in (100, 200, 300):
            for agent, first in enumerate(reached):
                row = {"exp_name": name, "seed": seed, "agent": agent, "timesteps": steps}
                row["return_last_100"] = 0.9 * (0 < first <= steps)
                row["evaluation"] = np.nan if steps < 300 else 0.9 * (first > 0)
                rows.append(row)
        return rows

    runs = make_agents("isolated-4", 1, [100, 0, 200, 300])
    runs = pd.DataFrame(runs + make_agents("pr-uniform-5", 2, [300, 200, 100, 0, 100]))
    rows = crowd.make_rows(runs, 0.8).set_index(["method", "agents", "first_agent"])
    expected = {
        1: ([1, 0, 1, 1], [100, np.nan, 200, 300]),
        2: ([0.5, 1], [np.nan, 300]),
        4: ([0.75], [np.nan]),
    }
    for size, (share, steps) in expected.items():
        crowds = rows.loc["isolated", size]
        assert crowds.index.tolist() == list(range(0, 4, size))
        assert crowds.share.tolist() == share
        assert crowds.steps.tolist() == pytest.approx(steps, nan_ok=True)
    assert rows.loc["pr-uniform", 5][["share", "steps"]].values.tolist() == [[0.8, 300]]
    assert rows.loc["isolated", 2].evaluation.tolist() == pytest.approx([0.45, 0.9])
    table = crowd.make_table(rows.reset_index()).set_index(["method", "agents"])
    assert table.loc["isolated", "share"].tolist() == [0.75] * 3
    assert table.evaluation.tolist() == pytest.approx([0.675] * 3 + [0.72])
    assert table.all_learn.tolist() == [0.75, 0.5, 0, 0]  # four of the last five have learned
    # What reaches the threshold exactly counts, and the last evaluation decides
    exact = crowd.make_rows(runs.replace({"evaluation": 0.9, "return_last_100": 0.9}, 0.8), 0.8)
    assert exact.share.tolist() == rows.share.tolist()
    assert exact.steps.tolist() == pytest.approx(rows.steps.tolist(), nan_ok=True)
    earlier = runs.assign(evaluation=runs.evaluation.fillna(1.0))
    assert crowd.make_rows(earlier, 0.8).share.tolist() == rows.share.tolist()
    assert table.median_steps.fillna(-1).tolist() == [
        250,
        -1,
        -1,
        300,
    ]  # of 100, 200, 300 and never: in the middle


@pytest.mark.parametrize(
    ("agents", "sizes"),
    [(1, [1]), (4, [1, 2, 4]), (5, [1, 5]), (6, [1, 2, 6]), (12, [1, 2, 4, 12])],
)
def test_the_whole_isolated_run_is_a_crowd_too(agents, sizes):
    """Also where its size is no power of two; runs that share have no other."""
    assert crowd.sizes_of_crowds("isolated", agents) == sizes
    assert crowd.sizes_of_crowds("pr-uniform", agents) == [agents]


def test_shares_of_crowds_have_wilsons_interval_with_the_seed_as_trial():
    """Of five runs whose eight agents all learn: 1 [0.57, 1], and not 1 [1, 1] or that of forty
    agents.
    """
    rows = [
        {
            "method": "pr",
            "agents": 8,
            "seed": seed,
            "first_agent": 0,
            "share": 1.0,
            "evaluation": 0.9,
            "steps": 9,
        }
        for seed in range(5)
    ]
    table = crowd.make_table(pd.DataFrame(rows)).iloc[0]
    for name in ("share", "all_learn"):
        assert table[[name, f"{name}_ci_low", f"{name}_ci_high"]].tolist() == pytest.approx(
            [1, 0.5655, 1], abs=1e-4
        )


@pytest.mark.parametrize("env_id", ["MiniGrid-FourRooms-v0", "BeamRiderNoFrameskip-v4"])
def test_speed_is_measured_with_communication_rounds(env_id):
    """Before the first round nobody is heard: agents that communicate have several in a run."""
    args = throughput.Args(env_id=env_id)
    commands = {**throughput.contenders(args), **throughput.scaling_contenders(args)}.values()
    script = importlib.import_module(throughput.choose_script(env_id).removesuffix(".py"))
    runs = [
        tyro.cli(script.Args, args=argv)
        for name, *argv in commands
        if name == throughput.choose_script(env_id)
    ]
    talking = [run for run in runs if run.communicator != "identity" and run.num_agents > 1]
    assert len(talking) > 8
    for run in talking:
        assert run.total_timesteps // (run.num_envs * run.num_steps) >= 3 * run.local_updates


def test_sb3_contrib_is_run_at_the_settings_of_pr_trpo():
    """What both have is the same by default, or a flag of every command; three agents that
    communicate have several rounds.
    """
    sys.path.insert(0, str(REPOSITORY / "benchmark" / "baselines"))
    ours = importlib.import_module("prtrpo_minigrid").Args
    theirs = importlib.import_module("sb3_trpo").Args
    given = {"env_id", "total_timesteps"}
    common = vars(theirs()).keys() & vars(ours()).keys() - {"exp_name", "device"} - given
    for name in common:
        assert getattr(theirs(), name) == getattr(ours(), name), name
    assert common >= {
        "epsilon",
        "cg_iters",
        "damping_coef",
        "backtrack_coef",
        "learning_rate",
        "update_epochs",
    }
    commands = throughput.contenders(throughput.Args(trpo=True)).values()
    assert "sb3_trpo" in next(iter(commands))[0]
    assert all({"--env-id", "--total-timesteps"} <= set(words) for words in commands)
    runs = [tyro.cli(ours, args=argv) for name, *argv in commands if name == "prtrpo_minigrid.py"]
    assert {run.local_updates for run in runs} == {1}
    (sharing,) = [run for run in runs if run.communicator != "identity"]
    assert sharing.num_agents == 3
    assert sharing.total_timesteps // 2048 >= 3 * sharing.local_updates


def test_stable_baselines3_is_run_at_the_settings_of_pr_ppo():
    """What both have is the same, whatever the defaults of prpo_minigrid.py are."""
    sys.path.insert(0, str(REPOSITORY / "benchmark" / "baselines"))
    ours = importlib.import_module("prpo_minigrid").Args
    theirs = importlib.import_module("sb3_ppo").Args
    commands = throughput.contenders(throughput.Args()).values()
    sb3, *_ = (tyro.cli(theirs, args=argv) for name, *argv in commands if "sb3_ppo" in name)
    runs = [tyro.cli(ours, args=argv) for name, *argv in commands if name == "prpo_minigrid.py"]
    common = vars(sb3).keys() & vars(runs[0]).keys() - {"exp_name", "device"}
    assert common >= {"env_id", "learning_rate", "total_timesteps", "num_steps", "ent_coef"}
    for run in runs:
        for name in common:
            assert getattr(run, name) == getattr(sb3, name), name
        assert (run.kl_coef, run.kl_direction) == (1, "forward")


def test_trl_is_run_at_the_settings_of_language_models():
    """Each size is a table of its own, in which everybody has the same prompts, rows and optimizer
    steps.
    """
    sys.path.insert(0, str(REPOSITORY / "benchmark" / "baselines"))
    ours, theirs = (importlib.import_module(name).Args for name in ("prpo_llm", "trl_grpo"))
    sizes = ((300, 58, 8), (64, 128, 4))
    tables = throughput.comparisons(throughput.Args(llm=True, llm_sizes=sizes))
    assert len(tables) == 2
    for size, args in zip(sizes, tables.values(), strict=True):
        commands = list(throughput.contenders(args).values())
        trl = [tyro.cli(theirs, args=argv) for name, *argv in commands if "trl_grpo" in name]
        prpo = [tyro.cli(ours, args=argv) for name, *argv in commands if name == "prpo_llm.py"]
        assert [run.completions_only for run in trl] == [True, False]
        assert [run.num_agents for run in prpo] == [1, 3, 3]
        for run in (*trl, *prpo):
            task = run.task if run in trl else run.base_model
            assert task == f"runs/llm-task-{size[0]}"
            assert (run.response_length, run.group_size) == size[1:]
            # Rows that pass through the model at once
            rows = run.micro_batch_size
            if run in prpo:
                rows *= run.group_size
            assert (rows, run.batch_size, run.update_epochs, run.lora_rank) == (size[2], 4, 2, 64)
            assert (run.kl_coef, run.total_steps) == (0.1, 3)
    assert len(throughput.comparisons(throughput.Args())) == 1


def test_generate_is_run_at_the_settings_of_text_worlds(tmp_path):
    """The yardstick trains at prpo_babyai.py's defaults, as its contenders do; and it runs."""
    sys.path.insert(0, str(REPOSITORY / "benchmark" / "baselines"))
    prpo_babyai = importlib.import_module("prpo_babyai")
    text_loop = importlib.import_module("text_loop")
    (first, *argv), *others = throughput.contenders(throughput.Args(text=True)).values()
    assert first == "benchmark/baselines/text_loop.py"
    yardstick = tyro.cli(text_loop.Args, args=argv)
    runs = [tyro.cli(prpo_babyai.Args, args=words) for _, *words in others]
    assert [run.aggregation for run in runs] == ["none", "policy"]
    for run in runs:
        for name in ("num_agents", "total_steps", "batch_size", "seed", "base_model"):
            assert getattr(run, name) == getattr(yardstick, name)
        assert run.eval_episodes == 0

    babyai = importlib.import_module("babyai")
    size = {"hidden_size": 24, "layers": 1, "steps": 3, "batch_size": 2, "episodes": 1, "probe": 0}
    babyai.main(babyai.Args(out=str(tmp_path), **size))
    settings = prpo_babyai.Args(base_model=str(tmp_path / "model"), response_length=5)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    generator = torch.Generator().manual_seed(3)
    turns = []
    for prompt, answer in ((4, 3), (9, 1), (1, 5)):
        ids = torch.randint(1, 90, (prompt + answer,), generator=generator).tolist()
        rest = torch.empty(0), "", "", None, 0.0
        turns.append(prpo_babyai.Turn(ids[:prompt], ids[prompt:], *rest))
    log_probs, tokens, inside = text_loop.compute_log_probs(settings, model, turns)
    for k, turn in enumerate(turns):
        assert tokens[k, inside[k]].tolist() == turn.answer
        logits = model(torch.tensor([turn.prompt + turn.answer])).logits[0]
        expected = logits[len(turn.prompt) - 1 : -1].log_softmax(-1)
        torch.testing.assert_close(log_probs[k, inside[k]], expected, rtol=1e-4, atol=1e-4)


def test_rewards_are_in_units_of_the_agents_own(monkeypatch):
    """What an agent learns from and what it reports is multiplied, nothing else."""
    tool = importlib.import_module("reward_scale")
    script = importlib.import_module("prpo_minigrid")
    args = tool.Args(env_id="MiniGrid-Empty-5x5-v0", num_envs=2, scales=(1, 10, 0.5))
    scales = np.array(args.scales)[1:, None]
    plain = script.Envs(args, range(1, 3), 0)  # of a process that does not hold agent 0
    scaled = tool.Envs(args, range(1, 3), 0)
    generator = np.random.default_rng(0)
    returns = [[], []]
    for _ in range(300):
        actions = generator.integers(3, size=(2, 2))
        rewards, *signals, episodes = plain.step(actions)
        scaled_rewards, *same_signals, scaled_episodes = scaled.step(actions)
        assert np.array_equal(scaled_rewards, rewards * scales)
        assert np.array_equal(signals, same_signals)
        assert scaled_episodes == [(k, total * scales[k, 0], n) for k, total, n in episodes]
        for k, total, _ in scaled_episodes:
            returns[k].append(total)
    assert max(returns[0]) > 5 > 0.5 >= max(returns[1]) > 0
    without = tool.Envs(tool.Args(), range(3), 0)  # without the flag nothing changes
    assert without.scales.tolist() == [[1], [1], [1]]


def test_rewards_are_scaled_in_the_runs_of_the_printed_commands(tmp_path, monkeypatch, capsys):
    """Without flags the commands of the page, with flags prpo_minigrid.py on these environments."""
    tool = importlib.import_module("reward_scale")
    script = importlib.import_module("prpo_minigrid")
    monkeypatch.setattr(sys, "argv", ["reward_scale.py"])
    tool.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(set(lines)) == 15
    tasks = tuple(f"MiniGrid-DoorKey-{size}x{size}-v0" for size in (5, 6, 8))
    scales = {"equal": (1, 1, 1), "easy-times-10": (10, 1, 1), "hard-times-10": (1, 1, 10)}
    for line in lines:
        words = line.removeprefix("python benchmark/reward_scale.py ")
        args = tyro.cli(tool.Args, args=words.split())
        tool.check_args(args)
        assert f"--seed {args.seed} " in line
        communicator, _, name = args.exp_name.partition(f"{args.communicator}-")
        assert communicator == ""
        assert args.scales == scales[name]
        assert args.env_ids == tasks  # from easy to hard
    runs = []
    monkeypatch.setattr(script, "Envs", script.Envs)
    monkeypatch.setattr(script, "main", lambda args: runs.append((args.seed, script.Envs)))
    monkeypatch.setattr(sys, "argv", ["reward_scale.py", "--seed", "7"])
    tool.main()
    assert runs == [(7, tool.Envs)]
    # --eval-only plays the agents of a run, in the units of the official environments
    played = []
    monkeypatch.setattr(script, "evaluate_run", lambda args: played.append(args.eval_only))
    config = {"script": "reward_scale", "command": []}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(sys, "argv", ["reward_scale.py", "--eval-only", str(tmp_path)])
    tool.main()
    assert played == [str(tmp_path)]
    assert len(runs) == 1


def test_seeds_are_added_to_results(tmp_path):
    """pool.py: the results of seeds 1 to 3 with those of 4 and 5 are those of all five; of curves
    where all have data, and of a method that is not run again its own.
    """
    import matplotlib.pyplot as plt

    rng = np.random.default_rng(0)
    for seed in range(1, 6):
        for stamp, method in enumerate(("pr", "fedavg")):
            curve = rng.normal(0.5, 0.1, size=8)
            if seed == 5:
                curve[0] = np.nan  # no episode has ended by then
            some = "old" if seed < 4 else "new"
            for folder in (some, "all"):
                settings = {"exp_name": method, "gamma": 0.9, "env_ids": ["Task", "Other"]}
                evaluation = 0.1 * seed**0.5
                fake_run(tmp_path / folder, seed, curve, evaluation, stamp=stamp, **settings)
    fake_run(tmp_path / "old", 1, [0.1] * 8, exp_name="alone", env_ids=["Task", "Other"])
    for name in ("old", "new", "all"):
        args = {"runs": (str(tmp_path / name),), "out": str(tmp_path / name)}
        plot.main(plot.Args(**args, per_task=True, matrix=True))
    of_old = pd.read_csv(tmp_path / "old.csv", comment="#")
    args = pool.Args(out=str(tmp_path / "old"), new=str(tmp_path / "new"))
    pool.main(args)
    for name in ("", "_runs", "_matrix", "_table"):
        expected = pd.read_csv(tmp_path / f"all{name}.csv", comment="#")
        pooled = pd.read_csv(tmp_path / f"old{name}.csv", comment="#")
        alone = pooled[pooled.method == "alone"]
        pooled = pooled[pooled.method != "alone"]
        columns = list(expected.columns[: 2 if name == "_table" else 3])
        both = (table.sort_values(columns, ignore_index=True) for table in (pooled, expected))
        pd.testing.assert_frame_equal(*both, rtol=1e-3, check_dtype=False)
        if not name:
            expected = of_old[of_old.method == "alone"].reset_index(drop=True)
            pd.testing.assert_frame_equal(alone.reset_index(drop=True), expected)
    assert "--seed 1 2 3 4 5)" in (tmp_path / "old.csv").read_text()
    assert plt.imread(tmp_path / "old_matrix.png").any()
    # Nothing counts twice
    assert refusal(pool.main, args) == "--new: seed 4 of fedavg is there already"


def test_seeds_of_other_settings_are_not_added():
    old = "# python a.py --exp-name pr --env-id Task --gamma 0.9  (--seed 1 2)\n# torch 2\n"
    new = "# python a.py --exp-name pr --env-id Task --gamma 0.9 --new x  (--seed 3)\n# torch 3\n"
    expected = "# python a.py --exp-name pr --env-id Task --gamma 0.9 --new x  (--seed 1 2 3)\n"
    assert pool.pool_comments(old, new) == f"{expected}# torch 2\n# torch 3\n"
    other_task = new.replace("Task", "Other").replace("0.9", "0.8")
    assert pool.pool_comments(old, other_task).count("--exp-name pr") == 2
    other = new.replace("0.9", "0.8")
    line = "--new: pr has another --gamma: 0.9 before, 0.8 now"
    assert refusal(pool.pool_comments, old, other) == line
    # What early runs have recorded of a default
    auto = old.replace("0.9", "0.9 --device auto")
    cpu = new.replace("0.9", "0.9 --device cpu")
    assert "--device cpu --new x  (--seed 1 2 3)" in pool.pool_comments(auto, cpu)
    line = "--new: pr has another --device: cuda before, cpu now"
    assert refusal(pool.pool_comments, auto.replace("auto", "cuda"), cpu) == line
    line = "--new: pr has another --device: auto before, cuda now"
    assert refusal(pool.pool_comments, auto, cpu.replace("cpu", "cuda")) == line
    # Version 0.1 recorded a coefficient that only --aggregation proximal read
    averages = old.replace("0.9", "0.9 --aggregation weights --prox-coef 0.01")
    now = new.replace("0.9", "0.9 --prox-coef 0.0")
    assert "--prox-coef 0.0 --new x  (--seed 1 2 3)" in pool.pool_comments(averages, now)
    line = "--new: pr has another --prox-coef: 0.01 before, 0.0 now"
    proximal = averages.replace("weights", "proximal")
    assert refusal(pool.pool_comments, proximal, now) == line
    # A flag that is on or off
    on = old.replace("0.9", "0.9 --anneal-lr")
    off = new.replace("0.9", "0.9 --no-anneal-lr")
    line = "--new: pr has another --anneal-lr: yes before, no now"
    assert refusal(pool.pool_comments, on, off) == line
    assert pool.pool_comments(old, off).count("--exp-name pr") == 1


def test_means_of_zero_are_pooled():
    """A mean of 0 is a result; a row that only one table has is left out where both have others."""
    columns = {"env": "Task", "method": "pr", "timesteps": [1, 2]}
    old = pd.DataFrame(columns | {"mean": 0.0, "ci_low": 0.0, "ci_high": 0.0, "seeds": 2})
    new = old[old.timesteps == 1]
    pooled = pool.pool_means(old, new, ["env", "method", "timesteps"])
    assert pooled.timesteps.tolist() == [1]
    assert pooled["mean"].tolist() == [0]
    assert pooled.seeds.tolist() == [4]
    other_points = old.assign(timesteps=[3, 4])
    line = "--new: its curves are at other points than those of --out"
    keys = ["env", "method", "timesteps"]
    assert refusal(pool.pool_means, old, other_points, keys) == line
    finer = pd.concat((old, old.assign(timesteps=[5, 6]), other_points))
    assert pool.pool_means(old, finer, keys).timesteps.tolist() == [1, 2]


@pytest.mark.parametrize("diverged", ["old", "new"])
def test_agents_that_have_diverged_have_no_pooled_mean(diverged):
    """A row without a mean is no row that is missing."""
    columns = {"method": "pr", "agent": [0, 1], "task": "Task"}
    tables = {
        "old": pd.DataFrame(columns | {"mean": 0.4, "ci_low": 0.3, "ci_high": 0.5, "seeds": 5})
    }
    tables["new"] = tables["old"].assign(mean=0.9, ci_low=0.8, ci_high=1.0, seeds=2)
    tables[diverged].loc[1, ["mean", "ci_low", "ci_high"]] = np.nan
    pooled = pool.pool_means(tables["old"], tables["new"], ["method", "agent", "task"])
    assert pooled["mean"].tolist() == pytest.approx([(5 * 0.4 + 2 * 0.9) / 7, np.nan], nan_ok=True)
    assert pooled.loc[1, ["ci_low", "ci_high"]].isna().all()
    assert pooled.seeds.tolist() == [7, 7]


def test_an_agent_that_diverged_is_not_judged_by_an_earlier_evaluation(tmp_path):
    folder = fake_run(tmp_path, 1, [0.1, 0.2])
    path = folder / "evaluations.csv"
    last = pd.read_csv(path)
    first = last.assign(iteration=1, timesteps=100)
    last.loc[last.agent == 1, "mean_return"] = np.nan
    pd.concat((first, last)).to_csv(path, index=False)
    line = f"{folder}: not every agent has --measure evaluation"
    with pytest.raises(SystemExit, match=f"^{line}$"):
        table.main(table.Args(runs=(str(tmp_path),)))
    table.main(table.Args(runs=(str(tmp_path),), measure="final"))  # returns are there
    runs = plot.load_runs(str(tmp_path)).assign(exp_name="pr-2")
    (crowds,) = crowd.make_rows(runs, 0.4).itertuples()
    assert crowds.share == 0.5 and np.isnan(crowds.evaluation)


def test_runs_that_were_not_evaluated_have_no_own_topic():
    """--partition topic with --eval-prompts 0."""
    run = SimpleNamespace(summary={"evaluation": {"group": None, "agents": [{}, {}]}})
    assert np.isnan(plot.own_topic(run))
    run.summary["evaluation"]["agents"] = [
        {"all": {"mean": 0.1}, "a": {"mean": 0.2}, "b": {"mean": 0.3}},
        {"all": {"mean": None}, "a": {"mean": None}, "b": {"mean": None}},  # has diverged
    ]
    assert np.isnan(plot.own_topic(run))


def test_agents_in_text_worlds_have_another_table(tmp_path):
    folder = fake_run(tmp_path, 1, [0.1])
    metrics = pd.read_csv(folder / "metrics.csv").drop(columns="env_id")
    metrics.to_csv(folder / "metrics.csv", index=False)
    with pytest.raises(SystemExit, match="see benchmark/text_worlds.py"):
        table.score_agents(SimpleNamespace(folder=folder), "final")


def test_results_that_do_not_fit_are_not_pooled():
    """Steps to another threshold, or agents' tasks where there was a mean of all."""
    old = pd.DataFrame({"env": ["A", "B"], "method": "pr", "seed": 1, "steps_to_0.4": 7})
    new = old.assign(seed=2)
    assert pool.pool_runs(old, new).seed.tolist() == [1, 2, 1, 2]
    other = new.rename(columns={"steps_to_0.4": "steps_to_0.8"})
    line = "--new: has another --threshold than steps_to_0.4"
    assert refusal(pool.pool_runs, old, other) == line
    whole = new[:1].assign(env="A+B")
    line = "--new: pr has the tasks A+B, not A, B; see --per-task"
    assert refusal(pool.pool_runs, old, whole) == line
    another_method = whole.assign(method="fedavg")
    assert len(pool.pool_runs(old, another_method)) == 3


def test_a_command_is_no_setting(tmp_path):
    """It differs between the seeds of one method."""
    config = {"script": "toy", "command": ["--seed=2"], "elastic_run": None, "seed": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert plot.read_settings(tmp_path) == ({}, {"seed": 2})


def test_results_of_a_search_are_not_pooled(tmp_path):
    for name in ("search", "search_runs"):
        shutil.copy(RESULTS / f"skills_{name}.csv", tmp_path / f"{name}.csv")
    args = pool.Args(out=str(tmp_path / "search"), new=str(RESULTS / "goals"))
    line = f"--out {tmp_path}/search: is of a search, whose limits are no intervals over seeds"
    assert refusal(pool.main, args) == line


@pytest.mark.parametrize("tool", [bound, crowd, plot, pool, table, throughput])
def test_wrong_flags_of_tools_are_named(tool):
    """As in the scripts, with exit code 2."""
    message = refusal(arguments.read_flags, tool.Args, ["--nothing"])
    assert "Unrecognized options: --nothing" in message
    assert refusal(arguments.refuse, "--runs x: must be y") == "--runs x: must be y"


def test_wrong_values_of_tools_end_in_one_line(tmp_path):
    """With exit code 2 what is wrong in itself, with 1 what cannot be done."""
    missing = {"runs": (str(tmp_path),)}
    out = str(tmp_path / "x")
    args = plot.Args(out=out, from_csv=True)
    assert refusal(plot.main, args) == f"--from-csv: there is no {out}.csv"
    line = f"--runs {tmp_path}: no finished run in there"
    for tool in (bound, crowd):
        with pytest.raises(SystemExit, match=line) as end:
            tool.main(tool.Args(**missing, out=out))
        assert end.value.code == line  # which Python prints, and ends with 1
    fake_run(tmp_path, 1, [0.1, 0.2])
    args = table.Args(**missing, measure="win_rate")
    assert refusal(table.main, args) == "--measure win_rate: is for language models"
