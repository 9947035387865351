"""Language models: what surrounds training. Saved adapters, extended runs, sampled evaluations,
logs, stop strings."""

import importlib.util
import io
import json
import math
import socket
import urllib.error
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from command import parse_args
from completion_server import transformers_serve
from helpers import only_run, read_jsonl, refusal, table_of
from hypothesis import given, settings
from hypothesis import strategies as st
from language_models import (
    PROMPTS,
    SERVICES,
    SPREAD,
    WORDS,
    plain_model,
    rows_of,
    tiny,
    to_resume,
    train,
    weights_of,
)
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import communicators
import prpo_llm


def read_logged(folder, agent):
    """The rows that --log-completions wrote of an agent."""
    return read_jsonl(folder / "training_completions" / f"agent_{agent}.jsonl")


def read_header(path):
    with safe_open(path, "pt") as file:
        return file.metadata()


def snapshot_of(folder):
    """Everything that these options leave in a run's folder: name -> content."""
    contents = {"evaluations.csv": (folder / "evaluations.csv").read_text()}
    for path in sorted((folder / "adapters").rglob("adapter_model.safetensors")):
        tensors = torch.cat([tensor.flatten() for _, tensor in sorted(load_file(path).items())])
        contents[str(path.relative_to(folder))] = tensors, read_header(path)
    for path in sorted((folder / "training_completions").iterdir()):
        contents[path.name] = path.read_text()
    return contents


# --- runs that are extended, resumed and spread ---


def test_an_extended_run_is_the_longer_run(files, tmp_path):
    """--total-steps may be given anew when a run is resumed: from there on it is the run of that
    length."""
    whole, _ = train(files, tmp_path / "whole", total_steps=4)
    folder, _ = train(files, tmp_path / "extended", total_steps=2)
    summary = prpo_llm.main(parse_args(prpo_llm, [*to_resume(folder), "--total-steps", "4"]))
    assert (
        summary["steps"] == 4 and summary["completed"] and summary["settings"]["total_steps"] == 4
    )
    for extended, expected in zip(weights_of(folder), weights_of(whole), strict=True):
        assert torch.equal(extended, expected)
    assert rows_of(folder) == rows_of(whole)
    steps = [row["step"] for row in table_of(folder, "evaluations") if row["task"] == "validation"]
    assert steps == ["0", "0", "2", "2", "4", "4"]
    with pytest.raises(SystemExit, match="has 4 steps already, more than the 3 asked for"):
        prpo_llm.main(parse_args(prpo_llm, [*to_resume(folder), "--total-steps", "3"]))


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_an_extended_schedule_runs_over_the_new_total(files, tmp_path, schedule):
    """Learning rate and KL coefficient go on where a run of the new length has them."""
    changes = {"lr_scheduler_type": schedule, "eval_prompts": 0, "num_agents": 1}
    changes |= {"kl_schedule": "linear", "kl_coef": 0.5}
    folder, _ = train(files, tmp_path, total_steps=2, **changes)
    prpo_llm.main(parse_args(prpo_llm, [*to_resume(folder), "--total-steps", "5"]))
    rates = [float(row["learning_rate"]) for row in rows_of(folder)]
    done = np.array([0.0, 1 / 2, 2 / 5, 3 / 5, 4 / 5])
    falling = 1 - done if schedule == "linear" else (1 + np.cos(np.pi * done)) / 2
    assert rates == pytest.approx((1e-2 * falling).tolist(), rel=1e-4)
    coefs = [float(row["kl_coefficient"]) for row in rows_of(folder)]
    assert coefs == pytest.approx((0.5 * (1 - done)).tolist(), rel=1e-4)


@pytest.mark.usefixtures("smooth_adam")
def test_two_ranks_save_and_log_like_one_process(files, server, spread, tmp_path):
    """Adapters, sampled evaluations, logged completions and those of a server do not depend on the
    placement."""
    folder, _ = spread
    spread = only_run(folder / "services")
    together, _ = train(files, tmp_path, generate_with=server.url, **SPREAD["services"])
    contents = snapshot_of(spread)
    expected = snapshot_of(together)
    assert contents.keys() == expected.keys() and len(contents) == 1 + 2 * (2 + 1) + 2
    for name, content in expected.items():
        if name.endswith(".safetensors"):
            torch.testing.assert_close(contents[name][0], content[0], rtol=0, atol=1e-4)
    rows = [table_of(folder, "evaluations") for folder in (spread, together)]
    for row, expected_row in zip(*rows, strict=True):
        for column in row.keys() - {"task"}:
            assert float(row[column]) == pytest.approx(
                float(expected_row[column]), rel=1e-3, abs=1e-4
            ), column
    for agent in range(2):
        for row, expected_row in zip(
            read_logged(spread, agent), read_logged(together, agent), strict=True
        ):
            assert row | {"advantage": 0} == expected_row | {"advantage": 0}
            assert row["advantage"] == pytest.approx(expected_row["advantage"], abs=1e-4)


def test_a_resumed_run_saves_and_logs_like_a_whole_one(files, tmp_path, monkeypatch):
    """What a run wrote behind its last checkpoint, half a line included, is done again: the same
    files, bit for bit."""
    whole, _ = train(files, tmp_path / "whole", **SERVICES)
    write = prpo_llm.CompletionLog.write

    def die_in_step_4(self, *content):
        write(self, *content)
        if self.run.iteration == 3:
            with open(self.paths[0], "a") as file:
                file.write('{"step": 4, "agent": 0, "id')
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prpo_llm.CompletionLog, "write", die_in_step_4)
        with pytest.raises(KeyboardInterrupt):
            prpo_llm.main(tiny(files, tmp_path / "cut", **SERVICES))
    folder = only_run(tmp_path / "cut")
    assert (
        read_header(folder / "adapters" / "step_3" / "agent_0" / "adapter_model.safetensors")[
            "step"
        ]
        == "3"
    )
    prpo_llm.main(parse_args(prpo_llm, to_resume(folder)))
    contents = snapshot_of(folder)
    expected = snapshot_of(whole)
    assert contents.keys() == expected.keys()
    for name, content in expected.items():
        if name.endswith(".safetensors"):
            assert torch.equal(contents[name][0], content[0]) and contents[name][1] == content[1], (
                name
            )
        else:
            assert contents[name] == content, name


# --- adapters ---


def test_adapters_of_every_step_load_in_peft(files, tmp_path):
    """adapters/step_N holds what a run of N steps ends with, and its tokenizer; every N-th step has
    one."""
    folder, _ = train(files, tmp_path / "long", save_adapters=2, total_steps=5, eval_prompts=0)
    short, _ = train(files, tmp_path / "short", total_steps=2, eval_prompts=0)
    names = sorted(path.name for path in (folder / "adapters").iterdir())
    assert names == ["step_2", "step_4"]
    for agent in range(2):
        saved = folder / "adapters" / "step_2" / f"agent_{agent}"
        assert not list(saved.glob("*.tmp"))
        expected = load_file(short / f"agent_{agent}" / "adapter_model.safetensors")
        peft = PeftModel.from_pretrained(plain_model(files), saved)
        loaded = {
            name.replace(".default", ""): value
            for name, value in peft.state_dict().items()
            if "lora" in name
        }
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[name], expected[name]) for name in expected)
        tokenizer = AutoTokenizer.from_pretrained(saved)
        assert tokenizer("c a", add_special_tokens=False)["input_ids"] == [
            WORDS.index("c"),
            WORDS.index("a"),
        ]
        assert tokenizer.eos_token == "<eos>"
        other = load_file(
            folder / "adapters" / "step_4" / f"agent_{agent}" / "adapter_model.safetensors"
        )
        assert any(not torch.equal(other[name], expected[name]) for name in expected)
    assert AutoTokenizer.from_pretrained(folder / "agent_0").eos_token == "<eos>"


def test_the_best_adapters_are_kept(files, stacked, tmp_path):
    """Each agent's best by held-out reward: a worse, an equal or an unknown one replaces
    nothing."""
    model, layers, _ = stacked
    args = tiny(files, tmp_path, num_agents=4, algorithm="ppo")
    tokenizer = AutoTokenizer.from_pretrained(files / "model")
    run = SimpleNamespace(folder=tmp_path, exchange=SimpleNamespace(agents=range(1, 4)))
    name, layer = next(iter(layers.items()))
    side = layer.B["policy"]

    def evaluate(step, rewards):
        run.iteration = step
        run.results = {"validation": [[reward, 0.1] for reward in rewards]}
        side.data[:] = step + torch.arange(3.0)[:, None, None]  # the agents 1, 2, 3
        prpo_llm.save_best_adapters(args, run, model, tokenizer)
        kept = []
        for agent in range(1, 4):
            path = tmp_path / "adapters" / "best" / f"agent_{agent}" / "adapter_model.safetensors"
            values = load_file(path)[f"base_model.model.{name}.lora_B.weight"]
            assert values.unique().item() - (agent - 1) == int(read_header(path)["step"])
            kept.append(int(read_header(path)["step"]))
        assert not (tmp_path / "adapters" / "best" / "agent_0").exists()  # another process has it
        return kept

    assert evaluate(2, [9.0, -1.0, 0.5, 0.5]) == [2, 2, 2]
    assert evaluate(4, [9.0, -0.5, 0.5, 0.4]) == [4, 2, 2]
    assert evaluate(6, [9.0, math.nan, 0.6, math.nan]) == [4, 6, 2]
    assert evaluate(8, [9.0, 1.0, 0.6, 0.7]) == [8, 6, 8]
    # Resumed at step 5: what was saved in step 6 or 8 is evaluated again
    assert evaluate(5, [9.0, 0.0, 0.1, 0.2]) == [5, 5, 5]
    # Means of other prompts are not comparable
    args.eval_prompts += 1
    assert evaluate(7, [9.0, -3.0, -3.0, -3.0]) == [7, 7, 7]


def test_a_full_disk_leaves_the_former_adapter(files, stacked, tmp_path, monkeypatch):
    """The weights come last and replace the former ones at once; the run ends with one line."""
    model, _, _ = stacked
    args = tiny(files, tmp_path, num_agents=3, algorithm="ppo")
    tokenizer = AutoTokenizer.from_pretrained(files / "model")
    run = SimpleNamespace(folder=tmp_path, exchange=SimpleNamespace(agents=range(3)))
    prpo_llm.save_adapters(args, run, model, tokenizer, {1: tmp_path / "saved"}, step=1)
    before = (tmp_path / "saved" / "adapter_model.safetensors").read_bytes()
    write = communicators.write_atomically
    order = []

    def fail_at_weights(path, content):
        order.append(path.name)
        if path.name == "adapter_model.safetensors":
            raise OSError(28, "No space left on device")
        write(path, content)

    monkeypatch.setattr(communicators, "write_atomically", fail_at_weights)
    folders = {2: tmp_path / "saved"}
    message = refusal(prpo_llm.save_adapters, args, run, model, tokenizer, folders, step=2, code=1)
    assert message.endswith("No space left on device")  # there is no checkpoint to go on from
    assert (tmp_path / "saved" / "adapter_model.safetensors").read_bytes() == before
    assert order[-1] == "adapter_model.safetensors" and {
        "adapter_config.json",
        "tokenizer.json",
    } <= {*order}


# --- sampled evaluation ---


@settings(max_examples=50)
@given(seed=st.integers(0, 2**31), size=st.integers(1, 40), top_p=st.floats(0.01, 0.99))
def test_a_nucleus_is_the_fewest_likeliest_tokens(seed, size, top_p):
    """Against a loop over sorted probabilities; logits inside are kept as they are."""
    logits = torch.randn(2, 3, size, generator=torch.Generator().manual_seed(seed)) * 3
    nuclei = prpo_llm.keep_nucleus(logits, top_p)
    for row, kept in zip(logits.flatten(0, 1), nuclei.flatten(0, 1), strict=True):
        probs = row.double().softmax(-1)
        total = 0.0
        inside = set()
        for token in row.argsort(descending=True).tolist():
            if total >= top_p - 1e-6:
                break
            inside.add(token)
            total += float(probs[token])
        kept_tokens = {*kept.isfinite().nonzero().flatten().tolist()}
        # Rounding may decide whether the last one is needed
        assert kept_tokens == inside or abs(total - top_p) < 1e-5
        assert torch.equal(kept[kept.isfinite()], row[kept.isfinite()])


def test_sampled_evaluation_by_hand(files, tmp_path, monkeypatch):
    """The columns are means over prompts of means over samples, at --temperature, from the nucleus
    of --eval-top-p.

    The samples differ between agents, samples and prompts, and are the same in the next evaluation
    of equal weights.
    """
    calls = []
    generate = prpo_llm.generate

    def watch(model, ids, uniforms, ends, temperature, top_p=1.0, is_stopped=None):
        generated = generate(model, ids, uniforms, ends, temperature, top_p, is_stopped)
        calls.append((ids, uniforms, temperature, top_p, *generated[:2]))
        return generated

    monkeypatch.setattr(prpo_llm, "generate", watch)
    # All prompts of a task at once
    monkeypatch.setattr(prpo_llm, "choose_evaluation_batch_size", lambda args: 3)
    changes = {
        "eval_prompts": 3,
        "eval_samples": 4,
        "eval_top_p": 0.8,
        "temperature": 0.6,
        "total_steps": 1,
    }
    changes["topics"] = ("x", "y")
    folder, _ = train(files, tmp_path, **changes, learning_rate=1e-12, missing_eos_penalty=0.25)
    sampled = [call for call in calls if call[3] == 0.8]
    # Three tasks, before and after
    assert len(sampled) == 2 * 3 and all(call[2] == 0.6 for call in sampled)
    # Training samples from all tokens
    assert {call[3] for call in calls if call[2] == 0.6} == {
        1.0,
        0.8,
    }
    for first, last in zip(sampled[:3], sampled[3:], strict=True):
        assert torch.equal(first[1], last[1])
    uniforms = sampled[0][1]
    assert uniforms.shape == (2 * 3, 4, 6) and len(uniforms.flatten().unique()) > 140
    rows = [
        row
        for row in table_of(folder, "evaluations")
        if row["step"] == "0" and row["task"] == "validation"
    ]
    tokens = sampled[0][4].view(2, 12, 6)
    lengths = sampled[0][5].view(2, 12)
    for agent, row in enumerate(rows):
        rewards = []
        ended = []
        for completion, length in zip(tokens[agent].tolist(), lengths[agent].tolist(), strict=True):
            ended.append(completion[length - 1] == 0)
            rewards.append(completion[:length].count(WORDS.index("a")) - 0.25 * (not ended[-1]))
        assert float(row["sampled_reward"]) == pytest.approx(np.mean(rewards), abs=1e-5)
        assert float(row["sampled_length"]) == pytest.approx(
            lengths[agent].double().mean().item(), rel=1e-5
        )
        assert float(row["sampled_eos_rate"]) == pytest.approx(np.mean(ended), abs=1e-5)
        assert float(row["sampled_reward"]) != float(row["mean_reward"])
    # Their texts and rewards, beside the greedy ones
    lines = (folder / "completions.jsonl").read_text().splitlines()
    logged = [line for line in map(json.loads, lines) if line["task"] == "validation"]
    for agent, row in enumerate(rows):
        of_agent = [line for line in logged if (line["step"], line["agent"]) == (0, agent)]
        greedy = [line for line in of_agent if "sample" not in line]
        samples = [line for line in of_agent if "sample" in line]
        assert len(greedy) == 3
        assert [line["sample"] for line in samples] == [0, 1, 2, 3] * 3
        assert [line["id"] for line in samples] == [line["id"] for line in greedy for _ in range(4)]
        texts = []
        for completion, length in zip(tokens[agent].tolist(), lengths[agent].tolist(), strict=True):
            words = [WORDS[token] for token in completion[:length] if token]
            texts.append(words)
        assert [line["completion"].split() for line in samples] == texts
        assert np.mean([line["reward"] for line in greedy]) == pytest.approx(
            float(row["mean_reward"]), abs=1e-5
        )
        assert np.mean([line["reward"] for line in samples]) == pytest.approx(
            float(row["sampled_reward"]), abs=1e-5
        )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_full_disk_ends_the_log_of_completions_in_one_line(files, tmp_path, monkeypatch):
    write = prpo_llm.CompletionLog.write

    def write_to_full(self, *inputs):
        self.paths = [Path("/dev/full")] * len(self.paths)
        write(self, *inputs)

    monkeypatch.setattr(prpo_llm.CompletionLog, "write", write_to_full)
    args = tiny(files, tmp_path, log_completions=1, total_steps=1, eval_prompts=0)
    message = refusal(prpo_llm.main, args, code=1)
    assert message.startswith(f"{only_run(tmp_path)}: [Errno 28] No space left on device")


def test_without_samples_evaluations_are_as_before(files, tmp_path):
    """No column is added."""
    folder, _ = train(files, tmp_path, total_steps=1)
    assert not [column for column in table_of(folder, "evaluations")[0] if "sampled" in column]


# --- training completions ---


def test_training_completions_are_logged(files, tmp_path):
    """The first prompts of each agent and step, with all their completions: what the metrics are
    means of."""
    changes = {"num_agents": 3, "local_updates": 1, "missing_eos_penalty": 0.5, "batch_size": 3}
    changes["eval_prompts"] = 0
    folder, _ = train(files, tmp_path / "all", log_completions=3, **changes)
    metrics = rows_of(folder)
    for agent in range(3):
        logged = read_logged(folder, agent)
        assert len(logged) == 4 * 3 * 3 and {row["agent"] for row in logged} == {agent}
        for step in range(1, 5):
            rows = [row for row in logged if row["step"] == step]
            row = metrics[(step - 1) * 3 + agent]
            for name in ("reward", "score", "reward_letters.count"):
                assert np.mean([r[name] for r in rows]) == pytest.approx(
                    float(row[name]), rel=1e-4, abs=1e-5
                )
            assert np.mean([r["length"] for r in rows]) == pytest.approx(
                float(row["response_length"]), rel=1e-4
            )
            assert np.mean([r["ended"] for r in rows]) == pytest.approx(
                float(row["eos_rate"]), abs=1e-5
            )
            for n in range(0, 9, 3):
                rewards = np.array([r["reward"] for r in rows[n : n + 3]])
                assert len({r["prompt"] for r in rows[n : n + 3]}) == 1
                expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
                assert [r["advantage"] for r in rows[n : n + 3]] == pytest.approx(
                    expected.tolist(), abs=1e-4
                )
        assert all(row["completion"].split().count("a") == row["score"] for row in logged)
    few, _ = train(files, tmp_path / "few", log_completions=1, **changes)
    for agent in range(3):
        kept = [row for n, row in enumerate(read_logged(folder, agent)) if n % 9 < 3]
        assert read_logged(few, agent) == kept
    events = EventAccumulator(str(few)).Reload()
    shown = events.Tensors("training_completions/text_summary")
    assert [event.step for event in shown] == [1, 2, 3, 4]
    text = shown[0].tensor_proto.string_val[0].decode()
    assert len(text.splitlines()) == 2 + 3 * 3
    assert read_logged(few, 2)[0]["completion"] in text


# --- stop strings ---


def test_stop_strings_end_completions(files, stacked):
    """With equal random numbers a completion is what it would have been, cut behind the token that
    completes one."""
    model, _, eos = stacked
    args = tiny(files, "runs", stop_strings=("c", "e f"), algorithm="ppo", num_agents=3)
    tokenizer = AutoTokenizer.from_pretrained(files / "model")
    tokenizer.ends = [eos]
    uniforms = torch.rand(3, 64, 12, generator=torch.Generator().manual_seed(5))
    is_stopped = prpo_llm.find_stop_test(args, tokenizer)
    with prpo_llm.select_adapters("policy"):
        free, free_lengths, _ = prpo_llm.generate(model, PROMPTS, uniforms, [eos], 1.5)
        tokens, lengths, _ = prpo_llm.generate(
            model, PROMPTS, uniforms, [eos], 1.5, is_stopped=is_stopped
        )
    c, e, f = (WORDS.index(letter) for letter in "cef")
    stopped = both = 0
    examples = [{"completion": "", "row": {"prompt": "", "completion": ""}, "ids": []}] * 64
    functions = {"none": lambda completions, **_: [0.0] * len(completions)}
    for agent in range(3):
        texts, ends, _ = prpo_llm.score_completions(
            args,
            functions,
            tokenizer,
            examples,
            [agent] * len(examples),
            tokens[agent],
            lengths[agent],
        )
        for g in range(64):
            row = free[agent, g].tolist()
            expected = int(free_lengths[agent, g])
            at_string = False
            for t in range(expected):
                if row[t] == c or (t and row[t - 1 : t + 1] == [e, f]):
                    at_string = True
                    expected = t + 1
                    both += row[t] == f
                    break
            length = int(lengths[agent, g])
            assert length == expected
            assert tokens[agent, g, :length].tolist() == row[:length]
            assert (tokens[agent, g, length:] == eos).all()
            assert ends[g] == (at_string or row[length - 1] == eos)
            assert not at_string or texts[g].endswith(("c", "e f"))
            stopped += at_string
    assert stopped > 50 and both > 0
    assert prpo_llm.find_stop_test(tiny(files, "runs"), tokenizer) is None


def test_stop_strings_of_many_bytes(files):
    """A token may be part of a character: the string counts from the token that completes it,
    wherever it stands."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = Tokenizer(models.BPE({letter: k for k, letter in enumerate(alphabet)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="a")
    stops = ("</日本>", "\n\n")
    args = tiny(files, "runs", stop_strings=stops)
    for text in ("日本語 </日本>", "x" * 50 + "</日本>", "é\n\n", "\n\n"):
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text.encode())
        tests = [
            prpo_llm.find_stop_test(args, tokenizer)(ids[:length])
            for length in range(1, len(ids) + 1)
        ]
        assert tests == [False] * (len(ids) - 1) + [True]


def test_stopped_completions_pay_no_penalty(files, tmp_path):
    """With every letter a stop string, completions have one token, end, and are learned from where
    truncated ones are not."""
    stops = tuple(WORDS[1:])
    changes = {
        "stop_strings": stops,
        "missing_eos_penalty": 5.0,
        "mask_truncated_completions": True,
    }
    folder, _ = train(files, tmp_path / "stop", total_steps=2, **changes)
    for row in rows_of(folder):
        assert float(row["response_length"]) == 1 and float(row["eos_rate"]) == 1
        assert float(row["reward"]) == float(row["score"]) >= 0
    assert any(float(row["grad_norm"]) > 0 for row in rows_of(folder))
    evaluations = table_of(folder, "evaluations")
    assert all(float(row["length"]) == 1 and float(row["eos_rate"]) == 1 for row in evaluations)


def test_an_end_behind_a_stop_string_is_not_generated(files):
    """Scripted tokens: the mask reaches up to the stop string; an end of text before it counts as
    before."""
    model = plain_model(files)
    c = WORDS.index("c")
    d = WORDS.index("d")
    scripts = torch.tensor([[5, c, d, 0], [5, 0, c, d], [d, c, 6, 7], [6, 7, c, d]])
    step = {"now": -1}

    class Head(torch.nn.Module):
        def forward(self, hidden):
            step["now"] += 1
            return F.one_hot(scripts[:, step["now"]], len(WORDS)).float()[None]

    model.config._attn_implementation = "shared_prefix"
    model.lm_head = Head()
    args = tiny(files, "runs", stop_strings=("c d",))
    tokenizer = AutoTokenizer.from_pretrained(files / "model")
    is_stopped = prpo_llm.find_stop_test(args, tokenizer)
    uniforms = torch.zeros(1, 4, 4)
    tokens, lengths = prpo_llm.generate(model, [[1, 2]], uniforms, [0], 0.0, is_stopped=is_stopped)[
        :2
    ]
    assert lengths.tolist() == [[3, 2, 4, 4]]
    assert tokens[0].tolist() == [[5, c, d, 0], [5, 0, 0, 0], [d, c, 6, 7], [6, 7, c, d]]


# --- completions by a server ---


def loaded_names(requests):
    """The names of all adapters that a server was asked to load, in turn."""
    return [body["lora_name"] for path, body in requests if path == "/v1/load_lora_adapter"]


def test_a_server_completes_with_the_agents_adapters(files, server, tmp_path, monkeypatch):
    """Every prompt of every step is completed once, with its agent's present adapter, which the
    server has loaded from a folder: its log-probabilities are those of `predict`, and nothing stays
    loaded or on disk."""
    changes = {"num_agents": 3, "stop_strings": ("c", "e f"), "temperature": 0.7}
    changes |= {"rollout_batch_size": 1, "update_epochs": 1}
    seen = []
    rollout = prpo_llm.rollout

    def watch(args, model, *others):
        chosen, batch = rollout(args, model, *others)
        with torch.no_grad(), prpo_llm.select_adapters("policy"):
            hidden = prpo_llm.compute_hidden(model, batch)
        ours = prpo_llm.compute_log_probs(args, model, hidden)
        seen.append((chosen, batch, ours.gather(-1, batch["tokens"][..., None]).squeeze(-1)))
        return chosen, batch

    monkeypatch.setattr(prpo_llm, "rollout", watch)
    folder, _ = train(files, tmp_path, generate_with=server.url, **changes)
    assert server.loaded == {} and not (folder / "serving").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder.name]
    requests = [body for path, body in server.requests if path == "/v1/completions"]
    # The first is the check; evaluations are greedy
    sent = [body for body in requests[1:] if body["temperature"]]
    assert len(sent) == 4 * 3 * 2 and len({body["seed"] for body in sent}) == len(sent)
    for body in sent:
        assert (body["n"], body["max_tokens"], body["temperature"], body["stop"]) == (
            3,
            6,
            0.7,
            ["c", "e f"],
        )
        assert (body["top_p"], body["top_k"], body["min_p"], body["repetition_penalty"]) == (
            1,
            -1,
            0,
            1,
        )
    names = loaded_names(server.requests)[1:]
    evaluated = [0, 1, 2, 3, 4, 4]  # before and after the training
    assert [name.rpartition("-")[0] for name in names] == [
        f"{folder.name}-agent_{i}-step_{step}" for step in evaluated for i in range(3)
    ]
    assert len({*names}) == len(names)
    gone = [
        body["lora_name"] for path, body in server.requests if path == "/v1/unload_lora_adapter"
    ][1:]
    assert gone == names
    requested = {(body["model"].rpartition("-")[0], tuple(body["prompt"])) for body in sent}
    stopped = 0
    for step, (chosen, batch, ours) in enumerate(seen, 1):
        for n, prompt in enumerate(batch["prompts"]):
            assert (f"{folder.name}-agent_{n // 2}-step_{step}", tuple(prompt)) in requested
            assert chosen[n * 3]["ids"] == prompt
        texts = [
            [[WORDS[token] for token in row] for row in group]
            for group in batch["tokens"].flatten(0, 1).tolist()
        ]
        for group, lengths in zip(texts, batch["lengths"].flatten(0, 1).tolist(), strict=True):
            for row, length in zip(group, lengths, strict=True):
                inside = " ".join(row[: length - 1])
                last = " ".join(row[:length])
                assert "c" not in inside and "e f" not in inside and "<eos>" not in inside
                assert length == 6 or last.endswith(("c", "e f", "<eos>"))
                stopped += last.endswith(("c", "e f"))
        sampled = batch["sampled"]
        mask = batch["mask"]
        torch.testing.assert_close(sampled[mask], ours[mask], rtol=0, atol=1e-4)
        assert (sampled[~mask] == 0).all()
    assert stopped > 0
    assert all(float(row["sampling_gap"]) < 1e-5 for row in rows_of(folder))
    # The server's first adapter was random; the run starts from its own all the same
    assert all(float(row["kl_reference"]) < 1e-6 for row in rows_of(folder) if row["step"] == "1")


def test_a_run_with_a_server_is_resumed(files, server, tmp_path, monkeypatch):
    """Seeds depend on the agent, the step and the prompt; what a run left on the server is unloaded
    first, and steps that are repeated have adapters of new names."""
    changes = {"learning_rate": 1e-3, "local_updates": 1, "eval_prompts": 0}
    whole, _ = train(files, tmp_path / "whole", generate_with=server.url, **changes)
    server.requests.clear()  # the next run has the same name if it begins in the same second
    rollout = prpo_llm.rollout

    def die_in_step_4(args, model, tokenizer, examples, held, step, *others):
        if step == 4:
            raise KeyboardInterrupt
        return rollout(args, model, tokenizer, examples, held, step, *others)

    with monkeypatch.context() as patch:
        patch.setattr(prpo_llm, "rollout", die_in_step_4)
        with pytest.raises(KeyboardInterrupt):
            prpo_llm.main(tiny(files, tmp_path / "cut", generate_with=server.url, **changes))
    folder = only_run(tmp_path / "cut")
    assert len(server.loaded) == 2 and len(list((folder / "serving").iterdir())) == 2
    prpo_llm.main(parse_args(prpo_llm, to_resume(folder)))
    assert server.loaded == {} and not (folder / "serving").exists()
    names = loaded_names(server.requests)
    repeated = [name for name in names if f"{folder.name}-agent_0-step_3-" in name]
    assert len(repeated) == 2 and len({*names}) == len(names)
    for resumed, expected in zip(weights_of(folder), weights_of(whole), strict=True):
        assert torch.equal(resumed, expected)


REFUSED = {
    "no-adapters": [
        "cannot load adapters",
        "load_lora_adapter: 404",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True",
    ],
    "no-ids": ["sends no token ids and log-probabilities"],
    "no-logprobs": ["sends no token ids and log-probabilities"],
    "raw-logprobs": ["its log-probabilities are off by", "--logprobs-mode processed_logprobs"],
    "ignored-adapter": ["its log-probabilities are off by", "serve the same --base-model"],
    "one-choice": ["sends 1 completions instead of 2"],
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_a_server_lacks_is_refused_before_training(files, server, tmp_path, fault):
    """One line, no run, and nothing left behind."""
    server.faults = {fault}
    args = tiny(
        files, tmp_path / "runs", generate_with=server.url, temperature=0.6, response_length=12
    )
    message = refusal(prpo_llm.main, args)
    assert message.startswith(f"--generate-with {server.url}: ")
    assert all(text in message for text in REFUSED[fault]), message
    assert not list((tmp_path / "runs").iterdir())


def test_a_server_that_is_not_running_is_refused(files, tmp_path, monkeypatch):
    """A server that is not there is named, after repetitions."""
    waits = []
    monkeypatch.setattr(prpo_llm.time, "sleep", waits.append)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        message = refusal(prpo_llm.main, tiny(files, tmp_path / "runs", generate_with=url))
    assert f"--generate-with {url}: {url.removesuffix('/v1')}/is_sleeping: " in message
    assert "Connection refused" in message and waits == [1, 4]


@pytest.mark.parametrize(
    ("url", "key"), [("http://[::1:8000/v1", "key"), ("http://x/v1", "key\r"), ("http://x/v1", "€")]
)
def test_what_no_request_can_hold_is_not_printed(files, tmp_path, url, key, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    message = refusal(prpo_llm.main, tiny(files, tmp_path / "runs", generate_with=url))
    assert "this URL, or OPENAI_API_KEY, is not valid in a request" in message
    assert "key" not in message and "€" not in message


def test_a_server_of_earlier_form_and_with_trouble(files, server, tmp_path, monkeypatch):
    """Token ids as words, statuses that pass, closed connections and lost answers change nothing;
    one that stays ends the run in one line, with the command to go on.
    """
    monkeypatch.setattr(prpo_llm.time, "sleep", lambda seconds: None)
    changes = {"total_steps": 2, "save_every": 1, "eval_prompts": 0}
    plain, _ = train(files, tmp_path / "plain", generate_with=server.url, **changes)
    server.faults = {"old"}
    server.failures = [503, None, 200, 429, 500, "cut"]
    server.lost_answers = 2
    args = tiny(files, tmp_path / "old", generate_with=server.url, **changes)
    prpo_llm.main(args)
    assert not server.failures and not server.lost_answers and not server.loaded
    for weights, expected in zip(
        weights_of(only_run(tmp_path / "old")), weights_of(plain), strict=True
    ):
        assert torch.equal(weights, expected)
    server.broken_adapter = "-step_2-"
    message = refusal(
        prpo_llm.main,
        tiny(files, tmp_path / "bad", generate_with=server.url, **changes),
        code=1,
    )
    folder = only_run(tmp_path / "bad")
    assert f"completions: 500 out of memory; go on with --resume {folder}" in message
    server.broken_adapter = ""
    prpo_llm.main(parse_args(prpo_llm, to_resume(folder)))
    for weights, expected in zip(weights_of(folder), weights_of(plain), strict=True):
        assert torch.equal(weights, expected)


def test_a_failure_whose_text_does_not_come_is_a_failure(files, tmp_path, monkeypatch):
    """With its status, after two repetitions."""
    args = tiny(files, tmp_path, generate_with="http://127.0.0.1:1/v1")
    tries = []

    class Reset(io.BytesIO):
        def read(self, *_):
            raise ConnectionResetError

    def fail(request, timeout):
        tries.append(request)
        raise urllib.error.HTTPError(request.full_url, 503, "", {}, Reset())

    monkeypatch.setattr(prpo_llm.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(prpo_llm.urllib.request, "urlopen", fail)
    client = prpo_llm.Server(args, range(2), SimpleNamespace(ends=[0]))
    with pytest.raises(prpo_llm.ServerError) as end:
        client.send("completions", {})
    assert end.value.status == 503 and len(tries) == 3


def test_an_end_without_its_token_is_an_error(files, tmp_path):
    """A completion that stops for no visible reason would pay the penalty for not ending."""
    args = tiny(files, tmp_path, generate_with="http://127.0.0.1:1/v1")
    client = prpo_llm.Server(args, range(2), SimpleNamespace(ends=[0]))
    choice = {
        "index": 0,
        "token_ids": [3, 4],
        "logprobs": {"token_logprobs": [-1.0, -2.0]},
        "finish_reason": "length",
    }
    assert client.read_choice(choice, 6) == ([3, 4], [-1.0, -2.0])
    with pytest.raises(ValueError, match="without an end-of-text token"):
        client.read_choice(choice | {"finish_reason": "stop"}, 6)
    ended = choice | {"token_ids": [3, 0, 5], "logprobs": {"token_logprobs": [-1.0, -2.0, -3.0]}}
    assert client.read_choice(ended | {"finish_reason": "stop"}, 6) == ([3, 0], [-1.0, -2.0])
    with pytest.raises(ValueError, match="2 tokens, 1 log-probabilities"):
        client.read_choice(choice | {"logprobs": {"token_logprobs": [-1.0]}}, 6)
    with pytest.raises(ValueError, match="0 tokens"):
        client.read_choice(choice | {"token_ids": [], "logprobs": {"token_logprobs": []}}, 6)
    with pytest.raises(ValueError, match="7 tokens"):
        client.read_choice(
            choice | {"token_ids": [1] * 7, "logprobs": {"token_logprobs": [-1.0] * 7}}, 6
        )


def test_a_diverged_agent_is_not_loaded_into_the_server(files, server, stacked, tmp_path):
    """No NaN is loaded; its peers are completed as before, and its log-probabilities are NaN,
    so that no agent learns from them."""
    model, layers, eos = stacked
    next(iter(layers.values())).B["policy"].data[1, 0, 0] = math.nan
    args = tiny(files, tmp_path, num_agents=3, algorithm="ppo", generate_with=server.url)
    client = prpo_llm.Server(args, range(3), SimpleNamespace(ends=[eos]))
    exchange = SimpleNamespace(agents=range(3))
    run = SimpleNamespace(folder=tmp_path, name=tmp_path.name, iteration=7, exchange=exchange)
    client.load_policies(run, model)
    names = [f"{tmp_path.name}-agent_{i}-step_7" for i in (0, 2)]
    assert [name.rpartition("-")[0] for name in server.loaded] == names
    with prpo_llm.select_adapters("policy"):
        outputs = client.complete(model, PROMPTS, torch.rand(3, 1, 6), [eos], 1.0)
    tokens, lengths, logprobs = outputs
    assert tokens.shape == (3, 1, 6) and lengths[1] == 1 and tokens[1, 0, 0] == eos
    assert (
        logprobs[1, 0, 0].isnan()
        and logprobs[[0, 2]].isfinite().all()
        and (logprobs[[0, 2], 0, 0] < 0).all()
    )


def read_completions(folder, step):
    """The greedy completions of an evaluation: their texts and scores."""
    lines = (folder / "completions.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["step"] == step]
    return [row for row in rows if "sample" not in row]


def test_a_server_completes_evaluations(files, server, tmp_path, monkeypatch):
    """Greedily they are those of this process; --eval-samples are of the nucleus, with the same
    seeds in every evaluation and other ones for each agent and prompt."""
    changes = {"eval_samples": 3, "eval_top_p": 0.6, "total_steps": 1, "learning_rate": 1e-12}
    changes |= {"stop_strings": ("c", "e f")}
    plain, _ = train(files, tmp_path / "plain", **changes)
    with monkeypatch.context() as patch:  # no completion is computed here
        patch.setattr(prpo_llm, "compare_with_plain", lambda *_: None)
        patch.setattr(prpo_llm, "generate", None)
        folder, _ = train(files, tmp_path / "served", generate_with=server.url, **changes)
    for step in (0, 1):
        expected = read_completions(plain, step)
        assert read_completions(folder, step) == expected
        assert len(expected) == 2 * 2
    sent = [body for path, body in server.requests if path == "/v1/completions"][1:]
    greedy = [body for body in sent if body["temperature"] == 0]
    sampled = [body for body in sent if body["top_p"] == 0.6]
    assert len(greedy) == len(sampled) == 2 * 2 * 2
    assert {body["n"] for body in greedy} == {1}
    assert {(body["n"], body["temperature"]) for body in sampled} == {(3, 1.0)}
    seeds = [body["seed"] for body in sampled]
    assert sorted(seeds[:4]) == sorted(seeds[4:]) and len({*seeds}) == 4
    rows = [row for row in table_of(folder, "evaluations") if row["task"] == "validation"]
    assert len(rows) == 4 and all(0 < float(row["sampled_length"]) <= 6 for row in rows)


def test_a_server_sleeps_while_agents_learn(files, server, tmp_path, monkeypatch):
    """It is awake for every rollout and evaluation, sleeps without adapters in between, and is
    woken up by the next run; completions are those of a server that never sleeps."""
    changes = {"total_steps": 2, "eval_every": 1, "learning_rate": 1e-3}
    awake, _ = train(files, tmp_path / "awake", generate_with=server.url, **changes)
    assert not any("sleep" in path or "wake" in path for path, _ in server.requests)
    server.reset()
    server.sleep_mode = True
    server.asleep = True  # as an interrupted run leaves it
    learn = prpo_llm.learn

    def watch(*inputs):
        assert server.asleep and server.loaded == {}
        return learn(*inputs)

    monkeypatch.setattr(prpo_llm, "learn", watch)
    folder, _ = train(files, tmp_path / "asleep", generate_with=server.url, **changes)
    for weights, expected in zip(weights_of(folder), weights_of(awake), strict=True):
        assert torch.equal(weights, expected)
    assert (folder / "completions.jsonl").read_text() == (awake / "completions.jsonl").read_text()
    kinds = {"/sleep?level=1": "sleep", "/wake_up": "wake", "/v1/completions": "complete"}
    order = [kinds[path] for path, _ in server.requests if path in kinds]
    phases = [kind for k, kind in enumerate(order) if [kind] != order[k - 1 : k]]
    used = ["complete", "sleep", "wake"]
    # Two checks; then an evaluation, and each of two steps with another one
    assert phases == ["wake", *used, *(used * 5)[:-1]]
    assert server.asleep


def test_a_server_that_forgets_its_adapters_in_sleep_is_refused(files, server, tmp_path):
    server.sleep_mode = True
    server.faults = {"amnesia"}
    message = refusal(prpo_llm.main, tiny(files, tmp_path / "runs", generate_with=server.url))
    assert "its log-probabilities are off by" in message and " after it has slept; " in message


def test_one_rank_of_a_machine_puts_its_server_to_sleep(files, server, tmp_path, monkeypatch):
    """The others neither check nor wake it; all wait before and after, so that nobody completes
    meanwhile."""
    server.sleep_mode = True
    events = []

    def meet():
        events.append((len(server.requests), server.asleep))

    run = SimpleNamespace(exchange=SimpleNamespace(wait_for_all=meet), folder=tmp_path)
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        args = tiny(files, tmp_path, generate_with=server.url)
        model, tokenizer = prpo_llm.load_base(args, torch.device("cpu"))
        prpo_llm.add_adapters(args, model, 2)
        client = prpo_llm.start_server(args, range(2), tokenizer, model, [1, 2])
        monkeypatch.setattr(client, "load_policies", lambda *_: None)
        assert client.can_sleep == (rank == "0")
        events.clear()
        for _ in range(2):
            with prpo_llm.serving(client, run, model) as complete:
                assert complete == client.complete and not server.asleep
        number = len(server.requests)
        asleep = [state for _, state in events]
        if rank == "0":
            assert asleep == [False, False, False, True, True, False, False, True]
            server.asleep = False
        else:
            assert asleep == [False] * 8 and {count for count, _ in events} == {number}


@pytest.mark.slow
def test_transformers_serve_is_refused(files, tmp_path):
    """It loads no adapters, which is reported before training."""
    if not all(map(importlib.util.find_spec, ("fastapi", "uvicorn", "openai"))):
        pytest.skip("pip install 'transformers[serving]'")
    with transformers_serve(str(files / "model"), tmp_path / "log") as url:
        message = refusal(prpo_llm.main, tiny(files, tmp_path / "runs", generate_with=url))
    assert "cannot load adapters" in message and "load_lora_adapter: 404" in message
