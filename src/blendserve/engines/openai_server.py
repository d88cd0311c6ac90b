"""Servers that speak OpenAI's API as an engine: requests go out as written, answers come back as they are.

The policy decides through a `Window` which requests a server has. Answers are not streamed, because that would
change the requests; the window estimates what it cannot see. One event loop, stepped by `run`: no thread, and no
connection that nobody waits for. What becomes of a request is in `openai_api`.

Of several servers each has requests, policy and window of its own:

```
plan ─ partition ─┬─ share ─ window ─ server      a share keeps prefixes together, and has the job's density
                  └─ share ─ window ─ server
```

| what happens | what becomes of the requests |
| --- | --- |
| a server has none waiting | it gets a part of those of the one that would be busy longest, so that both end together |
| a server is away for longer than `grace_s` | those it ran and those that wait are divided among the others |
| it has given up so many in a row | the same, and it rests for a while |
| a request was given up on one server | it is tried on another, once |
| a server is back | it has none waiting: see above |
"""

from __future__ import annotations

import asyncio
import logging
import time
import warnings
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from blendserve.cost_model import CostModel
from blendserve.engines import DEFAULT_MAX_CONCURRENCY
from blendserve.engines.openai_api import ApiServer, ConcurrencyLimit, GaveUp, ServerFacts, api_key
from blendserve.engines.retry import Backoff
from blendserve.errors import EngineDiedError, EngineError
from blendserve.planner.partition import partition
from blendserve.planner.plan import Floats, make_plan
from blendserve.planner.prefix_tree import Ints
from blendserve.request import Completion, RequestTable, Result, StepOutput, StepStats
from blendserve.scheduling.policies import PolicyName, make_policy
from blendserve.scheduling.policy import Policy
from blendserve.scheduling.window import Window

SEQUENCES_SENT_RATIO = 1.5
"""requests sent, over those that a server says it runs at a time: as many as may end in a step must be in line"""
MAX_OUTAGE_S = 300.0
"""all servers may be away for so long before the job stops"""
GRACE_S = 10.0
"""a server may be away for so long before others take its requests"""
MAX_GIVEN_UP = 3
"""requests that a server may give up in a row before others take the rest"""
REST_S = 10.0
"""of a server that gave up so many, the first time; then twice as long each time, up to `MAX_REST_S`"""
MAX_REST_S = 300.0
REBALANCE_EVERY_S = 0.25
"""after an attempt that moved nothing"""
LEAST_SPEED = 1e-12
MAX_TICK_S = 0.25
"""between two looks of the policy where no answer comes"""

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class ServerProcess(Protocol):
    """A server that was started for an engine."""

    def how_it_ended(self) -> str | None:
        """What became of it; None while it runs."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class _Run:
    """A run of a job: what is to be done, and what is under way."""

    def __init__(self, requests: RequestTable, policy: Policy) -> None:
        self.requests = requests
        self.policy = policy
        plan = policy.plan
        self.work_s: Floats = np.asarray(
            plan.cost_model.decode_compute_s(plan.prompt_share() + plan.output_tokens_est)
            + plan.cost_model.memory_s(plan.prompt_tokens, plan.output_tokens_est)
        )
        """[num_requests] modelled seconds"""
        self.num_open = len(requests)
        self.given_up_by: dict[int, _Lane] = {}
        """by request; it is tried once more, and not there"""
        self.tasks: dict[asyncio.Task[Result | GaveUp], tuple[_Lane, _Share, int]] = {}
        """whose each is, those included that were taken back and have not ended yet"""
        self.rebalance_at_s = 0.0
        self._started_s = time.perf_counter()

    @property
    def now_s(self) -> float:
        """Seconds since it began."""
        return time.perf_counter() - self._started_s


class _Share:
    """Some requests of the job on their way through a window."""

    def __init__(self, ids: Ints, window: Window) -> None:
        self.ids = ids
        """[num_requests] numbers in the job"""
        self.window = window
        self.is_open = True
        """whether what waits is still to be run from here"""
        self.tasks: dict[int, asyncio.Task[Result | GaveUp]] = {}
        """by the number in the share"""

    @property
    def num_waiting(self) -> int:
        return self.window.num_waiting if self.is_open else 0

    @property
    def is_over(self) -> bool:
        return not self.tasks and self.num_waiting == 0

    @property
    def waiting(self) -> Ints:
        """Numbers in the share."""
        return self.window.waiting_requests if self.is_open else np.empty(0, np.int32)


class _Lane:
    """A server with what it has to run. Shares go one after the other."""

    def __init__(self, server: ApiServer, facts: ServerFacts, kv_capacity_tokens: int) -> None:
        self.server = server
        self.facts = facts
        self.kv_capacity_tokens = kv_capacity_tokens
        self.num_rests = 0
        self.begin()

    def begin(self) -> None:
        """Another run."""
        self.shares: list[_Share] = []
        self.up_s = 0.0
        """time that the server was there"""
        self.done_work_s = 0.0
        """modelled time of what it has answered"""
        self.num_answered = self.num_prompt_tokens = self.num_cached_tokens = self.num_output_tokens = 0
        self.num_moved_away = 0

    @property
    def num_running(self) -> int:
        return sum(len(share.tasks) for share in self.shares)

    @property
    def num_waiting(self) -> int:
        return sum(share.num_waiting for share in self.shares)

    @property
    def kv_committed_tokens(self) -> int:
        return sum(share.window.kv_committed_tokens for share in self.shares)

    def speed(self, work_s: Floats) -> float:
        """Modelled seconds of work done per second."""
        done, _ = self.running_work_s(work_s)
        return max((self.done_work_s + done) / max(self.up_s, 1e-6), LEAST_SPEED)

    def running_work_s(self, work_s: Floats) -> tuple[float, float]:
        """Modelled seconds of what runs: done and left, by what is expected of each."""
        done = total = 0.0
        for share in self.shares:
            running = share.window.running_requests
            expected = share.window.policy.output_tokens_est[running]
            of_each = work_s[share.ids[running]]
            done += float((of_each * np.minimum(share.window.running_output_tokens / expected, 1.0)).sum())
            total += float(of_each.sum())
        return done, total - done

    def waiting_work_s(self, work_s: Floats) -> float:
        """Modelled seconds of what waits."""
        return sum(float(work_s[share.ids[share.waiting]].sum()) for share in self.shares)

    def busy_s(self, work_s: Floats) -> float:
        """Seconds until all that it has is done, at its speed so far."""
        return (self.waiting_work_s(work_s) + self.running_work_s(work_s)[1]) / self.speed(work_s)

    def fill(self, now_s: float) -> Iterator[tuple[_Share, list[int], list[int]]]:
        """Let the policies decide what goes to the server now: share, requests to send, requests to take back."""
        self.shares = [share for share in self.shares if not share.is_over]
        for share in self.shares:
            if not share.is_open:
                continue
            others = [other for other in self.shares if other is not share]
            places = self.server.limit.now - sum(len(other.tasks) for other in others)
            tokens = self.kv_capacity_tokens - sum(other.window.kv_committed_tokens for other in others)
            window = share.window
            if window.num_running == 0 and min(places, tokens) <= 0:
                return
            window.max_concurrency, window.kv_capacity_tokens = max(places, 1), max(tokens, 1)
            yield share, *window.fill(now_s)
            if share.num_waiting:
                return

    def take_waiting(self) -> tuple[Ints, Floats]:
        """What waits, which is not run from here any more: numbers in the job, and output tokens expected of each."""
        ids, expected = [np.empty(0, np.int32)], [np.empty(0)]
        for share in self.shares:
            waiting = share.waiting
            share.is_open = False
            ids.append(share.ids[waiting])
            expected.append(share.window.policy.output_tokens_est[waiting])
        return np.concatenate(ids), np.concatenate(expected)

    def take_all(self) -> tuple[Ints, Floats]:
        """The same with what runs, which is cancelled."""
        ids, expected = self.take_waiting()
        for share in self.shares:
            running = np.array(list(share.tasks), np.int32)
            ids = np.concatenate((ids, share.ids[running]))
            expected = np.concatenate((expected, share.window.policy.output_tokens_est[running]))
            for task in share.tasks.values():
                task.cancel()
            share.tasks.clear()
        self.shares = []
        return ids, expected

    def answered(self, result: Result, work_s: float) -> None:
        """Count a result."""
        self.num_answered += 1
        self.done_work_s += work_s
        if isinstance(result, Completion):
            self.num_prompt_tokens += result.num_prompt_tokens
            self.num_cached_tokens += result.num_cached_tokens
            self.num_output_tokens += result.num_output_tokens

    def facts_of_run(self) -> dict[str, Any]:
        """What it did in this run, for the log."""
        return {
            "base_url": self.server.base_url,
            "num_requests": self.num_answered,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "num_output_tokens": self.num_output_tokens,
            "num_moved_away": self.num_moved_away,
            "up_s": round(self.up_s, 3),
        }


class OpenAIServer:
    """Runs requests on one server or several.

    Args:
        base_urls: of each server, with its /v1.
        cost_model: of the model on a device like the servers', for planning.
        api_key_env: environment variable with the key.
        max_concurrency: most requests at a server at a time; None: what the server says it runs, and half as many
            more, or else 128.
        request_timeout_s: until an answer must be complete.
        kv_capacity_tokens: of each server; None: what it says, or else what the cost model says.
        max_model_len: of the servers' model, for planning; less if one of them says so.
        backoff: between attempts.
        max_outage_s: how long all servers may be away.
        grace_s: how long one may be away before others take its requests.
        flushes_cache: whether an SGLang server is to forget its prefixes before each run.
        process: that the server is, where it was started for this engine, which ends it.
        name: of the engine.

    Raises:
        ConfigError: a URL or the key cannot be used, nothing answers at one of them, or httpx2 is not installed.
    """

    def __init__(
        self,
        base_urls: Sequence[str],
        cost_model: CostModel,
        *,
        api_key_env: str | None = None,
        max_concurrency: int | None = None,
        request_timeout_s: float,
        kv_capacity_tokens: int | None = None,
        max_model_len: int,
        backoff: Backoff | None = None,
        max_outage_s: float = MAX_OUTAGE_S,
        grace_s: float = GRACE_S,
        flushes_cache: bool = False,
        process: ServerProcess | None = None,
        name: str = "openai",
    ) -> None:
        self.name = name
        self.cost_model = cost_model
        self._max_outage_s, self._grace_s = max_outage_s, grace_s
        self.flushes_cache = flushes_cache
        self._process = process
        self._is_admitting = True
        self._num_retried = 0  # not reported yet
        self._loop = asyncio.new_event_loop()
        servers: list[ApiServer] = []
        try:
            key = None if api_key_env is None else api_key(api_key_env)
            servers = [
                ApiServer(
                    url,
                    key=key,
                    max_concurrency=max_concurrency or DEFAULT_MAX_CONCURRENCY,
                    request_timeout_s=request_timeout_s,
                    backoff=backoff or Backoff(),
                )
                for url in base_urls
            ]
            self._lanes = [
                _Lane(
                    server,
                    facts,
                    kv_capacity_tokens or facts.kv_capacity_tokens or cost_model.kv_capacity_tokens,
                )
                for server, facts in zip(
                    servers, self._all(server.check() for server in servers), strict=True
                )
            ]
        except BaseException:
            self._close(servers)
            raise
        for lane in self._lanes:
            if max_concurrency is None and lane.facts.max_num_seqs is not None:
                most = int(lane.facts.max_num_seqs * SEQUENCES_SENT_RATIO) + 1
                lane.server.limit = ConcurrencyLimit(min(most, DEFAULT_MAX_CONCURRENCY))
            if lane.facts.schedule_policy not in (None, "fcfs"):
                warnings.warn(
                    f"the server at {lane.server.base_url} puts its requests in an order of its own "
                    f"({lane.facts.schedule_policy}); start it with --schedule-policy fcfs for the order of --policy",
                    stacklevel=1,
                )
            fields = {"base_url": lane.server.base_url, **lane.facts._asdict()}
            _log.info("server_found", extra={"fields": fields})
        self.kv_capacity_tokens = sum(lane.kv_capacity_tokens for lane in self._lanes)
        self.max_model_len = min(
            max_model_len, *(lane.facts.max_model_len or max_model_len for lane in self._lanes)
        )

    def run(self, requests: RequestTable, policy: Policy) -> Iterator[StepOutput]:
        """Run all requests; see `Engine.run`. A step ends with one or more answers, or after `MAX_TICK_S`.

        The facts of a step are those of the requests that finished in it. Of several servers each has a policy of its
        own, of the given one's kind.

        Raises:
            EngineError: a server refuses the key, or all stay away.
            EngineDiedError: the server that was started for this engine has ended.
        """
        if len(requests) == 0:
            return
        if requests.raw is None:
            raise EngineError(
                "a server needs the requests as they were written, and these are token ids only; "
                "prepare them with pass_through"
            )
        self._is_admitting = True
        self._num_retried = 0
        for lane in self._lanes:
            lane.begin()
        if self.flushes_cache:
            self._all(lane.server.flush_cache() for lane in self._lanes)
        run = _Run(requests, policy)
        everything = np.arange(len(requests), dtype=np.int32)
        if len(self._lanes) == 1:
            self._lanes[0].shares.append(_Share(everything, self._window(self._lanes[0], requests, policy)))
        else:
            self._distribute(run, everything, policy.output_tokens_est, dict.fromkeys(self._lanes, 1.0))
        before_s = run.now_s
        try:
            while run.num_open and (self._is_admitting or any(lane.num_running for lane in self._lanes)):
                self._check_servers()
                if self._is_admitting:
                    self._leave_dead_servers(run)
                    self._rebalance(run)
                    self._send(run)
                results, stopped = self._collect(run)
                now_s = run.now_s
                for lane in self._lanes:
                    lane.up_s += 0.0 if lane.server.is_away else now_s - before_s
                stats = self._stats(run.num_open, [result for _, result in results], now_s - before_s)
                before_s = now_s
                yield StepOutput(stats, results)
                if stopped is not None:
                    raise stopped
        finally:
            self._cancel(run.tasks)
            for lane in self._lanes:
                _log.info("server_ended", extra={"fields": lane.facts_of_run()})

    def stop_admitting(self) -> None:
        """Let `run` end as soon as what the servers have now is answered; the other requests get no result."""
        self._is_admitting = False

    def round_trip_s(self) -> float:
        """Seconds that a request takes for which the server does nothing, the best of some."""
        return min(self._all([self._lanes[0].server.ping_s()])[0] for _ in range(5))

    def close(self) -> None:
        """Close the connections, and end the server that was started for this engine."""
        self._close([lane.server for lane in self._lanes])

    def _close(self, servers: Sequence[ApiServer]) -> None:
        if not self._loop.is_closed():
            self._all(server.close() for server in servers)
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
        if self._process is not None:
            self._process.close()

    def _all(self, work: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
        """Do all of it at once; the first error is raised when all has ended."""

        async def gathered() -> list[_T | BaseException]:
            return await asyncio.gather(*work, return_exceptions=True)

        done = self._loop.run_until_complete(gathered())
        for outcome in done:
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcome for outcome in done if not isinstance(outcome, BaseException)]

    # -- who runs what -------------------------------------------------------------------------------------------

    def _window(self, lane: _Lane, requests: RequestTable, policy: Policy) -> Window:
        hardware = self.cost_model.hardware
        return Window(
            requests,
            policy,
            kv_capacity_tokens=lane.kv_capacity_tokens,
            max_concurrency=lane.server.limit.most,
            max_num_batched_tokens=hardware.max_num_batched_tokens,
            step_s=lane.shares[-1].window.step_s
            if lane.shares
            else self.cost_model.step_cost(hardware.max_num_batched_tokens, 0).step_s,
            block_size=lane.facts.block_size,
        )

    def _distribute(self, run: _Run, ids: Ints, expected: Floats, weights: dict[_Lane, float]) -> None:
        """Divide requests among lanes in proportion to weights, those with a common prefix together.

        None goes to the lane that gave it up, if there is another.
        """
        for lane in weights if len(weights) > 1 else ():
            given_up = [number for number, by in run.given_up_by.items() if by is lane]
            is_barred = np.isin(ids, given_up)
            if is_barred.any():
                others = {peer: max(part, LEAST_SPEED) for peer, part in weights.items() if peer is not lane}
                self._distribute(run, ids[is_barred], expected[is_barred], others)
                ids, expected = ids[~is_barred], expected[~is_barred]
        if not len(ids):
            return
        cost_model, config = run.policy.plan.cost_model, run.policy.plan.config
        in_file_order = np.argsort(ids)  # `fcfs` keeps it
        ids, expected = ids[in_file_order], expected[in_file_order]
        plan = make_plan(run.requests.take(ids), cost_model, config).reordered(expected)
        parts = partition(plan, len(weights), list(weights.values()))
        for rank, lane in enumerate(weights):
            members = parts.requests_of(rank)
            if len(members):
                table = run.requests.take(ids[members])
                own_plan = make_plan(table, cost_model, config).reordered(expected[members])
                own_policy = make_policy(cast(PolicyName, run.policy.name), own_plan, seed=config.seed)
                lane.shares.append(_Share(ids[members], self._window(lane, table, own_policy)))

    def _peers(self, lane: _Lane) -> list[_Lane]:
        """The other servers that are there."""
        return [other for other in self._lanes if other is not lane and not other.server.is_away]

    def _leave_dead_servers(self, run: _Run) -> None:
        for lane in self._lanes:
            if lane.shares and lane.server.away_s > self._grace_s and self._peers(lane):
                num_moved = self._evacuate(run, lane)
                fields = {"base_url": lane.server.base_url, "num_requests": num_moved}
                _log.warning("server_away", extra={"fields": fields})

    def _evacuate(self, run: _Run, lane: _Lane) -> int:
        """Give all that a server has to the others; returns how many requests."""
        self._num_retried += lane.num_running
        ids, expected = lane.take_all()
        lane.num_moved_away += len(ids)
        if len(ids):
            weights = {peer: peer.speed(run.work_s) for peer in self._peers(lane)}
            self._distribute(run, ids, expected, weights)
        return len(ids)

    def _hand_over(self, run: _Run, lane: _Lane, numbers: Ints) -> None:
        """Have requests that a server gave up tried by others; all that it has, if it gave up many."""
        self._num_retried += len(numbers)
        lane.num_moved_away += len(numbers)
        weights = {peer: peer.speed(run.work_s) for peer in self._peers(lane)}
        self._distribute(run, numbers, run.policy.output_tokens_est[numbers], weights or {lane: 1.0})
        if weights and lane.server.num_given_up >= MAX_GIVEN_UP:
            num_moved = self._evacuate(run, lane)
            rest_s = min(REST_S * 2**lane.num_rests, MAX_REST_S)
            lane.num_rests += 1
            self._loop.run_until_complete(lane.server.rest(rest_s))
            fields = {"base_url": lane.server.base_url, "num_requests": num_moved, "rest_s": rest_s}
            _log.warning("server_rests", extra={"fields": fields})

    def _rebalance(self, run: _Run) -> None:
        """Give servers that have nothing waiting a part of what waits for the one that would be busy longest."""
        if run.now_s < run.rebalance_at_s:
            return
        for lane in self._lanes:
            if lane.server.is_away or lane.num_waiting:
                continue
            busy_s = {other: other.busy_s(run.work_s) for other in self._lanes if other.num_waiting > 1}
            if not busy_s:
                return
            busiest = max(busy_s, key=busy_s.__getitem__)
            waiting_s, num_waiting = busiest.waiting_work_s(run.work_s), busiest.num_waiting
            speed, own_speed = busiest.speed(run.work_s), lane.speed(run.work_s)
            if lane.done_work_s == 0.0:
                own_speed = speed  # it has had nothing to do, or was away
            # So much that both end at the same time.
            own_busy_s = lane.running_work_s(run.work_s)[1] / own_speed
            moved_s = min((busy_s[busiest] - own_busy_s) / (1.0 / speed + 1.0 / own_speed), waiting_s)
            if moved_s * num_waiting < waiting_s:  # less than a request
                run.rebalance_at_s = run.now_s + REBALANCE_EVERY_S
                continue
            weights = {busiest: waiting_s - moved_s, lane: moved_s}
            ids, expected = busiest.take_waiting()
            self._distribute(run, ids, expected, weights)
            num_moved = num_waiting - busiest.num_waiting
            if num_moved == 0:
                run.rebalance_at_s = run.now_s + REBALANCE_EVERY_S
                return
            busiest.num_moved_away += num_moved
            urls = {"from": busiest.server.base_url, "to": lane.server.base_url}
            _log.info("rebalanced", extra={"fields": {**urls, "num_requests": num_moved}})

    def _check_servers(self) -> None:
        """See that there is one.

        Raises:
            EngineError: there is none.
        """
        if self._process is not None and (end := self._process.how_it_ended()) is not None:
            running = [
                int(share.ids[r]) for lane in self._lanes for share in lane.shares for r in share.tasks
            ]
            raise EngineDiedError(end, running)
        if min(lane.server.away_s for lane in self._lanes) > self._max_outage_s:
            urls = " and ".join(lane.server.base_url for lane in self._lanes)
            raise EngineError(
                f"the server at {urls} has been away for {self._max_outage_s:g} s; the results so far are "
                "kept, start it again and run the same command to go on"
            )

    # -- steps ---------------------------------------------------------------------------------------------------

    def _send(self, run: _Run) -> None:
        """Send and take back what the policies decide now."""
        assert run.requests.raw is not None
        now_s = run.now_s
        for lane in self._lanes:
            if lane.server.is_away:
                continue
            for share, admitted, withdrawn in lane.fill(now_s):
                for request in withdrawn:
                    share.tasks.pop(request).cancel()
                for request in admitted:
                    number = int(share.ids[request])
                    is_hasty = number not in run.given_up_by and bool(self._peers(lane))
                    answer = lane.server.answer(run.requests.raw[number], is_hasty=is_hasty)
                    task = self._loop.create_task(answer)
                    run.tasks[task] = lane, share, request
                    share.tasks[request] = task

    def _collect(self, run: _Run) -> tuple[list[tuple[int, Result]], BaseException | None]:
        """Wait for answers: those that came, by the requests' numbers in the job, and what stops the job."""
        answers: dict[tuple[_Lane, _Share], list[tuple[int, Result]]] = {}
        given_up: dict[_Lane, list[int]] = {}
        stopped: BaseException | None = None
        for task in self._loop.run_until_complete(_first_of(run.tasks)):
            lane, share, request = run.tasks.pop(task)
            if share.tasks.get(request) is not task:
                continue  # it was withdrawn, or moved to another server
            del share.tasks[request]
            if (error := task.exception()) is not None:
                stopped = stopped or error
                continue
            outcome, number = task.result(), int(share.ids[request])
            if isinstance(outcome, GaveUp):
                if number not in run.given_up_by and (outcome.is_hasty or self._peers(lane)):
                    run.given_up_by[number] = lane
                    given_up.setdefault(lane, []).append(number)
                    share.window.finish([(request, None)], run.now_s)
                    continue
                outcome = outcome.failure
            answers.setdefault((lane, share), []).append((request, outcome))
        results: list[tuple[int, Result]] = []
        for (lane, share), of_share in answers.items():
            lengths = [(request, _output_tokens(result)) for request, result in of_share]
            expected = share.window.finish(lengths, run.now_s)
            for (request, result), output_tokens_est in zip(of_share, expected, strict=True):
                number = int(share.ids[request])
                if isinstance(result, Completion):
                    result.output_tokens_est = output_tokens_est
                lane.answered(result, float(run.work_s[number]))
                results.append((number, result))
        run.num_open -= len(results)
        for lane, numbers in given_up.items():
            self._hand_over(run, lane, np.array(numbers, np.int32))
        return results, stopped

    def _cancel(self, tasks: Iterable[asyncio.Task[Any]]) -> None:
        """Take back whatever is at the servers; one that sees its connection closed stops working on it."""
        pending = list(tasks)
        for task in pending:
            task.cancel()

        async def ended() -> None:
            await asyncio.gather(*pending, return_exceptions=True)
            for lane in self._lanes:
                await lane.server.forget_outage()

        self._loop.run_until_complete(ended())

    def _stats(self, num_open: int, results: list[Result], duration_s: float) -> StepStats:
        num_prefill = num_decode = kv_read = 0
        for result in results:
            if isinstance(result, Completion):
                num_prefill += result.num_prompt_tokens - result.num_cached_tokens
                decoded = max(result.num_output_tokens - 1, 0)
                num_decode += decoded
                kv_read += decoded * (result.num_prompt_tokens + (decoded + 1) // 2)
        cost = self.cost_model.step_cost(num_prefill + num_decode, kv_read)
        num_running = sum(lane.num_running for lane in self._lanes)
        committed = sum(lane.kv_committed_tokens for lane in self._lanes)
        num_retried, self._num_retried = self._num_retried, 0
        return StepStats(
            duration_s=duration_s,
            num_prefill_tokens=num_prefill,
            num_decode_tokens=num_decode,
            kv_tokens_read=kv_read,
            num_running=num_running,
            num_waiting=num_open - num_running,
            kv_usage_ratio=min(committed / self.kv_capacity_tokens, 1.0),
            compute_s=cost.compute_s,
            memory_s=cost.memory_s,
            num_retried_requests=num_retried,
        )


async def _first_of(tasks: Iterable[asyncio.Task[Any]]) -> set[asyncio.Task[Any]]:
    """Tasks that are done, once one is or `MAX_TICK_S` have passed."""
    waited_for = set(tasks)
    if not waited_for:
        await asyncio.sleep(MAX_TICK_S)
        return set()
    done, _ = await asyncio.wait(waited_for, timeout=MAX_TICK_S, return_when=asyncio.FIRST_COMPLETED)
    return done


def _output_tokens(result: Result) -> int | None:
    """What is known of an output's length."""
    return (result.num_output_tokens or None) if isinstance(result, Completion) else None
