"""The command against a server that fails in every way: each line has one outcome, and the good ones succeed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from tests.fake_openai import FakeOpenAI, running

PASSING = [408, 409, 429, 500, 503, "half", "cut", "html", "not-json", "no-choices", "reset", "retry-after"]
FINAL = [400, 404, 413, 422]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Start:
    def run(*arguments: str | Path) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "blendserve.cli", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"NO_PROXY": "*"},
        )

    return run


def finish(process: "subprocess.Popen[str]") -> tuple[int, str]:
    _, errors = process.communicate(timeout=300)
    return process.returncode, errors


def chat(custom_id: str, content: Any = "Say something.", **body: Any) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "messages": [{"role": "user", "content": content}],
            "user": custom_id,
            "max_tokens": 8,
            **body,
        },
    }


def completion(custom_id: str, prompt: Any, **body: Any) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": prompt, "user": custom_id, "max_tokens": 8, **body},
    }


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Lines split on LF only, as whoever reads the file may do."""
    lines = [json.loads(line) for line in path.read_bytes().decode().split("\n") if line]
    results = {line["custom_id"]: line for line in lines}
    assert len(results) == len(lines), "a custom_id was answered twice"
    return results


def hundred_lines() -> list[dict[str, Any]]:
    """Of every kind, among them what our own engines refuse."""
    lines: list[dict[str, Any]] = []
    for index in range(12):
        group = f"You are helper number {index % 3}. " * 8
        lines += [
            chat(f"plain-{index}", f"{group}What is {index}?"),
            chat(f"many-{index}", group, n=3, temperature=0.5, seed=index, logit_bias={"5": -1.5}),
            chat(f"tools-{index}", group, tools=TOOLS, tool_choice="required", parallel_tool_calls=True),
            chat(f"schema-{index}", group, response_format=SCHEMA, of_this_server_only={"a": [1, 2.5, None]}),
            chat(f"image-{index}", [{"type": "text", "text": group}, IMAGE], frequency_penalty=0.25),
            completion(f"text-{index}", f"{group} Once\u2028upon", suffix="the end", echo=True),
            completion(f"ids-{index}", [1, 2, 3, index]),
            completion(f"list-{index}", ["one", "two"], max_tokens=None),
        ]
    return lines


def test_every_line_has_one_outcome_and_good_lines_succeed(start: Start, tmp_path: Path) -> None:
    lines = hundred_lines()
    names = [line["custom_id"] for line in lines]
    faults: dict[str, list[int | str]] = {
        name: [PASSING[index % len(PASSING)]] for index, name in enumerate(names) if index % 3 == 0
    }
    final = {name: FINAL[index % 4] for index, name in enumerate(names) if index % 17 == 1}
    faults |= {name: [status] for name, status in final.items()}
    source = write(tmp_path / "in.jsonl", [*lines, "{not json", chat("no-messages") | {"body": {}}])
    output, errors = tmp_path / "out.jsonl", tmp_path / "out.errors.jsonl"
    with running(FakeOpenAI(faults)) as server:
        process = start("run", source, "-o", output, "--engine", "openai", "--base-url", server.base_url)
        code, shown = finish(process)
    assert code == 1, shown

    results, failures = read(output), read(errors)
    assert sorted([*results, *final]) == sorted(names)
    assert set(failures) == {*final, None, "no-messages"}
    for name, status in final.items():
        assert failures[name]["response"]["status_code"] == status
        error = failures[name]["response"]["body"]["error"]
        assert error["message"] == f"this is a {status}"
        assert error["line"] == names.index(name) + 1

    for line in lines:
        if (name := line["custom_id"]) in results:
            body = results[name]["response"]["body"]
            assert body["model"] == "what-the-server-calls-it"
            assert body["of_the_servers_own"] == {"x": [1.5, None]}
            assert len(body["choices"]) == line["body"].get("n", 1)
            kind = ChatCompletion if line["url"] == "/v1/chat/completions" else Completion
            kind.model_validate(body)

    sent: dict[str, list[tuple[str, Any]]] = {}
    for path, raw in server.requests:
        body = json.loads(raw)
        sent.setdefault(body["user"], []).append((path, body))
    for line in lines:
        name = line["custom_id"]
        attempts = 2 if name in faults and name not in final else 1
        assert sent[name] == [(line["url"], line["body"])] * attempts, "a body was changed, or sent too often"


def test_what_is_done_is_not_asked_for_again(start: Start, tmp_path: Path) -> None:
    lines = [chat(f"r{index}") for index in range(10)]
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    common = ("run", source, "-o", output, "--engine", "openai", "--base-url")
    with running(FakeOpenAI({"r3": [422], "r7": [422]})) as server:
        code, shown = finish(start(*common, server.base_url))
        assert code == 1, shown
        code, shown = finish(start(*common, server.base_url))
    assert code == 0, shown
    assert set(read(output)) == {f"r{index}" for index in range(10)}
    assert server.attempts == {f"r{index}": 2 if index in (3, 7) else 1 for index in range(10)}


def test_a_server_that_is_killed_and_comes_back_costs_no_result(start: Start, tmp_path: Path) -> None:
    lines = [chat(f"r{index}") for index in range(40)]
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    with ExitStack() as stack:
        with running(FakeOpenAI(latency_s=0.1)) as first:
            process = start(
                *("run", source, "-o", output, "--engine", "openai", "--base-url", first.base_url),
                *("--max-concurrency", "4"),
            )
            wait_for(lambda: len(first.requests) >= 9)
        time.sleep(0.5)
        assert process.poll() is None
        second = stack.enter_context(running(FakeOpenAI(), first.port))
        code, shown = finish(process)
    assert code == 0, shown
    assert set(read(output)) == {f"r{index}" for index in range(40)}
    assert 40 <= len(first.requests) + len(second.requests) <= 44


def test_ctrl_c_keeps_what_is_there_and_a_rerun_does_the_rest(start: Start, tmp_path: Path) -> None:
    lines = [chat(f"r{index}") for index in range(20)]
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    stuck: dict[str, list[int | str]] = {f"r{index}": ["slow"] for index in range(10, 20)}
    with running(FakeOpenAI(stuck)) as server:
        common = ("run", source, "-o", output, "--engine", "openai", "--base-url", server.base_url)
        process = start(*common)
        wait_for(lambda: output.exists() and output.read_bytes().count(b"\n") == 10)
        wait_for(lambda: len(server.requests) == 20)
        process.send_signal(signal.SIGINT)
        code, shown = finish(process)
        assert code == 130, shown
        code, shown = finish(start(*common))
    assert code == 0, shown
    assert set(read(output)) == {f"r{index}" for index in range(20)}
    assert server.attempts == {f"r{index}": 1 + (index >= 10) for index in range(20)}


@pytest.mark.parametrize(("policy", "stride"), [("fcfs", 1), ("dfs", 8)])
def test_requests_arrive_in_the_order_of_the_policy(
    start: Start, tmp_path: Path, policy: str, stride: int
) -> None:
    """Two prompts that alternate in the file: `dfs` puts equal beginnings together."""
    beginnings = ["A long common beginning. " * 5, "Quite another beginning. " * 5]
    lines = [chat(f"r{index}", f"{beginnings[index % 2]}{index}") for index in range(16)]
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    with running(FakeOpenAI()) as server:
        process = start(
            *("run", source, "-o", output, "--engine", "openai", "--base-url", server.base_url),
            *("--policy", policy, "--max-concurrency", "1"),
        )
        code, shown = finish(process)
    assert code == 0, shown
    parity = [int(user.removeprefix("r")) % 2 for user in server.users()]
    assert parity == [(place // stride) % 2 for place in range(16)]


def test_options_that_do_not_fit_are_refused(start: Start, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [chat("r")])
    for arguments, message in (
        (("--engine", "openai"), "--base-url"),
        (("--max-concurrency", "3"), "--engine openai"),
        (("--engine", "openai", "--base-url", "http://127.0.0.1:9/v1"), "no server answers"),
    ):
        code, shown = finish(start("run", source, "-o", tmp_path / "out.jsonl", *arguments))
        assert code == 2
        assert message in shown.replace("\n", " ")


def test_a_pool_of_which_one_server_dies(start: Start, tmp_path: Path) -> None:
    lines = [chat(f"r{index}", f"Prompt {index // 8}. " * 30 + f"{index}") for index in range(80)]
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    with running(FakeOpenAI(latency_s=0.2)) as other:
        with running(FakeOpenAI(latency_s=0.2)) as dying:
            urls = ("--base-url", dying.base_url, "--base-url", other.base_url)
            log = tmp_path / "log.jsonl"
            process = start(
                *("run", source, "-o", output, "--engine", "openai", *urls),
                *("--max-concurrency", "2", "--log-file", log),
            )
            wait_for(lambda: len(dying.requests) >= 4)
        code, shown = finish(process)
    assert code == 0, shown
    assert set(read(output)) == {f"r{index}" for index in range(80)}
    assert 80 <= len(dying.requests) + len(other.requests) <= 82
    events = [json.loads(line) for line in log.read_text().splitlines()]
    ends = [event["fields"] for event in events if event["event"] == "server_ended"]
    ended = {fields["base_url"]: fields["num_requests"] for fields in ends}
    assert set(ended) == {dying.base_url, other.base_url}
    assert sum(ended.values()) == 80


def test_the_key_is_in_nothing_that_is_written(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a server repeats it."""
    key = "sk-not-for-your-eyes"
    monkeypatch.setenv("SOME_KEY", key)
    monkeypatch.setenv("WRONG_KEY", key + "-wrong")
    lines = [chat(f"r{index}") for index in range(6)]
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    faults: dict[str, list[int | str]] = {
        "r1": [400],
        "r2": ["echo-key"],
        "r3": ["reset", "half"],
        "r4": [429, 500],
    }
    with running(FakeOpenAI(faults, key=key)) as server:
        common = ("run", source, "--engine", "openai", "--base-url", server.base_url)
        log = ("--log-file", tmp_path / "log.jsonl", "--log-level", "debug")
        code, shown = finish(start(*common, "-o", output, "--api-key-env", "SOME_KEY", *log))
        assert code == 1, shown
        refused, shown_too = finish(
            start(*common, "-o", tmp_path / "other.jsonl", "--api-key-env", "WRONG_KEY", *log)
        )
        assert refused == 2
    url = server.base_url.replace("http://", f"http://user:{key}@")
    code, shown_last = finish(
        start("run", source, "-o", output, "--engine", "openai", "--base-url", url, *log)
    )
    assert code == 2
    assert key not in shown + shown_too + shown_last
    assert {"r1", "r2"} == set(read(tmp_path / "out.errors.jsonl"))
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) >= 5  # results, errors, signature, report, log
    for path in written:
        assert key.encode() not in path.read_bytes(), path.name


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.02)
