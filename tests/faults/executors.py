"""Executors that fail on purpose, in a module that a child process can import."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from blendserve.engines.batching import StepResult
from blendserve.engines.simulated import SimulatedExecutor
from blendserve.errors import ConfigError
from blendserve.request import RequestTable, Result
from blendserve.scheduling.batch import Batch
from tests.workload import COST_MODEL

RAISES, KILLED, EXITS, NO_RESULT = 901, 902, 903, 904
"""first prompt tokens of requests on which a `FaultyExecutor` fails"""


def python(code: str) -> subprocess.Popen[str]:
    """A process that runs this code, which can import the tests; its standard output can be read."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(root), *sys.path))}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)


class FaultyExecutor(SimulatedExecutor):
    """Fails in every step that has one of the bad requests."""

    def start(self, requests: RequestTable) -> None:
        super().start(requests)
        self._requests = requests

    def first_token(self, request: int) -> int:
        return int(self._requests.tokens[request][0])

    def execute(self, batch: Batch) -> StepResult:
        first_tokens = {self.first_token(request) for request in batch.requests.tolist()}
        if RAISES in first_tokens:
            raise RuntimeError("bad kernel")
        if KILLED in first_tokens:
            os.kill(os.getpid(), signal.SIGKILL)
        if EXITS in first_tokens:
            os._exit(7)
        return super().execute(batch)

    def collect(self, request: int) -> Result:
        if self.first_token(request) == NO_RESULT:
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "planted")
        return super().collect(request)


def open_faulty() -> FaultyExecutor:
    print("a library that prints to standard output")
    return FaultyExecutor(COST_MODEL)


def open_refused() -> FaultyExecutor:
    raise ConfigError("--kv-cache-memory 1 is too little")


def open_broken() -> FaultyExecutor:
    raise ValueError("no such weights")


def open_dying() -> FaultyExecutor:
    sys.exit(5)


class SlowExecutor(FaultyExecutor):
    """Notes its process id, then takes a while for each step."""

    def execute(self, batch: Batch) -> StepResult:
        time.sleep(0.05)
        return super().execute(batch)


def open_slow(pid_file: Path) -> SlowExecutor:
    pid_file.write_text(str(os.getpid()))
    return SlowExecutor(COST_MODEL)


def open_rank(
    folder: Path,
    *,
    tokenizer: Any,
    ranks: Any,
    fails_at_step: int | None = None,
    exits: bool = False,
    step_s: float = 0.0,
) -> Any:
    """One of two tensor-parallel ranks, of which the second fails."""
    from blendserve.engines.native.executor import TorchExecutor

    if exits and ranks.rank:
        os._exit(5)
    executor = TorchExecutor(
        folder, tokenizer, cost_model=COST_MODEL, num_blocks=64, block_size=8, num_threads=1, ranks=ranks
    )
    follow, num_steps = executor.follow, 0

    def faulty(batch: Batch, scored: Any) -> None:
        nonlocal num_steps
        num_steps += 1
        time.sleep(step_s)
        if num_steps == fails_at_step:
            raise RuntimeError("bad kernel")
        follow(batch, scored)

    executor.follow = faulty
    return executor
