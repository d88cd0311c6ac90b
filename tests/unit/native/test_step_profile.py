"""Steps as they are measured: what is in them, and that they fit."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.engines.native.executor import TorchExecutor
from blendserve.engines.native.step_profile import ROOM, StepPoint, StepTimer, make_batch, step_points
from tests.workload import COST_MODEL


@pytest.fixture(scope="module")
def executor(
    make_tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TorchExecutor]:
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("steps") / "model")
    executor = TorchExecutor(folder, None, cost_model=COST_MODEL, num_blocks=64, block_size=4)
    yield executor
    executor.close()


def test_a_step_is_what_was_asked_for(executor: TorchExecutor) -> None:
    timer = StepTimer(executor, num_steps=2)
    sample = timer(StepPoint((20, 7), 5, 8))
    assert (sample.num_prefill_tokens, sample.num_decode_rows) == (27, 5)
    assert 5 * 6 <= sample.kv_tokens_read <= 5 * 10
    assert sample.query_key_pairs == 20 * 21 / 2 + 7 * 8 / 2
    assert sample.duration_s > 0
    assert all(cache.any() for cache in executor.attention.cache_tensors()), (
        "an empty cache costs nothing to read"
    )
    assert timer(StepPoint((), 3, 8)).num_prefill_tokens == 0
    assert timer(StepPoint((9,))).kv_tokens_read == 0


def test_sequences_of_a_batch_share_no_block(executor: TorchExecutor) -> None:
    computed, tokens = np.array([9, 0, 7]), np.array([1, 13, 1])
    batch = make_batch(computed, tokens, executor, np.random.default_rng(0))
    used = [batch.block_tables[row, : -(-length // 4)].tolist() for row, length in enumerate((10, 13, 8))]
    blocks = [block for row in used for block in row]
    assert sorted(blocks) == list(range(3 + 4 + 2))
    assert (batch.num_prefill_tokens, batch.num_decode_tokens, batch.kv_tokens_read) == (13, 2, 18)


@given(
    max_num_batched_tokens=st.integers(16, 4096),
    max_num_seqs=st.integers(1, 1024),
    max_model_len=st.integers(ROOM + 1, 131_072),
    kv_capacity_tokens=st.integers(2048, 1_000_000),
)
def test_points_stay_within_the_limits(
    max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int, kv_capacity_tokens: int
) -> None:
    points = step_points(
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        kv_capacity_tokens=kv_capacity_tokens,
    )
    assert any(point.prompts and not point.num_decode_rows for point in points)
    assert any(point.num_decode_rows and not point.prompts for point in points)
    for point in points:
        assert 1 <= point.num_tokens <= max_num_batched_tokens
        assert point.num_decode_rows <= max_num_seqs
        assert point.num_kv_tokens <= kv_capacity_tokens
        longest = max(*point.prompts, point.context * 5 // 4, 0) if point.prompts else point.context * 5 // 4
        assert longest <= max_model_len - ROOM
