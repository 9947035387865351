"""The arguments of a script as its command line reads them."""

import re
from pathlib import Path

import communicators


def options(script):
    """What the script's command line lets a resumed run change, and what it wants to be given
    again.
    """
    text = Path(script.__file__).read_text()
    matches = {
        name: re.search(rf"{name} ?= ?\((.*?)\)", text, re.S) for name in ("may_change", "again")
    }
    return {name: tuple(re.findall(r"\w+", match[1])) for name, match in matches.items() if match}


def parse_args(script, argv=None):
    """The arguments of a script, as its command line reads them."""
    return communicators.parse_args(script.Args, script.check_args, argv, **options(script))
