"""What the tests of language models share: tiny files, models and runs, and how to read them.

Fixtures of conftest.py build on it: `files`, `stacked`, `server` and `spread`.
"""

import json
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import REPOSITORY, config_of, only_run, run_ranks, table_of, write_jsonl
from safetensors.torch import load_file
from smooth import smooth_adam
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import communicators
import prpo_llm

WORDS = ["<eos>", *"abcdefghijklmnopqrstuvwxyz"]
TARGETS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")
TINY = {
    "precision": "float32",
    "device": "cpu",
    "num_agents": 2,
    "total_steps": 4,
    "batch_size": 2,
    "group_size": 3,
    "response_length": 6,
    "temperature": 1.0,
    "local_updates": 2,
    "save_every": 2,
    "learning_rate": 1e-2,
    "prompts_per_agent": 8,
    "eval_prompts": 2,
    "lora_rank": 4,
    "value_lora_rank": 2,
}
PROMPTS = [[3, 7, 1, 9, 4], [5, 2], [8, 8, 6, 1]]
ALGORITHMS = {"grpo": {}, "ppo": {"algorithm": "ppo"}}
# What saves, logs, and ends completions
SERVICES = {
    "eval_every": 1,
    "eval_samples": 3,
    "eval_top_p": 0.9,
    "save_adapters": 1,
    "log_completions": 2,
    "stop_strings": ("a", "k m"),
    "learning_rate": 1e-3,
}
SPREAD = {"services": SERVICES | {"total_steps": 2}}  # settings of runs of two ranks
for algorithm in ALGORITHMS:
    for aggregation in ("policy", "weights"):
        SPREAD[f"{algorithm} {aggregation}"] = ALGORITHMS[algorithm] | {
            "aggregation": aggregation,
            "learning_rate": 1e-3,
            "local_updates": 1,
            "communicator": "relative-gain",  # it depends on all rounds before
        }
    SPREAD[f"{algorithm} similarity"] = ALGORITHMS[algorithm] | {"communicator": "similarity"}
SPREAD["ppo gate"] = SPREAD["ppo policy"] | {"gate": "value", "communicator": "uniform"}
SPREAD["ppo preferences"] = SPREAD["ppo weights"] | {"private_layers": 1}


def word_tokenizer(pad_token="<eos>"):
    """A tokenizer that knows single letters."""
    tokenizer = Tokenizer(
        models.WordLevel({word: k for k, word in enumerate(WORDS)}, unk_token="<eos>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"eos_token": "<eos>", "pad_token": pad_token, "unk_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def random_llama():
    """A tiny Llama for `word_tokenizer`, with random weights."""
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "eos_token_id": 0,
        "bos_token_id": None,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), **shape))


def write_files(folder):
    """A tiny random Llama, a data set in two topics, and a reward that counts a letter."""
    generator = np.random.default_rng(0)
    word_tokenizer().save_pretrained(folder / "model")
    model = random_llama()
    for parameter in model.parameters():  # far from uniform, so that nothing is right by chance
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder / "model")
    rows = []
    for k in range(60):
        letters = generator.choice(WORDS[1:], size=generator.integers(2, 9)).tolist()
        rows.append(
            {"prompt": " ".join(letters), "completion": " ".join(letters[:2]), "topic": "xy"[k % 2]}
        )
    write_jsonl(folder / "data.jsonl", rows)
    (folder / "weights.csv").write_text("1\n-0.5\n")  # agent 1 is to avoid the letter
    (folder / "letters.py").write_text(
        "def count(prompts, completions, references):\n"
        "    return [float(c.split().count('a')) for c in completions]\n"
    )


def tiny(files, run_dir, **changes):
    """The arguments of a tiny run."""
    base = {
        "base_model": str(files / "model"),
        "dataset": str(files / "data.jsonl"),
        "run_dir": str(run_dir),
    }
    settings = TINY | base | {"reward": f"{files / 'letters.py'}:count"} | changes
    several = {
        name: (settings[name],) for name in ("dataset", "reward") if isinstance(settings[name], str)
    }
    return prpo_llm.Args(**settings | several)


# The same arguments as a command line
flags = communicators.list_words


def to_resume(folder):
    """The arguments that resume a run: the code that it executes is named anew."""
    return ["--resume", str(folder), "--reward", *config_of(folder)["reward"]]


def plain_model(files):
    return AutoModelForCausalLM.from_pretrained(files / "model", dtype=torch.float32).eval()


def layers_of(model):
    """The layers that have adapters, by name."""
    return {
        name: layer for name, layer in model.named_modules() if isinstance(layer, prpo_llm.Adapters)
    }


def predict(model, numbers, prompts, tokens, lengths):
    """The hidden states from which tokens are predicted, with these policies."""
    batch = {"prompts": prompts, "tokens": tokens, "lengths": lengths}
    with prpo_llm.select_adapters("policy", numbers):
        return prpo_llm.compute_hidden(model, batch)


def stack_three(files, folder):
    """(model, layers, eos) with three agents whose adapters differ and do something."""
    args = tiny(files, folder, num_agents=3, algorithm="ppo")
    model, tokenizer = prpo_llm.load_base(args)
    prpo_llm.add_adapters(args, model, 3)
    layers = layers_of(model)
    torch.manual_seed(1)
    for layer in layers.values():
        for kind in layer.B:
            torch.nn.init.normal_(layer.B[kind], std=0.5)
            torch.nn.init.normal_(layer.A[kind], std=0.5)
    return model, layers, tokenizer.eos_token_id


def follow(scripts, model, monkeypatch):
    """Let the model choose these tokens [completions, tokens], whatever the tokens before."""
    choose = prpo_llm.Decoding.choose

    def choose_scripted(self, hidden):
        self.model.get_output_embeddings().wanted = scripts[self.places, self.step]
        choose(self, hidden)

    class Head(torch.nn.Module):
        def forward(self, hidden):
            return F.one_hot(self.wanted, len(WORDS)).float()

    model.set_output_embeddings(Head())
    monkeypatch.setattr(prpo_llm.Decoding, "choose", choose_scripted)


def rows_of(folder):
    rows = table_of(folder, "metrics")
    # The clock, and what is no number
    without = ("tokens_per_second", "completions_per_second", "peak_memory", "exp_name")
    return [{name: value for name, value in row.items() if name not in without} for row in rows]


def weights_of(folder):
    paths = sorted(folder.glob("agent_*/adapter_model.safetensors"))
    return [torch.cat([t.flatten() for _, t in sorted(load_file(path).items())]) for path in paths]


def train(files, run_dir, **changes):
    summary = prpo_llm.main(tiny(files, run_dir, **changes))
    return only_run(run_dir), summary


def train_in_two_ranks(files, once, url):
    """All runs of two ranks, in one launch: their folder, and the output.

    NAME/RUN are those of SPREAD, `services` with a server; `whole` is a run of one process, with a
    checkpoint after every step, which `resumed` repeats from step 3; and RANK.json has what passed
    through torch.distributed, by names.
    """

    def launch(folder):
        runs = {}
        for name, changes in SPREAD.items():
            if name == "services":
                changes = changes | {"generate_with": url}
            if "preferences" in name:
                changes = changes | {"reward_weights": (str(files / "weights.csv"),)}
            runs[name] = ["prpo_llm", *flags(tiny(files, folder / name, **changes))]
        with pytest.MonkeyPatch.context() as patch:
            smooth_adam(patch.setattr)
            whole, _ = train(files, folder / "whole", save_every=1, learning_rate=1e-3)
        resumed = shutil.copytree(whole, folder / "resumed" / whole.name)
        (resumed / "checkpoints" / "agent_1" / "4.pt").unlink()
        runs["resumed"] = ["prpo_llm", *to_resume(resumed)]
        wire = REPOSITORY / "tests" / "tools" / "wire.py"
        words = folder / "{rank}.json", json.dumps(runs)
        return run_ranks(2, wire, *words, cwd=folder, SMOOTH_ADAM="1")

    return once("spread_llm", launch)
