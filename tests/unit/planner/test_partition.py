import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blendserve.planner.partition import partition
from blendserve.planner.plan import make_plan
from tests.workload import COST_MODEL, request_table


def mixed_job(num_groups: int = 12, per_group: int = 40) -> tuple[list[list[int]], list[int]]:
    """Groups of short outputs behind a shared prefix, and single prompts with long outputs."""
    rng = np.random.default_rng(0)
    prompts, lengths = [], []
    for _ in range(num_groups):
        prefix = rng.integers(0, 1000, 60).tolist()
        prompts += [prefix + rng.integers(0, 1000, 20).tolist() for _ in range(per_group)]
        lengths += [3] * per_group
    prompts += [rng.integers(0, 1000, 10).tolist() for _ in range(120)]
    lengths += rng.integers(200, 900, 120).tolist()
    return prompts, lengths


@pytest.mark.parametrize("num_replicas", [1, 2, 4, 8])
def test_work_and_density_are_equal(num_replicas: int) -> None:
    prompts, lengths = mixed_job()
    plan = make_plan(request_table(prompts, 1000, lengths), COST_MODEL)
    parts = partition(plan, num_replicas)
    compute, memory = [], []
    for rank in range(num_replicas):
        chosen = parts.requests_of(rank)
        table = request_table([prompts[r] for r in chosen], 1000, [lengths[r] for r in chosen])
        part = make_plan(table, COST_MODEL)
        compute.append(part.compute_s())
        memory.append(part.memory_s())
    for values in (compute, memory):
        assert max(values) <= 1.15 * sum(values) / num_replicas


def test_only_the_prefixes_at_the_cuts_are_lost() -> None:
    prompts, lengths = mixed_job()
    plan = make_plan(request_table(prompts, 1000, lengths), COST_MODEL)
    assert partition(plan, 1).lost_tokens == 0
    assert 0 <= partition(plan, 4).lost_tokens <= 3 * 60 + 10


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=10), min_size=1, max_size=30),
    st.integers(1, 5),
    st.data(),
)
def test_every_request_has_one_rank_and_lost_tokens_are_exact(
    prompts: list[list[int]], num_replicas: int, data: st.DataObject
) -> None:
    lengths = [data.draw(st.sampled_from([1, 5, 300])) for _ in prompts]
    plan = make_plan(request_table(prompts, 1000, lengths), COST_MODEL)
    parts = partition(plan, num_replicas)
    assert sorted(np.concatenate([parts.requests_of(rank) for rank in range(num_replicas)])) == list(
        range(len(prompts))
    )
    unique = 0
    for rank in range(num_replicas):
        mine = [prompts[r] for r in parts.requests_of(rank)]
        unique += len({tuple(p[: i + 1]) for p in mine for i in range(len(p))})
    assert parts.lost_tokens == unique - plan.tree.num_unique_units
