"""Results on disk: appended as they finish, safe against being killed at any byte.

- The output file holds one line per finished request and is the only record of progress. A request whose line
  is complete is `done` and never runs again; a torn last line is cut off and its request runs again.
- The error file holds the failures of the *latest* run. A line that failed runs again on a rerun and succeeds
  or fails anew, so opening the store empties the error file. No finished result lives there.
- Results are matched by `custom_id` and model. The text of a request is not compared: who edits the input but
  not the ids starts over with `overwrite`.
"""

from __future__ import annotations

import fcntl
import os
import stat
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

import orjson

from blendserve.errors import BlendServeError, ConfigError
from blendserve.jobs.columns import CustomIds

_NOT_JSON = "is not JSON; choose another file, or overwrite this one"

SYNC_INTERVAL_S = 1.0
"""results written in the last second may be lost if the machine (not the process) dies"""


def default_errors_path(output: str | Path) -> Path:
    """The error file beside an output file: `out.jsonl` has `out.errors.jsonl`."""
    path = Path(output)
    return path.with_name(f"{path.stem}.errors{path.suffix}")


class ResultStore:
    """The output and the error file of a job; one process at a time.

    Args:
        output: file to append to, `-` for standard output; only a regular file can be resumed.
        errors: file for failed lines; None puts it beside the output, or into the same stream with `-`.
        model: the name in the results; an output of another model is refused.
        inputs: the job's inputs, which must be neither of the two files.
        overwrite: drop earlier results instead of resuming.

    Raises:
        ConfigError: a file cannot be opened, is in use, or does not hold what it should; nothing was changed.
    """

    def __init__(
        self,
        output: str | Path,
        errors: str | Path | None = None,
        *,
        model: str,
        inputs: Sequence[str | Path] = (),
        overwrite: bool = False,
    ) -> None:
        self.done = CustomIds()
        """custom_ids with a result in the output file"""
        self._open_files = ExitStack()
        try:
            self._output = self._errors = self._open(output, inputs)
            if errors is not None or self._output.is_regular:
                errors = default_errors_path(output) if errors is None else errors
                if self._output.is_same_file(errors):
                    raise ConfigError(f"{errors} is both the output and the error file; name two files")
                self._errors = self._open(errors, inputs)
            whole = _Extent(0, True)
            if not overwrite:
                whole = self._output.scan(lambda result: self._take_result(result, model))
                if self._errors is not self._output:
                    self._errors.scan(_check_failure)
            # Every check has passed; only now is anything changed.
            self._output.truncate(whole.num_bytes)
            if not whole.ends_line:
                self._output.append(b"\n")
            if self._errors is not self._output:
                self._errors.truncate(0)
        except BaseException:
            self.close()
            raise

    def write_result(self, line: bytes) -> None:
        """Append a line, LF included, to the output file."""
        self._output.append(line)

    def write_error(self, line: bytes) -> None:
        """Append a line, LF included, to the error file."""
        self._errors.append(line)

    def sync_if_due(self) -> None:
        """Force what was written onto the disk, at most once per `SYNC_INTERVAL_S`."""
        self._output.sync_if_due()
        self._errors.sync_if_due()

    def close(self) -> None:
        """Force everything onto the disk and release the files; calling it again does nothing."""
        self._open_files.close()

    def __enter__(self) -> ResultStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, path: str | Path, inputs: Sequence[str | Path]) -> _LineFile:
        file = _LineFile(path)
        self._open_files.callback(file.close)
        if any(file.is_same_file(input_path) for input_path in inputs):
            raise ConfigError(f"{path} is the input of the job too; write the results to another file")
        return file

    def _take_result(self, result: Any, model: str) -> str | None:
        """Note a line of the output as done. Returns what is wrong with it, if anything is."""
        try:
            custom_id, response = result["custom_id"], result["response"]
            found = response["body"]["model"]
            is_result = response["status_code"] == 200 and isinstance(custom_id, str)
        except (KeyError, TypeError, IndexError):
            is_result = False
        if not is_result:
            return "is not a result of a batch; choose another output file, or overwrite this one"
        if found != model:
            return (
                f"is a result of model {found!r}, but this job runs {model!r}; "
                "choose another output file, or overwrite this one"
            )
        self.done.add(custom_id)
        return None


def _check_failure(result: Any) -> str | None:
    """What is wrong with a line of the error file; above all it must not be a result of another job."""
    try:
        if result["response"]["status_code"] >= 400:
            return None
    except (KeyError, TypeError, IndexError):
        pass
    return "is not an error of a batch, and the file would be emptied; choose another error file"


class _Extent(NamedTuple):
    """How much of a file is whole lines."""

    num_bytes: int
    ends_line: bool
    """False where only the LF of the last line is missing"""


class _LineFile:
    """A file that grows by whole lines: a regular file that is locked and can be scanned, or a stream."""

    def __init__(self, path: str | Path) -> None:
        self.path = path
        self._last_sync_s = time.monotonic()
        self._is_dirty = False
        self._size = 0
        self._file: BinaryIO
        self._is_stdout = str(path) == "-"
        self.is_regular = False
        if self._is_stdout:
            self._file = sys.stdout.buffer
            return
        try:
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}; choose another file") from error
        self.is_regular = stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)
        if self.is_regular:
            self._lock()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ConfigError(
                f"{self.path} is in use by another job; wait for it, or choose another file"
            ) from error
        except OSError as error:
            self._file.close()
            raise ConfigError(
                f"cannot lock {self.path}: {error.strerror}; choose a file on another disk"
            ) from error

    def is_same_file(self, path: str | Path) -> bool:
        if not self.is_regular or str(path) == "-" or not os.path.exists(path):
            return False
        return os.path.samestat(os.fstat(self._file.fileno()), os.stat(path))

    def scan(self, check: Callable[[Any], str | None]) -> _Extent:
        """The whole lines of the file; a last line that is not JSON was torn by a kill and does not count.

        `check` returns what is wrong with the JSON value of a line, or None.

        Raises:
            ConfigError: a line is wrong, so this is not a file that a job wrote.
        """
        extent = _Extent(0, True)
        torn_line = 0
        if not self.is_regular:
            return extent
        with open(self.path, "rb") as file:
            for line, raw in enumerate(file, start=1):
                if torn_line:
                    raise ConfigError(f"line {torn_line} of {self.path} {_NOT_JSON}")
                if raw.strip():
                    try:
                        problem = check(orjson.loads(raw))
                    except orjson.JSONDecodeError:
                        if raw.startswith((b"{", b"\0")):  # a crash of the machine may leave zeros
                            torn_line = line
                            continue
                        problem = _NOT_JSON
                    if problem is not None:
                        raise ConfigError(f"line {line} of {self.path} {problem}")
                extent = _Extent(extent.num_bytes + len(raw), raw.endswith(b"\n"))
        return extent

    def truncate(self, num_bytes: int) -> None:
        if self.is_regular:
            os.ftruncate(self._file.fileno(), num_bytes)
            self._size = num_bytes

    def append(self, line: bytes) -> None:
        try:
            written = self._file.write(line)
            while written < len(line):  # a disk that fills up takes a part
                written += self._file.write(line[written:])
            self._file.flush()
        except OSError as error:
            with suppress(OSError):
                self.truncate(self._size)
            raise self._failure(error) from error
        self._size += len(line)
        self._is_dirty = True
        self.sync_if_due()

    def sync_if_due(self) -> None:
        if self._is_dirty and time.monotonic() - self._last_sync_s >= SYNC_INTERVAL_S:
            self._sync()

    def _sync(self) -> None:
        try:
            if self.is_regular:
                os.fsync(self._file.fileno())
        except OSError as error:
            raise self._failure(error) from error
        self._is_dirty = False
        self._last_sync_s = time.monotonic()

    def _failure(self, error: OSError) -> BlendServeError:
        return BlendServeError(
            f"cannot write {self.path}: {error.strerror}; what it holds is kept, run the job again to go on"
        )

    def close(self) -> None:
        if self._is_stdout:
            return
        try:
            if self._is_dirty:
                self._sync()
        finally:
            self._file.close()
