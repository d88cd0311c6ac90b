"""Sessions of measurements: their time, their points, and what becomes of them when a worker is lost."""

import json
from pathlib import Path
from typing import Any

import pytest

from blendserve.engines.native.session import (
    Budget,
    DeviceLostError,
    Section,
    Session,
    SessionConfig,
    VirtualClock,
    supervise,
)

HERE = "tests.unit.native.session_sections"


def sections(*names: str, reserve_s: float = 10.0) -> dict[str, Section]:
    return {name: Section(f"{HERE}:{name}", reserve_s) for name in names}


def test_a_section_leaves_later_ones_what_they_reserved() -> None:
    clock = VirtualClock(1000.0)
    budget = Budget(100.0, {"a": 10.0, "b": 60.0, "c": 10.0}, clock, started_s=1000.0)
    budget.begin("a")
    assert budget.left_s == 30.0, "its own 10, and 20 that nobody reserved"
    assert budget.fits(30.0)
    assert not budget.fits(30.1)
    clock.now_s += 5.0
    budget.begin("b")
    assert budget.left_s == 85.0, "with what a did not use"
    clock.now_s += 100.0
    budget.begin("c")
    assert not budget.fits(0.0), "the time is over, whatever was reserved"


def test_reserves_shrink_with_the_budget() -> None:
    clock = VirtualClock()
    budget = Budget(20.0, {"a": 10.0, "b": 30.0}, clock, started_s=0.0)
    budget.begin("a")
    assert budget.left_s == 5.0


def session(folder: Path, left_out: tuple[str, ...] = (), **config: Any) -> Session:
    made = SessionConfig(folder, 106.0, dry_run=True, **config)
    return Session(made, sections("good", "failing", reserve_s=50.0), 0.0, left_out)


def test_points_are_skipped_where_they_do_not_fit(tmp_path: Path) -> None:
    made = session(tmp_path)
    made.section = "good"
    made.budget.begin("good")
    assert made.point("a", 30.0, lambda: {"value": 1}, size=7) == {"size": 7, "value": 1}
    assert made.point("b", 30.0, lambda: {"value": 2}) is None, (
        "30 of 50 seconds are gone on the virtual clock"
    )
    assert made.point("c", 20.0, lambda: {"value": float("nan")}) == {"value": None}
    assert made.profile["skipped"] == ["good: b"]
    made.save()
    again = session(tmp_path)
    again.section = "good"
    again.budget.begin("good")
    assert again.point("a", 30.0, lambda: {"value": 3}) == {"size": 7, "value": 1}, "it is there already"
    assert again.point("d", 10.0, lambda: {"value": 3}) is None, "the clock went on where it was"


def test_what_raises_and_what_lost_a_worker_is_left_out(tmp_path: Path) -> None:
    made = session(tmp_path, left_out=("good: lost",))
    made.section = "good"
    made.budget.begin("good")
    assert made.point("lost", 1.0, lambda: pytest.fail("it must not run")) is None
    assert made.point("fails", 1.0, lambda: {"value": 1 / 0}) is None
    assert made.profile["errors"] == [
        {"where": "good: fails", "error": "ZeroDivisionError: division by zero"}
    ]
    assert "1 / 0" in (tmp_path / "errors.txt").read_text()
    made.is_device_alive = lambda: False
    with pytest.raises(DeviceLostError):
        made.point("loses the device", 1.0, lambda: {"value": 1 / 0})


def test_a_session_with_a_section_that_fails_and_workers_that_are_lost(tmp_path: Path) -> None:
    config = SessionConfig(tmp_path, 480.0, dry_run=True)
    profile = supervise(config, sections("failing", "hanging", "dying", "good"), f"{HERE}:open_subject")
    assert profile == json.loads((tmp_path / "profile.json").read_text())
    statuses = {name: entry["status"] for name, entry in profile["sections"].items()}
    assert statuses == {"failing": "error", "hanging": "ok", "dying": "lost", "good": "ok"}
    assert profile["failing"] == {"works": {"value": 1}}
    assert [error["where"] for error in profile["errors"]] == ["failing: fails", "failing: failing"]
    assert [(loss["section"], loss["reason"]) for loss in profile["losses"]] == [
        ("hanging", "hung"),
        ("dying", "exit 9"),
        ("dying", "exit 9"),
    ]
    assert profile["hanging"].keys() == {"before", "after"}
    assert profile["hanging"]["before"] != profile["hanging"]["after"], "measured by two workers, each once"
    assert [row["value"] for row in profile["good"].values()] == [0, 1, 2]
    assert profile["meta"]["opened"] == 4


def test_a_session_ends_in_time(tmp_path: Path) -> None:
    config = SessionConfig(tmp_path, 12.0, only=("long",))
    profile = supervise(config, sections("long", "good"), f"{HERE}:open_subject")
    assert [loss["reason"] for loss in profile["losses"]] == ["end of the session"]
    assert profile["sections"] in ({"long": {"status": "lost"}}, {}), "{}: it had not even begun"
