"""The command, with its engine's process killed, interrupted, or out of time."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import blendserve

TIMEOUT_S = 300


@pytest.fixture(scope="module")
def model(make_tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = make_tiny_model("llama", tmp_path_factory.mktemp("model") / "tiny", with_tokenizer=True)
    return folder


NUM_LINES = 24


class CliJob:
    """A job of the command on the tiny model, two requests at a time so that it lasts."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.output = folder / "out.jsonl"
        self.errors = folder / "out.errors.jsonl"
        source = folder / "in.jsonl"
        with source.open("w") as file:
            for number in range(NUM_LINES):
                body = {
                    "messages": [{"role": "user", "content": f"Tell me about {number}."}],
                    "max_tokens": 30,
                    "temperature": 0,
                    "ignore_eos": True,
                }
                line = {
                    "custom_id": f"r{number}",
                    "method": "POST",
                    "url": "/v1/chat/completions",
                    "body": body,
                }
                file.write(json.dumps(line) + "\n")
        self.command = [
            *(sys.executable, "-m", "blendserve.cli", "run", str(source), "-o", str(self.output)),
            *("--model", str(model), "--served-model-name", "tiny"),
            *("--max-num-seqs", "2", "--dtype", "float32", "--num-threads", "1"),
        ]
        source_folder = str(Path(blendserve.__file__).parents[1])
        self.environment = {**os.environ, "PYTHONPATH": source_folder}

    def start(self, *options: str, in_background: bool = False) -> "subprocess.Popen[str]":
        """As from a terminal: a session of its own; or in the background of a script, with SIGINT ignored."""
        deaf = ("sh", "-c", 'trap "" INT; exec "$@"', "sh") if in_background else ()
        return subprocess.Popen(
            [*deaf, *self.command, *options],
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
            start_new_session=True,
        )

    def run(self, *options: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*self.command, *options],
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
            timeout=TIMEOUT_S,
            check=False,
        )

    def wait_for_results(self, process: "subprocess.Popen[str]", count: int) -> None:
        give_up_s = time.monotonic() + TIMEOUT_S
        while process.poll() is None and time.monotonic() < give_up_s:
            if self.output.exists() and self.output.read_bytes().count(b"\n") >= count:
                return
            time.sleep(0.01)
        raise AssertionError(process.communicate(timeout=TIMEOUT_S)[1])

    def results(self) -> dict[str, str]:
        """Text by custom_id."""
        lines = [json.loads(line) for line in self.output.read_text().splitlines()]
        texts = {
            line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"] for line in lines
        }
        assert len(texts) == len(lines), "a line was answered twice"
        return texts


def engine_pid(process: "subprocess.Popen[str]") -> int | None:
    """The child that runs the engine."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for child in children:
        try:
            if b"engines.process" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        except OSError:
            continue
    return None


def wait_for_engine(process: "subprocess.Popen[str]", before: int | None) -> int:
    """The child that runs the engine, once it is another than the one before."""
    give_up_s = time.monotonic() + TIMEOUT_S
    while process.poll() is None and time.monotonic() < give_up_s:
        if (pid := engine_pid(process)) not in (None, before):
            return pid
        time.sleep(0.01)
    raise AssertionError(process.communicate(timeout=TIMEOUT_S)[1])


@pytest.fixture(scope="module")
def unbroken(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Texts of a job that nothing happens to, in one process."""
    job = CliJob(model, tmp_path_factory.mktemp("unbroken"))
    done = job.run("--no-engine-process")
    assert done.returncode == 0, done.stderr
    results = job.results()
    assert len(results) == NUM_LINES
    return results


def test_a_job_survives_the_death_of_its_engine(
    model: Path, unbroken: dict[str, str], tmp_path: Path
) -> None:
    job = CliJob(model, tmp_path)
    process = job.start()
    pid = None
    for count in (3, 10):
        job.wait_for_results(process, count)
        pid = wait_for_engine(process, pid)
        os.kill(pid, signal.SIGKILL)
    _, stderr = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, stderr
    assert "killed by SIGKILL" in stderr
    assert "2 engine restarts" in stderr
    assert job.results() == unbroken
    assert job.errors.read_text() == ""


def test_without_restarts_the_job_ends_and_can_be_resumed(
    model: Path, unbroken: dict[str, str], tmp_path: Path
) -> None:
    job = CliJob(model, tmp_path)
    process = job.start("--max-engine-restarts", "0")
    job.wait_for_results(process, 5)
    os.kill(wait_for_engine(process, None), signal.SIGKILL)
    _, stderr = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 2, stderr
    assert "--max-engine-restarts" in stderr
    assert "Traceback" not in stderr
    assert 5 <= len(job.results()) < NUM_LINES
    done = job.run()
    assert done.returncode == 0, done.stderr
    assert job.results() == unbroken


def kill_group(process: "subprocess.Popen[str]") -> None:
    os.killpg(process.pid, signal.SIGINT)


def terminate(process: "subprocess.Popen[str]") -> None:
    process.terminate()


@pytest.mark.parametrize(
    ("interrupt", "option"),
    [
        (kill_group, "--engine-process"),
        (terminate, "--engine-process"),
        (kill_group, "--no-engine-process"),
    ],
)
def test_to_interrupt_keeps_what_is_done_and_prints_the_command_that_goes_on(
    model: Path,
    unbroken: dict[str, str],
    tmp_path: Path,
    interrupt: Callable[["subprocess.Popen[str]"], None],
    option: str,
) -> None:
    job = CliJob(model, tmp_path)
    process = job.start(option, "--restart")
    job.wait_for_results(process, 3)
    pid = engine_pid(process)
    interrupt(process)
    _, stderr = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert "engine failed" not in stderr
    if pid is not None:
        assert not Path(f"/proc/{pid}").exists(), "the engine's process was left behind"
    assert 3 <= len(job.results()) < NUM_LINES
    printed = shlex.split(stderr.strip().rsplit("run again: ", 1)[1])
    assert printed == [*job.command, option]
    done = subprocess.run(printed, env=job.environment, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0
    assert job.results() == unbroken


@pytest.mark.parametrize(
    ("number", "in_background"), [(signal.SIGINT, False), (signal.SIGINT, True), (signal.SIGTERM, False)]
)
def test_to_interrupt_before_the_first_step(
    model: Path, tmp_path: Path, number: signal.Signals, in_background: bool
) -> None:
    job = CliJob(model, tmp_path)
    process = job.start(in_background=in_background)
    assert process.stderr is not None
    line = process.stderr.readline()
    assert line.startswith("read"), line
    process.send_signal(number)
    _, stderr = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr


def test_time_that_is_up_leaves_a_job_that_can_be_resumed(
    model: Path, unbroken: dict[str, str], tmp_path: Path
) -> None:
    job = CliJob(model, tmp_path)
    done = job.run("--max-time", "0s")
    assert done.returncode == 3, done.stderr
    assert f"{NUM_LINES} lines left" in done.stderr
    assert shlex.split(done.stderr.strip().rsplit("run again: ", 1)[1]) == [
        *job.command,
        "--max-time",
        "0s",
    ]
    assert job.results() == {}
    assert job.errors.read_text() == ""
    done = job.run("--deadline", "1d")
    assert done.returncode == 0, done.stderr
    assert job.results() == unbroken


def test_to_finalize_writes_an_error_for_every_line_that_was_not_run(model: Path, tmp_path: Path) -> None:
    job = CliJob(model, tmp_path)
    done = job.run("--deadline", "0s", "--finalize")
    assert done.returncode == 1, done.stderr
    errors = [json.loads(line) for line in job.errors.read_text().splitlines()]
    assert {error["custom_id"] for error in errors} == {f"r{number}" for number in range(NUM_LINES)}
    assert len(errors) == NUM_LINES
    for error in errors:
        assert error["response"] is None
        assert error["error"]["code"] == "batch_expired"
    done = job.run()  # and they run after all
    assert done.returncode == 0, done.stderr
    assert len(job.results()) == NUM_LINES
    assert job.errors.read_text() == ""


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        (("--finalize",), "--deadline"),
        (("--deadline", "soon"), "2026-12-01T06:00"),
        (("--deadline", "2020-01-01T00:00"), "has passed"),
        (("--max-time", "eight hours"), "1h30m"),
    ],
)
def test_times_that_make_no_sense(model: Path, tmp_path: Path, options: tuple[str, ...], remedy: str) -> None:
    done = CliJob(model, tmp_path).run(*options)
    assert done.returncode == 2
    assert remedy in done.stderr
