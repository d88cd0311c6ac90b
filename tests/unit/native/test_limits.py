"""What the machine and its containers grant, read from made-up files."""

from pathlib import Path

import pytest

from blendserve.engines.native import limits


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 8 GB available, and this process in a group within a group."""
    monkeypatch.setattr(limits, "PROC", tmp_path / "proc")
    monkeypatch.setattr(limits, "CGROUPS", tmp_path / "cgroup")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 16000000 kB\nMemAvailable: 8000000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("1:cpu:/old\n0::/outer/inner\n")
    (tmp_path / "cgroup/outer/inner").mkdir(parents=True)
    return tmp_path


def grant(folder: Path, limit: str, used: int, files: int, cpu: str) -> None:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {files}\nactive_file 7\n")
    (folder / "cpu.max").write_text(f"{cpu}\n")


def test_a_machine_without_containers(system: Path) -> None:
    assert limits.available_memory() == 8_000_000 * 1024
    assert limits.core_quota() is None


def test_a_system_that_says_nothing(system: Path) -> None:
    (system / "proc/meminfo").unlink()
    (system / "proc/self/cgroup").unlink()
    assert limits.available_memory() is None
    assert limits.core_quota() is None


def test_the_tightest_limit_on_the_way_out_holds(system: Path) -> None:
    grant(system / "cgroup/outer/inner", "max", 1000, 100, "max 100000")
    assert limits.available_memory() == 8_000_000 * 1024
    assert limits.core_quota() is None
    grant(system / "cgroup/outer", "3000", 1000, 100, "150000 100000")
    assert limits.available_memory() == 2100, "pages of files make room"
    assert limits.core_quota() == 1.5
    grant(system / "cgroup/outer/inner", "900", 1000, 0, "50000 100000")
    assert limits.available_memory() == 0
    assert limits.core_quota() == 0.5
