"""The policies by name, peers behind `policy.Policy`."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from blendserve.errors import ConfigError
from blendserve.planner.plan import Plan
from blendserve.planner.prefix_tree import Ints
from blendserve.planner.tree_order import depth_first
from blendserve.scheduling.blend import Blend
from blendserve.scheduling.dual_scan import DualScan
from blendserve.scheduling.policy import OrderedPolicy, Policy

PolicyName = Literal["blend", "dual-scan", "dfs", "fcfs", "random", "longest-first", "longest-first-dfs"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


def make_policy(name: PolicyName, plan: Plan, *, seed: int = 0) -> Policy:
    """A policy by name, fresh for one run.

    `fcfs` keeps the file's order; `dfs` groups shared prefixes in the order of their first request; `random` shuffles;
    `longest-first` sorts by expected output; `longest-first-dfs` keeps subtrees together and takes those with long
    outputs first; `dual-scan` is the paper's, `blend` ours.

    Raises:
        ConfigError: no policy of that name.
    """
    if name == "blend":
        return Blend(plan)
    if name == "dual-scan":
        return DualScan(plan)
    if name == "dfs":
        order = depth_first(plan.tree)
    elif name == "fcfs":
        order = np.arange(plan.num_requests, dtype=np.int32)
    elif name == "random":
        order = np.random.default_rng(seed).permutation(plan.num_requests).astype(np.int32)
    elif name == "longest-first":
        order = np.argsort(-plan.output_tokens_est, kind="stable").astype(np.int32)
    elif name == "longest-first-dfs":
        order = _longest_first_dfs(plan)
    else:
        raise ConfigError(f"unknown policy {name!r}; choose one of {', '.join(POLICIES)}")
    return OrderedPolicy(plan, order, name)


def _longest_first_dfs(plan: Plan) -> Ints:
    """Subtrees below the root by descending mean expected output; depth-first order inside each."""
    tree = plan.tree
    group = np.arange(tree.num_leaves)  # a leaf at the root is a group of its own
    for top in np.flatnonzero(tree.parent == 0):
        group[tree.first[top] : tree.end[top]] = tree.first[top]
    expected = plan.output_tokens_est[tree.requests]
    total = np.bincount(group, weights=expected, minlength=tree.num_leaves)
    count = np.maximum(np.bincount(group, minlength=tree.num_leaves), 1)
    mean = np.empty(tree.num_leaves)
    group_of = np.empty(tree.num_leaves, dtype=np.int64)
    mean[tree.requests], group_of[tree.requests] = (total / count)[group], group
    order = depth_first(tree)
    return order[np.lexsort((np.arange(len(order)), group_of[order], -mean[order]))]
