"""The report of a run, OUT.report.json and OUT.report.html: what was done, how fast, at what cost.

A resumed job keeps the summaries of its earlier runs, so that time, retries and cost of all of them add up. The JSON is
also written while the job runs: a run that was killed has left its last minute's state.
"""

from __future__ import annotations

import importlib.util
import logging
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

import orjson

import blendserve
from blendserve.errors import ConfigError
from blendserve.jobs.job import JobProgress, JobSummary
from blendserve.jobs.storage import replacing
from blendserve.jobs.telemetry import Telemetry, Throttle

REPORT_FORMAT = 1
CHECKPOINT_INTERVAL_S = 60.0
PACKAGES = ("numpy", "numba", "torch", "transformers", "tokenizers", "vllm", "sglang")
COMPRESSED = frozenset({".gz", ".zst"})

Status = Literal["running", "complete", "stopped", "interrupted", "failed"]
"""stopped: it ended on purpose before every line had a result; a run that is found `running` later was killed"""

_log = logging.getLogger(__name__)


class ReportPaths(NamedTuple):
    """Where the report of an output file goes."""

    json: Path
    html: Path


def report_paths(output: str | Path) -> ReportPaths:
    """`out.report.json` and `out.report.html` beside `out.jsonl`."""
    path = Path(output)
    if path.suffix in COMPRESSED:
        path = path.with_suffix("")
    return ReportPaths(path.with_name(f"{path.stem}.report.json"), path.with_name(f"{path.stem}.report.html"))


def versions() -> dict[str, str]:
    """What runs: BlendServe, Python, the machine, and those of `PACKAGES` that are installed."""
    found = {
        "blendserve": blendserve.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def earlier_runs(path: Path, num_done: int) -> list[dict[str, Any]]:
    """Summaries of the runs before, of an output that has `num_done` results; none if it was begun anew.

    Raises:
        ConfigError: there is such a file and it is no report.
    """
    try:
        document = orjson.loads(path.read_bytes())
        runs: list[dict[str, Any]] = document["runs"]
        if document["report_format"] != REPORT_FORMAT:
            raise ConfigError(f"{path} is a report of another version; move it away, or pass --no-report")
    except FileNotFoundError:
        return []
    except (OSError, KeyError, TypeError, orjson.JSONDecodeError) as error:
        raise ConfigError(
            f"{path} is not a report and would be overwritten; move it away, or pass --no-report"
        ) from error
    if num_done == 0 and any(run["completed"] for run in runs):
        return []
    for run in runs:
        if run["status"] == "running":
            run["status"] = "killed"
    return runs


class RunReport:
    """Writes the report of one run.

    Args:
        output: the job's output file.
        telemetry: of the run.
        description: what ran on what: names, configuration.
        earlier: `earlier_runs`.
        cost_per_hour: of the machine; None leaves cost out.
        started_s: `time.time()` when the command began, which is when the machine began to cost.
    """

    def __init__(
        self,
        output: str | Path,
        telemetry: Telemetry,
        description: dict[str, Any],
        earlier: list[dict[str, Any]],
        *,
        cost_per_hour: float | None = None,
        started_s: float,
    ) -> None:
        self.paths = report_paths(output)
        self._telemetry = telemetry
        self._plan = asdict(telemetry.plan.summary()) if telemetry.plan.num_requests else None
        self._description = {**description, "versions": versions(), "command": sys.argv}
        self._earlier = earlier
        self._cost_per_hour = cost_per_hour
        self._started_s = started_s

    def checkpointed(
        self, steps: Iterator[JobProgress], summary: Callable[[], JobSummary]
    ) -> Iterator[JobProgress]:
        """Pass a job's steps on and write the JSON every minute, with what `summary()` gives then."""
        due = Throttle(CHECKPOINT_INTERVAL_S)
        for progress in steps:
            if due.is_due():
                try:
                    self.write_json("running", summary())
                except OSError as error:
                    _log.warning("report_not_written", extra={"fields": {"reason": str(error)}})
                due.updated()
            yield progress

    def document(self, status: Status, summary: JobSummary) -> dict[str, Any]:
        """The JSON report."""
        telemetry = self._telemetry
        telemetry.energy.read()
        this_run = self._this_run(status, summary)
        runs = [*self._earlier, this_run]
        calibration = telemetry.lengths.calibration()
        return {
            "report_format": REPORT_FORMAT,
            "status": status,
            **self._description,
            "plan": self._plan,
            "summary": summary_document(summary),
            "cost": this_run.get("cost"),
            "all_runs": _added_up(runs, summary),
            "runs": runs,
            "timeline": telemetry.timeline.columns(),
            "output_lengths": {
                **asdict(calibration),
                "actual_to_expected_ratio": telemetry.lengths.total_ratio(),
            },
            "step_time_s": _histogram_document(telemetry.step_time_s),
            "prompt_tokens": _histogram_document(telemetry.prompt_length),
            "output_tokens": _histogram_document(telemetry.output_length),
            "finish_reasons": dict(telemetry.finish_reasons),
        }

    def write_json(self, status: Status, summary: JobSummary) -> dict[str, Any]:
        """Write OUT.report.json in one go and return it.

        Raises:
            OSError: it cannot be written.
        """
        document = self.document(status, summary)
        option = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
        _replace(self.paths.json, orjson.dumps(document, option=option, default=str))
        return document

    def write(self, status: Status, summary: JobSummary) -> tuple[dict[str, Any], list[Path]]:
        """Write both files; returns the document and the files written. Without plotly there is no page.

        Raises:
            OSError: one cannot be written.
        """
        document = self.write_json(status, summary)
        if importlib.util.find_spec("plotly") is None:
            return document, [self.paths.json]
        from blendserve.report import run_page

        _replace(self.paths.html, run_page(document).encode())
        return document, [self.paths.html, self.paths.json]

    def _this_run(self, status: Status, summary: JobSummary) -> dict[str, Any]:
        wall_s = time.time() - self._started_s
        energy = self._telemetry.energy
        num_tokens = summary.num_prompt_tokens + summary.num_output_tokens
        run: dict[str, Any] = {
            "status": status,
            "started": datetime.fromtimestamp(self._started_s, UTC).isoformat(timespec="seconds"),
            "wall_s": wall_s,
            **summary_document(summary),
        }
        if self._cost_per_hour is not None:
            run["cost"] = cost(self._cost_per_hour, wall_s, num_tokens, summary.num_output_tokens)
        if energy.is_available:
            run["energy_j"] = energy.energy_j
        return run


def summary_document(summary: JobSummary) -> dict[str, Any]:
    """A summary with its derived figures."""
    return {**asdict(summary), "cached_ratio": summary.cached_ratio, "tokens_per_s": summary.tokens_per_s}


def cost(
    cost_per_hour: float, wall_s: float, num_tokens: int, num_output_tokens: int
) -> dict[str, float | None]:
    """Cost of a run in the currency of `cost_per_hour`; per million tokens where there are any."""
    total = cost_per_hour * wall_s / 3600.0
    return {
        "cost_per_hour": cost_per_hour,
        "total": total,
        "per_million_tokens": total / num_tokens * 1e6 if num_tokens else None,
        "per_million_output_tokens": total / num_output_tokens * 1e6 if num_output_tokens else None,
    }


def _added_up(runs: list[dict[str, Any]], summary: JobSummary) -> dict[str, Any]:
    """Sums over a job's runs. Failed lines run again each time, so those of the last run are what is left."""
    summed = (
        "wall_s",
        "elapsed_s",
        "completed",
        "num_prompt_tokens",
        "num_output_tokens",
        "num_prefill_tokens",
        "num_steps",
        "num_retracted",
        "num_retried_requests",
        "num_engine_restarts",
    )
    added: dict[str, Any] = {"num_runs": len(runs), "total": summary.total, "failed": summary.failed}
    added |= {name: sum(run.get(name, 0) for run in runs) for name in summed}
    if any("cost" in run for run in runs):
        added["cost"] = sum(run["cost"]["total"] for run in runs if "cost" in run)
    if any("energy_j" in run for run in runs):
        added["energy_j"] = sum(run.get("energy_j", 0.0) for run in runs)
    return added


def _histogram_document(values: Any) -> dict[str, Any]:
    return {"upper_bounds": list(values.bounds), "counts": values.counts, "sum": values.total}


def _replace(path: Path, content: bytes) -> None:
    with replacing(path) as file:
        file.write(content)
