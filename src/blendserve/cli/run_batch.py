"""`blendserve run-batch`: the command line of `vllm run-batch`, for `blendserve run`."""

from __future__ import annotations

import re
from typing import Annotated

import typer
from typer.core import TyperCommand

from blendserve.cli.console import reported_errors
from blendserve.cli.options import MODEL_PANEL, TELEMETRY_PANEL, Model
from blendserve.engines import NATIVE_ONLY
from blendserve.errors import ConfigError

DEFAULT_METRICS_PORT = 8000
"""run-batch's"""
CONTEXT_SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True}

_INPUT_PANEL = "Of vllm run-batch"
_RENAMED = {"--kv-cache-memory-bytes": "--kv-cache-memory"}
"""flags of vLLM's that have another name in `run`"""
_COUNTS = frozenset({"--max-model-len", "--max-num-batched-tokens"})
"""flags that vLLM takes with a unit, such as 4k"""
_OF_MANY = frozenset({"--lora-modules"})
"""flags that vLLM takes with several values, and `run` once for each"""
_ALREADY_SO = frozenset({"--disable-log-requests", "--disable-log-stats", "--no-enable-log-requests"})
"""flags without a value that ask for what is so here anyway"""
_INSTEAD = {
    "--gpu-memory-utilization": "--kv-cache-memory 4GiB says how much memory the KV cache has",
    "--pipeline-parallel-size": "--tensor-parallel-size divides a model among devices",
    "--data-parallel-size": "the native engine runs a model once",
    "--enforce-eager": "the native engine compiles nothing at run time that could be left out",
    "--scheduling-policy": "--policy decides the order, and fcfs is one",
}
"""what to do about flags that many scripts have, without vLLM as the engine"""


def run_batch_command(
    context: typer.Context,
    input_file: Annotated[
        str,
        typer.Option("--input-file", "-i", help="Input, as IN of run.", rich_help_panel=_INPUT_PANEL),
    ],
    output_file: Annotated[
        str,
        typer.Option(
            "--output-file",
            "-o",
            help="Output, as OUT of run; http(s) addresses are written by PUT.",
            rich_help_panel=_INPUT_PANEL,
        ),
    ],
    output_tmp_dir: Annotated[
        str | None,
        typer.Option(
            help="Folder for the files that results grow in, --working-dir of run.",
            rich_help_panel=_INPUT_PANEL,
        ),
    ] = None,
    model: Model = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="As of run, one name.", rich_help_panel=MODEL_PANEL)
    ] = None,
    enable_metrics: Annotated[
        bool,
        typer.Option("--enable-metrics", help="Serve Prometheus metrics.", rich_help_panel=TELEMETRY_PANEL),
    ] = False,
    host: Annotated[
        str | None,
        typer.Option(
            "--host",
            "--url",
            help="Address of the metrics. Default: that of run.",
            rich_help_panel=TELEMETRY_PANEL,
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(help="Port of the metrics.", rich_help_panel=TELEMETRY_PANEL)
    ] = DEFAULT_METRICS_PORT,
    enable_prompt_tokens_details: Annotated[  # noqa: ARG001
        bool,
        typer.Option(
            "--enable-prompt-tokens-details", help="They are always there.", rich_help_panel=_INPUT_PANEL
        ),
    ] = False,
    enable_force_include_usage: Annotated[  # noqa: ARG001
        bool,
        typer.Option(
            "--enable-force-include-usage", help="It is always there.", rich_help_panel=_INPUT_PANEL
        ),
    ] = False,
) -> None:
    """Run a batch file as `vllm run-batch` does, with its flags: a line of output for each line of input, in order.

    It is `run --ordered --errors-in-output`, and takes all flags of `run` besides; with --engine vllm any other flag
    goes to vLLM's engine. While it runs, results are in OUT.results.jsonl: interrupted or killed, the same command
    goes on where it was. Exit codes are those of run: 1 if some lines failed.
    """
    with reported_errors():
        assert context.parent is not None
        group = context.parent.command
        run = group.get_command(context.parent, "run")  # type: ignore[attr-defined]
        arguments = [input_file, "--output", output_file, "--errors-in-output"]
        for flag, value in (
            ("--working-dir", output_tmp_dir),
            ("--model", model),
            ("--served-model-name", served_model_name),
            ("--metrics-port", str(port) if enable_metrics else None),
            ("--metrics-host", host if enable_metrics else None),
        ):
            if value is not None:
                arguments += [flag, value]
        arguments += translated(context.args, run)
        with run.make_context(context.info_name, arguments, parent=context.parent) as running:
            run.invoke(running)


def translated(arguments: list[str], run: TyperCommand) -> list[str]:
    """Flags of `run` for flags of vLLM's engine.

    Raises:
        ConfigError: there is nothing like it here.
    """
    flags = {name for parameter in run.params for name in (*parameter.opts, *parameter.secondary_opts)}
    engine = _engine_of(arguments)
    if engine == "vllm":
        flags -= {f"--{name.replace('_', '-')}" for name in NATIVE_ONLY}
    found: list[str] = []
    for flag, values in _grouped(arguments):
        name = _RENAMED.get(flag, flag)
        if name in _ALREADY_SO and not values:
            continue
        if name in _OF_MANY:
            found += [part for value in values for part in (name, value)]
        elif name in flags:
            if name not in _COUNTS or len(values) != 1:
                found += [name, *values]
            elif values[0] not in ("auto", "-1"):
                found += [name, _count(name, values[0])]
        elif engine == "vllm":
            found += ["--engine-arg", _engine_arg(flag, values)]
        else:
            instead = _INSTEAD.get(flag)
            raise ConfigError(
                f"{flag} is no flag of run-batch with --engine {engine}"
                + (f": {instead}" if instead else "")
                + "; leave it out, see blendserve run --help for what there is, "
                "or add --engine vllm if it is one of vLLM's engine"
            )
    return found


def _engine_of(arguments: list[str]) -> str:
    engines = [values[0] for flag, values in _grouped(arguments) if flag == "--engine" and values]
    return engines[-1] if engines else "native"


def _grouped(arguments: list[str]) -> list[tuple[str, list[str]]]:
    """Each flag with the values behind it; vLLM takes underscores for dashes in the names of flags.

    Raises:
        ConfigError: a value has no flag.
    """
    groups: list[tuple[str, list[str]]] = []
    for argument in arguments:
        if re.match(r"--?[A-Za-z]", argument):
            flag, equals, value = argument.partition("=")
            if flag.startswith("--"):
                flag = flag.replace("_", "-")
            groups.append((flag, [value] if equals else []))
        elif groups:
            groups[-1][1].append(argument)
        else:
            raise ConfigError(f"{argument!r} belongs to no flag; name the input with -i")
    return groups


def _count(flag: str, text: str) -> str:
    """A number that may have a unit: k is 1000 and K is 1024, as vLLM has it."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", text)
    if match is None:
        raise ConfigError(f"{flag} {text}: write a number of tokens, such as 4096 or 4k")
    number, unit = match.groups()
    factors = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "K": 1024, "M": 1024**2, "G": 1024**3}
    return str(int(float(number) * factors[unit]))


def _engine_arg(flag: str, values: list[str]) -> str:
    """A flag of vLLM's engine as NAME=VALUE."""
    name = flag.lstrip("-").replace("-", "_")
    if not values:
        return f"{name.removeprefix('no_')}=false" if name.startswith("no_") else f"{name}=true"
    return f"{name}={values[0] if len(values) == 1 else '[' + ','.join(values) + ']'}"
