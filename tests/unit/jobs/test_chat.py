"""Chats with tools and reasoning: what the template gets, what reads the answer, and what is refused by name."""

from typing import Any

import numpy as np
import orjson
import pytest

from blendserve.engines import EXTRA_PARAMETERS, EngineConfig
from blendserve.engines.chat import ChatFeatures
from blendserve.jobs.openai_format import LineError, PreparedRow, Row, parse_line, success_line
from blendserve.jobs.prepare import Prepared, prepare
from blendserve.planner.prefix_tree import PrefixTree, PromptOrder
from blendserve.request import Adapter, Completion
from blendserve.tokenizer import ApproximateTokenizer

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}},
}
TIME = {"type": "function", "function": {"name": "time", "description": "now", "strict": True}}
HELLO = [{"role": "user", "content": "hi"}]
VLLM = ChatFeatures(reads_tool_calls=True, forces_tool_calls=True, holds_arguments=True, takes_media=True)
NATIVE = ChatFeatures(
    reads_tool_calls=True, forces_tool_calls=True, call_format="hermes", stops_after_reasoning=True
)


def line(custom_id: str = "r", **body: Any) -> bytes:
    body = {"messages": HELLO, **body}
    envelope = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
    return orjson.dumps(envelope)


def parse(features: ChatFeatures | None = VLLM, **body: Any) -> Row | LineError:
    engine = "native" if features is not None and features.stops_after_reasoning else "vllm"
    return parse_line(1, line(**body), extra_parameters=EXTRA_PARAMETERS[engine], chat_features=features)


def row_of(features: ChatFeatures | None = VLLM, **body: Any) -> Row:
    row = parse(features, **body)
    assert isinstance(row, Row), row
    return row


def reading(row: Row) -> Any:
    return orjson.loads(row.params.chat)


def test_tools_have_the_shape_that_vllm_gives_to_templates() -> None:
    row = row_of(tools=[WEATHER, TIME])
    assert row.tools == [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "description": None,
                "parameters": WEATHER["function"]["parameters"],
            },
        },
        {
            "type": "function",
            "function": {"name": "time", "description": "now", "parameters": None, "strict": True},
        },
    ]
    assert list(row.tools[0]["function"]) == [
        "name",
        "description",
        "parameters",
    ]  # templates write them in this order
    assert reading(row) == {"tools": row.tools, "tool_choice": "auto"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "auto"),
        ({"tool_choice": None}, "auto"),
        ({"tool_choice": "none"}, "none"),
        ({"tool_choice": "required"}, "required"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "time"}}},
            {"type": "function", "function": {"name": "time"}},
        ),
    ],
)
def test_tool_choices(given: dict[str, Any], expected: Any) -> None:
    assert reading(row_of(tools=[WEATHER, TIME], **given))["tool_choice"] == expected


def test_calls_that_nobody_would_read_are_refused() -> None:
    blind = VLLM._replace(reads_tool_calls=False)
    error = parse(blind, tools=[WEATHER])
    assert isinstance(error, LineError)
    assert (error.code, error.param) == ("unsupported_parameter", "tool_choice")
    assert "--tool-call-parser" in error.message
    assert isinstance(parse(blind, tools=[WEATHER], tool_choice="none"), Row)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_calls_that_cannot_be_forced_name_the_engine_that_can(choice: Any) -> None:
    error = parse(NATIVE._replace(forces_tool_calls=False), tools=[WEATHER], tool_choice=choice)
    assert isinstance(error, LineError)
    assert (error.code, error.param) == ("unsupported_parameter", "tool_choice")
    assert "--engine vllm" in error.message


def test_forced_calls_are_a_constraint() -> None:
    def grammar(choice: Any, **body: Any) -> str:
        extra = orjson.loads(row_of(NATIVE, tools=[WEATHER, TIME], tool_choice=choice, **body).params.extra)
        return str(extra["structured_outputs"]["grammar"])

    required = grammar("required")
    assert required.startswith('start: call ("\\n" call)*\ncall: call_0 | call_1\n')
    assert grammar("required", parallel_tool_calls=False).startswith("start: call\ncall: call_0 | call_1\n")
    named = grammar({"type": "function", "function": {"name": "time"}})
    assert named.startswith("start: call\ncall: call_0\n")
    assert "weather" not in named
    assert row_of(NATIVE, tools=[WEATHER], tool_choice="auto").params.extra == b""
    assert row_of(VLLM, tools=[WEATHER], tool_choice="required").params.extra == b""  # vLLM sees to it
    error = parse(NATIVE, tools=[WEATHER], tool_choice="required", response_format={"type": "json_object"})
    assert isinstance(error, LineError)
    assert "tool_choice and response_format are both set" in error.message


def test_arguments_that_cannot_be_held_to_a_schema_name_the_engine_that_can() -> None:
    error = parse(NATIVE, tools=[WEATHER, TIME])
    assert isinstance(error, LineError)
    assert (error.code, error.param) == ("unsupported_parameter", "tools[1].function.strict")
    assert "--engine vllm" in error.message
    assert isinstance(parse(NATIVE, tools=[WEATHER, TIME], tool_choice="none"), Row)


@pytest.mark.parametrize("part_type", ["image_url", "input_audio", "video_url"])
def test_media_that_cannot_be_taken_name_the_engine_that_can(part_type: str) -> None:
    error = parse(NATIVE, messages=[{"role": "user", "content": [{"type": part_type, part_type: {}}]}])
    assert isinstance(error, LineError)
    assert (error.code, error.param) == ("unsupported_parameter", "messages[0].content[0].type")
    assert "--engine vllm" in error.message


def test_what_engines_can_do_in_chats() -> None:
    options: dict[str, Any] = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    assert EngineConfig(engine="native", **options).chat_features == NATIVE
    assert EngineConfig(engine="native").chat_features == ChatFeatures(stops_after_reasoning=True)
    mistral = EngineConfig(enable_auto_tool_choice=True, tool_call_parser="mistral").chat_features
    assert mistral == NATIVE._replace(forces_tool_calls=False, call_format="mistral")
    assert EngineConfig(engine="vllm", **options).chat_features == VLLM
    assert EngineConfig(engine="simulated").chat_features is None


def test_documents_are_a_variable_of_the_template() -> None:
    documents = [{"title": "a", "text": "b"}]
    row = row_of(NATIVE, documents=documents, chat_template_kwargs={"mood": "calm"})
    assert row.chat_template_kwargs == {"mood": "calm", "documents": documents}
    assert reading(row) == {"chat_template_kwargs": {"mood": "calm"}}
    assert row_of(NATIVE, documents=[]).params == row_of(NATIVE).params
    rich = row_of(**with_image(documents=documents))
    assert rich.media is not None
    assert orjson.loads(rich.media)["documents"] == documents


def test_the_final_message_can_be_continued() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Well"}]
    row = row_of(NATIVE, messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert (row.continue_final_message, row.add_generation_prompt) == (True, False)
    assert not row_of(NATIVE, continue_final_message=False).continue_final_message


def test_stop_strings_count_in_reasoning_where_asked_for() -> None:
    assert reading(row_of(NATIVE, stop=["x"], stop_in_reasoning=True)) == {"stop_in_reasoning": True}
    assert reading(row_of(NATIVE, stop_in_reasoning=False)) == {}
    # vLLM knows no difference, so only what it does anyway can be asked of it.
    assert reading(row_of(VLLM, stop_in_reasoning=True)) == {}
    error = parse(VLLM, stop_in_reasoning=False)
    assert isinstance(error, LineError)
    assert (error.code, error.param) == ("unsupported_parameter", "stop_in_reasoning")


def test_texts_of_several_parts_are_left_to_the_template() -> None:
    parts = [{"type": "text", "text": "a", "cache_control": None}, {"type": "text", "text": "b"}]
    (message,) = row_of(NATIVE, messages=[{"role": "user", "content": parts}]).chat or ()
    assert message["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (alone,) = row_of(NATIVE, messages=[{"role": "user", "content": parts[:1]}]).chat or ()
    assert alone["content"] == "a"


def test_what_asks_for_nothing_leaves_nothing() -> None:
    plain = row_of(
        tools=[], tool_choice="auto", parallel_tool_calls=True, include_reasoning=True, reasoning_effort=None
    )
    assert plain.tools is None
    assert plain.params.chat == b"{}"
    assert plain.params == row_of().params


def test_reasoning_parameters_are_for_the_template_and_for_the_answer() -> None:
    row = row_of(reasoning_effort="low", include_reasoning=False)
    assert row.chat_template_kwargs == {"enable_thinking": True, "reasoning_effort": "low"}
    assert reading(row) == {"include_reasoning": False, "reasoning_effort": "low"}
    assert row_of(reasoning_effort="none").chat_template_kwargs == {
        "enable_thinking": False,
        "reasoning_effort": "none",
    }
    own = row_of(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True, "mood": "calm"})
    assert own.chat_template_kwargs == {"enable_thinking": True, "mood": "calm", "reasoning_effort": "none"}
    assert reading(own)["chat_template_kwargs"] == {"enable_thinking": True, "mood": "calm"}
    assert orjson.loads(row_of(thinking_token_budget=5).params.extra) == {"thinking_token_budget": 5}


def test_messages_are_those_that_vllm_gives_to_templates() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    bare = {"id": "2", "type": "function", "function": {"name": "time", "arguments": ""}}
    row = row_of(
        messages=[
            {"role": "developer", "content": "be brief"},
            *HELLO,
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call, bare]},
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "sunny"}]},
            {"role": "assistant", "content": "Sunny.", "tool_calls": []},
        ],
        tools=[WEATHER, TIME],
        parallel_tool_calls=False,
    )
    assert row.chat == [
        {"role": "developer", "content": "be brief"},
        *HELLO,
        {
            "role": "assistant",
            "content": "",
            "reasoning": "hm",
            "reasoning_content": "hm",
            "tool_calls": [
                {**call, "function": {"name": "weather", "arguments": {"city": "Rome"}}},
                {**bare, "function": {"name": "time", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "sunny", "tool_call_id": "1"},
        {"role": "assistant", "content": "Sunny."},
    ]
    assert reading(row)["num_earlier_tool_calls"] == 2
    assert reading(row)["parallel_tool_calls"] is False


def assistant(**fields: Any) -> list[dict[str, Any]]:
    return [*HELLO, {"role": "assistant", **fields}]


def call(**fields: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}", **fields}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
        ({"tools": [{"function": {"name": "f", "params": {}}}]}, "tools[0].function.params"),
        ({"tools": [{**WEATHER, "cache": 1}]}, "tools[0].cache"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"function": {"name": "other"}}}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"include_reasoning": 1}, "include_reasoning"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"documents": ["text"]}, "documents"),
        ({"documents": [{"text": 3}]}, "documents"),
        ({"documents": [{"text": "x"}], "chat_template_kwargs": {"documents": []}}, "documents"),
        ({"continue_final_message": "yes"}, "continue_final_message"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [call()]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": "x", "reasoning": "y"}]}, "messages[0].reasoning"),
        ({"messages": [{"role": "developer", "content": "x", "tools": [WEATHER]}]}, "messages[0].tools"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 3}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "tool", "tool_call_id": "3"}]}, "messages[0].content"),
        ({"messages": assistant(content=None)}, "messages[1].content"),
        ({"messages": assistant(tool_calls="f")}, "messages[1].tool_calls"),
        ({"messages": assistant(tool_calls=[{"type": "custom"}])}, "messages[1].tool_calls[0].type"),
        ({"messages": assistant(tool_calls=[{}])}, "messages[1].tool_calls[0].function"),
        (
            {"messages": assistant(tool_calls=[call(arguments="{")])},
            "messages[1].tool_calls[0].function.arguments",
        ),
        (
            {"messages": assistant(tool_calls=[call(arguments="[1]")])},
            "messages[1].tool_calls[0].function.arguments",
        ),
        ({"messages": assistant(tool_calls=[call(name=None)])}, "messages[1].tool_calls[0].function.name"),
    ],
)
def test_what_cannot_be_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    error = parse(**body)
    assert isinstance(error, LineError), error
    assert error.param == param


def with_image(*, url: str = "a", **body: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    return {"messages": [{"role": "user", "content": parts}], **body}


def test_media_are_kept_as_they_are_and_planned_by_their_identity() -> None:
    one, same, other = (row_of(**with_image(url=url)) for url in ("a", "a", "b"))
    assert one.media is not None
    assert orjson.loads(one.media) == {"messages": with_image(url="a")["messages"]}
    assert one.chat == same.chat
    assert one.chat != other.chat
    assert one.chat is not None
    assert one.chat[0]["content"][1] == {"type": "text", "text": "What is it?"}
    rich = row_of(**with_image(tools=[WEATHER], reasoning_effort="low"))
    assert rich.media is not None
    assert orjson.loads(rich.media).keys() == {"messages", "tools", "tool_choice", "reasoning_effort"}
    assert row_of().media is None


@pytest.mark.parametrize("part_type", ["file", "input_text", 3])
def test_parts_that_vllm_does_not_read_are_refused(part_type: Any) -> None:
    error = parse(messages=[{"role": "user", "content": [{"type": part_type}]}])
    assert isinstance(error, LineError)
    assert (error.code, error.param) == ("unsupported_parameter", "messages[0].content[0].type")
    assert '"image_url"' in error.message


def test_each_request_finds_the_media_of_its_row() -> None:
    bodies = [{}, with_image(url="a", n=2), {}, with_image(url="b")]
    rows = (
        parse_line(number, line(f"r{number}", **body), chat_features=VLLM)
        for number, body in enumerate(bodies, start=1)
    )
    requests = prepare(rows, ApproximateTokenizer(), served_model_name="m", max_model_len=1000).requests
    assert requests.raw is not None
    found = [raw.body for raw in requests.raw]
    assert [bool(body) for body in found] == [False, True, True, False, True]
    assert found[1] == found[2] != found[4]
    taken = requests.take(np.array([4, 0])).raw
    assert taken is not None
    assert [raw.body for raw in taken] == [found[4], b""]
    assert [raw.body for raw in taken[:1]] == [found[4]]


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [WEATHER]},
        {"tool_choice": "required"},
        {"reasoning_effort": "low"},
        {"include_reasoning": False},
        {"documents": [{"text": "x"}]},
        {"continue_final_message": True},
        {"thinking_token_budget": 3},
    ],
)
def test_other_engines_name_the_one_that_can(body: dict[str, Any]) -> None:
    error = parse_line(1, line(**body))
    assert isinstance(error, LineError)
    assert (error.code, error.param) == ("unsupported_parameter", next(iter(body)))
    assert "--engine vllm" in error.message


def test_an_answer_that_was_read_is_written_as_it_was_read() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [call()]}
    completion = Completion([1, 2, 3], "raw", "tool_calls", message=message, num_reasoning_tokens=2)
    written = orjson.loads(
        success_line(
            PreparedRow(1, "r", "/v1/chat/completions", 1),
            [completion],
            model="m",
            num_prompt_tokens=5,
            tokenizer=ApproximateTokenizer(),
        )
    )["response"]["body"]
    assert written["choices"][0]["message"] == message
    assert written["choices"][0]["finish_reason"] == "tool_calls"
    assert written["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


def prepared_for(models: list[str | None], **options: Any) -> Prepared:
    rows = (
        parse_line(number, line(f"r{number}", **({} if model is None else {"model": model})))
        for number, model in enumerate(models, start=1)
    )
    return prepare(rows, ApproximateTokenizer(), served_model_name="base", max_model_len=1000, **options)


def test_a_line_runs_with_the_adapter_that_it_names() -> None:
    adapters = {"sql": "./sql", "poems": "./poems"}
    prepared = prepared_for(["base", "sql", None, "poems", "nothing", "sql"], adapters=adapters)
    found = [prepared.requests.sampling_params(request).adapter for request in range(len(prepared.requests))]
    assert found == [
        None,
        Adapter("sql", "./sql"),
        None,
        Adapter("poems", "./poems"),
        Adapter("sql", "./sql"),
    ]
    (error,) = prepared.errors
    assert (error.line, error.code) == (5, "model_mismatch")
    (missing,) = prepared_for(["other"], adapters=adapters).errors
    assert '"base", "sql", "poems"' in missing.message


def test_adapters_share_no_prefix() -> None:
    requests = prepared_for(["base", "sql", "base", "sql", "base"], adapters={"sql": "./sql"}).requests
    assert requests.prefix_groups is not None
    assert requests.prefix_groups.tolist() == [0, 1, 0, 1, 0]
    order = PromptOrder.of(requests.tokens, requests.prefix_groups)
    assert order.requests.tolist() == [0, 2, 4, 1, 3]
    length = int(requests.prompt_tokens[0])
    assert order.common.tolist() == [0, length, length, 0, length]
    tree = PrefixTree.build(order, requests.prompt_tokens)
    assert tree.num_unique_units == 2 * length
    assert prepared_for(["sql", "sql"], adapters={"sql": "./sql"}).requests.prefix_groups is None
