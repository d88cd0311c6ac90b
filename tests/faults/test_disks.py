"""Disks that are full, folders that are read-only, files that are in use: said clearly, and nothing there is lost."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import blendserve
from blendserve.jobs.store import ResultStore
from tests.faults.conftest import Forks, facts, lines_of, whole_lines


def mount(folder: Path, options: str) -> None:
    """Mount memory at `folder`; only root may, and not in every container."""
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 24 KiB, two thirds of what the results need."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount(folder, "size=24k")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_ends_the_job_and_space_finishes_it(
    forks: Forks, requests: Path, disk: Path, tmp_path: Path
) -> None:
    output = disk / "out.jsonl"
    for _ in range(2):  # again without space: still nothing is lost
        done = forks.run(requests, "-o", output)
        assert done.exit == 2, done.log
        assert "No space left on device" in done.log
        assert "run the same command again" in done.log
        assert "Traceback" not in done.log
    kept = lines_of(output)
    assert kept
    subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
    assert forks.run(requests, "-o", output).exit == 1
    whole = tmp_path / "whole.jsonl"
    forks.run(requests, "-o", whole)
    assert lines_of(output)[: len(kept)] == kept
    assert facts(output) == facts(whole)


def test_a_limit_on_the_size_of_files_is_as_a_full_disk(forks: Forks, requests: Path, tmp_path: Path) -> None:
    output, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    for num_bytes in (7_000, 15_000):
        done = forks.run(requests, "-o", output, max_file_bytes=num_bytes)
        assert done.exit == 2, done.log
        assert "File too large" in done.log
        assert num_bytes - 600 < output.stat().st_size <= num_bytes
        lines_of(output)
    assert forks.run(requests, "-o", output).exit == 1
    forks.run(requests, "-o", whole)
    assert facts(output) == facts(whole)


def test_no_space_for_the_sorted_or_the_compressed_file_loses_no_result(
    forks: Forks, requests: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    assert forks.run(requests, "-o", output).exit == 1
    before = output.read_bytes()
    for name, options in (("out.jsonl", ["--ordered"]), ("out.jsonl.gz", [])):
        done = forks.run(requests, "-o", tmp_path / name, *options, max_file_bytes=2_500)
        assert done.exit == 2, done.log
        assert "File too large" in done.log
        assert "all results are in" in done.log
        assert output.read_bytes() == before
        assert not list(tmp_path.glob("*.tmp"))
        assert not (tmp_path / "out.jsonl.gz").exists()


def test_a_read_only_disk(forks: Forks, requests: Path, disk: Path) -> None:
    output = disk / "out.jsonl"
    forks.run(requests, "-o", output)
    before = {path.name: path.read_bytes() for path in disk.iterdir()}
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    for name in ("out.jsonl", "other.jsonl"):
        done = forks.run(requests, "-o", disk / name)
        assert done.exit == 2, done.log
        assert "Read-only file system" in done.log
        assert "choose another file" in done.log
    assert {path.name: path.read_bytes() for path in disk.iterdir()} == before


def test_a_folder_without_write_permission(forks: Forks, requests: Path, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    folder = tmp_path / "folder"
    folder.mkdir()
    output = folder / "out.jsonl"
    output.touch()
    folder.chmod(0o555)
    for name in ("out.jsonl", "other.jsonl"):
        done = forks.run(requests, "-o", folder / name)
        assert done.exit == 2, done.log
        assert "cannot write" in done.log
    assert output.read_bytes() == b""
    folder.chmod(0o755)


def test_a_file_that_another_job_writes(forks: Forks, requests: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    forks.run(requests, "-o", output, kill_at_byte=9_000)
    before = output.read_bytes()
    with ResultStore(output, model="simulated/tiny"):
        for options in ((), ("--restart",)):
            done = forks.run(requests, "-o", output, *options)
            assert done.exit == 2, done.log
            assert "in use by another job" in done.log
    assert output.read_bytes() == before


def test_a_job_that_differs_is_refused_with_what_differs(
    forks: Forks, requests: Path, tmp_path: Path
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    shutil.copy(requests, source)
    forks.run(source, "-o", output, kill_at_byte=9_000)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for options, difference in (
        (("--seed", "3"), "seed: 0 earlier, 3 now"),
        (("--max-model-len", "100"), "max_model_len: None earlier, 100 now"),
    ):
        done = forks.run(source, "-o", output, *options)
        assert done.exit == 2, done.log
        assert difference in done.log
        assert "--restart" in done.log
        assert "--continue-anyway" in done.log
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    done = forks.run(source, "-o", output, engine="native")
    assert "engine: simulated earlier, native now" in done.log
    assert "model: simulated/tiny earlier, tiny now" in done.log

    kept = whole_lines(output)
    assert forks.run(source, "-o", output, "--seed", "3", "--continue-anyway").exit == 1
    assert output.read_bytes().startswith(kept)
    assert "seed: 3 earlier, 0 now" in forks.run(source, "-o", output).log
    assert forks.run(source, "-o", output, "--restart").exit == 1
    assert not output.read_bytes().startswith(kept)


def test_an_input_that_changed_is_refused_and_one_that_grew_is_not(
    forks: Forks, requests: Path, tmp_path: Path
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = requests.read_bytes().splitlines(keepends=True)
    source.write_bytes(b"".join(lines[:20]))
    assert forks.run(source, "-o", output).exit == 1
    first = output.read_bytes()
    source.write_bytes(b"".join(lines))
    assert forks.run(source, "-o", output).exit == 1
    assert output.read_bytes().startswith(first)
    assert len(facts(output)) == len(lines)
    complete = output.read_bytes()
    for content in (
        b"".join(lines[1:]),
        b"".join(lines[:-1]),
        b"".join(lines).replace(b"chapter 3", b"chapter 4"),
    ):
        source.write_bytes(content)
        done = forks.run(source, "-o", output)
        assert done.exit == 2, done.log
        assert "in.jsonl: not the input of the earlier run" in done.log
        assert output.read_bytes() == complete


def test_results_without_their_signature(forks: Forks, requests: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    forks.run(requests, "-o", output, kill_at_byte=9_000)
    (tmp_path / "out.job.json").unlink()
    done = forks.run(requests, "-o", output)
    assert done.exit == 2, done.log
    assert "out.job.json" in done.log
    assert forks.run(requests, "-o", output, "--continue-anyway").exit == 1
    assert len(facts(output)) == len(requests.read_bytes().splitlines())
    output.unlink()  # who removes the results starts over
    assert forks.run(requests, "-o", output, "--seed", "3").exit == 1


def test_an_error_file_torn_in_the_middle(forks: Forks, requests: Path, tmp_path: Path) -> None:
    output, errors = tmp_path / "out.jsonl", tmp_path / "out.errors.jsonl"
    forks.run(requests, "-o", output, kill_at_byte=700)
    assert not output.read_bytes()
    assert not errors.read_bytes().endswith(b"\n")
    assert forks.run(requests, "-o", output).exit == 1
    assert len(facts(output)) == len(requests.read_bytes().splitlines())


def test_nowhere_to_cache(requests: Path, tmp_path: Path) -> None:
    """A container whose packages and home are read-only: it starts, and says where the model could be put."""
    source = Path(blendserve.__file__).parent
    script = f'mount --bind "{source}" "{source}" && mount -o remount,ro,bind "{source}" && exec "$@"'
    unshared = ["unshare", "--mount", "sh", "-c", script, "sh"]
    if shutil.which("unshare") is None or subprocess.run([*unshared, "true"], check=False).returncode != 0:
        pytest.skip("needs the right to mount")
    nowhere = {"HOME": "/proc/nowhere", "XDG_CACHE_HOME": "/proc/nowhere", "NUMBA_CACHE_DIR": "/proc/nowhere"}
    env = {name: value for name, value in os.environ.items() if name != "BLENDSERVE_CACHE"}
    output = tmp_path / "out.jsonl"
    done = subprocess.run(
        [*unshared, sys.executable, "-m", "blendserve.cli", "run", str(requests), "-o", str(output)],
        env=env | nowhere | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "set BLENDSERVE_CACHE to a folder that can be written" in done.stderr
    assert (tmp_path / f"blendserve-numba-{os.geteuid()}").is_dir()
