"""Arguments of the tools in benchmark/: what is wrong with them is one line, as in the scripts.

Exit code 2 is that of a wrong value. A tool that cannot do what it should (there is no such run, a
command has failed) ends with 1. The scripts' module with the same functions is not imported,
because it loads torch, which takes seconds.
"""

import csv
import json
import signal
import sys
from pathlib import Path
from typing import NoReturn

import tyro

WRONG_VALUE = 2


def refuse(problem: str) -> NoReturn:
    """End with one line on stderr, which names the flag, its value and what would be valid."""
    print(problem, file=sys.stderr)
    end = SystemExit(problem)
    end.code = WRONG_VALUE
    raise end


class Damaged(SystemExit):
    """A file cannot be read. Ends the tool with this line, which names it, unless it can go on."""


def read_json(path: Path) -> dict:
    """The JSON object in a file; raises Damaged."""
    return parse_object(path, read_text(path))


def append_row(path: Path, row: dict) -> None:
    """Append a row to a CSV file, whose first row has the columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def read_greedy_completions(path: Path) -> list[dict]:
    """The rows of a completions.jsonl without those that were sampled."""
    return [row for row in read_json_lines(path) if "sample" not in row]


def read_json_lines(path: Path) -> list[dict]:
    """The JSON objects in the lines of a file; raises Damaged."""
    # Not by splitlines, which also splits at characters that a text may contain
    lines = read_text(path).split("\n")
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            rows.append(parse_object(f"{path}, line {number}", line))
    return rows


def read_text(path: Path) -> str:
    """The text of a file; raises Damaged."""
    try:
        return Path(path).read_text()
    except (OSError, ValueError) as error:
        raise Damaged(f"{path}: cannot be read ({error})") from error


def list_evaluated_data(settings: dict) -> list[str]:
    """The data whose rows the ids in a run's completions.jsonl number, one file after the other."""
    names = settings.get("eval_dataset") or settings["dataset"]
    if isinstance(names, str):  # in runs before a data set per agent was possible
        return [names]
    return list(names)


def list_commands(text: str) -> list[str]:
    """The commands of a list with one per line: each once, without comments."""
    lines = dict.fromkeys(line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def parse_object(place: Path | str, text: str) -> dict:
    """The JSON object of a text, which stands at this place; raises Damaged."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{place}: is no JSON ({error})") from error
    if not isinstance(content, dict):
        raise Damaged(f"{place}: must be a JSON object")
    return content


def read_speed(summary: dict) -> float:
    """What a run's summary.json says that it made in a second: completions, episodes or steps."""
    units = ("completions", "episodes", "agent_steps")
    unit = next(name for name in units if f"{name}_per_second" in summary)
    return summary[f"{unit}_per_second"]


def is_atari(env_id: str) -> bool:
    """Whether a task is a game of the Atari 2600."""
    return env_id.endswith("NoFrameskip-v4")


def is_minigrid(env_id: str) -> bool:
    """Whether a task is one of MiniGrid."""
    return env_id.startswith(("MiniGrid-", "BabyAI-"))


def end_with_reader() -> None:
    """End without a traceback once a reader, such as head or less, has seen enough."""
    if hasattr(signal, "SIGPIPE"):  # not on Windows
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def read_flags(Args: type, argv: list[str] | None = None):
    """The arguments of the command line as tyro reads them; the description of --help is that of
    their module.
    """
    description = sys.modules[Args.__module__].__doc__
    return tyro.cli(Args, args=argv, description=description)
