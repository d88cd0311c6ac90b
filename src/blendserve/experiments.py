"""The paper's evaluation, simulated: which workloads, devices and policies each figure compares.

Figures are numbered as in `docs/paper.md`, which says what of the paper each one answers to; `trees` is ours. All of
them are simulated.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import orjson

from blendserve.cost_model import CostModel, HardwareSpec, Overlap
from blendserve.engines.batching import BatchingEngine
from blendserve.engines.simulated import SimulatedExecutor
from blendserve.errors import ConfigError
from blendserve.models import ModelSpec
from blendserve.planner.partition import partition
from blendserve.planner.plan import Plan
from blendserve.report import Section, Table
from blendserve.request import RequestTable
from blendserve.scheduling.policies import PolicyName, make_policy
from blendserve.scheduling.scheduler import SchedulerConfig
from blendserve.simulator import Calibration, Lengths, Series, SimulationReport, plan_workload, simulate
from blendserve.workloads import (
    DEEP_WORKLOADS,
    GRID,
    HIGH_VARIANCE,
    PAPER_MODELS,
    PAPER_TRACES,
    Workload,
    from_block_hashes,
    from_lengths_csv,
    named_workload,
)

Setting = Literal["smooth", "kinked", "sequential", "profile"]
"""How operators overlap: smooth is the p-norm 2.3 with 1024 tokens a step, kinked `max + 0.35 min` with 2048;
sequential runs them one after the other, with the tokens a step of the device's profile, and profile as that says"""

SETTINGS: tuple[Setting, ...] = get_args(Setting)
DEVICE_SETTINGS: tuple[Setting, ...] = ("profile", "sequential")
"""of devices other than the paper's"""

DEVICE_MEMORY_BYTES = 76e9
"""of 80 GB, what weights and KV cache may share"""

PAPER_HARDWARE = "a100-80g-paper"

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One simulated run."""

    workload: str
    policy: PolicyName
    setting: Setting = "smooth"
    lengths: Lengths = "sampled"
    model: str = "llama-3-8b"
    tensor_parallel_size: int = 1
    hardware: str = PAPER_HARDWARE
    data_parallel_size: int = 1
    prefill_replicas: int = 0
    """disaggregated serving with so many replicas for prefill …"""
    decode_replicas: int = 0
    """… and so many for decode; both 0: not disaggregated"""
    free_unused_prefixes: bool = True
    """False: prefixes stay until LRU eviction, as in engines that do not know what is still to come"""
    with_series: bool = False

    @property
    def system(self) -> str:
        """What the paper calls this combination."""
        if self.prefill_replicas:
            return f"DistServe {self.prefill_replicas}P{self.decode_replicas}D"
        name = self.policy if self.free_unused_prefixes else f"{self.policy}, LRU"
        return f"sequential {name}" if self.setting == "sequential" else name


def paper_hardware(model: ModelSpec, setting: Setting, tensor_parallel_size: int = 1) -> HardwareSpec:
    """`tensor_parallel_size` A100s as one device: rates and memory added up, communication left out."""
    base = HardwareSpec.load(PAPER_HARDWARE)
    overlap, budget = {
        "smooth": (base.overlap, base.max_num_batched_tokens),
        "kinked": (Overlap("max_plus_min", 0.35), 2048),
        "sequential": (Overlap("sum"), base.max_num_batched_tokens),
        "profile": (base.overlap, base.max_num_batched_tokens),
    }[setting]
    memory = tensor_parallel_size * DEVICE_MEMORY_BYTES - model.params * model.bytes_per_weight
    return replace(
        base,
        flops=base.flops * tensor_parallel_size,
        bandwidth=base.bandwidth * tensor_parallel_size,
        kv_cache_bytes=base.kv_cache_bytes
        if model.name == "llama-3-8b" and tensor_parallel_size == 1
        else memory,
        overlap=overlap,
        max_num_batched_tokens=budget,
    )


def case_hardware(case: Case) -> HardwareSpec:
    """The device of a case.

    Raises:
        ConfigError: there is no such profile, or the setting is the paper's and the device is not.
    """
    if case.hardware == PAPER_HARDWARE:
        return paper_hardware(PAPER_MODELS[case.model], case.setting, case.tensor_parallel_size)
    base = HardwareSpec.load(case.hardware)
    if case.setting not in DEVICE_SETTINGS:
        raise ConfigError(
            f"--setting {case.setting} is one of the paper's device; with --hardware {case.hardware} choose of "
            f"{', '.join(DEVICE_SETTINGS)}"
        )
    devices = case.tensor_parallel_size
    return replace(
        base,
        flops=base.flops * devices,
        bandwidth=base.bandwidth * devices,
        kv_cache_bytes=base.kv_cache_bytes * devices,
        overlap=Overlap() if case.setting == "sequential" else base.overlap,
    )


def _throughput(workloads: tuple[str, ...], **common: Any) -> list[Case]:
    """What the end-to-end figures compare: sequential and overlapped dfs, random order, the dual scan, ours."""
    cases = []
    for workload in workloads:
        cases += [
            Case(workload, "dfs", setting="sequential", **common),
            Case(workload, "dfs", **common),
            Case(workload, "random", free_unused_prefixes=False, **common),
            Case(workload, "dual-scan", **common),
            Case(workload, "blend", **common),
        ]
    return cases


def _figures() -> dict[str, list[Case]]:
    four = tuple(PAPER_TRACES)
    grid = [f"grid-{density:g}-{sharing:g}" for density, sharing in GRID]
    disaggregated = [
        Case(w, "dfs", prefill_replicas=x, decode_replicas=y)
        for w in four
        for x, y in ((1, 1), (1, 2), (2, 1))
    ]
    others = ("qwen-2.5-7b", "llama-2-7b")
    large = ("llama-3-70b", "qwen-2.5-72b", "deepseek-67b")
    overlapped: tuple[PolicyName, ...] = ("dfs", "dual-scan", "blend")
    ordered: tuple[PolicyName, ...] = ("dfs", "random", "fcfs", "longest-first-dfs", "dual-scan", "blend")
    return {
        "fig7": [*_throughput(four), *disaggregated],
        "fig8": _throughput(four, model="llama-3-70b", tensor_parallel_size=8),
        "fig9": [Case(w, p, free_unused_prefixes=kept) for w in four for p in ordered for kept in (True, False)],
        "fig10": [Case("trace1", policy, with_series=True) for policy in ("dfs", "random", "dual-scan", "blend")],
        "fig11": [Case(w, p) for w in grid for p in overlapped],
        "table3": [
            Case(w, p, data_parallel_size=n)
            for w in four
            for p in ("dual-scan", "blend")
            for n in (1, 2, 4, 8)
        ],
        "fig12": [Case(w, p, model=m) for m in others for w in four for p in overlapped],
        "fig13": [
            Case(w, p, model=m, tensor_parallel_size=8) for m in large for w in four for p in overlapped
        ],
        "fig14": [Case(w, p) for w in HIGH_VARIANCE for p in overlapped],
        "fig15": [
            Case(w, p, setting=setting, lengths=lengths)
            for setting in ("smooth", "kinked")
            for w in four
            for lengths in ("known", "sampled", "none")
            for p in overlapped
        ],
        "trees": [
            Case(w, p, setting=setting)
            for setting in ("smooth", "kinked")
            for w in DEEP_WORKLOADS
            for p in overlapped
        ],
    }  # fmt: skip


FIGURES: dict[str, list[Case]] = _figures()


class FinishedRuns:
    """Rows of finished runs in a file, a JSON line each, so that a series of runs that was stopped can go on.

    Runs of another size or seed, or of other code, stay in the file and are not used.
    """

    def __init__(self, path: Path, num_requests: int, seed: int) -> None:
        self._path = path
        self._key = f"{num_requests} {seed} {_code_digest()}"
        self.rows: dict[Case, Row] = {}
        content = path.read_bytes() if path.exists() else b""
        self._torn = not content.endswith(b"\n") and len(content) > 0  # killed in the middle of a line
        for line in content.splitlines():
            with contextlib.suppress(orjson.JSONDecodeError):
                row = orjson.loads(line)
                if row.pop("run") == self._key:
                    self.rows[Case(**{field.name: row[field.name] for field in fields(Case)})] = row

    def add(self, row: Row) -> None:
        """Write a row at once."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        line = orjson.dumps({"run": self._key, **row}, option=orjson.OPT_SERIALIZE_NUMPY)
        with self._path.open("ab") as file:
            file.write((b"\n" if self._torn else b"") + line + b"\n")
        self._torn = False


def _code_digest() -> str:
    """Of the package's source, on which simulated figures depend."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def run_cases(
    cases: list[Case],
    num_requests: int,
    *,
    workload: Workload | None = None,
    seed: int = 0,
    processes: int = 1,
    finished: dict[Case, Row] | None = None,
    on_done: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Simulate cases, each once; rows in the order of `cases`.

    Args:
        cases: what to run.
        num_requests: size of the workloads that the cases name.
        workload: run this one instead of those, in this process.
        seed: of workloads and policies.
        processes: workloads simulated at the same time.
        finished: rows that are there already; their cases are not run.
        on_done: called with every new row as soon as it is there.

    Returns:
        Flat fields of the case and of its `SimulationReport`; the series only where asked for.
    """
    rows: dict[Case, Row] = dict(finished or {})
    groups: dict[tuple[str, str, str], list[Case]] = {}
    for case in dict.fromkeys(cases):
        if case not in rows:
            groups.setdefault((case.workload, case.model, case.hardware), []).append(case)

    def keep(done: list[tuple[Case, Row]]) -> None:
        for case, row in done:
            rows[case] = row
            if on_done is not None:
                on_done(row)

    if processes == 1 or workload is not None:
        for group in groups.values():
            for pair in _run_group(group, num_requests, seed, workload):
                keep([pair])
    else:
        with ProcessPoolExecutor(processes) as pool:
            futures = [pool.submit(_run_group_list, group, num_requests, seed) for group in groups.values()]
            for future in as_completed(futures):
                keep(future.result())
    return [rows[case] for case in cases]


def _run_group_list(cases: list[Case], num_requests: int, seed: int) -> list[tuple[Case, Row]]:
    return list(_run_group(cases, num_requests, seed))


def _run_group(
    cases: list[Case], num_requests: int, seed: int, workload: Workload | None = None
) -> Iterator[tuple[Case, Row]]:
    """Cases of one workload and model; the workload is made once, a plan once per device and knowledge of lengths."""
    first = cases[0]
    model = PAPER_MODELS[first.model]
    peak = CostModel(model, case_hardware(replace(first, setting="profile")))
    if workload is None:
        workload = named_workload(first.workload, num_requests, seed, peak)

    @cache
    def planned(hardware: HardwareSpec, lengths: Lengths) -> tuple[RequestTable, Plan]:
        return plan_workload(workload.requests, workload.output_tokens, CostModel(model, hardware), lengths)

    for case in cases:
        requests, plan = planned(case_hardware(case), case.lengths)
        if case.prefill_replicas:
            row = _disaggregated(case, workload, plan, seed)
        elif case.data_parallel_size > 1:
            row = _data_parallel(case, workload, plan, seed)
        else:
            report = simulate(
                case.workload,
                requests,
                workload.output_tokens,
                plan,
                case.policy,
                plan.cost_model,
                lengths=case.lengths,
                free_unused_prefixes=case.free_unused_prefixes,
                seed=seed,
                with_series=case.with_series,
            )
            row = asdict(report)
            row["per_device_tokens_per_s"] = report.tokens_per_s / case.tensor_parallel_size
        yield case, {**asdict(case), "system": case.system, **row}


def read_lengths(path: Path, limit: int, seed: int) -> Workload:
    """The requests of a file: `.csv` with lengths, `.jsonl` with block hashes.

    Raises:
        ConfigError: the file or a row of it is unusable.
    """
    if path.suffix == ".jsonl":
        return from_block_hashes(path, limit=limit)
    return from_lengths_csv(path, seed=seed, limit=limit)


def _subset(requests: RequestTable, chosen: Any) -> RequestTable:
    return RequestTable(
        tokens=requests.tokens.take(chosen),
        max_tokens=requests.max_tokens[chosen],
        declared_tokens=requests.declared_tokens[chosen],
        params=requests.params,
        params_index=requests.params_index[chosen],
        seeds=requests.seeds[chosen],
    )


def _data_parallel(case: Case, workload: Workload, plan: Plan, seed: int) -> Row:
    """Every replica simulated on its own part; the job ends with the slowest."""
    parts = partition(plan, case.data_parallel_size)
    reports: list[SimulationReport] = []
    for rank in range(case.data_parallel_size):
        chosen = parts.requests_of(rank)
        output_tokens = workload.output_tokens[chosen]
        requests, part_plan = plan_workload(
            _subset(workload.requests, chosen), output_tokens, plan.cost_model, case.lengths
        )
        reports.append(
            simulate(
                case.workload,
                requests,
                output_tokens,
                part_plan,
                case.policy,
                plan.cost_model,
                lengths=case.lengths,
                seed=seed,
            )
        )
    slowest = max(reports, key=lambda report: report.makespan_s)
    num_tokens = sum(report.num_tokens for report in reports)
    return {
        **asdict(slowest),
        "num_requests": workload.num_requests,
        "num_tokens": num_tokens,
        "tokens_per_s": num_tokens / slowest.makespan_s,
        "per_device_tokens_per_s": num_tokens / slowest.makespan_s / case.data_parallel_size,
        "lost_tokens": parts.lost_tokens,
        "makespans_s": [report.makespan_s for report in reports],
    }


def _disaggregated(case: Case, workload: Workload, plan: Plan, seed: int) -> Row:
    """Prefill and decode on devices of their own, each with an equal slice of the requests; transfers are free.

    The two stages run at the same time; the job ends with the slower one.
    """
    times: dict[str, float] = {}
    stages: list[tuple[Literal["prefill", "decode"], int]] = [
        ("prefill", case.prefill_replicas),
        ("decode", case.decode_replicas),
    ]
    for stage, replicas in stages:
        chosen = np.arange(0, workload.num_requests, replicas, dtype=np.int32)
        output_tokens = workload.output_tokens[chosen]
        requests, part_plan = plan_workload(
            _subset(workload.requests, chosen), output_tokens, plan.cost_model, case.lengths
        )
        executor = SimulatedExecutor(plan.cost_model, output_tokens=output_tokens, stage=stage)
        hardware = plan.cost_model.hardware
        config = SchedulerConfig(hardware.max_num_seqs, hardware.max_num_batched_tokens)
        policy = make_policy(case.policy, part_plan, seed=seed)
        times[stage] = sum(
            step.stats.duration_s for step in BatchingEngine(executor, config).run(requests, policy)
        )
    makespan_s = max(times.values())
    devices = case.prefill_replicas + case.decode_replicas
    num_tokens = workload.requests.tokens.num_tokens + int(workload.output_tokens.sum(dtype=np.int64))
    return {
        "workload": case.workload,
        "lengths": case.lengths,
        "overlap": "disaggregated",
        "num_requests": workload.num_requests,
        "num_tokens": num_tokens,
        "makespan_s": makespan_s,
        "tokens_per_s": num_tokens / makespan_s,
        "per_device_tokens_per_s": num_tokens / makespan_s / devices,
        "prefill_s": times["prefill"],
        "decode_s": times["decode"],
    }


# -- showing them ----------------------------------------------------------------------------------------------------

TITLES = {
    "fig7": "Throughput by system, Llama-3-8B on one A100",
    "fig8": "Throughput by system, Llama-3-70B on eight A100s",
    "fig9": "Sharing kept by policy",
    "fig10": "Compute and memory over the run, Trace#1",
    "fig11": "65 workloads: throughput over dfs, all overlapped",
    "table3": "Data parallel scaling",
    "fig12": "Other models on one A100",
    "fig13": "Other models on eight A100s",
    "fig14": "Workloads with high output variance",
    "fig15": "What is known about lengths, and how operators overlap",
    "trees": "Prefixes of several levels",
}


def table(rows: list[Row]) -> Table:
    """Every run of a figure, with its gain over overlapped dfs where that was run too."""
    headings = [
        "workload",
        "model",
        "system",
        "lengths",
        "overlap",
        "tokens/s",
        "of optimum",
        "over dfs",
        "sharing kept",
    ]
    cells = []
    for row in rows:
        base = _baseline(rows, row)
        ratio, kept = row.get("optimum_ratio"), row.get("sharing_kept_ratio")
        replicas = row["data_parallel_size"]
        cells.append(
            [
                row["workload"],
                row["model"],
                row["system"] + (f" × {replicas}" if replicas > 1 else ""),
                row["lengths"],
                row["overlap"],
                f"{row['tokens_per_s']:,.0f}",
                f"{ratio:.1%}" if ratio is not None and replicas == 1 else "–",
                f"{row['per_device_tokens_per_s'] / base:.3f}" if base else "–",
                f"{kept:.1%}" if kept is not None else "–",
            ]
        )
    return Table(headings, cells)


def _baseline(rows: list[Row], row: Row) -> float | None:
    """Tokens/s per device of overlapped dfs on the same workload, model and lengths."""
    overlapped = "smooth" if row["hardware"] == PAPER_HARDWARE else "profile"
    setting = overlapped if row["setting"] == "sequential" else row["setting"]
    keys = ("workload", "model", "lengths", "hardware", "tensor_parallel_size")
    for other in rows:
        same = all(other[key] == row[key] for key in keys)
        if (
            same
            and other["system"] == "dfs"
            and other["setting"] == setting
            and other["data_parallel_size"] == 1
        ):
            return float(other["per_device_tokens_per_s"])
    return None


def sections(rows: dict[str, list[Row]]) -> list[Section]:
    """The figures as parts of a report."""
    from blendserve import report

    found = []
    for name, of_figure in rows.items():
        title = TITLES.get(name, name)
        reports = [
            report_of(row) for row in of_figure if "optimum_ratio" in row and row["data_parallel_size"] == 1
        ]
        figures: list[Any] = []
        if name == "fig11":
            figures = [_gain_map(of_figure, policy) for policy in ("dual-scan", "blend")]
        elif name == "table3":
            figures = [_scaling(of_figure)]
        elif name == "fig9":
            figures = [report.sharing_bars(reports, title)]
        elif name in {"fig12", "fig13"}:
            for model in dict.fromkeys(row["model"] for row in of_figure):
                chosen = [report_of(row) for row in of_figure if row["model"] == model]
                figures.append(report.throughput_bars(chosen, model))
        elif name == "fig10":
            figures = [report.over_time(one) for one in reports]
        else:
            figures = [
                report.throughput_bars(reports, title),
                report.loss_bars(reports, "Where the time went"),
                report.calibration(reports, "Output lengths, expected and real"),
            ]
        found.append(Section(f"{name}: {title}", "", figures, table(of_figure)))
    return found


def report_of(row: Row) -> SimulationReport:
    """The report that a row was made of; what else sets the run apart is told behind the policy's name."""
    known = {field.name: row[field.name] for field in fields(SimulationReport)}
    known["policy"] = row["system"].removeprefix("sequential ")
    known["calibration"] = Calibration(**known["calibration"])
    if known["series"] is not None:
        known["series"] = Series(**known["series"])
    return SimulationReport(**known)


def gains(rows: list[Row], policy: str) -> dict[str, float]:
    """Throughput of a policy over overlapped dfs, by workload."""
    return {
        row["workload"]: row["per_device_tokens_per_s"] / base
        for row in rows
        if row["system"] == policy and (base := _baseline(rows, row))
    }


def _gain_map(rows: list[Row], policy: str) -> Any:
    from blendserve import report

    gain = gains(rows, policy)
    densities = sorted({density for density, _ in GRID})
    sharings = sorted({sharing for _, sharing in GRID})
    values = [[gain.get(f"grid-{d:g}-{s:g}", float("nan")) for d in densities] for s in sharings]
    return report.heat_map(
        values,
        densities,
        sharings,
        title=f"{policy}: {TITLES['fig11']}",
        x_title="density ρ",
        y_title="sharing ratio s",
    )


def _scaling(rows: list[Row]) -> Any:
    from blendserve import report

    series: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        series.setdefault(f"{row['workload']} {row['policy']}", []).append(
            (row["data_parallel_size"], row["tokens_per_s"])
        )
    return report.scaling_lines(series, TITLES["table3"], "replicas", "tokens/s")
