"""A small OpenAI-compatible server on loopback, with vLLM's routes for adapters, for the tests of
--generate-with.

It serves a plain transformers model with adapters that PEFT really loads from their folders, one
prompt at a time.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from helpers import environment
from peft import PeftModel
from ports import free_port


class CompletionServer:
    """A server; `url` is what --generate-with gets, `loaded` the adapters by name, `requests` all
    it was sent.

    faults: what it does wrong. no-adapters, no-ids, no-logprobs, raw-logprobs (as vLLM by default:
    not tempered), ignored-adapter, one-choice, no-end (end-of-text tokens are cut off), old (token
    ids in vLLM's earlier form). failures: HTTP statuses of the next requests for completions, in
    turn (200: none); None closes the connection, "cut" in the middle of an answer. lost_answers:
    how many times an adapter is loaded without an answer. broken_adapter: requests for adapters
    whose name contains it fail. sleep_mode: it has vLLM's routes for it, and does nothing else
    while `asleep`; with the fault `amnesia` adapters have no effect once it has slept.
    """

    def __init__(self, model, tokenizer):
        self.base = model
        self.tokenizer = tokenizer
        self.model = None
        self.loaded = {}
        self.lock = threading.Lock()
        self.reset()

    def reset(self):
        """Start anew, as for another test: without adapters, faults and requests."""
        for name in [*self.loaded]:
            self.unload(name)
        self.faults = set()
        self.failures = []
        self.lost_answers = 0
        self.requests = []
        self.broken_adapter = ""
        self.sleep_mode = False
        self.asleep = False

    @contextlib.contextmanager
    def running(self):
        """Serve on a free port of the loopback interface."""
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                if self.path == "/is_sleeping":
                    status = 200 if owner.sleep_mode else 404
                    self.reply(status, json.dumps({"is_sleeping": owner.asleep}))
                    return
                names = ["base", *owner.loaded]
                self.reply(
                    200, json.dumps({"object": "list", "data": [{"id": name} for name in names]})
                )

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with owner.lock:
                    owner.requests.append((self.path, body))
                    status, answer = owner.answer(self.path, body)
                if status is not None:
                    self.reply(status, answer)

            def reply(self, status, answer):
                content = answer.encode()
                sent = content
                if status == "cut":
                    status = 200
                    sent = content[: len(content) // 2]
                with contextlib.suppress(OSError):
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(sent)

            def log_message(self, *_):
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            self.url = f"http://127.0.0.1:{server.server_port}/v1"
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            yield self
            server.shutdown()
            thread.join()

    def answer(self, path, body):
        """(status, text) for a request."""
        if self.sleep_mode and path in ("/sleep?level=1", "/wake_up"):
            self.asleep = path != "/wake_up"
            if "amnesia" in self.faults:
                self.faults.add("ignored-adapter")
            return 200, ""
        if self.asleep:
            return 503, "asleep"
        if path == "/v1/load_lora_adapter" and "no-adapters" not in self.faults:
            status, answer = self.load(body["lora_name"], Path(body["lora_path"]))
            if self.lost_answers and status == 200:
                self.lost_answers -= 1
                status = None
            return status, answer
        if path == "/v1/unload_lora_adapter" and "no-adapters" not in self.faults:
            if body["lora_name"] not in self.loaded:
                return 404, json.dumps({"error": {"message": "The lora adapter cannot be found."}})
            self.unload(body["lora_name"])
            return 200, "Success: LoRA adapter removed successfully."
        if path == "/v1/completions":
            if self.broken_adapter and self.broken_adapter in body["model"]:
                return 500, "out of\nmemory"
            status = self.failures.pop(0) if self.failures else 200
            if status != 200:
                return status, "overloaded,\nmaybe"
            if body["model"] not in self.loaded:
                return 404, json.dumps({"error": {"message": "The model does not exist."}})
            if body["n"] > 1 and body["temperature"] == 0:
                return 400, "n must be 1 when using greedy sampling"
            return 200, json.dumps({"choices": self.complete(body)})
        return 404, json.dumps({"detail": "Not Found"})

    def load(self, name, folder):
        if name in self.loaded:
            return 400, json.dumps(
                {"error": {"message": f"The lora adapter '{name}' has already been loaded."}}
            )
        if not (folder / "adapter_config.json").is_file():
            return 404, json.dumps({"error": {"message": f"No adapter found for {folder}"}})
        key = name.replace(".", "_")  # PyTorch's names of modules
        if self.model is None:
            self.model = PeftModel.from_pretrained(self.base, folder, adapter_name=key)
        else:
            self.model.load_adapter(folder, adapter_name=key)
        self.loaded[name] = folder
        return 200, "Success: LoRA adapter added successfully."

    def unload(self, name):
        del self.loaded[name]
        self.model.delete_adapter(name.replace(".", "_"))

    @torch.no_grad()
    def complete(self, body):
        """The choices of a request, completions of a prompt of token ids."""
        self.model.set_adapter(body["model"].replace(".", "_"))
        number = 1 if "one-choice" in self.faults else body["n"]
        choices = []
        for index in range(number):
            generator = torch.Generator().manual_seed(body["seed"] + index)
            ids = []
            values = []
            reason = "length"
            while len(ids) < body["max_tokens"] and reason == "length":
                row = torch.tensor([body["prompt"] + ids])
                if "ignored-adapter" in self.faults:
                    with self.model.disable_adapter():
                        logits = self.model(row).logits[0, -1]
                else:
                    logits = self.model(row).logits[0, -1]
                tempered = (logits / (body["temperature"] or 1)).log_softmax(-1)
                if body["temperature"] == 0:
                    token = int(logits.argmax())
                else:
                    probs, inds = tempered.exp().sort(descending=True)
                    probs[probs.cumsum(0) - probs >= body["top_p"]] = 0
                    token = int(inds[torch.multinomial(probs, 1, generator=generator)])
                reported = logits.log_softmax(-1) if "raw-logprobs" in self.faults else tempered
                ids.append(token)
                values.append(float(reported[token]))
                text = self.tokenizer.decode(ids)
                if token in body["stop_token_ids"] or any(stop in text for stop in body["stop"]):
                    reason = "stop"
            if "no-end" in self.faults and ids[-1] in body["stop_token_ids"] and len(ids) > 1:
                ids = ids[:-1]
                values = values[:-1]
            logprobs = {"token_logprobs": values, "tokens": [f"token_id:{token}" for token in ids]}
            choice = {
                "index": index,
                "text": "",
                "logprobs": logprobs,
                "finish_reason": reason,
                "token_ids": ids,
            }
            if "old" in self.faults or "no-ids" in self.faults:
                del choice["token_ids"]
            if "no-ids" in self.faults:
                logprobs["tokens"] = [self.tokenizer.decode(token) for token in ids]
            if "no-logprobs" in self.faults:
                choice["logprobs"] = None
            choices.append(choice)
        return choices[::-1]  # in whatever order


@contextlib.contextmanager
def transformers_serve(model, log):
    """The URL of `transformers serve` with a model's folder; `log` gets its output."""
    port = free_port()
    words = [
        "-m",
        "transformers.cli.transformers",
        "serve",
        model,
        "--port",
        str(port),
        "--device",
        "cpu",
    ]
    env = environment(HF_HUB_OFFLINE="1", PYTHONPATH=os.environ.get("PYTHONPATH", ""))
    with open(log, "w") as output:
        server = subprocess.Popen([sys.executable, *words], env=env, stdout=output, stderr=output)
        try:
            for _ in range(600):
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                    break
                assert server.poll() is None, log.read_text()
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()
            server.wait(30)
