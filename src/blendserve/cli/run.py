"""`blendserve run`: a batch file in, results out."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blendserve.cli.console import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_SOME_FAILED,
    console,
    essential,
    fail,
    print_json,
    reported_errors,
)
from blendserve.cli.options import (
    ENGINE_DEFAULTS,
    PLAN_DEFAULTS,
    PLANNER_PANEL,
    TELEMETRY_DEFAULTS,
    AnyModel,
    ApiKeyEnv,
    AsJson,
    Attention,
    BaseUrl,
    BlockSize,
    CostPerHour,
    DtypeOption,
    Engine,
    FreeUnusedPrefixes,
    Hardware,
    InputPath,
    KvCacheMemory,
    KvCacheTokens,
    Limit,
    LogFile,
    LogLevelOption,
    MaxConcurrency,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    MergeGap,
    MetricsHost,
    MetricsPort,
    MinSamples,
    Model,
    NumThreads,
    OutputTokensField,
    Policy,
    ProgressOption,
    Quiet,
    Report,
    RequestTimeout,
    SampleRatio,
    Seed,
    ServedModelName,
    SplitBudget,
    SplitGap,
    engine_config,
    plan_config,
    telemetry_config,
)
from blendserve.cli.plan import print_plan, print_refused, read_and_plan, simulated_cost
from blendserve.cli.progress import ProgressDisplay
from blendserve.errors import BlendServeError, ConfigError
from blendserve.jobs.event_log import event_log
from blendserve.jobs.metrics import JobMetrics, metrics_endpoint
from blendserve.jobs.run_report import (
    RunReport,
    Status,
    earlier_runs,
    report_paths,
    summary_document,
    versions,
)
from blendserve.jobs.setup import DEFAULT_POLICY, InputConfig, JobConfig, PlannedJob, find_model
from blendserve.jobs.telemetry import Telemetry, TelemetryConfig

if TYPE_CHECKING:
    from blendserve.jobs.job import JobProgress, JobSummary

_log = logging.getLogger(__name__)


def run_command(
    source: InputPath,
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
    limit: Limit = None,
    output_tokens_field: OutputTokensField = None,
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
    base_url: BaseUrl = None,
    api_key_env: ApiKeyEnv = None,
    max_concurrency: MaxConcurrency = None,
    request_timeout: RequestTimeout = None,
    kv_cache_tokens: KvCacheTokens = None,
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
    progress: ProgressOption = "auto",
    quiet: Quiet = False,
    log_file: LogFile = None,
    log_level: LogLevelOption = TELEMETRY_DEFAULTS.log_level,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = TELEMETRY_DEFAULTS.metrics_host,
    report: Report = TELEMETRY_DEFAULTS.report,
    cost_per_hour: CostPerHour = None,
) -> None:
    """Run a batch file and write the results.

    Running the same command again skips the lines that already have a result.

    Exit codes: 0 all lines succeeded, 1 some failed (see the error file), 2 the job could not run,
    130 interrupted (run it again to go on).
    """
    with reported_errors():
        config = JobConfig(
            InputConfig(source, model, served_model_name, any_model, limit, output_tokens_field),
            engine_config(locals()),
            plan_config(locals()),
            policy=policy,
            plan_file=plan_file,
            seed=seed,
        )
        config.engine.check()
        reporting = telemetry_config(locals())
        console.quiet = quiet or progress == "json"
        display = ProgressDisplay("none" if quiet and progress == "auto" else progress)
        if config.engine.engine == "simulated":
            _refuse_unused(output, reporting)
            _simulate(config, as_json, display)
            return
        if output is None:
            raise ConfigError("no output named; add -o OUT.jsonl, or -o - for standard output")
        if as_json and output == "-":
            raise ConfigError("--json and -o - both need standard output; give -o a file")
        metrics = JobMetrics()
        with ExitStack() as until_end:
            until_end.enter_context(
                event_log(log_file, log_level, keep_apart=(config.source.input, output, errors))
            )
            if metrics_port is not None:
                url = until_end.enter_context(metrics_endpoint(metrics, metrics_host, metrics_port))
                console.print(f"metrics  {url}")
                _log.info("metrics_served", extra={"fields": {"url": url}})
            code = _run_job(config, reporting, output, errors, overwrite, as_json, display, metrics)
        raise typer.Exit(code)


def _refuse_unused(output: str | None, reporting: TelemetryConfig) -> None:
    if output is not None:
        raise ConfigError(
            "the simulated engine generates no text, so there is nothing to write; leave -o out"
        )
    for flag, value in (
        ("--log-file", reporting.log_file),
        ("--metrics-port", reporting.metrics_port),
        ("--cost-per-hour", reporting.cost_per_hour),
    ):
        if value is not None:
            raise ConfigError(f"the simulated engine runs nothing that {flag} could tell of; leave it out")


def _run_job(
    config: JobConfig,
    reporting: TelemetryConfig,
    output: str,
    errors: str | None,
    overwrite: bool,
    as_json: bool,
    display: ProgressDisplay,
    metrics: JobMetrics,
) -> int:
    from blendserve.jobs.store import ResultStore

    started_s = time.time()
    description = {
        "input": config.source.input,
        "output": output,
        "engine": config.engine.engine,
        "policy": config.policy,
        "configuration": {**asdict(config), "telemetry": asdict(reporting)},
    }
    _log.info("job_started", extra={"fields": {**description, "versions": versions()}})
    status: Status = "failed"
    try:
        files = find_model(config, console.print)
        with ResultStore(
            output,
            errors,
            model=None if config.engine.forwards else files.name,
            input_path=config.source.input,
            overwrite=overwrite,
        ) as store:
            has_report = reporting.report and Path(output).is_file()
            earlier = earlier_runs(report_paths(output).json, len(store.done)) if has_report else []
            job = read_and_plan(config, store.done, display)
            print_refused(job)
            if len(job.prepared.requests):
                print_plan(job)
                _log.info("planned", extra={"fields": job.plan.summary()})
            running = job.start(store)
            telemetry = Telemetry(job.plan, running.progress)
            metrics.watch(telemetry, files.name)
            report = None
            # A run that finds nothing left to do leaves the report of those before it.
            if has_report and (len(job.prepared.requests) or not earlier):
                report = RunReport(
                    output,
                    telemetry,
                    {**description, "model": files.name},
                    [] if overwrite else earlier,
                    cost_per_hour=reporting.cost_per_hour,
                    started_s=started_s,
                )
            running_since_s = time.perf_counter()
            try:
                with _stopping_between_steps() as steps_until_interrupted:
                    steps = telemetry.watch(running.run())
                    if report is not None:
                        steps = report.checkpointed(steps, lambda: running.summary)
                    display.running(steps_until_interrupted(steps), telemetry)
                status = "complete" if running.summary.is_complete else "stopped"
            except KeyboardInterrupt:
                status = "interrupted"
                fail(
                    f"interrupted after {running.summary.completed:,} results, which are kept; "
                    "run the same command again to go on",
                    EXIT_INTERRUPTED,
                )
            finally:
                telemetry.finish()
                display.ended(status, telemetry)
                written = _write_report(report, status, running.summary)
                _log.info(
                    "job_ended", extra={"fields": {"status": status, **summary_document(running.summary)}}
                )
    except (BlendServeError, KeyboardInterrupt) as error:
        _log.error("job_failed", extra={"fields": {"reason": str(error) or type(error).__name__}})
        raise
    summary = running.summary
    cost = written["cost"] if written else None
    if display.mode != "json":
        _print_summary(job, summary, time.perf_counter() - running_since_s, cost)
    if as_json:
        document = _summary_document(job, summary)
        if cost is not None:
            document["cost"] = cost
        print_json({"summary": document, "plan": asdict(job.plan.summary())})
    return EXIT_SOME_FAILED if summary.failed else EXIT_OK


def _write_report(report: RunReport | None, status: Status, summary: JobSummary) -> dict[str, Any] | None:
    """Write the run's report and say where; returns the JSON. The results are safe, so a failure is only told."""
    if report is None:
        return None
    try:
        document, paths = report.write(status, summary)
    except OSError as error:
        essential.print(f"warning: the report was not written: {error}; the results are complete")
        return None
    without_page = "" if report.paths.html in paths else " (no page: pip install 'blendserve[report]' for it)"
    console.print(f"report   {paths[0]}{without_page}")
    return document


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


def _simulate(config: JobConfig, as_json: bool, display: ProgressDisplay) -> None:
    job = read_and_plan(config, set(), display)
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


def _print_summary(
    job: PlannedJob, summary: JobSummary, wall_s: float, cost: dict[str, float | None] | None
) -> None:
    parts = [f"{summary.completed:,} completed", f"{summary.failed:,} failed"]
    if summary.num_done:
        parts.append(f"{summary.num_done:,} done before")
    essential.print(f"done     {', '.join(parts)} in {wall_s:.1f} s")
    if summary.num_steps:
        essential.print(
            f"tokens   {summary.num_prompt_tokens:,} prompt ({summary.num_cached_tokens:,} of them shared, "
            f"{summary.cached_ratio:.1%}) + {summary.num_output_tokens:,} output "
            f"= {summary.tokens_per_s:,.0f} tok/s"
        )
        essential.print(f"blend    {_blend_verdict(job, summary)}")
    if summary.num_retried_requests or summary.num_engine_restarts:
        essential.print(
            f"retried  {summary.num_retried_requests:,} requests, "
            f"{summary.num_engine_restarts:,} engine restarts"
        )
    for code, count in summary.failures_by_code.items():
        essential.print(f"failed   {count:,} × {code}")
    if cost is not None:
        each = cost["per_million_tokens"]
        essential.print(
            f"cost     {cost['total']:.4g}" + (f", {each:.4g} per million tokens" if each else "")
        )


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
    return summary_document(summary) | {
        "policy": job.config.policy,
        "engine": job.config.engine.engine,
        "model": job.files.name,
    }
