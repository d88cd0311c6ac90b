"""What a run tells besides its results, of the command in a process of its own."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest


@pytest.fixture(scope="module")
def model(make_tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = make_tiny_model("llama", tmp_path_factory.mktemp("model") / "tiny", with_tokenizer=True)
    return folder


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    lines = [
        {
            "custom_id": f"r{i:02d}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": f"Tell me about {i}."}], "max_tokens": 40},
        }
        for i in range(60)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def command(model: Path, *arguments: str | Path) -> list[str]:
    return [
        *(sys.executable, "-m", "blendserve.cli", "run", *map(str, arguments)),
        *("--model", str(model), "--served-model-name", "tiny", "--max-num-seqs", "2"),
    ]


def run(model: Path, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command(model, *arguments), capture_output=True, text=True, timeout=600, check=False
    )


def scraped(url: str) -> str:
    try:
        with urlopen(url, timeout=60) as answer:
            text: str = answer.read().decode()
            return text
    except (URLError, OSError):
        return ""


def test_everything_at_once(model: Path, requests: Path, tmp_path: Path) -> None:
    with requests.open("a") as file:
        file.write("{not json\n")
    output, log = tmp_path / "out.jsonl", tmp_path / "log.jsonl"
    options = (
        "--progress",
        "json",
        "--log-file",
        log,
        "--metrics-port",
        "0",
        "--cost-per-hour",
        "3.6",
        "--json",
    )
    process = subprocess.Popen(
        command(model, requests, "-o", output, *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        url, metrics = "", ""
        while process.poll() is None and "blendserve_num_requests_running{" not in metrics:
            time.sleep(0.02)
            if not url and log.exists():
                found = re.search(r'"url":"([^"]+)"', log.read_text())
                url = found[1] if found else ""
            elif url:
                metrics = scraped(url) or metrics
        stdout, stderr = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 1, stderr
    assert 'blendserve_generation_tokens_total{model_name="tiny"}' in metrics
    assert 'blendserve_lines_finished_total{model_name="tiny",outcome="failed"} ' in metrics
    with pytest.raises(URLError):
        urlopen(url, timeout=5)

    updates = [json.loads(line) for line in stderr.splitlines()]
    assert updates[0]["phase"] == "reading"
    assert updates[-1]["phase"] == "complete"
    assert (updates[-1]["completed"], updates[-1]["failed"]) == (60, 1)

    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert all(event.keys() == {"time", "level", "event", "fields"} for event in events)
    by_name = {event["event"]: event["fields"] for event in events}
    assert list(by_name)[:2] == ["metrics_served", "job_started"]
    assert by_name["job_started"]["versions"]["torch"]
    assert by_name["job_started"]["configuration"]["engine"]["max_num_seqs"] == 2
    assert by_name["planned"]["num_requests"] == 60
    assert (by_name["line_failed"]["line"], by_name["line_failed"]["code"]) == (61, "invalid_json_line")
    assert by_name["replanned"]["num_finished"] >= 16
    assert events[-1]["event"] == "job_ended"
    assert events[-1]["fields"]["status"] == "complete"

    summary = json.loads(stdout)["summary"]
    report = json.loads((tmp_path / "out.report.json").read_text())
    assert report["status"] == "complete"
    assert report["summary"] == {name: summary[name] for name in report["summary"]}
    assert report["cost"] == summary["cost"]
    assert report["cost"]["total"] == pytest.approx(report["runs"][0]["wall_s"] / 1000.0)
    timeline = report["timeline"]
    computed = sum(
        duration_s * rate
        for duration_s, rate in zip(timeline["duration_s"], timeline["decode_tokens_per_s"], strict=True)
    )
    assert sum(timeline["completed"]) == 60
    assert computed == pytest.approx(summary["num_output_tokens"] - 60, rel=0.01)
    assert sum(report["output_lengths"]["num_requests"]) == 60
    assert sum(report["output_tokens"]["counts"]) == 60
    page = (tmp_path / "out.report.html").read_text()
    assert not re.search(r"<(?:script|img|iframe)[^>]*\ssrc=|<link\b|@import|url\(http", page)


def test_an_interrupted_run_is_in_the_report_of_the_next(model: Path, requests: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    process = subprocess.Popen(command(model, requests, "-o", output), stderr=subprocess.PIPE, text=True)
    while process.poll() is None and (not output.exists() or output.read_bytes().count(b"\n") < 3):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=600)
    assert process.returncode == 130, stderr
    first = json.loads((tmp_path / "out.report.json").read_text())
    assert first["status"] == "interrupted"
    assert 3 <= first["summary"]["completed"] < 60
    assert (tmp_path / "out.report.html").exists()
    done = run(model, requests, "-o", output)
    assert done.returncode == 0, done.stderr
    second = json.loads((tmp_path / "out.report.json").read_text())
    assert [entry["status"] for entry in second["runs"]] == ["interrupted", "complete"]
    assert second["summary"]["num_done"] == first["summary"]["completed"]
    assert second["all_runs"]["completed"] == 60
    assert run(model, requests, "-o", output).returncode == 0
    assert json.loads((tmp_path / "out.report.json").read_text()) == second, "nothing was left to do"
    assert run(model, requests, "-o", output, "--restart", "--limit", "2").returncode == 0
    assert json.loads((tmp_path / "out.report.json").read_text())["all_runs"]["num_runs"] == 1


def test_quiet_leaves_the_summary_and_no_report_leaves_no_files(
    model: Path, requests: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    done = run(model, requests, "-o", output, "--limit", "3", "--quiet", "--no-report")
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert lines[0].startswith("done     3 completed, 0 failed")
    assert [line.split()[0] for line in lines] == ["done", "tokens", "blend"]
    assert not list(tmp_path.glob("*.report.*"))


def test_a_busy_port_and_a_file_that_is_no_report_stop_the_job_at_once(
    model: Path, requests: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run(model, requests, "-o", output, "--metrics-port", port)
    assert done.returncode == 2, done.stderr
    assert f"127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not output.exists()
    (tmp_path / "out.report.json").write_text("my notes")
    done = run(model, requests, "-o", output)
    assert done.returncode == 2, done.stderr
    assert "--no-report" in done.stderr
    assert (tmp_path / "out.report.json").read_text() == "my notes"
