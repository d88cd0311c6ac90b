"""What a request's parameters do to its logits: biases, penalties, bad words, allowed tokens, a grammar.

All of it is a function of the parameters, the prompt and the tokens generated so far, so that neither the batch nor a
retraction changes it. Names and semantics are vLLM's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import orjson
from numpy.typing import NDArray

from blendserve.engines.native.grammar import Grammar, packed
from blendserve.engines.native.output import Detokenizer
from blendserve.engines.native.sampler import LogitEdits, Seen
from blendserve.errors import RequestError


@dataclass(frozen=True, slots=True)
class LogitRules:
    """`SamplingParams.extra` in the form in which it is applied; all requests with the same parameters share it."""

    allowed: NDArray[np.int32] | None
    """see `LogitEdits.allowed`"""
    bias: tuple[NDArray[np.int64], NDArray[np.float32]] | None
    bad_words: tuple[tuple[int, ...], ...]
    """tokens of each"""
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    constraint: bytes
    """JSON of vLLM's StructuredOutputsParams; empty: the output is free"""

    @classmethod
    def of(cls, extra: bytes, tokenizer: Detokenizer | None, vocab_size: int) -> LogitRules:
        """Read `SamplingParams.extra`.

        Raises:
            RequestError: a bad word has no tokens.
        """
        values = orjson.loads(extra)
        allowed, bias = values.get("allowed_token_ids"), values.get("logit_bias")
        constraint = values.get("structured_outputs")
        return cls(
            allowed=None if allowed is None else packed(allowed, vocab_size),
            bias=None
            if bias is None
            else (np.array([*map(int, bias)], np.int64), np.array([*bias.values()], np.float32)),
            bad_words=_bad_words(values.get("bad_words", ()), tokenizer),
            repetition_penalty=values.get("repetition_penalty", 1.0),
            frequency_penalty=values.get("frequency_penalty", 0.0),
            presence_penalty=values.get("presence_penalty", 0.0),
            constraint=b"" if constraint is None else orjson.dumps(constraint),
        )

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that were seen are treated differently."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)


def _bad_words(words: Sequence[str], tokenizer: Detokenizer | None) -> tuple[tuple[int, ...], ...]:
    """The tokens of words at the start of a text, and those in its midst where one token makes the difference.

    Source: `update_from_tokenizer` of vLLM.
    """
    found: list[tuple[int, ...]] = []
    for word in words:
        assert tokenizer is not None
        text = word.lstrip()
        at_start = tuple(tokenizer.encode(text, add_special_tokens=False))
        if not at_start:
            raise RequestError(
                "invalid_request", f"The bad word {word!r} has no tokens. Remove it.", param="bad_words"
            )
        found.append(at_start)
        in_midst = tuple(tokenizer.encode(f" {text}", add_special_tokens=False))
        if in_midst and in_midst[0] != at_start[0] and len(in_midst) == len(at_start):
            found.append(in_midst)
    return tuple(found)


class LogitState:
    """The rules of one running request with what they need to know of its tokens.

    Args:
        rules: of its parameters.
        prompt: its token ids.
        grammar: that its output must follow; None where it is free.
    """

    def __init__(self, rules: LogitRules, prompt: NDArray[np.uint32], grammar: Grammar | None) -> None:
        self.grammar = grammar
        self._rules = rules
        self._counts: _Counts | None = None
        if rules.has_penalties:
            self._counts = _Counts(prompt if rules.repetition_penalty != 1.0 else prompt[:0])

    def begin(self, token_id: int | None) -> None:
        """Let a grammar that waits for the end of reasoning begin; see `Grammar.begin`."""
        if self.grammar is not None and self.grammar.is_waiting:
            self.grammar.begin(token_id)

    def append(self, token_id: int) -> bool:
        """Take note of the next token; whether it is the end of what the grammar describes."""
        if self._counts is not None:
            self._counts.add(token_id)
        return self.grammar is not None and self.grammar.append(token_id)

    def suppressed(self, token_ids: Sequence[int]) -> list[int]:
        """Tokens that would complete a bad word behind these."""
        return [
            word[-1]
            for word in self._rules.bad_words
            if len(word) <= len(token_ids) + 1
            and tuple(token_ids[len(token_ids) - len(word) + 1 :]) == word[:-1]
        ]

    def edits(self, mask: NDArray[np.int32] | None) -> LogitEdits | None:
        """What is done to the logits of the next token; `mask` is the grammar's, None if it has no say."""
        rules, counts = self._rules, self._counts
        seen = None
        if counts is not None and counts.size:
            seen = Seen(
                counts.token_ids,
                counts.counts,
                rules.repetition_penalty,
                rules.frequency_penalty,
                rules.presence_penalty,
            )
        if mask is None and rules.allowed is None and rules.bias is None and seen is None:
            return None
        return LogitEdits(mask, rules.allowed, rules.bias, seen)


class _Counts:
    """Tokens that were seen and how often they were generated, as columns that grow."""

    def __init__(self, prompt: NDArray[np.uint32]) -> None:
        ids = np.unique(prompt)
        self.size = len(ids)
        self._ids = np.zeros(max(2 * self.size, 64), np.int64)
        self._ids[: self.size] = ids
        self._counts = np.zeros(len(self._ids), np.float32)
        self._places = {token_id: place for place, token_id in enumerate(ids.tolist())}

    def add(self, token_id: int) -> None:
        place = self._places.setdefault(token_id, self.size)
        if place == self.size:
            if place == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[place] = token_id
            self.size += 1
        self._counts[place] += 1

    @property
    def token_ids(self) -> NDArray[np.int64]:
        return self._ids[: self.size]

    @property
    def counts(self) -> NDArray[np.float32]:
        return self._counts[: self.size]
