"""Tensor parallelism: ranks that each hold a part of every layer and compute each step together.

```
scheduler ── rank 0: TorchExecutor ══ pipes ══ ranks 1 ..: TorchExecutor, following
                       ╚══ collective operations: NCCL, or gloo on CPUs ══╝
```

Rank 0 has the requests. Of each step it sends the batch through the pipes and broadcasts the token ids, as those of
the step before may not have left its device. All ranks then run the same forward pass on their heads, their columns
of the MLP and their part of the vocabulary. Logits are gathered on rank 0, which draws the tokens for all.

The ranks are processes of one machine and listen on its loopback address only. Followers end when their pipe does,
whatever they are waiting for. No rank goes on without the others: what goes wrong on one is the death of the engine.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection as pipes
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from blendserve.engines.process import how_it_ended, start_process
from blendserve.errors import ConfigError, EngineDiedError, EngineError
from blendserve.scheduling.batch import Batch

if TYPE_CHECKING:
    from blendserve.engines.native.executor import TorchExecutor
    from blendserve.engines.native.output import Detokenizer

COLLECTIVE_TIMEOUT_S = 300.0
"""from the first rank to the last in a collective operation; the first step of a GPU compiles kernels in between"""
REASON_TIMEOUT_S = 5.0
"""from a collective operation that fails to the news of the rank that made it fail"""
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Part:
    """One of several equal parts of a dimension; the last ones are shorter where it does not divide."""

    index: int
    count: int

    def size_of(self, whole: int) -> int:
        """Size of the part, counting what the last ones lack."""
        return -(-whole // self.count)

    def bounds(self, whole: int) -> tuple[int, int]:
        """First place of the part, and the one behind its last."""
        size = self.size_of(whole)
        return min(self.index * size, whole), min((self.index + 1) * size, whole)


class Ranks:
    """The ranks as one of them sees them.

    All must call the same operations in the same order; each raises RuntimeError where another rank has ended, or
    does not come within the timeout.
    """

    def __init__(self, place: _Place, store: Any) -> None:
        self.rank, self.size = place.rank, place.size
        self._group = _make_group(place, store)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place of the tensor."""
        self._group.allreduce([tensor]).wait()
        return tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor, in place of the others'."""
        self._group.broadcast([tensor], dist.BroadcastOptions()).wait()
        return tensor

    def gather(
        self,
        columns: Tensor,  # [num_rows, num_columns]
    ) -> Tensor:  # [num_rows, size * num_columns]
        """On rank 0 the columns of all ranks; on the others what they gave."""
        parts = [torch.empty_like(columns) for _ in range(self.size)] if self.rank == 0 else []
        self._group.gather([parts] if parts else [], [columns], dist.GatherOptions()).wait()
        return torch.cat(parts, dim=-1) if parts else columns

    def agree(self, value: int) -> int:
        """The smallest of the values that the ranks call this with."""
        raise NotImplementedError


class Leader(Ranks):
    """Rank 0, which starts and ends the others.

    Args:
        size: ranks.
        device: of all; on "cuda" each has the GPU of its number.
        open_rank: opens an executor, given `tokenizer` and `ranks`; picklable.
        timeout_s: most seconds from the first rank to the last in a collective operation.

    Raises:
        EngineDiedError: a process ended, or did not find the others, while it started.
    """

    def __init__(
        self,
        size: int,
        device: Literal["cpu", "cuda"],
        open_rank: Callable[..., TorchExecutor],
        timeout_s: float = COLLECTIVE_TIMEOUT_S,
    ) -> None:
        self.timeout_s = timeout_s
        self._device = device
        self._group: Any = None
        self._followers: list[_Process] = []
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._ended: list[str] = []
        self._has_ended = threading.Event()
        self._is_closing = False
        self._launched_s = 0.0
        self._store, port = _listening_store(size, timeout_s)
        try:
            for rank in range(1, size):
                process, connection = start_process(__name__)
                _limit_sending(connection, timeout_s)
                self._followers.append(_Process(rank, process, connection))
                self._send(self._followers[-1], (_Place(rank, size, device, port, timeout_s), open_rank))
            for follower in self._followers:
                self._receive(follower)
            super().__init__(_Place(0, size, device, port, timeout_s), self._store)
        except RuntimeError as error:
            self.close()
            raise EngineDiedError(f"the tensor-parallel ranks did not find each other: {error}") from error
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids of the other ranks."""
        return [follower.process.pid for follower in self._followers]

    def agree(self, value: int) -> int:
        """See `Ranks.agree`.

        Raises:
            EngineDiedError: a rank is gone.
            Exception: what opening an executor raised there.
        """
        smallest = min([value, *(int(self._receive(follower)) for follower in self._followers)])
        for follower in self._followers:
            self._send(follower, smallest)
        return smallest

    def watch(self) -> None:
        """From now on followers are expected to send nothing, and not to end."""
        self._watcher.start()

    def lead(self, batch: Batch, block_size: int, token_ids: Tensor, scored: NDArray[np.int64]) -> None:
        """Have all ranks compute a batch with these tokens; see `TorchExecutor.follow`."""
        self._launched_s = time.monotonic()
        message = pickle.dumps((batch.with_used_blocks(block_size), scored), pickle.HIGHEST_PROTOCOL)
        for follower in self._followers:
            follower.connection.send_bytes(message)
        self.broadcast(token_ids)

    def check(self) -> None:
        """Make sure that all ranks are there.

        Raises:
            EngineDiedError: one is not.
        """
        if self._has_ended.is_set():
            raise EngineDiedError("; ".join(self._ended))

    def death(self, error: Exception) -> EngineDiedError:
        """What an exception in a step means: the ranks are no longer at the same place in their work."""
        is_late = time.monotonic() - self._launched_s >= self.timeout_s
        if not self._has_ended.wait(REASON_TIMEOUT_S):
            what = f"{type(error).__name__}: {error}"
            if is_late:
                what = f"the ranks waited {self.timeout_s:.0f} s for each other in one step ({what})"
            self._ended.append(f"tensor-parallel rank 0 failed: {what}")
            self._has_ended.set()
        return EngineDiedError("; ".join(self._ended))

    def close(self) -> None:
        """End the other ranks."""
        self._is_closing = True
        self._ended.append("the tensor-parallel ranks were closed")
        self._has_ended.set()
        for follower in self._followers:
            follower.process.kill()  # it has nothing to save
        if self._watcher.is_alive():
            self._watcher.join()
        for follower in self._followers:
            follower.process.wait()
            follower.connection.close()
        self._followers.clear()
        self._abort()

    def _watch(self) -> None:
        """Note which followers end, and why."""
        running = {follower.connection: follower for follower in self._followers}
        while running:
            for connection in pipes.wait(list(running)):
                assert isinstance(connection, Connection)
                follower = running.pop(connection)
                try:
                    reason = f"failed: {pickle.loads(connection.recv_bytes())}"
                except (EOFError, OSError):
                    reason = how_it_ended(follower.process)
                self._ended.append(f"tensor-parallel rank {follower.rank} {reason}")
                self._has_ended.set()
                if not self._is_closing:
                    self._abort()

    def _abort(self) -> None:
        """Let kernels end that wait for other ranks; gloo notices by itself that their sockets have closed."""
        if self._device == "cuda" and self._group is not None:
            self._group.abort()

    def _send(self, follower: _Process, value: Any) -> None:
        with contextlib.suppress(OSError):  # whoever is gone is missed when its answer is read
            follower.connection.send_bytes(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))

    def _receive(self, follower: _Process) -> Any:
        """A follower's answer while it opens.

        Raises:
            EngineDiedError: it is gone.
            Exception: what was raised there.
        """
        try:
            answer = pickle.loads(follower.connection.recv_bytes())
        except (EOFError, OSError) as error:
            reason = how_it_ended(follower.process)
            raise EngineDiedError(f"tensor-parallel rank {follower.rank} {reason}") from error
        if isinstance(answer, Exception):
            raise answer
        return answer


class Follower(Ranks):
    """A rank that does what rank 0 leads it through."""

    def __init__(self, place: _Place, connection: Connection, inbox: queue.SimpleQueue[bytes]) -> None:
        self._connection = connection
        self._inbox = inbox
        super().__init__(place, _store(place.port, place.timeout_s))

    def agree(self, value: int) -> int:
        """See `Ranks.agree`."""
        self._connection.send_bytes(pickle.dumps(value))
        return int(self._received())

    def follow(self, executor: TorchExecutor) -> NoReturn:
        """Compute this rank's part of every batch of rank 0's."""
        while True:
            executor.follow(*self._received())

    def _received(self) -> Any:
        return pickle.loads(self._inbox.get())


def open_parallel(
    open_rank: Callable[..., TorchExecutor],
    tokenizer: Detokenizer | None,
    *,
    size: int,
    device: Literal["cpu", "cuda"] = "cpu",
    timeout_s: float = COLLECTIVE_TIMEOUT_S,
) -> TorchExecutor:
    """An executor that runs a model on several ranks; arguments as of `Leader`.

    Raises:
        ConfigError: there are fewer GPUs, or `open_rank` refuses.
        EngineError: opening failed in another way.
    """
    backend = "nccl" if device == "cuda" else "gloo"
    if device == "cuda" and (num_gpus := torch.cuda.device_count()) < size:
        raise ConfigError(
            f"--tensor-parallel-size {size} needs so many GPUs, and torch finds {num_gpus}; ask for no more than "
            "there are, or use --device cpu"
        )
    if not (dist.is_available() and dist.is_backend_available(backend)):
        raise ConfigError(f"--tensor-parallel-size needs torch with {backend}, which this build of it lacks")
    leader = Leader(size, device, open_rank, timeout_s)
    try:
        executor = open_rank(tokenizer=tokenizer, ranks=leader)
    except BaseException:
        leader.close()
        raise
    leader.watch()
    return executor


def serve(fd: int) -> None:
    """A follower's process: open an executor and compute what comes out of the pipe, until it ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # to stop is the job's decision, and it closes the pipe
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(fd)
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, inbox), daemon=True).start()
    try:
        place, open_rank = pickle.loads(inbox.get())
        connection.send_bytes(pickle.dumps(place.rank))
        ranks = Follower(place, connection, inbox)
        ranks.follow(open_rank(tokenizer=None, ranks=ranks))
    except (ConfigError, EngineError) as error:
        answer: Exception = error
    except Exception as error:  # whatever a model, a kernel or an allocator raises
        answer = EngineError(f"{type(error).__name__}: {error}")
    try:
        connection.send_bytes(pickle.dumps(answer))
    finally:
        os._exit(1)


class _Process(NamedTuple):
    rank: int
    process: subprocess.Popen[bytes]
    connection: Connection


@dataclass(frozen=True, slots=True)
class _Place:
    """Which rank a process is, and how it finds the others."""

    rank: int
    size: int
    device: Literal["cpu", "cuda"]
    port: int
    timeout_s: float


def _listening_store(size: int, timeout_s: float) -> tuple[Any, int]:
    """The store by which ranks find each other, and its port, which the system chooses."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = int(listener.getsockname()[1])
        fd = listener.detach()  # the store closes it
    return _store(port, timeout_s, world_size=size, is_master=True, master_listen_fd=fd), port


def _store(port: int, timeout_s: float, **server: Any) -> Any:
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(LOOPBACK, port, timeout=timeout, wait_for_workers=False, **server)  # type: ignore[attr-defined]


def _make_group(place: _Place, store: Any) -> Any:
    """The collective operations of torch, of a group that is not the process's default one."""
    timeout = timedelta(seconds=place.timeout_s)
    if place.device == "cuda":
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        torch.cuda.set_device(place.rank)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, place.rank, place.size, options)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, place.rank, place.size, options)


def _limit_sending(connection: Connection, timeout_s: float) -> None:
    """Let a process that has stopped to read be an error, not a wait for ever."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(timeout_s), 0))


def _read(connection: Connection, inbox: queue.SimpleQueue[bytes]) -> None:
    """Take messages out of the pipe, and end the process when rank 0 is gone, be it in the middle of a step."""
    while True:
        try:
            inbox.put(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
