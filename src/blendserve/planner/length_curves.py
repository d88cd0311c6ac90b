"""How long outputs still run: survival curves per class of requests, from what has finished and what still runs.

A running request is evidence too: it has lasted so long already. Leaving it out makes every estimate too short while
long outputs are still under way, because those that have finished are the short ones.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from blendserve.planner.prefix_tree import Ints

Floats = NDArray[np.float64]

BUCKETS_PER_OCTAVE = 4
"""resolution of curves over output lengths"""
POINTS_PER_OCTAVE = 8
"""resolution of time ahead"""
FIRST_POINT_STEPS = 16
PRIOR_FADES_AFTER = 4.0
"""finished requests of a class after which the prior weighs half a request"""


class CurveTables(NamedTuple):
    """What compiled code reads. An age is a number of tokens generated; a token takes one step."""

    points: Floats
    """[num_points] steps ahead, 0 first, geometric"""
    alive: Floats
    """[num_classes, num_ages, num_points] probability to run so many steps more, by class and age"""
    left: Floats
    """[num_classes, num_ages] expected tokens still to come"""
    left_squared: Floats
    """[num_classes, num_ages] expected square of that"""


@numba.njit(cache=True, nogil=True, inline="always")
def age_index(generated):  # type: ignore[no-untyped-def]
    """Row of `CurveTables` for a request that has generated so many tokens."""
    return 0 if generated < 1 else int(BUCKETS_PER_OCTAVE * np.log2(generated)) + 1


class LengthCurves:
    """Kaplan-Meier curves on a logarithmic scale, with a prior that is flat in log length up to the class's cap.

    Args:
        caps: [num_classes] most tokens that a request of the class may generate.
    """

    def __init__(self, caps: Ints) -> None:
        most = int(caps.max(initial=1))
        num_buckets = int(BUCKETS_PER_OCTAVE * np.log2(max(most, 2))) + 2
        num_points = int(POINTS_PER_OCTAVE * np.log2(max(most / FIRST_POINT_STEPS, 1.0))) + 3
        points = np.zeros(num_points)
        points[1:] = FIRST_POINT_STEPS * 2.0 ** (np.arange(num_points - 1) / POINTS_PER_OCTAVE)
        shape = (len(caps), num_buckets + 1)
        self._caps = caps.astype(np.int64)
        self._at_risk = np.zeros((len(caps), num_buckets))
        self._ended = np.zeros((len(caps), num_buckets))
        self.num_finished = np.zeros(len(caps), dtype=np.int64)
        self.tables = CurveTables(points, np.zeros((*shape, num_points)), np.zeros(shape), np.zeros(shape))
        start = np.concatenate(([0.0], 2.0 ** ((np.arange(num_buckets) + 0.5) / BUCKETS_PER_OCTAVE)))
        self._bucket, self._fraction = _places(start[:, None] + points, num_buckets)
        nobody = np.empty(0, dtype=np.int32)
        self.refresh(nobody, nobody)

    def finished(self, classes: Ints, output_tokens: Ints) -> None:
        """Take note of finished requests."""
        _count(self._at_risk, self._ended, self.num_finished, classes, output_tokens)

    def refresh(self, classes: Ints, generated: Ints) -> None:
        """Renew `tables`, with the classes and ages of what runs now."""
        running = classes, generated
        places = self._bucket, self._fraction
        _fit(self._at_risk, self._ended, self.num_finished, self._caps, *running, *places, self.tables)


def _places(tokens: Floats, num_buckets: int) -> tuple[Ints, Floats]:
    """Where on a curve numbers of tokens lie: bucket, and how far from its lower edge to its upper one."""
    bucket = np.minimum(BUCKETS_PER_OCTAVE * np.log2(np.maximum(tokens, 1.0)), num_buckets).astype(np.int32)
    low, high = 2.0 ** (bucket / BUCKETS_PER_OCTAVE), 2.0 ** ((bucket + 1) / BUCKETS_PER_OCTAVE)
    return bucket, np.clip((tokens - low) / (high - low), 0.0, 1.0)


@numba.njit(cache=True, nogil=True)
def _count(at_risk, ended, num_finished, classes, output_tokens):  # type: ignore[no-untyped-def]
    for i in range(len(classes)):
        bucket = min(
            max(age_index(output_tokens[i]) - 1, 0), at_risk.shape[1] - 1
        )  # 0: failed before its first
        at_risk[classes[i], : bucket + 1] += 1.0
        ended[classes[i], bucket] += 1.0
        num_finished[classes[i]] += 1


@numba.njit(cache=True, nogil=True)
def _fit(at_risk, ended, num_finished, caps, classes, generated, bucket_at, fraction_at, tables):  # type: ignore[no-untyped-def]
    num_classes, num_buckets = at_risk.shape
    running = np.zeros((num_classes, num_buckets + 1))
    for i in range(len(classes)):  # at risk in every bucket that it has left behind
        running[classes[i], min(max(age_index(generated[i]) - 1, 0), num_buckets)] += 1.0
    # Probability of more tokens than a bucket's lower edge; linear in between, and 0 from the last edge on.
    curve = np.zeros(num_buckets + 2)
    points = tables.points
    for group in range(num_classes):
        for bucket in range(num_buckets - 1, -1, -1):
            running[group, bucket] += running[group, bucket + 1]
        weight = 1.0 / (1.0 + num_finished[group] / PRIOR_FADES_AFTER)
        last = min(age_index(caps[group]) - 1, num_buckets - 1)
        curve[0] = 1.0
        for bucket in range(num_buckets):
            hazard = 1.0
            if bucket < last:
                risk = at_risk[group, bucket] + running[group, bucket + 1]
                hazard = (ended[group, bucket] + weight / (last + 1 - bucket)) / (risk + weight)
            curve[bucket + 1] = curve[bucket] * (1.0 - hazard)
        for age in range(tables.alive.shape[1]):
            now = 0.0
            left = left_squared = 0.0
            for i in range(len(points)):
                place = bucket_at[age, i]
                alive = curve[place] + (curve[place + 1] - curve[place]) * fraction_at[age, i]
                if i == 0:
                    now = alive
                alive = alive / now if now > 0.0 else 0.0
                if i == 0:
                    alive = 1.0
                tables.alive[group, age, i] = alive
                if i > 0:
                    before = tables.alive[group, age, i - 1]
                    width = points[i] - points[i - 1]
                    left += (alive + before) / 2.0 * width
                    left_squared += (alive * points[i] + before * points[i - 1]) * width
            if age == 0:  # outputs shorter than the first point ahead need the curve's own resolution
                left, left_squared = _moments(curve[:-1])
            tables.left[group, age] = max(left, 1.0)
            tables.left_squared[group, age] = max(left_squared, 1.0)


@numba.njit(cache=True, nogil=True)
def _moments(curve):  # type: ignore[no-untyped-def]
    """Expected output tokens and their square: sums of P(d > t) and of (2t + 1) P(d > t)."""
    mean = square = 1.0  # t = 0
    for bucket in range(len(curve) - 1):
        low = 2.0 ** (bucket / BUCKETS_PER_OCTAVE)
        high = 2.0 ** ((bucket + 1) / BUCKETS_PER_OCTAVE)
        count = np.ceil(high) - np.ceil(low)  # whole numbers of tokens t in [low, high)
        if count > 0:
            middle = (np.ceil(low) + np.ceil(high) - 1.0) / 2.0
            more = curve[bucket + 1]
            if high - low > 1.0:
                more = (curve[bucket] + curve[bucket + 1]) / 2.0
            mean += count * more
            square += count * more * (2.0 * middle + 1.0)
    return mean, square
