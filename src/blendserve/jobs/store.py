"""Results on disk: appended as they finish, safe against being killed at any byte.

- The output file holds one line per finished request and is the only record of progress. A request whose line
  is complete is `done` and never runs again; a torn last line is cut off and its request runs again.
- The error file holds the failures of the *latest* run. A line that failed runs again on a rerun and succeeds
  or fails anew, so the error file begins empty. No finished result lives there.
- The signature file says of which input, model and parameters the results are. Results are matched by `custom_id`.
- Opening checks everything and changes nothing; the first `flush` does. A run that cannot start leaves all
  files as they were.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import sys
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import orjson

from blendserve.errors import BlendServeError, ConfigError
from blendserve.jobs.manifest import JobSignature, Manifest, manifest_path
from blendserve.jobs.storage import sync_folder

FLUSH_INTERVAL_S = 1.0
"""results written in the last second may be lost if the machine (not the process) dies"""
_MAX_GATHERED_BYTES = 1 << 20
"""lines gathered before they are written, however long a step is"""
_NOT_JSON = "is not JSON; delete that line and its request runs again, or choose another file"


def default_errors_path(output: str | Path) -> Path:
    """The error file beside an output file: `out.jsonl` has `out.errors.jsonl`."""
    path = Path(output)
    return path.with_name(f"{path.stem}.errors{path.suffix}")


class IdSet:
    """A set of custom_ids that takes 16 bytes for each: 128 bits of their hashes, sorted."""

    def __init__(self) -> None:
        self._new = bytearray()
        self._high = array("Q")
        self._low = array("Q")

    def add(self, custom_id: str) -> None:
        """Add an id; several are sorted in at the next look-up."""
        self._new += hash128(custom_id)

    def _sort(self) -> None:
        columns = np.frombuffer(bytes(self._new), dtype="<u8").reshape(-1, 2)
        high = np.concatenate([np.asarray(self._high, dtype=np.uint64), columns[:, 0]])
        low = np.concatenate([np.asarray(self._low, dtype=np.uint64), columns[:, 1]])
        order = np.lexsort((low, high))
        high, low = high[order], low[order]
        is_new = np.ones(len(high), dtype=np.bool_)
        is_new[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
        self._high = array("Q", high[is_new].tobytes())
        self._low = array("Q", low[is_new].tobytes())
        self._new.clear()

    def __contains__(self, custom_id: object) -> bool:
        if self._new:
            self._sort()
        if not isinstance(custom_id, str) or not self._high:
            return False
        hashed = hash128(custom_id)
        high, low = int.from_bytes(hashed[:8], "little"), int.from_bytes(hashed[8:], "little")
        index = bisect_left(self._high, high)
        while index < len(self._high) and self._high[index] == high:
            if self._low[index] == low:
                return True
            index += 1
        return False

    def __len__(self) -> int:
        if self._new:
            self._sort()
        return len(self._high)


def hash128(custom_id: str) -> bytes:
    """16 bytes that stand for a custom_id: among a billion of them, two alike are not to be expected."""
    return hashlib.blake2b(custom_id.encode(), digest_size=16).digest()


class ResultStore:
    """The output and the error file of a job; one process at a time.

    Args:
        output: file to append to, `-` for standard output; only a regular file can be resumed.
        errors: file for failed lines; None puts it beside the output, or into the same stream with `-`.
        model: the name in the results; an output of another model is refused. None: whatever a server calls it.
        inputs: the job's inputs, which must be neither of the two files.
        signature: what the results are of; None: not kept and not compared.
        restart: drop earlier results instead of resuming.
        continue_anyway: keep earlier results although they are of another job.
        flush_interval_s: seconds between two times that results are forced onto the disk; 0: after every write.

    Raises:
        ConfigError: a file cannot be opened, is in use, or does not hold what it should; nothing was changed.
    """

    def __init__(
        self,
        output: str | Path,
        errors: str | Path | None = None,
        *,
        model: str | None,
        inputs: Sequence[str | Path] = (),
        signature: JobSignature | None = None,
        restart: bool = False,
        continue_anyway: bool = False,
        flush_interval_s: float = FLUSH_INTERVAL_S,
    ) -> None:
        self.done = IdSet()
        """custom_ids with a result in the output file"""
        self._flush_interval_s = flush_interval_s
        self._continue_anyway = continue_anyway
        self._signature = signature
        self._manifest: Manifest | None = None
        self._has_begun = False
        self._whole = _Extent(0, True)
        self._open_files = ExitStack()
        try:
            self._output = self._errors = self._open(output, inputs)
            if errors is not None or self._output.is_regular:
                errors = default_errors_path(output) if errors is None else errors
                if self._output.is_same_file(errors):
                    raise ConfigError(f"{errors} is both the output and the error file; name two files")
                self._errors = self._open(errors, inputs)
            if signature is not None and self._output.is_regular:
                self._manifest = self._read_manifest(Path(output))
            if not restart:
                has_signature = self._manifest is not None and self._manifest.earlier is not None
                checked_model = None if continue_anyway or has_signature else model
                self._whole = self._output.scan(lambda result: self._take_result(result, checked_model))
                if self._errors is not self._output:
                    self._errors.scan(_check_failure)
            if signature is not None and self._manifest is not None:
                self._compare(self._manifest, signature)
        except BaseException:
            self.close()
            raise

    def _read_manifest(self, output: Path) -> Manifest:
        manifest = Manifest(manifest_path(output))
        if not os.access(output.absolute().parent, os.W_OK):
            raise ConfigError(
                f"cannot write {manifest.path}: the folder does not let new files be made; "
                "choose an output in another folder"
            )
        return manifest

    def _compare(self, manifest: Manifest, signature: JobSignature) -> None:
        differences = manifest.compare(signature)
        if manifest.earlier is None and len(self.done) and not self._continue_anyway:
            raise ConfigError(
                f"{self._output.path} holds {len(self.done):,} results, but {manifest.path} is missing, which says "
                "what job they are of; put that there, add --continue-anyway if they are of this job, "
                "--restart to drop them, or choose another output file"
            )
        self._refuse(differences)

    def compare_stdin(self) -> None:
        """Check standard input against an earlier run's, once it was read.

        Raises:
            ConfigError: it is another one.
        """
        if self._manifest is not None and self._signature is not None and self._signature.stdin is not None:
            self._refuse(self._manifest.compare_stdin(self._signature.stdin))

    def _refuse(self, differences: list[str]) -> None:
        if differences and len(self.done) and not self._continue_anyway:
            raise ConfigError(
                f"{self._output.path} holds {len(self.done):,} results of a job that differs:\n  "
                + "\n  ".join(differences)
                + "\nrun it as before, add --restart to drop these results, --continue-anyway to keep them and run "
                "the rest as it is now, or choose another output file"
            )

    def write_result(self, line: bytes) -> None:
        """Take a line, LF included, for the output file; `flush` writes it."""
        self._append(self._output, line)

    def write_error(self, line: bytes) -> None:
        """Take a line, LF included, for the error file; `flush` writes it."""
        self._append(self._errors, line)

    def _append(self, file: _LineFile, line: bytes) -> None:
        file.lines.append(line)
        file.num_gathered_bytes += len(line)
        if file.num_gathered_bytes >= _MAX_GATHERED_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the lines taken so far, in one write per file; force them onto the disk once per interval.

        Raises:
            BlendServeError: the disk does not take them; whole lines that it holds are kept.
        """
        if not self._has_begun:
            self._begin()
        for file in self._files:
            file.write(self._flush_interval_s)

    def sync(self) -> None:
        """`flush`, and force everything onto the disk now.

        Raises:
            BlendServeError: the disk does not take it.
        """
        self.flush()
        for file in self._files:
            file.sync()

    @property
    def _files(self) -> tuple[_LineFile, ...]:
        return (self._output,) if self._errors is self._output else (self._output, self._errors)

    def _begin(self) -> None:
        """Every check has passed; only now is anything changed."""
        self._output.truncate(self._whole.num_bytes)
        if self._manifest is not None:  # after earlier results are dropped, before there are new ones
            try:
                self._manifest.save()
            except OSError as error:
                raise _write_failure(self._manifest.path, error) from error
        if not self._whole.ends_line:
            self._output.lines.insert(0, b"\n")
        if self._errors is not self._output:
            self._errors.truncate(0)
        self._has_begun = True

    def close(self) -> None:
        """Release the files; lines that were not flushed are dropped. Calling it again does nothing."""
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

    def _take_result(self, result: Any, model: str | None) -> str | None:
        """Note a line of the output as done. Returns what is wrong with it, if anything is."""
        try:
            custom_id, response = result["custom_id"], result["response"]
            found = response["body"]["model"] if model is not None else None
            is_result = response["status_code"] == 200 and isinstance(custom_id, str)
        except (KeyError, TypeError, IndexError):
            is_result = False
        if not is_result:
            return (
                "is not a result of a batch; choose another output file, or drop its contents with --restart"
            )
        if model is not None and found != model:
            return (
                f"is a result of model {found!r}, but this job runs {model!r}; "
                "choose another output file, drop its results with --restart, or keep them with --continue-anyway"
            )
        self.done.add(custom_id)
        return None


def _check_failure(result: Any) -> str | None:
    """What is wrong with a line of the error file; above all it must not be a result of another job."""
    try:
        if result["response"] is None and isinstance(result["error"]["code"], str):  # it was never run
            return None
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
        self.lines: list[bytes] = []
        """taken but not written"""
        self.num_gathered_bytes = 0
        self._last_sync_s = time.monotonic()
        self._is_dirty = False
        self._size = 0
        self._is_stdout = str(path) == "-"
        self.is_regular = False
        if self._is_stdout:
            return
        self._fd = self._opened()
        self.is_regular = stat.S_ISREG(os.fstat(self._fd).st_mode)
        if self.is_regular:
            self._lock()

    def _opened(self) -> int:
        try:
            is_new = not os.path.exists(self.path)
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            if is_new:
                sync_folder(Path(self.path))
        except OSError as error:
            raise ConfigError(f"cannot write {self.path}: {error.strerror}; choose another file") from error
        return fd

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(self._fd), os.stat(self.path)):
                raise BlockingIOError  # another job has put its sorted file there since it was opened
        except (BlockingIOError, FileNotFoundError) as error:
            os.close(self._fd)
            raise ConfigError(
                f"{self.path} is in use by another job; wait for it, or choose another file"
            ) from error
        except OSError as error:
            os.close(self._fd)
            raise ConfigError(
                f"cannot lock {self.path}: {error.strerror}; choose a file on another disk"
            ) from error

    def is_same_file(self, path: str | Path) -> bool:
        if not self.is_regular or str(path) == "-" or not os.path.exists(path):
            return False
        return os.path.samestat(os.fstat(self._fd), os.stat(path))

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
            try:
                os.ftruncate(self._fd, num_bytes)
            except OSError as error:
                raise _write_failure(self.path, error) from error
            self._size = num_bytes

    def write(self, sync_interval_s: float) -> None:
        """Write what was taken; a write that fails half way leaves the whole lines of it."""
        if self.lines:
            content = b"".join(self.lines)
            self.lines.clear()
            self.num_gathered_bytes = num_written = 0
            try:
                while num_written < len(content):  # a disk that fills up takes a part
                    num_written += self._write_some(memoryview(content)[num_written:])
            except OSError as error:
                with suppress(BlendServeError):
                    self.truncate(self._size + content.rfind(b"\n", 0, num_written) + 1)
                raise _write_failure(self.path, error) from error
            self._size += len(content)
            self._is_dirty = True
        if self._is_dirty and time.monotonic() - self._last_sync_s >= sync_interval_s:
            self.sync()

    def _write_some(self, content: memoryview) -> int:
        if not self._is_stdout:
            return os.write(self._fd, content)
        num_written = sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
        return num_written

    def sync(self) -> None:
        try:
            if self._is_dirty and self.is_regular:
                os.fsync(self._fd)
        except OSError as error:
            raise _write_failure(self.path, error) from error
        self._is_dirty = False
        self._last_sync_s = time.monotonic()

    def close(self) -> None:
        if not self._is_stdout:
            os.close(self._fd)


def _write_failure(path: str | Path, error: OSError) -> BlendServeError:
    return BlendServeError(
        f"cannot write {path}: {error.strerror}; the results so far are kept, "
        "once that is put right run the same command again to go on"
    )
