"""`run-batch` in a process of its own: what scripts written for vLLM's command rely on, and what they gain."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_run import chat, completion, write


@pytest.fixture(scope="module")
def model(make_tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = make_tiny_model("llama", tmp_path_factory.mktemp("batch") / "tiny", with_tokenizer=True)
    return folder


def command(model: Path, source: Path, output: Path, *flags: str) -> list[str]:
    return [
        *(sys.executable, "-m", "blendserve.cli", "run-batch", "-i", str(source), "-o", str(output)),
        *("--model", str(model), "--served-model-name", "tiny", "--dtype", "float32", *flags),
    ]


def run(model: Path, source: Path, output: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command(model, source, output, *flags), capture_output=True, text=True, timeout=300, check=False
    )


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_line_of_the_input_has_its_line_of_output(model: Path, tmp_path: Path) -> None:
    lines = [
        chat("long", max_tokens=24, ignore_eos=True),
        '{"custom_id": "torn", "method": "PO',
        completion("text", "Once upon a time"),
        {"custom_id": "empty", "method": "POST", "url": "/v1/chat/completions", "body": {}},
        completion("text", "the id of another line"),
        "",
        completion("url", "x") | {"url": "/v1/foo"},
        completion("model", "x", model="nonexistent"),
        completion("method", "x") | {"method": "GET"},
        completion("too-long", "word " * 600),
        chat("streamed", stream=True),
        chat("short", max_tokens=1),
    ]
    output = tmp_path / "out.jsonl"
    flags = (
        "--max_num_seqs",
        "4",
        "--max-model-len",
        "0.5k",
        "--enable-prompt-tokens-details",
        "--seed",
        "0",
    )
    metrics = ("--enable-metrics", "--port", "0", "--disable-log-stats", "--output-tmp-dir", str(tmp_path))
    done = run(model, write(tmp_path / "in.jsonl", lines), output, *flags, *metrics)
    assert done.returncode == 1, done.stderr
    results = read(output)
    assert [(line["custom_id"], line["response"]["status_code"]) for line in results] == [
        ("long", 200),
        ("torn", 400),
        ("text", 200),
        ("empty", 400),
        ("text", 400),
        ("url", 400),
        ("model", 404),
        ("method", 400),
        ("too-long", 400),
        ("streamed", 400),
        ("short", 200),
    ]
    for line in results:
        assert (line["error"] is None) == (line["response"]["status_code"] == 200)
        assert (line["response"]["body"] is None) == (line["error"] is not None)
    errors = {line["error"]["error"]["line"]: line["error"]["error"] for line in results if line["error"]}
    assert sorted(errors) == [2, 4, 5, 7, 8, 9, 10, 11]
    assert errors[5]["code"] == "duplicate_custom_id"
    assert "line 3" in errors[5]["message"]
    assert results[0]["response"]["body"]["usage"]["prompt_tokens_details"].keys() == {"cached_tokens"}
    assert "metrics  http://127.0.0.1:" in done.stderr
    assert "3 completed, 8 failed" in done.stderr

    before = output.read_bytes()
    again = run(model, tmp_path / "in.jsonl", output, *flags)
    assert again.returncode == 1, again.stderr
    assert "3 done before" in again.stderr
    assert [line["custom_id"] for line in read(output)] == [line["custom_id"] for line in results]
    assert read(output)[0] == json.loads(before.splitlines()[0])


def test_killed_it_goes_on_where_it_was(model: Path, tmp_path: Path) -> None:
    lines = [completion(f"r{i}", f"Number {i}", max_tokens=40, ignore_eos=True) for i in range(40)]
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    working = tmp_path / "out.results.jsonl"
    flags = ("--max-num-seqs", "2", "--flush-interval", "0")
    with subprocess.Popen(
        command(model, source, output, *flags), stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            deadline_s = time.monotonic() + 240
            while process.poll() is None and not (
                working.exists() and working.read_bytes().count(b"\n") >= 4
            ):
                assert time.monotonic() < deadline_s, "no results"
                time.sleep(0.01)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not output.exists()
    kept = {line["custom_id"]: line for line in read(working)}
    assert 4 <= len(kept) < 40
    done = run(model, source, output, *flags)
    assert done.returncode == 0, done.stderr
    assert f"{len(kept)} done before" in done.stderr
    results = read(output)
    assert [line["custom_id"] for line in results] == [f"r{i}" for i in range(40)]
    assert [line for line in results if line["custom_id"] in kept] == [
        kept[f"r{i}"] for i in range(40) if f"r{i}" in kept
    ]


def test_what_it_cannot_do_it_says(model: Path, tmp_path: Path) -> None:
    source, output = write(tmp_path / "in.jsonl", [chat("a")]), tmp_path / "out.jsonl"
    refused = run(model, source, output, "--pipeline-parallel-size", "2")
    assert refused.returncode == 2
    assert "--pipeline-parallel-size is no flag of run-batch" in refused.stderr
    assert not output.exists()
    output.write_text('{"of": "someone else"}\n')
    refused = run(model, source, output)
    assert refused.returncode == 2
    assert "add --restart to replace it" in refused.stderr
    assert output.read_text() == '{"of": "someone else"}\n'
