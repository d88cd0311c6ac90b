"""The scheduler with a shadow of the KV memory: what is in every place of every block."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blendserve.engines.simulated import SimulatedExecutor
from blendserve.planner.plan import make_plan
from blendserve.scheduling.batch import Batch
from blendserve.scheduling.policies import POLICIES, make_policy
from blendserve.scheduling.policy import Control, OrderedPolicy
from blendserve.scheduling.scheduler import Scheduler, SchedulerConfig
from tests.workload import COST_MODEL, SmallJob, request_table, small_jobs

Written = dict[tuple[int, int], tuple[object, ...]]


class ShadowedRun:
    """Runs a job on the scheduler and checks every step."""

    def __init__(
        self,
        job: SmallJob,
        policy_name: str,
        estimate: float | None = None,
        *,
        with_block_tables: bool = True,
    ) -> None:
        self.job = job
        requests = request_table(job.prompts, job.max_tokens)
        plan = make_plan(requests, COST_MODEL)
        if estimate is not None:
            plan = plan.reordered(np.full(len(job.prompts), estimate))
        self.scheduler = Scheduler(
            requests,
            make_policy(policy_name, plan, seed=job.seed),
            SchedulerConfig(job.max_num_seqs, job.max_num_batched_tokens, job.free_unused_prefixes),
            num_blocks=job.num_blocks,
            block_size=job.block_size,
            max_model_len=job.num_blocks * job.block_size,
            with_block_tables=with_block_tables,
            cost_model=COST_MODEL,
        )
        self.executor = SimulatedExecutor(
            COST_MODEL, output_tokens=np.array(job.output_tokens, dtype=np.int32)
        )
        self.executor.start(requests)
        self.written: Written = {}
        self.cached: dict[int, int] = {}
        self.num_computed = 0
        self.num_prefill = 0
        self.decode_rows = np.zeros(len(job.prompts), dtype=int)

    def run(self) -> "ShadowedRun":
        scheduler = self.scheduler
        while scheduler.num_unfinished:
            batch = scheduler.schedule()
            scheduler.check_conservation()
            assert batch.num_tokens.sum() == batch.num_prefill_tokens + batch.num_decode_tokens
            assert batch.num_tokens.sum() <= self.job.max_num_batched_tokens
            assert (batch.num_tokens > 0).all()
            assert scheduler.kv_committed_tokens <= scheduler.kv_capacity_tokens
            self.num_prefill += batch.num_prefill_tokens
            self.write(batch)
            self.read(batch)
            step = self.executor.execute(batch)
            for request, num_cached, _ in scheduler.update(batch, step.finished, step.duration_s):
                assert request not in self.cached
                self.cached[request] = num_cached
            scheduler.check_conservation()
        assert sorted(self.cached) == list(range(len(self.job.prompts)))
        # Every prompt token was computed or found in the cache; what was computed besides was computed again.
        assert self.num_prefill + sum(self.cached.values()) >= sum(map(len, self.job.prompts))
        return self

    def content(self, request: int, position: int) -> tuple[object, ...]:
        """What the KV of a token depends on: all tokens up to it; generated ones are the request's own."""
        prompt = self.job.prompts[request]
        if position < len(prompt):
            return tuple(prompt[: position + 1])
        return ("generated", request, position)

    def write(self, batch: Batch) -> None:
        for slot, request, start, count in zip(
            batch.slots, batch.requests, batch.num_computed, batch.num_tokens, strict=True
        ):
            self.num_computed += int(count)
            for position in range(start, start + count):
                block, offset = divmod(position, self.job.block_size)
                place = int(batch.block_tables[slot, block]), offset
                self.written[place] = self.content(int(request), position)

    def read(self, batch: Batch) -> None:
        for slot, request, start, count in zip(
            batch.slots, batch.requests, batch.num_computed, batch.num_tokens, strict=True
        ):
            for position in range(start + count):
                block, offset = divmod(position, self.job.block_size)
                place = int(batch.block_tables[slot, block]), offset
                assert self.written[place] == self.content(int(request), position)


@settings(deadline=None, max_examples=150)
@given(small_jobs(), st.sampled_from(POLICIES))
def test_every_request_ends_once_and_reads_what_was_written_for_it(job: SmallJob, policy: str) -> None:
    ShadowedRun(job, policy).run()


@settings(deadline=None, max_examples=100)
@given(small_jobs(), st.sampled_from(POLICIES))
def test_estimates_that_are_far_too_low_cost_retractions_and_nothing_else(job: SmallJob, policy: str) -> None:
    ShadowedRun(job, policy, estimate=1.0).run()


def a_job(**changes: object) -> SmallJob:
    fields: dict[str, object] = {
        "prompts": [[1, 2, 3, 4, 5, 6, 7, 8, 9, 100 + i] for i in range(12)],
        "max_tokens": [20] * 12,
        "output_tokens": [20] * 12,
        "block_size": 2,
        "num_blocks": 30,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 12,
        "free_unused_prefixes": True,
        "seed": 0,
    }
    return SmallJob(**{**fields, **changes})


@pytest.mark.parametrize("policy", POLICIES)
def test_low_estimates_do_retract(policy: str) -> None:
    """Guards the tests above: without this, they could pass because memory never runs out."""
    run = ShadowedRun(a_job(), policy, estimate=1.0).run()
    assert run.scheduler.num_retracted > 0


def test_right_estimates_do_not_retract() -> None:
    run = ShadowedRun(a_job(), "fcfs", estimate=20.0).run()
    assert run.scheduler.num_retracted == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_shared_prefix_is_computed_once(policy: str) -> None:
    """Also when all requests that share it start in the same step."""
    job = a_job(num_blocks=1000, max_num_batched_tokens=200)
    run = ShadowedRun(job, policy).run()
    shared, own, generated = 8, 2, 19  # four full blocks of two; 20 outputs need 19 more passes
    assert run.num_computed == shared + 12 * (own + generated)
    assert sorted(run.cached.values()) == [0] + [shared] * 11


def test_a_prefix_computed_over_several_steps_is_still_computed_once() -> None:
    job = a_job(num_blocks=1000, max_num_batched_tokens=4)
    run = ShadowedRun(job, "fcfs").run()
    assert run.num_computed == 8 + 12 * (2 + 19)


@pytest.mark.parametrize("free_unused_prefixes", [True, False])
def test_finished_prompts_stay_cached_only_under_lru(free_unused_prefixes: bool) -> None:
    job = a_job(max_num_seqs=1, free_unused_prefixes=free_unused_prefixes)
    run = ShadowedRun(job, "fcfs").run()
    assert sorted(run.cached.values()) == [0] + [8] * 11
    counts = run.scheduler.block_counts()
    assert counts["free"] + counts["evictable"] == 30
    assert (counts["evictable"] == 0) == free_unused_prefixes


@settings(deadline=None, max_examples=60)
@given(small_jobs(), st.sampled_from(POLICIES))
def test_counting_blocks_decides_like_linking_them(job: SmallJob, policy: str) -> None:
    """Simulated and native runs differ in the executor alone."""
    linked, counted = ShadowedRun(job, policy), ShadowedRun(job, policy, with_block_tables=False)
    while linked.scheduler.num_unfinished:
        batches = [run.scheduler.schedule() for run in (linked, counted)]
        counted.scheduler.check_conservation()
        for column in ("requests", "num_computed", "num_tokens", "samples"):
            assert (getattr(batches[0], column) == getattr(batches[1], column)).all()
        for run, batch in zip((linked, counted), batches, strict=True):
            step = run.executor.execute(batch)
            run.scheduler.update(batch, step.finished, step.duration_s)
    assert counted.scheduler.num_unfinished == 0


class AdmitsAll(OrderedPolicy):
    """Admits whatever fits, however much is waiting for its prefill already."""

    def _admit_in_order(self, control: Control) -> None:
        if len(self._first) == 0:
            self._waiting = self._waiting[control.admit(self._waiting, self.output_tokens_est, 1 << 30) :]


@pytest.mark.parametrize("num_blocks", range(12, 30))
def test_admissions_leave_room_for_the_decodes_of_the_same_step(num_blocks: int) -> None:
    """A request once took the block that a running sequence needed for its next token in that very step.

    It takes sequences that wait for their prefill for longer than they were expected to live: the memory projection
    has forgotten them, and admission fills the device to the last block.
    """
    requests = request_table([[i] * (3 + i % 9) for i in range(40)], 30)
    plan = make_plan(requests, COST_MODEL).reordered(np.full(40, 1.0))
    output_tokens = np.array([1 + (7 * i) % 30 for i in range(40)], dtype=np.int32)
    scheduler = Scheduler(
        requests,
        AdmitsAll(plan, np.arange(40, dtype=np.int32), "all"),
        SchedulerConfig(max_num_seqs=40, max_num_batched_tokens=8),
        num_blocks=num_blocks,
        block_size=4,
        max_model_len=num_blocks * 4,
        with_block_tables=False,
        cost_model=COST_MODEL,
    )
    executor = SimulatedExecutor(COST_MODEL, output_tokens=output_tokens)
    executor.start(requests)
    while scheduler.num_unfinished:
        batch = scheduler.schedule()
        scheduler.check_conservation()
        step = executor.execute(batch)
        scheduler.update(batch, step.finished, step.duration_s)
