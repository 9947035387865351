"""benchmark/: that a measurement is of what its name says."""

import importlib
import sys

import pytest
import torch
import transformers
import tyro
from helpers import REPOSITORY, refusal

sys.path.insert(0, str(REPOSITORY / "benchmark"))
arguments = importlib.import_module("arguments")
throughput = importlib.import_module("throughput")


TASKS = {
    "MiniGrid-FourRooms-v0": "prpo_minigrid",
    "BeamRiderNoFrameskip-v4": "prpo_atari",
    "HalfCheetah-v5": "prpo_mujoco",
}


@pytest.mark.parametrize("env_id", TASKS)
def test_speed_is_measured_with_communication_rounds(env_id):
    """Before the first round nobody is heard: agents that communicate have several in a run."""
    args = throughput.Args(env_id=env_id)
    commands = {**throughput.contenders(args), **throughput.scaling_contenders(args)}.values()
    script = importlib.import_module(TASKS[env_id])
    runs = [
        tyro.cli(script.Args, args=argv)
        for name, *argv in commands
        if name == f"{TASKS[env_id]}.py"
    ]
    talking = [run for run in runs if run.communicator != "identity" and run.num_agents > 1]
    assert len(talking) > 8
    for run in talking:
        assert run.total_timesteps // (run.num_envs * run.num_steps) >= 3 * run.local_updates


def test_sb3_contrib_is_run_at_the_settings_of_pr_trpo():
    """What both have is the same by default, or a flag of every command; three agents that
    communicate have several rounds.
    """
    sys.path.insert(0, str(REPOSITORY / "benchmark" / "baselines"))
    ours = importlib.import_module("prtrpo_minigrid").Args
    theirs = importlib.import_module("sb3_trpo").Args
    given = {"env_id", "total_timesteps"}
    common = vars(theirs()).keys() & vars(ours()).keys() - {"exp_name", "device"} - given
    for name in common:
        assert getattr(theirs(), name) == getattr(ours(), name), name
    assert common >= {
        "epsilon",
        "cg_iters",
        "damping_coef",
        "backtrack_coef",
        "learning_rate",
        "update_epochs",
    }
    commands = throughput.contenders(throughput.Args(trpo=True)).values()
    assert "sb3_trpo" in next(iter(commands))[0]
    assert all({"--env-id", "--total-timesteps"} <= set(words) for words in commands)
    runs = [tyro.cli(ours, args=argv) for name, *argv in commands if name == "prtrpo_minigrid.py"]
    assert {run.local_updates for run in runs} == {1}
    (sharing,) = [run for run in runs if run.communicator != "identity"]
    assert sharing.num_agents == 3
    assert sharing.total_timesteps // 2048 >= 3 * sharing.local_updates


@pytest.mark.parametrize("env_id", TASKS)
def test_stable_baselines3_is_run_at_the_settings_of_pr_ppo(env_id):
    """What both have is the same, whatever the defaults of the scripts are."""
    sys.path.insert(0, str(REPOSITORY / "benchmark" / "baselines"))
    name = TASKS[env_id]
    ours = importlib.import_module(name).Args
    theirs = importlib.import_module("sb3_ppo").Args
    commands = throughput.contenders(throughput.Args(env_id=env_id)).values()
    sb3, *_ = (tyro.cli(theirs, args=argv) for script, *argv in commands if "sb3_ppo" in script)
    runs = []
    for command in commands:
        if f"{name}.py" in command:
            words = command[command.index(f"{name}.py") + 1 :]
            runs.append(tyro.cli(ours, args=words))
    common = vars(sb3).keys() & vars(runs[0]).keys() - {"exp_name", "device"}
    assert common >= {"env_id", "learning_rate", "total_timesteps", "num_steps", "ent_coef"}
    assert len(runs) >= 4
    for run in runs:
        for setting in common:
            assert getattr(run, setting) == getattr(sb3, setting), setting
        if name == "prpo_minigrid":
            assert (run.kl_coef, run.kl_direction) == (1, "forward")


def test_stable_baselines3_has_the_networks_and_the_normalisation_of_pr_ppo():
    """On MuJoCo: with our weights and statistics it has our policy and values."""
    sys.path.insert(0, str(REPOSITORY / "benchmark" / "baselines"))
    sb3_ppo = importlib.import_module("sb3_ppo")
    prpo_mujoco = importlib.import_module("prpo_mujoco")
    args = sb3_ppo.Args(env_id="Hopper-v5", gamma=0.9)
    model = sb3_ppo.make_model(args)
    (agent,) = prpo_mujoco.make_agents(prpo_mujoco.Args(num_agents=1, env_id="Hopper-v5"))
    extractor = model.policy.mlp_extractor
    pairs = [
        (agent.policy_network, extractor.policy_net),
        (agent.value_network, extractor.value_net),
        (agent.actor, model.policy.action_net),
        (agent.critic, model.policy.value_net),
    ]
    for our_layers, their_layers in pairs:  # orthogonal with the same gain
        for our, their in zip(our_layers.parameters(), their_layers.parameters(), strict=True):
            torch.testing.assert_close(our.norm(), their.norm())
    torch.testing.assert_close(model.policy.log_std, agent.actor_log_std)

    obs = torch.randn(50, 11, generator=torch.Generator().manual_seed(1)) * 5
    agent.set_statistics(torch.tensor(50.0), obs.mean(0), obs.var(0) / 4)
    statistics = model.get_vec_normalize_env()
    assert (statistics.gamma, statistics.norm_reward, statistics.clip_reward) == (0.9, True, 10)
    statistics.obs_rms.mean = agent.obs_mean.double().numpy()
    statistics.obs_rms.var = agent.obs_var.double().numpy()
    normalised = torch.from_numpy(statistics.normalize_obs(obs.numpy()))
    ours = prpo_mujoco.normalise(obs, agent.obs_mean, agent.obs_var)
    torch.testing.assert_close(normalised, ours)
    torch.nn.init.orthogonal_(agent.actor.weight)
    for our_layers, their_layers in pairs:
        their_layers.load_state_dict(our_layers.state_dict())
    mean_action, value = agent.predict(obs)
    policy = model.policy.get_distribution(normalised).distribution
    torch.testing.assert_close(policy.mean, mean_action)
    torch.testing.assert_close(model.policy.predict_values(normalised)[:, 0], value)


def test_trl_is_run_at_the_settings_of_language_models():
    """Each size is a table of its own, in which everybody has the same prompts, rows and optimizer
    steps.
    """
    sys.path.insert(0, str(REPOSITORY / "benchmark" / "baselines"))
    ours, theirs = (importlib.import_module(name).Args for name in ("prpo_llm", "trl_grpo"))
    sizes = ((300, 58, 8), (64, 128, 4))
    tables = throughput.comparisons(throughput.Args(llm=True, llm_sizes=sizes))
    assert len(tables) == 2
    for size, args in zip(sizes, tables.values(), strict=True):
        commands = list(throughput.contenders(args).values())
        trl = [tyro.cli(theirs, args=argv) for name, *argv in commands if "trl_grpo" in name]
        prpo = [tyro.cli(ours, args=argv) for name, *argv in commands if name == "prpo_llm.py"]
        assert [run.completions_only for run in trl] == [True, False]
        assert [run.num_agents for run in prpo] == [1, 3, 3]
        for run in (*trl, *prpo):
            task = run.task if run in trl else run.base_model
            assert task == f"runs/llm-task-{size[0]}"
            assert (run.response_length, run.group_size) == size[1:]
            # Rows that pass through the model at once
            rows = run.micro_batch_size
            if run in prpo:
                rows *= run.group_size
            assert (rows, run.batch_size, run.update_epochs, run.lora_rank) == (size[2], 4, 2, 64)
            assert (run.kl_coef, run.total_steps) == (0.1, 3)
    assert len(throughput.comparisons(throughput.Args())) == 1


def test_generate_is_run_at_the_settings_of_text_worlds(tmp_path):
    """The yardstick trains at prpo_babyai.py's defaults, as its contenders do; and it runs."""
    sys.path.insert(0, str(REPOSITORY / "benchmark" / "baselines"))
    prpo_babyai = importlib.import_module("prpo_babyai")
    text_loop = importlib.import_module("text_loop")
    (first, *argv), *others = throughput.contenders(throughput.Args(text=True)).values()
    assert first == "benchmark/baselines/text_loop.py"
    yardstick = tyro.cli(text_loop.Args, args=argv)
    runs = [tyro.cli(prpo_babyai.Args, args=words) for _, *words in others]
    assert [run.aggregation for run in runs] == ["none", "policy"]
    for run in runs:
        for name in ("num_agents", "total_steps", "batch_size", "seed", "base_model"):
            assert getattr(run, name) == getattr(yardstick, name)
        assert run.eval_episodes == 0

    babyai = importlib.import_module("babyai")
    size = {"hidden_size": 24, "layers": 1, "steps": 3, "batch_size": 2, "episodes": 1, "probe": 0}
    babyai.main(babyai.Args(out=str(tmp_path), **size))
    settings = prpo_babyai.Args(base_model=str(tmp_path / "model"), response_length=5)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    generator = torch.Generator().manual_seed(3)
    turns = []
    for prompt, answer in ((4, 3), (9, 1), (1, 5)):
        ids = torch.randint(1, 90, (prompt + answer,), generator=generator).tolist()
        rest = torch.empty(0), "", "", None, 0.0
        turns.append(prpo_babyai.Turn(ids[:prompt], ids[prompt:], *rest))
    log_probs, tokens, inside = text_loop.compute_log_probs(settings, model, turns)
    for k, turn in enumerate(turns):
        assert tokens[k, inside[k]].tolist() == turn.answer
        logits = model(torch.tensor([turn.prompt + turn.answer])).logits[0]
        expected = logits[len(turn.prompt) - 1 : -1].log_softmax(-1)
        torch.testing.assert_close(log_probs[k, inside[k]], expected, rtol=1e-4, atol=1e-4)


def test_wrong_flags_of_tools_are_named():
    """As in the scripts, with exit code 2."""
    message = refusal(arguments.read_flags, throughput.Args, ["--nothing"])
    assert "Unrecognized options: --nothing" in message
