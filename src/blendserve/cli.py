"""The command line: parsing and printing, nothing else."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import numpy as np
import orjson
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from blendserve import __version__
from blendserve.engines import AttentionBackend, Dtype, EngineConfig, EngineName, open_engine
from blendserve.errors import BlendServeError, ConfigError
from blendserve.experiments import (
    FIGURES,
    SETTINGS,
    TITLES,
    Case,
    FinishedRuns,
    Row,
    Setting,
    read_lengths,
    run_cases,
    sections,
    table,
)
from blendserve.jobs.setup import (
    DEFAULT_POLICY,
    InputConfig,
    JobConfig,
    PlannedJob,
    find_model,
    plan_job,
)
from blendserve.models import BUNDLED_MODEL
from blendserve.planner.plan import PlanConfig
from blendserve.planner.tree_order import OrderConfig
from blendserve.scheduling.policies import POLICIES, PolicyName, make_policy
from blendserve.simulator import LENGTHS, Lengths, practical_optimum
from blendserve.workloads import PAPER_MODELS, Workload

if TYPE_CHECKING:
    from blendserve.jobs.job import JobProgress, JobSummary
    from blendserve.report import Table as TextTable

EXIT_OK, EXIT_SOME_FAILED, EXIT_CANNOT_RUN, EXIT_INTERRUPTED = 0, 1, 2, 130
PLAIN_PROGRESS_EVERY_S = 10.0
PLAN_DEFAULTS = PlanConfig()
ENGINE_DEFAULTS = EngineConfig()
POLICY_ESTIMATE_MAX_REQUESTS = 50_000
"""above this many requests `plan` does not simulate the policies unless asked to"""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console(
    stderr=True,
    highlight=False,
    soft_wrap=True,
    # A log file has no width; tables must not be cut to that of an old terminal.
    width=None if sys.stderr.isatty() else 160,
)


_MODEL, _ENGINE, _PLANNER = "Model and input", "Engine", "Planning"

InputPath = Annotated[
    str,
    typer.Argument(metavar="IN.jsonl", help="Batch file in OpenAI's format, [b]-[/b] for standard input."),
]
Model = Annotated[
    str | None,
    typer.Option(
        help=f"Hugging Face folder, .gguf file or hub id. Without it: {BUNDLED_MODEL}, which comes along.",
        rich_help_panel=_MODEL,
    ),
]
ServedModelName = Annotated[
    str | None,
    typer.Option(help="Name of the model in 'body.model' and in the results.", rich_help_panel=_MODEL),
]
AnyModel = Annotated[
    bool, typer.Option("--any-model", help="Run lines whatever model they name.", rich_help_panel=_MODEL)
]
Limit = Annotated[
    int | None, typer.Option(min=1, help="Only the first so many lines.", rich_help_panel=_MODEL)
]
OutputTokensField = Annotated[
    str | None,
    typer.Option(help="Name of a body field that tells how long the output will be.", rich_help_panel=_MODEL),
]
Engine = Annotated[
    EngineName,
    typer.Option(
        help="native runs the model here; simulated runs the schedule on a modelled device.",
        rich_help_panel=_ENGINE,
    ),
]
Hardware = Annotated[
    str | None,
    typer.Option(
        help="Profile of step costs, a shipped name or a .json file. Default: the engine's.",
        rich_help_panel=_ENGINE,
    ),
]
DtypeOption = Annotated[
    Dtype,
    typer.Option(
        "--dtype",
        help="Weights and KV cache; auto: bfloat16 where the CPU has it, else float32.",
        rich_help_panel=_ENGINE,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Most tokens of a request, prompt and output. Default: the model's context.",
        rich_help_panel=_ENGINE,
    ),
]
BlockSize = Annotated[int | None, typer.Option(min=1, help="Tokens per KV block.", rich_help_panel=_ENGINE)]
KvCacheMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory for the KV cache, e.g. 2GiB. Default: a share of what is free.",
        rich_help_panel=_ENGINE,
    ),
]
MaxNumSeqs = Annotated[
    int | None, typer.Option(min=1, help="Most requests running at a time.", rich_help_panel=_ENGINE)
]
MaxNumBatchedTokens = Annotated[
    int | None, typer.Option(min=1, help="Most tokens in a step.", rich_help_panel=_ENGINE)
]
FreeUnusedPrefixes = Annotated[
    bool,
    typer.Option(
        help="Free a prefix once no waiting request can use it, instead of leaving it to LRU eviction.",
        rich_help_panel=_ENGINE,
    ),
]
Attention = Annotated[
    AttentionBackend,
    typer.Option(
        "--attention-backend",
        help="c: compiled on first use with the system's compiler; auto: c where that works.",
        rich_help_panel=_ENGINE,
    ),
]
NumThreads = Annotated[
    int | None, typer.Option(min=1, help="CPU threads. Default: all cores.", rich_help_panel=_ENGINE)
]
Policy = Annotated[
    PolicyName,
    typer.Option(
        help="Order of admission: blend mixes compute- and memory-intensive requests, dual-scan as the paper does; "
        "the others are baselines.",
        rich_help_panel=_PLANNER,
    ),
]
SampleRatio = Annotated[
    float,
    typer.Option(
        min=0.0,
        max=1.0,
        help="Share of the requests that make up the sample to learn output lengths from. dual-scan runs it first, "
        "and so does blend where it mixes.",
        rich_help_panel=_PLANNER,
    ),
]
MinSamples = Annotated[
    int,
    typer.Option(
        "--min-samples-per-subtree",
        min=0,
        help="At least so many of them per large subtree.",
        rich_help_panel=_PLANNER,
    ),
]
SplitBudget = Annotated[
    float,
    typer.Option(
        min=0.0,
        help="Share of the saved prompt tokens that may be given up to sort outliers.",
        rich_help_panel=_PLANNER,
    ),
]
SplitGap = Annotated[
    float,
    typer.Option(
        min=1.0, help="Factor by which an outlier's density must be out of order.", rich_help_panel=_PLANNER
    ),
]
MergeGap = Annotated[
    float,
    typer.Option(
        min=1.0,
        help="Neighbouring subtrees whose densities differ less are one unit.",
        rich_help_panel=_PLANNER,
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        min=0,
        help="Of sampling, of the random policy, and of requests that bring no seed.",
        rich_help_panel=_PLANNER,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output at the end.")]


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)
    ] = False,
) -> None:
    """Offline LLM inference: a batch file in, a blended run on a model, results out."""
    if version:
        print(f"blendserve {__version__}")
        raise typer.Exit


@app.command()
def run(
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
    policy: Policy = DEFAULT_POLICY,
    plan_file: Annotated[
        Path | None,
        typer.Option(
            "--plan", help="Use a plan saved by 'blendserve plan --save'.", rich_help_panel=_PLANNER
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
    with _reported_errors():
        config = _job_config(
            InputConfig(source, model, served_model_name, any_model, limit, output_tokens_field),
            _engine_config(locals()),
            _plan_config(locals()),
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


@app.command()
def plan(
    source: InputPath,
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
    with _reported_errors():
        config = _job_config(
            InputConfig(source, model, served_model_name, any_model, limit, output_tokens_field),
            _engine_config(locals()),
            _plan_config(locals()),
            policy=DEFAULT_POLICY,
            plan_file=None,
            seed=seed,
        )
        job = _plan(config, done=set())
        _print_errors(job)
        _print_plan(job)
        if len(job.prepared.requests) == 0:
            raise typer.Exit(EXIT_SOME_FAILED if job.prepared.errors else EXIT_OK)
        groups = _groups(job)
        _print_groups(groups)
        costs: list[dict[str, Any]] = []
        if simulate or (simulate is None and job.plan.num_requests <= POLICY_ESTIMATE_MAX_REQUESTS):
            costs = [_simulated_cost(job, name) for name in POLICIES]
            _print_policy_costs(job, costs)
        if save is not None:
            job.plan.save(save)
            console.print(f"plan saved to {save}")
        if as_json:
            document = {"plan": asdict(job.plan.summary()), "groups": groups, "policies": costs}
            document["errors"] = [asdict(error) for error in job.prepared.errors]
            _print_json(document)
        raise typer.Exit(EXIT_SOME_FAILED if job.prepared.errors else EXIT_OK)


@app.command(name="simulate")
def simulate_command(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[WORKLOAD|JOB.jsonl]",
            help="trace1 … trace4; a point of the grid, grid-1.05-0.25 (density, sharing); a trace at a density and "
            "sharing, sharegpt-1.4-0.35; agents, agents-mixed or conversations (prefixes of several levels); or a "
            "batch file.",
        ),
    ] = None,
    lengths_file: Annotated[
        Path | None,
        typer.Option(
            "--lengths",
            metavar="FILE",
            help="Real lengths instead: .csv with input_tokens, output_tokens; or .jsonl with hash_ids (Mooncake).",
        ),
    ] = None,
    paper: Annotated[
        str | None,
        typer.Option(metavar="FIGURE,…", help=f"Figures of the paper instead: {', '.join(FIGURES)} or all."),
    ] = None,
    num_requests: Annotated[
        int, typer.Option(min=1, help="Requests of a workload; conclusions need 200,000 or more.")
    ] = 400_000,
    policy: Annotated[
        str, typer.Option(metavar="POLICY,…", help=f"Policies to compare, of {', '.join(POLICIES)}.")
    ] = "dfs,random,dual-scan,blend",
    length_info: Annotated[
        str,
        typer.Option(
            metavar="INFO,…",
            help="What is known about output lengths at the start: known, sampled (those of the requests that run "
            "first) or none.",
        ),
    ] = "sampled",
    setting: Annotated[
        str,
        typer.Option(
            metavar="SETTING,…",
            help="How operators overlap: smooth (p-norm 2.3, 1024 tokens a step), kinked (max + 0.35 min, 2048) or "
            "sequential.",
        ),
    ] = "smooth,sequential",
    model: Annotated[str, typer.Option(help=f"One of {', '.join(PAPER_MODELS)}.")] = "llama-3-8b",
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="A100s that act as one device.")] = 1,
    data_parallel_size: Annotated[
        int, typer.Option(min=1, help="Replicas that the requests are divided over.")
    ] = 1,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Folder for report.html, results.json and rows.jsonl; a series that was stopped goes on from there.",
        ),
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Workloads simulated at the same time.")] = 1,
    seed: Annotated[
        int, typer.Option(min=0, help="Of the workloads, the samples and the random policy.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Simulate whole workloads on a modelled A100 and compare policies with the bound that none can beat.

    The scheduler and the policies are those of 'run'; only the device is modelled. All times are simulated.
    """
    with _reported_errors():
        if sum((source is not None, lengths_file is not None, bool(paper))) != 1:
            raise ConfigError("name one of: a workload or batch file, --lengths FILE, --paper FIGURE")
        if model not in PAPER_MODELS:
            raise ConfigError(f"no model {model!r}; choose one of {', '.join(PAPER_MODELS)}")
        figures = _chosen("--paper", paper, (*FIGURES, "all")) if paper else []
        policies: list[PolicyName] = _chosen("--policy", policy, POLICIES)
        infos: list[Lengths] = _chosen("--length-info", length_info, LENGTHS)
        settings: list[Setting] = _chosen("--setting", setting, SETTINGS)
        workload = None
        if lengths_file is not None:
            workload = read_lengths(lengths_file, num_requests, seed)
        elif source is not None and source.endswith(".jsonl"):
            workload = _job_workload(source, num_requests)
        if paper:
            cases = {name: FIGURES[name] for name in FIGURES if name in figures or "all" in figures}
        else:
            name = workload.name if workload is not None else str(source)
            cases = {
                name: [
                    Case(
                        name,
                        p,
                        s,
                        n,
                        model,
                        tensor_parallel_size,
                        data_parallel_size,
                        with_series=output is not None,
                    )
                    for n in infos
                    for s in settings
                    for p in policies
                ]
            }
        finished = None
        if output is not None and workload is None:
            finished = FinishedRuns(output / "rows.jsonl", num_requests, seed)
        rows = _run_experiments(cases, num_requests, workload, seed, processes, finished)
        for name, of_figure in rows.items():
            simulated = f"simulated, {of_figure[0]['num_requests']:,} requests"
            _print_table(f"{TITLES.get(name, name)} ({simulated})", table(of_figure))
        if output is not None:
            _write_report(output, rows)
        if as_json:
            _print_json({"simulated": [row for of_figure in rows.values() for row in of_figure]})


def main() -> None:
    """Entry point of the `blendserve` command."""
    app()


# -- options to configuration ----------------------------------------------------------------------------------------


def _engine_config(options: dict[str, Any]) -> EngineConfig:
    """From the locals of a command, which are its options."""
    memory = options["kv_cache_memory"]
    return EngineConfig(
        engine=options["engine"],
        hardware=options["hardware"],
        dtype=options["dtype"],
        max_model_len=options["max_model_len"],
        block_size=options["block_size"],
        kv_cache_memory=None if memory is None else parse_bytes(memory),
        max_num_seqs=options["max_num_seqs"],
        max_num_batched_tokens=options["max_num_batched_tokens"],
        free_unused_prefixes=options["free_unused_prefixes"],
        attention_backend=options.get("attention_backend", ENGINE_DEFAULTS.attention_backend),
        num_threads=options.get("num_threads"),
    )


def _plan_config(options: dict[str, Any]) -> PlanConfig:
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


def _job_config(
    source: InputConfig,
    engine: EngineConfig,
    plan_config: PlanConfig,
    *,
    policy: PolicyName,
    plan_file: Path | None,
    seed: int,
) -> JobConfig:
    return JobConfig(source, engine, plan_config, policy, plan_file, seed)


def _chosen(flag: str, text: str, allowed: tuple[Any, ...]) -> list[Any]:
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


@contextmanager
def _reported_errors() -> Iterator[None]:
    try:
        yield
    except BlendServeError as error:
        _fail(str(error), EXIT_CANNOT_RUN)
    except KeyboardInterrupt:
        _fail("interrupted; what is finished is kept, run the same command again to go on", EXIT_INTERRUPTED)


def _fail(message: str, code: int) -> NoReturn:
    console.print(Text.assemble(("error: " if code == EXIT_CANNOT_RUN else "", "bold red"), message))
    raise typer.Exit(code)


def _refuse_output(output: str | None) -> None:
    if output is not None:
        raise ConfigError(
            "the simulated engine generates no text, so there is nothing to write; leave -o out"
        )


# -- run -------------------------------------------------------------------------------------------------------------


def _plan(config: JobConfig, done: set[str]) -> PlannedJob:
    files = find_model(config, console.print)
    started_s = time.perf_counter()
    job = plan_job(config, files, done)
    prepared = job.prepared
    skipped = f", {prepared.num_done:,} done before" if prepared.num_done else ""
    console.print(
        f"read     {prepared.num_lines:,} lines: {len(prepared.rows):,} to run{skipped}, "
        f"{len(prepared.errors):,} refused "
        f"[dim]({time.perf_counter() - started_s:.1f} s)[/dim]"
    )
    return job


def _run_job(config: JobConfig, output: str, errors: str | None, overwrite: bool, as_json: bool) -> int:
    from blendserve.jobs.store import ResultStore

    files = find_model(config, console.print)
    with ResultStore(
        output, errors, model=files.name, input_path=config.source.input, overwrite=overwrite
    ) as store:
        job = _plan(config, done=store.done)
        _print_errors(job)
        if len(job.prepared.requests):
            _print_plan(job)
        running = job.start(store)
        started_s = time.perf_counter()
        try:
            with _stopping_between_steps() as steps_until_interrupted:
                _show_progress(steps_until_interrupted(running.run()), job.plan.summary().sequential_s)
        except KeyboardInterrupt:
            summary = running.summary
            _fail(
                f"interrupted after {summary.completed:,} results, which are kept; run the same command again to go on",
                EXIT_INTERRUPTED,
            )
        summary = running.summary
    _print_summary(job, summary, time.perf_counter() - started_s)
    if as_json:
        _print_json({"summary": _summary_document(job, summary), "plan": asdict(job.plan.summary())})
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


def _simulate(config: JobConfig, as_json: bool) -> None:
    job = _plan(config, done=set())
    _print_errors(job)
    if len(job.prepared.requests) == 0:
        raise typer.Exit(EXIT_SOME_FAILED)
    _print_plan(job)
    cost = _simulated_cost(job, config.policy)
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
        _print_json({"simulated": cost, "plan": asdict(job.plan.summary())})
    raise typer.Exit(EXIT_SOME_FAILED if job.prepared.errors else EXIT_OK)


def _simulated_cost(job: PlannedJob, policy_name: PolicyName) -> dict[str, Any]:
    """Run the schedule on a virtual clock, with the expected output lengths as the real ones."""
    output_tokens = job.plan.output_tokens_est.round().astype("int32")
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


def _run_experiments(
    cases: dict[str, list[Case]],
    num_requests: int,
    workload: Workload | None,
    seed: int,
    processes: int,
    finished: FinishedRuns | None,
) -> dict[str, list[Row]]:
    """Every case once, whatever figures it belongs to; those that ran before not again."""
    together = list(dict.fromkeys(case for of_figure in cases.values() for case in of_figure))
    known = {case: finished.rows[case] for case in together if case in finished.rows} if finished else {}
    if known:
        console.print(f"{len(known)} of {len(together)} runs are there already")
    with Progress(
        TextColumn("simulating"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task("", total=len(together), completed=len(known))

        def keep(row: Row) -> None:
            bar.advance(task)
            if finished is not None:
                finished.add(row)

        done = run_cases(
            together,
            num_requests,
            workload=workload,
            seed=seed,
            processes=processes,
            finished=known,
            on_done=keep,
        )
    by_case = dict(zip(together, done, strict=True))
    return {name: [by_case[case] for case in of_figure] for name, of_figure in cases.items()}


def _job_workload(source: str, limit: int) -> Workload:
    """A batch file as a workload; its output lengths are the planner's first estimates."""
    job = _plan(
        JobConfig(InputConfig(source, limit=limit, any_model=True), EngineConfig(engine="simulated")),
        done=set(),
    )
    _print_errors(job)
    num_requests = job.plan.num_requests
    if num_requests == 0:
        raise ConfigError(f"{source} has no line that could run")
    output_tokens = job.plan.output_tokens_est.round().astype("int32")
    return Workload(
        source, job.prepared.requests, output_tokens, np.zeros(num_requests, dtype=np.int8), ("job",)
    )


def _write_report(folder: Path, rows: dict[str, list[Row]]) -> None:
    from blendserve.report import page

    folder.mkdir(parents=True, exist_ok=True)
    provenance = [
        f"blendserve {__version__}, {next(iter(rows.values()))[0]['num_requests']:,} requests per workload",
        "device: A100-80GB modelled after Table 1 of the paper; several devices: rates and memory added up",
    ]
    (folder / "report.html").write_text(page("BlendServe, simulated", provenance, sections(rows)))
    without_series = {
        name: [{key: value for key, value in row.items() if key != "series"} for row in of_figure]
        for name, of_figure in rows.items()
    }
    (folder / "results.json").write_bytes(orjson.dumps(without_series, option=orjson.OPT_INDENT_2))
    console.print(f"report   {folder / 'report.html'} and results.json")


# -- printing --------------------------------------------------------------------------------------------------------


def _print_errors(job: PlannedJob) -> None:
    shown = 20
    for error in job.prepared.errors[:shown]:
        where = f"line {error.line}" + (f" ({error.custom_id})" if error.custom_id else "")
        console.print(Text(f"refused  {where}: {error.code}: {error.message}", style="yellow"))
    if len(job.prepared.errors) > shown:
        console.print(
            f"refused  … and {len(job.prepared.errors) - shown:,} more; all of them are in the error file"
        )


def _print_plan(job: PlannedJob) -> None:
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


def _print_table(title: str, shown: TextTable) -> None:
    text = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in shown.headings:
        text.add_column(heading, no_wrap=True)
    for cells in shown.rows:
        text.add_row(*cells)
    console.print(text)


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


def _print_json(document: dict[str, Any]) -> None:
    sys.stdout.buffer.write(
        orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
    )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
