"""A profile out of small jobs, on an engine whose step costs are known: the simulated one, with its clock for time."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blendserve.cost_model import CostModel, HardwareSpec
from blendserve.engines import EngineConfig, job_profile
from blendserve.engines.batching import BatchingEngine
from blendserve.engines.job_profile import DECODE_STEPS, job_points
from blendserve.engines.profile import profile_engine
from blendserve.engines.simulated import SimulatedExecutor
from blendserve.errors import ConfigError
from blendserve.models import ModelFiles
from blendserve.planner.plan import make_plan
from blendserve.request import Completion, RequestTable, StepOutput
from blendserve.scheduling.policies import make_policy
from blendserve.scheduling.policy import Policy
from blendserve.scheduling.scheduler import SchedulerConfig
from tests.workload import request_table

CONFIG = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
}
FILES = ModelFiles("small", Path("."), CONFIG)
ENGINE = EngineConfig(engine="vllm", max_num_seqs=32, max_num_batched_tokens=512)


class ClockedEngine:
    """Takes as long as its steps are said to last."""

    name = "vllm"

    def __init__(self, cost_model: CostModel, ends_early: bool = False) -> None:
        self.now_s = 0.0
        self.ends_early = ends_early
        self.cost_model = cost_model
        self._inner = BatchingEngine(
            SimulatedExecutor(cost_model),
            SchedulerConfig(
                max_num_seqs=cost_model.hardware.max_num_seqs,
                max_num_batched_tokens=cost_model.hardware.max_num_batched_tokens,
            ),
        )
        self.kv_capacity_tokens = self._inner.kv_capacity_tokens
        self.max_model_len = 2048

    def run(self, requests: RequestTable, policy: Policy) -> Iterator[StepOutput]:
        for step in self._inner.run(requests, policy):
            self.now_s += step.stats.duration_s
            if self.ends_early:
                for _, result in step.results:
                    assert isinstance(result, Completion)
                    result.token_ids.append(0)
            yield step

    def stop_admitting(self) -> None: ...

    def close(self) -> None: ...


def truth() -> CostModel:
    """A device unlike the one that the profile starts from."""
    hardware = replace(
        HardwareSpec.load("cpu-2core-avx2"),
        flops=3e11,
        bandwidth=4e10,
        gemm_overhead_s=5e-5,
        max_num_seqs=32,
        max_num_batched_tokens=512,
        kv_cache_bytes=3e8,
    )
    return CostModel(ENGINE.cost_model(FILES).model, hardware)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ClockedEngine:
    clocked = ClockedEngine(truth())
    monkeypatch.setattr(job_profile, "open_engine", lambda *_arguments: clocked)
    monkeypatch.setattr(job_profile.time, "perf_counter", lambda: clocked.now_s)
    monkeypatch.setattr(EngineConfig, "check", lambda _self: None)  # there is no vLLM here
    return clocked


def profiled(max_time_s: float = 1e9) -> Any:
    samples: list[Any] = []
    fit, _ = profile_engine(
        ENGINE, FILES, name="mine", max_time_s=max_time_s, folder=Path("."), on_sample=samples.append
    )
    return fit, samples


def test_the_profile_predicts_a_job_it_has_not_seen(engine: ClockedEngine) -> None:
    fit, samples = profiled()
    assert len(samples) >= 10
    assert fit.mean_error_ratio < 0.1
    assert fit.hardware.kv_cache_bytes == pytest.approx(3e8, rel=0.01)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 9000, size).tolist() for size in rng.integers(10, 900, 60).tolist()]
    requests = request_table(prompts, max_tokens=rng.integers(1, 200, 60).tolist())
    took_s = []
    for hardware in (truth().hardware, fit.hardware):
        cost_model = CostModel(truth().model, replace(hardware, max_num_seqs=32, max_num_batched_tokens=512))
        device = ClockedEngine(cost_model)
        for _ in device.run(requests, make_policy("dfs", make_plan(requests, cost_model))):
            pass
        took_s.append(device.now_s)
    assert took_s[1] == pytest.approx(took_s[0], rel=0.15)


def test_it_ends_when_the_time_is_up(engine: ClockedEngine) -> None:
    _, all_of_them = profiled()
    needed_s = engine.now_s
    engine.now_s = 0.0
    _, some = profiled(needed_s / 2)
    assert 4 <= len(some) < len(all_of_them)


def test_an_engine_that_ends_outputs_early_is_refused(engine: ClockedEngine) -> None:
    engine.ends_early = True
    with pytest.raises(ConfigError, match="ignore_eos"):
        profiled()


def test_the_simulated_engine_has_no_profile_of_its_own() -> None:
    with pytest.raises(ConfigError, match="simulated"):
        profile_engine(
            EngineConfig(engine="simulated"),
            FILES,
            name="x",
            max_time_s=1.0,
            folder=Path("."),
            on_sample=lambda _sample: None,
        )


@pytest.mark.parametrize("capacity", [100, 300, 8192, 1 << 20])
@pytest.mark.parametrize(("seqs", "batched"), [(1, 16), (8, 64), (256, 8192)])
def test_jobs_fit_the_memory(capacity: int, seqs: int, batched: int) -> None:
    points = job_points(
        max_num_batched_tokens=batched,
        max_num_seqs=seqs,
        max_model_len=2048,
        kv_capacity_tokens=capacity,
    )
    for point in points:
        held = point.prompt + (DECODE_STEPS + 1 if point.decodes else 1)
        assert point.num_rows * held <= capacity
        assert point.num_rows <= seqs or not point.decodes
        assert held <= 2048
