"""Where the lines of a job come from: files, folders, globs, standard input and remote stores.

```
inputs ──find_sources──▶ Source ──read_lines──▶ SourceLine(number, bytes of one JSON object | RequestError)
```

Whatever the size of a file, one block of it and one line are in memory. The rows of Parquet and CSV files become
the lines that a batch file would have, so that everything after this module knows one format only.
"""

from __future__ import annotations

import csv
import difflib
import glob
import gzip
import os
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

import orjson

from blendserve.errors import ConfigError, RequestError
from blendserve.jobs.storage import filesystem, is_http, open_http

DEFAULT_MAX_LINE_BYTES = 100_000_000

_BLOCK_BYTES = 1 << 20
_ZSTD_BLOCK_BYTES = 4096
"""compressed bytes at a time; they may stand for a thousand times as many"""
_PARQUET_BATCH_ROWS = 1024
_UTF8_BOM = b"\xef\xbb\xbf"

_COMPRESSIONS = ("", ".gz", ".zst")
_LINE_SUFFIXES = tuple(kind + packed for kind in (".jsonl", ".ndjson") for packed in _COMPRESSIONS)
_CSV_SUFFIXES = tuple(".csv" + packed for packed in _COMPRESSIONS)
_PARQUET_SUFFIXES = (".parquet", ".pq")
_SUFFIXES = _LINE_SUFFIXES + _CSV_SUFFIXES + _PARQUET_SUFFIXES

_ENCODING_OF_START = {
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"{\0\0\0": "UTF-32LE",
    b"\0\0\0{": "UTF-32BE",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"{\0": "UTF-16LE",
    b"\0{": "UTF-16BE",
}
"""longest first: UTF-32 begins like UTF-16"""
_REFUSED_START = {
    b"PAR1": "a Parquet file; name it .parquet",
    b"PK\x03\x04": "a zip archive; unpack it",
    b"BZh": "compressed with bzip2; unpack it, or compress with gzip or zstd",
    b"\xfd7zXZ": "compressed with xz; unpack it, or compress with gzip or zstd",
}

ENVELOPE_KEYS = frozenset({"custom_id", "method", "url", "body"})
CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"

_TEXT_CELLS = frozenset({"custom_id", "method", "url", "model", "prompt", "user", "suffix"})
"""cells whose text is never read as JSON"""


@dataclass(frozen=True, slots=True)
class Source:
    """One file with lines or rows of a job."""

    path: str
    """a local path, a URL that fsspec opens, or `-` for standard input"""
    id_prefix: str = ""
    """custom_ids of table rows that have none begin with it"""

    @property
    def is_table(self) -> bool:
        """Whether the lines are rows of a Parquet or CSV file."""
        return is_table(self.path)


class SourceLine(NamedTuple):
    """A line that is not blank."""

    number: int
    """physical line, or row of a table, from 1"""
    content: bytes | RequestError
    """without the line feed, or why it could not be read"""


def is_table(path: str) -> bool:
    """Whether a file has rows (Parquet, CSV) instead of lines, by its name."""
    return path.lower().endswith(_PARQUET_SUFFIXES + _CSV_SUFFIXES)


# -------- finding --------


def find_sources(inputs: Sequence[str | Path], *, exclude: Iterable[str | Path] = ()) -> list[Source]:
    """The files that inputs stand for: in the order given, those of a folder or glob by name, each once.

    Globs and folders leave out the files in `exclude`, so that a job's own output does not become its input.

    Raises:
        ConfigError: nothing is there, or a store cannot be asked.
    """
    excluded = {os.path.realpath(path) for path in exclude}
    paths: dict[str, str] = {}
    for given in map(str, inputs):
        if given == "-":
            paths.setdefault(given, given)
        elif "://" in given:
            paths.update((url, url) for url in _remote_files(given) if url not in paths)
        else:
            for path in _local_files(given):
                key = os.path.realpath(path)
                if path == given or key not in excluded:
                    paths.setdefault(key, path)
    if not paths:
        raise ConfigError(
            f"the input {', '.join(map(str, inputs))} holds nothing but the job's own output; name other files"
        )
    base_names = Counter(PurePosixPath(path).name for path in paths.values())
    sources = []
    for path in paths.values():
        base_name = PurePosixPath(path).name
        sources.append(Source(path, base_name if base_names[base_name] == 1 else path))
    return sources


def _local_files(given: str) -> list[str]:
    if os.path.isdir(given):
        found = [
            str(path)
            for path in sorted(Path(given).rglob("*"))
            if path.name.lower().endswith(_SUFFIXES)
            and not any(part.startswith((".", "_")) for part in path.relative_to(given).parts)
            and path.is_file()
        ]
        if not found:
            raise ConfigError(
                f"the directory {given} has no input files; it needs {', '.join(_SUFFIXES)}, at any depth"
            )
        return found
    if os.path.exists(given):
        return [given]
    if glob.has_magic(given):
        if found := sorted(path for path in glob.glob(given, recursive=True) if os.path.isfile(path)):
            return found
        raise ConfigError(f"no file matches the input {given}; check the pattern")
    raise ConfigError(f"cannot read the input {given}: there is no such file; give a readable JSONL file")


def _remote_files(given: str) -> list[str]:
    if is_http(given):
        return [given]
    storage, path = _storage(given)
    with _asking(given):
        if glob.has_magic(path):
            found = [name for name in storage.glob(path) if storage.isfile(name)]
        elif storage.isdir(path):
            found = [
                name
                for name in storage.find(path)
                if name.lower().endswith(_SUFFIXES) and not PurePosixPath(name).name.startswith((".", "_"))
            ]
        else:
            return [given]
        if not found:
            raise ConfigError(f"no input file at {given}; check the address")
        return [str(storage.unstrip_protocol(name)) for name in sorted(found)]


@contextmanager
def _asking(url: str) -> Iterator[None]:
    """Around questions to a remote store."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read the input {url} ({error}); check the address and your access to it"
        ) from error


def _storage(url: str) -> tuple[Any, str]:
    try:
        return filesystem(url)
    except ConfigError as error:
        raise ConfigError(f"cannot read the input: {error}") from error


# -------- reading --------


def read_lines(
    source: Source,
    *,
    max_line_bytes: int = DEFAULT_MAX_LINE_BYTES,
    parameters: Set[str] = frozenset(),
    column_mapping: Mapping[str, str] | None = None,
) -> Iterator[SourceLine]:
    """The lines of a file, blank ones left out but counted.

    Args:
        source: where to read; compression is recognised by the first bytes.
        max_line_bytes: a longer line is an error of that line, and never whole in memory.
        parameters: names that a column of a table may have by itself, besides those of the envelope.
        column_mapping: request key to column of a table; with it, other columns are left out.

    Raises:
        ConfigError: the file cannot be read, or is not of a kind that can.
    """
    try:
        with _opened(source.path) as file:
            if source.path.lower().endswith(_PARQUET_SUFFIXES):
                columns, rows = _parquet_rows(source.path, file)
            else:
                blocks = _blocks(source.path, file)
                if not source.is_table:
                    yield from split_lines(blocks, source.path, max_line_bytes)
                    return
                columns, rows = _csv_rows(source.path, blocks, max_line_bytes)
            keys = _keys_of_columns(source.path, columns, parameters, column_mapping or {})
            for number, cells in enumerate(rows, start=1):
                if isinstance(cells, RequestError):
                    yield SourceLine(number, cells)
                elif cells:
                    yield SourceLine(number, _request_of_row(cells, keys, f"{source.id_prefix}-{number}"))
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot read the input {source.path}: {reason}; give a readable, complete file"
        ) from error


def split_lines(
    blocks: Iterable[bytes], path: str = "-", max_line_bytes: int = DEFAULT_MAX_LINE_BYTES
) -> Iterator[SourceLine]:
    """Cut blocks of bytes at line feeds alone: JSON strings may hold the other separators of Unicode.

    Raises:
        ConfigError: the text is UTF-16 or UTF-32.
    """
    for number, line in enumerate(_cut(blocks, path, max_line_bytes), start=1):
        # ASCII white space, the CR of a CRLF among it
        content = line.strip() if isinstance(line, bytes) else line
        if content:
            yield SourceLine(number, content)


def _cut(blocks: Iterable[bytes], path: str, max_line_bytes: int) -> Iterator[bytes | RequestError]:
    """All lines, as they are."""
    held: list[bytes] = []  # what is known of the line that goes on in the next block
    num_held = 0
    is_start = True
    for block in blocks:
        content = block
        if is_start and block:
            is_start = False
            _refuse_encodings(path, block)
            content = block.removeprefix(_UTF8_BOM)
        *ended, rest = content.split(b"\n")
        for piece in ended:
            if num_held or len(piece) > max_line_bytes:
                held.append(piece)
                yield _whole(held, num_held + len(piece), max_line_bytes)
                held, num_held = [], 0
            else:
                yield piece
        num_held += len(rest)
        if num_held > max_line_bytes:
            held.clear()
        elif rest:
            held.append(rest)
    if num_held:
        yield _whole(held, num_held, max_line_bytes)


def _whole(pieces: list[bytes], num_bytes: int, max_line_bytes: int) -> bytes | RequestError:
    if num_bytes > max_line_bytes:
        return RequestError(
            "invalid_request",
            f"This line has {num_bytes:,} bytes; at most {max_line_bytes:,} are read. "
            "Shorten it, or raise the limit (--max-line-bytes).",
        )
    return b"".join(pieces)


def _refuse_encodings(path: str, start: bytes) -> None:
    for mark, encoding in _ENCODING_OF_START.items():
        if start.startswith(mark):
            name = "FILE" if path == "-" else path
            raise ConfigError(
                f"the input {path} is {encoding}, not UTF-8; convert it: "
                f"iconv -f {encoding} -t UTF-8 {name} > utf8.jsonl"
            )


def _opened(path: str) -> AbstractContextManager[BinaryIO]:
    if path == "-":
        return nullcontext(sys.stdin.buffer)
    if "://" in path:
        with _asking(path):
            if is_http(path):
                return open_http(path)
            storage, inner = _storage(path)
            opened: AbstractContextManager[BinaryIO] = storage.open(inner, "rb")
        return opened
    return open(path, "rb")


class _Rewound:
    """A file of which the first bytes were read already; pipes cannot go back."""

    def __init__(self, start: bytes, file: BinaryIO) -> None:
        self._start = start
        self._file = file

    def read(self, size: int = -1) -> bytes:
        if not self._start:
            return self._file.read(size)
        if size < 0:
            size = sys.maxsize
        part, self._start = self._start[:size], self._start[size:]
        return part


def _blocks(path: str, file: BinaryIO) -> Iterator[bytes]:
    """The bytes of a file, unpacked where they are compressed."""
    start = file.read(64)
    for mark, kind in _REFUSED_START.items():
        if start.startswith(mark):
            raise ConfigError(f"the input {path} is {kind}")
    whole = _Rewound(start, file)
    if start.startswith(b"\x1f\x8b"):
        with gzip.GzipFile(fileobj=whole) as unpacked:  # type: ignore[call-overload]
            while block := unpacked.read(_BLOCK_BYTES):
                yield block
    elif start.startswith(b"\x28\xb5\x2f\xfd"):
        yield from _unpack_zstd(path, whole)
    else:
        yield start
        while block := file.read(_BLOCK_BYTES):
            yield block


def _unpack_zstd(path: str, file: _Rewound) -> Iterator[bytes]:
    """Every frame; unlike zstandard's own reader this sees that the last one is cut off."""
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError(
            f"{path} is compressed with zstd: pip install 'blendserve[files]' ({error})"
        ) from error
    decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)
    frame = None
    try:
        while packed := file.read(_ZSTD_BLOCK_BYTES):
            while packed:
                frame = frame or decompressor.decompressobj()
                yield frame.decompress(packed)
                packed = frame.unused_data if frame.eof else b""
                if frame.eof:
                    frame = None
    except zstandard.ZstdError as error:
        raise ConfigError(f"cannot read the input {path}: {error}; give a complete zstd file") from error
    if frame is not None:
        raise EOFError("the zstd stream ends before its end marker")


# -------- tables --------

_Cells = dict[str, Any]


def _parquet_rows(path: str, file: BinaryIO) -> tuple[list[str], Iterator[_Cells | RequestError]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ConfigError(
            f"reading {path} needs pyarrow: pip install 'blendserve[files]' ({error})"
        ) from error

    def rows() -> Iterator[_Cells | RequestError]:
        try:
            for batch in table.iter_batches(batch_size=_PARQUET_BATCH_ROWS):
                try:
                    yield from batch.to_pylist()
                except UnicodeDecodeError:  # one cell spoils the batch
                    yield from map(_only_row, (batch.slice(row, 1) for row in range(batch.num_rows)))
        except pa.ArrowException as error:
            raise OSError(f"not a whole Parquet file ({error})") from error

    try:
        table = pq.ParquetFile(file)
    except pa.ArrowException as error:
        raise OSError(f"not a whole Parquet file ({error})") from error
    return table.schema_arrow.names, rows()


def _only_row(batch: Any) -> _Cells | RequestError:
    try:
        cells: _Cells = batch.to_pylist()[0]
    except UnicodeDecodeError as error:
        return _not_utf8(error)
    return cells


def _csv_rows(
    path: str, blocks: Iterable[bytes], max_line_bytes: int
) -> tuple[list[str], Iterator[_Cells | RequestError]]:
    """Rows of a CSV file with a header; empty cells are absent. {} stands for a blank row."""

    def texts() -> Iterator[str]:
        for number, line in enumerate(_cut(blocks, path, max_line_bytes), start=1):
            if isinstance(line, RequestError):
                raise ConfigError(f"line {number} of {path}: {line.message}")
            yield line.decode("utf-8", "surrogateescape") + "\n"

    csv.field_size_limit(max_line_bytes)
    reader = csv.reader(texts(), strict=True)
    try:
        header = next(reader, [])
        while not header:
            header = next(reader)
    except (StopIteration, csv.Error):
        header = []

    def rows() -> Iterator[_Cells | RequestError]:
        while True:
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield RequestError("invalid_request", f"This row is not valid CSV: {error}. Quote its cells.")
                continue
            if fields and len(fields) != len(header):
                yield RequestError(
                    "invalid_request",
                    f"This row has {len(fields)} cells, the header {len(header)}. Quote cells that hold commas.",
                )
            else:
                yield (
                    {name: cell for name, cell in zip(header, fields, strict=False) if cell} if fields else {}
                )

    return header, rows()


def _keys_of_columns(
    path: str, columns: list[str], parameters: Set[str], mapping: Mapping[str, str]
) -> dict[str, str]:
    """Column to request key.

    Columns that are called like a parameter need no mapping. Others are left out where a mapping says what is
    wanted, and refused where none does: a misspelt parameter must not be ignored for a million rows.
    """
    known = ENVELOPE_KEYS | parameters
    remedy = "say which columns to use: --column-mapping custom_id=COLUMN,prompt=COLUMN"
    for key, column in mapping.items():
        if column not in columns:
            raise ConfigError(f"{path} has no column {column!r} (for {key}); it has {', '.join(columns)}")
        if key not in known:
            raise ConfigError(f"--column-mapping: no {key!r}; use custom_id, prompt, messages or a parameter")
    keys = {column: key for key, column in mapping.items()}
    for column in columns:
        if column in keys:
            continue
        if column in known:
            if column not in mapping:
                keys[column] = column
        elif not mapping:
            similar = difflib.get_close_matches(column, known, n=1)
            hint = f" (did you mean {similar[0]}?)" if similar else ""
            raise ConfigError(f"the column {column!r} of {path} is no parameter of a request{hint}; {remedy}")
    if not {"prompt", "messages", "body"} & set(keys.values()):
        raise ConfigError(
            f"{path} has neither a column prompt nor messages, only {', '.join(columns) or 'nothing'}; {remedy}"
        )
    return keys


def _request_of_row(cells: _Cells, keys: Mapping[str, str], default_id: str) -> bytes | RequestError:
    """The line of a batch file that says what a row says."""
    values = {
        keys[column]: _value(keys[column], cell)
        for column, cell in cells.items()
        if cell is not None and column in keys
    }
    custom_id = values.pop("custom_id", default_id)
    line = {
        "custom_id": str(custom_id) if type(custom_id) is int else custom_id,
        "method": values.pop("method", "POST"),
        "url": values.pop("url", CHAT_URL if "messages" in values else COMPLETIONS_URL),
    }
    body = values.pop("body", {})
    line["body"] = body | values if isinstance(body, dict) else body
    try:
        return orjson.dumps(line)
    except orjson.JSONEncodeError as error:
        return (
            _not_utf8(error)
            if "UTF-8" in str(error)
            else RequestError(
                "invalid_request",
                f"This row has a cell that JSON cannot hold ({error}). Use text, numbers, lists or structs.",
            )
        )


def _value(key: str, cell: Any) -> Any:
    """A cell as JSON has it: pandas writes whole numbers beside empty cells as floats, CSV everything as text."""
    if isinstance(cell, float) and cell.is_integer():
        return int(cell)
    if isinstance(cell, str) and key not in _TEXT_CELLS:
        try:
            return orjson.loads(cell)
        except orjson.JSONDecodeError:
            return cell
    return cell


def _not_utf8(error: Exception) -> RequestError:
    return RequestError(
        "invalid_request", f"This row has text that is not valid UTF-8 ({error}). Convert it."
    )
