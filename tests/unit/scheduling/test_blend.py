from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blendserve.cost_model import CostModel, HardwareSpec, Overlap, StepLines
from blendserve.engines.batching import BatchingEngine
from blendserve.engines.simulated import SimulatedExecutor
from blendserve.planner.declared_lengths import DeclaredLengths
from blendserve.planner.plan import make_plan
from blendserve.scheduling.blend import (
    MIN_STEP_TOKENS,
    PROJECT_EVERY,
    Blend,
    _level,
    _longest_that_fits,
    _Table,
    _tokens_for,
    _towards_one,
)
from blendserve.scheduling.policies import PolicyName
from blendserve.scheduling.policy import Control
from blendserve.scheduling.scheduler import Scheduler, SchedulerConfig
from blendserve.simulator import SimulationReport, plan_workload, simulate
from blendserve.workloads import PAPER_MODELS, named_workload
from tests.workload import request_table

A100 = CostModel(PAPER_MODELS["llama-3-8b"], HardwareSpec.load("a100-80g-paper"))
LINES = StepLines(5e-3, 6e-5, 4e-3, 7e-8)


def test_level_makes_tokens_and_reads_end_together() -> None:
    """Nothing runs yet: all remaining reads happen at full memory, and the ratio hands out exactly the tokens."""
    points, nothing = np.array([0.0, 16.0, 32.0]), np.zeros(3)
    tokens, reads, memory = 5e6, 4e9, 4e5
    ratio = _level(tokens, reads, memory, nothing, nothing, points, LINES)
    assert reads / memory * _tokens_for(ratio, memory, LINES) == pytest.approx(tokens, rel=1e-3)


def test_level_keeps_tokens_for_a_long_run_down() -> None:
    points = np.array([0.0, 10_000.0, 20_000.0])
    projection, alive = np.array([2e4, 2e4, 0.0]), np.array([1.0, 1.0, 0.0])
    tokens, reads, memory = 4e6, 4e9, 4e5
    nothing = np.zeros(3)
    short = _level(tokens, reads, memory, nothing, nothing, points, LINES)
    long = _level(tokens, reads, memory, projection, alive, points, LINES)
    kept = tokens - (reads - 4e8) / memory * _tokens_for(long, memory, LINES)
    assert long < short
    assert kept >= 0.9 * 20_000 * MIN_STEP_TOKENS


def test_without_reads_of_the_right_side_nothing_limits_the_left() -> None:
    nothing = np.zeros(3)
    ratio = _level(1e6, 0.0, 4e5, nothing, nothing, np.array([0.0, 16.0, 32.0]), LINES)
    assert _tokens_for(ratio, 0.0, LINES) > 100_000


@pytest.mark.parametrize(
    ("ratio", "error", "expected"), [(0.8, 0.1, 0.88), (0.95, 0.1, 1.0), (1.3, 0.3, 1.0), (2.0, 0.25, 1.6)]
)
def test_ratios_move_towards_one_and_not_beyond(ratio: float, error: float, expected: float) -> None:
    assert _towards_one(ratio, error) == pytest.approx(expected)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=30),
    st.sets(st.integers(0, 29)),
    st.integers(0, 500),
)
def test_the_longest_that_fits_is_found(declared: list[int], admitted: set[int], room: int) -> None:
    """Against trying every one; requests that were admitted already are passed over."""
    lengths = np.array(sorted(declared, reverse=True), dtype=np.int32)
    num = len(lengths)
    table = _Table(
        prompt=np.zeros(num, dtype=np.int32),
        own=np.zeros(num, dtype=np.int32),
        prompt_share=np.zeros(num),
        hint=lengths.astype(np.float64),
        ends=DeclaredLengths(np.zeros(num, dtype=np.int32), lengths).ends,
        group=np.zeros(num, dtype=np.int32),
        right=np.ones(num, dtype=np.int32),
        generated=np.zeros(num, dtype=np.int32),
    )
    plan = make_plan(request_table([[i] for i in range(num)], max_tokens=400), A100)
    tables = Blend(plan)._curves.tables
    waiting = np.arange(num, dtype=np.int32)
    next_waiting = np.arange(num + 1, dtype=np.int32)
    for index in admitted:
        if index < num:
            next_waiting[index] = index + 1
    projection = np.zeros(len(tables.points))

    def fits(index: int) -> bool:
        left = float(lengths[index])
        lasts = np.minimum(np.maximum(left - tables.points[:-1], 0.0), np.diff(tables.points))
        return bool((lasts / np.diff(tables.points) * (tables.points[:-1] + lasts / 2)).max() <= room)

    expected = next((i for i in range(num) if i not in admitted and fits(i)), -1)
    found = _longest_that_fits(waiting, next_waiting, projection, float(room), table, tables)
    assert found == expected or (
        found >= 0 and expected >= 0 and fits(found) and lengths[found] == lengths[expected]
    )


def run(workload: Any, policy: PolicyName, cost_model: CostModel, kv_cache_tokens: int) -> SimulationReport:
    requests, plan = plan_workload(workload.requests, workload.output_tokens, cost_model, "sampled")
    return simulate(
        "test", requests, workload.output_tokens, plan, policy, cost_model,
        lengths="sampled", kv_cache_tokens=kv_cache_tokens,
    )  # fmt: skip


@pytest.fixture(scope="module")
def trace3() -> Any:
    return named_workload("trace3", 20_000, 0, A100)


def test_the_blend_beats_depth_first_and_keeps_the_memory_fuller(trace3: Any) -> None:
    blend, dfs = (run(trace3, policy, A100, 150_000) for policy in ("blend", "dfs"))
    assert blend.makespan_s < 0.9 * dfs.makespan_s
    assert blend.mean_kv_usage_ratio > dfs.mean_kv_usage_ratio
    assert blend.recomputed_ratio < 0.03


def test_where_operators_do_not_overlap_it_does_not_blend(trace3: Any) -> None:
    """One after the other, mixing gains nothing; what is left is to start long outputs in time."""
    sequential = CostModel(A100.model, replace(A100.hardware, overlap=Overlap("sum")))
    blend, longest = (run(trace3, policy, sequential, 150_000) for policy in ("blend", "longest-first-dfs"))
    assert blend.makespan_s == pytest.approx(longest.makespan_s, rel=0.02)


def test_without_overlap_known_long_outputs_start_first() -> None:
    """Their prompts begin as short ones' do, with less than a block, and so belong to the same class."""
    grouped = [[7, *[group] * 64, index] for group in (1, 2) for index in range(10)]
    alone = [[7, 3, 100 + index] for index in range(20)]
    declared = [4] * 20 + [90 if index % 5 == 0 else 8 for index in range(20)]
    table = request_table([*grouped, *alone], max_tokens=declared, declared=declared)
    hardware = replace(A100.hardware, overlap=Overlap("sum"), block_size=32, max_num_batched_tokens=64)
    plan = make_plan(table, CostModel(A100.model, hardware))
    policy = Blend(plan)
    limits = {"num_blocks": 100, "block_size": 32, "max_model_len": 512, "with_block_tables": False}
    Scheduler(table, policy, SchedulerConfig(32, 64), cost_model=plan.cost_model, **limits)
    order = policy._left.tolist()
    assert [declared[request] for request in order[:4]] == [90] * 4
    of_group = [request // 10 for request in order if request < 20]
    assert of_group in ([0] * 10 + [1] * 10, [1] * 10 + [0] * 10)


def test_requests_of_one_kind_run_depth_first() -> None:
    """Nothing to blend: the same makespan as dfs, to a step."""
    rng = np.random.default_rng(0)
    prompts = [[int(token) for token in rng.integers(0, 1000, 200)] for _ in range(400)]
    output_tokens = rng.integers(1, 200, 400).astype(np.int32)
    requests, plan = plan_workload(request_table(prompts, max_tokens=200), output_tokens, A100, "none")
    blend, dfs = (
        simulate(
            "one kind", requests, output_tokens, plan, policy, A100, lengths="none", kv_cache_tokens=20_000
        )
        for policy in ("blend", "dfs")
    )
    assert blend.makespan_s == pytest.approx(dfs.makespan_s, rel=0.01)


class Watched(Blend):
    """Records for how many steps a request is first of its side."""

    longest_wait = 0
    blended = False

    def start(self, control: Control) -> None:
        self.heads: dict[str, tuple[int, int]] = {}
        super().start(control)

    def step(self, control: Control) -> int:
        target = super().step(control)
        self.blended = self.blended or self._blends
        index = self._first_of_right()
        right = self._at(index) if index is not None else np.empty(0, dtype=np.int32)
        for side, ahead in (("left", self._left), ("right", right)):
            first = int(ahead[0]) if len(ahead) else -1
            if self.heads.get(side, (-1, 0))[0] != first:
                self.heads[side] = first, control.step_index
            if first >= 0:
                self.longest_wait = max(self.longest_wait, control.step_index - self.heads[side][1])
        return target


GIANT = 7000
"""tokens of a prompt that finds no room as long as smaller requests are let past it"""


@pytest.fixture
def always_blending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blendserve.scheduling.blend.MIN_GAIN", 0.0)


def longest_wait(giant: str, seed: int) -> int:
    rng = np.random.default_rng(seed)
    kinds = [(20, 400)] * 400 + [(300, 4)] * 3000
    kinds.insert(int(rng.integers(0, 400)), (GIANT, 4) if giant == "left" else (20, GIANT))
    prompts = [[int(token) for token in rng.integers(0, 1000, prompt)] for prompt, _ in kinds]
    lengths = np.array([output for _, output in kinds], dtype=np.int32)
    requests, plan = plan_workload(request_table(prompts, lengths.tolist()), lengths, A100, "known")
    policy = Watched(plan)
    executor = SimulatedExecutor(A100, output_tokens=lengths, kv_cache_tokens=8000)
    steps = list(BatchingEngine(executor, SchedulerConfig(64, 1024)).run(requests, policy))
    assert sum(len(step.results) for step in steps) == len(kinds)
    assert policy.blended
    return policy.longest_wait


@pytest.mark.usefixtures("always_blending")
@pytest.mark.parametrize("giant", ["left", "right"])
@pytest.mark.parametrize("seed", range(3))
def test_nobody_is_first_of_a_side_for_longer_than_the_stated_bound(
    giant: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blendserve.scheduling.blend.PATIENCE_STEPS", 100)
    longest_output = GIANT if giant == "right" else 400
    prefill_steps = 8000 // MIN_STEP_TOKENS
    assert longest_wait(giant, seed) <= 100 + PROJECT_EVERY + 2 * (longest_output + prefill_steps)


@pytest.mark.usefixtures("always_blending")
def test_without_patience_somebody_waits_for_much_longer() -> None:
    """Guards the test above: without this, it could pass because there is always room."""
    assert longest_wait("left", 0) > 100 + PROJECT_EVERY + 2 * (400 + 8000 // MIN_STEP_TOKENS)


def test_where_depth_first_order_overlaps_already_it_does_not_blend() -> None:
    """Long and short answers on one document: sorting them apart would gain nothing and cost prefixes."""
    workload = named_workload("agents-mixed", 3000, 0, A100)
    blend, dfs = (run(workload, policy, A100, 200_000) for policy in ("blend", "dfs"))
    assert blend.makespan_s <= 1.005 * dfs.makespan_s
    assert blend.sharing_kept_ratio >= 0.999


@pytest.mark.parametrize("long_kind", [0, 1])
def test_where_nothing_is_known_some_of_every_kind_run_at_once(long_kind: int) -> None:
    """Whichever kind comes last in the order; else its lengths would be learnt when it is too late to blend them."""
    rng = np.random.default_rng(0)
    prompts = [
        [kind] * 20 + [int(t) for t in rng.integers(2, 1000, 100)] for kind in (0, 1) for _ in range(500)
    ]
    kinds = np.repeat([0, 1], 500)
    output_tokens = np.where(kinds == long_kind, 900, 3).astype(np.int32)
    requests, plan = plan_workload(request_table(prompts, max_tokens=1000), output_tokens, A100, "none")
    policy = Blend(plan)
    executor = SimulatedExecutor(A100, output_tokens=output_tokens, kv_cache_tokens=40_000)
    next(iter(BatchingEngine(executor, SchedulerConfig(64, 1024)).run(requests, policy)))
    policy._catch_up()
    admitted = ~policy._waits
    assert [int(admitted[kinds == kind].sum()) >= 2 for kind in (0, 1)] == [True, True]


class Eager(Blend):
    """Learns at once from every step."""

    def finished(self, requests: Any, output_tokens: Any) -> None:
        super().finished(requests, output_tokens)
        self._catch_up()

    def _admitted(self, side: int, requests: Any) -> None:
        super()._admitted(side, requests)
        self._catch_up()


class Late(Blend):
    """Finds that blending pays only when leaves are no longer split."""

    def _gains(self) -> bool:
        return not self._is_early and super()._gains()


class LateInOrder(Late):
    """Keeps the order of densities, and the split leaves, up to date while nothing blends."""

    def _plan_anew(self, unscaled: Any, *, blends: bool) -> None:
        self._reorder()
        self._put_in_order(unscaled, blends=blends)


def steps_of(
    policy_class: type[Blend], job: tuple[Any, Any], lengths: Any, kv_cache_tokens: int
) -> list[tuple[float, int]]:
    """Of every step its duration and how many requests it retracted."""
    requests, plan = plan_workload(*job, A100, lengths)
    executor = SimulatedExecutor(A100, output_tokens=job[1], kv_cache_tokens=kv_cache_tokens)
    run = BatchingEngine(executor, SchedulerConfig(64, 1024)).run(requests, policy_class(plan))
    return [(step.stats.duration_s, step.stats.num_retracted) for step in run]


def short_and_long(rng: np.random.Generator) -> tuple[list[list[int]], Any]:
    """Prompts and output tokens of 1,500 requests of long prompts and short outputs, and of 100 the other way round."""
    kinds = np.repeat([0, 1], [1500, 100])
    prompts = [
        [kind] * 20 + [int(t) for t in rng.integers(2, 1000, 300 if kind == 0 else 50)] for kind in kinds
    ]
    output = np.where(kinds == 1, 700, 20) * np.exp(rng.normal(0.0, 0.5, len(kinds)))
    return prompts, output.clip(1, 2000).astype(np.int32)


@pytest.mark.parametrize("lengths", ["sampled", "known", "none"])
def test_learning_from_many_steps_together_decides_as_learning_from_each(lengths: Any) -> None:
    prompts, output_tokens = short_and_long(np.random.default_rng(0))
    job = request_table(prompts, max_tokens=2000), output_tokens
    steps = steps_of(Blend, job, lengths, 20_000)
    assert steps == steps_of(Eager, job, lengths, 20_000)
    assert lengths == "known" or sum(num_retracted for _, num_retracted in steps) > 0


def test_an_order_left_out_while_nothing_blends_changes_no_decision() -> None:
    workload = named_workload("agents", 1500, 0, A100)
    job = workload.requests, workload.output_tokens
    assert steps_of(Late, job, "none", 100_000) == steps_of(LateInOrder, job, "none", 100_000)


def declared_lengths(kind: str, actual: Any, rng: np.random.Generator) -> Any:
    return {
        "exact": lambda: actual,
        "off": lambda: actual * np.exp(rng.normal(0.0, 1.0, len(actual))),
        "four times": lambda: 4 * actual,
        "default": lambda: np.full(len(actual), 2000),
        "somebody else's": lambda: rng.permutation(actual),
    }[kind]()


@pytest.mark.parametrize("kind", ["exact", "off", "four times", "default", "somebody else's"])
def test_wrong_declared_lengths_cost_little_against_none(kind: str) -> None:
    """Long outputs and short ones to blend, and what is declared of them is believed no further than it holds."""
    rng = np.random.default_rng(0)
    prompts, actual = short_and_long(rng)
    none = request_table(prompts, max_tokens=2000)
    declared = np.clip(declared_lengths(kind, actual, rng), 1, 2000).astype(np.int32)

    def makespan_s(requests: Any) -> float:
        plan = make_plan(requests, A100)
        report = simulate(
            "test", requests, actual, plan, "blend", A100, lengths="none", kv_cache_tokens=20_000
        )
        return report.makespan_s

    assert makespan_s(replace(none, declared_tokens=declared)) <= 1.05 * makespan_s(none)
