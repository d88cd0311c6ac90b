"""Any server that speaks OpenAI's API as an engine: requests go out as written, answers come back as they are.

The policy decides through a `Window` which requests the server has. Answers are not streamed, because that would
change the requests; the window estimates what it cannot see. One event loop, stepped by `run`: no thread, and no
connection that nobody waits for.

| what happens | what becomes of it |
| --- | --- |
| 2xx that is no completion, half a body, 408, 409, 425, 5xx, time-out, reset | sent again after a backoff, bounded |
| 429 | the same with more patience, for it says nothing about the request |
| no connection, or 502, 503, 504, time-out, reset, and a probe fails too | all wait until the server is back |
| other 4xx | the request has failed, with the server's own status and message |
| 401, 403, no quota left, a redirect, a server that stays away | the job stops: nothing else would succeed |
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import orjson

from blendserve.cost_model import CostModel
from blendserve.engines.retry import Backoff
from blendserve.errors import ConfigError, EngineError
from blendserve.request import Completion, Failure, RawRequest, RequestTable, Result, StepOutput, StepStats
from blendserve.scheduling.policy import Policy
from blendserve.scheduling.window import Window

MAX_OUTAGE_S = 300.0
"""a server may be away for so long before the job stops"""
MAX_TICK_S = 0.25
"""between two looks of the policy where no answer comes"""
MAX_RATE_LIMITED_ATTEMPTS = 30
CONNECT_TIMEOUT_S = 10.0
PROBE_EVERY_S = 1.0


class _Answer(NamedTuple):
    """What came over the wire."""

    status: int
    headers: Any
    content: bytes


@dataclass(frozen=True, slots=True)
class _Retry:
    """An attempt that failed for a reason that may pass."""

    failure: Failure
    retry_after_s: float | None = None
    is_rate_limit: bool = False
    suspects_server: bool = False
    reached_server: bool = True


class OpenAIServer:
    """Runs requests on a server.

    Args:
        base_url: with its /v1.
        cost_model: of the model on a device like the server's, for planning.
        api_key_env: environment variable with the key.
        max_concurrency: most requests at the server at a time.
        request_timeout_s: until an answer must be complete.
        kv_capacity_tokens: of the server.
        max_model_len: of the server's model, for planning.
        backoff: between attempts.
        max_outage_s: how long the server may be away.

    Raises:
        ConfigError: the URL or the key cannot be used, nothing answers there, or httpx2 is not installed.
    """

    name = "openai"

    def __init__(
        self,
        base_url: str,
        cost_model: CostModel,
        *,
        api_key_env: str | None,
        max_concurrency: int,
        request_timeout_s: float,
        kv_capacity_tokens: int,
        max_model_len: int,
        backoff: Backoff | None = None,
        max_outage_s: float = MAX_OUTAGE_S,
    ) -> None:
        try:
            import httpx2
        except ImportError as error:
            raise ConfigError("--engine openai needs httpx2: pip install 'blendserve[openai]'") from error
        self._http = httpx2
        self.base_url = base_url.rstrip("/")
        self.cost_model = cost_model
        self.kv_capacity_tokens = kv_capacity_tokens
        self.max_model_len = max_model_len
        self.max_concurrency = max_concurrency
        self._request_timeout_s = request_timeout_s
        self._backoff = backoff or Backoff()
        self._rate_limit_backoff = Backoff(
            self._backoff.base_s, self._backoff.factor, self._backoff.max_s, MAX_RATE_LIMITED_ATTEMPTS
        )
        self._max_outage_s = max_outage_s
        self._outage: asyncio.Task[bool] | None = None
        self._is_away = False
        self._is_admitting = True
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if api_key_env is not None:
            headers["Authorization"] = f"Bearer {_api_key(api_key_env)}"
        self._loop = asyncio.new_event_loop()
        try:
            self._client = httpx2.AsyncClient(
                headers=headers,
                timeout=httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S),
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=max_concurrency),
            )
            self._turn = asyncio.Lock()
            self._loop.run_until_complete(self._check())
        except BaseException:
            self.close()
            raise

    def run(self, requests: RequestTable, policy: Policy) -> Iterator[StepOutput]:
        """Run all requests; see `Engine.run`. A step ends with one or more answers, or after `MAX_TICK_S`.

        The facts of a step are those of the requests that finished in it.

        Raises:
            EngineError: the server refuses the key, or stays away.
        """
        if len(requests) == 0:
            return
        if requests.raw is None:
            raise EngineError(
                "a server needs the requests as they were written, and these are token ids only; "
                "prepare them with pass_through"
            )
        hardware = self.cost_model.hardware
        window = Window(
            requests,
            policy,
            kv_capacity_tokens=self.kv_capacity_tokens,
            max_concurrency=self.max_concurrency,
            max_num_batched_tokens=hardware.max_num_batched_tokens,
            step_s=self.cost_model.step_cost(hardware.max_num_batched_tokens, 0).step_s,
        )
        self._is_admitting = True
        tasks: dict[asyncio.Task[Result], int] = {}
        task_of: dict[int, asyncio.Task[Result]] = {}
        started_s = before_s = time.perf_counter()
        try:
            while window.num_unfinished and (self._is_admitting or tasks):
                if self._is_admitting and not self._is_away:
                    admitted, withdrawn = window.fill(time.perf_counter() - started_s)
                    for request in withdrawn:
                        task_of.pop(request).cancel()
                    for request in admitted:
                        task = self._loop.create_task(self._answer(requests.raw[request]))
                        tasks[task] = request
                        task_of[request] = task
                answers: list[tuple[int, Result]] = []
                stopped: BaseException | None = None
                for task in self._loop.run_until_complete(_first_of(tasks)):
                    request = tasks.pop(task)
                    if task_of.get(request) is task:  # else it was withdrawn
                        del task_of[request]
                        if (error := task.exception()) is None:
                            answers.append((request, task.result()))
                        stopped = stopped or error
                lengths = [(request, _output_tokens(result)) for request, result in answers]
                expected = window.finish(lengths, time.perf_counter() - started_s)
                for (_, result), output_tokens_est in zip(answers, expected, strict=True):
                    if isinstance(result, Completion):
                        result.output_tokens_est = output_tokens_est
                now_s = time.perf_counter()
                stats = self._stats(window, [result for _, result in answers], now_s - before_s)
                before_s = now_s
                yield StepOutput(stats, answers)
                if stopped is not None:
                    raise stopped
        finally:
            self._cancel(tasks)

    def stop_admitting(self) -> None:
        """Let `run` end as soon as what the server has now is answered; the other requests get no result."""
        self._is_admitting = False

    def close(self) -> None:
        """Close the connections."""
        if self._loop.is_closed():
            return
        if hasattr(self, "_client"):
            self._loop.run_until_complete(self._client.aclose())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    # -- one request ---------------------------------------------------------------------------------------------

    async def _answer(self, request: RawRequest) -> Result:
        """The result of a request, however many attempts it takes."""
        num_attempts = num_rate_limited = 0
        while True:
            if self._is_away:
                await self._server_answers()
            outcome = await self._attempt(request)
            if not isinstance(outcome, _Retry):
                return outcome
            if outcome.suspects_server and not await self._server_answers() and not outcome.reached_server:
                continue  # the request never left; it is not its fault
            if outcome.is_rate_limit:
                num_rate_limited += 1
                delay_s = self._rate_limit_backoff.delay_s(num_rate_limited, outcome.retry_after_s)
            else:
                num_attempts += 1
                delay_s = self._backoff.delay_s(num_attempts, outcome.retry_after_s)
            if delay_s is None:
                failure = outcome.failure
                failure.message += f" (given up after {num_attempts + num_rate_limited} attempts)"
                return failure
            await asyncio.sleep(delay_s)

    async def _attempt(self, request: RawRequest) -> Result | _Retry:
        http = self._http
        try:
            answer = await self._send(request)
        except TimeoutError:
            message = f"The server has not answered within {self._request_timeout_s:g} s"
            return _Retry(Failure("request_timeout", message, status_code=504), suspects_server=True)
        except (http.ConnectError, http.ConnectTimeout) as error:
            failure = Failure("connection_error", f"No connection to the server: {error}", status_code=502)
            return _Retry(failure, suspects_server=True, reached_server=False)
        except http.TransportError as error:
            message = f"The connection broke before the answer was complete: {error or type(error).__name__}"
            return _Retry(Failure("connection_error", message, status_code=502), suspects_server=True)
        except http.RequestError as error:  # a body that cannot be decompressed
            return _garbage(str(error))
        if answer.status == 200:
            return _completion(answer)
        return self._refusal(answer)

    async def _send(self, request: RawRequest) -> _Answer:
        """One attempt. Requests are written to the wire one after the other, so that they arrive in order."""
        await self._turn.acquire()
        is_my_turn = True

        def pass_turn() -> None:
            nonlocal is_my_turn
            if is_my_turn:
                is_my_turn = False
                self._turn.release()

        async def trace(event: str, _info: dict[str, Any]) -> None:
            if event.endswith("send_request_body.complete"):
                pass_turn()

        try:
            async with asyncio.timeout(self._request_timeout_s):
                response = await self._client.post(
                    self.base_url + request.url.removeprefix("/v1"),
                    content=request.body,
                    extensions={"trace": trace},
                )
        finally:
            pass_turn()
        return _Answer(response.status_code, response.headers, response.content)

    def _refusal(self, answer: _Answer) -> Failure | _Retry:
        """What becomes of a request that was answered with an error.

        Raises:
            EngineError: all other requests would be, too.
        """
        failure, status = _failure(answer), answer.status
        if status in (401, 403):
            raise EngineError(
                f"{self.base_url} refuses the requests with {status}: {failure.message}; "
                "name the environment variable that holds a valid key with --api-key-env"
            )
        if 300 <= status < 400:
            raise EngineError(
                f"{self.base_url} redirects to {answer.headers.get('location', 'elsewhere')}; "
                "give the final address as --base-url"
            )
        if status == 429:
            if failure.code == "insufficient_quota":
                raise EngineError(
                    f"{self.base_url} has no quota left for this key: {failure.message}; "
                    "run the job again when there is some"
                )
            return _Retry(failure, _retry_after_s(answer), is_rate_limit=True)
        if status in (408, 409, 425) or status >= 500:
            return _Retry(failure, _retry_after_s(answer), suspects_server=status in (502, 503, 504))
        return _garbage(f"status {status}") if status < 300 else failure

    # -- the server ----------------------------------------------------------------------------------------------

    async def _check(self) -> None:
        """See that a server is there before anything is sent.

        Raises:
            ConfigError: there is none, or it refuses the key.
        """
        http = self._http
        try:
            status = (
                await self._client.get(f"{self.base_url}/models", timeout=CONNECT_TIMEOUT_S)
            ).status_code
        except (http.InvalidURL, http.UnsupportedProtocol) as error:
            raise ConfigError(
                f"--base-url {self.base_url} is no URL ({error}); write e.g. http://localhost:8000/v1"
            ) from error
        except http.ConnectError as error:
            raise ConfigError(
                f"no server answers at {self.base_url} ({error}); start it, or correct --base-url"
            ) from error
        except http.RequestError:
            return  # it is there, and slow or not well: requests have the patience for that
        if status in (401, 403):
            raise ConfigError(
                f"{self.base_url} refuses the key with {status}; "
                "name the environment variable that holds a valid one with --api-key-env"
            )

    async def _server_answers(self) -> bool:
        """Wait until the server answers a probe; whether it did at once.

        Raises:
            EngineError: it stays away.
        """
        if self._outage is None or self._outage.done():
            self._outage = asyncio.get_running_loop().create_task(self._outlast())
        return await asyncio.shield(self._outage)

    async def _outlast(self) -> bool:
        if await self._probe():
            return True
        self._is_away = True
        since_s = time.monotonic()
        while time.monotonic() - since_s < self._max_outage_s:
            await asyncio.sleep(min(PROBE_EVERY_S, self._max_outage_s / 4))
            if await self._probe():
                self._is_away = False
                return False
        raise EngineError(
            f"the server at {self.base_url} has been away for {self._max_outage_s:g} s; the results so far are "
            "kept, start it again and run the same command to go on"
        )

    async def _probe(self) -> bool:
        try:
            answer = await self._client.get(f"{self.base_url}/models", timeout=CONNECT_TIMEOUT_S)
        except self._http.RequestError:
            return False
        return bool(answer.status_code < 500)

    # -- steps ---------------------------------------------------------------------------------------------------

    def _cancel(self, tasks: dict[asyncio.Task[Result], int]) -> None:
        """Take back whatever is at the server; a server that sees its connection closed stops working on it."""
        pending: list[asyncio.Task[Any]] = [*tasks]
        if self._outage is not None:
            pending.append(self._outage)
        for task in pending:
            task.cancel()
        if pending:
            self._loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        self._outage, self._is_away = None, False

    def _stats(self, window: Window, results: list[Result], duration_s: float) -> StepStats:
        num_prefill = num_decode = kv_read = 0
        for result in results:
            if isinstance(result, Completion):
                num_prefill += result.num_prompt_tokens - result.num_cached_tokens
                decoded = max(result.num_output_tokens - 1, 0)
                num_decode += decoded
                kv_read += decoded * (result.num_prompt_tokens + (decoded + 1) // 2)
        cost = self.cost_model.step_cost(num_prefill + num_decode, kv_read)
        return StepStats(
            duration_s=duration_s,
            num_prefill_tokens=num_prefill,
            num_decode_tokens=num_decode,
            kv_tokens_read=kv_read,
            num_running=window.num_running,
            num_waiting=window.num_waiting,
            kv_usage_ratio=min(window.kv_committed_tokens / self.kv_capacity_tokens, 1.0),
            compute_s=cost.compute_s,
            memory_s=cost.memory_s,
        )


async def _first_of(tasks: dict[asyncio.Task[Result], int]) -> set[asyncio.Task[Result]]:
    """Tasks that are done, once one is or `MAX_TICK_S` have passed."""
    done, _ = await asyncio.wait(tasks, timeout=MAX_TICK_S, return_when=asyncio.FIRST_COMPLETED)
    return done


def _api_key(variable: str) -> str:
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        state = "holds no key that can be sent" if key else "is not set"
        raise ConfigError(f"--api-key-env {variable}: the environment variable {state}; put the key there")
    return key


def _completion(answer: _Answer) -> Completion | _Retry:
    """A completion out of an answer with status 200."""
    content_type = answer.headers.get("content-type", "application/json")
    if "json" not in content_type:
        return _garbage(f"content type {content_type}")
    try:
        body = orjson.loads(answer.content)
    except orjson.JSONDecodeError as error:
        return _garbage(f"{len(answer.content)} bytes that are no JSON, {error}")
    choices = body.get("choices") if isinstance(body, dict) else None
    if (
        not isinstance(choices, list)
        or not choices
        or not all(isinstance(choice, dict) for choice in choices)
    ):
        return _garbage("JSON without choices")
    usage = body.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    details = usage.get("prompt_tokens_details")
    num_prompt_tokens = _count(usage.get("prompt_tokens"))
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else 0
    return Completion(
        token_ids=[],
        text="",
        finish_reason="length" if choices[0].get("finish_reason") == "length" else "stop",
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=min(cached, num_prompt_tokens),
        body=body,
    )


def _output_tokens(result: Result) -> int | None:
    """What is known of an output's length."""
    return (result.num_output_tokens or None) if isinstance(result, Completion) else None


def _count(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0


def _garbage(found: str) -> _Retry:
    message = f"The server's answer is no completion: {found}"
    return _Retry(Failure("invalid_response", message, status_code=502))


def _failure(answer: _Answer) -> Failure:
    """An error in the server's own words: {"error": {message, code, param}}, or that object itself, or any text."""
    try:
        document = orjson.loads(answer.content)
    except orjson.JSONDecodeError:
        document = None
    error = document.get("error", document) if isinstance(document, dict) else None
    if isinstance(error, str):
        error = {"message": error}
    if not isinstance(error, dict):
        error = {}
    names = (error.get("code"), error.get("type"))
    code = next((name for name in names if isinstance(name, str) and name), f"http_{answer.status}")
    message, param = error.get("message") or error.get("detail"), error.get("param")
    if not isinstance(message, str) or not message:
        text = answer.content[:500].decode(errors="replace").strip()
        message = f"The server answered with status {answer.status}" + (f": {text}" if text else "")
    return Failure(code, message, param if isinstance(param, str) else None, answer.status)


def _retry_after_s(answer: _Answer) -> float | None:
    """Seconds that the server asks to wait; the header has them, or a date."""
    text = answer.headers.get("retry-after")
    if text is None:
        return None
    try:
        seconds = float(text)
        return seconds if 0.0 <= seconds < math.inf else None
    except ValueError:
        pass
    try:
        when = parsedate_to_datetime(text)
    except ValueError:
        return None
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return max((when - datetime.now(UTC)).total_seconds(), 0.0)
