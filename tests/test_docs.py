"""README.md and docs/ say what the scripts are and what benchmark/results/ holds."""

import ast
import dataclasses
import html
import importlib
import math
import re
import runpy
import shutil
import sys
import textwrap
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from command import parse_args
from helpers import (
    FEDAVG_ATARI,
    FEDAVG_MINIGRID,
    PRPO_MINIGRID,
    PRTRPO_MINIGRID,
    REPOSITORY,
    SCRIPTS,
    SLOW_FEDAVG_MUJOCO,
    call,
    flags,
    metrics_of_page,
    name_in_page,
    on,
    only_run,
    scalars_of,
)
from tyro._docstrings import get_field_docstring

import communicators

for folder in ("docs", "benchmark", "benchmark/baselines"):
    sys.path.insert(0, str(REPOSITORY / folder))
tables = importlib.import_module("tables")

PAGES = [*tables.PAGES, REPOSITORY / "CONTRIBUTING.md", REPOSITORY / "CHANGELOG.md"]
SCRIPT_NAMES = (
    "prpo_minigrid",
    "prpo_atari",
    "fedavg_ppo",
    "fedavg_atari",
    "prpo_mujoco",
    "fedavg_mujoco",
    "distral_minigrid",
    "prpo_llm",
    "prtrpo_minigrid",
    "prpo_babyai",
    "s2zpo_mujoco",
)
# Whose pages have only the flags that differ from those of another script -> that script
VARIANTS = {
    "fedavg_ppo": "prpo_minigrid",
    "fedavg_atari": "prpo_atari",
    "fedavg_mujoco": "prpo_mujoco",
    "distral_minigrid": "prpo_minigrid",
}
# Flags of PR-PPO that FedAvg and Distral lack, and those that PR-TRPO lacks
OF_REFERENCES = ("--gate", "--mixture", "--self-reference", "--kl-samples")
OF_LOSSES = ("--kl-coef", "--kl-schedule", "--kl-direction", "--clip-coef", "--clip-vloss")
OF_LOSSES += ("--ent-coef", "--vf-coef")
BENCHMARKS = (
    "federate",
    "gate",
    "rounds",
    "liars",
    "newcomer",
    "fedhpd",
    "play",
    "plot",
    "run",
    "table",
    "confirm",
    "figures",
    "gif",
    "text_worlds",
    "judge",
    "pipeline",
    "skills",
    "soak",
    "babyai",
    "throughput",
    "bound",
    "crowd",
    "decode",
    "docstrings",
    "partition",
    "llm_memory",
    "sb3_ppo",
    "sb3_trpo",
    "trl_grpo",
    "zeroth",
    "text_loop",
    "zeroth_loop",
    "gpu",
)
# Of torchrun, transformers, TensorBoard, pip, trl, pytest, sbatch and bash scripts
OTHERS = {
    "--nproc-per-node",
    "--signal",
    "--signals-to-handle",
    "--port",
    "--max-restarts",
    "--logdir",
    "--no-deps",
    "--quick",
    "--gres",
    "--help",
    "--no-compile",
    "--extra-index-url",
    "--hypothesis-profile",
    "--agent",  # an alias
    "--shutdown-timeout",  # of torchrun
    # vLLM
    "--max-loras",
    "--enable-sleep-mode",
    "--gpu-memory-utilization",
    "--max-lora-rank",
    "--logprobs-mode",
}
PAST = {
    "--results",
    "--scales",
    "--skills",
    "--tune",
    "--adam-beta1",
    "--adam-beta2",
    "--missions",
    "--levels-per-agent",
    "--eval-only",
    "--capture-video",
    "--threshold",
    "--cudagraphs",
    "--partition-strength",
    "--partition-overlap",
    "--communication-coef",
    "--update-every",
    "--distill-epochs",
    "--communication-end",
    "--sb3-threads",
    "--zeroth-iterations",
    "--participation",
    "--participations",
    "--dp-clip",
    "--dp-noise",
    "--dp-delta",
    "--dp-key",
    "--robust",
    "--target-kl",
    "--per-task",
    "--points",
    "--reference",
    "--success",
    "--replacement",
    "--halve",
    "--unequal",
    "--unequal-grids",
}


@pytest.fixture
def read_help(monkeypatch, capsys):
    """read_help(script): what its --help says of each flag, {flag: its text}, on one line each.

    The text begins with the flag and its aliases. The arguments are parsed in this process, because
    to load torch takes seconds; that --help works from a shell is tested with the scripts.
    """

    def read(script):
        monkeypatch.setenv("COLUMNS", "1000")
        with pytest.raises(SystemExit) as end:
            parse_args(importlib.import_module(script), ["--help"])
        assert end.value.code == 0
        lines = [line.strip("│╭╰─╮╯ ") for line in capsys.readouterr().out.splitlines()]
        texts = {}
        for entry in re.split(r"^(?=-)", "\n".join(lines), flags=re.M)[1:]:
            signature = re.split(r"  |\n", entry)[0]
            for flag in re.findall(r"(?:^|[ ,])(--[a-z][a-z0-9-]*)", signature):
                texts[flag] = " ".join(entry.split())
        return texts

    return read


def read_rows(script):
    """The rows of a script's table of flags: {flag: (default, meaning)}."""
    text = "\n".join(page.read_text() for page in tables.PAGES)
    (table,) = re.findall(rf"<!-- table flags {script}\b.*?-->(.*?)<!-- end", text, re.S)
    rows = re.findall(r"^\| `(--[a-z0-9-]+)` \|(.*?)\| (.*) \|$", table, re.M)
    return {
        flag: (default.strip(), html.unescape(meaning).replace("\\|", "|"))
        for flag, default, meaning in rows
    }


@pytest.mark.parametrize("script", SCRIPT_NAMES)
def test_flags_are_those_of_help(script, read_help):
    """Every flag of --help stands in the page or in runs.md, and no other; texts, defaults and
    choices agree.
    """
    shown = read_help(script)
    rows = read_rows("communicators")
    if script in VARIANTS:
        rows |= read_rows(VARIANTS[script])
        for flag in OF_REFERENCES:  # as the page says
            rows.pop(flag, None)
    elif script == "prtrpo_minigrid":
        rows |= read_rows("prpo_minigrid")
        for flag in OF_LOSSES:
            del rows[flag]
    rows |= read_rows(script)
    aliases = {"--help", "--agent", "--communication-coef", "--update-every", "--reward-model"}
    negations = {flag for flag in shown.keys() - rows if flag.replace("--no-", "--", 1) in rows}
    assert shown.keys() - aliases - negations == rows.keys()
    for flag, (default, meaning) in rows.items():
        text = shown[flag]
        assert meaning in text, flag
        for value in re.findall(r"^`([^`]*)`", default):
            assert re.search(rf"\(default: '?{re.escape(value)}'?\)", text), (flag, default)
        for choice in re.findall(r"[(,] ?`([^`]+)`", default):
            listed = rf"[{{,|]{re.escape(choice)}[,|}}]"
            assert re.search(listed, text.replace(" ", "")), (flag, choice)


@pytest.mark.parametrize("module", [*SCRIPT_NAMES, *BENCHMARKS])
def test_help_texts_have_no_line_breaks(module):
    """tyro keeps the line breaks of a docstring, but joins comments above a field."""
    Args = importlib.import_module(module).Args
    for field in dataclasses.fields(Args):
        text = get_field_docstring(Args, field.name, ()) or ""
        assert "\n" not in text, field.name


def list_flags(module):
    """The flags of a script or tool, with the negations of its switches."""
    flags = set()
    for field in dataclasses.fields(importlib.import_module(module).Args):
        name = field.name.replace("_", "-")
        flags.add(f"--{name}")
        if field.type in (bool, "bool"):
            flags.add(f"--no-{name}")
    return flags


def test_no_page_names_an_unknown_flag():
    """Whatever looks like a flag in code, anywhere, is one."""
    flags = OTHERS.union(*map(list_flags, (*SCRIPT_NAMES, *BENCHMARKS)))
    for page in PAGES:
        text = page.read_text()
        blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
        code = blocks + re.findall(r"`([^`\n]+)`", text)
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", "\n".join(code)))
        if page.stem in ("CHANGELOG", "negative") or page.parent.name == "results":
            named -= PAST
        assert named <= flags, (page.name, named - flags)


def list_anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    """Every local link, with its anchor."""
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        assert not anchor or anchor in list_anchors(file), target


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.stem)
def test_tables_are_up_to_date(page):
    """`python docs/tables.py` would change nothing."""
    assert tables.render(page.read_text()) == page.read_text()


def test_every_script_has_its_page():
    """The README's table leads to a page per script, and every page is reached from the README."""
    readme = (REPOSITORY / "README.md").read_text()
    for script in (*SCRIPT_NAMES, "communicators"):
        page = {"fedavg_atari": "fedavg_ppo", "fedavg_mujoco": "prpo_mujoco"}.get(script, script)
        row = rf"^\|.* \[`{script}\.py`\]\({script}\.py\)[, ].*\(docs/{page}\.md\) \|$"
        assert re.search(row, readme, re.M), script
    assert all(f"(docs/{page.name})" in readme for page in (REPOSITORY / "docs").glob("*.md"))
    assert len(readme.splitlines()) <= 110


def test_the_first_screen_shows_the_lines_of_the_script():
    """The README's four lines of Python stand in prpo_minigrid.py, whatever their indentation."""
    readme = (REPOSITORY / "README.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", readme, re.S)
    script = (REPOSITORY / "prpo_minigrid.py").read_text()
    lines = [line.partition("  #")[0] for line in block.splitlines()]
    assert len(lines) == 4
    assert all(f" {line}\n" in script for line in lines)


def test_a_page_of_results_fits_on_a_screen_and_a_half():
    """With one claim, figure and command; its details are a page of their own."""
    results = REPOSITORY / "docs" / "results"
    others = "".join(page.read_text() for page in tables.PAGES)
    for page in results.glob("*.md"):
        lines = page.read_text().splitlines()
        assert lines[0].startswith("# ")
        assert len(lines) <= (120 if "details" in page.stem else 80), page.name
        assert re.search(rf"\((?:docs/|results/)?{page.name}[)#]", others), page.name


SLOW_FEDAVG_ATARI = pytest.param(FEDAVG_ATARI, marks=pytest.mark.slow)


@on([*SCRIPTS, SLOW_FEDAVG_ATARI, SLOW_FEDAVG_MUJOCO, PRTRPO_MINIGRID])
def test_metrics_are_those_of_a_run(script, whole_run):
    """Whatever a run of control writes is explained, and nothing else is."""
    folder = whole_run(script)
    tags = scalars_of(folder)
    name = script.module.__name__
    page = VARIANTS.get(name, name)
    if page in ("prpo_atari", "prpo_mujoco"):  # with rows of another meaning at most
        page = "prpo_minigrid"
    explained = metrics_of_page(page)
    assert {name_in_page(tag) for tag in tags} == explained
    evaluations = [tag for tag in tags if tag.startswith("eval/")]
    assert evaluations and all(re.fullmatch(r"eval/.+/agent_\d+", tag) for tag in evaluations)

    columns = set(pd.read_csv(folder / "metrics.csv").columns)
    assert columns >= {"iteration", "agent", "env_id", "timesteps", "seed", "exp_name"}
    columns -= {"iteration", "agent", "env_id", "timesteps", "seed", "exp_name"}
    elsewhere = ("communicator/", "distances/", "eval/")
    in_rows = {key.rpartition("/")[2] for key in explained if not key.startswith(elsewhere)}
    in_rows -= {"bytes", "SPS", "non_expansion"}
    assert columns == in_rows | {"communication_bytes", "agent_steps_per_second"}


def list_imports(file):
    """The top-level names of the modules that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            names |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    return {name.partition(".")[0] for name in names}


def test_packages_are_pinned_and_used():
    """requirements.txt pins what is imported and nothing else, in groups that say what for."""
    lines = (REPOSITORY / "requirements.txt").read_text().splitlines()
    pinned = [line for line in lines if line and not line.startswith("#")]
    assert all(re.match(r"[a-z0-9-]+==[\d.]+(; |$)", line) for line in pinned)
    assert all(group.startswith("# ") for group in "\n".join(lines).split("\n\n"))
    named = {re.match(r"[a-z0-9-]+", line)[0] for line in pinned}
    folders = (".", "tests", "tests/tools", "benchmark", "benchmark/baselines", "docs")
    files = [file for folder in folders for file in (REPOSITORY / folder).glob("*.py")]
    # transformers brings tokenizers
    others = sys.stdlib_module_names | {file.stem for file in files} | {"benchmark", "tokenizers"}
    imported = set().union(*map(list_imports, files)) - others
    packages = {"cv2": "opencv-python-headless", "PIL": "pillow"}
    imported = {packages.get(name, name).replace("_", "-") for name in imported}
    # Their docstrings are the data
    topics = set(runpy.run_path(str(REPOSITORY / "benchmark" / "docstrings.py"))["TOPICS"])
    tools = {"pytest-xdist", "ruff", "gguf", "accelerate"}  # transformers and TRL need the last two
    # What mujoco needs in its version, and what gymnasium's tasks of MuJoCo import
    tools |= {"mujoco-core", "mujoco-studio", "imageio"}
    assert named == imported | (topics - {"stdlib"}) | tools


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
    page = (REPOSITORY / "docs" / "runs.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    *imports, last = code.strip().splitlines()
    names = {}
    exec("\n".join(imports), names)
    (curve,) = eval(last, names).get_lines()
    assert (curve.get_label(), curve.get_xydata().tolist()) == ("y", [[249856, 5], [251904, 6]])


def test_the_communicator_of_the_page_is_the_identity_before_there_are_returns():
    """As `best`; then all follow the best one."""
    page = (REPOSITORY / "docs" / "communicators.md").read_text()
    function, *_ = re.findall(r"```python\n(.*?)```", page, re.S)
    names = {"torch": torch, "Tensor": torch.Tensor, "identity": communicators.identity}
    exec(function, names)
    unknown = torch.full((3,), torch.nan)
    assert names["leader"](unknown).tolist() == torch.eye(3).tolist()
    returns = torch.tensor([torch.nan, 0.2, 0.5])
    assert names["leader"](returns).tolist() == [[0, 0, 1]] * 3


@pytest.fixture(scope="module")
def changed_scripts(tmp_path_factory):
    """Copies of the scripts with the communicator that docs/communicators.md adds in two places,
    and with its gate.
    """
    folder = tmp_path_factory.mktemp("changed")
    page = (REPOSITORY / "docs" / "communicators.md").read_text()
    function, branch, gate = re.findall(r"```python\n(.*?)```", page, re.S)
    places = [
        ("communicators.py", "def similarity(", f"{function}\n\n"),
        ("prpo_minigrid.py", '    elif name == "similarity":', branch),
        ("prpo_minigrid.py", "    return communicators.mix_log_probs(", gate),
        ("prpo_minigrid.py", '"value"] = "none"', '"entropy", '),
    ]
    for name, place, text in places:
        path = folder / name
        source = (path if path.exists() else REPOSITORY / name).read_text()
        assert source.count(place) == 1
        path.write_text(source.replace(place, text + place))
    shutil.copy(REPOSITORY / "fedavg_ppo.py", folder)  # which imports that
    return folder


def test_the_gate_of_the_page_trusts_certain_peers():
    """In each state, and not those of weight 0, or whose policies are NaN there."""
    page = (REPOSITORY / "docs" / "communicators.md").read_text()
    *_, branch = re.findall(r"```python\n(.*?)```", page, re.S)
    policies = torch.tensor([[[0.5, 0.5], [0.9, 0.1]], [[0.9, 0.1], [torch.nan, torch.nan]]]).log()
    names = {"torch": torch, "policies": torch.cat((policies, policies[:1]))}
    names |= {"weights": torch.tensor([0.6, 0.4, 0.0]), "args": SimpleNamespace(gate="entropy")}
    exec(textwrap.dedent(branch).removeprefix("el"), names)
    entropy = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))
    ratio = 0.6 / 0.4 * math.exp((entropy - math.log(2)) / 0.3)
    expected = torch.tensor([[ratio / (1 + ratio), 1], [1 / (1 + ratio), 0], [0, 0]])
    torch.testing.assert_close(names["weights"], expected)


def test_a_gate_takes_the_place_of_the_page(changed_scripts, tmp_path):
    """A run with it: mean weights sum to 1, and are not those of C."""
    given = {"gate": "entropy", "iterations": 3, "eval_episodes": 0}
    words = flags(PRPO_MINIGRID, tmp_path / "runs", **given)
    process = call(changed_scripts / "prpo_minigrid.py", *words, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    metrics = pd.read_csv(only_run(tmp_path / "runs") / "metrics.csv").query("iteration == 3")
    weights = metrics.filter(regex=r"^weight_\d$").to_numpy()
    assert weights.shape == (3, 3)
    assert weights.sum(1) == pytest.approx(1, abs=1e-6)
    assert abs(weights - 1 / 3).max() > 1e-4


@on([PRPO_MINIGRID, pytest.param(FEDAVG_MINIGRID, marks=pytest.mark.slow)])
def test_a_communicator_takes_the_two_places_of_the_page(script, changed_scripts, tmp_path):
    """A run with it, in which all agents follow the one with the highest mean return."""
    words = flags(script, tmp_path / "runs", communicator="leader", iterations=3, eval_episodes=0)
    process = call(changed_scripts / f"{script}.py", *words, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    folder = only_run(tmp_path / "runs")
    metrics = pd.read_csv(folder / "metrics.csv").fillna(0)
    totals = metrics.assign(total=metrics.episodic_return * metrics.episodes).groupby("agent")
    means = totals.total.sum() / totals.episodes.sum()
    weights = pd.read_csv(folder / "communicator.csv").query("iteration == 3")
    matrix = weights.pivot(index="listener", columns="peer", values="weight").to_numpy()
    expected = np.zeros((3, 3))
    expected[:, means.argmax()] = 1.0
    assert matrix.tolist() == expected.tolist()
