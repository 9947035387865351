"""Speed and memory of whole training runs, side by side: our scripts against stable-baselines3, sb3-contrib and TRL.

    python benchmark/throughput.py  # the comparison, and where the time goes
    python benchmark/throughput.py --env-id BeamRiderNoFrameskip-v4 --repeats 3  # the same on Atari
    python benchmark/throughput.py --trpo  # PR-TRPO against sb3-contrib
    python benchmark/throughput.py --llm --repeats 3  # language models against TRL
    python benchmark/throughput.py --scaling  # and the cost per agent as agents are added
    python benchmark/throughput.py --csv benchmark/results/throughput.csv

Every run is a process of its own; the contenders take turns, so that a slow minute of the machine hits them all.
Agent-steps/s are all agents' environment steps over the training time, start-up and evaluation excluded, completions/s
all agents' completions. The rollout of stable-baselines3 is what the others call environments, rollout_forward and
advantages. Peak memory is that of the largest process.
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

import tyro  # and nothing heavy: on Linux a child's peak memory starts at what its parent held

ROOT = Path(__file__).resolve().parent.parent
SB3, CONTRIB, TRL = "stable-baselines3", "sb3-contrib's TRPO", "TRL's GRPOTrainer"


@dataclass
class Args:
    repeats: int = 5
    """runs of every contender; the table shows medians (0: leave the comparison out)"""
    timesteps: int = 0
    """environment steps per agent of a compared run (0: MiniGrid 65,536, Atari 32,768)"""
    local_updates: int = 2
    """iterations between communication rounds, of which even a short run needs many: before the first, C is I"""
    env_id: str = "MiniGrid-FourRooms-v0"
    """the task, of MiniGrid or Atari"""
    trpo: bool = False
    """PR-TRPO instead, against sb3-contrib's TRPO"""
    llm: bool = False
    """language models instead: completions per second against TRL, prompts of equal length, full completions"""
    llm_sizes: tuple[tuple[int, int, int], ...] = ((300, 58, 8), (64, 128, 8))
    """tokens of a prompt, tokens of a completion and completions per prompt: a table for each such triple"""
    total_steps: int = 3
    """steps of a compared run of language models, with four prompts per agent each"""
    sb3_threads: int = 0
    """threads of stable-baselines3 (0: torch's own choice); a row with one thread is always there"""
    scaling: bool = False
    """also measure how the cost per agent-step grows with the number of agents"""
    scaling_agents: tuple[int, ...] = (1, 3, 8, 16, 32)
    """numbers of agents"""
    scaling_timesteps: int = 6_144
    """environment steps per agent of a scaling run, in iterations of 2,048"""
    csv: str = ""
    """also write every single run into this file"""


def measure(command: list[str]) -> dict:
    """Run `command` alone, in a temporary folder. Returns its summary.json with `peak_memory_mb`, `process_seconds`."""
    with tempfile.TemporaryDirectory() as folder:
        with open(Path(folder, "log"), "w+") as log:
            arguments = [sys.executable, *command, "--run-dir", folder]
            started = time.perf_counter()
            process = subprocess.Popen(arguments, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
            try:
                _, status, usage = os.wait4(process.pid, 0)  # of this child alone, unlike RUSAGE_CHILDREN
            except BaseException:
                process.kill()
                process.wait()
                raise
            seconds = time.perf_counter() - started
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode:
                log.seek(0)
                sys.exit(f"{shlex.join(command)} failed:\n{log.read()[-2000:]}")
        summary = json.loads(next(Path(folder).glob("*/summary.json")).read_text())
    peak_bytes = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    speed = summary["completions_per_second" if "completions_per_second" in summary else "agent_steps_per_second"]
    return summary | {"speed": speed, "peak_memory_mb": peak_bytes / 2**20, "process_seconds": seconds}


def is_atari(env_id: str) -> bool:
    """Whether a task is a game of the Atari 2600."""
    return env_id.endswith("NoFrameskip-v4")


def script(env_id: str) -> str:
    """The script that trains on a task."""
    return "prpo_atari.py" if is_atari(env_id) else "prpo_minigrid.py"


def task_folder(prompt_tokens: int) -> str:
    """Where `trl_grpo.py --prepare` writes the task of language models, once."""
    return f"runs/llm-task-{prompt_tokens}"


def llm_contenders(args: Args) -> dict[str, list[str]]:
    """What is compared with TRL at the first of the sizes: name -> command."""
    prompt_tokens, *completions = args.llm_sizes[0]
    response_length, group_size = map(str, completions)
    task, size = task_folder(prompt_tokens), ["--response-length", response_length, "--group-size", group_size]
    size += ["--total-steps", str(args.total_steps)]
    trl = ["benchmark/baselines/trl_grpo.py", "--task", task, "--micro-batch-size", group_size, *size]
    prpo = ["prpo_llm.py", "--base-model", task, "--dataset", f"{task}/prompts.jsonl", "--eval-prompts", "0", *size]
    return {
        TRL + ", completions scored only": [*trl, "--completions-only"],
        TRL: trl,
        "1 agent": [*prpo, "--num-agents", "1"],
        "3 agents isolated": [*prpo, "--num-agents", "3", "--aggregation", "none"],
        "3 agents dense": [*prpo, "--num-agents", "3", "--communicator", "uniform", "--local-updates", "1"],
    }


def trpo_contenders(args: Args) -> dict[str, list[str]]:
    """What is compared with sb3-contrib: name -> command."""
    timesteps = str(args.timesteps or 32_768)
    common = ["--env-id", args.env_id, "--total-timesteps", timesteps, "--eval-episodes", "0"]
    prtrpo, contrib = ["prtrpo_minigrid.py", *common], ["benchmark/baselines/sb3_trpo.py", *common]
    rounds = ["--local-updates", "1"]  # its default, so that all updates but the first have a reference of others
    return {
        CONTRIB: [*contrib, "--threads", str(args.sb3_threads)],
        CONTRIB + ", 1 thread": [*contrib, "--threads", "1"],
        "1 agent": [*prtrpo, "--num-agents", "1", "--communicator", "identity"],
        "3 agents isolated": [*prtrpo, "--num-agents", "3", "--communicator", "identity"],
        "3 agents dense": [*prtrpo, "--num-agents", "3", "--communicator", "uniform", *rounds],
    }


def comparisons(args: Args) -> dict[str, Args]:
    """The tables to be made: name -> arguments, of one size."""
    sizes = args.llm_sizes if args.llm else args.llm_sizes[:1]
    names = ["comparison", *("comparison, {} + {} tokens, groups of {}".format(*size) for size in sizes[1:])]
    return {name: replace(args, llm_sizes=(size,)) for name, size in zip(names, sizes, strict=True)}


def contenders(args: Args) -> dict[str, list[str]]:
    """What is compared, the baseline first: name -> command."""
    if args.llm:
        return llm_contenders(args)
    if args.trpo:
        return trpo_contenders(args)
    timesteps = args.timesteps or (32_768 if is_atari(args.env_id) else 65_536)
    common = ["--env-id", args.env_id, "--total-timesteps", str(timesteps), "--eval-episodes", "0"]
    prpo, sb3 = [script(args.env_id), *common], ["benchmark/baselines/sb3_ppo.py", *common]
    rounds = ["--local-updates", str(args.local_updates)]
    dense = [*prpo, "--num-agents", "3", "--communicator", "uniform", *rounds]
    alone = [*prpo, "--num-agents", "1", "--communicator", "identity"]
    baselines = {
        SB3: [*sb3, "--threads", str(args.sb3_threads)],
        SB3 + ", 1 thread": [*sb3, "--threads", "1"],
    }
    if is_atari(args.env_id):
        three, bfloat16 = [*prpo, "--num-agents", "3"], ["--precision", "bfloat16"]
        reward = [*three, "--communicator", "reward", *rounds]
        return baselines | {
            "1 agent, bfloat16": [*alone, *bfloat16],
            "3 agents isolated, bfloat16": [*three, "--communicator", "identity", *bfloat16],
            "3 agents reward, bfloat16": [*reward, *bfloat16],
            "3 agents reward, float32": [*reward, "--precision", "float32"],
        }
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "3"]
    return baselines | {
        "1 agent, float32": [*alone, "--precision", "float32"],
        "3 agents dense, float32, gymnasium": [*dense, "--precision", "float32", "--env-backend", "gymnasium"],
        "3 agents dense, float32": [*dense, "--precision", "float32"],
        "3 agents dense, float32, 3 processes": [*torchrun, *dense, "--precision", "float32"],
        "3 agents dense, bfloat16": [*dense, "--precision", "bfloat16"],
    }


def scaling_contenders(args: Args) -> dict[str, list[str]]:
    """One agent, then dense and ring communicators of more and more agents: name -> command."""
    common = ["--env-id", args.env_id, "--total-timesteps", str(args.scaling_timesteps), "--eval-episodes", "0"]
    # A round after every iteration, 32 times as often as by default, so that the exchange cannot hide
    commands = {}
    for num_agents in args.scaling_agents:
        for name, topology in (("dense", "full"), ("ring", "ring")):
            command = [script(args.env_id), *common, "--num-agents", str(num_agents), "--communicator", "uniform"]
            commands[f"{num_agents} {name}"] = [*command, "--topology", topology, "--local-updates", "1"]
    return commands


def phases_us(run: dict) -> dict[str, float]:
    """Where the time of `run` goes: phase -> microseconds per agent-step, or completion; the rest is `other`."""
    work = run["speed"] * run["train_seconds"]
    other = run["train_seconds"] - sum(run["seconds"].values())
    return {phase: 1e6 * seconds / work for phase, seconds in {**run["seconds"], "other": other}.items()}


def median_phases(runs: list[dict]) -> dict[str, float]:
    """The median over `runs` of every phase, in microseconds."""
    each = [phases_us(run) for run in runs]
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
    commands, unit = contenders(args), "completion" if args.llm else "agent-step"
    runs = {name: [] for name in commands}
    for repeat in range(args.repeats):
        for name in list(commands)[:: 1 if repeat % 2 == 0 else -1]:
            runs[name].append(measure([*commands[name], "--seed", str(repeat + 1)]))
            speed = f"{runs[name][-1]['speed']:,.{args.llm * 2}f} {unit}s/s"
            print(f"repeat {repeat + 1}/{args.repeats}  {name}: {speed}", file=sys.stderr, flush=True)

    rows = []
    for name, own in runs.items():
        ratios = ratios_to_baseline(own, next(iter(runs.values())))
        rows.append(
            (
                name,
                own[0].get("env_backend", own[0]["device"]),
                f"{median(run['speed'] for run in own):,.{args.llm * 2}f}",
                f"{median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
                f"{median(run['peak_memory_mb'] for run in own):,.0f}",
                f"{median(run['process_seconds'] for run in own):.1f}",
            )
        )
    first = next(iter(runs.values()))[0]
    if args.llm:
        task = "{} + {} tokens, groups of {}, {} steps".format(*args.llm_sizes[0], args.total_steps)
    else:
        task = f"{args.env_id}, {first['timesteps_per_agent']:,} timesteps"
    print(f"\n{task} per agent, medians of {args.repeats} (ratios: least-most)")
    print_table(
        ("", "device" if args.llm else "environments", f"{unit}s/s", "ratio", "peak memory MB", "whole process s"), rows
    )

    phases = {name: median_phases(own) for name, own in runs.items()}
    names = list(dict.fromkeys(phase for own in phases.values() for phase in own))
    rows = []
    for phase in names:
        shares = [(own[phase], own[phase] / sum(own.values())) if phase in own else () for own in phases.values()]
        rows.append((phase, *("{:,.1f} {:4.0%}".format(*share) if share else "" for share in shares)))
    rows.append(("sum", *(f"{sum(own.values()):,.1f} 100%" for own in phases.values())))
    print(f"\nwhere the time goes: microseconds per {unit}, and share")
    print_table(("", *phases), rows)
    return runs


def ratios_to_baseline(runs: list[dict], baseline: list[dict]) -> list[float]:
    """Speed against the baseline's run of the same repeat."""
    pairs = zip(runs, baseline, strict=True)
    return [run["speed"] / other["speed"] for run, other in pairs]


def scale(args: Args) -> dict[str, list[dict]]:
    """Run and print the cost per agent-step for more and more agents. Returns name -> runs."""
    runs = {}
    for name, command in scaling_contenders(args).items():
        runs[name] = [measure(command)]
        speed = f"{runs[name][0]['speed']:,.0f} agent-steps/s"
        print(f"scaling  {name}: {speed}", file=sys.stderr, flush=True)
    rows = []
    for name, (run,) in runs.items():
        phases = phases_us(run)
        shown = (sum(phases.values()), phases.get("reference", 0.0), phases.get("exchange", 0.0))
        rows.append((name, *(f"{value:.1f}" for value in shown), f"{run['peak_memory_mb']:,.0f}"))
    print(
        f"\ncost of more agents: microseconds per agent-step, {args.scaling_timesteps:,} steps, a round per iteration"
    )
    print_table(("agents", "all", "of it reference", "of it exchange", "peak memory MB"), rows)
    return runs


def write_csv(path: Path, args: Args, tables: dict[str, dict[str, list[dict]]]) -> None:
    """One row per run; comments on top tell what was run, with which versions and on how many cores."""
    rows = []
    for table, contender_runs in tables.items():
        for name, runs in contender_runs.items():
            for repeat, run in enumerate(runs):
                size, speed = ("steps", "completions") if args.llm else ("timesteps_per_agent", "agent_steps")
                reached = run["training_reward" if args.llm else "training_return"]
                rows.append(
                    {
                        "table": table,
                        "contender": name,
                        "agents": len(reached["agents"]),
                        "seed": run["seed"],
                        "env_backend": run.get("env_backend", run["device"]),
                        size: run[size],
                        "communication_rounds": run.get("communication_rounds", ""),
                        f"{speed}_per_second": f"{run['speed']:.6g}",
                        "peak_memory_mb": f"{run['peak_memory_mb']:.1f}",
                        "process_seconds": f"{run['process_seconds']:.2f}",
                    }
                )
                if table != "scaling":
                    baseline = next(iter(contender_runs.values()))
                    ratio = ratios_to_baseline([run], [baseline[repeat]])[0]
                    rows[-1][f"ratio_to_{'trl' if args.llm else 'sb3'}"] = f"{ratio:.3f}"
                rows[-1] |= {f"{phase}_us": f"{value:.2f}" for phase, value in phases_us(run).items()}
    versions = {}
    for runs in tables.values():
        for own in runs.values():
            versions |= own[0]["versions"]
    this = Path(__file__).resolve().relative_to(ROOT)
    commands = {name: contenders(own) for name, own in comparisons(args).items()}
    commands["scaling"] = scaling_contenders(args)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        file.write(f"# {shlex.join(['python', str(this), *sys.argv[1:]])}\n")
        file.write(f"# {', '.join(f'{name} {version}' for name, version in versions.items())}\n")
        threads = os.environ.get("OMP_NUM_THREADS", "not set")
        file.write(f"# {time.strftime('%Y-%m-%d')}, {num_cores()} cores, OMP_NUM_THREADS {threads}\n")
        for table in tables:
            for name, command in commands[table].items():
                file.write(f"# {table}, {name}: python {shlex.join(command)}\n")
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
    print(f"\nwrote {path}")


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main(args: Args) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C does, it ends the contender that runs too
    tables = {}
    for tokens in {size[0] for size in args.llm_sizes} if args.llm and args.repeats else ():
        if not Path(ROOT, folder := task_folder(tokens), "prompts.jsonl").is_file():
            program = [sys.executable, "benchmark/baselines/trl_grpo.py", "--prompt-tokens", str(tokens)]
            subprocess.run([*program, "--prepare", folder], cwd=ROOT, check=True)
    if args.repeats:
        tables = {name: compare(own) for name, own in comparisons(args).items()}
    if args.scaling:
        tables["scaling"] = scale(args)
    print(f"{num_cores()} cores")
    if args.csv:
        write_csv(Path(args.csv), args, tables)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
