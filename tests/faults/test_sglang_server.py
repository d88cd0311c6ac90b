"""SGLang's server as a process of the job's: a script with its command line and its routes stands in for it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NUM_LINES = 30

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def model(make_tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = make_tiny_model("llama", tmp_path_factory.mktemp("sglang") / "tiny", with_tokenizer=True)
    return folder


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    return folder


@pytest.fixture
def start(model: Path, tmp_path: Path, notes: Path) -> Start:
    """Start a job on a started server, with these further arguments."""
    lines = [
        {
            "custom_id": f"r{index}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"p{index}", "user": f"r{index}", "max_tokens": 4},
        }
        for index in range(NUM_LINES)
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    path = os.pathsep.join([str(ROOT / "tests" / "fake_sglang"), str(ROOT), os.environ.get("PYTHONPATH", "")])

    def run(*arguments: str) -> "subprocess.Popen[str]":
        command = ["run", str(source), "-o", str(tmp_path / "out.jsonl"), "--model", str(model)]
        command += ["--engine", "sglang", "--sglang-python", sys.executable]
        command += ["--engine-arg", f"notes={notes}", *arguments]
        return subprocess.Popen(
            [sys.executable, "-m", "blendserve.cli", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path, "TMPDIR": str(temporary), "NO_PROXY": ""},
        )

    return run


def finish(process: "subprocess.Popen[str]") -> tuple[int, str]:
    _, errors = process.communicate(timeout=300)
    return process.returncode, errors


def answered(tmp_path: Path) -> list[str]:
    """Whose results are there."""
    return [json.loads(line)["custom_id"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]


def started(notes: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(notes.glob("start-*.json"))]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.05)


def assert_nothing_is_left(notes: Path) -> None:
    pids = [process[name] for process in started(notes) for name in ("pid", "child")]
    wait_for(lambda: not any(is_running(pid) for pid in pids))


def test_a_job_starts_its_server_and_ends_it(start: Start, tmp_path: Path, notes: Path, model: Path) -> None:
    code, shown = finish(
        start(
            "--kv-cache-tokens",
            "5000",
            "--max-num-seqs",
            "6",
            "--engine-arg",
            "disable_overlap_schedule=true",
        )
    )
    assert code == 0, shown
    assert sorted(answered(tmp_path)) == sorted(f"r{index}" for index in range(NUM_LINES))
    [server] = started(notes)
    line = " ".join(server["arguments"])
    assert f"--model-path {model}" in line
    assert "--host 127.0.0.1" in line
    assert "--schedule-policy fcfs --enable-cache-report" in line
    assert "--max-total-tokens 5000 --max-running-requests 6" in line
    assert "--disable-overlap-schedule" in line
    assert (notes / "posted-0").read_text() == "/flush_cache"
    assert_nothing_is_left(notes)
    assert not list((tmp_path / "tmp").glob("blendserve-sglang-*")), "a log of which nobody was told"


def test_a_server_that_ends_is_started_again(start: Start, tmp_path: Path, notes: Path) -> None:
    code, shown = finish(
        start("--engine-arg", "end_after=10", "--engine-arg", "latency=0.1", "--max-concurrency", "4")
    )
    assert code == 0, shown
    assert sorted(answered(tmp_path)) == sorted(f"r{index}" for index in range(NUM_LINES))
    assert len(started(notes)) == 2
    assert "exit code 3" in shown
    assert "out of everything" in shown, "the end of its log"
    assert "1 engine restarts" in shown
    assert_nothing_is_left(notes)


def test_restarts_have_a_limit(start: Start, tmp_path: Path, notes: Path) -> None:
    code, shown = finish(
        start("--engine-arg", "end_after=1", "--engine-arg", "latency=9", "--max-engine-restarts", "0")
    )
    assert code == 2
    assert "--max-engine-restarts" in shown
    assert_nothing_is_left(notes)


def test_one_that_cannot_start_says_why(start: Start, notes: Path) -> None:
    code, shown = finish(start("--engine-arg", "fail=true"))
    assert code == 2
    assert "exit code 1" in shown
    assert "error: this model cannot be loaded" in shown
    assert started(notes) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_the_job_ends_the_server(
    start: Start, tmp_path: Path, notes: Path, number: signal.Signals
) -> None:
    process = start("--engine-arg", "latency=0.3", "--max-concurrency", "2")
    wait_for(lambda: (tmp_path / "out.jsonl").is_file() and answered(tmp_path))
    process.send_signal(number)
    code, shown = finish(process)
    assert code == (-9 if number == signal.SIGKILL else 130), shown
    assert_nothing_is_left(notes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--engine-arg", "port=1"), "--engine-arg port is set by BlendServe"),
        (("--engine-arg", "schedule_policy=lpm"), "use --policy instead"),
        (("--kv-cache-memory", "1GiB"), "--kv-cache-tokens"),
        (("--base-url", "http://127.0.0.1:9/v1"), "--sglang-python"),
        (("--sglang-python", "/no/such/python"), "no such program"),
    ],
)
def test_options_that_do_not_fit_are_refused(start: Start, arguments: tuple[str, ...], message: str) -> None:
    code, shown = finish(start(*arguments))
    assert code == 2
    assert message in " ".join(shown.split())
