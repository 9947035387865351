"""benchmark/pipeline.sh and pipeline.py: pairs that are worse by construction, merged adapters,
TRL's command lines.
"""

import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
from command import parse_args
from helpers import REPOSITORY, call, refusal, write_jsonl
from hypothesis import given
from hypothesis import strategies as st
from language_models import random_llama, word_tokenizer
from peft import (
    AutoPeftModelForCausalLM,
    AutoPeftModelForSequenceClassification,
    LoraConfig,
    get_peft_model,
)
from tokenizers import processors
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

import prpo_llm

sys.path.insert(0, str(REPOSITORY / "benchmark"))
pipeline = importlib.import_module("pipeline")
TEXTS = st.lists(st.sampled_from("abcdefgh"), min_size=4, max_size=9).map(" ".join)


def print_commands(*words):
    """The commands that the shell script prints."""
    command = ["bash", "benchmark/pipeline.sh", *words]
    pipes = {"capture_output": True, "text": True}
    return subprocess.run(command, cwd=REPOSITORY, check=True, **pipes).stdout.splitlines()


# --- data ---


@given(TEXTS, TEXTS, st.lists(TEXTS, min_size=1, max_size=3), st.randoms())
def test_rejected_texts_are_worse_by_construction(line, body, others, rng):
    """Each is what its name says, and none is the text that it is compared with."""
    example = {"completion": line, "request": f"Summarise.\n\n{body}"}
    texts = pipeline.make_worse_texts(example, [*others, line], rng)
    words = line.split()
    assert line not in texts.values()
    assert "" not in texts.values()
    assert set(texts) <= set(pipeline.KINDS)
    assert texts["truncated"].split() == words[: len(words) // 2]
    different = [text for text in others if text != line]
    assert texts["other"] in (different or [pipeline.CONSTANT])
    assert texts["padded"] == f"{line} {texts['other']}"
    assert texts["constant"] == "Return a of the."
    assert body.startswith(texts.get("lead", ""))
    assert len(texts.get("lead", "").split()) <= len(words)
    assert sorted(texts.get("shuffled", line).split()) == sorted(words)


def test_training_pairs_take_the_kinds_in_turn():
    """Every docstring once in training, with each kind in all test pairs; the other text is of the
    same library.
    """
    examples = []
    for k in range(60):
        for topic in ("torch", "numpy"):
            example = {"prompt": f"<chat>{k}", "request": f"x\n\nbody {k} of it"}
            examples.append(example | {"completion": f"{topic} number {k}", "topic": topic})
    train, test = (pipeline.make_pairs(examples, examples, every) for every in (False, True))
    assert len(train) == 120
    assert len({pair["chosen"] for pair in train}) == 120
    counts = Counter(pair["kind"] for pair in train)
    assert set(counts) == set(pipeline.KINDS)
    assert max(counts.values()) - min(counts.values()) <= 6
    assert Counter(pair["kind"] for pair in test).keys() == set(pipeline.KINDS)
    assert len(test) > 5 * 120
    for pair in test:
        if pair["kind"] == "other":
            assert pair["rejected"].split()[0] == pair["chosen"].split()[0]
    assert train == pipeline.make_pairs(examples, examples, every=False)


def test_parts_depend_on_the_text_alone():
    """A docstring is for one use only, whatever else there is; the shares are those of PARTS."""
    parts = Counter(pipeline.choose_part(f"docstring {k}") for k in range(4000))
    shares = dict(zip(pipeline.PARTS, np.diff([0, *pipeline.PARTS.values()]), strict=True))
    assert all(abs(parts[name] / 4000 - share) < 0.03 for name, share in shares.items())
    assert pipeline.choose_part("docstring 1") == pipeline.choose_part("docstring 1")


# --- adapters ---


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """The folder of a tiny random Llama that knows single letters, in bfloat16."""
    folder = tmp_path_factory.mktemp("base")
    word_tokenizer(pad_token=None).save_pretrained(folder)
    random_llama().bfloat16().save_pretrained(folder)
    return folder


def test_the_base_model_of_the_package_becomes_a_folder(base, tmp_path, monkeypatch):
    """Converted in the cache, or still in its own format; of another base model the same."""
    monkeypatch.setattr(
        prpo_llm, "find_base", lambda name: (str(base), {"trust_remote_code": False})
    )
    pipeline.write_base(tmp_path / "base")
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="auto")
    expected = AutoModelForCausalLM.from_pretrained(base, dtype="auto").state_dict()
    assert written.dtype == torch.bfloat16
    assert all(torch.equal(value, expected[name]) for name, value in written.state_dict().items())
    assert AutoTokenizer.from_pretrained(tmp_path / "base").eos_token == "<eos>"


def test_pairs_may_be_messages(tmp_path, monkeypatch):
    """As those of TRL: the last one of each is what is compared."""
    rows = []
    for k, texts in enumerate((("aa", "a"), ("b", "bb"))):
        row = {"prompt": [{"role": "user", "content": f"prompt {k}"}]}
        for name, text in zip(("chosen", "rejected"), texts, strict=True):
            row[name] = [{"role": "assistant", "content": text}]
        rows.append(row)
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    monkeypatch.setattr(pipeline, "load_scorer", lambda model: lambda _, texts: map(len, texts))
    args = SimpleNamespace(pairs=str(tmp_path / "pairs.jsonl"), limit=0, model="x")
    assert pipeline.score_pairs(args).right.tolist() == [True, False]
    # A scorer gets the messages, whose template it may have
    seen = []

    def score(prompts, texts):
        seen.extend(prompts)
        return map(len, texts)

    monkeypatch.setattr(pipeline, "load_scorer", lambda model: score)
    pipeline.score_pairs(args)
    assert seen == 2 * [row["prompt"] for row in rows]


def test_a_conversation_beside_a_prompt_is_no_prompt(tmp_path):
    """Some data hold the chosen answer in a column `messages` too."""
    row = {"prompt": "q", "messages": [{"role": "user", "content": "q"}], "completion": "a"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row))
    assert pipeline.read_rows(str(tmp_path / "pairs.jsonl")) == [{"prompt": "q", "completion": "a"}]
    (as_prompt,) = pipeline.read_rows(str(tmp_path / "pairs.jsonl"), prompt="messages")
    assert as_prompt == row


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "{path} cannot be read: "),
        ("{", "{path} cannot be read: "),
        ('{"chosen": "a", "rejected": "b"}', "--pairs {path}: must have rows with prompt, chosen"),
    ],
)
def test_files_without_pairs_are_refused(text, problem, tmp_path, monkeypatch):
    """Before a model is loaded."""
    monkeypatch.setattr(pipeline, "load_scorer", None)
    path = tmp_path / "pairs.jsonl"
    path.write_text(text)
    args = SimpleNamespace(pairs=str(path), limit=0, model="x")
    assert refusal(pipeline.score_pairs, args).startswith(problem.format(path=path))


def test_a_pair_without_a_new_text_is_scored(tmp_path, monkeypatch):
    """Both orders of the same texts."""
    rows = [{"prompt": "p", "chosen": a, "rejected": b} for a, b in (("long", "s"), ("s", "long"))]
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    monkeypatch.setattr(pipeline, "load_scorer", lambda model: lambda _, texts: map(len, texts))
    args = SimpleNamespace(pairs=str(tmp_path / "pairs.jsonl"), limit=0, model="x")
    assert pipeline.score_pairs(args).right.tolist() == [True, False]


def test_a_model_without_a_score_head_is_no_scorer(base):
    """Its scores would be those of random weights."""
    assert "is no whole model with one score" in refusal(pipeline.load_scorer, str(base))


def make_adapter(base, folder, kind, **options):
    """A LoRA adapter that does something, saved as TRL saves it: with the tokenizer."""
    defaults = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"]}
    config = LoraConfig(**defaults | options)
    model = get_peft_model(kind.from_pretrained(base, dtype=torch.float32), config)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=1e-3 if "lora" in name else 1.0)
    model.save_pretrained(folder)
    for file in base.glob("tokenizer*"):
        shutil.copy(file, folder)


def merge(adapter, out):
    """Merge an adapter into its base."""
    pipeline.main(pipeline.Args("merge", model=str(adapter), out=str(out)))


def test_a_merged_adapter_is_the_same_model(base, tmp_path):
    """Small updates survive, although the base is in bfloat16."""
    make_adapter(base, tmp_path / "adapter", AutoModelForCausalLM, task_type="CAUSAL_LM")
    merge(tmp_path / "adapter", tmp_path / "merged")

    @torch.no_grad()
    def compute_logits(kind, folder):
        ids = torch.tensor([[3, 7, 1, 9, 4]])
        return kind.from_pretrained(folder, dtype=torch.float32)(ids).logits

    plain = compute_logits(AutoModelForCausalLM, base)
    expected = compute_logits(AutoPeftModelForCausalLM, tmp_path / "adapter")
    merged = compute_logits(AutoModelForCausalLM, tmp_path / "merged")
    assert (merged - expected).abs().max() < 1e-6 < 1e-5 < (expected - plain).abs().max()


def test_a_merged_reward_model_scores_as_its_adapter_does(base, tmp_path):
    """Its head is the trained one, and prpo_llm.py reads the score at the end of each text of a
    batch.
    """
    options = {"task_type": "SEQ_CLS", "modules_to_save": ["score"]}
    kind = AutoModelForSequenceClassification
    make_adapter(base, tmp_path / "adapter", _one_label(kind), **options)
    merge(tmp_path / "adapter", tmp_path / "reward")
    score = pipeline.load_scorer(str(tmp_path / "reward"))
    texts = {"prompts": ["c d e f ", "a b "], "completions": ["g h i", "c"]}
    scores = score(**texts)
    options = {"num_labels": 1, "dtype": torch.float32}
    model = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "adapter", **options)
    with torch.no_grad():
        long = model(torch.tensor([[3, 4, 5, 6, 7, 8, 9]])).logits.item()
        short = model(torch.tensor([[1, 2, 3]])).logits.item()
    assert scores == pytest.approx([long, short], abs=1e-5)
    assert abs(long - short) > 1e-3
    args = prpo_llm.Args(reward=(str(tmp_path / "reward"),), precision="float32")
    rewards = prpo_llm.make_reward(args, torch.device("cpu"))
    assert rewards["reward"](**texts) == pytest.approx([long, short], abs=1e-5)


def test_joined_adapters_are_the_reward_model(base, tmp_path):
    """One adapter of the base, by PEFT and as the start of a value model; rank and scale of both
    parts count."""
    make_adapter(base, tmp_path / "sft", AutoModelForCausalLM, task_type="CAUSAL_LM")
    merge(tmp_path / "sft", tmp_path / "merged")
    options = {"task_type": "SEQ_CLS", "modules_to_save": ["score"], "lora_alpha": 3, "r": 2}
    kind = _one_label(AutoModelForSequenceClassification)
    make_adapter(tmp_path / "merged", tmp_path / "reward", kind, **options)
    join = pipeline.Args("join", model=str(tmp_path / "reward"), adapter=str(tmp_path / "sft"))
    join.out = str(tmp_path / "value")
    pipeline.main(join)
    load = AutoPeftModelForSequenceClassification.from_pretrained
    options = {"num_labels": 1, "dtype": torch.float32}
    expected = load(tmp_path / "reward", **options)
    joined = load(tmp_path / "value", **options)
    assert joined.peft_config["default"].base_model_name_or_path == str(base)
    ids = torch.tensor([[3, 4, 5, 6, 7, 8, 9]])
    with torch.no_grad():
        score = expected(ids).logits.item()
        assert joined(ids).logits.item() == pytest.approx(score, abs=1e-5)
    targets = {"lora_targets": ("q_proj", "o_proj"), "precision": "float32", "algorithm": "ppo"}
    ranks = {"value_lora_rank": 6, "value_lora_alpha": 5, "num_agents": 2}
    args = prpo_llm.Args(base_model=str(base), value_init=join.out, **targets, **ranks)
    prpo_llm.check_training(args)
    model, _ = prpo_llm.load_base(args)
    prpo_llm.add_adapters(args, model, 2)
    batch = {
        "prompts": [[3, 4, 5]] * 2,
        "tokens": torch.tensor([6, 7, 8, 9, 1]).expand(2, 1, 1, -1),
        "lengths": torch.full((2, 1, 1), 5),
    }
    with torch.no_grad(), prpo_llm.select_adapters("value"):
        hidden = prpo_llm.compute_hidden(model, batch)
        values = prpo_llm.compute_values(hidden, model.value_head, model.value_bias)
    assert values[:, 0, 0, 4].tolist() == pytest.approx([score] * 2, abs=1e-5)
    make_adapter(base, tmp_path / "wide", AutoModelForCausalLM, target_modules=["q_proj", "k_proj"])
    join.adapter = str(tmp_path / "wide")
    message = f"--adapter {join.adapter}: must have the layers of --model {join.model}"
    assert refusal(pipeline.main, join) == message


def _one_label(kind):
    """The class with a single output."""

    class OneLabel:
        @staticmethod
        def from_pretrained(name, **options):
            model = kind.from_pretrained(name, num_labels=1, **options)
            model.config.pad_token_id = 0
            return model

    return OneLabel


def test_pairs_of_a_prompt_are_no_more_prompts():
    """Copies of a prompt's verdict leave Wilson's interval as it is; with correlated verdicts it
    covers the truth.
    """
    for right, total in ((9, 10), (96, 96), (0, 7), (50, 95)):
        limits = scipy.stats.binomtest(right, total).proportion_ci(method="wilson")
        for copies in (1, 6):
            interval = pipeline.compute_interval(right / total, np.full(total, copies))
            assert interval == pytest.approx((limits.low, limits.high), abs=1e-9)
    # A prompt with many pairs counts more in the share, so that the others count less in the number
    unequal = np.ptp(pipeline.compute_interval(0.5, np.array([20, 1, 1, 1])))
    equal = np.ptp(pipeline.compute_interval(0.5, np.array([6, 6, 6, 5])))
    assert unequal > equal
    rng = np.random.default_rng(0)
    covered = {"prompts": 0, "pairs": 0}
    for _ in range(1000):
        of_prompt = rng.random(40) < 0.8
        shared = rng.random((40, 6)) < 0.9
        verdicts = np.where(shared, of_prompt[:, None], rng.random((40, 6)) < 0.8)
        for name, sizes in (("prompts", np.full(40, 6)), ("pairs", np.ones(240))):
            low, high = pipeline.compute_interval(verdicts.mean(), sizes)
            covered[name] += low <= 0.8 <= high
    assert covered["prompts"] > 940
    assert covered["pairs"] < 700


def test_a_reward_model_scores_messages_in_its_own_template(base, tmp_path):
    """Prompt and completion together, without special tokens that the template has itself; texts
    end with EOS.
    """
    kind = _one_label(AutoModelForSequenceClassification)
    make_adapter(base, tmp_path / "adapter", kind, task_type="SEQ_CLS")
    merge(tmp_path / "adapter", tmp_path / "reward")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "reward")
    tokenizer.chat_template = (
        "{% for message in messages %}{{ 'x ' + message['content'] + ' y ' }}{% endfor %}"
    )
    begin = processors.TemplateProcessing(single="z $A", special_tokens=[("z", 26)])
    tokenizer.backend_tokenizer.post_processor = begin
    tokenizer.save_pretrained(tmp_path / "reward")
    score = pipeline.load_scorer(str(tmp_path / "reward"))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward", num_labels=1)
    rewards = prpo_llm.Args(reward=(str(tmp_path / "reward"),), precision="float32")
    function = prpo_llm.make_reward(rewards, torch.device("cpu"))["reward"]
    letters = {"x": 24, "y": 25, "z": 26}
    cases = [
        ([{"role": "user", "content": "c d"}], "e", [letters["x"], 3, 4, 25, 24, 5, 25]),
        ("c d ", "e", [letters["z"], 3, 4, 5, 0]),
    ]
    for prompt, completion, ids in cases:
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits.item()
        expected = pytest.approx([expected], abs=1e-4)
        assert score([prompt], [completion]) == expected
        if isinstance(prompt, list):
            completion = [{"role": "assistant", "content": completion}]
        assert function(prompts=[prompt], completions=[completion]) == expected
    # Messages beside texts
    prompts = [prompt for prompt, *_ in cases]
    each = [score([prompt], ["e"])[0] for prompt in prompts]
    assert score(prompts, ["e", "e"]) == pytest.approx(each, abs=1e-5)


def test_accuracy_by_kind(tmp_path, monkeypatch, capsys):
    """The share of pairs whose chosen text has the higher score; a file keeps the rows of other
    models.
    """
    kinds = {"four words": "truncated", "four": "truncated", "four words are here and": "padded"}
    rows = [
        {"prompt": "p", "chosen": "four words are here", "rejected": rejected, "kind": kind}
        for rejected, kind in kinds.items()
    ]
    write_jsonl(tmp_path / "pairs.jsonl", rows)

    def measure_length(prompts, texts):
        return [float(len(text)) for text in texts]

    monkeypatch.setattr(pipeline, "load_scorer", lambda name: measure_length)
    files = {"pairs": str(tmp_path / "pairs.jsonl"), "out": str(tmp_path / "accuracy.csv")}
    for model in ("first", "second", "first"):
        pipeline.main(pipeline.Args("accuracy", model=model, **files))
    table = pd.read_csv(files["out"], comment="#")
    assert list(table.reward_model) == ["second"] * 3 + ["first"] * 3
    first = table.iloc[3:].set_index("rejected")
    expected = {"truncated": 1, "padded": 0, "all": 2 / 3}
    assert first.accuracy.to_dict() == pytest.approx(expected, abs=1e-5)
    assert first.pairs.to_dict() == {"truncated": 2, "padded": 1, "all": 3}
    assert first.prompts.to_dict() == {"truncated": 1, "padded": 1, "all": 1}  # they share theirs
    limits = scipy.stats.binomtest(1, 1).proportion_ci(method="wilson")
    assert first.accuracy_ci_low["truncated"] == pytest.approx(limits.low, abs=1e-5)
    assert first.mean_rejected_score["truncated"] == 7
    assert first.mean_chosen_score["all"] == 19
    rouge = (2 / 3 + 0.4) / 2  # F of half and a quarter of the words
    assert first.mean_rejected_rouge["truncated"] == pytest.approx(rouge, abs=1e-5)
    assert 0 < first.accuracy_ci_low["all"] < 2 / 3 < first.accuracy_ci_high["all"] < 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"step": "data"}, "data needs --out"),
        ({"step": "merge"}, "merge needs --model and --out"),
        ({"step": "accuracy"}, "accuracy needs --model and --pairs"),
        (
            {"step": "merge", "model": "nowhere", "out": "x"},
            "--model nowhere: must be a folder with adapter_config.json",
        ),
    ],
)
def test_bad_arguments(args, message):
    """One line that names the flags."""
    assert refusal(pipeline.main, pipeline.Args(**args)) == message


# --- TRL's command lines ---


def test_the_printed_commands_are_understood():
    """Every option is one of TRL's; the paper's values are tables 3 and 4, the adapter fits
    prpo_llm.py.
    """
    parsers = {
        name: importlib.import_module(f"trl.scripts.{name}").make_parser()
        for name in ("sft", "reward")
    }
    parsed = {}  # (command, mode) -> its options
    for mode in ((), ("--quick",)):
        lines = print_commands("all", *mode)
        in_steps = []
        for step in ("data", "sft", "reward", "judge"):
            in_steps += print_commands(step, *mode)
        assert lines == in_steps
        assert len(set(lines)) == len(lines)
        for line in lines:
            program, name, *argv = shlex.split(line)
            if program == "trl":
                *groups, rest = parsers[name].parse_args_and_config(
                    [*argv, "--use_cpu"], return_remaining_strings=True
                )
                assert not rest
                options = {}
                for group in groups:
                    options |= vars(group)
                parsed.setdefault((name, *mode), options)
    policy = prpo_llm.Args()
    quick = parsed["sft", "--quick"]
    assert quick["lora_r"] == policy.lora_rank
    assert quick["lora_alpha"] == policy.lora_alpha
    assert quick["lora_dropout"] == 0
    assert tuple(quick["lora_target_modules"]) == policy.lora_targets
    assert not quick["lora_modules_to_save"]
    for name, batch_size, accumulated in (("sft", 4, 4), ("reward", 2, 8)):
        paper = parsed[name,]
        assert paper["lora_r"] == 16
        assert paper["lora_alpha"] == 32
        assert paper["lora_dropout"] == 0
        assert paper["dtype"] == "bfloat16"
        assert paper["lora_target_modules"] == ["q_proj", "k_proj", "v_proj", "o_proj"]
        assert paper["per_device_train_batch_size"] == batch_size
        assert paper["gradient_accumulation_steps"] == accumulated
        assert paper["learning_rate"] == 1e-5
        assert paper["max_length"] == 1024
    assert parsed["sft",]["num_train_epochs"] == 2
    (posts,) = parsed["sft",]["datasets"]
    assert (posts.path, posts.split) == ("trl-lib/tldr", "train[:16722]")
    assert parsed["reward",]["num_train_epochs"] == 1
    assert parsed["reward",]["gradient_checkpointing"] is False
    for key in (("reward",), ("reward", "--quick")):
        assert parsed[key]["lora_task_type"] == "SEQ_CLS"
        assert parsed[key]["lora_modules_to_save"] == ["score"]


def test_no_agent_trains_on_the_posts_of_the_supervised_model(base, tmp_path):
    """What the printed commands name, from a folder in the hub's place: all posts, each once."""
    rows = [{"prompt": f"post {k}", "completion": str(k)} for k in range(16_800)]
    pd.DataFrame(rows).to_json(tmp_path / "train.jsonl", orient="records", lines=True)
    (sft,) = [line for line in print_commands("sft") if line.startswith("trl sft ")]
    parser = importlib.import_module("trl.scripts.sft").make_parser()
    argv = [*shlex.split(sft)[2:], "--use_cpu"]
    *_, mixture = parser.parse_args_and_config(argv)
    name = mixture.datasets[0].path
    mixture.datasets[0].path = str(tmp_path)
    supervised = importlib.import_module("trl").get_dataset(mixture)["train"]["completion"]
    sweep = ["bash", "benchmark/llm.sh"]
    printed = subprocess.run(sweep, cwd=REPOSITORY, capture_output=True, text=True).stdout
    lines = [shlex.split(line) for line in printed.splitlines()]
    (dataset,) = {words[words.index("--dataset") + 1] for words in lines}
    assert dataset.startswith(f"{name}:")
    tokenizer = AutoTokenizer.from_pretrained(base)
    path = dataset.replace(name, str(tmp_path))
    examples = prpo_llm.load_examples(prpo_llm.Args(), tokenizer, path)
    agents = [example["completion"] for example in examples]
    assert len(supervised) == 16_722
    assert sorted([*supervised, *agents]) == sorted(row["completion"] for row in rows)


@pytest.mark.parametrize("words", [["every"], [], ["sft", "--results"]])
def test_unknown_steps_are_refused(words):
    """One line that names them, and exit code 2."""
    command = ["bash", "benchmark/pipeline.sh", *words]
    process = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    step, option = [*words, "", ""][:2]
    problem = f"pipeline.sh: unknown step '{step}' or option '{option}'; try --help\n"
    assert process.returncode == 2
    assert process.stderr == problem
    assert not process.stdout


@pytest.mark.slow
def test_the_pipeline_runs(tmp_path):
    """Adapter, reward models, a run from them, the judge and the table, as the page has it, on a
    tiny budget.
    """
    page = (REPOSITORY / "docs" / "pipeline.md").read_text()
    laptop = re.findall(r"```bash\n(.*?)```", page, re.S)[0].splitlines()
    assert [line.split(" | ")[-1].split()[:2] for line in laptop] == [
        ["python", "benchmark/run.py"],
        ["python", "benchmark/run.py"],
        ["python", "benchmark/judge.py"],
        ["python", "benchmark/table.py"],
    ]
    for line in print_commands("all", "--quick"):
        program, *words = shlex.split(line.replace("runs/", f"{tmp_path}/"))
        if program == "trl":
            words = ["-m", "trl.cli.main", *words, "--max_steps", "2"]
            words += ["--per_device_train_batch_size", "2"]
        elif words[1] == "data":
            words += ["--limit", "80"]
        process = call(*words, cwd=REPOSITORY, timeout=600)
        assert process.returncode == 0, process.stderr[-3000:]
    accuracy = pd.read_csv(tmp_path / "docstrings" / "reward_accuracy.csv", comment="#")
    assert accuracy.reward_model.nunique() == 2
    assert set(accuracy.rejected) == {*pipeline.KINDS, "all"}
    sweep = ["bash", "benchmark/table1.sh", "quick"]
    printed = subprocess.run(sweep, cwd=REPOSITORY, capture_output=True, text=True).stdout
    tiny = "--total-steps 1 --batch-size 1 --micro-batch-size 1 --group-size 2"
    tiny += " --prompts-per-agent 4 --response-length 4 --eval-prompts 2"
    isolated_and_pr = re.compile("--partition iid .* (isolated|pr0.6)-grpo_")
    lines = [line for line in printed.splitlines() if isolated_and_pr.search(line)]
    (from_page,) = re.findall(r"^python prpo_llm.py.*runs/docstrings.*$", page, re.M)
    for line in [*lines, f"{from_page} --run-dir runs/alone"]:
        words = shlex.split(line.replace("runs/", f"{tmp_path}/"))[2:]
        prpo_llm.main(parse_args(prpo_llm, [*words, *tiny.split()]))
    runs = tmp_path / "table1-quick"
    folders = tuple(str(path.parent) for path in runs.glob("*/summary.json"))
    judge = importlib.import_module("judge")
    model = str(tmp_path / "docstrings" / "judge")
    rates = judge.main(judge.Args(runs=folders, reward_model=model))
    of_all = rates[rates.agent == "all"].win_rate
    assert len(of_all) == 2
    assert rates.win_rate.between(0, 1).all()
    table = importlib.import_module("table")
    out = str(tmp_path / "t.csv")
    table.main(table.Args(runs=(str(runs),), measure="win_rate", evp=1, csv=out))
    written = pd.read_csv(out, comment="#")
    methods = [name.partition("_")[0] for name in written.method]
    assert methods == ["isolated-grpo", "pr0.6-grpo"]
    assert written.win_rate.tolist() == pytest.approx(of_all.tolist(), abs=1e-5)


def test_data_are_read_as_prpo_llm_reads_them(tmp_path):
    """A table, and a split of a configuration; a split of the name comes before the tool's own."""
    (tmp_path / "rows.csv").write_text("prompt,completion\na,b\n")
    expected = [{"prompt": "a", "completion": "b"}]
    assert pipeline.read_rows(str(tmp_path / "rows.csv"), split="validation") == expected
    folder = tmp_path / "data"
    folder.mkdir()
    files = [{"split": split, "path": f"{split}.csv"} for split in ("train", "validation")]
    configs = [{"config_name": "own", "data_files": files}]
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    for split in ("train", "validation"):
        (folder / f"{split}.csv").write_text(f"prompt,completion\n{split},b\n")
    for name, prompt in ((f"{folder}#own", "validation"), (f"{folder}#own:train", "train")):
        (row,) = pipeline.read_rows(name, split="validation")
        assert row["prompt"] == prompt
