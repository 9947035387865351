"""Run scripts as on another system: python elsewhere.py SYSTEM "SCRIPT ..." flags...

SYSTEM is what sys.platform says there. What Windows does not have is missing, and so is every
package that requirements-minigrid.txt leaves out.
"""

import os
import runpy
import sys
from pathlib import Path

import gymnasium  # noqa: F401 - before sys.platform changes, by which libraries are found
import torch._dynamo
import torch.utils.tensorboard  # noqa: F401

POSIX_MODULES = ("fcntl", "grp", "pwd", "resource", "termios")
POSIX_FUNCTIONS = ("fork", "getuid", "killpg", "sched_getaffinity", "sched_setaffinity", "wait4")
PACKAGES = (
    "ale_py",
    "envpool",
    "imageio_ffmpeg",
    "mujoco",
    "pandas",
    "peft",
    "transformers",
    "wandb",
)

system, scripts, *flags = sys.argv[1:]
for name in POSIX_MODULES + PACKAGES:
    sys.modules[name] = None  # importing it fails
for name in POSIX_FUNCTIONS:
    delattr(os, name)
sys.platform = system
for script in scripts.split():
    sys.argv = [script, *flags]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
