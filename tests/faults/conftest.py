"""What the tests of kills and full disks share: a fork server, a tiny model, an input, and what a job came to."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

NUM_GOOD, NUM_BAD = 60, 6


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    exit: int
    log: str

    @property
    def was_killed(self) -> bool:
        return self.exit == -9


class Forks:
    """Runs `blendserve run` in forks of one process that has everything loaded."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fork_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
        )

    def _ask(self, **command: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def _command(self, *arguments: str | Path, engine: str) -> list[str]:
        model = ("--model", str(self._model), "--served-model-name", "tiny", "--engine", engine)
        return ["run", *map(str, arguments), *model]

    def warm_up(self, *arguments: str | Path, engine: str = "simulated") -> None:
        """Run a command in the process itself, so that forks find all compiled code loaded."""
        assert self._ask(warm_up=self._command(*arguments, engine=engine))["exit"] in {None, 0, 1}

    def run(self, *arguments: str | Path, engine: str = "simulated", **how: Any) -> Outcome:
        """Run a command in a fork; `how` says how it dies, see `fork_server.py`."""
        return Outcome(**self._ask(arguments=self._command(*arguments, engine=engine), **how))

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()


@pytest.fixture(scope="session")
def forks(
    make_tiny_model: Callable[..., Path], requests: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Forks]:
    model = make_tiny_model("llama", tmp_path_factory.mktemp("model") / "tiny", with_tokenizer=True)
    server = Forks(model)
    try:
        server.warm_up(requests, "-o", tmp_path_factory.mktemp("warm") / "out.jsonl", "--ordered")
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def requests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good lines of many lengths with bad ones among them."""
    path = tmp_path_factory.mktemp("input") / "in.jsonl"
    lines = []
    for index in range(NUM_GOOD):
        body = {
            "prompt": f"Story {index % 7}, chapter {index}",
            "max_tokens": 1 + index % 23,
            "temperature": 0,
        }
        if index % 10 == 0:
            lines.append(
                {"custom_id": f"bad-{index // 10}", "method": "GET", "url": "/v1/completions", "body": body}
            )
        body |= {"n": 2} if index % 9 == 0 else {}
        lines.append({"custom_id": f"good-{index}", "method": "POST", "url": "/v1/completions", "body": body})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a result file; every one must be whole."""
    content = path.read_bytes()
    assert content == b"" or content.endswith(b"\n")
    return [json.loads(line) for line in content.splitlines()]


def whole_lines(path: Path) -> bytes:
    """What a killed job has left behind, less a torn last line."""
    content = path.read_bytes() if path.exists() else b""
    return content[: content.rfind(b"\n") + 1]


def facts(output: Path, *, with_text: bool = False) -> set[tuple[Any, ...]]:
    """What a job came to: of every line its id, status, usage or error code. None may be there twice."""
    results = lines_of(output) + lines_of(output.with_name(f"{output.stem}.errors.jsonl"))
    found = set()
    for result in results:
        body = result["response"]["body"]
        usage, error = body.get("usage", {}), body.get("error", {})
        text = tuple(choice["text"] for choice in body.get("choices", ())) if with_text else ()
        found.add(
            (
                result["custom_id"],
                result["response"]["status_code"],
                usage.get("prompt_tokens"),
                usage.get("completion_tokens"),
                error.get("code"),
                text,
            )
        )
    assert len({fact[0] for fact in found}) == len(results), "a request was answered twice"
    return found
