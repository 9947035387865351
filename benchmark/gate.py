"""Draws who has a say in each state of an episode on DoorKey: the weights of --gate value.

    python benchmark/gate.py runs/NAME --agent 2
    python benchmark/gate.py --from-csv  # the figure again, from the CSV file

One of a run's agents, at most three, plays: the first level of the run's evaluations on which it
reaches the goal. Its rollouts are not kept, so that its returns are taken to lie between 0 and its
own highest value in the episode. Without the gate all weights are equal.

Writes OUT.csv, a row per step, and from it OUT.png: the weights of all agents, and the entropy of
the reference policy with and without the gate.
"""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import play
import torch
import tyro
from arguments import read_flags, refuse
from plot import make_axes, save, spread
from runs import comments_of, make_command, read_settings, read_table, write
from styles import BLACK, METHODS, ORANGE, SKY, name_task

import communicators
from communicators import Count, Natural

PHASES = ("before the key", "with the key", "at the door", "behind the door")
COLOURS = (ORANGE, SKY)  # of peers
# Column -> what it is called, its colour
ENTROPIES = {
    "entropy_uniform": ("equal weights", METHODS["pr-uniform"].colour),
    "entropy_gated": ("gated", METHODS["pr-gate"].colour),
}


@dataclass
class Args:
    run: Annotated[str, tyro.conf.Positional] = ""
    """folder of a run that has ended"""
    agent: Natural = 2
    """who plays; its task must be a DoorKey"""
    episodes: Count = 100
    """levels of the run's evaluations that are tried"""
    seed: Natural | None = None  # of levels and actions (default: the run's)
    out: str = "benchmark/results/gate"
    """beginning of the names of the files that are written"""
    from_csv: bool = False
    """only draw OUT.png from OUT.csv"""


# --- the episode ---


class Recorder:
    """What an agent sees in each state of an episode, and how far it is: see `evaluate`."""

    def __init__(self):
        self.obs = []
        self.phases = []

    def __call__(self, env) -> None:
        """Note the state of the environment."""
        self.obs.append(env.unwrapped.gen_obs()["image"])
        earlier = self.phases[-1:]  # what is reached stays reached
        self.phases.append(max([find_phase(env.unwrapped), *earlier]))


def find_phase(env) -> int:
    """How far the agent of a DoorKey is, as an index of PHASES."""
    cells = enumerate(env.grid.grid)
    ((place, door),) = [(k, cell) for k, cell in cells if cell and cell.type == "door"]
    y, x = divmod(place, env.width)
    if env.agent_pos[0] > x:
        return 3
    if door.is_open or (env.carrying and tuple(env.front_pos) == (x, y)):
        return 2
    return 1 if env.carrying else 0


def play_episode(args: Args, script, settings, agents: dict) -> tuple[Recorder, float, int]:
    """The first episode that ends at the goal: its states, its return and its level."""
    env_id = script.list_env_ids(settings)[args.agent]
    for level in script.list_test_levels(settings):
        recorder = Recorder()
        seed = communicators.derive_seed(settings.seed, args.agent, script.TEST_ACTIONS)
        (total,) = script.evaluate(
            settings, agents[args.agent], env_id, [level], seed, watch=recorder
        )
        if total > 0:
            return recorder, total, level
    refuse(f"{args.run}: agent {args.agent} reaches the goal in none of {args.episodes} episodes")


def make_rows(recorder: Recorder, agents: dict, labels: list[str], i: int) -> pd.DataFrame:
    """Of each step of agent i: its phase, the agents' weights, the reference's entropies."""
    obs = torch.from_numpy(np.stack(recorder.obs[:-1]))  # after the last one nobody acts
    device = agents[i].actor.weight.device
    outputs = [agents[j].predict(obs.to(device)) for j in range(len(agents))]
    log_probs = torch.stack([logits.log_softmax(-1) for logits, _ in outputs]).cpu()
    values = torch.stack([value for _, value in outputs]).cpu()
    equal = communicators.uniform(len(agents))[i]
    returns = torch.stack((torch.tensor(0.0), values[i].max()))
    weights = communicators.gate_by_value(equal, values, returns)
    rows = {"step": range(len(obs)), "phase": [PHASES[phase] for phase in recorder.phases[:-1]]}
    rows |= dict(zip(labels, weights.tolist(), strict=True))
    for name, row in (("entropy_uniform", equal), ("entropy_gated", weights)):
        reference = communicators.mix_log_probs(log_probs, row)
        rows[name] = (-(reference.exp() * reference).nan_to_num().sum(-1)).tolist()
    return pd.DataFrame(rows)


def record(args: Args) -> tuple[str, pd.DataFrame]:
    """The comments of OUT.csv, and its rows."""
    given = play.Args(args.run, episodes=args.episodes, seed=args.seed)
    config = play.read_config(given)
    script = play.load_script(config, given)
    settings = play.load_settings(script, config, given)
    agents = play.load_agents(script, settings, config, given)
    script = inspect.getmodule(script.evaluate_agents)  # variants import their evaluation
    if not hasattr(script, "list_env_ids"):
        refuse(f"{args.run}: must be a run on MiniGrid, not of {config['script']}.py")
    if args.agent not in agents or not len(agents) == settings.num_agents <= 3:
        refuse(f"{args.run}: must have at most three agents, of which --agent is one")
    tasks = [name_task(env_id) for env_id in script.list_env_ids(settings)]
    if "DoorKey" not in tasks[args.agent]:
        refuse(f"--agent {args.agent}: its task must be a DoorKey, not {tasks[args.agent]}")
    if settings.communicator != "uniform":
        refuse(f"{args.run}: must have --communicator uniform, whose weights are drawn")
    labels = [f"agent {j}, {task}" for j, task in enumerate(tasks)]
    recorder, total, level = play_episode(args, script, settings, agents)
    rows = make_rows(recorder, agents, labels, args.agent)
    outcome = f"# {labels[args.agent]}: return {total:.2f}, level {level}\n"
    summary, of_run = read_settings(Path(args.run))
    command = make_command(config["script"], of_run | {"run_dir": "runs"})
    versions = [f"{name} {version}" for name, version in summary.get("versions", {}).items()]
    return f"{outcome}# {command}\n# {', '.join(versions)}\n", rows


# --- the figure ---


def draw_lines(axis, rows: pd.DataFrame, lines: dict[str, tuple[str, str]]) -> None:
    """Columns as lines with their names at their ends. lines: column -> (name, colour)."""
    for column, (_, colour) in lines.items():
        axis.plot(rows.step, rows[column], color=colour, zorder=3)
    low, high = axis.get_ylim()
    heights = spread([rows[column].iloc[-1] for column in lines], 0.09 * (high - low))
    for height, (label, colour) in zip(heights, lines.values(), strict=True):
        place = (1.01, height)
        axis.annotate(label, place, xycoords=("axes fraction", "data"), color=colour, va="center")


def draw(path: Path, png_path: Path):
    """OUT.png from OUT.csv; returns the figure."""
    rows = read_table(path, ("step", "phase", *ENTROPIES))
    comments = comments_of(path).splitlines()
    if not comments or not len(rows):
        refuse(f"{path}: holds no episode of this tool")
    player, _, outcome = comments[0].removeprefix("# ").partition(", level ")[0].partition(": ")
    labels = [column for column in rows if column.startswith("agent ")]
    figure, axes = make_axes(2, 1, 8.4, 5.4, sharex=True)
    upper, lower = axes[:, 0]
    colours = iter(COLOURS)
    lines = {}
    for label in labels:
        colour = BLACK if label == player else next(colours)
        task = label.partition(", ")[2]
        lines[label] = (f"{task} (itself)" if label == player else task), colour
    upper.set_ylim(-0.03, 1.03)
    lower.set_ylim(0, 1.05 * rows[[*ENTROPIES]].max(axis=None))
    draw_lines(upper, rows, lines)
    draw_lines(lower, rows, ENTROPIES)
    for number, (phase, steps) in enumerate(rows.groupby("phase", sort=False).step):
        for axis in (upper, lower):
            if number % 2:
                axis.axvspan(steps.min(), steps.max() + 1, color=BLACK, alpha=0.06, linewidth=0)
        # Names of short phases, one above the other, do not touch
        place = ((steps.min() + steps.max() + 1) / 2, 1.02 + 0.08 * (number % 3))
        upper.annotate(phase, place, xycoords=("data", "axes fraction"), ha="center")
    upper.set_xlim(0, len(rows))
    upper.set_ylabel("weight of the agent on")
    lower.set_ylabel("entropy of the\nreference (nats)")
    lower.set_xlabel(f"step of an episode of {player} ({outcome})")
    save(figure, png_path)
    return figure


def main(args: Args) -> None:
    path = Path(f"{args.out}.csv")
    if not args.from_csv:
        write(path, *record(args))
    draw(path, path.with_suffix(".png"))


if __name__ == "__main__":
    main(read_flags(Args))
