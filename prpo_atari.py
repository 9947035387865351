"""PR-PPO on Atari: agents that share no data learn together through their KL penalty (PRPO paper, eq. 4).

Each agent trains on its own games; what travels between agents is parameters and a few scalars.

    python prpo_atari.py --env-id BeamRiderNoFrameskip-v4 --communicator reward   # three agents in one process
    python prpo_atari.py --communicator identity                                  # the same agents, isolated
    torchrun --nproc-per-node 3 prpo_atari.py --num-agents 3                      # one agent per process, same training
    python prpo_atari.py --resume runs/<name>                                     # go on where a run was cut off
"""

import copy
import functools
import itertools
import os
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import ale_py
import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from ale_py.vector_env import AtariVectorEnv
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
    # The environments
    env_id: str = "BeamRiderNoFrameskip-v4"
    """the game of all agents, as <Game>NoFrameskip-v4 or ALE/<Game>-v5; either way with the usual wrappers; of your own
    as module:id, as Gymnasium has it, showing its last four 84x84 frames"""
    env_ids: tuple[str, ...] = ()  # one game per agent, instead of --env-id; they must have the same actions
    sticky_actions: bool = False  # repeat the last action with probability 0.25, as in the newer protocol
    full_action_space: bool = False  # all 18 actions of the console instead of those that the game needs
    num_envs: Count = 4  # parallel environments per agent
    save_every: Count = 128
    """iterations between checkpoints; the environments start anew at each, so that a resumed run is the same run"""
    eval_episodes: Natural = 10  # whole games per agent and task at the end, with unclipped scores (0: no evaluation)
    capture_video: bool = False  # record one game per agent at the end
    eval_only: str = ""
    """folder of a run: load its agents and play, also on another task, instead of training; prints a table"""
    greedy: bool = False  # with --eval-only: play and film the most probable actions instead of sampled ones

    # Communication
    local_updates: Count = 16  # iterations between communication rounds
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
    total_timesteps: Count = 10_000_000  # environment steps of each agent; a step is four frames
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
    """of the convolutions (autocast), heads and losses are always float32; auto: bfloat16 where the hardware has it"""
    compile: bool = False
    """compile the networks with torch.compile, which is not thread-safe: the agents then compute one after the other"""


def check_args(args: Args) -> None:
    """What the types above cannot say; `refuse` ends with one line that names the flag, its value and what is valid."""
    args.precision = args.precision.replace("auto", choose_precision(args))
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
    if args.capture_video and not find_spec("moviepy"):
        communicators.refuse(args, "capture_video", "moviepy is not installed")
    check_envs(args)


def check_envs(args: Args) -> None:
    """That every game is known and installed, and that all have the same actions."""
    flag = "env_ids" if args.env_ids else "env_id"
    actions = []
    for env_id in task_ids(args):
        try:
            problem = find_game_problem(args, env_id)
            actions.append(problem or action_set(env_id, args))
        except Exception as error:  # unknown, with what was perhaps meant
            problem = (str(error) or repr(error)).splitlines()[0]
        if problem:
            valid = "must be <Game>NoFrameskip-v4 or ALE/<Game>-v5, or one of your own as module:id"
            communicators.refuse(args, flag, f"{valid}; {env_id}: {problem}")
        same = actions[-1] == actions[0]
        if is_own(env_id) or is_own(task_ids(args)[0]):  # their actions have no names
            same = len(actions[-1]) == len(actions[0])
        if not same:
            communicators.refuse(args, flag, "need the same actions; give all 18 to each with --full-action-space")


def find_game_problem(args: Args, env_id: str) -> str:
    """What makes an environment unusable here, nothing ("") if it is not."""
    if not is_own(env_id):
        return "" if env_id.endswith("NoFrameskip-v4") or env_id.startswith("ALE/") else "is none"
    options = {"render_mode": "rgb_array"} if args.capture_video else {}  # a game may not know it
    env = gym.make(env_id, disable_env_checker=True, **options)
    obs, _ = env.reset(seed=0)
    obs = np.asarray(obs)
    if obs.shape != (4, 84, 84) or obs.dtype != np.uint8:
        return f"shows no 4x84x84 frames (uint8), but {'x'.join(map(str, obs.shape))} ({obs.dtype})"
    if not isinstance(env.action_space, gym.spaces.Discrete) or env.action_space.start != 0:
        return f"has no actions 0 to n - 1, but {env.action_space}"
    if len({other for other in task_ids(args) if name_of(other) == name_of(env_id)}) > 1:
        return "has the name of another task here"  # the second module replaced what the first had registered
    return ""


def task_ids(args: Args) -> list[str]:
    """The environment id of every agent."""
    return list(args.env_ids) or [args.env_id] * args.num_agents


def name_of(env_id: str) -> str:
    """A task's name in logs and folders: its id without the module that registers it."""
    return env_id.rpartition(":")[2]


def task_names(args: Args) -> list[str]:
    """The name of every agent's task."""
    return [name_of(env_id) for env_id in task_ids(args)]


def is_own(env_id: str) -> bool:
    """Whether a game is one of your own, module:id."""
    return ":" in env_id


def num_actions(args: Args) -> int:
    """The number of actions of every task."""
    return len(action_set(task_ids(args)[0], args))


def uses_gpu(args: Args) -> bool:
    """Whether the networks are on a GPU."""
    return args.device != "cpu" and torch.cuda.is_available()


def choose_precision(args: Args) -> str:
    """bfloat16 where the processor computes with it; where it only imitates it, float32 is several times faster."""
    processor = torch.cpu.get_capabilities()
    has = torch.cuda.is_bf16_supported(including_emulation=False) if uses_gpu(args) else processor.get("avx512_bf16")
    return "bfloat16" if has else "float32"


# --- environments ---


def make_games(args: Args, env_id: str, number: int, parts: int = 1, **screen) -> AtariVectorEnv:
    """Whole games of one title with plain scores: 0-29 random no-ops at the start, 4 frames per step."""
    # The processor's cores that are ours: torchrun tells each of its processes that it has one
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    options = {"num_threads": max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)) // parts)}
    options |= {"reward_clipping": False, "use_fire_reset": False, "full_action_space": args.full_action_space}
    options |= {"repeat_action_probability": 0.25 * args.sticky_actions} | screen
    return AtariVectorEnv(gym.spec(env_id).kwargs["game"], number, **options)


class OwnGames:
    """Games of your own, with the methods of `AtariVectorEnv`.

    They show the last four 84x84 grey frames themselves, [4, 84, 84] uint8. `lives` in their info is optional.
    """

    def __init__(self, env_id: str, number: int):
        thunks = [functools.partial(gym.make, env_id, disable_env_checker=True)] * number
        self.envs = SyncVectorEnv(thunks, autoreset_mode=AutoresetMode.NEXT_STEP)

    def reset(self, seed: np.ndarray) -> tuple[np.ndarray, dict]:
        """As of AtariVectorEnv."""
        obs, info = self.envs.reset(seed=seed.tolist())
        return obs, self.add_lives(info)

    def step(self, actions: np.ndarray) -> tuple:
        """As of AtariVectorEnv."""
        *results, info = self.envs.step(actions)
        return *results, self.add_lives(info)

    def add_lives(self, info: dict) -> dict:
        """The info with everybody's lives, 0 where a game counts none."""
        return {"lives": np.zeros(self.envs.num_envs, dtype=int)} | info

    def close(self) -> None:
        """Free the games."""
        self.envs.close()


class OwnCamera:
    """One game of your own as `evaluate` films it: frames in colour, of its own `render`."""

    def __init__(self, env_id: str):
        self.env = gym.make(env_id, disable_env_checker=True, render_mode="rgb_array")

    def reset(self, seed: np.ndarray) -> tuple:
        """The first frame, as AtariVectorEnv's of a single game."""
        self.env.reset(seed=int(seed[0]))
        return self.env.render()[None, None], {}

    def step(self, actions: np.ndarray) -> tuple:
        """The next frame."""
        self.env.step(int(actions[0]))
        return (self.env.render()[None, None],)


def action_set(env_id: str, args: Args) -> list[ale_py.Action] | list[int]:
    """The actions of a game, in the order of their numbers."""
    if is_own(env_id):
        return list(range(int(gym.make(env_id, disable_env_checker=True).action_space.n)))
    return list(make_games(args, env_id, 1).ale.get_action_set())


def choose_backend(args: Args) -> str:
    """The environment backend that this run uses."""
    return "gymnasium" if any(map(is_own, task_ids(args))) else "ale-py"


class Games:
    """Games with the frames, episodes and rewards of the usual wrappers: arrays are [agents, games, ...].

    84x84 grey frames, the last 4 of them, the brighter of the last two of each step. For learning, a lost life ends the
    episode and rewards are signs; the game itself goes on, and its score is the plain sum. After the start and after a
    lost life the buttons that start play are pressed, as the wrappers of stable-baselines3 do; these steps and those
    that only start a new game do not follow the action: they are not valid.

    env_ids: the title of each row; seeds: [agents][games]; parts: in how many parts the games are stepped, as slices.
    """

    def __init__(self, args: Args, env_ids: list[str], seeds: list[list[int]], parts: int = 1):
        shape, self.pools = np.shape(seeds), []
        bounds = np.linspace(0, shape[1], parts + 1, dtype=int).tolist()
        self.parts = [slice(*pair) for pair in itertools.pairwise(bounds)]
        self.obs = np.zeros((*shape, 21, 21, 64), dtype=np.uint8)  # what the next actions answer
        self.pressed, self.lives, self.countdown = (np.zeros(shape, dtype=int) for _ in range(3))
        self.over, self.returns, self.lengths = np.zeros(shape, dtype=bool), np.zeros(shape), np.zeros(shape)
        titles = [list(rows) for _, rows in itertools.groupby(range(shape[0]), key=env_ids.__getitem__)]
        for part, rows in itertools.product(self.parts, titles):  # one large pool is faster than many small ones
            own = slice(rows[0], rows[-1] + 1), part
            env_id = env_ids[rows[0]]
            if is_own(env_id):
                pool = OwnGames(env_id, self.lives[own].size)
            else:
                pool = make_games(args, env_id, self.lives[own].size, parts)
            obs, info = pool.reset(seed=np.array(seeds)[own].ravel())
            self.obs[own], self.lives[own] = self.blocks(obs, own), info["lives"].reshape(self.lives[own].shape)
            fire = not is_own(env_id) and ale_py.Action.FIRE in list(pool.ale.get_action_set())[1:2]
            self.countdown[own] = 2 * fire
            self.pools.append((part, pool, own, fire))

    def blocks(self, obs: np.ndarray, own: tuple[slice, slice]) -> np.ndarray:
        """[games, 4, 84, 84] -> [agents, games, 21, 21, 64]: 4x4 pixels of 4 frames, see `BlockConv2d`."""
        rows = obs.view(np.uint32).reshape(-1, 4, 21, 4, 21)  # four pixels of a row are one number
        return np.ascontiguousarray(rows.transpose(0, 2, 4, 1, 3)).view(np.uint8).reshape(self.obs[own].shape)

    def step(self, part: slice, actions: np.ndarray) -> tuple[np.ndarray, ...]:
        """Returns rewards, terminations, truncations, valid, and the games that ended: [(k, game, return, length)]."""
        signals = []
        for pool, own, fire in (rest for played, *rest in self.pools if played == part):
            valid = ~self.over[own] & (self.countdown[own] == 0)
            # What is pressed while a countdown runs: nothing (after a lost life only), FIRE, the third action
            buttons = np.array([0, 2, 1, 0])[self.countdown[own]] * fire
            self.pressed[own] = np.where(valid, actions[own[0]], buttons)
            obs, *told, info = pool.step(self.pressed[own].ravel())
            self.obs[own] = self.blocks(obs, own)
            scores, terminations, truncations, lives = (x.reshape(valid.shape) for x in (*told, info["lives"]))
            # Some games linger at 0 lives before they end; a new game has lost nothing, though bonus lives are gone
            lost = (lives < self.lives[own]) & (lives > 0) & ~self.over[own]
            running = np.where(lost, 2 * fire + 1, np.maximum(self.countdown[own] - 1, 0))
            self.countdown[own] = np.where(self.over[own], 2 * fire, running)
            self.lives[own], self.over[own] = lives, terminations | truncations
            self.returns[own] += scores
            self.lengths[own] += valid
            signals.append((np.sign(scores), terminations | lost, truncations, valid))
        ended = [(k, game + part.start) for k, game in np.argwhere(self.over[:, part])]
        ended = [(*own, self.returns[own], self.lengths[own]) for own in ended]
        self.returns[:, part][self.over[:, part]] = self.lengths[:, part][self.over[:, part]] = 0.0
        return *map(np.concatenate, zip(*signals, strict=True)), ended

    def close(self) -> None:
        """Free the games."""
        for _, pool, *_ in self.pools:
            pool.close()


class Envs(Games):
    """The environments of some agents.

    Each environment starts anew in the step *after* its game's end; that step ignores the action and is not valid.
    Seeds are keyed by (seed, agent, environment, checkpoint), so that nothing depends on who holds which agent.
    While one part is stepped, the other is passed through the network, which keeps two cores busy.
    """

    def __init__(self, args: Args, agents: range, checkpoint: int):
        keys = [[(args.seed, agent, number, checkpoint, 1) for number in range(args.num_envs)] for agent in agents]
        seeds = [[derive_seed(*key) for key in own] for own in keys]
        parts = 1 if uses_gpu(args) else min(2, args.num_envs, torch.get_num_threads())
        super().__init__(args, [task_ids(args)[i] for i in agents], seeds, parts)


def public_states(args: Args, num_steps: int = 256, num_envs: int = 8) -> Tensor:
    """S_ref of Example 3: what a fixed-seed random policy sees, every eighth step of it.

    Every agent can regenerate these states alone, so using them tells nobody anything. Returns [states, ...] uint8.
    """
    states, generator, n = [], np.random.default_rng(0), num_actions(args)
    for env_id in sorted(set(task_ids(args))):
        games = Games(args, [env_id], [list(range(num_envs))])
        for step in range(num_steps):
            games.step(games.parts[0], generator.integers(n, size=(1, num_envs)))
            if step % 8 == 7:
                states.append(games.obs[0].copy())
        games.close()
    return torch.as_tensor(np.concatenate(states))


# --- the network ---


def layer_init(layer: nn.Module, std: float = np.sqrt(2)) -> nn.Module:
    """Orthogonal weights of gain `std`, zero bias."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class BlockConv2d(nn.Conv2d):
    """A convolution of stride 4 over bytes that lie in blocks of 4x4 pixels, with the usual division by 255.

    8x8 with stride 4 over 4 channels becomes 2x2 with stride 1 over 64: the same sums, about twice as fast on a CPU.
    """

    def kernel(self) -> Tensor:
        """The weight for blocks, [out, 16 * in, size / 4, size / 4]."""
        weight = (self.weight / 255).unflatten(3, (-1, 4)).unflatten(2, (-1, 4))  # out, frame, row, row in block, ...
        return weight.permute(0, 1, 3, 5, 2, 4).flatten(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 64, 21, 21]."""
        return self._conv_forward(x, self.kernel(), self.bias)


class Agent(nn.Module):
    """Policy and value function on Atari frames, with a common trunk: the network of Mnih et al. (2015)."""

    def __init__(self, num_actions: int, bfloat16: bool = False):
        super().__init__()
        self.bfloat16 = bfloat16
        self.network = nn.Sequential(
            layer_init(BlockConv2d(4, 32, 8)), nn.ReLU(inplace=True),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)), nn.ReLU(inplace=True),
            layer_init(nn.Conv2d(64, 64, 3)), nn.ReLU(inplace=True),
            nn.Flatten(),
            layer_init(nn.Linear(64 * 7 * 7, 512)), nn.ReLU(inplace=True),
        )  # fmt: skip
        self.actor = layer_init(nn.Linear(512, num_actions), std=0.01)
        self.critic = layer_init(nn.Linear(512, 1), std=1)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """obs: [batch, 21, 21, 64] uint8. Returns (logits [batch, actions], value [batch]), float32."""
        x = obs.to(torch.bfloat16 if self.bfloat16 else torch.float32).permute(0, 3, 1, 2)  # channels last
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bfloat16):
            hidden = self.network(x)
        hidden = hidden.float()
        return self.actor(hidden), self.critic(hidden).squeeze(-1)

    @torch.no_grad()
    def predict(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """`forward` for many states and no gradient, in chunks that stay in the cache."""
        logits, value = zip(*map(self, obs.split(256)), strict=True)
        return torch.cat(logits), torch.cat(value)


def make_agents(args: Args) -> list[Agent]:
    """Every agent's network at the start, all equal."""
    torch.manual_seed(args.seed)
    first = Agent(num_actions(args), args.precision == "bfloat16")
    return [copy.deepcopy(first) for _ in range(args.num_agents)]


class Actors:
    """`Agent.forward` of all agents at once, each on its own observations.

    obs: where a rollout's observations are kept, [agents, steps, envs, 21, 21, 64].
    """

    def __init__(self, args: Args, agents: list[Agent]):
        shape, self.num_actions = (len(agents), args.num_steps, args.num_envs, 21, 21, 64), agents[0].actor.out_features
        self.obs = torch.zeros(shape, dtype=torch.uint8, device=agents[0].actor.weight.device)
        networks, actors, critics = zip(*((agent.network, agent.actor, agent.critic) for agent in agents), strict=True)
        self.network = communicators.Stacked(networks, torch.bfloat16 if agents[0].bfloat16 else torch.float32)
        self.actor, self.critic = communicators.Stacked(actors), communicators.Stacked(critics)
        if args.compile:  # on a GPU each step is one launch of a CUDA graph
            self.forward = torch.compile(self.forward, mode="reduce-overhead" if uses_gpu(args) else None)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """obs: [agents, envs, 21, 21, 64] uint8. Returns (logits [agents, envs, actions], value [agents, envs])."""
        hidden = self.network(obs)
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


make_actors = Actors  # what acts for the agents in rollouts


def share_cores(args: Args, held: range, device: torch.device) -> tuple[int, int]:
    """How many agents learn side by side, and the cores of each."""
    workers = min(len(held), torch.get_num_threads())
    if args.compile or device.type != "cpu":  # torch.compile is not thread-safe
        workers = 1
    return workers, torch.get_num_threads() // workers


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


def rollout(args: Args, envs: Envs, actors: Actors, generators: list, run: Run) -> tuple[dict, list, list, list]:
    """All agents play num_steps in their environments, from where they stand.

    Returns storage [agents, steps, envs], where `states` says which of the agent's observations each one is; these
    observations and the policy's log-probabilities there, of each agent [states, ...]; and the games that ended, of
    each agent [(return, length)].
    """
    shape, ended = (len(generators), args.num_steps, args.num_envs), []
    obs, device, rewards = actors.obs, actors.obs.device, np.zeros(shape, dtype=np.float32)
    terminations, truncations, valid = (np.zeros(shape, dtype=bool) for _ in range(3))
    noise = [torch.empty(*shape[1:], actors.num_actions).exponential_(generator=own) for own in generators]
    gumbel = -torch.stack(noise).log().to(device)
    logits, actions = torch.zeros_like(gumbel), torch.zeros(shape, dtype=torch.long, device=device)
    values = torch.zeros(shape[0], shape[1] + 1, shape[2], device=device)  # and where it ends
    for network in (actors.network, actors.actor, actors.critic):
        network.read()

    @torch.inference_mode()
    def play(part: slice) -> Iterator[None]:
        tick = run.tick if part.start == 0 else lambda phase: None
        for step in range(args.num_steps):
            own = slice(None), step, part
            obs[own] = torch.from_numpy(envs.obs[:, part])
            logits[own], values[own] = actors.forward(obs[own])
            actions[own] = (logits[own] + gumbel[own]).argmax(-1)  # a sample of softmax(logits)
            action = actions[own].cpu().numpy()
            tick("rollout_forward")

            *signals, games = envs.step(part, action)
            rewards[own], terminations[own], truncations[own], valid[own] = signals
            ended.extend((step, *game) for game in games)
            tick("environments")
            yield
        values[:, -1, part] = actors.forward(torch.from_numpy(envs.obs[:, part]).to(device))[1]

    workers = 1 if args.compile else len(envs.parts)  # torch.compile is not thread-safe
    threads = max(1, torch.get_num_threads() // workers)
    communicators.take_turns([play(part) for part in envs.parts], workers, threads)
    episodes, obs = [[] for _ in generators], [own.flatten(0, 1) for own in obs]
    for _, k, _, *episode in sorted(ended):
        episodes[k].append(tuple(map(float, episode)))
    behaviour = logits.log_softmax(-1)
    # After a game's end the next stored observation is its final one, whose value bootstraps
    storage = {"rewards": rewards, "terminations": terminations, "dones": terminations | truncations, "valid": valid}
    storage = {name: torch.from_numpy(x).to(device) for name, x in storage.items()}
    storage |= {"actions": actions, "values": values[:, :-1], "next_values": values[:, 1:]}
    storage |= {"logprobs": behaviour.gather(-1, actions[..., None]).squeeze(-1)}
    storage |= {"states": torch.arange(len(obs[0]), device=device).view(shape[1:]).expand(shape)}
    run.tick("rollout_forward")
    return storage, obs, list(behaviour.flatten(1, 2)), episodes


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

    obs: its observations; batch: [samples, ...], its `states` are rows of obs.
    """
    for _ in range(args.update_epochs):
        b_inds = torch.randperm(len(batch["states"]), generator=generator).to(batch["states"].device)
        for mb_inds in filter(len, b_inds.tensor_split(args.num_minibatches)):
            mb = {name: tensor[mb_inds] for name, tensor in batch.items()}
            logits, newvalue = agent(obs[mb["states"]])
            newlogprobs = logits.log_softmax(-1)  # [minibatch, actions]
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
    """One whole game for each level, a seed. Returns their unclipped scores [levels].

    Actions are sampled, or the most probable ones (greedy). film: path, without suffix, of a video of the first game.
    An agent that has diverged has no return: NaN.
    """
    if not all(parameter.isfinite().all() for parameter in agent.parameters()):
        return np.full(len(levels), np.nan)
    games = Games(args, [env_id], [levels])
    if film:  # the same game in colour and full size: equal seeds and buttons make equal games
        from moviepy.video.io.ffmpeg_writer import FFMPEG_VideoWriter

        Path(film).parent.mkdir(exist_ok=True)
        if is_own(env_id):
            camera = OwnCamera(env_id)
        else:
            camera = make_games(args, env_id, 1, grayscale=False, img_height=210, img_width=160, stack_num=1)
        frame = camera.reset(seed=np.array(levels[:1]))[0][0, 0]
        video = FFMPEG_VideoWriter(f"{film}.mp4", frame.shape[1::-1], fps=15)  # 60 Hz, 4 frames a step
        video.write_frame(frame)
    generator, device = torch.Generator().manual_seed(seed), agent.actor.weight.device
    returns, running = np.zeros(len(levels)), np.ones(len(levels), dtype=bool)
    while running.any():
        logits, _ = agent.predict(torch.from_numpy(games.obs[0]).to(device))
        if greedy:
            actions = logits.argmax(-1).cpu().numpy()
        else:
            actions = torch.multinomial(logits.softmax(-1).cpu(), 1, generator=generator)[:, 0].numpy()
        *_, ended = games.step(games.parts[0], actions[None])
        if film and running[0]:
            video.write_frame(camera.step(games.pressed[0, :1])[0][0, 0])
        for _, level, total, _ in ended:
            returns[level], running[level] = total if running[level] else returns[level], False
    games.close()
    if film:
        video.close()
    return returns


def film_levels(args: Args, agent: int) -> list[int]:
    """The seed of the game in which `agent` is filmed."""
    return [derive_seed(args.seed, agent, 5)]


def make_tests(args: Args) -> dict[str, tuple[str, list[int]]]:
    """What every agent is evaluated on: name -> (environment id, seeds of its games)."""
    seeds = [derive_seed(args.seed, episode, 3) for episode in range(args.eval_episodes)]
    return {name_of(env_id): (env_id, seeds) for env_id in dict.fromkeys(task_ids(args))}


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
        agent.compile()

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
            envs = Envs(args, held, iteration)

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
