"""The Triton kernels without a GPU: their results in the interpreter, and what the compilers make of them."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs blendserve[cuda]")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from blendserve.engines.native import triton_kernels
from blendserve.engines.native.attention import StepLayout
from blendserve.engines.native.triton_backend import decode_work, prefill_work
from tests.unit.native.test_attention import make_batch

INTERPRETED = Path(__file__).with_name("triton_interpreted.py")
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}
"""shared memory of a block, by compute capability"""
REGISTERS_PER_SM = 65536


def test_in_the_interpreter() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(INTERPRETED)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=INTERPRETED.parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    assert re.search(r"\d+ passed", result.stdout)


class Report(NamedTuple):
    """What the compilers say about a kernel."""

    registers: int
    """of a thread"""
    spilled_bytes: int
    """of a thread, to its stack"""
    shared_bytes: int
    num_warps: int
    ptx: str

    @property
    def blocks_per_sm(self) -> int:
        return REGISTERS_PER_SM // (self.registers * 32 * self.num_warps)


class Launches(NamedTuple):
    """Calls of kernels, instead of running them."""

    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        assert all(size > 0 for size in grid)
        self.calls.append((kernel, args, options))


def compiled(
    kernel: Any, args: tuple[Any, ...], options: dict[str, Any], capability: int, folder: Path
) -> Report:
    """Compile a call as Triton would at run time: for its types, with what is a multiple of 16 known to be one."""
    signature, constants, attributes = {}, {}, {}
    values = dict(zip(kernel.arg_names, args, strict=False)) | options | triton_kernels.COMPILE_OPTIONS
    for index, parameter in enumerate(kernel.params):
        value = values.pop(parameter.name)
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = f"*{triton_name(value.dtype)}"
            is_multiple = True
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            is_multiple = type(value) is int and value % 16 == 0 and not parameter.do_not_specialize
        if is_multiple:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=values)
    cubin = folder / f"{kernel.__name__}.cubin"
    cubin.write_bytes(binary.asm["cubin"])
    command = [str(CUOBJDUMP), "--dump-resource-usage", str(cubin)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", said)
    assert usage is not None, said
    registers, stack, local = map(int, usage.groups())
    metadata = binary.metadata
    return Report(registers, stack + local, metadata.shared, metadata.num_warps, binary.asm["ptx"])


def triton_name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}[dtype]


def launches(
    heads: triton_kernels.Heads,
    monkeypatch: pytest.MonkeyPatch,
    capability: int,
    *,
    tma: bool,
    window: int | None = None,
) -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """The calls of a step of a model of 4096 dimensions, on tensors that have no memory."""

    def empty(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    recorded = Launches([])
    monkeypatch.setattr(triton_kernels, "launch", recorded)
    monkeypatch.setattr(triton, "set_allocator", lambda _allocator: None)
    int32 = {"dtype": torch.int32}
    qkv = empty(512, (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim)
    pages = empty(100, 2, heads.num_kv_heads, heads.block_size, heads.head_dim)
    table, out = empty(16, 33, **int32), empty(512, heads.num_heads * heads.head_dim)
    work = triton_kernels.DecodeWork(
        *(table, empty(40, 6, **int32), empty(1, **int32), empty(17, **int32), empty(16, **int32)),
        *(40, window is not None),
    )
    triton_kernels.decode(heads, qkv, pages, work, out, 264, tma)
    if not tma:
        rope = empty(8192, heads.head_dim // 2, dtype=torch.float32)
        slots = empty(512, dtype=torch.int64)
        rows = heads.prefill_rows(is_hopper=capability == 90)
        triton_kernels.prefill(heads, qkv, pages, table, empty(9, 4, **int32), out, rows, window)
        triton_kernels.store(heads, qkv, rope, rope, empty(512, **int32), slots, pages)
        triton_kernels.add_rms_norm(empty(512, 4096), empty(512, 4096), empty(4096), 1e-5)
        triton_kernels.silu_mul(empty(512, 2 * 14336))
        triton_kernels.gelu_mul(empty(512, 2 * 14336))
    yield from recorded.calls


@pytest.mark.parametrize(
    ("capability", "tma"), [(80, False), (90, False), (90, True)], ids=["sm_80", "sm_90", "sm_90-tma"]
)
@pytest.mark.parametrize("sizes", [(32, 8, 128), (14, 2, 64)], ids=["llama-3.1-8b", "qwen2.5-0.5b"])
def test_compiled(
    sizes: tuple[int, int, int],
    capability: int,
    tma: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No spills, and room on an SM for as many blocks as are meant to be there."""
    heads = triton_kernels.Heads(*sizes, block_size=64)
    reports = {}
    for kernel, args, options in launches(heads, monkeypatch, capability, tma=tma):
        report = compiled(kernel, args, options, capability, tmp_path)
        print(f"{kernel.__name__} sm_{capability} {sizes} {report[:4]}")
        reports[kernel.__name__] = report
        assert report.spilled_bytes == 0, kernel.__name__
        assert report.shared_bytes <= SHARED_BYTES[capability], kernel.__name__
    decode = reports["paged_decode"]
    tile = 64 * heads.head_dim * 2
    assert 4 * tile <= decode.shared_bytes, "two tiles of keys and two of values are to be in flight"
    per_sm = triton_kernels.DECODE_PROGRAMS_PER_SM
    assert per_sm * decode.shared_bytes <= SHARED_BYTES[capability]
    assert per_sm <= decode.blocks_per_sm
    assert ("cp.async.bulk.tensor" in decode.ptx) == tma
    if not tma:
        product = "wgmma" if capability == 90 else "mma.sync"
        assert product in reports["paged_prefill"].ptx
        assert reports["paged_prefill"].blocks_per_sm >= 1


@pytest.mark.parametrize(
    ("capability", "tma"), [(80, False), (90, False), (90, True)], ids=["sm_80", "sm_90", "sm_90-tma"]
)
def test_compiled_for_gemma(
    capability: int, tma: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of 256, windows and caps fit a block's shared memory and its registers."""
    heads = triton_kernels.Heads(8, 4, 256, block_size=64, scale=1 / 16, soft_cap=50.0)
    for kernel, args, options in launches(heads, monkeypatch, capability, tma=tma, window=4096):
        report = compiled(kernel, args, options, capability, tmp_path)
        print(f"{kernel.__name__} sm_{capability} {report[:4]}")
        assert report.spilled_bytes == 0, kernel.__name__
        assert report.shared_bytes <= SHARED_BYTES[capability], kernel.__name__


def test_work_of_no_rows() -> None:
    """Steps without decodes, or without chunks."""
    for num_computed, num_tokens in (([5], [1]), ([0], [9])):
        layout = StepLayout.from_batch(make_batch(num_computed, num_tokens, 64), 64)
        work, parts, tokens = decode_work(layout, 256)
        is_decode = num_tokens == [1]
        assert (len(work), len(tokens), parts.tolist()) == (is_decode, is_decode, [0, 1][: 1 + is_decode])
        assert len(prefill_work(layout, 32)) == (not is_decode)
        assert work.dtype == np.int32
