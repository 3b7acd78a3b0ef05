"""A small OpenAI-compatible server for tests, a process of its own: `python endpoint.py PORT_FILE [token_s] [port]`.

Answers /v1/completions and /v1/chat/completions with made-up tokens that depend on all tokens before them and on the
version of its "weights" (a number in a file `version` of a folder or adapter), and misbehaves as told by /test/behave.
Standard library alone (but for a tokenizer on request): what is tested is a client, so nothing of it is shared.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import zlib
from pathlib import Path
from typing import Any

TOKENIZERS: dict[str, Any] = {}
EOS, FIRST, KINDS = 1, 3, int(os.environ.get("ENDPOINT_KINDS", "30"))  # token ids


def next_token(ids: list[int], version: int) -> tuple[int, float]:
    """The token after `ids`, and its log-probability; EOS now and then."""
    mixed = zlib.crc32(json.dumps([ids, version]).encode())
    token = EOS if mixed % 23 == 0 else FIRST + mixed % KINDS
    return token, -0.01 - (mixed >> 8) % 1000 / 250.0


def answer(prompt: list[int], limit: int, version: int) -> tuple[list[int], list[float]]:
    """What an undisturbed request gives."""
    ids, logprobs = list(prompt), []
    while len(logprobs) < limit and (not logprobs or ids[-1] != EOS):
        token, logprob = next_token(ids, version)
        ids.append(token)
        logprobs.append(logprob)
    return ids[len(prompt) :], logprobs


def prompt_ids(body: dict[str, Any]) -> list[int]:
    """Of a request by chat: its letters, or what the tokenizer in ENDPOINT_TOKENIZER makes of it."""
    folder = os.environ.get("ENDPOINT_TOKENIZER", "")
    if not folder:
        text = body["messages"][0]["content"]
        return [*(ord(letter) - 94 for letter in text), *([2] if body.get("tools") else [])]
    if folder not in TOKENIZERS:
        from transformers import AutoTokenizer

        TOKENIZERS[folder] = AutoTokenizer.from_pretrained(folder)
    tokenizer = TOKENIZERS[folder]
    return list(tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=False))


class Server:
    def __init__(self, token_s: float) -> None:
        self.token_s, self.script, self.log = token_s, [], []  # type: ignore[var-annotated]
        self.version, self.adapters, self.paused = 0, {}, asyncio.Event()  # type: ignore[var-annotated]
        self.paused.set()
        self.drawn, self.allowed = 0, 1 << 60  # tokens, of all answers together

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while request := await self.request(reader):
                await self.route(*request, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def request(self, reader: asyncio.StreamReader) -> tuple[str, dict[str, str], dict[str, Any]] | None:
        line = (await reader.readline()).decode().split()
        if len(line) < 2:
            return None
        headers = {}
        while header := (await reader.readline()).decode().strip():
            name, _, value = header.partition(":")
            headers[name.lower()] = value.strip()
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        return line[1], headers, json.loads(body) if body else {}

    async def route(self, path: str, headers: dict[str, str], body: dict[str, Any], writer: Any) -> None:
        if path == "/test/behave":
            self.script = body.get("script", self.script)
            self.allowed = body.get("allowed", self.allowed)
            return await self.reply(writer, 200, {})
        if path == "/test/log":
            return await self.reply(writer, 200, {"log": self.log, "drawn": self.drawn})
        self.log.append({"path": path, "body": body, "key": headers.get("authorization", "")})
        if path in ("/v1/completions", "/v1/chat/completions"):
            return await self.complete(path, body, writer)
        if path == "/v1/models":
            return await self.reply(writer, 200, {"data": [{"id": name} for name in ("letters", *self.adapters)]})
        return await self.control(path.partition("?")[0], body, writer)

    async def control(self, path: str, body: dict[str, Any], writer: Any) -> None:
        mode = self.script.pop(0) if self.script and self.script[0].startswith("update:") else ""
        if mode == "update:hang":
            await asyncio.Event().wait()  # for ever
        if mode:
            return await self.reply(writer, int(mode.partition(":")[2]), {"detail": "the update was told to fail"})
        if path in ("/v1/load_lora_adapter", "/load_lora_adapter"):
            if body["lora_name"] in self.adapters:  # in vLLM's words
                text = f"The lora adapter '{body['lora_name']}' has already been loaded."
                return await self.reply(writer, 400, {"error": {"message": text, "type": "InvalidUserInput"}})
            self.adapters[body["lora_name"]] = version_in(body["lora_path"])
        elif path in ("/v1/unload_lora_adapter", "/unload_lora_adapter"):
            if self.adapters.pop(body["lora_name"], None) is None:
                return await self.reply(writer, 404, {"error": {"message": "no such adapter"}})
        elif path in ("/pause", "/pause_generation"):
            self.paused.clear()
        elif path in ("/resume", "/continue_generation"):
            self.paused.set()
        elif path == "/collective_rpc":
            self.version = version_in(body["kwargs"]["weights_path"])
        elif path == "/update_weights_from_disk":
            self.version = version_in(body["model_path"])
            return await self.reply(writer, 200, {"success": True})
        elif path not in ("/reset_prefix_cache", "/flush_cache"):
            return await self.reply(writer, 404, {"detail": "Not Found"})
        return await self.reply(writer, 200, {})

    async def complete(self, path: str, body: dict[str, Any], writer: Any) -> None:
        how = self.script.pop(0) if self.script else "ok"
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            await asyncio.Event().wait()  # for ever
        status, _, after = how.partition("/")
        if status.isdigit():
            extra = {"Retry-After": after} if after else {}
            return await self.reply(writer, int(status), {"error": {"message": f"told to say {status}"}}, extra)
        if how == "html":
            return await self.raw(writer, 200, "text/html", b"<html>It works!</html>")
        model = body.get("model", "")
        if model != "letters" and model not in self.adapters:
            return await self.reply(writer, 404, {"error": {"message": f"no model {model}"}})
        await self.paused.wait()
        version = self.adapters.get(model, self.version)
        if path.endswith("chat/completions"):
            return await self.chat(body, version, writer, how)
        return await self.stream(body, version, writer, how)

    async def chat(self, body: dict[str, Any], version: int, writer: Any, how: str) -> None:
        prompt = prompt_ids(body)
        ids, logprobs = answer(prompt, body["max_tokens"], version)
        shown = prompt if how != "other prompt" else [7]
        if body.get("stream") and how != "whole":
            await self.chat_stream(ids, logprobs, shown, writer, how)
            return
        for _ in ids:
            await asyncio.sleep(self.token_s)
        self.drawn += len(ids)
        content = [{"token": "x", "logprob": value} for value in logprobs]
        choice = {
            "index": 0, "message": {"role": "assistant", "content": "x"}, "token_ids": ids,
            "finish_reason": "stop" if ids[-1] == EOS else "length", "logprobs": {"content": content},
        }
        data = json.dumps({"choices": [choice], "prompt_token_ids": shown}).encode()
        await self.raw(writer, 200, "application/json", data, cut=len(data) // 2 if how == "half" else 0)

    async def chat_stream(
        self, ids: list[int], logprobs: list[float], prompt_ids: list[int], writer: Any, how: str
    ) -> None:
        """As vLLM streams a chat: a first chunk with the role and the prompt's ids, tokens, then the usage."""
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        await self.event(writer, {"choices": [first], "prompt_token_ids": prompt_ids})
        for count, (token, value) in enumerate(zip(ids, logprobs), 1):
            await asyncio.sleep(self.token_s)
            if writer.transport.is_closing():
                return
            self.drawn += 1
            finish = None if count < len(ids) else "stop" if token == EOS else "length"
            choice = {"index": 0, "delta": {"content": "x"}, "token_ids": [token], "finish_reason": finish,
                      "logprobs": {"content": [{"token": "x", "logprob": value}]}}
            if how == "kept back" and count == 2:
                continue
            await self.event(writer, {"choices": [choice]})
            if how == "half" and count == 3:
                writer.transport.abort()
                return
        await self.event(writer, {"choices": [], "usage": {"completion_tokens": len(ids)}})
        await self.chunk(writer, b"data: [DONE]\n\n")
        await self.chunk(writer, b"")

    async def event(self, writer: Any, data: dict[str, Any]) -> None:
        await self.chunk(writer, b"data: " + json.dumps(data).encode() + b"\n\n")

    async def stream(self, body: dict[str, Any], version: int, writer: Any, how: str) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        if how == "comments":
            while True:
                await self.chunk(writer, b": still here\n\n")
                await asyncio.sleep(0.02)
        if how == "endless line":
            while True:
                await self.chunk(writer, b"data: " + b"x" * 65536)
        ids, limit = list(body["prompt"]), body["max_tokens"]
        for count in range(1, limit + 1):
            await asyncio.sleep(self.token_s)
            await self.paused.wait()
            while self.drawn >= self.allowed and not writer.transport.is_closing():
                await asyncio.sleep(0.002)
            if writer.transport.is_closing():
                return  # who asked is gone
            token, logprob = next_token(ids, self.adapters.get(body["model"], self.version))
            ids.append(token)
            self.drawn += 1
            finish = "stop" if token == EOS else "length" if count == limit else None
            choice: dict[str, Any] = {
                "index": 0, "text": "", "finish_reason": finish, "token_ids": [token],
                "logprobs": {"tokens": [f"token_id:{token}"], "token_logprobs": [logprob]},
            }
            self.spoil(choice, how, count)
            await self.chunk(writer, b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            if (how == "half" and count == 3) or (how == "silent end" and finish):
                writer.transport.abort()
                return
            if how == "clean half" and count == 3:
                break
            if finish or choice["finish_reason"]:
                break
        if how != "clean half":
            await self.chunk(writer, b"data: [DONE]\n\n")
        await self.chunk(writer, b"")

    def spoil(self, choice: dict[str, Any], how: str, count: int) -> None:
        if how == "no ids":
            choice["token_ids"], choice["logprobs"]["tokens"] = None, ["x"]
        elif how == "named ids":
            choice["token_ids"] = None
        elif how == "unknown id":
            choice["token_ids"] = [999]
        elif how == "nan" and count == 2:
            choice["logprobs"]["token_logprobs"] = [float("nan")]
        elif how == "above zero":
            choice["logprobs"]["token_logprobs"] = [0.5]
        elif how == "two for one":
            choice["logprobs"]["token_logprobs"] *= 2
        elif how == "abort" and count == 3:
            choice["finish_reason"] = "abort"
        elif how == "silent end":
            choice["finish_reason"] = None

    async def chunk(self, writer: Any, data: bytes) -> None:
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await writer.drain()

    async def reply(self, writer: Any, status: int, data: object, extra: dict[str, str] | None = None) -> None:
        await self.raw(writer, status, "application/json", json.dumps(data).encode(), extra)

    async def raw(
        self, writer: Any, status: int, kind: str, data: bytes, extra: dict[str, str] | None = None, cut: int = 0
    ) -> None:
        lines = [f"HTTP/1.1 {status} Status", f"Content-Type: {kind}", f"Content-Length: {len(data)}"]
        lines += [f"{name}: {value}" for name, value in (extra or {}).items()]
        writer.write("\r\n".join([*lines, "", ""]).encode() + (data[:cut] if cut else data))
        await writer.drain()
        if cut:
            writer.transport.abort()


def version_in(folder: str) -> int:
    return int((Path(folder) / "version").read_text())


async def main(port_file: str, token_s: str = "0", port: str = "0") -> None:
    server = await asyncio.start_server(Server(float(token_s)).handle, "127.0.0.1", int(port), limit=1 << 22)
    Path(port_file + ".new").write_text(str(server.sockets[0].getsockname()[1]))
    os.replace(port_file + ".new", port_file)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
