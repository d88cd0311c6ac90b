"""Answers taken apart by the parsers of the native engine; tests/contract/test_chat_parsers.py compares with vLLM."""

import json
from typing import Any

import orjson
import pytest

from blendserve.engines.chat import ChatAnswer, ChatReader, ReadAnswer, check_parsers, forced_calls
from blendserve.errors import ConfigError
from tests.chat_answers import (
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_NAMED,
    NOON,
    ROME,
    SPECIAL,
    THOUGHTS,
    Pieces,
    call,
)

WITHOUT_ARGS = Pieces(mark for mark in Pieces().marks if mark != "[ARGS]")
TOOLS = [{"type": "function", "function": {"name": "weather"}}]
WEATHER = ("weather", {"city": "Rome"})
TIME = ("time", {"zone": "CET", "at": [1, 2.5, None]})


def opened(
    tools: str | None = None, reasoning: str | None = None, pieces: Pieces | None = None, **chat: Any
) -> ChatAnswer:
    reader = ChatReader(pieces or Pieces(), tools, reasoning)
    given = {"tools": TOOLS, "tool_choice": "auto"} if tools else {}
    return reader.open(orjson.dumps({**given, **chat}))


def read(text: str, tools: str | None = None, reasoning: str | None = None, **options: Any) -> ReadAnswer:
    finish_reason = options.pop("finish_reason", "stop")
    answer = opened(tools, reasoning, **options)
    pieces: Any = answer.reader.tokenizer
    return answer.read(text, pieces.encode(text), finish_reason, b"prompt")


def calls(answer: ReadAnswer) -> list[Any]:
    found = answer.message.get("tool_calls", [])
    return [(call["function"]["name"], orjson.loads(call["function"]["arguments"])) for call in found]


# -------- tool calls --------


@pytest.mark.parametrize(
    ("text", "content", "expected"),
    [
        (call(ROME), None, [WEATHER]),
        (f"I shall look. {call(ROME)}", "I shall look. ", [WEATHER]),
        (f"\n\n{call(ROME)}\n{call(NOON)}\n", None, [WEATHER, TIME]),
        (f"{call(ROME)} and then {call(NOON)} after", None, [WEATHER, TIME]),
        (f"before <tool_call>{ROME}", "before ", [WEATHER]),
        (
            call('{"name": "f", "arguments": {"a": {"b": [{"c": {}}]}}}'),
            None,
            [("f", {"a": {"b": [{"c": {}}]}})],
        ),
        (call('{"name": "größe", "arguments": {"wo": "東京 🗼"}}'), None, [("größe", {"wo": "東京 🗼"})]),
        (call('{"name": "f", "arguments": {"t": "</think>"}}'), None, [("f", {"t": "</think>"})]),
    ],
)
def test_calls_in_the_manner_of_hermes(text: str, content: str | None, expected: list[Any]) -> None:
    answer = read(text, "hermes")
    assert (answer.message["content"], calls(answer)) == (content, expected)
    assert answer.finish_reason == "tool_calls"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain text",
        "a </tool_call> b",
        "<tool_call></tool_call>",
        "<tool_call>",
        call("not json"),
        call("[1, 2]"),
        call('{"name": "weather"}'),
        call('{"arguments": {}}'),
        call('{"name": 3, "arguments": {}}'),
        call('{"name": "f", "arguments": {"text": "</tool_call> in a string"}}'),
        f"{call(ROME)}{call('one broken call breaks all')}",
        f"cut off by length <tool_call>{ROME[:-1]}",
        call("[" * 100_000),
    ],
)
def test_broken_calls_stay_text(text: str) -> None:
    answer = read(text, "hermes", finish_reason="length")
    assert answer.message == {"role": "assistant", "content": text, "refusal": None}
    assert answer.finish_reason == "length"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ROME, [WEATHER]),
        (f"<|python_tag|>{ROME}; {NOON}", [WEATHER, TIME]),
        (f"Sure: {ROME.replace('arguments', 'parameters')} there", [WEATHER]),
        ('{"name": "f", "arguments": {"a": 1}, "parameters": {"a": 2}}', [("f", {"a": 1})]),
        (f"{ROME}; {{broken", []),
        ('{"name": "f"}', []),
        ("a set {1, 2}", []),
        ("{" * 100_000, []),
    ],
)
def test_calls_in_the_manner_of_llama(text: str, expected: list[Any]) -> None:
    answer = read(text, "llama3_json")
    assert calls(answer) == expected
    assert answer.message["content"] == (None if expected else text)


@pytest.mark.parametrize(
    ("text", "content", "expected"),
    [
        (f"[TOOL_CALLS] [{ROME}, {NOON}] </s>", None, [WEATHER, TIME]),
        (f"Sure. [TOOL_CALLS]{ROME}", "Sure. ", [WEATHER]),
        ('[TOOL_CALLS][{"name": "f", "arguments": "{\\"a\\": 1}"}]', None, [("f", {"a": 1})]),
        ("[TOOL_CALLS][{broken", "[TOOL_CALLS][{broken", []),
        ("[TOOL_CALLS]", "[TOOL_CALLS]", []),
        ("[TOOL_CALLS][3]", "[TOOL_CALLS][3]", []),
    ],
)
def test_calls_in_the_manner_of_mistral(text: str, content: str | None, expected: list[Any]) -> None:
    answer = read(text, "mistral", pieces=WITHOUT_ARGS)
    assert (answer.message["content"], calls(answer)) == (content, expected)


def test_calls_of_mistral_that_begin_with_a_name() -> None:
    text = 'Sure. [TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]time{"zone":"CET","at":[1,2.5,null]}'
    answer = read(text, "mistral")
    assert (answer.message["content"], calls(answer)) == ("Sure.", [WEATHER, TIME])
    (cut,) = read('[TOOL_CALLS]weather[ARGS]{"city": "Ro', "mistral").message["tool_calls"]
    assert cut["function"] == {"name": "weather", "arguments": '{"city": "Ro'}  # as vLLM passes it on
    assert cut["id"].isalnum()
    assert len(cut["id"]) == 9


def test_nothing_is_read_where_no_tool_may_be_called() -> None:
    text = f"so {call(ROME)}"
    for answer in (read(text, "hermes", tool_choice="none"), read(text)):
        assert answer.message["content"] == text
        assert "tool_calls" not in answer.message
        assert answer.finish_reason == "stop"


def test_one_call_where_one_is_wanted() -> None:
    text = call(ROME) + call(NOON)
    assert calls(read(text, "hermes", parallel_tool_calls=False)) == [WEATHER]


def test_ids_depend_on_the_request_alone() -> None:
    text = call(ROME) + call(ROME)
    answer = opened("hermes")

    def ids(identity: bytes) -> list[str]:
        message = answer.read(text, [], "stop", identity).message
        return [found["id"] for found in message["tool_calls"]]

    first = ids(b"a")
    assert ids(b"a") == first
    assert len({*first, *ids(b"b")}) == 4
    for found in first:
        prefix, digits = found[:14], found[14:]
        assert (prefix, len(digits)) == ("chatcmpl-tool-", 16)
        int(digits, 16)


def test_halves_of_characters_can_be_written() -> None:
    answer = read(call('{"name": "f\\udc00", "arguments": {"a": "\\ud800"}}'), "hermes")
    (found,) = answer.message["tool_calls"]
    assert found["function"] == {"name": "f\\udc00", "arguments": '{"a": "\\ud800"}'}
    orjson.dumps(answer.message)


# -------- reasoning --------

R1_AND_QWEN = [
    ("<think>\nhm\n</think>\n\nso", "\nhm\n", "\n\nso", 4),
    ("hm</think>so", "hm", "so", 2),
    ("hm</think>", "hm", None, 2),
    ("<think>hm", "hm", None, 2),
    ("no tags", "no tags", None, 7),
    ("<think>größe 東京 🗼</think>é🚀", "größe 東京 🗼", "é🚀", 10),
]


@pytest.mark.parametrize("parser", ["deepseek_r1", "qwen3"])
@pytest.mark.parametrize(("text", "reasoning", "content", "num_tokens"), R1_AND_QWEN)
def test_reasoning(parser: str, text: str, reasoning: str, content: str | None, num_tokens: int) -> None:
    answer = read(text, reasoning=parser)
    assert answer.message == {
        "role": "assistant",
        "content": content,
        "refusal": None,
        "reasoning": reasoning,
    }
    assert answer.num_reasoning_tokens == num_tokens


@pytest.mark.parametrize(
    ("text", "of_r1", "of_qwen"),
    [
        ("", ("", None), (None, None)),
        ("</think>so", ("", "so"), (None, "so")),
        ("before <think>hm</think>so", ("hm", "so"), ("before hm", "so")),
        ("<think>a<think>b</think>c</think>d", ("a<think>b", "c</think>d"), ("ab", "cd")),
        ("a</think>b<think>c", ("c", None), ("a", "b<think>c")),
        (f"a{SPECIAL}b</think>c{SPECIAL}d", (f"a{SPECIAL}b", f"c{SPECIAL}d"), ("ab", "cd")),
        ("hm<tool_call>x", ("hm<tool_call>x", None), ("hm", "<tool_call>x")),
    ],
)
def test_how_the_reasoning_parsers_differ(text: str, of_r1: Any, of_qwen: Any) -> None:
    for parser, expected in (("deepseek_r1", of_r1), ("qwen3", of_qwen)):
        message = read(text, reasoning=parser).message
        assert (message["reasoning"], message["content"]) == expected, parser


@pytest.mark.parametrize(
    "chat", [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}]
)
def test_without_thinking_qwen_answers_at_once(chat: dict[str, Any]) -> None:
    answer = read("so</think>", reasoning="qwen3", **chat)
    assert (answer.message["reasoning"], answer.message["content"]) == (None, "so</think>")
    assert answer.num_reasoning_tokens == 0
    assert opened(reasoning="qwen3", **chat).reasoning_ends is None
    # A variable of the request's own goes before the effort.
    own = read(
        "hm</think>so",
        reasoning="qwen3",
        reasoning_effort="none",
        chat_template_kwargs={"enable_thinking": 1},
    )
    assert own.message["reasoning"] == "hm"


def test_reasoning_is_left_out_where_it_is_not_wanted() -> None:
    answer = read("hm</think>so", reasoning="deepseek_r1", include_reasoning=False)
    assert (answer.message["reasoning"], answer.message["content"]) == (None, "so")
    assert (answer.num_reasoning_tokens, answer.has_logprobs) == (2, False)


@pytest.mark.parametrize("parser", ["deepseek_r1", "qwen3"])
def test_calls_behind_reasoning(parser: str) -> None:
    answer = read(f"<think>call</think>\n\n{call(ROME)}\n", "hermes", parser)
    assert (answer.message["reasoning"], answer.message["content"]) == ("call", None)
    assert calls(answer) == [WEATHER]
    inside = read(f"<think>hm {call(ROME)}", "hermes", parser)
    assert calls(inside) == ([WEATHER] if parser == "qwen3" else [])


def test_special_tokens_are_shown_to_those_that_look_for_them() -> None:
    def skips(tools: str | None, reasoning: str | None = None, **chat: Any) -> bool:
        return opened(tools, reasoning, **chat).skip_special_tokens

    assert [skips(name) for name in ("hermes", "mistral", "llama3_json")] == [False, False, True]
    assert skips("hermes", tool_choice="none")
    assert [skips(None, name) for name in ("deepseek_r1", "qwen3")] == [True, False]
    assert (
        not ChatReader(Pieces(), None, "deepseek_r1")
        .open(b"{}", skip_special_tokens=False)
        .skip_special_tokens
    )


# -------- forced calls --------


@pytest.mark.parametrize("parser", ["hermes", "llama3_json"])
@pytest.mark.parametrize("is_single", [True, False])
def test_forced_calls_are_read_back(parser: str, is_single: bool) -> None:
    llguidance = pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    tools = [
        {"function": {"name": "weather", "parameters": schema, "strict": True}},
        {"function": {"name": 'größe "x"\\n', "parameters": schema}},
        {"function": {"name": "time", "parameters": None, "strict": True}},
    ]
    grammar = forced_calls(parser, tools, is_single=is_single)
    vocabulary = llguidance.LLTokenizer("byte")

    def allows(text: str) -> bool:
        matcher = llguidance.LLMatcher(vocabulary, grammar)
        assert not matcher.is_error(), matcher.get_error()
        return bool(matcher.consume_tokens(vocabulary.tokenize_str(text)) and matcher.is_accepting())

    def written(name: str, arguments: str) -> str:
        body = json.dumps({"name": name}, ensure_ascii=False)[:-1]
        if parser == "hermes":
            return call(f'{body}, "arguments": {arguments}}}')
        return f'{body}, "parameters": {arguments}}}'

    rome = written("weather", '{"city": "Rome"}')
    odd = written(tools[1]["function"]["name"], '{"any": [{}]}')
    two = rome + ("\n" if parser == "hermes" else "; ") + odd
    assert allows(rome)
    assert allows(odd)
    assert allows(written("time", "{}"))
    assert allows(two) is not is_single
    assert not allows(written("weather", '{"city": "Oslo"}'))
    assert not allows(written("other", "{}"))
    assert not allows(f"so {rome}")
    assert calls(read(two, parser, tool_choice="required")) == [
        WEATHER,
        (tools[1]["function"]["name"], {"any": [{}]}),
    ]


def test_forced_calls_have_openais_reasons() -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    reasons = [read(call(ROME), "hermes", tool_choice=choice).finish_reason for choice in ("required", named)]
    assert reasons == ["tool_calls", "stop"]


# -------- set up --------


@pytest.mark.parametrize(
    ("tools", "reasoning", "token"),
    [
        ("llama3_json", None, "<|python_tag|>"),
        ("mistral", None, r"\[TOOL_CALLS\]"),
        (None, "deepseek_r1", "<think>"),
    ],
)
def test_parsers_that_do_not_fit_the_tokenizer(tools: str | None, reasoning: str | None, token: str) -> None:
    with pytest.raises(ConfigError, match=f"does not fit this model: its tokenizer has no token {token}"):
        ChatReader(Pieces([]), tools, reasoning)
    ChatReader(Pieces([]), "hermes", "qwen3")


def test_names_of_parsers() -> None:
    check_parsers(None, None)
    check_parsers("llama3_json", "deepseek_r1")
    with pytest.raises(ConfigError, match=r"--tool-call-parser hermes2.*did you mean hermes"):
        check_parsers("hermes2", None)
    with pytest.raises(ConfigError, match=r"--reasoning-parser gemma4.*--engine vllm"):
        check_parsers(None, "gemma4")


def test_no_answer_raises() -> None:
    for texts, parser, pieces in (
        (HERMES, "hermes", Pieces()),
        (LLAMA, "llama3_json", Pieces()),
        (MISTRAL, "mistral", WITHOUT_ARGS),
        (MISTRAL_NAMED, "mistral", Pieces()),
    ):
        for text in texts + THOUGHTS:
            for reasoning in (None, "deepseek_r1", "qwen3"):
                orjson.dumps(read(text, parser, reasoning, pieces=pieces).message)
