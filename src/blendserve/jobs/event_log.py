"""A structured log: what happened to a job, one JSON object a line.

Modules log with the standard library, `_log.info("event", extra={"fields": {...}})`, whether anyone listens or not.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from blendserve.errors import ConfigError
from blendserve.jobs.telemetry import LogLevel

MAX_LINES_PER_EVENT = 1000
"""of one event below it are written; the rest are counted"""
UNBOUNDED_EVENTS = frozenset({"step"})

_log = logging.getLogger(__name__)
_events = logging.getLogger("blendserve")


@contextmanager
def event_log(
    path: Path | None, level: LogLevel = "info", *, keep_apart: tuple[str | None, ...] = ()
) -> Iterator[None]:
    """Write what BlendServe's modules log into a file while the context lasts; None: nowhere.

    `keep_apart` are files of the job that the log must not be.

    Raises:
        ConfigError: the file cannot be written, or is one of the job's own.
    """
    level_before = _events.level
    if path is None:
        _events.setLevel(logging.CRITICAL + 1)
        try:
            yield
        finally:
            _events.setLevel(level_before)
        return
    handler = _open(path, keep_apart)
    bounded = _Bounded()
    handler.addFilter(bounded)
    handler.setFormatter(JsonFormatter())
    _events.addHandler(handler)
    _events.setLevel(level.upper())
    try:
        yield
    finally:
        if bounded.dropped:
            _log.warning("events_dropped", extra={"fields": dict(bounded.dropped)})
        _events.removeHandler(handler)
        _events.setLevel(level_before)
        handler.close()


class JsonFormatter(logging.Formatter):
    """`{"time": ISO 8601 in UTC, "level": ..., "event": ..., "fields": {...}}`; not-a-number becomes null."""

    def format(self, record: logging.LogRecord) -> str:
        """One line without its end."""
        fields: Any = getattr(record, "fields", {})
        if is_dataclass(fields) and not isinstance(fields, type):
            fields = asdict(fields)
        if record.exc_info:
            fields = {**fields, "traceback": self.formatException(record.exc_info)}
        document = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            "fields": fields,
        }
        return orjson.dumps(
            document, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS, default=str
        ).decode()


class _Bounded(logging.Filter):
    """Lets only the first `MAX_LINES_PER_EVENT` of every event through."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        event = record.msg
        if event in UNBOUNDED_EVENTS:
            return True
        self._seen[event] += 1
        if self._seen[event] <= MAX_LINES_PER_EVENT:
            return True
        self.dropped[event] += 1
        return False


class _LogFile(logging.FileHandler):
    """A log file whose disk may fill up: the job goes on without a log."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, mode="a", encoding="utf-8")
        self._has_failed = False

    def emit(self, record: logging.LogRecord) -> None:
        if not self._has_failed:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name is logging's
        """Tell it once; anything but a full or broken disk is our own mistake."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self._has_failed = True
        # What is still buffered would fail again.
        with suppress(OSError):
            self.close()
        print(
            f"warning: cannot write {self.baseFilename}: {error.strerror}; no more log from here",
            file=sys.stderr,
        )


def _open(path: Path, keep_apart: tuple[str | None, ...]) -> logging.Handler:
    for other in keep_apart:
        if (
            other is not None
            and os.path.exists(other)
            and os.path.exists(path)
            and os.path.samefile(path, other)
        ):
            raise ConfigError(f"--log-file {path} is a file of the job; write the log to another file")
    try:
        return _LogFile(path)
    except OSError as error:
        raise ConfigError(f"cannot write --log-file {path}: {error.strerror}; choose another file") from error
