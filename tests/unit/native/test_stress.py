"""Many random requests on a pool that is far too small: what each gets is what it gets alone.

Prefixes are shared, prompts computed in chunks, sequences retracted and recomputed, blocks reused over and over; every
eighth request is longer than it says. `--stress-requests 100000` makes a long run of it.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blendserve.engines.batching import BatchingEngine
from blendserve.engines.native.executor import TorchExecutor
from blendserve.planner.plan import make_plan
from blendserve.request import Completion, RequestTable, SamplingParams
from blendserve.scheduling.batch import Batch
from blendserve.scheduling.policies import make_policy
from blendserve.scheduling.scheduler import SchedulerConfig
from blendserve.tokens import PromptTokens
from tests.workload import COST_MODEL

VOCAB = 512
BLOCK_SIZE = 2
NUM_BLOCKS = 44
MAX_PROMPT = 45
MAX_TOKENS = 30
SOMETIMES = tuple(range(0, VOCAB, 7))
"""tokens that end a request: one in seven"""
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, stop_token_ids=SOMETIMES),
    SamplingParams(temperature=1.0, top_k=20, stop_token_ids=SOMETIMES),
    SamplingParams(temperature=0.8, top_k=5),
]
TIE = 1e-4
"""difference of log probabilities that rounding may turn round"""


@pytest.fixture(scope="module")
def folder(make_tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("stress") / "model")


def random_requests(count: int, seed: int) -> RequestTable:
    rng = np.random.default_rng(seed)
    roots = [rng.integers(0, VOCAB, rng.integers(2, 20)).tolist() for _ in range(8)]
    prefixes = roots + [[*roots[i % 8], *rng.integers(0, VOCAB, rng.integers(1, 14))] for i in range(24)]
    prompts = []
    for _ in range(count):
        prefix = prefixes[rng.integers(len(prefixes))] if rng.random() < 0.7 else []
        prompts.append([*prefix, *rng.integers(0, VOCAB, rng.integers(1, 12)).tolist()])
    is_long = rng.random(count) < 0.125
    max_tokens = np.where(is_long, rng.integers(16, MAX_TOKENS + 1, count), rng.integers(1, 6, count))
    return RequestTable(
        tokens=PromptTokens.from_lists(prompts),
        max_tokens=max_tokens.astype(np.int32),
        declared_tokens=np.ones(count, np.int32),
        params=PARAMS,
        params_index=np.where(is_long, 0, rng.integers(0, len(PARAMS), count)).astype(np.int32),
        seeds=rng.integers(0, 2**63, count).astype(np.uint64),
    )


def open_executor(folder: Path, num_blocks: int, backend: Any) -> TorchExecutor:
    return TorchExecutor(
        folder,
        None,
        cost_model=COST_MODEL,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        attention_backend=backend,
    )


def together(
    folder: Path, requests: RequestTable, policy: Any, backend: Any
) -> tuple[list[Completion], dict[str, int]]:
    """All requests under a policy, and what happened to them."""
    engine = BatchingEngine(open_executor(folder, NUM_BLOCKS, backend), SchedulerConfig(12, 30))
    completions: dict[int, Completion] = {}
    counts = {"retracted": 0, "steps": 0, "cached": 0}
    for step in engine.run(requests, make_policy(policy, make_plan(requests, COST_MODEL))):
        counts["steps"] += 1
        counts["retracted"] += step.stats.num_retracted
        for request, result in step.results:
            assert isinstance(result, Completion)
            assert request not in completions
            counts["cached"] += result.num_cached_tokens
            completions[request] = result
    engine.close()
    return [completions[request] for request in range(len(requests))], counts


def alone(executor: TorchExecutor, requests: RequestTable) -> Iterator[Completion]:
    """Each request by itself: its prompt in one step, then a token per step."""
    executor.start(requests)
    one = np.zeros(1, np.int32)
    table = np.arange(executor.num_blocks, dtype=np.int32)[None]
    for request, num_prompt_tokens in enumerate(requests.prompt_tokens.tolist()):
        computed, count, is_finished = 0, num_prompt_tokens, False
        while not is_finished:
            batch = Batch(
                slots=one,
                requests=one + request,
                num_computed=one + computed,
                num_tokens=one + count,
                samples=np.ones(1, np.bool_),
                block_tables=table,
                num_prefill_tokens=0,
                num_decode_tokens=0,
                kv_tokens_read=0,
                query_key_pairs=0,
            )
            is_finished = bool(executor.execute(batch).finished[0])
            computed, count = computed + count, 1
        result = executor.collect(request)
        assert isinstance(result, Completion)
        yield result


def is_tie(executor: TorchExecutor, requests: RequestTable, request: int, found: Completion) -> bool:
    """Whether the first token that differs is as likely as the other, up to rounding."""
    only = requests.take(np.array([request]))
    only.params = [replace(only.sampling_params(0), logprobs=VOCAB)]
    only.params_index = np.zeros(1, np.int32)
    [expected] = alone(executor, only)
    assert expected.logprobs is not None
    pairs = enumerate(zip(expected.token_ids, found.token_ids, strict=False))
    place = next((i for i, (ours, theirs) in pairs if ours != theirs), None)
    if place is None or only.params[0].temperature > 0:
        return False
    likely = dict(expected.logprobs[place].top)
    return abs(likely[expected.token_ids[place]] - likely[found.token_ids[place]]) < TIE


@pytest.mark.parametrize(
    ("policy", "backend", "share"),
    [("blend", "auto", 0.35), ("dual-scan", "auto", 0.3), ("random", "auto", 0.3), ("fcfs", "torch", 0.05)],
)
def test_every_request_gets_what_it_gets_alone(
    folder: Path, request: pytest.FixtureRequest, policy: str, backend: str, share: float
) -> None:
    count = int(share * request.config.getoption("--stress-requests"))
    requests = random_requests(count, seed=int(100 * share) + len(policy))
    completions, counts = together(folder, requests, policy, backend)
    assert counts["retracted"] >= max(1, count // 150), counts
    assert counts["cached"] > count, counts
    executor = open_executor(folder, -(-(MAX_PROMPT + MAX_TOKENS) // BLOCK_SIZE), backend)
    expected = list(alone(executor, requests))
    differing = [
        i
        for i in range(count)
        if (completions[i].token_ids, completions[i].finish_reason)
        != (expected[i].token_ids, expected[i].finish_reason)
    ]
    assert all(is_tie(executor, requests, i, completions[i]) for i in differing), differing
    assert len(differing) <= 1 + count // 10_000, "ties are rarer than this"
