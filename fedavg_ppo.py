"""FedAvg-PPO on MiniGrid and Atari: agents that share no data average their parameters.

The baseline of PR-PPO: `prpo_minigrid.py` or `prpo_atari.py`, chosen by the task, with
`--aggregation weights`, so that a comparison compares one thing only. FedAvg itself is the step
"FedAvg" in the loop of these scripts; each agent's KL penalty pulls it towards its own policy
before the update (eq. 3 of the PRPO paper).

    python fedavg_ppo.py                                         # three agents in one process
    python fedavg_ppo.py --env-id BeamRiderNoFrameskip-v4        # on Atari (and --help: its flags)
    python fedavg_ppo.py --communicator similarity               # a weighted average (WeightedAvg)
    torchrun --nproc-per-node 3 fedavg_ppo.py                    # one agent per process
    python fedavg_ppo.py --resume runs/<name>                    # continue an interrupted run
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

import gymnasium as gym

import communicators
import prpo_atari
import prpo_minigrid


@dataclass
class MiniGridArgs(prpo_minigrid.Args):
    aggregation: Literal["weights"] = "weights"
    """agents exchange parameters for an average (FedAvg); see prpo_minigrid.py for the others"""


@dataclass
class AtariArgs(prpo_atari.Args):
    aggregation: Literal["weights"] = "weights"
    """agents exchange parameters for an average (FedAvg); see prpo_atari.py for the others"""


def find_task(argv: list[str] | None = None) -> str:
    """The first task of the run that --resume or --eval-only names, or of the command line."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    # Values may be missing here; reading the arguments refuses that in one line
    parser.add_argument("--resume", nargs="?")
    parser.add_argument("--eval-only", "--eval_only", nargs="?")
    parser.add_argument("--env-ids", "--env_ids", nargs="*")
    task = MiniGridArgs.env_id
    parser.add_argument("--env-id", "--env_id", nargs="?", default=task, const=task)
    given, _ = parser.parse_known_args(argv)
    folder = given.resume or given.eval_only
    if folder:
        try:
            settings = json.loads(Path(folder).expanduser().joinpath("config.json").read_text())
            return first_task(settings["env_ids"], settings["env_id"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # the checks of the arguments name what is wrong with the folder
    return first_task(given.env_ids, given.env_id)


def first_task(env_ids: list[str] | None, env_id: str) -> str:
    """The task of agent 0."""
    return env_ids[0] if env_ids else env_id


def is_atari(env_id: str) -> bool:
    """Whether a task is a game of the Atari 2600, or one of your own that shows as many frames."""
    if prpo_atari.is_custom(env_id):
        try:
            space = gym.make(env_id, disable_env_checker=True).observation_space
        except Exception:  # the checks of the arguments report why it cannot be made
            return False
        return space.shape == (4, 84, 84)
    return prpo_atari.is_ale(env_id)


def choose_family(argv: list[str] | None = None) -> tuple[ModuleType, type]:
    """The script of the task's family, and the arguments of FedAvg on it."""
    if is_atari(find_task(argv)):
        return prpo_atari, AtariArgs
    return prpo_minigrid, MiniGridArgs


if __name__ == "__main__":
    family, Args = choose_family()
    args = communicators.parse_args(
        Args, family.check_args, may_change=("capture_video", "eval_episodes", "total_timesteps")
    )
    if args.eval_only:
        family.evaluate_run(args)
    else:
        family.main(args)
