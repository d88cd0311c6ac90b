"""Admission into an engine that is seen from outside only."""

from typing import Any

import numpy as np
import pytest

from blendserve.errors import EngineError
from blendserve.planner.plan import make_plan
from blendserve.planner.tree_order import depth_first
from blendserve.request import RequestTable
from blendserve.scheduling.policies import POLICIES, make_policy
from blendserve.scheduling.policy import Policy
from blendserve.scheduling.window import Window
from tests.workload import COST_MODEL, request_table

STEP_S = 0.01


def a_job(num_requests: int = 200) -> RequestTable:
    """Five groups with a prefix of 30 tokens each, outputs from 1 to 60, not declared."""
    prompts = [[index % 5] * 30 + [100 + index] for index in range(num_requests)]
    return request_table(prompts, max_tokens=[1 + (7 * index) % 60 for index in range(num_requests)])


def window_of(requests: RequestTable, policy: Policy, **limits: Any) -> Window:
    settings = {
        "kv_capacity_tokens": 1000,
        "max_concurrency": 16,
        "max_num_batched_tokens": 256,
        "step_s": 0.1,
    }
    return Window(requests, policy, **(settings | limits))


class OneTokenPerStep:
    """An engine behind the window whose sequences gain a token every `STEP_S`, all that are sent."""

    def __init__(self, requests: RequestTable, window: Window) -> None:
        self.window = window
        self.left = requests.max_tokens.astype(float)
        self.max_tokens = requests.max_tokens
        self.inside: list[int] = []
        self.arrived: list[int] = []
        self.finished: list[int] = []
        self.now_s = 0.0

    def tick(self) -> None:
        window = self.window
        admitted, withdrawn = window.fill(self.now_s)
        for request in withdrawn:
            self.inside.remove(request)
            self.left[request] = self.max_tokens[request]
        self.inside += admitted
        self.arrived += admitted
        assert sorted(self.inside) == sorted(window.running_requests.tolist())
        passed = max(min(self.left[self.inside].min(), 25), 1)
        self.left[self.inside] -= passed
        self.now_s += passed * STEP_S
        done = [request for request in self.inside if self.left[request] <= 0]
        self.inside = [request for request in self.inside if self.left[request] > 0]
        self.finished += done
        window.finish([(request, int(self.max_tokens[request])) for request in done], self.now_s)

    def run(self) -> None:
        while self.window.num_unfinished:
            self.tick()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("capacity", [1, 150, 100_000])
def test_every_policy_gets_every_request_through(policy: str, capacity: int) -> None:
    requests = a_job()
    window = window_of(
        requests, make_policy(policy, make_plan(requests, COST_MODEL)), kv_capacity_tokens=capacity
    )
    engine = OneTokenPerStep(requests, window)
    most = 0
    while window.num_unfinished:
        engine.tick()
        most = max(most, len(engine.inside))
    assert sorted(engine.finished) == list(range(len(requests)))
    assert most <= 16
    assert window.num_running == window.num_waiting == window.kv_committed_tokens == 0
    assert (window._num_users == 0).all()


def test_what_is_sent_follows_the_policy() -> None:
    requests = a_job()
    plan = make_plan(requests, COST_MODEL)
    expected = {"fcfs": list(range(len(requests))), "dfs": depth_first(plan.tree).tolist()}
    for policy, order in expected.items():
        engine = OneTokenPerStep(requests, window_of(requests, make_policy(policy, plan)))
        engine.run()
        assert engine.arrived == order


def test_memory_counts_prefixes_once_and_outputs_as_expected() -> None:
    requests = request_table([[1] * 100 + [index, 0] for index in range(20)], max_tokens=10)
    plan = make_plan(requests, COST_MODEL)
    window = window_of(requests, make_policy("fcfs", plan), kv_capacity_tokens=200)
    admitted, _ = window.fill(0.0)
    assert len(admitted) == (200 - 100) // (2 + 10) + 1, "one more than fits"
    assert window.kv_committed_tokens == 100 + 2 * len(admitted)
    other = request_table([[index] * 100 for index in range(20)], max_tokens=10)
    window = window_of(other, make_policy("fcfs", make_plan(other, COST_MODEL)), kv_capacity_tokens=200)
    assert len(window.fill(0.0).admitted) == 2


def test_memory_is_what_is_held_at_a_time() -> None:
    """While outputs of 10 tokens run, one of 170 has 10 as well; alone it fits anyway."""
    lengths = [170] + [10] * 40
    requests = request_table([[index] * 10 for index in range(41)], max_tokens=lengths, declared=lengths)
    window = window_of(
        requests,
        make_policy("fcfs", make_plan(requests, COST_MODEL)),
        kv_capacity_tokens=200,
        max_concurrency=100,
    )
    assert len(window.fill(0.0, 0).admitted) == 200 // (10 + 10) + 1


def test_what_ends_makes_room_for_what_is_longer() -> None:
    lengths = [20, 20, 30, 60]
    requests = request_table([[index] * 10 for index in range(4)], max_tokens=lengths, declared=lengths)
    window = window_of(
        requests,
        make_policy("fcfs", make_plan(requests, COST_MODEL)),
        kv_capacity_tokens=89,
    )
    # Three hold 30 each when the first two end.
    assert window.fill(0.0, 0).admitted == [0, 1, 2]
    window.finish([(0, 20)], 1.0, 20)
    assert window.fill(1.0, 20).admitted == [3]


def test_memory_is_counted_in_blocks() -> None:
    """Of a prefix of 100 tokens, blocks of 32 share 96; a request's last block is half empty on average."""
    requests = request_table([[1] * 100 + [index, 0] for index in range(20)], max_tokens=10)
    plan = make_plan(requests, COST_MODEL)
    window = window_of(requests, make_policy("fcfs", plan), kv_capacity_tokens=400, block_size=32)
    admitted, _ = window.fill(0.0)
    each = 4 + 2 + 16
    assert len(admitted) == (400 - 100) // (each + 10) + 1
    assert window.kv_committed_tokens == 100 + each * len(admitted)


def test_a_request_larger_than_the_window_goes_alone() -> None:
    requests = request_table([[1] * 500, [2] * 5, [3] * 5], max_tokens=10)
    window = window_of(requests, make_policy("fcfs", make_plan(requests, COST_MODEL)), kv_capacity_tokens=100)
    assert window.fill(0.0).admitted == [0]
    window.finish([(0, 10)], 1.0)
    assert window.fill(1.0).admitted == [1, 2]


def test_tokens_generated_are_estimated_from_answers() -> None:
    """The first guess of a step's length is ten times too long; answers correct it."""
    requests = request_table([[index] * 10 for index in range(400)], max_tokens=[40, 200] * 200)
    window = window_of(
        requests, make_policy("fcfs", make_plan(requests, COST_MODEL)), kv_capacity_tokens=10**6
    )
    engine = OneTokenPerStep(requests, window)
    while len(engine.finished) < 200:
        engine.tick()
    running = window.running_requests
    true = requests.max_tokens[running] - engine.left[running]
    assert np.abs(window.running_output_tokens - true).max() <= 0.25 * true.max() + 2


def test_steps_that_are_seen_need_no_estimate() -> None:
    requests = request_table([[index] * 10 for index in range(20)], max_tokens=40)
    window = window_of(
        requests, make_policy("fcfs", make_plan(requests, COST_MODEL)), kv_capacity_tokens=10**6
    )
    window.fill(0.0, 0)
    window.fill(1000.0, 7)  # however long they took
    steps_until_decode = 10 * len(window.running_requests) / window.max_num_batched_tokens
    assert window.running_output_tokens.max() == 6
    assert window.running_output_tokens.min() >= 7 - steps_until_decode - 1
    window.finish([(0, 40)], 5000.0, 40)
    assert window.running_output_tokens.max() == 39


def test_a_policy_that_wants_small_steps_is_held_to_them() -> None:
    requests = request_table([[index] * 100 for index in range(20)], max_tokens=10)
    window = window_of(
        requests, make_policy("fcfs", make_plan(requests, COST_MODEL)), kv_capacity_tokens=10**6
    )
    everyone, expected = np.arange(20, dtype=np.int32), np.full(20, 10.0)
    assert window.admit(everyone, expected, 150) == 2
    assert window.prefill_backlog == 200
    assert window.admit(everyone, expected, 150) == 0
    assert window.admit(everyone, expected, window.max_num_batched_tokens) == 16, "as many as may run"


def test_what_is_retracted_is_withdrawn_and_sent_again() -> None:
    requests = request_table([[index] * 10 for index in range(4)], max_tokens=10)

    class Retracting(Policy):
        name = "retracting"

        def _admit_in_order(self, control: Any) -> None:
            if control.step_index == 1:
                control.retract(2)
                assert control.admit(np.array([3]), self.output_tokens_est, 1 << 30) == 0
            else:
                control.admit(np.array([0, 1, 2]), self.output_tokens_est, 1 << 30)

    window = window_of(requests, Retracting(make_plan(requests, COST_MODEL)))
    assert window.fill(0.0) == ([0, 1, 2], [])
    assert window.fill(0.1) == ([], [2])
    assert window.running_requests.tolist() == [0, 1]
    assert window.fill(0.2) == ([2], [])
    assert window.finish([(2, 7), (0, None)], 0.3) == [10, 10]
    assert window.running_requests.tolist() == [1]


def test_a_policy_that_admits_nothing_is_an_error() -> None:
    class Idle(Policy):
        name = "idle"

        def _admit_in_order(self, control: Any) -> None:
            pass

    requests = request_table([[1]])
    with pytest.raises(EngineError, match="admitted none"):
        window_of(requests, Idle(make_plan(requests, COST_MODEL))).fill(0.0)
