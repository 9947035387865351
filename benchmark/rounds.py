"""What a communication round costs as agents are added: seconds, memory and disk for each agent.

Agents with a tiny network and tiny rollouts on a ring, in one process, a round after every iteration.

    python benchmark/rounds.py --csv benchmark/results/rounds.csv  # `python docs/tables.py` then writes the table
"""

import csv
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro
from throughput import ROOT, num_cores

NUM_STEPS = 64


@dataclass
class Args:
    agents: tuple[int, ...] = (8, 32, 128)
    """numbers of agents"""
    participations: tuple[float, ...] = (1.0, 0.5)
    """fractions of the agents that take part in a round"""
    iterations: int = 6
    """iterations, each with a round"""
    hidden_size: int = 8
    """width of the networks' hidden layer"""
    topology: str = "ring"
    """ring, or full"""
    csv: str = ""
    """file for the data"""


def command_of(args: Args, num_agents: int, participation: float, folder: str) -> list[str]:
    """The run to be measured."""
    settings = {
        "env-id": "MiniGrid-Empty-5x5-v0",
        "num-agents": num_agents,
        "communicator": "uniform",
        "topology": args.topology,
        "participation": participation,
        "local-updates": 1,
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
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    sizes = ["--hidden-sizes", *[str(args.hidden_size)] * num_agents]
    return ["prpo_minigrid.py", *flags, *sizes]


def size_of(folder: Path, pattern: str) -> int:
    """Bytes of all files that match."""
    return sum(path.stat().st_size for path in folder.glob(pattern))


def measure(args: Args, num_agents: int, participation: float) -> dict[str, float]:
    """One run. Returns its row."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *command_of(args, num_agents, participation, folder)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"{shlex.join(command)} failed")
        (run,) = Path(folder).iterdir()
        summary = json.loads((run / "summary.json").read_text())
        work = num_agents * args.iterations
        unit = 1024 if sys.platform != "darwin" else 1
        return {
            "topology": args.topology,
            "participation": participation,
            "agents": num_agents,
            "round_ms": 1000 * summary["seconds"]["exchange"] / work,
            "iteration_ms": 1000 * summary["train_seconds"] / work,
            "peak_memory_mb": usage.ru_maxrss * unit / 2**20,
            "checkpoint_kb": size_of(run, f"checkpoints/*/{args.iterations}.pt") / 1024 / num_agents,
            "tensorboard_kb": size_of(run, "events*") / 1024 / work,
            "csv_kb": size_of(run, "*.csv") / 1024 / work,
        }


def main(args: Args) -> None:
    rows = []
    for participation in args.participations:
        for num_agents in args.agents:
            rows.append(measure(args, num_agents, participation))
            print(
                "  ".join(f"{name} {value:.4g}" for name, value in rows[-1].items() if name != "topology"), flush=True
            )
    if args.csv:
        this = Path(__file__).resolve().relative_to(ROOT)
        with open(args.csv, "w", newline="") as file:
            file.write(f"# {shlex.join(['python', str(this), *sys.argv[1:]])}\n")
            file.write(f"# {time.strftime('%Y-%m-%d')}, {num_cores()} cores\n")
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            for row in rows:
                writer.writerow(
                    {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in row.items()}
                )


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
