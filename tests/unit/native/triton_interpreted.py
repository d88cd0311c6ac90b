"""The Triton kernels on CPU tensors, against float64 and against the CPU backends.

Run by `test_triton.py` in a process of its own: Triton reads TRITON_INTERPRET when it is imported. In float32 and
float16 only, because the interpreter truncates to bfloat16 and multiplies its matrices wrongly.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from blendserve.engines.native import triton_backend, triton_kernels
from blendserve.engines.native.attention import (
    LLAMA_RULES,
    AttentionRules,
    KVShape,
    StepLayout,
    make_attention,
)
from blendserve.engines.native.executor import TorchExecutor
from blendserve.engines.native.model import RMSNorm, TorchOps
from blendserve.engines.native.triton_backend import TritonAttention, TritonOps, decode_work, prefill_work
from blendserve.request import SamplingParams
from tests.recording_lanes import RecordingLanes
from tests.unit.native import test_attention as attention_tests
from tests.unit.native import test_executor as executor_tests
from tests.unit.native import test_overlap as overlap_tests

TOLERANCE = {torch.float32: 2e-6, torch.float16: 3e-3}
CONTEXTS = ([1, 30, 63, 64, 130, 100, 7, 0], [40, 1, 1, 1, 1, 30, 3, 1])
"""tokens computed before and now: decodes that end inside, before and behind a block, and chunks likewise"""


def attend(
    shape: KVShape,
    rows: tuple[list[int], list[int]],
    *,
    tma: bool = False,
    programs: int = 3,
    rules: AttentionRules = LLAMA_RULES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a batch over a cache that holds NaN where nobody wrote, and what it should be."""
    batch = attention_tests.make_batch(*rows, shape.block_size)
    torch.manual_seed(0)
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    qkv_of_rows = [
        torch.randn(int(total), width).to(shape.dtype) for total in batch.num_computed + batch.num_tokens
    ]
    rope = attention_tests.rope_table(shape.head_dim)
    attention, reference = TritonAttention(shape, rope, rules), make_attention(shape, rope, "torch")
    attention.tma, attention.num_programs = tma, programs
    # The interpreter takes milliseconds per token, so the context is written by torch.
    before = replace(batch, num_computed=np.zeros_like(batch.num_computed), num_tokens=batch.num_computed)
    written = StepLayout.from_batch(before, shape.block_size)
    reference.begin(written)
    reference.store(0, torch.cat([row[:n] for row, n in zip(qkv_of_rows, batch.num_computed, strict=True)]))
    attention.pages[0].fill_(torch.nan)
    slots = torch.from_numpy(written.kv_slots)
    blocks, places = slots // shape.block_size, slots % shape.block_size
    for part, pages in enumerate((reference.keys[0], reference.values[0])):
        attention.pages[0][blocks, part, :, places] = pages[blocks, places]

    layout = StepLayout.from_batch(batch, shape.block_size)
    qkv = torch.cat([row[n:] for row, n in zip(qkv_of_rows, batch.num_computed, strict=True)])
    attention.begin(layout)
    attention.store(0, qkv)
    return attention.attend(0, qkv), attention_tests.expected(shape, batch, qkv_of_rows, rules)


def shape_of(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    block_size: int = 64,
    num_blocks: int = 24,
) -> KVShape:
    return KVShape(1, num_heads, num_kv_heads, head_dim, num_blocks, block_size, dtype)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "dtype"),
    [
        (8, 2, 128, torch.float32),
        (9, 3, 64, torch.float16),
        (7, 1, 16, torch.float32),
        (20, 1, 32, torch.float32),
    ],
)
def test_attention(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    output, expected = attend(shape_of(num_heads, num_kv_heads, head_dim, dtype), CONTEXTS)
    assert (output - expected).abs().max() <= TOLERANCE[dtype]


@pytest.mark.parametrize(("block_size", "num_blocks"), [(16, 48), (128, 12)])
def test_attention_of_other_blocks(block_size: int, num_blocks: int) -> None:
    shape = shape_of(4, 2, 16, block_size=block_size, num_blocks=num_blocks)
    output, expected = attend(shape, CONTEXTS)
    assert (output - expected).abs().max() <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("rules", attention_tests.RULES, ids=str)
def test_rules_of_other_models(rules: AttentionRules, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that begin inside, before and behind parts of contexts, and capped scores."""
    monkeypatch.setattr(triton_backend, "MIN_PART_TOKENS", 64)
    monkeypatch.setattr(triton_backend, "MAX_PART_TOKENS", 64)
    shape = shape_of(4, 2, 16, block_size=16, num_blocks=48)
    output, expected = attend(shape, CONTEXTS, rules=rules)
    assert (output - expected).abs().max() <= 1e-5


def test_tiles_through_descriptors() -> None:
    shape, rows = shape_of(4, 2, 64), ([130, 63], [1, 1])
    plain, expected = attend(shape, rows)
    output, _ = attend(shape, rows, tma=True)
    assert (output - expected).abs().max() <= TOLERANCE[torch.float32]
    torch.testing.assert_close(output, plain, atol=0, rtol=0)


@pytest.mark.parametrize("programs", [1, 7, 200])
def test_a_context_in_parts(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long contexts are split, whatever the number of programs that share the parts."""
    monkeypatch.setattr(triton_backend, "MIN_PART_TOKENS", 64)
    monkeypatch.setattr(triton_backend, "MAX_PART_TOKENS", 64)
    rows = ([520, 64, 0, 127], [1, 1, 1, 1])
    output, expected = attend(shape_of(4, 2, 16), rows, programs=programs)
    assert (output - expected).abs().max() <= TOLERANCE[torch.float32]


def test_huge_scores_stay_finite() -> None:
    shape = shape_of(4, 2, 16)
    batch = attention_tests.make_batch([20], [3], 64)
    qkv = torch.randn(23, 8 * 16) * 100
    attention = TritonAttention(shape, attention_tests.rope_table(16))
    output = attention_tests.run(attention, batch, [qkv.clone()])
    torch.testing.assert_close(
        output.double(), attention_tests.expected(shape, batch, [qkv]), atol=1e-2, rtol=1e-3
    )


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (9, 3)])
def test_the_cache_holds_rotated_keys_and_values(num_heads: int, num_kv_heads: int) -> None:
    shape = shape_of(num_heads, num_kv_heads, 32)
    batch = attention_tests.make_batch([60, 0], [8, 3], 64)
    layout = StepLayout.from_batch(batch, 64)
    qkv = torch.randn(11, (num_heads + 2 * num_kv_heads) * 32)
    rope = attention_tests.rope_table(32)
    ours, reference = TritonAttention(shape, rope), make_attention(shape, rope, "torch")
    rotated = [qkv.clone(), qkv.clone()]
    for attention, given in zip((ours, reference), rotated, strict=True):
        attention.begin(layout)
        attention.store(0, given)
    queries = slice(0, num_heads * 32)
    torch.testing.assert_close(rotated[0][:, queries], rotated[1][:, queries], atol=1e-6, rtol=0)
    for place, pages in enumerate((reference.keys[0], reference.values[0])):
        torch.testing.assert_close(ours.pages[0][:, place], pages.transpose(1, 2), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [64, 576, 4096])
@pytest.mark.parametrize("unit_offset", [False, True])
def test_layer_operations(unit_offset: bool, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    residual, delta, gate_up = (torch.randn(5, width).to(dtype) * 3 for width in (size, size, 2 * size))
    norm = RMSNorm(torch.rand(size).to(dtype), 1e-5, unit_offset)
    ours, reference = TritonOps(), TorchOps()
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-3, "rtol": 2e-3}
    for added in (None, delta):
        mine, theirs = residual.clone(), residual.clone()
        torch.testing.assert_close(
            ours.add_rms_norm(mine, added, norm), reference.add_rms_norm(theirs, added, norm), **tolerance
        )
        assert torch.equal(mine, theirs), "the residual is the sum, as torch rounds it"
    torch.testing.assert_close(ours.silu_mul(gate_up), reference.silu_mul(gate_up), **tolerance)
    torch.testing.assert_close(ours.gelu_mul(gate_up), reference.gelu_mul(gate_up), **tolerance)


def test_work_lists_cover_every_key_once() -> None:
    layout = StepLayout.from_batch(attention_tests.make_batch(*CONTEXTS, 64), 64)
    work, parts, tokens = decode_work(layout, 64)
    decodes = [(row, row_tokens) for row, row_tokens in enumerate(CONTEXTS[1]) if row_tokens == 1]
    assert tokens.tolist() == [layout.query_starts[row] for row, _ in decodes]
    by_part = work[np.argsort(work[:, 4])]
    assert by_part[:, 4].tolist() == list(range(parts[-1]))
    for i, (row, _) in enumerate(decodes):
        spans = by_part[parts[i] : parts[i + 1]]
        assert (spans[:, 0] == row).all()
        assert spans[0, 2] == 0
        assert (spans[1:, 2] == spans[:-1, 3]).all()
        assert spans[-1, 3] == layout.context_lens[row]
    lengths = work[:, 3] - work[:, 2]
    assert (lengths[:-1] >= lengths[1:]).all(), "the longest first"
    items = prefill_work(layout, 16)
    covered = [token for _, first, count, _ in items.tolist() for token in range(first, first + count)]
    chunks = [row for row, row_tokens in enumerate(CONTEXTS[1]) if row_tokens > 1]
    wanted = [t for row in chunks for t in range(*layout.query_starts[row : row + 2].tolist())]
    assert sorted(covered) == wanted
    assert (items[:, 3] == layout.positions[items[:, 1]]).all()


@pytest.mark.parametrize(
    ("kind", "params", "overlap"),
    [
        ("llama3", executor_tests.GREEDY, "auto"),
        ("qwen2", SamplingParams(temperature=1.5, top_k=20), "auto"),
        ("qwen3", executor_tests.GREEDY, "off"),
        ("gemma2", executor_tests.GREEDY, "auto"),
    ],
)
def test_the_executor_generates_what_it_does_on_the_cpu(
    make_tiny_model: Callable[..., Path],
    tmp_path: Path,
    kind: str,
    params: SamplingParams,
    overlap: Literal["auto", "off"],
) -> None:
    """In whole steps, and in halves."""
    folder = make_tiny_model(kind, tmp_path / "model", head_dim=16)
    requests = executor_tests.table([params], max_tokens=4)
    tokens = []
    lanes = RecordingLanes("attention")
    lanes.num_attention_sms = 2
    for backend, is_triton in (("torch", False), ("triton", True)):
        executor = TorchExecutor(
            folder,
            None,
            cost_model=overlap_tests.OVERLAPPING,
            num_blocks=64,
            block_size=64,
            attention_backend=backend,
            late_results=is_triton,
            overlap=overlap,
            lanes={overlap_tests.PARTITION: lanes} if is_triton else None,
        )
        tokens.append(executor_tests.token_ids(executor_tests.run_all(executor, requests, chunk=4)))
    assert tokens[0] == tokens[1]
    assert (lanes.num_operations["attention"] > 0) == (overlap == "auto")


def test_kernels_run_here() -> None:
    """Else everything above was compared with itself."""
    assert triton_backend.is_interpreted()
    assert type(triton_kernels.paged_decode).__name__ == "InterpretedFunction"
