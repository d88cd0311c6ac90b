"""How a job's progress is shown: a live bar, a line a minute, JSON for machines, or not at all."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Literal

import orjson
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from blendserve.cli.console import essential
from blendserve.jobs.job import JobProgress
from blendserve.jobs.prepare import Phase
from blendserve.jobs.telemetry import Telemetry, Throttle

ProgressMode = Literal["auto", "bar", "plain", "json", "none"]

BAR_INTERVAL_S = 0.5
PLAIN_INTERVAL_S, FIRST_PLAIN_S = 60.0, 10.0
JSON_INTERVAL_S = 1.0

PROGRESS_HELP = (
    "auto: a live bar on a terminal, else a line a minute (plain). json: one object a second on stderr, which then "
    "holds nothing else but errors: phase (reading, planning, running, complete, stopped, interrupted or failed), "
    "elapsed_s; while reading num_lines; while running total, num_done, completed, failed, num_running, num_waiting, "
    "tokens_per_s, kv_usage_ratio, compute_ratio, num_steps, num_prefill_tokens, num_decode_tokens, num_retracted, "
    "num_retried_requests, num_engine_restarts, remaining_s_est (null: not known yet)."
)


class ProgressDisplay:
    """Shows what a job does, at most as often as its reader wants and never at more than a third of a percent."""

    def __init__(self, mode: ProgressMode = "auto") -> None:
        if mode == "auto":
            mode = "bar" if essential.is_terminal else "plain"
        self.mode = mode
        self._bar: Progress | None = None
        self._task: Any = None
        self._phase = ""
        self._phase_started_s = time.perf_counter()
        self._has_shown = False
        self._due = self._throttle()

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close_bar()

    def preparing(self, phase: Phase, num_lines: int) -> None:
        """The input is being read, or planned, and has so many lines so far."""
        is_slow = (
            self._has_shown
        )  # planning has no second call, so it is shown at once where reading took long
        is_new = phase != self._phase
        if is_new:
            self._begin(phase)
        if self.mode == "none" or not (self._due.is_due() or (is_new and (is_slow or self.mode == "json"))):
            return
        self._has_shown = True
        elapsed_s = time.perf_counter() - self._phase_started_s
        if self.mode == "json":
            _write_json({"phase": phase, "num_lines": num_lines, "elapsed_s": elapsed_s})
        elif self.mode == "plain":
            essential.print(f"{phase:8} {num_lines:,} lines so far ({shown_duration(elapsed_s)})")
        else:
            self._refresh(None, num_lines, "")
        self._due.updated()

    def running(self, steps: Iterator[JobProgress], telemetry: Telemetry) -> None:
        """Drive a job to its end, or until it is stopped, and show how far it is."""
        self._begin("running")
        try:
            for progress in steps:
                if self.mode != "none" and self._due.is_due():
                    self._show_running(progress, telemetry)
                    self._due.updated()
        finally:
            self._close_bar()

    def ended(self, phase: str, telemetry: Telemetry) -> None:
        """The last word: how the job ended."""
        if self.mode == "json":
            _write_json({"phase": phase, **telemetry.facts})

    def _show_running(self, progress: JobProgress, telemetry: Telemetry) -> None:
        current = telemetry.refresh()
        if self.mode == "json":
            _write_json({"phase": "running", **current})
            return
        finished = progress.num_done + progress.completed + progress.failed
        facts = shown_facts(current)
        if self.mode == "plain":
            essential.print(
                f"running  {finished:,}/{progress.total:,} lines" + "".join(f", {fact}" for fact in facts)
            )
        else:
            self._refresh(progress.total, finished, ", ".join(facts))

    def _begin(self, phase: str) -> None:
        self._close_bar()
        self._phase, self._phase_started_s = phase, time.perf_counter()
        self._due = self._throttle()

    def _throttle(self) -> Throttle:
        if self.mode == "plain":
            return Throttle(PLAIN_INTERVAL_S, FIRST_PLAIN_S)
        if self.mode == "json":
            return Throttle(JSON_INTERVAL_S)
        return Throttle(BAR_INTERVAL_S)

    def _refresh(self, total: int | None, completed: int, facts: str) -> None:
        if self._bar is None:
            # Drawn only here, not by a thread ten times a second, which would take time from the model.
            columns = (
                TextColumn(f"{self._phase:8}"),
                BarColumn(bar_width=24),
                _CountColumn(),
                TextColumn("[cyan]{task.fields[facts]}"),
                TimeElapsedColumn(),
            )
            self._bar = Progress(*columns, console=essential, transient=True, auto_refresh=False)
            self._task = self._bar.add_task("", total=total, completed=completed, facts=facts)
            self._bar.start()
            return
        self._bar.update(self._task, total=total, completed=completed, facts=facts)
        self._bar.refresh()

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class _CountColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        """So many of so many."""
        if task.total is None:
            return Text(f"{task.completed:,.0f} lines")
        return Text(f"{task.completed:,.0f}/{task.total:,.0f}")


def shown_facts(facts: dict[str, Any]) -> list[str]:
    """Speed, load, blend, remaining time and trouble, in words."""
    if not facts["num_steps"]:
        return []
    words = [
        f"{facts['tokens_per_s']:,.0f} tok/s computed",
        f"{facts['num_running']:,} running",
        f"KV {facts['kv_usage_ratio']:.0%}",
        f"blend {facts['compute_ratio']:.0%} compute",
    ]
    for name, what in (
        ("failed", "failed"),
        ("num_retried_requests", "retried"),
        ("num_engine_restarts", "engine restarts"),
    ):
        if facts[name]:
            words.append(f"{facts[name]:,} {what}")
    if facts["remaining_s_est"] is not None:
        words.append(f"~{shown_duration(facts['remaining_s_est'])} left")
    return words


def shown_duration(seconds: float) -> str:
    """`45 s`, `12 min 5 s`, `3 h 20 min`, `2 d 4 h`."""
    whole = round(seconds)
    for unit_s, unit, smaller_s, smaller in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= unit_s:
            rest = whole % unit_s // smaller_s
            return f"{whole // unit_s} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"


def _write_json(document: dict[str, Any]) -> None:
    sys.stderr.buffer.write(
        orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)
    )
    sys.stderr.flush()
