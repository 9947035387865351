"""Run folders as the scripts leave them, without training."""

import json

import pandas as pd


def write_run(root, script, settings, metrics, evaluations=(), stamp=1, **summary):
    """A finished run with these rows of metrics.csv and evaluations.csv; returns its folder."""
    folder = root / f"{script}__{settings['exp_name']}__{settings['seed']}__{stamp}"
    folder.mkdir(parents=True)
    pd.DataFrame(metrics).to_csv(folder / "metrics.csv", index=False)
    if len(evaluations):
        pd.DataFrame(evaluations).to_csv(folder / "evaluations.csv", index=False)
    summary = {"script": script, "completed": True, "settings": settings} | summary
    summary = {"versions": {"torch": "2"}} | summary
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "config.json").write_text(json.dumps({"script": script} | settings))
    return folder


def control_run(root, seed, curve, evaluation=0.5, stamp=1, summary=None, **settings):
    """Two agents whose training returns are `curve` and 0.02 more, whose evaluations are
    `evaluation` and 0.1 more, and 0.5 above these on another task.
    """
    settings = {"exp_name": "pr", "seed": seed, "env_id": "Task", "env_ids": []} | settings
    tasks = settings["env_ids"] or [settings["env_id"]] * 2
    metrics = []
    for number, value in enumerate(curve, 1):
        for agent, task in enumerate(tasks):
            row = {"iteration": number, "agent": agent, "env_id": task, "timesteps": 100 * number}
            row |= {"seed": seed, "exp_name": settings["exp_name"], "learning_rate": 0.1}
            metrics.append(row | {"return_last_100": value + 0.02 * agent})
    evaluations = []
    cells = []
    for agent in range(2):
        mean = evaluation + 0.1 * agent
        means = {"Other": mean + 0.5, **dict.fromkeys(tasks, mean)}
        for task, value in means.items():
            row = {"iteration": len(curve), "agent": agent, "task": task, "mean_return": value}
            evaluations.append(row | {"ci95": 0.01})
        cells.append({task: {"mean": value} for task, value in means.items()})
    whole = {"timesteps_per_agent": 100 * len(curve)}
    whole["evaluation"] = {"group": evaluation + 0.05, "agents": cells}
    whole |= summary or {}
    return write_run(root, "prpo_minigrid", settings, metrics, evaluations, stamp, **whole)


def language_run(root, seed, name, training, held_out, topics=((), ()), **settings):
    """Two agents of a language model: mean training reward, score on the common prompts, and
    rewards on their topics.
    """
    settings = {"exp_name": name, "seed": seed, "base_model": "llama"} | settings
    settings = {"dataset": ["docstrings"], "partition": "topic"} | settings
    metrics = []
    for step in (1, 2):
        for agent in (0, 1):
            metrics.append({"step": step, "agent": agent, "reward": training})
    cells = []
    for rewards in topics:
        means = {"validation": held_out, **dict(zip("xy", rewards, strict=False))}
        cells.append({task: {"mean": mean} for task, mean in means.items()})
    evaluation = {"group": held_out, "agents": cells}
    return write_run(root, "prpo_llm", settings, metrics, steps=2, evaluation=evaluation)
