"""benchmark/pipeline.sh and pipeline.py: pairs that are worse by construction, merged adapters, TRL's command lines."""

import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
from command import parse_args
from helpers import REPOSITORY, call
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import (
    AutoPeftModelForCausalLM,
    AutoPeftModelForSequenceClassification,
    LoraConfig,
    get_peft_model,
)
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import prpo_llm

sys.path.insert(0, str(REPOSITORY / "benchmark"))
pipeline = importlib.import_module("pipeline")
TEXTS = st.lists(st.sampled_from("abcdefgh"), min_size=4, max_size=9).map(" ".join)


def lines_of(*words):
    """The commands that the shell script prints."""
    command = ["bash", "benchmark/pipeline.sh", *words]
    return subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.splitlines()


# --- data ---


@settings(deadline=None)
@given(TEXTS, TEXTS, st.lists(TEXTS, min_size=1, max_size=3), st.randoms())
def test_rejected_texts_are_worse_by_construction(own, body, others, rng):
    """Each is what its name says, and none is the text that it is compared with."""
    example = {"completion": own, "request": f"Summarise.\n\n{body}"}
    texts = pipeline.worse(example, [*others, own, pipeline.CONSTANT], rng)
    words = own.split()
    assert (
        own not in texts.values() and "" not in texts.values() and set(texts) <= set(pipeline.KINDS)
    )
    assert texts["truncated"].split() == words[: len(words) // 2]
    assert (
        texts["other"] in [*others, pipeline.CONSTANT]
        and texts["padded"] == f"{own} {texts['other']}"
    )
    assert texts["constant"] == "Return a of the."
    assert body.startswith(texts.get("lead", "")) and len(texts.get("lead", "").split()) <= len(
        words
    )
    assert sorted(texts.get("shuffled", own).split()) == sorted(words)


def test_training_pairs_take_the_kinds_in_turn():
    """Every docstring once in training, with each kind in all test pairs; the other text is of the same library."""
    examples = [
        {
            "prompt": f"<chat>{k}",
            "request": f"x\n\nbody {k} of it",
            "completion": f"{topic} number {k}",
            "topic": topic,
        }
        for k in range(60)
        for topic in ("torch", "numpy")
    ]
    train, test = (pipeline.pairs(examples, examples, every) for every in (False, True))
    assert len(train) == 120 and len({pair["chosen"] for pair in train}) == 120
    counts = Counter(pair["kind"] for pair in train)
    assert set(counts) == set(pipeline.KINDS) and max(counts.values()) - min(counts.values()) <= 6
    assert (
        Counter(pair["kind"] for pair in test).keys() == set(pipeline.KINDS) and len(test) > 5 * 120
    )
    for pair in test:
        if pair["kind"] == "other" and pair["rejected"] != pipeline.CONSTANT:
            assert pair["rejected"].split()[0] == pair["chosen"].split()[0]
    assert train == pipeline.pairs(examples, examples, every=False)


def test_parts_depend_on_the_text_alone():
    """A docstring is for one use only, whatever else there is; the shares are those asked for."""
    parts = Counter(pipeline.part_of(f"docstring {k}") for k in range(4000))
    shares = dict(zip(pipeline.PARTS, np.diff([0, *pipeline.PARTS.values()]), strict=True))
    assert all(abs(parts[name] / 4000 - share) < 0.03 for name, share in shares.items())
    assert pipeline.part_of("docstring 1") == pipeline.part_of("docstring 1")


# --- adapters ---


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """The folder of a tiny random Llama that knows single letters, in bfloat16."""
    folder = tmp_path_factory.mktemp("base")
    words = ["<eos>", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(
        models.WordLevel({word: k for k, word in enumerate(words)}, unk_token="<eos>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<eos>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
    }
    shape |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "eos_token_id": 0,
        "bos_token_id": None,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **shape)).bfloat16().save_pretrained(folder)
    return folder


def make_adapter(base, folder, kind, **options):
    """A LoRA adapter that does something, saved as TRL saves it: with the tokenizer."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "o_proj"], **options)
    model = get_peft_model(kind.from_pretrained(base, dtype=torch.float32), config)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=1e-3 if "lora" in name else 1.0)
    model.save_pretrained(folder)
    for file in base.glob("tokenizer*"):
        shutil.copy(file, folder)


def test_a_merged_adapter_is_the_same_model(base, tmp_path):
    """Small updates survive, although the base is in bfloat16."""
    make_adapter(base, tmp_path / "adapter", AutoModelForCausalLM, task_type="CAUSAL_LM")
    pipeline.main(
        pipeline.Args("merge", model=str(tmp_path / "adapter"), out=str(tmp_path / "merged"))
    )
    ids = torch.tensor([[3, 7, 1, 9, 4]])
    with torch.no_grad():
        plain, expected, found = (
            kind.from_pretrained(folder, dtype=torch.float32)(ids).logits
            for kind, folder in (
                (AutoModelForCausalLM, base),
                (AutoPeftModelForCausalLM, tmp_path / "adapter"),
                (AutoModelForCausalLM, tmp_path / "merged"),
            )
        )
    assert (found - expected).abs().max() < 1e-6 < 1e-5 < (expected - plain).abs().max()


def test_a_merged_reward_model_scores_as_its_adapter_does(base, tmp_path):
    """Its head is the trained one, and prpo_llm.py reads the score at the end of each text of a batch."""
    options = {"task_type": "SEQ_CLS", "modules_to_save": ["score"]}
    kind = AutoModelForSequenceClassification
    make_adapter(base, tmp_path / "adapter", _one_label(kind), **options)
    pipeline.main(
        pipeline.Args("merge", model=str(tmp_path / "adapter"), out=str(tmp_path / "reward"))
    )
    score = pipeline.load_scorer(str(tmp_path / "reward"))
    found = score(["c d e f ", "a b "], ["g h i", "c"])
    options = {"num_labels": 1, "dtype": torch.float32}
    model = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "adapter", **options)
    with torch.no_grad():
        alone = [
            model(torch.tensor([ids])).logits.item() for ids in ([3, 4, 5, 6, 7, 8, 9], [1, 2, 3])
        ]
    assert found == pytest.approx(alone, abs=1e-5) and abs(alone[0] - alone[1]) > 1e-3
    rewards = prpo_llm.make_reward(
        prpo_llm.Args(reward=(str(tmp_path / "reward"),), precision="float32"), torch.device("cpu")
    )
    said = {"prompts": ["c d e f ", "a b "], "completions": ["g h i", "c"]}
    assert rewards["reward"](**said) == pytest.approx(alone, abs=1e-5)


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
    """Copies of a prompt's verdict leave Wilson's interval as it is; with correlated verdicts it covers the truth."""
    for right, total in ((9, 10), (96, 96), (0, 7), (50, 95)):
        limits = scipy.stats.binomtest(right, total).proportion_ci(method="wilson")
        for copies in (1, 6):
            found = pipeline.interval_of_share(right / total, np.full(total, copies))
            assert found == pytest.approx((limits.low, limits.high), abs=1e-9)
    # A prompt with many pairs counts more in the share, so that the others count less in the number
    wide = np.subtract(*pipeline.interval_of_share(0.5, np.array([20, 1, 1, 1])))
    assert wide < np.subtract(
        *pipeline.interval_of_share(0.5, np.array([6, 6, 6, 5]))
    )  # widths, negated
    rng = np.random.default_rng(0)
    covered = {"prompts": 0, "pairs": 0}
    for _ in range(1000):
        of_prompt = rng.random(40) < 0.8
        verdicts = np.where(
            rng.random((40, 6)) < 0.9, of_prompt[:, None], rng.random((40, 6)) < 0.8
        )
        for name, sizes in (("prompts", np.full(40, 6)), ("pairs", np.ones(240))):
            low, high = pipeline.interval_of_share(verdicts.mean(), sizes)
            covered[name] += low <= 0.8 <= high
    assert covered["prompts"] > 940 and covered["pairs"] < 700


def test_a_reward_model_scores_messages_in_its_own_template(base, tmp_path):
    """Prompt and completion together, without special tokens that the template has itself; texts end with EOS."""
    make_adapter(
        base,
        tmp_path / "adapter",
        _one_label(AutoModelForSequenceClassification),
        task_type="SEQ_CLS",
    )
    pipeline.main(
        pipeline.Args("merge", model=str(tmp_path / "adapter"), out=str(tmp_path / "reward"))
    )
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
        assert score([prompt], [completion]) == pytest.approx([expected], abs=1e-4)
        if isinstance(prompt, list):
            completion = [{"role": "assistant", "content": completion}]
        assert function(prompts=[prompt], completions=[completion]) == pytest.approx(
            [expected], abs=1e-4
        )


def test_accuracy_by_kind(tmp_path, monkeypatch, capsys):
    """The share of pairs whose chosen text has the higher score; a file keeps the rows of other models."""
    rows = [
        {"prompt": "p", "chosen": "four words are here", "rejected": rejected, "kind": kind}
        for kind, rejected in (
            ("truncated", "four words"),
            ("truncated", "four"),
            ("padded", "four words are here and"),
        )
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    length = lambda prompts, texts: [float(len(text)) for text in texts]  # noqa: E731
    monkeypatch.setattr(pipeline, "load_scorer", lambda name: length)
    for model in ("first", "second", "first"):
        out = tmp_path / "accuracy.csv"
        pipeline.main(
            pipeline.Args(
                "accuracy", model=model, pairs=str(tmp_path / "pairs.jsonl"), out=str(out)
            )
        )
    table = pd.read_csv(out, comment="#")
    assert list(table.reward_model) == ["second"] * 3 + ["first"] * 3
    first = table.iloc[3:].set_index("rejected")
    assert first.accuracy.to_dict() == pytest.approx(
        {"truncated": 1, "padded": 0, "all": 2 / 3}, abs=1e-5
    )
    assert first.pairs.to_dict() == {"truncated": 2, "padded": 1, "all": 3}
    assert first.prompts.to_dict() == {"truncated": 1, "padded": 1, "all": 1}  # they share theirs
    limits = scipy.stats.binomtest(1, 1).proportion_ci(method="wilson")
    assert first.accuracy_ci_low["truncated"] == pytest.approx(limits.low, abs=1e-5)
    assert first.mean_rejected_score["truncated"] == 7 and first.mean_chosen_score["all"] == 19
    assert first.mean_rejected_rouge["truncated"] == pytest.approx(
        (2 / 3 + 0.4) / 2, abs=1e-5
    )  # F of half and a quarter
    assert 0 < first.accuracy_ci_low["all"] < 2 / 3 < first.accuracy_ci_high["all"] < 1


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("data",), "data needs --out"),
        (("merge",), "merge needs --model and --out"),
        (("accuracy",), "accuracy needs --model and --pairs"),
    ],
)
def test_bad_arguments(args, said):
    """One line that names the flags."""
    with pytest.raises(SystemExit, match=said):
        pipeline.main(pipeline.Args(*args))
    with pytest.raises(SystemExit, match="must be a folder with adapter_config.json"):
        pipeline.main(pipeline.Args("merge", model="nowhere", out="x"))


# --- TRL's command lines ---


def test_the_printed_commands_are_understood():
    """Every option is one of TRL's; the paper's values are tables 3 and 4, the adapter fits prpo_llm.py."""
    trl = {
        name: importlib.import_module(f"trl.scripts.{name}").make_parser()
        for name in ("sft", "reward")
    }
    parsed = {}
    for mode in ((), ("--quick",)):
        lines = lines_of("all", *mode)
        steps = [
            line for step in ("data", "sft", "reward", "judge") for line in lines_of(step, *mode)
        ]
        assert lines == steps and len(set(lines)) == len(lines)
        for line in lines:
            program, name, *argv = shlex.split(line)
            if program == "trl":
                *found, rest = trl[name].parse_args_and_config(
                    [*argv, "--use_cpu"], return_remaining_strings=True
                )
                assert not rest
                parsed.setdefault(
                    (name, *mode), {key: value for own in found for key, value in vars(own).items()}
                )
    policy, quick = prpo_llm.Args(), parsed["sft", "--quick"]
    assert (quick["lora_r"], quick["lora_alpha"], quick["lora_dropout"]) == (
        policy.lora_rank,
        policy.lora_alpha,
        0,
    )
    assert (
        tuple(quick["lora_target_modules"]) == policy.lora_targets
        and not quick["lora_modules_to_save"]
    )
    for name, batch, accumulated in (("sft", 4, 4), ("reward", 2, 8)):
        paper = parsed[name,]
        assert (paper["lora_r"], paper["lora_alpha"], paper["lora_dropout"], paper["dtype"]) == (
            16,
            32,
            0,
            "bfloat16",
        )
        assert paper["lora_target_modules"] == ["q_proj", "k_proj", "v_proj", "o_proj"]
        assert (paper["per_device_train_batch_size"], paper["gradient_accumulation_steps"]) == (
            batch,
            accumulated,
        )
        assert paper["learning_rate"] == 1e-5 and paper["max_length"] == 1024
    assert (
        parsed["sft",]["max_steps"] == 2 * 16_722 // 16
        and parsed["reward",]["num_train_epochs"] == 1
    )
    assert parsed["reward",]["gradient_checkpointing"] is False
    for key in (("reward",), ("reward", "--quick")):
        assert parsed[key]["lora_task_type"] == "SEQ_CLS" and parsed[key][
            "lora_modules_to_save"
        ] == ["score"]


@pytest.mark.parametrize("words", [["every"], [], ["sft", "--results"]])
def test_unknown_steps_are_refused(words):
    """One line, and a non-zero exit code."""
    process = subprocess.run(
        ["bash", "benchmark/pipeline.sh", *words], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert process.returncode == 2 and "try --help" in process.stderr and not process.stdout


@pytest.mark.slow
def test_the_pipeline_runs(tmp_path):
    """Adapter, reward models, a run from them, the judge and the table, as the page has it, on a tiny budget."""
    page = (REPOSITORY / "docs" / "pipeline.md").read_text()
    laptop = re.findall(r"```bash\n(.*?)```", page, re.S)[0].splitlines()
    assert [line.split(" | ")[-1].split()[:2] for line in laptop] == [
        ["python", "benchmark/run.py"],
        ["python", "benchmark/run.py"],
        ["python", "benchmark/judge.py"],
        ["python", "benchmark/table.py"],
    ]
    for line in lines_of("all", "--quick"):
        line = line.replace("runs/", f"{tmp_path}/")
        words = shlex.split(line)
        if words[0] == "trl":
            words[:1] = ["-m", "trl.cli.main"]
            words += ["--max_steps", "2", "--per_device_train_batch_size", "2"]
        else:
            words = words[1:] + (["--limit", "80"] if words[2] == "data" else [])
        process = call(*words, cwd=REPOSITORY, timeout=600)
        assert process.returncode == 0, process.stderr[-3000:]
    accuracy = pd.read_csv(tmp_path / "docstrings" / "reward_accuracy.csv", comment="#")
    assert accuracy.reward_model.nunique() == 2 and set(accuracy.rejected) == {
        *pipeline.KINDS,
        "all",
    }
    sweep = ["bash", "benchmark/sweep.sh", "table1", "--quick"]
    lines = subprocess.run(
        sweep, cwd=REPOSITORY, capture_output=True, text=True
    ).stdout.splitlines()
    tiny = [
        "--total-steps",
        "1",
        "--batch-size",
        "1",
        "--micro-batch-size",
        "1",
        "--group-size",
        "2",
    ]
    tiny += ["--prompts-per-agent", "4", "--response-length", "4", "--eval-prompts", "2"]
    chosen = [line for line in lines if re.search(" grpo_iid_(isolated|pr0.6)_", line)]
    (alone,) = re.findall(r"^python prpo_llm.py.*runs/docstrings.*$", page, re.M)
    for line in [*chosen, f"{alone} --run-dir runs/alone"]:
        prpo_llm.main(
            parse_args(prpo_llm, [*shlex.split(line.replace("runs/", f"{tmp_path}/"))[2:], *tiny])
        )
    folders = [str(path.parent) for path in (tmp_path / "table1-quick").glob("*/summary.json")]
    judge, table = (importlib.import_module(name) for name in ("judge", "table"))
    rates = judge.main(
        judge.Args(runs=tuple(folders), reward_model=str(tmp_path / "docstrings" / "judge"))
    )
    assert len(rates[rates.agent == "all"]) == 2 and rates.win_rate.between(0, 1).all()
    table.main(
        table.Args(
            runs=(str(tmp_path / "table1-quick"),), measure="win_rate", csv=str(tmp_path / "t.csv")
        )
    )
    found = pd.read_csv(tmp_path / "t.csv", comment="#")
    assert list(found.method) == ["isolated", "PR, p = 0.6"]
    assert found["held-out"].tolist() == pytest.approx(
        rates[rates.agent == "all"].win_rate.tolist(), abs=1e-5
    )
