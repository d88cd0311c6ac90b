"""The default policy: feedback on the KV actually read, instead of the paper's static division of memory.

RIGHT are requests less dense than the whole job: long outputs that read much KV. They are admitted, longest first,
whenever their *expected* memory over time fits beside what LEFT needs. LEFT are the others: they supply each step with
as many tokens to compute as balance the KV that RIGHT reads. The division, and every quantity it rests on, is renewed
as the job goes on; see docs/policy.md.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from blendserve.planner.declared_lengths import ALIVE, SQUARE, TOKENS, VALUE, DeclaredLengths, first_end
from blendserve.planner.length_curves import LengthCurves, age_index
from blendserve.planner.plan import Plan
from blendserve.planner.prefix_tree import Ints
from blendserve.planner.tree_order import LeafOrder, depth_first
from blendserve.scheduling.policy import OVERRUN_FACTOR, Control, Floats, Policy

LEFT_CHUNKS = 8
"""parts of LEFT that are worked through side by side, so that the mix of LEFT stays the same"""
MAX_PREFIX_MEMORY_RATIO = 0.05
"""memory that the shared prefixes of those parts may take, and those of scouts"""
MIN_GAIN = 1.05
"""time in depth-first order, over that of the blend, from which blending is tried"""
ORDER_TOLERANCE = 1.005
"""modelled time that taking long outputs first may cost, for what it saves at the end"""
WINDOW_RATIO = 0.5
"""memory, of all, that is taken to hold what overlaps in depth-first order anyway"""
STICKY_PREFIX_RATIO = 0.1
"""shared prompt tokens, over the others, from which a request stays with those that share them"""
LOOK_AHEAD = 64
"""candidates of LEFT offered for admission at once"""
PROJECT_EVERY = 16
"""steps between two projections of memory"""
BALANCE_EVERY = 128
"""steps between two looks at the work that remains"""
CURVES_EVERY = 2 * BALANCE_EVERY
"""steps between two fits of the length curves"""
MAX_DRIFT = 0.25
"""change of the output expected of what waits, of all of it, after which the order is made anew"""
SCOUTS = 2
"""samples that run before anything else where nothing is known of a class"""
RESERVE_FACTOR = 1.2
"""memory kept for LEFT, over what Little's law gives it on average"""
RESERVE_DEVIATIONS = 0.5
"""and so many standard deviations of the memory that RIGHT takes, where lengths are not declared"""
MAX_RESERVE_RATIO = 0.5
"""memory kept for LEFT at the most, of all"""
MIN_STEP_TOKENS = 128
"""tokens that a step computes at the least while LEFT has any"""
YOUNGEST_VICTIM = 256
"""tokens that a request must have generated before it is retracted for LEFT's sake"""
PATIENCE_STEPS = 8192
"""steps that a request is first of its side before nothing else is admitted until it is"""
TAIL_CAUTION = 2.0
"""requests that are taken to be alive at the end for every one that is expected to be"""
MAX_RECOMPUTE_RATIO = 0.02
"""tokens that may be computed again for LEFT's sake, of all computed so far"""
LEFT, RIGHT = 0, 1
RETRACTED = -1
"""in place of an index into RIGHT: the first of those that were retracted"""


class _Table(NamedTuple):
    """What compiled code reads about requests; [num_requests] where not said otherwise."""

    prompt: Ints
    own: Ints
    """prompt tokens that no other request has"""
    prompt_share: Floats
    """prompt tokens to compute, shared ones divided among all that share them"""
    hint: Floats
    """see `DeclaredLengths`; 0 where no length is declared"""
    ends: Floats
    """[num_classes, num_ends, 4] when requests of declared length end, in units of `hint`; see `DeclaredLengths`"""
    group: Ints
    """class for the length curves"""
    right: Ints
    """1 if the request is RIGHT"""
    generated: Ints
    """tokens that a waiting request had generated when it was retracted"""


class Blend(Policy):
    """See the module."""

    name = "blend"

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._declared = DeclaredLengths(plan.stratum, plan.declared_tokens)
        self._table = _Table(
            prompt=plan.prompt_tokens,
            own=plan.own_prompt_tokens(),
            prompt_share=plan.prompt_share(),
            hint=self._declared.hint,
            ends=self._declared.ends,
            group=plan.stratum,
            right=np.zeros(plan.num_requests, dtype=np.int32),
            generated=np.zeros(plan.num_requests, dtype=np.int32),
        )
        num_groups = int(plan.stratum.max(initial=0)) + 1
        caps = np.ones(num_groups, dtype=np.int32)
        np.maximum.at(caps, plan.stratum, plan.max_tokens)
        self._curves = LengthCurves(caps)
        self._known = np.zeros(plan.num_requests, dtype=np.bool_)
        if plan.sampled_output_tokens is not None:
            self._known[plan.sampled] = True
            self._curves.finished(plan.stratum[plan.sampled], plan.sampled_output_tokens)
            nobody = np.empty(0, dtype=np.int32)
            self._curves.refresh(nobody, nobody)
        self._late = np.zeros(num_groups, dtype=np.bool_)  # classes whose curves estimates follow
        self._waits = np.ones(plan.num_requests, dtype=np.bool_)
        self._newly_admitted: tuple[list[Ints], list[Ints]] = ([], [])
        """by side: those that `_waits` and `_sums` do not know of yet"""
        self._unfinished = np.ones(plan.num_requests, dtype=np.bool_)
        self._sums = np.zeros((2, num_groups, 9))
        self._projection = np.zeros(len(self._curves.tables.points))
        self._alive = np.zeros(len(self._curves.tables.points))
        self._lines = plan.cost_model.step_lines()
        self._blends = True
        self._depth_first = depth_first(plan.tree)
        self._goes_by_length: bool | None = None
        self._not_split_for: Floats | None = None
        """the estimates for which leaves were last to be split, where that was left out"""
        self._granularity = plan.cost_model.hardware.token_granularity
        self._ratio = 1.0
        self._right_reads = 0.0
        self._right_prefill = 0
        self._reserve = 0.0
        self._shared = 0
        self._capacity = 0
        self._num_computed = 0.0
        self._num_recomputed = 0.0
        self._try_right = True
        self._first_waiting = [-1, -1]  # by side
        self._first_since = [0, 0]
        self._impatient: int | None = None

    # -- order ---------------------------------------------------------------------------------------------------

    def _put_in_order(self, unscaled: Floats, *, blends: bool) -> None:
        """Divide what waits into LEFT and RIGHT and put both in order.

        Where blending gains nothing, everything is LEFT in an order much like `longest-first-dfs`'s or `dfs`'s, and, as
        there, by estimates that the curves have not changed.
        """
        self._blends = blends
        if blends:
            self._divide()
        else:
            self.output_tokens_est = unscaled
            self._table.right[:] = 0
            self._right = np.empty(0, dtype=np.int32)
            self._left = self._unblended()
        self._next_right = np.arange(len(self._right) + 1, dtype=np.int32)
        self._retracted: Ints = np.empty(0, dtype=np.int32)
        self._count_waiting()
        self._try_right = True

    def _divide(self) -> None:
        """LEFT and RIGHT as `plan` orders them."""
        plan, order = self.plan, self.plan.leaf_order
        unit = _unit_of_leaf(order)
        density = np.where(self._sticks(order.requests), order.unit_density[unit], order.density)
        self._table.right[order.requests] = density < plan.density()  # what runs, too
        waits = self._waits[order.requests]
        requests, unit = order.requests[waits], unit[waits]
        sampled = np.zeros(plan.num_requests, dtype=np.bool_)
        sampled[plan.sampled] = True
        is_right = self._table.right[requests] > 0
        self._right = self._longest_first(requests[is_right], unit[is_right], sampled)
        self._left = self._interleaved(requests[~is_right], sampled)

    def _unblended(self) -> Ints:
        """Long outputs first, by the mean of their class; depth-first inside a class. Plain depth-first order where
        that is faster.

        Requests of declared length that owe little to a shared prefix go by their own length. A few requests of classes
        of which nothing is known go before all others.
        """
        plain = self._depth_first[self._waits[self._depth_first]]
        kind, expected = self.plan.stratum[plain], self.output_tokens_est[plain]
        by_itself = (self._table.hint[plain] > 0) & ~self._sticks(plain)
        num = np.bincount(kind, weights=~by_itself)
        mean = np.bincount(kind, weights=np.where(by_itself, 0.0, expected)) / np.maximum(num, 1.0)
        by_length = np.asarray(plain[np.lexsort((kind, -np.where(by_itself, expected, mean[kind])))])
        if self._goes_by_length is None:  # once: going over to another order would leave prefixes half used
            self._goes_by_length = self._apart(by_length) <= ORDER_TOLERANCE * self._apart(plain)
        order = by_length if self._goes_by_length else plain
        first = self._scouts[order] & (self._curves.num_finished[self.plan.stratum[order]] == 0)
        first &= self._table.hint[order] == 0.0
        return np.concatenate((order[first], order[~first]))

    def _gains(self) -> bool:
        """Whether blending pays."""
        requests = self._depth_first[self._unfinished[self._depth_first]]
        return self._apart(requests) >= MIN_GAIN

    def _apart(self, requests: Ints) -> float:
        """Modelled time of requests in an order, over that of all of them blended.

        What is in memory together overlaps anyway, so the order is cut into windows that fill `WINDOW_RATIO` of the
        memory, and only they are taken to run one after the other.
        """
        if len(requests) == 0:
            return 1.0
        expected = self.output_tokens_est[requests]
        held = np.cumsum(self._table.own[requests] + expected / 2.0)
        window = (held / (WINDOW_RATIO * self._capacity)).astype(np.int64)
        tokens = np.bincount(window, weights=self._table.prompt_share[requests] + expected)
        compute = tokens * self._lines.compute_s_per_token
        memory_s = self.plan.cost_model.memory_s(self._table.prompt[requests], expected)
        memory = np.bincount(window, weights=memory_s)
        overlap = self.plan.cost_model.hardware.overlap
        apart = sum(overlap(c, m) for c, m in zip(compute.tolist(), memory.tolist(), strict=True))
        return apart / overlap(float(compute.sum()), float(memory.sum()))

    def _choose_scouts(self) -> NDArray[np.bool_]:
        """[num_requests] a few samples of each class, of as many classes as have their prefixes in a little memory.

        Where lengths are declared there is no sample, and any request will do.
        """
        plan = self.plan
        samples = np.concatenate((plan.sampled, np.flatnonzero(self._table.hint > 0.0).astype(np.int32)))
        samples = samples[np.argsort(plan.stratum[samples], kind="stable")]
        kind = plan.stratum[samples]
        samples = samples[np.arange(len(kind)) - np.searchsorted(kind, kind) < SCOUTS]
        prefix = np.zeros(int(plan.stratum.max(initial=0)) + 1)
        np.maximum.at(prefix, plan.stratum[samples], self._table.prompt[samples] - self._table.own[samples])
        shortest_first = np.argsort(prefix, kind="stable")
        fits = np.zeros(len(prefix), dtype=np.bool_)
        fits[shortest_first] = np.cumsum(prefix[shortest_first]) <= MAX_PREFIX_MEMORY_RATIO * self._capacity
        scouts = np.zeros(plan.num_requests, dtype=np.bool_)
        scouts[samples[fits[plan.stratum[samples]]]] = True
        return scouts

    def _sticks(self, requests: Ints) -> NDArray[np.bool_]:
        """Which requests owe so much of their prompt to a shared prefix that they stay with those that share it.

        Prefixes are shared in whole blocks.
        """
        shared = self._table.prompt[requests] - self._table.own[requests]
        shared -= shared % self.plan.cost_model.hardware.block_size
        rest = self._table.own[requests] + self.output_tokens_est[requests]
        return np.asarray(shared > STICKY_PREFIX_RATIO * rest)

    def _longest_first(self, requests: Ints, unit: NDArray[np.int64], sampled: NDArray[np.bool_]) -> Ints:
        """RIGHT by descending expected output, samples first.

        Requests that owe much of their prompt to a shared prefix go by the mean of their unit, in tree order, so that
        the prefix stays in use until its last request.
        """
        if len(requests) == 0:
            return requests
        expected, sticks = self.output_tokens_est[requests], self._sticks(requests)
        mean = np.bincount(unit, weights=expected) / np.maximum(np.bincount(unit), 1)
        key = np.where(sticks, mean[unit], expected)
        return np.asarray(requests[np.lexsort((-key, ~sampled[requests] | sticks))], dtype=np.int32)

    def _interleaved(self, requests: Ints, sampled: NDArray[np.bool_]) -> Ints:
        """LEFT in parts of equal work, merged by progress; samples first.

        So many parts that the prefixes they keep in use take little of the memory.
        """
        shared = self._table.prompt[requests] - self._table.own[requests]
        prefix_tokens = float(shared.mean()) if len(requests) else 0.0
        chunks = int(
            min(max(MAX_PREFIX_MEMORY_RATIO * self._capacity / max(prefix_tokens, 1.0), 1), LEFT_CHUNKS)
        )
        work = self._table.prompt_share[requests] + self.output_tokens_est[requests]
        done = np.cumsum(work) / max(work.sum(), 1.0) * chunks
        progress = done - np.floor(np.minimum(done, chunks - 1e-9))
        first = sampled[requests] & ~self._sticks(requests)
        return np.asarray(requests[np.lexsort((progress, ~first))])

    def _estimates_changed(self) -> None:
        self._correct_declared()
        unscaled = self.output_tokens_est.copy()
        self._scale_to_curves()
        self._plan_anew(unscaled, blends=self._gains())

    def _follow_curves(self) -> None:
        """Order anew because the curves have moved; where blending gains nothing still, leave things as they are."""
        before = self.output_tokens_est
        self.output_tokens_est = self._estimator.estimate()
        self._correct_declared()
        unscaled = self.output_tokens_est.copy()
        self._scale_to_curves()
        blends = self._gains()
        if self._blends or blends:
            self._plan_anew(unscaled, blends=blends)
        else:
            self.output_tokens_est = before

    def _plan_anew(self, unscaled: Floats, *, blends: bool) -> None:
        """Order anew, where blending pays by the densities of the present estimates."""
        if not blends:  # the order of densities does not matter, and takes long
            if self._is_early:
                self._not_split_for = self.output_tokens_est
            self._log_replan()
        else:
            if self._not_split_for is not None and not self._is_early:
                self.plan = self.plan.reordered(self._not_split_for)
            self._not_split_for = None
            self._reorder()
        self._put_in_order(unscaled, blends=blends)

    def _correct_declared(self) -> None:
        """Expect of declared lengths what has come of them so far."""
        declared = self._unfinished & (self._table.hint > 0.0)
        expected = self._table.hint[declared] * self._declared.mean[self._table.group[declared]]
        self.output_tokens_est[declared] = np.clip(expected, 1.0, self.plan.max_tokens[declared])
        self._planned_ratio = self._declared.mean.copy()

    def _scale_to_curves(self) -> None:
        """Scale the estimates of classes of which a request was late so that their mean is their curve's.

        The estimator knows finished requests only, and while long outputs are under way those are the short ones.
        """
        unknown = self._unfinished & (self._table.hint == 0.0)
        group = self._table.group[unknown]
        count = np.maximum(np.bincount(group, minlength=len(self._late)), 1)
        mean = np.bincount(group, weights=self.output_tokens_est[unknown], minlength=len(count)) / count
        self._planned_mean = np.where(self._late, self._curves.tables.left[:, 0], mean)
        estimate = self.output_tokens_est[unknown] * (self._planned_mean / np.maximum(mean, 1.0))[group]
        self.output_tokens_est[unknown] = np.clip(estimate, 1.0, self.plan.max_tokens[unknown])

    def _drifted(self) -> bool:
        """Whether the curves have moved away from what the present order was made for."""
        unknown = self._sums[:, :, 1].sum(axis=0) * self._late
        declared = self._sums[:, :, 4].sum(axis=0)
        old = unknown * self._planned_mean, declared * self._planned_ratio
        new = unknown * self._curves.tables.left[:, 0], declared * self._declared.mean
        return bool(np.abs(np.subtract(new, old)).sum() > MAX_DRIFT * np.sum(old))

    def _count_waiting(self) -> None:
        """Sum up what waits on either side; see `_expected`."""
        right = np.union1d(self._retracted, self._right) if len(self._retracted) else self._right
        for side, members in ((LEFT, self._left), (RIGHT, right)):
            self._sums[side] = 0.0
            self._count(side, members[self._waits[members]], 1.0)

    def _count(self, side: int, requests: Ints, sign: float) -> None:
        """Add requests to (or take them from) the sums over what waits."""
        _add_to_sums(self._sums[side], requests, sign, self._table)

    def _expected(self, side: int) -> tuple[float, float, float]:
        """Of what waits on a side: tokens to compute, KV tokens to read, private KV tokens held, added over steps."""
        tables = self._curves.tables
        tokens, reads, held = _waiting_work(
            self._sums[side], tables.left, tables.left_squared, self._table.ends
        )
        return float(tokens), float(reads), float(held)

    # -- one step ------------------------------------------------------------------------------------------------

    def start(self, control: Control) -> None:
        """Learn the memory, and put the requests in order for it."""
        self._capacity = control.kv_capacity_tokens
        self._scouts = self._choose_scouts()
        # A curve of few lengths has a long tail, so it does not decide whether to blend.
        if self.plan.sampled_output_tokens is not None and self._gains():
            self._late[self.plan.stratum[self.plan.sampled]] = True
        self._correct_declared()
        self._scale_to_curves()
        self._put_in_order(self.output_tokens_est, blends=self._gains())

    def step(self, control: Control) -> int:
        """Admit, and set the step's tokens so that computing them takes its share of the time reading KV takes."""
        step = control.step_index
        if step % BALANCE_EVERY == 0:
            self._catch_up()
        if step % CURVES_EVERY == 0 and step > 0:
            requests, generated = control.running_requests, control.running_output_tokens
            self._curves.refresh(self._table.group[requests], generated)
            weighed = self._declared.weigh()
            self._declared.refresh(requests, generated)
            self._late[self._table.group[requests[generated > self.output_tokens_est[requests]]]] = True
            if weighed:
                self._estimator.forget_declared(np.flatnonzero(self._table.hint == 0.0))
                self.output_tokens_est = self._estimator.estimate()
                self._estimates_changed()
            elif self._drifted():
                self._follow_curves()
        if step % BALANCE_EVERY == 0:
            self._balance(control)
        if step % PROJECT_EVERY == 0:
            self._project(control)
            self._impatient = self._waits_too_long(step)
        target = self._target(control)
        if self._try_right and self._impatient != LEFT:
            before = control.prefill_backlog
            self._admit_right(control)
            self._right_prefill += control.prefill_backlog - before
        if self._right_prefill >= self._granularity:
            # What RIGHT has to compute first is not held back: the sooner the memory is full, the better.
            extra = min(self._right_prefill, control.max_num_batched_tokens - target)
            extra -= extra % self._granularity
            self._right_prefill -= max(extra, self._granularity)
            target += extra
        left_may = len(self._left) > 0 and self._impatient != RIGHT
        if left_may and control.num_running + control.prefill_backlog < target:
            ahead = self._left[:LOOK_AHEAD]
            settled = control.admit(ahead, self.output_tokens_est, target)
            self._left = self._left[settled:]
            self._admitted(LEFT, ahead[:settled])
            if (
                self._blends
                and settled < len(ahead)
                and control.num_running + control.prefill_backlog < target
            ):
                self._make_room(control, target)
        if control.num_running == 0:
            self._admit_anything(control)
        self._num_computed += target
        return target

    def _waits_too_long(self, step: int) -> int | None:
        """The side whose first request has been first for more than `PATIENCE_STEPS`; of both, the longer waiting.

        With nothing else admitted, all that runs ends within the longest output's steps and those of its prefill, and
        then there is room. So nobody is first for longer than that, twice (for the other side), and the patience.
        """
        index = self._first_of_right()
        right = self._at(index) if index is not None else self._right[:0]
        late = []
        for side, ahead in ((LEFT, self._left), (RIGHT, right)):
            first = int(ahead[0]) if len(ahead) else -1
            if first != self._first_waiting[side]:
                self._first_waiting[side], self._first_since[side] = first, step
            if first >= 0 and step - self._first_since[side] > PATIENCE_STEPS:
                late.append((self._first_since[side], side))
        return min(late)[1] if late else None

    def _target(self, control: Control) -> int:
        most = control.max_num_batched_tokens
        if not self._blends or len(self._left) == 0:
            return most
        wanted = min(_tokens_for.py_func(self._ratio, self._right_reads, self._lines), float(most))
        target = round(wanted / self._granularity) * self._granularity
        return int(min(max(target, MIN_STEP_TOKENS, control.num_running + 1), most))

    def _balance(self, control: Control) -> None:
        """From the work that remains: tokens to compute per KV token read, and the memory LEFT needs for that."""
        tables = self._curves.tables
        left, right = self._expected(LEFT), self._expected(RIGHT)
        running, generated = control.running_requests, control.running_output_tokens
        tokens, left_reads, right_reads = _remaining(running, generated, self._table, tables)
        tokens += left[0] + right[0] + control.prefill_backlog
        left_reads += left[1]
        right_reads += right[1]
        memory = self._capacity - self._reserve
        ratio = _level(tokens, right_reads, memory, self._projection, self._alive, tables.points, self._lines)
        # Towards one: the ratio with the KV reads that LEFT brings along.
        overall = ratio * right_reads / max(left_reads + right_reads, 1.0)
        error = self._uncertainty(left[1] + right[1])
        self._ratio = ratio * _towards_one(overall, error) / overall if overall > 0.0 else ratio
        held_per_token = left[2] / max(left[0], 1.0)
        step_tokens = _tokens_for(self._ratio, float(self._capacity), self._lines)
        step_tokens = min(max(step_tokens, MIN_STEP_TOKENS), control.max_num_batched_tokens)
        need = RESERVE_FACTOR * step_tokens * held_per_token
        num_waiting, num_unknown = self._sums[RIGHT, :, 7].sum(), self._sums[RIGHT, :, 1].sum()
        num_declared = self._sums[RIGHT, :, 7] - self._sums[RIGHT, :, 1]
        num_unknown += (num_declared * np.minimum(self._declared.variation, 1.0)).sum()
        size = right[2] / max(right[0], 1.0) if num_waiting else 0.0
        deviation = np.sqrt(max(self._capacity - need, 0.0) * size) * num_unknown / max(num_waiting, 1.0)
        need += RESERVE_DEVIATIONS * deviation + step_tokens
        need /= (
            1.0 + need / self._capacity
        )  # RIGHT reads less by what it gives up, so LEFT is to compute less
        self._reserve = min(need, MAX_RESERVE_RATIO * self._capacity) if len(self._left) else 0.0

    def _uncertainty(self, reads: float) -> float:
        """Relative standard error of the KV reads still to come, from how many lengths each class has shown."""
        tables = self._curves.tables
        error = _reads_error(
            self._sums,
            tables.left,
            tables.left_squared,
            self._curves.num_finished,
            self._table.ends,
            self._declared.num_finished,
        )
        return float(error) / max(reads, 1.0)

    # -- RIGHT ---------------------------------------------------------------------------------------------------

    def _project(self, control: Control) -> None:
        """Expected memory of the running RIGHT requests over the steps to come."""
        private, right_reads = _project(
            control.running_requests,
            control.running_output_tokens,
            self._table,
            self._curves.tables,
            self._projection,
            self._alive,
        )
        self._right_reads = float(right_reads)
        self._shared = max(control.kv_committed_tokens - private, 0)
        self._try_right = True

    def _admit_right(self, control: Control) -> None:
        most = control.max_num_batched_tokens
        while control.prefill_backlog < 2 * most and self._try_right:
            index = self._first_of_right()
            if index is None or self._impatient == RIGHT:
                self._try_right = index is not None and self._admit_at(control, index)
                self._impatient = None if self._try_right else self._impatient
                return
            room = self._capacity - self._reserve - self._shared
            if index == RETRACTED:
                self._try_right = self._fits(self._retracted[0], room)
            else:
                tables = self._curves.tables
                index = _longest_that_fits(
                    self._right, self._next_right, self._projection, room, self._table, tables
                )
                self._try_right = index >= 0
            if self._try_right and not self._admit_at(control, index):
                return

    def _first_of_right(self) -> int | None:
        """`RETRACTED`, or the index in `_right` of the first that waits."""
        if len(self._retracted):
            return RETRACTED
        index = int(_find(self._next_right, 0))
        return index if index < len(self._right) else None

    def _at(self, index: int) -> Ints:
        return self._retracted[:1] if index == RETRACTED else self._right[index : index + 1]

    def _admit_at(self, control: Control, index: int) -> bool:
        """Admit a request of RIGHT if its memory is there now."""
        ahead = self._at(index)
        if control.admit(ahead, self.output_tokens_est, 1 << 30, look_ahead=False) == 0:
            return False
        generated = self._table.generated[ahead[0]]
        _add(self._projection, self._alive, ahead[0], generated, self._table, self._curves.tables)
        if index == RETRACTED:
            self._retracted = self._retracted[1:]
        else:
            self._next_right[index] = index + 1
        self._admitted(RIGHT, ahead)
        return True

    def _fits(self, request: int, room: float) -> bool:
        return bool(_peak(self._projection, request, self._table, self._curves.tables) <= room)

    def _make_room(self, control: Control, target: int) -> None:
        """LEFT is starved by RIGHT: retract the youngest RIGHT requests, within bounds."""
        if self._num_recomputed + YOUNGEST_VICTIM > MAX_RECOMPUTE_RATIO * self._num_computed:
            return
        wanted = target - control.num_running - control.prefill_backlog
        running, generated = control.running_requests, control.running_output_tokens
        old_enough = (self._table.right[running] > 0) & (generated >= YOUNGEST_VICTIM)
        for index in np.flatnonzero(old_enough)[np.argsort(generated[old_enough], kind="stable")].tolist():
            cost = float(self._table.own[running[index]] + generated[index])
            if wanted <= 0 or self._num_recomputed + cost > MAX_RECOMPUTE_RATIO * self._num_computed:
                break
            request = int(running[index])
            control.retract(request)
            self.retracted(request, int(generated[index]))
            self._num_recomputed += cost
            wanted -= int(cost)

    def _admit_anything(self, control: Control) -> None:
        """Nothing runs, so whatever is next in line must be able to."""
        index = self._first_of_right()
        if index is not None:
            self._admit_at(control, index)
            return
        ahead, self._left = self._left[:1], self._left[1:]
        control.admit(ahead, self.output_tokens_est, 1 << 30, look_ahead=False)
        self._admitted(LEFT, ahead)

    def _admitted(self, side: int, requests: Ints) -> None:
        self._newly_admitted[side].append(requests)

    def _catch_up(self) -> None:
        self._count_admitted()
        super()._catch_up()

    def _count_admitted(self) -> None:
        for sums, admitted in zip(self._sums, self._newly_admitted, strict=True):
            if admitted:
                _take_from_waiting(self._waits, sums, np.concatenate(admitted), self._table)
                admitted.clear()

    def finished(self, requests: Ints, output_tokens: Ints) -> None:
        """Memory has become free."""
        self._try_right = self._try_right or 1 in self._table.right[requests].tolist()
        super().finished(requests, output_tokens)

    def _learn(self, requests: Ints, output_tokens: Ints) -> None:
        self._unfinished[requests] = False
        new = ~self._known[requests]
        group = self._table.group[requests[new]]
        self._curves.finished(group, output_tokens[new])
        self._declared.finished(requests, output_tokens)
        super()._learn(requests, output_tokens)

    def retracted(self, request: int, output_tokens: int) -> None:
        """Wait again, first on its side."""
        self._count_admitted()
        again = np.array([request], dtype=np.int32)
        self._table.generated[request] = output_tokens
        self._waits[request] = True
        if self._table.right[request]:
            self._retracted = np.concatenate((again, self._retracted))
            self._count(RIGHT, again, 1.0)
        else:
            self._left = np.concatenate((again, self._left))
            self._count(LEFT, again, 1.0)


def _unit_of_leaf(order: LeafOrder) -> NDArray[np.int64]:
    return np.repeat(np.arange(len(order.unit_density)), np.diff(order.unit_start))


@numba.njit(cache=True, nogil=True)
def _add_to_sums(sums, requests, sign, table):  # type: ignore[no-untyped-def]
    """Add to the columns of `sums` [num_classes, 9], which `Blend._expected` reads."""
    for i in range(len(requests)):
        request = requests[i]
        row = sums[table.group[request]]
        prompt, own = float(table.prompt[request]), float(table.own[request])
        hint = table.hint[request]
        row[0] += sign * table.prompt_share[request]
        row[7] += sign
        if hint > 0.0:
            row[4] += sign * hint
            row[5] += sign * hint * prompt
            row[6] += sign * hint * own
            row[8] += sign * hint * hint
        else:
            row[1] += sign
            row[2] += sign * prompt
            row[3] += sign * own


@numba.njit(cache=True, nogil=True)
def _take_from_waiting(waits, sums, requests, table):  # type: ignore[no-untyped-def]
    """Note that requests are admitted; those that were before are passed over."""
    for i in range(len(requests)):
        if waits[requests[i]]:
            waits[requests[i]] = False
            _add_to_sums(sums, requests[i : i + 1], -1.0, table)


@numba.njit(cache=True, nogil=True)
def _waiting_work(sums, left, left_squared, ends):  # type: ignore[no-untyped-def]
    """See `Blend._expected`; `sums` of one side."""
    tokens = reads = held = 0.0
    for group in range(len(sums)):
        row, mean, half_square = sums[group], left[group, 0], left_squared[group, 0] / 2.0
        ratio, declared_squares = ends[group, 0, TOKENS], row[8] * ends[group, 0, SQUARE] / 2.0
        tokens += row[0] + row[1] * mean + row[4] * ratio
        reads += row[2] * mean + row[1] * half_square + row[5] * ratio + declared_squares
        held += row[3] * mean + row[1] * half_square + row[6] * ratio + declared_squares
    return tokens, reads, held


@numba.njit(cache=True, nogil=True)
def _reads_error(sums, left, left_squared, num_finished, ends, num_declared_finished):  # type: ignore[no-untyped-def]
    """Standard error of the KV reads of what waits on both sides, classes taken to err alike."""
    total = 0.0
    for group in range(sums.shape[1]):
        row = sums[0, group] + sums[1, group]
        mean, square = left[group, 0], left_squared[group, 0]
        reads = row[2] * mean + row[1] * square / 2.0
        total += reads * _relative_error(mean, square, num_finished[group])
        mean, square = ends[group, 0, TOKENS], ends[group, 0, SQUARE]
        reads = row[5] * mean + row[8] * square / 2.0
        total += reads * _relative_error(mean, square, num_declared_finished[group])
    return total


@numba.njit(cache=True, nogil=True)
def _relative_error(mean, square, num_finished):  # type: ignore[no-untyped-def]
    variation = np.sqrt(max(square / mean**2 - 1.0, 0.0))
    return min(2.0 * variation / np.sqrt(max(num_finished, 1.0)), 1.0)


@numba.njit(cache=True, nogil=True)
def _remaining(running, generated, table, tables):  # type: ignore[no-untyped-def]
    """Tokens that running requests still generate, and KV tokens that those of LEFT and RIGHT read meanwhile."""
    tokens = left_reads = right_reads = 0.0
    for i in range(len(running)):
        request = running[i]
        size = float(table.prompt[request] + generated[i])
        if table.hint[request] > 0.0:
            left, square = _left_of_declared(
                table.ends[table.group[request]], table.hint[request], generated[i]
            )
        else:
            age = min(age_index(generated[i]), tables.left.shape[1] - 1)
            left, square = (
                tables.left[table.group[request], age],
                tables.left_squared[table.group[request], age],
            )
        tokens += left
        if table.right[request]:
            right_reads += size * left + square / 2.0
        else:
            left_reads += size * left + square / 2.0
    return tokens, left_reads, right_reads


@numba.njit(cache=True, nogil=True)
def _left_of_declared(ends, hint, generated):  # type: ignore[no-untyped-def]
    """Expected tokens still to come, and their square, where a length was declared."""
    age = generated / hint
    row = ends[first_end(ends, age)]
    if row[ALIVE] <= 0.0:  # outlived all
        left = max((OVERRUN_FACTOR - 1.0) * generated, 1.0)
        return left, left * left
    mean, square = row[TOKENS] / row[ALIVE], row[SQUARE] / row[ALIVE]
    left = max(hint * (mean - age), 1.0)
    return left, max(hint * hint * (square - 2.0 * age * mean + age * age), left * left)


@numba.njit(cache=True, nogil=True)
def _add(projection, alive, request, generated, table, tables):  # type: ignore[no-untyped-def]
    """Add a request to the expected private memory in every interval ahead, and to the expected number alive."""
    points = tables.points
    size = float(table.own[request] + generated)
    if table.hint[request] > 0.0:
        _add_declared(
            projection, alive, size, generated, table.ends[table.group[request]], table.hint[request], points
        )
        return
    age = min(age_index(generated), tables.alive.shape[1] - 1)
    still = tables.alive[table.group[request], age]
    for i in range(len(points)):
        projection[i] += still[i] * (size + points[i])
        alive[i] += still[i]


@numba.njit(cache=True, nogil=True)
def _add_declared(projection, alive, size, generated, ends, hint, points):  # type: ignore[no-untyped-def]
    """`_add` where a length was declared: the request may end at any of the `ends` not yet behind it."""
    end = first_end(ends, generated / hint)
    come_so_far = ends[end, ALIVE]
    weight = 1.0
    for i in range(len(points) - 1):
        if weight < 1e-9:
            break
        width = points[i + 1] - points[i]
        lasts, squares = weight * width, weight * width * width
        while weight >= 1e-9:
            left = max(hint * ends[end, VALUE] - generated, 1.0)
            if come_so_far <= 0.0:  # outlived all
                left = max((OVERRUN_FACTOR - 1.0) * generated, 1.0)
            if left >= points[i + 1]:
                break
            probability = weight
            if come_so_far > 0.0:
                probability = (ends[end, ALIVE] - ends[end + 1, ALIVE]) / come_so_far
            lasts -= probability * (points[i + 1] - left)
            squares -= probability * (width * width - (left - points[i]) ** 2)
            weight -= probability
            end += 1
        projection[i] += (lasts * (size + points[i]) + squares / 2.0) / width
        alive[i] += lasts / width


@numba.njit(cache=True, nogil=True)
def _peak(projection, request, table, tables):  # type: ignore[no-untyped-def]
    """Most expected memory at any time if a request is admitted now."""
    with_it = projection.copy()
    _add(with_it, np.zeros(len(projection)), request, table.generated[request], table, tables)
    return with_it.max()


@numba.njit(cache=True, nogil=True)
def _project(running, generated, table, tables, projection, alive):  # type: ignore[no-untyped-def]
    """Write the projection of running RIGHT requests.

    Returns the private tokens that all running requests hold, and the KV tokens that those of RIGHT read in a step.
    """
    projection[:] = 0.0
    alive[:] = 0.0
    private = right_reads = 0
    for i in range(len(running)):
        private += table.own[running[i]] + generated[i]
        if table.right[running[i]]:
            _add(projection, alive, running[i], generated[i], table, tables)
            if generated[i] > 0:
                right_reads += table.prompt[running[i]] + generated[i]
    return private, right_reads


def _towards_one(ratio: float, error: float) -> float:
    """A ratio moved towards 1 by its relative error, not beyond.

    Where compute and memory balance, it is cheap to err on the side of the scarcer resource: what is left over at the
    end then still hides behind it.
    """
    if ratio < 1.0:
        return min(ratio * (1.0 + error), 1.0)
    return max(ratio / (1.0 + error), 1.0)


@numba.njit(cache=True, nogil=True)
def _tokens_for(ratio, reads, lines):  # type: ignore[no-untyped-def]
    """Tokens whose computing takes `ratio` times as long as so many KV reads."""
    memory_s = lines.memory_fixed_s + lines.memory_s_per_read * reads
    return (ratio * memory_s - lines.compute_fixed_s) / lines.compute_s_per_token


@numba.njit(cache=True, nogil=True)
def _level(tokens, reads, memory, projection, alive, points, lines):  # type: ignore[no-untyped-def]
    """The ratio of compute time to memory time at which tokens and reads come to an end together.

    What remains is taken to be some steps with the memory full, then a run-down as that of what runs now. Every step,
    however little it reads, can compute `MIN_STEP_TOKENS`; so the more of the run-down reads little, the fewer tokens
    are left for the steps before. Water-filling by bisection.
    """
    run_down = 0.0
    for i in range(len(points) - 1):
        run_down += projection[i] * (points[i + 1] - points[i])
    full_steps = max(reads - run_down, 0.0) / max(memory, 1.0)
    low, high = 0.0, 1e4
    for _ in range(40):
        ratio = (low + high) / 2.0
        supplied = full_steps * max(_tokens_for(ratio, memory, lines), MIN_STEP_TOKENS)
        for i in range(len(points) - 1):
            # Steps happen while anything is alive, which is likely for longer than one request is expected to be.
            likely = min(TAIL_CAUTION * alive[i], 1.0)
            reads_if = projection[i] / max(likely, 1e-9)
            supplied += (
                likely
                * max(_tokens_for(ratio, reads_if, lines), MIN_STEP_TOKENS)
                * (points[i + 1] - points[i])
            )
        if supplied > tokens:
            high = ratio
        else:
            low = ratio
    return high


@numba.njit(cache=True, nogil=True)
def _find(next_waiting, index):  # type: ignore[no-untyped-def]
    """First index from `index` on that still waits (union-find with path halving)."""
    while next_waiting[index] != index:
        next_waiting[index] = next_waiting[next_waiting[index]]
        index = next_waiting[index]
    return index


@numba.njit(cache=True, nogil=True)
def _longest_that_fits(waiting, next_waiting, projection, room, table, tables):  # type: ignore[no-untyped-def]
    """Index of the first of `waiting`, in descending order of expected output, that fits into `room`; or -1."""
    count = len(waiting)
    low, high = _find(next_waiting, 0), count
    if low == count:
        return -1
    if _peak(projection, waiting[low], table, tables) <= room:
        return low
    while low + 1 < high:  # low does not fit; high does, or is the end
        middle = _find(next_waiting, (low + high) // 2)
        if middle >= high:
            high = (low + high) // 2
            if high <= low:
                break
            continue
        if _peak(projection, waiting[middle], table, tables) <= room:
            high = middle
        else:
            low = middle
    high = _find(next_waiting, min(high, count))
    if high < count and _peak(projection, waiting[high], table, tables) <= room:
        return high
    return -1
