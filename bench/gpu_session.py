"""One session on one GPU: what overlap of products and decode attention is worth there, unattended.

    python bench/gpu_session.py --out DIR [--budget-s 480] [--only pair,stack] [--dry-run]

Runs the sections of `blendserve profile --device cuda` on a model of Llama-3.1-8B's sizes with random weights, and then
whole jobs: one mix of requests under several policies, with and without overlap, each beside what the simulator says
from the profile that was just measured. Never takes longer than the budget. In DIR: `profile.json`, rewritten as
results come (a table per section), `hardware.json` (for `--hardware`), `session.log`, `errors.txt`, `clocks.csv`.

Prints progress, then a table and what was aimed at; the last line of standard output is JSON. `--dry-run` walks through
all of it on a CPU in a minute or two, with tiny sizes, a section that fails and a process that hangs; its figures mean
nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mixes import Kind, job

from blendserve.cost_model import CostModel, HardwareSpec, Overlap
from blendserve.engines import EngineConfig
from blendserve.engines.batching import BatchingEngine
from blendserve.engines.native.session import (
    GPU_SECTIONS,
    OPEN_SUBJECT,
    Row,
    Section,
    Session,
    SessionConfig,
    supervise,
)
from blendserve.engines.profile import hardware_of_session
from blendserve.errors import ConfigError
from blendserve.models import ModelFiles, ModelSpec
from blendserve.planner.plan import Plan
from blendserve.request import RequestTable, SamplingParams
from blendserve.scheduling.policies import PolicyName, make_policy
from blendserve.scheduling.scheduler import SchedulerConfig
from blendserve.simulator import plan_workload, simulate

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
TINY = LLAMA_8B | {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}
END_TO_END = "end_to_end"
END_TO_END_S = 190.0

LONG_RATIO = 0.03
"""of the requests, those that read much: answers about documents; the others are short questions"""
MAX_REQUESTS, MIN_REQUESTS, PILOT_REQUESTS = 40_000, 200, 4000
PREPARATION_S = 300.0
"""until a plan and its simulation are there, if numba has to compile them first"""
SLACK = 1.6
"""a run is stopped after so many times what was expected"""


class Run(NamedTuple):
    """A whole job."""

    policy: PolicyName
    is_overlapped: bool

    @property
    def label(self) -> str:
        """Of the run in tables."""
        return f"{self.policy} {'overlapped' if self.is_overlapped else 'sequential'}"


RUNS = (
    Run("blend", True),
    Run("dfs", False),
    Run("dfs", True),
    Run("blend", False),
    Run("random", False),
    Run("random", True),
)
"""in order of value: the first two are what is aimed at"""


# -------- whole jobs --------


def kinds(num_requests: int, *, is_tiny: bool = False) -> list[Kind]:
    """A mix in which compute and memory take about as long, on an H200: about 37 tokens computed per request."""
    num_long = max(round(LONG_RATIO * num_requests), 1)
    if is_tiny:
        return [Kind(num_requests - num_long, 20, 1, 3, 2, 0.1), Kind(num_long, 40, 1, 2, 4, 0.1)]
    # Prefixes in whole blocks of 64 tokens, as half a block is computed by each request again.
    documents = max(num_long // 40, 1)
    return [
        Kind(num_requests - num_long, 704, 57, 20, 2, 0.1),
        Kind(num_long, 2560, documents, 20, 250, 0.35),
    ]


@cache
def requests_of(num_requests: int, vocab_size: int, is_tiny: bool) -> tuple[RequestTable, np.ndarray]:
    """The mix, with exact lengths, and those."""
    requests, output_tokens = job(kinds(num_requests, is_tiny=is_tiny))
    requests.tokens.data[:] %= vocab_size
    params = [SamplingParams(temperature=0.0, ignore_eos=True)]
    return replace(requests, max_tokens=output_tokens, params=params), output_tokens


def sequential(hardware: HardwareSpec) -> HardwareSpec:
    """The same device for an engine that runs one operator after the other."""
    return replace(hardware, overlap=Overlap(), partitions=(), split_overhead=0.0)


def measured_hardware(profile: dict[str, Any], model: ModelSpec, base: HardwareSpec) -> HardwareSpec:
    """What the session has found, or where that is too little, the estimate."""
    try:
        return hardware_of_session(profile, model, base).hardware
    except ConfigError as error:
        print(f"no profile from this session ({error}); going on with {base.name}", flush=True)
        return base


def end_to_end(session: Session, subject: Any) -> None:
    """The section: the same requests under every policy, with and without overlap."""
    executor, is_tiny = subject.executor, session.config.dry_run
    model = executor.cost_model.model
    base = executor.cost_model.hardware
    hardware = measured_hardware(session.profile, model, base)
    session.profile["fixed"]["end_to_end_hardware"] = hardware.provenance
    lanes = subject.open_lanes(hardware)
    cost_models = {
        True: CostModel(model, hardware),
        False: CostModel(model, sequential(hardware)),
    }
    session.mark(None, time.time() + PREPARATION_S)
    # Sequential runs take their slice of the time, the others less; a sixth is for planning and what is unforeseen.
    slice_s = session.budget.left_s / len(RUNS) * 5 / 6
    num_requests = min(requests_in(slice_s, cost_models[False], is_tiny), 8 if is_tiny else MAX_REQUESTS)
    session.log(f"{num_requests:,} requests, {len(lanes)} partitions to overlap in")
    requests, output_tokens = requests_of(num_requests, model.vocab_size, is_tiny)
    slowdown = 1.0  # of runs so far, over what was predicted
    for run in RUNS:
        cost_model = cost_models[run.is_overlapped]
        session.mark(None, time.time() + PREPARATION_S)
        known, plan = plan_workload(requests, output_tokens, cost_model, "known")
        predicted = simulate(
            "mix",
            known,
            output_tokens,
            plan,
            run.policy,
            cost_model,
            lengths="known",
            kv_cache_tokens=executor.num_blocks * executor.block_size,
        )
        executor.set_overlap(cost_model, lanes if run.is_overlapped else {})
        expected_s = 1.0 if is_tiny else predicted.makespan_s * slowdown
        row = session.point(
            run.label,
            expected_s,
            lambda known=known, plan=plan, run=run, expected_s=expected_s: run_job(
                executor, known, plan, run.policy, expected_s * SLACK + 30.0
            ),
            hang_s=expected_s * SLACK + 120.0,
            policy=run.policy,
            is_overlapped=run.is_overlapped,
            num_requests=num_requests,
            predicted_s=predicted.makespan_s,
            predicted_tokens_per_s=predicted.tokens_per_s,
        )
        if row is not None:
            slowdown = max(row["wall_s"] / predicted.makespan_s, 0.5)
            session.log(
                f"{run.label}: {row['tokens_per_s']:,.0f} tokens/s in {row['wall_s']:.1f} s, predicted "
                f"{row['predicted_tokens_per_s']:,.0f}"
            )
    executor.set_overlap(CostModel(model, base), {})


def requests_in(seconds: float, cost_model: CostModel, is_tiny: bool) -> int:
    """How many requests of the mix take so long, one operator after the other."""
    requests, output_tokens = requests_of(PILOT_REQUESTS, cost_model.model.vocab_size, is_tiny)
    _, plan = plan_workload(requests, output_tokens, cost_model, "known")
    per_request_s = (plan.compute_s() + plan.memory_s()) / PILOT_REQUESTS
    return max(int(seconds / per_request_s), MIN_REQUESTS)


def run_job(executor: Any, requests: RequestTable, plan: Plan, policy: PolicyName, limit_s: float) -> Row:
    """Run all requests, or as many as can be had in so many seconds."""
    hardware = plan.cost_model.hardware
    engine = BatchingEngine(executor, SchedulerConfig(hardware.max_num_seqs, hardware.max_num_batched_tokens))
    began_s = time.perf_counter()
    steps = prefill = decode = kv_read = cached = tokens = overlapped = 0
    is_cut = False
    for step in engine.run(requests, make_policy(policy, plan)):
        stats = step.stats
        steps += 1
        prefill += stats.num_prefill_tokens
        decode += stats.num_decode_tokens
        kv_read += stats.kv_tokens_read
        overlapped += plan.cost_model.best_partition(stats.compute_s, stats.memory_s) is not None
        for _, result in step.results:
            tokens += result.num_prompt_tokens + result.num_output_tokens
            cached += result.num_cached_tokens
        is_cut = time.perf_counter() - began_s > limit_s
        if is_cut:
            break
    wall_s = time.perf_counter() - began_s
    return {
        "wall_s": wall_s,
        "tokens_per_s": tokens / wall_s,
        "computed_tokens_per_s": (prefill + decode) / wall_s,
        "num_steps": steps,
        "overlapped_ratio": overlapped / steps,
        "kv_tokens_read": kv_read,
        "cached_tokens": cached,
        "is_cut": is_cut,
    }


def compile_scheduler(model: ModelSpec, hardware: HardwareSpec) -> None:
    """Have numba's code ready, while the GPU does something else."""
    requests, output_tokens = requests_of(50, model.vocab_size, True)
    cost_model = CostModel(model, sequential(hardware))
    known, plan = plan_workload(requests, output_tokens, cost_model, "known")
    for policy in sorted({run.policy for run in RUNS}):
        simulate("warm-up", known, output_tokens, plan, policy, cost_model, lengths="known")


# -------- dry run --------


def failing(_session: Session, _subject: Any) -> None:
    """A section that fails."""
    raise ValueError("this section fails on purpose")


def hanging(session: Session, _subject: Any) -> None:
    """A section with a point in which the worker hangs, once."""
    session.point("before", 0.1, lambda: {"value": 1})
    session.point("hang", 0.1, lambda: {"value": time.sleep(3600)}, hang_s=2.0)
    session.point("after", 0.1, lambda: {"value": 2})


def too_long(session: Session, _subject: Any) -> None:
    """A section with a point that there is no time for."""
    session.point("fits", 1.0, lambda: {"value": 1})
    session.point("does not fit", 1e6, lambda: {"value": 2})


def sections_of(*, is_dry: bool) -> dict[str, Section]:
    """All sections in order of value."""
    sections = {}
    for name, section in GPU_SECTIONS.items():
        if name == "small":
            sections[END_TO_END] = Section("gpu_session:end_to_end", END_TO_END_S)
        sections[name] = section
    if is_dry:
        for name in ("failing", "hanging", "too_long"):
            sections[name] = Section(f"gpu_session:{name}", 2.0)
    return sections


# -------- report --------


def targets(profile: dict[str, Any]) -> list[tuple[str, float, float | None]]:
    """(what, aim, measured); None: not measured."""
    top = profile.get("ceilings", {})
    copy = top.get("copy", {}).get("gbps")
    product = top.get("product", {}).get("tflops")
    num_sms = profile["meta"].get("num_sms")
    rows = [row for row in profile.get("attention", {}).values() if row.get("sm") == num_sms]
    read = max((row["gbps"] for row in rows), default=None)
    chains = [
        row["tflops"]
        for row in profile.get("gemm", {}).values()
        if row["product"] == "chain" and row["sm"] == num_sms and row["num_tokens"] >= 1024
    ]
    runs = profile.get(END_TO_END, {})
    blended, plain = runs.get(Run("blend", True).label), runs.get(Run("dfs", False).label)
    gain = None
    if blended and plain and not blended["is_cut"] and not plain["is_cut"]:
        gain = plain["wall_s"] / blended["wall_s"]
    return [
        ("overlapped over sequential, steps of density 0.7 to 1.5", 1.15, best_stack_gain(profile)),
        ("decode attention over copy bandwidth", 0.80, read / copy if read and copy else None),
        ("products of a layer over the ceiling", 0.85, max(chains) / product if chains and product else None),
        ("blended and overlapped over dfs and sequential", 1.30, gain),
    ]


def stack_points(profile: dict[str, Any]) -> list[Row]:
    """Of each size of step: density by the parts alone, milliseconds whole, in halves, and overlapped at best."""
    alone: dict[str, Any] = {}
    for row in profile.get("gemm", {}).values():
        if row["product"] == "chain" and row["sm"] == profile["meta"]["num_sms"]:
            alone[row["num_tokens"]] = row["us"]
    pair = [row for label, row in profile.get("pair", {}).items() if label.startswith("alone")]
    kv_gb = next((row["kv_gb"] for row in profile.get("pair", {}).values() if "kv_gb" in row), None)
    found: dict[tuple[int, int], Row] = {}
    for row in profile.get("stack", {}).values():
        key = (row["num_tokens"], round(row["kv_tokens_read"] / 1e4))
        point = found.setdefault(key, {"num_tokens": key[0], "kv_tokens_read": row["kv_tokens_read"]})
        ms = row["duration_s"] * 1e3
        if row["mode"] in {"whole", "halves"}:
            point[row["mode"]] = ms
        elif ms < point.get("overlapped", float("inf")):
            point |= {"overlapped": ms, "mode": row["mode"]}
        if pair and kv_gb and key[0] in alone:
            layer_gb = row["kv_tokens_read"] * profile["meta"]["layer_kv_bytes"] / 1e9
            point["density"] = alone[key[0]] / (pair[0]["attention_us"] * layer_gb / kv_gb)
    for point in found.values():
        if "whole" in point and "overlapped" in point:
            point["gain"] = point["whole"] / point["overlapped"]
    return list(found.values())


def best_stack_gain(profile: dict[str, Any]) -> float | None:
    """Median gain over steps whose density is from 0.7 to 1.5."""
    gains = [p["gain"] for p in stack_points(profile) if "gain" in p and 0.7 <= p.get("density", 0.0) <= 1.5]
    return float(np.median(gains)) if gains else None


def report(profile: dict[str, Any]) -> str:
    """A table of what a session has found."""

    def shown(value: Any, form: str) -> str:
        return format(value, form) if isinstance(value, int | float) else "-"

    meta, top = profile["meta"], profile.get("ceilings", {})
    lines = [
        f"{meta.get('device')}, {meta.get('num_sms')} SMs, {meta.get('dtype')}, {meta.get('wall_s')} s",
        f"copy {shown(top.get('copy', {}).get('gbps'), ',.0f')} GB/s, product "
        f"{shown(top.get('product', {}).get('tflops'), ',.0f')} TFLOP/s",
    ]
    for label, row in profile.get("probes", {}).items():
        if label.startswith("split"):
            lines.append(
                f"{label}: {row['sm_attention']}+{row['sm_gemm']} SMs, disjoint {row['are_disjoint']}, isolation "
                f"{row['isolation']:.2f}, serialization {row['serialization']:.2f}, ok {row['ok']}"
            )
    for label, row in profile.get("pair", {}).items():
        if "gemm_rate" in row:
            lines.append(
                f"pair {label}: products {shown(row['gemm_rate'], '.2f')} + attention "
                f"{shown(row['attention_rate'], '.2f')} of their speed alone"
            )
    lines += [
        f"step {point['num_tokens']} tokens, {point['kv_tokens_read']:,} read, density "
        f"{shown(point.get('density'), '.2f')}: whole {shown(point.get('whole'), '.2f')} ms, halves "
        f"{shown(point.get('halves'), '.2f')}, overlapped {shown(point.get('overlapped'), '.2f')} "
        f"({point.get('mode', '-')}): {shown(point.get('gain'), '.3f')}x"
        for point in stack_points(profile)
    ]
    for label, row in profile.get(END_TO_END, {}).items():
        lines.append(
            f"{label}: {row['tokens_per_s']:,.0f} tokens/s, simulated {row['predicted_tokens_per_s']:,.0f}; "
            f"{row['wall_s']:.1f} s, simulated {row['predicted_s']:.1f}; {row['overlapped_ratio']:.0%} of steps "
            "overlapped" + (", not to its end" if row["is_cut"] else "")
        )
    for name, aim, value in targets(profile):
        reached = "-" if value is None else "reached" if value >= aim else "missed"
        lines.append(f"aim {name}: {shown(value, '.3f')} of {aim:.2f}, {reached}")
    lines.append("sections " + ", ".join(f"{name} {e['status']}" for name, e in profile["sections"].items()))
    lines.append(
        f"{len(profile.get('errors', []))} errors, {len(profile.get('skipped', []))} points skipped, "
        f"{len(profile.get('losses', []))} workers lost"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for what is found")
    parser.add_argument("--budget-s", type=float, default=480.0, help="seconds for all of it")
    parser.add_argument("--only", default="", help="sections to run, separated by commas")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU")
    arguments = parser.parse_args()
    sections = sections_of(is_dry=arguments.dry_run)
    only = tuple(name for name in arguments.only.split(",") if name)
    if unknown := set(only) - set(sections):
        parser.error(f"--only: no {', '.join(sorted(unknown))}; there are {', '.join(sections)}")
    if only:
        only = ("probes", *only)  # which say what can be split
    config = TINY if arguments.dry_run else LLAMA_8B
    folder = arguments.out.resolve() / "model"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    files = ModelFiles("tiny" if arguments.dry_run else "llama-3.1-8b", folder, dict(config))
    engine = EngineConfig(device="cuda", max_num_batched_tokens=2048)
    if arguments.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything loads Triton
        engine = EngineConfig(
            device="cpu",
            dtype="float32",
            hardware="cpu-2core-avx2",
            block_size=16,
            kv_cache_memory=1 << 19,
            max_num_seqs=8,
            max_num_batched_tokens=32,
        )
    base = engine.hardware_spec()
    model = engine.cost_model(files).model
    warm_up = multiprocessing.get_context("spawn").Process(
        target=compile_scheduler, args=(model, base), daemon=True
    )
    if END_TO_END in (only or sections):
        warm_up.start()
    session = SessionConfig(
        arguments.out.resolve(),
        arguments.budget_s,
        only,
        arguments.dry_run,
        {"engine": engine, "files": files},
    )
    profile = supervise(session, sections, OPEN_SUBJECT)
    print(report(profile), flush=True)
    summary: dict[str, Any] = {"targets": targets(profile), "sections": profile["sections"]}
    try:
        name = (
            "dry-run"
            if arguments.dry_run
            else f"{profile['meta'].get('device', 'gpu')}".lower().replace(" ", "-")
        )
        fit = hardware_of_session(profile, model, replace(base, name=name))
        provenance = (
            f"measured: {profile['meta']['device']}, {profile['meta']['dtype']}, {files.name} with random weights; "
            f"mean error of steps {fit.mean_error_ratio:.1%} (bench/gpu_session.py, {profile['meta']['date']})"
        )
        hardware = replace(fit.hardware, provenance=provenance)
        hardware.save(arguments.out / "hardware.json")
        HardwareSpec.load(str(arguments.out / "hardware.json"))
        summary |= {
            "hardware": str(arguments.out / "hardware.json"),
            "mean_error_ratio": fit.mean_error_ratio,
        }
        print(f"profile written to {arguments.out / 'hardware.json'}")
    except (ConfigError, KeyError) as error:
        print(f"no hardware profile: {error}", flush=True)
    print(json.dumps(summary))
    sys.exit(0 if profile["sections"] else 1)


if __name__ == "__main__":
    main()
