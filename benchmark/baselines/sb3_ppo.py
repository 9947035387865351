"""stable-baselines3 PPO on MiniGrid, Atari and MuJoCo at our scripts' settings: the yardstick for
speed and sample efficiency.

    python benchmark/baselines/sb3_ppo.py --env-id MiniGrid-DoorKey-6x6-v0 --seed 1
    python prpo_minigrid.py --num-agents 1 --kl-coef 0 --env-id MiniGrid-DoorKey-6x6-v0 --seed 1 \\
        --learning-rate 2.5e-4 --total-timesteps 5000000
    python benchmark/baselines/sb3_ppo.py --env-id BeamRiderNoFrameskip-v4 --eval-episodes 10
    python benchmark/baselines/sb3_ppo.py --env-id HalfCheetah-v5 --eval-episodes 10 \\
        --learning-rate 3e-4 --num-minibatches 32 --update-epochs 10 --clip-coef 0.2 --ent-coef 0

The second command is what the first is compared with: one agent alone, without the KL penalty,
which this PPO lacks. Network, initialisation, optimizer, minibatches, advantages, losses'
coefficients and annealing are the same. What stable-baselines3 does its own way and has no setting
for:
- its clipped value loss is the error of the clipped value; ours is the larger of the clipped and
  the unclipped error, which keeps its gradient (--no-clip-vloss on both sides makes the value
  losses equal);
- it resets an environment in the step that ends the episode; ours spends one step on the reset (on
  Atari up to three on the buttons that start play) and masks them out, so the same number of
  timesteps holds slightly fewer transitions;
- its environments are Python ones, one after another, where ours are envpool's if that is
  installed, or ale-py's;
- on MuJoCo it adds every step to the statistics by which observations and rewards are normalised;
  ours are those of the rollouts before (observations) and up to this one (rewards).
"""

import csv
import dataclasses
import importlib.metadata
import json
import math
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ale_py  # noqa: F401, registers the games
import gymnasium as gym
import minigrid.wrappers
import numpy as np
import torch
import torch.nn as nn
from scipy import stats
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecFrameStack, VecNormalize

sys.path.append(str(Path(__file__).resolve().parents[1]))
from arguments import is_atari, is_minigrid, read_flags, refuse

# Their versions go into summary.json
PACKAGES = ("stable-baselines3", "torch", "numpy", "gymnasium", "minigrid", "ale-py", "mujoco")


@dataclass
class Settings:
    """The settings of every algorithm of the yardstick."""

    seed: int = 1
    """seed of everything random"""
    device: str = "cpu"
    """cpu or cuda"""
    threads: int = 0
    """threads of torch (0: its own choice)"""
    run_dir: str = "runs"
    """folder that holds one folder per run"""
    eval_episodes: int = 100
    """episodes at the end, with sampled actions (0: no evaluation)"""
    env_id: str = "MiniGrid-FourRooms-v0"
    """the task"""
    num_envs: int = 4
    """parallel environments"""
    total_timesteps: int = 5_000_000
    """environment steps"""
    num_steps: int = 512
    """steps per environment and rollout"""
    anneal_lr: bool = True
    """anneal the learning rate linearly to 0"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation"""


@dataclass
class Args(Settings):
    exp_name: str = Path(__file__).stem
    """the name of this experiment, part of the run's folder name"""

    # PPO
    learning_rate: float = 2.5e-4
    """learning rate of Adam"""
    num_minibatches: int = 4
    """minibatches per epoch"""
    update_epochs: int = 4
    """epochs per rollout"""
    norm_adv: bool = True
    """normalise advantages in each minibatch"""
    clip_coef: float = 0.1
    """clip range of the surrogate objective"""
    clip_vloss: bool = True
    """clip the value with the same range"""
    ent_coef: float = 0.01
    """coefficient of the entropy bonus"""
    vf_coef: float = 0.5
    """coefficient of the value loss 0.5 * (value - return)^2"""
    max_grad_norm: float = 0.5
    """maximum norm of the gradient"""


def check_args(args: Args, minigrid_only: bool = False) -> None:
    """End with one line that names the flag, its value and what would be valid, before anything
    expensive starts.
    """
    batch_size = args.num_envs * args.num_steps
    smallest = min(args.num_envs, args.num_steps, args.num_minibatches)
    if smallest < 1 or batch_size % args.num_minibatches:
        valid = f"must divide num_envs * num_steps = {batch_size}"
        refuse(f"--num-minibatches {args.num_minibatches}: {valid}")
    if args.total_timesteps < batch_size:
        valid = f"must be at least one rollout, {batch_size} steps"
        refuse(f"--total-timesteps {args.total_timesteps}: {valid}")
    usable = is_minigrid(args.env_id)
    examples = "MiniGrid-FourRooms-v0"
    if not minigrid_only:
        usable = usable or is_atari(args.env_id) or is_mujoco(args.env_id)
        examples += ", BeamRiderNoFrameskip-v4 and HalfCheetah-v5"
    if args.env_id not in gym.registry or not usable:
        refuse(f"--env-id {args.env_id}: unknown; {examples} will do")


def is_mujoco(env_id: str) -> bool:
    """Whether a task is one of MuJoCo, in the version that is developed."""
    spec = gym.registry.get(env_id)
    return spec is not None and spec.version == 5 and "mujoco" in str(spec.entry_point)


class MiniGridTrunk(BaseFeaturesExtractor):
    """The trunk of prpo_minigrid.py's Agent; stable-baselines3 itself makes it orthogonal with gain
    sqrt(2).
    """

    def __init__(self, observation_space: gym.spaces.Box):
        super().__init__(observation_space, features_dim=128)
        if observation_space.shape != (3, 7, 7):
            raise ValueError(f"expected channels x 7 x 7, got {observation_space.shape}")
        self.network = nn.Sequential(
            nn.Conv2d(3, 16, 2),
            nn.Tanh(),
            nn.Conv2d(16, 32, 2),
            nn.Tanh(),
            nn.Conv2d(32, 64, 2),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 128),
            nn.Tanh(),
        )

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """obs: [batch, 3, 7, 7], the codes as float32. Returns [batch, 128]."""
        return self.network(obs)


class Recorder(BaseCallback):
    """Times the training without its start-up and writes one row per iteration, as prpo_minigrid.py
    does.
    """

    def __init__(self, args: Args, metrics_file):
        super().__init__()
        self.args = args
        self.file = metrics_file
        self.writer = None
        self.clock = Counter()  # phase -> seconds
        self.iteration = 0
        self.episodes = []  # (return, length) of those that ended in this iteration
        self.last_returns = deque(maxlen=100)
        self.last_tick = 0.0
        self.last_line = -math.inf

    def tick(self, phase: str) -> None:
        """Add the time since the last call to a phase."""
        now = time.perf_counter()
        self.clock[phase] += now - self.last_tick
        self.last_tick = now

    def _on_training_start(self) -> None:
        self.last_tick = time.perf_counter()

    def _on_step(self) -> bool:
        for info in self.locals["infos"]:
            if "episode" in info:
                self.episodes.append((info["episode"]["r"], info["episode"]["l"]))
                self.last_returns.append(info["episode"]["r"])
        return True

    def _on_rollout_end(self) -> None:
        self.tick("rollout")

    def _on_rollout_start(self) -> None:
        if self.clock:
            self.end_iteration()

    def _on_training_end(self) -> None:
        self.end_iteration()

    def end_iteration(self) -> None:
        """Write the iteration's row, and now and then a line."""
        self.tick("update")
        self.iteration += 1
        episodes = self.episodes or [(np.nan, np.nan)]
        episodic_return, episodic_length = np.mean(episodes, axis=0)
        steps_per_second = self.num_timesteps / self.clock.total()
        row = {
            "iteration": self.iteration,
            "agent": 0,
            "env_id": self.args.env_id,
            "timesteps": self.num_timesteps,
            "seed": self.args.seed,
            "exp_name": self.args.exp_name,
            "episodic_return": f"{episodic_return:.6g}",
            "episodic_length": f"{episodic_length:.6g}",
            "episodes": len(self.episodes),
            "return_last_100": f"{self.training_return():.6g}",
            "agent_steps_per_second": round(steps_per_second),
        }
        if self.writer is None:
            self.writer = csv.DictWriter(self.file, row.keys())
            self.writer.writeheader()
        self.writer.writerow(row)
        self.file.flush()
        self.episodes = []
        if time.monotonic() - self.last_line > 10:
            progress = f"{self.num_timesteps:,} of {self.args.total_timesteps:,} timesteps"
            speed = f"{steps_per_second:,.0f} agent-steps/s"
            print(f"{progress}  {speed}  return {self.training_return():.2f}", flush=True)
            self.last_line = time.monotonic()

    def training_return(self) -> float:
        """Mean return of the last 100 episodes."""
        return float(np.mean(self.last_returns)) if self.last_returns else np.nan


def make_env(env_id: str) -> gym.Env:
    """One environment of the official package; MiniGrid shows its image only, [7, 7, 3] uint8."""
    env = gym.make(env_id, disable_env_checker=True)
    if is_minigrid(env_id):
        env = minigrid.wrappers.ImgObsWrapper(env)
    return Monitor(env)


def make_envs(args: Args) -> VecEnv:
    """The training environments; Atari and MuJoCo with the library's own wrappers, which are the
    usual ones.
    """
    if is_atari(args.env_id):
        return VecFrameStack(make_atari_env(args.env_id, args.num_envs, args.seed), 4)
    envs = DummyVecEnv([lambda: make_env(args.env_id)] * args.num_envs)
    if is_mujoco(args.env_id):
        envs = VecNormalize(envs, gamma=args.gamma)  # observations and rewards
    return envs


def make_schedule(args: Args) -> Callable:
    """The learning rate as a function of the progress that remains."""
    num_iterations = args.total_timesteps // (args.num_envs * args.num_steps)

    def compute_learning_rate(progress_remaining: float) -> float:
        if not args.anneal_lr:
            return args.learning_rate
        # The library computes it after the rollout, when 1/num_iterations of the progress is gone;
        # our scripts anneal from the full rate
        return args.learning_rate * (progress_remaining + 1 / num_iterations)

    return compute_learning_rate


def make_model(args: Args) -> PPO:
    """PPO at our settings. It wraps the environments itself so that channels come first."""
    policy = {"ortho_init": True, "optimizer_kwargs": {"eps": 1e-5}}
    if is_mujoco(args.env_id):
        policy |= {"net_arch": [64, 64], "activation_fn": nn.Tanh}  # two networks
    else:
        policy |= {"net_arch": []}
    if is_minigrid(args.env_id):
        policy |= {"features_extractor_class": MiniGridTrunk, "normalize_images": False}
    return PPO(
        "MlpPolicy" if is_mujoco(args.env_id) else "CnnPolicy",
        make_envs(args),
        learning_rate=make_schedule(args),
        n_steps=args.num_steps,
        batch_size=args.num_envs * args.num_steps // args.num_minibatches,
        n_epochs=args.update_epochs,
        gamma=args.gamma,
        gae_lambda=args.gae_lambda,
        clip_range=args.clip_coef,
        clip_range_vf=args.clip_coef if args.clip_vloss else None,
        normalize_advantage=args.norm_adv,
        ent_coef=args.ent_coef,
        vf_coef=args.vf_coef / 2,  # its value loss lacks the factor 0.5
        max_grad_norm=args.max_grad_norm,
        seed=args.seed,
        device=args.device,
        policy_kwargs=policy,
    )


def evaluate(model: PPO, env_id: str, seeds: list[int]) -> np.ndarray:
    """One episode with sampled actions on each level of `seeds`. Returns their returns [levels]."""
    envs = [make_env(env_id) for _ in seeds]
    obs = [env.reset(seed=seed)[0] for env, seed in zip(envs, seeds, strict=True)]
    returns = np.zeros(len(envs))
    running = list(range(len(envs)))
    statistics = model.get_vec_normalize_env()
    while running:
        batch = np.stack([obs[k] for k in running])
        if statistics:
            batch = statistics.normalize_obs(batch)
        actions, _ = model.predict(batch, deterministic=False)
        for k, action in zip(list(running), actions, strict=True):
            obs[k], reward, terminated, truncated, _ = envs[k].step(action)
            returns[k] += reward
            if terminated or truncated:
                running.remove(k)
                envs[k].close()
    return returns


def make_run_folder(args: Args) -> Path:
    """A new folder, named as prpo_minigrid.py names it."""
    stamp = int(time.time())
    while True:
        folder = Path(args.run_dir, f"{args.env_id}__{args.exp_name}__{args.seed}__{stamp}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:  # another run of the same second
            stamp += 1


def evaluate_model(args: Args, model: PPO) -> np.ndarray:
    """The returns of --eval-episodes episodes; on MiniGrid and MuJoCo on the same levels as our
    scripts' evaluations.
    """
    if not args.eval_episodes:
        return np.full(1, np.nan)
    if is_atari(args.env_id):
        # Whole games, unclipped: the library counts them below its wrappers
        games = VecFrameStack(make_atari_env(args.env_id, 1, args.seed + 1000), 4)
        options = {"deterministic": False, "return_episode_rewards": True}
        returns, _ = evaluate_policy(model, games, args.eval_episodes, **options)
        return np.array(returns)
    levels = []
    for k in range(args.eval_episodes):
        state = np.random.SeedSequence((args.seed, k, 3)).generate_state(1)[0]
        levels.append(int(state >> 1))
    return evaluate(model, args.env_id, levels)


def main(args: Args, make_model: Callable = make_model) -> dict:
    """Train, evaluate, and return what summary.json holds."""
    started = time.monotonic()
    if args.threads:
        torch.set_num_threads(args.threads)
    run_folder = make_run_folder(args)
    model = make_model(args)
    # Its default leaves an empty temporary folder behind
    model.set_logger(Logger(folder=None, output_formats=[]))
    batch_size = args.num_envs * args.num_steps
    with open(run_folder / "metrics.csv", "w", newline="") as metrics_file:
        recorder = Recorder(args, metrics_file)
        model.learn(args.total_timesteps // batch_size * batch_size, callback=recorder)
    returns = evaluate_model(args, model)
    mean = returns.mean()
    half = math.nan
    if len(returns) > 1:
        half = stats.t.ppf(0.975, len(returns) - 1) * returns.std(ddof=1) / math.sqrt(len(returns))
    train_seconds = recorder.clock.total()
    packages = [*PACKAGES]
    if "sb3_contrib" in sys.modules:
        packages.append("sb3-contrib")
    versions = {"python": sys.version.split()[0]}
    versions |= {name: importlib.metadata.version(name) for name in packages}
    summary = {
        "script": Path(sys.modules[type(args).__module__].__file__).stem,
        "run": run_folder.name,
        "completed": True,
        "settings": dataclasses.asdict(args),
        "seed": args.seed,
        "versions": versions,
        "env_backend": "gymnasium",
        "device": str(model.device),
        "threads": torch.get_num_threads(),
        "timesteps_per_agent": model.num_timesteps,
        "agent_steps_per_second": model.num_timesteps / train_seconds,
        "train_seconds": train_seconds,
        "seconds": dict(recorder.clock),
        "wall_seconds": time.monotonic() - started,
        "training_return": {
            "episodes": 100,
            "group": recorder.training_return(),
            "agents": [recorder.training_return()],
        },
        "evaluation": {
            "episodes": args.eval_episodes,
            "group": mean,
            "agents": [{args.env_id: {"mean": mean, "ci95": half}}],
        },
    }
    summary = json.loads(json.dumps(summary), parse_constant=lambda _: None)  # JSON has no NaN
    (run_folder / "summary.json").write_text(json.dumps(summary, indent=2))
    print(f"last 100 episodes {recorder.training_return():.3f}  evaluation {mean:.3f} ± {half:.3f}")
    print(f"{summary['agent_steps_per_second']:,.0f} agent-steps/s; all in {run_folder}")
    return summary


if __name__ == "__main__":
    arguments = read_flags(Args)
    check_args(arguments)
    main(arguments)
