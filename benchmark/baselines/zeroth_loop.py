"""Par-S2ZPO as a plain loop over gymnasium's environments, one call of the policy per step: the
yardstick of s2zpo_mujoco.py's speed.

    python benchmark/baselines/zeroth_loop.py --env-id HalfCheetah-v5
    python s2zpo_mujoco.py --env-id HalfCheetah-v5 --total-iterations 5 --eval-episodes 0

It is what one would write first: agent by agent, pair by pair, episode by episode. Algorithm,
network and panel are the same; it does not normalise observations, and neither resumes, evaluates
nor logs. Its summary.json has what throughput.py reads.
"""

import json
import math
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import gymnasium as gym
import torch
import torch.nn as nn
from torch.distributions import Categorical, Normal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from arguments import read_flags


@dataclass
class Args:
    env_id: str = "HalfCheetah-v5"
    """the task, of MuJoCo, or CartPole-v1"""
    horizon: int = 250
    """most steps of an episode"""
    num_agents: int = 4
    """K, the number of agents"""
    num_pairs: int = 8
    """N, pairs of episodes that are compared in every iteration of every agent"""
    num_evaluators: int = 3
    """M, evaluators of each pair"""
    link_scale: float = 50.0
    """difference of returns that is 1 for the logistic link"""
    total_iterations: int = 5
    """updates of the policy"""
    seed: int = 1
    """seed of everything random"""
    run_dir: str = "runs"
    """folder that holds one folder per run"""


class Policy(nn.Module):
    """A tanh MLP, the mean of a Gaussian or logits."""

    def __init__(self, env: gym.Env):
        super().__init__()
        self.space = env.action_space
        self.discrete = isinstance(self.space, gym.spaces.Discrete)
        outputs = int(self.space.n) if self.discrete else self.space.shape[0]
        self.network = nn.Sequential(
            nn.Linear(env.observation_space.shape[0], 32),
            nn.Tanh(),
            nn.Linear(32, 32),
            nn.Tanh(),
            nn.Linear(32, outputs),
        )

    def act(self, obs):
        """One action for one observation."""
        outputs = self.network(torch.as_tensor(obs, dtype=torch.float32))
        if self.discrete:
            return Categorical(logits=outputs).sample().item()
        action = Normal(outputs, math.exp(-1)).sample().numpy()
        return action.clip(self.space.low, self.space.high)


def play(env: gym.Env, policy: Policy, parameters: torch.Tensor) -> tuple[float, int]:
    """One episode. Returns its return and length."""
    nn.utils.vector_to_parameters(parameters, policy.parameters())
    obs, _ = env.reset()
    episode_return = 0.0
    length = 0
    ended = False
    while not ended:
        obs, reward, terminated, truncated, _ = env.step(policy.act(obs))
        episode_return += reward
        length += 1
        ended = terminated or truncated
    return episode_return, length


@torch.no_grad()
def main(args: Args) -> None:
    torch.manual_seed(args.seed)
    env = gym.make(args.env_id, max_episode_steps=args.horizon)
    env.reset(seed=args.seed)
    policy = Policy(env)
    theta = nn.utils.parameters_to_vector(policy.parameters())
    d = len(theta)
    blocks = torch.randperm(d).tensor_split(args.num_agents)
    mu = 2 / math.sqrt(d / args.num_agents)
    eta = 2 / math.sqrt(d)
    steps = 0
    last_returns = []
    began = time.perf_counter()
    for iteration in range(args.total_iterations):
        direction = torch.zeros(d)
        last_returns.clear()
        for block in blocks:
            v = torch.zeros(d)
            v[block] = 2.0 * torch.randint(2, (len(block),)) - 1
            total = 0
            for _ in range(args.num_pairs):
                before, length = play(env, policy, theta)
                after, length_after = play(env, policy, theta + mu * v)
                steps += length + length_after
                last_returns.append(before)
                chance = torch.sigmoid(torch.tensor((after - before) / args.link_scale))
                answers = torch.rand(args.num_evaluators) < chance
                total += int((2 * answers.long() - 1).sum())
            vote = math.copysign(1, total or torch.rand(()).item() - 0.5)
            direction += vote * v
        theta = theta + eta / math.sqrt(1 + 0.02 * iteration) * direction
    seconds = time.perf_counter() - began
    average = sum(last_returns) / len(last_returns)
    summary = {
        "seed": args.seed,
        "versions": {name: version(name) for name in ("torch", "numpy", "gymnasium", "mujoco")},
        "device": "cpu",
        "env_backend": "gymnasium",
        "timesteps_per_agent": round(steps / args.num_agents),
        "agent_steps_per_second": steps / seconds,
        "train_seconds": seconds,
        "seconds": {},
        "training_return": {"group": average, "agents": [average] * args.num_agents},
    }
    folder = Path(args.run_dir, f"{args.env_id}__zeroth_loop__{args.seed}__{int(time.time())}")
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2))
    print(f"{summary['agent_steps_per_second']:,.0f} steps/s, everything in {folder}")


if __name__ == "__main__":
    main(read_flags(Args))
