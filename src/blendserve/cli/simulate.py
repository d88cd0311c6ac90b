"""`blendserve simulate`: policies compared on a modelled device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import orjson
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from blendserve import __version__
from blendserve.cli.console import console, print_json, print_table, reported_errors
from blendserve.cli.options import (
    AsJson,
    chosen,
)
from blendserve.cli.plan import print_refused, read_and_plan
from blendserve.cost_model import HardwareSpec
from blendserve.engines import EngineConfig
from blendserve.errors import ConfigError
from blendserve.experiments import (
    FIGURES,
    PAPER_HARDWARE,
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
from blendserve.jobs.setup import InputConfig, JobConfig
from blendserve.scheduling.policies import POLICIES, PolicyName
from blendserve.simulator import LENGTHS, Lengths
from blendserve.workloads import PAPER_MODELS, Workload


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
        str | None,
        typer.Option(
            metavar="SETTING,…",
            help="How operators overlap: smooth (p-norm 2.3, 1024 tokens a step), kinked (max + 0.35 min, 2048), "
            "sequential, or profile: as --hardware says. Default: smooth,sequential; with --hardware "
            "profile,sequential.",
        ),
    ] = None,
    model: Annotated[str, typer.Option(help=f"One of {', '.join(PAPER_MODELS)}.")] = "llama-3-8b",
    hardware: Annotated[
        str, typer.Option(help="Profile of the device, a shipped name or a .json file.")
    ] = PAPER_HARDWARE,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="Devices that act as one.")] = 1,
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
    """Simulate whole workloads on a modelled device, the paper's A100, and compare policies with the best possible.

    The scheduler and the policies are those of 'run'; only the device is modelled. All times are simulated.
    """
    with reported_errors():
        if sum((source is not None, lengths_file is not None, bool(paper))) != 1:
            raise ConfigError("name one of: a workload or batch file, --lengths FILE, --paper FIGURE")
        if model not in PAPER_MODELS:
            raise ConfigError(f"no model {model!r}; choose one of {', '.join(PAPER_MODELS)}")
        figures = chosen("--paper", paper, (*FIGURES, "all")) if paper else []
        policies: list[PolicyName] = chosen("--policy", policy, POLICIES)
        infos: list[Lengths] = chosen("--length-info", length_info, LENGTHS)
        overlapped = "smooth" if hardware == PAPER_HARDWARE else "profile"
        settings: list[Setting] = chosen("--setting", setting or f"{overlapped},sequential", SETTINGS)
        if paper and hardware != PAPER_HARDWARE:
            raise ConfigError("--paper has the paper's device; leave --hardware out")
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
                        hardware,
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
            print_table(f"{TITLES.get(name, name)} ({simulated})", table(of_figure))
        if output is not None:
            _write_report(output, rows, hardware)
        if as_json:
            print_json({"simulated": [row for of_figure in rows.values() for row in of_figure]})


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
    job = read_and_plan(
        JobConfig(InputConfig((source,), limit=limit, any_model=True), EngineConfig(engine="simulated"))
    )
    print_refused(job)
    num_requests = job.plan.num_requests
    if num_requests == 0:
        raise ConfigError(f"{source} has no line that could run")
    output_tokens = job.plan.output_tokens_est.round().astype("int32")
    return Workload(
        source, job.prepared.requests, output_tokens, np.zeros(num_requests, dtype=np.int8), ("job",)
    )


def _write_report(folder: Path, rows: dict[str, list[Row]], hardware: str) -> None:
    from blendserve.report import page

    folder.mkdir(parents=True, exist_ok=True)
    provenance = [
        f"blendserve {__version__}, {next(iter(rows.values()))[0]['num_requests']:,} requests per workload",
        f"device: {HardwareSpec.load(hardware).provenance}; several devices: rates and memory added up",
    ]
    (folder / "report.html").write_text(page("BlendServe, simulated", provenance, sections(rows)))
    without_series = {
        name: [{key: value for key, value in row.items() if key != "series"} for row in of_figure]
        for name, of_figure in rows.items()
    }
    (folder / "results.json").write_bytes(orjson.dumps(without_series, option=orjson.OPT_INDENT_2))
    console.print(f"report   {folder / 'report.html'} and results.json")
