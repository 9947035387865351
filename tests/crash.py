"""Run a script that dies in the middle of things: python crash.py SCRIPT MOMENT AGENT ITERATION flags...

MOMENT says where in the saving of that agent's checkpoint of that iteration: `half a file`, `before the pointer`
(the file is whole, but nothing points to it) or `complete`; or `update`, the first gradient step, whose agent and
iteration do not matter. After a restart by torchrun nothing happens any more.
"""

import contextlib
import importlib
import io
import os
import signal
import sys
from unittest import mock

import torch


@contextlib.contextmanager
def crash(script, moment, agent, iteration, die):
    """Within this context `script` calls `die` at that moment."""
    save, save_checkpoint, replace = torch.save, script.save_checkpoint, os.replace
    update, saving = script.update, None

    def due(now):
        return moment == now and saving == (f"agent_{agent}", iteration)

    def save_half(state, file):
        if due("half a file"):
            whole = io.BytesIO()
            save(state, whole)
            file.write(whole.getvalue()[: whole.tell() // 2])
            file.flush()
            die()
        save(state, file)

    def replace_files_only(source, target):
        if due("before the pointer") and os.path.basename(target) == "latest":
            die()
        replace(source, target)

    def save_and_die(folder, number, state):
        nonlocal saving
        saving = folder.name, number
        save_checkpoint(folder, number, state)
        if due("complete"):
            die()
        saving = None

    def die_in_update(*batch):
        if moment == "update":
            die()
        return update(*batch)

    patches = (torch, "save", save_half), (os, "replace", replace_files_only), (script, "save_checkpoint", save_and_die)
    patches += ((script, "update", die_in_update),)
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
            stack.enter_context(crash(script, moment, int(agent), int(iteration), lambda: os.kill(*kill)))
        script.main(script.parse_args(argv))
