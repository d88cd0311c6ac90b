"""The paper's traces as distributions, mixtures of them by density and sharing, and traces read from files.

No trace's requests are shipped: each trace is a distribution with the published means, and prompts are random token
ids that share exactly the prefixes the trace shares. Within a trace only its system prompt and, for MMLU, the
few-shot prefix of a subject are shared; turns of one conversation (WildChat's 19 %) are not modelled.
Source: BlendServe §6.2, App. A.3. `DEEP_WORKLOADS` have prefixes of several levels and are synthetic throughout.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import orjson
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from blendserve.cost_model import CostModel
from blendserve.errors import ConfigError
from blendserve.models import ModelSpec
from blendserve.request import RequestTable, SamplingParams
from blendserve.tokens import PromptTokens

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]

MAX_TOKENS = 65_536
"""Cap on the output of every request of a workload; no trace exceeds it."""

VOCAB_SIZE = 128_256
"""Llama-3's: range of the token ids made up for prompts read from files."""

SYSTEM_PROMPT_TOKENS = 10
"""Length of each trace's own system prompt."""


# -- models ----------------------------------------------------------------------------------------------------------


def _model(
    name: str,
    model_type: str,
    *,
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    context: int,
) -> ModelSpec:
    config = {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
    }
    return ModelSpec.from_config(config, name=name)


PAPER_MODELS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        _model(
            "llama-3-8b", "llama", layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8,
            vocab=128_256, context=8192,
        ),
        _model(
            "llama-3-70b", "llama", layers=80, hidden=8192, intermediate=28672, heads=64, kv_heads=8,
            vocab=128_256, context=8192,
        ),
        _model(
            "qwen-2.5-7b", "qwen2", layers=28, hidden=3584, intermediate=18944, heads=28, kv_heads=4,
            vocab=152_064, context=32_768,
        ),
        _model(
            "qwen-2.5-72b", "qwen2", layers=80, hidden=8192, intermediate=29568, heads=64, kv_heads=8,
            vocab=152_064, context=32_768,
        ),
        _model(
            "llama-2-7b", "llama", layers=32, hidden=4096, intermediate=11008, heads=32, kv_heads=32,
            vocab=32_000, context=4096,
        ),
        _model(
            "deepseek-67b", "llama", layers=95, hidden=8192, intermediate=22016, heads=64, kv_heads=8,
            vocab=102_400, context=4096,
        ),
    )
}  # fmt: skip
"""The models of the paper's evaluation by name, sizes as in their published configs. Source: BlendServe §6."""


# -- traces ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TraceSample:
    """Requests drawn from a trace, as columns."""

    prompt_tokens: Ints
    """[num_requests] prompt lengths, system prompt and group prefix included"""
    output_tokens: Ints
    group: Ints
    """[num_requests] requests of one group share their prompts' first `shared_tokens` tokens"""
    shared_tokens: Ints
    """[num_requests] length of the prefix that the group shares, system prompt included; less than the prompt"""

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def take(self, requests: NDArray[np.integer]) -> TraceSample:
        """The given requests, in that order."""
        return TraceSample(
            self.prompt_tokens[requests],
            self.output_tokens[requests],
            self.group[requests],
            self.shared_tokens[requests],
        )


@dataclass(frozen=True)
class Trace:
    """A distribution of requests, with what is known and what is assumed about it."""

    name: str
    provenance: str
    """which figures are real and which are synthetic"""
    draw: Callable[[np.random.Generator, int], TraceSample]
    system_prompt_tokens: ClassVar[int] = SYSTEM_PROMPT_TOKENS
    """tokens that all requests of one trace, and of no other, begin with"""

    def sample(self, rng: np.random.Generator, num_requests: int) -> TraceSample:
        """Independent requests, in no order that means anything; subjects and quantiles are stratified."""
        return self.draw(rng, num_requests)


def _lengths(prompt: Floats, output: Floats) -> TraceSample:
    """Requests that share the system prompt alone."""
    return TraceSample(
        np.maximum(np.rint(prompt), SYSTEM_PROMPT_TOKENS + 1).astype(np.int32),
        np.maximum(np.rint(output), 1).astype(np.int32),
        np.zeros(len(prompt), dtype=np.int32),
        np.full(len(prompt), SYSTEM_PROMPT_TOKENS, dtype=np.int32),
    )


def _correlated_normals(rng: np.random.Generator, num_requests: int, correlation: float) -> Floats:
    normals = rng.standard_normal((2, num_requests))
    normals[1] = correlation * normals[0] + np.sqrt(1.0 - correlation**2) * normals[1]
    return normals


@dataclass(frozen=True)
class _Lognormal:
    """Lognormal prompt and output lengths; `correlation` is that of their logarithms."""

    means: tuple[float, float]
    sigmas: tuple[float, float]
    correlation: float
    max_prompt: int
    max_output: int
    min_output: int = 1

    def __call__(self, rng: np.random.Generator, num_requests: int) -> TraceSample:
        sigmas = np.array(self.sigmas)[:, None]
        log_means = np.log(self.means)[:, None] - sigmas**2 / 2.0
        normals = _correlated_normals(rng, num_requests, self.correlation)
        prompt, output = np.exp(log_means + sigmas * normals)
        return _lengths(
            np.minimum(prompt, self.max_prompt), np.clip(output, self.min_output, self.max_output)
        )


@dataclass(frozen=True)
class _Quantiles:
    """Lengths interpolated between quantiles, tied by the correlation of the normals whose ranks they take."""

    probabilities: tuple[float, ...]
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    correlation: float

    def __call__(self, rng: np.random.Generator, num_requests: int) -> TraceSample:
        normals = _correlated_normals(rng, num_requests, self.correlation)
        ranks = normals.argsort(axis=1).argsort(axis=1)
        uniform = (ranks + rng.random((2, num_requests))) / max(num_requests, 1)
        prompt = np.interp(uniform[0], self.probabilities, self.prompt)
        output = np.interp(uniform[1], self.probabilities, self.output)
        return _lengths(prompt, output)


@dataclass(frozen=True)
class _Subjects:
    """Questions on subjects, each question behind the few-shot prefix of its subject.

    Lengths are scaled to the two means; a question's own part is lognormal around its subject's mean.
    """

    subjects: tuple[tuple[int, int, int], ...]
    """(questions, prefix tokens, mean tokens of a question) of each subject"""
    mean_prompt: float
    mean_shared: float
    sigma: float
    output_tokens: int

    def __call__(self, rng: np.random.Generator, num_requests: int) -> TraceSample:
        count, prefix, own = np.array(self.subjects, dtype=np.float64).T
        share = count / count.sum()
        prefix *= (self.mean_shared - SYSTEM_PROMPT_TOKENS) / (share @ prefix)
        own *= (self.mean_prompt - self.mean_shared) / (share @ own)
        # One question in each of equal strata: a small sample has every subject's share, not just on average.
        uniform = (np.arange(num_requests) + rng.random(num_requests)) / max(num_requests, 1)
        group = np.searchsorted(np.cumsum(share)[:-1], uniform, side="right").astype(np.int32)
        shared = SYSTEM_PROMPT_TOKENS + np.rint(prefix[group])
        question = own[group] * np.exp(self.sigma * rng.standard_normal(num_requests) - self.sigma**2 / 2.0)
        return TraceSample(
            (shared + np.maximum(np.rint(question), 1)).astype(np.int32),
            np.full(num_requests, self.output_tokens, dtype=np.int32),
            group,
            shared.astype(np.int32),
        )


# fmt: off
_SHAREGPT = _Quantiles(
    probabilities=(
        0.0, 0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8,
        0.85, 0.9, 0.925, 0.95, 0.96, 0.97, 0.98, 0.985, 0.99, 0.9925, 0.995, 0.9975, 0.999, 1.0,
    ),
    prompt=(
        1, 2, 4, 7, 9, 11, 13, 16, 18, 21, 25, 29, 36, 45, 58, 77, 106, 157, 255, 445, 818, 1151, 1605, 1888, 2223,
        2678, 3003, 3395, 3630, 3957, 4676, 5877, 8073,
    ),
    output=(
        1, 5, 10, 20, 39, 71, 102, 130, 161, 193, 224, 253, 280, 309, 338, 369, 404, 445, 501, 573, 683, 760, 846,
        881, 919, 954, 975, 999, 1017, 1040, 1078, 1148, 3323,
    ),
    correlation=0.07,
)
# fmt: on

# (questions, tokens of the 5-shot prefix, mean tokens of a question) of MMLU's 57 subjects, Llama-2 tokenizer.
# fmt: off
_MMLU_SUBJECTS = (
    (100, 317, 68), (135, 329, 72), (152, 589, 83), (100, 578, 86), (265, 406, 71), (144, 457, 90),
    (100, 524, 89), (100, 777, 116), (100, 554, 85), (173, 474, 127), (102, 450, 92), (100, 346, 71),
    (235, 277, 49), (114, 569, 109), (145, 435, 53), (378, 527, 74), (126, 559, 119), (100, 412, 64),
    (310, 498, 91), (203, 469, 92), (100, 861, 119), (165, 2755, 395), (198, 375, 55), (193, 441, 80),
    (390, 361, 77), (270, 493, 79), (238, 362, 79), (151, 505, 108), (545, 506, 73), (216, 768, 133),
    (204, 2178, 347), (237, 1234, 394), (223, 299, 54), (131, 328, 66), (121, 619, 101), (108, 364, 78),
    (163, 418, 76), (112, 638, 84), (103, 258, 49), (234, 394, 68), (100, 336, 64), (783, 283, 54),
    (346, 457, 79), (895, 627, 119), (306, 605, 84), (311, 300, 66), (324, 535, 76), (282, 695, 119),
    (1534, 1613, 294), (272, 1096, 225), (612, 553, 88), (110, 402, 65), (245, 1189, 180), (201, 423, 77),
    (100, 401, 69), (166, 330, 66), (171, 244, 47),
)
# fmt: on

TRACES: dict[str, Trace] = {
    trace.name: trace
    for trace in (
        Trace(
            "burstgpt",
            "synthetic: lognormal with the published means 244/27; spreads and correlation chosen so that the "
            "trace's density on the paper's device is the published 17.8",
            _Lognormal((244, 27), (1.0, 1.3), 0.336, max_prompt=8192, max_output=4096),
        ),
        Trace(
            "azure",
            "synthetic: lognormal with the published means 2508/23; coefficients of variation (0.96, 2.15) and the "
            "absent correlation are those of Azure's public 2023 code trace",
            _Lognormal((2508, 23), (0.81, 1.31), 0.0, max_prompt=16_384, max_output=2048),
        ),
        Trace(
            "sharegpt",
            "real quantiles of NanoFlow's ShareGPT file, prompts below 8192 and outputs below 4096 tokens; "
            "correlation fitted to the mean product of the two lengths",
            _SHAREGPT,
        ),
        Trace(
            "wildchat",
            "synthetic: lognormal with the published means 496 and 510, the latter scaled to 256 as the paper does; "
            "spreads and correlation assumed; shared conversation turns (19 %) left out",
            _Lognormal((496, 256), (1.127, 0.737), 0.2, max_prompt=16_384, max_output=2048),
        ),
        Trace(
            "openvid",
            "synthetic: lognormal with the published means 121 and 16,000, the latter the paper's normalisation of "
            "43,726; spreads assumed, which gives density 0.08 where the paper states 0.05; no whole frames",
            _Lognormal((121, 16_000), (0.294, 0.5), 0.0, max_prompt=400, max_output=MAX_TOKENS),
        ),
        Trace(
            "mmlu",
            "questions per subject, 5-shot prefix lengths and mean question lengths are real, scaled to the published "
            "means 804 input and 690 shared (system prompt included); questions lognormal around their subject's mean",
            _Subjects(_MMLU_SUBJECTS, mean_prompt=804, mean_shared=690, sigma=0.36, output_tokens=2),
        ),
        Trace(
            "limo",
            "synthetic: lognormal with the published means 109/7617; spreads and correlation assumed",
            _Lognormal((109, 7617), (0.594, 0.631), 0.1, max_prompt=1500, max_output=32_768, min_output=300),
        ),
    )
}
"""The traces of the paper by name. Source: BlendServe App. A.3."""

COMPUTE_TRACES = ("burstgpt", "azure", "sharegpt", "wildchat")
"""Traces that may be the compute-intensive part of a mix."""

PAPER_TRACES: dict[str, tuple[float, float]] = {
    "trace1": (1.4, 0.35),
    "trace2": (0.9, 0.35),
    "trace3": (1.4, 0.05),
    "trace4": (0.9, 0.05),
}
"""(density, sharing) of the four main workloads. Source: BlendServe §6.2."""

GRID: tuple[tuple[float, float], ...] = tuple(
    (round(0.8 + 0.05 * i, 2), round(0.05 + 0.1 * j, 2)) for i in range(13) for j in range(5)
)
"""(density, sharing) of the 65 workloads of the sensitivity study."""

HIGH_VARIANCE: tuple[str, ...] = tuple(
    f"{trace}-{density}-{sharing}"
    for trace in COMPUTE_TRACES
    if trace != "burstgpt"
    for density, sharing in PAPER_TRACES.values()
)
"""Names of the four main workloads with another trace in BurstGPT's place."""


# -- workloads -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Workload:
    """A job whose true output lengths are known to the experiment, not to the planner."""

    name: str
    requests: RequestTable
    output_tokens: Ints
    """[num_requests] length at which each request really ends"""
    trace_of: NDArray[np.int8]
    """[num_requests] index into `trace_names`"""
    trace_names: tuple[str, ...]

    @property
    def num_requests(self) -> int:
        """Requests of the job."""
        return len(self.requests)


def named_workload(name: str, num_requests: int, seed: int, cost_model: CostModel) -> Workload:
    """The mix that `name` stands for.

    `trace1` to `trace4`; `grid-1.05-0.25` for a point of `GRID`; `sharegpt-1.4-0.35` for a compute-intensive trace at a
    density and a sharing ratio; one of `DEEP_WORKLOADS`.

    Raises:
        ConfigError: no such workload, or it cannot be mixed from that many requests.
    """
    if name in DEEP_WORKLOADS:
        return _deep_workload(name, num_requests, seed, cost_model.model.vocab_size)
    trace, pair = "burstgpt", PAPER_TRACES.get(name)
    if found := re.fullmatch(r"([a-z]+)-(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)", name):
        pair = (float(found[2]), float(found[3]))
        if found[1] != "grid":
            trace = found[1]
        elif pair not in GRID:
            pair = None
    if pair is None or trace not in COMPUTE_TRACES:
        raise ConfigError(
            f"no workload {name!r}; choose {', '.join((*PAPER_TRACES, *DEEP_WORKLOADS))}, a grid point such as "
            "grid-1.05-0.25 (density 0.80 to 1.40 in steps of 0.05, sharing 0.05 to 0.45 in steps of 0.10), or "
            f"TRACE-DENSITY-SHARING with one of {', '.join(COMPUTE_TRACES)}"
        )
    mixed = mix(*pair, num_requests, compute_trace=trace, seed=seed, cost_model=cost_model)
    return replace(mixed, name=name)


def mix(
    density: float,
    sharing: float,
    num_requests: int,
    *,
    compute_trace: str = "burstgpt",
    seed: int = 0,
    cost_model: CostModel,
    max_tokens: int = MAX_TOKENS,
) -> Workload:
    """A compute-intensive trace, OpenVid and MMLU in the proportions that give `density` and `sharing`, shuffled.

    Density is stated as the paper states it, at the device's peak rates: `ρ = (1−s) Σ Comp / Σ Mem`, with s the share
    of prompt tokens that need not be computed. The same seed gives the same workload, token for token.
    Source: BlendServe §4.2, §6.2. Differs: Comp leaves out the p² term, without which the paper's own figures for its
    traces come out; and videos, of which there are few, are drawn from equal strata and their lengths scaled by one
    factor near 1, so that the workload at hand has the density asked for and not only its expectation.

    Raises:
        ConfigError: no proportions give the pair, or `num_requests` holds too few videos to come near it.
    """
    if compute_trace not in COMPUTE_TRACES:
        raise ConfigError(
            f"trace {compute_trace!r} is not compute-intensive; choose {', '.join(COMPUTE_TRACES)}"
        )
    names = (compute_trace, "openvid", "mmlu")
    name = f"{compute_trace}-{density:g}-{sharing:g}"
    peak = replace(cost_model, at_peak=True)
    rng = np.random.default_rng(seed)
    counts = _class_counts(names, density, sharing, num_requests, peak)
    bulk, videos, questions = (
        TRACES[names[0]].sample(rng, counts[0]),
        _stratified(TRACES[names[1]], rng, counts[1]),
        TRACES[names[2]].sample(rng, counts[2]),
    )
    videos = _scale_to_density(videos, (bulk, questions), density, name, peak)
    samples = (bulk, videos, questions)
    _check_realised(samples, density, sharing, name, peak)

    order = rng.permutation(num_requests)
    trace_of = np.repeat(np.arange(3, dtype=np.int8), counts)[order]
    sample = _concatenate(samples).take(order)
    if int(sample.output_tokens.max()) > max_tokens:
        raise ConfigError(
            f"{name} has outputs of {sample.output_tokens.max()} tokens; raise max_tokens from {max_tokens}"
        )
    vocab_size = cost_model.model.vocab_size
    tokens = _random_tokens(rng, sample.prompt_tokens, vocab_size)
    for index in range(len(names)):
        system = rng.integers(vocab_size, size=SYSTEM_PROMPT_TOKENS, dtype=np.uint32)
        rows = np.flatnonzero(trace_of == index)
        _write_prefixes(rng, tokens, rows, sample.group, sample.shared_tokens, system, vocab_size)
    requests = _request_table(tokens, max_tokens, rng.integers(2**63, size=num_requests, dtype=np.uint64))
    return Workload(name, requests, sample.output_tokens, trace_of, names)


class _Realised(NamedTuple):
    density: float
    sharing: float


def _class_counts(
    names: Sequence[str], density: float, sharing: float, num_requests: int, peak: CostModel
) -> list[int]:
    """Requests of each trace: the solution of the two equations of density and sharing, in expectation."""
    pilots = [_pilot(name) for name in names]
    compute_s = np.array([_compute_s(pilot, peak) / len(pilot) for pilot in pilots])
    memory_s = np.array([_memory_s(pilot, peak) / len(pilot) for pilot in pilots])
    prompt = np.array([pilot.prompt_tokens.mean() for pilot in pilots])
    shared = np.array([pilot.shared_tokens.mean() for pilot in pilots])
    # Each prefix is computed once; what is saved is its other occurrences.
    once = sum(_prefix_tokens(pilot) for pilot in pilots)
    equations = np.array(
        [
            np.ones(len(names)),
            (shared - sharing * prompt) / prompt.max(),
            ((1.0 - sharing) * compute_s - density * memory_s) / compute_s.max(),
        ]
    )
    counts = np.linalg.solve(equations, [num_requests, once / prompt.max(), 0.0])
    for name, count, remedy in zip(
        names,
        counts,
        ("ask for less sharing or more requests", "ask for a density nearer to 1", "ask for more sharing"),
        strict=True,
    ):
        if count < 0:
            raise ConfigError(
                f"{num_requests} requests of {', '.join(names)} cannot have density {density:g} and sharing "
                f"{sharing:g} together: that would take {count:.0f} of {name}; {remedy}"
            )
    num_videos = max(round(counts[1]), 1)
    num_questions = round(counts[2])
    num_bulk = num_requests - num_videos - num_questions
    if num_bulk < 0:
        raise ConfigError(f"{num_requests} requests are too few to mix {', '.join(names)}")
    return [num_bulk, num_videos, num_questions]


@lru_cache(maxsize=len(TRACES))
def _pilot(name: str) -> TraceSample:
    """A sample large enough to stand for the trace's expectations."""
    return TRACES[name].sample(np.random.default_rng(0), 200_000)


def _stratified(trace: Trace, rng: np.random.Generator, num_requests: int) -> TraceSample:
    """Requests of a trace, one from each of equally likely ranges of output length."""
    per_stratum = 64
    pool = trace.sample(rng, num_requests * per_stratum)
    strata = np.argsort(pool.output_tokens, kind="stable").reshape(num_requests, per_stratum)
    return pool.take(strata[np.arange(num_requests), rng.integers(per_stratum, size=num_requests)])


def _scale_to_density(
    videos: TraceSample, others: Sequence[TraceSample], density: float, name: str, peak: CostModel
) -> TraceSample:
    """The videos with all output lengths times the factor f that gives the whole `density`.

    Of the equation `(1−s) Σ Comp = ρ Σ Mem`, Comp is linear in f and Mem quadratic.
    """
    computed = 1.0 - _realised((*others, videos), peak).sharing
    prompt, output = videos.prompt_tokens.astype(np.float64), videos.output_tokens.astype(np.float64)
    per_token = float(peak.decode_compute_s(1.0))
    own_kv_s = float(peak.memory_s(0, output).sum())
    prompt_kv_s = _memory_s(videos, peak) - own_kv_s
    quadratic = density * own_kv_s
    linear = density * prompt_kv_s - computed * per_token * float(output.sum())
    constant = density * sum(_memory_s(other, peak) for other in others) - computed * (
        sum(_compute_s(other, peak) for other in others) + per_token * float(prompt.sum())
    )
    root = max(linear**2 - 4.0 * quadratic * constant, 0.0) ** 0.5
    factor = (root - linear) / (2.0 * quadratic)
    if not 0.7 <= factor <= 1.4:
        raise ConfigError(
            f"{name} of so few requests would need {len(videos)} video(s) {factor:.2f} times as long as OpenVid's; "
            "use more requests"
        )
    scaled = np.clip(np.rint(output * factor), 1, MAX_TOKENS).astype(np.int32)
    return replace(videos, output_tokens=scaled)


def _check_realised(
    samples: Sequence[TraceSample], density: float, sharing: float, name: str, peak: CostModel
) -> None:
    realised = _realised(samples, peak)
    if abs(realised.density / density - 1.0) > 0.03 or abs(realised.sharing - sharing) > 0.02:
        raise ConfigError(
            f"{sum(map(len, samples))} requests of {name} came out with density {realised.density:.3f} and sharing "
            f"{realised.sharing:.3f}; use more requests"
        )


def _realised(samples: Sequence[TraceSample], peak: CostModel) -> _Realised:
    """Density and sharing ratio of the requests at hand. Source: BlendServe §4.2."""
    prompt = sum(int(sample.prompt_tokens.sum(dtype=np.int64)) for sample in samples)
    saved = sum(int(sample.shared_tokens.sum(dtype=np.int64)) - _prefix_tokens(sample) for sample in samples)
    sharing = saved / prompt
    compute_s = sum(_compute_s(sample, peak) for sample in samples)
    return _Realised(
        (1.0 - sharing) * compute_s / sum(_memory_s(sample, peak) for sample in samples), sharing
    )


def _compute_s(sample: TraceSample, peak: CostModel) -> float:
    """Σ Comp without sharing and without the p² term."""
    return float(peak.decode_compute_s(sample.prompt_tokens + sample.output_tokens).sum())


def _memory_s(sample: TraceSample, peak: CostModel) -> float:
    return float(peak.memory_s(sample.prompt_tokens, sample.output_tokens).sum())


def _prefix_tokens(sample: TraceSample) -> int:
    """Tokens of the distinct prefixes of one trace's requests: its system prompt and what each group adds to it."""
    if not len(sample):
        return 0
    _, first = np.unique(sample.group, return_index=True)
    shared = sample.shared_tokens[first].astype(np.int64)
    return int(shared.sum() - (len(first) - 1) * SYSTEM_PROMPT_TOKENS)


def _concatenate(samples: Sequence[TraceSample]) -> TraceSample:
    return TraceSample(
        np.concatenate([sample.prompt_tokens for sample in samples]),
        np.concatenate([sample.output_tokens for sample in samples]),
        np.concatenate([sample.group for sample in samples]),
        np.concatenate([sample.shared_tokens for sample in samples]),
    )


# -- workloads of several prefix levels ------------------------------------------------------------------------------


class PrefixForest(NamedTuple):
    """Requests as nodes of a forest; a prompt is the segments from the root down to its request's node."""

    parent: Ints
    """[num_nodes] -1 for roots; parents come before their children"""
    tokens: Ints
    """[num_nodes] length of each node's own segment"""
    node: Ints
    """[num_requests] node at which each prompt ends"""
    output_tokens: Ints
    """[num_requests]"""
    is_long: NDArray[np.bool_]
    """[num_requests] whether the output is of the long kind"""


@dataclass(frozen=True, slots=True)
class Outputs:
    """Two kinds of outputs, lognormal; tokens."""

    short: float
    long: float
    long_ratio: float
    """share of the long kind"""
    sigmas: tuple[float, float] = (0.8, 0.5)
    longest: int = 8192

    def sample(self, rng: np.random.Generator, is_long: NDArray[np.bool_]) -> Ints:
        """An output for each entry."""
        mean = np.where(is_long, self.long, self.short)
        return np.minimum(_lognormal(rng, mean, np.where(is_long, *self.sigmas[::-1])), self.longest)


@dataclass(frozen=True, slots=True)
class Agents:
    """System prompt, tool schema, few-shot examples (a task), document, question: five levels. All synthetic.

    Every document belongs to one task; how often it is asked about varies lognormally.
    """

    branches: tuple[int, int, int] = (4, 3, 3)
    """system prompts, tool schemas of each, tasks of each"""
    level_tokens: tuple[int, int, int, int, int] = (300, 600, 500, 1500, 60)
    """mean length of each level's segment"""
    sigma: float = 0.4
    """log-spread of segments"""
    questions_per_document: float = 4.0
    popularity_sigma: float = 1.0
    long_by: Literal["task", "question"] = "task"
    """whether a whole task has long outputs, or any question may, next to short ones on the same document"""
    outputs: Outputs = Outputs(short=25, long=1200, long_ratio=1 / 12)

    def sample(self, rng: np.random.Generator, num_requests: int) -> PrefixForest:
        """Questions in random order."""
        counts = np.cumprod(self.branches).tolist()
        num_documents = max(round(num_requests / self.questions_per_document), 1)
        counts += [num_documents, num_requests]
        popularity = np.cumsum(_lognormal(rng, np.full(num_documents, 1e3), self.popularity_sigma))
        document = np.searchsorted(popularity, rng.random(num_requests) * popularity[-1], side="right")
        num_tasks = counts[2]
        task = rng.permutation(num_documents) % num_tasks
        above = [np.arange(n) // b for n, b in zip(counts[1:3], self.branches[1:], strict=True)]
        first = np.cumsum([0, *counts])
        parent = np.full(counts[0], -1)
        for level, up in enumerate([*above, task, document]):
            parent = np.concatenate((parent, first[level] + up))
        if self.long_by == "task":
            long_tasks = rng.permutation(num_tasks)[: max(round(self.outputs.long_ratio * num_tasks), 1)]
            is_long = np.isin(task[document], long_tasks)
        else:
            is_long = rng.random(num_requests) < self.outputs.long_ratio
        tokens = _lognormal(rng, np.repeat(np.array(self.level_tokens, dtype=np.float64), counts), self.sigma)
        node = np.arange(first[4], first[5], dtype=np.int32)
        outputs = self.outputs.sample(rng, is_long)
        return PrefixForest(parent.astype(np.int32), tokens, node, outputs, is_long)


@dataclass(frozen=True, slots=True)
class Conversations:
    """Every turn of every conversation is a request whose prompt holds all earlier turns. All synthetic.

    Answers in prompts are as long as the outputs of the turns they answer. Where a conversation branches, the branches
    share the answer too.
    """

    system_prompts: int = 8
    system_tokens: int = 200
    message_tokens: int = 80
    sigma: float = 0.7
    """log-spread of messages"""
    continued_ratio: float = 0.7
    """turns that are followed by another …"""
    branched_ratio: float = 0.1
    """… and those, of all, that are followed by two"""
    longest_prompt: int = 16_384
    """longer conversations are not continued"""
    outputs: Outputs = Outputs(short=120, long=2000, long_ratio=0.04)

    def sample(self, rng: np.random.Generator, num_requests: int) -> PrefixForest:
        """Turns in random order."""
        is_long = rng.random(num_requests) < self.outputs.long_ratio
        outputs = self.outputs.sample(rng, is_long)
        message = _lognormal(rng, np.full(num_requests, float(self.message_tokens)), self.sigma)
        system = _lognormal(rng, np.full(self.system_prompts, float(self.system_tokens)), self.sigma)
        chance = rng.random(num_requests)
        followers = (chance < self.continued_ratio).astype(int) + (chance < self.branched_ratio)
        # Nodes: system prompts, then the message and the answer of each turn in turn.
        which = rng.integers(self.system_prompts, size=num_requests)
        parent = np.empty((num_requests, 2), dtype=np.int32)
        prompt = np.empty(num_requests, dtype=np.int64)
        open_turns: list[int] = []
        for turn in range(num_requests):
            message_node = self.system_prompts + 2 * turn
            earlier = open_turns.pop() if open_turns else None
            if earlier is None:
                parent[turn] = which[turn], message_node
                prompt[turn] = system[which[turn]] + message[turn]
            else:
                parent[turn] = self.system_prompts + 2 * earlier + 1, message_node
                prompt[turn] = prompt[earlier] + outputs[earlier] + message[turn]
            if prompt[turn] + outputs[turn] < self.longest_prompt:
                open_turns += [turn] * followers[turn]
        order = rng.permutation(num_requests)
        return PrefixForest(
            np.concatenate((np.full(self.system_prompts, -1, dtype=np.int32), parent.reshape(-1))),
            np.concatenate((system, np.stack((message, outputs), axis=1).reshape(-1))),
            (self.system_prompts + 2 * order).astype(np.int32),
            outputs[order],
            is_long[order],
        )


DEEP_WORKLOADS: dict[str, Agents | Conversations] = {
    "agents": Agents(),
    "agents-mixed": Agents(long_by="question"),
    "conversations": Conversations(),
}
"""Workloads of several prefix levels by name. All figures are assumed, chosen for a density near 1 after sharing."""


def _deep_workload(name: str, num_requests: int, seed: int, vocab_size: int) -> Workload:
    rng = np.random.default_rng(seed)
    forest = DEEP_WORKLOADS[name].sample(rng, num_requests)
    seeds = rng.integers(2**63, size=num_requests, dtype=np.uint64)
    requests = _request_table(_forest_tokens(rng, forest, vocab_size), MAX_TOKENS, seeds)
    return Workload(name, requests, forest.output_tokens, forest.is_long.astype(np.int8), ("short", "long"))


def _forest_tokens(rng: np.random.Generator, forest: PrefixForest, vocab_size: int) -> PromptTokens:
    """Random tokens for every node, put together along each prompt's path."""
    parent, tokens = forest.parent.tolist(), forest.tokens.tolist()
    first = (np.cumsum(forest.tokens, dtype=np.int64) - forest.tokens).tolist()
    pool = rng.integers(vocab_size, size=first[-1] + tokens[-1], dtype=np.uint32)
    depth = tokens.copy()
    for node, above in enumerate(parent):
        depth[node] += depth[above] if above >= 0 else 0
    lengths = np.array(depth, dtype=np.int32)[forest.node]
    ends = np.cumsum(lengths, dtype=np.int64)
    data = np.empty(int(ends[-1]), dtype=np.uint32)
    for last, prompt_end in zip(forest.node.tolist(), ends.tolist(), strict=True):
        node, end = last, prompt_end
        while node >= 0:
            begin = end - tokens[node]
            data[begin:end] = pool[first[node] : first[node] + tokens[node]]
            node, end = parent[node], begin
    return PromptTokens(data, ends - lengths, lengths)


def _lognormal(rng: np.random.Generator, mean: Floats, sigma: float | Floats) -> Ints:
    """A whole number of tokens, at least 1, around each mean."""
    spread = np.exp(sigma * rng.standard_normal(len(mean)) - np.square(sigma) / 2.0)
    return np.maximum(np.rint(mean * spread), 1).astype(np.int32)


# -- prompts ---------------------------------------------------------------------------------------------------------


def _random_tokens(rng: np.random.Generator, prompt_tokens: Ints, vocab_size: int) -> PromptTokens:
    """Prompts of these lengths, every token at random."""
    ends = np.cumsum(prompt_tokens, dtype=np.int64)
    data = rng.integers(vocab_size, size=int(ends[-1]), dtype=np.uint32)
    return PromptTokens(data, ends - prompt_tokens, prompt_tokens)


def _write_prefixes(
    rng: np.random.Generator,
    tokens: PromptTokens,
    rows: NDArray[np.int64],
    group: Ints,
    shared_tokens: Ints,
    system: NDArray[np.uint32],
    vocab_size: int,
) -> None:
    """Let the prompts `rows` of one group begin alike: with `system`, then random tokens of the group's own.

    Prompts of a group may share less than others of it; they then begin with less of the same tokens.
    """
    rows = rows[np.argsort(group[rows], kind="stable")]
    for members in np.split(rows, np.flatnonzero(np.diff(group[rows])) + 1):
        lengths = np.unique(shared_tokens[members])
        longest = int(lengths.max(initial=0))
        own = rng.integers(vocab_size, size=max(longest - len(system), 0), dtype=np.uint32)
        prefix = np.concatenate([system, own])
        for length in lengths[lengths > 0]:
            starts = tokens.starts[members[shared_tokens[members] == length]]
            # Row i of the window view is data[i : i + length]; prompts do not overlap, so neither do these rows.
            sliding_window_view(tokens.data, length, writeable=True)[starts] = prefix[:length]


def _request_table(tokens: PromptTokens, max_tokens: int, seeds: NDArray[np.uint64]) -> RequestTable:
    num_requests = len(tokens)
    return RequestTable(
        tokens=tokens,
        max_tokens=np.full(num_requests, max_tokens, dtype=np.int32),
        declared_tokens=np.zeros(num_requests, dtype=np.int32),
        params=[SamplingParams()],
        params_index=np.zeros(num_requests, dtype=np.int32),
        seeds=seeds,
    )


# -- files -----------------------------------------------------------------------------------------------------------


def from_lengths_csv(
    path: Path,
    *,
    seed: int = 0,
    limit: int | None = None,
    vocab_size: int = VOCAB_SIZE,
    max_tokens: int = MAX_TOKENS,
) -> Workload:
    """Requests with the lengths of a CSV file, one a row after the header, and random tokens.

    Columns: `input_tokens`, `output_tokens`; optionally `shared_prefix_tokens`, how many of the prompt's first tokens
    it shares with the other requests of its `group` (any text; without the column all rows are one group).

    Args:
        path: the file.
        seed: of the tokens.
        limit: most rows to read; None: all.
        vocab_size: token ids are below it.
        max_tokens: cap on outputs that the requests state; the file's may not exceed it.

    Raises:
        ConfigError: the file cannot be read, or a row of it is wrong; the message names the line.
    """
    rows: list[tuple[int, int, int]] = []
    groups: list[int] = []
    number_of: dict[str, int] = {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = {"input_tokens", "output_tokens"} - set(reader.fieldnames or ())
            if missing:
                raise ConfigError(f"{path} has no column {', '.join(sorted(missing))}")
            for row in reader:
                if limit is not None and len(rows) == limit:
                    break
                where = f"{path}, line {reader.line_num}"
                prompt = _count(row["input_tokens"], "input_tokens", where)
                output = _count(row["output_tokens"], "output_tokens", where, most=max_tokens)
                shared = row.get("shared_prefix_tokens", "0")
                prefix = _count(shared, "shared_prefix_tokens", where, least=0, most=prompt)
                rows.append((prompt, output, prefix))
                groups.append(number_of.setdefault(row.get("group") or "", len(number_of)))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read as CSV: {error}") from error
    if not rows:
        raise ConfigError(f"{path} holds no requests")
    prompts, outputs, prefixes = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
    rng = np.random.default_rng(seed)
    tokens = _random_tokens(rng, prompts, vocab_size)
    _write_prefixes(
        rng,
        tokens,
        np.arange(len(rows)),
        np.array(groups, dtype=np.int32),
        prefixes,
        np.empty(0, dtype=np.uint32),
        vocab_size,
    )
    seeds = rng.integers(2**63, size=len(rows), dtype=np.uint64)
    return _file_workload(path, _request_table(tokens, max_tokens, seeds), outputs)


def from_block_hashes(
    path: Path,
    *,
    block_tokens: int = 512,
    limit: int | None = None,
    vocab_size: int = VOCAB_SIZE,
    max_tokens: int = MAX_TOKENS,
) -> Workload:
    """Requests of a trace in Mooncake's format: JSON lines of lengths and of the hash of each block of the prompt.

    Keys: `input_tokens` (or `input_length`), `output_tokens` (or `output_length`), `hash_ids`, one for each
    `block_tokens` tokens of the prompt, the last block perhaps partial. A block's tokens are a function of its hash id
    alone, so prompts share what the trace's prompts shared.

    Raises:
        ConfigError: the file cannot be read, or a line of it is wrong; the message names the line.
    """
    lengths: list[tuple[int, int]] = []
    hash_ids: list[int] = []
    for where, row in _json_lines(path, limit):
        prompt = _count(row.get("input_tokens", row.get("input_length")), "input_tokens", where)
        output_value = row.get("output_tokens", row.get("output_length"))
        output = _count(output_value, "output_tokens", where, most=max_tokens)
        blocks, num_blocks = row.get("hash_ids"), -(-prompt // block_tokens)
        if not isinstance(blocks, list) or len(blocks) != num_blocks:
            raise ConfigError(
                f"{where}: {prompt} input tokens need {num_blocks} hash_ids, found {blocks!r:.80}"
            )
        hash_ids += [_count(block, "hash_ids", where, least=0, most=2**62) for block in blocks]
        lengths.append((prompt, output))
    if not lengths:
        raise ConfigError(f"{path} holds no requests")
    prompts, outputs = (np.array(column, dtype=np.int32) for column in zip(*lengths, strict=True))
    num_blocks_of = -(-prompts.astype(np.int64) // block_tokens)
    starts = (
        np.cumsum(num_blocks_of) - num_blocks_of
    ) * block_tokens  # the rest of a partial block stays unused
    data = _block_tokens(np.array(hash_ids, dtype=np.uint64), block_tokens, vocab_size)
    tokens = PromptTokens(data, starts, prompts)
    seeds = _mix_bits(np.arange(len(prompts), dtype=np.uint64))
    return _file_workload(path, _request_table(tokens, max_tokens, seeds), outputs)


def _file_workload(path: Path, requests: RequestTable, output_tokens: Ints) -> Workload:
    return Workload(path.stem, requests, output_tokens, np.zeros(len(requests), dtype=np.int8), (path.stem,))


def _json_lines(path: Path, limit: int | None) -> Iterator[tuple[str, dict[str, object]]]:
    """(where for messages, object) of each line that is not blank."""
    num_rows = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if num_rows == limit:
                    return
                if not line.strip():
                    continue
                where = f"{path}, line {number}"
                try:
                    row = orjson.loads(line)
                except orjson.JSONDecodeError as error:
                    raise ConfigError(f"{where}: no JSON ({error})") from error
                if not isinstance(row, dict):
                    raise ConfigError(f"{where}: expected a JSON object, found {type(row).__name__}")
                num_rows += 1
                yield where, row
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _count(value: object, name: str, where: str, *, least: int = 1, most: int = 2**31 - 1) -> int:
    """`value` of a file as an integer within bounds."""
    try:
        number = int(value) if isinstance(value, str | int) and not isinstance(value, bool) else None
    except ValueError:
        number = None
    if number is None or not least <= number <= most:
        raise ConfigError(f"{where}: {name} must be an integer from {least} to {most}, found {value!r}")
    return number


def _block_tokens(hash_ids: NDArray[np.uint64], block_tokens: int, vocab_size: int) -> NDArray[np.uint32]:
    """[len(hash_ids) * block_tokens] tokens of the blocks, one after the other."""
    data = np.empty((len(hash_ids), block_tokens), dtype=np.uint32)
    positions = np.arange(block_tokens, dtype=np.uint64)
    for start in range(0, len(hash_ids), 4096):  # in pieces: the hashes are twice as wide as the tokens
        piece = slice(start, start + 4096)
        keys = _mix_bits(hash_ids[piece])[:, None] + positions
        data[piece] = _mix_bits(keys) % np.uint64(vocab_size)
    return data.reshape(-1)


def _mix_bits(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64-bit integers that looks random. Source: SplitMix64 (Steele, Lea, Flood 2014)."""
    z = keys + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
