"""Placements, crashes, signals and the wire: how a run is started, cut off, resumed and spread over
processes.
"""

import json
import os
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers import (
    DISTRAL_MINIGRID,
    FEDAVG_ATARI,
    FEDAVG_MINIGRID,
    FEDAVG_MUJOCO,
    MINIGRID,
    PRPO_ATARI,
    PRPO_MINIGRID,
    PRPO_MUJOCO,
    PRTRPO_MINIGRID,
    REPOSITORY,
    SLOW_ATARI,
    SLOW_FEDAVG,
    SLOW_FEDAVG_MUJOCO,
    Child,
    assert_same_run,
    flags,
    on,
    only_run,
    outcomes,
    place_in_group,
    resume,
    rows_of,
    run_ranks,
    scalars_of,
    start_ranks,
    summary_of,
    table_of,
    tiny,
    torchrun,
    train,
    weights_of,
)
from ports import free_port

import communicators


def script_file(script):
    return REPOSITORY / f"{script.__name__}.py"


def communicator_of(folder):
    """C and the distances in all iterations in which they changed, as text."""
    return (folder / "communicator.csv").read_text()


def crash_command(moment, agent, iteration, script):
    """What runs a script until it dies at that moment."""
    return REPOSITORY / "tests" / "tools" / "crash.py", script.__name__, moment, agent, iteration


# --- placements ---


SLOW_PRTRPO, SLOW_FEDAVG_ATARI = (
    pytest.param(script, marks=pytest.mark.slow) for script in (PRTRPO_MINIGRID, FEDAVG_ATARI)
)
ON_MUJOCO = [PRPO_MUJOCO, SLOW_FEDAVG_MUJOCO]


@on([PRPO_MINIGRID, SLOW_FEDAVG, SLOW_PRTRPO, SLOW_ATARI, SLOW_FEDAVG_ATARI, *ON_MUJOCO])
@pytest.mark.usefixtures("smooth_adam")
def test_three_ranks_train_like_one_process(script, tmp_path):
    """One agent per rank gives the metrics, weights, evaluation and bytes of one process; what
    moves is what may.
    """
    script.main(tiny(script, tmp_path / "whole"))
    runs = {"run": [script.__name__, *flags(script, tmp_path / "runs")]}
    reports = watch(3, runs, tmp_path, SMOOTH_ADAM="1")
    # On Atari the agents of a process are one product, which rounds otherwise than one agent's
    exactly = script.family != "Atari"
    whole = only_run(tmp_path / "whole")
    assert_same_placement(only_run(tmp_path / "runs"), whole, ranks=3, exactly=exactly)
    for report in reports:
        assert_declared(report["run"], script, num_agents=3, held=1, reports=True)


@on([PRPO_MINIGRID, SLOW_FEDAVG])
def test_one_rank_trains_like_one_process(script, whole_run, tmp_path, monkeypatch):
    """As torchrun starts a single process: it forms a group alone, holds all agents and sends
    nothing.
    """
    for name, value in place_in_group(1, 0, free_port()).items():
        monkeypatch.setenv(name, value)
    script.main(tiny(script, tmp_path))
    assert not torch.distributed.is_initialized()
    assert_same_placement(only_run(tmp_path), whole_run(script), ranks=1)


PLACED = [
    (PRPO_MINIGRID, "uniform"),
    (PRPO_MINIGRID, "surrogate"),
    (PRPO_MINIGRID, "identity"),
    (FEDAVG_MINIGRID, "uniform"),
    (PRPO_MUJOCO, "similarity"),
    (FEDAVG_MUJOCO, "surrogate"),
]


@pytest.mark.parametrize(("script", "name"), PLACED, ids=str)
def test_two_ranks_with_two_agents_each_train_like_one_process(
    script, name, watched_runs, tmp_path
):
    """Ranks that hold several agents: nothing random and nothing exchanged depends on who holds
    whom, nor do rows of C that only an agent itself can know.
    """
    _, folder = watched_runs
    script.main(tiny(script, tmp_path, **FOUR, communicator=name))
    ranks = only_run(folder / str(script) / name)
    assert_same_placement(ranks, only_run(tmp_path), ranks=2, isolated=name == "identity")


@on([PRPO_MINIGRID, SLOW_FEDAVG, SLOW_PRTRPO, *ON_MUJOCO])
def test_many_agents_in_ranks_train_like_one_process(script, tmp_path):
    """Where a rank evaluates only those to whom its agents may listen."""
    settings = {"num_agents": 18, "topology": "ring", "top_k": 1, "communicator": "surrogate"}
    settings |= {"iterations": 2, "local_updates": 1, "num_steps": 16, "eval_episodes": 0}
    script.main(tiny(script, tmp_path / "one", **settings, hidden_sizes=(8,) * 18))
    words = *flags(script, tmp_path / "ranks", **settings), "--hidden-sizes", *[8] * 18
    run_ranks(2, script_file(script), *words, cwd=tmp_path)
    assert_same_placement(only_run(tmp_path / "ranks"), only_run(tmp_path / "one"), ranks=2)


def assert_same_placement(folder, expected, ranks, exactly=True, isolated=False):
    assert_same_run(folder, expected, exactly)
    if exactly:
        assert communicator_of(folder) == communicator_of(expected)
    spread = summary_of(folder)
    together = summary_of(expected)
    assert (spread["world_size"], together["world_size"]) == (ranks, 1)
    assert spread["communication_bytes"] == together["communication_bytes"]
    assert (spread["communication_bytes"] == 0) == isolated
    for ours, theirs in zip(
        spread["evaluation"]["agents"], together["evaluation"]["agents"], strict=True
    ):
        for task in ours.keys() | theirs.keys():
            assert ours[task] == pytest.approx(theirs[task])


# --- crashes ---


def iterations_on_disk(folder):
    """agent's folder -> the iterations of its checkpoints."""
    iterations = {}
    for path in sorted(folder.glob("checkpoints/agent_*")):
        iterations[path.name] = sorted(int(file.stem) for file in path.glob("*.pt"))
    return iterations


def assert_same_charts(folder, expected):
    """TensorBoard shows the same points, none missing and none twice, but for the speed."""
    points = scalars_of(folder)
    expected_points = scalars_of(expected)
    different = {
        tag
        for tag in points.keys() | expected_points.keys()
        if points.get(tag) != expected_points.get(tag)
    }
    assert different <= {"charts/SPS"}
    assert [step for step, _ in points["charts/SPS"]] == [
        step for step, _ in expected_points["charts/SPS"]
    ]


# Which a real kill -9 tests below
@on([*MINIGRID, SLOW_PRTRPO, SLOW_ATARI, SLOW_FEDAVG_ATARI, PRPO_MUJOCO, FEDAVG_MUJOCO])
def test_resume_after_a_crash_equals_a_whole_run(script, whole_run, crashing, tmp_path):
    """Some agents have saved and others have not: all go on from the newest checkpoint that all of
    them completed.

    Weights bit for bit, every row and every point of a chart once, the last two checkpoints kept,
    litter ignored.
    """
    crashing("complete", 0, 4, lambda: script.main(tiny(script, tmp_path)))
    folder = only_run(tmp_path)
    for path in folder.glob("checkpoints/*"):
        (path / "6.pt.tmp").write_bytes(b"litter")
    resume(script, folder)
    assert_same_run(folder, whole_run(script))
    assert_same_charts(folder, whole_run(script))
    assert iterations_on_disk(folder) == {f"agent_{i}": [4, 6] for i in range(3)}
    ours = summary_of(folder)
    theirs = summary_of(whole_run(script))
    same = "completed", "communication_bytes", "evaluation", "training_return"
    assert [ours[name] for name in same] == [theirs[name] for name in same] and ours["completed"]
    assert table_of(folder, "evaluations") == table_of(whole_run(script), "evaluations")


@on([PRPO_MINIGRID, SLOW_FEDAVG, SLOW_ATARI])
def test_resume_after_kill_9_equals_a_whole_run(script, whole_run, tmp_path):
    """The same after real SIGKILLs, when nothing in memory reaches the disk any more; TensorBoard
    has no gap.

    The second one comes as soon as the resumed run learns: what the first one left is not lost.
    """
    command = crash_command("complete", 2, 4, script)
    words = *command, *flags(script, tmp_path)
    assert outcomes([Child(*words, cwd=tmp_path)]) == [(mock.ANY, -signal.SIGKILL)]
    folder = only_run(tmp_path)
    assert iterations_on_disk(folder) == {f"agent_{i}": [2, 4] for i in range(3)}
    assert not (folder / "summary.json").exists()
    words = *command[:2], "update", 0, 0, "--resume", folder
    assert outcomes([Child(*words, cwd=tmp_path)]) == [(mock.ANY, -signal.SIGKILL)]
    time.sleep(1)  # TensorBoard orders its files by the second
    resume(script, folder)
    assert_same_run(folder, whole_run(script))
    assert_same_charts(folder, whole_run(script))
    # Once for every change of C, also across the restart
    assert communicator_of(folder) == communicator_of(whole_run(script))


GATED = {"gate": "value", "communicator": "uniform"}
SNAPSHOT = {"self_reference": "snapshot", "communicator": "surrogate"}
# Rounds are after the third and the sixth iteration
IN_AN_INTERVAL = "complete", 2, 4
# After a round
BEFORE_THE_FIRST_CHECKPOINT = "half a file", 0, 4
CUT_OFF = [
    (PRPO_MINIGRID, SNAPSHOT, IN_AN_INTERVAL),
    (PRPO_MINIGRID, SNAPSHOT | {"save_every": 4}, BEFORE_THE_FIRST_CHECKPOINT),
    (FEDAVG_MINIGRID, {"prox_coef": 0.01, "communicator": "similarity"}, IN_AN_INTERVAL),
    pytest.param(
        FEDAVG_MINIGRID,
        {"save_every": 4},
        BEFORE_THE_FIRST_CHECKPOINT,
        marks=pytest.mark.slow,
    ),
    pytest.param(PRTRPO_MINIGRID, SNAPSHOT, IN_AN_INTERVAL, marks=pytest.mark.slow),
    pytest.param(PRPO_ATARI, SNAPSHOT, IN_AN_INTERVAL, marks=pytest.mark.slow),
    pytest.param(FEDAVG_ATARI, {}, IN_AN_INTERVAL, marks=pytest.mark.slow),
    (PRPO_MINIGRID, GATED, IN_AN_INTERVAL),
    (PRTRPO_MINIGRID, GATED, IN_AN_INTERVAL),
    pytest.param(PRPO_ATARI, GATED, IN_AN_INTERVAL, marks=pytest.mark.slow),
    (PRPO_MUJOCO, SNAPSHOT | GATED | {"kl_direction": "reverse"}, IN_AN_INTERVAL),
    (FEDAVG_MUJOCO, {"server_lr": 0.5, "communicator": "similarity"}, IN_AN_INTERVAL),
]
CUT_OFF_RANKS = [
    CUT_OFF[0],
    *(pytest.param(*case, marks=pytest.mark.slow) for case in CUT_OFF[1:3]),
    CUT_OFF[3],
    CUT_OFF[4],
]


@pytest.mark.parametrize(("script", "settings", "moment"), CUT_OFF, ids=str)
def test_a_run_goes_on_with_what_was_sent_in_its_last_round(
    script, settings, moment, crashing, tmp_path
):
    """Cut off between two rounds: C, snapshots and averages of the last one are as they were, bit
    for bit; also where nothing was saved since the start.
    """
    settings = settings | {"num_steps": 32, "eval_episodes": 0}
    script.main(tiny(script, tmp_path / "whole", **settings))
    args = tiny(script, tmp_path / "parts", **settings)
    crashing(*moment, lambda: script.main(args))
    folder = only_run(tmp_path / "parts")
    resume(script, folder)
    assert_same_run(folder, only_run(tmp_path / "whole"))
    assert communicator_of(folder) == communicator_of(only_run(tmp_path / "whole"))


@pytest.mark.parametrize(("script", "settings", "moment"), CUT_OFF_RANKS, ids=str)
def test_ranks_go_on_with_what_was_sent_in_their_last_round(script, settings, moment, tmp_path):
    """The same in three processes, which all end when one is killed."""
    settings = settings | {"num_steps": 32, "eval_episodes": 0}
    script.main(tiny(script, tmp_path / "whole", **settings))
    words = flags(script, tmp_path / "parts", **settings)
    processes = start_ranks(3, *crash_command(*moment, script), *words, cwd=tmp_path)
    assert -signal.SIGKILL in [code for _, code in outcomes(processes)]
    folder = only_run(tmp_path / "parts")
    run_ranks(3, script_file(script), "--resume", folder, cwd=tmp_path)
    assert_same_run(folder, only_run(tmp_path / "whole"))
    assert communicator_of(folder) == communicator_of(only_run(tmp_path / "whole"))


@on([PRPO_MINIGRID, SLOW_FEDAVG])
def test_a_finished_run_can_be_resumed_for_its_evaluation(script, whole_run, tmp_path):
    """Nothing is trained again; only what may differ between a run and its resumption does."""
    folder = Path(shutil.copytree(whole_run(script), tmp_path / "copy"))
    before = summary_of(folder)
    summary = resume(script, folder, "--eval-episodes", "3")
    assert_same_run(folder, whole_run(script))
    assert [
        (row["iteration"], row["agent"], row["episodes"]) for row in table_of(folder, "evaluations")
    ] == [("6", str(i), "3") for i in range(3)]
    assert (summary["evaluation"]["episodes"], before["evaluation"]["episodes"]) == (3, 2)
    unchanged = (
        "timesteps_per_agent",
        "communication_bytes",
        "communication_rounds",
        "training_return",
        "completed",
    )
    assert {name: summary[name] for name in unchanged} == {name: before[name] for name in unchanged}


def test_a_dead_rank_ends_the_others_and_the_run_goes_on_elsewhere(whole_run, tmp_path):
    """One of three ranks dies while it saves: the others end with a message that names it, none
    hangs.

    The run is then resumed in another placement, all agents in one process.
    """
    command = crash_command("half a file", 1, 4, PRPO_MINIGRID)
    processes = start_ranks(3, *command, *flags(PRPO_MINIGRID, tmp_path), cwd=tmp_path)
    results = outcomes(processes)
    assert [code for _, code in results] == [1, -signal.SIGKILL, 1]
    (_, message), _ = results[0]
    assert "Ranks 1 failed" in message
    folder = only_run(tmp_path)
    assert iterations_on_disk(folder) == {"agent_0": [2, 4], "agent_1": [2], "agent_2": [2, 4]}
    resume(PRPO_MINIGRID, folder)
    assert_same_run(folder, whole_run(PRPO_MINIGRID))


@pytest.mark.slow
def test_torchrun_restarts_a_crashed_run_unattended(whole_run, tmp_path):
    """With --max-restarts a run whose rank dies once goes on in the same folder and equals an
    uninterrupted one.
    """
    command = crash_command("half a file", 1, 4, FEDAVG_MINIGRID)
    options = "--max-restarts", 1
    run = torchrun(
        3, *command, *flags(FEDAVG_MINIGRID, tmp_path / "runs"), options=options, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr
    assert "resuming after iteration 2 of 6" in run.stdout
    assert_same_run(only_run(tmp_path / "runs"), whole_run(FEDAVG_MINIGRID))


# --- signals ---

LONG = {
    "num_steps": 32,
    "iterations": 40,
    "update_epochs": 1,
    "num_minibatches": 1,
    "save_every": 100,
    "eval_episodes": 0,
}


def wait_for_rows(run_dir, process):
    """Return once the run has written its first rows."""
    limit = time.monotonic() + 120
    while not any(path.read_text().count("\n") > 1 for path in run_dir.glob("*/metrics.csv")):
        assert process.poll() is None and time.monotonic() < limit, process.communicate()
        time.sleep(0.01)


def assert_interrupted(folder, agents):
    """Checkpoint, logs and summary of a run that a signal ended agree. Returns the iteration."""
    (iteration,) = {newest for *_, newest in iterations_on_disk(folder).values()}  # of all agents
    rows = rows_of(folder)
    summary = summary_of(folder)
    assert [(row["iteration"], row["agent"]) for row in rows] == [
        (str(k), str(i)) for k in range(1, iteration + 1) for i in range(agents)
    ]
    assert all(value for row in rows for value in row.values())
    assert 1 <= iteration < 40 and not summary["completed"]
    assert summary["timesteps_per_agent"] == iteration * 64
    assert len(weights_of(folder)) == agents
    return iteration


@on([PRPO_MINIGRID, SLOW_FEDAVG])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_a_run_with_a_checkpoint(script, number, tmp_path):
    """Ctrl-C and SIGTERM: the iteration is finished and saved, and the command in the message goes
    on with the run.
    """
    words = script_file(script), *flags(script, tmp_path / "runs", **LONG)
    process = Child(*words, cwd=tmp_path)
    wait_for_rows(tmp_path / "runs", process)
    process.send_signal(number)
    [((output, errors), code)] = outcomes([process])
    assert code == 128 + number, errors
    times = "again" if number == signal.SIGINT else "twice"
    line = f"finishing this iteration, then a checkpoint; Ctrl-C {times} to end at once\n"
    assert errors.count(line) == 1
    folder = only_run(tmp_path / "runs")
    iteration = assert_interrupted(folder, 3)
    assert (
        f"interrupted after iteration {iteration} of 40" in output
        and f"--resume {folder}" in output
    )
    rows = rows_of(folder)

    summary = resume(script, folder)
    assert summary["completed"] and summary["timesteps_per_agent"] == 40 * 64
    whole = rows_of(folder)
    assert whole[: len(rows)] == rows
    assert Counter(row["iteration"] for row in whole) == {str(k): 3 for k in range(1, 41)}


@on(
    [
        PRPO_MINIGRID,
        FEDAVG_MINIGRID,
        PRTRPO_MINIGRID,
        DISTRAL_MINIGRID,
        PRPO_MUJOCO,
        SLOW_FEDAVG_MUJOCO,
        SLOW_ATARI,
    ]
)
def test_the_evaluation_of_an_interrupted_run_waits_for_its_resume(script, tmp_path, monkeypatch):
    """The checkpoint comes at once, as the message says, and no evaluation is lost.

    A signal in that of the resumed run ends it before another iteration.
    """
    changes = {"iterations": 4, "eval_every": 2}
    whole = train(script, tmp_path / "whole", **changes)
    rollout = script.module.rollout
    evaluate = script.module.evaluate_agents
    rollouts = []

    def interrupt(*inputs):
        rollouts.append(rollout(*inputs))
        if len(rollouts) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return rollouts[-1]

    def interrupt_evaluation(*inputs):
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*inputs)

    with monkeypatch.context() as patch:
        patch.setattr(script.module, "rollout", interrupt)
        with pytest.raises(SystemExit):
            script.main(tiny(script, tmp_path / "runs", **changes))
    folder = only_run(tmp_path / "runs")
    assert table_of(folder, "evaluations") == []
    with monkeypatch.context() as patch:
        patch.setattr(script.module, "evaluate_agents", interrupt_evaluation)
        with pytest.raises(SystemExit):
            resume(script, folder)
    assert rows_of(folder)[-1]["iteration"] == "2"
    resume(script, folder)
    assert table_of(folder, "evaluations") == table_of(whole, "evaluations")


def test_a_signal_to_one_rank_ends_all_ranks_at_the_same_iteration(tmp_path):
    """Ranks agree on the last iteration, so that all agents' checkpoints belong together."""
    command = (
        script_file(FEDAVG_MINIGRID),
        *flags(FEDAVG_MINIGRID, tmp_path / "runs", num_agents=2, **LONG),
    )
    processes = start_ranks(2, *command, cwd=tmp_path)
    wait_for_rows(tmp_path / "runs", processes[0])
    processes[1].send_signal(signal.SIGINT)
    results = outcomes(processes)
    assert [code for _, code in results] == [128 + signal.SIGTERM, 128 + signal.SIGINT]
    # Rank 0 reports for all, when it is informed
    assert not any("finishing" in errors for (_, errors), _ in results)
    assert_interrupted(only_run(tmp_path / "runs"), 2)


# --- the wire ---

FOUR = {"num_agents": 4, "num_envs": 1, "num_minibatches": 1, "eval_episodes": 0}
WATCHED = [
    *PLACED,
    (PRPO_MINIGRID, "softmax-reward"),
    (FEDAVG_MINIGRID, "similarity"),
    (PRTRPO_MINIGRID, "uniform"),
    (FEDAVG_MUJOCO, "softmax-reward"),
]


def watch(ranks, runs, folder, **env):
    """Run name -> [script, flags...] on ranks while torch.distributed is watched: every rank's
    report.

    A report says for each run which functions were called, with the dtype and shape of every tensor
    in their arguments.
    """
    wire = REPOSITORY / "tests" / "tools" / "wire.py"
    run_ranks(ranks, wire, folder / "{rank}.json", json.dumps(runs), cwd=folder, **env)
    reports = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    assert all(report.keys() == runs.keys() for report in reports)
    return reports


@pytest.fixture(scope="session")
def watched_runs(once):
    """Watched runs of four agents on two ranks: (a report for each rank, their folder)."""

    def make(folder):
        runs = {
            f"{script}/{name}": [
                script.__name__,
                *flags(script, folder / str(script) / name, communicator=name, **FOUR),
            ]
            for script, name in WATCHED
        }
        return watch(2, runs, folder)

    folder, reports = once("watched", make)
    return reports, folder


@pytest.mark.parametrize(("script", "name"), WATCHED, ids=str)
def test_nothing_but_parameters_and_declared_numbers_leaves_a_rank(script, name, watched_runs):
    """With communicators of returns, of distributions and of nothing."""
    for report in watched_runs[0]:
        calls = report[f"{script}/{name}"]
        assert_declared(calls, script, 4, 2, name == "softmax-reward", name == "identity")


def assert_declared(calls, script, num_agents, held, reports=False, isolated=False):
    """What moves is flat: whole parameters, the run's stamp, a row of C and of distances for each
    agent, and for the log fewer numbers of each agent than a rollout has steps.

    Nothing is pickled. Parameters move at the common start and in both rounds, and, where a
    resumed run would need them, behind a checkpoint; those of isolated agents never again after the
    start. A number of each agent is reported where the communicator reads it.
    """
    parameters = len(communicators.flatten(script.of_family.Agent(*script.sizes)))
    assert not [function for function, _ in calls if "object" in function]
    # Nothing of the agents' is in such a call
    silent = {function for function, tensors in calls if not tensors}
    assert silent <= {
        "init_process_group",
        "new_group",
        "monitored_barrier",
        "destroy_process_group",
    }
    moved = Counter()
    rows = 0
    numbers = 0
    for function, tensors in calls:
        for dtype, shape in tensors:
            (numel,) = shape  # flat
            if numel >= parameters:
                assert dtype == "float32"
                # At the start those of all agents, from rank 0
                of_all = function == "broadcast" and numel == num_agents * parameters
                assert of_all or (function == "all_gather" and numel == held * parameters)
            elif dtype == "float32":
                assert (function, numel) == ("all_gather", held * num_agents)
            else:
                assert dtype in ("float64", "int64")
                assert numel <= held * 32 < held * script.tiny["num_steps"]
        if tensors:
            dtype, (numel,) = tensors[0]
            moved[function] += numel >= parameters
            rows += dtype == "float32" and numel < parameters
            numbers += dtype == "float64" and numel == held
    # These two go on from agents and C alone
    keeps_sent = script not in (FEDAVG_ATARI, FEDAVG_MUJOCO)
    assert moved["broadcast"] == 1
    assert moved["all_gather"] == (0 if isolated else 2 + keeps_sent)
    assert rows == 2 * 3  # of C and of distances: at the start and in both rounds
    assert numbers == (2 if reports else 0)
    assert len(calls) >= 6  # the metrics of every iteration, so the watch is awake
