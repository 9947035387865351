"""What a run of prpo_llm.py needs of a GPU's memory, worked out from the shapes: no tensor has any data.

    python benchmark/llm_memory.py                                           # the table of docs/prpo_llm.md
    python benchmark/llm_memory.py --sizes 0.5B --prompt-tokens 512 --response-length 128

The model is built, and a row of a prompt with its group passed through it, under PyTorch's FakeTensorMode; what
autograd would keep is counted there. The cache of sampling and the states of references are products of sizes.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, Qwen2Config

sys.path.insert(0, str(Path(__file__).parent.parent))
import prpo_llm

QWEN = {  # hidden, intermediate, layers, heads, heads of keys, vocabulary, tied
    "0.5B": (896, 4864, 24, 14, 2, 151_936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151_936, True),
    "7B": (3584, 18_944, 28, 28, 4, 152_064, False),
}
NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


@dataclass
class Args:
    sizes: tuple[str, ...] = ("1.5B", "7B")
    """of Qwen 2.5"""
    agents: int = 7
    """agents, who all hear each other"""
    prompt_tokens: int = 2048
    """tokens of a prompt"""
    response_length: int = 512
    """tokens of a completion"""
    group_size: int = 8
    """completions per prompt"""
    batch_size: int = 4
    """prompts per agent and step"""


def kept(model, args: Args, held: int) -> int:
    """Bytes that autograd keeps of a pass of a row of each agent held, without what is kept anyway."""
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    shape, storages = (held, 1, args.group_size), {}

    def pack(tensor):
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    prompts, tokens = [[0] * args.prompt_tokens] * held, torch.zeros(*shape, args.response_length, dtype=torch.long)
    prpo_llm.Adapters.selected = "policy", None
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = prpo_llm.predict(model, {"prompts": prompts, "tokens": tokens, "lengths": Lengths(shape, tokens)})
    found = sum(storage.nbytes() for key, storage in storages.items() if key not in own)
    del hidden
    return found


class Lengths:
    """As many tokens in each completion: `predict` asks for the most, which has to be a number."""

    def __init__(self, shape, tokens):
        self.shape, self.max = shape, lambda: tokens.shape[-1]


def on_gpu(query, key, value, **options):
    """Attention as it is there, where heads that share keys get copies."""
    copies = (side.repeat_interleave(query.shape[1] // side.shape[1], dim=1) for side in (key, value))
    return torch.nn.functional.scaled_dot_product_attention(query, *copies, **options)


def estimate(args: Args, size: str, held: int) -> dict[str, float]:
    """Bytes of each part, for a process with `held` of the agents."""
    *sizes, vocabulary, tied = QWEN[size]
    settings = prpo_llm.Args(num_agents=args.agents, gradient_checkpointing=True)
    config = Qwen2Config(vocab_size=vocabulary, tie_word_embeddings=tied, **dict(zip(NAMES, sizes, strict=True)))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="shared_prefix").eval()
    model.requires_grad_(False)
    base = sum(parameter.nbytes for parameter in model.parameters()) + 4 * vocabulary * sizes[0]
    trained, snapshots = prpo_llm.add_adapters(settings, model, held)
    whole = kept(model, args, held)
    prpo_llm.checkpoint_layers(model)
    few = kept(model, args, held)
    tokens = args.prompt_tokens + args.group_size * args.response_length
    states = 2 * args.batch_size * args.group_size * args.response_length * sizes[0]
    parts = {
        "base model, float32 head": base,
        "adapters, gradients, AdamW": 4 * trained.nbytes,
        "snapshots of all": snapshots.nbytes,
        "rollout: cache, a prompt per agent": held * tokens * 4 * sizes[2] * sizes[4] * sizes[0] // sizes[3],
        "states of references": held * (args.agents + 1) * states,
        "update with --gradient-checkpointing, a prompt per agent": few + whole // sizes[2],
        "logits of a part of the tokens": 4 * 2**25 * (args.agents + 8),
    }
    more = {"update without --gradient-checkpointing": whole}
    return parts | {"**sum**": sum(parts.values())} | more | {"a checkpoint on disk": 4 * held * trained[0].nbytes}


def main(args: Args) -> None:
    """Print a table in Markdown."""
    places = [(size, held) for size in args.sizes for held in (1, args.agents)]
    prpo_llm.shared_heads = on_gpu
    with FakeTensorMode(allow_non_fake_inputs=True):
        columns = [estimate(args, size, held) for size, held in places]
    print("| GB |", *(f"{size}, {held} agent{'s' * (held > 1)} |" for size, held in places))
    print("| --- |" + " --- |" * len(places))
    for name in columns[0]:
        print(f"| {name} |", *(f"{column[name] / 1e9:.1f} |" for column in columns))


if __name__ == "__main__":
    main(tyro.cli(Args))
