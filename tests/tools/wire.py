"""Run scripts while every function of torch.distributed is watched: python wire.py REPORT RUNS

RUNS is JSON, name -> [script, flags...]; REPORT becomes JSON, name -> [[function, [[dtype, numel] of every tensor]]].
A report is written per rank, with the rank in the place of {rank}.
"""

import importlib
import inspect
import json
import os
import sys
from pathlib import Path

import torch
from command import parse_args
from torch.distributed import distributed_c10d

calls, depth = [], 0


def tensors_of(value):
    """All tensors in nested arguments."""
    if isinstance(value, torch.Tensor):
        return [value]
    values = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, (list, tuple))
        else ()
    )
    return [tensor for part in values for tensor in tensors_of(part)]


def watch(name, function):
    def watched(*args, **kwargs):
        global depth
        if depth == 0:
            calls.append(
                [
                    name,
                    [
                        [str(t.dtype).removeprefix("torch."), t.numel()]
                        for t in tensors_of([args, kwargs])
                    ],
                ]
            )
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

report, runs = Path(sys.argv[1].format(rank=os.environ["RANK"])), json.loads(sys.argv[2])
found = {}
for name, (script, *argv) in runs.items():
    calls.clear()
    script = importlib.import_module(script)
    script.main(parse_args(script, argv))
    found[name] = list(calls)
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    # The store of torchrun is at the first port: for the next run rank 0 makes one
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
report.write_text(json.dumps(found))
