"""The native engine: a Llama-type model on torch, driven step by step by BlendServe's scheduler.

Importing this package does not import torch: planning needs to know the engine's dtype, not the engine.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from blendserve.engines import has_nvidia_gpu
from blendserve.errors import ConfigError

if TYPE_CHECKING:
    from blendserve.cost_model import CostModel
    from blendserve.engines import Device, Dtype, EngineConfig
    from blendserve.engines.native.executor import TorchExecutor
    from blendserve.engines.native.output import Detokenizer

__all__ = ["check_tensor_parallel_size", "dtype_bytes", "open_executor", "resolve_device", "resolve_dtype"]


def resolve_device(device: Device) -> Literal["cpu", "cuda"]:
    """Where the model runs; "auto" is an NVIDIA GPU where there are one and Triton, which torch for CUDA brings."""
    if device == "auto":
        return "cuda" if has_nvidia_gpu() and importlib.util.find_spec("triton") is not None else "cpu"
    return device


def resolve_dtype(dtype: Dtype, device: Device = "cpu") -> Literal["float32", "bfloat16"]:
    """The dtype of weights, KV cache and computation; "auto" is bfloat16 on a GPU and on CPUs that multiply it."""
    if dtype == "auto":
        return "bfloat16" if resolve_device(device) == "cuda" or _cpu_has_bf16() else "float32"
    return dtype


def dtype_bytes(dtype: Dtype, device: Device = "cpu") -> float:
    """Bytes of one weight or one KV element."""
    return 2.0 if resolve_dtype(dtype, device) == "bfloat16" else 4.0


def check_tensor_parallel_size(size: int, num_heads: int, num_kv_heads: int, intermediate_size: int) -> None:
    """Make sure that a model can be divided among `size` ranks: all have as much of it as the others.

    Raises:
        ConfigError: it cannot; names the sizes that work.
    """

    def works(size: int) -> bool:
        kv_heads_divide = num_kv_heads % size == 0 or size % num_kv_heads == 0
        return num_heads % size == 0 and kv_heads_divide and intermediate_size % size == 0

    if not works(size):
        possible = ", ".join(str(n) for n in range(1, num_heads + 1) if works(n))
        raise ConfigError(
            f"--tensor-parallel-size {size} does not divide the model's {num_heads} attention heads, {num_kv_heads} "
            f"KV heads and {intermediate_size} columns of its MLP evenly; use one of {possible}"
        )


def open_executor(
    config: EngineConfig,
    folder: Path,
    tokenizer: Detokenizer | None,
    cost_model: CostModel,
    max_model_len: int | None = None,
) -> TorchExecutor:
    """Load the model in `folder` and allocate its KV cache.

    Raises:
        ConfigError: the engine cannot run this model with these options.
    """
    # How long idle OpenMP threads spin; read when torch loads its runtime. The default of some milliseconds keeps the
    # cores from the very threads that are waited for as soon as anything else runs; the gaps of a step are shorter.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    from blendserve.engines.native.executor import TorchExecutor

    size, device = config.tensor_parallel_size, resolve_device(config.device)
    num_threads = config.num_threads
    if size > 1 and num_threads is None and device == "cpu":
        import torch

        num_threads = max(1, torch.get_num_threads() // size)
    open_rank = functools.partial(
        TorchExecutor,
        folder,
        cost_model=cost_model,
        device=device,
        dtype=resolve_dtype(config.dtype, config.device),
        load_format=config.load_format,
        kv_cache_memory=config.kv_cache_memory,
        block_size=cost_model.hardware.block_size,
        max_model_len=max_model_len,
        num_threads=num_threads,
        attention_backend=config.attention_backend,
        overlap=config.overlap,
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
    )
    if size == 1:
        return open_rank(tokenizer=tokenizer)
    from blendserve.engines.native.parallel import open_parallel

    return open_parallel(open_rank, tokenizer, size=size, device=device)


@functools.cache
def _cpu_has_bf16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags
