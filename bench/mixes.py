"""Policies on small mixes outside the paper's, simulated: where blending can lose, does it?

    python bench/mixes.py [--mixes only-chat,rag]

Prints makespans relative to overlapped `dfs` on the same device; the last line of standard output is the same as JSON.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from blendserve.cost_model import CostModel, HardwareSpec, Overlap
from blendserve.request import RequestTable, SamplingParams
from blendserve.scheduling.policies import PolicyName
from blendserve.simulator import LENGTHS, plan_workload, simulate
from blendserve.tokens import PromptTokens
from blendserve.workloads import PAPER_MODELS

POLICIES: tuple[PolicyName, ...] = ("dfs", "longest-first-dfs", "dual-scan", "blend")
MAX_TOKENS = 8192


class Kind(NamedTuple):
    """Requests of one kind; lengths in tokens, spread lognormally."""

    count: int
    prefix: int
    num_prefixes: int
    own_prompt: int
    output: int
    output_sigma: float


MIXES = {
    "only-benchmark": [Kind(8000, 700, 57, 100, 2, 0.1)],
    "only-chat": [Kind(6000, 10, 1, 400, 400, 1.2)],
    "only-long": [Kind(400, 10, 1, 100, 4000, 0.5)],
    "many-prefixes": [Kind(6000, 1500, 300, 100, 200, 0.6)],
    "two-close": [Kind(3000, 10, 1, 300, 300, 1.0), Kind(3000, 10, 1, 600, 150, 1.0)],
    "documents": [Kind(4000, 3000, 400, 60, 150, 0.8), Kind(100, 10, 1, 100, 3000, 0.6)],
    "three-kinds": [
        Kind(6000, 700, 57, 100, 5, 0.3),
        Kind(6000, 10, 1, 244, 27, 1.3),
        Kind(150, 10, 1, 120, 4000, 0.5),
    ],
    "small": [Kind(100, 300, 5, 100, 20, 0.5), Kind(30, 10, 1, 100, 1500, 0.5)],
    "tiny": [Kind(12, 300, 3, 100, 20, 0.5), Kind(4, 10, 1, 100, 300, 0.5)],
}
A100 = HardwareSpec.load("a100-80g-paper")
DEVICES = {
    "smooth": (A100.overlap, 1024, None),
    "smooth, small memory": (A100.overlap, 1024, 60_000),
    "kinked": (Overlap("max_plus_min", 0.35), 2048, None),
    "sequential, small memory": (Overlap("sum"), 1024, 60_000),
}


def job(kinds: list[Kind], seed: int = 0) -> tuple[RequestTable, np.ndarray]:
    """Requests of several kinds in random order, and their true output lengths."""
    rng = np.random.default_rng(seed)
    prompts: list[np.ndarray] = []
    outputs: list[int] = []
    for kind in kinds:
        prefixes = rng.integers(0, 100_000, (kind.num_prefixes, kind.prefix)).astype(np.uint32)
        for i in range(kind.count):
            own = max(int(kind.own_prompt * np.exp(rng.normal(0, 0.3))), 1)
            tokens = rng.integers(0, 100_000, own).astype(np.uint32)
            prompts.append(np.concatenate((prefixes[i % kind.num_prefixes], tokens)))
            sigma = kind.output_sigma
            length = int(kind.output * np.exp(rng.normal(-sigma * sigma / 2, sigma)))
            outputs.append(min(max(length, 1), MAX_TOKENS))
    order = rng.permutation(len(prompts))
    lengths = np.array([len(prompts[i]) for i in order], dtype=np.int32)
    starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)[:-1]))
    count = len(prompts)
    table = RequestTable(
        tokens=PromptTokens(np.concatenate([prompts[i] for i in order]), starts, lengths),
        max_tokens=np.full(count, MAX_TOKENS, dtype=np.int32),
        declared_tokens=np.zeros(count, dtype=np.int32),
        params=[SamplingParams()],
        params_index=np.zeros(count, dtype=np.int32),
        seeds=np.zeros(count, dtype=np.uint64),
    )
    return table, np.array(outputs, dtype=np.int32)[order]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mixes", default=",".join(MIXES))
    names = parser.parse_args().mixes.split(",")
    print("mix | device | lengths | " + " | ".join(f"{p}, x dfs" for p in POLICIES[1:]) + " | sharing kept")
    rows = []
    for name in names:
        requests, outputs = job(MIXES[name])
        for device, (overlap, max_tokens, kv_cache_tokens) in DEVICES.items():
            hardware = replace(A100, overlap=overlap, max_num_batched_tokens=max_tokens, max_num_seqs=512)
            cost_model = CostModel(PAPER_MODELS["llama-3-8b"], hardware)
            for lengths in LENGTHS:
                planned, plan = plan_workload(requests, outputs, cost_model, lengths)
                reports = {
                    policy: simulate(
                        name,
                        planned,
                        outputs,
                        plan,
                        policy,
                        cost_model,
                        lengths=lengths,
                        kv_cache_tokens=kv_cache_tokens,
                    )
                    for policy in POLICIES
                }
                base = reports["dfs"].makespan_s
                speedup = {policy: base / reports[policy].makespan_s for policy in POLICIES}
                kept = reports["blend"].sharing_kept_ratio
                row = {"mix": name, "device": device, "lengths": lengths, **speedup, "sharing_kept": kept}
                rows.append(row)
                shown = " | ".join(f"{speedup[policy]:.3f}" for policy in POLICIES[1:])
                print(f"{name} | {device} | {lengths} | {shown} | {kept:.3f}", flush=True)
    blend = [float(row["blend"]) for row in rows]
    print(f"blend over dfs: lowest {min(blend):.3f}, mean {np.mean(blend):.3f}, highest {max(blend):.3f}")
    print(json.dumps({"rows": rows, "blend_lowest": min(blend), "blend_mean": float(np.mean(blend))}))


if __name__ == "__main__":
    main()
