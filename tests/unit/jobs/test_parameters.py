"""Every parameter of OpenAI's and vLLM's requests is honoured or refused by name, and the page of them says which."""

import runpy
from pathlib import Path
from typing import Any, get_type_hints

import orjson
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams

from blendserve.engines import EXTRA_PARAMETERS, EngineConfig, EngineName
from blendserve.jobs.openai_format import (
    LineError,
    Row,
    parameter_support,
    parse_line,
    values_that_ask_for_nothing,
)
from blendserve.jobs.sources import CHAT_URL, COMPLETIONS_URL

DOCS = Path(__file__).parents[3] / "docs"
VLLM_COMMON = {
    "add_special_tokens",
    "allowed_token_ids",
    "bad_words",
    "cache_salt",
    "ec_transfer_params",
    "echo",
    "frequency_penalty",
    "ignore_eos",
    "include_stop_str_in_output",
    "kv_transfer_params",
    "length_penalty",
    "logit_bias",
    "logprob_token_ids",
    "logprobs",
    "max_tokens",
    "min_p",
    "min_tokens",
    "model",
    "n",
    "presence_penalty",
    "priority",
    "prompt_logprobs",
    "repetition_detection",
    "repetition_penalty",
    "request_id",
    "response_format",
    "return_token_ids",
    "return_token_offsets",
    "return_tokens_as_token_ids",
    "routed_experts_prompt_start",
    "seed",
    "session_id",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stop",
    "stop_token_ids",
    "stream",
    "stream_interval",
    "stream_options",
    "structured_outputs",
    "temperature",
    "thinking_token_budget",
    "top_k",
    "top_p",
    "truncate_prompt_tokens",
    "truncation_side",
    "use_beam_search",
    "user",
    "vllm_xargs",
    "watermarking",
}
"""fields of vLLM 0.32's requests"""
VLLM = {
    CHAT_URL: VLLM_COMMON
    | {
        "add_generation_prompt",
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
        "documents",
        "include_reasoning",
        "max_completion_tokens",
        "media_io_kwargs",
        "messages",
        "mm_payload",
        "mm_processor_kwargs",
        "parallel_tool_calls",
        "reasoning_effort",
        "return_mm_kwargs",
        "return_prompt_text",
        "tool_choice",
        "tools",
        "top_logprobs",
    },
    COMPLETIONS_URL: VLLM_COMMON | {"prompt", "suffix", "prompt_embeds"},
}
OPENAI = {CHAT_URL: [*get_type_hints(ChatParams)], COMPLETIONS_URL: [*get_type_hints(CompletionParams)]}
ONLY_IN = {CHAT_URL: {"prompt"}, COMPLETIONS_URL: {"messages", "max_completion_tokens", "top_logprobs"}}
"""parameters of the other url, which are unknown in this one"""
SOMETHING: dict[str, Any] = {
    "add_generation_prompt": False,
    "chat_template_kwargs": {"x": 1},
    "continue_final_message": True,
    "documents": [{"text": "x"}],
    "logit_bias": {"5": 1},
    "logprob_token_ids": [3],
    "messages": [{"role": "user", "content": "other"}],
    "model": "other",
    "prompt": "other",
    "response_format": {"type": "json_object"},
    "stop": ["x"],
    "structured_outputs": {"choice": ["a"]},
    "temperature": 0.5,
    "top_p": 0.5,
    "tool_choice": "required",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "reasoning_effort": "low",
    "stop_token_ids": [7],
    "allowed_token_ids": [7],
    "bad_words": ["w"],
    "guided_choice": ["w"],
    **dict.fromkeys(("guided_grammar", "guided_regex"), "a"),
    "guided_json": {"type": "object"},
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "repetition_penalty", "min_p"), 0.3),
    **dict.fromkeys(("echo", "ignore_eos", "include_stop_str_in_output", "logprobs"), True),
    **dict.fromkeys(("skip_special_tokens", "include_reasoning", "parallel_tool_calls"), False),
}
"""values that ask for something; 3 for all others"""
BESIDE: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "logprob_token_ids": {"logprobs": 0},
    "add_special_tokens": {},
    "tool_choice": {"tools": SOMETHING["tools"]},
    "parallel_tool_calls": {"tools": SOMETHING["tools"]},
    "continue_final_message": {"add_generation_prompt": False},
}
"""what a parameter needs besides"""


def parse(url: str, engine: EngineName, **body: Any) -> Row | LineError:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if url == CHAT_URL else {"prompt": "hi"}
    line = {"custom_id": "r", "method": "POST", "url": url, "body": prompt | body}
    config = EngineConfig(engine=engine, enable_auto_tool_choice=True, tool_call_parser="hermes")
    return parse_line(
        1,
        orjson.dumps(line),
        extra_parameters=EXTRA_PARAMETERS[engine],
        chat_features=config.chat_features,
    )


def something(name: str, url: str, engine: EngineName) -> Any:
    if name == "stop_in_reasoning":
        return engine == "native" and url == CHAT_URL
    if name == "logprobs" and url == COMPLETIONS_URL:
        return 2
    if name == "add_special_tokens":
        return url == CHAT_URL
    return SOMETHING.get(name, 3)


def beside(name: str, url: str) -> dict[str, Any]:
    found = BESIDE.get(name, {})
    return {"logprobs": True} if url == CHAT_URL and "logprobs" in found else found


@pytest.mark.parametrize("url", [CHAT_URL, COMPLETIONS_URL])
def test_every_parameter_is_known(url: str) -> None:
    known = parameter_support("native", url)
    assert {*OPENAI[url], *VLLM[url]} - known.keys() == set()


@pytest.mark.parametrize("engine", ["native", "vllm", "simulated"])
@pytest.mark.parametrize("url", [CHAT_URL, COMPLETIONS_URL])
def test_none_is_dropped_silently(url: str, engine: EngineName) -> None:
    """What is honoured makes another request, what is refused is an error by its name."""
    for name, support in parameter_support(engine, url).items():
        given = {**beside(name, url), name: something(name, url, engine)}
        with_it, without = parse(url, engine, **given), parse(url, engine, **beside(name, url))
        if support == "refused" or name == "stream":
            if name == "parallel_tool_calls":  # without tools it asks for nothing, whatever it says
                continue
            with_it = parse(url, engine, **{name: something(name, url, engine)})
            assert isinstance(with_it, LineError), (name, with_it)
            assert with_it.param == name, with_it
            unknown = name in ONLY_IN[url]
            assert with_it.code == ("unknown_parameter" if unknown else with_it.code)
            for value in values_that_ask_for_nothing(name):
                assert isinstance(parse(url, engine, **{name: value}), Row), (name, value)
        elif support == "no effect":
            assert with_it == without, name
        else:
            assert isinstance(with_it, Row), (name, with_it)
            assert with_it != without, f"{name} was dropped"


def test_the_page_is_what_the_code_says() -> None:
    generated = runpy.run_path(str(DOCS / "make_parameters.py"))
    assert generated["TARGET"].read_text() == generated["text"](), "run python docs/make_parameters.py"
    assert generated["NOTES"].keys() <= parameter_support("native", CHAT_URL).keys()
