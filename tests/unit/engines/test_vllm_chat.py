"""Messages made of what vLLM's parsers find; the parsers themselves are in tests/contract/test_vllm_chat.py."""

from types import SimpleNamespace
from typing import Any

import pytest

from blendserve.engines.vllm_chat import ChatAnswer

CALLS = [
    SimpleNamespace(id=None, name="f", arguments="{}"),
    SimpleNamespace(id="g:1", name="g", arguments="{}"),
]
NAMED = SimpleNamespace(function=SimpleNamespace(name="f"))


def read(
    calls: Any, choice: Any, *, content: str | None = "so", finish_reason: Any = "stop", **fields: Any
) -> Any:
    parser = SimpleNamespace(
        set_prompt_token_ids=lambda _prompt: None,
        parse=lambda text, *_args, **_kwargs: ("hm", content, calls),
        count_reasoning_tokens=len,
    )
    reader: Any = SimpleNamespace(
        parser=lambda _request: parser,
        reads_tool_calls=True,
        reads_reasoning=fields.pop("reads_reasoning", True),
    )
    request = SimpleNamespace(
        **{"tool_choice": choice, "parallel_tool_calls": True, "include_reasoning": True, **fields}
    )
    return ChatAnswer(reader, request).read("text", [1, 2, 3], finish_reason, [])


@pytest.mark.parametrize(
    ("choice", "finish_reason", "expected"),
    [
        ("auto", "stop", "tool_calls"),
        ("auto", "length", "tool_calls"),
        ("required", "stop", "tool_calls"),
        ("required", "length", "length"),
        (NAMED, "stop", "stop"),
    ],
)
def test_calls_are_told_with_openais_reasons(choice: Any, finish_reason: str, expected: str) -> None:
    answer = read(CALLS, choice, finish_reason=finish_reason)
    assert answer.finish_reason == expected
    first, second = answer.message["tool_calls"]
    assert first["id"].startswith("chatcmpl-tool-")
    assert second == {"id": "g:1", "type": "function", "function": {"name": "g", "arguments": "{}"}}


def test_one_call_where_one_is_wanted() -> None:
    assert len(read(CALLS, "auto", parallel_tool_calls=False).message["tool_calls"]) == 1


@pytest.mark.parametrize(("calls", "choice"), [(CALLS, "none"), (CALLS, None), (None, "auto"), ([], "auto")])
def test_without_calls_it_is_a_plain_answer(calls: Any, choice: Any) -> None:
    answer = read(calls, choice)
    assert answer.message == {"role": "assistant", "content": "so", "refusal": None, "reasoning": "hm"}
    assert answer.finish_reason == "stop"


def test_a_forced_call_leaves_no_null_as_content() -> None:
    assert read(CALLS, "required", content=None).message["content"] == ""
    assert read(CALLS, "auto", content=None).message["content"] is None


def test_reasoning_is_left_out_where_it_is_not_wanted() -> None:
    told = read(None, "none")
    assert (told.num_reasoning_tokens, told.has_logprobs) == (3, True)
    hidden = read(None, "none", include_reasoning=False)
    assert hidden.message["reasoning"] is None
    assert not hidden.has_logprobs
    unknown = read(None, "none", reads_reasoning=False)
    assert "reasoning" not in unknown.message
    assert unknown.num_reasoning_tokens is None
