"""Simulated runs of whole workloads: the product's planner, policies and scheduler on a virtual clock, and the bound
that no schedule can beat.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from blendserve.cost_model import CostModel
from blendserve.engines.batching import BatchingEngine
from blendserve.engines.simulated import SimulatedExecutor
from blendserve.planner.plan import Plan, PlanConfig, make_plan
from blendserve.planner.prefix_tree import Ints, PrefixTree
from blendserve.request import Completion, RequestTable
from blendserve.scheduling.policies import PolicyName, make_policy
from blendserve.scheduling.scheduler import SchedulerConfig

Floats = NDArray[np.float64]

Lengths = Literal["known", "sampled", "none"]
"""known: every output length is declared; sampled: those of the sample are known at the start, as after the paper's
warm-up; none: all are learnt while running"""
LENGTHS: tuple[Lengths, ...] = get_args(Lengths)

SERIES_POINTS = 400
RAMP_ENDS_AT_KV_RATIO = 0.5


class Bound(NamedTuple):
    """A time that no schedule can beat on the same cost model and memory."""

    optimum_s: float
    compute_s: float
    memory_s: float
    min_steps: int


def practical_optimum(
    tree: PrefixTree,
    output_tokens: Ints,
    cost_model: CostModel,
    *,
    kv_capacity_tokens: int,
    max_num_batched_tokens: int,
) -> Bound:
    """Lower bound on the time of any schedule; source: BlendServe §6.2, made strict.

    A step costs f(Tc, Tm). f is convex and homogeneous, hence Σ f(Tc_i, Tm_i) >= f(Σ Tc_i, Σ Tm_i), and increasing, so
    that lower bounds of the two sums can be put in:

    - Σ Tc: every distinct prompt token and every output token but the last of each request is computed at least once,
      with attention to all tokens before it; n steps have n times the fixed cost.
    - Σ Tm: every decode reads the KV of all tokens before it; n steps that decode have n times the fixed cost.
    - n: the longest output but one token, which come one per step; the tokens divided by a step's limit; and the
      private KV of all decodes, added over steps, divided by the device's memory.

    Differs from the paper: fixed costs per step and the limits of memory are in it, so it can nearly be reached.
    """
    prompt = tree.length.astype(np.float64)
    own = prompt - tree.leaf_start
    decodes = output_tokens[tree.requests].astype(np.float64) - 1.0
    kv_read = float((decodes * prompt + decodes * (decodes + 1.0) / 2.0).sum())
    private_token_steps = float((decodes * own + decodes * (decodes + 1.0) / 2.0).sum())
    num_tokens = tree.num_unique_units + float(decodes.sum())

    def pairs(depth: Floats) -> Floats:
        return depth * (depth + 1.0) / 2.0

    above = np.where(tree.parent >= 0, tree.depth[tree.parent], 0).astype(np.float64)
    query_key_pairs = float((pairs(tree.depth.astype(np.float64)) - pairs(above)).sum())
    query_key_pairs += float((pairs(prompt) - pairs(tree.leaf_start.astype(np.float64))).sum())

    decode_steps = max(float(decodes.max(initial=0.0)), private_token_steps / kv_capacity_tokens)
    steps = max(decode_steps, num_tokens / max_num_batched_tokens)
    work = cost_model.work_cost(num_tokens, kv_read, query_key_pairs, steps=steps, decode_steps=decode_steps)
    return Bound(work.step_s, work.compute_s, work.memory_s, int(np.ceil(steps)))


@dataclass(frozen=True, slots=True)
class Series:
    """A run over time, averaged into at most `SERIES_POINTS` spans of equal numbers of steps."""

    time_s: list[float]
    """end of each span"""
    compute_s: list[float]
    """mean per step"""
    memory_s: list[float]
    num_tokens: list[float]
    """computed, mean per step"""
    num_running: list[float]
    kv_usage_ratio: list[float]


@dataclass(frozen=True, slots=True)
class Calibration:
    """Output lengths expected at admission against those that came, for requests of about equal expectation.

    [num_groups] each, by ascending expectation; a group for every octave of it that has requests. Without the requests
    whose lengths the plan knew from a sample.
    """

    num_requests: list[int]
    expected: list[float]
    """mean output tokens expected"""
    actual: list[float]
    """mean output tokens"""
    actual_p10: list[float]
    actual_p50: list[float]
    actual_p90: list[float]


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """One simulated run. Ratios of loss are shares of the makespan."""

    workload: str
    policy: str
    lengths: Lengths
    overlap: str
    num_requests: int
    num_tokens: int
    """prompt and output tokens of the workload"""
    makespan_s: float
    tokens_per_s: float
    optimum_s: float
    optimum_ratio: float
    """optimum / makespan, at most 1"""
    sharing_ratio: float
    sharing_kept_ratio: float
    """prompt tokens found in the cache, of those that perfect reuse would find"""
    compute_s: float
    memory_s: float
    num_steps: int
    min_steps: int
    num_retracted: int
    recomputed_ratio: float
    """tokens computed again after a retraction, of all computed"""
    mean_kv_usage_ratio: float
    loss_ramp_ratio: float
    """imbalance of steps before the memory is first half full"""
    loss_steady_ratio: float
    loss_tail_ratio: float
    """imbalance of steps when nothing waits any more"""
    loss_steps_ratio: float
    """fixed costs of steps beyond the least number: memory that was not full"""
    loss_sharing_ratio: float
    loss_recompute_ratio: float
    loss_other_ratio: float
    """padding, and reads of recomputed tokens"""
    calibration: Calibration
    series: Series | None = None


def describe_overlap(cost_model: CostModel) -> str:
    """The overlap function in words, for tables."""
    overlap = cost_model.hardware.overlap
    if overlap.kind == "sum":
        return "sequential"
    if overlap.kind == "table":
        return "table"
    return f"{overlap.kind} {overlap.parameter:g}"


def plan_workload(
    requests: RequestTable,
    output_tokens: Ints,
    cost_model: CostModel,
    lengths: Lengths,
    config: PlanConfig | None = None,
) -> tuple[RequestTable, Plan]:
    """The plan of a workload, and its requests, with as much known about lengths as `lengths` says."""
    if lengths == "known":
        requests = replace(requests, declared_tokens=output_tokens)
    plan = make_plan(requests, cost_model, config or PlanConfig())
    if lengths == "sampled":
        plan = plan.warmed_up(output_tokens[plan.sampled])
    return requests, plan


def simulate(
    name: str,
    requests: RequestTable,
    output_tokens: Ints,
    plan: Plan,
    policy_name: PolicyName,
    cost_model: CostModel,
    *,
    lengths: Lengths,
    kv_cache_tokens: int | None = None,
    free_unused_prefixes: bool = True,
    seed: int = 0,
    with_series: bool = False,
) -> SimulationReport:
    """Run a workload under a policy on a virtual clock.

    Args:
        name: of the workload, for the report.
        requests: as planned, from `plan_workload`.
        output_tokens: [num_requests] true output lengths.
        plan: of these requests.
        policy_name: who decides the order.
        cost_model: costs of a step; its hardware's overlap says whether operators run one after the other.
        lengths: what the plan knew, for the report.
        kv_cache_tokens: memory; None: the hardware's.
        free_unused_prefixes: see `SchedulerConfig`.
        seed: of the random policy.
        with_series: keep the course of the run.
    """
    hardware = cost_model.hardware
    executor = SimulatedExecutor(cost_model, output_tokens=output_tokens, kv_cache_tokens=kv_cache_tokens)
    config = SchedulerConfig(hardware.max_num_seqs, hardware.max_num_batched_tokens, free_unused_prefixes)
    engine = BatchingEngine(executor, config)
    policy = make_policy(policy_name, plan, seed=seed)
    facts: list[tuple[float, float, float, int, int, float, int]] = []
    num_prefill = num_cached = num_retracted = 0
    expected = np.zeros(len(requests), dtype=np.int32)
    for step in engine.run(requests, policy):
        stats = step.stats
        facts.append(
            (
                stats.duration_s,
                stats.compute_s,
                stats.memory_s,
                stats.num_prefill_tokens + stats.num_decode_tokens,
                stats.num_running,
                stats.kv_usage_ratio,
                stats.num_waiting,
            )
        )
        num_prefill += stats.num_prefill_tokens
        num_retracted += stats.num_retracted
        for request, result in step.results:
            assert isinstance(result, Completion)
            num_cached += result.num_cached_tokens
            expected[request] = result.output_tokens_est
    duration, compute, memory, tokens, running, kv_usage, waiting = np.array(facts, dtype=np.float64).T
    makespan_s = float(duration.sum())
    bound = practical_optimum(
        plan.tree,
        output_tokens,
        cost_model,
        kv_capacity_tokens=engine.kv_capacity_tokens,
        max_num_batched_tokens=hardware.max_num_batched_tokens,
    )
    shareable = plan.tree.num_units - plan.tree.num_unique_units
    first_time = plan.tree.num_units - num_cached
    num_recomputed = num_prefill - first_time
    num_computed = num_prefill + int(output_tokens.sum(dtype=np.int64)) - len(requests)

    # Every step's distance from the plane that touches f at the run's totals; they add up to Σ f_i - f(Σ).
    by_compute, by_memory = hardware.overlap.gradient(float(compute.sum()), float(memory.sum()))
    imbalance = duration - by_compute * compute - by_memory * memory
    half_full = np.flatnonzero(kv_usage >= RAMP_ENDS_AT_KV_RATIO)
    ramp_end = int(half_full[0]) if len(half_full) else 0
    tail_start = int(np.argmax(waiting == 0))
    ramp_end = min(ramp_end, tail_start)
    extra_steps = len(facts) - bound.min_steps
    model = cost_model.model
    fixed_s = by_compute * model.num_layers * hardware.gemm_overhead_s
    fixed_s += by_memory * model.num_layers * hardware.attention_overhead_s
    token_s = by_compute * float(cost_model.decode_compute_s(1.0))
    losses = {
        "loss_ramp_ratio": float(imbalance[:ramp_end].sum()),
        "loss_steady_ratio": float(imbalance[ramp_end:tail_start].sum()),
        "loss_tail_ratio": float(imbalance[tail_start:].sum()),
        "loss_steps_ratio": extra_steps * fixed_s,
        "loss_sharing_ratio": (first_time - plan.tree.num_unique_units) * token_s,
        "loss_recompute_ratio": num_recomputed * token_s,
    }
    unknown = np.ones(len(requests), dtype=np.bool_)
    if plan.sampled_output_tokens is not None:
        unknown[plan.sampled] = False
    losses["loss_other_ratio"] = makespan_s - bound.optimum_s - sum(losses.values())
    num_tokens = plan.tree.num_units + int(output_tokens.sum(dtype=np.int64))
    return SimulationReport(
        workload=name,
        policy=policy_name,
        lengths=lengths,
        overlap=describe_overlap(cost_model),
        num_requests=len(requests),
        num_tokens=num_tokens,
        makespan_s=makespan_s,
        tokens_per_s=num_tokens / makespan_s,
        optimum_s=bound.optimum_s,
        optimum_ratio=bound.optimum_s / makespan_s,
        sharing_ratio=plan.tree.sharing_ratio,
        sharing_kept_ratio=num_cached / shareable if shareable else 1.0,
        compute_s=float(compute.sum()),
        memory_s=float(memory.sum()),
        num_steps=len(facts),
        min_steps=bound.min_steps,
        num_retracted=num_retracted,
        recomputed_ratio=num_recomputed / num_computed,
        mean_kv_usage_ratio=float((kv_usage * duration).sum() / makespan_s),
        calibration=_calibration(expected[unknown], output_tokens[unknown]),
        series=_series(duration, compute, memory, tokens, running, kv_usage) if with_series else None,
        **{loss: seconds / makespan_s for loss, seconds in losses.items()},
    )


def _calibration(expected: Ints, actual: Ints) -> Calibration:
    octave = np.log2(np.maximum(expected, 1)).astype(np.int64)
    members = [np.flatnonzero(octave == index) for index in np.unique(octave)]
    quantiles = np.array([np.quantile(actual[of], (0.1, 0.5, 0.9)) for of in members]).reshape(-1, 3).T
    return Calibration(
        [len(of) for of in members],
        [float(expected[of].mean()) for of in members],
        [float(actual[of].mean()) for of in members],
        *quantiles.tolist(),
    )


def _series(duration: Floats, *per_step: Floats) -> Series:
    edges = np.unique(np.linspace(0, len(duration), SERIES_POINTS + 1).astype(np.int64))
    counts = np.diff(edges)

    def mean(values: Floats) -> list[float]:
        return [float(value) for value in np.add.reduceat(values, edges[:-1]) / counts]

    ends = np.cumsum(duration)[edges[1:] - 1]
    return Series([float(end) for end in ends], *map(mean, per_step))
