import socket
import sys
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from blendserve.errors import ConfigError
from blendserve.jobs.job import JobProgress
from blendserve.jobs.metrics import JobMetrics, metrics_endpoint
from blendserve.jobs.telemetry import Telemetry
from blendserve.planner.plan import make_plan
from blendserve.request import Completion, StepOutput, StepStats
from tests.workload import COST_MODEL, request_table

parser = pytest.importorskip("prometheus_client.parser")


def scrape(url):
    with urlopen(url, timeout=60) as answer:
        text = answer.read().decode()
    return {
        (sample.name, *(sample.labels[label] for label in sorted(sample.labels) if label != "model_name")): (
            sample.value
        )
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def a_telemetry():
    plan = make_plan(request_table([[1, 2, 3], [4, 5], [6]]), COST_MODEL)
    progress = JobProgress(total=5, num_done=2)
    telemetry = Telemetry(plan, progress)
    stats = StepStats(0.02, 6, 2, 10, 1, 1, 0.25, compute_s=0.03, memory_s=0.01, num_retracted=1)
    results = [(0, Completion([1] * 7, "", "stop")), (1, Completion([1] * 150, "", "length"))]
    progress.step = StepOutput(stats, results)
    progress.add_step(stats)
    progress.elapsed_s = 0.5
    progress.completed, progress.failed = 2, 1
    progress.failures_by_code["invalid_request"] = 1
    progress.num_retried_requests, progress.num_engine_restarts = 4, 1
    progress.num_prompt_tokens, progress.num_cached_tokens, progress.num_output_tokens = 5, 2, 157
    telemetry.add(progress)
    telemetry.finish()
    return telemetry


def test_metrics_have_the_names_of_vllm_and_the_values_of_the_job():
    metrics = JobMetrics()
    with metrics_endpoint(metrics, "127.0.0.1", 0) as url:
        before = scrape(url)
        assert [name for name, *_ in before] == ["blendserve_build_info"]
        metrics.watch(a_telemetry(), "tiny")
        found = scrape(url)
    expected = {
        ("blendserve_num_requests_running",): 1,
        ("blendserve_num_requests_waiting",): 1,
        ("blendserve_kv_cache_usage_perc",): 0.25,
        ("blendserve_compute_ratio",): 0.75,
        ("blendserve_tokens_per_second",): 16.0,
        ("blendserve_prompt_tokens_total",): 5,
        ("blendserve_generation_tokens_total",): 157,
        ("blendserve_prefix_cache_hits_total",): 2,
        ("blendserve_num_preemptions_total",): 1,
        ("blendserve_request_retries_total",): 4,
        ("blendserve_engine_restarts_total",): 1,
        ("blendserve_request_success_total", "stop"): 1,
        ("blendserve_request_success_total", "length"): 1,
        ("blendserve_lines_finished_total", "completed"): 2,
        ("blendserve_lines_finished_total", "failed"): 1,
        ("blendserve_line_failures_total", "invalid_request"): 1,
        ("blendserve_step_time_seconds_count",): 1,
        ("blendserve_step_time_seconds_bucket", "0.01"): 0,
        ("blendserve_step_time_seconds_bucket", "0.025"): 1,
        ("blendserve_request_prompt_tokens_sum",): 5,
        ("blendserve_request_generation_tokens_bucket", "10.0"): 1,
        ("blendserve_request_generation_tokens_bucket", "+Inf"): 2,
        ("blendserve_request_generation_tokens_sum",): 157,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    with pytest.raises(URLError):
        urlopen(url, timeout=5)


def test_two_endpoints_do_not_share_their_metrics():
    one, other = JobMetrics(), JobMetrics()
    with metrics_endpoint(one, "127.0.0.1", 0) as url, metrics_endpoint(other, "127.0.0.1", 0) as other_url:
        one.watch(a_telemetry(), "tiny")
        assert ("blendserve_num_requests_running",) in scrape(url)
        assert ("blendserve_num_requests_running",) not in scrape(other_url)


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_a_port_that_cannot_be_had_is_a_configuration_error(host):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="--metrics-port"), metrics_endpoint(JobMetrics(), host, port):
            pass


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with (
        pytest.raises(ConfigError, match=r"blendserve\[metrics\]"),
        metrics_endpoint(JobMetrics(), "127.0.0.1", 0),
    ):
        pass
