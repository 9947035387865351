"""FedAvg-PPO on MiniGrid and Atari: agents that share no data learn together by averaging their parameters.

Each agent trains on its own environments; what travels between agents is parameters and a few scalars.

    python fedavg_ppo.py --env-id MiniGrid-DoorKey-6x6-v0                     # three agents in one process
    python fedavg_ppo.py --env-id BeamRiderNoFrameskip-v4                     # the same on Atari
    python fedavg_ppo.py --communicator similarity                            # weighted by similarity (WeightedAvg)
    torchrun --nproc-per-node 3 fedavg_ppo.py --num-agents 3                  # one agent per process, same training
    python fedavg_ppo.py --resume runs/<name>                                 # go on where a run was cut off
"""

import copy
import csv
import difflib
import functools
import importlib.metadata
import importlib.util
import io
import itertools
import json
import os
import shutil
import signal
import sys
import time
import warnings
from collections import Counter, deque
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TextIO

import ale_py
import gymnasium as gym
import minigrid.wrappers
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from safetensors.torch import save_file
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.tensorboard import SummaryWriter

import communicators

# The defaults that depend on the environments (table 2 of the paper)
MINIGRID = {"precision": "float32", "save_every": 32, "eval_episodes": 100}
MINIGRID |= {"local_updates": 32, "total_timesteps": 5_000_000}
ATARI = {"precision": "bfloat16", "save_every": 128, "eval_episodes": 10}
ATARI |= {"local_updates": 16, "total_timesteps": 10_000_000}


@dataclass
class Args:
    exp_name: str = Path(__file__).stem
    """the name of this experiment, part of the run's folder name"""
    seed: int = 1
    """seed of everything random, keyed with the agent's number"""
    device: str = "auto"
    """cpu, cuda, cuda:N, or auto: cuda where there is one"""
    precision: Literal["float32", "bfloat16"] | None = None
    """precision of the convolutions (autocast), by default float32 on MiniGrid and bfloat16 on Atari"""
    compile: bool = False
    """compile the networks with torch.compile"""
    cudagraphs: bool = False
    """launch the forward pass of each rollout step as one CUDA graph"""
    run_dir: str = "runs"
    """folder that holds one folder per run"""
    resume: str = ""
    """folder of a run that was cut off: go on in it, with its settings"""
    save_every: int | None = None
    """iterations between checkpoints (default: MiniGrid 32, Atari 128); the environments start anew at each"""
    track: bool = False
    """also log to Weights & Biases"""
    wandb_project_name: str = "prpo"
    """the W&B project"""
    wandb_entity: str | None = None
    """the W&B team or user"""
    capture_video: bool = False
    """record one episode or game per agent at the end"""
    eval_episodes: int | None = None
    """episodes or whole games per agent and task at the end (default: MiniGrid 100, Atari 10; 0: no evaluation)"""
    eval_every: int = 0
    """iterations between evaluations during training (0: only at the end)"""

    # The environments
    env_id: str = "MiniGrid-FourRooms-v0"
    """the task of all agents: a MiniGrid or BabyAI task, or a game, as <Game>NoFrameskip-v4 or ALE/<Game>-v5"""
    env_ids: tuple[str, ...] = ()
    """one task per agent, instead of --env-id"""
    sticky_actions: bool = False
    """Atari: repeat the last action with probability 0.25, as in the newer protocol"""
    full_action_space: bool = False
    """Atari: all 18 actions of the console instead of those that the game needs"""
    levels_per_agent: int = 0
    """MiniGrid: agent i trains on K private levels only (0: unlimited levels); needs the gymnasium backend"""
    env_backend: Literal["auto", "envpool", "gymnasium"] = "auto"
    """MiniGrid: envpool is several times faster; auto takes it where it is installed and knows the task"""
    num_envs: int = 4
    """parallel environments per agent"""

    # The agents and their communication
    num_agents: int = 3
    """number of agents"""
    communicator: str = "uniform"
    """identity (isolated PPO), uniform (FedAvg), self-preferred, similarity, reward, softmax-reward or rank-reward"""
    self_preference: float = 0.6
    """c_ii of the self-preferred communicator"""
    communicator_temperature: float = 0.1
    """temperature of the softmax-reward communicator, in units of return"""
    topology: Literal["full", "ring"] = "full"
    """who may hear whom: everybody, or the two neighbours on a ring"""
    top_k: int = 0
    """keep only the k heaviest peers of each agent (0: all)"""
    local_updates: int | None = None
    """iterations between communication rounds (default: MiniGrid 32, Atari 16)"""
    kl_coef: Annotated[float, tyro.conf.arg(aliases=["--communication-coef"])] = 1.0
    """coefficient of the KL penalty towards the agent's own policy before the update"""
    kl_direction: Literal["forward", "reverse"] = "forward"
    """forward: KL(old policy || policy), eq. 3; reverse: KL(policy || old policy), mirror descent"""

    # PPO
    total_timesteps: int | None = None
    """environment steps of each agent (default: MiniGrid 5 million, Atari 10 million)"""
    learning_rate: float = 2.5e-4
    """learning rate of Adam"""
    num_steps: int = 512
    """steps per environment and rollout"""
    anneal_lr: bool = True
    """anneal the learning rate linearly to 0"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation"""
    num_minibatches: int = 4
    """minibatches per epoch"""
    update_epochs: int = 4
    """epochs per rollout"""
    norm_adv: bool = True
    """normalise advantages in each minibatch"""
    clip_coef: float = 0.1
    """clip range of the surrogate objective (0: no clipping)"""
    clip_vloss: bool = True
    """clip the value loss with the same range"""
    ent_coef: float = 0.01
    """coefficient of the entropy bonus"""
    vf_coef: float = 0.5
    """coefficient of the value loss"""
    max_grad_norm: float = 0.5
    """maximum norm of each agent's gradient"""
    target_kl: float | None = None
    """skip an agent's further epochs once its approximate KL exceeds this"""

    def __post_init__(self):
        for name, value in (ATARI if is_atari((*self.env_ids, self.env_id)[0]) else MINIGRID).items():
            if getattr(self, name) is None:
                setattr(self, name, value)


# What may differ between a run and its resumption; everything else makes another run
RESUMABLE = {"resume", "run_dir", "device", "track", "capture_video", "eval_episodes"}
# Column of metrics.csv -> key in TensorBoard; under torchrun these scalars are what the ranks tell each other
METRICS = {
    "episodic_return": "charts/episodic_return",
    "episodic_length": "charts/episodic_length",
    "episodes": "charts/episodes",
    "return_last_100": "charts/return_last_100",
    "explained_variance": "losses/explained_variance",
    "value_loss": "losses/value_loss",
    "policy_loss": "losses/policy_loss",
    "entropy": "losses/entropy",
    "old_approx_kl": "losses/old_approx_kl",
    "approx_kl": "losses/approx_kl",
    "clipfrac": "losses/clipfrac",
    "kl_reference": "losses/kl_reference",
}


def parse_args(argv: list[str] | None = None) -> Args:
    """The arguments of the command line, checked; --resume takes those of the run's folder."""
    args = tyro.cli(Args, args=argv, description=__doc__)
    if args.resume:
        config = Path(args.resume, "config.json")
        if not config.is_file():
            sys.exit(f"--resume {args.resume}: must be the folder of a run, with its config.json")
        stored = json.loads(config.read_text())
        if stored.pop("script", None) != Path(__file__).stem or stored.keys() != vars(args).keys():
            sys.exit(f"--resume {args.resume}: must be a run of this version of {Path(__file__).name}")
        stored = Args(**stored | {"env_ids": tuple(stored["env_ids"]), "resume": args.resume})
        args = tyro.cli(Args, args=argv, default=stored)
        for name, value in vars(args).items():
            if name not in RESUMABLE and not name.startswith("wandb") and value != getattr(stored, name):
                flag = name.replace("_", "-")
                sys.exit(f"--{flag} {value}: must be {getattr(stored, name)} as in {args.resume}, or left out")
    check_args(args)
    return args


def check_args(args: Args) -> None:
    """End with one line that names the flag, its value and what would be valid, before anything expensive starts."""

    def check(flags: str, valid: str, ok) -> None:
        for flag in flags.split():
            value = getattr(args, flag)
            if not ok(value):  # one rank speaks for all
                message = f"--{flag.replace('_', '-')} {value}: {valid}"
                sys.exit(message if os.environ.get("RANK", "0") == "0" else 1)

    check("num_envs num_steps num_agents local_updates save_every", "must be at least 1", lambda v: v >= 1)
    check("num_minibatches update_epochs", "must be at least 1", lambda v: v >= 1)
    check("seed levels_per_agent kl_coef clip_coef", "must not be negative", lambda v: v >= 0)
    check("eval_episodes eval_every ent_coef vf_coef", "must not be negative", lambda v: v >= 0)
    check("learning_rate max_grad_norm communicator_temperature", "must be positive", lambda v: v > 0)
    check("self_preference gamma gae_lambda", "must lie in [0, 1]", lambda v: 0 <= v <= 1)
    swapped = args.communicator == "self-preferred" and args.num_agents > 1
    check("self_preference", "must be positive, or agents would swap networks", lambda v: v > 0 or not swapped)
    names = communicators.COMMUNICATORS
    check("communicator", f"choose from {', '.join(names)}", lambda v: v in names)
    check("top_k", f"must lie in 0..{args.num_agents - 1}", lambda v: 0 <= v < args.num_agents)
    world_size = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else 1
    batch_size = args.num_envs * args.num_steps
    check("num_agents", f"must be a multiple of the {world_size} processes", lambda v: v % world_size == 0)
    check("num_minibatches", f"must divide num_envs * num_steps = {batch_size}", lambda v: batch_size % v == 0)
    check("total_timesteps", f"must be at least one rollout, {batch_size} steps", lambda v: v >= batch_size)

    envpool = importlib.util.find_spec("envpool")
    count = f"must name one task for each of {args.num_agents} agents"
    check("env_ids", count, lambda v: len(v) in (0, args.num_agents))
    known = [name for name in gym.registry if name.startswith(("MiniGrid-", "BabyAI-")) or is_atari(name)]
    flag, actions = "env_ids" if args.env_ids else "env_id", {}
    for env_id in dict.fromkeys(task_ids(args)):
        close = difflib.get_close_matches(env_id, known, 3, 0.4) or known[:3]
        check(flag, f"{env_id} is unknown; did you mean {', '.join(close)}?", lambda v, env_id=env_id: env_id in known)
        if is_atari(env_id):
            actions[env_id] = action_set(env_id, args)
            continue
        try:
            shape, problem = make_env(env_id).reset(seed=0)[0].shape, "shows no 7x7x3 codes"
        except Exception as error:  # registered, but what it needs is not installed
            shape, problem = None, f"cannot be made: {error}".splitlines()[0]
        check(flag, f"{env_id} {problem}; for example {known[0]} is fine", lambda v, shape=shape: shape == (7, 7, 3))
    check("env_ids", "must all be of MiniGrid or all of Atari", lambda v: not actions or all(map(is_atari, v)))
    same = "need the same actions; give all 18 to each with --full-action-space"
    check("env_ids", same, lambda v: all(own == actions[env_id] for own in actions.values()))
    check("sticky_actions full_action_space", "is for Atari", lambda v: not v or actions)
    check("levels_per_agent", "is for MiniGrid", lambda v: not v or not actions)
    check("env_backend", "is for MiniGrid; leave it at auto", lambda v: v == "auto" or not actions)
    check("levels_per_agent", "needs --env-backend gymnasium", lambda v: not v or args.env_backend != "envpool")
    check("env_backend", "envpool is not installed", lambda v: v != "envpool" or envpool)
    if args.env_backend == "envpool":
        unknown = set(task_ids(args)) - set(importlib.import_module("envpool").list_all_envs())
        check("env_backend", f"does not know {', '.join(unknown)}; choose auto or gymnasium", lambda v: not unknown)
    check("track", "wandb is not installed", lambda v: not v or importlib.util.find_spec("wandb"))
    check("capture_video", "moviepy is not installed", lambda v: not v or importlib.util.find_spec("moviepy"))
    cuda = "cuda, cuda:N, " if torch.cuda.is_available() else ""
    check("cudagraphs", "needs a CUDA device", lambda v: not v or (cuda and args.device != "cpu"))
    check("device", f"choose auto, {cuda}cpu", lambda v: v in ("auto", "cpu") or (cuda and v.startswith("cuda")))
    run_dir = Path(args.run_dir).absolute()
    folder = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    writable = folder.is_dir() and os.access(folder, os.W_OK)
    check("run_dir", "must be a folder that can be written to", lambda v: writable)
    needed = 64 + (64 if actions else 8) * args.num_agents  # MB: two checkpoints per agent, weights and logs
    check("run_dir", f"needs {needed} MB of free disk space", lambda v: shutil.disk_usage(folder).free > needed * 2**20)


def is_atari(env_id: str) -> bool:
    """Whether a task is a game of the Atari 2600."""
    return env_id.endswith("NoFrameskip-v4") or env_id.startswith("ALE/")


def task_ids(args: Args) -> list[str]:
    """The environment id of every agent."""
    return list(args.env_ids) or [args.env_id] * args.num_agents


def derive_seed(*key: int) -> int:
    """A 31-bit seed for a key such as (seed, agent, environment, checkpoint): never of a rank, never global."""
    return int(np.random.SeedSequence(key).generate_state(1)[0] >> 1)


class PrivateLevels(gym.Wrapper):
    """Every episode is one of a fixed set of levels, drawn with the environment's own generator."""

    def __init__(self, env: gym.Env, level_seeds: list[int]):
        super().__init__(env)
        self.level_seeds = level_seeds

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        if seed is not None:
            self.generator = np.random.default_rng(seed)
        return self.env.reset(seed=int(self.generator.choice(self.level_seeds)), options=options)


def level_seeds(args: Args, agent: int) -> list[int]:
    """The seeds of the private levels of `agent`, none if it has no such levels."""
    return [derive_seed(args.seed, agent, level, 2) for level in range(args.levels_per_agent)]


def make_env(env_id: str, levels: list[int] | None = None, **kwargs) -> gym.Env:
    """One environment of the official package, showing its image only: [7, 7, 3] uint8 codes."""
    env = minigrid.wrappers.ImgObsWrapper(gym.make(env_id, disable_env_checker=True, **kwargs))
    return PrivateLevels(env, levels) if levels else env


def choose_backend(args: Args) -> str:
    """The environment backend that this run uses."""
    if is_atari(task_ids(args)[0]):
        return "ale-py"
    if args.env_backend == "auto" and not args.levels_per_agent and importlib.util.find_spec("envpool"):
        import envpool

        return "envpool" if set(task_ids(args)) <= set(envpool.list_all_envs()) else "gymnasium"
    return "gymnasium" if args.env_backend == "auto" else args.env_backend


class MiniGridPool:
    """Environments of one task that are stepped together; each starts anew in the step after its episode's end."""

    def __init__(self, args: Args, env_id: str, seeds: list[int], levels: list[list[int]]):
        if choose_backend(args) == "envpool":
            import envpool

            self.envs = envpool.make(env_id, env_type="gymnasium", num_envs=len(seeds), seed=seeds)
            self.obs = self.envs.reset()[0]["image"]
        else:
            thunks = [functools.partial(make_env, env_id, own) for own in levels]
            self.envs = SyncVectorEnv(thunks, autoreset_mode=AutoresetMode.NEXT_STEP)
            self.obs, _ = self.envs.reset(seed=seeds)
        self.num_envs, self.ended, self.close = len(seeds), np.zeros(len(seeds), dtype=bool), self.envs.close

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, ...]:
        """What `step_envs` returns, of this pool."""
        obs, rewards, terminations, truncations, _ = self.envs.step(actions)
        valid, self.ended = ~self.ended, terminations | truncations
        obs = obs["image"] if isinstance(obs, dict) else obs
        return obs, rewards, terminations, truncations, rewards, self.ended, valid


def action_set(env_id: str, args: Args) -> list[ale_py.Action]:
    """The actions of a game, in the order of their numbers."""
    envs = AtariVectorEnv(gym.spec(env_id).kwargs["game"], 1, full_action_space=args.full_action_space)
    return list(envs.ale.get_action_set())


class AtariPool:
    """Games of one title that are stepped together, each with the frames, episodes and rewards of the usual wrappers.

    84x84 grey frames, the last 4 of them, 4 frames per step, the brighter of the last two, 0-29 random no-ops at the
    start. For learning, a lost life ends the episode and rewards are signs; the game itself goes on, and its score is
    the plain sum. After the start and after a lost life the buttons that start play are pressed, as the wrappers of
    stable-baselines3 do; these steps and those that only start a new game do not follow the action: they are not valid.
    share: of the cores that this process may use; film: keep the first game's frames in colour.
    """

    def __init__(self, args: Args, env_id: str, seeds: list[int], share: float = 1.0, film: bool = False):
        options = {"game": gym.spec(env_id).kwargs["game"], "num_envs": len(seeds), "noop_max": 30}
        options |= {"frameskip": 4, "maxpool": True, "episodic_life": False, "max_num_frames_per_episode": 108_000}
        options |= {"reward_clipping": False, "use_fire_reset": False, "autoreset_mode": AutoresetMode.NEXT_STEP}
        options |= {"repeat_action_probability": 0.25 * args.sticky_actions}
        options |= {"full_action_space": args.full_action_space}
        options |= {"num_threads": max(1, int(torch.get_num_threads() * share))}
        self.envs = AtariVectorEnv(**options)
        obs, info = self.envs.reset(seed=np.array(seeds))
        # What is pressed while a countdown runs: nothing (after a lost life only), FIRE, the third action
        fire = ale_py.Action.FIRE in list(self.envs.ale.get_action_set())[1:2]
        self.buttons = np.array([0, 2, 1, 0] if fire else [0, 0])
        self.num_envs, self.obs, self.lives = len(seeds), self.blocks(obs), info["lives"]
        self.over, self.countdown = np.zeros(len(seeds), dtype=bool), np.full(len(seeds), len(self.buttons) - 2)
        # The same games in colour and full size: equal seeds and actions make equal games
        self.camera, self.frames = None, []
        if film:
            screen = {"grayscale": False, "img_height": 210, "img_width": 160, "stack_num": 1}
            self.camera = AtariVectorEnv(**options, **screen)
            self.frames.append(self.camera.reset(seed=np.array(seeds))[0][0, 0])

    @staticmethod
    def blocks(obs: np.ndarray) -> np.ndarray:
        """[envs, 4, 84, 84] -> [envs, 21, 21, 64]: 4x4 pixels of 4 frames, see `AtariAgent`."""
        rows = obs.view(np.uint32).reshape(len(obs), 4, 21, 4, 21)  # four pixels of a row are one number
        return np.ascontiguousarray(rows.transpose(0, 2, 4, 1, 3)).view(np.uint8).reshape(len(obs), 21, 21, 64)

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, ...]:
        """What `step_envs` returns, of this pool."""
        valid = ~self.over & (self.countdown == 0)
        actions = np.where(valid, actions, self.buttons[self.countdown])
        obs, scores, terminations, truncations, info = self.envs.step(actions)
        if self.camera:
            self.frames.append(self.camera.step(actions)[0][0, 0])
        lost = (info["lives"] < self.lives) & (info["lives"] > 0)  # some games linger at 0 lives before they end
        start, after_loss = len(self.buttons) - 2, len(self.buttons) - 1
        self.countdown = np.where(lost, after_loss, np.where(self.over, start, np.maximum(self.countdown - 1, 0)))
        self.lives, self.over = info["lives"], terminations | truncations
        self.camera = None if self.over[0] else self.camera  # the first game is filmed
        return self.blocks(obs), np.sign(scores), terminations | lost, truncations, scores, self.over, valid

    def close(self) -> None:
        """Free the games."""
        self.envs.close()


def make_envs(args: Args, agents: range, numbers: range, checkpoint: int) -> tuple[list, np.ndarray]:
    """New environments of `agents`, those of these numbers, from seeds keyed by (seed, agent, number, checkpoint).

    Agents with the same task share a pool: one pool of many environments is faster than many pools.
    Returns (pools, first obs [agents * numbers, ...] uint8).
    """
    pools = []
    for env_id, group in itertools.groupby(agents, key=lambda agent: task_ids(args)[agent]):
        owners = list(itertools.product(group, numbers))
        seeds = [derive_seed(args.seed, agent, number, checkpoint, 1) for agent, number in owners]
        if is_atari(env_id):
            pools.append(AtariPool(args, env_id, seeds, len(numbers) / args.num_envs))
        else:
            pools.append(MiniGridPool(args, env_id, seeds, [level_seeds(args, agent) for agent, _ in owners]))
    return pools, np.concatenate([pool.obs for pool in pools])


def step_envs(pools: list, actions: np.ndarray) -> tuple[np.ndarray, ...]:
    """Step all environments.

    Returns (obs, rewards, terminations, truncations, scores, finished, valid), each [agents * envs, ...]: what is
    learned from, then what is reported (scores of whole games, and their ends), and which steps followed the action.
    """
    results, start = [], 0
    for pool in pools:
        results.append(pool.step(actions[start : start + pool.num_envs]))
        start += pool.num_envs
    return results[0] if len(results) == 1 else tuple(map(np.concatenate, zip(*results, strict=True)))


def minigrid_states(args: Args, num_steps: int = 64, num_envs: int = 8) -> torch.Tensor:
    """S_ref of Example 3: what a fixed-seed random policy sees in the official environments.

    Every agent can regenerate these states alone, so using them tells nobody anything. Returns [states, 7, 7, 3] uint8.
    """
    states, generator = [], np.random.default_rng(0)
    for env_id in sorted(set(task_ids(args))):
        envs = SyncVectorEnv([functools.partial(make_env, env_id)] * num_envs)
        obs, _ = envs.reset(seed=list(range(num_envs)))
        for _ in range(num_steps):
            states.append(obs.copy())
            obs, *_ = envs.step(generator.integers(envs.single_action_space.n, size=num_envs))
        envs.close()
    return torch.as_tensor(np.concatenate(states))


def atari_states(args: Args, num_steps: int = 256, num_envs: int = 8) -> torch.Tensor:
    """S_ref of Example 3: what a fixed-seed random policy sees, every eighth step of it.

    Every agent can regenerate these states alone, so using them tells nobody anything. Returns [states, ...] uint8.
    """
    states, generator = [], np.random.default_rng(0)
    for env_id in sorted(set(task_ids(args))):
        pool = AtariPool(args, env_id, list(range(num_envs)))
        for step in range(num_steps):
            obs, *_ = pool.step(generator.integers(pool.envs.single_action_space.n, size=num_envs))
            if step % 8 == 7:
                states.append(obs)
        pool.close()
    return torch.as_tensor(np.concatenate(states))


def layer_init(layer: nn.Module, std: float = np.sqrt(2)) -> nn.Module:
    """Orthogonal weights of gain `std`, zero bias."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class MiniGridAgent(nn.Module):
    """Policy and value function on MiniGrid's 7x7x3 codes, with a common trunk."""

    chunk = 1024  # states per forward pass where no gradient is needed

    def __init__(self, num_actions: int, bfloat16: bool = False):
        super().__init__()
        self.bfloat16 = bfloat16
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(3, 16, 2)), nn.Tanh(),
            layer_init(nn.Conv2d(16, 32, 2)), nn.Tanh(),
            layer_init(nn.Conv2d(32, 64, 2)), nn.Tanh(),
            nn.Flatten(),
            layer_init(nn.Linear(64 * 4 * 4, 128)), nn.Tanh(),
        )  # fmt: skip
        self.actor = layer_init(nn.Linear(128, num_actions), std=0.01)
        self.critic = layer_init(nn.Linear(128, 1), std=1)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """obs: [batch, 7, 7, 3] uint8. Returns (logits [batch, actions], value [batch]), float32."""
        x = obs.permute(0, 3, 1, 2).float()  # channels last, which suits bfloat16; float32 is faster without
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bfloat16):
            hidden = self.network(x if self.bfloat16 else x.contiguous())
        hidden = hidden.float()
        return self.actor(hidden), self.critic(hidden).squeeze(-1)

    @staticmethod
    def stack(agents: list) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The agents' weights for `stacked_forward`: per layer (weight [agents, in, out], bias [agents, 1, out])."""

        def stack(*layers: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
            weight = torch.stack([layer.weight for layer in layers])
            bias = torch.stack([layer.bias for layer in layers])
            if weight.dim() == 5:  # a 2x2 convolution is a matrix product over patches: rows, columns, channels
                weight = weight.permute(0, 1, 3, 4, 2)
            elif weight.shape[2] == 64 * 4 * 4:  # here the channels come last
                weight = weight.unflatten(2, (64, 4, 4)).permute(0, 1, 3, 4, 2)
            return weight.flatten(2).mT.contiguous(), bias[:, None]

        trunk = [stack(*(agent.network[index] for agent in agents)) for index in (0, 2, 4, 7)]
        actor, critic = stack(*(agent.actor for agent in agents)), stack(*(agent.critic for agent in agents))
        return [*trunk, tuple(torch.cat(pair, dim=2) for pair in zip(actor, critic, strict=True))]

    @staticmethod
    def stacked_forward(stacked: list, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`forward` of all agents at once, each on its own observations: what makes small rollout batches fast.

        obs: [agents, envs, 7, 7, 3] uint8. Returns (logits [agents, envs, actions], value [agents, envs]), float32.
        """
        *convolutions, linear, heads = stacked
        x = obs.float()
        for weight, bias in convolutions:
            patches = torch.cat((x[:, :, :-1, :-1], x[:, :, :-1, 1:], x[:, :, 1:, :-1], x[:, :, 1:, 1:]), dim=-1)
            x = torch.baddbmm(bias, patches.flatten(1, 3), weight).tanh_().view(*patches.shape[:4], -1)
        hidden = torch.baddbmm(linear[1], x.flatten(2), linear[0]).tanh_()
        output = torch.baddbmm(heads[1], hidden, heads[0])
        return output[..., :-1], output[..., -1]


class AtariAgent(nn.Module):
    """Policy and value function on Atari frames, with a common trunk: the network of Mnih et al. (2015).

    The frames come in blocks of 4x4 pixels, so that the first convolution, 8x8 with stride 4 over 4 channels, is one
    of 2x2 with stride 1 over 64: the same sums, about twice as fast on a CPU.
    """

    chunk = 256  # states per forward pass where no gradient is needed

    def __init__(self, num_actions: int, bfloat16: bool = False):
        super().__init__()
        self.bfloat16 = bfloat16
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(4, 32, 8, stride=4)), nn.ReLU(inplace=True),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)), nn.ReLU(inplace=True),
            layer_init(nn.Conv2d(64, 64, 3)), nn.ReLU(inplace=True),
            nn.Flatten(),
            layer_init(nn.Linear(64 * 7 * 7, 512)), nn.ReLU(inplace=True),
        )  # fmt: skip
        self.actor = layer_init(nn.Linear(512, num_actions), std=0.01)
        self.critic = layer_init(nn.Linear(512, 1), std=1)

    def first_layer(self) -> torch.Tensor:
        """The first convolution's weight for bytes in blocks: [32, 64, 2, 2], with the usual division by 255."""
        weight = (self.network[0].weight / 255).view(32, 4, 2, 4, 2, 4)  # out, frame, row, row in block, column, ...
        return weight.permute(0, 1, 3, 5, 2, 4).reshape(32, 64, 2, 2)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """obs: [batch, 21, 21, 64] uint8. Returns (logits [batch, actions], value [batch]), float32."""
        x = obs.to(torch.bfloat16 if self.bfloat16 else torch.float32).permute(0, 3, 1, 2)  # channels last
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bfloat16):
            hidden = self.network[1:](F.conv2d(x, self.first_layer(), self.network[0].bias))
        hidden = hidden.float()
        return self.actor(hidden), self.critic(hidden).squeeze(-1)

    @staticmethod
    def stack(agents: list) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The agents' weights for `stacked_forward`: per layer (weight, bias), each [agents, ...]."""
        dtype = torch.bfloat16 if agents[0].bfloat16 else torch.float32

        def stack(weights: list[torch.Tensor], layers: list[nn.Module]) -> tuple[torch.Tensor, torch.Tensor]:
            weight, bias = torch.stack(weights).to(dtype), torch.stack([layer.bias for layer in layers]).to(dtype)
            if weight.dim() == 5:  # a convolution is a matrix product over patches: rows, columns, channels
                return weight.permute(0, 3, 4, 2, 1).flatten(1, 3).contiguous(), bias[:, None]
            channels_last = weight.unflatten(2, (64, 7, 7)).permute(0, 1, 3, 4, 2)
            return channels_last.flatten(2).contiguous(), bias[
                ..., None
            ]  # few columns times many rows is fastest this way

        stacked = [stack([agent.first_layer() for agent in agents], [agent.network[0] for agent in agents])]
        for index in (2, 4, 7):
            layers = [agent.network[index] for agent in agents]
            stacked.append(stack([layer.weight for layer in layers], layers))
        heads = [(agent.actor, agent.critic) for agent in agents]
        weight = torch.stack([torch.cat((actor.weight, critic.weight)) for actor, critic in heads])
        bias = torch.stack([torch.cat((actor.bias, critic.bias)) for actor, critic in heads])
        return [*stacked, (weight, bias[..., None])]

    @staticmethod
    def stacked_forward(stacked: list, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`forward` of all agents at once, each on its own observations: what makes small rollout batches fast.

        obs: [agents, envs, 21, 21, 64] uint8. Returns (logits [agents, envs, actions], value [agents, envs]), float32.
        """
        *convolutions, linear, heads = stacked
        x = obs.to(linear[0].dtype)
        for (weight, bias), size, stride in zip(convolutions, (2, 4, 3), (1, 2, 1), strict=True):
            agents, envs, rows, _, channels = x.shape
            positions = (rows - size) // stride + 1
            step = rows * channels  # from one row to the next
            shape = (agents, envs, positions, positions, size, size * channels)
            patches = x.as_strided(shape, (envs * rows * step, rows * step, stride * step, stride * channels, step, 1))
            x = torch.baddbmm(bias, patches.reshape(agents, envs * positions**2, -1), weight).relu_()
            x = x.view(agents, envs, positions, positions, -1)
        hidden = torch.baddbmm(linear[1], linear[0], x.flatten(2).mT).relu_()
        output = torch.baddbmm(heads[1], heads[0], hidden.float())  # [agents, actions + 1, envs]
        return output[:, :-1].mT, output[:, -1]


def capture(policy, stacked: list, obs: torch.Tensor):
    """`policy(stacked, obs)` as a CUDA graph, which costs one launch. The weights are read where they are now.

    Returns a function of (stacked, obs) whose results the next call overwrites.
    """
    static, side = obs.clone(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # whatever is set up at first use must not be captured
            policy(stacked, static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = policy(stacked, static)

    def replay(stacked: list, obs: torch.Tensor):
        static.copy_(obs)
        graph.replay()
        return outputs

    return replay


def gae(rewards, values, next_values, terminations, dones, gamma: float, gae_lambda: float) -> torch.Tensor:
    """Generalized advantage estimation that never leaks across episodes.

    All [steps, ...]; next_values: V of the state that each step led to, the episode's *final* state where one ended.
    A termination is worth nothing more; a truncation bootstraps; both cut the recursion. Returns advantages.
    """
    deltas = rewards + gamma * next_values * ~terminations - values
    decay = gamma * gae_lambda * ~dones
    advantages, last = torch.empty_like(deltas), torch.zeros_like(deltas[0])
    for step in reversed(range(len(deltas))):
        last = deltas[step] + decay[step] * last
        advantages[step] = last
    return advantages


def update(
    agent: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor], args: Args
) -> torch.Tensor:
    """One minibatch step of PPO (eq. 3). batch: tensors [minibatch, ...]. Returns METRICS from value_loss on."""
    logits, newvalue = agent(batch["obs"])
    logprobs = logits.log_softmax(-1)  # [minibatch, actions]
    logratio = logprobs.gather(-1, batch["actions"][:, None]).squeeze(-1) - batch["logprobs"]
    ratio = logratio.exp()

    mb_advantages = batch["advantages"]
    if args.norm_adv and len(mb_advantages) > 1:
        mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)

    # Policy loss
    pg_loss = -mb_advantages * ratio
    if args.clip_coef > 0:
        clipped = -mb_advantages * ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
        pg_loss = torch.max(pg_loss, clipped)
    pg_loss = pg_loss.mean()

    # Value loss
    v_loss = (newvalue - batch["returns"]) ** 2
    if args.clip_vloss and args.clip_coef > 0:
        v_clipped = batch["values"] + (newvalue - batch["values"]).clamp(-args.clip_coef, args.clip_coef)
        v_loss = torch.max(v_loss, (v_clipped - batch["returns"]) ** 2)
    v_loss = 0.5 * v_loss.mean()

    entropy = -(logprobs.exp() * logprobs).sum(-1).mean()
    # The distance to the reference policy, here the agent's own before the update, exact over the action set
    kl_reference = communicators.kl_to_reference(logprobs, batch["reference"], args.kl_direction).mean()
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss + args.kl_coef * kl_reference

    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()

    with torch.no_grad():
        clipfrac = (
            ((ratio - 1).abs() > args.clip_coef).float().mean() if args.clip_coef > 0 else torch.zeros_like(v_loss)
        )
        approx_kl = (ratio - 1 - logratio).mean()  # k3, http://joschu.net/blog/kl-approx.html
        return torch.stack((v_loss, pg_loss, entropy, -logratio.mean(), approx_kl, clipfrac, kl_reference))


@torch.no_grad()
def evaluate_minigrid(
    args: Args, agent: MiniGridAgent, env_id: str, levels: list[int], seed: int, video: str = ""
) -> np.ndarray:
    """One episode of sampled actions in the official environment for each level. Returns their returns [levels].

    With `video`, a path without suffix, the first episode is filmed.
    """
    envs = [make_env(env_id, render_mode="rgb_array" if video else None) for _ in levels]
    if video:
        warnings.filterwarnings("ignore", ".*Overwriting existing videos")  # the agents share this folder
        path = Path(video)
        envs[0] = gym.wrappers.RecordVideo(envs[0], str(path.parent), name_prefix=path.name, disable_logger=True)
    obs = [env.reset(seed=level)[0] for env, level in zip(envs, levels, strict=True)]
    returns, running = np.zeros(len(envs)), list(range(len(envs)))
    generator, device = torch.Generator().manual_seed(seed), agent.actor.weight.device
    while running:
        logits, _ = agent(torch.as_tensor(np.stack([obs[k] for k in running])).to(device))
        actions = torch.multinomial(logits.softmax(-1).cpu(), 1, generator=generator)[:, 0].tolist()
        for k, action in zip(list(running), actions, strict=True):
            obs[k], reward, terminated, truncated, _ = envs[k].step(action)
            returns[k] += reward
            if terminated or truncated:
                running.remove(k)
                envs[k].close()
    return returns


@torch.no_grad()
def evaluate_atari(
    args: Args, agent: AtariAgent, env_id: str, levels: list[int], seed: int, video: str = ""
) -> np.ndarray:
    """One whole game of sampled actions for each level, a seed. Returns their unclipped scores [levels].

    With `video`, a path without suffix, the first game is filmed.
    """
    games = AtariPool(args, env_id, levels, film=bool(video))
    totals, running, obs = np.zeros(len(levels)), np.ones(len(levels), dtype=bool), games.obs
    generator, device = torch.Generator().manual_seed(seed), agent.actor.weight.device
    while running.any():
        logits, _ = agent(torch.from_numpy(obs).to(device))
        actions = torch.multinomial(logits.softmax(-1).cpu(), 1, generator=generator)[:, 0].numpy()
        obs, _, _, _, scores, finished, _ = games.step(actions)
        totals += scores * running
        running &= ~finished
    games.close()
    if video:
        Path(video).parent.mkdir(exist_ok=True)
        clip = importlib.import_module("moviepy").ImageSequenceClip(games.frames, fps=15)  # 60 Hz, 4 frames a step
        clip.write_videofile(f"{video}.mp4", logger=None)
    return totals


def make_tests(args: Args) -> dict[str, tuple[str, list[int]]]:
    """What every agent is evaluated on: name -> (environment id, seeds of its levels).

    Unseen levels of every task and, with private levels, the levels of every agent: the agents x tasks matrix.
    """
    tests = {}
    for env_id in dict.fromkeys(task_ids(args)):
        tests[env_id] = env_id, [derive_seed(args.seed, episode, 3) for episode in range(args.eval_episodes)]
        for i, task in enumerate(task_ids(args) if args.levels_per_agent else []):
            if task == env_id:
                levels = itertools.islice(itertools.cycle(level_seeds(args, i)), args.eval_episodes)
                tests[f"{env_id} levels of agent {i}"] = env_id, list(levels)
    return tests


def write_atomically(path: Path, write) -> None:
    """`write(file)` to a temporary file beside `path`, which then takes its place: a crash leaves the old one whole."""
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def save_checkpoint(folder: Path, iteration: int, state: dict) -> None:
    """Save one agent's state, then point to it; the checkpoint before it is kept, older ones are deleted."""
    folder.mkdir(parents=True, exist_ok=True)
    previous = latest_checkpoint(folder)
    write_atomically(folder / f"{iteration}.pt", lambda file: torch.save(state, file))
    write_atomically(folder / "latest", lambda file: file.write(str(iteration).encode()))
    for old in folder.glob("*.pt"):
        if old.stem not in (str(iteration), str(previous)):
            old.unlink()


def latest_checkpoint(folder: Path) -> int:
    """The iteration of an agent's newest complete checkpoint, 0 if there is none."""
    return int((folder / "latest").read_text()) if (folder / "latest").exists() else 0


def open_run(args: Args, exchange: communicators.Exchange) -> Path:
    """The run's folder: that of --resume, that of this torchrun's last attempt, or a new one named as CleanRL does."""
    if args.resume:
        return Path(args.resume)
    prefix = f"{'+'.join(dict.fromkeys(task_ids(args)))}__{args.exp_name}__{args.seed}__".replace("/", "-")
    config = json.dumps({"script": Path(__file__).stem} | vars(args), indent=2)
    stamp = torch.zeros(1, dtype=torch.long)
    if exchange.rank == 0:
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0:  # torchrun --max-restarts goes on unattended
            for path in Path(args.run_dir).glob(f"{prefix}*/config.json"):
                if path.read_text() == config:
                    stamp = stamp.clamp(min=int(path.parent.name.removeprefix(prefix)))
        now = int(time.time())
        while not stamp:
            try:
                Path(args.run_dir, f"{prefix}{now}").mkdir(parents=True)
                stamp += now
            except FileExistsError:  # a run of the same second
                now += 1
        folder = Path(args.run_dir, f"{prefix}{stamp.item()}")
        write_atomically(folder / "config.json", lambda file: file.write(config.encode()))
    return Path(args.run_dir, f"{prefix}{exchange.broadcast(stamp).item()}")


def open_csv(path: Path, header: tuple[str, ...], iteration: int) -> TextIO:
    """Open a log whose rows begin with the iteration, with its header and what it held up to `iteration`."""
    rows, text = [], io.StringIO(newline="")
    if iteration and path.exists():
        with open(path, newline="") as file:
            rows = [row for row in csv.reader(file) if row[0].isdigit() and int(row[0]) <= iteration]
    csv.writer(text).writerows([header, *rows])
    write_atomically(path, lambda file: file.write(text.getvalue().encode()))
    return open(path, "a", newline="")


class ThisThread(Executor):
    """An executor for one worker: what is submitted is done at once, so that no idle thread gets in the way."""

    def submit(self, function, /, *arguments) -> Future:
        future = Future()
        future.set_result(function(*arguments))
        return future


def make_executor(workers: int, threads: int) -> Executor:
    """As many workers, with so many threads of torch each; a single one works in this thread."""
    if workers == 1:
        return ThisThread()
    return ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(threads,))


def main(args: Args) -> dict:
    """Train, evaluate, and return what summary.json holds."""
    started = time.time()
    name = args.device.replace("auto", "cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda":
        name = f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % torch.cuda.device_count()}"
    device = torch.device(name)
    exchange = communicators.Exchange(args.num_agents, device)
    held, chief = exchange.agents, exchange.rank == 0  # the agents that this process holds; who writes the common logs
    run_folder, backend, tasks = open_run(args, exchange), choose_backend(args), task_ids(args)

    # What depends on the environments
    atari = is_atari(tasks[0])
    num_actions = len(action_set(tasks[0], args)) if atari else 7
    Agent = AtariAgent if atari else MiniGridAgent
    evaluate = evaluate_atari if atari else evaluate_minigrid
    public_states = atari_states if atari else minigrid_states

    # Few cores: the agents take turns with their minibatches, one core each. Large networks make use of more cores,
    # and slow environments are played in parts; for MiniGrid's, one core each is faster
    threads = torch.get_num_threads()
    workers = min(len(held), threads) if device.type == "cpu" else 1
    if not atari:
        torch.set_num_threads(workers)  # in this thread
    executor = make_executor(workers, threads // workers if atari else 1)
    number = min(args.num_envs, threads) if atari and device.type == "cpu" else 1
    parts = [range(part[0], part[-1] + 1) for part in np.array_split(range(args.num_envs), number)]
    players = make_executor(number, threads // number)

    # Agents: all start from the same parameters, and what is random is keyed by (seed, agent)
    torch.manual_seed(args.seed)
    agents = {i: Agent(num_actions, bfloat16=args.precision == "bfloat16").to(device) for i in held}
    snapshots = [copy.deepcopy(agents[held[0]]).requires_grad_(False) for _ in range(args.num_agents)]
    initial = exchange.broadcast(parameters_to_vector(agents[held[0]].parameters()).detach())
    for agent in (*agents.values(), *snapshots):
        vector_to_parameters(initial.clone(), agent.parameters())
    rollout_forward, stacked = Agent.stacked_forward, []
    if args.compile:
        rollout_forward = torch.compile(rollout_forward)
        for agent in agents.values():
            agent.compile()
    optimizers = {i: torch.optim.Adam(agents[i].parameters(), args.learning_rate, eps=1e-5, fused=True) for i in held}
    generators = {i: torch.Generator().manual_seed(derive_seed(args.seed, i)) for i in held}

    # Communication
    options = {"self_preference": args.self_preference, "temperature": args.communicator_temperature}
    options |= {"name": args.communicator, "num_agents": args.num_agents, "topology": args.topology}
    communicate = functools.partial(communicators.make_communicator, **options)
    communicator, distances, rounds = communicate(num_peers=args.top_k), None, 0
    if args.communicator != "identity":
        reference_states = public_states(args).to(device)

    # Statistics
    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size
    last_returns = {i: deque(maxlen=100) for i in held}
    round_returns = {i: [] for i in held}  # since the last communication round
    train_seconds, wall_seconds, clock = 0.0, 0.0, Counter()
    tests = make_tests(args) if args.eval_episodes else {}

    # Resume from the newest checkpoint that all agents completed
    folders = {i: run_folder / "checkpoints" / f"agent_{i}" for i in held}
    newest = exchange.all_gather(torch.tensor([[latest_checkpoint(folders[i])] for i in held]))
    iteration = start_iteration = int(newest.min())
    if start_iteration > 0:
        for i in held:
            state = torch.load(folders[i] / f"{start_iteration}.pt", map_location=device, weights_only=True)
            # An agent that was ahead steps back, or its next save would delete what the others may need again
            write_atomically(folders[i] / "latest", lambda file: file.write(str(start_iteration).encode()))
            agents[i].load_state_dict(state["agent"])
            optimizers[i].load_state_dict(state["optimizer"])
            generators[i].set_state(state["generator"].cpu())
            last_returns[i].extend(state["last_returns"])
            round_returns[i] = state["round_returns"]
        communicator, rounds, exchange.bytes_sent = state["communicator"].cpu(), state["rounds"], state["bytes_sent"]
        distances = state["distances"]
        train_seconds, wall_seconds, clock = state["train_seconds"], state["wall_seconds"], Counter(state["clock"])

    # Logs
    if chief:
        setting = f"{args.num_agents} agents, {args.communicator} communicator, {backend} environments, {device}"
        print(f"{run_folder}: {setting}", flush=True)
        if start_iteration:
            print(f"resuming after iteration {start_iteration} of {num_iterations}", flush=True)
        if args.track:
            import wandb

            settings = {"project": args.wandb_project_name, "entity": args.wandb_entity, "config": vars(args)}
            wandb.init(**settings, name=run_folder.name, id=run_folder.name, resume="allow", sync_tensorboard=True)
        writer = SummaryWriter(run_folder, purge_step=start_iteration * batch_size + 1)
        table = "\n".join(f"|{key}|{value}|" for key, value in vars(args).items())
        writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{table}")
        ids = "iteration", "agent", "env_id", "timesteps"
        header = (*ids, *METRICS, "communication_bytes", "agent_steps_per_second")
        metrics_file = open_csv(run_folder / "metrics.csv", header, start_iteration)
        header = ("iteration", "agent", "task", "timesteps", "episodes", "mean_return", "ci95")
        before_last = min(start_iteration, num_iterations - 1)  # the evaluation at the end is done again
        evaluations_file = open_csv(run_folder / "evaluations.csv", header, before_last)
    live, last_line = sys.stdout.isatty(), 0.0

    # Ctrl-C and SIGTERM end the run after this iteration, with a checkpoint; a second one ends it at once
    stop = []

    def request_stop(signum, frame):
        stop.append(signum)
        signal.signal(signum, signal.SIG_DFL)

    handlers = {signum: signal.signal(signum, request_stop) for signum in (signal.SIGINT, signal.SIGTERM)}

    # Storage
    shape = (args.num_steps, len(held), args.num_envs)  # [steps, agents, envs]
    episodic_return, episodic_length = np.zeros(shape[1:]), np.zeros(shape[1:])
    envs = [make_envs(args, held, numbers, start_iteration) for numbers in parts]
    obs = torch.zeros((len(held), shape[0], shape[2], *envs[0][1].shape[1:]), dtype=torch.uint8, device=device)
    states = {i: obs[k].flatten(0, 1) for k, i in enumerate(held)}  # one agent's lie together
    obs = obs.transpose(0, 1)  # [steps, agents, envs, ...]
    staging = torch.zeros_like(obs[0], device="cpu", pin_memory=device.type == "cuda")  # one transfer per step
    actions = torch.zeros(shape, dtype=torch.long, device=device)
    logits = torch.zeros((*shape, num_actions), device=device)
    values = torch.zeros(shape, device=device)
    next_value = torch.zeros(shape[1:], device=device)
    rewards = np.zeros(shape, dtype=np.float32)
    terminations, truncations, valid = (np.zeros(shape, dtype=bool) for _ in range(3))

    def to_torch(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    def tick(phase: str) -> None:  # where the time goes
        nonlocal tock
        now = time.perf_counter()
        clock[phase] += now - tock
        tock = now

    def run_tests() -> list[list[list[float]]]:
        """Evaluate every agent on every task; log and return the means and half their 95 % intervals."""
        local = []
        for i in held:
            local.append([])
            for test, (env_id, levels) in enumerate(tests.values()):
                returns = evaluate(args, agents[i], env_id, levels, derive_seed(args.seed, i, test, 4))
                local[-1] += [returns.mean(), 1.96 * returns.std(ddof=len(levels) > 1) / np.sqrt(len(levels))]
        results = exchange.all_gather(torch.tensor(local, dtype=torch.float64)).unflatten(1, (len(tests), 2)).tolist()
        for i, (k, name) in itertools.product(range(args.num_agents), enumerate(tests)) if chief else ():
            mean, half = results[i][k]
            writer.add_scalar(f"eval/{name}/agent_{i}", mean, iteration * batch_size)
            row = [iteration, i, name, iteration * batch_size, args.eval_episodes, f"{mean:.6g}", f"{half:.6g}"]
            csv.writer(evaluations_file).writerow(row)
        return results

    interrupted = False
    while iteration < num_iterations and not interrupted:
        iteration_start = tock = time.perf_counter()
        iteration += 1
        if args.anneal_lr:
            for optimizer in optimizers.values():
                optimizer.param_groups[0]["lr"] = (1.0 - (iteration - 1) / num_iterations) * args.learning_rate

        # Rollout: one forward for all agents in each step
        noise = [torch.empty(*logits[:, 0].shape).exponential_(generator=generators[i]) for i in held]
        gumbel = -torch.stack(noise, dim=1).to(device).log()
        with torch.no_grad():
            weights = Agent.stack([agents[i] for i in held])
        if not stacked:
            stacked = weights
            if args.cudagraphs:
                rollout_forward = capture(rollout_forward, stacked, obs[0])
        for old, new in zip(itertools.chain(*stacked), itertools.chain(*weights), strict=True):
            old.copy_(new)

        @torch.inference_mode()
        def play(part: int, envs=envs, gumbel=gumbel, stacked=stacked, forward=rollout_forward) -> list[tuple]:
            """Play a part of the environments for a rollout. Returns (step, agent, env, return, length) of each end."""
            numbers, (pools, next_obs), ends = parts[part], envs[part], []
            here = slice(None), slice(numbers.start, numbers.stop)
            for step in range(args.num_steps + 1):
                staging[here].copy_(torch.from_numpy(next_obs).view_as(staging[here]))
                if step == args.num_steps:
                    next_value[here] = forward(stacked, staging[here].to(device))[1]
                    break
                obs[step][here].copy_(staging[here], non_blocking=True)
                logits[step][here], values[step][here] = forward(stacked, obs[step][here])
                noisy = logits[step][here] + gumbel[step][here]
                actions[step][here] = noisy.argmax(-1)  # a sample of softmax(logits)
                action = actions[step][here].cpu().numpy().ravel()
                if part == 0:
                    tick("rollout_forward")

                next_obs, *results = step_envs(pools, action)
                results = [array.reshape(len(held), len(numbers)) for array in results]
                rewards[step][here], terminations[step][here], truncations[step][here] = results[:3]
                scores, finished, valid[step][here] = results[3:]
                if part == 0:
                    tick("environments")
                episodic_return[here] += scores
                episodic_length[here] += valid[step][here]
                for k, number in np.argwhere(finished):
                    own = k, numbers[number]
                    ends.append((step, *own, episodic_return[own], episodic_length[own]))
                    episodic_return[own] = episodic_length[own] = 0.0
            envs[part] = pools, next_obs
            return ends

        episodes = {i: [] for i in held}
        for _, k, _, *result in sorted(itertools.chain(*players.map(play, range(len(parts))))):
            episodes[held[k]].append(tuple(result))
        if args.precision == "bfloat16":  # rounding must not look like a change of policy: as the update computes it

            @torch.no_grad()
            def again(k: int) -> None:
                for steps in torch.arange(args.num_steps).split(max(1, Agent.chunk // args.num_envs)):
                    policy, value = agents[held[k]](obs[steps, k].flatten(0, 1))
                    logits[steps, k], values[steps, k] = (x.unflatten(0, (len(steps), -1)) for x in (policy, value))

            list(executor.map(again, range(len(held))))
        tick("rollout_forward")

        # Advantages; after an episode's end the next stored observation is its final one, whose value bootstraps
        with torch.no_grad():
            next_values = torch.cat((values[1:], next_value[None]))
            ends = to_torch(terminations), to_torch(terminations | truncations)
            advantages = gae(to_torch(rewards), values, next_values, *ends, args.gamma, args.gae_lambda)
            behaviour = logits.log_softmax(-1)  # [steps, agents, envs, actions]
            logprobs = behaviour.gather(-1, actions[..., None]).squeeze(-1)

        # Flatten, without the steps that only reset an environment
        storage = {"actions": actions, "logprobs": logprobs, "reference": behaviour, "values": values}
        storage |= {"advantages": advantages, "returns": advantages + values}
        keep = {i: to_torch(valid)[:, k].flatten().nonzero().squeeze(-1) for k, i in enumerate(held)}
        batches = {
            i: {name: tensor[:, k].flatten(0, 1)[keep[i]] for name, tensor in storage.items()}
            for k, i in enumerate(held)
        }
        tick("advantages")

        # Update: every agent takes its minibatches in order, and the agents take turns, so that all cores work
        def step_agent(i: int, mb_inds: torch.Tensor, previous, batches=batches, keep=keep) -> list[torch.Tensor]:
            stats = previous.result() if previous else []
            new_epoch = len(stats) % args.num_minibatches == 0
            if args.target_kl is not None and stats and new_epoch and stats[-1][4] > args.target_kl:
                return stats
            minibatch = {name: tensor[mb_inds] for name, tensor in batches[i].items()}
            minibatch["obs"] = states[i][keep[i][mb_inds]]
            return [*stats, update(agents[i], optimizers[i], minibatch, args)]

        futures = dict.fromkeys(held)
        for _ in range(args.update_epochs):
            inds = {i: torch.randperm(len(keep[i]), generator=generators[i]).to(device) for i in held}
            mb_inds = {i: inds[i].tensor_split(args.num_minibatches) for i in held}
            for k in range(args.num_minibatches):
                futures = {i: executor.submit(step_agent, i, mb_inds[i][k], futures[i]) for i in held}
        stats = {i: torch.stack(futures[i].result()).mean(0).tolist() for i in held}
        tick("update")

        # Communication round: exchange parameters, refresh the communicator, average
        for i in held:
            last_returns[i].extend(float(total) for total, _ in episodes[i])
            round_returns[i].extend(float(total) for total, _ in episodes[i])
        if iteration % args.local_updates == 0:
            own = torch.stack([parameters_to_vector(agents[i].parameters()).detach() for i in held])
            if args.communicator != "identity":  # isolated: nothing leaves an agent
                means = [[np.mean(round_returns[i]) if round_returns[i] else np.nan] for i in held]
                returns = exchange.all_gather(torch.tensor(means, dtype=torch.float64)).flatten()
                # Similarity must hear all peers before it can choose
                candidates = 0 if args.communicator == "similarity" else args.top_k
                parameters, usable = exchange.snapshots(own, communicate(returns=returns, num_peers=candidates) > 0)
                for snapshot, row in zip(snapshots, parameters, strict=True):
                    vector_to_parameters(row, snapshot.parameters())
                with torch.no_grad():
                    public = torch.stack([s(reference_states)[0].log_softmax(-1).cpu() for s in snapshots])
                communicator = communicate(returns=returns, log_probs=public, num_peers=args.top_k, valid=usable)
                distances = communicators.total_variation(public)
                averages = communicators.average_parameters(communicator, parameters)
                for i in held:  # optimizer moments are kept
                    vector_to_parameters(averages[i].clone(), agents[i].parameters())
                if chief and not usable.all():
                    dropped = (~usable).nonzero().flatten().tolist()
                    print(f"\niteration {iteration}: dropped the invalid snapshots of agents {dropped}", flush=True)
            round_returns = {i: [] for i in held}
            rounds += 1
        tick("exchange")

        # Metrics: declared scalars, one row per agent
        local = []
        for i in held:
            means = np.mean(episodes[i], axis=0) if episodes[i] else (np.nan, np.nan)
            recent = np.mean(last_returns[i]) if last_returns[i] else np.nan
            residuals = batches[i]["returns"] - batches[i]["values"]
            explained_variance = (1 - residuals.var() / batches[i]["returns"].var()).item()
            local.append([*means, len(episodes[i]), recent, explained_variance, *stats[i], len(stop)])
        gathered = exchange.all_gather(torch.tensor(local, dtype=torch.float64)).numpy()  # [agents, metrics + 1]
        interrupted = bool(gathered[:, -1].any())
        train_seconds += time.perf_counter() - iteration_start
        if chief:
            timesteps, sps = iteration * batch_size, iteration * batch_size * args.num_agents / train_seconds
            scalars = {"charts/learning_rate": optimizers[held[0]].param_groups[0]["lr"], "charts/SPS": sps}
            scalars |= {"communication/rounds": rounds, "communication/bytes": exchange.bytes_sent}
            scalars |= {"communication/non_expansion": communicators.non_expansion(communicator)}
            for i, j in itertools.product(range(args.num_agents), repeat=2):
                scalars[f"communicator/c_{i}_{j}"] = communicator[i, j].item()
                if distances is not None and i < j:
                    scalars[f"distances/agent_{i}_agent_{j}"] = distances[i, j].item()
            for key, column in zip(METRICS.values(), gathered.T[:-1], strict=True):
                scalars |= {f"{key}/agent_{i}": value for i, value in enumerate(column)}
                scalars[key] = column[~np.isnan(column)].mean() if not np.isnan(column).all() else np.nan  # the group
            for key, value in scalars.items():
                if not np.isnan(value):
                    writer.add_scalar(key, value, timesteps)
            for i, row in enumerate(gathered[:, :-1]):
                values_of = [f"{value:.6g}" for value in row]
                csv.writer(metrics_file).writerow(
                    [iteration, i, tasks[i], timesteps, *values_of, exchange.bytes_sent, round(sps)]
                )
            metrics_file.flush()
            if live or time.time() - last_line > 10 or iteration == num_iterations:
                left = time.strftime("%H:%M:%S", time.gmtime((num_iterations - iteration) * train_seconds / iteration))
                recent = " ".join(f"{row[3]:.2f}" for row in gathered)
                line = f"iteration {iteration}/{num_iterations}  {sps:,.0f} agent-steps/s  {left} left  return {recent}"
                print(f"\r\033[K{line}" if live else line, end="" if live else "\n", flush=True)
                last_line = time.time()

        # Evaluation
        if tests and args.eval_every and iteration % args.eval_every == 0 and iteration < num_iterations:
            run_tests()

        # Checkpoint; every run, interrupted or not, starts its environments anew here
        if iteration % args.save_every == 0 or iteration == num_iterations or interrupted:
            wall = wall_seconds + time.time() - started
            common = {"communicator": communicator, "rounds": rounds, "bytes_sent": exchange.bytes_sent}
            common |= {"distances": distances, "clock": dict(clock)}
            common |= {"train_seconds": train_seconds, "wall_seconds": wall}
            if chief:
                writer.flush()
                evaluations_file.flush()
            for i in held:
                state = {"agent": agents[i].state_dict(), "optimizer": optimizers[i].state_dict()}
                state |= {"generator": generators[i].get_state(), "round_returns": round_returns[i]}
                save_checkpoint(folders[i], iteration, common | state | {"last_returns": list(last_returns[i])})
            exchange.barrier()
            for pool in itertools.chain(*(pools for pools, _ in envs)):
                pool.close()
            envs = [make_envs(args, held, numbers, iteration) for numbers in parts]
            episodic_return[:], episodic_length[:] = 0.0, 0.0

    executor.shutdown()
    players.shutdown()
    for pool in itertools.chain(*(pools for pools, _ in envs)):
        pool.close()
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
    if chief and live:
        print()

    # Weights, videos, and the evaluation of every agent on every task in the official environments
    results = run_tests() if tests and not interrupted else [[] for _ in range(args.num_agents)]
    local = []
    for i in held:
        save_file(agents[i].state_dict(), run_folder / f"agent_{i}.safetensors")
        local.append([np.mean(last_returns[i]) if last_returns[i] else np.nan])
        if args.capture_video and not interrupted:
            levels, seed = [derive_seed(args.seed, i, 5)], derive_seed(args.seed, i, 6)
            evaluate(args, agents[i], tasks[i], levels, seed, str(run_folder / "videos" / f"agent_{i}"))
    recent = exchange.all_gather(torch.tensor(local, dtype=torch.float64)).flatten().tolist()

    # Summary
    packages = ["torch", "numpy", "gymnasium", "ale-py" if atari else "minigrid"]
    packages += ["envpool"] * (backend == "envpool")
    matrix = [{name: {"mean": m, "ci95": half} for name, (m, half) in zip(tests, row, strict=False)} for row in results]
    summary = {
        "script": Path(__file__).stem,
        "run": run_folder.name,
        "completed": not interrupted,
        "settings": vars(args),
        "seed": args.seed,
        "versions": {"python": sys.version.split()[0]} | {name: importlib.metadata.version(name) for name in packages},
        "env_backend": backend,
        "device": str(device),
        "world_size": exchange.world_size,
        "iterations": iteration,
        "timesteps_per_agent": iteration * batch_size,
        "agent_steps_per_second": iteration * batch_size * args.num_agents / train_seconds,
        "train_seconds": train_seconds,
        "wall_seconds": wall_seconds + time.time() - started,
        "seconds": dict(clock),
        "communication_rounds": rounds,
        "communication_bytes": exchange.bytes_sent,
        "training_return": {"episodes": 100, "group": np.mean(recent), "agents": recent},
        "evaluation": {"episodes": args.eval_episodes, "group": None, "agents": matrix},
    }
    if matrix[0]:  # every agent on its own task
        summary["evaluation"]["group"] = np.mean([row[task]["mean"] for row, task in zip(matrix, tasks, strict=True)])
    summary = json.loads(json.dumps(summary), parse_constant=lambda _: None)  # JSON knows no NaN
    if chief:
        write_atomically(run_folder / "summary.json", lambda file: file.write(json.dumps(summary, indent=2).encode()))
        metrics_file.close()
        evaluations_file.close()
        writer.close()
        if args.track:
            wandb.finish()
        print("agent  last 100 episodes" + "".join(f"  {name:>17}" for name in matrix[0]))
        for i, row in enumerate(results):
            cells = [
                f"{f'{m:.3f} ± {half:.3f}':>{max(17, len(name))}}"
                for name, (m, half) in zip(matrix[0], row, strict=True)
            ]
            print(f"{i:>5}  {recent[i]:>17.3f}  {'  '.join(cells)}".rstrip())
        speed = f"{summary['agent_steps_per_second']:,.0f} agent-steps/s"
        print(f"{speed}, {exchange.bytes_sent:,} bytes sent, everything in {run_folder}")
        if interrupted:
            print(f"interrupted after iteration {iteration} of {num_iterations}; go on with --resume {run_folder}")
    exchange.close()
    torch.set_num_threads(threads)
    if interrupted:
        sys.exit(128 + (stop or [signal.SIGTERM])[0])
    return summary


if __name__ == "__main__":
    main(parse_args())
