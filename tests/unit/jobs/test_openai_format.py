import io
import math

import numpy as np
import orjson
import pytest
from openai.types import Completion as OpenAICompletion
from openai.types.chat import ChatCompletion
from openai.types.shared import ErrorObject

from blendserve.errors import ConfigError, RequestError
from blendserve.jobs.openai_format import (
    CHAT_URL,
    COMPLETIONS_URL,
    LineError,
    PreparedRow,
    Row,
    failure_line,
    parse_line,
    read_rows,
    success_line,
)
from blendserve.jobs.prepare import prepare
from blendserve.jobs.sources import find_sources
from blendserve.request import Completion, SamplingParams, TokenLogprob
from tests.lines import parse_lines


class ToyTokenizer:
    """One token per byte; 256 is the special token that starts a text."""

    vocab_size = 257

    def render_chat(self, messages, *, add_generation_prompt=True, chat_template_kwargs=None, **_options):
        if any("unrenderable" in message["content"] for message in messages):
            raise RequestError("invalid_request", "the template refuses", param="messages")
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return text + str(chat_template_kwargs or "") + ("<assistant>" if add_generation_prompt else "")

    def encode_batch(self, texts, *, add_special_tokens):
        return [[256] * add_special_tokens + list(text.encode()) for text in texts]

    def decode(self, token_ids):
        return bytes(token_id for token_id in token_ids if token_id < 256).decode()

    def token_text(self, token_id):
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id):
        return bytes([token_id])


def line_bytes(body=None, url=CHAT_URL, **envelope):
    default_body = {"messages": [{"role": "user", "content": "hi"}]} if url == CHAT_URL else {"prompt": "hi"}
    if body is None or isinstance(body, dict):
        body = default_body | (body or {})
    line = {"custom_id": "a", "method": "POST", "url": url, "body": body} | envelope
    return orjson.dumps({name: value for name, value in line.items() if value is not ...})


def row_of(body=None, url=CHAT_URL, **envelope):
    row = parse_line(1, line_bytes(body, url, **envelope))
    assert isinstance(row, Row), row
    return row


def error_of(body=None, url=CHAT_URL, **envelope):
    error = parse_line(1, line_bytes(body, url, **envelope))
    assert isinstance(error, LineError), error
    assert error.custom_id == (envelope.get("custom_id", "a") or None)
    return error


def prepare_rows(*rows, **options):
    options = {"served_model_name": "m", "max_model_len": 100} | options
    return prepare(rows, ToyTokenizer(), **options)


# -------- lines of a file --------


def test_only_lf_ends_a_line_and_blank_lines_count():
    separators = "\u2028\u2029\x85"  # str.splitlines would cut the JSON string here
    first = line_bytes({"messages": [{"role": "user", "content": separators}]})
    file = io.BytesIO(b"\xef\xbb\xbf" + first + b"\r\n\n \t\r\n" + line_bytes(custom_id="b"))
    rows = list(parse_lines(file))
    assert [(row.line, row.custom_id) for row in rows] == [(1, "a"), (4, "b")]
    assert rows[0].chat[0]["content"] == separators


def test_reads_standard_input(monkeypatch):
    class Stdin:
        buffer = io.BytesIO(line_bytes())

    monkeypatch.setattr("sys.stdin", Stdin)
    assert [row.custom_id for row in read_rows(find_sources(["-"]))] == ["a"]


def test_unreadable_input_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"missing\.jsonl"):
        list(read_rows(find_sources([tmp_path / "missing.jsonl"])))
    with pytest.raises(ConfigError, match="directory"):
        list(read_rows(find_sources([tmp_path])))


@pytest.mark.parametrize(
    "raw",
    [
        b'{"custom_id": "a", ',
        b"\xff\xfe{}",
        b'{"a": NaN}',
        b"{} {}",
        b"[" * 5000,
        b"\0",
        b'"\\ud800"',
        b"1e999",
    ],
)
def test_a_line_that_is_not_json(raw):
    error = parse_line(7, raw)
    custom_id = "a" if b'"custom_id"' in raw else None
    assert (error.line, error.custom_id, error.code) == (7, custom_id, "invalid_json_line")
    assert "JSON" in error.message


@pytest.mark.parametrize(
    ("envelope", "code", "param"),
    [
        ({"custom_id": ...}, "missing_required_parameter", "custom_id"),
        ({"custom_id": 3}, "invalid_request", "custom_id"),
        ({"custom_id": ""}, "invalid_request", "custom_id"),
        ({"method": ...}, "missing_required_parameter", "method"),
        ({"method": "GET"}, "invalid_request", "method"),
        ({"url": ..., "body": {}}, "missing_required_parameter", "url"),
        ({"url": "/v1/embeddings"}, "invalid_url", "url"),
        ({"url": ["x"]}, "invalid_url", "url"),
        ({"body": ...}, "missing_required_parameter", "body"),
        ({"body": [1]}, "invalid_request", "body"),
        ({"max_tokens": 3}, "unknown_parameter", "max_tokens"),
    ],
)
def test_envelope_errors(envelope, code, param):
    error = parse_line(1, line_bytes(**envelope))
    assert (error.code, error.param) == (code, param)
    assert param in error.message


@pytest.mark.parametrize("raw", [b"[1]", b"3", b'"x"', b"null", b"true"])
def test_a_line_that_is_no_object(raw):
    error = parse_line(1, raw)
    assert (error.code, error.custom_id) == ("invalid_request", None)
    assert raw.decode() in error.message


# -------- bodies --------


@pytest.mark.parametrize(
    "body",
    [
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"max_tokens": "16"},
        {"max_tokens": 16.0},
        {"max_tokens": True},
        {"max_completion_tokens": 0},
        {"temperature": 2.1},
        {"temperature": -0.1},
        {"temperature": "1"},
        {"temperature": False},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"min_p": 1.5},
        {"n": 0},
        {"n": 129},
        {"seed": 1.5},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"stop": {"a": 1}},
        {"stop_token_ids": [1, "2"]},
        {"stop_token_ids": [-1]},
        {"ignore_eos": 1},
        {"min_tokens": 5, "max_tokens": 4},
        {"logprobs": 1},
        {"logprobs": True, "top_logprobs": 21},
        {"top_logprobs": 2},
        {"model": 3},
        {"chat_template_kwargs": []},
        {"messages": []},
        {"messages": "hi"},
        {"messages": ["hi"]},
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [{"role": ["user"], "content": "x"}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "user", "content": []}]},
        {"messages": [{"role": "user", "content": ["x"]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]},
        {"messages": [{"role": "user", "content": "x", "name": 3}]},
    ],
)
def test_wrong_values_name_the_parameter_and_what_was_found(body):
    error = error_of(body)
    assert error.code == "invalid_request"
    assert error.param.split("[")[0] in body
    assert "found" in error.message
    assert "expected" in error.message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
    ],
)
def test_missing_parameters(body, param):
    error = error_of(body)
    assert (error.code, error.param) == ("missing_required_parameter", param)


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [{"type": "function"}]},
        {"tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
        {"logit_bias": {"5": 1}},
        {"presence_penalty": 0.5},
        {"frequency_penalty": "0"},
        {"repetition_penalty": 1.1},
        {"prompt_logprobs": 0},
        {"guided_json": {}},
        {"audio": {}},
        {"modalities": ["text", "audio"]},
        {"echo": True},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(body):
    error = error_of(body)
    assert error.code == "unsupported_parameter"
    assert error.param.split("[")[0] in body


@pytest.mark.parametrize("name", ["best_of", "suffix", "echo"])
def test_completions_parameters_that_cannot_be_honoured(name):
    error = error_of({name: {"best_of": 2, "suffix": "x", "echo": True}[name]}, COMPLETIONS_URL)
    assert (error.code, error.param) == ("unsupported_parameter", name)


def test_neutral_null_and_harmless_values_change_nothing():
    neutral = {
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "logit_bias": {},
        "presence_penalty": 0.0,
        "repetition_penalty": 1,
        "prompt_logprobs": None,
        "guided_json": None,
        "stream": False,
        "user": "u",
        "metadata": {"k": "v"},
        "store": True,
        "service_tier": "auto",
        "temperature": None,
        "n": None,
        "stop": None,
        "max_tokens": None,
    }
    message = {"role": "user", "content": "hi", "refusal": None, "annotations": [], "tool_calls": None}
    assert row_of(neutral | {"messages": [message]}) == row_of()


@pytest.mark.parametrize(
    ("body", "url", "remedy"),
    [
        ({"max_token": 3}, CHAT_URL, "'max_tokens'"),
        ({"zzz": None}, CHAT_URL, "Remove"),
        ({"prompt": "x"}, CHAT_URL, COMPLETIONS_URL),
        ({"max_completion_tokens": 3}, COMPLETIONS_URL, CHAT_URL),
    ],
)
def test_unknown_parameters(body, url, remedy):
    error = error_of(body, url)
    assert (error.code, error.param) == ("unknown_parameter", next(iter(body)))
    assert remedy in error.message


def test_streaming_is_refused():
    assert error_of({"stream": True}).code == "streaming_unsupported"


def test_max_tokens_by_both_names_is_refused():
    assert error_of({"max_tokens": 3, "max_completion_tokens": 3}).param == "max_completion_tokens"


def test_chat_row():
    row = row_of(
        {
            "model": "m",
            "messages": [
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            ],
            "max_completion_tokens": 9,
            "temperature": 0,
            "top_p": 1,
            "top_k": -1,
            "min_p": 0.1,
            "seed": -5,
            "n": 3,
            "stop": "x",
            "stop_token_ids": [7],
            "logprobs": True,
            "top_logprobs": 4,
            "min_tokens": 2,
            "ignore_eos": True,
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
            "add_generation_prompt": False,
            "chat_template_kwargs": {"enable_thinking": False},
        }
    )
    assert row == Row(
        line=1,
        custom_id="a",
        url=CHAT_URL,
        model="m",
        chat=[
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ],
        prompt=None,
        params=SamplingParams(
            temperature=0.0,
            top_k=0,
            min_p=0.1,
            seed=-5,
            stop=("x",),
            stop_token_ids=(7,),
            include_stop_str_in_output=True,
            ignore_eos=True,
            min_tokens=2,
            skip_special_tokens=False,
            logprobs=4,
        ),
        max_tokens=9,
        n=3,
        add_generation_prompt=False,
        chat_template_kwargs={"enable_thinking": False},
    )


def test_logprobs_of_both_urls():
    assert row_of().params.logprobs is None
    assert row_of({"logprobs": True}).params.logprobs == 0
    assert row_of({"logprobs": False, "top_logprobs": 0}).params.logprobs is None
    assert row_of({"logprobs": 5}, COMPLETIONS_URL).params.logprobs == 5
    assert error_of({"logprobs": True}, COMPLETIONS_URL).param == "logprobs"


def test_prompts_are_a_string_or_token_ids():
    assert row_of({"prompt": "x"}, COMPLETIONS_URL).prompt == "x"
    assert row_of({"prompt": [1, 2]}, COMPLETIONS_URL).prompt == [1, 2]
    for several in (["x", "y"], [[1], [2]]):
        error = error_of({"prompt": several}, COMPLETIONS_URL)
        assert error.code == "unsupported_parameter"
        assert "one line per prompt" in error.message
    for wrong in ("", [], [1, "x"], [1, -2], [True], 3, {}):
        assert error_of({"prompt": wrong}, COMPLETIONS_URL).code == "invalid_request"


def test_output_tokens_field():
    raw = line_bytes({"expected": 12})
    assert parse_line(1, raw, output_tokens_field="expected").output_tokens == 12
    assert parse_line(1, raw).code == "unknown_parameter"
    assert parse_line(1, line_bytes({"expected": "x"}), output_tokens_field="expected").param == "expected"


# -------- the table --------


def test_table_has_one_request_per_completion_sharing_the_prompt():
    prepared = prepare_rows(
        row_of({"n": 3, "seed": 10, "max_tokens": 5}),
        row_of({"prompt": [1, 2], "max_tokens": 5}, COMPLETIONS_URL, custom_id="b"),
    )
    requests = prepared.requests
    assert list(prepared.rows) == [PreparedRow(1, "a", CHAT_URL, 3), PreparedRow(1, "b", COMPLETIONS_URL, 1)]
    assert prepared.row_index.tolist() == [0, 0, 0, 1]
    assert prepared.sample_index.tolist() == [0, 1, 2, 0]
    assert requests.seeds[:3].tolist() == [10, 11, 12]
    assert [requests.sampling_params(request).seed for request in range(4)] == [None] * 4
    assert [bytes(requests.tokens[i].tolist()) for i in range(3)] == [b"<user>hi<assistant>"] * 3
    assert len(set(requests.tokens.starts[:3].tolist())) == 1
    assert requests.tokens[3].tolist() == [1, 2]
    assert len(requests.tokens.data) == 19 + 2
    assert requests.max_tokens.dtype == requests.declared_tokens.dtype == np.int32


def test_equal_sampling_params_are_kept_once():
    prepared = prepare_rows(*[row_of({"top_k": i % 2}, custom_id=str(i)) for i in range(10)])
    assert len(prepared.requests.params) == 2


def test_special_tokens_are_added_to_prompts_but_not_to_chats():
    prepared = prepare_rows(
        row_of(),
        row_of(url=COMPLETIONS_URL, custom_id="b"),
        row_of({"add_special_tokens": True}, custom_id="c"),
        row_of({"add_special_tokens": False}, COMPLETIONS_URL, custom_id="d"),
    )
    assert [tokens[0] == 256 for tokens in prepared.requests.tokens] == [False, True, True, False]


def test_max_tokens_default_to_the_rest_of_the_context_or_16():
    prepared = prepare_rows(
        row_of(),
        row_of(url=COMPLETIONS_URL, custom_id="b"),
        row_of({"prompt": "x" * 92}, COMPLETIONS_URL, custom_id="c"),
    )
    assert prepared.requests.max_tokens.tolist() == [100 - 19, 16, 100 - 93]


def test_declared_tokens():
    def declared(body):
        raw = line_bytes({"max_tokens": 20} | body)
        return prepare_rows(
            parse_line(1, raw, output_tokens_field="expected")
        ).requests.declared_tokens.tolist()

    assert declared({}) == [0]
    assert declared({"ignore_eos": True}) == [20]
    assert declared({"ignore_eos": True, "stop": "x"}) == [0]
    assert declared({"expected": 7}) == [7]
    assert declared({"expected": 70}) == [20]


@pytest.mark.parametrize(
    ("body", "numbers"),
    [
        ({"prompt": [1] * 100}, ["100 tokens", "at least 1"]),
        ({"prompt": [1] * 60, "max_tokens": 41}, ["101 tokens", "60 in the prompt", "41 in the completion"]),
    ],
)
def test_context_length_exceeded(body, numbers):
    prepared = prepare_rows(row_of(body, COMPLETIONS_URL))
    [error] = prepared.errors
    assert (error.code, error.param) == ("context_length_exceeded", "prompt")
    assert error.message.startswith("This model's maximum context length is 100 tokens. However, ")
    assert all(number in error.message for number in numbers)
    assert len(prepared.requests) == 0


def test_a_full_context_is_not_exceeded():
    prepared = prepare_rows(row_of({"prompt": [1] * 60, "max_tokens": 40}, COMPLETIONS_URL))
    assert prepared.requests.max_tokens.tolist() == [40]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [1, 257]}, "prompt"),
        ({"stop_token_ids": [2**40]}, "stop_token_ids"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"prompt": [2**60]}, "prompt"),
    ],
)
def test_values_that_only_the_model_can_judge(body, param):
    [error] = prepare_rows(row_of(body, COMPLETIONS_URL)).errors
    assert (error.code, error.param) == ("invalid_request", param)


def test_a_chat_that_cannot_be_rendered_is_that_lines_error():
    bad = row_of({"messages": [{"role": "user", "content": "unrenderable"}]}, custom_id="bad")
    prepared = prepare_rows(row_of(), bad, row_of(custom_id="c"))
    assert [(error.custom_id, error.message) for error in prepared.errors] == [
        ("bad", "the template refuses")
    ]
    assert [row.custom_id for row in prepared.rows] == ["a", "c"]


def test_model_names():
    rows = [row_of({"model": name}, custom_id=f"id-{name}") for name in (None, "other", "m", "third")]
    prepared = prepare_rows(*rows)
    assert [row.custom_id for row in prepared.rows] == ["id-None", "id-m"]
    not_found, mismatch = prepared.errors
    assert (not_found.code, not_found.custom_id, not_found.status_code) == (
        "model_not_found",
        "id-other",
        404,
    )
    assert '"other"' in not_found.message
    assert '"m"' in not_found.message
    assert (mismatch.code, mismatch.custom_id, mismatch.status_code) == ("model_mismatch", "id-third", 400)
    assert '"third"' in mismatch.message
    assert '"other"' in mismatch.message
    assert not prepare_rows(*rows, any_model=True).errors


def test_endpoint_mismatch():
    prepared = prepare_rows(row_of(), row_of(url=COMPLETIONS_URL, custom_id="b"), endpoint=CHAT_URL)
    assert [(error.code, error.custom_id) for error in prepared.errors] == [("url_mismatch", "b")]


def test_duplicates_name_both_lines_and_the_first_runs():
    file = io.BytesIO(b"\n".join([line_bytes(), line_bytes({"n": 0}, custom_id="b"), line_bytes(), b""]))
    prepared = prepare_rows(*parse_lines(file), parse_line(4, line_bytes(custom_id="b")))
    assert [row.line for row in prepared.rows] == [1]
    assert [(error.line, error.code) for error in prepared.errors] == [
        (2, "invalid_request"),
        (3, "duplicate_custom_id"),
        (4, "duplicate_custom_id"),
    ]
    assert "line 3" in prepared.errors[1].message
    assert "line 1" in prepared.errors[1].message


def test_done_lines_are_left_out_but_still_count_for_duplicates():
    rows = [parse_line(line, line_bytes(custom_id=name)) for line, name in enumerate("aba", start=1)]
    fresh, resumed = prepare_rows(*rows), prepare_rows(*rows, done={"a"})
    assert [row.custom_id for row in resumed.rows] == ["b"]
    assert resumed.num_done == 1
    assert list(resumed.errors) == list(fresh.errors)
    assert resumed.num_lines == fresh.num_lines == 3


def test_limit_and_an_empty_job():
    rows = [row_of(custom_id=str(index)) for index in range(5)]
    assert [row.custom_id for row in prepare_rows(*rows, limit=2).rows] == ["0", "1"]
    empty = prepare_rows()
    assert (len(empty.requests), empty.num_lines) == (0, 0)


def test_chunks_keep_the_order_of_lines(monkeypatch):
    monkeypatch.setattr("blendserve.jobs.prepare._ENCODE_CHUNK", 3)
    urls = [CHAT_URL, COMPLETIONS_URL]
    prepared = prepare_rows(*[row_of(url=urls[i % 2], custom_id=str(i)) for i in range(10)])
    assert [row.custom_id for row in prepared.rows] == [str(i) for i in range(10)]
    assert [len(tokens) for tokens in prepared.requests.tokens] == [19, 3] * 5


# -------- result lines --------


def completion(text="hi", **fields):
    return Completion(token_ids=list(text.encode()), text=text, finish_reason="stop", **fields)


def result_of(url, *completions, **prompt):
    row = PreparedRow(1, "a", url, len(completions))
    line = success_line(row, completions, model="m", num_prompt_tokens=10, tokenizer=ToyTokenizer(), **prompt)
    assert line.endswith(b"}\n")
    assert line.count(b"\n") == 1
    return orjson.loads(line)


def test_chat_result_is_openais_shape():
    top = ((104, -0.1), (105, -math.inf))
    logprobs = [TokenLogprob(104, -0.1, top), TokenLogprob(105, math.nan, ())]
    result = result_of(CHAT_URL, completion(logprobs=logprobs, num_cached_tokens=10), completion("abc"))
    assert result["id"].startswith("batch_req_")
    assert (result["custom_id"], result["error"]) == ("a", None)
    assert result["response"]["status_code"] == 200
    assert result["response"]["request_id"]

    chat = ChatCompletion.model_validate(result["response"]["body"], strict=True)
    assert (chat.object, chat.model, len(chat.choices)) == ("chat.completion", "m", 2)
    assert [choice.message.content for choice in chat.choices] == ["hi", "abc"]
    assert chat.choices[0].message.refusal is None
    assert chat.choices[1].logprobs is None
    first, second = chat.choices[0].logprobs.content
    assert (first.token, first.bytes, first.logprob) == ("h", [104], -0.1)
    assert [(entry.token, entry.logprob) for entry in first.top_logprobs] == [("h", -0.1), ("i", -9999.0)]
    assert (second.logprob, second.top_logprobs) == (-9999.0, [])
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens, chat.usage.total_tokens) == (10, 5, 15)
    assert chat.usage.prompt_tokens_details.cached_tokens == 0


def test_completions_result_is_openais_shape():
    logprobs = [TokenLogprob(104, -0.1, ((105, -0.05), (104, -0.1))), TokenLogprob(105, -0.2, ())]
    result = result_of(COMPLETIONS_URL, completion(logprobs=logprobs, stop_reason="x", num_cached_tokens=4))
    body = OpenAICompletion.model_validate(result["response"]["body"], strict=True)
    [choice] = body.choices
    assert (body.object, choice.text, choice.finish_reason, choice.index) == (
        "text_completion",
        "hi",
        "stop",
        0,
    )
    assert choice.logprobs.tokens == ["h", "i"]
    assert choice.logprobs.token_logprobs == [-0.1, -0.2]
    assert choice.logprobs.top_logprobs == [{"i": -0.05, "h": -0.1}, {"i": -0.2}]
    assert choice.logprobs.text_offset == [0, 1]
    assert result["response"]["body"]["choices"][0]["stop_reason"] == "x"
    assert body.usage.prompt_tokens_details.cached_tokens == 4


PROMPT_LOGPROBS = [TokenLogprob(98, -3.0, ((99, -1.0),)), TokenLogprob(99, -math.inf, ((99, -0.5),))]


def test_log_probabilities_of_the_prompt_have_the_shape_of_vllms_server():
    expected = [
        None,
        {
            "98": {"logprob": -3.0, "rank": None, "decoded_token": "b"},
            "99": {"logprob": -1.0, "rank": 1, "decoded_token": "c"},
        },
        {"99": {"logprob": -0.5, "rank": 1, "decoded_token": "c"}},
    ]
    completions = [completion(prompt_logprobs=PROMPT_LOGPROBS), completion("other")]
    chat = result_of(CHAT_URL, *completions)["response"]["body"]
    assert chat["prompt_logprobs"] == expected
    body = result_of(COMPLETIONS_URL, *completions)["response"]["body"]
    assert [choice["prompt_logprobs"] for choice in body["choices"]] == [expected, expected]
    assert "prompt_logprobs" not in body
    assert "prompt_logprobs" not in result_of(COMPLETIONS_URL, completion())["response"]["body"]["choices"][0]


def test_an_echo_is_the_prompt_in_front_of_each_output():
    prompt = list(b"abc")
    logprobs = [TokenLogprob(104, -0.1, ()), TokenLogprob(105, -0.2, ())]
    completions = [
        completion(logprobs=logprobs, prompt_logprobs=PROMPT_LOGPROBS),
        completion("d", logprobs=[]),
    ]
    body = result_of(COMPLETIONS_URL, *completions, prompt=prompt, echo=True)["response"]["body"]
    first, second = body["choices"]
    assert (first["text"], second["text"]) == ("abchi", "abcd")
    assert first["logprobs"]["tokens"] == ["a", "b", "c", "h", "i"]
    assert first["logprobs"]["token_logprobs"] == [None, -3.0, -9999.0, -0.1, -0.2]
    assert first["logprobs"]["top_logprobs"][:2] == [None, {"c": -1.0, "b": -3.0}]
    assert first["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    assert second["logprobs"]["tokens"] == ["a", "b", "c"]
    plain = result_of(COMPLETIONS_URL, completion(), prompt=[256, *prompt], echo=True)["response"]["body"]
    assert (plain["choices"][0]["text"], plain["choices"][0]["logprobs"]) == ("abchi", None)


def test_n_completions_tell_the_prompts_log_probabilities_once():
    line = line_bytes({"n": 3, "prompt_logprobs": 1}, COMPLETIONS_URL)
    prepared = prepare_rows(parse_line(1, line, extra_parameters=frozenset({"prompt_logprobs"})))
    assert [params.prompt_logprobs for params in map(prepared.requests.sampling_params, range(3))] == [
        1,
        None,
        None,
    ]


def test_what_other_readers_take_for_the_end_of_a_line_is_escaped():
    text = "a\u2028b\u2029c\x85d\x0b\x0c\x1c\x1e\r\né\u2027\u202a"
    row = PreparedRow(1, text, COMPLETIONS_URL, 1)
    line = success_line(row, [completion(text)], model="m", num_prompt_tokens=1, tokenizer=ToyTokenizer())
    failure = failure_line(LineError(3, text, "some_code", text))
    for written in (line, failure):
        assert len(written.decode().splitlines()) == 1
        assert orjson.loads(written)["custom_id"] == text
    assert orjson.loads(line)["response"]["body"]["choices"][0]["text"] == text
    assert orjson.loads(failure)["response"]["body"]["error"]["message"] == text


@pytest.mark.parametrize(("status_code", "kind"), [(400, "invalid_request_error"), (500, "server_error")])
def test_failure_line(status_code, kind):
    result = orjson.loads(failure_line(LineError(3, None, "some_code", "why", "n", status_code)))
    assert result["id"].startswith("batch_req_")
    assert (result["custom_id"], result["error"]) == (None, None)
    assert result["response"]["status_code"] == status_code
    error = ErrorObject.model_validate(result["response"]["body"]["error"], strict=True)
    assert (error.code, error.param) == ("some_code", "n")
    assert result["response"]["body"]["error"] == {
        "message": "why",
        "type": kind,
        "param": "n",
        "code": "some_code",
        "line": 3,
    }


def test_derived_seeds_depend_on_the_job_and_the_id_but_not_on_the_place() -> None:
    lines = [row_of({}, custom_id=name) for name in ("a", "b", "c")]
    seeds = prepare_rows(*lines, seed=1).requests.seeds
    assert len(set(seeds.tolist())) == 3
    assert prepare_rows(*lines[1:], seed=1).requests.seeds.tolist() == seeds[1:].tolist()
    assert prepare_rows(*lines, seed=2).requests.seeds.tolist() != seeds.tolist()


def test_embeddings_are_refused_with_the_name_of_what_has_them() -> None:
    line = b'{"custom_id": "1", "method": "POST", "url": "/v1/embeddings", "body": {"input": "Hi"}}'
    error = parse_line(1, line)
    assert isinstance(error, LineError)
    assert error.code == "invalid_url"
    assert "run-batch has embeddings" in error.message
