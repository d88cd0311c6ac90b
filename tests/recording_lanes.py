"""Lanes on CPU tensors that put operations off, run them in orders that a GPU might, and look for races.

Every access to memory is seen where torch dispatches it, with the lane and its time; what C or Triton do with pointers
is not. Two accesses to the same bytes on different lanes, at least one of them a write, must be ordered by events.
"""

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

LANES = ("main", "gemm", "attention")
ORDERS = ("gemm", "attention", "random")


class RaceError(AssertionError):
    """Something was not ordered by an event."""


@dataclass
class Event:
    clock: dict[str, int] | None = None
    """of the lane when it was recorded; None: not yet"""


@dataclass
class Memory:
    """One storage: who may use it, and its accesses by (first byte, end, lane, is write), the last time of each."""

    storage: Any  # kept, so that its address means nothing else
    owner: str
    accesses: dict[tuple[int, int, str, bool], int] = field(default_factory=dict)


class RecordingLanes:
    """Implements `overlap.Lanes`.

    Args:
        order: the lane that runs as far as it can before the other may, or "random".
        drop: number of the wait to leave out.
    """

    def __init__(self, order: str = "gemm", drop: int | None = None) -> None:
        self.num_attention_sms = None
        self.num_waits = 0
        self.num_operations = dict.fromkeys(LANES, 0)
        self._order = order
        self._drop = drop
        self._random = random.Random(0)
        self._queues: dict[str, deque[tuple[str, Any]]] = {"gemm": deque(), "attention": deque()}
        self._clocks = {lane: dict.fromkeys(LANES, 0) for lane in LANES}
        self._lane = "main"
        self._memory: dict[int, Memory] = {}

    def run(self, lane: str, operation: Callable[[], Any]) -> None:
        self._queues[lane].append(("run", operation))

    def record(self, lane: str) -> Event:
        event = Event()
        if lane == "main":
            event.clock = self._clocks[lane].copy()
        else:
            self._queues[lane].append(("record", event))
        return event

    def wait(self, lane: str, event: Event) -> None:
        self.num_waits += 1
        if self.num_waits - 1 == self._drop:
            return
        if lane == "main":
            self.drain(event)
            self._join(lane, event)
        else:
            self._queues[lane].append(("wait", event))

    @property
    def is_idle(self) -> bool:
        return not any(self._queues.values())

    @torch.inference_mode()
    def drain(self, until: Event | None = None) -> None:
        """Run what was put off, until an event is recorded or to the end."""
        while not self.is_idle and (until is None or until.clock is None):
            able = [lane for lane in self._queues if self._is_able(lane)]
            if not able:
                raise AssertionError("every lane waits for another")
            lane = self._random.choice(able)
            if self._order in able:
                lane = self._order
            kind, what = self._queues[lane].popleft()
            if kind == "run":
                self.num_operations[lane] += 1
                self._lane = lane
                try:
                    what()
                finally:
                    self._lane = "main"
            elif kind == "record":
                what.clock = self._clocks[lane].copy()
            else:
                self._join(lane, what)

    def _is_able(self, lane: str) -> bool:
        queue = self._queues[lane]
        return bool(queue) and not (queue[0][0] == "wait" and queue[0][1].clock is None)

    def _join(self, lane: str, event: Event) -> None:
        assert event.clock is not None
        clock = self._clocks[lane]
        for other, time in event.clock.items():
            clock[other] = max(clock[other], time)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Watch the accesses of what is run, and of the caller, whose lane is main."""
        with _Watch(self):
            yield

    def access(self, tensor: Tensor, spans: Iterator[tuple[int, int]], *, is_write: bool) -> None:
        """Take note of an access by the lane that runs, and compare it with all others to the same bytes."""
        memory, lane = self._memory_of(tensor, "main"), self._lane
        if lane != memory.owner != "main":
            raise RaceError(f"{lane} uses memory that {memory.owner} allocated")
        clock = self._clocks[lane]
        clock[lane] += 1
        for first, end in spans:
            for (other_first, other_end, other, wrote), time in memory.accesses.items():
                overlaps = other_first < end and first < other_end
                if overlaps and other != lane and (wrote or is_write) and clock[other] < time:
                    kinds = ["writes" if write else "reads" for write in (wrote, is_write)]
                    raise RaceError(f"{other} {kinds[0]} and {lane} {kinds[1]}, and nothing orders them")
            memory.accesses[first, end, lane, is_write] = clock[lane]

    def allocated(self, tensor: Tensor) -> None:
        """Take note of who owns the memory of a new tensor."""
        self._memory_of(tensor, self._lane)

    def _memory_of(self, tensor: Tensor, owner: str) -> Memory:
        storage = tensor.untyped_storage()
        return self._memory.setdefault(storage._cdata, Memory(storage, owner))


class _Watch(TorchDispatchMode):
    def __init__(self, lanes: RecordingLanes) -> None:
        super().__init__()
        self._lanes = lanes

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = (
            dict(zip((argument.name for argument in function._schema.arguments), args, strict=False)) | kwargs
        )
        result = function(*args, **kwargs)
        results = [tensor for tensor in tensors_in(result) if has_memory(tensor)]
        views = {tensor.untyped_storage()._cdata for tensor in results}
        known = set()
        for argument in function._schema.arguments:
            aliases = argument.alias_info
            is_write = aliases is not None and aliases.is_write
            for tensor in tensors_in(given.get(argument.name)):
                if not has_memory(tensor):
                    continue
                known.add(tensor.untyped_storage()._cdata)
                if aliases is not None and not is_write and tensor.untyped_storage()._cdata in views:
                    continue  # a view is no access
                is_indexed = argument.name == "self" and "index" in function._schema.name
                spans = rows_of(tensor, given) if is_indexed else [whole(tensor)]
                self._lanes.access(tensor, spans, is_write=is_write)
        for tensor in results:
            if tensor.untyped_storage()._cdata not in known:
                self._lanes.allocated(tensor)
        return result


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        yield from itertools.chain.from_iterable(map(tensors_in, value))


def has_memory(tensor: Tensor) -> bool:
    """Weights packed by oneDNN, which nobody writes to, have none that torch knows of."""
    return tensor.layout == torch.strided and tensor.numel() > 0


def whole(tensor: Tensor) -> tuple[int, int]:
    """First byte and end of what a tensor spans in its storage."""
    first = tensor.storage_offset() * tensor.element_size()
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return first, first + extent * tensor.element_size()


def rows_of(tensor: Tensor, given: dict[str, Any]) -> list[tuple[int, int]]:
    """What `tensor[index]` spans where one index picks rows."""
    indices = given.get("indices", [given.get("index")])
    if len(indices) != 1 or not isinstance(indices[0], Tensor) or indices[0].dtype == torch.bool:
        return [whole(tensor)]
    return [whole(tensor[row]) for row in set(indices[0].flatten().tolist())]
