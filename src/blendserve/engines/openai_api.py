"""One server that speaks OpenAI's API: a request as it was written in, its result out, whatever happens on the way.

| what happens | what becomes of it |
| --- | --- |
| 2xx that is no completion, half a body, 408, 409, 425, 5xx, time-out, reset | sent again after a backoff, bounded |
| 429 | the same with more patience, for it says nothing about the request; and less is sent at a time |
| no connection, or 502, 503, 504, time-out, reset, and a probe fails too | all wait until the server is back |
| other 4xx | the request has failed, with the server's own status and message |
| 401, 403, no quota left, a redirect | the job stops: nothing else would succeed |
"""

from __future__ import annotations

import asyncio
import importlib.util
import math
import os
import re
import time
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal, NamedTuple

import orjson

from blendserve.engines.retry import Backoff
from blendserve.errors import ConfigError, EngineError
from blendserve.request import Completion, Failure, RawRequest, Result

MAX_RATE_LIMITED_ATTEMPTS = 30
CONNECT_TIMEOUT_S = 10.0
PROBE_EVERY_S = 1.0
"""first; further apart the longer a server is away"""
MAX_PROBE_EVERY_S = 10.0
RATE_LIMITED_FACTOR = 0.7
"""by which less is sent at a time after a 429"""
MAX_RATE_LIMIT_PAUSE_S = 60.0
"""that a server may ask for with Retry-After"""

Software = Literal["vllm", "sglang", "llamacpp"]


class ServerFacts(NamedTuple):
    """What a server tells of itself; None: nothing."""

    software: Software | None = None
    kv_capacity_tokens: int | None = None
    block_size: int = 1
    """tokens of KV that it hands out together"""
    max_num_seqs: int | None = None
    """requests that it runs at a time"""
    schedule_policy: str | None = None
    """order in which it takes its requests, as SGLang names it"""
    max_model_len: int | None = None
    """most tokens of a request"""


@dataclass(frozen=True, slots=True)
class GaveUp:
    """No attempt succeeded, which may be the server's fault or the request's."""

    failure: Failure
    is_hasty: bool = False
    """whether more attempts were left, but another server may be quicker than they"""


@dataclass(frozen=True, slots=True)
class _Retry:
    """An attempt that failed for a reason that may pass."""

    failure: Failure
    retry_after_s: float | None = None
    is_rate_limit: bool = False
    suspects_server: bool = False
    reached_server: bool = True
    is_timeout: bool = False


class Answer(NamedTuple):
    """What came over the wire."""

    status: int
    headers: Any
    content: bytes


class ConcurrencyLimit:
    """Most requests at a server at a time: less after a refusal, then more again, quickly up to where that was.

    Whoever came first goes first.

    Args:
        most: never more than that.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._now = float(most)
        self._quick_until = float(most)
        """more by one per answer below that, which doubles what is sent; above it by one per round"""
        self._in_flight = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._reduced_at_s = -math.inf

    @property
    def now(self) -> int:
        """Most requests at present, at least 1."""
        return max(int(self._now), 1)

    async def acquire(self) -> None:
        """Wait for a place."""
        if self._in_flight < self.now and not self._waiting:
            self._in_flight += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()
            raise

    def release(self) -> None:
        """Give a place back."""
        self._in_flight -= 1
        self._pass_on()

    def succeeded(self) -> None:
        """A request was answered, so one more may be sent, soon."""
        step = 1.0 if self._now < self._quick_until else 1.0 / self._now
        self._now = min(self._now + step, float(self.most))
        self._pass_on()

    def refused(self, sent_s: float) -> None:
        """A request sent at that time, whose place has not been given back, was one too many.

        One sent before the last reduction belongs to the same round: its place is not filled again, so that a server
        that took 4 of 64 gets 4 at a time after that round.
        """
        if sent_s < self._reduced_at_s:
            self._now = max(min(self._now, self._in_flight - 1.0), 1.0)
            return
        self._reduced_at_s = time.monotonic()
        self._now = max(min(self._now, float(self._in_flight)) * RATE_LIMITED_FACTOR, 1.0)
        self._quick_until = self._now

    def restart(self) -> None:
        """Begin again with one."""
        self._now = 1.0

    def _pass_on(self) -> None:
        while self._waiting and self._in_flight < self.now:
            turn = self._waiting.popleft()
            if not turn.done():
                self._in_flight += 1
                turn.set_result(None)


class ApiServer:
    """A server behind a URL.

    Args:
        base_url: with its /v1.
        key: of the server; None: none is sent.
        max_concurrency: most requests at a time.
        request_timeout_s: until an answer must be complete.
        backoff: between attempts.

    Raises:
        ConfigError: httpx2 is not installed.
    """

    def __init__(
        self,
        base_url: str,
        *,
        key: str | None,
        max_concurrency: int,
        request_timeout_s: float,
        backoff: Backoff,
    ) -> None:
        try:
            import httpx2
        except ImportError as error:
            raise ConfigError("a server needs httpx2: pip install 'blendserve[openai]'") from error
        self._http = httpx2
        self.base_url = base_url.rstrip("/")
        self._key = key
        self._request_timeout_s = request_timeout_s
        self._backoff = backoff
        self._rate_limit_backoff = Backoff(
            backoff.base_s, backoff.factor, backoff.max_s, MAX_RATE_LIMITED_ATTEMPTS
        )
        self.limit = ConcurrencyLimit(max_concurrency)
        self.away_since_s: float | None = None
        """by the monotonic clock, while it does not answer"""
        self.num_given_up = 0
        """requests given up since the last success"""
        self._last_success_s = -math.inf
        self._paused_until_s = -math.inf
        self._outage: asyncio.Task[bool] | None = None
        self._turn = asyncio.Lock()
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        self._client = httpx2.AsyncClient(
            headers=headers,
            timeout=httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=max_concurrency),
            http2=importlib.util.find_spec("h2") is not None,
        )

    @property
    def is_away(self) -> bool:
        """Whether it does not answer."""
        return self.away_since_s is not None

    @property
    def away_s(self) -> float:
        """Seconds since it stopped answering."""
        return 0.0 if self.away_since_s is None else time.monotonic() - self.away_since_s

    async def close(self) -> None:
        """Close the connections."""
        await self.forget_outage()
        await self._client.aclose()

    async def forget_outage(self) -> None:
        """Take it to be there again."""
        if self._outage is not None:
            self._outage.cancel()
            await asyncio.gather(self._outage, return_exceptions=True)
        self._outage, self.away_since_s = None, None

    # -- one request ---------------------------------------------------------------------------------------------

    async def answer(self, request: RawRequest, *, is_hasty: bool = False) -> Result | GaveUp:
        """The result of a request, however many attempts it takes.

        A hasty one is given up at the first time-out if nothing else was answered meanwhile.

        Raises:
            EngineError: the server refuses whatever is sent.
        """
        num_attempts = num_rate_limited = 0
        while True:
            if self.is_away:
                await self._is_there()
            sent_s, outcome = await self._attempt(request)
            if not isinstance(outcome, _Retry):
                if isinstance(outcome, Completion):
                    self._last_success_s, self.num_given_up = time.monotonic(), 0
                    self.limit.succeeded()
                return outcome
            if outcome.suspects_server and not await self._is_there() and not outcome.reached_server:
                continue  # the request never left; it is not its fault
            if outcome.is_rate_limit:
                num_rate_limited += 1
                delay_s = self._rate_limit_backoff.delay_s(num_rate_limited, outcome.retry_after_s)
                pause_s = min(outcome.retry_after_s or 0.0, MAX_RATE_LIMIT_PAUSE_S)
                self._paused_until_s = max(self._paused_until_s, time.monotonic() + pause_s)
            else:
                num_attempts += 1
                delay_s = self._backoff.delay_s(num_attempts, outcome.retry_after_s)
                is_stuck = outcome.is_timeout and self._last_success_s < sent_s
                if is_hasty and is_stuck and delay_s is not None:
                    self.num_given_up += 1
                    return GaveUp(outcome.failure, is_hasty=True)
            if delay_s is None:
                failure = outcome.failure
                failure.message += f" (given up after {num_attempts + num_rate_limited} attempts)"
                self.num_given_up += 1
                return GaveUp(failure)
            await asyncio.sleep(delay_s)

    async def _attempt(self, request: RawRequest) -> tuple[float, Result | _Retry]:
        """When it was sent, and what came of it."""
        http = self._http
        await self.limit.acquire()
        sent_s = time.monotonic()
        try:
            while (pause_s := self._paused_until_s - time.monotonic()) > 0:
                await asyncio.sleep(pause_s)
            sent_s = time.monotonic()
            answer = await self._send(request)
            outcome = completion(answer) if answer.status == 200 else self._refusal(answer)
            if isinstance(outcome, _Retry) and outcome.is_rate_limit:
                self.limit.refused(sent_s)
            return sent_s, outcome
        except TimeoutError:
            message = f"The server has not answered within {self._request_timeout_s:g} s"
            failure = Failure("request_timeout", message, status_code=504)
            return sent_s, _Retry(failure, suspects_server=True, is_timeout=True)
        except (http.ConnectError, http.ConnectTimeout) as error:
            failure = Failure("connection_error", f"No connection to the server: {error}", status_code=502)
            return sent_s, _Retry(failure, suspects_server=True, reached_server=False)
        except http.TransportError as error:
            message = f"The connection broke before the answer was complete: {error or type(error).__name__}"
            return sent_s, _Retry(Failure("connection_error", message, status_code=502), suspects_server=True)
        except http.RequestError as error:  # a body that cannot be decompressed
            return sent_s, _garbage(str(error))
        finally:
            self.limit.release()

    async def _send(self, request: RawRequest) -> Answer:
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
        return Answer(response.status_code, response.headers, response.content)

    def _refusal(self, answer: Answer) -> Failure | _Retry:
        """What becomes of a request that was answered with an error.

        Raises:
            EngineError: all other requests would be, too.
        """
        failure, status = failure_of(answer, self._key), answer.status
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
            return _Retry(failure, retry_after_s(answer), is_rate_limit=True)
        if status in (408, 409, 425) or status >= 500:
            return _Retry(failure, retry_after_s(answer), suspects_server=status in (502, 503, 504))
        return _garbage(f"status {status}") if status < 300 else failure

    # -- the server ----------------------------------------------------------------------------------------------

    async def check(self) -> ServerFacts:
        """See that the server is there before anything is sent, and what it tells of itself.

        Raises:
            ConfigError: the URL cannot be used, nothing answers there, or it refuses the key.
        """
        http = self._http
        try:
            answer = await self._client.get(f"{self.base_url}/models", timeout=CONNECT_TIMEOUT_S)
        except (http.InvalidURL, http.UnsupportedProtocol) as error:
            raise ConfigError(
                f"--base-url {self.base_url} is no URL ({error}); write e.g. http://localhost:8000/v1"
            ) from error
        except http.ConnectError as error:
            raise ConfigError(
                f"no server answers at {self.base_url} ({error}); start it, or correct --base-url"
            ) from error
        except http.RequestError:
            return ServerFacts()  # it is there, and slow or not well: requests have the patience for that
        if answer.status_code in (401, 403):
            raise ConfigError(
                f"{self.base_url} refuses the key with {answer.status_code}; "
                "name the environment variable that holds a valid one with --api-key-env"
            )
        models = _json(answer.content)
        facts = await self._facts(_software(models))
        return facts._replace(max_model_len=_count(_first_model(models).get("max_model_len")) or None)

    async def _facts(self, software: Software | None) -> ServerFacts:
        if software == "vllm":
            return vllm_facts((await self._get("/metrics")).decode(errors="replace"))
        if software == "sglang":
            info = _json(await self._get("/server_info")) or _json(await self._get("/get_server_info"))
            return sglang_facts(info)
        if software == "llamacpp":
            return llamacpp_facts(_json(await self._get("/props")))
        return ServerFacts()

    async def flush_cache(self) -> bool:
        """Have an SGLang server forget its prefixes; whether it did."""
        try:
            answer = await self._client.post(f"{self._root}/flush_cache", timeout=CONNECT_TIMEOUT_S)
        except self._http.RequestError:
            return False
        return bool(answer.status_code == 200)

    async def ping_s(self) -> float:
        """Seconds until it has answered a question that costs nothing."""
        began_s = time.perf_counter()
        await self._probe()
        return time.perf_counter() - began_s

    async def rest(self, seconds: float) -> None:
        """Send nothing for so long: it fails on whatever it is sent. It begins again with one request at a time."""
        await self.forget_outage()
        self.away_since_s = time.monotonic()
        self.num_given_up = 0
        self.limit.restart()
        self._outage = asyncio.get_running_loop().create_task(self._outlast(seconds))

    async def _get(self, path: str) -> bytes:
        """What is at a path beside the API; nothing where that fails."""
        try:
            answer = await self._client.get(self._root + path, timeout=CONNECT_TIMEOUT_S)
        except self._http.RequestError:
            return b""
        return bytes(answer.content) if answer.status_code == 200 else b""

    @property
    def _root(self) -> str:
        return self.base_url.removesuffix("/v1")

    async def _is_there(self) -> bool:
        """Wait until the server answers a probe; whether it did at once."""
        if self._outage is None or self._outage.done():
            self._outage = asyncio.get_running_loop().create_task(self._outlast())
        return await asyncio.shield(self._outage)

    async def _outlast(self, rest_s: float = 0.0) -> bool:
        if rest_s == 0.0 and await self._probe():
            return True
        self.away_since_s = self.away_since_s or time.monotonic()
        wait_s = rest_s or PROBE_EVERY_S
        while True:
            await asyncio.sleep(wait_s)
            if await self._probe():
                self.away_since_s = None
                return False
            wait_s = PROBE_EVERY_S if rest_s else min(1.5 * wait_s, MAX_PROBE_EVERY_S)

    async def _probe(self) -> bool:
        try:
            answer = await self._client.get(f"{self.base_url}/models", timeout=CONNECT_TIMEOUT_S)
        except self._http.RequestError:
            return False
        return bool(answer.status_code < 500)


def api_key(variable: str) -> str:
    """The key in an environment variable.

    Raises:
        ConfigError: there is none that can be sent.
    """
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        state = "holds no key that can be sent" if key else "is not set"
        raise ConfigError(f"--api-key-env {variable}: the environment variable {state}; put the key there")
    return key


# -- what servers tell of themselves -------------------------------------------------------------------------------


def vllm_facts(metrics: str) -> ServerFacts:
    """Out of vLLM's /metrics; several engines behind one port are as one with all their memory."""
    capacity, block_size = 0, 1
    for labels in re.findall(r"^vllm:cache_config_info\{(.*)\}", metrics, re.MULTILINE):
        found = dict(re.findall(r'(\w+)="(\d+)"', labels))
        if "num_gpu_blocks" in found and "block_size" in found:
            block_size = int(found["block_size"])
            capacity += (int(found["num_gpu_blocks"]) - 1) * block_size  # one block stands for none
    return ServerFacts("vllm", capacity if capacity > 0 else None, block_size)


def sglang_facts(info: Any) -> ServerFacts:
    """Out of SGLang's /server_info."""
    if not isinstance(info, dict):
        return ServerFacts("sglang")
    states = info.get("internal_states")
    state = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    replicas = max(_count(info.get("dp_size")), 1)
    sequences = _count(state.get("effective_max_running_requests_per_dp")) * replicas
    policy = info.get("schedule_policy")
    return ServerFacts(
        "sglang",
        _count(info.get("max_total_num_tokens")) * replicas or None,
        max(_count(info.get("page_size")), 1),
        sequences or None,
        policy if isinstance(policy, str) else None,
    )


def llamacpp_facts(props: Any) -> ServerFacts:
    """Out of llama.cpp's /props. Its slots may share one context, so that is all that is counted on."""
    if not isinstance(props, dict):
        return ServerFacts("llamacpp")
    settings = props.get("default_generation_settings")
    context = _count(settings.get("n_ctx")) if isinstance(settings, dict) else 0
    return ServerFacts("llamacpp", context or None, max_num_seqs=_count(props.get("total_slots")) or None)


def _software(models: Any) -> Software | None:
    """What a server is, as its /models says."""
    owner = _first_model(models).get("owned_by")
    return owner if owner in ("vllm", "sglang", "llamacpp") else None


def _first_model(models: Any) -> dict[str, Any]:
    listed = models.get("data") if isinstance(models, dict) else None
    return listed[0] if isinstance(listed, list) and listed and isinstance(listed[0], dict) else {}


def _json(content: bytes) -> Any:
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        return None


# -- answers -------------------------------------------------------------------------------------------------------


def completion(answer: Answer) -> Completion | _Retry:
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


def _count(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0


def _garbage(found: str) -> _Retry:
    message = f"The server's answer is no completion: {found}"
    return _Retry(Failure("invalid_response", message, status_code=502))


def failure_of(answer: Answer, key: str | None = None) -> Failure:
    """An error in the server's own words, but for the key: {"error": {message, code, param}}, or that object itself,
    or any text.
    """
    content = answer.content if key is None else answer.content.replace(key.encode(), b"[api key]")
    try:
        document = orjson.loads(content)
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
        text = content[:500].decode(errors="replace").strip()
        message = f"The server answered with status {answer.status}" + (f": {text}" if text else "")
    return Failure(code, message, param if isinstance(param, str) else None, answer.status)


def retry_after_s(answer: Answer) -> float | None:
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
