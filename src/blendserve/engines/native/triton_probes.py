"""Triton kernels that find out about a GPU: what its memory gives to so many multiprocessors, and which those are."""

# No `from __future__ import annotations`: Triton looks at the annotations themselves.
import torch
import triton
import triton.language as tl
from torch import Tensor

from blendserve.engines.native.triton_kernels import launch

READ_BLOCK = 4096
"""elements that a program reads at a time"""
SPIN_BLOCK = 128


@triton.jit
def read_kernel(X, OUT, num_blocks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Read X once and do next to nothing with it; programs share its blocks."""
    i = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        acc += tl.load(X + tl.cast(block, tl.int64) * BLOCK + i).to(tl.float32)
    tl.store(OUT + tl.program_id(0), tl.sum(acc))


@triton.jit
def spin_kernel(OUT, SINK, rounds, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The multiprocessor of each program, after so much arithmetic that programs spread over all there are."""
    program = tl.program_id(0)
    sm = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    x = tl.zeros([BLOCK], tl.float32) + program
    for _ in range(rounds):
        x = x * 1.0000001 + 1e-7
    tl.store(OUT + program, sm)
    tl.store(SINK + program * BLOCK + tl.arange(0, BLOCK), x)


def read(
    source: Tensor,  # contiguous, of any shape
    sums: Tensor,  # [at least num_programs] fp32
    num_programs: int,
) -> int:
    """Read a tensor; returns the bytes that were."""
    num_blocks = source.numel() // READ_BLOCK
    launch(read_kernel, (num_programs,), source, sums, num_blocks, BLOCK=READ_BLOCK, num_warps=4)
    return num_blocks * READ_BLOCK * source.element_size()


def spin(
    sms: Tensor,  # [num_programs] int32, written: the multiprocessor of each program
    sink: Tensor,  # [num_programs * SPIN_BLOCK] fp32, written
    rounds: int,
) -> None:
    """Keep multiprocessors busy with arithmetic alone."""
    launch(spin_kernel, (len(sms),), sms, sink, rounds, BLOCK=SPIN_BLOCK, num_warps=4)


def spin_buffers(num_programs: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """What `spin` writes to."""
    sms = torch.full((num_programs,), -1, dtype=torch.int32, device=device)
    return sms, torch.empty(num_programs * SPIN_BLOCK, dtype=torch.float32, device=device)
