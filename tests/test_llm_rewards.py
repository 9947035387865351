"""Reward functions of language models as TRL takes them: what they return, get, import, raise."""

import json
import math
import re
import sys

import pandas as pd
import pytest
import torch
from command import parse_args
from helpers import REPOSITORY, only_run, outcomes, refusal, scalars_of, start_ranks
from language_models import flags, rows_of, tiny, to_resume, train, weights_of

import prpo_llm

COLUMNS = {"prompts": ["a", "b"], "completions": ["c", "dd"], "level": [3, 4]}


def load(folder, code, name="own", function="reward"):
    """The reward function of a new file."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.py"
    path.write_text(code)
    args = prpo_llm.Args(reward=(f"{path}:{function}",))
    (loaded,) = prpo_llm.make_reward(args, torch.device("cpu")).values()
    return loaded


def call(function):
    """Its rewards for two completions."""
    return prpo_llm.call_reward(prpo_llm.Args(), "own", function, COLUMNS)


def test_the_reward_of_the_page_is_one(tmp_path, files):
    """Of two completions one is longer than its reference; a run trains on it."""
    page = (REPOSITORY / "docs" / "prpo_llm.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    short = load(tmp_path / "rewards", code, "my_reward", "short")
    inputs = {"prompts": ["a", "b"], "completions": ["c", "dd"], "completion_ids": [[1], [2]]}
    assert short(**inputs, references=["e", "f"], level=[3, 4]) == [1, 0]
    reward = f"{tmp_path / 'rewards' / 'my_reward.py'}:short"
    folder, _ = train(files, tmp_path / "runs", reward=reward, total_steps=1, eval_prompts=0)
    scores = [float(row["reward_my_reward.short"]) for row in rows_of(folder)]
    assert scores and all(0 <= score <= 1 for score in scores)


LENGTHS = {
    "floats": "def reward(completions, **_): return [float(len(c)) for c in completions]",
    "numbers and None": "def reward(completions, **_): return [1, None]",
    "generator": "def reward(completions, **_):\n    for c in completions: yield len(c)",
    "tensor": "import torch\ndef reward(completions, **_): return torch.tensor([1.0, 2.0])",
    "column": "import torch\ndef reward(completions, **_): return torch.tensor([[1.0], [2.0]])",
    "bfloat16": (
        "import torch\ndef reward(completions, **_):\n"
        "    return [torch.tensor(len(c), dtype=torch.bfloat16) for c in completions]"
    ),
    "numpy": "import numpy\ndef reward(completions, **_): return numpy.array([1, 2], 'float16')",
    "tuple of booleans": "def reward(completions, **_): return (True, 2)",
    "asynchronous": (
        "import asyncio\nasync def one(c):\n    await asyncio.sleep(0)\n    return len(c)\n"
        "async def reward(completions, **_):\n"
        "    return await asyncio.gather(*map(one, completions))"
    ),
    "asynchronous object": (
        "class Judge:\n    async def __call__(self, completions, **_):\n"
        "        return map(len, completions)\nreward = Judge()"
    ),
    "partial": (
        "import functools\ndef two(factor, completions): return [factor * len(c) for c in "
        "completions]\nreward = functools.partial(two, 1)"
    ),
}


@pytest.mark.parametrize("case", LENGTHS)
def test_whatever_holds_numbers_is_a_reward(tmp_path, case):
    rewards = call(load(tmp_path, LENGTHS[case]))
    assert all(type(reward) is float for reward in rewards)
    expected = [1.0, math.nan if case == "numbers and None" else 2.0]
    assert rewards == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("value", ["'12'", "{'a': 1, 'b': 2}"])
def test_what_holds_no_numbers_is_an_error(tmp_path, value):
    with pytest.raises(TypeError, match="rewards must be numbers"):
        call(load(tmp_path, f"def reward(completions, **_): return {value}"))


def test_a_cancelled_reward_is_an_error(tmp_path):
    code = "import asyncio\nasync def reward(completions, **_): raise asyncio.CancelledError"
    with pytest.raises(RuntimeError, match="was cancelled"):
        call(load(tmp_path, code))


def test_a_reward_may_change_what_it_gets():
    """Not the data: the same row is completed again."""
    row = {"prompt": [{"role": "user", "content": "a"}], "answer": [1]}
    example = {"row": row, "completion": "c"}
    columns = prpo_llm.list_reward_columns(prpo_llm.Args(), [example] * 2, ["x", "y"], [[1], [2]])
    for prompt, completion in zip(columns["prompts"], columns["completions"], strict=True):
        prompt.extend(completion)
    columns["answer"][0].append(2)
    assert row == {"prompt": [{"role": "user", "content": "a"}], "answer": [1]}
    assert columns["answer"] == [[1, 2], [1]]
    # Nor the completions, whose lengths penalties and whose texts logs read afterwards
    example = {"row": {"prompt": "a"}, "completion": "c"}
    texts = ["x", "y"]
    ids = [[1], [2]]
    columns = prpo_llm.list_reward_columns(prpo_llm.Args(), [example] * 2, texts, ids)
    columns["completions"][:] = []
    columns["completion_ids"][0].pop()
    columns["completion_ids"].pop()
    assert texts == ["x", "y"] and ids == [[1], [2]]


def test_references_are_the_data_s_own_column_if_there_is_one():
    """ROUGE reads completions, whatever a column `references` holds."""
    rows = [{"prompt": "a", "references": ["r"]}]
    chosen = [{"row": row, "completion": ""} for row in rows]
    columns = prpo_llm.list_reward_columns(prpo_llm.Args(), chosen, ["x"], [[1]])
    assert columns["references"] == [["r"]]
    args = prpo_llm.Args(reward=("rouge",))
    functions = prpo_llm.make_reward(args, torch.device("cpu"))
    example = chosen[0] | {"ids": [1]}
    line = refusal(prpo_llm.check_reward_inputs, args, functions, [[example]])
    assert line.endswith(
        "rouge needs a column completion, which the data lack, or not in every row"
    )


CLIENT = """
import asyncio
queue = asyncio.Queue()

async def put():
    await asyncio.sleep(0)
    await queue.put(3)

async def reward(completions, **_):
    task = asyncio.create_task(put())
    return [await queue.get(), await task or 4]
"""


def test_a_client_is_used_in_all_calls(tmp_path):
    """What belongs to an event loop, as connections do."""
    function = load(tmp_path, CLIENT)
    assert [call(function) for _ in range(2)] == [[3.0, 4.0]] * 2


def test_a_module_beside_the_file_is_found(tmp_path, monkeypatch):
    """An installed one of its name comes first; nothing else is hidden by what lies there."""
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "assistance.py").write_text("def measure(text): return 10 * len(text)\n")
    (folder / "json.py").write_text("raise RuntimeError('not this one')\n")
    (folder / "tabnanny.py").write_text("raise RuntimeError('not this one')\n")
    monkeypatch.delitem(sys.modules, "tabnanny", raising=False)
    code = (
        "import assistance, json, tabnanny\n"
        "def reward(completions, **_):\n    from assistance import measure\n"
        "    return [measure(json.loads(json.dumps(c))) for c in completions]\n"
    )
    assert call(load(folder, code)) == [10.0, 20.0]


def test_a_file_may_use_processes(tmp_path):
    """Which find its functions by their module's name."""
    code = (
        "import multiprocessing\nfrom concurrent.futures import ProcessPoolExecutor\n"
        "def work(text): return len(text), __name__\n"
        "def reward(completions, **_):\n"
        "    context = multiprocessing.get_context('fork')\n"
        "    with ProcessPoolExecutor(1, mp_context=context) as pool:\n"
        "        results = [*pool.map(work, completions)]\n"
        "    assert {name for _, name in results} == {'own'}\n"
        "    return [length for length, _ in results]\n"
    )
    assert call(load(tmp_path, code)) == [1.0, 2.0]


def test_each_run_of_a_process_reads_its_own_files(tmp_path):
    """Of the same name in other folders, with what lies beside them; and one file is executed
    once."""
    code = "import beside\ncalls = []\ndef reward(**_): return [beside.number, calls.append(1)]\n"
    for number in (1, 2, 1):
        folder = tmp_path / str(number)
        folder.mkdir(exist_ok=True)
        (folder / "beside.py").write_text(f"number = {number}\n")
        assert call(load(folder, code))[0] == number
    assert str(tmp_path / "1") in sys.path and str(tmp_path / "2") not in sys.path
    path = tmp_path / "1" / "own.py"
    path.write_text(f"{code}\ndef other(**_): return [len(calls), 0]\n\n")
    args = prpo_llm.Args(reward=(f"{path}:reward", f"{path}:other"))
    functions = prpo_llm.make_reward(args, torch.device("cpu"))
    call(functions["own.reward"])
    assert call(functions["own.other"]) == [1.0, 0.0]


@pytest.mark.parametrize("name", ["json", "torch", "prpo_llm", "test_llm", "two.dots"])
def test_a_file_with_the_name_of_another_module_is_refused(tmp_path, name):
    """Python would find that one."""
    path = tmp_path / f"{name}.py"
    message = refusal(load, tmp_path, "def reward(**_): return [1, 2]\n", name)
    reason = "must have another name: Python finds another module under this one"
    assert message == f"--reward {path}:reward: {path} {reason}"


def test_two_files_of_one_name_are_refused(tmp_path):
    paths = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        paths.append(folder / "own.py")
        paths[-1].write_text("def one(**_): return [1, 2]\ndef two(**_): return [3, 4]\n")
    args = prpo_llm.Args(reward=(f"{paths[0]}:one", f"{paths[1]}:two"))
    message = refusal(prpo_llm.make_reward, args, torch.device("cpu"))
    assert f"{paths[1]} must have another name" in message


def test_a_reward_knows_the_step_and_writes_metrics_and_columns(files, tmp_path):
    """By TRL's names: `trainer_state` counts completed steps, also of a resumed run; columns stand
    beside the completions, the mean of a metric in TensorBoard; evaluations add nothing."""
    (tmp_path / "own.py").write_text(
        "def own(completions, trainer_state, log_metric, log_extra):\n"
        "    step = trainer_state.global_step\n"
        "    assert trainer_state.max_steps == 4\n"
        "    log_extra('first', [c[:1] for c in completions])\n"
        "    log_extra('short', ['a'])\n"
        "    log_extra('prompt', ['none'] * len(completions))\n"
        "    log_metric('reward', 777)\n"
        "    if step == 2: log_metric('once', 1)\n"
        "    log_metric('twice', 2 * step)\n"
        "    log_metric('twice', 2 * step + 2)\n"
        "    return [step] * len(completions)\n"
    )
    changes = {"reward": f"{tmp_path / 'own.py'}:own", "missing_eos_penalty": 0.0}
    changes |= {"log_completions": 1, "eval_every": 1, "save_every": 3}
    folder, _ = train(files, tmp_path / "runs", **changes)
    for i in range(2):
        (folder / "checkpoints" / f"agent_{i}" / "4.pt").unlink()
    resume = ["--resume", str(folder), "--reward", changes["reward"]]
    prpo_llm.main(parse_args(prpo_llm, resume))
    rows = rows_of(folder)
    assert {row["step"]: float(row["reward"]) for row in rows} == {
        str(step): step - 1 for step in (1, 2, 3, 4)
    }
    evaluations = pd.read_csv(folder / "evaluations.csv")
    assert (evaluations.mean_reward == evaluations.step).all() and len(evaluations) == 10
    logged = scalars_of(folder)["rewards/twice"]
    assert logged == [(step, 2 * step - 1) for step in (1, 2, 3, 4)]
    log = (folder / "training_completions" / "agent_0.jsonl").read_text().splitlines()
    assert len(log) == 4 * 3
    for row in map(json.loads, log):
        assert row["first"] == row["completion"][:1] and "short" not in row
        assert row["prompt"] != "none"


FAILING = """
import pathlib

def own(completions, trainer_state, **_):
    broken = pathlib.Path(__file__).with_name("broken")
    if trainer_state.global_step == {step} and broken.exists():
        {failure}
    return [float(c.split().count("a")) for c in completions]
"""


@pytest.mark.parametrize("failure", ["raise OSError('judge is down')", "return [1.0]"])
def test_a_reward_that_fails_loses_nothing(files, tmp_path, failure, capsys):
    """At step 3 the state of step 2 is saved; the resumed run is the one that never failed."""
    (tmp_path / "own.py").write_text(FAILING.format(step=2, failure=failure))
    changes = {"reward": f"{tmp_path / 'own.py'}:own", "save_every": 10, "eval_prompts": 0}
    whole, _ = train(files, tmp_path / "whole", **changes)
    (tmp_path / "broken").touch()
    args = tiny(files, tmp_path / "runs", **changes)
    with pytest.raises((OSError, SystemExit)) as end:
        prpo_llm.main(args)
    folder = only_run(tmp_path / "runs")
    line = f"go on with --resume {folder}"
    if "raise" in failure:
        assert end.value.__notes__ == ["--reward own.own has raised this", line]
        assert end.traceback[-1].path.name == "own.py"
    else:
        expected = "own.own returns 1 rewards for 12 completions"
        assert expected in str(end.value)
        assert capsys.readouterr().err.splitlines()[-2:] == [str(end.value), line]
    assert [path.name for path in (folder / "checkpoints" / "agent_0").iterdir()] == ["2.pt"]
    (tmp_path / "broken").unlink()
    resume = ["--resume", str(folder), "--reward", changes["reward"]]
    assert prpo_llm.main(parse_args(prpo_llm, resume))["steps"] == 4
    for resumed, uninterrupted in zip(weights_of(folder), weights_of(whole), strict=True):
        assert torch.equal(resumed, uninterrupted)


def test_a_rollout_that_fails_loses_nothing(files, tmp_path, monkeypatch):
    """As where a server is gone."""
    changes = {"save_every": 10, "eval_prompts": 0}
    whole, _ = train(files, tmp_path / "whole", **changes)
    rollout = prpo_llm.rollout

    def roll_out_or_fail(args, model, tokenizer, examples, held, step, complete):
        if step == 3:
            raise OSError("the server is gone")
        return rollout(args, model, tokenizer, examples, held, step, complete)

    monkeypatch.setattr(prpo_llm, "rollout", roll_out_or_fail)
    with pytest.raises(OSError, match="gone"):
        prpo_llm.main(tiny(files, tmp_path / "runs", **changes))
    monkeypatch.undo()
    folder = only_run(tmp_path / "runs")
    assert [path.name for path in (folder / "checkpoints" / "agent_0").iterdir()] == ["2.pt"]
    prpo_llm.main(parse_args(prpo_llm, to_resume(folder)))
    for resumed, uninterrupted in zip(weights_of(folder), weights_of(whole), strict=True):
        assert torch.equal(resumed, uninterrupted)


def test_a_reward_that_fails_in_an_evaluation_loses_nothing(files, tmp_path):
    (tmp_path / "own.py").write_text(FAILING.format(step=2, failure="raise OSError('down')"))
    changes = {"reward": f"{tmp_path / 'own.py'}:own", "save_every": 10, "eval_every": 2}
    (tmp_path / "broken").touch()
    with pytest.raises(OSError, match="down"):
        prpo_llm.main(tiny(files, tmp_path / "runs", **changes))
    folder = only_run(tmp_path / "runs")
    assert [path.name for path in (folder / "checkpoints" / "agent_1").iterdir()] == ["2.pt"]
    (tmp_path / "broken").unlink()
    resume = ["--resume", str(folder), "--reward", changes["reward"]]
    prpo_llm.main(parse_args(prpo_llm, resume))
    steps = pd.read_csv(folder / "evaluations.csv").step
    assert steps.value_counts().to_dict() == {0: 2, 2: 2, 4: 2}


def test_a_run_that_is_to_end_is_saved_before_a_long_evaluation(files, tmp_path, capsys):
    """Which the resumed run makes up for."""
    failure = "__import__('os').kill(__import__('os').getpid(), 15)"  # in step 2
    (tmp_path / "own.py").write_text(FAILING.format(step=1, failure=failure))
    changes = {"reward": f"{tmp_path / 'own.py'}:own", "save_every": 10, "eval_every": 2}
    (tmp_path / "broken").touch()
    with pytest.raises(SystemExit) as end:
        prpo_llm.main(tiny(files, tmp_path / "runs", **changes))
    assert end.value.code == 128 + 15
    folder = only_run(tmp_path / "runs")
    assert "interrupted after step 2 of 4" in capsys.readouterr().out
    assert set(pd.read_csv(folder / "evaluations.csv").step) == {0}
    (tmp_path / "broken").unlink()
    resume = ["--resume", str(folder), "--reward", changes["reward"]]
    prpo_llm.main(parse_args(prpo_llm, resume))
    steps = pd.read_csv(folder / "evaluations.csv").step
    assert steps.value_counts().to_dict() == {0: 2, 2: 2, 4: 2}


def test_a_reward_that_fails_in_the_last_evaluation_says_how_to_go_on(files, tmp_path):
    (tmp_path / "own.py").write_text(FAILING.format(step=4, failure="raise OSError('down')"))
    (tmp_path / "broken").touch()
    with pytest.raises(OSError, match="down") as end:
        train(files, tmp_path / "runs", reward=f"{tmp_path / 'own.py'}:own")
    line = f"go on with --resume {only_run(tmp_path / 'runs')}"
    assert end.value.__notes__[-1] == line


def test_a_reward_that_fails_at_the_first_step_has_nothing_to_save(files, tmp_path):
    (tmp_path / "own.py").write_text(FAILING.format(step=0, failure="raise OSError('down')"))
    (tmp_path / "broken").touch()
    changes = {"reward": f"{tmp_path / 'own.py'}:own", "eval_prompts": 0}
    with pytest.raises(OSError, match="down"):
        prpo_llm.main(tiny(files, tmp_path / "runs", **changes))
    assert not (only_run(tmp_path / "runs") / "checkpoints").exists()


def test_a_reward_that_fails_in_one_process_ends_all_of_them(files, tmp_path):
    """They save the same step; one names the failure."""
    failure = "assert __import__('os').environ.get('RANK') != '1', 'down'"
    (tmp_path / "own.py").write_text(FAILING.format(step=2, failure=failure))
    (tmp_path / "broken").touch()
    changes = {"reward": f"{tmp_path / 'own.py'}:own", "save_every": 10, "eval_prompts": 0}
    args = tiny(files, tmp_path / "runs", **changes)
    results = outcomes(start_ranks(2, REPOSITORY / "prpo_llm.py", *flags(args), cwd=tmp_path))
    assert [code for _, code in results] == [1, 1], results
    folder = only_run(tmp_path / "runs")
    errors = [output[1] for output, _ in results]
    assert f"go on with --resume {folder}" in errors[1] and "AssertionError: down" in errors[1]
    assert "Traceback" not in errors[0]
    for i in range(2):
        names = [path.name for path in (folder / "checkpoints" / f"agent_{i}").iterdir()]
        assert names == ["2.pt"]
