"""The C kernels of a layer against torch, in every variant that this CPU can run."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blendserve.engines.native import kernels
from blendserve.engines.native.model import RMSNorm, TorchOps

DTYPES = [torch.float32, torch.bfloat16]
ROWS = [1, 3, 70]
SIZES = [576, 96, 23]
"""the last is no multiple of any vector"""


@pytest.fixture(params=kernels.variants_of_this_cpu())
def ops(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> dict[torch.dtype, kernels.Kernels]:
    monkeypatch.setenv(kernels.CHOICE_VARIABLE, request.param)
    found = {dtype: kernels.load_kernels(dtype) for dtype in DTYPES}
    assert all(loaded is not None and loaded.variant == request.param for loaded in found.values())
    return found


def close(found: Tensor, expected: Tensor) -> None:
    """To within the last bits of the dtype: sums are made in another order."""
    torch.testing.assert_close(
        found, expected, **({} if found.dtype == torch.float32 else {"rtol": 1.6e-2, "atol": 1e-5})
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("unit_offset", [False, True])
def test_add_rms_norm(
    ops: dict[torch.dtype, kernels.Kernels], unit_offset: bool, num_rows: int, size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    residual, delta = (torch.randn(num_rows, size).to(dtype) for _ in range(2))
    norm = RMSNorm(torch.randn(size).to(dtype), 1e-5, unit_offset)
    ours, reference = residual.clone(), residual.clone()
    close(ops[dtype].add_rms_norm(ours, delta, norm), TorchOps().add_rms_norm(reference, delta, norm))
    assert torch.equal(ours, reference), "the sum that the next layer starts from is rounded alike"
    close(ops[dtype].add_rms_norm(ours, None, norm), TorchOps().add_rms_norm(reference, None, norm))
    assert torch.equal(ours, reference)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul"])
def test_activations(
    ops: dict[torch.dtype, kernels.Kernels], name: str, num_rows: int, size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(num_rows, 2 * size) * 20).to(dtype)
    gate_up[0, :4] = torch.tensor([0.0, -200.0, 200.0, -3e38])
    # torch rounds to bf16 before it multiplies; ours has one rounding less.
    expected = getattr(TorchOps(), name)(gate_up.float()).to(dtype)
    close(getattr(ops[dtype], name)(gate_up), expected)


def test_what_is_not_a_number_stays_so(ops: dict[torch.dtype, kernels.Kernels]) -> None:
    """And in its row."""
    gate_up = torch.ones(2, 64)
    gate_up[0, 40] = torch.nan
    assert ops[torch.float32].silu_mul(gate_up).isnan().sum(1).tolist() == [1, 0]
    assert ops[torch.float32].gelu_mul(gate_up).isnan().sum(1).tolist() == [1, 0]
    norm = RMSNorm(torch.ones(64), 1e-5)
    normalised = ops[torch.float32].add_rms_norm(gate_up[:, :64].contiguous(), None, norm)
    assert normalised.isnan().all(1).tolist() == [True, False]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others(
    ops: dict[torch.dtype, kernels.Kernels], dtype: torch.dtype
) -> None:
    x = torch.randn(300, 128).to(dtype)
    norm = RMSNorm(torch.randn(64).to(dtype), 1e-6)
    together = ops[dtype].silu_mul(x)
    normalised = ops[dtype].add_rms_norm(together.clone(), None, norm)
    for row in (0, 150, 299):
        alone = ops[dtype].silu_mul(x[row : row + 1])
        assert torch.equal(alone, together[row : row + 1])
        assert torch.equal(ops[dtype].add_rms_norm(alone, None, norm), normalised[row : row + 1])


@pytest.mark.parametrize(
    ("num_outputs", "num_inputs"),
    [(960, 576), (576, 1536), (17, 5), (1, 1), (100, 513), (8, 1031)],
)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7, 64, 131])
@pytest.mark.parametrize("num_threads", [1, 2, 6])
def test_products(
    ops: dict[torch.dtype, kernels.Kernels],
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    num_threads: int,
) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(num_rows, num_inputs), torch.randn(num_outputs, num_inputs)
    bias = torch.randn(num_outputs)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for some_bias in (None, bias):
            found = ops[torch.float32].linear(ops[torch.float32].pack(weight, some_bias), x)
            exact = F.linear(x.double(), weight.double(), None if some_bias is None else bias.double())
            bound = F.linear(x.double().abs(), weight.double().abs(), bias.double().abs()) * 2e-6
            assert ((found - exact).abs() <= bound).all()
    finally:
        torch.set_num_threads(before)


def test_products_go_where_they_are_wanted(ops: dict[torch.dtype, kernels.Kernels]) -> None:
    """And nowhere else: the last panel of a weight is wider than its outputs."""
    weight, x = torch.randn(21, 40), torch.randn(7, 40)
    packed = ops[torch.float32].pack(weight.t().contiguous().t(), None)
    around = torch.full((9, 21), 5.0)
    found = ops[torch.float32].linear(packed, x.t().contiguous().t(), around[1:8])
    assert found.data_ptr() == around[1].data_ptr()
    torch.testing.assert_close(found, F.linear(x, weight), atol=1e-4, rtol=1e-4)
    assert (around[[0, 8]] == 5.0).all()
    assert ops[torch.float32].linear(packed, x[:0]).shape == (0, 21)


def test_a_row_of_a_product_does_not_depend_on_the_others(ops: dict[torch.dtype, kernels.Kernels]) -> None:
    """Bit by bit: so an output does not change with its batch."""
    x, weight = torch.randn(64, 700), torch.randn(90, 700)
    x[5, 3] = torch.nan
    packed = ops[torch.float32].pack(weight, torch.randn(90))
    together = ops[torch.float32].linear(packed, x)
    for first, last in ((0, 1), (3, 5), (17, 40), (63, 64)):
        assert torch.equal(ops[torch.float32].linear(packed, x[first:last]), together[first:last])
    assert together.isnan().any(1).nonzero().tolist() == [[5]]
