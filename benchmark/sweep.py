"""Prints the training commands of a sweep, one per line; `bash benchmark/sweep.sh --help` has more.

A family is a function that yields commands. Within an experiment seeds are the outermost loop, so
that a sweep that is cut off has whole seeds; trpo, preferences, s2zpo, fedagent and `minigrid
--results` list several experiments one after the other.
"""

import itertools
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

USAGE = """\
usage: bash benchmark/sweep.sh minigrid|atari|llm [--quick | --results]
       bash benchmark/sweep.sh minigrid --tune
       bash benchmark/sweep.sh table1 [--quick | --skills]
       bash benchmark/sweep.sh doorkey|keycorridor|missions|levels|networks|crowd|skills|preferences
           [--tune | --results]
       bash benchmark/sweep.sh goals|unlock-goals [--tune | --results]
       bash benchmark/sweep.sh anchor|trpo|agreement|liars [--results]
       bash benchmark/sweep.sh s2zpo [--quick | --results]
       bash benchmark/sweep.sh fedagent [--quick | --tune]

Prints training commands, one per line; runs nothing. benchmark/run.py executes them, here or as
Slurm arrays, and goes on where it was cut off. The lines assume the root of the repository as
working directory; but for those of llm and table1 they use one core each (on a GPU machine several
share a GPU):

    bash benchmark/sweep.sh minigrid --quick | python benchmark/run.py
    python benchmark/plot.py --runs runs/minigrid-quick --out minigrid-quick

(default)  the paper's grid. minigrid, atari: table 2, three tasks or two games, ten seeds, five
           methods. llm: table 5, seven agents on TL;DR, a GPU of 80 GB each
           (benchmark/llm_memory.py counts), with the reward model that benchmark/pipeline.sh trains
--quick    a night on two cores. minigrid: two tasks, three seeds, two learning rates, 1 M steps;
           atari: BeamRider, two seeds, 1 M steps; llm: three agents and the small model on
           documentation
--results  the runs behind benchmark/results/: 22, 3 and 1.5 hours on two cores
--tune     minigrid: FourRooms, one tuning seed, 250,000 steps; the paper's learning rates and
           coefficients, but a round every 4 iterations and the reverse KL, with two forward
           variants besides: the first rung of successive halving (benchmark/choose.py --halve)

table1, the paper's table 1 at small scale (docs/pipeline.md): SmolLM2 on documentation, three
agents, from the adapter and with the reward model of `benchmark/pipeline.sh all --quick`.
(default)  PPO and GRPO, iid and by topic, five methods, three KL coefficients, three seeds: more
           than a day on two cores, estimated from those of llm
--quick    one KL coefficient, one seed: two and a quarter hours, from 13 minutes for a run on one
           core
--skills   the same on string skills, as skills below: a tiny model and three seeds, 40 minutes

When does sharing pay (docs/results.md): doorkey and keycorridor, agents with an easy, a middling
and a hard task; missions, with conflicting goals; levels, with few levels each; networks, of
different sizes; crowd, 1 to 8 agents on one hard task; skills, language models that differ in how
many of their prompts are for a rare skill (first run benchmark/skills.py); preferences, language
models that share skills and have a style each (first run `python benchmark/skills.py --preferences
--prompt-shares 0.8 --prompts 1800 --out runs/preferences`); goals and unlock-goals, agents that
share skills and have goals of their own, on two kinds of tasks; agreement, as goals, where the
goals agree in a part of the levels.
liars: one agent of four sends what it has not learned. anchor: what slows mixing down, peers or the
age of the snapshots. trpo: PR-TRPO, isolated TRPO and PR-PPO at equal steps on three tasks, and how
far PR-TRPO's updates move, with and without the bound of --delta.
--tune     a small grid on a tuning seed, the same for every method; benchmark/choose.py chooses
--results  the chosen settings on five fresh seeds (also the default)

fedagent: agents in text worlds, the FedAgent paper's table 1, with PR-GRPO beside it.
(default)  the paper's size: Qwen2.5-1.5B-Instruct in ALFWorld, 100 clients of which two train in a
           round, 70 rounds of three epochs; two GPUs each
--quick    the small model in BabyAI (first run benchmark/babyai.py): 12 clients, three at a time,
           in one category of tasks, in two where clients prefer categories
--tune     its KL coefficients on a tuning seed

s2zpo: Par-S2ZPO, FedAvg-S2ZPO and their centralised counterpart, on the same grid of mu and eta.
(default)  four tasks of MuJoCo with 1,000 steps, 2, 4 and 8 agents, five seeds: days
--quick    CartPole-v1, one seed: five minutes on one core
--results  CartPole-v1, and the four tasks with 250 steps and a smaller grid; four agents, five
           seeds: two hours on two cores

--exp-name names the method and the settings that are searched over. An estimate of the time goes to
stderr.
"""
CONTROL = ("minigrid", "atari")
FEDAVG_SCRIPTS = {"minigrid": "fedavg_ppo.py", "atari": "fedavg_atari.py"}
SHARING = ("doorkey", "keycorridor", "missions", "levels", "networks", "crowd")
OWN_GOALS = ("goals", "unlock-goals")
OTHERS = ("anchor", "trpo", "agreement", "liars")
LANGUAGE = ("llm", "table1")
STRINGS = ("skills", "preferences")
# Family -> its modes; the first one is the default
MODES = {
    **{family: ("", "--quick", "--results") for family in (*CONTROL, "llm")},
    "minigrid": ("", "--quick", "--results", "--tune"),
    "table1": ("", "--quick", "--skills"),
    **{family: ("--results", "--tune") for family in (*SHARING, *OWN_GOALS, *STRINGS)},
    **{family: ("--results",) for family in OTHERS},
    "s2zpo": ("", "--quick", "--results"),
    "fedagent": ("", "--quick", "--tune"),
}

ONE_THREAD = "OMP_NUM_THREADS=1 python"
BEAM_RIDER = "BeamRiderNoFrameskip-v4"
DOOR_KEY = "--env-id MiniGrid-DoorKey-6x6-v0"
THREE_DOORS = "--env-ids MiniGrid-DoorKey-5x5-v0 MiniGrid-DoorKey-6x6-v0 MiniGrid-DoorKey-8x8-v0"
# Flags of the language models that learn string skills
STRING_SKILLS = (
    "--base-model runs/skills/model --dataset runs/skills/train.jsonl"
    " --reward benchmark/skills.py:exact --missing-eos-penalty 0 --precision float32"
    " --temperature 1 --response-length 13 --lora-rank 8 --prompts-per-agent 400 --eval-prompts 40"
)

FIVE_SEEDS = (1, 2, 3, 4, 5)
TUNING_SEEDS = (101,)
# Agent-steps per second of each of two cores
ATARI_SPEED = 650
SPEEDS = {"missions": 3000, "levels": 2000, "trpo": 2500}
DEFAULT_SPEED = 6000


def join(*texts: str) -> str:
    """A command from its texts, without those that are empty."""
    return " ".join(text for text in texts if text)


def name_folder(family: str, mode: str) -> str:
    """The --run-dir of a family's runs."""
    return f"runs/{family}{mode.replace('--', '-')}"


# Table 2: MiniGrid and Atari


@dataclass(frozen=True)
class Grid:
    tasks: tuple[str, ...]
    methods: tuple[str, ...]
    steps: int
    local_updates: int
    seeds: tuple[int, ...] = tuple(range(1, 11))
    rates: tuple[str, ...] = ("5e-5", "1e-4", "2.5e-4", "5e-4", "1e-3")
    kl_coefs: tuple[str, ...] = ("0.5", "1", "2", "5", "10", "20", "50")
    """of isolated agents and FedAvg"""
    peer_coefs: tuple[str, ...] = ("0.5", "1", "2", "5", "10", "20")
    """the paper's communication coefficient"""
    common: str = ""
    """flags of all runs"""


MINIGRID = Grid(
    tasks=("MiniGrid-FourRooms-v0", "MiniGrid-DoorKey-6x6-v0", "MiniGrid-DistShift2-v0"),
    methods=("isolated", "fedavg-uniform", "fedavg-similarity", "pr-uniform", "pr-similarity"),
    steps=5000000,
    local_updates=32,
)
ATARI = Grid(
    tasks=(BEAM_RIDER, "AsterixNoFrameskip-v4"),
    methods=("isolated", "fedavg-uniform", "fedavg-reward", "pr-uniform", "pr-reward"),
    steps=10000000,
    local_updates=16,
)
GRIDS = {
    ("minigrid", ""): MINIGRID,
    ("minigrid", "--quick"): replace(
        MINIGRID,
        tasks=("MiniGrid-DoorKey-6x6-v0", "MiniGrid-DistShift2-v0"),
        seeds=(1, 2, 3),
        steps=1000000,
        rates=("2.5e-4", "1e-3"),
        kl_coefs=("0.5",),
        peer_coefs=("0.5",),
    ),
    ("minigrid", "--results"): replace(
        MINIGRID,
        methods=(
            "isolated",
            "isolated-no-penalty",
            "fedavg-uniform",
            "pr-uniform",
            "pr-similarity",
            "pr-reward",
            "pr-uniform-forward",
        ),
        seeds=FIVE_SEEDS,
        steps=200000,
        rates=("1e-3",),
        kl_coefs=("0.5",),
        peer_coefs=("0.5",),
        local_updates=4,
    ),
    ("minigrid", "--tune"): replace(
        MINIGRID,
        tasks=("MiniGrid-FourRooms-v0",),
        methods=(*MINIGRID.methods, "pr-uniform-forward", "pr-similarity-forward"),
        seeds=TUNING_SEEDS,
        steps=250000,
        local_updates=4,
    ),
    ("atari", ""): ATARI,
    ("atari", "--quick"): replace(
        ATARI,
        tasks=(BEAM_RIDER,),
        seeds=(1, 2),
        steps=1000000,
        rates=("2.5e-4",),
        kl_coefs=("1",),
        peer_coefs=("1",),
    ),
    ("atari", "--results"): replace(
        ATARI,
        tasks=(BEAM_RIDER,),
        methods=("isolated", "pr-reward"),
        seeds=(1, 2),
        steps=1001472,
        rates=("2.5e-4",),
        kl_coefs=("1",),
        peer_coefs=("1",),
        common="--eval-every 122",
    ),
}

# Other settings than those of GRIDS at the paper's length on FourRooms (docs/results.md): what the
# search there has chosen, and for FedAvg also the learning rate that it has chosen for the others.
# Method -> end of the runs' names -> settings
OTHER_SETTINGS = {
    "isolated": {"-searched": {"rates": ("5e-4",)}},
    "fedavg-uniform": {"-searched": {"kl_coefs": ("2",)}, "-lr5e-4": {"rates": ("5e-4",)}},
    "pr-uniform": {"-searched": {"rates": ("5e-4",)}},
}


def list_control(family: str, mode: str) -> Iterator[str]:
    """The paper's grid of a family, or a part of it."""
    grid = GRIDS[family, mode]
    if (family, mode) == ("minigrid", "--results"):
        yield from list_minigrid_results(grid)
        yield from list_paper_length(grid)
        yield from list_yardstick(grid)
        return
    for seed in grid.seeds:
        for task in grid.tasks:
            for method in grid.methods:
                settings = {"task": task, "seed": seed, "steps": grid.steps}
                settings["folder"] = name_folder(family, mode)
                if mode == "--tune":
                    settings["direction"] = choose_direction(method)
                yield from list_method(family, mode, grid, method, **settings)


def choose_direction(method: str) -> str:
    """Of the KL: forward for methods that are named after it, else reverse."""
    return "forward" if method.endswith("-forward") else "reverse"


def list_minigrid_results(grid: Grid) -> Iterator[str]:
    """Five seeds of FourRooms with 1 M steps; three of the other tasks, which are learned
    sooner.
    """
    for seed in grid.seeds:
        for task in grid.tasks:
            four_rooms = "FourRooms" in task
            if not four_rooms and seed > 3:
                continue
            for method in grid.methods:
                if four_rooms and method == "isolated-no-penalty":
                    continue
                settings = {"task": task, "seed": seed, "direction": choose_direction(method)}
                settings["steps"] = 1000000 if four_rooms else grid.steps
                folder = "runs/fourrooms-results" if four_rooms else "runs/minigrid-results"
                settings["folder"] = folder
                yield from list_method("minigrid", "--results", grid, method, **settings)


def list_paper_length(grid: Grid) -> Iterator[str]:
    """The paper's 5 M steps on FourRooms, where the KL has the paper's direction too, and
    methods have OTHER_SETTINGS besides; and 1 M on the other tasks.
    """
    for seed in grid.seeds:
        for task in MINIGRID.tasks:
            four_rooms = "FourRooms" in task
            methods = ["isolated", "fedavg-uniform", "pr-uniform"]
            if four_rooms:
                methods += ["pr-uniform-forward", "fedavg-similarity"]
                methods += ["pr-similarity", "pr-similarity-forward"]
            for method in methods:
                settings = {"task": task, "seed": seed, "direction": choose_direction(method)}
                settings["steps"] = MINIGRID.steps if four_rooms else 1000000
                settings["folder"] = "runs/fourrooms-5m" if four_rooms else "runs/minigrid-1m"
                yield from list_method("minigrid", "--results", grid, method, **settings)
                if not four_rooms:
                    continue
                for suffix, changes in OTHER_SETTINGS.get(method, {}).items():
                    other = replace(grid, **changes)
                    settings["suffix"] = suffix
                    yield from list_method("minigrid", "--results", other, method, **settings)


def list_method(
    family: str,
    mode: str,
    grid: Grid,
    method: str,
    *,
    task: str,
    seed: int,
    steps: int,
    folder: str,
    direction: str = "forward",
    suffix: str = "",
) -> Iterator[str]:
    """A command for each learning rate and coefficient of a method.

    Table 2's settings are flags, because the scripts have other defaults. suffix: of the name of
    the runs, where it does not end with their settings.
    """
    script = f"prpo_{family}.py"
    coefs = grid.kl_coefs
    kind, _, communicator = method.partition("-")
    if kind == "isolated":
        communicator = "identity"
        if method == "isolated-no-penalty":
            coefs = ("0",)
    elif kind == "fedavg":
        script = FEDAVG_SCRIPTS[family]
    else:
        communicator = communicator.removesuffix("-forward")
        coefs = grid.peer_coefs
    for rate in grid.rates:
        for coef in coefs:
            name = method + suffix if mode == "--results" else f"{method}_lr{rate}_coef{coef}"
            yield join(
                f"{ONE_THREAD} {script} --communicator {communicator} --env-id {task}",
                f"--seed {seed} --total-timesteps {steps} --learning-rate {rate} --kl-coef {coef}",
                f"--kl-direction {direction} --local-updates {grid.local_updates}",
                grid.common,
                f"--run-dir {folder} --exp-name {name}",
            )


def list_yardstick(grid: Grid) -> Iterator[str]:
    """One agent without penalty and value clipping, against stable-baselines3."""
    for seed in range(1, 9):
        task = f"{DOOR_KEY} --seed {seed} --total-timesteps {grid.steps} --learning-rate 1e-3"
        task += " --no-clip-vloss --eval-episodes 20 --run-dir runs/sb3"
        yield f"{ONE_THREAD} benchmark/baselines/sb3_ppo.py {task} --exp-name sb3"
        isolated = "prpo_minigrid.py --communicator identity --num-agents 1 --kl-coef 0"
        isolated += " --kl-direction forward --local-updates 32"
        yield f"{ONE_THREAD} {isolated} {task} --exp-name isolated"


# When does sharing pay: agents that differ

SEVEN_METHODS = (
    "isolated",
    "fedavg-uniform",
    "fedavg-reward",
    "pr-uniform",
    "pr-reward",
    "pr-similarity",
    "pr-surrogate",
)
METHODS = {
    "doorkey": SEVEN_METHODS,
    "keycorridor": SEVEN_METHODS,
    "missions": (
        "isolated",
        "fedavg-uniform",
        "pr-uniform",
        "pr-self0.6",
        "pr-self0.2",
        "pr-similarity",
        "pr-surrogate",
    ),
    "levels": ("isolated", "fedavg-uniform", "pr-uniform"),
    "networks": ("isolated", "fedavg-uniform", "pr-uniform", "pr-reward"),
    "crowd": ("isolated", "fedavg-uniform", "pr-uniform", "pr-reward"),
}
STEPS = {
    "doorkey": 250000,
    "keycorridor": 250000,
    "missions": 143360,
    "levels": 122880,
    "networks": 250000,
    "crowd": 150000,
}
KEY_CORRIDORS = [f"MiniGrid-KeyCorridorS3R{rows}-v0" for rows in (1, 2, 3)]
LEVELS = "--env-id MiniGrid-MultiRoom-N2-S4-v0 --levels-per-agent"
# Variant, which the name of a run ends in -> its flags
VARIANTS = {
    "doorkey": {"": THREE_DOORS},
    "keycorridor": {"": f"--env-ids {' '.join(KEY_CORRIDORS)}"},
    "missions": {"": "--env-id MiniGrid-Fetch-5x5-N2-v0 --missions key ball key"},
    "levels": {str(levels): f"{LEVELS} {levels}" for levels in (4, 16, 64)},
    "networks": {
        "equal": f"{DOOR_KEY} --hidden-sizes 64 64 64",
        "unequal": f"{DOOR_KEY} --hidden-sizes 128 32 32",
    },
    "crowd": {str(agents): f"{DOOR_KEY} --num-agents {agents}" for agents in (8, 4, 2)},
}


def is_left_out(family: str, mode: str, method: str, variant: str) -> bool:
    """What is not run: averages of unequal networks, and crowds that follow from others."""
    if family == "networks":
        return variant == "unequal" and method.startswith("fedavg-")
    if family == "crowd" and variant in ("2", "4"):
        # Eight agents alone are also two or four; and eight are tuned for all
        return method == "isolated" or mode == "--tune"
    return False


def list_sharing(family: str, mode: str) -> Iterator[str]:
    """Agents that differ in a task, a mission, levels or networks, or in how many they are."""
    tuned = mode == "--tune"
    seeds = TUNING_SEEDS if tuned else FIVE_SEEDS
    coefs = ("0.1", "0.2", "0.5", "2") if tuned else ("0.5",)
    for seed in seeds:
        for variant, task in VARIANTS[family].items():
            for method in METHODS[family]:
                if is_left_out(family, mode, method, variant):
                    continue
                for coef in coefs:
                    name = f"{method}-{variant}" if variant else method
                    if tuned:
                        name += f"_coef{coef}"
                    yield join(
                        f"{ONE_THREAD} {choose_method(method)} {task} --seed {seed}",
                        f"--total-timesteps {STEPS[family]} --learning-rate 1e-3 --kl-coef {coef}",
                        "--kl-direction reverse --local-updates 4 --eval-episodes 50",
                        f"--run-dir {name_folder(family, mode)} --exp-name {name}",
                    )


def choose_method(method: str) -> str:
    """Script and communicator of a method of `list_sharing`."""
    kind, _, communicator = method.partition("-")
    if kind == "isolated":
        return "prpo_minigrid.py --communicator identity"
    if kind == "fedavg":
        return f"fedavg_ppo.py --communicator {communicator}"
    if communicator.startswith("self"):
        preference = communicator.removeprefix("self")
        script = "prpo_minigrid.py --communicator self-preferred"
        return f"{script} --self-preference {preference}"
    return f"prpo_minigrid.py --communicator {communicator}"


# Shared skills, own goals: two pairs of agents, one on an easy and one on a hard task each

FEDAVG = "fedavg_ppo.py --communicator"
PR_PPO = "prpo_minigrid.py --communicator"
PAIRS = "benchmark/pairs.csv"  # the agents that want the same, which nobody could know
GOAL_METHODS = {
    "isolated": f"{PR_PPO} identity",
    "fedavg-uniform": f"{FEDAVG} uniform",
    "fedavg-reward": f"{FEDAVG} reward",
    "fedavg-surrogate": f"{FEDAVG} surrogate",
    "fedavg-pairs": f"{FEDAVG} {PAIRS}",
    "pr-uniform": f"{PR_PPO} uniform",
    "pr-reward": f"{PR_PPO} reward",
    "pr-surrogate": f"{PR_PPO} surrogate",
    "pr-pairs": f"{PR_PPO} {PAIRS}",
    # The relatives of FedAvg that were made for agents with goals of their own
    "fedper-uniform": f"{FEDAVG} uniform --private-heads actor critic",
    "proximal-uniform": f"{FEDAVG} uniform",
    "proximal-reward": f"{FEDAVG} reward",
}
GOAL_TASKS = {
    "goals": [
        f"benchmark.goals:DoorKeyGoals-{task}-v0"
        for task in ("5x5-green", "8x8-green", "5x5-blue", "8x8-blue")
    ],
    "unlock-goals": [
        f"benchmark.goals:UnlockGoals-{task}-v0"
        for task in ("5x5-ball", "6x6-ball", "5x5-box", "6x6-box")
    ],
}
GOAL_COEFS = ("0.02", "0.1", "0.5", "2")
# Of the pull towards the average parameters, which has a coefficient of its own
PROXIMAL_COEFS = ("0.001", "0.01", "0.1", "1")
# Also with a coefficient that falls to 0
LINEAR_METHODS = ("fedavg-surrogate", "pr-uniform", "pr-reward", "pr-surrogate", "pr-pairs")
# Method -> coefficient that choose.py prefers; else 0.5 (docs/results.md, section 12)
CHOSEN_GOALS = {
    "goals": {
        "fedavg-pairs": "0.02",
        "fedavg-reward": "0.1",
        "fedavg-surrogate-linear": "0.1",
        "fedper-uniform": "0.02",
        "pr-reward": "0.1",
        "pr-uniform": "0.1",
        "proximal-reward": "0.1",
        "proximal-uniform": "0.1",
    },
    "unlock-goals": {
        "fedavg-pairs": "0.02",
        "fedavg-surrogate": "0.1",
        "fedavg-surrogate-linear": "0.1",
        "fedavg-uniform": "0.1",
        "isolated": "2",
        "pr-pairs": "0.02",
        "pr-pairs-linear": "0.1",
        "pr-reward": "0.1",
        "pr-reward-linear": "0.1",
        "pr-surrogate": "0.1",
        "pr-uniform": "0.1",
        "pr-uniform-linear": "0.1",
        "proximal-reward": "0.01",
        "proximal-uniform": "0.001",
    },
}


def list_goals(family: str, mode: str) -> Iterator[str]:
    """Four agents with goals of their own, by every method; tuned at full length, because the hard
    tasks are learned late.
    """
    tuned = mode == "--tune"
    seeds = TUNING_SEEDS if tuned else FIVE_SEEDS
    episodes = 0 if tuned else 20
    for seed in seeds:
        common = f"--num-agents 4 --env-ids {' '.join(GOAL_TASKS[family])} --seed {seed}"
        common += " --total-timesteps 249856 --learning-rate 1e-3 --kl-direction reverse"
        common += f" --local-updates 4 --eval-episodes {episodes}"
        common += f" --run-dir {name_folder(family, mode)}"
        for method, flags in list_goal_methods():
            coef_flag = "--kl-coef"
            coefs = GOAL_COEFS
            if method.startswith("proximal"):
                coef_flag = "--prox-coef"
                coefs = PROXIMAL_COEFS
            if not tuned:
                coef = CHOSEN_GOALS[family].get(method, "0.5")
                yield f"{ONE_THREAD} {flags} {coef_flag} {coef} {common} --exp-name {method}"
                continue
            for coef in coefs:
                name = f"{method}_coef{coef}"
                yield f"{ONE_THREAD} {flags} {coef_flag} {coef} {common} --exp-name {name}"


def list_goal_methods() -> Iterator[tuple[str, str]]:
    """Methods with their flags; some of them with a falling coefficient too."""
    for method, flags in GOAL_METHODS.items():
        yield method, flags
        if method in LINEAR_METHODS:
            yield f"{method}-linear", f"{flags} --kl-schedule linear"


AGREEMENTS = ("0", "25", "50", "75", "100")
AGREEMENT_METHODS = ("isolated", "fedavg-uniform", "fedavg-surrogate", "pr-uniform", "pr-surrogate")


def list_agreement(family: str, mode: str) -> Iterator[str]:
    """As goals, on an easy and a middling task, where goals agree in a part of the levels."""
    for seed in FIVE_SEEDS:
        for percent in AGREEMENTS:
            suffix = "" if percent == "0" else f"-{percent}"
            tasks = [
                f"benchmark.goals:DoorKeyGoals-{task}{suffix}-v0"
                for task in ("5x5-green", "6x6-green", "5x5-blue", "6x6-blue")
            ]
            for method in AGREEMENT_METHODS:
                yield join(
                    f"{ONE_THREAD} {GOAL_METHODS[method]} --kl-coef 0.5",
                    f"--num-agents 4 --env-ids {' '.join(tasks)} --seed {seed}",
                    "--total-timesteps 122880 --learning-rate 1e-3 --kl-direction reverse",
                    "--local-updates 4 --eval-episodes 0",
                    f"--run-dir {name_folder(family, mode)} --exp-name {method}-{percent}",
                )


# One agent of four that lies

LIES = ("none", "random", "flipped", "opposite")
AVERAGE = "--averages --communicator"
LIAR_METHODS = {
    "fedavg-uniform": f"{AVERAGE} uniform",
    "fedavg-reward": f"{AVERAGE} reward",
    "fedavg-similarity": f"{AVERAGE} similarity",
    "fedavg-surrogate": f"{AVERAGE} surrogate",
    "pr-uniform": "--communicator uniform",
    "pr-reward": "--communicator reward",
    "pr-similarity": "--communicator similarity",
    "pr-surrogate": "--communicator surrogate",
}


def list_liars(family: str, mode: str) -> Iterator[str]:
    """Every method with every lie, and with a boast where agents report what it is about."""
    for seed in FIVE_SEEDS:
        for method, flags in LIAR_METHODS.items():
            reports = method.endswith("-reward")
            conditions = {lie: f"--lie {lie}" for lie in LIES}
            if reports:
                for lie in LIES[1:]:
                    conditions[f"{lie}+boast"] = f"--lie {lie} --boast"
            for condition, lie in conditions.items():
                yield join(
                    f"{ONE_THREAD} benchmark/liars.py {flags} {lie} --seed {seed}",
                    "--total-timesteps 122880 --learning-rate 1e-3 --kl-coef 0.5",
                    "--kl-direction reverse --local-updates 4 --eval-episodes 0",
                    f"--run-dir {name_folder(family, mode)} --exp-name {method}-{condition}",
                )


# What slows mixing down: agents of the doorkey family, and on BeamRider

PR_UNIFORM = "prpo_minigrid.py {keys} --kl-coef 0.5 --communicator uniform --local-updates 4"
FEDAVG_UNIFORM = "fedavg_ppo.py {keys} --kl-coef 0.5 --communicator uniform --local-updates 4"
ANCHOR_DOORKEY = {
    "isolated": "prpo_minigrid.py {keys} --kl-coef 0.5 --communicator identity --local-updates 4",
    "isolated-snapshot": "prpo_minigrid.py {keys} --kl-coef 0.3333 --communicator identity"
    " --self-reference snapshot --local-updates 4",
    "pr-uniform": PR_UNIFORM,
    "pr-uniform-every1": PR_UNIFORM.replace("--local-updates 4", "--local-updates 1"),
    "fedavg-uniform": FEDAVG_UNIFORM,
    "fedavg-uniform-every1": FEDAVG_UNIFORM.replace("--local-updates 4", "--local-updates 1"),
}
for interval in (16, 32):
    for method, flags in (("pr-uniform", PR_UNIFORM), ("fedavg-uniform", FEDAVG_UNIFORM)):
        rarer = flags.replace("--local-updates 4", f"--local-updates {interval}")
        ANCHOR_DOORKEY[f"{method}-every{interval}"] = rarer
ANCHOR_BEAMRIDER = {
    "isolated": "--communicator identity",
    "isolated-snapshot": "--communicator identity --self-reference snapshot --kl-coef 0.6667",
    "pr-uniform": "--communicator uniform",
    "pr-uniform-every1": "--communicator uniform --local-updates 1",
}


def list_anchor(family: str, mode: str) -> Iterator[str]:
    """Five seeds of the doorkey family, three of BeamRider."""
    folder = name_folder(family, mode)
    keys = f"{THREE_DOORS} --total-timesteps 250000 --learning-rate 1e-3 --kl-direction reverse"
    keys += f" --eval-episodes 50 --run-dir {folder}/doorkey"
    beam = f"prpo_atari.py --env-id {BEAM_RIDER} --total-timesteps 131072 --save-every 16"
    beam += f" --eval-episodes 0 --run-dir {folder}/beamrider"
    for seed in FIVE_SEEDS:
        for name, flags in ANCHOR_DOORKEY.items():
            yield f"{ONE_THREAD} {flags.format(keys=keys)} --seed {seed} --exp-name {name}"
        if seed > 3:
            continue
        for name, flags in ANCHOR_BEAMRIDER.items():
            yield f"{ONE_THREAD} {beam} {flags} --seed {seed} --exp-name {name}"


# Trust regions

CHOSEN_PPO = "prpo_minigrid.py --learning-rate 1e-3 --kl-coef 0.5 --kl-direction reverse"
TRPO_METHODS = {
    "isolated-trpo": "prtrpo_minigrid.py --communicator identity --local-updates 4",
    "pr-trpo": "prtrpo_minigrid.py --local-updates 4",
    "pr-trpo-every1": "prtrpo_minigrid.py --local-updates 1",  # as Observation 1 has it
    "pr-uniform": f"{CHOSEN_PPO} --local-updates 4",  # as chosen for doorkey
}
BOUNDS = {
    "fixed": "prtrpo_minigrid.py --local-updates 1",
    "bounded": "prtrpo_minigrid.py --local-updates 1 --delta 0.2",
    "tight": "prtrpo_minigrid.py --local-updates 1 --delta 0.1",
}
# Experiment -> task, methods, steps
TRPO = {
    "doorkey6x6": (DOOR_KEY, TRPO_METHODS, 122880),
    "bound": ("--env-id MiniGrid-DoorKey-5x5-v0", BOUNDS, 61440),
    "fourrooms": ("--env-id MiniGrid-FourRooms-v0", TRPO_METHODS, 122880),
    "doorkey": (THREE_DOORS, TRPO_METHODS, 122880),
}


def list_trpo(family: str, mode: str) -> Iterator[str]:
    """PR-TRPO, isolated TRPO and PR-PPO on three tasks, and how far PR-TRPO's updates move."""
    folder = name_folder(family, mode)
    for experiment, (task, methods, steps) in TRPO.items():
        for seed in FIVE_SEEDS:
            for name, flags in methods.items():
                command = f"{ONE_THREAD} {flags} {task} --seed {seed} --total-timesteps {steps}"
                place = f"--run-dir {folder}/{experiment} --exp-name {name}"
                yield f"{command} --eval-episodes 50 {place}"


# Bits instead of parameters

ALGORITHMS = ("par", "fedavg", "central")
CART_POLE = "--env-id CartPole-v1 --hidden-sizes 32 --num-pairs 4 --total-iterations 60"
CART_POLE_GRID = list(itertools.product(("0.1", "0.2", "0.4"), ("0.05", "0.1", "0.2", "0.4")))
SHORT_MUJOCO = "--num-pairs 4 --total-iterations 150"
# Nearly the defaults of the three methods for some 1,600 parameters and four agents
SHORT_GRID = list(itertools.product(("0.05", "0.1"), ("0.05", "0.1")))
MUJOCO_TASKS = ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Swimmer-v5")
MUJOCO_GRID = list(itertools.product(("0.02", "0.05", "0.1"), ("0.02", "0.05", "0.1")))


def list_s2zpo(family: str, mode: str) -> Iterator[str]:
    """The same cells of mu and eta for all three algorithms."""
    folder = name_folder(family, mode)
    if mode == "--quick":
        yield from list_cells(CART_POLE, CART_POLE_GRID, (1,), f"{folder}/cartpole")
    elif mode == "--results":
        yield from list_cells(CART_POLE, CART_POLE_GRID, FIVE_SEEDS, f"{folder}/cartpole")
        for seed, task in itertools.product(FIVE_SEEDS, MUJOCO_TASKS):
            flags = f"--env-id {task} {SHORT_MUJOCO}"
            place = f"{folder}/{task.removesuffix('-v5').lower()}"
            yield from list_cells(flags, SHORT_GRID, (seed,), place)
    else:
        for agents in (4, 2, 8):
            for task in MUJOCO_TASKS:
                flags = f"--env-id {task} --horizon 1000 --total-iterations 1000"
                flags += f" --num-agents {agents}"
                yield from list_cells(flags, MUJOCO_GRID, FIVE_SEEDS, f"{folder}/{agents}/{task}")


def list_cells(
    flags: str, grid: list[tuple[str, str]], seeds: tuple[int, ...], folder: str
) -> Iterator[str]:
    """A command for each seed, cell (mu, eta) and algorithm."""
    for seed in seeds:
        for mu, eta in grid:
            for algorithm in ALGORITHMS:
                name = f"{algorithm}_mu{mu}_eta{eta}"
                yield join(
                    f"{ONE_THREAD} s2zpo_mujoco.py --algorithm {algorithm} {flags}",
                    f"--mu {mu} --eta {eta} --seed {seed} --run-dir {folder} --exp-name {name}",
                )


# Language models


@dataclass(frozen=True)
class LanguageGrid:
    launch: str
    common: str
    """flags of all runs"""
    partitions: tuple[str, ...]
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    kl_coefs: tuple[str, ...]
    intervals: tuple[int, ...]
    prompts: dict[str, int] | None = None
    """algorithm -> prompts of a step (None: the script's default)"""


# Table 5: 64 prompts per step, 26 steps x 6 epochs, 32 prompts per optimizer step, two PPO epochs
TABLE5 = (
    "--base-model mistral-community/Mistral-7B-v0.2 --dataset trl-lib/tldr"
    " --reward runs/tldr/reward --batch-size 64 --minibatch-size 32 --micro-batch-size 8"
    " --total-steps 156 --prompts-per-agent 1664 --topics loseit dating_advice legaladvice"
    " offmychest personalfinance relationship_advice tifu --eval-dataset trl-lib/tldr:validation"
    " --eval-prompts 128 --max-prompt-tokens 512 --missing-eos-penalty 3 --min-response-tokens 18"
    " --gradient-checkpointing"
)
DOCSTRINGS = (
    "--base-model runs/docstrings/base --adapter runs/docstrings/sft-adapter"
    " --reward runs/docstrings/reward --dataset runs/docstrings/prompts.jsonl"
    " --prompts-per-agent 64 --total-steps 12 --learning-rate 3e-4 --max-prompt-tokens 128"
    " --response-length 40 --eval-prompts 16"
)
TABLE1 = LanguageGrid(
    launch="python prpo_llm.py",
    common=DOCSTRINGS,
    partitions=("iid", "topic"),
    methods=("isolated", "fedavg", "fedavg-naive", "pr0.6", "pr0.2"),
    seeds=(1, 2, 3),
    kl_coefs=("0.03", "0.1", "0.3"),
    intervals=(3,),
    prompts={"grpo": 2, "ppo": 6},
)
QUICK_LLM = LanguageGrid(
    launch="python prpo_llm.py",
    common="--total-steps 40 --learning-rate 1e-3 --topics torch sympy transformers",
    partitions=("topic",),
    methods=("isolated", "fedavg", "pr0.6", "pr0.2"),
    seeds=(1, 2),
    kl_coefs=("0.1",),
    intervals=(3,),
)
LANGUAGE_GRIDS = {
    ("llm", ""): LanguageGrid(
        launch="torchrun --nproc-per-node 7 prpo_llm.py --num-agents 7",
        common=TABLE5,
        partitions=("iid", "topic"),
        methods=("isolated", "fedavg", "pr0.6", "pr0.2"),
        seeds=(1,),
        kl_coefs=("0.03", "0.1", "0.3"),
        intervals=(1, 3, 7),
    ),
    ("llm", "--quick"): QUICK_LLM,
    ("llm", "--results"): replace(
        QUICK_LLM,
        common="--total-steps 12 --learning-rate 1e-3 --max-prompt-tokens 128 --response-length 40"
        " --topics torch sympy transformers",
        methods=("isolated", "fedavg", "pr"),
        seeds=(2, 3),
        prompts={"grpo": 2, "ppo": 6},
    ),
    ("table1", ""): TABLE1,
    ("table1", "--quick"): replace(TABLE1, seeds=(1,), kl_coefs=("0.1",)),
    ("table1", "--skills"): replace(
        TABLE1,
        launch=f"{ONE_THREAD} prpo_llm.py",
        common=STRING_SKILLS,
        intervals=(1,),
        prompts={"grpo": 8, "ppo": 64},  # equal numbers of completions
    ),
}
AGGREGATIONS = {
    "isolated": "--aggregation none",
    "fedavg": "--aggregation weights --communicator uniform",
    "fedavg-naive": "--aggregation weights --lora-average naive --communicator uniform",
    "pr": "--aggregation policy --communicator uniform",
    "pr0.6": "--aggregation policy --communicator self-preferred --self-preference 0.6",
    "pr0.2": "--aggregation policy --communicator self-preferred --self-preference 0.2",
}


def list_language(family: str, mode: str) -> Iterator[str]:
    """The paper's tables 5 and 1, or parts of them at small scale."""
    grid = LANGUAGE_GRIDS[family, mode]
    for seed in grid.seeds:
        for algorithm in ("grpo", "ppo"):
            for partition in grid.partitions:
                for method in grid.methods:
                    for coef in grid.kl_coefs:
                        for interval in grid.intervals:
                            name = f"{method}-{algorithm}"
                            if mode != "--results":
                                name += f"_kl{coef}_every{interval}"
                            yield join(
                                f"{grid.launch} --algorithm {algorithm} --partition {partition}",
                                f"{AGGREGATIONS[method]} --kl-coef {coef}",
                                f"--local-updates {interval} --seed {seed}",
                                choose_size(grid, mode, algorithm, method),
                                grid.common,
                                f"--run-dir {name_folder(family, mode)} --exp-name {name}",
                            )


def choose_size(grid: LanguageGrid, mode: str, algorithm: str, method: str) -> str:
    """Flags for the prompts of a step; for string skills also the learning rate chosen there."""
    flags = ""
    if grid.prompts:
        prompts = grid.prompts[algorithm]
        flags = f"--batch-size {prompts} --micro-batch-size {prompts}"
    if mode == "--skills":
        rate = "3e-3" if method.startswith("fedavg") else "1e-3"
        flags += f" --learning-rate {rate}"
    return flags


SKILL_METHODS = {
    "isolated": "--aggregation none",
    "fedavg-naive": "--aggregation weights --lora-average naive",
    "fedavg-exact": "--aggregation weights --lora-average exact",
    "pr-reverse": "--aggregation policy --kl-direction reverse",
    "pr-forward": "--aggregation policy --kl-direction forward",
}


def list_skills(family: str, mode: str) -> Iterator[str]:
    """Tiny agents that differ in how many of their prompts are for the rare skill."""
    task = f"{STRING_SKILLS} --partition topic --batch-size 8 --micro-batch-size 8"
    task += " --local-updates 1"
    tuned = mode == "--tune"
    seeds = (101, 102) if tuned else FIVE_SEEDS
    for seed in seeds:
        for method, aggregation in SKILL_METHODS.items():
            rates = ["3e-3" if method.startswith("fedavg") else "1e-3"]  # as choose.py has chosen
            coefs = ["0.03"]
            if tuned:
                rates = ["3e-4", "1e-3", "3e-3", "1e-2"]
                coefs = ["0.03", "0.3"]
            for rate in rates:
                for coef in coefs:
                    name = f"{method}_lr{rate}_coef{coef}" if tuned else method
                    yield join(
                        f"{ONE_THREAD} prpo_llm.py {aggregation} {task}",
                        f"--learning-rate {rate} --kl-coef {coef} --seed {seed}",
                        f"--run-dir {name_folder(family, mode)} --exp-name {name}",
                    )


PREFERENCES = (
    "--base-model runs/preferences/model --dataset runs/preferences/train.jsonl"
    " --reward benchmark/skills.py:content benchmark/skills.py:mark benchmark/skills.py:capitals"
    " benchmark/skills.py:quotes --reward-weights runs/preferences/weights.csv"
    " --missing-eos-penalty 0 --precision float32 --temperature 1 --response-length 15"
    " --lora-rank 8 --prompts-per-agent 400 --eval-prompts 100 --total-steps 24 --local-updates 1"
)
PREFERENCE_METHODS = {
    "isolated": "--aggregation none",
    "fedavg": "--aggregation weights --communicator uniform",
    "fedavg-private": "--aggregation weights --communicator uniform --private-layers 1",
    "pr-uniform": "--communicator uniform",
    "pr-uniform-linear": "--communicator uniform --kl-schedule linear",
    "pr-self0.6": "--communicator self-preferred --self-preference 0.6",
    "pr-self0.6-linear": "--communicator self-preferred --self-preference 0.6 --kl-schedule linear",
}
# Learning rate and KL coefficient
PREFERENCE_SETTINGS = (("1e-3", "0.1"), ("3e-3", "0.1"), ("3e-3", "0.5"))
# Algorithm -> methods for which choose.py has chosen the last of them; for others the second
STRONGER_PREFERENCES = {
    "grpo": ("isolated", "fedavg-private", "pr-self0.6-linear"),
    "ppo": ("isolated", "fedavg", "fedavg-private"),
}
PREFERENCE_ALGORITHMS = {
    "grpo": "--batch-size 8 --micro-batch-size 8",
    "ppo": "--algorithm ppo --batch-size 32 --micro-batch-size 32",
}


def list_preferences(family: str, mode: str) -> Iterator[str]:
    """Tiny agents that share skills, and whose rewards have weights of their own."""
    tuned = mode == "--tune"
    seeds = TUNING_SEEDS if tuned else FIVE_SEEDS
    for algorithm, size in PREFERENCE_ALGORITHMS.items():
        for seed in seeds:
            for method, flags in PREFERENCE_METHODS.items():
                settings = PREFERENCE_SETTINGS
                if not tuned:
                    number = 2 if method in STRONGER_PREFERENCES[algorithm] else 1
                    settings = [PREFERENCE_SETTINGS[number]]
                for rate, coef in settings:
                    name = f"{method}-{algorithm}"
                    if tuned:
                        name += f"_lr{rate}_coef{coef}"
                    yield join(
                        f"{ONE_THREAD} prpo_llm.py {flags} {size} {PREFERENCES}",
                        f"--learning-rate {rate} --kl-coef {coef} --seed {seed}",
                        f"--run-dir {name_folder(family, mode)} --exp-name {name}",
                    )


# Agents in text worlds

# Table 1 of the FedAgent paper: 70 rounds x 3 epochs, 8 tasks x 8 episodes
FEDAGENT_FULL = (
    "--base-model Qwen/Qwen2.5-1.5B-Instruct --precision bfloat16 --gradient-checkpointing"
    " --env benchmark/worlds/alfworld.py:make --tasks 3000 --max-turns 50 --num-agents 100"
    " --local-updates 3 --total-steps 210 --batch-size 8 --group-size 8 --max-prompt-tokens 2048"
    " --response-length 512 --minibatch-size 64 --micro-batch-size 4 --learning-rate 1e-6"
    " --weight-decay 0.01 --lora-rank 64 --lora-alpha 64 --advantage-over turns"
    " --rollout-batch-size 0"
)
# What a small model learns in minutes (docs/prpo_babyai.md); each client has tasks of its own
FEDAGENT_QUICK = (
    "--max-turns 12 --num-agents 12 --tasks-per-agent 16 --local-updates 3 --total-steps 18"
    " --batch-size 8 --minibatch-size 0 --learning-rate 2e-3 --advantage-over turns"
    " --eval-every 6 --eval-episodes 60 --eval-temperature 1"
)
# Method -> flags, with {n} agents at the same time
FEDAGENT_METHODS = {
    "local": "--aggregation none --agents-per-round {n}",
    "centralised": "--aggregation none --centralised",
    "fedagent": "--aggregation weights --agents-per-round {n}",
    "pr-uniform-grpo": "--aggregation policy --agents-per-round {n}",
    "pr-self0.6-grpo": "--aggregation policy --agents-per-round {n} --communicator self-preferred",
}
# Setting -> coefficient of the KL penalty; the first is the paper's
FEDAGENT_SETTINGS = {
    "coef0.01": "",
    "coef0.1": "--kl-coef 0.1",
    "coef0.1-linear": "--kl-coef 0.1 --kl-schedule linear",
}
# Those of docs/results.md, section 16: the paper's for its methods. They are older than the search,
# which prefers coef0.1-linear for all, by less than 0.02
FEDAGENT_COEFS = dict.fromkeys(FEDAGENT_METHODS, "coef0.01")
FEDAGENT_COEFS |= dict.fromkeys(("pr-uniform-grpo", "pr-self0.6-grpo"), "coef0.1")
# Partition -> two strengths
HETEROGENEITY = {
    "preference": ("0.5", "2"),
    "coverage": ("0.2", "5"),
    "hardness": ("0.2", "5"),
}


def list_fedagent(family: str, mode: str) -> Iterator[str]:
    """Table 1 of the FedAgent paper, and with --quick its three kinds of heterogeneity."""
    if mode == "--tune":
        yield from tune_fedagent(family, mode)
        return
    small = mode == "--quick"
    common = FEDAGENT_QUICK if small else FEDAGENT_FULL
    number = 3 if small else 2
    for partition, strengths in {"iid": ("",), **HETEROGENEITY}.items():
        tasks = ""
        if small:  # preferences are between categories
            tasks = "--categories GoToObj"
            if partition == "preference":
                tasks += " OpenDoor"
        for strength, seed in itertools.product(strengths, (1, 2, 3)):
            for method, flags in FEDAGENT_METHODS.items():
                name = f"{method}_{partition}{strength}"
                setting = FEDAGENT_SETTINGS[FEDAGENT_COEFS[method]] if small else ""
                if partition != "iid":
                    if not small or method in ("centralised", "pr-self0.6-grpo"):
                        continue
                    flags += f" --partition {partition} --strength {strength}"
                launch = ONE_THREAD
                if not small and method != "centralised":
                    launch = f"torchrun --nproc-per-node {number}"
                yield join(
                    f"{launch} prpo_babyai.py {flags.format(n=number)}",
                    setting,
                    common,
                    tasks,
                    f"--seed {seed} --run-dir {name_folder(family, mode)} --exp-name {name}",
                )


def tune_fedagent(family: str, mode: str) -> Iterator[str]:
    """The coefficient of the KL penalty, on the small task."""
    for seed, method in itertools.product(TUNING_SEEDS, ("local", "fedagent", "pr-uniform-grpo")):
        for name, setting in FEDAGENT_SETTINGS.items():
            yield join(
                f"{ONE_THREAD} prpo_babyai.py {FEDAGENT_METHODS[method].format(n=3)}",
                setting,
                f"{FEDAGENT_QUICK} --categories GoToObj --seed {seed}",
                f"--run-dir {name_folder(family, mode)} --exp-name {method}_{name}",
            )


# The program


def find_family(family: str):
    """The function that lists the commands of a family."""
    if family in CONTROL:
        return list_control
    if family in SHARING:
        return list_sharing
    if family in LANGUAGE:
        return list_language
    if family in OWN_GOALS:
        return list_goals
    others = {
        "anchor": list_anchor,
        "trpo": list_trpo,
        "agreement": list_agreement,
        "liars": list_liars,
        "skills": list_skills,
        "preferences": list_preferences,
        "s2zpo": list_s2zpo,
        "fedagent": list_fedagent,
    }
    return others[family]


def read_number(flag: str, line: str, default: int) -> int:
    """The number behind a flag, or the default."""
    match = re.search(rf"--{flag} (\d+)", line)
    return int(match[1]) if match else default


def estimate(family: str, lines: list[str]) -> str:
    """How many runs there are, and of control how long they take; with three agents by default."""
    if family in (*LANGUAGE, *STRINGS, "s2zpo", "fedagent"):
        return f"{len(lines)} runs"
    hours = 0
    for line in lines:
        agents = read_number("num-agents", line, default=4 if family == "liars" else 3)
        if "baselines/" in line:
            agents = 1
        steps = read_number("total-timesteps", line, default=0)
        speed = ATARI_SPEED if "NoFrameskip" in line else SPEEDS.get(family, DEFAULT_SPEED)
        hours += agents * steps / speed / 3600
    return f"{len(lines)} runs, about {hours / 2:.1f} h on two cores"


def refuse(problem: str) -> None:
    """Ends with one line and exit code 2."""
    print(f"sweep.sh: {problem}; try --help", file=sys.stderr)
    sys.exit(2)


def main(words: list[str]) -> None:
    family = words[0] if words else ""
    if len(words) > 2:
        refuse(f"'{words[2]}' is too much, behind a family and an option")
    if family in ("--help", "-h"):
        print(USAGE, end="")
        return
    if family not in MODES:
        refuse(f"unknown family '{family}'")
    mode = words[1] if len(words) > 1 else ""
    if not mode:
        mode = MODES[family][0]
    if mode not in MODES[family]:
        if (family, mode) == ("table1", "--results"):
            refuse(f"{family} has no {mode}")
        refuse(f"unknown option {mode}")
    lines = list(find_family(family)(family, mode))
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:  # as of `| head`; Python would fail again when it closes the stream
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    print(estimate(family, lines), file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
