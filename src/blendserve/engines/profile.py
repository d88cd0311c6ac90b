"""Hardware profiles out of measured step times: the same for every engine that can say how long a step took."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blendserve.cost_model import CostModel, HardwareSpec, Overlap, Partition, overlap_of_partitions
from blendserve.engines import EngineConfig
from blendserve.errors import ConfigError
from blendserve.models import ModelFiles, ModelSpec

Floats = NDArray[np.float64]

LEAST_SAMPLES = 4
"""below so many steps a fit means nothing"""


class StepSample(NamedTuple):
    """One kind of step and how long it took."""

    num_prefill_tokens: int
    num_decode_rows: int
    kv_tokens_read: int
    """KV tokens that the decodes attended to"""
    duration_s: float
    query_key_pairs: float = 0.0
    """(query, key) pairs of prefill attention"""

    @property
    def num_tokens(self) -> int:
        """Tokens computed."""
        return self.num_prefill_tokens + self.num_decode_rows


class Ceilings(NamedTuple):
    """What a device can do at best, measured."""

    flops: float
    """FLOP/s of a large product of matrices"""
    bandwidth: float
    """B/s read and written by a large copy"""


class Measured(NamedTuple):
    """Steps of an engine on a device."""

    samples: list[StepSample]
    ceilings: Ceilings | None
    """None: not known"""
    kv_cache_bytes: float
    """that the engine has"""
    device: str
    """in words, with the dtype"""


class Fit(NamedTuple):
    """A profile, and what it says of the steps it was made from."""

    hardware: HardwareSpec
    predicted_s: list[float]
    """[num_samples]"""
    mean_error_ratio: float
    """mean of |predicted - measured| / measured"""
    unseen: tuple[str, ...] = ()
    """what the steps did not show, and the profile has at the ceiling"""


class _Times(NamedTuple):
    """A step's cost: max(floor, fixed + tokens * token) + pairs * pair + [decodes] * decode + read * read_token."""

    floor_s: float
    fixed_s: float
    token_s: float
    pair_s: float
    decode_s: float
    read_s: float


def profile_engine(
    config: EngineConfig,
    files: ModelFiles,
    *,
    name: str,
    max_time_s: float,
    folder: Path,
    on_sample: Callable[[StepSample], None],
) -> tuple[Fit, list[StepSample]]:
    """Measure an engine with a model on this machine.

    Args:
        config: the engine.
        files: the model; on a GPU its sizes alone, with random weights.
        name: of the profile.
        max_time_s: to measure for; on a GPU with everything around it.
        folder: for the files of a session on a GPU.
        on_sample: called with every step measured as it comes; on a GPU there are lines of progress instead.

    Returns:
        The profile, and the steps it was fitted to.

    Raises:
        ConfigError: this engine cannot be measured here, or what was measured does not make a profile.
    """
    if config.engine == "simulated":
        raise ConfigError(
            "--engine simulated runs by a profile and has none of its own; use --engine native, vllm, sglang or openai"
        )
    config.check()
    base = replace(config.hardware_spec(), name=name, overlap=Overlap(), partitions=(), split_overhead=0.0)
    cost_model = config.cost_model(files)
    if config.on_cuda:
        from blendserve.engines.native.session import profile_gpu

        session = profile_gpu(config, files, folder, max_time_s)
        if "device" not in session["meta"]:
            errors = [error["error"] for error in session.get("errors", [])]
            raise ConfigError(f"nothing could be measured: {'; '.join(errors) or f'see {folder}'}")
        fit, samples = hardware_of_session(session, cost_model.model, base), samples_of_session(session)
        device = f"{session['meta']['device']}, {session['meta']['dtype']}"
    else:
        if config.engine == "native":
            from blendserve.engines.native.step_profile import measure_cpu

            measured = measure_cpu(config, files, max_time_s, on_sample)
        else:
            from blendserve.engines.job_profile import measure_jobs

            measured = measure_jobs(config, files, max_time_s, on_sample)
        samples, device = measured.samples, measured.device
        base = replace(base, kv_cache_bytes=measured.kv_cache_bytes)
        fit = fit_hardware(samples, cost_model.model, base, measured.ceilings)
    provenance = (
        f"measured: {device}, {cost_model.model.name}; fitted to {len(samples)} steps with a mean error of "
        f"{fit.mean_error_ratio:.1%} (blendserve profile, {datetime.now(UTC):%Y-%m-%d})"
    )
    return fit._replace(hardware=replace(fit.hardware, provenance=provenance)), samples


def fit_hardware(
    samples: Sequence[StepSample], model: ModelSpec, base: HardwareSpec, ceilings: Ceilings | None = None
) -> Fit:
    """The profile that explains measured steps best, operators one after the other.

    Least squares of relative errors with no time below zero. A term that the steps do not show (attention of prompts
    that were short, say) costs what it would at the ceiling.

    Args:
        samples: steps; some must read KV and some not, and they must differ in tokens.
        model: that ran them.
        base: name, provenance, memory and limits of the profile.
        ceilings: of the device, to state rates as shares of; None: the rates themselves.

    Raises:
        ConfigError: the samples are too few, or tell neither what a token computed nor what one read costs; without
            ceilings, not both.
    """
    times = _fit_times(samples)
    terms = {"a token computed": times.token_s, "a KV token read": times.read_s}
    unseen = [name for name, seconds in terms.items() if seconds == 0.0]
    if len(unseen) == 2 or (unseen and ceilings is None):
        raise ConfigError(
            f"the {len(samples)} steps measured do not tell what {' and '.join(unseen)} costs; measure again on a "
            "quieter machine, or with more --max-num-batched-tokens or --max-model-len"
        )
    top = ceilings or Ceilings(0.0, 0.0)
    gemm_rate = 2.0 * model.active_params / times.token_s if times.token_s else top.flops
    read_rate = model.kv_bytes_per_token / times.read_s if times.read_s else top.bandwidth
    flops, bandwidth = max(top.flops, gemm_rate), max(top.bandwidth, read_rate)
    pair_flops = 4.0 * model.num_heads * model.head_dim * model.num_layers
    weight_bytes = model.active_params * model.bytes_per_weight
    floor_s = times.floor_s or times.fixed_s + times.token_s
    hardware = replace(
        base,
        flops=flops,
        bandwidth=bandwidth,
        gemm_efficiency=gemm_rate / flops,
        prefill_attention_efficiency=pair_flops / times.pair_s / flops if times.pair_s else 1.0,
        attention_efficiency=read_rate / bandwidth,
        gemm_overhead_s=times.fixed_s / model.num_layers,
        attention_overhead_s=times.decode_s / model.num_layers,
        weight_load_efficiency=weight_bytes / floor_s / bandwidth,
        token_granularity=1,
        overlap=Overlap(),
    )
    cost = CostModel(model, hardware)
    predicted = [
        cost.step_cost(sample.num_tokens, sample.kv_tokens_read, sample.query_key_pairs).step_s
        for sample in samples
    ]
    errors = [abs(p / sample.duration_s - 1.0) for p, sample in zip(predicted, samples, strict=True)]
    if times.pair_s == 0.0:
        unseen.append("attention of prompts")
    return Fit(hardware, predicted, float(np.mean(errors)), tuple(unseen))


def hardware_of_session(profile: Mapping[str, Any], model: ModelSpec, base: HardwareSpec) -> Fit:
    """The profile of a GPU out of what a measuring session found, see `native.gpu_profile`.

    Whole steps give the rates; products beside decode attention give the partitions, and their best the overlap.

    Args:
        profile: contents of the session's `profile.json`.
        model: that was measured.
        base: as for `fit_hardware`.

    Raises:
        ConfigError: too little was measured.
    """
    samples = samples_of_session(profile)
    top = profile.get("ceilings", {})
    ceilings = None
    if "copy" in top and "product" in top:
        ceilings = Ceilings(top["product"]["tflops"] * 1e12, top["copy"]["gbps"] * 1e9)
    fit = fit_hardware(samples, model, base, ceilings)
    partitions, split_overhead = partitions_of_session(profile), split_overhead_of_session(profile)
    hardware = replace(
        fit.hardware,
        kv_cache_bytes=profile["meta"].get("kv_cache_bytes", base.kv_cache_bytes),
        partitions=partitions,
        split_overhead=split_overhead,
        overlap=overlap_of_partitions(partitions, split_overhead) if partitions else Overlap(),
    )
    return fit._replace(hardware=hardware)


def samples_of_session(profile: Mapping[str, Any]) -> list[StepSample]:
    """The steps of a session that ran on one stream, as they were."""
    whole = [*_rows(profile, "steps"), *(row for row in _rows(profile, "stack") if row["mode"] == "whole")]
    return [StepSample(**{name: row[name] for name in StepSample._fields}) for row in whole]


def partitions_of_session(profile: Mapping[str, Any]) -> tuple[Partition, ...]:
    """Partitions with their measured rates, medians over sizes of a nano-batch, by SMs of attention.

    Where the device cannot be split, of streams of different priority, as the engine then has.
    """
    rows = [
        row
        for row in _rows(profile, "pair")
        if min(row.get("gemm_rate", 0), row.get("attention_rate", 0)) > 0
    ]
    found = [row for row in rows if row["mode"] == "split"] or [
        row for row in rows if row["mode"] == "priority"
    ]
    partitions = []
    for num_sms in sorted({row["sm_attention"] for row in found}):
        of_split = [row for row in found if row["sm_attention"] == num_sms]
        gemm_rate, attention_rate = (
            min(float(f"{statistics.median(row[name] for row in of_split):.4g}"), 1.0)
            for name in ("gemm_rate", "attention_rate")
        )
        partitions.append(Partition(num_sms, gemm_rate, attention_rate))
    return tuple(partitions)


def split_overhead_of_session(profile: Mapping[str, Any]) -> float:
    """Share that two chains of products at half the tokens take longer than one: the median over sizes."""
    chains = [row for row in _rows(profile, "gemm") if row["product"] == "chain"]
    most = max((row["sm"] for row in chains), default=0)
    us = {row["num_tokens"]: row["us"] for row in chains if row["sm"] == most}
    halved = [2 * us[num_tokens // 2] / us[num_tokens] - 1.0 for num_tokens in us if num_tokens // 2 in us]
    relevant = halved[:2]  # sections measure what matters first
    return round(max(statistics.median(relevant), 0.0), 4) if relevant else 0.0


def _rows(profile: Mapping[str, Any], section: str) -> list[dict[str, Any]]:
    return list(profile.get(section, {}).values())


def _fit_times(samples: Sequence[StepSample]) -> _Times:
    """The best fit over all places at which the floor, reading the weights once, may give way to the tokens."""
    if len(samples) < LEAST_SAMPLES:
        raise ConfigError(
            f"{len(samples)} steps were measured, too few to fit a profile to; allow more time, or more tokens a step"
        )
    tokens, decodes, read, duration, pairs = (
        np.array(column, np.float64)
        for column in (
            [sample.num_tokens for sample in samples],
            [sample.num_decode_rows > 0 for sample in samples],
            [sample.kv_tokens_read for sample in samples],
            [sample.duration_s for sample in samples],
            [sample.query_key_pairs for sample in samples],
        )
    )
    sizes = np.unique(tokens)
    best, least = None, np.inf
    for last_at_floor in (0.0, *sizes[:-2]):
        at_floor = tokens <= last_at_floor
        columns = np.stack(
            (at_floor, ~at_floor, np.where(at_floor, 0.0, tokens), pairs, decodes, read), axis=1
        )
        found, error = _non_negative(columns / duration[:, None], np.ones(len(samples)))
        times = _Times(*found.tolist())
        if last_at_floor:
            first_above = float(sizes[sizes > last_at_floor][0])
            at_end, after = (times.fixed_s + size * times.token_s for size in (last_at_floor, first_above))
            if not at_end <= times.floor_s <= after:
                continue
        if error < least:
            best, least = times, error
    assert best is not None
    return best


def _non_negative(
    columns: Floats,  # [num_rows, num_columns], few columns
    target: Floats,  # [num_rows]
) -> tuple[Floats, float]:
    """Least squares without negative coefficients, and the squared error: the best of all subsets of columns."""
    scale = np.linalg.norm(columns, axis=0)
    columns = columns / np.where(scale > 0, scale, 1.0)
    best, least = np.zeros(len(scale)), float(target @ target)
    used = np.flatnonzero(scale > 0).tolist()
    for count in range(1, len(used) + 1):
        for subset in itertools.combinations(used, count):
            found = np.linalg.lstsq(columns[:, subset], target, rcond=None)[0]
            if (found < 0).any():
                continue
            error = float(np.square(columns[:, subset] @ found - target).sum())
            if error < least - 1e-12:
                best, least = np.zeros(len(scale)), error
                best[list(subset)] = found
    return best / np.where(scale > 0, scale, 1.0), least
