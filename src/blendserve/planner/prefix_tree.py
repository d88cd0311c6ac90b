"""The prefix tree of a job: which prompts share which leading tokens.

Built from sorted order: prompts that share a prefix are neighbours once sorted, so the tree is the nesting of the
longest common prefixes of neighbours. That takes two integers per request instead of a node per token, and no hashing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from blendserve.tokens import PromptTokens

Ints = NDArray[np.int32]

_INSERTION_SORT_BELOW = 12
_FAR = 1 << 40
"""more than a prompt has tokens"""
# What is known of a partition: nothing; that its prompts leave another one at the same token, on the same side; or its
# keys, by a reference prompt or by the token at the partition's depth.
_UNKNOWN, _LEAVES_HERE, _BY_REFERENCE, _BY_TOKEN = range(4)


@dataclass(slots=True)
class PromptOrder:
    """Prompts in lexicographic order of their token ids, with what neighbours have in common."""

    requests: Ints
    """[num_requests] request at each rank"""
    common: Ints
    """[num_requests] tokens that the prompt at a rank shares with the one before it; 0 at rank 0"""

    @classmethod
    def of(cls, tokens: PromptTokens, groups: Ints | None = None) -> PromptOrder:
        """Sort prompts; O(total tokens + n log n).

        Those with different numbers in `groups` [num_requests] share nothing, as prompts of different LoRA adapters,
        whose KV differs; those with -1 share nothing at all.
        """
        order = np.arange(len(tokens), dtype=np.int32)
        if len(order) == 0:
            return cls(order, order.copy())
        if groups is None:
            members, alone = [order], order[:0]
        else:
            members = [order[groups == number] for number in np.unique(groups[groups >= 0])]
            alone = order[groups < 0]
        common = [_sort_prompts(tokens.data, tokens.starts, tokens.lengths, group) for group in members]
        return cls(np.concatenate([*members, alone]), np.concatenate([*common, np.zeros_like(alone)]))


@dataclass(slots=True)
class PrefixTree:
    """Radix tree over prompts, as columns.

    Leaves are requests, numbered by their rank in sorted order. Inner nodes are prompt prefixes shared by at least two
    leaves, numbered in pre-order; node 0 is the root, the empty prefix. Lengths are in *units*: tokens, or KV blocks
    when built with `block_size` > 1. A node's leaves are ranks `first[node] .. end[node]`, its descendants are nodes
    `node+1 .. node+num_descendants`.
    """

    requests: Ints
    """[num_leaves] request of each leaf"""
    length: Ints
    """[num_leaves] units of the leaf's whole prompt"""
    leaf_parent: Ints
    """[num_leaves] deepest node whose prefix the leaf shares"""
    parent: Ints
    """[num_nodes] -1 for the root"""
    depth: Ints
    """[num_nodes] units from the root to the node's end"""
    first: Ints
    """[num_nodes] first leaf"""
    end: Ints
    """[num_nodes] one past the last leaf"""
    next_sibling: Ints
    """[num_nodes] first node after this node's descendants"""

    @classmethod
    def build(cls, order: PromptOrder, prompt_tokens: Ints) -> PrefixTree:
        """The tree over token ids: a leaf's length is its prompt's."""
        length = prompt_tokens[order.requests]
        return cls._nest(order.requests, length, order.common)

    @classmethod
    def build_blocks(cls, order: PromptOrder, prompt_tokens: Ints, block_size: int) -> PrefixTree:
        """The tree over the KV blocks that requests can share.

        Only full blocks are shared, and never the one that holds a prompt's last token: that token must be computed
        for its logits, into a block of the sequence's own.
        """
        length = (prompt_tokens[order.requests] - 1) // np.int32(block_size)
        common = order.common // np.int32(block_size)
        np.minimum(common, length, out=common)
        np.minimum(common[1:], length[:-1], out=common[1:])
        return cls._nest(order.requests, length, common)

    @classmethod
    def _nest(cls, requests: Ints, length: Ints, common: Ints) -> PrefixTree:
        parent, depth, first, end, leaf_parent = _nest_prefixes(common)
        preorder = np.lexsort((-end, first))
        number = np.empty_like(preorder)
        number[preorder] = np.arange(len(preorder))
        new_parent = np.where(parent[preorder] >= 0, number[parent[preorder]], -1).astype(np.int32)
        first, end = first[preorder], end[preorder]
        # Descendants of a node in pre-order are those that start before it ends.
        next_sibling = np.searchsorted(first, end, side="left").astype(np.int32)
        return cls(
            requests,
            length,
            number[leaf_parent].astype(np.int32),
            new_parent,
            depth[preorder],
            first,
            end,
            next_sibling,
        )

    @property
    def num_leaves(self) -> int:
        """Requests in the tree."""
        return len(self.requests)

    @property
    def num_nodes(self) -> int:
        """Inner nodes, root included."""
        return len(self.parent)

    @property
    def segment(self) -> Ints:
        """[num_nodes] units of each node's own segment."""
        return self.depth - np.where(self.parent >= 0, self.depth[self.parent], 0).astype(np.int32)

    @property
    def leaf_start(self) -> Ints:
        """[num_leaves] units that a leaf shares with others; the rest is its own."""
        return self.depth[self.leaf_parent]

    @property
    def num_units(self) -> int:
        """Units over all prompts, shared ones counted once per prompt."""
        return int(self.length.sum(dtype=np.int64))

    @property
    def num_unique_units(self) -> int:
        """Units that must be computed when every shared prefix is computed once."""
        own = (self.length - self.leaf_start).sum(dtype=np.int64)
        return int(own + self.segment.sum(dtype=np.int64))

    @property
    def sharing_ratio(self) -> float:
        """s: share of prompt units saved by reuse, in [0, 1]. Source: BlendServe §4.2."""
        return 1.0 - self.num_unique_units / self.num_units if self.num_units else 0.0

    def leaf_sums(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """[num_nodes] sum over the leaves below each node of `values` [num_leaves]."""
        total = np.concatenate(([0.0], np.cumsum(values)))
        return np.asarray(total[self.end] - total[self.first])

    def path_sums(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """[num_nodes] sum over each node and its ancestors of `values` [num_nodes]."""
        steps = np.zeros(self.num_nodes + 1)
        steps[: self.num_nodes] = values
        np.subtract.at(
            steps, self.next_sibling, values
        )  # pre-order: a node's value holds until its descendants end
        return np.asarray(np.cumsum(steps)[: self.num_nodes])

    def node_sums(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """[num_nodes] sum over each node and its descendants of `values` [num_nodes]."""
        total = np.concatenate(([0.0], np.cumsum(values)))
        return np.asarray(total[self.next_sibling] - total[: self.num_nodes])


@numba.njit(cache=True, nogil=True)
def _compare_with(data, starts, lengths, reference, requests, depth, keys):  # type: ignore[no-untyped-def]
    """Write to `keys` on which side of the reference each request's prompt lies, and at which token it leaves it.

    All agree on their first `depth` tokens. Prompts that leave the reference downwards at token l get l - `_FAR`,
    those that leave it upwards `_FAR` - l, and equals 0: ascending keys are ascending prompts.
    """
    start, length = starts[reference], lengths[reference]
    for k in range(len(requests)):
        other_start, other_length = starts[requests[k]], lengths[requests[k]]
        limit = min(length, other_length)
        i = depth
        while i < limit and data[start + i] == data[other_start + i]:
            i += 1
        if i < limit:
            below = data[other_start + i] < data[start + i]
        elif length == other_length:
            keys[k] = 0
            continue
        else:
            below = other_length < length
        keys[k] = i - _FAR if below else _FAR - i


@numba.njit(cache=True, nogil=True)
def _sort_prompts(data, starts, lengths, order):  # type: ignore[no-untyped-def]
    """Sort `order` by prompt, equal ones by request; returns [n] tokens that each shares with the one before.

    A partition is first divided by where its prompts leave one of them, chosen at random; what leaves it on the same
    side at the same token is then divided by that token, and what has that token in common is a partition again. So
    every token is read about once, one prompt after the other, however long or deeply nested the common prefixes are,
    and no order of the input is a bad one.
    """
    common = np.zeros(len(order), np.int32)
    keys = np.empty(len(order), np.int64)
    stack = [(0, len(order), 0, _UNKNOWN)]
    random = np.uint64(88172645463325252)
    while len(stack) > 0:
        low, high, depth, state = stack.pop()
        random ^= random << np.uint64(13)
        random ^= random >> np.uint64(7)
        random ^= random << np.uint64(17)
        if state == _UNKNOWN:
            reference = order[low + np.int64(random % np.uint64(high - low))]
            _compare_with(data, starts, lengths, reference, order[low:high], depth, keys[low:high])
            state = _BY_REFERENCE
        elif state == _LEAVES_HERE:
            for i in range(low, high):
                request = order[i]
                at_end = lengths[request] == depth  # a prefix sorts before its extensions
                keys[i] = 0 if at_end else np.int64(data[starts[request] + depth]) + 1
            state = _BY_TOKEN

        # Sort by `keys`, or move the prompts of one key to their place and come back for the others.
        if high - low < _INSERTION_SORT_BELOW:
            for i in range(low + 1, high):
                item, key = order[i], keys[i]
                j = i
                while j > low and key < keys[j - 1]:
                    order[j], keys[j] = order[j - 1], keys[j - 1]
                    j -= 1
                order[j], keys[j] = item, key
            begin, stop = low, high
        else:
            third = (high - low) // 3
            probe = low + np.int64(random % np.uint64(third))
            a, b, c = keys[probe], keys[probe + third], keys[probe + 2 * third]
            pivot = max(min(a, b), min(max(a, b), c))
            # keys[low:begin] < pivot, keys[begin:i] == pivot, keys[stop:high] > pivot
            begin, i, stop = low, low, high
            while i < stop:
                key = keys[i]
                if key < pivot:
                    keys[begin], keys[i] = key, keys[begin]
                    order[begin], order[i] = order[i], order[begin]
                    begin += 1
                    i += 1
                elif key > pivot:
                    stop -= 1
                    keys[stop], keys[i] = key, keys[stop]
                    order[stop], order[i] = order[i], order[stop]
                else:
                    i += 1
            if begin > low:
                stack.append((low, begin, depth, state))
            if stop < high:
                stack.append((stop, high, depth, state))

        # [begin:stop] is in order by key, and all others lie on their side of it.
        while begin < stop:
            key, end = keys[begin], begin + 1
            while end < stop and keys[end] == key:
                end += 1
            if state == _BY_TOKEN:
                if begin > low:
                    common[begin] = depth
                if end < high:
                    common[end] = depth
                shared, then = depth + 1, _UNKNOWN
            elif key < 0:  # there is more above: the reference at least
                shared, then = key + _FAR, _LEAVES_HERE
                common[end] = shared
            else:
                shared, then = _FAR - key, _LEAVES_HERE
                if key > 0:
                    common[begin] = shared
            if key == 0:  # equal prompts, as none goes on or all go on like the reference
                order[begin:end] = np.sort(order[begin:end])
                common[begin + 1 : end] = lengths[order[begin]]
            elif end - begin > 1:
                stack.append((begin, end, shared, then))
            begin = end
    return common


@numba.njit(cache=True, nogil=True)
def _nest_prefixes(common):  # type: ignore[no-untyped-def]
    """Nested intervals of equal common prefixes (LCP intervals), found with one stack in one pass.

    Returns parent, depth, first, end of every interval, in order of creation (0 is the root), and each leaf's deepest
    interval.
    """
    num_leaves = len(common)
    size = num_leaves + 1
    parent = np.full(size, -1, np.int32)
    depth = np.zeros(size, np.int32)
    first = np.zeros(size, np.int32)
    end = np.zeros(size, np.int32)
    leaf_parent = np.zeros(num_leaves, np.int32)
    num_nodes = 1
    stack = np.zeros(size, np.int32)
    top = 0  # stack[0] is the root
    for rank in range(1, num_leaves + 1):
        shared = common[rank] if rank < num_leaves else 0
        # The leaf before `rank` hangs below the deepest open interval, or below one that starts with it.
        leftmost = rank - 1
        closed = np.int32(-1)
        while depth[stack[top]] > shared:
            node = stack[top]
            top -= 1
            end[node] = rank
            leftmost = first[node]
            if closed < 0:
                leaf_parent[rank - 1] = node
            below = stack[top]
            if depth[below] >= shared:
                parent[node] = below
            closed = node
        if depth[stack[top]] < shared:
            node = num_nodes
            num_nodes += 1
            depth[node] = shared
            first[node] = leftmost
            parent[node] = stack[top]
            if closed >= 0:
                parent[closed] = node
            top += 1
            stack[top] = node
        if closed < 0:
            leaf_parent[rank - 1] = stack[top]
    end[0] = num_leaves
    return (
        parent[:num_nodes].copy(),
        depth[:num_nodes].copy(),
        first[:num_nodes].copy(),
        end[:num_nodes].copy(),
        leaf_parent,
    )
