"""How far declared output lengths are to be believed, learnt from what has finished and what still runs.

Users declare what they know, guess, or copy from a default. What is kept is therefore not the declared length but the
distribution of the actual length over it, by class of requests. Running requests count as well: they have lasted so
long already.
"""

from __future__ import annotations

import math

import numba
import numpy as np
from numpy.typing import NDArray

from blendserve.planner.prefix_tree import Ints

Floats = NDArray[np.float64]

BUCKETS_PER_OCTAVE = 4
"""resolution of ratios; inside a bucket their mean is kept, so that exact declarations stay exact"""
OCTAVES = 8
"""ratios from 2^-8 to 2^8"""
NUM_BUCKETS = 2 * OCTAVES * BUCKETS_PER_OCTAVE + 1
EXACT = OCTAVES * BUCKETS_PER_OCTAVE
"""the bucket of ratio 1"""
PRIOR_FADES_AFTER = 4.0
"""finished requests of a class after which what is taken of its ratios beforehand weighs half a request"""
JOB_WEIGHT = 4.0
"""requests that those of the whole job count for against those of a class"""
LEAST_SPREAD_RATIO = 0.2
"""of the variance of errors, what lengths are taken to vary at the least where declarations are not to be believed"""
SURE_END = 1e-3
"""of requests of which all are taken to have ended, those that have not"""
OVERRUN_HAZARD = 0.3
"""probability to end within a bucket for what has outlived all that was to be expected"""
SPREAD_WEIGHT = 16.0
"""the same for the exponent of declared lengths"""
SAME_VARIANCE = 1e-3
"""of the log of declared lengths, below which they are all the same"""
DEFAULT_VARIANCE = 0.02
"""of the log of actual lengths, from which such a length is taken for a default that says nothing"""
LEAST_SEEN = 8
"""finished requests from which it is judged whether declared lengths say anything"""
LEAST_EXPONENT = 0.1
"""exponents below this are taken for 0"""
NOISE_VARIANCE = 2.0
"""of the log of actual over declared length, from which such declared lengths are forgotten: off by a factor of four"""
SURE_EXPONENT = 0.97
"""exponents from here on are taken for 1"""
LEAST_CHANGE = 0.05
"""of an exponent, for which lengths are weighed anew"""
VALUE, ALIVE, TOKENS, SQUARE = 0, 1, 2, 3


class DeclaredLengths:
    """Actual lengths over `hint`, by class: Kaplan-Meier curves that start as log-normal ones.

    `hint` is the declared length, drawn towards the class's geometric mean by an exponent: the more the declared
    lengths of a class owe to error, the likelier a long one is too long. Exact declarations have exponent 1;
    those that say nothing are forgotten.

    Args:
        classes: [num_requests]
        declared: [num_requests] output tokens, 0 where nothing is declared.
    """

    def __init__(self, classes: Ints, declared: Ints) -> None:
        num_classes = int(classes.max(initial=0)) + 1
        self._classes = classes
        self._members = np.flatnonzero(declared > 0).astype(np.int32)
        self.hint = declared.astype(np.float64)
        """[num_requests] length that the ratios refer to, 0 where nothing is declared"""
        self._log = np.log(np.maximum(self.hint, 1.0))
        kind = classes[self._members]
        count = np.maximum(np.bincount(kind, minlength=num_classes), 1)
        self._log_mean = np.bincount(kind, self._log[self._members], num_classes) / count
        deviation = self._log[self._members] - self._log_mean[kind]
        self._log_variance = np.bincount(kind, deviation**2, num_classes) / count
        self._exponent = np.ones(num_classes)
        self._declared = declared
        self._output_tokens = np.zeros(len(declared), dtype=np.int32)
        self._sums = np.zeros((num_classes, 6))
        """finished requests, their log declared and log actual length, squares and product of these"""
        self._ended = np.zeros((2, num_classes, NUM_BUCKETS))
        """finished requests, and the sum of their ratios"""
        self.ends = np.zeros((num_classes, NUM_BUCKETS + 1, 4))
        """[num_classes, num_ends + 1, 4] of each ratio at which requests may end, ascending: its value; probability to
        come that far; and sums over it and all later ones of probability times value and times value squared. The last
        is infinite and never reached"""
        self._fit(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32))

    @property
    def mean(self) -> Floats:
        """[num_classes] expected ratio."""
        return self.ends[:, 0, TOKENS]

    @property
    def square(self) -> Floats:
        """[num_classes] expected square of the ratio."""
        return self.ends[:, 0, SQUARE]

    @property
    def variation(self) -> Floats:
        """[num_classes] standard deviation of the ratio over its mean."""
        return np.asarray(np.sqrt(np.maximum(self.square / self.mean**2 - 1.0, 0.0)))

    @property
    def num_finished(self) -> Floats:
        """[num_classes] finished requests with a declared length."""
        return self._sums[:, 0]

    def finished(self, requests: Ints, output_tokens: Ints) -> None:
        """Take note of finished requests."""
        if len(self._members):
            self._output_tokens[requests] = output_tokens
            _learn(self._sums, self._log, self._classes, self.hint, requests, output_tokens)
            _count(self._ended, self._classes, self.hint, requests, output_tokens)

    def refresh(self, requests: Ints, generated: Ints) -> None:
        """Renew `ends`, with what runs now and how many tokens it has generated."""
        if len(self._members):
            self._fit(requests, generated)

    def _fit(self, requests: Ints, generated: Ints) -> None:
        num, x, y, xx, yy, xy = self._sums.T
        declared = requests[self.hint[requests] > 0]
        num_running = np.bincount(self._classes[declared], minlength=len(num))
        error_variance = self._error_variance()
        b = self._exponent
        # Those that have finished while many run are the short ones, so they do not say by how much all are off.
        weight = JOB_WEIGHT + num_running
        job_bias = (y - x).sum() / (num + weight).sum()
        bias = (y - b * x - num * (1.0 - b) * self._log_mean + weight * job_bias) / (num + weight)
        mean = (y - b * x) / np.maximum(num, 1.0)
        squares = yy + b**2 * xx - 2.0 * b * xy - num * mean**2
        variance = np.maximum(squares, 0.0) + weight * np.maximum(b, LEAST_SPREAD_RATIO) * error_variance
        spread = np.sqrt(variance / (num + weight))
        _fit(self._ended, self._classes, self.hint, requests, generated, bias, spread, num, self.ends)

    def _error_squares(self) -> Floats:
        """[num_classes] sum of squared deviations of the log of actual over declared length."""
        num, x, y, xx, yy, xy = self._sums.T
        return np.maximum(xx + yy - 2.0 * xy - (y - x) ** 2 / np.maximum(num, 1.0), 0.0)

    def _error_variance(self) -> Floats:
        """[num_classes] of the same; classes that have not shown are taken to err as the whole job does."""
        num, squares = self._sums[:, 0], self._error_squares()
        of_job = squares.sum() / max(num.sum(), 1.0)
        return np.asarray((squares + JOB_WEIGHT * of_job) / (num + JOB_WEIGHT))

    def weigh(self) -> bool:
        """Renew `hint`; returns whether it has changed, after which `refresh` is due."""
        if len(self._members) == 0:
            return False
        exponent = self._exponents()
        idle = self._says_nothing(exponent)
        change = np.abs(exponent - self._exponent)[self._has_members()]
        if not idle.any() and change.max() < LEAST_CHANGE:
            return False
        forgotten = idle[self._classes[self._members]]
        self.hint[self._members[forgotten]] = 0.0
        self._members = self._members[~forgotten]
        self._sums[idle] = 0.0
        self._exponent = exponent
        kind, declared = self._classes[self._members], self._declared[self._members]
        log = self._log_mean[kind] + exponent[kind] * (self._log[self._members] - self._log_mean[kind])
        self.hint[self._members] = np.where(exponent[kind] == 1.0, declared, np.exp(log))
        done = self._members[self._output_tokens[self._members] > 0]
        self._ended[:] = 0.0
        _count(self._ended, self._classes, self.hint, done, self._output_tokens[done])
        return True

    def _says_nothing(self, exponent: Floats) -> NDArray[np.bool_]:
        """[num_classes] whose declared lengths have nothing to do with actual ones.

        Where they are the same everywhere although actual lengths vary, they are a default. A class that has not shown
        is judged by others that declare one length everywhere.
        """
        num = self._sums[:, 0]
        same = self._log_variance < SAME_VARIANCE
        seen, squares = num[same].sum(), self._error_squares()[same].sum()
        is_default = same & bool(seen >= LEAST_SEEN and squares > DEFAULT_VARIANCE * seen)
        is_noise = ~same & (exponent < LEAST_EXPONENT) & bool(num.sum() >= LEAST_SEEN)
        is_noise &= self._error_variance() > NOISE_VARIANCE
        return np.asarray(self._has_members() & (is_default | is_noise))

    def _has_members(self) -> NDArray[np.bool_]:
        has = np.zeros(len(self._exponent), dtype=np.bool_)
        has[self._classes[self._members]] = True
        return has

    def _exponents(self) -> Floats:
        """[num_classes] how much of a difference between declared lengths is one of actual lengths.

        Before a class has shown: the share of the variance of its declared lengths that is no error, if it errs as the
        whole job does and errors have nothing to do with lengths. Afterwards what a regression of actual on
        declared lengths says.
        """
        num, x, y, xx, _, xy = self._sums.T
        safe = np.maximum(num, 1.0)
        error_variance = self._error_variance()
        variance = np.maximum(self._log_variance, 1e-9)
        prior = np.clip(1.0 - error_variance / variance, 0.0, 1.0)
        covariance = xy - x * y / safe
        exponent = (SPREAD_WEIGHT * variance * prior + covariance) / (
            SPREAD_WEIGHT * variance + xx - x**2 / safe
        )
        sure = (exponent > SURE_EXPONENT) | (self._log_variance < SAME_VARIANCE)
        return np.where(sure, 1.0, np.maximum(exponent, 0.0))


@numba.njit(cache=True, nogil=True)
def _bucket(ratio):  # type: ignore[no-untyped-def]
    return min(max(int(np.floor(BUCKETS_PER_OCTAVE * np.log2(ratio) + 0.5)) + EXACT, 0), NUM_BUCKETS - 1)


@numba.njit(cache=True, nogil=True)
def first_end(ends, ratio):  # type: ignore[no-untyped-def]
    """Row of a class's `ends` with the first value above a ratio."""
    low, high = 0, len(ends) - 1
    while low < high:
        middle = (low + high) // 2
        if ends[middle, VALUE] > ratio:
            high = middle
        else:
            low = middle + 1
    return low


@numba.njit(cache=True, nogil=True)
def _count(ended, classes, hint, requests, output_tokens):  # type: ignore[no-untyped-def]
    for i in range(len(requests)):
        request = requests[i]
        if hint[request] > 0.0:
            ratio = max(output_tokens[i], 1) / hint[request]
            bucket = _bucket(ratio)
            ended[0, classes[request], bucket] += 1.0
            ended[1, classes[request], bucket] += ratio


@numba.njit(cache=True, nogil=True)
def _learn(sums, log, classes, hint, requests, output_tokens):  # type: ignore[no-untyped-def]
    """Add to `DeclaredLengths._sums`."""
    for i in range(len(requests)):
        request = requests[i]
        if hint[request] > 0.0:
            row, x, y = sums[classes[request]], log[request], np.log(max(output_tokens[i], 1))
            row[0] += 1.0
            row[1] += x
            row[2] += y
            row[3] += x * x
            row[4] += y * y
            row[5] += x * y


@numba.njit(cache=True, nogil=True)
def _fit(ended, classes, hint, requests, generated, bias, spread, num_finished, ends):  # type: ignore[no-untyped-def]
    _, num_classes, num_buckets = ended.shape
    at_risk = np.zeros((num_classes, num_buckets + 1))
    at_risk[:, :-1] = ended[0]
    for i in range(len(requests)):  # at risk in every bucket that it has left behind
        request = requests[i]
        if hint[request] > 0.0 and generated[i] > 0:
            bucket = _bucket(generated[i] / hint[request])
            if bucket > 0:
                at_risk[classes[request], bucket - 1] += 1.0
    value = np.zeros(num_buckets)
    for bucket in range(num_buckets):
        center = 2.0 ** ((bucket - EXACT) / BUCKETS_PER_OCTAVE)
        value[bucket] = (center + ended[1, :, bucket].sum()) / (1.0 + ended[0, :, bucket].sum())
    for group in range(num_classes):
        for bucket in range(num_buckets - 1, -1, -1):
            at_risk[group, bucket] += at_risk[group, bucket + 1]
        weight = 1.0 / (1.0 + num_finished[group] / PRIOR_FADES_AFTER)
        alive = later = 1.0
        for bucket in range(num_buckets):
            edge = (bucket - EXACT + 0.5) / BUCKETS_PER_OCTAVE * np.log(2.0)
            score = (edge - bias[group]) / max(spread[group], 1e-3)
            before, later = later, 0.5 * math.erfc(score / np.sqrt(2.0))
            hazard = 1.0 - later / before if before > SURE_END else OVERRUN_HAZARD
            hazard = (ended[0, group, bucket] + weight * min(hazard, 1.0 - SURE_END)) / (
                at_risk[group, bucket] + weight
            )
            ends[group, bucket, VALUE] = (ended[1, group, bucket] + value[bucket]) / (
                ended[0, group, bucket] + 1.0
            )
            ends[group, bucket, ALIVE] = alive
            alive *= 1.0 - hazard
        ends[group, num_buckets, VALUE] = np.inf
        ends[group, num_buckets, ALIVE] = 0.0
        tokens = square = 0.0
        for bucket in range(num_buckets - 1, -1, -1):
            at = ends[group, bucket, VALUE]
            probability = ends[group, bucket, ALIVE] - ends[group, bucket + 1, ALIVE]
            tokens += probability * at
            square += probability * at * at
            ends[group, bucket, TOKENS] = tokens
            ends[group, bucket, SQUARE] = square
