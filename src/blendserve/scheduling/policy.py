"""What a policy is: who is admitted next, behind one narrow protocol.

A policy never sees blocks, and the `Control` it steers never sees order. The same policy therefore drives our own
scheduler exactly, and an external engine's admission window by estimate.
"""

from __future__ import annotations

import logging
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from blendserve.planner.plan import Plan
from blendserve.planner.prefix_tree import Ints

Floats = NDArray[np.float64]

_log = logging.getLogger(__name__)

FIRST_REPLAN_AFTER = 16
"""completions after which estimates are first renewed; afterwards whenever their number has doubled"""
SPLIT_UNTIL_RATIO = 0.02
"""share of the requests that must have finished before the splits of the tree are left as they are"""
OVERRUN_FACTOR = 1.5
"""a sequence that outlives its estimate is expected to reach this multiple of its age"""


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
        self, requests: Ints, output_tokens_est: Floats, max_tokens: int, *, look_ahead: bool = True
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

    Requests in `_first` (retracted ones, and what a policy puts there) go before its own order (`_admit_in_order`).
    """

    name = ""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.output_tokens_est = plan.output_tokens_est.copy()
        self._estimator = plan.estimator()
        self._replan_at = FIRST_REPLAN_AFTER
        self._first: Ints = np.empty(0, dtype=np.int32)
        self._finished = np.empty((2, plan.num_requests), dtype=np.int32)
        """requests in the order in which they finished, and their output tokens"""
        self._num_finished = 0
        self._num_learnt = 0

    def start(self, control: Control) -> None:
        """A run begins."""

    def step(self, control: Control) -> int:
        """Admit what should run now; returns the token target of the next step."""
        if len(self._first):
            self._first = self._first[self._admit_first(control) :]
        self._admit_in_order(control)
        return control.max_num_batched_tokens

    def finished(self, requests: Ints, output_tokens: Ints) -> None:
        """Requests have their results."""
        start, self._num_finished = self._num_finished, self._num_finished + len(requests)
        self._finished[0, start : self._num_finished] = requests
        self._finished[1, start : self._num_finished] = output_tokens
        if self._estimator.num_finished + self._num_finished - self._num_learnt >= self._replan_at:
            self._catch_up()
            self._replan_at = 2 * self._estimator.num_finished
            self.output_tokens_est = self._estimator.estimate()
            self._estimates_changed()

    def _catch_up(self) -> None:
        """Learn from all that has finished; together, because a hundred requests cost little more than one."""
        if self._num_learnt < self._num_finished:
            self._learn(*self._finished[:, self._num_learnt : self._num_finished])
            self._num_learnt = self._num_finished

    def _learn(self, requests: Ints, output_tokens: Ints) -> None:
        """Take note of finished requests, which may have finished some steps ago."""
        self._estimator.finished(requests, output_tokens)

    def retracted(self, request: int, output_tokens: int) -> None:  # noqa: ARG002
        """A running request was taken out after so many tokens; it goes first when there is room again."""
        self._first = np.concatenate((np.array([request], dtype=np.int32), self._first))

    def choose_victim(self, control: Control) -> int:
        """The running request to retract when memory runs out: the youngest, which loses least."""
        return int(control.running_requests[-1])

    def _admit_first(self, control: Control) -> int:
        return control.admit(self._first, self.output_tokens_est, control.max_num_batched_tokens)

    def _admit_in_order(self, control: Control) -> None:
        """Admit from the policy's own order; `_first` may still hold what did not fit."""
        raise NotImplementedError

    def _estimates_changed(self) -> None:
        """`output_tokens_est` was renewed."""

    def _reorder(self) -> None:
        """Order `plan` anew at the present estimates; once many have finished, without splitting more leaves."""
        self.plan = self.plan.reordered(self.output_tokens_est, keep_split=not self._is_early)
        self._log_replan()

    @property
    def _is_early(self) -> bool:
        """Whether so few have finished that leaves may still be split."""
        return self._estimator.num_finished < SPLIT_UNTIL_RATIO * self.plan.num_requests

    def _log_replan(self) -> None:
        if _log.isEnabledFor(logging.INFO):
            facts = {
                "num_finished": self._estimator.num_finished,
                "expected_output_tokens": float(self.output_tokens_est.sum()),
                "num_split": self.plan.leaf_order.num_split,
            }
            _log.info("replanned", extra={"fields": facts})


class OrderedPolicy(Policy):
    """Admits requests in a fixed order; the head of the line waits until it fits, as in vLLM and SGLang."""

    def __init__(self, plan: Plan, order: Ints, name: str) -> None:
        super().__init__(plan)
        self.name = name
        self._waiting = order

    def _admit_in_order(self, control: Control) -> None:
        if len(self._waiting) and len(self._first) == 0:
            settled = control.admit(self._waiting, self.output_tokens_est, control.max_num_batched_tokens)
            self._waiting = self._waiting[settled:]
