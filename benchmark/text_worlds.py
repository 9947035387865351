"""Agents in text worlds: the share of held-out tasks that they solve, while they train.

    bash benchmark/text_worlds.sh | python benchmark/run.py
    python benchmark/text_worlds.py --runs runs/fedagent-quick
    python benchmark/text_worlds.py --from-csv  # the table again, from the CSV files

An --exp-name is a method and, behind the underscore, how tasks were dealt to clients, as in
fedagent_preference2. Writes OUT.csv, a row per run, evaluation, agent and category, and
OUT_clients.csv, the training tasks of every client by category. From these it prints a table:
success before and after training, means over agents and seeds. The category `own` is an agent's
success in all of them, weighted by its shares of training tasks.
"""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from arguments import read_flags
from runs import Run, header, read_runs, read_table, write
from styles import find_method
from table import format_mean, print_table

KEY = ["method", "partition", "seed"]


@dataclass
class Args:
    runs: tuple[str, ...] = ("runs/fedagent-quick",)
    """folders to search for runs, at any depth"""
    out: str = "benchmark/results/text_worlds"
    """beginning of the names of the files that are written"""
    from_csv: bool = False
    """only print the table, from OUT.csv and OUT_clients.csv"""


def read_success(run: Run) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The evaluations of a run, with the clients that its agents were in the last step, and the
    tasks of all clients.
    """
    method, _, partition = run.name.partition("_")
    values = (method, partition or run.settings["partition"], run.seed)
    key = dict(zip(KEY, values, strict=True))
    evaluations = read_table(run.folder / "evaluations.csv")
    evaluations = evaluations.rename(columns={"task": "category", "mean_success": "success"})
    last = run.table[run.table.step == run.table.step.max()]
    rows = evaluations.merge(last[["agent", "client"]].astype(int), on="agent").assign(**key)
    clients = read_table(run.folder / "clients.csv").assign(**key)
    columns = [*KEY, "step", "agent", "client", "category", "episodes", "success"]
    return rows[columns], clients[[*KEY, "client", "category", "tasks"]]


def read_tables(runs: list[Run]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Evaluations and clients of all runs."""
    rows, clients = zip(*map(read_success, runs), strict=True)
    rows = pd.concat(rows).sort_values([*KEY, "step", "agent"], kind="stable")
    return rows, pd.concat(clients).sort_values([*KEY, "client"], kind="stable")


def average_agents(rows: pd.DataFrame) -> pd.DataFrame:
    """The mean success of the agents of each run, by step and category; NaN if one has diverged."""
    of_run = rows.groupby([*KEY, "step", "category"], sort=False).success
    return of_run.mean(skipna=False).reset_index()


def share_tasks(rows: pd.DataFrame, clients: pd.DataFrame) -> pd.DataFrame:
    """The share of its training tasks that each agent has in each category: partition, seed and
    agent down, categories across.

    Of the methods whose agents stay the same client for a whole run, which is the same in all of
    them.
    """
    stay = rows[~rows.method.isin(["fedagent", "centralised"])]
    agents = stay[["partition", "seed", "agent", "client"]].drop_duplicates()
    dealt = clients[clients.method != "centralised"]
    dealt = dealt.drop_duplicates(["partition", "seed", "client", "category"])
    tasks = dealt.pivot(index=["partition", "seed", "client"], columns="category", values="tasks")
    shares = tasks.fillna(0).div(tasks.sum(axis=1), axis=0)
    shares = agents.join(shares, on=["partition", "seed", "client"])
    return shares.set_index(["partition", "seed", "agent"])[[*tasks.columns]].sort_index()


def add_own(rows: pd.DataFrame, clients: pd.DataFrame) -> pd.DataFrame:
    """The rows, and for each agent another one of the category `own`: its success in the
    categories, weighted by its shares of training tasks.

    FedAgent's agents, which are nobody in particular, count for those of the other methods; a
    centralised one has no shares.
    """
    of_categories = rows[(rows.category != "all") & (rows.method != "centralised")]
    place = [*KEY, "step", "agent", "client", "episodes"]
    success = of_categories.pivot(index=place, columns="category", values="success")
    agents = success.index.to_frame()[["partition", "seed", "agent"]]
    shares = share_tasks(rows, clients).reindex(pd.MultiIndex.from_frame(agents))
    weighted = success * shares.reindex(columns=success.columns, fill_value=0).to_numpy()
    own_success = weighted.sum(axis=1, min_count=1).rename("success").reset_index()
    return pd.concat([rows, own_success.assign(category="own")[rows.columns]])


def tabulate(rows: pd.DataFrame) -> list[dict[str, str]]:
    """A row per way to deal tasks, category and method: before and after training."""
    table = []
    groups = average_agents(rows).groupby(["partition", "category", "method"])
    for (partition, category, method), group in groups:
        steps = group.pivot(index="seed", columns="step", values="success")
        row = {"tasks": name_partition(partition), "category": category}
        row["method"] = find_method(method).label
        # Runs may be evaluated for the first time later
        row["before"] = format_mean(steps[0], bounded=True) if 0 in steps else ""
        row["after"] = format_mean(steps.iloc[:, -1], bounded=True)
        row["seeds"] = " ".join(map(str, steps.index))
        table.append(row)
    return table


def name_partition(name: str) -> str:
    """`preference 2` of the --exp-name's preference2."""
    letters = name.rstrip("0123456789.")
    return f"{letters} {name.removeprefix(letters)}".strip()


def main(args: Args) -> None:
    path = Path(f"{args.out}.csv")
    clients_path = Path(f"{args.out}_clients.csv")
    if not args.from_csv:
        runs = read_runs(args.runs, needed=("client",))
        rows, clients = read_tables(runs)
        write(path, header(runs), rows)
        write(clients_path, header(runs), clients)
    rows = read_table(path, (*KEY, "step", "agent", "client", "category", "success"))
    clients = read_table(clients_path)
    print_table(tabulate(add_own(rows, clients)))


if __name__ == "__main__":
    main(read_flags(Args))
