"""A laptop-size task for language models: a tiny Llama, pretrained here on string skills of which one is rare.

    python benchmark/skills.py  # half a minute, once: runs/skills/model and runs/skills/train.jsonl
    python prpo_llm.py --base-model runs/skills/model --dataset runs/skills/train.jsonl --partition topic \\
        --reward benchmark/skills.py:exact --precision float32 --missing-eos-penalty 0
    python benchmark/skills.py --runs runs/skills-results  # what each agent can do before and after, skill by skill

A prompt is a skill and a word, "reverse abcd:"; the completion is "dcba". The model has learned all skills but the rare
one, of which it has seen little, and does it right now and then: enough for a reward of 1 for exactly the right word,
and 0 for anything else, to teach it. A prompt's topic is the agent whose it is: agents differ in how many of their
prompts ask for the rare skill (--prompt-shares), or all have the same mix with --partition iid. No prompt occurred in
the pretraining. The same settings give the same files; what is there already is not made again.
"""

import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from string import ascii_letters, ascii_lowercase

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
import tyro
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SKILLS: dict[str, Callable[[str], str]] = {
    "copy": lambda word: word,
    "upper": str.upper,
    "reverse": lambda word: word[::-1],
    "double": lambda word: "".join(2 * letter for letter in word),
    "rotate": lambda word: word[1:] + word[:1],
    "mirror": lambda word: word + word[::-1],
}
EOS = "<eos>"


@dataclass
class Args:
    out: str = "runs/skills"
    """folder to write: model/, train.jsonl, and settings.json, which comes last"""
    runs: str = ""
    """write no task but a table of the finished runs in this folder: the rare skill and the others, before and after"""
    csv: str = ""
    """file for this table, a row per run and agent, with its command (empty: standard output)"""
    seed: int = 1
    """seed of everything random"""
    rare: str = "mirror"
    """the rare skill: copy, upper, reverse, double, rotate or mirror"""
    rare_share: float = 0.025
    """share of the rare skill in the pretraining; the others have equal parts of the rest"""
    prompt_shares: tuple[float, ...] = (0.05, 0.2, 0.8)
    """share of the rare skill in the prompts of each agent"""
    prompts: int = 600
    """prompts of each agent, held-out ones included"""
    word_lengths: tuple[int, int] = (3, 6)
    """shortest and longest word"""
    steps: int = 1200
    """optimizer steps of the pretraining, at most"""
    rare_success: float = 0.25
    """the pretraining ends when the rare skill, sampled, is right this often: it comes suddenly (1: after all steps)"""
    batch_size: int = 64
    """examples of an optimizer step"""
    learning_rate: float = 4e-3
    """highest learning rate, after a tenth of the steps; from there it falls to 0 by a cosine"""
    hidden_size: int = 64
    """width of the model"""
    layers: int = 2
    """layers of the model"""


def check_args(args: Args) -> None:
    """Ends with one line that names the flag, its value and what would be valid."""
    (shortest, longest), shares = args.word_lengths, (args.rare_share, *args.prompt_shares)
    for flag, wrong, valid in (
        ("rare", args.rare not in SKILLS, f"must be one of {', '.join(SKILLS)}"),
        ("rare_share", not 0 <= shares[0] < 1, "must lie in [0, 1)"),
        ("prompt_shares", not all(0 <= share <= 1 for share in shares[1:]), "must lie in [0, 1]"),
        ("word_lengths", not 1 <= shortest <= longest, "must be positive, first the shortest"),
        ("prompts", not 1 <= args.prompts <= 26**shortest // 2, f"must lie in [1, {26**shortest // 2}]"),
        ("hidden_size", args.hidden_size < 8 or args.hidden_size % 8, "must be a multiple of 8"),
        *((name, getattr(args, name) < 1, "must be at least 1") for name in ("steps", "batch_size", "layers")),
        ("rare_success", not 0 < args.rare_success <= 1, "must lie in (0, 1]"),
        ("learning_rate", not args.learning_rate > 0, "must be positive"),
    ):
        if wrong:
            value = getattr(args, flag)
            value = " ".join(map(str, value)) if isinstance(value, tuple) else value
            sys.exit(f"--{flag.replace('_', '-')} {value}: {valid}")


def exact(completions: list[str], references: list[str], **_) -> list[float]:
    """The reward: 1 for the reference and nothing else, not even a space; 0 for anything else."""
    return [float(said == wanted) for said, wanted in zip(completions, references, strict=True)]


def make_example(skill: str, word: str) -> dict[str, str]:
    """A prompt and its only right completion."""
    return {"prompt": f"{skill} {word}:", "completion": SKILLS[skill](word), "skill": skill}


def examples(rng: random.Random, args: Args, rare_share: float, without=frozenset()) -> Iterator[dict[str, str]]:
    """Random examples without end, the rare skill with probability `rare_share`, none with a prompt of `without`."""
    common = [skill for skill in SKILLS if skill != args.rare]
    while True:
        skill = args.rare if rng.random() < rare_share else rng.choice(common)
        word = "".join(rng.choices(ascii_lowercase, k=rng.randint(*args.word_lengths)))
        if (example := make_example(skill, word))["prompt"] not in without:
            yield example


def make_prompts(args: Args) -> list[dict[str, str]]:
    """The agents' examples, all different: `args.prompts` of each, its share of the rare skill to the nearest one."""
    rng, rows, seen = random.Random(f"prompts {args.seed}"), [], set()
    for agent, share in enumerate(args.prompt_shares):
        rare = round(share * args.prompts)
        own = []
        for count, certain in ((rare, 1.0), (args.prompts - rare, 0.0)):
            for _ in range(count):
                example = next(examples(rng, args, certain, seen))
                seen.add(example["prompt"])
                own.append(example | {"topic": f"agent {agent}, {share:.0%} {args.rare}"})
        rows += rng.sample(own, len(own))
    return rows


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for every letter, the space and the colon; decoding puts nothing between them."""
    vocabulary = {token: k for k, token in enumerate((EOS, *ascii_letters, " ", ":"))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=EOS))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"eos_token": EOS, "pad_token": EOS, "unk_token": EOS}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)


def encode(tokenizer, batch: list[dict[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [examples, longest], padded with EOS, and labels: what follows the prompt, with one EOS, else -100."""
    code, rows, labels = tokenizer.get_vocab(), [], []
    longest = max(len(own["prompt"]) + len(own["completion"]) for own in batch) + 1
    for own in batch:
        ids = [code[letter] for letter in own["prompt"] + own["completion"]] + [code[EOS]]
        padding, asked = longest - len(ids), len(own["prompt"])
        rows.append(ids + [code[EOS]] * padding)
        labels.append([-100] * asked + ids[asked:] + [-100] * padding)
    return torch.tensor(rows), torch.tensor(labels)


def pretrain(args: Args, tokenizer, without: set[str]) -> LlamaForCausalLM:
    """The tiny model, trained on what follows the prompts of endless examples, on one core."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # more would be slower at this size, and round differently
    shape = {"hidden_size": args.hidden_size, "intermediate_size": 8 * args.hidden_size // 3}
    heads = {"num_hidden_layers": args.layers, "num_attention_heads": 4, "max_position_embeddings": 128}
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape, **heads, **ends))
    optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.learning_rate, args.steps, pct_start=0.1, final_div_factor=1e6
    )
    stream = examples(random.Random(f"pretraining {args.seed}"), args, args.rare_share, without)
    others = examples(random.Random(f"probe {args.seed}"), args, 1.0, without)
    probe = [next(others) for _ in range(100)]
    began, shown = time.monotonic(), max(args.steps // 10, 1)
    for step in range(1, args.steps + 1):
        tokens, labels = encode(tokenizer, [next(stream) for _ in range(args.batch_size)])
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % shown == 0:
            left = (time.monotonic() - began) / step * (args.steps - step)
            print(f"pretraining: step {step}/{args.steps}, loss {loss.item():.3f}, {left:.0f} s left", flush=True)
        if step % 10 == 0 and success(model, tokenizer, probe).mean() >= args.rare_success:
            break
    else:
        if args.rare_success < 1:
            print(f"{args.rare} is right less often than --rare-success {args.rare_success}; more --steps may help")
    return model.eval()


@torch.no_grad()
def success(model, tokenizer, batch: list[dict[str, str]]) -> torch.Tensor:
    """The probability that sampling completes each prompt exactly: [examples]."""
    tokens, labels = encode(tokenizer, batch)
    log_probs = model(input_ids=tokens[:, :-1], use_cache=False).logits.log_softmax(-1)
    labels = labels[:, 1:]
    said = log_probs.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    return (said * (labels >= 0)).sum(-1).exp()


def tabulate(args: Args) -> pd.DataFrame:
    """A row per run and agent: the share of held-out prompts that it completes exactly, before and after training.

    Prompts of all evaluated tasks, each once, completed greedily; those for the rare skill and the others apart.
    """
    sys.path.insert(0, str(Path(__file__).parent))
    from plot import Args as PlotArgs
    from plot import header, read_groups, write

    rows, groups = [], read_groups(PlotArgs(runs=(args.runs,)))
    groups = {name: own for name, own in groups.items() if "dataset" in own[0].settings}  # not those of control
    for run in (run for own in groups.values() for run in own):
        (name,) = np.atleast_1d(run.settings["dataset"])  # a word, in runs before a data set per agent was possible
        data = [json.loads(line) for line in Path(name).read_text().splitlines()]
        said = pd.read_json(run.folder / "completions.jsonl", lines=True).drop_duplicates(["step", "agent", "id"])
        said["kind"] = [args.rare if data[k]["skill"] == args.rare else "others" for k in said.id]
        said["when"] = said.step.map({said.step.min(): "before", said.step.max(): "after"})
        means = said.groupby(["agent", "kind", "when"]).reward.agg(["mean", "size"]).unstack(["kind", "when"])
        for agent, own in means.iterrows():
            row = {"method": run.settings["exp_name"], "seed": run.settings["seed"], "agent": agent}
            for kind in (args.rare, "others"):
                row |= {f"{kind}_prompts": int(own["size", kind, "after"])}
                row |= {f"{kind}_{when}": own["mean", kind, when] for when in ("before", "after")}
            rows.append(row)
    table = pd.DataFrame(rows)
    if args.csv:
        write(Path(args.csv), header(groups), table)
    else:
        print(table.to_string(index=False, float_format="%.3f"))
    return table


def main(args: Args) -> dict[str, float]:
    """Write the task, if it is not there. Returns how often the model does each skill right, when sampled."""
    check_args(args)
    out, settings = Path(args.out), asdict(args) | {"out": ""}
    settings = {name: value for name, value in json.loads(json.dumps(settings)).items() if name not in ("runs", "csv")}
    if (out / "settings.json").is_file():
        found = json.loads((out / "settings.json").read_text())
        rates = found.pop("rates")
        if other := [name for name in settings if found.get(name) != settings[name]]:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in other)
            sys.exit(f"--out {args.out}: was made with another {flags}; choose another folder, or delete it")
        print(f"{out}: there already")
    else:
        prompts, tokenizer = make_prompts(args), make_tokenizer()
        model = pretrain(args, tokenizer, {own["prompt"] for own in prompts})
        stream = examples(random.Random(f"rates {args.seed}"), args, 1 / len(SKILLS))
        fresh = [next(stream) for _ in range(200 * len(SKILLS))]
        right = success(model, tokenizer, fresh)
        rates = {name: round(right[[own["skill"] == name for own in fresh]].mean().item(), 4) for name in SKILLS}
        shutil.rmtree(out / "model", ignore_errors=True)
        model.save_pretrained(out / "model")
        tokenizer.save_pretrained(out / "model")
        (out / "train.jsonl").write_text("".join(json.dumps(own) + "\n" for own in prompts))
        ready = out / f"settings.{os.getpid()}"  # under its name only when all is there
        ready.write_text(json.dumps(settings | {"rates": rates}, indent=1) + "\n")
        ready.replace(out / "settings.json")
    for name, rate in rates.items():
        print(f"{name:8} right {rate:6.1%} of the time{', the rare skill' if name == args.rare else ''}")
    return rates


if __name__ == "__main__":
    asked = tyro.cli(Args, description=__doc__)
    tabulate(asked) if asked.runs else main(asked)
