"""Paged attention: the KV cache, its layout, and the two ways to attend over it on a CPU.

The way on a GPU is in `triton_backend.py`.

A backend owns the pages. The model hands it the fused projections of a layer; the backend rotates queries and keys,
writes all new keys and values, and only then attends, so that rows of one step may share blocks which an earlier row
of the same step fills.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from blendserve.engines.native import kernels
from blendserve.errors import EngineError
from blendserve.scheduling.batch import Batch

Backend = Literal["auto", "torch", "c", "triton"]
Rows = Literal["all", "prefill", "decode"]
"""of a step: those with several tokens prefill, those with one decode"""

ROWS_PER_ITEM = 48
"""(token, query head) pairs of a work item of the C kernel: enough to reuse a tile of KV, few enough for the cache"""


@dataclass(frozen=True, slots=True)
class KVShape:
    """Sizes of the KV cache and of the attention over it."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_blocks: int
    block_size: int
    dtype: torch.dtype

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.block_size * self.dtype.itemsize

    @property
    def heads_per_kv_head(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class AttentionRules:
    """How the layers of a model attend, where they differ from Llama's."""

    scale: float | None = None
    """factor of the scores; None: head_dim ** -0.5"""
    soft_cap: float | None = None
    """c: a score becomes c * tanh(score / c); None: it stays"""
    windows: tuple[int | None, ...] = ()
    """by layer: keys that a query sees, its own and those just before; None, or no entry: all of its sequence"""
    rope_tables: tuple[int, ...] = ()
    """by layer: which of the rotary tables; no entry: the first"""


LLAMA_RULES = AttentionRules()


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Where the tokens of one step stand: in the flattened batch, in their sequences and in the KV cache."""

    query_starts: NDArray[np.int32]
    """[num_rows + 1] first token of each row in the flattened batch"""
    context_lens: NDArray[np.int32]
    """[num_rows] tokens of the sequence up to and including this step"""
    block_tables: NDArray[np.int32]
    """[num_rows, max_blocks] blocks of each row in token order; entries past its context mean nothing"""
    positions: NDArray[np.int32]
    """[num_tokens] place of the token in its sequence"""
    kv_slots: NDArray[np.int64]
    """[num_tokens] block * block_size + place in the block"""

    @classmethod
    def from_batch(cls, batch: Batch, block_size: int) -> StepLayout:
        """Lay out the tokens of a batch."""
        num_tokens, num_computed = batch.num_tokens, batch.num_computed
        query_starts = np.zeros(len(num_tokens) + 1, dtype=np.int32)
        np.cumsum(num_tokens, out=query_starts[1:])
        context_lens = num_computed + num_tokens
        num_blocks = -(-int(context_lens.max(initial=0)) // block_size)
        block_tables = np.ascontiguousarray(batch.block_tables[batch.slots, :num_blocks])
        rows = np.repeat(np.arange(len(num_tokens)), num_tokens)
        positions = np.arange(query_starts[-1], dtype=np.int32) + (num_computed - query_starts[:-1])[rows]
        blocks = block_tables[rows, positions // block_size].astype(np.int64)
        kv_slots = blocks * block_size + positions % block_size
        return cls(query_starts, context_lens, block_tables, positions, kv_slots)

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return len(self.positions)

    def part(self, first: int, end: int) -> StepLayout:
        """Rows `first` to `end` by themselves."""
        start, stop = self.query_starts[[first, end]]
        return StepLayout(
            self.query_starts[first : end + 1] - start,
            self.context_lens[first:end],
            self.block_tables[first:end],
            self.positions[start:stop],
            self.kv_slots[start:stop],
        )


class PagedAttention(ABC):
    """Attention over a paged KV cache; one object serves all layers of a model.

    Layers with a window keep the keys and values of the whole sequence, too: a block is shared, and freed, as a whole.

    Args:
        shape: sizes of the cache.
        rope: cosines and sines, two tensors [num_tables, max_positions, head_dim / 2] fp32.
        rules: how the layers attend.
    """

    def __init__(
        self, shape: KVShape, rope: tuple[Tensor, Tensor], rules: AttentionRules = LLAMA_RULES
    ) -> None:
        self.shape = shape
        self.cosine, self.sine = (table.contiguous() for table in rope)
        self.scale = shape.head_dim**-0.5 if rules.scale is None else rules.scale
        self.soft_cap = rules.soft_cap
        self.windows = rules.windows or (None,) * shape.num_layers
        self.rope_tables = rules.rope_tables or (0,) * shape.num_layers

    def twin(self) -> Self:
        """The same cache with a step of its own, so that two steps can be under way."""
        return copy.copy(self)

    @abstractmethod
    def begin(self, layout: StepLayout, num_sms: int | None = None) -> None:
        """Prepare what all layers of the step share; `num_sms`: multiprocessors for its decodes, None for all."""

    @abstractmethod
    def store(
        self,
        layer: int,
        qkv: Tensor,  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
    ) -> None:
        """Rotate the queries and keys of `qkv` in place and write its keys and values to the cache."""

    @abstractmethod
    def attend(
        self,
        layer: int,
        qkv: Tensor,  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], as `store` left it
        out: Tensor | None = None,  # [num_tokens, num_heads * head_dim]
        rows: Rows = "all",
    ) -> Tensor:
        """Causal attention of the tokens of `rows` to their sequences: `out`, the other rows as they were."""

    @abstractmethod
    def cache_tensors(self) -> list[Tensor]:
        """All memory of the KV cache, as tensors [num_blocks, ...]."""


def make_attention(
    shape: KVShape,
    rope: tuple[Tensor, Tensor],
    backend: Backend = "auto",
    rules: AttentionRules = LLAMA_RULES,
) -> PagedAttention:
    """The C kernels where they can be built and cover the shape, else torch; a backend asked for by name is certain.

    The cache is where `rope` is: on a CPU, or for triton on a GPU.
    """
    if backend == "torch":
        return TorchAttention(shape, rope, rules)
    if backend == "triton":
        from blendserve.engines.native.triton_backend import TritonAttention

        if not TritonAttention.covers(shape):
            raise EngineError(
                "the Triton attention kernels need a head size and a block size that are powers of two from 16 to "
                f"256, not {shape.head_dim} and {shape.block_size}; use --block-size 64, or --device cpu"
            )
        return TritonAttention(shape, rope, rules)
    loaded = kernels.load_kernels(shape.dtype) if KernelAttention.covers(shape) else None
    if loaded is not None:
        return KernelAttention(shape, rope, loaded, rules)
    if backend == "c":
        raise EngineError(f"the C attention kernels are not available for {shape}; use the torch backend")
    return TorchAttention(shape, rope, rules)


def _allocate(*sizes: int, dtype: torch.dtype) -> Tensor:
    """Zeros whose memory the operating system provides on first touch: an empty cache costs nothing."""
    storage = {4: np.uint32, 2: np.uint16}[dtype.itemsize]
    return torch.from_numpy(np.zeros(sizes, dtype=storage)).view(dtype)


class TorchAttention(PagedAttention):
    """Plain torch: gathers the pages of each sequence and calls scaled_dot_product_attention.

    Layout of a layer's keys and of its values: [num_blocks, block_size, num_kv_heads, head_dim]. Query heads that share
    a KV head become rows of one attention problem, so that nothing is repeated in memory.
    """

    DECODE_BATCH_PADDING = 1.25
    """sequences are decoded together when padding to the longest costs at most this factor"""

    def __init__(
        self, shape: KVShape, rope: tuple[Tensor, Tensor], rules: AttentionRules = LLAMA_RULES
    ) -> None:
        super().__init__(shape, rope, rules)
        sizes = (shape.num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self.keys = [_allocate(*sizes, dtype=shape.dtype) for _ in range(shape.num_layers)]
        self.values = [_allocate(*sizes, dtype=shape.dtype) for _ in range(shape.num_layers)]

    def begin(self, layout: StepLayout, num_sms: int | None = None) -> None:  # noqa: ARG002
        """See `PagedAttention.begin`."""
        positions = torch.from_numpy(layout.positions)
        self._rotations = [
            (cosine[positions][:, None], sine[positions][:, None])
            for cosine, sine in zip(self.cosine, self.sine, strict=True)
        ]
        self._kv_slots = torch.from_numpy(layout.kv_slots)
        num_tokens = np.diff(layout.query_starts)
        self._prefills = [self._prefill(layout, int(row)) for row in np.flatnonzero(num_tokens > 1)]
        self._decodes = [self._decode(layout, rows) for rows in self._decode_groups(layout, num_tokens)]

    def store(self, layer: int, qkv: Tensor) -> None:
        """See `PagedAttention.store`."""
        shape = self.shape
        heads = qkv.view(len(qkv), -1, shape.head_dim)
        rotated, values = heads.split_with_sizes(
            [shape.num_heads + shape.num_kv_heads, shape.num_kv_heads], dim=1
        )
        low, high = rotated.float().chunk(2, dim=-1)
        cosine, sine = self._rotations[self.rope_tables[layer]]
        rotated.copy_(torch.cat((low * cosine - high * sine, high * cosine + low * sine), dim=-1))
        self.keys[layer].flatten(0, 1)[self._kv_slots] = rotated[:, shape.num_heads :]
        self.values[layer].flatten(0, 1)[self._kv_slots] = values

    def attend(self, layer: int, qkv: Tensor, out: Tensor | None = None, rows: Rows = "all") -> Tensor:
        """See `PagedAttention.attend`."""
        shape = self.shape
        queries = qkv[:, : shape.num_heads * shape.head_dim]
        output = qkv.new_empty(len(qkv), shape.num_heads * shape.head_dim) if out is None else out
        window = self.windows[layer]
        for tokens, blocks, visible in self._prefills if rows != "decode" else ():
            context = visible[window].shape[-1]
            pages = (self.keys[layer][blocks], self.values[layer][blocks])
            keys, values = (page.flatten(0, 1)[None, :context] for page in pages)
            output[tokens] = self._attend(queries[tokens][None], keys, values, visible[window])[0]
        for decodes, blocks, visible, unwritten in self._decodes if rows != "prefill" else ():
            pages = (self.keys[layer][blocks], self.values[layer][blocks])
            # Places that no token has written yet may hold NaN, which no mask silences.
            keys, values = (page.flatten(1, 2).masked_fill_(unwritten, 0) for page in pages)
            output[decodes] = self._attend(queries[decodes][:, None], keys, values, visible[window])[:, 0]
        return output

    def cache_tensors(self) -> list[Tensor]:
        """See `PagedAttention.cache_tensors`."""
        return [*self.keys, *self.values]

    def _attend(
        self,
        queries: Tensor,  # [num_sequences, num_tokens, num_heads * head_dim]
        keys: Tensor,  # [num_sequences, num_keys, num_kv_heads, head_dim]
        values: Tensor,  # like keys
        visible: Tensor,  # [num_sequences, 1, 1 or num_tokens * heads_per_kv_head, num_keys] bool
    ) -> Tensor:  # like queries
        shape = self.shape
        sizes = (*queries.shape[:2], shape.num_kv_heads, shape.heads_per_kv_head, shape.head_dim)
        # [num_sequences, num_kv_heads, num_tokens * heads_per_kv_head, head_dim]
        grouped = queries.view(sizes).transpose(1, 2).flatten(2, 3)
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        if self.soft_cap is None:
            attended = F.scaled_dot_product_attention(grouped, keys, values, visible, scale=self.scale)
        else:
            scores = grouped.float() @ keys.float().transpose(-1, -2) * self.scale
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
            weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
            attended = weights.to(values.dtype) @ values
        return attended.view(sizes[0], sizes[2], sizes[1], *sizes[3:]).transpose(1, 2).reshape(queries.shape)

    def _prefill(self, layout: StepLayout, row: int) -> tuple[slice, Tensor, dict[int | None, Tensor]]:
        """Tokens, blocks [num_blocks] and, by window, visible keys of one row.

        These are [1, 1, num_tokens * heads_per_kv_head, context].
        """
        start, end = layout.query_starts[row : row + 2].tolist()
        context = int(layout.context_lens[row])
        blocks = torch.from_numpy(layout.block_tables[row, : -(-context // self.shape.block_size)]).long()
        positions = torch.from_numpy(layout.positions[start:end])[:, None]
        visible = self._by_window(torch.arange(context), positions)
        for window, seen in visible.items():
            visible[window] = seen.repeat_interleave(self.shape.heads_per_kv_head, dim=0)[None, None]
        return slice(start, end), blocks, visible

    def _decode(
        self, layout: StepLayout, rows: NDArray[np.int64]
    ) -> tuple[Tensor, Tensor, dict[int | None, Tensor], Tensor]:
        """Of rows with one token each: tokens [n], blocks [n, num_blocks], and which keys are visible and do not exist.

        The visible ones are by window [n, 1, 1, num_keys], those that do not exist [n, num_keys, 1, 1].
        """
        context_lens = torch.from_numpy(layout.context_lens[rows])
        num_blocks = -(-int(context_lens.max()) // self.shape.block_size)
        keys = torch.arange(num_blocks * self.shape.block_size)
        unwritten = keys >= context_lens[:, None]
        blocks = torch.from_numpy(layout.block_tables[rows, :num_blocks]).long()
        # Rows shorter than the longest: any block serves as padding that nobody else writes to.
        blocks = torch.where(unwritten[:, :: self.shape.block_size], blocks[:, :1], blocks)
        tokens = torch.from_numpy(layout.query_starts[rows]).long()
        visible = self._by_window(keys, context_lens[:, None] - 1)
        visible = {window: seen[:, None, None] for window, seen in visible.items()}
        return tokens, blocks, visible, unwritten[:, :, None, None]

    def _by_window(
        self,
        keys: Tensor,  # [num_keys] positions
        queries: Tensor,  # [num_queries, 1] positions
    ) -> dict[int | None, Tensor]:  # [num_queries, num_keys] bool
        """Which keys each query sees in layers of each window."""
        causal = keys <= queries
        return {
            window: causal if window is None else causal & (keys > queries - window)
            for window in set(self.windows)
        }

    def _decode_groups(self, layout: StepLayout, num_tokens: NDArray[np.int32]) -> list[NDArray[np.int64]]:
        """Rows with one token, in groups of similar context."""
        rows = np.flatnonzero(num_tokens == 1)
        rows = rows[np.argsort(layout.context_lens[rows], kind="stable")]
        groups, start = [], 0
        lengths = layout.context_lens[rows] + self.shape.block_size
        while start < len(rows):
            end = int(np.searchsorted(lengths, lengths[start] * self.DECODE_BATCH_PADDING, side="right"))
            groups.append(rows[start:end])
            start = end
        return groups


class KernelAttention(PagedAttention):
    """The kernels of `kernels.c`, where the layout of the cache is described."""

    def __init__(
        self,
        shape: KVShape,
        rope: tuple[Tensor, Tensor],
        loaded: kernels.Kernels,
        rules: AttentionRules = LLAMA_RULES,
    ) -> None:
        super().__init__(shape, rope, rules)
        self._kernels = loaded
        size = shape.num_kv_heads * shape.head_dim * shape.block_size
        self.keys = [_allocate(shape.num_blocks, size, dtype=shape.dtype) for _ in range(shape.num_layers)]
        self.values = [_allocate(shape.num_blocks, size, dtype=shape.dtype) for _ in range(shape.num_layers)]
        self._tokens_per_item = max(1, ROWS_PER_ITEM // shape.heads_per_kv_head)

    @staticmethod
    def covers(shape: KVShape) -> bool:
        """Whether the kernels can serve this shape."""
        are_heads_covered = shape.head_dim % 16 == 0 and shape.head_dim <= 256
        pair = 2 if shape.dtype == torch.bfloat16 else 1  # PAIR in kernels.c
        return are_heads_covered and shape.block_size % pair == 0 and shape.heads_per_kv_head <= ROWS_PER_ITEM

    def begin(self, layout: StepLayout, num_sms: int | None = None) -> None:  # noqa: ARG002
        """See `PagedAttention.begin`."""
        shape = self.shape
        self._layout = layout  # kept alive, as the work items: the kernels hold their addresses
        self._items = self._work_items(layout)
        self._step = self._make_step(self._items)
        self._shape = kernels.Shape(
            *(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size),
            *(self._tokens_per_item, torch.get_num_threads()),
        )

    def _make_step(self, items: tuple[NDArray[np.int32], NDArray[np.int32]]) -> kernels.Step:
        layout = self._layout
        where = (layout.positions, layout.kv_slots)
        rows = (layout.query_starts, layout.context_lens, layout.block_tables)
        return kernels.Step(
            *(layout.num_tokens, len(items[0]), layout.block_tables.shape[1]),
            *(array.ctypes.data for array in (*where, *rows, *items)),
        )

    def _work_items(self, layout: StepLayout) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Row and first token of every work item, the longest first so that no thread is left with a long one."""
        num_items = -(-np.diff(layout.query_starts) // self._tokens_per_item)
        rows = np.repeat(np.arange(len(num_items), dtype=np.int32), num_items)
        item_of_row = np.arange(len(rows)) - np.repeat(np.cumsum(num_items) - num_items, num_items)
        tokens = (layout.query_starts[rows] + item_of_row * self._tokens_per_item).astype(np.int32)
        num_tokens = np.minimum(layout.query_starts[rows + 1] - tokens, self._tokens_per_item)
        order = np.argsort(-layout.context_lens[rows] * num_tokens, kind="stable")
        return rows[order], tokens[order]

    def store(self, layer: int, qkv: Tensor) -> None:
        """See `PagedAttention.store`."""
        table = self.rope_tables[layer]
        tensors = (qkv, self.cosine[table], self.sine[table], self.keys[layer], self.values[layer])
        assert qkv.is_contiguous()
        assert qkv.dtype == self.shape.dtype
        self._kernels.rope_and_store(self._shape, self._step, *(tensor.data_ptr() for tensor in tensors))

    def attend(self, layer: int, qkv: Tensor, out: Tensor | None = None, rows: Rows = "all") -> Tensor:
        """See `PagedAttention.attend`."""
        output = qkv.new_empty(len(qkv), self.shape.num_heads * self.shape.head_dim) if out is None else out
        step = self._step
        if rows != "all":
            is_decode = np.diff(self._layout.query_starts)[self._items[0]] == 1
            is_wanted = is_decode if rows == "decode" else ~is_decode
            items = (self._items[0][is_wanted], self._items[1][is_wanted])
            step = self._make_step(items)
        tensors = (qkv, self.keys[layer], self.values[layer], output)
        window = self.windows[layer]
        self._kernels.paged_attention(
            *(self._shape, step, self.scale, self.soft_cap or 0.0),
            kernels.NO_WINDOW if window is None else min(window, kernels.NO_WINDOW),
            *(tensor.data_ptr() for tensor in tensors),
        )
        return output

    def cache_tensors(self) -> list[Tensor]:
        """See `PagedAttention.cache_tensors`."""
        return [*self.keys, *self.values]
