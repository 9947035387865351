"""benchmark/confirm.py: paired differences, Holm's adjustment, verdicts."""

import importlib
import re
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from fabricated import control_run
from helpers import REPOSITORY, refusal

sys.path.insert(0, str(REPOSITORY / "benchmark"))
confirm = importlib.import_module("confirm")
runs = importlib.import_module("runs")
REASON = "an agent diverged, or was not evaluated on its task"


def write_rows(path, scores, agents=((0, 0.0),), env="x"):
    """Rows per run and agent: scores by method and seed, to which an agent's offset is added; over
    the run each is half of it.
    """
    rows = []
    for method, of_method in scores.items():
        for seed, score in of_method.items():
            for agent, offset in agents:
                row = {"env": env, "method": method, "seed": seed, "agent": agent}
                value = score + offset
                rows.append(row | {"evaluation": value, "auc": value / 2})
    pd.DataFrame(rows).to_csv(path, index=False)
    return str(path)


def report(capsys, **options):
    """What the tool prints: the cells by endpoint and rival, and the lines that are no table."""
    confirm.main(confirm.Args(**options))
    tables = {}
    lines = []
    for line in capsys.readouterr().out.splitlines():
        cells = split_cells(line)
        if line.startswith("| ---") or not line:
            continue
        if not line.startswith("|"):
            lines.append(line)
        elif cells[-1] == "verdict":
            table = tables.setdefault(cells[0], {})
        else:
            table[cells[0]] = cells[1:]
    return tables, lines


def split_cells(line):
    """The cells of a table's row."""
    return [cell.strip() for cell in line.strip("|").split("|")]


def is_rounded(shown, number):
    """Whether a page shows this number, rounded to some places."""
    decimals = len(shown.partition(".")[2])
    return abs(float(shown) - number) <= 0.5 * 10**-decimals + 1e-9


def seeds_from(first, values):
    """Values by seed."""
    return dict(enumerate(values, first))


def test_holm_by_hand():
    """Ordered p times 4, 3, 2, 1; none below the one before; at most 1."""
    adjusted = confirm.adjust_by_holm([0.04, 0.01, 0.03, 0.5])
    assert adjusted.tolist() == pytest.approx([0.09, 0.04, 0.09, 0.5])
    assert confirm.adjust_by_holm([0.02, 0.02]).tolist() == pytest.approx([0.04, 0.04])
    assert confirm.adjust_by_holm([0.6, 0.7]).tolist() == [1, 1]
    # A test that could not be made is one of the family
    assert confirm.adjust_by_holm([0.02, np.nan]).tolist() == pytest.approx([0.04, 1])
    assert confirm.adjust_by_holm([]).tolist() == []


def test_holm_rejects_as_its_stepwise_rule():
    """The definition: go up the ordered p-values until one is above alpha / (m - i + 1)."""
    generator = np.random.default_rng(0)
    some = 0
    for _ in range(300):
        p = generator.uniform(size=5) ** 4
        rejected = set()
        for i, j in enumerate(np.argsort(p)):
            if p[j] > 0.05 / (5 - i):
                break
            rejected.add(j)
        assert set(np.flatnonzero(confirm.adjust_by_holm(p) <= 0.05)) == rejected
        some += 0 < len(rejected) < 5
    assert some > 100


def test_p_values_are_those_of_the_paired_t_test():
    lead = np.array([0.5, 0.3, 0.9, 0.4])
    rival = np.array([0.1, 0.4, 0.6, 0.3])
    expected = scipy.stats.ttest_rel(lead, rival).pvalue
    assert confirm.compute_p_value(lead - rival) == pytest.approx(expected)
    # Differences of -1 and 3: t = 1 / 2 / 1, whose two tails of Cauchy's distribution are these
    assert confirm.compute_p_value(np.array([-1.0, 3.0])) == pytest.approx(
        1 - 2 * np.arctan(0.5) / np.pi
    )
    assert confirm.compute_p_value(np.zeros(5)) == 1
    assert np.isnan(confirm.compute_p_value(np.array([0.1])))
    assert np.isnan(confirm.compute_p_value(np.array([])))


@pytest.mark.parametrize(
    ("interval", "adjusted", "significance", "verdict"),
    [
        ((0.2, 0.1, 0.3), 0.049, 0.05, "above"),
        ((-0.2, -0.3, -0.1), 0.049, 0.05, "below"),
        ((0.2, 0.1, 0.3), 0.05, 0.05, "undecided"),  # before the adjustment it was
        ((0.2, 0.1, 0.3), 0.049, 0.025, "undecided"),
        ((0.2, 0.1, 0.3), 0.024, 0.025, "above"),
        ((0.03, 0.02, 0.04), 0.001, 0.05, "above"),  # however little
        ((0.03, 0.02, 0.04), 0.03, 0.025, "equal"),
        ((0.0, -0.05, 0.05), 0.9, 0.05, "equal"),
        ((0.0, -0.051, 0.04), 0.9, 0.05, "undecided"),
        ((0.0, -0.04, 0.051), 0.9, 0.05, "undecided"),
        ((0.0, np.nan, np.nan), 1.0, 0.05, "undecided"),
    ],
)
def test_verdicts(interval, adjusted, significance, verdict):
    assert confirm.judge(*interval, adjusted, significance) == verdict


def test_a_second_look_asks_for_more(tmp_path, capsys):
    """A difference with a p-value between both levels is above by one of them only."""
    scores = {"pr-reward": seeds_from(6, [0.5, 0.6, 0.9, 0.8])}
    scores["isolated"] = seeds_from(6, [0.2, 0.3, 0.2, 0.6])
    path = write_rows(tmp_path / "x.csv", scores)
    options = {"from_csv": (path,), "lead": "pr-reward"}
    verdicts = {}
    for significance in (0.05, 0.025):
        tables, _ = report(capsys, **options, significance=significance)
        *_, p, verdicts[significance] = tables["return after training"]["isolated"]
        assert 0.025 < float(p) < 0.05
    assert verdicts == {0.05: "above", 0.025: "undecided"}
    line = "--significance 1.5: a probability between 0 and 1"
    assert refusal(confirm.main, confirm.Args(**options, significance=1.5)) == line


def test_rivals_are_compared_on_common_seeds(tmp_path, capsys):
    """The lead has twenty seeds, one rival ten; intervals, signs and p-values by hand."""
    generator = np.random.default_rng(1)
    lead = generator.uniform(size=20)
    near = lead + generator.normal(scale=0.01, size=20)
    far = lead[:10] - generator.uniform(0.0, 0.6, size=10)
    scores = {"pr-reward": seeds_from(6, lead), "fedavg-reward": seeds_from(6, near)}
    scores["isolated"] = seeds_from(6, far)
    path = write_rows(tmp_path / "x.csv", scores)
    tables, lines = report(capsys, from_csv=(path,), lead="pr-reward")
    table = tables["return after training"]
    assert list(table) == ["isolated", "FedAvg, reward"]
    gains = lead[:10] - far
    p = [scipy.stats.ttest_rel(lead[:10], far).pvalue, scipy.stats.ttest_rel(lead, near).pvalue]
    half = scipy.stats.t.ppf(0.975, 9) * scipy.stats.sem(gains)
    mean = gains.mean()
    assert p[0] < p[1] and p[1] > 0.05
    assert table["isolated"] == [
        f"{mean:.3f} [{mean - half:.3f}, {mean + half:.3f}]",
        f"{(gains > 0).sum()} of 10",
        f"{p[0]:.4f}",
        f"{2 * p[0]:.4f}",
        "above",
    ]
    assert table["FedAvg, reward"][1] == f"{(lead > near).sum()} of 20"
    assert table["FedAvg, reward"][2:] == [f"{p[1]:.4f}", f"{p[1]:.4f}", "equal"]
    # Half of it over the run
    assert tables["return over the run"]["isolated"][0].startswith(f"{mean / 2:.3f} [")
    seeds = " ".join(map(str, range(16, 26)))
    assert lines[1:] == [f"isolated has no run of seed {seeds}, PR-PPO, reward has."]


def test_ties_and_seeds_without_a_return_are_said(tmp_path, capsys):
    """A tie is no positive difference; a seed that has no return, or is missing, is named."""
    scores = {"pr-reward": seeds_from(6, [0.5, 0.7, np.nan, 0.9])}
    scores["isolated"] = seeds_from(6, [0.5, 0.7, 0.1, 0.9])
    scores["pr-uniform"] = seeds_from(7, [0.2, 0.3, 0.5])
    scores["fedavg-uniform"] = {9: 0.1}
    path = write_rows(tmp_path / "x.csv", scores, agents=((0, 0.0), (1, 0.1)))
    tables, lines = report(capsys, from_csv=(path,), lead="pr-reward")
    table = tables["return after training"]
    assert table["isolated"] == ["0.000 [0.000, 0.000]", "0 of 3", "1.0000", "1.0000", "equal"]
    assert table["PR-PPO, uniform"][1] == "2 of 2"
    assert table["FedAvg, uniform"] == ["0.800 [-, -]", "1 of 1", "-", "1.0000", "undecided"]
    assert "FedAvg, uniform has no run of seed 6 7 8, PR-PPO, reward has." in lines
    assert "PR-PPO, uniform has no run of seed 6, PR-PPO, reward has." in lines
    for name in tables:
        assert f"PR-PPO, reward has no {name} in seed 8: {REASON}." in lines
    assert len(lines) == 1 + 2 + 3
    # The other way round
    tables, lines = report(capsys, from_csv=(path,), lead="fedavg-uniform", seeds=(9,))
    assert tables["return after training"]["isolated"][:2] == ["-0.800 [-, -]", "0 of 1"]
    assert lines[1:] == []
    line = "--seeds 10 11: there is no such run"
    assert refusal(confirm.main, confirm.Args(from_csv=(path,), seeds=(9, 10, 11))) == line
    line = "--lead nobody: x has no run of it"
    assert refusal(confirm.main, confirm.Args(from_csv=(path,), lead="nobody")) == line


def test_methods_may_be_in_several_files(tmp_path, capsys):
    """As in one; Holm's adjustment is over those that are asked for."""
    scores = {"pr-reward": seeds_from(6, [0.5, 0.6, 0.9, 0.8])}
    scores["pr-uniform"] = seeds_from(6, [0.2, 0.3, 0.2, 0.6])
    scores["isolated"] = seeds_from(6, [0.1, 0.3, 0.4, 0.6])
    whole = write_rows(tmp_path / "whole.csv", scores)
    first = write_rows(tmp_path / "first.csv", {"pr-uniform": scores.pop("pr-uniform")})
    second = write_rows(tmp_path / "second.csv", scores)
    options = {"lead": "pr-reward", "hardest": 0}
    of_three, _ = report(capsys, from_csv=(whole,), **options)
    assert report(capsys, from_csv=(first, second), **options)[0] == of_three
    methods = ("pr-reward", "pr-un*")
    of_two, _ = report(capsys, from_csv=(first, second), methods=methods, **options)
    cells = of_two["return after training"]["PR-PPO, uniform"]
    assert cells[2] == cells[3] == of_three["return after training"]["PR-PPO, uniform"][2]
    assert len(of_two["return after training"]) == 1
    args = confirm.Args(from_csv=(first, whole), **options)
    assert "two runs are" in refusal(confirm.main, args)


def test_the_hardest_agent_is_that_of_isolated_runs(tmp_path, capsys):
    """Lowest after training, averaged over seeds; of two that are equal, over the run."""
    rows = []
    returns = {  # of each agent after training and over the run
        ("isolated", 6): [(0.9, 0.8), (0.0, 0.3), (0.25, 0.1)],
        ("isolated", 7): [(0.9, 0.8), (0.5, 0.3), (0.25, 0.0)],
        ("pr-reward", 6): [(0.0, 0.0), (0.8, 0.3), (0.6, 0.3)],
        ("pr-reward", 7): [(0.0, 0.0), (0.9, 0.3), (0.9, 0.3)],
    }
    for (method, seed), of_run in returns.items():
        for agent, (evaluation, auc) in enumerate(of_run):
            row = {"env": "x", "method": method, "seed": seed, "agent": agent}
            rows.append(row | {"evaluation": evaluation, "auc": auc})
    frame = pd.DataFrame(rows)
    frame.to_csv(tmp_path / "x.csv", index=False)
    options = {"from_csv": (str(tmp_path / "x.csv"),), "lead": "pr-reward"}
    tables, _ = report(capsys, **options)
    table = tables["return of agent 2, the hardest"]
    assert table["isolated"][0].startswith("0.500 [")
    tables, _ = report(capsys, **options, hardest=1)
    assert tables["return of agent 1, the hardest"]["isolated"][0].startswith("0.600 [")
    # Agent 1 is hardest after training on seed 6 alone
    tables, _ = report(capsys, **options, seeds=(6,))
    assert "return of agent 1, the hardest" in tables
    line = "--hardest 3: x has no such agent"
    assert refusal(confirm.main, confirm.Args(**options, hardest=3)) == line
    frame[frame.method != "isolated"].to_csv(tmp_path / "x.csv", index=False)
    assert "no isolated run" in refusal(confirm.main, confirm.Args(**options))


def test_only_some_agents_count(tmp_path, capsys):
    """Means and the hardest agent are theirs; an agent that nobody has is refused."""
    scores = {"pr-reward": {6: 0.5, 7: 0.6}, "isolated": {6: 0.4, 7: 0.3}}
    path = write_rows(tmp_path / "x.csv", scores, agents=((0, 0.0), (1, -0.2), (2, 0.1)))
    frame = pd.read_csv(path)
    frame.loc[(frame.agent == 2) & (frame.method == "isolated"), "evaluation"] = 0.0
    frame.to_csv(path, index=False)
    options = {"from_csv": (path,), "lead": "pr-reward"}
    tables, _ = report(capsys, **options, agents=(2,))
    assert tables["return after training"]["isolated"][0].startswith("0.650 [")
    assert tables["return of agent 2, the hardest"] == tables["return after training"]
    tables, _ = report(capsys, **options, agents=(0, 1))
    assert tables["return after training"]["isolated"][0].startswith("0.200 [")
    assert "return of agent 1, the hardest" in tables
    args = confirm.Args(**options, csv=str(tmp_path / "y.csv"))
    assert "leave out --from-csv" in refusal(confirm.main, args)
    args = confirm.Args(**options, agents=(1, 3, 5))
    assert refusal(confirm.main, args) == "--agents 3 5: there is no such agent"


def test_rows_per_agent_are_made_of_runs(tmp_path, capsys):
    """Two agents each; over the run from where both have a return; a diverged one has none."""
    for seed in (6, 7, 8):
        curve = [np.nan, 0.1 * seed, 0.2]
        of_run = {"exp_name": "pr-reward", "env_ids": ["A", "B"]}
        folder = control_run(tmp_path, seed, curve, 0.1 * seed, **of_run)
        metrics = pd.read_csv(folder / "metrics.csv")
        metrics.loc[1, "return_last_100"] = 0.9  # agent 1 has finished an episode, agent 0 not
        metrics.to_csv(folder / "metrics.csv", index=False)
        control_run(tmp_path, seed, [0.1, 0.1], 0.05, exp_name="isolated", env_ids=["A", "B"])
    summary = {"diverged": [1]}
    options = {"exp_name": "pr-uniform", "env_ids": ["A", "B"], "summary": summary}
    control_run(tmp_path, 6, [0.1, 0.1], 0.05, **options)
    path = str(tmp_path / "rows.csv")
    tables, lines = report(capsys, runs=(str(tmp_path),), lead="pr-reward", csv=path)
    rows = pd.read_csv(path, comment="#").set_index(["method", "seed", "agent"])
    assert rows.evaluation["pr-reward", 7].tolist() == pytest.approx([0.7, 0.8])
    assert rows.auc["pr-reward", 7].tolist() == pytest.approx([0.45, 0.47])
    assert rows.loc["pr-uniform", 6, 1][["evaluation", "auc"]].isna().all()
    # As in the table of methods
    by_run = runs.make_rows(runs.group_runs(runs.read_runs((str(tmp_path),)), per_task=False))
    by_run = by_run.set_index(["method", "seed"])
    means = rows.groupby(["method", "seed"])[["evaluation", "auc"]].mean()
    finished = means.drop("pr-uniform", level="method")
    assert finished.evaluation.to_dict() == pytest.approx(
        by_run.evaluation[finished.index].to_dict()
    )
    assert finished.auc.to_dict() == pytest.approx(
        by_run.mean_training_return[finished.index].to_dict()
    )
    table = tables["return after training"]
    assert table["isolated"][0].startswith("0.650 [")
    for endpoint in ("return after training", "return over the run"):
        unpaired = ["- [-, -]", "0 of 0", "-", "1.0000", "undecided"]
        assert tables[endpoint]["PR-PPO, uniform"] == unpaired
    assert f"PR-PPO, uniform has no return after training in seed 6: {REASON}." in lines
    # From the file it is the same
    assert report(capsys, from_csv=(path,), lead="pr-reward") == (tables, lines)


def test_runs_may_count_iterations_alone(tmp_path):
    """As those of Par-S2ZPO: over the run from where both agents have a return."""
    folder = control_run(tmp_path, 6, [np.nan, 0.1, 0.2])
    metrics = pd.read_csv(folder / "metrics.csv").drop(columns="timesteps")
    metrics.loc[1, "return_last_100"] = 0.9
    metrics.to_csv(folder / "metrics.csv", index=False)
    rows = confirm.make_agent_rows(runs.read_runs((str(tmp_path),)))
    assert rows.auc.tolist() == pytest.approx([0.15, 0.17])


def test_what_cannot_be_compared_is_refused(tmp_path):
    """In one line: nobody to compare with, other agents, rows twice, words, nothing, other runs."""
    path = tmp_path / "x.csv"

    def give(rows, **options):
        path.write_text("env,method,seed,agent,evaluation,auc\n" + "\n".join(rows) + "\n")
        return confirm.Args(from_csv=(str(path),), lead="pr-reward", **options)

    rows = [f"x,{method},6,{i},0.1,0.1" for method in ("pr-reward", "isolated") for i in (0, 1)]
    assert "no other method" in refusal(confirm.main, give(rows[:2], hardest=0))
    assert "isolated, seed 6" in refusal(confirm.main, give(rows[:3]))
    assert "two runs are" in refusal(confirm.main, give([*rows, rows[3]]))
    assert "has no run" in refusal(confirm.main, give([]))
    with pytest.raises(SystemExit, match=r"x\.csv: cannot be read .*much"):
        confirm.main(give([*rows[:3], "x,isolated,6,1,much,0.1"]))
    metrics = control_run(tmp_path, 6, [0.1, 0.2], exp_name="pr-reward") / "metrics.csv"
    names = {"return_last_100": "reward", "timesteps": "step"}  # as of language models
    pd.read_csv(metrics).rename(columns=names).to_csv(metrics, index=False)
    args = confirm.Args(runs=(str(tmp_path),), lead="pr-reward")
    assert "has no return_last_100" in refusal(confirm.main, args)


# The gate and what has one part of it only, on their common seeds
PARTS = (
    ["confirm_goals", "confirm_goals_parts"],
    {
        "methods": ("pr-gate-linear", "pr-means-linear", "pr-uniform-linear"),
        "seeds": tuple(range(6, 16)),
    },
)


def read_rows(*data, **options):
    """The rows of results files, and the names of their methods by label."""
    paths = tuple(str(REPOSITORY / f"benchmark/results/{name}.csv") for name in data)
    rows = confirm.read_rows(confirm.Args(from_csv=paths, **options))
    return rows, {confirm.find_method(name).label: name for name in set(rows.method)}


def find_table(page, columns, labels):
    """The cells of a page's table by label and column: the one with these columns and labels."""
    text = (REPOSITORY / f"docs/results/{page}.md").read_text()
    for head, lines in re.findall(r"^(\|.*)\n\| ---.*\n((?:\|.*\n)+)", text, re.M):
        shown = {}
        for cells in map(split_cells, lines.splitlines()):
            shown[cells[0]] = dict(zip(split_cells(head), cells, strict=True))
        if set(shown) == set(labels) and set(columns) <= set(split_cells(head)):
            return shown
    pytest.fail("no such table")


def adjust_p_values(gains):
    """Holm's p-values of some paired differences."""
    return confirm.adjust_by_holm([confirm.compute_p_value(gain.to_numpy()) for gain in gains])


def check_interval(shown, interval):
    """A page shows a mean and its interval, rounded."""
    for text, number in zip(re.findall(r"-?[\d.]+", shown), interval, strict=True):
        assert is_rounded(text, number), shown


@pytest.mark.parametrize(
    ("page", "data", "options", "significance"),
    [
        ("confirmation", ["confirm_goals"], {}, 0.05),
        ("confirmation_skills", ["confirm_skills"], {}, 0.016),
        ("confirmation_doorkey", ["confirm_doorkey"], {}, 0.016),
        ("confirmation_unlock", ["confirm_unlock"], {}, 0.016),
        ("gate", *PARTS, 0.05),
    ],
)
def test_pages_show_the_differences_of_their_rows(page, data, options, significance):
    """Every rival's row of the primary endpoint: difference, interval, adjusted p, verdict."""
    rows, labels = read_rows(*data, **options)
    shown = find_table(page, ["gated minus it", "p, Holm", "verdict"], labels)
    after, *_ = confirm.make_endpoints(rows, hardest=0)
    labels = {label: name for label, name in labels.items() if name != "pr-gate-linear"}
    gains = [(after["pr-gate-linear"] - after[name]).dropna() for name in labels.values()]
    for label, of_rival, p in zip(labels, gains, adjust_p_values(gains), strict=True):
        interval = runs.mean_interval(of_rival)
        check_interval(shown[label]["gated minus it"], interval)
        if shown[label]["p, Holm"].startswith("<"):
            assert p < float(shown[label]["p, Holm"][1:])
        else:
            assert is_rounded(shown[label]["p, Holm"], p), label
        assert shown[label]["verdict"] == confirm.judge(*interval, p, significance)


ALL = [0, 1, 2, 3]
CARS = {"mean of four cars": ALL, "weak car": [3]}
HOPPERS = {"mean of four": ALL, "× 0.5": [0], "× 1.25": [3], "over the run, mean of four": ALL}
CHEETAHS = {"mean of four": ALL, "1 m/s": [0], "4 m/s": [3], "over the run, mean of four": ALL}
NEWCOMERS = {"newcomer": [3], "the three trained": [0, 1, 2]}
HOPPING_NEWCOMERS = {"newcomer, after training": [3], "newcomer, over the run": [3]}
HOPPING_NEWCOMERS |= {"the three trained, after training": [0, 1, 2]}


@pytest.mark.parametrize(
    ("page", "data", "options", "columns"),
    [
        ("gate", *PARTS, {"return": ALL}),
        ("confirmation", ["confirm_goals"], {}, {"return": ALL}),
        ("confirmation_skills", ["confirm_skills"], {}, {"return": range(6)}),
        ("confirmation_doorkey", ["confirm_doorkey"], {}, {"return": range(3)}),
        ("confirmation_unlock", ["confirm_unlock"], {}, {"return": ALL}),
        ("bodies", ["mujoco_cars"], {}, CARS),
        ("bodies", ["mujoco_cars_fresh"], {}, CARS),
        ("robots", ["mujoco_hoppers"], {}, HOPPERS),
        ("robots", ["mujoco_cheetahs"], {}, CHEETAHS),
        ("newcomers", ["mujoco_newcomers_cars"], {}, NEWCOMERS),
        ("newcomers", ["mujoco_newcomers_hoppers"], {}, HOPPING_NEWCOMERS),
    ],
)
def test_pages_show_the_returns_of_their_rows(page, data, options, columns):
    """Means over some agents, with intervals, in the table that has a row of each method."""
    rows, labels = read_rows(*data, **options)
    shown = find_table(page, columns, labels)
    for column, agents in columns.items():
        measure = "auc" if "over the run" in column else "evaluation"
        returns = rows[rows.agent.isin(agents)].groupby(["method", "seed"])[measure].mean()
        for label, name in labels.items():
            check_interval(shown[label][column], runs.mean_interval(returns[name]))


@pytest.mark.parametrize(
    ("data", "lead", "rivals"),
    [
        (["hoppers"], "pr-uniform", ["isolated", "fedavg-uniform"]),
        (["hoppers"], "isolated", ["fedavg-uniform"]),
        (["cheetahs"], "pr-gate-linear", ["isolated", "fedavg-uniform", "fedper-uniform"]),
        (["cheetahs"], "isolated", ["fedavg-uniform"]),
        (
            ["hoppers", "cheetahs", "private_critics"],
            "fedavg-private-critics",
            ["isolated", "fedavg-uniform"],
        ),
        (
            ["hoppers", "cheetahs", "common_units"],
            "fedavg-common-units",
            ["isolated", "fedavg-uniform"],
        ),
    ],
)
def test_robots_have_the_differences_of_their_rows(data, lead, rivals):
    """The page of robots has each, in return after training, or its opposite."""
    text = " ".join((REPOSITORY / "docs/results/robots.md").read_text().split())
    rows, _ = read_rows(*(f"mujoco_{name}" for name in data))
    for _, of_task in rows.groupby("env"):
        after, *_ = confirm.make_endpoints(of_task, hardest=3)
        for rival in rivals:
            mean, low, high = runs.mean_interval((after[lead] - after[rival]).to_numpy())
            difference = f"{mean:.0f} [{low:.0f}, {high:.0f}]"
            opposite = f"{-mean:.0f} [{-high:.0f}, {-low:.0f}]"
            assert difference in text or opposite in text


def test_equal_networks_have_the_differences_of_their_rows():
    """Each mixture minus both averages, with Holm's adjustment over these."""
    seeds = tuple(range(6, 16))  # FedAvg by returns has more
    rows, labels = read_rows("confirm_skills", "confirm_skills_equal", seeds=seeds)
    labels = {label: name for label, name in labels.items() if name.endswith("linear-equal")}
    assert len(labels) == 2
    columns = ["return", "minus FedAvg, uniform", "minus FedAvg, reward"]
    shown = find_table("confirmation_skills_details", columns, labels)
    after, *_ = confirm.make_endpoints(rows, hardest=4)
    for label, name in labels.items():
        check_interval(shown[label]["return"], runs.mean_interval(after[name]))
        gains = [after[name] - after[rival] for rival in ("fedavg-uniform", "fedavg-reward")]
        for column, of_rival, p in zip(columns[1:], gains, adjust_p_values(gains), strict=True):
            interval = runs.mean_interval(of_rival)
            difference, verdict = shown[label][column].rsplit(", ", 1)
            check_interval(difference, interval)
            assert verdict == confirm.judge(*interval, p, 0.05)
            assert is_rounded(shown[label][f"p, {column.rsplit(' ', 1)[1]}"], p)


def test_rounds_of_both_intervals_have_the_differences_of_their_rows():
    """The gate minus averages with each, and 16 minus 4 of each method, with Holm's adjustment."""
    rows, _ = read_rows("confirm_skills", "confirm_skills_equal")
    after, *_ = confirm.make_endpoints(rows, hardest=4)
    gains = [
        after["pr-gate-linear-equal"] - after["fedavg-uniform-4"],
        after["pr-gate-linear-16"] - after["fedavg-uniform"],
        after["fedavg-uniform"] - after["fedavg-uniform-4"],
        after["pr-gate-linear-16"] - after["pr-gate-linear-equal"],
    ]
    text = (REPOSITORY / "docs/results/confirmation_skills_details.md").read_text()
    for gain, p in zip(gains, adjust_p_values(gains), strict=True):
        mean, low, high = runs.mean_interval(gain)
        verdict = confirm.judge(mean, low, high, p, 0.05)
        shown = f"p = {p:.2g}" if p > 0.0001 else "p < 0.0001"
        assert f"{mean:.2f} [{low:.2f}, {high:.2f}], {verdict}, {shown}" in text


@pytest.mark.parametrize("method", ["fedavg-uniform", "fedavg-reward"])
def test_averaging_agents_have_the_shown_returns_on_both_goals(method):
    """Agents 2 and 4 want the green goal, 3 and 5 the blue one."""
    text = " ".join((REPOSITORY / "docs/results/confirmation_skills.md").read_text().split())
    path = REPOSITORY / "benchmark/results/confirm_skills_goals.csv"
    rows = pd.read_csv(path, comment="#").query(f"method == '{method}'")
    is_own = rows.goal == np.where(rows.agent % 2, "blue", "green")
    with_own = rows[is_own].groupby("seed").evaluation.mean()
    with_other = rows[~is_own].groupby("seed").evaluation.mean()
    assert len(with_own) == 5
    for returns in (with_own, with_other, with_own - with_other):
        mean, low, high = runs.mean_interval(returns.to_numpy())
        assert f"{mean:.2f} [{low:.2f}, {high:.2f}]" in text


@pytest.mark.parametrize("tool", ["confirm", "table"])
def test_a_reader_that_has_seen_enough_gets_no_traceback(tool, tmp_path):
    """As `| head -1`, on a table that is longer than a pipe holds."""
    scores = {name: dict.fromkeys(range(3), 0.5) for name in ["pr-gate-linear", "isolated"]}
    scores |= {f"rival-{k}" * 100: dict.fromkeys(range(3), 0.5) for k in range(200)}
    path = write_rows(tmp_path / "rows.csv", scores)
    if tool == "table":
        pd.read_csv(path).drop(columns="agent").to_csv(path, index=False)
    words = [sys.executable, REPOSITORY / "benchmark" / f"{tool}.py", "--from-csv", path]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
