"""The kernels that find out about a GPU, without one: the compilers take them."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs blendserve[cuda]")

from blendserve.engines.native import triton_probes
from tests.unit.native.test_triton import Launches, compiled


def test_compiled_for_hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Launches([])
    monkeypatch.setattr(triton_probes, "launch", recorded)
    meta = torch.device("meta")
    source = torch.empty(1 << 20, dtype=torch.bfloat16, device=meta)
    sums = torch.empty(8, dtype=torch.float32, device=meta)
    assert triton_probes.read(source, sums, 8) == source.nbytes
    triton_probes.spin(*triton_probes.spin_buffers(8, meta), 1000)
    reports = [compiled(kernel, args, options, 90, tmp_path) for kernel, args, options in recorded.calls]
    assert [report.spilled_bytes for report in reports] == [0, 0]
    assert "%smid" in reports[1].ptx
