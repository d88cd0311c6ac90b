"""Text around calls and reasoning comes out as it went in."""

import json
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from blendserve.engines.chat import ChatReader, ReadAnswer
from tests.chat_answers import MARKS, SPECIAL, Pieces

PIECES = Pieces()
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=60).filter(
    lambda text: not any(mark in text for mark in (*MARKS, SPECIAL))
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=10,
)
CALLS = st.lists(st.tuples(TEXTS, st.dictionaries(TEXTS, JSON, max_size=3)), min_size=1, max_size=3)


def read(text: str, tools: str | None = None, reasoning: str | None = None) -> ReadAnswer:
    chat = {"tools": [{}], "tool_choice": "auto"} if tools else {}
    answer = ChatReader(PIECES, tools, reasoning).open(orjson.dumps(chat))
    return answer.read(text, PIECES.encode(text), "stop", b"")


def found(answer: ReadAnswer) -> list[Any]:
    calls = answer.message["tool_calls"]
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


@given(TEXTS)
def test_text_without_marks_is_the_content(text: str) -> None:
    for parser in ("hermes", "mistral"):
        assert read(text, parser).message["content"] == text


@given(TEXTS, CALLS, TEXTS)
def test_text_before_calls_is_the_content(before: str, calls: list[Any], behind: str) -> None:
    bodies = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    text = before + "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies) + behind
    answer = read(text, "hermes")
    assert answer.message["content"] == (before if before.strip() else None)
    assert found(answer) == calls


@given(TEXTS, CALLS)
def test_calls_of_mistral(before: str, calls: list[Any]) -> None:
    pieces = Pieces(mark for mark in MARKS if mark != "[ARGS]")
    listed = json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])
    answer = ChatReader(pieces, "mistral", None).open(b'{"tool_choice": "auto"}')
    read_answer = answer.read(f"{before}[TOOL_CALLS]{listed}", [], "stop", b"")
    assert read_answer.message["content"] == (before if before.strip() else None)
    assert found(read_answer) == calls


@given(TEXTS, TEXTS, st.booleans(), st.sampled_from(["deepseek_r1", "qwen3"]))
def test_text_behind_reasoning_is_the_content(thought: str, text: str, has_start: bool, parser: str) -> None:
    answer = read(f"{'<think>' * has_start}{thought}</think>{text}", reasoning=parser)
    assert (answer.message["reasoning"] or "") == thought
    assert answer.message["content"] == (text or None)
    assert answer.num_reasoning_tokens == len(thought)
