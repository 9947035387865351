"""MuJoCo with newcomers: the first agents begin as those of a run ended, the others are new.

    python benchmark/newcomer.py --start-from runs/NAME --num-agents 4 --env-ids A B C D
    python benchmark/newcomer.py --start-from runs/NAME --num-agents 4 --env-ids A B C D --averages

Everything else is `prpo_mujoco.py`, or with --averages `fedavg_mujoco.py`, whose flags all apply;
those of the other script are refused. An agent of the run brings its networks, its statistics of
observations and the scale of its rewards; its optimizer and learning rate begin anew.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import communicators
import fedavg_mujoco
import prpo_mujoco
from prpo_mujoco import evaluate_agents, make_agents  # noqa: F401 - what play.py needs


@dataclass
class Args(prpo_mujoco.Args, fedavg_mujoco.Args):
    start_from: str = ""
    """folder of the run whose agents 0, 1, ... these agents begin as, as many as it has"""
    averages: bool = False
    """agents average their parameters, as in fedavg_mujoco.py, instead of mixing policies"""


def find_checkpoint(args: Args, i: int) -> Path | None:
    """The last checkpoint of the run's agent i, None if it has no such agent."""
    paths = Path(args.start_from).expanduser().glob(f"checkpoints/agent_{i}/*.pt")
    numbered = [path for path in paths if path.stem.isdecimal()]
    return max(numbered, key=lambda path: int(path.stem), default=None)


def check_start(args: Args) -> None:
    """Refuse a folder that is no run's."""
    if find_checkpoint(args, 0) is None:
        communicators.refuse(args, "start_from", "must be a run's folder with its checkpoints")


class Run(communicators.Run):
    """As there, but where a run has no checkpoints yet, agents take those of another run."""

    def restore(self, state: dict[str, list]) -> None:
        super().restore(state)
        if self.iteration:
            return
        check_start(self.args)  # it may be gone when a run is resumed
        for k, i in enumerate(self.exchange.agents):
            path = find_checkpoint(self.args, i)
            if path is None:
                continue
            stored = torch.load(path, map_location=self.exchange.device, weights_only=True)
            agent = state["agent"][k]
            agent.load_state_dict(stored["agent"])
            agent.value_scale.fill_(1)  # as of every agent: only --gate value sets and sends it
            state["return_statistics"][k].copy_(stored["return_statistics"])
            for name in state.keys() & {"sent", "begin"}:
                state[name][k].copy_(communicators.flatten(agent))


def choose_script(args: Args):
    """The script whose agents these are."""
    return fedavg_mujoco if args.averages else prpo_mujoco


def main(args: Args) -> dict:
    """Train as the script does."""
    script = choose_script(args)
    script.Run = Run
    try:
        return script.main(args)
    finally:
        script.Run = communicators.Run


def check_args(args: Args) -> None:
    """Raise one-line errors, as the script does."""
    script = choose_script(args)
    script.check_args(args)
    communicators.refuse_others(args, script, {"start_from", "averages"})
    if args.resume:  # goes on from its own checkpoints
        return
    check_start(args)
    for i, agent in enumerate(make_agents(args)):
        path = find_checkpoint(args, i)
        if path is None:
            continue
        try:  # a foreign file may raise anything, but executes nothing
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
            weights = checkpoint["agent"]
            statistics = checkpoint["return_statistics"]
        except Exception:
            communicators.refuse(args, "start_from", f"cannot read {path.name} of agent {i}")
        try:
            agent.load_state_dict(weights)
        except Exception:
            communicators.refuse(args, "start_from", f"agent {i} is another network there")
        if not (communicators.flatten(agent).isfinite().all() and statistics.isfinite().all()):
            communicators.refuse(args, "start_from", f"agent {i} has diverged there")


if __name__ == "__main__":
    may_change = ("eval_episodes", "total_timesteps")
    main(communicators.parse_args(Args, check_args, may_change=may_change))
