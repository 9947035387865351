"""benchmark/gate.py: whose votes count in the states of an episode."""

import copy
import importlib
import math
import sys

import gymnasium as gym
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from helpers import PRPO_MINIGRID, REPOSITORY, gate_by_hand, notes_of, only_run, refusal, tiny

import prpo_minigrid
import s2zpo_mujoco

sys.path.insert(0, str(REPOSITORY / "benchmark"))
gate = importlib.import_module("gate")
arguments = importlib.import_module("arguments")

DOORKEY = "MiniGrid-DoorKey-5x5-v0"
TASKS = (DOORKEY, "MiniGrid-Empty-5x5-v0", DOORKEY)


def train(folder, communicator):
    """A short run, whose agents do not reach the goal."""
    settings = {"env_ids": TASKS, "iterations": 1, "eval_episodes": 0}
    prpo_minigrid.main(tiny(PRPO_MINIGRID, folder, communicator=communicator, **settings))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run."""
    folder = tmp_path_factory.mktemp("run")
    train(folder, "uniform")
    return str(only_run(folder))


def find_plan(level):
    """The shortest way to the goal of a level of DoorKey, as actions: breadth first."""
    env = gym.make(DOORKEY).unwrapped
    env.reset(seed=level)
    plans = [(env, [])]
    reached = set()
    for env, plan in plans:
        (door,) = [x for x in env.grid.grid if x and x.type == "door"]
        state = tuple(env.agent_pos), env.agent_dir, bool(env.carrying), door.is_open
        if state in reached:
            continue
        reached.add(state)
        for action in (0, 1, 2, 3, 5):
            later = copy.deepcopy(env)
            _, reward, *_ = later.step(action)
            if reward > 0:
                return [*plan, action]
            plans.append((later, [*plan, action]))


@pytest.fixture
def played(run, monkeypatch):
    """Agents go straight to the goal of the first level. Returns what they see on their way."""
    settings = prpo_minigrid.Args(seed=1, eval_episodes=1)
    (level,) = prpo_minigrid.list_test_levels(settings)
    plan = find_plan(level)
    seen = []
    predict = prpo_minigrid.Agent.predict

    def follow(agent, obs):
        logits, value = predict(agent, obs)
        if len(seen) < len(plan):
            logits = torch.full_like(logits, -math.inf)
            logits[:, plan[len(seen)]] = 0.0
            seen.append(obs)
        return logits, value

    monkeypatch.setattr(prpo_minigrid.Agent, "predict", follow)
    return seen


def test_phases_are_how_far_an_agent_is():
    env = gym.make("MiniGrid-DoorKey-6x6-v0").unwrapped
    env.reset(seed=1)
    ((place, door),) = [(k, x) for k, x in enumerate(env.grid.grid) if x and x.type == "door"]
    (key,) = [x for x in env.grid.grid if x and x.type == "key"]
    y, x = divmod(place, env.width)
    assert gate.find_phase(env) == 0
    env.agent_pos = np.array([x - 1, y])
    env.agent_dir = 0  # to the right
    assert gate.find_phase(env) == 0  # a locked door in front of it, without the key
    env.carrying = key
    assert gate.find_phase(env) == 2
    env.agent_dir = 2
    assert gate.find_phase(env) == 1
    door.is_open = True
    env.carrying = None
    assert gate.find_phase(env) == 2
    env.agent_pos = np.array([x, y])
    assert gate.find_phase(env) == 2
    env.agent_pos = np.array([x + 1, y])
    assert gate.find_phase(env) == 3


def test_rows_have_the_gates_weights_and_the_references_entropies():
    """By loops over states."""
    torch.manual_seed(0)
    agents = {j: prpo_minigrid.Agent(7) for j in range(3)}
    for agent in agents.values():
        torch.nn.init.normal_(agent.actor.weight)
    recorder = gate.Recorder()
    obs = PRPO_MINIGRID.random_obs(6)
    recorder.obs = list(obs.numpy())
    recorder.phases = [0, 0, 1, 2, 3, 3]
    labels = ["a", "b", "c"]
    rows = gate.make_rows(recorder, agents, labels, 1)
    assert rows.step.tolist() == [0, 1, 2, 3, 4]  # nobody acts in the last state
    assert rows.phase.tolist() == [gate.PHASES[k] for k in (0, 0, 1, 2, 3)]
    outputs = [agent.predict(obs[:5]) for agent in agents.values()]
    highest = outputs[1][1].max().item()
    promised = [value.tolist() for _, value in outputs]
    gated = gate_by_hand([1 / 3] * 3, promised, [0.0, highest])
    for state in range(5):
        probs = [logits[state].softmax(-1) for logits, _ in outputs]
        weights = gated[state]
        assert rows.loc[state, labels].tolist() == pytest.approx(weights, abs=1e-5)
        for name, row in (("entropy_uniform", [1 / 3] * 3), ("entropy_gated", weights)):
            reference = sum(w * policy for w, policy in zip(row, probs, strict=True)).tolist()
            entropy = -sum(p * math.log(p) for p in reference)
            assert rows.loc[state, name] == pytest.approx(entropy, abs=1e-5)


def test_an_episode_is_recorded_as_the_agent_sees_it(run, played, monkeypatch):
    """Up to the goal; what was reached stays reached."""
    recorders = notes_of(monkeypatch, gate, "make_rows", lambda recorder, *_: recorder)
    comments, rows = gate.record(gate.Args(run, agent=2))
    (recorder,) = recorders
    assert len(rows) == len(played) > 8
    assert np.array_equal(torch.cat(played).numpy(), np.stack(recorder.obs[:-1]))
    assert recorder.phases == sorted(recorder.phases)
    assert set(recorder.phases) == {0, 1, 2, 3}
    assert list(rows)[2:5] == ["agent 0, DoorKey-5x5", "agent 1, Empty-5x5", "agent 2, DoorKey-5x5"]
    total = 1 - 0.9 * len(rows) / 250  # MiniGrid's reward
    assert f"# agent 2, DoorKey-5x5: return {total:.2f}" in comments


@pytest.mark.usefixtures("played")
def test_the_figure_comes_from_the_csv_file(run, tmp_path):
    """Five lines, labelled, and the names of the phases."""
    out = str(tmp_path / "gate")
    gate.main(gate.Args(run, agent=0, out=out))
    picture = plt.imread(f"{out}.png")
    gate.main(gate.Args(out=out, from_csv=True))
    assert (plt.imread(f"{out}.png") == picture).all()
    figure = gate.draw(tmp_path / "gate.csv", tmp_path / "again.png")
    assert [len(axis.lines) for axis in figure.axes] == [3, 2]
    rows = pd.read_csv(f"{out}.csv", comment="#")
    for axis, columns in zip(figure.axes, (list(rows)[2:5], [*gate.ENTROPIES]), strict=True):
        for line, column in zip(axis.lines, columns, strict=True):
            assert line.get_ydata().tolist() == rows[column].tolist()
    texts = [text.get_text() for axis in figure.axes for text in axis.texts]
    shown = [
        *gate.PHASES,
        "equal weights",
        "gated",
        "Empty-5x5",
        "DoorKey-5x5",
        "DoorKey-5x5 (itself)",
    ]
    assert sorted(texts) == sorted(shown)


def test_labels_do_not_lie_on_each_other():
    """They move down, the highest stays."""
    assert gate.spread([0.5, 0.5, 0.1], 0.1) == pytest.approx([0.4, 0.5, 0.1])
    assert gate.spread([0.3, 0.2, 0.25], 0.1) == pytest.approx([0.3, 0.1, 0.2])


def test_what_cannot_be_drawn_is_refused(run, tmp_path):
    """In one line."""
    assert "must be a DoorKey" in refusal(gate.main, gate.Args(run, agent=1))
    assert "three agents" in refusal(gate.main, gate.Args(run, agent=3))
    assert "config.json" in refusal(gate.main, gate.Args(str(tmp_path)))
    train(tmp_path, communicator="reward")
    args = gate.Args(str(only_run(tmp_path)), out=str(tmp_path / "gate"))
    assert "must have --communicator uniform" in refusal(gate.main, args)
    assert "none of 1 episodes" in refusal(gate.main, gate.Args(run, agent=2, episodes=1))
    (tmp_path / "gate.csv").write_text("# of\n# another tool\nstep,phase\n0,1\n")
    args = gate.Args(out=str(tmp_path / "gate"), from_csv=True)
    with pytest.raises(arguments.Damaged, match="no column entropy_uniform"):
        gate.main(args)
    columns = "step,phase,entropy_uniform,entropy_gated\n"
    for text in (f"# of\n# another tool\n{columns}", f"{columns}0,at the door,1,1\n"):
        (tmp_path / "gate.csv").write_text(text)
        assert "no episode" in refusal(gate.main, args)


def test_runs_of_other_scripts_are_refused(tmp_path):
    """One policy plays for all, on no grid."""
    settings = {"env_id": "CartPole-v1", "num_agents": 1, "num_pairs": 1, "eval_episodes": 0}
    settings |= {"total_iterations": 1, "run_dir": str(tmp_path)}
    s2zpo_mujoco.main(s2zpo_mujoco.Args(**settings))
    args = gate.Args(str(only_run(tmp_path)), agent=0)
    assert "not of s2zpo_mujoco.py" in refusal(gate.main, args)
