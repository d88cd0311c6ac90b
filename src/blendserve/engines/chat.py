"""Answers in chats, taken apart: reasoning, content, calls of tools.

```
SamplingParams.chat ──ChatReader.open──▶ ChatAnswer ── where reasoning ends ──▶ the running request
                                             └──read(text)──▶ the assistant's message
```

The parsers are for engines that bring none. Their names are vLLM's, and so is what they make of a text, a broken one
included; `vllm_chat` reads with vLLM's own. How a message is made of what they find is the same for both.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import string
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import orjson

from blendserve.errors import ConfigError
from blendserve.request import FinishReason
from blendserve.tokenizer import TextStream

_SURROGATE = re.compile("[\ud800-\udfff]")
_ALPHANUMERIC = string.ascii_letters + string.digits
_THINK, _THINK_END, _TOOL_CALL = "<think>", "</think>", "<tool_call>"
_TOOL_CALLS, _ARGS = "[TOOL_CALLS]", "[ARGS]"
MAX_MARK_CHARACTERS = 16
"""no mark that ends a reasoning is longer"""


class ChatFeatures(NamedTuple):
    """What an engine can do in chats beyond text in, text out."""

    reads_tool_calls: bool = False
    """calls that the model makes of its own choice are read out of its answers"""
    forces_tool_calls: bool = False
    """answers can be constrained to calls"""
    call_format: str | None = None
    """parser of ours in whose format they are, see `forced_calls`; None: the engine constrains for itself"""
    holds_arguments: bool = False
    """arguments can be held to a schema in calls of the model's own choice, too"""
    takes_media: bool = False
    """images, audio and video"""
    stops_after_reasoning: bool = False
    """stop strings count behind the reasoning only, unless a request asks for more"""


class ToolCall(NamedTuple):
    """A call that was read out of an answer."""

    name: str
    arguments: str
    """a JSON text, as it comes"""
    id: str | None = None
    """None: the format has none"""


class ReadAnswer(NamedTuple):
    """An answer taken apart."""

    message: dict[str, Any]
    finish_reason: FinishReason
    num_reasoning_tokens: int | None
    """None without a reasoning parser"""
    has_logprobs: bool
    """whether its log probabilities may be told; those of reasoning that is to be left out may not"""


def assemble(
    content: str | None,
    calls: Sequence[ToolCall] | None,
    reasoning: str | None,
    finish_reason: FinishReason,
    *,
    tool_choice: Any,
    parallel_tool_calls: bool,
    reads_reasoning: bool,
    include_reasoning: bool,
    num_reasoning_tokens: int | None,
    make_id: Callable[[int], str],
) -> ReadAnswer:
    """The assistant's message, as vLLM's server writes it. `make_id` gives a call its id by its place."""
    if tool_choice in (None, "none"):
        calls = None
    elif tool_choice != "auto":
        content = content or ""
    if calls and not parallel_tool_calls:
        calls = calls[:1]
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reads_reasoning:
        message["reasoning"] = reasoning if include_reasoning else None
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id or make_id(index),
                "type": "function",
                "function": {"name": _writable(call.name), "arguments": _writable(call.arguments)},
            }
            for index, call in enumerate(calls)
        ]
    # OpenAI's reasons: a function that was named is no decision of the model's, so that is "stop".
    if (tool_choice == "auto" and calls) or (tool_choice == "required" and finish_reason == "stop"):
        finish_reason = "tool_calls"
    return ReadAnswer(message, finish_reason, num_reasoning_tokens, include_reasoning)


def _writable(text: str) -> str:
    """The text with halves of characters, which no UTF-8 has, as the escapes that the model wrote."""
    return _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


# -------- parsers --------


class _Reasoning(NamedTuple):
    """An answer split by a reasoning parser."""

    reasoning: str | None
    content: str | None
    spans: list[tuple[int, int]]
    """of the reasoning in the text"""


class _Vocabulary(Protocol):
    """What parsers need of a tokenizer."""

    special_tokens: frozenset[str]

    def token_id(self, token: str) -> int | None:
        """Id of a token; None if it is none of the vocabulary's."""
        ...

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        """An incremental decode."""
        ...


_Called = tuple[str, list[ToolCall]]
"""the content beside the calls, and the calls; without any, the text is the content"""


class _ReasoningParser(Protocol):
    """Tells reasoning from content."""

    tokens: tuple[str, ...]
    """that the vocabulary must have"""
    keeps_special_tokens: bool
    """whether it needs them in the text"""
    ends: re.Pattern[str]
    """behind a match of it comes content"""

    def split(self, text: str, enable_thinking: bool) -> _Reasoning:
        """Split an answer."""
        ...

    def begins_thinking(self, enable_thinking: bool) -> bool:
        """Whether answers begin with reasoning."""
        ...


class _ToolParser(Protocol):
    """Reads calls out of content."""

    tokens: tuple[str, ...]
    """that the vocabulary must have"""
    keeps_special_tokens: bool
    """whether it needs them in the text"""

    def read(self, text: str) -> _Called:
        """The calls; none where one of them is broken."""
        ...

    def make_id(self, digest: bytes, /) -> str:
        """A call's id out of 16 random bytes."""
        ...


class _DeepSeekR1:
    """`reasoning</think>content`, of which the start tag may be in the prompt: without an end all is reasoning."""

    tokens: tuple[str, ...] = (_THINK, _THINK_END)
    keeps_special_tokens = False
    ends = re.compile(re.escape(_THINK_END))

    def __init__(self, _vocabulary: _Vocabulary) -> None: ...

    def begins_thinking(self, enable_thinking: bool) -> bool:  # noqa: ARG002
        """See `_ReasoningParser`."""
        return True

    def split(self, text: str, enable_thinking: bool) -> _Reasoning:  # noqa: ARG002
        """See `_ReasoningParser`."""
        start = text.find(_THINK)
        start = 0 if start < 0 else start + len(_THINK)
        end = text.find(_THINK_END, start)
        if end < 0:
            return _Reasoning(text[start:], None, [(start, len(text))])
        return _Reasoning(text[start:end], text[end + len(_THINK_END) :] or None, [(start, end)])


class _Qwen3:
    """The same, but a tool call ends reasoning as well, tags out of place vanish, and it can be off for a request."""

    tokens: tuple[str, ...] = ()
    keeps_special_tokens = True
    ends = re.compile(f"{re.escape(_THINK_END)}|(?={re.escape(_TOOL_CALL)})")

    def __init__(self, vocabulary: _Vocabulary) -> None:
        marks = {*vocabulary.special_tokens, _THINK, _THINK_END, _TOOL_CALL} - {"</tool_call>"}
        longest_first = sorted(marks, key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, longest_first)))

    def begins_thinking(self, enable_thinking: bool) -> bool:
        """See `_ReasoningParser`."""
        return enable_thinking

    def split(self, text: str, enable_thinking: bool) -> _Reasoning:
        """See `_ReasoningParser`."""
        if not enable_thinking:
            return _Reasoning(None, text, [])
        spans: list[tuple[int, int]] = []
        content: list[str] = []
        is_thinking, done = True, 0
        for mark in self._marks.finditer(text):
            if is_thinking:
                spans.append((done, mark.start()))
            else:
                content.append(text[done : mark.start()])
            done = mark.end()
            if mark[0] == _TOOL_CALL or (mark[0] == _THINK and not is_thinking):
                content.append(mark[0])
            is_thinking = is_thinking and mark[0] not in (_THINK_END, _TOOL_CALL)
        if is_thinking:
            spans.append((done, len(text)))
        else:
            content.append(text[done:])
        reasoning = "".join(text[start:end] for start, end in spans)
        return _Reasoning(reasoning or None, "".join(content) or None, spans)


_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""what broken JSON, and JSON that is no call, is met with"""


def _openai_id(digest: bytes) -> str:
    return f"chatcmpl-tool-{digest.hex()[:16]}"


def _call(name: Any, arguments: Any) -> ToolCall:
    """A call.

    Raises:
        TypeError: the name is none.
    """
    if not isinstance(name, str):
        raise TypeError(name)
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


class _Hermes:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, of which the last may lack its end."""

    tokens: tuple[str, ...] = ()
    keeps_special_tokens = True
    make_id = staticmethod(_openai_id)
    _bodies = re.compile(r"<tool_call>(?:(.*?)</tool_call>|(.*))", re.DOTALL)

    def __init__(self, _vocabulary: _Vocabulary) -> None: ...

    def read(self, text: str) -> _Called:
        """See `_ToolParser`."""
        start = text.find(_TOOL_CALL)
        if start < 0:
            return text, []
        try:
            objects = [json.loads(body[1] or body[2] or "") for body in self._bodies.finditer(text)]
            calls = [_call(found["name"], found["arguments"]) for found in objects]
        except _MALFORMED:
            return text, []
        return text[:start], calls


class _Llama3Json:
    """Objects with a name and arguments, or parameters, anywhere in the text, which is none then."""

    tokens: tuple[str, ...] = ("<|python_tag|>",)
    keeps_special_tokens = False
    make_id = staticmethod(_openai_id)
    _decoder = json.JSONDecoder()

    def __init__(self, _vocabulary: _Vocabulary) -> None: ...

    def read(self, text: str) -> _Called:
        """See `_ToolParser`."""
        calls: list[ToolCall] = []
        end = -1
        try:
            while (start := text.find("{", end + 1)) >= 0:
                found, end = self._decoder.raw_decode(text, start)
                arguments = found["arguments"] if "arguments" in found else found["parameters"]
                calls.append(_call(found["name"], arguments))
        except _MALFORMED:
            return text, []
        return "", calls


class _Mistral:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`; with a token for it `[TOOL_CALLS]name[ARGS]{...}`."""

    tokens: tuple[str, ...] = (_TOOL_CALLS,)
    keeps_special_tokens = True
    _decoder = json.JSONDecoder()
    _name = re.compile(rf"(.*?)(?:{re.escape(_ARGS)}|(?={{)|\Z)", re.DOTALL)

    def __init__(self, vocabulary: _Vocabulary) -> None:
        self._has_names_first = vocabulary.token_id(_ARGS) is not None

    @staticmethod
    def make_id(digest: bytes) -> str:
        """Nine letters and digits, which is all that the model's templates take."""
        return "".join(_ALPHANUMERIC[byte % len(_ALPHANUMERIC)] for byte in digest[:9])

    def read(self, text: str) -> _Called:
        """See `_ToolParser`."""
        content, *parts = text.split(_TOOL_CALLS)
        parts = [part for part in parts if part.strip()]
        try:
            calls = self._named(parts) if self._has_names_first else self._listed(parts)
        except _MALFORMED:
            return text, []
        return content.strip() if self._has_names_first else content, calls

    def _listed(self, parts: list[str]) -> list[ToolCall]:
        if not parts:
            return []
        found, _ = self._decoder.raw_decode(parts[0].strip())  # what follows is of no interest to vLLM either
        calls = found if isinstance(found, list) else [found]
        return [self._called(call["name"], call.get("arguments") or {}) for call in calls]

    def _named(self, parts: list[str]) -> list[ToolCall]:
        calls = []
        for part in parts:
            name = self._name.match(part)
            assert name is not None
            arguments = part[name.end() :].strip() or "{}"
            with suppress(ValueError, RecursionError):  # a call that was cut off is passed on as it is
                arguments = arguments[: self._decoder.raw_decode(arguments)[1]]
            if name[1].strip():
                calls.append(self._called(name[1].strip(), arguments))
        return calls

    @staticmethod
    def _called(name: Any, arguments: Any) -> ToolCall:
        call = _call(name, arguments)
        return call._replace(arguments=arguments) if isinstance(arguments, str) else call


_REASONING_PARSERS: dict[str, Callable[[_Vocabulary], _ReasoningParser]] = {
    "deepseek_r1": _DeepSeekR1,
    "qwen3": _Qwen3,
}
_TOOL_PARSERS: dict[str, Callable[[_Vocabulary], _ToolParser]] = {
    "hermes": _Hermes,
    "llama3_json": _Llama3Json,
    "mistral": _Mistral,
}


# -------- forced calls --------

_FORCED = {
    "hermes": ('<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>", "\n"),
    "llama3_json": ('{"name": ', ', "parameters": ', "}", "; "),
}
"""what stands before the name, the arguments, behind them, and between two calls"""


def forces_calls(tool_call_parser: str | None) -> bool:
    """Whether answers can be constrained to calls in the format of a parser."""
    return tool_call_parser in _FORCED


def forced_calls(tool_call_parser: str, tools: Sequence[dict[str, Any]], *, is_single: bool) -> str:
    """A grammar, as llguidance takes it, of calls of these tools and nothing else.

    Arguments follow their schema where the tool is strict, as in vLLM's server; else they are any object.
    """
    before, between, behind, separator = (_quoted(text) for text in _FORCED[tool_call_parser])
    rules = [f"start: call{'' if is_single else f' ({separator} call)*'}"]
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    for index, tool in enumerate(tools):
        function = tool["function"]
        schema = (function.get("strict") and function["parameters"]) or {"type": "object"}
        name = _quoted(json.dumps(function["name"], ensure_ascii=False))
        rules.append(f"call_{index}: {before} {name} {between} arguments_{index} {behind}")
        rules.append(f"arguments_{index}: %json {json.dumps(schema)}")
    return "\n".join(rules)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# -------- answers --------


def check_parsers(tool_call_parser: str | None, reasoning_parser: str | None) -> None:
    """Refuse names of parsers that are not here.

    Raises:
        ConfigError: see above.
    """
    for flag, name, names in (
        ("--tool-call-parser", tool_call_parser, [*_TOOL_PARSERS]),
        ("--reasoning-parser", reasoning_parser, [*_REASONING_PARSERS]),
    ):
        if name is not None and name not in names:
            similar = difflib.get_close_matches(name, names, n=1)
            remedy = f"did you mean {similar[0]}?" if similar else f"it has {', '.join(names)}"
            raise ConfigError(
                f"{flag} {name}: the native engine has no such parser; {remedy} --engine vllm has all of vLLM's"
            )


class ChatReader:
    """The parsers of one engine.

    Args:
        tokenizer: of the model.
        tool_call_parser, reasoning_parser: vLLM's names, as checked by `check_parsers`.

    Raises:
        ConfigError: the tokenizer lacks a token that marks what they look for.
    """

    def __init__(
        self, tokenizer: _Vocabulary, tool_call_parser: str | None, reasoning_parser: str | None
    ) -> None:
        self.tokenizer = tokenizer
        self.tool_parser = _TOOL_PARSERS[tool_call_parser](tokenizer) if tool_call_parser else None
        self.reasoning_parser = _REASONING_PARSERS[reasoning_parser](tokenizer) if reasoning_parser else None
        for flag, name, parser in (
            ("--tool-call-parser", tool_call_parser, self.tool_parser),
            ("--reasoning-parser", reasoning_parser, self.reasoning_parser),
        ):
            lacking = [
                token for token in (parser.tokens if parser else ()) if tokenizer.token_id(token) is None
            ]
            if lacking:
                raise ConfigError(
                    f"{flag} {name} does not fit this model: its tokenizer has no token {lacking[0]}; "
                    "leave it out, or name the parser of the model's format"
                )

    def open(self, chat: bytes, *, skip_special_tokens: bool = True) -> ChatAnswer:
        """How to run a request with these parameters, see `SamplingParams`, and to read its answer."""
        values = orjson.loads(chat)
        template_kwargs = values.get("chat_template_kwargs") or {}
        tool_choice = values.get("tool_choice", "none")
        parsers = (self.reasoning_parser, None if tool_choice == "none" else self.tool_parser)
        return ChatAnswer(
            self,
            tool_choice,
            parallel_tool_calls=values.get("parallel_tool_calls", True),
            include_reasoning=values.get("include_reasoning", True),
            enable_thinking=bool(
                template_kwargs.get("enable_thinking", values.get("reasoning_effort") != "none")
            ),
            stop_in_reasoning=values.get("stop_in_reasoning", False),
            skip_special_tokens=skip_special_tokens
            and not any(parser is not None and parser.keeps_special_tokens for parser in parsers),
        )


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """How one answer is to be run and read."""

    reader: ChatReader
    tool_choice: Any
    parallel_tool_calls: bool
    include_reasoning: bool
    enable_thinking: bool
    stop_in_reasoning: bool
    skip_special_tokens: bool
    """False where parsers look for them, whatever was asked for"""

    @property
    def reasoning_ends(self) -> re.Pattern[str] | None:
        """Behind a match of it the content begins; None: at the start."""
        parser = self.reader.reasoning_parser
        if parser is None or not parser.begins_thinking(self.enable_thinking):
            return None
        return parser.ends

    def read(
        self, text: str, token_ids: Sequence[int], finish_reason: FinishReason, identity: bytes
    ) -> ReadAnswer:
        """Take an answer apart; ids of calls depend on `identity`, which no other request of a conversation has."""
        reasoning: str | None = None
        content: str | None = text
        num_reasoning_tokens = None
        if (parser := self.reader.reasoning_parser) is not None:
            reasoning, content, spans = parser.split(text, self.enable_thinking)
            num_reasoning_tokens = self._num_tokens_in(spans, token_ids)
        calls: list[ToolCall] = []
        make_id: Callable[[bytes], str] = _openai_id
        if (tool_parser := self.reader.tool_parser) is not None and self.tool_choice != "none":
            make_id = tool_parser.make_id
            beside, calls = tool_parser.read(content or "")
            if calls:
                content = beside if beside.strip() else None
        return assemble(
            content,
            calls,
            reasoning,
            finish_reason,
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            reads_reasoning=self.reader.reasoning_parser is not None,
            include_reasoning=self.include_reasoning,
            num_reasoning_tokens=num_reasoning_tokens,
            make_id=lambda index: make_id(
                hashlib.blake2b(identity + index.to_bytes(8, "little"), digest_size=16).digest()
            ),
        )

    def _num_tokens_in(self, spans: list[tuple[int, int]], token_ids: Sequence[int]) -> int:
        """Tokens whose text begins inside one of the spans, which are in order."""
        stream = self.reader.tokenizer.stream(self.skip_special_tokens)
        remaining = iter(spans)
        start, end = next(remaining, (0, 0))
        place = count = 0
        for token_id in token_ids:
            while place >= end:
                found = next(remaining, None)
                if found is None:
                    return count
                start, end = found
            count += place >= start
            place += len(stream.push(token_id))
        return count
