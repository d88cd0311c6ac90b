"""Good lines with a few bytes or values changed: never a traceback, never a lost good line, one outcome per line."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import openai.types
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blendserve.jobs.openai_format import CHAT_URL, COMPLETIONS_URL, LineError, failure_line, read_rows
from blendserve.jobs.prepare import prepare
from blendserve.jobs.sources import find_sources
from blendserve.tokenizer import Tokenizer

BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        CHAT_URL,
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "é😀\u2028"}]},
    ),
    (
        CHAT_URL,
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "me"}],
            "max_completion_tokens": 3,
            "logprobs": True,
            "top_logprobs": 2,
            "chat_template_kwargs": {"enable_thinking": False},
        },
    ),
    (
        COMPLETIONS_URL,
        {"prompt": "Once upon", "max_tokens": 4, "temperature": 0.5, "stop": ["\n", "x"], "n": 2},
    ),
    (
        COMPLETIONS_URL,
        {"prompt": [1, 2, 300], "max_tokens": 4, "seed": -1, "stop_token_ids": [2], "user": "custom_id"},
    ),
]

# Bytes that mean something to JSON, to UTF-8, to terminals or to whoever splits lines.
TELLING = st.sampled_from(
    [*b'"\\{}[],:-+.eE019 \t\r\n\0\x0b\x0c\x1b\x7f', *b"\x80\x85\xa8\xc0\xe2\xed\xef\xf4\xfe\xff"]
)
SNIPPETS = st.sampled_from(
    [
        *(b"NaN", b"null", b"true", b"1e999", b'"\\ud800"', b"[" * 300, b"\xe2\x80\xa8", b"\xef\xbb\xbf"),
        *(b'"body":{},', b'"custom_id":"other",', b"9" * 40, b"\n", b"{}", b'{"prompt":"x"}', b"\xff\xfe"),
    ]
)
NESTED: Any = []
for _ in range(400):
    NESTED = [NESTED]
VALUES = st.sampled_from(
    [
        *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64 - 1, 1e308, -0.0, 0.5, "", "x", "16", "😀", "\0"),
        *([], {}, [[]], NESTED, {"a": NESTED}, ["x", 1], [1, -1], [2**64 - 1], {"role": "user"}, "x" * 5000),
        *([True], CHAT_URL),
    ]
)


def good_line(custom_id: str, kind: int) -> bytes:
    url, body = BODIES[kind]
    return orjson.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


@st.composite
def mutated_lines(draw: st.DrawFn) -> bytes:
    """Bytes that were one good line, whose custom_id is that of no other line."""
    line = good_line(
        "changed-" + draw(st.text("abc", min_size=1, max_size=3)), draw(st.integers(0, len(BODIES) - 1))
    )
    for _ in range(draw(st.integers(0, 2))):
        line = json.dumps(swapped(orjson.loads(line), draw), ensure_ascii=False).encode()
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(line)))
        match draw(st.sampled_from(["flip", "replace", "insert", "cut", "delete", "repeat"])):
            case "flip" if place < len(line):
                line = (
                    line[:place] + bytes([line[place] ^ (1 << draw(st.integers(0, 7)))]) + line[place + 1 :]
                )
            case "replace":
                line = line[:place] + bytes([draw(TELLING)]) + line[place + 1 :]
            case "insert":
                line = line[:place] + draw(SNIPPETS) + line[place:]
            case "cut":
                line = line[:place]
            case "delete":
                line = line[:place] + line[place + draw(st.integers(1, 9)) :]
            case "repeat":
                line = line[:place] + line[max(place - draw(st.integers(1, 60)), 0) :]
    return line


def swapped(value: Any, draw: st.DrawFn) -> Any:
    """Another value at some place, at any depth, or a key more."""
    holder = value
    while isinstance(holder, dict | list) and holder:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = draw(st.sampled_from(keys))
        if not isinstance(holder[key], dict | list) or not holder[key] or draw(st.booleans()):
            new = draw(VALUES)
            if isinstance(holder, dict) and draw(st.booleans()):
                key = draw(
                    st.sampled_from(["stop", "n", "model", "tools", "seed", "logit_bias", "role", "prompt"])
                )
            holder[key] = new
            break
        holder = holder[key]
    return value


@pytest.fixture(scope="module")
def tokenizer(bundled_model: Any) -> Tokenizer:
    return Tokenizer(bundled_model.folder)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.none() | mutated_lines(), min_size=1, max_size=6), st.integers(5, 5000))
def test_mutated_lines_end_as_one_result_or_one_error(
    tokenizer: Tokenizer, drawn: list[bytes | None], max_line_bytes: int
) -> None:
    lines = [good_line("kept-first", 0)]
    kept = ["kept-first"]
    for index, mutated in enumerate(drawn):
        if mutated is None:
            kept.append(f"kept-{index}")
            lines.append(good_line(kept[-1], index % len(BODIES)))
        else:
            lines.append(mutated)
    content = b"\n".join(lines)
    max_line_bytes = max(max_line_bytes, 500)
    with TemporaryDirectory() as folder:
        path = Path(folder, "in.jsonl")
        path.write_bytes(content)
        rows = list(read_rows(find_sources([path]), max_line_bytes=max_line_bytes))
    prepared = prepare(rows, tokenizer, served_model_name="tiny", max_model_len=128)

    numbers = [number for number, raw in enumerate(content.split(b"\n"), start=1) if raw.strip()]
    assert [row.line for row in rows] == numbers
    assert sorted([row.line for row in prepared.rows] + [error.line for error in prepared.errors]) == numbers
    assert set(kept) <= {row.custom_id for row in prepared.rows}
    assert len(prepared.requests) == sum(row.n for row in prepared.rows)
    assert (prepared.requests.prompt_tokens + prepared.requests.max_tokens <= 128).all()
    assert prepared.requests.tokens.data.max() < tokenizer.vocab_size
    for error in prepared.errors:
        assert isinstance(error, LineError)
        assert error.code != "internal_error"
        result = json.loads(failure_line(error), parse_constant=pytest.fail)
        openai.types.BatchError.model_validate(result["response"]["body"]["error"], strict=True)
