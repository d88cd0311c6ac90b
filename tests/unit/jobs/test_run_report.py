import json
import re
import time
from dataclasses import replace

import pytest

from blendserve.errors import ConfigError
from blendserve.jobs.job import JobProgress, JobSummary
from blendserve.jobs.run_report import RunReport, cost, earlier_runs, report_paths
from blendserve.jobs.telemetry import Telemetry
from blendserve.planner.plan import make_plan
from blendserve.request import Completion, StepOutput, StepStats
from tests.workload import COST_MODEL, request_table

SUMMARY = JobSummary(
    total=4,
    num_done=0,
    completed=2,
    failed=1,
    failures_by_code={"invalid_request": 1},
    num_prompt_tokens=600,
    num_cached_tokens=100,
    num_output_tokens=400,
    num_prefill_tokens=500,
    num_retracted=0,
    num_steps=10,
    elapsed_s=5.0,
    engine_s=4.0,
    compute_s=3.0,
    memory_s=1.0,
    num_retried_requests=2,
    num_engine_restarts=1,
)
DESCRIPTION = {
    "inputs": ["in.jsonl"],
    "output": "out.jsonl",
    "model": "<b>tiny</b>",
    "engine": "native",
    "policy": "blend",
    "configuration": {"seed": 0, "plan": {"sample_ratio": 0.01}},
}


@pytest.fixture
def report(tmp_path):
    def make(earlier=(), **options):
        plan = make_plan(request_table([[1, 2, 3], [4, 5]]), COST_MODEL)
        telemetry = Telemetry(plan, JobProgress(total=4, num_done=0))
        for elapsed_s, results in (
            (1.0, []),
            (2.0, [(0, Completion([1] * 30, "", "stop", output_tokens_est=20))]),
        ):
            stats = StepStats(1.0, 6, 2, 10, 1, 1, 0.25, compute_s=0.3, memory_s=0.1)
            telemetry.progress.step = StepOutput(stats, results)
            telemetry.progress.add_step(stats)
            telemetry.progress.elapsed_s = elapsed_s
            telemetry.add(telemetry.progress)
        telemetry.finish()
        return RunReport(
            tmp_path / "out.jsonl",
            telemetry,
            DESCRIPTION,
            list(earlier),
            started_s=time.time() - 10.0,
            **options,
        )

    return make


def test_the_report_lies_beside_the_output():
    assert [path.name for path in report_paths("a/out.jsonl")] == ["out.report.json", "out.report.html"]
    assert report_paths("a/out.jsonl.zst").json.name == "out.report.json"
    assert report_paths("out").html.name == "out.report.html"


def test_the_json_holds_what_happened(report):
    made = report(cost_per_hour=36.0)
    document, paths = made.write("complete", SUMMARY)
    assert made.paths.json in paths
    read = json.loads(made.paths.json.read_text())
    assert read == json.loads(json.dumps(document, default=str))
    assert read["status"] == "complete"
    assert read["summary"]["failures_by_code"] == {"invalid_request": 1}
    assert read["timeline"]["elapsed_s"] == [1.0, 2.0]
    assert read["timeline"]["kv_usage_ratio"] == [0.25, 0.25]
    assert read["timeline"]["prefill_tokens_per_s"] == [6.0, 6.0]
    assert read["timeline"]["compute_ratio"] == [0.75, 0.75]
    assert read["output_lengths"]["expected"] == [20.0]
    assert read["output_lengths"]["actual_p50"] == [30.0]
    assert read["output_lengths"]["actual_to_expected_ratio"] == 1.5
    assert read["plan"]["num_requests"] == 2
    assert read["configuration"] == DESCRIPTION["configuration"]
    assert read["versions"]["blendserve"]
    assert read["cost"]["total"] == pytest.approx(0.1, rel=0.5)
    assert read["all_runs"]["num_runs"] == 1
    assert not list(made.paths.json.parent.glob("*.tmp"))


def test_cost_is_of_the_time_and_per_million_tokens():
    assert cost(3.6, 1000.0, 2_000_000, 500_000) == pytest.approx(
        {"cost_per_hour": 3.6, "total": 1.0, "per_million_tokens": 0.5, "per_million_output_tokens": 2.0}
    )
    assert cost(3.6, 1000.0, 0, 0)["per_million_tokens"] is None


def test_a_resumed_job_adds_its_runs_up(report, tmp_path):
    report(cost_per_hour=1.0).write_json("running", SUMMARY)  # and then it was killed
    runs = earlier_runs(tmp_path / "out.report.json", num_done=2)
    assert [run["status"] for run in runs] == ["killed"]
    second = replace(SUMMARY, num_done=2, completed=2, failed=0, failures_by_code={}, num_retried_requests=5)
    document = report(runs, cost_per_hour=1.0).write_json("complete", second)
    assert [run["status"] for run in document["runs"]] == ["killed", "complete"]
    added = document["all_runs"]
    assert (added["num_runs"], added["completed"], added["failed"]) == (2, 4, 0)
    assert (added["num_retried_requests"], added["num_engine_restarts"]) == (7, 2)
    assert added["elapsed_s"] == 10.0
    assert added["cost"] == pytest.approx(sum(run["cost"]["total"] for run in document["runs"]))
    assert len(earlier_runs(tmp_path / "out.report.json", num_done=4)) == 2


def test_a_job_begun_anew_has_no_earlier_runs(report, tmp_path):
    path = tmp_path / "out.report.json"
    assert earlier_runs(path, num_done=0) == []
    report().write_json("interrupted", SUMMARY)
    assert earlier_runs(path, num_done=0) == []
    report().write_json("interrupted", replace(SUMMARY, completed=0))
    assert len(earlier_runs(path, num_done=0)) == 1


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"runs": []}', '{"runs": [], "report_format": 99}'])
def test_a_file_that_is_no_report_is_not_overwritten(tmp_path, text):
    path = tmp_path / "out.report.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--no-report"):
        earlier_runs(path, num_done=0)


def test_a_report_that_cannot_be_written_meanwhile_does_not_stop_the_job(report, monkeypatch):
    made = report()
    monkeypatch.setattr("blendserve.jobs.run_report.CHECKPOINT_INTERVAL_S", 0.0)
    monkeypatch.setattr(
        "blendserve.jobs.run_report._replace", lambda *_: (_ for _ in ()).throw(OSError("disk full"))
    )
    steps = [JobProgress(1, 0), JobProgress(1, 0)]
    assert list(made.checkpointed(iter(steps), lambda: SUMMARY)) == steps


def test_while_it_runs_the_report_says_so(report, monkeypatch):
    made = report()
    monkeypatch.setattr("blendserve.jobs.run_report.CHECKPOINT_INTERVAL_S", 0.0)
    list(made.checkpointed(iter([JobProgress(1, 0)]), lambda: SUMMARY))
    assert json.loads(made.paths.json.read_text())["status"] == "running"


def figures(page):
    """(traces, layout) of every figure of a page."""
    decoder = json.JSONDecoder()
    found = []
    for match in re.finditer(r'Plotly\.newPlot\(\s*"[^"]*",\s*', page):
        traces, end = decoder.raw_decode(page, match.end())
        layout, _ = decoder.raw_decode(page, page.index("{", end))
        found.append((traces, layout))
    return found


def test_the_page_is_self_contained_and_shows_the_figures(report):
    pytest.importorskip("plotly")
    made = report(earlier=[{**report().write_json("interrupted", SUMMARY)["runs"][0]}], cost_per_hour=2.0)
    made.write("complete", SUMMARY)
    page = made.paths.html.read_text()
    assert not re.search(r"<(?:script|img|iframe)[^>]*\ssrc=|<link\b|@import|url\(http", page)
    assert "simulated" not in page.split("</header>")[0].split("</script>")[-1]
    assert "&lt;b&gt;tiny&lt;/b&gt;" in page
    assert "<b>tiny</b>" not in page
    for text in ("run 2 of the job", "interrupted", "invalid_request", "plan.sample_ratio", "per 1M tokens"):
        assert text in page
    rates, shares, lengths = figures(page)
    assert [trace["name"] for trace in rates[0]] == ["prefill", "decode"]
    assert [trace["stackgroup"] for trace in rates[0]] == ["tokens", "tokens"]
    assert rates[0][0]["x"] == [1.0, 2.0]
    assert rates[0][0]["y"] == [6.0, 6.0]
    assert [trace["name"] for trace in shares[0]] == ["compute in the blend", "KV memory used"]
    assert shares[0][0]["y"] == [0.75, 0.75]
    assert shares[1]["yaxis"]["range"] == [0.0, 1.05]
    points, diagonal = lengths[0]
    assert (points["x"], points["y"]) == ([20.0], [30.0])
    assert diagonal["x"] == diagonal["y"] == [20.0, 30.0]


def test_without_plotly_there_is_no_page(report, monkeypatch):
    monkeypatch.setattr("blendserve.jobs.run_report.importlib.util.find_spec", lambda name: None)
    made = report()
    _, paths = made.write("complete", SUMMARY)
    assert paths == [made.paths.json]
    assert not made.paths.html.exists()
