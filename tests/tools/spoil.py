"""Run a script in which snapshots are spoiled: python spoil.py SCRIPT KIND AGENTS ROUNDS flags...

AGENTS and ROUNDS are numbers apart by commas: what these agents send in these rounds, from 1, is
not usable. KIND is one of `SPOILS`.
"""

import contextlib
import importlib
import math
import sys
from unittest import mock

from command import parse_args

import communicators


def fill_with_nan(flat):
    """Nothing is finite."""
    flat.fill_(math.nan)


def make_one_infinite(flat):
    """A single number is not finite."""
    flat[len(flat) // 2] = -math.inf


def make_policy_overflow(flat):
    """Finite parameters whose policy is not."""
    flat.fill_(3e38)


def make_squared_values_overflow(flat):
    """A finite policy and finite values, whose squares are not: the critic's bias comes last."""
    flat[-1] = 1e25


SPOILS = {
    "nan": fill_with_nan,
    "infinity": make_one_infinite,
    "policy": make_policy_overflow,
    "value": make_squared_values_overflow,
}


@contextlib.contextmanager
def spoil(kind, agents, rounds):
    """Within this context these agents send snapshots that are not usable in these rounds; the
    agents themselves are as they were.
    """
    play_round = communicators.Exchange.round
    number = 0

    def play_spoiled_round(exchange, sent, numbers=None, sizes=None):
        nonlocal number
        number += 1
        for i, flat in zip(exchange.agents, sent, strict=True):
            if i in agents and number in rounds:
                SPOILS[kind](flat)
        return play_round(exchange, sent, numbers, sizes)

    with mock.patch.object(communicators.Exchange, "round", play_spoiled_round):
        yield


if __name__ == "__main__":
    name, kind, agents, rounds, *argv = sys.argv[1:]
    script = importlib.import_module(name)
    with spoil(kind, [*map(int, agents.split(","))], [*map(int, rounds.split(","))]):
        script.main(parse_args(script, argv))
