"""What the offline API returns, by vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blendserve.request import Failure


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log probability of a token at its place."""

    logprob: float
    rank: int | None = None
    """1 is the most likely token; None for a chosen token that is not among the likely ones asked for"""
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    """0 .. n-1"""
    text: str
    token_ids: Sequence[int]
    """empty where a server ran the request, which gives text only"""
    cumulative_logprob: float | None = None
    """None unless log probabilities were asked for"""
    logprobs: list[dict[int, Logprob]] | None = None
    """[num_tokens] by token id, the chosen token included"""
    finish_reason: str | None = None
    """stop or length"""
    stop_reason: int | str | None = None
    """the stop string or stop token id that ended it; None for end of sequence or length"""

    def finished(self) -> bool:
        """Whether nothing follows, which is always so here."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The completions of a prompt."""

    request_id: str
    """number of the request, counted over all calls of an `LLM`"""
    prompt: str | None
    """the text that was given, or what the chat template made of the messages; None where token ids were given"""
    prompt_token_ids: list[int] | None
    """None where a server tokenized the prompt"""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """[num_prompt_tokens] by token id, None for the first token; None unless asked for"""
    outputs: Sequence[CompletionOutput] = ()
    """empty where `error` is set"""
    finished: bool = True
    metrics: Any = None
    lora_request: Any = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
    num_cached_tokens: int | None = None
    """prompt tokens that were not computed for this request, because another one had them computed"""
    error: Failure | None = None
    """why there are no outputs; only with `on_error="return"`. vLLM has no such field"""
