"""Structured outputs: which tokens may follow, by a JSON schema, a regular expression, a choice or a grammar.

Matching is llguidance's. A grammar takes up to a second to compile, so that is done in a thread beside the model's
first pass over the prompt; what an output stands at is then a function of its tokens alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from blendserve.engines.native.output import Detokenizer
from blendserve.errors import RequestError
from blendserve.request import SamplingParams

BITS = 32
"""tokens in a word of a mask"""
MAX_KEPT = 256
"""compiled grammars that are kept for further requests"""

_SUBSCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def check_constraint(params: SamplingParams) -> None:
    """Make sure that what a request's output must look like can be followed.

    Raises:
        RequestError: it cannot, or llguidance is not installed.
    """
    constraint = orjson.loads(params.extra).get("structured_outputs")
    if constraint is not None and (problem := _problem(orjson.dumps(constraint))) is not None:
        raise RequestError(*problem, param="structured_outputs")


@functools.lru_cache(maxsize=4096)
def _problem(constraint: bytes) -> tuple[str, str] | None:
    """Code and message of the error that a constraint is; None if it is none."""
    try:
        from llguidance import LLMatcher
    except ImportError:
        return (
            "unsupported_parameter",
            "Structured outputs need llguidance: pip install 'blendserve[guided]', or remove the constraint.",
        )
    try:
        is_error, problems = LLMatcher.validate_grammar_with_warnings(_definition(constraint))
    except (ValueError, TypeError) as error:
        is_error, problems = True, [str(error)]
    if not is_error:
        return None
    kind = next(_KINDS[name] for name in orjson.loads(constraint) if name in _KINDS)
    reason = " ".join(problems[0].split())  # it draws pictures
    return "invalid_request", f"No output can be held to this {kind}: {reason}. Correct the {kind}."


_KINDS = {
    "json": "JSON schema",
    "json_object": "JSON object",
    "regex": "regular expression",
    "choice": "choice",
    "grammar": "grammar",
}
"""keys of vLLM's StructuredOutputsParams, of which a constraint has one, in words"""


def _definition(constraint: bytes) -> str:
    """A constraint in llguidance's terms.

    Raises:
        ValueError: it is none.
    """
    from llguidance import LLMatcher, grammar_from

    values: dict[str, Any] = orjson.loads(constraint)
    schema = {"type": "object"} if "json_object" in values else values.get("json")
    if schema is None:
        for kind in ("regex", "choice", "grammar"):
            if kind in values:
                return str(grammar_from(kind, values[kind]))
    if isinstance(schema, str):
        schema = orjson.loads(schema)
    if values.get("disable_additional_properties"):
        schema = _closed(schema)
    options: dict[str, Any] = {"whitespace_flexible": not values.get("disable_any_whitespace")}
    if pattern := values.get("whitespace_pattern"):
        options["whitespace_pattern"] = pattern
    return str(LLMatcher.grammar_from_json_schema(schema, defaults=options))


def _closed(schema: Any) -> Any:
    """A schema whose objects have no other properties than those it names, in place."""
    if isinstance(schema, list):
        for part in schema:
            _closed(part)
    elif isinstance(schema, dict):
        for name, value in schema.items():
            if name in _SUBSCHEMAS_BY_NAME and isinstance(value, dict):
                _closed([*value.values()])
            elif name not in ("const", "default", "enum", "examples"):
                _closed(value)
        if "properties" in schema or "patternProperties" in schema:
            schema.setdefault("additionalProperties", False)
    return schema


class Grammar:
    """Where one output stands in what it must look like."""

    def __init__(self, compiled: Future[Any], eos_token_ids: frozenset[int]) -> None:
        self._compiled = compiled
        self._eos_token_ids = eos_token_ids
        self._matcher: Any = None
        self._has_ended = False
        self.is_waiting = False
        """True while the output has not come to what the grammar is for, as in reasoning"""

    @property
    def matcher(self) -> Any:
        """llguidance's; waits until the grammar is compiled."""
        if self._matcher is None:
            self._matcher = self._compiled.result().deep_copy()
        return self._matcher

    @property
    def is_restrictive(self) -> bool:
        """Whether it has a say in the next token; False once the output has come to its end and goes on."""
        return not self._has_ended and not self.is_waiting

    @property
    def must_end(self) -> bool:
        """Whether nothing can follow but the end."""
        return not self.is_waiting and bool(self.matcher.is_stopped())

    @property
    def error(self) -> str:
        """Why it cannot be followed; empty if it can."""
        if (error := self._compiled.exception()) is not None:
            return str(error)
        return str(self.matcher.get_error()) if self.matcher.is_error() else ""

    def begin(self, token_id: int | None) -> None:
        """The output has come to what the grammar is for; with this token, if it can begin with it."""
        self.is_waiting = False
        if token_id is not None and not self.error and self.matcher.validate_tokens([token_id]):
            self.matcher.consume_token(token_id)

    def append(self, token_id: int) -> bool:
        """Take note of the next token; whether it is the end."""
        if self._has_ended or self.is_waiting:
            return False
        if token_id in self._eos_token_ids:
            self._has_ended = True
        elif not self.must_end:
            self.matcher.consume_token(token_id)
        return self._has_ended


class Grammars:
    """The grammars of a tokenizer.

    Args:
        tokenizer: with at least one token that ends an output.
        vocab_size: tokens that the model knows.
    """

    def __init__(self, tokenizer: Detokenizer, vocab_size: int) -> None:
        self._detokenizer = tokenizer
        self._vocab_size = vocab_size
        self._tokenizer: Any = None
        self._executor: Any = None
        self._thread = ThreadPoolExecutor(1, "grammar")
        self._matchers: dict[bytes, Future[Any]] = {}

    def open(self, constraint: bytes) -> Grammar:
        """The beginning of an output; `constraint` is JSON by the names of vLLM's StructuredOutputsParams."""
        compiled = self._matchers.pop(constraint, None)
        if compiled is None:
            compiled = self._thread.submit(self._compile, constraint)
        self._matchers[constraint] = compiled  # the most recently used last
        if len(self._matchers) > MAX_KEPT:
            del self._matchers[next(iter(self._matchers))]
        return Grammar(compiled, self._detokenizer.eos_token_ids)

    def masks(self, grammars: Sequence[Grammar]) -> NDArray[np.int32]:
        """[num_grammars, vocab_size / 32] bit i % 32 of word i // 32: whether token i may follow."""
        if not grammars:
            return np.empty((0, 0), np.int32)
        matchers = [(grammar.matcher, row) for row, grammar in enumerate(grammars)]
        masks = np.zeros((len(grammars), -(-self._tokenizer.vocab_size // BITS)), np.int32)
        self._executor.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, masks.shape[1] * 4, len(masks))
        return masks

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, constraint: bytes) -> Any:
        from llguidance import LLExecutor, LLMatcher, LLTokenizer

        if self._tokenizer is None:
            self._executor = LLExecutor()
            definition, num_ids = self._detokenizer.definition
            self._tokenizer = LLTokenizer(
                definition,
                n_vocab=max(self._vocab_size, num_ids),
                eos_token=sorted(self._detokenizer.eos_token_ids),
            )
        return LLMatcher(self._tokenizer, _definition(constraint), log_level=0)


def packed(token_ids: Iterable[int], vocab_size: int) -> NDArray[np.int32]:
    """A mask as of `Grammars.masks` of these tokens."""
    is_in = np.zeros(-(-vocab_size // BITS) * BITS, np.bool_)
    is_in[np.fromiter(token_ids, np.int64)] = True
    return np.packbits(is_in, bitorder="little").view(np.int32)
