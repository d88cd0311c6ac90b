"""From prefix tree to order: sort each layer by density, split outliers off, merge what belongs together.

The result is a leaf order that runs from compute-intensive to memory-intensive and still visits requests that share a
prefix one after the other. Source: BlendServe §5.2, Alg. 1 and 2, App. A.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from blendserve.cost_model import CostModel
from blendserve.planner.prefix_tree import Ints, PrefixTree

Floats = NDArray[np.float64]

MAX_SPLIT_ROUNDS = 8
UNIT_SHARE = 1 / 64
_TINY = 1e-30


@dataclass(frozen=True, slots=True)
class OrderConfig:
    """How far the order may depart from the tree."""

    split_budget: float = 0.01
    """share of the prompt tokens saved by sharing that may be given up by splitting; the paper keeps >= 99 %"""
    split_gap: float = 2.0
    """a leaf is split off only if its density is out of order by at least this factor"""
    merge_gap: float = 1.25
    """neighbouring subtrees become one unit while their densities differ by less than this factor"""


@dataclass(slots=True)
class LeafCosts:
    """Costs of the requests of a tree at given output lengths; all by leaf (rank)."""

    memory_s: Floats
    decode_s: Floats
    prompt_tokens: Floats
    output_tokens: Floats
    cost_model: CostModel

    @classmethod
    def of(cls, tree: PrefixTree, output_tokens: Floats, cost_model: CostModel) -> LeafCosts:
        """Costs for `output_tokens` [num_requests], given by request."""
        by_leaf = output_tokens[tree.requests]
        length = tree.length.astype(np.float64)
        return cls(
            cost_model.memory_s(length, by_leaf),
            cost_model.decode_compute_s(by_leaf),
            length,
            by_leaf,
            cost_model,
        )

    def own_compute_s(self, start: Ints) -> Floats:
        """Compute of each leaf beyond its first `start` tokens, which another leaf computes."""
        prefill = self.cost_model.prefill_compute_s
        return prefill(self.prompt_tokens) - prefill(start) + self.decode_s


@dataclass(slots=True)
class LeafOrder:
    """Requests from compute-intensive to memory-intensive."""

    requests: Ints
    """[num_requests] permutation of the requests"""
    density: Floats
    """[num_requests] compute density of each request in that order, its own prompt tokens only"""
    unit_start: Ints
    """[num_units + 1] the order cut into units that the scanner treats alike"""
    unit_density: Floats
    """[num_units] density of each unit with its shared prefixes counted once"""
    num_split: int
    """leaves that were taken out of their subtree"""
    split_tokens: int
    """prompt tokens that must be computed again because of splitting, at most"""
    split: NDArray[np.bool_]
    """[num_leaves] by rank, whether a leaf was taken out of its subtree"""


def order_leaves(
    tree: PrefixTree,
    costs: LeafCosts,
    config: OrderConfig = OrderConfig(),
    earlier: LeafOrder | None = None,
) -> LeafOrder:
    """Sort, split and merge a tree until its leaf order descends in density or the split budget is used up.

    With an `earlier` order of the same tree the same leaves are split as there, which saves most of the time.
    """
    budget = config.split_budget * (tree.num_units - tree.num_unique_units)
    split = np.zeros(tree.num_leaves, dtype=np.bool_) if earlier is None else earlier.split
    split_tokens = 0 if earlier is None else earlier.split_tokens
    layers = _sort_layers(tree, costs, split)
    for _ in range(MAX_SPLIT_ROUNDS if earlier is None else 0):
        outliers = _outliers(tree, layers, split, config.split_gap)
        recomputed = np.cumsum(tree.leaf_start[outliers], dtype=np.int64)
        affordable = outliers[recomputed <= budget - split_tokens]
        if len(affordable) == 0:
            break
        split[affordable] = True
        split_tokens += int(recomputed[len(affordable) - 1])
        layers = _sort_layers(tree, costs, split)
    unit_start, unit_density = _merge_units(
        layers.unit_start, layers.unit_compute, layers.unit_memory, config.merge_gap
    )
    return LeafOrder(
        requests=tree.requests[layers.order],
        density=layers.density[layers.order],
        unit_start=unit_start,
        unit_density=unit_density,
        num_split=int(split.sum()),
        split_tokens=split_tokens,
        split=split,
    )


def depth_first(tree: PrefixTree) -> Ints:
    """Requests in depth-first order, children of a node in the order in which the file first mentions them.

    As a radix cache that is filled in file order visits them: a file without shared prefixes keeps its order.
    """
    by_leaf = tree.requests
    # The least request below each node: over the leaves of inner nodes, level by level from below.
    least = np.full(tree.num_nodes, np.iinfo(np.int32).max, dtype=np.int32)
    np.minimum.at(least, tree.leaf_parent, by_leaf)
    _least_below(tree.parent, least)
    parent = np.concatenate((tree.parent[1:], tree.leaf_parent))
    children, child_start = _children(tree, parent, np.concatenate((least[1:], by_leaf)))
    nothing = np.zeros(tree.num_nodes)
    leaf_nothing = np.zeros(tree.num_leaves)
    no_unit = np.zeros(tree.num_nodes, dtype=np.bool_)
    order = _walk(children, child_start, no_unit, ~no_unit, nothing, leaf_nothing, leaf_nothing)[0]
    return np.asarray(tree.requests[order])


@numba.njit(cache=True, nogil=True)
def _least_below(parent, least):  # type: ignore[no-untyped-def]
    for node in range(len(parent) - 1, 0, -1):  # children come after parents
        least[parent[node]] = min(least[parent[node]], least[node])


def _children(tree: PrefixTree, item_parent: Ints, key: NDArray[Any]) -> tuple[Ints, Ints]:
    """Children of every node by ascending `key`, then first leaf, as `_walk` wants them, and where each node's start.

    Items are the inner nodes but the root, then the leaves.
    """
    item_first = np.concatenate((tree.first[1:], np.arange(tree.num_leaves, dtype=np.int32)))
    by_first = np.argsort(item_first, kind="stable").astype(np.int32)
    key = key[by_first]
    by_key = np.argsort(key).astype(np.int32)  # much faster than a stable sort; `_group` sees to equal keys
    children, child_start = _group(by_first, by_key, key, item_parent, tree.num_nodes)
    return children, child_start


@numba.njit(cache=True, nogil=True)
def _group(by_first, by_key, key, item_parent, num_nodes):  # type: ignore[no-untyped-def]
    """Items by parent, then as in `by_key`, which are places in `by_first` and `key`; those of equal key ascend."""
    num_items = len(by_key)
    start = np.zeros(num_nodes + 1, np.int32)
    for parent in item_parent:
        start[parent + 1] += 1
    start = np.cumsum(start).astype(np.int32)
    free = start[:-1].copy()
    children = np.empty(num_items, np.int32)
    begin = 0
    while begin < num_items:
        end = begin + 1
        while end < num_items and key[by_key[end]] == key[by_key[begin]]:
            end += 1
        if end - begin > 1:
            by_key[begin:end] = np.sort(by_key[begin:end])
        for place in by_key[begin:end]:
            item = by_first[place]
            parent = item_parent[item]
            children[free[parent]] = item + 1 if item < num_nodes - 1 else num_nodes - 2 - item
            free[parent] += 1
        begin = end
    return children, start


class _Layers(NamedTuple):
    order: Ints
    """[num_leaves] leaves (ranks) in sorted order"""
    density: Floats
    """[num_leaves] by rank"""
    unit_start: Ints
    unit_compute: Floats
    unit_memory: Floats


def _sort_layers(tree: PrefixTree, costs: LeafCosts, split: NDArray[np.bool_]) -> _Layers:
    """Children of every node by descending density (Alg. 1); split leaves are children of the root.

    A subtree that is at most `UNIT_SHARE` of the job, or a leaf, becomes a unit.
    """
    parent = np.where(split, 0, tree.leaf_parent).astype(np.int32)
    compute = costs.own_compute_s(tree.depth[parent])
    memory = costs.memory_s
    density = compute / np.maximum(memory, _TINY)

    inside = ~split
    num_inside = tree.leaf_sums(inside.astype(np.float64))
    prefill = costs.cost_model.prefill_compute_s
    above = np.where(tree.parent >= 0, tree.depth[tree.parent], 0)
    segment_compute = np.where(num_inside > 0, prefill(tree.depth) - prefill(above), 0.0)
    node_compute = tree.leaf_sums(compute * inside) + tree.node_sums(segment_compute)
    node_memory = tree.leaf_sums(memory * inside)
    node_density = node_compute / np.maximum(node_memory, _TINY)

    item_density = np.concatenate((node_density[1:], density))
    children, child_start = _children(tree, np.concatenate((tree.parent[1:], parent)), -item_density)

    total_compute = float(compute.sum() + segment_compute.sum())
    total_memory = float(memory.sum())
    is_unit = (node_compute <= UNIT_SHARE * total_compute) & (node_memory <= UNIT_SHARE * total_memory)
    order, unit_start, unit_compute, unit_memory = _walk(
        children, child_start, is_unit, num_inside > 0, segment_compute, compute, memory
    )
    return _Layers(order, density, unit_start, unit_compute, unit_memory)


@numba.njit(cache=True, nogil=True)
def _walk(children, child_start, is_unit, occupied, segment_compute, compute, memory):  # type: ignore[no-untyped-def]
    """Depth-first walk over sorted children; inner nodes are >= 0, leaf r is -1 - r."""
    num_leaves = len(compute)
    order = np.empty(num_leaves, np.int32)
    unit_start = np.zeros(num_leaves + 1, np.int32)
    unit_compute = np.zeros(num_leaves, np.float64)
    unit_memory = np.zeros(num_leaves, np.float64)
    num_units = 0
    position = 0
    stack = np.empty(len(children) + 1, np.int32)
    in_unit = np.empty(len(children) + 1, np.bool_)
    stack[0], in_unit[0] = 0, False
    top = 0
    while top >= 0:
        item, inside = stack[top], in_unit[top]
        top -= 1
        if item < 0:
            leaf = -1 - item
            if not inside:
                unit_start[num_units] = position
                num_units += 1
            order[position] = leaf
            position += 1
            unit_compute[num_units - 1] += compute[leaf]
            unit_memory[num_units - 1] += memory[leaf]
            continue
        if item > 0 and not occupied[item]:  # all of its leaves were split off
            continue
        if not inside and item > 0 and is_unit[item]:
            unit_start[num_units] = position
            num_units += 1
            inside = True
        if inside:
            unit_compute[num_units - 1] += segment_compute[item]
        for i in range(child_start[item + 1] - 1, child_start[item] - 1, -1):
            top += 1
            stack[top], in_unit[top] = children[i], inside
    unit_start[num_units] = num_leaves
    return (
        order,
        unit_start[: num_units + 1].copy(),
        unit_compute[:num_units].copy(),
        unit_memory[:num_units].copy(),
    )


def _outliers(tree: PrefixTree, layers: _Layers, split: NDArray[np.bool_], gap: float) -> Ints:
    """Leaves (ranks) that break the descending order by at least the factor `gap`, worst first (Alg. 2).

    The longest non-increasing subsequence stays, so that as few leaves as possible are called outliers. If all of
    those were split off before, the leaves of subtrees that lie across them are the ones to take.
    """
    density = layers.density[layers.order]
    splittable = ~split[layers.order] & (tree.leaf_start[layers.order] > 0)
    if not splittable.any():
        return np.empty(0, dtype=np.int32)
    kept = _longest_non_increasing(density)
    floor_before = np.minimum.accumulate(np.where(kept, density, np.inf))
    ceiling_after = np.maximum.accumulate(np.where(kept, density, 0.0)[::-1])[::-1]
    ratio = _breach(density, floor_before, ceiling_after)
    chosen = splittable & ~kept & (ratio >= gap)
    if not chosen.any():
        floor_before = np.minimum.accumulate(density)
        ceiling_after = np.maximum.accumulate(density[::-1])[::-1]
        ratio = _breach(density, floor_before, ceiling_after)
        chosen = splittable & (ratio > 1.0) & (ratio >= gap)
    positions = np.flatnonzero(chosen)
    return layers.order[positions[np.argsort(-ratio[positions], kind="stable")]]


def _breach(density: Floats, floor_before: Floats, ceiling_after: Floats) -> Floats:
    """Factor by which each density exceeds the least one before it, or falls short of the greatest one after it."""
    return np.maximum(
        density / np.maximum(np.minimum(floor_before, 1e300), _TINY),
        ceiling_after / np.maximum(density, _TINY),
    )


@numba.njit(cache=True, nogil=True)
def _longest_non_increasing(values):  # type: ignore[no-untyped-def]
    """Mask of one longest non-increasing subsequence (patience sorting, O(n log n))."""
    n = len(values)
    tails = np.empty(n, np.int32)
    tail_values = np.empty(n, np.float64)
    previous = np.full(n, -1, np.int32)
    length = 0
    for i in range(n):
        value = values[i]
        low, high = 0, length
        if length > 0 and tail_values[length - 1] >= value:  # most often
            low = length
        while low < high:  # first pile whose tail is smaller than the value
            mid = (low + high) // 2
            if tail_values[mid] >= value:
                low = mid + 1
            else:
                high = mid
        if low > 0:
            previous[i] = tails[low - 1]
        tails[low], tail_values[low] = i, value
        length = max(length, low + 1)
    mask = np.zeros(n, np.bool_)
    i = tails[length - 1] if length else -1
    while i >= 0:
        mask[i] = True
        i = previous[i]
    return mask


@numba.njit(cache=True, nogil=True)
def _merge_units(unit_start, unit_compute, unit_memory, merge_gap):  # type: ignore[no-untyped-def]
    """Join neighbouring units of like density (App. A.2)."""
    num_units = len(unit_compute)
    start = np.zeros(num_units + 1, np.int32)
    density = np.zeros(num_units, np.float64)
    count = 0
    i = 0
    while i < num_units:
        compute, memory = unit_compute[i], unit_memory[i]
        reference = compute / max(memory, 1e-30)
        start[count] = unit_start[i]
        i += 1
        while i < num_units:
            other = unit_compute[i] / max(unit_memory[i], 1e-30)
            if max(other, reference) > merge_gap * min(other, reference):
                break
            compute += unit_compute[i]
            memory += unit_memory[i]
            i += 1
        density[count] = compute / max(memory, 1e-30)
        count += 1
    start[count] = unit_start[num_units]
    return start[: count + 1].copy(), density[:count].copy()
