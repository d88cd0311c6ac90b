"""`blendserve plan`: explain a job without running it."""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from blendserve.cli.console import EXIT_OK, EXIT_SOME_FAILED, console, print_json, reported_errors
from blendserve.cli.options import (
    DEFAULT_MAX_LINE_SIZE,
    ENGINE_DEFAULTS,
    PLAN_DEFAULTS,
    AnyModel,
    AsJson,
    BlockSize,
    ColumnMapping,
    DeviceOption,
    DtypeOption,
    EnableAutoToolChoice,
    Endpoint,
    Engine,
    FreeUnusedPrefixes,
    Hardware,
    Inputs,
    KvCacheMemory,
    Limit,
    LoadFormatOption,
    LoraModules,
    MaxLineBytes,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    MergeGap,
    MinSamples,
    Model,
    OutputTokensField,
    QuantizationOption,
    SampleRatio,
    Seed,
    ServedModelName,
    SplitBudget,
    SplitGap,
    Strict,
    TensorParallelSize,
    ToolCallParser,
    TrustRemoteCode,
    engine_config,
    input_config,
    plan_config,
)
from blendserve.cli.progress import ProgressDisplay
from blendserve.engines import EngineConfig, open_engine
from blendserve.jobs.body import shown
from blendserve.jobs.publish import InputOrder
from blendserve.jobs.setup import DEFAULT_POLICY, JobConfig, PlannedJob, find_model, plan_job
from blendserve.jobs.sources import Source
from blendserve.scheduling.policies import POLICIES, PolicyName, make_policy
from blendserve.simulator import practical_optimum

POLICY_ESTIMATE_MAX_REQUESTS = 50_000
"""above this many requests `plan` does not simulate the policies unless asked to"""


def plan_command(
    inputs: Inputs,
    save: Annotated[
        Path | None, typer.Option(metavar="PLAN.npz", help="Save the plan for 'run --plan'.")
    ] = None,
    simulate: Annotated[
        bool | None,
        typer.Option(
            help="Estimate what each policy would cost. Default: up to "
            f"{POLICY_ESTIMATE_MAX_REQUESTS:,} requests."
        ),
    ] = None,
    as_json: AsJson = False,
    model: Model = None,
    served_model_name: ServedModelName = None,
    any_model: AnyModel = False,
    endpoint: Endpoint = None,
    strict: Strict = False,
    limit: Limit = None,
    output_tokens_field: OutputTokensField = None,
    column_mapping: ColumnMapping = None,
    max_line_bytes: MaxLineBytes = DEFAULT_MAX_LINE_SIZE,
    engine: Engine = ENGINE_DEFAULTS.engine,
    hardware: Hardware = None,
    device: DeviceOption = ENGINE_DEFAULTS.device,
    load_format: LoadFormatOption = ENGINE_DEFAULTS.load_format,
    dtype: DtypeOption = ENGINE_DEFAULTS.dtype,
    quantization: QuantizationOption = None,
    trust_remote_code: TrustRemoteCode = False,
    tensor_parallel_size: TensorParallelSize = ENGINE_DEFAULTS.tensor_parallel_size,
    max_model_len: MaxModelLen = None,
    block_size: BlockSize = None,
    kv_cache_memory: KvCacheMemory = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    free_unused_prefixes: FreeUnusedPrefixes = True,
    tool_call_parser: ToolCallParser = None,
    enable_auto_tool_choice: EnableAutoToolChoice = False,
    lora_modules: LoraModules = None,
    sample_ratio: SampleRatio = PLAN_DEFAULTS.sample_ratio,
    min_samples_per_subtree: MinSamples = PLAN_DEFAULTS.min_samples_per_subtree,
    split_budget: SplitBudget = PLAN_DEFAULTS.order.split_budget,
    split_gap: SplitGap = PLAN_DEFAULTS.order.split_gap,
    merge_gap: MergeGap = PLAN_DEFAULTS.order.merge_gap,
    seed: Seed = 0,
) -> None:
    """Explain a job without running it: what is shared, how dense it is, in which order it would run.

    Output lengths are not known yet, so times are estimates from max_tokens and declared lengths.
    """
    with reported_errors():
        config = JobConfig(
            input_config(locals()),
            engine_config(locals()),
            plan_config(locals()),
            policy=DEFAULT_POLICY,
            plan_file=None,
            seed=seed,
        )
        job = read_and_plan(config)
        print_refused(job)
        print_plan(job)
        if len(job.prepared.requests) == 0:
            raise typer.Exit(EXIT_SOME_FAILED if job.prepared.errors else EXIT_OK)
        groups = _groups(job)
        _print_groups(groups)
        costs: list[dict[str, Any]] = []
        if simulate or (simulate is None and job.plan.num_requests <= POLICY_ESTIMATE_MAX_REQUESTS):
            costs = [simulated_cost(job, name) for name in POLICIES]
            _print_policy_costs(job, costs)
        if save is not None:
            job.plan.save(save)
            console.print(f"plan saved to {save}")
        if as_json:
            document = {"plan": asdict(job.plan.summary()), "groups": groups, "policies": costs}
            document["errors"] = [asdict(error) for error in job.prepared.errors]
            print_json(document)
        raise typer.Exit(EXIT_SOME_FAILED if job.prepared.errors else EXIT_OK)


def read_and_plan(
    config: JobConfig,
    done: Container[str] = frozenset(),
    order: InputOrder | None = None,
    display: ProgressDisplay | None = None,
    sources: Sequence[Source] | None = None,
) -> PlannedJob:
    """Everything before the model is loaded, with a line on what was read."""
    files = find_model(config, console.print)
    started_s = time.perf_counter()
    with display or ProgressDisplay() as progress:
        job = plan_job(config, files, done, sources, order, progress.preparing)
    prepared = job.prepared
    skipped = f", {prepared.num_done:,} done before" if prepared.num_done else ""
    console.print(
        f"read     {prepared.num_lines:,} lines: {len(prepared.rows):,} to run{skipped}, "
        f"{len(prepared.errors):,} refused "
        f"[dim]({time.perf_counter() - started_s:.1f} s)[/dim]"
    )
    return job


def simulated_cost(job: PlannedJob, policy_name: PolicyName) -> dict[str, Any]:
    """Run the schedule on a virtual clock, with the expected output lengths as the real ones."""
    output_tokens = job.expected_output_tokens
    config = EngineConfig(
        engine="simulated",
        hardware=job.config.engine.hardware,
        max_model_len=job.config.engine.max_model_len,
        free_unused_prefixes=job.config.engine.free_unused_prefixes,
    )
    engine = open_engine(config, job.files, job.tokenizer, job.cost_model, output_tokens=output_tokens)
    policy = make_policy(policy_name, job.plan, seed=job.config.seed)
    steps = [step.stats for step in engine.run(job.prepared.requests, policy)]
    makespan_s = sum(step.duration_s for step in steps)
    num_tokens = int(job.plan.tree.num_units + output_tokens.sum())
    bound = practical_optimum(
        job.plan.tree,
        output_tokens,
        job.cost_model,
        kv_capacity_tokens=engine.kv_capacity_tokens,
        max_num_batched_tokens=job.cost_model.hardware.max_num_batched_tokens,
    )
    return {
        "policy": policy_name,
        "makespan_s": makespan_s,
        "tokens_per_s": num_tokens / makespan_s,
        "optimum_ratio": bound.optimum_s / makespan_s,
        "num_steps": len(steps),
        "num_computed_prompt_tokens": sum(step.num_prefill_tokens for step in steps),
        "compute_s": sum(step.compute_s for step in steps),
        "memory_s": sum(step.memory_s for step in steps),
        "num_retracted": sum(step.num_retracted for step in steps),
    }


def print_refused(job: PlannedJob) -> None:
    """The first lines that cannot run, and how many more there are."""
    num_shown = 100
    for error in job.prepared.errors[:num_shown]:
        where = error.place + (f" ({shown(error.custom_id)})" if error.custom_id else "")
        console.print(Text(f"refused  {where}: {error.code}: {error.message}", style="yellow"))
    if len(job.prepared.errors) > num_shown:
        console.print(
            f"refused  … and {len(job.prepared.errors) - num_shown:,} more; all of them are in the error file"
        )


def print_plan(job: PlannedJob) -> None:
    """The plan in four lines."""
    summary = job.plan.summary()
    overlap = job.cost_model.hardware.overlap.kind
    bound = "compute + memory" if overlap == "sum" else "compute and memory overlapped"
    console.print(
        f"plan     {summary.num_requests:,} requests, {summary.num_prompt_tokens:,} prompt tokens, "
        f"about {summary.expected_output_tokens:,.0f} output tokens"
    )
    console.print(
        f"sharing  {summary.sharing_ratio:.1%} of the prompt tokens are shared prefixes: "
        f"{summary.num_unique_prompt_tokens:,} to compute"
    )
    console.print(
        f"density  {summary.density:.2f} compute/memory on {job.cost_model.hardware.name} "
        f"({summary.compute_s:.1f} s compute, {summary.memory_s:.1f} s memory)"
    )
    console.print(
        f"expect   about {summary.optimum_s:.1f} s ({bound}); {summary.num_sampled} requests are a sample to "
        f"learn output lengths from, {summary.num_split} split off"
    )


def _groups(job: PlannedJob, at_each_end: int = 4) -> list[dict[str, Any]]:
    """The first and last units of the order."""
    plan_, prepared = job.plan, job.prepared
    order = plan_.leaf_order
    own = plan_.own_prompt_tokens()
    num_units = len(order.unit_density)
    chosen = sorted({*range(min(at_each_end, num_units)), *range(max(num_units - at_each_end, 0), num_units)})
    groups = []
    for unit in chosen:
        requests = order.requests[order.unit_start[unit] : order.unit_start[unit + 1]]
        prompt = int(plan_.prompt_tokens[requests].sum())
        groups.append(
            {
                "unit": unit,
                "num_requests": len(requests),
                "first_custom_id": prepared.rows[prepared.row_index[requests[0]]].custom_id,
                "last_custom_id": prepared.rows[prepared.row_index[requests[-1]]].custom_id,
                "mean_prompt_tokens": prompt / len(requests),
                "mean_output_tokens_est": float(plan_.output_tokens_est[requests].mean()),
                "shared_ratio": 1.0 - int(own[requests].sum()) / prompt,
                "density": float(order.unit_density[unit]),
            }
        )
    return groups


def _print_groups(groups: list[dict[str, Any]]) -> None:
    table = Table(title="order, compute-intensive first", title_justify="left", box=None, pad_edge=False)
    for heading, justify in (
        ("unit", "right"),
        ("requests", "right"),
        ("from … to", "left"),
        ("prompt", "right"),
        ("output", "right"),
        ("shared", "right"),
        ("density", "right"),
    ):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    previous = -1
    for group in groups:
        if group["unit"] != previous + 1:
            table.add_row("…")
        previous = group["unit"]
        table.add_row(
            str(group["unit"]),
            f"{group['num_requests']:,}",
            group["first_custom_id"] + (f" … {group['last_custom_id']}" if group["num_requests"] > 1 else ""),
            f"{group['mean_prompt_tokens']:.0f}",
            f"{group['mean_output_tokens_est']:.0f}",
            f"{group['shared_ratio']:.0%}",
            f"{group['density']:.2f}",
        )
    console.print(table)


def _print_policy_costs(job: PlannedJob, costs: list[dict[str, Any]]) -> None:
    table = Table(
        title=f"expected cost by policy, simulated on {job.cost_model.hardware.name}",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    for heading in ("policy", "time", "of optimum", "prompt tokens computed", "steps"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for cost in costs:
        table.add_row(
            cost["policy"],
            f"{cost['makespan_s']:.1f} s",
            f"{cost['optimum_ratio']:.1%}",
            f"{cost['num_computed_prompt_tokens']:,}",
            f"{cost['num_steps']:,}",
        )
    console.print(table)
