"""Who is admitted next: the policies, peers behind one narrow protocol.

A policy never sees blocks, and the `Control` it steers never sees order. The same policy therefore drives our own
scheduler exactly, and an external engine's admission window by estimate.
"""

from __future__ import annotations

from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from blendserve.cost_model import memory_split
from blendserve.errors import ConfigError
from blendserve.planner.plan import Plan
from blendserve.planner.prefix_tree import Ints
from blendserve.planner.tree_order import depth_first

Floats = NDArray[np.float64]

OVERRUN_CHECK_STEPS = 16
FIRST_REPLAN_AFTER = 16
"""completions after which estimates are first renewed; afterwards whenever their number has doubled"""
OVERRUN_FACTOR = 1.5
"""a sequence that outlives its estimate is expected to reach this multiple of its age"""
LOOK_AHEAD = 64
"""candidates offered for admission at once from either end"""
NEITHER, LEFT, RIGHT = 0, 1, 2


class Control(Protocol):
    """What a policy may see and do between two steps."""

    clock_s: float
    step_index: int

    @property
    def max_num_batched_tokens(self) -> int:
        """Most tokens of a step."""
        ...

    @property
    def kv_capacity_tokens(self) -> int:
        """M: tokens of KV that fit."""
        ...

    @property
    def num_running(self) -> int:
        """Sequences that hold memory."""
        ...

    @property
    def prefill_backlog(self) -> int:
        """Tokens that admitted sequences have yet to compute before all of them decode."""
        ...

    @property
    def kv_committed_tokens(self) -> int:
        """Tokens of KV held or surely needed by what runs."""
        ...

    @property
    def running_requests(self) -> Ints:
        """[num_running] requests in order of admission."""
        ...

    @property
    def running_output_tokens(self) -> Ints:
        """[num_running] tokens generated so far."""
        ...

    def admit(
        self, requests: Ints, output_tokens_est: Floats, max_tokens: int, *, look_ahead: bool = True, reserve_tokens: int = 0
    ) -> int:
        """Admit requests in order until one does not fit or the next step has `max_tokens` tokens; returns how many.

        Requests that run or have finished are passed over. `output_tokens_est` [num_requests] is by request. With
        `look_ahead` the memory of all that runs must suffice until its expected end.
        """
        ...

    def retract(self, request: int) -> None:
        """Take a running request's memory back; it must be admitted again later."""
        ...


class Policy:
    """Base of the policies: keeps length estimates current and retracted requests first in line.

    Requests that were retracted, then the plan's sample, go before the policy's own order (`_admit_in_order`).
    """

    name = ""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.output_tokens_est = plan.output_tokens_est.copy()
        self._estimator = plan.estimator()
        self._replan_at = FIRST_REPLAN_AFTER
        self._first: Ints = np.empty(0, dtype=np.int32)

    def start(self, control: Control) -> None:
        """A run begins."""

    def step(self, control: Control) -> int:
        """Admit what should run now; returns the token target of the next step."""
        max_tokens = control.max_num_batched_tokens
        if len(self._first):
            self._first = self._first[self._admit_first(control) :]
        if len(self._first) == 0:
            self._admit_in_order(control)
        return max_tokens

    def finished(self, requests: Ints, output_tokens: Ints) -> None:
        """Requests have their results."""
        self._estimator.finished(requests, output_tokens)
        if self._estimator.num_finished >= self._replan_at:
            self._replan_at = 2 * self._estimator.num_finished
            self.output_tokens_est = self._estimator.estimate()
            self._estimates_changed()

    def retracted(self, request: int) -> None:
        """A running request was taken out to make room; it goes first when there is room again."""
        self._first = np.concatenate((np.array([request], dtype=np.int32), self._first))

    def choose_victim(self, control: Control) -> int:
        """The running request to retract when memory runs out: the youngest, which loses least."""
        return int(control.running_requests[-1])

    def _admit_first(self, control: Control) -> int:
        return control.admit(self._first, self.output_tokens_est, control.max_num_batched_tokens)

    def _admit_in_order(self, control: Control) -> None:
        raise NotImplementedError

    def _estimates_changed(self) -> None:
        """`output_tokens_est` was renewed."""


class OrderedPolicy(Policy):
    """Admits requests in a fixed order; the head of the line waits until it fits, as in vLLM and SGLang."""

    def __init__(self, plan: Plan, order: Ints, name: str) -> None:
        super().__init__(plan)
        self.name = name
        self._waiting = order

    def _admit_in_order(self, control: Control) -> None:
        if len(self._waiting):
            settled = control.admit(self._waiting, self.output_tokens_est, control.max_num_batched_tokens)
            self._waiting = self._waiting[settled:]


class DualScan(Policy):
    """The paper's dual scanner: one pointer from each end of the density order, memory divided between them.

    Memory M is divided into M_L and M_R such that what runs has the whole job's density; each side is filled to its
    share, where a request counts for its average footprint, own prompt + half its output. A left request that outgrows
    its estimate is charged to the right. Estimates are renewed as requests finish, and the rest is sorted anew.
    Source: BlendServe §5.3, §5.4, Alg. 3. Differs: sampled requests run inside the schedule, first in line, instead of
    in a warm-up of their own.
    """

    name = "dual-scan"

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._first = plan.sampled
        self._own_prompt_tokens = plan.own_prompt_tokens().astype(np.float64)
        self._side = np.zeros(plan.num_requests, dtype=np.int8)
        self._charge = np.zeros(plan.num_requests)
        self._charged = {LEFT: 0.0, RIGHT: 0.0}
        self._adopt(plan)

    def _adopt(self, plan: Plan) -> None:
        """Scan a new order; what was admitted before keeps its side and its charge."""
        order = plan.leaf_order
        waits = self._side[order.requests] == NEITHER
        self._waiting = order.requests[waits]
        unit = np.repeat(np.arange(len(order.unit_density)), np.diff(order.unit_start))
        self._unit_density = order.unit_density[unit[waits]]
        self._density = plan.density()
        self._dense = np.empty(plan.num_requests, dtype=np.bool_)
        self._dense[order.requests] = order.density > self._density
        charge = self._own_prompt_tokens + self.output_tokens_est / 2
        self._charge = np.where(self._side == NEITHER, charge, self._charge)

    def _estimates_changed(self) -> None:
        self._adopt(self.plan.reordered(self.output_tokens_est))

    def _admit_first(self, control: Control) -> int:
        # Sampled and retracted requests belong to the side whose density they have.
        settled = super()._admit_first(control)
        admitted = self._first[:settled]
        self._charge_to(LEFT, admitted[self._dense[admitted]])
        self._charge_to(RIGHT, admitted[~self._dense[admitted]])
        return settled

    def _admit_in_order(self, control: Control) -> None:
        if control.step_index % OVERRUN_CHECK_STEPS == 0:
            self._charge_overruns(control)
        if len(self._waiting) == 0:
            return
        # The whole job's density decides the blend, at the densities of what is next on either side.
        capacity = control.kv_capacity_tokens
        share_left = memory_split(
            capacity, float(self._unit_density[0]), float(self._unit_density[-1]), self._density
        )
        self._fill(control, RIGHT, capacity - share_left)
        self._fill(control, LEFT, share_left)
        if control.num_running == 0:  # nothing has room in its share
            self._fill(control, LEFT, capacity)

    def _fill(self, control: Control, side: int, share: float) -> None:
        """Admit from one end of the order until that side's share of the memory is charged."""
        room = share - self._charged[side]
        if room <= 0 or len(self._waiting) == 0:
            return
        ahead = self._waiting[:LOOK_AHEAD] if side == LEFT else self._waiting[: -LOOK_AHEAD - 1 : -1]
        charged = np.cumsum(np.where(self._side[ahead] == NEITHER, self._charge[ahead], 0.0))
        ahead = ahead[: np.searchsorted(charged, room) + 1]
        settled = control.admit(ahead, self.output_tokens_est, control.max_num_batched_tokens)
        self._charge_to(side, ahead[:settled])
        end = len(self._waiting)
        kept = slice(settled, end) if side == LEFT else slice(0, end - settled)
        self._waiting, self._unit_density = self._waiting[kept], self._unit_density[kept]

    def _charge_to(self, side: int, requests: Ints) -> None:
        requests = requests[self._side[requests] == NEITHER]
        self._side[requests] = side
        self._charged[side] += float(self._charge[requests].sum())

    def _uncharge(self, requests: Ints) -> None:
        for side in (LEFT, RIGHT):
            self._charged[side] -= float(self._charge[requests[self._side[requests] == side]].sum())

    def _charge_overruns(self, control: Control) -> None:
        """Charge what has outgrown its estimate for its real size, to the right side."""
        requests, generated = control.running_requests, control.running_output_tokens
        late = generated > self.output_tokens_est[requests]
        if not late.any():
            return
        requests, generated = requests[late], generated[late]
        self._uncharge(requests)
        self.output_tokens_est[requests] = np.minimum(OVERRUN_FACTOR * generated, self.plan.max_tokens[requests])
        self._charge[requests] = self._own_prompt_tokens[requests] + self.output_tokens_est[requests] / 2
        self._side[requests] = NEITHER
        self._charge_to(RIGHT, requests)

    def finished(self, requests: Ints, output_tokens: Ints) -> None:
        """Free the requests' share of their side."""
        self._uncharge(requests)
        super().finished(requests, output_tokens)

    def retracted(self, request: int) -> None:
        """Free the request's share of its side until it comes back."""
        requests = np.array([request], dtype=np.int32)
        self._uncharge(requests)
        self._side[requests] = NEITHER
        super().retracted(request)


PolicyName = Literal["dual-scan", "dfs", "fcfs", "random", "longest-first", "longest-first-dfs"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


def make_policy(name: PolicyName, plan: Plan, *, seed: int = 0) -> Policy:
    """A policy by name, fresh for one run.

    `fcfs` keeps the file's order; `dfs` groups shared prefixes in the order of their first request; `random` shuffles;
    `longest-first` sorts by expected output; `longest-first-dfs` keeps subtrees together and takes those with long
    outputs first; `dual-scan` is the paper's.

    Raises:
        ConfigError: no policy of that name.
    """
    if name == "dual-scan":
        return DualScan(plan)
    if name == "dfs":
        order = depth_first(plan.tree)
    elif name == "fcfs":
        order = np.arange(plan.num_requests, dtype=np.int32)
    elif name == "random":
        order = np.random.default_rng(seed).permutation(plan.num_requests).astype(np.int32)
    elif name == "longest-first":
        order = np.argsort(-plan.output_tokens_est, kind="stable").astype(np.int32)
    elif name == "longest-first-dfs":
        order = _longest_first_dfs(plan)
    else:
        raise ConfigError(f"unknown policy {name!r}; choose one of {', '.join(POLICIES)}")
    return OrderedPolicy(plan, order, name)


def _longest_first_dfs(plan: Plan) -> Ints:
    """Subtrees below the root by descending mean expected output; depth-first order inside each."""
    tree = plan.tree
    group = np.arange(tree.num_leaves)  # a leaf at the root is a group of its own
    for top in np.flatnonzero(tree.parent == 0):
        group[tree.first[top] : tree.end[top]] = tree.first[top]
    expected = plan.output_tokens_est[tree.requests]
    total = np.bincount(group, weights=expected, minlength=tree.num_leaves)
    count = np.maximum(np.bincount(group, minlength=tree.num_leaves), 1)
    mean = np.empty(tree.num_leaves)
    group_of = np.empty(tree.num_leaves, dtype=np.int64)
    mean[tree.requests], group_of[tree.requests] = (total / count)[group], group
    order = depth_first(tree)
    return order[np.lexsort((np.arange(len(order)), group_of[order], -mean[order]))]
