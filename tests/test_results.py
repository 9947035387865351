"""benchmark/runs.py, plot.py, table.py, crowd.py, bound.py: runs as tables and figures."""

import importlib
import itertools
import json
import re
import shutil
import sys

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import scipy.stats
from fabricated import control_run, language_run
from helpers import REPOSITORY, config_of, refusal, summary_of

sys.path.insert(0, str(REPOSITORY / "benchmark"))
arguments = importlib.import_module("arguments")
bound = importlib.import_module("bound")
crowd = importlib.import_module("crowd")
figures = importlib.import_module("figures")
plot = importlib.import_module("plot")
runs = importlib.import_module("runs")
styles = importlib.import_module("styles")
table = importlib.import_module("table")
text_worlds = importlib.import_module("text_worlds")
zeroth = importlib.import_module("zeroth")
RESULTS = REPOSITORY / "benchmark" / "results"
PAGES = sorted((REPOSITORY / "docs").rglob("*.md"))
T2 = 4.302652729911275  # quantile of Student's t, two degrees of freedom


# Statistics


def test_intervals_are_those_of_student():
    """By hand, with the deviation of a sample; a single seed has no limits, a missing one no
    mean.
    """
    deviation = np.sqrt(((0.2 - 0.5) ** 2 + (0.4 - 0.5) ** 2 + (0.9 - 0.5) ** 2) / 2)
    half = T2 * deviation / np.sqrt(3)
    assert runs.mean_interval([0.2, 0.4, 0.9]) == pytest.approx((0.5, 0.5 - half, 0.5 + half))
    assert np.isnan(runs.mean_interval([0.3])[1:]).all()
    assert np.isnan(runs.mean_interval([0.3, np.nan, 0.1])[0])


def test_shares_have_wilsons_interval():
    """By hand for 3 of 4; scipy's for every number of successes; never empty or outside [0, 1]."""
    z = 1.959963984540054
    centre = 0.75 + z**2 / 8
    half = z * np.sqrt(0.75 * 0.25 / 4 + z**2 / 64)
    limits = (centre - half) / (1 + z**2 / 4), (centre + half) / (1 + z**2 / 4)
    assert runs.wilson_interval(0.75, 4) == pytest.approx(limits)
    for trials in (1, 5, 8):
        for successes in range(trials + 1):
            expected = scipy.stats.binomtest(successes, trials).proportion_ci(method="wilson")
            limits = runs.wilson_interval(successes / trials, trials)
            assert limits == pytest.approx(tuple(expected), abs=1e-12)
            assert 0 <= limits[0] < limits[1] <= 1


@pytest.mark.parametrize(("probability", "student"), [(0.1, 0.41), (0.5, 0.94)])
def test_coverage_where_seeds_are_all_or_nothing(probability, student):
    """All outcomes of five seeds, weighted: Student's t covers what runs.py writes, Wilson's
    formula at least 90 %.
    """
    covered = {"student": 0, "wilson": 0}
    for successes in range(6):
        weight = scipy.stats.binom.pmf(successes, 5, probability)
        mean, low, high = runs.mean_interval([1.0] * successes + [0.0] * (5 - successes))
        covered["student"] += weight * (low <= probability <= high)
        low, high = runs.wilson_interval(mean, 5)
        covered["wilson"] += weight * (low <= probability <= high)
    assert covered["student"] == pytest.approx(student, abs=0.005)
    assert covered["wilson"] > 0.9


def test_seeds_that_solve_or_fail_are_recognised():
    """Both occur, and at most one seed lies between; 0.8 solves, 0.4 does not fail any more."""
    assert runs.is_all_or_nothing([0.97, 0.96, 0.49, 0.97, 0.07])
    assert runs.is_all_or_nothing([0.8, 0.39])
    assert not runs.is_all_or_nothing([0.62, 0.18, 0.9, 0.92, 0.61])
    assert not runs.is_all_or_nothing([-300.0, 1200.0, 900.0])
    assert not runs.is_all_or_nothing([0.8, 0.4])
    assert not runs.is_all_or_nothing([0.79, 0.39])
    assert not runs.is_all_or_nothing([])


@pytest.mark.parametrize("results", [[0.1, 0.9, 0.5], [0.3], [0.2, 0.2, -0.1, 0.7, 0.2]])
def test_expected_maximum_is_that_of_all_subsets(results):
    mean, variance = runs.expected_maximum(results)
    for n in range(1, len(results) + 1):
        best = [max(subset) for subset in itertools.combinations(results, n)]
        assert mean[n - 1] == pytest.approx(np.mean(best))
        assert variance[n - 1] == pytest.approx(np.var(best), abs=1e-12)
    assert runs.expected_maximum(np.arange(1500))[0][[0, -1]] == pytest.approx([749.5, 1499])


# Reading


def read_groups(root, **options):
    """The groups of the runs below a folder."""
    return runs.group_runs(runs.read_runs((str(root),), **options))


def test_all_runs_are_one_table(tmp_path, monkeypatch):
    """Metrics, evaluations on the own task, and settings, of unfinished runs too."""
    control_run(tmp_path / "a", 1, [0.1, 0.2], evaluation=0.7, learning_rate=0.5)
    (control_run(tmp_path / "b", 3, [0.6], env_ids=["Task"] * 2) / "summary.json").unlink()
    whole = runs.load_runs(tmp_path / "a", tmp_path / "b")
    rows = whole.set_index(["seed", "iteration", "agent"])
    assert len(rows) == 6 and rows.index.is_unique
    assert rows.evaluation[1, 2, 1] == pytest.approx(0.8)
    assert rows.evaluation.isna().sum() == 2  # of the iteration before the last one
    # The metric is another thing than the setting
    assert rows.learning_rate[1, 1, 0] == 0.1 and rows.learning_rate_setting[1, 1, 0] == 0.5
    assert rows.env_ids[3, 1, 0] == "Task Task"
    assert rows.completed.groupby("seed").all().tolist() == [True, False]
    assert runs.load_runs(tmp_path / "nothing").empty
    # The line for notebooks, as it stands in the docstring
    (tmp_path / "runs").symlink_to(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    names = {}
    exec("\n".join(re.findall(r"^    (import pandas.*|runs = .*)$", runs.__doc__, re.M)), names)
    assert names["runs"].return_last_100.tolist() == whole[whole.seed == 1].return_last_100.tolist()


def test_each_task_of_a_table_has_digits_of_its_own(tmp_path, capsys):
    """One with large returns takes none away from the others, nor their bounds."""
    for seed in (1, 2, 3):
        for name, bonus in (("isolated", 0.0), ("pr-uniform", 0.05)):
            tasks = {"env_ids": ["Easy", "Hard"], "exp_name": name}
            folder = control_run(tmp_path, seed, [0.1], 0.2 * seed + bonus, **tasks)
            evaluations = pd.read_csv(folder / "evaluations.csv")
            evaluations.loc[evaluations.task == "Hard", "mean_return"] *= 1000
            evaluations.to_csv(folder / "evaluations.csv", index=False)
            summary = summary_of(folder)
            for row in summary["evaluation"]["agents"]:
                row["Hard"]["mean"] *= 1000
            (folder / "summary.json").write_text(json.dumps(summary))
    table.main(table.Args(runs=(str(tmp_path),)))
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[1] for row in rows] == ["0.40 [0, 0.90]", "0.45 [0, 0.95]"]
    assert re.fullmatch(r"500 \[3, 997\]", rows[0][2].removesuffix(" |"))
    table.main(table.Args(runs=(str(tmp_path),), minus="isolated"))
    (line,) = capsys.readouterr().out.splitlines()[2:]
    assert line == "| PR-PPO, uniform | 0.05 [0.05, 0.05], 3 of 3 | 50 [50, 50], 3 of 3 |"


def test_of_repeated_runs_the_newest_counts(tmp_path, capsys):
    """Other settings under one name end with one line, but for --run-dir and what --resume may
    change.
    """
    # Ten is newer than nine
    newest = control_run(tmp_path, 1, [0.1], 0.7, stamp=10, start_from="trained/1")
    older = control_run(tmp_path, 1, [0.1], 0.2, stamp=9, kl_coef=5.0)
    free = {"run_dir": "elsewhere", "device": "cuda", "save_every": 7, "start_from": "trained/2"}
    free |= {"generate_with": "http://elsewhere", "save_adapters": 5, "log_completions": 2}
    control_run(tmp_path, 2, [0.1], **free)
    ((run, _),) = read_groups(tmp_path).values()
    assert run.folder == newest
    line = f"{older}: left out, {newest} has the same name and seed and is newer"
    assert capsys.readouterr().err == f"{line}\n"
    control_run(tmp_path, 3, [0.1], env_ids=["Task"] * 3)
    problem = (
        r"the same name as .*, but other settings \(--env-ids .* and \['Task', 'Task', 'Task'\]\)"
    )
    with pytest.raises(SystemExit, match=problem):
        read_groups(tmp_path)


def test_what_is_no_whole_run_is_reported_and_left_out(tmp_path, capsys):
    """Unfinished, cut off, without an episode, a part of a federation, or damaged."""
    control_run(tmp_path, 1, [0.1])
    folders = {
        "not finished": control_run(tmp_path, 2, [0.1]),
        "cut off": control_run(tmp_path, 3, [0.1], summary={"completed": False}),
        "an agent ended no episode": control_run(tmp_path, 4, [np.nan]),
        "one process of a federation": control_run(tmp_path, 5, [0.1], exchange="file:///share"),
        "is no JSON": control_run(tmp_path, 6, [0.1]),
        "'versions'": control_run(tmp_path, 7, [0.1], summary={"versions": None}),
        "cannot be read": control_run(tmp_path, 8, [0.1]),
        "not enough values": control_run(tmp_path, 9, [0.1]),
    }
    (folders["not finished"] / "summary.json").unlink()
    (folders["is no JSON"] / "summary.json").write_text("{")
    summary = summary_of(folders["'versions'"])
    del summary["versions"]
    (folders["'versions'"] / "summary.json").write_text(json.dumps(summary))
    (folders["cannot be read"] / "metrics.csv").write_text("")
    metrics = pd.read_csv(folders["not enough values"] / "metrics.csv")
    metrics.drop(columns="return_last_100").to_csv(
        folders["not enough values"] / "metrics.csv", index=False
    )
    (seeds,) = read_groups(tmp_path).values()
    assert [run.seed for run in seeds] == [1]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(folders)
    for problem, folder in folders.items():
        (line,) = [line for line in lines if line.startswith(f"{folder}: ")]
        assert problem in line
    shutil.rmtree(tmp_path / "prpo_minigrid__pr__1__1")
    with pytest.raises(SystemExit, match=f"^--runs {tmp_path}: no finished run in there$"):
        read_groups(tmp_path)


def test_files_name_the_commands_behind_them(tmp_path):
    """Switches with their negation, lists, nothing for what is empty; seeds and versions."""
    settings = {"norm_adv": True, "anneal_lr": False, "sizes": [64, 32], "entity": None, "x": ""}
    for seed in (1, 2):
        control_run(tmp_path, seed, [0.1], **settings)
    lines = runs.header(runs.read_runs((str(tmp_path),))).splitlines()
    command = "python prpo_minigrid.py --exp-name pr --env-id Task --norm-adv --no-anneal-lr"
    assert lines[0] == f"# {command} --sizes 64 32  (--seed 1 2)"
    assert lines[1:] == ["# torch 2", "# environments: none"]
    for path in ("benchmark/liars.py", "benchmark/baselines/sb3_ppo.py"):
        script = path.split("/")[-1].removesuffix(".py")
        assert runs.make_command(script, {}) == f"python {path}"
        assert (REPOSITORY / path).is_file()


def test_a_row_per_run_has_means_over_agents(tmp_path):
    """Evaluation, training return over the run and at its end, steps to a threshold, which counts
    where it is reached exactly and for the first time.
    """
    control_run(tmp_path, 1, [0.0, 0.79, 0.1], 0.2)
    control_run(tmp_path, 2, [0.1, 0.2, 0.3], 0.4)
    rows = runs.make_rows(read_groups(tmp_path))
    assert rows.evaluation.tolist() == pytest.approx([0.25, 0.45])
    assert rows.mean_training_return.tolist() == pytest.approx([0.89 / 3 + 0.01, 0.21])
    assert rows.final.tolist() == pytest.approx([0.11, 0.31])
    assert rows["steps_to_0.8"].fillna(-1).tolist() == [200, -1]


def test_agents_with_different_tasks_are_apart(tmp_path):
    """But in a search, where the whole run is judged; an agent that has diverged leaves its task
    without an evaluation, whatever it was worth before.
    """
    tasks = {"env_ids": ["Easy", "Hard"]}
    folder = control_run(tmp_path, 1, [0.1, 0.2], 0.3, **tasks)
    rows = runs.make_rows(read_groups(tmp_path)).set_index("env")
    assert rows.evaluation.to_dict() == pytest.approx({"Easy": 0.3, "Hard": 0.4})
    assert rows.final.to_dict() == pytest.approx({"Easy": 0.2, "Hard": 0.22})
    whole = runs.read_runs((str(tmp_path),))
    assert list(runs.group_runs(whole, per_task=False)) == [("Easy+Hard", "pr")]
    # All agents on one task: 0.5 more, of this agent and of the other
    rows = runs.make_rows(runs.group_runs(whole, task="Other"))
    assert rows.env.tolist() == ["Other"] and rows.evaluation[0] == pytest.approx(0.85)
    assert rows.final[0] == pytest.approx(0.21)
    line = f"--task Unseen: {folder} has no evaluation on it"
    assert refusal(runs.group_runs, whole, task="Unseen") == line
    last = pd.read_csv(folder / "evaluations.csv")
    first = last.assign(iteration=1)
    last.loc[last.agent == 1, "mean_return"] = np.nan
    pd.concat((first, last)).to_csv(folder / "evaluations.csv", index=False)
    rows = runs.make_rows(read_groups(tmp_path)).set_index("env")
    assert rows.evaluation["Easy"] == pytest.approx(0.3) and np.isnan(rows.evaluation["Hard"])


def test_a_run_that_has_diverged_has_no_score(tmp_path, capsys):
    control_run(tmp_path, 1, [0.9], summary={"diverged": [1]})
    rows = runs.make_rows(read_groups(tmp_path))
    measures = ["evaluation", "mean_training_return", "final", "steps_to_0.8"]
    assert rows[measures].isna().all(axis=None)
    assert "agents [1] have diverged" in capsys.readouterr().err


def test_a_task_has_the_scores_of_its_agents_where_another_has_diverged(tmp_path, capsys):
    summary = {"diverged": [1]}
    options = {"exp_name": "pr-reward-none", "summary": summary}
    control_run(tmp_path, 1, [0.9], env_ids=["Easy", "Hard"], **options)
    rows = runs.make_rows(read_groups(tmp_path)).set_index("env")
    measures = ["evaluation", "mean_training_return", "final"]
    assert rows.loc["Easy", measures].tolist() == pytest.approx([0.5, 0.9, 0.9])
    assert rows.loc["Hard", measures].isna().all()
    of_all, of_first = (
        runs.make_conditions(runs.read_runs((str(tmp_path),)), agents) for agents in (0, 1)
    )
    assert of_all[["auc", "final"]].isna().all(axis=None)
    assert of_first[["auc", "final"]].to_numpy().tolist() == [pytest.approx([0.9, 0.9])]
    capsys.readouterr()


def test_a_task_of_ones_own_has_one_name(tmp_path):
    """That of metrics.csv, also of a run whose agents all have it."""
    for name, tasks in (("isolated", ["A-v0"] * 2), ("pr", ["A-v0", "B-v0"])):
        folder = control_run(tmp_path, 1, [0.1], exp_name=name, env_ids=tasks)
        config = config_of(folder)
        config["env_ids"] = [f"benchmark.goals:{task}" for task in tasks]
        summary = summary_of(folder)
        summary["settings"]["env_ids"] = config["env_ids"]
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "summary.json").write_text(json.dumps(summary))
    rows = runs.make_rows(read_groups(tmp_path))
    assert sorted(zip(rows.env, rows.method, strict=True)) == [
        ("A-v0", "isolated"),
        ("A-v0", "pr"),
        ("B-v0", "pr"),
    ]


def test_a_name_may_have_what_begins_a_comment(tmp_path, capsys):
    for seed in (1, 2):
        control_run(tmp_path, seed, [0.1], 0.3, exp_name="pr#2")
        control_run(tmp_path, seed, [0.1], 0.5, exp_name="pr")
    path = str(tmp_path / "rows.csv")
    table.main(table.Args(runs=(str(tmp_path),), csv=path))
    shown = capsys.readouterr().out
    assert "| pr#2 | 0.35 (2 seeds) |" in shown
    table.main(table.Args(from_csv=path))
    assert capsys.readouterr().out == shown
    table.main(table.Args(from_csv=path, methods=("pr",)))
    assert "pr#2" not in capsys.readouterr().out


def test_runs_of_before_the_settings_had_a_backend_are_of_the_same_method(tmp_path):
    for seed, backend in ((1, "auto"), (2, "envpool")):
        summary = {"env_backend": "envpool"}
        control_run(tmp_path, seed, [0.1], env_backend=backend, summary=summary)
    assert len(runs.read_runs((str(tmp_path),))) == 2


def test_what_a_spreadsheet_adds_to_a_table_is_no_data(tmp_path, capsys):
    """A byte-order mark, and comments behind the rows; methods may be numbers."""
    path = tmp_path / "rows.csv"
    rows = "# a\nenv,method,seed,timesteps,evaluation\nx,1,1,9,0.5\nx,1,2,9,0.5\n# b\n"
    path.write_text(rows, encoding="utf-8-sig")
    table.main(table.Args(from_csv=str(path)))
    assert "| 1 | 0.50 (2 seeds) |" in capsys.readouterr().out


def test_two_versions_of_a_task_are_two_columns(tmp_path, capsys):
    for name, task in (("isolated", "Hopper-v4"), ("pr", "Hopper-v5"), ("pr2", "Walker2d-v5")):
        control_run(tmp_path, 1, [0.1], 0.3, exp_name=name, env_id=task)
    table.main(table.Args(runs=(str(tmp_path),)))
    assert capsys.readouterr().out.startswith("| | Hopper-v4 | Hopper-v5 | Walker2d-v5 |")


def test_language_models_have_topics_and_win_rates(tmp_path):
    """Topics follow the common prompts in the agents' order; a judge's rates count if they are of
    all agents, on common prompts, at the end.
    """
    folder = language_run(tmp_path, 1, "pr", 0.5, 0.6, topics=((0.1, 0.2), (0.4, 0.6)))
    stale = language_run(tmp_path, 2, "pr", 0.5, 0.6, topics=((0.3, None), (0.4, 0.6)))
    rates = {"task": ["validation", "validation", "x", "validation"], "step": [1, 2, 2, 2]}
    rates |= {"agent": ["all", "all", "all", 0], "win_rate": [0.1, 0.7, 0.3, 0.4]}
    pd.DataFrame(rates).to_csv(folder / "win_rates.csv", index=False)
    pd.DataFrame(rates)[:1].to_csv(stale / "win_rates.csv", index=False)
    first, second = runs.make_rows(read_groups(tmp_path)).to_dict("records")
    assert (first["own_topic"], first["others_topics"]) == pytest.approx((0.35, 0.3))
    assert second["own_topic"] == pytest.approx(0.45) and np.isnan(second["others_topics"])
    assert first["win_rate"] == 0.7 and np.isnan(second["win_rate"])
    pd.DataFrame(rates).to_csv(folder / "sampled_win_rates.csv", index=False)
    first, _ = runs.make_rows(read_groups(tmp_path)).to_dict("records")
    assert first["sampled_win_rate"] == 0.7
    (folder / "win_rates.csv").unlink()
    # No run has one of the end any more
    assert "win_rate" not in runs.make_rows(read_groups(tmp_path))
    # Nor has one that has diverged
    summary = summary_of(folder)
    (folder / "summary.json").write_text(json.dumps(summary | {"diverged": [1]}))
    rows = runs.make_rows(read_groups(tmp_path))
    assert "sampled_win_rate" not in rows and rows.own_topic.isna().tolist() == [True, False]


# Curves and searches


def test_a_curve_is_a_mean_with_its_interval(tmp_path):
    """Where all agents of all runs have data: from the latest beginning to the end of the shortest
    run.
    """
    curves = {1: [0.0, 0.2, 0.4, 0.6], 2: [np.nan, 0.6, 0.8], 3: [0.5, 0.7, 0.9, 0.9]}
    for seed, curve in curves.items():
        control_run(tmp_path, seed, curve)
    curves = plot.make_curves(read_groups(tmp_path))
    assert curves.timesteps.tolist() == list(range(200, 301, 4))  # a hundredth of the longest run
    half = T2 * np.std([0.2, 0.6, 0.7], ddof=1) / np.sqrt(3)
    row = curves[["mean", "ci_low", "ci_high"]].iloc[0]
    assert row.tolist() == pytest.approx([0.51, 0.51 - half, 0.51 + half])


def test_a_run_that_has_diverged_has_no_curve(tmp_path, capsys):
    for seed, agents in {1: [], 2: [], 3: [1]}.items():
        control_run(tmp_path, seed, [0.1 * seed, 0.2], summary={"diverged": agents})
    curves = plot.make_curves(read_groups(tmp_path))
    assert set(curves.seeds) == {2}
    assert curves["mean"].iloc[0] == pytest.approx(0.16)
    control_run(tmp_path / "other", 1, [0.1], summary={"diverged": [0]})
    groups = read_groups(tmp_path / "other")
    assert refusal(plot.make_curves, groups) == "--runs: in every run an agent has diverged"
    capsys.readouterr()


def search_rows(tmp_path):
    """Of two methods with settings a, b, c on two seeds; the last is best after training, the first
    in training.
    """
    for seed, scores in {1: (0.1, 0.4, 0.7), 2: (0.3, 0.3, 0.6)}.items():
        for number, (setting, score) in enumerate(zip("abc", scores, strict=True)):
            curve = [0.5 - 0.1 * number]
            control_run(tmp_path, seed, curve, score - 0.05, exp_name=f"pr-uniform_{setting}")
    control_run(tmp_path, 1, [0.2], 0.45, exp_name="alone_a")
    return runs.make_rows(read_groups(tmp_path))


def test_a_search_is_drawn_by_the_settings_that_are_tried(tmp_path):
    """By hand: the mean of one, of the better of each pair, and the best; for a seed each."""
    rows = search_rows(tmp_path)
    drawn = plot.make_search(rows).set_index(["method", "settings"])
    means = [0.5, 0.4, (0.4 + 0.7 + 0.7 + 0.3 + 0.6 + 0.6) / 6, 0.65]
    assert drawn["mean"].tolist() == pytest.approx(means)
    deviation = np.sqrt(np.mean([np.var([0.1, 0.4, 0.7]), np.var([0.3, 0.3, 0.6])]))
    assert drawn.ci_low["pr-uniform", 1] == pytest.approx(0.4 - deviation)
    with pytest.raises(SystemExit, match="not every seed has the"):
        plot.make_search(rows.iloc[:-1])


def test_a_search_is_drawn_by_win_rates(tmp_path):
    """The paper's figures 2 and 3: two methods with two settings each, in two regimes."""
    rates = {("iid", "pr0.6-ppo"): (0.6, 0.8), ("iid", "isolated-ppo"): (0.5, 0.7)}
    rates |= {("topic", "pr0.6-ppo"): (0.4, 0.9), ("topic", "isolated-ppo"): (0.6, 0.6)}
    for (partition, method), of_method in rates.items():
        root = tmp_path / "runs" / partition
        for setting, rate in enumerate(of_method):
            folder = language_run(
                root, 1, f"{method}_kl{setting}_every3", 0.5, 0.2, partition=partition
            )
            row = {"task": "validation", "step": 2, "agent": "all", "win_rate": rate}
            for name, shift in (("win_rates.csv", 0.0), ("sampled_win_rates.csv", 0.1)):
                table_of_run = pd.DataFrame([row | {"win_rate": rate + shift}])
                table_of_run.to_csv(folder / name, index=False)
    args = {"runs": (str(tmp_path / "runs"),), "out": str(tmp_path / "evp"), "search": True}
    for measure, shift in (("win_rate", 0.0), ("sampled_win_rate", 0.1)):
        plot.main(plot.Args(**args, measure=measure))
        drawn = runs.read_table(tmp_path / "evp.csv")
        for (partition, method), (low, high) in rates.items():
            curve = drawn[(drawn.env == f"docstrings, {partition}") & (drawn.method == method)]
            assert curve["mean"].tolist() == pytest.approx(
                [(low + high) / 2 + shift, max(low, high) + shift]
            )
            assert (curve.ci_high - curve["mean"]).tolist() == pytest.approx(
                [abs(high - low) / 2, 0], abs=1e-9
            )
    figure = plot.draw(tmp_path / "evp.csv", tmp_path / "evp.png")
    assert figure.axes[0].get_ylabel().startswith("sampled win rate of the best")
    labels = {text.get_text() for text in figure.legends[0].get_texts()}
    assert labels == {"isolated PPO (1 seed)", "PR-PPO, self-preferred 0.6 (1 seed)"}
    (folder / "win_rates.csv").unlink()
    with pytest.raises(SystemExit, match="not every seed has the"):
        plot.main(plot.Args(**args, measure="win_rate"))
    for path in (tmp_path / "runs").rglob("win_rates.csv"):
        path.unlink()
    message = refusal(plot.main, plot.Args(**args, measure="win_rate"))
    assert message.startswith("--measure win_rate: the runs have none")


def test_settings_are_ranked_on_the_same_seeds(tmp_path, capsys):
    """Best first; one that lacks a seed comes last, however good its other one is; of several
    lengths of a method the longest.
    """
    rows = search_rows(tmp_path)
    brief = rows[rows.method == "pr-uniform_a"].assign(timesteps=50, method="isolated_a")
    lacking = rows[rows.method == "pr-uniform_b"].iloc[:1].assign(mean_training_return=0.9)
    short = rows.assign(timesteps=50, mean_training_return=0.99)
    rows = pd.concat((brief, rows[rows.method != "pr-uniform_b"], lacking, short))
    rows.to_csv(tmp_path / "x_runs.csv", index=False)
    args = {"from_csv": str(tmp_path / "x_runs.csv"), "measure": "auc"}
    table.main(table.Args(**args, search=True))
    shown = capsys.readouterr().out.splitlines()
    assert "| isolated | Task | 1 2 | a: 0.510 | | |" in shown
    assert shown[-1] == "| PR-PPO, uniform | Task | 1 2 | a: 0.510 | c: 0.310 | b: - |"


def test_runs_of_one_length_in_iterations_are_all_of_a_search(tmp_path, capsys):
    """Par-S2ZPO counts them, and its runs of whole episodes differ in steps."""
    for seed, scores in {1: (0.1, 0.4), 2: (0.3, 0.3)}.items():
        for setting, score in zip("ab", scores, strict=True):
            name = f"par_{setting}"
            summary = {"timesteps_per_agent": 100 * seed + round(10 * score)}
            folder = control_run(tmp_path, seed, [0.5], score, summary=summary, exp_name=name)
            metrics = pd.read_csv(folder / "metrics.csv").drop(columns="timesteps")
            metrics.to_csv(folder / "metrics.csv", index=False)
    table.main(table.Args(runs=(str(tmp_path),), search=True))
    assert capsys.readouterr().out.splitlines()[-1].endswith("| 1 2 | b: 0.400 | a: 0.250 |")


def test_table_1_has_the_setting_that_is_best_in_training(tmp_path, capsys):
    """And not the best of what it was then scored by; the best to be expected of two settings for
    each seed.
    """
    for seed in (1, 2, 3):
        for setting, (training, score) in enumerate([(0.9, 0.3), (0.1, 0.5), (0.2, 0.4)]):
            value = score + 0.1 * seed
            topics = ((value, 0.0), (0.0, value))
            language_run(tmp_path, seed, f"pr-uniform-grpo_{setting}", training, value, topics)
    table.main(table.Args(runs=(str(tmp_path),), evp=2))
    expected = (0.5 + 0.5 + 0.4) / 3
    low, high = runs.mean_interval([expected + 0.1, expected + 0.2, expected + 0.3])[1:]
    cells = "| PR-GRPO, uniform | docstrings, topic | 3 | 0 | 0.50 [0.25, 0.75] | 0.50 [0.25, 0.75]"
    cells += f" | 0.00 [0.00, 0.00] | {expected + 0.2:.2f} [{low:.2f}, {high:.2f}]"
    seeds = " ".join(f"{expected + 0.1 * seed:.4f}" for seed in (1, 2, 3))
    assert capsys.readouterr().out.splitlines()[-1] == f"{cells} | {seeds} |"
    with pytest.raises(SystemExit, match="fewer settings than --evp 4"):
        table.main(table.Args(runs=(str(tmp_path),), evp=4))
    with pytest.raises(SystemExit, match="--measure win_rate: the runs have no such column"):
        table.main(table.Args(runs=(str(tmp_path),), evp=2, measure="win_rate"))


# Tables of methods


def test_differences_are_paired_by_seed(tmp_path, capsys):
    """Over the seeds that both have, and in how many they are positive."""
    for seed, (value, other) in {2: (0.5, 0.1), 3: (0.3, 0.4), 4: (0.9, 0.6)}.items():
        control_run(tmp_path, seed, [0.1], value, exp_name="pr-uniform")
        control_run(tmp_path, seed, [0.1], other, exp_name="isolated")
    control_run(tmp_path, 1, [0.1], 0.0, exp_name="pr-uniform")
    table.main(table.Args(runs=(str(tmp_path),), minus="isolated"))
    half = T2 * np.std([0.4, -0.1, 0.3], ddof=1) / np.sqrt(3)
    cell = f"0.20 [{0.2 - half:.2f}, {0.2 + half:.2f}], 2 of 3"
    assert capsys.readouterr().out.splitlines()[2:] == [f"| PR-PPO, uniform | {cell} |"]
    line = "--minus nobody: there is no such method"
    args = table.Args(runs=(str(tmp_path),), minus="nobody")
    assert refusal(table.main, args) == line


def test_means_are_cut_where_values_are_and_all_or_nothing_is_counted(tmp_path, capsys):
    """At 0 and 1; few seeds have their number, and a mean of a run that failed is none."""
    rows = []
    values = {"a": (0.9, 0.95, 1.0, 0.99), "b": (0.9, 0.0, 0.95, 0.1), "c": (0.5, 0.7), "d": (0.1,)}
    values["e"] = (0.95, 0.0, np.nan, 0.9)
    for method, scores in values.items():
        for seed, score in enumerate(scores, 1):
            rows.append({"env": "x", "method": method, "seed": seed, "evaluation": score})
    for method, scores in (("a", (0.95, 0.95, 0.87, 0.95)), ("e", (0.95, 0.95, 0.95, np.nan))):
        for seed, score in enumerate(scores, 1):
            rows.append({"env": "y", "method": method, "seed": seed, "evaluation": score})
    frame = pd.DataFrame(rows).assign(timesteps=9)
    frame.to_csv(tmp_path / "x_runs.csv", index=False)
    table.main(table.Args(from_csv=str(tmp_path / "x_runs.csv")))
    assert capsys.readouterr().out.splitlines() == [
        "| | x | y |",
        "| --- | --- | --- |",
        "| a | 0.96 [0.89, 1] | 0.93 [0.87, 0.99] |",
        "| b | 0.49; solved in 2 of 4 [0.15, 0.85] | |",
        "| c | 0.60 (2 seeds) | |",
        "| d | 0.10 (1 seed) | |",
        "| e | nan; solved in 2 of 4 [0.15, 0.85] | nan [nan, nan] |",
    ]


def read_page(name):
    """A page of docs/, its lines joined."""
    return (REPOSITORY / "docs" / f"{name}.md").read_text()


@pytest.mark.parametrize(
    ("page", "data", "words"),
    [
        ("results/easy_tasks", "doorkey_runs", "--measure auc"),
        ("results/easy_tasks", "keycorridor_runs", ""),
        ("results/rounds", "anchor_doorkey_runs", "--measure auc"),
        ("results/own_goals", "goals_runs", ""),
        ("results/broken_peers", "liars", "--measure final"),
        ("negative", "privacy", "--measure final"),
    ],
)
def test_pages_show_what_the_table_is(page, data, words, capsys):
    """A table of each kind holds rows that are made from the committed rows per run, and no
    others.
    """
    path = str(RESULTS / f"{data}.csv")
    table.main(arguments.read_flags(table.Args, ["--from-csv", path, *words.split()]))
    head, _, *rows = capsys.readouterr().out.splitlines()
    tables = re.findall(r"(?:^\|.*\n)+", read_page(page), re.M)
    shown, *_ = [lines.splitlines() for lines in tables if lines.startswith(head)]
    assert len(shown) > 3
    assert set(shown[2:]) <= set(rows)


def test_pooled_agents_of_the_page_are_those_of_the_table(capsys):
    """Beside those of other files, so that the page's table has further rows."""
    table.main(table.Args(from_csv=str(RESULTS / "pooled_runs.csv")))
    _, _, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 2
    assert set(rows) <= set(read_page("fedavg_ppo").splitlines())


def test_differences_of_the_page_are_those_of_the_table(capsys):
    """In bold where its rows begin."""
    path = str(RESULTS / "fourrooms_5m_runs.csv")
    table.main(table.Args(from_csv=path, minus="isolated", measure="auc"))
    rows = dict(line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:])
    for name, method in {"PR-PPO": "PR-PPO, uniform", "FedAvg": "FedAvg, uniform"}.items():
        assert f"| **{name} minus isolated** | {rows[method]} |" in read_page("results/one_task")


INTERVAL = r"\[(-?[\d.]+), (-?[\d.]+)\]"


@pytest.mark.parametrize("word", ["equal within ±0.05", "undecided"])
def test_differences_are_called_what_their_intervals_say(word):
    """By the rule of docs/results.md: equal ones lie within 0.05 of 0, undecided ones include 0 and
    reach further. A word comes before its intervals, which stand in parentheses.
    """
    text = " ".join(page.read_text() for page in (*PAGES, REPOSITORY / "README.md"))
    text = " ".join(text.split())
    called = re.findall(rf"\b{word}\b[^.;:|()[\]]*\(([^()]*)\)", text)
    intervals = re.findall(INTERVAL, " ".join(called))
    assert len(intervals) > 5
    for limits in intervals:
        low, high = map(float, limits)
        within = max(-low, high) <= 0.05
        assert within == (word != "undecided"), limits
        assert within or low <= 0 <= high, limits


def test_the_index_says_what_its_pages_say():
    """Each number stands in the page of its row, and has the verdict of its interval."""
    text = read_page("results")
    rows = re.findall(r"^\| (.*) \| ([+−=?]) \| (.*) \| (\d+) \| .*\((.*)\) \|$", text, re.M)
    assert len(rows) > 20
    for question, verdict, number, _, page in rows:
        shown = " ".join((REPOSITORY / "docs" / page).read_text().split())
        assert number in shown, (question, number)
        ((low, high),) = [map(float, limits) for limits in re.findall(INTERVAL, number)]
        expected = "+" if low > 0 else "−" if high < 0 else "?"
        if max(-low, high) <= 0.05 and low <= 0 <= high:
            expected = "="
        reasons = r"without Holm's correction|at 0\.05, not at a third look's 0\.016"
        weaker = re.search(rf"\((above|below) (?:{reasons})\)", question)
        if weaker:
            assert weaker[1] == {"+": "above", "−": "below"}[expected], question
            expected = "?"
        assert verdict == expected, question


POOLED = {
    "the nearest relative": [
        ("goals_runs", "pr-reward", "goals_runs", "proximal-reward"),
        ("unlock_goals_runs", "pr-reward", "unlock_goals_runs", "proximal-reward"),
    ],
    "a coefficient of 0.5 that falls to 0": [
        ("goals_runs", "pr-reward-linear", "goals_untuned_runs", "pr-reward"),
        ("unlock_goals_untuned_runs", "pr-reward-linear", "unlock_goals_untuned_runs", "pr-reward"),
    ],
}


@pytest.mark.parametrize("tasks", POOLED.values(), ids=POOLED)
def test_gains_over_two_tasks_are_those_of_their_rows(tasks):
    """Ten pairs of task and seed, pooled."""

    def evaluations(name, method):
        rows = runs.read_table(RESULTS / f"{name}.csv")
        return rows[rows.method == method].groupby("seed").evaluation.mean()

    gains = []
    for name, method, other_name, other in tasks:
        gains += list(evaluations(name, method) - evaluations(other_name, other))
    assert len(gains) == 10
    mean, low, high = runs.mean_interval(gains)
    positive = sum(gain > 0 for gain in gains)
    text = " ".join(read_page("results/own_goals_details").split())
    assert f"{mean:.3f} [{low:.3f}, {high:.3f}], in {positive} of 10" in text


def test_settings_of_the_page_are_those_of_the_table(capsys):
    path = str(RESULTS / "goals_tuning_runs.csv")
    table.main(table.Args(from_csv=path, search=True, measure="auc"))
    text = read_page("results/own_goals_details")
    shown = capsys.readouterr().out.splitlines()[2:]
    assert len(shown) == 19
    for line in shown:
        label, _, _, *ranked = line.strip("| ").split(" | ")
        cells = [cell.removeprefix("coef") for cell in ranked]
        assert f"| {label} | {' | '.join(cells)} |" in text


def test_rows_are_written_for_later(tmp_path, capsys):
    for seed in (1, 2, 3):
        control_run(tmp_path / "runs", seed, [0.1 * seed], env_ids=["Easy", "Hard"])
    path = str(tmp_path / "rows.csv")
    table.main(table.Args(runs=(str(tmp_path / "runs"),), csv=path))
    first = capsys.readouterr().out
    table.main(table.Args(from_csv=path))
    assert capsys.readouterr().out == first and "| Easy | Hard |" in first
    assert "--seed 1 2 3" in (tmp_path / "rows.csv").read_text()
    args = table.Args(from_csv=path, csv=str(tmp_path / "again.csv"))
    assert "leave out --from-csv" in refusal(table.main, args)


def test_rows_that_are_no_seeds_are_refused():
    """A setting that a search ran at several lengths; rows of other tools."""
    for name, line in (
        ("fourrooms_tuning_runs", "two runs are .*'seed': 101}; give those of one task and length"),
        ("crowd", ".* is of another tool"),
    ):
        args = table.Args(from_csv=str(RESULTS / f"{name}.csv"))
        assert re.fullmatch(line, refusal(table.main, args))
    args = table.Args(from_csv=str(RESULTS / "agreement.csv"), search=True, measure="auc")
    assert refusal(table.main, args).endswith("has no column timesteps, it is of no search")


# Figures


def test_runs_are_drawn_and_drawn_again(tmp_path):
    """OUT.csv, OUT_runs.csv, OUT_matrix.csv and their figures."""
    for name in ("isolated", "pr-uniform"):
        for seed in (1, 2):
            tasks = ["Easy", "Hard"]
            control_run(tmp_path / "runs", seed, [0.1, 0.2], 0.3, exp_name=name, env_ids=tasks)
    out = tmp_path / "x"
    plot.main(plot.Args(runs=(str(tmp_path / "runs"),), out=str(out), matrix=True))
    curves = pd.read_csv(f"{out}.csv", comment="#")
    assert list(curves) == ["env", "method", "timesteps", "mean", "ci_low", "ci_high", "seeds"]
    assert set(curves.env) == {"Easy", "Hard"}
    assert len(pd.read_csv(f"{out}_runs.csv", comment="#")) == 8
    matrix = pd.read_csv(f"{out}_matrix.csv", comment="#")
    matrix = matrix.set_index(["method", "agent", "task"])["mean"]
    assert matrix["isolated", 1].to_dict() == pytest.approx(
        {"Other": 0.9, "Easy": 0.4, "Hard": 0.4}
    )
    pictures = {path: plt.imread(path) for path in tmp_path.glob("*.png")}
    assert len(pictures) == 2
    plot.main(plot.Args(out=str(out), from_csv=True))
    assert all((plt.imread(path) == picture).all() for path, picture in pictures.items())
    line = f"--from-csv: there is no {tmp_path}/y.csv"
    assert refusal(plot.main, plot.Args(out=str(tmp_path / "y"), from_csv=True)) == line


def test_methods_on_different_tasks_have_a_matrix_each(tmp_path):
    """With a gap for a task on which a method was not evaluated."""
    control_run(tmp_path, 1, [0.1], exp_name="isolated")
    control_run(tmp_path, 1, [0.1], exp_name="pr-uniform", env_id="Hard")
    plot.main(plot.Args(runs=(str(tmp_path),), out=str(tmp_path / "x"), matrix=True))
    figure = plot.draw_matrix(runs.read_table(tmp_path / "x_matrix.csv"))
    cells = [[text.get_text() for text in axis.texts] for axis in figure.axes]
    assert ["nan" in of_method for of_method in cells] == [True, True]


def test_curves_are_labelled_by_what_runs_are_counted_in(tmp_path):
    """A control run of 200 steps is one of control, also beside language models."""
    for seed in (1, 2):
        control_run(tmp_path / "runs", seed, [0.1, 0.2])
        language_run(tmp_path / "runs", seed, "isolated-grpo", 0.5, 0.2)
    out = tmp_path / "x"
    plot.main(plot.Args(runs=(str(tmp_path / "runs"),), out=str(out)))
    figure = plot.draw(out.with_suffix(".csv"), out.with_suffix(".png"))
    labels = {axis.get_title(): axis.get_xlabel() for axis in figure.axes}
    assert labels.pop("Task") == "environment steps per agent (millions)"
    assert [*labels.values()] == ["steps"]


@pytest.mark.parametrize(("names", "agents"), [((0, 50), 0), ((0, 50), 1), (("none", "lie"), 2)])
def test_methods_are_compared_under_every_condition(names, agents, tmp_path, capsys):
    """Over the run and at its end, means of the agents that count; the same from the CSV file."""
    for name in names:
        for seed in (1, 2, 3):
            curve = [0.1, 0.2 * seed]
            control_run(tmp_path / "runs", seed, curve, exp_name=f"pr-surrogate-{name}")
    path = str(tmp_path / "x.csv")
    args = {"conditions": True, "agents": agents, "measure": "final"}
    table.main(table.Args(runs=(str(tmp_path / "runs"),), csv=path, **args))
    shown = capsys.readouterr().out
    bonus = 0 if agents == 1 else 0.01
    assert f"| PR-PPO, surrogate | {0.4 + bonus:.2f} [" in shown
    rows = pd.read_csv(path, comment="#", dtype={"condition": str})
    assert list(rows) == ["method", "condition", "seed", "auc", "final"]
    assert set(rows.condition) == set(map(str, names)) and set(rows.method) == {"pr-surrogate"}
    assert rows.final[:3].tolist() == pytest.approx([0.2 + bonus, 0.4 + bonus, 0.6 + bonus])
    assert rows.auc[0] == pytest.approx(0.15 + bonus)
    table.main(table.Args(from_csv=path, measure="final"))
    assert capsys.readouterr().out == shown


def test_conditions_are_in_order():
    names = ["opposite", "none", "random+boast", "0.5", "random", "10", "2"]
    expected = ["0.5", "2", "10", "none", "opposite", "random", "random+boast"]
    assert styles.order_conditions(names) == expected


@pytest.mark.parametrize("tool", ["table", "crowd"])
def test_runs_that_a_table_cannot_keep_apart_are_refused(tool, tmp_path):
    """One method and seed on two tasks; a row of both would be of neither. Nor names without a
    condition.
    """
    for stamp, task in enumerate(("Task", "Other")):
        control_run(tmp_path, 1, [0.1], stamp=stamp, exp_name="pr-2", env_id=task)
    args = {"runs": (str(tmp_path),)}
    args |= {"conditions": True} if tool == "table" else {"out": str(tmp_path / "out")}
    module = importlib.import_module(tool)
    assert refusal(module.main, module.Args(**args)).endswith("; give those of one task and length")
    shutil.rmtree(tmp_path)
    control_run(tmp_path, 1, [0.1], exp_name="isolated")
    message = refusal(module.main, module.Args(**args))
    assert message.startswith("--runs: --exp-name isolated has no ")


def test_runs_on_two_tasks_are_no_two_seeds_on_a_third(tmp_path):
    for stamp, task in enumerate(("Task", "Another")):
        control_run(tmp_path, 1, [0.1], stamp=stamp, env_id=task)
    folders = (str(tmp_path),)
    message = refusal(table.main, table.Args(runs=folders, task="Other"))
    assert message.endswith("; give those of one task and length")
    message = refusal(plot.make_matrix, runs.read_runs(folders))
    assert message.endswith("; give those of one task and length")


DRAWN_BY_TOOLS = ["sb3", "atari", "trpo_bound"]


@pytest.mark.parametrize("name", DRAWN_BY_TOOLS)
def test_committed_figures_come_from_committed_data(name, tmp_path, monkeypatch):
    """A figure of each kind, drawn again; a method has its name and colour in it, and curves lie in
    front of all intervals.
    """
    for path in RESULTS.glob(f"{name}*.csv"):
        shutil.copy(path, tmp_path)
    tool = bound if name == "trpo_bound" else plot
    drawings = []
    draw = tool.draw
    monkeypatch.setattr(tool, "draw", lambda *args: drawings.append(draw(*args)))
    tool.main(tool.Args(out=str(tmp_path / name), from_csv=True))
    for path in (RESULTS / f"{name}.png", *RESULTS.glob(f"{name}_matrix.png")):
        drawn = plt.imread(tmp_path / path.name)
        committed = plt.imread(path)
        assert drawn.shape == committed.shape
        assert np.abs(drawn - committed).mean() < 0.01
    (figure,) = drawings
    for axis in figure.axes:
        bands = [band.get_zorder() for band in axis.collections]
        assert max(bands, default=0) < min(line.get_zorder() for line in axis.lines)
    if tool is bound:
        return
    names = pd.read_csv(tmp_path / f"{name}.csv", comment="#").method.unique()
    (legend,) = figure.legends
    shown = {re.sub(r" \([^(]* seeds?\)$", "", text.get_text()) for text in legend.get_texts()}
    assert shown == {styles.find_method(method).label for method in names}


@pytest.mark.parametrize("name", figures.FIGURES)
def test_figures_of_the_pages_come_from_committed_data(name, tmp_path):
    """The committed picture is what the committed rows give, and a page shows it."""
    figures.main(figures.Args((name,), out=str(tmp_path)))
    drawn = plt.imread(tmp_path / f"{name}.png")
    committed = plt.imread(RESULTS / f"{name}.png")
    assert drawn.shape == committed.shape
    assert np.abs(drawn - committed).mean() < 0.01
    pages = (*PAGES, REPOSITORY / "README.md")
    assert any(f"benchmark/results/{name}.png)" in page.read_text() for page in pages)


def test_dots_are_seeds_means_and_intervals():
    """By hand; a line at the mean of isolated agents; differences are paired by seed and panel."""
    rows = []
    for panel, shift in (("second", 0.1), ("first", 0.2)):
        for seed, value in enumerate((0.2, 0.4, 0.6)):
            rows.append((panel, "isolated", seed, 0.1 * seed))
            rows.append((panel, "pr-uniform", seed, value + shift))
    rows = pd.DataFrame(rows, columns=["panel", "method", "seed", "value"])
    figure = figures.draw_dots(rows, figures.usual("pr-uniform", "isolated"), "x", "isolated")
    for axis, shift in zip(figure.axes, (0.1, 0.2), strict=True):
        seeds, interval, mean, *_, line = axis.lines
        assert list(seeds.get_xdata()) == pytest.approx([0.2 + shift, 0.4 + shift, 0.6 + shift])
        half = T2 * 0.2 / np.sqrt(3)
        limits = np.clip([0.4 + shift - half, 0.4 + shift + half], 0, 1)
        assert list(interval.get_xdata()) == pytest.approx(limits)
        assert list(mean.get_xdata()) == pytest.approx([0.4 + shift])
        assert line.get_xdata()[0] == pytest.approx(0.1)
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == [
        "PR-PPO, uniform",
        "isolated",
    ]
    gains = figures.subtract(rows, "isolated")
    assert list(dict.fromkeys(gains.panel)) == ["second", "first"]
    assert set(gains.method) == {"pr-uniform"}
    assert gains.value.tolist() == pytest.approx([0.3, 0.4, 0.5, 0.4, 0.5, 0.6])
    plt.close(figure)


def test_lines_have_their_names_at_their_ends():
    """In the colour of their method, apart from each other; conditions stand at equal distances."""
    values = {"pr-uniform": (0.1, 0.5), "fedavg-uniform": (0.3, 0.51)}
    rows = [
        ("", method, x, seed, value + 0.01 * seed)
        for method, of_method in values.items()
        for x, value in zip((4, 64), of_method, strict=True)
        for seed in (1, 2, 3)
    ]
    rows = pd.DataFrame(rows, columns=["panel", "method", "x", "seed", "value"])
    figure = figures.draw_lines(rows, figures.usual(*values), "levels", "return")
    (axis,) = figure.axes
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["4", "64"]
    for line, of_method in zip(axis.lines, values.values(), strict=True):
        assert list(line.get_ydata()) == pytest.approx([value + 0.02 for value in of_method])
    names = {text.get_text(): text for text in axis.texts}
    assert names.keys() == {"PR-PPO, uniform", "FedAvg, uniform"}
    assert names["PR-PPO, uniform"].get_color() == styles.METHODS["pr-uniform"].colour
    heights = [names[name].xy[1] for name in ("FedAvg, uniform", "PR-PPO, uniform")]
    low, high = axis.get_ylim()
    assert heights[0] - heights[1] >= 0.08 * (high - low) - 1e-9
    plt.close(figure)


def test_unknown_figures_are_named(tmp_path):
    line = refusal(figures.main, figures.Args(("nothing",), out=str(tmp_path)))
    assert line.startswith("nothing: no such figure; there are own_goals, ")


def test_every_result_is_shown():
    """By a link in a page, or as the data behind a figure that a page shows."""
    text = "".join(page.read_text() for page in (*PAGES, REPOSITORY / "README.md"))
    linked = {path.name for path in RESULTS.iterdir() if f"benchmark/results/{path.name}" in text}
    drawn = {name.removesuffix(".png") for name in linked if name.endswith(".png")}
    for path in RESULTS.iterdir():
        assert path.name in linked or path.stem in drawn, path.name


def test_files_of_other_tools_are_refused(tmp_path):
    """With the file and what it lacks."""
    cases = [
        (crowd, "liars", "agents"),
        (plot, "strength", "env"),
        (bound, "strength", "timesteps"),
    ]
    cases.append((zeroth, "fourrooms", "task"))
    for tool, name, column in cases:
        for path in RESULTS.glob(f"{name}*.csv"):
            shutil.copy(path, tmp_path / path.name.replace(name, "out"))
        args = tool.Args(out=str(tmp_path / "out"), from_csv=True)
        with pytest.raises(arguments.Damaged, match=rf"out(_runs)?\.csv: has no column {column}"):
            tool.main(args)


def test_a_method_has_one_name_and_one_colour():
    """Variants have the colour of their method with other dashes, unknown names another colour; the
    pages have the same names.
    """
    names = ["pr-uniform-4", "mine", "isolated", "pr-uniform", "yours", "pr-uniform-16"]
    drawn = styles.style_methods(names)
    assert list(drawn) == names
    assert [drawn[name].label for name in names[:2]] == ["PR-PPO, uniform, 4", "mine"]
    dashes = [drawn[name].dashes for name in ("pr-uniform", "pr-uniform-4", "pr-uniform-16")]
    assert dashes == ["-", "--", ":"]
    assert len({method.colour for method in drawn.values()}) == 4
    assert styles.find_method("pr-uniform-every1-8").label.endswith("after every iteration, 8")
    assert styles.find_method("pr-uniforms") == ("pr-uniforms", "", "-")
    labels = {method.label for method in styles.METHODS.values()}
    labels |= {"PR, self-preferred 0.6", "PR, self-preferred 0.2"}  # of PPO and of GRPO
    pattern = r"^\| (?:(?:PPO|GRPO), \w+ \| )?((?:isolated|FedAvg|PR)(?:(?! minus )[^|])*) \| \d"
    for page in PAGES:
        assert set(re.findall(pattern, page.read_text(), re.M)) <= labels, page.name
    tasks = ["MiniGrid-DoorKey-5x5-v0", "BeamRiderNoFrameskip-v4", "benchmark.goals:Goals-v0"]
    assert styles.name_task("+".join(tasks)) == "DoorKey-5x5+BeamRider+Goals"
    assert styles.name_task("my_tasks:Goals-v0") == "Goals"
    assert styles.name_task("runs/skills/train.jsonl, topic") == "skills, topic"


# Crowds and bounds


def crowd_run(root, name, seed, reached, summary=None):
    """A run whose agents reach a return of 0.8, and keep it, after these steps (0: never)."""
    folder = control_run(root, seed, [0.0] * 3, summary=summary, exp_name=name)
    metrics = []
    evaluations = []
    for iteration in (1, 2, 3):
        for agent, first in enumerate(reached):
            row = {"iteration": iteration, "agent": agent, "env_id": "Task"}
            value = 0.8 * (0 < first <= 100 * iteration)
            metrics.append(row | {"timesteps": 100 * iteration, "return_last_100": value})
            # All are good in the first evaluation, and the last decides
            value = 1.0 if iteration == 1 else 0.8 * (first > 0)
            if iteration != 2:
                row = {"iteration": iteration, "agent": agent, "task": "Task"}
                evaluations.append(row | {"mean_return": value, "ci95": 0})
    pd.DataFrame(metrics).to_csv(folder / "metrics.csv", index=False)
    pd.DataFrame(evaluations).to_csv(folder / "evaluations.csv", index=False)


def test_isolated_agents_are_crowds_of_every_size(tmp_path):
    """Who learned, and when four fifths had, in every crowd; agents that never learn come last."""
    crowd_run(tmp_path, "isolated-4", 1, [100, 0, 200, 300])
    crowd_run(tmp_path, "pr-uniform-5", 2, [300, 200, 100, 0, 100])
    crowd_run(tmp_path, "pr-reward-2", 3, [100, 100], {"diverged": [1]})
    rows = crowd.make_rows(runs.read_runs((str(tmp_path),))).set_index(
        ["method", "agents", "first_agent"]
    )
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
    assert rows.loc["isolated", 2].evaluation.tolist() == pytest.approx([0.4, 0.8])
    assert rows.loc["pr-reward", 2].share.tolist() == [0.5]
    assert rows.loc["pr-reward", 2].evaluation.isna().all()
    seeds = crowd.average_by_seed(rows.reset_index()).set_index(["method", "agents"])
    assert seeds.loc["isolated", "share"].tolist() == [0.75] * 3
    # Of 100, 200, 300 and never: in the middle
    assert seeds.loc[("isolated", 1), "steps"] == 250
    assert crowd.sizes_of_crowds("isolated", 12) == [1, 2, 4, 12]
    assert crowd.sizes_of_crowds("pr-uniform", 4) == [4]


def test_a_run_is_one_trial_however_many_agents_succeed():
    """Five runs whose agents all learn: not the interval of forty agents."""
    assert crowd.format_share(pd.Series([1.0] * 5)) == "1.00 [0.57, 1.00]"


def test_movements_are_the_largest_of_an_iterations_agents(tmp_path):
    """bound.py keeps who moved most, the smallest bound, and the share of agents within theirs."""
    folder = control_run(tmp_path, 3, [0.0, 0.25], exp_name="bounded")
    metrics = pd.read_csv(folder / "metrics.csv")
    columns = {"tv_update": [0.1, 0.3, 0.2, 0.1], "tv_reference": [0.4, 0.3, 0.2, 0.1]}
    columns |= {"epsilon": [0.005, 0.01, 0.02, 0.015], "bound": [0.2, 0.25, 0.2, 0.3]}
    metrics.assign(**columns).to_csv(folder / "metrics.csv", index=False)
    rows = bound.make_rows(runs.read_runs((str(tmp_path),)))
    assert rows.to_dict("list") == {
        "method": ["bounded", "bounded"],
        "seed": [3, 3],
        "timesteps": [100, 200],
        "tv_update": [0.3, 0.2],
        "tv_reference": [0.4, 0.2],
        "epsilon": [0.005, 0.015],
        "bound": [0.2, 0.2],
        "within": [0.5, 1.0],
        "return_last_100": pytest.approx([0.01, 0.26]),
    }


@pytest.mark.parametrize("tool", [bound, crowd, plot, table, text_worlds, zeroth])
def test_wrong_flags_of_tools_are_named(tool):
    """As in the scripts, with exit code 2; what cannot be done ends with 1."""
    message = refusal(arguments.read_flags, tool.Args, ["--nothing"])
    assert "Unrecognized options: --nothing" in message
    with pytest.raises(SystemExit, match="^--runs nowhere: no finished run in there$") as end:
        tool.main(tool.Args(runs=("nowhere",)))
    assert end.value.code == str(end.value)  # which Python prints, and ends with 1
