"""The output of one running request: its tokens, and when and why it ends. Semantics are vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from blendserve.request import Completion, FinishReason, SamplingParams, TokenLogprob
from blendserve.tokenizer import TextStream


class Detokenizer(Protocol):
    """What the executor needs of a tokenizer."""

    eos_token_ids: frozenset[int]

    @property
    def definition(self) -> tuple[str, int]:
        """The text of its tokenizer.json, and one more than its highest token id."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokens of a text."""
        ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the tokens."""
        ...

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        """The same token by token."""
        ...


class RequestOutput:
    """Tokens generated for one request so far.

    Text is made once, at the end; only a request with stop strings needs it token by token.

    Args:
        params: of the request.
        max_tokens: most tokens to generate.
        tokenizer: None where no text is wanted: it is then empty and stop strings never match.
    """

    __slots__ = ("_checked", "_stream", "_text", "_tokenizer", "finish_reason", "logprobs", "max_tokens", "params",
                 "stop_reason", "token_ids")  # fmt: skip

    def __init__(self, params: SamplingParams, max_tokens: int, tokenizer: Detokenizer | None) -> None:
        self.params = params
        self.max_tokens = max_tokens
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self._tokenizer = tokenizer
        self._stream = tokenizer.stream(params.skip_special_tokens) if tokenizer and params.stop else None
        self._text = ""
        self._checked = 0  # characters of _text in which a stop string may no longer end

    def suppressed(self, num_tokens: int) -> tuple[int, ...]:
        """Tokens that would end the request after `num_tokens` although it still owes some of its `min_tokens`."""
        if num_tokens >= self.params.min_tokens:
            return ()
        return (*self._eos_token_ids, *self.params.stop_token_ids)

    def append(
        self, token_id: int, logprob: TokenLogprob | None = None, *, ends_grammar: bool = False
    ) -> bool:
        """Add a token; True if the request is complete with it. The end of a grammar goes before `min_tokens`."""
        self.token_ids.append(token_id)
        if logprob is not None:
            self.logprobs.append(logprob)
        has_min_tokens = ends_grammar or len(self.token_ids) >= self.params.min_tokens
        if has_min_tokens and not self.params.ignore_eos and token_id in self._eos_token_ids:
            self.finish_reason = "stop"
        elif has_min_tokens and token_id in self.params.stop_token_ids:
            self.finish_reason, self.stop_reason = "stop", token_id
        elif self._finds_stop_string(token_id):
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.max_tokens:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def completion(self, num_prompt_tokens: int) -> Completion:
        """The finished output."""
        assert self.finish_reason is not None
        return Completion(
            token_ids=self.token_ids,
            text=self._final_text(),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=self.logprobs if self.params.logprobs is not None else None,
            num_prompt_tokens=num_prompt_tokens,
        )

    @property
    def _eos_token_ids(self) -> frozenset[int]:
        return self._tokenizer.eos_token_ids if self._tokenizer else frozenset()

    def _finds_stop_string(self, token_id: int) -> bool:
        """Whether the text up to this token holds a stop string; if so, cut the text there."""
        if self._stream is None:
            return False
        self._text += self._stream.push(token_id)
        if len(self.token_ids) >= self.max_tokens:
            self._text += self._stream.flush()
        if len(self.token_ids) <= self.params.min_tokens:
            self._checked = len(self._text)
            return False
        for stop in self.params.stop:
            # It may have begun in text seen before, but not ended there.
            found = self._text.find(stop, max(0, self._checked - len(stop) + 1))
            if found >= 0:
                self.stop_reason = stop
                self._text = self._text[: found + len(stop) * self.params.include_stop_str_in_output]
                return True
        self._checked = len(self._text)
        return False

    def _final_text(self) -> str:
        if self._tokenizer is None:
            return ""
        if isinstance(self.stop_reason, str):
            return self._text
        # The token that ended it is no part of the text, unless asked for; special ones are skipped anyway.
        ended_by_token = self.finish_reason == "stop" and not self.params.include_stop_str_in_output
        return self._tokenizer.decode(
            self.token_ids[:-1] if ended_by_token else self.token_ids,
            skip_special_tokens=self.params.skip_special_tokens,
        )
