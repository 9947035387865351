"""Runs on a GPU: they train as those on the processor do. Skipped where there is no GPU.

Kernels differ, and with them rounding: Adam makes a whole step of a gradient that is nearly 0.
"""

from types import SimpleNamespace

import pytest
import torch
from command import parse_args
from helpers import (
    FEDAVG_ATARI,
    PRPO_ATARI,
    PRPO_MINIGRID,
    PRTRPO_MINIGRID,
    REPOSITORY,
    SCRIPTS,
    assert_same_rows,
    config_of,
    flags,
    on,
    only_run,
    resume,
    rows_of,
    summary_of,
    table_of,
    tiny,
    torchrun,
    weights_of,
)
from language_models import rows_of as language_rows_of
from language_models import tiny as tiny_llm
from language_models import to_resume
from language_models import weights_of as adapters_of
from spoil import spoil
from test_babyai import folder  # noqa: F401
from test_babyai import tiny as tiny_babyai  # noqa: F401

import communicators
import prpo_babyai
import prpo_llm

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ALL = [*SCRIPTS, FEDAVG_ATARI, PRTRPO_MINIGRID]
REFERENCES = [PRPO_MINIGRID, PRPO_ATARI, PRTRPO_MINIGRID]
OTHER = {"cuda": "cpu", "cpu": "cuda"}
SHORT = {"iterations": 3, "local_updates": 1}


def train(script, run_dir, **changes):
    """A tiny run in this process. Returns its folder."""
    script.main(tiny(script, run_dir, **SHORT | changes))
    return only_run(run_dir)


@pytest.fixture(scope="session")
def processor_run(once):
    """processor_run(script): the folder of such a run on the processor."""

    def run(script):
        def make(run_dir):
            return script.main(tiny(script, run_dir, **SHORT, device="cpu"))

        common, _ = once(f"processor_run_{script}", make)
        return only_run(common)

    return run


def find_largest_move(args):
    """The most that a run can move a parameter: the learning rate times the number of steps."""
    iterations = args.total_timesteps // (args.num_envs * args.num_steps)
    return args.learning_rate * iterations * args.update_epochs * args.num_minibatches


def assert_nearly_same_run(ours, theirs):
    """Equal metrics of all iterations up to rounding, and nearly equal weights."""
    assert_same_rows(rows_of(ours), rows_of(theirs), 1e-4, apart={"explained_variance"})
    args = SimpleNamespace(**config_of(ours))
    expected = weights_of(theirs)
    for i, weights in weights_of(ours).items():
        difference = (weights - expected[i]).double()
        assert difference.square().mean().sqrt() <= 1e-2 * find_largest_move(args)


# --- control ---


@on(ALL)
def test_a_gpu_trains_and_plays_like_the_processor(script, processor_run, tmp_path):
    ours = train(script, tmp_path, device="cuda")
    theirs = processor_run(script)
    assert summary_of(ours)["device"] == "cuda:0"
    assert_nearly_same_run(ours, theirs)
    assert table_of(ours, "evaluations") == table_of(theirs, "evaluations")


@on(ALL)
@pytest.mark.parametrize("device", OTHER)
def test_what_one_has_saved_the_other_resumes(script, device, processor_run, crashing, tmp_path):
    crashing("complete", 2, 2, lambda: train(script, tmp_path, device=device))
    parts = only_run(tmp_path)
    resume(script, parts, "--device", OTHER[device])
    assert_nearly_same_run(parts, processor_run(script))


@on(REFERENCES)
def test_a_gpu_goes_on_with_the_snapshots_of_the_last_round(script, crashing, tmp_path):
    """Cut off between two rounds, the third and the sixth iteration's."""
    changes = {"iterations": 6, "local_updates": 3, "device": "cuda", "communicator": "surrogate"}
    changes["self_reference"] = "snapshot"
    whole = train(script, tmp_path / "whole", **changes)
    crashing("complete", 2, 4, lambda: train(script, tmp_path / "parts", **changes))
    parts = only_run(tmp_path / "parts")
    resume(script, parts)
    assert_nearly_same_run(parts, whole)


@on(ALL)
def test_a_gpu_leaves_out_snapshots_whose_policies_are_not_finite(script, tmp_path):
    with spoil("policy", [1], [1]):
        folder = train(script, tmp_path, device="cuda")
    assert [int(row["dropped"]) for row in rows_of(folder)] == [1] * 3 + [0] * 6
    assert all(weights.isfinite().all() for weights in weights_of(folder).values())


@on([PRPO_MINIGRID, PRPO_ATARI])
def test_ranks_that_share_a_gpu_train_like_one_process(script, tmp_path):
    """They communicate through the processor."""
    changes = SHORT | {"device": "cuda"}
    program = REPOSITORY / f"{script.module.__name__}.py"
    done = torchrun(3, program, *flags(script, tmp_path / "ranks", **changes), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    together = train(script, tmp_path / "one", device="cuda")
    assert_nearly_same_run(only_run(tmp_path / "ranks"), together)


PROGRAM = """
import torch
import communicators
exchange = communicators.Exchange(2, 'cuda')
assert exchange._wire.type == 'cuda', exchange._wire
local = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device='cuda')
assert exchange.all_gather(local).tolist() == [[1.0, 2.0], [3.0, 4.0]]
sent = [torch.arange(3.0, device='cuda'), torch.full((4,), torch.nan, device='cuda')]
numbers = torch.tensor([0.5, 1e300], dtype=torch.double)
received, reports = exchange.round(sent, numbers, [3, 4])
sent[0] += 1.0
assert received[1] is None and received[0].is_cuda and received[0].tolist() == [0.0, 1.0, 2.0]
assert not reports.is_cuda and reports.tolist() == [0.5, 1e300]
recalled = exchange.recall([received[0], sent[1]], [3, 4])
assert recalled[1] is None and torch.equal(recalled[0], received[0])
exchange.count_bytes(torch.ones(2, 2, dtype=torch.bool))
assert exchange.bytes_sent == 4 * (3 + 4)
exchange.wait_for_all()
exchange.close()
"""


def test_a_rank_with_a_gpu_of_its_own_communicates_through_it(tmp_path):
    """By nccl, of which one process is enough to see where tensors are."""
    (tmp_path / "program.py").write_text(PROGRAM)
    done = torchrun(1, tmp_path / "program.py", cwd=tmp_path, PYTHONPATH=str(REPOSITORY))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_compiled_networks_play_and_learn_the_same(precision, tmp_path):
    """In rollouts they are a CUDA graph, whose next replay writes over the last one's outputs."""
    changes = {"device": "cuda", "eval_episodes": 0, "precision": precision}
    plain = train(PRPO_ATARI, tmp_path / "plain", **changes)
    compiled = train(PRPO_ATARI, tmp_path / "compiled", **changes, compile=True)
    if precision == "float32":
        assert_nearly_same_run(compiled, plain)
    value_losses = [float(rows_of(run)[0]["value_loss"]) for run in (compiled, plain)]
    assert value_losses[0] == pytest.approx(value_losses[1], rel=0.1)


# --- language models ---


# An agent without a signal follows rounding errors: in PPO only agent 1 has one from the start
@pytest.mark.parametrize(
    ("algorithm", "aggregation", "learning_rate", "agents"),
    [
        ("grpo", "policy", 1e-2, (0, 1)),
        ("grpo", "weights", 1e-2, (0, 1)),
        ("ppo", "policy", 1e-3, (1,)),
    ],
)
def test_a_gpu_trains_language_models_like_the_processor(
    algorithm,
    aggregation,
    learning_rate,
    agents,
    files,
    tmp_path,
):
    """A whole run, and one that goes on from there on the processor."""
    changes = {"algorithm": algorithm, "aggregation": aggregation, "local_updates": 1}
    changes |= {"learning_rate": learning_rate}
    for device in OTHER:
        prpo_llm.main(tiny_llm(files, tmp_path / device, **changes, device=device, total_steps=4))
    prpo_llm.main(tiny_llm(files, tmp_path / "parts", **changes, device="cuda", total_steps=2))
    parts = only_run(tmp_path / "parts")
    more = ["--total-steps", "4", "--device", "cpu"]
    prpo_llm.main(parse_args(prpo_llm, [*to_resume(parts), *more]))
    expected = only_run(tmp_path / "cpu")
    for run in (only_run(tmp_path / "cuda"), parts):
        for i in agents:
            assert (adapters_of(run)[i] - adapters_of(expected)[i]).abs().max() < 1e-3
        for row, other in zip(language_rows_of(run), language_rows_of(expected), strict=True):
            for name in ("reward", "response_length", "kl_reference", "policy_loss", "entropy"):
                if int(row["agent"]) in agents:
                    assert float(row[name]) == pytest.approx(float(other[name]), abs=1e-3), name


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_in_bfloat16_the_first_ratio_is_one(algorithm, checkpointing, files, tmp_path):
    """The kernels are the same in both passes over a micro-batch."""
    changes = {"precision": "bfloat16", "batch_size": 4, "micro_batch_size": 2}
    changes |= {"algorithm": algorithm, "gradient_checkpointing": checkpointing}
    prpo_llm.main(tiny_llm(files, tmp_path, **changes, device="cuda", eval_prompts=0))
    rows = language_rows_of(only_run(tmp_path))
    assert all(float(row["first_log_ratio"]) <= 1e-6 for row in rows)
    assert any(float(row["approx_kl"]) > 1e-4 for row in rows)


def test_weights_on_the_processor_mix_policies_of_which_one_is_no_number():
    log_probs = torch.tensor([[[0.5, 0.5]], [[torch.nan, torch.nan]]], device="cuda").log()
    mixed = communicators.mix_log_probs(log_probs, torch.tensor([0.3, 0.7]))
    torch.testing.assert_close(mixed, log_probs[0])


def test_a_graph_generates_what_single_launches_do(files, tmp_path, monkeypatch):
    """The same tokens, over several sizes of buffers."""
    args = tiny_llm(files, tmp_path, num_agents=2)
    model, tokenizer = prpo_llm.load_base(args, torch.device("cuda"))
    prpo_llm.add_adapters(args, model, 2)
    monkeypatch.setitem(prpo_llm.PACES, "cuda", (16, 4))
    uniforms = torch.rand(4, 3, 40, generator=torch.Generator().manual_seed(1))
    prompts = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 1]]
    recorded = []
    record = prpo_llm.record

    def watch(function):
        repeat = record(function)
        recorded.append(repeat != function)
        return repeat

    outputs = []
    for replacement in (watch, lambda function: function):
        monkeypatch.setattr(prpo_llm, "record", replacement)
        with prpo_llm.select_adapters("policy"):
            outputs.append(prpo_llm.generate(model, prompts, uniforms, tokenizer.ends, 1.0))
    assert recorded and all(recorded)
    assert torch.equal(outputs[0][0], outputs[1][0]) and torch.equal(outputs[0][1], outputs[1][1])
    torch.testing.assert_close(outputs[0][2], outputs[1][2], rtol=1e-5, atol=1e-5)


def test_the_logged_memory_is_the_gpu_s(files, tmp_path):
    torch.cuda.reset_peak_memory_stats()
    prpo_llm.main(tiny_llm(files, tmp_path, device="cuda", eval_prompts=0))
    logged = float(table_of(only_run(tmp_path), "metrics")[-1]["peak_memory"])
    assert 0 < logged <= torch.cuda.max_memory_allocated() / 2**30 * (1 + 1e-5)


def test_a_gpu_trains_agents_in_text_worlds_like_the_processor(tiny_babyai, tmp_path):  # noqa: F811
    for device in OTHER:
        prpo_babyai.main(tiny_babyai(device, device=device))
    runs = [language_rows_of(only_run(tmp_path / device)) for device in OTHER]
    for row, other in zip(*runs, strict=True):
        for name in ("success", "return", "client", "invalid", "kl_reference", "policy_loss"):
            assert float(row[name]) == pytest.approx(float(other[name]), abs=1e-3), name
