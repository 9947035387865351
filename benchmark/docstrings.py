"""Collects the docstrings of installed libraries as a data set: a body is to be summarised in its own first line.

    python benchmark/docstrings.py --out runs/docstrings.jsonl
    python benchmark/docstrings.py --topics scipy datasets --out runs/others.jsonl

A row of the JSONL file has `prompt` and `completion`, lists of one message as TRL reads them, and `topic`, the library.
What is too short is left out, and every body stands there once, in an order that the installed versions determine.
`prpo_llm.py --dataset docstrings` makes the file of the default libraries itself, in the cache folder.
"""

import ast
import contextlib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TOPICS = ("torch", "sympy", "transformers", "stdlib", "networkx", "numpy", "matplotlib", "pandas")


@dataclass
class Args:
    out: str
    """the JSONL file to write"""
    topics: tuple[str, ...] = TOPICS
    """installed packages, or stdlib, Python's own library"""


def collect(topics: tuple[str, ...]) -> list[dict]:
    """Every docstring of these libraries with a first line of 20 to 200 characters and a body of 200 or more."""
    pairs = {}
    for topic, node in ((own, node) for own in topics for node in syntax(own)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            first, _, body = (ast.get_docstring(node) or "").partition("\n\n")
            first = " ".join(first.split())
            if 20 <= len(first) <= 200 and len(body) >= 200:
                request = f"Summarise this documentation of {topic} in one short sentence.\n\n{body.strip()}"
                prompt, completion = {"role": "user", "content": request}, {"role": "assistant", "content": first}
                pairs.setdefault(request, {"prompt": [prompt], "completion": [completion], "topic": topic})
    return list(pairs.values())


def folder_of(topic: str) -> Path | None:
    """Where the source of a library is, None where it is not installed; nothing is imported."""
    if topic == "stdlib":
        return Path(sysconfig.get_path("stdlib"))
    spec = importlib.util.find_spec(topic) if topic.isidentifier() else None
    return Path(spec.origin).parent if spec and spec.origin and spec.submodule_search_locations else None


def syntax(topic: str) -> Iterator[ast.AST]:
    """What the files of a library consist of, in a fixed order; one that is not installed has none."""
    folder = folder_of(topic)
    for path in sorted(folder.rglob("*.py")) if folder else ():
        if topic != "stdlib" or "packages" not in str(path.relative_to(folder)):
            with contextlib.suppress(SyntaxError, ValueError):
                yield from ast.walk(ast.parse(path.read_bytes()))


def write(path: Path, rows: list[dict]) -> None:
    """One row per line. The file is there as a whole or not at all, also when several processes write it at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    own = path.with_name(f"{path.name}.{os.getpid()}")
    own.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    own.replace(path)


def cached() -> str:
    """The file of the default libraries, collected once for their versions, this Python and this tool."""
    there = [importlib.metadata.version(own) for own in TOPICS if own != "stdlib" and folder_of(own)]
    source = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]
    name = "_".join(["docstrings", source, sys.version.split()[0], *there])
    path = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "prpo", f"{name}.jsonl")
    if not path.is_file():
        print(f"collecting docstrings, which takes a minute or two, once: {path.name}", flush=True)
        write(path, collect(TOPICS))
    return str(path)


def main(args: Args) -> None:
    for topic in args.topics:
        if not folder_of(topic):
            sys.exit(f"--topics {' '.join(args.topics)}: the package {topic} is not installed")
    rows = collect(args.topics)
    if not rows:
        sys.exit(f"--topics {' '.join(args.topics)}: no docstring there is long enough")
    try:
        write(Path(args.out), rows)
    except OSError as error:
        sys.exit(f"--out {args.out}: cannot be written: {error}")
    counts = {topic: sum(row["topic"] == topic for row in rows) for topic in args.topics}
    print(f"{args.out}: {', '.join(f'{count:,} of {topic}' for topic, count in counts.items())}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main(importlib.import_module("communicators").read_flags(Args))
