"""The arguments of a script as its command line reads them."""

import re
from pathlib import Path

import communicators


def may_change(script):
    """What the script's command line lets a resumed run change."""
    found = re.search(r"parse_args\(.*?may_change=\((.*?)\)\)", Path(script.__file__).read_text(), re.S)
    return tuple(re.findall(r"\w+", found[1])) if found else ()


def parse_args(script, argv=None):
    """The arguments of a script, as its command line reads them."""
    return communicators.parse_args(script.Args, script.check_args, argv, may_change=may_change(script))
