"""Answers in chats as vLLM's server reads them: with its own parsers of tool calls and reasoning.

```
SamplingParams.chat ──ChatReader.open──▶ ChatAnswer ── structured_outputs, ... ──▶ the request
                                             └──read(text)──▶ the assistant's message
```
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import uuid4

import orjson
from pydantic import ValidationError

from blendserve.engines.chat import ReadAnswer, ToolCall, assemble
from blendserve.errors import ConfigError
from blendserve.request import FinishReason


def check_parsers(tool_call_parser: str | None, reasoning_parser: str | None) -> None:
    """Refuse names of parsers that vLLM does not have.

    Raises:
        ConfigError: see above.
    """
    try:
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        raise ConfigError(f"this vLLM has its parsers elsewhere ({error}); install vllm>=0.32") from error
    for flag, name, registry in (
        ("--tool-call-parser", tool_call_parser, ToolParserManager),
        ("--reasoning-parser", reasoning_parser, ReasoningParserManager),
    ):
        names = registry.list_registered()
        if name and name not in names:
            similar = difflib.get_close_matches(name, names, n=1)
            remedy = f"did you mean {similar[0]}?" if similar else f"there are {', '.join(names)}"
            raise ConfigError(f"{flag} {name}: vLLM has no such parser; {remedy}")


class ReasoningState(NamedTuple):
    """What vLLM's engine core must know to constrain an answer only after its reasoning."""

    ended: bool | None
    """None: it looks at the prompt"""
    parser_kwargs: dict[str, Any] | None


class ChatReader:
    """vLLM's parsers for one engine.

    Args:
        engine: an `LLMEngine`.
        tool_call_parser, reasoning_parser: vLLM's names; at least one of them.

    Raises:
        ConfigError: they cannot be used with this model's tokenizer.
    """

    def __init__(self, engine: Any, tool_call_parser: str | None, reasoning_parser: str | None) -> None:
        from vllm.parser import ParserManager

        self._model_config = engine.vllm_config.model_config
        try:
            self._tokenizer = engine.get_tokenizer()
            self._parser_class: Any = ParserManager.get_parser(
                tool_parser_name=tool_call_parser,
                reasoning_parser_name=reasoning_parser,
                enable_auto_tools=tool_call_parser is not None,
                model_name=self._model_config.model,
                is_harmony=self._model_config.hf_config.model_type == "gpt_oss",
                tokenizer=self._tokenizer,
            )
        except (TypeError, ValueError) as error:
            raise ConfigError(f"vLLM's parsers do not fit this model: {error}") from error
        self.reads_tool_calls = tool_call_parser is not None
        self.reads_reasoning = reasoning_parser is not None

    def open(
        self, chat: bytes, structured_outputs: dict[str, Any] | None, *, skip_special_tokens: bool
    ) -> ChatAnswer:
        """What vLLM makes of a request that has these parameters, before it runs.

        Raises:
            ValueError: vLLM refuses them.
        """
        values = orjson.loads(chat)
        values["messages"] = _history(values.pop("num_earlier_tool_calls", 0))
        values["skip_special_tokens"] = skip_special_tokens
        if structured_outputs is not None:
            values["structured_outputs"] = structured_outputs
        request = _request(values)
        if (
            self._parser_class.reasoning_parser_cls is not None
            or request.tool_choice != "none"
            or getattr(self._parser_class, "always_adjust_request", False)
        ):
            request = self.parser(request).adjust_request(request=request)
        return ChatAnswer(self, request)

    def parser(self, request: Any) -> Any:
        """A parser, which is for one answer."""
        return self._parser_class(
            self._tokenizer,
            request.tools,
            chat_template_kwargs=_template_kwargs(request),
            model_config=self._model_config,
        )


@dataclass(slots=True)
class ChatAnswer:
    """A request of a chat, as vLLM's parsers want it to be run, and its answer once it is there."""

    reader: ChatReader
    request: Any
    """a ChatCompletionRequest"""

    @property
    def structured_outputs(self) -> Any:
        """VLLM's StructuredOutputsParams, or None."""
        return self.request.extract_structured_outputs()

    @property
    def sampling_params(self) -> dict[str, bool]:
        """Sampling parameters that the parsers decide."""
        return {
            "skip_special_tokens": self.request.skip_special_tokens,
            "spaces_between_special_tokens": self.request.spaces_between_special_tokens,
        }

    def reasoning(self, prompt: list[int]) -> ReasoningState:
        """Where the answer to a prompt starts."""
        parser = self.reader.parser(self.request)
        ended = self.request.resolve_reasoning_ended(parser, prompt)
        if parser.reasoning_parser is None:
            return ReasoningState(ended, None)
        return ReasoningState(ended, {"chat_template_kwargs": _template_kwargs(self.request)})

    def read(
        self, text: str, token_ids: Sequence[int], finish_reason: FinishReason, prompt: list[int]
    ) -> ReadAnswer:
        """Take an answer apart. Raises what a parser raises."""
        request = self.request
        parser = self.reader.parser(request)
        parser.set_prompt_token_ids(prompt)
        reasoning, content, calls = parser.parse(
            text, request, enable_auto_tools=self.reader.reads_tool_calls, model_output_token_ids=token_ids
        )
        reads_reasoning = self.reader.reads_reasoning
        return assemble(
            content,
            [ToolCall(call.name, call.arguments, call.id) for call in calls or ()],
            reasoning,
            finish_reason,
            tool_choice=request.tool_choice,
            parallel_tool_calls=request.parallel_tool_calls is not False,
            reads_reasoning=reads_reasoning,
            include_reasoning=bool(request.include_reasoning),
            num_reasoning_tokens=int(parser.count_reasoning_tokens(token_ids)) if reads_reasoning else None,
            make_id=lambda _index: f"chatcmpl-tool-{uuid4().hex[:16]}",
        )


def render_media(engine: Any, body: bytes) -> Any:
    """The prompt of a chat with images, audio or video, fetched and processed as vLLM's server does it.

    Args:
        engine: an `LLMEngine`.
        body: JSON object of a `ChatCompletionRequest`.

    Raises what vLLM, its fetching of media and the model's processor raise.
    """
    request = _request(orjson.loads(body))
    model_config = engine.vllm_config.model_config
    tools = [tool.model_dump() for tool in request.tools] if request.tools else None
    media_io_kwargs = model_config.multimodal_config and model_config.multimodal_config.media_io_kwargs
    params = request.build_chat_params(None, "auto").with_defaults(
        {"tools": tools, "tokenize": False}, default_media_io_kwargs=media_io_kwargs
    )
    _, (prompt,) = engine.renderer.render_chat(
        [request.messages], params, request.build_tok_params(model_config)
    )
    return prompt


def _request(values: dict[str, Any]) -> Any:
    """A ChatCompletionRequest.

    Raises:
        ValueError: vLLM refuses it.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    try:
        return ChatCompletionRequest(**values)
    except ValidationError as error:
        raise ValueError(error.errors()[0]["msg"]) from error


def _history(num_tool_calls: int) -> list[dict[str, Any]]:
    """Messages that stand for those of the request; parsers only count the tool calls in them."""
    call = {"id": "", "type": "function", "function": {"name": "", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": ""}]
    if num_tool_calls:
        messages.append({"role": "assistant", "content": "", "tool_calls": [call] * num_tool_calls})
    return messages


def _template_kwargs(request: Any) -> dict[str, Any]:
    kwargs: dict[str, Any] = request.build_chat_params(None, "auto").chat_template_kwargs
    return kwargs
