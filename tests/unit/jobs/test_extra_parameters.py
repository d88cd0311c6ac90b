"""Parameters that only some engines can do: kept for those, refused by name for the others."""

from typing import Any

import orjson
import pytest

from blendserve.engines import EXTRA_PARAMETERS, EngineName
from blendserve.jobs.openai_format import LineError, Row, parse_line
from blendserve.jobs.sources import CHAT_URL, COMPLETIONS_URL
from blendserve.request import SamplingParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def parse(*, engine: EngineName = "vllm", url: str = COMPLETIONS_URL, **body: Any) -> Row | LineError:
    line = {
        "custom_id": "r",
        "method": "POST",
        "url": url,
        "body": {"prompt": "hi", **body}
        if url == COMPLETIONS_URL
        else {"messages": [{"role": "user", "content": "hi"}], **body},
    }
    return parse_line(1, orjson.dumps(line), extra_parameters=EXTRA_PARAMETERS[engine])


GOOD: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"presence_penalty": 1, "frequency_penalty": -2}, {"presence_penalty": 1, "frequency_penalty": -2}),
    ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
    ({"logit_bias": {"42": -100}}, {"logit_bias": {"42": -100}}),
    ({"bad_words": ["one", "two"]}, {"bad_words": ["one", "two"]}),
    ({"allowed_token_ids": [1, 2]}, {"allowed_token_ids": [1, 2]}),
    ({"guided_json": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}),
    ({"guided_regex": "[0-9]+"}, {"structured_outputs": {"regex": "[0-9]+"}}),
    ({"guided_choice": ["a", "b"]}, {"structured_outputs": {"choice": ["a", "b"]}}),
    ({"guided_grammar": "root ::= 'a'"}, {"structured_outputs": {"grammar": "root ::= 'a'"}}),
    (
        {"structured_outputs": {"json": SCHEMA, "regex": None, "disable_any_whitespace": True}},
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
    ),
    ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
        {"structured_outputs": {"json": SCHEMA}},
    ),
]


@pytest.mark.parametrize("engine", ["native", "vllm"])
@pytest.mark.parametrize(("body", "expected"), GOOD)
def test_an_engine_that_can_gets_them_in_its_terms(
    body: dict[str, Any], expected: dict[str, Any], engine: EngineName
) -> None:
    row = parse(engine=engine, **body)
    assert isinstance(row, Row), row
    assert orjson.loads(row.params.extra) == expected


@pytest.mark.parametrize(("body", "expected"), GOOD)
def test_others_refuse_them_by_name(body: dict[str, Any], expected: dict[str, Any]) -> None:
    error = parse(engine="simulated", **body)
    assert isinstance(error, LineError)
    assert (error.code, error.param in body) == ("unsupported_parameter", True)
    assert "with --engine native or --engine vllm" in error.message


def test_what_asks_for_nothing_leaves_nothing() -> None:
    row = parse(
        presence_penalty=0,
        frequency_penalty=None,
        repetition_penalty=1,
        logit_bias={},
        bad_words=[],
        response_format={"type": "text"},
        structured_outputs={},
    )
    assert isinstance(row, Row)
    assert row.params.extra == b""


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": "a"}}, "logit_bias"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": "word"}, "bad_words"),
        ({"allowed_token_ids": ["1"]}, "allowed_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"guided_json": SCHEMA, "response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_what_no_engine_can_do_is_refused_at_once(body: dict[str, Any], param: str) -> None:
    error = parse(**body)
    assert isinstance(error, LineError), error
    assert (error.code, error.param) == ("invalid_request", param)


@pytest.mark.parametrize(
    ("body", "param", "remedy"),
    [
        ({"structured_outputs": {"jsom": SCHEMA}}, "structured_outputs.jsom", "json, regex"),
        ({"tools": [{"type": "function"}]}, "tools", "elsewhere"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "with --engine native."),
        ({"echo": True}, "echo", "with --engine native."),
        ({"suffix": "x"}, "suffix", "elsewhere"),
        ({"best_of": 2}, "best_of", "Ask for 'n' completions"),
    ],
)
def test_what_is_not_passed_on_is_still_refused_by_name(
    body: dict[str, Any], param: str, remedy: str
) -> None:
    error = parse(**body)
    assert isinstance(error, LineError)
    assert (error.code, error.param) == ("unsupported_parameter", param)
    assert remedy in error.message


def test_what_completions_alone_can_is_refused_in_chats() -> None:
    error = parse(engine="native", url=CHAT_URL, echo=True)
    assert isinstance(error, LineError)
    assert (error.code, error.param) == ("unsupported_parameter", "echo")


def test_log_probabilities_of_prompts_and_of_named_tokens() -> None:
    def params(**body: Any) -> SamplingParams:
        row = parse(engine="native", **body)
        assert isinstance(row, Row), row
        return row.params

    assert params(prompt_logprobs=2).prompt_logprobs == 2
    assert params(prompt_logprobs=2).logprobs is None
    assert params(echo=True).prompt_logprobs is None
    assert params(echo=True, logprobs=3).prompt_logprobs == 3
    assert params(echo=True, logprobs=3, prompt_logprobs=0).prompt_logprobs == 0
    assert params(logprobs=0, logprob_token_ids=[5, 6]).logprob_token_ids == (5, 6)
    assert params(url=CHAT_URL, logprobs=True, logprob_token_ids=[5]).logprob_token_ids == (5,)
    for body, param in (
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"logprobs": 1, "logprob_token_ids": [*range(129)]}, "logprob_token_ids"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
    ):
        error = parse(engine="native", **body)
        assert isinstance(error, LineError), body
        assert (error.code, error.param) == ("invalid_request", param)
