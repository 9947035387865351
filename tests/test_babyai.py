"""Agents in text worlds: descriptions, episodes, advantages, the federation, placements, resume."""

import csv
import dataclasses
import importlib
import itertools
import json
import math
import os
import runpy
import shutil
import sys
from collections import deque
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import wire
from command import parse_args
from completion_server import CompletionServer
from helpers import (
    REPOSITORY,
    in_ranks,
    metrics_of_page,
    name_in_page,
    notes_of,
    only_run,
    read_jsonl,
    refusal,
    results_of,
    scalars_of,
    table_of,
    told_to_launcher,
    write_matrix,
)
from peft import PeftModel
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import communicators
import prpo_babyai
import prpo_llm

sys.path.insert(0, str(REPOSITORY / "benchmark"))
babyai = importlib.import_module("babyai")

HOUSE = f"{REPOSITORY / 'benchmark' / 'worlds' / 'house.py'}:make"
TINY = {
    "device": "cpu",
    "num_agents": 3,
    "total_steps": 2,
    "local_updates": 1,
    "save_every": 1,
    "batch_size": 2,
    "group_size": 3,
    "max_turns": 4,
    "tasks": 36,
    "tasks_per_agent": 5,
    "eval_episodes": 1,
    "response_length": 5,
    "max_prompt_tokens": 200,
    "learning_rate": 1e-2,
    "lora_rank": 2,
    "minibatch_size": 10,
    "micro_batch_size": 5,
    "categories": ("GoToObj", "GoToLocal"),
}


@pytest.fixture(scope="session")
def folder(once):
    """A tiny model that answers with actions, not always with one that is admissible."""

    def make(folder):
        size = {"hidden_size": 24, "layers": 2}
        settings = babyai.Args(episodes=1, steps=60, batch_size=8, learning_rate=2e-2, **size)
        tokenizer = babyai.make_tokenizer()
        model = babyai.train(settings, tokenizer, babyai.collect(settings))
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return once("babyai-model", make)[0]


@pytest.fixture
def tiny(folder, tmp_path, monkeypatch):
    """tiny(**changes): the arguments of a tiny run in which an action in words is a reward.

    The tiny model solves nothing, so episodes succeed by going forward twice.
    """
    step = prpo_babyai.TextLevel.step

    def count_forward(self, action):
        seen, _, terminated, truncated, info = step(self, action)
        self.forward = getattr(self, "forward", 0) + (action == "go forward")
        success = self.forward == 2
        return seen, 10.0 * success, terminated or success, truncated, info | {"success": success}

    monkeypatch.setattr(prpo_babyai.TextLevel, "step", count_forward)

    def make(name="runs", **changes):
        settings = TINY | {"base_model": str(folder), "run_dir": str(tmp_path / name)} | changes
        return prpo_babyai.Args(**settings)

    return make


# The arguments as a command line
flags = communicators.list_words


def weights_of(run):
    """Each agent's adapter, as PEFT has it."""
    paths = sorted(run.glob("agent_*/adapter_model.safetensors"))
    return [load_file(path) for path in paths]


def flat(weights):
    """An adapter as a vector."""
    return torch.cat([weights[name].flatten() for name in sorted(weights)])


# --- the world ---

CODES = {
    ".": (1, 0, 0),
    "?": (0, 0, 0),
    "#": (2, 5, 0),
    "r": (5, 0, 0),  # a red key
    "g": (6, 1, 0),  # a green ball
    "y": (7, 4, 0),  # a yellow box
    "o": (4, 2, 0),  # an open blue door
    "c": (4, 3, 1),  # a closed purple door
    "l": (4, 5, 2),  # a locked grey door
}


def draw(picture):
    """The observation that a picture shows: far above, the agent in the middle below."""
    rows = picture.split()
    image = np.zeros((7, 7, 3), dtype=np.uint8)
    for j, row in enumerate(rows):
        for i, letter in enumerate(row):
            image[i, j] = CODES[letter]
    return image


@pytest.mark.parametrize(
    ("picture", "text"),
    [
        ("....... ....... ....... ....... ....... ....... .......", "You see nothing"),
        # Walls only straight ahead, to the left and to the right; others are not described
        (
            "####### #.....# #.....# #.....# #.....# #.....# #.....#",
            "You see a wall 6 steps forward, You see a wall 3 steps left, "
            "You see a wall 3 steps right",
        ),
        # An object hides the wall behind it; cells that are not seen do not
        (
            "???#??? ???#??? ...r... ....... ....... ....... #.g..?#",
            "You see a wall 3 steps right, You see a green ball 1 step left, "
            "You see a red key 4 steps forward",
        ),
        # What is carried comes first; to the side, then forward; left to right, far to near
        (
            "####### y...... ....... ....g.. ....r.. ...#... #..y..#",
            "You carry a yellow box, You see a wall 1 step forward, You see a wall 3 steps left, "
            "You see a wall 3 steps right, "
            "You see a yellow box 3 steps left and 5 steps forward, "
            "You see a green ball 1 step right and 3 steps forward, "
            "You see a red key 1 step right and 2 steps forward",
        ),
        # Doors with their states, and the article of the state
        (
            "####### ..c.... ....... ...o... ......l ....... ##...##",
            "You see a wall 2 steps left, You see a wall 2 steps right, "
            "You see a closed purple door 1 step left and 5 steps forward, "
            "You see an open blue door 3 steps forward, "
            "You see a locked grey door 3 steps right and 2 steps forward",
        ),
    ],
)
def test_describe_says_what_a_view_shows(picture, text):
    assert prpo_babyai.describe(draw(picture)) == text


def test_describe_on_a_level_from_the_literature():
    """The example of shared notes: GoToLocal with seed 1 begins like this."""
    text, _ = prpo_babyai.TextLevel("GoToLocal", 1).reset()
    first = "You see a wall 4 steps forward, You see a red key 2 steps left and 1 step forward"
    assert text.startswith(first)


@pytest.mark.parametrize("level", prpo_babyai.LEVELS)
def test_the_bot_solves_levels_by_words(level):
    """Its actions in words are rewarded with 10 at the end; all texts lie in the spaces."""
    lengths = []
    for seed in range(4):
        env = prpo_babyai.TextLevel(level, seed)
        text, info = env.reset()
        bot = babyai.BabyAIBot(env.level)
        rewards = []
        terminated = False
        while not terminated:
            assert text in env.observation_space
            action = info["actions"][int(bot.replan())]
            assert action in env.action_space
            text, reward, terminated, truncated, info = env.step(action)
            rewards.append(reward)
            assert not truncated
        assert info["success"] and rewards[-1] == 10 and not any(rewards[:-1])
        assert info["task"] == env.level.mission
        lengths.append(len(rewards))
    assert np.median(lengths) <= 24


def test_held_out_tasks_have_other_layouts():
    """Seeds are not layouts: grids, places and missions are compared."""

    def read(split, index):
        env = prpo_babyai.make_level(split, index)
        env.reset()
        level = env.level
        grid = level.grid.encode().tobytes()
        return grid, tuple(map(int, level.agent_pos)), level.agent_dir, level.mission

    number = 6 * 12
    training = {read("train", index) for index in range(number)}
    assert len(training) == number
    assert not training & {read("test", index) for index in range(number)}
    levels = [prpo_babyai.make_level("test", index).category for index in range(12)]
    assert levels == [*prpo_babyai.LEVELS] * 2


@pytest.mark.parametrize(
    ("answer", "action"),
    [
        ("<action>go forward</action>", "go forward"),
        ("I see it. <action> Go\nForward </action>", "go forward"),
        ("<action>drop</action> no, <action>toggle</action>", "toggle"),
        ("<action>fly</action>", None),
        ("<action></action>", None),
        ("<action>drop", None),
        ("I must end with <action>. So: <action>drop</action>", "drop"),
        ("go forward", None),
        ("", None),
    ],
)
def test_actions_are_parsed(answer, action):
    assert prpo_babyai.parse_action(answer, list(prpo_babyai.ACTIONS)) == action


def test_any_text_is_an_action_where_none_are_listed():
    assert prpo_babyai.parse_action("<action>search[Red Shoes]</action>", []) == "search[Red Shoes]"
    assert prpo_babyai.parse_action("<action> </action>", []) is None
    # An action is returned as the world spells it
    actions = ["click[2  Pack]", "back"]
    assert prpo_babyai.parse_action("<action>click[2 pack]</action>", actions) == "click[2  Pack]"
    # Two that differ by case are two
    for action in ("open A", "open a"):
        answer = f"<action>{action}</action>"
        assert prpo_babyai.parse_action(answer, ["open A", "open a"]) == action


def test_a_resumed_run_deals_tasks_as_before(tiny, tmp_path):
    """The limit of prompts may change, but not where the first policy's attempts depend on it."""
    args = tiny(partition="hardness")
    config = {"script": "prpo_babyai", "command": communicators.list_words(args)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    args.resume = str(tmp_path)
    prpo_babyai.check_deal(args)
    before = args.max_prompt_tokens
    args.max_prompt_tokens += 1
    message = refusal(prpo_babyai.check_deal, args)
    assert message.startswith(f"--max-prompt-tokens {before + 1}: must be {before} as before")
    args.partition = "iid"
    prpo_babyai.check_deal(args)


def test_isolated_agents_have_no_rounds(tiny):
    args = tiny(local_updates=2, aggregation="policy")
    assert [prpo_babyai.count_rounds(args, step) for step in range(5)] == [0, 0, 1, 1, 2]
    assert prpo_babyai.count_rounds(tiny(local_updates=2, aggregation="none"), 4) == 0


def take(episode, *answers):
    """Answer in turn."""
    for answer in answers:
        episode.act([1], [2], torch.zeros(1), answer)


def test_an_invalid_answer_costs_and_does_nothing():
    args = prpo_babyai.Args(max_turns=4, invalid_penalty=0.25)
    episode = prpo_babyai.Episode(args, prpo_babyai.make_level, "train", 1)
    before = episode.env.level.grid.encode().tobytes()
    place = tuple(episode.env.level.agent_pos), episode.env.level.agent_dir
    text = episode.observation
    take(episode, "what?", "<action>fly</action>")
    assert (tuple(episode.env.level.agent_pos), episode.env.level.agent_dir) == place
    assert episode.env.level.grid.encode().tobytes() == before
    assert episode.env.level.step_count == 0
    assert (episode.total, episode.invalid, episode.past) == (-0.5, 2, [])
    assert episode.observation == text
    assert "Turn 3 of 4" in episode.write_prompt(2)
    take(episode, "<action>turn left</action>")
    assert not episode.ended
    assert episode.env.level.agent_dir == (place[1] - 1) % 4
    take(episode, "")
    assert episode.ended and not episode.success
    assert episode.total == -0.75
    replay = episode.write_replay()
    assert replay.count("no admissible action") == 3
    assert "> turn left" in replay and episode.task in replay


def test_prompts_have_the_last_observations_and_actions():
    args = prpo_babyai.Args(max_turns=9)
    episode = prpo_babyai.Episode(args, prpo_babyai.make_level, "train", 1)
    seen = [episode.observation]
    for action in ("turn left", "go forward", "turn right"):
        take(episode, f"<action>{action}</action>")
        seen.append(episode.observation)
    lines = episode.write_prompt(2).splitlines()
    assert lines == [
        f"Task: {episode.task}",
        "Turn 4 of 9",
        f"Before: {seen[1]}",
        "Action: go forward",
        f"Before: {seen[2]}",
        "Action: turn right",
        f"Now: {seen[3]}",
        f"Actions: {', '.join(prpo_babyai.ACTIONS)}",
        prpo_babyai.INSTRUCTION,
    ]
    assert episode.write_prompt(0).splitlines() == [*lines[:2], *lines[6:]]


def solve(make, split, index):
    """The fewest actions that solve a task, by breadth."""
    paths = deque([()])
    visited = set()
    while paths:
        path = paths.popleft()
        env = make(split, index)
        text, info = env.reset()
        reward = 0
        for action in path:
            assert action in info["actions"] and action in env.action_space
            text, reward, terminated, _, info = env.step(action)
            assert text in env.observation_space
            assert terminated == info["success"] == (reward == 10)
        if reward:
            return path
        state = text
        if state not in visited:
            visited.add(state)
            paths.extend((*path, action) for action in info["actions"])
    raise AssertionError("no solution")


def test_every_house_can_be_solved():
    """In at most 24 turns; where a room is locked, with its key; no house of training is tested."""
    make = prpo_babyai.load_world(prpo_babyai.Args(env=HOUSE))
    lengths = {"fetch": [], "unlock": []}
    for index in range(8):
        for split in ("train", "test"):
            path = solve(make, split, index)
            category = make(split, index).category
            lengths[category].append(len(path))
            assert ("take key" in path) == (category == "unlock")
            assert any(action.startswith("unlock") for action in path) == (category == "unlock")
    assert max(map(max, lengths.values())) <= 24
    assert len({*lengths["unlock"]}) > 1
    seeds = {
        split: {make(split, index).house_seed for index in range(8)} for split in ("train", "test")
    }
    assert not seeds["train"] & seeds["test"]
    env = make("train", 0)
    text, _ = env.reset()
    assert env.step("fly")[:3] == (text, 0.0, False)


# --- advantages and the loss ---


@pytest.mark.parametrize("over", ["episodes", "turns"])
def test_advantages_equal_a_loop(over):
    """With a NaN, a group of equal returns, and episodes of different lengths."""
    generator = torch.Generator().manual_seed(2)
    returns = torch.randint(0, 3, (2, 3, 4), generator=generator).float()
    returns[0, 1] = 7.0
    returns[1, 2, 1] = torch.nan
    lengths = torch.randint(1, 6, (2, 3, 4), generator=generator)
    args = prpo_babyai.Args(advantage_over=over)
    advantages = prpo_babyai.compute_advantages(args, returns, lengths)
    for a in range(2):
        for b in range(3):
            samples = []
            for g in range(4):
                times = int(lengths[a, b, g]) if over == "turns" else 1
                samples += [float(returns[a, b, g])] * times
            samples = [sample for sample in samples if not math.isnan(sample)]
            deviation = np.std(samples)
            for g in range(4):
                expected = 0.0
                if deviation > 0 and not returns[a, b, g].isnan():
                    expected = (float(returns[a, b, g]) - np.mean(samples)) / (deviation + 1e-6)
                assert float(advantages[a, b, g]) == pytest.approx(expected, abs=1e-4)


def test_dual_clip_bounds_the_loss_of_negative_advantages(monkeypatch):
    """By hand: ratios of 1/2, 1 and 8, with advantages of both signs."""
    monkeypatch.setattr(prpo_llm, "compute_log_probs", lambda args, model, hidden: hidden)
    ratios = torch.tensor([0.5, 1.0, 8.0, 0.5, 1.0, 8.0])
    advantages = torch.tensor([2.0, 2.0, 2.0, -2.0, -2.0, -2.0])
    log_policy = torch.stack(((ratios / 10).log(), (1 - ratios / 10).log()), dim=1)
    size = len(ratios)
    mb = {
        "tokens": torch.zeros(1, size, 1, 1, dtype=torch.long),
        "logprobs": torch.full((1, size, 1, 1), math.log(0.1)),
        "advantages": advantages.view(1, size, 1, 1),
        "peers": log_policy.view(1, size, 1, 1, 1, 2),
    }
    place = (0, torch.arange(size), torch.zeros(size).long(), torch.zeros(size).long())
    losses = {}
    for dual_clip in (0.0, 3.0):
        args = prpo_babyai.Args(dual_clip=dual_clip, ent_coef=0.0)
        states = log_policy.view(1, size, 1, 1, 2)
        reference = prpo_llm.Reference([torch.ones(1)], [], [])
        inputs = args, None, states, mb, place, reference, 0.0
        losses[dual_clip] = prpo_llm.compute_token_losses(*inputs)[0].tolist()
    assert losses[0.0] == pytest.approx([-1.0, -2.0, -2.4, 1.6, 2.0, 16.0], rel=1e-4)
    assert losses[3.0] == pytest.approx([-1.0, -2.0, -2.4, 1.6, 2.0, 6.0], rel=1e-4)


def test_minibatches_contain_every_turn_once():
    """Of equal sizes; agents with fewer turns have empty ones at the end, and the order depends on
    the client."""
    args = prpo_babyai.Args(minibatch_size=4)
    batches = prpo_babyai.draw_minibatches(args, [7, 2], [3, 10], step=1, epoch=0)
    assert [inds.shape for inds in batches] == [(2, 4)] * 3
    inds = torch.cat(batches, dim=1)
    assert sorted(inds[0].tolist()) == [0, 1, 2] + [10] * 9
    assert sorted(inds[1].tolist()) == [*range(10), 10, 10]
    assert [(batch < 10).sum(1).tolist() for batch in batches] == [[3, 4], [0, 3], [0, 3]]
    alone = prpo_babyai.draw_minibatches(args, [2], [10], step=1, epoch=0)
    assert all(torch.equal(a[0], b[1]) for a, b in zip(alone, batches, strict=True))
    for client, epoch in ((2, 1), (3, 0)):
        other = prpo_babyai.draw_minibatches(args, [client], [10], step=1, epoch=epoch)
        assert any(not torch.equal(a, b) for a, b in zip(alone, other, strict=True))


def test_one_agent_makes_the_update_of_plain_transformers(tiny, tmp_path, monkeypatch, folder):
    """Two optimizer steps on all turns of a rollout, against PEFT, autograd and torch's AdamW.

    Each turn is a row of its own, with the loss written out: clipping, KL to the policy from which
    training started, entropy, each token with equal weight.
    """
    starts = []
    add_adapters = prpo_babyai.add_adapters

    def add_and_save(args, model, held):
        parameters = add_adapters(args, model, held)
        (tmp_path / "start").mkdir()
        prpo_llm.save_adapter(args, model, 0, tmp_path / "start")
        starts.append(True)
        return parameters

    monkeypatch.setattr(prpo_babyai, "add_adapters", add_and_save)
    rollouts = results_of(monkeypatch, prpo_babyai, "start_episodes")
    args = tiny(
        num_agents=1,
        aggregation="none",
        total_steps=1,
        update_epochs=2,
        minibatch_size=0,
        kl_coef=0.3,
        ent_coef=0.02,
        learning_rate=0.06,
        warmup_steps=1,  # half of the rate in the first step
        eval_episodes=0,
        temperature=0.8,
    )
    prpo_babyai.main(args)
    ((episodes,),) = rollouts
    totals = torch.tensor([episode.total for episode in episodes]).view(2, 3)
    assert (totals.std(1) > 0).any()
    lengths = torch.tensor([len(episode.turns) for episode in episodes]).view(1, 2, 3)
    advantages = prpo_babyai.compute_advantages(args, totals[None], lengths).flatten().tolist()

    base = AutoModelForCausalLM.from_pretrained(folder)
    model = PeftModel.from_pretrained(base, tmp_path / "start", is_trainable=True).eval()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, 0.03, weight_decay=0.0)
    turns = []
    for episode, advantage in zip(episodes, advantages, strict=True):
        turns += [(turn, advantage) for turn in episode.turns]
    count = sum(len(turn.answer) for turn, _ in turns)

    def predict(turn):
        ids = torch.tensor([turn.prompt + turn.answer])
        logits = model(ids).logits[0, len(turn.prompt) - 1 : -1] / args.temperature
        return logits.log_softmax(-1)

    with torch.no_grad():
        old = [predict(turn) for turn, _ in turns]
    for _ in range(2):
        loss = 0.0
        for (turn, advantage), log_old in zip(turns, old, strict=True):
            log_policy = predict(turn)
            tokens = torch.tensor(turn.answer)[:, None]
            ratio = (log_policy - log_old).gather(1, tokens)[:, 0].exp()
            surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            if advantage < 0:
                surrogate = surrogate.clamp(min=3 * advantage)
            # The first policy is the old one, too
            kl = (log_policy.exp() * (log_policy - log_old)).sum(-1)
            entropy = -(log_policy.exp() * log_policy).sum(-1)
            loss = loss - (surrogate - 0.3 * kl + 0.02 * entropy).sum() / count
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, args.max_grad_norm)
        optimizer.step()
    model.save_pretrained(tmp_path / "expected")
    expected = load_file(tmp_path / "expected" / "adapter_model.safetensors")
    (weights,) = weights_of(only_run(tmp_path / "runs"))
    start = load_file(tmp_path / "start" / "adapter_model.safetensors")
    assert expected.keys() == weights.keys()
    moved = flat(weights) - flat(start)
    difference = flat(weights) - flat(expected)
    assert difference.norm() < 1e-2 * moved.norm()
    assert F.cosine_similarity(moved, flat(expected) - flat(start), dim=0) > 0.9999


@pytest.mark.parametrize("cap", [0.0, 1.2])
def test_importance_weights_are_those_of_trainer_and_sampler(tiny, tmp_path, monkeypatch, cap):
    """In bfloat16, in the first optimizer step, whose ratios are 1: each token's advantage counts
    min(p / q, cap) times; q is that of a sampler which is off by more than rounding."""
    collate = prpo_babyai.collate

    def spoil(*inputs):
        batch, counts = collate(*inputs)
        generator = torch.Generator().manual_seed(0)
        batch["sampled"] += torch.randn(batch["sampled"].shape, generator=generator)
        return batch, counts

    monkeypatch.setattr(prpo_babyai, "collate", spoil)
    batches = notes_of(monkeypatch, prpo_babyai, "learn", lambda *inputs: dict(inputs[4]))
    once = {"total_steps": 1, "minibatch_size": 0, "micro_batch_size": 500, "eval_episodes": 0}
    prpo_babyai.main(tiny(precision="bfloat16", importance_cap=cap, batch_size=4, **once))
    (batch,) = batches
    weights = torch.exp(batch["logprobs"] - batch["sampled"]).clamp(max=cap)
    weights = weights if cap else torch.ones_like(weights)
    rows = table_of(only_run(tmp_path / "runs"), "metrics")
    for row, weights_of_agent, mask, advantages in zip(
        rows, weights, batch["mask"], batch["advantages"], strict=True
    ):
        assert float(row["first_log_ratio"]) < 1e-5
        expected = -(weights_of_agent * advantages * mask).sum() / mask.sum()
        assert float(row["policy_loss"]) == pytest.approx(float(expected), abs=1e-5)
        unweighted = -(advantages * mask).sum() / mask.sum()
        assert (abs(float(expected - unweighted)) > 1e-3) == (cap > 0)


def test_coefficient_of_the_kl_penalty_falls(tiny, tmp_path, monkeypatch):
    """What the update of every step gets, and what is logged."""
    coefs = notes_of(monkeypatch, prpo_babyai, "learn", lambda *inputs: inputs[-1])
    changes = {"kl_coef": 0.4, "kl_schedule": "linear", "eval_episodes": 0, "minibatch_size": 0}
    prpo_babyai.main(tiny(total_steps=2, update_epochs=1, **changes))
    assert coefs == pytest.approx([0.4, 0.2])
    logged = scalars_of(only_run(tmp_path / "runs"))["charts/kl_coefficient"]
    assert logged == [(1, pytest.approx(0.4)), (2, pytest.approx(0.2))]


# --- episodes side by side ---


def test_episodes_side_by_side_are_those_played_alone(tiny, tmp_path):
    """Whoever else plays: the same prompts, answers and rewards, and their own random numbers."""
    args = tiny(rollout_batch_size=4)
    present = dataclasses.replace(args, num_agents=2)
    model, tokenizer = prpo_babyai.load_base(args)
    trained, _ = prpo_babyai.add_adapters(present, model, 2)
    trained += 0.01 * torch.randn(trained.shape, generator=torch.Generator().manual_seed(5))
    tasks = [np.arange(5), np.arange(5, 9)]
    start = prpo_babyai.make_level

    def begin():
        return prpo_babyai.start_episodes(args, start, [0, 1], tasks, 3)

    together = begin()
    shown = []
    prpo_babyai.play(
        args, model, tokenizer, together, 1.0, show=lambda *counts: shown.append(counts)
    )
    total = sum(map(len, together))
    assert shown == sorted(shown) and shown[-1] == (total, total) and len(shown) > 1
    alone = begin()
    for agent, row in enumerate(alone):
        for episode in row:
            prpo_babyai.play(args, model, tokenizer, [[episode]], 1.0, (agent,))
    ends = set()
    for row, other_row in zip(together, alone, strict=True):
        for episode, other in zip(row, other_row, strict=True):
            assert [turn.answer for turn in episode.turns] == [turn.answer for turn in other.turns]
            assert [turn.prompt for turn in episode.turns] == [turn.prompt for turn in other.turns]
            assert (episode.total, episode.success) == (other.total, other.success)
            ends.add(len(episode.turns))
    assert len(ends) > 1  # episodes leave the batch
    groups = [[episode.index for episode in row] for row in together]
    for row in groups:
        assert row[0] == row[1] == row[2] != row[3] == row[4] == row[5]
    batch, counts = prpo_babyai.collate(together, "cpu")
    assert counts == [sum(len(episode.turns) for episode in row) for row in together]
    assert batch["mask"].sum((1, 2, 3)).tolist() == [
        sum(len(turn.answer) for episode in row for turn in episode.turns) for row in together
    ]
    spread = prpo_babyai.spread_advantages(torch.arange(12.0).view(2, 2, 3), batch)
    for k, row in enumerate(together):
        expected = sum((6 * k + e) * len(t.answer) for e in range(6) for t in row[e].turns)
        assert float(spread[k].sum()) == expected
    assert not batch["mask"][0, counts[0] :].any()


@pytest.fixture
def server(folder):
    """A server of the tiny model."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with CompletionServer(model, AutoTokenizer.from_pretrained(folder)).running() as server:
        yield server


def test_a_server_plays_with_the_agents_adapters(tiny, server, tmp_path, monkeypatch):
    """Every turn's prompt is sent once, with the adapter of its agent; the old log-probabilities
    are computed here; greedily the evaluations are those of this process."""
    options = {"num_agents": 2, "eval_temperature": 0.0, "rollout_batch_size": 0}
    options |= {"learning_rate": 1e-3}
    prpo_babyai.main(tiny("plain", **options))
    batches = []
    learn = prpo_babyai.learn

    def keep(args, model, trained, optimizers, batch, *inputs):
        if not any(batch is other for other in batches):
            batches.append(batch)
        assert server.loaded == {}
        return learn(args, model, trained, optimizers, batch, *inputs)

    monkeypatch.setattr(prpo_babyai, "learn", keep)
    monkeypatch.setattr(prpo_llm, "compare_with_plain", lambda *_: None)
    monkeypatch.setattr(prpo_llm, "generate", None)  # no completion is computed here
    prpo_babyai.main(tiny("served", generate_with=server.url, **options))
    run = only_run(tmp_path / "served")
    before = {}
    for name in ("plain", "served"):
        lines = (only_run(tmp_path / name) / "episodes.jsonl").read_text().splitlines()
        before[name] = [row for row in map(json.loads, lines) if row["step"] == 0]
    assert before["served"] == before["plain"] and len(before["plain"]) == 2 * 2
    assert server.loaded == {} and not (run / "serving").exists()

    sent = [body for path, body in server.requests if path == "/v1/completions"]
    sent = [body for body in sent[1:] if body["temperature"]]  # without the check and evaluations
    assert {(body["n"], body["max_tokens"], body["temperature"]) for body in sent} == {(1, 5, 1.0)}
    requested = [(body["model"].rpartition("-")[0], tuple(body["prompt"])) for body in sent]
    played = []
    assert len(batches) == 2
    for step, batch in enumerate(batches, 1):
        agents, turns = batch["mask"].shape[:2]
        for n, prompt in enumerate(batch["prompts"]):
            if batch["mask"][n // turns, n % turns].any():
                played.append((f"{run.name}-agent_{n // turns}-step_{step}", tuple(prompt)))
        assert agents == 2 and batch["logprobs"] is not batch["sampled"]
        mask = batch["mask"]
        computed = batch["logprobs"][mask]
        torch.testing.assert_close(computed, batch["sampled"][mask], rtol=0, atol=1e-4)
        assert not torch.equal(computed, batch["sampled"][mask])
    assert sorted(requested) == sorted(played)
    assert all(0 < float(row["sampling_gap"]) < 1e-4 for row in table_of(run, "metrics"))


@pytest.mark.parametrize("bias", [True, False])
def test_adapters_are_added_to_the_weights(bias):
    """Outputs, and gradients of inputs, A and B; of all agents and of some, in any order."""
    torch.manual_seed(0)
    base = torch.nn.Linear(6, 5, bias=bias).requires_grad_(False)
    layer = prpo_llm.Adapters(base, {"policy": (3, 2, 8), "snapshot": (4, 2, 8)})
    for parameter in layer.parameters():
        parameter.data.normal_()
    for name, numbers in (("policy", None), ("snapshot", (3, 1)), ("policy", (2,))):
        x = torch.randn(6, 4, 6).requires_grad_()
        chosen = numbers or range(3)
        parts = []
        for k, block in zip(chosen, x.chunk(len(chosen)), strict=True):
            product = layer.B[name][k] @ layer.A[name][k]
            parts.append(F.linear(block, base.weight + 8 / 2 * product, base.bias))
        with prpo_llm.select_adapters(name, numbers):
            y = layer(x)
            with torch.no_grad():
                assert torch.equal(layer(x), y)
                assert torch.equal(layer(x), y)  # from what is kept for the block
        torch.testing.assert_close(y, torch.cat(parts), rtol=1e-4, atol=1e-4)
        inputs = x, layer.A[name], layer.B[name]
        weights = torch.randn(y.shape)
        gradients = torch.autograd.grad((weights * y).sum(), inputs)
        expected = torch.autograd.grad((weights * torch.cat(parts)).sum(), inputs)
        torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-4)


def test_agents_pass_apart_where_their_prompts_differ_in_length(tiny, monkeypatch):
    """The same states and gradients as in one pass, whose padding costs more."""
    args = tiny()
    model, _ = prpo_babyai.load_base(args)
    trained, snapshots = prpo_babyai.add_adapters(args, model, 3)
    generator = torch.Generator().manual_seed(5)
    trained += 0.1 * torch.randn(trained.shape, generator=generator)
    snapshots += 0.1 * torch.randn(snapshots.shape, generator=generator)
    lengths = [3, 4, 30, 25, 7, 1]
    batch = {
        "prompts": [torch.randint(1, 90, (n,), generator=generator).tolist() for n in lengths],
        "tokens": torch.randint(1, 90, (3, 2, 1, 4), generator=generator),
        "lengths": torch.tensor([4, 2, 1, 1, 3, 2]).view(3, 2, 1),
    }
    inside = torch.arange(4) < batch["lengths"][..., None]
    equal = batch | {"prompts": [[1, 2, 3]] * 6}
    assert not prpo_llm.passes_apart(model, equal)
    assert prpo_llm.passes_apart(model, batch)
    model.computes_layers_again = True  # --gradient-checkpointing
    for gradients in (True, False):  # the reference takes the path of the update
        with torch.set_grad_enabled(gradients):
            assert not prpo_llm.passes_apart(model, batch)
    model.computes_layers_again = False
    results = []
    for apart in (True, False):
        monkeypatch.setattr(prpo_llm, "passes_apart", lambda *_, apart=apart: apart)
        trained.grad.zero_()
        with prpo_llm.select_adapters("policy"):
            hidden = prpo_llm.compute_hidden(model, batch)
            (hidden.sin() * inside[..., None]).sum().backward()
        with prpo_llm.select_adapters("snapshot", (2, 0, 2)), torch.no_grad():
            of_snapshots = prpo_llm.compute_hidden(model, batch)
        results.append((hidden.detach()[inside], trained.grad.clone(), of_snapshots[inside]))
    for apart, together in zip(*results, strict=True):
        torch.testing.assert_close(apart, together, rtol=1e-3, atol=1e-4)
    assert all(gradient.norm() > 0 for gradient in results[0][1])


def test_prompts_lose_history_before_they_are_too_long(tiny):
    args = tiny(max_turns=9)
    _, tokenizer = prpo_babyai.load_base(args)
    episode = prpo_babyai.Episode(args, prpo_babyai.make_level, "train", 1)
    take(episode, *["<action>turn left</action>"] * 3)
    sizes = []
    for history in range(3):
        (ids,) = prpo_babyai.encode_texts(tokenizer, [episode.write_prompt(history)])
        sizes.append(len(ids))
    assert sizes == sorted({*sizes})
    for limit, size in ((500, sizes[2]), (sizes[2] - 1, sizes[1]), (sizes[1] - 1, sizes[0])):
        settings = dataclasses.replace(args, max_prompt_tokens=limit)
        (ids,) = prpo_babyai.encode_prompts(settings, tokenizer, [episode])
        assert len(ids) == size
    settings = dataclasses.replace(args, max_prompt_tokens=sizes[0] - 1)
    message = refusal(prpo_babyai.encode_prompts, settings, tokenizer, [episode])
    assert message.startswith(f"--max-prompt-tokens {sizes[0] - 1}: task 1 of train needs a prompt")
    assert message.endswith("; give a larger one, also with --resume")


def test_the_words_of_all_levels_are_tokens():
    """No text of a level, and no answer, has an unknown token."""
    tokenizer = babyai.make_tokenizer()
    unknown = tokenizer.unk_token_id
    settings = babyai.Args(episodes=3)
    for prompt, answer in babyai.collect(settings):
        ids, of_answer = tokenizer([prompt, answer])["input_ids"]
        assert unknown not in ids + of_answer
        text = tokenizer.decode(of_answer)
        assert f"<action>{prpo_babyai.parse_action(text, prpo_babyai.ACTIONS)}</action>" == answer
        assert len(of_answer) < prpo_babyai.Args.response_length


@pytest.mark.slow
def test_the_small_model_is_made_once(tmp_path, capsys):
    """An ordinary folder of transformers; the same settings find it, others are refused."""
    out = str(tmp_path / "model")
    size = {"hidden_size": 24, "layers": 1, "steps": 3, "batch_size": 2, "episodes": 1, "probe": 1}
    rates = babyai.main(babyai.Args(out=out, **size))
    assert [*rates] == [*prpo_babyai.LEVELS]
    model = AutoModelForCausalLM.from_pretrained(Path(out, "model"))
    assert model.config.num_hidden_layers == 1
    capsys.readouterr()
    assert babyai.main(babyai.Args(out=out, **size)) == rates
    assert "there already" in capsys.readouterr().out
    message = refusal(babyai.main, babyai.Args(out=out, **size | {"steps": 4}))
    assert message.startswith(f"--out {out}: was made with other settings")
    # A model that is gone is made again; without probes nothing is said to have been solved
    shutil.rmtree(Path(out, "model"))
    capsys.readouterr()
    assert babyai.main(babyai.Args(out=out, **size)).keys() == rates.keys()
    assert Path(out, "model", "config.json").is_file()
    capsys.readouterr()
    assert babyai.main(babyai.Args(out=f"{out}_2", **size | {"probe": 0, "steps": 10})) == {}
    assert "solved" not in capsys.readouterr().out


# --- tasks and agents ---


def deal(**changes):
    """The tasks of every client; the odd ones are easy."""
    args = prpo_babyai.Args(**{"tasks": 120, "tasks_per_agent": 20, "num_agents": 6} | changes)
    pool = {index: prpo_babyai.LEVELS[index % 6] for index in range(args.tasks)}
    return prpo_babyai.deal_tasks(args, None, pool, None, None)


def test_partitions_over_tasks(monkeypatch):
    """Sets of one size without overlap; mixtures of categories; sizes; shares of easy tasks."""
    monkeypatch.setattr(prpo_babyai, "label_tasks", lambda args, make, numbers, *_: numbers % 2 > 0)
    sets = deal()
    assert sorted(np.concatenate(sets).tolist()) == [*range(120)]
    assert [len(items) for items in sets] == [20] * 6
    assert all(len({*items.tolist()}) == 20 for items in deal(num_agents=50))
    assert [items.tolist() for items in deal(seed=2)] != [items.tolist() for items in sets]

    def spread(strength):
        shares = [
            np.bincount(items % 6, minlength=6)
            for items in deal(partition="preference", strength=strength, num_agents=40)
        ]
        return np.var(np.array(shares) / 20, axis=0).mean()

    assert spread(0.0) < spread(1.0) < spread(4.0)

    for strength in (0.1, 100.0):
        sizes = [
            len(items) for items in deal(partition="coverage", strength=strength, num_agents=30)
        ]
        assert sum(sizes) == 30 * 20
        assert min(sizes) >= 4 and max(sizes) <= 40
        assert (np.std(sizes) > 10) == (strength < 1)
        shares = [
            (items % 2).sum()
            for items in deal(partition="hardness", strength=strength, num_agents=30)
        ]
        assert sum(shares) == 30 * 10
        assert (np.std(shares) > 5) == (strength < 1)
    assert {len(items) for items in deal(partition="hardness", num_agents=30)} == {20}

    (everything,) = deal(centralised=True, tasks_per_agent=15)
    assert len(everything) == 90


def test_who_trains_in_a_round():
    """Averages: others in every round, the same within; else the same for the whole run."""
    args = prpo_babyai.Args(
        num_agents=50, agents_per_round=4, local_updates=3, aggregation="weights"
    )
    drawn = [prpo_babyai.draw_clients(args, step) for step in range(1, 31)]
    assert all(len({*clients}) == 4 for clients in drawn)
    rounds = [drawn[k] for k in range(0, 30, 3)]
    assert all(drawn[3 * k : 3 * k + 3] == [clients] * 3 for k, clients in enumerate(rounds))
    assert len(set(map(tuple, rounds))) == 10
    assert len({client for clients in rounds for client in clients}) > 20
    fixed = dataclasses.replace(args, aggregation="none")
    assert prpo_babyai.draw_clients(fixed, 1) == prpo_babyai.draw_clients(fixed, 30)
    everybody = prpo_babyai.Args(num_agents=4, aggregation="weights")
    assert prpo_babyai.draw_clients(everybody, 7) == [0, 1, 2, 3]


# --- training ---


def watch_rounds(monkeypatch):
    """What the agents held send in each round, [agents held, numel]."""

    def stack(exchange, sent, numbers):
        return torch.stack(sent)

    return notes_of(monkeypatch, communicators.Exchange, "round", stack)


def test_fedagent_averages_and_starts_each_round_afresh(tiny, tmp_path, monkeypatch):
    """Three rounds of two clients of eight: only two adapters are in memory.

    At the end of each round both go on from the plain mean of what they had; the optimizer is then
    as new; the reference stays the first policy.
    """
    sent_in_rounds = watch_rounds(monkeypatch)
    states = []
    save = communicators.Run.save

    def watch_save(self, state):
        copied = {}
        for name in ("trained", "snapshot"):
            copied[name] = torch.stack([tensor.clone() for tensor in state[name]])
        copied["moments"] = [len(optimizer.state) for optimizer in state["optimizer"]]
        states.append(copied)
        save(self, state)

    monkeypatch.setattr(communicators.Run, "save", watch_save)
    played = results_of(monkeypatch, prpo_babyai, "start_episodes")
    args = tiny(
        num_agents=8,
        agents_per_round=2,
        aggregation="weights",
        lora_average="frozen-a",
        total_steps=4,
        local_updates=2,
        tasks_per_agent=3,
        categories=(),
    )
    prpo_babyai.main(args)
    assert len(sent_in_rounds) == 2
    for number, sent in enumerate(sent_in_rounds):
        assert sent.shape[0] == 2
        assert not torch.equal(sent[0], sent[1])
        middle = states[2 * number]
        assert middle["moments"] == [1, 1]
        end = states[2 * number + 1]
        for row in end["trained"]:
            torch.testing.assert_close(row, sent.mean(0), rtol=0, atol=1e-6)
        assert end["moments"] == [0, 0]
        assert torch.equal(end["snapshot"], states[0]["snapshot"])
    assert (states[0]["snapshot"] == 0).all()  # B of the start
    tasks = [{episode.index for episode in row} for rows in played for row in rows]
    rows = table_of(only_run(tmp_path / "runs"), "metrics")
    clients = [float(row["client"]) for row in rows]
    assert clients[:2] == clients[2:4] != clients[4:6] == clients[6:]
    assert all(not a & b for a, b in zip(tasks[::2], tasks[1::2], strict=True))
    assert float(rows[-1]["peak_memory"]) > 0


def test_one_client_a_round_hands_its_policy_on(tiny, tmp_path):
    """The paper's figure 3: the next client starts from the last one's adapter, with a fresh
    optimizer, and is held by the first policy."""
    options = {"num_agents": 8, "agents_per_round": 1, "aggregation": "weights"}
    args = tiny(**options, total_steps=3, eval_episodes=0, minibatch_size=0)
    assert parse_args(prpo_babyai, flags(args)).agents_at_once == 1
    prpo_babyai.main(args)
    rows = table_of(only_run(tmp_path / "runs"), "metrics")
    assert len({row["client"] for row in rows}) == 3
    distances = [float(row["kl_reference"]) for row in rows]
    assert distances[0] < 1e-6 < 1e-3 < distances[1] and distances[2] > 1e-3


@pytest.fixture
def saved(monkeypatch):
    """The state of every checkpoint of the runs of a test: name -> [agents, numel]."""
    states = []
    save = communicators.Run.save

    def watch(self, state):
        names = ("trained", "snapshot", "row")
        states.append({name: torch.stack([row.clone() for row in state[name]]) for name in names})
        save(self, state)

    monkeypatch.setattr(communicators.Run, "save", watch)
    return states


def test_peers_get_snapshots_in_rounds_only(tiny, saved):
    """PR-GRPO: the reference's policies are those of the last round, with C of this round."""
    prpo_babyai.main(tiny(total_steps=3, local_updates=2, eval_episodes=0, communicator="uniform"))
    first, second, third = saved
    assert not torch.equal(first["trained"], first["snapshot"])
    assert torch.equal(first["snapshot"][0], first["snapshot"][2])
    assert torch.equal(first["row"], torch.eye(3))
    assert torch.equal(second["trained"], second["snapshot"])
    assert torch.equal(third["snapshot"], second["snapshot"])
    assert not torch.equal(third["trained"], second["trained"])
    assert torch.allclose(third["row"], torch.full((3, 3), 1 / 3))


@pytest.mark.parametrize("aggregation", ["policy", "none"])
def test_agents_without_peers_are_held_by_themselves(tiny, saved, aggregation):
    """PR-GRPO with C the identity: by their policies of the last round; none: by the first one."""
    options = {"aggregation": aggregation, "communicator": "identity", "eval_episodes": 0}
    prpo_babyai.main(tiny(total_steps=3, local_updates=2, **options))
    first, second, third = (state["snapshot"] for state in saved)
    assert torch.equal(first[0], first[1])  # all start from the same
    assert torch.equal(second, saved[1]["trained"]) == (aggregation == "policy")
    assert torch.equal(second, first) == (aggregation == "none")
    assert torch.equal(third, second)


def test_agents_count_by_their_episodes(tiny, saved, monkeypatch):
    """FedAvg's rule: by numbers of samples with a return, and not by their returns."""
    options = {"aggregation": "weights", "eval_episodes": 0, "total_steps": 1}
    args = tiny(communicator="samples", **options)
    prpo_babyai.main(args)
    assert torch.allclose(saved[-1]["row"], torch.full((3, 3), 1 / 3))
    play = prpo_babyai.play

    def lose(args, model, tokenizer, episodes, *more, **options):
        play(args, model, tokenizer, episodes, *more, **options)
        episodes[1][0].total = math.nan

    number = args.batch_size * args.group_size
    with monkeypatch.context() as patch:
        patch.setattr(prpo_babyai, "play", lose)
        prpo_babyai.main(args)
    row = torch.tensor([number, number - 1, number]) / (3 * number - 1)
    assert torch.allclose(saved[-1]["row"], row.expand(3, 3))
    prpo_babyai.main(tiny(communicator="reward", **options))
    assert not torch.allclose(saved[-1]["row"], torch.full((3, 3), 1 / 3))


def test_relative_gain_weighs_gains(tiny, saved, monkeypatch):
    """Over each agent's own rounds before, and not its means."""
    records = results_of(monkeypatch, communicators, "remember")  # mean, gain, baseline
    options = {"communicator_temperature": 0.5, "local_updates": 1, "eval_episodes": 0}
    prpo_babyai.main(tiny(communicator="relative-gain", total_steps=3, **options))
    means, gains, _ = torch.stack(records[-3:]).T
    expected = communicators.relative_gain(gains, 0.5)
    torch.testing.assert_close(saved[-1]["row"], expected)
    assert not torch.allclose(expected, communicators.relative_gain(means, 0.5), atol=0.01)


@pytest.mark.parametrize("aggregation", ["policy", "weights"])
def test_a_policy_that_is_not_finite_is_left_out(tiny, saved, tmp_path, monkeypatch, aggregation):
    """Its parameters of 1e30 are finite; an average takes the others instead."""
    learn = prpo_babyai.learn

    def ruin(args, model, trained, *inputs):
        losses = learn(args, model, trained, *inputs)
        trained[0] = 1e30
        return losses

    monkeypatch.setattr(prpo_babyai, "learn", ruin)
    prpo_babyai.main(tiny(aggregation=aggregation, communicator="uniform", total_steps=1))
    assert torch.allclose(saved[-1]["row"], torch.tensor([0.0, 0.5, 0.5]))
    assert {row["dropped"] for row in table_of(only_run(tmp_path / "runs"), "metrics")} == {"1"}
    assert (saved[-1]["trained"][1:].abs() < 1).all()
    evaluations = table_of(only_run(tmp_path / "runs"), "evaluations")
    means = {row["agent"]: row["mean_success"] for row in evaluations if row["step"] == "1"}
    # Averaged, agent 0 is as the others; else what it answers means nothing
    assert (means["0"] == "nan") == (aggregation == "policy")
    assert means["1"] != "nan"


def test_averages_follow_the_rows_of_a_matrix(tiny, saved, tmp_path, monkeypatch):
    """Agent i goes on from sum_j c_ij of what the agents had: row i of an asymmetric C. So agents
    differ, and each plays for itself in the evaluation; with equal rows the first plays for all.
    """
    play = prpo_babyai.play
    players = []

    def watch(args, model, tokenizer, episodes, temperature, numbers=None, *more, **options):
        players.append(numbers)
        play(args, model, tokenizer, episodes, temperature, numbers, *more, **options)

    monkeypatch.setattr(prpo_babyai, "play", watch)
    C = torch.tensor([[0.5, 0.5, 0.0], [0.1, 0.2, 0.7], [0.0, 0.25, 0.75]])
    matrix = write_matrix(tmp_path / "C.csv", C)
    sent_in_rounds = watch_rounds(monkeypatch)
    options = {"aggregation": "weights", "lora_average": "frozen-a", "eval_episodes": 1}
    prpo_babyai.main(tiny(total_steps=1, communicator=matrix, **options))
    torch.testing.assert_close(saved[-1]["trained"], C @ sent_in_rounds[-1], rtol=0, atol=1e-6)
    assert players[-1] == (0, 1, 2)
    prpo_babyai.main(tiny(total_steps=1, communicator="uniform", **options))
    assert players[-1] == (0,)
    for sparse in ({"topology": "ring"}, {"top_k": 1}):
        assert not prpo_babyai.averages_evenly(tiny(communicator="uniform", **sparse))


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({}, 6),
        ({"topology": "ring", "num_agents": 4}, 8),
        ({"communicator": "similarity", "top_k": 1}, 6),
        ({"top_k": 1}, 3),
        ({"aggregation": "weights", "num_agents": 4, "agents_per_round": 2}, 2),
        ({"aggregation": "weights", "communicator": "identity"}, 0),
        ({"aggregation": "none", "communicator": "similarity"}, 0),
        ({"centralised": True}, 0),
    ],
)
def test_bytes_are_the_adapters_that_others_read(tiny, tmp_path, changes, messages):
    """In one round, of the agents that train, float32."""
    summary = prpo_babyai.main(tiny(total_steps=1, eval_episodes=0, **changes))
    run = only_run(tmp_path / "runs")
    numel = len(flat(weights_of(run)[0]))
    assert summary["communication_bytes"] == 4 * numel * messages


@pytest.mark.parametrize(("changes", "isolated"), [({}, False), ({"aggregation": "none"}, True)])
def test_a_launcher_knows_that_clients_must_be_together(tiny, monkeypatch, changes, isolated):
    """They are drawn in one place, of all that there are."""
    args = tiny(num_agents=4, agents_per_round=2, **changes)
    needs = told_to_launcher(monkeypatch, prpo_babyai.main, args)
    assert needs == (isolated, "", "the clients that train are drawn in one place")


def test_a_run_leaves_readable_files(tiny, tmp_path, capsys):
    """PR-GRPO on two categories: metrics, evaluations of each category, episodes, replays."""
    prpo_babyai.main(tiny(total_steps=1, eval_episodes=2, learning_rate=5e-3))
    run = only_run(tmp_path / "runs")
    lines = capsys.readouterr().out.splitlines()
    before_and_after = {}
    for row in table_of(run, "evaluations"):
        means = before_and_after.setdefault((row["task"], row["step"]), [])
        means.append(float(row["mean_success"]))
    for line, task in zip(lines[-3:], ("all", "GoToLocal", "GoToObj"), strict=True):
        shown = [f"{np.mean(before_and_after[task, step]):.3f}" for step in ("0", "1")]
        assert line.split() == [task, *shown]
    rows = table_of(run, "metrics")
    assert len(rows) == 3
    names = {"success", "return", "length", "invalid", "success_GoToObj", "success_GoToLocal"}
    assert names < rows[0].keys()
    for row in rows:
        assert 0 <= float(row["invalid"]) <= 1 <= float(row["length"]) <= 4
        assert 0 < float(row["kl_reference"]) < 1
        assert float(row["first_log_ratio"]) == pytest.approx(0, abs=1e-4)
    evaluations = table_of(run, "evaluations")
    assert {row["task"] for row in evaluations} == {"all", "GoToObj", "GoToLocal"}
    assert {row["episodes"] for row in evaluations} == {"4", "2"}
    assert {row["step"] for row in evaluations} == {"0", "1"}
    episodes = read_jsonl(run / "episodes.jsonl")
    assert len(episodes) == 2 * 3 * 4
    by_agent = [episode for episode in episodes if (episode["agent"], episode["step"]) == (1, 1)]
    mean = np.mean([episode["success"] for episode in by_agent])
    (row,) = (
        row for row in evaluations if (row["agent"], row["step"], row["task"]) == ("1", "1", "all")
    )
    assert float(row["mean_success"]) == pytest.approx(mean)
    tasks = {}  # of each client
    for row in table_of(run, "clients"):
        assert row["category"] in ("GoToObj", "GoToLocal")
        tasks.setdefault(row["client"], []).append(int(row["tasks"]))
    assert [sum(counts) for counts in tasks.values()] == [5, 5, 5]
    replay = (run / "replays" / "agent_2.txt").read_text()
    assert "GoToObj" in replay and "GoToLocal" in replay and "return" in replay
    assert all(episode["mission"] for episode in episodes)

    # Whatever it writes is explained, and nothing else is
    explained = metrics_of_page("prpo_babyai")
    explained -= {"communication/lost_by_average"}
    tags = {name_in_page(tag) for tag in scalars_of(run)}
    categories = {tag for tag in tags if tag.startswith("episode/success_")}
    # A category that no agent has played is nan
    assert categories and categories <= {"episode/success_GoToObj", "episode/success_GoToLocal"}
    assert tags - categories == explained - {"episode/success_CATEGORY"}


def test_evaluations_are_of_held_out_tasks(tiny, monkeypatch):
    """Each agent plays them with its own adapter, at the temperature of evaluations and with the
    same random numbers."""
    evaluated = []
    play = prpo_babyai.play

    def watch(args, model, tokenizer, episodes, temperature, numbers=None, *others, **named):
        if numbers is not None:
            evaluated.append((episodes, temperature, numbers))
        play(args, model, tokenizer, episodes, temperature, numbers, *others, **named)

    monkeypatch.setattr(prpo_babyai, "play", watch)
    prpo_babyai.main(tiny(total_steps=1, eval_episodes=2, eval_temperature=0.7))
    assert len(evaluated) == 2
    for episodes, temperature, numbers in evaluated:
        assert temperature == 0.7
        assert numbers == (0, 1, 2)
        for row in episodes:
            assert [episode.place for episode in row] == [
                f"task {index} of test" for index in (1, 7, 0, 6)
            ]
            for episode, first in zip(row, evaluated[0][0][0], strict=True):
                assert torch.equal(episode.uniforms, first.uniforms)


def test_an_episode_counts_once_in_a_world_without_categories(tiny, tmp_path):
    """The category of all of them is `all`, which is also the name of the mean over categories."""
    path = tmp_path / "world.py"
    path.write_text(WORLDS["easy"].replace("REST", "0"))
    prpo_babyai.main(tiny(env=f"{path}:make", categories=(), eval_episodes=3, total_steps=1))
    rows = table_of(only_run(tmp_path / "runs"), "evaluations")
    assert {row["task"] for row in rows} == {"all"}
    assert {row["episodes"] for row in rows} == {"3"}


SCORES = """
import gymnasium
from gymnasium import spaces

class Shop(gymnasium.Env):
    observation_space = action_space = spaces.Text(9)

    def __init__(self, index):
        self.index = index

    def reset(self):
        return "x", FIRST

    def step(self, action):
        score = self.index % 5 / 4
        return "y", 10.0 * (score == 1), True, False, {"score": score}

def make(split, index):
    return Shop(index)
"""


@pytest.mark.parametrize("first", [{"score": 0}, {}])
def test_scores_of_a_world_are_in_its_evaluations(tiny, tmp_path, first):
    """The mean of the episodes' last scores; none where the first observations have none."""
    path = tmp_path / "shop.py"
    path.write_text(SCORES.replace("FIRST", repr(first)))
    prpo_babyai.main(tiny(env=f"{path}:make", categories=(), eval_episodes=5, total_steps=1))
    run = only_run(tmp_path / "runs")
    rows = table_of(run, "evaluations")
    episodes = read_jsonl(run / "episodes.jsonl")
    assert len(episodes) == 2 * 3 * 5
    if not first:
        assert not any("score" in row for row in rows + episodes)
        return
    for episode in episodes:
        ended = any(action is not None for action in episode["actions"])
        assert episode["score"] == (episode["task"] % 5 / 4 if ended else 0)
    assert len({episode["score"] for episode in episodes}) == 5
    for row in rows:
        key = int(row["step"]), int(row["agent"])
        scores = [row["score"] for row in episodes if (row["step"], row["agent"]) == key]
        assert float(row["score"]) == pytest.approx(np.mean(scores))


WEB_AGENT_ENV = """
class WebAgentTextEnv:
    instruction_text = "a red shoe"

    def __init__(self, server=None, **options):
        self.server = server or self
        self.goals = [{"category": "fashion"}] * 600

    def reset(self, session):
        return f"page {session}", None

    def step(self, action):
        return "bought", 0.75 if "blue" in action else 1.0, True, None

    def get_available_actions(self):
        return {"clickables": ["red", "blue"], "has_search_bar": False}
"""


def test_webshop_gives_the_task_score(tmp_path, monkeypatch):
    """What the shop pays for a purchase; only a whole score is a success."""
    package = tmp_path / "web_agent_site" / "envs"
    package.mkdir(parents=True)
    (package / "web_agent_text_env.py").write_text(WEB_AGENT_ENV)
    monkeypatch.syspath_prepend(tmp_path)
    world = runpy.run_path(str(REPOSITORY / "benchmark" / "worlds" / "webshop.py"))
    for action, score in (("click[blue]", 0.75), ("click[red]", 1.0)):
        episode = prpo_babyai.Episode(prpo_babyai.Args(), world["make"], "train", 0)
        assert (episode.observation, episode.score) == ("page 500", 0)
        assert episode.category == "fashion"
        take(episode, f"<action>{action}</action>")
        assert episode.ended and episode.score == score
        assert (episode.success, episode.total) == (score == 1, 10 * (score == 1))
    for name in [name for name in sys.modules if name.startswith("web_agent_site")]:
        del sys.modules[name]


def test_tasks_are_labelled_by_what_the_first_policy_solves(tiny, tmp_path, monkeypatch):
    """In one attempt of each; an edited world is labelled anew, and the same one is not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "world.py"
    args = tiny(env=f"{path}:make", categories=(), partition="hardness")
    model, tokenizer = prpo_babyai.load_base(args, torch.device("cpu"))
    prpo_llm.add_adapters(args, model, 1)
    numbers = np.arange(6)
    for rest in (1, 1, 0):
        path.write_text(WORLDS["easy"].replace("REST", str(rest)))
        make = prpo_babyai.load_world(args)
        solved = prpo_babyai.label_tasks(args, make, numbers, model, tokenizer)
        assert solved.tolist() == [index % 2 == rest for index in range(6)]
    assert len([*(tmp_path / "cache" / "prpo").glob("solved_*/")]) == 2


@pytest.mark.parametrize(
    ("ends", "info", "success"),
    [
        ((True, False), {}, True),
        ((False, True), {}, False),  # out of time, whatever it was paid
        ((True, False), {"success": False}, False),
    ],
)
def test_success_is_a_reward_with_which_the_world_ends(ends, info, success):
    class World(gymnasium.Env):
        def reset(self):
            return "x", {}

        def step(self, action):
            return "y", 1.0, *ends, info

    args = prpo_babyai.Args()
    episode = prpo_babyai.Episode(args, lambda split, index: World(), "train", 0)
    assert episode.step("go") == 1
    assert (episode.success, episode.ended) == (success, True)


def test_a_run_without_a_communication_round_says_so(tiny):
    for local_updates, rounds in ((3, "NO"), (2, "1")):
        args = tiny(local_updates=local_updates, aggregation="policy")  # two steps
        description = prpo_babyai.describe_clients(args, [np.arange(5)] * 2)
        assert description.endswith(f", {rounds} communication rounds")


def test_clients_are_counted_by_category(tmp_path):
    path = tmp_path / "clients.csv"
    pool = {3: "go", 5: "open", 8: "go"}
    prpo_babyai.write_clients(path, pool, [np.array([8, 3]), np.array([5, 8])])
    rows = [",".join(row.values()) for row in table_of(tmp_path, "clients")]
    assert rows == ["0,go,2", "1,go,1", "1,open,1"]


@pytest.fixture
def speller(tmp_path):
    """The folder of a model with a token for each byte, which can write any action."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: k for k, letter in enumerate([babyai.EOS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"eos_token": babyai.EOS, "pad_token": babyai.EOS}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = babyai.make_model(babyai.Args(hidden_size=24, layers=1), tokenizer, **sizes)
    model.save_pretrained(tmp_path / "speller")
    tokenizer.save_pretrained(tmp_path / "speller")
    return str(tmp_path / "speller")


def test_another_world_trains(tiny, speller, tmp_path):
    """A world of one's own, centralised: one agent with everybody's tasks."""
    settings = {"env": HOUSE, "categories": (), "centralised": True, "total_steps": 1}
    settings |= {"base_model": speller, "max_prompt_tokens": 1500, "response_length": 40}
    prpo_babyai.main(tiny(**settings))
    run = only_run(tmp_path / "runs")
    (row,) = table_of(run, "metrics")
    assert {"success_fetch", "success_unlock"} < row.keys()
    assert len(weights_of(run)) == 1


def test_a_model_that_cannot_write_the_actions_is_refused(tiny, speller, tmp_path, capsys):
    """It would be trained on empty groups: no answer ever names an action."""
    other = {"env": HOUSE, "categories": ()}
    message = refusal(prpo_babyai.main, tiny(**other, max_prompt_tokens=400))
    assert message.startswith("--base-model")
    assert "has no tokens for the actions of --env" in message and "go to" in message
    message = refusal(
        prpo_babyai.main,
        tiny(**other, base_model=speller, max_prompt_tokens=1500, response_length=20),
    )
    assert message.startswith("--response-length 20: must be at least ")
    assert not (tmp_path / "runs").exists()
    capsys.readouterr()
    prpo_babyai.check_actions(tiny(), babyai.make_tokenizer(), ["go forward", "fly", "drop"])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("has no tokens for the actions of --env babyai fly")


def test_what_the_ranks_cannot_share_is_named(monkeypatch):
    """The flag that was given, and not another that does not go with it."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for argv in (
        ["--centralised", "--aggregation", "none"],
        ["--agents-per-round", "3", "--num-agents", "4"],
    ):
        message = refusal(parse_args, prpo_babyai, argv)
        assert message.startswith(argv[0])
        assert "multiple of the 2 processes, but" in message


def test_every_world_is_closed(tiny, monkeypatch):
    """Those that are played, those that are looked at, and those of evaluations."""
    numbers = {"open": 0, "closed": 0}
    begin = prpo_babyai.TextLevel.__init__

    def note_begin(self, *inputs):
        numbers["open"] += 1
        begin(self, *inputs)

    def note_end(self):
        numbers["closed"] += 1

    monkeypatch.setattr(prpo_babyai.TextLevel, "__init__", note_begin)
    monkeypatch.setattr(prpo_babyai.TextLevel, "close", note_end)
    prpo_babyai.main(tiny(total_steps=1))
    assert numbers["closed"] == numbers["open"] > 3 * 2 * 3


def test_success_before_training_is_that_of_the_same_tasks(tmp_path, capsys):
    """A run that was evaluated later only, or first on fewer tasks, has none."""
    rows = [
        {"step": 0, "task": "all", "episodes": 2, "mean_success": 0.25},
        {"step": 0, "task": "few", "episodes": 1, "mean_success": 0.25},
        {"step": 9, "task": "all", "episodes": 2, "mean_success": 0.5},
        {"step": 9, "task": "few", "episodes": 2, "mean_success": 0.5},
        {"step": 9, "task": "late", "episodes": 2, "mean_success": 0.75},
    ]
    with open(tmp_path / "evaluations.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    prpo_babyai.print_progress(tmp_path)
    table = [line.split() for line in capsys.readouterr().out.splitlines()[-3:]]
    assert table == [["all", "0.250", "0.500"], ["few", "nan", "0.500"], ["late", "nan", "0.750"]]


@pytest.mark.slow
def test_a_pretrained_model_acts(tmp_path):
    """SmolLM2 in bfloat16, whose prompts are messages: it plays, learns and is saved."""
    words = "--base-model smollm2 --precision bfloat16 --response-length 32 --num-agents 2"
    words += " --batch-size 1 --group-size 2 --max-turns 2 --total-steps 1 --eval-episodes 1"
    words += " --categories GoToObj --tasks 60 --tasks-per-agent 4"
    argv = [*words.split(), "--run-dir", str(tmp_path / "runs")]
    prpo_babyai.main(parse_args(prpo_babyai, argv))
    run = only_run(tmp_path / "runs")
    assert len(weights_of(run)) == 2
    assert all(0 < float(row["sampling_gap"]) < 0.3 for row in table_of(run, "metrics"))


@pytest.mark.parametrize("aggregation", ["policy", "weights"])
@pytest.mark.usefixtures("smooth_adam")
def test_processes_train_as_one_does_and_send_adapters_only(tiny, tmp_path, aggregation):
    """Two of four clients in one process or in two: the same training, and nothing but adapters
    and a few scalars on the wire."""
    options = {"aggregation": aggregation, "num_agents": 4, "agents_per_round": 2}

    def train(name):
        if "RANK" in os.environ:
            wire.watch_all()
        prpo_babyai.main(tiny(name, **options))
        return wire.calls

    train("together")
    calls, _ = in_ranks(lambda: train("apart"), lambda: train("apart"))
    together = only_run(tmp_path / "together")
    apart = only_run(tmp_path / "apart")
    for a, b in zip(weights_of(together), weights_of(apart), strict=True):
        torch.testing.assert_close(flat(a), flat(b), rtol=0, atol=2e-4)
    for row, other in zip(table_of(together, "metrics"), table_of(apart, "metrics"), strict=True):
        for name in ("success", "return", "client", "invalid", "kl_reference", "policy_loss"):
            assert float(row[name]) == pytest.approx(float(other[name]), abs=1e-3)
    numel = len(flat(weights_of(together)[0]))
    sizes = [
        math.prod(shape)
        for name, tensors in calls
        if name in ("all_gather", "broadcast")
        for _, shape in tensors
    ]
    assert numel in sizes
    assert all(size == numel or size < 100 for size in sizes)
    names = {name for name, tensors in calls if tensors}
    assert names <= {"all_gather", "broadcast", "monitored_barrier", "get_rank"}


@pytest.mark.parametrize(("aggregation", "half", "total"), [("policy", 3, 5), ("weights", 2, 4)])
def test_a_resumed_run_is_the_whole_run(tiny, tmp_path, aggregation, half, total):
    """All steps, or some and then the others: the same metrics, adapters and evaluations.

    With mixed policies it is cut in the middle of the second round, at whose end gains over the
    first one weigh the peers.
    """
    options = {"aggregation": aggregation, "num_agents": 4, "agents_per_round": 2}
    options |= {"local_updates": 2}
    options |= {"communicator": "relative-gain" if aggregation == "policy" else "uniform"}
    prpo_babyai.main(tiny("whole", **options, total_steps=total))
    prpo_babyai.main(tiny("halves", **options, total_steps=half))
    whole = only_run(tmp_path / "whole")
    halves = only_run(tmp_path / "halves")
    resumed = ["--resume", str(halves), "--total-steps", str(total)]
    prpo_babyai.main(parse_args(prpo_babyai, resumed))
    for a, b in zip(weights_of(whole), weights_of(halves), strict=True):
        torch.testing.assert_close(flat(a), flat(b), rtol=0, atol=1e-6)
    times = {"tokens_per_second", "peak_memory", "episodes_per_second"}
    for row, other in zip(table_of(whole, "metrics"), table_of(halves, "metrics"), strict=True):
        assert {k: v for k, v in row.items() if k not in times} == {
            k: v for k, v in other.items() if k not in times
        }
    last = [row for row in table_of(whole, "evaluations") if row["step"] == str(total)]
    assert last == [row for row in table_of(halves, "evaluations") if row["step"] == str(total)]


WORLDS = {
    "numbers": "def make(split, index):\n    import gymnasium\n"
    "    return gymnasium.make('CartPole-v1')\n",
    "breaks": "import gymnasium\nfrom gymnasium import spaces\nclass World(gymnasium.Env):\n"
    "    observation_space = action_space = spaces.Text(9)\n    def reset(self):\n"
    "        raise OSError('no game\\nat all')\ndef make(split, index):\n    return World()\n",
    "silent": "import gymnasium\nfrom gymnasium import spaces\nclass World(gymnasium.Env):\n"
    "    observation_space = action_space = spaces.Text(9)\n    def reset(self):\n"
    "        return 7, {}\ndef make(split, index):\n    return World()\n",
    "numbered": "import gymnasium\nfrom gymnasium import spaces\nclass World(gymnasium.Env):\n"
    "    observation_space = action_space = spaces.Text(9)\n    def reset(self):\n"
    "        return 'x', {'actions': [1, 2]}\ndef make(split, index):\n    return World()\n",
    "easy": "import gymnasium\nfrom gymnasium import spaces\nclass World(gymnasium.Env):\n"
    "    observation_space = action_space = spaces.Text(9)\n    def reset(self):\n"
    "        return 'x', {}\n    def step(self, action):\n"
    "        return 'y', float(self.index % 2 == REST), True, False, {}\n"
    "def make(split, index):\n    world = World()\n    world.index = index\n    return world\n",
    "old": "import gymnasium\nfrom gymnasium import spaces\nclass World(gymnasium.Env):\n"
    "    observation_space = action_space = spaces.Text(9)\n    def reset(self):\n"
    "        return 'a text'\ndef make(split, index):\n    return World()\n",
    "four": "import gymnasium\nfrom gymnasium import spaces\nclass World(gymnasium.Env):\n"
    "    observation_space = action_space = spaces.Text(9)\n    def reset(self):\n"
    "        return 'x', {}\n    def step(self, action):\n        return 'y', 0.0, True, {}\n"
    "def make(split, index):\n    return World()\n",
    "training": "import gymnasium\nfrom gymnasium import spaces\nclass World(gymnasium.Env):\n"
    "    observation_space = action_space = spaces.Text(9)\n"
    "def make(split, index):\n    return {'train': World()}[split]\n",
    "short": "import gymnasium\nfrom gymnasium import spaces\nclass World(gymnasium.Env):\n"
    "    observation_space = action_space = spaces.Text(9)\n    def reset(self):\n"
    "        return 'x', {}\n"
    "def make(split, index):\n    return [World(), World()][index]\n",
}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"num_agents": 3, "agents_per_round": 4}, "--agents-per-round 4: must be at most"),
        ({"env": "nowhere.py:make"}, "--env nowhere.py:make: must be babyai, or an existing"),
        ({"categories": ("GoToMoon",)}, "--categories GoToMoon: there is no GoToMoon"),
        ({"group_size": 1}, "--group-size 1: must be at least 2 for GRPO"),
        (
            {"communicator": "surrogate"},
            "--communicator surrogate: is neither a communicator of this script",
        ),
        ({"dual_clip": 0.5}, "--dual-clip 0.5: must be 0 or above 1"),
        ({"importance_cap": 0.5}, "--importance-cap 0.5: must be 0 or above 1"),
        ({"generate_with": "x/v1"}, "--generate-with x/v1: must begin with http://"),
        ({"base_model": "runs/babyai/model"}, "--base-model runs/babyai/model: is not there yet"),
        (
            {"aggregation": "weights", "agents_per_round": 2, "communicator": "reward"},
            "--communicator reward: must be uniform",
        ),
        (
            {"aggregation": "weights", "local_updates": 3},
            "--total-steps 2: must be a multiple of --local-updates 3",
        ),
        ({"agents_per_round": 1, "centralised": True}, "--agents-per-round 1: does not go with"),
        ({"aggregation": "weights", "centralised": True}, "--centralised True: does not go with"),
    ],
)
def test_bad_flags_end_in_one_line(tiny, monkeypatch, tmp_path, changes, line):
    monkeypatch.chdir(tmp_path)
    assert refusal(parse_args, prpo_babyai, flags(tiny(**changes))).startswith(line)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"env": "numbers", "categories": ()}, "{env}: observation_space must be gymnasium.spaces"),
        ({"env": "breaks", "categories": ()}, "{env}: task 0 of test raises OSError: no game"),
        ({"env": "silent", "categories": ()}, "{env}: must return texts; task 0 of test returns"),
        (
            {"env": "numbered", "categories": ()},
            "{env}: must list actions as texts; task 0 of test",
        ),
        ({"env": "old", "categories": ()}, "{env}: task 0 of test raises ValueError: too many"),
        ({"env": "four", "categories": ()}, "{env}: task 0 of test raises ValueError: not enough"),
        ({"env": "training", "categories": ()}, "{env}: task 0 of test raises KeyError: 'test'"),
        ({"env": "short", "categories": ()}, "--tasks 36: the world of --env"),
        ({"max_prompt_tokens": 1020}, "--max-prompt-tokens 1020: with --response-length 5 must be"),
        (
            {"tasks_per_agent": 40},
            "--partition iid: impossible with 12 tasks: every agent needs 40",
        ),
        (
            {"partition": "coverage", "tasks_per_agent": 1, "num_agents": 2, "strength": 0.0},
            "--tasks-per-agent 1: agent",
        ),
    ],
)
def test_bad_worlds_end_in_one_line(tiny, tmp_path, changes, line):
    """Before training: there is no run yet."""
    env = changes.get("env", "babyai")
    if env in WORLDS:
        (tmp_path / f"{env}.py").write_text(WORLDS[env])
        changes = changes | {"env": f"{tmp_path / env}.py:make"}
    message = refusal(prpo_babyai.main, tiny(**changes))
    assert message.startswith(line.format(env=f"--env {changes.get('env')}"))
    assert not Path(tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("name", "problem"),
    [("alfworld", "ALFWorld is not installed: "), ("webshop", "WebShop is not on the path: ")],
)
def test_worlds_without_their_packages_end_in_one_line(tiny, name, problem):
    env = f"{REPOSITORY / 'benchmark' / 'worlds' / name}.py:make"
    message = refusal(prpo_babyai.main, tiny(env=env, categories=()))
    assert message.startswith(f"--env {env}: task 0 of train raises ImportError: {problem}")


def test_a_world_that_breaks_while_playing_ends_in_one_line(tiny, monkeypatch):
    step = prpo_babyai.TextLevel.step

    def fail(self, action):
        if self.level_seed < prpo_babyai.HELD_OUT_SEEDS:
            raise RuntimeError("lost\nconnection")
        return step(self, action)

    monkeypatch.setattr(prpo_babyai.TextLevel, "step", fail)
    message = refusal(prpo_babyai.main, tiny(eval_episodes=0))
    assert message.startswith("--env babyai: task ")
    assert message.endswith("of train raises RuntimeError: lost")


@pytest.mark.parametrize(("name", "call"), [("start_episodes", 3), ("play", 3), ("evaluate", 2)])
def test_a_world_that_breaks_later_loses_no_step(name, call, tiny, tmp_path, monkeypatch):
    """In the third step, or in the evaluation behind the second."""
    function = getattr(prpo_babyai, name)
    calls = itertools.count(1)

    def work_or_fail(*inputs, **options):
        if next(calls) == call:
            raise OSError("lost connection")
        return function(*inputs, **options)

    monkeypatch.setattr(prpo_babyai, name, work_or_fail)
    args = tiny("runs", save_every=10, total_steps=4, eval_every=2)
    if name != "evaluate":
        args.eval_episodes = 0
    with pytest.raises(OSError, match="lost"):
        prpo_babyai.main(args)
    folder = only_run(tmp_path / "runs")
    assert [path.name for path in (folder / "checkpoints" / "agent_0").iterdir()] == ["2.pt"]


def test_an_infinite_reward_of_a_world_is_unknown(tiny, monkeypatch):
    """Its episode is left out of the group, and the agent goes on."""
    step = prpo_babyai.TextLevel.step

    def pay(self, action):
        seen, reward, *rest = step(self, action)
        return seen, math.inf if reward else reward, *rest

    monkeypatch.setattr(prpo_babyai.TextLevel, "step", pay)
    args = tiny(eval_episodes=0, group_size=8)
    summary = prpo_babyai.main(args)
    rows = table_of(only_run(args.run_dir), "metrics")
    assert any(math.isinf(float(row["return"])) for row in rows)
    assert not summary["diverged"]
    assert all(math.isfinite(float(row["policy_loss"])) for row in rows)


def test_flags_of_averages_do_not_bind_isolated_agents(tiny):
    """Neither steps that are no multiple of the interval, nor a dual clip without a clip."""
    args = tiny(aggregation="weights", communicator="identity", local_updates=3, clip_coef=0.0)
    assert parse_args(prpo_babyai, flags(args)).local_updates == 3


def test_games_of_alfworld_are_solvable_and_mixed(tmp_path, monkeypatch):
    """Of its folders, without its package: a game of every category is among the first.

    Only a game's folder says what the game is: the folder of all data may have any name.
    """
    data = tmp_path / "movable-3" / "Sliced"
    world = runpy.run_path(str(REPOSITORY / "benchmark" / "worlds" / "alfworld.py"))
    monkeypatch.setattr(world["importlib"].util, "find_spec", lambda name: name)
    monkeypatch.setenv("ALFWORLD_DATA", str(data))
    unsupported = ["pick_and_place_with_movable_recep", "pick_and_place_simple-AppleSliced"]
    for name in [*world["CATEGORIES"], *unsupported]:
        for k in range(20):
            game = data / "json_2.1.1" / "train" / f"{name}-{k}" / "trial" / "game.tw-pddl"
            game.parent.mkdir(parents=True)
            game.write_text(json.dumps({"solvable": k != 3}))
    games = world["list_games"]("train")
    names = [path.parent.parent.name for path in games]
    assert len(games) == 6 * 19
    assert not any(name.endswith("-3") or "Sliced" in name for name in names)
    assert {name.split("-")[0] for name in names[:40]} == {*world["CATEGORIES"]}
    assert games == world["list_games"].__wrapped__("train")
