"""A run that is killed, runs out of disk space and loses its permissions again and again must
become the run that nothing interrupted.

    python benchmark/soak.py  # MiniGrid: 20 kills, 5 full disks, 5 read-only folders; minutes
    python benchmark/soak.py --script prpo_llm fedavg_ppo  # others: see SCRIPTS
    python benchmark/soak.py --processes 3  # torchrun: single ranks are killed, which it restarts

First three agents train undisturbed. Then the same run is disturbed at random moments, in which it
may be training, writing a checkpoint or reading one: a kill -9 of the whole run; a full disk, where
no file can grow any more; or a folder that cannot be written to. It goes on with --resume. At its
end all parameters must be the same bytes, and metrics.csv must have the same rows but for the
clock. Where a run ends by itself, it must end with one line.

A disk is full because the size of files is limited; with --fill-disk because the file system of
--out is filled, which should be a small one of its own, such as a tmpfs of 1 GB. Root may write
anywhere, so that as root the runs lose this capability (setpriv of util-linux).
"""

import contextlib
import csv
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from arguments import read_flags, refuse
from safetensors import safe_open
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parent.parent
CONTROL = "--num-envs 2 --local-updates 3 --eval-episodes 2 --communicator softmax-reward"
CONTROL += " --save-every 2"
PPO = f"{CONTROL} --update-epochs 2 --num-minibatches 2"
ROOMS = "--env-id MiniGrid-Empty-Random-5x5-v0 --num-steps 64"
MINIGRID = f"{PPO} {ROOMS} --learning-rate 1e-3"
DISTRAL = MINIGRID.replace("--communicator softmax-reward ", "")  # it refuses any
TRPO = f"{CONTROL} {ROOMS}"
ATARI = f"{PPO} --env-id BreakoutNoFrameskip-v4 --num-steps 96 --learning-rate 1e-4"
ATARI += " --precision float32"
MUJOCO = f"{PPO} --env-id Hopper-v5 --num-steps 64 --learning-rate 1e-3"
# OUT/skills and OUT/babyai are made first
LLM = "--base-model {out}/skills/model --dataset {out}/skills/train.jsonl --partition topic"
LLM += " --reward benchmark/skills.py:exact --precision float32 --response-length 8 --batch-size 4"
LLM += " --micro-batch-size 4 --prompts-per-agent 40 --eval-prompts 4 --save-every 2"
LLM += " --local-updates 2 --lora-rank 2 --learning-rate 1e-3 --missing-eos-penalty 0"
BABYAI = "--base-model {out}/babyai/model --categories GoToObj GoToLocal --batch-size 2"
BABYAI += " --group-size 2 --max-turns 3 --tasks 36 --tasks-per-agent 5 --eval-episodes 1"
BABYAI += " --response-length 4 --lora-rank 2 --save-every 2 --local-updates 2"
S2ZPO = "--env-id CartPole-v1 --num-pairs 2 --save-every 2 --eval-episodes 2"
# Script -> its flags, the flag of its length, and how much of it one iteration is
SCRIPTS = {
    "prpo_minigrid": (MINIGRID, "--total-timesteps", 128),
    "fedavg_ppo": (MINIGRID, "--total-timesteps", 128),
    "distral_minigrid": (DISTRAL, "--total-timesteps", 128),
    "prtrpo_minigrid": (TRPO, "--total-timesteps", 128),
    "prpo_atari": (ATARI, "--total-timesteps", 192),
    "fedavg_atari": (ATARI, "--total-timesteps", 192),
    "prpo_mujoco": (MUJOCO, "--total-timesteps", 128),
    "fedavg_mujoco": (MUJOCO, "--total-timesteps", 128),
    "prpo_llm": (LLM, "--total-steps", 1),
    "prpo_babyai": (BABYAI, "--total-steps", 1),
    "s2zpo_mujoco": (S2ZPO, "--total-iterations", 1),
}
TASKS = {  # what makes the model of a script
    "prpo_llm": "benchmark/skills.py --steps 20 --prompts 50 --out {out}/skills",
    "prpo_babyai": "benchmark/babyai.py --steps 20 --episodes 2 --probe 1 --out {out}/babyai",
}
# Ends of the columns that differ between equal runs
CLOCKS = ("_per_second", "seconds", "peak_memory")


@dataclass
class Args:
    script: tuple[str, ...] = ("prpo_minigrid",)
    """scripts to try, one after the other"""
    kills: int = 20
    """how often each run is killed, kill -9"""
    full_disks: int = 5
    """how often no file can grow any more; not with --processes 3"""
    read_only: int = 5
    """how often the run's folder cannot be written to; not with --processes 3"""
    processes: Literal[1, 3] = 1
    """1: all three agents in one process; 3: torchrun, with a rank for each"""
    fill_disk: bool = False
    """fill the file system of --out, a small one of its own, instead of limiting files"""
    out: str = "runs/soak"
    """folder for the runs"""
    seed: int = 1
    """seed of the moments of the faults"""


def make_command(args: Args, script: str, run_dir: Path, iterations: int) -> list[str]:
    """The command that starts a run of so many iterations."""
    flags, length, size = SCRIPTS[script]
    command = [sys.executable]
    if args.processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--max-restarts", "1000"]
        command += ["--nproc-per-node", str(args.processes)]
    command += [str(ROOT / f"{script}.py"), *flags.format(out=args.out).split()]
    command += [length, str(size * iterations), "--num-agents", "3", "--device", "cpu"]
    return [*command, "--run-dir", str(run_dir)]


def make_resume(args: Args, script: str, folder: Path) -> list[str]:
    """The command that goes on with a run; code that it executes is named again."""
    command = [sys.executable, str(ROOT / f"{script}.py"), "--resume", str(folder)]
    if script == "prpo_llm":
        command += ["--reward", "benchmark/skills.py:exact"]
    return command


def collect(stream: IO[bytes], lines: list[bytes]) -> None:
    """Add the lines of a stream to the list, until it ends."""
    for line in stream:
        lines.append(line)


class Child:
    """A run in a process group of its own; its output is kept in memory, for its disk is full."""

    def __init__(self, command: list[str]):
        if os.geteuid() == 0:
            command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, start_new_session=True, stdout=pipe, stderr=pipe
        )
        self.times_opened = 0  # how often its ranks had begun, when one was killed
        self.output = [[], []]  # lines of stdout and stderr
        self.readers = []
        streams = (self.process.stdout, self.process.stderr)
        for stream, lines in zip(streams, self.output, strict=True):
            reader = threading.Thread(target=collect, args=(stream, lines), daemon=True)
            reader.start()
            self.readers.append(reader)

    def text(self, stream: int) -> str:
        """What was written to stdout (0) or stderr (1) so far."""
        return b"".join(self.output[stream]).decode(errors="replace")

    def count_starts(self) -> int:
        """How often the run has begun or gone on; torchrun starts it again."""
        return self.text(0).count("3 agents on")

    def wait(self) -> int:
        """Wait for its end. Returns the exit code."""
        code = self.process.wait()
        for reader in self.readers:
            reader.join()
        return code

    def kill(self) -> None:
        """kill -9 of all its processes."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.wait()

    def ranks(self) -> set[int]:
        """The processes that torchrun has started."""
        with contextlib.suppress(OSError):  # it has ended
            path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
            return set(map(int, path.read_text().split()))
        return set()


def newest_checkpoint(folder: Path | None) -> int:
    """The iteration of the newest checkpoint of the last agent; 0 if there is none."""
    names = [path.stem for path in folder.glob("checkpoints/agent_2/*.pt")] if folder else []
    return max(map(int, names), default=0)


def find_folder(run_dir: Path) -> Path | None:
    """The folder of the one run in `run_dir`, if it has one yet."""
    folders = [path for path in run_dir.glob("*") if (path / "config.json").is_file()]
    return folders[0] if folders else None


def wait_for_moment(child: Child, run_dir: Path, rng: random.Random, seconds: float) -> None:
    """Wait until the run has written up to two checkpoints, and then for at most `seconds`."""
    first = newest_checkpoint(find_folder(run_dir))
    more = rng.choice((0, 1, 1, 2))
    while child.process.poll() is None:
        opened = child.count_starts() > child.times_opened
        saved = newest_checkpoint(find_folder(run_dir)) - first
        if opened and saved >= 2 * more:
            break
        time.sleep(0.01)
    time.sleep(rng.uniform(0, seconds))


@contextlib.contextmanager
def full_disk(args: Args, child: Child):
    """No file of this process can grow."""
    ballast = Path(args.out, "ballast")
    if not args.fill_disk:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(child.process.pid, resource.RLIMIT_FSIZE, (0, 0))
        yield
        return
    with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
        for size in (2**20, 2**12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
    try:
        yield
    finally:
        ballast.unlink()


@contextlib.contextmanager
def read_only(folder: Path):
    """No file can be made, replaced or removed in the folder of a run."""
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    modes = [path.stat().st_mode for path in folders]
    for path in folders:
        path.chmod(0o555)
    try:
        yield
    finally:
        for path, mode in zip(folders, modes, strict=True):
            path.chmod(mode)


def disturb(args: Args, fault: str, child: Child, folder: Path, rng: random.Random) -> None:
    """Let the fault happen, and wait for the end of the run, which must be that of this fault."""
    if fault == "kill":
        child.kill()
        return
    obstacle = full_disk(args, child) if fault == "full disk" else read_only(folder)
    with obstacle:
        code = child.wait()
    errors = child.text(1).strip().splitlines() or [""]
    words = ("--resume", "Permission denied", "File too large", "No space left")
    if code == 0:
        return  # it was past its last file
    if code != 1 or "Traceback" in child.text(1) or not any(word in errors[-1] for word in words):
        sys.exit(f"after a {fault} the run ended with {code} and\n{child.text(1)}")


def soak(args: Args, script: str, run_dir: Path, iterations: int, seconds: float) -> Counter:
    """The run with all faults. Returns how many there were of each kind."""
    rng = random.Random(f"{script} {args.seed}")
    faults = ["kill"] * args.kills
    if args.processes == 1:
        faults += ["full disk"] * args.full_disks + ["read-only folder"] * args.read_only
    rng.shuffle(faults)
    done = Counter()
    start = make_command(args, script, run_dir, iterations)
    child = Child(start)
    for fault in faults:
        wait_for_moment(child, run_dir, rng, seconds)
        if child.process.poll() is not None:
            break
        folder = find_folder(run_dir)
        if args.processes > 1:
            ranks = child.ranks()
            child.times_opened = child.count_starts()
            with contextlib.suppress(ProcessLookupError, IndexError):  # the run has just ended
                os.kill(rng.choice(sorted(ranks)), signal.SIGKILL)
                done[fault] += 1
                print(f"{script}: {fault} after iteration {newest_checkpoint(folder)}", flush=True)
            continue
        disturb(args, fault, child, folder, rng)
        done[fault] += 1
        print(f"{script}: {fault} after iteration {newest_checkpoint(folder)}", flush=True)
        child = Child(make_resume(args, script, folder))
    code = child.wait()
    if code:
        sys.exit(f"{script}: the last attempt ended with {code} and\n{child.text(1)}")
    return done


def read_safetensors(path: Path) -> tuple[dict[str, str], dict[str, tuple]]:
    """A file's metadata, whose entries may be in any order, and each tensor's shape and bytes."""
    with safe_open(path, "numpy") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    return metadata, {name: (tensor.shape, tensor.tobytes()) for name, tensor in tensors.items()}


def read_results(folder: Path) -> tuple[dict[str, tuple], list[dict]]:
    """All parameters of a run by their file, and the rows of metrics.csv without the clock."""
    weights = {}
    for path in sorted(folder.rglob("*.safetensors")):
        weights[str(path.relative_to(folder))] = read_safetensors(path)
    with open(folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        for name in [name for name in row if name.endswith(CLOCKS)]:
            del row[name]
    return weights, rows


def try_script(args: Args, script: str) -> bool:
    """Compare the disturbed run of a script with the other; print a line. Returns whether both are
    the same.
    """
    number = args.kills
    if args.processes == 1:
        number += args.full_disks + args.read_only
    iterations = 4 * number + 8  # a fault comes at most four iterations after the one before
    whole = Path(args.out, script, "whole")
    disturbed = Path(args.out, script, "disturbed")
    for run_dir in (whole, disturbed):
        shutil.rmtree(run_dir, ignore_errors=True)
        run_dir.mkdir(parents=True)
    if script in TASKS:
        task = TASKS[script].format(out=args.out).split()
        subprocess.run([sys.executable, *task], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    began = time.monotonic()
    child = Child(make_command(args, script, whole, iterations))
    while child.process.poll() is None and "3 agents on" not in child.text(0):
        time.sleep(0.01)
    opened = time.monotonic()
    if child.wait():
        sys.exit(f"{script}: the undisturbed run ended with\n{child.text(1)}")
    ended = time.monotonic()
    per_checkpoint = 2 * (ended - opened) / iterations
    done = soak(args, script, disturbed, iterations, per_checkpoint)
    weights, rows = read_results(find_folder(disturbed))
    expected_weights, expected_rows = read_results(find_folder(whole))
    same = weights == expected_weights and rows == expected_rows and len(rows) > 0
    faults = ", ".join(f"{count} x {fault}" for fault, count in sorted(done.items()))
    minutes = f"{(ended - began) / 60:.1f} min undisturbed"
    minutes += f", {(time.monotonic() - ended) / 60:.1f} min disturbed"
    verdict = "the same run" if same else "ANOTHER run"
    print(f"{script}: {iterations} iterations, {faults}: {verdict} ({minutes})", flush=True)
    if sum(done.values()) < number:
        print(f"{script}: the run ended before the other {number - sum(done.values())} faults")
    return same and sum(done.values()) == number


def main(args: Args) -> None:
    unknown = [script for script in args.script if script not in SCRIPTS]
    if unknown:
        refuse(f"--script {' '.join(unknown)}: choose from {', '.join(SCRIPTS)}")
    args.out = str(Path(args.out).resolve())
    results = [try_script(args, script) for script in args.script]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main(read_flags(Args))
