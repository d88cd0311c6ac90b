"""Lanes on CPU tensors that put operations off, run them in orders that a GPU might, and look for races.

Every access to memory is seen where torch dispatches it, with the lane and its time; what C or Triton do with pointers
is not. Two accesses to the same element on different lanes, at least one of them a write, must be ordered by events.
"""

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

LANES = ("main", "gemm", "attention")
ORDERS = ("gemm", "attention", "random")


class RaceError(AssertionError):
    """Something was not ordered by an event."""


@dataclass
class Event:
    clock: NDArray[np.int32] | None = None
    """of the lane when it was recorded; None: not yet"""


class Memory:
    """One storage: who may use it, and when each lane last read and wrote each element."""

    def __init__(self, tensor: Tensor, owner: str) -> None:
        self.storage = tensor.untyped_storage()  # kept, so that its address means nothing else
        self.owner = owner
        num_elements = self.storage.nbytes() // tensor.element_size()
        self.read, self.written = np.zeros((2, len(LANES), num_elements), np.int32)

    def places_of(self, tensor: Tensor, rows: Tensor | None) -> Any:
        """Elements of a view of the storage, or of some rows of it, as an index."""
        first = tensor.storage_offset()
        if rows is None and tensor.is_contiguous():
            return slice(first, first + tensor.numel())
        places = np.arange(self.read.shape[1])[first:]
        strides = [stride * places.itemsize for stride in tensor.stride()]
        places = np.lib.stride_tricks.as_strided(places, tensor.shape, strides)
        return (places if rows is None else places[rows.numpy()]).ravel()


class RecordingLanes:
    """Implements `overlap.Lanes`.

    Args:
        order: the lane that runs as far as it can before the other may, or "random".
        drop: number of the wait to leave out.
    """

    def __init__(self, order: str = "gemm", drop: int | None = None) -> None:
        self.num_attention_sms: int | None = None
        self.num_waits = 0
        self.num_operations = dict.fromkeys(LANES, 0)
        self._order = order
        self._drop = drop
        self._random = random.Random(0)
        self._queues: dict[str, deque[tuple[str, Any]]] = {"gemm": deque(), "attention": deque()}
        # Of each lane, how many accesses of every lane came before what it does now.
        self._clocks = {lane: np.zeros(len(LANES), np.int32) for lane in LANES}
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
        self._clocks[lane] = np.maximum(self._clocks[lane], event.clock)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Watch the accesses of what is run, and of the caller, whose lane is main."""
        with _Watch(self):
            yield

    def access(self, tensor: Tensor, rows: Tensor | None, *, is_write: bool) -> None:
        """Take note of an access by the lane that runs, and compare it with earlier ones to the same elements."""
        memory, lane = self._memory_of(tensor, "main"), self._lane
        if lane != memory.owner != "main":
            raise RaceError(f"{lane} uses memory that {memory.owner} allocated")
        clock, own = self._clocks[lane], LANES.index(lane)
        clock[own] += 1
        places = memory.places_of(tensor, rows)
        for what, times in (("wrote", memory.written), ("read", memory.read)):
            if (what == "wrote" or is_write) and (times[:, places] > clock[:, None]).any():
                raise RaceError(f"nothing makes {lane} wait for another lane that {what} what it uses")
        (memory.written if is_write else memory.read)[own, places] = clock[own]

    def allocated(self, tensor: Tensor) -> None:
        """Take note of who owns the memory of a new tensor."""
        self._memory_of(tensor, self._lane)

    def _memory_of(self, tensor: Tensor, owner: str) -> Memory:
        address = address_of(tensor)
        if address not in self._memory:
            self._memory[address] = Memory(tensor, owner)
        return self._memory[address]


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
        results = list(filter(has_memory, tensors_in(result)))
        views, known = set(map(address_of, results)), set()
        for argument in function._schema.arguments:
            aliases = argument.alias_info
            is_write = aliases is not None and aliases.is_write
            for tensor in filter(has_memory, tensors_in(given.get(argument.name))):
                known.add(address_of(tensor))
                if aliases is not None and not is_write and address_of(tensor) in views:
                    continue  # a view is no access
                rows = rows_of(function, given) if argument.name == "self" else None
                self._lanes.access(tensor, rows, is_write=is_write)
        for tensor in results:
            if address_of(tensor) not in known:
                self._lanes.allocated(tensor)
        return result


def address_of(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        yield from itertools.chain.from_iterable(map(tensors_in, value))


def has_memory(tensor: Tensor) -> bool:
    """Weights packed by oneDNN, which nobody writes to, have none that torch knows of."""
    return tensor.layout == torch.strided and tensor.numel() > 0


def rows_of(function: Any, given: dict[str, Any]) -> Tensor | None:
    """The rows that an operation with one index uses; None: it uses all."""
    if function._schema.name not in {"aten::index", "aten::index_put_", "aten::index_select"}:
        return None
    indices = given.get("indices", [given.get("index")])
    one = indices[0] if len(indices) == 1 else None
    return one if isinstance(one, Tensor) and one.dtype != torch.bool else None
