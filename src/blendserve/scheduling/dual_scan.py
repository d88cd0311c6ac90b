"""The paper's policy."""

from __future__ import annotations

import numba
import numpy as np

from blendserve.cost_model import memory_split
from blendserve.planner.plan import Plan
from blendserve.planner.prefix_tree import Ints
from blendserve.scheduling.policy import OVERRUN_FACTOR, Control, Policy

OVERRUN_CHECK_STEPS = 16
LOOK_AHEAD = 64
"""candidates offered for admission at once from either end"""
NEITHER, LEFT, RIGHT = 0, 1, 2


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
        self._charged = np.zeros(3)
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
        self._reorder()
        self._adopt(self.plan)

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
        if len(self._first) == 0:  # what was retracted waits for the memory of its side, not of the other
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
        ahead = _within(ahead, self._side, self._charge, room)
        settled = control.admit(ahead, self.output_tokens_est, control.max_num_batched_tokens)
        if settled == 0:
            return
        self._charge_to(side, ahead[:settled])
        end = len(self._waiting)
        kept = slice(settled, end) if side == LEFT else slice(0, end - settled)
        self._waiting, self._unit_density = self._waiting[kept], self._unit_density[kept]

    def _charge_to(self, side: int, requests: Ints) -> None:
        _charge_to(side, requests, self._side, self._charge, self._charged)

    def _uncharge(self, requests: Ints) -> None:
        _uncharge(requests, self._side, self._charge, self._charged)

    def _charge_overruns(self, control: Control) -> None:
        """Charge what has outgrown its estimate for its real size, to the right side."""
        _charge_overruns(
            control.running_requests,
            control.running_output_tokens,
            self.output_tokens_est,
            self.plan.max_tokens,
            self._own_prompt_tokens,
            self._side,
            self._charge,
            self._charged,
        )

    def finished(self, requests: Ints, output_tokens: Ints) -> None:
        """Free the requests' share of their side."""
        self._uncharge(requests)
        super().finished(requests, output_tokens)

    def retracted(self, request: int, output_tokens: int) -> None:
        """Free the request's share of its side until it comes back."""
        requests = np.array([request], dtype=np.int32)
        self._uncharge(requests)
        self._side[requests] = NEITHER
        super().retracted(request, output_tokens)


@numba.njit(cache=True, nogil=True)
def _within(ahead, sides, charge, room):  # type: ignore[no-untyped-def]
    """The leading requests up to the one whose charge takes the last of the room, in new memory."""
    for i in range(len(ahead)):
        if sides[ahead[i]] == NEITHER:
            room -= charge[ahead[i]]
        if room <= 0.0:
            return ahead[: i + 1].copy()
    return ahead.copy()


@numba.njit(cache=True, nogil=True)
def _charge_to(side, requests, sides, charge, charged):  # type: ignore[no-untyped-def]
    """Charge requests to a side, unless they are charged already."""
    for i in range(len(requests)):
        request = requests[i]
        if sides[request] == NEITHER:
            sides[request] = side
            charged[side] += charge[request]


@numba.njit(cache=True, nogil=True)
def _uncharge(requests, sides, charge, charged):  # type: ignore[no-untyped-def]
    """Take the charges of requests back; they keep their side."""
    for i in range(len(requests)):
        charged[sides[requests[i]]] -= charge[requests[i]]


@numba.njit(cache=True, nogil=True)
def _charge_overruns(requests, generated, output_est, max_tokens, own, sides, charge, charged):  # type: ignore[no-untyped-def]
    for i in range(len(requests)):
        request = requests[i]
        if generated[i] > output_est[request]:
            charged[sides[request]] -= charge[request]
            output_est[request] = min(OVERRUN_FACTOR * generated[i], max_tokens[request])
            charge[request] = own[request] + output_est[request] / 2.0
            sides[request] = RIGHT
            charged[RIGHT] += charge[request]
