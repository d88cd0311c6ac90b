"""OpenAI Batch files: request lines in, result lines out.

```
bytes ──read_rows──▶ Row | LineError ──(prepare, engine)──▶ success_line, failure_line ──▶ bytes
```

A line that cannot be served becomes a `LineError` and the other lines run. What this engine cannot honour is
refused by name, never dropped: a job of a million lines must not run for hours with a parameter ignored.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol
from uuid import uuid4

import orjson

from blendserve.engines import EXTRA_PARAMETERS, EngineName
from blendserve.engines.chat import ChatFeatures
from blendserve.errors import RequestError
from blendserve.jobs.body import invalid, require, shown
from blendserve.jobs.chat import CHAT_PARAMETERS, parse_chat
from blendserve.jobs.sources import (
    CHAT_URL,
    COMPLETIONS_URL,
    DEFAULT_MAX_LINE_BYTES,
    ENVELOPE_KEYS,
    Source,
    is_table,
    read_lines,
)
from blendserve.request import Completion, SamplingParams, TokenLogprob

URLS = (CHAT_URL, COMPLETIONS_URL)

_MAX_N = 128
_MAX_CUSTOM_ID_CHARACTERS = 1024
_MAX_LOGPROBS = 20
_MAX_LOGPROB_TOKEN_IDS = 128
_MIN_LOGPROB = -9999.0
"""OpenAI's value for "very unlikely"; JSON has no -Infinity"""
_ESCAPED_SEPARATORS = tuple(
    (chr(code).encode(), f"\\u{code:04x}".encode()) for code in (0x85, 0x2028, 0x2029)
)
"""line ends to some readers (Python's `str.splitlines` among them), data inside a JSON string"""

_SINGLE_KEYS = ("custom_id", "method", "url", "body", "model", "messages", "prompt")
"""keys of a line or body that decide what is run: twice in one object is an error, not a choice of ours"""
_SINGLE_KEYS_AS_TEXT = tuple(f'"{key}"'.encode() for key in _SINGLE_KEYS)
_CUSTOM_ID_IN_TEXT = re.compile(rb'"custom_id"\s*:\s*("(?:[^"\\]|\\.){1,1024}")')

_HONOURED = frozenset(
    {
        "model",
        "max_tokens",
        "n",
        "seed",
        "stop",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "min_tokens",
        "logprobs",
        "stream",
        "ignore_eos",
        "stop_token_ids",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "add_special_tokens",
    }
)
_HONOURED_BY_URL = {
    CHAT_URL: _HONOURED
    | {"messages", "max_completion_tokens", "top_logprobs", "add_generation_prompt", "chat_template_kwargs"},
    COMPLETIONS_URL: _HONOURED | {"prompt"},
}

_IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "stream_options",
        "stream_interval",
        "priority",
        "request_id",
        "session_id",
        "cache_salt",
    }
)
"""Parameters that change nothing about the completion."""

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "ec_transfer_params": (),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "routed_experts_prompt_start": (0,),
    "repetition_detection": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "mm_payload": ("tensors",),
    "return_mm_kwargs": (),
    "return_prompt_text": (False,),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "stop_in_reasoning": (True,),
    "structural_tag": (),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "web_search_options": (),
}
"""Parameters of OpenAI or vLLM that cannot be honoured, with the values besides null that ask for nothing."""

_ONLY_COMPLETIONS = frozenset({"echo"})
"""Those of `_UNSUPPORTED` that no engine does in chats; those of `CHAT_PARAMETERS` are for chats alone."""
_REMEDIES = {
    "best_of": "Ask for 'n' completions with 'logprobs' and keep the best of them.",
    "use_beam_search": "Ask for 'n' completions with 'logprobs' and keep the best of them.",
}
"""what to do instead of what no engine does"""
_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object")
"""keys of 'structured_outputs' of which there is one"""
_CONSTRAINT_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")

_PARAMETERS = frozenset().union(*_HONOURED_BY_URL.values(), _IGNORED, _UNSUPPORTED)


Support = Literal["yes", "no effect", "forwarded", "refused"]
"""what becomes of a parameter: honoured; accepted, as it changes nothing about a completion; sent on, for a server to
judge; an error of its line, unless its value asks for nothing"""


def parameter_support(engine: EngineName, url: str) -> dict[str, Support]:
    """What becomes of each parameter of OpenAI's and vLLM's requests to a url."""

    def support(name: str) -> Support:
        if engine in ("openai", "sglang"):
            return "forwarded"
        if name in _HONOURED_BY_URL[url] or engine in _engines_with(name, url):
            return "yes"
        return "no effect" if name in _IGNORED else "refused"

    return {name: support(name) for name in sorted(_PARAMETERS)}


def values_that_ask_for_nothing(name: str) -> tuple[Any, ...]:
    """Those besides null that are accepted of a parameter that is refused otherwise."""
    return _UNSUPPORTED.get(name, ())


class Tokenizer(Protocol):
    """What this module needs of `blendserve.tokenizer`."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        ...

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation. Raises: RequestError."""
        ...

    def encode_batch(self, texts: list[str], *, add_special_tokens: bool) -> Sequence[Sequence[int]]:
        """Token ids of each text."""
        ...

    def decode(self, token_ids: Sequence[int], /) -> str:
        """Text of the tokens, without special ones."""
        ...

    def token_text(self, token_id: int, /) -> str:
        """One token as text."""
        ...

    def token_bytes(self, token_id: int, /) -> bytes | None:
        """One token as UTF-8 bytes, possibly part of a character; None if it stands for no text."""
        ...


@dataclass(frozen=True, slots=True)
class LineError:
    """Why a line has no completion, in the terms of the error file."""

    line: int
    """physical line of the input, or row of a table, from 1"""
    custom_id: str | None
    """None where the line has none that can be read"""
    code: str
    message: str
    param: str | None = None
    status_code: int = 400
    file: str | None = None
    """None where the job reads one file of lines"""

    @classmethod
    def of(cls, error: RequestError, line: int, custom_id: str | None, file: str | None = None) -> LineError:
        """A `RequestError` with the line that caused it."""
        return cls(line, custom_id, error.code, error.message, error.param, error.status_code, file)

    @property
    def place(self) -> str:
        """Where it is, for a message."""
        return place(self.line, self.file)


@dataclass(slots=True)  # not frozen: rows are made by the million
class Row:
    """One good line, as asked; exactly one of `chat` and `prompt` is given."""

    line: int
    custom_id: str
    url: str
    model: str | None
    chat: list[dict[str, Any]] | None
    prompt: str | list[int] | None
    params: SamplingParams
    max_tokens: int | None
    n: int = 1
    output_tokens: int | None = None
    """expected output length, a hint"""
    add_special_tokens: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    body: bytes | None = None
    """the body to forward; `prompt` is then a likeness for planning, whatever the url"""
    media: bytes | None = None
    """see `Chat.media`"""
    file: str | None = None
    num_bytes: int = field(default=0, compare=False)
    """length of the line"""


class PreparedRow(NamedTuple):
    """What is kept of a line until its result is written."""

    line: int
    custom_id: str
    url: str
    n: int
    file: str | None = None


def place(line: int, file: str | None) -> str:
    """A line of the input for a message: `line 3`, `line 3 of b.jsonl`, `row 3 of c.parquet`."""
    if file is None:
        return f"line {line}"
    return f"{'row' if is_table(file) else 'line'} {line} of {file}"


# -------- reading --------


def read_rows(
    sources: Sequence[Source],
    *,
    output_tokens_field: str | None = None,
    max_line_bytes: int = DEFAULT_MAX_LINE_BYTES,
    column_mapping: Mapping[str, str] | None = None,
    pass_through: bool = False,
    extra_parameters: Set[str] = frozenset(),
    chat_features: ChatFeatures | None = None,
) -> Iterator[Row | LineError]:
    """Every line of the sources that is not blank, in order.

    `output_tokens_field` names a body parameter that says how many tokens the output is expected to have. With
    `pass_through` bodies are kept as they are, for a server to judge. `extra_parameters` are those that the engine can
    do beside what all engines can (see `engines.EXTRA_PARAMETERS`); others are refused. `chat_features` says what it
    can do in chats. For the other options see `sources.read_lines`.

    Raises:
        ConfigError: a file cannot be read.
    """
    parameters = _PARAMETERS | {output_tokens_field} if output_tokens_field else _PARAMETERS
    for source in sources:
        file = source.path if len(sources) > 1 or source.is_table else None
        lines = read_lines(
            source, max_line_bytes=max_line_bytes, parameters=parameters, column_mapping=column_mapping
        )
        for line, content in lines:
            yield parse_line(
                line,
                content,
                output_tokens_field=output_tokens_field,
                file=file,
                pass_through=pass_through,
                extra_parameters=extra_parameters,
                chat_features=chat_features,
            )


def parse_line(
    line: int,
    content: bytes | RequestError,
    *,
    output_tokens_field: str | None = None,
    file: str | None = None,
    pass_through: bool = False,
    extra_parameters: Set[str] = frozenset(),
    chat_features: ChatFeatures | None = None,
) -> Row | LineError:
    """One line of a batch file, checked as far as that is possible without the model."""
    custom_id = None
    try:
        if isinstance(content, RequestError):
            raise content
        envelope = _parse_json(content)
        custom_id = _parse_custom_id(envelope)
        _refuse_repeated_keys(content)
        return _parse_row(
            line,
            custom_id,
            envelope,
            output_tokens_field,
            file,
            len(content),
            pass_through,
            extra_parameters,
            chat_features,
        )
    except RequestError as error:
        if custom_id is None and error.code == "invalid_json_line" and isinstance(content, bytes):
            custom_id = _custom_id_in_text(content)
        return LineError.of(error, line, custom_id, file)


def _parse_json(raw: bytes) -> dict[str, Any]:
    try:
        envelope = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError("invalid_json_line", _why_not_json(raw, error)) from None
    if not isinstance(envelope, dict):
        raise RequestError(
            "invalid_request",
            f"This line is {shown(envelope)}, not a JSON object. Write one request object per line.",
        )
    return envelope


def _why_not_json(raw: bytes, error: orjson.JSONDecodeError) -> str:
    try:
        raw.decode()
    except UnicodeDecodeError as problem:
        return (
            f"This line is not valid UTF-8, so not JSON: {problem.reason} at byte {problem.start + 1}. "
            "Convert the file to UTF-8, e.g. iconv -f LATIN1 -t UTF-8."
        )
    remedy = "Write one JSON object per line, in UTF-8."
    if "surrogate" in error.msg:
        remedy = "An escape \\ud800 .. \\udfff stands for a character only as one of a pair; remove it."
    elif re.match(r"-?(NaN|Infinity)", error.doc[error.pos :]) or "infinity" in error.msg:
        remedy = "JSON has neither NaN nor Infinity, and no larger number than 1.7e308; write null or leave it out."
    return f"This line is not valid JSON: {error.msg} (at character {error.pos}). {remedy}"


def _custom_id_in_text(raw: bytes) -> str | None:
    """The custom_id of a line that is not JSON, to tell which request it was."""
    for match in _CUSTOM_ID_IN_TEXT.finditer(raw):
        try:
            return str(orjson.loads(match[1]))
        except orjson.JSONDecodeError:
            continue
    return None


def _parse_custom_id(envelope: dict[str, Any]) -> str:
    custom_id = require(envelope, "custom_id", 'Give every line its own, such as "custom_id": "request-1".')
    if not isinstance(custom_id, str) or not custom_id:
        raise invalid("custom_id", custom_id, "a non-empty string")
    if len(custom_id) > _MAX_CUSTOM_ID_CHARACTERS:
        raise RequestError(
            "invalid_request",
            f"The custom_id {shown(custom_id)} has {len(custom_id):,} characters. "
            f"Use at most {_MAX_CUSTOM_ID_CHARACTERS:,}.",
            param="custom_id",
        )
    return custom_id


def _refuse_repeated_keys(raw: bytes) -> None:
    """Refuse a line that says two things about what to run; JSON parsers keep the last one silently.

    Looks closer only where such a key is in the text twice. A key that is written with escapes is not seen.
    """
    count = raw.count
    for key in _SINGLE_KEYS_AS_TEXT:
        if count(key) > 1:
            break
    else:
        return

    def of_pairs(pairs: list[tuple[str, Any]]) -> _Repeating:
        names = [name for name, _ in pairs]
        repeated = next((name for name in _SINGLE_KEYS if names.count(name) > 1), None)
        return _Repeating(repeated, dict(pairs).get("body"))

    try:
        envelope = json.loads(raw, object_pairs_hook=of_pairs, parse_int=len, parse_float=len)
    except RecursionError:
        raise RequestError("invalid_request", "This line is nested too deeply. Flatten it.") from None
    body = envelope.body if isinstance(envelope.body, _Repeating) else _Repeating(None, None)
    if repeated := envelope.key or body.key:
        raise RequestError(
            "invalid_request",
            f"The key '{repeated}' is there twice, and it is not clear which one counts. Remove one of them.",
            param=repeated,
        )


class _Repeating(NamedTuple):
    """An object of a line: a key that it has twice, and its body."""

    key: str | None
    body: Any


def _parse_row(
    line: int,
    custom_id: str,
    envelope: dict[str, Any],
    output_tokens_field: str | None,
    file: str | None,
    num_bytes: int,
    pass_through: bool,
    extra_parameters: Set[str],
    chat_features: ChatFeatures | None,
) -> Row:
    if unknown := next((name for name in envelope if name not in ENVELOPE_KEYS), None):
        raise RequestError(
            "unknown_parameter",
            f"Unknown key {shown(unknown)} beside 'body'. Parameters of the request go inside 'body'.",
            param=unknown,
        )
    method = require(envelope, "method", 'Add "method": "POST".')
    if method != "POST":
        raise invalid("method", method, '"POST"')
    url = require(envelope, "url", f'Add "url": "{CHAT_URL}" or "{COMPLETIONS_URL}".')
    if not isinstance(url, str) or url not in _HONOURED_BY_URL:
        raise RequestError(
            "invalid_url",
            f"The url {shown(url)} is not served. Use {CHAT_URL} or {COMPLETIONS_URL}; vLLM's own run-batch has "
            "embeddings, scores and rerankings.",
            param="url",
        )
    values = require(envelope, "body", "Put the parameters of the request there.")
    if not isinstance(values, dict):
        raise invalid("body", values, "an object")
    return row_of_body(
        values,
        url,
        line=line,
        custom_id=custom_id,
        output_tokens_field=output_tokens_field,
        file=file,
        num_bytes=num_bytes,
        pass_through=pass_through,
        extra_parameters=extra_parameters,
        chat_features=chat_features,
    )


def row_of_body(
    values: dict[str, Any],
    url: str,
    *,
    line: int,
    custom_id: str,
    output_tokens_field: str | None = None,
    file: str | None = None,
    num_bytes: int = 0,
    pass_through: bool = False,
    extra_parameters: Set[str] = frozenset(),
    chat_features: ChatFeatures | None = None,
) -> Row:
    """The row of a request body, for one of `URLS`.

    Raises:
        RequestError: it cannot be served.
    """
    body = _Body(values)
    if body.boolean("stream"):
        raise RequestError(
            "streaming_unsupported",
            "A batch cannot stream. Remove 'stream' or set it to false.",
            param="stream",
        )
    if pass_through:
        return _pass_through_row(line, custom_id, url, values, output_tokens_field, file, num_bytes)
    chat = url == CHAT_URL
    if chat_features is None:
        extra_parameters = extra_parameters - CHAT_PARAMETERS
    _check_names(values, url, output_tokens_field, extra_parameters)
    if body.present("max_tokens") and body.present("max_completion_tokens"):
        raise RequestError(
            "invalid_request",
            "'max_tokens' and 'max_completion_tokens' are both set. Keep one of them.",
            param="max_completion_tokens",
        )
    max_tokens = body.integer("max_tokens", 1) or (body.integer("max_completion_tokens", 1) if chat else None)
    template_kwargs = body.mapping("chat_template_kwargs")
    conversation = parse_chat(values, template_kwargs, chat_features) if chat else None
    forced_calls = None if conversation is None else conversation.forced_calls
    return Row(
        line=line,
        custom_id=custom_id,
        url=url,
        model=body.string("model"),
        chat=None if conversation is None else conversation.messages,
        prompt=None if chat else _parse_prompt(values),
        params=_parse_sampling_params(
            body,
            chat,
            max_tokens,
            b"" if values.keys().isdisjoint(extra_parameters) else _parse_extra(body, forced_calls),
            b"" if conversation is None else conversation.reading,
        ),
        max_tokens=max_tokens,
        n=body.integer("n", 1, _MAX_N) or 1,
        output_tokens=body.integer(output_tokens_field, 0) if output_tokens_field else None,
        add_special_tokens=body.boolean("add_special_tokens", not chat),
        add_generation_prompt=body.boolean("add_generation_prompt", True),
        continue_final_message=conversation is not None and conversation.continue_final_message,
        tools=None if conversation is None else conversation.tools,
        chat_template_kwargs=template_kwargs if conversation is None else conversation.template_kwargs,
        media=None if conversation is None else conversation.media,
        file=file,
        num_bytes=num_bytes,
    )


def _pass_through_row(
    line: int,
    custom_id: str,
    url: str,
    values: dict[str, Any],
    output_tokens_field: str | None,
    file: str | None,
    num_bytes: int,
) -> Row:
    """A row whose body a server will judge; what planning needs is read where it is there."""

    def count(*names: str | None) -> int | None:
        found = (values.get(name) for name in names if name is not None)
        return next((value for value in found if type(value) is int and 0 < value < 2**31), None)

    if url == CHAT_URL:
        require(values, "messages", "Give the conversation as a list of {role, content} objects.")
    else:
        require(values, "prompt", "Give a string or a list of token ids.")
    model = values.get("model")
    return Row(
        line=line,
        custom_id=custom_id,
        url=url,
        model=model if isinstance(model, str) else None,
        chat=None,
        prompt=_likeness(values),
        params=SamplingParams(),
        max_tokens=count("max_completion_tokens", "max_tokens"),
        n=min(count("n") or 1, _MAX_N),
        output_tokens=count(output_tokens_field),
        body=orjson.dumps(values),
        file=file,
        num_bytes=num_bytes,
    )


def _likeness(values: dict[str, Any]) -> str | list[int]:
    """Text that is about as long as the prompt and shares with others what their prompts share.

    Tools come first, as in chat templates. Of images and the like only the identity counts, not the bytes.
    """
    prompt = values.get("prompt")
    if isinstance(prompt, list) and prompt and _are_token_ids(prompt) and max(prompt) < 2**32:
        return prompt
    if isinstance(prompt, str):
        return prompt
    if prompt is not None:
        return orjson.dumps(prompt).decode()
    parts = [orjson.dumps(values[name]).decode() for name in ("tools", "functions") if values.get(name)]
    messages = values["messages"] if isinstance(values["messages"], list) else [values["messages"]]
    for message in messages:
        fields = message if isinstance(message, dict) else {"content": message}
        for name, value in fields.items():
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, dict) and isinstance(part.get("text"), str):
                    parts.append(part["text"])
                elif isinstance(part, str):
                    parts.append(part)
                elif part is not None:
                    digest = hashlib.blake2b(orjson.dumps(part), digest_size=8).hexdigest()
                    parts.append(f"{name} {digest}")
    return "\n".join(parts)


def _engines_with(name: str, url: str) -> list[EngineName]:
    """The engines that can do one of `_UNSUPPORTED` in requests to a url."""
    if name in (_ONLY_COMPLETIONS if url == CHAT_URL else CHAT_PARAMETERS):
        return []
    return [engine for engine, names in EXTRA_PARAMETERS.items() if name in names]


def _check_names(values: dict[str, Any], url: str, output_tokens_field: str | None, extra: Set[str]) -> None:
    honoured = _HONOURED_BY_URL[url]
    for name, value in values.items():
        if name in honoured or name in _IGNORED or name == output_tokens_field:
            continue
        if name in _UNSUPPORTED:
            engines = _engines_with(name, url)
            if value is None or value in _UNSUPPORTED[name] or (engines and name in extra):
                continue
            where = " or ".join(f"--engine {engine}" for engine in engines)
            remedy = f"Remove '{name}' or run this line {f'with {where}' if where else 'elsewhere'}."
            raise RequestError(
                "unsupported_parameter",
                f"'{name}': {shown(value)} is not supported. {_REMEDIES.get(name, remedy)}",
                param=name,
            )
        other_url = next((other for other, names in _HONOURED_BY_URL.items() if name in names), None)
        if other_url:
            remedy = f"It belongs to {other_url}."
        elif similar := difflib.get_close_matches(name, honoured, n=1):
            remedy = f"Did you mean '{similar[0]}'?"
        else:
            remedy = "Remove it."
        raise RequestError("unknown_parameter", f"Unknown parameter '{name}' for {url}. {remedy}", param=name)


def _parse_sampling_params(
    body: _Body, chat: bool, max_tokens: int | None, extra: bytes, reading: bytes
) -> SamplingParams:
    logprobs: int | None
    if chat:
        top_logprobs = body.integer("top_logprobs", 0, _MAX_LOGPROBS)
        logprobs = (top_logprobs or 0) if body.boolean("logprobs") else None
        if top_logprobs and logprobs is None:
            raise invalid("top_logprobs", top_logprobs, "'logprobs': true beside it")
    else:
        logprobs = body.integer("logprobs", 0, _MAX_LOGPROBS)
    labels = tuple(body.token_ids("logprob_token_ids"))
    if len(labels) > _MAX_LOGPROB_TOKEN_IDS:
        raise invalid("logprob_token_ids", len(labels), f"at most {_MAX_LOGPROB_TOKEN_IDS} token ids")
    if labels and logprobs is None:
        raise invalid("logprob_token_ids", labels, "'logprobs' beside it")
    echo = body.boolean("echo")
    prompt_logprobs = body.integer("prompt_logprobs", 0, _MAX_LOGPROBS)
    if echo and prompt_logprobs is None:
        prompt_logprobs = logprobs
    min_tokens = body.integer("min_tokens", 0) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise invalid("min_tokens", min_tokens, f"at most 'max_tokens', which is {max_tokens}")
    return SamplingParams(
        temperature=body.number("temperature", 0, 2, default=1.0),
        top_p=body.number("top_p", 0, 1, default=1.0, low_excluded=True),
        top_k=max(body.integer("top_k", -1) or 0, 0),
        min_p=body.number("min_p", 0, 1, default=0.0),
        seed=body.integer("seed", -(2**63), 2**63 - 1),
        stop=body.stop_strings(),
        stop_token_ids=tuple(body.token_ids("stop_token_ids")),
        include_stop_str_in_output=body.boolean("include_stop_str_in_output"),
        ignore_eos=body.boolean("ignore_eos"),
        min_tokens=min_tokens,
        skip_special_tokens=body.boolean("skip_special_tokens", True),
        logprobs=logprobs,
        logprob_token_ids=labels,
        prompt_logprobs=prompt_logprobs,
        echo=echo,
        extra=extra,
        chat=reading,
    )


def _parse_extra(body: _Body, forced_calls: str | None = None) -> bytes:
    """`SamplingParams.extra` of a body; what is as by default is left out, so that equal requests have equal ones."""
    extra: dict[str, Any] = {}
    for name in ("presence_penalty", "frequency_penalty"):
        if penalty := body.number(name, -2, 2, default=0.0):
            extra[name] = penalty
    if (penalty := body.number("repetition_penalty", 0, 100, default=1.0, low_excluded=True)) != 1.0:
        extra["repetition_penalty"] = penalty
    if bias := body.mapping("logit_bias"):
        for token, value in bias.items():
            if not (token.isascii() and token.isdecimal()) or type(value) not in (int, float):
                raise invalid("logit_bias", {token: value}, 'token ids with numbers, such as {"42": -100}')
        extra["logit_bias"] = bias
    if words := body.strings("bad_words"):
        extra["bad_words"] = words
    if body.present("allowed_token_ids"):
        extra["allowed_token_ids"] = body.token_ids("allowed_token_ids")
        if not extra["allowed_token_ids"]:
            raise invalid("allowed_token_ids", [], "at least one token id")
    if (budget := body.integer("thinking_token_budget", 0)) is not None:
        extra["thinking_token_budget"] = budget
    if (constraint := _parse_constraint(body, forced_calls)) is not None:
        extra["structured_outputs"] = constraint
    return orjson.dumps(extra, option=orjson.OPT_SORT_KEYS) if extra else b""


def _parse_constraint(body: _Body, forced_calls: str | None) -> dict[str, Any] | None:
    """What the output must look like, in the terms of vLLM's `structured_outputs`."""
    found: dict[str, dict[str, Any]] = {}
    if forced_calls is not None:
        found["tool_choice"] = {"grammar": forced_calls}
    for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar"):
        if body.present(name):
            found[name] = {name.removeprefix("guided_"): body.value(name)}
    if (structured := body.mapping("structured_outputs")) is not None:
        given = {name: value for name, value in structured.items() if value is not None}
        for name in given:
            if name not in _CONSTRAINTS + _CONSTRAINT_OPTIONS:
                raise RequestError(
                    "unsupported_parameter",
                    f"'structured_outputs.{name}' is not supported. Use one of {', '.join(_CONSTRAINTS)}.",
                    param=f"structured_outputs.{name}",
                )
        found["structured_outputs"] = given
    if (form := body.mapping("response_format")) is not None and (
        constraint := _parse_response_format(form)
    ) is not None:
        found["response_format"] = constraint
    if len(found) > 1:
        raise RequestError(
            "invalid_request", f"{' and '.join(found)} are both set. Keep one of them.", param=[*found][-1]
        )
    for name, constraint in found.items():
        _check_constraint(name, constraint)
    return next(iter(found.values()), None)


def _parse_response_format(form: dict[str, Any]) -> dict[str, Any] | None:
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind != "json_schema":
        raise invalid("response_format.type", kind, '"text", "json_object" or "json_schema"')
    schema = form.get("json_schema")
    schema = schema.get("schema") if isinstance(schema, dict) else None
    if not isinstance(schema, dict):
        raise invalid("response_format.json_schema", form.get("json_schema"), "an object with 'schema'")
    return {"json": schema}


def _check_constraint(param: str, constraint: dict[str, Any]) -> None:
    kinds = [name for name in _CONSTRAINTS if name in constraint]
    if len(kinds) != 1:
        raise invalid(param, constraint, f"one of {', '.join(_CONSTRAINTS)}")
    kind, value = kinds[0], constraint[kinds[0]]
    good: dict[str, tuple[bool, str]] = {
        "json": (isinstance(value, dict | str), "a JSON schema"),
        "regex": (isinstance(value, str) and value != "", "a regular expression"),
        "grammar": (isinstance(value, str) and value != "", "a grammar in EBNF"),
        "json_object": (value is True, "true"),
        "choice": (
            isinstance(value, list) and value != [] and all(isinstance(text, str) for text in value),
            "a non-empty list of strings",
        ),
    }
    is_good, expected = good[kind]
    if not is_good:
        raise invalid(f"{param}.{kind}" if param == "structured_outputs" else param, value, expected)


def _parse_prompt(values: dict[str, Any]) -> str | list[int]:
    prompt = require(values, "prompt", "Give a string or a list of token ids.")
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt:
        if _are_token_ids(prompt):
            return prompt
        if all(isinstance(item, str | list) for item in prompt):
            raise RequestError(
                "unsupported_parameter",
                f"'prompt' is a list of {len(prompt)} prompts. "
                "Write one line per prompt, each with its own custom_id.",
                param="prompt",
            )
    raise invalid("prompt", prompt, "a non-empty string or a non-empty list of token ids")


def _are_token_ids(values: list[Any]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


class _Body:
    """Typed reading of a body; null is the same as absent, a boolean is not a number, a string is neither."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def present(self, name: str) -> bool:
        return self._values.get(name) is not None

    def string(self, name: str) -> str | None:
        value = self._values.get(name)
        if value is None or isinstance(value, str):
            return value
        raise invalid(name, value, "a string")

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        raise invalid(name, value, "true or false")

    def integer(self, name: str, low: int, high: int | None = None) -> int | None:
        value = self._values.get(name)
        if value is None:
            return None
        if type(value) is int and value >= low and (high is None or value <= high):
            return value
        raise invalid(
            name, value, f"an integer of at least {low}" if high is None else f"an integer {low} .. {high}"
        )

    def number(self, name: str, low: int, high: int, *, default: float, low_excluded: bool = False) -> float:
        value = self._values.get(name)
        if value is None:
            return default
        if type(value) in (int, float) and (low < value <= high or (value == low and not low_excluded)):
            return float(value)
        raise invalid(
            name, value, f"a number {f'above {low}, at most {high}' if low_excluded else f'{low} .. {high}'}"
        )

    def mapping(self, name: str) -> dict[str, Any] | None:
        value = self._values.get(name)
        if value is None or isinstance(value, dict):
            return value or None
        raise invalid(name, value, "an object")

    def value(self, name: str) -> Any:
        return self._values.get(name)

    def strings(self, name: str) -> list[str]:
        value = self._values.get(name)
        if value is None:
            return []
        if isinstance(value, list) and all(isinstance(text, str) and text for text in value):
            return value
        raise invalid(name, value, "a list of non-empty strings")

    def token_ids(self, name: str) -> list[int]:
        value = self._values.get(name)
        if value is None:
            return []
        if isinstance(value, list) and _are_token_ids(value):
            return value
        raise invalid(name, value, "a list of token ids")

    def stop_strings(self) -> tuple[str, ...]:
        value = self._values.get("stop")
        stops = [value] if isinstance(value, str) else [] if value is None else value
        if isinstance(stops, list) and all(isinstance(stop, str) and stop for stop in stops):
            return tuple(stops)
        raise invalid("stop", value, "a non-empty string or a list of them")


# -------- writing --------


def success_line(
    row: PreparedRow,
    completions: Sequence[Completion],
    *,
    model: str,
    num_prompt_tokens: int,
    tokenizer: Tokenizer,
    prompt: Sequence[int] = (),
    echo: bool = False,
) -> bytes:
    """The line of the output file for a row with all its completions, in sample order.

    `prompt` has its token ids where `echo` or the log probabilities of a prompt need them.

    The prompt counts once however many completions share it, and so do its cached tokens: they are those of
    the completion that found least in the cache, the one that computed the prompt for the others. The answer of a
    server is written as it is.
    """
    if completions[0].body is not None:
        return _result_line(row.custom_id, 200, completions[0].body)
    chat = row.url == CHAT_URL
    num_completion_tokens = sum(len(completion.token_ids) for completion in completions)
    usage: dict[str, Any] = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": min(c.num_cached_tokens for c in completions)},
    }
    if completions[0].num_reasoning_tokens is not None:
        num_reasoning_tokens = sum(completion.num_reasoning_tokens or 0 for completion in completions)
        usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning_tokens}
    prompt_logprobs = completions[0].prompt_logprobs
    told = None if prompt_logprobs is None else _prompt_logprobs(prompt_logprobs, tokenizer)
    echoed = _Echo(tokenizer.decode(prompt), prompt, prompt_logprobs) if echo else None
    body: dict[str, Any] = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid4().hex}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            _choice(index, completion, chat, tokenizer, echoed)
            for index, completion in enumerate(completions)
        ],
        "usage": usage,
    }
    if told is not None:
        for part in (body,) if chat else body["choices"]:
            part["prompt_logprobs"] = told
    return _result_line(row.custom_id, 200, body)


def failure_line(error: LineError) -> bytes:
    """The line of the error file for an input line that failed; its error object says which line of which file."""
    body: dict[str, Any] = {
        "error": {
            "message": error.message,
            "type": "invalid_request_error" if error.status_code < 500 else "server_error",
            "param": error.param,
            "code": error.code,
            "line": error.line,
        }
    }
    if error.file is not None:
        body["error"]["file"] = error.file
    return _result_line(error.custom_id, error.status_code, body)


def expired_line(custom_id: str) -> bytes:
    """The line of the error file for an input line that was not run in time."""
    message = "This request could not be executed before the completion window expired."
    result = {
        "id": f"batch_req_{uuid4().hex}",
        "custom_id": custom_id,
        "response": None,
        "error": {"code": "batch_expired", "message": message},
    }
    return orjson.dumps(result, option=orjson.OPT_APPEND_NEWLINE)


def as_failed_result(failure: bytes) -> bytes:
    """A line of the error file as it stands among results: without a body, and with the reason as `error`.

    That is the shape of vLLM's run-batch, which has one file for both.
    """
    line = orjson.loads(failure)
    if line["response"] is not None:
        line["error"] = line["response"]["body"]
        line["response"]["body"] = None
    return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


def _result_line(custom_id: str | None, status_code: int, body: dict[str, Any]) -> bytes:
    result = {
        "id": f"batch_req_{uuid4().hex}",
        "custom_id": custom_id,
        "response": {"status_code": status_code, "request_id": uuid4().hex, "body": body},
        "error": None,
    }
    line = orjson.dumps(result, option=orjson.OPT_APPEND_NEWLINE)
    for separator, escaped in _ESCAPED_SEPARATORS:  # in JSON they occur in strings only
        if separator in line:
            line = line.replace(separator, escaped)
    return line


class _Echo(NamedTuple):
    """The prompt, to be told in front of an output."""

    text: str
    token_ids: Sequence[int]
    logprobs: list[TokenLogprob] | None


def _choice(
    index: int, completion: Completion, chat: bool, tokenizer: Tokenizer, echo: _Echo | None
) -> dict[str, Any]:
    logprobs = completion.logprobs
    choice: dict[str, Any] = {"index": index}
    if chat:
        choice["message"] = completion.message or {
            "role": "assistant",
            "content": completion.text,
            "refusal": None,
        }
        choice["logprobs"] = None if logprobs is None else _chat_logprobs(logprobs, tokenizer)
    else:
        choice["text"] = completion.text if echo is None else echo.text + completion.text
        choice["logprobs"] = None if logprobs is None else _completions_logprobs(logprobs, tokenizer, echo)
    choice["finish_reason"] = completion.finish_reason
    choice["stop_reason"] = completion.stop_reason
    return choice


def _chat_logprobs(logprobs: list[TokenLogprob], tokenizer: Tokenizer) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        token_bytes = tokenizer.token_bytes(token_id)
        return {
            "token": tokenizer.token_text(token_id),
            "logprob": _finite(logprob),
            "bytes": None if token_bytes is None else list(token_bytes),
        }

    content = [
        entry(token.token_id, token.logprob)
        | {"top_logprobs": [entry(*alternative) for alternative in token.top]}
        for token in logprobs
    ]
    return {"content": content, "refusal": None}


def _prompt_logprobs(
    logprobs: list[TokenLogprob], tokenizer: Tokenizer
) -> list[dict[str, dict[str, Any]] | None]:
    """By token id, as vLLM's server tells them; of the first token there are none."""
    places: list[dict[str, dict[str, Any]] | None] = [None]
    for token in logprobs:
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(token.top, start=1)}
        places.append(
            {
                str(token_id): {
                    "logprob": _finite(logprob),
                    "rank": ranks.get(token_id),
                    "decoded_token": tokenizer.token_text(token_id),
                }
                for token_id, logprob in {token.token_id: token.logprob, **dict(token.top)}.items()
            }
        )
    return places


def _completions_logprobs(
    logprobs: list[TokenLogprob], tokenizer: Tokenizer, echo: _Echo | None
) -> dict[str, Any]:
    found = _output_logprobs(logprobs, tokenizer)
    if echo is None or echo.logprobs is None:
        return found
    before = _output_logprobs(echo.logprobs, tokenizer)
    first = tokenizer.token_text(echo.token_ids[0])
    length = len(first) + sum(map(len, before["tokens"]))
    return {
        "tokens": [first, *before["tokens"], *found["tokens"]],
        "token_logprobs": [None, *before["token_logprobs"], *found["token_logprobs"]],
        "top_logprobs": [None, *before["top_logprobs"], *found["top_logprobs"]],
        "text_offset": [
            0,
            *(len(first) + offset for offset in before["text_offset"]),
            *(length + offset for offset in found["text_offset"]),
        ],
    }


def _output_logprobs(logprobs: list[TokenLogprob], tokenizer: Tokenizer) -> dict[str, Any]:
    tokens = [tokenizer.token_text(token.token_id) for token in logprobs]
    offsets, offset = [], 0
    for text in tokens:
        offsets.append(offset)
        offset += len(text)
    top_logprobs: list[dict[str, float]] = []
    for text, token in zip(tokens, logprobs, strict=True):
        top: dict[str, float] = {}
        for token_id, logprob in token.top:
            top.setdefault(
                tokenizer.token_text(token_id), _finite(logprob)
            )  # of equal texts the likelier counts
        top.setdefault(text, _finite(token.logprob))
        top_logprobs.append(top)
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(token.logprob) for token in logprobs],
        "top_logprobs": top_logprobs,
        "text_offset": offsets,
    }


def _finite(logprob: float) -> float:
    return logprob if logprob > _MIN_LOGPROB else _MIN_LOGPROB  # NaN fails the comparison too
