"""What every command prints with."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import orjson
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from blendserve.errors import BlendServeError

if TYPE_CHECKING:
    from blendserve.report import Table as TextTable

EXIT_OK, EXIT_SOME_FAILED, EXIT_CANNOT_RUN, EXIT_OUT_OF_TIME, EXIT_INTERRUPTED = 0, 1, 2, 3, 130


def _stderr() -> Console:
    return Console(
        stderr=True,
        highlight=False,
        soft_wrap=True,
        # A log file has no width; tables must not be cut to that of an old terminal.
        width=None if sys.stderr.isatty() else 160,
    )


console = _stderr()
"""what `--quiet` leaves out"""
essential = _stderr()
"""errors, progress that was asked for, and the last summary"""


@contextmanager
def reported_errors() -> Iterator[None]:
    """Errors of ours and Ctrl-C as a line and an exit code."""
    try:
        yield
    except BlendServeError as error:
        fail(str(error), EXIT_CANNOT_RUN)
    except KeyboardInterrupt:
        fail("interrupted; what is finished is kept, run the same command again to go on", EXIT_INTERRUPTED)


def fail(message: str, code: int) -> NoReturn:
    """Print why, and exit."""
    essential.print(Text.assemble(("error: " if code == EXIT_CANNOT_RUN else "", "bold red"), message))
    raise typer.Exit(code)


def print_table(title: str, shown: TextTable) -> None:
    """Print a table as wide as it is."""
    text = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in shown.headings:
        text.add_column(heading, no_wrap=True)
    for cells in shown.rows:
        text.add_row(*cells)
    console.print(text)


def print_json(document: dict[str, Any]) -> None:
    """The one document of `--json`, on standard output."""
    sys.stdout.buffer.write(
        orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
    )
    sys.stdout.flush()
