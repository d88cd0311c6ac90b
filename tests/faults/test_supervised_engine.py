"""Engines that fail in every way, beneath the supervision that a job runs on."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blendserve.engines.batching import BatchingEngine, StepResult
from blendserve.engines.simulated import SimulatedExecutor
from blendserve.engines.supervised import ATTEMPTS_ALONE, MAX_GIVEN_UP_WITHOUT_SUCCESS, SupervisedEngine
from blendserve.errors import EngineDiedError, EngineError
from blendserve.jobs.job import Job
from blendserve.jobs.openai_format import COMPLETIONS_URL, parse_line
from blendserve.jobs.prepare import prepare
from blendserve.jobs.store import ResultStore
from blendserve.planner.plan import make_plan
from blendserve.request import Completion, Failure, RequestTable, Result
from blendserve.scheduling.batch import Batch
from blendserve.scheduling.policies import make_policy
from blendserve.scheduling.policy import Policy
from blendserve.scheduling.scheduler import SchedulerConfig
from tests.workload import COST_MODEL, request_table


class FailingExecutor(SimulatedExecutor):
    """Raises where `fault` returns an exception for a step; requests are known by their seeds, in any table."""

    def __init__(self, fault: Callable[[set[int]], Exception | None]) -> None:
        super().__init__(COST_MODEL)
        self.fault = fault
        self.closed = False

    def start(self, requests: RequestTable) -> None:
        super().start(requests)
        self.identities = requests.seeds.astype(int)

    def execute(self, batch: Batch) -> StepResult:
        assert not self.closed, "a closed engine was used"
        error = self.fault({int(self.identities[request]) for request in batch.requests})
        if error is not None:
            raise error
        return super().execute(batch)

    def close(self) -> None:
        self.closed = True


@dataclass
class Outcome:
    results: dict[int, Result] = field(default_factory=dict)
    num_retried_requests: int = 0
    num_engine_restarts: int = 0
    waited_s: float = 0.0
    events: list[str] = field(default_factory=list)
    opened: list[FailingExecutor] = field(default_factory=list)
    error: EngineError | None = None

    @property
    def failed(self) -> set[int]:
        return {request for request, result in self.results.items() if isinstance(result, Failure)}


def plan(requests: RequestTable) -> Policy:
    return make_policy("dfs", make_plan(requests, COST_MODEL))


def run(
    fault: Callable[[set[int]], Exception | None],
    num_requests: int = 600,
    max_num_seqs: int = 256,
    max_restarts: int = 3,
    stop_after: int | None = None,
) -> Outcome:
    outcome = Outcome()

    def open_engine() -> BatchingEngine:
        executor = FailingExecutor(fault)
        outcome.opened.append(executor)
        return BatchingEngine(
            executor, SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=4096)
        )

    def sleep(seconds: float) -> None:
        outcome.waited_s += seconds

    engine = SupervisedEngine(
        open_engine, plan, max_restarts=max_restarts, on_event=outcome.events.append, sleep=sleep
    )
    rng = np.random.default_rng(0)
    requests = request_table(
        [[request % 7, request] for request in range(num_requests)],
        max_tokens=rng.integers(1, 12, num_requests).tolist(),
    )
    try:
        for number, step in enumerate(engine.run(requests, plan(requests))):
            outcome.num_retried_requests += step.stats.num_retried_requests
            outcome.num_engine_restarts += step.stats.num_engine_restarts
            for request, result in step.results:
                assert request not in outcome.results, "two results for one request"
                outcome.results[request] = result
            if number == stop_after:
                engine.stop_admitting()
    except EngineError as error:
        outcome.error = error
    return outcome


class Poison:
    """Fails every step that has one of some requests in it."""

    def __init__(self, poisoned: set[int], error: Callable[[], Exception]) -> None:
        self.poisoned = poisoned
        self.error = error
        self.failed_steps: list[set[int]] = []

    def __call__(self, requests: set[int]) -> Exception | None:
        if not requests & self.poisoned:
            return None
        self.failed_steps.append(requests)
        return self.error()


def test_a_poisoned_request_fails_alone_after_a_bisection() -> None:
    fault = Poison({123}, lambda: RuntimeError("bad kernel"))
    outcome = run(fault)
    assert outcome.error is None
    assert sorted(outcome.results) == list(range(600))
    assert outcome.failed == {123}
    failure = outcome.results[123]
    assert isinstance(failure, Failure)
    assert (failure.code, failure.status_code) == ("engine_error", 500)
    assert "RuntimeError: bad kernel" in failure.message
    sizes = [len(step) for step in fault.failed_steps]
    assert sizes == [256, 128, 64, 32, 16, 8, 4, 2, 1, 1]  # 8 halvings, and once more alone
    assert outcome.num_engine_restarts == 0
    assert len(outcome.opened) == 1


@pytest.mark.parametrize("error", [RuntimeError("no"), MemoryError(), EngineDiedError("killed")])
def test_several_poisoned_requests_fail_and_all_others_succeed(error: Exception) -> None:
    poisoned = {0, 1, 255, 256, 300, 599}
    outcome = run(Poison(poisoned, lambda: error))
    assert outcome.error is None
    assert sorted(outcome.results) == list(range(600))
    assert outcome.failed == poisoned
    died = isinstance(error, EngineDiedError)
    assert (len(outcome.opened) > 1) == died
    assert len(outcome.opened) == 1 + outcome.num_engine_restarts
    assert all(executor.closed for executor in outcome.opened[:-1])
    assert (outcome.waited_s > 0) == died


def test_the_cost_of_many_poisons_is_bounded() -> None:
    poisoned = set(range(0, 600, 40))
    fault = Poison(poisoned, lambda: RuntimeError("no"))
    outcome = run(fault)
    assert outcome.failed == poisoned
    attempts = Counter(request for step in fault.failed_steps for request in step)
    assert max(attempts.values()) <= 8 + 1 + ATTEMPTS_ALONE


def test_a_failure_that_does_not_come_back_fails_nobody() -> None:
    left = [RuntimeError("once"), MemoryError("twice"), EngineDiedError("thrice")]
    steps = iter(range(100_000))
    outcome = run(lambda _: left.pop() if next(steps) % 5 == 4 and left else None)
    assert not left
    assert outcome.failed == set()
    assert sorted(outcome.results) == list(range(600))
    assert outcome.num_retried_requests > 0
    assert outcome.num_engine_restarts == 1
    assert len(outcome.events) == 4  # three failures and a restart


def test_an_engine_that_always_dies_is_given_up_and_nothing_is_blamed() -> None:
    outcome = run(lambda _: EngineDiedError("killed by SIGKILL"), max_restarts=3)
    assert outcome.results == {}
    assert "died 4 times" in str(outcome.error)
    assert "SIGKILL" in str(outcome.error)
    assert "--max-engine-restarts" in str(outcome.error)
    assert len(outcome.opened) == 4


def test_without_restarts_the_first_death_ends_the_run() -> None:
    outcome = run(lambda _: EngineDiedError("killed"), max_restarts=0)
    assert "died 1 times" in str(outcome.error)
    assert len(outcome.opened) == 1


def test_an_engine_that_dies_now_and_then_finishes() -> None:
    steps = iter(range(100_000))
    outcome = run(lambda _: EngineDiedError("killed") if next(steps) % 30 == 29 else None, max_num_seqs=32)
    assert outcome.error is None
    assert outcome.failed == set()
    assert sorted(outcome.results) == list(range(600))
    assert outcome.num_engine_restarts > 3  # more than in a row


def test_an_engine_on_which_everything_fails_is_not_blamed_on_the_requests() -> None:
    fault = Poison(set(range(600)), lambda: RuntimeError("no kernel for this device"))
    outcome = run(fault)
    assert "no kernel for this device" in str(outcome.error)
    assert len(outcome.results) == MAX_GIVEN_UP_WITHOUT_SUCCESS


def test_an_engine_that_cannot_be_opened_again_counts_as_dead() -> None:
    opened = 0

    def open_engine() -> BatchingEngine:
        nonlocal opened
        opened += 1
        if opened in {2, 3}:
            raise EngineError("no memory for the weights")
        fault = Poison(set() if opened > 1 else {3}, lambda: EngineDiedError("killed"))
        return BatchingEngine(FailingExecutor(fault), SchedulerConfig())

    engine = SupervisedEngine(open_engine, plan, sleep=lambda _: None)
    requests = request_table([[request] for request in range(10)], 5)
    results = [request for step in engine.run(requests, plan(requests)) for request, _ in step.results]
    assert sorted(results) == list(range(10))
    assert opened == 4


def test_to_stop_admitting_ends_what_runs_and_starts_nothing() -> None:
    outcome = run(lambda _: None, max_num_seqs=16, stop_after=20)
    assert outcome.error is None
    assert 16 <= len(outcome.results) < 200
    whole = run(lambda _: None, max_num_seqs=16)
    for request, result in outcome.results.items():
        assert isinstance(result, Completion)
        assert result == whole.results[request]


def test_a_job_can_be_stopped_while_it_waits_for_a_restart() -> None:
    engine = SupervisedEngine(
        lambda: BatchingEngine(FailingExecutor(lambda _: EngineDiedError("killed")), SchedulerConfig()),
        plan,
        max_restarts=1000,
        sleep=lambda _: None,
    )
    requests = request_table([[1]], 5)

    def steps() -> Iterator[int]:
        for number, _ in enumerate(engine.run(requests, plan(requests))):
            if number == 3:
                engine.stop_admitting()
            yield number

    assert len(list(steps())) < 10


class TokenIds:
    """A tokenizer for prompts that are token ids already."""

    vocab_size = 1000


def test_a_job_writes_one_line_for_each_request_whatever_its_engine_does(tmp_path: Path) -> None:
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": COMPLETIONS_URL, "body": {"prompt": [i], "seed": i}}
        for i in range(100)
    ]
    rows = (parse_line(number, orjson.dumps(line)) for number, line in enumerate(lines, start=1))
    prepared = prepare(rows, TokenIds(), served_model_name="m", max_model_len=100)
    steps = iter(range(100_000))

    def fault(requests: set[int]) -> Exception | None:
        if next(steps) in {5, 90}:
            return EngineDiedError("killed")
        return RuntimeError("bad kernel") if requests & {17, 18, 77} else None

    def open_engine() -> BatchingEngine:
        return BatchingEngine(FailingExecutor(fault), SchedulerConfig(max_num_seqs=32))

    store = ResultStore(tmp_path / "out.jsonl", model="m")
    engine = SupervisedEngine(open_engine, plan, sleep=lambda _: None)
    job = Job(prepared, engine, plan(prepared.requests), store, TokenIds(), model="m")
    for _ in job.run():
        pass
    job.close()
    results = [orjson.loads(line) for line in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    errors = [orjson.loads(line) for line in (tmp_path / "out.errors.jsonl").read_bytes().splitlines()]
    assert sorted(line["custom_id"] for line in errors) == ["r17", "r18", "r77"]
    assert sorted(line["custom_id"] for line in results + errors) == sorted(f"r{i}" for i in range(100))
    for line in errors:
        assert line["response"]["status_code"] == 500
        assert line["response"]["body"]["error"]["code"] == "engine_error"
        assert "bad kernel" in line["response"]["body"]["error"]["message"]
    assert job.summary.is_complete
    assert job.summary.num_engine_restarts == 2
    assert job.summary.num_retried_requests > 3


@settings(max_examples=30, deadline=None)
@given(
    num_requests=st.integers(1, 60),
    poisoned=st.sets(st.integers(0, 59), max_size=8),
    killers=st.sets(st.integers(0, 59), max_size=3),
    hiccups=st.sets(st.integers(0, 200), max_size=6),
    max_num_seqs=st.sampled_from([1, 3, 16, 64]),
    max_restarts=st.integers(0, 4),
)
def test_whatever_fails_every_request_has_one_result_or_can_be_resumed(
    num_requests: int,
    poisoned: set[int],
    killers: set[int],
    hiccups: set[int],
    max_num_seqs: int,
    max_restarts: int,
) -> None:
    steps = iter(range(1_000_000))

    def fault(requests: set[int]) -> Exception | None:
        step = next(steps)
        if requests & killers:
            return EngineDiedError("killed")
        if requests & poisoned:
            return RuntimeError("poison")
        return RuntimeError("hiccup") if step in hiccups else None

    outcome = run(fault, num_requests, max_num_seqs, max_restarts)
    bad = (poisoned | killers) & set(range(num_requests))
    done = set(outcome.results)
    assert done <= set(range(num_requests))
    if outcome.error is None:
        assert done == set(range(num_requests))
        assert bad <= outcome.failed
    if len(hiccups) == 0:
        assert outcome.failed <= bad
    assert not (bad & (done - outcome.failed))
