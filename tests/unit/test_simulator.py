from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blendserve.cost_model import CostModel, HardwareSpec, Overlap
from blendserve.engines.batching import BatchingEngine
from blendserve.engines.native.executor import TorchExecutor
from blendserve.engines.simulated import SimulatedExecutor
from blendserve.experiments import FIGURES, Case, gains, paper_hardware, run_cases, sections, table
from blendserve.planner.plan import make_plan
from blendserve.request import RequestTable, SamplingParams, StepStats
from blendserve.scheduling.policies import POLICIES, PolicyName, make_policy
from blendserve.scheduling.scheduler import SchedulerConfig
from blendserve.simulator import (
    LENGTHS,
    Lengths,
    SimulationReport,
    plan_workload,
    practical_optimum,
    simulate,
)
from blendserve.workloads import PAPER_MODELS, named_workload
from tests.workload import COST_MODEL, request_table, small_jobs

LLAMA = PAPER_MODELS["llama-3-8b"]
A100 = CostModel(LLAMA, HardwareSpec.load("a100-80g-paper"))
NUM_REQUESTS = 5000


@pytest.fixture(scope="module")
def trace1() -> Any:
    return named_workload("trace1", NUM_REQUESTS, 0, A100)


def run(
    workload: Any, policy: PolicyName, cost_model: CostModel = A100, lengths: Lengths = "known"
) -> SimulationReport:
    requests, plan = plan_workload(workload.requests, workload.output_tokens, cost_model, lengths)
    return simulate(
        "trace1", requests, workload.output_tokens, plan, policy, cost_model, lengths=lengths
    )  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_beats_the_bound_and_losses_add_up(trace1: Any, policy: str) -> None:
    report = run(trace1, policy)
    assert 0.2 < report.optimum_ratio <= 1.0
    losses = [getattr(report, name) for name in report.__dataclass_fields__ if name.startswith("loss_")]
    assert report.optimum_ratio + sum(losses) == pytest.approx(1.0)
    assert all(loss >= -1e-9 for loss in losses[:3])
    assert report.sharing_kept_ratio <= 1.0


@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_same_seed_gives_the_same_run(trace1: Any, lengths: str) -> None:
    assert run(trace1, "dual-scan", lengths=lengths) == run(trace1, "dual-scan", lengths=lengths)


def test_known_lengths_never_retract(trace1: Any) -> None:
    assert run(trace1, "dfs").num_retracted == 0


def test_sequential_execution_is_slower_than_overlapped(trace1: Any) -> None:
    sequential = CostModel(LLAMA, replace(A100.hardware, overlap=Overlap("sum")))
    assert run(trace1, "dfs", sequential).makespan_s > run(trace1, "dfs").makespan_s


def test_tokens_and_kv_reads_are_those_of_the_workload(trace1: Any) -> None:
    """Nothing computed twice, nothing left out: the run's sums are sums over requests."""
    requests, plan = plan_workload(trace1.requests, trace1.output_tokens, A100, "known")
    engine = BatchingEngine(
        SimulatedExecutor(A100, output_tokens=trace1.output_tokens), SchedulerConfig(1024, 1024)
    )
    stats = [step.stats for step in engine.run(requests, make_policy("dfs", plan))]
    prompt = trace1.requests.prompt_tokens.astype(np.int64)
    decodes = trace1.output_tokens.astype(np.int64) - 1
    assert sum(step.num_prefill_tokens for step in stats) == plan.tree.num_unique_units
    assert sum(step.num_decode_tokens for step in stats) == decodes.sum()
    reads = (decodes * prompt + decodes * (decodes + 1) // 2).sum()
    assert sum(step.kv_tokens_read for step in stats) == reads
    assert all(step.kv_usage_ratio <= 1.0 for step in stats)


@settings(deadline=None, max_examples=100)
@given(small_jobs(), st.sampled_from(POLICIES), st.sampled_from(["sum", "max_plus_min", "p_norm"]))
def test_the_bound_holds_on_jobs_of_any_shape(job: Any, policy: Any, kind: Any) -> None:
    parameter = {"sum": 0.0, "max_plus_min": 0.35, "p_norm": 2.3}[kind]
    hardware = replace(
        COST_MODEL.hardware,
        overlap=Overlap(kind, parameter),
        max_num_batched_tokens=job.max_num_batched_tokens,
        max_num_seqs=job.max_num_seqs,
        block_size=1,
    )
    cost_model = CostModel(COST_MODEL.model, hardware)
    output_tokens = np.array(job.output_tokens, dtype=np.int32)
    requests, plan = plan_workload(
        request_table(job.prompts, job.max_tokens), output_tokens, cost_model, "known"
    )
    capacity = job.num_blocks * job.block_size
    report = simulate(
        "small", requests, output_tokens, plan, policy, cost_model, lengths="known", kv_cache_tokens=capacity
    )
    assert report.optimum_s <= report.makespan_s * (1 + 1e-9)
    assert report.num_steps >= report.min_steps


def test_two_requests_by_hand() -> None:
    """100 tokens a step, one prompt of 150 and one of 40 tokens, two outputs each.

    | step | prefill | decode | KV read |
    | --- | --- | --- | --- |
    | 1 | 100 of the first | | |
    | 2 | 50 of the first, 40 of the second | | |
    | 3 | | both | 151 + 41 |
    """
    hardware = HardwareSpec(
        name="simple",
        provenance="made up",
        flops=1e12,
        bandwidth=1e12,
        kv_cache_bytes=1e9,
        gemm_overhead_s=1e-3,
        attention_overhead_s=2e-3,
        max_num_batched_tokens=100,
        max_num_seqs=8,
        block_size=1,
    )
    model = replace(COST_MODEL.model, num_layers=1, active_params=1e6, params=1e6)
    cost_model = CostModel(model, hardware)
    requests = request_table([[1] * 150, [2] * 40], 2, [2, 2])
    engine = BatchingEngine(SimulatedExecutor(cost_model), SchedulerConfig(8, 100))
    stats = [
        step.stats for step in engine.run(requests, make_policy("fcfs", make_plan(requests, cost_model)))
    ]
    assert [(s.num_prefill_tokens, s.num_decode_tokens, s.kv_tokens_read) for s in stats] == [
        (100, 0, 0),
        (90, 0, 0),
        (0, 2, 192),
    ]
    pairs = 100 * 101 / 2, (50 * 100 + 50 * 51 / 2) + 40 * 41 / 2
    per_pair = 4 * 64 / (1e12 * 0.5)
    kv_bytes = 2 * 2 * 16 * 2
    expected = [
        1e-3 + 100 * 2e6 / 1e12 + pairs[0] * per_pair,
        1e-3 + 90 * 2e6 / 1e12 + pairs[1] * per_pair,
        1e-3 + 2 * 2e6 / 1e12 + 2e-3 + 192 * kv_bytes / 1e12,
    ]
    assert [s.duration_s for s in stats] == pytest.approx(expected)


def test_the_bound_by_hand() -> None:
    """One request: nothing to wait for, so the bound is the run itself."""
    hardware = replace(A100.hardware, token_granularity=1)
    cost_model = CostModel(LLAMA, hardware)
    requests = request_table([[1] * 1024], 101, [101])
    plan = make_plan(requests, cost_model)
    bound = practical_optimum(
        plan.tree,
        np.array([101], dtype=np.int32),
        cost_model,
        kv_capacity_tokens=10_000,
        max_num_batched_tokens=1024,
    )
    assert bound.min_steps == 100
    tokens, reads = 1024 + 100, 100 * 1024 + 100 * 101 / 2
    compute_s = 100 * 5.3e-3 + tokens * 2 * LLAMA.params / (312e12 * 0.897)
    compute_s += 4 * 4096 * 32 * 1024 * 1025 / 2 / (312e12 * 0.6)
    memory_s = 100 * 3.8e-3 + reads * 131_072 / (2.039e12 * 0.879)
    assert bound.compute_s == pytest.approx(compute_s, rel=1e-6)
    assert bound.memory_s == pytest.approx(memory_s, rel=1e-6)


def test_native_and_simulated_decide_alike(make_tiny_model: Any, tmp_path: Path) -> None:
    """The same job, the same lengths: every step carries the same tokens."""
    checkpoint = make_tiny_model("llama", tmp_path / "tiny")
    cost_model = CostModel(COST_MODEL.model, replace(HardwareSpec.load("cpu-2core-avx2"), block_size=8))
    rng = np.random.default_rng(1)
    prefix = rng.integers(3, 500, 40).tolist()
    prompts = [(prefix if i % 2 else []) + rng.integers(3, 500, 3 + i % 11).tolist() for i in range(40)]
    lengths = [1 + (5 * i) % 23 for i in range(40)]
    base = request_table(prompts, lengths, lengths)
    ignoring_eos = RequestTable(
        base.tokens,
        base.max_tokens,
        base.declared_tokens,
        [SamplingParams(temperature=0.0, ignore_eos=True)],
        base.params_index,
        base.seeds,
    )
    plan = make_plan(ignoring_eos, cost_model)
    native = TorchExecutor(checkpoint, None, cost_model=cost_model, num_blocks=24, block_size=8)
    simulated = SimulatedExecutor(
        cost_model, output_tokens=np.array(lengths, dtype=np.int32), kv_cache_tokens=24 * 8
    )
    seen: list[list[StepStats]] = []
    for executor in (native, simulated):
        engine = BatchingEngine(executor, SchedulerConfig(8, 32))
        steps = engine.run(ignoring_eos, make_policy("dual-scan", plan))
        seen.append([replace(step.stats, duration_s=0.0) for step in steps])
    assert seen[0] == seen[1]


def test_every_figure_of_the_paper_can_be_made() -> None:
    """One case of each is run, on few requests; tables and drawings have all cases of a figure with its figures."""
    rows = {}
    for name, cases in FIGURES.items():
        [found] = run_cases(cases[:1], NUM_REQUESTS)
        rows[name] = [{**found, **asdict(case), "system": case.system} for case in cases]
        for row in rows[name]:
            row["overlap"] = row["setting"]
            if row["prefill_replicas"]:
                del row["optimum_ratio"]
    for of_figure in rows.values():
        shown = table(of_figure)
        assert len(shown.rows) == len(of_figure)
        assert all(len(cells) == len(shown.headings) for cells in shown.rows)
    assert [section.title.split(":")[0] for section in sections(rows)] == list(FIGURES)


def test_grid_gains_are_over_overlapped_dfs() -> None:
    rows = run_cases([Case("grid-1-0.25", "dfs"), Case("grid-1-0.25", "dual-scan")], NUM_REQUESTS)
    ratio = rows[0]["makespan_s"] / rows[1]["makespan_s"]
    assert gains(rows, "dual-scan") == {"grid-1-0.25": pytest.approx(ratio)}


def test_data_parallel_and_disaggregated_rows() -> None:
    one, two, split = run_cases(
        [
            Case("trace2", "dual-scan"),
            Case("trace2", "dual-scan", data_parallel_size=2),
            Case("trace2", "dfs", prefill_replicas=1, decode_replicas=1),
        ],
        NUM_REQUESTS,
    )
    assert one["tokens_per_s"] < two["tokens_per_s"] <= 2.05 * one["tokens_per_s"]
    assert split["makespan_s"] == max(split["prefill_s"], split["decode_s"])


def test_devices_scale_with_tensor_parallelism() -> None:
    model = PAPER_MODELS["llama-3-70b"]
    hardware = paper_hardware(model, "smooth", 8)
    assert hardware.flops == 8 * 312e12
    assert hardware.kv_cache_bytes == pytest.approx(8 * 76e9 - 2 * model.params)


def test_calibration_compares_what_was_expected_with_what_came_by_octave() -> None:
    requests = request_table([[i] for i in range(6)], max_tokens=400)
    output_tokens = np.array([1, 3, 100, 110, 120, 310], dtype=np.int32)
    known, plan = plan_workload(requests, output_tokens, A100, "known")
    found = simulate("six", known, output_tokens, plan, "fcfs", A100, lengths="known").calibration
    assert found.num_requests == [1, 1, 3, 1]
    assert found.expected == found.actual == [1.0, 3.0, 110.0, 310.0]
    assert found.actual_p50 == [1.0, 3.0, 110.0, 310.0]
    assert found.actual_p10[2] < found.actual_p50[2] < found.actual_p90[2]
