"""The offline Python API: prompts in, completions out, with the names of vLLM's `LLM`.

```
prompts ─bodies─▶ Rows ─prepare, plan (jobs, planner)─▶ SupervisedEngine ─answers─▶ RequestOutput
```

Prompts become request bodies and go the way of the lines of a batch file, so what a file may ask for may be asked
for here, and what is refused there is refused here with the same words.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import itertools
import json
import logging
import operator
import signal
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from types import FrameType, TracebackType
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter, ValidationError

from blendserve.engines import NATIVE_ONLY, EngineConfig, EngineName, open_engine
from blendserve.engines.supervised import DEFAULT_MAX_RESTARTS, SupervisedEngine
from blendserve.errors import ConfigError, EngineError, FailedRequestsError, PromptError, RequestError
from blendserve.jobs.job import Answer, GatheredResults
from blendserve.jobs.openai_format import LineError, Row, row_of_body
from blendserve.jobs.prepare import Prepared, prepare
from blendserve.jobs.setup import DEFAULT_POLICY, InputConfig, JobConfig, find_model, open_tokenizer
from blendserve.jobs.sources import CHAT_URL, COMPLETIONS_URL
from blendserve.outputs import CompletionOutput, Logprob, RequestOutput
from blendserve.planner.plan import PlanConfig
from blendserve.request import Adapter, Completion, Failure, RequestTable, StepOutput, TokenLogprob
from blendserve.sampling_params import SamplingParams
from blendserve.scheduling.policies import POLICIES, PolicyName
from blendserve.tokenizer import ApproximateTokenizer, Tokenizer

_log = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Mapping[str, Any]
"""text, token ids, {"prompt": text} or {"prompt_token_ids": token ids}"""
Message = Mapping[str, Any]
"""{"role": ..., "content": ...}"""
OnError = Literal["raise", "return"]
ParamsOf = SamplingParams | Iterable[SamplingParams] | None
"""of all prompts, or one for each; None: the model's own defaults"""

_RENAMED = {"kv_cache_memory_bytes": "kv_cache_memory"}
"""vLLM's names of options that have another one here"""
_WITHOUT_EFFECT = frozenset(
    {
        "disable_custom_all_reduce",
        "disable_log_stats",
        "enforce_eager",
        "gpu_memory_utilization",
        "max_seq_len_to_capture",
        "swap_space",
        "trust_remote_code",
    }
)
"""options of vLLM's that change no result and have nothing to act on here"""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "chat_template": (None,),
    "data_parallel_size": (1,),
    "enable_chunked_prefill": (None, True),
    "enable_lora": (None, False),
    "enable_prefix_caching": (None, True),
    "pipeline_parallel_size": (1,),
    "quantization": (None,),
    "revision": (None,),
    "runner": ("auto", "generate"),
    "skip_tokenizer_init": (False,),
    "task": ("auto", "generate"),
    "tokenizer": (None,),
    "tokenizer_mode": ("auto",),
    "tokenizer_revision": (None,),
}
"""options of vLLM's that cannot be honoured, with the values that ask for nothing"""
_GENERATION_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""key of generation_config.json to sampling parameter, as vLLM reads them"""
_PROMPT_KEYS = ("prompt", "prompt_token_ids")
_ONLY_COMMAND = frozenset(
    {
        "enable_auto_tool_choice",
        "engine",
        "lora_modules",
        "quantization",
        "tool_call_parser",
        "trust_remote_code",
    }
)
"""fields of `EngineConfig` that are no options: answers are text, as in vLLM's `LLM`, adapters come with calls, and
what only vLLM has goes to vLLM's engine"""
_ONLY_VLLM = frozenset({"reasoning_parser"})
"""those that are options for vLLM, whose constraints begin behind the reasoning"""


IndexedOutput = tuple[int, RequestOutput]
"""number of a prompt in its call, and its output"""


class OutputStream:
    """Outputs as requests finish, for `for` and for `async for`; what is left out of it early does not run.

    Nothing happens until the first output is asked for. In `async for` the engine's steps run in a thread, so that
    the event loop goes on meanwhile; a cancelled task waits for the step that runs.
    """

    def __init__(self, outputs: Generator[IndexedOutput], thread: ThreadPoolExecutor) -> None:
        self._outputs = outputs
        self._thread = thread

    def __iter__(self) -> Iterator[IndexedOutput]:
        return self

    def __next__(self) -> IndexedOutput:
        return next(self._outputs)

    async def __aiter__(self) -> AsyncIterator[IndexedOutput]:
        loop = asyncio.get_running_loop()
        try:
            while (item := await loop.run_in_executor(self._thread, next, self._outputs, None)) is not None:
                yield item
        finally:  # in the same thread, so behind a step that still runs
            await loop.run_in_executor(self._thread, self._outputs.close)

    def close(self) -> None:
        """Leave out what has not finished; the `LLM` is free for the next call."""
        self._outputs.close()


class _Request(NamedTuple):
    """A prompt as it was given, with what is asked for it."""

    prompt: Any
    """a `Prompt`, or the messages of a chat"""
    is_chat: bool
    params: SamplingParams
    extra: Mapping[str, Any]
    """further parameters of the body"""
    lora_request: Any = None


class LLM:
    """A model on an engine, for prompts of which all are known beforehand.

    The model is loaded once and stays loaded between calls; each call is planned by itself: prompts that share a
    prefix share its computation, and requests run in the order that the policy makes of all of them. One call at
    a time. `close`, or a `with` block, frees the engine.

    Args:
        model: Hugging Face folder, .gguf file or hub id; None: the bundled one. With a server: its name for it.
        engine: native, vllm, sglang (which it starts, or at `base_url`), openai (a server at `base_url`, or several)
            or simulated.
        policy: order of admission.
        seed: of sampling, for requests that bring none.
        served_model_name: what a server is asked for where `model` is a folder to count tokens with.
        plan: how output lengths are sampled and the order is made.
        max_engine_restarts: restarts of an engine that dies, in a row without a result in between.
        options: fields of `EngineConfig`, which has vLLM's names: `dtype`, `max_model_len`, `max_num_seqs`,
            `max_num_batched_tokens`, `block_size`, ... vLLM's `kv_cache_memory_bytes` is one of them. What is none goes
            to vLLM with `engine="vllm"`; else options of vLLM's that change no result give a warning, and any other
            is refused by name.

    Raises:
        ConfigError: an option, the model or a combination of them cannot be used.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        engine: EngineName = "native",
        policy: PolicyName = DEFAULT_POLICY,
        seed: int | None = 0,
        served_model_name: str | None = None,
        plan: PlanConfig | None = None,
        max_engine_restarts: int = DEFAULT_MAX_RESTARTS,
        **options: Any,
    ) -> None:
        self._engine: SupervisedEngine | None = None
        self._is_closed = False
        self._busy = threading.Lock()
        self._request_numbers = itertools.count()
        self._lora_requests: dict[Adapter, Any] = {}
        self._thread = ThreadPoolExecutor(1, "blendserve")
        self._config = JobConfig(
            InputConfig((), None if model is None else str(model), served_model_name),
            _engine_config(engine, options),
            plan or PlanConfig(),
            policy=policy,
            seed=seed or 0,
            max_engine_restarts=max_engine_restarts,
        )
        if policy not in POLICIES:
            raise ConfigError(f"there is no policy {policy!r}; choose of {', '.join(POLICIES)}")
        self._config.engine.check()
        if self._config.engine.is_remote and model is None:
            raise ConfigError(f"engine={engine!r} needs model=, the server's name for the model")
        self._files = find_model(self._config, _log.info)
        self._tokenizer = open_tokenizer(self._files)
        self._cost_model = self._config.engine.cost_model(self._files)
        self._open()

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: ParamsOf = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Any = None,
        priority: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Complete each prompt; outputs are in the order of the prompts.

        `lora_request` is vLLM's LoRARequest, of all prompts or one for each; for `engine="vllm"`, `enable_lora=True`.

        Where a prompt cannot run, nothing does, and where the engine fails on a request the others run to their end
        before an error is raised. With `on_error="return"` such prompts have an output with an `error` instead, and
        all others run.

        Raises:
            PromptError: a prompt or its parameters cannot run, such as one too long for the context; a ValueError.
            FailedRequestsError: requests failed; it has the outputs of all.
            EngineError: the engine cannot go on.
        """
        requests = self._requests(
            _prompts(prompts), sampling_params, False, tokenization_kwargs, lora_request
        )
        _refuse(priority=priority, mm_processor_kwargs=mm_processor_kwargs)
        return self._outputs(requests, use_tqdm, on_error)

    def generate_iter(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: ParamsOf = None,
        *,
        use_tqdm: bool | Callable[..., Any] = False,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        on_error: OnError = "raise",
    ) -> OutputStream:
        """`generate` for `for` and `async for`: (index of the prompt, output) as requests finish.

        All prompts are read and planned before the first output; outputs are not kept. `on_error` is that of
        `generate`, but a `FailedRequestsError` comes after all other outputs and has those of the failed requests only.
        """
        requests = self._requests(_prompts(prompts), sampling_params, False, tokenization_kwargs)
        return OutputStream(self._run(requests, use_tqdm, on_error), self._thread)

    def chat(
        self,
        messages: Sequence[Message] | Iterable[Sequence[Message]],
        sampling_params: ParamsOf = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Any = None,
        priority: None = None,
        chat_template: str | None = None,
        chat_template_content_format: Literal["auto", "string"] = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        *,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several, in the model's chat template; otherwise as `generate`.

        `tools` are for the template only: calls of them are in the text, as in vLLM's `LLM`. A content in several parts
        of text is given to the template as it is, if it takes that, or joined by line feeds; "string" always joins.
        """
        if chat_template_content_format not in ("auto", "string"):
            raise PromptError(
                f"chat_template_content_format={chat_template_content_format!r} is not supported; leave it out"
            )
        _refuse(priority=priority, mm_processor_kwargs=mm_processor_kwargs)
        extra = {
            "chat_template": chat_template,
            "add_generation_prompt": None if add_generation_prompt else False,
            "continue_final_message": continue_final_message or None,
            "tools": tools,
            "tool_choice": "none" if tools else None,
            "chat_template_kwargs": chat_template_kwargs,
            **(tokenization_kwargs or {}),
        }
        conversations = _conversations(messages)
        if chat_template_content_format == "string":
            conversations = map(_with_joined_texts, conversations)
        requests = self._requests(conversations, sampling_params, True, extra, lora_request)
        return self._outputs(requests, use_tqdm, on_error)

    def chat_iter(
        self,
        messages: Sequence[Message] | Iterable[Sequence[Message]],
        sampling_params: ParamsOf = None,
        *,
        use_tqdm: bool | Callable[..., Any] = False,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        on_error: OnError = "raise",
    ) -> OutputStream:
        """`chat` as `generate_iter` is `generate`."""
        extra = {
            "add_generation_prompt": None if add_generation_prompt else False,
            "chat_template_kwargs": chat_template_kwargs,
        }
        requests = self._requests(_conversations(messages), sampling_params, True, extra)
        return OutputStream(self._run(requests, use_tqdm, on_error), self._thread)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, as transformers has it.

        Raises:
            ConfigError: the model is on a server, and `model` names no folder.
        """
        if isinstance(self._tokenizer, ApproximateTokenizer):
            raise ConfigError(
                "the model is on a server; pass model=FOLDER, with served_model_name=, to have its tokenizer"
            )
        return self._tokenizer.transformers

    def get_default_sampling_params(self) -> SamplingParams:
        """What is sampled with where no parameters are given: those of the model's generation_config.json."""
        found: dict[str, Any] = {}
        if self._files.folder is not None:
            with suppress(OSError, ValueError):
                found = json.loads((self._files.folder / "generation_config.json").read_bytes())
        given = {
            param: found[key] for key, param in _GENERATION_DEFAULTS.items() if found.get(key) is not None
        }
        return SamplingParams(**given)

    def close(self) -> None:
        """Free the engine's memory and processes; the `LLM` cannot be used afterwards. Twice does no harm."""
        self._is_closed = True
        self._drop_engine()
        self._thread.shutdown(wait=False)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(Exception):  # as at the end of the interpreter, when modules are gone already
            self.close()

    # -------- engine --------

    def _open(self) -> SupervisedEngine:
        """The engine, opened where a call was broken off in the middle of a step."""
        if self._is_closed:
            raise ConfigError("this LLM was closed; make a new one")
        if self._engine is None:
            # Nothing here may hold self: dropping the last reference to an LLM is to free its engine at once.
            self._engine = SupervisedEngine(
                functools.partial(
                    open_engine, self._config.engine, self._files, self._tokenizer, self._cost_model
                ),
                functools.partial(self._config.planned_policy, self._cost_model),
                max_restarts=self._config.max_engine_restarts,
                on_event=_log.warning,
            )
        return self._engine

    def _drop_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _steps(self, requests: RequestTable) -> Iterator[StepOutput]:
        """Run all requests. What breaks off in the middle of a step leaves an engine that cannot be trusted."""
        steps = self._open().run(requests, self._config.planned_policy(self._cost_model, requests))
        is_in_step = False
        try:
            while True:
                with _interrupts_wait():
                    is_in_step = True
                    step = next(steps, None)
                    is_in_step = False
                if step is None:
                    return
                yield step
        finally:
            if is_in_step:
                self._drop_engine()
            else:
                steps.close()

    # -------- calls --------

    def _requests(
        self,
        prompts: Iterable[Any],
        sampling_params: ParamsOf,
        is_chat: bool,
        extra: Mapping[str, Any] | None,
        lora_request: Any = None,
    ) -> Iterator[_Request]:
        """Each prompt with its parameters."""
        if lora_request and self._config.engine.engine != "vllm":
            _refuse(lora_request=lora_request)
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        given = {name: value for name, value in (extra or {}).items() if value is not None}
        paired: Iterable[tuple[Any, Any]]
        if isinstance(params, Iterable) and not isinstance(params, Mapping):
            paired = itertools.zip_longest(prompts, params, fillvalue=_MISSING)
        else:
            paired = zip(prompts, itertools.repeat(params))
        adapters = iter(lora_request) if isinstance(lora_request, list) else itertools.repeat(lora_request)
        for index, (prompt, of_prompt) in enumerate(paired):
            if prompt is _MISSING or of_prompt is _MISSING:
                more, fewer = (
                    ("sampling_params", "prompts") if prompt is _MISSING else ("prompts", "sampling_params")
                )
                raise PromptError(
                    f"there are {index} {fewer} and more {more}; give one for all, or one for each"
                )
            if not isinstance(of_prompt, SamplingParams):
                raise PromptError(
                    f"sampling_params are of type {type(of_prompt).__name__}; give blendserve.SamplingParams",
                    index,
                )
            adapter = next(adapters, _MISSING)
            if adapter is _MISSING:
                raise PromptError(
                    f"there are {index} lora_requests and more prompts; give one for all, or one for each"
                )
            yield _Request(prompt, is_chat, of_prompt, given, adapter)
        if isinstance(lora_request, list) and next(adapters, _MISSING) is not _MISSING:
            raise PromptError("there are more lora_requests than prompts; give one for all, or one for each")

    def _outputs(
        self, requests: Iterable[_Request], use_tqdm: bool | Callable[..., Any], on_error: OnError
    ) -> list[RequestOutput]:
        outputs: dict[int, RequestOutput] = {}
        try:
            outputs.update(self._run(requests, use_tqdm, on_error))  # those before an error are kept
        except FailedRequestsError as error:
            raise FailedRequestsError(str(error), {**outputs, **error.outputs}) from None
        return [outputs[index] for index in range(len(outputs))]

    def _run(
        self, requests: Iterable[_Request], use_tqdm: bool | Callable[..., Any], on_error: OnError
    ) -> Generator[IndexedOutput]:
        """Plan and run; a request that cannot run has an output with an `error`, or with "raise" raises one."""
        if on_error not in ("raise", "return"):
            raise ConfigError(f'on_error={on_error!r} is neither "raise" nor "return"')
        if not self._busy.acquire(blocking=False):
            raise ConfigError("this LLM runs another call; end that, or close its iterator, before the next")
        try:
            engine = self._open()
            texts: list[str | None] = []
            prepared = prepare(
                self._rows(requests, texts),
                self._tokenizer,
                served_model_name=self._files.name,
                max_model_len=engine.max_model_len,
                any_model=True,
                seed=self._config.seed,
                fill_context=True,
                check_params=self._config.engine.check_params,
            )
            if prepared.errors and on_error == "raise":
                first = prepared.errors[0]
                others = f" (and {len(prepared.errors) - 1} others)" if len(prepared.errors) > 1 else ""
                raise PromptError(
                    f"prompt {first.line - 1}{others} cannot run: {first.message} Nothing was run; "
                    'with on_error="return" the others would be.',
                    first.line - 1,
                )
            for refused in prepared.errors:
                index = refused.line - 1
                failure = Failure(refused.code, refused.message, refused.param, refused.status_code)
                yield index, _failed_output(str(refused.custom_id), texts[index], failure)
            failed: dict[int, RequestOutput] = {}
            gathered = GatheredResults(prepared)
            with _progress_bar(use_tqdm, len(prepared.rows)) as advance:
                for step in self._steps(prepared.requests) if len(prepared.requests) else ():
                    for request, result in step.results:
                        answer = gathered.add(request, result)
                        if answer is None:
                            continue
                        index = prepared.rows[answer.row_index].line - 1
                        output = self._output(prepared, request, answer, texts[index])
                        advance(output)
                        if output.error is not None and on_error == "raise":
                            failed[index] = output
                        else:
                            yield index, output
            if gathered.num_open:
                raise EngineError(
                    f"the engine left {gathered.num_open} of {len(prepared.requests)} requests unanswered; "
                    "please report this"
                )
            if failed:
                index, output = next(iter(failed.items()))
                assert output.error is not None
                raise FailedRequestsError(
                    f"{len(failed)} of {len(texts)} requests failed, the first of them prompt {index}: "
                    f'{output.error.message} The outputs are in this error\'s `outputs`; with on_error="return" '
                    "they would be returned",
                    failed,
                )
        finally:
            self._busy.release()

    def _rows(self, requests: Iterable[_Request], texts: list[str | None]) -> Iterator[Row | LineError]:
        """Prompts as the rows of a file, from line 1; notes their texts."""
        engine = self._config.engine
        for index, request in enumerate(requests):
            number = str(next(self._request_numbers))
            texts.append(None)
            body: dict[str, Any]
            try:
                if request.is_chat:
                    body = {"messages": _messages(request.prompt)}
                else:
                    texts[index], prompt = _text_and_prompt(request.prompt)
                    body = {"prompt": prompt}
                body |= {**request.params.to_body(chat=request.is_chat), **request.extra}
                if engine.forwards:
                    _check_forwarded(request)
                    body["model"] = self._files.name
                row = row_of_body(
                    body,
                    CHAT_URL if request.is_chat else COMPLETIONS_URL,
                    line=index + 1,
                    custom_id=number,
                    pass_through=engine.forwards,
                    extra_parameters=engine.extra_parameters,
                    chat_features=engine.chat_features,
                )
            except RequestError as error:
                yield LineError.of(error, index + 1, number)
                continue
            adapter = None
            if request.lora_request is not None:
                adapter = Adapter(request.lora_request.lora_name, request.lora_request.lora_path)
                self._lora_requests[adapter] = request.lora_request
            row.params = replace(row.params, chat=b"", adapter=adapter)  # answers are left as they come
            yield row

    def _output(self, prepared: Prepared, request: int, answer: Answer, text: str | None) -> RequestOutput:
        row = prepared.rows[answer.row_index]
        if isinstance(answer.result, Failure):
            return _failed_output(row.custom_id, text, answer.result)
        token_ids: list[int] | None = prepared.requests.tokens[request].tolist()
        raw = prepared.requests.raw
        if self._config.engine.forwards and (text is not None or row.url == CHAT_URL):
            token_ids = None  # the server's own are not known
        elif raw is not None and raw[request].body and not self._config.engine.forwards:
            token_ids = None  # those of a chat with images are vLLM's
        elif row.url == CHAT_URL and isinstance(self._tokenizer, Tokenizer):
            text = self._tokenizer.decode(token_ids or [], skip_special_tokens=False)
        prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if answer.result[0].prompt_logprobs is not None:
            prompt_logprobs = [None, *map(self._logprobs, answer.result[0].prompt_logprobs)]
        server_answer = answer.result[0].body
        params = prepared.requests.sampling_params(request)
        adapter = params.adapter
        return RequestOutput(
            request_id=row.custom_id,
            prompt=text,
            prompt_token_ids=token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=[
                self._completion_output(index, completion, not params.logprob_token_ids)
                for index, completion in enumerate(answer.result)
            ]
            if server_answer is None
            else [_server_output(choice) for choice in server_answer.get("choices") or ()],
            lora_request=None if adapter is None else self._lora_requests[adapter],
            num_cached_tokens=min(completion.num_cached_tokens for completion in answer.result),
        )

    def _logprobs(self, token: TokenLogprob, *, is_ranked: bool = True) -> dict[int, Logprob]:
        """Those of a place; `is_ranked` where its alternatives are the most likely tokens."""
        assert isinstance(self._tokenizer, Tokenizer)
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(token.top, start=1)} if is_ranked else {}
        entries = {token.token_id: token.logprob, **dict(token.top)}
        return {
            token_id: Logprob(value, ranks.get(token_id), self._tokenizer.token_text(token_id))
            for token_id, value in entries.items()
        }

    def _completion_output(self, index: int, completion: Completion, is_ranked: bool) -> CompletionOutput:
        logprobs, cumulative = None, None
        if completion.logprobs is not None:
            cumulative = sum(token.logprob for token in completion.logprobs)
            logprobs = [self._logprobs(token, is_ranked=is_ranked) for token in completion.logprobs]
        return CompletionOutput(
            index,
            completion.text,
            completion.token_ids,
            cumulative,
            logprobs,
            completion.finish_reason,
            completion.stop_reason,
        )


_MISSING = object()


def _engine_config(engine: EngineName, options: Mapping[str, Any]) -> EngineConfig:
    """The configuration of an engine; every option is taken, refused, or said to do nothing."""
    known = {field.name for field in fields(EngineConfig)} - _ONLY_COMMAND
    if engine in ("vllm", "sglang"):
        known -= NATIVE_ONLY
    if engine != "vllm":
        known -= _ONLY_VLLM
    values: dict[str, Any] = {"engine": engine}
    engine_args: dict[str, Any] = {}
    for given, value in options.items():
        name = _RENAMED.get(given, given)
        if name in known:
            if type(value) in (int, float) and value <= 0:
                raise ConfigError(f"{given}={value} is not above 0; leave it out, or give a positive number")
            values[name] = value
        elif engine in ("vllm", "sglang"):
            engine_args[name] = value
        elif name in _WITHOUT_EFFECT:
            warnings.warn(f"{name} does nothing with engine={engine!r}", stacklevel=3)
        elif name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                raise ConfigError(f"{name}={value!r} is not supported by engine={engine!r}; leave it out")
        else:
            similar = difflib.get_close_matches(name, known, n=1)
            remedy = f"did you mean {similar[0]}?" if similar else f"there are {', '.join(sorted(known))}"
            raise ConfigError(f"LLM has no option {name!r} with engine={engine!r}; {remedy}")
    if engine_args:
        values["engine_args"] = engine_args
    try:
        return TypeAdapter(EngineConfig).validate_python(values)
    except ValidationError as error:
        problem = error.errors()[0]
        name = str(problem["loc"][0]) if problem["loc"] else "engine"
        raise ConfigError(f"{name}={problem['input']!r}: {problem['msg']}") from None


def _refuse(**arguments: Any) -> None:
    """Refuse arguments of vLLM's methods that cannot be honoured."""
    for name, value in arguments.items():
        if value:
            reason = "the plan decides the order" if name == "priority" else "it is not supported"
            raise PromptError(f"{name} was given, but {reason}; leave it out")


def _prompts(prompts: Prompt | Iterable[Prompt]) -> Iterable[Prompt]:
    """The prompts of a call that may be a single one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, Sequence) and prompts and isinstance(prompts[0], int):
        return [prompts]
    return prompts  # type: ignore[return-value]


def _conversations(messages: Sequence[Message] | Iterable[Sequence[Message]]) -> Iterable[Sequence[Message]]:
    """The conversations of a call that may be a single one."""
    if isinstance(messages, Sequence) and messages and isinstance(messages[0], Mapping):
        return [messages]
    return messages  # type: ignore[return-value]


def _with_joined_texts(conversation: Any) -> Any:
    """A conversation whose contents are strings where they were lists of texts."""
    if not isinstance(conversation, Sequence):
        return conversation
    joined: list[Any] = []
    for message in conversation:
        parts = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(parts, list) and all(
            isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts
        ):
            joined.append({**message, "content": "\n".join(part["text"] for part in parts)})
        else:
            joined.append(message)
    return joined


def _text_and_prompt(prompt: Any) -> tuple[str | None, str | list[int]]:
    """The text of a prompt, where it is one, and what a request says.

    Raises:
        RequestError: it is none.
    """
    if isinstance(prompt, str):
        return prompt, prompt
    text = None
    if isinstance(prompt, Mapping):
        others = [name for name, value in prompt.items() if name not in _PROMPT_KEYS and value is not None]
        if others:
            raise RequestError(
                "unsupported_parameter",
                f"'{others[0]}' is not supported in a prompt; there are {' and '.join(_PROMPT_KEYS)}.",
                param=others[0],
            )
        text, token_ids = (prompt.get(name) for name in _PROMPT_KEYS)
        if token_ids is None and isinstance(text, str):
            return text, text
        prompt = token_ids
    try:
        return text, [operator.index(token_id) for token_id in prompt]
    except TypeError:
        raise RequestError(
            "invalid_request",
            f"A prompt is a string, a list of token ids, or a mapping with {' or '.join(_PROMPT_KEYS)}; "
            f"this one is of type {type(prompt).__name__}.",
            param="prompt",
        ) from None


def _messages(conversation: Any) -> list[dict[str, Any]]:
    """The messages of a conversation.

    Raises:
        RequestError: it is none.
    """
    try:
        return [dict(message) for message in conversation]
    except (TypeError, ValueError):
        raise RequestError(
            "invalid_request",
            "A conversation is a list of messages, each a mapping with role and content; this one is of type "
            f"{type(conversation).__name__}.",
            param="messages",
        ) from None


def _check_forwarded(request: _Request) -> None:
    """Refuse what a server cannot give in the form of an output here.

    Raises:
        RequestError: see above.
    """
    params = request.params
    if params.logprobs is not None:
        raise RequestError(
            "unsupported_parameter",
            "'logprobs' are by token id here, and a server does not tell token ids. Use blendserve run instead.",
            param="logprobs",
        )
    if params.max_tokens is None and not request.is_chat:
        raise RequestError(
            "invalid_request",
            "'max_tokens' must be a number with a server: it does not know None.",
            param="max_tokens",
        )


def _failed_output(request_id: str, text: str | None, failure: Failure) -> RequestOutput:
    return RequestOutput(request_id, text, None, error=failure)


def _server_output(choice: Mapping[str, Any]) -> CompletionOutput:
    """A completion as a server wrote it."""
    message = choice.get("message") or {}
    return CompletionOutput(
        choice.get("index") or 0,
        choice.get("text") or message.get("content") or "",
        (),
        finish_reason=choice.get("finish_reason"),
        stop_reason=choice.get("stop_reason"),
    )


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Let the first Ctrl-C wait for the end of the block, and only the second one break it off.

    An exception out of a signal handler can come anywhere, in the middle of a step too. Whoever handles Ctrl-C
    otherwise is left alone.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    is_interrupted = False

    def note(_signum: int, _frame: FrameType | None) -> None:
        nonlocal is_interrupted
        if is_interrupted:
            raise KeyboardInterrupt
        is_interrupted = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if is_interrupted:
        raise KeyboardInterrupt


@contextmanager
def _progress_bar(
    use_tqdm: bool | Callable[..., Any], num_requests: int
) -> Iterator[Callable[[RequestOutput], None]]:
    """What to call with each output; `use_tqdm` may be a class to use in place of tqdm's own."""
    if not use_tqdm:
        yield lambda _output: None
        return
    make_bar = use_tqdm
    if not callable(make_bar):
        from tqdm.auto import tqdm

        make_bar = tqdm
    started_s = time.perf_counter()
    num_input = num_output = 0
    with make_bar(total=num_requests, desc="Processed prompts", dynamic_ncols=True) as bar:

        def advance(output: RequestOutput) -> None:
            nonlocal num_input, num_output
            num_input += len(output.prompt_token_ids or ())
            num_output += sum(len(completion.token_ids) for completion in output.outputs)
            elapsed_s = max(time.perf_counter() - started_s, 1e-9)
            speeds = f"input: {num_input / elapsed_s:.2f} toks/s, output: {num_output / elapsed_s:.2f} toks/s"
            bar.set_postfix_str(f"est. speed {speeds}", refresh=False)
            bar.update(1)

        yield advance
