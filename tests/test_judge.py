"""benchmark/judge.py: queries, verdicts, the win rates computed from them; and that no answer is
lost.
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import re
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pandas as pd
import pytest
from completion_server import transformers_serve
from helpers import REPOSITORY, refusal, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(REPOSITORY / "benchmark"))
judge = importlib.import_module("judge")
SHOWN = re.compile(
    r'"post": """(.*?)""".*"0",\s+"output": """(.*?)""".*"1",\s+"output": """(.*?)"""', re.S
)
# Of two agents
COMPLETIONS = [
    ["good", "good", "bad one", "bad one"],
    ["bad one", "good", "bad one", "good"],
]


def good_wins(post, first, second):
    """A judge who prefers the word good, and the second where both or none have it."""
    return "0" if "good" in first and "good" not in second else "1"


@pytest.fixture
def server():
    """A scripted server: `answers` is called with the three texts shown; what it returns, if no
    text, is sent as it is: a number as HTTP status, bytes as body, None closes the connection, a
    float is waited for; `requests` has all.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with self.server.lock:
                self.server.requests.append(body | {"path": self.path})
                shown = SHOWN.search(body["messages"][0]["content"]).groups()
                answer = self.server.answers(*shown)
            if isinstance(answer, float):
                time.sleep(answer)
                answer = "0"
            if answer is None:
                return
            if isinstance(answer, int):
                self.send_error(answer, "no such model")
                return
            if isinstance(answer, str):
                answer = {"message": {"content": answer}, "finish_reason": "stop"}
            if isinstance(answer, dict):
                answer = json.dumps({"choices": [answer]}).encode()
            with contextlib.suppress(OSError):  # nobody waits any more
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.requests = []
        server.answers = good_wins
        server.lock = threading.Lock()
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def make_run(root, completions=COMPLETIONS):
    """A run of agents that have completed the same four prompts; before training they were bad."""
    data = root / "data.jsonl"
    folder = root / "runs" / f"run{len(list(root.glob('runs/*')))}"
    rows = [
        {"prompt": f"<chat>post {k}", "completion": f"human {k}", "request": f"post {k}"}
        for k in range(4)
    ]
    write_jsonl(data, rows)
    folder.mkdir(parents=True)
    settings = {"dataset": str(data), "exp_name": "x"}
    (folder / "config.json").write_text(json.dumps({"script": "prpo_llm"} | settings))
    summary = {"completed": True, "settings": settings}
    (folder / "summary.json").write_text(json.dumps(summary))
    rows = []
    for step, texts in ((0, [["bad"] * 4] * len(completions)), (9, completions)):
        for agent, of_agent in enumerate(texts):
            for k, text in enumerate(of_agent):
                row = {"step": step, "agent": agent, "task": "validation", "id": k}
                rows.append(row | {"completion": text, "reference": f"human {k}"})
    write_jsonl(folder / "completions.jsonl", rows)
    return folder


def run_judge(scripted, tmp_path, *runs, **changes):
    """judge.main with a scripted server and short waits; the win rates by agent."""
    options = {
        "server": f"http://127.0.0.1:{scripted.server_port}/v1",
        "model": "judge",
        "wait": 0.01,
        "cache": str(tmp_path / "cache.jsonl"),
        "concurrency": 4,
        "answer_timeout": 20.0,
    }
    options |= changes
    return judge.main(judge.Args(runs=tuple(map(str, runs)), **options)).set_index("agent")


# --- queries, and what an answer means ---


def test_queries_are_the_papers(server, tmp_path):
    """Figure 6's prompt with the plain post, both orders, table 6's sampling; equal queries are
    sent once.
    """
    rates = run_judge(server, tmp_path, make_run(tmp_path), make_run(tmp_path))
    texts = [request.pop("messages")[0] for request in server.requests]
    assert {text["role"] for text in texts} == {"user"}
    assert len(texts) == 2 * 6  # prompts 1 and 2 have equal answers
    shown = [SHOWN.search(text["content"]).groups() for text in texts]
    assert {
        ("post 0", "good", "human 0"),
        ("post 0", "human 0", "good"),
        ("post 3", "human 3", "bad one"),
    } <= {*shown}
    expected = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.0,
        "model": "judge",
        "max_tokens": 4096,
    }
    expected |= {
        "chat_template_kwargs": {"enable_thinking": True},
        "stream": False,
        "path": "/v1/chat/completions",
    }
    assert all(request == expected for request in server.requests)
    text = texts[0]["content"]
    assert text.startswith(
        "You are evaluating the performance of different language models on a summarization task."
    )
    assert text.endswith("nothing else (no quotation marks, no spaces, no new lines, ...).\n")
    assert "{{" not in text
    # Both agents win two of four; human summaries win against the bad in the first place, and not
    # in the second
    assert rates.loc[0, "win_rate"].tolist() == [0.75, 0.75]
    assert rates.loc["all", "prompts"].tolist() == [4, 4]
    written = pd.read_csv(next(tmp_path.glob("runs/*/win_rates.csv")))
    assert written.win_rate.tolist() == [0.75, 0.75, 0.75]
    assert set(written.judge) == {"judge"}


def test_a_judge_who_sees_only_the_place_prefers_nobody(server, tmp_path):
    """Whoever is shown first wins: 0.5 for everybody, orders never agree, and no interval of width
    0.
    """
    server.answers = lambda *_: "Let me see.</think>\n\n0\n"
    row = run_judge(server, tmp_path, make_run(tmp_path)).loc["all"]
    assert (row.win_rate, row.orders_agree, row.first_shown_wins, row.invalid) == (0.5, 0, 1, 0)
    assert 0 < row.win_rate_ci_low < 0.1
    assert 0.9 < row.win_rate_ci_high < 1
    assert len(server.requests) == 12


@pytest.mark.parametrize(
    "answer",
    [
        "Neither.",
        "",
        "2",
        {"message": {"content": None}},
        {"message": {"content": "<think>The first has 1"}},
        {"message": {"content": "Model 1"}, "finish_reason": "length"},
    ],
)
def test_invalid_answers_are_counted_and_left_out(server, tmp_path, answer):
    """One valid order is enough for a prompt; without any the prompt is out."""
    invalid = {"post 0": 2, "post 1": 1}  # of both orders
    server.answers = lambda post, a, b: (
        answer
        if invalid.get(post) == 2 or (post in invalid and a.startswith("human"))
        else good_wins(post, a, b)
    )
    row = run_judge(server, tmp_path, make_run(tmp_path, COMPLETIONS[:1])).loc["all"]
    assert (row.invalid, row.answers, row.prompts) == (3, 8, 3)
    assert row.win_rate == pytest.approx(
        (1 + 0.5 + 0.5) / 3
    )  # of the bad ones only the second place wins
    server.answers = lambda *_: answer
    row = run_judge(server, tmp_path, make_run(tmp_path), cache=str(tmp_path / "other.jsonl")).loc[
        "all"
    ]
    assert (row.prompts, row.invalid) == (0, 16)
    assert np.isnan(row.win_rate)


def test_one_token_is_an_answer(server, tmp_path):
    """A judge that does not think, limited to one token, always ends by the limit."""
    server.answers = lambda *texts: {
        "message": {"content": good_wins(*texts)},
        "finish_reason": "length",
    }
    assert run_judge(server, tmp_path, make_run(tmp_path), max_tokens=1).loc["all"].invalid == 0


def test_another_run_takes_the_place_of_the_references(server, tmp_path):
    """The same agent's completions of the same prompts are compared; the other way round gives the
    rest. The data need no references.
    """
    first = make_run(tmp_path)
    second = make_run(tmp_path, [["good"] * 4, ["bad one"] * 4])
    rates = run_judge(server, tmp_path, first, against=str(second)).win_rate
    opposite = run_judge(server, tmp_path, second, against=str(first)).win_rate
    assert rates.tolist() == [0.25, 0.75, 0.5]
    assert (rates + opposite).tolist() == [1, 1, 1]
    assert not list(tmp_path.glob("runs/*/win_rates.csv"))  # these are against the references
    for path in tmp_path.rglob("*.jsonl"):
        text = re.sub(r'"completion": "human \d", ', "", path.read_text())
        path.write_text(re.sub(r'"human \d"', '""', text))
    assert run_judge(server, tmp_path, first, against=str(second)).win_rate.equals(rates)


def test_other_prompts_of_the_same_number_are_not_compared(server, tmp_path):
    """A run on other data has numbers in them too."""
    first = make_run(tmp_path)
    (tmp_path / "other").mkdir()
    other = make_run(tmp_path / "other")
    path = other / "completions.jsonl"
    path.write_text(path.read_text().replace("human", "another"))
    message = refusal(run_judge, server, tmp_path, first, against=str(other))
    assert message.startswith(f"{first}: nothing to judge: ")


def test_where_training_began(server, tmp_path):
    """--before judges the first completions, which are bad, against references or what the same run
    writes at the end.
    """
    run = make_run(tmp_path)
    rates = run_judge(server, tmp_path, run, before=True)
    assert rates.win_rate.tolist() == [0.5, 0.5, 0.5]
    assert set(rates.step) == {0}  # these are as bad as the human ones
    rates = run_judge(server, tmp_path, run, before=True, against=str(run))
    assert rates.win_rate.tolist() == [0.25, 0.25, 0.25]
    assert not list(tmp_path.glob("runs/*/win_rates.csv"))  # these are for what has been trained


def add_samples(run, texts):
    """Sampled completions of each agent's first prompts at the end: [agent][prompt][sample]."""
    rows = []
    for agent, of_agent in enumerate(texts):
        for k, samples in enumerate(of_agent):
            row = {"step": 9, "agent": agent, "task": "validation", "id": k}
            row["reference"] = f"human {k}"
            for number, text in enumerate(samples):
                rows.append(row | {"sample": number, "completion": text})
    path = run / "completions.jsonl"
    path.write_text(path.read_text() + "".join(json.dumps(row) + "\n" for row in rows))


def test_sampled_and_greedy_completions_are_judged_apart(server, tmp_path):
    """Greedy ones as if there were no others; all samples of a prompt count; against another run
    the same numbers are compared."""
    run = make_run(tmp_path)
    refused = refusal(run_judge, server, tmp_path, run, sampled=True)
    assert refused.startswith(f"--sampled: {run} has no sampled completions")
    add_samples(run, [[["good", "bad one"], ["good", "good"]], [["bad one", "bad one"]]])
    assert run_judge(server, tmp_path, run).win_rate.tolist() == [0.75, 0.75, 0.75]
    rates = run_judge(server, tmp_path, run, sampled=True)
    # The bad ones are as bad as the human ones: of prompt 0 (1, 0.5, 0.5, 0.5), of prompt 1 (1, 1)
    assert rates.win_rate.tolist() == pytest.approx([0.875, 0.5, (0.625 + 1) / 2])
    assert rates.loc["all", "prompts"] == 2 and rates.loc["all", "answers"] == 12
    written = [pd.read_csv(run / name) for name in ("win_rates.csv", "sampled_win_rates.csv")]
    assert [table.win_rate.iloc[-1] for table in written] == pytest.approx([0.75, 0.8125])
    other = make_run(tmp_path)
    add_samples(other, [[["bad one", "good"], ["good", "bad one"]], [["good", "good"]]])
    rates = run_judge(server, tmp_path, run, sampled=True, against=str(other))
    assert rates.win_rate.tolist() == pytest.approx([0.625, 0, (0.25 + 0.75) / 2])
    assert rates.loc["all", "answers"] == 12


def test_judging_other_tasks_keeps_the_rates_of_the_first(server, tmp_path):
    """In win_rates.csv, from which table.py takes those of the held-out prompts; those of another
    judge are gone.
    """
    run = make_run(tmp_path)
    path = run / "completions.jsonl"
    path.write_text(path.read_text() + path.read_text().replace("validation", "topic"))
    run_judge(server, tmp_path, run)
    run_judge(server, tmp_path, run, tasks=("topic",))
    written = pd.read_csv(run / "win_rates.csv")
    assert written.task.tolist() == ["validation"] * 3 + ["topic"] * 3
    run_judge(server, tmp_path, run)
    written = pd.read_csv(run / "win_rates.csv")
    assert written.task.tolist() == ["topic"] * 3 + ["validation"] * 3
    run_judge(server, tmp_path, run, tasks=("topic",), model="another")
    written = pd.read_csv(run / "win_rates.csv")
    assert set(zip(written.task, written.judge, strict=True)) == {("topic", "another")}


# --- failures ---


def test_failed_requests_are_repeated(server, tmp_path):
    """Statuses, time-outs, nonsense and closed connections do not matter: the same win rates, and
    nothing twice.
    """
    trouble = [500, 429, 4.0, b"<html>", b"{}", b'{"choices": []}', b'{"choices": [7]}', None, 503]
    server.answers = lambda *texts: trouble.pop() if trouble else good_wins(*texts)
    rates = run_judge(server, tmp_path, make_run(tmp_path), answer_timeout=1, retries=9)
    assert rates.win_rate.tolist() == [0.75, 0.75, 0.75]
    assert len(server.requests) == 12 + 9
    assert len((tmp_path / "cache.jsonl").read_text().splitlines()) == 12


def test_a_wrong_request_ends_at_once(server, tmp_path):
    """No repetition can help: one line, with the server's message; the answers so far are kept."""
    statuses = iter([200] * 5)
    server.answers = lambda *texts: good_wins(*texts) if next(statuses, 404) == 200 else 404
    with pytest.raises(
        SystemExit, match=r"/v1/chat/completions: 404 .*no such model.*\n.*goes on from the answers"
    ):
        run_judge(server, tmp_path, make_run(tmp_path), concurrency=1)
    assert len(server.requests) == 6
    assert len((tmp_path / "cache.jsonl").read_text().splitlines()) == 5


def test_there_is_no_server(server, tmp_path):
    """A server that is not there is named, after the repetitions."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(SystemExit, match="Connection refused"):
            run_judge(
                server,
                tmp_path,
                make_run(tmp_path),
                server=f"http://127.0.0.1:{free.getsockname()[1]}/v1",
                retries=2,
            )


def test_answered_queries_are_not_sent_again(server, tmp_path, monkeypatch):
    """Interrupted, even in mid-line, it goes on where it was; another judge or sampling sends
    everything anew.
    """
    run = make_run(tmp_path)
    number = iter(range(100))
    completed = judge.as_completed

    def interrupted(futures):
        for future in completed(futures):
            yield future
            if next(number) == 3:
                raise KeyboardInterrupt

    monkeypatch.setattr(judge, "as_completed", interrupted)
    with pytest.raises(SystemExit, match="interrupted"):
        run_judge(server, tmp_path, run, concurrency=1)
    monkeypatch.setattr(judge, "as_completed", completed)
    cache = tmp_path / "cache.jsonl"
    kept = len(cache.read_text().splitlines())
    assert 4 <= kept == len(server.requests) < 12
    cache.write_text(cache.read_text()[:-20])  # a power cut
    assert run_judge(server, tmp_path, run).loc["all"].win_rate == 0.75
    assert len(server.requests) == 12 + 1
    answers = [json.loads(line) for line in cache.read_text().splitlines() if line.endswith("}")]
    assert len({row["key"] for row in answers}) == len(answers) == 12
    run_judge(server, tmp_path, run)
    assert len(server.requests) == 13
    for changes in ({"model": "other"}, {"sampling": '{"temperature": 0}'}, {"max_tokens": 1}):
        before = len(server.requests)
        run_judge(server, tmp_path, run, **changes)
        assert len(server.requests) == before + 12


def test_a_key_that_no_request_can_hold_is_not_printed(server, tmp_path, monkeypatch):
    """A file with the line ends of Windows; nothing is repeated."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret\r")
    with pytest.raises(SystemExit) as end:
        run_judge(server, tmp_path, make_run(tmp_path), wait=60.0)
    assert "this URL, or OPENAI_API_KEY, is not valid in a request" in str(end.value)
    assert "secret" not in str(end.value)


def test_queries_are_sent_at_the_same_time(server, tmp_path, monkeypatch):
    """As many as --concurrency says are under way together."""
    barrier = threading.Barrier(4, timeout=20)
    post = judge.Judge.post

    def together(self, prompt):
        barrier.wait()  # breaks where fewer come together
        return post(self, prompt)

    monkeypatch.setattr(judge.Judge, "post", together)
    assert run_judge(server, tmp_path, make_run(tmp_path)).loc["all"].answers == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"server": ""}, "needs --server and --model, or --reward-model"),
        ({"template": "nowhere"}, "--template nowhere: No such file or directory"),
        ({"template": "json"}, "--template json: '\"post\"' in braces that are not doubled"),
        ({"model": ""}, "needs --server and --model, or --reward-model"),
        (
            {"server": "localhost:1/v1"},
            "--server localhost:1/v1: must begin with http:// or https://",
        ),
        ({"reward_model": "x"}, "needs --server and --model, or --reward-model"),
        ({"sampling": "[1]"}, r"--sampling \[1\]: must be a JSON object"),
        ({"sampling": "{"}, r"--sampling {: must be a JSON object"),
        ({"concurrency": 0}, "--concurrency 0: must be at least 1"),
        ({"tasks": ("unheard",)}, "nothing to judge: --tasks unheard"),
    ],
)
def test_bad_arguments(server, tmp_path, monkeypatch, changes, message):
    """One line and exit code 2, before anything is sent."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json").write_text('{"post": "{prompt}"}')
    assert re.search(message, refusal(run_judge, server, tmp_path, make_run(tmp_path), **changes))
    assert not server.requests


def test_other_data_than_the_runs_is_refused(server, tmp_path):
    """A prompt is looked up by its number; its reference shows whether it is the right one."""
    run = make_run(tmp_path)
    lines = (tmp_path / "data.jsonl").read_text().splitlines()
    (tmp_path / "data.jsonl").write_text("\n".join(lines[1:] + lines[:1]))
    with pytest.raises(SystemExit, match="data.jsonl has changed since the run"):
        run_judge(server, tmp_path, run)
    (run / "completions.jsonl").unlink()
    with pytest.raises(SystemExit, match="has no completions.jsonl"):
        run_judge(server, tmp_path, run)


# --- win rates of verdicts ---


@settings(max_examples=30)
@given(st.lists(st.tuples(*[st.sampled_from([0.0, 1.0, np.nan])] * 4), min_size=1, max_size=12))
def test_win_rates_by_hand(verdicts):
    """Of two agents on some prompts: the mean of prompts of the mean of agents of the mean of valid
    orders.
    """
    rows = [
        {"agent": i, "task": "t", "id": k, "verdicts": np.array(of_prompt[2 * i : 2 * i + 2])}
        for k, of_prompt in enumerate(verdicts)
        for i in range(2)
    ]
    table = judge.compute_win_rates(pd.DataFrame(rows)).set_index("agent")

    def mean(values):
        valid = [value for value in values if value == value]
        return sum(valid) / len(valid) if valid else float("nan")

    scores = [[mean(of_prompt[:2]), mean(of_prompt[2:])] for of_prompt in verdicts]
    for name, expected in (
        (0, [s[0] for s in scores]),
        (1, [s[1] for s in scores]),
        ("all", list(map(mean, scores))),
    ):
        row = table.loc[name]
        assert row.win_rate == pytest.approx(mean(expected), nan_ok=True)
        assert row.prompts == sum(value == value for value in expected)
        assert (
            np.isnan(row.win_rate)
            or 0 <= row.win_rate_ci_low <= row.win_rate <= row.win_rate_ci_high <= 1 + 1e-12
        )
    assert table.loc["all", "invalid"] == np.isnan(verdicts).sum()
    swapped = judge.compute_win_rates(
        pd.DataFrame([row | {"verdicts": 1 - row["verdicts"][::-1]} for row in rows])
    )
    assert swapped.win_rate.tolist() == pytest.approx((1 - table.win_rate).tolist(), nan_ok=True)


def test_more_answers_about_a_prompt_are_no_more_prompts():
    """Copies of an agent, or a second order that agrees, leave the interval as it is; more prompts
    narrow it.
    """
    rng = np.random.default_rng(0)

    def width(prompts, agents, orders):
        wins = [float(k % 3 == 0) for k in range(prompts)]
        rows = [
            (i, "t", k, np.array([wins[k]] * orders))
            for k in rng.permutation(prompts)
            for i in range(agents)
        ]
        row = judge.compute_win_rates(
            pd.DataFrame(rows, columns=["agent", "task", "id", "verdicts"])
        ).iloc[-1]
        return row.win_rate_ci_high - row.win_rate_ci_low

    assert width(30, 1, 1) == pytest.approx(width(30, 5, 2), rel=0.05)
    assert width(120, 1, 1) == pytest.approx(width(30, 1, 1) / 2, rel=0.1)


def test_a_reward_model_judges_offline(tmp_path, monkeypatch):
    """The better score wins, a tie is half a win; it sees prompts as the policy does, once, without
    orders.
    """
    seen = []

    def score(prompts, completions):
        seen.extend(prompts)
        return [float("good" in text) for text in completions]

    monkeypatch.setattr(judge, "load_scorer", lambda name: score)
    rates = judge.main(judge.Args(runs=(str(make_run(tmp_path)),), reward_model="model")).set_index(
        "agent"
    )
    assert rates.win_rate.tolist() == [0.75, 0.75, 0.75]
    assert set(seen) == {f"<chat>post {k}" for k in range(4)}
    assert "orders_agree" not in rates
    assert rates.loc["all", "answers"] == 8


def test_a_run_that_was_cut_off_is_not_judged(tmp_path, monkeypatch, capsys):
    """Its last evaluation is that before training, which --before asks for."""
    monkeypatch.setattr(judge, "load_scorer", lambda name: lambda _, texts: [0.0] * len(texts))
    cut_off = make_run(tmp_path)
    whole = make_run(tmp_path)
    (cut_off / "summary.json").unlink()
    both = judge.Args(runs=(str(cut_off), str(whole)), reward_model="model")
    assert {*judge.main(both).run} == {str(whole)}
    assert f"{cut_off}: cut off, left out" in capsys.readouterr().err
    line = f"--runs {cut_off}: no finished run in there"
    assert refusal(judge.main, dataclasses.replace(both, runs=(str(cut_off),))) == line
    against = dataclasses.replace(both, runs=(str(whole),), against=str(cut_off))
    assert refusal(judge.main, against) == f"--against {cut_off}: must be a finished run"
    nowhere = dataclasses.replace(both, runs=(str(whole), "nowhere"))
    assert refusal(judge.main, nowhere) == "nowhere: is no run's folder"
    before = judge.main(dataclasses.replace(both, before=True))
    assert {*before.run} == {str(cut_off), str(whole)}


def test_a_reward_model_receives_messages_as_messages(tmp_path, monkeypatch):
    """It puts them in its own chat template; a language model is shown the last one's text."""
    folder = make_run(tmp_path)
    rows = [
        {"prompt": [{"role": "user", "content": f"post {k}"}], "completion": f"human {k}"}
        for k in range(4)
    ]
    write_jsonl(tmp_path / "data.jsonl", rows)
    args = judge.Args(runs=(str(folder),), reward_model="model")
    rates = judge.read_pairs(str(folder), args)
    assert [*rates.prompt] == [rows[number]["prompt"] for number in rates.id]
    args.reward_model = ""
    assert [*judge.read_pairs(str(folder), args).prompt] == [
        f"post {number}" for number in rates.id
    ]


# --- a real server ---


@pytest.mark.slow
def test_transformers_serve(tmp_path):
    """`transformers serve` with SmolLM2 answers; all its answers are in the cache and none is asked
    for again.
    """
    if not all(map(importlib.util.find_spec, ("fastapi", "uvicorn", "openai"))):
        pytest.skip("pip install 'transformers[serving]'")
    importlib.import_module("pipeline").write_base(tmp_path / "base")
    name = str(tmp_path / "base")
    with transformers_serve(name, tmp_path / "log") as url:
        options = {"server": url, "model": name, "cache": str(tmp_path / "cache.jsonl")}
        options |= {
            "sampling": '{"temperature": 0.6, "top_p": 0.95}',
            "max_tokens": 1,
            "concurrency": 2,
        }
        args = judge.Args(runs=(str(make_run(tmp_path)),), **options)
        row = judge.main(args).set_index("agent").loc["all"]
        assert row.answers == 16
        assert 0 <= row.invalid <= 16
    assert len((tmp_path / "cache.jsonl").read_text().splitlines()) == 12
    assert judge.main(args).set_index("agent").loc["all"].equals(row)  # without a server
