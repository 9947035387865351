"""Language models: the same numbers as plain transformers, exact masks and averages, placements and
resume.
"""

import itertools
import json
import math
import re
from html import unescape

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from command import parse_args
from helpers import (
    GATED,
    REPOSITORY,
    call,
    metrics_of_page,
    name_in_page,
    only_run,
    refusal,
    scalars_of,
    table_of,
    told_to_launcher,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from language_models import (
    ALGORITHMS,
    PROMPTS,
    SPREAD,
    follow,
    plain_model,
    predict,
    rows_of,
    tiny,
    to_resume,
    train,
    weights_of,
)
from peft import PeftModel
from safetensors.torch import load_file
from tensorboard import plugin_util
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import communicators
import prpo_llm


def merged(files, layers, name, number):
    """A plain transformers model with one adapter merged into its weights."""
    model = plain_model(files)
    for path, layer in layers.items():
        weight = model.get_submodule(path).weight
        weight.data += layer.scale[name] * (layer.B[name][number] @ layer.A[name][number]).detach()
    return model


# --- the model ---


def test_predict_equals_a_plain_forward(files, stacked):
    """Packed groups with restarted positions give, for every agent, the log-probs of separate,
    unpacked sequences."""
    model, layers, eos = stacked
    torch.manual_seed(2)
    tokens = torch.randint(1, 27, (3, 4, 6))
    lengths = torch.tensor([[6, 1, 3, 2], [1, 1, 1, 1], [5, 6, 2, 4]])
    with torch.no_grad():
        logits = model.lm_head(predict(model, (0, 1, 2), PROMPTS, tokens, lengths))
    assert logits.shape[2] == 6
    for agent, prompt in enumerate(PROMPTS):
        plain = merged(files, layers, "policy", agent)
        for g in range(4):
            length = int(lengths[agent, g])
            ids = torch.tensor([prompt + tokens[agent, g, :length].tolist()])
            with torch.no_grad():
                expected = plain(ids).logits[0, len(prompt) - 1 : -1]
            torch.testing.assert_close(logits[agent, g, :length], expected, rtol=0, atol=1e-4)


def test_stacked_agents_equal_separate_agents(stacked):
    """What an agent computes, forward and gradient, does not depend on who shares the batch."""
    model, layers, _ = stacked
    model.double()  # so that only mistakes make a difference
    tokens = torch.randint(1, 27, (3, 2, 5))
    lengths = torch.tensor([[5, 2], [3, 5], [4, 4]])

    def gradients(agents):
        for layer in layers.values():
            layer.zero_grad()
        prompts = [PROMPTS[k] for k in agents]
        hidden = predict(model, tuple(agents), prompts, tokens[agents], lengths[agents])
        inside = torch.arange(hidden.shape[2]) < lengths[agents][..., None]
        (model.lm_head(hidden).log_softmax(-1)[..., 3] * inside).sum().backward()
        return {
            k: torch.cat([layer.B["policy"].grad[k].flatten() for layer in layers.values()])
            for k in agents
        }

    together = gradients([0, 1, 2])
    alone = [gradients([k])[k] for k in range(3)]
    for k in range(3):
        torch.testing.assert_close(together[k], alone[k], rtol=1e-6, atol=1e-6)
        assert alone[k].abs().max() > 0.1


def test_cached_generation_equals_uncached(files, stacked):
    """Greedy completions with the shared cache are those of a model that reads everything again for
    each token."""
    model, layers, _ = stacked
    with prpo_llm.select_adapters("policy"):
        tokens, lengths, _ = prpo_llm.generate(
            model, PROMPTS, torch.zeros(3, 2, 8), [-1], temperature=0.0
        )
    assert (lengths == 8).all() and torch.equal(tokens[:, 0], tokens[:, 1])
    for agent, prompt in enumerate(PROMPTS):
        plain = merged(files, layers, "policy", agent)
        ids = list(prompt)
        for _ in range(8):
            with torch.no_grad():
                ids.append(int(plain(torch.tensor([ids])).logits[0, -1].argmax()))
        assert tokens[agent, 0].tolist() == ids[len(prompt) :]


def test_sampled_generation_follows_its_own_tokens(stacked):
    """Every sampled token is the inverse distribution function at its uniform, under the policy
    that `predict` sees."""
    model, layers, eos = stacked
    uniforms = torch.rand(3, 4, 6, generator=torch.Generator().manual_seed(3))
    with prpo_llm.select_adapters("policy"):
        tokens, lengths, logprobs = prpo_llm.generate(
            model, PROMPTS, uniforms, [eos], temperature=0.7
        )
    with torch.no_grad():
        hidden = predict(model, None, PROMPTS, tokens, lengths)
        expected = (model.lm_head(hidden) / 0.7).log_softmax(-1)
    tokens_there = tokens[..., : hidden.shape[2], None]
    expected = expected.gather(-1, tokens_there)[..., 0]
    inside = torch.arange(6) < lengths[..., None]
    assert (lengths < 6).any() and (logprobs[~inside] == 0).all()
    expected = F.pad(expected, (0, 6 - hidden.shape[2]))
    torch.testing.assert_close(logprobs[inside], expected[inside], rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        cumulative = (model.lm_head(hidden).double() / 0.7).softmax(-1).cumsum(-1)
    for index in torch.cartesian_prod(
        torch.arange(3), torch.arange(4), torch.arange(hidden.shape[2])
    ).tolist():
        if index[2] < lengths[index[0], index[1]]:
            a, g, t = index
            token = int(tokens[a, g, t])
            u = float(uniforms[a, g, t])
            below = float(cumulative[a, g, t, token - 1]) if token else 0.0
            assert below - 1e-4 <= u <= float(cumulative[a, g, t, token]) + 1e-4


@pytest.mark.parametrize("pace", [(4, 3), (7, 1), (64, 16)])
@pytest.mark.parametrize("stops", [False, True])
def test_completions_do_not_depend_on_those_beside_them(stacked, monkeypatch, pace, stops):
    """Of different lengths, dropped when they have ended, in buffers that grow: as if each were
    alone in its batch."""
    model, _, eos = stacked
    prompts = [ids for ids in PROMPTS for _ in range(2)]
    prompts[1] = prompts[1][:1]
    uniforms = torch.rand(6, 4, 30, generator=torch.Generator().manual_seed(5))
    options = {"ends": [eos, 7], "temperature": 1.0}
    if stops:
        options["is_stopped"] = lambda ids: ids[-2:] in ([3, 4], [5, 5]) or ids[-1] == 9
    monkeypatch.setitem(prpo_llm.PACES, "cpu", pace)
    with prpo_llm.select_adapters("policy"):
        tokens, lengths, logprobs = prpo_llm.generate(model, prompts, uniforms, **options)
    assert lengths.min() < 4 and lengths.max() > 10
    for n, prompt in enumerate(prompts):
        for g in range(4):
            alone = uniforms[n : n + 1, g : g + 1]
            monkeypatch.setitem(prpo_llm.PACES, "cpu", (30, 1))
            with prpo_llm.select_adapters("policy", (n // 2,)):
                expected = prpo_llm.generate(model, [prompt], alone, **options)
            assert torch.equal(tokens[n, g], expected[0][0, 0])
            assert lengths[n, g] == expected[1]
            torch.testing.assert_close(logprobs[n, g], expected[2][0, 0], rtol=1e-4, atol=1e-4)


def test_a_look_at_several_tokens_keeps_their_numbers_of_passes(stacked, monkeypatch):
    """Between two looks the completions that have ended go on, unseen, to the next look."""
    model, _, eos = stacked
    passes = []
    advance = prpo_llm.Decoding.advance

    def count(self):
        passes.append(self)
        advance(self)

    monkeypatch.setattr(prpo_llm.Decoding, "advance", count)
    uniforms = torch.zeros(3, 1, 30)
    for looks_every, expected in ((1, 4), (3, 6)):
        passes.clear()
        monkeypatch.setitem(prpo_llm.PACES, "cpu", (30, looks_every))
        with prpo_llm.select_adapters("policy"):
            _, lengths, _ = prpo_llm.generate(
                model, PROMPTS, uniforms, [-1], 1.0, is_stopped=lambda ids: len(ids) == 5
            )
        assert (lengths == 5).all() and len(passes) == expected


@settings(max_examples=50)
@given(
    seed=st.integers(0, 2**31),
    size=st.sampled_from([1, 7, 256, 300, 1000]),
    spread=st.floats(0.0, 30.0),
)
def test_sample_inverts_the_distribution_function(seed, size, spread):
    """Against a plain cumulative sum, for vocabularies of any size; an impossible token is never
    drawn."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, size, generator=generator) * spread
    logits[:, ::3] = logits[:, ::3].masked_fill(
        torch.rand(5, len(range(0, size, 3)), generator=generator) < 0.3, -math.inf
    )
    logits[:, size // 2] = 0.0
    uniforms = torch.cat((torch.rand(3, generator=generator), torch.tensor([0.0, 1 - 2**-24])))
    tokens = prpo_llm.sample(logits, uniforms)
    cumulative = logits.double().softmax(-1).cumsum(-1)
    assert logits.gather(1, tokens[:, None]).isfinite().all()
    for row, u, token in zip(cumulative, uniforms, tokens.tolist(), strict=True):
        below = float(row[token - 1]) if token else 0.0
        assert below - 1e-5 <= float(u) <= float(row[token]) + 1e-5


def test_an_agent_that_has_diverged_samples_tokens_of_the_vocabulary():
    """Its probabilities are NaN; its tokens are looked up in the embedding when its peers go on."""
    tokens = prpo_llm.sample(torch.full((4, 27), math.nan), torch.tensor([0.0, 0.3, 0.6, 0.9]))
    assert (tokens >= 0).all() and (tokens < 27).all()


def test_lengths_reach_up_to_and_including_the_first_eos(files, monkeypatch):
    """A completion that ends at the limit, one that ends at once, and one that never ends."""
    model = plain_model(files)
    scripts = torch.tensor([[5, 6, 0], [0, 9, 9], [5, 0, 0], [5, 6, 7]])
    model.config._attn_implementation = "shared_prefix"
    follow(scripts, model, monkeypatch)
    tokens, lengths, _ = prpo_llm.generate(
        model, [[1, 2]], torch.zeros(1, 4, 3), [0], temperature=0.0
    )
    assert lengths.tolist() == [[3, 1, 2, 3]]
    assert tokens[0].tolist() == [[5, 6, 0], [0, 0, 0], [5, 0, 0], [5, 6, 7]]


def test_saved_adapters_load_in_peft(files, stacked, tmp_path):
    """PeftModel.from_pretrained finds the same log-probabilities."""
    model, _, _ = stacked
    args = tiny(files, tmp_path, num_agents=3)
    prpo_llm.save_adapter(args, model, 1, tmp_path / "adapter")
    peft = PeftModel.from_pretrained(plain_model(files), tmp_path / "adapter")
    ids = torch.tensor([[3, 7, 1, 9, 4, 2]])
    with torch.no_grad():
        ours = model.lm_head(predict(model, (1,), [[3]], ids[:, None, 1:], torch.tensor([[5]])))[
            0, 0
        ]
        torch.testing.assert_close(ours, peft(ids).logits[0, :-1], rtol=0, atol=1e-4)


# --- advantages, losses, averages ---


def test_group_advantages():
    """Eq. 6 by hand; a NaN is out of the baseline; equal rewards give no signal; Dr. GRPO does not
    divide."""
    rewards = torch.tensor([[1.0, 3.0, 5.0], [2.0, 2.0, 2.0], [1.0, math.nan, 3.0], [math.nan] * 3])
    deviation = math.sqrt(8 / 3)
    expected = torch.tensor([[-2 / deviation, 0, 2 / deviation], [0, 0, 0], [-1, 0, 1], [0, 0, 0]])
    torch.testing.assert_close(
        prpo_llm.compute_group_advantages(rewards), expected, rtol=0, atol=1e-5
    )
    expected = torch.tensor([[-2.0, 0, 2], [0, 0, 0], [-1, 0, 1], [0, 0, 0]])
    torch.testing.assert_close(prpo_llm.compute_group_advantages(rewards, "dr-grpo"), expected)


@pytest.mark.parametrize("loss_type", ["grpo", "dr-grpo"])
def test_equal_rewards_give_exactly_no_signal(loss_type):
    """Whatever the number of completions: a mean that is off by rounding is no reason to learn."""
    for size in range(2, 33):
        rewards = torch.linspace(0.1, 0.9, 17)[:, None].expand(-1, size)
        assert (prpo_llm.compute_group_advantages(rewards, loss_type) == 0).all(), size
        unknown = torch.cat((rewards, torch.full((17, 1), math.nan)), dim=1)
        assert (prpo_llm.compute_group_advantages(unknown, loss_type) == 0).all(), size


@settings(max_examples=50)
@given(seed=st.integers(0, 2**31), gamma=st.floats(0.5, 1.0), lam=st.floats(0.0, 1.0))
def test_gae_over_tokens_equals_the_definition(seed, gamma, lam):
    """Sums of discounted errors up to each completion's own end, whatever stands behind it."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 3, 7, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, 8, (3,), generator=generator)
    mask = torch.arange(7) < lengths[:, None]
    advantages = prpo_llm.compute_gae(rewards * mask, values, mask, gamma, lam)
    for row, length in enumerate(lengths.tolist()):
        v = [*values[row, :length].tolist(), 0.0]
        deltas = [float(rewards[row, t]) + gamma * v[t + 1] - v[t] for t in range(length)]
        for t in range(7):
            expected = sum((gamma * lam) ** (s - t) * deltas[s] for s in range(t, length))
            assert float(advantages[row, t]) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("mixture", ["arithmetic", "geometric"])
def test_full_kl_is_the_sum_over_the_vocabulary(direction, mixture):
    """By hand, with a mixture of three policies as the reference."""
    generator = torch.Generator().manual_seed(4)
    policy = torch.randn(5, 11, generator=generator).log_softmax(-1)
    peers = torch.randn(3, 5, 11, generator=generator).log_softmax(-1)
    weights = torch.tensor([0.2, 0.5, 0.3])
    reference = communicators.mix_log_probs(peers, weights, mixture)
    args = prpo_llm.Args(kl_direction=direction)
    kl = prpo_llm.compute_reference_kl(
        policy, reference, torch.zeros(5, dtype=torch.long), torch.ones(5), args
    )
    if mixture == "arithmetic":
        mixed = torch.einsum("n,nsv->sv", weights, peers.exp())
    else:
        mixed = torch.einsum("n,nsv->sv", weights, peers).softmax(-1)
    first, second = (mixed, policy.exp()) if direction == "forward" else (policy.exp(), mixed)
    torch.testing.assert_close(kl, (first * (first / second).log()).sum(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{}, {"loss_type": "dr-grpo"}, {"loss_type": "dapo"}, {"algorithm": "ppo"}]
)
def test_what_tokens_count(options):
    """GRPO: each completion the same; Dr. GRPO: each token, against the maximum; DAPO and PPO: each
    token."""
    args = prpo_llm.Args(response_length=12, **options)  # no completion is as long as that
    weights = prpo_llm.weigh_tokens(torch.tensor([1, 4, 10]), args)
    expected = {
        "grpo": [1 / 3, 1 / 12, 1 / 30],
        "dr-grpo": [1 / 36] * 3,
        "ppo": [1 / 15] * 3,
        "dapo": [1 / 15] * 3,
    }
    name = options.get("loss_type") or options.get("algorithm", "grpo")
    assert weights.tolist() == pytest.approx(expected[name])


# --- whole runs ---


def test_a_resumed_run_of_one_step_keeps_the_evaluation_before_training(files, tmp_path):
    """Only the last evaluation is done again."""
    folder, _ = train(files, tmp_path, total_steps=1)
    before = (folder / "evaluations.csv").read_text()
    prpo_llm.main(parse_args(prpo_llm, to_resume(folder)))
    assert (folder / "evaluations.csv").read_text() == before
    assert "\n0,0," in before


every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)


@every_algorithm
@pytest.mark.parametrize(
    "aggregation", ["policy", "weights", pytest.param("none", marks=pytest.mark.slow)]
)
def test_agents_learn_to_generate_a_letter(files, tmp_path, algorithm, aggregation):
    """The reward counts a letter: every agent of every method generates it more
    often at the end."""
    # PPO has one completion for each prompt
    changes = (
        {"batch_size": 4, "total_steps": 25}
        if algorithm == "grpo"
        else {"batch_size": 8, "total_steps": 40}
    )
    changes |= {
        "aggregation": aggregation,
        "group_size": 6,
        "kl_coef": 0.01,
        "save_every": 50,
        "eval_prompts": 0,
    }
    changes |= {
        "missing_eos_penalty": 0.0,
        "prompts_per_agent": 16,
        "micro_batch_size": changes["batch_size"],
    }
    folder, summary = train(files, tmp_path, **ALGORITHMS[algorithm] | changes)
    rewards = [[float(row["reward"]) for row in rows_of(folder)[k::2]] for k in range(2)]
    for rewards_of_agent in rewards:
        assert np.mean(rewards_of_agent[-5:]) > np.mean(rewards_of_agent[:5]) + 0.5
    assert summary["communication_rounds"] == changes["total_steps"] // 2
    assert (summary["communication_bytes"] > 0) == (aggregation != "none")


def communicator_of(folder):
    """The last C of a run of two agents."""
    rows = table_of(folder, "communicator")[-4:]
    return np.array([float(row["weight"]) for row in rows]).reshape(2, 2)


def test_an_inflated_report_does_not_own_a_row(files, tmp_path, monkeypatch):
    """Agent 1 reports 1e30, agent 0 reports 1: its weight is that of 10."""
    numbers = itertools.cycle([1.0, 1e30])

    def report(record, returns):
        return torch.tensor([next(numbers), 0.0, 0.0], dtype=torch.float64)

    monkeypatch.setattr(communicators, "remember", report)
    folder, _ = train(files, tmp_path, communicator="reward", total_steps=1, local_updates=1)
    assert communicator_of(folder) == pytest.approx(np.array([[1 / 11, 10 / 11]] * 2), abs=1e-5)


def test_a_policy_that_is_not_finite_on_public_states_is_dropped(files, tmp_path, monkeypatch):
    """Parameters of 3e38 are finite."""
    compute = prpo_llm.compute_public_log_probs

    def spoil(*args):
        log_probs = compute(*args)
        log_probs[1, -1, -1] = torch.nan
        return log_probs

    monkeypatch.setattr(prpo_llm, "compute_public_log_probs", spoil)
    folder, _ = train(files, tmp_path, communicator="uniform", total_steps=1, local_updates=1)
    assert communicator_of(folder).tolist() == [[1, 0], [1, 0]]


def test_a_snapshot_that_is_not_there_has_no_distance(files, tmp_path, monkeypatch):
    """What stands in its place is an older one, or the common start."""
    exchange_all = communicators.Exchange.round

    def lose(*inputs):
        received, reports = exchange_all(*inputs)
        received[1] = None
        return received, reports

    for name, patched in (("whole", exchange_all), ("lost", lose)):
        monkeypatch.setattr(communicators.Exchange, "round", patched)
        folder, _ = train(files, tmp_path / name, total_steps=1, local_updates=1)
        assert [row["dropped"] for row in rows_of(folder)] == [str(int(name == "lost"))] * 2
        rows = table_of(folder, "communicator")
        between = [float(row["distance"]) for row in rows if row["listener"] != row["peer"]]
        assert len(between) >= 2
        if name == "whole":
            assert all(distance > 0 for distance in between[-2:])
        else:
            assert all(math.isnan(distance) for distance in between)


@pytest.mark.parametrize("aggregation", ["policy", "weights"])
def test_a_snapshot_that_is_not_finite_is_dropped(files, tmp_path, monkeypatch, aggregation):
    """Nobody listens to agent 1, whose adapters are not read and are no bytes; averages replace
    them.
    """
    learn = prpo_llm.learn

    def spoil(args, model, trained, *inputs):
        losses = learn(args, model, trained, *inputs)
        with torch.no_grad():
            trained[1, 0] = torch.nan
        return losses

    monkeypatch.setattr(prpo_llm, "learn", spoil)
    changes = {"num_agents": 3, "total_steps": 1, "local_updates": 1}
    folder, _ = train(files, tmp_path, aggregation=aggregation, **changes)
    assert {row["dropped"] for row in rows_of(folder)} == {"1"}
    rows = [(row["peer"], float(row["weight"])) for row in table_of(folder, "communicator")]
    assert rows == [("0", 0.5), ("1", 0.0), ("2", 0.5)] * 3
    assert {row["communication_bytes"] for row in rows_of(folder)} == {str(4 * POLICY * 4)}
    finite = [bool(weights.isfinite().all()) for weights in weights_of(folder)]
    assert finite == [True, aggregation == "weights", True]


# Numbers that a tiny agent sends: both layers have adapters of rank 4 at layers of these inputs and
# outputs; with PPO FedAvg also sends the value model's, of rank 2, and its head
SIZES = [(32, 32), (32, 16), (32, 16), (32, 48), (32, 48), (48, 32)]
LAYER = sum(map(sum, SIZES))
POLICY = 2 * 4 * LAYER
VALUE = 2 * 2 * LAYER + 33
SENT = {  # settings, and numbers that are read in a round by other agents than their sender
    "all": ({}, 6 * POLICY),
    "the heaviest peer": ({"top_k": 1}, 3 * POLICY),
    "all are compared": ({"communicator": "similarity", "top_k": 1}, 6 * POLICY),
    "a ring of four": ({"num_agents": 4, "topology": "ring"}, 8 * POLICY),
    "averages": ({"aggregation": "weights", "algorithm": "ppo"}, 6 * (POLICY + VALUE)),
    "averages of a layer": (
        {"aggregation": "weights", "algorithm": "ppo", "private_layers": 1},
        6 * (4 + 2) * LAYER,
    ),
    "a common A": (
        {"lora_average": "frozen-a"},
        6 * 2 * 4 * sum(outputs for _, outputs in SIZES),
    ),
    "isolated": ({"aggregation": "none"}, 0),
    "PPO": ({"algorithm": "ppo"}, 6 * POLICY),
    "PPO, gated": ({"algorithm": "ppo", "gate": "value"}, 6 * (POLICY + VALUE)),
}


@pytest.mark.parametrize("case", SENT)
def test_bytes_are_what_others_read(case, files, tmp_path):
    """Two rounds in four steps, float32."""
    changes, numbers = SENT[case]
    options = {"num_agents": 3, "eval_prompts": 0, "group_size": 2} | changes
    folder, summary = train(files, tmp_path, **options)
    expected = [0, 4 * numbers, 4 * numbers, 8 * numbers]
    assert [int(row["communication_bytes"]) for row in rows_of(folder)][
        :: options["num_agents"]
    ] == expected
    assert summary["communication_bytes"] == expected[-1]


def test_no_aggregation_is_the_identity(files, tmp_path):
    """Whatever --communicator says; under FedAvg it is an average of nobody else's."""
    runs = {}
    for name, changes in {
        "none": {"aggregation": "none", "communicator": "similarity"},
        "identity": {"communicator": "identity"},
        "average": {"aggregation": "weights", "communicator": "identity"},
    }.items():
        folder, _ = train(files, tmp_path / name, **changes)
        runs[name] = weights_of(folder)
        rows = [(float(row["weight"]), row["distance"]) for row in table_of(folder, "communicator")]
        assert rows == [(1, "nan"), (0, "nan"), (0, "nan"), (1, "nan")]
    for name in ("identity", "average"):
        for a, b in zip(runs["none"], runs[name], strict=True):
            assert torch.equal(a, b), name


@every_algorithm
def test_the_first_minibatch_has_ratio_one(files, tmp_path, algorithm):
    """Old and new log-probs take the same path, so that nothing but learning moves the ratio; later
    it moves."""
    folder, _ = train(files, tmp_path, **ALGORITHMS[algorithm], minibatch_size=1)
    assert all(float(row["first_log_ratio"]) < 1e-5 for row in rows_of(folder))
    assert any(float(row["approx_kl"]) > 1e-4 for row in rows_of(folder))


def test_a_first_ratio_that_is_not_one_shows(files, tmp_path, monkeypatch):
    compute = prpo_llm.compute_references

    def shift(*inputs):
        references = compute(*inputs)
        references["logprobs"] = references["logprobs"] - 0.3
        return references

    monkeypatch.setattr(prpo_llm, "compute_references", shift)
    folder, _ = train(files, tmp_path, total_steps=1, eval_prompts=0)
    assert [float(row["first_log_ratio"]) for row in rows_of(folder)] == pytest.approx([0.3] * 2)


@every_algorithm
@pytest.mark.usefixtures("smooth_adam")
def test_accumulation_changes_nothing(files, tmp_path, algorithm):
    """One forward of the whole minibatch and one per prompt give the same weights."""
    changes = ALGORITHMS[algorithm] | {"batch_size": 4, "learning_rate": 1e-3}
    ones, _ = train(files, tmp_path / "ones", micro_batch_size=1, **changes)
    whole, _ = train(files, tmp_path / "whole", micro_batch_size=4, **changes)
    for a, b in zip(weights_of(ones), weights_of(whole), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["grpo policy", "grpo weights", "ppo policy", "ppo weights", "ppo gate"]
)
@pytest.mark.usefixtures("smooth_adam")
def test_two_ranks_train_like_one_process(files, spread, tmp_path, name):
    """One agent per rank: the same weights, metrics and completions, in one file."""
    folder, _ = spread
    spread = only_run(folder / name)
    together, _ = train(files, tmp_path, **SPREAD[name])
    for a, b in zip(weights_of(spread), weights_of(together), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)
    for row, expected in zip(rows_of(spread), rows_of(together), strict=True):
        for column in row:
            assert float(row[column]) == pytest.approx(
                float(expected[column]), rel=1e-2, abs=1e-3, nan_ok=True
            ), column
    completions, expected = (
        (folder / "completions.jsonl").read_text().splitlines() for folder in (spread, together)
    )
    # Each agent's, before and after training
    assert sorted(completions) == sorted(expected) and len(completions) == 2 * 2 * 2


@pytest.mark.parametrize(
    ("algorithm", "aggregation", "gate"),
    [
        *itertools.product(ALGORITHMS, ("policy", "weights"), ("none",)),
        ("ppo", "policy", "value"),
    ],
)
def test_resume_equals_a_whole_run(files, tmp_path, algorithm, aggregation, gate, monkeypatch):
    """A run that dies after a checkpoint between two rounds and goes on is the uninterrupted run,
    bit for bit.

    Its communicator depends on all rounds before, or on the rewards of all steps since the last
    one.
    """
    changes = ALGORITHMS[algorithm] | {"aggregation": aggregation, "gate": gate, "eval_every": 1}
    if aggregation == "policy":
        changes |= {"communicator": "relative-gain", "local_updates": 2, "save_every": 3}
    else:
        changes |= {"communicator": "reward", "local_updates": 3, "missing_eos_penalty": 0.0}
    whole, _ = train(files, tmp_path / "whole", **changes)
    write = communicators.write_atomically
    saved = []

    def die_later(path, content):
        write(path, content)
        saved.extend([path] if path.suffix == ".pt" else [])
        if len(saved) == 3:  # agent 0 is ahead of agent 1
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(communicators, "write_atomically", die_later)
        with pytest.raises(KeyboardInterrupt):
            prpo_llm.main(tiny(files, tmp_path / "cut", **changes))
    folder = only_run(tmp_path / "cut")
    prpo_llm.main(parse_args(prpo_llm, to_resume(folder)))
    for a, b in zip(weights_of(folder), weights_of(whole), strict=True):
        assert torch.equal(a, b)
    assert rows_of(folder) == rows_of(whole)
    for name in ("evaluations.csv", "completions.jsonl"):
        assert (folder / name).read_text() == (whole / name).read_text()


def test_ranks_go_on_from_a_run_of_one_process(spread):
    """Between two rounds: what an agent receives from its peers, it gets from their checkpoints."""
    folder, output = spread
    whole = only_run(folder / "whole")
    resumed = only_run(folder / "resumed")
    assert "resuming after step 3 of 4" in output
    for a, b in zip(weights_of(resumed), weights_of(whole), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)
    assert [float(row["kl_reference"]) for row in rows_of(resumed)] == pytest.approx(
        [float(row["kl_reference"]) for row in rows_of(whole)], rel=1e-3, abs=1e-6
    )


def test_resuming_a_finished_run_keeps_what_it_knows(files, tmp_path):
    """The last step's rewards are in the checkpoint, also for a run that has no step left, whose
    last evaluation is done again, once.
    """
    folder, summary = train(files, tmp_path, total_steps=2, eval_every=1)
    rows = rows_of(folder)
    evaluations = (folder / "evaluations.csv").read_text()
    again = prpo_llm.main(parse_args(prpo_llm, to_resume(folder)))
    assert again["training_reward"] == summary["training_reward"]
    assert again["training_reward"]["agents"] == pytest.approx(
        [float(row["reward"]) for row in rows[-2:]], rel=1e-5
    )
    assert again["evaluation"] == summary["evaluation"] and again["evaluation"]["prompts"] == 2
    assert rows_of(folder) == rows and (folder / "evaluations.csv").read_text() == evaluations


def test_groups_without_signal_teach_nothing(files, tmp_path):
    """Equal rewards and no KL penalty leave every adapter as it was, also when that is saved and
    resumed from."""
    (tmp_path / "same.py").write_text(
        "def same(prompts, completions, references):\n    return [0.1 for _ in completions]\n"
    )
    changes = {
        "reward": f"{tmp_path / 'same.py'}:same",
        "missing_eos_penalty": 0.0,
        "kl_coef": 0.0,
        "save_every": 1,
    }
    folder, _ = train(files, tmp_path / "runs", **changes)
    assert all(
        float(row["no_signal"]) == 1 and float(row["grad_norm"]) == 0 for row in rows_of(folder)
    )
    rows = rows_of(folder)
    start = load_file(folder / "agent_0" / "adapter_model.safetensors")
    assert all((tensor == 0).all() for name, tensor in start.items() if "lora_B" in name)
    (folder / "checkpoints" / "agent_0" / "4.pt").unlink()
    prpo_llm.main(parse_args(prpo_llm, to_resume(folder)))
    assert rows_of(folder) == rows


def test_completions_stand_in_tensorboard_as_they_are(files, tmp_path, monkeypatch):
    """A completion may look like a table, a heading, emphasis or HTML: TensorBoard shows the
    characters."""
    completion = "| a | b |\n# heading *bold* _too_ `code` <script>alert(1)</script> &amp; "
    completion += "[link](http://x) ~~~ é \\| 1. 日本"
    monkeypatch.setattr(prpo_llm, "decode", lambda args, tokenizer, example, ids: completion)
    folder, _ = train(files, tmp_path, total_steps=1)
    events = EventAccumulator(str(folder)).Reload()
    (text,) = (event for event in events.Tensors("completions/text_summary") if event.step == 0)
    html = plugin_util.markdown_to_safe_html(text.tensor_proto.string_val[0])
    cells = re.findall(r"<td>(.*?)</td>", html, re.S)
    assert len(cells) == 2 * 3 and "<" not in "".join(cells)
    shown = [unescape(cell).split() for cell in cells[1::3]]
    assert shown == [completion.split()] * 2


@every_algorithm
def test_nothing_but_adapters_and_declared_scalars_leaves_a_rank(spread, algorithm):
    """Every function of torch.distributed is watched: no token, prompt or completion is in any of
    its arguments."""
    folder, _ = spread
    name = f"{algorithm} similarity"
    run = only_run(folder / name)
    size = len(weights_of(run)[0])
    checkpoint = torch.load(run / "checkpoints" / "agent_0" / "4.pt", weights_only=True)
    metrics = checkpoint["run"]["latest"]
    for rank in range(2):
        calls = json.loads((folder / f"{rank}.json").read_text())[name]
        assert not [function for function, _ in calls if "object" in function]
        moved = [(dtype, math.prod(size)) for _, tensors in calls for dtype, size in tensors]
        # As float32 adapters (at the start also those of the value model), and rows of C and of
        # distances; metrics as float64; as int64 the run's stamp, a hash of the settings, and of
        # each agent the three checkpoints that it can go on from, and whether its reward has failed
        assert {dtype for dtype, _ in moved} == {"float32", "float64", "int64"}
        float32 = [numel for dtype, numel in moved if dtype == "float32"]
        assert all(numel >= size or numel == 2 for numel in float32)
        assert all(numel <= 2 * (len(metrics) + 1) for dtype, numel in moved if dtype == "float64")
        assert all(numel <= 2 * 3 for dtype, numel in moved if dtype == "int64")
        assert sum(numel >= size for numel in float32) >= 3


def test_behaviour_reference_of_a_round_per_step_is_the_snapshot(files, tmp_path):
    """With a round after every step, an agent's snapshot is its policy before the update; else it
    is not."""
    final = {}
    for every, name in itertools.product((1, 2), ("behaviour", "snapshot")):
        changes = {"local_updates": every, "self_reference": name, "total_steps": 4, "kl_coef": 1.0}
        final[every, name] = weights_of(
            train(files, tmp_path / f"{every}{name}", aggregation="none", **changes)[0]
        )
    for one, other in zip(final[1, "behaviour"], final[1, "snapshot"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    assert all(
        (a - b).abs().max() > 1e-3
        for a, b in zip(final[2, "behaviour"], final[2, "snapshot"], strict=True)
    )


def test_agents_start_from_an_adapter_and_are_anchored_to_it(files, tmp_path):
    """--adapter is where policies, references and the anchor start: trained weights go on from it,
    and a strong anchor holds them there."""
    first, summary = train(files, tmp_path / "first", total_steps=2, missing_eos_penalty=0.0)
    start = {
        "adapter": str(first / "agent_0"),
        "total_steps": 12,
        "num_agents": 1,
        "missing_eos_penalty": 0.0,
    }
    distances = {}
    for name, anchor in (("free", 1e-9), ("held", 100.0)):
        folder, summary_of = train(files, tmp_path / name, **start, sft_anchor=anchor)
        distances[name] = [float(row["kl_anchor"]) for row in rows_of(folder)]
        before = table_of(folder, "evaluations")[0]
        assert float(before["mean_reward"]) == pytest.approx(
            summary["evaluation"]["agents"][0]["validation"]["mean"], rel=1e-5
        )
    assert np.mean(distances["held"][-4:]) < 0.4 * np.mean(distances["free"][-4:])
    with pytest.raises(SystemExit, match="--lora-alpha 5: must be 16 as in"):
        parse_args(
            prpo_llm, ["--adapter", str(first / "agent_0"), "--lora-rank", "4", "--lora-alpha", "5"]
        )
    folder, _ = train(files, tmp_path / "still", **start, learning_rate=1e-12)
    torch.testing.assert_close(weights_of(folder)[0], weights_of(first)[0])
    assert float(rows_of(folder)[0]["kl_reference"]) == pytest.approx(0.0, abs=1e-6)


def test_curves_and_a_table_of_language_models(files, tmp_path):
    """plot.py reads these runs too: the rows' figures are those of their summaries.

    An agent's own topic is that of its prompts, of which the common ones are a mixture.
    """
    results = {}
    rewards_of_topics = []
    for seed in (1, 2):
        _, summary = train(
            files, tmp_path / f"runs/{seed}", seed=seed, exp_name="pr", partition="topic"
        )
        results[seed] = summary["evaluation"]["group"]
        agents = summary["evaluation"]["agents"]
        assert list(agents[0]) == ["validation", "x", "y"]
        rewards_of_topics += [agents[0]["x"]["mean"], agents[1]["y"]["mean"]]
    process = call(
        "benchmark/plot.py", "--runs", tmp_path / "runs", "--out", tmp_path / "llm", cwd=REPOSITORY
    )
    assert process.returncode == 0, process.stderr
    rows = pd.read_csv(tmp_path / "llm_runs.csv", comment="#", index_col="seed")
    assert rows.evaluation.to_dict() == pytest.approx(results, rel=1e-4)
    assert rows.own_topic.mean() == pytest.approx(sum(rewards_of_topics) / 4, rel=1e-4)
    assert (tmp_path / "llm.png").stat().st_size > 5_000


def test_metrics_are_those_of_the_page(files, tmp_path):
    """What PPO with averages, GRPO with mixtures and a gate log, and nothing else."""
    tags = set()
    settings_of = {
        "ppo": {"aggregation": "weights", "reward_kl_coef": 0.1},
        "grpo": {"aggregation": "policy"},
        "gated": {"algorithm": "ppo", "gate": "value"},
    }
    for name, changes in settings_of.items():
        options = ALGORITHMS.get(name, {}) | changes
        folder, _ = train(files, tmp_path / name, **options)
        tags |= {name_in_page(tag) for tag in scalars_of(folder)}
    rewards = {tag for tag in tags if tag.startswith("objective/reward_")}
    rewards.discard("objective/reward_std")
    assert rewards == {"objective/reward_letters.count"}
    expected = metrics_of_page("prpo_llm") - {"objective/reward_NAME"}
    assert tags - rewards == expected | GATED


def test_a_reward_of_some_rows_has_a_mean_in_evaluations(files, tmp_path):
    """Of the completions that it knows; training leaves the others out too."""
    (tmp_path / "own.py").write_text(
        "def some(completions):\n"
        "    return [None if k % 2 else 1.0 for k in range(len(completions))]\n"
        "def all(completions):\n"
        "    return [2.0] * len(completions)\n"
    )
    names = tuple(f"{tmp_path / 'own.py'}:{name}" for name in ("some", "all"))
    folder, _ = train(files, tmp_path / "runs", reward=names, reward_weights=(1.0, 1.0))
    rows = pd.read_csv(folder / "evaluations.csv")
    assert set(rows["reward_own.some"]) == {1.0}
    assert set(rows["reward_own.all"]) == {2.0}


BAD = {
    "surrogate": (
        ["--communicator", "surrogate"],
        ["--communicator surrogate", "neither a communicator of this script"],
    ),
    "weights below 1 only": (["--importance-cap", "0.5"], ["--importance-cap 0.5", "0 or above 1"]),
    "a value model of no adapter": (
        ["--algorithm", "ppo", "--value-init", "adapter"],
        ["--value-init adapter", "--adapter"],
    ),
    "a value model from nowhere": (
        ["--algorithm", "ppo", "--value-init", "nowhere"],
        ["--value-init nowhere", "folder"],
    ),
    "policies that nobody has": (
        ["--aggregation", "weights", "--private-layers", "1", "--communicator", "similarity"],
        ["--communicator similarity", "--private-layers"],
    ),
    "unknown communicator": (
        ["--communicator", "uniforn"],
        ["--communicator uniforn", "neither a communicator of this script"],
    ),
    "estimator of the forward KL": (
        ["--kl-estimator", "k3", "--kl-direction", "forward"],
        ["--kl-estimator k3", "full"],
    ),
    "not a number": (["--kl-coef", "nan"], ["--kl-coef nan", "finite"]),
    "infinite": (["--missing-eos-penalty", "inf"], ["--missing-eos-penalty inf", "finite"]),
    "group of one": (["--group-size", "1"], ["--group-size 1", "at least 2"]),
    "upper clip without a lower": (
        ["--clip-coef", "0", "--clip-higher", "0.28"],
        ["--clip-higher 0.28", "has no effect with --clip-coef 0"],
    ),
    "upper clip below the lower": (
        ["--clip-higher", "0.1"],
        ["--clip-higher 0.1", "at least --clip-coef 0.2"],
    ),
    "minibatch not divisible": (["--minibatch-size", "3"], ["--minibatch-size 3", "4"]),
    "temperature zero": (["--temperature", "0"], ["--temperature 0", "positive"]),
    "self-preference above 1": (["--self-preference", "1.5"], ["--self-preference 1.5", "[0, 1]"]),
    "no adapter": (["--adapter", "nowhere"], ["--adapter nowhere", "adapter_config.json"]),
    "adapters without effect": (["--lora-alpha", "0"], ["--lora-alpha 0", "at least 1"]),
    "values without effect": (
        ["--value-lora-alpha", "-1"],
        ["--value-lora-alpha -1", "at least 1"],
    ),
    "two ways to treat a missing end": (
        ["--missing-eos-penalty", "3", "--missing-eos-reward", "-3"],
        ["--missing-eos-penalty 3.0", "--missing-eos-reward"],
    ),
    "no number for a missing end": (
        ["--missing-eos-reward", "nan"],
        ["--missing-eos-reward nan", "finite"],
    ),
    "GRPO with rewards of tokens": (
        ["--reward-kl-coef", "0.1"],
        ["--reward-kl-coef 0.1", "GRPO", "--kl-coef"],
    ),
    "GRPO with a gate": (["--gate", "value"], ["--gate value", "--algorithm ppo"]),
    "averages with a gate": (
        ["--gate", "value", "--algorithm", "ppo", "--aggregation", "weights"],
        ["--gate value", "--aggregation policy"],
    ),
    "isolated agents with a gate": (
        ["--gate", "value", "--algorithm", "ppo", "--aggregation", "none"],
        ["--gate value", "peers"],
    ),
    "the identity with a gate": (
        ["--gate", "value", "--algorithm", "ppo", "--communicator", "identity"],
        ["--gate value", "peers"],
    ),
    "one agent with a gate": (
        ["--gate", "value", "--algorithm", "ppo", "--num-agents", "1"],
        ["--gate value", "peers"],
    ),
    "a gate in the rewards": (
        ["--gate", "value", "--algorithm", "ppo", "--reward-kl-coef", "0.1"],
        ["--gate value", "--reward-kl-coef"],
    ),
    "no completion is long enough": (
        ["--min-response-tokens", "59"],
        ["--min-response-tokens 59", "at most --response-length 58"],
    ),
    "no such reward": (["--reward", "bleu"], ["--reward bleu", "FILE.py:function"]),
    "no such reward function": (
        ["--reward", "nowhere.py:count"],
        ["--reward nowhere.py:count", "existing"],
    ),
    "the same reward twice": (
        ["--reward", "rouge", "rouge"],
        ["--reward rouge rouge", "different"],
    ),
    "too many weights": (
        ["--reward-weights", "1", "2"],
        ["--reward-weights 1.0 2.0", "each --reward"],
    ),
    "a weight that is no number": (
        ["--reward-weights", "nan"],
        ["--reward-weights nan", "each --reward"],
    ),
    "two data sets of three": (["--dataset", "a", "b"], ["--dataset a b", "each of the 3 agents"]),
    "nothing common to evaluate on": (
        ["--dataset", "a_{i}"],
        ["--eval-dataset", "--eval-prompts 0"],
    ),
    "own data sets dealt": (
        ["--dataset", "a_{i}", "--eval-prompts", "0", "--partition", "topic"],
        ["--partition topic", "data set of its own"],
    ),
    "two topics of three": (
        ["--partition", "topic", "--topics", "a", "b"],
        ["--topics a b", "3 topics"],
    ),
    "a topic twice": (["--topics", "a", "a"], ["--topics a a"]),
    "empty nucleus": (["--eval-top-p", "0", "--eval-samples", "1"], ["--eval-top-p 0", "(0, 1]"]),
    "nucleus above 1": (
        ["--eval-top-p", "1.5", "--eval-samples", "1"],
        ["--eval-top-p 1.5", "(0, 1]"],
    ),
    "more prompts than there are": (
        ["--log-completions", "5"],
        ["--log-completions 5", "at most the batch of 4"],
    ),
    "empty stop string": (["--stop-strings", "x", ""], ["--stop-strings x", "not empty"]),
    "negative": (["--save-adapters", "-1"], ["--save-adapters -1", "not be negative"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_ends_with_one_line(case):
    """It names the flag, the value and what would be valid."""
    argv, texts = BAD[case]
    message = refusal(parse_args, prpo_llm, argv)
    assert all(text in message for text in texts), message


GOOD = {
    "as many tokens as there may be": ["--min-response-tokens", "58"],
    "a reward in place of the default penalty": ["--missing-eos-reward", "-3"],
    "a single round": ["--local-updates", "4", "--total-steps", "4"],
    "peers that are heard through rewards": [
        *("--algorithm", "ppo", "--kl-coef", "0", "--reward-kl-coef", "0.1"),
    ],
    "similarity without evaluations": ["--communicator", "similarity", "--eval-prompts", "0"],
    "PPO with one completion": ["--algorithm", "ppo", "--group-size", "1"],
    "values without a clip": ["--algorithm", "ppo", "--value-clip-coef", "0"],
    "a gate": ["--algorithm", "ppo", "--gate", "value"],
    "weights of at most 2": ["--importance-cap", "2"],
}


@pytest.mark.parametrize("case", GOOD)
def test_flags_that_have_an_effect_are_accepted_in_silence(case, capsys):
    """What is just inside a bound, and what is read."""
    parse_args(prpo_llm, GOOD[case])
    assert capsys.readouterr().out == ""


LAUNCHED = {
    "policies": ({}, (False, "", "")),
    "averages": ({"aggregation": "weights"}, (False, "replace", "")),
    "isolated agents": ({"aggregation": "none"}, (True, "", "")),
    "the identity": ({"communicator": "identity"}, (True, "", "")),
    "one agent": ({"num_agents": 1}, (True, "", "")),
    "a common A": (
        {"lora_average": "frozen-a"},
        (
            False,
            "",
            "--lora-average frozen-a: A follows from --seed, which may differ between owners",
        ),
    ),
}


@pytest.mark.parametrize("case", LAUNCHED)
def test_a_launcher_knows_what_a_run_needs(case, files, tmp_path, monkeypatch):
    """Whether agents send anything, what averages do to them, and why they must be together."""
    changes, expected = LAUNCHED[case]
    args = tiny(files, tmp_path, **changes)
    assert told_to_launcher(monkeypatch, prpo_llm.main, args) == expected


def test_a_run_without_a_communication_round_says_so(files, tmp_path, capsys):
    """In its first lines, as in control."""
    for total, rounds in ((1, "NO"), (2, "1")):
        train(files, tmp_path / rounds, total_steps=total, local_updates=2, eval_prompts=0)
        assert f", {rounds} communication rounds" in capsys.readouterr().out


def test_a_coefficient_of_zero_is_reported_where_policies_are_mixed(capsys):
    parse_args(prpo_llm, ["--kl-coef", "0"])
    line = "--kl-coef 0: policies are sent, and peers have no influence\n"
    assert capsys.readouterr().out == line
    parse_args(prpo_llm, ["--kl-coef", "0", "--aggregation", "weights"])
    parse_args(prpo_llm, ["--kl-coef", "0", "--communicator", "identity"])
    parse_args(prpo_llm, ["--kl-coef", "0.1"])
    assert capsys.readouterr().out == ""


def test_a_model_that_cannot_be_loaded_ends_with_one_line(files, tmp_path):
    """The line is printed before there is a run's folder."""
    message = refusal(prpo_llm.main, tiny(files, tmp_path / "runs", base_model="nowhere/at/all"))
    assert message.startswith("--base-model nowhere/at/all: cannot be loaded")
    assert not (tmp_path / "runs").exists()
