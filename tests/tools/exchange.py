"""Rounds between six agents, in one process or in ranks: python exchange.py

Prints what this process received, as JSON.
"""

import json
import math

import torch

from communicators import Exchange

SIZES = [5, 2, 4, 5, 1, 3]
DTYPES = [torch.uint8, torch.float32, torch.float64]


def make_flat(i, dtype):
    """What agent i sends: [10 i, 10 i + 1, ...]."""
    return torch.arange(10 * i, 10 * i + SIZES[i]).to(dtype)


def to_lists(tensors):
    """The tensors of all agents as lists of numbers."""
    return [None if tensor is None else tensor.tolist() for tensor in tensors]


def play(exchange):
    """Play rounds. Returns name -> what this process has of all agents."""
    held = exchange.agents
    gathers = []
    all_gather = exchange.all_gather

    def watch(local):
        gathers.append([list(local.shape), str(local.dtype).removeprefix("torch.")])
        return all_gather(local)

    exchange.all_gather = watch
    results = {}

    def play_round(name, sent, *more):
        gathers.clear()
        kept = [flat.clone() for flat in sent]
        received, reports = exchange.round(sent, *more)
        before = to_lists(received)
        count = len(gathers)
        for flat in sent:
            flat += 1  # the agents go on
        results[name] = {
            "received": before,
            "later": to_lists(received),
            "dtypes": [str(x.dtype) for x in received if x is not None],
            "reports": [None if math.isnan(x) else x for x in reports.tolist()],
            "reports' dtype": str(reports.dtype),
            "gathers": gathers[:count],
            "recalled": to_lists(exchange.recall(kept, *more[1:])),
        }

    for dtype in DTYPES:
        numbers = torch.tensor([i / 2 if i != 4 else math.nan for i in held])
        play_round(str(dtype), [make_flat(i, dtype) for i in held], numbers, SIZES)
    spoiled = [make_flat(i, torch.float32) for i in held]
    for i, flat in zip(held, spoiled, strict=True):
        if i in (1, 4):
            flat[-1] = math.nan if i == 1 else -math.inf
    play_round("spoiled", spoiled, None, SIZES)
    # As many numbers from each agent
    play_round("equal sizes", [torch.full((3,), float(i)) for i in held])
    exchange.isolated = True
    numbers = torch.ones(len(held))
    play_round("isolated", [make_flat(i, torch.float32) for i in held], numbers, SIZES)
    return results


if __name__ == "__main__":
    exchange = Exchange(len(SIZES), timeout=60)
    print(json.dumps(play(exchange)), flush=True)
    exchange.close()
