"""Structured outputs: what a model of random weights writes under a constraint is what the constraint says."""

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fastjsonschema
import numpy as np
import pytest

from blendserve.engines.batching import BatchingEngine
from blendserve.engines.native.executor import TorchExecutor
from blendserve.engines.native.grammar import check_constraint
from blendserve.errors import RequestError
from blendserve.planner.plan import make_plan
from blendserve.request import Completion, Failure, RequestTable, Result, SamplingParams
from blendserve.scheduling.policies import make_policy
from blendserve.scheduling.scheduler import SchedulerConfig
from blendserve.tokenizer import Tokenizer
from blendserve.tokens import PromptTokens
from tests.workload import COST_MODEL

NUM_SCHEMAS = 200
BLOCK_SIZE = 8
NUM_BLOCKS = 100
"""too few for sixteen outputs at a time: some are retracted and come back"""


@pytest.fixture(scope="module")
def folder(make_tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("grammar") / "model"
    return make_tiny_model("llama", path, with_tokenizer=True, max_position_embeddings=2048)


@pytest.fixture(scope="module", params=[False, True], ids=["at-once", "late"])
def executor(folder: Path, request: pytest.FixtureRequest) -> Iterator[TorchExecutor]:
    executor = TorchExecutor(
        folder,
        Tokenizer(folder),
        cost_model=COST_MODEL,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        late_results=request.param,
    )
    yield executor
    executor.close()


def asked(temperature: float = 1.0, min_tokens: int = 0, **constraint: Any) -> SamplingParams:
    extra = {"structured_outputs": constraint} if constraint else {}
    return SamplingParams(
        temperature=temperature, min_tokens=min_tokens, extra=json.dumps(extra).encode() if extra else b""
    )


def requests_of(params: list[SamplingParams], max_tokens: int = 200) -> RequestTable:
    count = len(params)
    return RequestTable(
        tokens=PromptTokens.from_lists([[50 + i % 7, 60, 70, 80 + i] for i in range(count)]),
        max_tokens=np.full(count, max_tokens, np.int32),
        declared_tokens=np.zeros(count, np.int32),
        params=params,
        params_index=np.arange(count, dtype=np.int32),
        seeds=np.arange(count, dtype=np.uint64) + np.uint64(5),
    )


def run(executor: TorchExecutor, requests: RequestTable, max_num_seqs: int = 16) -> list[Result]:
    engine = BatchingEngine(executor, SchedulerConfig(max_num_seqs, 256))
    results: dict[int, Result] = {}
    for step in engine.run(requests, make_policy("fcfs", make_plan(requests, COST_MODEL))):
        results |= dict(step.results)
    return [results[request] for request in range(len(requests))]


def written(results: list[Result]) -> list[str]:
    assert all(isinstance(result, Completion) and result.finish_reason == "stop" for result in results), (
        results
    )
    return [result.text for result in results if isinstance(result, Completion)]


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of bounded documents, so that each ends well within the limit of tokens."""
    kinds = ["string", "integer", "boolean", "enum", "null", "const", "pattern"]
    if depth < 3:
        kinds += ["object"] * 4 + ["array"] * 2 + ["anyOf", "ref"]
    kind = "object" if depth == 0 else rng.choice(kinds)
    if kind == "object":
        names = rng.sample(["a", "name", "größe", "x y", 'quo"te', "id", "k1"], rng.randint(0, 4))
        return {
            "type": "object",
            "properties": {name: random_schema(rng, depth + 1) for name in names},
            "required": rng.sample(names, rng.randint(0, len(names))),
            "additionalProperties": False,
        }
    if kind == "array":
        low = rng.randint(0, 2)
        return {
            "type": "array",
            "items": random_schema(rng, depth + 1),
            "minItems": low,
            "maxItems": low + rng.randint(0, 2),
        }
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
    if kind == "string":
        low = rng.randint(0, 4)
        return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 8)}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-f]{2,5}$", "^(yes|no)$", r"^\d{3}-\d{2}$"])}
    if kind == "integer":
        low = rng.randint(-200, 200)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)}
    if kind == "enum":
        return {"enum": rng.sample(["red", "green", 7, -1.5, True, None, "ä"], rng.randint(1, 4))}
    if kind == "const":
        return {"const": rng.choice(["fixed", 12, False])}
    if kind == "ref":
        return {"$ref": "#/$defs/leaf"}
    return {"type": kind}


def whole_schema(rng: random.Random) -> dict[str, Any]:
    schema = random_schema(rng)
    if "#/$defs/leaf" in json.dumps(schema):
        schema["$defs"] = {"leaf": random_schema(rng, depth=3)}
    return schema


def test_200_random_schemas_hold(executor: TorchExecutor) -> None:
    """Sampled from a model that knows no JSON at temperature 1, sixteen at a time."""
    rng = random.Random(20)
    schemas = [whole_schema(rng) for _ in range(NUM_SCHEMAS)]
    params = [
        asked(json=schema if i % 2 else json.dumps(schema), disable_any_whitespace=True)
        for i, schema in enumerate(schemas)
    ]
    for one in params:
        check_constraint(one)
    texts = written(run(executor, requests_of(params, max_tokens=700)))
    for schema, text in zip(schemas, texts, strict=True):
        fastjsonschema.validate(schema, json.loads(text))
    assert len(set(texts)) > NUM_SCHEMAS // 2, "the schemas are too narrow to test anything"


KINDS: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
    ({"regex": r"(Mon|Tues)day, [0-9]{1,2}\."}, lambda text: bool(re.fullmatch(r"(Mon|Tues)day, [0-9]{1,2}\.", text))),
    ({"choice": ["yes", "no", 'may"be', "größer"]}, lambda text: text in {"yes", "no", 'may"be', "größer"}),
    ({"grammar": 'root ::= "a" digit digit?\ndigit ::= [0-9]'}, lambda text: bool(re.fullmatch("a[0-9]{1,2}", text))),
    ({"grammar": 'start: "b" /[x-z]{2}/'}, lambda text: bool(re.fullmatch("b[x-z]{2}", text))),
]  # fmt: skip


def test_every_kind_of_constraint_among_requests_without(executor: TorchExecutor) -> None:
    """Those without get what they get without the others."""
    free = requests_of([asked() for _ in range(2 * len(KINDS))], max_tokens=12)
    expected = run(executor, free)
    params = [asked(**KINDS[i // 2][0]) if i % 2 else asked() for i in range(2 * len(KINDS))]
    results = run(executor, requests_of(params, max_tokens=12))
    for i, result in enumerate(results):
        assert isinstance(result, Completion)
        if i % 2:
            assert KINDS[i // 2][1](result.text), result.text
            assert result.finish_reason == "stop"
        else:
            assert result == expected[i]


def test_choices_are_drawn_by_their_probability(executor: TorchExecutor) -> None:
    """Four letters of one token each: 400 draws are near the model's own odds, renormalised."""
    letters = ["a", "b", "c", "d"]
    tokenizer = executor._tokenizer
    assert tokenizer is not None
    ids = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in letters]
    count = 400
    params = [asked(choice=letters)] * count
    requests = requests_of(params)
    requests.tokens = PromptTokens.from_lists([[50, 60, 70]] * count)
    results = run(executor, requests)
    found = [written(results).count(letter) for letter in letters]
    told = SamplingParams(logprobs=0, logprob_token_ids=tuple(ids))
    one = requests_of([told], max_tokens=1)
    one.tokens = PromptTokens.from_lists([[50, 60, 70]])
    [result] = run(executor, one)
    assert isinstance(result, Completion)
    assert result.logprobs is not None
    weights = np.exp([value for _, value in result.logprobs[0].top])
    expected = count * weights / weights.sum()
    # Each count is binomial: 4.5 standard deviations, odds of 1 in 30,000 against for four of them.
    deviations = np.abs(found - expected) / np.sqrt(expected * (1 - expected / count))
    assert (deviations < 4.5).all(), (found, expected)


def test_a_schema_decides_at_once_and_goes_before_min_tokens(executor: TorchExecutor) -> None:
    [result] = run(executor, requests_of([asked(min_tokens=50, choice=["yes"])]))
    assert isinstance(result, Completion)
    assert (result.text, result.finish_reason) == ("yes", "stop")
    assert len(result.token_ids) < 10


def test_the_end_of_sequence_is_ignored_where_asked(executor: TorchExecutor) -> None:
    params = SamplingParams(
        temperature=1.0, ignore_eos=True, extra=b'{"structured_outputs": {"choice": ["yes"]}}'
    )
    [result] = run(executor, requests_of([params], max_tokens=20))
    assert isinstance(result, Completion)
    assert len(result.token_ids) == 20
    assert result.text.startswith("yes")


def test_options_of_json(executor: TorchExecutor) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    closed = asked(json=schema, disable_additional_properties=True, disable_any_whitespace=True)
    texts = written(run(executor, requests_of([closed] * 8)))
    assert set(texts) == {'{"a":true}', '{"a":false}'}


def test_what_cannot_be_followed_fails_alone(executor: TorchExecutor) -> None:
    """As a schema can only be refused when it is compiled where nobody checked it before."""
    params = [asked(choice=["yes"]), asked(json={"type": "nothing"}), asked(choice=["no"])]
    results = run(executor, requests_of(params))
    assert isinstance(results[1], Failure)
    assert (results[1].code, results[1].param) == ("invalid_request", "structured_outputs")
    assert written([results[0], results[2]]) == ["yes", "no"]


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        ({"json": {"type": "nothing"}}, "JSON schema"),
        ({"json": "{not json"}, "JSON schema"),
        ({"json": {"$ref": "#/$defs/missing"}}, "JSON schema"),
        ({"regex": "(a"}, "regular expression"),
        ({"grammar": "root ::= ("}, "grammar"),
    ],
)
def test_bad_constraints_are_refused_when_read(constraint: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=rf"{words}: .*Correct the {words}") as caught:
        check_constraint(asked(**constraint))
    assert (caught.value.code, caught.value.param) == ("invalid_request", "structured_outputs")


def test_without_llguidance_a_constraint_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"blendserve\[guided\]"):
        check_constraint(asked(choice=["only here"]))
