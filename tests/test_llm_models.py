"""Language models of many families: the plain model's log-probabilities, or one line with the
reason why not.
"""

import importlib
import json
import shlex
import shutil
import subprocess
import sys
import weakref

import pandas as pd
import pytest
import torch
import torch.nn as nn
import transformers
import tyro
from command import parse_args
from helpers import REPOSITORY, refusal, table_of
from language_models import WORDS, follow, layers_of, rows_of, train, word_tokenizer
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import is_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import communicators
import prpo_llm

sys.path.insert(0, str(REPOSITORY / "benchmark"))
llm_memory = importlib.import_module("llm_memory")

PROMPT = 10
RESPONSE = 6  # tokens of the longest row: the last one of a completion predicts nothing
LONGEST = PROMPT + RESPONSE - 1
SHAPE = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "head_dim": 8,
}
SHAPE |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
SHAPE |= {"eos_token_id": 0, "bos_token_id": None}
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PHI3 = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
NEOX = ("query_key_value", "dense", "dense_4h_to_h")
SLIDING = {"layer_types": ["sliding_attention", "full_attention"]}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
FAMILIES = {  # configuration, what it is given, layers with adapters
    "llama": ("Llama", {}, ALL),
    "llama with dynamic positions": (
        "Llama",
        {"max_position_embeddings": 16, "rope_parameters": DYNAMIC},
        ALL,
    ),
    "qwen2": ("Qwen2", {}, ALL),
    "qwen3": ("Qwen3", {}, ALL),
    "gemma3": ("Gemma3Text", {**SLIDING, "sliding_window": LONGEST}, ALL),
    "gemma3 with capped logits": ("Gemma3Text", {**SLIDING, "final_logit_softcapping": 2.0}, ALL),
    "gemma2 with capped logits": (
        "Gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": 2.0},
        ALL,
    ),
    "olmo2": ("Olmo2", {}, ALL),
    "phi3": ("Phi3", {}, PHI3),
    "gpt-neox": ("GPTNeoX", {"num_key_value_heads": 4}, NEOX),
    "cohere": ("Cohere", {"logit_scale": 0.0625}, ALL),
    "granite": (
        "Granite",
        {"logits_scaling": 8.0, "attention_multiplier": 0.2, "embedding_multiplier": 3.0},
        ALL,
    ),
    "mistral": ("Mistral", {"sliding_window": LONGEST}, ALL),
    "qwen2 with windows": (
        "Qwen2",
        {**SLIDING, "use_sliding_window": True, "sliding_window": LONGEST},
        ALL,
    ),
    "phi3 with windows": ("Phi3", {"sliding_window": LONGEST}, PHI3),
}
GPTJ = {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 64}
MIXED = {"layer_types": ["linear_attention", "full_attention"]}
REFUSED = {
    "gemma2": ("Gemma2", {}, "soft-capping or sinks"),
    "gpt-oss": (
        "GptOss",
        {"num_local_experts": 2, "num_experts_per_tok": 1},
        "soft-capping or sinks",
    ),
    "lfm2": (
        "Lfm2",
        {"layer_types": ["conv", "full_attention"]},
        "layers of conv are not supported",
    ),
    "qwen3.5": ("Qwen3_5Text", MIXED, "layers of linear_attention are not supported"),
    "mistral": ("Mistral", {"sliding_window": LONGEST - 1}, "reaches 14 tokens back, rows have 15"),
    "qwen2": (
        "Qwen2",
        {**SLIDING, "use_sliding_window": True, "sliding_window": LONGEST - 1},
        "reaches 14 tokens",
    ),
    "gemma3": (
        "Gemma3Text",
        {**SLIDING, "sliding_window": LONGEST - 1},
        "reaches 14 tokens back, rows have 15",
    ),
    "phi3": ("Phi3", {"sliding_window": LONGEST - 1}, "reaches 14 tokens back, rows have 15"),
    "a scale that we do not know": (
        "HyperCLOVAX",
        {"logits_scaling": 0.25},
        "log-probabilities are off by",
    ),
    "dynamic positions": (
        "Llama",
        {"max_position_embeddings": 15, "rope_parameters": DYNAMIC},
        "beyond 15 tokens its",
    ),
    "gpt-j": ("GPTJ", GPTJ, "its attention cannot be replaced"),
    "mamba": ("Mamba", {}, ""),
    "bloom": ("Bloom", {}, ""),
}


def save(folder, config, **generation):
    """A random model of this configuration, far from uniform, with the tokenizer of 27 words."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    for name, value in generation.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


def config_of(family, changes):
    shape = (
        SHAPE
        if changes is not GPTJ
        else {"vocab_size": len(WORDS), "eos_token_id": 0, "bos_token_id": None}
    )
    return getattr(transformers, f"{family}Config")(**shape | changes)


def settings(folder, **changes):
    """Settings for this model, with rows of at most LONGEST tokens."""
    sizes = {
        "max_prompt_tokens": PROMPT,
        "response_length": RESPONSE,
        "batch_size": 2,
        "group_size": 3,
    }
    base = {
        "base_model": str(folder),
        "precision": "float32",
        "num_agents": 2,
        "lora_rank": 4,
        "temperature": 1.0,
    }
    return prpo_llm.Args(**base | sizes | changes)


def adapted(args):
    """(model, tokenizer) with random adapters of two agents."""
    model, tokenizer = prpo_llm.load_base(args)
    prpo_llm.add_adapters(args, model, 2)
    torch.manual_seed(1)
    for layer in layers_of(model).values():
        for side in (layer.A["policy"], layer.B["policy"]):
            nn.init.normal_(side, std=0.3)
    return model, tokenizer


def plain_log_probs(args, model, agent, ids):
    """transformers' log-probabilities of a sequence with an agent's adapter merged into the
    weights: [tokens, vocabulary]."""
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    plain = transformers.AutoModelForCausalLM.from_pretrained(args.base_model, **options).eval()
    for name, layer in layers_of(model).items():
        product = layer.B["policy"][agent] @ layer.A["policy"][agent]
        plain.get_submodule(name).weight.data += args.lora_alpha / args.lora_rank * product.detach()
    with torch.no_grad():
        return [plain(torch.tensor([row])).logits[0].log_softmax(-1) for row in ids]


PROMPTS = [
    [3, 7, 1, 9, 4, 4, 8, 2, 6, 11],
    [5, 2, 12],
    [8, 8, 6, 1, 20],
    [10, 13, 7, 7, 2, 9, 1, 5, 3, 3],
]


def assert_equal_to_plain(args):
    """Log-probabilities of padded prompts with groups, and greedy completions with the shared
    cache."""
    model, _ = adapted(args)
    # [agents, prompts, group]
    lengths = torch.tensor([[[6, 1, 3], [2, 6, 6]], [[1, 4, 2], [5, 6, 3]]])
    tokens = torch.randint(
        1, len(WORDS), (2, 2, 3, RESPONSE), generator=torch.Generator().manual_seed(2)
    )
    with torch.no_grad(), prpo_llm.select_adapters("policy"):
        hidden = prpo_llm.compute_hidden(
            model, {"prompts": PROMPTS, "tokens": tokens, "lengths": lengths}
        )
        log_probs = prpo_llm.compute_log_probs(args, model, hidden)
        generated, *_ = prpo_llm.generate(
            model, PROMPTS, torch.zeros(4, 2, RESPONSE), [-1], temperature=0.0
        )
    for agent in range(2):
        cases = [(p, g) for p in range(2) for g in range(3)]
        rows = [
            PROMPTS[2 * agent + p] + tokens[agent, p, g, : lengths[agent, p, g]].tolist()
            for p, g in cases
        ]
        greedy = [PROMPTS[2 * agent + p] + generated[2 * agent + p, 1].tolist() for p in range(2)]
        plain = plain_log_probs(args, model, agent, rows + greedy)
        for (p, g), expected in zip(cases, plain, strict=False):
            length = int(lengths[agent, p, g])
            torch.testing.assert_close(
                log_probs[agent, p, g, :length], expected[-length - 1 : -1], rtol=0, atol=1e-4
            )
        for row, expected in zip(greedy, plain[6:], strict=True):
            chosen = expected[-RESPONSE - 1 : -1]
            best = chosen.gather(1, torch.tensor(row[-RESPONSE:])[:, None])[:, 0]
            torch.testing.assert_close(best, chosen.amax(-1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", FAMILIES)
def test_families_with_the_log_probabilities_of_the_plain_model(case, tmp_path):
    """Scales and caps of logits are applied, windows that no row leaves do not matter, fused layers
    have adapters."""
    family, changes, targets = FAMILIES[case]
    assert_equal_to_plain(
        settings(save(tmp_path, config_of(family, changes)), lora_targets=targets)
    )


def test_the_language_model_of_a_multimodal_checkpoint(tmp_path):
    """Gemma 3 with a vision tower, whose layers are called alike and get no adapters."""
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    vision |= {"image_size": 28, "patch_size": 14}
    text = config_of("Gemma3Text", {**SLIDING, "sliding_window": LONGEST})
    outer = {
        "mm_tokens_per_image": 4,
        "image_token_index": 26,
        "boi_token_index": 25,
        "eoi_token_index": 24,
    }
    config = transformers.Gemma3Config(
        text_config=text.to_dict(), vision_config=vision, eos_token_id=0, **outer
    )
    args = settings(save(tmp_path, config), lora_targets=ALL, algorithm="ppo")
    assert_equal_to_plain(args)
    model, _ = adapted(args)
    assert model.value_head.shape == (2, 32) and not any(
        "vision" in name for name in layers_of(model)
    )


@pytest.mark.parametrize("case", REFUSED)
def test_families_that_are_refused(case, tmp_path):
    """In one line, at the start, which names the model."""
    family, changes, reason = REFUSED[case]
    args = settings(save(tmp_path, config_of(family, changes)))
    message = refusal(prpo_llm.load_base, args)
    assert message.startswith(f"--base-model {tmp_path}: cannot be") and reason in message


def attend_to_nothing(self, layer, query, key, value, scale):
    """A result that no token of the row has any influence on."""
    return torch.zeros_like(query)


def attend_to_the_future(self, layer, query, key, value, scale):
    """Every token sees the whole row."""
    shared = query.shape[1] // key.shape[1]
    keys, values = (tensor.repeat_interleave(shared, dim=1) for tensor in (key, value))
    return nn.functional.scaled_dot_product_attention(query, keys, values, scale=scale)


def forget_the_newest(self, layer, query, key, value, scale):
    """The newest token is left out in generation."""
    if not self.in_prompts:
        self.unseen[1][int(self.step)] = True
    return ATTEND_IN_GENERATION(self, layer, query, key, value, scale)


ATTEND_IN_GENERATION = prpo_llm.DecodingGroups.attend
BROKEN = {
    "training sees nothing": (prpo_llm.Groups, attend_to_nothing, "training"),
    "training sees the future": (prpo_llm.Groups, attend_to_the_future, "training"),
    "sampling sees nothing": (prpo_llm.DecodingGroups, attend_to_nothing, "sampling"),
    "sampling forgets a token": (prpo_llm.DecodingGroups, forget_the_newest, "sampling"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_the_start_compares_with_a_model_that_does_not_run_our_code(case, tmp_path, monkeypatch):
    """Whatever is wrong with our attention is found before a run begins, in training and in
    sampling."""
    owner, broken, place = BROKEN[case]
    args = settings(save(tmp_path, config_of("Llama", {})))
    prpo_llm.load_base(args)
    monkeypatch.setattr(owner, "attend", broken)
    message = refusal(prpo_llm.load_base, args)
    assert "log-probabilities are off by" in message and message.endswith(f"in {place}")


def biased(folder, bias):
    """A Qwen 2 whose keys have a bias that adds the same to all scores of a head, in bfloat16."""
    changes = {"num_hidden_layers": 4, "hidden_size": 128, "head_dim": 64}
    changes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    save(folder, config_of("Qwen2", changes))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for layer in model.model.layers:
        for slow in (31, 63):  # the pair that positions turn least
            layer.self_attn.k_proj.bias.data[slow] = bias
            layer.self_attn.q_proj.bias.data.view(2, 64)[:, slow] = 8.0
    model.save_pretrained(folder)
    return settings(folder, precision="bfloat16", response_length=24)


def multiply_and_round(a, b):
    """A product that is rounded as its first factor is."""
    return (a.float() @ b.float()).to(a.dtype).float()


def measure_sampling_gap(args):
    """The mean distance of the sampler's log-probabilities from those of training."""
    model, _ = adapted(args)
    uniforms = torch.rand(4, 8, 24, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), prpo_llm.select_adapters("policy"):
        tokens, lengths, sampled = prpo_llm.generate(model, PROMPTS, uniforms, [-1], 1.0)
        shape = (2, 2, 8)
        batch = {"prompts": PROMPTS, "tokens": tokens.view(*shape, -1)}
        batch["lengths"] = lengths.view(shape)
        hidden = prpo_llm.compute_hidden(model, batch).flatten(0, 1)
        log_probs = prpo_llm.compute_logits(model, hidden).log_softmax(-1)
        trained = prpo_llm.gather_log_probs(log_probs, tokens)
    return (trained - sampled).abs().mean().item()


def test_large_key_biases_do_not_separate_sampler_and_trainer(tmp_path, monkeypatch):
    """Scores that are rounded to bfloat16 lose what distinguishes tokens where all are large; the
    start refuses such a sampler."""
    plain = measure_sampling_gap(biased(tmp_path / "plain", 0.0))
    args = biased(tmp_path / "biased", 72.0)
    assert measure_sampling_gap(args) < 2 * plain
    monkeypatch.setattr(prpo_llm, "multiply_in_float32", multiply_and_round)
    assert refusal(prpo_llm.load_base, args).endswith("in sampling")
    monkeypatch.setattr(prpo_llm, "compare_with_plain", lambda *_: None)
    assert measure_sampling_gap(args) > 4 * plain


def scaled_attention(monkeypatch, factor, dtypes):
    """Make our attention in training wrong by a factor, in these precisions."""
    attend = prpo_llm.Groups.attend

    def wrong(self, layer, query, *rest):
        return attend(self, layer, query, *rest) * (factor if query.dtype in dtypes else 1.0)

    monkeypatch.setattr(prpo_llm.Groups, "attend", wrong)


def test_the_start_finds_small_errors_and_accepts_rounding(tmp_path, monkeypatch):
    """In bfloat16 a model may round more than an error is large: the same weights in float32
    separate the two."""
    config = config_of("Llama", {"num_hidden_layers": 6})
    args = settings(save(tmp_path, config), precision="bfloat16")
    louder = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    louder.lm_head.weight.data *= 6
    louder.save_pretrained(tmp_path)
    model, _ = prpo_llm.load_base(args)
    kept = {name: parameter.clone() for name, parameter in model.named_parameters()}
    model.set_attn_implementation("eager")
    with torch.no_grad(), prpo_llm.in_float32(model):
        inside = []
        model.model.layers[1].mlp.register_forward_hook(
            lambda layer, x, y: inside.append((y.dtype, len(wide())))
        )
        wide = lambda: [p for p in model.parameters() if p.dtype == torch.float32]  # noqa: E731
        row = torch.tensor([PROMPTS[0]])
        exact = model(input_ids=row, use_cache=False).logits.log_softmax(-1)
    # The head, and one layer
    assert inside == [(torch.float32, 1 + len([*model.model.layers[1].parameters()]))]
    assert all(torch.equal(parameter, kept[name]) for name, parameter in model.named_parameters())
    assert all(parameter.dtype == kept[name].dtype for name, parameter in model.named_parameters())
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16
    ).float()
    with torch.no_grad():
        torch.testing.assert_close(exact, plain(row).logits.log_softmax(-1), rtol=0, atol=1e-4)
        rounded = model(input_ids=row, use_cache=False).logits.log_softmax(-1)
    assert (rounded - exact).abs().mean() > 0.1  # more than was accepted of any model
    for factor, dtypes in ((0.99, [torch.float32]), (0.5, [torch.bfloat16])):
        with monkeypatch.context() as patch:
            scaled_attention(patch, factor, dtypes)
            assert "log-probabilities are off by" in refusal(prpo_llm.load_base, args)
    scaled_attention(monkeypatch, 1.0, [torch.bfloat16])
    prpo_llm.load_base(args)


def test_weights_go_to_the_device_without_a_copy_elsewhere(tmp_path, monkeypatch):
    """What `from_pretrained` receives, of the base and of reward models."""
    args = settings(save(tmp_path, config_of("Llama", {})))
    received = []

    def record(name, **options):
        received.append(options)
        raise KeyboardInterrupt  # errors would end in one line

    for library in (
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForSequenceClassification,
    ):
        monkeypatch.setattr(library, "from_pretrained", record)
    for function, more in (
        (prpo_llm.load_base, ()),
        (prpo_llm.load_reward_model, (str(tmp_path),)),
    ):
        with pytest.raises(KeyboardInterrupt):
            function(args, *more, torch.device("cuda:1"))
    assert [options["device_map"] for options in received] == [{"": torch.device("cuda:1")}] * 2
    assert [options["dtype"] for options in received] == [torch.float32] * 2


def test_ranks_wait_for_all_after_loading_and_before_a_collective(files, tmp_path, monkeypatch):
    """One rank may load for longer than the time-out of a collective."""
    calls = []

    def record(owner, name):
        function = getattr(owner, name)

        def recorded(*args, **options):
            calls.append(name)
            return function(*args, **options)

        monkeypatch.setattr(owner, name, recorded)

    for name in ("make_reward", "load_base", "deal"):
        record(prpo_llm, name)
    for name in ("wait_for_all", "broadcast", "all_gather", "barrier"):
        record(communicators.Exchange, name)
    train(files, tmp_path, total_steps=1, eval_prompts=0)
    assert calls[:5] == ["deal", "make_reward", "load_base", "wait_for_all", "broadcast"]


# --- memory ---


def test_references_keep_the_copies_of_one_turn_only(tmp_path, monkeypatch):
    """Five agents that all receive each other's snapshots: never more than one set of adapters in
    the precision of the base."""
    args = settings(
        save(tmp_path, config_of("Llama", {})), num_agents=5, precision="bfloat16", sft_anchor=0.1
    )
    model, _ = prpo_llm.load_base(args)
    prpo_llm.add_adapters(args, model, 5)
    tokens = torch.randint(
        1, len(WORDS), (5, 2, 3, RESPONSE), generator=torch.Generator().manual_seed(2)
    )
    batch = {
        "prompts": PROMPTS[:2] * 5,
        "tokens": tokens,
        "lengths": torch.full((5, 2, 3), RESPONSE),
    }
    batch["mask"] = torch.ones(5, 2, 3, RESPONSE, dtype=torch.bool)
    predict = prpo_llm.compute_hidden
    numbers = []

    def counted(*arguments):
        hidden = predict(*arguments)
        numbers.append(len(prpo_llm.Adapters.selection.casts))
        return hidden

    monkeypatch.setattr(prpo_llm, "compute_hidden", counted)
    reference = prpo_llm.choose_reference(args, range(5), torch.full((5, 5), 0.2))
    references = prpo_llm.compute_references(args, model, reference, batch)
    # Two micro-batches of the policy, the five senders and the anchor
    assert references["peers"].shape[2] == 5 and len(numbers) == 2 * 7
    assert {*numbers} == {len(layers_of(model))}
    assert prpo_llm.Adapters.selection is None


def test_evaluations_fill_the_memory_of_a_rollout(files, tmp_path, monkeypatch):
    """A group shares its prompt; in an evaluation every completion has one of its own."""
    sizes = {"batch_size": 4, "group_size": 8, "max_prompt_tokens": 300, "response_length": 58}
    assert prpo_llm.choose_evaluation_batch_size(prpo_llm.Args(**sizes)) == 8
    assert prpo_llm.choose_evaluation_batch_size(prpo_llm.Args(**sizes, algorithm="ppo")) == 4
    assert prpo_llm.choose_evaluation_batch_size(prpo_llm.Args(**sizes, eval_samples=8)) == 4
    long = {"max_prompt_tokens": 2048, "response_length": 512, "rollout_batch_size": 1}
    assert prpo_llm.choose_evaluation_batch_size(prpo_llm.Args(**sizes | long)) == 2
    assert (
        prpo_llm.choose_evaluation_batch_size(prpo_llm.Args(**sizes | long, algorithm="ppo")) == 1
    )
    generate = prpo_llm.generate
    numbers = []

    def counted(model, ids, uniforms, *rest, **options):
        if uniforms.shape[1] == 1:  # a group of one: an evaluation
            numbers.append(len(ids))
        return generate(model, ids, uniforms, *rest, **options)

    monkeypatch.setattr(prpo_llm, "generate", counted)
    evaluations = []
    for size, expected in ((1, [2] * 5), (3, [6, 4])):
        numbers.clear()
        folder, summary = train(
            files, tmp_path / str(size), total_steps=1, eval_prompts=5, rollout_batch_size=size
        )
        assert numbers == expected * 2
        evaluations.append(summary["evaluation"])
    assert evaluations[0] == evaluations[1]


def saved_tensors(args, tmp_path):
    """The sizes of what a pass keeps for its gradient, and that gradient."""
    model, _ = adapted(args)
    tokens = torch.randint(1, len(WORDS), (2, 1, 8, 48), generator=torch.Generator().manual_seed(2))
    batch = {
        "prompts": [PROMPTS[0], PROMPTS[1]],
        "tokens": tokens,
        "lengths": torch.full((2, 1, 8), 48),
    }
    sizes = []

    def pack(tensor):
        sizes.append(tensor.numel())
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with prpo_llm.select_adapters("policy"), hooks:
        hidden = prpo_llm.compute_hidden(model, batch)
        before = sizes.copy()
        prpo_llm.compute_logits(model, hidden).log_softmax(-1)[..., 3].sum().backward()
    return before, [layer.B["policy"].grad for layer in layers_of(model).values()]


def test_scores_are_not_kept_and_checkpointing_keeps_little(tmp_path, monkeypatch):
    """No tensor is as large as a group's scores; with --gradient-checkpointing the gradient is the
    same."""
    # With it agents always pass together; one after the other rounds otherwise
    monkeypatch.setattr(prpo_llm, "passes_apart", lambda *_: False)
    args = settings(save(tmp_path, config_of("Llama", {})), response_length=48)
    sizes, gradient = saved_tensors(args, tmp_path)
    assert max(sizes) < 2 * 4 * 8 * 47 * (PROMPT + 47)  # agents, heads, group, tokens, keys
    args.gradient_checkpointing = True
    fewer, again = saved_tensors(args, tmp_path)
    assert sum(fewer) < 0.2 * sum(sizes)
    for one, other in zip(gradient, again, strict=True):
        assert one.abs().max() > 0
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_rollouts_in_parts_are_the_whole(tmp_path, monkeypatch):
    """--rollout-batch-size limits the prompts of an agent that are completed at once, not their
    completions."""
    folder = save(tmp_path, config_of("Llama", {}))
    seen = []
    generate = prpo_llm.generate
    examples = [[{"ids": ids} for ids in prompts] for prompts in (PROMPTS[:3], PROMPTS[1:])]

    def watch(model, ids, *rest, **options):
        seen.append(ids)
        return generate(model, ids, *rest, **options)

    batches = {}
    for size in (0, 1, 2):
        args = settings(folder, rollout_batch_size=size, batch_size=3)
        model, tokenizer = adapted(args)
        _, batches[size] = prpo_llm.rollout(args, model, tokenizer, examples, range(2), 1, watch)
    assert list(map(len, seen)) == [6, 2, 2, 2, 4, 2]
    for size in (1, 2):
        assert batches[size]["prompts"] == batches[0]["prompts"]
        for name in ("tokens", "lengths", "mask"):
            assert torch.equal(batches[size][name], batches[0][name])


@pytest.mark.parametrize(("vocabulary", "most"), [(27, 10**9), (49_152, 64), (151_936, 20)])
def test_positions_come_in_parts_as_large_as_the_vocabulary_allows(vocabulary, most):
    """Every token of every completion once, in parts whose logits take 12 MB."""
    model = transformers.LlamaForCausalLM(config_of("Llama", {"vocab_size": vocabulary}))
    mask = torch.arange(40) < torch.randint(
        1, 41, (2, 3, 4, 1), generator=torch.Generator().manual_seed(0)
    )
    places = prpo_llm.split_tokens(model, mask)
    again = torch.zeros_like(mask, dtype=torch.long)
    for place in places:
        assert len(place[1]) <= most
        again[place] += 1
    assert torch.equal(again, mask.long()) and len(places) >= 2


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of tensors that operations make, as long as they live; `peak` is the most at
    a time."""

    def __init__(self):
        super().__init__()
        self.storages = weakref.WeakSet()
        self.now = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        before = {
            tensor.untyped_storage()._cdata
            for tensor in tree_leaves((args, kwargs))
            if is_tensor(tensor)
        }
        for tensor in filter(is_tensor, tree_leaves(result)):
            storage = tensor.untyped_storage()
            if storage not in self.storages and storage._cdata not in before:
                self.storages.add(storage)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.release, storage.nbytes())
        return result

    def release(self, size):
        self.now -= size


@pytest.mark.parametrize(("checkpointing", "held"), [(False, 1), (True, 1), (False, 2)])
def test_the_count_of_memory_is_what_a_small_model_takes(checkpointing, held):
    """The largest sum of live tensors of an update on the processor, beside what is always
    there."""
    shape = 64, 256, 8, 4, 2, 512, True
    sizes = {
        "prompt_tokens": 96,
        "response_length": 24,
        "group_size": 4,
        "batch_size": 4,
        "micro_batch_size": 4,
    }
    line = "--sizes 3B: choose from tiny, 135M"
    assert refusal(llm_memory.main, llm_memory.Args(sizes=("7B", "3B"))).startswith(line)
    args = llm_memory.Args(agents=3, held=held, **sizes)
    tokens = args.batch_size * args.group_size * args.response_length
    with FakeTensorMode(allow_non_fake_inputs=True):
        parts = llm_memory.estimate(args, shape, logits_at_once=tokens * shape[5])
    run = {
        "response_length": 24,
        "group_size": 4,
        "batch_size": 4,
        "micro_batch_size": 4,
        "num_agents": 3,
    }
    model = llm_memory.build_model(shape)
    run = prpo_llm.Args(**run)
    trained, _ = prpo_llm.add_adapters(run, model, held)
    if checkpointing:
        prpo_llm.checkpoint_layers(model)
    drawn = torch.randint(1, 512, (held, 4, 4, 24), generator=torch.Generator().manual_seed(0))
    batch = {
        "prompts": [[7] * args.prompt_tokens] * 4 * held,
        "tokens": drawn,
        "lengths": torch.full((held, 4, 4), 24),
        "mask": torch.ones(held, 4, 4, 24, dtype=torch.bool),
        "rewards": torch.rand(held, 4, 4),
    }
    statistics = torch.zeros(held, 3, dtype=torch.float64)
    batch |= prpo_llm.compute_advantages(run, model, batch, statistics)
    reference = prpo_llm.choose_reference(run, range(held), torch.full((3, 3), 1 / 3))
    references = prpo_llm.compute_references(run, model, reference, batch)
    optimizers = prpo_llm.make_optimizers(run, trained, trained[:, :0])
    with LiveTensors() as update:
        inds = torch.arange(4).expand(held, -1)
        prpo_llm.learn(run, model, trained, optimizers, batch | references, reference, inds, 0.1)
    counted = parts["update: activations without"] + parts["update: logits of a part of the tokens"]
    if checkpointing:  # a layer is computed again when the logits are gone
        counted = parts["update: inputs of layers, with --gradient-checkpointing"] + max(
            parts["update: logits of a part of the tokens"],
            parts["update: a layer's activations, with it"],
        )
    assert 0.85 < update.peak / counted < 1.2
    assert references["peers"].nbytes == parts["update: states of references"]


def test_a_model_of_a_size_is_written_to_be_measured(files, tmp_path, monkeypatch):
    """A run trains it, and logs the memory."""
    monkeypatch.setitem(llm_memory.MODELS, "tiny", (32, 48, 2, 4, 2, 100, True))
    task = tmp_path / "task"
    shutil.copytree(files / "model", task)
    shutil.copy(files / "data.jsonl", task / "prompts.jsonl")
    written = tmp_path / "written"
    missing = llm_memory.Args(sizes=("tiny",), task="missing", write=str(written))
    assert refusal(llm_memory.main, missing).startswith("--task missing: must be a folder")
    llm_memory.main(llm_memory.Args(sizes=("tiny",), task=str(task), write=str(written)))
    paths = {"base_model": str(written), "dataset": str(written / "prompts.jsonl")}
    folder, _ = train(files, tmp_path / "runs", **paths, total_steps=1, eval_prompts=0)
    assert all(float(row["peak_memory"]) > 0 for row in table_of(folder, "metrics"))


@pytest.mark.slow
def test_the_table_of_memory_is_that_of_the_tool(tmp_path):
    """benchmark/results has what benchmark/llm_memory.py prints."""
    table = pd.read_csv(
        REPOSITORY / "benchmark" / "results" / "llm_memory.csv", comment="#", index_col="GB"
    )
    llm_memory.main(llm_memory.Args(sizes=("1.5B",), csv=str(tmp_path / "table.csv")))
    again = pd.read_csv(tmp_path / "table.csv", comment="#", index_col="GB")
    pd.testing.assert_frame_equal(again, table[["1.5B"]])


def test_the_sweep_fits_the_gpu_that_it_names():
    """Its lines of GRPO have the settings that benchmark/llm_memory.py counts, and the count is
    below 80 GB; PPO has as many completions in a step, and in a pass."""
    table = pd.read_csv(
        REPOSITORY / "benchmark" / "results" / "llm_memory.csv", comment="#", index_col="GB"
    )
    assert [*table] == ["1.5B", "7B", "8B"]
    assert all(table.loc["peak without"] < 80)
    command = ["bash", "benchmark/llm.sh"]
    lines = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True
    ).stdout.splitlines()
    of_algorithm = {}
    for line in lines:
        args = tyro.cli(prpo_llm.Args, args=shlex.split(line.partition("prpo_llm.py ")[2]))
        assert args.gradient_checkpointing == (args.algorithm == "ppo")
        group_size = prpo_llm.get_group_size(args)
        completions = [args.batch_size, args.minibatch_size, args.micro_batch_size]
        assert [group_size * prompts for prompts in completions] == [64, 32, 8]
        assert args.prompts_per_agent * group_size == 1664
        of_algorithm.setdefault(args.algorithm, args)
    line = of_algorithm["grpo"]
    counted = llm_memory.Args()
    for name in (
        "response_length",
        "group_size",
        "batch_size",
        "micro_batch_size",
        "rollout_batch_size",
    ):
        assert getattr(line, name) == getattr(counted, name)
    assert (line.num_agents, line.max_prompt_tokens) == (counted.agents, counted.prompt_tokens)
    default = prpo_llm.Args()
    # Which the program takes
    assert line.lora_targets == llm_memory.TARGETS
    for name in (
        "precision",
        "lora_rank",
        "lora_average",
    ):
        assert getattr(line, name) == getattr(default, name)


# --- precision ---


def test_bfloat16_has_a_head_in_float32(tmp_path):
    """Log-probabilities are those of the hidden states, without logits that are rounded."""
    args = settings(
        save(tmp_path, config_of("Qwen3", {"tie_word_embeddings": True})), precision="bfloat16"
    )
    model, _ = prpo_llm.load_base(args)
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16
    hidden = (8 * torch.randn(50, 32)).bfloat16()
    exact = (hidden.double() @ model.get_input_embeddings().weight.double().T).log_softmax(-1)
    torch.testing.assert_close(
        prpo_llm.compute_log_probs(args, model, hidden), exact.float(), rtol=0, atol=1e-5
    )
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_in_bfloat16_too_the_first_ratio_is_one(files, tmp_path, algorithm, checkpointing):
    """Prompts keep their micro-batch before the update and in every epoch of it."""
    changes = {
        "precision": "bfloat16",
        "batch_size": 4,
        "micro_batch_size": 2,
        "algorithm": algorithm,
        "gradient_checkpointing": checkpointing,
    }
    folder, _ = train(files, tmp_path, **changes, eval_prompts=0)
    rows = rows_of(folder)
    assert all(float(row["first_log_ratio"]) <= 1e-6 for row in rows)
    assert any(float(row["approx_kl"]) > 1e-4 for row in rows)


# --- ends, adapters ---


def test_every_token_that_ends_a_text_ends_it(tmp_path, monkeypatch):
    """The tokenizer's and all of the generation configuration; the reward's penalty is for other
    ends only."""
    folder = save(tmp_path, config_of("Llama", {}), eos_token_id=[5, 9, 0])
    args = settings(folder)
    model, tokenizer = prpo_llm.load_base(args)
    assert tokenizer.ends[0] == tokenizer.eos_token_id == 0 and sorted(tokenizer.ends) == [0, 5, 9]
    scripts = torch.tensor([[3, 9, 4, 4], [0, 1, 1, 1], [7, 7, 7, 5], [7, 7, 7, 7]])
    follow(scripts, model, monkeypatch)
    tokens, lengths, _ = prpo_llm.generate(
        model, [[1, 2]], torch.zeros(1, 4, 4), tokenizer.ends, temperature=0.0
    )
    assert lengths.tolist() == [[2, 1, 4, 4]] and tokens[0].tolist() == [
        [3, 9, 0, 0],
        [0] * 4,
        [7, 7, 7, 5],
        [7] * 4,
    ]
    examples = [{"row": {"prompt": "", "completion": ""}, "completion": "", "ids": []}] * 4
    args.missing_eos_penalty = 1.0
    functions = {"none": lambda completions: [0.0 for _ in completions]}
    texts, ends, columns = prpo_llm.score_completions(
        args, functions, tokenizer, examples, [0] * len(examples), tokens[0], lengths[0]
    )
    assert list(map(bool, ends)) == [True, True, True, False] and columns["reward"].tolist() == [
        0.0,
        0.0,
        0.0,
        -1.0,
    ]
    assert [len(text.split()) for text in texts] == [1, 0, 3, 4]


def peft_adapter(folder, model_folder, **options):
    """A random adapter that PEFT has made. Returns PEFT's model."""
    torch.manual_seed(3)
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=torch.float32
    ).eval()
    config = {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": list(ALL),
        "task_type": "CAUSAL_LM",
    } | options
    peft = get_peft_model(plain, LoraConfig(**config)).eval()
    for name, parameter in peft.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.3)
    peft.save_pretrained(folder)
    return peft


def started(model_folder, adapter, **changes):
    """Settings of a run that starts from this adapter, as from the command line."""
    argv = [
        "--base-model",
        model_folder,
        "--adapter",
        adapter,
        "--lora-rank",
        4,
        "--lora-alpha",
        6,
        "--precision",
    ]
    argv += [
        "float32",
        "--max-prompt-tokens",
        PROMPT,
        "--response-length",
        RESPONSE,
        "--lora-targets",
        *ALL,
    ]
    return parse_args(prpo_llm, [*map(str, argv), *changes])


def test_an_adapter_of_peft_has_the_same_log_probabilities_here(tmp_path):
    """Its alpha counts, and it is saved as one that PEFT loads again, of a base that others
    find."""
    folder = save(tmp_path / "model", config_of("Llama", {}))
    peft = peft_adapter(tmp_path / "adapter", folder)
    args = started(folder, tmp_path / "adapter")
    model, _ = prpo_llm.load_base(args)
    prpo_llm.add_adapters(args, model, 3)
    ids = torch.tensor([[*PROMPTS[0], 3, 9, 4]])
    batch = {
        "prompts": PROMPTS[:1],
        "tokens": ids[:, None, PROMPT:],
        "lengths": torch.tensor([[3]]),
    }
    with torch.no_grad(), prpo_llm.select_adapters("policy", (1,)):
        logits = prpo_llm.compute_logits(model, prpo_llm.compute_hidden(model, batch))[0, 0]
        expected = peft(ids).logits[0]
    torch.testing.assert_close(logits, expected[PROMPT - 1 : -1], rtol=0, atol=1e-4)
    prpo_llm.save_adapter(args, model, 2, tmp_path / "saved")
    base = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ]
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    again = PeftModel.from_pretrained(plain, tmp_path / "saved").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits[0], expected, rtol=0, atol=1e-4)
    args.base_model = "smollm2"
    prpo_llm.save_adapter(args, model, 2, tmp_path / "other")
    config = json.loads((tmp_path / "other" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] is None  # no hub model has the weights of the package
    args.base_model = "somebody/model"
    prpo_llm.save_adapter(args, model, 2, tmp_path / "hub")
    config = json.loads((tmp_path / "hub" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "somebody/model"


OTHER = {
    "use_dora": {"use_dora": True},
    "use_rslora": {"use_rslora": True},
    "rank_pattern": {"rank_pattern": {"q_proj": 2}},
    "alpha_pattern": {"alpha_pattern": {"q_proj": 2}},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "bias": {"bias": "all"},
    "layers_to_transform": {"layers_to_transform": [0]},
    "init_lora_weights": {"init_lora_weights": "pissa"},
}


@pytest.mark.parametrize("name", OTHER)
def test_adapters_that_are_more_than_lora_are_refused(name, tmp_path):
    """One line names what these adapters do not have."""
    folder = save(tmp_path / "model", config_of("Llama", {}))
    peft_adapter(tmp_path / "adapter", folder, **OTHER[name])
    message = refusal(started, folder, tmp_path / "adapter")
    assert "must be a plain LoRA adapter" in message and name in message


CHANGED = {
    "other layers": (lambda tensors: {}, {"target_modules": [*ALL, "lm_head"]}),
    "fewer layers": (lambda tensors: {}, {"target_modules": ["q_proj"]}),
    "not a number": (lambda tensors: {name: tensor / 0 for name, tensor in tensors.items()}, {}),
    "another size": (lambda tensors: {next(iter(tensors)): torch.zeros(4, 16)}, {}),
}


@pytest.mark.parametrize("case", CHANGED)
def test_adapters_that_are_not_of_these_layers_are_refused(case, tmp_path):
    """What is in the file has to be what the agents train, in size and name, and finite."""
    folder = save(tmp_path / "model", config_of("Llama", {}))
    (change, options) = CHANGED[case]
    peft_adapter(tmp_path / "adapter", folder, **options)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file(tensors | change(tensors), file)
    args = started(folder, tmp_path / "adapter")
    model, _ = prpo_llm.load_base(args)
    assert refusal(prpo_llm.add_adapters, args, model, 1).startswith("--adapter")


@pytest.mark.parametrize(
    "targets", [("q_proj", "lm_head"), ("q_proj", "embed_tokens"), ("q_proj", "qkv_proj"), ()]
)
def test_only_linear_layers_of_the_decoder_get_adapters(targets, tmp_path):
    """The head is shared by the rows of all agents, and embeddings are no linear layer."""
    args = settings(save(tmp_path, config_of("Llama", {})), lora_targets=targets)
    model, _ = prpo_llm.load_base(args)
    message = refusal(prpo_llm.add_adapters, args, model, 1)
    assert (
        message.startswith("--lora-targets") and "down_proj, gate_proj, k_proj, o_proj" in message
    )
