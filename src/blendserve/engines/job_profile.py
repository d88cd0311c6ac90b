"""Step costs of an engine that schedules for itself, out of how long small jobs take.

| job | what its time is |
| --- | --- |
| one prompt, one token | a step that computes the prompt |
| `n` prompts, one token each | steps that compute them |
| `n` prompts, `k` + 1 tokens each, less the same with one | `k` steps that decode `n` rows |

All prompts are random tokens, so that no prefix is shared, and greedy outputs go on to their limit.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import orjson

from blendserve.engines import Engine, EngineConfig, open_engine
from blendserve.engines.openai_server import OpenAIServer
from blendserve.engines.profile import LEAST_SAMPLES, Measured, StepSample
from blendserve.errors import ConfigError, EngineError
from blendserve.models import ModelFiles
from blendserve.planner.plan import make_plan
from blendserve.request import Completion, Failure, RawRequest, RequestTable, SamplingParams
from blendserve.scheduling.policies import make_policy
from blendserve.tokenizer import ApproximateTokenizer
from blendserve.tokens import PromptTokens

DECODE_STEPS = 32
"""that a decode is measured over"""
REPETITIONS = 3
"""of all jobs, one after the other, of which medians are taken, if there is time"""
MAX_PROMPT = 4096
"""tokens of the longest prompt that is tried"""
FIRST_TOKEN, LAST_TOKEN = 1000, 9000
"""of which prompts are made: words in any vocabulary, and no special tokens"""


class JobPoint(NamedTuple):
    """A job of equal requests that shows what a kind of step costs."""

    num_rows: int
    prompt: int
    decodes: bool = False


def job_points(
    *, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int, kv_capacity_tokens: int
) -> list[JobPoint]:
    """Jobs that tell the terms of a step's cost apart, the most telling first."""
    most_held = min(max_model_len, kv_capacity_tokens)
    longest = min(most_held - DECODE_STEPS - 2, most_held // 2 + 1, MAX_PROMPT)
    full = min(max_num_batched_tokens, longest)

    def decodes(rows: int, prompt: int) -> JobPoint:
        fits = max(kv_capacity_tokens * 9 // 10 // (prompt + DECODE_STEPS + 1), 1)
        return JobPoint(min(rows, max_num_seqs, fits), prompt, decodes=True)

    most = min(max_num_seqs, 64)
    points = [
        JobPoint(1, full),
        decodes(1, longest // 8),
        decodes(most, max(longest // 32, 8)),
        decodes(most // 4, longest // 4),
        JobPoint(1, max(full // 4, 1)),
        JobPoint(max(full // 64, 1), min(full, 64)),
        decodes(1, longest),
        decodes(most // 2, longest // 8),
        JobPoint(1, 16),
        JobPoint(1, max(full // 2, 1)),
        decodes(max(most // 8, 1), longest),
        decodes(max(most // 4, 1), 16),
    ]
    return [point for point in dict.fromkeys(points) if point.num_rows > 0 and point.prompt > 0]


def measure_jobs(
    config: EngineConfig, files: ModelFiles, max_time_s: float, on_sample: Callable[[StepSample], None]
) -> Measured:
    """Steps of an engine that runs a job as a whole; see the module.

    Args:
        config: of the engine; a server must have nothing else to do.
        files: the model.
        max_time_s: after which no further job is begun.
        on_sample: called with every sample as it comes.

    Raises:
        ConfigError: the engine cannot be opened, or ends outputs early.
    """
    if len(config.base_urls) > 1:
        raise ConfigError("one server is measured at a time; give one --base-url")
    cost_model = config.cost_model(files)
    engine = open_engine(config, files, ApproximateTokenizer(), cost_model)
    try:
        hardware, model = engine.cost_model.hardware, engine.cost_model.model
        points = job_points(
            max_num_batched_tokens=hardware.max_num_batched_tokens,
            max_num_seqs=hardware.max_num_seqs,
            max_model_len=min(engine.max_model_len, model.max_model_len),
            kv_capacity_tokens=engine.kv_capacity_tokens,
        )
        timer = _JobTimer(engine, config, files.name, max_time_s)
        timer(1, 16, 2)  # whatever is compiled or allocated on first use
        found: dict[JobPoint, list[StepSample]] = {}
        for point in points * REPETITIONS:
            if timer.is_over and len(found) >= LEAST_SAMPLES:
                break
            if (sample := timer.sample(point)) is not None:
                found.setdefault(point, []).append(sample)
                on_sample(sample)
        kv_bytes = engine.kv_capacity_tokens * model.kv_bytes_per_token
    finally:
        engine.close()
    where = (
        f"{config.engine} at {config.base_urls[0]}"
        if config.is_remote
        else f"{config.engine} on this machine"
    )
    samples = [_median(of_point) for of_point in found.values()]
    return Measured(samples, None, kv_bytes, f"{where}, {config.dtype}")


def _median(samples: list[StepSample]) -> StepSample:
    duration_s = statistics.median(sample.duration_s for sample in samples)
    return samples[0]._replace(duration_s=duration_s)


class _JobTimer:
    def __init__(self, engine: Engine, config: EngineConfig, model: str, max_time_s: float) -> None:
        self._engine = engine
        self._forwards = config.forwards
        self._model = model
        self._until_s = time.perf_counter() + max_time_s
        self._rng = np.random.default_rng(0)
        self._overhead_s = 0.0
        if isinstance(engine, OpenAIServer):
            engine.flushes_cache = False  # no prompt comes twice
            self._overhead_s = engine.round_trip_s()

    @property
    def is_over(self) -> bool:
        return time.perf_counter() > self._until_s

    def sample(self, point: JobPoint) -> StepSample | None:
        """The step that a job shows; None where noise is all there is."""
        num_rows, prompt, decodes = point
        first_s = self(num_rows, prompt, 1)
        if decodes:
            duration_s = (self(num_rows, prompt, DECODE_STEPS + 1) - first_s) / DECODE_STEPS
            context = prompt + DECODE_STEPS / 2
            sample = StepSample(0, num_rows, round(num_rows * context), duration_s)
        else:
            pairs = num_rows * prompt * (prompt + 1) / 2
            sample = StepSample(num_rows * prompt, 0, 0, first_s - self._overhead_s, pairs)
        return sample if sample.duration_s > 0 else None

    def __call__(self, num_rows: int, prompt: int, output_tokens: int) -> float:
        """Seconds that a job takes.

        Raises:
            EngineError: a request failed.
            ConfigError: outputs end before they should.
        """
        requests = self._requests(num_rows, prompt, output_tokens)
        policy = make_policy("fcfs", make_plan(requests, self._engine.cost_model))
        began_s = time.perf_counter()
        results = [result for step in self._engine.run(requests, policy) for _, result in step.results]
        took_s = time.perf_counter() - began_s
        for result in results:
            if isinstance(result, Failure):
                raise EngineError(f"a request of the measurement failed: {result.message}")
            assert isinstance(result, Completion)
            if result.num_output_tokens != output_tokens:
                raise ConfigError(
                    f"the engine generated {result.num_output_tokens} tokens where {output_tokens} were asked for with "
                    "ignore_eos; only an engine that does that can be measured"
                )
        return took_s

    def _requests(self, num_rows: int, prompt: int, output_tokens: int) -> RequestTable:
        prompts = self._rng.integers(FIRST_TOKEN, LAST_TOKEN, (num_rows, prompt)).tolist()
        raw = None
        if self._forwards:
            body = {"model": self._model, "max_tokens": output_tokens, "temperature": 0.0, "ignore_eos": True}
            raw = [
                RawRequest("/v1/completions", orjson.dumps({**body, "prompt": tokens})) for tokens in prompts
            ]
        return RequestTable(
            tokens=PromptTokens.from_lists(prompts),
            max_tokens=np.full(num_rows, output_tokens, dtype=np.int32),
            declared_tokens=np.full(num_rows, output_tokens, dtype=np.int32),
            params=[SamplingParams(temperature=0.0, ignore_eos=True)],
            params_index=np.zeros(num_rows, dtype=np.int32),
            seeds=np.zeros(num_rows, dtype=np.uint64),
            raw=raw,
        )
