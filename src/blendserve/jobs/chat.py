"""Chats: messages and tools of a body, as the chat template and the reader of the answer take them.

Tools and reasoning are shaped as vLLM's server shapes them before it renders: tool calls have their arguments as
objects, tools the keys of its own class, reasoning both of its names.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import orjson

from blendserve.engines.chat import ChatFeatures, forced_calls
from blendserve.errors import RequestError
from blendserve.jobs.body import invalid, require, shown, unsupported

CHAT_PARAMETERS = frozenset(
    {
        "continue_final_message",
        "documents",
        "include_reasoning",
        "parallel_tool_calls",
        "reasoning_effort",
        "stop_in_reasoning",
        "tool_choice",
        "tools",
    }
)
"""parameters of a chat that only some engines can do"""

_ROLES = ("system", "developer", "user", "assistant")
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_MEDIA = (
    "image_url",
    "input_audio",
    "audio_url",
    "video_url",
    "image_embeds",
    "audio_embeds",
    "video_embeds",
)
"""types of parts that vLLM reads besides text"""
_FUNCTION_KEYS = ("name", "description", "parameters", "strict")


class Chat(NamedTuple):
    """A conversation to render, and how to read the answer."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool = False
    reading: bytes = b""
    """see `SamplingParams.chat`"""
    forced_calls: str | None = None
    """grammar that the content must follow"""
    media: bytes | None = None
    """JSON object of the request as vLLM's ChatCompletionRequest has it, if there are images, audio or video in it; the
    messages above then have a likeness of each, which is for planning"""


def parse_chat(
    values: dict[str, Any],
    template_kwargs: dict[str, Any] | None,
    features: ChatFeatures | None,
) -> Chat:
    """The chat of a body. `features` None is text in, text out, without tools and `CHAT_PARAMETERS`.

    Raises:
        RequestError: it cannot be served.
    """
    messages = _parse_messages(values, features)
    if features is None:
        return Chat(messages, template_kwargs=template_kwargs)
    tools = _parse_tools(values.get("tools"))
    choice = _parse_tool_choice(values.get("tool_choice"), tools, features)
    parallel = _boolean(values, "parallel_tool_calls", True)
    include_reasoning = _boolean(values, "include_reasoning", True)
    continue_final = _boolean(values, "continue_final_message", False)
    if continue_final and values.get("add_generation_prompt") is not False:
        raise invalid("continue_final_message", True, "'add_generation_prompt': false beside it")
    documents = _parse_documents(values.get("documents"), template_kwargs)
    effort = values.get("reasoning_effort")
    if effort is not None and effort not in _EFFORTS:
        raise invalid("reasoning_effort", effort, f"one of {', '.join(_EFFORTS)}")

    reading: dict[str, Any] = {}
    if tools is not None:
        reading |= {"tools": tools, "tool_choice": choice}
        if not parallel:
            reading["parallel_tool_calls"] = False
        if earlier := sum(len(message.get("tool_calls", ())) for message in messages):
            reading["num_earlier_tool_calls"] = earlier
    if not include_reasoning:
        reading["include_reasoning"] = False
    if effort is not None:
        reading["reasoning_effort"] = effort
    if template_kwargs:
        reading["chat_template_kwargs"] = template_kwargs
    if values.get("add_generation_prompt") is False:
        reading["add_generation_prompt"] = False
    if continue_final:
        reading["continue_final_message"] = True
    if features.stops_after_reasoning and _boolean(values, "stop_in_reasoning", False):
        reading["stop_in_reasoning"] = True
    media = None
    if _has_media(values["messages"]):
        given = {name: value for name, value in reading.items() if name != "num_earlier_tool_calls"}
        media = _dumped({**given, **documents, "messages": values["messages"]})
    variables = {**(_with_effort(template_kwargs, effort) or {}), **documents}
    return Chat(
        messages,
        tools,
        variables or None,
        continue_final,
        _dumped(reading),
        _forced_calls(tools, choice, features, parallel),
        media,
    )


def _forced_calls(
    tools: list[dict[str, Any]] | None, choice: Any, features: ChatFeatures, parallel: bool
) -> str | None:
    """The grammar of the calls that a choice forces, for engines that are constrained from here."""
    if tools is None or choice in ("none", "auto") or features.call_format is None:
        return None
    named = [
        tool
        for tool in tools
        if choice == "required" or tool["function"]["name"] == choice["function"]["name"]
    ]
    return forced_calls(features.call_format, named, is_single=choice != "required" or not parallel)


def _with_effort(template_kwargs: dict[str, Any] | None, effort: str | None) -> dict[str, Any] | None:
    """Variables of the template as vLLM sets them: an effort also switches thinking on or off."""
    if effort is None:
        return template_kwargs
    return {"enable_thinking": effort != "none", **(template_kwargs or {}), "reasoning_effort": effort}


def _dumped(reading: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(reading, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:  # it reads deeper nesting than it writes
        raise RequestError(
            "invalid_request",
            "'tools', 'messages' or 'chat_template_kwargs' are nested too deeply. Flatten them.",
        ) from None


def _boolean(values: dict[str, Any], name: str, default: bool) -> bool:
    value = values.get(name)
    if value is None or isinstance(value, bool):
        return default if value is None else value
    raise invalid(name, value, "true or false")


def _parse_documents(documents: Any, template_kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """The documents as the variable of the template that they are, if there are any."""
    if documents is None or documents == []:
        return {}
    are_texts = isinstance(documents, list) and all(
        isinstance(document, dict) and all(isinstance(text, str) for text in document.values())
        for document in documents
    )
    if not are_texts:
        raise invalid(
            "documents", documents, 'a list of objects of strings, such as {"title": ..., "text": ...}'
        )
    if "documents" in (template_kwargs or {}):
        raise invalid("documents", documents, "none, as there are some in 'chat_template_kwargs'")
    return {"documents": documents}


# -------- tools --------


def _parse_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Tools in the shape in which vLLM gives them to a template."""
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        raise invalid("tools", tools, 'a list such as [{"type": "function", "function": {"name": ...}}]')
    return [_parse_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def _parse_tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise invalid(where, tool, 'an object with "type" and "function"')
    if tool.get("type", "function") != "function":
        raise invalid(f"{where}.type", tool["type"], '"function"')
    function = require(tool, "function", "Describe it: name, description, parameters.", where)
    if not isinstance(function, dict):
        raise invalid(f"{where}.function", function, "an object")
    for name in function:
        if name not in _FUNCTION_KEYS:
            raise RequestError(
                "unknown_parameter",
                f"Unknown key '{where}.function.{name}'. Use {', '.join(_FUNCTION_KEYS)}.",
                param=f"{where}.function.{name}",
            )
    for name in tool:
        if name not in ("type", "function"):
            raise RequestError(
                "unknown_parameter",
                f"Unknown key '{where}.{name}'. Use type, function.",
                param=f"{where}.{name}",
            )
    name = require(function, "name", "Name the function.", f"{where}.function")
    description, parameters, strict = (function.get(key) for key in _FUNCTION_KEYS[1:])
    for key, value, is_good, expected in (
        ("name", name, isinstance(name, str) and name != "", "a non-empty string"),
        ("description", description, isinstance(description, str | None), "a string"),
        ("parameters", parameters, isinstance(parameters, dict | None), "a JSON schema"),
        ("strict", strict, isinstance(strict, bool | None), "true or false"),
    ):
        if not is_good:
            raise invalid(f"{where}.function.{key}", value, expected)
    parsed = {"name": name, "description": description, "parameters": parameters}
    if strict is not None:
        parsed["strict"] = strict
    return {"type": "function", "function": parsed}


def _parse_tool_choice(choice: Any, tools: list[dict[str, Any]] | None, features: ChatFeatures) -> Any:
    """Which tools may be called, checked against those there are."""
    if tools is None:
        if choice in (None, "none", "auto"):
            return "none"
        raise invalid("tool_choice", choice, "'tools' beside it")
    choice = "auto" if choice is None else choice
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        names = [tool["function"]["name"] for tool in tools]
        if choice.get("type", "function") != "function" or name not in names:
            raise invalid(
                "tool_choice", choice, 'one of the tools, as {"type": "function", "function": {"name": ...}}'
            )
        choice = {"type": "function", "function": {"name": name}}
    elif choice not in ("none", "auto", "required"):
        raise invalid("tool_choice", choice, '"none", "auto", "required" or a function')
    if choice != "none" and not features.reads_tool_calls:
        raise unsupported(
            "tool_choice",
            choice,
            'Add --enable-auto-tool-choice --tool-call-parser NAME to the command, or "tool_choice": "none" here.',
        )
    if choice not in ("none", "auto") and not features.forces_tool_calls:
        raise unsupported("tool_choice", choice, 'Use "auto", or run this line with --engine vllm.')
    for index, tool in enumerate(tools):
        if choice == "auto" and tool["function"].get("strict") and not features.holds_arguments:
            raise unsupported(
                f"tools[{index}].function.strict",
                True,
                'Leave it out, force a call with "tool_choice", or run this line with --engine vllm.',
            )
    return choice


# -------- messages --------


def _parse_messages(values: dict[str, Any], features: ChatFeatures | None) -> list[dict[str, Any]]:
    messages = require(values, "messages", "Give the conversation as a list of {role, content} objects.")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", messages, "a non-empty list of {role, content} objects")
    if features is None:
        return [_parse_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    media = _MEDIA if features.takes_media else ()
    return [
        _parse_message_with_tools(message, f"messages[{index}]", media)
        for index, message in enumerate(messages)
    ]


def _parse_message(message: Any, where: str) -> dict[str, Any]:
    parsed = _parse_fields(
        message, where, ("name", "reasoning_content"), "Use messages of role and text content."
    )
    role = require(message, "role", f"Use one of {', '.join(_ROLES)}.", where)
    if role in ("tool", "function"):
        raise RequestError(
            "unsupported_parameter",
            f"'{where}.role': \"{role}\" is not supported, as tools are not. Use {', '.join(_ROLES)}.",
            param=f"{where}.role",
        )
    if role not in _ROLES:
        raise invalid(f"{where}.role", role, f"one of {', '.join(_ROLES)}")
    content = require(message, "content", "Give the text of the message.", where)
    return {
        "role": "system" if role == "developer" else role,
        "content": _parse_content(content, f"{where}.content"),
        **parsed,
    }


def _parse_message_with_tools(message: Any, where: str, media: tuple[str, ...]) -> dict[str, Any]:
    """A message as vLLM's server gives it to a template; a developer's stays one."""
    roles = (*_ROLES, "tool")
    role = (
        require(message, "role", f"Use one of {', '.join(roles)}.", where)
        if isinstance(message, dict)
        else None
    )
    of_role = {"assistant": ("reasoning", "reasoning_content"), "tool": ("tool_call_id",)}
    names = ("name", *of_role.get(role, ())) if isinstance(role, str) else ("name",)
    taken = (*names, "tool_calls") if role == "assistant" else names
    parsed = _parse_fields(message, where, names, f"Use role, content, {', '.join(taken)}.", taken)
    if role not in roles:
        raise invalid(f"{where}.role", role, f"one of {', '.join(roles)}")
    if (reasoning := parsed.pop("reasoning_content", None)) is not None:
        parsed.setdefault("reasoning", reasoning)
    if "reasoning" in parsed:
        parsed["reasoning_content"] = parsed["reasoning"]
    if tool_calls := message.get("tool_calls"):
        parsed["tool_calls"] = _parse_tool_calls(tool_calls, f"{where}.tool_calls")
    content = message.get("content")
    if content is None and (parsed.keys() & {"tool_calls", "reasoning"}):
        content = ""
    else:
        content = require(message, "content", "Give the text of the message.", where)
    return {"role": role, "content": _parse_content(content, f"{where}.content", media), **parsed}


def _parse_fields(
    message: Any, where: str, names: tuple[str, ...], remedy: str, taken: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The fields `names` of a message, which are strings; others, but for those `taken`, must ask for nothing.

    Raises:
        RequestError: see above.
    """
    if not isinstance(message, dict):
        raise invalid(where, message, "an object with 'role' and 'content'")
    parsed: dict[str, Any] = {}
    for name, value in message.items():
        if name in names and value is not None:
            if not isinstance(value, str):
                raise invalid(f"{where}.{name}", value, "a string")
            parsed[name] = value
        elif name not in ("role", "content", *taken) and value is not None and value != []:
            raise unsupported(f"{where}.{name}", value, remedy)
    return parsed


def _parse_tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Calls with their arguments as objects, which templates want."""
    if not isinstance(calls, list):
        raise invalid(where, calls, "a list of tool calls")
    parsed = []
    for index, call in enumerate(calls):
        place = f"{where}[{index}]"
        if not isinstance(call, dict):
            raise invalid(place, call, 'an object with "id", "type" and "function"')
        if call.get("type", "function") != "function":
            raise invalid(f"{place}.type", call["type"], '"function"')
        function = require(call, "function", "Give the name and the arguments.", place)
        if not isinstance(function, dict):
            raise invalid(f"{place}.function", function, "an object")
        name = require(function, "name", "Name the function.", f"{place}.function")
        if not isinstance(name, str):
            raise invalid(f"{place}.function.name", name, "a string")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = orjson.loads(arguments)
            except orjson.JSONDecodeError:
                raise invalid(
                    f"{place}.function.arguments", arguments, "a JSON object, as a string"
                ) from None
        if not isinstance(arguments, dict):
            raise invalid(f"{place}.function.arguments", function["arguments"], "a JSON object, as a string")
        parsed.append({**call, "function": {**function, "arguments": arguments}})
    return parsed


def _parse_content(content: Any, where: str, media: tuple[str, ...] = ()) -> str | list[dict[str, str]]:
    """The text of a message, or its parts if there are several; those of the types `media` as texts that name them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise invalid(where, content, "a string or a non-empty list of text parts")
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict):
            raise invalid(f"{where}[{index}]", part, 'a part such as {"type": "text", "text": "..."}')
        part_type = require(part, "type", 'Use {"type": "text", "text": "..."}.', f"{where}[{index}]")
        if part_type in media:
            texts.append(f"{part_type} {_digest(part)}")
            continue
        if part_type != "text":
            elsewhere = ", or run this line with --engine vllm" if part_type in _MEDIA else ""
            raise RequestError(
                "unsupported_parameter",
                f"'{where}[{index}]' is a part of type {shown(part_type)}, which is not supported. "
                f"Use parts of type {', '.join(map(shown, ('text', *media)))}{elsewhere}.",
                param=f"{where}[{index}].type",
            )
        text = require(part, "text", "Give the text of the part.", f"{where}[{index}]")
        if not isinstance(text, str):
            raise invalid(f"{where}[{index}].text", text, "a string")
        texts.append(text)
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _has_media(messages: list[dict[str, Any]]) -> bool:
    """Whether messages that were parsed have parts other than text."""
    return any(
        part["type"] != "text"
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
    )


def _digest(part: dict[str, Any]) -> str:
    return hashlib.blake2b(_dumped(part), digest_size=8).hexdigest()
