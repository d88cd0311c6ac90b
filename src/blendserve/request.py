"""What is asked and what comes back: sampling parameters, the request table, completions, failures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from blendserve.tokens import PromptTokens

FinishReason = Literal["stop", "length", "tool_calls"]


class Adapter(NamedTuple):
    """A LoRA adapter: the name that lines call it by, and where it is."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one completion are chosen; names and defaults are vLLM's.

    `top_k` 0 and `top_p` 1.0 and `min_p` 0.0 switch the filter off; `temperature` 0.0 is greedy. `logprobs` None asks
    for none, 0 for those of the chosen tokens, k for the k most likely ones besides. `seed` is the request's
    own, if it brings one; what is sampled with is `RequestTable.seeds`.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    """tokens whose log probabilities are told in place of those of the most likely ones"""
    prompt_logprobs: int | None = None
    """likely tokens to report at each place of the prompt, as `logprobs`"""
    echo: bool = False
    """whether the prompt is told again in front of the output"""
    extra: bytes = b""
    """JSON object of what only some engines can do, by the names of vLLM's SamplingParams; empty: nothing"""
    chat: bytes = b""
    """JSON object of what an answer in a chat is read with, by the names of vLLM's ChatCompletionRequest: tools and the
    like, and `stop_in_reasoning`; empty: the answer is text as it comes"""
    adapter: Adapter | None = None
    """None: the model as it is"""


class RawRequest(NamedTuple):
    """A request as the user wrote it."""

    url: str
    """path, such as /v1/chat/completions"""
    body: bytes
    """a JSON object"""


class RawRequests(Sequence[RawRequest]):
    """Some of a sequence of requests, which are read when asked for."""

    def __init__(self, requests: Sequence[RawRequest], chosen: NDArray[np.integer]) -> None:
        self._requests = requests
        self._chosen = chosen

    def __len__(self) -> int:
        return len(self._chosen)

    @overload
    def __getitem__(self, request: int) -> RawRequest: ...
    @overload
    def __getitem__(self, request: slice) -> list[RawRequest]: ...
    def __getitem__(self, request: int | slice) -> RawRequest | list[RawRequest]:
        """A request, by its place among those chosen."""
        if isinstance(request, slice):
            return [self._requests[int(index)] for index in self._chosen[request]]
        return self._requests[int(self._chosen[request])]


@dataclass(slots=True)
class RequestTable:
    """The requests of a job as columns; row i of each column belongs to request i.

    A request is one completion: a line that asks for `n` completions is `n` rows that share their prompt's tokens.
    """

    tokens: PromptTokens
    """prompts as token ids"""
    max_tokens: NDArray[np.int32]
    """[num_requests] most tokens that may be generated, at least 1"""
    declared_tokens: NDArray[np.int32]
    """[num_requests] output length that is known beforehand (`ignore_eos`) or was declared, right or wrong; else 0"""
    params: Sequence[SamplingParams]
    """the distinct sampling parameters of the job"""
    params_index: NDArray[np.int32]
    """[num_requests] index into `params`"""
    seeds: NDArray[np.uint64]
    """[num_requests] seed of each request's sampling: its own, else derived from the job's seed and its identity, so
    that neither its place in the file nor what ran before changes what it draws"""
    raw: Sequence[RawRequest] | None = None
    """[num_requests] the requests as they were written, for engines that forward them; a request is then a line with
    all its completions, and the other columns serve planning only. For vLLM those with images, audio or video, whose
    tokens are a likeness for planning; the others have no body"""

    def __post_init__(self) -> None:
        num_requests = len(self.tokens)
        for name in ("max_tokens", "declared_tokens", "params_index", "seeds"):
            if len(getattr(self, name)) != num_requests:
                raise ValueError(
                    f"column {name} has {len(getattr(self, name))} rows, expected {num_requests}"
                )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def prefix_groups(self) -> NDArray[np.int32] | None:
        """[num_requests] requests share KV only with those of the same number, and with nobody where it is -1.

        A number is that of an adapter, 0 for none. Log probabilities of a prompt need all of it computed, so such a
        request finds nothing in the cache. None where all may share with all.
        """
        numbers: dict[Adapter | None, int] = {None: 0}
        by_params = [
            numbers.setdefault(params.adapter, len(numbers)) if params.prompt_logprobs is None else -1
            for params in self.params
        ]
        if len(set(by_params)) <= 1 and -1 not in by_params:
            return None
        return np.asarray(by_params, dtype=np.int32)[self.params_index]

    @property
    def prompt_tokens(self) -> NDArray[np.int32]:
        """[num_requests] prompt lengths in tokens."""
        return self.tokens.lengths

    def take(self, requests: NDArray[np.integer]) -> RequestTable:
        """The given requests, in that order; the tokens are not copied."""
        return RequestTable(
            tokens=self.tokens.take(requests),
            max_tokens=self.max_tokens[requests],
            declared_tokens=self.declared_tokens[requests],
            params=self.params,
            params_index=self.params_index[requests],
            seeds=self.seeds[requests],
            raw=None if self.raw is None else RawRequests(self.raw, requests),
        )

    def sampling_params(self, request: int) -> SamplingParams:
        """Sampling parameters of one request."""
        return self.params[int(self.params_index[request])]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of one generated token and of the most likely alternatives at its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log probability), most likely first"""


@dataclass(slots=True)
class Completion:
    """The finished output of one request."""

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    """the stop string or stop token id that ended it; None for end of sequence or length"""
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    """of the prompt's tokens from the second one on"""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """prompt tokens whose KV came from the prefix cache or from another request of the same step"""
    output_tokens_est: int = 0
    """output tokens that were expected when the request was admitted; 0 where the engine does not tell"""
    message: dict[str, Any] | None = None
    """the assistant's message where the engine read it out of the text: its reasoning, its tool calls"""
    num_reasoning_tokens: int | None = None
    """output tokens of the reasoning; None where the engine does not tell it apart"""
    body: dict[str, Any] | None = None
    """the whole answer as a server gave it, where the request was forwarded; there are no token ids then"""

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated; 0 where a server does not tell."""
        if self.body is None:
            return len(self.token_ids)
        usage = self.body.get("usage")
        count = usage.get("completion_tokens") if isinstance(usage, dict) else None
        return count if isinstance(count, int) and count > 0 else 0


@dataclass(slots=True)
class Failure:
    """Why one request has no output; the rest of the job goes on."""

    code: str
    message: str
    param: str | None = None
    status_code: int = 500


Result = Completion | Failure


@dataclass(slots=True)
class StepStats:
    """Facts of one engine step."""

    duration_s: float
    num_prefill_tokens: int
    """prompt (or recomputed) tokens computed in this step"""
    num_decode_tokens: int
    kv_tokens_read: int
    """KV tokens that the decodes of this step attended to"""
    num_running: int
    num_waiting: int
    kv_usage_ratio: float
    compute_s: float = 0.0
    """modelled time of the compute-bound operators of this step"""
    memory_s: float = 0.0
    """modelled time of decode attention in this step"""
    num_retracted: int = 0
    num_retried_requests: int = 0
    """requests that were running when the engine failed before this step, and run again"""
    num_engine_restarts: int = 0
    """times that the engine died before this step and was opened anew"""


@dataclass(slots=True)
class StepOutput:
    """What one engine step produced."""

    stats: StepStats
    results: list[tuple[int, Result]] = field(default_factory=list)
    """(request, result) of every request that finished in this step"""
