"""Run scripts while every function of torch.distributed is watched: python wire.py REPORT RUNS

RUNS is JSON, name -> [script, flags...]; REPORT becomes JSON, name -> [[function, [[dtype, shape]
of every tensor]]]. A report is written per rank, with the rank in the place of {rank}. With
SMOOTH_ADAM in the environment they use the optimizers of smooth.py.
"""

import importlib
import inspect
import json
import os
import sys
import time
from pathlib import Path

import torch
from command import parse_args
from ports import free_port
from smooth import smooth_adam
from torch.distributed import distributed_c10d

calls = []
depth = 0


def tensors_of(value):
    """All tensors in nested arguments."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (list, tuple)):
        return []
    return [tensor for item in value for tensor in tensors_of(item)]


def describe(tensor):
    """Type and shape of a tensor."""
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def watch(name, function):
    """The function, which notes its outermost calls."""

    def watched(*args, **kwargs):
        global depth
        if depth == 0:
            calls.append([name, [describe(tensor) for tensor in tensors_of([args, kwargs])]])
        depth += 1
        try:
            return function(*args, **kwargs)
        finally:
            depth -= 1

    return watched


def watch_all():
    """Watch every function of torch.distributed; `calls` gets their calls."""
    for name in distributed_c10d.__all__:
        if inspect.isfunction(function := getattr(distributed_c10d, name)):
            setattr(distributed_c10d, name, watch(name, function))
            setattr(torch.distributed, name, getattr(distributed_c10d, name))


def agree_on_port(path):
    """A free port for the next run's group: rank 0 finds one, the others read it from the file."""
    if os.environ["RANK"] == "0":
        written = path.with_suffix(".new")
        written.write_text(str(free_port()))
        written.replace(path)
    while not path.exists():
        time.sleep(0.01)
    return path.read_text()


if __name__ == "__main__":
    watch_all()
    if "SMOOTH_ADAM" in os.environ:
        smooth_adam()
    report = Path(sys.argv[1].format(rank=os.environ["RANK"]))
    runs = json.loads(sys.argv[2])
    calls_of = {}
    for number, (name, (script_name, *argv)) in enumerate(runs.items()):
        if number:  # the port next to the first one may be in use
            os.environ["MASTER_PORT"] = agree_on_port(report.with_name(f"port_{number}"))
            # torchrun's own store is at the first port only: here rank 0 makes one
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        calls.clear()
        script = importlib.import_module(script_name)
        script.main(parse_args(script, argv))
        calls_of[name] = list(calls)
    report.write_text(json.dumps(calls_of))
