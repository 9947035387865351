"""Deals a data set to agents, a JSONL file each, also by the FedAgent paper's partitions (C.1).

    python benchmark/partition.py --partition coverage --out-dir runs/parts
    python prpo_llm.py --dataset runs/parts/agent_{i}.jsonl \\
        --eval-dataset runs/parts/validation.jsonl

preference: sets of equal size, each with another mixture of topics (algorithm 2)
coverage:   sets of different sizes, whose sum is fixed (algorithm 3)
hardness:   sets of equal size, each with another share of easy prompts (algorithm 4)
iid, topic: as `prpo_llm.py --partition` deals, for agents on different machines

The prompts that prpo_llm.py holds out of a common data set are validation.jsonl, and no agent's.
"""

import dataclasses
import json
import math
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import prpo_llm
from communicators import (
    Count,
    NonNegative,
    Positive,
    Seed,
    derive_seed,
    first_line,
    read_flags,
    refuse,
)

PARTITION_SEED = 7  # which random numbers of --seed these are, see derive_seed


@dataclass
class Args:
    out_dir: str
    """folder for agent_0.jsonl, agent_1.jsonl, ... and validation.jsonl"""
    partition: Literal["preference", "coverage", "hardness", "iid", "topic"]
    """how prompts are dealt to agents"""
    # omega of preference, the larger the less alike (default: 0.9); xi of the others, the larger
    # the more alike (default: 1)
    strength: NonNegative | None = None
    overlap: Positive = 1.0
    """coverage: agents that have the same prompt, on average; hardness: the same of easy prompts"""
    # coverage: fewest and most prompts of an agent; hardness: of easy ones (default: half and 3/2
    # of the mean)
    bounds: tuple[int, int] | None = None
    # hardness: column that is larger for easy prompts, such as a success rate (default: short
    # references are easy)
    easy_column: str = ""
    num_agents: Count = 3
    """number of agents"""
    prompts_per_agent: Count = 256
    """prompts of each agent; coverage: on average"""
    seed: Seed = 1
    """seed of what is random"""
    dataset: str = "docstrings"
    """as in prpo_llm.py: docstrings, a JSONL file, a local folder or a hub id"""
    prompt_column: str = "prompt"
    """as in prpo_llm.py"""
    completion_column: str = "completion"
    """as in prpo_llm.py"""
    topic_column: str = "topic"
    """as in prpo_llm.py"""
    # topic: one for each agent (default: the largest); other partitions: only prompts of these,
    # by default of all
    topics: tuple[str, ...] = ()
    base_model: str = "smollm2"
    """the model whose tokenizer and chat template determine which prompts are too long"""
    max_prompt_tokens: Count = 300
    """longer prompts are left out"""


def check_args(args: Args) -> None:
    """What types cannot express."""
    if not 1 <= args.overlap <= args.num_agents:
        refuse(args, "overlap", f"must lie in [1, {args.num_agents}]")
    if args.bounds and not 0 <= args.bounds[0] <= args.bounds[1]:
        refuse(args, "bounds", "must be two numbers, the smaller one first")
    if Path(args.out_dir).exists() and not Path(args.out_dir).is_dir():
        refuse(args, "out_dir", "must be a folder")


def preference_partition(
    pools: list[np.ndarray], num_agents: int, size: int, omega: float, rng: np.random.Generator
) -> list[np.ndarray]:
    """Algorithm 2: sets of one size; the larger omega, the less alike their mixtures of categories.

    pools: the indices of each category. Returns the indices of each agent, none of them twice.
    Raises ValueError where there are fewer than `size`.
    """
    counts = np.array([len(pool) for pool in pools])
    if counts.sum() < size:
        raise ValueError(f"{size} of {counts.sum()} prompts")
    share = counts / counts.sum()
    logits = np.log(share / np.maximum(1 - share, 1e-12))
    sets = []
    for _ in range(num_agents):
        z = rng.normal(logits, omega)
        q = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
        amounts = rng.multinomial(size, q)
        while (excess := np.maximum(amounts - counts, 0).sum()) > 0:
            # What does not fit goes to categories with room
            room = np.maximum(q, 1e-12) * (amounts < counts)
            extra = rng.multinomial(excess, room / room.sum())
            amounts = np.minimum(amounts, counts) + extra
        chosen = []
        for pool, amount in zip(pools, amounts, strict=True):
            chosen.append(rng.choice(pool, amount, replace=False))
        sets.append(np.concatenate(chosen))
    return sets


def coverage_partition(
    number: int, num_agents: int, total: int, bounds: tuple, xi: float, rng: np.random.Generator
) -> list[np.ndarray]:
    """Algorithm 3: sets whose sizes are the more alike, the larger xi.

    number: items; total: the sum of the sizes, so that an item is in total / number sets, rounded
    up or down; bounds: least, mean and most of a size. With xi = 0 all sizes are drawn at a bound,
    before they are scaled to the sum. Returns the indices of each agent, none of them twice. Raises
    ValueError where the bounds leave no room.
    """
    least, middle, most = bounds
    most = min(most, number)
    possible = num_agents * least <= total <= num_agents * most
    if not (0 <= least <= middle <= most and possible):
        sizes = f"{least} to {most} prompts, {middle} on average"
        raise ValueError(f"{num_agents} sets of {sizes}, cannot hold {total}")
    sizes = draw_sizes(num_agents, total, (least, middle, most), xi, rng)
    return deal_items(number, sizes, rng)


def draw_sizes(
    num_agents: int,
    total: int,
    bounds: tuple,
    xi: float,
    rng: np.random.Generator,
) -> np.ndarray:
    """Sizes within least and most of the bounds, [agents], whose sum is total."""
    least, middle, most = bounds
    mu = (middle - least) / max(most - least, 1)
    if mu in (0, 1):
        x = np.full(num_agents, mu)
    elif xi > 0:
        x = rng.beta(mu * xi, (1 - mu) * xi, num_agents)
    else:
        x = rng.random(num_agents) < mu
    u = least + x * (most - least)
    u = u * (total / u.sum()) if u.sum() else np.full(num_agents, total / num_agents)
    sizes = np.clip(np.floor(u), least, most).astype(int)
    while (missing := total - sizes.sum()) != 0:
        # The largest remainders get one more, or the smallest one less, within the bounds
        free = sizes < most if missing > 0 else sizes > least
        order = np.argsort(np.where(free, (sizes - u) * np.sign(missing), np.inf), kind="stable")
        changed = order[: min(abs(missing), free.sum())]
        sizes[changed] += np.sign(missing)
    return sizes


def deal_items(number: int, sizes: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Sets of these sizes, none with an item twice; an item is in n sets or n + 1, for some n."""
    num_agents = len(sizes)
    least_copies, remainder = divmod(int(sizes.sum()), max(number, 1))
    copies = np.full(number, least_copies)
    copies[rng.permutation(number)[:remainder]] += 1
    sets = [[] for _ in range(num_agents)]
    remaining = sizes.copy()
    for left, item in zip(range(number, 0, -1), rng.permutation(number), strict=True):
        # A set holds an item once, so one that needs as many items as are left needs them all
        forced = np.flatnonzero(remaining >= left)
        weights = np.where(remaining < left, remaining, 0)
        count = copies[item] - len(forced)
        drawn = []
        if count:
            drawn = rng.choice(num_agents, count, replace=False, p=weights / weights.sum())
        for k in (*forced, *drawn):
            sets[k].append(item)
            remaining[k] -= 1
    return [np.array(items, dtype=int) for items in sets]


def hardness_partition(
    easy: np.ndarray,
    hard: np.ndarray,
    num_agents: int,
    size: int,
    total: int,
    bounds: tuple,
    xi: float,
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """Algorithm 4: sets of one size; the larger xi, the more alike their shares of easy items.

    easy, hard: indices; total: the sum of the easy ones' number; bounds: least, mean and most of
    it, for one set. Returns the indices of each agent, none of them twice. Raises ValueError
    where the bounds leave no room.
    """
    least, _, most = bounds
    if most > size:
        raise ValueError(f"sets of {size} have no room for {most} easy prompts")
    if size > len(hard) + least:
        raise ValueError(f"sets of {size} with {least} to {most} easy prompts need more hard ones")
    sets = []
    for items in coverage_partition(len(easy), num_agents, total, bounds, xi, rng):
        others = rng.choice(hard, size - len(items), replace=False)
        sets.append(np.concatenate([easy[items], others]))
    return sets


def measure_ease(args: Args, examples: list[dict]) -> np.ndarray:
    """How easy each prompt is: its --easy-column, or else how short its reference is."""
    if args.easy_column:
        return np.array([float(example["row"][args.easy_column]) for example in examples])
    return np.array([-float(len(example["completion"])) for example in examples])


def choose_sets(args: Args, examples: list[dict]) -> list[np.ndarray]:
    """The numbers of the examples that each agent receives, [agents][prompts]."""
    n = args.num_agents
    rng = np.random.default_rng(derive_seed(args.seed, 0, PARTITION_SEED))
    by_ease = np.argsort(-measure_ease(args, examples), kind="stable")
    easy, hard = np.split(by_ease, [len(examples) // 2])
    room = {
        "preference": len(examples),
        "coverage": int(args.overlap * len(examples)) // n,
        "hardness": min(2 * (int(args.overlap * len(easy)) // n), len(hard)),
    }
    size = min(args.prompts_per_agent, room[args.partition])
    if not size:
        raise ValueError(f"there are {len(examples)} prompts, too few for {n} agents")
    if size < args.prompts_per_agent:
        fewer = f"fewer than --prompts-per-agent {args.prompts_per_agent}"
        print(f"every agent gets {size} prompts, {fewer}: there are {len(examples)}")
    strength = args.strength
    if strength is None:
        strength = 0.9 if args.partition == "preference" else 1.0

    if args.partition == "preference":
        topics = np.array([example["topic"] for example in examples])
        pools = [np.flatnonzero(topics == name) for name in sorted({*topics})]
        return preference_partition(pools, n, size, strength, rng)
    middle = size if args.partition == "coverage" else size // 2
    least, most = args.bounds or (middle // 2, middle + middle // 2)
    bounds = (least, middle, most)
    number = min(math.ceil(n * middle / args.overlap), len(examples))
    if args.partition == "coverage":
        chosen = rng.permutation(len(examples))[:number]
        sets = coverage_partition(number, n, n * size, bounds, strength, rng)
        return [chosen[items] for items in sets]
    easy = rng.permutation(easy)[:number]
    return hardness_partition(easy, hard, n, size, n * middle, bounds, strength, rng)


def write_part(path: Path, examples: list[dict]) -> None:
    """Write the rows of some examples, and print how many there are of the largest topics."""
    lines = [json.dumps(example["row"], default=str) for example in examples]
    path.write_text("".join(f"{line}\n" for line in lines))
    topics = Counter(example["topic"] for example in examples).most_common(3)
    counts = ", ".join(f"{count} of {topic[:40]}" for topic, count in topics)
    print(f"{path}: {len(examples)} prompts, {counts}")


def main(args: Args) -> None:
    check_args(args)
    settings = prpo_llm.Args(
        dataset=(args.dataset,),
        batch_size=1,
        eval_prompts=0,
        prompt_column=args.prompt_column,
        completion_column=args.completion_column,
        topic_column=args.topic_column,
        num_agents=args.num_agents,
        prompts_per_agent=args.prompts_per_agent,
        base_model=args.base_model,
        max_prompt_tokens=args.max_prompt_tokens,
    )
    as_in_training = args.partition in ("iid", "topic")
    if as_in_training:
        settings = dataclasses.replace(settings, partition=args.partition, topics=args.topics)
    prpo_llm.check_args(settings)
    prpo_llm.check_file(settings, args.dataset)
    try:
        name, where = prpo_llm.find_base(args.base_model)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **where)
    except (OSError, ValueError) as error:
        refuse(args, "base_model", f"cannot be loaded: {first_line(error)}")
    examples = prpo_llm.load_examples(settings, tokenizer, args.dataset)
    if args.easy_column:
        values = [example["row"].get(args.easy_column) for example in examples]
        if not all(isinstance(value, int | float) for value in values):
            refuse(args, "easy_column", "must be a column of numbers")

    held_out = [example for example in examples if example["place"] < prpo_llm.HELD_OUT]
    if as_in_training:
        dealt = prpo_llm.deal(settings, tokenizer, range(args.num_agents))[0]
        parts = list(dealt.values())
    else:
        reserved = {tuple(example["ids"]) for example in held_out}
        rest = [example for example in examples if tuple(example["ids"]) not in reserved]
        if args.topics:
            rest = [example for example in rest if example["topic"] in args.topics]
        try:
            sets = choose_sets(args, rest)
        except ValueError as error:
            refuse(args, "partition", str(error))
        parts = [[rest[k] for k in numbers] for numbers in sets]

    folder = Path(args.out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    write_part(folder / "validation.jsonl", held_out)
    for i, examples in enumerate(parts):
        write_part(folder / f"agent_{i}.jsonl", examples)


if __name__ == "__main__":
    main(read_flags(Args))
