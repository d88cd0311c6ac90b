import numpy as np
import pytest

from blendserve.planner.prefix_tree import PrefixTree, PromptOrder
from blendserve.tokens import PromptTokens


def build(prompts: list[list[int]], block_size: int = 1) -> PrefixTree:
    tokens = PromptTokens.from_lists(prompts)
    order = PromptOrder.of(tokens)
    if block_size == 1:
        return PrefixTree.build(order, tokens.lengths)
    return PrefixTree.build_blocks(order, tokens.lengths, block_size)


def test_two_levels() -> None:
    tree = build([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 9], [7, 7]])
    assert tree.requests.tolist() == [0, 1, 2, 3]
    assert tree.depth.tolist() == [0, 2, 3]
    assert tree.parent.tolist() == [-1, 0, 1]
    assert tree.leaf_parent.tolist() == [2, 2, 1, 0]
    assert tree.num_unique_units == 2 + 1 + 1 + 1 + 1 + 2
    assert tree.sharing_ratio == pytest.approx(1 - 8 / 13)


def test_equal_prompts_share_everything() -> None:
    tree = build([[5, 6], [5, 6], [5, 6]])
    assert tree.requests.tolist() == [0, 1, 2]
    assert tree.leaf_start.tolist() == [2, 2, 2]
    assert tree.num_unique_units == 2


def test_a_prompt_that_is_the_prefix_of_another() -> None:
    tree = build([[1, 2, 3], [1, 2]])
    assert tree.requests.tolist() == [1, 0]
    assert tree.leaf_start.tolist() == [2, 2]
    assert tree.length.tolist() == [2, 3]


def test_token_ids_above_two_to_the_31_sort_last() -> None:
    tree = build([[2**32 - 1], [0], [2**31]])
    assert tree.requests.tolist() == [1, 2, 0]


def test_no_prompts() -> None:
    tree = build([])
    assert tree.num_leaves == 0
    assert tree.sharing_ratio == 0.0


def test_blocks_never_hold_the_last_token_of_a_prompt() -> None:
    """Two equal prompts of exactly two blocks can share only one: the last token must be computed for its logits."""
    tree = build([[1, 2, 3, 4], [1, 2, 3, 4]], block_size=2)
    assert tree.length.tolist() == [1, 1]
    assert tree.num_unique_units == 1


def test_only_whole_blocks_are_shared() -> None:
    tree = build([[1, 2, 3, 4, 5], [1, 2, 3, 9, 9]], block_size=2)
    assert tree.leaf_start.tolist() == [1, 1]


def test_subtree_sums() -> None:
    tree = build([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 9], [7, 7]])
    assert tree.leaf_sums(np.array([1.0, 2.0, 4.0, 8.0])).tolist() == [15.0, 7.0, 3.0]
    assert tree.node_sums(np.array([1.0, 2.0, 4.0])).tolist() == [7.0, 6.0, 4.0]


def test_many_prompts_with_a_long_common_prefix() -> None:
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, 1000, 700).tolist()
    prompts = [prefix + rng.integers(0, 3, 6).tolist() for _ in range(300)]
    tree = build(prompts)
    assert [prompts[r] for r in tree.requests] == sorted(prompts)
    assert tree.num_unique_units == len({tuple(p[: i + 1]) for p in prompts for i in range(len(p))})
