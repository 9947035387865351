"""Joins films, such as those of benchmark/play.py, side by side in one small GIF.

    python benchmark/gif.py films/alone.mp4 films/with_peers.mp4 --out films/both.gif

The README's picture shows agents of its main job, and of the same job with --communicator identity:

    python benchmark/play.py runs/<alone> --video films/alone
    python benchmark/play.py runs/<peers> --video films/peers
    python benchmark/gif.py films/alone/agent_3_DoorKeyGoals-8x8-blue-v0.mp4 \\
        films/peers/agent_3_DoorKeyGoals-8x8-blue-v0.mp4 \\
        films/peers/agent_1_DoorKeyGoals-8x8-green-v0.mp4 \\
        --seconds 7 --out docs/alone_and_with_peers.gif

Who is done earlier stands still.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from arguments import read_flags, refuse
from play import write_gif


@dataclass
class Args:
    films: Annotated[tuple[str, ...], tyro.conf.Positional]
    """MP4 files, from left to right"""
    out: str = "films/both.gif"
    """the file that is written"""
    seconds: float = 8.0
    """how much of the films is shown"""


def main(args: Args) -> None:
    for film in args.films:
        if not Path(film).is_file():
            refuse(f"{film}: there is no such film")
    path = Path(args.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=path.parent) as unfinished:
        write_gif([Path(film) for film in args.films], path, Path(unfinished), args.seconds)
    print(f"wrote {path}")


if __name__ == "__main__":
    main(read_flags(Args))
