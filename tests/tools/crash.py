"""Run a script that dies in the middle of things: python crash.py SCRIPT MOMENT AGENT ITERATION
flags...

MOMENT says where in the saving of that agent's checkpoint of that iteration: `half a file`, `not in
its place` (the file is whole, but has its temporary name) or `complete`; or `update`, the first
gradient step, whose agent and iteration do not matter. After a restart by torchrun nothing happens
any more.
"""

import contextlib
import importlib
import io
import os
import signal
import sys
from pathlib import Path
from unittest import mock

import torch
from command import parse_args


@contextlib.contextmanager
def crash(moment, agent, iteration, die):
    """Within this context whatever trains and saves checkpoints calls `die` at that moment."""
    save = torch.save
    replace = os.replace

    def due(now, path):
        path = Path(path)
        return moment == now and (path.parent.name, path.name) == (
            f"agent_{agent}",
            f"{iteration}.pt",
        )

    def save_half(state, file):
        if due("half a file", str(file.name).removesuffix(".tmp")):
            whole = io.BytesIO()
            save(state, whole)
            file.write(whole.getvalue()[: whole.tell() // 2])
            file.flush()
            die()
        save(state, file)

    def replace_and_die(source, target):
        if due("not in its place", target):
            die()
        replace(source, target)
        if due("complete", target):
            die()

    patches = [(torch, "save", save_half), (os, "replace", replace_and_die)]
    if moment == "update":
        patches += [(torch.optim.Adam, "step", lambda *_, **__: die())]
    with contextlib.ExitStack() as stack:
        for owner, name, function in patches:
            stack.enter_context(mock.patch.object(owner, name, function))
        yield


if __name__ == "__main__":
    name, moment, agent, iteration, *argv = sys.argv[1:]
    script = importlib.import_module(name)
    with contextlib.ExitStack() as stack:
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            kill = [os.getpid(), signal.SIGKILL]
            stack.enter_context(crash(moment, int(agent), int(iteration), lambda: os.kill(*kill)))
        script.main(parse_args(script, argv))
