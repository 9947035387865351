"""FedAvg-PPO on MiniGrid and Atari: agents that share no data learn together by averaging their parameters.

It is what PR-PPO is compared with. So that the comparison compares one thing only, environments, networks, rollouts,
PPO's update and evaluation are those of `prpo_minigrid.py` and `prpo_atari.py`, by import: here stands what differs.

    python fedavg_ppo.py --env-id MiniGrid-DoorKey-6x6-v0                     # three agents in one process
    python fedavg_ppo.py --env-id BeamRiderNoFrameskip-v4                     # the same on Atari
    python fedavg_ppo.py --communicator similarity                            # weighted by similarity (WeightedAvg)
    torchrun --nproc-per-node 3 fedavg_ppo.py --num-agents 3                  # one agent per process, same training
    python fedavg_ppo.py --resume runs/<name>                                 # go on where a run was cut off
"""

import copy
import functools
from collections import deque
from dataclasses import dataclass
from types import ModuleType
from typing import Annotated, Literal

import gymnasium as gym
import torch
import tyro
from safetensors.torch import save_file

import communicators
import prpo_atari
import prpo_minigrid
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

# The defaults that depend on the environments (table 2 of the paper)
DEFAULTS = ("save_every", "eval_episodes", "local_updates", "total_timesteps")


@dataclass
class Args(RunArgs):
    device: str = "auto"  # cpu, cuda, cuda:N, or auto: the processor for MiniGrid, for Atari cuda where there is one
    save_every: Count | None = None
    """iterations between checkpoints (default: MiniGrid 32, Atari 128); the environments start anew at each"""

    # The environments
    env_id: str = "MiniGrid-FourRooms-v0"
    """the task of all agents: a MiniGrid or BabyAI task, or a game, as <Game>NoFrameskip-v4 or ALE/<Game>-v5; of your
    own as module:id, as Gymnasium has it"""
    env_ids: tuple[str, ...] = ()  # one task per agent, instead of --env-id
    sticky_actions: bool = False  # Atari: repeat the last action with probability 0.25, as in the newer protocol
    full_action_space: bool = False  # Atari: all 18 actions of the console instead of those that the game needs
    missions: tuple[str, ...] = ()
    """MiniGrid: one word per agent, which meets only levels whose mission has it; gymnasium only"""
    hidden_sizes: tuple[int, ...] = ()
    """MiniGrid: width of each agent's hidden layer, here the same for all, for there is no average of others"""
    levels_per_agent: Natural = 0
    """MiniGrid: agent i trains on K private levels only (0: unlimited levels); needs the gymnasium backend"""
    env_backend: Literal["auto", "envpool", "gymnasium"] = "auto"
    """MiniGrid: envpool is several times faster; auto takes it where it is installed and knows the task"""
    num_envs: Count = 4  # parallel environments per agent
    eval_episodes: Natural | None = None
    """episodes or whole games per agent and task at the end (default: MiniGrid 100, Atari 10; 0: no evaluation)"""
    capture_video: bool = False  # record one episode or game per agent at the end
    eval_only: str = ""
    """folder of a run: load its agents and play, also on another task, instead of training; prints a table"""
    greedy: bool = False  # with --eval-only: play and film the most probable actions instead of sampled ones

    # Communication
    local_updates: Count | None = None  # iterations between communication rounds (default: MiniGrid 32, Atari 16)
    kl_coef: Annotated[NonNegative, tyro.conf.arg(aliases=["--communication-coef"])] = 1.0
    """coefficient of the KL penalty towards the agent's own policy before the update"""
    kl_direction: Literal["forward", "reverse"] = "forward"
    """forward: KL(old policy || policy), eq. 3; reverse: KL(policy || old policy), mirror descent"""
    participation: PositiveFraction = 1.0
    """fraction of the agents, drawn anew, that takes part in a communication round"""

    # PPO
    total_timesteps: Count | None = None
    """environment steps of each agent (default: MiniGrid 5 million, Atari 10 million)"""
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
    """of the convolutions (autocast), heads and losses are always float32; auto: as in the environments' script"""
    compile: bool = False
    """compile the networks with torch.compile, which is not thread-safe: the agents then compute one after the other"""

    def __post_init__(self):
        super().__post_init__()
        defaults = family_of(self).Args()
        for name in DEFAULTS:
            if getattr(self, name) is None:
                setattr(self, name, getattr(defaults, name))


@functools.cache
def is_atari(env_id: str) -> bool:
    """Whether a task is a game of the Atari 2600, or one of your own, module:id, that shows as many frames."""
    if ":" in env_id:
        try:
            return gym.make(env_id, disable_env_checker=True).observation_space.shape == (4, 84, 84)
        except Exception:  # then the checks of MiniGrid's script tell why it cannot be made
            return False
    return env_id.endswith("NoFrameskip-v4") or env_id.startswith("ALE/")


def family_of(args: Args) -> ModuleType:
    """The script whose environments and networks these are."""
    return prpo_atari if is_atari((*args.env_ids, args.env_id)[0]) else prpo_minigrid


def check_args(args: Args) -> None:
    """What the types above cannot say; `refuse` ends with one line that names the flag, its value and what is valid."""
    if args.communicator == "self-preferred" and args.num_agents > 1 and args.self_preference == 0:
        communicators.refuse(args, "self_preference", "must be positive, or agents would swap networks")
    family = family_of(args)
    if len({is_atari(env_id) for env_id in args.env_ids}) > 1:
        communicators.refuse(args, "env_ids", "must all be of MiniGrid or all of Atari")
    if len(set(args.hidden_sizes)) > 1:
        communicators.refuse(args, "hidden_sizes", "must be equal: networks of different sizes have no average")
    for flag in ("levels_per_agent", "missions", "hidden_sizes"):
        if family is prpo_atari and getattr(args, flag):
            communicators.refuse(args, flag, "is for MiniGrid")
    if family is prpo_atari and args.env_backend != "auto":
        communicators.refuse(args, "env_backend", "is for MiniGrid; leave it at auto")
    for flag in ("sticky_actions", "full_action_space"):
        if family is prpo_minigrid and getattr(args, flag):
            communicators.refuse(args, flag, "is for Atari")
    family.check_args(args)


def main(args: Args) -> dict:
    """Train, evaluate, and return what summary.json holds."""
    family = family_of(args)
    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size
    n, num_rounds, tasks = args.num_agents, num_iterations // args.local_updates, family.task_names(args)
    exchange = Exchange(args.num_agents, args.device, args.timeout)  # who holds which agents, what passes between them
    held, device = exchange.agents, exchange.device  # agent i of all is the k-th held; lists are in the order of k
    run = Run(args, exchange, "+".join(dict.fromkeys(tasks)), total=num_iterations, work=batch_size * n,
              headline="charts/return_last_100", env_ids=tasks, stride=batch_size,
              about=f"{args.communicator} communicator, {num_rounds or 'NO'} communication rounds")  # fmt: skip
    workers, threads = family.share_cores(args, held, device)

    # Agents: all start from the same parameters, and what is random is keyed by (seed, agent)
    first = [agent.to(device) for agent in family.make_agents(args)]
    sizes = [sum(parameter.numel() for parameter in agent.parameters()) for agent in first]
    communicators.unflatten(exchange.broadcast(communicators.flatten(first, max(sizes))), first)
    agents = [copy.deepcopy(first[i]) for i in held]
    optimizers = [torch.optim.Adam(agent.parameters(), args.learning_rate, eps=1e-5, fused=True) for agent in agents]
    generators = [torch.Generator().manual_seed(derive_seed(args.seed, i)) for i in held]
    for agent in agents if args.compile else ():
        agent.compile(dynamic=True if family is prpo_minigrid else None)  # there batches vary with what is distinct

    # Communication: C, what agents have received in the last round, and how far apart policies are on public states
    reference_states = family.public_states(args).to(device) if num_rounds else None
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
    envs, actors = family.Envs(args, held, run.iteration), family.make_actors(args, agents)

    for iteration in run.iterations():
        for optimizer in optimizers if args.anneal_lr else ():
            optimizer.param_groups[0]["lr"] = (1.0 - (iteration - 1) / num_iterations) * args.learning_rate

        # Rollout
        storage, obs, behaviour, episodes = family.rollout(args, envs, actors, generators, run)  # [agents, steps, envs]

        # Advantages; then flat, without the steps that only reset an environment
        outcomes = (storage.pop(name) for name in ("rewards", "terminations", "dones"))
        advantages = family.gae(*outcomes, storage["values"], storage.pop("next_values"), args.gamma, args.gae_lambda)
        storage |= {"advantages": advantages, "returns": advantages + storage["values"]}
        valid = storage.pop("valid")
        batches = [{name: tensor[k][valid[k]] for name, tensor in storage.items()} for k in range(len(held))]
        run.tick("advantages")

        # Reference policies, frozen for this update: the agent's own, which is PPO with a KL penalty (eq. 3)
        for batch, reference in zip(batches, behaviour, strict=True):
            batch["reference"] = reference[batch["states"]]
        run.tick("reference")

        # Update: every agent takes its minibatches in order, and the agents take turns, so that all cores work
        learners = zip(agents, optimizers, generators, obs, batches, strict=True)
        losses = communicators.take_turns([family.learn(*own, args) for own in learners], workers, threads)
        moved = zip(held, agents, obs, behaviour, batches, peers.views, strict=True)
        moved = [family.diagnose(*own, communicator, args) for own in moved]
        run.tick("update")

        # Communication round: exchange parameters, refresh the communicator, average
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
            receives = family.make_communicator(args, reported_returns, usable=participating) > 0
            peers.exchange_snapshots(agents, participating, receives, iteration)
            gains = None
            if args.communicator == "surrogate":
                gains = torch.full((n, n), torch.nan)
                for k, i in enumerate(held):
                    gains[i] = family.gains_of_peers(i, obs[k], batches[k], peers.candidates(i), n)
            usable = peers.usable
            new_communicator = family.make_communicator(args, reported_returns, peers.log_probs, gains, usable)
            peers.update(new_communicator)
            for k, i in enumerate(held):  # who sits out goes on with what it has; optimizer moments are kept
                senders = communicator[i].nonzero().flatten()
                if participating[i] and usable[senders].all():  # or there is nobody to average
                    received = communicators.flatten([peers.views[k][j] for j in senders.tolist()], max(sizes))
                    average = communicators.average_parameters(communicator[i : i + 1, senders], received)
                    communicators.unflatten(average, agents[k : k + 1])
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
            row |= {f"losses/{name}": mean([loss[name].item() for loss in losses[k]]) for name in family.LOSSES}
            rows.append(row | {f"policy/{name}": value for name, value in moved[k].items()})
        scalars = {"charts/learning_rate": optimizers[0].param_groups[0]["lr"]}
        scalars["communication/rounds"] = iteration // args.local_updates
        run.log(rows, communicator, peers.distances, scalars)

        # Evaluation
        if args.eval_episodes and run.due(args.eval_every) and iteration < num_iterations:
            run.log_evaluation(family.evaluate_all(args, agents, held))

        # Checkpoint; every run, interrupted or not, starts its environments anew here
        if run.saves():
            run.save(state)
            envs.close()
            actors = None  # its memory is free before the new one's is taken
            envs, actors = family.Envs(args, held, iteration), family.make_actors(args, agents)

    # Weights, videos, and the evaluation of every agent on every task in the official environments
    envs.close()
    for k, i in enumerate(held):
        save_file(agents[k].state_dict(), run.folder / f"agent_{i}.safetensors")
        if args.capture_video and not run.interrupted:
            film = str(run.folder / "videos" / f"agent_{i}")
            seed = derive_seed(args.seed, i, 6)
            family.evaluate(args, agents[k], family.task_ids(args)[i], family.film_levels(args, i), seed, film)
    if args.eval_episodes and not run.interrupted:
        run.log_evaluation(family.evaluate_all(args, agents, held))
    return run.finish(env_backend=family.choose_backend(args), communication_rounds=run.iteration // args.local_updates)


def evaluate_run(args: Args) -> list[dict]:
    """--eval-only: play the agents of a run."""
    return family_of(args).evaluate_run(args)


if __name__ == "__main__":
    args = communicators.parse_args(Args, check_args, may_change=("capture_video", "eval_episodes", "total_timesteps"))
    if args.eval_only:
        evaluate_run(args)
    else:
        main(args)
