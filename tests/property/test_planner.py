import itertools
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from blendserve.planner.plan import PlanConfig, make_plan
from blendserve.planner.prefix_tree import PrefixTree, PromptOrder
from blendserve.planner.tree_order import OrderConfig
from blendserve.tokens import PromptTokens
from tests.workload import COST_MODEL, request_table

PROMPTS = st.integers(0, 3).flatmap(
    lambda alphabet: st.lists(
        st.lists(st.integers(0, alphabet), min_size=1, max_size=12), min_size=1, max_size=40
    )
)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 3), max_size=30),
    st.lists(
        st.tuples(st.integers(0, 30), st.lists(st.integers(0, 3), max_size=4)), min_size=1, max_size=100
    ),
)
def test_prompts_of_one_stem_are_sorted_and_compared_with_their_neighbours(
    stem: list[int], prompts_of: list[tuple[int, list[int]]]
) -> None:
    prompts = [stem[:length] + own for length, own in prompts_of]
    order = PromptOrder.of(PromptTokens.from_lists(prompts))
    expected = sorted(range(len(prompts)), key=lambda request: (prompts[request], request))
    assert order.requests.tolist() == expected
    for rank, (a, b) in enumerate(itertools.pairwise(prompts[request] for request in expected), start=1):
        common = int(order.common[rank])
        assert a[:common] == b[:common]
        assert a[: common + 1] != b[: common + 1] or common == len(a) == len(b)
    assert order.common[0] == 0


@settings(deadline=None)
@given(PROMPTS)
def test_the_tree_holds_each_prompt_token_once(prompts: list[list[int]]) -> None:
    table = request_table(prompts)
    order = PromptOrder.of(table.tokens)
    tree = PrefixTree.build(order, table.prompt_tokens)
    assert [prompts[r] for r in tree.requests] == sorted(prompts)
    unique = len({tuple(p[: i + 1]) for p in prompts for i in range(len(p))})
    assert tree.num_unique_units == unique
    assert tree.sharing_ratio == 1 - unique / sum(map(len, prompts))
    nodes = np.arange(1, tree.num_nodes)
    parents = tree.parent[1:]
    assert (parents < nodes).all()
    assert (tree.depth[parents] < tree.depth[1:]).all()
    assert (tree.first[parents] <= tree.first[1:]).all()
    assert (tree.end[1:] <= tree.end[parents]).all()
    assert (tree.end[1:] - tree.first[1:] >= 2).all()


@settings(deadline=None)
@given(PROMPTS, st.integers(1, 6))
def test_the_block_tree_shares_exactly_the_common_blocks(prompts: list[list[int]], block_size: int) -> None:
    table = request_table(prompts)
    tree = PrefixTree.build_blocks(PromptOrder.of(table.tokens), table.prompt_tokens, block_size)
    blocks = {
        tuple(p[: (i + 1) * block_size]) for p in prompts for i in range((len(p) - 1) // block_size)
    }  # a block is named by all tokens up to its end
    assert tree.num_unique_units == len(blocks)


@settings(deadline=None)
@given(PROMPTS, st.data())
def test_the_order_is_a_permutation_and_its_units_cover_it(
    prompts: list[list[int]], data: st.DataObject
) -> None:
    lengths = [data.draw(st.sampled_from([1, 2, 50, 300, 4000])) for _ in prompts]
    plan = make_plan(request_table(prompts, 5000, lengths), COST_MODEL)
    order = plan.leaf_order
    assert sorted(order.requests.tolist()) == list(range(len(prompts)))
    assert order.unit_start[0] == 0
    assert order.unit_start[-1] == len(prompts)
    assert (np.diff(order.unit_start) > 0).all()


@settings(deadline=None)
@given(PROMPTS, st.data())
def test_densities_never_rise_where_the_budget_allows(prompts: list[list[int]], data: st.DataObject) -> None:
    lengths = [data.draw(st.sampled_from([1, 2, 50, 300, 4000])) for _ in prompts]
    unlimited = PlanConfig(order=OrderConfig(split_budget=100.0, split_gap=1.0))
    density = make_plan(request_table(prompts, 5000, lengths), COST_MODEL, unlimited).leaf_order.density
    assert (np.diff(density) <= 1e-9 * density[:-1]).all()


@settings(deadline=None)
@given(PROMPTS, st.floats(0.0, 1.0), st.data())
def test_splitting_stays_within_its_budget(
    prompts: list[list[int]], budget: float, data: st.DataObject
) -> None:
    lengths = [data.draw(st.sampled_from([1, 2, 50, 300, 4000])) for _ in prompts]
    config = PlanConfig(order=OrderConfig(split_budget=budget, split_gap=1.0))
    plan = make_plan(request_table(prompts, 5000, lengths), COST_MODEL, config)
    saved = plan.tree.num_units - plan.tree.num_unique_units
    assert plan.leaf_order.split_tokens <= budget * saved


@settings(deadline=None)
@given(PROMPTS, st.data())
def test_without_splitting_subtrees_stay_together(prompts: list[list[int]], data: st.DataObject) -> None:
    lengths = [data.draw(st.sampled_from([1, 2, 50, 300, 4000])) for _ in prompts]
    config = PlanConfig(order=OrderConfig(split_budget=0.0))
    plan = make_plan(request_table(prompts, 5000, lengths), COST_MODEL, config)
    tree = plan.tree
    position = np.empty(tree.num_leaves, dtype=int)
    position[plan.leaf_order.requests] = np.arange(tree.num_leaves)
    by_leaf = position[tree.requests]
    for first, end in zip(tree.first, tree.end, strict=True):
        inside = by_leaf[first:end]
        assert inside.max() - inside.min() == end - first - 1


@settings(deadline=None)
@given(PROMPTS)
def test_the_plan_does_not_depend_on_how_the_file_is_ordered(prompts: list[list[int]]) -> None:
    """Its figures, that is; ties between equal requests may fall either way."""
    forward = make_plan(request_table(prompts), COST_MODEL).summary()
    backward = make_plan(request_table(prompts[::-1]), COST_MODEL).summary()
    same = dict.fromkeys(("density", "compute_s", "memory_s", "sequential_s", "optimum_s"), 0.0)
    assert replace(forward, **same) == replace(backward, **same)
