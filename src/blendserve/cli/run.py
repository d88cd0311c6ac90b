"""`blendserve run`: a batch file in, results out."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from blendserve.cli.console import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_SOME_FAILED,
    console,
    fail,
    print_json,
    reported_errors,
)
from blendserve.cli.options import (
    DEFAULT_MAX_LINE_SIZE,
    ENGINE_DEFAULTS,
    PLAN_DEFAULTS,
    PLANNER_PANEL,
    AnyModel,
    AsJson,
    Attention,
    BlockSize,
    ColumnMapping,
    DtypeOption,
    Endpoint,
    Engine,
    FreeUnusedPrefixes,
    Hardware,
    Inputs,
    KvCacheMemory,
    Limit,
    MaxLineBytes,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    MergeGap,
    MinSamples,
    Model,
    NumThreads,
    OutputTokensField,
    Policy,
    SampleRatio,
    Seed,
    ServedModelName,
    SplitBudget,
    SplitGap,
    Strict,
    engine_config,
    input_config,
    plan_config,
)
from blendserve.cli.plan import print_plan, print_refused, read_and_plan, simulated_cost
from blendserve.errors import ConfigError
from blendserve.jobs.setup import DEFAULT_POLICY, JobConfig, PlannedJob, find_model

if TYPE_CHECKING:
    from blendserve.jobs.job import JobProgress, JobSummary

PLAIN_PROGRESS_EVERY_S = 10.0


def run_command(
    inputs: Inputs,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="OUT.jsonl",
            help="Results, appended as they finish; [b]-[/b] for standard output.",
        ),
    ] = None,
    errors: Annotated[
        str | None,
        typer.Option(
            metavar="ERR.jsonl", help="Lines that failed. Default: OUT.errors.jsonl beside the output."
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Drop earlier results instead of skipping what is done.")
    ] = False,
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
    dtype: DtypeOption = ENGINE_DEFAULTS.dtype,
    max_model_len: MaxModelLen = None,
    block_size: BlockSize = None,
    kv_cache_memory: KvCacheMemory = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    free_unused_prefixes: FreeUnusedPrefixes = True,
    attention_backend: Attention = ENGINE_DEFAULTS.attention_backend,
    num_threads: NumThreads = None,
    policy: Policy = DEFAULT_POLICY,
    plan_file: Annotated[
        Path | None,
        typer.Option(
            "--plan", help="Use a plan saved by 'blendserve plan --save'.", rich_help_panel=PLANNER_PANEL
        ),
    ] = None,
    sample_ratio: SampleRatio = PLAN_DEFAULTS.sample_ratio,
    min_samples_per_subtree: MinSamples = PLAN_DEFAULTS.min_samples_per_subtree,
    split_budget: SplitBudget = PLAN_DEFAULTS.order.split_budget,
    split_gap: SplitGap = PLAN_DEFAULTS.order.split_gap,
    merge_gap: MergeGap = PLAN_DEFAULTS.order.merge_gap,
    seed: Seed = 0,
) -> None:
    """Run a batch file and write the results.

    Running the same command again skips the lines that already have a result.

    Exit codes: 0 all lines succeeded, 1 some failed (see the error file), 2 the job could not run,
    130 interrupted (run it again to go on).
    """
    with reported_errors():
        config = JobConfig(
            input_config(locals()),
            engine_config(locals()),
            plan_config(locals()),
            policy=policy,
            plan_file=plan_file,
            seed=seed,
        )
        if config.engine.engine == "simulated":
            _refuse_output(output)
            _simulate(config, as_json)
            return
        if output is None:
            raise ConfigError("no output named; add -o OUT.jsonl, or -o - for standard output")
        if as_json and output == "-":
            raise ConfigError("--json and -o - both need standard output; give -o a file")
        raise typer.Exit(_run_job(config, output, errors, overwrite, as_json))


def _refuse_output(output: str | None) -> None:
    if output is not None:
        raise ConfigError(
            "the simulated engine generates no text, so there is nothing to write; leave -o out"
        )


def _run_job(config: JobConfig, output: str, errors: str | None, overwrite: bool, as_json: bool) -> int:
    from blendserve.jobs.store import ResultStore, default_errors_path

    files = find_model(config, console.print)
    with ResultStore(
        output, errors, model=files.name, inputs=config.source.inputs, overwrite=overwrite
    ) as store:
        job = read_and_plan(config, store.done, exclude=(output, errors or default_errors_path(output)))
        print_refused(job)
        if len(job.prepared.requests):
            print_plan(job)
        running = job.start(store)
        started_s = time.perf_counter()
        try:
            with _stopping_between_steps() as steps_until_interrupted:
                _show_progress(steps_until_interrupted(running.run()), job.plan.summary().sequential_s)
        except KeyboardInterrupt:
            summary = running.summary
            fail(
                f"interrupted after {summary.completed:,} results, which are kept; run the same command again to go on",
                EXIT_INTERRUPTED,
            )
        summary = running.summary
    _print_summary(job, summary, time.perf_counter() - started_s)
    if as_json:
        print_json({"summary": _summary_document(job, summary), "plan": asdict(job.plan.summary())})
    return EXIT_SOME_FAILED if summary.failed else EXIT_OK


@contextmanager
def _stopping_between_steps() -> Iterator[Callable[[Iterator[JobProgress]], Iterator[JobProgress]]]:
    """Let the first Ctrl-C (or SIGTERM) stop the job after the step that runs, and only the second one at once.

    An exception out of a signal handler can come anywhere; and a shell script starts its background jobs with Ctrl-C
    ignored, in which Python follows it unless told otherwise.
    """
    interrupted = False

    def note(_signum: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True

    def until_interrupted(steps: Iterator[JobProgress]) -> Iterator[JobProgress]:
        for progress in steps:
            yield progress
            if interrupted:
                raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield until_interrupted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _simulate(config: JobConfig, as_json: bool) -> None:
    job = read_and_plan(config)
    print_refused(job)
    if len(job.prepared.requests) == 0:
        raise typer.Exit(EXIT_SOME_FAILED)
    print_plan(job)
    cost = simulated_cost(job, config.policy)
    console.print(
        f"expected {cost['makespan_s']:.2f} s on {job.cost_model.hardware.name} under {config.policy} (simulated): "
        f"{cost['tokens_per_s']:,.0f} tok/s, {cost['optimum_ratio']:.1%} of the optimum"
    )
    console.print(
        f"blend    {cost['compute_s']:.2f} s compute and {cost['memory_s']:.2f} s memory "
        f"in {cost['num_steps']:,} steps, "
        f"{cost['num_computed_prompt_tokens']:,} of {job.plan.tree.num_units:,} prompt tokens computed"
    )
    if as_json:
        print_json({"simulated": cost, "plan": asdict(job.plan.summary())})
    raise typer.Exit(EXIT_SOME_FAILED if job.prepared.errors else EXIT_OK)


class _RateColumn(ProgressColumn):
    def render(self, task: Any) -> Text:
        return Text(str(task.fields.get("facts", "")), style="cyan")


def _show_progress(steps: Iterator[JobProgress], expected_s: float) -> None:
    """A live bar on a terminal, a line now and then elsewhere."""
    if not console.is_terminal:
        next_line_s = time.perf_counter() + PLAIN_PROGRESS_EVERY_S
        for progress in steps:
            if time.perf_counter() >= next_line_s:
                next_line_s += PLAIN_PROGRESS_EVERY_S
                finished = progress.num_done + progress.completed + progress.failed
                console.print(
                    f"running  {finished:,}/{progress.total:,} lines, {_facts(progress, expected_s)}"
                )
        return
    columns = (
        TextColumn("running "),
        BarColumn(),
        TextColumn("{task.completed:,}/{task.total:,}"),
        _RateColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None, facts="")
        for progress in steps:
            finished = progress.num_done + progress.completed + progress.failed
            bar.update(task, total=progress.total, completed=finished, facts=_facts(progress, expected_s))


def _facts(progress: JobProgress, expected_s: float) -> str:
    """Speed, load, blend and remaining time; `expected_s` is the modelled time of the whole job."""
    modelled_s = progress.compute_s + progress.memory_s
    if not modelled_s:
        return ""
    computed = progress.num_prefill_tokens + progress.num_decode_tokens
    facts = [
        f"{computed / progress.engine_s:,.0f} tok/s computed",
        f"{progress.num_running} running",
        f"KV {progress.kv_usage_ratio:.0%}",
        f"blend {progress.compute_s / modelled_s:.0%} compute",
        f"~{max(expected_s / modelled_s - 1.0, 0.0) * progress.engine_s:,.0f} s left",
    ]
    if progress.failed:
        facts.append(f"{progress.failed:,} failed")
    return ", ".join(facts)


def _print_summary(job: PlannedJob, summary: JobSummary, wall_s: float) -> None:
    parts = [f"{summary.completed:,} completed", f"{summary.failed:,} failed"]
    if summary.num_done:
        parts.append(f"{summary.num_done:,} done before")
    console.print(f"done     {', '.join(parts)} in {wall_s:.1f} s")
    if not summary.num_steps:
        return
    console.print(
        f"tokens   {summary.num_prompt_tokens:,} prompt ({summary.num_cached_tokens:,} of them shared, "
        f"{summary.cached_ratio:.1%}) + {summary.num_output_tokens:,} output = {summary.tokens_per_s:,.0f} tok/s"
    )
    console.print(f"blend    {_blend_verdict(job, summary)}")
    for code, count in summary.failures_by_code.items():
        console.print(f"failed   {count:,} × {code}")


def _blend_verdict(job: PlannedJob, summary: JobSummary) -> str:
    """What the order gained, or why it could not."""
    modelled = f"{summary.compute_s:.0f} s compute, {summary.memory_s:.0f} s memory modelled"
    sharing = job.plan.tree.sharing_ratio
    kept = f"{summary.cached_ratio / sharing:.1%} of the sharing kept" if sharing > 0 else "nothing to share"
    if job.cost_model.hardware.overlap.kind == "sum":
        return (
            f"{modelled}; this device runs them one after the other, so mixing them gains nothing here: "
            f"what the order can gain is prefixes ({kept}) and full steps"
        )
    return f"{modelled}, overlapped; {kept}"


def _summary_document(job: PlannedJob, summary: JobSummary) -> dict[str, Any]:
    document = asdict(summary)
    return document | {
        "policy": job.config.policy,
        "engine": job.config.engine.engine,
        "model": job.files.name,
        "cached_ratio": summary.cached_ratio,
        "tokens_per_s": summary.tokens_per_s,
    }
