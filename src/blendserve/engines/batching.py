"""The main loop of the engines that batch for themselves: schedule, execute, update."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from blendserve.cost_model import CostModel, StepCost
from blendserve.errors import BlendServeError, EngineDiedError, StepError
from blendserve.request import Completion, Failure, RequestTable, Result, StepOutput, StepStats
from blendserve.scheduling.batch import Batch
from blendserve.scheduling.policy import Policy
from blendserve.scheduling.scheduler import Scheduler, SchedulerConfig


@dataclass(slots=True)
class StepResult:
    """What an executor made of a batch."""

    finished: NDArray[np.bool_]
    """[num_rows] True where the row's sequence has generated its last token (or failed)"""
    duration_s: float
    cost: StepCost | None = None
    """modelled cost, if the executor has worked it out"""
    is_late: bool = False
    """whether `finished` was seen a step late: those sequences ended before this batch, whose rows of them count for
    nothing"""


class Executor(Protocol):
    """Runs batches. It knows tokens and tensors; the scheduler above it knows only counts.

    State that must outlive a retraction (generated tokens, sampler state) is kept by request, not by slot: a retracted
    request comes back in a later batch with `num_computed` small again and its generated tokens known.
    """

    name: str
    cost_model: CostModel
    block_size: int
    num_blocks: int
    max_model_len: int
    holds_kv: bool
    """whether batches need block tables"""

    def start(self, requests: RequestTable) -> None:
        """Prepare for a new table of requests; forget the previous one."""
        ...

    def execute(self, batch: Batch) -> StepResult:
        """Compute one step and append one token to every row with `samples`."""
        ...

    def collect(self, request: int) -> Result:
        """Hand over the result of a finished request and forget its state."""
        ...

    def close(self) -> None:
        """Free memory."""
        ...


def _without(batch: Batch, ended: NDArray[np.bool_]) -> Batch:
    """The batch as if the rows of `ended` sequences had computed no tokens behind their ends."""
    behind = ended & batch.samples & (batch.num_tokens == 1)
    return replace(
        batch,
        samples=batch.samples & ~ended,
        num_decode_tokens=batch.num_decode_tokens - int(behind.sum()),
        kv_tokens_read=batch.kv_tokens_read - int((batch.num_computed[behind] + 1).sum()),
    )


def collected(executor: Executor, request: int) -> Result:
    """The result of a finished request; what goes wrong in making it (its text, say) fails that request alone."""
    try:
        return executor.collect(request)
    except EngineDiedError:
        raise
    except Exception as error:  # whatever the executor raises
        return Failure("engine_error", f"The output cannot be turned into a result: {_described(error)}")


def _described(error: Exception) -> str:
    return str(error) if isinstance(error, BlendServeError) else f"{type(error).__name__}: {error}"


class BatchingEngine:
    """BlendServe's own scheduler over an executor; native and simulated differ in the executor alone."""

    def __init__(self, executor: Executor, config: SchedulerConfig) -> None:
        self.executor = executor
        self.config = config
        self._scheduler: Scheduler | None = None
        self.name = executor.name
        self.cost_model = executor.cost_model
        self.kv_capacity_tokens = executor.num_blocks * executor.block_size
        self.max_model_len = min(executor.max_model_len, self.kv_capacity_tokens)

    def run(self, requests: RequestTable, policy: Policy) -> Iterator[StepOutput]:
        """Run all requests; see `Engine.run`."""
        executor = self.executor
        self._scheduler = scheduler = Scheduler(
            requests,
            policy,
            self.config,
            num_blocks=executor.num_blocks,
            block_size=executor.block_size,
            max_model_len=self.max_model_len,
            with_block_tables=executor.holds_kv,
            cost_model=self.cost_model,
        )
        executor.start(requests)
        while scheduler.has_work:
            batch = scheduler.schedule()
            try:
                step = executor.execute(batch)
            except EngineDiedError as error:
                raise EngineDiedError(str(error), batch.requests.tolist()) from error
            except Exception as error:  # whatever a model, a kernel or an allocator raises
                raise StepError(_described(error), batch.requests.tolist()) from error
            if step.is_late:
                batch = _without(batch, step.finished)
            done = scheduler.update(batch, step.finished, step.duration_s)
            results = []
            for request, num_cached_tokens, output_tokens_est in done:
                result = collected(executor, request)
                if isinstance(result, Completion):
                    result.num_cached_tokens = num_cached_tokens
                    result.output_tokens_est = output_tokens_est
                results.append((request, result))
            yield StepOutput(self._stats(scheduler, batch, step), results)

    def stop_admitting(self) -> None:
        """See `Engine.stop_admitting`."""
        if self._scheduler is not None:
            self._scheduler.stop_admitting()

    def _stats(self, scheduler: Scheduler, batch: Batch, step: StepResult) -> StepStats:
        cost = step.cost or self.cost_model.step_cost(
            batch.num_prefill_tokens + batch.num_decode_tokens, batch.kv_tokens_read, batch.query_key_pairs
        )
        return StepStats(
            duration_s=step.duration_s,
            num_prefill_tokens=batch.num_prefill_tokens,
            num_decode_tokens=batch.num_decode_tokens,
            kv_tokens_read=batch.kv_tokens_read,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_usage_ratio=scheduler.kv_usage_ratio,
            compute_s=cost.compute_s,
            memory_s=cost.memory_s,
            num_retracted=scheduler.num_retracted_in_step,
        )

    def close(self) -> None:
        """Free the executor's memory."""
        self.executor.close()
