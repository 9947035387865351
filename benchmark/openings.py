"""Preferences of agents that summarise documentation: how a summary begins (benchmark/openings.sh).

Reward functions as TRL calls them, 1 for a completion that begins as an agent likes it, else 0.
SmolLM2-135M-Instruct begins in each of these ways by itself, so that groups of completions differ.

    python benchmark/openings.py  # writes runs/openings/weights.csv, a row for each agent
    python benchmark/openings.py --runs runs/openings-results --csv openings.csv
"""

import re
from dataclasses import dataclass
from pathlib import Path

# Of the docstrings' first words, in their base form
VERBS = """
    Add Allow Apply Build Calculate Call Change Check Clear Close Collect Combine Compare
    Compile Compute Configure Construct Convert Copy Count Create Decompose Define Delete
    Describe Determine Display Draw Ensure Evaluate Execute Extract Find Fit Follow Format
    Generate Get Give Handle Hold Implement Include Indicate Initialize Insert Instantiate
    List Load Make Manage Merge Move Normalize Open Parse Perform Prepare Print Produce
    Provide Raise Read Receive Register Remove Render Replace Represent Reset Resolve Retrieve
    Return Run Save Search Select Send Set Show Simplify Sort Specify Split Store Summarize
    Take Test Transform Translate Update Use Validate Verify Visualize Wrap Write
"""
VERB_FORMS = {verb + ending for verb in VERBS.split() for ending in ("", "s", "es")}
WEIGHT = 0.5  # of an opening, beside 1 for ROUGE-L
OPENINGS = ("verb", "article", "this")  # agent i prefers the i-th


@dataclass
class Args:
    runs: str = ""
    """folder with runs, of which a table is made (default: the weights are written)"""
    csv: str = ""
    """file for the table"""


def first_words(completions: list) -> list[str]:
    """The first word of each completion, a text or a list of one message."""
    words = []
    for completion in completions:
        text = completion if isinstance(completion, str) else completion[0]["content"]
        words.append(re.match(r"\W*(\w*)", text)[1])
    return words


def verb(completions: list, **_) -> list[float]:
    """1 for a verb at the beginning: Return the number of ..., Computes ..."""
    return [float(word in VERB_FORMS) for word in first_words(completions)]


def article(completions: list, **_) -> list[float]:
    """1 for an indefinite article at the beginning: A function that ..."""
    return [float(word in ("A", "An")) for word in first_words(completions)]


def this(completions: list, **_) -> list[float]:
    """1 for "This" at the beginning: This function ..."""
    return [float(word == "This") for word in first_words(completions)]


def write_weights(path: Path) -> None:
    """The weights of --reward-weights: ROUGE-L is common, an opening is each agent's own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [f"# rouge, {', '.join(OPENINGS)}"]
    for opening in OPENINGS:
        weights = [WEIGHT * (other == opening) for other in OPENINGS]
        rows.append(", ".join(f"{weight:g}" for weight in [1, *weights]))
    path.write_text("\n".join(rows) + "\n")


def measure_agent(agent: int, held_out, metrics) -> dict[str, float | str]:
    """An agent's row: its own reward, ROUGE-L, its opening and ends, of held-out prompts before and
    after training, and in training over the first step and the last three; and the share of
    different completions among those of held-out prompts.

    held_out and metrics are tables of completions.jsonl and metrics.csv.
    """
    row = {"opening": OPENINGS[agent]}
    measures = {"reward": "reward", "rouge": "reward_rouge"}
    measures["opening"] = f"reward_openings.{OPENINGS[agent]}"
    measures["ended"] = "eos_rate"
    # The penalty of a completion that does not end is all that a reward lacks of its score
    held_out = held_out.assign(eos_rate=(held_out.reward == held_out.score).astype(float))
    tables = {
        "before": held_out[held_out.step == held_out.step.min()],
        "after": held_out[held_out.step == held_out.step.max()],
        "first": metrics[metrics.step == 1],
        "last": metrics[metrics.step > metrics.step.max() - 3],
    }
    for when, table in tables.items():
        of_agent = table[table.agent == agent]
        for name, column in measures.items():
            row[f"{name}_{when}"] = of_agent[column].mean()
        if "completion" in of_agent:
            row[f"distinct_{when}"] = of_agent.completion.nunique() / len(of_agent)
    return row


def tabulate(args: Args) -> None:
    """A row for each run and agent."""
    # Not above: whoever imports a reward need not load these
    import pandas as pd
    from arguments import read_greedy_completions
    from runs import header, read_runs, write

    runs = read_runs((args.runs,))
    rows = []
    for run in runs:
        held_out = pd.DataFrame(read_greedy_completions(run.folder / "completions.jsonl"))
        metrics = pd.read_csv(run.folder / "metrics.csv")
        for agent in sorted(held_out.agent.unique()):
            row = measure_agent(agent, held_out, metrics)
            rows.append({"method": run.name, "seed": run.seed, "agent": agent} | row)
    table = pd.DataFrame(rows)
    if args.csv:
        write(Path(args.csv), header(runs), table)
    else:
        print(table.to_string(index=False, float_format="%.3f"))


def main(args: Args) -> None:
    if args.runs:
        tabulate(args)
    else:
        write_weights(Path("runs/openings/weights.csv"))


if __name__ == "__main__":
    # Not above: prpo_llm.py runs this file from its own folder
    from arguments import read_flags

    main(read_flags(Args))
