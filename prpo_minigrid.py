"""PR-PPO on MiniGrid: agents that share no data learn together through their KL penalty (PRPO paper, eq. 4).

Each agent trains on its own environments; what travels between agents is parameters and a few scalars.

    python prpo_minigrid.py --env-id MiniGrid-DoorKey-6x6-v0                  # three agents in one process
    python prpo_minigrid.py --communicator identity                           # the same agents, isolated
    torchrun --nproc-per-node 3 prpo_minigrid.py --num-agents 3               # one agent per process, same training
    python prpo_minigrid.py --resume runs/<name>                              # go on where a run was cut off
"""

import contextlib
import copy
import functools
import importlib
import itertools
import re
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import gymnasium as gym
import minigrid.wrappers
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from safetensors.torch import save_file
from torch import Tensor

import communicators
from communicators import (
    Count,
    Exchange,
    Fraction,
    Natural,
    NonNegative,
    Peers,
    Positive,
    PositiveFraction,
    Run,
    RunArgs,
    derive_seed,
    mean,
)

LOSSES = "value_loss", "policy_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac", "kl_reference"  # of `learn`


@dataclass
class Args(RunArgs):
    device: str = "auto"
    """cpu, cuda, cuda:N, or auto: the processor, where each distinct observation is computed once"""

    # The environments
    env_id: str = "MiniGrid-FourRooms-v0"  # the task of all agents; of your own as module:id, as Gymnasium has it
    env_ids: tuple[str, ...] = ()  # one task per agent, instead of --env-id
    missions: tuple[str, ...] = ()
    """one word per agent, which meets only levels whose mission has it, which it does not see; gymnasium only"""
    hidden_sizes: tuple[int, ...] = ()
    """width of each agent's hidden layer, a multiple of 8, its convolutions in proportion (default: 128 for all)"""
    levels_per_agent: Natural = 0  # agent i trains on K private levels only (0: unlimited); needs the gymnasium backend
    env_backend: Literal["auto", "envpool", "gymnasium"] = "auto"
    """envpool is several times faster; auto takes it where it is installed and knows the task"""
    num_envs: Count = 4  # parallel environments per agent
    eval_episodes: Natural = 100  # episodes per agent and task in the official environment at the end (0: none)
    capture_video: bool = False  # record one episode per agent in the official environment at the end
    eval_only: str = ""
    """folder of a run: load its agents and play, also on another task, instead of training; prints a table"""
    greedy: bool = False  # with --eval-only: play and film the most probable actions instead of sampled ones

    # Communication
    local_updates: Count = 32  # iterations between communication rounds
    kl_coef: Annotated[NonNegative, tyro.conf.arg(aliases=["--communication-coef"])] = 1.0
    """coefficient of the KL penalty towards the reference policy"""
    kl_direction: Literal["forward", "reverse"] = "forward"
    """forward: KL(reference || policy), eq. 4; reverse: KL(policy || reference), mirror descent"""
    mixture: Literal["arithmetic", "geometric"] = "arithmetic"  # how the reference mixes the agents' distributions
    self_reference: Literal["behaviour", "snapshot"] = "behaviour"
    """an agent's own part of its reference: its policy before this update, or its snapshot of the last round"""
    participation: PositiveFraction = 1.0
    """fraction of the agents, drawn anew, that takes part in a communication round"""

    # PPO
    total_timesteps: Count = 5_000_000  # environment steps of each agent
    learning_rate: Positive = 2.5e-4  # learning rate of Adam
    num_steps: Count = 512  # steps per environment and rollout
    anneal_lr: bool = True  # anneal the learning rate linearly to 0
    gamma: Fraction = 0.99  # discount factor
    gae_lambda: Fraction = 0.95  # lambda of generalized advantage estimation
    num_minibatches: Count = 4  # minibatches per epoch
    update_epochs: Count = 4  # epochs per rollout
    norm_adv: bool = True  # normalise advantages in each minibatch
    clip_coef: NonNegative = 0.1  # clip range of the surrogate objective (0: no clipping)
    clip_vloss: bool = True  # clip the value loss with the same range
    ent_coef: NonNegative = 0.01  # coefficient of the entropy bonus
    vf_coef: NonNegative = 0.5  # coefficient of the value loss
    max_grad_norm: Positive = 0.5  # maximum norm of each agent's gradient
    target_kl: Positive | None = None  # skip an agent's further epochs once its approximate KL exceeds this
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """of the convolutions (autocast), heads and losses are always float32; auto: float32 for so small a network"""
    compile: bool = False
    """compile the networks with torch.compile, which is not thread-safe: the agents then compute one after the other"""


def check_args(args: Args) -> None:
    """What the types above cannot say; `refuse` ends with one line that names the flag, its value and what is valid."""
    args.precision = args.precision.replace("auto", "float32")
    args.device = args.device.replace("auto", "cpu")
    batch_size = args.num_envs * args.num_steps
    if batch_size % args.num_minibatches:
        communicators.refuse(args, "num_minibatches", f"must divide num_envs * num_steps = {batch_size}")
    if args.total_timesteps < batch_size:
        communicators.refuse(args, "total_timesteps", f"must be at least one rollout, {batch_size} steps")
    if not 2 <= round(args.participation * args.num_agents) <= args.num_agents and args.participation != 1:
        communicators.refuse(args, "participation", f"must let 2..{args.num_agents} agents take part in a round")
    if args.greedy and not args.eval_only:
        communicators.refuse(args, "greedy", "is for --eval-only; other evaluations report both returns")
    if len(args.env_ids) not in (0, args.num_agents):
        communicators.refuse(args, "env_ids", f"must name one task for each of {args.num_agents} agents")
    if len(args.hidden_sizes) not in (0, args.num_agents) or any(size < 8 or size % 8 for size in args.hidden_sizes):
        communicators.refuse(args, "hidden_sizes", f"must be {args.num_agents} multiples of 8")
    if len(args.missions) not in (0, args.num_agents):
        communicators.refuse(args, "missions", f"must be one word for each of {args.num_agents} agents")
    if args.capture_video and not find_spec("moviepy"):
        communicators.refuse(args, "capture_video", "moviepy is not installed")
    check_envs(args)


def check_envs(args: Args) -> None:
    """That every task can be made, is one of MiniGrid's, has the same actions, and is known to the backend."""
    flag, actions = "env_ids" if args.env_ids else "env_id", {}
    for env_id in dict.fromkeys(task_ids(args)):
        try:
            env = make_env(env_id, film=args.capture_video)
            problem = find_env_problem(args, env, env_id)
        except Exception as error:  # unknown, with what was perhaps meant, or what it needs is not installed
            problem = (str(error) or repr(error)).splitlines()[0]
        if problem:
            valid = "must be a MiniGrid or BabyAI task, or one of your own as module:id"
            communicators.refuse(args, flag, f"{valid}; {env_id} {problem}")
        actions[int(env.action_space.n)] = env_id
        missions = {mission_of(env, seed=level) for level in range(1000 if args.missions else 9)}
        for word in (word for task, word in tasks_of(args) if task == env_id):
            if not any(word in mission for mission in missions):
                known = ", ".join(sorted(missions)[:5])
                communicators.refuse(args, "missions", f"no mission of {env_id} has {word!r}; some are {known}")
        if len(missions) > 1 and not args.missions:
            warnings.warn(f"{env_id}: levels have different missions, which agents are not shown", stacklevel=2)
    if len(actions) > 1:
        communicators.refuse(args, flag, f"need the same number of actions, not {actions}")
    if args.env_backend == "envpool":
        for flag in (name for name in ("levels_per_agent", "missions") if getattr(args, name)):
            communicators.refuse(args, flag, "needs --env-backend gymnasium")
        if not find_spec("envpool"):
            communicators.refuse(args, "env_backend", "envpool is not installed")
        if unknown := set(task_ids(args)) - envpool_ids():
            communicators.refuse(args, "env_backend", f"has no usable {', '.join(unknown)}; choose auto or gymnasium")
    if args.levels_per_agent:
        check_levels(args)


def find_env_problem(args: Args, env: gym.Env, env_id: str) -> str:
    """What makes an environment unusable here, nothing ("") if it is not."""
    obs, _ = env.reset(seed=0)
    name = name_of(env_id)
    if not isinstance(obs, np.ndarray) or obs.shape != (7, 7, 3) or obs.dtype != np.uint8:
        shape = "x".join(map(str, np.shape(obs)))
        return f"shows no 7x7x3 codes (uint8), but {shape or type(obs).__name__} ({getattr(obs, 'dtype', 'no array')})"
    if not isinstance(env.action_space, gym.spaces.Discrete) or env.action_space.start != 0:
        return f"has no actions 0 to n - 1, but {env.action_space}"
    if env.spec.id != name:  # envpool knows full names only
        return f"is {env.spec.id}"
    if args.levels_per_agent and not hasattr(env.unwrapped, "grid"):
        return "has no grid by which --levels-per-agent could tell levels apart"
    if len({other for other in task_ids(args) if name_of(other) == name}) > 1:
        return "has the name of another task here"  # the second module replaced what the first had registered
    return ""


def check_levels(args: Args) -> None:
    """That every task has enough levels of different layouts to be private to agents, and to test on."""
    tasks = tasks_of(args)
    for task, name in zip(tasks, task_names(args), strict=True):
        private = [level_seeds(args, i) for i in range(args.num_agents) if tasks[i] == task]
        least = min(map(len, private))
        if least == args.levels_per_agent and len(evaluation_levels(args, task)) == args.eval_episodes:
            continue
        number = sum(map(len, private)) + len(evaluation_levels(args, task))
        demand = (
            f"{len(private)} x {args.levels_per_agent} private layouts and {args.eval_episodes} unseen ones to test on"
        )
        communicators.refuse(
            args,
            "levels_per_agent",
            f"{name} has only {number} different layouts for {demand} (--eval-episodes)",
        )


def task_ids(args: Args) -> list[str]:
    """The environment id of every agent."""
    return list(args.env_ids) or [args.env_id] * args.num_agents


def tasks_of(args: Args) -> list[tuple[str, str]]:
    """What every agent is to learn: its environment id, and the word of its missions ("": all)."""
    return list(zip(task_ids(args), args.missions or [""] * args.num_agents, strict=True))


def name_of(env_id: str) -> str:
    """A task's name in logs and folders: its id without the module that registers it."""
    return env_id.rpartition(":")[2]


def task_names(args: Args) -> list[str]:
    """The name of every agent's task."""
    return [f"{name_of(env_id)} {word}".strip() for env_id, word in tasks_of(args)]


# --- environments ---


class PrivateLevels(gym.Wrapper):
    """Every episode is a level whose mission has a word, of a fixed set of levels if there is one."""

    def __init__(self, env: gym.Env, levels: list[int], word: str):
        super().__init__(env)
        self.levels, self.word = levels, word

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        if seed is not None:
            self.generator = np.random.default_rng(seed)
        while True:
            level = self.generator.choice(self.levels) if self.levels else self.generator.integers(2**31)
            result = self.env.reset(seed=int(level), options=options)
            if self.word in mission_of(self.env):
                return result


def mission_of(env: gym.Env, seed: int | None = None) -> str:
    """The mission of the level with this seed, or else of the current one; an own task may have none ("")."""
    if seed is not None:
        env.reset(seed=seed)
    return getattr(env.unwrapped, "mission", "")


def layout_of(env: gym.Env) -> tuple:
    """What tells an environment's current level, just reset, from other levels: seeds do not, layouts repeat."""
    level = env.unwrapped
    return level.grid.width, level.grid.encode().tobytes(), tuple(level.agent_pos), level.agent_dir, mission_of(env)


PATIENCE = 2000  # resets without a new layout after which a task is taken to have no more of them, about a second


@functools.cache
def find_levels(env_id: str, word: str, number: int, *key: int) -> list[int]:
    """The first levels whose mission has the word: seeds derived from a key ([...,] number of the level, purpose)."""
    seeds = (derive_seed(*key[:-1], level, key[-1]) for level in itertools.count())
    if not word:
        return list(itertools.islice(seeds, number))
    env = make_env(env_id)
    return list(itertools.islice((seed for seed in seeds if word in mission_of(env, seed)), number))


def find_new_levels(env_id: str, word: str, number: int, *key: int, taken: set) -> list[int]:
    """As `find_levels`, but no layout that is in `taken`, which receives those of the levels found.

    Fewer than `number`, if `PATIENCE` resets in a row show no new layout.
    """
    env = make_env(env_id)
    levels = []
    repeats = 0
    for level in itertools.count():
        if len(levels) == number or repeats == PATIENCE:
            return levels
        seed = derive_seed(*key[:-1], level, key[-1])
        env.reset(seed=seed)
        layout = layout_of(env)
        repeats += 1
        if word in mission_of(env) and layout not in taken:
            taken.add(layout)
            levels.append(seed)
            repeats = 0


@functools.cache
def split_levels(tasks: tuple[tuple[str, str], ...], num_levels: int, num_tests: int, seed: int) -> tuple[list, dict]:
    """The private levels of every agent, and of every task unseen ones to test on.

    The private levels of all agents have different layouts, and so have a task's unseen levels, none of which is
    anybody's private one. Fewer than demanded, if there are no more.
    """
    taken = set()
    private = [find_new_levels(*task, num_levels, seed, i, 2, taken=taken) for i, task in enumerate(tasks)]
    unseen = {task: find_new_levels(*task, num_tests, seed, 3, taken=set(taken)) for task in dict.fromkeys(tasks)}
    return private, unseen


def level_seeds(args: Args, agent: int) -> list[int]:
    """The seeds of the private levels of `agent`, none if it has no such levels."""
    if not args.levels_per_agent:
        return []
    return split_levels(tuple(tasks_of(args)), args.levels_per_agent, args.eval_episodes, args.seed)[0][agent]


def evaluation_levels(args: Args, task: tuple[str, str]) -> list[int]:
    """The seeds of the levels of a task on which every agent is evaluated, unseen ones if levels are private."""
    if not args.levels_per_agent:
        return find_levels(*task, args.eval_episodes, args.seed, 3)
    return split_levels(tuple(tasks_of(args)), args.levels_per_agent, args.eval_episodes, args.seed)[1][task]


def make_env(env_id: str, levels: list[int] = (), word: str = "", film: bool = False) -> gym.Env:
    """One environment of the official package, showing its image only: [7, 7, 3] uint8 codes.

    Or one of your own, as module:id, which may show just that image.
    """
    options = {"render_mode": "rgb_array"} if film else {}  # one of your own may not know it
    env = gym.make(env_id, disable_env_checker=True, **options)
    if isinstance(env.observation_space, gym.spaces.Dict):
        env = minigrid.wrappers.ImgObsWrapper(env)
    return PrivateLevels(env, levels, word) if levels or word else env


def envpool_ids() -> set[str]:
    """The tasks that envpool has and can be trusted with: in its MultiRoom (1.2.5) some doors lead into walls."""
    return {name for name in importlib.import_module("envpool").list_all_envs() if "MultiRoom" not in name}


def choose_backend(args: Args) -> str:
    """The environment backend that this run uses."""
    if args.env_backend == "auto" and not (args.levels_per_agent or args.missions) and find_spec("envpool"):
        return "envpool" if set(task_ids(args)) <= envpool_ids() else "gymnasium"
    return "gymnasium" if args.env_backend == "auto" else args.env_backend


class Envs:
    """The environments of some agents: arrays are [agents, envs, ...].

    Each environment starts anew in the step *after* its episode's end; that step ignores the action and is not valid.
    Seeds are keyed by (seed, agent, environment, checkpoint), so that nothing depends on who holds which agent.
    While one of the `parts` (slices of the agents) is stepped, the policies of another answer.
    """

    def __init__(self, args: Args, agents: range, checkpoint: int):
        shape, tasks = (len(agents), args.num_envs), task_ids(args)
        self.envpool, self.sent = choose_backend(args) == "envpool", {}  # gymnasium has no two halves of a step
        self.obs, self.pools, self.parts = np.zeros((*shape, 7, 7, 3), dtype=np.uint8), [], []  # obs: to answer next
        halves = itertools.groupby(range(len(agents)), key=lambda k: (tasks[agents[k]], 2 * k < len(agents)))
        for (env_id, _), own in halves:  # a large pool beats small ones
            own = [*own]
            self.parts.append(slice(own[0], own[-1] + 1))
            owners = list(itertools.product(agents[self.parts[-1]], range(args.num_envs)))
            seeds = [derive_seed(args.seed, agent, number, checkpoint, 1) for agent, number in owners]
            if self.envpool:
                make = importlib.import_module("envpool").make
                self.pools.append(make(env_id, env_type="gymnasium", num_envs=len(seeds), seed=seeds))
                obs = self.pools[-1].reset()[0]["image"]
            else:
                keys = [(env_id, level_seeds(args, i), tasks_of(args)[i][1]) for i, _ in owners]
                thunks = [functools.partial(make_env, *key) for key in keys]
                self.pools.append(SyncVectorEnv(thunks, autoreset_mode=AutoresetMode.NEXT_STEP))
                obs = self.pools[-1].reset(seed=seeds)[0]
            self.obs[self.parts[-1]] = obs.reshape(-1, *self.obs.shape[1:])
        self.ended, self.returns, self.lengths = np.zeros(shape, bool), np.zeros(shape), np.zeros(shape)

    def send(self, part: int, actions: np.ndarray) -> None:
        """Let this part take these actions, [agents of the part, envs]."""
        self.sent[part] = self.pools[part].send(actions.ravel()) if self.envpool else actions.ravel()

    def receive(self, part: int) -> tuple[np.ndarray, ...]:
        """Returns rewards, terminations, truncations, valid, and the episodes that ended: [(k, return, length)]."""
        obs, *signals, _ = self.pools[part].recv() if self.envpool else self.pools[part].step(self.sent[part])
        own = self.parts[part]
        self.obs[own] = (obs["image"] if isinstance(obs, dict) else obs).reshape(-1, *self.obs.shape[1:])
        rewards, terminations, truncations = (signal.reshape(-1, self.obs.shape[1]) for signal in signals)
        if self.envpool:  # a goal on the last allowed step, which it reports as a truncation
            terminations = terminations | (truncations & (rewards != 0))
        valid, self.ended[own] = ~self.ended[own], terminations | truncations
        self.returns[own] += rewards
        self.lengths[own] += valid
        ended = [(k + own.start, e) for k, e in zip(*self.ended[own].nonzero(), strict=True)]
        episodes = [(k, self.returns[k, e], self.lengths[k, e]) for k, e in ended]
        for over in ended:
            self.returns[over] = self.lengths[over] = 0.0
        return rewards, terminations, truncations, valid, episodes

    def close(self) -> None:
        """Free the environments."""
        for pool in self.pools:
            pool.close()


def public_states(args: Args, num_steps: int = 64, num_envs: int = 8) -> Tensor:
    """S_ref of Example 3: what a fixed-seed random policy sees in the official environments.

    Every agent can regenerate these states alone, so using them tells nobody anything. Returns [states, 7, 7, 3] uint8.
    """
    states, generator = [], np.random.default_rng(0)
    for env_id in sorted(set(task_ids(args))):
        envs = SyncVectorEnv([lambda env_id=env_id: make_env(env_id)] * num_envs)
        obs, _ = envs.reset(seed=list(range(num_envs)))
        for _ in range(num_steps):
            states.append(obs.copy())
            obs, *_ = envs.step(generator.integers(envs.single_action_space.n, size=num_envs))
        envs.close()
    return torch.as_tensor(np.concatenate(states))


# --- the network ---


def layer_init(layer: nn.Module, std: float = np.sqrt(2)) -> nn.Module:
    """Orthogonal weights of gain `std`, zero bias."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Patches:
    """Observations as a stack of convolutions sees them: each patch once.

    What a convolution says is a function of the patch, and MiniGrid shows few different ones: of the 2x2, 3x3 and 4x4
    patches in a minibatch's distinct observations some 1, 3 and 9 % are distinct. So none is asked about twice.
    """

    least = 32  # for fewer observations the plain network is faster

    def __init__(self, obs: Tensor, network: nn.Sequential):
        """obs: [batch, height, width, 3] uint8; network: has the convolutions, see `suit`."""
        cells, rows = distinct_rows(obs.long().flatten(0, 2))
        self.cells, index = cells.float(), rows.view(obs.shape[:3])  # [distinct cells, 3]
        self.tables = []  # of each convolution: the rows that make up each of its distinct patches [patches, area]
        for layer in (layer for layer in network if isinstance(layer, nn.Conv2d)):
            for dim in (0, 1):
                index = index.unfold(1 + dim, layer.kernel_size[dim], layer.stride[dim])
            distinct, rows = distinct_rows(index.flatten(3).flatten(0, 2))
            self.tables.append(F.pad(distinct, (0, 0, 0, -len(distinct) % 16)))  # few sizes, see docs/speed.md
            index = rows.view(index.shape[:3])
        self.index = index  # which patch of the last convolution stands where [batch, height, width]

    @staticmethod
    def suit(network: nn.Module) -> bool:
        """Whether it is a sequence, before Flatten only of convolutions without padding and functions of one number."""
        return isinstance(network, nn.Sequential) and all(
            communicators.is_plain(layer) if type(layer) is nn.Conv2d else type(layer) in communicators.POINTWISE
            for layer in itertools.takewhile(lambda layer: not isinstance(layer, nn.Flatten), network)
        )

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, rows) -> "Patches":
        chosen = copy.copy(self)
        chosen.index = self.index[rows]
        return chosen

    @torch.compiler.disable  # --compile would compile it anew in every rollout
    def through(self, network: nn.Sequential) -> Tensor:
        """What the network says of them, [batch, ...]."""
        x, tables = self.cells, iter(self.tables)
        for layer in network:
            if isinstance(layer, nn.Conv2d):
                x = F.linear(F.embedding(next(tables), x).mT.flatten(1), layer.weight.flatten(1), layer.bias)
            elif isinstance(layer, nn.Flatten):
                index = F.pad(self.index.flatten(1), (0, 0, 0, -len(self) % 8))
                x = F.embedding(index, x).mT.flatten(1)
            else:
                x = layer(x)
        return x[: len(self)]


def distinct_rows(table: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct rows of `table` [rows, columns], natural numbers, and which of them each row is."""
    base = most = int(table.max()) + 1
    key = table[:, 0]
    for column in table.T[1:]:
        if most * base >= 1 << 63:  # one number no longer holds a row's beginning: number the beginnings
            key = key.unique(return_inverse=True)[1]
            most = len(key)
        key, most = key * base + column, most * base
    names, rows = key.unique(return_inverse=True)
    first = torch.empty_like(names).scatter_(0, rows, torch.arange(len(rows)))  # one that has this name
    return table[first], rows


class Agent(nn.Module):
    """Policy and value function on MiniGrid's 7x7x3 codes, with a common trunk."""

    def __init__(self, num_actions: int, bfloat16: bool = False, hidden: int = 128):
        super().__init__()
        self.bfloat16 = bfloat16
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(3, hidden // 8, 2)), nn.Tanh(),
            layer_init(nn.Conv2d(hidden // 8, hidden // 4, 2)), nn.Tanh(),
            layer_init(nn.Conv2d(hidden // 4, hidden // 2, 2)), nn.Tanh(),
            nn.Flatten(),
            layer_init(nn.Linear(hidden // 2 * 4 * 4, hidden)), nn.Tanh(),
        )  # fmt: skip
        self.actor = layer_init(nn.Linear(hidden, num_actions), std=0.01)
        self.critic = layer_init(nn.Linear(hidden, 1), std=1)

    def forward(self, obs: Tensor | Patches) -> tuple[Tensor, Tensor]:
        """obs: [batch, 7, 7, 3] uint8, or `see` of it. Returns (logits [batch, actions], value [batch]), float32."""
        device = self.actor.weight.device.type
        with torch.autocast(device, torch.bfloat16) if self.bfloat16 else contextlib.nullcontext():
            if isinstance(obs, Patches):
                hidden = obs.through(self.network)
            else:
                hidden = self.network(obs.permute(0, 3, 1, 2).float().contiguous())
        return self.actor(hidden.float()), self.critic(hidden.float()).squeeze(-1)

    def see(self, obs: Tensor) -> Tensor | Patches:
        """`obs` [batch, 7, 7, 3] in the form in which `forward` is fastest."""
        worth = len(obs) >= Patches.least and obs.device.type == "cpu"
        return Patches(obs, self.network) if worth and Patches.suit(self.network) else obs

    @torch.no_grad()
    def predict(self, obs: Tensor | Patches) -> tuple[Tensor, Tensor]:
        """`forward` for many states and no gradient."""
        return self(self.see(obs) if isinstance(obs, Tensor) else obs)


def make_agents(args: Args) -> list[Agent]:
    """Every agent's network at the start, equal ones for agents of equal size."""
    first = {}
    for size in dict.fromkeys(args.hidden_sizes or [128]):
        torch.manual_seed(args.seed)
        first[size] = Agent(int(make_env(task_ids(args)[0]).action_space.n), args.precision == "bfloat16", size)
    return [copy.deepcopy(first[size]) for size in args.hidden_sizes or [128] * args.num_agents]


class Table(dict):
    """What an agent's policy says of each observation of its last rollouts: bytes -> logits [actions].

    A policy is a function of the observation, and MiniGrid shows few different ones: of a rollout's 2,048 some 4-16 %
    are distinct, half of them known from the last rollouts. So nothing is asked twice of the same policy.
    """

    def __init__(self, agent: Agent, rollouts: int = 8):
        self.agent, self.seen = agent, deque(maxlen=rollouts)

    def start(self) -> None:
        """The policy has changed: ask it about all that the last rollouts saw, at once, and forget the rest."""
        self.clear()
        if self.seen:
            self.ask(list(dict.fromkeys(itertools.chain(*self.seen))))

    @torch.inference_mode()
    def ask(self, keys: list[bytes]) -> None:
        """Ask the policy about these observations."""
        logits, _ = self.agent(self.agent.see(self.obs_of(keys)))
        self.update(zip(keys, logits.cpu().numpy(), strict=True))

    def look_up(self, obs: np.ndarray) -> tuple[list[bytes], np.ndarray]:
        """obs: [envs, 7, 7, 3] uint8. Returns the keys of these observations, and the policy's logits there."""
        keys = [own.tobytes() for own in obs]
        if unseen := [key for key in keys if key not in self]:
            self.ask(list(dict.fromkeys(unseen)))
        return keys, np.array([self[key] for key in keys])

    def obs_of(self, keys: list[bytes]) -> Tensor:
        """[len(keys), 7, 7, 3] uint8, on the agent's device."""
        obs = torch.frombuffer(bytearray(b"".join(keys)), dtype=torch.uint8).view(-1, 7, 7, 3)
        return obs.to(self.agent.actor.weight.device)


def share_cores(args: Args, held: range, device: torch.device) -> tuple[int, int]:
    """How many agents learn side by side, and the cores of each: one core is best for a small network."""
    workers = min(len(held), torch.get_num_threads())
    if args.compile or device.type != "cpu":  # torch.compile is not thread-safe
        workers = 1
    torch.set_num_threads(1)
    return workers, 1


def make_actors(args: Args, agents: list[Agent]) -> list[Table]:
    """What acts for the agents in rollouts."""
    return [Table(agent) for agent in agents]


# --- PR-PPO ---


def make_communicator(args: Args, returns=None, log_probs=None, gains=None, usable=None) -> Tensor:
    """The matrix C of a round, [agents, agents]: row i says whom agent i listens to, and lies on the simplex.

    returns [agents]: last means, or gains; log_probs [agents, states, actions]: on the public states; gains [agents,
    agents]: see `gains_of_peers`; usable, bool [agents]: whose snapshot is valid. Another communicator is two more
    lines here and a word in RunArgs.
    """
    n, name = args.num_agents, args.communicator
    if name == "identity":
        return communicators.identity(n)
    C = communicators.uniform(n)
    allowed = None
    if name == "self-preferred":
        C = communicators.self_preferred(n, args.self_preference)
    elif name == "similarity" and log_probs is not None:
        C = communicators.similarity(log_probs)
    elif name == "reward":
        C = communicators.reward(returns)
    elif name == "softmax-reward":
        C = communicators.softmax_reward(returns, args.communicator_temperature)
    elif name == "rank-reward":
        C = communicators.rank_reward(returns)
    elif name == "relative-gain":
        C = communicators.relative_gain(returns, args.communicator_temperature)
    elif name == "surrogate" and gains is not None:
        C = communicators.surrogate(gains, args.communicator_temperature)
    elif name not in ("uniform", "similarity", "surrogate"):  # then it is a file
        C = communicators.own_matrix(args)
        allowed = C > 0  # its zeros forbid
    compared = {"similarity": log_probs, "surrogate": gains}.get(name, C)
    k = 0 if compared is None else args.top_k  # who compares policies must hear all before it can choose
    keep_self = name == "self-preferred"
    return communicators.restrict(C, args.topology, k, usable, keep_self, allowed)


def rollout(args: Args, envs: Envs, actors: list[Table], generators: list, run: Run) -> tuple[dict, list, list, list]:
    """All agents play num_steps in their environments, from where they stand.

    Returns storage [agents, steps, envs], where `states` says which of the agent's distinct observations each one is;
    these observations (see `Agent.see`) and the policy's log-probabilities there, of each agent [states, ...]; and the
    episodes that ended, of each agent [(return, length)].
    """
    shape, episodes = (len(actors), args.num_steps, args.num_envs), [[] for _ in actors]
    rewards, actions = np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=int)
    terminations, truncations, valid = (np.zeros(shape, dtype=bool) for _ in range(3))
    noise = [torch.empty(*shape[1:], table.agent.actor.out_features) for table in actors]
    noise = [own.exponential_(generator=generator) for own, generator in zip(noise, generators, strict=True)]
    gumbel, history = -torch.stack(noise).log().numpy(), [[] for _ in actors]
    workers = 1 if args.compile else min(len(actors), run.cores)  # torch.compile is not thread-safe
    communicators.take_turns([map(Table.start, [table]) for table in actors], workers)
    for step in range(args.num_steps + 1):
        for number, part in enumerate(envs.parts):
            if step > 0:
                *signals, ended = envs.receive(number)
                own = part, step - 1
                rewards[own], terminations[own], truncations[own], valid[own] = signals
                for k, *episode in ended:
                    episodes[k].append(tuple(map(float, episode)))
                run.tick("environments")
            for k in range(part.start, part.stop):
                keys, logits = actors[k].look_up(envs.obs[k])
                history[k] += keys
                if step < args.num_steps:
                    actions[k, step] = (logits + gumbel[k, step]).argmax(-1)  # a sample of softmax(logits)
            if step < args.num_steps:
                envs.send(number, actions[part, step])
            run.tick("rollout_forward")
    storage = {"rewards": rewards, "terminations": terminations, "dones": terminations | truncations, "valid": valid}
    storage = {name: torch.from_numpy(x) for name, x in (storage | {"actions": actions}).items()}
    states, values, logprobs, obs, behaviour = [], [], [], [], []
    for k, table in enumerate(actors):
        row_of = {key: row for row, key in enumerate(dict.fromkeys(history[k]))}
        table.seen.append(list(row_of))
        states.append(torch.tensor([row_of[key] for key in history[k]]).view(-1, args.num_envs))  # [steps + 1, envs]
        obs.append(table.agent.see(table.obs_of(list(row_of))))
        logits, value = table.agent.predict(obs[k])  # as the update does: rounding must not look like a new policy
        behaviour.append(logits.log_softmax(-1))
        values.append(value.cpu()[states[k]])
        logprobs.append(behaviour[k].cpu()[states[k][:-1]].gather(-1, storage["actions"][k, ..., None]).squeeze(-1))
    values = torch.stack(values)
    # After an episode's end the next stored observation is its final one, whose value bootstraps
    storage |= {"states": torch.stack(states)[:, :-1], "values": values[:, :-1], "next_values": values[:, 1:]}
    storage |= {"logprobs": torch.stack(logprobs)}
    run.tick("rollout_forward")
    return {name: x.to(behaviour[0].device) for name, x in storage.items()}, obs, behaviour, episodes


def gae(rewards, terminations, dones, values, next_values, gamma: float, gae_lambda: float) -> Tensor:
    """Generalized advantage estimation that never leaks across episodes.

    All [agents, steps, envs]; next_values: V of the state that each step led to, the episode's *final* state where one
    ended. A termination is worth nothing more; a truncation bootstraps; both cut the recursion. Returns advantages.
    """
    deltas = rewards + gamma * next_values * ~terminations - values
    decay = gamma * gae_lambda * ~dones
    advantages, last = torch.empty_like(deltas), torch.zeros_like(deltas[:, 0])
    for step in reversed(range(deltas.shape[1])):
        last = deltas[:, step] + decay[:, step] * last
        advantages[:, step] = last
    return advantages


def refer(
    i: int, obs: Tensor, behaviour: Tensor, snapshots: dict[int, Agent], communicator: Tensor, args: Args
) -> Iterator:
    """Agent i's reference policy C_i pi on its own states, frozen for this update: row i of C applied to the policies.

    obs: [states, ...], behaviour: its own log-probabilities there [states, actions]. Yields after every policy; the
    last that it yields is the reference, [states, actions].
    """
    heard, log_probs = communicator[i].nonzero().flatten().tolist(), []  # never a peer of weight 0
    for j in heard:
        own = j == i and args.self_reference == "behaviour"
        log_probs.append(behaviour if own else snapshots[j].predict(obs)[0].log_softmax(-1))
        yield
    yield communicators.mix_log_probs(torch.stack(log_probs), communicator[i, heard].to(behaviour.device), args.mixture)


def gains_of_peers(i: int, obs: Tensor, batch: dict[str, Tensor], snapshots: dict[int, Agent], n: int) -> Tensor:
    """L_i(pi_j): how much agent i's own rollout says that listening to each peer would help.

    snapshots: agent -> network, of the peers to whom it may listen. Returns [agents], NaN for the others.
    """
    gains = torch.full((n,), torch.nan)
    if snapshots:
        log_probs = [peer.predict(obs)[0].log_softmax(-1) for peer in snapshots.values()]
        log_probs = torch.stack([policy[batch["states"], batch["actions"]] for policy in log_probs])
        of_peers = communicators.surrogate_gains(log_probs, batch["logprobs"], batch["advantages"])
        gains[list(snapshots)] = of_peers.float().cpu()
    gains[i] = 0.0  # oneself is what the others are measured by
    return gains


@torch.enable_grad()
def learn(agent: Agent, optimizer, generator, obs: Tensor, batch: dict[str, Tensor], args: Args) -> Iterator[dict]:
    """One agent's epochs over its rollout (eq. 4), a minibatch with every step. Yields the losses of each.

    obs: the distinct observations; batch: [samples, ...], its `states` are rows of obs.
    """
    for _ in range(args.update_epochs):
        b_inds = torch.randperm(len(batch["states"]), generator=generator).to(batch["states"].device)
        for mb_inds in filter(len, b_inds.tensor_split(args.num_minibatches)):
            mb = {name: tensor[mb_inds] for name, tensor in batch.items()}
            # A policy is a function of the observation: once for each distinct one, which leaves the gradient as it is
            distinct, states = mb["states"].unique(return_inverse=True)
            logits, value = agent(obs[distinct])
            newlogprobs = logits.log_softmax(-1).index_select(0, states)  # [minibatch, actions]
            newvalue = value.index_select(0, states)
            logratio = newlogprobs.gather(-1, mb["actions"][:, None]).squeeze(-1) - mb["logprobs"]
            ratio = logratio.exp()

            mb_advantages = mb["advantages"]
            if args.norm_adv and len(mb_advantages) > 1:
                mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)

            # Policy loss
            pg_loss = -mb_advantages * ratio
            if args.clip_coef > 0:
                clipped = -mb_advantages * ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                pg_loss = torch.max(pg_loss, clipped)
            pg_loss = pg_loss.mean()

            # Value loss
            v_loss = (newvalue - mb["returns"]) ** 2
            if args.clip_vloss and args.clip_coef > 0:
                v_clipped = mb["values"] + (newvalue - mb["values"]).clamp(-args.clip_coef, args.clip_coef)
                v_loss = torch.max(v_loss, (v_clipped - mb["returns"]) ** 2)
            v_loss = 0.5 * v_loss.mean()

            entropy = -(newlogprobs.exp() * newlogprobs).sum(-1).mean()
            # The peers' influence: the distance to the reference policy, exact over the action set
            kl_reference = communicators.kl_to_reference(newlogprobs, mb["reference"], args.kl_direction).mean()
            loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss + args.kl_coef * kl_reference

            approx_kl = (ratio - 1 - logratio).mean()  # k3, http://joschu.net/blog/kl-approx.html
            clipfrac = ((ratio - 1).abs() > args.clip_coef).float().mean() * (args.clip_coef > 0)
            finite = bool(loss.isfinite())
            if finite:
                optimizer.zero_grad()
                loss.backward()
                grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                finite = bool(grad_norm.isfinite())  # else the optimizer's moments would be ruined for good
                if finite:
                    optimizer.step()
                else:  # reported like a loss that is not finite
                    pg_loss = torch.full_like(pg_loss, torch.nan)
            losses = v_loss, pg_loss, entropy, -logratio.mean(), approx_kl, clipfrac, kl_reference
            yield dict(zip(LOSSES, (value.detach() for value in losses), strict=True))
            if not finite:  # this agent has diverged and learns no more, but its peers do
                return
        if args.target_kl is not None and approx_kl > args.target_kl:
            return


def diagnose(i: int, agent: Agent, obs: Tensor, behaviour: Tensor, batch: dict, snapshots: dict[int, Agent],
             communicator: Tensor, args: Args, number: int = 128) -> dict[str, float]:  # fmt: skip
    """What an update did to the policy, on about `number` states of the rollout; distances are total variations.

    tv_update is |pi^k - pi^k+1| of Observation 1, as a mean over states; tv_snapshot and tv_peers are the distances to
    the agent's own snapshot and, as a mean, to those of the peers that it hears.
    """
    every = len(batch["states"]) // number or 1
    rows, reference = batch["states"][::every], batch["reference"][::every]
    before, after = behaviour[rows], agent.predict(obs[rows])[0].log_softmax(-1)
    heard = [j for j in communicator[i].nonzero().flatten().tolist() if j != i]
    own, *peers = (snapshots[j].predict(obs[rows])[0].log_softmax(-1) for j in (i, *heard))
    kls = (communicators.kl_to_reference(policy, reference, args.kl_direction) for policy in (before, after))
    tv = [communicators.total_variation(torch.stack((after, other)))[0, 1].item() for other in (before, own, *peers)]
    return {
        **dict(zip(("kl_reference_before", "kl_reference_after"), (kl.mean().item() for kl in kls), strict=True)),
        "reference_entropy": -(reference.exp() * reference).nansum(-1).mean().item(),
        "tv_update": tv[0], "tv_snapshot": tv[1], "tv_peers": mean(tv[2:]),
    }  # fmt: skip


def evaluate(args: Args, agent: Agent, env_id: str, levels: list[int], seed: int, film: str = "",
             greedy: bool = False) -> np.ndarray:  # fmt: skip
    """One episode in the official environment for each level. Returns their returns [levels].

    Actions are sampled, or the most probable ones (greedy). film: path, without suffix, of a video of the first
    episode. An agent that has diverged has no return: NaN.
    """
    if not all(parameter.isfinite().all() for parameter in agent.parameters()):
        return np.full(len(levels), np.nan)
    envs = [make_env(env_id, film=bool(film)) for _ in levels]
    if film:
        path = Path(film)
        envs[0] = gym.wrappers.RecordVideo(envs[0], str(path.parent), name_prefix=path.name, disable_logger=True)
    obs = [env.reset(seed=level)[0] for env, level in zip(envs, levels, strict=True)]
    returns, running = np.zeros(len(envs)), list(range(len(envs)))
    generator, device = torch.Generator().manual_seed(seed), agent.actor.weight.device
    while running:
        logits, _ = agent.predict(torch.as_tensor(np.stack([obs[k] for k in running])).to(device))
        if greedy:
            actions = logits.argmax(-1).tolist()
        else:
            actions = torch.multinomial(logits.softmax(-1).cpu(), 1, generator=generator)[:, 0].tolist()
        for k, action in zip(list(running), actions, strict=True):
            obs[k], reward, terminated, truncated, _ = envs[k].step(action)
            returns[k] += reward
            if terminated or truncated:
                running.remove(k)
                envs[k].close()
    return returns


def film_levels(args: Args, agent: int) -> list[int]:
    """The seed of the level on which `agent` is filmed."""
    return find_levels(*tasks_of(args)[agent], 1, args.seed, agent, 5)


def make_tests(args: Args) -> dict[str, tuple[str, list[int]]]:
    """What every agent is evaluated on: name -> (environment id, seeds of its levels).

    Unseen levels of every task, of its missions with the word, and, with private levels, those of every agent: the
    agents x tasks matrix.
    """
    tests = {}
    for name, task in zip(task_names(args), tasks_of(args), strict=True):
        tests[name] = task[0], evaluation_levels(args, task)
    for i, name in enumerate(task_names(args) if args.levels_per_agent else []):
        levels = itertools.islice(itertools.cycle(level_seeds(args, i)), args.eval_episodes)
        tests[f"{name} levels of agent {i}"] = task_ids(args)[i], list(levels)
    return tests


def evaluate_all(args: Args, agents: list[Agent], held: range) -> list[dict]:
    """Every agent on every task: of each agent held {task: {column: [episodes]}}.

    Sampled actions are what agents train with; the most probable ones are played on the same levels.
    """
    results = [{} for _ in held]
    for (k, i), (number, (name, test)) in itertools.product(enumerate(held), enumerate(make_tests(args).items())):
        seed = derive_seed(args.seed, i, number, 4)
        returns = evaluate(args, agents[k], *test, seed)
        greedy_returns = evaluate(args, agents[k], *test, seed, greedy=True)
        results[k][name] = {"return": returns, "greedy_return": greedy_returns}
    return results


def evaluate_run(args: Args, agents: list | None = None) -> list[dict[str, np.ndarray]]:
    """--eval-only: play the agents of a run, `agents` of other kinds than here. Returns of each {task: [episodes]}.

    Sampled actions are those of the run's own last evaluation. Nothing is written but films, beside the run's own.
    """
    agents = agents or make_agents(args)
    communicators.load_agents(args, agents)
    device = "cpu" if args.device == "auto" else args.device
    results = [{} for _ in agents]
    folder = Path(args.eval_only) / "videos"
    for (i, agent), (number, (name, test)) in itertools.product(enumerate(agents), enumerate(make_tests(args).items())):
        film = ""
        if args.capture_video:
            film = str(folder / f"eval_agent_{i}_{re.sub(r'[^a-zA-Z0-9_.-]', '-', name)}")
        seed = derive_seed(args.seed, i, number, 4)
        results[i][name] = evaluate(args, agent.to(device), *test, seed, film, args.greedy)
    communicators.print_returns(args, results)
    if args.capture_video:
        print(f"videos in {folder}")
    return results


def main(args: Args) -> dict:
    """Train, evaluate, and return what summary.json holds."""
    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size
    n, num_rounds, tasks = args.num_agents, num_iterations // args.local_updates, task_names(args)
    exchange = Exchange(args.num_agents, args.device, args.timeout)  # who holds which agents, what passes between them
    held, device = exchange.agents, exchange.device  # agent i of all is the k-th held; lists are in the order of k
    run = Run(args, exchange, "+".join(dict.fromkeys(tasks)), total=num_iterations, work=batch_size * n,
              headline="charts/return_last_100", env_ids=tasks, stride=batch_size,
              about=f"{args.communicator} communicator, {num_rounds or 'NO'} communication rounds")  # fmt: skip
    workers, threads = share_cores(args, held, device)

    # Agents: all start from the same parameters, and what is random is keyed by (seed, agent)
    first = [agent.to(device) for agent in make_agents(args)]
    sizes = [sum(parameter.numel() for parameter in agent.parameters()) for agent in first]
    communicators.unflatten(exchange.broadcast(communicators.flatten(first, max(sizes))), first)
    agents = [copy.deepcopy(first[i]) for i in held]
    optimizers = [torch.optim.Adam(agent.parameters(), args.learning_rate, eps=1e-5, fused=True) for agent in agents]
    generators = [torch.Generator().manual_seed(derive_seed(args.seed, i)) for i in held]
    for agent in agents if args.compile else ():
        agent.compile(dynamic=True)

    # Communication: C, what agents have received in the last round, and how far apart policies are on public states
    reference_states = public_states(args).to(device) if num_rounds else None
    peers = Peers(exchange, first, reference_states, communicators.neighbours(args))
    communicator = peers.communicator  # [agents, agents], changed in place
    last_returns = [deque(maxlen=100) for _ in held]

    # Resume: what a checkpoint holds of each agent; the rest follows from the settings
    state = {
        i: {"agent": agents[k], "optimizer": optimizers[k], "generator": generators[k]}
        | {"last_returns": last_returns[k]}
        | peers.state(k)
        for k, i in enumerate(held)
    }
    run.restore(state)
    if run.iteration:
        peers.restore()
    envs, actors = Envs(args, held, run.iteration), make_actors(args, agents)

    for iteration in run.iterations():
        for optimizer in optimizers if args.anneal_lr else ():
            optimizer.param_groups[0]["lr"] = (1.0 - (iteration - 1) / num_iterations) * args.learning_rate

        # Rollout
        storage, obs, behaviour, episodes = rollout(args, envs, actors, generators, run)  # [agents, steps, envs, ...]

        # Advantages; then flat, without the steps that only reset an environment
        outcomes = (storage.pop(name) for name in ("rewards", "terminations", "dones"))
        advantages = gae(*outcomes, storage["values"], storage.pop("next_values"), args.gamma, args.gae_lambda)
        storage |= {"advantages": advantages, "returns": advantages + storage["values"]}
        valid = storage.pop("valid")
        batches = [{name: tensor[k][valid[k]] for name, tensor in storage.items()} for k in range(len(held))]
        run.tick("advantages")

        # Reference policies, frozen for this update: row i of C applied to the policies, on agent i's own states
        references = [refer(i, obs[k], behaviour[k], peers.views[k], communicator, args) for k, i in enumerate(held)]
        for batch, (*_, reference) in zip(batches, communicators.take_turns(references, workers, threads), strict=True):
            batch["reference"] = reference[batch["states"]]
        run.tick("reference")

        # Update: every agent takes its minibatches in order, and the agents take turns, so that all cores work
        learners = zip(agents, optimizers, generators, obs, batches, strict=True)
        losses = communicators.take_turns([learn(*own, args) for own in learners], workers, threads)
        moved = zip(held, agents, obs, behaviour, batches, peers.views, strict=True)
        moved = [diagnose(*own, communicator, args) for own in moved]
        run.tick("update")

        # Communication round: exchange snapshots, refresh the communicator
        for k, own in enumerate(episodes):
            last_returns[k].extend(total for total, _ in own)
            peers.round_returns[k].extend(total for total, _ in own)
        if iteration % args.local_updates == 0:
            peers.remember_returns()
            participating = torch.ones(n, dtype=torch.bool)
            reported_returns = None
            if args.communicator != "identity":  # isolated agents report nothing
                participating = communicators.participants(n, args.participation, derive_seed(args.seed, iteration, 7))
                if args.communicator == "relative-gain":
                    reported_returns = peers.report(peers.records[:, 1])
                else:
                    reported_returns = communicators.bound_returns(peers.report(peers.records[:, 0]))
            receives = make_communicator(args, reported_returns, usable=participating) > 0
            peers.exchange_snapshots(agents, participating, receives, iteration)
            gains = None
            if args.communicator == "surrogate":
                gains = torch.full((n, n), torch.nan)
                for k, i in enumerate(held):
                    gains[i] = gains_of_peers(i, obs[k], batches[k], peers.candidates(i), n)
            usable = peers.usable
            new_communicator = make_communicator(args, reported_returns, peers.log_probs, gains, usable)
            peers.update(new_communicator)
        run.tick("exchange")

        # Metrics: declared scalars, one row per agent
        rows = []
        for k, own in enumerate(episodes):
            y_pred, y_true = batches[k]["values"], batches[k]["returns"]
            row = {
                "charts/episodic_return": mean([total for total, _ in own]),
                "charts/episodic_length": mean([length for _, length in own]),
                "charts/episodes": len(own),
                "charts/return_last_100": mean(last_returns[k]),
                "losses/explained_variance": (1 - (y_true - y_pred).var() / y_true.var()).item(),
            }
            row |= {f"losses/{name}": mean([loss[name].item() for loss in losses[k]]) for name in LOSSES}
            rows.append(row | {f"policy/{name}": value for name, value in moved[k].items()})
        scalars = {"charts/learning_rate": optimizers[0].param_groups[0]["lr"]}
        scalars["communication/rounds"] = iteration // args.local_updates
        run.log(rows, communicator, peers.distances, scalars)

        # Evaluation
        if args.eval_episodes and run.due(args.eval_every) and iteration < num_iterations:
            run.log_evaluation(evaluate_all(args, agents, held))

        # Checkpoint; every run, interrupted or not, starts its environments anew here
        if run.saves():
            run.save(state)
            envs.close()
            envs, actors = Envs(args, held, iteration), make_actors(args, agents)

    # Weights, videos, and the evaluation of every agent on every task in the official environments
    envs.close()
    for k, i in enumerate(held):
        save_file(agents[k].state_dict(), run.folder / f"agent_{i}.safetensors")
        if args.capture_video and not run.interrupted:
            film = str(run.folder / "videos" / f"agent_{i}")
            seed = derive_seed(args.seed, i, 6)
            evaluate(args, agents[k], task_ids(args)[i], film_levels(args, i), seed, film)
    if args.eval_episodes and not run.interrupted:
        run.log_evaluation(evaluate_all(args, agents, held))
    return run.finish(env_backend=choose_backend(args), communication_rounds=run.iteration // args.local_updates)


if __name__ == "__main__":
    args = communicators.parse_args(Args, check_args, may_change=("capture_video", "eval_episodes", "total_timesteps"))
    if args.eval_only:
        evaluate_run(args)
    else:
        main(args)
