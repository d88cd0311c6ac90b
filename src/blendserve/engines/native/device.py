"""Tensors to and from a device, without waiting for it; streams on parts of one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 256
"""bytes; of every array in a packed buffer, so that kernels may load in whole words"""


def upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays on `device`, by one copy in the current stream. On a CPU they share memory with the arrays."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    packed = pack(arrays, pinned=device.type == "cuda")
    return unpack(packed.to(device, non_blocking=True), arrays)


def pack(arrays: Sequence[NDArray[Any]], *, pinned: bool = False) -> Tensor:
    """All arrays in one buffer of bytes; `pinned` memory can be copied while the host goes on."""
    size = sum(_padded(array.nbytes) for array in arrays)
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    target, start = packed.numpy(), 0
    for array in arrays:
        target[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        start += _padded(array.nbytes)
    return packed


def unpack(packed: Tensor, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
    """Views of a packed buffer, with the types and shapes of the arrays that are in it."""
    views, start = [], 0
    for array in arrays:
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        views.append(packed[start : start + array.nbytes].view(dtype).view(array.shape))
        start += _padded(array.nbytes)
    return views


class Download:
    """Copies of tensors on their way to the host; the copy is made in the current stream."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._event: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in tensors):
            pinned = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]
            self._tensors = [
                target.copy_(tensor, non_blocking=True)
                for target, tensor in zip(pinned, tensors, strict=True)
            ]
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> list[Tensor]:
        """The tensors on the host, once they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


@functools.cache
def split_gpu(device: int, num_sms: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream, int]:
    """Streams on disjoint multiprocessors (SMs) of a GPU, for the life of the process.

    Returns:
        A stream on `num_sms` of them, which the driver rounds up; one on all others; how many the first has.

    Raises:
        ImportError: cuda-bindings is not installed.
        RuntimeError: the driver cannot do it.
    """
    from cuda.bindings import driver

    torch.cuda.synchronize(device)
    handle = _returned(driver.cuDeviceGet(device))
    sm_resource = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    whole = _returned(driver.cuDeviceGetDevResource(handle, sm_resource))
    # One split for both: each would start from the whole device, and two could overlap.
    groups, _, rest = _returned(driver.cuDevSmResourceSplitByCount(1, whole, 0, num_sms))
    streams = []
    for resource in (groups[0], rest):
        description = _returned(driver.cuDevResourceGenerateDesc([resource], 1))
        default_stream = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = _returned(driver.cuGreenCtxCreate(description, handle, default_stream))
        non_blocking = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        stream = _returned(driver.cuGreenCtxStreamCreate(context, non_blocking, 0))
        streams.append(torch.cuda.ExternalStream(int(stream), device))  # type: ignore[no-untyped-call]
    return streams[0], streams[1], int(groups[0].sm.smCount)


def _returned(result: tuple[Any, ...]) -> Any:
    """What a function of the driver returned behind its error code."""
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"the CUDA driver reports {error!r}")
    return values[0] if len(values) == 1 else values


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
