"""Options that several commands have, and the configuration they make."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from blendserve.cli.progress import PROGRESS_HELP, ProgressMode
from blendserve.engines import (
    DEFAULT_MAX_CONCURRENCY,
    DEFAULT_REQUEST_TIMEOUT_S,
    AttentionBackend,
    Device,
    Dtype,
    EngineConfig,
    EngineName,
    LoadFormat,
    OverlapMode,
)
from blendserve.errors import ConfigError
from blendserve.jobs.event_log import MAX_LINES_PER_EVENT
from blendserve.jobs.setup import InputConfig
from blendserve.jobs.sources import DEFAULT_MAX_LINE_BYTES
from blendserve.jobs.telemetry import LogLevel, TelemetryConfig
from blendserve.models import BUNDLED_MODEL
from blendserve.planner.plan import PlanConfig
from blendserve.planner.tree_order import OrderConfig
from blendserve.scheduling.policies import PolicyName

PLAN_DEFAULTS = PlanConfig()
ENGINE_DEFAULTS = EngineConfig()
TELEMETRY_DEFAULTS = TelemetryConfig()


MODEL_PANEL, ENGINE_PANEL, PLANNER_PANEL = "Model and input", "Engine", "Planning"
SERVER_PANEL = "Servers (--engine openai, sglang)"
VLLM_PANEL = "vLLM and SGLang (--engine vllm, sglang)"
CHAT_PANEL = "Answers in chats (--engine native, vllm)"
TELEMETRY_PANEL = "Progress and reports"

Inputs = Annotated[
    list[str],
    typer.Argument(
        metavar="IN...",
        help="Batch files in OpenAI's format (.jsonl, also .gz or .zst), .parquet or .csv: files, globs, folders, "
        "URLs that fsspec opens; [b]-[/b] for standard input.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        help=f"Hugging Face folder, .gguf file or hub id. Without it: {BUNDLED_MODEL}, which comes along. "
        "With a server: a folder to count tokens with, or the server's name for the model.",
        rich_help_panel=MODEL_PANEL,
    ),
]
ServedModelName = Annotated[
    str | None,
    typer.Option(help="Name of the model in 'body.model' and in the results.", rich_help_panel=MODEL_PANEL),
]
AnyModel = Annotated[
    bool, typer.Option("--any-model", help="Run lines whatever model they name.", rich_help_panel=MODEL_PANEL)
]
Endpoint = Annotated[
    Literal["/v1/chat/completions", "/v1/completions"] | None,
    typer.Option(
        help="Url that every line must have. Default: lines may have different ones.",
        rich_help_panel=MODEL_PANEL,
    ),
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="Run nothing if a line cannot run, and name the first. Default: run the others.",
        rich_help_panel=MODEL_PANEL,
    ),
]
ColumnMapping = Annotated[
    str | None,
    typer.Option(
        metavar="KEY=COLUMN,...",
        help="Columns of Parquet and CSV files, e.g. custom_id=id,prompt=text. Columns named prompt, messages, "
        "custom_id or like another parameter need none.",
        rich_help_panel=MODEL_PANEL,
    ),
]
MaxLineBytes = Annotated[
    str,
    typer.Option(metavar="SIZE", help="Longer lines are errors.", rich_help_panel=MODEL_PANEL),
]
Limit = Annotated[
    int | None, typer.Option(min=1, help="Only the first so many lines.", rich_help_panel=MODEL_PANEL)
]
OutputTokensField = Annotated[
    str | None,
    typer.Option(
        help="Name of a body field that tells how long the output will be.", rich_help_panel=MODEL_PANEL
    ),
]
Engine = Annotated[
    EngineName,
    typer.Option(
        help="native runs the model here; vllm and sglang let those do it; openai sends the lines to a server "
        "(--base-url); simulated runs the schedule on a modelled device.",
        rich_help_panel=ENGINE_PANEL,
    ),
]
Hardware = Annotated[
    str | None,
    typer.Option(
        help="Profile of step costs, a shipped name or a .json file. Default: the engine's.",
        rich_help_panel=ENGINE_PANEL,
    ),
]
DeviceOption = Annotated[
    Device,
    typer.Option(
        "--device",
        help="Where --engine native runs the model; auto: an NVIDIA GPU where there is one.",
        rich_help_panel=ENGINE_PANEL,
    ),
]
LoadFormatOption = Annotated[
    LoadFormat,
    typer.Option(
        "--load-format",
        help="dummy: random weights, for measurements; --model then needs config.json and a tokenizer only.",
        rich_help_panel=ENGINE_PANEL,
    ),
]
DtypeOption = Annotated[
    Dtype,
    typer.Option(
        "--dtype",
        help="Weights and KV cache; auto: bfloat16 on a GPU and where the CPU has it, else float32.",
        rich_help_panel=ENGINE_PANEL,
    ),
]
QuantizationOption = Annotated[
    str | None,
    typer.Option(
        "--quantization",
        metavar="METHOD",
        help="How the weights are quantized, by vLLM's name, with --engine vllm. The native engine dequantizes .gguf "
        "files untold and runs no other quantized weights.",
        rich_help_panel=ENGINE_PANEL,
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run code that the model's folder brings: for its tokenizer, and with --engine vllm for the model. The "
        "native engine runs no model's code.",
        rich_help_panel=ENGINE_PANEL,
    ),
]
TensorParallelSize = Annotated[
    int,
    typer.Option(
        "--tensor-parallel-size",
        "-tp",
        min=1,
        help="GPUs, or with --device cpu processes, that each hold a part of every layer; --kv-cache-memory and "
        "--num-threads are then of each.",
        rich_help_panel=ENGINE_PANEL,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Most tokens of a request, prompt and output. Default: the model's context.",
        rich_help_panel=ENGINE_PANEL,
    ),
]
BlockSize = Annotated[
    int | None, typer.Option(min=1, help="Tokens per KV block.", rich_help_panel=ENGINE_PANEL)
]
KvCacheMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory for the KV cache, e.g. 2GiB. Default: a share of what is free.",
        rich_help_panel=ENGINE_PANEL,
    ),
]
MaxNumSeqs = Annotated[
    int | None, typer.Option(min=1, help="Most requests running at a time.", rich_help_panel=ENGINE_PANEL)
]
MaxNumBatchedTokens = Annotated[
    int | None, typer.Option(min=1, help="Most tokens in a step.", rich_help_panel=ENGINE_PANEL)
]
FreeUnusedPrefixes = Annotated[
    bool,
    typer.Option(
        help="Free a prefix once no waiting request can use it, instead of leaving it to LRU eviction.",
        rich_help_panel=ENGINE_PANEL,
    ),
]
Attention = Annotated[
    AttentionBackend,
    typer.Option(
        "--attention-backend",
        help="c: compiled on first use with the system's compiler; auto: triton on a GPU, else c where that works.",
        rich_help_panel=ENGINE_PANEL,
    ),
]
OverlapOption = Annotated[
    OverlapMode,
    typer.Option(
        "--overlap",
        help="auto: on a GPU, matrix products beside decode attention in steps where the profile has that faster.",
        rich_help_panel=ENGINE_PANEL,
    ),
]
NumThreads = Annotated[
    int | None, typer.Option(min=1, help="CPU threads. Default: all cores.", rich_help_panel=ENGINE_PANEL)
]
BaseUrl = Annotated[
    list[str] | None,
    typer.Option(
        metavar="URL",
        help="Of a server that speaks OpenAI's API, e.g. http://localhost:8000/v1; again for another that runs the "
        "same model. Lines with a common prefix stay on one server.",
        rich_help_panel=SERVER_PANEL,
    ),
]
ApiKeyEnv = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Environment variable with the server's key, e.g. OPENAI_API_KEY. Without it no key is sent.",
        rich_help_panel=SERVER_PANEL,
    ),
]
MaxConcurrency = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Most requests at a server at a time; less after a 429. Default: what it says it runs, and half as many "
        f"more, else {DEFAULT_MAX_CONCURRENCY}.",
        rich_help_panel=SERVER_PANEL,
    ),
]
RequestTimeout = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        metavar="SECONDS",
        help="Until an answer must be complete, or the request is sent again. "
        f"Default: {DEFAULT_REQUEST_TIMEOUT_S:.0f}.",
        rich_help_panel=SERVER_PANEL,
    ),
]
KvCacheTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Tokens of KV cache that a server has; a little more is sent at a time. "
        "Default: what it says, else from --hardware and the model.",
        rich_help_panel=SERVER_PANEL,
    ),
]
SGLangPython = Annotated[
    str | None,
    typer.Option(
        "--sglang-python",
        metavar="PYTHON",
        help="Interpreter of an environment that has SGLang, whose server is then started here. Default: this one.",
        rich_help_panel=SERVER_PANEL,
    ),
]
EngineProcess = Annotated[
    bool,
    typer.Option(
        help="Run the native engine in a process of its own, whose death the job survives.",
        rich_help_panel=ENGINE_PANEL,
    ),
]
EngineArg = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="Further argument of vLLM's engine or SGLang's server, e.g. quantization=fp8; again for another. The "
        "value is read as JSON or YAML.",
        rich_help_panel=VLLM_PANEL,
    ),
]
EngineArgs = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.yaml", help="The same from a file, one name: value a line.", rich_help_panel=VLLM_PANEL
    ),
]
ToolCallParser = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="What reads tool calls out of answers, by vLLM's name: hermes, llama3_json, mistral; with "
        "vLLM all of its. With --enable-auto-tool-choice.",
        rich_help_panel=CHAT_PANEL,
    ),
]
EnableAutoToolChoice = Annotated[
    bool,
    typer.Option(
        "--enable-auto-tool-choice",
        help="Let lines with tools have them called; needs --tool-call-parser.",
        rich_help_panel=CHAT_PANEL,
    ),
]
ReasoningParser = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="What tells reasoning from the answer, by vLLM's name: deepseek_r1, qwen3; with vLLM all of its.",
        rich_help_panel=CHAT_PANEL,
    ),
]
LoraModules = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=PATH",
        help="LoRA adapter for the lines whose model is NAME; again for another. Needs --engine-arg enable_lora=true.",
        rich_help_panel=VLLM_PANEL,
    ),
]
MaxEngineRestarts = Annotated[
    int,
    typer.Option(
        min=0,
        help="Restarts of an engine that dies, in a row without a result in between.",
        rich_help_panel=ENGINE_PANEL,
    ),
]
Policy = Annotated[
    PolicyName,
    typer.Option(
        help="Order of admission: blend mixes compute- and memory-intensive requests, dual-scan as the paper does; "
        "the others are baselines.",
        rich_help_panel=PLANNER_PANEL,
    ),
]
SampleRatio = Annotated[
    float,
    typer.Option(
        min=0.0,
        max=1.0,
        help="Share of the requests that make up the sample to learn output lengths from. dual-scan runs it first, "
        "and so does blend where it mixes.",
        rich_help_panel=PLANNER_PANEL,
    ),
]
MinSamples = Annotated[
    int,
    typer.Option(
        "--min-samples-per-subtree",
        min=0,
        help="At least so many of them per large subtree.",
        rich_help_panel=PLANNER_PANEL,
    ),
]
SplitBudget = Annotated[
    float,
    typer.Option(
        min=0.0,
        help="Share of the saved prompt tokens that may be given up to sort outliers.",
        rich_help_panel=PLANNER_PANEL,
    ),
]
SplitGap = Annotated[
    float,
    typer.Option(
        min=1.0,
        help="Factor by which an outlier's density must be out of order.",
        rich_help_panel=PLANNER_PANEL,
    ),
]
MergeGap = Annotated[
    float,
    typer.Option(
        min=1.0,
        help="Neighbouring subtrees whose densities differ less are one unit.",
        rich_help_panel=PLANNER_PANEL,
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        min=0,
        help="Of sampling, of the random policy, and of requests that bring no seed.",
        rich_help_panel=PLANNER_PANEL,
    ),
]
ProgressOption = Annotated[
    ProgressMode, typer.Option("--progress", help=PROGRESS_HELP, rich_help_panel=TELEMETRY_PANEL)
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet",
        "-q",
        help="Print errors and the last summary only; no progress either unless --progress asks for it.",
        rich_help_panel=TELEMETRY_PANEL,
    ),
]
LogFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Append what happens as JSON lines: time, level, event, fields. Each event is written at most "
        f"{MAX_LINES_PER_EVENT:,} times, then counted.",
        rich_help_panel=TELEMETRY_PANEL,
    ),
]
LogLevelOption = Annotated[
    LogLevel, typer.Option("--log-level", help="Least level of the log.", rich_help_panel=TELEMETRY_PANEL)
]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        help="Serve Prometheus metrics at this port while the job runs; 0 takes a free one and prints it.",
        rich_help_panel=TELEMETRY_PANEL,
    ),
]
MetricsHost = Annotated[
    str,
    typer.Option(
        help="Address of the metrics; they have no password, so think before opening them to others.",
        rich_help_panel=TELEMETRY_PANEL,
    ),
]
Report = Annotated[
    bool,
    typer.Option(
        "--report/--no-report",
        help="Write OUT.report.json, and OUT.report.html where plotly is installed, beside the output.",
        rich_help_panel=TELEMETRY_PANEL,
    ),
]
CostPerHour = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        help="Price of the machine, in any currency; the report then says what the run cost.",
        rich_help_panel=TELEMETRY_PANEL,
    ),
]
DEFAULT_MAX_LINE_SIZE = f"{DEFAULT_MAX_LINE_BYTES // 10**6}MB"
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output at the end.")]


def input_config(options: dict[str, Any]) -> InputConfig:
    """From the locals of a command, which are its options."""
    return InputConfig(
        tuple(options["inputs"]),
        options["model"],
        options["served_model_name"],
        options["any_model"],
        endpoint=options["endpoint"],
        strict=options["strict"],
        limit=options["limit"],
        output_tokens_field=options["output_tokens_field"],
        column_mapping=parse_column_mapping(options["column_mapping"]),
        max_line_bytes=parse_bytes(options["max_line_bytes"]),
    )


def parse_column_mapping(text: str | None) -> dict[str, str]:
    """Request key to column of `custom_id=id,prompt=text`.

    Raises:
        ConfigError: not of this form.
    """
    mapping: dict[str, str] = {}
    for item in text.split(",") if text else ():
        key, equals, column = (part.strip() for part in item.partition("="))
        if not (key and equals and column):
            raise ConfigError(
                f"--column-mapping: {item!r} is not KEY=COLUMN; write e.g. custom_id=id,prompt=text"
            )
        if key in mapping:
            raise ConfigError(f"--column-mapping names {key!r} twice; give it one column")
        mapping[key] = column
    return mapping


def engine_config(options: dict[str, Any]) -> EngineConfig:
    """From the locals of a command, which are its options."""
    memory = options["kv_cache_memory"]
    return EngineConfig(
        engine=options["engine"],
        hardware=options["hardware"],
        device=options["device"],
        load_format=options["load_format"],
        dtype=options["dtype"],
        quantization=options["quantization"],
        trust_remote_code=options["trust_remote_code"],
        tensor_parallel_size=options["tensor_parallel_size"],
        max_model_len=options["max_model_len"],
        block_size=options["block_size"],
        kv_cache_memory=None if memory is None else parse_bytes(memory),
        max_num_seqs=options["max_num_seqs"],
        max_num_batched_tokens=options["max_num_batched_tokens"],
        free_unused_prefixes=options["free_unused_prefixes"],
        attention_backend=options.get("attention_backend", ENGINE_DEFAULTS.attention_backend),
        overlap=options.get("overlap", ENGINE_DEFAULTS.overlap),
        num_threads=options.get("num_threads"),
        base_url=tuple(options.get("base_url") or ()) or None,
        api_key_env=options.get("api_key_env"),
        max_concurrency=options.get("max_concurrency"),
        request_timeout=options.get("request_timeout"),
        kv_cache_tokens=options.get("kv_cache_tokens"),
        sglang_python=options.get("sglang_python"),
        engine_process=options.get("engine_process", ENGINE_DEFAULTS.engine_process),
        engine_args=parse_engine_args(options.get("engine_args"), options.get("engine_arg") or ()),
        tool_call_parser=options["tool_call_parser"],
        enable_auto_tool_choice=options["enable_auto_tool_choice"],
        reasoning_parser=options.get("reasoning_parser"),
        lora_modules=parse_lora_modules(options["lora_modules"] or ()),
    )


def parse_lora_modules(modules: Sequence[str]) -> dict[str, str]:
    """Path by name of `name=path`, or of the JSON objects that vLLM takes as well.

    Raises:
        ConfigError: not of this form, or a name is there twice.
    """
    paths: dict[str, str] = {}
    for module in modules:
        name, _, path = module.partition("=")
        if module.lstrip().startswith("{"):
            try:
                found = json.loads(module)
            except ValueError as error:
                raise ConfigError(f"--lora-modules {module} is not JSON: {error}") from error
            if more := found.keys() - {"name", "path", "base_model_name"}:
                raise ConfigError(
                    f"--lora-modules {module}: there is no {', '.join(sorted(more))}; leave it out"
                )
            name, path = str(found.get("name") or ""), str(found.get("path") or "")
        if not (name and path):
            raise ConfigError(f"--lora-modules {module}: write NAME=PATH, e.g. sql=./adapters/sql")
        if name in paths:
            raise ConfigError(f"--lora-modules names {name!r} twice; give each adapter its own name")
        paths[name] = path
    return paths


def parse_engine_args(file: Path | None, settings: Sequence[str]) -> dict[str, Any]:
    """Engine arguments out of a file and `name=value` settings, which go before; dashes are as good as underscores.

    Raises:
        ConfigError: they cannot be read, or are no names with values.
    """
    arguments: dict[str, Any] = {}
    if file is not None:
        try:
            text = file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--engine-args {file} cannot be read: {error}") from error
        values = _yaml(text, f"--engine-args {file}")
        if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
            raise ConfigError(f"--engine-args {file} holds no names with values; write lines such as seed: 1")
        arguments = {name.replace("-", "_"): value for name, value in values.items()}
    for setting in settings:
        name, equals, value = setting.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if not (name and equals):
            raise ConfigError(f"--engine-arg {setting}: write NAME=VALUE, e.g. quantization=fp8")
        arguments[name] = _yaml(value, f"--engine-arg {setting}")
    return arguments


def _yaml(text: str, where: str) -> Any:
    """A value of JSON, which YAML reads otherwise in places (1e-3), or else of YAML."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(f"{where} needs PyYAML, which comes with vLLM: pip install pyyaml") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is neither JSON nor YAML: {error}") from error


def plan_config(options: dict[str, Any]) -> PlanConfig:
    """From the locals of a command, which are its options."""
    return PlanConfig(
        order=OrderConfig(
            split_budget=options["split_budget"],
            split_gap=options["split_gap"],
            merge_gap=options["merge_gap"],
        ),
        sample_ratio=options["sample_ratio"],
        min_samples_per_subtree=options["min_samples_per_subtree"],
        seed=options["seed"],
    )


def telemetry_config(options: dict[str, Any]) -> TelemetryConfig:
    """From the locals of a command, which are its options."""
    return TelemetryConfig(**{field.name: options[field.name] for field in fields(TelemetryConfig)})


def chosen(flag: str, text: str, allowed: tuple[Any, ...]) -> list[Any]:
    """The values of a comma-separated option."""
    values = [value.strip() for value in text.split(",") if value.strip()]
    unknown = [value for value in values if value not in allowed]
    if unknown or not values:
        raise ConfigError(f"{flag}: no {', '.join(unknown) or 'value'}; choose of {', '.join(allowed)}")
    return values


def parse_bytes(text: str) -> int:
    """Bytes of a size such as `512MiB`, `2GB` or `4g` (binary, as `g` is in docker and vLLM's `1k` is 1024).

    Raises:
        ConfigError: not a size.
    """
    units = {"": 1}
    for power, letter in enumerate("kmgt", start=1):
        units |= {letter: 1024**power, letter + "ib": 1024**power, letter + "b": 1000**power}
    digits = text.strip().lower()
    number = digits.rstrip("kmgtib ")
    try:
        size = int(float(number) * units[digits[len(number) :].strip()])
    except (ValueError, KeyError):
        size = 0
    if size <= 0:
        raise ConfigError(f"{text!r} is no size of memory; write e.g. 512MiB or 2GiB")
    return size
