"""GRPO of isolated agents in text worlds with transformers' own `generate` and autograd over the
whole sequence: the yardstick of prpo_babyai.py's speed.

    python benchmark/baselines/text_loop.py
    python prpo_babyai.py --aggregation none --total-steps 1 --eval-episodes 0

It is what one would write first with transformers and PEFT: agent by agent; every turn calls
`generate` for all its running episodes, left-padded; log-probabilities are of rows of prompt and
answer. World, tasks, random order, loss and optimizer are those of prpo_babyai.py; it neither
resumes, evaluates nor logs. Its summary.json has what throughput.py reads.
"""

import json
import sys
import time
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from arguments import read_flags

import prpo_babyai
from communicators import derive_seed


@dataclass
class Args:
    base_model: str = "runs/babyai/model"
    """a folder of transformers; what benchmark/babyai.py writes"""
    num_agents: int = 3
    """number of agents, each with its own adapter"""
    total_steps: int = 1
    """steps of each agent"""
    batch_size: int = 4
    """tasks per agent and step"""
    seed: int = 1
    """seed of everything random"""
    run_dir: str = "runs"
    """folder that holds one folder per run"""


def pad_left(rows: list[list[int]], filler: int) -> tuple[Tensor, Tensor]:
    """Tokens [rows, longest] with the filler on the left, and what is not filler."""
    longest = max(map(len, rows))
    tokens = torch.tensor([[filler] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return tokens, mask


@torch.no_grad()
def play(settings: prpo_babyai.Args, model, tokenizer, episodes: list) -> None:
    """Play an agent's episodes to their ends."""
    eos = tokenizer.eos_token_id
    while running := [episode for episode in episodes if not episode.ended]:
        prompts = prpo_babyai.encode_prompts(settings, tokenizer, running)
        tokens, mask = pad_left(prompts, eos)
        output = model.generate(
            input_ids=tokens,
            attention_mask=mask,
            do_sample=True,
            temperature=settings.temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=settings.response_length,
            pad_token_id=eos,
        )
        for episode, prompt, row in zip(running, prompts, output.tolist(), strict=True):
            answer = row[tokens.shape[1] :]
            if eos in answer:
                answer = answer[: answer.index(eos) + 1]
            text = tokenizer.decode(answer, skip_special_tokens=True)
            episode.act(prompt, answer, torch.zeros(len(answer)), text)


def compute_log_probs(settings: prpo_babyai.Args, model, turns: list) -> tuple[Tensor, ...]:
    """Log-probabilities [turns, tokens, vocabulary], the next tokens and where these are answers,
    of rows of prompt and answer."""
    rows = [turn.prompt + turn.answer for turn in turns]
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    positions = torch.arange(tokens.shape[1])
    mask = positions < lengths[:, None]
    starts = torch.tensor([len(turn.prompt) for turn in turns])
    in_answer = mask & (positions >= starts[:, None])
    logits = model(input_ids=tokens, attention_mask=mask.long(), use_cache=False).logits[:, :-1]
    log_probs = (logits / settings.temperature).log_softmax(-1)
    return log_probs, tokens[:, 1:], in_answer[:, 1:]


@torch.no_grad()
def compute_old(settings: prpo_babyai.Args, model, turns: list) -> tuple[list, list]:
    """Of every turn's answer: the old policy's log-probabilities [tokens], and the first policy's,
    which is the reference, [tokens, vocabulary]."""
    old = []
    references = []
    for first in range(0, len(turns), settings.micro_batch_size):
        chosen = turns[first : first + settings.micro_batch_size]
        log_policy, tokens, in_answer = compute_log_probs(settings, model, chosen)
        with model.disable_adapter():
            log_reference, *_ = compute_log_probs(settings, model, chosen)
        of_tokens = log_policy.gather(-1, tokens[..., None]).squeeze(-1)
        for k in range(len(chosen)):
            old.append(of_tokens[k, in_answer[k]])
            references.append(log_reference[k, in_answer[k]])
    return old, references


def learn(
    settings: prpo_babyai.Args,
    model,
    optimizer: torch.optim.Optimizer,
    turns: list,
    advantages: Tensor,
    old: list,
    references: list,
    inds: list[int],
) -> None:
    """One optimizer step of an agent on these turns."""
    number = sum(len(turns[k].answer) for k in inds)
    optimizer.zero_grad()
    for first in range(0, len(inds), settings.micro_batch_size):
        micro = inds[first : first + settings.micro_batch_size]
        chosen = [turns[k] for k in micro]
        log_probs, tokens, in_answer = compute_log_probs(settings, model, chosen)
        log_policy = log_probs[in_answer]  # [tokens, vocabulary]
        newlogprobs = log_policy.gather(-1, tokens[in_answer][:, None]).squeeze(-1)
        ratio = (newlogprobs - torch.cat([old[k] for k in micro])).exp()
        of_tokens = torch.cat([advantages[k].expand(len(turns[k].answer)) for k in micro])
        clipped = ratio.clamp(1 - settings.clip_coef, 1 + settings.clip_coef)
        surrogate = torch.min(ratio * of_tokens, clipped * of_tokens)
        bounded = surrogate.max(settings.dual_clip * of_tokens)
        surrogate = torch.where(of_tokens < 0, bounded, surrogate)
        log_reference = torch.cat([references[k] for k in micro])
        kl = (log_policy.exp() * (log_policy - log_reference)).sum(-1)
        entropy = -(log_policy.exp() * log_policy).sum(-1)
        loss = -surrogate + settings.kl_coef * kl - settings.ent_coef * entropy
        (loss.sum() / number).backward()
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    torch.nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm)
    optimizer.step()


def main(args: Args) -> None:
    settings = prpo_babyai.Args(
        base_model=args.base_model,
        num_agents=args.num_agents,
        aggregation="none",
        batch_size=args.batch_size,
        seed=args.seed,
    )
    make = prpo_babyai.load_world(settings)
    pool = prpo_babyai.list_tasks(settings, make)
    tasks = prpo_babyai.deal_tasks(settings, make, pool, None, None)
    tokenizer = AutoTokenizer.from_pretrained(args.base_model)
    config = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        target_modules=list(settings.lora_targets),
    )
    models = []
    optimizers = []
    for _ in range(args.num_agents):
        base = AutoModelForCausalLM.from_pretrained(args.base_model, dtype=torch.float32)
        model = get_peft_model(base, config).eval()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        rate = settings.learning_rate
        models.append(model)
        optimizers.append(torch.optim.AdamW(trained, rate, weight_decay=0.0))
    torch.manual_seed(args.seed)
    clock = Counter()
    successes = []
    began = time.perf_counter()
    for step in range(1, args.total_steps + 1):
        for k, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            last = time.perf_counter()
            (episodes,) = prpo_babyai.start_episodes(settings, make, [k], tasks, step)
            play(settings, model, tokenizer, episodes)
            shape = (1, settings.batch_size, settings.group_size)
            returns = torch.tensor([episode.total for episode in episodes]).view(shape)
            lengths = torch.tensor([len(episode.turns) for episode in episodes]).view(shape)
            advantages = prpo_babyai.compute_advantages(settings, returns, lengths).flatten()
            of_turns = advantages.repeat_interleave(lengths.flatten())
            turns = [turn for episode in episodes for turn in episode.turns]
            successes += [episode.success for episode in episodes]
            clock["rollout"] += time.perf_counter() - last
            last = time.perf_counter()
            old, references = compute_old(settings, model, turns)
            clock["reference"] += time.perf_counter() - last
            last = time.perf_counter()
            for epoch in range(settings.update_epochs):
                seed = derive_seed(args.seed, k, step, epoch)
                order = torch.randperm(len(turns), generator=torch.Generator().manual_seed(seed))
                for inds in order.split(settings.minibatch_size or len(turns)):
                    inputs = turns, of_turns, old, references, inds.tolist()
                    learn(settings, model, optimizer, *inputs)
            clock["update"] += time.perf_counter() - last
    seconds = time.perf_counter() - began
    summary = {
        "seed": args.seed,
        "device": "cpu",
        "steps": args.total_steps,
        "training_success": {"agents": [sum(successes) / len(successes)] * args.num_agents},
        "episodes_per_second": len(successes) / seconds,
        "train_seconds": seconds,
        "seconds": dict(clock),
        "versions": {name: version(name) for name in ("torch", "transformers", "peft", "minigrid")},
    }
    folder = Path(args.run_dir, f"text_loop__{args.seed}__{int(time.time())}")
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(f"{summary['episodes_per_second']:.2f} episodes/s, {dict(clock)}")


if __name__ == "__main__":
    main(read_flags(Args))
