from datetime import UTC, datetime, timedelta

import pytest

from blendserve.engines.batching import BatchingEngine
from blendserve.engines.simulated import SimulatedExecutor
from blendserve.errors import ConfigError
from blendserve.jobs.deadline import Deadline, parse_duration, seconds_left
from blendserve.planner.plan import make_plan
from blendserve.request import Completion, StepOutput, StepStats
from blendserve.scheduling.policies import make_policy
from blendserve.scheduling.scheduler import SchedulerConfig
from tests.workload import COST_MODEL, request_table


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("8h", 8 * 3600),
        ("1h30m", 5400),
        ("90m", 5400),
        ("1d12h", 129600),
        ("45s", 45),
        ("2.5", 2.5),
        ("0", 0),
    ],
)
def test_durations(text, seconds):
    assert parse_duration(text, "--max-time") == seconds


@pytest.mark.parametrize("text", ["", "h", "8 hours", "-3m", "5m2h", "1.5h"])
def test_what_is_no_duration(text):
    with pytest.raises(ConfigError, match="--max-time"):
        parse_duration(text, "--max-time")


def test_the_earlier_of_deadline_and_max_time():
    now = datetime(2026, 11, 30, 22, 0)
    assert seconds_left(None, None) is None
    assert seconds_left("2026-12-01T06:00", None, lambda: now) == 8 * 3600
    assert seconds_left("2026-12-01T06:00", "1h", lambda: now) == 3600
    assert seconds_left("30m", "1h", lambda: now) == 1800
    in_a_minute = datetime.now(UTC) + timedelta(seconds=60)
    assert seconds_left(in_a_minute.isoformat(), None) == pytest.approx(60, abs=30)
    with pytest.raises(ConfigError, match="has passed"):
        seconds_left("2026-11-30T21:59", None, lambda: now)


def test_answers_of_a_server_count_with_the_lengths_that_it_tells():
    clock_s = 0.0
    deadline = Deadline(100.0, lambda: clock_s)
    deadline.add_step(StepOutput(StepStats(0.0, 0, 0, 0, 4, 0, 0.0), []))
    clock_s = 10.0
    answer = Completion([], "", "stop", body={"usage": {"completion_tokens": 40}})
    deadline.add_step(StepOutput(StepStats(10.0, 0, 20, 0, 4, 0, 0.0), [(0, answer)]))
    assert deadline.drain_s_est == 40 * (4 * 10.0) / 20


class Run:
    """A simulated run against a deadline, on the engine's virtual clock."""

    def __init__(self, left_s: float, *, drains: bool = True) -> None:
        self.clock_s = 0.0
        self.num_results = 0
        self.drained_at_s = None
        self.drain_s_est = 0.0
        requests = request_table(
            [[i % 50, i] for i in range(4000)], max_tokens=[20 + i * 37 % 180 for i in range(4000)]
        )
        deadline = Deadline(left_s, lambda: self.clock_s)
        engine = BatchingEngine(SimulatedExecutor(COST_MODEL), SchedulerConfig(max_num_seqs=64))
        policy = make_policy("fcfs", make_plan(requests, COST_MODEL))
        self.num_running = 0
        for step in engine.run(requests, policy):
            self.clock_s += step.stats.duration_s
            if deadline.is_over and self.clock_s > left_s:
                break
            self.num_results += len(step.results)
            self.num_running = step.stats.num_running
            deadline.add_step(step)
            if drains and self.drained_at_s is None and deadline.is_near:
                self.drained_at_s, self.drain_s_est = self.clock_s, deadline.drain_s_est
                engine.stop_admitting()


def test_what_was_begun_has_ended_when_the_time_is_up():
    whole = Run(1e9)
    assert whole.num_results == 4000
    assert whole.drained_at_s is None
    left_s = whole.clock_s / 3
    run, cut = Run(left_s), Run(left_s, drains=False)
    # Output lengths lie between 20 and 200, so E[x²]/E[x] is that of a long one.
    assert 0 < run.drain_s_est < left_s / 4
    assert run.drained_at_s + run.drain_s_est == pytest.approx(left_s, rel=0.02)
    assert cut.num_running >= 48  # whose work is lost
    assert run.num_running <= 16
    assert 0.9 * cut.num_results < run.num_results < 2000


def test_nothing_is_known_before_the_first_result():
    deadline = Deadline(10.0, lambda: 0.0)
    assert deadline.drain_s_est == 0.0
    assert not deadline.is_near
