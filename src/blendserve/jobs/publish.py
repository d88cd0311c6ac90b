"""Where results end up: in input order, compressed, as Parquet, behind a URL.

Results always grow in a local JSONL file, the working file, which is all that resuming needs. Once a job is complete
its lines are written to where they are wanted, all or nothing, and the working file stays.
"""

from __future__ import annotations

import gzip
import os
import tempfile
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import orjson
from numpy.typing import NDArray

from blendserve.errors import BlendServeError, ConfigError
from blendserve.jobs.openai_format import as_failed_result
from blendserve.jobs.storage import filesystem, is_http, is_url, put_http, replacing
from blendserve.jobs.store import default_errors_path, hash128

_COMPRESSED = (".gz", ".zst")
_PARQUET = ".parquet"
_PARQUET_ROW_GROUP = 4096
_NEEDS_FILES = "pip install 'blendserve[files]'"


class InputOrder:
    """The order of the lines of an input, 16 bytes each."""

    def __init__(self) -> None:
        self._hashes = array("Q")
        self._lines = array("q")
        self._starts: dict[str | None, int] = {}
        """place of the first line of each file"""

    def add(self, custom_id: str | None, line: int = 0, file: str | None = None) -> None:
        """Note the next line, which may have no id that can be read."""
        self._starts.setdefault(file, len(self._lines))
        self._lines.append(line)
        self._hashes.append(0 if custom_id is None else _hash64(custom_id))

    def place_of(self, line: int, file: str | None = None) -> int:
        """Place in the input of a line."""
        start = self._starts.get(file, len(self._lines))
        end = min((other for other in self._starts.values() if other > start), default=len(self._lines))
        return bisect_left(self._lines, line, start, end)

    def positions(self, hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
        """[num_results] place in the input of each result; behind the last line for those that are not in it."""
        order = np.asarray(self._hashes, dtype=np.uint64)
        if not len(order):
            return np.zeros(len(hashes), dtype=np.int64)
        by_hash = np.argsort(order, kind="stable")
        found = np.minimum(np.searchsorted(order[by_hash], hashes), len(order) - 1)
        return np.where(order[by_hash[found]] == hashes, by_hash[found], len(order)).astype(np.int64)


def _hash64(custom_id: str) -> int:
    return int.from_bytes(hash128(custom_id)[:8], "little")


@dataclass(frozen=True, slots=True)
class Target:
    """A file that is wanted, and the local JSONL file that it is made from; they may be the same.

    Raises:
        ConfigError: nothing can be written there with what is installed.
    """

    path: str
    """local path, URL, or `-`"""
    working: str

    @classmethod
    def of(cls, path: str, folder: str | None = None, *, apart: bool = False) -> Target:
        """The target for what the user named; its working file is in `folder`, or beside it.

        `apart` keeps the two different files, for a target that holds other lines than the working file.
        """
        path = path.removeprefix("file://").removeprefix("local://")
        if path == "-":
            return cls(path, path)
        name = _without_query(path).rpartition("/")[2] if is_url(path) else Path(path).name
        for suffix in _COMPRESSED:
            name = name.removesuffix(suffix)
        if name.endswith(_PARQUET):
            name = name.removesuffix(_PARQUET) + ".jsonl"
        if not name:
            raise ConfigError(f"{path} names no file; write e.g. results.jsonl")
        _check_packages(path)
        if apart:
            name = f"{Path(name).stem}.results.jsonl"
        if folder is not None:
            return cls(path, str(Path(folder, name)))
        return cls(path, name if is_url(path) else str(Path(path).with_name(name)))

    @property
    def is_working_file(self) -> bool:
        """Whether results grow where they are wanted."""
        return self.path == self.working

    def exists(self) -> bool:
        """Whether something is there already.

        Raises:
            ConfigError: the storage cannot be asked.
        """
        if not is_url(self.path):
            return os.path.exists(self.path)
        if is_http(self.path):  # may be signed for PUT alone
            return False
        storage, path = filesystem(self.path)
        try:
            return bool(storage.exists(path))
        except Exception as error:  # drivers raise what they like
            raise ConfigError(f"cannot reach {self.path}: {error}; check the URL and your access") from error

    def write(self, order: InputOrder | None, errors: str | None = None) -> None:
        """Make the file from the working file, and with the lines of the file `errors` between its own.

        Raises:
            BlendServeError: it cannot be written; what was there is intact, and so is the working file.
        """
        try:
            places = None if order is None else _places(self.working, order, errors)
            if self.is_working_file and (places is None or places.are_in_order):
                return
            lines = _lines(self.working) if places is None else _lines_at(self.working, places, errors)
            with self._opened() as file:
                _write_lines(_without_query(self.path), file, lines)
        except Exception as error:  # drivers raise what they like
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise BlendServeError(
                f"cannot write {self.path}: {reason}; all results are in {self.working}, once that is put right "
                "run the same command again"
            ) from error

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        if not is_url(self.path):
            with replacing(Path(self.path)) as file:
                yield file
            return
        if is_http(self.path):
            with tempfile.TemporaryFile(dir=Path(self.working).parent) as file:
                yield file
                put_http(self.path, file)
            return
        storage, path = filesystem(self.path)
        with storage.transaction, storage.open(path, "wb") as file:
            yield file


class Publication:
    """The files that a job's results and failures are to end up in.

    Raises:
        ConfigError: one of them cannot be written, or not in the order of the input.
    """

    def __init__(
        self,
        output: str,
        errors: str | None,
        *,
        ordered: bool,
        errors_in_output: bool = False,
        working_dir: str | None = None,
    ) -> None:
        if (ordered or errors_in_output) and (
            output == "-" or (os.path.exists(output) and not os.path.isfile(output))
        ):
            flag = "--errors-in-output" if errors_in_output else "--ordered"
            raise ConfigError(f"{flag} sorts the output once it is complete; give -o a file")
        self.output = Target.of(output, working_dir, apart=errors_in_output)
        self.errors = None if errors is None else Target.of(errors, working_dir)
        if errors is None and errors_in_output:
            name = Path(self.output.working).name.replace(".results.", ".errors.")
            self.errors = Target.of(str(Path(self.output.working).with_name(name)))
        elif errors is None and is_url(self.output.path) and not is_http(self.output.path):
            folder, _, _ = self.output.path.rpartition("/")
            self.errors = Target.of(f"{folder}/{default_errors_path(self.output.working).name}", working_dir)
        self.order = InputOrder() if ordered or errors_in_output else None
        """to be filled while the input is read"""
        self._errors_in_output = errors_in_output

    @property
    def files(self) -> list[str]:
        """Every file that the job's lines go to."""
        targets = [self.output] if self.errors is None else [self.output, self.errors]
        paths = [path for target in targets for path in (target.path, target.working)]
        if self.errors is None:
            paths.append(str(default_errors_path(self.output.working)))
        return paths

    @property
    def working_errors(self) -> str | None:
        """Where failures grow; None: beside the results."""
        return None if self.errors is None else self.errors.working

    def check(self) -> None:
        """See to it that what is there is no loss.

        Raises:
            ConfigError: there are results, but no working file to go on from.
        """
        if (
            not self.output.is_working_file
            and not os.path.exists(self.output.working)
            and self.output.exists()
        ):
            raise ConfigError(
                f"{self.output.path} exists, but not {self.output.working}, from which it was made and which tells "
                "what is done; put that back, add --restart to replace it, or choose another output"
            )

    def write(self) -> list[Target]:
        """Write what is not yet where it is wanted; returns the files that were made from working files.

        Raises:
            BlendServeError: one of them cannot be written.
        """
        made = []
        if self.errors is not None and not self.errors.is_working_file:
            self.errors.write(None)
            made.append(self.errors)
        if not self.output.is_working_file or self.order is not None:
            self.output.write(self.order, self.working_errors if self._errors_in_output else None)
            if not self.output.is_working_file:
                made.append(self.output)
        return made


def _without_query(path: str) -> str:
    return urlsplit(path).path if is_http(path) else path


def _check_packages(path: str) -> None:
    if is_url(path) and not is_http(path):
        filesystem(path)
    try:
        if _without_query(path).endswith(".zst"):
            import zstandard  # noqa: F401
        elif _without_query(path).endswith(_PARQUET):
            import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{path} needs a package: {_NEEDS_FILES}") from error


# -------- lines of the working file --------


def _lines(path: str) -> Iterator[bytes]:
    with open(path, "rb") as file:
        yield from file


@dataclass(frozen=True, slots=True)
class _Places:
    """Where lines are, in the order in which they are wanted."""

    is_error: NDArray[np.bool_]
    """whether a line is in the file of errors"""
    start: NDArray[np.int64]
    num_bytes: NDArray[np.int64]

    @property
    def are_in_order(self) -> bool:
        return not self.is_error.any() and bool(np.all(self.start[1:] > self.start[:-1]))


def _places(path: str, order: InputOrder, errors: str | None) -> _Places:
    num_bytes, hashes = array("q"), array("Q")
    for line in _lines(path):
        num_bytes.append(len(line))
        hashes.append(_hash64(orjson.loads(line)["custom_id"]) if line.strip() else 0)
    lengths = np.asarray(num_bytes, dtype=np.int64)
    wanted = order.positions(np.asarray(hashes, dtype=np.uint64))
    starts = np.cumsum(lengths) - lengths
    is_error = np.zeros(len(lengths), dtype=np.bool_)
    if errors is not None:
        failed = _error_places(errors, order)
        is_error = np.concatenate([is_error, failed.is_error])
        starts = np.concatenate([starts, failed.start])
        lengths = np.concatenate([lengths, failed.num_bytes])
        wanted = np.concatenate([wanted, failed.wanted])
    by_input = np.argsort(wanted, kind="stable")
    return _Places(is_error[by_input], starts[by_input], lengths[by_input])


class _ErrorPlaces(NamedTuple):
    wanted: NDArray[np.int64]
    is_error: NDArray[np.bool_]
    start: NDArray[np.int64]
    num_bytes: NDArray[np.int64]


def _error_places(path: str, order: InputOrder) -> _ErrorPlaces:
    num_bytes, wanted = array("q"), array("q")
    for line in _lines(path):
        num_bytes.append(len(line))
        failure = orjson.loads(line)
        error = ((failure["response"] or {}).get("body") or {}).get("error") or {}
        if "line" in error:
            wanted.append(order.place_of(error["line"], error.get("file")))
        else:  # it was not run, and has only its id
            hashes = np.array([_hash64(failure["custom_id"])], dtype=np.uint64)
            wanted.append(int(order.positions(hashes)[0]))
    lengths = np.asarray(num_bytes, dtype=np.int64)
    return _ErrorPlaces(
        np.asarray(wanted, dtype=np.int64),
        np.ones(len(lengths), dtype=np.bool_),
        np.cumsum(lengths) - lengths,
        lengths,
    )


def _lines_at(path: str, places: _Places, errors: str | None) -> Iterator[bytes]:
    with open(path, "rb") as results, open(errors or os.devnull, "rb") as failures:
        columns = (places.is_error.tolist(), places.start.tolist(), places.num_bytes.tolist())
        for is_error, start, num_bytes in zip(*columns, strict=True):
            line = os.pread((failures if is_error else results).fileno(), num_bytes, start)
            yield as_failed_result(line) if is_error else line


# -------- formats --------


def _write_lines(path: str, file: BinaryIO, lines: Iterator[bytes]) -> None:
    """In the format that the name of the file says."""
    if path.endswith(_PARQUET):
        _write_parquet(file, lines)
        return
    with ExitStack() as stack:
        if path.endswith(".gz"):
            file = stack.enter_context(gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0))  # type: ignore[assignment]
        elif path.endswith(".zst"):
            import zstandard

            file = stack.enter_context(zstandard.ZstdCompressor().stream_writer(file, closefd=False))
        for line in lines:
            file.write(line)


def _write_parquet(file: BinaryIO, lines: Iterator[bytes]) -> None:
    """A row per line: the whole body of the response as JSON, and apart from it what is asked for most."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema(
        [
            ("id", pa.string()),
            ("custom_id", pa.string()),
            ("status_code", pa.int32()),
            ("request_id", pa.string()),
            ("model", pa.string()),
            ("text", pa.string()),
            ("finish_reason", pa.string()),
            ("prompt_tokens", pa.int64()),
            ("completion_tokens", pa.int64()),
            ("body", pa.string()),
            ("error", pa.string()),
        ]
    )
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        while chunk := [_parquet_row(orjson.loads(line)) for line in islice(lines, _PARQUET_ROW_GROUP)]:
            writer.write_table(pa.Table.from_pylist(chunk, schema))


def _parquet_row(result: dict[str, Any]) -> dict[str, Any]:
    response = result["response"] or {}
    body = response.get("body") or {}
    choice = (body.get("choices") or [{}])[0]
    usage = body.get("usage") or {}
    text = choice["message"]["content"] if "message" in choice else choice.get("text")
    error = result["error"]
    return {
        "id": result["id"],
        "custom_id": result["custom_id"],
        "status_code": response.get("status_code"),
        "request_id": response.get("request_id"),
        "model": body.get("model"),
        "text": text,
        "finish_reason": choice.get("finish_reason"),
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
        "body": orjson.dumps(body).decode() if body else None,
        "error": None if error is None else orjson.dumps(error).decode(),
    }
