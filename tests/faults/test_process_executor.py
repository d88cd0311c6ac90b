"""An executor in a process of its own, and how its process may end."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from blendserve.engines.batching import BatchingEngine, Executor
from blendserve.engines.process import ProcessExecutor
from blendserve.engines.simulated import SimulatedExecutor
from blendserve.engines.supervised import SupervisedEngine
from blendserve.errors import ConfigError, EngineDiedError, EngineError, StepError
from blendserve.planner.plan import make_plan
from blendserve.request import Failure, RequestTable, Result
from blendserve.scheduling.policies import make_policy
from blendserve.scheduling.policy import Policy
from blendserve.scheduling.scheduler import SchedulerConfig
from tests.faults import executors
from tests.workload import COST_MODEL, request_table


def jobs_with(bad: dict[int, int], num_requests: int = 40) -> RequestTable:
    """Requests of which those in `bad` begin with the token given there."""
    rng = np.random.default_rng(0)
    prompts = [[bad.get(i, i % 3), *rng.integers(0, 500, 5).tolist()] for i in range(num_requests)]
    return request_table(prompts, max_tokens=[1 + i % 9 for i in range(num_requests)])


def plan(requests: RequestTable) -> Policy:
    return make_policy("dfs", make_plan(requests, COST_MODEL))


def open_engine(open_executor: Callable[[], Executor] = executors.open_faulty) -> BatchingEngine:
    return BatchingEngine(ProcessExecutor(open_executor, COST_MODEL), SchedulerConfig())


def results_of(engine: BatchingEngine | SupervisedEngine, requests: RequestTable) -> dict[int, Result]:
    return {
        request: result for step in engine.run(requests, plan(requests)) for request, result in step.results
    }


def test_results_are_those_of_the_same_executor_here_and_standard_output_is_not_touched(
    capfd: pytest.CaptureFixture[str],
) -> None:
    requests = jobs_with({})
    engine = open_engine()
    first, second = results_of(engine, requests), results_of(engine, requests)
    engine.close()
    here = results_of(BatchingEngine(SimulatedExecutor(COST_MODEL), SchedulerConfig()), requests)
    assert first == second == here
    assert capfd.readouterr().out == ""


def test_what_a_step_raises_there_is_raised_here_and_the_process_goes_on() -> None:
    engine = open_engine()
    requests = jobs_with({7: executors.RAISES})
    with pytest.raises(StepError, match="RuntimeError: bad kernel") as raised:
        results_of(engine, requests)
    assert not isinstance(raised.value, EngineDiedError)
    assert sorted(raised.value.requests) == list(range(40))
    assert len(results_of(engine, jobs_with({}))) == 40
    engine.close()


@pytest.mark.parametrize(
    ("token", "how"), [(executors.KILLED, "killed by SIGKILL"), (executors.EXITS, "exit code 7")]
)
def test_the_end_of_the_process_is_told(token: int, how: str) -> None:
    engine = open_engine()
    with pytest.raises(EngineDiedError, match=how) as raised:
        results_of(engine, jobs_with({7: token}))
    assert len(raised.value.requests) == 40
    with pytest.raises(EngineDiedError):  # and it stays dead
        results_of(engine, jobs_with({}))
    engine.close()


def test_requests_that_raise_kill_or_have_no_result_fail_and_the_others_succeed() -> None:
    bad = {3: executors.RAISES, 17: executors.KILLED, 18: executors.NO_RESULT, 30: executors.EXITS}
    engine = SupervisedEngine(open_engine, plan, sleep=lambda _: None)
    results = results_of(engine, jobs_with(bad))
    engine.close()
    assert sorted(results) == list(range(40))
    failed = {request: result.message for request, result in results.items() if isinstance(result, Failure)}
    assert failed.keys() == bad.keys()
    assert "bad kernel" in failed[3]
    assert "SIGKILL" in failed[17]
    assert "UnicodeDecodeError" in failed[18]
    assert "exit code 7" in failed[30]


@pytest.mark.parametrize(
    ("open_executor", "kind", "message"),
    [
        (executors.open_refused, ConfigError, "--kv-cache-memory 1"),
        (executors.open_broken, EngineError, "ValueError: no such weights"),
        (executors.open_dying, EngineDiedError, "exit code 5"),
    ],
)
def test_an_executor_that_cannot_be_opened(
    open_executor: Callable[[], Executor], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        ProcessExecutor(open_executor, COST_MODEL)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_to_close_ends_the_process() -> None:
    executor = ProcessExecutor(executors.open_faulty, COST_MODEL)
    assert is_running(executor.pid)
    executor.close()
    assert not is_running(executor.pid)
    executor.close()


def test_the_process_ends_when_its_parent_is_killed_within_a_step(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = (
        "import functools\n"
        "from tests.faults.test_process_executor import *\n"
        f"engine = open_engine(functools.partial(executors.open_slow, Path({str(pid_file)!r})))\n"
        "for step in engine.run(requests := jobs_with({}), plan(requests)): print('step', flush=True)\n"
    )
    with executors.python(code) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "step\n"
        process.kill()
    pid = int(pid_file.read_text())
    give_up_s = time.monotonic() + 60
    while is_running(pid) and time.monotonic() < give_up_s:
        time.sleep(0.05)
    assert not is_running(pid)
