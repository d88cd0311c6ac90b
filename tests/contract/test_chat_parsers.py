"""The parsers of the native engine make of an answer what vLLM's own make of it."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from blendserve.engines.chat import ChatReader
from blendserve.models import ModelFiles
from blendserve.tokenizer import Tokenizer
from tests.chat_answers import HERMES, LLAMA, MARKS, MISTRAL, MISTRAL_NAMED, THOUGHTS

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("weather", "time")]
ID = re.compile(r"chatcmpl-tool-[0-9a-f]{16}|[0-9A-Za-z]{9}")


@pytest.fixture(scope="module")
def make_tokenizer(
    bundled_model: ModelFiles, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Tokenizer]:
    """The bundled tokenizer with tokens for marks."""
    pytest.importorskip("vllm")
    from transformers import AddedToken, AutoTokenizer

    def make(marks: tuple[str, ...]) -> Tokenizer:
        folder: Path = tmp_path_factory.mktemp("tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(bundled_model.folder)
        tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
        tokenizer.save_pretrained(folder)
        return Tokenizer(folder)

    return make


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer: Callable[..., Tokenizer]) -> Tokenizer:
    return make_tokenizer(MARKS)


@pytest.fixture(scope="module")
def without_args(make_tokenizer: Callable[..., Tokenizer]) -> Tokenizer:
    return make_tokenizer(tuple(mark for mark in MARKS if mark != "[ARGS]"))


def compare(tokenizer: Tokenizer, tools: str | None, reasoning: str | None, text: str, **chat: Any) -> None:
    """Read an answer with both."""
    from vllm.parser import ParserManager

    from blendserve.engines.vllm_chat import ChatAnswer
    from blendserve.engines.vllm_chat import ChatReader as VLLMReader

    given = {"tools": TOOLS, "tool_choice": "auto", **chat} if tools else chat
    ours = ChatReader(tokenizer, tools, reasoning).open(orjson.dumps(given))
    theirs = object.__new__(VLLMReader)
    theirs._tokenizer = tokenizer.transformers
    theirs._model_config = None
    theirs._parser_class = ParserManager.get_parser(
        tool_parser_name=tools,
        reasoning_parser_name=reasoning,
        enable_auto_tools=tools is not None,
        tokenizer=tokenizer.transformers,
    )
    theirs.reads_tool_calls, theirs.reads_reasoning = tools is not None, reasoning is not None
    answer: ChatAnswer = theirs.open(orjson.dumps(given), None, skip_special_tokens=True)
    assert ours.skip_special_tokens == answer.sampling_params["skip_special_tokens"]
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    text = tokenizer.decode(token_ids, skip_special_tokens=ours.skip_special_tokens)
    expected = answer.read(text, token_ids, "stop", [])
    found = ours.read(text, token_ids, "stop", b"")
    for message in (expected.message, found.message):
        for call in message.get("tool_calls", ()):
            assert ID.fullmatch(call.pop("id"))
    assert found.message == expected.message
    assert found.finish_reason == expected.finish_reason
    # Theirs counts nothing for deepseek_r1 where the start tag is in the prompt, and no tags of calls for qwen3.
    if reasoning == "qwen3" and "</tool_call>" not in (expected.message["reasoning"] or ""):
        assert found.num_reasoning_tokens == expected.num_reasoning_tokens


@pytest.mark.parametrize("text", HERMES)
def test_hermes(tokenizer: Tokenizer, text: str) -> None:
    compare(tokenizer, "hermes", None, text)
    compare(tokenizer, "hermes", None, text, tool_choice="none")
    compare(tokenizer, "hermes", None, text, parallel_tool_calls=False)


@pytest.mark.parametrize("text", LLAMA)
def test_llama3_json(tokenizer: Tokenizer, text: str) -> None:
    compare(tokenizer, "llama3_json", None, text)


@pytest.mark.parametrize("text", MISTRAL)
def test_mistral(without_args: Tokenizer, text: str) -> None:
    compare(without_args, "mistral", None, text)


@pytest.mark.parametrize("text", MISTRAL_NAMED)
def test_mistral_with_names_first(tokenizer: Tokenizer, text: str) -> None:
    compare(tokenizer, "mistral", None, text)


@pytest.mark.parametrize("parser", ["deepseek_r1", "qwen3"])
@pytest.mark.parametrize("text", THOUGHTS)
def test_reasoning(tokenizer: Tokenizer, text: str, parser: str) -> None:
    compare(tokenizer, None, parser, text)
    compare(tokenizer, None, parser, text, include_reasoning=False)
    compare(tokenizer, None, parser, text, chat_template_kwargs={"enable_thinking": False})
    compare(tokenizer, None, parser, text, reasoning_effort="none")


@pytest.mark.parametrize("parser", ["deepseek_r1", "qwen3"])
@pytest.mark.parametrize("text", THOUGHTS + HERMES)
def test_reasoning_and_calls(tokenizer: Tokenizer, text: str, parser: str) -> None:
    compare(tokenizer, "hermes", parser, text)
    compare(tokenizer, "hermes", parser, text, tool_choice="none")
