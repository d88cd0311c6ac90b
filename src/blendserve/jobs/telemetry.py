"""What a run measures of itself: a time line of bounded size, lengths expected and come, remaining time, energy.

A `Telemetry` is told of every step and holds plain numbers. Progress display, metrics endpoint, log and report read
from it, each at its own pace, so that a step costs a few microseconds however much is switched on.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from blendserve.jobs.job import JobProgress
from blendserve.planner.plan import Plan
from blendserve.planner.prefix_tree import Ints
from blendserve.request import Completion
from blendserve.scheduling.policy import FIRST_REPLAN_AFTER, OVERRUN_FACTOR
from blendserve.simulator import Calibration

LogLevel = Literal["debug", "info", "warning", "error"]

MAX_POINTS = 1000
"""of a time line; when there are more, about every second one is dropped"""
FIRST_INTERVAL_S = 0.1
"""between the points of a time line at first"""
FACTS_INTERVAL_S = 0.5
STEP_LOG_INTERVAL_S = 10.0
RECENT_RATIO = 0.25
"""share of the run that present rates are taken over ..."""
MIN_RECENT_S = 10.0
"""... at least"""
MAX_RECENT_S = 120.0
"""... and at most, of rates that are shown"""
RENEW_ESTIMATE_AT = 1.25
"""growth of the number of finished requests after which expected lengths are worked out anew"""
OUTLIVED_RATIO = OVERRUN_FACTOR - 1.0
"""what runs is expected to generate at least this share of what it already has"""

STEP_TIME_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
LENGTH_BOUNDS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """What a run tells about itself besides its results."""

    log_file: Path | None = None
    """JSON lines, appended"""
    log_level: LogLevel = "info"
    metrics_port: int | None = None
    """of the Prometheus endpoint; 0 takes a free one"""
    metrics_host: str = "127.0.0.1"
    report: bool = True
    """write OUT.report.json and OUT.report.html"""
    cost_per_hour: float | None = None
    """of the machine, in any currency"""


class Throttle:
    """Says when the next update is due: so often, and more seldom where updates cost more than `MAX_COST_RATIO`."""

    MAX_COST_RATIO = 0.003

    def __init__(self, interval_s: float, first_s: float | None = None) -> None:
        self._interval_s = interval_s
        self._next_s = time.perf_counter() + (interval_s if first_s is None else first_s)
        self._started_s = 0.0

    def is_due(self) -> bool:
        """Whether to update now; then call `updated` after it."""
        now_s = time.perf_counter()
        if now_s < self._next_s:
            return False
        self._started_s = now_s
        return True

    def updated(self) -> None:
        """The update is done; its time decides when the next one is due."""
        now_s = time.perf_counter()
        self._next_s = now_s + max(self._interval_s, (now_s - self._started_s) / self.MAX_COST_RATIO)


class Histogram:
    """Counts of values by upper bound, as Prometheus has them; the last count is of values above all bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0
        """sum of the values"""

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value

    def add_all(self, values: Ints) -> None:
        """Count many at once."""
        found = np.bincount(np.searchsorted(self.bounds, values), minlength=len(self.counts))
        self.counts = [old + new for old, new in zip(self.counts, found.tolist(), strict=True)]
        self.total += float(values.sum(dtype=np.int64))


class Point(NamedTuple):
    """Totals of a run at one moment; the difference of two is what happened between them."""

    elapsed_s: float = 0.0
    engine_s: float = 0.0
    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    kv_tokens_read: int = 0
    compute_s: float = 0.0
    memory_s: float = 0.0
    kv_usage_s: float = 0.0
    """KV usage × engine seconds"""
    running_s: float = 0.0
    """running requests × engine seconds"""
    completed: int = 0
    failed: int = 0
    num_retracted: int = 0
    num_retried_requests: int = 0


class Timeline:
    """A run's totals at points of about equal distance in time: at most `MAX_POINTS` however long it runs."""

    def __init__(self) -> None:
        self.points = [Point()]
        self._interval_s = FIRST_INTERVAL_S

    def is_due(self, elapsed_s: float) -> bool:
        """Whether it is time for the next point."""
        return elapsed_s - self.points[-1].elapsed_s >= self._interval_s

    def add(self, point: Point) -> None:
        """Append a point; where there are too many, those closer together than twice the mean distance go."""
        self.points.append(point)
        if len(self.points) <= MAX_POINTS:
            return
        self._interval_s = 2.0 * point.elapsed_s / MAX_POINTS
        kept = [self.points[0]]
        for candidate in self.points[1:-1]:
            if candidate.elapsed_s - kept[-1].elapsed_s >= self._interval_s:
                kept.append(candidate)
        self.points = [*kept, point]

    def since(self, now: Point, window_s: float) -> Point:
        """A point about so many seconds ago: the first one inside the window, if that leaves at least half of it."""
        begin_s = now.elapsed_s - window_s
        index = bisect.bisect_left(self.points, begin_s, key=lambda point: point.elapsed_s)
        if index < len(self.points) and now.elapsed_s - self.points[index].elapsed_s >= window_s / 2.0:
            return self.points[index]
        return self.points[max(index - 1, 0)]

    def columns(self) -> dict[str, list[float]]:
        """What happened between neighbouring points, as columns of equal length."""
        table = np.array(self.points, dtype=np.float64)
        ends = table[1:]
        span = dict(zip(Point._fields, np.diff(table, axis=0).T, strict=True))
        wall_s, engine_s = np.maximum(span["elapsed_s"], 1e-9), np.maximum(span["engine_s"], 1e-9)
        modelled_s = np.maximum(span["compute_s"] + span["memory_s"], 1e-12)
        columns = {
            "elapsed_s": ends[:, 0],
            "duration_s": span["elapsed_s"],
            "num_steps": span["num_steps"],
            "prefill_tokens_per_s": span["num_prefill_tokens"] / wall_s,
            "decode_tokens_per_s": span["num_decode_tokens"] / wall_s,
            "kv_usage_ratio": span["kv_usage_s"] / engine_s,
            "num_running": span["running_s"] / engine_s,
            "compute_ratio": span["compute_s"] / modelled_s,
            "completed": span["completed"],
            "failed": span["failed"],
            "num_retracted": span["num_retracted"],
            "num_retried_requests": span["num_retried_requests"],
        }
        return {name: values.round(6).tolist() for name, values in columns.items()}


class LengthCalibration:
    """Output lengths expected at admission against those that came, in bounded memory.

    By octave of the expectation; lengths of 64 tokens or more are kept to a 32nd of their octave, so quantiles are
    exact below and within 3 % above.
    """

    def __init__(self) -> None:
        self.num_requests: Counter[int] = Counter()
        self._expected: Counter[int] = Counter()
        self._actual: Counter[int] = Counter()
        self._lengths: dict[int, Counter[int]] = {}

    def add(self, expected: Ints, actual: Ints) -> None:
        """Count finished requests; [num_finished] each, `expected` at least 1."""
        octaves = _bit_length(expected)
        fine_bits = np.maximum(_bit_length(actual) - 6, 0)
        lengths = actual >> fine_bits << fine_bits
        for octave in np.unique(octaves).tolist():
            of = octaves == octave
            self.num_requests[octave] += int(np.count_nonzero(of))
            self._expected[octave] += int(expected[of].sum(dtype=np.int64))
            self._actual[octave] += int(actual[of].sum(dtype=np.int64))
            values, counts = np.unique(lengths[of], return_counts=True)
            counter = self._lengths.setdefault(octave, Counter())
            counter.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))

    def calibration(self) -> Calibration:
        """By ascending expectation."""
        octaves = sorted(self.num_requests)
        count = self.num_requests
        return Calibration(
            [count[octave] for octave in octaves],
            [self._expected[octave] / count[octave] for octave in octaves],
            [self._actual[octave] / count[octave] for octave in octaves],
            *([self._quantile(octave, share) for octave in octaves] for share in (0.1, 0.5, 0.9)),
        )

    def total_ratio(self) -> float | None:
        """Tokens that came over tokens expected; None before anything has finished."""
        expected = self._expected.total()
        return self._actual.total() / expected if expected else None

    def _quantile(self, octave: int, share: float) -> float:
        lengths = self._lengths[octave]
        rank, seen = share * (self.num_requests[octave] - 1), 0
        for length in sorted(lengths):
            seen += lengths[length]
            if seen > rank:
                return float(length)
        raise AssertionError("the counts of an octave do not add up")


def _bit_length(values: Ints) -> Ints:
    return np.frexp(values)[1]


class RemainingTime:
    """How long the rest of a job will take: modelled work that is left, at the speed of late.

    Lengths of unfinished requests are estimated as the policies do it, from the finished ones of their subtree, and
    what the running ones have already generated is taken off. Speed is modelled work done per second over the last
    quarter of the run, so a slow start shows soon. No less than the running requests need one token a step: what is
    left of a thin tail is not work. It needs nothing of the engine but its step facts.
    """

    def __init__(self, plan: Plan) -> None:
        self._cost_model = plan.cost_model
        self._estimator = plan.estimator()
        self._prompt_tokens = plan.prompt_tokens
        self._max_tokens = plan.max_tokens
        self._num_unique_tokens = plan.tree.num_unique_units
        self._prompt_s = plan.compute_s() - float(
            plan.cost_model.decode_compute_s(plan.output_tokens_est).sum()
        )
        self._renew_at = FIRST_REPLAN_AFTER
        self._is_open = np.ones(plan.num_requests, dtype=np.bool_)
        self._num_open = plan.num_requests
        self._finished_tokens = 0
        self._take_estimate(plan.output_tokens_est)

    def finished(self, requests: Ints, output_tokens: Ints) -> None:
        """Requests will not run again, with so many tokens (0 of failed ones); [num_finished] each."""
        self._is_open[requests] = False
        self._num_open -= len(requests)
        # A prefill generates the first token.
        self._finished_tokens += int(np.maximum(output_tokens - 1, 0).sum(dtype=np.int64))
        self._estimator.finished(requests, output_tokens)
        if self._estimator.num_finished >= self._renew_at:
            self._renew_at = int(self._estimator.num_finished * RENEW_ESTIMATE_AT) + 1
            self._take_estimate(self._estimator.estimate())
        else:
            self._open_tokens -= float(self._expected[requests].sum())
            self._open_memory_s -= float(self._memory_s(requests).sum())

    def remaining_s(self, timeline: Timeline, now: Point, num_running: int, num_waiting: int) -> float | None:
        """Seconds of wall time; None while nothing is known of the speed."""
        since = timeline.since(now, max(RECENT_RATIO * now.elapsed_s, MIN_RECENT_S))
        overlap = self._cost_model.hardware.overlap
        span_s, num_steps = now.elapsed_s - since.elapsed_s, now.num_steps - since.num_steps
        done_s = overlap(
            self._compute_s(now) - self._compute_s(since), self._reads_s(now) - self._reads_s(since)
        )
        if done_s <= 0.0 or span_s <= 0.0:
            return None
        if self._num_open == 0:
            return 0.0
        waiting_tokens = self._open_tokens * min(num_waiting / self._num_open, 1.0)
        generated = max(now.num_decode_tokens - self._finished_tokens, 0)
        running_left = max(self._open_tokens - waiting_tokens - generated, OUTLIVED_RATIO * generated)
        if num_waiting == 0:
            caps = int(self._max_tokens[self._is_open].sum(dtype=np.int64))
            running_left = min(running_left, max(caps - generated, 0))
        left_tokens = waiting_tokens + running_left
        memory_s = self._open_memory_s * left_tokens / max(self._open_tokens, 1.0)
        compute_s = float(self._cost_model.decode_compute_s(left_tokens))
        left_s = overlap(self._prompt_s - self._prefill_s(now) + compute_s, memory_s) * span_s / done_s
        tail_s = running_left / max(num_running, 1) * span_s / max(num_steps, 1)
        return max(left_s, tail_s)

    def _prefill_s(self, point: Point) -> float:
        return self._prompt_s * min(point.num_prefill_tokens / max(self._num_unique_tokens, 1), 1.0)

    def _compute_s(self, point: Point) -> float:
        return self._prefill_s(point) + float(self._cost_model.decode_compute_s(point.num_decode_tokens))

    def _reads_s(self, point: Point) -> float:
        return point.kv_tokens_read * self._cost_model.step_lines().memory_s_per_read

    def _take_estimate(self, expected: Any) -> None:
        self._expected = expected.astype(np.float32)
        open_requests = np.flatnonzero(self._is_open)
        self._open_tokens = float(self._expected[open_requests].sum(dtype=np.float64))
        self._open_memory_s = float(self._memory_s(open_requests).sum())

    def _memory_s(self, requests: Any) -> Any:
        return self._cost_model.memory_s(self._prompt_tokens[requests], self._expected[requests])


class EnergyMeter:
    """Energy of the processor packages as the kernel counts it (RAPL); `is_available` where it may be read."""

    def __init__(self, folder: Path = Path("/sys/class/powercap")) -> None:
        self._counters: list[tuple[Path, int]] = []
        self._last: list[int] = []
        self.energy_j = 0.0
        for package in sorted(folder.glob("*-rapl:[0-9]*")):
            if package.name.count(":") != 1:
                continue  # a part of a package, which the package's counter has in it
            try:
                wraps_at = int((package / "max_energy_range_uj").read_text())
                self._last.append(int((package / "energy_uj").read_text()))
            except (OSError, ValueError):
                continue
            self._counters.append((package / "energy_uj", wraps_at))

    @property
    def is_available(self) -> bool:
        """Whether any package can be read."""
        return bool(self._counters)

    def read(self) -> None:
        """Bring `energy_j` up to date; the counters wrap within minutes to hours, so call it now and then."""
        for index, (path, wraps_at) in enumerate(self._counters):
            try:
                now = int(path.read_text())
            except (OSError, ValueError):
                continue
            used = now - self._last[index]
            self.energy_j += (used if used >= 0 else used + wraps_at) / 1e6
            self._last[index] = now


class Telemetry:
    """Everything measured of one run; see the module."""

    def __init__(self, plan: Plan, progress: JobProgress) -> None:
        self.plan = plan
        self.progress = progress
        self.timeline = Timeline()
        self.lengths = LengthCalibration()
        self.step_time_s = Histogram(STEP_TIME_BOUNDS_S)
        self.prompt_length = Histogram(LENGTH_BOUNDS)
        self.output_length = Histogram(LENGTH_BOUNDS)
        self.finish_reasons: Counter[str] = Counter()
        """completions by the reason they ended"""
        self.energy = EnergyMeter()
        self._remaining = RemainingTime(plan) if plan.num_requests else None
        self._finished: list[tuple[int, int, int]] = []
        """(request, output tokens, those expected) of requests that are in no figure yet"""
        self._kv_tokens_read = 0
        self._kv_usage_s = 0.0
        self._running_s = 0.0
        self._num_steps = 0
        self._num_retried_requests = 0
        self._num_engine_restarts = 0
        self._facts_due = Throttle(FACTS_INTERVAL_S, first_s=0.0)
        self._next_log_s = STEP_LOG_INTERVAL_S
        self.facts = self._current_facts()
        """where the run stood a second ago or later, rates of late; the fields of a progress update"""

    def watch(self, steps: Iterator[JobProgress]) -> Iterator[JobProgress]:
        """Pass a job's steps on, with everything about them noted."""
        for progress in steps:
            self.add(progress)
            yield progress

    def finish(self) -> None:
        """The run is over, however it ended."""
        self._mark()
        self.refresh()

    def refresh(self) -> dict[str, Any]:
        """Bring `facts` up to date at once."""
        self.facts = self._current_facts()
        return self.facts

    def add(self, progress: JobProgress) -> None:
        """Note the step that `progress` has just counted, if it has."""
        step = progress.step
        if step is not None and progress.num_steps != self._num_steps:
            self._num_steps = progress.num_steps
            stats = step.stats
            duration_s = stats.duration_s
            self._kv_tokens_read += stats.kv_tokens_read
            self._kv_usage_s += stats.kv_usage_ratio * duration_s
            self._running_s += stats.num_running * duration_s
            self.step_time_s.add(duration_s)
            for request, result in step.results:
                if isinstance(result, Completion):
                    self.finish_reasons[result.finish_reason] += 1
                    new = request, result.num_output_tokens, result.output_tokens_est
                else:
                    new = request, 0, 0
                self._finished.append(new)
        if (
            progress.num_retried_requests != self._num_retried_requests
            or progress.num_engine_restarts != self._num_engine_restarts
        ):
            self._log_recovery(progress)
        if self.timeline.is_due(progress.elapsed_s):
            self._mark()
        if self._facts_due.is_due():
            self.refresh()
            self._facts_due.updated()
            if progress.elapsed_s >= self._next_log_s:
                self._next_log_s = progress.elapsed_s + STEP_LOG_INTERVAL_S
                _log.info("step", extra={"fields": self.facts})

    def _current_facts(self) -> dict[str, Any]:
        self._take_finished()
        progress, now = self.progress, self._now()
        since = self.timeline.since(now, min(max(RECENT_RATIO * now.elapsed_s, MIN_RECENT_S), MAX_RECENT_S))
        span_s = now.elapsed_s - since.elapsed_s
        computed = now.num_prefill_tokens + now.num_decode_tokens
        computed -= since.num_prefill_tokens + since.num_decode_tokens
        compute_s, memory_s = now.compute_s - since.compute_s, now.memory_s - since.memory_s
        return {
            "total": progress.total,
            "num_done": progress.num_done,
            "completed": progress.completed,
            "failed": progress.failed,
            "num_running": progress.num_running,
            "num_waiting": progress.num_waiting,
            "tokens_per_s": computed / span_s if span_s > 0.0 else 0.0,
            "kv_usage_ratio": progress.kv_usage_ratio,
            "compute_ratio": compute_s / (compute_s + memory_s) if compute_s + memory_s else 0.0,
            "num_steps": progress.num_steps,
            "num_prefill_tokens": progress.num_prefill_tokens,
            "num_decode_tokens": progress.num_decode_tokens,
            "num_retracted": progress.num_retracted,
            "num_retried_requests": progress.num_retried_requests,
            "num_engine_restarts": progress.num_engine_restarts,
            "elapsed_s": progress.elapsed_s,
            "remaining_s_est": self._remaining_s(now),
        }

    def _remaining_s(self, now: Point) -> float | None:
        if self._remaining is None:
            return 0.0
        progress = self.progress
        return self._remaining.remaining_s(self.timeline, now, progress.num_running, progress.num_waiting)

    def _take_finished(self) -> None:
        if not self._finished:
            return
        requests, output_tokens, expected = np.array(self._finished, dtype=np.int32).T
        self._finished.clear()
        has_output = output_tokens > 0
        self.prompt_length.add_all(self.plan.prompt_tokens[requests[has_output]])
        self.output_length.add_all(output_tokens[has_output])
        is_estimate = (expected > 0) & (self.plan.declared_tokens[requests] == 0)
        self.lengths.add(expected[is_estimate], output_tokens[is_estimate])
        assert self._remaining is not None
        self._remaining.finished(requests, output_tokens)

    def _log_recovery(self, progress: JobProgress) -> None:
        if progress.num_retried_requests != self._num_retried_requests:
            _log.warning(
                "requests_retried",
                extra={
                    "fields": {
                        "num_requests": progress.num_retried_requests - self._num_retried_requests,
                        "num_retried_requests": progress.num_retried_requests,
                    }
                },
            )
        if progress.num_engine_restarts != self._num_engine_restarts:
            _log.warning(
                "engine_restarted", extra={"fields": {"num_engine_restarts": progress.num_engine_restarts}}
            )
        self._num_retried_requests = progress.num_retried_requests
        self._num_engine_restarts = progress.num_engine_restarts

    def _now(self) -> Point:
        progress = self.progress
        return Point(
            progress.elapsed_s,
            progress.engine_s,
            progress.num_steps,
            progress.num_prefill_tokens,
            progress.num_decode_tokens,
            self._kv_tokens_read,
            progress.compute_s,
            progress.memory_s,
            self._kv_usage_s,
            self._running_s,
            progress.completed,
            progress.failed,
            progress.num_retracted,
            progress.num_retried_requests,
        )

    def _mark(self) -> None:
        now = self._now()
        if now.elapsed_s > self.timeline.points[-1].elapsed_s:
            self.timeline.add(now)
