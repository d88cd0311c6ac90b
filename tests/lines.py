"""Batch lines for the tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from blendserve.jobs.openai_format import LineError, Row, parse_line
from blendserve.jobs.sources import split_lines


def parse_lines(file: BinaryIO, **options: str) -> Iterator[Row | LineError]:
    """Rows of an open file of lines."""
    for line, content in split_lines(iter(lambda: file.read(1 << 20), b"")):
        yield parse_line(line, content, **options)
