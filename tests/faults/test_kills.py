"""Jobs killed anywhere and run again come to what a job that was not killed comes to: nothing lost, nothing twice."""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import NUM_BAD, NUM_GOOD, Forks, facts, lines_of, whole_lines

KILLS_PER_JOB = 8


@pytest.fixture(scope="module")
def unbroken(forks: Forks, requests: Path, tmp_path_factory: pytest.TempPathFactory) -> set[tuple[Any, ...]]:
    output = tmp_path_factory.mktemp("unbroken") / "out.jsonl"
    done = forks.run(requests, "-o", output)
    assert done.exit == 1, done.log
    found = facts(output)
    assert len(found) == NUM_GOOD + NUM_BAD
    return found


def killed_again_and_again(
    forks: Forks, requests: Path, output: Path, kill: Callable[[int], dict[str, Any]], *options: str
) -> int:
    """Run until the job ends; `kill` says how each run dies. Returns the number of kills; results only grow."""
    num_kills = 0
    while True:
        before = whole_lines(output)
        how = kill(num_kills) if num_kills < KILLS_PER_JOB else {}
        done = forks.run(requests, "-o", output, *options, **how)
        assert whole_lines(output).startswith(before) or "--ordered" in options
        assert set(before.splitlines()) <= set(whole_lines(output).splitlines())
        if not done.was_killed:
            assert done.exit == 1, done.log
            return num_kills
        num_kills += 1


@pytest.mark.parametrize("seed", range(9))
def test_killed_in_the_middle_of_a_write(
    seed: int, forks: Forks, requests: Path, unbroken: set[tuple[Any, ...]], tmp_path: Path
) -> None:
    draw, output = random.Random(seed), tmp_path / "out.jsonl"
    num_kills = killed_again_and_again(
        forks, requests, output, lambda _: {"kill_at_byte": draw.randrange(5000)}, "--flush-interval", "0"
    )
    assert num_kills == KILLS_PER_JOB
    assert facts(output) == unbroken


@pytest.mark.parametrize("options", [(), ("--ordered",)])
def test_killed_before_and_after_every_call_that_changes_a_file(
    options: tuple[str, ...], forks: Forks, requests: Path, unbroken: set[tuple[Any, ...]], tmp_path: Path
) -> None:
    """The first calls of a job and of each resumption, then, of a job with all results, all that are left."""
    num_kills = 0
    for after in (False, True):
        output = tmp_path / f"{after}.jsonl"
        number = 0

        def kill(_: int, after: bool = after) -> dict[str, Any]:
            nonlocal number
            number += 1
            return {"kill_at_call": (number, after)}

        num_kills += killed_again_and_again(forks, requests, output, kill, "--flush-interval", "0", *options)
        for number in range(1, 12):  # a job of results only: what finishing does
            if not forks.run(requests, "-o", output, *options, kill_at_call=(number, after)).was_killed:
                break
            num_kills += 1
        assert forks.run(requests, "-o", output, *options).exit == 1
        assert facts(output) == unbroken
        if options:
            ids = [int(result["custom_id"].removeprefix("good-")) for result in lines_of(output)]
            assert ids == sorted(ids)
    assert num_kills >= 2 * KILLS_PER_JOB


def test_killed_while_failed_lines_are_put_among_the_results(
    forks: Forks, requests: Path, tmp_path: Path
) -> None:
    options = ("--errors-in-output", "--flush-interval", "0")
    whole = tmp_path / "whole.jsonl"
    assert forks.run(requests, "-o", whole, *options).exit == 1

    def outcomes(output: Path) -> list[tuple[Any, ...]]:
        lines = lines_of(output)
        return [(line["custom_id"], line["response"]["status_code"], line["error"]) for line in lines]

    assert len(outcomes(whole)) == NUM_GOOD + NUM_BAD
    num_kills = 0
    for after in (False, True):
        output = tmp_path / f"{after}.jsonl"
        assert forks.run(requests, "-o", output, *options).exit == 1
        output.unlink()
        for number in range(1, 12):  # a job of results only: what finishing does
            if not forks.run(requests, "-o", output, *options, kill_at_call=(number, after)).was_killed:
                break
            num_kills += 1
            assert not output.exists() or outcomes(output) == outcomes(whole), "half of it was there"
        assert forks.run(requests, "-o", output, *options).exit == 1
        assert outcomes(output) == outcomes(whole)
    assert num_kills >= 6


@pytest.mark.parametrize("seed", range(4))
def test_killed_at_any_time(
    seed: int, forks: Forks, requests: Path, unbroken: set[tuple[Any, ...]], tmp_path: Path
) -> None:
    draw, output = random.Random(seed), tmp_path / "out.jsonl"
    started_s = time.perf_counter()
    forks.run(requests, "-o", tmp_path / "timed.jsonl")
    job_s = time.perf_counter() - started_s
    killed_again_and_again(
        forks, requests, output, lambda _: {"kill_after_s": draw.uniform(0.0, job_s)}, "--flush-interval", "0"
    )
    assert facts(output) == unbroken


def test_killed_while_the_native_engine_runs(forks: Forks, requests: Path, tmp_path: Path) -> None:
    options = ("--dtype", "float32", "--max-num-seqs", "8", "--num-threads", "1")
    here, apart = (*options, "--no-engine-process"), (*options, "--engine-process")
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    forks.warm_up(requests, "-o", tmp_path / "warm.jsonl", *here, engine="native")
    done = forks.run(requests, "-o", whole, *here, engine="native")
    assert done.exit == 1, done.log
    size, num_kills, draw = whole.stat().st_size, 0, random.Random(0)
    while True:
        before = whole_lines(output)
        how = {"kill_at_byte": draw.randrange(size // 12)} if num_kills < 12 else {}
        place = apart if num_kills % 6 == 1 else here  # a process of its own takes seconds to start
        done = forks.run(requests, "-o", output, *place, engine="native", **how)
        assert whole_lines(output).startswith(before)
        if not done.was_killed:
            break
        num_kills += 1
    assert done.exit == 1, done.log
    assert num_kills >= 10
    assert facts(output, with_text=True) == facts(whole, with_text=True)
