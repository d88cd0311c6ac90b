"""How long outputs will be: sampled inside the run, learnt per subtree.

Nothing is generated twice: the sampled requests are ordinary requests that run first, and every completion, sampled or
not, improves the estimates of what is still waiting. Source: BlendServe §5.1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from blendserve.planner.prefix_tree import Ints, PrefixTree

Floats = NDArray[np.float64]

SAMPLE_RATIO = 0.01
MIN_SAMPLES_PER_SUBTREE = 4
PRIOR_OUTPUT_TOKENS = 256.0
"""assumed for a request of which nothing is known but that it may run this long"""


class OutputLengthEstimator:
    """Expected output tokens of every request, from what has finished so far.

    A declared length is taken as it is. Otherwise a request takes the mean of the finished requests in the nearest
    enclosing subtree that has any: its own, else its parent's (which is its siblings' mean), and so on up to the root.
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

    def finished(self, request: int, output_tokens: int) -> None:
        """Take note of a finished request."""
        rank = self._rank[request]
        self._output_by_leaf[rank] = output_tokens
        self._finished_by_leaf[rank] = 1.0
        self.num_finished += 1

    def estimate(self) -> Floats:
        """[num_requests] expected output tokens; exact for finished requests and declared lengths."""
        tree = self._tree
        prior = np.minimum(self._max_tokens, PRIOR_OUTPUT_TOKENS)
        by_request = prior
        if self.num_finished:
            total = tree.leaf_sums(self._output_by_leaf)
            count = tree.leaf_sums(self._finished_by_leaf)
            node = np.arange(tree.num_nodes, dtype=np.int32)
            # Pre-order: a node's parent is final before the node is looked at, hence one pass per tree level.
            nearest = np.where(count > 0, node, -1)
            while (missing := nearest < 0).any():
                nearest[missing] = nearest[tree.parent[missing]]
            mean = total[nearest] / count[nearest]
            by_leaf = np.where(self._finished_by_leaf > 0, self._output_by_leaf, mean[tree.leaf_parent])
            by_request = np.empty_like(by_leaf)
            by_request[tree.requests] = by_leaf
        expected = np.where(self._declared > 0, self._declared, np.minimum(by_request, self._max_tokens))
        return np.maximum(expected, 1.0)


def sample_requests(
    tree: PrefixTree,
    max_tokens: Ints,
    declared_tokens: Ints,
    *,
    ratio: float = SAMPLE_RATIO,
    min_per_subtree: int = MIN_SAMPLES_PER_SUBTREE,
    seed: int = 0,
) -> Ints:
    """Requests to run first so that every large subtree is known early: `ratio` of each, at least `min_per_subtree`.

    The strata are the subtrees at the first branching below the root; requests that share no prefix at all are divided
    by their `max_tokens`, the only other thing that tells them apart. Requests of declared length are not sampled.
    """
    rng = np.random.default_rng(seed)
    stratum = _strata(tree, max_tokens)
    unknown = declared_tokens[tree.requests] == 0
    shuffled = rng.permutation(np.flatnonzero(unknown))
    by_stratum = shuffled[np.argsort(stratum[shuffled], kind="stable")]
    _, start, size = np.unique(stratum[by_stratum], return_index=True, return_counts=True)
    wanted = np.minimum(size, np.maximum(np.ceil(size * ratio).astype(np.int64), min_per_subtree))
    # A subtree smaller than twice the minimum learns more from its siblings than sampling half of it is worth.
    wanted = np.where(size < 2 * min_per_subtree, np.minimum(size, 1), wanted)
    position = np.arange(len(by_stratum)) - np.repeat(start, size)
    chosen = by_stratum[position < np.repeat(wanted, size)]
    return np.asarray(tree.requests[rng.permutation(chosen)])


def _strata(tree: PrefixTree, max_tokens: Ints) -> NDArray[np.int64]:
    """[num_leaves] label of the stratum of each leaf."""
    # A prefix that nearly all requests share (one system prompt) tells nothing: start below it.
    root = 0
    while True:
        children = np.flatnonzero(tree.parent == root)
        size = tree.end[children] - tree.first[children]
        if len(children) == 0 or size.max() < 0.9 * (tree.end[root] - tree.first[root]):
            break
        root = int(children[np.argmax(size)])
    tops = np.flatnonzero(tree.parent == root)
    stratum = -1 - max_tokens[tree.requests].astype(np.int64)
    owner = np.zeros(tree.num_leaves + 1, dtype=np.int64)
    np.add.at(owner, tree.first[tops], tops)
    np.add.at(owner, tree.end[tops], -tops)
    inside = np.cumsum(owner)[:-1]
    return np.where(inside > 0, inside, stratum)
