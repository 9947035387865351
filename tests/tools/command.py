"""The arguments of a script as its command line reads them."""

import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import communicators


def load_script(name, argv):
    """A script's module; of fedavg_ppo, what it has on the family of these flags' task."""
    script = importlib.import_module(name)
    if name != "fedavg_ppo":
        return script
    family, Args = script.choose_family(argv)
    return SimpleNamespace(
        Args=Args, check_args=family.check_args, main=family.main, __file__=script.__file__
    )


def options(script):
    """What the script's command line lets a resumed run change, and what it wants to be given
    again.
    """
    text = Path(script.__file__).read_text()
    matches = {
        name: re.search(rf"parse_args\(.*?{name}=\((.*?)\)", text, re.S)
        for name in ("may_change", "again")
    }
    return {name: tuple(re.findall(r"\w+", match[1])) for name, match in matches.items() if match}


def parse_args(script, argv=None):
    """The arguments of a script, as its command line reads them."""
    return communicators.parse_args(script.Args, script.check_args, argv, **options(script))
