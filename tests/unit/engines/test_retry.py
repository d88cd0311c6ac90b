import pytest

from blendserve.engines.retry import Backoff


def test_waits_grow_are_bounded_and_end() -> None:
    longest = [0.0] * 5
    for seed in range(300):
        backoff = Backoff(base_s=1.0, factor=2.0, max_s=6.0, max_attempts=6, seed=seed)
        waits = [backoff.delay_s(attempt) for attempt in range(1, 7)]
        assert waits[5] is None
        for index, wait_s in enumerate(waits[:5]):
            assert wait_s is not None
            assert 0.0 <= wait_s <= min(2.0**index, 6.0)
            longest[index] = max(longest[index], wait_s)
    assert longest == pytest.approx([1.0, 2.0, 4.0, 6.0, 6.0], rel=0.05)


def test_the_jitter_is_that_of_the_seed() -> None:
    assert Backoff(seed=1).delay_s(3) == Backoff(seed=1).delay_s(3) != Backoff(seed=2).delay_s(3)


def test_the_server_is_believed_within_reason() -> None:
    backoff = Backoff(base_s=0.5, max_s=60.0, max_attempts=3, seed=0)
    wait_s = backoff.delay_s(1, retry_after_s=10.0)
    assert wait_s is not None
    assert 10.0 <= wait_s <= 10.5
    patient = backoff.delay_s(2, retry_after_s=86400.0)
    assert patient is not None
    assert patient <= 61.0
    assert backoff.delay_s(3, retry_after_s=10.0) is None


def test_a_great_many_attempts_overflow_nothing() -> None:
    wait_s = Backoff(max_attempts=10**6, max_s=60.0, seed=0).delay_s(99_999)
    assert wait_s is not None
    assert wait_s <= 60.0
