"""What vLLM makes of our requests, and what becomes of them when it or the job is killed."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from blendserve.engines import Engine, EngineConfig
from blendserve.engines.batching import BatchingEngine
from blendserve.engines.supervised import SupervisedEngine
from blendserve.errors import ConfigError
from blendserve.planner.plan import make_plan
from blendserve.request import Completion, Failure, RequestTable, Result, SamplingParams
from blendserve.scheduling.policies import make_policy
from blendserve.scheduling.scheduler import SchedulerConfig
from blendserve.tokenizer import Tokenizer
from tests.contract.conftest import COST_MODEL
from tests.workload import request_table

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

TIMEOUT_S = 600.0
"""for what takes a minute on an idle machine"""


@pytest.fixture
def engine(roomy_vllm: Any) -> Any:
    return roomy_vllm


def run(engine: Engine, requests: RequestTable, policy: str = "fcfs") -> dict[int, Result]:
    results: dict[int, Result] = {}
    for step in engine.run(requests, make_policy(policy, make_plan(requests, engine.cost_model))):
        for request, result in step.results:
            assert request not in results
            results[request] = result
    return results


def prompts(num_requests: int, length: int = 12) -> list[list[int]]:
    return np.random.default_rng(1).integers(1000, 40_000, (num_requests, length)).tolist()


def with_params(requests: RequestTable, *params: SamplingParams) -> RequestTable:
    requests.params = params
    requests.params_index = np.arange(len(requests), dtype=np.int32)
    return requests


def extra(**parameters: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, extra=orjson.dumps(parameters))


def test_capacity_is_that_of_the_engine(engine: Any) -> None:
    assert engine.kv_capacity_tokens == 64 * 32  # one of the 65 blocks stands for none
    assert engine.max_model_len == 1024
    limits = engine.cost_model.hardware
    assert (limits.block_size, limits.max_num_seqs, limits.max_num_batched_tokens) == (32, 4, 64)


@pytest.mark.parametrize("policy", ["fcfs", "longest-first"])
def test_vllm_runs_requests_in_the_order_of_the_policy(
    engine: Any, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = request_table(prompts(16), max_tokens=[1 + (5 * i) % 13 for i in range(16)])
    requests.declared_tokens = requests.max_tokens.copy()
    requests.params = [SamplingParams(temperature=0.0, ignore_eos=True)]
    sent: list[int] = []
    scheduled_s: dict[str, float] = {}
    add_request, step = engine._engine.add_request, engine._engine.step

    def noted_add(request_id: str, prompt: Any, params: Any) -> Any:
        sent.append(int(params.max_tokens))
        return add_request(request_id, prompt, params)

    def noted_step() -> Any:
        outputs = step()
        scheduled_s.update({output.request_id: output.metrics.scheduled_ts for output in outputs})
        return outputs

    monkeypatch.setattr(engine._engine, "add_request", noted_add)
    monkeypatch.setattr(engine._engine, "step", noted_step)
    assert len(run(engine, requests, policy)) == 16
    lengths = requests.max_tokens.tolist()
    assert sent == (lengths if policy == "fcfs" else sorted(lengths, reverse=True))
    in_order_of_sending = [scheduled_s[request_id] for request_id in sorted(scheduled_s, key=int)]
    assert len(in_order_of_sending) == 16
    assert in_order_of_sending == sorted(in_order_of_sending)


def test_a_shared_prefix_is_computed_once(engine: Any) -> None:
    prefix = prompts(1, 70)[0]
    requests = request_table([prefix + tail for tail in prompts(8, 5)], max_tokens=2)
    results = run(engine, requests)
    cached = sorted(result.num_cached_tokens for result in results.values())
    assert cached[0] == 0
    assert cached[-1] == 64  # whole blocks of 32


def test_a_request_that_vllm_refuses_fails_alone(engine: Any) -> None:
    requests = with_params(
        request_table([*prompts(4), [5] * 1100], max_tokens=3),
        extra(),
        extra(logit_bias={"99999999": 1.0}),
        extra(allowed_token_ids=[]),
        extra(frequency_penalty=1.0),
        extra(),
    )
    results = run(engine, requests)
    failures = {request: result for request, result in results.items() if isinstance(result, Failure)}
    assert sorted(results) == [0, 1, 2, 3, 4]
    assert sorted(failures) == [1, 2, 4]
    assert {(failure.code, failure.status_code) for failure in failures.values()} == {
        ("invalid_request", 400)
    }
    assert "99999999" in failures[1].message
    assert "maximum model length" in failures[4].message


def test_what_only_vllm_can_do_is_done(engine: Any, vllm_tokenizer: Tokenizer) -> None:
    allowed = [1234, 2345]
    # As in vLLM's server, a constraint begins where reasoning has ended, in completions, too.
    thought = vllm_tokenizer.encode("</think>", add_special_tokens=False)
    requests = with_params(
        request_table([prompt + thought for prompt in prompts(4)], max_tokens=6),
        extra(structured_outputs={"choice": ["yes", "no"]}),
        extra(allowed_token_ids=allowed),
        extra(logit_bias={"4321": 100.0}),
        extra(structured_outputs={"regex": "[0-9]{4}"}),
    )
    choice, only_allowed, biased, regex = (result for _, result in sorted(run(engine, requests).items()))
    assert isinstance(choice, Completion)
    assert choice.text in ("yes", "no")
    assert set(only_allowed.token_ids) <= set(allowed)
    assert biased.token_ids == [4321] * 6
    assert isinstance(regex, Completion)
    assert regex.text.isdecimal()


RULES: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.7, "presence_penalty": 1.5},
    {"frequency_penalty": 1.8},
    {"presence_penalty": -1.0, "frequency_penalty": -0.5},
    {"logit_bias": {"4321": 4.0, "777": 3.5}, "frequency_penalty": 0.9},
    {"allowed_token_ids": [*range(1000, 1100)], "repetition_penalty": 1.3},
    {"allowed_token_ids": [*range(260, 330)], "bad_words": ["e", "the", "ing"]},
]


def test_vllm_and_the_native_engine_give_the_same_tokens(
    engine: Any, vllm_model: Path, vllm_tokenizer: Tokenizer
) -> None:
    """Under penalties, biases, allowed tokens and bad words."""
    from blendserve.engines.native.executor import TorchExecutor

    params = [extra(**rules) for rules in RULES]
    requests = with_params(request_table(prompts(len(params)), max_tokens=24), *params)
    executor = TorchExecutor(vllm_model, vllm_tokenizer, cost_model=COST_MODEL, num_blocks=64)
    ours, theirs = (run(some, requests) for some in (BatchingEngine(executor, SchedulerConfig()), engine))
    for request in range(len(params)):
        mine, other = ours[request], theirs[request]
        assert isinstance(mine, Completion), mine
        assert isinstance(other, Completion), other
        assert mine.token_ids == other.token_ids, params[request]
    assert len({tuple(result.token_ids) for result in ours.values() if isinstance(result, Completion)}) == 8


def test_logprobs_and_stop_strings(engine: Any) -> None:
    prompt = prompts(1)[0]
    plain = run(engine, request_table([prompt], max_tokens=8))[0]
    assert isinstance(plain, Completion)
    stop = plain.text[3:5]
    requests = with_params(
        request_table([prompt] * 2, max_tokens=8),
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(temperature=0.0, stop=(stop,)),
    )
    with_logprobs, stopped = (result for _, result in sorted(run(engine, requests).items()))
    assert isinstance(with_logprobs, Completion)
    assert with_logprobs.logprobs is not None
    assert [token.token_id for token in with_logprobs.logprobs] == with_logprobs.token_ids
    for token in with_logprobs.logprobs:  # greedy: the likeliest is taken
        assert len(token.top) == 2
        assert token.top[0] == (token.token_id, token.logprob)
        assert token.top[0][1] >= token.top[1][1]
    assert isinstance(stopped, Completion)
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert stop not in stopped.text


def test_drawn_tokens_of_a_prompt_that_is_computed_in_parts(engine: Any) -> None:
    requests = request_table(prompts(2, length=150), max_tokens=4)
    requests.params = (SamplingParams(temperature=1.0),)
    requests.seeds = np.array([1, 2], dtype=np.uint64)
    with pytest.warns(UserWarning, match="without seeds"):
        results = run(engine, requests)
    assert [len(result.token_ids) for result in results.values()] == [4, 4]


def test_seeds(open_vllm: Any) -> None:
    engine = open_vllm(max_num_batched_tokens=256, engine_args={"enable_chunked_prefill": False})
    try:
        requests = request_table(prompts(1) * 8, max_tokens=8)
        requests.params = (SamplingParams(temperature=2.0),)
        requests.seeds = np.array([2**64 - 3, 2**64 - 3, *range(6)], dtype=np.uint64)
        one, same, *others = (result.token_ids for _, result in sorted(run(engine, requests).items()))
    finally:
        engine.close()
    assert one == same
    assert all(one != other for other in others)


def test_stop_admitting_lets_what_runs_end(engine: Any) -> None:
    requests = request_table(prompts(30), max_tokens=5)
    steps = engine.run(requests, make_policy("fcfs", make_plan(requests, engine.cost_model)))
    results = list(next(steps).results)
    engine.stop_admitting()
    for step in steps:
        results += step.results
    assert 1 <= len(results) < 30
    assert len(run(engine, request_table(prompts(2), max_tokens=2))) == 2


def test_wrong_engine_arguments_are_named() -> None:
    pytest.importorskip("vllm")
    with pytest.raises(ConfigError, match="did you mean tensor_parallel_size"):
        EngineConfig(engine="vllm", engine_args={"tensor_paralel_size": 2}).check()
    with pytest.raises(ConfigError, match="use --policy instead"):
        EngineConfig(engine="vllm", engine_args={"scheduling_policy": "priority"}).check()


def test_a_killed_engine_core_is_opened_anew_and_close_frees_everything(
    open_vllm: Callable[[], Any],
) -> None:
    psutil = pytest.importorskip("psutil")
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    requests = request_table(prompts(24), max_tokens=20)
    events: list[str] = []

    def make(table: RequestTable) -> Any:
        return make_policy("fcfs", make_plan(table, COST_MODEL))

    supervised = SupervisedEngine(open_vllm, make, on_event=events.append)
    results: dict[int, Result] = {}
    is_killed = False
    num_restarts = 0
    with closing(supervised):
        for step in supervised.run(requests, make(requests)):
            results.update(step.results)
            num_restarts += step.stats.num_engine_restarts
            if results and not is_killed:
                core = next(p for p in multiprocessing.active_children() if p.pid not in before)
                assert core.pid is not None
                os.kill(core.pid, signal.SIGKILL)
                is_killed = True
    assert sorted(results) == list(range(24))
    assert all(isinstance(result, Completion) for result in results.values())
    assert num_restarts == 1
    assert "SIGKILL" in events[0]
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert [child.cmdline() for child in left if "resource_tracker" not in " ".join(child.cmdline())] == []


def test_a_killed_job_takes_vllm_along_and_goes_on_when_run_again(vllm_model: Path, tmp_path: Path) -> None:
    psutil = pytest.importorskip("psutil")
    lines = [
        {
            "custom_id": f"r{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"Number {i}", "max_tokens": 40, "temperature": 0, "presence_penalty": 0.1},
        }
        for i in range(16)
    ]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\n".join(map(orjson.dumps, lines)))
    command = [sys.executable, "-m", "blendserve.cli", "run", str(source), "-o", str(output)]
    command += ["--model", str(vllm_model), "--engine", "vllm", "--kv-cache-memory", "8MiB", "--no-report"]
    command += ["--max-num-seqs", "2", "--dtype", "float32", "--engine-arg", "enforce-eager=true"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as job:
        deadline = time.monotonic() + TIMEOUT_S
        while not (output.exists() and output.read_bytes().count(b"\n") >= 3):
            assert job.poll() is None, job.communicate()[1].decode()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        started = psutil.Process(job.pid).children(recursive=True)
        job.kill()
    _, alive = psutil.wait_procs(started, timeout=60)
    assert alive == []
    num_before = output.read_bytes().count(b"\n")
    assert num_before < 16
    again = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert again.returncode == 0, again.stderr
    assert again.stdout == ""
    ids = [orjson.loads(line)["custom_id"] for line in output.read_bytes().splitlines()]
    assert sorted(ids) == sorted(f"r{i}" for i in range(16))
