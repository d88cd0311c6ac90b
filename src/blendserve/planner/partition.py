"""Data parallel: the requests of a plan divided over replicas, each with its share of the work and equal density."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numba
import numpy as np

from blendserve.planner.plan import Plan
from blendserve.planner.prefix_tree import Ints, PrefixTree, PromptOrder


@dataclass(slots=True)
class Partition:
    """Who runs what."""

    rank_of: Ints
    """[num_requests] data parallel rank of each request"""
    num_replicas: int
    lost_tokens: int
    """prompt tokens that are computed on more than one replica because a shared prefix was cut"""

    def requests_of(self, rank: int) -> Ints:
        """Requests of one replica, in file order."""
        return np.flatnonzero(self.rank_of == rank).astype(np.int32)


def partition(plan: Plan, num_replicas: int, weights: Sequence[float] | None = None) -> Partition:
    """Cut the plan's order into parts of equal density, and of equal work or of work in proportion to `weights`.

    Each part is one run from the left end of what is left of the order and one from the right end, taken in turns so
    that the part's density follows the whole job's, until it has its share of the work. Only the prefixes at the cuts
    are computed twice. Source: BlendServe §5.5.
    """
    costs = plan.cost_model
    order = plan.leaf_order.requests
    own = plan.own_prompt_tokens()[order]
    prompt = plan.prompt_tokens[order]
    compute = costs.prefill_compute_s(prompt) - costs.prefill_compute_s(prompt - own)
    compute += costs.decode_compute_s(plan.output_tokens_est[order])
    memory = costs.memory_s(prompt, plan.output_tokens_est[order])
    rank_of = np.empty(plan.num_requests, dtype=np.int32)
    weight = np.ones(num_replicas) if weights is None else np.asarray(weights, dtype=np.float64)
    rank_of[order] = _cut(compute, memory, weight / weight[::-1].cumsum()[::-1])
    return Partition(rank_of, num_replicas, _lost_tokens(plan, rank_of, num_replicas))


@numba.njit(cache=True, nogil=True)
def _cut(compute, memory, shares):  # type: ignore[no-untyped-def]
    """[n] rank of each position of the order; `shares` [num_replicas] are of what the ranks before have left."""
    rank_of = np.empty(len(compute), np.int32)
    num_replicas = len(shares)
    left, right = 0, len(compute) - 1
    compute_left, memory_left = compute.sum(), memory.sum()
    for rank in range(num_replicas):
        share = shares[rank]
        compute_share, memory_share = compute_left * share, memory_left * share
        taken_compute, taken_memory = 0.0, 0.0
        while left <= right:
            lacks_compute, lacks_memory = compute_share - taken_compute, memory_share - taken_memory
            if rank < num_replicas - 1 and lacks_compute <= 0.0 and lacks_memory <= 0.0:
                break
            # From the left while the part is short of compute more than of memory, relative to its shares.
            if lacks_compute * memory_share >= lacks_memory * compute_share:
                if rank < num_replicas - 1 and lacks_compute <= 0.0:
                    break
                position = left
                left += 1
            else:
                position = right
                right -= 1
            rank_of[position] = rank
            taken_compute += compute[position]
            taken_memory += memory[position]
        compute_left -= taken_compute
        memory_left -= taken_memory
    return rank_of


def _lost_tokens(plan: Plan, rank_of: Ints, num_replicas: int) -> int:
    unique = 0
    by_leaf = rank_of[plan.prompt_order.requests]
    for rank in range(num_replicas):
        kept = np.flatnonzero(by_leaf == rank)
        if len(kept) == 0:
            continue
        # Two prompts have in common the least that neighbours between them have in common.
        common = np.zeros(len(kept), dtype=np.int32)
        if len(kept) > 1:
            common[1:] = np.minimum.reduceat(plan.prompt_order.common[: kept[-1] + 1], kept[:-1] + 1)
        part = PromptOrder(plan.prompt_order.requests[kept], common)
        unique += PrefixTree.build(part, plan.prompt_tokens).num_unique_units
    return unique - plan.tree.num_unique_units
