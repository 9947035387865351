"""What a method is called, and how it is drawn, in every figure and table of this repository.

    from methods import style_methods
    style_methods(["isolated", "pr-uniform"])["pr-uniform"].colour

A colour is an algorithm with its communicator; variants of it have other dashes. Isolated agents
are grey. The colours are Okabe and Ito's, which colour-blind readers can distinguish, and a few
darker ones beside them.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

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

DASHES = ("-", "--", ":", "-.")
MARKERS = {"-": "o", "--": "s", ":": "^", "-.": "D"}  # of the dashes, where no line is drawn
OTHER_COLOURS = ("#44AA99", "#AA4499", "#661100", "#332288")  # of names not listed below


@dataclass(frozen=True)
class Method:
    label: str
    colour: str
    dashes: str = "-"


# --exp-name -> name and style, in the order of the tables' rows
METHODS = {
    "isolated-no-penalty": Method("isolated, no KL penalty", GREY, "--"),
    "isolated": Method("isolated", GREY),
    "fedavg-uniform": Method("FedAvg, uniform", VERMILION),
    "fedavg-reward": Method("FedAvg, reward", ORANGE),
    "fedavg-similarity": Method("FedAvg, similarity", ORANGE, "--"),
    "fedavg-surrogate": Method("FedAvg, surrogate", OCHRE),
    "fedavg-surrogate-linear": Method("FedAvg, surrogate, falls to 0", OCHRE, "--"),
    "fedavg-pairs": Method("FedAvg, pairs", VERMILION, "-."),
    "fedper-uniform": Method("FedPer, uniform", ORANGE, ":"),
    "fedavg-then-alone": Method("FedAvg, uniform, then alone", VERMILION, ":"),
    "proximal-uniform": Method("pulled to the average of parameters, uniform", BLACK, ":"),
    "proximal-reward": Method("pulled to the average of parameters, reward", BLACK, "-."),
    "both-surrogate": Method("PR-PPO and FedPer, surrogate", PINK, ":"),
    "pr-uniform": Method("PR-PPO, uniform", BLUE),
    "pr-uniform-linear": Method("PR-PPO, uniform, falls to 0", BLUE, "--"),
    "isolated-searched": Method("isolated, learning rate 5e-4", GREY, ":"),
    "fedavg-uniform-searched": Method("FedAvg, uniform, coefficient 2", VERMILION, "--"),
    "fedavg-uniform-lr5e-4": Method("FedAvg, uniform, learning rate 5e-4", VERMILION, ":"),
    "pr-uniform-searched": Method("PR-PPO, uniform, learning rate 5e-4", BLUE, ":"),
    "pr-uniform-forward": Method("PR-PPO, uniform, forward KL as in eq. 4", BLUE, "--"),
    "pr-similarity": Method("PR-PPO, similarity", SKY),
    "pr-similarity-forward": Method("PR-PPO, similarity, forward KL", SKY, "--"),
    "pr-surrogate": Method("PR-PPO, surrogate", PINK),
    "pr-surrogate-linear": Method("PR-PPO, surrogate, falls to 0", PINK, "--"),
    "pr-pairs": Method("PR-PPO, pairs", BLUE, "-."),
    "pr-pairs-linear": Method("PR-PPO, pairs, falls to 0", BLUE, ":"),
    "pr-reward": Method("PR-PPO, reward", GREEN),
    "pr-reward-linear": Method("PR-PPO, reward, falls to 0", GREEN, "--"),
    "fedavg-median": Method("FedAvg, coordinate-wise median", WINE, ":"),
    "fedavg-relative-gain": Method("FedAvg, relative-gain", BLACK, "--"),
    "pr-relative-gain": Method("PR-PPO, relative-gain", BLACK),
    "reward-easy-times-10": Method("PR-PPO, reward", GREEN),
    "relative-gain-easy-times-10": Method("PR-PPO, relative-gain", BLACK),
    "pr-self0.2": Method("PR-PPO, self-preferred 0.2", PURPLE, "--"),
    "pr-self0.6": Method("PR-PPO, self-preferred 0.6", PURPLE),
    "isolated-trpo": Method("isolated TRPO", GREY, "-."),
    "pr-trpo": Method("PR-TRPO, uniform, a round every 4 updates", WINE, "--"),
    "pr-trpo-every1": Method("PR-TRPO, uniform, a round after every update", WINE),
    "isolated-snapshot": Method("isolated, held by its own old snapshot", GREY, ":"),
    "fedavg-uniform-every1": Method(
        "FedAvg, uniform, a round after every iteration",
        VERMILION,
        ":",
    ),
    "fedavg-uniform-every16": Method(
        "FedAvg, uniform, a round every 16 iterations", VERMILION, "--"
    ),
    "fedavg-uniform-every32": Method(
        "FedAvg, uniform, a round every 32 iterations", VERMILION, "-."
    ),
    "pr-uniform-every1": Method("PR-PPO, uniform, a round after every iteration", BLUE, ":"),
    "pr-uniform-every16": Method("PR-PPO, uniform, a round every 16 iterations", BLUE, "--"),
    "pr-uniform-every32": Method("PR-PPO, uniform, a round every 32 iterations", BLUE, "-."),
    "isolated-equal": Method("isolated, 64 64 64", GREY),
    "fedavg-uniform-equal": Method("FedAvg, uniform, 64 64 64", VERMILION),
    "pr-uniform-equal": Method("PR-PPO, uniform, 64 64 64", BLUE),
    "pr-reward-equal": Method("PR-PPO, reward, 64 64 64", GREEN),
    "isolated-unequal": Method("isolated, 128 32 32", GREY, "--"),
    "pr-uniform-unequal": Method("PR-PPO, uniform, 128 32 32", BLUE, "--"),
    "pr-reward-unequal": Method("PR-PPO, reward, 128 32 32", GREEN, "--"),
    "sb3": Method("stable-baselines3", BLACK),
    # Language models; communicators are uniform
    "isolated-grpo": Method("isolated GRPO", GREY),
    "fedavg-grpo": Method("FedAvg-GRPO", VERMILION),
    "pr-grpo": Method("PR-GRPO", BLUE),
    "isolated-ppo": Method("isolated PPO", GREY, "--"),
    "fedavg-ppo": Method("FedAvg-PPO", VERMILION, "--"),
    "pr-ppo": Method("PR-PPO", BLUE, "--"),
    # Preferences of their own
    "fedavg-private-grpo": Method("FedAvg-GRPO, last layer private", ORANGE),
    # Of agents in text worlds too
    "local": Method("isolated", GREY),
    "centralised": Method("centralised: one agent with all tasks", BLACK),
    "fedagent": Method("FedAgent", VERMILION),
    "pr-uniform-grpo": Method("PR-GRPO, uniform", BLUE),
    "pr-uniform-linear-grpo": Method("PR-GRPO, uniform, coefficient falls to 0", BLUE, "--"),
    "pr-self0.6-grpo": Method("PR-GRPO, self-preferred 0.6", PURPLE),
    "pr-self0.6-linear-grpo": Method("PR-GRPO, self-preferred 0.6, falls to 0", PURPLE, "--"),
    "fedavg-private-ppo": Method("FedAvg-PPO, last layer private", ORANGE, "--"),
    "pr-uniform-ppo": Method("PR-PPO, uniform", BLUE),
    "pr-uniform-linear-ppo": Method("PR-PPO, uniform, coefficient falls to 0", BLUE, "--"),
    "pr-self0.6-ppo": Method("PR-PPO, self-preferred 0.6", PURPLE),
    "pr-self0.6-linear-ppo": Method("PR-PPO, self-preferred 0.6, falls to 0", PURPLE, "--"),
    "fedavg-exact": Method("FedAvg, exact", VERMILION),
    "fedavg-naive": Method("FedAvg, naive", VERMILION, "--"),
    "pr-reverse": Method("PR-GRPO, reverse KL", BLUE),
    "pr-forward": Method("PR-GRPO, forward KL", BLUE, "--"),
}


def find_method(name: str) -> Method | None:
    """Name and style of an --exp-name; of `fedavg-uniform-16`, which is not listed, those of
    `fedavg-uniform`.
    """
    if name in METHODS:
        return METHODS[name]
    beginnings = [listed for listed in METHODS if name.startswith((f"{listed}-", f"{listed}_"))]
    if not beginnings:
        return None
    beginning = max(beginnings, key=len)
    method = METHODS[beginning]
    return replace(method, label=f"{method.label}, {name[len(beginning) + 1 :]}")


def find_place(name: str) -> int:
    """Where a method stands in a row of them: as in METHODS, those that are not listed behind."""
    return [*METHODS].index(name) if name in METHODS else len(METHODS)


def style_methods(names: Iterable[str]) -> dict[str, Method]:
    """Names and styles of the methods of one figure; those that are not listed get unused ones."""
    styles = {name: METHODS[name] for name in names if name in METHODS}
    unused_colours = list(OTHER_COLOURS)
    for name in names:
        if name in styles:
            continue
        method = find_method(name)
        if method is None:
            method = Method(name, unused_colours[0])
            unused_colours.append(unused_colours.pop(0))
        drawn = {(other.colour, other.dashes) for other in styles.values()}
        free = [dashes for dashes in DASHES if (method.colour, dashes) not in drawn]
        if free and method.dashes not in free:
            method = replace(method, dashes=free[0])
        styles[name] = method
    return {name: styles[name] for name in names}


def name_task(task: str) -> str:
    """A task's name as the text has it: DoorKey-5x5 for MiniGrid-DoorKey-5x5-v0, skills for
    runs/skills/train.jsonl.
    """
    task = re.sub(r"^runs/(\w+)/train\.jsonl", r"\1", task)
    return re.sub("^MiniGrid-|^BabyAI-|(NoFrameskip)?-v.$", "", task)
