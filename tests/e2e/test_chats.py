"""Tools and reasoning through the whole command, on a model that answers by heart."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from blendserve import LLM, SamplingParams
from blendserve.errors import ConfigError
from tests.e2e.test_run import body, chat, read, write
from tests.scripted_model import write_scripted_model

TEMPLATE = """
{%- for tool in tools or [] %}{{ tool.function.name }} {% endfor %}
{%- for document in documents or [] %}{{ document.text }} {% endfor %}
{%- for message in messages %}
{%- for call in message.tool_calls or [] %}{{ call.function.arguments.city }} {% endfor %}
{{- message.content }}{% endfor %}"""
CALL = '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
SCRIPTS = {
    "[[call]]": ["<think>", "I need the weather. STOP", "</think>", CALL],
    "[[talk]]": ["Thinking STOP of", " it</think>", "So be it. ", "STOP and more"],
    "[[broken]]": ["Hm</think>Well, ", '<tool_call>{"name": "weather", "arg'],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
]
ROME = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
STRICT = [{"type": "function", "function": {"name": "weather", "parameters": ROME, "strict": True}}]
CALLED = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
HISTORY = [
    {"role": "developer", "content": "Hello"},
    {"role": "assistant", "content": None, "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "1", "content": "rain"},
    {"role": "user", "content": "[[call]]"},
]
PARSERS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")


@pytest.fixture(scope="module")
def model(make_tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "scripted"
    return write_scripted_model(make_tiny_model, path, SCRIPTS, TEMPLATE)


def run(model: Path, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "blendserve.cli", *map(str, arguments)]
    flags = ["--model", str(model), "--served-model-name", "tiny", "--dtype", "float32"]
    return subprocess.run([*command, *flags], capture_output=True, text=True, timeout=900, check=False)


def test_tools_and_reasoning(model: Path, tmp_path: Path) -> None:
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    lines = [
        chat("call", "[[call]]", tools=TOOLS, stop="STOP"),
        chat("none", "[[call]]", tools=TOOLS, tool_choice="none"),
        chat("cut", "[[call]]", tools=TOOLS, max_tokens=2),
        chat("hidden", "[[call]]", tools=TOOLS, include_reasoning=False, logprobs=True),
        chat("history", messages=HISTORY, tools=TOOLS),
        chat("talk", "[[talk]]", stop="STOP"),
        chat("asked", "[[talk]]", stop="STOP", stop_in_reasoning=True),
        chat("off", "[[talk]]", stop="STOP", chat_template_kwargs={"enable_thinking": False}),
        chat("broken", "[[broken]]", tools=TOOLS),
        chat("documents", "[[talk]]", documents=[{"text": "one"}, {"text": "two"}], max_tokens=1),
        chat("no-documents", "[[talk]]", max_tokens=1),
        chat(
            "continued",
            messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "[[talk]]"}],
            continue_final_message=True,
            add_generation_prompt=False,
        ),
        chat("required", "[[talk]]", tools=STRICT, tool_choice="required", max_tokens=100),
        chat("constrained", "[[call]]", guided_choice=["yes", "no"]),
        chat("strict", "[[call]]", tools=STRICT),
        chat("image", messages=[{"role": "user", "content": image}]),
    ]
    requests = write(tmp_path / "in.jsonl", lines)
    done = run(model, "run", requests, "-o", tmp_path / "out.jsonl", *PARSERS)
    assert done.returncode == 1, done.stderr
    answers = {
        name: ChatCompletion.model_validate(body(line)) for name, line in read(tmp_path / "out.jsonl").items()
    }
    found = {name: answer.choices[0] for name, answer in answers.items()}

    def told(name: str) -> tuple[Any, ...]:
        message = found[name].message
        return message.model_extra["reasoning"], message.content, found[name].finish_reason

    for name in ("call", "history"):
        assert told(name) == ("I need the weather. STOP", None, "tool_calls")
        (call,) = found[name].message.tool_calls
        assert (call.type, call.function.name) == ("function", "weather")
        assert json.loads(call.function.arguments) == {"city": "Rome"}
        assert call.id.startswith("chatcmpl-tool-")
        assert answers[name].usage.completion_tokens_details.reasoning_tokens == 1
    assert found["call"].message.tool_calls[0].id != found["history"].message.tool_calls[0].id
    assert told("none") == ("I need the weather. STOP", CALL, "stop")
    assert told("cut") == ("I need the weather. STOP", None, "length")
    assert told("hidden") == (None, None, "tool_calls")
    assert found["hidden"].logprobs is None
    assert told("talk") == ("Thinking STOP of it", "So be it. ", "stop")
    assert found["talk"].model_extra["stop_reason"] == "STOP"
    assert told("asked") == ("Thinking ", None, "stop")
    assert told("off") == (None, "Thinking ", "stop")
    assert told("broken") == ("Hm", f"Well, {SCRIPTS['[[broken]]'][1]}", "stop")
    assert found["broken"].message.tool_calls is None
    assert told("continued") == ("Thinking STOP of it", "So be it. STOP and more", "stop")
    assert told("required") == ("Thinking STOP of it", "", "tool_calls")
    (call,) = found["required"].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Rome"})
    reasoning, content, _ = told("constrained")
    assert reasoning == "I need the weather. STOP"
    assert content in ("yes", "no")
    extra = answers["documents"].usage.prompt_tokens - answers["no-documents"].usage.prompt_tokens
    assert extra >= 2
    failures = {name: body(line)["error"] for name, line in read(tmp_path / "out.errors.jsonl").items()}
    assert sorted(failures) == ["image", "strict"]
    for failure in failures.values():
        assert "--engine vllm" in failure["message"]

    # The ids are the requests' own, whichever command runs them; other parsers are another job.
    again = run(model, "run-batch", "-i", requests, "-o", tmp_path / "batch.jsonl", *PARSERS)
    assert again.returncode == 1, again.stderr
    batch = read(tmp_path / "batch.jsonl")
    assert (
        body(batch["call"])["choices"][0]["message"]
        == body(read(tmp_path / "out.jsonl")["call"])["choices"][0]["message"]
    )
    other = run(model, "run", requests, "-o", tmp_path / "out.jsonl", "--reasoning-parser", "qwen3")
    assert other.returncode == 2
    assert "engine_args" in other.stderr


def test_parsers_that_do_not_fit_are_refused(model: Path, tmp_path: Path) -> None:
    requests = write(tmp_path / "in.jsonl", [chat("a", "[[talk]]")])
    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "mistral")
    done = run(model, "run", requests, "-o", tmp_path / "out.jsonl", *flags)
    assert done.returncode == 2
    assert "--tool-call-parser mistral does not fit this model" in done.stderr


def test_the_python_api_leaves_calls_in_the_text(model: Path) -> None:
    messages = [{"role": "user", "content": "[[call]]"}]
    with LLM(str(model), dtype="float32", engine_process=False, kv_cache_memory=1 << 20) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8)
        with_tools, without = (
            llm.chat(messages, params, use_tqdm=False, tools=tools)[0] for tools in (TOOLS, None)
        )
        assert with_tools.outputs[0].text == "".join(SCRIPTS["[[call]]"])
        assert with_tools.prompt == "weather [[call]]"
        assert without.prompt == "[[call]]"
    with pytest.raises(ConfigError, match="reasoning_parser"):
        LLM(str(model), reasoning_parser="qwen3")
