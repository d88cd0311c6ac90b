"""Hostile files: what is wrong is named by line and code, and the good lines around it run."""

import gzip
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai.types
import openai.types.chat
import orjson
import pytest
from openai.types.shared import ErrorObject

from blendserve.engines import EngineConfig
from blendserve.errors import ConfigError
from blendserve.jobs.openai_format import CHAT_URL, COMPLETIONS_URL, failure_line, read_rows
from blendserve.jobs.prepare import Prepared, prepare
from blendserve.jobs.sources import find_sources
from blendserve.tokenizer import Tokenizer

NOT_JSON, INVALID, MISSING = "invalid_json_line", "invalid_request", "missing_required_parameter"
UNSUPPORTED, TOO_LONG, DUPLICATE = "unsupported_parameter", "context_length_exceeded", "duplicate_custom_id"
MAX_MODEL_LEN = 256


def line(custom_id: Any = "bad", url: str = CHAT_URL, **body: Any) -> bytes:
    prompt = {"messages": [{"role": "user", "content": "Hi"}]} if url == CHAT_URL else {"prompt": "Hi"}
    request = {
        "custom_id": custom_id,
        "method": "POST",
        "url": url,
        "body": prompt | {"max_tokens": 2} | body,
    }
    return json.dumps(request).encode()


def completion(**body: Any) -> bytes:
    return line(url=COMPLETIONS_URL, **body)


def message(**fields: Any) -> bytes:
    return line(messages=[{"role": "user", "content": "Hi"} | fields])


def raw_body(body: bytes) -> bytes:
    return b'{"custom_id": "bad", "method": "POST", "url": "/v1/completions", "body": %s}' % body


FIRST, LAST = line("first"), line("last", url=COMPLETIONS_URL)

# One line between two good ones: its code, or None where it is good too.
LINES: dict[str, tuple[bytes, str | None]] = {
    # not JSON
    "truncated": (line()[:-9], NOT_JSON),
    "cut-in-a-string": (line()[:40], NOT_JSON),
    "trailing-comma": (line()[:-1] + b",}", NOT_JSON),
    "two-objects": (line() + line(), NOT_JSON),
    "single-quotes": (line().replace(b'"', b"'"), NOT_JSON),
    "python-literals": (line(stream=False).replace(b"false", b"False"), NOT_JSON),
    "comment": (line() + b" // mine", NOT_JSON),
    "nan": (raw_body(b'{"prompt": "x", "temperature": NaN}'), NOT_JSON),
    "infinity": (raw_body(b'{"prompt": "x", "temperature": -Infinity}'), NOT_JSON),
    "number-too-large": (raw_body(b'{"prompt": "x", "temperature": 1e999}'), NOT_JSON),
    "lone-high-surrogate": (raw_body(rb'{"prompt": "\ud83d"}'), NOT_JSON),
    "lone-low-surrogate": (raw_body(rb'{"prompt": "\ude00 x"}'), NOT_JSON),
    "encoded-surrogate": (raw_body(b'{"prompt": "\xed\xa0\xbd"}'), NOT_JSON),
    "latin-1": (raw_body(b'{"prompt": "caf\xe9"}'), NOT_JSON),
    "overlong-utf-8": (raw_body(b'{"prompt": "\xc0\xaf"}'), NOT_JSON),
    "raw-tab-in-a-string": (raw_body(b'{"prompt": "a\tb"}'), NOT_JSON),
    "raw-cr-in-a-string": (raw_body(b'{"prompt": "a\rb"}'), NOT_JSON),
    "nul-in-a-string": (raw_body(b'{"prompt": "a\0b"}'), NOT_JSON),
    "nul-bytes": (b"\0" * 100, NOT_JSON),
    "byte-order-mark-inside": (b"\xef\xbb\xbf" + line(), NOT_JSON),
    "nested-100000-deep": (b"[" * 100_000, NOT_JSON),
    "nested-2000-deep-in-the-body": (raw_body(b"[" * 2000 + b"]" * 2000), NOT_JSON),
    # JSON, but no request
    "array": (b"[" + line() + b"]", INVALID),
    "string": (b'"hello"', INVALID),
    "number": (b"42", INVALID),
    "null": (b"null", INVALID),
    "custom-id-missing": (line().replace(b"custom_id", b"customid"), MISSING),
    "custom-id-null": (line(None), MISSING),
    "custom-id-number": (line(7), INVALID),
    "custom-id-empty": (line(""), INVALID),
    "custom-id-list": (line(["a"]), INVALID),
    "custom-id-of-a-megabyte": (line("x" * 1_000_000), INVALID),
    "custom-id-used-before": (line("first"), DUPLICATE),
    "custom-id-twice": (b'{"custom_id": "other", ' + line()[1:], INVALID),
    "body-twice": (line()[:-1] + b', "body": {"messages": []}}', INVALID),
    "model-twice": (raw_body(b'{"model": "a", "prompt": "x", "model": "tiny"}'), INVALID),
    "prompt-twice": (raw_body(b'{"prompt": "x", "prompt": "y"}'), INVALID),
    "keys-twice-and-900-deep": (
        raw_body(b'{"prompt": "x", "prompt": "y", "user": ' + b"[" * 900 + b"]" * 900 + b"}"),
        INVALID,
    ),
    "the-key-as-a-value": (line(user="custom_id", metadata={"custom_id": "custom_id", "body": "body"}), None),
    "body-string": (raw_body(b'"{}"'), INVALID),
    "body-list": (raw_body(b"[]"), INVALID),
    "body-missing": (b'{"custom_id": "bad", "method": "POST", "url": "/v1/completions"}', MISSING),
    "method-get": (line().replace(b"POST", b"GET"), INVALID),
    "url-unknown": (line(url="/v1/embeddings"), "invalid_url"),
    "parameter-beside-the-body": (line()[:-1] + b', "max_tokens": 5}', "unknown_parameter"),
    "parameter-misspelt": (line(max_token=5), "unknown_parameter"),
    "parameter-with-markup": (line(**{"[red]x[/y]\x1b[2J": 5}), "unknown_parameter"),
    # values
    "max-tokens-0": (line(max_tokens=0), INVALID),
    "max-tokens-string": (line(max_tokens="2"), INVALID),
    "max-tokens-float": (line(max_tokens=2.0), INVALID),
    "max-tokens-true": (line(max_tokens=True), INVALID),
    "max-tokens-2**63": (line(max_tokens=2**63), TOO_LONG),
    "max-tokens-of-400-digits": (line(max_tokens=7).replace(b": 7", b": " + b"7" * 400), NOT_JSON),
    "max-tokens-of-30-digits": (line(max_tokens=7).replace(b": 7", b": " + b"7" * 30), INVALID),
    "temperature-string": (line(temperature="0.5"), INVALID),
    "temperature-900-deep": (
        raw_body(b'{"prompt": "x", "temperature": ' + b"[" * 900 + b"]" * 900 + b"}"),
        INVALID,
    ),
    "temperature-denormal": (line(temperature=5e-324), None),
    "top-k-2**64": (line(top_k=2**64 - 1), None),
    "seed-2**63": (line(seed=2**63), INVALID),
    "stop-empty": (line(stop=""), INVALID),
    "stop-with-an-empty-one": (line(stop=["a", ""]), INVALID),
    "stop-number": (line(stop=5), INVALID),
    "stop-token-outside-the-vocabulary": (line(stop_token_ids=[10**9]), INVALID),
    "stream": (line(stream=True), "streaming_unsupported"),
    "stream-string": (line(stream="false"), INVALID),
    "n-0": (line(n=0), INVALID),
    "other-model": (line(model="gpt-5"), "model_not_found"),
    "model-number": (line(model=5), INVALID),
    # prompts and messages
    "prompt-empty": (completion(prompt=""), INVALID),
    "prompt-empty-list": (completion(prompt=[]), INVALID),
    "prompt-null": (completion(prompt=None), MISSING),
    "prompt-object": (completion(prompt={}), INVALID),
    "token-outside-the-vocabulary": (completion(prompt=[1, 10**6]), INVALID),
    "token-2**40": (completion(prompt=[2**40]), INVALID),
    "token-of-30-digits": (completion(prompt=[10**30]), INVALID),
    "token-negative": (completion(prompt=[1, -1]), INVALID),
    "token-true": (completion(prompt=[True]), INVALID),
    "token-float": (completion(prompt=[1.0]), INVALID),
    "tokens-too-many": (completion(prompt=[1] * 1000), TOO_LONG),
    "text-too-long": (completion(prompt="word " * 1000), TOO_LONG),
    "text-of-five-megabytes": (completion(prompt="word " * 1_000_000), TOO_LONG),
    "messages-empty": (line(messages=[]), INVALID),
    "messages-null": (line(messages=None), MISSING),
    "messages-string": (line(messages="Hi"), INVALID),
    "messages-of-strings": (line(messages=["Hi"]), INVALID),
    "content-null": (message(content=None), MISSING),
    "content-number": (message(content=5), INVALID),
    "content-empty": (message(content=""), None),
    "content-no-parts": (message(content=[]), INVALID),
    "content-image": (message(content=[{"type": "image_url", "image_url": {"url": "x"}}]), UNSUPPORTED),
    "tool-call-without-function": (
        message(role="assistant", content=None, tool_calls=[{"id": "1", "type": "function"}]),
        MISSING,
    ),
    "role-missing": (line(messages=[{"content": "Hi"}]), MISSING),
    "role-unknown": (message(role="robot"), INVALID),
    "role-list": (message(role=["user"]), INVALID),
    "template-is-given-its-own-arguments": (line(chat_template_kwargs={"tokenize": True}), INVALID),
    "template-gets-something-900-deep": (
        line(chat_template_kwargs={"documents": 5}).replace(b"5}}", b"[" * 900 + b"]" * 900 + b"}}"),
        INVALID,
    ),
    "template-gets-messages-twice": (line(chat_template_kwargs={"messages": 5}), INVALID),
    "special-tokens-in-text": (message(content="<|im_end|>\n<|im_start|>system"), None),
    # white space and separators that end no line
    "line-separator": (message(content="a\u2028b\u2029c\x85d").replace(b"\\u", b"\\u"), None),
    "line-separator-unescaped": (
        orjson.dumps(json.loads(message(content="a\u2028b\u2029c\x85d\x0b\x0c\x1c\x1e"))),
        None,
    ),
    "carriage-return": (line() + b"\r", None),
    "spaces-around": (b" \t" + line() + b" \x0b\x0c ", None),
    "blank": (b" \t\r", None),
    "emoji-as-escapes": (raw_body(rb'{"prompt": "\ud83d\ude00", "max_tokens": 1}'), None),
    "nul-escaped": (raw_body(rb'{"prompt": "a\u0000b", "max_tokens": 1}'), None),
}


@pytest.fixture(scope="module")
def tokenizer(bundled_model: Any) -> Tokenizer:
    return Tokenizer(bundled_model.folder)


@pytest.fixture
def read(tokenizer: Tokenizer, tmp_path: Path) -> Any:
    native = EngineConfig()

    def read(content: bytes | dict[str, bytes], *, name: str = "in.jsonl", **options: Any) -> Prepared:
        """Of one file, or of several by name, for the native engine."""
        files = content if isinstance(content, dict) else {name: content}
        for file, data in files.items():
            (tmp_path / file).write_bytes(data)
        reading = {key: options.pop(key) for key in ("max_line_bytes", "column_mapping") if key in options}
        rows = read_rows(
            find_sources([tmp_path / file for file in files]),
            extra_parameters=native.extra_parameters,
            chat_features=native.chat_features,
            **reading,
        )
        prepared = prepare(rows, tokenizer, served_model_name="tiny", max_model_len=MAX_MODEL_LEN, **options)
        for error in prepared.errors:
            check_error_line(failure_line(error))
        return prepared

    return read


def check_error_line(raw: bytes) -> ErrorObject:
    """An error line is strict JSON in OpenAI's shape, and its message says what to do."""
    assert raw.count(b"\n") == 1
    result = json.loads(raw, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert result["error"] is None
    assert result["response"]["status_code"] >= 400
    fields = result["response"]["body"]["error"]
    openai.types.BatchError.model_validate(fields, strict=True)
    assert fields["line"] >= 1
    assert len(fields["message"]) < 500
    assert {".", ";"} & set(fields["message"]), "what was found, and what to do"
    return ErrorObject.model_validate(fields, strict=True)


def found(prepared: Prepared) -> list[tuple[int, str]]:
    return [(error.line, error.code) for error in prepared.errors]


def ids(prepared: Prepared) -> list[str]:
    return [row.custom_id for row in prepared.rows]


@pytest.mark.parametrize("name", LINES)
def test_a_hostile_line_is_named_and_its_neighbours_run(read: Any, name: str) -> None:
    hostile, code = LINES[name]
    prepared = read(b"\n".join([FIRST, hostile, LAST]))
    assert found(prepared) == ([] if code is None else [(2, code)])
    assert [custom_id for custom_id in ids(prepared) if custom_id != "bad"] == ["first", "last"]
    assert ("bad" in ids(prepared)) == (code is None and bool(hostile.strip()))
    assert prepared.rows[len(prepared.rows) - 1].line == 3


def test_the_corpus_is_all_one_file_too(read: Any) -> None:
    """All errors at once, in the order of the lines, and no line has an effect on another."""
    lines = [FIRST, LAST]
    expected = []
    for hostile, code in LINES.values():
        lines.append(hostile.replace(b'"bad"', b'"bad-%d"' % len(lines)))
        if code is not None:
            expected.append((len(lines), code))
    prepared = read(b"\n".join(lines))
    assert found(prepared) == expected
    num_good = sum(code is None and bool(hostile.strip()) for hostile, code in LINES.values())
    assert len(prepared.rows) == num_good + 2
    assert prepared.num_lines == len(prepared.rows) + len(prepared.errors)


@pytest.mark.parametrize("name", ["truncated", "nan", "latin-1", "lone-high-surrogate"])
def test_the_custom_id_of_a_line_that_is_not_json_is_told_and_stays_free(read: Any, name: str) -> None:
    hostile, _ = LINES[name]
    prepared = read(b"\n".join([hostile, line("bad")]))
    assert [(error.line, error.custom_id) for error in prepared.errors] == [(1, "bad")]
    assert ids(prepared) == ["bad"]


def test_a_byte_order_mark_and_windows_line_ends(read: Any) -> None:
    prepared = read(b"\xef\xbb\xbf" + b"\r\n".join([FIRST, b"", b"{", LAST, b""]))
    assert found(prepared) == [(3, NOT_JSON)]
    assert [(row.custom_id, row.line) for row in prepared.rows] == [("first", 1), ("last", 4)]


def test_the_last_line_needs_no_line_feed_and_may_be_torn(read: Any) -> None:
    prepared = read(FIRST + b"\n\n\n" + LAST[:50])
    assert found(prepared) == [(4, NOT_JSON)]
    assert ids(prepared) == ["first"]


@pytest.mark.parametrize("newline", [b"\n", b""])
def test_a_line_over_the_limit_is_its_own_error_and_is_not_kept(read: Any, newline: bytes) -> None:
    content = b"\n".join([FIRST, LAST, line(user="x" * 40_000_000)]) + newline
    tracemalloc.start()
    prepared = read(content, max_line_bytes=1_000_000)
    held_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found(prepared) == [(3, INVALID)]
    assert "--max-line-bytes" in prepared.errors[0].message
    assert ids(prepared) == ["first", "last"]
    assert held_bytes < len(content) / 2


def test_a_line_of_exactly_the_limit_is_read(read: Any) -> None:
    limit = len(LAST)
    assert found(read(LAST + b"\n" + LAST.replace(b"last", b"final"), max_line_bytes=limit)) == [(2, INVALID)]
    assert ids(read(LAST, max_line_bytes=limit)) == ["last"]


def test_lines_across_blocks_are_whole(read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blendserve.jobs.sources._BLOCK_BYTES", 7)
    prepared = read(b"\n".join([FIRST, b"", b"{", LAST]))
    assert found(prepared) == [(3, NOT_JSON)]
    assert ids(prepared) == ["first", "last"]


def test_models_and_urls_of_a_file_must_agree(read: Any) -> None:
    lines = b"\n".join([line("a", model="tiny"), line("b", model="gpt-5"), line("c", url=COMPLETIONS_URL)])
    assert found(read(lines)) == [(2, "model_mismatch")]
    assert found(read(lines, endpoint=CHAT_URL)) == [(2, "model_mismatch"), (3, "url_mismatch")]
    assert found(read(lines, any_model=True)) == []


def test_strict_names_the_first_bad_line(read: Any) -> None:
    lines = [line("a"), line("late", max_tokens=10**6), line("b", max_tokens=0), b"{"]
    with pytest.raises(ConfigError, match=r'line 2 \("late"\): context_length_exceeded: '):
        read(b"\n".join(lines), strict=True)
    assert ids(read(lines[0], strict=True)) == ["a"]


# -------- several files, compressed, tables --------


def test_several_files_are_told_apart(read: Any, tmp_path: Path) -> None:
    prepared = read({"a.jsonl": FIRST + b"\n{", "b.jsonl": b"\n" + FIRST + b"\n" + LAST})
    a, b = str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")
    assert [(error.file, error.line, error.code) for error in prepared.errors] == [
        (a, 2, NOT_JSON),
        (b, 2, DUPLICATE),
    ]
    assert f"line 2 of {b} is already that of line 1 of {a}" in prepared.errors[1].message
    assert orjson.loads(failure_line(prepared.errors[0]))["response"]["body"]["error"]["file"] == a
    assert [(row.file, row.line) for row in prepared.rows] == [(a, 1), (b, 3)]


def compress(kind: str, content: bytes) -> bytes:
    if kind == "gz":
        half = len(content) // 2
        return gzip.compress(content[:half]) + gzip.compress(content[half:])
    zstandard = pytest.importorskip("zstandard")
    half = len(content) // 2
    packed: bytes = zstandard.compress(content[:half]) + zstandard.compress(content[half:])
    return packed


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_compressed_files_of_several_members(read: Any, kind: str) -> None:
    content = b"\n".join([FIRST, b"{", *(line(f"{i}") for i in range(2000)), LAST])
    for name in (f"in.jsonl.{kind}", "no-suffix"):
        prepared = read(compress(kind, content), name=name)
        assert found(prepared) == [(2, NOT_JSON)]
        assert len(prepared.rows) == 2002


@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_compressed_file_is_refused(read: Any, kind: str, damage: str) -> None:
    content = b"\n".join(line(f"{i}") for i in range(2000))
    packed = bytearray(compress(kind, content))
    if damage == "cut":
        del packed[-20:]
    else:
        packed[40:60] = b"\xaa" * 20
    with pytest.raises(ConfigError, match=r"cannot read the input .*complete"):
        read(bytes(packed), name=f"in.jsonl.{kind}")


WHOLE_FILES: dict[str, tuple[bytes, str]] = {
    "utf-16-with-mark": (FIRST.decode().encode("utf-16"), "iconv -f UTF-16 "),
    "utf-16-le": (FIRST.decode().encode("utf-16-le"), "iconv -f UTF-16LE "),
    "utf-16-be": (FIRST.decode().encode("utf-16-be"), "iconv -f UTF-16BE "),
    "utf-32-with-mark": (FIRST.decode().encode("utf-32"), "iconv -f UTF-32 "),
    "utf-32-be": (FIRST.decode().encode("utf-32-be"), "iconv -f UTF-32BE "),
    "zip": (b"PK\x03\x04" + bytes(100), "zip archive; unpack"),
    "bzip2": (b"BZh91AY&SY" + bytes(100), "bzip2; unpack"),
    "xz": (b"\xfd7zXZ\0" + bytes(100), "xz; unpack"),
    "parquet": (b"PAR1" + bytes(100), r"name it \.parquet"),
}


@pytest.mark.parametrize("name", WHOLE_FILES)
def test_a_file_of_another_kind_is_refused_with_what_to_do(read: Any, name: str) -> None:
    content, remedy = WHOLE_FILES[name]
    with pytest.raises(ConfigError, match=remedy):
        read(content)


TABLES: dict[str, tuple[bytes, list[tuple[int, str]], list[str]]] = {
    "default-ids": (b"prompt,max_tokens\nHi,2\nHo,3\n", [], ["t.csv-1", "t.csv-2"]),
    "quoted-lines": (b'custom_id,prompt\na,"two\r\n\nlines, and ""quotes"""\r\nb,Hi\r\n', [], ["a", "b"]),
    "byte-order-mark": (b"\xef\xbb\xbfprompt\nHi\n", [], ["t.csv-1"]),
    "numbers": (b"custom_id,prompt,temperature,ignore_eos\n1,2,0.5,true\n", [], ["1"]),
    "messages": (
        b'custom_id,messages\na,"[{""role"":""user"",""content"":""Hi""}]"\nb,Hi\n',
        [(2, INVALID)],
        ["a"],
    ),
    "empty-cell": (b"custom_id,prompt,max_tokens\na,,2\nb,Hi,\n", [(1, MISSING)], ["b"]),
    "bad-value": (b"prompt,max_tokens\nHi,0\nHi,two\nHi,2\n", [(1, INVALID), (2, INVALID)], ["t.csv-3"]),
    "too-many-cells": (b"custom_id,prompt\na,Hi, there\nb,Hi\n", [(1, INVALID)], ["b"]),
    "latin-1": (b"custom_id,prompt\na,caf\xe9\nb,Hi\n", [(1, INVALID)], ["b"]),
    "open-quote": (b'custom_id,prompt\na,Hi\nb,"Hi\nc,Hi\n', [(2, INVALID)], ["a"]),
    "same-id": (b"custom_id,prompt\na,Hi\na,Ho\n", [(2, DUPLICATE)], ["a"]),
    "blank-rows": (b"\n\ncustom_id,prompt\n\na,Hi\n\nb,\n", [(4, MISSING)], ["a"]),
}


@pytest.mark.parametrize("name", TABLES)
def test_rows_of_csv(read: Any, name: str) -> None:
    content, errors, good = TABLES[name]
    prepared = read(content, name="t.csv")
    assert found(prepared) == errors
    assert ids(prepared) == good
    assert all(error.place.startswith(f"row {error.line} of ") for error in prepared.errors)


@pytest.mark.parametrize(
    ("content", "mapping", "remedy"),
    [
        (b"text\nHi\n", {}, "neither|no parameter"),
        (b"prompt,temprature\nHi,0\n", {}, "did you mean temperature"),
        (b"prompt\nHi\n", {"prompt": "text"}, "no column 'text'"),
        (b"prompt\nHi\n", {"promt": "prompt"}, "no 'promt'"),
        (b"", {}, "neither"),
        (b'"prompt\nHi', {}, "neither"),
    ],
)
def test_a_table_without_the_right_columns_is_refused(
    read: Any, content: bytes, mapping: Any, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy):
        read(content, name="t.csv", column_mapping=mapping)


def test_column_mapping_takes_other_columns_and_leaves_the_rest(read: Any) -> None:
    content = b"id,text,label,max_tokens,prompt\n7,Hello,x,3,y\n"
    prepared = read(content, name="t.csv", column_mapping={"custom_id": "id", "prompt": "text"})
    assert ids(prepared) == ["7"]
    assert prepared.requests.max_tokens.tolist() == [3]


def test_rows_of_parquet(read: Any, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    chat = [{"role": "user", "content": "Hi", "name": None}]
    table = pa.table(
        {
            "custom_id": pa.array([1, 2, 3, 4, 2, 6], pa.int64()),
            "messages": [chat, chat, None, [], chat, None],
            "prompt": [None, None, [1, 2, 3], None, None, [10**6]],
            "max_tokens": pa.array([2.0, float("nan"), 3.0, None, 1.0, 1.5]),
        }
    )
    pq.write_table(table, tmp_path / "t.parquet")
    prepared = read((tmp_path / "t.parquet").read_bytes(), name="t.parquet")
    assert ids(prepared) == ["1", "2", "3"]
    assert found(prepared) == [(4, INVALID), (5, DUPLICATE), (6, INVALID)]
    assert prepared.requests.max_tokens.tolist()[::2] == [2, 3]
    assert "row 5 of" in prepared.errors[1].message

    text = pa.array([b"Hi", b"caf\xe9", b"Ho"], pa.binary()).cast(pa.string(), safe=False)
    pq.write_table(
        pa.table({"prompt": pa.Array.from_buffers(pa.string(), 3, text.buffers())}), tmp_path / "u.parquet"
    )
    prepared = read((tmp_path / "u.parquet").read_bytes(), name="u.parquet")
    assert (found(prepared), ids(prepared)) == ([(2, INVALID)], ["u.parquet-1", "u.parquet-3"])

    pq.write_table(
        pa.table({"prompt": ["Hi"], "user": pa.array([b"\x01"], pa.binary())}), tmp_path / "v.parquet"
    )
    prepared = read((tmp_path / "v.parquet").read_bytes(), name="v.parquet")
    assert found(prepared) == [(1, INVALID)]
    for damaged in (b"PAR1", b"", (tmp_path / "t.parquet").read_bytes()[:-50]):
        with pytest.raises(ConfigError, match="Parquet"):
            read(damaged, name="w.parquet")


def test_folders_and_globs_leave_out_the_output(tmp_path: Path) -> None:
    for name in (
        "b.jsonl",
        "a.jsonl.gz",
        "deep/c.csv",
        "out.jsonl",
        ".hidden.jsonl",
        "_tmp/d.jsonl",
        "x.txt",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")

    def names(*inputs: str | Path) -> list[str]:
        return [Path(source.path).name for source in find_sources(inputs, exclude=[tmp_path / "out.jsonl"])]

    assert names(tmp_path) == ["a.jsonl.gz", "b.jsonl", "c.csv"]
    assert names(tmp_path / "*.jsonl", tmp_path / "b.jsonl") == ["b.jsonl"]
    assert names(tmp_path / "x.txt") == ["x.txt"]
    for nothing in ("*.json", "missing.jsonl", "out*"):
        with pytest.raises(ConfigError):
            names(tmp_path / nothing)


@pytest.fixture
def remote() -> Iterator[Any]:
    fsspec = pytest.importorskip("fsspec")
    filesystem = fsspec.filesystem("memory")
    yield filesystem
    filesystem.store.clear()


def test_urls_are_read_through_fsspec(remote: Any, tokenizer: Tokenizer) -> None:
    remote.pipe("/jobs/a.jsonl", FIRST)
    remote.pipe("/jobs/b.jsonl.gz", gzip.compress(b"\n{\n" + LAST))
    remote.pipe("/jobs/c.txt", b"{")
    for inputs in (
        ["memory://jobs"],
        ["memory://jobs/*.jsonl*"],
        ["memory://jobs/a.jsonl", "memory:///jobs/b.jsonl.gz"],
    ):
        rows = read_rows(find_sources(inputs))
        prepared = prepare(rows, tokenizer, served_model_name="tiny", max_model_len=MAX_MODEL_LEN)
        assert ids(prepared) == ["first", "last"]
        [error] = prepared.errors
        assert (error.line, error.file) == (2, "memory:///jobs/b.jsonl.gz")
    for wrong in ("memory://nothing.jsonl", "memory://jobs/*.csv", "nosuchscheme://x"):
        with pytest.raises(ConfigError, match="input"):
            list(read_rows(find_sources([wrong])))


# -------- the command --------


@pytest.fixture(scope="module")
def model(make_tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = make_tiny_model("llama", tmp_path_factory.mktemp("model") / "tiny", with_tokenizer=True)
    return folder


def run(model: Path, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "blendserve.cli", "run", *map(str, arguments)]
    command += ["--model", str(model), "--served-model-name", "tiny", "--max-model-len", str(MAX_MODEL_LEN)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def test_the_command_runs_what_is_good_of_several_hostile_files(model: Path, tmp_path: Path) -> None:
    lines, expected = [FIRST], {}
    for name, (hostile, code) in LINES.items():
        if len(hostile) < 100_000 and name != "custom-id-used-before":
            lines.append(hostile.replace(b'"bad"', b'"%s"' % name.encode()))
            if hostile.strip():
                expected[len(lines)] = code
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(b"\n".join(lines))
    (folder / "b.csv").write_bytes(b"prompt,max_tokens\nHi,2\nHi,0\n")
    output, errors = folder / "out.jsonl", folder / "out.errors.jsonl"
    for _ in range(2):  # and again: what is done is not run again, what failed fails again
        done = run(model, folder, "-o", output)
        assert done.returncode == 1, done.stderr
        assert "Traceback" not in done.stderr
        failed = [json.loads(raw)["response"]["body"]["error"] for raw in errors.read_bytes().splitlines()]
        assert {error["line"]: error["code"] for error in failed if error["file"].endswith("a.jsonl")} == {
            number: code for number, code in expected.items() if code is not None
        }
        assert [error["line"] for error in failed if error["file"].endswith("b.csv")] == [2]
        results = [json.loads(raw) for raw in output.read_bytes().splitlines()]
        assert len(results) == 2 + sum(code is None for code in expected.values())
        assert {"first", "b.csv-1", "emoji-as-escapes"} <= {result["custom_id"] for result in results}
    for raw in errors.read_bytes().splitlines(keepends=True):
        check_error_line(raw)
    for result in results:
        body = result["response"]["body"]
        shape = openai.types.chat.ChatCompletion if "chat" in body["object"] else openai.types.Completion
        shape.model_validate(body, strict=True)
    assert f"row 2 of {folder / 'b.csv'}" in done.stderr
    assert f"line 2 of {folder / 'a.jsonl'}" in done.stderr


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        (FIRST + b"\n{\n" + LAST, ["--strict"], ["line 2", "invalid_json_line"]),
        (b"\n \n", [], ["empty_file"]),
        (FIRST, ["--column-mapping", "prompt=text"], ["--column-mapping"]),
        (FIRST.decode().encode("utf-16"), [], ["iconv"]),
    ],
)
def test_a_job_that_cannot_run_says_why(
    model: Path, tmp_path: Path, content: bytes, options: list[str], words: list[str]
) -> None:
    (tmp_path / "in.jsonl").write_bytes(content)
    done = run(model, tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", *options)
    assert done.returncode == 2, done.stderr
    assert all(word in done.stderr for word in words)
    assert "Traceback" not in done.stderr
    output = tmp_path / "out.jsonl"
    assert not output.exists() or output.read_bytes() == b""
