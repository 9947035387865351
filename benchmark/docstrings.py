"""Collects docstrings of installed libraries as a data set: summarise a body in its first line.

    python benchmark/docstrings.py --out runs/docstrings.jsonl
    python benchmark/docstrings.py --topics scipy datasets --out runs/others.jsonl

A row of the JSONL file has `prompt` and `completion`, lists of one message as TRL reads them, and
`topic`, the library. Short docstrings are left out, and every body of a library is there once, in
an order that the installed versions determine. `prpo_llm.py --dataset docstrings` writes the file
of the default libraries itself, into the cache.
"""

import ast
import atexit
import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
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
    """Every docstring with a first line of 20 to 200 characters and a body of 200 or more."""
    rows = {}  # request -> row
    for topic in topics:
        for node in walk_syntax(topic):
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
                continue
            first, _, body = (ast.get_docstring(node) or "").partition("\n\n")
            first = " ".join(first.split())
            if not 20 <= len(first) <= 200 or len(body) < 200:
                continue
            task = f"Summarise this documentation of {topic} in one short sentence."
            request = f"{task}\n\n{body.strip()}"
            if request not in rows:
                rows[request] = {
                    "prompt": [{"role": "user", "content": request}],
                    "completion": [{"role": "assistant", "content": first}],
                    "topic": topic,
                }
    return list(rows.values())


def find_source(topic: str) -> Path | None:
    """The folder with the source of a library, None if it is not installed; nothing is imported."""
    if topic == "stdlib":
        return Path(sysconfig.get_path("stdlib"))
    spec = importlib.util.find_spec(topic) if topic.isidentifier() else None
    if spec and spec.origin and spec.submodule_search_locations:
        return Path(spec.origin).parent
    return None


def walk_syntax(topic: str) -> Iterator[ast.AST]:
    """The nodes of a library's syntax trees, in a fixed order; none if it is not installed."""
    folder = find_source(topic)
    if folder is None:
        return
    for path in sorted(folder.rglob("*.py")):
        installed = topic == "stdlib" and "packages" in str(path.relative_to(folder))
        if not installed:
            with contextlib.suppress(SyntaxError, ValueError):
                yield from ast.walk(ast.parse(path.read_bytes()))


def write_rows(path: Path, rows: list[dict]) -> None:
    """One row per line. The file appears as a whole, also if several processes write it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    temporary.replace(path)


def cached(get_cached_folder: Callable) -> str:
    """The file of the default libraries, collected once for their versions and this Python.

    get_cached_folder: that of prpo_llm.py, which runs this file.
    """
    versions = {}
    for topic in TOPICS:
        if topic != "stdlib" and find_source(topic):
            versions[topic] = importlib.metadata.version(topic)
    tool = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    key = {"tool": tool, "python": sys.version.split()[0], "versions": versions}
    folder = get_cached_folder("docstrings", key, write_default) or write_temporary()
    return str(folder / "docstrings.jsonl")


def write_default(folder: Path) -> None:
    """Write the docstrings of the default libraries."""
    print("collecting docstrings, which takes a minute or two, once", flush=True)
    write_rows(folder / "docstrings.jsonl", collect(TOPICS))


@functools.cache
def write_temporary() -> Path:
    """A folder with the docstrings of the default libraries that lasts as long as this process."""
    folder = Path(tempfile.mkdtemp(prefix="docstrings."))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_default(folder)
    return folder


def main(args: Args) -> None:
    # Not above: prpo_llm.py runs this file from its own folder
    refuse = importlib.import_module("arguments").refuse
    topics = " ".join(args.topics)
    for topic in args.topics:
        if not find_source(topic):
            refuse(f"--topics {topics}: the package {topic} is not installed")
    rows = collect(args.topics)
    if not rows:
        refuse(f"--topics {topics}: no docstring there is long enough")
    try:
        write_rows(Path(args.out), rows)
    except OSError as error:
        refuse(f"--out {args.out}: cannot be written: {error}")
    counts = []
    for topic in args.topics:
        count = sum(row["topic"] == topic for row in rows)
        counts.append(f"{count:,} of {topic}")
    print(f"{args.out}: {', '.join(counts)}")


if __name__ == "__main__":
    main(importlib.import_module("arguments").read_flags(Args))
