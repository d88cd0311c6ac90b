"""Who is admitted next: the policies, peers behind one narrow protocol.

A policy never sees blocks, and the `Control` it steers never sees order. The same policy therefore drives our own
scheduler exactly, and an external engine's admission window by estimate.
"""

from __future__ import annotations

from collections import deque
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
"""completions after which estimates are first renewed; afterwards whenever their number has grown by half"""


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

    def try_admit(self, request: int, output_tokens_est: float) -> bool:
        """Admit a request that is expected to generate so many tokens; False if it does not fit now."""
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
        self._first: deque[int] = deque()
        self._admitted = np.zeros(plan.num_requests, dtype=np.bool_)

    def start(self, control: Control) -> None:
        """A run begins."""

    def step(self, control: Control) -> int:
        """Admit what should run now; returns the token target of the next step."""
        while self._first and self._wants_prefill(control):
            request = self._first[0]
            if not self._admitted[request] and not self._try_admit(control, request):
                return control.max_num_batched_tokens
            self._first.popleft()
        self._admit_in_order(control)
        return control.max_num_batched_tokens

    def finished(self, request: int, num_output_tokens: int) -> None:
        """A request has its result."""
        self._estimator.finished(request, num_output_tokens)
        if self._estimator.num_finished >= self._replan_at:
            self._replan_at += self._replan_at // 2
            self.output_tokens_est = self._estimator.estimate()
            self._estimates_changed()

    def retracted(self, request: int) -> None:
        """A running request was taken out to make room; it goes first when there is room again."""
        self._admitted[request] = False
        self._first.appendleft(request)

    def choose_victim(self, control: Control) -> int:
        """The running request to retract when memory runs out: the youngest, which loses least."""
        return int(control.running_requests[-1])

    def _admit_in_order(self, control: Control) -> None:
        raise NotImplementedError

    def _estimates_changed(self) -> None:
        """`output_tokens_est` was renewed."""

    def _wants_prefill(self, control: Control) -> bool:
        """Whether the next step has tokens left once all decodes and the prefills already admitted are served."""
        return control.prefill_backlog + control.num_running < control.max_num_batched_tokens

    def _try_admit(self, control: Control, request: int) -> bool:
        if control.try_admit(request, float(self.output_tokens_est[request])):
            self._admitted[request] = True
            return True
        return False


class OrderedPolicy(Policy):
    """Admits requests in a fixed order; the head of the line waits until it fits, as in vLLM and SGLang."""

    def __init__(self, plan: Plan, order: Ints, name: str) -> None:
        super().__init__(plan)
        self.name = name
        self._order = order
        self._next = 0

    def _admit_in_order(self, control: Control) -> None:
        while self._next < len(self._order) and self._wants_prefill(control):
            request = int(self._order[self._next])
            if not self._admitted[request] and not self._try_admit(control, request):
                return
            self._next += 1


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
        self._first.extend(plan.sampled.tolist())
        self._own_prompt_tokens = plan.own_prompt_tokens().astype(np.float64)
        self._charge = np.zeros(plan.num_requests)
        self._on_left = np.zeros(plan.num_requests, dtype=np.bool_)
        self._charged_left = 0.0
        self._charged_right = 0.0
        self._position = np.empty(plan.num_requests, dtype=np.int32)
        self._adopt(plan)

    def _adopt(self, plan: Plan) -> None:
        order = plan.leaf_order
        self._order = order.requests
        self._position[order.requests] = np.arange(len(order.requests), dtype=np.int32)
        self._unit_density = order.unit_density
        self._unit = np.repeat(np.arange(len(order.unit_density)), np.diff(order.unit_start))
        self._density = plan.density()
        self._left = 0
        self._right = len(self._order) - 1

    def _estimates_changed(self) -> None:
        self._adopt(self.plan.reordered(self.output_tokens_est))

    def _admit_in_order(self, control: Control) -> None:
        if control.step_index % OVERRUN_CHECK_STEPS == 0:
            self._charge_overruns(control)
        capacity = control.kv_capacity_tokens
        blocked_left = blocked_right = False
        while self._wants_prefill(control) and self._skip_admitted() and not (blocked_left and blocked_right):
            left, right = int(self._order[self._left]), int(self._order[self._right])
            # The whole job's density decides the blend, at the densities of what is next on either side.
            share_left = memory_split(
                capacity,
                float(self._unit_density[self._unit[self._left]]),
                float(self._unit_density[self._unit[self._right]]),
                self._density,
            )
            room_left = share_left - self._charged_left
            room_right = capacity - share_left - self._charged_right
            from_left = blocked_right or (not blocked_left and room_left >= room_right)
            room = room_left if from_left else room_right
            request = left if from_left else right
            idle = control.num_running == 0
            if (room > 0 or idle) and self._try_admit(control, request):
                self._charge_to(request, left=from_left)
            elif from_left:
                blocked_left = True
            else:
                blocked_right = True

    def _skip_admitted(self) -> bool:
        """Move both pointers to requests that wait; False if none does."""
        while self._left <= self._right and self._admitted[self._order[self._left]]:
            self._left += 1
        while self._left <= self._right and self._admitted[self._order[self._right]]:
            self._right -= 1
        return self._left <= self._right

    def _try_admit(self, control: Control, request: int) -> bool:
        admitted = super()._try_admit(control, request)
        if admitted and self._charge[request] == 0:
            # Sampled and retracted requests belong to the pointer they lie nearer to.
            self._charge_to(request, left=bool(2 * self._position[request] < self._left + self._right))
        return admitted

    def _charge_to(self, request: int, *, left: bool) -> None:
        self._uncharge(request)
        self._charge[request] = self._own_prompt_tokens[request] + self.output_tokens_est[request] / 2
        self._on_left[request] = left
        if left:
            self._charged_left += self._charge[request]
        else:
            self._charged_right += self._charge[request]

    def _uncharge(self, request: int) -> None:
        if self._on_left[request]:
            self._charged_left -= self._charge[request]
        else:
            self._charged_right -= self._charge[request]
        self._charge[request] = 0

    def _charge_overruns(self, control: Control) -> None:
        """Charge what has outgrown its estimate for its real size, to the right side."""
        requests, generated = control.running_requests, control.running_output_tokens
        for index in np.flatnonzero(generated > self.output_tokens_est[requests]):
            request = int(requests[index])
            self.output_tokens_est[request] = min(
                1.5 * generated[index], float(self.plan.max_tokens[request])
            )
            self._charge_to(request, left=False)

    def finished(self, request: int, num_output_tokens: int) -> None:
        """Free the request's share of its side."""
        self._uncharge(request)
        super().finished(request, num_output_tokens)

    def retracted(self, request: int) -> None:
        """Free the request's share of its side until it comes back."""
        self._uncharge(request)
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
