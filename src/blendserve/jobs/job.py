"""A job: drives an engine over prepared requests and puts every finished line on disk."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from blendserve.errors import EngineError
from blendserve.jobs.deadline import Deadline
from blendserve.jobs.openai_format import LineError, Tokenizer, expired_line, failure_line, success_line
from blendserve.jobs.prepare import Prepared
from blendserve.jobs.store import ResultStore
from blendserve.request import Completion, Failure, Result, StepOutput, StepStats

if TYPE_CHECKING:
    from blendserve.engines import Engine
    from blendserve.scheduling.policy import Policy

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class JobProgress:
    """Where a running job stands; counts of lines have OpenAI's names."""

    total: int
    """lines of the input"""
    num_done: int
    """lines whose result an earlier run wrote"""
    completed: int = 0
    """lines whose result this run wrote"""
    failed: int = 0
    failures_by_code: Counter[str] = field(default_factory=Counter)

    num_prompt_tokens: int = 0
    """of finished requests, one prompt per request"""
    num_cached_tokens: int = 0
    """prompt tokens of finished requests that were not computed anew"""
    num_output_tokens: int = 0
    """of finished requests"""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    """computed so far, recomputed ones included"""
    num_decode_tokens: int = 0
    num_retracted: int = 0
    num_retried_requests: int = 0
    """requests that ran when the engine failed, and ran again"""
    num_engine_restarts: int = 0
    """times that the engine died and was opened anew"""
    is_out_of_time: bool = False
    """whether the deadline has ended the admission of requests"""
    num_running: int = 0
    num_waiting: int = 0
    kv_usage_ratio: float = 0.0
    elapsed_s: float = 0.0
    """since the run began, by the wall clock"""
    engine_s: float = 0.0
    """sum of the step durations, by the engine's clock; the simulator's is virtual"""
    compute_s: float = 0.0
    memory_s: float = 0.0
    step: StepOutput | None = None
    """the last step, whole"""

    def add_step(self, stats: StepStats) -> None:
        """Count one engine step."""
        self.num_steps += 1
        self.num_prefill_tokens += stats.num_prefill_tokens
        self.num_decode_tokens += stats.num_decode_tokens
        self.num_retracted += stats.num_retracted
        self.num_retried_requests += stats.num_retried_requests
        self.num_engine_restarts += stats.num_engine_restarts
        self.num_running = stats.num_running
        self.num_waiting = stats.num_waiting
        self.kv_usage_ratio = stats.kv_usage_ratio
        self.engine_s += stats.duration_s
        self.compute_s += stats.compute_s
        self.memory_s += stats.memory_s


@dataclass(frozen=True, slots=True)
class JobSummary:
    """What a job did, finished or not."""

    total: int
    num_done: int
    completed: int
    failed: int
    failures_by_code: Mapping[str, int]
    """most frequent first"""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_prefill_tokens: int
    """prompt tokens computed, and tokens computed again after a retraction"""
    num_retracted: int
    num_retried_requests: int
    num_engine_restarts: int
    num_steps: int
    elapsed_s: float
    engine_s: float
    compute_s: float
    memory_s: float

    @property
    def is_complete(self) -> bool:
        """Whether every line has a result or an error."""
        return self.num_done + self.completed + self.failed == self.total

    @property
    def cached_ratio(self) -> float:
        """Share of the prompt tokens that came from the prefix cache."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Prompt and output tokens of finished requests per second of the engine's clock."""
        num_tokens = self.num_prompt_tokens + self.num_output_tokens
        return num_tokens / self.engine_s if self.engine_s else 0.0


class Answer(NamedTuple):
    """What became of a row: its completions in sample order, or why it has none."""

    row_index: int
    result: list[Completion] | Failure


class GatheredResults:
    """Brings the results of the requests of each row together; one failure fails the row."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._is_answered = np.zeros(len(prepared.requests), dtype=np.bool_)
        self._partial: dict[int, dict[int, Result]] = {}
        """row -> sample -> result, of rows that wait for more samples"""

    def add(self, request: int, result: Result) -> Answer | None:
        """Take a result; returns its row's answer if that is complete now.

        Raises:
            EngineError: there was one already.
        """
        if self._is_answered[request]:
            raise EngineError(f"the engine answered request {request} twice; please report this")
        self._is_answered[request] = True
        row_index = int(self._prepared.row_index[request])
        by_sample = self._partial.setdefault(row_index, {})
        by_sample[int(self._prepared.sample_index[request])] = result
        num_samples = self._prepared.rows[row_index].n
        if len(by_sample) < num_samples:
            return None
        del self._partial[row_index]
        completions: list[Completion] = []
        for sample in range(num_samples):
            sample_result = by_sample[sample]
            if isinstance(sample_result, Failure):
                return Answer(row_index, sample_result)
            completions.append(sample_result)
        return Answer(row_index, completions)

    @property
    def num_open(self) -> int:
        """Requests without a result."""
        return int(np.count_nonzero(~self._is_answered))

    def open_rows(self) -> list[int]:
        """Rows that lack a result, in order."""
        rows: list[int] = np.unique(self._prepared.row_index[~self._is_answered]).tolist()
        return rows


class Job:
    """One run over the lines that have no result yet.

    Iterate `run()` to the end. Whatever stops it, Ctrl-C and a dying engine included, every line that was
    written stays and is on the disk, and the same job can be started again for the rest. A line of several
    completions is written when it has all of them; interrupted before, they all run again.

    `engine` may be None where `prepared` has no requests. `close` closes it, but not the store.

    As `deadline` comes near nothing more is admitted, and when it is over the run ends. Lines without a result
    then stay as they are, to be run later, or with `finalize` get an error of code `batch_expired`.
    """

    def __init__(
        self,
        prepared: Prepared,
        engine: Engine | None,
        policy: Policy,
        store: ResultStore,
        tokenizer: Tokenizer,
        *,
        model: str,
        deadline: Deadline | None = None,
        finalize: bool = False,
    ) -> None:
        self._deadline = deadline
        self._finalize = finalize
        self._prepared = prepared
        self._engine = engine
        self._policy = policy
        self._store = store
        self._tokenizer = tokenizer
        self._model = model
        self._gathered = GatheredResults(prepared)
        self.progress = JobProgress(total=prepared.num_lines, num_done=prepared.num_done)
        """live; the same object that `run` yields"""

    def run(self) -> Generator[JobProgress]:
        """Run everything; yields after the failed lines are written and then after every engine step.

        Raises:
            EngineError: the engine broke, or ended without an answer to every request.
        """
        progress, started_s = self.progress, time.perf_counter()
        try:
            for error in self._prepared.errors:
                self._write_failure(error)
            self._store.flush()
            yield progress
            if len(self._prepared.requests):
                assert self._engine is not None
                for output in self._engine.run(self._prepared.requests, self._policy):
                    for request, result in output.results:
                        self._take(request, result)
                    self._store.flush()
                    progress.add_step(output.stats)
                    progress.step = output
                    progress.elapsed_s = time.perf_counter() - started_s
                    if self._deadline is not None:
                        self._deadline.add_step(output)
                        if self._deadline.is_near and not progress.is_out_of_time:
                            progress.is_out_of_time = True
                            self._engine.stop_admitting()
                    yield progress
                    if self._deadline is not None and self._deadline.is_over:
                        break
            num_open = self._gathered.num_open
            if num_open and progress.is_out_of_time:
                if self._finalize:
                    self._expire()
            elif num_open:
                raise EngineError(
                    f"the engine left {num_open} of {len(self._prepared.requests)} requests "
                    "unanswered; the results so far are kept, run the job again for the rest"
                )
        finally:
            progress.elapsed_s = time.perf_counter() - started_s
            self._store.sync()

    @property
    def summary(self) -> JobSummary:
        """What was done so far; final once `run` has ended."""
        progress = self.progress
        return JobSummary(
            total=progress.total,
            num_done=progress.num_done,
            completed=progress.completed,
            failed=progress.failed,
            failures_by_code=dict(progress.failures_by_code.most_common()),
            num_prompt_tokens=progress.num_prompt_tokens,
            num_cached_tokens=progress.num_cached_tokens,
            num_output_tokens=progress.num_output_tokens,
            num_prefill_tokens=progress.num_prefill_tokens,
            num_retracted=progress.num_retracted,
            num_retried_requests=progress.num_retried_requests,
            num_engine_restarts=progress.num_engine_restarts,
            num_steps=progress.num_steps,
            elapsed_s=progress.elapsed_s,
            engine_s=progress.engine_s,
            compute_s=progress.compute_s,
            memory_s=progress.memory_s,
        )

    def _take(self, request: int, result: Result) -> None:
        """Count a result and write its line if that has all its completions."""
        if isinstance(result, Completion):
            planned = int(self._prepared.requests.prompt_tokens[request])
            counted = result.num_prompt_tokens or (planned if result.body is None else 0)
            self.progress.num_prompt_tokens += counted
            self.progress.num_cached_tokens += result.num_cached_tokens
            self.progress.num_output_tokens += result.num_output_tokens

        answer = self._gathered.add(request, result)
        if answer is None:
            return
        row = self._prepared.rows[answer.row_index]
        if isinstance(answer.result, Failure):
            failure = answer.result
            self._write_failure(
                LineError(
                    row.line,
                    row.custom_id,
                    failure.code,
                    failure.message,
                    failure.param,
                    failure.status_code,
                    row.file,
                )
            )
            return
        params = self._prepared.requests.sampling_params(request)
        adapter = params.adapter
        line = success_line(
            row,
            answer.result,
            model=self._model if adapter is None else adapter.name,
            num_prompt_tokens=answer.result[0].num_prompt_tokens
            or int(self._prepared.requests.prompt_tokens[request]),
            tokenizer=self._tokenizer,
            prompt=self._prepared.requests.tokens[request].tolist() if params.echo else (),
            echo=params.echo,
        )
        self._store.write_result(line)
        self.progress.completed += 1

    def close(self) -> None:
        """Close the engine."""
        if self._engine is not None:
            self._engine.close()

    def _expire(self) -> None:
        """Write an error for every line that has no result."""
        for row_index in self._gathered.open_rows():
            self._store.write_error(expired_line(self._prepared.rows[row_index].custom_id))
            self.progress.failed += 1
            self.progress.failures_by_code["batch_expired"] += 1

    def _write_failure(self, error: LineError) -> None:
        self._store.write_error(failure_line(error))
        self.progress.failed += 1
        self.progress.failures_by_code[error.code] += 1
        _log.warning("line_failed", extra={"fields": error})
