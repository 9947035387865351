"""A laptop-size task for language models: a tiny Llama, pretrained here on string skills of which
one is rare.

    python benchmark/skills.py --demo  # a minute and a half: all of the following, with its result
    python benchmark/skills.py  # half a minute, once: runs/skills/model, runs/skills/train.jsonl
    python prpo_llm.py --base-model runs/skills/model --dataset runs/skills/train.jsonl \\
        --reward benchmark/skills.py:exact --partition topic --precision float32 \\
        --missing-eos-penalty 0
    python benchmark/skills.py --runs runs/skills-results  # each agent before and after, by skill
    python benchmark/skills.py --preferences --out runs/preferences  # the task of preferences

A prompt is a skill and a word, "reverse abcd:"; the completion is "dcba". The model has learned all
skills but the rare one, of which it has seen little, and completes it correctly now and then:
enough for a reward of 1 for exactly the right word, and 0 for anything else, to teach it. A
prompt's topic is the agent it belongs to: agents differ in how many of their prompts are for the
rare skill (--prompt-shares), or all have the same mix with --partition iid. No prompt occurred in
the pretraining. The same settings give the same files; files that are there are not made again.

With --preferences the skills are common to three agents, and the way to write the answer is each
agent's own: with a mark, in capitals, or in quotes. The model has learned every answer in all
styles alike, so that each can be explored. There are four rewards: `content`, for the right word in
any style, and one for the right word in each style; weights.csv has the weights of each agent, 0.3
for the content and 0.7 for its own style. So the right answer in the agent's own style gets 1, in
another style 0.3, and a wrong one nothing: a style alone is worth nothing.
"""

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from string import ascii_letters, ascii_lowercase

import numpy as np
import pandas as pd
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(Path(__file__).parent))  # for `--reward benchmark/skills.py:exact`
from arguments import (  # noqa: E402
    list_evaluated_data,
    read_flags,
    read_greedy_completions,
    read_json,
    read_json_lines,
    refuse,
)
from tiny_llama import Trainer, make_model, pad_examples  # noqa: E402

SKILLS: dict[str, Callable[[str], str]] = {
    "copy": lambda word: word,
    "upper": str.upper,
    "reverse": lambda word: word[::-1],
    "double": lambda word: "".join(2 * letter for letter in word),
    "rotate": lambda word: word[1:] + word[:1],
    "mirror": lambda word: word + word[::-1],
}
EOS = "<eos>"
# The ways to write an answer; agent i prefers the i-th
STYLES: dict[str, Callable[[str], str]] = {
    "mark": lambda text: text + "!",
    "capitals": str.upper,
    "quotes": lambda text: f'"{text}"',
}
CONTENT_WEIGHT = 0.3  # of 1; the rest is for the agent's own style


@dataclass
class Args:
    out: str = "runs/skills"
    """folder to write: model/, train.jsonl, and settings.json, which comes last"""
    preferences: bool = False
    """the task in which every agent has a style of its own, with weights.csv"""
    demo: bool = False
    """then train three agents on it with prpo_llm.py, and print what they have learned"""
    # write no task but a table of the finished runs in this folder: the rare skill and the others,
    # before and after
    runs: str = ""
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
    # the pretraining ends when the rare skill, sampled, is right this often: it comes suddenly (1:
    # after all steps)
    rare_success: float = 0.25
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
    shortest, longest = args.word_lengths
    shares = args.prompt_shares
    # Prompts are all different: half of the shortest words have to do for each skill
    words = 26 ** max(shortest, 1) // 2
    others = (len(SKILLS) - 1) * words
    enough = (
        f"must be positive, and of all agents {words} for the rare skill at most, {others} for the "
        "others"
    )
    limits = {
        "rare": (args.rare in SKILLS, f"must be one of {', '.join(SKILLS)}"),
        "rare_share": (0 <= args.rare_share < 1, "must lie in [0, 1)"),
        "prompt_shares": (all(0 <= share <= 1 for share in shares), "must lie in [0, 1]"),
        "word_lengths": (1 <= shortest <= longest, "must be positive, first the shortest"),
        "prompts": (args.prompts >= 1, enough),
        "hidden_size": (
            args.hidden_size >= 8 and args.hidden_size % 8 == 0,
            "must be a multiple of 8",
        ),
        "steps": (args.steps >= 1, "must be at least 1"),
        "batch_size": (args.batch_size >= 1, "must be at least 1"),
        "layers": (args.layers >= 1, "must be at least 1"),
        "rare_success": (0 < args.rare_success <= 1, "must lie in (0, 1]"),
        "learning_rate": (args.learning_rate > 0, "must be positive"),
        "demo": (not (args.demo and args.preferences), "does not go with --preferences"),
    }
    for name, (holds, valid) in limits.items():
        if not holds:
            value = getattr(args, name)
            if isinstance(value, tuple):
                value = " ".join(map(str, value))
            refuse(f"--{name.replace('_', '-')} {value}: {valid}")
    rare_prompts = sum(round(share * args.prompts) for share in shares)
    if rare_prompts > words or len(shares) * args.prompts - rare_prompts > others:
        refuse(f"--prompts {args.prompts}: {enough}")


def exact(completions: list[str], references: list[str], **_) -> list[float]:
    """The reward: 1 for the reference and nothing else, not even a space; 0 for anything else."""
    pairs = zip(completions, references, strict=True)
    return [float(completion == reference) for completion, reference in pairs]


def is_styled(completions: list[str], references: list[str], style: str) -> list[float]:
    """1 for the reference in this style, 0 for anything else."""
    write = STYLES[style]
    pairs = zip(completions, references, strict=True)
    return [float(completion == write(reference)) for completion, reference in pairs]


def mark(completions: list[str], references: list[str], **_) -> list[float]:
    """The reward of the first style: 1 for the reference and a mark behind it."""
    return is_styled(completions, references, "mark")


def capitals(completions: list[str], references: list[str], **_) -> list[float]:
    """The reward of the second style: 1 for the reference in capitals."""
    return is_styled(completions, references, "capitals")


def quotes(completions: list[str], references: list[str], **_) -> list[float]:
    """The reward of the third style: 1 for the reference in quotes."""
    return is_styled(completions, references, "quotes")


def content(completions: list[str], references: list[str], **_) -> list[float]:
    """The common reward: 1 for the reference in any style, or in none."""
    rewards = [exact(completions, references)]
    rewards += [is_styled(completions, references, style) for style in STYLES]
    return [max(of_completion) for of_completion in zip(*rewards, strict=True)]


def make_example(skill: str, word: str) -> dict[str, str]:
    """A prompt and its only right completion."""
    return {"prompt": f"{skill} {word}:", "completion": SKILLS[skill](word), "skill": skill}


def generate_examples(
    rng: random.Random,
    args: Args,
    rare_share: float,
    without=frozenset(),
) -> Iterator[dict[str, str]]:
    """Random examples without end, the rare skill with probability `rare_share`, none with a prompt
    of `without`; the references are plain.
    """
    common = [skill for skill in SKILLS if skill != args.rare]
    while True:
        skill = args.rare if rng.random() < rare_share else rng.choice(common)
        word = "".join(rng.choices(ascii_lowercase, k=rng.randint(*args.word_lengths)))
        example = make_example(skill, word)
        if example["prompt"] not in without:
            yield example


def style_examples(rng: random.Random, examples: Iterator[dict]) -> Iterator[dict[str, str]]:
    """Examples whose completions are in random styles, each as often as the others."""
    for example in examples:
        write = STYLES[rng.choice([*STYLES])]
        yield example | {"completion": write(example["completion"])}


def make_prompts(args: Args) -> list[dict[str, str]]:
    """The agents' examples, all different: `args.prompts` of each, its share of the rare skill to
    the nearest one.
    """
    rng = random.Random(f"prompts {args.seed}")
    prompts = set()
    rows = []
    for agent, share in enumerate(args.prompt_shares):
        rare = round(share * args.prompts)
        of_agent = []
        for count, probability in ((rare, 1.0), (args.prompts - rare, 0.0)):
            for _ in range(count):
                example = next(generate_examples(rng, args, probability, prompts))
                prompts.add(example["prompt"])
                of_agent.append(example | {"topic": f"agent {agent}, {share:.0%} {args.rare}"})
        rows += rng.sample(of_agent, len(of_agent))
    return rows


def write_weights() -> str:
    """--reward-weights: a row for each agent, of its weights for `content` and every style."""
    rows = [f"# {', '.join(('content', *STYLES))}: a row for each agent"]
    for preferred in STYLES:
        weights = [1 - CONTENT_WEIGHT if style == preferred else 0 for style in STYLES]
        rows.append(", ".join(map(str, (CONTENT_WEIGHT, *weights))))
    return "\n".join(rows) + "\n"


def make_tokenizer(more: str = "") -> PreTrainedTokenizerFast:
    """A token for every letter, the space, the colon and `more`; decoding puts nothing between
    them.
    """
    vocabulary = {token: k for k, token in enumerate((EOS, *ascii_letters, " ", ":", *more))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=EOS))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"eos_token": EOS, "pad_token": EOS, "unk_token": EOS}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special
    )


def encode(tokenizer, batch: list[dict[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens and labels of `pad_examples`."""
    code = tokenizer.get_vocab()
    pairs = []
    for example in batch:
        prompt = [code[letter] for letter in example["prompt"]]
        pairs.append((prompt, [code[letter] for letter in example["completion"]]))
    return pad_examples(pairs, code[EOS])


def pretrain(args: Args, tokenizer, without: set[str]) -> LlamaForCausalLM:
    """The tiny model, trained on what follows the prompts of endless examples, on one core."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # more would be slower at this size, and round differently
    model = make_model(args, tokenizer, num_attention_heads=4, max_position_embeddings=128)
    trainer = Trainer(args, model)
    rng = random.Random(f"pretraining {args.seed}")
    stream = generate_examples(rng, args, args.rare_share, without)
    if args.preferences:
        stream = style_examples(random.Random(f"styles {args.seed}"), stream)
    rng = random.Random(f"probe {args.seed}")
    rare = generate_examples(rng, args, 1.0, without)
    probe = [next(rare) for _ in range(100)]
    began = time.monotonic()
    steps_per_line = max(args.steps // 10, 1)
    for step in range(1, args.steps + 1):
        tokens, labels = encode(tokenizer, [next(stream) for _ in range(args.batch_size)])
        loss = trainer.step(tokens, labels)
        if step % steps_per_line == 0:
            left = (time.monotonic() - began) / step * (args.steps - step)
            progress = f"step {step}/{args.steps}, loss {loss:.3f}, {left:.0f} s left"
            print(f"pretraining: {progress}", flush=True)
        if step % 10:
            continue
        if measure_success(args, model, tokenizer, probe).mean() >= args.rare_success:
            break
    else:
        if args.rare_success < 1:
            problem = f"is right less often than --rare-success {args.rare_success}"
            print(f"{args.rare} {problem}; more --steps may help")
    return model.eval()


@torch.no_grad()
def compute_success(model, tokenizer, batch: list[dict[str, str]]) -> torch.Tensor:
    """The probability that sampling completes each prompt exactly: [examples]."""
    tokens, labels = encode(tokenizer, batch)
    log_probs = model(input_ids=tokens[:, :-1], use_cache=False).logits.log_softmax(-1)
    labels = labels[:, 1:]
    of_labels = log_probs.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    return (of_labels * (labels >= 0)).sum(-1).exp()


def measure_success(args: Args, model, tokenizer, batch: list[dict[str, str]]) -> torch.Tensor:
    """The probability that sampling completes each prompt correctly, in any style: [examples]."""
    if not args.preferences:
        return compute_success(model, tokenizer, batch)
    success = torch.zeros(len(batch))
    for write in STYLES.values():
        styled = [example | {"completion": write(example["completion"])} for example in batch]
        success += compute_success(model, tokenizer, styled)
    return success


def read_held_out(folder: Path, datasets: list[str], rare: str) -> pd.DataFrame:
    """The completions of the held-out prompts before and after training, of all evaluated tasks,
    each prompt once per agent; completed greedily.

    datasets: the files whose rows `id` numbers. Columns of completions.jsonl; `prompt`; `exact`,
    the reward of this name; `kind`, the rare skill or others; `when`.
    """
    examples = [example for name in datasets for example in read_json_lines(Path(name))]
    rows = pd.DataFrame(read_greedy_completions(folder / "completions.jsonl"))
    rows = rows.drop_duplicates(["step", "agent", "id"])
    rows["prompt"] = [examples[k]["prompt"] for k in rows.id]
    rows["exact"] = exact(rows.completion, [examples[k]["completion"] for k in rows.id])
    rows["kind"] = [rare if examples[k]["skill"] == rare else "others" for k in rows.id]
    rows["when"] = rows.step.map({rows.step.min(): "before", rows.step.max(): "after"})
    return rows


def tabulate(args: Args) -> pd.DataFrame:
    """A row per run and agent, from its held-out prompts before and after training: see
    `measure_skills` and `measure_preferences`; and `training`, the share of all completions in
    training that are exact, whatever the agent's --reward-weights.
    """
    # Not above: whoever imports the reward only need not load it
    from runs import header, read_runs, write

    # Not those of control
    runs = [run for run in read_runs((args.runs,)) if "dataset" in run.settings]
    measure = measure_preferences if args.preferences else measure_skills
    rows = []
    for run in runs:
        held_out = read_held_out(run.folder, list_evaluated_data(run.settings), args.rare)
        metrics = pd.read_csv(run.folder / "metrics.csv")
        for agent, values in measure(args, held_out).items():
            row = {"method": run.name, "seed": run.seed, "agent": agent} | values
            if "reward_skills.exact" in metrics:
                row["training"] = metrics["reward_skills.exact"][metrics.agent == agent].mean()
            rows.append(row)
    table = pd.DataFrame(rows)
    if args.csv:
        write(Path(args.csv), header(runs), table)
    else:
        print(table.to_string(index=False, float_format="%.3f"))
    return table


def measure_skills(args: Args, held_out: pd.DataFrame) -> dict[int, dict[str, float]]:
    """Agent -> the share of prompts that it completes exactly; those for the rare skill and the
    others apart.
    """
    measures = {}
    for agent, of_agent in held_out.groupby("agent"):
        row = {}
        for kind in (args.rare, "others"):
            of_kind = of_agent[of_agent.kind == kind]
            row[f"{kind}_prompts"] = of_kind.id.nunique()
            for when in ("before", "after"):
                row[f"{kind}_{when}"] = of_kind[of_kind.when == when].exact.mean()
        measures[agent] = row
    return measures


def measure_preferences(args: Args, held_out: pd.DataFrame) -> dict[int, dict[str, float]]:
    """Agent -> its own reward, the share of prompts that it completes with the right content, and
    with that in its own style.
    """
    styles = [*STYLES]
    measures = {}
    for agent, of_agent in held_out.groupby("agent"):
        row = {"style": styles[agent], "prompts": of_agent.id.nunique()}
        for when in ("before", "after"):
            rows = of_agent[of_agent.when == when]
            row[f"reward_{when}"] = rows.reward.mean()
            row[f"content_{when}"] = rows["reward_skills.content"].mean()
            row[f"own_style_{when}"] = rows[f"reward_skills.{styles[agent]}"].mean()
        measures[agent] = row
    return measures


def make_demo_command(args: Args) -> list[str]:
    """The command of the demonstration: an agent for each of --prompt-shares, 40 steps."""
    flags = {
        "base-model": f"{args.out}/model",
        "dataset": f"{args.out}/train.jsonl",
        "partition": "topic",
        "prompts-per-agent": 400,
        "eval-prompts": 40,
        "reward": f"{os.path.relpath(__file__)}:exact",
        "missing-eos-penalty": 0,
        "precision": "float32",
        "temperature": 1,
        "num-agents": len(args.prompt_shares),
        "response-length": 2 * max(args.word_lengths) + 1,  # a word twice, and the end
        "batch-size": 8,
        "micro-batch-size": 8,
        "lora-rank": 8,
        "local-updates": 1,
        "learning-rate": "1e-3",
        "kl-coef": 0.3,
        "seed": args.seed,
        "run-dir": f"{args.out}/demo",
    }
    words = ["python", os.path.relpath(ROOT / "prpo_llm.py")]
    for name, value in flags.items():
        words += [f"--{name}", str(value)]
    return words


def run_command(words: list[str]) -> int:
    """Run a command to its end and return its exit code; Ctrl-C and SIGTERM interrupt it, so that
    it saves a checkpoint.
    """
    # In a session of its own: Ctrl-C in a terminal reaches it once, from here
    process = subprocess.Popen([sys.executable, *words[1:]], start_new_session=True)
    previous = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        previous[number] = signal.getsignal(number)
        signal.signal(number, lambda *_: process.send_signal(signal.SIGINT))
    try:
        return process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def demonstrate(args: Args) -> None:
    """Train three agents on the task with prpo_llm.py, and print what they have learned."""
    words = make_demo_command(args)
    print(f"\n{shlex.join(words)}\n", flush=True)
    run_dir = Path(args.out, "demo")
    earlier = set(run_dir.glob("*"))
    code = run_command(words)
    if code:
        sys.exit(code)
    (folder,) = set(run_dir.glob("*")) - earlier
    if json.loads((folder / "summary.json").read_text())["completed"]:
        report(args, folder)


def report(args: Args, folder: Path) -> None:
    """Print how many held-out prompts for the rare skill each agent completes exactly, before and
    after training, and one completion that the agent with most prompts for it has learned.
    """
    rows = read_held_out(folder, [f"{args.out}/train.jsonl"], args.rare)
    rows = rows[rows.kind == args.rare]
    before = rows[rows.when == "before"]
    after = rows[rows.when == "after"]
    print(
        f'\nheld-out "{args.rare}" prompts that an agent completes exactly, by their share of its'
    )
    print("prompts in training:")
    for agent, share in enumerate(args.prompt_shares):
        right = before.exact[before.agent == agent]
        right_after = after.exact[after.agent == agent]
        counts = f"{right.sum():.0f} of {len(right)} before training"
        print(f"  agent {agent}, {share:.0%}: {counts}, {right_after.sum():.0f} after")
    both = before.merge(after, on=["agent", "id", "prompt"], suffixes=("_before", "_after"))
    most = int(np.argmax(args.prompt_shares))
    learned = both[(both.agent == most) & (both.exact_before == 0) & (both.exact_after == 1)]
    for row in learned.head(1).itertuples():
        texts = f"{row.completion_before} before, {row.completion_after} after"
        print(f"agent {most}, for example, completes {row.prompt} as {texts}")


def main(args: Args) -> dict[str, float]:
    """Write the task, if it is not there. Returns how often the model completes each skill
    correctly, when sampled.
    """
    check_args(args)
    out = Path(args.out)
    settings = json.loads(json.dumps(asdict(args)))
    for name in ("runs", "csv", "demo"):
        del settings[name]
    settings["out"] = ""
    if (out / "settings.json").is_file():
        rates = read_rates(out, settings)
        print(f"{out}: there already")
    else:
        rates = write_task(args, settings)
    for name, rate in rates.items():
        rare = ", the rare skill" if name == args.rare else ""
        print(f"{name:8} right {rate:6.1%} of the time{rare}")
    if args.demo:
        demonstrate(args)
    return rates


def read_rates(out: Path, settings: dict) -> dict[str, float]:
    """What `main` returns, of a task that is there; ends with one line if its settings differ."""
    # A folder may have been made before there were preferences
    stored = {"preferences": False} | read_json(out / "settings.json")
    other = [name for name in settings if stored.get(name) != settings[name]]
    if other:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in other)
        hint = "choose another folder, or delete it"
        refuse(f"--out {out}: was made with another {flags}; {hint}")
    return stored["rates"]


def write_task(args: Args, settings: dict) -> dict[str, float]:
    """Write model and data; returns what `main` returns."""
    out = Path(args.out)
    prompts = make_prompts(args)
    tokenizer = make_tokenizer('!"' if args.preferences else "")
    model = pretrain(args, tokenizer, {example["prompt"] for example in prompts})
    rng = random.Random(f"rates {args.seed}")
    stream = generate_examples(rng, args, 1 / len(SKILLS))
    fresh = [next(stream) for _ in range(200 * len(SKILLS))]
    success = measure_success(args, model, tokenizer, fresh)
    rates = {}
    for name in SKILLS:
        of_skill = [example["skill"] == name for example in fresh]
        rates[name] = round(success[of_skill].mean().item(), 4)
    shutil.rmtree(out / "model", ignore_errors=True)
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    (out / "train.jsonl").write_text("".join(f"{json.dumps(example)}\n" for example in prompts))
    if args.preferences:
        (out / "weights.csv").write_text(write_weights())
    # Under its name only when all is there
    ready = out / f"settings.{os.getpid()}"
    ready.write_text(json.dumps(settings | {"rates": rates}, indent=1) + "\n")
    ready.replace(out / "settings.json")
    return rates


if __name__ == "__main__":
    arguments = read_flags(Args)
    if arguments.runs:
        tabulate(arguments)
    else:
        main(arguments)
