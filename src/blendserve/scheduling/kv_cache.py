"""KV blocks and prefix cache, in counts and block numbers; the tensors are the executor's.

The prompts of a job are known beforehand, so the radix tree of shareable blocks is built once and never changes shape:
a *node* is a run of blocks that the same requests share (the last one of a path may be a single request's). What
changes is how many of a node's blocks are filled, who uses it, and which blocks of the pool it holds.

Block accounting, for a pool of `num_blocks`:

| blocks | where | freed |
| --- | --- | --- |
| free | free list | |
| held by a node in use (`refs` > 0) | the node's chain | never while in use |
| held by a node not in use | the node's chain, on the LRU list | when somebody needs a block, oldest first |
| private (rest of the prompt, generated tokens) | the sequence's chain | when the sequence leaves |

`committed` is the sum of what running sequences hold or are sure to need for the tokens they have: every block of every
node in use, filled or not, and the private blocks. As long as `committed <= num_blocks`, an allocation cannot fail:
whatever is not committed is free or on the LRU list.

Chains and the free list are linked through one array, so that freeing a chain costs the same whatever its length.
Without an executor that holds KV the links are left out (`next_block` is empty) and blocks are only counted.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import numba
import numpy as np
from numba.core import cgutils
from numba.extending import intrinsic, overload
from numpy.typing import NDArray

from blendserve.planner.prefix_tree import Ints, PrefixTree

NONE = np.int32(-1)


class Count(IntEnum):
    """Slots of `KVState.counts`."""

    FREE_HEAD = 0
    NUM_FREE = 1
    PINNED = 2
    """blocks of nodes in use, filled or not"""
    PRIVATE = 3
    """private blocks committed to running sequences"""
    EVICTABLE = 4
    """blocks held by nodes on the LRU list"""
    LRU_HEAD = 5
    LRU_TAIL = 6
    NUM_BLOCKS = 7


FREE_HEAD, NUM_FREE, PINNED, PRIVATE, EVICTABLE, LRU_HEAD, LRU_TAIL, NUM_BLOCKS = (int(c) for c in Count)


class KVState(NamedTuple):
    """The cache as columns. Nodes: inner tree nodes, then one leaf per request."""

    next_block: Ints
    """[num_blocks] the next block of the same chain or of the free list; empty if blocks are only counted"""
    counts: NDArray[np.int64]
    """[len(Count)]"""
    leaf: Ints
    """[num_requests] deepest node of each request's path; 0 (the root) if it has no full block to share"""
    parent: Ints
    """[num_nodes] 0 for the root too"""
    start: Ints
    """[num_nodes] blocks before the node on its path"""
    size: Ints
    """[num_nodes] blocks of the node"""
    shared: Ints
    """[num_nodes] 1 if more than one request uses the node"""
    head: Ints
    """[num_nodes] first block of the chain"""
    tail: Ints
    allocated: Ints
    """[num_nodes] blocks in the chain"""
    filled: Ints
    """[num_nodes] leading blocks whose KV exists, or is written by the batch being formed; filled <= allocated"""
    refs: Ints
    """[num_nodes] running sequences whose path goes through the node"""
    users: Ints
    """[num_nodes] unfinished requests whose path goes through the node"""
    lru_previous: Ints
    lru_next: Ints


class KVArrays(NamedTuple):
    """The same, as few arrays: every array handed to compiled code costs time, columns of one array do not."""

    next_block: Ints
    counts: NDArray[np.int64]
    leaf: Ints
    nodes: Ints
    """[12, num_nodes] the columns of `KVState` from `parent` on"""


def uncounted(array: NDArray[Any]) -> NDArray[Any]:
    """In compiled code, the same array without reference counts; in Python, the array itself.

    Compiled code counts every array of every NamedTuple that it hands to a function, with atomic operations; for the
    thirty columns of `KVState` and the sequences that took a quarter of a step. The caller must keep the array alive.
    """
    return array


@intrinsic
def _without_owner(typing_context, array):  # type: ignore[no-untyped-def]  # noqa: ARG001
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]  # noqa: ARG001
        view = context.make_array(array)(context, builder, arguments[0])
        view.meminfo = cgutils.get_null_value(view.meminfo.type)
        return view._getvalue()

    return array(array), generate


@overload(uncounted)
def _uncounted(array):  # type: ignore[no-untyped-def]  # noqa: ARG001
    def implementation(array):  # type: ignore[no-untyped-def]
        return _without_owner(array)

    return implementation


@numba.njit(cache=True, nogil=True, inline="always")
def kv_view(arrays):  # type: ignore[no-untyped-def]
    """The `KVState` of `KVArrays`."""
    nodes = uncounted(arrays.nodes)
    return KVState(
        uncounted(arrays.next_block),
        uncounted(arrays.counts),
        uncounted(arrays.leaf),
        nodes[0],
        nodes[1],
        nodes[2],
        nodes[3],
        nodes[4],
        nodes[5],
        nodes[6],
        nodes[7],
        nodes[8],
        nodes[9],
        nodes[10],
        nodes[11],
    )


def make_kv_arrays(tree: PrefixTree, num_blocks: int, *, with_links: bool) -> KVArrays:
    """An empty cache for the block tree of a job; without links, blocks are only counted."""
    num_inner, num_leaves = tree.num_nodes, tree.num_leaves
    own = tree.length - tree.leaf_start
    leaf_node = np.arange(num_inner, num_inner + num_leaves, dtype=np.int32)
    leaf = np.zeros(num_leaves, dtype=np.int32)
    leaf[tree.requests] = np.where(own > 0, leaf_node, tree.leaf_parent)
    counts = np.zeros(len(Count), dtype=np.int64)
    counts[NUM_FREE] = counts[NUM_BLOCKS] = num_blocks
    counts[LRU_HEAD] = counts[LRU_TAIL] = NONE
    next_block = np.arange(1, (num_blocks if with_links else 0) + 1, dtype=np.int32)
    next_block[-1:] = NONE
    arrays = KVArrays(next_block, counts, leaf, np.zeros((12, num_inner + num_leaves), dtype=np.int32))
    kv: KVState = kv_view.py_func(arrays)
    segment = tree.segment
    kv.parent[:] = np.concatenate((np.maximum(tree.parent, 0), tree.leaf_parent))
    kv.start[:] = np.concatenate((tree.depth - segment, tree.leaf_start))
    kv.size[:] = np.concatenate((segment, own))
    kv.shared[:num_inner] = 1
    kv.users[:] = np.concatenate((tree.end - tree.first, np.ones(num_leaves, np.int32)))
    for column in (kv.head, kv.tail, kv.lru_previous, kv.lru_next):
        column[:] = NONE
    return arrays


@numba.njit(cache=True, nogil=True)
def path_length(kv, request):  # type: ignore[no-untyped-def]
    """Nodes on a request's path, root excluded."""
    length = 0
    node = kv.leaf[request]
    while node > 0:
        length += 1
        node = kv.parent[node]
    return length


@numba.njit(cache=True, nogil=True)
def longest_path(parent):  # type: ignore[no-untyped-def]
    """Nodes on the longest path from the root, which is left out, for the column `parent`."""
    level = np.zeros(len(parent), np.int32)
    longest = 0
    for node in range(1, len(parent)):  # parents come before children
        level[node] = level[parent[node]] + 1
        longest = max(longest, level[node])
    return longest


@numba.njit(cache=True, nogil=True)
def take_block(kv):  # type: ignore[no-untyped-def]
    """A free block, evicting the least recently used node if none is free; the caller has committed it before."""
    if kv.counts[NUM_FREE] == 0:
        _evict(kv)
    kv.counts[NUM_FREE] -= 1
    block = kv.counts[FREE_HEAD]
    kv.counts[FREE_HEAD] = kv.next_block[block]
    kv.next_block[block] = NONE
    return block


@numba.njit(cache=True, nogil=True)
def count_blocks_out(kv, num_blocks):  # type: ignore[no-untyped-def]
    """`take_block` many times, for a cache that only counts."""
    while kv.counts[NUM_FREE] < num_blocks:
        _evict(kv)
    kv.counts[NUM_FREE] -= num_blocks


@numba.njit(cache=True, nogil=True)
def free_chain(kv, head, tail, length):  # type: ignore[no-untyped-def]
    """Give a chain of blocks back."""
    if length > 0 and len(kv.next_block) > 0:
        kv.next_block[tail] = kv.counts[FREE_HEAD]
        kv.counts[FREE_HEAD] = head
    kv.counts[NUM_FREE] += length


@numba.njit(cache=True, nogil=True)
def _empty_node(kv, node):  # type: ignore[no-untyped-def]
    free_chain(kv, kv.head[node], kv.tail[node], kv.allocated[node])
    kv.head[node] = kv.tail[node] = NONE
    kv.allocated[node] = kv.filled[node] = 0


@numba.njit(cache=True, nogil=True)
def _evict(kv):  # type: ignore[no-untyped-def]
    """Empty the least recently used node. Children are released before their parents, so it has no filled child."""
    node = kv.counts[LRU_HEAD]
    assert node >= 0  # else more was committed than there is
    _lru_remove(kv, node)
    _empty_node(kv, node)


@numba.njit(cache=True, nogil=True)
def _lru_remove(kv, node):  # type: ignore[no-untyped-def]
    before, after = kv.lru_previous[node], kv.lru_next[node]
    if before >= 0:
        kv.lru_next[before] = after
    else:
        kv.counts[LRU_HEAD] = after
    if after >= 0:
        kv.lru_previous[after] = before
    else:
        kv.counts[LRU_TAIL] = before
    kv.lru_previous[node] = kv.lru_next[node] = NONE
    kv.counts[EVICTABLE] -= kv.allocated[node]


@numba.njit(cache=True, nogil=True)
def _lru_append(kv, node):  # type: ignore[no-untyped-def]
    last = kv.counts[LRU_TAIL]
    kv.lru_previous[node], kv.lru_next[node] = last, NONE
    if last >= 0:
        kv.lru_next[last] = node
    else:
        kv.counts[LRU_HEAD] = node
    kv.counts[LRU_TAIL] = node
    kv.counts[EVICTABLE] += kv.allocated[node]


@numba.njit(cache=True, nogil=True)
def blocks_to_pin(kv, request):  # type: ignore[no-untyped-def]
    """Blocks of the request's path that no running sequence uses yet: what admitting it commits beyond its own."""
    blocks = 0
    node = kv.leaf[request]
    while node > 0 and kv.refs[node] == 0:
        blocks += kv.size[node]
        node = kv.parent[node]
    return blocks


@numba.njit(cache=True, nogil=True)
def acquire_path(kv, request, path):  # type: ignore[no-untyped-def]
    """Take a reference on every node of a request's path and write the path, root first; returns its length."""
    length = path_length(kv, request)
    node = kv.leaf[request]
    for level in range(length - 1, -1, -1):
        path[level] = node
        if kv.refs[node] == 0:
            if kv.allocated[node] > 0:
                _lru_remove(kv, node)
            kv.counts[PINNED] += kv.size[node]
        kv.refs[node] += 1
        node = kv.parent[node]
    return length


@numba.njit(cache=True, nogil=True)
def release_path(kv, path, length, finished, free_when_unused):  # type: ignore[no-untyped-def]
    """Drop a sequence's references, deepest node first.

    A node that nobody runs on goes to the LRU list, or, with `free_when_unused`, back to the pool at once when no
    unfinished request of the job will ever want it again.
    """
    for level in range(length - 1, -1, -1):
        node = path[level]
        kv.refs[node] -= 1
        if finished:
            kv.users[node] -= 1
        if kv.refs[node] > 0:
            continue
        kv.counts[PINNED] -= kv.size[node]
        if free_when_unused and kv.users[node] == 0:
            _empty_node(kv, node)
            continue
        _trim(kv, node)
        if kv.allocated[node] > 0:
            _lru_append(kv, node)


@numba.njit(cache=True, nogil=True)
def _trim(kv, node):  # type: ignore[no-untyped-def]
    """Free the blocks of a node that are not filled (its only user left in the middle of one)."""
    surplus = kv.allocated[node] - kv.filled[node]
    if surplus == 0:
        return
    if kv.filled[node] == 0:
        _empty_node(kv, node)
        return
    kv.allocated[node] = kv.filled[node]
    if len(kv.next_block) == 0:
        kv.counts[NUM_FREE] += surplus
        return
    last = kv.head[node]
    for _ in range(kv.filled[node] - 1):
        last = kv.next_block[last]
    free_chain(kv, kv.next_block[last], kv.tail[node], surplus)
    kv.next_block[last] = NONE
    kv.tail[node] = last


@numba.njit(cache=True, nogil=True)
def extend_node(kv, node):  # type: ignore[no-untyped-def]
    """Append a block to a node's chain; returns it."""
    block = take_block(kv)
    if kv.allocated[node] == 0:
        kv.head[node] = block
    else:
        kv.next_block[kv.tail[node]] = block
    kv.tail[node] = block
    kv.allocated[node] += 1
    return block


def check_conservation(kv: KVState, private_heads: Ints, private_lengths: Ints) -> None:
    """Raise AssertionError unless every block is in exactly one place and all counters agree with the chains."""
    num_blocks = int(kv.counts[NUM_BLOCKS])
    held = int(kv.allocated.sum() + private_lengths.sum())
    assert kv.counts[NUM_FREE] + held == num_blocks, "blocks lost or counted twice"
    seen = np.zeros(len(kv.next_block), dtype=np.int32)

    def walk(head: int, length: int, what: str) -> None:
        block = head
        for _ in range(length if len(seen) else 0):
            assert block >= 0, f"{what} is shorter than its count {length}"
            seen[block] += 1
            block = kv.next_block[block]

    walk(int(kv.counts[FREE_HEAD]), int(kv.counts[NUM_FREE]), "free list")
    for node in np.flatnonzero(kv.allocated):
        walk(int(kv.head[node]), int(kv.allocated[node]), f"chain of node {node}")
        assert kv.filled[node] <= kv.allocated[node] <= kv.size[node], f"node {node} is overfull"
    for head, length in zip(private_heads, private_lengths, strict=True):
        walk(int(head), int(length), "private chain")
    assert (seen == 1).all(), f"blocks in no place or in several: {np.flatnonzero(seen != 1)[:10]}"
    in_use = kv.refs > 0
    assert kv.counts[PINNED] == kv.size[in_use].sum(), "pinned blocks miscounted"
    assert kv.counts[EVICTABLE] == kv.allocated[~in_use].sum(), "evictable blocks miscounted"
    assert kv.counts[PRIVATE] >= private_lengths.sum(), "private blocks held but not committed"
    assert kv.counts[PINNED] + kv.counts[PRIVATE] <= num_blocks, "more blocks committed than there are"
    filled_child = (kv.filled[1:] > 0) & (kv.parent[1:] > 0)
    parents = kv.parent[1:][filled_child]
    assert (kv.filled[parents] == kv.size[parents]).all(), "a node is filled before its parent"
