"""Files that are replaced whole, and what lies behind URLs."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from blendserve.errors import ConfigError

HTTP_TIMEOUT_S = 600.0
"""without a byte from a web server"""


def is_url(path: str | Path) -> bool:
    """Whether a path names something that `fsspec` opens."""
    return "://" in str(path)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path`, complete and on the disk, once the block ends; else nothing changes."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
        sync_folder(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def sync_folder(path: Path) -> None:
    """Force onto the disk that `path` exists under its name."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def is_http(path: str | Path) -> bool:
    """Whether a path is a web address, read by GET and written by PUT, for which nothing need be installed."""
    return str(path).startswith(("http://", "https://"))


def open_http(url: str) -> BinaryIO:
    """What is at a web address.

    Raises:
        OSError: it cannot be had.
    """
    opened: BinaryIO = _answer(urllib.request.Request(url))
    return opened


def put_http(url: str, file: BinaryIO) -> None:
    """Send a file, from its begin, to a web address.

    Raises:
        OSError: it was not taken.
    """
    num_bytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    headers = {"Content-Length": str(num_bytes), "Content-Type": "application/octet-stream"}
    request = urllib.request.Request(url, data=file, headers=headers, method="PUT")
    _answer(request).close()


def _answer(request: urllib.request.Request) -> Any:
    try:
        return urllib.request.urlopen(request, timeout=HTTP_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        error.close()
        raise


def filesystem(url: str) -> tuple[Any, str]:
    """The `fsspec` file system of a URL, and the path on it.

    Raises:
        ConfigError: no such storage, or the package for it is missing.
    """
    try:
        import fsspec
    except ImportError as error:
        raise ConfigError(f"{url} needs a package: pip install 'blendserve[files]'") from error
    try:
        storage, path = fsspec.url_to_fs(url)
    except ImportError as error:  # fsspec says which package
        raise ConfigError(f"cannot use {url}: {error}") from error
    except Exception as error:  # drivers raise what they like
        raise ConfigError(
            f"cannot use {url}: {error}; give a local path, or a URL that fsspec opens such as s3://bucket/file"
        ) from error
    return storage, path


def remote_version(url: str) -> str:
    """What the storage says about the version of an object; "" for a web address that does not say.

    Raises:
        ConfigError: it cannot be asked.
    """
    if is_http(url):
        try:
            with _answer(urllib.request.Request(url, method="HEAD")) as answer:
                told = (answer.headers[name] for name in ("ETag", "Last-Modified", "Content-Length"))
                return next(filter(None, told), "")
        except OSError:  # an address that was signed for GET alone
            return ""
    storage, path = filesystem(url)
    try:
        return str(storage.ukey(path))
    except Exception as error:  # drivers raise what they like
        raise ConfigError(f"cannot read the input {url}: {error}") from error
