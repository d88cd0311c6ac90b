"""What parameters do to logits: by vLLM's formulas, whatever the batch, step after step on a model."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, RepetitionPenaltyLogitsProcessor

from blendserve.engines.native import kernels
from blendserve.engines.native.executor import TorchExecutor
from blendserve.engines.native.grammar import packed
from blendserve.engines.native.logit_rules import LogitRules, LogitState
from blendserve.engines.native.sampler import TORCH_TOKEN_OPS, LogitEdits, SamplingRow, TokenOps, sample
from blendserve.errors import RequestError
from blendserve.request import Completion, Failure, SamplingParams
from tests.drawn import check_drawn_from
from tests.unit.native.test_executor import BLOCK_SIZE, PROMPTS, Driver, run_all, table, token_ids
from tests.unit.native.test_sampler import VOCAB, some_logits, token_ops
from tests.workload import COST_MODEL

MODEL_VOCAB = 512


class Letters:
    """A tokenizer of single letters; a space and a letter are one token, too."""

    eos_token_ids: frozenset[int] = frozenset()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = []
        while text:
            length = 2 if text[0] == " " and len(text) > 1 else 1
            letter, text = text[:length], text[length:]
            ids.append(ord(letter[-1]) - 97 + (100 if length == 2 else 0))
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return ""


def params(temperature: float = 0.0, **extra: Any) -> SamplingParams:
    return SamplingParams(temperature=temperature, extra=json.dumps(extra).encode())


def state_of(prompt: Sequence[int], output: Sequence[int], **extra: Any) -> LogitState:
    rules = LogitRules.of(json.dumps(extra).encode(), Letters(), MODEL_VOCAB)
    state = LogitState(rules, np.array(prompt, np.uint32), None)
    for token_id in output:
        state.append(token_id)
    return state


def expected_logits(
    logits: Tensor, prompt: Sequence[int], output: Sequence[int], extra: dict[str, Any]
) -> Tensor:
    """[vocab] of one request, token by token, by the words of vLLM's documentation."""
    logits = logits.double().clone()
    if (allowed := extra.get("allowed_token_ids")) is not None:
        keep = set(allowed)
        for token_id in range(len(logits)):
            if token_id not in keep:
                logits[token_id] = -torch.inf
    for word in extra.get("bad_words", ()):
        for ids in (Letters().encode(word), Letters().encode(f" {word}")):
            if list(output)[len(output) - len(ids) + 1 :] == ids[:-1] and len(output) >= len(ids) - 1:
                logits[ids[-1]] = -torch.inf
    for token_id, bias in extra.get("logit_bias", {}).items():
        logits[int(token_id)] += bias
    repetition = extra.get("repetition_penalty", 1.0)
    for token_id in {*prompt, *output}:
        logits[token_id] = logits[token_id] * (1 / repetition if logits[token_id] > 0 else repetition)
    for token_id, count in Counter(output).items():
        logits[token_id] -= extra.get("frequency_penalty", 0.0) * count
        logits[token_id] -= extra.get("presence_penalty", 0.0)
    return logits


RULES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"frequency_penalty": 1.1},
    {"frequency_penalty": -0.7},
    {"presence_penalty": 1.9},
    {"presence_penalty": -1.3},
    {"logit_bias": {"3": 5.5, "17": -100.0, "400": 0.37}},
    {"allowed_token_ids": [*range(5, 90, 3)]},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2, "logit_bias": {"7": 2.0}},
    {"repetition_penalty": 1.2, "allowed_token_ids": [*range(60)], "bad_words": ["a", "bc"]},
]


@pytest.mark.parametrize("extra", RULES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_changed_by_vllms_formulas(extra: dict[str, Any], dtype: torch.dtype) -> None:
    """Greedy tokens of many rows are those of the formulas; in bf16 a bias below its resolution counts, too."""
    rng = np.random.default_rng(0)
    num_rows = 200
    logits = some_logits(num_rows, vocab=MODEL_VOCAB).to(dtype)
    rows, expected = [], []
    for row in range(num_rows):
        prompt = rng.integers(0, MODEL_VOCAB, rng.integers(1, 30)).tolist()
        # Likely tokens, so that the penalties decide.
        likely = logits[row].topk(20).indices.tolist()
        output = rng.choice(likely, rng.integers(0, 40)).tolist()
        state = state_of(prompt, output, **extra)
        rows.append(SamplingRow(params(), 0, 0, state.suppressed(output), state.edits(None)))
        expected.append(int(expected_logits(logits[row], prompt, output, extra).argmax()))
    plain = logits.argmax(-1).tolist()
    assert sum(a != b for a, b in zip(plain, expected, strict=True)) > num_rows // 20, (
        "the test tests nothing"
    )
    found = sample(logits.clone(), rows).token_ids
    assert found == expected


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    logits = some_logits(50, vocab=MODEL_VOCAB)
    seen = torch.randint(0, MODEL_VOCAB, (50, 60), generator=torch.Generator().manual_seed(1))
    expected = RepetitionPenaltyLogitsProcessor(1.4)(seen, logits.clone()).argmax(-1).tolist()
    rows = [
        SamplingRow(params(), 0, 0, (), state_of(ids[:40], ids[40:], repetition_penalty=1.4).edits(None))
        for ids in seen.tolist()
    ]
    assert sample(logits.clone(), rows).token_ids == expected


@pytest.fixture(params=["torch", *kernels.variants_of_this_cpu()[:1]])
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TokenOps:
    return token_ops(request.param, torch.float32, monkeypatch)


@pytest.mark.parametrize("extra", RULES, ids=str)
def test_drawn_tokens_follow_the_changed_distribution(extra: dict[str, Any], ops: TokenOps) -> None:
    """20,000 draws against the formulas."""
    logits = some_logits(1, seed=5, vocab=MODEL_VOCAB)
    prompt, output = [*range(40)], logits[0].topk(30).indices.tolist() * 2 + [1]
    state = state_of(prompt, output, **extra)
    temperature = 1.3
    target = (expected_logits(logits[0], prompt, output, extra) / temperature).softmax(-1).numpy()
    count, chunk = 20_000, 2000
    tokens: list[int] = []
    for start in range(0, count, chunk):
        rows = [
            SamplingRow(params(temperature), 9, start + i, state.suppressed(output), state.edits(None))
            for i in range(chunk)
        ]
        tokens += sample(logits.expand(chunk, -1).clone(), rows, ops).token_ids
    check_drawn_from(target, tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_with_rules_and_rows_without_do_not_meet(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, or among rows with other rules and none: the same token, to the last bit of the logits."""
    loaded = kernels.load_kernels(dtype)
    ops: TokenOps = TORCH_TOKEN_OPS if loaded is None else loaded
    logits = some_logits(60, vocab=MODEL_VOCAB).to(dtype)
    rows = []
    for i in range(60):
        extra = [*RULES, {}][i % 11]
        state = state_of([i, i + 1], [5, 5, 9], **extra)
        sampled = SamplingParams(
            temperature=[0.0, 1.0][i % 2], top_k=[0, 30, 0][i % 3], logprobs=i % 4 or None
        )
        rows.append(SamplingRow(sampled, i, i % 5, state.suppressed([5, 5, 9]), state.edits(None)))
    together = sample(logits.clone(), rows, ops)
    for i, row in enumerate(rows):
        alone = sample(logits[i : i + 1].clone(), [row], ops)
        assert (alone.token_ids[0], alone.is_valid[0]) == (together.token_ids[i], together.is_valid[i])
    plain = [i for i, row in enumerate(rows) if row.edits is None]
    assert plain
    without = sample(logits[plain].clone(), [rows[i] for i in plain], ops)
    assert without.token_ids == [together.token_ids[i] for i in plain]


def test_log_probabilities_are_of_what_the_grammar_allows_and_of_nothing_else() -> None:
    """As in vLLM: a grammar comes before them, all else behind them."""
    logits = some_logits(2)
    best, second, third = logits[0].topk(3).indices.tolist()
    grammar = packed({*range(VOCAB)} - {best}, VOCAB)
    asked = SamplingParams(temperature=0.0, logprobs=1)
    rows = [
        SamplingRow(asked, 0, 0, (), LogitEdits(grammar=grammar)),
        SamplingRow(asked, 0, 0, (), LogitEdits(allowed=packed([third], VOCAB))),
    ]
    found = sample(logits[[0, 0]].clone(), rows)
    assert found.token_ids == [second, third]
    masked = logits[0].clone()
    masked[best] = -torch.inf
    [constrained, free] = found.logprobs
    assert constrained is not None
    assert free is not None
    assert constrained.logprob == pytest.approx(masked.log_softmax(-1)[second].item(), abs=1e-5)
    assert constrained.top[0][0] == second
    assert free.logprob == pytest.approx(logits[0].log_softmax(-1)[third].item(), abs=1e-5)
    assert free.top[0][0] == best


def test_named_tokens_are_told_in_place_of_the_likely_ones() -> None:
    logits = some_logits(3)
    expected = logits.log_softmax(-1)
    rows = [
        SamplingRow(SamplingParams(temperature=0.0, logprobs=0, logprob_token_ids=(7, 900, 3)), 0, 0),
        SamplingRow(SamplingParams(temperature=0.0, logprobs=2), 0, 0),
        SamplingRow(SamplingParams(temperature=0.0, logprobs=1, logprob_token_ids=(4,)), 0, 0),
    ]
    first, second, third = sample(logits.clone(), rows).logprobs
    assert first is not None
    assert second is not None
    assert third is not None
    assert [token_id for token_id, _ in first.top] == [7, 900, 3]
    assert [value for _, value in first.top] == pytest.approx(expected[0, [7, 900, 3]].tolist(), abs=1e-5)
    assert [token_id for token_id, _ in second.top] == logits[1].topk(2).indices.tolist()
    assert third.top == ((4, pytest.approx(expected[2, 4].item(), abs=1e-5)),)


@pytest.mark.parametrize(
    ("word", "output", "banned"),
    [
        ("b", [], [1, 101]),  # at the start of a text and in its midst
        ("b", [5, 9], [1, 101]),
        ("bcd", [], []),
        ("bcd", [1, 2], [3]),
        ("bcd", [101, 2], [3]),
        ("bcd", [1, 2, 2], []),
        ("bcd", [0, 1, 2], [3]),
        (" b", [], [1, 101]),  # spaces in front count for nothing
    ],
)
def test_bad_words_are_forbidden_by_their_last_token(word: str, output: list[int], banned: list[int]) -> None:
    assert state_of([], output, bad_words=[word]).suppressed(output) == banned


def test_a_bad_word_without_tokens_is_an_error() -> None:
    with pytest.raises(RequestError, match="no tokens"):
        state_of([], [], bad_words=[" "])


def test_counts_grow_past_any_size() -> None:
    rng = np.random.default_rng(2)
    prompt, output = rng.integers(0, 5000, 300).tolist(), rng.integers(0, 5000, 3000).tolist()
    edits = state_of(prompt, output, repetition_penalty=1.1).edits(None)
    assert edits is not None
    assert edits.seen is not None
    found = dict(zip(edits.seen.token_ids.tolist(), edits.seen.counts.tolist(), strict=True))
    counts = Counter(output)
    assert found == {token_id: counts[token_id] for token_id in {*prompt, *output}}


# -------- on a model --------


@pytest.fixture(scope="module")
def folder(make_tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("rules") / "model")


@pytest.fixture(params=[False, True], ids=["at-once", "late"])
def executor(folder: Path, request: pytest.FixtureRequest) -> Iterator[TorchExecutor]:
    executor = TorchExecutor(
        folder,
        Letters(),
        cost_model=COST_MODEL,
        num_blocks=64,
        block_size=BLOCK_SIZE,
        late_results=request.param,
    )
    yield executor
    executor.close()


MODEL_RULES = [
    *RULES,
    {"bad_words": ["e", "fg"], "frequency_penalty": 0.5},
    {},
]


def generated_alone(model: Any, prompt: list[int], extra: dict[str, Any], count: int) -> list[int]:
    output: list[int] = []
    for _ in range(count):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output])).logits[0, -1]
        output.append(int(expected_logits(logits, prompt, output, extra).argmax()))
    return output


def test_every_rule_on_a_model_step_after_step(executor: TorchExecutor, folder: Path) -> None:
    """With tokens taken at once, and with tokens that are still on their way when the next step is launched."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(MODEL_RULES))]
    requests = table([params(**extra) for extra in MODEL_RULES], prompts)
    found: list[list[int]] = []
    for first in range(0, len(prompts), 4):
        driver = Driver(executor, requests)
        chosen = [*range(first, min(first + 4, len(prompts)))]
        for slot, request in enumerate(chosen):
            driver.admit(request, slot)
        results = driver.finish()
        found += token_ids([results[request] for request in chosen])
    expected = [
        generated_alone(model, prompt, extra, 12) for prompt, extra in zip(prompts, MODEL_RULES, strict=True)
    ]
    assert found == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_retraction_changes_nothing(executor: TorchExecutor, temperature: float) -> None:
    extra = {"repetition_penalty": 1.3, "frequency_penalty": 0.6, "bad_words": ["e"]}
    requests = table([params(temperature, **extra), SamplingParams(temperature=temperature)])
    expected = token_ids(run_all(executor, requests))
    driver = Driver(executor, requests)
    for request in (0, 1, 2):
        driver.admit(request, request)
    for _ in range(5):
        driver.step({0: 100, 1: 100, 2: 100})
    del driver.slot_of[2]
    driver.admit(3, 2)
    driver.step({0: 1, 1: 1, 3: 100})
    driver.admit(2, 3)
    driver.step({0: 1, 1: 1, 2: 4, 3: 1})
    results = driver.finish()
    assert token_ids([results[request] for request in range(4)]) == expected


def test_rules_that_leave_nothing_fail_their_request_alone(executor: TorchExecutor) -> None:
    healthy = run_all(executor, table([params()]))
    broken = params(allowed_token_ids=[4], bad_words=["e"])
    results = run_all(executor, table([params(), broken, params(), params(bad_words=[" "])]))
    assert isinstance(results[1], Failure)
    assert (results[1].code, results[1].status_code) == ("no_token_left", 400)
    assert isinstance(results[3], Failure)
    assert (results[3].code, results[3].param) == ("invalid_request", "bad_words")
    for i in (0, 2):
        assert isinstance(results[i], Completion)
        assert results[i] == healthy[i]
