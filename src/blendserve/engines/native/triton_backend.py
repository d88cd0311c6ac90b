"""The CUDA side of the native engine's seams: paged attention and layer operations by Triton kernels."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blendserve.engines.native import triton_kernels as kernels
from blendserve.engines.native.attention import (
    LLAMA_RULES,
    AttentionRules,
    KVShape,
    PagedAttention,
    Rows,
    StepLayout,
)
from blendserve.engines.native.device import upload

if TYPE_CHECKING:
    from blendserve.engines.native.model import RMSNorm

MIN_PART_TOKENS = 256
MAX_PART_TOKENS = 1024
"""of a context that decode attention splits: less costs merging, more leaves programs idle at the end"""
UNITS_PER_PROGRAM = 4
"""(part, KV head) pairs that each program should have, for the last ones to end together"""
PROGRAMS_IN_THE_INTERPRETER = 3


class TritonAttention(PagedAttention):
    """The kernels of `triton_kernels.py`, where the layout of the cache is described.

    Rows with one token go through the decode kernel, whose work list is cut and ordered here; the others through the
    prefill kernel.
    """

    def __init__(
        self, shape: KVShape, rope: tuple[Tensor, Tensor], rules: AttentionRules = LLAMA_RULES
    ) -> None:
        super().__init__(shape, rope, rules)
        self.device = self.cosine.device
        self._heads = kernels.Heads(
            *(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size),
            *(self.scale, self.soft_cap),
        )
        sizes = (shape.num_blocks, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
        self.pages = [
            torch.zeros(sizes, dtype=shape.dtype, device=self.device) for _ in range(shape.num_layers)
        ]
        if self.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self.device)
            self.num_programs = properties.multi_processor_count * kernels.DECODE_PROGRAMS_PER_SM
            is_hopper = properties.major == 9
        else:
            self.num_programs, is_hopper = PROGRAMS_IN_THE_INTERPRETER, False
        self.tma = is_hopper
        self._prefill_rows = self._heads.prefill_rows(is_hopper=is_hopper)

    @staticmethod
    def covers(shape: KVShape) -> bool:
        """Whether the kernels can serve this shape."""
        tiles = (shape.head_dim, shape.block_size)
        powers_of_two = all(16 <= size <= 256 and size & (size - 1) == 0 for size in tiles)
        return powers_of_two and shape.heads_per_kv_head <= kernels.PREFILL_ROWS

    def begin(self, layout: StepLayout, num_sms: int | None = None) -> None:
        """See `PagedAttention.begin`."""
        self.num_programs_in_step = (
            self.num_programs if num_sms is None else num_sms * kernels.DECODE_PROGRAMS_PER_SM
        )
        is_decode = np.diff(layout.query_starts) == 1
        part_tokens = self._part_tokens(int(layout.context_lens[is_decode].sum()))
        windows = list(dict.fromkeys(self.windows))
        works = [decode_work(layout, part_tokens, window) for window in windows]
        chunks = prefill_work(layout, self._prefill_rows // self._heads.group)
        step = (chunks, layout.block_tables, layout.positions, layout.kv_slots)
        lists = [
            array
            for work, parts, tokens in works
            for array in (work, np.array([len(work)], np.int32), parts, tokens)
        ]
        on_device = upload((*step, *lists), self.device)
        self._prefills, self._table, self._positions, self._kv_slots = on_device[:4]
        self._decodes = {}
        for i, window in enumerate(windows):
            work, num_work, parts, tokens = on_device[4 * i + 4 : 4 * i + 8]
            self._decodes[window] = kernels.DecodeWork(
                *(self._table, work, num_work, parts, tokens),
                num_parts=len(works[i][0]),
                has_window=window is not None,
            )

    def store(self, layer: int, qkv: Tensor) -> None:
        """See `PagedAttention.store`."""
        table = self.rope_tables[layer]
        kernels.store(
            *(self._heads, qkv, self.cosine[table], self.sine[table]),
            *(self._positions, self._kv_slots, self.pages[layer]),
        )

    def attend(self, layer: int, qkv: Tensor, out: Tensor | None = None, rows: Rows = "all") -> Tensor:
        """See `PagedAttention.attend`."""
        if out is None:
            out = qkv.new_empty(len(qkv), self.shape.num_heads * self.shape.head_dim)
        window, pages = self.windows[layer], self.pages[layer]
        if len(self._prefills) and rows != "decode":
            kernels.prefill(
                self._heads, qkv, pages, self._table, self._prefills, out, self._prefill_rows, window
            )
        work = self._decodes[window]
        if work.num_parts and rows != "prefill":
            kernels.decode(self._heads, qkv, pages, work, out, self.num_programs_in_step, self.tma)
        return out

    def cache_tensors(self) -> list[Tensor]:
        """See `PagedAttention.cache_tensors`."""
        return self.pages

    def _part_tokens(self, num_keys: int) -> int:
        """Tokens of a part of a context: many parts where there is little work, in whole blocks."""
        wanted = num_keys * self.shape.num_kv_heads // (UNITS_PER_PROGRAM * self.num_programs_in_step)
        block_size = self.shape.block_size
        return -(-min(max(wanted, MIN_PART_TOKENS), MAX_PART_TOKENS) // block_size) * block_size


class TritonOps:
    """Layer operations by Triton kernels; implements `model.LayerOps`."""

    def add_rms_norm(self, residual: Tensor, delta: Tensor | None, norm: RMSNorm) -> Tensor:
        """See `LayerOps.add_rms_norm`."""
        return kernels.add_rms_norm(residual, delta, norm.weight, norm.eps, norm.unit_offset)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `LayerOps.silu_mul`."""
        return kernels.silu_mul(gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """See `LayerOps.gelu_mul`."""
        return kernels.gelu_mul(gate_up)


def is_interpreted() -> bool:
    """Whether Triton runs kernels on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def decode_work(
    layout: StepLayout, part_tokens: int, window: int | None = None
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Work of `triton_kernels.paged_decode`: contexts of the rows with one token, cut into parts.

    With a window, that is what each context has of parts that end in it.

    Returns:
        [num_parts, 6] (row, token, first key, end, part, start of the window), the longest first so that no program is
        left with a long one; [num_decodes + 1] first part of each such row; [num_decodes] its token.
    """
    rows = np.flatnonzero(np.diff(layout.query_starts) == 1).astype(np.int32)
    context_lens = layout.context_lens[rows]
    starts = np.zeros_like(context_lens) if window is None else np.maximum(context_lens - window, 0)
    hidden_parts = starts // part_tokens
    num_parts = -(-context_lens // part_tokens) - hidden_parts
    parts = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(num_parts, out=parts[1:])
    of_row = np.repeat(np.arange(len(rows)), num_parts)
    part = np.arange(parts[-1], dtype=np.int32)
    first = (part - parts[of_row] + hidden_parts[of_row]) * part_tokens
    end = np.minimum(first + part_tokens, context_lens[of_row])
    tokens = layout.query_starts[rows]
    columns = (rows[of_row], tokens[of_row], first, end, part, starts[of_row])
    work = np.stack(columns, axis=1).astype(np.int32)
    return work[np.argsort(first - end, kind="stable")], parts, tokens


def prefill_work(layout: StepLayout, tokens_per_item: int) -> NDArray[np.int32]:
    """Work of `triton_kernels.paged_prefill`: the rows with several tokens, cut into items.

    Returns:
        [num_items, 4] (row, first token, tokens, position of the first), the longest contexts first.
    """
    num_tokens = np.diff(layout.query_starts)
    rows = np.flatnonzero(num_tokens > 1)
    num_items = -(-num_tokens[rows] // tokens_per_item)
    of_row = np.repeat(rows, num_items)
    index = np.arange(len(of_row)) - np.repeat(np.cumsum(num_items) - num_items, num_items)
    first = layout.query_starts[of_row] + index * tokens_per_item
    count = np.minimum(layout.query_starts[of_row + 1] - first, tokens_per_item)
    work = np.stack((of_row, first, count, layout.positions[first]), axis=1).astype(np.int32)
    return work[np.argsort(-work[:, 3], kind="stable")]
