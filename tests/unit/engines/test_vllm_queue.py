"""vLLM's waiting queue with admission by expected memory, on likenesses of vLLM's scheduler and requests."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from blendserve.engines.vllm_queue import (
    OUTPUT_TOKENS_EST,
    ExpectedMemoryQueue,
    lacking,
    make_scheduler,
)

BLOCK_SIZE = 10


class Line(deque[Any]):
    """As vLLM's queue of first come, first served."""

    add_request, pop_request, prepend_request = deque.append, deque.popleft, deque.appendleft
    remove_requests = deque.clear

    def peek_request(self) -> Any:
        return self[0]


class Manager:
    """As vLLM's `KVCacheManager`."""

    def __init__(self, num_blocks: int) -> None:
        self.num_free = num_blocks
        self.held: dict[str, list[Any]] = {"": []}
        self.block_pool = SimpleNamespace(get_num_free_blocks=lambda: self.num_free)

    def get_blocks(self, request_id: str) -> Any:
        return SimpleNamespace(blocks=(self.held[request_id],))

    def get_computed_blocks(self, request: Any) -> Any:
        return SimpleNamespace(blocks=(request.hits,)), len(request.hits) * BLOCK_SIZE


class FakeScheduler:
    """As vLLM's `Scheduler`, as far as the queue sees it."""

    def __init__(self, num_blocks: int = 10) -> None:
        self.waiting: Any = Line()
        self.running: list[Any] = []
        self.kv_cache_manager: Any = Manager(num_blocks)
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[None])
        self.connector = None
        self.block_size = BLOCK_SIZE
        self.current_step = 0

    def schedule(self) -> None:
        self.current_step += 1
        if not self.waiting:
            return

    def run(self, request: Any, blocks: list[Any]) -> None:
        self.running.append(request)
        self.kv_cache_manager.held[request.request_id] = blocks
        self.kv_cache_manager.num_free -= sum(block.ref_cnt == 1 for block in blocks)
        self.current_step += 1


def request(prompt: int, output: int, *, generated: int = 0, hits: tuple[Any, ...] = ()) -> Any:
    params = SimpleNamespace(extra_args={OUTPUT_TOKENS_EST: output}, max_tokens=1000)
    return SimpleNamespace(
        request_id=f"{id(params)}",
        num_tokens=prompt + generated,
        num_output_tokens=generated,
        sampling_params=params,
        hits=hits,
    )


def blocks(count: int, num_users: int = 1) -> list[Any]:
    return [SimpleNamespace(ref_cnt=num_users) for _ in range(count)]


def test_a_request_waits_while_it_is_expected_to_outgrow_the_memory() -> None:
    scheduler = FakeScheduler(num_blocks=10)
    scheduler.run(request(20, 50), blocks(2))  # 70 of 100 tokens at its end
    queue = scheduler.waiting = ExpectedMemoryQueue(scheduler)
    scheduler.kv_cache_manager.num_free, queue._num_blocks = 8, 10
    queue.add_request(request(20, 50))
    assert not queue
    assert len(queue) == len(list(queue)) == 1
    queue.remove_requests()
    queue.add_request(request(5, 5))  # ends when the other has 25 tokens
    assert queue


def test_whatever_is_first_starts_where_nothing_runs() -> None:
    scheduler = FakeScheduler(num_blocks=2)
    queue = ExpectedMemoryQueue(scheduler)
    assert not queue
    queue.add_request(request(500, 500))
    assert queue


def test_sequences_that_end_before_leave_their_memory() -> None:
    scheduler = FakeScheduler(num_blocks=12)
    queue = ExpectedMemoryQueue(scheduler)
    for _ in range(3):
        scheduler.run(request(20, 4), blocks(2))
    queue.add_request(request(20, 60))  # at once 80 tokens, and at its end 80 alone
    assert queue
    scheduler.running[0].sampling_params.extra_args = {OUTPUT_TOKENS_EST: 60}
    scheduler.current_step += 1
    assert not queue


def test_what_is_shared_counts_once() -> None:
    scheduler = FakeScheduler(num_blocks=10)
    queue = ExpectedMemoryQueue(scheduler)
    prefix = blocks(5, num_users=2)
    scheduler.run(request(55, 10), prefix + blocks(1))
    scheduler.run(request(55, 10), prefix + blocks(1))
    scheduler.kv_cache_manager.num_free = 3
    queue.add_request(request(55, 10))
    assert not queue
    queue.remove_requests()
    queue.add_request(request(55, 4, hits=tuple(prefix)))
    assert queue


def test_outputs_that_outlive_their_estimate_are_expected_to_grow_further() -> None:
    scheduler = FakeScheduler(num_blocks=10)
    queue = ExpectedMemoryQueue(scheduler)
    scheduler.run(request(10, 5, generated=50), blocks(6))  # 85 tokens, not 61
    queue.add_request(request(10, 20))
    assert not queue


def test_it_holds_nobody_back_once_it_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = FakeScheduler(num_blocks=2)
    queue = ExpectedMemoryQueue(scheduler)
    scheduler.run(SimpleNamespace(request_id="other"), [])
    queue.add_request(request(500, 500))
    assert queue
    assert queue
    (record,) = caplog.records
    assert "off from now on: AttributeError" in record.message


class FakeConfig:
    """As vLLM's `SchedulerConfig`."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler_cls: Any = "ours"
        self._scheduler = scheduler

    def get_scheduler_cls(self) -> Any:
        assert self.scheduler_cls is None
        return lambda vllm_config, block_size: self._scheduler


def made(scheduler: Any) -> Any:
    return make_scheduler(SimpleNamespace(scheduler_config=FakeConfig(scheduler)), block_size=BLOCK_SIZE)


def test_vllms_own_scheduler_gets_the_queue() -> None:
    scheduler = FakeScheduler()
    line = scheduler.waiting
    assert made(scheduler) is scheduler
    assert isinstance(scheduler.waiting, ExpectedMemoryQueue)
    scheduler.waiting.add_request(1)
    assert list(line) == [1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"waiting": []}, "the waiting queue is a list"),
        ({"waiting": deque()}, "the waiting queue has no add_request"),
        ({"kv_cache_config": SimpleNamespace(kv_cache_groups=[1, 2])}, "2 groups of KV caches"),
        ({"connector": object()}, "through a connector"),
        ({"current_step": None}, "a count of the scheduler is a NoneType"),
        ({"kv_cache_manager": SimpleNamespace()}, "AttributeError"),
        ({"schedule": lambda: None}, "does not ask its waiting queue"),
    ],
)
def test_a_scheduler_that_is_not_as_expected_keeps_its_queue(
    changes: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = FakeScheduler()
    vars(scheduler).update(changes)
    queue = scheduler.waiting
    assert reason in lacking(scheduler)
    assert made(scheduler).waiting is queue
    (record,) = caplog.records
    assert reason in record.message
