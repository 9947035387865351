"""What the tests of the scripts share: tiny runs, and how to read and compare what they leave."""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import fedavg_ppo
import prpo_atari
import prpo_minigrid

REPOSITORY = Path(prpo_minigrid.__file__).parent

# Six iterations, rounds after the third and the last one, checkpoints after every second: not at the same time.
# Returns matter to C.
TINY = {
    "device": "cpu",
    "precision": "float32",
    "num_agents": 3,
    "num_envs": 2,
    "iterations": 6,
    "local_updates": 3,
    "save_every": 2,
    "communicator": "softmax-reward",
    "update_epochs": 2,
    "num_minibatches": 2,
    "learning_rate": 1e-3,
    "eval_episodes": 2,
}
TINY_OF = {
    # Rooms are small, starts are random, episodes end at the goal or after 100 steps
    "MiniGrid": {"env_id": "MiniGrid-Empty-Random-5x5-v0", "num_steps": 64},
    # Games end after 115 to 185 steps, before the environments start anew after 192. Adam multiplies rounding errors
    # of gradients by up to learning_rate / 1e-5, and here the gradients are large
    "Atari": {
        "env_id": "BreakoutNoFrameskip-v4",
        "num_steps": 96,
        "communicator_temperature": 1.0,
        "learning_rate": 1e-4,
        "update_epochs": 1,
    },
}


class Variant:
    """A script on one family of environments: what its module holds, under the names of the PR-PPO scripts.

    To replace something, replace it in `module`.
    """

    def __init__(self, module, family):
        fedavg = module is fedavg_ppo
        self.module, self.family, self.tiny = module, family, TINY | TINY_OF[family]
        self.label = f"{module.__name__}-{family}" if fedavg else module.__name__
        self.coef = "kl_coef" if fedavg else "communication_coef"
        self.num_actions, self.shape, self.codes = (
            (7, (7, 7, 3), 11) if family == "MiniGrid" else (4, (21, 21, 64), 256)
        )
        self.names = {name: f"{family}{name}" for name in ("Agent", "Pool")}
        self.names |= {"evaluate": f"evaluate_{family.lower()}", "public_states": f"{family.lower()}_states"}
        if not fedavg:
            self.names = {}

    def __getattr__(self, name):
        return getattr(self.module, self.names.get(name, name))

    def __repr__(self):
        return self.label

    def new_agent(self, **options):
        """A network for the tiny runs."""
        return self.Agent(self.num_actions, **options)

    def random_obs(self, *shape):
        """Random bytes in the shape of observations."""
        return torch.randint(0, self.codes, (*shape, *self.shape), dtype=torch.uint8)

    @property
    def parameters(self):
        """How many numbers such a network consists of."""
        return sum(parameter.numel() for parameter in self.new_agent().parameters())


PRPO_MINIGRID, FEDAVG_MINIGRID = Variant(prpo_minigrid, "MiniGrid"), Variant(fedavg_ppo, "MiniGrid")
PRPO_ATARI, FEDAVG_ATARI = Variant(prpo_atari, "Atari"), Variant(fedavg_ppo, "Atari")
MINIGRID, ATARI = [PRPO_MINIGRID, FEDAVG_MINIGRID], [PRPO_ATARI, FEDAVG_ATARI]
SCRIPTS = [PRPO_MINIGRID, PRPO_ATARI, FEDAVG_MINIGRID]


def on(variants):
    """Run a test with each of these as `script`."""
    return pytest.mark.parametrize("script", variants, ids=str)


every_variant, every_script = on(MINIGRID + ATARI), on(SCRIPTS)
on_minigrid, on_atari = on(MINIGRID), on(ATARI)


def tiny_settings(script, run_dir, changes):
    """The settings of a tiny run, whose length may be given in iterations."""
    settings = script.tiny | changes | {"run_dir": str(run_dir)}
    batch_size = settings["num_envs"] * settings["num_steps"]
    return {"total_timesteps": settings.pop("iterations") * batch_size} | settings


def tiny(script, run_dir, **changes):
    """The arguments of a tiny run."""
    return script.Args(**tiny_settings(script, run_dir, changes))


def flags(script, run_dir, **changes):
    """The same arguments as a command line."""
    settings = tiny_settings(script, run_dir, changes).items()
    return [part for name, value in settings for part in (f"--{name.replace('_', '-')}", str(value))]


def environment(**changes):
    """The environment of a child process: one thread, and the scripts importable from any folder."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)} | changes


def call(*command, cwd, timeout=240, **env):
    """Run a Python command in a child process. Returns what became of it, with its output as text."""
    command, pipes = [sys.executable, *map(str, command)], {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=cwd, env=environment(**env), text=True, **pipes) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun then ends its processes too, by force after 30 seconds
            output, errors = process.communicate(timeout=60)
            pytest.fail(f"{command} hangs\n{output}\n{errors}")
        finally:
            process.kill()
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def torchrun(nproc, *command, cwd, options=(), **env):
    """Run a Python command in `nproc` processes."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", nproc, *options)
    return call(*launcher, *command, cwd=cwd, **env)


def only_run(run_dir):
    """The one run folder in `run_dir`."""
    (folder,) = Path(run_dir).iterdir()
    return folder


def rows_of(folder):
    """metrics.csv as a list of dicts of strings, without the column that depends on the clock."""
    with open(folder / "metrics.csv", newline="") as file:
        return [{k: v for k, v in row.items() if k != "agent_steps_per_second"} for row in csv.DictReader(file)]


def evaluations_of(folder):
    """evaluations.csv as a list of dicts of strings."""
    with open(folder / "evaluations.csv", newline="") as file:
        return list(csv.DictReader(file))


def weights_of(folder):
    """agent number -> its parameters as one vector."""
    files = {int(re.search(r"\d+", path.name)[0]): path for path in folder.glob("agent_*.safetensors")}
    return {i: torch.cat([t.flatten() for t in load_file(path).values()]) for i, path in sorted(files.items())}


def scalars_of(folder):
    """TensorBoard: tag -> [(step, value), ...]."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    series = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    return {tag: [(event.step, event.value) for event in points] for tag, points in series.items()}


def assert_same_run(folder, other, exactly=False):
    """Equal weights and equal metrics, but for the clock: bit for bit, or up to rounding."""
    weights, expected = weights_of(folder), weights_of(other)
    assert weights.keys() == expected.keys() and len(weights) > 0
    for i in weights:
        torch.testing.assert_close(weights[i], expected[i], rtol=0, atol=0 if exactly else 1e-5)
    rows, expected_rows = rows_of(folder), rows_of(other)
    if exactly:
        assert rows == expected_rows
    assert [(row["iteration"], row["agent"]) for row in rows] == [(r["iteration"], r["agent"]) for r in expected_rows]
    for row, expected_row in zip(rows, expected_rows, strict=True):
        assert row.keys() == expected_row.keys() and row["env_id"] == expected_row["env_id"]
        for column in row.keys() - {"env_id"}:
            value, wanted = float(row[column]), float(expected_row[column])
            assert value == pytest.approx(wanted, rel=1e-5, abs=1e-5, nan_ok=True), (column, row, expected_row)
