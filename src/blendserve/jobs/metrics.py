"""A Prometheus endpoint for a running job; names are vLLM's where it has one, with `blendserve_` before them.

A scrape runs in a thread of its own and only reads numbers that the job's thread has left in the `Telemetry`.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import blendserve
from blendserve.errors import ConfigError
from blendserve.jobs.telemetry import Histogram, Telemetry

if TYPE_CHECKING:
    from prometheus_client import Metric


class JobMetrics:
    """Collects a job's metrics when they are asked for; the job itself does nothing for them."""

    def __init__(self) -> None:
        self._model = ""
        self._telemetry: Telemetry | None = None

    def watch(self, telemetry: Telemetry, model: str) -> None:
        """Collect from here on; before it there is only the version."""
        self._model, self._telemetry = model, telemetry

    def collect(self) -> Iterator[Metric]:
        """All metrics at this moment."""
        from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily

        yield InfoMetricFamily("blendserve_build", "Version that runs.", {"version": blendserve.__version__})
        telemetry = self._telemetry
        if telemetry is None:
            return
        progress, facts = telemetry.progress, telemetry.facts
        gauges: list[tuple[str, str, float | None]] = [
            ("num_requests_running", "Requests in the engine's batch.", progress.num_running),
            ("num_requests_waiting", "Requests that wait to be admitted.", progress.num_waiting),
            ("kv_cache_usage_perc", "KV cache in use; 1 means 100 percent.", progress.kv_usage_ratio),
            (
                "compute_ratio",
                "Compute in the modelled time of recent steps; the rest is memory.",
                facts["compute_ratio"],
            ),
            ("tokens_per_second", "Tokens computed per second of late.", facts["tokens_per_s"]),
            ("lines", "Lines of the input.", progress.total),
            ("lines_done_before", "Lines whose result an earlier run wrote.", progress.num_done),
            ("remaining_seconds", "Expected time to the end of the job.", facts["remaining_s_est"]),
        ]
        for name, text, value in gauges:
            if value is not None:
                gauge = GaugeMetricFamily(f"blendserve_{name}", text, labels=["model_name"])
                gauge.add_metric([self._model], value)
                yield gauge
        yield from self._counters(telemetry)
        yield self._histogram("step_time_seconds", "Duration of an engine step.", telemetry.step_time_s)
        yield self._histogram(
            "request_prompt_tokens", "Prompt tokens of completions.", telemetry.prompt_length
        )
        yield self._histogram(
            "request_generation_tokens", "Output tokens of completions.", telemetry.output_length
        )

    def _counters(self, telemetry: Telemetry) -> Iterator[Metric]:
        progress = telemetry.progress
        counters = (
            ("prompt_tokens", "Prompt tokens of completions.", progress.num_prompt_tokens),
            ("generation_tokens", "Output tokens of completions.", progress.num_output_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", progress.num_prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", progress.num_cached_tokens),
            ("computed_prefill_tokens", "Prompt tokens computed, recomputed ones too.", progress.num_prefill_tokens),
            ("computed_decode_tokens", "Tokens decoded.", progress.num_decode_tokens),
            ("num_preemptions", "Requests whose memory was taken back.", progress.num_retracted),
            ("engine_steps", "Engine steps.", progress.num_steps),
            ("request_retries", "Requests that ran again after a failure.", progress.num_retried_requests),
            ("engine_restarts", "Engines started anew after one died.", progress.num_engine_restarts),
        )  # fmt: skip
        for name, text, value in counters:
            yield self._counter(name, text, {(): value})
        lines = {("completed",): progress.completed, ("failed",): progress.failed}
        yield self._counter("lines_finished", "Lines this run wrote, by outcome.", lines, "outcome")
        reasons = {(reason,): telemetry.finish_reasons[reason] for reason in ("stop", "length")}
        yield self._counter(
            "request_success", "Completions by the reason they ended.", reasons, "finished_reason"
        )
        # A copy made in one go, because the job may add a code meanwhile.
        codes = {(code,): count for code, count in dict(progress.failures_by_code).items()}
        yield self._counter("line_failures", "Failed lines by error code.", codes, "code")

    def _counter(self, name: str, text: str, values: dict[Any, int], *labels: str) -> Metric:
        from prometheus_client.core import CounterMetricFamily

        counter = CounterMetricFamily(f"blendserve_{name}", text, labels=["model_name", *labels])
        for label_values, value in values.items():
            counter.add_metric([self._model, *label_values], value)
        return counter

    def _histogram(self, name: str, text: str, values: Histogram) -> Metric:
        from prometheus_client.core import HistogramMetricFamily

        metric = HistogramMetricFamily(f"blendserve_{name}", text, labels=["model_name"])
        buckets, seen = [], 0
        for bound, count in zip((*values.bounds, float("inf")), values.counts, strict=True):
            seen += count
            buckets.append(("+Inf" if bound == float("inf") else repr(bound), seen))
        metric.add_metric([self._model], buckets, values.total)
        return metric


@contextmanager
def metrics_endpoint(metrics: JobMetrics, host: str, port: int) -> Iterator[str]:
    """Serve the metrics while the context lasts; gives their URL.

    Raises:
        ConfigError: prometheus-client is not installed, or the port cannot be had.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise ConfigError(
            "--metrics-port needs prometheus-client; pip install 'blendserve[metrics]', or leave the option out"
        ) from error
    registry = CollectorRegistry()
    registry.register(metrics)
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, (OSError, socket.gaierror)) else error
        raise ConfigError(
            f"cannot serve metrics on {host}:{port}: {reason}; choose another --metrics-port "
            "(0 takes a free one) or --metrics-host"
        ) from error
    try:
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
