"""Tensor-parallel ranks that die, raise or stop, and what is left of them."""

import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blendserve.engines.batching import BatchingEngine
from blendserve.engines.native.executor import TorchExecutor
from blendserve.engines.native.parallel import Leader, open_parallel
from blendserve.errors import EngineDiedError
from blendserve.planner.plan import make_plan
from blendserve.request import RequestTable, Result
from blendserve.scheduling.policies import make_policy
from blendserve.scheduling.scheduler import SchedulerConfig
from tests.faults import executors
from tests.faults.test_engine_failures import NUM_LINES, TIMEOUT_S, CliJob, wait_for_engine
from tests.faults.test_process_executor import is_running
from tests.workload import COST_MODEL, request_table


@pytest.fixture(scope="module")
def model(make_tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = make_tiny_model("llama", tmp_path_factory.mktemp("model") / "tiny", with_tokenizer=True)
    return folder


def a_job(num_requests: int = 6) -> RequestTable:
    return request_table([[5 + i, 6, 7] for i in range(num_requests)], max_tokens=20)


def open_two(open_rank: Callable[..., TorchExecutor], timeout_s: float = 300.0) -> tuple[BatchingEngine, int]:
    """An engine on two ranks, and the process id of the second."""
    executor = open_parallel(open_rank, None, size=2, timeout_s=timeout_s)
    assert isinstance(executor._ranks, Leader)
    return BatchingEngine(executor, SchedulerConfig()), executor._ranks.pids[0]


def run(engine: BatchingEngine, after_first_step: Callable[[], None] = lambda: None) -> dict[int, Result]:
    requests = a_job()
    results: dict[int, Result] = {}
    for number, step in enumerate(engine.run(requests, make_policy("dfs", make_plan(requests, COST_MODEL)))):
        results |= dict(step.results)
        if number == 0:
            after_first_step()
    return results


def wait_until_gone(pids: list[int]) -> None:
    give_up_s = time.monotonic() + TIMEOUT_S
    while any(map(is_running, pids)) and time.monotonic() < give_up_s:
        time.sleep(0.05)
    assert not [pid for pid in pids if is_running(pid)], "processes were left behind"


def test_a_rank_that_is_killed_is_the_death_of_the_engine(model: Path) -> None:
    engine, pid = open_two(functools.partial(executors.open_rank, model))
    assert len(run(engine)) == len(a_job())
    with pytest.raises(EngineDiedError, match="tensor-parallel rank 1 was killed by SIGKILL"):
        run(engine, lambda: os.kill(pid, signal.SIGKILL))
    with pytest.raises(EngineDiedError, match="killed"):  # and it stays dead
        run(engine)
    engine.close()


def test_a_rank_that_raises_is_the_death_of_the_engine(model: Path) -> None:
    engine, pid = open_two(functools.partial(executors.open_rank, model, fails_at_step=3))
    with pytest.raises(EngineDiedError, match="tensor-parallel rank 1 failed: RuntimeError: bad kernel"):
        run(engine)
    wait_until_gone([pid])
    engine.close()


def test_a_rank_that_stops_is_waited_for_no_longer_than_the_timeout(model: Path) -> None:
    engine, pid = open_two(functools.partial(executors.open_rank, model), timeout_s=15.0)
    with pytest.raises(EngineDiedError, match="waited 15 s for each other"):
        run(engine, lambda: os.kill(pid, signal.SIGSTOP))
    assert is_running(pid)
    engine.close()
    assert not is_running(pid)
    engine.close()


def test_a_rank_that_cannot_be_opened(model: Path) -> None:
    with pytest.raises(EngineDiedError, match="tensor-parallel rank 1 ended with exit code 5"):
        open_two(functools.partial(executors.open_rank, model, exits=True))


def test_ranks_end_when_the_first_is_killed_within_a_step(model: Path) -> None:
    code = (
        "from tests.faults.test_tensor_parallel import *\n"
        f"engine, pid = open_two(functools.partial(executors.open_rank, Path({str(model)!r}), step_s=0.2))\n"
        "run(engine, lambda: print(pid, flush=True))\n"
    )
    with executors.python(code) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert is_running(pid)
        process.kill()
    wait_until_gone([pid])


# -------- the command --------

TWO_RANKS = ("--tensor-parallel-size", "2")


def ranks_of(engine_pid: int) -> list[int]:
    """Process ids of the followers that an engine's process has started."""
    tasks = Path(f"/proc/{engine_pid}/task").iterdir()
    children = [child for task in tasks for child in (task / "children").read_text().split()]
    return [int(pid) for pid in children if b"native.parallel" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.fixture(scope="module")
def unbroken(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Texts of a job on one rank that nothing happens to."""
    job = CliJob(model, tmp_path_factory.mktemp("unbroken"))
    done = job.run()
    assert done.returncode == 0, done.stderr
    return job.results()


def test_a_job_survives_the_death_of_a_rank(model: Path, unbroken: dict[str, str], tmp_path: Path) -> None:
    job = CliJob(model, tmp_path)
    process = job.start(*TWO_RANKS)
    job.wait_for_results(process, 5)
    engine = wait_for_engine(process, None)
    [rank] = ranks_of(engine)
    os.kill(rank, signal.SIGKILL)
    job.wait_for_results(process, 10)
    second_engine = wait_for_engine(process, engine)
    [second_rank] = ranks_of(second_engine)
    _, stderr = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, stderr
    assert "tensor-parallel rank 1 was killed by SIGKILL" in stderr
    assert "1 engine restart" in stderr
    assert job.results() == unbroken
    assert len(unbroken) == NUM_LINES
    assert job.errors.read_text() == ""
    wait_until_gone([engine, rank, second_engine, second_rank])


def test_a_killed_job_leaves_no_ranks(model: Path, unbroken: dict[str, str], tmp_path: Path) -> None:
    job = CliJob(model, tmp_path)
    process = job.start(*TWO_RANKS)
    job.wait_for_results(process, 3)
    engine = wait_for_engine(process, None)
    ranks = ranks_of(engine)
    process.kill()
    process.communicate(timeout=TIMEOUT_S)
    assert len(ranks) == 1
    wait_until_gone([engine, *ranks])
    results = job.results()
    assert 3 <= len(results) < NUM_LINES
    assert results.items() <= unbroken.items()
