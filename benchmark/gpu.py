"""One row of benchmark/gpu.sh's table: run a command, and append its speed and memory to a CSV
file.

    python benchmark/gpu.py --csv runs/gpu/gpu.csv --work llm --contender "1 agent" \\
        --command "prpo_llm.py --num-agents 1"

A run that takes longer than --seconds is ended; its row has what it has logged so far.
"""

import csv
import json
import shlex
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from arguments import append_row, read_flags, read_speed

COLUMNS = ("work", "contender", "finished", "speed", "train_seconds", "peak_gib", "command")


@dataclass
class Args:
    csv: str
    """file to which the row is appended"""
    work: str
    """the table that the row belongs to"""
    contender: str
    """name of the row"""
    command: str
    """a script with its arguments, without --run-dir"""
    seconds: int = 60
    """when the run is ended"""


def execute(words: list[str], seconds: int) -> int:
    """Run a process for so many seconds at most. Returns its exit code."""
    try:
        return subprocess.call(words, timeout=seconds)  # kills it where it raises an error
    except subprocess.TimeoutExpired:
        print(f"ended after {seconds} s", flush=True)
        return -signal.SIGKILL


def read_run(folder: Path) -> dict:
    """What the only run in a folder has logged: the columns of COLUMNS that are known."""
    row = {}
    for path in folder.glob("*/metrics.csv"):
        with open(path, newline="") as file:
            last = [*csv.DictReader(file)][-1:]
        for logged in last:
            row["peak_gib"] = logged.get("peak_memory", "")
            row["speed"] = read_speed(logged)
    for path in folder.glob("*/summary.json"):
        summary = json.loads(path.read_text())
        row["speed"] = f"{read_speed(summary):.5g}"
        row["train_seconds"] = f"{summary['train_seconds']:.3f}"
    return row


def main(args: Args) -> None:
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, *shlex.split(args.command), "--run-dir", folder]
        code = execute(words, args.seconds)
        row = dict.fromkeys(COLUMNS, "")
        row |= {"work": args.work, "contender": args.contender, "finished": code == 0}
        row |= read_run(Path(folder))
    row["command"] = f"python {args.command}"
    append_row(Path(args.csv), row)
    print(f"{args.contender}: {row['speed'] or 'no speed'} per second")
    if code:
        sys.exit(1)


if __name__ == "__main__":
    # A caller's time limit also ends the run
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main(read_flags(Args))
