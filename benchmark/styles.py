"""What methods, tasks and conditions are called, and how methods are drawn, in all figures and
tables.

A colour is an algorithm with its communicator, variants have other dashes; isolated agents are
grey. The colours are Okabe and Ito's, which colour-blind readers can distinguish, and a few darker
ones beside them.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

import pandas as pd

GREY = "#7F7F7F"
VERMILION = "#D55E00"
ORANGE = "#E69F00"
BLUE = "#0072B2"
SKY = "#56B4E9"
GREEN = "#009E73"
PINK = "#CC79A7"
PURPLE = "#5D3A9B"
WINE = "#882255"
BLACK = "#000000"
OCHRE = "#999933"
BROWN = "#8C510A"

DASHES = ("-", "--", ":", "-.")
OTHER_COLOURS = ("#44AA99", "#AA4499", "#661100", "#332288")  # of names not listed below


class Method(NamedTuple):
    label: str
    colour: str
    dashes: str = "-"


# --exp-name -> name and style, in the order of the tables' rows
STYLES = {
    "isolated-no-penalty": ("isolated, no KL penalty", GREY, "--"),
    "isolated": ("isolated", GREY),
    "fedavg-uniform": ("FedAvg, uniform", VERMILION),
    "fedavg-reward": ("FedAvg, reward", ORANGE),
    "fedavg-similarity": ("FedAvg, similarity", ORANGE, "--"),
    "fedavg-surrogate": ("FedAvg, surrogate", OCHRE),
    "fedavg-surrogate-linear": ("FedAvg, surrogate, falls to 0", OCHRE, "--"),
    "fedavg-pairs": ("FedAvg, pairs", VERMILION, "-."),
    "fedper-uniform": ("FedPer, uniform", ORANGE, ":"),
    "fedhpd": ("FedHPD", WINE),
    "fedavg-then-alone": ("FedAvg, uniform, then alone", VERMILION, ":"),
    "exploit": ("copies the best agent", WINE),
    "kickstarting": ("kickstarting by the best agent, falls to 0", WINE, "--"),
    "distral": ("Distral, pools states, falls to 0", BLACK),
    "pooled": ("one agent on all tasks, with the steps of one", GREY, "-."),
    "pooled-all": ("one agent on all tasks, with the steps of all", GREY, "--"),
    "proximal-uniform": ("pulled to the average of parameters, uniform", BLACK, ":"),
    "proximal-reward": ("pulled to the average of parameters, reward", BLACK, "-."),
    "both-surrogate": ("PR-PPO and FedPer, surrogate", PINK, ":"),
    "pr-uniform": ("PR-PPO, uniform", BLUE),
    "pr-uniform-linear": ("PR-PPO, uniform, falls to 0", BLUE, "--"),
    "pr-gate": ("PR-PPO, gated by value", BROWN),
    "pr-means-linear": ("PR-PPO, the gate's mean weights, falls to 0", BROWN, ":"),
    "isolated-searched": ("isolated, learning rate 5e-4", GREY, ":"),
    "fedavg-uniform-searched": ("FedAvg, uniform, coefficient 2", VERMILION, "--"),
    "fedavg-uniform-lr5e-4": ("FedAvg, uniform, learning rate 5e-4", VERMILION, ":"),
    "pr-uniform-searched": ("PR-PPO, uniform, learning rate 5e-4", BLUE, ":"),
    "pr-uniform-forward": ("PR-PPO, uniform, forward KL as in eq. 4", BLUE, "--"),
    "pr-similarity": ("PR-PPO, similarity", SKY),
    "pr-similarity-forward": ("PR-PPO, similarity, forward KL", SKY, "--"),
    "pr-gate-forward": ("PR-PPO, gated by value, forward KL", BROWN, "-."),
    "pr-similarity-gate-forward": ("PR-PPO, similarity, gated by value, forward KL", PINK, "--"),
    "pr-surrogate": ("PR-PPO, surrogate", PINK),
    "pr-surrogate-linear": ("PR-PPO, surrogate, falls to 0", PINK, "--"),
    "pr-pairs": ("PR-PPO, pairs", BLUE, "-."),
    "pr-pairs-linear": ("PR-PPO, pairs, falls to 0", BLUE, ":"),
    "pr-reward": ("PR-PPO, reward", GREEN),
    "pr-reward-linear": ("PR-PPO, reward, falls to 0", GREEN, "--"),
    "pr-gate-linear": ("PR-PPO, gated by value, falls to 0", BROWN, "--"),
    "pr-reward-linear-equal": ("PR-PPO, reward, falls to 0, six of 128", GREEN, ":"),
    "pr-gate-linear-equal": ("PR-PPO, gated by value, falls to 0, six of 128", BROWN, ":"),
    "fedavg-private-critics": ("FedAvg, uniform, private critics", VERMILION, ":"),
    "fedavg-common-units": ("FedAvg, uniform, common units", VERMILION, "-."),
    "fedavg-median": ("FedAvg, coordinate-wise median", WINE, ":"),
    "fedavg-relative-gain": ("FedAvg, relative-gain", BLACK, "--"),
    "pr-relative-gain": ("PR-PPO, relative-gain", BLACK),
    "gate-equal": ("PR-PPO, gated by value, equal units", BROWN, ":"),
    "gate-easy-times-10": ("PR-PPO, gated by value, 5x5 times 10", BROWN),
    "gate-hard-times-10": ("PR-PPO, gated by value, 8x8 times 10", BROWN, "--"),
    "reward-equal": ("PR-PPO, reward, equal units", GREEN, ":"),
    "reward-easy-times-10": ("PR-PPO, reward", GREEN),
    "reward-hard-times-10": ("PR-PPO, reward, 8x8 times 10", GREEN, "--"),
    "relative-gain-easy-times-10": ("PR-PPO, relative-gain", BLACK),
    "pr-self0.2": ("PR-PPO, self-preferred 0.2", PURPLE, "--"),
    "pr-self0.6": ("PR-PPO, self-preferred 0.6", PURPLE),
    "isolated-trpo": ("isolated TRPO", GREY, "-."),
    "pr-trpo": ("PR-TRPO, uniform, a round every 4 updates", WINE, "--"),
    "pr-trpo-every1": ("PR-TRPO, uniform, a round after every update", WINE),
    "isolated-snapshot": ("isolated, held by its own old snapshot", GREY, ":"),
    "fedavg-uniform-every1": ("FedAvg, uniform, a round after every iteration", VERMILION, ":"),
    "fedavg-uniform-every16": ("FedAvg, uniform, a round every 16 iterations", VERMILION, "--"),
    "fedavg-uniform-every32": ("FedAvg, uniform, a round every 32 iterations", VERMILION, "-."),
    "pr-uniform-every1": ("PR-PPO, uniform, a round after every iteration", BLUE, ":"),
    "pr-uniform-every16": ("PR-PPO, uniform, a round every 16 iterations", BLUE, "--"),
    "pr-uniform-every32": ("PR-PPO, uniform, a round every 32 iterations", BLUE, "-."),
    "isolated-equal": ("isolated, 64 64 64", GREY),
    "fedavg-uniform-equal": ("FedAvg, uniform, 64 64 64", VERMILION),
    "pr-uniform-equal": ("PR-PPO, uniform, 64 64 64", BLUE),
    "pr-reward-equal": ("PR-PPO, reward, 64 64 64", GREEN),
    "isolated-unequal": ("isolated, 128 32 32", GREY, "--"),
    "pr-uniform-unequal": ("PR-PPO, uniform, 128 32 32", BLUE, "--"),
    "pr-reward-unequal": ("PR-PPO, reward, 128 32 32", GREEN, "--"),
    "sb3": ("stable-baselines3", BLACK),
    # Language models; communicators are uniform
    "isolated-grpo": ("isolated GRPO", GREY),
    "fedavg-grpo": ("FedAvg-GRPO", VERMILION),
    "pr-grpo": ("PR-GRPO", BLUE),
    "isolated-ppo": ("isolated PPO", GREY, "--"),
    "fedavg-ppo": ("FedAvg-PPO", VERMILION, "--"),
    "pr-ppo": ("PR-PPO", BLUE, "--"),
    "pr0.6-grpo": ("PR-GRPO, self-preferred 0.6", PURPLE),
    "pr0.2-grpo": ("PR-GRPO, self-preferred 0.2", PURPLE, ":"),
    "pr0.6-ppo": ("PR-PPO, self-preferred 0.6", PURPLE, "--"),
    "pr0.2-ppo": ("PR-PPO, self-preferred 0.2", PURPLE, "-."),
    "fedavg-private-grpo": ("FedAvg-GRPO, last layer private", ORANGE),
    # Agents in text worlds, and with preferences of their own
    "local": ("isolated", GREY),
    "centralised": ("centralised: one agent with all tasks", BLACK),
    "fedagent": ("FedAgent", VERMILION),
    "pr-uniform-grpo": ("PR-GRPO, uniform", BLUE),
    "pr-uniform-linear-grpo": ("PR-GRPO, uniform, coefficient falls to 0", BLUE, "--"),
    "pr-reward-linear-grpo": ("PR-GRPO, reward, coefficient falls to 0", GREEN, "--"),
    "pr-self0.6-grpo": ("PR-GRPO, self-preferred 0.6", PURPLE),
    "pr-self0.6-linear-grpo": ("PR-GRPO, self-preferred 0.6, falls to 0", PURPLE, "--"),
    "fedavg-private-ppo": ("FedAvg-PPO, last layer private", ORANGE, "--"),
    "pr-uniform-ppo": ("PR-PPO, uniform", BLUE),
    "pr-uniform-linear-ppo": ("PR-PPO, uniform, coefficient falls to 0", BLUE, "--"),
    "pr-self0.6-ppo": ("PR-PPO, self-preferred 0.6", PURPLE),
    "pr-self0.6-linear-ppo": ("PR-PPO, self-preferred 0.6, falls to 0", PURPLE, "--"),
    "fedavg-exact": ("FedAvg, exact", VERMILION),
    "fedavg-naive": ("FedAvg, naive", VERMILION, "--"),
    "pr-reverse": ("PR-GRPO, reverse KL", BLUE),
    "pr-forward": ("PR-GRPO, forward KL", BLUE, "--"),
}
METHODS = {name: Method(*style) for name, style in STYLES.items()}


def find_method(name: str) -> Method:
    """Name and style of an --exp-name; of `fedavg-uniform-16`, which is not listed, those of
    `fedavg-uniform`; of one that nobody knows no colour.
    """
    if name in METHODS:
        return METHODS[name]
    beginnings = [listed for listed in METHODS if name.startswith((f"{listed}-", f"{listed}_"))]
    if not beginnings:
        return Method(name, "")
    beginning = max(beginnings, key=len)
    method = METHODS[beginning]
    return method._replace(label=f"{method.label}, {name[len(beginning) + 1 :]}")


def find_place(name: str) -> int:
    """Where a method stands in a row of them: as in METHODS, those that are not listed behind."""
    return [*METHODS].index(name) if name in METHODS else len(METHODS)


def style_methods(names: Iterable[str]) -> dict[str, Method]:
    """Names and styles of the methods of one figure, no two alike while dashes last."""
    styles = {}
    unused_colours = list(OTHER_COLOURS)
    for name in sorted(names, key=find_place):
        method = find_method(name)
        if not method.colour:
            method = method._replace(colour=unused_colours[0])
            unused_colours.append(unused_colours.pop(0))
        drawn = {(other.colour, other.dashes) for other in styles.values()}
        free = [dashes for dashes in DASHES if (method.colour, dashes) not in drawn]
        if free and method.dashes not in free:
            method = method._replace(dashes=free[0])
        styles[name] = method
    return {name: styles[name] for name in names}


def name_task(task: str) -> str:
    """A task's name as the text has it: DoorKey-5x5 for MiniGrid-DoorKey-5x5-v0, skills for
    runs/skills/train.jsonl.
    """
    tasks = re.sub(r"^runs/(\w+)/train\.jsonl", r"\1", task).split("+")
    return "+".join(
        re.sub(r"^MiniGrid-|^BabyAI-|^[\w.]+:|(NoFrameskip)?-v.$", "", task) for task in tasks
    )


def order_conditions(names: Iterable[str]) -> list[str]:
    """Numbers by their size, then words by the alphabet, "none" before the others."""

    def key(name: str) -> tuple:
        number = pd.to_numeric(name, errors="coerce")
        if pd.isna(number):
            return 1, name != "none", name
        return 0, number

    return sorted(set(names), key=key)


def count_seeds(number: int | str) -> str:
    """1 seed, 2 seeds, ..."""
    return "1 seed" if str(number) == "1" else f"{number} seeds"
