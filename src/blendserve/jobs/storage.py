"""Files that are replaced whole, and what lies behind URLs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from blendserve.errors import ConfigError


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
    """What the storage says about the version of an object.

    Raises:
        ConfigError: it cannot be asked.
    """
    storage, path = filesystem(url)
    try:
        return str(storage.ukey(path))
    except Exception as error:  # drivers raise what they like
        raise ConfigError(f"cannot read the input {url}: {error}") from error
