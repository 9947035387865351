"""Training language models: an independent plain version of the whole step, averages of adapters,
exact expectations.

The plain version has one agent after the other, one completion after the other, plain transformers
with an adapter at each layer, the whole vocabulary, and autograd.
"""

import contextlib
import copy
import io
import json
import math
import shutil
import sys
from pathlib import Path
from statistics import median_low
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn as nn
from command import parse_args
from helpers import (
    in_ranks,
    only_run,
    read_jsonl,
    summary_of,
    table_of,
    write_jsonl,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from language_models import TARGETS, flags, layers_of, plain_model, tiny, to_resume
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch.distributions import Categorical, kl_divergence
from transformers import AutoModelForSequenceClassification

import communicators
import prpo_llm

# Transposed, or without its weights, it is another one
MATRIX = [
    [0.5, 0.35, 0.15],
    [0.0, 0.4, 0.6],
    [0.7, 0.1, 0.2],
]
RULES = """
def vowels(prompts, completions, references):
    scores = [sum((ord(letter) % 7) / 5 for letter in text.split()) for text in completions]
    first = [text.strip()[:1] for text in completions]  # behind the space that follows the prompt
    unknown = [letter and letter in "qrst" for letter in first]
    return [float("nan") if no_score else score for no_score, score in zip(unknown, scores)]
"""
SETTINGS = {
    "precision": "float32",
    "device": "cpu",
    "num_agents": 3,
    "total_steps": 2,
    "local_updates": 1,
    "batch_size": 4,
    "group_size": 3,
    "minibatch_size": 2,
    "micro_batch_size": 1,
    "update_epochs": 2,
    "response_length": 7,
    "temperature": 0.8,
    "learning_rate": 1e-2,
    "kl_coef": 0.5,
    "clip_coef": 0.1,
    "missing_eos_penalty": 0.5,
    "prompts_per_agent": 6,
    "eval_prompts": 8,
    "lora_rank": 4,
    "lora_alpha": 8,
    "value_lora_rank": 2,
    "value_lora_alpha": 4,
    "vf_coef": 0.3,
    "gamma": 0.9,
    "max_grad_norm": 0.5,
}


@pytest.fixture(scope="module")
def folder(files, tmp_path_factory):
    """Prompts that all differ, a reward, C, and an adapter that does something from the start."""
    folder = tmp_path_factory.mktemp("training")
    generator = np.random.default_rng(1)
    texts = sorted(
        {
            " ".join(generator.choice([*"abcdefghijklm"], size=generator.integers(2, 7)))
            for _ in range(120)
        }
    )
    rows = [{"prompt": text, "completion": text[:3], "topic": "x"} for text in texts]
    write_jsonl(folder / "data.jsonl", rows)
    (folder / "rules.py").write_text(RULES)
    np.savetxt(folder / "C.csv", MATRIX, delimiter=",")
    torch.manual_seed(3)
    sides = {}
    for name, layer in targets(plain_model(files)).items():
        sides[f"base_model.model.{name}.lora_A.weight"] = (
            torch.randn(4, layer.in_features) / layer.in_features**0.5
        )
        sides[f"base_model.model.{name}.lora_B.weight"] = 0.1 * torch.randn(layer.out_features, 4)
    (folder / "adapter").mkdir()
    save_file(sides, folder / "adapter" / "adapter_model.safetensors")
    LoraConfig(r=4, lora_alpha=8, target_modules=list(TARGETS)).save_pretrained(folder / "adapter")
    return folder


def targets(model):
    """The layers that get adapters, in the model's order."""
    return {name: layer for name, layer in model.named_modules() if name.split(".")[-1] in TARGETS}


def settings_of(files, folder, run_dir, **changes):
    """The arguments of a run."""
    paths = {
        "base_model": str(files / "model"),
        "dataset": (str(folder / "data.jsonl"),),
        "run_dir": str(run_dir),
    }
    paths |= {"communicator": str(folder / "C.csv"), "adapter": str(folder / "adapter")}
    return prpo_llm.Args(
        **SETTINGS | paths | {"reward": (f"{folder / 'rules.py'}:vowels",)} | changes
    )


# --- the plain version ---


class Lora(nn.Module):
    """A linear layer with one adapter."""

    def __init__(self, base, A, B, scale):
        super().__init__()
        self.base = base
        self.A = nn.Parameter(A)
        self.B = nn.Parameter(B)
        self.scale = scale

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.A.T) @ self.B.T


def with_adapter(files, sides, scale):
    """A plain model with an adapter at each target; sides: layer -> (A, B)."""
    model = plain_model(files).requires_grad_(False)
    for name, (A, B) in sides.items():
        model.set_submodule(name, Lora(model.get_submodule(name), A.clone(), B.clone(), scale))
    return model


class Agent(nn.Module):
    """A policy, and for PPO a value model, as the script starts them."""

    def __init__(self, files, args):
        super().__init__()
        stored = load_file(f"{args.adapter}/adapter_model.safetensors")
        start = {"policy": {}, "value": {}}
        generator = torch.Generator().manual_seed(communicators.derive_seed(args.seed, 1, 8))
        for name, layer in targets(plain_model(files)).items():
            start["policy"][name] = [
                stored[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB"
            ]
            for kind, rank in (("policy", args.lora_rank), ("value", args.value_lora_rank)):
                if kind == "policy" or args.algorithm == "ppo":
                    A = nn.init.kaiming_uniform_(
                        torch.empty(rank, layer.in_features), a=5**0.5, generator=generator
                    )
                    if kind == "value":
                        start[kind][name] = [A, torch.zeros(layer.out_features, rank)]
        self.policy = with_adapter(files, start["policy"], args.lora_alpha / args.lora_rank)
        if args.algorithm == "ppo":
            self.value = with_adapter(
                files, start["value"], args.value_lora_alpha / args.value_lora_rank
            )
            self.head = nn.Parameter(torch.zeros(32))
            self.bias = nn.Parameter(torch.zeros(()))
        self.rewards = []  # all so far

    def distributions(self, args, prompt, completion):
        """The policy at each token of a completion."""
        logits = self.policy(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        return Categorical(logits=logits / args.temperature)

    def values(self, prompt, completion):
        """V at each token of a completion."""
        states = self.value.model(torch.tensor([prompt + completion])).last_hidden_state
        return states[0, len(prompt) - 1 : -1] @ self.head + self.bias

    @torch.no_grad()
    def complete(self, args, prompt, uniforms=None):
        """Complete a prompt, everything read anew for each token: sampled with these uniforms, or
        greedily."""
        completion = []
        while len(completion) < args.response_length and completion[-1:] != [0]:
            logits = self.policy(torch.tensor([prompt + completion])).logits[0, -1].double()
            cumulative = (logits / args.temperature).softmax(-1).cumsum(-1)
            completion.append(
                int(
                    logits.argmax()
                    if uniforms is None
                    else (cumulative <= uniforms[len(completion)]).sum()
                )
            )
        return completion


def plain_reward(args, completion):
    """The rule above, less the penalty of a completion that does not end."""
    letters = [chr(96 + token) for token in completion if token]
    score = (
        math.nan
        if letters and letters[0] in "qrst"
        else sum(ord(letter) % 7 / 5 for letter in letters)
    )
    return score - args.missing_eos_penalty * (completion[-1] != 0)


def plain_prompts(args, i, step, examples):
    """Whose turn it is: every epoch over an agent's examples has an order of its own."""
    chosen = []
    for place in range((step - 1) * args.batch_size, step * args.batch_size):
        epoch, place = divmod(place, len(examples))
        key = communicators.derive_seed(args.seed, i, epoch, 1)
        chosen.append(examples[np.random.default_rng(key).permutation(len(examples))[place]])
    return chosen


def plain_rollout(args, agent, i, step, examples):
    """What an agent does in a step: groups of completions, [prompt][completion], each a dict."""
    generator = torch.Generator().manual_seed(communicators.derive_seed(args.seed, i, step, 2))
    size = args.group_size if args.algorithm == "grpo" else 1
    uniforms = torch.rand(args.batch_size, size, args.response_length, generator=generator).double()
    groups = []
    for example, uniforms_of_group in zip(
        plain_prompts(args, i, step, examples), uniforms, strict=True
    ):
        completions = [agent.complete(args, example["ids"], one) for one in uniforms_of_group]
        groups.append(
            [
                {"prompt": example["ids"], "completion": one, "reward": plain_reward(args, one)}
                for one in completions
            ]
        )
    return groups


def plain_group_advantages(args, groups):
    """GRPO: against the group."""
    for group in groups:
        finite = [one["reward"] for one in group if one["reward"] == one["reward"]]
        mean = sum(finite) / max(len(finite), 1)
        deviation = math.sqrt(sum((reward - mean) ** 2 for reward in finite) / max(len(finite), 1))
        for one in group:
            signal = one["reward"] == one["reward"] and max(finite) > min(finite)
            scale = 1.0 if args.loss_type == "dr-grpo" else deviation + 1e-6
            one["advantage"] = torch.tensor([(one["reward"] - mean) / scale if signal else 0.0])
            if args.advantage_type == "rloo" and signal:
                others = [
                    other["reward"]
                    for other in group
                    if other is not one and other["reward"] == other["reward"]
                ]
                one["advantage"] = torch.tensor([one["reward"] - sum(others) / len(others)])


def plain_advantages(args, agent, groups):
    """GRPO: against the group; PPO: generalized advantage estimation by its definition, whitened
    over the batch."""
    if args.algorithm == "grpo":
        plain_group_advantages(args, groups)
        return
    whole = [group[0] for group in groups]
    first_rewards = not agent.rewards
    agent.rewards += [one["reward"] for one in whole if one["reward"] == one["reward"]]
    scaled = args.norm_reward != "off"
    for one in whole:
        one["scaled"] = (
            (one["reward"] - np.mean(agent.rewards)) / np.std(agent.rewards)
            if scaled
            else one["reward"]
        )
    # The head starts as 0, so this is the mean of the first values
    if first_rewards and agent.rewards:
        agent.bias.data.fill_(0.0 if scaled else np.mean(agent.rewards))
    for one in whole:
        with torch.no_grad():
            one["values"] = agent.values(one["prompt"], one["completion"])
        length = len(one["completion"])
        values = [*one["values"].tolist(), 0.0]
        rewards = [0.0] * (length - 1) + [0.0 if math.isnan(one["reward"]) else one["scaled"]]
        rewards = [
            reward - args.reward_kl_coef * float(gap)
            for reward, gap in zip(rewards, one["gaps"], strict=True)
        ]
        deltas = [rewards[t] + args.gamma * values[t + 1] - values[t] for t in range(length)]
        decay = args.gamma * args.gae_lambda
        raw = [sum(decay ** (s - t) * deltas[s] for s in range(t, length)) for t in range(length)]
        one["advantage"] = torch.tensor(raw)
        one["returns"] = one["advantage"] + one["values"]
    finite = torch.cat([one["advantage"] for one in whole if one["reward"] == one["reward"]])
    for one in whole:
        one["advantage"] = (one["advantage"] - finite.mean()) / (
            finite.var(correction=0) + 1e-8
        ).sqrt()
        if math.isnan(one["reward"]):
            one["advantage"] *= 0.0


def plain_reference(args, one, i, C, agents, peers, start):
    """The reference on one completion: C_i applied to the policies, and the policy from which all
    started."""
    policy_of_agent = agents[i].distributions(args, one["prompt"], one["completion"])
    one["logprob"] = policy_of_agent.log_prob(torch.tensor(one["completion"]))
    mixed = 0.0
    behaviour = args.self_reference == "behaviour"
    for j, peer in enumerate(peers):
        policy = (
            policy_of_agent
            if behaviour and i == j
            else peer.distributions(args, one["prompt"], one["completion"])
        )
        mixed = mixed + C[i][j] * (policy.probs if args.mixture == "arithmetic" else policy.logits)
    if args.mixture == "arithmetic":
        one["reference"] = Categorical(probs=mixed)
    else:
        one["reference"] = Categorical(logits=mixed)
    one["gaps"] = one["logprob"] - one["reference"].log_prob(torch.tensor(one["completion"]))
    one["anchor"] = start.distributions(args, one["prompt"], one["completion"])


def plain_gate(args, i, C, agents, peers, whole):
    """--gate value: the reference anew, a peer's weight times its vote at a token, which is the
    square of what its value model promises and the deviation of that over all tokens.

    All values are in the unit of rewards here. Returns the weights, [agents, tokens of all].
    """

    def in_rewards(agent, values):
        if args.norm_reward == "off" or not agent.rewards:
            return values
        return values * np.std(agent.rewards) + np.mean(agent.rewards)

    returns = [one["returns"] for one in whole if one["reward"] == one["reward"]]
    low, high = in_rewards(agents[i], torch.cat(returns)).aminmax()
    weights_of_all = []
    present = args.self_reference == "behaviour"
    senders = [agents[i] if present and i == j else peer for j, peer in enumerate(peers)]
    places = [(one["prompt"], one["completion"]) for one in whole]
    values = []  # [agents][completions][tokens]
    for sender in senders:
        values.append([in_rewards(sender, sender.values(*place)) for place in places])
    of_senders = [torch.cat(values[j]) for j in range(len(senders)) if C[i][j] > 0]
    high = max(high, median_low([expected.max() for expected in of_senders]))
    promises = []  # [agents][completions][tokens]
    for of_agent in values:
        promises.append([(value.clamp(low, high) - low) / (high - low) for value in of_agent])
    spreads = [torch.cat(promised).std(correction=0) for promised in promises]
    for number, (one, place) in enumerate(zip(whole, places, strict=True)):
        weights = []
        for weight, promised, spread in zip(C[i], promises, spreads, strict=True):
            weights.append(weight * promised[number] ** 2 * spread)
        weights = torch.stack(weights)
        fixed = torch.tensor(C[i]).to(weights)[:, None].expand_as(weights)
        weights = torch.where(weights.sum(0) > 0, weights, fixed)
        weights = weights / weights.sum(0)
        policies = torch.stack([sender.distributions(args, *place).probs for sender in senders])
        one["reference"] = Categorical(probs=(weights[..., None] * policies).sum(0))
        weights_of_all.append(weights)
    return torch.cat(weights_of_all, dim=1)


def plain_penalty(args, policy, reference, tokens, old):
    """The KL of eq. 4 or 7 at each token, or its estimate."""
    if args.kl_estimator == "full":
        forward = args.kl_direction == "forward" or (
            args.kl_direction == "auto" and args.algorithm == "ppo"
        )
        return kl_divergence(reference, policy) if forward else kl_divergence(policy, reference)
    ratio = (reference.log_prob(tokens) - policy.log_prob(tokens)).exp()
    weight = (policy.log_prob(tokens) - old).exp()
    return {"k1": -ratio.log() * weight, "k2": ratio.log() ** 2 / 2, "k3": ratio - 1 - ratio.log()}[
        args.kl_estimator
    ]


def plain_losses(args, agent, one):
    """The losses of each token of a completion, by the names of the metrics."""
    tokens = torch.tensor(one["completion"])
    policy = agent.distributions(args, one["prompt"], one["completion"])
    logratio = policy.log_prob(tokens) - one["logprob"]
    advantage = one["advantage"]
    ratio = (
        logratio.mean().exp().expand(len(tokens)) if args.loss_type == "gspo" else logratio.exp()
    )
    objective = ratio * advantage
    above = args.clip_higher or args.clip_coef
    if args.clip_coef:
        objective = torch.minimum(objective, ratio.clamp(1 - args.clip_coef, 1 + above) * advantage)
    if args.importance_cap:
        shifts = [shift_of(token, t) for t, token in enumerate(one["completion"])]
        if args.loss_type == "gspo":
            shifts = [sum(shifts) / len(shifts)] * len(shifts)
        objective = objective * torch.tensor(
            [min(math.exp(-shift), args.importance_cap) for shift in shifts]
        )
    losses = {
        "policy_loss": -objective,
        "kl_reference": plain_penalty(args, policy, one["reference"], tokens, one["logprob"]),
        "kl_anchor": plain_penalty(args, policy, one["anchor"], tokens, one["logprob"])
        * (args.sft_anchor > 0),
        "entropy": policy.entropy(),
        "ratio": ratio,
        "approx_kl": logratio.exp() - 1 - logratio,
        "clipfrac": ((ratio < 1 - args.clip_coef) | (ratio > 1 + above)).float(),
    }
    losses["value_loss"] = torch.zeros_like(ratio)
    if args.algorithm == "ppo" and not math.isnan(one["reward"]):
        value = agent.values(one["prompt"], one["completion"])
        error = (value - one["returns"]) ** 2
        value_clip_coef = args.clip_coef if args.value_clip_coef is None else args.value_clip_coef
        if value_clip_coef:
            near = one["values"] + (value - one["values"]).clamp(-value_clip_coef, value_clip_coef)
            error = torch.maximum(error, (near - one["returns"]) ** 2)
        losses["value_loss"] = error / 2
    return losses


def plain_step(args, agent, optimizer, groups, kl_coef):
    """One optimizer step. Returns its metrics."""
    completions = [one for group in groups for one in group]
    metrics = {}
    learned = [
        one
        for one in completions
        if one["completion"][-1] == 0 or not args.mask_truncated_completions
    ]
    tokens = sum(len(one["completion"]) for one in learned)
    if not learned:
        return dict.fromkeys((*prpo_llm.LOSSES, "value_loss", "grad_norm", "value_grad_norm"), 0.0)
    total = 0.0
    for one in learned:
        together = args.algorithm == "ppo" or args.loss_type == "dapo"
        share = 1 / tokens if together else 1 / len(completions) / len(one["completion"])
        if args.loss_type == "dr-grpo":
            share = 1 / len(completions) / args.response_length
        total += share * len(one["completion"])
        for name, values in plain_losses(args, agent, one).items():
            metrics[name] = metrics.get(name, 0.0) + share * values.sum()
    loss = (
        metrics["policy_loss"]
        + kl_coef * metrics["kl_reference"]
        + args.sft_anchor * metrics["kl_anchor"]
    )
    loss = loss + args.vf_coef * metrics["value_loss"] - args.ent_coef * metrics["entropy"]
    optimizer.zero_grad()
    loss.backward()
    norms = {"grad_norm": 0.0, "value_grad_norm": 0.0}
    for name, group in zip(norms, optimizer.param_groups, strict=False):
        gradients = [parameter.grad for parameter in group["params"] if parameter.grad is not None]
        norms[name] = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
        for gradient in gradients:
            gradient *= min(1.0, args.max_grad_norm / norms[name])
    optimizer.step()
    # What is reported is a mean of tokens, also where the weights of the loss do not sum to 1
    metrics |= {name: metrics[name] / total for name in prpo_llm.LOSSES}
    return {name: float(value.detach()) for name, value in metrics.items()} | norms


@torch.no_grad()
def plain_average(args, agents, C):
    """FedAvg of all that is trained: parameters, or of adapters the nearest product of their rank
    to the mean."""
    before = copy.deepcopy(agents)
    for i, agent in enumerate(agents):
        for name, parameter in agent.named_parameters():
            parameter.copy_(
                sum(c * other.get_parameter(name) for c, other in zip(C[i], before, strict=True))
            )
        for name, layer in agent.named_modules():
            if isinstance(layer, Lora) and args.lora_average == "exact":
                others = [other.get_submodule(name) for other in before]
                U, S, V = torch.linalg.svd(
                    sum(c * other.B @ other.A for c, other in zip(C[i], others, strict=True))
                )
                rank = len(layer.A)
                layer.A.copy_(V[:rank])
                layer.B.copy_(U[:, :rank] * S[:rank])


def plain_rate(args, step, highest):
    """The learning rate: after the warm-up it stays, or falls to 0 where the step behind the last
    would be."""
    if step <= args.warmup_steps:
        return highest * step / (args.warmup_steps + 1)
    left = (args.total_steps + 1 - step) / (args.total_steps - args.warmup_steps)
    return (
        highest
        * {"constant": 1, "linear": left, "cosine": math.sin(math.pi / 2 * left) ** 2}[
            args.lr_scheduler_type
        ]
    )


def plain_training(files, args, examples):
    """Train as the script does. Returns the agents and the rows of metrics.csv."""
    agents = [Agent(files, args) for _ in range(args.num_agents)]
    start = copy.deepcopy(agents[0])
    peers = copy.deepcopy(agents)
    optimizers = []
    rows = []
    for agent in agents:
        for layer in agent.modules():
            if isinstance(layer, Lora) and args.lora_average == "frozen-a":
                layer.A.requires_grad_(False)
        policy = {name for name, _ in agent.named_parameters() if name.startswith("policy.")}
        learned = [
            (name, parameter)
            for name, parameter in agent.named_parameters()
            if parameter.requires_grad
        ]
        groups = [{"params": [parameter for name, parameter in learned if name in policy]}]
        if args.algorithm == "ppo":
            groups.append(
                {"params": [parameter for name, parameter in learned if name not in policy]}
            )
        optimizers.append(
            torch.optim.AdamW(groups, args.learning_rate, weight_decay=args.weight_decay)
        )
    C = np.eye(args.num_agents)  # nothing has been sent yet
    for step in range(1, args.total_steps + 1):
        left = (args.total_steps + 1 - step) / args.total_steps
        kl_coef = args.kl_coef * (left if args.kl_schedule == "linear" else 1)
        for i, agent in enumerate(agents):
            groups = plain_rollout(args, agent, i, step, examples[i])
            with torch.no_grad():
                for one in (one for group in groups for one in group):
                    row = C if args.aggregation == "policy" else np.eye(args.num_agents)
                    plain_reference(args, one, i, row, agents, peers, start)
            plain_advantages(args, agent, groups)
            gate = {}
            if args.gate == "value":
                whole = [group[0] for group in groups]
                with torch.no_grad():
                    weights = plain_gate(args, i, C, agents, peers, whole).numpy()
                for j in range(args.num_agents):
                    gate[f"weight_{j}"] = weights[j].mean()
                    gate[f"spread_{j}"] = weights[j].std()
            updates = []
            optimizers[i].param_groups[0]["lr"] = plain_rate(args, step, args.learning_rate)
            for group in optimizers[i].param_groups[1:]:
                group["lr"] = plain_rate(args, step, args.value_learning_rate or args.learning_rate)
            for epoch in range(args.update_epochs):
                generator = torch.Generator().manual_seed(
                    communicators.derive_seed(args.seed, step, epoch, 3)
                )
                blocks = torch.randperm(
                    args.batch_size // args.micro_batch_size, generator=generator
                ).tolist()
                order = [
                    block * args.micro_batch_size + k
                    for block in blocks
                    for k in range(args.micro_batch_size)
                ]
                size = args.minibatch_size or args.batch_size
                for first in range(0, args.batch_size, size):
                    minibatch = [groups[place] for place in order[first : first + size]]
                    updates.append(plain_step(args, agent, optimizers[i], minibatch, kl_coef))
            rewards = [one["reward"] for group in groups for one in group]
            row = {
                "step": step,
                "agent": i,
                "reward": np.nanmean(rewards),
                "nan_rewards": np.isnan(rewards).sum(),
            }
            if args.reward_kl_coef:
                row["kl"] = np.mean([float(one["gaps"].sum()) for group in groups for one in group])
            completions = [one["completion"] for group in groups for one in group]
            completions = [
                tokens
                for tokens in completions
                if tokens[-1] == 0 or not args.mask_truncated_completions
            ]
            shifts = [
                abs(shift_of(token, t)) for tokens in completions for t, token in enumerate(tokens)
            ]
            row |= {"sampling_gap": sum(shifts) / max(len(shifts), 1), "skipped_steps": 0} | gate
            rows.append(
                row | {name: np.mean([metrics[name] for metrics in updates]) for name in updates[0]}
            )
        if step % args.local_updates == 0:
            C = (
                np.eye(args.num_agents)
                if args.aggregation == "none"
                else np.loadtxt(args.communicator, delimiter=",")
            )
            if args.aggregation == "weights":
                plain_average(args, agents, torch.from_numpy(C).float())
            peers = copy.deepcopy(agents)
    return agents, rows


PLAIN = {
    "GRPO": {},
    "PPO": {
        "algorithm": "ppo",
        "batch_size": 8,
        "minibatch_size": 4,
        "prompts_per_agent": 10,
        "value_learning_rate": 2e-2,
        "value_clip_coef": 0.03,
        "importance_cap": 1.1,
        "weight_decay": 0.5,
    },
    "PPO, KL in the reward": {
        "algorithm": "ppo",
        "batch_size": 8,
        "minibatch_size": 4,
        "prompts_per_agent": 10,
        "reward_kl_coef": 0.6,
        "kl_coef": 0.1,
        "mixture": "geometric",
        "self_reference": "behaviour",
        "micro_batch_size": 2,
        "local_updates": 2,
        "total_steps": 3,
    },
    "PPO, gated in one pass": {
        "algorithm": "ppo",
        "gate": "value",
        "batch_size": 8,
        "minibatch_size": 4,
        "prompts_per_agent": 10,
        "value_learning_rate": 3e-2,
        "update_epochs": 1,
        "local_updates": 2,
        "total_steps": 4,
    },
    "GSPO": {
        "loss_type": "gspo",
        "importance_cap": 1.2,
        "ent_coef": 0.1,
        "clip_coef": 0.03,
    },
    "GRPO, geometric, behaviour, anchor": {
        "mixture": "geometric",
        "self_reference": "behaviour",
        "sft_anchor": 0.3,
        "local_updates": 2,
        "micro_batch_size": 2,
        "loss_type": "dr-grpo",
        "lr_scheduler_type": "cosine",
        "kl_schedule": "linear",
        "total_steps": 3,
    },
    "DAPO in one pass, anchor, no truncated ones, frozen A": {
        "update_epochs": 1,
        "sft_anchor": 0.2,
        "loss_type": "dapo",
        "advantage_type": "rloo",
        "clip_higher": 0.2,
        "mask_truncated_completions": True,
        "kl_estimator": "k1",
        "lora_average": "frozen-a",
        "lr_scheduler_type": "linear",
        "warmup_steps": 1,
        "total_steps": 3,
    },
    "FedAvg-PPO in one pass, frozen A": {
        "algorithm": "ppo",
        "update_epochs": 1,
        "batch_size": 8,
        "minibatch_size": 4,
        "prompts_per_agent": 10,
        "aggregation": "weights",
        "lora_average": "frozen-a",
        "norm_reward": "off",
        "reward_kl_coef": 0.4,
        "value_clip_coef": 0.0,
        "kl_direction": "reverse",
        "kl_estimator": "k3",
        "total_steps": 2,
    },
    "FedAvg": {"aggregation": "weights", "local_updates": 2, "total_steps": 2, "clip_coef": 0.05},
}


def shift_of(token, t):
    """By how much the sampler's log-probabilities are made wrong."""
    return 0.4 * math.sin(3 * token + t)


def shift(sampled):
    """The output of `generate` with such log-probabilities."""
    tokens, lengths, logprobs = sampled
    for place in torch.cartesian_prod(*map(torch.arange, tokens.shape)).tolist():
        if place[-1] < lengths[*place[:-1]]:
            logprobs[*place] += shift_of(int(tokens[*place]), place[-1])
    return tokens, lengths, logprobs


def smaller(place):
    """Few tokens at a time: what passes through the head in parts must be put together again."""
    agent, *places = place
    return [(agent, *block) for block in zip(*(place.split(10) for place in places), strict=True)]


# What is at work in these is so in others
SLOW_PLAIN = [pytest.param(case, marks=pytest.mark.slow) for case in ("GRPO", "FedAvg")]
QUICK_PLAIN = [case for case in PLAIN if case not in ("GRPO", "FedAvg")]


@pytest.mark.parametrize("case", QUICK_PLAIN + SLOW_PLAIN)
@pytest.mark.usefixtures("smooth_adam")
def test_training_equals_the_plain_version(files, folder, tmp_path, monkeypatch, case):
    """Adapters, metrics and evaluations after several steps, rounds and epochs, with a C that is
    not symmetric."""
    args = settings_of(files, folder, tmp_path, **PLAIN[case])
    parts = prpo_llm.split_tokens
    monkeypatch.setattr(
        prpo_llm,
        "split_tokens",
        lambda *given: [block for place in parts(*given) for block in smaller(place)],
    )
    generate = prpo_llm.generate
    monkeypatch.setattr(
        prpo_llm, "generate", lambda *given, **options: shift(generate(*given, **options))
    )
    monkeypatch.setattr(prpo_llm, "compare_with_plain", lambda *_: None)  # which would find it
    prpo_llm.main(args)
    run = only_run(tmp_path)
    _, tokenizer = prpo_llm.load_base(args)
    examples, tests, _ = prpo_llm.deal(args, tokenizer, range(3))
    dealt = [
        example["prompt"]
        for examples_of_part in (*examples.values(), tests["validation"])
        for example in examples_of_part
    ]
    # Nobody trains on what is held out
    assert len(set(dealt)) == len(dealt) == 3 * args.prompts_per_agent + 8
    agents, expected = plain_training(files, args, examples)
    # Adapters
    for i, agent in enumerate(agents):
        weights = load_file(run / f"agent_{i}" / "adapter_model.safetensors")
        for name, layer in agent.policy.named_modules():
            if isinstance(layer, Lora):
                A, B = (weights[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
                pairs = [(A, layer.A), (B, layer.B)]
                # Exact averages have other factors of the same product
                if args.aggregation == "weights" and args.lora_average == "exact":
                    pairs = [(B @ A, layer.B @ layer.A)]
                for ours, expected_side in pairs:
                    expected_side = expected_side.detach()
                    torch.testing.assert_close(ours, expected_side, rtol=0, atol=3e-5)
    # Metrics
    rows = table_of(run, "metrics")
    for row, expected_row in zip(rows, expected, strict=True):
        for name, value in expected_row.items():
            assert float(row[name]) == pytest.approx(value, rel=1e-3, abs=1e-4), (
                row["step"],
                row["agent"],
                name,
            )
    assert any(float(row["clipfrac"]) > 0.05 for row in rows) and any(
        float(row["nan_rewards"]) > 0 for row in rows
    )
    # Evaluations: each agent's completions of the held-out prompts
    logged = read_jsonl(run / "completions.jsonl")
    last = {
        (row["agent"], row["id"]): row["completion"].split()
        for row in logged
        if row["step"] == args.total_steps
    }
    greedy = {
        (i, example["id"]): [
            chr(96 + token) for token in agent.complete(args, example["ids"]) if token
        ]
        for i, agent in enumerate(agents)
        for example in tests["validation"]
    }
    assert last == greedy
    ids = [example["id"] for example in tests["validation"]]
    assert any(greedy[0, k] != greedy[1, k] for k in ids) and any(
        greedy[1, k] != greedy[2, k] for k in ids
    )


# --- averages of adapters ---


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**31),
    agents=st.integers(1, 4),
    rank=st.integers(1, 4),
    apart=st.sampled_from([0.0, 0.1, 3.0]),
)
def test_average_products_is_the_nearest_of_its_rank(seed, agents, rank, apart):
    """Against a plain singular value decomposition of the mean; equal A stay as they are, beside
    the mean of B."""
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(rank, 9, generator=generator) + apart * torch.randn(
        agents, rank, 9, generator=generator
    )
    B = torch.randn(agents, 7, rank, generator=generator)
    C = torch.rand(3, agents, generator=generator).softmax(1)
    new_A, new_B, size, lost = communicators.average_products(C, A, B)
    for row, ours, whole, rest in zip(C, new_B @ new_A, size, lost, strict=True):
        product = sum(c * b @ a for c, a, b in zip(row, A, B, strict=True)).double()
        S = torch.linalg.svdvals(product)
        best = float(S[rank:].square().sum())  # no product of this rank is nearer
        assert float((ours - product).square().sum()) == pytest.approx(
            best, rel=1e-4, abs=1e-7 * float(whole)
        )
        assert float(whole) == pytest.approx(float(S.square().sum()), rel=1e-5)
        assert float(rest) == pytest.approx(
            float(S[rank:].square().sum()), rel=1e-4, abs=1e-7 * float(whole)
        )
    if apart == 0:
        torch.testing.assert_close(new_A, A[:1].expand(3, -1, -1), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(new_B, torch.einsum("kn,nor->kor", C, B), rtol=1e-3, atol=1e-3)


def test_average_products_that_are_zero_leave_a_to_learn_from():
    """Where every B is 0, or has fewer ranks, A is still the mean of A: with both 0 nothing would
    ever be learned."""
    A = torch.randn(3, 4, 9, generator=torch.Generator().manual_seed(1))
    A = A[:1] + 0.1 * A
    C = torch.full((2, 3), 1 / 3)
    B = torch.zeros(3, 7, 4)
    new_A, new_B, size, lost = communicators.average_products(C, A, B)
    torch.testing.assert_close(new_A, A.mean(0).expand(2, -1, -1), rtol=0, atol=1e-4)
    assert (new_B == 0).all() and (lost == 0).all() and (size == 0).all()
    B[:, :, 0] = 1.0
    new_A, new_B, *_ = communicators.average_products(C, A, B)
    product = sum(b @ a / 3 for a, b in zip(A, B, strict=True))
    torch.testing.assert_close(new_B[0] @ new_A[0], product, rtol=0, atol=1e-4)
    assert torch.linalg.svdvals(new_A[0]).min() > 0.05


def test_average_adapters_averages_the_products_of_every_set(files, folder, tmp_path):
    """Of policies and of value models, against a singular value decomposition; heads and biases are
    plain means."""
    args = settings_of(files, folder, tmp_path, algorithm="ppo")
    model, _ = prpo_llm.load_base(args)
    trained, _ = prpo_llm.add_adapters(args, model, 3)
    trained[:] = torch.randn(trained.shape, generator=torch.Generator().manual_seed(2))
    layers = [*layers_of(model).values()]
    C = torch.tensor(MATRIX)[1:]  # of two agents of three
    expected = {}
    for number, layer in enumerate(layers):
        for kind in ("policy", "value"):
            for row in range(2):
                product = torch.einsum("n,nor,nri->oi", C[row], layer.B[kind], layer.A[kind])
                U, S, V = torch.linalg.svd(product.detach())
                rank = layer.A[kind].shape[1]
                expected[number, kind, row] = (U[:, :rank] * S[:rank]) @ V[:rank]
    heads = C @ model.value_head.detach(), C @ model.value_bias.detach()
    averages, _ = prpo_llm.average_adapters(args, model, C, trained.clone())
    trained[:2] = averages
    for (number, kind, row), product in expected.items():
        average = layers[number].B[kind][row] @ layers[number].A[kind][row]
        torch.testing.assert_close(average.detach(), product, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(
        (model.value_head[:2].detach(), model.value_bias[:2].detach()), heads
    )


# --- what the value model starts from, public states, the own policy, gains ---


def reward_adapter(files, folder, rank, targets=TARGETS):
    """A reward model as PEFT saves one in `folder`, and its model of plain transformers."""
    torch.manual_seed(5)
    plain = AutoModelForSequenceClassification.from_pretrained(
        files / "model", num_labels=1, dtype=torch.float32
    )
    config = LoraConfig(r=rank, lora_alpha=3, target_modules=list(targets), task_type="SEQ_CLS")
    model = get_peft_model(plain, config).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_the_value_model_starts_from_a_reward_model(files, folder, tmp_path, rank):
    """Its values are the scores; where its rank, 2, is smaller, its products are the nearest of
    this rank."""
    plain = reward_adapter(files, tmp_path / "reward", rank)
    args = settings_of(
        files, folder, tmp_path, algorithm="ppo", value_init=str(tmp_path / "reward")
    )
    prpo_llm.check_args(args)
    model, _ = prpo_llm.load_base(args)
    prpo_llm.add_adapters(args, model, 3)
    for name, layer in model.named_modules():
        if isinstance(layer, prpo_llm.Adapters):
            stored = plain.base_model.model.get_submodule(name)
            B = stored.lora_B["default"].weight
            A = stored.lora_A["default"].weight
            U, S, V = torch.linalg.svd((3 / rank * B @ A).detach())
            product = layer.scale["value"] * layer.B["value"] @ layer.A["value"]
            expected = (U[:, :2] * S[:2]) @ V[:2]
            torch.testing.assert_close(
                product.detach(), expected.expand(3, -1, -1), rtol=1e-4, atol=1e-4
            )
            # Or there would be nothing to learn from
            assert (layer.A["value"].norm(dim=2) > 0).all()
    if rank <= 2:
        prompt = [3, 7, 1]
        completion = [5, 9, 2, 4]
        lengths = torch.full((3, 1, 1), len(completion))
        batch = {
            "prompts": [prompt] * 3,
            "tokens": torch.tensor(completion).expand(3, 1, 1, -1),
            "lengths": lengths,
        }
        with torch.no_grad(), prpo_llm.select_adapters("value"):
            hidden = prpo_llm.compute_hidden(model, batch)
            values = prpo_llm.compute_values(hidden, model.value_head, model.value_bias)
            for t in range(len(completion)):  # V(s_t): the score of the tokens before
                score = plain(torch.tensor([prompt + completion[:t]])).logits
                torch.testing.assert_close(
                    values[:, 0, 0, t], score[0].expand(3), rtol=1e-4, atol=1e-4
                )


def test_the_value_model_starts_from_the_adapter_of_the_policy(files, folder, tmp_path):
    """With the same rank the value model's states are the policy's; its head is 0."""
    args = settings_of(
        files, folder, tmp_path, algorithm="ppo", value_init="adapter", value_lora_rank=4
    )
    model, _ = prpo_llm.load_base(args)
    prpo_llm.add_adapters(args, model, 3)
    lengths = torch.full((3, 1, 2), 3)
    tokens = torch.randint(1, 27, (3, 1, 2, 3))
    states = {}
    for name in ("policy", "value"):
        with torch.no_grad(), prpo_llm.select_adapters(name):
            states[name] = prpo_llm.compute_hidden(
                model, {"prompts": [[1, 2]] * 3, "tokens": tokens, "lengths": lengths}
            )
    torch.testing.assert_close(states["value"], states["policy"])
    assert (model.value_head == 0).all() and (model.value_bias == 0).all()
    with torch.no_grad():
        base = plain_model(files).model(torch.tensor([[1, 2]])).last_hidden_state[0, -1]
    assert (states["value"][0, 0, 0, 0] - base).abs().max() > 1e-2


def test_what_the_value_model_cannot_start_from_ends_in_one_line(files, folder, tmp_path):
    """A whole model, an adapter without score head, other layers, other sizes, another kind of
    adapter."""
    reward_adapter(files, tmp_path / "reward", 2, targets=("q_proj", "o_proj"))
    wide = tmp_path / "wide"
    reward_adapter(files, wide, 2)
    weights = load_file(wide / "adapter_model.safetensors")
    narrow = {
        name: side[:, :-1].clone() if "lora_A" in name else side for name, side in weights.items()
    }
    save_file(narrow, wide / "adapter_model.safetensors")
    dora = tmp_path / "dora"
    reward_adapter(files, dora, 2)
    config = json.loads((dora / "adapter_config.json").read_text()) | {"use_dora": True}
    (dora / "adapter_config.json").write_text(json.dumps(config))
    half = tmp_path / "half"
    reward_adapter(files, half, 2)
    missing = next(name for name in weights if "lora_B" in name)
    save_file(
        {name: side for name, side in weights.items() if name != missing},
        half / "adapter_model.safetensors",
    )
    for value_init, reason in (
        (half, "has half an adapter of model.layers."),
        (files / "model", "a folder with adapter_config.json"),
        (folder / "adapter", "score.weight"),
        (tmp_path / "reward", "o_proj"),
        (wide, "other sizes"),
        (dora, "use_dora"),
    ):
        args = settings_of(files, folder, tmp_path, algorithm="ppo", value_init=str(value_init))
        with pytest.raises(SystemExit) as end, contextlib.redirect_stderr(io.StringIO()) as printed:
            prpo_llm.check_args(args)
            model, _ = prpo_llm.load_base(args)
            prpo_llm.add_adapters(args, model, 3)
        assert end.value.code == 2
        line = printed.getvalue().splitlines()[-1]  # behind the progress of loading
        assert line.startswith(f"--value-init {value_init}: ") and reason in line, line


def test_public_log_probs_leave_padding_out(files, folder, tmp_path):
    """Of each snapshot, at the first eight tokens of each reference, the shorter of which are
    padded: against plain."""
    args = settings_of(files, folder, tmp_path, num_agents=2, response_length=9)
    model, tokenizer = prpo_llm.load_base(args)
    _, snapshots = prpo_llm.add_adapters(args, model, 2)
    snapshots[1] += 0.1 * torch.randn(
        snapshots.shape[1], generator=torch.Generator().manual_seed(4)
    )
    completions = ["a b c d e f g h i j", "k", "l m n"]
    examples = [
        {"completion": text, "ids": ids}
        for text, ids in zip(completions, ([1, 2], [5], [9, 3, 4]), strict=True)
    ]
    log_probs = prpo_llm.compute_public_log_probs(args, model, tokenizer, examples)
    layers = layers_of(model)
    for k in range(2):
        sides = {
            name: (layer.A["snapshot"][k], layer.B["snapshot"][k]) for name, layer in layers.items()
        }
        plain = with_adapter(files, sides, args.lora_alpha / args.lora_rank)
        rows = []
        for example in examples:
            answer = tokenizer(example["completion"])["input_ids"][:8]
            logits = plain(torch.tensor([example["ids"] + answer])).logits[
                0, len(example["ids"]) - 1 : -1
            ]
            rows.append((logits / args.temperature).log_softmax(-1))
        assert log_probs[k].shape == (8 + 1 + 3, 27)
        torch.testing.assert_close(log_probs[k], torch.cat(rows).detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("self_reference", ["snapshot", "behaviour"])
def test_a_gate_is_what_value_models_expect_at_each_token(files, folder, tmp_path, self_reference):
    """Agents 1 and 2 of three are held: against plain value models of their senders."""
    changes = {"algorithm": "ppo", "gate": "value", "self_reference": self_reference}
    args = settings_of(files, folder, tmp_path, **changes)
    model, _ = prpo_llm.load_base(args)
    trained, snapshots = prpo_llm.add_adapters(args, model, 2)
    generator = torch.Generator().manual_seed(5)
    for parameters in (trained, snapshots):
        parameters += 0.2 * torch.randn(parameters.shape, generator=generator)
    means = [0.3, -0.4]  # of the rewards of agents 1 and 2, whose deviations follow
    deviations = [0.5, 1.5]
    statistics = torch.tensor([[8, 0.3, 8 * 0.5**2], [8, -0.4, 8 * 1.5**2]]).double()
    lengths = torch.tensor([[6, 3], [4, 6]])[..., None]
    batch = {
        "prompts": [[1, 2], [5], [9, 3, 4], [7, 7]],
        "tokens": torch.randint(1, 27, (2, 2, 1, 6), generator=generator),
        "lengths": lengths,
        "mask": torch.arange(6) < lengths[..., None],
        "rewards": torch.tensor([[1.0, 2.0], [math.nan, 0.5]])[..., None],
        "values": torch.randn(2, 2, 1, 6, generator=generator),
        "returns": torch.randn(2, 2, 1, 6, generator=generator),
    }
    C = torch.tensor([[0.2, 0.3, 0.5], [0.5, 0.2, 0.3], [0.6, 0.0, 0.4]])
    reference = prpo_llm.choose_reference(args, range(1, 3), C)
    gate = prpo_llm.compute_gate(args, model, reference, batch, statistics)["gate"]
    layers = layers_of(model)
    critics = []
    for j in range(3):
        sides = {
            name: (layer.A["value_snapshot"][j], layer.B["value_snapshot"][j])
            for name, layer in layers.items()
        }
        plain = with_adapter(files, sides, args.value_lora_alpha / args.value_lora_rank)
        critics.append((plain, model.snapshot_head[j], model.snapshot_bias[j]))
    # The completion without a reward has no returns
    ranges = [batch["returns"][0][batch["mask"][0]].aminmax(), batch["returns"][1, 1].aminmax()]
    for k in range(2):
        low, high = ranges[k]
        numbers = lengths[k, :, 0].tolist()
        values = []
        senders = [j for j in range(3) if C[k + 1, j] > 0]
        for j in senders:
            plain, head, bias = critics[j]
            expected = []
            for p, number in enumerate(numbers):
                prompt = batch["prompts"][2 * k + p]
                ids = torch.tensor([prompt + batch["tokens"][k, p, 0, :number].tolist()])
                hidden = plain.model(ids).last_hidden_state[0, len(prompt) - 1 : -1]
                value = (hidden @ head + bias - means[k]) / deviations[k]
                if self_reference == "behaviour" and j == k + 1:
                    value = batch["values"][k, p, 0, :number]
                expected.append(value)
            values.append(torch.cat(expected))  # of all tokens
        high = max(high, median_low([expected.max() for expected in values]))
        votes = []
        for j, expected in zip(senders, values, strict=True):
            promised = (expected.clamp(low, high) - low) / (high - low)
            votes.append(C[k + 1, j] * promised**2 * promised.std(correction=0))
        expected = torch.stack(votes) / sum(votes)
        computed = [gate[k, p, : len(senders), 0, :number] for p, number in enumerate(numbers)]
        torch.testing.assert_close(
            torch.cat(computed, dim=1), expected.detach(), rtol=1e-3, atol=1e-4
        )
        for of_completion in expected.split(numbers, dim=1):
            # A token too early or late is another one
            assert of_completion.diff(dim=1).abs().max() > 0.05


def test_a_gate_whose_peers_agree_leaves_the_reference(files, folder, tmp_path):
    """The same values, values that promise nothing, a batch without any reward, and an agent whose
    completions are all cut off: weights are those of C, and the mixture is the one without a gate.
    """
    args = settings_of(files, folder, tmp_path, algorithm="ppo", gate="value")
    model, _ = prpo_llm.load_base(args)
    _, snapshots = prpo_llm.add_adapters(args, model, 3)
    generator = torch.Generator().manual_seed(6)
    snapshots += 0.1 * torch.randn(snapshots.shape, generator=generator)
    equal = torch.zeros_like(model.snapshot_head)
    varying = torch.randn(equal.shape, generator=generator)
    statistics = torch.tensor([[8, 0.3, 2.0]]).double().repeat(3, 1)
    batch = {
        "prompts": [[1, 2], [5], [9, 3, 4]],
        "tokens": torch.randint(1, 27, (3, 1, 1, 4), generator=generator),
        "lengths": torch.full((3, 1, 1), 4),
        "mask": torch.ones(3, 1, 1, 4, dtype=torch.bool),
        "rewards": torch.ones(3, 1, 1),
        "values": torch.zeros(3, 1, 1, 4),
        "returns": torch.randn(3, 1, 1, 4, generator=generator),
    }
    C = torch.tensor(MATRIX)
    reference = prpo_llm.choose_reference(args, range(3), C)
    mb = prpo_llm.collect_peers(args, model, reference, batch)
    for head, biases, reward, cut_off in (
        (equal, [0.3, 0.3, 0.3], 1.0, []),
        (varying, [-1e3, -2e3, -3e3], 1.0, []),
        (varying, [0.1, 0.3, 0.6], math.nan, []),
        (equal, [0.3, 0.3, 0.3], 1.0, [1]),
    ):
        model.snapshot_head[:] = head
        model.snapshot_bias[:] = torch.tensor(biases)[:, None]
        batch["rewards"][:] = reward
        batch["mask"][cut_off] = False
        gate = prpo_llm.compute_gate(args, model, reference, batch, statistics)
        for place in prpo_llm.split_tokens(model, batch["mask"]):
            k, m, g, t = place
            weights = gate["gate"][k, m, :, g, t][:, : len(reference.weights[k])]
            torch.testing.assert_close(weights, reference.weights[k].expand_as(weights))
            gated = prpo_llm.compute_log_reference(args, model, mb | gate, place, reference)
            plain = prpo_llm.compute_log_reference(args, model, mb, place, reference)
            torch.testing.assert_close(gated, plain, rtol=1e-5, atol=1e-5)


def test_an_agents_own_part_of_its_reference_goes_by_its_number(monkeypatch):
    """Agents 1 and 2 of three are held: with `behaviour`, agent i's own part is its policy, and
    only its own."""
    model = SimpleNamespace(device="cpu")
    batch = {
        "mask": torch.ones(2, 1, 1, 2, dtype=torch.bool),
        "lengths": torch.full((2, 1, 1), 2),
        "logprobs": torch.zeros(2, 1, 1, 2),
        "prompts": [[1], [1]],
    }

    def tell(model, batch):
        name, numbers, *_ = prpo_llm.Adapters.selection
        filled = torch.tensor(numbers if name == "snapshot" else [-1, -1])
        return filled.float().view(2, 1, 1, 1, 1).expand(2, 1, 1, 2, 4).clone()

    monkeypatch.setattr(prpo_llm, "compute_hidden", tell)
    C = torch.tensor([[0.2, 0.3, 0.5], [0.4, 0.6, 0.0], [0.3, 0.3, 0.4]])
    for self_reference, expected in (
        ("behaviour", [[0, -1], [0, 1, -1]]),
        ("snapshot", [[0, 1], [0, 1, 2]]),
    ):
        args = prpo_llm.Args(self_reference=self_reference)
        reference = prpo_llm.choose_reference(args, range(1, 3), C)
        references = prpo_llm.compute_references(args, model, reference, batch)
        for k, peers in enumerate(expected):
            assert references["peers"][k, 0, : len(peers), 0, 0, 0].tolist() == peers
            assert reference.weights[k].tolist() == C[k + 1][C[k + 1] > 0].tolist()


def test_relative_gain_weighs_gains(files, tmp_path, monkeypatch):
    """C of every round, from the completions' rewards: gains over each agent's own history, and not
    its means."""
    score = prpo_llm.score_completions
    seen = []

    def score_and_remember(*given):
        texts, ends, columns = score(*given)
        seen.append(columns["reward"].reshape(3, -1))
        return texts, ends, columns

    monkeypatch.setattr(prpo_llm, "score_completions", score_and_remember)
    changes = {
        "num_agents": 3,
        "communicator": "relative-gain",
        "communicator_temperature": 0.5,
        "eval_prompts": 0,
    }
    prpo_llm.main(
        tiny(files, tmp_path, **changes, local_updates=2, total_steps=6, response_length=8)
    )
    rows = [
        row for row in table_of(only_run(tmp_path), "communicator") if int(row["step"]) in (2, 4, 6)
    ]
    baselines = [None] * 3
    apart = 0.0
    for number in range(3):
        rewards = np.concatenate(seen[2 * number : 2 * number + 2], axis=1)
        gains = []
        for i in range(3):
            mean = rewards[i].mean()
            error = rewards[i].std(ddof=1) / math.sqrt(rewards.shape[1])
            before = mean if baselines[i] is None else baselines[i]
            gains.append(np.clip((mean - before) / (abs(before) + error), -1, 1))
            baselines[i] = before + 0.2 * (mean - before)
        weights = np.exp(np.array(gains) / 0.5)
        means = np.exp(rewards.mean(1) / 0.5)
        apart = max(apart, np.abs(weights / weights.sum() - means / means.sum()).max())
        rows_of_round = [row for row in rows if int(row["step"]) == 2 * number + 2]
        for row in rows_of_round:
            expected = weights[int(row["peer"])] / weights.sum()
            assert float(row["weight"]) == pytest.approx(expected, rel=1e-4), (number, row)
        assert len(rows_of_round) in (0, 9)  # it is written where it has changed
    assert apart > 0.02 and len(rows) >= 18


def test_agents_count_by_completions_that_taught(files, tmp_path, monkeypatch):
    """samples: c_ij is proportional to agent j's completions since the last round, without those
    whose reward is NaN or infinite.
    """
    score = prpo_llm.score_completions
    spoilt = [[1, 0], [2, 1], [3, 0], [0, 0]]  # of each agent, by step
    sizes = []

    def score_and_spoil(*inputs):
        texts, ends, columns = score(*inputs)
        rewards = columns["reward"].reshape(2, -1)  # a view
        for i, number in enumerate(spoilt[len(sizes)]):
            rewards[i, :number] = (math.nan, 1e39)[i]  # the latter is infinite in float32
        sizes.append(rewards.shape[1])
        return texts, ends, columns

    monkeypatch.setattr(prpo_llm, "score_completions", score_and_spoil)
    changes = {"num_agents": 2, "communicator": "samples", "eval_prompts": 0}
    prpo_llm.main(
        tiny(files, tmp_path, **changes, local_updates=2, total_steps=4, response_length=8)
    )
    rows = [
        row for row in table_of(only_run(tmp_path), "communicator") if int(row["step"]) in (2, 4)
    ]
    counts = sizes[0] - torch.tensor(spoilt)
    for row in rows:
        last = int(row["step"])
        of_round = counts[last - 2 : last].sum(0).double()
        expected = float((of_round / of_round.sum())[int(row["peer"])])
        assert float(row["weight"]) == pytest.approx(expected, rel=1e-4), row
    assert len(rows) == 8


def test_the_best_usable_agent_has_all_weight():
    """As in control, whose function has branches of its own."""
    args = prpo_llm.Args(num_agents=3, communicator="best")
    returns = torch.tensor([0.1, math.nan, 0.7])
    C = prpo_llm.make_communicator(args, returns)
    assert C.tolist() == [[0, 0, 1]] * 3
    usable = torch.tensor([True, True, False])
    C = prpo_llm.make_communicator(args, returns, usable=usable)
    assert C.tolist() == [[1, 0, 0]] * 3


# --- exact expectations ---


@pytest.mark.parametrize("old_is_new", [True, False])
def test_gradients_of_estimated_kls(old_is_new):
    """Summed over all tokens with their probabilities under the policy that sampled them: no noise
    is left.

    k1 has value and gradient of the reverse KL, whatever has been learned since; where nothing has,
    k2 has its gradient, and k3 its value, but the gradient of the forward KL.
    """
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(9, generator=generator, dtype=torch.double).requires_grad_()
    policy = logits.log_softmax(-1)
    tokens = torch.arange(9)
    old = (
        policy.detach()
        if old_is_new
        else torch.randn(9, generator=generator).double().log_softmax(-1)
    )
    reference = torch.randn(9, generator=generator, dtype=torch.double).log_softmax(-1)
    reverse = kl_divergence(*map(from_logs, (policy, reference)))
    forward = kl_divergence(*map(from_logs, (reference, policy)))
    (reverse_slope,), (forward_slope,) = (
        torch.autograd.grad(kl, logits, retain_graph=True) for kl in (reverse, forward)
    )
    values = {}
    slopes = {}
    for name in ("k1", "k2", "k3"):
        args = prpo_llm.Args(kl_estimator=name)
        rows = policy.expand(9, -1)
        each = prpo_llm.compute_reference_kl(
            rows, reference.expand(9, -1), tokens, (policy - old).exp(), args
        )
        values[name] = (old.exp() * each).sum()
        (slopes[name],) = torch.autograd.grad(values[name], logits, retain_graph=True)
    torch.testing.assert_close((values["k1"], slopes["k1"]), (reverse, reverse_slope))
    if old_is_new:
        torch.testing.assert_close(slopes["k2"], reverse_slope)
        torch.testing.assert_close((values["k3"], slopes["k3"]), (reverse, forward_slope))
        assert (reverse_slope - forward_slope).abs().max() > 0.05


@pytest.mark.parametrize("gap", [-30.0, -6.0, -0.3, 0.0, 0.3, 4.9, 6.0, 30.0])
def test_k3_is_exact_for_ordinary_gaps_and_bounded_beyond(gap):
    """Its value and gradient, of a token to which the reference gives e^gap of the policy's
    probability."""
    log_policy = torch.tensor([[-31.0, -0.1]], dtype=torch.double).requires_grad_()
    log_reference = log_policy.detach() + torch.tensor([[gap, 0.0]], dtype=torch.double)
    args = prpo_llm.Args(kl_estimator="k3")
    token = torch.tensor([0])
    kl = prpo_llm.compute_reference_kl(log_policy, log_reference, token, torch.ones(1), args)
    (slope,) = torch.autograd.grad(kl.sum(), log_policy)
    value = float(kl.detach())
    if gap <= 5:
        assert value == pytest.approx(math.expm1(gap) - gap, abs=1e-12)
        assert slope.tolist() == [[pytest.approx(-math.expm1(gap), abs=1e-12), 0.0]]
    else:  # the tangent: still towards the reference, and steepest here
        assert slope.tolist() == [[pytest.approx(1 - math.exp(5)), 0.0]]
        assert value == pytest.approx(math.exp(5) - 6 + (math.exp(5) - 1) * (gap - 5))


@pytest.mark.parametrize("loss_type", ["grpo", "gspo"])
@pytest.mark.parametrize("logratio", [-30.0, 0.1, 4.9, 30.0])
def test_a_token_that_has_become_likely_has_a_bounded_gradient(loss_type, logratio, monkeypatch):
    """Clipping does not bound the loss where the advantage is negative."""
    args = prpo_llm.Args(loss_type=loss_type, kl_coef=0.0)
    monkeypatch.setattr(prpo_llm, "compute_log_probs", lambda _args, _model, states: states)
    states = torch.tensor([-0.01, -40.0]).expand(1, 1, 1, 1, 2).clone().requires_grad_()
    mb = {
        "tokens": torch.zeros(1, 1, 1, 1, dtype=torch.long),
        "logprobs": torch.full((1, 1, 1, 1), -0.01 - logratio),
        "advantages": torch.full((1, 1, 1, 1), -2.0),
        "mean_logratio": torch.full((1, 1, 1), logratio),
        "peers": states.detach()[:, :, None],
    }
    place = (0, *[torch.zeros(1, dtype=torch.long)] * 3)
    reference = prpo_llm.Reference([torch.ones(1)], [], [])
    loss, terms = prpo_llm.compute_token_losses(
        args, None, states, mb, place, reference, kl_coef=0.0
    )
    loss.sum().backward()
    slope = float(states.grad[..., 0])
    if logratio < 0:  # the clip range's lower end
        assert slope == 0 and float(loss.detach()) == pytest.approx(2 * 0.8)
    else:
        assert slope == pytest.approx(2 * math.exp(min(logratio, 5.0)), rel=1e-4)
    assert float(terms["ratio"]) == pytest.approx(
        math.exp(min(logratio, 5)) * (1 + max(logratio - 5, 0)), rel=1e-4
    )


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize(
    ("weights", "gate", "expected"),
    [
        ([1.0], None, "policy"),  # agent 0 of the states below is not a number
        ([0.5, 0.5], None, 1),
        ([0.5, 0.5], [1.0, 0.0], "policy"),
        ([0.5, 0.5], [0.9, 0.1], 1),
    ],
)
def test_a_sender_that_is_not_a_number_is_left_out(weights, gate, expected, direction, monkeypatch):
    """Of a token's reference; without another sender it is the agent's own policy. A peer's
    log-probability counts as -100 at least, so that every gradient is finite.
    """
    args = prpo_llm.Args(kl_direction=direction)
    monkeypatch.setattr(prpo_llm, "compute_log_probs", lambda _args, _model, states: states)
    policy = torch.tensor([0.7, 0.3]).log().view(1, 1, 1, 1, 2).requires_grad_()
    of_senders = torch.tensor([[torch.nan, torch.nan], [-1e38, 0.0]])[: len(weights)]
    mb = {
        "tokens": torch.zeros(1, 1, 1, 1, dtype=torch.long),
        "logprobs": policy[..., 0].detach(),
        "advantages": torch.zeros(1, 1, 1, 1),
        "peers": of_senders.view(1, 1, len(weights), 1, 1, 2),
    }
    if gate:
        mb["gate"] = torch.tensor(gate).view(1, 1, 2, 1, 1)
    place = (0, *[torch.zeros(1, dtype=torch.long)] * 3)
    reference = prpo_llm.Reference([torch.tensor(weights)], [], [])
    loss, terms = prpo_llm.compute_token_losses(
        args, None, policy, mb, place, reference, kl_coef=1.0
    )
    loss.sum().backward()
    log_policy = policy.detach().flatten()
    log_reference = log_policy if expected == "policy" else torch.tensor([-100.0, 0.0])
    kl = communicators.kl_to_reference(log_policy, log_reference, direction)
    torch.testing.assert_close(terms["kl_reference"], kl[None])
    assert policy.grad.isfinite().all()


def from_logs(log_probs):
    """A distribution that does not normalise, or gradients would differ."""
    return Categorical(logits=log_probs)


def give_states(monkeypatch, hidden):
    """Let these be the value models' states, [agents, prompts, group, tokens, hidden]."""

    def collect(args, model, batch, head, bias):
        return prpo_llm.compute_values(hidden, head, bias)

    monkeypatch.setattr(prpo_llm, "collect_values", collect)


@pytest.mark.parametrize("norm_reward", ["on", "off"])
def test_rewards_are_normalised_per_agent_and_values_start_at_their_mean(norm_reward, monkeypatch):
    """Of three agents with offsets of their own, one of whom receives its first rewards in the
    second step only.

    The mean and deviation are those of all rewards so far, NaN left out; a head that is not 0 is
    kept in proportion.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([[[3], [1], [2], [4]]]).expand(3, -1, -1)
    mask = torch.arange(4) < lengths[..., None]
    hidden = torch.randn(3, 4, 1, 4, 5, generator=generator)
    give_states(monkeypatch, hidden)
    head = torch.randn(3, 5, generator=generator)
    model = SimpleNamespace(value_head=head.clone(), value_bias=torch.full((3, 1), 7.0))
    args = prpo_llm.Args(
        algorithm="ppo",
        gamma=0.9,
        gae_lambda=0.8,
        norm_reward=norm_reward,
        value_init="reward/model",
    )
    statistics = torch.zeros(3, 3, dtype=torch.float64)
    seen = [[], [], []]
    for step in range(3):
        value_model = torch.cat((model.value_head, model.value_bias), dim=1)
        rewards = torch.tensor([0.0, 12.0, -300.0])[:, None, None] + torch.randn(
            3, 4, 1, generator=generator
        )
        rewards[0, 1] = math.nan
        if step == 0:
            rewards[2] = math.nan
        outputs = prpo_llm.compute_advantages(
            args, model, {"lengths": lengths, "rewards": rewards, "mask": mask}, statistics
        )
        for k in range(3):
            before = len(seen[k])
            seen[k] += [reward for reward in rewards[k].flatten().tolist() if reward == reward]
            if not seen[k]:
                continue
            mean, deviation = (
                (np.mean(seen[k]), np.std(seen[k])) if norm_reward == "on" else (0.0, 1.0)
            )
            scaled = (rewards[k, :, 0] - mean) / deviation
            if not before:
                torch.testing.assert_close(
                    model.value_head[k], head[k] / deviation, rtol=1e-4, atol=1e-4
                )
                start = outputs["values"][k][mask[k]].mean()
                assert float(start) == pytest.approx(float(scaled.nanmean()), rel=1e-4, abs=1e-4)
            else:  # only the first rewards make a start
                kept = torch.cat((model.value_head[k], model.value_bias[k]))
                assert torch.equal(kept, value_model[k])
            values = outputs["values"][k, :, 0]
            expected = hidden[k, :, 0] @ model.value_head[k] + model.value_bias[k]
            torch.testing.assert_close(values, expected * mask[k, :, 0])
            for row in range(4):  # lambda's recursion ends with the reward
                last = int(lengths[k, row]) - 1
                reward = 0.0 if math.isnan(scaled[row]) else float(scaled[row])
                assert float(outputs["returns"][k, row, 0, last]) == pytest.approx(
                    reward, rel=1e-3, abs=1e-3
                )
    assert statistics[:, 0].tolist() == [9, 12, 8]


def test_equal_rewards_are_normalised_to_zero():
    """Whatever their number and value, in one step or in many: rounding errors are not divided by
    themselves."""
    for value in (0.0, 0.1, 12.3, -1e4):
        statistics = torch.zeros(1, 3, dtype=torch.float64)
        for size in (1, 3, 7, 8):
            rewards = torch.full((1, size, 1), value)
            prpo_llm.update_statistics(statistics, rewards)
            assert prpo_llm.normalise_rewards(statistics, rewards).abs().max() < 1e-6


def test_advantages_of_ppo_are_whitened_over_what_is_known(monkeypatch):
    """Mean 0 and variance 1 over the tokens whose reward is known; others have none; a single one
    makes no NaN."""
    lengths = torch.tensor([[[3], [2], [4]], [[1], [4], [2]], [[1], [2], [2]]])
    rewards = torch.tensor(
        [[[1.0], [math.nan], [3.0]], [[2.0], [math.nan], [math.nan]], [[math.nan]] * 3]
    )
    batch = {"lengths": lengths, "rewards": rewards, "mask": torch.arange(4) < lengths[..., None]}
    give_states(monkeypatch, torch.ones(3, 3, 1, 4, 1))
    model = SimpleNamespace(
        value_head=torch.tensor([[0.1], [0.2], [0.3]]), value_bias=torch.zeros(3, 1)
    )
    args = prpo_llm.Args(algorithm="ppo", gamma=0.9)
    statistics = torch.zeros(3, 3, dtype=torch.float64)
    advantages = prpo_llm.compute_advantages(args, model, batch, statistics)["advantages"]
    has_reward = batch["mask"] & ~rewards.isnan()[..., None]
    assert (advantages[~has_reward] == 0).all() and advantages.isfinite().all()
    assert float(advantages[0][has_reward[0]].mean()) == pytest.approx(0, abs=1e-6)
    assert float(advantages[0][has_reward[0]].std(correction=0)) == pytest.approx(1, abs=1e-6)
    assert (advantages[1:] == 0).all()


def first_advantages(monkeypatch, args, rewards, mask):
    """Advantages of one agent's first batch, and its value model afterwards. Hidden states are 1 at
    every token, and the value head scores them with 0.5.
    """
    give_states(monkeypatch, torch.ones(*mask.shape, 1))
    model = SimpleNamespace(value_head=torch.tensor([[0.5]]), value_bias=torch.zeros(1, 1))
    batch = {"lengths": torch.full(mask.shape[:3], mask.shape[3]), "mask": mask}
    batch["rewards"] = torch.tensor(rewards)[None, :, None]
    statistics = torch.zeros(1, 3, dtype=torch.float64)
    return prpo_llm.compute_advantages(args, model, batch, statistics), model


def test_values_start_at_the_rewards_that_are_learned_from(monkeypatch):
    """Completions that --mask-truncated-completions takes out would give all others an offset."""
    mask = torch.ones(1, 8, 1, 6, dtype=torch.bool)
    mask[0, 2:] = False
    rewards = [1.0, 1.0] + [-1.0] * 6
    outputs, _ = first_advantages(monkeypatch, prpo_llm.Args(algorithm="ppo"), rewards, mask)
    assert outputs["advantages"].abs().max() < 1e-3  # both that ended have the same reward
    outputs, _ = first_advantages(
        monkeypatch, prpo_llm.Args(algorithm="ppo"), rewards, torch.zeros_like(mask)
    )
    assert outputs["values"].isfinite().all() and (outputs["advantages"] == 0).all()


@pytest.mark.parametrize(
    ("rewards", "head"),
    [([0.0, 4.0], 0.25), ([0.0, 0.0], 0.5), ([0.3], 0.5), ([0.1] * 7, 0.5), ([-1e4] * 3, 0.5)],
)
def test_a_reward_model_s_head_is_not_divided_by_rounding(rewards, head, monkeypatch):
    """First rewards that are all equal have no deviation in whose units it could score."""
    args = prpo_llm.Args(algorithm="ppo", value_init="reward/model")
    mask = torch.ones(1, len(rewards), 1, 3, dtype=torch.bool)
    _, model = first_advantages(monkeypatch, args, rewards, mask)
    assert float(model.value_head) == pytest.approx(head)


@pytest.mark.parametrize("loss_type", ["grpo", "gspo"])
def test_a_probability_that_the_sampler_lacks_concerns_its_completion_only(loss_type):
    """Importance weights and the gap between sampler and trainer stay finite."""
    args = prpo_llm.Args(importance_cap=2.0, loss_type=loss_type)
    logprobs = torch.tensor([[[[-1.0, -2.0], [-1.0, -1.0]]]])
    sampled = torch.tensor([[[[-1.5, -2.5], [math.nan, -math.inf]]]])
    batch = {"mask": torch.ones(1, 1, 2, 2, dtype=torch.bool), "sampled": sampled}
    weights = prpo_llm.compute_importance(args, batch, logprobs)
    assert weights[0, 0, 0].tolist() == pytest.approx([math.exp(0.5)] * 2)
    assert weights[0, 0, 1].tolist() == [1, 1]
    gaps = prpo_llm.measure_sampling_gaps(batch | {"logprobs": logprobs})
    assert gaps.tolist() == pytest.approx([0.5])


def test_rounding_is_no_advantage():
    """Where an agent's rewards are all equal, PPO's advantages are rounding, and stay small."""
    noise = torch.rand(2, 3, 1, 4, generator=torch.Generator().manual_seed(1))
    advantages = torch.stack([-0.5 + 6e-8 * noise[0], -0.5 + 0.1 * noise[1]])
    whitened = prpo_llm.whiten(advantages, torch.ones(2, 3, 1, 4, dtype=torch.bool))
    assert whitened[0].abs().max() < 1e-2
    assert float(whitened[1].square().mean()) == pytest.approx(1, abs=1e-4)


# --- rewards with an offset, gradients that are not finite ---


def rows_of(run):
    """metrics.csv as [step][agent]."""
    rows = table_of(run, "metrics")
    agents = 1 + max(int(row["agent"]) for row in rows)
    return [rows[first : first + agents] for first in range(0, len(rows), agents)]


LONG = {"batch_size": 16, "micro_batch_size": 16, "response_length": 20, "total_steps": 150}
SHORT = {"batch_size": 16, "micro_batch_size": 16, "response_length": 12, "total_steps": 24}


@pytest.mark.parametrize(
    ("budget", "least"),
    [
        pytest.param(SHORT, 4.0, id="short"),
        pytest.param(LONG, 17.0, id="150", marks=pytest.mark.slow),
    ],
)
def test_ppo_learns_whatever_the_offset_of_the_rewards(files, tmp_path, budget, least):
    """The reward is the number of "a", and 0, 12 or -12 besides, an agent each: all three learn to
    generate "a".

    Without normalised rewards and a value head that starts at their mean, ending at once looks good
    with +12: the completions of this agent have length 1 and no "a".
    """
    generator = np.random.default_rng(0)
    for agent, offset in enumerate((0.0, 12.0, -12.0)):
        prompts = [" ".join(generator.choice([*"bcdefgh"], size=4)) for _ in range(60)]
        rows = [{"prompt": prompt, "completion": "a", "offset": offset} for prompt in prompts]
        write_jsonl(tmp_path / f"data_{agent}.jsonl", rows)
    (tmp_path / "letters.py").write_text(
        "def count(completions, offset, **_):\n"
        "    return [text.split().count('a') + own for text, own in zip(completions, offset)]\n"
    )
    base = {
        "algorithm": "ppo",
        "aggregation": "none",
        "num_agents": 3,
        "prompts_per_agent": 60,
        "local_updates": 1,
    }
    base |= {
        "dataset": str(tmp_path / "data_{i}.jsonl"),
        "reward": f"{tmp_path / 'letters.py'}:count",
    }
    base |= {"eval_prompts": 0, "missing_eos_penalty": 0.0, "save_every": 1000}
    prpo_llm.main(tiny(files, tmp_path / "runs", **base, **budget))
    last = rows_of(only_run(tmp_path / "runs"))[-4:]
    letters = [np.mean([float(row["reward"]) for row in rows]) for rows in zip(*last, strict=True)]
    lengths = [
        np.mean([float(row["response_length"]) for row in rows]) for rows in zip(*last, strict=True)
    ]
    letters = [letters[0], letters[1] - 12, letters[2] + 12]
    assert min(letters) > least and min(lengths) > budget["response_length"] / 2, (letters, lengths)


@pytest.mark.parametrize("aggregation", ["policy", "weights"])
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_gradient_that_is_not_finite_makes_no_step(
    files,
    tmp_path,
    monkeypatch,
    algorithm,
    aggregation,
):
    """In the second of four steps an advantage of agent 1 is infinite: nothing of its policy
    changes in this minibatch.

    It is counted, its peer is not concerned, and after that the agent learns on: weights and
    moments are finite.
    """
    compute = prpo_llm.compute_advantages
    calls = []

    def infinite_later(*given):
        calls.append(1)
        outputs = compute(*given)
        if len(calls) == 2:
            outputs["advantages"] = outputs["advantages"].clone()
            outputs["advantages"][1] = torch.inf
        return outputs

    monkeypatch.setattr(prpo_llm, "compute_advantages", infinite_later)
    write = communicators.write_atomically

    def write_and_keep(path, content):
        write(path, content)
        if path.suffix == ".pt":  # a run keeps two checkpoints of each agent
            shutil.copy(path, tmp_path / f"{path.parent.name}_{path.name}")

    monkeypatch.setattr(communicators, "write_atomically", write_and_keep)
    changes = {
        "algorithm": algorithm,
        "aggregation": aggregation,
        "local_updates": 3,
        "save_every": 1,
    }
    prpo_llm.main(tiny(files, tmp_path / "runs", **changes, batch_size=4, update_epochs=3))
    run = only_run(tmp_path / "runs")
    skipped = [[float(row["skipped_steps"]) for row in rows] for rows in rows_of(run)]
    assert skipped == [[0, 0], [0, 3], [0, 0], [0, 0]]
    first, second, last = (
        torch.load(tmp_path / f"agent_1_{step}.pt", weights_only=True) for step in (1, 2, 4)
    )
    # Of the policy, and with PPO of the value model
    of_first, of_second, of_last = (
        stored["optimizer"]["state"] for stored in (first, second, last)
    )
    numel = len(of_first[0]["exp_avg"])
    assert torch.equal(first["trained"][:numel], second["trained"][:numel])
    for name in ("step", "exp_avg", "exp_avg_sq"):
        assert torch.equal(of_first[0][name], of_second[0][name]), name
        assert of_last[0][name].isfinite().all(), name
    assert last["trained"].isfinite().all() and of_last[0]["step"] > of_second[0]["step"]
    assert not torch.equal(last["trained"][:numel], second["trained"][:numel])
    if algorithm == "ppo":  # the value model has a gradient of its own
        assert of_second[1]["step"] == of_first[1]["step"] + 3
        assert not torch.equal(first["trained"][numel:], second["trained"][numel:])
    assert summary_of(run)["diverged"] == []


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
def test_no_step_where_the_norm_is_not_finite(wrong):
    """The second of three agents keeps parameters and moments; the third has no signal."""
    args = prpo_llm.Args(learning_rate=0.1)
    trained = torch.ones(3, 4)
    optimizers = prpo_llm.make_optimizers(args, trained, trained[:, :0])
    trained.grad = torch.tensor([[1.0, -2.0, 0.5, 3.0], [1.0, wrong, 0.5, 3.0], [0.0] * 4])
    outputs = prpo_llm.step_optimizers(args, trained, optimizers)
    assert outputs["skipped_steps"].tolist() == [0, 1, 0]
    assert (trained[0] != 1).all()
    assert torch.equal(trained[1:], torch.ones(2, 4))
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    assert states[0][0]["exp_avg"].count_nonzero() == 4
    assert states[1:] == [{}, {}]


def test_a_skipped_step_does_not_hide_the_others(files, tmp_path, monkeypatch):
    """Where one of two minibatches is skipped, metrics are means over the other, and no agent has
    diverged."""
    compute = prpo_llm.compute_advantages

    def infinite_for_one_prompt(*given):
        outputs = compute(*given)
        outputs["advantages"] = outputs["advantages"].clone()
        outputs["advantages"][1, 0] = torch.inf
        return outputs

    monkeypatch.setattr(prpo_llm, "compute_advantages", infinite_for_one_prompt)
    prpo_llm.main(
        tiny(files, tmp_path, batch_size=4, minibatch_size=2, update_epochs=3, total_steps=2)
    )
    for healthy, other in rows_of(only_run(tmp_path)):
        assert float(healthy["skipped_steps"]) == 0 and float(other["skipped_steps"]) == 3
        for name in ("policy_loss", "grad_norm", "approx_kl"):
            assert math.isfinite(float(other[name])), name
    assert summary_of(only_run(tmp_path))["diverged"] == []


def ruin(agent):
    """A `learn` after whose first step an agent's adapters are NaN."""
    learn = prpo_llm.learn
    calls = []

    def learn_and_ruin(args, model, trained, *given):
        losses = learn(args, model, trained, *given)
        if not calls:
            trained[agent] = torch.nan
        calls.append(1)
        return losses

    return learn_and_ruin


def test_a_diverged_agent_has_no_score(files, tmp_path, monkeypatch):
    """NaN's likeliest token is the first, which ends a completion: that is not scored, in training
    or evaluation."""
    monkeypatch.setattr(prpo_llm, "learn", ruin(1))
    prpo_llm.main(tiny(files, tmp_path, aggregation="none", eval_every=2, eval_samples=2))
    run = only_run(tmp_path)
    rows = table_of(run, "evaluations")
    for row in rows:
        lost = row["agent"] == "1" and row["step"] != "0"
        for column in ("mean_reward", "score", "sampled_reward"):
            assert math.isnan(float(row[column])) == lost, (row, column)
    assert {row["step"] for row in rows} == {"0", "2", "4"}
    for step, (healthy, diverged) in enumerate(rows_of(run)):
        assert float(healthy["nan_rewards"]) == 0 and float(diverged["nan_rewards"]) == (
            0 if step == 0 else 6
        )
    summary = summary_of(run)
    assert summary["diverged"] == [1]
    assert summary["evaluation"]["agents"][1]["validation"]["mean"] is None
    assert summary["evaluation"]["agents"][0]["validation"]["mean"] is not None


def test_fedavg_restores_an_agent_that_is_not_finite(files, tmp_path, monkeypatch):
    """It gets the mean of its senders; that its own parameters are not finite does not
    exclude it."""
    monkeypatch.setattr(prpo_llm, "learn", ruin(1))
    changes = {
        "num_agents": 3,
        "aggregation": "weights",
        "lora_average": "naive",
        "communicator": "uniform",
    }
    prpo_llm.main(tiny(files, tmp_path, **changes, local_updates=2, total_steps=2, save_every=1))
    one, lost, other = (
        checkpoint_of(only_run(tmp_path), agent, 2)["trained"] for agent in range(3)
    )
    before = [checkpoint_of(only_run(tmp_path), agent, 1)["trained"] for agent in range(3)]
    assert before[1].isnan().all() and before[0].isfinite().all()
    assert lost.isfinite().all()
    torch.testing.assert_close(lost, one)
    torch.testing.assert_close(lost, other)


# --- placements, checkpoints, logs ---


def checkpoint_of(run, agent, step):
    return torch.load(run / "checkpoints" / f"agent_{agent}" / f"{step}.pt", weights_only=True)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("rewards", "expected"), [([1.0, 4.0], 4.5**0.5), ([1.0, math.nan], math.nan)]
)
def test_one_reward_has_no_standard_deviation(rewards, expected):
    rewards = torch.tensor([[rewards]])  # [agents, prompts, completions]
    batch = {"rewards": rewards, "lengths": torch.ones(1, 1, 2), "ends": torch.ones(1, 1, 2)}
    row = prpo_llm.measure_completions(prpo_llm.Args(algorithm="ppo"), batch, {}, 0)
    assert row["objective/reward_std"] == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("minibatch_size", [1, 2])
@pytest.mark.parametrize("communicator", ["identity", "uniform"])
def test_agents_without_signal_stay_where_they_are(files, tmp_path, communicator, minibatch_size):
    """The penalty holds them at the policy of all, and no rounding error of it becomes a step."""
    (tmp_path / "equal.py").write_text(
        "def equal(prompts, completions, references):\n    return [0.5] * len(prompts)\n"
    )
    settings = {"communicator": communicator, "kl_coef": 0.5, "missing_eos_penalty": 0.0}
    settings |= {"reward": f"{tmp_path / 'equal.py'}:equal", "save_every": 1, "eval_prompts": 0}
    settings |= {"minibatch_size": minibatch_size, "local_updates": 1}
    prpo_llm.main(tiny(files, tmp_path / "runs", **settings))
    run = only_run(tmp_path / "runs")
    for agent in range(2):
        first, last = (checkpoint_of(run, agent, step) for step in (3, 4))
        assert torch.equal(first["trained"], last["trained"])
        assert last["optimizer"]["state"] == {}


@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
@pytest.mark.usefixtures("smooth_adam")
def test_an_agent_without_signal_makes_no_step_wherever_it_is(files, tmp_path, kl_coef):
    """Agent 1 gets equal rewards from the second step on: its momentum does not move it.

    The penalty is a reason to learn, for every step. In both placements the agents end with the
    same parameters.
    """
    (tmp_path / "once.py").write_text(
        "calls = []\n"
        "def once(prompts, completions, references):\n"
        "    calls.append(1)\n"
        "    varied = [p[0] == 'a' or len(calls) < 2 for p in prompts]\n"
        "    pairs = zip(varied, completions)\n"
        "    return [sum(map(ord, c)) % 7 / 7 if varies else 0.5 for varies, c in pairs]\n"
    )
    rows = [
        {"prompt": f"{'ar'[k % 2]} b c", "completion": "b", "topic": "xy"[k % 2]} for k in range(17)
    ]
    write_jsonl(tmp_path / "data.jsonl", rows)
    base = {
        "dataset": str(tmp_path / "data.jsonl"),
        "reward": f"{tmp_path / 'once.py'}:once",
        "partition": "topic",
    }
    base |= {
        "kl_coef": kl_coef,
        "missing_eos_penalty": 0.0,
        "eval_prompts": 0,
        "save_every": 1,
        "group_size": 6,
    }

    def train(folder):
        prpo_llm.main(tiny(files, tmp_path / folder, **base))
        return str(only_run(tmp_path / folder))

    together = Path(train("together"))
    apart = [Path(folder) for folder in in_ranks(lambda: train("first"), lambda: train("second"))]
    for agent in range(2):
        first, last = (checkpoint_of(together, agent, step) for step in (3, 4))
        other = checkpoint_of(apart[agent], agent, 4)
        torch.testing.assert_close(last["trained"], other["trained"], rtol=0, atol=1e-4)
        steps = [float(stored["optimizer"]["state"][0]["step"]) for stored in (last, other)]
        assert steps == [2 if agent == 1 and not kl_coef else 8] * 2
        assert torch.equal(first["trained"], last["trained"]) == (agent == 1 and not kl_coef)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_machines_without_a_common_disk(files, tmp_path, algorithm):
    """Two machines, each with its own folder: every agent's files are where it is, and a finished
    run is finished."""

    def train(folder, resume=""):
        argv = (
            to_resume(Path(resume))
            if resume
            else flags(tiny(files, tmp_path / folder, algorithm=algorithm))
        )
        with contextlib.chdir(tmp_path):
            summary = prpo_llm.main(parse_args(prpo_llm, argv))
        return str(only_run(tmp_path / folder)), summary["training_reward"], summary["evaluation"]

    (first, *results), (second, *results_too) = in_ranks(lambda: train("one"), lambda: train("two"))
    assert repr(results) == repr(results_too) and None not in results[0]["agents"]
    before = [Path(folder, "completions.jsonl").read_text() for folder in (first, second)]
    for agent, (folder, text) in enumerate(zip((first, second), before, strict=True)):
        rows = [json.loads(line) for line in text.splitlines()]
        assert {row["agent"] for row in rows} == {agent} and {row["step"] for row in rows} == {0, 4}
        assert Path(folder, f"agent_{agent}", "adapter_model.safetensors").is_file()
    (_, *again), _ = in_ranks(lambda: train("one", first), lambda: train("two", second))
    assert again == results
    assert before == [Path(folder, "completions.jsonl").read_text() for folder in (first, second)]


def test_completions_are_a_table_of_wandb(files, tmp_path, monkeypatch):
    """With --track every evaluation's completions are logged, one row each."""
    logged = []
    wandb = SimpleNamespace(init=lambda **_: None, finish=lambda: None)
    wandb.Table = lambda columns, data: (columns, data)
    wandb.log = logged.append
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    prpo_llm.main(tiny(files, tmp_path, total_steps=1, track=True))
    written = read_jsonl(only_run(tmp_path) / "completions.jsonl")
    tables = [tables_of_step["completions"] for tables_of_step in logged]
    assert len(tables) == 2
    assert [
        dict(zip(columns, row, strict=True)) for columns, data in tables for row in data
    ] == written
