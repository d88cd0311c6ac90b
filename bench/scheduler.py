"""Time of one scheduler step (schedule and update, policy included) with 512 running sequences.

    python bench/scheduler.py [--requests 400000] [--policies dfs,dual-scan,blend] [--jobs one-kind,two-kinds]

Of one kind there is nothing to blend; of two kinds a tenth are long outputs, which hold most of the memory.
Every step of the job counts until none waits any more, those in which the policy plans anew too. The paper reports
0.08 ms on average and 0.23 ms at the 99th percentile for its runtime prefix-tree operation.
Prints a table; the last line of standard output is the same as JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time

import numpy as np

from blendserve.cost_model import CostModel, HardwareSpec
from blendserve.engines.simulated import SimulatedExecutor
from blendserve.planner.plan import make_plan
from blendserve.request import RequestTable, SamplingParams
from blendserve.scheduling.policies import PolicyName, make_policy
from blendserve.scheduling.scheduler import Scheduler, SchedulerConfig
from blendserve.tokens import PromptTokens
from blendserve.workloads import PAPER_MODELS

NUM_RUNNING = 512
WARM_UP_STEPS = 500
"""steps in which memory fills and code is compiled"""


LONG_SHARE = {"one-kind": 0.0, "two-kinds": 0.1}


def job(num_requests: int, long_share: float = 0.0, seed: int = 0) -> tuple[RequestTable, np.ndarray]:
    """Prompts of 50 to 400 tokens, every third behind one of 50 prefixes of 600; outputs of 1 to 500 tokens.

    Those of a long output have another 12 tokens in common, and 1,500 to 3,000 to generate.
    """
    rng = np.random.default_rng(seed)
    prefixes = rng.integers(0, 100_000, (50, 600)).astype(np.uint32)
    prompts = [
        rng.integers(0, 100_000, length).astype(np.uint32) for length in rng.integers(50, 400, num_requests)
    ]
    prompts = [np.concatenate((prefixes[i % 50], p)) if i % 3 == 0 else p for i, p in enumerate(prompts)]
    output = rng.integers(1, 500, num_requests).astype(np.int32)
    is_long = np.zeros(num_requests, dtype=np.bool_)
    if long_share:
        is_long = rng.random(num_requests) < long_share
        output[is_long] = rng.integers(1500, 3000, int(is_long.sum()))
        system_prompt = rng.integers(0, 100_000, 12).astype(np.uint32)
        for i in np.flatnonzero(is_long).tolist():
            prompts[i] = np.concatenate((system_prompt, prompts[i][-38:]))
    lengths = np.array([len(p) for p in prompts], dtype=np.int32)
    starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)[:-1]))
    table = RequestTable(
        tokens=PromptTokens(np.concatenate(prompts), starts, lengths),
        max_tokens=np.where(is_long, 4096, 512).astype(np.int32),
        declared_tokens=np.zeros(num_requests, dtype=np.int32),
        params=[SamplingParams()],
        params_index=np.zeros(num_requests, dtype=np.int32),
        seeds=np.zeros(num_requests, dtype=np.uint64),
    )
    return table, output


def measure(
    policy_name: PolicyName, job_name: str, num_requests: int, *, with_block_tables: bool
) -> dict[str, float | str | bool]:
    cost_model = CostModel(PAPER_MODELS["llama-3-8b"], HardwareSpec.load("a100-80g-paper"))
    requests, output = job(num_requests, LONG_SHARE[job_name])
    plan = make_plan(requests, cost_model)
    block_size, num_blocks = 16, 30_000
    scheduler = Scheduler(
        requests,
        make_policy(policy_name, plan),
        SchedulerConfig(NUM_RUNNING, 2048),
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=8192,
        with_block_tables=with_block_tables,
        cost_model=cost_model,
    )
    executor = SimulatedExecutor(cost_model, output_tokens=output)
    executor.start(requests)
    spent, running = [], []
    for step in itertools.count():
        started = time.perf_counter()
        batch = scheduler.schedule()
        scheduled = time.perf_counter()
        result = executor.execute(batch)
        executed = time.perf_counter()
        scheduler.update(batch, result.finished, result.duration_s)
        if step >= WARM_UP_STEPS:
            spent.append(scheduled - started + time.perf_counter() - executed)
            running.append(scheduler.num_running)
        if scheduler.num_waiting == 0:
            break
    milliseconds = np.array(spent) * 1e3
    return {
        "job": job_name,
        "policy": policy_name,
        "block_tables": with_block_tables,
        "requests": num_requests,
        "steps": len(spent),
        "mean_running": float(np.mean(running)),
        "mean_ms": float(milliseconds.mean()),
        "p50_ms": float(np.percentile(milliseconds, 50)),
        "p99_ms": float(np.percentile(milliseconds, 99)),
        "max_ms": float(milliseconds.max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=400_000)
    parser.add_argument("--policies", default="dfs,dual-scan,blend")
    parser.add_argument("--jobs", default=",".join(LONG_SHARE))
    args = parser.parse_args()
    rows = [
        measure(policy, job_name, args.requests, with_block_tables=tables)
        for job_name in args.jobs.split(",")
        for policy in args.policies.split(",")
        for tables in (True, False)
    ]
    print("job | policy | block tables | running | mean ms | P50 ms | P99 ms | max ms")
    for row in rows:
        print(
            f"{row['job']} | {row['policy']} | {row['block_tables']} | {row['mean_running']:.0f} | "
            f"{row['mean_ms']:.3f} | {row['p50_ms']:.3f} | {row['p99_ms']:.3f} | {row['max_ms']:.0f}"
        )
    print(json.dumps({"rows": rows, "paper": {"mean_ms": 0.08, "p99_ms": 0.23}}))


if __name__ == "__main__":
    main()
