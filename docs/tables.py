"""Writes the tables of flags in these pages: `python docs/tables.py`, after a change of a flag.

A table stands between <!-- table flags SCRIPT --> and <!-- end -->. `SCRIPT; FAMILY` leaves out the
flags that FAMILY's script has in the same way; what every script has is left out everywhere.
"""

import dataclasses
import importlib
import re
import sys
import typing
from pathlib import Path

from tyro._docstrings import get_field_docstring

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted(Path(__file__).parent.rglob("*.md"))]
HELD = ("communicator_matrix", "reward_matrix")  # what a flag's file held: no flags


def list_flags(script: str) -> dict[str, str]:
    """The flags of a script with their rows; of communicators.py those that every script has."""
    module = importlib.import_module(script)
    Args = module.RunArgs if script == "communicators" else module.Args
    hints = typing.get_type_hints(Args)
    rows = {}
    for field in dataclasses.fields(Args):
        if field.name in HELD:
            continue
        default = field.default
        if isinstance(default, tuple):
            default = " ".join(map(str, default))
        shown = [] if default in ("", None) else [f"`{default}`"]
        hint = hints[field.name]
        for literal in (hint, *typing.get_args(hint)):  # also of `Literal[...] | None`
            if typing.get_origin(literal) is typing.Literal:
                choices = typing.get_args(literal)
                others = [f"`{choice}`" for choice in choices if choice != default]
                shown.append(f"({', '.join(others)})")
        text = " ".join(get_field_docstring(Args, field.name, ()).split())
        text = text.replace("|", "\\|").replace("<", "&lt;")
        cells = [f"`--{field.name.replace('_', '-')}`", " ".join(shown), text]
        rows[field.name] = f"| {' | '.join(cells)} |".replace("|  |", "| |")
    return rows


def render(page: str) -> str:
    """The page with its tables written anew."""

    def write_table(match: re.Match) -> str:
        script, _, family = match[1].partition("; ")
        rows = list_flags(script)
        if script != "communicators":
            common = list_flags(family or "communicators")
            rows = {name: row for name, row in rows.items() if row != common.get(name)}
        lines = ["| flag | default (or) | meaning |", "| --- | --- | --- |", *rows.values()]
        return "\n".join([f"<!-- table flags {match[1]} -->", *lines, "<!-- end -->"])

    return re.sub(r"<!-- table flags (.*?) -->\n.*?<!-- end -->", write_table, page, flags=re.S)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for path in PAGES:
        path.write_text(render(path.read_text()))
