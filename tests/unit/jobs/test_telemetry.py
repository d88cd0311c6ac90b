import numpy as np
import pytest

from blendserve.jobs.job import JobProgress
from blendserve.jobs.telemetry import (
    MAX_POINTS,
    EnergyMeter,
    Histogram,
    LengthCalibration,
    Point,
    RemainingTime,
    Telemetry,
    Throttle,
    Timeline,
)
from blendserve.planner.plan import make_plan
from blendserve.request import Completion, Failure, StepOutput, StepStats
from tests.workload import COST_MODEL, request_table


def a_plan(num_requests=8, max_tokens=100, declared=None):
    return make_plan(
        request_table([[i, 1, 2, 3] for i in range(num_requests)], max_tokens, declared), COST_MODEL
    )


def step(num_prefill=0, num_decode=0, results=(), duration_s=0.5, kv=0.5, running=2, waiting=0):
    stats = StepStats(duration_s, num_prefill, num_decode, 0, running, waiting, kv, 0.3, 0.1)
    return StepOutput(stats, list(results))


def advance(telemetry, output, elapsed_s):
    progress = telemetry.progress
    progress.add_step(output.stats)
    progress.step = output
    progress.elapsed_s = elapsed_s
    telemetry.add(progress)


def completion(num_tokens, expected=0, reason="stop"):
    return Completion([1] * num_tokens, "", reason, output_tokens_est=expected)


def test_a_time_line_stays_small_and_loses_no_total():
    timeline = Timeline()
    for second in range(1, 10 * MAX_POINTS):
        if timeline.is_due(float(second)):
            timeline.add(Point(elapsed_s=float(second), engine_s=float(second), num_decode_tokens=7 * second))
    assert MAX_POINTS // 2 < len(timeline.points) <= MAX_POINTS
    columns = timeline.columns()
    assert {len(values) for values in columns.values()} == {len(timeline.points) - 1}
    duration_s = np.array(columns["duration_s"])
    assert np.sum(duration_s * columns["decode_tokens_per_s"]) == pytest.approx(
        timeline.points[-1].num_decode_tokens, rel=1e-6
    )
    assert set(columns["decode_tokens_per_s"]) == {7.0}
    assert duration_s.max() <= 4 * np.median(duration_s)


def test_averages_of_a_span_are_weighted_by_time():
    telemetry = Telemetry(a_plan(), JobProgress(8, 0))
    advance(telemetry, step(duration_s=3.0, kv=0.2, running=1), 3.0)
    telemetry.progress.add_step(step(duration_s=1.0).stats)  # fills the next span together with what follows
    telemetry.progress.step = step(duration_s=1.0, kv=1.0, running=5)
    telemetry.progress.elapsed_s = 3.05
    telemetry.add(telemetry.progress)
    advance(telemetry, step(duration_s=3.0, kv=0.2, running=1), 7.0)
    columns = telemetry.timeline.columns()
    assert columns["elapsed_s"] == [3.0, 7.0]
    assert columns["kv_usage_ratio"] == pytest.approx([0.2, 0.4])
    assert columns["num_running"] == pytest.approx([1.0, 2.0])
    assert columns["compute_ratio"] == pytest.approx([0.75, 0.75])


def test_a_time_line_without_any_step_is_empty():
    telemetry = Telemetry(a_plan(), JobProgress(8, 0))
    telemetry.finish()
    assert telemetry.timeline.columns()["elapsed_s"] == []


def test_a_recent_point_is_about_a_window_ago():
    timeline = Timeline()
    for elapsed_s in (1.0, 2.0, 10.0, 50.0):
        timeline.add(Point(elapsed_s=elapsed_s))
    now = Point(elapsed_s=52.0)
    assert timeline.since(now, 45.0).elapsed_s == 10.0
    assert timeline.since(now, 10.0).elapsed_s == 10.0  # 50.0 would leave a fifth of the window
    assert timeline.since(now, 100.0).elapsed_s == 0.0


def test_histograms_count_up_to_and_including_their_bounds():
    one_by_one, at_once = Histogram((1.0, 2.0, 5.0)), Histogram((1.0, 2.0, 5.0))
    for value in (1, 2, 3, 5, 6):
        one_by_one.add(value)
    at_once.add_all(np.array([1, 2, 3, 5, 6], dtype=np.int32))
    assert one_by_one.counts == at_once.counts == [1, 1, 2, 1]
    assert one_by_one.total == at_once.total == 17.0


def test_calibration_groups_by_octave_and_keeps_quantiles():
    rng = np.random.default_rng(0)
    expected = rng.integers(1, 3000, 5000).astype(np.int32)
    actual = rng.integers(1, 9000, 5000).astype(np.int32)
    lengths = LengthCalibration()
    for part in np.split(np.arange(5000), 10):
        lengths.add(expected[part], actual[part])
    found = lengths.calibration()
    octaves = np.log2(expected).astype(int)
    assert found.num_requests == np.bincount(octaves).tolist()
    for octave in range(12):
        of = octaves == octave
        assert found.expected[octave] == pytest.approx(expected[of].mean())
        assert found.actual[octave] == pytest.approx(actual[of].mean())
        for name, share in (("actual_p10", 0.1), ("actual_p50", 0.5), ("actual_p90", 0.9)):
            exact = np.quantile(actual[of], share, method="lower")
            assert getattr(found, name)[octave] == pytest.approx(exact, rel=0.04)
    assert lengths.total_ratio() == pytest.approx(actual.sum() / expected.sum())


def test_calibration_is_of_estimates_only():
    telemetry = Telemetry(a_plan(declared=[50] + [0] * 7), JobProgress(8, 0))
    results = [
        (0, completion(50, expected=50)),
        (1, completion(30, expected=40, reason="length")),
        (2, completion(10)),
        (3, Failure("engine_error", "")),
    ]
    advance(telemetry, step(results=results), 1.0)
    telemetry.finish()
    assert telemetry.lengths.calibration().num_requests == [1]
    assert telemetry.lengths.total_ratio() == pytest.approx(0.75)
    assert telemetry.finish_reasons == {"stop": 2, "length": 1}
    assert sum(telemetry.output_length.counts) == sum(telemetry.prompt_length.counts) == 3


def test_answers_of_a_server_have_the_lengths_that_it_tells():
    telemetry = Telemetry(a_plan(), JobProgress(8, 0))
    answer = Completion([], "", "stop", num_prompt_tokens=3, body={"usage": {"completion_tokens": 12}})
    advance(telemetry, step(results=[(0, answer)]), 1.0)
    telemetry.finish()
    assert telemetry.output_length.total == 12
    assert sum(telemetry.output_length.counts) == 1


def test_the_same_step_is_counted_once():
    telemetry = Telemetry(a_plan(), JobProgress(8, 0))
    advance(telemetry, step(results=[(0, completion(5))]), 1.0)
    telemetry.add(telemetry.progress)
    telemetry.finish()
    assert telemetry.finish_reasons == {"stop": 1}
    assert sum(telemetry.step_time_s.counts) == 1


def test_remaining_time_follows_the_work_that_is_left():
    """Four at a time, 50 tokens each as declared: the time left falls evenly to zero."""
    num_requests, tokens = 32, 50
    plan = a_plan(num_requests, declared=[tokens] * num_requests)
    telemetry = Telemetry(plan, JobProgress(num_requests, 0))
    elapsed_s, estimates = 0.0, []
    total_s = num_requests / 4 * tokens
    for batch in range(num_requests // 4):
        requests = range(4 * batch, 4 * batch + 4)
        for token in range(tokens):
            elapsed_s += 1.0
            ends = token == tokens - 1
            waiting = num_requests - 4 * batch - 4
            output = step(
                num_prefill=16 if token == 0 else 0,
                num_decode=4 if token else 0,
                results=[(request, completion(tokens)) for request in requests] if ends else [],
                running=0 if ends else 4,
                waiting=waiting,
                duration_s=1.0,
            )
            output.stats.kv_tokens_read = 4 * (4 + token) if token else 0
            advance(telemetry, output, elapsed_s)
            telemetry.finish()
            estimates.append((telemetry.facts["remaining_s_est"], total_s - elapsed_s))
    early = [pair for pair in estimates if 0.2 < pair[1] / total_s < 0.9]
    assert all(estimate == pytest.approx(left, rel=0.35) for estimate, left in early)
    assert estimates[-1] == (0.0, 0.0)


def test_remaining_time_is_unknown_before_anything_was_done_and_never_negative():
    plan = a_plan()
    remaining, timeline = RemainingTime(plan), Timeline()
    assert remaining.remaining_s(timeline, Point(), 0, 8) is None
    far_beyond = Point(elapsed_s=10.0, num_steps=5, num_prefill_tokens=10_000, num_decode_tokens=10_000)
    found = remaining.remaining_s(timeline, far_beyond, 8, 0)
    assert found == 0.0  # all have reached max_tokens


def test_a_running_request_that_outlives_its_estimate_still_needs_time():
    plan = a_plan(2, max_tokens=4000)
    remaining, timeline = RemainingTime(plan), Timeline()
    remaining.finished(np.array([0], dtype=np.int32), np.array([10], dtype=np.int32))
    now = Point(
        elapsed_s=1010.0,
        num_steps=1010,
        num_prefill_tokens=8,
        num_decode_tokens=1009,
        kv_tokens_read=500_000,
    )
    found = remaining.remaining_s(timeline, now, 1, 0)
    assert found == pytest.approx(500.0, rel=0.05)  # half of its 1000 tokens more, one a second


def test_recoveries_are_logged(caplog):
    telemetry = Telemetry(a_plan(), JobProgress(8, 0))
    telemetry.progress.num_retried_requests = 3
    telemetry.progress.num_engine_restarts = 1
    with caplog.at_level("INFO", "blendserve"):
        telemetry.add(telemetry.progress)
        telemetry.add(telemetry.progress)
    events = {record.getMessage(): record.fields for record in caplog.records}
    assert len(caplog.records) == len(events)
    assert events["requests_retried"] == {"num_requests": 3, "num_retried_requests": 3}
    assert events["engine_restarted"] == {"num_engine_restarts": 1}


def test_energy_adds_packages_and_survives_a_counter_that_wraps(tmp_path):
    for name, start, wraps_at in (
        ("intel-rapl:0", 900, 1000),
        ("intel-rapl:1", 100, 1000),
        ("intel-rapl:0:0", 5, 1000),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{start}000000\n")
        (tmp_path / name / "max_energy_range_uj").write_text(f"{wraps_at}000000\n")
    meter = EnergyMeter(tmp_path)
    assert meter.is_available
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("50000000\n")
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("120000000\n")
    meter.read()
    assert meter.energy_j == pytest.approx(150.0 + 20.0)
    assert not EnergyMeter(tmp_path / "nothing").is_available


def test_updates_that_cost_much_come_seldom(monkeypatch):
    now_s = 0.0
    monkeypatch.setattr("blendserve.jobs.telemetry.time.perf_counter", lambda: now_s)
    throttle = Throttle(1.0, first_s=0.0)
    assert throttle.is_due()
    now_s = 3.0  # the update took three seconds
    throttle.updated()
    now_s = 3.0 + 0.99 * 3.0 / Throttle.MAX_COST_RATIO
    assert not throttle.is_due()
    now_s = 3.0 + 1.01 * 3.0 / Throttle.MAX_COST_RATIO
    assert throttle.is_due()
