"""Offline LLM inference with resource-aware batching."""

import logging
import os
import stat
import tempfile
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blendserve.llm import LLM
    from blendserve.outputs import CompletionOutput, RequestOutput
    from blendserve.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]

# Events are for whoever asks for them (`run --log-file`), not for stderr.
logging.getLogger(__name__).addHandler(logging.NullHandler())


def _can_write_in(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _find_numba_a_cache() -> None:
    """Numba refuses to import a function that it cannot cache, as where package and home are both read-only."""
    given, xdg = os.environ.get("NUMBA_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    candidates = [Path(given)] if given else []
    candidates += [
        Path(__file__).parent / "__pycache__",
        Path(xdg or os.path.expanduser("~/.cache")) / "numba",
    ]
    if any(map(_can_write_in, candidates)):
        return
    folder = Path(tempfile.gettempdir()) / f"blendserve-numba-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        owned = folder.lstat()
    except OSError:
        return
    # What lies there is run: nobody else may have put it there.
    if stat.S_ISDIR(owned.st_mode) and owned.st_uid == os.geteuid() and not owned.st_mode & 0o077:
        os.environ["NUMBA_CACHE_DIR"] = str(folder)
    else:
        os.environ["NUMBA_CACHE_DIR"] = tempfile.mkdtemp(prefix="blendserve-numba-")


_find_numba_a_cache()

_MODULE_OF = {
    "LLM": "llm",
    "SamplingParams": "sampling_params",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
}


def __getattr__(name: str) -> Any:
    """Load what the package offers on first use; importing it loads nothing heavy."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
