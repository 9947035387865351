"""The string skills: right references, an exact reward, shares as in the settings, and agents learn
them.
"""

import json
import random
import shlex
import shutil
import signal
import sys
from collections import Counter

import pandas as pd
import pytest
import torch
from command import parse_args
from helpers import REPOSITORY, only_run, read_jsonl, refusal, summary_of, table_of, write_jsonl
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer

import prpo_llm

sys.path.insert(0, str(REPOSITORY / "benchmark"))
import skills
from arguments import read_flags

WORDS = st.text("abcdefghijklmnopqrstuvwxyz", min_size=1, max_size=12)
# Two skills that a minute model learns in seconds, and a rare one
SMALL = {
    "rare": "upper",
    "rare_share": 0.2,
    "prompt_shares": (0.25, 1.0),
    "prompts": 80,
    "word_lengths": (2, 3),
    "steps": 320,
    "batch_size": 32,
    "hidden_size": 48,
    "layers": 2,
}
TWO_SKILLS = {name: skills.SKILLS[name] for name in ("copy", "upper")}


@pytest.fixture(scope="session")
def task(once):
    """The folder of a task with two agents, which takes seconds, and how often its model is
    right.
    """

    def make(folder):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(skills, "SKILLS", TWO_SKILLS)
            return skills.main(skills.Args(**SMALL, out=str(folder)))

    return once("skills", make)


@given(WORDS)
def test_references_are_right(word):
    """Each skill by what defines it, not by how it is computed."""
    completions = {name: skills.make_example(name, word)["completion"] for name in skills.SKILLS}
    n = len(word)
    assert completions["copy"] == word
    assert [ord(letter) + 32 for letter in completions["upper"]] == list(map(ord, word))
    assert len(completions["reverse"]) == n
    assert all(completions["reverse"][k] == word[n - 1 - k] for k in range(n))
    assert len(completions["double"]) == 2 * n
    assert all(completions["double"][k] == word[k // 2] for k in range(2 * n))
    assert len(completions["rotate"]) == n
    assert all(completions["rotate"][k] == word[(k + 1) % n] for k in range(n))
    assert len(completions["mirror"]) == 2 * n
    assert completions["mirror"].startswith(word)
    assert all(completions["mirror"][k] == completions["mirror"][2 * n - 1 - k] for k in range(n))
    assert completions.keys() == {"copy", "upper", "reverse", "double", "rotate", "mirror"}


@settings(max_examples=50)
@given(WORDS, st.text("abc ", max_size=4), st.sampled_from(sorted(skills.SKILLS)))
def test_the_reward_is_exact(word, other, skill):
    """1 for the reference; nothing that is longer, shorter or spaced counts, and no constant
    wins.
    """
    right = skills.make_example(skill, word)["completion"]
    expected = {right + " ": 0.0, right[:-1]: 0.0, "": 0.0, right: 1.0}
    for completion in (*expected, other, right + other):
        expected.setdefault(completion, 0.0)
    completions = list(expected)
    references = [right] * len(completions)
    rewards = skills.exact(completions, references, prompts=["?"] * len(completions))
    assert rewards == list(expected.values())
    with pytest.raises(ValueError):
        skills.exact(completions, [right])


@settings(max_examples=50)
@given(WORDS, st.sampled_from(sorted(skills.SKILLS)))
def test_the_tokenizer_round_trips(word, skill):
    """A token per letter, whether encoded by the tokenizer or by us; decoding gives the text
    without spaces.
    """
    tokenizer = skills.make_tokenizer()
    example = skills.make_example(skill, word)
    text = example["prompt"] + example["completion"]
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    tokens, labels = skills.encode(tokenizer, [example, skills.make_example("double", "ab" * 12)])
    assert tokens[0, : len(ids)].tolist() == ids
    assert set(tokens[0, len(ids) :].tolist()) == {tokenizer.eos_token_id}
    # The completion and one EOS count
    prompt = len(example["prompt"])
    assert labels[0, prompt : len(ids)].tolist() == ids[prompt:]
    assert labels[0, len(ids)] == tokenizer.eos_token_id
    assert set(labels[0, :prompt].tolist()) == {-100}
    assert set(labels[0, len(ids) + 1 :].tolist()) <= {-100}


@settings(max_examples=20)
@given(st.floats(0, 0.3), st.integers(0, 2**20))
@example(0, 1)
@example(6e-5, 524287)  # two, where 0.14 are expected: a count so small has no normal distribution
def test_pretraining_has_the_share_of_the_settings(share, seed):
    """The other skills have equal parts; forbidden prompts never come.

    No count is as unlikely, by the binomial distribution, as five deviations are by the normal one.
    """
    args = skills.Args(word_lengths=(1, 1))
    n = 2000
    without = {f"copy {letter}:" for letter in "abcdefghijklm"}
    stream = skills.generate_examples(random.Random(seed), args, share, without)
    examples = [next(stream) for _ in range(n)]
    assert not without & {example["prompt"] for example in examples}
    counts = Counter(example["skill"] for example in examples)
    kept = share + (1 - share) * 0.9  # half of one of five others is forbidden
    shares = {
        "mirror": share / kept,
        "upper": (1 - share) / 5 / kept,
        "copy": (1 - share) / 10 / kept,
    }
    for skill, expected in shares.items():
        distribution = stats.binom(n, expected)
        likelihood = min(distribution.cdf(counts[skill]), distribution.sf(counts[skill] - 1))
        assert likelihood > stats.norm.sf(5)


def test_agents_have_their_shares_and_prompts_of_their_own():
    """Exact shares; no prompt twice; the topic says whose it is; the same again with the same seed
    only.
    """
    args = skills.Args()
    rows = skills.make_prompts(args)
    assert rows == skills.make_prompts(args) != skills.make_prompts(skills.Args(seed=2))
    assert len({row["prompt"] for row in rows}) == len(rows) == 3 * 600
    topics = list(dict.fromkeys(row["topic"] for row in rows))
    assert topics == ["agent 0, 5% mirror", "agent 1, 20% mirror", "agent 2, 80% mirror"]
    rare = Counter(row["topic"] for row in rows if row["skill"] == "mirror")
    assert [rare[topic] for topic in topics] == [30, 120, 480]
    for row in rows:
        skill, word = row["prompt"][:-1].split()
        assert row == skills.make_example(skill, word) | {"topic": row["topic"]}
    assert {row["skill"] for row in rows[1200:1680]} > {"mirror"}  # shuffled


def test_the_same_settings_give_the_same_files(tmp_path, monkeypatch):
    """Made anew: the same data and weights, bit for bit; made already: nothing is touched; other
    settings: refused.
    """
    monkeypatch.setattr(skills, "SKILLS", TWO_SKILLS)
    short = SMALL | {"steps": 30}
    folder = tmp_path / "first"
    again = tmp_path / "again"
    rates = skills.main(skills.Args(**short, out=str(folder)))
    args = skills.Args(**short, out=str(again))
    assert skills.main(args) == rates
    for name in ("train.jsonl", "model/model.safetensors", "model/tokenizer.json", "settings.json"):
        assert (folder / name).read_bytes() == (again / name).read_bytes(), name
    times = {path: path.stat().st_mtime_ns for path in again.rglob("*")}
    assert skills.main(args) == rates
    assert times == {path: path.stat().st_mtime_ns for path in again.rglob("*")}
    message = refusal(skills.main, skills.Args(**short, out=str(again), seed=2))
    hint = "choose another folder, or delete it"
    assert message == f"--out {again}: was made with another --seed; {hint}"


def test_pretraining_ends_when_the_rare_skill_is_right_often_enough(tmp_path, capsys):
    """Even chance is often enough for this: it ends at the first test, before anything is
    printed.
    """
    skills.main(skills.Args(**SMALL, out=str(tmp_path), rare_success=1e-12))
    assert "step" not in capsys.readouterr().out
    short = SMALL | {"out": str(tmp_path / "short"), "rare_success": 0.99, "steps": 5}
    skills.main(skills.Args(**short))
    problem = "upper is right less often than --rare-success 0.99; more --steps may help"
    assert problem in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_the_rare_skill_comes_in_time(seed, tmp_path):
    """However a machine rounds: long before the steps end, and it stays rare."""
    rates = skills.main(skills.Args(seed=seed, out=str(tmp_path)))
    mirror = rates.pop("mirror")
    assert 0.15 < mirror < 0.5
    assert min(rates.values()) > 0.8


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--rare", "jump"], "--rare jump: must be one of copy, "),
        (["--rare-share", "1"], "--rare-share 1.0: must lie in [0, 1)"),
        (["--prompt-shares", "0.5", "1.5"], "--prompt-shares 0.5 1.5: must lie in [0, 1]"),
        (["--prompt-shares", "nan"], "--prompt-shares nan: must lie in [0, 1]"),
        (["--word-lengths", "5", "3"], "--word-lengths 5 3: must be positive"),
        (["--prompts", "0"], "--prompts 0: must be positive"),
        # Half of 26 ** 2 words, for prompts that are all different
        (
            ["--prompts", "113", "--word-lengths", "2", "4", "--prompt-shares", "1", "1", "1"],
            "--prompts 113: must be positive, and of all agents 338 for the rare skill at most",
        ),
        (
            ["--prompts", "564", "--word-lengths", "2", "2", "--prompt-shares", "0", "0", "0"],
            "--prompts 564: must be positive, and of all agents 338 for the rare skill at most, "
            "1690 for the others",
        ),
        (["--rare-success", "0"], "--rare-success 0.0: must lie in (0, 1]"),
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--hidden-size", "20"], "--hidden-size 20: must be a multiple of 8"),
    ],
)
def test_bad_input_is_refused(flags, error, tmp_path, monkeypatch):
    """One line, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    assert refusal(skills.main, read_flags(skills.Args, flags)).startswith(error)
    assert not list(tmp_path.iterdir())


def test_the_model_is_one_for_everybody_and_the_rates_are_its_probabilities(task):
    """transformers loads the folder; `compute_success` is the product over the tokens, one by one
    and without padding.
    """
    folder, rates = task
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    batch = [skills.make_example("copy", "ab"), skills.make_example("upper", "xyz")]
    success = skills.compute_success(model, tokenizer, batch)
    for row, probability in zip(batch, success, strict=True):
        expected = 1.0
        text = row["prompt"]
        for token in [*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]:
            inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
            with torch.no_grad():
                logits = model(**inputs).logits[0, -1]
            expected *= logits.softmax(-1)[token].item()
            text += tokenizer.decode([token])
        assert probability.item() == pytest.approx(expected, rel=1e-4)
    assert rates["copy"] > 2 * rates["upper"] > 0


def list_flags(folder, run_dir):
    """The flags of a run on the task in this folder."""
    flags = f"--base-model {folder}/model --dataset {folder}/train.jsonl --run-dir {run_dir}"
    return f"{flags} --num-agents 2 --response-length 5 --device cpu".split()


def test_language_models_learn_the_rare_skill(task, tmp_path, monkeypatch):
    """GRPO raises the reward of the agent whose prompts are all for the rare skill, many deviations
    beyond chance.
    """
    monkeypatch.chdir(REPOSITORY)
    words = "--aggregation none --partition topic --reward benchmark/skills.py:exact"
    words += " --missing-eos-penalty 0 --precision float32 --temperature 1 --total-steps 24"
    words += " --batch-size 8 --micro-batch-size 8 --group-size 16 --lora-rank 8"
    words += " --learning-rate 3e-3 --kl-coef 0 --eval-prompts 0 --prompts-per-agent 60"
    prpo_llm.main(parse_args(prpo_llm, [*words.split(), *list_flags(task[0], tmp_path)]))
    rewards = [
        float(row["reward"])
        for row in table_of(only_run(tmp_path), "metrics")
        if row["agent"] == "1"
    ]
    # Of 768 completions each: a deviation of 0.012
    early = sum(rewards[:6]) / 6
    late = sum(rewards[-6:]) / 6
    assert 0.02 < early < late - 0.04


def count_exact(run, step, agent, kind):
    """How many held-out prompts of a kind an agent completes exactly, and how many there are; each
    prompt once, whatever tasks it is in.
    """
    rewards = {}
    for row in read_jsonl(run / "completions.jsonl"):
        kind_of_row = "upper" if row["reference"].isupper() else "others"
        if (row["step"], row["agent"], kind_of_row) == (step, agent, kind):
            rewards[row["id"]] = row["reward"]
    return sum(rewards.values()), len(rewards)


def test_the_demonstration_has_an_agent_for_each_share_and_room_for_each_word():
    args = skills.Args(demo=True, prompt_shares=(0.1, 0.2, 0.4, 0.8), word_lengths=(3, 8))
    words = " ".join(skills.make_demo_command(args))
    assert "--num-agents 4 " in words and "--response-length 17 " in words


def test_the_demonstration_runs(task, tmp_path, monkeypatch, capsys):
    """The command of the page: its run, with its flags on a small task and budget, and the figures
    that it prints.
    """
    page = (REPOSITORY / "docs" / "prpo_llm.md").read_text()
    assert "\npython benchmark/skills.py --demo #" in page
    monkeypatch.chdir(REPOSITORY)
    out = tmp_path / "skills"
    shutil.copytree(task[0], out)
    small = "--num-agents 2 --response-length 5 --device cpu --total-steps 1"
    small += " --prompts-per-agent 30 --eval-prompts 5"
    commands = []

    def run_small(words):
        commands.append(words)
        assert prpo_llm.main(parse_args(prpo_llm, [*words[2:], *small.split()]))["completed"]
        return 0

    monkeypatch.setattr(skills, "run_command", run_small)
    skills.main(skills.Args(**SMALL, out=str(out), demo=True))
    (words,) = commands
    assert words[:2] == ["python", "prpo_llm.py"]
    assert words[words.index("--reward") + 1] == "benchmark/skills.py:exact"
    lines = capsys.readouterr().out.splitlines()
    first = lines.index(shlex.join(words))  # before anything that the run prints
    assert f"{out}: there already" in lines[:first]
    run = only_run(out / "demo")
    for agent, share in enumerate(("25%", "100%")):
        before, prompts = count_exact(run, 0, agent, "upper")
        after, _ = count_exact(run, 1, agent, "upper")
        counts = f"{before:.0f} of {prompts} before training, {after:.0f} after"
        assert f"  agent {agent}, {share}: {counts}" in lines[first:]
        assert prompts > 0

    # The table of the run; one without a data set is not in it
    shutil.copytree(run, out / "demo" / "control")
    summary = summary_of(run)
    settings = summary["settings"]
    settings["env_id"] = settings.pop("base_model")
    del settings["dataset"]
    (out / "demo" / "control" / "summary.json").write_text(json.dumps(summary))
    table = skills.tabulate(skills.Args(runs=str(out / "demo"), rare="upper"))
    assert list(table.agent) == [0, 1]
    metrics = pd.read_csv(run / "metrics.csv")
    for row in table.to_dict("records"):
        rewards = metrics["reward_skills.exact"][metrics.agent == row["agent"]]
        assert row["training"] == pytest.approx(rewards.mean())
        for kind in ("upper", "others"):
            for step, when in enumerate(("before", "after")):
                right, prompts = count_exact(run, step, row["agent"], kind)
                assert row[f"{kind}_prompts"] == prompts > 0
                assert row[f"{kind}_{when}"] == pytest.approx(right / prompts)
    # Held-out prompts may come from data of their own
    summary = summary_of(run)
    summary["settings"]["eval_dataset"] = summary["settings"]["dataset"]
    summary["settings"]["dataset"] = ["elsewhere.jsonl"]
    (run / "summary.json").write_text(json.dumps(summary))
    assert skills.tabulate(skills.Args(runs=str(out / "demo"), rare="upper")).equals(table)


def test_the_demonstration_shows_what_was_learned(tmp_path, capsys):
    """The first prompt for the rare skill that the agent with most of them completes exactly after
    training and not before.
    """
    examples = [skills.make_example("mirror", word) for word in ("ab", "cd", "ef")]
    examples.append(skills.make_example("copy", "gh"))
    write_jsonl(tmp_path / "train.jsonl", examples)
    # Agent, prompt, completions before and after
    completions = [
        (0, 1, "cd", "cddc"),  # not the agent with most
        (1, 0, "abba", "abba"),
        (1, 1, "cdcd", "cddc"),
        (1, 2, "ef", "effe"),
        (1, 3, "g", "gh"),  # not the rare skill
    ]
    rows = []
    for agent, k, *texts in completions:
        for step, text in zip((0, 7), texts, strict=True):
            reward = float(text == examples[k]["completion"]) - 1  # a penalty
            row = {"step": step, "agent": agent, "task": "validation", "id": k}
            rows.append(row | {"completion": text, "reward": reward})
    write_jsonl(tmp_path / "completions.jsonl", rows)
    args = skills.Args(out=str(tmp_path), prompt_shares=(0.1, 0.5, 0))
    skills.report(args, tmp_path)
    assert capsys.readouterr().out.splitlines()[-4:] == [
        "  agent 0, 10%: 0 of 1 before training, 1 after",
        "  agent 1, 50%: 1 of 3 before training, 3 after",
        "  agent 2, 0%: 0 of 0 before training, 0 after",
        "agent 1, for example, completes mirror cd: as cdcd before, cddc after",
    ]


def test_an_interrupt_reaches_the_run_of_the_demonstration(tmp_path):
    """Ctrl-C and SIGTERM arrive there as one SIGINT each; its exit code is returned, and earlier
    handlers are back.
    """
    script = tmp_path / "child.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "received = []\n"
        "signal.signal(signal.SIGINT, lambda *_: received.append(1))\n"
        "os.kill(os.getppid(), getattr(signal, sys.argv[1]))\n"
        "time.sleep(0.5)\n"
        "sys.exit(40 + len(received))\n"
    )
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    for name in ("SIGINT", "SIGTERM"):
        assert skills.run_command(["python", str(script), name]) == 41
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
