"""A server that speaks enough of OpenAI's API for the tests, and misbehaves on demand."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

STATUS_FAULTS = {400, 401, 403, 404, 408, 409, 413, 422, 429, 500, 502, 503, 504}


@dataclass
class FakeOpenAI:
    """Answers a request by the faults scripted for its `user`, one per attempt, and then well.

    Faults are a status, or: `half` (fewer bytes than promised), `cut` (JSON that ends early), `html`, `not-json`,
    `no-choices`, `reset`, `slow` (no answer ever), `stalled` (nor the end of the headers), `late-headers` (in pieces,
    but then a good answer), `quota`, `echo-key`, `redirect`, `retry-after` (a 429 that names a time).
    """

    faults: dict[str, list[int | str]] = field(default_factory=dict)
    always: int | str | None = None
    """a fault of every request that has none of its own"""
    first: Sequence[int | str] = ()
    """faults of the first attempts of all requests, in turn"""
    retry_after: str = "0"
    key: str | None = None
    latency_s: float = 0.0
    num_together: int = 1
    """answers wait until so many requests are in flight for the first time"""
    most_in_flight: int | None = None
    """a request that is one too many gets a 429"""
    pages: dict[str, Any] = field(default_factory=dict)
    """what is at other paths: text, or JSON"""
    posted: list[str] = field(default_factory=list)
    """paths beside the API that were posted to"""
    requests: list[tuple[str, bytes]] = field(default_factory=list)
    """(path, body) in order of arrival"""
    attempts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    num_refused: int = 0
    num_connections: int = 0
    num_in_flight: int = 0
    max_in_flight: int = 0
    port: int = 0
    _are_together: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def users(self) -> list[str]:
        """Who asked, in order of arrival."""
        return [json.loads(body)["user"] for _, body in self.requests]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().split("\r\n")
                method, path, _ = lines[0].split(" ")
                headers = {
                    name.strip().lower(): value.strip()
                    for name, _, value in (line.partition(":") for line in lines[1:] if line)
                }
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                await self.answer(writer, method, path, headers, body)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(
        self, writer: asyncio.StreamWriter, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> None:
        if self.key is not None and headers.get("authorization") != f"Bearer {self.key}":
            await send(writer, 401, error(401, "Incorrect API key provided", "invalid_api_key"))
            return
        if method == "GET":
            page = self.pages.get(path, {"object": "list", "data": []} if path == "/v1/models" else None)
            if isinstance(page, str):
                await send_raw(writer, 200, page.encode(), content_type="text/plain")
            else:
                await send(writer, 404 if page is None else 200, page or {})
            return
        if not path.startswith("/v1/"):
            self.posted.append(path)
            await send(writer, 200, {})
            return
        if self.most_in_flight is not None and self.num_in_flight >= self.most_in_flight:
            self.num_refused += 1
            await send(writer, 429, error(429, "Slow down", "rate_limit"), retry_after=self.retry_after)
            return
        is_new = all(body != earlier for _, earlier in self.requests)
        self.requests.append((path, body))
        request = json.loads(body)
        user = request.get("user", "")
        script = self.faults.get(user, [])
        if is_new and self.first:
            script = [self.first[len({body for _, body in self.requests}) % len(self.first)], *script]
        attempt = self.attempts[user]
        self.attempts[user] += 1
        self.num_in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
        if self.num_in_flight >= self.num_together:
            self._are_together.set()
        try:
            await self._are_together.wait()
            await asyncio.sleep(self.latency_s)
        finally:  # before the answer, upon which the next one may come at once
            self.num_in_flight -= 1
        fault = script[attempt] if attempt < len(script) else self.always
        if fault is None:
            await send(writer, 200, completion(path, request))
        else:
            await self.fail(writer, fault, completion(path, request))

    async def fail(self, writer: asyncio.StreamWriter, fault: int | str, good: dict[str, Any]) -> None:
        text = json.dumps(good).encode()
        if fault == "half":
            await send_raw(writer, 200, text[: len(text) // 2], length=len(text))
            raise ConnectionError
        if fault == "cut":
            await send_raw(writer, 200, text[:-20])
        elif fault == "html":
            await send_raw(writer, 200, text, content_type="text/html")
        elif fault == "not-json":
            await send_raw(writer, 200, b"\x00\xff ok")
        elif fault == "no-choices":
            await send(writer, 200, {"object": "error", "message": "oops"})
        elif fault == "reset":
            writer.transport.abort()
            raise ConnectionError
        elif fault == "slow":
            await asyncio.sleep(600)
        elif fault in ("stalled", "late-headers"):
            for piece in (b"HTTP/1.1 200 OK\r\nContent-", b"Type: application/json\r\nContent-Le"):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.05)
            if fault == "stalled":
                await asyncio.sleep(600)
            writer.write(b"ngth: %d\r\n\r\n" % len(text) + text)
            await writer.drain()
        elif fault == "echo-key":
            await send(writer, 422, error(422, f"the key {self.key} may not do this", "no_such_right"))
        elif fault == "quota":
            await send(writer, 429, error(429, "You exceeded your current quota", "insufficient_quota"))
        elif fault == "retry-after":
            await send(
                writer, 429, error(429, "Slow down", "rate_limit_exceeded"), retry_after=self.retry_after
            )
        elif fault == "redirect":
            await send_raw(writer, 307, b"", location="https://elsewhere.example/v1")
        else:
            assert fault in STATUS_FAULTS
            code = "context_length_exceeded" if fault == 400 else f"code_{fault}"
            await send(writer, int(fault), error(int(fault), f"this is a {fault}", code))


def completion(path: str, request: dict[str, Any]) -> dict[str, Any]:
    """As many tokens as `max_tokens` allows, and a text that depends on the request alone."""
    num_choices, num_tokens = request.get("n") or 1, request.get("max_tokens") or 16
    prompt = request.get("prompt") or request.get("messages")
    text = f"echo of {json.dumps(prompt)[-40:]}\u2028"
    choices: list[dict[str, Any]] = []
    for index in range(num_choices):
        choice: dict[str, Any] = {"index": index, "finish_reason": "length", "logprobs": None}
        if path == "/v1/chat/completions":
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        choices.append(choice)
    num_prompt_tokens = len(prompt) if path == "/v1/completions" and isinstance(prompt, list) else 8
    return {
        "id": "cmpl-1",
        "object": "chat.completion" if path == "/v1/chat/completions" else "text_completion",
        "created": 1,
        "model": "what-the-server-calls-it",
        "choices": choices,
        "usage": {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_choices * num_tokens,
            "total_tokens": num_prompt_tokens + num_choices * num_tokens,
            "prompt_tokens_details": {"cached_tokens": num_prompt_tokens // 2},
        },
        "of_the_servers_own": {"x": [1.5, None]},
    }


def error(status: int, message: str, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "some_error", "param": "p", "code": code}, "status": status}


async def send(writer: asyncio.StreamWriter, status: int, document: dict[str, Any], **headers: str) -> None:
    await send_raw(writer, status, json.dumps(document).encode(), **headers)


async def send_raw(
    writer: asyncio.StreamWriter,
    status: int,
    content: bytes,
    *,
    length: int | None = None,
    content_type: str = "application/json",
    **headers: str,
) -> None:
    lines = [
        f"HTTP/1.1 {status} Whatever",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(content) if length is None else length}",
        *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
    ]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + content)
    await writer.drain()


@contextmanager
def running(server: FakeOpenAI, port: int = 0) -> Iterator[FakeOpenAI]:
    """The server on a thread of its own; connections break when it ends."""
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    ready = threading.Event()

    async def main() -> None:
        serving: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = loop.create_task(server.serve(reader, writer))
            serving[task] = writer
            task.add_done_callback(serving.pop)

        listener = await asyncio.start_server(accept, "127.0.0.1", port, limit=1 << 24)
        server.port = listener.sockets[0].getsockname()[1]
        ready.set()
        await stop.wait()
        for listening in listener.sockets:
            loop.remove_reader(listening)  # what was accepted before must find the listener open, or it leaks
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for task, writer in serving.items():
                task.cancel()
                writer.transport.abort()  # a task that has not begun closes nothing
            await asyncio.wait(others)
        listener.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    assert ready.wait(60)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()
