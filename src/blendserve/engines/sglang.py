"""SGLang's server as a process of the job's: started on a free port of this machine, and ended with the job.

```
job ─ OpenAIServer ══ HTTP, loopback ══ python -m sglang.launch_server ─ its scheduler, its detokenizer
 └─ a watchdog of a few MB, which ends the server should the job be killed
```

It takes its requests first come, first served, so what the window sends is run in that order. Where it ends by itself,
`SupervisedEngine` starts another.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from blendserve.engines.process import how_it_ended
from blendserve.errors import ConfigError

MAX_START_S = 1800.0
"""to load a model, compile what is compiled and answer"""
PROBE_EVERY_S = 0.5
END_TIMEOUT_S = 30.0
"""from the request to end to the end; then it is killed"""
LOG_TAIL_LINES = 20

_OURS = {
    "model": "--model",
    "model_path": "--model",
    "tokenizer_path": "--model",
    "served_model_name": "--served-model-name",
    "host": None,
    "port": None,
    "api_key": None,
    "schedule_policy": "--policy",
    "enable_cache_report": None,
    "context_length": "--max-model-len",
    "page_size": "--block-size",
    "max_total_tokens": "--kv-cache-tokens",
    "max_running_requests": "--max-num-seqs",
    "chunked_prefill_size": "--max-num-batched-tokens",
    "dtype": "--dtype",
    "tp_size": "--tensor-parallel-size",
    "tensor_parallel_size": "--tensor-parallel-size",
}
"""arguments of the server that are set from here, with the options they are set by"""

# Ends a process group once standard input does.
_WATCHDOG = """
import os, signal, sys, time
sys.stdin.buffer.read()
group = int(sys.argv[1])
try:
    os.killpg(group, signal.SIGTERM)
    time.sleep(5.0)
    os.killpg(group, signal.SIGKILL)
except ProcessLookupError:
    pass
"""

_log = logging.getLogger(__name__)


def check_engine_args(given: Mapping[str, Any]) -> None:
    """Refuse arguments that have options of their own; those that SGLang does not have it refuses itself.

    Raises:
        ConfigError: see above.
    """
    for name in given:
        if name in _OURS:
            flag = _OURS[name]
            remedy = f"use {flag} instead" if flag else "leave it out"
            raise ConfigError(f"--engine-arg {name} is set by BlendServe; {remedy}")


def check_python(python: str) -> None:
    """See that there is such an interpreter.

    Raises:
        ConfigError: there is none.
    """
    if shutil.which(python) is None:
        raise ConfigError(
            f"--sglang-python {python}: there is no such program; name the interpreter of an environment "
            "that has SGLang, e.g. ./sglang-venv/bin/python"
        )


class SGLangServer:
    """A running server.

    Args:
        python: interpreter that has SGLang.
        folder: the model.
        name: of the model, in requests and answers.
        options: arguments of `sglang.launch_server`; None leaves one to SGLang.
        max_start_s: until it must answer.

    Raises:
        ConfigError: it ended before it answered; the message has the end of its log.
    """

    def __init__(
        self,
        python: str,
        folder: Path,
        name: str,
        options: Mapping[str, Any],
        *,
        max_start_s: float = MAX_START_S,
    ) -> None:
        port = free_port()
        self.base_url = f"http://127.0.0.1:{port}/v1"
        ours = {
            "model_path": str(folder),
            "served_model_name": name,
            "host": "127.0.0.1",
            "port": port,
            "schedule_policy": "fcfs",
            "enable_cache_report": True,
        }
        descriptor, path = tempfile.mkstemp(prefix="blendserve-sglang-", suffix=".log")
        self.log_file = Path(path)
        self._watchdog: subprocess.Popen[bytes] | None = None
        with open(descriptor, "wb") as log:
            # In a group of its own Ctrl-C in a terminal reaches the job alone, and all of it can be ended.
            self._process = subprocess.Popen(
                [python, "-m", "sglang.launch_server", *arguments({**ours, **options})],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        try:
            self._watchdog = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _WATCHDOG, str(self._process.pid)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,
            )
            _log.info(
                "server_started", extra={"fields": {"pid": self._process.pid, "log": path, "port": port}}
            )
            self._wait_until_it_answers(f"http://127.0.0.1:{port}/health", max_start_s)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Process id of the server, and of its group."""
        return self._process.pid

    def how_it_ended(self) -> str | None:
        """What became of it, with the end of its log; None while it runs."""
        if self._process.poll() is None:
            return None
        return f"SGLang's server {how_it_ended(self._process)}; the end of its log, {self.log_file}:\n{self._tail()}"

    def close(self) -> None:
        """End it and what it started. The log stays if it had ended by itself."""
        had_ended = self._process.poll() is not None
        if not had_ended:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._watchdog is not None:
            self._watchdog.kill()
            self._watchdog.communicate()
            self._watchdog = None
        if not had_ended:
            self.log_file.unlink(missing_ok=True)

    def _wait_until_it_answers(self, url: str, max_start_s: float) -> None:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        until_s = time.monotonic() + max_start_s
        while time.monotonic() < until_s:
            if (end := self.how_it_ended()) is not None:
                raise ConfigError(f"SGLang cannot run the model with these options. {end}")
            try:
                with opener.open(url, timeout=10.0):
                    return
            except (urllib.error.URLError, OSError):  # nobody there yet, or not ready
                time.sleep(PROBE_EVERY_S)
        raise ConfigError(
            f"SGLang's server did not answer within {max_start_s:g} s; the end of its log:\n{self._tail()}"
        )

    def _tail(self) -> str:
        lines = self.log_file.read_bytes()[-16384:].decode(errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:]) or "(nothing)"


def arguments(options: Mapping[str, Any]) -> list[str]:
    """Options as a command line: True is a flag, None and False are left out, a list is several values."""
    line: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        line.append(f"--{name.replace('_', '-')}")
        if isinstance(value, list):
            line += map(str, value)
        elif isinstance(value, dict):
            line.append(orjson.dumps(value).decode())
        elif value is not True:
            line.append(str(value))
    return line


def free_port() -> int:
    """A port of the loopback address that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
