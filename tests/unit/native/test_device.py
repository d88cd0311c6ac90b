"""Tensors to and from a device."""

import numpy as np
import torch

from blendserve.engines.native.device import ALIGNMENT, Download, pack, unpack, upload

ARRAYS = (
    np.arange(7, dtype=np.int32),
    np.arange(12, dtype=np.int64).reshape(3, 4).T,
    np.zeros((0, 4), dtype=np.int32),
    np.linspace(0, 1, 5)[:, None],
    np.array([True, False, True]),
)


def test_arrays_come_out_of_a_packed_buffer_as_they_went_in() -> None:
    packed = pack(ARRAYS)
    for view, array in zip(unpack(packed, ARRAYS), ARRAYS, strict=True):
        assert view.shape == array.shape
        assert (view.numpy() == array).all()
        assert (view.data_ptr() - packed.data_ptr()) % ALIGNMENT == 0 or not len(array)


def test_a_cpu_shares_its_memory() -> None:
    array = np.arange(3)
    [tensor] = upload([array], torch.device("cpu"))
    array[1] = 7
    assert tensor.tolist() == [0, 7, 2]
    assert Download([tensor]).wait()[0] is tensor


def test_another_device_gets_types_and_shapes() -> None:
    for tensor, array in zip(upload(ARRAYS, torch.device("meta")), ARRAYS, strict=True):
        assert (tensor.shape, tensor.dtype) == (array.shape, torch.from_numpy(array).dtype)
