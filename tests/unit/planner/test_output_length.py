import numpy as np

from blendserve.planner.output_length import (
    PRIOR_OUTPUT_TOKENS,
    OutputLengthEstimator,
    find_strata,
    sample_requests,
)
from blendserve.planner.prefix_tree import PrefixTree, PromptOrder
from blendserve.tokens import PromptTokens


def tree_of(prompts: list[list[int]]) -> PrefixTree:
    tokens = PromptTokens.from_lists(prompts)
    return PrefixTree.build(PromptOrder.of(tokens), tokens.lengths)


GROUPS = tree_of([[1, 1, 1], [1, 1, 2], [1, 1, 3], [1, 2, 1], [1, 2, 2], [8, 8], [8, 9]])
UNKNOWN = np.zeros(7, dtype=np.int32)
CAP = np.full(7, 1000, dtype=np.int32)


def test_before_anything_finished_the_prior_holds() -> None:
    cap = np.array([10, 1000, 1000, 1000, 1000, 1000, 1000], dtype=np.int32)
    estimate = OutputLengthEstimator(GROUPS, cap, UNKNOWN).estimate()
    assert estimate[0] == 10
    assert estimate[1] == PRIOR_OUTPUT_TOKENS


def test_nearest_subtree_then_siblings_then_ancestors() -> None:
    estimator = OutputLengthEstimator(GROUPS, CAP, UNKNOWN)
    estimator.finished(np.array([0, 1]), np.array([40, 60]))
    estimate = estimator.estimate()
    assert estimate[0] == 40  # finished: exact
    assert estimate[2] == 50  # its own subtree [1, 1]
    assert estimate[3] == 50  # subtree [1, 2] has no sample: its siblings' mean
    assert estimate[5] == 50  # subtree [8]: the root's mean
    estimator.finished(np.array([3]), np.array([200]))
    estimate = estimator.estimate()
    assert 190 < estimate[4] < 200  # a single sample, but subtrees evidently differ more than requests in one
    assert 50 < estimate[2] < 52
    assert estimate[5] == 100


def test_subtrees_by_chance_do_not_tell_more_than_the_class_they_are_in() -> None:
    """Pairs of prompts that happen to begin alike, lengths from one distribution: all estimates stay near its mean."""
    rng = np.random.default_rng(0)
    tree = tree_of([[pair, i] for pair in range(400) for i in range(3)])
    lengths = rng.exponential(100.0, 1200).astype(np.int32) + 1
    estimator = OutputLengthEstimator(
        tree, np.full(1200, 10_000, dtype=np.int32), np.zeros(1200, dtype=np.int32)
    )
    seen = np.flatnonzero(np.arange(1200) % 3 < 2)
    estimator.finished(seen, lengths[seen])
    estimate = estimator.estimate()[2::3]
    by_pair = lengths.reshape(400, 3)[:, :2].mean(axis=1)
    assert estimate.std() < 0.35 * by_pair.std()
    assert abs(estimate.mean() - 100.0) < 10.0


def test_declared_lengths_and_caps_win() -> None:
    declared = np.array([0, 0, 777, 0, 0, 0, 0], dtype=np.int32)
    cap = np.array([1000, 1000, 1000, 30, 1000, 1000, 1000], dtype=np.int32)
    estimator = OutputLengthEstimator(GROUPS, cap, declared)
    estimator.finished(np.array([0]), np.array([90]))
    estimate = estimator.estimate()
    assert estimate[2] == 777
    assert estimate[3] == 30
    assert estimate[1] == 90


def test_every_large_subtree_is_sampled() -> None:
    prompts = [[group, i] for group in range(5) for i in range(40)]
    tree = tree_of(prompts)
    cap = np.full(len(prompts), 100, dtype=np.int32)
    sampled = sample_requests(
        tree, find_strata(tree, cap), np.zeros(len(prompts), dtype=np.int32), ratio=0.01, min_per_subtree=4
    )
    assert sorted(np.bincount(sampled // 40).tolist()) == [4] * 5
    assert len(set(sampled.tolist())) == len(sampled)


def test_a_common_system_prompt_does_not_hide_the_strata() -> None:
    prompts = [[7, 7, 7, group, i] for group in range(5) for i in range(40)]
    tree = tree_of(prompts)
    cap = np.full(len(prompts), 100, dtype=np.int32)
    sampled = sample_requests(
        tree, find_strata(tree, cap), np.zeros(len(prompts), dtype=np.int32), min_per_subtree=4
    )
    assert (np.bincount(sampled // 40, minlength=5) >= 4).all()


def test_requests_without_prefix_are_divided_by_max_tokens() -> None:
    prompts = [[i, i] for i in range(90)]
    tree = tree_of(prompts)
    cap = np.array([8] * 50 + [500] * 40, dtype=np.int32)
    sampled = sample_requests(
        tree, find_strata(tree, cap), np.zeros(90, dtype=np.int32), ratio=0.01, min_per_subtree=4
    )
    assert np.bincount((sampled >= 50).astype(int)).tolist() == [4, 4]


def test_declared_lengths_are_not_sampled() -> None:
    prompts = [[1, i] for i in range(20)]
    tree = tree_of(prompts)
    cap = np.full(20, 100, dtype=np.int32)
    assert len(sample_requests(tree, find_strata(tree, cap), np.full(20, 5, dtype=np.int32))) == 0


def test_strata_lie_below_prefixes_that_nearly_all_requests_share() -> None:
    stem = [9] * 50
    prompts = [stem[:depth] for depth in range(1, 51)] + [
        [*stem, group, i] for group in range(4) for i in range(500)
    ]
    stratum = find_strata(tree_of(prompts), np.full(len(prompts), 100, dtype=np.int32))
    assert len(set(stratum[:50].tolist())) == 1  # no kind of their own: by `max_tokens`
    groups = stratum[50:].reshape(4, 500)
    assert (groups == groups[:, :1]).all()
    assert len(set(stratum.tolist())) == 5


def test_a_dozen_requests_with_a_prompt_of_their_own_are_a_stratum_of_any_job() -> None:
    """They may be half of its work; as many that share a first word by chance are none."""
    rng = np.random.default_rng(0)
    rare = [[7] * 20 + [i] for i in range(12)]
    by_chance = [[8, *row] for row in rng.integers(100, 10_000, (12, 10)).tolist()]
    others = rng.integers(100, 1_000_000, (30_000, 10)).tolist()
    stratum = find_strata(tree_of(rare + by_chance + others), np.full(30_024, 100, dtype=np.int32))
    assert len(set(stratum[:12].tolist())) == 1
    assert np.count_nonzero(stratum == stratum[0]) == 12
    assert len(set(stratum[12:].tolist())) == 1
