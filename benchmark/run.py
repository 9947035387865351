"""Execute a list of commands, one per line: several at a time, or as job arrays of Slurm; go on where it was cut off.

    bash benchmark/sweep.sh minigrid --quick | python benchmark/run.py
    python benchmark/run.py commands.txt --jobs 2  # once more: finished runs are skipped, interrupted ones resumed
    python benchmark/run.py commands.txt --dry-run
    python benchmark/run.py commands.txt --slurm --jobs 50 --time 8:00:00
    python benchmark/run.py commands.txt --slurm --dry-run  # the job script, to make a template of

A line is a command with its arguments, possibly behind VAR=value; with pipes and the like, sh executes it. Empty lines
and those that begin with # are skipped, repeated ones run once. `python` is the Python that runs this tool.

What a command prints goes to RUN_DIR/.commands/<hash of the line>.log, RUN_DIR being its --run-dir or runs. The log
tells the next call, started in the same folder, what became of the command. One of our scripts names its run's folder
there: it has finished if its summary.json says completed, and goes on with --resume if there is a checkpoint. Any other
command has finished if its exit code was 0. Delete the log to have a command executed anew.

Ctrl-C and SIGTERM let the runs save a checkpoint; a second one kills them.
"""

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import tyro

TEMPLATE = """\
#!/bin/sh
#SBATCH --job-name=@NAME@
#SBATCH --array=@ARRAY@
#SBATCH --cpus-per-task=@CORES@
#SBATCH --time=@TIME@
#SBATCH --output=@OUTPUT@/%A_%a.out
#SBATCH --requeue
exec @COMMAND@
"""
FOLDER = re.compile(r"(.+__\d+__\d+): \d+ agents on ")  # how the output of our scripts begins
ENDED = "# exit code "


@dataclass
class Args:
    commands: tyro.conf.Positional[str] = "-"
    """file with one command per line (-: standard input)"""
    jobs: int = 0
    """commands at a time (0: as many as there are cores for); with --slurm tasks at a time per array (0: no limit)"""
    cores: int = 1
    """cores of each command: OMP_NUM_THREADS and, on Linux, the cores that it is pinned to"""
    retries: int = 0
    """how often a command that failed is tried again, after all others; from its last checkpoint if there is one"""
    line: int = 0
    """execute only this command of the list, counted from 1, and leave pinning to Slurm (0: all)"""
    dry_run: bool = False
    """print what would be executed or submitted, and do nothing"""
    slurm: bool = False
    """submit what is not finished as job arrays, a task per command; a task that is requeued resumes its run"""
    array_limit: int = 1000
    """most tasks in one array: Slurm's MaxArraySize - 1; a longer list becomes several arrays"""
    time: str = "24:00:00"
    """time limit of a task of the array, as sbatch has it"""
    output: str = "runs/slurm"
    """folder for the list that is submitted and what the tasks print"""
    template: str = ""
    """your job script with @ARRAY@ and @COMMAND@, maybe @NAME@, @CORES@, @TIME@, @OUTPUT@ (default: a plain one)"""


class Job:
    """A command of the list; its log, which outlives us, tells what became of it."""

    def __init__(self, line: str):
        try:
            self.line, self.words = line, shlex.split(line)
        except ValueError as error:
            sys.exit(f"{line}: {error}")
        run_dirs = ["runs", *re.findall(r"\0--run[-_]dir[=\0]([^\0]+)", "\0".join(self.words))]
        self.log = Path(run_dirs[-1], ".commands", hashlib.sha256(line.encode()).hexdigest()[:16] + ".log")
        self.name, self.tries, self.shell = line, 0, bool(set(line) & set("|&;<>()$`*?~"))

    def next_step(self) -> list[str] | None:
        """The words to execute, with --resume for an interrupted run; None where the command has finished."""
        printed = self.log.read_text(errors="replace").splitlines() if self.log.is_file() else []
        named = [] if self.shell else [match[1] for match in map(FOLDER.match, printed) if match]
        if not named:
            return None if printed and printed[-1].endswith(f"{ENDED}0") else self.words
        folder = Path(named[0])
        self.name = folder.name
        with contextlib.suppress(OSError, ValueError):  # the run was cut off, or its folder deleted
            if json.loads((folder / "summary.json").read_text())["completed"]:
                return None
        script = next((k for k, word in enumerate(self.words) if word.endswith(".py")), None)
        if script is None or not any(folder.glob("checkpoints/agent_0/*.pt")):
            return self.words
        again, kept = [], False  # what names code has to be given again
        for word in self.words[script + 1 :]:
            kept = word.startswith("--reward") if word.startswith("--") else kept
            again += [word] * kept
        return [*self.words[: script + 1], "--resume", str(folder), *again]

    def start(self, cores: list[int], num_threads: int) -> bool:
        """Start the process, on these cores if any are given. False where it has finished or is running already."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(self.log, "a")  # noqa: SIM115, the process holds it too, and the lock even if we are killed
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            running = False
        except OSError as error:
            running = isinstance(error, BlockingIOError)  # else a file system without locks
        words = None if running else self.next_step()
        if words is None:
            print(f"{'running elsewhere' if running else 'finished'}: {self.name}", flush=True)
            self.file.close()
            return False
        if words == self.words:  # anew: no folder that the log names is of use
            self.file.truncate(0)
        print(f"$ {self.line if self.shell else shlex.join(words)}", file=self.file, flush=True)
        if self.shell:
            words = ["-c", f"trap 'exit 143' INT TERM\n{self.line}"]  # sh waits for what it has started
        program = next((k for k, word in enumerate(words) if not re.match(r"\w+=", word)), 0)
        if words[program] == "python":
            words = [*words[:program], sys.executable, *words[program + 1 :]]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"  # has torchrun
        self.process = subprocess.Popen(
            ["sh" if self.shell else "env", *words],
            env=os.environ | {"PATH": path, "OMP_NUM_THREADS": str(num_threads)},
            preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,
            stdin=subprocess.DEVNULL,
            stdout=self.file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in a terminal reaches us alone
        )
        self.tries, self.began = self.tries + 1, time.monotonic()
        return True

    def stop(self, kill: bool) -> None:
        """Interrupt the process, which tells its own children, or all that a shell has started; or kill them all.

        Not with SIGTERM: Slurm and systemd send that to every process, and a second one would end a run at once.
        """
        if kill or self.shell:
            os.killpg(self.process.pid, signal.SIGKILL if kill else signal.SIGINT)
        else:
            self.process.send_signal(signal.SIGINT)

    def ended(self) -> bool:
        """Whether the process has ended; if so, its exit code is noted."""
        if self.process.poll() is None:
            return False
        print(f"{ENDED}{self.process.returncode}", file=self.file, flush=True)
        with contextlib.suppress(OSError):
            fcntl.flock(self.file, fcntl.LOCK_UN)  # which what the process has left behind would hold on to
        self.file.close()
        self.next_step()  # for the name of its folder
        return True


def slots_of(args: Args) -> list[list[int]]:
    """For each command that runs at a time the cores it is pinned to, none where that is left to others."""
    pin = hasattr(os, "sched_getaffinity")
    cores = sorted(os.sched_getaffinity(0)) if pin else list(range(os.cpu_count() or 1))
    if args.cores > len(cores):
        sys.exit(f"--cores {args.cores}: there are {len(cores)}")
    endless, jobs = itertools.cycle(cores), args.jobs or len(cores) // args.cores
    return [[next(endless) for _ in range(args.cores)] if pin and not args.line else [] for _ in range(jobs)]


def execute(args: Args, jobs: list[Job], total: int) -> None:
    """Execute the commands; ends with exit code 1 if any failed, 130 if interrupted."""
    free, todo, running, failed, seconds, signals, sent = slots_of(args), deque(jobs), {}, [], [], [], 0
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: signals.append(number))
    slots = len(free)
    while running or (todo and not signals):
        while todo and free and not signals:
            job = todo.popleft()
            if job.start(free[-1], args.cores):
                running[job] = free.pop()
        if len(signals) > sent:
            sent = len(signals)
            print(f"stopping ({len(running)} running); once more kills them", flush=True)
            for job in running:
                job.stop(kill=sent > 1)
        for job in [job for job in running if job.ended()]:
            free.append(running.pop(job))
            if job.process.returncode == 0:
                seconds.append(time.monotonic() - job.began)
            else:
                (todo if signals or job.tries <= args.retries else failed).append(job)
            counts = f"[{total - len(todo) - len(running)}/{total}] {len(running)} running, {len(failed)} failed"
            print(f"{counts}, {time_left(seconds, len(todo), running, slots)}  {job.name}", flush=True)
        time.sleep(0.05)
    for job in failed:
        last = "\n    ".join(job.log.read_text(errors="replace").splitlines()[-6:-1])
        print(f"\nfailed with exit code {job.process.returncode}: {job.line}\n    {last}\n    all in {job.log}")
    if signals:
        print("interrupted; give the same command to go on")
    sys.exit(130 if signals else bool(failed))


def time_left(seconds: list[float], waiting: int, running: Iterable[Job], slots: int) -> str:
    """How long the rest takes if every command takes the mean of those that have finished."""
    if not seconds:
        return "--:--:-- left"
    mean, now = sum(seconds) / len(seconds), time.monotonic()
    left = int((mean * waiting + sum(max(mean - (now - job.began), 0) for job in running)) / slots)
    return f"{left // 3600:02}:{left // 60 % 60:02}:{left % 60:02} left"


def submit(args: Args, lines: list[str]) -> None:
    """Submit the list as job arrays, or print their scripts."""
    template = read(args.template) if args.template else TEMPLATE
    if "@ARRAY@" not in template or "@COMMAND@" not in template:
        sys.exit(f"--template {args.template}: has to contain @ARRAY@ and @COMMAND@")
    if not args.dry_run and not shutil.which("sbatch"):
        sys.exit("--slurm: there is no sbatch in PATH")
    text = "".join(f"{line}\n" for line in lines)
    # Under a name of its own: tasks that wait in the queue still read the lists submitted before
    path = Path(args.output, f"commands-{hashlib.sha256(text.encode()).hexdigest()[:16]}.txt")
    if not args.dry_run:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    execute_list = shlex.join([sys.executable, str(Path(__file__).resolve()), str(path), "--cores", str(args.cores)])
    values = {"NAME": "prpo", "CORES": str(args.cores), "TIME": args.time, "OUTPUT": args.output}
    for first in range(0, len(lines), args.array_limit):
        script, last = template, min(args.array_limit, len(lines) - first)
        values["ARRAY"] = f"1-{last}%{args.jobs}" if args.jobs else f"1-{last}"
        values["COMMAND"] = f"{execute_list} --line $(({first} + SLURM_ARRAY_TASK_ID))"
        for name, value in values.items():
            script = script.replace(f"@{name}@", value)
        if args.dry_run:
            print(script)
        elif code := subprocess.run(["sbatch"], input=script, text=True).returncode:
            sys.exit(f"sbatch: exit code {code}; not submitted: {path} from command {first + 1} on")


def read(path: str) -> str:
    """The text of a file, - being standard input."""
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text()
    except (OSError, ValueError) as error:
        sys.exit(f"{path}: cannot be read ({error})")


def main(args: Args) -> None:
    for flag, value, least in (
        ("--jobs", args.jobs, 0),
        ("--cores", args.cores, 1),
        ("--array-limit", args.array_limit, 1),
    ):
        if value < least:
            sys.exit(f"{flag} {value}: must be at least {least}")
    lines = dict.fromkeys(line.strip() for line in read(args.commands).splitlines())
    jobs = [Job(line) for line in lines if line and not line.startswith("#")]
    if not jobs:
        sys.exit(f"{args.commands}: there is no command in it")
    if args.line:
        if not 0 < args.line <= len(jobs):
            sys.exit(f"--line {args.line}: there are {len(jobs)} commands")
        jobs = [jobs[args.line - 1]]
    todo = [job for job in jobs if job.next_step() is not None]
    if len(todo) < len(jobs):
        print(f"{len(jobs) - len(todo)} of {len(jobs)} have finished before", file=sys.stderr, flush=True)
    if args.slurm:
        submit(args, [job.line for job in todo])
    elif args.dry_run:
        for job in todo:
            print(job.line if job.shell else shlex.join(job.next_step()))
    else:
        execute(args, todo, len(jobs))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
