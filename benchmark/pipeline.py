"""What lies between TRL's commands in the pipeline of benchmark/pipeline.sh: data, merged adapters, held-out accuracy.

    python benchmark/pipeline.py data --out runs/docstrings
    python benchmark/pipeline.py merge --model runs/docstrings/sft-adapter --out runs/docstrings/sft
    python benchmark/pipeline.py accuracy --model runs/docstrings/reward --pairs runs/docstrings/reward-pairs/test.jsonl

data: SmolLM2 as a folder that TRL can read, and the docstrings in four parts that share no prompt: sft, reward-pairs,
judge-pairs (each with train.jsonl and test.jsonl) and prompts.jsonl, for prpo_llm.py --dataset. Prompts stand in the
model's chat template. In a pair the docstring's own first line is preferred to a text that is worse by construction:
`other` is the first line of another docstring of the library; `truncated` the first half of its own words; `lead` as
many of the body's first words; `padded` its own with another one behind it; `shuffled` its own words in random order;
`constant` the text that beats an untrained model under ROUGE. Training pairs take these in turn, test pairs all.

merge: a LoRA adapter, of a language model or a reward model, and its base in one folder, in float32, since bfloat16
would lose most of a small update.

accuracy: how often a reward model ranks held-out pairs rightly, by kind of the rejected text, with Wilson's interval,
in which all pairs of a prompt count as one; where the kinds are those above also the ROUGE-L of each against the first
line.
"""

import hashlib
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import docstrings
import numpy as np
import pandas as pd
import torch
import transformers
import tyro
from datasets import load_dataset
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification
from plot import comments_of
from rouge_score.rouge_scorer import RougeScorer
from scipy import stats

sys.path.insert(0, str(Path(__file__).parents[1]))
import prpo_llm

CONSTANT = "Return a of the."
KINDS = ("other", "truncated", "lead", "padded", "shuffled", "constant")
PARTS = {"sft": 0.3, "reward-pairs": 0.6, "judge-pairs": 0.75, "prompts": 1.0}  # where each ends, of all docstrings


@dataclass
class Args:
    step: tyro.conf.Positional[Literal["data", "merge", "accuracy"]]
    """what to do"""
    model: str = ""  # merge: folder of the adapter; accuracy: the reward model, a folder or hub id
    pairs: str = (
        ""  # accuracy: pairs, a JSONL file or the validation split of a hub id: prompt, chosen, rejected, kind or not
    )
    out: str = ""  # data, merge: folder to write; accuracy: CSV file, which gets rows for each reward model
    max_prompt_tokens: int = 128  # data: longer prompts are left out
    limit: int = 0  # data: docstrings of each part; accuracy: pairs (0: all)


def part_of(prompt: str) -> str:
    """The part that a docstring belongs to, a function of its text alone, so that no other choice moves it."""
    place = int(hashlib.sha256(prompt.encode()).hexdigest()[:8], 16) / 2**32
    return next(part for part, end in PARTS.items() if place < end)


def worse(example: dict, others: list[str], rng: random.Random) -> dict[str, str]:
    """A worse text of every kind than the docstring's own first line. others: first lines of the same library."""
    own, body = example["completion"], example["request"].split("\n\n", 1)[1]
    words, other = own.split(), next(line for line in rng.sample(others, len(others)) if line != own)
    found = {"other": other, "truncated": " ".join(words[: len(words) // 2]), "padded": f"{own} {other}"}
    found |= {"lead": " ".join(body.split()[: len(words)]), "constant": CONSTANT}
    found["shuffled"] = " ".join(rng.sample(words, len(words)))
    return {kind: text for kind in KINDS if (text := found[kind]) and text != own}


def read_rows(name: str, split: str = "train", prompt: str = "prompt", completion: str = "completion") -> list[dict]:
    """The rows of a JSONL file, or of a split of a local folder or hub id (:split); or the docstrings.

    What prpo_llm.py calls --prompt-column and --completion-column are texts here; `messages` is a prompt of messages.
    """
    name = docstrings.cached() if name == "docstrings" else name
    if Path(name).is_file():
        rows = [json.loads(line) for line in Path(name).read_bytes().split(b"\n") if line.strip()]
    else:
        name, _, own = name.partition(":")
        rows = load_dataset(name, split=own or split).to_list()
    for row in rows:
        row |= {"messages": row[prompt]} if isinstance(row.get(prompt), list) else {}
        row |= {
            new: prpo_llm.text_of(row[old])
            for old, new in ((prompt, "prompt"), (completion, "completion"))
            if old in row
        }
    return rows


def load_scorer(name: str) -> Callable[[list, list[str]], list[float]]:
    """The scores of a reward model for completions of prompts, texts or messages, as TRL trains it on both together."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(name, padding_side="right")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = transformers.AutoModelForSequenceClassification.from_pretrained(name, num_labels=1)
    model.config.pad_token_id = tokenizer.pad_token_id  # the score is read at the last token that is not padding
    device = 0 if torch.cuda.is_available() else "cpu"
    classify = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer, device=device)

    def score(prompts: list, completions: list[str]) -> list[float]:
        if isinstance(prompts[0], list):
            completions = [[{"role": "assistant", "content": text}] for text in completions]
        texts, chat = prpo_llm.join_texts(tokenizer, prompts, completions)
        options = {"batch_size": 8, "function_to_apply": "none", "add_special_tokens": not chat}
        order = sorted(range(len(texts)), key=lambda k: len(texts[k]))  # little padding
        found = classify([texts[k] for k in order], **options)
        return [found[place]["score"] for place in sorted(range(len(texts)), key=order.__getitem__)]

    return score


def write_lines(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} in {path}")


def write_base(folder: Path):
    """SmolLM2 from its GGUF file as a folder that every library loads. Returns its tokenizer."""
    source, where = prpo_llm.find_base("smollm2")
    tokenizer, options = transformers.AutoTokenizer.from_pretrained(source, **where), {"dtype": torch.bfloat16}
    quantized = {"quantization_config": transformers.GgufConfig(dequantize=True)}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(source, **where, **options, **quantized)
    base = transformers.AutoModelForCausalLM.from_config(loaded.config, **options)  # what was loaded cannot be saved
    base.load_state_dict(loaded.state_dict())
    base.generation_config.eos_token_id = base.config.eos_token_id = tokenizer.eos_token_id
    base.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def data(args: Args) -> None:
    """Write the base model and the four parts."""
    out, examples = Path(args.out), []
    tokenizer = write_base(out / "base")
    for row in read_rows("docstrings"):
        chat = [{"role": "user", "content": row["prompt"]}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        if len(text) <= 12 * args.max_prompt_tokens and len(tokenizer(text)["input_ids"]) <= args.max_prompt_tokens:
            examples.append(row | {"request": row["prompt"], "prompt": text})
    parts = {part: [row for row in examples if part_of(row["request"]) == part] for part in PARTS}
    for part, rows in parts.items():
        random.Random(0).shuffle(rows)
        rows = rows[: args.limit or None]
        held_out = max(1, min(200, len(rows) // 10))
        sets = {"test": rows[:held_out], "train": rows[held_out:]} if part != "prompts" else {"": rows}
        for name, own in sets.items():
            kept = ("prompt", "completion", "topic", "request")[: 4 if part == "prompts" else 2]
            columns = [{key: row[key] for key in kept} for row in own]
            if part.endswith("-pairs"):
                columns = pairs(own, rows, every=name == "test")
            write_lines(out / part / f"{name}.jsonl" if name else out / f"{part}.jsonl", columns)


def pairs(examples: list[dict], others: list[dict], every: bool) -> list[dict]:
    """Pairs of these examples: with a rejected text of every kind, or of each kind in turn."""
    rng, found = random.Random(1), []
    topics = {row["topic"] for row in examples}
    lines = {topic: [row["completion"] for row in others if row["topic"] == topic] for topic in topics}
    for number, example in enumerate(examples):
        texts = worse(example, lines[example["topic"]] + [CONSTANT], rng)
        kinds = list(texts) if every else [list(texts)[number % len(texts)]]
        common = {"prompt": example["prompt"], "chosen": example["completion"]}
        found += [common | {"rejected": texts[kind], "kind": kind} for kind in kinds]
    return found


def merge(args: Args) -> None:
    """Write the base of an adapter with the adapter merged into it."""
    config = Path(args.model, "adapter_config.json")
    if not config.is_file():
        sys.exit(f"--model {args.model}: must be a folder with adapter_config.json")
    classifies = json.loads(config.read_text())["task_type"] == "SEQ_CLS"
    kind, options = AutoPeftModelForCausalLM, {"dtype": torch.float32}
    if classifies:
        kind, options = AutoPeftModelForSequenceClassification, options | {"num_labels": 1}
    model = kind.from_pretrained(args.model, **options).merge_and_unload()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id  # tells a reward model where a text ends
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"{args.model} and its base in {args.out}")


def interval_of_share(share: float, pairs_of_prompts: np.ndarray) -> tuple[float, float]:
    """Wilson's 95 % interval of the share of pairs that are ranked rightly, where prompts are the samples, not pairs.

    The verdicts of a prompt's pairs, pairs_of_prompts [prompts], depend on each other, and it is unknown how much. The
    interval is that of the worst case, where they are all alike: of (sum m)² / sum m² independent trials with m pairs
    each (Kish), as many as there are prompts if all have equally many pairs.
    """
    trials = pairs_of_prompts.sum() ** 2 / (pairs_of_prompts**2).sum()
    z = stats.norm.ppf(0.975)
    centre = (share + z**2 / (2 * trials)) / (1 + z**2 / trials)
    half = z * (share * (1 - share) / trials + z**2 / (4 * trials**2)) ** 0.5 / (1 + z**2 / trials)
    return max(0.0, centre - half), min(1.0, centre + half)


def accuracy(args: Args) -> pd.DataFrame:
    """Score pairs, print the table, and add it to a CSV file. Returns it: a row for each kind and one for all."""
    rows = read_rows(args.pairs, split="validation")[: args.limit or None]
    score, known = load_scorer(args.model), {}  # a chosen text stands in several pairs
    table = pd.DataFrame({"rejected": [row.get("kind", "rejected") for row in rows]})
    table["prompt"] = [row["prompt"] for row in rows]
    for name in ("chosen", "rejected"):
        texts = [(row["prompt"], row[name]) for row in rows]
        new = [text for text in dict.fromkeys(texts) if text not in known]
        known |= dict(zip(new, score(*map(list, zip(*new, strict=True))), strict=True))
        table[f"{name}_score"] = [known[text] for text in texts]
    table["right"] = table.chosen_score > table.rejected_score
    if "kind" in rows[0]:
        rouge = RougeScorer(["rougeL"], use_stemmer=True)
        table["rejected_rouge"] = [rouge.score(row["chosen"], row["rejected"])["rougeL"].fmeasure for row in rows]
    groups = [*table.groupby("rejected", sort=False), ("all", table)][-1 if table.rejected.nunique() == 1 else 0 :]
    found = []
    for kind, own in groups:
        pairs_of_prompts = own.groupby("prompt").size().to_numpy()
        low, high = interval_of_share(own.right.mean(), pairs_of_prompts)
        row = {"reward_model": args.model, "pairs_from": args.pairs, "rejected": kind, "pairs": len(own)}
        row |= {"prompts": len(pairs_of_prompts)}
        row |= {"accuracy": own.right.mean(), "accuracy_ci_low": low, "accuracy_ci_high": high}
        found.append(row | own.drop(columns=["rejected", "right", "prompt"]).mean().add_prefix("mean_").to_dict())
    found = pd.DataFrame(found)
    print(found.drop(columns=["reward_model", "pairs_from"]).to_string(index=False, float_format="%.3f"))
    if args.out:
        path, command = Path(args.out), f"# python benchmark/pipeline.py {' '.join(sys.argv[1:])}\n"
        versions = f"# torch {torch.__version__}, transformers {transformers.__version__}\n"
        lines = comments_of(path).splitlines(keepends=True) if path.exists() else []
        comments = [line for line in lines if line not in (command, versions)]
        old = pd.read_csv(path, comment="#") if path.exists() else found[:0]
        old = old[(old.reward_model != args.model) | (old.pairs_from != args.pairs)]
        both = pd.concat([old, found]) if len(old) else found
        path.write_text("".join([*comments, command, versions]) + both.to_csv(index=False, float_format="%.6g"))
    return found


def main(args: Args) -> None:
    needed = {"data": ("out",), "merge": ("model", "out"), "accuracy": ("model", "pairs")}[args.step]
    if missing := [f"--{name}" for name in needed if not getattr(args, name)]:
        sys.exit(f"{args.step} needs {' and '.join(missing)}")
    {"data": data, "merge": merge, "accuracy": accuracy}[args.step](args)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
