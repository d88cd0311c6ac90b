"""Profiles fitted to step times, and out of what a session on a GPU found."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from blendserve.cost_model import CostModel, HardwareSpec, Overlap, Partition
from blendserve.engines.profile import (
    Ceilings,
    StepSample,
    fit_hardware,
    hardware_of_session,
    partitions_of_session,
    split_overhead_of_session,
)
from blendserve.errors import ConfigError
from blendserve.workloads import PAPER_MODELS

MODEL = PAPER_MODELS["llama-3-8b"]
TRUE = replace(
    HardwareSpec.load("a100-80g-paper"),
    overlap=Overlap(),
    token_granularity=1,
    prefill_attention_efficiency=0.4,
)
PROMPTS = (16, 64, 256, 512, 1024, 2048)
DECODES = ((1, 4000), (8, 1000), (64, 500), (64, 2000), (256, 1500))


def sample(
    prefill: int, rows: int, context: int, hardware: HardwareSpec = TRUE, num_prompts: int = 1
) -> StepSample:
    pairs = prefill * (prefill / num_prompts + 1) / 2
    cost = CostModel(MODEL, hardware).step_cost(prefill + rows, rows * context, pairs)
    return StepSample(prefill, rows, rows * context, cost.step_s, pairs)


def samples(hardware: HardwareSpec = TRUE) -> list[StepSample]:
    found = [sample(prefill, 0, 0, hardware) for prefill in PROMPTS]
    found += [sample(prefill, 0, 0, hardware, num_prompts=prefill // 64) for prefill in PROMPTS[2:]]
    found += [sample(0, rows, context, hardware) for rows, context in DECODES]
    return [*found, sample(512, 128, 1000, hardware), sample(1024, 256, 2000, hardware)]


def test_the_rates_that_made_the_steps_are_found_again() -> None:
    fit = fit_hardware(samples(), MODEL, TRUE, Ceilings(TRUE.flops, TRUE.bandwidth))
    for name in (
        "flops",
        "bandwidth",
        "gemm_efficiency",
        "attention_efficiency",
        "prefill_attention_efficiency",
        "gemm_overhead_s",
        "attention_overhead_s",
        "weight_load_efficiency",
    ):
        assert getattr(fit.hardware, name) == pytest.approx(getattr(TRUE, name), rel=1e-3), name
    assert fit.mean_error_ratio < 1e-6
    assert fit.predicted_s == pytest.approx([s.duration_s for s in samples()])


def test_without_ceilings_rates_are_the_peak() -> None:
    hardware = fit_hardware(samples(), MODEL, TRUE).hardware
    assert (hardware.gemm_efficiency, hardware.attention_efficiency) == (1.0, 1.0)
    assert hardware.flops == pytest.approx(TRUE.flops * TRUE.gemm_efficiency, rel=1e-3)


def test_noise_moves_the_rates_little() -> None:
    noise = np.random.default_rng(0).uniform(0.95, 1.05, len(samples()))
    noisy = [s._replace(duration_s=s.duration_s * n) for s, n in zip(samples(), noise, strict=True)]
    fit = fit_hardware(noisy, MODEL, TRUE, Ceilings(TRUE.flops, TRUE.bandwidth))
    assert fit.hardware.gemm_efficiency == pytest.approx(TRUE.gemm_efficiency, rel=0.1)
    assert fit.hardware.attention_efficiency == pytest.approx(TRUE.attention_efficiency, rel=0.1)
    assert 0 < fit.mean_error_ratio < 0.05


def test_a_device_without_a_floor() -> None:
    """Every token costs the same from the first: no time is taken for weights that alone would take longer."""
    no_floor = replace(TRUE, weight_load_efficiency=1e3)
    fit = fit_hardware(samples(no_floor), MODEL, TRUE)
    one = CostModel(MODEL, fit.hardware).step_cost(1, 0).compute_s
    assert one == pytest.approx(CostModel(MODEL, no_floor).step_cost(1, 0).compute_s, rel=0.01)


def test_steps_that_do_not_tell_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 steps were measured"):
        fit_hardware(samples()[:2], MODEL, TRUE)
    with pytest.raises(ConfigError, match="a KV token read"):
        fit_hardware([sample(prefill, 0, 0) for prefill in PROMPTS], MODEL, TRUE)
    same = [sample(16, 0, 0)] * 4
    with pytest.raises(ConfigError, match="a token computed and a KV token read"):
        fit_hardware(same, MODEL, TRUE, Ceilings(TRUE.flops, TRUE.bandwidth))
    with pytest.raises(ConfigError, match="a token computed"):
        fit_hardware([sample(0, 1, 1000 * n) for n in range(1, 6)], MODEL, TRUE)


def test_what_steps_do_not_show_runs_at_the_ceiling() -> None:
    ceilings = Ceilings(TRUE.flops, TRUE.bandwidth)
    fit = fit_hardware(
        [sample(64, 0, 0, num_prompts=n) for n in (1, 2, 4, 8)] + samples()[:6], MODEL, TRUE, ceilings
    )
    assert fit.unseen == ("a KV token read",)
    assert fit.hardware.attention_efficiency == 1.0
    assert fit.hardware.bandwidth == TRUE.bandwidth


def session(**sections: list[dict[str, Any]]) -> dict[str, Any]:
    steps = [s._asdict() for s in samples()]
    top = {"copy": {"gbps": TRUE.bandwidth / 1e9}, "product": {"tflops": TRUE.flops / 1e12}}
    found = {name: {str(i): row for i, row in enumerate(rows)} for name, rows in sections.items()}
    return {
        "meta": {"kv_cache_bytes": 90e9},
        "ceilings": top,
        "steps": {str(i): row for i, row in enumerate(steps)},
        **found,
    }


def pair(mode: str, num_sms: int, gemm_rate: float, attention_rate: float) -> dict[str, Any]:
    return {"mode": mode, "sm_attention": num_sms, "gemm_rate": gemm_rate, "attention_rate": attention_rate}


def chain(num_tokens: int, us: float, sm: int = 132) -> dict[str, Any]:
    return {"product": "chain", "num_tokens": num_tokens, "sm": sm, "us": us}


def test_the_hardware_of_a_session() -> None:
    profile = session(
        pair=[
            {"gemm_us": 300.0, "attention_us": 350.0, "num_tokens": 512},
            pair("split", 48, 0.60, 0.70),
            pair("split", 48, 0.64, 0.74),
            pair("split", 24, 0.80, 1.02),
            pair("split", 16, 0.0, 0.0),
            pair("priority", 48, 0.9, 0.9),
        ],
        gemm=[chain(1024, 600.0), chain(2048, 1150.0), chain(512, 315.0), chain(512, 700.0, sm=84)],
    )
    hardware = hardware_of_session(profile, MODEL, replace(TRUE, name="mine")).hardware
    assert hardware.name == "mine"
    assert hardware.kv_cache_bytes == 90e9
    assert hardware.gemm_efficiency == pytest.approx(TRUE.gemm_efficiency, rel=1e-3)
    assert hardware.partitions == (Partition(24, 0.80, 1.0), Partition(48, 0.62, 0.72))
    assert hardware.split_overhead == pytest.approx((630 / 600 + 1200 / 1150) / 2 - 1, abs=1e-4)
    assert hardware.overlap.kind == "table"
    assert hardware.overlap(1.0, 1.0) < 2.0


def test_where_a_device_cannot_be_split_its_streams_count() -> None:
    profile = session(pair=[pair("priority", 48, 0.5, 0.6), pair("plain", 132, 0.5, 0.5)])
    assert partitions_of_session(profile) == (Partition(48, 0.5, 0.6),)
    assert split_overhead_of_session(profile) == 0.0


def test_a_session_without_pairs_runs_one_after_the_other() -> None:
    hardware = hardware_of_session(session(), MODEL, TRUE).hardware
    assert (hardware.partitions, hardware.overlap.kind) == ((), "sum")


def test_a_session_that_was_cut_before_its_steps_gives_no_profile() -> None:
    with pytest.raises(ConfigError, match="0 steps were measured"):
        hardware_of_session({"meta": {}}, MODEL, TRUE)
