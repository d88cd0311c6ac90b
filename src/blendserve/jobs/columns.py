"""What a job keeps of its lines, as columns: millions of them must not live as Python objects."""

from __future__ import annotations

import tempfile
import weakref
from array import array
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
import orjson
from numpy.typing import NDArray

from blendserve.errors import BlendServeError
from blendserve.jobs.openai_format import LineError, PreparedRow

_SPOOL_BYTES = 32 << 20
"""errors beyond this are in a temporary file"""


class CustomIds:
    """A growing set of custom_ids, each with its number in the order of arrival; some 40 bytes each and its text.

    ```
    slots[hash & mask] = number + 1 ──▶ hashes[number], starts[number] ──▶ text      0: free; taken: the next slot
    ```
    """

    def __init__(self) -> None:
        self._text = bytearray()
        self._starts = array("q", [0])
        self._hashes = array("q")
        self._slots = array("i", bytes(4 * 1024))
        self._mask = 1023

    def __len__(self) -> int:
        return len(self._hashes)

    def __getitem__(self, number: int) -> str:
        return self._text[self._starts[number] : self._starts[number + 1]].decode()

    def __iter__(self) -> Iterator[str]:
        return (self[number] for number in range(len(self)))

    def __contains__(self, custom_id: object) -> bool:
        return isinstance(custom_id, str) and self._slots[self._find(custom_id)] != 0

    def add(self, custom_id: str) -> int:
        """Number of an id: the next one, `len` before the call, where the id is new."""
        slot = self._find(custom_id)
        if number := self._slots[slot]:
            return number - 1
        self._hashes.append(hash(custom_id))
        self._text += custom_id.encode()
        self._starts.append(len(self._text))
        self._slots[slot] = len(self._hashes)
        if 3 * len(self._hashes) > 2 * len(self._slots):
            self._grow()
        return len(self._hashes) - 1

    def _find(self, custom_id: str) -> int:
        """The slot of an id, or the free one where it belongs."""
        key = hash(custom_id)
        slot = key & self._mask
        while number := self._slots[slot]:
            if self._hashes[number - 1] == key and self[number - 1] == custom_id:
                break
            slot = (slot + 1) & self._mask
        return slot

    def _grow(self) -> None:
        """Twice the slots. All at once: what lost its slot to another id tries the next one."""
        slots = np.zeros(2 * len(self._slots), dtype=np.int32)
        self._mask = len(slots) - 1
        hashes = np.array(self._hashes, dtype=np.int64)
        numbers = np.arange(1, len(hashes) + 1, dtype=np.int32)
        wanted = hashes & self._mask
        while len(numbers):
            is_free = slots[wanted] == 0
            slots[wanted[is_free]] = numbers[is_free]
            is_lost = slots[wanted] != numbers
            numbers, wanted = numbers[is_lost], (wanted[is_lost] + 1) & self._mask
        self._slots = array("i", slots.tobytes())


class RowTable(Sequence[PreparedRow]):
    """The rows of a job.

    Args:
        custom_ids: all of the job.
        id_number: [num_rows] int32, which of them is a row's.
        line: [num_rows] int64.
        file: [num_rows] int32 index into `files`.
        url: [num_rows] uint8 index into `urls`.
        n: [num_rows] uint8.
    """

    def __init__(
        self,
        custom_ids: CustomIds,
        id_number: NDArray[np.int32],
        line: NDArray[np.int64],
        file: NDArray[np.int32],
        url: NDArray[np.uint8],
        n: NDArray[np.uint8],
        *,
        files: Sequence[str | None],
        urls: Sequence[str],
    ) -> None:
        self._custom_ids = custom_ids
        self._id_number = id_number
        self._line = line
        self._file = file
        self._url = url
        self._n = n
        self._files = files
        self._urls = urls

    def __len__(self) -> int:
        return len(self._id_number)

    @overload
    def __getitem__(self, row: int) -> PreparedRow: ...
    @overload
    def __getitem__(self, row: slice) -> list[PreparedRow]: ...
    def __getitem__(self, row: int | slice) -> PreparedRow | list[PreparedRow]:
        if isinstance(row, slice):
            return [self[each] for each in range(*row.indices(len(self)))]
        return PreparedRow(
            int(self._line[row]),
            self._custom_ids[self._id_number[row]],
            self._urls[self._url[row]],
            int(self._n[row]),
            self._files[self._file[row]],
        )


class LineErrors(Sequence[LineError]):
    """The lines that cannot run; beyond some tens of megabytes they wait on disk."""

    def __init__(self) -> None:
        self._spool = tempfile.SpooledTemporaryFile(_SPOOL_BYTES)  # noqa: SIM115 - lives as long as this
        self._ends = array("q", [0])
        weakref.finalize(self, self._spool.close)

    def append(self, error: LineError) -> None:
        """Keep one more.

        Raises:
            BlendServeError: the temporary file cannot be written.
        """
        text = orjson.dumps(
            (
                *(error.line, error.custom_id, error.code, error.message),
                *(error.param, error.status_code, error.file),
            )
        )
        try:
            self._spool.seek(self._ends[-1])
            self._spool.write(text)
        except OSError as problem:
            raise BlendServeError(
                f"cannot keep the errors of the input in {tempfile.gettempdir()}: {problem.strerror}; "
                "name a folder with more room by the variable TMPDIR"
            ) from problem
        self._ends.append(self._ends[-1] + len(text))

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> LineError: ...
    @overload
    def __getitem__(self, index: slice) -> list[LineError]: ...
    def __getitem__(self, index: int | slice) -> LineError | list[LineError]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        self._spool.seek(self._ends[place])
        return LineError(*orjson.loads(self._spool.read(self._ends[place + 1] - self._ends[place])))
