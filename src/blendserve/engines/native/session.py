"""A measuring session within a time limit: sections in order of value, every point saved, lost processes replaced.

A worker process runs the sections and writes `profile.json` as it goes. The process that started it stops it when it
hangs and starts another, which goes on from the file and leaves out what the first one was lost in.

| file | holds |
| --- | --- |
| `profile.json` | results: a table per section, label to row |
| `session.log` | what was done when |
| `errors.txt` | tracebacks |
| `state.json` | what runs now, and until when it may |
| `clocks.csv` | clocks, power and temperature all along, where nvidia-smi is installed |
"""

from __future__ import annotations

import importlib
import json
import math
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from blendserve.errors import BlendServeError

if TYPE_CHECKING:
    from blendserve.engines import EngineConfig
    from blendserve.models import ModelFiles

Row = dict[str, Any]
Clock = Callable[[], float]

MAX_WORKERS = 6
MAX_LOSSES = 2
"""of a section, until the rest of it is left out"""
REPORT_S = 6.0
"""of the limit, kept for what comes after the last section"""
OPEN_S = 120.0
"""until a worker has loaded what it measures, or has come to a section's first point"""
DEVICE_LOST, CANNOT_OPEN = 3, 4
"""exit codes of a worker: its device does not answer any more; what is to be measured cannot be had"""


class DeviceLostError(BaseException):
    """The device does not answer: only a new process helps."""


class Budget:
    """Shares the time of a session out to its sections.

    A section may use what the ones before it left, but never what the ones after it reserved.

    Args:
        total_s: of all sections.
        reserves_s: by section, in order; they are cut in proportion where the total is less than their sum.
        clock: seconds.
        started_s: when the session began on that clock.
    """

    def __init__(
        self, total_s: float, reserves_s: Mapping[str, float], clock: Clock, started_s: float
    ) -> None:
        self._clock = clock
        self._end_s = started_s + total_s
        scale = min(1.0, total_s / max(sum(reserves_s.values()), 1e-9))
        self._reserves_s = {name: seconds * scale for name, seconds in reserves_s.items()}
        self._deadline_s = self._end_s

    def begin(self, section: str) -> None:
        """From now on time is the section's."""
        names = list(self._reserves_s)
        later = names[names.index(section) + 1 :]
        self._deadline_s = self._end_s - sum(self._reserves_s[name] for name in later)

    @property
    def left_s(self) -> float:
        """Seconds that the section has."""
        return self._deadline_s - self._clock()

    def fits(self, estimate_s: float) -> bool:
        """Whether something of so many seconds ends within the section's time."""
        return estimate_s <= self.left_s


class VirtualClock:
    """Moves only when told: what a session would do if everything took as long as estimated."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        """The time it has been moved to."""
        return self.now_s


@dataclass(frozen=True)
class SessionConfig:
    """A session; must be picklable."""

    folder: Path
    budget_s: float
    only: tuple[str, ...] = ()
    """sections to run; empty: all"""
    dry_run: bool = False
    """tiny sizes on a CPU, and a clock on which every point takes as long as estimated"""
    options: Mapping[str, Any] = field(default_factory=dict)
    """of what is measured"""


class Section(NamedTuple):
    """A part of a session."""

    function: str
    """`module:name` of a function of the session and its subject; loaded in the worker alone, as torch is"""
    reserve_s: float


Sections = Mapping[str, Section]


class Session:
    """The worker's side: runs sections and keeps their results.

    Args:
        config: of the session.
        sections: all of them, in order of value.
        started_s: wall-clock time at which the session began.
        left_out: labels of points that lost a worker before.
    """

    def __init__(
        self, config: SessionConfig, sections: Sections, started_s: float, left_out: Iterable[str] = ()
    ) -> None:
        self.config = config
        self.left_out = frozenset(left_out)
        self.profile: dict[str, Any] = read_json(config.folder / "profile.json") or {}
        for name in ("meta", "sections", "fixed"):
            self.profile.setdefault(name, {})
        for name in ("errors", "skipped", "losses"):
            self.profile.setdefault(name, [])
        self.section = "open"
        self.is_device_alive: Callable[[], bool] = lambda: True
        self._virtual = VirtualClock(self.profile["meta"].get("clock_s", 0.0)) if config.dry_run else None
        self._started_s = started_s
        reserves_s = {name: section.reserve_s for name, section in sections.items()}
        chosen = {name: s for name, s in reserves_s.items() if not config.only or name in config.only}
        self.budget = Budget(
            max(config.budget_s - REPORT_S, 0.0),
            chosen,
            self._virtual or time.time,
            0.0 if self._virtual else started_s,
        )

    # -- running ---------------------------------------------------------------------------------------------------

    def run(self, name: str, section: Section, subject: Any) -> None:
        """Run one section; whatever goes wrong in it ends the section alone."""
        self.section = name
        self.mark(None, time.time() + OPEN_S)
        self.budget.begin(name)
        began_s = time.time()
        entry = self.profile["sections"].setdefault(name, {})
        entry["status"] = "running"
        self.save()
        self.log(f"begins with {self.budget.left_s:.0f} s")
        num_skipped, num_errors = len(self.profile["skipped"]), len(self.profile["errors"])
        try:
            resolve(section.function)(self, subject)
            skipped, failed = len(self.profile["skipped"]) > num_skipped, False
        except Exception:
            self.record_error(name)
            self._check_device()
            skipped, failed = False, True
        entry["status"] = "error" if failed else "cut" if skipped else "ok"
        entry["num_errors"] = len(self.profile["errors"]) - num_errors
        entry["wall_s"] = round(entry.get("wall_s", 0.0) + time.time() - began_s, 2)
        self.save()
        self.log(f"{entry['status']} in {entry['wall_s']:.1f} s, {len(self.rows(name))} points")

    def point(
        self,
        label: str,
        estimate_s: float,
        measure: Callable[[], Mapping[str, Any]],
        *,
        hang_s: float | None = None,
        **facts: Any,
    ) -> Row | None:
        """Measure a point of the section: `facts` and what `measure` returns, or None where there is no time for it.

        A point measured before, by a worker that was lost, is not measured again; one that a worker was lost in, or
        that raises, is left out.

        Args:
            label: of the point in the section.
            estimate_s: of the time it takes; the point is skipped if the section has less.
            measure: measures it.
            hang_s: after so many seconds the worker is stopped; None: several times the estimate, and half a minute
                for compilers.
            facts: what the point is.
        """
        rows = self.rows(self.section)
        if found := rows.get(label):
            return found
        if self._key(label) in self.left_out:
            return None
        if not self.budget.fits(estimate_s):
            self.profile["skipped"].append(self._key(label))
            return None
        self.mark(label, time.time() + (hang_s or 45.0 + 4.0 * estimate_s))
        try:
            row: Row = clean({**facts, **measure()})
        except Exception:
            self.record_error(label)
            self._check_device()
            return None
        finally:
            if self._virtual is not None:
                self._virtual.now_s += estimate_s
                self.profile["meta"]["clock_s"] = self._virtual.now_s
        rows[label] = row
        self.save()
        return row

    def rows(self, section: str) -> dict[str, Row]:
        """The points of a section so far, by label."""
        found: dict[str, Row] = self.profile.setdefault(section, {})
        return found

    # -- records ---------------------------------------------------------------------------------------------------

    def log(self, text: str) -> None:
        """A line of progress."""
        line = f"[{time.time() - self._started_s:6.1f} s] {self.section}: {text}"
        print(line, file=sys.stderr, flush=True)
        with (self.config.folder / "session.log").open("a") as file:
            file.write(line + "\n")

    def save(self) -> None:
        """Write what there is."""
        write_json(self.config.folder / "profile.json", clean(self.profile))

    def mark(self, label: str | None, until_s: float) -> None:
        """Tell the process that watches what runs now, and until when (wall-clock) it may."""
        state = {"section": self.section, "label": label and self._key(label), "until_s": until_s}
        write_json(self.config.folder / "state.json", state)

    def _key(self, label: str) -> str:
        return f"{self.section}: {label}"

    def record_error(self, label: str) -> None:
        """Write down the exception that is being handled."""
        text = traceback.format_exc()
        last = text.strip().splitlines()[-1]
        error = sys.exception()
        said = str(error) if isinstance(error, BlendServeError) else last
        self.profile["errors"].append({"where": self._key(label), "error": said[:400]})
        with (self.config.folder / "errors.txt").open("a") as file:
            file.write(f"=== {self._key(label)}\n{text}\n")
        self.log(f"failed: {label}: {last[:160]}")
        self.save()

    def _check_device(self) -> None:
        if not self.is_device_alive():
            self.log("the device does not answer any more")
            raise DeviceLostError


# -- processes -------------------------------------------------------------------------------------------------------


def supervise(config: SessionConfig, sections: Sections, open_subject: str) -> dict[str, Any]:
    """Run a session in worker processes, never longer than its budget, and return its profile.

    Args:
        config: the session; files in its folder are replaced.
        sections: in order of value.
        open_subject: `module:name` of the function that makes what the sections measure, in each worker.
    """
    folder = config.folder
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("profile.json", "state.json", "session.log", "errors.txt"):
        (folder / name).unlink(missing_ok=True)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # hardware queues: fewer false dependencies
    started_s = time.time()
    # On the clock of a dry run nothing takes time; only a hang ends a worker early.
    end_s = math.inf if config.dry_run else started_s + config.budget_s - REPORT_S
    left_out: list[str] = []
    losses: list[dict[str, Any]] = []
    given_up: set[str] = set()
    context = multiprocessing.get_context("spawn")
    clocks = _record_clocks(folder)
    for _ in range(MAX_WORKERS):
        arguments = (config, sections, open_subject, started_s, tuple(left_out), frozenset(given_up))
        process = context.Process(target=_work, args=arguments, daemon=True)
        process.start()
        reason = _watch(process, folder, end_s)
        if process.exitcode == 0:
            break
        state = read_json(folder / "state.json") or {}
        section, label = state.get("section", "open"), state.get("label")
        losses.append({"section": section, "label": label, "reason": reason or f"exit {process.exitcode}"})
        print(f"worker lost: {losses[-1]}", file=sys.stderr, flush=True)
        if label is not None:
            left_out.append(label)
        if label is None or sum(loss["section"] == section for loss in losses) >= MAX_LOSSES:
            given_up.add(section)
        if time.time() > end_s or section == "open":
            break
        (folder / "state.json").unlink(missing_ok=True)
    if clocks is not None:
        clocks.terminate()
        clocks.wait()
    profile = read_json(folder / "profile.json") or {"meta": {}, "sections": {}}
    profile["losses"] = losses
    for entry in profile["sections"].values():
        if entry["status"] == "running":
            entry["status"] = "lost"
    profile["meta"]["wall_s"] = round(time.time() - started_s, 1)
    write_json(folder / "profile.json", profile)
    return profile


def _work(
    config: SessionConfig,
    sections: Sections,
    open_subject: str,
    started_s: float,
    left_out: tuple[str, ...],
    given_up: frozenset[str],
) -> None:
    """A worker: everything that is not done and not given up."""
    session = Session(config, sections, started_s, left_out)
    finished = {n for n, entry in session.profile["sections"].items() if entry["status"] != "running"}
    try:
        session.mark(None, time.time() + OPEN_S)
        try:
            subject = resolve(open_subject)(session)
        except Exception:
            session.record_error("open")
            os._exit(CANNOT_OPEN)
        for name, section in sections.items():
            if name in finished or name in given_up or (config.only and name not in config.only):
                continue
            session.run(name, section, subject)
    except DeviceLostError:
        session.save()
        os._exit(DEVICE_LOST)
    session.save()
    os._exit(0)  # no teardown of streams and contexts, which could only fail


def _record_clocks(folder: Path) -> subprocess.Popen[bytes] | None:
    """Write a line a second for as long as the session lasts."""
    if shutil.which("nvidia-smi") is None:
        return None
    columns = "timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu"
    query = ["nvidia-smi", f"--query-gpu={columns}", "--format=csv", "--loop-ms=1000", "--id=0"]
    with (folder / "clocks.csv").open("wb") as file:
        return subprocess.Popen(query, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.DEVNULL)


def resolve(name: str) -> Callable[..., Any]:
    """The function `module:name`."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def _watch(process: BaseProcess, folder: Path, end_s: float) -> str | None:
    """Wait for a worker; stop it at the end of the session or once it outstays what it announced. The reason."""
    hangs_s = time.time() + OPEN_S
    try:
        while process.is_alive():
            process.join(0.1)
            until_s = (read_json(folder / "state.json") or {}).get("until_s", hangs_s)
            if time.time() > end_s:
                return "end of the session"
            if time.time() > until_s:
                return "hung"
    finally:
        if process.is_alive():
            process.kill()
        process.join()
    return None


# -- sections of a GPU -----------------------------------------------------------------------------------------------

_GPU = "blendserve.engines.native.gpu_profile"
OPEN_SUBJECT = f"{_GPU}:open_subject"
GPU_SECTIONS: Sections = {
    "probes": Section(f"{_GPU}:probes", 50.0),  # and what loads and compiles before
    "ceilings": Section(f"{_GPU}:ceilings", 8.0),
    "attention": Section(f"{_GPU}:attention", 30.0),
    "gemm": Section(f"{_GPU}:gemm", 30.0),
    "pair": Section(f"{_GPU}:pair", 50.0),
    "steps": Section(f"{_GPU}:steps", 30.0),
    "stack": Section(f"{_GPU}:stack", 60.0),
    "small": Section(f"{_GPU}:small", 15.0),
    "drift": Section(f"{_GPU}:drift", 6.0),
}


def profile_gpu(config: EngineConfig, files: ModelFiles, folder: Path, budget_s: float) -> dict[str, Any]:
    """What a GPU does with a model of these sizes and random weights; see `gpu_profile`.

    Args:
        config: of the native engine.
        files: of which the config alone is used.
        folder: for the files of the session.
        budget_s: for all of it.
    """
    session = SessionConfig(folder, budget_s, options={"engine": config, "files": files})
    return supervise(session, GPU_SECTIONS, OPEN_SUBJECT)


# -- files -----------------------------------------------------------------------------------------------------------


def clean(value: Any) -> Any:
    """A copy for JSON: text keys, five significant digits, None for what is no number."""
    if isinstance(value, Mapping):
        return {str(key): clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [clean(item) for item in value]
    if value is None or isinstance(value, (bool, str, int)):
        return value
    number = float(value)
    return float(f"{number:.5g}") if math.isfinite(number) else None


def read_json(path: Path) -> Any:
    """The contents of a file; None where there is none."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def write_json(path: Path, value: Any) -> None:
    """Replace a file at once."""
    working = path.with_suffix(".tmp")
    working.write_text(json.dumps(value, indent=1))
    working.replace(path)
