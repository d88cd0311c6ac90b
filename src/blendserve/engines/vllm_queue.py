"""vLLM's waiting queue, in its engine core, with admission by expected memory.

vLLM starts a request as soon as its prompt fits. Where what runs outgrows the memory, the youngest then loses all that
was computed for it. With

```
--engine-arg scheduler_cls=blendserve.engines.vllm_queue.make_scheduler
```

the queue counts as empty while what runs, with the next in line, is expected to need more than there is at any time
until it ends. Only the queue is replaced, and only if `lacking` finds all that it rests on in the scheduler as it is;
else vLLM runs as without this. Nothing of vLLM is imported here: this is loaded in its processes, whatever their
version.
"""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from blendserve.scheduling.policy import OVERRUN_FACTOR

OUTPUT_TOKENS_EST = "blendserve_output_tokens_est"
"""in a request's `SamplingParams.extra_args`: tokens that it is expected to generate"""

_log = logging.getLogger("vllm.blendserve")  # below vLLM's, which says what is shown, and where


def make_scheduler(vllm_config: Any, **arguments: Any) -> Any:
    """VLLM's own scheduler, with its queue replaced where that is possible. For vLLM's `scheduler_cls`."""
    config = vllm_config.scheduler_config
    config.scheduler_cls = None  # let it choose
    scheduler = config.get_scheduler_cls()(vllm_config=vllm_config, **arguments)
    if reason := lacking(scheduler):
        _log.warning("admission by expected memory is off, and the window alone decides: %s", reason)
    else:
        scheduler.waiting = ExpectedMemoryQueue(scheduler)
    return scheduler


def lacking(scheduler: Any) -> str:
    """What the queue needs of a scheduler that has just been made and is not as expected; empty: nothing."""
    try:
        return _lacking(scheduler)
    except Exception as error:  # of another version than this was written for
        return f"{type(error).__name__}: {error}"


def _lacking(scheduler: Any) -> str:
    queue, manager = scheduler.waiting, scheduler.kv_cache_manager
    if not isinstance(queue, deque) or len(queue) or scheduler.running != []:
        return f"the waiting queue is a {type(queue).__name__}, not an empty deque"
    for name in ("add_request", "pop_request", "peek_request", "prepend_request", "remove_requests"):
        if not callable(getattr(queue, name, None)):
            return f"the waiting queue has no {name}"
    if (num_groups := len(scheduler.kv_cache_config.kv_cache_groups)) != 1:
        return f"the model has {num_groups} groups of KV caches, not one"
    if getattr(scheduler, "connector", None) is not None:
        return "KV comes from elsewhere, through a connector"
    for method, parameter in ((manager.get_blocks, "request_id"), (manager.get_computed_blocks, "request")):
        if list(inspect.signature(method).parameters) != [parameter]:
            return f"kv_cache_manager.{method.__name__} takes other arguments"
    if not isinstance(manager.get_blocks("").blocks[0], list | tuple):
        return "kv_cache_manager.get_blocks returns something else"
    for what in (scheduler.block_size, scheduler.current_step, manager.block_pool.get_num_free_blocks()):
        if not isinstance(what, int):
            return f"a count of the scheduler is a {type(what).__name__}"
    asked = _Asked(queue)
    scheduler.waiting = asked
    try:
        scheduler.schedule()
    finally:
        scheduler.waiting = queue
    return "" if asked.is_asked else "it does not ask its waiting queue whether anything waits"


class _Queue:
    """A queue of vLLM's, but for what its truth says."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._queue)


class _Asked(_Queue):
    is_asked = False

    def __bool__(self) -> bool:
        self.is_asked = True
        return False


class _Running(NamedTuple):
    """What a sequence holds, and for how long."""

    own_tokens: int
    """without what others share"""
    own_blocks: int
    steps_left: int
    """tokens that it is expected to generate still"""


class ExpectedMemoryQueue(_Queue):
    """See the module.

    Args:
        scheduler: vLLM's, before its first request.
    """

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler.waiting)
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._block_size = int(scheduler.block_size)
        self._num_blocks = int(self._manager.block_pool.get_num_free_blocks())
        self._step = -1
        self._running: list[_Running] = []
        """of the scheduler's running requests, as far as they were looked at in this step"""
        self._is_off = False

    def __bool__(self) -> bool:
        if len(self._queue) == 0:
            return False
        if self._is_off or not self._scheduler.running:  # whatever is first must start when nothing runs
            return True
        try:
            return self._fits()
        except Exception as error:  # it must not end vLLM
            self._is_off = True
            _log.warning(
                "admission by expected memory is off from now on: %s: %s", type(error).__name__, error
            )
            return True

    def _fits(self) -> bool:
        """Whether the next in line and what runs are expected to have the memory they need until they end."""
        scheduler, running = self._scheduler, self._scheduler.running
        if scheduler.current_step != self._step:
            self._step = scheduler.current_step
            self._running = []
        self._running += [self._look_at(request) for request in running[len(self._running) :]]
        used = self._num_blocks - self._manager.block_pool.get_num_free_blocks()
        shared = used - sum(sequence.own_blocks for sequence in self._running)
        first = self._queue.peek_request()
        in_use = _leading(self._manager.get_computed_blocks(first)[0].blocks[0], 1)
        tokens, steps_left = np.array(
            [
                (first.num_tokens - in_use * self._block_size, _steps_left(first)),
                *((sequence.own_tokens, sequence.steps_left) for sequence in self._running),
            ]
        ).T
        # When a sequence ends, those that end later are all that there is, each longer by the steps until then.
        latest_first = np.argsort(-steps_left, kind="stable")
        alive = np.arange(1, len(steps_left) + 1)
        held = np.cumsum(tokens[latest_first] + self._block_size // 2) + alive * steps_left[latest_first]
        return bool(held.max() <= (self._num_blocks - shared) * self._block_size)

    def _look_at(self, request: Any) -> _Running:
        blocks = self._manager.get_blocks(request.request_id).blocks[0]
        num_shared = _leading(blocks, 2)
        own_tokens = max(request.num_tokens - num_shared * self._block_size, 0)
        return _Running(own_tokens, len(blocks) - num_shared, _steps_left(request))


def _leading(blocks: Any, num_users: int) -> int:
    """How many leading blocks of a sequence have at least so many users."""
    for index, block in enumerate(blocks):
        if block.ref_cnt < num_users:
            return index
    return len(blocks)


def _steps_left(request: Any) -> int:
    params, generated = request.sampling_params, request.num_output_tokens
    expected = (params.extra_args or {}).get(OUTPUT_TOKENS_EST) or params.max_tokens
    if generated >= expected:
        expected = min(OVERRUN_FACTOR * generated, params.max_tokens)
    return max(int(expected - generated), 1)
