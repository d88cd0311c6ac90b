"""What every engine promises to the job that drives it."""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from blendserve.cost_model import CostModel, Partition
from blendserve.engines import Engine
from blendserve.engines.batching import BatchingEngine
from blendserve.engines.native.executor import TorchExecutor
from blendserve.engines.native.parallel import open_parallel
from blendserve.engines.openai_server import OpenAIServer
from blendserve.engines.process import ProcessExecutor
from blendserve.engines.retry import Backoff
from blendserve.engines.simulated import SimulatedExecutor
from blendserve.errors import ConfigError
from blendserve.planner.plan import make_plan
from blendserve.request import Completion, RawRequest, RequestTable, Result
from blendserve.scheduling.policies import POLICIES, make_policy
from blendserve.scheduling.scheduler import SchedulerConfig
from tests.contract.conftest import COST_MODEL
from tests.fake_openai import FakeOpenAI, running
from tests.recording_lanes import RecordingLanes
from tests.workload import TINY, request_table

PASSING_FAULTS = [
    429,
    "half",
    500,
    "late-headers",
    "cut",
    "html",
    503,
    "not-json",
    "retry-after",
    "reset",
    408,
]
OpenEngine = Callable[..., Engine]
MakeJob = Callable[..., RequestTable]
OVERLAPPING = CostModel(TINY, replace(COST_MODEL.hardware, partitions=(Partition(48, 1.0, 1.0),)))
"""a device on which any step that decodes is through sooner in halves"""


@pytest.fixture(scope="module")
def checkpoint(make_tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = make_tiny_model("llama", tmp_path_factory.mktemp("contract") / "tiny")
    return folder


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[tuple[str, int, int], Any]]:
    """Executors of several processes by what they are and their sizes; starting one takes seconds."""
    opened: dict[tuple[str, int, int], Any] = {}
    yield opened
    for executor in opened.values():
        executor.close()


@pytest.fixture(
    params=[
        "simulated",
        "native-c",
        "native-torch",
        "late-c",
        "overlap-torch",
        "process-c",
        "tp2-c",
        "openai",
        "openai-faulty",
        "openai-pool",
        pytest.param("sglang", marks=pytest.mark.sglang),
        pytest.param("vllm-serve", marks=pytest.mark.vllm),
        pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.filterwarnings("default")]),
    ]
)
def open_engine(
    request: pytest.FixtureRequest,
    checkpoint: Path,
    processes: dict[tuple[str, int, int], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[OpenEngine]:
    opened: list[Engine] = []
    servers = ExitStack()
    monkeypatch.setenv("NO_PROXY", "*")

    def make(num_blocks: int = 64, block_size: int = 8, **limits: int) -> Engine:
        if request.param == "vllm":
            is_tight = num_blocks * block_size <= 128
            return request.getfixturevalue("tight_vllm" if is_tight else "roomy_vllm")
        if forwards(request.param):
            kind = request.param
            if kind in ("sglang", "vllm-serve"):
                urls = [request.getfixturevalue(kind.replace("-", "_") + "_url")]
            else:
                first = PASSING_FAULTS if kind == "openai-faulty" else ()
                fakes = [FakeOpenAI(first=first) for _ in range(2 if kind == "openai-pool" else 1)]
                urls = [servers.enter_context(running(fake)).base_url for fake in fakes]
            server = OpenAIServer(
                urls,
                COST_MODEL,
                max_concurrency=limits.get("max_num_seqs", 8),
                request_timeout_s=600.0,
                kv_capacity_tokens=num_blocks * block_size,
                max_model_len=TINY.max_model_len,
                backoff=Backoff(base_s=0.01, max_s=0.05, seed=0),
                flushes_cache=kind == "sglang",
            )
            opened.append(server)
            return server
        if request.param == "simulated":
            executor: Any = SimulatedExecutor(COST_MODEL)
            executor.block_size, executor.num_blocks = block_size, num_blocks
        else:
            place, backend = request.param.split("-")
            open_executor = functools.partial(
                TorchExecutor,
                checkpoint,
                cost_model=COST_MODEL,
                num_blocks=num_blocks,
                block_size=block_size,
                attention_backend=backend,
                late_results=place in {"late", "overlap"},
            )
            if place == "overlap":
                lanes = {
                    partition: RecordingLanes("attention") for partition in OVERLAPPING.hardware.partitions
                }
                open_executor = functools.partial(open_executor, cost_model=OVERLAPPING, lanes=lanes)
            if place in ("process", "tp2"):
                key = (place, num_blocks, block_size)
                if key not in processes:
                    processes[key] = (
                        ProcessExecutor(functools.partial(open_executor, None), COST_MODEL)
                        if place == "process"
                        else open_parallel(functools.partial(open_executor, num_threads=1), None, size=2)
                    )
                executor = processes[key]
            else:
                executor = open_executor(None)
        engine = BatchingEngine(
            executor, SchedulerConfig(**{"max_num_batched_tokens": 32, "max_num_seqs": 8} | limits)
        )
        if request.param not in ("process-c", "tp2-c"):
            opened.append(engine)
        return engine

    yield make
    for engine in opened:
        engine.close()
    servers.close()


@pytest.fixture
def batching(request: pytest.FixtureRequest) -> None:
    """For what is promised only where our own scheduler batches."""
    if (kind := request.node.callspec.params["open_engine"]) == "vllm" or forwards(kind):
        pytest.skip("it is the server or vLLM that shares prefixes and refuses what can never fit")


@pytest.fixture
def a_job(request: pytest.FixtureRequest) -> MakeJob:
    """A function that makes a job: three groups with a shared prefix, lengths from 1 to 30."""

    def make(num_requests: int = 20) -> RequestTable:
        rng = np.random.default_rng(0)
        prefixes = [rng.integers(3, 500, size).tolist() for size in (5, 24, 40)]
        prompts = [prefixes[i % 3] + rng.integers(3, 500, 1 + i % 7).tolist() for i in range(num_requests)]
        requests = request_table(prompts, max_tokens=[1 + (7 * i) % 30 for i in range(num_requests)])
        if forwards(request.node.callspec.params["open_engine"]):  # as they are written
            whole = {"model": "tiny", "temperature": 0.0, "ignore_eos": True}
            requests.raw = [
                RawRequest(
                    "/v1/completions",
                    orjson.dumps({**whole, "prompt": prompt, "max_tokens": int(max_tokens)}),
                )
                for prompt, max_tokens in zip(prompts, requests.max_tokens, strict=True)
            ]
        return requests

    return make


def run(engine: Engine, requests: RequestTable, policy: str = "dual-scan") -> dict[int, Result]:
    plan = make_plan(requests, engine.cost_model)
    results: dict[int, Result] = {}
    for step in engine.run(requests, make_policy(policy, plan)):
        for request, result in step.results:
            assert request not in results, "two results for one request"
            results[request] = result
    return results


def without_cached_tokens(results: dict[int, Result]) -> dict[int, Any]:
    """Of an answer what the request decides; a server numbers its answers, and its length estimates learn."""
    return {
        request: replace(
            result,
            num_cached_tokens=0,
            output_tokens_est=0,
            body=None if result.body is None else {"texts": texts(result)},
        )
        if isinstance(result, Completion)
        else result
        for request, result in results.items()
    }


def texts(result: Completion) -> list[str]:
    """That a server answered with."""
    return [] if result.body is None else [choice["text"] for choice in result.body["choices"]]


def forwards(kind: str) -> bool:
    return kind.startswith("openai") or kind in ("sglang", "vllm-serve")


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_has_one_result(open_engine: OpenEngine, policy: str, a_job: MakeJob) -> None:
    requests = a_job()
    results = run(open_engine(), requests, policy)
    assert sorted(results) == list(range(len(requests)))
    for request, result in results.items():
        assert isinstance(result, Completion)
        assert 1 <= result.num_output_tokens <= requests.max_tokens[request]
        assert result.finish_reason == "length"
        assert result.num_prompt_tokens == requests.prompt_tokens[request]
        assert 0 <= result.num_cached_tokens < result.num_prompt_tokens


def test_step_facts_add_up(open_engine: OpenEngine, a_job: MakeJob) -> None:
    requests = a_job()
    engine = open_engine()
    steps = list(engine.run(requests, make_policy("dfs", make_plan(requests, engine.cost_model))))
    outputs = [result for step in steps for _, result in step.results if isinstance(result, Completion)]
    generated = sum(output.num_output_tokens for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    prefilled = sum(step.stats.num_prefill_tokens for step in steps)
    decoded = sum(step.stats.num_decode_tokens for step in steps)
    assert prefilled == requests.tokens.num_tokens - cached
    assert decoded == generated - len(outputs)
    assert all(step.stats.duration_s > 0 for step in steps)
    assert all(0 <= step.stats.kv_usage_ratio <= 1 for step in steps)
    assert steps[-1].stats.num_running == steps[-1].stats.num_waiting == 0


@pytest.mark.usefixtures("batching")
def test_shared_prefixes_are_computed_once(open_engine: OpenEngine, a_job: MakeJob) -> None:
    requests = a_job()
    results = run(open_engine(num_blocks=400, max_num_batched_tokens=400, max_num_seqs=20), requests, "dfs")
    by_group = [[results[i] for i in range(group, 20, 3)] for group in range(3)]
    for group, shared in zip(by_group, (0, 24, 40), strict=True):
        cached = sorted(result.num_cached_tokens for result in group if isinstance(result, Completion))
        assert cached == [0] + [shared] * (len(group) - 1)


def test_a_pool_with_room_for_little_more_than_one_request(open_engine: OpenEngine, a_job: MakeJob) -> None:
    requests = a_job()
    longest = int((requests.prompt_tokens + requests.max_tokens).max())
    results = run(open_engine(num_blocks=-(-longest // 8) + 1), requests)
    assert sorted(results) == list(range(len(requests)))


def test_outputs_do_not_depend_on_pool_chunk_or_policy(open_engine: OpenEngine, a_job: MakeJob) -> None:
    """In float32 on a tiny model; see docs/architecture.md for what real models do."""
    requests = a_job()
    plain = run(open_engine(num_blocks=400, max_num_batched_tokens=400, max_num_seqs=20), requests, "fcfs")
    tight = run(open_engine(num_blocks=12, max_num_batched_tokens=9, max_num_seqs=5), requests, "random")
    for request, result in plain.items():
        other = tight[request]
        assert isinstance(result, Completion)
        assert isinstance(other, Completion)
        assert (result.token_ids, texts(result)) == (other.token_ids, texts(other))


def test_an_engine_runs_several_jobs(open_engine: OpenEngine, a_job: MakeJob) -> None:
    engine = open_engine()
    first, second = run(engine, a_job(6)), run(engine, a_job(6))
    if engine.name in ("vllm", "openai"):  # it keeps its prefix cache
        first, second = without_cached_tokens(first), without_cached_tokens(second)
    assert first == second


def test_stopping_to_iterate_stops_the_engine(open_engine: OpenEngine, a_job: MakeJob) -> None:
    requests = a_job()
    engine = open_engine()
    steps = engine.run(requests, make_policy("fcfs", make_plan(requests, engine.cost_model)))
    next(steps)
    steps.close()
    assert len(run(engine, requests)) == len(requests)


@pytest.mark.usefixtures("batching")
def test_a_request_that_can_never_fit_is_refused_before_anything_runs(open_engine: OpenEngine) -> None:
    requests = request_table([[5] * 100], max_tokens=100)
    with pytest.raises(ConfigError, match="KV"):
        run(open_engine(num_blocks=10), requests)


def test_no_requests(open_engine: OpenEngine) -> None:
    assert run(open_engine(), request_table([])) == {}
