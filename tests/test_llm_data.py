"""Data and rewards of language models: what is read, who gets what, what is held out, what a
completion is worth.
"""

import functools
import importlib
import json
import math
import os
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn as nn
from command import parse_args
from helpers import (
    REPOSITORY,
    config_of,
    copy_config,
    only_run,
    read_jsonl,
    refusal,
    run_ranks,
    table_of,
    write_jsonl,
)
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from language_models import flags, rows_of, tiny, train, weights_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

import prpo_llm

sys.path.insert(0, str(REPOSITORY / "benchmark"))
docstrings = importlib.import_module("docstrings")
partition = importlib.import_module("partition")

TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'][0] + ' ' + message['content'] + ' ' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'z z ' }}{% endif %}"
)


@pytest.fixture
def tokenizer(files):
    """A tokenizer of letters without a chat template."""
    return AutoTokenizer.from_pretrained(files / "model")


@pytest.fixture
def chatty(files):
    """The same with one, which names who speaks."""
    tokenizer = AutoTokenizer.from_pretrained(files / "model")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


# --- docstrings ---


def toolbox(folder, monkeypatch):
    """Make a small package the only topic of the docstring task, with an empty cache."""
    body = "It does what it says, for every value that it is given. " * 5
    (folder / "toolbox").mkdir()
    (folder / "toolbox" / "__init__.py").write_text(
        f'''class Hammer:
    """Drives nails
    into walls.

    {body}
    """

    def copy(self):
        """Another first line of this body.

        {body}
        """

    def short(self):
        """Has no body to speak of.

        Nothing.
        """

    async def saw(self):
        """Cuts planks of wood.

        Other than that: {body}
        """
'''
    )
    (folder / "toolbox" / "broken.py").write_text("def (:")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(docstrings, "TOPICS", ("toolbox", "absent"))
    monkeypatch.setattr(docstrings.importlib.metadata, "version", lambda name: "1.0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    return body.strip()


def test_docstrings_are_bodies_to_be_summarised_in_their_first_lines(tmp_path, monkeypatch, capsys):
    """One pair per body, in a fixed order, as messages; what is too short and what cannot be parsed
    is left out."""
    body = toolbox(tmp_path, monkeypatch)
    request = "Summarise this documentation of toolbox in one short sentence.\n\n"
    pairs = [
        (request + body, "Drives nails into walls."),
        (f"{request}Other than that: {body}", "Cuts planks of wood."),
    ]
    expected = [
        {
            "prompt": [{"role": "user", "content": prompt}],
            "completion": [{"role": "assistant", "content": completion}],
            "topic": "toolbox",
        }
        for prompt, completion in pairs
    ]
    docstrings.main(docstrings.Args(out=str(tmp_path / "new" / "own.jsonl"), topics=("toolbox",)))
    assert read_jsonl(tmp_path / "new" / "own.jsonl") == expected
    assert "2 of toolbox" in capsys.readouterr().out
    args = docstrings.Args(out=str(tmp_path / "other.jsonl"), topics=("toolbox", "absent"))
    with pytest.raises(
        SystemExit, match="^--topics toolbox absent: the package absent is not installed$"
    ):
        docstrings.main(args)
    assert not (tmp_path / "other.jsonl").exists()


# --- what is read ---


def test_messages_get_the_chat_template_and_texts_stand_as_they_are(
    files, tokenizer, chatty, tmp_path
):
    """Of users' own data too, with a system prompt and earlier turns; a model without a template
    reads the contents."""
    talk = [{"role": "system", "content": "a b"}, {"role": "user", "content": "c d"}]
    answer = [{"role": "assistant", "content": "e"}]
    name = write_jsonl(tmp_path / "talk.jsonl", [{"prompt": talk, "completion": answer}])
    args = tiny(files, tmp_path)
    (example,) = prpo_llm.load_examples(args, chatty, name)
    assert (
        example["prompt"] == "s a b u c d z z "
        and example["completion"] == "e"
        and example["topic"] == "c d"
    )
    assert example["ids"] == chatty.apply_chat_template(
        talk, add_generation_prompt=True, return_dict=False
    )
    (plain,) = prpo_llm.load_examples(args, tokenizer, name)
    assert plain["prompt"] == "a b\n\nc d" and plain["ids"] == tokenizer("a b c d")["input_ids"]
    name = write_jsonl(tmp_path / "text.jsonl", [{"prompt": "a b", "completion": "e"}])
    assert [example["ids"] for example in prpo_llm.load_examples(args, chatty, name)] == [
        chatty("a b")["input_ids"]
    ]


class WithSpecialTokens:
    """A tokenizer that begins a text with a token of its own, as Llama's does."""

    chat_template = TEMPLATE

    def __init__(self, inner):
        self.inner = inner
        self.apply_chat_template = inner.apply_chat_template

    def __call__(self, texts, add_special_tokens=True):
        return {
            "input_ids": [[0] * add_special_tokens + ids for ids in self.inner(texts)["input_ids"]]
        }


def test_special_tokens_stand_before_texts_only(files, chatty, tmp_path):
    """A chat template has its own."""
    rows = [
        {"prompt": [{"role": "user", "content": "c"}], "completion": "e"},
        {"prompt": "c", "completion": "e"},
    ]
    args = tiny(files, tmp_path)
    name = write_jsonl(tmp_path / "data.jsonl", rows)
    first = {
        example["id"]: example["ids"][0]
        for example in prpo_llm.load_examples(args, WithSpecialTokens(chatty), name)
    }
    assert first[0] != 0 and first[1] == 0


def test_tldr_as_it_lies_on_the_hub(files, tokenizer, tmp_path):
    """Columns prompt and completion, the subreddit in the prompt's first line, splits in files of a
    folder."""
    folder = tmp_path / "tldr"
    folder.mkdir()
    subreddits = ["tifu", "loseit", "tifu", "dating_advice", "tifu", "loseit"] * 8
    rows = [
        {
            "prompt": f"SUBREDDIT: r/{subreddit}\n\nTITLE: {chr(97 + k % 26)} {k}\n\n"
            "POST: b\n\nTL;DR:",
            "completion": " c",
        }
        for k, subreddit in enumerate(subreddits)
    ]
    write_jsonl(folder / "train.jsonl", rows)
    write_jsonl(
        folder / "validation.jsonl", [row | {"prompt": row["prompt"] + " d"} for row in rows]
    )
    args = tiny(
        files, tmp_path, dataset=str(folder), partition="topic", eval_dataset=f"{folder}:validation"
    )
    examples, tests, _ = prpo_llm.deal(args, tokenizer, range(2))
    # The largest
    assert [
        {example["topic"] for example in examples_of_part} for examples_of_part in examples.values()
    ] == [
        {"tifu"},
        {"loseit"},
    ]
    assert list(tests) == ["validation", "tifu", "loseit"]
    assert all(
        example["prompt"].endswith("TL;DR: d")
        for examples_of_part in tests.values()
        for example in examples_of_part
    )
    args.topics = ("dating_advice", "tifu")
    examples, _, _ = prpo_llm.deal(args, tokenizer, range(2))
    assert {example["topic"] for example in examples[0]} == {"dating_advice"} and examples[0][0][
        "completion"
    ] == " c"


def test_columns_have_the_names_that_flags_give_them(files, tokenizer, tmp_path):
    """And a topic column that a flag names must be there."""
    rows = [{"question": "a b", "answer": "c", "place": 7}]
    name = write_jsonl(tmp_path / "data.jsonl", rows)
    names = {"prompt_column": "question", "completion_column": "answer"}
    args = tiny(files, tmp_path, **names, topic_column="place")
    (example,) = prpo_llm.load_examples(args, tokenizer, name)
    assert (example["prompt"], example["completion"], example["topic"]) == ("a b", "c", "7")
    args = tiny(files, tmp_path, **names, topic_column="source")
    message = refusal(prpo_llm.load_examples, args, tokenizer, name)
    assert message.startswith(f"--dataset {name}: row 1: no source in ")
    args = tiny(files, tmp_path, prompt_column="question", completion_column="reply")
    message = refusal(prpo_llm.load_examples, args, tokenizer, name)
    assert message.startswith(f"--dataset {name}: row 1: no reply in ")


image = {"type": "image", "image": "a.png"}


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([{"text": "a"}], "row 1: no prompt in {'text': 'a'}"),
        ([], "is empty"),
        ([{"prompt": "a"}, {"prompt": None}], "row 2: no prompt in {'prompt': None}"),
        (
            [{"prompt": "a"}, {"prompt": []}],
            "row 2: column prompt: neither a text nor messages: []",
        ),
        ([{"prompt": 3}], "row 1: column prompt: neither a text nor messages: 3"),
        (
            [{"prompt": "a", "completion": {"b": 1}}],
            "row 1: column completion: neither a text nor messages: {'b': 1}",
        ),
        (
            [{"prompt": [{"role": "user"}]}],
            "row 1: column prompt: no message with a role and a content: {'role': 'user'}",
        ),
        (
            [{"prompt": [{"role": "user", "content": [image]}]}],
            "row 1: column prompt: a part of type image, where only texts are read",
        ),
    ],
)
def test_rows_that_cannot_be_used(files, tmp_path, rows, problem):
    """Whichever row it is, the line is printed before training."""
    name = write_jsonl(tmp_path / "bad.jsonl", rows)
    message = refusal(prpo_llm.main, tiny(files, tmp_path / "runs", dataset=name))
    assert message == f"--dataset {name}: {problem}"
    assert not (tmp_path / "runs").exists()


def test_lines_of_a_file_end_as_in_json(files, tokenizer, tmp_path):
    """A text may contain what Python takes for the end of a line."""
    row = {"prompt": "a \u2028 b", "completion": "c \x85 d"}
    (tmp_path / "data.jsonl").write_text(
        json.dumps(row, ensure_ascii=False) + "\r\n\n", encoding="utf-8", newline=""
    )
    (example,) = prpo_llm.load_examples(
        tiny(files, tmp_path), tokenizer, str(tmp_path / "data.jsonl")
    )
    assert example["prompt"] == row["prompt"] and example["completion"] == row["completion"]


@pytest.mark.parametrize(
    ("name", "content"), [("broken.jsonl", "{"), ("nothing", None), ("latin.jsonl", "é")]
)
def test_data_that_cannot_be_read_end_with_one_line(
    files, tmp_path, monkeypatch, capfd, name, content
):
    """Before there is a run's folder."""
    monkeypatch.chdir(tmp_path)
    if content is None:
        Path(name).mkdir()
    else:
        Path(name).write_text(content, encoding="latin-1")
    message = refusal(prpo_llm.main, tiny(files, tmp_path / "runs", dataset=name))
    assert message.startswith(f"--dataset {name}: cannot be read: ")
    assert not (tmp_path / "runs").exists()
    assert capfd.readouterr() == ("", "")


ROWS = [{"prompt": "a b", "completion": "c", "level": 1}, {"prompt": "d", "completion": "e f"}]
WRITERS = {
    "data.jsonl": lambda table, path: table.to_json(path, orient="records", lines=True),
    "data.json": lambda table, path: table.to_json(path, orient="records"),
    "data.csv": lambda table, path: table.to_csv(path, index=False),
    "data.tsv": lambda table, path: table.to_csv(path, index=False, sep="\t"),
    "data.parquet": lambda table, path: table.to_parquet(path),
    "folder/train-00000.parquet": lambda table, path: table.to_parquet(path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_has_the_same_rows(files, tokenizer, tmp_path, capfd, name):
    """And nothing else is printed."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    WRITERS[name](pd.DataFrame(ROWS), path)
    place = path if path.parent == tmp_path else path.parent
    examples = prpo_llm.load_examples(tiny(files, tmp_path), tokenizer, str(place))
    rows = {example["prompt"]: example["row"] for example in examples}
    assert rows == {row["prompt"]: {"level": None} | row for row in ROWS}
    (example,) = prpo_llm.load_examples(tiny(files, tmp_path), tokenizer, f"{place}:train[1:]")
    assert example["prompt"] == "d"
    assert capfd.readouterr() == ("", "")


CARD = """---
configs:
- config_name: main
  data_files: [{split: train, path: main.jsonl}, {split: test, path: test.jsonl}]
- config_name: other
  data_files: other.jsonl
---
"""


@pytest.fixture
def several(tmp_path):
    """A folder with two configurations."""
    folder = tmp_path / "several"
    folder.mkdir()
    (folder / "README.md").write_text(CARD)
    for name in ("main", "test", "other"):
        write_jsonl(folder / f"{name}.jsonl", [{"prompt": name[0], "completion": "b"}])
    return folder


def test_a_data_set_may_have_several_configurations(files, tokenizer, several):
    args = tiny(files, "runs")
    expected = {"#main": "m", "#main:train": "m", "#main:test": "t", "#other": "o"}
    for suffix, prompt in expected.items():
        (example,) = prpo_llm.load_examples(args, tokenizer, f"{several}{suffix}")
        assert example["prompt"] == prompt
    refused = {
        "": "Config name is missing. Please pick one among the available configs: ['main', ",
        "#third": "BuilderConfig 'third' not found. Available: ['main', 'other']",
        "#other:test": "Unknown split \"test\". Should be one of ['train'].",
    }
    for suffix, problem in refused.items():
        name = f"{several}{suffix}"
        message = refusal(prpo_llm.load_examples, args, tokenizer, name, "eval-dataset")
        assert message.startswith(f"--eval-dataset {name}: cannot be read: {problem}")


def test_a_hub_id_is_read_from_the_cache_without_a_network(
    files, tokenizer, several, tmp_path, monkeypatch
):
    """With its configuration and split; what is not there ends with one line."""
    cache = tmp_path / "cache"
    datasets.load_dataset(str(several), "main", cache_dir=cache)
    (cache / "several").rename(cache / "owner___several")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    args = tiny(files, "runs")
    (example,) = prpo_llm.load_examples(args, tokenizer, "owner/several#main:test")
    assert example["prompt"] == "t"
    for name in ("owner/several#other", "owner/nothing:test"):
        message = refusal(prpo_llm.load_examples, args, tokenizer, name)
        assert message.startswith(f"--dataset {name}: cannot be read: Couldn't ")


def test_a_changed_file_is_read_anew(files, tokenizer, tmp_path):
    """Also with the time and the size that it had."""
    args = tiny(files, tmp_path)
    for prompt in "ab":
        name = write_jsonl(tmp_path / "data.jsonl", [{"prompt": prompt, "completion": "b"}])
        os.utime(name, (10**9, 10**9))
        (example,) = prpo_llm.load_examples(args, tokenizer, name)
        assert example["prompt"] == prompt


def test_numbers_are_texts_where_texts_are_needed(files, tokenizer, tmp_path):
    """A reward function gets what stands in the data."""
    (tmp_path / "near.py").write_text(
        "def near(completions, answer, references):\n"
        "    return [own + len(text) for own, text in zip(answer, references)]\n"
    )
    rows = [{"prompt": "a", "answer": 7, "level": 2}, {"prompt": "b", "answer": 12, "level": 3}]
    name = write_jsonl(tmp_path / "data.jsonl", rows)
    columns = {"completion_column": "answer", "topic_column": "level"}
    args = tiny(files, tmp_path, reward=f"{tmp_path / 'near.py'}:near", **columns)
    examples = prpo_llm.load_examples(args, tokenizer, name)
    read = {example["prompt"]: (example["completion"], example["topic"]) for example in examples}
    assert read == {"a": ("7", "2"), "b": ("12", "3")}
    functions = prpo_llm.make_reward(args, torch.device("cpu"))
    _, _, columns = score(args, tokenizer, functions, ["c", "d"], rows)
    assert columns["score"].tolist() == [7 + 1, 12 + 2]
    functions = prpo_llm.make_reward(tiny(files, tmp_path, reward="rouge"), torch.device("cpu"))
    _, _, columns = score(args, tokenizer, functions, ["c", "d"], rows)
    assert columns["score"].tolist() == [0.0, 0.0]


def test_contents_may_be_parts(files, tokenizer, chatty, reward_model, tmp_path):
    """Texts, of prompts and completions; reward functions get them as they stand, a reward model
    their texts."""
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    talk = [{"role": "system", "content": "c"}, {"role": "user", "content": parts}]
    answer = [{"role": "assistant", "content": [{"type": "text", "text": "d e"}]}]
    name = write_jsonl(tmp_path / "parts.jsonl", [{"prompt": talk, "completion": answer}])
    args = tiny(files, tmp_path, reward=("rouge", str(reward_model)))
    (example,) = prpo_llm.load_examples(args, chatty, name)
    assert example["prompt"] == "s c u a b z z " and example["completion"] == "d e"
    assert example["topic"] == "a b"
    (plain,) = prpo_llm.load_examples(args, tokenizer, name)
    assert plain["prompt"] == "c\n\na b"
    functions = prpo_llm.make_reward(args, torch.device("cpu"))
    seen = []
    functions["see"] = lambda prompts: seen.extend(prompts) or [0.0]
    args.reward = (*functions,)
    _, _, columns = score(args, chatty, functions, ["d e"], [example["row"]])
    assert columns["reward_rouge"].tolist() == [1.0] and seen == [talk]
    whole = AutoTokenizer.from_pretrained(reward_model)("s c u a b a d e", add_special_tokens=False)
    model = LlamaForSequenceClassification.from_pretrained(reward_model)
    expected = model(torch.tensor([whole["input_ids"]])).logits.item()
    assert columns["reward_judge"].tolist() == pytest.approx([expected], abs=1e-5)


def test_messages_have_one_place_whatever_other_rows_have(files, chatty, tmp_path):
    """A table gives all messages the keys that any of them has."""
    talk = [{"role": "user", "content": "a"}]
    other = [{"role": "user", "content": "b", "name": "c"}]
    alone = pd.DataFrame({"prompt": [talk], "completion": "d"})
    both = pd.DataFrame({"prompt": [talk, other], "completion": "d"})
    places = []
    for name, table in (("alone", alone), ("both", both)):
        table.to_parquet(tmp_path / f"{name}.parquet")
        path = str(tmp_path / f"{name}.parquet")
        examples = prpo_llm.load_examples(tiny(files, tmp_path), chatty, path)
        places.append({example["prompt"]: example["place"] for example in examples}["u a z z "])
    assert places[0] == places[1]


THINKING = (
    "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'y ' if thinks else 'n ' }}{{ mood }}{% endif %}"
)


def test_the_chat_template_gets_arguments(files, tokenizer, tmp_path):
    """Of the flag, and of a row, which come first."""
    tokenizer.chat_template = THINKING
    talk = [{"role": "user", "content": "a"}]
    rows = [{"prompt": talk, "chat_template_kwargs": {"thinks": True}}]
    rows.append({"prompt": [{"role": "user", "content": "b"}], "chat_template_kwargs": None})
    rows.append(
        {"prompt": [{"role": "user", "content": "c"}], "chat_template_kwargs": {"other": 1}}
    )
    args = tiny(files, tmp_path, chat_template_kwargs='{"thinks": false, "mood": "m"}')
    for name in ("data.jsonl", "data.parquet"):
        writer = WRITERS[name]
        writer(pd.DataFrame(rows), tmp_path / name)
        examples = prpo_llm.load_examples(args, tokenizer, str(tmp_path / name))
        assert {example["prompt"] for example in examples} == {"a y m", "b n m", "c n m"}
    for text in ('["a"]', "thinks=1", "{"):
        line = refusal(parse_args, prpo_llm, ["--chat-template-kwargs", text])
        assert line.startswith(f"--chat-template-kwargs {text}: must be a JSON object, such as ")
    # What this script itself gives cannot be given
    args.chat_template_kwargs = '{"tokenize": true}'
    message = refusal(prpo_llm.load_examples, args, tokenizer, str(tmp_path / name))
    assert "row 1: does not suit the model's chat template: " in message


def test_a_last_message_of_the_assistant_is_continued(
    files, tokenizer, chatty, reward_model, tmp_path
):
    """By the completion: there is no new turn. A reward model reads both as one message, a reward
    function gets them apart."""
    talk = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}]
    name = write_jsonl(tmp_path / "data.jsonl", [{"prompt": talk, "completion": "e"}])
    args = tiny(files, tmp_path, reward=str(reward_model))
    (example,) = prpo_llm.load_examples(args, chatty, name)
    assert example["prompt"] == "u a b a c d" and example["topic"] == "a b"
    (plain,) = prpo_llm.load_examples(args, tokenizer, name)
    assert plain["prompt"] == "a b\n\nc d"
    seen = []
    see = {"see": lambda prompts, completions: seen.extend([prompts, completions]) or [0.0]}
    score(args, chatty, see, ["e f"], [example["row"]])
    assert seen == [[talk], [[{"role": "assistant", "content": "e f"}]]]
    judge = AutoTokenizer.from_pretrained(reward_model)
    model = LlamaForSequenceClassification.from_pretrained(reward_model)
    join = functools.partial(prpo_llm.join_texts, judge, [talk])
    completion = [{"role": "assistant", "content": " e f"}]
    assert join([completion]) == (["u a b a c d e f "], True)
    whole = judge("u a b a c d e f", add_special_tokens=False)["input_ids"]
    expected = model(torch.tensor([whole])).logits.item()
    function = prpo_llm.make_reward(args, torch.device("cpu"))["judge"]
    scores = function(prompts=[talk], completions=[completion])
    assert scores == pytest.approx([expected], abs=1e-5)
    judge.chat_template = None
    assert join([completion]) == (["a b\n\nc d e f<eos>"], False)


def test_a_continuation_keeps_the_space_before_it(files, tmp_path):
    """Of a message that has begun, as of a text."""
    tokenizer = sentence_pieces(DECODERS["metaspace"])
    args = tiny(files, tmp_path)
    talk = [{"role": "user", "content": "a"}]
    begun = [*talk, {"role": "assistant", "content": "I"}]
    ids = tokenizer("I am")["input_ids"]
    for prompt, text in ((talk, "am"), (begun, " am")):
        example = {"row": {"prompt": prompt}, "ids": ids[:1]}
        assert prpo_llm.decode(args, tokenizer, example, ids[1:]) == text


def test_rows_with_a_prompt_only(files, tmp_path, monkeypatch):
    """They are trained on and evaluated; there are no public states, and so no distances."""
    rows = read_jsonl(files / "data.jsonl")
    rows = [{"prompt": row["prompt"], "answer": row["completion"]} for row in rows]
    name = write_jsonl(tmp_path / "data.jsonl", rows)
    (tmp_path / "own.py").write_text(
        "def own(completions, answer):\n"
        "    return [len({*a.split()} & {*c.split()}) for a, c in zip(answer, completions)]\n"
    )
    changes = {"dataset": name, "reward": f"{tmp_path / 'own.py'}:own", "total_steps": 2}
    folder, summary = train(files, tmp_path / "runs", **changes)
    assert summary["completed"]
    evaluated = read_jsonl(folder / "completions.jsonl")
    assert {row["reference"] for row in evaluated} == {""}
    distances = pd.read_csv(folder / "communicator.csv").query("listener != peer").distance
    assert len(distances) and distances.isna().all()
    monkeypatch.setattr(prpo_llm, "load_base", None)
    args = tiny(files, tmp_path / "no", **changes | {"reward": "rouge"})
    line = (
        "--reward rouge: rouge needs a column completion, which the data lack, or not in every row"
    )
    assert refusal(prpo_llm.main, args) == line
    args = tiny(files, tmp_path / "no", **changes, communicator="similarity")
    none = "must compare on completions of held-out prompts, and there are none"
    assert refusal(prpo_llm.main, args) == f"--communicator similarity: {none}"
    assert not (tmp_path / "no").exists()
    write_jsonl(tmp_path / "data.jsonl", [row | {"completion": ""} for row in rows])
    assert refusal(prpo_llm.main, args) == f"--communicator similarity: {none}"
    # Of agents with data of their own, too, where nothing is held out
    apart = {"dataset": (name, name), "eval_prompts": 0}
    args = tiny(files, tmp_path / "no", **changes | apart, communicator="similarity")
    assert refusal(prpo_llm.main, args) == f"--communicator similarity: {none}"


def test_prompts_that_are_left_out_are_counted(
    many, files, tokenizer, tmp_path, capsys, monkeypatch
):
    """Of a common data set once, of each agent's own by its process."""
    rows = read_jsonl(Path(many))
    names = []
    for k in range(2):
        long = [{"prompt": f"{chr(97 + n)} " * 9, "completion": "a"} for n in range(k + 1)]
        far_too_long = [{"prompt": "b " * 999, "completion": "a"}]
        names.append(write_jsonl(tmp_path / f"{k}.jsonl", rows[:20] + long + far_too_long))
    limit = "prompts are left out, longer than --max-prompt-tokens 8\n"
    changes = {"max_prompt_tokens": 8, "batch_size": 1}
    monkeypatch.setattr(prpo_llm, "check_number", lambda *_: None)
    args = tiny(files, "runs", dataset=names[0], eval_dataset=names[1], **changes)
    expected = f"--dataset {names[0]}: 2 {limit}--eval-dataset {names[1]}: 3 {limit}"
    for rank, output in (("0", expected), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        prpo_llm.deal(args, tokenizer, range(2))
        assert capsys.readouterr().out == output
    args = tiny(files, "runs", dataset=(*names,), eval_prompts=0, **changes)
    prpo_llm.deal(args, tokenizer, range(1, 2))
    assert capsys.readouterr().out == f"--dataset {names[1]}: 3 {limit}"


# --- who gets what ---


@pytest.fixture(scope="session")
def many(tmp_path_factory):
    """A data set of 300 different prompts in three topics of different sizes."""
    generator = np.random.default_rng(3)
    texts = sorted({" ".join(generator.choice([*"abcdefgh"], size=7)) for _ in range(400)})[:300]
    rows = [
        {"prompt": text, "completion": text[: 1 + k % 9], "topic": "xxyyyz"[k % 6]}
        for k, text in enumerate(texts)
    ]
    return write_jsonl(tmp_path_factory.mktemp("many") / "data.jsonl", rows)


def dealt(args, tokenizer, held=None):
    """The prompts of every agent, and those of every task."""
    examples, tests, _ = prpo_llm.deal(args, tokenizer, held or range(args.num_agents))
    parts = {
        i: [example["prompt"] for example in examples_of_part]
        for i, examples_of_part in examples.items()
    }
    return parts, {
        task: [example["prompt"] for example in examples_of_part]
        for task, examples_of_part in tests.items()
    }


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    agents=st.integers(1, 3),
    size=st.integers(2, 120),
    few=st.integers(0, 5),
    more=st.integers(1, 40),
    name=st.sampled_from(["iid", "topic"]),
    seed=st.integers(1, 9),
)
def test_no_setting_moves_prompts_between_training_and_test(
    many, files, tokenizer, agents, size, few, more, name, seed
):
    """Agents share no prompt, none learns from a held-out one, and the number of these changes
    nothing else."""
    options = {
        "dataset": many,
        "num_agents": agents,
        "prompts_per_agent": size,
        "partition": name,
        "seed": seed,
    }
    args = tiny(files, "runs", **options, eval_prompts=few)
    parts, tests = dealt(args, tokenizer)
    assert list(parts) == list(range(agents)) and all(
        2 <= len(prompts) <= size for prompts in parts.values()
    )
    trained = [prompt for prompts in parts.values() for prompt in prompts]
    assert len({*trained}) == len(trained)
    args.eval_prompts = few + more
    others, larger = dealt(args, tokenizer)
    assert others == parts
    assert not {*trained} & {prompt for prompts in larger.values() for prompt in prompts}
    assert tests.get("validation", []) == larger["validation"][:few]
    for task, prompts in tests.items():
        assert len({*prompts}) == len(prompts) <= few and prompts == larger[task][:few]
        assert (
            task == "validation"
            or len(prompts) < few
            or few > 3
            or not {*prompts} & {*tests["validation"]}
        )
    args.num_agents = 2
    args.partition = "iid"
    args.prompts_per_agent = 40
    _, otherwise = dealt(args, tokenizer)
    # Whatever the partition and the number of agents
    assert otherwise["validation"] == larger["validation"]


def test_a_topic_may_be_the_number_zero(files, tokenizer, tmp_path):
    rows = [{"prompt": f"{k} x", "completion": "a", "label": k % 2} for k in range(6)]
    rows.append({"prompt": "other", "completion": "a", "label": ""})
    args = tiny(
        files, "runs", dataset=write_jsonl(tmp_path / "data.jsonl", rows), topic_column="label"
    )
    examples = prpo_llm.load_examples(args, tokenizer, args.dataset[0])
    topics = {example["prompt"]: example["topic"] for example in examples}
    assert topics == {f"{k} x": str(k % 2) for k in range(6)} | {"other": "other"}


def test_prompts_are_texts_or_messages_but_not_both(files, tokenizer, tmp_path):
    talk = [{"role": "user", "content": "a b"}]
    names = []
    for name, prompt in (("texts", "a b"), ("talks", talk)):
        rows = [{"prompt": prompt, "completion": "c"}] * 4
        names.append(write_jsonl(tmp_path / f"{name}.jsonl", rows))
    args = tiny(files, "runs", num_agents=2, dataset=(*names,), eval_prompts=0, batch_size=1)
    message = refusal(prpo_llm.deal, args, tokenizer, range(2))
    assert message.endswith("must have texts as prompts or messages, not both")
    assert message.startswith("--dataset ")
    other = [{"role": "user", "content": "b a"}]
    rows = [{"prompt": prompt, "completion": "c"} for prompt in ("a c", other)]
    both = write_jsonl(tmp_path / "both.jsonl", rows)
    args.dataset = (names[0], names[0])
    args.eval_dataset = both
    args.eval_prompts = 2
    message = refusal(prpo_llm.deal, args, tokenizer, range(2))
    assert message == f"--eval-dataset {both}: must have texts as prompts or messages, not both"


@pytest.mark.parametrize("name", ["preference", "coverage", "hardness"])
def test_no_part_is_empty(name, files, tmp_path):
    rows = [{"prompt": f"{k} x", "completion": "a", "topic": "one"} for k in range(26)]
    settings = {
        "dataset": write_jsonl(tmp_path / "data.jsonl", rows),
        "base_model": str(files / "model"),
    }
    args = partition.Args(out_dir=str(tmp_path / "out"), partition=name, **settings)
    args.topics = ("nonsense",)
    message = refusal(partition.main, args)
    assert message == f"--partition {name}: there are 0 prompts, too few for 3 agents"
    assert not (tmp_path / "out").exists()


def test_in_a_federation_only_the_own_data_must_be_here(files, tokenizer, tmp_path, monkeypatch):
    """What peers train on is nobody else's business."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "agent_1.jsonl", [{"prompt": "a", "completion": "b"}] * 4)
    args = tiny(files, "runs", dataset="agent_{i}.jsonl", eval_prompts=0, batch_size=1)
    parts, _ = dealt(args, tokenizer, range(1, 2))
    assert {*parts} == {1}
    message = refusal(dealt, args, tokenizer, range(1))
    assert message == "--dataset agent_0.jsonl: there is no such file"


def test_topics_of_equal_size_are_taken_in_the_order_of_their_names(files, tokenizer, tmp_path):
    """However many of their prompts are held out."""
    rows = [
        {"prompt": f"{chr(97 + k)} {chr(97 + n)}", "completion": "a", "topic": "zyx"[k % 3]}
        for k in range(26)
        for n in range(5)
    ]
    args = tiny(
        files,
        "runs",
        dataset=write_jsonl(tmp_path / "data.jsonl", rows[:120]),
        num_agents=3,
        partition="topic",
    )
    assert list(prpo_llm.deal(args, tokenizer, range(3))[1]) == ["validation", "x", "y", "z"]
    args.topics = ("x", "validation", "z")
    line = "--topics x validation z: none may be called validation, as all together are"
    assert refusal(prpo_llm.deal, args, tokenizer, range(3)) == line


def test_a_rank_deals_its_own_agents_what_one_process_deals_them(many, files, tokenizer):
    """In both partitions."""
    for name in ("iid", "topic"):
        args = tiny(files, "runs", dataset=many, num_agents=3, partition=name)
        parts, tests = dealt(args, tokenizer)
        for i in range(3):
            assert dealt(args, tokenizer, range(i, i + 1)) == ({i: parts[i]}, tests)


def test_the_order_of_a_file_decides_nothing(many, files, tokenizer, tmp_path):
    """Nor do prompts that are added move others between training and test."""
    rows = read_jsonl(Path(many))
    shuffled = [rows[k] for k in np.random.default_rng(0).permutation(len(rows))]
    same = write_jsonl(tmp_path / "same.jsonl", shuffled)
    grown = write_jsonl(
        tmp_path / "grown.jsonl", [row | {"prompt": "h h " + row["prompt"]} for row in rows] + rows
    )
    dealt_prompts = [
        dealt(tiny(files, "runs", dataset=name, prompts_per_agent=999, eval_prompts=999), tokenizer)
        for name in (many, same, grown)
    ]
    assert dealt_prompts[0] == dealt_prompts[1]
    (parts, tests) = dealt_prompts[0]
    (more, larger) = dealt_prompts[2]
    assert {*tests["validation"]} < {*larger["validation"]}
    assert {prompt for prompts in parts.values() for prompt in prompts} < {
        prompt for prompts in more.values() for prompt in prompts
    }
    assert 0.05 < len(tests["validation"]) / 300 < 0.15


def test_fewer_prompts_than_requested_are_reported(
    many, files, tokenizer, tmp_path, capsys, monkeypatch
):
    """Of agents, and of evaluations; with less than a batch there is no run."""
    args = tiny(
        files,
        "runs",
        dataset=many,
        num_agents=3,
        partition="topic",
        prompts_per_agent=100,
        eval_prompts=9,
    )
    parts, tests = dealt(args, tokenizer)
    output = capsys.readouterr().out
    for i, topic in enumerate("yxz"):
        short = f"agent {i} has {len(parts[i])} prompts, fewer than --prompts-per-agent 100"
        assert (short in output) == (len(parts[i]) < 100), topic
        short = f"{topic} has {len(tests[topic])} prompts, fewer than --eval-prompts 9"
        assert (short in output) == (len(tests[topic]) < 9), topic
    assert "agent 2 has" in output and "agent 0 has" not in output
    args = tiny(files, "runs", dataset=many, num_agents=3, partition="topic", batch_size=60)
    message = refusal(dealt, args, tokenizer)
    assert message.startswith(f"--dataset {many}: ") and message.endswith("60 are needed")
    with monkeypatch.context() as patch:  # another rank, which alone knows of its agent's prompts
        patch.setenv("RANK", "2")
        assert "agent 2 has" in refusal(dealt, args, tokenizer, range(2, 3))
    held_out = write_jsonl(
        tmp_path / "held_out.jsonl", [{"prompt": "a", "completion": "b", "topic": "x"}]
    )
    args = tiny(files, "runs", dataset=many, num_agents=3, partition="topic", eval_dataset=held_out)
    message = refusal(dealt, args, tokenizer)
    assert message == f"--eval-dataset {held_out}: y has 0 prompts, 1 are needed"
    assert refusal(dealt, args, tokenizer, range(2, 3)) == message  # a process that holds agent 2
    args = tiny(files, "runs", dataset=many, num_agents=4, partition="topic")
    assert (
        refusal(dealt, args, tokenizer) == "--num-agents 4: must be at most 3, as there are topics"
    )


def test_agents_may_have_data_sets_of_their_own(
    many, files, tokenizer, tmp_path, monkeypatch, capsys
):
    """A rank reads its own agents' files and the common held-out prompts, which no agent
    trains on."""
    monkeypatch.chdir(tmp_path)
    rows = read_jsonl(Path(many))
    write_jsonl(Path("agent_1.jsonl"), rows[:20])
    write_jsonl(Path("held_out.jsonl"), rows[15:40])
    options = {
        "num_agents": 3,
        "eval_dataset": "held_out.jsonl",
        "topics": ("x",),
        "eval_prompts": 4,
    }
    for names in (("agent_{i}.jsonl",), ("agent_0.jsonl", "agent_1.jsonl", "agent_2.jsonl")):
        parts, tests = dealt(tiny(files, "runs", dataset=names, **options), tokenizer, range(1, 2))
        assert {*parts[1]} == {row["prompt"] for row in rows[:15]} and [*tests] == [
            "validation",
            "x",
        ]
        assert all(
            {*examples_of_task} <= {row["prompt"] for row in rows[15:40]}
            and len(examples_of_task) == 4
            for examples_of_task in tests.values()
        )
        line = refusal(dealt, tiny(files, "runs", dataset=names, **options), tokenizer)
        assert line == "--dataset agent_0.jsonl: there is no such file"
    monkeypatch.setenv("RANK", "2")  # the rank that alone needs the file reports it
    args = tiny(files, "runs", dataset="agent_{i}.jsonl", **options)
    message = refusal(dealt, args, tokenizer, range(2, 3))
    assert message == "--dataset agent_2.jsonl: there is no such file"
    # The first rank of each machine reports a common one: another machine may have it
    args = tiny(files, "runs", dataset="common.jsonl", num_agents=3)
    for local_rank, line in (("0", "--dataset common.jsonl: there is no such file\n"), ("1", "")):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        with pytest.raises(SystemExit):
            dealt(args, tokenizer, range(2, 3))
        assert capsys.readouterr().err == line


def test_a_rank_reads_the_data_sets_of_all_its_agents(files, tokenizer, tmp_path, monkeypatch):
    """The second of two ranks has agents 2 and 3 of four, and nothing of the others."""
    monkeypatch.chdir(tmp_path)
    args = tiny(files, "runs", dataset="agent_{i}.jsonl", num_agents=4, eval_prompts=0)
    rows = [{"prompt": letter, "completion": "a"} for letter in "bc"]
    write_jsonl(Path("agent_2.jsonl"), rows)
    missing = "--dataset agent_3.jsonl: there is no such file"
    assert refusal(dealt, args, tokenizer, range(2, 4)) == missing
    write_jsonl(Path("agent_3.jsonl"), rows)
    parts, _ = dealt(args, tokenizer, range(2, 4))
    assert {i: sorted(prompts) for i, prompts in parts.items()} == {2: ["b", "c"], 3: ["b", "c"]}
    assert "agent_0.jsonl" in refusal(dealt, args, tokenizer)


def test_a_missing_file_ends_with_one_line_before_any_is_read(
    many, files, tokenizer, tmp_path, monkeypatch
):
    """As of the held-out prompts; and what collects the docstrings is a file, too."""
    monkeypatch.setattr(prpo_llm, "load_examples", None)
    args = tiny(files, "runs", dataset=many, eval_dataset="nowhere.jsonl")
    assert refusal(dealt, args, tokenizer) == "--eval-dataset nowhere.jsonl: there is no such file"
    monkeypatch.setattr(prpo_llm, "DOCSTRINGS", tmp_path / "docstrings.py")
    args = tiny(files, "runs", dataset="docstrings")
    needed = "needs benchmark/docstrings.py beside this script"
    assert refusal(dealt, args, tokenizer).startswith(f"--dataset docstrings: {needed}")


ALONE = """
import os, sys
os.chdir(os.environ["RANK"])
sys.path.insert(0, sys.argv.pop(1))
from command import parse_args
from smooth import smooth_adam
import prpo_llm
smooth_adam()
prpo_llm.main(parse_args(prpo_llm))
"""


@pytest.mark.usefixtures("smooth_adam")
def test_ranks_share_nothing_but_the_wire(many, files, tmp_path, monkeypatch):
    """Each in a folder of its own with its agent's prompts: the training of one process that has
    them all."""
    rows = read_jsonl(Path(many))
    one = tmp_path / "one"
    for k, folder in enumerate((tmp_path / "0", tmp_path / "1")):
        for target in (folder, one):
            target.mkdir(exist_ok=True)
            write_jsonl(target / f"agent_{k}.jsonl", rows[k * 30 : k * 30 + 20])
            write_jsonl(target / "held_out.jsonl", rows[100:110])
    (tmp_path / "alone.py").write_text(ALONE)
    changes = {
        "dataset": "agent_{i}.jsonl",
        "eval_dataset": "held_out.jsonl",
        "learning_rate": 1e-3,
        "eval_every": 2,
    }
    argv = flags(tiny(files, "runs", **changes))
    run_ranks(2, tmp_path / "alone.py", REPOSITORY / "tests" / "tools", *argv, cwd=tmp_path)
    monkeypatch.chdir(one)
    prpo_llm.main(parse_args(prpo_llm, argv))
    together = only_run(one / "runs")
    for k in range(2):
        (weights,) = weights_of(only_run(tmp_path / str(k) / "runs"))
        torch.testing.assert_close(weights, weights_of(together)[k], rtol=0, atol=1e-4)


def test_a_prompt_that_does_not_fit_the_model_ends_the_run(files, tmp_path):
    """With its completion, of 64 positions; the longest prompt has eight tokens."""
    message = refusal(prpo_llm.main, tiny(files, tmp_path, response_length=57))
    reason = "a prompt has 8 tokens, but at most 7 fit the model with --response-length 57"
    assert message == f"--max-prompt-tokens 300: {reason}"
    longest = tiny(files, tmp_path, response_length=56, total_steps=1, eval_prompts=0)
    assert prpo_llm.main(longest)["completed"]


@pytest.mark.parametrize("communicator", ["uniform", "similarity"])
def test_more_held_out_prompts_are_requested_on_resume(files, tmp_path, communicator):
    """What is trained stays the same, bit for bit: public states are not the prompts of
    evaluations."""
    changes = {"communicator": communicator, "local_updates": 1, "total_steps": 4, "kl_coef": 1.0}
    few, _ = train(files, tmp_path / "few", **changes)
    more, _ = train(files, tmp_path / "more", **changes, eval_prompts=4)
    for a, b in zip(weights_of(few), weights_of(more), strict=True):
        assert torch.equal(a, b)
    for i in range(2):
        (few / "checkpoints" / f"agent_{i}" / "4.pt").rename(tmp_path / f"{i}.pt")
    again = [
        "--resume",
        str(few),
        "--eval-prompts",
        "4",
        "--reward",
        f"{files / 'letters.py'}:count",
    ]
    summary = prpo_llm.main(parse_args(prpo_llm, again))
    assert summary["evaluation"]["prompts"] == 4
    for a, b in zip(weights_of(few), weights_of(more), strict=True):
        assert torch.equal(a, b)


def test_public_states_do_not_depend_on_evaluations(many, files, tokenizer, tmp_path):
    """The first held-out prompts, of a data set or of --eval-dataset; without any there is no
    similarity."""
    first = None
    for number in (0, 1, 30):
        args = tiny(files, "runs", dataset=many, eval_prompts=number, communicator="similarity")
        _, tests, public = prpo_llm.deal(args, tokenizer, range(2))
        assert len(public) == 4 and all(example["place"] < prpo_llm.HELD_OUT for example in public)
        assert tests.get("validation", public)[:4] == public[: number or None]
        first = first or public
        assert public == first
    rows = read_jsonl(Path(many))
    args.eval_dataset = write_jsonl(tmp_path / "held_out.jsonl", rows[:3])
    args.eval_prompts = 0
    _, _, public = prpo_llm.deal(args, tokenizer, range(2))
    assert {example["prompt"] for example in public} == {row["prompt"] for row in rows[:3]}
    places = {
        example["prompt"]: example["place"]
        for example in prpo_llm.load_examples(args, tokenizer, many)
    }
    rest = [row for row in rows if places[row["prompt"]] >= prpo_llm.HELD_OUT]
    args.eval_dataset = ""
    args.dataset = (write_jsonl(tmp_path / "all.jsonl", rest),)
    line = refusal(prpo_llm.deal, args, tokenizer, range(2))
    none = "must compare on completions of held-out prompts, and there are none"
    assert line == f"--communicator similarity: {none}"
    args.communicator = "uniform"
    assert prpo_llm.deal(args, tokenizer, range(2))[2] == []


def test_held_out_prompts_are_reserved_in_every_format(many, files, tokenizer, chatty, tmp_path):
    """As messages in one file and as texts in another, they are the same tokens where there is no
    chat template."""
    rows = read_jsonl(Path(many))[:60]
    talk = [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    pairs = [(many, talk[:20]), (write_jsonl(tmp_path / "messages.jsonl", talk), rows[:20])]
    for data, held_out in pairs:
        args = tiny(
            files,
            "runs",
            dataset=data,
            eval_dataset=write_jsonl(tmp_path / "held_out.jsonl", held_out),
            prompts_per_agent=999,
            eval_prompts=20,
        )
        examples, tests, _ = prpo_llm.deal(args, tokenizer, range(2))
        reserved = {tuple(example["ids"]) for example in tests["validation"]}
        assert len(reserved) == 20
        assert not reserved & {
            tuple(example["ids"])
            for examples_of_part in examples.values()
            for example in examples_of_part
        }
    # In one file: what is held out as a text is not trained on as a message
    args = tiny(files, "runs", prompts_per_agent=999, eval_prompts=99)
    twice = write_jsonl(tmp_path / "twice.jsonl", rows + talk)
    kept = [
        example["row"]
        for example in prpo_llm.load_examples(args, tokenizer, twice)
        if isinstance(example["row"]["prompt"], str) == (example["place"] < prpo_llm.HELD_OUT)
    ]
    args.dataset = (write_jsonl(tmp_path / "one_file.jsonl", kept),)
    examples, tests, _ = prpo_llm.deal(args, tokenizer, range(2))
    reserved = {tuple(example["ids"]) for example in tests["validation"]}
    messages = [row["prompt"][0]["content"] for row in kept if isinstance(row["prompt"], list)]
    assert reserved & {tuple(ids) for ids in tokenizer(messages)["input_ids"]}
    assert not reserved & {
        tuple(example["ids"])
        for examples_of_part in examples.values()
        for example in examples_of_part
    }
    deal_files(
        args.dataset[0],
        files,
        tmp_path / "parts",
        "--partition",
        "iid",
        "--prompts-per-agent",
        "10",
    )
    parts = [
        prpo_llm.load_examples(args, tokenizer, str(path))
        for path in (tmp_path / "parts").glob("agent_*.jsonl")
    ]
    assert parts and not reserved & {
        tuple(example["ids"]) for examples_of_part in parts for example in examples_of_part
    }


# --- rewards ---


def score(args, tokenizer, functions, texts, rows, ended=True, agents=None):
    """The output of `score_completions` for these completions."""
    chosen = [
        {"row": row, "completion": prpo_llm.get_text(row[args.completion_column]), "ids": []}
        for row in rows
    ]
    ids = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] * ended for text in texts]
    (tokens, lengths) = prpo_llm.pad(ids)
    tokenizer.ends = [tokenizer.eos_token_id]
    agents = agents or [0] * len(texts)
    return prpo_llm.score_completions(args, functions, tokenizer, chosen, agents, tokens, lengths)


def test_reward_functions_have_trls_signature(files, tokenizer, tmp_path):
    """Prompts, completions, ids and all columns by name; of messages TRL passes messages; what is
    not named is not passed, unless everything is."""
    (tmp_path / "own.py").write_text(
        "seen = {}\n"
        "def everything(prompts, completions, **columns):\n"
        "    seen.update(columns, prompts=prompts, completions=completions)\n"
        "    return [None, 2]\n"
        "def some(completions, answer):\n"
        "    return [float(text == own) for text, own in zip(completions, answer)]\n"
    )
    args = tiny(
        files,
        tmp_path,
        reward=tuple(f"{tmp_path / 'own.py'}:{name}" for name in ("everything", "some")),
    )
    args.completion_column = "answer"
    args.reward_weights = (1.0, 0.5)
    functions = prpo_llm.make_reward(args, torch.device("cpu"))
    rows = [{"prompt": "a b", "answer": "c", "level": 1}, {"prompt": "d", "answer": "e f"}]
    texts, ends, columns = score(args, tokenizer, functions, ["c", "e"], rows)
    seen = sys.modules["own"].seen
    for name in ("trainer_state", "log_metric", "log_extra"):
        assert seen.pop(name)
    letters = [tokenizer(text)["input_ids"] + [0] for text in ("c", "e")]
    assert seen == {
        "prompts": ["a b", "d"],
        "completions": ["c", "e"],
        "completion_ids": letters,
        "references": ["c", "e f"],
        "answer": ["c", "e f"],
        "level": [1, None],
    }
    assert texts == ["c", "e"] and ends == [True, True]
    assert columns["reward_own.some"].tolist() == [1.0, 0.0]
    # None adds nothing
    assert columns["score"].tolist() == [0.5, 2.0] == columns["reward"].tolist()
    talk = [{"prompt": [{"role": "user", "content": "a"}], "answer": "c"}] * 2
    score(args, tokenizer, functions, ["c", "d"], talk)
    assert seen["completions"] == [[{"role": "assistant", "content": text}] for text in "cd"]
    assert seen["prompts"] == [row["prompt"] for row in talk]


def test_a_reward_that_names_a_column_gets_it_beside_all_others():
    columns = {"completions": ["a", "b"], "completion": ["c", "dd"], "level": [1, 2]}

    def reward(completions, completion, **others):
        assert others == {"level": [1, 2]}
        return list(map(len, completion))

    assert prpo_llm.call_reward(prpo_llm.Args(), "own", reward, columns) == [1, 2]


def test_columns_of_any_row_are_passed_and_none_takes_the_place_of_what_is_bound(
    files, tokenizer, reward_model, tmp_path, monkeypatch
):
    """Agents may have data with other columns, also `model`, `tokenizer` and `scorer`."""
    (tmp_path / "own.py").write_text(
        "def own(completions, answer):\n    return [len(text or '') for text in answer]\n"
    )
    rewards = ("rouge", str(reward_model), f"{tmp_path / 'own.py'}:own")
    args = tiny(files, tmp_path, reward=rewards, reward_weights=(1.0, 1.0, 1.0))
    functions = prpo_llm.make_reward(args, torch.device("cpu"))
    names = {"model": "a", "tokenizer": "b", "scorer": "c"}
    rows = [
        {"prompt": "a", "completion": "b", **names},
        {"prompt": "a", "completion": "b", "answer": "four"},
    ]
    for order in (rows, rows[::-1]):
        *_, columns = score(args, tokenizer, functions, ["b", "b"], order)
        expected = [len(row.get("answer", "")) for row in order]
        assert columns["reward_own.own"].tolist() == expected
        assert columns["reward_rouge"].tolist() == [1.0, 1.0]
    # A run ends before the model is loaded
    args = tiny(files, tmp_path, reward=args.reward, base_model=str(files / "model"))
    monkeypatch.setattr(prpo_llm, "load_base", None)
    message = refusal(prpo_llm.main, args)
    assert message.endswith(
        "own.own needs a column answer, which the data lack, or not in every row"
    )


def test_penalties_are_taken_from_the_reward_and_not_from_the_score(files, tokenizer, tmp_path):
    """For not ending, and for being short; an unknown reward stays unknown."""
    args = tiny(files, tmp_path, missing_eos_penalty=3.0, min_response_tokens=3)
    functions = {"one": lambda completions, **_: [1.0, math.nan, math.inf, 4]}
    rows = [{"prompt": "a", "completion": "b"}] * 4
    _, ends, columns = score(args, tokenizer, functions, ["a b", "a b", "a b", "a"], rows)
    np.testing.assert_equal(columns["score"], [1.0, math.nan, math.nan, 4.0])
    np.testing.assert_equal(columns["reward"], [1.0, math.nan, math.nan, 1.0])
    _, ends, columns = score(args, tokenizer, functions, ["a b c"] * 4, rows, ended=False)
    assert ends == [False] * 4
    np.testing.assert_equal(columns["reward"], [-2.0, math.nan, math.nan, 1.0])
    functions = {"one": lambda completions, **_: [1.0]}
    assert "one returns 1 rewards for 4 completions" in refusal(
        score, args, tokenizer, functions, ["a"] * 4, rows
    )


def test_a_reward_function_changes_nothing_for_the_next_one(files, tokenizer, tmp_path):
    """Messages, references, or all completions, from which nothing is left to count."""

    def spoil(prompts, completions, references, **_):
        for prompt, completion in zip(prompts, completions, strict=True):
            prompt.extend(completion)
        references.sort()
        completions.clear()
        return [0.0, 0.0]

    def look(prompts, completions, reference_completions, **_):
        seen.append((prompts, completions, reference_completions))
        return [1.0, 2.0]

    args = tiny(files, tmp_path, missing_eos_penalty=0.0)
    rows = [{"prompt": [{"role": "user", "content": "a"}], "completion": text} for text in "cb"]
    seen = []
    for functions in ({"look": look}, {"spoil": spoil, "look": look}):
        *_, columns = score(args, tokenizer, functions, ["a", "b"], rows)
        assert columns["reward_look"].tolist() == [1.0, 2.0]
    assert seen[0] == seen[1]
    assert seen[0][2] == ["c", "b"]


def test_a_reward_takes_the_place_of_that_of_a_completion_without_an_end(
    files, tokenizer, tmp_path
):
    """Whatever its score is, and for one that is too short; an unknown reward stays unknown."""
    args = tiny(files, tmp_path, missing_eos_reward=-3.0, min_response_tokens=3)
    args.missing_eos_penalty = prpo_llm.Args.missing_eos_penalty
    functions = {"one": lambda completions, **_: [1.0, math.nan, -7.0, 4]}
    rows = [{"prompt": "a", "completion": "b"}] * 4
    _, _, columns = score(args, tokenizer, functions, ["a b", "a b", "a b", "a"], rows)
    np.testing.assert_equal(columns["score"], [1.0, math.nan, -7.0, 4.0])
    np.testing.assert_equal(columns["reward"], [1.0, math.nan, -7.0, -3.0])
    _, _, columns = score(args, tokenizer, functions, ["a b c"] * 4, rows, ended=False)
    np.testing.assert_equal(columns["reward"], [-3.0, math.nan, -3.0, -3.0])


def test_rouge_reads_messages_and_texts_alike(files, tokenizer, tmp_path):
    """ROUGE-L F by hand: two of three words in common, of two."""
    functions = prpo_llm.make_reward(tiny(files, tmp_path, reward="rouge"), torch.device("cpu"))
    for prompt, reference in (
        ("a", "b c"),
        ([{"role": "user", "content": "a"}], [{"content": "b c"}]),
    ):
        args = tiny(files, tmp_path)
        rows = [{"prompt": prompt, "completion": reference}]
        _, _, columns = score(args, tokenizer, functions, ["b d c"], rows)
        assert columns["reward_rouge"].tolist() == pytest.approx([2 * (2 / 3) * 1 / (2 / 3 + 1)])


def test_every_reward_is_logged_by_itself(files, tmp_path):
    """Their weighted sum is the score; the reward is that without what was taken away."""
    (tmp_path / "more.py").write_text(
        "def length(completions, **_):\n    return [len(c.split()) for c in completions]\n"
    )
    names = (f"{files / 'letters.py'}:count", f"{tmp_path / 'more.py'}:length")
    changes = {
        "reward": names,
        "reward_weights": (2.0, -0.5),
        "missing_eos_penalty": 4.0,
        "total_steps": 2,
    }
    folder, _ = train(files, tmp_path / "runs", **changes)
    for row in rows_of(folder):
        values = {name: float(value) for name, value in row.items()}
        assert values["score"] == pytest.approx(
            2 * values["reward_letters.count"] - 0.5 * values["reward_more.length"], abs=1e-5
        )
        assert values["reward"] == pytest.approx(
            values["score"] - 4 * (1 - values["eos_rate"]), abs=1e-5
        )
        assert values["reward_more.length"] > 0
    for row in table_of(folder, "evaluations"):
        assert float(row["mean_reward"]) == pytest.approx(
            float(row["score"]) - 4 * (1 - float(row["eos_rate"]))
        )
        total = 2 * float(row["reward_letters.count"]) - 0.5 * float(row["reward_more.length"])
        assert float(row["score"]) == pytest.approx(total)


@pytest.fixture(scope="session")
def reward_model(files, tmp_path_factory):
    """A tiny reward model as TRL leaves it, with a chat template; padding is not the token that
    ends a text."""
    folder = tmp_path_factory.mktemp("reward") / "judge"
    tokenizer = AutoTokenizer.from_pretrained(files / "model")
    tokenizer.chat_template = TEMPLATE
    tokenizer.pad_token = "q"
    # As Llama's begins a text
    begin = processors.TemplateProcessing(single="y $A", special_tokens=[("y", 25)])
    tokenizer.backend_tokenizer.post_processor = begin
    tokenizer.save_pretrained(folder)
    torch.manual_seed(5)
    shape = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    model = LlamaForSequenceClassification(
        LlamaConfig(vocab_size=27, num_labels=1, pad_token_id=17, **shape)
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    return folder


def test_a_reward_model_sees_what_trl_trained_it_with(files, tokenizer, reward_model, tmp_path):
    """A text ends with EOS, messages stand in the reward model's own template; each is scored at
    its last token, also beside longer ones."""
    args = tiny(files, tmp_path, reward=str(reward_model))
    functions = prpo_llm.make_reward(args, torch.device("cpu"))
    model = LlamaForSequenceClassification.from_pretrained(reward_model)
    reward_tokenizer = AutoTokenizer.from_pretrained(reward_model)
    texts = ["c", "c d e f g", "g h"] * 4
    for prompt, whole in (
        ("a b ", "a b {} <eos>"),
        ([{"role": "user", "content": "a b"}], "u a b a {}"),
    ):
        rows = [{"prompt": prompt, "completion": "b"}] * len(texts)
        for ended in (True, False):  # what it lacks is what the penalty is for
            _, _, columns = score(args, tokenizer, functions, texts, rows, ended=ended)
            with torch.no_grad():
                words = [
                    reward_tokenizer(whole.format(text), add_special_tokens=isinstance(prompt, str))
                    for text in texts
                ]
                ids = [torch.tensor([each["input_ids"]]) for each in words]
                assert all((each[0, 0] == 25) == isinstance(prompt, str) for each in ids)
                expected = [model(one).logits.item() for one in ids]
            assert columns["score"].tolist() == pytest.approx(expected, abs=1e-5)
    assert list(columns) == ["reward", "score", "reward_judge"]


DECODERS = {  # of Metaspace, as SentencePiece, and of Llama 2 and Mistral 7B
    "metaspace": decoders.Metaspace(prepend_scheme="first"),
    "llama": decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    ),
}


def sentence_pieces(decoder):
    """A tokenizer of SentencePiece's kind: a space belongs to the word behind it, and a text begins
    with one."""
    words = ["<unk>", "<eos>", "▁TL;DR:", "▁I", "▁am", "I", "▁", *"abcdefghilmopst,.", "▁am\n"]
    tokenizer = Tokenizer(
        models.Unigram([(word, -1.0 - 9.0 * (len(word) == 1)) for word in words], unk_id=0)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>", unk_token="<unk>"
    )


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_completion_keeps_the_space_before_it(files, tmp_path, decoder):
    """Where a tokenizer drops the space with which a text begins, a completion still stands behind
    its prompt."""
    tokenizer = sentence_pieces(DECODERS[decoder])
    tokenizer.ends = [tokenizer.eos_token_id]
    assert tokenizer.decode(tokenizer("I am")["input_ids"]) == "I am"  # alone it has no space
    torch.manual_seed(5)
    shape = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = LlamaForSequenceClassification(
        LlamaConfig(vocab_size=32, num_labels=1, pad_token_id=1, **shape)
    ).eval()
    nn.init.normal_(model.score.weight, std=5.0)
    prompt = tokenizer("TL;DR:")["input_ids"]
    args = tiny(files, tmp_path)
    seen = []

    def see(completions, **_):
        seen.extend(completions)
        return [0.0] * len(completions)

    functions = {"see": see}
    functions["model"] = functools.partial(prpo_llm.apply_reward_model, model, tokenizer)
    whole = [tokenizer(f"TL;DR:{text}")["input_ids"] for text in (" I am", " am I", "I", "")]
    assert all(ids[: len(prompt)] == prompt for ids in whole)
    (tokens, lengths) = prpo_llm.pad([[*ids[len(prompt) :], 1] for ids in whole])
    chosen = [{"row": {"prompt": "TL;DR:", "completion": ""}, "completion": "", "ids": prompt}] * 4
    args.reward = ("see", "model")
    texts, ends, columns = prpo_llm.score_completions(
        args, functions, tokenizer, chosen, [0] * 4, tokens, lengths
    )
    assert texts == seen == [" I am", " am I", "I", ""] and ends == [True] * 4
    with torch.no_grad():
        expected = [model(torch.tensor([[*ids, 1]])).logits.item() for ids in whole]
    assert columns["reward_model"].tolist() == pytest.approx(expected, abs=1e-5)
    assert len({f"{value:.4f}" for value in expected}) == 4
    # A message is a text of its own: the template of its reader puts the space there
    talk = [
        {"row": {"prompt": [{"role": "user", "content": "am"}]}, "completion": "", "ids": prompt}
    ]
    functions = {"see": lambda completions: [0.0]}
    args.reward = ("see",)
    texts, *_ = prpo_llm.score_completions(
        args, functions, tokenizer, talk, [0], tokens[:1], lengths[:1]
    )
    assert texts == ["I am"]
    # What changes the text before it is decoded alone
    merging = SimpleNamespace(
        decode=lambda ids: {2: "x", 3: "xy", 1: "y"}[sum(ids)] if sum(ids) != 3 else "zy"
    )
    example = {"row": {"prompt": ""}, "ids": [2]}
    assert prpo_llm.decode(args, merging, example, [1]) == "y"


def test_a_reward_model_without_a_chat_template_reads_messages_as_texts(reward_model):
    """As the policy does: contents with an empty line between them, ended by EOS."""
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    prompts = [[{"role": "user", "content": "a"}]]
    completions = [[{"role": "assistant", "content": "b"}]]
    assert prpo_llm.join_texts(tokenizer, prompts, completions) == (["u a a b "], True)
    tokenizer.chat_template = "{{ raise_exception('no assistant') }}"
    model = SimpleNamespace(name_or_path="judge")
    message = refusal(prpo_llm.apply_reward_model, model, tokenizer, prompts, completions)
    assert message == "--reward judge: a prompt does not suit its chat template: no assistant"
    tokenizer.chat_template = None
    assert prpo_llm.join_texts(tokenizer, prompts, completions) == (["a\n\nb<eos>"], False)


@pytest.mark.parametrize(
    ("kind", "positions"),
    [
        ("bert", 34),
        ("gpt2", 34),
        ("roberta", 32),
        ("camembert", 32),
        ("mpnet", 32),
        ("llama", 34),
        ("xlnet", None),
    ],
)
def test_positions_of_reward_models_are_those_of_a_text(kind, positions):
    """RoBERTa and its relatives give two of theirs to the padding; XLNet has no limit."""
    shape = {"vocab_size": 27, "pad_token_id": 1}
    if kind == "xlnet":
        shape |= {"d_model": 16, "n_head": 2, "n_layer": 1, "d_inner": 16}
    else:
        shape |= {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
        shape |= {"intermediate_size": 16, "max_position_embeddings": 34}
    config = AutoConfig.for_model(kind, **shape)
    model = AutoModelForSequenceClassification.from_config(config)
    assert prpo_llm.count_positions(model) == positions


def test_a_reward_model_with_learned_positions_reads_texts_from_the_left(files, tmp_path, capsys):
    """Padding stands behind them, so that positions count from their first token, also beside
    longer ones."""
    tokenizer = AutoTokenizer.from_pretrained(files / "model")
    tokenizer.save_pretrained(tmp_path / "judge")
    torch.manual_seed(5)
    shape = {
        "vocab_size": 27,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 32,
        "num_labels": 1,
    }
    model = GPT2ForSequenceClassification(
        GPT2Config(**shape, pad_token_id=0, bos_token_id=0, eos_token_id=0)
    ).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(tmp_path / "judge")
    args = tiny(files, tmp_path, reward=str(tmp_path / "judge"))
    function = prpo_llm.make_reward(args, torch.device("cpu"))["judge"]
    texts = ["c", "c d e f g", "g h"]
    alone = [function(prompts=["a b "], completions=[text])[0] for text in texts]
    together = function(prompts=["a b "] * 3, completions=texts)
    message = refusal(function, prompts=["a b "], completions=["c " * 40])
    line = f"--reward {tmp_path / 'judge'}: has 32 positions, and a text "
    assert message.startswith(line)
    # A run ends before it trains if a prompt is too long, and reports that a completion could be
    check = functools.partial(prpo_llm.check_reward_inputs, args, {"judge": function})
    examples = [{"ids": [1] * n, "row": {"prompt": "a " * n}} for n in (2, 9, 4)]
    capsys.readouterr()
    args.response_length = 22
    check([examples[:1], examples])
    assert capsys.readouterr().out == ""
    args.response_length = 23
    check([examples[:1], examples])
    warning = "a prompt leaves 22 of its 32 positions for a completion; a longer one ends the run"
    assert capsys.readouterr().out == f"--reward {tmp_path / 'judge'}: {warning}\n"
    examples.append({"ids": [1] * 32, "row": {"prompt": "a " * 32}})
    assert refusal(check, [examples[:1], examples]) == f"{line}33 of its tokens"
    assert (
        together == pytest.approx(alone, abs=1e-5) and len({f"{score:.3f}" for score in alone}) == 3
    )


def test_a_reward_model_has_the_precision_of_the_run(files, reward_model, tmp_path):
    """Its head has not: scores in bfloat16 would be multiples of 1/16 where they are about 13."""
    texts = {"prompts": ["a b "] * 6, "completions": ["c", "d", "e f", "g", "h i", "j"]}
    scores = {}
    for precision in ("float32", "bfloat16"):
        args = tiny(files, tmp_path, reward=str(reward_model), precision=precision)
        function = prpo_llm.make_reward(args, torch.device("cpu"))["judge"]
        model = function.args[0]
        assert model.model.layers[0].mlp.up_proj.weight.dtype == getattr(torch, precision)
        assert model.score.layer.weight.dtype == torch.float32
        scores[precision] = torch.tensor(function(**texts))
    spread = scores["float32"].std()
    assert 0 < (scores["float32"] - scores["bfloat16"]).abs().max() < 0.1 * spread
    assert not torch.equal(scores["bfloat16"], scores["bfloat16"].bfloat16().float())


def test_what_is_no_reward_model_is_refused(files, reward_model, tmp_path, monkeypatch):
    """A language model has no score, and code that comes with a model is not executed, and
    there is no question on the terminal."""
    args = tiny(files, tmp_path, reward=str(files / "model"))
    assert "is no whole model with one score" in refusal(
        prpo_llm.make_reward, args, torch.device("cpu")
    )
    config = config_of(reward_model)
    folder = tmp_path / "own"
    folder.mkdir()
    config |= {
        "model_type": "mine",
        "auto_map": {"AutoConfig": "mine.Config", "AutoModel": "mine.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question"))
    line = refusal(
        prpo_llm.make_reward, tiny(files, tmp_path, reward=str(folder)), torch.device("cpu")
    )
    assert "cannot be loaded" in line
    line = refusal(prpo_llm.load_base, tiny(files, tmp_path, base_model=str(folder)))
    assert "cannot be loaded" in line and not (tmp_path / "executed").exists()


def test_a_run_that_names_code_is_resumed_by_naming_it_again(files, tmp_path, monkeypatch):
    """Somebody else's config.json cannot have a file executed."""
    folder, _ = train(files, tmp_path / "runs", total_steps=1)
    (folder / "evil.py").write_text(
        f"open({str(tmp_path / 'executed')!r}, 'w')\ndef reward(**_): pass\n"
    )
    evil = f"{folder / 'evil.py'}:reward"
    copy_config(folder, folder, f"--reward={evil}")
    resume = ["--resume", str(folder)]
    line = refusal(parse_args, prpo_llm, resume)
    assert line.startswith(f"--reward {evil}: is code that {folder} names; give the flag again")
    assert not (tmp_path / "executed").exists()
    assert parse_args(prpo_llm, [*resume, "--reward", evil]).reward == (evil,)
    assert "is code" in refusal(
        parse_args, prpo_llm, [*resume, "--reward", f"{files / 'letters.py'}:count"]
    )
    copy_config(folder, folder, "--reward=rouge")
    assert parse_args(prpo_llm, resume).reward == ("rouge",)


def test_a_file_without_the_function_is_refused(files, tmp_path, monkeypatch):
    """Before the model is loaded."""
    (tmp_path / "broken.py").write_text("counts = 1\n")
    monkeypatch.setattr(prpo_llm, "load_base", None)
    args = tiny(
        files,
        tmp_path / "runs",
        reward=f"{tmp_path / 'broken.py'}:count",
    )
    assert f"{tmp_path / 'broken.py'} has no function count" in refusal(prpo_llm.main, args)
    args = tiny(files, tmp_path / "runs", reward="nowhere/at/all")
    assert refusal(prpo_llm.main, args).startswith(
        "--reward nowhere/at/all: nowhere/at/all cannot be loaded"
    )


# --- partitions ---


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    agents=st.integers(1, 8),
    number=st.integers(1, 120),
    share=st.floats(0.0, 1.0),
    low=st.floats(0.0, 1.0),
    high=st.floats(0.0, 1.0),
    xi=st.sampled_from([0.0, 1e-6, 0.5, 1.0, 256.0, 1e9]),
)
def test_coverage_partition_keeps_its_promises(seed, agents, number, share, low, high, xi):
    """Sizes within the bounds, which may be equal; a fixed sum; each item equally often, never
    twice in a set."""
    total = max(agents, round(share * agents * number))
    assume(total <= agents * number)
    middle = total // agents
    least = math.floor(low * middle)
    most = math.ceil(total / agents + high * (number - total / agents))
    rng = np.random.default_rng(seed)
    sets = partition.coverage_partition(number, agents, total, (least, middle, most), xi, rng)
    assert len(sets) == agents and sum(map(len, sets)) == total
    assert all(least <= len(inds) <= most and len({*inds}) == len(inds) for inds in sets)
    counts = np.bincount(np.concatenate(sets), minlength=number)
    assert (
        counts.min() >= total // number
        and counts.max() <= -(-total // number)
        and len(counts) == number
    )


@pytest.mark.parametrize("bounds", [(5, 4, 9), (0, 9, 5), (5, 5, 5), (0, 1, 2), (-1, 4, 9)])
def test_bounds_without_room_are_refused(bounds):
    """For 16 places in four sets."""
    with pytest.raises(ValueError, match="cannot hold 16"):
        partition.coverage_partition(16, 4, 16, bounds, 1.0, np.random.default_rng(0))


def test_coverage_reaches_from_all_at_a_bound_to_all_equal():
    """xi = 0 is the limit of ever smaller ones, a large one makes all sizes the mean; between them
    order is kept."""

    def sizes(xi):
        rng = np.random.default_rng(0)
        runs = []
        for _ in range(30):
            sets = partition.coverage_partition(80, 8, 80, (2, 10, 18), xi, rng)
            runs.append([len(inds) for inds in sets])
        return np.array(runs)

    spreads = [sizes(xi).std(axis=1).mean() for xi in (0.0, 1e-6, 1.0, 16.0, 1e9)]
    assert spreads[0] == pytest.approx(spreads[1], rel=0.15) and (np.diff(spreads[1:]) < 0).all()
    assert (sizes(1e9) == 10).all()
    assert spreads[0] > 1.1 * spreads[2]


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    share=st.floats(0.0, 1.0),
    omega=st.sampled_from([0.0, 0.1, 0.9, 30.0, 1000.0]),
)
def test_preference_partition_keeps_its_promises(seed, counts, share, omega):
    """Every agent has as many items as every other, none twice, however much it prefers."""
    ends = np.cumsum(counts)
    pools = [np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)]
    size = max(1, round(share * sum(counts)))
    sets = partition.preference_partition(pools, 4, size, omega, np.random.default_rng(seed))
    assert len(sets) == 4 and all(len(inds) == size == len({*inds}) for inds in sets)
    assert all(set(inds) <= set(range(sum(counts))) for inds in sets)


def test_preference_without_noise_is_the_common_mixture():
    """omega = 0: every agent draws from softmax of the logits of the shares; larger ones drive
    agents apart."""
    pools = [np.arange(0, 600), np.arange(600, 1600), np.arange(1600, 3000)]
    odds = np.array([600 / 2400, 1000 / 2000, 1400 / 1600])

    def mixtures(omega):
        sets = partition.preference_partition(pools, 40, 400, omega, np.random.default_rng(1))
        return np.array([np.histogram(inds, (0, 600, 1600, 3000))[0] / 400 for inds in sets])

    np.testing.assert_allclose(mixtures(0.0).mean(axis=0), odds / odds.sum(), atol=0.01)
    spreads = [mixtures(omega).std(axis=0).mean() for omega in (0.0, 0.3, 0.9, 3.0)]
    assert (np.diff(spreads) > 0).all() and spreads[0] < 0.03
    with pytest.raises(ValueError, match="3001 of 3000"):
        partition.preference_partition(pools, 1, 3001, 0.9, np.random.default_rng(1))


@settings(max_examples=30)
@given(seed=st.integers(0, 2**31), xi=st.sampled_from([0.0, 1.0, 256.0]), middle=st.integers(0, 20))
def test_hardness_partition_keeps_its_promises(seed, xi, middle):
    """Sets of equal size; the easy items are dealt as coverage deals them, the rest are hard ones,
    none twice."""
    easy = np.arange(100, 180)
    hard = np.arange(100)
    bounds = (middle // 2, middle, middle + middle // 2)
    rng = np.random.default_rng(seed)
    sets = partition.hardness_partition(easy, hard, 4, 40, 4 * middle, bounds, xi, rng)
    assert all(len(inds) == 40 == len({*inds}) for inds in sets)
    amounts = [int((inds >= 100).sum()) for inds in sets]
    assert sum(amounts) == 4 * middle and all(
        bounds[0] <= amount <= bounds[2] for amount in amounts
    )
    with pytest.raises(ValueError, match="need more hard ones"):
        partition.hardness_partition(easy, hard[:10], 4, 40, 40, (5, 10, 15), xi, rng)
    with pytest.raises(ValueError, match="no room for 41 easy"):
        partition.hardness_partition(easy, hard, 4, 40, 40, (5, 10, 41), xi, rng)


def deal_files(many, files, folder, *words):
    """Run the tool. Returns the prompts of each agent's file, and the held-out ones."""
    argv = [
        "--dataset",
        many,
        "--base-model",
        str(files / "model"),
        "--out-dir",
        str(folder),
        *words,
    ]
    partition.main(partition.read_flags(partition.Args, argv))
    rows = {path.stem: read_jsonl(path) for path in sorted(folder.glob("*.jsonl"))}
    return [rows[f"agent_{i}"] for i in range(len(rows) - 1)], rows["validation"]


@pytest.mark.parametrize("name", ["preference", "coverage", "hardness", "iid", "topic"])
def test_every_partition_writes_a_file_for_each_agent(
    many, files, tokenizer, tmp_path, name, capsys
):
    """Rows of the data set, none that prpo_llm.py holds out, the requested sizes, the same for
    equal seeds."""
    words = ["--partition", name, "--prompts-per-agent", "40", "--num-agents", "3"]
    parts, pool = deal_files(many, files, tmp_path / "a", *words)
    assert "fewer" not in capsys.readouterr().out
    rows = read_jsonl(Path(many))
    sizes = [len(rows_of_part) for rows_of_part in parts]
    assert len(parts) == 3 and all(
        row in rows for rows_of_part in (*parts, pool) for row in rows_of_part
    )
    assert (
        sizes == [40] * 3
        if name != "coverage"
        else sum(sizes) == 120 and all(20 <= size <= 60 for size in sizes)
    )
    args = tiny(files, "runs", dataset=many, eval_prompts=999)
    assert {row["prompt"] for row in pool} == {*dealt(args, tokenizer)[1]["validation"]}
    prompts = [[row["prompt"] for row in rows_of_part] for rows_of_part in parts]
    assert not {row["prompt"] for row in pool} & {*sum(prompts, [])}
    assert all(len({*prompts_of_agent}) == len(prompts_of_agent) for prompts_of_agent in prompts)
    if name not in ("preference", "hardness"):
        assert len({*sum(prompts, [])}) == 120
    if name == "topic":
        assert [{row["topic"] for row in rows_of_part} for rows_of_part in parts] == [
            {"y"},
            {"x"},
            {"z"},
        ]
    assert deal_files(many, files, tmp_path / "b", *words) == (parts, pool)
    if name in ("preference", "coverage", "hardness"):
        assert deal_files(many, files, tmp_path / "c", *words, "--seed", "2")[0] != parts


@pytest.mark.parametrize("number", [449, 450, 451])
def test_a_rounded_overlap_asks_for_no_more_prompts_than_there_are(number):
    """1.4 times 450 is 630, but 630 over 1.4 is more than 450, by rounding."""
    settings = {"overlap": 1.4, "num_agents": 3, "prompts_per_agent": 210, "out_dir": "x"}
    args = partition.Args(partition="coverage", **settings)
    examples = [{"row": {}, "completion": "x", "topic": "t"}] * number
    sets = partition.choose_sets(args, examples)
    assert max(map(max, sets)) < number


def test_partitions_move_what_they_are_named_for(many, files, tmp_path, capsys):
    """Shares of topics, numbers of prompts, shares of easy prompts; overlap lets agents share
    some."""

    def each(folder, *words):
        return deal_files(
            many, files, tmp_path / folder, "--num-agents", "6", "--prompts-per-agent", "30", *words
        )[0]

    def spread(parts, count):
        return np.std([sum(map(count, rows_of_agent)) for rows_of_agent in parts])

    def easy(row):
        return len(row["completion"]) <= 4

    apart, alike = (
        each(f"p{strength}", "--partition", "preference", "--strength", strength)
        for strength in ("3", "0")
    )
    assert spread(apart, lambda row: row["topic"] == "x") > 2 * spread(
        alike, lambda row: row["topic"] == "x"
    )
    apart, alike = (
        each(f"c{strength}", "--partition", "coverage", "--strength", strength)
        for strength in ("0", "1000000")
    )
    assert {len(rows_of_agent) for rows_of_agent in alike} == {30} and spread(
        apart, lambda _: 1
    ) > 8
    apart, alike = (
        each(f"h{strength}", "--partition", "hardness", "--strength", strength)
        for strength in ("0", "1000000")
    )
    assert spread(apart, easy) > 2 * spread(alike, easy)
    shared = each("overlap", "--partition", "coverage", "--overlap", "2")
    prompts = [row["prompt"] for rows_of_agent in shared for row in rows_of_agent]
    assert len(prompts) == 180 and len({*prompts}) == 90
    equal = each("equal", "--partition", "coverage", "--bounds", "30", "30", "--strength", "0")
    assert {len(rows_of_agent) for rows_of_agent in equal} == {30}
    capsys.readouterr()
    few = deal_files(
        many, files, tmp_path / "few", "--partition", "coverage", "--prompts-per-agent", "500"
    )[0]
    match = re.search(
        r"gets (\d+) prompts, fewer than --prompts-per-agent 500: there are (\d+)",
        capsys.readouterr().out,
    )
    assert int(match[2]) - 3 < sum(map(len, few)) == 3 * int(match[1]) <= int(match[2])


TOOL = {
    "no folder": (["--partition", "iid"], "--out-dir"),
    "no such partition": (
        ["--out-dir", "x", "--partition", "even"],
        "invalid choice 'even' for argument '--partition'",
    ),
    "overlap": (
        ["--out-dir", "x", "--partition", "coverage", "--overlap", "4"],
        "--overlap 4.0: must lie in [1, 3]",
    ),
    "strength": (
        ["--out-dir", "x", "--partition", "coverage", "--strength", "-1"],
        "must not be negative",
    ),
    "infinite": (
        ["--out-dir", "x", "--partition", "coverage", "--strength", "inf"],
        "--strength inf: must be finite",
    ),
    "bounds": (
        ["--out-dir", "x", "--partition", "coverage", "--bounds", "5", "4"],
        "--bounds 5 4: must be",
    ),
    "no room": (
        ["--out-dir", "x", "--partition", "coverage", "--bounds", "90", "95"],
        "cannot hold",
    ),
    "no agents": (
        ["--out-dir", "x", "--partition", "iid", "--num-agents", "0"],
        "--num-agents 0: must be at least 1",
    ),
    "no numbers": (
        ["--out-dir", "x", "--partition", "hardness", "--easy-column", "topic"],
        "--easy-column topic",
    ),
    "no file": (
        ["--out-dir", "x", "--partition", "iid", "--dataset", "nowhere.jsonl"],
        "nowhere.jsonl: there is no",
    ),
}


@pytest.mark.parametrize("case", TOOL)
def test_the_tool_refuses_in_one_line(many, files, tmp_path, monkeypatch, case):
    """And writes nothing."""
    monkeypatch.chdir(tmp_path)
    words, message = TOOL[case]
    argv = [
        "--dataset",
        many,
        "--base-model",
        str(files / "model"),
        "--prompts-per-agent",
        "40",
        *words,
    ]
    line = refusal(lambda: partition.main(partition.read_flags(partition.Args, argv)))
    assert message in line and not (tmp_path / "x").exists(), line


def test_the_commands_of_the_page_run(many, files, tmp_path, monkeypatch):
    """The tool's two lines, and the training on what they leave, as they stand in the page but for
    size and model."""
    monkeypatch.chdir(tmp_path)
    page = (REPOSITORY / "docs" / "prpo_llm.md").read_text()
    lines = [
        line
        for block in re.findall(r"```bash\n(.*?)```", page, re.S)
        for line in block.splitlines()
    ]
    (line,) = [line for line in lines if "benchmark/partition.py" in line]
    first, second = (shlex.split(command, comments=True) for command in line.split(" && "))
    assert first[:2] == ["python", "benchmark/partition.py"] and second[:2] == [
        "python",
        "prpo_llm.py",
    ]
    small = ["--base-model", str(files / "model")]
    partition.main(partition.read_flags(partition.Args, [*first[2:], "--dataset", many, *small]))
    small += [
        "--total-steps",
        "1",
        "--response-length",
        "4",
        "--eval-prompts",
        "1",
        "--reward",
        "rouge",
    ]
    args = parse_args(prpo_llm, [*second[2:], *small, "--batch-size", "2", "--device", "cpu"])
    assert prpo_llm.main(args)["completed"]
    (line,) = [line for line in lines if "benchmark/docstrings.py" in line]
    words = shlex.split(line, comments=True)
    assert words[:2] == ["python", "benchmark/docstrings.py"]
    toolbox(tmp_path, monkeypatch)
    args = docstrings_args(words[2:])
    docstrings.main(docstrings.Args(out=args.out, topics=("toolbox",)))
    assert Path(args.out).is_file()


def docstrings_args(words):
    """As the tool reads them."""
    return partition.read_flags(docstrings.Args, words)


@pytest.mark.parametrize("splits", [False, True])
def test_a_data_set_saved_by_the_library_is_read(tmp_path, splits):
    """`save_to_disk` of a data set, or of a dictionary of them by split."""
    datasets = importlib.import_module("datasets")
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    data = datasets.Dataset.from_list(rows)
    if splits:
        data = datasets.DatasetDict({"train": data, "test": datasets.Dataset.from_list(rows[:1])})
    data.save_to_disk(tmp_path / "saved")
    assert prpo_llm.read_rows(str(tmp_path / "saved")) == rows
    if splits:
        assert prpo_llm.read_rows(f"{tmp_path / 'saved'}:test") == rows[:1]
        return
    for split in ("test", "train[:1]"):
        with pytest.raises(ValueError, match=r"was saved without splits, leave out :(test|train)"):
            prpo_llm.read_rows(f"{tmp_path / 'saved'}:{split}")


def test_dates_are_no_references(files, tmp_path):
    """The library makes them of texts: "2020-01-01" would become "2020-01-01 00:00:00"."""
    path = tmp_path / "dates.jsonl"
    write_jsonl(path, [{"prompt": f"{k} a", "completion": f"2020-01-0{k}"} for k in range(1, 9)])
    args = tiny(files, tmp_path, dataset=str(path))
    message = refusal(prpo_llm.load_examples, args, None, str(path))
    assert "column completion: neither a text nor messages" in message
