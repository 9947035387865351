"""What a communication round costs as agents are added: seconds, memory and disk for each agent.

Agents with a tiny network and tiny rollouts on a ring, in one process, a round after every
iteration.

    python benchmark/rounds.py --csv benchmark/results/rounds.csv
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from arguments import read_flags, refuse
from runs import write
from throughput import ROOT, num_cores, run_alone

NUM_STEPS = 64


@dataclass
class Args:
    agents: tuple[int, ...] = (8, 32, 128)
    """numbers of agents"""
    iterations: int = 6
    """iterations, each with a round"""
    hidden_size: int = 8
    """width of the networks' hidden layer"""
    topology: str = "ring"
    """ring, or full"""
    csv: str = ""
    """file for the data"""


def make_command(args: Args, num_agents: int, folder: str) -> list[str]:
    """The run to be measured."""
    settings = {
        "env-id": "MiniGrid-Empty-5x5-v0",
        "num-agents": num_agents,
        "communicator": "uniform",
        "topology": args.topology,
        "local-updates": 1,
        "learning-rate": 2.5e-4,
        "kl-coef": 1.0,
        "kl-direction": "forward",
        "num-envs": 1,
        "num-steps": NUM_STEPS,
        "total-timesteps": args.iterations * NUM_STEPS,
        "update-epochs": 1,
        "num-minibatches": 1,
        "eval-episodes": 0,
        "save-every": args.iterations,
        "device": "cpu",
        "run-dir": folder,
    }
    words = ["prpo_minigrid.py"]
    for name, value in settings.items():
        words += [f"--{name}", str(value)]
    return [*words, "--hidden-sizes", *[str(args.hidden_size)] * num_agents]


def measure_size(folder: Path, pattern: str) -> float:
    """Kilobytes of all files that match."""
    return sum(path.stat().st_size for path in folder.glob(pattern)) / 1024


def measure(args: Args, num_agents: int) -> dict[str, float]:
    """One run. Returns its row."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *make_command(args, num_agents, folder)]
        code, peak_memory = run_alone(command, stdout=subprocess.DEVNULL)
        if code:
            sys.exit(f"{shlex.join(command)} failed")
        (run,) = Path(folder).iterdir()
        summary = json.loads((run / "summary.json").read_text())
        iterations = num_agents * args.iterations  # of all agents
        return {
            "topology": args.topology,
            "agents": num_agents,
            "round_ms": 1000 * summary["seconds"]["exchange"] / iterations,
            "iteration_ms": 1000 * summary["train_seconds"] / iterations,
            "peak_memory_mb": peak_memory,
            "checkpoint_kb": measure_size(run, f"checkpoints/*/{args.iterations}.pt") / num_agents,
            "tensorboard_kb": measure_size(run, "events*") / iterations,
            "csv_kb": measure_size(run, "*.csv") / iterations,
        }


def main(args: Args) -> None:
    if not hasattr(os, "wait4"):
        refuse("rounds.py measures memory on Linux and macOS, on Windows in WSL")
    rows = []
    for num_agents in args.agents:
        row = measure(args, num_agents)
        rows.append(row)
        shown = [f"{name} {value:.4g}" for name, value in row.items() if name != "topology"]
        print("  ".join(shown), flush=True)
    if args.csv:
        this = Path(__file__).resolve().relative_to(ROOT)
        command = shlex.join(["python", str(this), *sys.argv[1:]])
        comments = f"# {command}\n# {time.strftime('%Y-%m-%d')}, {num_cores()} cores\n"
        write(Path(args.csv), comments, pd.DataFrame(rows))


if __name__ == "__main__":
    main(read_flags(Args))
