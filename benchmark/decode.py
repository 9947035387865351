"""Where a decode step of a language model spends its time: milliseconds, kernels and launches.

    python benchmark/llm_memory.py --sizes 135M --write runs/135M  # a model with random weights
    python benchmark/decode.py --model runs/135M --csv runs/decode.csv

A step completes every sequence by one token. Two rollouts are measured that differ in the length of
their completions only, so that prompts and whatever happens once cancel out.
"""

import json
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from arguments import append_row, read_flags, refuse
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import prpo_llm  # noqa: E402


@dataclass
class Args:
    model: str
    """folder with a model and prompts.jsonl, which llm_memory.py --write makes"""
    agents: int = 1
    """agents, each with its own adapters"""
    prompts: int = 4
    """prompts of each agent"""
    group_size: int = 8
    """completions per prompt"""
    lengths: tuple[int, int] = (8, 40)
    """tokens of a completion in the two rollouts"""
    precision: str = "bfloat16"
    """precision of the base model"""
    repeats: int = 5
    """rollouts of each length that are timed; the median counts"""
    csv: str = ""
    """file to which a row is appended"""
    kernels: str = ""
    """file for the kernels that take the most time"""


class Profile(NamedTuple):
    operators: int  # calls of PyTorch's operators
    launches: int  # of kernels, copies and graphs, by the processor
    kernels: Counter  # name -> how many ran on the GPU
    seconds: Counter  # name -> how long


def profile_rollout(rollout) -> Profile:
    """What a rollout calls and launches, and what runs on the GPU, if there is one."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        rollout()
    operators = 0
    launches = 0
    kernels = Counter()
    seconds = Counter()
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA:
            kernels[event.name] += 1
            seconds[event.name] += event.device_time_total / 1e6
        elif event.name.startswith("aten::"):
            operators += 1
        elif event.name.startswith(("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpy")):
            launches += 1
    return Profile(operators, launches, kernels, seconds)


def measure_seconds(rollout, repeats: int) -> float:
    """The median time of a rollout."""
    durations = []
    for _ in range(repeats):
        began = time.perf_counter()
        rollout()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        durations.append(time.perf_counter() - began)
    return median(durations)


def main(args: Args) -> None:
    short, long = args.lengths
    if not 0 < short < long:
        refuse(f"--lengths {short} {long}: must grow")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = prpo_llm.Args(
        base_model=args.model,
        precision=args.precision,
        response_length=long,
        communicator="uniform",
    )
    model, tokenizer = prpo_llm.load_base(settings, device)
    prpo_llm.add_adapters(settings, model, args.agents)
    number = args.agents * args.prompts
    lines = Path(args.model, "prompts.jsonl").read_text().splitlines()[:number]
    if len(lines) < number:
        refuse(f"--prompts {args.prompts}: there are {len(lines)} for all agents")
    prompts = [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines]
    uniforms = torch.rand(number, args.group_size, long, generator=torch.manual_seed(1))

    def make_rollout(length: int):
        def rollout():
            with prpo_llm.select_adapters("policy"):
                tokens, lengths, _ = prpo_llm.generate(
                    model, prompts, uniforms[..., :length], tokenizer.ends, settings.temperature
                )
            assert lengths.min() == length, "a completion has ended"

        return rollout

    rollouts = [make_rollout(length) for length in (short, long)]
    for rollout in rollouts:  # what is compiled or captured once
        rollout()
    seconds = [measure_seconds(rollout, args.repeats) for rollout in rollouts]
    first, second = map(profile_rollout, rollouts)
    steps = long - short
    kernels = second.kernels - first.kernels
    busy = {name: second.seconds[name] - first.seconds[name] for name in kernels}
    row = {
        "model": Path(args.model).name,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "precision": args.precision,
        "agents": args.agents,
        "sequences": number * args.group_size,
        "ms_per_step": f"{1e3 * (seconds[1] - seconds[0]) / steps:.3f}",
        "gpu_ms_per_step": f"{1e3 * sum(busy.values()) / steps:.3f}",
        "kernels_per_step": f"{kernels.total() / steps:.1f}",
        "launches_per_step": f"{(second.launches - first.launches) / steps:.1f}",
        "operators_per_step": f"{(second.operators - first.operators) / steps:.1f}",
        "rollout_seconds": f"{seconds[1]:.3f}",
    }
    for name, value in row.items():
        print(f"{name:>20}: {value}")
    if args.csv:
        append_row(Path(args.csv), row)
    if args.kernels:
        for name in sorted(busy, key=busy.get, reverse=True)[:15]:
            kernel = {"model": row["model"], "agents": args.agents, "kernel": name[:120]}
            kernel["per_step"] = f"{kernels[name] / steps:.2f}"
            kernel["ms_per_step"] = f"{1e3 * busy[name] / steps:.4f}"
            append_row(Path(args.kernels), kernel)


if __name__ == "__main__":
    main(read_flags(Args))
