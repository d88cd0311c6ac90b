"""Several servers as one engine: who runs what, and what happens when one is slow, fails or dies."""

import itertools
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import orjson
import pytest

from blendserve.cost_model import CostModel, HardwareSpec
from blendserve.engines import openai_server
from blendserve.engines.openai_server import OpenAIServer
from blendserve.engines.retry import Backoff
from blendserve.errors import ConfigError, EngineError
from blendserve.planner.plan import make_plan
from blendserve.request import Completion, Failure, RawRequest, RequestTable, Result
from blendserve.scheduling.policies import POLICIES, make_policy
from tests.fake_openai import FakeOpenAI, running
from tests.workload import TINY, request_table

COST_MODEL = CostModel(TINY, HardwareSpec.load("cpu-2core-avx2"))
QUICK = Backoff(base_s=0.01, max_s=0.02, max_attempts=3, seed=0)
GROUP = 10

OpenPool = Callable[..., OpenAIServer]


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")


@pytest.fixture
def open_pool() -> Iterator[OpenPool]:
    with ExitStack() as stack:

        def make(*servers: FakeOpenAI, **options: Any) -> OpenAIServer:
            settings = {
                "max_concurrency": 2,
                "request_timeout_s": 60.0,
                "kv_capacity_tokens": 10_000,
                "max_model_len": 1000,
                "backoff": QUICK,
                "grace_s": 0.3,
            }
            urls = [server.base_url for server in servers]
            engine = OpenAIServer(urls, COST_MODEL, **(settings | options))
            stack.callback(engine.close)
            return engine

        yield make


def a_job(num_requests: int) -> RequestTable:
    """Groups of ten that share most of their prompt; the text of each names it."""
    rng = np.random.default_rng(0)
    prefixes = [rng.integers(0, 500, 50).tolist() for _ in range(-(-num_requests // GROUP))]
    prompts = [[*prefixes[index // GROUP], 1000 + index] for index in range(num_requests)]
    requests = request_table(prompts, max_tokens=4)
    requests.raw = [
        RawRequest("/v1/completions", orjson.dumps({"prompt": f"p{i}", "user": f"{i}", "max_tokens": 4}))
        for i in range(num_requests)
    ]
    return requests


def run(engine: OpenAIServer, requests: RequestTable, policy: str = "dfs") -> dict[int, Result]:
    """All results, each checked to be that of its request."""
    plan = make_plan(requests, engine.cost_model)
    return collected(engine.run(requests, make_policy(policy, plan)))


def collected(steps: Any) -> dict[int, Result]:
    results: dict[int, Result] = {}
    for step in steps:
        for request, result in step.results:
            assert request not in results, "two results for one request"
            if isinstance(result, Completion):
                assert result.body is not None
                assert f'p{request}"' in result.body["choices"][0]["text"]
            results[request] = result
    return results


def numbers(server: FakeOpenAI) -> list[int]:
    return [int(user) for user in server.users()]


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_with_a_common_prefix_stay_on_one_server(open_pool: OpenPool, policy: str) -> None:
    with running(FakeOpenAI()) as a, running(FakeOpenAI()) as b, running(FakeOpenAI()) as c:
        # The window holds all, so nothing is moved.
        results = run(open_pool(a, b, c, max_concurrency=500), a_job(300), policy)
    assert sorted(results) == list(range(300))
    asked = [numbers(server) for server in (a, b, c)]
    assert sorted(itertools.chain(*asked)) == list(range(300)), "each is asked for once"
    assert all(70 <= len(part) <= 130 for part in asked)
    servers_of_group = Counter(group for part in asked for group in {number // GROUP for number in part})
    assert sum(servers_of_group.values()) <= 30 + 4, "only the groups at the cuts are on two"


def test_the_work_of_a_slow_server_is_taken_by_the_others(open_pool: OpenPool) -> None:
    with running(FakeOpenAI(latency_s=0.3)) as slow, running(FakeOpenAI(latency_s=0.01)) as quick:
        results = run(open_pool(slow, quick), a_job(120))
    assert sorted(results) == list(range(120))
    assert sorted(numbers(slow) + numbers(quick)) == list(range(120)), "each is asked for once"
    assert len(slow.requests) < 30
    # What moves are whole groups, but for those at the cuts.
    groups = [{number // GROUP for number in numbers(server)} for server in (slow, quick)]
    assert len(groups[0] & groups[1]) <= 6


def test_a_server_that_dies_loses_and_doubles_nothing(open_pool: OpenPool) -> None:
    requests = a_job(120)
    results: dict[int, Result] = {}
    retried = 0
    with running(FakeOpenAI(latency_s=0.02)) as other:
        with running(FakeOpenAI(latency_s=0.02)) as dying:
            engine = open_pool(dying, other)
            steps = engine.run(requests, make_policy("blend", make_plan(requests, COST_MODEL)))
            while len(dying.requests) < 10:
                results.update(next(steps).results)
        for step in steps:
            retried += step.stats.num_retried_requests
            for request, result in step.results:
                assert request not in results
                results[request] = result
    assert sorted(results) == list(range(120))
    assert all(isinstance(result, Completion) for result in results.values())
    assert 0 < retried <= 2, "what it ran, at most two at a time, is asked for again"
    twice = Counter(numbers(dying) + numbers(other))
    assert sum(twice.values()) <= 120 + 2


def test_a_server_that_comes_back_is_given_work_again(open_pool: OpenPool) -> None:
    requests = a_job(400)
    with running(FakeOpenAI(latency_s=0.05)) as other:
        with running(FakeOpenAI(latency_s=0.05)) as first:
            engine = open_pool(first, other)
            steps = engine.run(requests, make_policy("dfs", make_plan(requests, COST_MODEL)))
            results = dict(next(steps).results)
        while not any(lane.server.is_away and not lane.shares for lane in engine._lanes):
            results.update(next(steps).results)
        with running(FakeOpenAI(latency_s=0.05), first.port) as back:
            results |= collected(steps)
    assert sorted(results) == list(range(400))
    assert len(back.requests) > 10


def test_while_all_are_away_everything_waits(open_pool: OpenPool) -> None:
    requests = a_job(40)
    with running(FakeOpenAI()) as a, running(FakeOpenAI()) as b:
        engine = open_pool(a, b)
        steps = engine.run(requests, make_policy("dfs", make_plan(requests, COST_MODEL)))
        results = dict(next(steps).results)

    def come_back() -> None:
        time.sleep(1.5)
        stack.enter_context(running(FakeOpenAI(), b.port))

    with ExitStack() as stack:
        returning = threading.Thread(target=come_back)
        returning.start()
        results |= collected(steps)
        returning.join()
    assert sorted(results) == list(range(40))


def test_all_away_for_too_long_stops_the_job(open_pool: OpenPool) -> None:
    requests = a_job(40)
    with running(FakeOpenAI()) as a, running(FakeOpenAI()) as b:
        engine = open_pool(a, b, max_outage_s=0.5)
        steps = engine.run(requests, make_policy("dfs", make_plan(requests, COST_MODEL)))
        next(steps)
    with pytest.raises(EngineError, match=f"{a.port}.* and .*{b.port}.*away"):
        list(steps)


@pytest.mark.parametrize("fault", [500, "reset", "no-choices"])
def test_a_server_that_fails_on_everything_fails_no_request(
    open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch, fault: int | str
) -> None:
    """It answers probes, and would otherwise be through with its part soonest."""
    monkeypatch.setattr(openai_server, "REST_S", 600.0)
    with running(FakeOpenAI(always=fault)) as broken, running(FakeOpenAI()) as other:
        results = run(open_pool(broken, other), a_job(120))
    assert sorted(results) == list(range(120))
    assert all(isinstance(result, Completion) for result in results.values())
    assert len(set(numbers(broken))) <= 6, "it rests after some"


def test_after_its_rest_a_server_is_tried_again(open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_server, "REST_S", 0.2)
    faults: dict[str, list[int | str]] = {}
    with running(FakeOpenAI(faults, always=500)) as broken, running(FakeOpenAI(latency_s=0.05)) as other:
        engine = open_pool(broken, other)
        requests = a_job(300)
        steps = engine.run(requests, make_policy("dfs", make_plan(requests, COST_MODEL)))
        results: dict[int, Result] = {}
        while not engine._lanes[0].num_rests:
            results.update(next(steps).results)
        broken.always = None
        num_before = len(broken.requests)
        results |= collected(steps)
        assert len(broken.requests) > num_before + 10
    assert sorted(results) == list(range(300))
    assert all(isinstance(result, Completion) for result in results.values())


def test_a_request_that_fails_everywhere_fails_alone(open_pool: OpenPool) -> None:
    bad: dict[str, list[int | str]] = {"7": [500] * 99}
    with running(FakeOpenAI(bad)) as a, running(FakeOpenAI(bad)) as b:
        results = run(open_pool(a, b), a_job(60))
    failure = results.pop(7)
    assert isinstance(failure, Failure)
    assert a.attempts["7"] == b.attempts["7"] == 3
    assert len(results) == 59
    assert all(isinstance(result, Completion) for result in results.values())


def test_one_that_never_answers_does_not_hold_up_the_job(open_pool: OpenPool) -> None:
    with running(FakeOpenAI(always="slow")) as stuck, running(FakeOpenAI()) as other:
        results = run(open_pool(stuck, other, request_timeout_s=10.0), a_job(60))
    assert len(results) == 60
    assert all(isinstance(result, Completion) for result in results.values())
    assert len(stuck.requests) <= 12, "its work goes to the other"


def test_what_a_server_gave_up_does_not_come_back_to_it(
    open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        openai_server, "MAX_GIVEN_UP", 100
    )  # it never rests, so it is given requests again and again
    # The other one is busy when the first two are given up, so that these wait there and could be moved.
    with running(FakeOpenAI(always="slow")) as stuck, running(FakeOpenAI(latency_s=1.5)) as other:
        results = run(open_pool(stuck, other, request_timeout_s=2.0), a_job(8))
    assert all(isinstance(result, Completion) for result in results.values())
    assert set(stuck.attempts.values()) == {1}


def test_a_wrong_url_is_named_at_the_start(open_pool: OpenPool) -> None:
    with running(FakeOpenAI()) as there:
        gone = FakeOpenAI(port=9)
        with pytest.raises(ConfigError, match=re.escape("http://127.0.0.1:9/v1")):
            open_pool(there, gone)


@pytest.mark.parametrize("num_requests", [1, 2, 3])
def test_fewer_requests_than_servers(open_pool: OpenPool, num_requests: int) -> None:
    with running(FakeOpenAI()) as a, running(FakeOpenAI()) as b, running(FakeOpenAI()) as c:
        assert len(run(open_pool(a, b, c), a_job(num_requests))) == num_requests


def test_each_server_has_its_own_memory_and_places(open_pool: OpenPool) -> None:
    def pages(tokens: int, sequences: int) -> dict[str, Any]:
        state = {"effective_max_running_requests_per_dp": sequences}
        return {
            "/v1/models": {"data": [{"owned_by": "sglang"}]},
            "/server_info": {"max_total_num_tokens": tokens, "internal_states": [state]},
        }

    with (
        running(FakeOpenAI(latency_s=0.05, pages=pages(5000, 2))) as small,
        running(FakeOpenAI(latency_s=0.05, pages=pages(9000, 20))) as large,
    ):
        engine = open_pool(small, large, kv_capacity_tokens=None, max_concurrency=None)
        assert engine.kv_capacity_tokens == 14000
        results = run(engine, a_job(200))
    assert len(results) == 200
    assert small.max_in_flight <= 4  # 1.5 times what it runs, and one
    assert 4 < large.max_in_flight <= 31


def test_stopping_admission_and_running_again(open_pool: OpenPool) -> None:
    requests = a_job(80)
    with running(FakeOpenAI(latency_s=0.05)) as a, running(FakeOpenAI(latency_s=0.05)) as b:
        engine = open_pool(a, b)
        steps = engine.run(requests, make_policy("blend", make_plan(requests, COST_MODEL)))
        results = dict(next(steps).results)
        engine.stop_admitting()
        results |= collected(steps)
        assert len(results) == len(a.requests) + len(b.requests) < 80
        assert len(run(engine, requests)) == 80
