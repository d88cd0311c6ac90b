"""Our fp32 matrix products against oneDNN's and MKL's, as torch offers them, on the shapes of a model's layers.

    python bench/products.py [--rows 1,16,64,128,256,512] [--threads 2] [--model FOLDER] [--seconds 0.5]

All three multiply the same inputs by turns; there are as many weights of a shape as are larger than the caches, as in a
model each is used once a step. The least time of all turns counts. Prints GFLOP/s by shape and the seconds of all
products of a step; the last line of standard output is the same as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from policies import commit, cpu_name
from torch import Tensor

from blendserve.engines.native.kernels import Kernels, load_kernels
from blendserve.engines.native.model import Linear, ModelConfig
from blendserve.models import resolve_model

COLD_BYTES = 80 << 20
"""of the weights of one shape together"""
NAMES = ("oneDNN", "MKL", "ours")


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, int, int]]:
    """Outputs, inputs and number in a model, by layer."""
    hidden, layers = config.hidden_size, config.num_layers
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return {
        "qkv": (heads, hidden, layers),
        "output": (hidden, config.num_heads * config.head_dim, layers),
        "gate_up": (2 * config.intermediate_size, hidden, layers),
        "down": (hidden, config.intermediate_size, layers),
        "lm_head": (config.vocab_size, hidden, 1),
    }


def least_seconds(kernels: Kernels, weights: list[Tensor], num_rows: int, seconds: float) -> dict[str, float]:
    """Of one product, by who computes it."""
    num_outputs, num_inputs = weights[0].shape
    x, out = torch.randn(num_rows, num_inputs), torch.empty(num_rows, num_outputs)
    ours = [kernels.pack(weight, None) for weight in weights]
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, Linear.PACKED_FOR_ROWS) for weight in weights]
    products: dict[str, Callable[[int], Tensor]] = {
        "oneDNN": lambda i: torch.ops.mkldnn._linear_pointwise(x, packed[i], None, "none", [], ""),
        "MKL": lambda i: torch.mm(x, weights[i].t(), out=out),
        "ours": lambda i: kernels.linear(ours[i], x, out),
    }
    torch.testing.assert_close(products["ours"](0), products["oneDNN"](0), atol=1e-3, rtol=1e-3)
    found: dict[str, list[float]] = defaultdict(list)
    until_s = time.perf_counter() + seconds * len(products)
    while time.perf_counter() < until_s or len(found["ours"]) < 5:
        for name, product in products.items():
            began_s = time.perf_counter()
            for i in range(len(weights)):
                product(i)
            found[name].append((time.perf_counter() - began_s) / len(weights))
    return {name: min(times) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,16,64,128,256,512")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--seconds", type=float, default=0.5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    kernels = load_kernels(torch.float32)
    if kernels is None:
        raise SystemExit("there are no kernels to measure; install a C compiler")
    config = ModelConfig.from_dict(resolve_model(arguments.model).config)
    print(f"{cpu_name()}, {arguments.threads} threads, {kernels.variant}, commit {commit()}\n")
    print(
        "| product | outputs x inputs | rows | "
        + " | ".join(f"{name} GFLOP/s" for name in NAMES)
        + " | ours / oneDNN |"
    )
    print("|" + " --- |" * 7)
    steps: dict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(NAMES, 0.0))
    for layer, (num_outputs, num_inputs, count) in shapes_of(config).items():
        number = max(1, min(count, COLD_BYTES // (4 * num_outputs * num_inputs)))
        weights = [torch.randn(num_outputs, num_inputs) for _ in range(number)]
        for num_rows in map(int, arguments.rows.split(",")):
            took = least_seconds(kernels, weights, num_rows, arguments.seconds)
            for name, product_s in took.items():
                steps[num_rows][name] += count * product_s
            rates = " | ".join(f"{2e-9 * num_rows * weights[0].numel() / took[name]:.1f}" for name in NAMES)
            print(
                f"| {layer} | {num_outputs} x {num_inputs} | {num_rows} | {rates} | "
                f"{took['oneDNN'] / took['ours']:.2f} |",
                flush=True,
            )
    print("\n| rows | " + " | ".join(f"{name} ms" for name in NAMES) + " | ours / oneDNN |\n|" + " --- |" * 5)
    for num_rows, step in steps.items():
        cells = " | ".join(f"{1e3 * step[name]:.1f}" for name in NAMES)
        print(f"| {num_rows} | {cells} | {step['oneDNN'] / step['ours']:.2f} |")
    print(json.dumps({"cpu": cpu_name(), "threads": arguments.threads, "commit": commit(), "step_s": steps}))


if __name__ == "__main__":
    main()
