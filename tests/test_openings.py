"""benchmark/openings.py: agents that differ in how a summary begins."""

import importlib
import json
import sys

import pandas as pd
import pytest
from fabricated import write_run
from helpers import REPOSITORY

import prpo_llm

sys.path.insert(0, str(REPOSITORY / "benchmark"))
openings = importlib.import_module("openings")

BEGINNINGS = {
    "Returns the number of rows.": "verb",
    "Compute a hash": "verb",
    "`Get` a name": "verb",
    "A function that adds two numbers.": "article",
    "An image": "article",
    "This function adds.": "this",
    " This.": "this",
    "Implementation of a list": None,
    "returns nothing": None,
    "Thistle": None,
    "The rows": None,
    "...": None,
    "": None,
}


@pytest.mark.parametrize("are_messages", [False, True])
def test_an_opening_pays_its_agent_only(are_messages):
    completions = [*BEGINNINGS]
    if are_messages:
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    for name in openings.OPENINGS:
        rewards = getattr(openings, name)(completions=completions, references=[], other=[])
        assert rewards == [float(opening == name) for opening in BEGINNINGS.values()]


def test_the_task_is_common_and_openings_are_not(tmp_path):
    path = tmp_path / "new" / "weights.csv"
    openings.write_weights(path)
    rewards = ("rouge", *(f"benchmark/openings.py:{name}" for name in openings.OPENINGS))
    args = prpo_llm.Args(reward=rewards, reward_weights=(str(path),))
    weights = prpo_llm.get_reward_weights(args)
    assert weights.tolist() == [[1, 0.5, 0, 0], [1, 0, 0.5, 0], [1, 0, 0, 0.5]]


def test_the_table_has_each_agents_own_opening(tmp_path):
    """Before and after, held out; the first step and the last three, in training."""
    columns = [f"reward_openings.{name}" for name in openings.OPENINGS]
    metrics = []
    for step in range(1, 6):
        for agent in range(3):
            row = {"step": step, "agent": agent, "reward": step + agent, "reward_rouge": 0.1 * step}
            row |= {"eos_rate": step / 10, **{column: step / 100 for column in columns}}
            row[columns[agent]] = step / 5
            metrics.append(row)
    settings = {"exp_name": "pr", "base_model": "smollm2", "dataset": ["docstrings"]}
    settings |= {"seed": 1, "partition": "iid"}
    cells = [{"validation": {"mean": 0.0}}] * 3
    summary = {"steps": 5, "evaluation": {"group": 0.0, "agents": cells}}
    folder = write_run(tmp_path, "prpo_llm", settings, metrics, **summary)
    lines = []
    for step in (0, 3, 5):
        for agent in range(3):
            for number, ended in enumerate((True, False)):
                row = {"step": step, "agent": agent, "id": number, "score": 0.2 * step}
                row["reward"] = row["score"] - 0.5 * (not ended)
                row |= {"reward_rouge": 0.2 * step, **dict.fromkeys(columns, 0.0)}
                row["completion"] = f"{number}" if step == 0 else "the same"
                row[columns[agent]] = float(step == 5 and number <= agent)
                lines.append(json.dumps(row))
    (folder / "completions.jsonl").write_text("\n".join(lines))
    openings.tabulate(openings.Args(runs=str(tmp_path), csv=str(tmp_path / "table.csv")))
    table = pd.read_csv(tmp_path / "table.csv", comment="#")
    assert table.opening.tolist() == ["verb", "article", "this"]
    assert table.opening_before.tolist() == [0, 0, 0]
    assert table.opening_after.tolist() == [0.5, 1, 1]
    assert table.ended_after.tolist() == [0.5, 0.5, 0.5]
    assert table.distinct_before.tolist() == [1, 1, 1]
    assert table.distinct_after.tolist() == [0.5, 0.5, 0.5]
    assert table.rouge_after.tolist() == [1, 1, 1]
    assert table.reward_after.tolist() == [0.75, 0.75, 0.75]
    assert table.reward_first.tolist() == [1, 2, 3]
    assert table.reward_last.tolist() == [4, 5, 6]
    assert table.opening_last.tolist() == pytest.approx([0.8, 0.8, 0.8])
    assert table.ended_last.tolist() == pytest.approx([0.4, 0.4, 0.4])
