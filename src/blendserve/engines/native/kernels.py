"""Builds `kernels.c` on first use with the system C compiler and loads it; without a compiler there are no kernels."""

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
from pathlib import Path

import torch

from blendserve.errors import ModelError
from blendserve.models import default_cache_dir

SOURCE = Path(__file__).with_name("kernels.c")
COMPILE_FLAGS = (
    *("-O3", "-march=native", "-fopenmp", "-fPIC", "-std=gnu11"),
    # Masked scores are -inf, so infinities must keep their meaning.
    *("-ffast-math", "-fno-finite-math-only"),
)
DEFINES: dict[torch.dtype, tuple[str, ...]] = {torch.float32: (), torch.bfloat16: ("-DELEMENT_BF16",)}


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


@functools.cache
def load_kernels(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The compiled kernels for tensors of `dtype`; None, after one warning, where they cannot be built."""
    if dtype not in DEFINES:
        return None
    try:
        library = ctypes.CDLL(str(_build(DEFINES[dtype])))
    except (OSError, subprocess.SubprocessError, ModelError) as error:
        detail = getattr(error, "stderr", None) or error
        warnings.warn(
            "attention falls back to torch, which is several times slower, because its C kernels could not be "
            f"built; install a C compiler or name one in $CC ({str(detail).strip()})",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    pointer, shape, step = ctypes.c_void_p, ctypes.POINTER(Shape), ctypes.POINTER(Step)
    library.rope_and_store.argtypes = [shape, step, *[pointer] * 5]
    library.rope_and_store.restype = None
    library.paged_attention.argtypes = [shape, step, ctypes.c_float, *[pointer] * 4]
    library.paged_attention.restype = None
    return library


def _build(defines: tuple[str, ...]) -> Path:
    """Path of the shared library, compiled now unless the cache has it."""
    compiler = shlex.split(os.environ.get("CC") or "cc")
    version = _run([*compiler, "--version"])
    openmp = _openmp_runtime()
    key = "\n".join((SOURCE.read_text(), version, *COMPILE_FLAGS, *defines, str(openmp), _cpu_flags()))
    library = default_cache_dir() / f"kernels-{hashlib.sha256(key.encode()).hexdigest()[:20]}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        compiled, linked = Path(folder, "kernels.o"), Path(folder, "kernels.so")
        _run([*compiler, *COMPILE_FLAGS, *defines, "-c", str(SOURCE), "-o", str(compiled)])
        # Linked apart from -ffast-math, with which GCC adds start-up code that flushes denormals process-wide.
        _run([*compiler, "-shared", str(compiled), str(openmp or "-fopenmp"), "-lm", "-o", str(linked)])
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


def _cpu_flags() -> str:
    """What -march=native depends on: a home directory may be shared by machines of several kinds."""
    flags = [line for line in _read("/proc/cpuinfo").splitlines() if line.startswith(("flags", "Features"))]
    return flags[0] if flags else platform.processor()


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
