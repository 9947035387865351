"""Tiny Llamas with a vocabulary of their own, trained from nothing in minutes.

What skills.py and babyai.py share.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM


def make_model(args, tokenizer, **settings) -> LlamaForCausalLM:
    """A model of --hidden-size and --layers; settings: what else its LlamaConfig says."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        intermediate_size=8 * args.hidden_size // 3,
        num_hidden_layers=args.layers,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **settings,
    )
    return LlamaForCausalLM(config)


def pad_examples(pairs: list[tuple], eos: int) -> tuple[Tensor, Tensor]:
    """Tokens [examples, longest], padded with EOS, and labels: the answer and EOS, else -100."""
    longest = max(len(prompt) + len(answer) for prompt, answer in pairs) + 1
    tokens = torch.full((len(pairs), longest), eos)
    labels = torch.full((len(pairs), longest), -100)
    for k, (prompt, answer) in enumerate(pairs):
        ids = torch.tensor([*prompt, *answer, eos])
        tokens[k, : len(ids)] = ids
        labels[k, len(prompt) : len(ids)] = ids[len(prompt) :]
    return tokens, labels


class Trainer:
    """AdamW for --steps; --learning-rate is reached after a tenth of them and falls by a cosine."""

    def __init__(self, args, model: LlamaForCausalLM):
        self.model = model
        self.optimizer = torch.optim.AdamW(
            model.parameters(), args.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
        )
        warmup = 0.1 if args.steps > 10 else 0.3  # OneCycleLR divides by its steps less one
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, args.learning_rate, args.steps, pct_start=warmup, final_div_factor=1e6
        )

    def step(self, tokens: Tensor, labels: Tensor) -> float:
        """One step on [examples, longest]; a label of -100 counts nothing. Returns the loss."""
        logits = self.model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        return loss.item()
