"""How long outputs will be: sampled inside the run, learnt per subtree.

Nothing is generated twice: the sampled requests are ordinary requests that run first, and every completion, sampled or
not, improves the estimates of what is still waiting. Source: BlendServe §5.1.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from blendserve.planner.prefix_tree import Ints, PrefixTree

Floats = NDArray[np.float64]

SAMPLE_RATIO = 0.01
MIN_SAMPLES_PER_SUBTREE = 32
MOST_SAMPLES_RATIO = 0.1
"""of a subtree, whatever the least number says"""
MIN_STRATUM = 8
MIN_STRATUM_RATIO = 5e-4
MIN_STRATUM_PREFIX = 8
"""requests that a subtree must have to be a stratum of its own, and either such a share of the job's, or so many common
tokens that they are no chance: a handful of long outputs may be half of the job's work"""
MAX_STRATA = 64
PRIOR_OUTPUT_TOKENS = 256.0
"""assumed for a request of which nothing is known but that it may run this long"""


class OutputLengthEstimator:
    """Expected output tokens of every request, from what has finished so far.

    A declared length is taken as it is. Otherwise a request takes the mean of its deepest subtree, shrunk towards that
    of the enclosing one, and so on up to the root. How far, the lengths tell: where subtrees differ no more than
    requests inside one do (prompts that share a first word), a few finished requests count for little; where they
    differ (benchmarks, tasks), each stands for itself. A subtree without finished requests takes the enclosing one's
    estimate, which is its siblings' mean. Source: BlendServe §5.1; shrinkage is one-way random-effects ANOVA, ours.
    No estimate exceeds the request's `max_tokens`. Before anything has finished the estimate is
    `min(max_tokens, PRIOR_OUTPUT_TOKENS)`.
    """

    def __init__(self, tree: PrefixTree, max_tokens: Ints, declared_tokens: Ints) -> None:
        self._tree = tree
        self._rank = np.empty(tree.num_leaves, dtype=np.int32)
        self._rank[tree.requests] = np.arange(tree.num_leaves, dtype=np.int32)
        self._max_tokens = max_tokens.astype(np.float64)
        self._declared = declared_tokens.astype(np.float64)
        self._output_by_leaf = np.zeros(tree.num_leaves)
        self._finished_by_leaf = np.zeros(tree.num_leaves)
        self.num_finished = 0

    def finished(self, requests: Ints, output_tokens: Ints) -> None:
        """Take note of finished requests."""
        rank = self._rank[requests]
        self._output_by_leaf[rank] = output_tokens
        self._finished_by_leaf[rank] = 1.0
        self.num_finished += len(requests)

    def forget_declared(self, requests: NDArray[np.integer]) -> None:
        """Declared lengths of these say nothing."""
        self._declared[requests] = 0.0

    def estimate(self) -> Floats:
        """[num_requests] expected output tokens; exact for finished requests and declared lengths."""
        tree = self._tree
        prior = np.minimum(self._max_tokens, PRIOR_OUTPUT_TOKENS)
        by_request = prior
        if self.num_finished:
            mean = _shrunk_means(
                tree.parent,
                tree.leaf_sums(self._finished_by_leaf),
                tree.leaf_sums(self._output_by_leaf),
                tree.leaf_sums(self._output_by_leaf**2),
            )
            by_leaf = np.where(self._finished_by_leaf > 0, self._output_by_leaf, mean[tree.leaf_parent])
            by_request = np.empty_like(by_leaf)
            by_request[tree.requests] = by_leaf
        expected = np.where(self._declared > 0, self._declared, np.minimum(by_request, self._max_tokens))
        return np.maximum(expected, 1.0)


@numba.njit(cache=True, nogil=True)
def _shrunk_means(parent, count, total, squares):  # type: ignore[no-untyped-def]
    """[num_nodes] mean of every node's finished leaves, shrunk towards its parent's; nodes come after their parents."""
    num_nodes = len(parent)
    groups = np.zeros(num_nodes)  # children with finished leaves; the leaves right below a node are one group
    within = np.zeros(num_nodes)  # sums of squares inside groups
    between = np.zeros(num_nodes)
    sizes = np.zeros(num_nodes)
    loose = count.copy()
    loose_total, loose_squares = total.copy(), squares.copy()
    for node in range(1, num_nodes):
        if count[node] > 0:
            up = parent[node]
            loose[up] -= count[node]
            loose_total[up] -= total[node]
            loose_squares[up] -= squares[node]
            groups[up] += 1
            within[up] += squares[node] - total[node] ** 2 / count[node]
            between[up] += total[node] ** 2 / count[node]
            sizes[up] += count[node] ** 2
    # The variance of a group over that between groups: so many samples of its own weigh as much as the parent's mean.
    weight = np.zeros(num_nodes)
    mean = np.zeros(num_nodes)
    for node in range(num_nodes):
        if count[node] == 0:
            mean[node] = mean[parent[node]]
            continue
        if loose[node] > 0.5:
            groups[node] += 1
            within[node] += loose_squares[node] - loose_total[node] ** 2 / loose[node]
            between[node] += loose_total[node] ** 2 / loose[node]
            sizes[node] += loose[node] ** 2
        weight[node] = 1.0
        if 2 <= groups[node] < count[node]:
            inside = max(within[node], 0.0) / (count[node] - groups[node])
            outside = (between[node] - total[node] ** 2 / count[node]) / (groups[node] - 1)
            typical_size = (count[node] - sizes[node] / count[node]) / (groups[node] - 1)
            variance = max((outside - inside) / typical_size, 1e-6 * (inside + 1e-6))
            weight[node] = inside / variance
        own = total[node] / count[node]
        if node == 0:
            mean[node] = own
        else:
            shrink = weight[parent[node]]
            mean[node] = (total[node] + shrink * mean[parent[node]]) / (count[node] + shrink)
    return mean


def sample_requests(
    tree: PrefixTree,
    stratum: Ints,
    declared_tokens: Ints,
    *,
    ratio: float = SAMPLE_RATIO,
    min_per_subtree: int = MIN_SAMPLES_PER_SUBTREE,
    seed: int = 0,
) -> Ints:
    """Requests to run first so that every stratum is known early: `ratio` of each, at least `min_per_subtree`.

    No more than a tenth of a stratum is sampled for the sake of the least number. Requests of declared length are not
    sampled.
    """
    rng = np.random.default_rng(seed)
    unknown = declared_tokens[tree.requests] == 0
    by_leaf = stratum[tree.requests]
    shuffled = rng.permutation(np.flatnonzero(unknown))
    by_stratum = shuffled[np.argsort(by_leaf[shuffled], kind="stable")]
    _, start, size = np.unique(by_leaf[by_stratum], return_index=True, return_counts=True)
    least = np.minimum(min_per_subtree, np.ceil(size * MOST_SAMPLES_RATIO))
    wanted = np.minimum(size, np.maximum(np.ceil(size * ratio), least)).astype(np.int64)
    position = np.arange(len(by_stratum)) - np.repeat(start, size)
    chosen = by_stratum[position < np.repeat(wanted, size)]
    return np.asarray(tree.requests[rng.permutation(chosen)])


def find_strata(tree: PrefixTree, max_tokens: Ints) -> Ints:
    """[num_requests] which requests are taken to be of one kind as to their output lengths, numbered from 0.

    The strata are the `MAX_STRATA` largest subtrees at the first branchings below the root that are large or have a
    prefix in common that is no chance. Everything else is divided by `max_tokens`, the only other thing that tells
    requests apart.
    """
    found = _first_branchings(tree.first, tree.end, tree.next_sibling)
    size = tree.end[found] - tree.first[found]
    is_kind = size >= MIN_STRATUM_RATIO * tree.num_leaves
    is_kind |= tree.depth[found] - tree.depth[tree.parent[found]] >= MIN_STRATUM_PREFIX
    is_kind &= size >= MIN_STRATUM
    found = found[is_kind][np.argsort(-size[is_kind], kind="stable")[:MAX_STRATA]]
    stratum = -1 - max_tokens[tree.requests].astype(np.int64)
    owner = np.zeros(tree.num_leaves + 1, dtype=np.int64)
    np.add.at(owner, tree.first[found], found)
    np.add.at(owner, tree.end[found], -found)
    inside = np.cumsum(owner)[:-1]
    label = np.where(inside > 0, inside, stratum)
    by_request = np.empty(tree.num_leaves, dtype=np.int32)
    by_request[tree.requests] = np.unique(label, return_inverse=True)[1]
    return by_request


@numba.njit(cache=True, nogil=True)
def _first_branchings(first, end, next_sibling):  # type: ignore[no-untyped-def]
    """Children of the root; for one that holds nearly all of its parent's leaves, its children in its place.

    A prefix that nearly all requests share (one system prompt) tells nothing.
    """
    found = np.empty(len(first), np.int64)
    count = 0
    node = 0
    while True:
        largest, most = -1, 0
        child = node + 1
        while child < next_sibling[node]:
            size = end[child] - first[child]
            if size > most:
                largest, most = count, size
            found[count] = child
            count += 1
            child = next_sibling[child]
        if largest < 0 or most < 0.9 * (end[node] - first[node]):
            return found[:count].copy()
        node = found[largest]
        count -= 1
        found[largest:count] = found[largest + 1 : count + 1]
