"""Lines for a server: kept as they are, and planned by their likeness."""

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from blendserve.errors import ConfigError
from blendserve.jobs.openai_format import LineError, Row, parse_line
from blendserve.jobs.prepare import prepare
from blendserve.jobs.spool import RequestSpool
from blendserve.tokenizer import ApproximateTokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def parse(body: Any, url: str = CHAT, custom_id: str = "r", line: int = 1) -> Row | LineError:
    raw = orjson.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})
    return parse_line(line, raw, pass_through=True)


def chat(*contents: Any, **body: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content} for content in contents], **body}


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (
            CHAT,
            chat("hi", tools=[{"type": "function"}], tool_choice="auto", response_format={"type": "json"}),
        ),
        (CHAT, chat("hi", max_tokens="many", n=0.5, nobody_knows_this=[1, 2.5, None, "é\u2028"])),
        (CHAT, {"messages": [{"role": "tool", "tool_call_id": "c", "content": None}], "temperature": 99}),
        (CHAT, {"messages": "not even a list"}),
        (COMPLETIONS, {"prompt": ["one", "two"], "best_of": 3, "echo": True}),
        (COMPLETIONS, {"prompt": [1, 2, 2**40]}),
        (COMPLETIONS, {"prompt": ""}),
    ],
)
def test_a_body_is_kept_as_it_is_and_the_server_judges_it(url: str, body: dict[str, Any]) -> None:
    prepared = prepare([parse(body, url)], ApproximateTokenizer(), served_model_name="m", max_model_len=1000)
    assert not prepared.errors
    assert prepared.requests.raw is not None
    kept = prepared.requests.raw[0]
    assert (kept.url, orjson.loads(kept.body)) == (url, body)
    assert prepared.requests.prompt_tokens[0] >= 1
    assert prepared.requests.max_tokens[0] >= 1


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"model": "m"}, "missing_required_parameter"),
        ([1], "invalid_request"),
        (chat("hi", stream=True), "streaming_unsupported"),
    ],
)
def test_what_no_server_could_answer_is_refused(body: Any, code: str) -> None:
    error = parse(body)
    assert isinstance(error, LineError)
    assert error.code == code


def test_several_completions_are_one_request_as_long_as_all_of_them() -> None:
    rows = [
        parse(chat("hi", n=3, max_tokens=10)),
        parse(chat("hi", max_completion_tokens=7), custom_id="s", line=2),
        parse({"prompt": "hi"}, COMPLETIONS, custom_id="t", line=3),
    ]
    prepared = prepare(rows, ApproximateTokenizer(), served_model_name="m", max_model_len=1000)
    assert prepared.requests.max_tokens.tolist() == [30, 7, 16]
    assert [row.n for row in prepared.rows] == [1, 1, 1]
    assert prepared.row_index.tolist() == [0, 1, 2]


def test_a_likeness_shares_what_prompts_share() -> None:
    begin = "A common beginning of some length. " * 4
    picture = [
        {"type": "text", "text": begin},
        {"type": "image_url", "image_url": {"url": "data:" + "x" * 9999}},
    ]
    rows = [
        parse(chat(begin + "first"), custom_id="a"),
        parse(chat(begin + "second"), custom_id="b"),
        parse(chat(picture), custom_id="c"),
    ]
    requests = prepare(rows, ApproximateTokenizer(), served_model_name="m", max_model_len=1000).requests
    first, second, third = (requests.tokens[index] for index in range(3))
    shared = (4 + 1 + len(begin)) // 4
    for other in (second, third):
        assert (first[:shared] == other[:shared]).all()
    assert not np.array_equal(first, second)
    assert len(third) < len(first) + 20, "an image's bytes are no tokens"


def test_a_spool_gives_back_what_was_put_there() -> None:
    spool = RequestSpool()
    bodies = [bytes([index]) * (index * 1000) for index in range(50)]
    for index, body in enumerate(bodies):
        spool.append(CHAT if index % 2 else COMPLETIONS, body)
        assert spool[index].body == body
    assert [request.body for request in spool] == bodies
    assert [request.url for request in spool[:2]] == [COMPLETIONS, CHAT]


def test_a_spool_without_a_place_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="TMPDIR"):
        RequestSpool()
