"""Small jobs for tests: tables of requests from lists, and Hypothesis strategies for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from blendserve.cost_model import CostModel, HardwareSpec
from blendserve.models import ModelSpec
from blendserve.request import RequestTable, SamplingParams
from blendserve.tokens import PromptTokens

TINY = ModelSpec(
    name="tiny",
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=512,
    params=1e6,
    active_params=1e6,
    max_model_len=4096,
)
COST_MODEL = CostModel(TINY, HardwareSpec.load("a100-80g-paper"))


def request_table(
    prompts: list[list[int]], max_tokens: list[int] | int = 100, declared: list[int] | None = None
) -> RequestTable:
    """Requests with these prompts and caps, greedy."""
    num_requests = len(prompts)
    caps = [max_tokens] * num_requests if isinstance(max_tokens, int) else max_tokens
    return RequestTable(
        tokens=PromptTokens.from_lists(prompts),
        max_tokens=np.array(caps, dtype=np.int32),
        declared_tokens=np.array(declared or [0] * num_requests, dtype=np.int32),
        params=[SamplingParams(temperature=0.0)],
        params_index=np.zeros(num_requests, dtype=np.int32),
        seeds=np.arange(num_requests, dtype=np.uint64),
    )


@dataclass(frozen=True)
class SmallJob:
    """A job and a device so small that everything happens: sharing, chunks, eviction, retraction."""

    prompts: list[list[int]]
    max_tokens: list[int]
    output_tokens: list[int]
    block_size: int
    num_blocks: int
    max_num_batched_tokens: int
    max_num_seqs: int
    free_unused_prefixes: bool
    seed: int


@st.composite
def small_jobs(draw: st.DrawFn) -> SmallJob:
    """Jobs of up to 25 requests over an alphabet of 1 to 4 tokens."""
    alphabet = draw(st.integers(0, 3))
    prompt = st.lists(st.integers(0, alphabet), min_size=1, max_size=20)
    prompts = draw(st.lists(prompt, min_size=1, max_size=25))
    max_tokens = [draw(st.integers(1, 30)) for _ in prompts]
    output_tokens = [draw(st.integers(1, cap)) for cap in max_tokens]
    block_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    longest = max(-(-(len(p) + cap) // block_size) for p, cap in zip(prompts, max_tokens, strict=True))
    return SmallJob(
        prompts=prompts,
        max_tokens=max_tokens,
        output_tokens=output_tokens,
        block_size=block_size,
        num_blocks=longest + draw(st.sampled_from([0, 1, 3, 10, 100])),
        max_num_batched_tokens=block_size + draw(st.sampled_from([0, 1, 5, 20, 100])),
        max_num_seqs=draw(st.sampled_from([1, 2, 5, 30])),
        free_unused_prefixes=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )
