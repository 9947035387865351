"""sb3-contrib's TRPO on MiniGrid at our script's settings: the yardstick of prtrpo_minigrid.py.

    python benchmark/baselines/sb3_trpo.py --env-id MiniGrid-DoorKey-6x6-v0 --seed 1
    python prtrpo_minigrid.py --num-agents 1 --communicator identity --seed 1 \\
        --env-id MiniGrid-DoorKey-6x6-v0 --total-timesteps 5000000

The second command is what the first is compared with: one agent alone, whose reference is its own
policy. Networks, one for the policy and one for the value function, initialisation, advantages,
region, conjugate gradients, line search and epochs of the value function are the same;
environments, recording and evaluation are those of sb3_ppo.py, which lists the differences there.
Its region is KL(new || old) <= epsilon, ours KL(old || new), as in the paper; it does not clip the
gradient of the value function.
"""

from dataclasses import dataclass
from pathlib import Path

from sb3_contrib import TRPO
from sb3_ppo import (
    MiniGridTrunk,
    Settings,
    check_args,
    main,
    make_envs,
    make_schedule,
    read_flags,
)


@dataclass
class Args(Settings):
    exp_name: str = Path(__file__).stem
    """the name of this experiment, part of the run's folder name"""

    # TRPO
    epsilon: float = 0.01
    """the largest KL of an update"""
    cg_iters: int = 10
    """iterations of conjugate gradients"""
    damping_coef: float = 0.1
    """what is added to the diagonal of the Fisher matrix"""
    backtrack_iters: int = 10
    """candidates of the line search"""
    backtrack_coef: float = 0.8
    """length of each candidate step, relative to the one before it"""
    learning_rate: float = 1e-3
    """learning rate of Adam, for the value function"""
    num_minibatches: int = 4
    """minibatches per epoch of the value function"""
    update_epochs: int = 5
    """epochs of the value function per rollout"""
    norm_adv: bool = True
    """normalise advantages over the rollout"""


def make_model(args: Args) -> TRPO:
    """TRPO at our settings. It wraps the environments itself so that channels come first."""
    policy = {
        "net_arch": [],
        "ortho_init": True,
        "optimizer_kwargs": {"eps": 1e-5},
        "share_features_extractor": False,
        "features_extractor_class": MiniGridTrunk,
        "normalize_images": False,
    }
    return TRPO(
        "CnnPolicy",
        make_envs(args),
        learning_rate=make_schedule(args),
        n_steps=args.num_steps,
        batch_size=args.num_envs * args.num_steps // args.num_minibatches,
        n_critic_updates=args.update_epochs,
        gamma=args.gamma,
        gae_lambda=args.gae_lambda,
        target_kl=args.epsilon,
        cg_max_steps=args.cg_iters,
        cg_damping=args.damping_coef,
        line_search_max_iter=args.backtrack_iters,
        line_search_shrinking_factor=args.backtrack_coef,
        normalize_advantage=args.norm_adv,
        seed=args.seed,
        device=args.device,
        policy_kwargs=policy,
    )


if __name__ == "__main__":
    arguments = read_flags(Args)
    check_args(arguments, minigrid_only=True)
    main(arguments, make_model)
