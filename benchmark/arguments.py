"""Arguments of the tools in benchmark/: what is wrong with them is one line, as in the scripts.

Exit code 2 is that of a wrong value. A tool that cannot do what it should (there is no such run, a
command has failed) ends with 1. The scripts' module with the same functions loads torch, which
takes seconds; it is imported here only to describe an error.
"""

import contextlib
import importlib
import io
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


def read_flags(Args: type, argv: list[str] | None = None):
    """The arguments of the command line as tyro reads them; the description of --help is that of
    their module.
    """
    description = sys.modules[Args.__module__].__doc__
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return tyro.cli(Args, args=argv, description=description)
    except SystemExit as end:
        if end.code in (None, 0):  # --help
            raise
    root = str(Path(__file__).resolve().parent.parent)
    if root not in sys.path:
        sys.path.insert(0, root)
    return importlib.import_module("communicators").read_flags(Args, argv)
