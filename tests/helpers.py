"""What the tests of the scripts share: tiny runs, and how to read and compare their files."""

import atexit
import contextlib
import csv
import functools
import io
import json
import math
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from command import parse_args
from ports import free_port
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import communicators
import distral_minigrid
import fedavg_atari
import fedavg_mujoco
import fedavg_ppo
import prpo_atari
import prpo_minigrid
import prpo_mujoco
import prtrpo_minigrid

REPOSITORY = Path(prpo_minigrid.__file__).parent
HAS_ENVPOOL = sys.platform == "linux"  # as in requirements.txt

# Six iterations, rounds after the third and the sixth, checkpoints after every second one, so that
# rounds and checkpoints do not coincide. The communicator depends on returns.
TINY = {
    "device": "cpu",
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
    # Games end after 115 to 185 steps, before the environments start anew after 192. Adam
    # multiplies rounding errors of gradients by up to learning_rate / 1e-5, and here the gradients
    # are large
    "Atari": {
        "env_id": "BreakoutNoFrameskip-v4",
        "precision": "float32",
        "num_envs": 1,
        "num_steps": 96,
        "communicator_temperature": 1.0,
        "learning_rate": 1e-4,
        "update_epochs": 1,
    },
    # A hopper falls after about 20 steps
    "MuJoCo": {"env_id": "Hopper-v5", "num_steps": 64},
}
# Public states of fewer games: to play the usual number takes longer than a tiny run's training
prpo_atari.collect_public_states.__defaults__ = (96, 3)
PUBLIC_TASKS = ("MiniGrid-", "BabyAI-", "ALE/", TINY_OF["Atari"]["env_id"], "Hopper-v5")
OF_PUBLIC_STATES = ("env_id", "env_ids", "full_action_space", "sticky_actions")


def share_public_states(collect):
    """A function that plays public tasks once and returns a copy of the states whenever it is
    called; they depend on nothing else, see test_public_states_are_public.
    """
    collected = {}

    @functools.wraps(collect)
    def collect_once(args, *sizes):
        if not all(env_id.startswith(PUBLIC_TASKS) for env_id in (args.env_id, *args.env_ids)):
            return collect(args, *sizes)
        key = *sizes, *(repr(getattr(args, name, None)) for name in OF_PUBLIC_STATES)
        if key not in collected:
            collected[key] = collect(args, *sizes)
        return collected[key].clone()

    return collect_once


for family, scripts in (
    (prpo_minigrid, [fedavg_ppo, prtrpo_minigrid]),
    (prpo_atari, [fedavg_atari]),
    (prpo_mujoco, [fedavg_mujoco]),
):
    shared = share_public_states(family.collect_public_states)
    for module in (family, *scripts):
        module.collect_public_states = shared


def lend_games(make):
    """A function that makes games, or takes equal ones that were closed: both load the game anew
    when they are reset with seeds.
    """
    closed = {}

    def lend(*game, **options):
        pools = closed.setdefault((*game, *sorted(options.items())), [])
        pool = pools.pop() if pools else make(*game, **options)

        def close():
            if pool not in pools:
                pools.append(pool)

        pool.close = close
        return pool

    return lend


prpo_atari.AtariVectorEnv = lend_games(prpo_atari.AtariVectorEnv)


class OneAgentsEnvs:
    """The environments of a single agent, without the first dimension."""

    def __init__(self, envs):
        self.envs = envs
        self.close = envs.close

    @property
    def obs(self):
        return self.envs.obs[0]

    def step(self, actions):
        *signals, ended = self.envs.step(actions[None])
        episodes = [(total, length) for *_, total, length in ended]
        return *(signal[0] for signal in signals), episodes


class Variant:
    """A script on one family of environments: its module, with what it imports from the family's.

    To replace something, use `patch`: it replaces it in the module that looks it up.
    """

    def __init__(self, module, family):
        self.module = module
        self.family = family
        self.tiny = TINY | TINY_OF[family]
        self.averages = module in (fedavg_ppo, fedavg_atari, fedavg_mujoco)
        families = {"MiniGrid": prpo_minigrid, "Atari": prpo_atari, "MuJoCo": prpo_mujoco}
        self.of_family = families[family]
        self.label = module.__name__
        if family == "MiniGrid":
            self.num_actions = 7
            self.shape = (7, 7, 3)
            self.codes = 11
        elif family == "Atari":
            self.num_actions = 4
            self.shape = (21, 21, 64)
            self.codes = 256
        else:
            self.num_actions = 3
            self.shape = (11,)
        # What a network is made for
        self.sizes = (*self.shape * (family == "MuJoCo"), self.num_actions)

    def owner(self, name):
        """The module that defines this name."""
        return self.module if hasattr(self.module, name) else self.of_family

    def __getattr__(self, name):
        return getattr(self.owner(name), name)

    def __repr__(self):
        return self.label

    def patch(self, monkeypatch, name, value):
        """Replace something at the top of a module."""
        monkeypatch.setattr(self.owner(name), name, value)

    def parse_args(self, argv=None):
        """The arguments as the command line reads them."""
        return parse_args(self, argv)

    def make_envs(self, args, agent, checkpoint=0):
        """The environments of one agent; what they show, take and return is [envs, ...]."""
        return OneAgentsEnvs(self.Envs(args, range(agent, agent + 1), checkpoint))

    def new_agent(self, **options):
        """A network for the tiny runs."""
        return self.Agent(*self.sizes, **options)

    def random_obs(self, *shape):
        """Random bytes, or numbers, in the shape of observations."""
        if self.family == "MuJoCo":
            return torch.randn(*shape, *self.shape)
        return torch.randint(0, self.codes, (*shape, *self.shape), dtype=torch.uint8)

    @property
    def parameters(self):
        """How many numbers such a network sends: parameters and buffers."""
        return len(communicators.flatten(self.new_agent()))


PRPO_MINIGRID = Variant(prpo_minigrid, "MiniGrid")
FEDAVG_MINIGRID = Variant(fedavg_ppo, "MiniGrid")
PRTRPO_MINIGRID = Variant(prtrpo_minigrid, "MiniGrid")
DISTRAL_MINIGRID = Variant(distral_minigrid, "MiniGrid")
del DISTRAL_MINIGRID.tiny["communicator"]  # it refuses any
DISTRAL_MINIGRID.tiny["central_epochs"] = 4
PRPO_ATARI = Variant(prpo_atari, "Atari")
FEDAVG_ATARI = Variant(fedavg_atari, "Atari")
PRPO_MUJOCO = Variant(prpo_mujoco, "MuJoCo")
FEDAVG_MUJOCO = Variant(fedavg_mujoco, "MuJoCo")
# Where the tested lines are those of prpo_minigrid.py
SLOW_ATARI = pytest.param(PRPO_ATARI, marks=pytest.mark.slow)
SLOW_FEDAVG = pytest.param(FEDAVG_MINIGRID, marks=pytest.mark.slow)
SLOW_FEDAVG_MUJOCO = pytest.param(FEDAVG_MUJOCO, marks=pytest.mark.slow)
MINIGRID = [PRPO_MINIGRID, FEDAVG_MINIGRID]
ATARI = [PRPO_ATARI, FEDAVG_ATARI]
SCRIPTS = [PRPO_MINIGRID, PRPO_ATARI, FEDAVG_MINIGRID, PRPO_MUJOCO]


def on(variants):
    """Run a test with each of these as `script`."""
    return pytest.mark.parametrize("script", variants, ids=str)


every_script = on(SCRIPTS)
# FedAvg differs from these in the reference and in averaging only
every_family = on([PRPO_MINIGRID, PRPO_ATARI, PRPO_MUJOCO])
on_minigrid = on(MINIGRID)


def tiny_settings(script, run_dir, changes):
    """The settings of a tiny run, whose length may be given in iterations."""
    settings = script.tiny | changes | {"run_dir": str(run_dir)}
    batch_size = settings["num_envs"] * settings["num_steps"]
    return {"total_timesteps": settings.pop("iterations") * batch_size} | settings


def tiny(script, run_dir, **changes):
    """The arguments of a tiny run."""
    return script.Args(**tiny_settings(script, run_dir, changes))


def train(script, run_dir, **changes):
    """A tiny run in this process. Returns its folder."""
    script.main(tiny(script, run_dir, **changes))
    return only_run(run_dir)


def resume(script, folder, *options):
    """Go on with a run in this process, by the command line's way. Returns its summary."""
    return script.main(script.parse_args(["--resume", str(folder), *map(str, options)]))


def flags(script, run_dir, **changes):
    """The same arguments as a command line."""
    settings = tiny_settings(script, run_dir, changes).items()
    return [
        word for name, value in settings for word in (f"--{name.replace('_', '-')}", str(value))
    ]


def environment(**changes):
    """The environment of a child process: one thread; the scripts can be imported anywhere."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)} | changes


def call(*command, cwd, timeout=240, **env):
    """Run a Python command in a child process. Returns its exit code and its output as text."""
    command = [sys.executable, *map(str, command)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
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


class Child:
    """`python COMMAND` in a fork of a server that has imported the scripts, so that it starts at
    once; with the methods of subprocess.Popen.

    Importing takes a process longer than a tiny run. What torchrun and a shell do is tested with
    processes of their own.
    """

    server = multiprocessing.get_context("forkserver")
    # Also what a run imports only when it begins
    server.set_forkserver_preload(
        ["helpers", "prpo_llm", "torch._dynamo", *["envpool"] * HAS_ENVPOOL]
    )

    def __init__(self, *command, cwd, **env):
        self.logs = tempfile.TemporaryDirectory()
        words = [*map(str, command)]
        there = words, cwd, environment(**env), self.logs.name
        self.process = self.server.Process(target=be, args=there)
        # Where the server finds what it imports
        with mock.patch.dict(os.environ, environment(PYTHONPATH=os.pathsep.join(sys.path))):
            self.process.start()

    @property
    def returncode(self):
        return self.process.exitcode

    def poll(self):
        return self.process.exitcode

    def send_signal(self, number):
        os.kill(self.process.pid, number)

    def kill(self):
        self.process.kill()
        self.process.join()

    def communicate(self, timeout=None):
        """Wait for its end. Returns both outputs."""
        self.process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.process.name, timeout)
        return tuple(Path(self.logs.name, name).read_text() for name in ("out", "err"))


def be(words, cwd, env, logs):
    """Go on as `python WORDS` in that folder and environment; outputs go to files."""
    for number, name in enumerate(("out", "err"), 1):
        os.dup2(os.open(f"{logs}/{name}", os.O_WRONLY | os.O_CREAT), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = words
    sys.path[:0] = [str(Path(words[0]).parent), *env["PYTHONPATH"].split(os.pathsep)]
    torch.set_num_threads(1)
    try:
        runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def place_in_group(number, rank, port):
    """The environment variables by which torchrun tells a process its place in a group."""
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": number,
        "LOCAL_WORLD_SIZE": number,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    return {name: str(value) for name, value in place.items()}


def start_ranks(number, *command, cwd, **env):
    """The same Python command in `number` processes that form a group, without torchrun to look
    after them.
    """
    port = free_port()
    ranks = []
    for rank in range(number):
        place = place_in_group(number, rank, port)
        ranks.append(Child(*command, cwd=cwd, **place, **env))
    return ranks


def outcomes(processes, timeout=120):
    """((stdout, stderr), return code) of every process; none is left behind.

    Where one does not end, the test fails with the outputs of all, since the cause may be another.
    """
    try:
        return [(process.communicate(timeout=timeout), process.returncode) for process in processes]
    except subprocess.TimeoutExpired as error:
        codes = [process.poll() for process in processes]
        for process in processes:
            process.kill()
        outputs = [process.communicate() for process in processes]
        pytest.fail(f"{error}; exit codes {codes}, outputs {outputs}")
    finally:
        for process in processes:
            process.kill()


def run_ranks(number, *command, cwd, **env):
    """Run a Python command in `number` processes, without a fault. Returns what they print."""
    results = outcomes(start_ranks(number, *command, cwd=cwd, **env), timeout=240)
    assert [code for _, code in results] == [0] * number, results
    return "".join(output for (output, _), _ in results)


def refusal(function, *arguments, code=2, **options):
    """The one line on stderr with which `function` ends the process, or what is in tyro's box.

    The exit code is 2 for a wrong value, otherwise 1.
    """
    errors = io.StringIO()
    with pytest.raises(SystemExit) as end, contextlib.redirect_stderr(errors):
        function(*arguments, **options)
    assert end.value.code == code
    if "╭" in errors.getvalue():
        return read_box(errors.getvalue())
    message = str(end.value)
    assert message, message
    assert message == message.strip(), message
    assert "\n" not in message, message
    assert errors.getvalue().splitlines()[-1] == message
    return message


def told_to_launcher(monkeypatch, main, *inputs, **options):
    """What a run tells its launcher as it begins: isolated, averages, together."""
    needs_of_runs = []

    def refuse(args, *needs):
        needs_of_runs.append(needs)
        communicators.stop("refused")

    monkeypatch.setattr(communicators, "exchange_of_launcher", refuse)
    refusal(main, *inputs, code=1, **options)
    (needs,) = needs_of_runs
    return needs


def read_box(text):
    """The words in the frame that tyro draws around its errors."""
    return " ".join(re.sub(r"[^\w\s!-~]", " ", text).split())


def notes_of(monkeypatch, owner, name, note):
    """A list that gets note(*inputs) before every call of a function from now on."""
    function = getattr(owner, name)
    notes = []

    def noted(*inputs, **options):
        notes.append(note(*inputs))
        return function(*inputs, **options)

    monkeypatch.setattr(owner, name, noted)
    return notes


def results_of(monkeypatch, owner, name):
    """A list that gets what a function returns in every call from now on."""
    function = getattr(owner, name)
    results = []

    def kept(*inputs, **options):
        results.append(function(*inputs, **options))
        return results[-1]

    monkeypatch.setattr(owner, name, kept)
    return results


def total_variation(log_probs):
    """Pairwise distance of policies: total variation, averaged over states.

    log_probs: [agents, states, actions]. Returns [agents, agents] in [0, 1].
    """
    probs = log_probs.exp()
    # One policy after the other, because all differences at once may not fit into memory
    rows = [(probs - policy).abs().sum(-1).mean(-1) for policy in probs]
    return torch.stack(rows) / 2


POWER = 2  # of what a critic promises, in its vote


def gate_by_hand(weights, values, returns, visited=None):
    """C_i(s) of every state, [states][policies], by loops over numbers.

    values: [policies][states]; visited: the state of each sample (None: each state once).
    """
    lowest = min(returns)
    highest = max(returns)
    most = []  # what critics promise at most
    for weight, of_policy in zip(weights, values, strict=True):
        if weight > 0 and not any(math.isnan(value) for value in of_policy):
            most.append(max(of_policy))
    if most:
        highest = max(highest, sorted(most)[(len(most) - 1) // 2])
    promises = []
    spreads = []
    for of_policy in values:
        promised = []
        for value in of_policy:
            share = 0.0
            if math.inf > highest > lowest and value > lowest:  # not for NaN
                share = (min(value, highest) - lowest) / (highest - lowest)
            promised.append(share)
        promises.append(promised)
        states = range(len(promised)) if visited is None else visited
        spread = float(np.std([promised[state] for state in states]))
        if spread < 1e-6 or any(math.isnan(of_policy[state]) for state in states):
            spread = 0.0  # rounding
        spreads.append(spread)
    rows = []
    for of_state in zip(*promises, strict=True):
        votes = []
        for weight, promised, spread in zip(weights, of_state, spreads, strict=True):
            votes.append(weight * promised**POWER * spread)
        row = list(weights)
        if sum(votes) > 0:
            row = [vote / sum(votes) for vote in votes]
        rows.append(row)
    return rows


def only_run(run_dir):
    """The one run folder in `run_dir`."""
    (folder,) = Path(run_dir).iterdir()
    return folder


def copy_config(source, folder, *words):
    """Write the config.json of a run into a folder, with more words in its command."""
    config = config_of(source)
    config["command"] += map(str, words)
    (folder / "config.json").write_text(json.dumps(config))


def summary_of(folder):
    """The content of summary.json."""
    return json.loads((folder / "summary.json").read_text())


def config_of(folder):
    """The content of config.json."""
    return json.loads((folder / "config.json").read_text())


def read_jsonl(path):
    """The rows of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_jsonl(path, rows):
    """Write a JSON Lines file. Returns its path as flags take it."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def write_matrix(path, rows):
    """Write a CSV file of weights. Returns its path as flags take it."""
    path.write_text("\n".join(",".join(f"{weight:g}" for weight in row) for row in rows))
    return str(path)


def table_of(folder, name):
    """A CSV file of a run as a list of dicts of strings."""
    with open(folder / f"{name}.csv", newline="") as file:
        return list(csv.DictReader(file))


def rows_of(folder):
    """metrics.csv as a list of dicts of strings, without the columns that depend on the clock."""
    return [
        {k: v for k, v in row.items() if not k.endswith("_per_second")}
        for row in table_of(folder, "metrics")
    ]


def weights_of(folder):
    """agent number -> its parameters as one vector."""
    files = {
        int(re.search(r"\d+", path.name)[0]): path for path in folder.glob("agent_*.safetensors")
    }
    return {
        i: torch.cat([t.flatten() for t in load_file(path).values()])
        for i, path in sorted(files.items())
    }


def networks_of(folder, n=3):
    """The networks of all agents at the end of a run: each name -> values."""
    return [load_file(folder / f"agent_{i}.safetensors") for i in range(n)]


def scalars_of(folder):
    """TensorBoard: tag -> [(step, value), ...]."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    series = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    return {tag: [(event.step, event.value) for event in points] for tag, points in series.items()}


def assert_weights(weights, expected):
    """The same parameters after a run, up to rounding, with the optimizers of `smooth_adam`."""
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)


def plain_objective(args, batch, logprob, value):
    """Ratio, objective (clipped) and squared error of the value of each sample, [samples]."""
    advantage = batch["advantage"]
    if args.norm_adv:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    ratio = (logprob - batch["logprob"]).exp()
    objective = ratio * advantage
    target = batch["advantage"] + batch["value"]
    value_loss = (value - target) ** 2
    if args.clip_coef > 0:
        clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
        objective = torch.minimum(objective, clipped * advantage)
        if args.clip_vloss:
            near = batch["value"] + (value - batch["value"]).clamp(-args.clip_coef, args.clip_coef)
            value_loss = torch.maximum(value_loss, (near - target) ** 2)
    return ratio, objective, value_loss


def plain_step(args, agent, optimizer, loss):
    """One step of Adam, with the gradient's norm clipped."""
    optimizer.zero_grad()
    loss.backward()
    learned = [parameter for parameter in agent.parameters() if parameter.grad is not None]
    norm = sum((parameter.grad**2).sum() for parameter in learned).sqrt()
    for parameter in learned:
        parameter.grad *= min(1.0, args.max_grad_norm / norm)
    optimizer.step()


def measure_minibatch(args, ratio, objective, value_loss, entropy):
    """Metrics of a minibatch by their definitions, from what each sample has, [samples]."""
    ratio = ratio.detach()
    outside = (ratio < 1 - args.clip_coef) | (ratio > 1 + args.clip_coef)
    if args.clip_coef == 0:
        outside = torch.zeros_like(ratio)
    return {
        "policy_loss": -objective.mean().item(),
        "value_loss": value_loss.mean().item() / 2,
        "entropy": entropy.mean().item(),
        "old_approx_kl": -ratio.log().mean().item(),
        "approx_kl": (ratio - 1 - ratio.log()).mean().item(),
        "clipfrac": outside.float().mean().item(),
    }


def measure_update(minibatches, batch, **more):
    """A row of metrics of an update: means over its minibatches, and what its batch shows."""
    row = {name: np.mean([each[name] for each in minibatches]) for name in minibatches[0]}
    returns = batch["advantage"] + batch["value"]
    row["explained_variance"] = 1 - (batch["advantage"].var() / returns.var()).item()
    return row | more


def assert_metrics(folder, expected_rows):
    """Rows of metrics.csv have these numbers, up to rounding."""
    for row, expected in zip(rows_of(folder), expected_rows, strict=True):
        for name, value in expected.items():
            assert float(row[name]) == pytest.approx(value, rel=1e-3, abs=2e-6), (name, row)


WORDS = {"env_id", "exp_name"}  # columns of metrics.csv that are no numbers


def assert_same_rows(rows, expected_rows, tolerance=1e-5, apart=()):
    """Equal rows of metrics.csv, up to rounding and but for the columns `apart`."""
    assert [(row["iteration"], row["agent"]) for row in rows] == [
        (r["iteration"], r["agent"]) for r in expected_rows
    ]
    for row, expected_row in zip(rows, expected_rows, strict=True):
        assert row.keys() == expected_row.keys()
        assert all(row[word] == expected_row[word] for word in WORDS)
        for column in row.keys() - WORDS - set(apart):
            value = float(row[column])
            expected_value = float(expected_row[column])
            assert value == pytest.approx(
                expected_value, rel=tolerance, abs=tolerance, nan_ok=True
            ), (
                column,
                row,
                expected_value,
            )


def assert_same_run(folder, other, exactly=True):
    """Equal weights and equal metrics, but for the clock: bit for bit, or up to rounding."""
    weights = weights_of(folder)
    expected = weights_of(other)
    assert weights.keys() == expected.keys()
    assert len(weights) > 0
    rows = rows_of(folder)
    expected_rows = rows_of(other)
    if exactly:
        assert all(torch.equal(weights[i], expected[i]) for i in weights)
        assert rows == expected_rows
        return
    for i in weights:
        assert_weights(weights[i], expected[i])
    # Of the values' errors, whose variance may be tiny, explained variance is the relative size
    assert_same_rows(rows, expected_rows, 1e-4, apart={"explained_variance"})


# Metrics that are logged under federate.py only
FEDERATED = {"communication/bytes_received", "communication/rejected", "communication/age_j"}
GATED = {"gate/weight_j", "gate/spread_j"}  # and with --gate only


def metrics_of_page(name):
    """The metrics that a page explains, but those of federate.py and --gate."""
    page = (REPOSITORY / "docs" / f"{name}.md").read_text()
    return set(re.findall(r"^\| `([a-z_]+/\w+(?:/\w+)?)` \|", page, re.M)) - FEDERATED - GATED


def name_in_page(tag):
    """What the pages call a metric whose TensorBoard tag names agents and tasks."""
    if tag.startswith("eval/"):
        return "eval/TASK/agent_i"
    if tag.startswith("distances/"):
        return re.sub(r"agent_\d+_agent_\d+", "agent_i_agent_j", tag)
    tag = re.sub(r"/agent_\d+$", "", tag)
    tag = re.sub(r"gate/(weight|spread)_\d+$", r"gate/\1_j", tag)
    return re.sub(r"communicator/c_\d+_\d+$", "communicator/c_i_j", tag)


def in_ranks(*runs):
    """Run functions as the ranks of one torchrun, each on a machine of its own. Returns what they
    return."""
    context = multiprocessing.get_context("fork")
    answers = []
    port = free_port()

    def start(rank, run, queue):
        os.environ |= place_in_group(len(runs), rank, port)
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        queue.put(run())

    queues = [context.Queue() for _ in runs]
    ranks = [
        context.Process(target=start, args=arguments)
        for arguments in zip(range(len(runs)), runs, queues, strict=True)
    ]
    for rank in ranks:
        rank.start()
    try:
        answers = [queue.get(timeout=60) for queue in queues]
    finally:
        for rank in ranks:
            rank.join(5 if answers else 0)
            rank.kill()
    return answers
