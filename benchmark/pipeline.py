"""What lies between TRL's commands in the pipeline of benchmark/pipeline.sh: data, merged and
joined adapters, held-out accuracy.

    python benchmark/pipeline.py data --out runs/docstrings
    python benchmark/pipeline.py merge --model runs/docstrings/sft-adapter --out runs/docstrings/sft
    python benchmark/pipeline.py accuracy --model runs/docstrings/reward --pairs FILE.jsonl

data: SmolLM2 as a folder that TRL can read, and the docstrings in four parts that share no prompt:
sft, reward-pairs, judge-pairs (each with train.jsonl and test.jsonl) and prompts.jsonl, for
prpo_llm.py --dataset. Prompts stand in the model's chat template. In a pair the docstring's own
first line is preferred to a text that is worse by construction: `other` is the first line of
another docstring of the library; `truncated` the first half of its own words; `lead` as many of the
body's first words; `padded` its own with another one behind it; `shuffled` its own words in random
order; `constant` the text that beats an untrained model under ROUGE. Training pairs take these in
turn, test pairs all.

merge: a LoRA adapter, of a language model or a reward model, and its base in one folder, in
float32, since bfloat16 would lose most of a small update.

join: the reward model as one adapter of the base model, for prpo_llm.py --value-init. --model is an
adapter of the base with --adapter merged; the result has the sum of their ranks, and their layers,
which must be the same.

accuracy: how often a reward model ranks held-out pairs rightly, by kind of the rejected text, with
Wilson's interval, in which all pairs of a prompt count as one; where the kinds are those above also
the ROUGE-L of each against the first line.
"""

import hashlib
import json
import random
import shlex
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
from arguments import read_flags, read_json, refuse
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification, PeftConfig
from rouge_score.rouge_scorer import RougeScorer
from runs import comments_of, read_table, wilson_interval
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1]))
import prpo_llm

CONSTANT = "Return a of the."
KINDS = ("other", "truncated", "lead", "padded", "shuffled", "constant")
# Part -> where it ends, as a share of all docstrings
PARTS = {"sft": 0.3, "reward-pairs": 0.6, "judge-pairs": 0.75, "prompts": 1.0}


@dataclass
class Args:
    step: tyro.conf.Positional[Literal["data", "merge", "join", "accuracy"]]
    """what to do"""
    model: str = ""
    """merge, join: folder of the adapter; accuracy: the reward model, a folder or hub id"""
    adapter: str = ""
    """join: folder of the adapter that was merged before the other one was trained"""
    # accuracy: pairs, a JSONL file or the validation split of a hub id: prompt, chosen, rejected,
    # kind or not
    pairs: str = ""
    out: str = ""
    """data, merge, join: folder to write; accuracy: CSV file, with rows for each reward model"""
    max_prompt_tokens: int = 128
    """data: longer prompts are left out"""
    limit: int = 0
    """data: docstrings of each part; accuracy: pairs (0: all)"""


def choose_part(prompt: str) -> str:
    """The part that a docstring belongs to, a function of its text alone, so that no other choice
    moves it.
    """
    place = int(hashlib.sha256(prompt.encode()).hexdigest()[:8], 16) / 2**32
    return next(name for name, end in PARTS.items() if place < end)


def make_worse_texts(example: dict, others: list[str], rng: random.Random) -> dict[str, str]:
    """Kind -> a worse text than the docstring's own first line, without kinds that give no text or
    the same. others: first lines of the same library, where none is another one the constant.
    """
    line = example["completion"]
    body = example["request"].split("\n\n", 1)[1]
    words = line.split()
    shuffled = rng.sample(others, len(others))
    other = next((text for text in shuffled if text != line), CONSTANT)
    texts = {
        "other": other,
        "truncated": " ".join(words[: len(words) // 2]),
        "lead": " ".join(body.split()[: len(words)]),
        "padded": f"{line} {other}",
        "shuffled": " ".join(rng.sample(words, len(words))),
        "constant": CONSTANT,
    }
    return {kind: texts[kind] for kind in KINDS if texts[kind] not in ("", line)}


def read_rows(
    name: str,
    split: str = "train",
    prompt: str = "prompt",
    completion: str = "completion",
) -> list[dict]:
    """The rows of what prpo_llm.py calls a --dataset, of this split if its name has none.

    What prpo_llm.py calls --prompt-column and --completion-column are texts here; `messages` is a
    prompt of messages.
    """
    if name == "docstrings":
        name = docstrings.cached(prpo_llm.get_cached_folder)
    if Path(name).is_file():  # which has a single split
        split = "train"
    try:
        rows = prpo_llm.read_rows(name, split)
    except Exception as error:  # damaged files may raise anything
        refuse(f"{name} cannot be read: {prpo_llm.explain_reading(error)}")
    for row in rows:
        value = row.get(prompt)
        row.pop("messages", None)  # a column of the data with the whole conversation
        if isinstance(value, list):
            row["messages"] = value
        texts = {}
        if value is not None:
            texts["prompt"] = prpo_llm.get_text(value)
        if completion in row:
            texts["completion"] = prpo_llm.get_text(row[completion])
        row |= texts
    return rows


def load_scorer(name: str) -> Callable[[list, list[str]], list[float]]:
    """A function with the scores of a reward model for completions of prompts, texts or messages,
    as prpo_llm.py gives them.
    """
    args = prpo_llm.Args(reward=(name,), precision="float32")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = prpo_llm.load_reward_model(args, name, device)

    def score(prompts: list, completions: list[str]) -> list[float]:
        scores = [0.0] * len(prompts)
        # Texts and messages apart, and by length: little padding
        are_messages = [isinstance(prompt, list) for prompt in prompts]
        for of_messages in (False, True):
            rows = [k for k in range(len(prompts)) if are_messages[k] == of_messages]
            if not rows:
                continue
            rows.sort(key=lambda k: len(prpo_llm.get_text(prompts[k]) + completions[k]))
            ordered = [prompts[k] for k in rows]
            texts = prpo_llm.match_form(ordered[0], [completions[k] for k in rows])
            results = prpo_llm.apply_reward_model(model, tokenizer, ordered, texts)
            for k, result in zip(rows, results, strict=True):
                scores[k] = result
        return scores

    return score


def write_lines(path: Path, rows: list[dict]) -> None:
    """A JSONL file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    print(f"{len(rows)} in {path}")


def write_base(folder: Path):
    """SmolLM2 from its GGUF file as a folder that every library loads. Returns its tokenizer."""
    source, where = prpo_llm.find_base("smollm2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, **where)
    options = {"dtype": torch.bfloat16}
    quantized = {}
    if "gguf_file" in where:  # there is no cache, which has it converted
        quantized["quantization_config"] = transformers.GgufConfig(dequantize=True)
    kind = transformers.AutoModelForCausalLM
    loaded = kind.from_pretrained(source, **where, **options, **quantized)
    base = kind.from_config(loaded.config, **options)  # what was quantized cannot be saved
    base.load_state_dict(loaded.state_dict())
    base.config.eos_token_id = tokenizer.eos_token_id
    base.generation_config.eos_token_id = tokenizer.eos_token_id
    base.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def read_examples(tokenizer, max_prompt_tokens: int) -> list[dict]:
    """The docstrings with short prompts, in the model's chat template; `request` is the plain
    prompt.
    """
    examples = []
    for row in read_rows("docstrings"):
        chat = [{"role": "user", "content": row["prompt"]}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        if len(tokenizer(text)["input_ids"]) <= max_prompt_tokens:
            examples.append(row | {"request": row["prompt"], "prompt": text})
    return examples


def write_data(args: Args) -> None:
    """Write the base model and the four parts."""
    out = Path(args.out)
    tokenizer = write_base(out / "base")
    rows_of_part = {name: [] for name in PARTS}
    for example in read_examples(tokenizer, args.max_prompt_tokens):
        rows_of_part[choose_part(example["request"])].append(example)
    for name, rows in rows_of_part.items():
        random.Random(0).shuffle(rows)
        rows = rows[: args.limit or None]
        if name == "prompts":
            columns = ("prompt", "completion", "topic", "request")
            write_lines(out / "prompts.jsonl", select_columns(rows, columns))
            continue
        held_out = max(1, min(200, len(rows) // 10))
        test = rows[:held_out]
        train = rows[held_out:]
        if name == "sft":
            written = [select_columns(split, ("prompt", "completion")) for split in (test, train)]
        else:
            written = [make_pairs(test, test, every=True), make_pairs(train, train, every=False)]
        write_lines(out / name / "test.jsonl", written[0])
        write_lines(out / name / "train.jsonl", written[1])


def select_columns(rows: list[dict], columns: tuple[str, ...]) -> list[dict]:
    """The rows with these columns only."""
    return [{column: row[column] for column in columns} for row in rows]


def make_pairs(examples: list[dict], others: list[dict], every: bool) -> list[dict]:
    """Pairs of these examples: with a rejected text of every kind, or of each kind in turn.

    others: examples whose first lines are the other texts.
    """
    rng = random.Random(1)
    lines = {row["topic"]: [] for row in examples}
    for row in others:
        if row["topic"] in lines:
            lines[row["topic"]].append(row["completion"])
    pairs = []
    for number, example in enumerate(examples):
        texts = make_worse_texts(example, lines[example["topic"]], rng)
        kinds = list(texts)
        if not every:
            kinds = [kinds[number % len(kinds)]]
        for kind in kinds:
            pair = {"prompt": example["prompt"], "chosen": example["completion"]}
            pairs.append(pair | {"rejected": texts[kind], "kind": kind})
    return pairs


def merge_adapter(args: Args) -> None:
    """Write the base of an adapter with the adapter merged into it."""
    config = Path(args.model, "adapter_config.json")
    if not config.is_file():
        refuse(f"--model {args.model}: must be a folder with adapter_config.json")
    kind = AutoPeftModelForCausalLM
    options = {"dtype": torch.float32}
    if read_json(config).get("task_type") == "SEQ_CLS":
        kind = AutoPeftModelForSequenceClassification
        options["num_labels"] = 1
    model = kind.from_pretrained(args.model, **options).merge_and_unload()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    # By this a reward model finds where a text ends
    model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"{args.model} and its base in {args.out}")


def join_adapters(args: Args) -> None:
    """Write two adapters, of which --model was trained on the base with --adapter merged, as one
    adapter of the base: B A + B' A' is the product of [B B'] and [A; A'].
    """
    configs = []
    weights = []
    for folder in (args.adapter, args.model):
        configs.append(PeftConfig.from_pretrained(folder))
        weights.append(load_file(Path(folder, "adapter_model.safetensors")))
    before, after = weights
    layers = [{name for name in sides if ".lora_" in name} for sides in weights]
    if layers[0] != layers[1]:
        refuse(f"--adapter {args.adapter}: must have the layers of --model {args.model}")
    joined = dict(after)  # with the score head
    for name in layers[0]:
        sides = [before[name].float(), after[name].float()]
        if ".lora_A." in name:
            joined[name] = torch.cat(sides)
        else:
            scales = [config.lora_alpha / config.r for config in configs]
            joined[name] = torch.cat([scales[0] * sides[0], scales[1] * sides[1]], dim=1)
    config = configs[1]
    config.r = config.lora_alpha = configs[0].r + configs[1].r
    config.base_model_name_or_path = configs[0].base_model_name_or_path
    config.save_pretrained(args.out)
    save_file(joined, Path(args.out, "adapter_model.safetensors"))
    print(f"{args.adapter} and {args.model} in {args.out}")


def compute_interval(share: float, pairs_of_prompts: np.ndarray) -> tuple[float, float]:
    """Wilson's 95 % interval of the share of pairs that are ranked rightly, where prompts are the
    samples, not pairs.

    The verdicts of a prompt's pairs, pairs_of_prompts [prompts], depend on each other, and it is
    unknown how much. The interval is that of the worst case, where they are all alike: of
    (sum m)² / sum m² independent trials with m pairs each (Kish), as many as there are prompts if
    all have equally many pairs.
    """
    trials = pairs_of_prompts.sum() ** 2 / (pairs_of_prompts**2).sum()
    return wilson_interval(share, trials)


def score_pairs(args: Args) -> pd.DataFrame:
    """A row per pair: kind of the rejected text, prompt, scores, whether they are in the right
    order, and ROUGE-L of the rejected text where the kinds are known.
    """
    rows = read_rows(args.pairs, split="validation")[: args.limit or None]
    if not all({"prompt", "chosen", "rejected"} <= row.keys() for row in rows) or not rows:
        refuse(f"--pairs {args.pairs}: must have rows with prompt, chosen and rejected")
    score = load_scorer(args.model)
    score_of = {}  # (prompt, text) -> score; a chosen text stands in several pairs
    table = pd.DataFrame({"rejected": [row.get("kind", "rejected") for row in rows]})
    prompts = [row.get("messages", row["prompt"]) for row in rows]
    table["prompt"] = [json.dumps(prompt) for prompt in prompts]
    for name in ("chosen", "rejected"):
        texts = [prpo_llm.get_text(row[name]) for row in rows]
        keys = [*zip(table.prompt, texts, strict=True)]
        places = {key: k for k, key in enumerate(keys) if key not in score_of}
        scores = score([prompts[k] for k in places.values()], [texts[k] for k in places.values()])
        score_of |= dict(zip(places, scores, strict=True))
        table[f"{name}_score"] = [score_of[key] for key in keys]
    table["right"] = table.chosen_score > table.rejected_score
    if "kind" in rows[0]:
        rouge = RougeScorer(["rougeL"], use_stemmer=True)
        scores = [rouge.score(row["chosen"], row["rejected"])["rougeL"] for row in rows]
        table["rejected_rouge"] = [score.fmeasure for score in scores]
    return table


def measure_accuracy(args: Args) -> pd.DataFrame:
    """Score pairs, print the table, and add it to a CSV file. Returns it: a row for each kind and
    one for all.
    """
    pairs = score_pairs(args)
    groups = []
    if pairs.rejected.nunique() > 1:
        groups += pairs.groupby("rejected", sort=False)
    groups.append(("all", pairs))
    rows = []
    for kind, of_kind in groups:
        pairs_of_prompts = of_kind.groupby("prompt").size().to_numpy()
        share = of_kind.right.mean()
        low, high = compute_interval(share, pairs_of_prompts)
        row = {
            "reward_model": args.model,
            "pairs_from": args.pairs,
            "rejected": kind,
            "pairs": len(of_kind),
            "prompts": len(pairs_of_prompts),
            "accuracy": share,
            "accuracy_ci_low": low,
            "accuracy_ci_high": high,
        }
        means = of_kind.drop(columns=["rejected", "right", "prompt"]).mean()
        rows.append(row | means.add_prefix("mean_").to_dict())
    table = pd.DataFrame(rows)
    shown = table.drop(columns=["reward_model", "pairs_from"])
    print(shown.to_string(index=False, float_format="%.3f"))
    if args.out:
        add_to_file(Path(args.out), table)
    return table


def add_to_file(path: Path, table: pd.DataFrame) -> None:
    """Add a reward model's rows to a CSV file, in place of those that are there of the same model
    and pairs.
    """
    command = f"# python benchmark/pipeline.py {shlex.join(sys.argv[1:])}\n"
    versions = f"# torch {torch.__version__}, transformers {transformers.__version__}\n"
    comments = []
    if path.exists():
        lines = comments_of(path).splitlines(keepends=True)
        comments = [line for line in lines if line not in (command, versions)]
        old = read_table(path)
        model = table.reward_model.iloc[0]
        pairs = table.pairs_from.iloc[0]
        old = old[(old.reward_model != model) | (old.pairs_from != pairs)]
        if len(old):
            table = pd.concat([old, table])
    text = table.to_csv(index=False, float_format="%.6g")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join([*comments, command, versions, text]))


# Step -> what it does, the flags that it needs
STEPS = {
    "data": (write_data, ("out",)),
    "merge": (merge_adapter, ("model", "out")),
    "join": (join_adapters, ("model", "adapter", "out")),
    "accuracy": (measure_accuracy, ("model", "pairs")),
}


def main(args: Args) -> None:
    take_step, needed = STEPS[args.step]
    missing = [f"--{name}" for name in needed if not getattr(args, name)]
    if missing:
        refuse(f"{args.step} needs {' and '.join(missing)}")
    take_step(args)


if __name__ == "__main__":
    main(read_flags(Args))
