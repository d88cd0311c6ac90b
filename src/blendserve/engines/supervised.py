"""An engine that survives what fails beneath it: a step, a request that makes every step fail, a process that dies.

```
rest ──run──▶ a step fails ──▶ its requests are suspects, halved until one fails alone ──▶ Failure
  ▲                  │                                  │
  └── what waited ───┘                                  └── a half that passes has its results
```
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace

import numpy as np

from blendserve.engines import Engine
from blendserve.engines.retry import Backoff
from blendserve.errors import BlendServeError, EngineDiedError, EngineError, StepError
from blendserve.planner.prefix_tree import Ints
from blendserve.request import Failure, RequestTable, Result, StepOutput, StepStats
from blendserve.scheduling.policy import Policy

DEFAULT_MAX_RESTARTS = 3
ATTEMPTS_ALONE = 2
"""times that a request must fail by itself before it is given up"""
MAX_GIVEN_UP_WITHOUT_SUCCESS = 16
"""requests given up, none ever having succeeded, after which the engine is to blame"""
WAIT_SLICE_S = 0.2
"""waiting is cut into empty steps of this length, between which a job can be stopped"""


class SupervisedEngine:
    """Runs requests on an engine that may fail.

    A failed step costs what its requests had computed. They are run again in halves, and a half that fails in
    halves again, until the request that is to blame has failed alone `ATTEMPTS_ALONE` times; its result is a
    `Failure`. A failure that does not come back costs a retry and nothing else. One bad request among n costs
    log2(n) + `ATTEMPTS_ALONE` attempts that fail, and log2(n) that give the other requests their results. A dead
    engine is closed and opened anew, each time after a longer wait.

    Args:
        open_engine: opens the engine; called at once and after each death.
        make_policy: plans some of the requests.
        max_restarts: restarts in a row without a result in between, before the run fails.
        on_event: gets a line for each failure and restart.
        sleep: of the tests.

    Raises:
        ConfigError: by `open_engine`, at once.
    """

    def __init__(
        self,
        open_engine: Callable[[], Engine],
        make_policy: Callable[[RequestTable], Policy],
        *,
        max_restarts: int = DEFAULT_MAX_RESTARTS,
        on_event: Callable[[str], None] = lambda _line: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._open_engine = open_engine
        self._make_policy = make_policy
        self._max_restarts = max_restarts
        self._backoff = Backoff(base_s=1.0, max_s=60.0, max_attempts=max_restarts + 1)
        self._on_event = on_event
        self._sleep = sleep
        self._engine = open_engine()
        self._is_admitting = True
        self._deaths_in_row = 0
        self._num_retried = self._num_restarts = 0  # not reported yet
        self.name = self._engine.name
        self.cost_model = self._engine.cost_model
        self.kv_capacity_tokens = self._engine.kv_capacity_tokens
        self.max_model_len = self._engine.max_model_len

    def run(self, requests: RequestTable, policy: Policy) -> Generator[StepOutput]:
        """Run all requests; one that the engine cannot run has a `Failure`.

        Raises:
            EngineError: the engine dies again and again, or fails on everything.
        """
        self._is_admitting = True
        self._deaths_in_row = 0
        pending = _Pending(len(requests))
        first_policy: Policy | None = policy
        while self._is_admitting and pending.num_waiting:
            group = pending.take(cautiously=0 < self._max_restarts == self._deaths_in_row)
            table = requests if len(group) == len(requests) else requests.take(group)
            group_policy, first_policy = first_policy or self._make_policy(table), None
            try:
                for step in self._engine.run(table, group_policy):
                    results = [(int(group[request]), result) for request, result in step.results]
                    if results:
                        pending.finished(results)
                        self._deaths_in_row = 0
                    yield StepOutput(self._counted(step.stats, pending), results)
                continue
            except StepError as error:
                failure = error
            self._on_event(f"a step of {len(failure.requests):,} requests failed: {failure}")
            blamed = group[list(failure.requests)]
            self._num_retried += len(blamed)
            given_up = pending.blame(group, blamed, failure)
            if given_up:
                yield StepOutput(self._counted(_idle(), pending), given_up)
            # Where nobody is to blame nothing narrows, so that counts like a death.
            if pending.num_waiting and (isinstance(failure, EngineDiedError) or len(blamed) == 0):
                yield from self._restart(failure, pending)

    def stop_admitting(self) -> None:
        """See `Engine.stop_admitting`; what fails from now on is not run again."""
        self._is_admitting = False
        self._engine.stop_admitting()

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()

    def _restart(self, failure: BlendServeError, pending: _Pending) -> Iterator[StepOutput]:
        """Wait, in empty steps, and open the engine anew."""
        while True:
            self._deaths_in_row += 1
            wait_s = self._backoff.delay_s(self._deaths_in_row)
            if wait_s is None:
                raise EngineError(
                    f"the engine died {self._deaths_in_row} times without a result in between, at last with: "
                    f"{failure}. What is finished is kept. Free memory or change the engine's options and run the "
                    "job again for the rest, or allow more restarts with --max-engine-restarts"
                ) from failure
            while wait_s > 0 and self._is_admitting:
                self._sleep(min(wait_s, WAIT_SLICE_S))
                yield StepOutput(self._counted(_idle(min(wait_s, WAIT_SLICE_S)), pending))
                wait_s -= WAIT_SLICE_S
            if not self._is_admitting:
                return
            self._on_event(f"restarting the engine, {self._deaths_in_row} of at most {self._max_restarts}")
            self._num_restarts += 1
            self._engine.close()
            try:
                self._engine = self._open_engine()
                return
            except BlendServeError as error:
                failure = error

    def _counted(self, stats: StepStats, pending: _Pending) -> StepStats:
        """The facts of a step with those of the whole run added."""
        if not (pending.num_waiting or self._num_retried or self._num_restarts):
            return stats
        counted = replace(
            stats,
            num_waiting=stats.num_waiting + pending.num_waiting,
            num_retried_requests=self._num_retried,
            num_engine_restarts=self._num_restarts,
        )
        self._num_retried = self._num_restarts = 0
        return counted


class _Pending:
    """The requests that do not run and have no result: suspects of a failure in groups, and the rest."""

    def __init__(self, num_requests: int) -> None:
        self._rest: Ints = np.arange(num_requests, dtype=np.int32)
        self._suspects: list[Ints] = []
        """smaller groups last; each has failed, or is half of one that has"""
        self._is_done = np.zeros(num_requests, dtype=np.bool_)
        self._num_failed_alone: Counter[int] = Counter()
        self._num_given_up = 0
        self._has_succeeded = False

    @property
    def num_waiting(self) -> int:
        return len(self._rest) + sum(map(len, self._suspects))

    def take(self, *, cautiously: bool) -> Ints:
        """The requests to run next.

        Suspects go first, the smallest group before the others, so that an engine on which everything fails is
        soon known. `cautiously`, where one more failure would be the last: a single request of the least suspicious.
        """
        if cautiously:
            groups = [self._rest] if len(self._rest) else self._suspects
            index = max(range(len(groups)), key=lambda index: len(groups[index]))
            group, left = groups[index][:1], groups[index][1:]
            if groups is not self._suspects:
                self._rest = left
            elif len(left):
                self._suspects[index] = left
            else:
                del self._suspects[index]
            return group
        if self._suspects:
            return self._suspects.pop()
        group, self._rest = self._rest, self._rest[:0]
        return group

    def finished(self, results: list[tuple[int, Result]]) -> None:
        for request, result in results:
            self._is_done[request] = True
            self._has_succeeded |= not isinstance(result, Failure)

    def blame(self, group: Ints, blamed: Ints, error: StepError) -> list[tuple[int, Result]]:
        """Take back a group that failed in a step of the `blamed` ones; returns those that are given up.

        Raises:
            EngineError: it is not the requests' fault.
        """
        left = group[~self._is_done[group]]
        blamed = np.unique(blamed[~self._is_done[blamed]])
        self._rest = np.sort(np.concatenate((self._rest, np.setdiff1d(left, blamed))))
        if len(blamed) > 1:
            half = len(blamed) // 2
            self._suspects += [blamed[half:], blamed[:half]]
        if len(blamed) != 1:
            return []
        request = int(blamed[0])
        self._num_failed_alone[request] += 1
        if self._num_failed_alone[request] < ATTEMPTS_ALONE:
            self._suspects.append(blamed)
            return []
        self._num_given_up += 1
        if not self._has_succeeded and self._num_given_up > MAX_GIVEN_UP_WITHOUT_SUCCESS:
            raise EngineError(
                f"the engine failed on each of {self._num_given_up} requests that it ran one by one, at last "
                f"with: {error}. Check the model and the engine's options, then run the job again"
            ) from error
        self._is_done[request] = True
        message = (
            f"The engine fails on this request: {error}. It failed {ATTEMPTS_ALONE} times with this request "
            "alone; the others were run again without it."
        )
        return [(request, Failure("engine_error", message))]


def _idle(duration_s: float = 0.0) -> StepStats:
    """A step in which nothing ran."""
    return StepStats(
        duration_s=duration_s,
        num_prefill_tokens=0,
        num_decode_tokens=0,
        kv_tokens_read=0,
        num_running=0,
        num_waiting=0,
        kv_usage_ratio=0.0,
    )
