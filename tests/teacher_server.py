"""A server of a model folder that answers completions with log-probabilities of the prompt, as vLLM does."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

Change = Callable[[dict[str, Any]], Any]  # of an answer before it is sent


class Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of those who are gone before their answer is there: they were killed, or had waited enough."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class TeacherServer:
    """`change` alters each answer of a completion; `answers` counts those; `gate` holds them back while it is clear.
    `unwell`: answers of a completion to come that are 503, with this Retry-After. `no_route`: what /tokenize answers
    where `tokenize` gives nothing."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.change: Change = lambda answer: answer
        self.tokenize: Callable[[list[int]], list[int] | None] = lambda ids: ids
        self.unwell: list[str] = []
        self.no_route = 404
        self.asked: list[dict[str, Any]] = []
        self.closed = False
        self.gate = threading.Event()
        self.gate.set()
        self._busy = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._send(200, {"data": [{"id": "teacher"}]})

            def do_POST(self) -> None:
                if owner.closed:  # connections of before are gone, too
                    self.close_connection = True
                    return
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/tokenize":
                    ids = owner.tokenize(owner.tokenizer.encode(body["prompt"], add_special_tokens=False))
                    self._send(owner.no_route if ids is None else 200, {"tokens": ids})
                    return
                owner.asked.append(body)
                owner.gate.wait(30)
                if owner.unwell:
                    self._send(503, {"error": "loading"}, {"Retry-After": owner.unwell.pop(0)})
                    return
                self._send(200, owner.change(owner.answer(body)))

            def _send(self, status: int, value: Any, headers: dict[str, str] = {}) -> None:  # noqa: B006
                data = json.dumps(value).encode()
                self.send_response(status)
                for name, text in headers.items():
                    self.send_header(name, text)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @torch.no_grad()
    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        ids, count = body["prompt"], body["prompt_logprobs"]
        with self._busy:
            rows = self._model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        positions: list[Any] = [None]
        for token, row in zip(ids[1:], rows[:-1]):
            best = row.argsort(descending=True).tolist()
            chosen = dict.fromkeys([*best[: len(best) if count < 0 else count], token])
            positions.append({str(i): {"logprob": float(row[i]), "rank": best.index(i) + 1,
                                       "decoded_token": self.tokenizer.decode([i])} for i in chosen})
        return {"choices": [{"text": "", "prompt_logprobs": positions, "prompt_token_ids": ids}]}

    def close(self) -> None:
        self.closed = True
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def serving(folder: Path) -> Iterator[TeacherServer]:
    server = TeacherServer(folder)
    try:
        yield server
    finally:
        server.close()
