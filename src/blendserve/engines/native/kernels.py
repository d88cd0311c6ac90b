"""The C kernels: built from `kernels.c` on first use by the system compiler, for the best instruction set of this CPU.

Without a compiler, or with `BLENDSERVE_KERNELS=none`, there are none, and torch does their work.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from blendserve.errors import ConfigError, ModelError
from blendserve.models import default_cache_dir

if TYPE_CHECKING:
    from blendserve.engines.native.model import RMSNorm
    from blendserve.engines.native.sampler import Draws

SOURCE = Path(__file__).with_name("kernels.c")
COMPILE_FLAGS = (
    *("-O3", "-fopenmp", "-fPIC", "-std=gnu11", "-Wno-psabi"),
    # Masked scores are -inf, so infinities must keep their meaning.
    *("-ffast-math", "-fno-finite-math-only"),
)
DEFINES: dict[torch.dtype, tuple[str, ...]] = {torch.float32: (), torch.bfloat16: ("-DELEMENT_BF16",)}
CHOICE_VARIABLE = "BLENDSERVE_KERNELS"
"""environment variable that names a variant, or `NO_KERNELS`; for tests and comparisons"""
NO_KERNELS = "none"
NO_WINDOW = 1 << 30
"""as the window of `paged_attention`: more keys than any sequence has"""


class Variant(NamedTuple):
    """An instruction set that the kernels are built for."""

    needs: frozenset[str]
    """flags of the CPU, by Linux's names"""
    flags: tuple[str, ...]
    """of the compiler"""


_AVX2 = Variant(frozenset({"avx2", "fma", "f16c", "bmi2"}), ("-mavx2", "-mfma", "-mf16c", "-mbmi2"))
_AVX512_PARTS = ("f", "bw", "cd", "dq", "vl")
_AVX512 = Variant(
    _AVX2.needs | {f"avx512{part}" for part in _AVX512_PARTS},
    (*_AVX2.flags, *(f"-mavx512{part}" for part in _AVX512_PARTS), "-mprefer-vector-width=512"),
)
VARIANTS = {
    "avx512_bf16": Variant(_AVX512.needs | {"avx512_bf16"}, (*_AVX512.flags, "-mavx512bf16")),
    "avx512": _AVX512,
    "avx2": _AVX2,
    "portable": Variant(frozenset(), ()),
}
"""the best first; portable is what the compiler does untold: SSE2 on x86-64, NEON on AArch64"""


class Shape(ctypes.Structure):
    """`Shape` of kernels.c."""

    _fields_ = tuple(
        (name, ctypes.c_int32)
        for name in ("num_heads", "num_kv_heads", "head_dim", "block_size", "tokens_per_item", "num_threads")
    )


class Step(ctypes.Structure):
    """`Step` of kernels.c."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("num_tokens", "num_items", "max_blocks")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("positions", "kv_slots", "query_starts", "context_lens", "block_tables"),
                *("item_rows", "item_tokens"),
            )
        ),
    )


class PackedLinear(NamedTuple):
    """A weight as `linear` of kernels.c wants it."""

    weight: Tensor
    """[num_panels, num_inputs, panel]"""
    bias: Tensor
    """[num_panels * panel], zeros where there is none"""
    num_outputs: int


class Kernels:
    """The kernels for tensors of one dtype; implements `model.LayerOps` and `sampler.TokenOps`.

    Tensors are contiguous, on the CPU and of that dtype unless said otherwise.

    Args:
        library: the shared library.
        variant: name of the instruction set.
    """

    def __init__(self, library: ctypes.CDLL, variant: str) -> None:
        self.variant = variant
        pointer, size, shape, step = (
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.POINTER(Shape),
            ctypes.POINTER(Step),
        )
        arguments = {
            "rope_and_store": [shape, step, *[pointer] * 5],
            "paged_attention": [shape, step, *[ctypes.c_float] * 2, ctypes.c_int32, *[pointer] * 4],
            "add_rms_norm": [*[pointer] * 4, size, size, ctypes.c_float, ctypes.c_int, ctypes.c_int],
            "silu_mul": [pointer, pointer, size, size, ctypes.c_int],
            "gelu_mul": [pointer, pointer, size, size, ctypes.c_int],
            "argmax": [*[pointer] * 4, size, size, ctypes.c_int],
            "draw": [*[pointer] * 10, size, size, ctypes.c_int],
        }
        if hasattr(library, "linear"):  # in fp32
            arguments["pack_weight"] = [pointer, pointer, size, size, ctypes.c_int]
            arguments["linear"] = [*[pointer] * 4, *[size] * 3, ctypes.c_int]
            self._panel = ctypes.c_int32.in_dll(library, "panel").value
        for name, types in arguments.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, None
        self.rope_and_store = library.rope_and_store
        self.paged_attention = library.paged_attention
        self._library = library

    def pack(
        self,
        weight: Tensor,  # [num_outputs, num_inputs]
        bias: Tensor | None,  # [num_outputs]
    ) -> PackedLinear:
        """A weight and a bias for `linear`, in fp32."""
        num_outputs, num_inputs = weight.shape
        num_panels = -(-num_outputs // self._panel)
        packed = torch.empty(num_panels, num_inputs, self._panel)
        weight = weight.contiguous()
        self._library.pack_weight(
            *(weight.data_ptr(), packed.data_ptr(), *weight.shape), torch.get_num_threads()
        )
        padded = torch.zeros(num_panels * self._panel)
        if bias is not None:
            padded[:num_outputs] = bias
        return PackedLinear(packed, padded, num_outputs)

    def linear(
        self,
        packed: PackedLinear,
        x: Tensor,  # [num_rows, num_inputs]
        out: Tensor | None = None,  # [num_rows, num_outputs]
    ) -> Tensor:  # [num_rows, num_outputs]
        """`x @ weight.T + bias`, in `out` where that is given."""
        num_inputs = packed.weight.shape[1]
        x = x.contiguous()
        assert x.dtype == torch.float32
        assert x.shape[1:] == (num_inputs,)
        output = x.new_empty(len(x), packed.num_outputs) if out is None else out
        assert output.is_contiguous()
        assert output.shape == (len(x), packed.num_outputs)
        self._library.linear(
            *(tensor.data_ptr() for tensor in (x, packed.weight, packed.bias, output)),
            *(len(x), packed.num_outputs, num_inputs),
            torch.get_num_threads(),
        )
        return output

    def add_rms_norm(self, residual: Tensor, delta: Tensor | None, norm: RMSNorm) -> Tensor:
        """See `LayerOps.add_rms_norm`."""
        assert residual.is_contiguous()
        assert delta is None or delta.is_contiguous()
        output = torch.empty_like(residual)
        self._library.add_rms_norm(
            residual.data_ptr(),
            None if delta is None else delta.data_ptr(),
            norm.weight.data_ptr(),
            output.data_ptr(),
            *residual.shape,
            norm.eps,
            norm.unit_offset,
            torch.get_num_threads(),
        )
        return output

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `LayerOps.silu_mul`."""
        return self._gate(self._library.silu_mul, gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """See `LayerOps.gelu_mul`."""
        return self._gate(self._library.gelu_mul, gate_up)

    @staticmethod
    def _gate(kernel: Callable[..., None], gate_up: Tensor) -> Tensor:
        assert gate_up.is_contiguous()
        num_rows, size = len(gate_up), gate_up.shape[1] // 2
        output = gate_up.new_empty(num_rows, size)
        kernel(gate_up.data_ptr(), output.data_ptr(), num_rows, size, torch.get_num_threads())
        return output

    def highest(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `TokenOps.highest`."""
        token_ids = torch.empty(len(logits), dtype=torch.int64)
        is_valid = torch.empty(len(logits), dtype=torch.bool)
        maxima = torch.empty(len(logits), dtype=torch.float32)
        outputs = (tensor.data_ptr() for tensor in (token_ids, is_valid, maxima))
        assert logits.is_contiguous()
        self._library.argmax(logits.data_ptr(), *outputs, *logits.shape, torch.get_num_threads())
        return token_ids, is_valid, maxima

    def draw(self, logits: Tensor, maxima: Tensor, draws: Draws) -> Tensor:
        """See `TokenOps.draw`."""
        assert logits.is_contiguous()
        num_threads = torch.get_num_threads()
        token_ids = torch.empty(len(draws.places), dtype=torch.int64)
        scratch = torch.empty(num_threads, draws.vocab_size, dtype=torch.int64)
        columns = (draws.places, draws.temperature, draws.uniform, draws.top_k, draws.top_p, draws.min_p)
        self._library.draw(
            *(logits.data_ptr(), maxima.data_ptr()),
            *(column.ctypes.data for column in columns),
            *(scratch.data_ptr(), token_ids.data_ptr()),
            *(len(token_ids), draws.vocab_size, num_threads),
        )
        return token_ids


def variants_of_this_cpu() -> list[str]:
    """Names of the variants that can run here, the best first."""
    flags = _cpu_flags()
    return [name for name, variant in VARIANTS.items() if variant.needs <= flags]


def load_kernels(dtype: torch.dtype) -> Kernels | None:
    """The kernels for tensors of `dtype`; None, after one warning, where they cannot be built.

    Raises:
        ConfigError: the environment asks for a variant that does not exist, or that this CPU cannot run.
    """
    return _load(dtype, os.environ.get(CHOICE_VARIABLE) or None)


@functools.cache
def _load(dtype: torch.dtype, choice: str | None) -> Kernels | None:
    if dtype not in DEFINES or choice == NO_KERNELS:
        return None
    names = variants_of_this_cpu()
    if choice is not None:
        if choice not in names:
            found = "this CPU cannot run it" if choice in VARIANTS else "there is no such variant"
            raise ConfigError(
                f"{CHOICE_VARIABLE}={choice}: {found}; use one of {', '.join((*names, NO_KERNELS))}, or unset it"
            )
        names = [choice]
    complaints = []
    for name in names:  # an old compiler may not know the newest instructions
        try:
            return Kernels(ctypes.CDLL(str(_build(name, dtype))), name)
        except (OSError, subprocess.SubprocessError, ModelError) as error:
            complaints.append(str(getattr(error, "stderr", None) or error).strip())
    warnings.warn(
        "the native engine falls back to torch, which is several times slower at attention, because its C kernels "
        f"could not be built; install a C compiler or name one in $CC ({complaints[-1]})",
        RuntimeWarning,
        stacklevel=3,
    )
    return None


def compiler() -> list[str]:
    """The C compiler, as the start of a command."""
    return shlex.split(os.environ.get("CC") or "cc")


def compile_flags(variant: str, dtype: torch.dtype) -> tuple[str, ...]:
    """What the compiler is told for a variant."""
    return (*COMPILE_FLAGS, *VARIANTS[variant].flags, *DEFINES[dtype])


def _build(variant: str, dtype: torch.dtype) -> Path:
    """Path of the shared library, compiled now unless the cache has it."""
    flags = compile_flags(variant, dtype)
    version = _run([*compiler(), "--version"])
    openmp = _openmp_runtime()
    key = "\n".join((SOURCE.read_text(), version, *flags, str(openmp), platform.machine()))
    library = default_cache_dir() / f"kernels-{hashlib.sha256(key.encode()).hexdigest()[:20]}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        compiled, linked = Path(folder, "kernels.o"), Path(folder, "kernels.so")
        _run([*compiler(), *flags, "-c", str(SOURCE), "-o", str(compiled)])
        # Linked apart from -ffast-math, with which GCC adds start-up code that flushes denormals process-wide.
        _run([*compiler(), "-shared", str(compiled), str(openmp or "-fopenmp"), "-lm", "-o", str(linked)])
        linked.replace(library)
    return library


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _openmp_runtime() -> Path | None:
    """The OpenMP library torch runs on; a second one would bring its own threads and fight for the cores."""
    for line in _read("/proc/self/maps").splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith(("libgomp", "libiomp5", "libomp.so")):
            return path
    return None


def _cpu_flags() -> frozenset[str]:
    """What the CPU can do, by Linux's names; nothing where Linux does not say."""
    lines = _read("/proc/cpuinfo").splitlines()
    flags = next((line for line in lines if line.startswith("flags")), ":")
    return frozenset(flags.split(":", 1)[1].split())


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
