"""What a round over a shared folder costs: seconds and bytes, without any training.

    python benchmark/federation.py > benchmark/results/federation.csv   # of docs/federation.md

All agents are exchanges of this process, which have their rounds one after the other, on a folder
of the local disk: a round writes one file and reads the newest of every peer, as federate.py does.
Rows: agents, numbers in a snapshot, seconds per agent and round, bytes written and read by an agent
in a round, requests to the store.
"""

import platform
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import federate
from communicators import flatten
from federate import FolderExchange
from prpo_minigrid import Agent

ROUNDS = 5
# Inputs and outputs of the layers of SmolLM2-135M that prpo_llm.py adapts, and their number
ADAPTED = ((576, 576), (576, 192), (576, 192), (576, 1536), (576, 1536), (1536, 576))
LAYERS = 30
RANK = 16


def make_exchanges(num_agents: int, url: str) -> list[FolderExchange]:
    """The exchanges of so many processes, as the launcher makes them for a script."""
    args = SimpleNamespace(num_agents=num_agents, device="cpu", timeout=600.0, resume="")
    exchanges = []
    for i in range(num_agents):
        words = ["--exchange", url, "--federation", "benchmark", "--agents", str(i)]
        exchanges.append(federate.make_exchange(words, args, False, "", ""))
    return exchanges


def measure(num_agents: int, numel: int) -> list:
    """A row: the last round of several, of which the first has fewer peers to read."""
    sent = [torch.randn(numel)]
    numbers = torch.zeros(1)
    with tempfile.TemporaryDirectory() as folder:
        exchanges = make_exchanges(num_agents, folder)
        for _ in range(ROUNDS):
            written = sum(exchange.bytes_sent for exchange in exchanges)
            read = sum(exchange.bytes_received for exchange in exchanges)
            began = time.perf_counter()
            for exchange in exchanges:
                exchange.round(sent, numbers)
            seconds = time.perf_counter() - began
        written = sum(exchange.bytes_sent for exchange in exchanges) - written
        read = sum(exchange.bytes_received for exchange in exchanges) - read
    requests = 3 + 2 * (num_agents - 1)  # write, rename or put, delete; list and read each peer
    totals = [seconds, written, read]
    per_agent = [total / num_agents for total in totals]
    return [num_agents, numel, f"{per_agent[0]:.4f}", *map(round, per_agent[1:]), requests]


def main() -> None:
    """Print the table."""
    adapter = LAYERS * sum(RANK * (size_in + size_out) for size_in, size_out in ADAPTED)
    names = f"torch {version('torch')}, fsspec {version('fsspec')}, {platform.machine()}"
    print(f"# python benchmark/federation.py > benchmark/results/federation.csv\n# {names}")
    print("snapshot,agents,numbers,seconds,bytes_written,bytes_read,requests")
    for num_agents in (3, 10, 30):
        row = measure(num_agents, len(flatten(Agent(7))))
        print("MiniGrid", *row, sep=",", flush=True)
    row = measure(3, adapter)
    print(f"LoRA of rank {RANK} on SmolLM2-135M", *row, sep=",", flush=True)


if __name__ == "__main__":
    main()
