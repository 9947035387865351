"""Speed and memory of whole runs: our scripts against stable-baselines3, sb3-contrib and TRL.

    python benchmark/throughput.py  # the comparison, and where the time goes
    python benchmark/throughput.py --env-id BeamRiderNoFrameskip-v4 --repeats 3  # the same on Atari
    python benchmark/throughput.py --env-id HalfCheetah-v5 --repeats 3  # ... and on MuJoCo
    python benchmark/throughput.py --trpo  # PR-TRPO against sb3-contrib
    python benchmark/throughput.py --zeroth  # Par-S2ZPO against a plain loop over environments
    python benchmark/throughput.py --llm --repeats 3  # language models against TRL
    python benchmark/throughput.py --text  # agents in text worlds against transformers' generate
    python benchmark/throughput.py --scaling  # and the cost per agent as agents are added
    python benchmark/throughput.py --csv benchmark/results/throughput.csv

Every run is a process of its own; the contenders take turns, so that a slow minute of the machine
affects all of them. Agent-steps/s are all agents' environment steps over the training time,
start-up and evaluation excluded, completions/s all agents' completions. The rollout of
stable-baselines3 contains its advantages. Peak memory is that of the largest process.
"""

import csv
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from arguments import is_atari, is_minigrid, read_flags, read_speed, refuse

ROOT = Path(__file__).resolve().parent.parent
SB3 = "stable-baselines3"
CONTRIB = "sb3-contrib's TRPO"
TRL = "TRL's GRPOTrainer"
LOOP = "a plain loop over environments"
GENERATE = "transformers' generate"


@dataclass
class Args:
    repeats: int = 5
    """runs of every contender; the table shows medians (0: leave the comparison out)"""
    timesteps: int = 0
    """environment steps per agent of a compared run (0: 65,536, Atari and --trpo 32,768)"""
    # iterations between communication rounds; even a short run needs several: C is I before the
    # first
    local_updates: int = 2
    env_id: str = "MiniGrid-FourRooms-v0"
    """the task, of MiniGrid, Atari or MuJoCo"""
    trpo: bool = False
    """PR-TRPO instead, against sb3-contrib's TRPO"""
    # Par-S2ZPO instead, on HalfCheetah-v5 or --env-id, against a plain loop over gymnasium's
    # environments with one call of the policy per step
    zeroth: bool = False
    # language models instead: completions per second against TRL, prompts of equal length, full
    # completions
    llm: bool = False
    # tokens of a prompt, tokens of a completion and completions per prompt: a table for each triple
    llm_sizes: tuple[tuple[int, int, int], ...] = ((300, 58, 8), (64, 128, 8))
    total_steps: int = 3
    """steps of a compared run of language models, with four prompts per agent each"""
    # agents in text worlds instead: episodes per second against transformers' own generate and
    # autograd over the whole sequence, with the model of benchmark/babyai.py
    text: bool = False
    text_steps: int = 2
    """steps of a compared run of it"""
    text_tasks: int = 2
    """tasks per agent and step of a compared run of it, with eight episodes each"""
    scaling: bool = False
    """also measure how the cost per agent-step grows with the number of agents"""
    scaling_agents: tuple[int, ...] = (1, 3, 8, 16, 32)
    """numbers of agents"""
    scaling_timesteps: int = 6_144
    """environment steps per agent of a scaling run, in iterations of 2,048"""
    csv: str = ""
    """also write every single run into this file"""


def run_alone(command: list[str], **outputs) -> tuple[int, float]:
    """Run a process; outputs: as `subprocess.Popen` takes them. Returns its exit code, and its peak
    memory in MiB.
    """
    process = subprocess.Popen(command, cwd=ROOT, **outputs)
    try:
        _, status, usage = os.wait4(process.pid, 0)  # of this child alone, unlike RUSAGE_CHILDREN
    except BaseException:
        process.kill()
        process.wait()
        raise
    process.returncode = os.waitstatus_to_exitcode(status)
    unit = 1 if sys.platform == "darwin" else 1024
    return process.returncode, usage.ru_maxrss * unit / 2**20


def measure(command: list[str]) -> dict:
    """Run `command` alone, in a temporary folder.

    Returns its summary.json with `speed`, `peak_memory_mb` and `process_seconds`.
    """
    with tempfile.TemporaryDirectory() as folder:
        with open(Path(folder, "log"), "w+") as log:
            arguments = [sys.executable, *command, "--run-dir", folder]
            started = time.perf_counter()
            code, peak_memory = run_alone(arguments, stdout=log, stderr=subprocess.STDOUT)
            seconds = time.perf_counter() - started
            if code:
                log.seek(0)
                sys.exit(f"{shlex.join(command)} failed:\n{log.read()[-2000:]}")
        summary = json.loads(next(Path(folder).glob("*/summary.json")).read_text())
    return summary | {
        "speed": read_speed(summary),
        "peak_memory_mb": peak_memory,
        "process_seconds": seconds,
    }


def choose_script(env_id: str) -> str:
    """The script that trains on a task."""
    if is_minigrid(env_id):
        return "prpo_minigrid.py"
    return "prpo_atari.py" if is_atari(env_id) else "prpo_mujoco.py"


def choose_program(env_id: str) -> list[str]:
    """The script that trains on a task, on MiniGrid with table 2's settings, as the yardstick."""
    script = choose_script(env_id)
    if is_minigrid(env_id):
        return [script, "--learning-rate", "2.5e-4", "--kl-coef", "1", "--kl-direction", "forward"]
    return [script]


def task_folder(prompt_tokens: int) -> str:
    """Where `trl_grpo.py --prepare` writes the task of language models, once."""
    return f"runs/llm-task-{prompt_tokens}"


def llm_contenders(args: Args) -> dict[str, list[str]]:
    """What is compared with TRL at the first of the sizes: name -> command."""
    prompt_tokens, response_length, group_size = args.llm_sizes[0]
    task = task_folder(prompt_tokens)
    size = ["--response-length", str(response_length), "--group-size", str(group_size)]
    size += ["--total-steps", str(args.total_steps)]
    trl = ["benchmark/baselines/trl_grpo.py", "--task", task]
    trl += ["--micro-batch-size", str(group_size), *size]
    prpo = ["prpo_llm.py", "--base-model", task, "--dataset", f"{task}/prompts.jsonl"]
    prpo += ["--eval-prompts", "0", *size]
    three = [*prpo, "--num-agents", "3"]
    return {
        TRL + ", completions scored only": [*trl, "--completions-only"],
        TRL: trl,
        "1 agent": [*prpo, "--num-agents", "1"],
        "3 agents isolated": [*three, "--aggregation", "none"],
        "3 agents dense": [*three, "--communicator", "uniform", "--local-updates", "1"],
    }


def trpo_contenders(args: Args) -> dict[str, list[str]]:
    """What is compared with sb3-contrib: name -> command."""
    timesteps = str(args.timesteps or 32_768)
    common = ["--env-id", args.env_id, "--total-timesteps", timesteps, "--eval-episodes", "0"]
    prtrpo = ["prtrpo_minigrid.py", *common]
    contrib = ["benchmark/baselines/sb3_trpo.py", *common]
    # All updates but the first have a reference of others
    prtrpo += ["--local-updates", "1"]
    return {
        CONTRIB: contrib,
        CONTRIB + ", 1 thread": [*contrib, "--threads", "1"],
        "1 agent": [*prtrpo, "--num-agents", "1", "--communicator", "identity"],
        "3 agents isolated": [*prtrpo, "--num-agents", "3", "--communicator", "identity"],
        "3 agents dense": [*prtrpo, "--num-agents", "3", "--communicator", "uniform"],
    }


def zeroth_contenders(args: Args) -> dict[str, list[str]]:
    """What is compared with a plain loop: name -> command."""
    common = ["--env-id", args.env_id, "--total-iterations", "5"]  # of 64 episodes each
    s2zpo = ["s2zpo_mujoco.py", *common, "--eval-episodes", "0"]
    horizon = "500" if args.env_id == "CartPole-v1" else "250"
    return {
        LOOP: ["benchmark/baselines/zeroth_loop.py", *common, "--horizon", horizon],
        "4 agents, gymnasium": [*s2zpo, "--env-backend", "gymnasium"],
        "4 agents, envpool": [*s2zpo, "--env-backend", "envpool"],
    }


def text_contenders(args: Args) -> dict[str, list[str]]:
    """What is compared with transformers' generate: name -> command."""
    steps = ["--total-steps", str(args.text_steps), "--batch-size", str(args.text_tasks)]
    babyai = ["prpo_babyai.py", *steps, "--eval-episodes", "0"]
    dense = ["--communicator", "uniform", "--local-updates", "1"]
    return {
        GENERATE: ["benchmark/baselines/text_loop.py", *steps],
        "3 agents isolated": [*babyai, "--aggregation", "none"],
        "3 agents dense": [*babyai, *dense],
    }


def comparisons(args: Args) -> dict[str, Args]:
    """The tables to be made: name -> arguments, of one size."""
    tables = {"comparison": replace(args, llm_sizes=args.llm_sizes[:1])}
    if args.llm:
        for size in args.llm_sizes[1:]:
            name = "comparison, {} + {} tokens, groups of {}".format(*size)
            tables[name] = replace(args, llm_sizes=(size,))
    return tables


def contenders(args: Args) -> dict[str, list[str]]:
    """What is compared, the baseline first: name -> command."""
    if args.llm:
        return llm_contenders(args)
    if args.text:
        return text_contenders(args)
    if args.trpo:
        return trpo_contenders(args)
    if args.zeroth:
        return zeroth_contenders(args)
    timesteps = args.timesteps or (32_768 if is_atari(args.env_id) else 65_536)
    common = ["--env-id", args.env_id, "--total-timesteps", str(timesteps), "--eval-episodes", "0"]
    prpo = [*choose_program(args.env_id), *common]
    sb3 = ["benchmark/baselines/sb3_ppo.py", *common]
    rounds = ["--local-updates", str(args.local_updates)]
    dense = [*prpo, "--num-agents", "3", "--communicator", "uniform", *rounds]
    alone = [*prpo, "--num-agents", "1", "--communicator", "identity"]
    baselines = {
        SB3: sb3,
        SB3 + ", 1 thread": [*sb3, "--threads", "1"],
    }
    if choose_script(args.env_id) == "prpo_mujoco.py":
        return mujoco_contenders(args, common)
    if is_atari(args.env_id):
        three = [*prpo, "--num-agents", "3"]
        bfloat16 = ["--precision", "bfloat16"]
        reward = [*three, "--communicator", "reward", *rounds]
        return baselines | {
            "1 agent, bfloat16": [*alone, *bfloat16],
            "3 agents isolated, bfloat16": [*three, "--communicator", "identity", *bfloat16],
            "3 agents reward, bfloat16": [*reward, *bfloat16],
            "3 agents reward, float32": [*reward, "--precision", "float32"],
        }
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "3"]
    return baselines | {
        "1 agent": [*alone, "--local-updates", "32"],
        "3 agents dense, gymnasium": [*dense, "--env-backend", "gymnasium"],
        "3 agents dense": dense,
        "3 agents dense, 3 processes": [*torchrun, *dense],
    }


def mujoco_contenders(args: Args, common: list[str]) -> dict[str, list[str]]:
    """What is compared with stable-baselines3 on MuJoCo: name -> command.

    Environments are envpool's where it knows the task.
    """
    # The defaults of prpo_mujoco.py
    ppo = ["--learning-rate", "3e-4", "--num-minibatches", "32", "--update-epochs", "10"]
    ppo += ["--clip-coef", "0.2", "--ent-coef", "0"]
    sb3 = ["benchmark/baselines/sb3_ppo.py", *common, *ppo]
    prpo = ["prpo_mujoco.py", *common, *ppo, "--local-updates", str(args.local_updates)]
    alone = [*prpo, "--num-agents", "1", "--communicator", "identity"]
    dense = [*prpo, "--num-agents", "4", "--communicator", "uniform"]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    commands = {
        SB3: sb3,
        SB3 + ", 1 thread": [*sb3, "--threads", "1"],
    }
    for name, backend in ((", gymnasium", "gymnasium"), ("", "auto")):
        environments = ["--env-backend", backend]
        commands |= {
            f"1 agent{name}": [*alone, *environments],
            f"4 agents dense{name}": [*dense, *environments],
            f"4 agents dense, 2 processes{name}": [*torchrun, *dense, *environments],
        }
    return commands


def scaling_contenders(args: Args) -> dict[str, list[str]]:
    """One agent, then dense and ring communicators of more and more agents: name -> command."""
    common = [*choose_program(args.env_id), "--env-id", args.env_id, "--communicator", "uniform"]
    common += ["--total-timesteps", str(args.scaling_timesteps), "--eval-episodes", "0"]
    # A round after every iteration, so that its cost is visible
    common += ["--local-updates", "1"]
    commands = {}
    for num_agents in args.scaling_agents:
        for name, topology in (("dense", "full"), ("ring", "ring")):
            size = ["--num-agents", str(num_agents), "--topology", topology]
            commands[f"{num_agents} {name}"] = [*common, *size]
    return commands


def measure_phases(run: dict) -> dict[str, float]:
    """Where the time of `run` goes: phase -> microseconds per agent-step or completion.

    The rest is `other`.
    """
    work = run["speed"] * run["train_seconds"]
    other = run["train_seconds"] - sum(run["seconds"].values())
    seconds = run["seconds"] | {"other": other}
    return {phase: 1e6 * duration / work for phase, duration in seconds.items()}


def summarise_phases(runs: list[dict]) -> dict[str, float]:
    """The median over `runs` of every phase, in microseconds."""
    each = [measure_phases(run) for run in runs]
    return {phase: median(phases[phase] for phases in each) for phase in each[0]}


def print_table(header: Iterable[str], rows: list[Iterable[str]]) -> None:
    """Columns as wide as their widest cell, the first one flush left."""
    table = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for first, *cells in table:
        numbers = (f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        print("  ".join((f"{first:<{widths[0]}}", *numbers)))


def compare(args: Args) -> dict[str, list[dict]]:
    """Run the contenders in turns and print how they compare. Returns name -> runs."""
    commands = contenders(args)
    unit = name_unit(args)
    runs = {name: [] for name in commands}
    for repeat in range(args.repeats):
        order = list(commands)
        if repeat % 2:
            order.reverse()
        for name in order:
            run = measure([*commands[name], "--seed", str(repeat + 1)])
            runs[name].append(run)
            progress = f"repeat {repeat + 1}/{args.repeats}"
            speed = f"{format_speed(args, run['speed'])} {unit}s/s"
            print(f"{progress}  {name}: {speed}", file=sys.stderr, flush=True)
    print_comparison(args, unit, runs)
    print_phases(unit, runs)
    return runs


def name_unit(args: Args) -> str:
    """What is counted per second."""
    if args.text:
        return "episode"
    return "completion" if args.llm else "agent-step"


def format_speed(args: Args, speed: float) -> str:
    """Completions and episodes per second have decimals, agent-steps per second have none."""
    return f"{speed:,.2f}" if args.llm or args.text else f"{speed:,.0f}"


def print_comparison(args: Args, unit: str, runs: dict[str, list[dict]]) -> None:
    """The table of speed and memory. runs: name -> runs, the baseline's first."""
    baseline = next(iter(runs.values()))
    rows = []
    for name, repeats in runs.items():
        pairs = zip(repeats, baseline, strict=True)  # of one repeat each
        ratios = [run["speed"] / other["speed"] for run, other in pairs]
        speed = median(run["speed"] for run in repeats)
        memory = median(run["peak_memory_mb"] for run in repeats)
        seconds = median(run["process_seconds"] for run in repeats)
        row = (
            name,
            repeats[0].get("env_backend", repeats[0]["device"]),
            format_speed(args, speed),
            f"{median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
            f"{memory:,.0f}",
            f"{seconds:.1f}",
        )
        rows.append(row)
    if args.llm:
        where = "device"
        size = "{} + {} tokens, groups of {}".format(*args.llm_sizes[0])
        task = f"{size}, {args.total_steps} steps"
    elif args.text:
        where = "device"
        task = f"BabyAI in words, {args.text_steps} steps"
    else:
        where = "environments"
        task = f"{args.env_id}, {baseline[0]['timesteps_per_agent']:,} timesteps"
    print(f"\n{task} per agent, medians of {args.repeats} (ratios: least-most)")
    header = ("", where, f"{unit}s/s", "ratio", "peak memory MB", "whole process s")
    print_table(header, rows)


def print_phases(unit: str, runs: dict[str, list[dict]]) -> None:
    """The table of where the time goes. runs: name -> runs."""
    phases = {name: summarise_phases(repeats) for name, repeats in runs.items()}
    names = dict.fromkeys(phase for times in phases.values() for phase in times)
    rows = []
    for phase in names:
        cells = []
        for times in phases.values():
            if phase in times:
                share = times[phase] / sum(times.values())
                cells.append(f"{times[phase]:,.1f} {share:4.0%}")
            else:
                cells.append("")
        rows.append((phase, *cells))
    rows.append(("sum", *(f"{sum(times.values()):,.1f} 100%" for times in phases.values())))
    print(f"\nwhere the time goes: microseconds per {unit}, and share")
    print_table(("", *phases), rows)


def scale(args: Args) -> dict[str, list[dict]]:
    """Run and print the cost per agent-step for more and more agents. Returns name -> runs."""
    runs = {}
    for name, command in scaling_contenders(args).items():
        runs[name] = [measure(command)]
        speed = f"{runs[name][0]['speed']:,.0f} agent-steps/s"
        print(f"scaling  {name}: {speed}", file=sys.stderr, flush=True)
    rows = []
    for name, (run,) in runs.items():
        phases = measure_phases(run)
        shown = (sum(phases.values()), phases.get("reference", 0.0), phases.get("exchange", 0.0))
        rows.append((name, *(f"{value:.1f}" for value in shown), f"{run['peak_memory_mb']:,.0f}"))
    size = f"{args.scaling_timesteps:,} steps, a round per iteration"
    print(f"\ncost of more agents: microseconds per agent-step, {size}")
    print_table(("agents", "all", "of it reference", "of it exchange", "peak memory MB"), rows)
    return runs


def write_csv(path: Path, args: Args, tables: dict[str, dict[str, list[dict]]]) -> None:
    """One row per run; comments on top give commands, versions and the number of cores."""
    rows = []
    for table, contender_runs in tables.items():
        baseline = next(iter(contender_runs.values()))
        for name, runs in contender_runs.items():
            for run, other in zip(runs, baseline, strict=True):
                row = describe_run(args, table, name, run)
                if table != "scaling":
                    ratio = run["speed"] / other["speed"]
                    row[f"ratio_to_{name_yardstick(args)}"] = f"{ratio:.3f}"
                for phase, microseconds in measure_phases(run).items():
                    row[f"{phase}_us"] = f"{microseconds:.2f}"
                rows.append(row)
    versions = {}
    for contender_runs in tables.values():
        for runs in contender_runs.values():
            versions |= runs[0]["versions"]
    this = Path(__file__).resolve().relative_to(ROOT)
    commands = {name: contenders(settings) for name, settings in comparisons(args).items()}
    commands["scaling"] = scaling_contenders(args)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        file.write(f"# {shlex.join(['python', str(this), *sys.argv[1:]])}\n")
        file.write(f"# {', '.join(f'{name} {version}' for name, version in versions.items())}\n")
        threads = os.environ.get("OMP_NUM_THREADS", "not set")
        day = time.strftime("%Y-%m-%d")
        file.write(f"# {day}, {num_cores()} cores, OMP_NUM_THREADS {threads}\n")
        for table in tables:
            for name, command in commands[table].items():
                file.write(f"# {table}, {name}: python {shlex.join(command)}\n")
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
    print(f"\nwrote {path}")


def name_yardstick(args: Args) -> str:
    """What the speeds are compared with, in the name of a column."""
    if args.llm:
        return "trl"
    if args.text:
        return "generate"
    return "loop" if args.zeroth else "sb3"


def describe_run(args: Args, table: str, name: str, run: dict) -> dict:
    """The columns of a run: what was run, its speed and its memory."""
    if args.llm:
        size = "steps"
        speed = "completions_per_second"
        agents = run["training_reward"]["agents"]
    elif args.text:
        size = "steps"
        speed = "episodes_per_second"
        agents = run["training_success"]["agents"]
    else:
        size = "timesteps_per_agent"
        speed = "agent_steps_per_second"
        agents = run["training_return"]["agents"]
    return {
        "table": table,
        "contender": name,
        "agents": len(agents),
        "seed": run["seed"],
        "env_backend": run.get("env_backend", run["device"]),
        size: run[size],
        "communication_rounds": run.get("communication_rounds", ""),
        speed: f"{run['speed']:.6g}",
        "peak_memory_mb": f"{run['peak_memory_mb']:.1f}",
        "process_seconds": f"{run['process_seconds']:.2f}",
    }


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def prepare_llm_tasks(args: Args) -> None:
    """Write the tasks of language models that are not there yet."""
    for prompt_tokens, *_ in args.llm_sizes:
        folder = task_folder(prompt_tokens)
        if not Path(ROOT, folder, "prompts.jsonl").is_file():
            program = [sys.executable, "benchmark/baselines/trl_grpo.py"]
            flags = ["--prompt-tokens", str(prompt_tokens), "--prepare", folder]
            subprocess.run([*program, *flags], cwd=ROOT, check=True)


def main(args: Args) -> None:
    if not hasattr(os, "wait4"):
        refuse("throughput.py measures memory on Linux and macOS, on Windows in WSL")
    if args.repeats < 0:
        refuse(f"--repeats {args.repeats}: must not be negative")
    if args.scaling and (args.llm or args.text or args.zeroth):
        refuse("--scaling: is of prpo_minigrid.py, prpo_atari.py and prpo_mujoco.py")
    # As Ctrl-C does, it also ends the contender that runs
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    tables = {}
    if args.zeroth and "MiniGrid" in args.env_id:
        args = replace(args, env_id="HalfCheetah-v5")
    if args.llm and args.repeats:
        prepare_llm_tasks(args)
    if args.text and args.repeats:
        # The model of both, if it is not there yet
        subprocess.run([sys.executable, "benchmark/babyai.py"], cwd=ROOT, check=True)
    if args.repeats:
        for name, settings in comparisons(args).items():
            tables[name] = compare(settings)
    if args.scaling:
        tables["scaling"] = scale(args)
    print(f"{num_cores()} cores")
    if args.csv:
        write_csv(Path(args.csv), args, tables)


if __name__ == "__main__":
    main(read_flags(Args))
