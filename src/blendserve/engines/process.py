"""An executor in a process of its own, so that its death is not the job's.

```
job ─ scheduler ─ ProcessExecutor ══ pipe ══ serve ─ TorchExecutor
                   numpy, no torch             the model; ends when the pipe does
```

A message per step goes each way: the batch, with the prompts of requests that the process has not seen, and what
the step made of it, with the results of those that finished. The process is not forked and runs nothing of the
caller's main module.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blendserve.cost_model import CostModel
from blendserve.engines.batching import Executor, StepResult, collected
from blendserve.errors import ConfigError, EngineDiedError, EngineError
from blendserve.request import RequestTable, Result
from blendserve.scheduling.batch import Batch
from blendserve.tokens import PromptTokens

END_TIMEOUT_S = 10.0
"""from the end of the pipe to that of the process, which says what it died of"""

_MAIN = "import sys; sys.path[:] = {path!r}; from {module} import serve; serve({fd})"


class _Facts(NamedTuple):
    """What the scheduler must know of an executor."""

    name: str
    block_size: int
    num_blocks: int
    max_model_len: int
    holds_kv: bool


def start_process(
    module: str, process_group: int | None = None
) -> tuple[subprocess.Popen[bytes], Connection]:
    """A process that runs `serve(fd)` of a module, and a pipe to it.

    It is not forked and runs nothing of the caller's main module. `process_group` is that of `subprocess.Popen`.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _MAIN.format(path=sys.path, module=module, fd=theirs.fileno())],
            stdin=subprocess.DEVNULL,
            # What a library prints must not get between results on standard output.
            stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            process_group=process_group,
        )
    return process, Connection(ours.detach())


def how_it_ended(process: subprocess.Popen[bytes]) -> str:
    """What became of a process whose pipe has ended."""
    try:
        code = process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "closed its pipe"
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    hint = ", perhaps because memory ran out" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


class ProcessExecutor:
    """Runs an executor in a child process; implements `engines.batching.Executor`.

    Args:
        open_executor: opens the executor in the child; must be picklable, as a `functools.partial` of a function is.
        cost_model: that of the executor.

    Raises:
        ConfigError: by `open_executor`.
        EngineError: it failed in another way, or the process died meanwhile.
    """

    def __init__(self, open_executor: Callable[[], Executor], cost_model: CostModel) -> None:
        self.cost_model = cost_model
        self._sent: set[int] = set()
        self._results: dict[int, Result] = {}
        self._requests: RequestTable | None = None
        # A process group of its own, so that Ctrl-C in a terminal reaches the job alone.
        self._process, connection = start_process(__name__, process_group=0)
        self._connection: Connection | None = connection
        try:
            facts: _Facts = self._call("open", open_executor)
        except BaseException:
            self.close()
            raise
        self.name = facts.name
        self.block_size = facts.block_size
        self.num_blocks = facts.num_blocks
        self.max_model_len = facts.max_model_len
        self.holds_kv = facts.holds_kv

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def start(self, requests: RequestTable) -> None:
        """See `Executor.start`; the prompts follow with the batches."""
        self._requests = requests
        self._sent.clear()
        self._results.clear()
        self._call("start", replace(requests, tokens=_ArrivedPrompts(requests.prompt_tokens)))

    def execute(self, batch: Batch) -> StepResult:
        """See `Executor.execute`."""
        assert self._requests is not None
        new = [request for request in batch.requests.tolist() if request not in self._sent]
        prompts = {request: self._requests.tokens[request] for request in new}
        step, results = self._call("execute", (batch.with_used_blocks(self.block_size), prompts))
        self._sent.update(new)
        self._results.update(results)
        result: StepResult = step
        return result

    def collect(self, request: int) -> Result:
        """See `Executor.collect`."""
        self._sent.discard(request)
        return self._results.pop(request)

    def close(self) -> None:
        """End the process."""
        if self._process.poll() is None:  # it has nothing to save, nor have those that it started
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _call(self, method: str, argument: Any) -> Any:
        """Have the child do something.

        Raises:
            EngineDiedError: it is gone.
            Exception: what was raised there, or an `EngineError` that describes it.
        """
        if self._connection is None:
            raise EngineDiedError("the engine was closed")
        try:
            self._connection.send_bytes(pickle.dumps((method, argument), pickle.HIGHEST_PROTOCOL))
            is_error, value = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise EngineDiedError(f"the engine's process {how_it_ended(self._process)}") from error
        if is_error:
            raise value
        return value


class _ArrivedPrompts(PromptTokens):
    """Prompts of which all lengths are known, but the tokens only of those that have arrived."""

    def __init__(self, lengths: NDArray[np.int32]) -> None:
        super().__init__(np.empty(0, np.uint32), np.zeros(len(lengths), np.int64), lengths)
        self.arrived: dict[int, NDArray[np.uint32]] = {}

    def __getitem__(self, prompt: int) -> NDArray[np.uint32]:
        return self.arrived[prompt]


def _has_descriptor(stream: Any) -> bool:
    try:
        return bool(stream.fileno() >= 0)
    except (AttributeError, OSError, ValueError):  # none, or one that a test or a notebook put in its place
        return False


def serve(fd: int) -> None:
    """The child: do what comes out of the pipe, until it ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # to stop is the job's decision, and it closes the pipe
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(fd)
    executor: Executor | None = None
    prompts = _ArrivedPrompts(np.empty(0, np.int32))

    def opened(open_executor: Callable[[], Executor]) -> _Facts:
        nonlocal executor
        executor = open_executor()
        return _Facts(
            executor.name,
            executor.block_size,
            executor.num_blocks,
            executor.max_model_len,
            executor.holds_kv,
        )

    def started(requests: RequestTable) -> None:
        nonlocal prompts
        assert executor is not None
        assert isinstance(requests.tokens, _ArrivedPrompts)
        prompts = requests.tokens
        executor.start(requests)

    def executed(argument: tuple[Batch, dict[int, NDArray[np.uint32]]]) -> Any:
        assert executor is not None
        batch, new_prompts = argument
        prompts.arrived |= new_prompts
        step = executor.execute(batch)
        results = {
            request: collected(executor, request) for request in batch.requests[step.finished].tolist()
        }
        for request in results:
            del prompts.arrived[request]
        return step, results

    methods: dict[str, Callable[[Any], Any]] = {"open": opened, "start": started, "execute": executed}
    while True:
        try:
            method, argument = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)  # nothing is left to save, and taking a model apart takes time
        try:
            reply = (False, methods[method](argument))
        except (ConfigError, EngineError) as error:
            reply = (True, error)
        except Exception as error:  # whatever the executor raises goes to the job
            reply = (True, EngineError(f"{type(error).__name__}: {error}"))
        try:
            connection.send_bytes(pickle.dumps(reply, pickle.HIGHEST_PROTOCOL))
        except OSError:
            os._exit(0)
