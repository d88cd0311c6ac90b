"""A process that has loaded everything and forks a child for each `blendserve` command it is told to run.

A command then starts in no time and can be killed at a chosen byte or system call, which is what the tests here
need hundreds of. Commands come as JSON on standard input, a line each, and so do the answers on standard output.
"""

import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blendserve import tokenizer
from blendserve.cli import app
from blendserve.jobs import setup

KILLED_AT = ("write", "fsync", "replace", "ftruncate")
_tokenizers: dict[Path, tokenizer.Tokenizer] = {}


def tokenizer_of(folder: Path, **_options: Any) -> tokenizer.Tokenizer:
    """Loaded once, by the first command: the one that warms up."""
    if folder not in _tokenizers:
        _tokenizers[folder] = tokenizer.Tokenizer(folder)
    return _tokenizers[folder]


def killed_at_byte(num_bytes: int) -> None:
    """Die in the middle of the `os.write` that exceeds so many bytes, those written."""
    real, left = os.write, num_bytes

    def write(fd: int, content: Any) -> int:
        nonlocal left
        if len(content) > left:
            real(fd, bytes(content[:left]))
            os.kill(os.getpid(), signal.SIGKILL)
        left -= len(content)
        return real(fd, content)

    os.write = write


def killed_at_call(number: int, after: bool) -> None:
    """Die before or after the so-manieth call that changes a file."""
    num_calls = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls == number and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*arguments)
            if num_calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapper

    for name in KILLED_AT:
        setattr(os, name, counted(getattr(os, name)))


def run(command: dict[str, Any]) -> None:
    """The child: never returns."""
    if "folder" in command:
        os.chdir(command["folder"])
    if "max_file_bytes" in command:
        limit = command["max_file_bytes"]
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if "kill_at_byte" in command:
        killed_at_byte(command["kill_at_byte"])
    elif "kill_at_call" in command:
        killed_at_call(*command["kill_at_call"])
    try:
        app(command["arguments"])
    except SystemExit as done:
        sys.stderr.flush()
        os._exit(done.code if isinstance(done.code, int) else 1)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    os._exit(99)


def answered(command: dict[str, Any]) -> dict[str, Any]:
    """Fork, run, wait; an exit of -9 is a child that was killed."""
    if "warm_up" in command:
        return {"exit": app(command["warm_up"], standalone_mode=False)}
    with tempfile.TemporaryFile() as log:
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_RDWR), 0)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            run(command)
        if "kill_after_s" in command:
            time.sleep(command["kill_after_s"])
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        log.seek(0)
        return {"exit": os.waitstatus_to_exitcode(status), "log": log.read().decode()}


if __name__ == "__main__":
    setup.Tokenizer = tokenizer_of
    for line in sys.stdin:
        print(json.dumps(answered(json.loads(line))), flush=True)
