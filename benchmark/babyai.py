"""A small language model for prpo_babyai.py, which has seen the levels' bot a little.

    python benchmark/babyai.py  # three minutes of one core, once: runs/babyai/model

A Llama of two million parameters with a tokenizer of words, trained to answer as BabyAI's own bot
acts in a few episodes of every level. It then solves about two of ten new tasks, which is enough
for reinforcement learning to begin. None of the episodes is of a task of prpo_babyai.py. The same
settings give the same files; files that are there are not made again.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from arguments import read_json
from minigrid.utils.baby_ai_bot import BabyAIBot
from tiny_llama import Trainer, make_model, pad_examples
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import prpo_babyai
from communicators import Count, Natural, Positive, Seed, read_flags, stop

EOS = "<eos>"
UNKNOWN = "<unknown>"
# Fixed phrases that are a token each; what else there is are words, numbers and signs
STEPS = ("1 step", "2 steps", "3 steps", "4 steps", "5 steps", "6 steps")
PHRASES = [
    prpo_babyai.INSTRUCTION,
    f"Actions: {', '.join(prpo_babyai.ACTIONS)}",
    *(f", You see {article}" for article in ("an", "a")),
    *(f"You see {article}" for article in ("an", "a")),
    "You see nothing",
    "You carry a",
    *(f"and {steps} forward" for steps in STEPS),
    *(f"{steps} {way}" for steps in STEPS for way in ("left", "right", "forward")),
    "Task:",
    "Turn",
    "of 24",
    "Before:",
    "Action:",
    "Now:",
    "<action>",
    "</action>",
    *prpo_babyai.ACTIONS,
]
WORDS = """
go to the a an pick up open door key ball box put next red green blue purple yellow grey
wall goal lava floor agent closed locked behind you on your left right in front of and then
after unlock drop toggle turn forward object
"""
STEPS_DRAWN = 8  # optimizer steps whose examples are drawn at once
FIRST_SEED = 2_000_000  # of the episodes here: training and evaluation have others


@dataclass
class Args:
    out: str = "runs/babyai"
    """folder for the model"""
    episodes: Count = 150
    """episodes of the bot in each level"""
    steps: Count = 300
    """optimizer steps"""
    batch_size: Count = 32
    """turns per step"""
    learning_rate: Positive = 2e-3
    """highest learning rate of AdamW"""
    hidden_size: Count = 192
    """of the model"""
    layers: Count = 5
    """of the model"""
    probe: Natural = 20
    """new tasks of each level, by which its success is measured in the end"""
    seed: Seed = 1
    """seed of everything random"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for every fixed phrase, word, number and sign of BabyAI's texts."""
    tokens = [EOS, UNKNOWN, *PHRASES, *WORDS.split(), *map(str, range(1, 65)), *",.:<>/"]
    vocabulary = {token: k for k, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    escaped = []
    for phrase in PHRASES:
        text = "".join(f"\\{letter}" if letter in ".<>/()" else letter for letter in phrase)
        # Not the beginning of a longer word, such as "an" of "and"
        escaped.append(f"{text}\\b" if phrase[-1].isalpha() else text)
    pattern = Regex("|".join([*escaped, "\\w+", "[^\\w\\s]"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, "removed", invert=True)
    special = {"eos_token": EOS, "pad_token": EOS, "unk_token": UNKNOWN}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special
    )


def show_bot(level: str, seed: int) -> Iterator[tuple[str, str]]:
    """The prompts of an episode of the bot, with its answers."""
    settings = prpo_babyai.Args()

    def make(split: str, index: int) -> prpo_babyai.TextLevel:
        return prpo_babyai.TextLevel(level, seed)

    episode = prpo_babyai.Episode(settings, make, "train", 0)
    bot = BabyAIBot(episode.env.level)
    while not episode.ended:
        action = prpo_babyai.ACTIONS[int(bot.replan())]
        answer = f"<action>{action}</action>"
        yield episode.write_prompt(settings.history), answer
        episode.act([], [], torch.empty(0), answer)


def collect(args: Args) -> list[tuple[str, str]]:
    """Prompts and answers of the bot's episodes in all levels."""
    examples = []
    for level in prpo_babyai.LEVELS:
        for number in range(args.episodes):
            examples += show_bot(level, FIRST_SEED + 1000 * args.seed + number)
    return examples


def train(args: Args, tokenizer, examples: list[tuple[str, str]]) -> LlamaForCausalLM:
    """The model, trained on the answers, and on the actions before that their prompts contain."""
    torch.manual_seed(args.seed)
    model = make_model(
        args,
        tokenizer,
        num_attention_heads=6,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    trainer = Trainer(args, model)
    prompts = tokenizer([prompt for prompt, _ in examples])["input_ids"]
    answers = tokenizer([answer for _, answer in examples])["input_ids"]
    before_action = tokenizer.convert_tokens_to_ids("Action:")
    batches = draw_batches(args, [len(prompt) for prompt in prompts])
    began = time.monotonic()
    for step, inds in enumerate(batches, 1):
        pairs = [(prompts[k], answers[k]) for k in inds]
        tokens, labels = pad_examples(pairs, tokenizer.eos_token_id)
        # Each prompt shows the bot's last actions too, each behind what it saw
        earlier = tokens[:, :-1] == before_action
        labels[:, 1:] = torch.where(earlier, tokens[:, 1:], labels[:, 1:])
        loss = trainer.step(tokens, labels)
        if step % max(args.steps // 10, 1) == 0:
            left = (time.monotonic() - began) / step * (args.steps - step)
            progress = f"step {step}/{args.steps}, loss {loss:.3f}, {left:.0f} s left"
            print(f"warm start: {progress}", flush=True)
    return model.eval()


def draw_batches(args: Args, lengths: list[int]) -> Iterator[list[int]]:
    """The examples of every optimizer step.

    Those of several steps are drawn at once and divided by their lengths, so that there is little
    padding.
    """
    generator = torch.Generator().manual_seed(args.seed)
    for first in range(0, args.steps, STEPS_DRAWN):
        number = min(STEPS_DRAWN, args.steps - first)
        shape = (number * args.batch_size,)
        inds = torch.randint(len(lengths), shape, generator=generator).tolist()
        inds.sort(key=lambda k: lengths[k])
        for block in torch.randperm(number, generator=generator).tolist():
            yield inds[block * args.batch_size : (block + 1) * args.batch_size]


def measure_success(args: Args, folder: Path) -> dict[str, float]:
    """How many new tasks of each level the model solves, when it samples."""
    settings = prpo_babyai.Args(base_model=str(folder), seed=args.seed, device="cpu")
    model, tokenizer = prpo_babyai.load_base(settings, "cpu")
    prpo_babyai.add_adapters(settings, model, 1)
    rates = {}
    for level in prpo_babyai.LEVELS:

        def make(split: str, seed: int, level: str = level) -> prpo_babyai.TextLevel:
            return prpo_babyai.TextLevel(level, seed)

        episodes = []
        for number in range(args.probe):
            episode = prpo_babyai.Episode(settings, make, "train", FIRST_SEED - 1 - number)
            shape = (settings.max_turns, settings.response_length)
            generator = torch.Generator().manual_seed(number)
            episode.uniforms = torch.rand(shape, generator=generator)
            episodes.append(episode)
        prpo_babyai.play(settings, model, tokenizer, [episodes], settings.temperature, (0,))
        rates[level] = sum(episode.success for episode in episodes) / args.probe
    return rates


def main(args: Args) -> dict[str, float]:
    """Write the model, if it is not there. Returns its success in each level."""
    if args.hidden_size % 12:
        stop(f"--hidden-size {args.hidden_size}: must be a multiple of 12", 2)
    out = Path(args.out)
    settings = asdict(args) | {"out": ""}
    ready = out / "settings.json"
    if ready.is_file() and (out / "model" / "config.json").is_file():
        stored = read_json(ready)
        rates = stored.pop("rates", {})
        if stored != settings:
            hint = "choose another folder, or delete it"
            stop(f"--out {out}: was made with other settings; {hint}", 2)
        print(f"{out}: there already")
    else:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            stop(f"--out {out}: cannot be made ({error.strerror})", 2)
        tokenizer = make_tokenizer()
        model = train(args, tokenizer, collect(args))
        shutil.rmtree(out / "model", ignore_errors=True)
        model.save_pretrained(out / "model")
        tokenizer.save_pretrained(out / "model")
        rates = measure_success(args, out / "model") if args.probe else {}
        # Under its name only when all is there
        temporary = out / f"settings.{os.getpid()}"
        temporary.write_text(json.dumps(settings | {"rates": rates}, indent=1) + "\n")
        temporary.replace(ready)
    for level, rate in rates.items():
        print(f"{level:17} solved {rate:6.1%}")
    if rates:
        print(f"{'all':17} solved {sum(rates.values()) / len(rates):6.1%}")
    return rates


if __name__ == "__main__":
    main(read_flags(Args))
