"""Times of work on the streams of a GPU, alone and side by side; and a stand-in that runs everything on a CPU."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

Work = Callable[[int], object]
"""enqueues the i-th call"""
SPIN_CYCLES_PER_US = 1800
MAX_CALLS_PER_SAMPLE = 20
CO_RUN_EDGE_RATIO = 0.1
"""of the calls of either side, left out at the beginning when both run"""


class SharedRates(NamedTuple):
    """What two sides did while both were busy."""

    first_per_ms: float
    second_per_ms: float
    window_ms: float


class Timer(Protocol):
    """Runs work on streams and times it. A stream is what `stream` returned, or one of the device's own."""

    def stream(self, priority: int = 0) -> Any:
        """A new stream of the whole device."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Makes a stream the current one."""
        ...

    def synchronize(self) -> None:
        """Wait for everything."""
        ...

    def call_us(self, work: Work, stream: Any, *, num_samples: int = 7, sample_ms: float = 1.0) -> float:
        """Median microseconds of a call, over samples of about `sample_ms`; the host's time is hidden."""
        ...

    def together_ratio(self, jobs: Sequence[tuple[Any, Callable[[], object]]]) -> float:
        """Time of all (stream, work) at once over that of the longest alone: 1 if none disturbs another."""
        ...

    def run_both(
        self, works: tuple[Work, Work], streams: tuple[Any, Any], counts: tuple[int, int]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Run so many calls of two works side by side.

        Returns:
            Of each, [count + 1] milliseconds at which it began and at which every call of it ended.
        """
        ...


class CudaTimer:
    """`Timer` by events on a GPU."""

    def __init__(self) -> None:
        self._gate = self.stream()

    def stream(self, priority: int = 0) -> torch.cuda.Stream:
        """See `Timer.stream`."""
        return torch.cuda.Stream(priority=priority)  # type: ignore[no-untyped-call]

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        """See `Timer.on`."""
        return torch.cuda.stream(stream)

    def synchronize(self) -> None:
        """See `Timer.synchronize`."""
        torch.cuda.synchronize()

    def call_us(
        self, work: Work, stream: torch.cuda.Stream, *, num_samples: int = 7, sample_ms: float = 1.0
    ) -> float:
        """See `Timer.call_us`."""
        self.synchronize()
        with self.on(stream):
            work(0)  # loads modules, makes handles and workspaces
            self.synchronize()
            self._hold(stream, 300)
            begin = self._stamp(stream)
            work(1)
            work(2)
            end = self._stamp(stream)
            self.synchronize()
            once_ms = max(begin.elapsed_time(end) / 2, 1e-3)
            calls = int(min(MAX_CALLS_PER_SAMPLE, max(1, round(sample_ms / once_ms))))
            self._hold(stream, min(8000, 40 * calls * num_samples))
            stamps = [self._stamp(stream)]
            for sample in range(num_samples):
                for i in range(calls):
                    work(sample * calls + i)
                stamps.append(self._stamp(stream))
        self.synchronize()
        times = [a.elapsed_time(b) / calls * 1e3 for a, b in itertools.pairwise(stamps)]
        return float(statistics.median(times))

    def together_ratio(self, jobs: Sequence[tuple[torch.cuda.Stream, Callable[[], object]]]) -> float:
        """See `Timer.together_ratio`."""

        def span_ms(some: Sequence[tuple[torch.cuda.Stream, Callable[[], object]]]) -> float:
            self.synchronize()
            begin = self._stamp(self._gate)
            for stream, enqueue in some:
                stream.wait_event(begin)
                with self.on(stream):
                    enqueue()
            for stream, _ in some:
                self._gate.wait_event(stream.record_event())
            end = self._stamp(self._gate)
            self.synchronize()
            return float(begin.elapsed_time(end))

        span_ms(jobs)
        alone = max(statistics.median(span_ms([job]) for _ in range(3)) for job in jobs)
        return statistics.median(span_ms(jobs) for _ in range(3)) / alone

    def run_both(
        self,
        works: tuple[Work, Work],
        streams: tuple[torch.cuda.Stream, torch.cuda.Stream],
        counts: tuple[int, int],
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """See `Timer.run_both`."""
        origin = self._stamp(self._gate)
        self._hold(self._gate, min(40_000, 2000 + 250 * counts[0] + 100 * counts[1]))  # the host's time
        opened = self._gate.record_event()
        stamps: tuple[list[torch.cuda.Event], list[torch.cuda.Event]] = ([], [])
        for stream, of_side in zip(streams, stamps, strict=True):
            stream.wait_event(opened)
            of_side.append(self._stamp(stream))
        for side, i in _in_turns(counts):
            with self.on(streams[side]):
                works[side](i)
            stamps[side].append(self._stamp(streams[side]))
        self.synchronize()
        first, second = (np.array([origin.elapsed_time(s) for s in of_side]) for of_side in stamps)
        return first, second

    def _stamp(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def _hold(self, stream: torch.cuda.Stream, us: float) -> None:
        """Keep a stream busy, so that what follows is all there before it begins."""
        with self.on(stream):
            pass_time(us)


def pass_time(us: float) -> None:
    """Have the current stream of a GPU do nothing for about so long."""
    torch.cuda._sleep(int(us * SPIN_CYCLES_PER_US))  # type: ignore[no-untyped-call]


class HostTimer:
    """`Timer` on a CPU, one thing after the other: to try out what measures, not to measure."""

    def stream(self, priority: int = 0) -> Any:
        """See `Timer.stream`."""
        return ("stream", priority)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:  # noqa: ARG002
        """See `Timer.on`."""
        yield

    def synchronize(self) -> None:
        """See `Timer.synchronize`."""

    def call_us(self, work: Work, stream: Any, *, num_samples: int = 1, sample_ms: float = 0.0) -> float:  # noqa: ARG002
        """See `Timer.call_us`; a single call."""
        began_s = time.perf_counter()
        work(0)
        return max(time.perf_counter() - began_s, 1e-6) * 1e6

    def together_ratio(self, jobs: Sequence[tuple[Any, Callable[[], object]]]) -> float:
        """See `Timer.together_ratio`."""
        for _, enqueue in jobs:
            enqueue()
        return 1.0

    def run_both(
        self,
        works: tuple[Work, Work],
        streams: tuple[Any, Any],  # noqa: ARG002
        counts: tuple[int, int],
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """See `Timer.run_both`."""
        ends: tuple[list[float], list[float]] = ([0.0], [0.0])
        began_s = time.perf_counter()
        for side, i in _in_turns(counts):
            works[side](i)
            ends[side].append((time.perf_counter() - began_s) * 1e3)
        return np.array(ends[0]), np.array(ends[1])


def shared_rates(first: NDArray[np.float64], second: NDArray[np.float64]) -> SharedRates:
    """Rates of the two sides of `Timer.run_both` while both were busy; zeros if they never were."""
    skipped = [max(1, int(len(ends) * CO_RUN_EDGE_RATIO)) for ends in (first, second)]
    low = max(first[skipped[0]], second[skipped[1]])
    high = min(first[-1], second[-1])
    if high <= low:
        return SharedRates(0.0, 0.0, 0.0)
    done = [np.diff(np.interp([low, high], ends, np.arange(len(ends))))[0] for ends in (first, second)]
    per_ms = [float(count / (high - low)) for count in done]
    return SharedRates(per_ms[0], per_ms[1], float(high - low))


def _in_turns(counts: tuple[int, int]) -> list[tuple[int, int]]:
    """(side, call) of both sides, evenly among each other."""
    places = [((i + 0.5) / count, side, i) for side, count in enumerate(counts) for i in range(count)]
    return [(side, i) for _, side, i in sorted(places)]
