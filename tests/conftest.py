"""Fixtures of all tests."""

import fcntl
import functools
import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import hypothesis
import pytest
import torch
from crash import crash
from helpers import only_run, tiny
from smooth import smooth_adam
from tensorboard.summary.writer import event_file_writer

import communicators
import federate

# The same examples in every run, however slow the machine is; others: --hypothesis-profile search
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True)
hypothesis.settings.register_profile("search", deadline=None)
hypothesis.settings.load_profile("tests")


def pytest_configure():
    """One core for each of pytest-xdist's workers: whatever a run does with all cores does not slow
    the others.
    """
    number = re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", ""))
    if number and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(number) % len(cores)]})


def pytest_runtest_setup():
    """Random numbers for which a test has no seed are the same, whatever has run before."""
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Few small operations: one thread is fastest, and child processes, which get one too, round
    alike.
    """
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def heard_hangups():
    """SIGHUP as a terminal has it, also where the tests run under nohup, which ignores it."""
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def ordered_event_files():
    """TensorBoard reads files in the order of their names, which end in a number: of two that one
    process begins within a second, 10 would come before 9.
    """
    event_file_writer._global_uid = event_file_writer.AtomicCounter(10**6)


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """once(name, make): what `make(folder)` returned for the folder of that name, made once for all
    workers.

    It has to be JSON. The folder is shared by all tests, so no test changes it.
    """
    common = tmp_path_factory.getbasetemp()
    common = common.parent if "PYTEST_XDIST_WORKER" in os.environ else common

    def get(name, make):
        folder = common / "once" / name
        result = common / "once" / f"{name}.json"
        folder.parent.mkdir(exist_ok=True)
        with open(common / "once" / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not result.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                result.write_text(json.dumps(make(folder)))
        return folder, json.loads(result.read_text())

    return get


@pytest.fixture(scope="session")
def whole_run(once):
    """whole_run(script): the folder of the tiny run, never interrupted, all agents in this
    process.
    """

    def run(script):
        folder, _ = once(f"whole_run_{script}", lambda run_dir: script.main(tiny(script, run_dir)))
        return only_run(folder)

    return run


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """The folder of `language_models.write_files`."""
    import language_models  # takes seconds, and other tests do without transformers

    folder = tmp_path_factory.mktemp("llm")
    language_models.write_files(folder)
    return folder


@pytest.fixture
def stacked(files, tmp_path):
    """(model, layers, eos) of `language_models.stack_three`."""
    import language_models

    return language_models.stack_three(files, tmp_path)


@pytest.fixture(scope="session")
def running_server(files):
    """A server of the tiny model."""
    import language_models
    from completion_server import CompletionServer
    from transformers import AutoTokenizer

    model = language_models.plain_model(files)
    tokenizer = AutoTokenizer.from_pretrained(files / "model")
    with CompletionServer(model, tokenizer).running() as server:
        yield server


@pytest.fixture
def server(running_server):
    """The server of all tests, without adapters, faults and requests."""
    running_server.reset()
    return running_server


@pytest.fixture(scope="session")
def spread(files, once, running_server):
    """(folder, output) of `language_models.train_in_two_ranks`."""
    import language_models

    return language_models.train_in_two_ranks(files, once, running_server.url)


@pytest.fixture
def launched(monkeypatch):
    """launched(*words): from now on scripts run in this process as under federate.py WORDS."""

    def launch(*words):
        make = functools.partial(federate.make_exchange, [*map(str, words)])
        monkeypatch.setattr(communicators, "exchange_of_launcher", make)

    return launch


@pytest.fixture(name="smooth_adam")
def use_smooth_adam(monkeypatch):
    """The optimizers of `smooth_adam`."""
    smooth_adam(monkeypatch.setattr)


@pytest.fixture(autouse=True, scope="session")
def forget_reward_files():
    """What takes an earlier run's reward files out of Python's modules and path, so that each run
    of this process imports its own.
    """
    before = list(sys.path)

    def forget():
        folders = {folder for folder in sys.path if folder not in before}
        for name, module in sys.modules.copy().items():
            file = getattr(module, "__file__", None)
            if file and str(Path(file).parent) in folders:
                del sys.modules[name]
        sys.path[:] = before

    prpo_llm = sys.modules.get("prpo_llm")
    if prpo_llm:
        make_reward = prpo_llm.make_reward

        def forget_and_make(*inputs):
            forget()
            return make_reward(*inputs)

        prpo_llm.make_reward = forget_and_make
    return forget


@pytest.fixture(autouse=True)
def forgotten_reward_files(forget_reward_files):
    """What a run in this process has put on Python's path, which child processes inherit."""
    yield
    forget_reward_files()


class Crash(BaseException):
    """The run ends here, without any cleaning up."""


@pytest.fixture
def crashing():
    """crashing(moment, agent, iteration, run): `run()` in this process, up to that moment; handlers
    are put back.
    """
    handlers = {number: signal.getsignal(number) for number in communicators.SIGNALS}

    def die():
        time.sleep(0.2)  # TensorBoard's thread, which a real crash would end, writes what it has
        raise Crash

    def run_and_crash(moment, agent, iteration, run):
        with pytest.raises(Crash), crash(moment, agent, iteration, die):
            run()

    yield run_and_crash
    for number, handler in handlers.items():
        signal.signal(number, handler)
