import io
import json

import pytest
from rich.console import Console

from blendserve.cli import progress as module
from blendserve.cli.progress import PROGRESS_HELP, ProgressDisplay, shown_duration, shown_facts
from blendserve.jobs.job import JobProgress
from blendserve.jobs.telemetry import Telemetry
from blendserve.planner.plan import make_plan
from blendserve.request import Completion, StepOutput, StepStats
from tests.workload import COST_MODEL, request_table


@pytest.fixture
def clock(monkeypatch):
    """Sets the time that displays see; updates cost nothing."""
    now = [0.0]
    monkeypatch.setattr("blendserve.jobs.telemetry.time.perf_counter", lambda: now[0])
    return now


@pytest.fixture
def job():
    """A telemetry and the steps of its job: one a second, 200 of them, none finishes before the end."""
    plan = make_plan(request_table([[1, 2, 3]], 500), COST_MODEL)
    progress = JobProgress(total=3, num_done=1)
    progress.failed = 1
    telemetry = Telemetry(plan, progress)

    def steps(clock):
        for second in range(1, 201):
            clock[0] += 1.0
            stats = StepStats(1.0, 3 if second == 1 else 0, second > 1, 3, second < 200, 0, 0.25, 0.3, 0.1)
            results = [(0, Completion([1] * 200, "", "stop"))] if second == 200 else []
            progress.completed += len(results)
            progress.step = StepOutput(stats, results)
            progress.add_step(stats)
            progress.elapsed_s = float(second)
            telemetry.add(progress)
            yield progress

    return telemetry, steps


@pytest.fixture
def screen(monkeypatch):
    def make(is_terminal):
        console = Console(file=io.StringIO(), force_terminal=is_terminal, width=200, highlight=False)
        monkeypatch.setattr(module, "essential", console)
        return console

    return make


def test_without_a_terminal_a_line_after_ten_seconds_and_then_one_a_minute(screen, clock, job):
    console = screen(is_terminal=False)
    telemetry, steps = job
    display = ProgressDisplay("auto")
    display.running(steps(clock), telemetry)
    lines = console.file.getvalue().splitlines()
    assert display.mode == "plain"
    assert len(lines) == 1 + (200 - 10) // 60
    assert lines[0].startswith("running  2/3 lines, ")
    for fact in ("1 tok/s computed", "1 running", "KV 25%", "blend 75% compute", "1 failed", "left"):
        assert fact in lines[0]


def test_on_a_terminal_a_bar_that_goes_away(screen, clock, job):
    console = screen(is_terminal=True)
    telemetry, steps = job
    display = ProgressDisplay("auto")
    display.running(steps(clock), telemetry)
    shown = console.file.getvalue()
    assert display.mode == "bar"
    assert "running" in shown
    assert "2/3" in shown
    assert "KV 25%" in shown


def test_json_has_one_object_a_line_with_the_documented_fields(screen, clock, job, capfdbinary):
    screen(is_terminal=False)
    telemetry, steps = job
    display = ProgressDisplay("json")
    display.preparing("reading", 0)
    display.preparing("reading", 2048)
    clock[0] += 2.0
    display.preparing("reading", 4096)
    display.preparing("planning", 5000)
    display.running(steps(clock), telemetry)
    telemetry.finish()
    display.ended("complete", telemetry)
    updates = [json.loads(line) for line in capfdbinary.readouterr().err.splitlines()]
    assert [update["num_lines"] for update in updates[:3]] == [0, 4096, 5000]
    assert [update["phase"] for update in updates[:4]] == ["reading", "reading", "planning", "running"]
    assert len([update for update in updates if update["phase"] == "running"]) == 200
    assert updates[-1]["phase"] == "complete"
    assert updates[-1]["completed"] == 1
    assert updates[-1]["remaining_s_est"] == 0.0
    for name in updates[-1]:
        assert name in PROGRESS_HELP


def test_a_slow_reading_is_shown_and_so_is_the_planning_after_it(screen, clock):
    console = screen(is_terminal=False)
    display = ProgressDisplay("plain")
    display.preparing("reading", 0)
    clock[0] = 9.0
    display.preparing("reading", 2048)
    assert console.file.getvalue() == ""
    clock[0] = 11.0
    display.preparing("reading", 4096)
    display.preparing("planning", 5000)
    reading, planning = console.file.getvalue().splitlines()
    assert reading == "reading  4,096 lines so far (11 s)"
    assert planning.startswith("planning 5,000 lines")


def test_a_fast_reading_is_not_shown(screen, clock):
    console = screen(is_terminal=False)
    with ProgressDisplay("plain") as display:
        display.preparing("reading", 0)
        display.preparing("planning", 10)
    assert console.file.getvalue() == ""


def test_none_shows_nothing(screen, clock, job):
    console = screen(is_terminal=True)
    telemetry, steps = job
    display = ProgressDisplay("none")
    display.running(steps(clock), telemetry)
    display.ended("complete", telemetry)
    assert console.file.getvalue() == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (725, "12 min 5 s"),
        (3600, "1 h"),
        (12_000, "3 h 20 min"),
        (187_200, "2 d 4 h"),
    ],
)
def test_durations_are_short(seconds, text):
    assert shown_duration(seconds) == text


def test_trouble_is_shown_only_where_there_is_any(job, clock):
    telemetry, steps = job
    assert shown_facts(telemetry.facts) == []
    for _ in steps(clock):
        pass
    telemetry.progress.num_retried_requests, telemetry.progress.num_engine_restarts = 1200, 1
    telemetry.finish()
    words = shown_facts(telemetry.facts)
    assert "1,200 retried" in words
    assert "1 engine restarts" in words
