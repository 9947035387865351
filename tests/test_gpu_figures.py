"""benchmark/gpu.sh and what it calls: rows of its tables, on a processor."""

import importlib
import os
import subprocess
import sys

import pytest
from helpers import REPOSITORY, refusal, table_of

sys.path.insert(0, str(REPOSITORY / "benchmark"))
decode = importlib.import_module("decode")
gpu = importlib.import_module("gpu")
llm_memory = importlib.import_module("llm_memory")

# What a script leaves: a step that has been logged, and the summary of a whole run
LOGS = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--run-dir") + 1], "run")
folder.mkdir(parents=True)
columns = "step,completions_per_second,peak_memory"
(folder / "metrics.csv").write_text(f"{columns}\\n1,5,1.5\\n2,7,2.5\\n")
"""
WHOLE = """
summary = '{"episodes_per_second": 8.25, "train_seconds": 4}'
(folder / "summary.json").write_text(summary)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    llm_memory.main(llm_memory.Args(sizes=("tiny",), prompt_tokens=12, write=str(folder)))
    return folder


def test_a_row_has_what_a_run_has_logged(tmp_path):
    """A whole run, one that is cut off, and one that fails; the next row follows either."""
    table = tmp_path / "made" / "gpu.csv"
    programs = {"whole": LOGS + WHOLE, "long": LOGS + "time.sleep(600)", "broken": "1 / 0"}
    for name, program in programs.items():
        script = tmp_path / f"{name}.py"
        script.write_text(program)
        args = gpu.Args(str(table), "llm", name, f"{script} --steps 3", seconds=60)
        if name == "long":
            args.seconds = 5
        if name == "whole":
            gpu.main(args)
        else:
            with pytest.raises(SystemExit, match="1"):
                gpu.main(args)
    whole, long, broken = table_of(tmp_path / "made", "gpu")
    assert (whole["finished"], whole["speed"], whole["train_seconds"]) == ("True", "8.25", "4.000")
    assert (long["finished"], long["speed"], long["peak_gib"]) == ("False", "7", "2.5")
    assert (broken["finished"], broken["speed"]) == ("False", "")
    assert whole["command"] == f"python {tmp_path}/whole.py --steps 3"


def test_a_decode_step_is_measured_without_what_happens_once(model, tmp_path, monkeypatch):
    """Twice as many steps take twice the operators more; the prompt's are not among them."""
    steps = {}
    for lengths in ((2, 4), (2, 6)):
        rollouts = []
        generate = decode.prpo_llm.generate

        def count(model, prompts, uniforms, *args, rollouts=rollouts, generate=generate, **options):
            rollouts.append(uniforms.shape)
            return generate(model, prompts, uniforms, *args, **options)

        monkeypatch.setattr(decode.prpo_llm, "generate", count)
        table = tmp_path / f"{lengths[1]}.csv"
        size = {"agents": 2, "prompts": 2, "group_size": 3, "repeats": 1}
        decode.main(decode.Args(str(model), lengths=lengths, csv=str(table), **size))
        monkeypatch.undo()
        assert {shape[2] for shape in rollouts} == {*lengths}
        (row,) = table_of(tmp_path, lengths[1])
        assert row["sequences"] == "12"
        steps[lengths[1]] = float(row["operators_per_step"])
    assert 50 < steps[4] == pytest.approx(steps[6], rel=0.2)


def test_decode_refuses_what_it_cannot_measure(model):
    args = decode.Args(str(model), lengths=(4, 4))
    assert refusal(decode.main, args) == "--lengths 4 4: must grow"


def test_completions_of_random_weights_never_end(model, tmp_path):
    """Here the end of a text would be one token of 512, so that one of five completions ended."""
    decode.main(decode.Args(str(model), lengths=(1, 100), repeats=1, prompts=8))


@pytest.mark.slow
def test_gpu_sh_runs(tmp_path):
    """With tiny sizes on the processor; a part that there is not does not stop the next."""
    out = tmp_path / "out"
    command = ["bash", "benchmark/gpu.sh", "quick", str(out), "nonsense", "llm", "decode"]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHON": sys.executable, "MODELS": str(tmp_path / "models")},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "nonsense: there is no such part" in done.stdout
    rows = table_of(out, "gpu")
    assert [row["contender"].partition(",")[0] for row in rows][-2:] == [
        "1 agent",
        "3 agents dense",
    ]
    assert all(row["finished"] == "True" and float(row["speed"]) > 0 for row in rows)
    assert [row["agents"] for row in table_of(out, "decode")] == ["1", "1", "3"]
