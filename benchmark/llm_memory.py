"""What a run of prpo_llm.py needs of a GPU's memory, counted from the shapes: no tensor has any
data.

    python benchmark/llm_memory.py --csv benchmark/results/llm_memory.csv  # of docs/prpo_llm.md
    python benchmark/llm_memory.py --sizes 1.5B --held 7 --micro-batch-size 1 --batch-size 4
    python benchmark/llm_memory.py --sizes 1.5B --prompt-tokens 300 --write runs/1.5B

The defaults are the settings of `bash benchmark/llm.sh`, GRPO, with one of seven agents on a
GPU. The model is built, and a micro-batch is passed through it, under PyTorch's FakeTensorMode;
what autograd would keep is counted there. The cache of sampling and the states of references are
products of sizes. Not counted: CUDA's own context, and memory that the allocator holds in pieces
too small to be used.

--write stores a model of that size with random weights, and prompts of --prompt-tokens random words
unless --task has others: prpo_llm.py trains it like any other, and logs the memory that it takes.
"""

import json
import random
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from arguments import read_flags, refuse
from tokenizers import Tokenizer, models, pre_tokenizers
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

sys.path.insert(0, str(Path(__file__).parent.parent))
import communicators
import prpo_llm

# Size -> what NAMES are
MODELS = {
    "tiny": (64, 128, 2, 4, 2, 512, True),  # of tests
    "135M": (576, 1536, 30, 9, 3, 49_152, True),  # SmolLM2
    "0.5B": (896, 4864, 24, 14, 2, 151_936, True),  # Qwen 2.5
    "1.5B": (1536, 8960, 28, 12, 2, 151_936, True),  # Qwen 2.5
    "7B": (4096, 14_336, 32, 32, 8, 32_000, False),  # Mistral v0.2
    "8B": (4096, 14_336, 32, 32, 8, 128_256, False),  # Llama 3.1
}
NAMES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class Args:
    sizes: tuple[str, ...] = ("1.5B", "7B", "8B")
    """models, by their number of parameters"""
    agents: int = 7
    """agents, each of which receives from all others"""
    held: int = 1
    """agents of one process"""
    prompt_tokens: int = 512
    """tokens of a prompt, at most"""
    response_length: int = 58
    """tokens of a completion, at most"""
    group_size: int = 8
    """completions per prompt"""
    batch_size: int = 8
    """prompts per agent and step"""
    micro_batch_size: int = 1
    """prompts per agent that pass through the model at once in an update"""
    rollout_batch_size: int = 0
    """prompts per agent that are completed at once (0: the whole batch)"""
    reward_model: bool = True
    """the reward is a model of the same size, in --precision"""
    csv: str = ""
    """file to write the table to"""
    write: str = ""
    """folder to write a model of the first size to instead, with random weights"""
    task: str = ""
    """folder with its tokenizer and prompts, which trl_grpo.py --prepare makes (default: words)"""


class Lengths:
    """As many tokens in each completion: `predict` takes their maximum, which has to be a
    number.
    """

    def __init__(self, shape, tokens):
        self.shape = shape
        self.max = lambda: tokens.shape[-1]
        self.dim = lambda: len(shape)


def count_kept(model, args: Args) -> int:
    """Bytes that autograd keeps of a pass of a micro-batch of each agent held, without the
    parameters.
    """
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    shape = args.held, args.micro_batch_size, args.group_size
    prompts = [[0] * args.prompt_tokens] * (args.held * args.micro_batch_size)
    tokens = torch.zeros(*shape, args.response_length, dtype=torch.long)
    batch = {"prompts": prompts, "tokens": tokens, "lengths": Lengths(shape, tokens)}
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with prpo_llm.select_adapters("policy"), hooks:
        hidden = prpo_llm.compute_hidden(model, batch)
    kept = sum(storage.nbytes() for key, storage in storages.items() if key not in parameters)
    del hidden
    return kept


def make_config(shape: tuple, **options) -> LlamaConfig:
    """The configuration of a model of these sizes."""
    sizes = dict(zip(NAMES, shape, strict=True))
    return LlamaConfig(**sizes, max_position_embeddings=8192, **options)


def build_model(shape: tuple) -> torch.nn.Module:
    """A model of these sizes in bfloat16, with our attention."""
    options = {"dtype": torch.bfloat16, "attn_implementation": "shared_prefix"}
    model = AutoModelForCausalLM.from_config(make_config(shape), **options)
    return model.eval().requires_grad_(False)


def write_words(args: Args, size: int) -> None:
    """A tokenizer whose tokens are words without meaning, and prompts of them."""
    vocabulary = {f"w{k}": k for k in range(size - 1)} | {"<eos>": size - 1}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "<eos>", "pad_token": "<eos>", "unk_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(args.write)
    rng = random.Random(0)
    with open(Path(args.write, "prompts.jsonl"), "w") as file:
        for _ in range(1000):
            lengths = {"prompt": args.prompt_tokens, "completion": 20}
            row = {}
            for name, length in lengths.items():
                row[name] = " ".join(f"w{rng.randrange(size - 1)}" for _ in range(length))
            file.write(json.dumps(row) + "\n")


@torch.no_grad()
def never_end(model, eos: int) -> None:
    """Let the end of a text have no probability, so that all completions have full length.

    The first number of every token's embedding is large and positive, that of the end in the head
    is negative.
    """
    model.get_input_embeddings().weight[:, 0] = 1.0
    model.get_output_embeddings().weight[eos, 0] = -1.0


def write_model(args: Args, shape: tuple) -> None:
    """A folder to train from: a model of these sizes with random weights, tokenizer, prompts."""
    if args.task:
        tokenizer = AutoTokenizer.from_pretrained(args.task)
        tokenizer.save_pretrained(args.write)
        shutil.copy(Path(args.task, "prompts.jsonl"), args.write)
    else:
        write_words(args, shape[NAMES.index("vocab_size")])
        tokenizer = AutoTokenizer.from_pretrained(args.write)
    config = make_config(shape, eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    torch.manual_seed(0)
    with communicators.set_device("auto"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    never_end(model, tokenizer.eos_token_id)
    model.save_pretrained(args.write)


def estimate(args: Args, shape: tuple, logits_at_once: int = 2**25) -> dict[str, float]:
    """Bytes of each part of a process."""
    hidden, intermediate, layers, heads, key_heads, vocabulary, tied = shape
    settings = prpo_llm.Args(num_agents=args.agents, lora_targets=TARGETS)
    model = build_model(shape)
    decoder = sum(parameter.nbytes for parameter in model.get_decoder().parameters())
    trained, snapshots = prpo_llm.add_adapters(settings, model, args.held)
    whole = count_kept(model, args)
    prpo_llm.checkpoint_layers(model)
    inputs = count_kept(model, args)
    prompts = args.held * (args.rollout_batch_size or args.batch_size)
    cached = prompts * (args.prompt_tokens + args.group_size * args.response_length)
    keys = 2 * layers * key_heads * hidden // heads  # and values, of a token
    of_layer = 3 * intermediate + 4 * hidden  # of a token, while a layer computes
    tokens = args.held * args.micro_batch_size * args.group_size * args.response_length
    resident = {
        "base model, head in float32": decoder + 4 * vocabulary * hidden,
        "adapters, gradients, AdamW": 4 * trained.nbytes,
        "snapshots of all agents": snapshots.nbytes,
        "reward model": decoder if args.reward_model else 0,
    }
    rollout = {
        "rollout: keys and values": 2 * cached * keys,
        "rollout: a layer of all prompts": 2 * prompts * args.prompt_tokens * of_layer,
    }
    states = 2 * tokens * hidden * args.agents
    logits = 4 * logits_at_once * (args.agents + 5)
    of_one_layer = whole // layers
    update = {
        "update: states of references": states,
        "update: logits of a part of the tokens": logits,
        "update: inputs of layers, with --gradient-checkpointing": inputs,
        "update: a layer's activations, with it": of_one_layer,
        "update: activations without": whole,
    }
    common = sum(resident.values())
    # A layer is computed again when the logits are gone
    checkpointed = states + inputs + max(logits, of_one_layer)
    last = {
        "**peak with --gradient-checkpointing**": common + max(sum(rollout.values()), checkpointed),
        "peak without": common + states + logits + whole,
        "a checkpoint on disk": 4 * args.held * trained[0].nbytes,
    }
    return resident | rollout | update | last


def main(args: Args) -> None:
    """Print the table, and write it to --csv; or write a model."""
    unknown = sorted({*args.sizes} - MODELS.keys())
    if unknown or not args.sizes:
        refuse(f"--sizes {' '.join(unknown)}: choose from {', '.join(MODELS)}")
    if args.write:
        if args.task and not Path(args.task, "prompts.jsonl").is_file():
            refuse(f"--task {args.task}: must be a folder with tokenizer and prompts.jsonl")
        return write_model(args, MODELS[args.sizes[0]])
    with FakeTensorMode(allow_non_fake_inputs=True):
        columns = [estimate(args, MODELS[size]) for size in args.sizes]
    table = pd.DataFrame(columns, index=args.sizes).T / 1e9
    text = table.to_csv(index_label="GB", float_format="%.1f")
    print(text, end="")
    if args.csv:
        command = f"# python benchmark/llm_memory.py {shlex.join(sys.argv[1:])}\n"
        path = Path(args.csv)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(command + text)


if __name__ == "__main__":
    main(read_flags(Args))
