"""The paper's policy."""

from __future__ import annotations

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
        self.output_tokens_est[requests] = np.minimum(
            OVERRUN_FACTOR * generated, self.plan.max_tokens[requests]
        )
        self._charge[requests] = self._own_prompt_tokens[requests] + self.output_tokens_est[requests] / 2
        self._side[requests] = NEITHER
        self._charge_to(RIGHT, requests)

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
