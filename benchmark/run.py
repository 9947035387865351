"""Execute a list of commands, one per line: several at a time, or as job arrays of Slurm; go on
where it was cut off.

    bash benchmark/minigrid.sh quick | python benchmark/run.py
    python benchmark/run.py commands.txt --jobs 2  # skips finished runs, resumes interrupted ones
    python benchmark/run.py commands.txt --dry-run
    python benchmark/run.py commands.txt --slurm --jobs 50 --time 8:00:00
    python benchmark/run.py commands.txt --slurm --dry-run  # the job script, to make a template of

A line is a command with its arguments, possibly behind VAR=value; with pipes and the like, sh
executes it. Empty lines and those that begin with # are skipped, repeated ones run once. `python`
is the Python that runs this tool.

What a command prints goes to RUN_DIR/.commands/<hash of the line>.log, RUN_DIR being its --run-dir
or runs. From this log the next call, started in the same folder, reads what became of the command.
One of our scripts names its run's folder there: it has finished if its summary.json has
`completed`, and goes on with --resume if there is a checkpoint. Any other command has finished if
its exit code was 0. Delete the log to have a command executed anew.

Ctrl-C, SIGTERM and the end of the terminal let the runs save a checkpoint; a second one kills them.
"""

import contextlib
import functools
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
from arguments import list_commands, read_flags, refuse

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None

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
# How the output of our scripts begins, alone and as processes of a federation
FOLDER = re.compile(r"(.+__\d+__(?:agents?_[\d-]+__)?\d+): (?:agents? [\d-]+ of )?\d+ agents on ")
ENDED = "# exit code "
FOR_A_SHELL = set("|&;<>()$`*?~")


@dataclass
class Args:
    commands: tyro.conf.Positional[str] = "-"
    """file with one command per line (-: standard input)"""
    # commands at a time (0: as many as there are cores for); with --slurm tasks at a time per
    # array (0: no limit)
    jobs: int = 0
    # cores of each command: OMP_NUM_THREADS and, on Linux if commands fill the machine, the cores
    # that it is pinned to
    cores: int = 1
    # how often a command that failed is tried again, after all others; from its last checkpoint if
    # there is one
    retries: int = 0
    line: int = 0
    """execute only this command of the list, counted from 1, and leave pinning to Slurm (0: all)"""
    dry_run: bool = False
    """print what would be executed or submitted, and do nothing"""
    # submit what is not finished as job arrays, a task per command; a task that is requeued resumes
    # its run
    slurm: bool = False
    array_limit: int = 1000
    """most tasks in one array: Slurm's MaxArraySize - 1; a longer list becomes several arrays"""
    time: str = "24:00:00"
    """time limit of a task of the array, as sbatch has it"""
    output: str = "runs/slurm"
    """folder for the list that is submitted and what the tasks print"""
    # your job script with @ARRAY@ and @COMMAND@, maybe @NAME@, @CORES@, @TIME@, @OUTPUT@ (default:
    # a plain one)
    template: str = ""


def find_script(words: list[str]) -> int | None:
    """The position of the script: the first .py, or behind federate.py the next one that is no
    flag's value.
    """
    script = next((k for k, word in enumerate(words) if word.endswith(".py")), None)
    if script is None or Path(words[script]).name != "federate.py":
        return script
    for index in range(script + 1, len(words)):
        is_value = re.match("--[^=]+$", words[index - 1])
        if re.match(r"[^-].*\.py$", words[index]) and not is_value:
            return index
    return None


def words_that_name_code(words: list[str]) -> list[str]:
    """The flags that --resume does not restore, with their values: rewards and text worlds are code
    of the user.
    """
    kept = []
    keep = False
    for word in words:
        if word.startswith("--"):
            keep = word.startswith("--reward") or word.partition("=")[0] == "--env"
        if keep:
            kept.append(word)
    return kept


class Job:
    """A command of the list; its log, which outlives this program, holds what became of it."""

    def __init__(self, line: str):
        self.line = line
        try:
            if "\0" in line:
                raise ValueError("a command holds no NUL")
            self.words = shlex.split(line)
        except ValueError as error:
            refuse(f"{line}: {error}")
        run_dirs = re.findall(r"\0--run[-_]dir[=\0]([^\0]+)", "\0".join(self.words))
        run_dir = run_dirs[-1] if run_dirs else "runs"
        name = hashlib.sha256(line.encode()).hexdigest()[:16]
        run_dir = os.path.expandvars(os.path.expanduser(run_dir))  # as a shell has it
        self.log = Path(run_dir, ".commands", f"{name}.log")
        self.name = line
        self.tries = 0
        self.elsewhere = False  # another program executes it
        self.shell = bool(set(line) & FOR_A_SHELL)

    def read_log(self) -> list[str]:
        """The lines that the command has printed so far."""
        if not self.log.is_file():
            return []
        return self.log.read_text(errors="replace").splitlines()

    def next_step(self) -> list[str] | None:
        """The words to execute, with --resume for an interrupted run; None where the command has
        finished.
        """
        printed = self.read_log()
        script = find_script(self.words)
        folder = self.find_folder(printed, script)
        if folder is None:
            succeeded = printed and printed[-1].endswith(f"{ENDED}0")
            return None if succeeded else self.words
        self.name = folder.name
        # The run was cut off, its folder deleted, or the summary is damaged
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
            if json.loads((folder / "summary.json").read_text())["completed"]:
                return None
        # A process whose agents have files in the store is refused without --resume
        federated = any(Path(word).name == "federate.py" for word in self.words[:script])
        started = federated and (folder / "config.json").is_file()
        if not started and not any(folder.glob("checkpoints/agent_*/*.pt")):
            return self.words
        arguments = words_that_name_code(self.words[script + 1 :])
        return [*self.words[: script + 1], "--resume", str(folder), *arguments]

    def find_folder(self, printed: list[str], script: int | None) -> Path | None:
        """The folder of the run, None unless the command is the script that printed it.

        A program that starts one of our scripts prints its folder too.
        """
        folders = [match[1] for match in map(FOLDER.match, printed) if match]
        if self.shell or script is None or not folders:
            return None
        folder = Path(folders[0])
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
            started = json.loads((folder / "config.json").read_text())["script"]
            if started != Path(self.words[script]).stem:
                return None
        return folder

    def lock_log(self) -> bool:
        """Open the log; False where another program executes this command now."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # The process holds the file too, and with it the lock, even if this program is killed
        self.file = open(self.log, "a")  # noqa: SIM115
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            pass
        return True

    def start(self, cores: list[int], num_threads: int) -> bool:
        """Start the process, on these cores if any are given. False where it has finished or is
        running already.
        """
        locked = self.lock_log()
        words = self.next_step() if locked else None
        if words is None:
            self.elsewhere = not locked
            state = "finished" if locked else "running elsewhere"
            say(f"{state}: {self.name}")
            self.file.close()
            return False
        if words == self.words:  # anew: no folder that the log names is of use
            self.file.truncate(0)
        print(f"$ {self.line if self.shell else shlex.join(words)}", file=self.file, flush=True)
        self.process = subprocess.Popen(
            self.make_command(words),
            env=make_environment(num_threads),
            preexec_fn=functools.partial(os.sched_setaffinity, 0, cores) if cores else None,
            stdin=subprocess.DEVNULL,
            stdout=self.file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in a terminal reaches this program alone
        )
        self.tries += 1
        self.began = time.monotonic()
        return True

    def make_command(self, words: list[str]) -> list[str]:
        """The words with the program that executes them, and this Python for `python`."""
        if self.shell:  # with a trap sh waits for what it has started
            return ["sh", "-c", f"trap 'exit 143' INT TERM\n{self.line}"]
        programs = (k for k, word in enumerate(words) if not re.match(r"\w+=", word))
        program = next(programs, 0)
        if words[program] == "python":
            words = [*words[:program], sys.executable, *words[program + 1 :]]
        return ["env", *words]

    def stop(self, kill: bool) -> None:
        """Interrupt the process, which interrupts its own children, or all that a shell has
        started; or kill them all.

        Not with SIGTERM, which Slurm and systemd send to every process.
        """
        if kill:
            os.killpg(self.process.pid, signal.SIGKILL)
        elif self.shell:
            os.killpg(self.process.pid, signal.SIGINT)
        else:
            self.process.send_signal(signal.SIGINT)

    def has_ended(self) -> bool:
        """Whether the process has ended; if so, its exit code is noted."""
        if self.process.poll() is None:
            return False
        with contextlib.suppress(OSError):  # a full disk
            print(f"{ENDED}{self.process.returncode}", file=self.file, flush=True)
        with contextlib.suppress(OSError):
            # What the process has left behind would keep the lock
            fcntl.flock(self.file, fcntl.LOCK_UN)
        with contextlib.suppress(OSError):  # again of what could not be written
            self.file.close()
        self.next_step()  # for the name of its folder
        return True


def say(text: str) -> None:
    """Print lines. A reader or a terminal that has gone away decides about no command."""
    try:
        print(text, flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def make_environment(num_threads: int) -> dict[str, str]:
    """The environment of a command; torchrun and the like stand beside this Python."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return os.environ | {"PATH": path, "OMP_NUM_THREADS": str(num_threads)}


def make_slots(args: Args) -> list[list[int]]:
    """For each command that runs at a time the cores it is pinned to, none where that is left to
    others: commands that leave cores free may share the machine with another list.
    """
    can_pin = hasattr(os, "sched_getaffinity")
    cores = sorted(os.sched_getaffinity(0)) if can_pin else list(range(os.cpu_count() or 1))
    if args.cores > len(cores):
        refuse(f"--cores {args.cores}: there are {len(cores)}")
    jobs = args.jobs or len(cores) // args.cores
    if not can_pin or args.line or jobs * args.cores < len(cores):
        return [[] for _ in range(jobs)]
    endless = itertools.cycle(cores)
    return [[next(endless) for _ in range(args.cores)] for _ in range(jobs)]


def execute(args: Args, jobs: list[Job], total: int) -> None:
    """Execute the commands; ends with exit code 1 unless all have finished, 130 if interrupted."""
    free = make_slots(args)
    num_slots = len(free)
    waiting = deque(jobs)
    running = {}  # job -> its slot
    failed = []
    unstarted = []
    seconds = []  # that finished commands took
    signals = []
    answered = 0  # signals that have been passed on

    def note(number: int, frame) -> None:
        if number != signal.SIGHUP or number not in signals:  # the shell and the kernel send it
            signals.append(number)

    signal.signal(signal.SIGINT, note)
    signal.signal(signal.SIGTERM, note)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # by nohup
        signal.signal(signal.SIGHUP, note)
    while running or (waiting and not signals):
        while waiting and free and not signals:
            job = waiting.popleft()
            try:
                started = job.start(free[-1], args.cores)
            except OSError as error:  # such as a --run-dir that cannot be made, or a full disk
                say(f"cannot be started: {job.name} ({error})")
                unstarted.append(job)
                continue
            if started:
                running[job] = free.pop()
        if len(signals) > answered:
            answered = len(signals)
            say(f"stopping ({len(running)} running); once more kills them")
            for job in running:
                job.stop(kill=answered > 1)
        for job in [job for job in running if job.has_ended()]:
            free.append(running.pop(job))
            if job.process.returncode == 0:
                seconds.append(time.monotonic() - job.began)
            elif signals or job.tries <= args.retries:
                waiting.append(job)
            else:
                failed.append(job)
            done = total - len(waiting) - len(running)
            counts = f"[{done}/{total}] {len(running)} running, {len(failed)} failed"
            left = estimate_time_left(seconds, len(waiting), running, num_slots)
            say(f"{counts}, {left}  {job.name}")
        time.sleep(0.05)
    for job in failed:
        last = "\n    ".join(job.read_log()[-6:-1])
        say(f"\nfailed with exit code {job.process.returncode}: {job.line}")
        say(f"    {last}\n    all in {job.log}")
    if signals:
        say("interrupted; give the same command to go on")
        sys.exit(130)
    elsewhere = sum(job.elsewhere for job in jobs)
    if elsewhere:
        say(f"{elsewhere} still running elsewhere")
    if unstarted:
        say(f"{len(unstarted)} could not be started")
    sys.exit(1 if failed or unstarted or elsewhere else 0)


def estimate_time_left(
    seconds: list[float],
    waiting: int,
    running: Iterable[Job],
    num_slots: int,
) -> str:
    """How long the rest takes if every command takes the mean of those that have finished."""
    if not seconds:
        return "--:--:-- left"
    mean = sum(seconds) / len(seconds)
    now = time.monotonic()
    of_running = sum(max(mean - (now - job.began), 0) for job in running)
    left = int((mean * waiting + of_running) / num_slots)
    return f"{left // 3600:02}:{left // 60 % 60:02}:{left % 60:02} left"


def submit(args: Args, lines: list[str]) -> None:
    """Submit the list as job arrays, or print their scripts."""
    template = read(args.template) if args.template else TEMPLATE
    if "@ARRAY@" not in template or "@COMMAND@" not in template:
        refuse(f"--template {args.template}: has to contain @ARRAY@ and @COMMAND@")
    if not args.dry_run and not shutil.which("sbatch"):
        sys.exit("--slurm: there is no sbatch in PATH")
    text = "".join(f"{line}\n" for line in lines)
    # Under a name of its own: tasks that wait in the queue still read the lists submitted before
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = Path(args.output, f"commands-{name}.txt")
    if not args.dry_run:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    tool = str(Path(__file__).resolve())
    words = [sys.executable, tool, str(path), "--cores", str(args.cores)]
    words += ["--retries", str(args.retries)]
    execute_list = shlex.join(words)
    values = {"NAME": "prpo", "CORES": str(args.cores), "TIME": args.time, "OUTPUT": args.output}
    for first in range(0, len(lines), args.array_limit):
        last = min(args.array_limit, len(lines) - first)
        values["ARRAY"] = f"1-{last}%{args.jobs}" if args.jobs else f"1-{last}"
        values["COMMAND"] = f"{execute_list} --line $(({first} + SLURM_ARRAY_TASK_ID))"
        script = template
        for key, value in values.items():
            script = script.replace(f"@{key}@", value)
        if args.dry_run:
            print(script)
            continue
        # Which sbatch, PATH says, as on the command line
        code = subprocess.run(["sbatch"], input=script, text=True).returncode  # nosec B607
        if code:
            rest = f"not submitted: {path} from command {first + 1} on"
            sys.exit(f"sbatch: exit code {code}; {rest}")


def read(path: str) -> str:
    """The text of a file, - being standard input."""
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text()
    except (OSError, ValueError) as error:
        refuse(f"{path}: cannot be read ({error})")


def check_args(args: Args) -> None:
    """Ends with one line that names the flag, its value and what would be valid."""
    for flag, value, least in (
        ("--jobs", args.jobs, 0),
        ("--cores", args.cores, 1),
        ("--array-limit", args.array_limit, 1),
    ):
        if value < least:
            refuse(f"{flag} {value}: must be at least {least}")


def main(args: Args) -> None:
    check_args(args)
    jobs = [Job(line) for line in list_commands(read(args.commands))]
    if not jobs:
        refuse(f"{args.commands}: there is no command in it")
    if args.line:
        if not 0 < args.line <= len(jobs):
            refuse(f"--line {args.line}: there are {len(jobs)} commands")
        jobs = [jobs[args.line - 1]]
    unfinished = [job for job in jobs if job.next_step() is not None]
    finished = len(jobs) - len(unfinished)
    if finished:
        print(f"{finished} of {len(jobs)} have finished before", file=sys.stderr, flush=True)
    if args.slurm:
        submit(args, [job.line for job in unfinished])
    elif args.dry_run:
        for job in unfinished:
            print(job.line if job.shell else shlex.join(job.next_step()))
    elif fcntl is None:
        refuse("run.py executes lists on Linux and macOS, on Windows in WSL; --dry-run prints them")
    else:
        execute(args, unfinished, len(jobs))


if __name__ == "__main__":
    main(read_flags(Args))
