"""The string skills: right references, an exact reward, the shares that were asked for, and something is learnt."""

import csv
import json
import random
import re
import shlex
import shutil
import sys
from collections import Counter

import pytest
import torch
import tyro
from command import parse_args
from helpers import REPOSITORY, only_run
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

import prpo_llm

sys.path.insert(0, str(REPOSITORY / "benchmark"))
import skills

WORDS = st.text("abcdefghijklmnopqrstuvwxyz", min_size=1, max_size=12)
# Two skills that a minute model learns in seconds, and a rare one
SMALL = skills.Args(
    rare="upper", rare_share=0.2, prompt_shares=(0.25, 1.0), prompts=80, word_lengths=(2, 3)
)
SMALL.steps, SMALL.batch_size, SMALL.hidden_size, SMALL.layers = 320, 32, 48, 2


@pytest.fixture(scope="session")
def task(once):
    """The folder of a task with two agents, which takes seconds, and how often its model is right."""

    def make(folder):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                skills, "SKILLS", {name: skills.SKILLS[name] for name in ("copy", "upper")}
            )
            return skills.main(skills.Args(**vars(SMALL) | {"out": str(folder)}))

    return once("skills", make)


@given(WORDS)
def test_references_are_right(word):
    """Each skill by what defines it, not by how it is computed."""
    said = {name: skills.make_example(name, word)["completion"] for name in skills.SKILLS}
    n = len(word)
    assert said["copy"] == word
    assert [ord(letter) + 32 for letter in said["upper"]] == list(map(ord, word))
    assert len(said["reverse"]) == n and all(
        said["reverse"][k] == word[n - 1 - k] for k in range(n)
    )
    assert len(said["double"]) == 2 * n and all(
        said["double"][k] == word[k // 2] for k in range(2 * n)
    )
    assert len(said["rotate"]) == n and all(
        said["rotate"][k] == word[(k + 1) % n] for k in range(n)
    )
    assert len(said["mirror"]) == 2 * n and said["mirror"].startswith(word)
    assert all(said["mirror"][k] == said["mirror"][2 * n - 1 - k] for k in range(n))
    assert said.keys() == {"copy", "upper", "reverse", "double", "rotate", "mirror"}


@settings(max_examples=50)
@given(WORDS, st.text("abc ", max_size=4), st.sampled_from(sorted(skills.SKILLS)))
def test_the_reward_is_exact(word, other, skill):
    """1 for the reference; nothing that is longer, shorter or spaced counts, and no constant wins."""
    right = skills.make_example(skill, word)["completion"]
    said = [right, right + " ", right[:-1], other, right + other, ""]
    assert skills.exact(said, [right] * 6, prompts=["?"] * 6) == [
        1.0,
        0.0,
        0.0,
        other == right,
        other == "",
        0.0,
    ]
    with pytest.raises(ValueError):
        skills.exact(said, [right])


@settings(max_examples=50)
@given(WORDS, st.sampled_from(sorted(skills.SKILLS)))
def test_the_tokenizer_round_trips(word, skill):
    """A token per letter, whether encoded by the tokenizer or by us; decoding gives the text without spaces."""
    tokenizer, example = skills.make_tokenizer(), skills.make_example(skill, word)
    text = example["prompt"] + example["completion"]
    ids = tokenizer(text)["input_ids"]
    assert (
        len(ids) == len(text)
        and tokenizer.decode(ids) == text
        and tokenizer.eos_token_id not in ids
    )
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    tokens, labels = skills.encode(tokenizer, [example, skills.make_example("double", "ab" * 12)])
    assert tokens[0, : len(ids)].tolist() == ids and set(tokens[0, len(ids) :].tolist()) == {
        tokenizer.eos_token_id
    }
    asked = len(example["prompt"])  # what counts: the completion and one EOS
    assert (
        labels[0, asked : len(ids)].tolist() == ids[asked:]
        and labels[0, len(ids)] == tokenizer.eos_token_id
    )
    assert set(labels[0, :asked].tolist()) | set(labels[0, len(ids) + 1 :].tolist()) == {-100}


@settings(max_examples=20)
@given(st.floats(0, 0.3), st.integers(0, 2**20))
def test_pretraining_has_the_share_that_was_asked_for(share, seed):
    """Within five deviations; the other skills have equal parts; forbidden prompts never come."""
    args, n = skills.Args(word_lengths=(1, 1)), 2000
    without = {f"copy {letter}:" for letter in "abcdefghijklm"}
    stream = skills.examples(random.Random(seed), args, share, without)
    found = [next(stream) for _ in range(n)]
    assert not without & {own["prompt"] for own in found}
    counts = Counter(own["skill"] for own in found)
    kept = share + (1 - share) * 0.9  # half of one of five others is forbidden
    for skill, expected in [
        ("mirror", share / kept),
        ("upper", (1 - share) / 5 / kept),
        ("copy", (1 - share) / 10 / kept),
    ]:
        assert (
            abs(counts[skill] - n * expected) <= 5 * (n * expected * (1 - expected)) ** 0.5 + 1e-9
        )


def test_agents_have_their_shares_and_prompts_of_their_own():
    """Exact shares; no prompt twice; the topic says whose it is; the same again with the same seed only."""
    args = skills.Args()
    rows = skills.make_prompts(args)
    assert rows == skills.make_prompts(args) != skills.make_prompts(skills.Args(seed=2))
    assert len({own["prompt"] for own in rows}) == len(rows) == 3 * 600
    topics = list(dict.fromkeys(own["topic"] for own in rows))
    assert topics == ["agent 0, 5% mirror", "agent 1, 20% mirror", "agent 2, 80% mirror"]
    rare = Counter(own["topic"] for own in rows if own["skill"] == "mirror")
    assert [rare[topic] for topic in topics] == [30, 120, 480]
    assert all(
        own == skills.make_example(*own["prompt"][:-1].split()) | {"topic": own["topic"]}
        for own in rows
    )
    assert {own["skill"] for own in rows[1200:1680]} > {"mirror"}  # shuffled


def test_the_same_settings_give_the_same_files(task, tmp_path):
    """Made anew: the same data and weights, bit for bit; made already: nothing is touched; other settings: refused."""
    folder, rates = task
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(skills, "SKILLS", {name: skills.SKILLS[name] for name in ("copy", "upper")})
        args = skills.Args(**vars(SMALL) | {"out": str(tmp_path)})
        assert skills.main(args) == rates
    for name in ("train.jsonl", "model/model.safetensors", "model/tokenizer.json", "settings.json"):
        assert (folder / name).read_bytes() == (tmp_path / name).read_bytes(), name
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert skills.main(args) == rates and times == {
        path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")
    }
    with pytest.raises(
        SystemExit, match="--out .*: was made with another --seed; choose another folder"
    ):
        skills.main(skills.Args(**vars(args) | {"seed": 2}))


def test_pretraining_ends_when_the_rare_skill_is_right_often_enough(tmp_path, capsys):
    """Even chance is often enough for this: it ends at the first look, before anything is printed."""
    skills.main(skills.Args(**vars(SMALL) | {"out": str(tmp_path), "rare_success": 1e-12}))
    assert "step" not in capsys.readouterr().out
    skills.main(
        skills.Args(
            **vars(SMALL) | {"out": str(tmp_path / "short"), "rare_success": 0.99, "steps": 5}
        )
    )
    assert (
        "upper is right less often than --rare-success 0.99; more --steps may help"
        in capsys.readouterr().out
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_the_rare_skill_comes_in_time(seed, tmp_path):
    """However a machine rounds: long before the steps end, and it stays rare."""
    rates = skills.main(skills.Args(seed=seed, out=str(tmp_path)))
    assert (
        0.15
        < rates["mirror"]
        < 0.5
        < 0.8
        < min(rate for name, rate in rates.items() if name != "mirror")
    )


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--rare", "jump"], "--rare jump: must be one of copy, "),
        (["--rare-share", "1"], "--rare-share 1.0: must lie in [0, 1)"),
        (["--prompt-shares", "0.5", "1.5"], "--prompt-shares 0.5 1.5: must lie in [0, 1]"),
        (["--word-lengths", "5", "3"], "--word-lengths 5 3: must be positive"),
        (["--prompts", "900", "--word-lengths", "2", "4"], "--prompts 900: must lie in [1, 338]"),
        (["--rare-success", "0"], "--rare-success 0.0: must lie in (0, 1]"),
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--hidden-size", "20"], "--hidden-size 20: must be a multiple of 8"),
    ],
)
def test_bad_input_is_refused(flags, error, tmp_path, monkeypatch):
    """One line, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        skills.main(tyro.cli(skills.Args, args=flags))
    assert str(stopped.value).startswith(error) and "\n" not in str(stopped.value)
    assert not list(tmp_path.iterdir())


def test_the_model_is_one_for_everybody_and_the_rates_are_its_probabilities(task):
    """transformers loads the folder; `success` is the product over the tokens, one by one and without padding."""
    folder, rates = task
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    batch = [skills.make_example("copy", "ab"), skills.make_example("upper", "xyz")]
    for example, found in zip(batch, skills.success(model, tokenizer, batch), strict=True):
        expected, said = 1.0, example["prompt"]
        for token in [*tokenizer(example["completion"])["input_ids"], tokenizer.eos_token_id]:
            with torch.no_grad():
                logits = model(
                    **tokenizer(said, return_tensors="pt", return_token_type_ids=False)
                ).logits[0, -1]
            expected *= logits.softmax(-1)[token].item()
            said += tokenizer.decode([token])
        assert found.item() == pytest.approx(expected, rel=1e-4)
    assert rates["copy"] > 2 * rates["upper"] > 0


def of_task(folder, run_dir):
    """The flags of a run on the task in this folder."""
    words = [
        "--base-model",
        folder / "model",
        "--dataset",
        folder / "train.jsonl",
        "--run-dir",
        run_dir,
    ]
    return [*map(str, words), "--num-agents", "2", "--response-length", "5", "--device", "cpu"]


def test_language_models_learn_the_rare_skill(task, tmp_path, monkeypatch):
    """GRPO raises the reward of the agent whose prompts all ask for the rare skill, many deviations beyond chance."""
    monkeypatch.chdir(REPOSITORY)
    words = "--aggregation none --partition topic --reward benchmark/skills.py:exact --missing-eos-penalty 0"
    words += " --precision float32 --temperature 1 --total-steps 24 --batch-size 8 --micro-batch-size 8 --group-size 16"
    words += (
        " --lora-rank 8 --learning-rate 3e-3 --kl-coef 0 --eval-prompts 0 --prompts-per-agent 60"
    )
    prpo_llm.main(parse_args(prpo_llm, [*words.split(), *of_task(task[0], tmp_path)]))
    with open(only_run(tmp_path) / "metrics.csv", newline="") as file:
        rewards = [float(row["reward"]) for row in csv.DictReader(file) if row["agent"] == "1"]
    early, late = (
        sum(rewards[:6]) / 6,
        sum(rewards[-6:]) / 6,
    )  # of 768 completions each: a deviation of 0.012
    assert 0.02 < early < late - 0.04


def test_the_demonstration_runs(task, tmp_path, monkeypatch):
    """The README's commands: the task has these flags, and the run has them on a small task and budget."""
    monkeypatch.chdir(REPOSITORY)
    found = re.findall(
        r"^python benchmark/skills.py.*? && (python prpo_llm.py .*)$",
        (REPOSITORY / "README.md").read_text(),
        re.M,
    )
    assert len(found) == 1
    words = shlex.split(found[0], comments=True)[2:]
    assert words[words.index("--dataset") + 1] == f"{skills.Args().out}/train.jsonl"
    words += [
        *of_task(task[0], tmp_path),
        "--total-steps",
        "1",
        "--prompts-per-agent",
        "30",
        "--eval-prompts",
        "5",
    ]
    args = parse_args(prpo_llm, words)
    assert "benchmark/skills.py:exact" in words and prpo_llm.main(args)["completed"]

    # The table of the run, counted by hand: each held-out prompt once, and its completion after training
    run, said = only_run(tmp_path), {}
    shutil.copytree(run, tmp_path / "control")  # a run without a data set is not in it
    summary = json.loads((run / "summary.json").read_text())
    settings = summary["settings"]
    settings["env_id"], _ = settings.pop("base_model"), settings.pop("dataset")
    (tmp_path / "control" / "summary.json").write_text(json.dumps(summary))
    table = skills.tabulate(skills.Args(runs=str(tmp_path), rare="upper"))
    for line in (run / "completions.jsonl").read_text().splitlines():
        row = json.loads(line)
        said[row["step"], row["agent"], row["id"]] = row
    for own in table.to_dict("records"):
        for kind in ("upper", "others"):
            mine = [
                row for (step, agent, _), row in said.items() if (step, agent) == (1, own["agent"])
            ]
            mine = [
                row["reward"] for row in mine if (kind == "upper") == (row["reference"].isupper())
            ]
            assert len(mine) == own[f"{kind}_prompts"] > 0
            assert own[f"{kind}_after"] == pytest.approx(sum(mine) / len(mine))
    assert list(table.agent) == [0, 1]
