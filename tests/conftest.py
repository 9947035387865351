"""Fixtures of all tests."""

import pytest
import torch
from helpers import tiny


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Few small operations: one thread is fastest, and child processes, which get one too, round alike."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory):
    """whole_run(script): the folder of the tiny run, never interrupted, all agents in this process."""
    folders = {}

    def run(script):
        if script not in folders:
            run_dir = tmp_path_factory.mktemp(str(script))
            script.main(tiny(script, run_dir))
            (folders[script],) = run_dir.iterdir()
        return folders[script]

    return run
