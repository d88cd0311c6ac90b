"""What this process may take of the machine: memory and cores, within the limits of its container (cgroup v2)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")


def available_memory() -> int | None:
    """Bytes that can be taken before the system swaps or kills; None where it does not say."""
    lines = _read(PROC / "meminfo").splitlines()
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    for folder in _cgroups():
        limit, used = _read(folder / "memory.max").strip(), _read(folder / "memory.current").strip()
        if limit.isdecimal() and used.isdecimal():
            fields = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
            # Pages of files are counted as used, but given up when memory is wanted.
            found.append(int(limit) - int(used) + int(fields.get("inactive_file", 0)))
    return max(0, min(found)) if found else None


def core_quota() -> float | None:
    """Cores' worth of time that the container grants, which may be more threads than cores; None: no limit."""
    quotas = []
    for folder in _cgroups():
        quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
        if quota.isdecimal() and period.isdecimal():
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _cgroups() -> Iterator[Path]:
    """Folders of the groups that this process is in, from its own to the outermost; limits hold in all of them."""
    line = next((line for line in _read(PROC / "self/cgroup").splitlines() if line.startswith("0::/")), None)
    if line is not None:
        folder = CGROUPS / line.removeprefix("0::/")
        yield folder
        while folder != CGROUPS:
            folder = folder.parent
            yield folder


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
