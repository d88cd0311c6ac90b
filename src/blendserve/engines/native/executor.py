"""Runs the batches of the scheduler on a model held by torch.

On a CPU a step is computed and its tokens are taken before `execute` returns. On a GPU the host is a step ahead:

```
host    build 1 | launch 1 | build 2 | launch 2 | take 1 | build 3 | launch 3 | take 2 ...
device                     | --------- step 1 --------- | --------- step 2 --------- | ...
```

A step that decodes reads its tokens where the step before left them, on the device. That a sequence has ended is seen
one step late: its row in that step computes a token which nobody wants, or nothing at all where the length was known.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from blendserve.cost_model import CostModel, Partition
from blendserve.engines.batching import StepResult
from blendserve.engines.chat import ChatReader
from blendserve.engines.native.attention import Backend, KVShape, PagedAttention, StepLayout, make_attention
from blendserve.engines.native.device import upload
from blendserve.engines.native.grammar import Grammars
from blendserve.engines.native.kernels import Kernels, load_kernels
from blendserve.engines.native.limits import available_memory, core_quota
from blendserve.engines.native.logit_rules import LogitRules, LogitState
from blendserve.engines.native.model import LayerOps, LlamaModel, ModelConfig, TorchOps
from blendserve.engines.native.output import Detokenizer, RequestOutput
from blendserve.engines.native.overlap import Lanes, OverlappedModel, open_lanes
from blendserve.engines.native.parallel import Leader, Ranks
from blendserve.engines.native.sampler import (
    TORCH_TOKEN_OPS,
    Choice,
    SamplingRow,
    TokenOps,
    choose,
    score,
)
from blendserve.errors import ConfigError, EngineDiedError, EngineError, RequestError
from blendserve.request import Failure, RequestTable, Result, SamplingParams, TokenLogprob
from blendserve.scheduling.batch import Batch

DEFAULT_KV_BYTES = 4 << 30
DEFAULT_KV_RATIO = 0.4
"""share of the memory available at start that the KV cache may grow to, unless told"""
KEPT_RULES = 256
"""parameters whose rules are kept for the next request that has the same"""
CUDA_KV_RATIO = 0.9
"""share of the GPU's memory left by the weights that the KV cache takes, unless told"""


@dataclass(slots=True)
class _Step:
    """A step that was launched; its tokens may not have arrived."""

    rows: dict[int, int]
    """request to its place among the sampled tokens"""
    token_ids: torch.Tensor
    """[num_sampled] int64, on the device"""
    choices: list[Choice]
    """of consecutive rows"""
    scored: list[tuple[int, int]]
    """request and place of each prompt token whose log probability was asked for"""
    scores: list[Choice]
    """these, of consecutive ones"""
    is_taken: bool = False


class _ToScore(NamedTuple):
    """Known tokens of prompts whose log probabilities are wanted."""

    places: NDArray[np.int64]
    """in the flattened batch, of the tokens before them"""
    token_ids: NDArray[np.int64]
    params: list[SamplingParams]
    scored: list[tuple[int, int]]
    """request and place in its prompt"""


_NOTHING_TO_SCORE = _ToScore(np.empty(0, np.int64), np.empty(0, np.int64), [], [])


class TorchExecutor:
    """A Llama-type model on a CPU or a GPU; implements `engines.batching.Executor`.

    Args:
        folder: checkpoint.
        tokenizer: None where token ids are enough: text is empty then, and nothing stops at the end of sequence.
        cost_model: of this model on this machine.
        device: "cuda" is the current GPU.
        dtype: of weights, KV cache and computation.
        load_format: "dummy" for random weights, of which `folder` need hold the config alone.
        kv_cache_memory: bytes for the KV cache; None on a CPU for `DEFAULT_KV_RATIO` of the memory available, at most
            `DEFAULT_KV_BYTES`, taken as it is first used; on a GPU for `CUDA_KV_RATIO` of what the weights leave.
        num_blocks: blocks of the KV cache; None for as many as `kv_cache_memory` holds.
        block_size: tokens per block.
        max_model_len: longest sequence; None for what the model allows.
        num_threads: None for a thread per core, or fewer where the container grants less.
        attention_backend: "auto" for Triton on a GPU, and on a CPU for the C kernels where they can be had.
        late_results: whether tokens are taken while the next step runs, see above; None: on a GPU.
        ranks: that this executor is one of, see `parallel.open_parallel`; sizes of the KV cache are a rank's.
        overlap: "auto" to run steps in two halves, see `overlap.py`, where by the profile that takes less time.
        lanes: for these, by the profile's partitions; None: on a GPU by itself, those that `open_lanes` finds.
        tool_call_parser, reasoning_parser: what answers in chats are read with, see `engines.chat`; None: not at all.

    Raises:
        ModelError: the model cannot be read or needs something that is not implemented.
        ConfigError: there is no such device, weights and KV cache do not fit into memory, the KV cache cannot hold
            a single block, or the parsers do not fit the tokenizer.
    """

    name = "native"
    holds_kv = True

    def __init__(
        self,
        folder: Path,
        tokenizer: Detokenizer | None,
        *,
        cost_model: CostModel,
        device: Literal["cpu", "cuda"] = "cpu",
        dtype: Literal["float32", "bfloat16"] = "float32",
        load_format: Literal["auto", "dummy"] = "auto",
        kv_cache_memory: int | None = None,
        num_blocks: int | None = None,
        block_size: int = 32,
        max_model_len: int | None = None,
        num_threads: int | None = None,
        attention_backend: Backend = "auto",
        late_results: bool | None = None,
        ranks: Ranks | None = None,
        overlap: Literal["auto", "off"] = "auto",
        lanes: Mapping[Partition, Lanes] | None = None,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        torch.set_num_threads(num_threads or _default_num_threads())
        self.cost_model = cost_model
        self.block_size = block_size
        self._tokenizer = tokenizer
        self._reader: ChatReader | None = None
        if tokenizer is not None and (tool_call_parser or reasoning_parser):
            self._reader = ChatReader(tokenizer, tool_call_parser, reasoning_parser)
        self._ranks = ranks
        self._device = _open_device(device)
        self._is_late = device == "cuda" if late_results is None else late_results
        backend = _resolve_backend(attention_backend, device)
        config = ModelConfig.from_folder(folder, max_model_len)
        torch_dtype: torch.dtype = getattr(torch, dtype)
        ops = _layer_ops(backend, torch_dtype)
        self._token_ops: TokenOps = ops if isinstance(ops, Kernels) else TORCH_TOKEN_OPS
        if device == "cpu":
            _check_memory(
                config if ranks is None else config.of_rank(ranks.size), torch_dtype, kv_cache_memory
            )
        if load_format == "dummy":
            model = LlamaModel.dummy(config, torch_dtype, self._device, ops, ranks)
        else:
            model = LlamaModel.load(folder, config, torch_dtype, self._device, ops, ranks)
        shape = KVShape(
            num_layers=config.num_layers,
            num_heads=model.config.num_heads,
            num_kv_heads=model.config.num_kv_heads,
            head_dim=config.head_dim,
            num_blocks=1,
            block_size=block_size,
            dtype=model.dtype,
        )
        memory = kv_cache_memory
        if memory is None:
            memory = _default_kv_memory(self._device, 1 if ranks is None else ranks.size)
        self.num_blocks = memory // shape.bytes_per_block if num_blocks is None else num_blocks
        if ranks is not None:
            self.num_blocks = ranks.agree(self.num_blocks)
        if self.num_blocks < 1:
            raise ConfigError(
                f"a KV cache of {memory} bytes holds no block of {block_size} tokens, which takes "
                f"{shape.bytes_per_block}; raise --kv-cache-memory"
            )
        self.max_model_len = min(config.max_model_len, self.num_blocks * block_size)
        cosine, sine = (table.to(self._device) for table in config.rope_tables())
        attention = make_attention(
            replace(shape, num_blocks=self.num_blocks), (cosine, sine), backend, config.attention_rules
        )
        if lanes is None and overlap == "auto" and device == "cuda" and ranks is None:
            lanes = open_lanes(cost_model.hardware, model)
        self._loaded: tuple[LlamaModel, PagedAttention, OverlappedModel | None] | None
        self._loaded = (model, attention, None)
        if lanes and overlap == "auto":
            self.set_overlap(cost_model, lanes)
        self._requests: RequestTable | None = None
        self._outputs: dict[int, RequestOutput] = {}
        self._failures: dict[int, Failure] = {}
        read_rules = functools.partial(LogitRules.of, tokenizer=tokenizer, vocab_size=config.vocab_size)
        self._read_rules = functools.lru_cache(maxsize=KEPT_RULES)(read_rules)
        self._states: dict[int, LogitState] = {}
        """of those requests whose logits are changed before a token is chosen"""
        self._prompt_logprobs: dict[int, list[TokenLogprob | None]] = {}
        """of those requests that ask for them, by place from the second token on; None where not yet known"""
        self._grammars: Grammars | None = None
        self._complete: set[int] = set()  # and not collected yet
        self._in_flight: _Step | None = None

    def start(self, requests: RequestTable) -> None:
        """See `Executor.start`."""
        self._requests = requests
        self._forget()

    def execute(self, batch: Batch) -> StepResult:
        """See `Executor.execute`."""
        started = time.perf_counter()
        if self._loaded is None or self._requests is None:
            raise EngineError("the native engine was closed or never started")
        try:
            launched = self._launch_on_all(batch)
            arrived = self._in_flight if self._is_late else launched
            self._in_flight = launched if self._is_late else None
            if arrived is not None:
                self._take(arrived)
            if isinstance(self._ranks, Leader):
                self._ranks.check()
        except torch.AcceleratorError as error:
            # What a kernel did wrong shows at any later call, and the process can use the GPU no more.
            raise EngineDiedError(f"the GPU failed: {error}") from error
        finished = np.array([request in self._complete for request in batch.requests.tolist()], np.bool_)
        return StepResult(finished, time.perf_counter() - started, is_late=self._is_late)

    def collect(self, request: int) -> Result:
        """See `Executor.collect`."""
        assert self._requests is not None
        self._complete.discard(request)
        output = self._outputs.pop(request)
        self._states.pop(request, None)
        prompt_logprobs = self._prompt_logprobs.pop(request, None)
        if failure := self._failures.pop(request, None):
            return failure
        prompt, seed = self._requests.tokens[request], int(self._requests.seeds[request])
        completion = output.completion(len(prompt), prompt.tobytes() + seed.to_bytes(8, "little"))
        if prompt_logprobs is not None:
            completion.prompt_logprobs = [entry for entry in prompt_logprobs if entry is not None]
        return completion

    @property
    def model(self) -> LlamaModel:
        """What it runs; for measurements."""
        assert self._loaded is not None
        return self._loaded[0]

    @property
    def attention(self) -> PagedAttention:
        """Over its KV cache; for measurements."""
        assert self._loaded is not None
        return self._loaded[1]

    def set_overlap(self, cost_model: CostModel, lanes: Mapping[Partition, Lanes]) -> None:
        """From the next step on, split steps where this cost model has that faster; without lanes, never."""
        assert self._loaded is not None
        model, attention, _ = self._loaded
        self.cost_model = cost_model
        overlapped = OverlappedModel(model, attention, cost_model, lanes) if lanes else None
        self._loaded = (model, attention, overlapped)

    def close(self) -> None:
        """See `Executor.close`."""
        self._loaded = None
        self._forget()
        if self._grammars is not None:
            self._grammars.close()
        if isinstance(self._ranks, Leader):
            self._ranks.close()

    def follow(self, batch: Batch, scored: NDArray[np.int64]) -> None:
        """Compute this rank's part of a batch that rank 0 launches; `scored` are places that need logits, too."""
        assert self._loaded is not None
        assert self._ranks is not None
        model, attention = self._loaded[:2]
        layout = StepLayout.from_batch(batch, self.block_size)
        [selected] = upload([np.concatenate((_last_tokens(batch, layout), scored))], self._device)
        token_ids = torch.empty(layout.num_tokens, dtype=torch.int64, device=self._device)
        hidden = model.hidden_states(self._ranks.broadcast(token_ids), layout, attention, selected)
        for _ in model.logits(hidden):
            pass

    def _forget(self) -> None:
        self._outputs.clear()
        self._failures.clear()
        self._states.clear()
        self._prompt_logprobs.clear()
        self._complete.clear()
        self._in_flight = None

    def _launch_on_all(self, batch: Batch) -> _Step | None:
        """`_launch`; what fails on one of several ranks leaves the others waiting for it.

        Raises:
            EngineDiedError: something failed and there are other ranks.
        """
        if not isinstance(self._ranks, Leader):
            return self._launch(batch)
        self._ranks.check()
        try:
            return self._launch(batch)
        except Exception as error:  # whatever a model, a kernel or an allocator raises
            raise self._ranks.death(error) from error
        except BaseException:  # Ctrl-C
            self._ranks.close()
            raise

    def _launch(self, batch: Batch) -> _Step | None:
        """Start to compute a batch and to choose its tokens; None if it leaves nothing to do."""
        assert self._loaded is not None
        model, attention, overlapped = self._loaded
        batch = self._without_surplus(batch)
        if not len(batch.requests):
            return None
        has_scores = bool(self._prompt_logprobs) and self._has_scores(batch)
        halves = None
        if overlapped is not None and not has_scores:
            halves = overlapped.split(batch, self.block_size)
        if halves is not None:
            batch = halves.batch
        layout = StepLayout.from_batch(batch, self.block_size)
        token_ids, places, sources = self._token_ids(batch, layout.query_starts)
        rows = np.flatnonzero(batch.samples)
        to_score = self._to_score(batch, layout) if has_scores else _NOTHING_TO_SCORE
        arrays = (
            token_ids,
            np.concatenate((_last_tokens(batch, layout), to_score.places)),
            np.array(places, np.int64),
            np.array(sources, np.int64),
        )
        ids, wanted, ids_in_flight, their_source = upload(arrays, self._device)
        if places:
            assert self._in_flight is not None
            ids[ids_in_flight] = self._in_flight.token_ids[their_source]
        if isinstance(self._ranks, Leader):
            self._ranks.lead(batch, self.block_size, ids, to_score.places)
        if overlapped is not None and halves is not None:
            hidden = overlapped.hidden_states(ids, layout, wanted, halves)
        else:
            hidden = model.hidden_states(ids, layout, attention, wanted)
        requests = batch.requests[rows].tolist()
        sampling_rows = self._sampling_rows(requests)
        choices: list[Choice] = []
        scores: list[Choice] = []
        done = 0
        for logits in model.logits(hidden):
            here = sampling_rows[done : done + len(logits)]
            if here:
                choices.append(choose(logits[: len(here)], here, self._token_ops))
                choices[-1].download()
            if len(here) < len(logits):
                first = done + len(here) - len(sampling_rows)
                end = first + len(logits) - len(here)
                scores.append(
                    score(logits[len(here) :], to_score.token_ids[first:end], to_score.params[first:end])
                )
                scores[-1].download()
            done += len(logits)
        if not choices and not scores:
            return None
        chosen = torch.cat([choice.token_ids for choice in choices]) if choices else ids[:0]
        places_of = {request: place for place, request in enumerate(requests)}
        return _Step(places_of, chosen, choices, to_score.scored, scores)

    def _take(self, step: _Step) -> None:
        """Wait for the tokens of a step and append them to their requests; does nothing the second time."""
        if step.is_taken:
            return
        step.is_taken = True
        scored = iter(step.scored)
        for scores in step.scores:
            for entry in scores.sampled().logprobs:
                request, place = next(scored)
                if request in self._prompt_logprobs:
                    self._prompt_logprobs[request][place - 1] = entry
        requests = iter(step.rows)
        for choice in step.choices:
            for token_id, logprob, is_valid in zip(*choice.sampled(), strict=True):
                request = next(requests)
                output = self._outputs.get(request)
                if output is None or request in self._complete:
                    continue  # it ended with the token before
                state = self._states.get(request)
                if request in self._failures:
                    self._complete.add(request)
                    continue
                if not is_valid:
                    self._failures[request] = _no_token(len(output.token_ids), state)
                    self._complete.add(request)
                    continue
                ends_grammar = state is not None and state.append(token_id)
                if output.append(token_id, logprob, ends_grammar=ends_grammar):
                    self._complete.add(request)
                elif state is not None and not output.is_reasoning:
                    state.begin(token_id if output.has_content else None)

    def _without_surplus(self, batch: Batch) -> Batch:
        """The batch without rows of which nobody needs anything: their requests have all tokens, here or on the way.

        Rows of a prompt are run whoever asks: other requests may count on the blocks they fill.
        """
        assert self._requests is not None
        has_all = np.zeros(len(batch.requests), np.bool_)
        for row, request in enumerate(batch.requests.tolist()):
            output = self._outputs.get(request)
            if output is None:
                self._open(request)
            else:
                has_all[row] = request in self._complete or self._num_launched(request) >= output.max_tokens
        if not has_all.any():
            return batch
        keep = ~has_all | (batch.num_computed < self._requests.prompt_tokens[batch.requests])
        return replace(
            batch,
            slots=batch.slots[keep],
            requests=batch.requests[keep],
            num_computed=batch.num_computed[keep],
            num_tokens=batch.num_tokens[keep],
            samples=(batch.samples & ~has_all)[keep],
        )

    def _num_launched(self, request: int) -> int:
        """Tokens generated for a request, the one on its way included."""
        step = self._in_flight
        is_in_flight = step is not None and not step.is_taken and request in step.rows
        return len(self._outputs[request].token_ids) + is_in_flight

    def _token_ids(
        self, batch: Batch, query_starts: NDArray[np.int32]
    ) -> tuple[NDArray[np.int64], list[int], list[int]]:
        """[num_tokens] ids of the tokens that the batch computes, but for those on their way.

        Of these, the places in the batch and the places among the tokens of the step in flight.
        """
        assert self._requests is not None
        token_ids = np.zeros(query_starts[-1], dtype=np.int64)
        places: list[int] = []
        sources: list[int] = []
        columns = (batch.requests, batch.num_computed, batch.num_tokens, query_starts)
        for request, first, count, start in zip(*(column.tolist() for column in columns), strict=False):
            num_prompt_tokens = int(self._requests.prompt_tokens[request])
            from_prompt = min(max(num_prompt_tokens - first, 0), count)
            if from_prompt:
                prompt = self._requests.tokens[request]
                token_ids[start : start + from_prompt] = prompt[first : first + from_prompt]
            if count > from_prompt:
                generated = first + from_prompt - num_prompt_tokens
                known = self._outputs[request].token_ids[generated : generated + count - from_prompt]
                end = start + from_prompt + len(known)
                token_ids[start + from_prompt : end] = known
                if end < start + count:
                    assert self._in_flight is not None
                    places.append(end)
                    sources.append(self._in_flight.rows[request])
        return token_ids, places, sources

    def _open(self, request: int) -> None:
        """Begin the output of a request."""
        assert self._requests is not None
        params = self._requests.sampling_params(request)
        num_prompt_tokens = int(self._requests.prompt_tokens[request])
        max_tokens = min(int(self._requests.max_tokens[request]), self.max_model_len - num_prompt_tokens)
        answer = None
        if self._reader is not None and params.chat:
            answer = self._reader.open(params.chat, skip_special_tokens=params.skip_special_tokens)
        output = RequestOutput(
            params,
            max_tokens,
            self._tokenizer,
            answer,
            follows_reasoning=b"structured_outputs" in params.extra,
        )
        self._outputs[request] = output
        if params.prompt_logprobs is not None:
            self._prompt_logprobs[request] = [None] * (num_prompt_tokens - 1)
        if not params.extra:
            return
        try:
            rules = self._read_rules(params.extra)
        except RequestError as error:
            self._failures[request] = Failure(error.code, error.message, error.param, error.status_code)
            return
        grammar = None
        if rules.constraint:
            if self._grammars is None:
                assert self._tokenizer is not None
                self._grammars = Grammars(self._tokenizer, self.model.config.vocab_size)
            grammar = self._grammars.open(rules.constraint)
            grammar.is_waiting = output.is_reasoning
        self._states[request] = LogitState(rules, self._requests.tokens[request], grammar)

    def _sampling_rows(self, requests: list[int]) -> list[SamplingRow]:
        """What the next token of each request is chosen by."""
        assert self._requests is not None
        positions = [self._num_launched(request) for request in requests]
        states = {request: self._states[request] for request in requests if request in self._states}
        if states and self._in_flight is not None and not states.keys().isdisjoint(self._in_flight.rows):
            # Their rules need the tokens on their way, which arrive while the device computes what was launched.
            self._take(self._in_flight)
            states = {request: state for request, state in states.items() if request not in self._complete}
        masks = self._grammar_masks(states)
        rows = []
        for request, position in zip(requests, positions, strict=True):
            output = self._outputs[request]
            seed = int(self._requests.seeds[request])
            state = states.get(request)
            suppressed = output.suppressed(position)
            if state is None or request in self._failures:
                rows.append(SamplingRow(output.params, seed, position, suppressed))
                continue
            if suppressed and state.grammar is not None and state.grammar.must_end:
                suppressed = ()  # a grammar that has come to its end goes before min_tokens, as in vLLM
            rows.append(
                SamplingRow(
                    output.params,
                    seed,
                    position,
                    (*suppressed, *state.suppressed(output.token_ids)),
                    state.edits(masks.get(request)),
                )
            )
        return rows

    def _grammar_masks(self, states: Mapping[int, LogitState]) -> dict[int, NDArray[np.int32]]:
        """What may follow by their grammars, of the requests that have one; notes those that cannot be followed."""
        grammars = {
            request: state.grammar
            for request, state in states.items()
            if state.grammar is not None and state.grammar.is_restrictive
        }
        if not grammars:
            return {}
        assert self._grammars is not None
        sound = {request: grammar for request, grammar in grammars.items() if not grammar.error}
        masks = self._grammars.masks([*sound.values()])
        for request, grammar in grammars.items():
            if error := grammar.error:
                message = f"the output cannot be held to its constraint: {error}; simplify the constraint"
                self._failures[request] = Failure("invalid_request", message, "structured_outputs", 400)
        return dict(zip(sound, masks, strict=True))

    def _has_scores(self, batch: Batch) -> bool:
        """Whether the batch computes prompts whose log probabilities are wanted."""
        assert self._requests is not None
        is_prompt = batch.num_computed < self._requests.prompt_tokens[batch.requests] - 1
        return any(request in self._prompt_logprobs for request in batch.requests[is_prompt].tolist())

    def _to_score(self, batch: Batch, layout: StepLayout) -> _ToScore:
        """The prompt tokens whose log probabilities are wanted and not known from before a retraction."""
        assert self._requests is not None
        places: list[int] = []
        token_ids: list[int] = []
        params: list[SamplingParams] = []
        scored: list[tuple[int, int]] = []
        columns = (batch.requests, batch.num_computed, batch.num_tokens, layout.query_starts)
        for request, first, count, start in zip(*(column.tolist() for column in columns), strict=False):
            known = self._prompt_logprobs.get(request)
            if known is None:
                continue
            asked = self._requests.sampling_params(request)
            asked = replace(asked, logprobs=asked.prompt_logprobs, logprob_token_ids=())
            prompt = self._requests.tokens[request]
            for place in range(first + 1, min(first + count, len(prompt) - 1) + 1):
                if known[place - 1] is None:
                    places.append(start + place - 1 - first)
                    token_ids.append(int(prompt[place]))
                    params.append(asked)
                    scored.append((request, place))
        return _ToScore(np.array(places, np.int64), np.array(token_ids, np.int64), params, scored)


def _no_token(num_tokens: int, state: LogitState | None) -> Failure:
    """The failure of a request for which no token could be chosen."""
    if state is None:
        return Failure(
            "internal_error",
            f"the model's output is not finite after {num_tokens} tokens; the weights or the dtype are unsuitable for "
            "this prompt",
        )
    return Failure(
        "no_token_left",
        f"after {num_tokens} tokens the request's parameters allow no token that the model gives; relax "
        "'allowed_token_ids', 'bad_words', 'min_tokens' or the constraint on the output",
        status_code=400,
    )


def _last_tokens(batch: Batch, layout: StepLayout) -> NDArray[np.int64]:
    """[num_sampled] places in the flattened batch of the tokens that a token is sampled behind."""
    return layout.query_starts[np.flatnonzero(batch.samples) + 1].astype(np.int64) - 1


def _open_device(name: Literal["cpu", "cuda"]) -> torch.device:
    if name == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                "--device cuda: torch finds no GPU; install a build of torch for CUDA, or use --device cpu"
            )
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _resolve_backend(backend: Backend, device: Literal["cpu", "cuda"]) -> Backend:
    """The attention backend; Triton runs on GPUs alone, but for its interpreter, and the others on CPUs.

    Raises:
        ConfigError: a backend asked for by name that this device or this installation does not have.
    """
    if device == "cuda" and backend not in ("auto", "triton"):
        raise ConfigError(f"--attention-backend {backend} runs on CPUs; leave it out with --device cuda")
    if backend != "triton" and device == "cpu":
        return backend
    try:
        from blendserve.engines.native.triton_backend import is_interpreted
    except ImportError as error:
        raise ConfigError(f"Triton cannot be loaded: pip install 'blendserve[cuda]' ({error})") from error
    if device == "cpu" and not is_interpreted():
        raise ConfigError("--attention-backend triton needs a GPU; leave it out, or add --device cuda")
    return "triton"


def _layer_ops(backend: Backend, dtype: torch.dtype) -> LayerOps:
    if backend == "triton":
        from blendserve.engines.native.triton_backend import TritonOps

        return TritonOps()
    loaded = None if backend == "torch" else load_kernels(dtype)
    return TorchOps() if loaded is None else loaded


def _default_num_threads() -> int:
    quota = core_quota()
    return torch.get_num_threads() if quota is None else max(1, min(torch.get_num_threads(), int(quota)))


def _check_memory(config: ModelConfig, dtype: torch.dtype, kv_cache_memory: int | None) -> None:
    """Refuse what would have the system swap or kill.

    Raises:
        ConfigError: weights, and the KV cache if its size is given, are more than the memory that is available.
    """
    available = available_memory()
    weights = config.num_matrix_weights * dtype.itemsize
    if available is None or weights + (kv_cache_memory or 0) <= available:
        return
    found = f"the weights take {_gib(weights)} as {str(dtype).removeprefix('torch.')}"
    if weights > available:
        shorter = "--dtype bfloat16, " if dtype == torch.float32 else ""
        remedy = f"use {shorter}a smaller model or a machine with more memory"
    else:
        assert kv_cache_memory is not None
        found += f" and the KV cache {_gib(kv_cache_memory)}"
        remedy = f"lower --kv-cache-memory to at most {available - weights}, or leave it out"
    raise ConfigError(f"{found}, but {_gib(available)} of memory are available; {remedy}")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"


def _default_kv_memory(device: torch.device, num_ranks: int) -> int:
    """Bytes of KV cache of each rank; ranks on CPUs share the memory."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return int(CUDA_KV_RATIO * free_bytes)
    available = available_memory()
    if available is None:
        return DEFAULT_KV_BYTES // 4 // num_ranks
    return min(DEFAULT_KV_BYTES, int(DEFAULT_KV_RATIO * available)) // num_ranks
