"""Steps in two halves: the matrix products of one run beside the decode attention of the other.

Products need a GPU's arithmetic and decode attention its memory, so both together take less time than one after the
other. Each half of a step is a *nano-batch*, and there are three *lanes*, on each of which operations run in order:

```
main       embed |                                                                              | logits
gemm             | P0 P1 | F0 P0 | F1 P1 | F0 P0 | F1 P1 | ...                            | F0 F1 |
attention            | A0    | A1    | A0    | A1    | ...                           A0 | A1  |
```

P: norm, queries, keys and values, written to the cache; attention of rows that prefill. A: attention of rows that
decode. F: output and MLP. The digit is the nano-batch, each group one layer. Source: NanoFlow.

Between lanes, order is by events alone: A waits for its P, F for its A, the first P for main, and main for the last F.
What several lanes use is allocated by main before the others begin; what another lane allocates never leaves it. So
memory that is handed out again on a lane was last used on that lane, or by lanes that main has waited for.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blendserve.cost_model import CostModel, HardwareSpec, Partition
from blendserve.engines.native.attention import PagedAttention, StepLayout
from blendserve.engines.native.device import split_gpu
from blendserve.engines.native.model import LlamaModel
from blendserve.scheduling.batch import Batch

Lane = Literal["main", "gemm", "attention"]
BUFFER_TOKENS = 128
"""buffers hold a multiple of so many tokens"""

_log = logging.getLogger(__name__)


class Lanes(Protocol):
    """Places where operations run: on a lane one after the other, on different ones in any order that events allow.

    Operations on main are those that the caller runs itself.
    """

    num_attention_sms: int | None
    """multiprocessors of the attention lane; None: all there are"""

    def run(self, lane: Lane, operation: Callable[[], Any]) -> None:
        """Run an operation on a lane, after what was run there before."""
        ...

    def record(self, lane: Lane) -> Any:
        """The event that a lane has done all that was run there up to now."""
        ...

    def wait(self, lane: Lane, event: Any) -> None:
        """Let what is run on a lane from now on wait for an event."""
        ...


class CudaLanes:
    """`Lanes` on the streams of a GPU; main is the current one."""

    def __init__(
        self, gemm: torch.cuda.Stream, attention: torch.cuda.Stream, num_attention_sms: int | None
    ) -> None:
        self._streams = {"gemm": gemm, "attention": attention}
        self.num_attention_sms = num_attention_sms

    def run(self, lane: Lane, operation: Callable[[], Any]) -> None:
        """See `Lanes.run`."""
        with torch.cuda.stream(self._stream(lane)):
            operation()

    def record(self, lane: Lane) -> torch.cuda.Event:
        """See `Lanes.record`."""
        event: torch.cuda.Event = self._stream(lane).record_event()
        return event

    def wait(self, lane: Lane, event: torch.cuda.Event) -> None:
        """See `Lanes.wait`."""
        self._stream(lane).wait_event(event)

    def _stream(self, lane: Lane) -> torch.cuda.Stream:
        return torch.cuda.current_stream() if lane == "main" else self._streams[lane]


def open_lanes(hardware: HardwareSpec, model: LlamaModel) -> dict[Partition, Lanes]:
    """Lanes for each partition of the profile, on the GPU that holds the model; none if steps had better not be split.

    Warns where it has to do with less than lanes on disjoint multiprocessors.
    """
    if not hardware.partitions:
        _log.info("no overlap: the hardware profile %s has no measured partitions", hardware.name)
        return {}
    device = model.embedding.device

    def by_green_contexts(partition: Partition) -> Lanes:
        attention, gemm, num_sms = split_gpu(device.index, partition.sm_attention)
        return CudaLanes(gemm, attention, num_sms)

    def by_priority(partition: Partition) -> Lanes:
        gemm, attention = (torch.cuda.Stream(device, priority=priority) for priority in (0, -1))  # type: ignore[no-untyped-call]
        return CudaLanes(gemm, attention, partition.sm_attention)

    return _open_first(
        hardware.partitions,
        {
            "green contexts": by_green_contexts,
            "streams of different priority, whose kernels may get in each other's way": by_priority,
        },
        partial(_try_out, model),
    )


def _open_first(
    partitions: tuple[Partition, ...],
    ways: Mapping[str, Callable[[Partition], Lanes]],
    try_out: Callable[[Lanes], None],
) -> dict[Partition, Lanes]:
    """Lanes of all partitions by the first of the ways that works."""
    names = [*ways, "no overlap"]
    for name, following, open_one in zip(names, names[1:], ways.values(), strict=False):
        try:
            lanes = {partition: open_one(partition) for partition in partitions}
            for opened in lanes.values():
                try_out(opened)
        except (ImportError, RuntimeError) as error:
            warnings.warn(
                f"products cannot run beside attention by {name}, which leaves {following}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
        else:
            return lanes
    return {}


@torch.inference_mode()
def _try_out(model: LlamaModel, lanes: Lanes) -> None:
    """A product on one lane, read on the other, twice in turns.

    Raises:
        RuntimeError: something cannot run on a lane, or the result is wrong.
    """
    size = model.config.hidden_size
    x = torch.ones(2, size, dtype=model.dtype, device=model.embedding.device)
    weight, product, halved = torch.eye(size, dtype=x.dtype, device=x.device), x * 0, x * 0
    lanes.wait("gemm", lanes.record("main"))
    for _ in range(2):
        lanes.run("gemm", partial(torch.mm, x, weight, out=product))
        lanes.wait("attention", lanes.record("gemm"))
        lanes.run(
            "attention", lambda: halved.copy_(model.ops.silu_mul(torch.cat((product, product), dim=-1)))
        )
        lanes.wait("gemm", lanes.record("attention"))
    lanes.wait("main", lanes.record("gemm"))
    if not torch.allclose(halved, torch.nn.functional.silu(x), atol=1e-2):
        raise RuntimeError("a first operation on the lanes gave a wrong result")


# -- nano-batches ----------------------------------------------------------------------------------------------------


def split_batch(batch: Batch, block_size: int, granularity: int) -> tuple[Batch, int]:
    """The rows of a batch in the order of its two nano-batches, and how many are in the first.

    A row may attend to what earlier ones write, and the first nano-batch, which is written first, must not depend on
    the second. So chunks, and rows that share blocks which are being written, keep their order, and where the second
    nano-batch begins, a chunk is cut in two rows. The others, which decode, are dealt out by their contexts.

    So tokens differ by little more than `granularity`, to a multiple of which the first nano-batch is rounded in large
    steps, and KV tokens read by the rows that are dealt out by at most the longest context.
    """
    context_lens = batch.num_computed + batch.num_tokens
    is_ordered = (batch.num_tokens > 1) | _shares_written_blocks(batch, block_size)
    decodes = np.flatnonzero(~is_ordered)
    decodes = decodes[np.argsort(-context_lens[decodes], kind="stable")]
    is_first = np.isin(np.arange(len(decodes)) % 4, (0, 3))
    num_tokens = int(batch.num_tokens.sum())
    half = num_tokens // 2
    if num_tokens >= 2 * granularity:
        half = (num_tokens + granularity) // (2 * granularity) * granularity
    ordered = np.flatnonzero(is_ordered)
    ends = np.cumsum(batch.num_tokens[ordered])
    room = min(max(half - int(is_first.sum()), 0), int(batch.num_tokens[ordered].sum()))
    whole = int(np.searchsorted(ends, room, side="right"))
    cut = room - int(ends[whole - 1]) if whole else room  # tokens of the row that is cut
    if cut == 1:
        # It would decode, on the lane for that, while the other part of its chunk is written to the same block.
        cut = 0

    first = np.concatenate((decodes[is_first], ordered[: whole + (cut > 0)]))
    second = np.concatenate((decodes[~is_first], ordered[whole:]))
    rows = np.concatenate((first, second))
    computed, tokens, samples = batch.num_computed[rows], batch.num_tokens[rows], batch.samples[rows]
    if cut:
        above, below = len(first) - 1, len(first) + int((~is_first).sum())
        tokens[above], samples[above] = cut, False
        computed[below] += cut
        tokens[below] -= cut
    split = replace(
        batch,
        slots=batch.slots[rows],
        requests=batch.requests[rows],
        num_computed=computed,
        num_tokens=tokens,
        samples=samples,
    )
    return split, len(first)


def _shares_written_blocks(batch: Batch, block_size: int) -> NDArray[np.bool_]:
    """[num_rows] whether a row uses a block that it or another row writes and that both use."""
    num_blocks = -(-(batch.num_computed + batch.num_tokens) // block_size)
    places = np.arange(num_blocks.max(initial=0))
    tables = batch.block_tables[batch.slots, : len(places)]
    is_used = places < num_blocks[:, None]
    is_written = is_used & (places >= (batch.num_computed // block_size)[:, None])
    num_users = np.bincount(tables[is_used])
    is_shared = np.zeros(len(num_users), np.bool_)
    is_shared[tables[is_written]] = True
    is_shared &= num_users > 1
    shares: NDArray[np.bool_] = is_used & is_shared[np.where(is_used, tables, 0)]
    return np.asarray(shares.any(axis=1))


# -- the step --------------------------------------------------------------------------------------------------------


class Halves(NamedTuple):
    """A batch that runs as two nano-batches."""

    batch: Batch
    """rows in the order of the nano-batches"""
    num_rows: int
    """of the first"""
    lanes: Lanes


class Buffers(NamedTuple):
    """What several lanes use, by rows."""

    residual: Tensor  # [num_tokens, hidden_size]
    qkv: Tensor  # [num_tokens, sum of qkv_sizes]
    attended: Tensor  # [num_tokens, num_heads * head_dim]
    hidden: Tensor  # [num_tokens, hidden_size], of the rows that are wanted

    @classmethod
    def allocate(cls, model: LlamaModel, num_tokens: int) -> Buffers:
        """For so many tokens; what they hold is undefined."""
        config = model.config
        widths = (config.hidden_size, sum(config.qkv_sizes), config.qkv_sizes[0], config.hidden_size)
        return cls(*(model.embedding.new_empty(num_tokens, width) for width in widths))


@dataclass(slots=True)
class _NanoBatch:
    """One half of a step while it runs."""

    attention: PagedAttention
    residual: Tensor
    qkv: Tensor
    attended: Tensor
    hidden: Tensor  # [len(selected), hidden_size]
    selected: Tensor  # [num_selected] int64, places in this nano-batch
    has_prefills: bool
    has_decodes: bool
    delta: Tensor | None = None  # like residual, of the layer before
    attention_done: Any = None  # event, of its last attention on the attention lane


class OverlappedModel:
    """A model that runs steps in two halves where that takes less time.

    Args:
        model: see `LlamaModel`.
        attention: over the cache, which steps of either kind share.
        cost_model: whose profile says what runs faster.
        lanes: of the partitions of that profile.
    """

    def __init__(
        self,
        model: LlamaModel,
        attention: PagedAttention,
        cost_model: CostModel,
        lanes: Mapping[Partition, Lanes],
    ) -> None:
        self._model = model
        self._attentions = (attention.twin(), attention.twin())
        self._cost_model = cost_model
        self._lanes = lanes
        self._buffers: Buffers | None = None

    def split(self, batch: Batch, block_size: int) -> Halves | None:
        """The two halves of a batch; None where it takes less time as a whole."""
        num_tokens = int(batch.num_tokens.sum())
        cost = self._cost_model.step_cost(num_tokens, batch.kv_tokens_read, batch.query_key_pairs)
        partition = self._cost_model.best_partition(cost.compute_s, cost.memory_s)
        if partition is None:
            return None
        granularity = self._cost_model.hardware.token_granularity
        ordered, num_rows = split_batch(batch, block_size, granularity)
        if num_rows in {0, len(ordered.requests)}:
            return None
        return Halves(ordered, num_rows, self._lanes[partition])

    @torch.inference_mode()
    def hidden_states(
        self,
        token_ids: Tensor,  # [num_tokens] int64, in the order of `halves`
        layout: StepLayout,
        selected: Tensor,  # [num_selected] int64, the last tokens of the rows that sample
        halves: Halves,
    ) -> Tensor:  # [num_selected, hidden_size], valid until the next step
        """As `LlamaModel.hidden_states`."""
        lanes = halves.lanes
        nanos = self._begin(token_ids, layout, selected, halves)
        lanes.wait("gemm", lanes.record("main"))
        for nano in nanos:
            self._attend(nano, lanes, 0)
        num_layers = len(self._model.layers)
        for layer in range(num_layers):
            for nano in nanos:
                self._feed_forward(nano, lanes, layer)
                if layer + 1 < num_layers:
                    self._attend(nano, lanes, layer + 1)
        lanes.wait("main", lanes.record("gemm"))
        assert self._buffers is not None
        return self._buffers.hidden[: len(selected)]

    def _begin(
        self, token_ids: Tensor, layout: StepLayout, selected: Tensor, halves: Halves
    ) -> list[_NanoBatch]:
        """What main does first: embeddings, and what the layers share."""
        num_tokens = layout.num_tokens
        if self._buffers is None or len(self._buffers.residual) < num_tokens:
            self._buffers = None
            self._buffers = Buffers.allocate(self._model, -(-num_tokens // BUFFER_TOKENS) * BUFFER_TOKENS)
        buffers = self._buffers
        self._model.embed(token_ids, buffers.residual[:num_tokens])
        nanos, first_selected = [], 0
        rows = (0, halves.num_rows, len(layout.context_lens))
        for attention, (first, end) in zip(self._attentions, itertools.pairwise(rows), strict=True):
            part = layout.part(first, end)
            attention.begin(part, halves.lanes.num_attention_sms)
            start, stop = layout.query_starts[[first, end]].tolist()
            num_selected = int(halves.batch.samples[first:end].sum())
            wanted = slice(first_selected, first_selected + num_selected)
            first_selected += num_selected
            is_decode = np.diff(part.query_starts) == 1
            nanos.append(
                _NanoBatch(
                    attention,
                    residual=buffers.residual[start:stop],
                    qkv=buffers.qkv[start:stop],
                    attended=buffers.attended[start:stop],
                    hidden=buffers.hidden[wanted],
                    selected=selected[wanted] - start,
                    has_prefills=not bool(is_decode.all()),
                    has_decodes=bool(is_decode.any()),
                )
            )
        return nanos

    def _attend(self, nano: _NanoBatch, lanes: Lanes, layer: int) -> None:
        """Run a layer up to its attention."""
        lanes.run("gemm", partial(self._project, nano, layer))
        if not self._is_wanted(nano, layer):
            return
        attend = partial(nano.attention.attend, layer, nano.qkv, nano.attended)
        if nano.has_decodes:
            lanes.wait("attention", lanes.record("gemm"))
            lanes.run("attention", partial(attend, "decode"))
            nano.attention_done = lanes.record("attention")
        if nano.has_prefills:
            lanes.run("gemm", partial(attend, "prefill"))

    def _feed_forward(self, nano: _NanoBatch, lanes: Lanes, layer: int) -> None:
        """Run a layer from its attention on; behind the last layer, the last norm."""
        if not self._is_wanted(nano, layer):
            return
        if nano.has_decodes:
            lanes.wait("gemm", nano.attention_done)
        is_last = layer == len(self._model.layers) - 1
        lanes.run("gemm", partial(self._finish if is_last else self._continue, nano, layer))

    def _is_wanted(self, nano: _NanoBatch, layer: int) -> bool:
        """Whether anything reads what the layer makes of its attention."""
        return layer < len(self._model.layers) - 1 or len(nano.selected) > 0

    def _project(self, nano: _NanoBatch, layer: int) -> None:
        self._model.project(layer, nano.residual, nano.delta, nano.qkv)
        nano.attention.store(layer, nano.qkv)

    def _continue(self, nano: _NanoBatch, layer: int) -> None:
        nano.delta = self._model.feed_forward(layer, nano.residual, nano.attended)

    def _finish(self, nano: _NanoBatch, layer: int) -> None:
        """The last layer and the last norm, of the selected tokens alone."""
        residual, attended = nano.residual[nano.selected], nano.attended[nano.selected]
        delta = self._model.feed_forward(layer, residual, attended)
        nano.hidden.copy_(self._model.ops.add_rms_norm(residual, delta, self._model.norm))
