"""CPU time and peak memory of planning, by number of requests, and on prompts made to be hard for it.

    python bench/planning.py [--sizes 10000,1000000] [--cases mixture,nested]

Every row is a process of its own, so that its peak memory is its own. `growth` is the exponent with which CPU time
grew in prompt tokens since the row before of the same case: 1 is linear. Seconds are CPU seconds, but for `wall`.
`GB without tokens` leaves out the token ids, which are the job's input. Stages are measured again by themselves.
Prints a table; the last line of standard output is the same as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from blendserve.cost_model import CostModel, HardwareSpec
from blendserve.planner.output_length import find_strata
from blendserve.planner.plan import Plan, make_plan
from blendserve.planner.prefix_tree import PrefixTree, PromptOrder
from blendserve.request import RequestTable, SamplingParams
from blendserve.tokens import PromptTokens
from blendserve.workloads import PAPER_MODELS

Rng = np.random.Generator
Tokens = NDArray[np.uint32]

SIZES = (10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000)
VOCABULARY = 128_000
CHUNK_TOKENS = 1 << 22


class Shape(NamedTuple):
    """Prompts in numbers; `shared` tokens from `start` in `prefixes` come first, `own` random ones follow."""

    prefixes: Tokens
    start: NDArray[np.int64]
    shared: NDArray[np.int64]
    own: NDArray[np.int64]


def mixture(rng: Rng, n: int) -> Shape:
    """350 tokens on average: bare prompts, 24 system prompts, and 480 sets of examples behind 12 of those."""
    system = [text(rng, length) for length in rng.integers(40, 240, 24)]
    examples = [np.concatenate((system[i % 12], text(rng, rng.integers(200, 500)))) for i in range(480)]
    prefixes = [*system, *examples]
    lengths = np.array([len(prefix) for prefix in prefixes])
    popular = rng.random(n) ** 2  # some prefixes are much more frequent than others
    kind = rng.choice(3, n, p=(0.4, 0.35, 0.25))
    chosen = np.where(kind == 0, 24 * popular, 24 + 480 * popular).astype(np.int64)
    shared = np.where(kind == 2, 0, lengths[chosen])
    own = rng.lognormal(4.4, 0.8, n)
    own *= (350.0 - shared.mean()) / own.mean()
    start = np.cumsum(lengths) - lengths
    return Shape(np.concatenate(prefixes), start[chosen], shared, own.astype(np.int64) + 1)


def equal(rng: Rng, n: int) -> Shape:
    """One prompt of 350 tokens, n times."""
    return Shape(text(rng, 350), zeros(n), zeros(n) + 350, zeros(n))


def long_prefix(rng: Rng, n: int) -> Shape:
    """One prefix of 100k tokens before 50 tokens of each request's own."""
    return Shape(text(rng, 100_000), zeros(n), zeros(n) + 100_000, zeros(n) + 50)


def nested(rng: Rng, n: int) -> Shape:
    """One text, of which each request has one more token than another; shuffled."""
    return Shape(text(rng, n), zeros(n), rng.permutation(n) + 1, zeros(n))


def turns(rng: Rng, n: int) -> Shape:
    """One conversation of n / 2 turns of 4 tokens, two requests after each turn; shuffled."""
    return Shape(text(rng, 2 * n), zeros(n), 4 * (rng.permutation(n) // 2), zeros(n) + 8)


def distinct(rng: Rng, n: int) -> Shape:
    """350 tokens, the first unlike any other prompt's; shuffled."""
    return Shape(rng.permutation(n).astype(np.uint32), np.arange(n), zeros(n) + 1, zeros(n) + 349)


def ascending(rng: Rng, n: int) -> Shape:
    """As `distinct`, already sorted."""
    return distinct(rng, n)._replace(prefixes=np.arange(n, dtype=np.uint32))


CASES: dict[str, tuple[Callable[[Rng, int], Shape], tuple[int, ...]]] = {
    "mixture": (mixture, SIZES),
    "equal": (equal, (10_000, 100_000, 1_000_000)),
    "long prefix": (long_prefix, (300, 1_000, 3_000)),
    "nested": (nested, (2_000, 6_000, 20_000)),
    "turns": (turns, (2_000, 6_000, 20_000)),
    "distinct": (distinct, (10_000, 100_000, 1_000_000)),
    "ascending": (ascending, (10_000, 100_000, 1_000_000)),
}


def zeros(count: int) -> NDArray[np.int64]:
    return np.zeros(count, dtype=np.int64)


def text(rng: Rng, count: int) -> Tokens:
    """[count] random token ids, low ones more often, as in text."""
    return (rng.random(count, dtype=np.float32) ** 3 * VOCABULARY).astype(np.uint32)


@numba.njit(cache=True)
def write_prefixes(data, starts, prefixes, start, shared):
    for i in range(len(starts)):
        data[starts[i] : starts[i] + shared[i]] = prefixes[start[i] : start[i] + shared[i]]


def job(case: str, num_requests: int, seed: int = 0) -> RequestTable:
    """The requests of a case; uses little memory besides the tokens. All but `mixture` have one `max_tokens`."""
    rng = np.random.default_rng(seed)
    shape = CASES[case][0](rng, num_requests)
    lengths = shape.shared + shape.own
    starts = np.cumsum(lengths) - lengths
    data = np.empty(int(lengths.sum()), dtype=np.uint32)
    if shape.own.any():
        for at in range(0, len(data), CHUNK_TOKENS):
            part = data[at : at + CHUNK_TOKENS]
            part[:] = text(rng, len(part))
    write_prefixes(data, starts, shape.prefixes, shape.start, shape.shared)
    caps = rng.choice([16, 128, 512, 2048], num_requests) if case == "mixture" else zeros(num_requests) + 512
    return RequestTable(
        tokens=PromptTokens(data, starts, lengths.astype(np.int32)),
        max_tokens=caps.astype(np.int32),
        declared_tokens=np.zeros(num_requests, dtype=np.int32),
        params=[SamplingParams()],
        params_index=np.zeros(num_requests, dtype=np.int32),
        seeds=np.zeros(num_requests, dtype=np.uint64),
    )


def finish_some(plan: Plan, rng: Rng) -> Callable[[], Any]:
    """Estimates of a run in which a tenth of the requests have finished."""
    estimator = plan.estimator()
    done = rng.choice(plan.num_requests, plan.num_requests // 10, replace=False)
    output = np.minimum(rng.lognormal(5.0, 1.0, len(done)), plan.max_tokens[done])
    estimator.finished(done.astype(np.int32), output.astype(np.int32) + 1)
    return estimator.estimate


def measure(case: str, num_requests: int) -> dict[str, Any]:
    cost_model = CostModel(PAPER_MODELS["llama-3-8b"], HardwareSpec.load("a100-80g-paper"))
    small = make_plan(job(case, 100), cost_model)  # compiles
    small.reordered(finish_some(small, np.random.default_rng(0))())

    def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
        started = time.process_time()
        result = call()
        return time.process_time() - started, result

    requests = job(case, num_requests)
    input_gb = requests.tokens.data.nbytes / 1e9
    started = time.perf_counter()
    plan_s, plan = seconds(lambda: make_plan(requests, cost_model))
    wall_s = time.perf_counter() - started
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    sort_s, order = seconds(lambda: PromptOrder.of(requests.tokens))
    tree_s, tree = seconds(lambda: PrefixTree.build(order, requests.prompt_tokens))
    strata_s, _ = seconds(lambda: find_strata(tree, requests.max_tokens))
    order_s, _ = seconds(lambda: plan.reordered(plan.output_tokens_est))
    estimate_s, estimate = seconds(finish_some(plan, np.random.default_rng(0)))
    replan_s, replanned = seconds(lambda: plan.reordered(estimate))
    keep_split_s, _ = seconds(lambda: replanned.reordered(estimate, keep_split=True))
    return {
        "case": case,
        "requests": num_requests,
        "tokens": requests.tokens.num_tokens,
        "nodes": tree.num_nodes,
        "split": plan.leaf_order.num_split,
        "split_replanned": replanned.leaf_order.num_split,
        "plan_s": plan_s,
        "wall_s": wall_s,
        "sort_s": sort_s,
        "tree_s": tree_s,
        "strata_s": strata_s,
        "order_s": order_s,
        "estimate_s": estimate_s,
        "replan_s": replan_s,
        "replan_keep_split_s": keep_split_s,
        "peak_gb": peak_gb,
        "peak_without_tokens_gb": peak_gb - input_gb,
    }


COLUMNS = {
    "case": "case",
    "requests": "requests",
    "tokens": "tokens",
    "nodes": "nodes",
    "plan_s": "plan",
    "wall_s": "wall",
    "growth": "growth",
    "sort_s": "sort",
    "tree_s": "tree",
    "strata_s": "strata",
    "order_s": "order",
    "estimate_s": "estimate",
    "replan_s": "replan",
    "replan_keep_split_s": "replan, same splits",
    "peak_gb": "GB",
    "peak_without_tokens_gb": "GB without tokens",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", help="requests of the mixture, separated by commas")
    parser.add_argument("--cases", default=",".join(CASES), help="of " + ", ".join(CASES))
    parser.add_argument(
        "--one", nargs=2, metavar=("CASE", "REQUESTS"), help="measure one row in this process"
    )
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one[0], int(options.one[1]))))
        return
    rows: list[dict[str, Any]] = []
    print(" | ".join(COLUMNS.values()))
    for case in options.cases.split(","):
        sizes = CASES[case][1]
        if options.sizes and case == "mixture":
            sizes = tuple(int(size) for size in options.sizes.split(","))
        before = None
        for size in sizes:
            command = [sys.executable, __file__, "--one", case, str(size)]
            row = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            row["growth"] = before and math.log(row["plan_s"] / before["plan_s"]) / math.log(
                row["tokens"] / before["tokens"]
            )
            before = row
            rows.append(row)
            cells = (row[column] for column in COLUMNS)
            print(
                " | ".join(
                    "" if c is None else f"{c:.2f}" if isinstance(c, float) else str(c) for c in cells
                ),
                flush=True,
            )
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
