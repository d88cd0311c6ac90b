"""Continuous batching with chunked prefill over a shared-prefix KV cache. Holds no tensor.

There are no phases: a sequence has `num_tokens` known tokens (prompt, then generated ones) of which `num_computed` have
KV, and every step lets `num_computed` catch up. Prefill, a later chunk of it, decode and recomputation after a
retraction are the same case. State is structure-of-arrays, one *slot* per running sequence, and the loops over slots
are compiled, because the same code drives real engines and simulates millions of steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from blendserve.cost_model import CostModel
from blendserve.errors import ConfigError, EngineError
from blendserve.planner.prefix_tree import Ints, PrefixTree
from blendserve.request import RequestTable
from blendserve.scheduling import kv_cache
from blendserve.scheduling.batch import Batch
from blendserve.scheduling.kv_cache import (
    NONE,
    NUM_BLOCKS,
    NUM_FREE,
    PINNED,
    PRIVATE,
    Count,
    KVArrays,
    KVState,
)
from blendserve.scheduling.policy import OVERRUN_FACTOR, Floats, Policy

BUCKET_STEPS = 16
"""resolution of the memory projection, steps"""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step; names and meaning are vLLM's."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    free_unused_prefixes: bool = True
    """free a prefix as soon as no unfinished request of the job can use it, instead of leaving it to LRU eviction"""


class _Requests(NamedTuple):
    """State of all requests as columns."""

    prompt: Ints
    """prompt tokens"""
    generated: Ints
    """tokens it had generated when it was retracted"""
    accounted: Ints
    """leading tokens that it computed, or found in the cache, before it was retracted"""
    state: Ints
    """a `_State`"""
    num_cached: Ints
    """prompt tokens found in the cache"""
    expected: Ints
    """output tokens that were expected when it was first admitted"""


class Finished(NamedTuple):
    """What is known of a request that has finished."""

    request: int
    num_cached_tokens: int
    """prompt tokens it found in the cache"""
    output_tokens_est: int
    """output tokens that were expected when it was first admitted"""


class _State(IntEnum):
    WAITING = 0
    RUNNING = 1
    FINISHED = 2


class _Counter(IntEnum):
    """Numbers that compiled code changes."""

    NUM_RUNNING = 0
    BACKLOG = 1
    """tokens to compute before all running sequences decode"""


WAITING, RUNNING, FINISHED = int(_State.WAITING), int(_State.RUNNING), int(_State.FINISHED)
NUM_RUNNING, BACKLOG = int(_Counter.NUM_RUNNING), int(_Counter.BACKLOG)


class _Sequences(NamedTuple):
    """Running sequences as columns, by slot."""

    running: Ints
    """[max_num_seqs] slots in order of admission; the first `num_running` count"""
    request: Ints
    """-1 where the slot is free"""
    prompt: Ints
    """prompt tokens"""
    num_tokens: Ints
    num_computed: Ints
    block_limit: Ints
    """leading blocks of the sequence that lie in nodes; later ones are private"""
    path: Ints
    """[max_num_seqs, longest path] nodes, root first"""
    path_length: Ints
    level: Ints
    """the first node of the path that is not filled entirely"""
    private_head: Ints
    private_tail: Ints
    private_length: Ints
    """private blocks held"""
    private_committed: Ints
    accounted: Ints
    """leading tokens that were there before a retraction: finding them again is not a cache hit"""
    projected_from: Ints
    """step at which the sequence's memory projection starts; -1 if it has none"""
    projected_tokens: Ints
    """private tokens at that step"""
    projected_until: Ints
    free_slots: Ints
    """a stack: the last `max_num_seqs - num_running` count, the top first"""


class _Arrays(NamedTuple):
    """All state that compiled code works on."""

    kv: KVArrays
    counters: NDArray[np.int64]
    """by `_Counter`"""
    requests: Ints
    """[6, num_requests] the columns of `_Requests`"""
    slots: Ints
    """[17, max_num_seqs] the columns of `_Sequences` without `path`"""
    path: Ints
    projection: NDArray[np.float64]
    """private KV tokens expected in each of the next buckets of steps, a ring"""
    block_tables: Ints
    counted: NDArray[np.int64]
    """[num_nodes] last step in which the node was counted for the prefill backlog"""


class _Packed(NamedTuple):
    """The same, few arrays: each one handed to compiled code costs time, parts of one do not."""

    ints: Ints
    longs: NDArray[np.int64]
    projection: NDArray[np.float64]
    block_tables: Ints


NUM_INT_PARTS = 6
COUNTS_START = 3 * NUM_INT_PARTS + 1
"""before it `longs` has where in `ints` each part begins and the last one ends, then rows and columns of each"""
COUNTERS_START = COUNTS_START + len(Count)
COUNTED_START = COUNTERS_START + len(_Counter)


def _pack(arrays: _Arrays) -> _Packed:
    kv = arrays.kv
    parts = (kv.next_block, kv.leaf, kv.nodes, arrays.requests, arrays.slots, arrays.path)
    starts = np.cumsum([0, *(part.size for part in parts)])
    shapes = [(1, *part.shape)[-2:] for part in parts]
    return _Packed(
        np.concatenate([part.ravel() for part in parts]),
        np.concatenate((starts, np.transpose(shapes).ravel(), kv.counts, arrays.counters, arrays.counted)),
        arrays.projection,
        arrays.block_tables,
    )


@numba.njit(cache=True, nogil=True, inline="always")
def _unpacked(packed):  # type: ignore[no-untyped-def]
    """Views of all parts."""
    ints, longs = kv_cache.uncounted(packed.ints), kv_cache.uncounted(packed.longs)
    starts = longs[: NUM_INT_PARTS + 1]
    rows, columns = longs[NUM_INT_PARTS + 1 :], longs[2 * NUM_INT_PARTS + 1 :]
    return _Arrays(
        KVArrays(
            ints[: starts[1]],
            longs[COUNTS_START:COUNTERS_START],
            ints[starts[1] : starts[2]],
            ints[starts[2] : starts[3]].reshape(rows[2], columns[2]),
        ),
        longs[COUNTERS_START:COUNTED_START],
        ints[starts[3] : starts[4]].reshape(rows[3], columns[3]),
        ints[starts[4] : starts[5]].reshape(rows[4], columns[4]),
        ints[starts[5] : starts[6]].reshape(rows[5], columns[5]),
        kv_cache.uncounted(packed.projection),
        kv_cache.uncounted(packed.block_tables),
        longs[COUNTED_START:],
    )


@numba.njit(cache=True, nogil=True, inline="always")
def _sequences(arrays):  # type: ignore[no-untyped-def]
    slots = kv_cache.uncounted(arrays.slots)
    return _Sequences(
        slots[0],
        slots[1],
        slots[2],
        slots[3],
        slots[4],
        slots[5],
        kv_cache.uncounted(arrays.path),
        slots[6],
        slots[7],
        slots[8],
        slots[9],
        slots[10],
        slots[11],
        slots[12],
        slots[13],
        slots[14],
        slots[15],
        slots[16],
    )


@numba.njit(cache=True, nogil=True, inline="always")
def _requests(arrays):  # type: ignore[no-untyped-def]
    columns = kv_cache.uncounted(arrays.requests)
    return _Requests(columns[0], columns[1], columns[2], columns[3], columns[4], columns[5])


class Scheduler:
    """Decides what each step computes. Implements `policy.Control`, through which the policy steers it.

    Usage: while `has_work`: `batch = schedule()`, run it, `update(batch, finished, duration_s)`.

    Args:
        requests: the job; every prompt plus `max_tokens` fits `max_model_len`.
        policy: made for a plan of these requests; order of admission, token target per step, choice of whom to retract.
        config: limits.
        num_blocks: KV blocks of the device.
        block_size: tokens per block.
        max_model_len: most tokens of one sequence; at most `num_blocks * block_size`.
        with_block_tables: whether batches carry block tables (executors that hold KV need them).
        cost_model: what a step costs on this engine.

    Raises:
        ConfigError: limits that cannot work together.
    """

    def __init__(
        self,
        requests: RequestTable,
        policy: Policy,
        config: SchedulerConfig,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        with_block_tables: bool,
        cost_model: CostModel,
    ) -> None:
        if config.max_num_batched_tokens < block_size:
            raise ConfigError(
                f"--max-num-batched-tokens {config.max_num_batched_tokens} is below the block size {block_size}; "
                "raise it"
            )
        longest = int((requests.prompt_tokens + requests.max_tokens).max(initial=0))
        if longest > num_blocks * block_size:
            raise ConfigError(
                f"a request needs {longest} tokens of KV cache, the engine has {num_blocks * block_size}; "
                "give it more KV memory or lower max_tokens"
            )
        self.policy = policy
        self.config = config
        self.cost_model = cost_model
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_finished = 0
        self.num_retracted = 0
        self.num_retracted_in_step = 0
        self.step_index = 0
        self.clock_s = 0.0
        self._num_requests = len(requests)
        self._is_admitting = True
        tree = PrefixTree.build_blocks(policy.plan.prompt_order, requests.prompt_tokens, block_size)
        num_slots = min(config.max_num_seqs, max(len(requests), 1))
        max_blocks = -(-max_model_len // block_size) if with_block_tables else 0
        horizon = int(requests.max_tokens.max(initial=1) * OVERRUN_FACTOR) // BUCKET_STEPS + 3
        kv_arrays = kv_cache.make_kv_arrays(tree, num_blocks, with_links=with_block_tables)
        arrays = _Arrays(
            kv=kv_arrays,
            counters=np.zeros(len(_Counter), dtype=np.int64),
            requests=np.zeros((6, len(requests)), dtype=np.int32),
            slots=np.zeros((17, num_slots), dtype=np.int32),
            path=np.zeros((num_slots, max(kv_cache.longest_path(kv_arrays.nodes[0]), 1)), dtype=np.int32),
            projection=np.zeros(horizon),
            block_tables=np.zeros((num_slots, max_blocks), dtype=np.int32),
            counted=np.full(kv_arrays.nodes.shape[1], -1, dtype=np.int64),
        )
        self._packed = _pack(arrays)
        self._arrays: _Arrays = _unpacked.py_func(self._packed)
        self._kv: KVState = kv_cache.kv_view.py_func(self._arrays.kv)
        self._seqs: _Sequences = _sequences.py_func(self._arrays)
        for column in (self._seqs.request, self._seqs.private_head, self._seqs.private_tail):
            column[:] = NONE
        self._seqs.projected_from[:] = -1
        self._seqs.free_slots[:] = np.arange(num_slots)
        self._table: _Requests = _requests.py_func(self._arrays)
        self._table.prompt[:] = requests.prompt_tokens
        self._counters = self._arrays.counters
        policy.start(self)

    # -- what a policy sees (policies.Control) -------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Sequences that hold memory."""
        return int(self._counters[NUM_RUNNING])

    @property
    def num_unfinished(self) -> int:
        """Requests without a result yet."""
        return self._num_requests - self.num_finished

    @property
    def has_work(self) -> bool:
        """Whether a batch can be formed: something is unfinished or, if nothing more is admitted, still runs."""
        return (self.num_unfinished if self._is_admitting else self.num_running) > 0

    @property
    def num_waiting(self) -> int:
        """Requests not admitted, never or not again."""
        return self.num_unfinished - self.num_running

    @property
    def kv_capacity_tokens(self) -> int:
        """M: tokens of KV that fit."""
        return self.num_blocks * self.block_size

    @property
    def kv_committed_tokens(self) -> int:
        """Tokens of KV that the running sequences hold or are sure to need for the tokens they have."""
        return int(self._kv.counts[PINNED] + self._kv.counts[PRIVATE]) * self.block_size

    @property
    def kv_usage_ratio(self) -> float:
        """Share of the KV memory in use by running sequences."""
        return self.kv_committed_tokens / self.kv_capacity_tokens

    @property
    def max_num_batched_tokens(self) -> int:
        """Most tokens of a step."""
        return self.config.max_num_batched_tokens

    @property
    def prefill_backlog(self) -> int:
        """Tokens that the admitted sequences have yet to compute before all of them decode."""
        return int(self._counters[BACKLOG])

    @property
    def running_requests(self) -> Ints:
        """[num_running] requests in order of admission."""
        return self._seqs.request[self._seqs.running[: self.num_running]]

    @property
    def running_output_tokens(self) -> Ints:
        """[num_running] tokens each running request has generated so far."""
        slots = self._seqs.running[: self.num_running]
        return self._seqs.num_tokens[slots] - self._seqs.prompt[slots]

    def admit(
        self, requests: Ints, output_tokens_est: Floats, max_tokens: int, *, look_ahead: bool = True
    ) -> int:
        """Admit requests in the given order until one does not fit or the next step has `max_tokens` tokens to compute.

        A request fits if a slot is free, its known tokens can be committed now, and, with `look_ahead`, the projected
        memory of everything running, this request included, stays within the device until it is expected to end. When
        nothing runs, only the first two count, so that a pessimistic estimate cannot stop the job. Nothing is admitted
        in a step that had to retract.

        Args:
            requests: candidates; those that run or have finished are passed over.
            output_tokens_est: [num_requests] expected output of every request.
            max_tokens: of the next step, decodes included.
            look_ahead: see above.

        Returns:
            How many of the candidates are settled: admitted, or passed over.
        """
        if self.num_retracted_in_step:
            return 0
        return int(
            _admit_leading(
                self._packed,
                requests,
                output_tokens_est,
                max_tokens,
                look_ahead,
                self.step_index,
                self.block_size,
            )
        )

    def retract(self, request: int) -> None:
        """Take a running request's memory back; it waits again and recomputes what it had, output included."""
        slots = self._seqs.running[: self.num_running]
        slot = int(slots[self._seqs.request[slots] == request][0])
        self._table.generated[request] = self._seqs.num_tokens[slot] - self._seqs.prompt[slot]
        self._table.accounted[request] = max(self._table.accounted[request], self._seqs.num_computed[slot])
        _release(self._arrays, slot, False, self.config.free_unused_prefixes, self.step_index)
        self.num_retracted += 1
        self.num_retracted_in_step += 1

    # -- the engine's side ---------------------------------------------------------------------------------------

    def stop_admitting(self) -> None:
        """Let what runs end and admit nothing more; what is retracted from now on stays unfinished."""
        self._is_admitting = False

    def schedule(self) -> Batch:
        """Form the next batch: make room for decodes, let the policy admit, hand out tokens.

        Raises:
            EngineError: the policy admits nothing although nothing runs.
        """
        self.num_retracted_in_step = 0
        # Before anything is admitted, so that no admission takes what the next tokens of running sequences need.
        while not _begin_step(self._packed, self.step_index, self.block_size):
            victim = self.policy.choose_victim(self)
            self.retract(victim)
            self.policy.retracted(victim, int(self._table.generated[victim]))
        target = self.policy.step(self) if self._is_admitting else self.config.max_num_batched_tokens
        num_running = self.num_running
        if num_running == 0:
            raise EngineError(
                f"policy {self.policy.name} admitted none of {self.num_waiting} waiting requests"
            )
        target = min(max(target, self.block_size), self.config.max_num_batched_tokens)
        columns = np.empty((4, num_running), dtype=np.int32)
        samples = np.empty(num_running, dtype=np.bool_)
        num_rows, num_prefill, num_decode, kv_read, pairs = _form_batch(
            self._packed, target, self.block_size, columns, samples
        )
        assert num_rows > 0, "a step with running sequences computed nothing"
        return Batch(
            slots=columns[0, :num_rows],
            requests=columns[1, :num_rows],
            num_computed=columns[2, :num_rows],
            num_tokens=columns[3, :num_rows],
            samples=samples[:num_rows],
            block_tables=self._arrays.block_tables,
            num_prefill_tokens=num_prefill,
            num_decode_tokens=num_decode,
            kv_tokens_read=kv_read,
            query_key_pairs=pairs,
        )

    def update(self, batch: Batch, finished: NDArray[np.bool_], duration_s: float) -> list[Finished]:
        """Account for a batch that was run.

        Args:
            batch: as returned by `schedule`.
            finished: [num_rows] rows whose sequence is complete (or failed).
            duration_s: time the step took, on the engine's clock.

        Returns:
            The requests that finished.
        """
        self.clock_s += duration_s
        self.step_index += 1
        num_done, done = _update(
            self._packed,
            batch.slots,
            batch.num_tokens,
            batch.samples,
            finished,
            self.config.free_unused_prefixes,
            self.step_index,
            self.block_size,
        )
        if num_done == 0:
            return []
        requests, output_tokens, num_cached, expected = done[:, :num_done]
        self.num_finished += num_done
        self.policy.finished(requests, output_tokens)
        return [*map(Finished, requests.tolist(), num_cached.tolist(), expected.tolist())]

    def check_conservation(self) -> None:
        """Raise AssertionError unless blocks, counters and sequences agree; for tests, O(blocks)."""
        slots = self._seqs.running[: self.num_running]
        assert len(set(slots.tolist())) == self.num_running
        free = self._seqs.free_slots[self.num_running :]
        assert sorted((*slots.tolist(), *free.tolist())) == list(range(len(self._seqs.request)))
        kv_cache.check_conservation(
            self._kv, self._seqs.private_head[slots], self._seqs.private_length[slots]
        )
        assert self._seqs.private_committed[slots].sum() == self._kv.counts[PRIVATE]
        refs = np.zeros_like(self._kv.refs)
        for slot in slots:
            np.add.at(refs, self._seqs.path[slot, : self._seqs.path_length[slot]], 1)
        assert (refs[1:] == self._kv.refs[1:]).all(), "references do not match running sequences"

    def block_counts(self) -> dict[str, int]:
        """Blocks by use: free, evictable, pinned, private; for reports."""
        return {
            "free": int(self._kv.counts[NUM_FREE]),
            "evictable": int(self._kv.counts[Count.EVICTABLE]),
            "pinned": int(self._kv.counts[PINNED]),
            "private": int(self._kv.counts[PRIVATE]),
        }


# -- memory projection: a ring of buckets of BUCKET_STEPS steps, private KV tokens expected in each ------------------


@numba.njit(cache=True, nogil=True)
def _project(projection, start, tokens, until, now, sign):  # type: ignore[no-untyped-def]
    """Add (or take away) a sequence that holds `tokens` at step `start` and one more per step up to `until`."""
    first = max(start, now) // BUCKET_STEPS
    last = min(until // BUCKET_STEPS, now // BUCKET_STEPS + len(projection) - 1)
    for bucket in range(first, last + 1):
        at_end = min((bucket + 1) * BUCKET_STEPS, until)
        projection[bucket % len(projection)] += sign * (tokens + at_end - start)


@numba.njit(cache=True, nogil=True)
def _projected_peak(projection, tokens, until, now):  # type: ignore[no-untyped-def]
    """Most private tokens at any time until step `until` if a sequence with `tokens` now is added."""
    first = now // BUCKET_STEPS
    last = min(until // BUCKET_STEPS, first + len(projection) - 1)
    peak = 0.0
    for bucket in range(first, last + 1):
        at_end = min((bucket + 1) * BUCKET_STEPS, until)
        peak = max(peak, projection[bucket % len(projection)] + tokens + at_end - now)
    return peak


@numba.njit(cache=True, nogil=True)
def _start_projection(seqs, projection, slot, output_left, now, block_size):  # type: ignore[no-untyped-def]
    held = seqs.num_tokens[slot] - seqs.block_limit[slot] * block_size
    tokens = -(-held // block_size) * block_size
    longest = (len(projection) - 2) * BUCKET_STEPS
    until = now + min(np.int64(np.ceil(output_left)), longest)
    seqs.projected_from[slot], seqs.projected_tokens[slot], seqs.projected_until[slot] = now, tokens, until
    _project(projection, now, tokens, until, now, 1.0)


@numba.njit(cache=True, nogil=True)
def _stop_projection(seqs, projection, slot, now):  # type: ignore[no-untyped-def]
    if seqs.projected_from[slot] >= 0:
        _project(
            projection,
            seqs.projected_from[slot],
            seqs.projected_tokens[slot],
            seqs.projected_until[slot],
            now,
            -1.0,
        )
        seqs.projected_from[slot] = -1


# -- admission and release -------------------------------------------------------------------------------------------


@numba.njit(cache=True, nogil=True)
def _admit_leading(packed, candidates, output_est, max_tokens, look_ahead, now, block_size):  # type: ignore[no-untyped-def]
    """See `Scheduler.admit`."""
    arrays = _unpacked(packed)
    table, counters = _requests(arrays), arrays.counters
    for i in range(len(candidates)):
        if counters[BACKLOG] + counters[NUM_RUNNING] >= max_tokens:
            return i
        request = candidates[i]
        if table.state[request] == WAITING and not _admit(
            arrays, request, output_est[request], look_ahead, now, block_size
        ):
            return i
    return len(candidates)


@numba.njit(cache=True, nogil=True)
def _admit(arrays, request, output_est, look_ahead, now, block_size):  # type: ignore[no-untyped-def]
    """Admit a request if it fits."""
    kv, seqs, table = kv_cache.kv_view(arrays.kv), _sequences(arrays), _requests(arrays)
    num_running = arrays.counters[NUM_RUNNING]
    if num_running == len(seqs.running):
        return False
    prompt, generated = table.prompt[request], table.generated[request]
    num_tokens = prompt + generated
    limit = (prompt - 1) // block_size
    private = -(-num_tokens // block_size) - limit
    pinned = kv.counts[PINNED] + kv_cache.blocks_to_pin(kv, request)
    num_blocks = kv.counts[NUM_BLOCKS]
    if pinned + kv.counts[PRIVATE] + private > num_blocks:
        return False
    left = output_est - generated
    if left < 1.0:
        left = max(1.0, (OVERRUN_FACTOR - 1.0) * generated)
    if look_ahead and num_running > 0:
        until = now + np.int64(np.ceil(left))
        if (
            _projected_peak(arrays.projection, private * block_size, until, now)
            > (num_blocks - pinned) * block_size
        ):
            return False
    slot = seqs.free_slots[num_running]
    seqs.running[num_running] = slot
    seqs.request[slot] = request
    seqs.prompt[slot] = prompt
    seqs.num_tokens[slot] = num_tokens
    seqs.num_computed[slot] = 0
    seqs.block_limit[slot] = limit
    seqs.path_length[slot] = kv_cache.acquire_path(kv, request, seqs.path[slot])
    seqs.level[slot] = 0
    seqs.private_head[slot] = seqs.private_tail[slot] = NONE
    seqs.private_length[slot] = 0
    seqs.private_committed[slot] = private
    kv.counts[PRIVATE] += private
    seqs.accounted[slot] = table.accounted[request]
    table.state[request] = RUNNING
    if table.expected[request] == 0:
        table.expected[request] = np.int32(output_est + 0.5)
    arrays.counters[NUM_RUNNING] += 1
    _start_projection(seqs, arrays.projection, slot, left, now, block_size)
    arrays.counters[BACKLOG] += _uncomputed(kv, seqs, arrays.counted, slot, now, block_size)
    return True


@numba.njit(cache=True, nogil=True)
def _release(arrays, slot, finished, free_when_unused, now):  # type: ignore[no-untyped-def]
    """Take a sequence out of its slot."""
    kv, seqs, table = kv_cache.kv_view(arrays.kv), _sequences(arrays), _requests(arrays)
    num_running = arrays.counters[NUM_RUNNING]
    table.state[seqs.request[slot]] = FINISHED if finished else WAITING
    kv_cache.free_chain(kv, seqs.private_head[slot], seqs.private_tail[slot], seqs.private_length[slot])
    kv.counts[PRIVATE] -= seqs.private_committed[slot]
    kv_cache.release_path(kv, seqs.path[slot], seqs.path_length[slot], finished, free_when_unused)
    _stop_projection(seqs, arrays.projection, slot, now)
    seqs.request[slot] = -1
    seqs.private_head[slot] = seqs.private_tail[slot] = NONE
    seqs.private_length[slot] = seqs.private_committed[slot] = 0
    kept = 0
    for i in range(num_running):
        if seqs.running[i] != slot:
            seqs.running[kept] = seqs.running[i]
            kept += 1
    seqs.free_slots[kept] = slot
    arrays.counters[NUM_RUNNING] = kept


@numba.njit(cache=True, nogil=True)
def _uncomputed(kv, seqs, counted, slot, now, block_size):  # type: ignore[no-untyped-def]
    """Tokens the sequence has to compute, leaving out nodes counted for another sequence in this step."""
    tokens = seqs.num_tokens[slot] - max(seqs.num_computed[slot], seqs.block_limit[slot] * block_size)
    for level in range(seqs.level[slot], seqs.path_length[slot]):
        node = seqs.path[slot, level]
        if counted[node] != now:
            counted[node] = now
            ahead = max(kv.filled[node] * block_size, seqs.num_computed[slot] - kv.start[node] * block_size)
            tokens += max(kv.size[node] * block_size - ahead, 0)
    return tokens


# -- one step --------------------------------------------------------------------------------------------------------


@numba.njit(cache=True, nogil=True)
def _begin_step(packed, now, block_size):  # type: ignore[no-untyped-def]
    """Make room for the next tokens of decoding sequences and count what the others have to compute; False: no room."""
    arrays = _unpacked(packed)
    if not _commit_decodes(arrays, block_size):
        return False
    kv, seqs = kv_cache.kv_view(arrays.kv), _sequences(arrays)
    backlog = 0
    for i in range(arrays.counters[NUM_RUNNING]):
        slot = seqs.running[i]
        if seqs.num_computed[slot] < seqs.num_tokens[slot] - 1:
            backlog += _uncomputed(kv, seqs, arrays.counted, slot, now, block_size)
    arrays.counters[BACKLOG] = backlog
    return True


@numba.njit(cache=True, nogil=True)
def _commit_decodes(arrays, block_size):  # type: ignore[no-untyped-def]
    """Commit blocks for the next token of every decoding sequence; if they do not fit, change nothing: False."""
    kv, seqs = kv_cache.kv_view(arrays.kv), _sequences(arrays)
    num_running = arrays.counters[NUM_RUNNING]
    growth = 0
    for commit in (False, True):
        if commit:
            if kv.counts[PINNED] + kv.counts[PRIVATE] + growth > kv.counts[NUM_BLOCKS]:
                return False
            kv.counts[PRIVATE] += growth
        for i in range(num_running):
            slot = seqs.running[i]
            if seqs.num_computed[slot] == seqs.num_tokens[slot] - 1:
                needed = -(-seqs.num_tokens[slot] // block_size) - seqs.block_limit[slot]
                if needed > seqs.private_committed[slot]:
                    if commit:
                        seqs.private_committed[slot] = needed
                    else:
                        growth += needed - seqs.private_committed[slot]
    return True


@numba.njit(cache=True, nogil=True)
def _catch_up(kv, seqs, block_tables, num_cached, slot, block_size):  # type: ignore[no-untyped-def]
    """Skip what others have computed (or compute earlier in this batch) of the sequence's path."""
    while seqs.level[slot] < seqs.path_length[slot]:
        node = seqs.path[slot, seqs.level[slot]]
        done = seqs.num_computed[slot] // block_size - kv.start[node]
        filled = kv.filled[node]
        if filled > done:
            if block_tables.shape[1] > 0:
                block = kv.head[node]
                if done > 0:
                    block = kv.next_block[block_tables[slot, kv.start[node] + done - 1]]
                for i in range(done, filled):
                    block_tables[slot, kv.start[node] + i] = block
                    block = kv.next_block[block]
            reached = (kv.start[node] + filled) * block_size
            known = max(seqs.num_computed[slot], seqs.accounted[slot])
            num_cached[seqs.request[slot]] += max(reached - known, 0)
            seqs.num_computed[slot] = reached
        if filled < kv.size[node]:
            break
        seqs.level[slot] += 1


@numba.njit(cache=True, nogil=True)
def _allocate(kv, seqs, block_tables, slot, first, end):  # type: ignore[no-untyped-def]
    """Get blocks number `first` to `end` of a sequence."""
    limit = seqs.block_limit[slot]
    level = seqs.level[slot]
    index = first
    while index < min(end, limit):
        node = seqs.path[slot, level]
        node_end = min(kv.start[node] + kv.size[node], end)
        if len(kv.next_block) == 0 and node_end > index:
            kv_cache.count_blocks_out(kv, node_end - index)
            kv.allocated[node] += node_end - index
        else:
            for i in range(index, node_end):
                block_tables[slot, i] = kv_cache.extend_node(kv, node)
        index = max(index, node_end)
        level += 1
    if index >= end:
        return
    if len(kv.next_block) == 0:
        kv_cache.count_blocks_out(kv, end - index)
    else:
        for i in range(index, end):
            block = kv_cache.take_block(kv)
            if seqs.private_head[slot] < 0:
                seqs.private_head[slot] = block
            else:
                kv.next_block[seqs.private_tail[slot]] = block
            seqs.private_tail[slot] = block
            block_tables[slot, i] = block
    seqs.private_length[slot] += end - index


@numba.njit(cache=True, nogil=True)
def _mark_filled(kv, seqs, slot, end, block_size):  # type: ignore[no-untyped-def]
    """Let others use the blocks of the sequence's path up to token `end`."""
    full = end // block_size
    for level in range(seqs.level[slot], seqs.path_length[slot]):
        node = seqs.path[slot, level]
        if full <= kv.start[node]:
            break
        kv.filled[node] = max(kv.filled[node], min(full - kv.start[node], kv.size[node]))


@numba.njit(cache=True, nogil=True)
def _chunk_end(kv, seqs, slot, end, block_size):  # type: ignore[no-untyped-def]
    """Cut a chunk that would end inside a shared block down to the block's start.

    Only whole blocks of a shared node are handed on; half of one would be computed twice by whoever comes next.
    """
    if end >= seqs.block_limit[slot] * block_size or end % block_size == 0:
        return end
    index = end // block_size
    for level in range(seqs.level[slot], seqs.path_length[slot]):
        node = seqs.path[slot, level]
        if index < kv.start[node] + kv.size[node]:
            return index * block_size if kv.shared[node] else end
    return end


@numba.njit(cache=True, nogil=True)
def _form_batch(packed, target, block_size, columns, samples):  # type: ignore[no-untyped-def]
    """Hand out `target` tokens: one to every decoding sequence first, the rest to prefills in order of admission.

    Writes the batch's columns (slot, request, num_computed, num_tokens) and `samples`; returns the number of rows and
    the batch's totals.
    """
    arrays = _unpacked(packed)
    kv, seqs = kv_cache.kv_view(arrays.kv), _sequences(arrays)
    block_tables, num_cached = kv_cache.uncounted(arrays.block_tables), _requests(arrays).num_cached
    num_running = arrays.counters[NUM_RUNNING]
    budget = target
    rows = 0
    num_decode = 0
    kv_read = 0
    for i in range(num_running):
        slot = seqs.running[i]
        computed = seqs.num_computed[slot]
        if computed != seqs.num_tokens[slot] - 1 or computed < seqs.prompt[slot]:
            continue
        if budget == 0:
            break
        if computed % block_size == 0:
            _allocate(kv, seqs, block_tables, slot, computed // block_size, computed // block_size + 1)
        columns[0, rows], columns[1, rows] = slot, seqs.request[slot]
        columns[2, rows], columns[3, rows] = computed, 1
        samples[rows] = True
        rows += 1
        budget -= 1
        num_decode += 1
        kv_read += computed + 1
    num_prefill = 0
    pairs = 0.0
    for i in range(num_running):
        if budget == 0:
            break
        slot = seqs.running[i]
        num_tokens = seqs.num_tokens[slot]
        if seqs.num_computed[slot] == num_tokens - 1 and num_tokens > seqs.prompt[slot]:
            continue
        _catch_up(kv, seqs, block_tables, num_cached, slot, block_size)
        computed = seqs.num_computed[slot]
        end = _chunk_end(kv, seqs, slot, min(num_tokens, computed + budget), block_size)
        if end <= computed:
            continue
        _allocate(kv, seqs, block_tables, slot, -(-computed // block_size), -(-end // block_size))
        _mark_filled(kv, seqs, slot, end, block_size)
        columns[0, rows], columns[1, rows] = slot, seqs.request[slot]
        columns[2, rows], columns[3, rows] = computed, end - computed
        samples[rows] = end == num_tokens
        rows += 1
        budget -= end - computed
        num_prefill += end - computed
        pairs += (end - computed) * (computed + (end - computed + 1) / 2)
    return rows, num_prefill, num_decode, kv_read, pairs


@numba.njit(cache=True, nogil=True)
def _update(packed, slots, num_tokens, samples, finished, free_when_unused, now, block_size):  # type: ignore[no-untyped-def]
    """Release what has finished, move the counters of the rest on.

    Returns how many have finished, and [4, num_rows] whose leading columns tell their request, output tokens, prompt
    tokens found in the cache, and output tokens expected.
    """
    arrays = _unpacked(packed)
    seqs, table, projection = _sequences(arrays), _requests(arrays), arrays.projection
    if now % BUCKET_STEPS == 0:  # the bucket just left becomes the farthest one
        projection[(now // BUCKET_STEPS - 1) % len(projection)] = 0.0
    done = np.empty((4, len(slots)), np.int32)
    num_done = 0
    for row in range(len(slots)):
        slot = slots[row]
        if finished[row]:
            request = seqs.request[slot]
            done[0, num_done] = request
            done[1, num_done] = seqs.num_tokens[slot] - seqs.prompt[slot] + samples[row]
            done[2, num_done] = table.num_cached[request]
            done[3, num_done] = table.expected[request]
            num_done += 1
            _release(arrays, slot, True, free_when_unused, now)
            continue
        seqs.num_computed[slot] += num_tokens[row]
        if not samples[row]:
            continue
        seqs.num_tokens[slot] += 1
        generated = seqs.num_tokens[slot] - seqs.prompt[slot]
        # Where the memory projection proved wrong, correct it.
        if num_tokens[row] > 1 or generated == 1:  # prefill has ended only now
            left = seqs.projected_until[slot] - seqs.projected_from[slot]
        elif now >= seqs.projected_until[slot]:
            left = max(OVERRUN_FACTOR * generated - generated, np.float64(BUCKET_STEPS))
        else:
            continue
        _stop_projection(seqs, projection, slot, now)
        _start_projection(seqs, projection, slot, left, now, block_size)
    return num_done, done
