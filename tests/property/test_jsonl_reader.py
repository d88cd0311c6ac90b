"""Any bytes: each line ends in exactly one place. Killed anywhere: resuming gives the same results."""

import io
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from blendserve.jobs.job import Job
from blendserve.jobs.openai_format import CHAT_URL, COMPLETIONS_URL, LineError, Row, failure_line
from blendserve.jobs.prepare import prepare
from blendserve.jobs.store import ResultStore
from blendserve.request import Completion, StepOutput, StepStats
from tests.lines import parse_lines

PARAMETERS = [
    "model",
    "messages",
    "prompt",
    "max_tokens",
    "max_completion_tokens",
    "n",
    "seed",
    "stop",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "logprobs",
    "top_logprobs",
    "stream",
    "ignore_eos",
    "stop_token_ids",
    "tools",
    "logit_bias",
    "response_format",
    "echo",
    "user",
    "chat_template_kwargs",
    "expected",
    "unheard_of",
]

ENCODABLE = st.characters(exclude_categories=["Cs"])

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(ENCODABLE, max_size=5),
    lambda values: (
        st.lists(values, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "name"]), values, max_size=4)
    ),
    max_leaves=8,
)
wild_messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "tool"]), "content": json_values}),
    max_size=2,
)
wild_envelopes = st.fixed_dictionaries(
    {},
    optional={
        "body": st.dictionaries(st.sampled_from(PARAMETERS), json_values | wild_messages, max_size=5)
        | json_values,
        "custom_id": st.sampled_from(["a", ""]) | json_values,
        "method": st.just("POST") | json_values,
        "url": st.sampled_from([CHAT_URL, COMPLETIONS_URL]) | json_values,
    },
)
good_parameters = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.integers(1, 60),
        "n": st.integers(1, 3),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "stop": st.text("ab", min_size=1) | st.lists(st.text("ab", min_size=1)),
        "expected": st.integers(0, 99),
        "ignore_eos": st.booleans(),
    },
)
chats = st.lists(st.builds(lambda text: {"role": "user", "content": text}, st.text(ENCODABLE)), min_size=1)
prompts = st.text(ENCODABLE, min_size=1) | st.lists(st.integers(0, 300), min_size=1)
good_envelopes = st.builds(
    lambda custom_id, url, chat, prompt, parameters: {
        "custom_id": custom_id,
        "method": "POST",
        "url": url,
        "body": parameters | ({"messages": chat} if url == CHAT_URL else {"prompt": prompt}),
    },
    st.text("abc", min_size=1, max_size=2),
    st.sampled_from([CHAT_URL, COMPLETIONS_URL]),
    chats,
    prompts,
    good_parameters,
)
good_lines = good_envelopes.map(orjson.dumps)
lines = st.binary(max_size=30) | (json_values | wild_envelopes).map(orjson.dumps) | good_lines | good_lines
files = (st.binary(max_size=300) | st.lists(lines, max_size=8).map(b"\n".join)).filter(
    lambda content: (
        not content.startswith((b"\xff\xfe", b"\xfe\xff", b"{\0", b"\0{", b"\0\0\0{", b"\0\0\xfe"))
    )
)
"""not UTF-16 or UTF-32, which are refused as a whole"""


class ByteTokenizer:
    vocab_size = 256

    def render_chat(self, messages, *, add_generation_prompt=True, chat_template_kwargs=None, **_options):
        return "".join(message["content"] for message in messages)

    def encode_batch(self, texts, *, add_special_tokens):
        return [list(text.encode()) for text in texts]


@settings(max_examples=200, deadline=None)
@given(files)
def test_every_line_ends_as_exactly_one_row_or_error(content):
    physical = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    expected = [line for line, raw in enumerate(physical, start=1) if raw.strip()]
    rows = list(parse_lines(io.BytesIO(content), output_tokens_field="expected"))
    assert [row.line for row in rows] == expected
    for row in rows:
        assert isinstance(row, Row) != isinstance(row, LineError)

    prepared = prepare(rows, ByteTokenizer(), served_model_name="m", max_model_len=50)
    ends = [row.line for row in prepared.rows] + [error.line for error in prepared.errors]
    assert sorted(ends) == expected
    for error in prepared.errors:
        assert orjson.loads(failure_line(error))["response"]["body"]["error"]["line"] == error.line
    assert len(prepared.requests) == sum(row.n for row in prepared.rows)
    assert (prepared.requests.max_tokens >= 1).all()
    assert (prepared.requests.prompt_tokens + prepared.requests.max_tokens <= 50).all()


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(st.sampled_from(PARAMETERS), json_values), st.sampled_from([CHAT_URL, COMPLETIONS_URL])
)
def test_arbitrary_parameters_never_crash(parameters, url):
    prompt = {"messages": [{"role": "user", "content": "x"}]} if url == CHAT_URL else {"prompt": "x"}
    envelope = {"custom_id": "a", "method": "POST", "url": url, "body": prompt | parameters}
    [row] = parse_lines(io.BytesIO(orjson.dumps(envelope)), output_tokens_field="expected")
    assert row.custom_id == "a"


class EchoEngine:
    name = "echo"

    def run(self, requests, policy):
        for request in range(len(requests)):
            prompt = requests.tokens[request].tolist()
            yield StepOutput(
                StepStats(0.1, 0, 0, 0, 0, 0, 0.0), [(request, Completion(prompt, str(prompt), "stop"))]
            )


def run_job(content, output):
    with ResultStore(output, model="m") as store:
        prepared = prepare(
            parse_lines(io.BytesIO(content)),
            ByteTokenizer(),
            served_model_name="m",
            max_model_len=50,
            done=store.done,
        )
        for _ in Job(prepared, EchoEngine(), None, store, ByteTokenizer(), model="m").run():
            pass


def answers(output):
    """What was answered, without the ids that are drawn anew."""
    results = [orjson.loads(line) for line in output.read_bytes().split(b"\n")[:-1]]
    found = {}
    for result in results:
        assert result["custom_id"] not in found
        body = result["response"]["body"]
        found[result["custom_id"]] = (body["choices"], body["usage"])
    return found


@settings(max_examples=100, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(st.lists(st.integers(0, 255), min_size=1, max_size=4), st.integers(1, 3)), max_size=6
    ),
    cut_ratios=st.lists(st.floats(0, 1), min_size=1, max_size=3),
)
def test_killed_at_any_byte_and_resumed_is_the_same(prompts, cut_ratios):
    content = b"".join(
        orjson.dumps(
            {
                "custom_id": f"r{index}",
                "method": "POST",
                "url": COMPLETIONS_URL,
                "body": {"prompt": prompt, "n": n},
            },
            option=orjson.OPT_APPEND_NEWLINE,
        )
        for index, (prompt, n) in enumerate(prompts)
    )
    with TemporaryDirectory() as folder:
        whole, killed = Path(folder, "whole.jsonl"), Path(folder, "killed.jsonl")
        run_job(content, whole)
        run_job(content, killed)
        for cut_ratio in cut_ratios:
            written = killed.read_bytes()
            killed.write_bytes(written[: round(cut_ratio * len(written))])
            run_job(content, killed)
            assert answers(killed) == answers(whole)
            assert set(answers(whole)) == {f"r{index}" for index in range(len(prompts))}
