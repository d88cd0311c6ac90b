"""What becomes of a request when the server misbehaves."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import orjson
import pytest

from blendserve.cost_model import CostModel, HardwareSpec
from blendserve.engines.openai_api import (
    Answer,
    ConcurrencyLimit,
    ServerFacts,
    failure_of,
    llamacpp_facts,
    retry_after_s,
    sglang_facts,
    vllm_facts,
)
from blendserve.engines.openai_server import OpenAIServer
from blendserve.engines.retry import Backoff
from blendserve.errors import ConfigError, EngineError
from blendserve.planner.plan import make_plan
from blendserve.request import Completion, Failure, RawRequest, RequestTable, Result
from blendserve.scheduling.policies import make_policy
from tests.fake_openai import FakeOpenAI, running
from tests.workload import TINY, request_table

COST_MODEL = CostModel(TINY, HardwareSpec.load("cpu-2core-avx2"))
QUICK = Backoff(base_s=0.01, max_s=0.02, max_attempts=3, seed=0)

OpenServer = Callable[..., OpenAIServer]


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")


@pytest.fixture
def open_server() -> Iterator[OpenServer]:
    with ExitStack() as stack:

        def make(base_url: str, **options: Any) -> OpenAIServer:
            settings = {
                "api_key_env": None,
                "max_concurrency": 4,
                "request_timeout_s": 60.0,
                "kv_capacity_tokens": 10_000,
                "max_model_len": 1000,
                "backoff": QUICK,
            }
            engine = OpenAIServer([base_url], COST_MODEL, **(settings | options))
            stack.callback(engine.close)
            return engine

        yield make


def a_job(users: Sequence[str], **body: Any) -> RequestTable:
    """A chat request for each name."""
    requests = request_table([[5, 6, 7 + index] for index in range(len(users))], max_tokens=4)
    requests.raw = [
        RawRequest(
            "/v1/chat/completions",
            orjson.dumps(
                {"messages": [{"role": "user", "content": "hi"}], "user": user, "max_tokens": 4} | body
            ),
        )
        for user in users
    ]
    return requests


def run(engine: OpenAIServer, requests: RequestTable, policy: str = "fcfs") -> dict[int, Result]:
    results: dict[int, Result] = {}
    plan = make_plan(requests, engine.cost_model)
    for step in engine.run(requests, make_policy(policy, plan)):
        for request, result in step.results:
            assert request not in results, "two results for one request"
            results[request] = result
    return results


PASSING = [
    408,
    409,
    429,
    500,
    502,
    503,
    504,
    "half",
    "cut",
    "html",
    "not-json",
    "no-choices",
    "reset",
    "retry-after",
]


def test_headers_that_come_late_are_waited_for(open_server: OpenServer) -> None:
    with running(FakeOpenAI({"late": ["late-headers"]})) as server:
        results = run(open_server(server.base_url), a_job(["late", "good"]))
    assert all(isinstance(result, Completion) for result in results.values())
    assert server.attempts == {"late": 1, "good": 1}


def test_faults_that_pass_cost_attempts_and_nothing_else(open_server: OpenServer) -> None:
    users = [str(fault) for fault in PASSING] + ["good-1", "good-2"]
    faults: dict[str, list[int | str]] = {str(fault): [fault, fault] for fault in PASSING}
    with running(FakeOpenAI(faults)) as server:
        results = run(open_server(server.base_url), a_job(users))
    assert sorted(results) == list(range(len(users)))
    for result in results.values():
        assert isinstance(result, Completion), result
        assert result.body is not None
        assert result.body["of_the_servers_own"] == {"x": [1.5, None]}
        assert (result.num_output_tokens, result.num_prompt_tokens, result.num_cached_tokens) == (4, 8, 4)
    assert server.attempts == dict.fromkeys(users[:-2], 3) | {"good-1": 1, "good-2": 1}


@pytest.mark.parametrize("fault", [500, "cut", "half", "no-choices"])
def test_a_fault_that_stays_fails_its_own_request_only(open_server: OpenServer, fault: int | str) -> None:
    with running(FakeOpenAI({"bad": [fault] * 99})) as server:
        results = run(open_server(server.base_url), a_job(["good-1", "bad", "good-2"]))
    bad = results.pop(1)
    assert isinstance(bad, Failure)
    assert bad.status_code >= 500
    assert "3 attempts" in bad.message
    assert server.attempts["bad"] == 3
    assert all(isinstance(result, Completion) for result in results.values())


@pytest.mark.parametrize("status", [400, 404, 413, 422])
def test_a_refusal_is_final_and_keeps_the_words_of_the_server(open_server: OpenServer, status: int) -> None:
    with running(FakeOpenAI({"bad": [status]})) as server:
        results = run(open_server(server.base_url), a_job(["bad", "good"]))
    bad = results[0]
    assert isinstance(bad, Failure)
    code = "context_length_exceeded" if status == 400 else f"code_{status}"
    assert (bad.status_code, bad.code, bad.message, bad.param) == (status, code, f"this is a {status}", "p")
    assert server.attempts["bad"] == 1
    assert isinstance(results[1], Completion)


def test_retry_after_is_waited_for(open_server: OpenServer) -> None:
    patient = Backoff(base_s=0.0, max_s=60.0, max_attempts=3)
    with running(FakeOpenAI({"busy": ["retry-after"]}, retry_after="1")) as server:
        engine = open_server(server.base_url, backoff=patient)
        started_s = time.monotonic()
        results = run(engine, a_job(["busy"]))
    assert isinstance(results[0], Completion)
    assert time.monotonic() - started_s >= 1.0


@pytest.mark.parametrize(
    ("header", "low", "high"),
    [
        ("7", 7, 7),
        ("0.5", 0.5, 0.5),
        (format_datetime(datetime.now(UTC) + timedelta(hours=1)), 1800, 3600),
        (format_datetime(datetime.now(UTC) - timedelta(hours=1)), 0, 0),
    ],
    ids=["whole", "fraction", "in an hour", "an hour ago"],
)
def test_retry_after_is_a_number_of_seconds_or_a_date(header: str, low: float, high: float) -> None:
    seconds = retry_after_s(Answer(429, {"retry-after": header}, b""))
    assert seconds is not None
    assert low <= seconds <= high


@pytest.mark.parametrize("header", ["nan", "inf", "-1", "soon", ""])
def test_a_retry_after_that_makes_no_sense_is_ignored(header: str) -> None:
    assert retry_after_s(Answer(429, {"retry-after": header}, b"")) is None


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (b'{"error": {"message": "m", "type": "t", "code": null}}', "t", "m"),
        (
            b'{"object": "error", "message": "m", "type": "BadRequestError", "code": 400}',
            "BadRequestError",
            "m",
        ),
        (b'{"error": "m"}', "http_400", "m"),
        (b'{"detail": "m"}', "http_400", "m"),
        (b"[1]", "http_400", "The server answered with status 400: [1]"),
        (b"<html>\xff", "http_400", "The server answered with status 400: <html>\ufffd"),
        (b"", "http_400", "The server answered with status 400"),
    ],
)
def test_errors_of_every_shape_are_read(content: bytes, code: str, message: str) -> None:
    failure = failure_of(Answer(400, {}, content))
    assert (failure.code, failure.message, failure.status_code) == (code, message, 400)


def test_a_rate_limit_is_met_with_patience(open_server: OpenServer) -> None:
    with running(FakeOpenAI({"busy": [429] * 10})) as server:
        results = run(open_server(server.base_url), a_job(["busy"]))
    assert isinstance(results[0], Completion)
    assert server.attempts["busy"] == 11


def test_an_answer_that_never_comes_is_asked_for_again(open_server: OpenServer) -> None:
    with running(FakeOpenAI({"slow": ["slow"], "slower": ["slow"] * 9, "stalled": ["stalled"]})) as server:
        results = run(
            open_server(server.base_url, request_timeout_s=2.0), a_job(["slow", "slower", "stalled", "good"])
        )
    assert isinstance(results[0], Completion)
    slower = results[1]
    assert isinstance(slower, Failure)
    assert (slower.code, slower.status_code) == ("request_timeout", 504)
    assert isinstance(results[2], Completion)
    assert isinstance(results[3], Completion)


@pytest.mark.parametrize("fault", [401, 403, "quota", "redirect"])
def test_what_would_refuse_every_request_stops_the_job(open_server: OpenServer, fault: int | str) -> None:
    with running(FakeOpenAI({"bad": [fault]})) as server:
        engine = open_server(server.base_url, max_concurrency=1)
        requests = a_job(["good", "bad", "never sent"])
        steps = engine.run(requests, make_policy("fcfs", make_plan(requests, COST_MODEL)))
        taken: list[int] = []
        with pytest.raises(EngineError, match=r"--api-key-env|quota|--base-url"):
            taken.extend(request for step in steps for request, _ in step.results)
    assert taken == [0]
    assert server.users() == ["good", "bad"]


def test_the_key_goes_to_the_server(open_server: OpenServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "sk-secret")
    monkeypatch.setenv("WRONG_KEY", "sk-wrong")
    with running(FakeOpenAI(key="sk-secret")) as server:
        results = run(open_server(server.base_url, api_key_env="SOME_KEY"), a_job(["good"]))
        assert isinstance(results[0], Completion)
        for variable in ("WRONG_KEY", None):
            with pytest.raises(ConfigError, match="--api-key-env") as refused:
                open_server(server.base_url, api_key_env=variable)
            assert "sk-" not in str(refused.value)
    with pytest.raises(ConfigError, match="NO_SUCH_VARIABLE"):
        open_server("http://127.0.0.1:9/v1", api_key_env="NO_SUCH_VARIABLE")


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/v1", "localhost:8000/v1", "ftp://x/v1", "http://[/v1"])
def test_a_url_without_a_server_is_refused_at_once(open_server: OpenServer, url: str) -> None:
    with pytest.raises(ConfigError, match="--base-url"):
        open_server(url)


def test_a_server_that_comes_back_finds_everything_waiting(open_server: OpenServer) -> None:
    """It goes away with requests in flight, and comes back on the same port."""
    users = [f"r{index}" for index in range(12)]
    with running(FakeOpenAI({"r2": ["slow"] * 9, "r3": ["slow"] * 9})) as first:
        engine = open_server(first.base_url)
        requests = a_job(users)
        steps = engine.run(requests, make_policy("fcfs", make_plan(requests, COST_MODEL)))
        results = dict(next(steps).results)
    back: list[FakeOpenAI] = []

    def come_back() -> None:
        time.sleep(1.0)
        server = stack.enter_context(running(FakeOpenAI(), first.port))
        back.append(server)

    with ExitStack() as stack:
        returning = threading.Thread(target=come_back)
        returning.start()
        for step in steps:
            for request, result in step.results:
                assert request not in results
                results[request] = result
        returning.join()
        assert len(back[0].requests) >= 8
    assert sorted(results) == list(range(12))
    assert all(isinstance(result, Completion) for result in results.values())


def test_a_server_that_stays_away_stops_the_job(open_server: OpenServer) -> None:
    with running(FakeOpenAI({"b": ["slow"]})) as server:
        engine = open_server(server.base_url, max_outage_s=0.5)
        requests = a_job(["a", "b", "c"])
        steps = engine.run(requests, make_policy("fcfs", make_plan(requests, COST_MODEL)))
        next(steps)
    with pytest.raises(EngineError, match="away"):
        list(steps)


def test_an_engine_runs_on_after_a_run_that_was_stopped(open_server: OpenServer) -> None:
    with running(FakeOpenAI({"stuck": ["slow"]})) as server:
        engine = open_server(server.base_url)
        requests = a_job(["a", "stuck", "b", "c"])
        steps = engine.run(requests, make_policy("fcfs", make_plan(requests, COST_MODEL)))
        while "stuck" not in server.attempts:
            next(steps)
        steps.close()
        assert len(run(engine, requests)) == 4


def test_after_a_stop_of_admission_only_what_was_sent_is_answered(open_server: OpenServer) -> None:
    with running(FakeOpenAI(latency_s=0.05)) as server:
        engine = open_server(server.base_url)
        requests = a_job([f"{index}" for index in range(20)])
        steps = engine.run(requests, make_policy("fcfs", make_plan(requests, COST_MODEL)))
        results = next(steps).results
        engine.stop_admitting()
        results += [result for step in steps for result in step.results]
        assert len(results) == len(server.requests) == 4
        assert len(run(engine, requests)) == 20


@pytest.mark.parametrize("concurrency", [1, 3])
def test_requests_arrive_in_the_order_of_the_policy(open_server: OpenServer, concurrency: int) -> None:
    """One after the other exactly; with several on the way at once, but for those."""
    prefixes = [[9, 9, 9, 9], [8, 8, 8, 8]]
    requests = a_job([f"{index}" for index in range(16)])
    table = request_table([prefixes[index % 2] + [index] for index in range(16)], max_tokens=4)
    table.raw = requests.raw
    expected = {
        "fcfs": [*range(16)],
        "dfs": [*range(0, 16, 2), *range(1, 16, 2)],
    }
    for policy, order in expected.items():
        with running(FakeOpenAI()) as server:
            run(open_server(server.base_url, max_concurrency=concurrency), table, policy)
        arrived = [int(user) for user in server.users()]
        assert sorted(arrived) == list(range(16))
        assert all(abs(order.index(request) - place) < concurrency for place, request in enumerate(arrived))


def test_concurrency_is_bounded_by_count_and_by_tokens(open_server: OpenServer) -> None:
    requests = a_job([f"{index}" for index in range(12)])
    # Nothing is answered before three are there; a fourth, if one were sent, would come within the latency.
    with running(FakeOpenAI(latency_s=0.25, num_together=3)) as server:
        run(open_server(server.base_url, max_concurrency=3), requests)
    assert server.max_in_flight == 3
    with running(FakeOpenAI(latency_s=0.25, num_together=3)) as server:
        # Each has 2 + 1 + 4 tokens, two of them shared; one more is sent than fits 16 tokens.
        run(open_server(server.base_url, max_concurrency=9, kv_capacity_tokens=16), requests)
    assert server.max_in_flight == 3


def test_connections_are_kept(open_server: OpenServer) -> None:
    with running(FakeOpenAI()) as server:
        run(open_server(server.base_url, max_concurrency=2), a_job([f"{index}" for index in range(20)]))
    assert server.num_connections <= 3


def test_no_thread_and_no_task_is_left(open_server: OpenServer) -> None:
    before = threading.active_count()
    with running(FakeOpenAI()) as server:
        engine = open_server(server.base_url)
        run(engine, a_job([f"{index}" for index in range(20)]))
        assert threading.active_count() == before + 1  # the server's
        assert not asyncio.all_tasks(engine._loop)


def test_requests_without_their_text_cannot_be_forwarded(open_server: OpenServer) -> None:
    with running(FakeOpenAI()) as server, pytest.raises(EngineError, match="as they were written"):
        run(open_server(server.base_url), request_table([[1, 2]]))


def test_less_is_sent_at_a_time_to_a_server_that_refuses(open_server: OpenServer) -> None:
    """Without that, each of 64 requests would be refused again and again."""
    requests = a_job([f"{index}" for index in range(64)])
    with running(FakeOpenAI(latency_s=0.02, most_in_flight=4)) as server:
        results = run(open_server(server.base_url, max_concurrency=64), requests)
    assert all(isinstance(result, Completion) for result in results.values())
    assert server.num_refused < 96


def test_a_limit_falls_once_per_round_and_grows_again() -> None:
    limit = ConcurrencyLimit(100)
    limit._in_flight = 100
    sent_s = time.monotonic()
    limit.refused(sent_s)
    assert limit.now == 70
    for _ in range(30):  # sent before it fell
        limit.refused(sent_s)
        limit.release()
    assert limit.now == 70
    for _ in range(75):
        limit.succeeded()
    assert limit.now == 71
    for _ in range(100 * 30):
        limit.succeeded()
    assert limit.now == 100
    limit.restart()
    for _ in range(69):
        limit.succeeded()
    assert limit.now == 70, "one more per answer until it is where it was refused"


def test_a_limit_falls_to_what_was_taken_of_a_round() -> None:
    async def scenario() -> int:
        limit = ConcurrencyLimit(64)
        for _ in range(64):
            await limit.acquire()
        waiting = [asyncio.create_task(limit.acquire()) for _ in range(100)]
        await asyncio.sleep(0)
        sent_s = time.monotonic()
        for _ in range(60):
            limit.refused(sent_s)
            limit.release()
        for task in waiting:
            task.cancel()
        return limit.now

    assert asyncio.run(scenario()) == 4


def test_places_go_to_whoever_came_first_and_come_back_from_those_who_leave() -> None:
    async def scenario() -> list[int]:
        limit, order = ConcurrencyLimit(1), []

        async def take(number: int) -> None:
            await limit.acquire()
            order.append(number)
            await asyncio.sleep(0)
            limit.release()

        tasks = [asyncio.create_task(take(number)) for number in range(5)]
        await asyncio.sleep(0)
        tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await take(9)
        return order

    assert asyncio.run(scenario()) == [0, 1, 3, 4, 9]


VLLM_METRICS = """# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",num_cpu_blocks="None",num_gpu_blocks="1025"} 1.0
vllm:num_requests_running{engine="0"} 0.0
"""


def test_what_servers_tell_of_themselves_is_read() -> None:
    assert vllm_facts(VLLM_METRICS) == ServerFacts("vllm", 32768, 32)
    two = VLLM_METRICS + VLLM_METRICS.replace('engine="0"', 'engine="1"')
    assert vllm_facts(two).kv_capacity_tokens == 65536
    assert vllm_facts(VLLM_METRICS.replace("1025", "None")) == ServerFacts("vllm")
    info = {
        "max_total_num_tokens": 4096,
        "page_size": 1,
        "schedule_policy": "lpm",
        "internal_states": [{"effective_max_running_requests_per_dp": 8}],
    }
    assert sglang_facts(info) == ServerFacts("sglang", 4096, 1, 8, "lpm")
    assert sglang_facts(["?"]) == sglang_facts({"internal_states": [None]}) == ServerFacts("sglang")
    props = {"default_generation_settings": {"n_ctx": 2048}, "total_slots": 4}
    assert llamacpp_facts(props) == ServerFacts("llamacpp", 2048, 1, 4)
    assert llamacpp_facts(None) == ServerFacts("llamacpp")


@pytest.mark.parametrize(
    ("owner", "path", "page", "tokens"),
    [
        ("vllm", "/metrics", VLLM_METRICS, 32768),
        ("sglang", "/server_info", {"max_total_num_tokens": 4096}, 4096),
        ("sglang", "/get_server_info", {"max_total_num_tokens": 4096}, 4096),
        ("llamacpp", "/props", {"default_generation_settings": {"n_ctx": 2048}}, 2048),
        ("somebody", "/metrics", VLLM_METRICS, 0),
        ("vllm", "/elsewhere", VLLM_METRICS, 0),
    ],
)
def test_the_memory_of_a_server_is_what_it_says(
    open_server: OpenServer, owner: str, path: str, page: Any, tokens: int
) -> None:
    pages = {"/v1/models": {"object": "list", "data": [{"id": "m", "owned_by": owner}]}, path: page}
    with running(FakeOpenAI(pages=pages)) as server:
        engine = open_server(server.base_url, kv_capacity_tokens=None)
        assert engine.kv_capacity_tokens == (tokens or COST_MODEL.kv_capacity_tokens)
        assert open_server(server.base_url, kv_capacity_tokens=77).kv_capacity_tokens == 77


def test_the_longest_sequence_is_what_the_server_says(open_server: OpenServer) -> None:
    pages = {"/v1/models": {"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 24}]}, "/metrics": ""}
    with running(FakeOpenAI(pages=pages)) as server, running(FakeOpenAI()) as other:
        assert open_server(server.base_url).max_model_len == 24
        assert open_server(other.base_url).max_model_len > 24


def test_a_server_with_an_order_of_its_own_is_warned_of(open_server: OpenServer) -> None:
    pages = {
        "/v1/models": {"data": [{"owned_by": "sglang"}]},
        "/server_info": {"schedule_policy": "lpm"},
    }
    with (
        running(FakeOpenAI(pages=pages)) as server,
        pytest.warns(UserWarning, match="--schedule-policy fcfs"),
    ):
        open_server(server.base_url)


def test_an_error_that_repeats_the_key_is_told_without_it() -> None:
    content = b'{"error": {"message": "sk-secret may not do this", "code": "forbidden_model"}}'
    failure = failure_of(Answer(404, {}, content), "sk-secret")
    assert failure.message == "[api key] may not do this"
