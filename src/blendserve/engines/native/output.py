"""The output of one running request: its tokens, and when and why it ends. Semantics are vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from blendserve.engines.chat import MAX_MARK_CHARACTERS, ChatAnswer
from blendserve.request import Completion, FinishReason, SamplingParams, TokenLogprob
from blendserve.tokenizer import TextStream


class Detokenizer(Protocol):
    """What the executor needs of a tokenizer."""

    eos_token_ids: frozenset[int]
    special_tokens: frozenset[str]

    def token_id(self, token: str) -> int | None:
        """Id of a token, by its text; None if there is none."""
        ...

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

    Text is made once, at the end; only a request with stop strings, or one that must know where its reasoning ends,
    needs it token by token.

    Args:
        params: of the request.
        max_tokens: most tokens to generate.
        tokenizer: None where no text is wanted: it is then empty and stop strings never match.
        answer: what the text is read with, if it is an answer in a chat of an engine that has parsers.
        follows_reasoning: whether `is_reasoning` must be right.
    """

    __slots__ = ("_answer", "_begin", "_checked", "_ends", "_searched_from", "_skip_special_tokens", "_stream",
                 "_text", "_tokenizer", "finish_reason", "logprobs", "max_tokens", "params", "stop_reason",
                 "token_ids")  # fmt: skip

    def __init__(
        self,
        params: SamplingParams,
        max_tokens: int,
        tokenizer: Detokenizer | None,
        answer: ChatAnswer | None = None,
        *,
        follows_reasoning: bool = False,
    ) -> None:
        self.params = params
        self.max_tokens = max_tokens
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self._tokenizer = tokenizer
        self._answer = answer
        self._skip_special_tokens = (
            params.skip_special_tokens if answer is None else answer.skip_special_tokens
        )
        needs_text = bool(params.stop) or follows_reasoning
        self._stream = tokenizer.stream(self._skip_special_tokens) if tokenizer and needs_text else None
        self._text = ""
        self._checked = 0  # characters of _text in which a stop string may no longer end
        self._searched_from = 0  # characters of _text in which none may begin
        self._ends = None if answer is None else answer.reasoning_ends  # of the reasoning that goes on
        self._begin = 0  # characters of _text that are reasoning, once it has ended

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

    def completion(self, num_prompt_tokens: int, identity: bytes = b"") -> Completion:
        """The finished output; for `identity` see `ChatAnswer.read`."""
        assert self.finish_reason is not None
        completion = Completion(
            token_ids=self.token_ids,
            text=self._final_text(),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=self.logprobs if self.params.logprobs is not None else None,
            num_prompt_tokens=num_prompt_tokens,
        )
        if self._answer is not None and self._tokenizer is not None:
            read = self._answer.read(completion.text, self.token_ids, self.finish_reason, identity)
            completion.message, completion.finish_reason = read.message, read.finish_reason
            completion.num_reasoning_tokens = read.num_reasoning_tokens
            if not read.has_logprobs:
                completion.logprobs = None
        return completion

    @property
    def _eos_token_ids(self) -> frozenset[int]:
        return self._tokenizer.eos_token_ids if self._tokenizer else frozenset()

    def _finds_stop_string(self, token_id: int) -> bool:
        """Whether the text up to this token holds a stop string; if so, cut the text there."""
        if self._stream is None:
            return False
        known = len(self._text)
        self._text += self._stream.push(token_id)
        if len(self.token_ids) >= self.max_tokens:
            self._text += self._stream.flush()
        self._look_for_end_of_reasoning(known)
        if len(self.token_ids) <= self.params.min_tokens:
            self._checked = len(self._text)
            return False
        if self.is_reasoning and not self._counts_in_reasoning:
            return False
        for stop in self.params.stop:
            # It may have begun in text seen before, but not ended there.
            found = self._text.find(stop, max(self._searched_from, self._checked - len(stop) + 1))
            if found >= 0:
                self.stop_reason = stop
                self._text = self._text[: found + len(stop) * self.params.include_stop_str_in_output]
                return True
        self._checked = len(self._text)
        return False

    @property
    def is_reasoning(self) -> bool:
        """Whether the output up to here is reasoning that goes on; right where it is followed."""
        return self._ends is not None

    @property
    def has_content(self) -> bool:
        """Whether some of the text known is behind the reasoning."""
        return not self.is_reasoning and len(self._text) > self._begin

    @property
    def _counts_in_reasoning(self) -> bool:
        """Whether stop strings count in reasoning."""
        return self._answer is None or self._answer.stop_in_reasoning

    def _look_for_end_of_reasoning(self, known: int) -> None:
        """Look for it in the text, which was looked through up to `known`."""
        if self._ends is None:
            return
        end = self._ends.search(self._text, max(0, known - MAX_MARK_CHARACTERS))
        if end is None:
            return
        self._ends = None
        self._begin = end.end()
        if not self._counts_in_reasoning:
            self._searched_from = self._begin
            self._checked = max(self._checked, self._begin)

    def _final_text(self) -> str:
        if self._tokenizer is None:
            return ""
        if isinstance(self.stop_reason, str):
            return self._text
        # The token that ended it is no part of the text, unless asked for; special ones are skipped anyway.
        ended_by_token = self.finish_reason == "stop" and not self.params.include_stop_str_in_output
        return self._tokenizer.decode(
            self.token_ids[:-1] if ended_by_token else self.token_ids,
            skip_special_tokens=self._skip_special_tokens,
        )
