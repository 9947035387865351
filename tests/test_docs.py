"""README.md and docs/ say what the scripts are and what benchmark/results/ holds."""

import ast
import dataclasses
import html
import importlib
import re
import runpy
import sys
from pathlib import Path

import pandas as pd
import pytest
from helpers import PRTRPO_MINIGRID, REPOSITORY, SCRIPTS, call, on, scalars_of

for folder in ("docs", "benchmark", "benchmark/baselines"):
    sys.path.insert(0, str(REPOSITORY / folder))
tables = importlib.import_module("tables")

PAGES = [*tables.PAGES, REPOSITORY / "CONTRIBUTING.md", REPOSITORY / "CHANGELOG.md"]
SCRIPT_NAMES = ("prpo_minigrid", "prpo_atari", "prpo_llm", "fedavg_ppo", "prtrpo_minigrid")
BENCHMARKS = (
    "rounds",
    "plot",
    "run",
    "choose",
    "table",
    "judge",
    "pipeline",
    "skills",
    "throughput",
    "bound",
    "crowd",
    "docstrings",
    "partition",
    "llm_memory",
    "sb3_ppo",
    "sb3_trpo",
    "trl_grpo",
)
# Of torchrun, transformers, TensorBoard, pip, trl, pytest, sbatch and bash scripts
OTHERS = {
    "--nproc-per-node",
    "--port",
    "--max-restarts",
    "--logdir",
    "--no-deps",
    "--quick",
    "--results",
    "--tune",
    "--skills",
    "--gres",
    "--help",
    # vLLM
    "--max-loras",
    "--max-lora-rank",
    "--logprobs-mode",
}
PAST = {
    "--cudagraphs",
    "--partition-strength",
    "--partition-overlap",
    "--communication-coef",
    "--update-every",
}


def help_of(script):
    """What --help says of each flag: {flag: [its line of flags and aliases, all that is said]}."""
    shown = call(f"{script}.py", "--help", cwd=REPOSITORY, COLUMNS="1000").stdout
    lines = [line.strip("│╭╰─╮╯ ") for line in shown.splitlines()]
    parts = re.split(r"^(?=-)", "\n".join(lines), flags=re.M)[1:]
    found = {}
    for part in parts:
        signature = re.split(r"  |\n", part)[0]
        own = re.findall(r"(?:^|[ ,])(--[a-z][a-z0-9-]*)", signature)
        found |= {flag: " ".join(part.split()) for flag in own}
    return found


def rows_of(text):
    """The rows of a page's tables of flags: [flag, default, meaning]."""
    rows = re.findall(r"^\| `(--[a-z0-9-]+)` \|(.*?)\| (.*) \|$", text, re.M)
    return [
        (flag, default.strip(), html.unescape(meaning).replace("\\|", "|"))
        for flag, default, meaning in rows
    ]


@pytest.mark.parametrize("script", SCRIPT_NAMES)
def test_flags_are_those_of_help(script):
    """Every flag of --help stands in the page or in runs.md, and no other; texts, defaults and choices agree."""
    shown, common = help_of(script), rows_of((REPOSITORY / "docs" / "runs.md").read_text())
    page = rows_of((REPOSITORY / "docs" / f"{script}.md").read_text())
    rows = {flag: row for flag, *row in [*common, *page]}
    aliases = {"--help", "--communication-coef", "--update-every", "--reward-model"}
    negations = {
        flag for flag in set(shown) if flag.replace("--no-", "--", 1) in rows and flag not in rows
    }
    assert set(shown) - aliases - negations == set(rows)
    for flag, (default, meaning) in rows.items():
        assert meaning in shown[flag], (flag, meaning, shown[flag])
        for value in re.findall(r"^`([^`]*)`", default):
            assert re.search(rf"\(default: '?{re.escape(value)}'?\)", shown[flag]), (
                flag,
                default,
                shown[flag],
            )
        for choice in re.findall(r"[(,] ?`([^`]+)`", default):
            assert re.search(rf"[{{,|]{re.escape(choice)}[,|}}]", shown[flag].replace(" ", "")), (
                flag,
                choice,
            )


def test_no_page_names_an_unknown_flag():
    """Whatever looks like a flag in code, anywhere, is one."""
    known = set()
    for name in (*SCRIPT_NAMES, *BENCHMARKS):
        for field in dataclasses.fields(importlib.import_module(name).Args):
            flag = field.name.replace("_", "-")
            known |= (
                {f"--{flag}", f"--no-{flag}"} if field.type in (bool, "bool") else {f"--{flag}"}
            )
    for page in PAGES:
        text = page.read_text()
        code = re.findall(r"```bash\n(.*?)```", text, re.S) + re.findall(r"`([^`\n]+)`", text)
        named = {flag for part in code for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", part)}
        assert named <= known | OTHERS | (PAST if page.stem == "CHANGELOG" else set()), (
            page.name,
            named - known,
        )


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    """Every local link, with its anchor."""
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        name, _, anchor = target.partition("#")
        file = (page.parent / name) if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.stem)
def test_tables_are_up_to_date(page):
    """`python docs/tables.py` would change nothing."""
    assert tables.render(page.read_text()) == page.read_text()


def test_every_script_has_its_page():
    """The README's table leads to a page per script, and every page is reached from the README."""
    readme = (REPOSITORY / "README.md").read_text()
    for script in (*SCRIPT_NAMES, "communicators"):
        assert re.search(
            rf"^\| \[`{script}\.py`\]\({script}\.py\) .*\(docs/{script}\.md\) \|$", readme, re.M
        ), script
    assert all(f"(docs/{page.name})" in readme for page in (REPOSITORY / "docs").glob("*.md"))
    assert len(readme.splitlines()) <= 110


@on([*SCRIPTS, PRTRPO_MINIGRID])
def test_metrics_are_those_of_a_run(script, whole_run):
    """Whatever a run of control writes is explained, and nothing else is."""
    folder = whole_run(script)
    kind = tables.TRPO if script is PRTRPO_MINIGRID else tables.CONTROL
    explained = set(kind) | set(tables.COMMUNICATION)
    general = {
        re.sub(r"/agent_\d+$|(?<=c)_\d+_\d+$", "", re.sub(r"^eval/.*/", "eval/TASK/", tag))
        for tag in scalars_of(folder)
    }
    general = {re.sub(r"agent_\d+_agent_\d+", "agent_i_agent_j", tag) for tag in general}
    general = {
        {"communicator/c": "communicator/c_i_j", "eval/TASK": "eval/TASK/agent_i"}.get(tag, tag)
        for tag in general
    }
    assert general == explained
    columns = set(pd.read_csv(folder / "metrics.csv").columns) - {
        "iteration",
        "agent",
        "env_id",
        "timesteps",
        "seed",
        "exp_name",
    }
    assert columns == {
        key.rpartition("/")[2]
        for key in explained
        if not key.startswith(("communicator/", "distances/", "eval/"))
    } - {"bytes", "SPS", "non_expansion"} | {"communication_bytes", "agent_steps_per_second"}
    page = (REPOSITORY / "docs" / f"{script.module.__name__}.md").read_text()
    assert all(f"| `{key}` |" in page for key in explained)


def test_packages_are_pinned_and_used():
    """requirements.txt pins what is imported and nothing else, in groups that say what for."""
    lines = (REPOSITORY / "requirements.txt").read_text().splitlines()
    pinned = [line for line in lines if line and not line.startswith("#")]
    assert all(re.match(r"[a-z0-9-]+==[\d.]+(; |$)", line) for line in pinned)
    assert all(group.startswith("# ") for group in "\n".join(lines).split("\n\n"))
    named = {re.match(r"[a-z0-9-]+", line)[0] for line in pinned}
    files = [
        file
        for folder in (".", "tests", "benchmark", "docs")
        for file in (REPOSITORY / folder).glob("*.py")
    ]
    files += [*REPOSITORY.glob("tests/tools/*.py"), *REPOSITORY.glob("benchmark/baselines/*.py")]
    imported = set()
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
        imported |= {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
        imported |= {node.module} if isinstance(node, ast.ImportFrom) else set()
        called = isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module"
        imported |= (
            {arg.value for arg in node.args if isinstance(arg, ast.Constant)} if called else set()
        )
    others = (
        sys.stdlib_module_names | {file.stem for file in files} | {"benchmark", "tokenizers"}
    )  # of transformers
    imported = {name.partition(".")[0] for name in imported} - others
    docstrings = set(runpy.run_path(str(REPOSITORY / "benchmark" / "docstrings.py"))["TOPICS"]) - {
        "stdlib"
    }  # the data
    imported = {
        {"cv2": "opencv-python-headless"}.get(name, name).replace("_", "-") for name in imported
    }
    tools = {"pytest-xdist", "ruff", "gguf", "accelerate"}  # transformers and TRL need the last two
    assert named == imported | docstrings | tools


def test_the_analysis_in_the_pages_runs(tmp_path, monkeypatch):
    """The lines of Python in runs.md do what is said there."""
    folder = tmp_path / "runs" / "precision" / "x__y__1__1"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        '{"script": "prpo_atari", "exp_name": "y", "seed": 1, "precision": "bfloat16"}'
    )
    (folder / "metrics.csv").write_text(
        "iteration,agent,env_id,timesteps,return_last_100\n122,0,x,249856,5\n123,0,x,251904,6\n"
    )
    (folder / "evaluations.csv").write_text(
        "iteration,agent,task,timesteps,episodes,mean_return,ci95\n122,0,x,249856,2,7,1\n"
    )
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "runs.md").read_text(), re.S)
    exec("".join(blocks), {})
    expected = pd.read_csv(
        REPOSITORY / "benchmark" / "results" / "atari_precision.csv", comment="#"
    )
    written = pd.read_csv(tmp_path / "atari_precision.csv")
    assert list(written.iloc[0]) == ["bfloat16", 1, 0, 249856, 5, 7, 1] and len(written) == 1
    assert len(written.columns) == len(expected.columns)
    assert Path("atari_precision.csv").exists()
