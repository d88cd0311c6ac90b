"""Sampling against exact filtered probabilities, and its independence of the batch."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from blendserve.engines.native import kernels, sampler
from blendserve.engines.native.sampler import (
    TORCH_TOKEN_OPS,
    Draws,
    LogitEdits,
    SamplingRow,
    Seen,
    TokenOps,
    choose,
    sample,
    uniforms,
)
from blendserve.request import SamplingParams
from tests.drawn import check_drawn_from

VOCAB = 1000


@pytest.fixture(params=["torch", *kernels.variants_of_this_cpu()])
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TokenOps:
    """Torch, and the C kernels in every variant that this CPU can run."""
    return token_ops(request.param, torch.float32, monkeypatch)


def token_ops(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> TokenOps:
    if name == "torch":
        return TORCH_TOKEN_OPS
    monkeypatch.setenv(kernels.CHOICE_VARIABLE, name)
    loaded = kernels.load_kernels(dtype)
    assert loaded is not None
    return loaded


def some_logits(num_rows: int = 1, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def exact_probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """[vocab] fp64: temperature, min_p, top_k, top_p in vLLM's order, each on the distribution the last one left."""
    probabilities = (logits.double() / params.temperature).softmax(-1)
    probabilities = probabilities.where(probabilities >= params.min_p * probabilities.max(), 0)
    if params.top_k:
        kth = probabilities.topk(params.top_k).values[-1]
        probabilities = probabilities.where(probabilities >= kth, 0)
    probabilities /= probabilities.sum()
    ordered, ids = probabilities.sort(descending=True, stable=True)
    probabilities[ids[ordered.cumsum(0) - ordered >= params.top_p]] = 0
    return probabilities / probabilities.sum()


def draw(
    logits: Tensor,
    params: SamplingParams,
    seed: int,
    count: int,
    chunk: int = 2000,
    ops: TokenOps = TORCH_TOKEN_OPS,
) -> np.ndarray:
    tokens: list[int] = []
    for start in range(0, count, chunk):
        rows = [SamplingRow(params, seed, start + i) for i in range(chunk)]
        tokens += sample(logits.expand(chunk, -1).clone(), rows, ops).token_ids
    return np.array(tokens)


FILTERS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=1.7, top_k=20),
    SamplingParams(top_p=0.8),
    SamplingParams(temperature=3.0, top_p=0.95),  # keeps more tokens than are looked at first
    SamplingParams(min_p=0.05),
    SamplingParams(temperature=5.0, min_p=0.01),
    SamplingParams(temperature=1.3, top_k=50, top_p=0.7, min_p=0.02),
    SamplingParams(top_k=400, top_p=0.99),
    SamplingParams(top_k=1),
]


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_tokens_follow_the_filtered_distribution(params: SamplingParams, ops: TokenOps) -> None:
    logits = some_logits()
    probabilities = exact_probabilities(logits[0], params).numpy()
    tokens = draw(logits, params, seed=7, count=20_000, ops=ops)
    check_drawn_from(probabilities, tokens)


def test_uniform_numbers_are_uniform_and_independent() -> None:
    seeds, positions = np.divmod(np.arange(100_000), 100)
    numbers = uniforms(seeds.tolist(), positions.tolist())
    assert (numbers >= 0).all()
    assert (numbers < 1).all()
    assert len(np.unique(numbers)) == len(numbers)
    histogram = np.histogram(numbers, bins=50, range=(0, 1))[0]
    assert np.abs(histogram - 2000).max() < 5 * 2000**0.5
    table = numbers.reshape(1000, 100)
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.02


def test_seeds_of_64_bits() -> None:
    numbers = uniforms([0, 1, 2**63, 2**64 - 1], [0, 0, 0, 2**20])
    assert len(set(numbers.tolist())) == 4
    assert ((numbers >= 0) & (numbers < 1)).all()


def test_tokens_do_not_depend_on_the_batch(ops: TokenOps) -> None:
    """Alone, among rows with other filters, in any order: the same token."""
    num_rows = 60
    logits = some_logits(num_rows)
    logits = (logits * 4).round() / 4  # ties, as bf16 logits have them
    rows = [
        SamplingRow([*FILTERS, SamplingParams(temperature=0.0)][i % 11], seed=i // 3, position=i % 5)
        for i in range(num_rows)
    ]
    together = sample(logits.clone(), rows, ops).token_ids
    alone = [sample(logits[i : i + 1].clone(), [rows[i]], ops).token_ids[0] for i in range(num_rows)]
    assert together == alone
    order = np.random.default_rng(0).permutation(num_rows).tolist()
    shuffled = sample(logits[order], [rows[i] for i in order], ops).token_ids
    assert shuffled == [together[i] for i in order]


def test_a_position_changes_the_token_and_a_seed_repeats_it() -> None:
    logits = some_logits()
    first = draw(logits, SamplingParams(), seed=1, count=2000)
    assert (first == draw(logits, SamplingParams(), seed=1, count=2000)).all()
    assert (first != draw(logits, SamplingParams(), seed=2, count=2000)).mean() > 0.5
    assert len(set(first.tolist())) > 50


def test_greedy_takes_the_maximum() -> None:
    logits = some_logits(5)
    rows = [SamplingRow(SamplingParams(temperature=t), 0, 0) for t in (0.0, 1e-6, 0.0, 0.0, 0.0)]
    assert sample(logits.clone(), rows).token_ids == logits.argmax(-1).tolist()


def test_top_k_keeps_ties_like_vllm() -> None:
    logits = torch.full((1, VOCAB), -5.0)
    logits[0, [3, 500, 900]] = 2.0
    assert set(draw(logits, SamplingParams(top_k=1), seed=0, count=200, chunk=200).tolist()) == {3, 500, 900}


def test_the_bounded_search_falls_back_to_the_whole_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = some_logits(20)
    params = [SamplingParams(top_p=0.9), SamplingParams(min_p=0.001), SamplingParams(top_p=0.3)]
    rows = [SamplingRow(params[i % 3], 5, i) for i in range(20)]
    wide = sample(logits.clone(), rows).token_ids
    monkeypatch.setattr(sampler, "NUM_CANDIDATES", 4)
    assert sample(logits.clone(), rows).token_ids == wide


def test_suppressed_tokens_are_never_chosen() -> None:
    logits = some_logits(2)
    best = logits.argmax(-1).tolist()
    rows = [
        SamplingRow(SamplingParams(temperature=0.0), 0, 0, suppressed=(best[0],)),
        SamplingRow(SamplingParams(top_k=1), 0, 0, suppressed=(best[1],)),
    ]
    second = logits.topk(2).indices[:, 1].tolist()
    assert sample(logits.clone(), rows).token_ids == second


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    logits = some_logits(4)
    logprobs = logits.double().log_softmax(-1)
    banned = int(logits[1].argmax())
    rows = [
        SamplingRow(SamplingParams(temperature=0.7, top_k=3, logprobs=0), 0, 0),
        SamplingRow(SamplingParams(temperature=0.0, logprobs=2), 0, 0, suppressed=(banned,)),
        SamplingRow(SamplingParams(), 0, 0),
        SamplingRow(SamplingParams(temperature=2.0, logprobs=5), 0, 0),
    ]
    token_ids, found, _ = sample(logits.clone(), rows)
    assert found[2] is None
    for i, num_top in ((0, 0), (1, 2), (3, 5)):
        entry = found[i]
        assert entry is not None
        assert entry.token_id == token_ids[i]
        assert entry.logprob == pytest.approx(logprobs[i, token_ids[i]].item(), abs=1e-5)
        assert [token_id for token_id, _ in entry.top] == logits[i].topk(num_top).indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(
            logprobs[i].topk(num_top).values.tolist(), abs=1e-5
        )
    assert found[1] is not None
    assert found[1].top[0][0] == banned, "what is suppressed still has its raw probability"


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0.0), SamplingParams(logprobs=3), SamplingParams(top_p=0.5)]
)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_broken_logits_are_reported_and_harm_no_other_row(
    params: SamplingParams, poison: float, ops: TokenOps
) -> None:
    logits = some_logits(3)
    rows = [SamplingRow(params, 0, i) for i in range(3)]
    healthy = sample(logits.clone(), rows, ops)
    logits[1, 17] = poison
    token_ids, _, is_valid = sample(logits, rows, ops)
    assert is_valid == [True, False, True]
    assert (token_ids[0], token_ids[2]) == (healthy.token_ids[0], healthy.token_ids[2])


def test_a_row_without_any_finite_logit_is_broken(ops: TokenOps) -> None:
    logits = torch.full((1, VOCAB), -torch.inf)
    assert sample(logits, [SamplingRow(SamplingParams(), 0, 0)], ops).is_valid == [False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", kernels.variants_of_this_cpu())
@pytest.mark.parametrize("vocab", [3, 512, 1025, 49152])
def test_the_kernels_choose_as_torch_does(
    vocab: int, variant: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = token_ops(variant, dtype, monkeypatch)
    logits = some_logits(9, vocab=vocab).to(dtype)
    logits[1] = logits[1].round()  # ties
    logits[2, vocab // 2] = torch.nan
    logits[3, vocab - 1] = torch.inf
    logits[4] = -torch.inf
    logits[5, : vocab - 1] = -torch.inf
    token_ids, is_valid, maxima = ops.highest(logits)
    expected_ids, expected_valid, expected_maxima = TORCH_TOKEN_OPS.highest(logits)
    assert is_valid.tolist() == expected_valid.tolist()
    assert torch.equal(maxima[is_valid], expected_maxima[is_valid])
    first = [int((row == row.max()).nonzero()[0]) for row in logits[is_valid]]
    assert token_ids[is_valid].tolist() == first
    if dtype == torch.float32:
        assert first == expected_ids[is_valid].tolist()

    rows = [SamplingRow(SamplingParams(temperature=temperature), 0, 0) for temperature in (0.1, 1.0, 10.0)]
    draws = Draws.of([*rows, *rows, *rows], vocab)
    assert draws is not None
    sound = np.array([0, 1, 5, 6, 7, 8, 8, 0, 5])
    uniform = np.array([0.5, 0.25, 0.9, 0.999999, 0.3, 0.0, 0.77, 1 - 2.0**-53, 0.0])
    draws = replace(draws, places=sound, uniform=uniform)
    for place, token_id, temperature, number in zip(
        sound.tolist(), ops.draw(logits, maxima, draws).tolist(), draws.temperature, uniform, strict=True
    ):
        weights = ((logits[place].double() - maxima[place].double()) / temperature).exp()
        assert weights[token_id] > 0
        cumulative = (weights / weights.sum()).cumsum(0)
        before = cumulative[token_id] - weights[token_id] / weights.sum()
        assert before - 1e-6 <= number <= cumulative[token_id] + 1e-6


@pytest.mark.parametrize("variant", kernels.variants_of_this_cpu())
@pytest.mark.parametrize(
    ("sharpness", "dtype"),
    [(0.3, torch.float32), (3.0, torch.float32), (20.0, torch.float32), (3.0, torch.bfloat16)],
)
def test_the_kernels_filter_as_torch_does(
    sharpness: float, dtype: torch.dtype, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flat and peaked distributions, and ties in bf16, under all filters."""
    ops = token_ops(variant, dtype, monkeypatch)
    logits = (some_logits(300, vocab=3001) / 3 * sharpness).to(dtype)
    logits[:, 7] = -torch.inf
    rows = [SamplingRow(FILTERS[i % len(FILTERS)], seed=i, position=i % 3) for i in range(len(logits))]
    draws = Draws.of(rows, logits.shape[1])
    assert draws is not None
    maxima = logits.float().amax(-1)
    found, expected = (some.draw(logits.clone(), maxima, draws) for some in (ops, TORCH_TOKEN_OPS))
    # Where the numbers fall on the border of two tokens, rounding decides; and which of equally likely tokens are the
    # last of `top_k` is not torch's to say.
    assert (found == expected).float().mean() > 0.98


@pytest.mark.parametrize(
    "params",
    [
        [SamplingParams(temperature=0.0)],
        [SamplingParams()],
        [SamplingParams(top_k=300, top_p=0.9, min_p=0.01)],
        [SamplingParams(temperature=0.0, logprobs=3), SamplingParams(), SamplingParams(top_k=5, logprobs=0)],
    ],
    ids=["greedy", "plain", "filtered", "mixed"],
)
@pytest.mark.parametrize("is_edited", [False, True])
def test_choosing_does_not_wait_for_the_device(params: list[SamplingParams], is_edited: bool) -> None:
    """A meta tensor has no values: whatever needs one on the host fails."""
    logits = torch.empty(6, VOCAB, device="meta")
    mask = np.full(-(-VOCAB // 32), -1, np.int32)
    ids, values = np.array([3, 4]), np.ones(2, np.float32)
    edits = [
        None,
        LogitEdits(mask, mask),
        LogitEdits(bias=(ids, values), seen=Seen(ids, values, 1.1, 0.2, 0.3)),
    ]
    rows = [
        SamplingRow(params[i % len(params)], i, 0, (3,) if i % 2 else (), edits[i % 3 if is_edited else 0])
        for i in range(6)
    ]
    chosen = choose(logits, rows)
    assert (chosen.token_ids.device.type, chosen.token_ids.shape) == ("meta", (6,))
