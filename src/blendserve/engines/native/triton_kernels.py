"""Triton kernels of the CUDA executor, and the functions that launch them.

```
qkv        [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]      one row per token: queries, keys, values
pages      [num_blocks, 2, num_kv_heads, block_size, head_dim]          one layer of the cache; keys, then values
```

The `block_size x head_dim` tile of one head is contiguous, so that a tile is one load. Sizes of the model are
compiled in, those of the step are arguments: a kernel is compiled once per model. Softmax is computed in base 2.

With `TRITON_INTERPRET=1` in the environment before `triton` is first imported, the kernels run on CPU tensors.
"""

# No `from __future__ import annotations`: Triton looks at the annotations themselves.
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

DECODE_PROGRAMS_PER_SM = 2
PREFILL_ROWS, PREFILL_ROWS_HOPPER = 64, 128
"""(token, query head) pairs of a tile of prefill attention: what registers hold without the products of Hopper"""

# The stages of a loop over pages include the load of the page's number, so two tiles of keys in flight need five.
DECODE_STAGES = 5
PREFILL_STAGES = 3
MAX_STAGED_BYTES = 16 << 10
"""of a tile of keys, for loops of more than two stages: 64 tokens of heads of 128 in bfloat16"""
COMPILE_OPTIONS = {"enable_fp_fusion": True}
"""of every kernel; the default of this one differs between versions of Triton"""


@triton.jit
def _attend_tile(  # type: ignore[no-untyped-def]
    q, keys, values, visible, scale_log2, highest, total, acc, MASKED: tl.constexpr, CAP_LOG2: tl.constexpr
):
    """Add a tile of keys and values to a running softmax: (highest score, sum of weights, weighted values)."""
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale_log2
    if CAP_LOG2 > 0:
        scores = CAP_LOG2 * (2.0 * tl.sigmoid(scores * (2.0 / CAP_LOG2)) - 1.0)
    if MASKED:
        scores = tl.where(visible, scores, -float("inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    if MASKED:
        # Behind a window a row may have seen nothing so far: infinities less each other would be no numbers.
        new_highest = tl.maximum(new_highest, -1.0e30)
    rescale = tl.exp2(highest - new_highest)
    weights = tl.exp2(scores - new_highest[:, None])
    total = total * rescale + tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * rescale[:, None], input_precision="ieee")
    return new_highest, total, acc


@triton.jit(do_not_specialize=["table_stride"])
def paged_decode(  # type: ignore[no-untyped-def]
    QKV,
    PAGES,
    TABLE,
    WORK,
    NUM_WORK,
    PARTIAL,
    LSE,
    num_tile_rows,
    scale_log2,
    qkv_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TMA: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CAP_LOG2: tl.constexpr,
):
    """Attention of single tokens, each over a part of its context; `combine_parts` merges the parts.

    WORK [n, 6] int32: row of TABLE, token, first key (a multiple of the block size), end of the keys, part, first key
    of the window. Programs share the (item, KV head) pairs, so the grid may be any size. With TMA, tiles come through
    the tensor memory accelerator, for which PAGES is a matrix of `num_tile_rows` rows of HEAD_DIM. CAP_LOG2 is the
    soft cap of the scores in base 2, 0 for none.
    """
    if TMA:
        tiles = tl.make_tensor_descriptor(
            PAGES, [num_tile_rows, HEAD_DIM], [HEAD_DIM, 1], [BLOCK_SIZE, HEAD_DIM]
        )
    g = tl.arange(0, GROUP_PADDED)
    d = tl.arange(0, HEAD_DIM)
    n = tl.arange(0, BLOCK_SIZE)
    tile = n[:, None] * HEAD_DIM + d[None, :]
    for unit in range(tl.program_id(0), tl.load(NUM_WORK) * KV_HEADS, tl.num_programs(0)):
        item = WORK + unit // KV_HEADS * 6
        head = unit % KV_HEADS
        table = TABLE + tl.load(item).to(tl.int64) * table_stride
        token = tl.load(item + 1).to(tl.int64)
        first = tl.load(item + 2)
        end = tl.load(item + 3)
        part = tl.load(item + 4)
        window_start = tl.load(item + 5)
        first = tl.maximum(first, window_start // BLOCK_SIZE * BLOCK_SIZE)
        q = tl.load(
            QKV + token * qkv_stride + (head * GROUP + g)[:, None] * HEAD_DIM + d[None, :],
            mask=(g < GROUP)[:, None],
            other=0.0,
        )
        highest = tl.full([GROUP_PADDED], -float("inf"), tl.float32)
        total = tl.zeros([GROUP_PADDED], tl.float32)
        acc = tl.zeros([GROUP_PADDED, HEAD_DIM], tl.float32)
        whole = end // BLOCK_SIZE * BLOCK_SIZE
        for start in tl.range(first, whole, BLOCK_SIZE, num_stages=STAGES):
            page = tl.load(table + start // BLOCK_SIZE)
            if TMA:
                row = (page * 2 * KV_HEADS + head) * BLOCK_SIZE
                keys = tiles.load([row, 0])
                values = tiles.load([row + KV_HEADS * BLOCK_SIZE, 0])
            else:
                base = PAGES + (page.to(tl.int64) * 2 * KV_HEADS + head) * BLOCK_SIZE * HEAD_DIM
                keys = tl.load(base + tile)
                values = tl.load(base + KV_HEADS * BLOCK_SIZE * HEAD_DIM + tile)
            visible = (start + n >= window_start)[None, :]
            highest, total, acc = _attend_tile(
                q, keys, values, visible, scale_log2, highest, total, acc, HAS_WINDOW, CAP_LOG2
            )
        if whole < end:
            page = tl.load(table + whole // BLOCK_SIZE).to(tl.int64)
            base = PAGES + (page * 2 * KV_HEADS + head) * BLOCK_SIZE * HEAD_DIM
            # Places that no token has written yet may hold NaN, which a weight of 0 does not silence.
            written = (whole + n < end)[:, None]
            keys = tl.load(base + tile, mask=written, other=0.0)
            values = tl.load(base + KV_HEADS * BLOCK_SIZE * HEAD_DIM + tile, mask=written, other=0.0)
            visible = ((whole + n < end) & (whole + n >= window_start))[None, :]
            highest, total, acc = _attend_tile(
                q, keys, values, visible, scale_log2, highest, total, acc, True, CAP_LOG2
            )
        out = (part * KV_HEADS + head) * GROUP + g
        tl.store(
            PARTIAL + out[:, None] * HEAD_DIM + d[None, :], acc / total[:, None], mask=(g < GROUP)[:, None]
        )
        tl.store(LSE + out, highest + tl.log2(total), mask=g < GROUP)


@triton.jit
def combine_parts(  # type: ignore[no-untyped-def]
    PARTIAL,
    LSE,
    PARTS,
    TOKENS,
    OUT,
    out_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Attention of one row and KV head out of the parts PARTS[row] to PARTS[row + 1]; grid (rows, KV_HEADS)."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    g = tl.arange(0, GROUP_PADDED)
    d = tl.arange(0, HEAD_DIM)
    ok = g < GROUP
    highest = tl.full([GROUP_PADDED], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    acc = tl.zeros([GROUP_PADDED, HEAD_DIM], tl.float32)
    for part in range(tl.load(PARTS + row), tl.load(PARTS + row + 1)):
        place = (part * KV_HEADS + head) * GROUP + g
        lse = tl.load(LSE + place, mask=ok, other=0.0)
        partial = tl.load(PARTIAL + place[:, None] * HEAD_DIM + d[None, :], mask=ok[:, None], other=0.0)
        new_highest = tl.maximum(highest, lse)
        rescale = tl.exp2(highest - new_highest)
        weight = tl.exp2(lse - new_highest)
        acc = acc * rescale[:, None] + weight[:, None] * partial
        total = total * rescale + weight
        highest = new_highest
    token = tl.load(TOKENS + row).to(tl.int64)
    out = OUT + token * out_stride + (head * GROUP + g)[:, None] * HEAD_DIM + d[None, :]
    tl.store(out, (acc / total[:, None]).to(OUT.dtype.element_ty), mask=ok[:, None])


@triton.jit(do_not_specialize=["table_stride"])
def paged_prefill(  # type: ignore[no-untyped-def]
    QKV,
    PAGES,
    TABLE,
    WORK,
    OUT,
    scale_log2,
    qkv_stride,
    out_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP_LOG2: tl.constexpr,
):
    """Causal attention of consecutive tokens over the pages of their sequence; grid (items * KV_HEADS).

    WORK [n, 4] int32: row of TABLE, first token, tokens (at most ROWS // GROUP), position of the first token. The query
    heads of a KV head are rows of one tile. A token sees WINDOW keys, its own included, with 0 all of them.
    """
    item = WORK + tl.program_id(0) // KV_HEADS * 4
    head = tl.program_id(0) % KV_HEADS
    table = TABLE + tl.load(item).to(tl.int64) * table_stride
    first_token = tl.load(item + 1).to(tl.int64)
    num_tokens = tl.load(item + 2)
    first_position = tl.load(item + 3)
    m = tl.arange(0, ROWS)
    d = tl.arange(0, HEAD_DIM)
    n = tl.arange(0, BLOCK_SIZE)
    token = m // GROUP
    ok = (token < num_tokens)[:, None]
    column = (head * GROUP + m % GROUP)[:, None] * HEAD_DIM + d[None, :]
    q = tl.load(QKV + (first_token + token)[:, None] * qkv_stride + column, mask=ok, other=0.0)
    position = first_position + tl.minimum(token, num_tokens - 1)
    end = first_position + num_tokens
    tile = n[:, None] * HEAD_DIM + d[None, :]
    highest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    low = 0
    unseen = tl.full([ROWS], -1, tl.int32)  # last key before each token's window
    if WINDOW > 0:
        low = tl.maximum(first_position + 1 - WINDOW, 0) // BLOCK_SIZE * BLOCK_SIZE
        unseen = position - WINDOW
    whole = (first_position + 1) // BLOCK_SIZE * BLOCK_SIZE  # up to here no token's key is a later one
    for start in tl.range(low, whole, BLOCK_SIZE, num_stages=STAGES):
        page = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
        base = PAGES + (page * 2 * KV_HEADS + head) * BLOCK_SIZE * HEAD_DIM
        keys = tl.load(base + tile)
        values = tl.load(base + KV_HEADS * BLOCK_SIZE * HEAD_DIM + tile)
        visible = (start + n)[None, :] > unseen[:, None]
        highest, total, acc = _attend_tile(
            q, keys, values, visible, scale_log2, highest, total, acc, WINDOW > 0, CAP_LOG2
        )
    for start in tl.range(whole, end, BLOCK_SIZE, num_stages=1):
        page = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
        base = PAGES + (page * 2 * KV_HEADS + head) * BLOCK_SIZE * HEAD_DIM
        written = (start + n < end)[:, None]
        keys = tl.load(base + tile, mask=written, other=0.0)
        values = tl.load(base + KV_HEADS * BLOCK_SIZE * HEAD_DIM + tile, mask=written, other=0.0)
        visible = (start + n)[None, :] <= position[:, None]
        visible &= (start + n)[None, :] > unseen[:, None]
        highest, total, acc = _attend_tile(
            q, keys, values, visible, scale_log2, highest, total, acc, True, CAP_LOG2
        )
    out = OUT + (first_token + token)[:, None] * out_stride + column
    tl.store(out, (acc / total[:, None]).to(OUT.dtype.element_ty), mask=ok)


@triton.jit
def rope_and_store(  # type: ignore[no-untyped-def]
    QKV,
    COSINE,
    SINE,
    POSITIONS,
    KV_SLOTS,
    PAGES,
    qkv_stride,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KV_HEADS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Rotate the queries of a token in place, and write its rotated keys and its values to the cache; grid (tokens)."""
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(POSITIONS + token)
    slot = tl.load(KV_SLOTS + token)
    i = tl.arange(0, HALF)[None, :]
    cosine = tl.load(COSINE + position * HALF + i)
    sine = tl.load(SINE + position * HALF + i)

    head = tl.arange(0, HEADS_PADDED)[:, None]
    ok = (head < HEADS) & (i < HALF)
    queries = QKV + token * qkv_stride + head * HEAD_DIM + i
    low = tl.load(queries, mask=ok, other=0.0).to(tl.float32)
    high = tl.load(queries + HALF, mask=ok, other=0.0).to(tl.float32)
    tl.store(queries, (low * cosine - high * sine).to(QKV.dtype.element_ty), mask=ok)
    tl.store(queries + HALF, (high * cosine + low * sine).to(QKV.dtype.element_ty), mask=ok)

    head = tl.arange(0, KV_HEADS_PADDED)[:, None]
    ok = (head < KV_HEADS) & (i < HALF)
    keys = QKV + token * qkv_stride + (HEADS + head) * HEAD_DIM + i
    place = (slot // BLOCK_SIZE * 2 * KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
    to_keys = PAGES + place * HEAD_DIM + i
    low = tl.load(keys, mask=ok, other=0.0).to(tl.float32)
    high = tl.load(keys + HALF, mask=ok, other=0.0).to(tl.float32)
    tl.store(to_keys, (low * cosine - high * sine).to(PAGES.dtype.element_ty), mask=ok)
    tl.store(to_keys + HALF, (high * cosine + low * sine).to(PAGES.dtype.element_ty), mask=ok)

    values = keys + KV_HEADS * HEAD_DIM
    to_values = to_keys + KV_HEADS * BLOCK_SIZE * HEAD_DIM
    tl.store(to_values, tl.load(values, mask=ok, other=0.0), mask=ok)
    tl.store(to_values + HALF, tl.load(values + HALF, mask=ok, other=0.0), mask=ok)


@triton.jit
def add_rms_norm_kernel(  # type: ignore[no-untyped-def]
    RESIDUAL,
    DELTA,
    WEIGHT,
    OUT,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
):
    """See `add_rms_norm`; grid (rows)."""
    i = tl.arange(0, BLOCK)
    ok = i < SIZE
    row = tl.program_id(0).to(tl.int64) * SIZE
    x = tl.load(RESIDUAL + row + i, mask=ok, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x += tl.load(DELTA + row + i, mask=ok, other=0.0).to(tl.float32)
        rounded = x.to(RESIDUAL.dtype.element_ty)
        tl.store(RESIDUAL + row + i, rounded, mask=ok)
        x = rounded.to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x) / SIZE + eps)
    weight = tl.load(WEIGHT + i, mask=ok, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        weight += 1.0
    else:  # rounded before the weight is applied, as the models were trained
        x = x.to(OUT.dtype.element_ty).to(tl.float32)
    tl.store(OUT + row + i, (x * weight).to(OUT.dtype.element_ty), mask=ok)


@triton.jit
def gate_mul_kernel(  # type: ignore[no-untyped-def]
    GATE_UP, OUT, SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_GELU: tl.constexpr
):
    """See `silu_mul` and `gelu_mul`; grid (rows, blocks of a row)."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = i < SIZE
    gate = tl.load(GATE_UP + row * 2 * SIZE + i, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(GATE_UP + row * 2 * SIZE + SIZE + i, mask=ok, other=0.0).to(tl.float32)
    argument = gate
    if IS_GELU:
        argument = gate * (1.5957691216 + 0.0713548162 * gate * gate)  # 2 sqrt(2 / pi) (x + 0.044715 x^3)
        argument = tl.maximum(argument, -80.0)  # the exponential stays finite
    y = gate / (1.0 + tl.exp(-argument)) * up
    tl.store(OUT + row * SIZE + i, y.to(OUT.dtype.element_ty), mask=ok)


# -- launching -------------------------------------------------------------------------------------------------------


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run a kernel on the current stream; the one place through which all of them go."""
    kernel[grid](*args, **options, **COMPILE_OPTIONS)


@dataclass(frozen=True, slots=True)
class Heads:
    """What is compiled into the attention kernels."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    scale: float | None = None
    """factor of the scores; None: head_dim ** -0.5"""
    soft_cap: float | None = None
    """of the scores"""

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def group_padded(self) -> int:
        """Rows of the smallest tile that holds a group: tensor cores take no fewer than 16."""
        padded: int = triton.next_power_of_2(self.group)
        return max(16, padded)

    @property
    def is_wide(self) -> bool:
        """Whether a head takes twice the registers of the usual ones."""
        return self.head_dim > 128

    def prefill_rows(self, *, is_hopper: bool) -> int:
        """(token, query head) pairs of a tile of prefill attention."""
        return PREFILL_ROWS_HOPPER if is_hopper and not self.is_wide else PREFILL_ROWS

    @property
    def scale_log2(self) -> float:
        """Factor of the scores, for softmax in base 2."""
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        return math.log2(math.e) * scale

    @property
    def cap_log2(self) -> float:
        """The soft cap in base 2; 0: none."""
        return math.log2(math.e) * (self.soft_cap or 0.0)


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """What `decode` computes, on the device; see `paged_decode`."""

    table: Tensor  # [num_rows, max_blocks] int32
    work: Tensor  # [num_items, 6] int32
    num_work: Tensor  # [1] int32
    parts: Tensor  # [num_decodes + 1] int32, parts of each decoding row
    tokens: Tensor  # [num_decodes] int32, its token
    num_parts: int
    has_window: bool = False


def decode(
    heads: Heads,
    qkv: Tensor,  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], rotated
    pages: Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
    work: DecodeWork,
    out: Tensor,  # [num_tokens, num_heads * head_dim]; rows of decoding tokens are written
    num_programs: int,
    tma: bool,
) -> None:
    """Attention of the tokens that decode."""
    if tma:  # of the thread that launches
        triton.set_allocator(_descriptor_memory)
    shape = (work.num_parts, heads.num_kv_heads, heads.group)
    partial = torch.empty((*shape, heads.head_dim), dtype=torch.float32, device=qkv.device)
    lse = torch.empty(shape, dtype=torch.float32, device=qkv.device)
    sizes = {
        "KV_HEADS": heads.num_kv_heads,
        "GROUP": heads.group,
        "GROUP_PADDED": heads.group_padded,
        "HEAD_DIM": heads.head_dim,
    }
    launch(
        paged_decode,
        (num_programs,),
        *(qkv, pages, work.table, work.work, work.num_work, partial, lse),
        *(pages.numel() // heads.head_dim, heads.scale_log2, qkv.stride(0), work.table.stride(0)),
        BLOCK_SIZE=heads.block_size,
        TMA=tma,
        STAGES=_stages(DECODE_STAGES, pages),
        HAS_WINDOW=work.has_window,
        CAP_LOG2=heads.cap_log2,
        num_warps=8 if heads.is_wide else 4,
        **sizes,
    )
    launch(
        combine_parts,
        (len(work.tokens), heads.num_kv_heads),
        *(partial, lse, work.parts, work.tokens, out, out.stride(0)),
        num_warps=2,
        **sizes,
    )


def prefill(
    heads: Heads,
    qkv: Tensor,  # as of `decode`
    pages: Tensor,
    table: Tensor,  # [num_rows, max_blocks] int32
    work: Tensor,  # [num_items, 4] int32, see `paged_prefill`
    out: Tensor,  # as of `decode`; rows of the items' tokens are written
    rows: int,
    window: int | None = None,
) -> None:
    """Causal attention of the tokens of chunks, in tiles of so many (token, query head) pairs, to a window of keys."""
    launch(
        paged_prefill,
        (len(work) * heads.num_kv_heads,),
        *(qkv, pages, table, work, out),
        *(heads.scale_log2, qkv.stride(0), out.stride(0), table.stride(0)),
        KV_HEADS=heads.num_kv_heads,
        GROUP=heads.group,
        HEAD_DIM=heads.head_dim,
        BLOCK_SIZE=heads.block_size,
        ROWS=rows,
        STAGES=_stages(PREFILL_STAGES, pages),
        WINDOW=window or 0,
        CAP_LOG2=heads.cap_log2,
        num_warps=8,
    )


def store(
    heads: Heads,
    qkv: Tensor,  # as of `decode`, not rotated yet
    cosine: Tensor,  # [max_positions, head_dim / 2] fp32
    sine: Tensor,
    positions: Tensor,  # [num_tokens] int32
    kv_slots: Tensor,  # [num_tokens] int64
    pages: Tensor,
) -> None:
    """Rotate queries and keys, and write keys and values to the cache; the keys in `qkv` stay as they are."""
    launch(
        rope_and_store,
        (len(qkv),),
        *(qkv, cosine, sine, positions, kv_slots, pages, qkv.stride(0)),
        HEADS=heads.num_heads,
        HEADS_PADDED=triton.next_power_of_2(heads.num_heads),
        KV_HEADS=heads.num_kv_heads,
        KV_HEADS_PADDED=triton.next_power_of_2(heads.num_kv_heads),
        HEAD_DIM=heads.head_dim,
        BLOCK_SIZE=heads.block_size,
        num_warps=4,
    )


def add_rms_norm(
    residual: Tensor,  # [num_rows, size], contiguous
    delta: Tensor | None,  # like residual
    weight: Tensor,  # [size]
    eps: float,
    unit_offset: bool = False,
) -> Tensor:  # like residual
    """Add `delta` to `residual` in place, and normalise the sum; see `model.RMSNorm`."""
    out = torch.empty_like(residual)
    size = residual.shape[-1]
    launch(
        add_rms_norm_kernel,
        (len(residual),),
        *(residual, residual if delta is None else delta, weight, out, eps),
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        HAS_DELTA=delta is not None,
        UNIT_OFFSET=unit_offset,
        num_warps=8,
    )
    return out


def silu_mul(
    gate_up: Tensor,  # [num_rows, 2 * size], contiguous
) -> Tensor:  # [num_rows, size]
    """SiLU of the first half of every row, times the second."""
    return _gate_mul(gate_up, is_gelu=False)


def gelu_mul(
    gate_up: Tensor,  # [num_rows, 2 * size], contiguous
) -> Tensor:  # [num_rows, size]
    """GELU, in its form with tanh, of the first half of every row, times the second."""
    return _gate_mul(gate_up, is_gelu=True)


def _gate_mul(gate_up: Tensor, *, is_gelu: bool) -> Tensor:
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, size)
    grid = (num_rows, triton.cdiv(size, 1024))
    launch(gate_mul_kernel, grid, gate_up, out, SIZE=size, BLOCK=1024, IS_GELU=is_gelu, num_warps=4)
    return out


def _stages(stages: int, pages: Tensor) -> int:
    """Stages of a loop over pages, of which larger tiles leave shared memory for few."""
    tile_bytes = pages.shape[-2] * pages.shape[-1] * pages.element_size()
    return stages if pages.element_size() == 2 and tile_bytes <= MAX_STAGED_BYTES else 2


def _descriptor_memory(size: int, _alignment: int, _stream: int | None) -> Tensor:
    """Device memory in which a kernel builds its tensor descriptors."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
