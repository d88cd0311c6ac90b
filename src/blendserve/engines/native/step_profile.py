"""What a step of the native engine takes: batches of given sizes, run by the executor as the scheduler would.

The KV cache holds noise instead of what the requests' tokens would have left there, which takes as long to read.
"""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from blendserve.engines import EngineConfig
from blendserve.engines.native import open_executor
from blendserve.engines.native.executor import TorchExecutor
from blendserve.engines.profile import Ceilings, Measured, StepSample
from blendserve.models import ModelFiles
from blendserve.request import RequestTable, SamplingParams
from blendserve.scheduling.batch import Batch
from blendserve.tokens import PromptTokens

ROOM = 64
"""tokens that a sequence must have left to generate, so that no step of a measurement ends it"""
WARM_UP_STEPS = 2
POINTS_IN_TIME = 16
"""that the time for a measurement is meant to do for, on a machine however slow"""
CPU_KV_BYTES = 1 << 30
"""of KV that a step on a CPU reads at most: far beyond its caches, and written to in seconds"""


class StepPoint(NamedTuple):
    """A step to be measured: whole prompts computed beside rows that decode."""

    prompts: tuple[int, ...] = ()
    """tokens of each prompt"""
    num_decode_rows: int = 0
    context: int = 0
    """tokens that a decoding row attends to on average; they differ by up to a quarter"""

    @property
    def num_tokens(self) -> int:
        """Tokens computed."""
        return sum(self.prompts) + self.num_decode_rows

    @property
    def num_kv_tokens(self) -> int:
        """KV tokens that its rows take, about."""
        return sum(self.prompts) + self.num_decode_rows * self.context * 5 // 4


def step_points(
    *, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int, kv_capacity_tokens: int
) -> list[StepPoint]:
    """Steps that tell the terms of a step's cost apart, the most telling first.

    Prompts alone, from a few tokens to a full step, as one prompt and as several, so that attention shows; decodes
    alone, few and many, over short and long contexts; and both together.
    """
    longest = max_model_len - ROOM
    full = min(max_num_batched_tokens, kv_capacity_tokens // 2)

    def prompts(num_tokens: int, size: int) -> StepPoint:
        size = max(1, min(size, longest, num_tokens))
        rest = num_tokens % size
        return StepPoint((size,) * (num_tokens // size) + ((rest,) if rest else ()))

    def decodes(share: int, context: int) -> StepPoint:
        rows = max(1, min(max_num_seqs, full) // share)
        context = min(context, longest * 4 // 5, kv_capacity_tokens * 3 // 4 // rows)
        return StepPoint((), rows, max(context, 1))

    def both(share: int, context: int) -> StepPoint:
        of_decodes = decodes(share, context)
        left = max(full - of_decodes.num_decode_rows, 1)
        left = min(left, kv_capacity_tokens - of_decodes.num_kv_tokens - ROOM)
        return of_decodes._replace(prompts=prompts(max(left, 1), 512).prompts)

    points = [
        prompts(full, longest),
        decodes(64, longest),
        prompts(full // 8, longest),
        decodes(64, longest // 16),
        decodes(8, longest),
        prompts(full, 64),
        decodes(1, longest),
        both(4, longest),
        prompts(full // 2, longest),
        prompts(16, longest),
        decodes(8, longest // 16),
        both(2, longest // 4),
        prompts(full // 4, longest),
        decodes(1, longest // 4),
        decodes(2, longest // 2),
    ]
    return list(dict.fromkeys(points))


def make_batch(
    num_computed: NDArray[np.integer],  # [num_rows]
    num_tokens: NDArray[np.integer],  # [num_rows]
    executor: TorchExecutor,
    rng: np.random.Generator,
) -> Batch:
    """A batch of sequences that share nothing, their blocks the first ones of the cache in random order.

    Rows of one token behind others decode; all rows sample.
    """
    lengths = num_computed + num_tokens
    num_blocks = -(-lengths // executor.block_size)
    total = int(num_blocks.sum())
    assert total <= executor.num_blocks, (
        f"{total} blocks do not fit the KV cache, which has {executor.num_blocks}"
    )
    tables = np.zeros((len(lengths), int(num_blocks.max())), np.int32)
    tables[np.arange(tables.shape[1])[None, :] < num_blocks[:, None]] = rng.permutation(total)
    decodes = (num_tokens == 1) & (num_computed > 0)
    new = num_tokens[~decodes].astype(np.float64)
    rows = np.arange(len(lengths), dtype=np.int32)
    return Batch(
        slots=rows,
        requests=rows,
        num_computed=num_computed.astype(np.int32),
        num_tokens=num_tokens.astype(np.int32),
        samples=np.ones(len(lengths), np.bool_),
        block_tables=tables,
        num_prefill_tokens=int(new.sum()),
        num_decode_tokens=int(decodes.sum()),
        kv_tokens_read=int(lengths[decodes].sum()),
        query_key_pairs=float((new * (num_computed[~decodes] + (new + 1) / 2)).sum()),
    )


def measure_cpu(
    config: EngineConfig, files: ModelFiles, max_time_s: float, on_sample: Callable[[StepSample], None]
) -> Measured:
    """Steps of the native engine on this machine's cores.

    Args:
        config: of the engine.
        files: the model.
        max_time_s: after which no further step is begun.
        on_sample: called with every sample as it comes.
    """
    began_s = time.perf_counter()
    assert files.folder is not None
    cost_model = config.cost_model(files)
    hardware, model = cost_model.hardware, cost_model.model
    executor = open_executor(config, files.folder, None, cost_model, config.context_limit(model))
    dtype = executor.model.dtype
    try:
        ceilings = cpu_ceilings(dtype)
        kv_bytes = executor.num_blocks * executor.block_size * model.kv_bytes_per_token
        points = step_points(
            max_num_batched_tokens=hardware.max_num_batched_tokens,
            max_num_seqs=hardware.max_num_seqs,
            max_model_len=executor.max_model_len,
            kv_capacity_tokens=int(min(kv_bytes, CPU_KV_BYTES) / model.kv_bytes_per_token),
        )
        timer = StepTimer(executor, num_steps=3, warm_up_steps=1, max_s=max_time_s / POINTS_IN_TIME)
        samples = []
        for point in points:
            if time.perf_counter() - began_s > max_time_s:
                break
            samples.append(timer(point))
            on_sample(samples[-1])
    finally:
        executor.close()
    device = f"{torch.get_num_threads()} threads of {_cpu_name()}, {str(dtype).removeprefix('torch.')}"
    return Measured(samples, ceilings, kv_bytes, device)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


class StepTimer:
    """Times steps of an executor.

    Args:
        executor: with a model loaded; what it was doing is forgotten.
        num_steps: of which a point's median is taken.
        warm_up_steps: before them.
        max_s: after which no further step of a point is run.
        seed: of tokens and of the order of blocks.
    """

    def __init__(
        self,
        executor: TorchExecutor,
        *,
        num_steps: int = 5,
        warm_up_steps: int = WARM_UP_STEPS,
        max_s: float = math.inf,
        seed: int = 0,
    ) -> None:
        self._executor = executor
        self._num_steps = num_steps
        self._warm_up_steps = warm_up_steps
        self._max_s = max_s
        self._rng = np.random.default_rng(seed)
        self._num_filled = 0

    def __call__(self, point: StepPoint) -> StepSample:
        """Run a point's step several times over.

        Raises:
            ConfigError: the KV cache does not hold it.
        """
        contexts = self._contexts(point)
        lengths = np.array([*contexts, *point.prompts], np.int32)
        is_decode = np.arange(len(lengths)) < len(contexts)
        batch = make_batch(
            np.where(is_decode, lengths - 1, 0), np.where(is_decode, 1, lengths), self._executor, self._rng
        )
        self._fill(int(batch.block_tables.max(initial=0)) + 1)
        self._executor.start(self._requests(lengths))
        until_s = time.perf_counter() + self._max_s
        durations: list[float] = []
        for _ in range(self._warm_up_steps + self._num_steps):
            durations.append(self._executor.execute(batch).duration_s)
            if time.perf_counter() > until_s:
                break
        measured = durations[self._warm_up_steps :] or durations[-1:]
        return StepSample(
            batch.num_prefill_tokens,
            batch.num_decode_tokens,
            batch.kv_tokens_read,
            statistics.median(measured),
            batch.query_key_pairs,
        )

    def _contexts(self, point: StepPoint) -> NDArray[np.int32]:
        """[num_decode_rows] tokens each row attends to, its own included."""
        spread = self._rng.uniform(0.75, 1.25, point.num_decode_rows)
        return np.maximum(np.rint(point.context * spread), 1).astype(np.int32)

    def _requests(self, lengths: NDArray[np.int32]) -> RequestTable:
        count = len(lengths)
        ends = np.cumsum(lengths, dtype=np.int64)
        vocabulary = self._executor.cost_model.model.vocab_size
        tokens = self._rng.integers(vocabulary, size=int(ends[-1]), dtype=np.uint32)
        return RequestTable(
            tokens=PromptTokens(tokens, ends - lengths, lengths),
            max_tokens=np.full(count, self._executor.max_model_len, dtype=np.int32),
            declared_tokens=np.zeros(count, dtype=np.int32),
            params=[SamplingParams(temperature=0.0, ignore_eos=True)],
            params_index=np.zeros(count, dtype=np.int32),
            seeds=np.zeros(count, dtype=np.uint64),
        )

    def _fill(self, num_blocks: int) -> None:
        """Noise in the first blocks of the cache: memory that was never written to is read out of nothing."""
        if num_blocks <= self._num_filled:
            return
        for cache in self._executor.attention.cache_tensors():
            cache[self._num_filled : num_blocks].normal_()
        self._num_filled = num_blocks


def cpu_ceilings(dtype: torch.dtype) -> Ceilings:
    """What this machine's cores do at best: a large product, a large copy."""
    size = 1024
    a, b = torch.randn(size, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
    source = torch.zeros(32 << 20)
    target = torch.empty_like(source)
    product_s = _best_s(lambda: torch.mm(a, b))
    copy_s = _best_s(lambda: target.copy_(source))
    return Ceilings(2.0 * size**3 / product_s, 2.0 * source.nbytes / copy_s)


def _best_s(run: Callable[[], object], repetitions: int = 4) -> float:
    def times() -> Iterator[float]:
        for _ in range(repetitions):
            began_s = time.perf_counter()
            run()
            yield time.perf_counter() - began_s

    return min(times())
