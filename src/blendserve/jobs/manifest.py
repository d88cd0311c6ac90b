"""The signature of a job, kept beside its results: which input, model and parameters they are of.

`out.jsonl` has `out.job.json`. A run whose signature differs must not add to the results, as they would be of two
jobs. An input that only grew is the same job with more lines.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from blendserve.errors import ConfigError
from blendserve.jobs.storage import is_url, remote_version, replacing

FORMAT_VERSION = 1
"""of results; raise it when results of an older version must not be continued"""

_CHUNK_BYTES = 1 << 20
_MODEL_SUFFIXES = {".json", ".safetensors", ".jinja", ".model", ".txt"}


def manifest_path(output: str | Path) -> Path:
    """The signature file beside an output file: `out.jsonl` has `out.job.json`."""
    path = Path(output)
    return path.with_name(f"{path.stem}.job.json")


_SHAPE = {"inputs": list, "parameters": dict}


class StreamDigest:
    """Digest of bytes as they pass, and of the first `checkpoint` of them."""

    def __init__(self, checkpoint: int | None = None) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self.checkpoint = checkpoint
        self.at_checkpoint: str | None = self._hash.hexdigest() if checkpoint == 0 else None
        """None until so many bytes were seen"""
        self.num_bytes = 0

    def update(self, chunk: bytes | memoryview) -> None:
        """Take note of the next bytes."""
        if self.checkpoint is not None and 0 < self.checkpoint - self.num_bytes <= len(chunk):
            split = self.checkpoint - self.num_bytes
            self._hash.update(chunk[:split])
            self.at_checkpoint = self._hash.hexdigest()
            self._hash.update(chunk[split:])
        else:
            self._hash.update(chunk)
        self.num_bytes += len(chunk)

    def read_all(self, file: BinaryIO) -> None:
        """Take note of a whole file."""
        while chunk := file.read(_CHUNK_BYTES):
            self.update(chunk)

    @property
    def hexdigest(self) -> str:
        """Of all bytes so far."""
        return self._hash.hexdigest()


class _HashedStream(io.RawIOBase):
    """Bytes of another stream, digested on the way."""

    def __init__(self, source: BinaryIO, digest: StreamDigest) -> None:
        self._source = source
        self._digest = digest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        chunk = self._source.read1(len(view))  # type: ignore[attr-defined]
        view[: len(chunk)] = chunk
        self._digest.update(chunk)
        return len(chunk)


@contextmanager
def digested_stdin() -> Iterator[StreamDigest]:
    """Standard input as it is read inside, digested; read once, it cannot be digested beforehand."""
    digest, before = StreamDigest(), sys.stdin
    sys.stdin = io.TextIOWrapper(io.BufferedReader(_HashedStream(before.buffer, digest), _CHUNK_BYTES))
    try:
        yield digest
    finally:
        sys.stdin.detach()
        sys.stdin = before


@dataclass(frozen=True, slots=True)
class JobSignature:
    """What a run is of: compared with that of an earlier run, and kept for a later one."""

    inputs: Sequence[str]
    """files, URLs, `-` for standard input"""
    model: str
    model_digest: str
    parameters: dict[str, Any]
    """options that change results"""
    stdin: StreamDigest | None = None
    """of standard input, complete once that was read"""


class Manifest:
    """The signature file of an output.

    Raises:
        ConfigError: the file there is not a signature.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.earlier: dict[str, Any] | None = None
        """the signature of the run before; None where there was none"""
        self._current: dict[str, Any] = {}
        self._earlier_stdin_digest: str | None = None
        try:
            earlier = orjson.loads(path.read_bytes())
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}; make it readable") from error
        except orjson.JSONDecodeError:
            earlier = None
        if not isinstance(earlier, dict) or any(type(earlier.get(k)) is not v for k, v in _SHAPE.items()):
            raise ConfigError(
                f"{path} is not the signature of a job; choose another output file, or remove that one"
            )
        self.earlier = earlier

    def compare(self, signature: JobSignature) -> list[str]:
        """What differs from the earlier run, a line each. Standard input is left for `compare_stdin`.

        Raises:
            ConfigError: an input cannot be read.
        """
        earlier = self.earlier or {"inputs": [], "parameters": {}}
        entries = {entry["name"]: entry for entry in earlier["inputs"]}
        if len(entries) == len(signature.inputs) == 1:  # a single input may have been moved
            entries = dict(zip(signature.inputs, entries.values(), strict=True))
        differences, inputs = [], []
        for name in signature.inputs:
            entry = entries.pop(name, None)
            if name == "-":
                current: dict[str, Any] = {"name": name}
                if entry is not None and signature.stdin is not None:
                    signature.stdin.checkpoint = entry.get("num_bytes")
                    self._earlier_stdin_digest = entry.get("digest")
            else:
                current, is_kept = _digested(name, entry)
                if not is_kept:
                    differences.append(
                        f"{name}: not the input of the earlier run, nor that with lines added at its end"
                    )
            inputs.append(current)
        self._current = {
            "format_version": FORMAT_VERSION,
            "model": signature.model,
            "model_digest": signature.model_digest,
            "parameters": signature.parameters,
            "inputs": inputs,
        }
        if self.earlier is None:
            return []
        differences += [f"{name}: an input of the earlier run, missing now" for name in entries]
        for name in ("format_version", "model"):
            if earlier.get(name) != self._current[name]:
                differences.append(f"{name}: {earlier.get(name)} earlier, {self._current[name]} now")
        if earlier.get("model_digest") != signature.model_digest:
            differences.append("model files: not those of the earlier run")
        before, now = earlier["parameters"], signature.parameters
        for name in before | now:
            if before.get(name) != now.get(name):
                differences.append(f"{name}: {before.get(name)} earlier, {now.get(name)} now")
        return differences

    def compare_stdin(self, digest: StreamDigest) -> list[str]:
        """As `compare`, for standard input once it was read as far as it is needed."""
        checkpoint = digest.checkpoint or 0
        while digest.num_bytes < checkpoint and sys.stdin.buffer.read(_CHUNK_BYTES):
            pass  # a limit on lines may have left some unread
        entry = next(entry for entry in self._current["inputs"] if entry["name"] == "-")
        entry |= {"num_bytes": digest.num_bytes, "digest": digest.hexdigest}
        if digest.checkpoint is None or digest.at_checkpoint == self._earlier_stdin_digest:
            return []
        return ["standard input: not that of the earlier run, nor that with lines added at its end"]

    def save(self) -> None:
        """Write the current signature, all or nothing.

        Raises:
            OSError: the disk does not take it; an earlier signature is intact.
        """
        if self._current != self.earlier:
            content = orjson.dumps(self._current, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
            with replacing(self.path) as file:
                file.write(content)
            self.earlier = self._current


def _digested(name: str, earlier: dict[str, Any] | None) -> tuple[dict[str, Any], bool]:
    """What is kept of an input, and whether it is the earlier one, grown or not."""
    if is_url(name):
        version = remote_version(name)
        return {"name": name, "version": version}, earlier is None or earlier.get("version") == version
    try:
        with open(name, "rb", opener=_open_regular) as file:
            digest = StreamDigest(earlier.get("num_bytes") if earlier else None)
            digest.read_all(file)
    except _NotRegularError:  # a pipe can be read only once
        return {"name": name}, True
    except OSError as error:
        raise ConfigError(
            f"cannot read the input {name}: {error.strerror}; give a readable JSONL file"
        ) from error
    current: dict[str, Any] = {"name": name, "num_bytes": digest.num_bytes, "digest": digest.hexdigest}
    is_kept = earlier is None or digest.checkpoint is None or digest.at_checkpoint == earlier["digest"]
    return current, is_kept


class _NotRegularError(Exception):
    pass


def _open_regular(path: str, flags: int) -> int:
    if os.path.exists(path) and not stat.S_ISREG(os.stat(path).st_mode):
        raise _NotRegularError
    return os.open(path, flags)


def digest_of_model(folder: Path) -> str:
    """Identity of a model's files: their names, sizes, and of each its head, middle and tail."""
    total = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.iterdir()):
        if path.suffix in _MODEL_SUFFIXES and path.is_file():
            num_bytes = path.stat().st_size
            total.update(f"{path.name}:{num_bytes}:".encode())
            with path.open("rb") as file:
                for start in sorted({0, num_bytes // 2, max(num_bytes - _CHUNK_BYTES, 0)}):
                    file.seek(start)
                    total.update(file.read(_CHUNK_BYTES))
    return total.hexdigest()
