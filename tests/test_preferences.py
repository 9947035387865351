"""Language models with preferences of their own: a row of reward weights for each agent, layers
that FedAvg leaves alone, and the string skills in which every agent has a style.
"""

import functools
import json
import math
import shutil
import sys

import numpy as np
import pytest
import torch
from command import parse_args
from helpers import (
    REPOSITORY,
    config_of,
    only_run,
    read_jsonl,
    refusal,
    results_of,
    table_of,
    write_jsonl,
    write_matrix,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from language_models import SPREAD, layers_of, rows_of, tiny, to_resume, train, weights_of
from transformers import AutoTokenizer

import prpo_llm

sys.path.insert(0, str(REPOSITORY / "benchmark"))
import skills

REWARDS = """
def length(completions, **_):
    return [len(text.split()) for text in completions]


def early(completions, **_):  # unknown of an empty text
    texts = [text.strip() for text in completions]
    return [float(text[0] < "m") if text else None for text in texts]
"""


def write_rewards(files, folder):
    """Three --reward values, of which one may be unknown."""
    (folder / "more.py").write_text(REWARDS)
    more = (f"{folder / 'more.py'}:length", f"{folder / 'more.py'}:early")
    return (f"{files / 'letters.py'}:count", *more)


def write_weights(path, rows):
    """The value of --reward-weights."""
    return (write_matrix(path, rows),)


# --- reward weights ---


NUMBERS = st.floats(-3, 3).map(lambda number: round(number, 2))


@settings(max_examples=60)
@given(st.data())
def test_scores_are_sums_by_the_agents_own_weights(data):
    """Against a plain loop: unknown rewards add nothing; a completion whose known rewards all have
    weight 0 has no score; agents may come in any order."""
    n = data.draw(st.integers(1, 4))
    rewards = data.draw(st.integers(1, 3))
    rows = data.draw(st.integers(1, 6))
    weight = st.one_of(st.just(0.0), NUMBERS)
    matrix = data.draw(
        st.lists(st.lists(weight, min_size=rewards, max_size=rewards), min_size=n, max_size=n)
    )
    number = st.one_of(NUMBERS, st.just(math.nan), st.just(math.inf), st.none())
    values = data.draw(
        st.lists(st.lists(number, min_size=rows, max_size=rows), min_size=rewards, max_size=rewards)
    )
    agents = data.draw(st.lists(st.integers(0, n - 1), min_size=rows, max_size=rows))
    args = prpo_llm.Args(num_agents=n, reward=tuple(map(str, range(rewards))))
    args.reward_matrix = "; ".join(" ".join(map(repr, row)) for row in matrix)
    scores = score(args, values, agents)
    for row, agent in enumerate(agents):
        total = 0.0
        counted = 0
        for of_function, weight_of_agent in zip(values, matrix[agent], strict=True):
            value = of_function[row]
            if value is not None and math.isfinite(value) and weight_of_agent:
                total += weight_of_agent * value
                counted += 1
        expected = total if counted else math.nan
        assert scores[row] == pytest.approx(expected, abs=1e-9, nan_ok=True)
    # Agents under other numbers: the same
    order = data.draw(st.permutations(range(n)))
    args.reward_matrix = "; ".join(" ".join(map(repr, matrix[agent])) for agent in order)
    renumbered = [order.index(agent) for agent in agents]
    np.testing.assert_array_equal(score(args, values, renumbered), scores)


def score(args, values, agents):
    """The scores of completions to which the functions give these values."""
    functions = {str(k): lambda completions, row=row: row for k, row in enumerate(values)}
    example = {"row": {"prompt": "", "completion": ""}, "completion": "", "ids": []}
    tokenizer = Texts()
    number = len(agents)
    tokens = torch.ones(number, 1, dtype=torch.long)
    lengths = torch.ones(number, dtype=torch.long)
    *_, columns = prpo_llm.score_completions(
        args, functions, tokenizer, [example] * number, agents, tokens, lengths
    )
    return columns["score"]


class Texts:
    """A tokenizer whose only token ends a text."""

    ends = (1,)

    def decode(self, ids):
        return ""


def test_equal_rows_train_as_the_same_numbers(files, tmp_path):
    """Bit for bit: a file of ones as no weights at all, one of equal rows as these numbers; with
    another row for agent 1, its training is another, and that of agent 0 the same."""
    rewards = write_rewards(files, tmp_path)
    row = (0.5, -0.25, 2.0)
    weights = {
        "none": (),
        "ones": write_weights(tmp_path / "ones.csv", [[1, 1, 1]] * 2),
        "numbers": row,
        "rows": write_weights(tmp_path / "rows.csv", [row] * 2),
        "own": write_weights(tmp_path / "own.csv", [row, (-2, 0, 1)]),
    }
    results = {}
    for name, value in weights.items():
        changes = {"reward": rewards, "reward_weights": value, "eval_prompts": 0}
        folder, _ = train(
            files, tmp_path / name, **changes, aggregation="none", total_steps=2, num_agents=2
        )
        results[name] = rows_of(folder), weights_of(folder)
    for name, other in (("none", "ones"), ("numbers", "rows")):
        assert results[name][0] == results[other][0]
        assert all(map(torch.equal, results[name][1], results[other][1]))
    assert torch.equal(results["rows"][1][0], results["own"][1][0])
    assert not torch.equal(results["rows"][1][1], results["own"][1][1])
    assert not torch.equal(results["rows"][1][0], results["none"][1][0])


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_every_agent_is_scored_by_its_row_everywhere(files, tmp_path, algorithm):
    """In training, in evaluations and in sampled ones; single rewards are logged as they are."""
    matrix = [[2.0, -0.5], [0.0, 1.0], [-1.0, 0.25]]
    changes = {
        "reward": write_rewards(files, tmp_path)[:2],
        "reward_weights": write_weights(tmp_path / "weights.csv", matrix),
        "num_agents": 3,
        "algorithm": algorithm,
        "missing_eos_penalty": 0.0,
        "total_steps": 2,
        "eval_samples": 2,
        "prompts_per_agent": 4,
    }
    folder, _ = train(files, tmp_path / "runs", **changes)

    def add(row):
        """The weighted sum of the single rewards of an agent's row."""
        values = [float(row[f"reward_{name}"]) for name in ("letters.count", "more.length")]
        return np.dot(matrix[int(row["agent"])], values)

    rows = rows_of(folder)
    for row in rows:
        assert float(row["reward"]) == pytest.approx(add(row), abs=1e-5)
    assert {row["agent"] for row in rows} == {"0", "1", "2"}
    evaluations = table_of(folder, "evaluations")
    for row in evaluations:
        assert float(row["mean_reward"]) == pytest.approx(add(row), abs=1e-9)
    assert {row["agent"] for row in evaluations} == {"0", "1", "2"}
    # Agent 1 is rewarded for length alone, of which it always has some
    sampled = [float(row["sampled_reward"]) for row in evaluations if row["agent"] == "1"]
    assert all(value > 0 for value in sampled)
    sampled = [float(row["sampled_reward"]) for row in evaluations if row["agent"] == "2"]
    assert all(value > 0 for value in sampled)


def test_a_resumed_run_keeps_the_weights_it_began_with(files, tmp_path):
    """Also when the file has changed, or is gone; another file is refused."""
    weights = write_weights(tmp_path / "weights.csv", [[0.1], [-3]])
    folder, _ = train(files, tmp_path / "runs", reward_weights=weights, total_steps=1)
    config = config_of(folder)
    assert config["reward_matrix"] == "0.1; -3.0"
    other = write_weights(tmp_path / "other.csv", [[1], [1]])
    shutil.copy(tmp_path / "other.csv", tmp_path / "weights.csv")
    for _ in range(2):
        args = parse_args(prpo_llm, to_resume(folder))
        assert prpo_llm.get_reward_weights(args).tolist() == [[0.1], [-3.0]]
        (tmp_path / "weights.csv").unlink(missing_ok=True)
    words = [*to_resume(folder), "--reward-weights", *other]
    assert "weights.csv" in refusal(parse_args, prpo_llm, words)


TWO = ["--reward", "rouge", "a/b", "--num-agents", "2"]
FILES = {
    "1, 2\n": "1 x 2 weights, not 2 agents x 2",
    "1, 2\n3, 4\n5, 6\n": "3 x 2 weights",
    "1\n2\n": "2 x 1 weights",
    "1, 2\n3, x\n": "could not convert",
    "1, 2\n3\n": "columns",
    "1, 2\n3, nan\n": "finite",
    "inf, 2\n3, 4\n": "finite",
    "1, 2\n0, 0\n": "row of zeros",
    "": "1 x 0 weights",
}


@pytest.mark.parametrize("content", FILES)
def test_a_wrong_file_of_weights_ends_with_one_line(content, tmp_path, recwarn):
    """It names the flag, the file and what is wrong."""
    path = tmp_path / "weights.csv"
    path.write_text(content)
    line = refusal(parse_args, prpo_llm, [*TWO, "--reward-weights", str(path)])
    assert line.startswith(f"--reward-weights {path}: ")
    assert FILES[content] in line
    assert not [each for each in recwarn if "loadtxt" in str(each.message)]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--reward-weights", "nowhere.csv"], "--reward-weights nowhere.csv: "),
        (["--reward-weights", "1", "weights.csv"], "--reward-weights 1.0 weights.csv: must be one"),
        (["--reward-weights", "0", "0"], "--reward-weights 0.0 0.0: must not all be 0"),
        (["--reward", "a/b", "c/b"], "--reward a/b c/b: must have different names"),
    ],
)
def test_wrong_weights_end_with_one_line(words, text):
    """It names the flag and its value."""
    assert refusal(parse_args, prpo_llm, [*TWO, *words]).startswith(text)


def test_weights_of_a_file_are_accepted(tmp_path):
    """With comments, signs and zeros."""
    path = tmp_path / "weights.csv"
    path.write_text("# rewards\n1, -2.5\n0, 1e-3\n")
    args = parse_args(prpo_llm, [*TWO, "--reward-weights", str(path)])
    assert prpo_llm.get_reward_weights(args).tolist() == [[1.0, -2.5], [0.0, 0.001]]
    args = parse_args(prpo_llm, [*TWO, "--reward-weights", "1", "-2.5"])
    assert prpo_llm.get_reward_weights(args).tolist() == [[1.0, -2.5]] * 2


# --- layers that FedAvg leaves alone ---


def list_layers(folder):
    """agent -> {name: product B A} of its saved adapter."""
    products = []
    for path in sorted(folder.glob("agent_*/adapter_model.safetensors")):
        sides = prpo_llm.load_file(path)
        names = {name.partition(".lora_")[0] for name in sides}
        products.append(
            {
                name: sides[f"{name}.lora_B.weight"] @ sides[f"{name}.lora_A.weight"]
                for name in names
            }
        )
    return products


@pytest.mark.parametrize("average", ["exact", "frozen-a", "naive"])
@pytest.mark.parametrize("private", [0, 1])
def test_private_layers_stay_each_agents_own(files, tmp_path, average, private):
    """After a round all agents have the same adapters in the shared layers, and different ones in
    the last; of the two layers, half of the parameters are sent."""
    folder, summary = train(
        files,
        tmp_path,
        aggregation="weights",
        lora_average=average,
        private_layers=private,
        num_agents=3,
        prompts_per_agent=4,
        eval_prompts=0,
        total_steps=2,
    )
    first, *others = list_layers(folder)
    for other in others:
        for name, product in first.items():
            equal = torch.allclose(product, other[name], atol=1e-6)
            assert equal == (not private or ".layers.0." in name), name
    rows = rows_of(folder)
    size = sum(
        tensor.numel()
        for tensor in prpo_llm.load_file(folder / "agent_0" / "adapter_model.safetensors").values()
    )
    if average != "frozen-a":
        sent = int(rows[-1]["communication_bytes"])
        assert sent == 3 * 2 * 4 * size // (2 if private else 1)
    assert summary["completed"]


def test_private_layers_change_nothing_but_fedavg(files, tmp_path):
    """Agents that mix policies send, and compare, whole policies: bit for bit the same run."""
    results = []
    for private in (0, 1):
        folder, _ = train(files, tmp_path / str(private), private_layers=private)
        results.append((rows_of(folder), weights_of(folder)))
    assert results[0][0] == results[1][0]
    assert all(map(torch.equal, results[0][1], results[1][1]))


def test_the_value_head_is_private_with_the_layers(files, tmp_path):
    """Of all that an agent trains: what is shared is that of the first layer's modules, in the
    policy and in the value model."""
    args = tiny(files, tmp_path, algorithm="ppo", aggregation="weights", private_layers=1)
    model, _ = prpo_llm.load_base(args)
    trained, _ = prpo_llm.add_adapters(args, model, 2)
    shared = prpo_llm.find_shared_columns(args, model)
    trained.zero_()
    trained[:, shared] = 1.0
    for name, layer in layers_of(model).items():
        for kind in ("policy", "value"):
            for side in (layer.A[kind], layer.B[kind]):
                assert (side == float(".layers.0." in name)).all(), (name, kind)
    assert not model.value_head.any() and not model.value_bias.any()
    args.private_layers = 0
    assert prpo_llm.find_shared_columns(args, model) == slice(None)
    args.private_layers = 2
    line = refusal(prpo_llm.find_shared_columns, args, model)
    assert line.startswith("--private-layers 2: must be below the model's 2 layers")


def test_the_average_of_shared_layers_is_that_of_all_layers(files, tmp_path):
    """An asymmetric C: shared columns get what FedAvg of everything gives them."""
    args = tiny(files, tmp_path, algorithm="ppo", aggregation="weights", num_agents=3)
    model, _ = prpo_llm.load_base(args)
    trained, _ = prpo_llm.add_adapters(args, model, 3)
    trained[:] = torch.randn(trained.shape, generator=torch.Generator().manual_seed(2))
    C = torch.tensor([[0.5, 0.35, 0.15], [0.0, 0.4, 0.6], [0.7, 0.1, 0.2]])
    whole, lost_whole = prpo_llm.average_adapters(args, model, C, trained.clone())
    args.private_layers = 1
    shared = prpo_llm.find_shared_columns(args, model)
    averages, lost = prpo_llm.average_adapters(args, model, C, trained[:, shared])
    torch.testing.assert_close(averages, whole[:, shared])
    assert not torch.allclose(lost, lost_whole)  # of the shared layers alone


def test_every_agent_goes_on_from_its_own_row(files, tmp_path, monkeypatch):
    """With an asymmetric C the shared layers after a round are the agent's own average, not a
    peer's, and the private ones are those from before."""
    (tmp_path / "C.csv").write_text("0.5, 0.35, 0.15\n0, 0.4, 0.6\n0.7, 0.1, 0.2\n")
    results = results_of(monkeypatch, prpo_llm, "average_adapters")
    changes = {"num_agents": 3, "prompts_per_agent": 4, "eval_prompts": 0, "total_steps": 2}
    changes |= {"aggregation": "weights", "communicator": str(tmp_path / "C.csv")}
    folder, _ = train(files, tmp_path / "runs", private_layers=1, **changes)
    ((averages, _),) = results
    args = tiny(files, tmp_path, private_layers=1, **changes)
    model, _ = prpo_llm.load_base(args)
    prpo_llm.add_adapters(args, model, 3)
    shared = prpo_llm.find_shared_columns(args, model)
    assert not torch.allclose(averages[0], averages[1])
    private = []
    for i in range(3):
        path = folder / "checkpoints" / f"agent_{i}" / "2.pt"
        trained = torch.load(path, weights_only=True)["trained"]
        assert torch.equal(trained[shared], averages[i])
        private.append(trained[~shared])
    assert not torch.allclose(private[0], private[1])


def spread_settings(files, name):
    """The settings of a run of SPREAD."""
    return SPREAD[name] | {"reward_weights": (str(files / "weights.csv"),)}


@pytest.mark.usefixtures("smooth_adam")
def test_two_ranks_with_preferences_train_like_one_process(files, spread, tmp_path):
    """Private layers and a row of weights each, with PPO: equal weights, metrics, completions; no
    rank sends its private layers."""
    folder, _ = spread
    name = "ppo preferences"
    apart = only_run(folder / name)
    together, _ = train(files, tmp_path, **spread_settings(files, name))
    for a, b in zip(weights_of(apart), weights_of(together), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)
    for row, expected in zip(rows_of(apart), rows_of(together), strict=True):
        for column in row:
            assert float(row[column]) == pytest.approx(
                float(expected[column]), rel=1e-2, abs=1e-3, nan_ok=True
            ), column
    completions = [
        sorted((each / "completions.jsonl").read_text().splitlines()) for each in (apart, together)
    ]
    assert completions[0] == completions[1]
    numel = int(rows_of(apart)[-1]["communication_bytes"]) // 4 // 2 // 4  # 4 rounds of 2 agents
    calls = json.loads((folder / "0.json").read_text())[name]
    tensors = [tensor for _, tensors in calls for tensor in tensors]
    moved = [math.prod(size) for dtype, size in tensors if dtype == "float32"]
    largest = max(moved)  # the common start
    # Else adapters, and rows of C and of distances
    assert {size for size in moved if size != largest} <= {numel, 2 * numel, 2}
    assert 2 * numel < largest


def test_a_resumed_run_with_private_layers_is_the_whole_run(files, tmp_path):
    """Bit for bit, with agents' own weights and private value heads."""
    changes = spread_settings(files, "ppo preferences") | {"save_every": 1}
    whole, _ = train(files, tmp_path / "whole", **changes)
    resumed = shutil.copytree(whole, tmp_path / "resumed" / whole.name)
    (resumed / "checkpoints" / "agent_1" / "4.pt").unlink()
    prpo_llm.main(parse_args(prpo_llm, to_resume(resumed)))
    for a, b in zip(weights_of(resumed), weights_of(whole), strict=True):
        assert torch.equal(a, b)
    assert rows_of(resumed) == rows_of(whole)


# --- string skills with styles ---


WORDS = st.text("abcdefghijklmnopqrstuvwxyz", min_size=1, max_size=8)


@given(WORDS, st.sampled_from(sorted(skills.SKILLS)))
def test_styles_pay_for_the_right_answer_only(word, skill):
    """Each style pays for its own way to write the right answer, `content` for all of them, and
    nothing for a wrong one, however it is written."""
    right = skills.make_example(skill, word)["completion"]
    ways = {"mark": right + "!", "capitals": right.upper(), "quotes": f'"{right}"'}
    wrong = right + "z"
    completions = [*ways.values(), wrong, wrong + "!", wrong.upper(), f'"{wrong}"', right + "!!"]
    references = [right] * len(completions)
    paid = functools.partial(skills.content, completions, references, prompts=[])
    assert paid() == [1.0, 1.0, 1.0] + [0.0] * 5
    for place, style in enumerate(ways):
        rewards = getattr(skills, style)(completions, references, prompts=[])
        assert rewards == [float(k == place) for k in range(len(completions))]
    assert skills.content([right], [right]) == [1.0]
    assert list(ways) == [*skills.STYLES]


def test_weights_pay_one_for_the_own_style_and_less_for_the_content(tmp_path):
    """The matrix of agents and ways to write the right answer: 1 on the diagonal, 0.3 elsewhere."""
    path = tmp_path / "weights.csv"
    path.write_text(skills.write_weights())
    args = prpo_llm.Args(reward=("a", "b", "c", "d"), reward_weights=(str(path),))
    completions = [write("abba") for write in skills.STYLES.values()]
    functions = (skills.content, *(getattr(skills, style) for style in skills.STYLES))
    values = [function(completions, ["abba"] * 3) for function in functions]
    rewards = prpo_llm.get_reward_weights(args) @ np.array(values)
    np.testing.assert_allclose(rewards, 0.3 + 0.7 * np.eye(3))


def test_pretraining_shows_every_style_alike(tmp_path, monkeypatch):
    """A third of the answers in each, within five deviations, whatever the skill; the references of
    the data are plain, and the weights stand beside them."""
    seen = []
    encode = skills.encode

    def remember(tokenizer, batch):
        seen.extend(batch)
        return encode(tokenizer, batch)

    monkeypatch.setattr(skills, "encode", remember)
    out = tmp_path / "task"
    changes = {"prompts": 30, "steps": 9, "hidden_size": 16, "layers": 1, "batch_size": 200}
    skills.main(skills.Args(preferences=True, prompt_shares=(0.5,), out=str(out), **changes))
    counts = dict.fromkeys(skills.STYLES, 0)
    for row in seen[:1800]:
        skill, word = row["prompt"][:-1].split()
        right = skills.make_example(skill, word)["completion"]
        for style, write in skills.STYLES.items():
            counts[style] += row["completion"] == write(right)
    deviation = (1800 * 1 / 3 * 2 / 3) ** 0.5
    assert sum(counts.values()) == 1800
    assert all(abs(count - 600) < 5 * deviation for count in counts.values())
    rows = read_jsonl(out / "train.jsonl")
    for row in rows:
        skill, word = row["prompt"][:-1].split()
        assert row["completion"] == skills.make_example(skill, word)["completion"]
    assert (out / "weights.csv").read_text() == skills.write_weights()
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    assert tokenizer.decode(tokenizer('mirror ab:"abba"!')["input_ids"]) == 'mirror ab:"abba"!'


def test_success_in_any_style_is_a_sum(monkeypatch):
    """Of the probabilities of the right answer in every style; without styles of the answer."""
    probabilities = {"ab!": 0.25, "AB": 0.125, '"ab"': 0.5, "ab": 0.01}

    def look_up(model, tokenizer, batch):
        return torch.tensor([probabilities[example["completion"]] for example in batch])

    monkeypatch.setattr(skills, "compute_success", look_up)
    batch = [skills.make_example("copy", "ab")]
    args = skills.Args(preferences=True)
    assert skills.measure_success(args, None, None, batch).tolist() == [0.875]
    args.preferences = False
    assert skills.measure_success(args, None, None, batch).item() == pytest.approx(0.01)


def test_the_table_has_each_agents_own_reward_and_style(tmp_path):
    """From completions.jsonl, each held-out prompt once, before and after."""
    data = [skills.make_example("copy", word) | {"topic": "x"} for word in ("ab", "cd")]
    write_jsonl(tmp_path / "train.jsonl", data)
    rewards = prpo_llm.Args(
        reward=("content", *skills.STYLES), reward_weights=(str(tmp_path / "weights.csv"),)
    )
    (tmp_path / "weights.csv").write_text(skills.write_weights())
    matrix = prpo_llm.get_reward_weights(
        prpo_llm.Args(reward=rewards.reward, reward_weights=rewards.reward_weights)
    )
    answers = {(0, 0): "ab!", (0, 1): "CD", (1, 0): "AB", (1, 1): "CD", (2, 0): "x", (2, 1): "cd"}
    rows = []
    for step in (0, 5):
        for (agent, k), text in answers.items():
            completion = text if step else "nothing"
            values = [skills.content([completion], [data[k]["completion"]])[0]]
            for style in skills.STYLES:
                values += getattr(skills, style)([completion], [data[k]["completion"]])
            row = {"step": step, "agent": agent, "task": "validation", "id": k}
            row |= {"completion": completion, "reward": float(matrix[agent] @ values)}
            names = [f"reward_skills.{name}" for name in ("content", *skills.STYLES)]
            rows += [row | dict(zip(names, values, strict=True))] * 2
    write_jsonl(tmp_path / "completions.jsonl", rows)
    held_out = skills.read_held_out(tmp_path, [str(tmp_path / "train.jsonl")], "mirror")
    measured = skills.measure_preferences(skills.Args(preferences=True), held_out)
    after = {
        agent: (row["reward_after"], row["content_after"], row["own_style_after"])
        for agent, row in measured.items()
    }
    assert after[0] == pytest.approx((0.65, 1.0, 0.5))
    assert after[1] == pytest.approx((1.0, 1.0, 1.0))
    assert after[2] == pytest.approx((0.15, 0.5, 0.0))
    assert [row["style"] for row in measured.values()] == [*skills.STYLES]
    assert {row["prompts"] for row in measured.values()} == {2}
    assert all(row["reward_before"] == 0 for row in measured.values())
