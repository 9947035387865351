"""Files that are damaged, foreign or hostile: whoever reads one ends with one line, or passes over
what is documented to be passed over. Nothing in a file is executed, and nothing else is lost.

Hypothesis damages files byte by byte; the corpus has what bytes at random do not hit.
"""

import contextlib
import copy
import functools
import importlib
import io
import json
import pickle
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import safetensors.torch
import torch
import toy
import transformers
from fabricated import control_run
from helpers import REPOSITORY, call, config_of, only_run
from hypothesis import example, given, settings
from hypothesis import strategies as st
from language_models import tiny

import communicators
import prpo_llm
import prpo_minigrid
from benchmark import play

sys.path.insert(0, str(REPOSITORY / "benchmark"))
judge = importlib.import_module("judge")
pipeline = importlib.import_module("pipeline")
run_tool = importlib.import_module("run")
runs = importlib.import_module("runs")
skills = importlib.import_module("skills")
soak = importlib.import_module("soak")
table = importlib.import_module("table")

often = settings(max_examples=50)
sometimes = settings(max_examples=12)
REFUSED = object()  # what a reader returns that ended with one line
# Beginnings of files of other kinds
OTHER_FILES = (b"", b"\0" * 99, b"\x89PNG\r\n\x1a\n", b"PK\x03\x04", b"\x1f\x8b\x08", b"\xff\xfe")
NESTED = "[" * 100_000

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["\ud800", "../..", "-1", "1e400", "\0", "None"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@st.composite
def damaged(draw, content: bytes) -> bytes:
    """The content with a part missing, doubled or overwritten, cut off, or replaced as a whole."""
    start = draw(st.integers(0, max(len(content) - 1, 0)))
    end = min(start + draw(st.integers(1, 40)), len(content))
    block = content[start:end]
    ways = {
        "cut off": b"",
        "missing": content[end:],
        "doubled": block + content[start:],
        "overwritten": draw(st.binary(min_size=len(block), max_size=len(block))) + content[end:],
        "flipped": bytes([(block or b"\0")[0] ^ 1 << draw(st.integers(0, 7))])
        + content[start + 1 :],
    }
    way = draw(st.sampled_from([*ways, "another file"]))
    if way == "another file":
        return draw(st.sampled_from(OTHER_FILES))
    return content[:start] + ways[way]


def read(function, *arguments, **options):
    """What `function` returns; REFUSED if it ends with one line. Anything else it raises fails."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return function(*arguments, **options)
    except SystemExit as end:
        message = str(end)
        assert message.strip() == message != "" and "\n" not in message, repr(message)
        assert "Traceback" not in errors.getvalue()
        return REFUSED


def parse(module, *argv):
    """The arguments of a script."""
    return communicators.parse_args(module.Args, module.check_args, [*map(str, argv)])


class Bomb:
    """Pickled, it makes a file when it is loaded."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return Path.touch, (Path(self.marker),)


# --- checkpoints and settings of a run ---


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run of the toy."""
    run_dir = tmp_path_factory.mktemp("whole")
    toy.main(parse(toy, "--run-dir", run_dir))
    return only_run(run_dir)


def parameters_of(folder):
    """All parameters of the toy's agents."""
    tensors = [torch.load(path).values() for path in sorted(folder.glob("agent_*.pt"))]
    return torch.cat([tensor.flatten() for each in tensors for tensor in each])


def resume_copy(whole, change):
    """Resume a copy of the run after `change(folder)`. Returns its parameters, or REFUSED."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(shutil.copytree(whole, Path(temporary, "run")))
        change(folder)
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        args = read(parse, toy, "--resume", folder, "--device", "cpu")
        result = REFUSED if args is REFUSED else read(toy.main, args)
        if result is REFUSED:
            assert before == {path: path.read_bytes() for path in before}
            return REFUSED
        return parameters_of(folder)


@sometimes
@given(data=st.data())
def test_a_damaged_checkpoint_never_becomes_parameters(whole, data):
    """The one before it is taken, or none; a refused resume changes no file.

    torch itself does not compare checksums.
    """
    content = (whole / "checkpoints/agent_1/6.pt").read_bytes()
    content = data.draw(damaged(content))
    change = lambda folder: (folder / "checkpoints/agent_1/6.pt").write_bytes(content)  # noqa: E731
    assert torch.equal(resume_copy(whole, change), parameters_of(whole))


@pytest.mark.parametrize("number", [1, 4, 40])
def test_bytes_around_a_checkpoint_are_found(whole, number):
    """Before it and behind it, where zipfile would pass over them."""
    content = (whole / "checkpoints/agent_1/6.pt").read_bytes()
    for around in (content[:number] + content, content + content[-number:]):
        change = lambda folder: (folder / "checkpoints/agent_1/6.pt").write_bytes(around)  # noqa: B023, E731
        assert torch.equal(resume_copy(whole, change), parameters_of(whole))


def test_flipped_bits_of_a_number_are_found(whole):
    """Also in the middle of a tensor, where nothing else could show it."""

    def flip(folder):
        path = folder / "checkpoints/agent_1/6.pt"
        weight = torch.load(path)["module"]["weight"]
        number = weight.numpy().tobytes()
        content = path.read_bytes()
        assert content.count(number) == 1
        flipped = bytes([number[0] ^ 1]) + number[1:]
        path.write_bytes(content.replace(number, flipped))
        assert not torch.equal(torch.load(path)["module"]["weight"], weight)  # torch takes it

    assert torch.equal(resume_copy(whole, flip), parameters_of(whole))


def compress(path):
    """The same archive with a compressed entry of 64 MB, which could as well be 64 GB."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data/0", bytes(2**26))


def test_a_checkpoint_that_grows_when_it_is_read_is_passed_over(whole):
    newest = "checkpoints/agent_1/6.pt"
    result = resume_copy(whole, lambda folder: compress(folder / newest))
    assert torch.equal(result, parameters_of(whole))


FOREIGN = {
    "a list": [1],
    "a number": 3,
    "no run": {"module": {}},
    "another network": {"run": {}, "module": torch.nn.Linear(3, 1).state_dict()},
    "no numbers": {"run": {"latest": {"x": "y"}}, "module": 3, "generator": "x"},
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_checkpoint_is_refused(name, whole):
    """All of it is there, but it is none of this run."""

    def replace(folder):
        content = FOREIGN[name]
        if isinstance(content, dict):
            content = torch.load(folder / "checkpoints/agent_1/6.pt") | content
            content = {
                key: value for key, value in content.items() if name != "no run" or key != "run"
            }
        for path in folder.glob("checkpoints/agent_1/*.pt"):
            torch.save(content, path)

    assert resume_copy(whole, replace) is REFUSED


def test_a_checkpoint_executes_nothing(whole, tmp_path):
    """Neither as an archive nor as a plain pickle."""
    marker = tmp_path / "marker"
    for save in (torch.save, functools.partial(torch.save, _use_new_zipfile_serialization=False)):
        for path in (tmp_path / "6.pt", tmp_path / "4.pt"):
            save({"module": Bomb(marker)}, path)

        def replace(folder):
            for name in ("4.pt", "6.pt"):
                shutil.copy(tmp_path / name, folder / "checkpoints/agent_1" / name)

        assert resume_copy(whole, replace) is REFUSED
        assert not marker.exists()
    torch.load(tmp_path / "6.pt", weights_only=False)
    assert marker.exists()  # it does, where it is allowed to


@often
@given(data=st.data())
def test_a_damaged_config_is_refused_or_means_the_same_kind_of_run(whole, data):
    content = data.draw(damaged((whole / "config.json").read_bytes()))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_bytes(content)
        args = read(parse, toy, "--resume", folder)
    assert args is REFUSED or all(
        type(value) in (type(getattr(toy.Args(), name)), int)
        for name, value in vars(args).items()
        if name != "wandb_entity"
    )


@pytest.mark.parametrize("module", [toy, prpo_minigrid, prpo_llm])
@sometimes
@given(data=st.data())
def test_a_foreign_command_is_refused_or_read(module, data):
    """Any JSON in its place, or any words, of which some would have tyro write a file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "file")
        flags = [f"--{name.replace('_', '-')}" for name in vars(module.Args())]
        word = st.sampled_from([*flags, "1", "None", "--help"]) | st.text(max_size=5)
        completion = st.just(["--tyro-write-completion", "bash", str(file)])
        command = data.draw(json_values | st.lists(word, max_size=4) | completion)
        config = {"script": Path(module.__file__).stem, "command": command}
        Path(folder, "config.json").write_text(json.dumps(config))
        # Only what is read, not what it would need
        args = read(communicators.read_run, module.Args(resume=folder))
        assert args is REFUSED or isinstance(args, module.Args)
        if module is toy:
            read(parse, toy, "--resume", folder)
        assert not file.exists()


def test_a_config_without_end_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(NESTED)
    assert read(parse, toy, "--resume", tmp_path) is REFUSED


@often
@given(
    number=st.integers(1, 5),
    junk=st.binary(max_size=20) | st.sampled_from([b'4,"', b"\r", b'"""', b"\xc2\xb2,1,2"]),
)
def test_a_damaged_line_of_a_log_costs_no_other(number, junk):
    """Not even one that opens a quotation, or has a number that is none."""
    lines = [b"iteration,agent,x", *(b"%d,0,0.5" % k for k in range(1, 6))]
    lines[number] = junk
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary, "metrics.csv")
        path.write_bytes(b"\r\n".join([*lines, b""]))
        run = SimpleNamespace(folder=Path(temporary), iteration=4)
        communicators.Run._open_csv(run, "metrics.csv", 4).close()
        kept = path.read_bytes().split(b"\r\n")
    for k, line in enumerate(lines):
        if k not in (number, 5):
            assert kept.count(line) == 1


@sometimes
@given(data=st.data())
def test_damaged_weights_are_not_played(data):
    """They are refused, or finite numbers of these tasks."""
    agent = torch.nn.Linear(2, 1)
    content = data.draw(damaged(safetensors.torch.save(agent.state_dict())))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "agent_0.safetensors").write_bytes(content)
        script = SimpleNamespace(make_agents=lambda args: [agent])
        args = SimpleNamespace(device="cpu")
        if read(play.load_agents, script, args, {}, play.Args(folder)) is not REFUSED:
            assert all(weight.isfinite().all() for weight in agent.state_dict().values())


@often
@given(held=json_values | st.lists(st.integers(-1, 2), max_size=2))
def test_a_damaged_list_of_agents_plays_nobody_else(held):
    """A run under federate.py, whose config.json names the agents that it held, is played."""
    agents = [torch.nn.Linear(2, 1) for _ in range(2)]
    script = SimpleNamespace(make_agents=lambda args: agents)
    args = SimpleNamespace(device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        for i, agent in enumerate(agents):
            safetensors.torch.save_file(agent.state_dict(), Path(folder, f"agent_{i}.safetensors"))
        loaded = read(play.load_agents, script, args, {"agents": held}, play.Args(folder))
    if loaded is not REFUSED:
        assert loaded.keys() <= {0, 1}
        assert all(agent is agents[i] for i, agent in loaded.items())


# --- matrices ---

numbers = st.floats(width=16) | st.sampled_from([0.0, 0.5, 1.0])
tables = st.lists(st.lists(numbers, max_size=3), max_size=3).map(
    lambda rows: "\n".join(",".join(map(str, row)) for row in rows).encode()
)


@often
@given(content=tables | st.binary(max_size=50) | damaged(b"0.5,0.5\n0.25,0.75\n"))
def test_what_is_no_matrix_is_refused(content):
    """What is read is on the simplex, and of the right size."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "matrix.csv")
        path.write_bytes(content)
        args = parse(toy, "--communicator", path, "--num-agents", 2, "--run-dir", folder)
        weights = Path(folder, "weights.csv")
        weights.write_bytes(content)
        args_llm = prpo_llm.Args(
            num_agents=2, reward=("a.b", "rouge"), reward_weights=(str(weights),)
        )
        with contextlib.suppress(SystemExit):
            prpo_llm.check_rewards(args_llm)
            assert torch.tensor(prpo_llm.get_reward_weights(args_llm)).isfinite().all()
    # What it held when the arguments were read is there without the file
    C = read(communicators.load_matrix, args)
    if C is not REFUSED:
        assert C.shape == (2, 2) and (C >= 0).all()
        torch.testing.assert_close(C.sum(1), torch.ones(2))


@often
@given(text=st.text(max_size=9) | st.sampled_from(["1 0; 0 1", "1; 0", "1 0; 0 nan", "2 -1; 0 1"]))
def test_a_stored_matrix_is_checked_again(text):
    """config.json holds it as text, and may be someone else's."""
    args = toy.Args(num_agents=2, communicator="gone.csv", communicator_matrix=text)
    C = read(communicators.load_matrix, args)
    if C is not REFUSED:
        assert C.tolist() == [[1, 0], [0, 1]]
    args = prpo_llm.Args(num_agents=2, reward_weights=("gone.csv",), reward_matrix=text or " ")
    read(prpo_llm.check_rewards, args)


def test_a_matrix_is_not_downloaded(monkeypatch):
    """numpy.loadtxt would."""
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: pytest.fail("opened"))
    for url in ("http://127.0.0.1/matrix.csv", "file:///etc/hostname"):
        assert read(parse, prpo_minigrid, "--communicator", url) is REFUSED


# --- language models: data, adapters, base and reward models ---


@pytest.fixture(scope="module")
def tokenizer(files):
    return transformers.AutoTokenizer.from_pretrained(files / "model")


TEMPLATE = (
    "{% for message in messages %}{% if message.role not in ('user', 'assistant') %}"
    "{{ raise_exception('no such role') }}{% endif %}{{ message.content }} {% endfor %}"
)


def read_data(files, tokenizer, path):
    """The examples of a data set, or REFUSED."""
    args = tiny(files, "runs", dataset=str(path))
    return read(prpo_llm.read_examples, args, tokenizer, str(path), str(path), "dataset")


messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]) | json_values})
    | st.fixed_dictionaries({"role": st.just("user"), "content": st.text(max_size=3) | json_values})
    | json_values,
    max_size=2,
)


@often
@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {"prompt": st.just("a b") | messages | json_values},
            optional={"completion": st.just("a") | messages | json_values, "topic": json_values},
        ),
        max_size=3,
    ),
    chat=st.booleans(),
)
def test_rows_that_are_no_texts_are_refused(files, tokenizer, rows, chat):
    """What is read has a text in Unicode in every prompt and completion."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = TEMPLATE if chat else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prpo_llm, "read_rows", lambda _: rows)
        examples = read_data(files, tokenizer, "rows")
    if examples is not REFUSED:
        examples, _ = examples
        assert len(examples) <= len(rows)
        for example in examples:
            (example["prompt"] + example["completion"] + example["topic"]).encode()


@sometimes
@given(data=st.data())
def test_damaged_lines_of_data_are_refused(files, tokenizer, data):
    content = (files / "data.jsonl").read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "data.jsonl")
        path.write_bytes(data.draw(damaged(content)))
        read_data(files, tokenizer, path)


BAD_DATA = {
    "nested.jsonl": NESTED.encode(),
    "large number.jsonl": b'{"prompt": ' + b"9" * 5000 + b"}",
    "half a pair.jsonl": b'{"prompt": "a \\ud800", "completion": "b"}',
    "folder/train.parquet": b"PAR1 and no more",
    "folder/train.csv": b'"\0',
    "folder/train.json": b"{",
    "folder/data.pkl": b"cos\nsystem\n(S'true'\ntR.",
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_data_that_cannot_be_read_is_refused(name, files, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(BAD_DATA[name])
    dataset = path.parent if path.parent != tmp_path else path
    assert read_data(files, tokenizer, dataset) is REFUSED


def test_data_executes_nothing(files, tokenizer, tmp_path):
    """A script that would load it, as older versions of `datasets` execute."""
    marker = tmp_path / "marker"
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "data.py").write_text(f"open({str(marker)!r}, 'w')\n")
    (folder / "train.pkl").write_bytes(pickle.dumps(Bomb(marker)))
    assert read_data(files, tokenizer, folder) is REFUSED
    assert not marker.exists()


@pytest.fixture(scope="module")
def model(files):
    """The tiny model, without adapters."""
    return prpo_llm.load_base(tiny(files, "runs"))[0]


@pytest.fixture(scope="module")
def adapter(files, model, tmp_path_factory):
    """A folder with an adapter of the tiny model."""
    folder = tmp_path_factory.mktemp("adapter")
    args = tiny(files, "runs")
    model = copy.deepcopy(model)
    prpo_llm.add_adapters(args, model, 1)
    prpo_llm.save_adapter(args, model, 0, folder)
    return folder


def start_from(files, model, folder, flag):
    """The parameters that start from the adapter of a folder, of the policy or the value model."""
    changes = {flag: str(folder)}
    if flag == "value_init":
        changes |= {"algorithm": "ppo", "group_size": 1}
    args = tiny(files, "runs", lora_alpha=8, **changes)
    check = prpo_llm.check_adapters if flag == "adapter" else prpo_llm.check_training
    check(args)
    return prpo_llm.add_adapters(args, copy.deepcopy(model), 1)[0]


@pytest.mark.parametrize("flag", ["adapter", "value_init"])
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
@settings(max_examples=15)
@given(data=st.data())
def test_damaged_adapters_are_refused_or_finite(flag, name, files, model, adapter, data):
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(shutil.copytree(adapter, Path(temporary, "adapter")))
        (folder / name).write_bytes(data.draw(damaged((adapter / name).read_bytes())))
        trained = read(start_from, files, model, folder, flag)
    assert trained is REFUSED or trained.isfinite().all()


BAD_CONFIGS = ("[]", NESTED, '{"r": 0}', '{"r": "4"}', '{"lora_alpha": null}', '{"r": 4.5}')


@pytest.mark.parametrize("flag", ["adapter", "value_init"])
def test_adapters_with_a_bad_config_or_too_large_are_refused(flag, files, model, adapter, tmp_path):
    folder = Path(shutil.copytree(adapter, tmp_path / "adapter"))
    for config in BAD_CONFIGS:
        (folder / "adapter_config.json").write_text(config)
        assert read(start_from, files, model, folder, flag) is REFUSED
    shutil.copy(adapter / "adapter_config.json", folder)
    with open(folder / "adapter_model.safetensors", "ab") as file:
        file.truncate(2**30)  # a gigabyte, of which the disk stores nothing
    assert read(start_from, files, model, folder, flag) is REFUSED


@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"],
)
@settings(max_examples=10)
@given(data=st.data())
def test_a_damaged_base_model_is_refused_or_whole(name, files, data):
    """Without weights that are missing, which would be drawn at random."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(shutil.copytree(files / "model", Path(temporary, "model")))
        (folder / name).write_bytes(data.draw(damaged((folder / name).read_bytes())))
        read(prpo_llm.load_base, tiny(files, "runs", base_model=str(folder)))
        args = tiny(files, "runs")
        read(prpo_llm.load_reward_model, args, str(folder), torch.device("cpu"))


def test_a_base_model_without_some_weights_is_refused(files, tmp_path):
    folder = Path(shutil.copytree(files / "model", tmp_path / "model"))
    config = config_of(folder)
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    assert read(prpo_llm.load_base, tiny(files, "runs", base_model=str(folder))) is REFUSED


def test_models_execute_nothing(files, adapter, tmp_path):
    """Neither pickled weights nor code that a configuration names."""
    marker = tmp_path / "marker"
    folder = Path(shutil.copytree(files / "model", tmp_path / "model"))
    (folder / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Bomb(marker)}, folder / "pytorch_model.bin")
    args = tiny(files, "runs", base_model=str(folder))
    assert read(prpo_llm.load_base, args) is REFUSED
    assert read(prpo_llm.load_reward_model, args, str(folder), torch.device("cpu")) is REFUSED
    config = config_of(folder)
    names = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    config |= {"auto_map": names, "model_type": "evil"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    assert read(prpo_llm.load_base, args) is REFUSED
    pickled = Path(shutil.copytree(adapter, tmp_path / "adapter"))
    (pickled / "adapter_model.safetensors").rename(pickled / "old")
    torch.save({"x": Bomb(marker)}, pickled / "adapter_model.bin")
    assert read(prpo_llm.check_adapters, tiny(files, "runs", adapter=str(pickled))) is REFUSED
    assert not marker.exists()


@often
@given(
    metadata=st.dictionaries(st.sampled_from(["step", "reward", "prompts"]), st.text(max_size=4))
)
def test_a_header_without_a_reward_is_none(metadata):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "adapter_model.safetensors")
        safetensors.torch.save_file({"x": torch.zeros(1)}, path, metadata)
        assert isinstance(prpo_llm.read_best_reward(Path(folder), 5, 5), float)


# --- servers ---


class Response(io.BytesIO):
    """A server's response, which never ends."""

    length = None  # of what is left: unknown

    def read(self, size=None):
        assert size is not None, "reads without a limit"
        return super().read(size)


choices = st.fixed_dictionaries(
    {},
    optional={
        "index": json_values,
        "message": st.fixed_dictionaries({"content": json_values}) | json_values,
        "logprobs": st.fixed_dictionaries({"tokens": json_values, "token_logprobs": json_values})
        | json_values,
        "token_ids": st.lists(st.integers(), max_size=3) | json_values,
        "finish_reason": json_values,
    },
)
bodies = st.fixed_dictionaries({"choices": st.lists(choices | json_values, max_size=2)})
bodies = (bodies | json_values | st.fixed_dictionaries({"data": json_values})).map(
    lambda body: json.dumps(body).encode()
) | st.sampled_from([b"", b"\xff\xff", NESTED.encode()])


@often
@given(body=bodies)
def test_no_answer_of_a_server_ends_in_a_traceback(body):
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr("urllib.request.urlopen", lambda *_, **__: Response(body))
        args = judge.Args(
            runs=(), server="http://x", model="m", cache=f"{folder}/cache", retries=0, wait=0
        )
        with contextlib.suppress(judge.NoAnswer):
            answer, finish = judge.Judge(args).post("?")
            assert isinstance(answer, str) and isinstance(finish, str)
        args = prpo_llm.Args(generate_with="http://x", response_length=3)
        server = prpo_llm.Server(args, range(1), SimpleNamespace(ends=[0]))
        with contextlib.suppress(prpo_llm.ServerError):
            for ids, values in server.request_completions("name", [1], torch.zeros(1, 3), 1.0):
                torch.tensor(ids), torch.tensor(values)
        run = SimpleNamespace(folder=Path(folder), name="run")
        with contextlib.suppress(prpo_llm.ServerError):
            server.unload_leftovers(run)
        assert server.is_sleeping() in (True, False, None)


# --- tools ---


@often
@given(data=st.data())
def test_a_damaged_cache_of_answers_loses_what_is_damaged(data):
    """A line on stderr says so; every other answer is there."""
    rows = [{"key": f"k{n}", "answer": str(n), "finish": "stop"} for n in range(3)]
    lines = [json.dumps(row).encode() for row in rows]
    number = data.draw(st.integers(0, 2))
    lines[number] = data.draw(damaged(lines[number]) | st.just(NESTED.encode()))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cache")
        path.write_bytes(b"\n".join(lines))
        args = judge.Args(runs=(), server="http://x", model="m", cache=str(path))
        answers = judge.Judge(args).answers
    expected = {f"k{n}": (str(n), "stop") for n in range(3) if n != number}
    assert answers.items() >= expected.items()
    assert all(isinstance(answer, str) for answer, _ in answers.values())


RUN_FILES = ("summary.json", "config.json", "metrics.csv", "evaluations.csv")


@pytest.mark.parametrize("name", RUN_FILES)
@sometimes
@given(data=st.data())
def test_a_damaged_run_costs_no_other(name, data):
    """It is left out with a line, or means something else; the tables have the others."""
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        good = control_run(root, 1, [0.1, 0.2])
        bad = control_run(root, 2, [0.3, 0.4], stamp=2)
        content = data.draw(damaged((bad / name).read_bytes()))
        if name.endswith(".json"):
            content = data.draw(
                st.just(content) | json_values.map(lambda v: json.dumps(v).encode())
            )
        (bad / name).write_bytes(content)
        whole = read(runs.read_runs, (temporary,))
        if whole is REFUSED:  # its settings have become others, which a line says
            return
        folders = [run.folder for run in whole]
        assert good in folders
        assert {*folders} <= {good, bad}
        assert str(good) in set(runs.load_runs(temporary).run)
        with contextlib.redirect_stdout(io.StringIO()):
            read(table.main, table.Args(runs=(temporary,)))
            read(table.main, table.Args(runs=(temporary,), search=True, measure="auc"))


@often
@given(text=st.text(max_size=30))
@example(text=' "')
def test_any_text_is_a_list_of_commands_or_refused(text):
    for command in text.splitlines():
        job = read(run_tool.Job, command.strip())  # as `main` has it
        if job is not REFUSED:
            job.next_step()


@often
@given(summary=json_values.map(json.dumps) | st.just(NESTED) | st.just('{"completed": [}'))
def test_a_damaged_summary_does_not_finish_a_command(summary):
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        run.mkdir()
        (run / "summary.json").write_text(summary)
        job = run_tool.Job(f"python x.py --run-dir {folder}")
        job.log.parent.mkdir()
        job.log.write_text(f"{run}: 3 agents on cpu\n")
        assert job.next_step() is not None


@often
@given(content=st.binary(max_size=20) | damaged(b'{"step": 1, "agent": 0, "task": "a"}\n' * 2))
def test_logs_and_data_of_tools_are_read_or_refused(content):
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in ("completions.jsonl", "settings.json", "pairs.jsonl", "table.csv"):
            (folder / name).write_bytes(content)
        assert read(judge.read_completions, folder) is REFUSED
        read(skills.read_rates, folder, {"seed": 1})
        read(pipeline.read_rows, str(folder / "pairs.jsonl"))
        rows = read(runs.read_table, folder / "table.csv")
        assert rows is REFUSED or isinstance(rows, pd.DataFrame)


# --- faults while a run is going on ---


def test_a_disk_that_is_full_in_the_middle_of_a_file_says_so(tmp_path):
    """torch.save hides that error behind one of its own."""
    path = tmp_path / "6.pt"
    path.write_bytes(b"old")
    temporary = tmp_path / "6.pt.tmp"
    temporary.symlink_to("/dev/full")
    write = functools.partial(torch.save, {"x": torch.zeros(10_000)})
    with pytest.raises(OSError, match="No space left"):
        communicators.write_atomically(path, write)
    assert path.read_bytes() == b"old"
    assert not temporary.is_symlink()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files")
def test_a_run_that_is_disturbed_is_the_same_run(tmp_path, capsys):
    """The short version of benchmark/soak.py."""
    faults = {"kills": 2, "full_disks": 1, "read_only": 0}
    with pytest.raises(SystemExit) as end:
        soak.main(soak.Args(**faults, out=str(tmp_path), seed=3))
    output = capsys.readouterr().out
    assert end.value.code == 0, output
    assert "1 x full disk, 2 x kill: the same run" in output


def test_bandit_finds_nothing():
    pytest.importorskip("bandit")
    result = call("-m", "bandit", "-q", "-c", "pyproject.toml", "-r", ".", cwd=REPOSITORY)
    assert result.returncode == 0, result.stdout
