"""`blendserve run`: a batch file in, results out."""

from __future__ import annotations

import logging
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from blendserve.cli.console import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_OUT_OF_TIME,
    EXIT_SOME_FAILED,
    console,
    essential,
    fail,
    print_json,
    reported_errors,
)
from blendserve.cli.options import (
    DEFAULT_MAX_LINE_SIZE,
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
    ColumnMapping,
    CostPerHour,
    DeviceOption,
    DtypeOption,
    EnableAutoToolChoice,
    Endpoint,
    Engine,
    EngineArg,
    EngineArgs,
    EngineProcess,
    FreeUnusedPrefixes,
    Hardware,
    Inputs,
    KvCacheMemory,
    KvCacheTokens,
    Limit,
    LoadFormatOption,
    LogFile,
    LogLevelOption,
    LoraModules,
    MaxConcurrency,
    MaxEngineRestarts,
    MaxLineBytes,
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
    OverlapOption,
    Policy,
    ProgressOption,
    QuantizationOption,
    Quiet,
    ReasoningParser,
    Report,
    RequestTimeout,
    SampleRatio,
    Seed,
    ServedModelName,
    SGLangPython,
    SplitBudget,
    SplitGap,
    Strict,
    TensorParallelSize,
    ToolCallParser,
    TrustRemoteCode,
    engine_config,
    input_config,
    plan_config,
    telemetry_config,
)
from blendserve.cli.plan import print_plan, print_refused, read_and_plan, simulated_cost
from blendserve.cli.progress import ProgressDisplay
from blendserve.engines.supervised import DEFAULT_MAX_RESTARTS
from blendserve.errors import BlendServeError, ConfigError
from blendserve.jobs.deadline import Deadline, seconds_left
from blendserve.jobs.event_log import event_log
from blendserve.jobs.manifest import digested_stdin
from blendserve.jobs.metrics import JobMetrics, metrics_endpoint
from blendserve.jobs.publish import Publication
from blendserve.jobs.run_report import (
    RunReport,
    Status,
    earlier_runs,
    report_paths,
    summary_document,
    versions,
)
from blendserve.jobs.setup import DEFAULT_POLICY, JobConfig, OutputConfig, PlannedJob, find_model
from blendserve.jobs.store import FLUSH_INTERVAL_S, ResultStore
from blendserve.jobs.telemetry import Telemetry, TelemetryConfig

if TYPE_CHECKING:
    from blendserve.jobs.job import JobProgress, JobSummary

_log = logging.getLogger(__name__)


def run_command(
    inputs: Inputs,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="OUT.jsonl",
            help="Results, appended as they finish; [b]-[/b] for standard output. OUT.jsonl.gz, "
            ".jsonl.zst, .parquet and fsspec URLs are made from a local OUT.jsonl when the job is complete.",
        ),
    ] = None,
    errors: Annotated[
        str | None,
        typer.Option(
            metavar="ERR.jsonl", help="Lines that failed. Default: OUT.errors.jsonl beside the output."
        ),
    ] = None,
    ordered: Annotated[
        bool, typer.Option("--ordered", help="Results in the order of the input, once the job is complete.")
    ] = False,
    errors_in_output: Annotated[
        bool,
        typer.Option(
            "--errors-in-output",
            help="Once the job is complete, a line in OUT for each line of the input and in its order, failed ones "
            "too, with the reason as 'error'. Until then results are in OUT.results.jsonl.",
        ),
    ] = False,
    working_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Folder for the files that results grow in, where OUT is made from one. Default: that of OUT, "
            "for a URL the current one.",
        ),
    ] = None,
    flush_interval: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="Force results onto the disk so often; 0: after every step. Only what came since can be "
            "lost, and only if the machine dies.",
        ),
    ] = FLUSH_INTERVAL_S,
    restart: Annotated[
        bool, typer.Option("--restart", help="Drop earlier results instead of skipping what is done.")
    ] = False,
    continue_anyway: Annotated[
        bool,
        typer.Option(
            "--continue-anyway",
            help="Keep earlier results although input, model or options differ, and run the rest.",
        ),
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
    attention_backend: Attention = ENGINE_DEFAULTS.attention_backend,
    overlap: OverlapOption = ENGINE_DEFAULTS.overlap,
    num_threads: NumThreads = None,
    base_url: BaseUrl = None,
    api_key_env: ApiKeyEnv = None,
    max_concurrency: MaxConcurrency = None,
    request_timeout: RequestTimeout = None,
    kv_cache_tokens: KvCacheTokens = None,
    sglang_python: SGLangPython = None,
    engine_arg: EngineArg = None,
    engine_args: EngineArgs = None,
    tool_call_parser: ToolCallParser = None,
    enable_auto_tool_choice: EnableAutoToolChoice = False,
    reasoning_parser: ReasoningParser = None,
    lora_modules: LoraModules = None,
    engine_process: EngineProcess = ENGINE_DEFAULTS.engine_process,
    max_engine_restarts: MaxEngineRestarts = DEFAULT_MAX_RESTARTS,
    deadline: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="When to be done, e.g. 2026-12-01T06:00 or 8h from now: stops admitting requests so that what "
            "runs can end by then, and leaves the rest for the next run.",
        ),
    ] = None,
    max_time: Annotated[
        str | None, typer.Option(metavar="DURATION", help="The same for this run, e.g. 90m.")
    ] = None,
    finalize: Annotated[
        bool,
        typer.Option(
            "--finalize", help="Write a batch_expired error for each line that was not run by the deadline."
        ),
    ] = False,
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

    Running the same command again skips the lines that already have a result. It is refused if input, model or
    options differ from the earlier run's.

    Exit codes: 0 all lines succeeded, 1 some failed (see the error file), 2 the job could not run,
    3 the time was up (--deadline, --max-time), 130 interrupted; after 2, 3 and 130 run it again to go on.
    """
    with reported_errors(), _ended_by_signals():
        left_s = seconds_left(deadline, max_time)
        if finalize and left_s is None:
            raise ConfigError("--finalize ends a job at its deadline; add --deadline or --max-time")
        run_deadline = None if left_s is None else Deadline(left_s)
        config = JobConfig(
            input_config(locals()),
            engine_config(locals()),
            plan_config(locals()),
            policy=policy,
            plan_file=plan_file,
            seed=seed,
            max_engine_restarts=max_engine_restarts,
        )
        config.engine.check()
        reporting = telemetry_config(locals())
        console.quiet = quiet or progress == "json"
        display = ProgressDisplay("none" if quiet and progress == "auto" else progress)
        if config.engine.engine == "simulated" and output is None:
            _simulate(config, as_json, display)
            return
        if output is None:
            raise ConfigError("no output named; add -o OUT.jsonl, or -o - for standard output")
        if as_json and output == "-":
            raise ConfigError("--json and -o - both need standard output; give -o a file")
        wanted = OutputConfig(
            output,
            errors,
            ordered=ordered,
            errors_in_output=errors_in_output,
            working_dir=working_dir,
            flush_interval=flush_interval,
            restart=restart,
            continue_anyway=continue_anyway,
        )
        metrics = JobMetrics()
        with ExitStack() as until_end:
            until_end.enter_context(
                event_log(log_file, log_level, keep_apart=(*config.source.inputs, output, errors))
            )
            if metrics_port is not None:
                url = until_end.enter_context(metrics_endpoint(metrics, metrics_host, metrics_port))
                console.print(f"metrics  {url}")
                _log.info("metrics_served", extra={"fields": {"url": url}})
            code = _run_job(config, wanted, reporting, display, metrics, run_deadline, finalize, as_json)
        raise typer.Exit(code)


def _run_job(
    config: JobConfig,
    wanted: OutputConfig,
    reporting: TelemetryConfig,
    display: ProgressDisplay,
    metrics: JobMetrics,
    deadline: Deadline | None,
    finalize: bool,
    as_json: bool,
) -> int:
    publication = Publication(
        wanted.output,
        wanted.errors,
        ordered=wanted.ordered,
        errors_in_output=wanted.errors_in_output,
        working_dir=wanted.working_dir,
    )
    if not wanted.restart:
        publication.check()
    working = publication.output.working
    started_s = time.time()
    description = {
        "inputs": list(config.source.inputs),
        "output": wanted.output,
        "engine": config.engine.engine,
        "policy": config.policy,
        "configuration": {**asdict(config), "telemetry": asdict(reporting)},
    }
    _log.info("job_started", extra={"fields": {**description, "versions": versions()}})
    status: Status = "failed"
    try:
        sources = config.source.find(exclude=publication.files)
        files = find_model(config, console.print)
        with ExitStack() as until_end:
            from_stdin = any(source.path == "-" for source in sources)
            stdin = until_end.enter_context(digested_stdin()) if from_stdin else None
            store = until_end.enter_context(
                ResultStore(
                    working,
                    publication.working_errors,
                    model=None if config.engine.forwards else config.model_name(files),
                    inputs=[source.path for source in sources],
                    signature=config.signature(files, sources, stdin),
                    restart=wanted.restart,
                    continue_anyway=wanted.continue_anyway,
                    flush_interval_s=wanted.flush_interval,
                )
            )
            has_report = reporting.report and Path(working).is_file()
            earlier = earlier_runs(report_paths(working).json, len(store.done)) if has_report else []
            job = read_and_plan(config, store.done, publication.order, display, sources)
            store.compare_stdin()
            print_refused(job)
            if len(job.prepared.requests):
                print_plan(job)
                _log.info("planned", extra={"fields": job.plan.summary()})
            running = until_end.enter_context(
                closing(job.start(store, deadline=deadline, finalize=finalize, on_event=_print_event))
            )
            # Ends before the engine and the store do.
            job_steps = until_end.enter_context(closing(running.run()))
            telemetry = Telemetry(job.plan, running.progress)
            metrics.watch(telemetry, files.name)
            report = None
            # A run that finds nothing left to do leaves the report of those before it.
            if has_report and (len(job.prepared.requests) or not earlier):
                report = RunReport(
                    working,
                    telemetry,
                    {**description, "model": files.name},
                    [] if wanted.restart else earlier,
                    cost_per_hour=reporting.cost_per_hour,
                    started_s=started_s,
                )
            running_since_s = time.perf_counter()
            try:
                with _stopping_between_steps() as steps_until_interrupted:
                    steps = telemetry.watch(job_steps)
                    if report is not None:
                        steps = report.checkpointed(steps, lambda: running.summary)
                    display.running(steps_until_interrupted(steps), telemetry)
                status = "complete" if running.summary.is_complete else "stopped"
            except KeyboardInterrupt:
                status = "interrupted"
            finally:
                telemetry.finish()
                display.ended(status, telemetry)
                written = _write_report(report, status, running.summary)
                _log.info(
                    "job_ended", extra={"fields": {"status": status, **summary_document(running.summary)}}
                )
            summary = running.summary
            if status == "interrupted":
                fail(
                    f"interrupted after {summary.completed:,} results, which are kept; to go on, run again: "
                    f"{_resume_command()}",
                    EXIT_INTERRUPTED,
                )
            cost = written["cost"] if written else None
            if display.mode != "json":
                _print_summary(job, summary, time.perf_counter() - running_since_s, cost)
            if summary.is_complete:
                for made in publication.write():
                    console.print(f"written  {made.path}; kept {made.working}, which it was made from")
    except (BlendServeError, KeyboardInterrupt) as error:
        _log.error("job_failed", extra={"fields": {"reason": str(error) or type(error).__name__}})
        raise
    if as_json:
        document = _summary_document(job, summary)
        if cost is not None:
            document["cost"] = cost
        print_json({"summary": document, "plan": asdict(job.plan.summary())})
    if not summary.is_complete:
        num_left = summary.total - summary.num_done - summary.completed - summary.failed
        fail(
            f"the time is up with {num_left:,} lines left; to go on, run again: {_resume_command()}",
            EXIT_OUT_OF_TIME,
        )
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


def _print_event(line: str) -> None:
    console.print(f"engine   {escape(line)}")
    _log.warning("engine_event", extra={"fields": {"text": line}})


def _resume_command() -> str:
    """The command that goes on with this job, as it was given; without what would drop the results."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--restart"]
    is_module = Path(sys.argv[0]).name == "__main__.py"
    program = [sys.executable, "-m", "blendserve.cli"] if is_module else [Path(sys.argv[0]).name]
    return shlex.join([*program, *arguments])


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Before and after the steps, Ctrl-C ends the command, and SIGTERM does as well; see `_stopping_between_steps`."""

    def interrupt(_signum: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
    job = read_and_plan(config, display=display)
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
