"""Check values of BlendServe §4 and Table 1."""

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.cost_model import CostModel, HardwareSpec, Overlap, Partition, memory_split, profile_names
from blendserve.errors import ConfigError
from blendserve.models import ModelSpec

LLAMA_3_8B = ModelSpec(
    name="llama-3-8b",
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    params=8.03e9,
    active_params=8.03e9,
    max_model_len=8192,
)
A100 = HardwareSpec.load("a100-80g-paper")


def test_kv_bytes_of_a_token() -> None:
    assert LLAMA_3_8B.kv_bytes_per_token == 131_072


@pytest.mark.parametrize(
    ("prompt", "output", "sharing", "density", "density_with_attention"),
    [
        (804, 2, 0.8646, 54.3, 55.7),
        (2508, 23, 0.0, 35.0, 37.8),
        (496, 510, 0.0, 2.1, 2.12),
        (121, 16_000, 0.0, 0.1, 0.1),
    ],
)
def test_densities_of_the_paper(
    prompt: int, output: int, sharing: float, density: float, density_with_attention: float
) -> None:
    """The paper's figures leave the p² term out, though its formula has it; ours keeps it."""
    cost = CostModel(LLAMA_3_8B, A100, at_peak=True)
    gemm_s = cost.decode_compute_s(prompt + output)
    memory_s = cost.memory_s(prompt, output)
    assert (1 - sharing) * gemm_s / memory_s == pytest.approx(density, rel=0.02)
    assert (1 - sharing) * cost.density(prompt, output) == pytest.approx(density_with_attention, rel=0.01)


def test_memory_split_of_figure_6() -> None:
    left = memory_split(60.0, 3.73, 0.096, 1.27)
    assert left == pytest.approx(19.3, abs=0.15)
    assert 60.0 - left == pytest.approx(40.7, abs=0.15)


@pytest.mark.parametrize(("root", "expected"), [(5.0, 60.0), (0.01, 0.0)])
def test_memory_split_is_clamped(root: float, expected: float) -> None:
    assert memory_split(60.0, 3.73, 0.096, root) == expected


def test_memory_split_of_equal_sides_does_not_divide_by_zero() -> None:
    assert memory_split(60.0, 1.0, 1.0, 1.0) == 60.0
    assert memory_split(60.0, 1.0, 1.0, 0.5) == 0.0


@pytest.mark.parametrize(("tokens", "milliseconds"), [(512, 1.087), (768, 1.537), (1024, 2.005)])
def test_gemm_time_of_table_1(tokens: int, milliseconds: float) -> None:
    step = CostModel(LLAMA_3_8B, A100).step_cost(tokens, 0)
    assert step.compute_s * 1e3 / 32 == pytest.approx(milliseconds, rel=0.02)


@pytest.mark.parametrize(("requests", "milliseconds"), [(512, 1.317), (768, 1.913), (1024, 2.515)])
def test_decode_attention_time_of_table_1(requests: int, milliseconds: float) -> None:
    step = CostModel(LLAMA_3_8B, A100).step_cost(requests, requests * 1024)
    assert step.memory_s * 1e3 / 32 == pytest.approx(milliseconds, rel=0.02)


def test_a_prefix_costs_the_difference_of_two_depths() -> None:
    cost = CostModel(LLAMA_3_8B, A100)
    whole = cost.prefill_compute_s(1000)
    assert whole > cost.prefill_compute_s(600) + cost.prefill_compute_s(400)  # later tokens attend to more


def test_overlap_functions() -> None:
    assert Overlap("sum")(3.0, 2.0) == 5.0
    assert Overlap("max_plus_min", 0.35)(3.0, 2.0) == pytest.approx(3.7)
    assert Overlap("p_norm", 2.3)(1.0, 1.0) == pytest.approx(1.35, abs=0.005)


def test_a_step_that_only_prefills_reads_no_kv() -> None:
    step = CostModel(LLAMA_3_8B, A100).step_cost(512, 0)
    assert step.memory_s == 0.0
    assert step.step_s == pytest.approx(step.compute_s)


def test_small_steps_cost_the_weights() -> None:
    cost = CostModel(LLAMA_3_8B, replace(A100, token_granularity=1))
    assert cost.step_cost(1, 100).compute_s == pytest.approx(8.1e-3, rel=0.02)


def test_all_shipped_profiles_load_and_say_where_they_come_from() -> None:
    for name in profile_names():
        assert HardwareSpec.load(name).provenance


def test_unknown_profile_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="a100-80g-paper"):
        HardwareSpec.load("b300")


TABLE = Overlap("table", points=((0.0, 1.0), (0.4, 0.68), (0.5, 0.66), (1.0, 1.02)))


def test_a_measured_table_gives_its_points_and_lines_between() -> None:
    assert TABLE(0.4, 0.6) == pytest.approx(0.68)
    assert TABLE(4.0, 6.0) == pytest.approx(6.8)
    assert TABLE(0.45, 0.55) == pytest.approx(0.67)
    assert TABLE(0.0, 3.0) == pytest.approx(3.0)
    assert TABLE(3.0, 0.0) == pytest.approx(3.06)
    assert TABLE(0.0, 0.0) == 0.0


@given(st.floats(1e-6, 10.0), st.floats(1e-6, 10.0), st.floats(1e-6, 10.0), st.floats(1e-6, 10.0))
def test_a_table_is_convex_and_its_gradient_touches_it(c1: float, m1: float, c2: float, m2: float) -> None:
    assert TABLE(c1 + c2, m1 + m2) <= TABLE(c1, m1) + TABLE(c2, m2) + 1e-9
    by_compute, by_memory = TABLE.gradient(c1, m1)
    assert by_compute >= 0.0
    assert by_memory >= 0.0
    assert by_compute * c1 + by_memory * m1 == pytest.approx(TABLE(c1, m1))
    assert by_compute * c2 + by_memory * m2 <= TABLE(c2, m2) + 1e-9


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ((), "ascend from 0 to 1"),
        (((0.0, 1.0), (0.5, 0.7)), "ascend from 0 to 1"),
        (((0.0, 1.0), (0.4, 0.6), (0.6, 0.9), (1.0, 1.0)), "convex"),
        (((0.0, 1.0), (0.5, 0.3), (1.0, 1.0)), "must not fall"),
    ],
)
def test_a_table_that_measures_no_overlap_is_refused(
    points: tuple[tuple[float, float], ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Overlap("table", points=points)


def test_a_profile_may_hold_a_table(tmp_path: Path) -> None:
    profile = json.loads((resources.files("blendserve") / "profiles" / "a100-80g-paper.json").read_text())
    profile["overlap"] = {"kind": "table", "points": [[0.0, 1.0], [0.5, 0.67], [1.0, 1.0]]}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(profile))
    assert HardwareSpec.load(str(path)).overlap(1.0, 1.0) == pytest.approx(1.34)


PARTITIONS = (Partition(24, 0.88, 0.5), Partition(48, 0.68, 0.8))


def test_a_partition_runs_both_until_one_is_through() -> None:
    partition = PARTITIONS[1]
    # 1 s of compute takes 1 / 0.68 s; meanwhile 0.8 / 0.68 s of memory are done, of 2 s.
    assert partition.step_s(1.0, 2.0) == pytest.approx(1 / 0.68 + 2.0 - 0.8 / 0.68)
    assert partition.step_s(2.0, 1.0) == pytest.approx(1 / 0.8 + 2.0 - 0.68 / 0.8)
    assert partition.step_s(0.68, 0.8) == pytest.approx(1.0)
    assert partition.step_s(1.0, 0.0) == partition.step_s(0.0, 1.0) == pytest.approx(1.0)
    proportional = Partition(48, 0.6, 0.4)
    assert proportional.step_s(3.0, 2.0) == pytest.approx(5.0), "to share a GPU is no gain by itself"
    assert partition.fixed_step_s(0.68, 0.8) == pytest.approx(1.0)
    assert partition.fixed_step_s(1.0, 0.0) == pytest.approx(1 / 0.68)
    assert partition.fixed_step_s(0.0, 1.0) == pytest.approx(1 / 0.8)


def test_the_best_partition() -> None:
    cost = CostModel(LLAMA_3_8B, replace(A100, partitions=PARTITIONS))
    assert cost.best_partition(1.0, 1.0) == PARTITIONS[1]
    assert cost.best_partition(3.0, 1.0) == PARTITIONS[0]
    assert cost.best_partition(1.0, 0.0) is None
    taxed = CostModel(LLAMA_3_8B, replace(A100, partitions=PARTITIONS, split_overhead=0.2))
    assert taxed.best_partition(1.0, 1.0) == PARTITIONS[1]
    assert taxed.best_partition(3.0, 1.0) is None, "halves cost more than overlap saves"
    assert cost.best_partition(9.0, 1.0) is None, (
        "nine parts of ten run alone, on some of the multiprocessors"
    )
    assert cost.best_partition(1.0, 9.0) is None
    assert CostModel(LLAMA_3_8B, A100).best_partition(1.0, 1.0) is None


def test_a_profile_may_hold_partitions(tmp_path: Path) -> None:
    profile = json.loads((resources.files("blendserve") / "profiles" / "a100-80g-paper.json").read_text())
    rates = {"sm_attention": 24, "gemm_rate": 0.88, "attention_rate": 0.5}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(profile | {"partitions": [rates], "split_overhead": 0.05}))
    hardware = HardwareSpec.load(str(path))
    assert (hardware.partitions, hardware.split_overhead) == (PARTITIONS[:1], 0.05)
    path.write_text(json.dumps(profile | {"partitions": [rates | {"gemm_rate": 0.0}]}))
    with pytest.raises(ConfigError, match="must be above 0"):
        HardwareSpec.load(str(path))
