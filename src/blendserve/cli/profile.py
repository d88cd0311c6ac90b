"""`blendserve profile`: an engine measured on this machine, as a hardware profile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blendserve.cli.console import console, print_json, print_table, reported_errors
from blendserve.cli.options import (
    ENGINE_DEFAULTS,
    ApiKeyEnv,
    AsJson,
    Attention,
    BaseUrl,
    BlockSize,
    DeviceOption,
    DtypeOption,
    Engine,
    EngineArg,
    KvCacheMemory,
    KvCacheTokens,
    LoadFormatOption,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    Model,
    NumThreads,
    ServedModelName,
    SGLangPython,
    parse_bytes,
    parse_engine_args,
)
from blendserve.engines import EngineConfig
from blendserve.engines.profile import Fit, StepSample, profile_engine
from blendserve.errors import ConfigError
from blendserve.jobs.deadline import parse_duration
from blendserve.models import remote_model, resolve_model
from blendserve.report import Table

DEFAULT_MAX_TIME = {"cpu": "2m", "cuda": "8m"}


def profile_command(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="PROFILE.json", help="Where to write the profile.")
    ],
    model: Model = None,
    served_model_name: ServedModelName = None,
    engine: Engine = ENGINE_DEFAULTS.engine,
    device: DeviceOption = ENGINE_DEFAULTS.device,
    load_format: LoadFormatOption = ENGINE_DEFAULTS.load_format,
    dtype: DtypeOption = ENGINE_DEFAULTS.dtype,
    max_model_len: MaxModelLen = None,
    block_size: BlockSize = None,
    kv_cache_memory: KvCacheMemory = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    attention_backend: Attention = ENGINE_DEFAULTS.attention_backend,
    num_threads: NumThreads = None,
    base_url: BaseUrl = None,
    api_key_env: ApiKeyEnv = None,
    kv_cache_tokens: KvCacheTokens = None,
    sglang_python: SGLangPython = None,
    engine_arg: EngineArg = None,
    max_time: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="Begin no further measurement after so long. Default: 2m on a CPU, 8m on a GPU, there with "
            "everything around it.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what steps cost here and write a profile for --hardware of 'run', 'plan' and 'simulate'.

    Steps of many sizes run with noise for prompts; a profile is fitted to their times. On a GPU the native engine's
    weights are random, and matrix products are measured beside decode attention, too. Engines that schedule for
    themselves are given small jobs instead, and a server must have nothing else to do meanwhile.
    """
    with reported_errors():
        config = EngineConfig(
            engine=engine,
            device=device,
            load_format=load_format,
            dtype=dtype,
            max_model_len=max_model_len,
            block_size=block_size,
            kv_cache_memory=None if kv_cache_memory is None else parse_bytes(kv_cache_memory),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            attention_backend=attention_backend,
            num_threads=num_threads,
            base_url=tuple(base_url or ()) or None,
            api_key_env=api_key_env,
            kv_cache_tokens=kv_cache_tokens,
            sglang_python=sglang_python,
            engine_args=parse_engine_args(None, engine_arg or ()),
        )
        config.check()
        if config.is_remote:
            files = remote_model(model, served_model_name=served_model_name)
            if files.folder is None:
                raise ConfigError(
                    "a profile is of a model whose sizes are known; name its folder with --model"
                )
        else:
            with_weights = load_format != "dummy" and not config.on_cuda
            files = resolve_model(model, with_weights=with_weights, on_progress=console.print)
        default = DEFAULT_MAX_TIME["cuda" if config.on_cuda else "cpu"]
        fit, samples = profile_engine(
            config,
            files,
            name=output.stem,
            max_time_s=parse_duration(max_time or default, "--max-time"),
            folder=output.with_suffix(".session"),
            on_sample=_print_sample,
        )
        print_table("steps, measured and as the profile has them", _table(fit, samples))
        fit.hardware.save(output)
        _print_summary(fit)
        console.print(f"profile  {output}")
        if as_json:
            print_json(
                {
                    "profile": str(output),
                    "mean_error_ratio": fit.mean_error_ratio,
                    "steps": [
                        {**sample._asdict(), "predicted_s": predicted_s}
                        for sample, predicted_s in zip(samples, fit.predicted_s, strict=True)
                    ],
                }
            )


def _print_sample(sample: StepSample) -> None:
    console.print(
        f"[dim]{sample.num_prefill_tokens:>6,} prefill + {sample.num_decode_rows:>4,} decode tokens, "
        f"{sample.kv_tokens_read:>9,} KV tokens read: {sample.duration_s * 1e3:>9.2f} ms[/dim]"
    )


def _table(fit: Fit, samples: list[StepSample]) -> Table:
    headings = ["prefill tokens", "decode rows", "KV tokens read", "measured ms", "profile ms", "error"]
    cells = [
        [
            f"{sample.num_prefill_tokens:,}",
            f"{sample.num_decode_rows:,}",
            f"{sample.kv_tokens_read:,}",
            f"{sample.duration_s * 1e3:.2f}",
            f"{predicted_s * 1e3:.2f}",
            f"{predicted_s / sample.duration_s - 1.0:+.1%}",
        ]
        for sample, predicted_s in zip(samples, fit.predicted_s, strict=True)
    ]
    return Table(headings, cells)


def _print_summary(fit: Fit) -> None:
    hardware = fit.hardware
    console.print(
        f"compute  {hardware.flops / 1e9:,.0f} GFLOP/s, {hardware.gemm_efficiency:.0%} of them in steps\n"
        f"memory   {hardware.bandwidth / 1e9:,.1f} GB/s, {hardware.attention_efficiency:.0%} of them in decode "
        f"attention\n"
        f"error    {fit.mean_error_ratio:.1%} on average"
    )
    if fit.unseen:
        console.print(
            f"unseen   {', '.join(fit.unseen)}: too little in these steps, taken to run at the ceiling"
        )
    for partition in hardware.partitions:
        console.print(
            f"split    {partition.sm_attention} SMs of attention: products at {partition.gemm_rate:.0%}, attention at "
            f"{partition.attention_rate:.0%} of their speed alone"
        )
