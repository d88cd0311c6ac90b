"""What each rule of `blend` is worth, and how its result depends on device, budget, memory and knowledge. Simulated.

    python bench/blend_rules.py rules [--requests 200000] [--traces trace1,trace2,trace3,trace4]
    python bench/blend_rules.py sensitivity [--requests 200000] [--traces trace2]
    python bench/blend_rules.py declared [--requests 200000] [--traces trace2]

`rules` switches off one rule at a time; `declared` is about output lengths that users declare, right or wrong. Prints
the share of the practical optimum; the last line of standard output is the same as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np

from blendserve.cost_model import CostModel, Overlap
from blendserve.experiments import paper_hardware
from blendserve.planner.length_curves import LengthCurves
from blendserve.planner.plan import PlanConfig, make_plan
from blendserve.scheduling import blend
from blendserve.scheduling.blend import Blend
from blendserve.simulator import Lengths, SimulationReport, plan_workload, simulate
from blendserve.workloads import PAPER_MODELS, Workload, named_workload

MODEL = PAPER_MODELS["llama-3-8b"]
BASE = paper_hardware(MODEL, "smooth")
NOBODY = np.empty(0, dtype=np.int32)

Declare = Callable[[Any, Any, np.random.Generator], Any]
"""actual lengths, `max_tokens` and a source of chance to declared lengths"""


def off_by(sigma: float, bias: float = 1.0) -> Declare:
    """Declared lengths that are off by a factor of `bias` and a log-normal one."""
    return lambda actual, _most, rng: actual * bias * np.exp(rng.normal(0.0, sigma, len(actual)))


original_balance = Blend._balance
original_refresh = LengthCurves.refresh


def _without_reserve(policy: Blend, control: Any) -> None:
    original_balance(policy, control)
    policy._reserve = 0.0


def _with_certain_ends(curves: LengthCurves, classes: Any, generated: Any) -> None:
    """Every request lives for exactly as long as it is expected to."""
    original_refresh(curves, classes, generated)
    points, alive, left, _ = curves.tables
    alive[:] = points < left[:, :, None]


def _plain_ratio(
    tokens: float, reads: float, memory: float, _projection: Any, _alive: Any, _points: Any, lines: Any
) -> float:
    """Tokens over reads of all that remains, as if every step were like the next."""
    steps = max(reads / max(memory, 1.0), 1.0)
    compute_s = lines.compute_fixed_s * steps + lines.compute_s_per_token * tokens
    return float(compute_s / (lines.memory_fixed_s * steps + lines.memory_s_per_read * reads))


RULES: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "all rules": contextlib.nullcontext,
    "no token target: full budget": lambda: patch.object(
        Blend, "_target", lambda _policy, control: control.max_num_batched_tokens
    ),
    "no reserve for LEFT": lambda: patch.object(Blend, "_balance", _without_reserve),
    "running requests not censored": lambda: patch.object(
        LengthCurves,
        "refresh",
        lambda curves, _classes, _generated: original_refresh(curves, NOBODY, NOBODY),
    ),
    "certain ends instead of survival": lambda: patch.object(LengthCurves, "refresh", _with_certain_ends),
    "no water-filling of the run-down": lambda: patch.object(blend, "_level", _plain_ratio),
    "no shift by the error of the ratio": lambda: patch.object(
        blend, "_towards_one", lambda ratio, _error: ratio
    ),
    "RIGHT in tree order, not longest first": lambda: patch.object(
        Blend, "_longest_first", lambda _policy, requests, _unit, _sampled: requests
    ),
    "LEFT in one part": lambda: patch.object(blend, "LEFT_CHUNKS", 1),
    "no retraction for LEFT": lambda: patch.object(blend, "MAX_RECOMPUTE_RATIO", 0.0),
    "order not renewed when curves move": lambda: patch.object(
        Blend, "_drifted", lambda _policy: False
    ),
}  # fmt: skip


def run(
    workload: Workload,
    cost_model: CostModel,
    policy: Any = "blend",
    lengths: Lengths = "sampled",
    *,
    config: PlanConfig | None = None,
    declare: Declare | None = None,
    declared_ratio: float = 1.0,
    kv_cache_tokens: int | None = None,
) -> SimulationReport:
    """One run; with `declare`, such a share of the requests declares what it makes of actual lengths."""
    if declare is None:
        requests, plan = plan_workload(workload.requests, workload.output_tokens, cost_model, lengths, config)
    else:
        rng = np.random.default_rng(1)
        declared = declare(workload.output_tokens.astype(np.float64), workload.requests.max_tokens, rng)
        declared = np.clip(declared, 1, workload.requests.max_tokens)
        declared[np.random.default_rng(2).random(len(declared)) >= declared_ratio] = 0
        requests = replace(workload.requests, declared_tokens=declared.astype(np.int32))
        plan = make_plan(requests, cost_model, config or PlanConfig())
    return simulate(
        workload.name,
        requests,
        workload.output_tokens,
        plan,
        policy,
        cost_model,
        lengths=lengths,
        kv_cache_tokens=kv_cache_tokens,
    )


def row_of(case: str, workload: Workload, report: SimulationReport) -> dict[str, Any]:
    """What is printed of a run under `blend`."""
    return {
        "case": case,
        "workload": workload.name,
        "policy": "blend",
        "optimum_ratio": report.optimum_ratio,
        "recomputed_ratio": report.recomputed_ratio,
    }


def rules(workloads: list[Workload]) -> Iterator[dict[str, Any]]:
    """Every rule switched off, on every workload."""
    cost_model = CostModel(MODEL, BASE)
    for name, without in RULES.items():
        with without():
            for workload in workloads:
                yield row_of(name, workload, run(workload, cost_model))


def sensitivity(workloads: list[Workload]) -> Iterator[dict[str, Any]]:
    """One thing changed at a time, under three policies."""
    capacity = CostModel(MODEL, BASE).kv_capacity_tokens
    cases: dict[str, dict[str, Any]] = {"as in the figures": {}}
    for overlap in (
        Overlap("p_norm", 1.5), Overlap("p_norm", 4.0), Overlap("max_plus_min", 0.2), Overlap("max_plus_min", 0.5)
    ):  # fmt: skip
        cases[f"overlap {overlap.kind} {overlap.parameter:g}"] = {"hardware": replace(BASE, overlap=overlap)}
    for budget in (512, 2048, 4096):
        cases[f"{budget} tokens a step"] = {"hardware": replace(BASE, max_num_batched_tokens=budget)}
    for factor in (0.5, 2.0):
        cases[f"memory × {factor:g}"] = {"kv_cache_tokens": int(factor * capacity)}
    for ratio, least in ((0.002, 8), (0.05, 128)):
        config = PlanConfig(sample_ratio=ratio, min_samples_per_subtree=least)
        cases[f"sample {ratio:.1%}, at least {least}"] = {"config": config}
    cases["lengths known"] = {"lengths": "known"}
    for error in (0.25, 0.5, 1.0):
        cases[f"lengths declared, off by exp(N(0, {error:g}))"] = {
            "lengths": "known",
            "declare": off_by(error),
        }
    cases["nothing known"] = {"lengths": "none"}
    for name, changes in cases.items():
        cost_model = CostModel(MODEL, changes.get("hardware", BASE))
        rest = {key: value for key, value in changes.items() if key != "hardware"}
        for workload in workloads:
            for policy in ("dfs", "dual-scan", "blend"):
                report = run(workload, cost_model, policy, **rest)
                yield {
                    "case": name,
                    "workload": workload.name,
                    "policy": policy,
                    "optimum_ratio": report.optimum_ratio,
                    "recomputed_ratio": report.recomputed_ratio,
                }


def declared(workloads: list[Workload]) -> Iterator[dict[str, Any]]:
    """What declared lengths are worth to `blend`."""
    cases: dict[str, dict[str, Any]] = {
        "nothing declared": {"lengths": "none"},
        "exact": {"lengths": "known"},
    }
    for error in (0.25, 0.5, 1.0, 1.5):
        cases[f"off by exp(N(0, {error:g}))"] = {"declare": off_by(error)}
    for bias in (0.5, 2.0):
        cases[f"all times {bias:g}"] = {"declare": off_by(0.0, bias)}
        cases[f"all times {bias:g} exp(N(0, 0.5))"] = {"declare": off_by(0.5, bias)}
    for error in (0.0, 0.5, 1.0):
        cases[f"every second request, off by exp(N(0, {error:g}))"] = {
            "declare": off_by(error),
            "declared_ratio": 0.5,
        }
    cases["half exact, half off by exp(N(0, 1))"] = {
        "declare": lambda actual, most, rng: np.where(
            rng.random(len(actual)) < 0.5, actual, off_by(1.0)(actual, most, rng)
        )
    }
    cases["somebody else's"] = {"declare": lambda actual, _most, rng: rng.permutation(actual)}
    cases["256 of all"] = {"declare": lambda actual, _most, _rng: np.full(len(actual), 256.0)}
    cases["max_tokens of all"] = {"declare": lambda _actual, most, _rng: most.astype(np.float64)}
    cost_model = CostModel(MODEL, BASE)
    for name, changes in cases.items():
        for workload in workloads:
            yield row_of(name, workload, run(workload, cost_model, **{"lengths": "known", **changes}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", choices=("rules", "sensitivity", "declared"))
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--traces", default="")
    arguments = parser.parse_args()
    study, default = {
        "rules": (rules, "trace1,trace2,trace3,trace4"),
        "sensitivity": (sensitivity, "trace2"),
        "declared": (declared, "trace2"),
    }[arguments.study]
    peak = CostModel(MODEL, BASE)
    names = (arguments.traces or default).split(",")
    workloads = [named_workload(name, arguments.requests, 0, peak) for name in names]
    rows = []
    print("case | workload | policy | of optimum | recomputed")
    for row in study(workloads):
        rows.append(row)
        print(
            f"{row['case']} | {row['workload']} | {row['policy']} | {row['optimum_ratio']:.1%} | "
            f"{row['recomputed_ratio']:.2%}",
            flush=True,
        )
    print(json.dumps({"study": arguments.study, "requests": arguments.requests, "rows": rows}))


if __name__ == "__main__":
    main()
