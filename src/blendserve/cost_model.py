"""What a request and a step cost on a given device: densities for planning, step times for simulation.

Two sets of rates: the *peak* rates of the data sheet, with which the paper states densities, and the *profiled* ones
(peak x measured efficiency), with which everything here schedules.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from blendserve.errors import ConfigError
from blendserve.models import ModelSpec

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Overlap:
    """f(compute, memory): time of a step whose compute-bound and memory-bound operators may run together.

    `sum`: one after the other. `max_plus_min`: the shorter one is hidden but for a share `parameter` of it.
    `p_norm`: (compute^p + memory^p)^(1/p) with p = `parameter`. `table`: measured; the time over the sum of both, at
    shares of compute in that sum, linear in between. Source: BlendServe §6.2, "practical optimum".

    Raises:
        ConfigError: a table that is no measurement of an overlap: shares do not ascend from 0 to 1, or the time is not
            convex and growing in both, without which the bound of `simulator.practical_optimum` does not hold.
    """

    kind: Literal["sum", "max_plus_min", "p_norm", "table"] = "sum"
    parameter: float = 0.0
    points: tuple[tuple[float, float], ...] = ()
    """of a table: (compute / (compute + memory), time / (compute + memory))"""

    def __post_init__(self) -> None:
        if self.kind != "table":
            return
        object.__setattr__(self, "points", tuple((float(x), float(y)) for x, y in self.points))
        shares = [x for x, _ in self.points]
        if len(shares) < 2 or shares[0] != 0.0 or shares[-1] != 1.0 or sorted(set(shares)) != shares:
            raise ConfigError(
                "an overlap table's shares of compute must ascend from 0 to 1; give it such points"
            )
        slopes = self._slopes()
        if any(later < earlier - 1e-9 for earlier, later in itertools.pairwise(slopes)):
            raise ConfigError("an overlap table must be convex; smooth the measured points")
        first, last = self.points[0][1], self.points[-1][1]
        if first + slopes[0] < -1e-9 or last - slopes[-1] < -1e-9:
            raise ConfigError(
                "an overlap table must not fall when work is added; check its first and last points"
            )

    def _slopes(self) -> list[float]:
        return [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(self.points)]

    def _segment(self, share: float) -> tuple[float, float]:
        """Height and slope of the table at a share of compute."""
        index = min(bisect.bisect_right(self.points, (share, math.inf)), len(self.points) - 1)
        (x, y), slope = self.points[index - 1], self._slopes()[index - 1]
        return y + slope * (share - x), slope

    def gradient(self, compute_s: float, memory_s: float) -> tuple[float, float]:
        """Partial derivatives; f is homogeneous, so f = gradient · (compute, memory)."""
        if self.kind == "sum":
            return 1.0, 1.0
        if self.kind == "table":
            share = compute_s / max(compute_s + memory_s, 1e-30)
            height, slope = self._segment(share)
            return height + (1.0 - share) * slope, height - share * slope
        if self.kind == "max_plus_min":
            return (1.0, self.parameter) if compute_s >= memory_s else (self.parameter, 1.0)
        p = self.parameter
        norm = (compute_s**p + memory_s**p) ** (1.0 / p)
        return (compute_s / norm) ** (p - 1.0), (memory_s / norm) ** (p - 1.0)

    def __call__(self, compute_s: float, memory_s: float) -> float:
        """Seconds for the two together."""
        if self.kind == "sum":
            return compute_s + memory_s
        if self.kind == "table":
            total = compute_s + memory_s
            return total * self._segment(compute_s / total)[0] if total > 0.0 else 0.0
        if self.kind == "max_plus_min":
            return max(compute_s, memory_s) + self.parameter * min(compute_s, memory_s)
        p = self.parameter
        return float((compute_s**p + memory_s**p) ** (1.0 / p))


@dataclass(frozen=True, slots=True)
class Partition:
    """A GPU split in two: GEMMs on some of its multiprocessors (SMs) beside decode attention on the others.

    Rates are shares of what either does alone on the whole GPU, measured while both run.

    Raises:
        ConfigError: a rate or a number of SMs that is not above 0.
    """

    sm_attention: int
    """SMs of decode attention; GEMMs have the rest"""
    gemm_rate: float
    attention_rate: float

    def __post_init__(self) -> None:
        if min(self.sm_attention, self.gemm_rate, self.attention_rate) <= 0:
            raise ConfigError(f"{self} is no partition of a GPU; its SMs and rates must be above 0")

    def step_s(self, compute_s: float, memory_s: float) -> float:
        """Least seconds of a step whose parts take `compute_s` and `memory_s` alone on the whole GPU.

        Both run until one is through; what is left of the other has the GPU to itself.
        """
        compute_first_s = memory_s + compute_s * (1.0 - self.attention_rate) / self.gemm_rate
        memory_first_s = compute_s + memory_s * (1.0 - self.gemm_rate) / self.attention_rate
        return max(compute_first_s, memory_first_s)

    def fixed_step_s(self, compute_s: float, memory_s: float) -> float:
        """The same where either side keeps to its SMs, and to its rate, when the other is through."""
        return max(compute_s / self.gemm_rate, memory_s / self.attention_rate)


OVERLAP_TABLE_STEPS = 64
"""shares of compute at which partitions are looked at for a table"""


def overlap_of_partitions(partitions: Sequence[Partition], split_overhead: float = 0.0) -> Overlap:
    """What a step takes if it runs in the best of the partitions to its end, or one part after the other.

    The best of several convex functions is not convex; the table is the lower convex hull of it, so that no step is
    modelled slower than measured and the bound of `simulator.practical_optimum` holds.
    """
    compute = 1.0 + split_overhead
    shares = {step / OVERLAP_TABLE_STEPS for step in range(OVERLAP_TABLE_STEPS + 1)}
    # And where both sides of a partition end at the same time: it is at its best there.
    shares |= {p.gemm_rate / (p.gemm_rate + p.attention_rate * compute) for p in partitions}
    hull: list[tuple[float, float]] = []
    for share in sorted(shares):
        times = [p.fixed_step_s(share * compute, 1.0 - share) for p in partitions]
        point = (share, min([1.0, *times]))
        while len(hull) > 1 and not _turns_up(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return Overlap("table", points=tuple(hull))


def _turns_up(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    return (b[0] - a[0]) * (c[1] - b[1]) - (b[1] - a[1]) * (c[0] - b[0]) > 1e-12


@dataclass(frozen=True, slots=True)
class HardwareSpec:
    """Rates and memory of one device (or of a tensor-parallel group, with rates and memory added up)."""

    name: str
    provenance: str
    """where the figures come from: measured (machine, command) or fitted (to what)"""
    flops: float
    """peak dense FLOP/s of the dtype in use"""
    bandwidth: float
    """peak device memory bandwidth, B/s"""
    kv_cache_bytes: float
    """memory left for KV cache"""
    gemm_efficiency: float = 1.0
    """share of `flops` that large GEMMs reach at the margin"""
    prefill_attention_efficiency: float = 0.5
    attention_efficiency: float = 1.0
    """share of `bandwidth` that decode attention reaches at the margin"""
    gemm_overhead_s: float = 0.0
    """fixed time of a layer's GEMMs in a step, seconds per layer"""
    attention_overhead_s: float = 0.0
    """fixed time of a layer's decode attention in a step that decodes, seconds per layer"""
    weight_load_efficiency: float = 1.0
    """share of `bandwidth` at which weights are read: the floor of a step with few tokens"""
    token_granularity: int = 1
    """GEMMs are padded to a multiple of this many tokens"""
    overlap: Overlap = Overlap()
    partitions: tuple[Partition, ...] = ()
    """measured ways to split the device, for an engine that runs GEMMs beside decode attention"""
    split_overhead: float = 0.0
    """share of a step's compute that two halves of the step, one after the other, cost more than the whole"""
    max_num_batched_tokens: int = 1024
    max_num_seqs: int = 1024
    block_size: int = 16

    @classmethod
    def load(cls, name_or_path: str) -> HardwareSpec:
        """Read a profile shipped with the package, by name, or a JSON file, by path.

        Raises:
            ConfigError: no such profile, or a key that is unknown or missing.
        """
        path = Path(name_or_path)
        shipped = resources.files("blendserve") / "profiles" / f"{name_or_path}.json"
        if path.suffix == ".json" and path.is_file():
            text = path.read_text()
        elif shipped.is_file():
            text = shipped.read_text()
        else:
            raise ConfigError(
                f"no hardware profile {name_or_path!r}; choose one of {', '.join(profile_names())} or give a .json file"
            )
        try:
            fields: dict[str, Any] = json.loads(text)
            overlap = Overlap(**fields.pop("overlap", {}))
            partitions = tuple(Partition(**partition) for partition in fields.pop("partitions", ()))
            return cls(**fields, overlap=overlap, partitions=partitions)
        except (ValueError, TypeError, ConfigError) as error:
            raise ConfigError(f"hardware profile {name_or_path!r} cannot be read: {error}") from error

    def save(self, path: Path) -> None:
        """Write a file that `load` reads.

        Raises:
            ConfigError: it cannot be written.
        """
        fields = asdict(self)
        if self.overlap.kind != "table":
            del fields["overlap"]["points"]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(fields, indent=2) + "\n")
        except OSError as error:
            raise ConfigError(f"the profile cannot be written: {error}; name another file") from error


def tensor_parallel(device: HardwareSpec, size: int, num_kv_heads: int) -> HardwareSpec:
    """`size` devices that run a model together: rates and memory added up, communication left out.

    Where the model has fewer KV heads than there are devices, each head's KV is held, and read, several times.
    """
    kv_parts = min(size, num_kv_heads)
    return replace(
        device,
        name=f"{size} x {device.name}",
        flops=size * device.flops,
        bandwidth=size * device.bandwidth,
        attention_efficiency=device.attention_efficiency * kv_parts / size,
        kv_cache_bytes=kv_parts * device.kv_cache_bytes,
    )


def profile_names() -> list[str]:
    """Names of the hardware profiles shipped with the package."""
    folder = resources.files("blendserve") / "profiles"
    return sorted(
        entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json")
    )


class StepCost(NamedTuple):
    """Modelled seconds of one step."""

    compute_s: float
    memory_s: float
    step_s: float


class StepLines(NamedTuple):
    """A step's time as straight lines: what does not depend on its size, and what each token adds. Seconds."""

    compute_fixed_s: float
    compute_s_per_token: float
    memory_fixed_s: float
    memory_s_per_read: float


@dataclass(frozen=True)
class CostModel:
    """Costs of one model on one device.

    With `at_peak` rates are the data sheet's, as the paper states densities; otherwise the profiled ones.
    """

    model: ModelSpec
    hardware: HardwareSpec
    at_peak: bool = False

    @cached_property
    def _gemm_rate(self) -> float:
        return self.hardware.flops * (1.0 if self.at_peak else self.hardware.gemm_efficiency)

    @cached_property
    def _prefill_attention_rate(self) -> float:
        return self.hardware.flops * (1.0 if self.at_peak else self.hardware.prefill_attention_efficiency)

    @cached_property
    def _kv_s_per_token(self) -> float:
        """Seconds to read the KV of one token in all layers."""
        rate = self.hardware.bandwidth * (1.0 if self.at_peak else self.hardware.attention_efficiency)
        return self.model.kv_bytes_per_token / rate

    @property
    def kv_capacity_tokens(self) -> int:
        """M: tokens of KV cache that fit the device."""
        return int(self.hardware.kv_cache_bytes / self.model.kv_bytes_per_token)

    # -- per request ---------------------------------------------------------------------------------------------

    def prefill_compute_s(self, prompt_tokens: ArrayLike) -> Floats:
        """Seconds of compute for the first `prompt_tokens` tokens of a prompt, prefill attention included.

        The difference of two depths is the cost of the tokens between them, which is what a prefix cache saves.
        Source: BlendServe §4.1, the terms `2 p P` and `4 p² H L`.
        """
        p = np.asarray(prompt_tokens, dtype=np.float64)
        attention = 4.0 * p * p * self.model.num_heads * self.model.head_dim * self.model.num_layers
        return p * self._gemm_s_per_token + attention / self._prefill_attention_rate

    def decode_compute_s(self, output_tokens: ArrayLike) -> Floats:
        """Seconds of compute for generating `output_tokens` tokens. Source: BlendServe §4.1, the term `2 d P`."""
        d = np.asarray(output_tokens, dtype=np.float64)
        return d * self._gemm_s_per_token

    def compute_s(self, prompt_tokens: ArrayLike, output_tokens: ArrayLike) -> Floats:
        """Comp: seconds of compute of requests run without any sharing."""
        return self.prefill_compute_s(prompt_tokens) + self.decode_compute_s(output_tokens)

    def memory_s(self, prompt_tokens: ArrayLike, output_tokens: ArrayLike) -> Floats:
        """Mem: seconds of KV reads of the decodes, `(p d + d²/2)` KV tokens. Source: BlendServe §4.1."""
        p = np.asarray(prompt_tokens, dtype=np.float64)
        d = np.asarray(output_tokens, dtype=np.float64)
        return (p * d + d * d / 2.0) * self._kv_s_per_token

    def density(self, prompt_tokens: ArrayLike, output_tokens: ArrayLike) -> Floats:
        """ρ = Comp / Mem of requests without sharing; > 1 is compute-intensive."""
        memory_s = self.memory_s(prompt_tokens, output_tokens)
        return self.compute_s(prompt_tokens, output_tokens) / np.maximum(memory_s, 1e-30)

    # -- per step ------------------------------------------------------------------------------------------------

    def step_cost(self, num_tokens: int, kv_tokens_read: int, query_key_pairs: float = 0.0) -> StepCost:
        """Modelled time of a step.

        Args:
            num_tokens: tokens computed, prefill and decode together.
            kv_tokens_read: KV tokens that the decodes attend to.
            query_key_pairs: (query, key) pairs of prefill attention.
        """
        hw = self.hardware
        if num_tokens == 0:
            return StepCost(0.0, 0.0, 0.0)
        padded = -(-num_tokens // hw.token_granularity) * hw.token_granularity
        gemm_s = self._step_gemm_overhead_s + padded * self._gemm_s_per_token
        compute_s = max(gemm_s, self._weights_s) + query_key_pairs * self._attention_s_per_pair
        memory_s = (
            self._step_attention_overhead_s + kv_tokens_read * self._kv_s_per_token if kv_tokens_read else 0.0
        )
        return StepCost(compute_s, memory_s, hw.overlap(compute_s, memory_s))

    def best_partition(self, compute_s: float, memory_s: float) -> Partition | None:
        """The partition for a whole step that ends first; None: it ends sooner with one part after the other."""
        split_s = compute_s * (1.0 + self.hardware.split_overhead)
        times = [
            (partition.fixed_step_s(split_s, memory_s), partition) for partition in self.hardware.partitions
        ]
        best_s, best = min(times, key=lambda time: time[0], default=(math.inf, None))
        return best if best_s < compute_s + memory_s else None

    def step_lines(self) -> StepLines:
        """The step's time without padding, floor and prefill attention."""
        return StepLines(
            self._step_gemm_overhead_s,
            self._gemm_s_per_token,
            self._step_attention_overhead_s,
            self._kv_s_per_token,
        )

    def work_cost(
        self,
        num_tokens: float,
        kv_tokens_read: float,
        query_key_pairs: float,
        *,
        steps: float,
        decode_steps: float,
    ) -> StepCost:
        """Least time of so much work in so many steps: no padding, no floor, perfectly even steps."""
        compute_s = (
            steps * self._step_gemm_overhead_s
            + num_tokens * self._gemm_s_per_token
            + query_key_pairs * self._attention_s_per_pair
        )
        memory_s = decode_steps * self._step_attention_overhead_s + kv_tokens_read * self._kv_s_per_token
        return StepCost(compute_s, memory_s, self.hardware.overlap(compute_s, memory_s))

    @cached_property
    def _gemm_s_per_token(self) -> float:
        return 2.0 * self.model.active_params / self._gemm_rate

    @cached_property
    def _attention_s_per_pair(self) -> float:
        width = self.model.num_heads * self.model.head_dim * self.model.num_layers
        return 4.0 * width / self._prefill_attention_rate

    @cached_property
    def _weights_s(self) -> float:
        """Seconds to read the weights once: the floor of a step."""
        weight_bytes = self.model.active_params * self.model.bytes_per_weight
        return weight_bytes / (self.hardware.bandwidth * self.hardware.weight_load_efficiency)

    @cached_property
    def _step_gemm_overhead_s(self) -> float:
        return self.model.num_layers * self.hardware.gemm_overhead_s

    @cached_property
    def _step_attention_overhead_s(self) -> float:
        return self.model.num_layers * self.hardware.attention_overhead_s


def memory_split(capacity: float, density_left: float, density_right: float, density_root: float) -> float:
    """M_L: the left (compute-intensive) side's share of `capacity`, so that the blend has the root's density.

    Solves `M_L + M_R = M`, `M_L ρ(L) + M_R ρ(R) = M ρ(root)`; clamped to [0, capacity] where no blend of the two
    sides reaches the root's density. Source: BlendServe §5.3.
    """
    if density_left <= density_right:
        return capacity if density_root >= density_left else 0.0
    share = (density_root - density_right) / (density_left - density_right)
    return capacity * min(max(share, 0.0), 1.0)
