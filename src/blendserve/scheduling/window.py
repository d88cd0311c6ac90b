"""Admission into an engine that schedules for itself: a policy steers it as it steers our own scheduler, by estimate.

The engine behind the window serves first come, first served. So who is sent, and when, decides what runs together. What
is sent arrives while a step runs, and so misses it: sequences that end in that step make room already, and one request
more is sent than fits, so that the engine has something in line whenever a sequence ends.

What the engine does between a request and its answer is not seen, but modelled: engine steps pass at the rate that
answers so far imply, prompts are computed in the order of admission, and then every sequence gains a token per step.
An answer that comes before the model expects it shows that the prompts before it are computed, too. An engine that
tells of its steps spares the window the estimate of their rate.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numba
import numpy as np

from blendserve.errors import EngineError
from blendserve.planner.prefix_tree import Ints
from blendserve.request import RequestTable
from blendserve.scheduling.policy import OVERRUN_FACTOR, Floats, Policy

STEPS_UNDER_WAY = 1
"""engine steps that have begun when a request is sent, and that it misses; what ends in them makes room for it"""
PACE_MEMORY = 0.97
"""weight of the pace known so far against that of one more answer"""
WAITING, RUNNING, FINISHED = 0, 1, 2


class Changes(NamedTuple):
    """What a tick decided."""

    admitted: list[int]
    """requests to send, in this order"""
    withdrawn: list[int]
    """requests to take back from the engine; they are sent again later, from their start"""


class Window:
    """The `Control` of an engine that is seen from outside. A step of the window is a tick: a call of `fill`.

    Memory is the most that all in the window are expected to hold at any time until they end. It counts shared
    prefixes once, as long as a request in the window has them, and of whole blocks what a request leaves empty: half of
    its last, and the end of a prefix that fills no block.

    Args:
        requests: all requests of the run.
        policy: decides who is admitted.
        kv_capacity_tokens: tokens of KV that fit the engine.
        max_concurrency: most requests in the engine.
        max_num_batched_tokens: most tokens of an engine step.
        step_s: seconds that an engine step is taken to last until answers tell.
        block_size: tokens of KV that the engine hands out together.
    """

    def __init__(
        self,
        requests: RequestTable,
        policy: Policy,
        *,
        kv_capacity_tokens: int,
        max_concurrency: int,
        max_num_batched_tokens: int,
        step_s: float,
        block_size: int = 1,
    ) -> None:
        self.policy = policy
        self.clock_s = 0.0
        self.step_index = 0
        self.max_concurrency = max_concurrency
        self.kv_capacity_tokens = kv_capacity_tokens
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_finished = 0
        tree = policy.plan.tree
        self._parent, self._segment = tree.parent, tree.segment
        self._num_users = np.zeros(tree.num_nodes, dtype=np.int32)
        self._node = np.empty(len(requests), dtype=np.int32)
        self._node[tree.requests] = tree.leaf_parent
        own = policy.plan.own_prompt_tokens()
        self._own = own + (requests.prompt_tokens - own) % block_size
        self._empty = block_size // 2
        """tokens of a request's last block, on average"""
        self._max_tokens = requests.max_tokens
        self._state = np.zeros(len(requests), dtype=np.int8)
        self._expected = np.zeros(len(requests))
        """output tokens, as far as memory goes"""
        self._first_expected = np.zeros(len(requests), dtype=np.int32)
        self._admitted_s = np.zeros(len(requests))
        self._admitted_at = np.zeros(len(requests))
        """engine step"""
        self._decodes_from = np.zeros(len(requests))
        """engine step after which a request's prompt is taken to be computed"""
        self._running: dict[int, None] = {}
        self._shared = 0
        """tokens of shared prefixes that running requests have"""
        self._engine_steps = 0.0
        self._prefilled_at = 0.0
        """engine step after which all prompts are taken to be computed"""
        self._filled_at = 0.0
        """engine step of the last tick"""
        self._steps_per_tick = 1.0
        self._pace = np.array([step_s, 1.0])
        """seconds of answers, engine steps that they are taken to have needed"""
        self._admitted: list[int] = []
        self._withdrawn: list[int] = []
        self._held_tokens = self._staying_tokens = 0.0
        self._counts_steps = False
        self._num_staying = 0
        self._ends = np.empty((2, max_concurrency), dtype=np.float64)
        """of requests that stay, the last to end first: tokens to generate still, and private tokens held"""
        policy.start(self)

    # -- what a policy sees (policy.Control) ---------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Requests in the engine."""
        return len(self._running)

    @property
    def num_unfinished(self) -> int:
        """Requests without a result yet."""
        return len(self._state) - self.num_finished

    @property
    def num_waiting(self) -> int:
        """Requests not admitted, never or not again."""
        return self.num_unfinished - self.num_running

    @property
    def waiting_requests(self) -> Ints:
        """[num_waiting] requests not admitted, never or not again."""
        return np.flatnonzero(self._state == WAITING).astype(np.int32)

    @property
    def step_s(self) -> float:
        """Seconds that an engine step is taken to last."""
        return float(self._pace[0] / self._pace[1])

    @property
    def prefill_backlog(self) -> int:
        """Prompt tokens to compute in the engine, per engine step until the next tick."""
        steps = max(self._prefilled_at - self._engine_steps, 0.0)
        return int(steps * self.max_num_batched_tokens / self._steps_per_tick)

    @property
    def kv_committed_tokens(self) -> int:
        """Tokens of KV that running requests have, the shared ones counted once; estimated."""
        return int(self._shared + self._held_tokens)

    @property
    def running_requests(self) -> Ints:
        """[num_running] requests in order of admission."""
        return np.fromiter(self._running, dtype=np.int32, count=len(self._running))

    @property
    def running_output_tokens(self) -> Ints:
        """[num_running] tokens that each has generated; estimated."""
        return self._generated(self.running_requests)

    def admit(
        self, requests: Ints, output_tokens_est: Floats, max_tokens: int, *, look_ahead: bool = True
    ) -> int:
        """Admit requests in order until one does not fit; returns how many are admitted or passed over.

        With `look_ahead` all that run must be expected to fit until they end, and the last may exceed that; without
        it what is held now must fit. A policy that asks for less than a whole step's tokens is held to that, per
        engine step. Whatever is first fits where nothing runs: what can never fit, the engine says itself.
        """
        if self._withdrawn:
            return 0
        limit = max_tokens if max_tokens < self.max_num_batched_tokens else 1 << 62
        for index in range(len(requests)):
            request = int(requests[index])
            if self.num_running + self.prefill_backlog >= limit:
                return index
            if self._state[request] == WAITING and not self._admit(
                request, float(output_tokens_est[request]), look_ahead
            ):
                return index
        return len(requests)

    def retract(self, request: int) -> None:
        """Take a request back from the engine, with what it has generated."""
        self._remove(request)
        self._state[request] = WAITING
        if request in self._admitted:  # it was not sent yet
            self._admitted.remove(request)
        else:
            self._withdrawn.append(request)
        self._count_memory()

    # -- the engine's side ---------------------------------------------------------------------------------------

    def fill(self, now_s: float, engine_steps: int | None = None) -> Changes:
        """Let the policy decide what goes into the engine now.

        Args:
            now_s: time since the run began, on the engine's clock.
            engine_steps: steps of the engine since then; None where they are not seen.

        Raises:
            EngineError: the policy admits nothing although nothing runs.
        """
        self._advance(now_s, engine_steps)
        self._steps_per_tick = max(self._engine_steps - self._filled_at, 1.0)
        self._filled_at = self._engine_steps
        self._count_memory()
        self._admitted, self._withdrawn = [], []
        self.policy.step(self)
        self.step_index += 1
        if not self._running:
            raise EngineError(
                f"policy {self.policy.name} admitted none of {self.num_waiting} waiting requests"
            )
        return Changes(self._admitted, self._withdrawn)

    def finish(
        self, answers: Iterable[tuple[int, int | None]], now_s: float, engine_steps: int | None = None
    ) -> list[int]:
        """Account for (request, output tokens) that the engine has answered; None where they are not known.

        Time and steps are those of `fill`.

        Returns:
            Output tokens that were expected of each when it was first admitted.
        """
        self._advance(now_s, engine_steps)
        requests, lengths = [], []
        for request, output_tokens in answers:
            requests.append(request)
            if output_tokens is None:
                lengths.append(max(int(self._first_expected[request]), 1))  # teaches nothing
            else:
                self._learn_pace(request, output_tokens)
                self._see_prefill_done(request)
                lengths.append(output_tokens)
            self._remove(request)
            self._state[request] = FINISHED
        self.num_finished += len(requests)
        if requests:
            self._count_memory()
            finished = np.array(requests, dtype=np.int32)
            self.policy.finished(
                finished, np.clip(np.array(lengths), 1, self._max_tokens[finished]).astype(np.int32)
            )
        return [int(self._first_expected[request]) for request in requests]

    # -- inside --------------------------------------------------------------------------------------------------

    def _advance(self, now_s: float, engine_steps: int | None) -> None:
        self._counts_steps = engine_steps is not None
        if engine_steps is None:
            self._engine_steps += (now_s - self.clock_s) / self.step_s
        else:
            self._engine_steps = float(engine_steps)
        self.clock_s = now_s

    def _generated(self, requests: Ints) -> Ints:
        passed = self._engine_steps - self._decodes_from[requests]
        return np.clip(passed, 0, self._max_tokens[requests] - 1).astype(np.int32)

    def _count_memory(self) -> None:
        """Sum up what running requests hold and will hold; those that outlive their estimate get a longer one.

        That a request ends in the step under way can be known only where steps are counted, and not of one that is
        late already.
        """
        requests = self.running_requests
        generated = self._generated(requests)
        is_late = generated >= self._expected[requests]
        outlived = requests[is_late]
        longer = OVERRUN_FACTOR * (self._engine_steps - self._decodes_from[outlived])
        self._expected[outlived] = np.clip(longer, 1, self._max_tokens[outlived])
        held = self._own[requests] + self._empty + generated
        self._held_tokens = float(held.sum())
        left = self._expected[requests] - generated
        stays = np.flatnonzero((left > STEPS_UNDER_WAY) | is_late | (not self._counts_steps))
        last_first = stays[np.argsort(-left[stays], kind="stable")]
        self._num_staying = len(stays)
        self._staying_tokens = float(held[stays].sum())
        self._ends[:, : len(stays)] = left[last_first], held[last_first]

    def _admit(self, request: int, output_tokens_est: float, look_ahead: bool) -> bool:
        if self._running:
            if self.num_running >= self.max_concurrency:
                return False
            own, node = int(self._own[request]) + self._empty, self._node[request]
            if look_ahead:
                if self._shared + _peak(self._ends, self._num_staying) > self.kv_capacity_tokens:
                    return False
            else:
                shared = self._shared + int(_missing(self._num_users, self._parent, self._segment, node))
                if shared + self._staying_tokens + own > self.kv_capacity_tokens:
                    return False
        self._place(request, output_tokens_est)
        return True

    def _place(self, request: int, output_tokens_est: float) -> None:
        own = int(self._own[request])
        new = int(_use(self._num_users, self._parent, self._segment, self._node[request]))
        self._shared += new
        self._held_tokens += own + self._empty
        self._staying_tokens += own + self._empty
        _insert(self._ends, self._num_staying, output_tokens_est, own + self._empty)
        self._num_staying += 1
        self._state[request] = RUNNING
        self._running[request] = None
        self._expected[request] = output_tokens_est
        if self._first_expected[request] == 0:
            self._first_expected[request] = round(output_tokens_est)
        self._admitted_s[request], self._admitted_at[request] = self.clock_s, self._engine_steps
        start = max(self._prefilled_at, self._engine_steps)
        self._prefilled_at = start + max(own + new, 1) / self.max_num_batched_tokens
        self._decodes_from[request] = self._prefilled_at
        self._admitted.append(request)

    def _remove(self, request: int) -> None:
        del self._running[request]
        self._shared -= int(_leave(self._num_users, self._parent, self._segment, self._node[request]))

    def _learn_pace(self, request: int, output_tokens: int) -> None:
        """From an answer of so many tokens: how long engine steps are."""
        took_s = max(self.clock_s - self._admitted_s[request], 1e-4)
        modelled = self._decodes_from[request] - self._admitted_at[request] + output_tokens
        self._pace = PACE_MEMORY * self._pace + (took_s, max(modelled, 1.0))

    def _see_prefill_done(self, request: int) -> None:
        """From an answer: which prompts are computed."""
        early = self._decodes_from[request] - self._engine_steps
        if early > 0:
            running = self.running_requests
            behind = running[self._decodes_from[running] > self._engine_steps]
            self._decodes_from[behind] -= early
            self._prefilled_at -= early


@numba.njit(cache=True, nogil=True)
def _peak(ends, count):  # type: ignore[no-untyped-def]
    """Most private tokens that the `count` requests of `ends` hold at any time, if none comes after.

    When a request ends, those that end later are all that there is, each longer by the steps until then.
    """
    peak = total = 0.0
    for i in range(count):
        total += ends[1, i]
        peak = max(peak, total + (i + 1) * ends[0, i])
    return peak


@numba.njit(cache=True, nogil=True)
def _insert(ends, count, left, held):  # type: ignore[no-untyped-def]
    """Add a request to `ends`, which has `count`."""
    place = count
    while place > 0 and ends[0, place - 1] < left:
        ends[0, place], ends[1, place] = ends[0, place - 1], ends[1, place - 1]
        place -= 1
    ends[0, place], ends[1, place] = left, held


@numba.njit(cache=True, nogil=True)
def _missing(num_users, parent, segment, node):  # type: ignore[no-untyped-def]
    """Tokens of a node's path that no running request has."""
    missing = 0
    while node >= 0 and num_users[node] == 0:
        missing += segment[node]
        node = parent[node]
    return missing


@numba.njit(cache=True, nogil=True)
def _use(num_users, parent, segment, node):  # type: ignore[no-untyped-def]
    """Count a user of every node of a path; returns the tokens that had none."""
    added = 0
    while node >= 0:
        if num_users[node] == 0:
            added += segment[node]
        num_users[node] += 1
        node = parent[node]
    return added


@numba.njit(cache=True, nogil=True)
def _leave(num_users, parent, segment, node):  # type: ignore[no-untyped-def]
    """Undo `_use`; returns the tokens that have no user any more."""
    freed = 0
    while node >= 0:
        num_users[node] -= 1
        if num_users[node] == 0:
            freed += segment[node]
        node = parent[node]
    return freed
