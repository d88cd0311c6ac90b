"""vLLM's run-batch as it is, with its times and its own counts written down.

    python bench/vllm_run_batch.py FACTS.json WARM_UP.jsonl [options of vllm run-batch …]

First the lines of WARM_UP are run and the prefix cache is reset, so that a process that has just begun is compared with
one that has run before. What is timed is from there, with the model loaded, to the output written. `bench/engines.py`
starts this. Nothing of BlendServe is imported: its compiled code must not be in vLLM's processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil

STARTED_S = time.time()


class EngineCounts:
    """What vLLM's engine core tells of its steps, wherever its client is."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Count from here."""
        self.totals = {
            "steps": 0,
            "prompt_tokens": 0,
            "prefix_hit_tokens": 0,
            "prompt_tokens_computed": 0,
            "output_tokens": 0,
            "tokens_computed": 0,
            "preemptions": 0,
        }
        self.steps: dict[str, list[float]] = {"tokens": [], "kv_used": [], "decode_ratio": [], "s": []}
        """of each step: tokens computed, share of the KV cache in use, share of requests that decode, seconds"""

    def watch(self) -> None:
        """Count whatever vLLM records in this process from now on."""
        from vllm.v1.metrics.loggers import StatLoggerManager

        record = StatLoggerManager.record

        def counted(
            manager: Any, scheduler_stats: Any, iteration_stats: Any, *rest: Any, **named: Any
        ) -> None:
            self._add(scheduler_stats, iteration_stats)
            record(manager, scheduler_stats, iteration_stats, *rest, **named)

        StatLoggerManager.record = counted

    def _add(self, scheduler: Any, iteration: Any) -> None:
        totals = self.totals
        if iteration is not None:
            totals["prompt_tokens"] += iteration.prompt_token_stats.total
            totals["prompt_tokens_computed"] += iteration.prompt_token_stats.computed
            totals["output_tokens"] += iteration.num_generation_tokens
            totals["preemptions"] += iteration.num_preempted_reqs
        if scheduler is None:
            return
        totals["prefix_hit_tokens"] += scheduler.prefix_cache_stats.hits
        details = scheduler.iteration_details
        if details is None:
            return
        num_tokens = details.num_ctx_tokens + details.num_generation_tokens
        num_requests = details.num_ctx_requests + details.num_generation_requests
        totals["steps"] += 1
        totals["tokens_computed"] += num_tokens
        self.steps["tokens"].append(num_tokens)
        self.steps["kv_used"].append(round(scheduler.kv_cache_usage, 4))
        self.steps["decode_ratio"].append(round(details.num_generation_requests / max(num_requests, 1), 4))
        self.steps["s"].append(round(details.elapsed_ms / 1000, 5))


def cpu_s() -> float:
    """CPU seconds of this process and its children so far."""
    me = psutil.Process()
    total = 0.0
    for process in (me, *me.children(recursive=True)):
        times = process.cpu_times()
        total += times.user + times.system
    return total


def main() -> None:
    facts_path, warm_up = Path(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[:1] + sys.argv[3:]
    counts = EngineCounts()
    counts.watch()
    from vllm.entrypoints.launchers import run_batch as vllm_run_batch

    run, build_registry = vllm_run_batch.run_batch, vllm_run_batch.build_endpoint_registry
    began: dict[str, float] = {}

    async def build_timed(*arguments: Any, **named: Any) -> Any:
        registry = await build_registry(*arguments, **named)  # part of loading
        began.update(wall=time.perf_counter(), cpu=cpu_s())
        return registry

    async def run_timed(engine: Any, options: argparse.Namespace) -> None:
        load_s = time.time() - STARTED_S
        lines = argparse.Namespace(**{**vars(options), "input_file": warm_up, "output_file": os.devnull})
        await run(engine, lines)
        await engine.reset_prefix_cache()
        counts.reset()
        await run(engine, options)
        wall_s, used_s = time.perf_counter() - began["wall"], cpu_s() - began["cpu"]
        cache = engine.vllm_config.cache_config
        facts = {
            "wall_s": wall_s,
            "cpu_s": used_s,
            "load_s": load_s,
            "num_blocks": cache.num_gpu_blocks,
            **counts.totals,
            "step_facts": counts.steps,
        }
        facts_path.write_text(json.dumps(facts))

    vllm_run_batch.run_batch = run_timed
    vllm_run_batch.build_endpoint_registry = build_timed
    asyncio.run(vllm_run_batch.main(vllm_run_batch.parse_args()))


if __name__ == "__main__":
    main()
