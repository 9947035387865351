"""Deals a data set to agents, a JSONL file for each, for example by the partitions of the FedAgent paper (C.1).

    python benchmark/partition.py --partition coverage --out-dir runs/parts
    python prpo_llm.py --dataset runs/parts/agent_{i}.jsonl --eval-dataset runs/parts/validation.jsonl

preference: sets of equal size, each with another mixture of topics (algorithm 2)
coverage:   sets of different sizes, whose sum is fixed (algorithm 3)
hardness:   sets of equal size, each with another share of easy prompts (algorithm 4)
iid, topic: as `prpo_llm.py --partition` deals, for agents on different machines

The prompts that prpo_llm.py holds out of a common data set, and dealt to nobody, are validation.jsonl.
"""

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
from communicators import Count, Natural, NonNegative, Positive, derive_seed, read_flags, refuse


@dataclass
class Args:
    out_dir: str
    """folder for agent_0.jsonl, agent_1.jsonl, ... and validation.jsonl"""
    partition: Literal["preference", "coverage", "hardness", "iid", "topic"]
    """how prompts are dealt to agents"""
    strength: NonNegative | None = None
    """omega of preference, the larger the less alike (default: 0.9); xi of the others, the larger the more alike (1)"""
    overlap: Positive = 1.0
    """coverage: agents that have the same prompt, on average; hardness: the same of easy prompts"""
    bounds: tuple[int, int] | None = None
    """coverage: fewest and most prompts of an agent; hardness: of easy ones (default: half and 3/2 of the mean)"""
    easy_column: str = ""
    """hardness: column that is larger for easy prompts, such as a success rate (default: short references are easy)"""
    num_agents: Count = 3
    """number of agents"""
    prompts_per_agent: Count = 256
    """prompts of each agent; coverage: on average"""
    seed: Natural = 1
    """seed of what is random"""
    dataset: str = "docstrings"
    """what prpo_llm.py takes: docstrings, a JSONL file, a local folder or a hub id"""
    prompt_column: str = "prompt"
    """as in prpo_llm.py"""
    completion_column: str = "completion"
    """as in prpo_llm.py"""
    topic_column: str = "topic"
    """as in prpo_llm.py"""
    topics: tuple[str, ...] = ()
    """topic: one for each agent (default: the largest); preference: only prompts of these (default: all)"""
    base_model: str = "smollm2"
    """whose tokenizer and chat template tell which prompts are too long"""
    max_prompt_tokens: Count = 300
    """longer prompts are left out"""


def check_args(args: Args) -> None:
    """What the types do not say."""
    if not 1 <= args.overlap <= args.num_agents:
        refuse(args, "overlap", f"must lie in [1, {args.num_agents}]")
    if args.bounds and not 0 <= args.bounds[0] <= args.bounds[1]:
        refuse(args, "bounds", "must be two numbers, the smaller one first")
    if Path(args.out_dir).exists() and not Path(args.out_dir).is_dir():
        refuse(args, "out_dir", "must be a folder")


def preference_partition(pools: list[np.ndarray], num_agents: int, size: int, omega: float, rng) -> list[np.ndarray]:
    """Algorithm 2: sets of equal size whose mixtures of categories are the less alike, the larger omega is.

    pools: the indices of each category. Returns the indices of each agent, none of them twice. Raises ValueError where
    there are fewer than `size`.
    """
    counts, sets = np.array([len(pool) for pool in pools]), []
    if counts.sum() < size:
        raise ValueError(f"{size} of {counts.sum()} prompts")
    share = counts / counts.sum()
    for _ in range(num_agents):
        z = rng.normal(np.log(share / np.maximum(1 - share, 1e-12)), omega)
        q = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
        amounts = rng.multinomial(size, q)
        while (excess := np.maximum(amounts - counts, 0).sum()) > 0:  # what does not fit goes where there is room
            room = np.maximum(q, 1e-12) * (amounts < counts)
            amounts = np.minimum(amounts, counts) + rng.multinomial(excess, room / room.sum())
        sets.append(np.concatenate([rng.choice(*own, replace=False) for own in zip(pools, amounts, strict=True)]))
    return sets


def coverage_partition(number: int, num_agents: int, total: int, bounds: tuple, xi: float, rng) -> list[np.ndarray]:
    """Algorithm 3: sets whose sizes are the more alike, the larger xi is; of xi = 0 all lie at a bound, if they can.

    number: items; total: the sum of the sizes, so that an item is in total / number sets, rounded up or down; bounds:
    least, mean and most of a size. Returns the indices of each agent, none of them twice. Raises ValueError where the
    bounds leave no room.
    """
    least, middle, most = *bounds[:2], min(bounds[2], number)
    if not (0 <= least <= middle <= most and num_agents * least <= total <= num_agents * most):
        raise ValueError(f"{num_agents} sets of {least} to {most} prompts, {middle} on average, cannot hold {total}")
    mu = (middle - least) / max(most - least, 1)
    if 0 < mu < 1:
        x = rng.beta(mu * xi, (1 - mu) * xi, num_agents) if xi > 0 else rng.random(num_agents) < mu
    else:
        x = np.full(num_agents, mu)
    u = least + x * (most - least)
    u = u * (total / u.sum()) if u.sum() else np.full(num_agents, total / num_agents)
    sizes = np.clip(np.floor(u), least, most).astype(int)
    while (missing := total - sizes.sum()) != 0:  # the largest remainders get one more, within the bounds
        free = sizes < most if missing > 0 else sizes > least
        order = np.argsort(np.where(free, (sizes - u) * np.sign(missing), np.inf), kind="stable")
        sizes[order[: min(abs(missing), free.sum())]] += np.sign(missing)
    copies, sets, remaining = np.full(number, total // number), [[] for _ in range(num_agents)], sizes.copy()
    copies[rng.permutation(number)[: total % number]] += 1
    for left, item in zip(range(number, 0, -1), rng.permutation(number), strict=True):
        forced = np.flatnonzero(remaining >= left)  # who needs all that are left, because a set holds an item once
        weights, others = np.where(remaining < left, remaining, 0), copies[item] - len(forced)
        drawn = rng.choice(num_agents, others, replace=False, p=weights / weights.sum()) if others else []
        for k in (*forced, *drawn):
            sets[k].append(item)
            remaining[k] -= 1
    return [np.array(items, dtype=int) for items in sets]


def hardness_partition(easy, hard, num_agents: int, size: int, total: int, bounds, xi: float, rng) -> list[np.ndarray]:
    """Algorithm 4: sets of equal size whose shares of easy items are the more alike, the larger xi is.

    easy, hard: indices; total: the sum of the easy ones' number; bounds: least, mean and most of it, for one set.
    Returns the indices of each agent, none of them twice. Raises ValueError where the bounds leave no room.
    """
    if not (bounds[2] <= size <= len(hard) + bounds[0]):
        raise ValueError(f"sets of {size} with {bounds[0]} to {bounds[2]} easy prompts need more hard ones")
    sets = coverage_partition(len(easy), num_agents, total, bounds, xi, rng)
    return [np.concatenate([easy[own], rng.choice(hard, size - len(own), replace=False)]) for own in sets]


def sets_of(args: Args, rest: list[dict]) -> list[np.ndarray]:
    """Which of the examples each agent gets."""
    n, asked, rng = args.num_agents, args.prompts_per_agent, np.random.default_rng(derive_seed(args.seed, 0, 7))
    strength = args.strength if args.strength is not None else 0.9 if args.partition == "preference" else 1.0
    ease = [example["row"][args.easy_column] if args.easy_column else -len(example["completion"]) for example in rest]
    by_ease = np.argsort([-float(own) for own in ease], kind="stable")
    easy, hard = np.split(by_ease, [len(rest) // 2])
    room = {"preference": len(rest), "coverage": int(args.overlap * len(rest)) // n}
    room["hardness"] = min(2 * (int(args.overlap * len(easy)) // n), len(hard))
    size = min(asked, room[args.partition])
    if size < asked:
        print(f"every agent gets {size} prompts, fewer than --prompts-per-agent {asked}: there are {len(rest)}")
    if args.partition == "preference":
        topics = np.array([example["topic"] for example in rest])
        pools = [np.flatnonzero(topics == name) for name in sorted({*topics})]
        return preference_partition(pools, n, size, strength, rng)
    middle = size if args.partition == "coverage" else size // 2
    least, most = args.bounds or (middle // 2, middle + middle // 2)
    number, bounds = math.ceil(n * middle / args.overlap), (least, middle, most)
    if args.partition == "coverage":
        chosen = rng.permutation(len(rest))[:number]
        return [chosen[own] for own in coverage_partition(number, n, n * size, bounds, strength, rng)]
    return hardness_partition(rng.permutation(easy)[:number], hard, n, size, n * middle, bounds, strength, rng)


def main(args: Args) -> None:
    check_args(args)
    names = ("prompt_column", "completion_column", "topic_column", "num_agents", "prompts_per_agent")
    names += ("base_model", "max_prompt_tokens")
    dealt = {"partition": args.partition, "topics": args.topics} if args.partition in ("iid", "topic") else {}
    same = {name: getattr(args, name) for name in names} | dealt
    settings = prpo_llm.Args(dataset=(args.dataset,), batch_size=1, eval_prompts=0, **same)
    prpo_llm.check_args(settings)
    try:
        name, where = prpo_llm.find_base(args.base_model)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **where)
    except (OSError, ValueError) as error:
        refuse(args, "base_model", f"cannot be loaded: {str(error).splitlines()[0]}")
    examples = prpo_llm.load_examples(settings, tokenizer, args.dataset)
    if args.easy_column and not all(isinstance(own["row"].get(args.easy_column), int | float) for own in examples):
        refuse(args, "easy_column", "must be a column of numbers")
    pool = [example for example in examples if example["place"] < prpo_llm.HELD_OUT]
    if dealt:
        parts = list(prpo_llm.deal(settings, tokenizer, range(args.num_agents))[0].values())
    else:
        reserved = {tuple(example["ids"]) for example in pool}
        rest = [example for example in examples if tuple(example["ids"]) not in reserved]
        rest = [example for example in rest if not args.topics or example["topic"] in args.topics]
        try:
            parts = [[rest[k] for k in own] for own in sets_of(args, rest)]
        except ValueError as error:
            refuse(args, "partition", str(error))
    folder = Path(args.out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for name, own in [("validation", pool), *((f"agent_{i}", part) for i, part in enumerate(parts))]:
        lines = [json.dumps(example["row"], default=str) for example in own]
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        counts = Counter(example["topic"] for example in own).most_common(3)
        print(f"{folder / name}.jsonl: {len(own)} prompts, {', '.join(f'{n} of {topic[:40]}' for topic, n in counts)}")


if __name__ == "__main__":
    main(read_flags(Args))
