import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def simulate(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "blendserve.cli", "simulate", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def rows(done: "subprocess.CompletedProcess[str]") -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["simulated"]
    return found


def test_a_workload_compares_policies_and_writes_a_report(tmp_path: Path) -> None:
    done = simulate("trace1", "--num-requests", "5000", "--json", "-o", tmp_path / "report")
    found = rows(done)
    policies = ["dfs", "random", "dual-scan", "blend"]
    assert [row["system"] for row in found] == policies + [f"sequential {policy}" for policy in policies]
    for row in found:
        assert {
            "workload",
            "policy",
            "lengths",
            "overlap",
            "num_requests",
            "makespan_s",
            "tokens_per_s",
        } <= row.keys()
        assert 0 < row["optimum_ratio"] <= 1
    html = (tmp_path / "report" / "report.html").read_text()
    assert "simulated" in html
    assert json.loads((tmp_path / "report" / "results.json").read_text())["trace1"]
    assert "of optimum" in done.stderr


def test_a_series_that_was_stopped_goes_on(tmp_path: Path) -> None:
    common = ("trace1", "--num-requests", "2000", "--setting", "smooth", "--json", "-o", tmp_path)
    first = simulate(*common, "--policy", "dfs")
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"run": "killed while wri')
    both = simulate(*common, "--policy", "dfs,blend")
    assert "1 of 2 runs are there already" in both.stderr
    without_series = [{**row, "series": None} for row in rows(both)]
    assert without_series[:1] == [{**row, "series": None} for row in rows(first)]
    again = simulate(*common, "--policy", "dfs,blend")
    assert "2 of 2 runs are there already" in again.stderr
    assert [{**row, "series": None} for row in rows(again)] == without_series
    other = simulate(*common, "--policy", "dfs", "--seed", "1")
    assert "there already" not in other.stderr


def test_a_file_of_lengths(tmp_path: Path) -> None:
    lines = ["input_tokens,output_tokens"] + [f"{100 + i % 300},{1 + i % 50}" for i in range(500)]
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("\n".join(lines))
    found = rows(simulate("--lengths", lengths, "--policy", "dfs", "--setting", "smooth", "--json"))
    assert found[0]["num_requests"] == 500


def test_a_batch_file(tmp_path: Path) -> None:
    line = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "Hello there", "max_tokens": 20}}
    job = tmp_path / "job.jsonl"
    job.write_text("".join(json.dumps({"custom_id": f"r{i}", **line}) + "\n" for i in range(30)))
    found = rows(simulate(job, "--policy", "dual-scan", "--length-info", "known", "--json"))
    assert {row["num_requests"] for row in found} == {30}


def test_another_device_overlaps_as_its_profile_says() -> None:
    found = rows(
        simulate(
            "trace1", "--num-requests", "3000", "--hardware", "h200-estimate", "--policy", "dfs", "--json"
        )
    )
    assert [(row["hardware"], row["setting"]) for row in found] == [
        ("h200-estimate", "profile"),
        ("h200-estimate", "sequential"),
    ]
    assert [row["overlap"] for row in found] == ["table", "sequential"]
    assert found[0]["makespan_s"] < 0.98 * found[1]["makespan_s"]
    assert all(0 < row["optimum_ratio"] <= 1 for row in found)


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ((), "--paper"),
        (("trace1", "--paper", "fig7"), "name one of"),
        (("trace9",), "trace4"),
        (("--paper", "fig99"), "table3"),
        (("trace1", "--model", "gpt-5"), "llama-3-8b"),
        (("--lengths", "missing.csv"), "missing.csv"),
        (("trace1", "--hardware", "b300"), "h200-estimate"),
        (("trace1", "--hardware", "h200-estimate", "--setting", "kinked"), "profile, sequential"),
        (("--paper", "fig7", "--hardware", "h200-estimate"), "leave --hardware out"),
    ],
)
def test_what_cannot_be_simulated_is_said_in_one_line(arguments: tuple[str, ...], remedy: str) -> None:
    done = simulate(*arguments)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert remedy in done.stderr
