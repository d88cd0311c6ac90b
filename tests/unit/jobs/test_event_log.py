import json
import logging

import pytest

from blendserve.errors import ConfigError
from blendserve.jobs.event_log import MAX_LINES_PER_EVENT, event_log
from blendserve.jobs.openai_format import LineError

log = logging.getLogger("blendserve.somewhere")


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_has_time_level_event_and_fields(tmp_path):
    path = tmp_path / "log.jsonl"
    with event_log(path):
        log.info("planned", extra={"fields": {"density": float("nan"), "path": tmp_path}})
        log.warning("line_failed", extra={"fields": LineError(3, "r3", "invalid_request", "No.")})
        log.debug("too fine")
    planned, failed = read(path)
    assert planned["time"].endswith("+00:00")
    assert (planned["level"], planned["event"]) == ("info", "planned")
    assert planned["fields"] == {"density": None, "path": str(tmp_path)}
    assert (failed["level"], failed["fields"]["line"], failed["fields"]["code"]) == (
        "warning",
        3,
        "invalid_request",
    )


def test_an_event_is_written_a_thousand_times_and_then_counted(tmp_path):
    path = tmp_path / "log.jsonl"
    with event_log(path):
        for line in range(MAX_LINES_PER_EVENT + 5):
            log.warning("line_failed", extra={"fields": {"line": line}})
        for _ in range(MAX_LINES_PER_EVENT + 5):
            log.info("step")
    events = read(path)
    failed = [event for event in events if event["event"] == "line_failed"]
    assert [event["fields"]["line"] for event in failed] == list(range(MAX_LINES_PER_EVENT))
    assert sum(event["event"] == "step" for event in events) == MAX_LINES_PER_EVENT + 5
    assert events[-1]["event"] == "events_dropped"
    assert events[-1]["fields"] == {"line_failed": 5}


def test_the_level_filters_and_runs_append(tmp_path):
    path = tmp_path / "log.jsonl"
    for _ in range(2):
        with event_log(path, "warning"):
            log.info("step")
            log.warning("engine_restarted")
    assert [event["event"] for event in read(path)] == ["engine_restarted", "engine_restarted"]
    log.warning("after the end")
    assert len(read(path)) == 2


def test_an_exception_is_written_whole(tmp_path):
    path = tmp_path / "log.jsonl"
    with event_log(path):
        try:
            raise ValueError("broken")
        except ValueError:
            log.exception("engine_failed", extra={"fields": {"request": 1}})
    (event,) = read(path)
    assert "ValueError: broken" in event["fields"]["traceback"]
    assert event["fields"]["request"] == 1


def test_without_a_file_nothing_is_made_or_printed(capfd):
    with event_log(None):
        assert not log.isEnabledFor(logging.ERROR)
        log.error("nobody listens")
    assert capfd.readouterr() == ("", "")


def test_a_full_disk_ends_the_log_and_not_the_job(capfd):
    with event_log("/dev/full"):
        log.info("first")
        log.info("second")
    told = capfd.readouterr().err
    assert told.count("no more log") == 1
    assert "Traceback" not in told


def test_a_file_that_cannot_be_the_log_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--log-file"), event_log(tmp_path / "nowhere" / "log.jsonl"):
        pass
    requests = tmp_path / "in.jsonl"
    requests.write_text("{}\n")
    with (
        pytest.raises(ConfigError, match="file of the job"),
        event_log(requests, keep_apart=(str(requests), None)),
    ):
        pass
    assert requests.read_text() == "{}\n"
