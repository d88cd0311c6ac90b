"""Runs the batches of the scheduler on a model held by torch."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from blendserve.cost_model import CostModel
from blendserve.engines.batching import StepResult
from blendserve.engines.native.attention import Backend, KVShape, PagedAttention, StepLayout, make_attention
from blendserve.engines.native.model import LlamaModel, ModelConfig
from blendserve.engines.native.output import Detokenizer, RequestOutput
from blendserve.engines.native.sampler import SamplingRow, sample
from blendserve.errors import ConfigError, EngineError
from blendserve.request import Failure, RequestTable, Result
from blendserve.scheduling.batch import Batch

DEFAULT_KV_BYTES = 4 << 30
DEFAULT_KV_RATIO = 0.4
"""share of the memory available at start that the KV cache may grow to, unless told"""


class TorchExecutor:
    """A Llama-type model on the CPU; implements `engines.batching.Executor`.

    Args:
        folder: checkpoint.
        tokenizer: None where token ids are enough: text is empty then, and nothing stops at the end of sequence.
        cost_model: of this model on this machine.
        dtype: of weights, KV cache and computation.
        kv_cache_memory: bytes for the KV cache; None for `DEFAULT_KV_RATIO` of the memory available, at most
            `DEFAULT_KV_BYTES`. The memory is taken as it is first used.
        num_blocks: blocks of the KV cache; None for as many as `kv_cache_memory` holds.
        block_size: tokens per block.
        max_model_len: longest sequence; None for what the model allows.
        num_threads: None for torch's choice.
        attention_backend: "auto" for the C kernels where they can be had.

    Raises:
        ModelError: the model cannot be read or needs something that is not implemented.
        ConfigError: the KV cache cannot hold a single block.
    """

    name = "native"
    holds_kv = True

    def __init__(
        self,
        folder: Path,
        tokenizer: Detokenizer | None,
        *,
        cost_model: CostModel,
        dtype: Literal["float32", "bfloat16"] = "float32",
        kv_cache_memory: int | None = None,
        num_blocks: int | None = None,
        block_size: int = 32,
        max_model_len: int | None = None,
        num_threads: int | None = None,
        attention_backend: Backend = "auto",
    ) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self.cost_model = cost_model
        self.block_size = block_size
        self._tokenizer = tokenizer
        config = ModelConfig.from_folder(folder, max_model_len)
        model = LlamaModel.load(folder, config, getattr(torch, dtype))
        shape = KVShape(
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            num_blocks=1,
            block_size=block_size,
            dtype=model.dtype,
        )
        memory = _default_kv_memory() if kv_cache_memory is None else kv_cache_memory
        self.num_blocks = memory // shape.bytes_per_block if num_blocks is None else num_blocks
        if self.num_blocks < 1:
            raise ConfigError(
                f"a KV cache of {memory} bytes holds no block of {block_size} tokens, which takes "
                f"{shape.bytes_per_block}; raise --kv-cache-memory"
            )
        self.max_model_len = min(config.max_model_len, self.num_blocks * block_size)
        attention = make_attention(
            replace(shape, num_blocks=self.num_blocks), config.rope_table(), attention_backend
        )
        self._loaded: tuple[LlamaModel, PagedAttention] | None = (model, attention)
        self._requests: RequestTable | None = None
        self._outputs: dict[int, RequestOutput] = {}
        self._failures: dict[int, Failure] = {}

    def start(self, requests: RequestTable) -> None:
        """See `Executor.start`."""
        self._requests = requests
        self._outputs.clear()
        self._failures.clear()

    def execute(self, batch: Batch) -> StepResult:
        """See `Executor.execute`."""
        started = time.perf_counter()
        if self._loaded is None or self._requests is None:
            raise EngineError("the native engine was closed or never started")
        model, attention = self._loaded
        layout = StepLayout.from_batch(batch, self.block_size)
        token_ids = self._token_ids(batch, layout.query_starts)
        rows = np.flatnonzero(batch.samples)
        selected = layout.query_starts[rows + 1].astype(np.int64) - 1
        hidden = model.hidden_states(
            torch.from_numpy(token_ids), layout, attention, torch.from_numpy(selected)
        )
        finished = np.zeros(len(batch.requests), dtype=np.bool_)
        done = 0
        for logits in model.logits(hidden):
            chunk = rows[done : done + len(logits)]
            done += len(logits)
            finished[chunk] = self._append(batch.requests[chunk], logits)
        return StepResult(finished, time.perf_counter() - started)

    def collect(self, request: int) -> Result:
        """See `Executor.collect`."""
        assert self._requests is not None
        output = self._outputs.pop(request)
        if failure := self._failures.pop(request, None):
            return failure
        return output.completion(int(self._requests.prompt_tokens[request]))

    def close(self) -> None:
        """See `Executor.close`."""
        self._loaded = None
        self._outputs.clear()

    def _token_ids(self, batch: Batch, query_starts: NDArray[np.int32]) -> NDArray[np.int64]:
        """[num_tokens] ids of the tokens that the batch computes."""
        assert self._requests is not None
        token_ids = np.empty(query_starts[-1], dtype=np.int64)
        columns = (batch.requests, batch.num_computed, batch.num_tokens, query_starts)
        for request, first, count, start in zip(*(column.tolist() for column in columns), strict=False):
            output = self._outputs.get(request)
            if output is None:
                output = self._outputs[request] = self._new_output(request)
            num_prompt_tokens = int(self._requests.prompt_tokens[request])
            from_prompt = min(max(num_prompt_tokens - first, 0), count)
            if from_prompt:
                prompt = self._requests.tokens[request]
                token_ids[start : start + from_prompt] = prompt[first : first + from_prompt]
            if count > from_prompt:
                generated = first + from_prompt - num_prompt_tokens
                token_ids[start + from_prompt : start + count] = output.token_ids[
                    generated : generated + count - from_prompt
                ]
        return token_ids

    def _new_output(self, request: int) -> RequestOutput:
        assert self._requests is not None
        room = self.max_model_len - int(self._requests.prompt_tokens[request])
        max_tokens = min(int(self._requests.max_tokens[request]), room)
        return RequestOutput(self._requests.sampling_params(request), max_tokens, self._tokenizer)

    def _append(
        self,
        requests: NDArray[np.int32],
        logits: torch.Tensor,  # [num_rows, vocab_size] fp32
    ) -> list[bool]:
        """Sample a token for each request; which of them are complete with it."""
        numbers = requests.tolist()
        outputs = [self._outputs[request] for request in numbers]
        sampled = sample(logits, [self._sampling_row(*pair) for pair in zip(numbers, outputs, strict=True)])
        finished = []
        for request, output, token_id, logprob, is_valid in zip(numbers, outputs, *sampled, strict=True):
            if is_valid:
                finished.append(output.append(token_id, logprob))
            else:
                self._failures[request] = Failure(
                    "internal_error",
                    f"the model's output is not finite after {len(output.token_ids)} tokens; "
                    "the weights or the dtype are unsuitable for this prompt",
                )
                finished.append(True)
        return finished

    def _sampling_row(self, request: int, output: RequestOutput) -> SamplingRow:
        assert self._requests is not None
        seed = int(self._requests.seeds[request])
        return SamplingRow(output.params, seed, len(output.token_ids), output.suppressed)


def _default_kv_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return DEFAULT_KV_BYTES // 4
    return min(DEFAULT_KV_BYTES, int(DEFAULT_KV_RATIO * available))
