"""Parameters that only some engines can do: kept for those, refused by name for the others."""

from typing import Any

import orjson
import pytest

from blendserve.jobs.openai_format import LineError, Row, parse_line

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def parse(*, extra_parameters: bool = True, **body: Any) -> Row | LineError:
    line = {
        "custom_id": "r",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "hi", **body},
    }
    return parse_line(1, orjson.dumps(line), extra_parameters=extra_parameters)


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


@pytest.mark.parametrize(("body", "expected"), GOOD)
def test_an_engine_that_can_gets_them_in_its_terms(body: dict[str, Any], expected: dict[str, Any]) -> None:
    row = parse(**body)
    assert isinstance(row, Row), row
    assert orjson.loads(row.params.extra) == expected


@pytest.mark.parametrize(("body", "expected"), GOOD)
def test_others_refuse_them_by_name(body: dict[str, Any], expected: dict[str, Any]) -> None:
    error = parse(extra_parameters=False, **body)
    assert isinstance(error, LineError)
    assert (error.code, error.param in body) == ("unsupported_parameter", True)


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
    ("body", "param"),
    [
        ({"structured_outputs": {"jsom": SCHEMA}}, "structured_outputs.jsom"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_what_is_not_passed_on_is_still_refused_by_name(body: dict[str, Any], param: str) -> None:
    error = parse(**body)
    assert isinstance(error, LineError)
    assert (error.code, error.param) == ("unsupported_parameter", param)
