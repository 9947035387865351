"""Run scripts while every function of torch.distributed is watched: python wire.py REPORT RUNS

RUNS is JSON, name -> [script, flags...]; REPORT becomes JSON, name -> [[function, [[dtype, numel]
of every tensor]]]. A report is written per rank, with the rank in the place of {rank}.
"""

import inspect
import json
import os
import sys
from pathlib import Path

import torch
from command import load_script, parse_args
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
    """Type and size of a tensor."""
    return [str(tensor.dtype).removeprefix("torch."), tensor.numel()]


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


for name in distributed_c10d.__all__:
    if inspect.isfunction(function := getattr(distributed_c10d, name)):
        setattr(distributed_c10d, name, watch(name, function))
        setattr(torch.distributed, name, getattr(distributed_c10d, name))

report = Path(sys.argv[1].format(rank=os.environ["RANK"]))
runs = json.loads(sys.argv[2])
calls_of = {}
for name, (script_name, *argv) in runs.items():
    calls.clear()
    script = load_script(script_name, argv)
    script.main(parse_args(script, argv))
    calls_of[name] = list(calls)
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    # The store of torchrun is at the first port: for the next run rank 0 makes one
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
report.write_text(json.dumps(calls_of))
