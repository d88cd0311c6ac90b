"""Log probabilities of prompts: those of transformers, however the prompt is computed and whoever shares it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from blendserve.engines.batching import BatchingEngine
from blendserve.engines.native.executor import TorchExecutor
from blendserve.planner.plan import make_plan
from blendserve.planner.prefix_tree import PrefixTree, PromptOrder
from blendserve.request import Completion, Failure, RequestTable, SamplingParams
from blendserve.scheduling.policies import make_policy
from blendserve.scheduling.scheduler import SchedulerConfig
from blendserve.tokens import PromptTokens
from tests.unit.native.test_executor import BLOCK_SIZE, GREEDY, PROMPTS, Driver, run_all, table, token_ids
from tests.workload import COST_MODEL

ASKED = SamplingParams(temperature=0.0, prompt_logprobs=3)
Expected = Callable[[list[int]], torch.Tensor]


@pytest.fixture(scope="module")
def folder(make_tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("prompts") / "model")


@pytest.fixture(params=[False, True], ids=["at-once", "late"])
def executor(folder: Path, request: pytest.FixtureRequest) -> Iterator[TorchExecutor]:
    executor = TorchExecutor(
        folder, None, cost_model=COST_MODEL, num_blocks=64, block_size=BLOCK_SIZE, late_results=request.param
    )
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def expected(folder: Path) -> Expected:
    """[num_tokens, vocab_size] log probabilities behind each token of a prompt, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def logprobs(prompt: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([prompt])).logits[0].log_softmax(-1)

    return logprobs


def check(result: Completion | Failure, prompt: list[int], expected: Expected, num_top: int = 3) -> None:
    assert isinstance(result, Completion)
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == len(prompt) - 1
    for token_id, entry, logprobs in zip(prompt[1:], result.prompt_logprobs, expected(prompt), strict=False):
        assert entry.token_id == token_id
        assert entry.logprob == pytest.approx(logprobs[token_id].item(), abs=1e-4)
        assert [value for _, value in entry.top] == pytest.approx(
            logprobs.topk(num_top).values.tolist(), abs=1e-4
        )


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_they_are_those_of_transformers(executor: TorchExecutor, expected: Expected, chunk: int) -> None:
    other = SamplingParams(temperature=0.0, prompt_logprobs=0, logprobs=1)
    plain = token_ids(run_all(executor, table([GREEDY])))
    results = run_all(executor, table([ASKED, GREEDY, other]), chunk)
    assert token_ids(results) == plain
    check(results[0], PROMPTS[0], expected)
    check(results[2], PROMPTS[2], expected, num_top=0)
    check(results[3], PROMPTS[3], expected)  # of a single token there are none
    assert isinstance(results[1], Completion)
    assert results[1].prompt_logprobs is None
    assert isinstance(results[2], Completion)
    assert results[2].logprobs is not None


def test_a_retraction_in_the_prompt_and_one_behind_it_lose_none(
    executor: TorchExecutor, expected: Expected
) -> None:
    driver = Driver(executor, table([ASKED]))
    driver.admit(0, 0)
    driver.admit(2, 1)
    driver.step({0: 3, 2: 100})
    del driver.slot_of[0]
    del driver.slot_of[2]
    driver.admit(2, 3)
    driver.admit(0, 2)
    driver.step({0: 2, 2: 5})
    results = driver.finish(chunk=2)
    for request in (0, 2):
        check(results[request], PROMPTS[request], expected)


def test_logits_in_chunks_of_rows(executor: TorchExecutor, expected: Expected) -> None:
    """Rows that sample and rows that are scored may share a chunk, and need not."""
    for rows_per_chunk in (1, 3, 4):
        executor.model.rows_per_chunk = rows_per_chunk
        for result, prompt in zip(run_all(executor, table([ASKED])), PROMPTS, strict=True):
            check(result, prompt, expected)


def requests_with_a_common_prefix() -> tuple[list[list[int]], RequestTable]:
    prefix = np.random.default_rng(0).integers(3, 500, 21).tolist()
    prompts = [[*prefix, 100 + i, 7, i] for i in range(8)]
    count = len(prompts)
    return prompts, RequestTable(
        tokens=PromptTokens.from_lists(prompts),
        max_tokens=np.full(count, 5, np.int32),
        declared_tokens=np.zeros(count, np.int32),
        params=[GREEDY, ASKED],
        params_index=np.array([0, 1, 0, 0, 1, 1, 0, 0], np.int32),
        seeds=np.zeros(count, np.uint64),
    )


@pytest.mark.parametrize("policy", ["fcfs", "blend"])
def test_a_cached_prefix_is_computed_again_for_them(
    executor: TorchExecutor, expected: Expected, policy: str
) -> None:
    """The others find it in the cache, and get what they get without them."""
    prompts, requests = requests_with_a_common_prefix()
    engine = BatchingEngine(executor, SchedulerConfig(4, 16))
    results: dict[int, Completion] = {}
    for step in engine.run(requests, make_policy(policy, make_plan(requests, COST_MODEL))):  # type: ignore[arg-type]
        results |= dict(step.results)  # type: ignore[arg-type]
    for request, prompt in enumerate(prompts):
        if requests.params_index[request]:
            check(results[request], prompt, expected)
            assert results[request].num_cached_tokens == 0
        else:
            assert results[request].prompt_logprobs is None
    plain = [results[request] for request in range(8) if not requests.params_index[request]]
    assert sum(result.num_cached_tokens == 20 for result in plain) == 4, "all but the one that computes it"


def test_who_shares_with_nobody_takes_no_prefix_from_the_others() -> None:
    _, requests = requests_with_a_common_prefix()
    assert requests.prefix_groups is not None
    order = PromptOrder.of(requests.tokens, requests.prefix_groups)
    assert sorted(order.requests.tolist()) == list(range(8))
    common = dict(zip(order.requests.tolist(), order.common.tolist(), strict=True))
    assert [common[request] for request in (1, 4, 5)] == [0, 0, 0]
    assert sorted(common[request] for request in (0, 2, 3, 6, 7)) == [0, 21, 21, 21, 21]
    tree = PrefixTree.build_blocks(order, requests.prompt_tokens, BLOCK_SIZE)
    assert tree.num_unique_units == 3 * 5 + 5
