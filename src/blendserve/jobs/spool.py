"""Request bodies on disk, so that a job of millions of lines that are forwarded does not hold them in memory."""

from __future__ import annotations

import os
import tempfile
import weakref
from array import array
from collections.abc import Sequence
from typing import overload

from blendserve.errors import ConfigError
from blendserve.request import RawRequest


class RequestSpool(Sequence[RawRequest]):
    """Requests in a temporary file that is gone when the process is; grows by `append`, read by index.

    Raises:
        ConfigError: the folder for temporary files is full or cannot be written.
    """

    def __init__(self) -> None:
        try:
            self._file = tempfile.TemporaryFile(prefix="blendserve-", buffering=1 << 20)  # noqa: SIM115
        except OSError as error:
            raise self._failure(error) from error
        weakref.finalize(self, self._file.close)
        self._urls: list[str] = []
        self._url_index = array("B")
        self._ends = array("q", [0])
        self._is_flushed = True

    def append(self, url: str, body: bytes) -> None:
        """Add a request after the last one."""
        if url not in self._urls:
            self._urls.append(url)
        try:
            self._file.write(body)
        except OSError as error:
            raise self._failure(error) from error
        self._url_index.append(self._urls.index(url))
        self._ends.append(self._ends[-1] + len(body))
        self._is_flushed = False

    def __len__(self) -> int:
        return len(self._url_index)

    @overload
    def __getitem__(self, request: int) -> RawRequest: ...
    @overload
    def __getitem__(self, request: slice) -> list[RawRequest]: ...
    def __getitem__(self, request: int | slice) -> RawRequest | list[RawRequest]:
        """A request as it was appended."""
        if isinstance(request, slice):
            return [self[index] for index in range(*request.indices(len(self)))]
        if not 0 <= request < len(self):
            raise IndexError(request)
        if not self._is_flushed:
            try:
                self._file.flush()
            except OSError as error:
                raise self._failure(error) from error
            self._is_flushed = True
        start, end = self._ends[request], self._ends[request + 1]
        return RawRequest(self._urls[self._url_index[request]], self._read(start, end))

    def _read(self, start: int, end: int) -> bytes:
        body = b""
        while len(body) < end - start:  # a read gives at most 2 GiB
            part = os.pread(self._file.fileno(), end - start - len(body), start + len(body))
            assert part, "the temporary file is shorter than what was written to it"
            body += part
        return body

    @staticmethod
    def _failure(error: OSError) -> ConfigError:
        return ConfigError(
            f"cannot keep the requests in {tempfile.gettempdir()}: {error.strerror}; "
            "set TMPDIR to a folder with as much room as the input takes"
        )
