"""The simulated engine: the product's own scheduler and policies on a virtual clock."""

from __future__ import annotations

from typing import Literal

import numba
import numpy as np

from blendserve.cost_model import CostModel
from blendserve.engines.batching import StepResult
from blendserve.planner.prefix_tree import Ints
from blendserve.request import Completion, RequestTable, Result
from blendserve.scheduling.batch import Batch


class SimulatedExecutor:
    """Takes as long for a step as the cost model says and generates nothing.

    Args:
        cost_model: model and device; the device's profile gives block size, memory and step costs.
        output_tokens: [num_requests] length at which each request ends; None: its declared length, else `max_tokens`.
        kv_cache_tokens: memory for KV in tokens; None: the profile's.
        stage: both, or one stage of disaggregated serving: `prefill` ends every request with its first token; for
            `decode` prompts arrive computed, their transfer free.
    """

    name = "simulated"
    holds_kv = False

    def __init__(
        self,
        cost_model: CostModel,
        *,
        output_tokens: Ints | None = None,
        kv_cache_tokens: int | None = None,
        stage: Literal["both", "prefill", "decode"] = "both",
    ) -> None:
        self.cost_model = cost_model
        self.block_size = cost_model.hardware.block_size
        self.num_blocks = (kv_cache_tokens or cost_model.kv_capacity_tokens) // self.block_size
        self.max_model_len = cost_model.model.max_model_len
        self._given = output_tokens
        self._stage = stage

    def start(self, requests: RequestTable) -> None:
        """Begin with nothing generated."""
        declared = np.where(requests.declared_tokens > 0, requests.declared_tokens, requests.max_tokens)
        wanted = declared if self._given is None else self._given
        self._prompt_tokens = requests.prompt_tokens
        if self._stage == "prefill":
            wanted = np.ones_like(wanted)
        self._total = requests.prompt_tokens + np.clip(wanted, 1, requests.max_tokens).astype(np.int32)
        self._max_tokens = requests.max_tokens

    def execute(self, batch: Batch) -> StepResult:
        """Let the virtual clock run for one step."""
        finished = _finished(batch.requests, batch.num_computed, batch.num_tokens, batch.samples, self._total)
        if self._stage == "decode":
            cost = self.cost_model.step_cost(batch.num_decode_tokens, batch.kv_tokens_read)
        else:
            num_tokens = batch.num_prefill_tokens + batch.num_decode_tokens
            cost = self.cost_model.step_cost(num_tokens, batch.kv_tokens_read, batch.query_key_pairs)
        return StepResult(finished, cost.step_s, cost)

    def collect(self, request: int) -> Result:
        """A completion of the right length without text."""
        num_tokens = int(self._total[request] - self._prompt_tokens[request])
        reason = "length" if num_tokens >= self._max_tokens[request] else "stop"
        return Completion(
            token_ids=[0] * num_tokens,
            text="",
            finish_reason=reason,  # type: ignore[arg-type]
            num_prompt_tokens=int(self._prompt_tokens[request]),
        )

    def close(self) -> None:
        """Nothing to free."""


@numba.njit(cache=True, nogil=True)
def _finished(requests, num_computed, num_tokens, samples, total):  # type: ignore[no-untyped-def]
    """[num_rows] whether the token that a row samples is its sequence's last."""
    finished = np.empty(len(requests), np.bool_)
    for row in range(len(requests)):
        finished[row] = samples[row] and num_computed[row] + num_tokens[row] + 1 >= total[requests[row]]
    return finished
