"""benchmark/judge.py: what is asked, what a verdict is, how win rates are made of them; and that no answer is lost."""

import contextlib
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
from helpers import REPOSITORY
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(REPOSITORY / "benchmark"))
judge = importlib.import_module("judge")
SHOWN = re.compile(
    r'"post": """(.*?)""".*"0",\s+"output": """(.*?)""".*"1",\s+"output": """(.*?)"""', re.S
)
COMPLETIONS = [
    ["good", "good", "bad one", "bad one"],
    ["bad one", "good", "bad one", "good"],
]  # of two agents


def good_wins(post, first, second):
    """A judge who likes the word good, and the second where both or none have it."""
    return "0" if "good" in first and "good" not in second else "1"


@pytest.fixture
def server():
    """A scripted server: `answers` is called with the three texts shown; what it returns, if no text, is sent as it is:
    a number as HTTP status, bytes as body, None closes the connection, a float is waited for; `requests` has all."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with self.server.lock:
                self.server.requests.append(body | {"path": self.path})
                answer = self.server.answers(*SHOWN.search(body["messages"][0]["content"]).groups())
            if isinstance(answer, float):
                time.sleep(answer)
                answer = "0"
            if answer is None:
                return
            if isinstance(answer, int):
                self.send_error(answer, "no such model")
                return
            if not isinstance(answer, bytes):
                answer = (
                    answer
                    if isinstance(answer, dict)
                    else {"message": {"content": answer}, "finish_reason": "stop"}
                )
                answer = json.dumps({"choices": [answer]}).encode()
            with contextlib.suppress(OSError):  # nobody waits any more
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.requests, server.answers, server.lock = [], good_wins, threading.Lock()
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def make_run(folder, completions=COMPLETIONS):
    """A run of agents that have completed the same four prompts; before that, they were bad."""
    data, folder = folder / "data.jsonl", folder / "runs" / f"run{len(list(folder.glob('runs/*')))}"
    rows = [
        {"prompt": f"<chat>post {k}", "completion": f"human {k}", "request": f"post {k}"}
        for k in range(4)
    ]
    data.write_text("\n".join(map(json.dumps, rows)))
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps({"script": "prpo_llm", "dataset": str(data), "exp_name": "x"})
    )
    rows = [
        {
            "step": step,
            "agent": i,
            "task": "validation",
            "id": k,
            "completion": text,
            "reference": f"human {k}",
        }
        for step in (0, 9)
        for i, own in enumerate(completions)
        for k, text in enumerate(own if step else ["bad"] * len(own))
    ]
    (folder / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def judged(scripted, tmp_path, *runs, **changes):
    """judge.main with a server that is asked quickly; the win rates by agent."""
    options = {
        "server": f"http://127.0.0.1:{scripted.server_port}/v1",
        "model": "judge",
        "wait": 0.01,
    }
    options |= {
        "cache": str(tmp_path / "cache.jsonl"),
        "concurrency": 4,
        "answer_timeout": 20.0,
    } | changes
    return judge.main(judge.Args(runs=tuple(map(str, runs)), **options)).set_index("agent")


# --- what is asked, and what an answer means ---


def test_questions_are_the_papers(server, tmp_path):
    """Figure 6's prompt with the plain post, both orders, table 6's sampling; equal questions are asked once."""
    found = judged(server, tmp_path, make_run(tmp_path), make_run(tmp_path))
    texts = [request.pop("messages")[0] for request in server.requests]
    assert {text["role"] for text in texts} == {"user"} and len(
        texts
    ) == 2 * 6  # prompts 1 and 2 have equal answers
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
    assert (
        text.endswith("nothing else (no quotation marks, no spaces, no new lines, ...).\n")
        and "{{" not in text
    )
    # Both agents win two of four; human summaries win against the bad in the first place, and not in the second
    assert found.loc[0, "win_rate"].tolist() == [0.75, 0.75] and found.loc[
        "all", "prompts"
    ].tolist() == [4, 4]
    written = pd.read_csv(next(tmp_path.glob("runs/*/win_rates.csv")))
    assert written.win_rate.tolist() == [0.75, 0.75, 0.75] and set(written.judge) == {"judge"}


def test_a_judge_who_sees_only_the_place_prefers_nobody(server, tmp_path):
    """Whoever is shown first wins: 0.5 for everybody, orders never agree, and no interval of width 0."""
    server.answers = lambda *_: "Let me see.</think>\n\n0\n"
    row = judged(server, tmp_path, make_run(tmp_path)).loc["all"]
    assert (row.win_rate, row.orders_agree, row.first_shown_wins, row.invalid) == (0.5, 0, 1, 0)
    assert 0 < row.win_rate_ci_low < 0.1 and 0.9 < row.win_rate_ci_high < 1
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
    row = judged(server, tmp_path, make_run(tmp_path, COMPLETIONS[:1])).loc["all"]
    assert (row.invalid, row.answers, row.prompts) == (3, 8, 3)
    assert row.win_rate == pytest.approx(
        (1 + 0.5 + 0.5) / 3
    )  # of the bad ones only the second place wins
    server.answers = lambda *_: answer
    row = judged(server, tmp_path, make_run(tmp_path), cache=str(tmp_path / "other.jsonl")).loc[
        "all"
    ]
    assert (row.prompts, row.invalid) == (0, 16) and np.isnan(row.win_rate)


def test_one_token_is_an_answer(server, tmp_path):
    """A judge that does not think, limited to one token, always ends by the limit."""
    server.answers = lambda *texts: {
        "message": {"content": good_wins(*texts)},
        "finish_reason": "length",
    }
    assert judged(server, tmp_path, make_run(tmp_path), max_tokens=1).loc["all"].invalid == 0


def test_another_run_takes_the_place_of_the_references(server, tmp_path):
    """The same agent's completions of the same prompts are compared; the other way round gives the rest."""
    first, second = make_run(tmp_path), make_run(tmp_path, [["good"] * 4, ["bad one"] * 4])
    found, back = (
        judged(server, tmp_path, first, against=str(second)),
        judged(server, tmp_path, second, against=str(first)),
    )
    assert found.win_rate.tolist() == [0.25, 0.75, 0.5]
    assert (found.win_rate + back.win_rate).tolist() == [1, 1, 1]
    assert not list(tmp_path.glob("runs/*/win_rates.csv"))  # these are against the references


def test_where_training_began(server, tmp_path):
    """--before judges the first completions, which are bad, against references or what the same run says at last."""
    run = make_run(tmp_path)
    found = judged(server, tmp_path, run, before=True)
    assert found.win_rate.tolist() == [0.5, 0.5, 0.5] and set(found.step) == {
        0
    }  # as bad as human ones
    found = judged(server, tmp_path, run, before=True, against=str(run))
    assert found.win_rate.tolist() == [0.25, 0.25, 0.25]
    assert not list(tmp_path.glob("runs/*/win_rates.csv"))  # these are for what has been trained


# --- failures ---


def test_a_server_that_fails_is_asked_again(server, tmp_path):
    """Statuses, time-outs, nonsense and closed connections are got over: the same win rates, and nothing twice."""
    trouble = [500, 429, 3.0, b"<html>", b"{}", b'{"choices": []}', b'{"choices": [7]}', None, 503]
    server.answers = lambda *texts: trouble.pop() if trouble else good_wins(*texts)
    found = judged(server, tmp_path, make_run(tmp_path), answer_timeout=0.5, retries=9)
    assert found.win_rate.tolist() == [0.75, 0.75, 0.75]
    assert len(server.requests) == 12 + 9
    assert len((tmp_path / "cache.jsonl").read_text().splitlines()) == 12


def test_a_wrong_request_ends_at_once(server, tmp_path):
    """No repetition mends it: one line, with what the server said; what was answered is kept."""
    asked = iter([None] * 5)
    server.answers = lambda *texts: good_wins(*texts) if next(asked, 404) is None else 404
    with pytest.raises(
        SystemExit, match=r"/v1/chat/completions: 404 .*no such model.*\n.*goes on from the answers"
    ):
        judged(server, tmp_path, make_run(tmp_path), concurrency=1)
    assert len(server.requests) == 6
    assert len((tmp_path / "cache.jsonl").read_text().splitlines()) == 5


def test_nobody_there(server, tmp_path):
    """A server that is not there is named, after the repetitions."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(SystemExit, match="Connection refused"):
            judged(
                server,
                tmp_path,
                make_run(tmp_path),
                server=f"http://127.0.0.1:{free.getsockname()[1]}/v1",
                retries=2,
            )


def test_what_was_answered_is_not_asked_again(server, tmp_path, monkeypatch):
    """Interrupted, even in mid-line, it goes on where it was; another judge or sampling asks everything anew."""
    run, number = make_run(tmp_path), iter(range(100))
    completed = judge.as_completed

    def interrupted(futures):
        for future in completed(futures):
            yield future
            if next(number) == 3:
                raise KeyboardInterrupt

    monkeypatch.setattr(judge, "as_completed", interrupted)
    with pytest.raises(SystemExit, match="interrupted"):
        judged(server, tmp_path, run, concurrency=1)
    monkeypatch.setattr(judge, "as_completed", completed)
    cache = tmp_path / "cache.jsonl"
    kept = len(cache.read_text().splitlines())
    assert 4 <= kept == len(server.requests) < 12
    cache.write_text(cache.read_text()[:-20])  # the power went
    assert judged(server, tmp_path, run).loc["all"].win_rate == 0.75
    assert len(server.requests) == 12 + 1
    answers = [json.loads(line) for line in cache.read_text().splitlines() if line.endswith("}")]
    assert len({row["key"] for row in answers}) == len(answers) == 12
    judged(server, tmp_path, run)
    assert len(server.requests) == 13
    for changes in ({"model": "other"}, {"sampling": '{"temperature": 0}'}, {"max_tokens": 1}):
        before = len(server.requests)
        judged(server, tmp_path, run, **changes)
        assert len(server.requests) == before + 12


def test_questions_are_asked_at_the_same_time(server, tmp_path, monkeypatch):
    """As many as --concurrency says are under way together."""
    barrier, post = threading.Barrier(4, timeout=20), judge.Judge.post

    def together(self, prompt):
        barrier.wait()  # breaks where fewer come together
        return post(self, prompt)

    monkeypatch.setattr(judge.Judge, "post", together)
    assert judged(server, tmp_path, make_run(tmp_path)).loc["all"].answers == 16


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"server": ""}, "needs --server and --model, or --reward-model"),
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
def test_bad_arguments(server, tmp_path, changes, said):
    """One line, and nobody is asked."""
    with pytest.raises(SystemExit, match=said):
        judged(server, tmp_path, make_run(tmp_path), **changes)
    assert not server.requests


def test_other_data_than_the_runs_is_refused(server, tmp_path):
    """A prompt is looked up by its number; that it is the right one, its reference tells."""
    run = make_run(tmp_path)
    lines = (tmp_path / "data.jsonl").read_text().splitlines()
    (tmp_path / "data.jsonl").write_text("\n".join(lines[1:] + lines[:1]))
    with pytest.raises(SystemExit, match="data.jsonl has changed since the run"):
        judged(server, tmp_path, run)
    with pytest.raises(SystemExit, match="has no completions.jsonl"):
        judged(server, tmp_path, tmp_path)


# --- win rates of verdicts ---


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(*[st.sampled_from([0.0, 1.0, np.nan])] * 4), min_size=1, max_size=12))
def test_win_rates_by_hand(verdicts):
    """Of two agents on some prompts: the mean of prompts of the mean of agents of the mean of valid orders."""
    rows = [
        {"agent": i, "task": "t", "id": k, "verdicts": np.array(own[2 * i : 2 * i + 2])}
        for k, own in enumerate(verdicts)
        for i in range(2)
    ]
    table = judge.win_rates(pd.DataFrame(rows)).set_index("agent")

    def mean(values):
        known = [value for value in values if value == value]
        return sum(known) / len(known) if known else float("nan")

    scores = [[mean(own[:2]), mean(own[2:])] for own in verdicts]
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
    assert table.loc["all", "invalid"] == sum(value != value for own in verdicts for value in own)
    swapped = judge.win_rates(
        pd.DataFrame([row | {"verdicts": 1 - row["verdicts"][::-1]} for row in rows])
    )
    assert swapped.win_rate.tolist() == pytest.approx((1 - table.win_rate).tolist(), nan_ok=True)


def test_more_answers_about_a_prompt_are_no_more_prompts():
    """Copies of an agent, or a second order that agrees, leave the interval as it is; more prompts narrow it."""
    rng = np.random.default_rng(0)

    def width(prompts, agents, orders):
        wins = [float(k % 3 == 0) for k in range(prompts)]
        rows = [
            (i, "t", k, np.array([wins[k]] * orders))
            for k in rng.permutation(prompts)
            for i in range(agents)
        ]
        row = judge.win_rates(pd.DataFrame(rows, columns=["agent", "task", "id", "verdicts"])).iloc[
            -1
        ]
        return row.win_rate_ci_high - row.win_rate_ci_low

    assert width(30, 1, 1) == pytest.approx(width(30, 5, 2), rel=0.05)
    assert width(120, 1, 1) == pytest.approx(width(30, 1, 1) / 2, rel=0.1)


def test_a_reward_model_judges_offline(tmp_path, monkeypatch):
    """The better score wins, a tie is half a win; it sees prompts as the policy does, once, without orders."""
    seen = []

    def score(prompts, completions):
        seen.extend(prompts)
        return [float("good" in text) for text in completions]

    monkeypatch.setattr(judge, "load_scorer", lambda name: score)
    found = judge.main(judge.Args(runs=(str(make_run(tmp_path)),), reward_model="model")).set_index(
        "agent"
    )
    assert found.win_rate.tolist() == [0.75, 0.75, 0.75] and set(seen) == {
        f"<chat>post {k}" for k in range(4)
    }
    assert "orders_agree" not in found and found.loc["all", "answers"] == 8


def test_a_reward_model_receives_messages_as_messages(tmp_path, monkeypatch):
    """It puts them in its own chat template; a language model is shown the last one's text."""
    folder = make_run(tmp_path)
    rows = [
        {"prompt": [{"role": "user", "content": f"post {k}"}], "completion": f"human {k}"}
        for k in range(4)
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    args = judge.Args(runs=(str(folder),), reward_model="model")
    found = judge.read_pairs(str(folder), args)
    assert [*found.prompt] == [rows[number]["prompt"] for number in found.id]
    args.reward_model = ""
    assert [*judge.read_pairs(str(folder), args).prompt] == [
        f"post {number}" for number in found.id
    ]


# --- a real server ---


@pytest.mark.slow
def test_transformers_serve(tmp_path):
    """`transformers serve` with SmolLM2 answers; all its answers are in the cache and none is asked for again."""
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
        assert row.answers == 16 and 0 <= row.invalid <= 16
    assert len((tmp_path / "cache.jsonl").read_text().splitlines()) == 12
    assert judge.main(args).set_index("agent").loc["all"].equals(row)  # without a server
