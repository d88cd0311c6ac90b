import numpy as np
import pytest

from blendserve.planner.length_curves import LengthCurves, age_index

NOBODY = np.empty(0, dtype=np.int32)


def curves_of(lengths: np.ndarray, cap: int = 65_536) -> LengthCurves:
    curves = LengthCurves(np.array([cap]))
    curves.finished(np.zeros(len(lengths), dtype=np.int32), lengths.astype(np.int32))
    curves.refresh(NOBODY, NOBODY)
    return curves


def test_with_nothing_known_lengths_are_spread_evenly_in_log_scale_up_to_the_cap() -> None:
    curves = LengthCurves(np.array([1000]))
    assert curves.tables.left[0, 0] == pytest.approx(1000 / np.log(1000), rel=0.15)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 100, 5000])
def test_equal_lengths_are_learnt(length: int) -> None:
    curves = curves_of(np.full(500, length))
    assert curves.tables.left[0, 0] == pytest.approx(length, rel=0.12, abs=0.05)


def test_mean_and_square_of_spread_lengths() -> None:
    lengths = np.random.default_rng(0).lognormal(5.0, 1.0, 20_000).clip(1, 60_000).astype(np.int64)
    curves = curves_of(lengths)
    assert curves.tables.left[0, 0] == pytest.approx(lengths.mean(), rel=0.03)
    assert curves.tables.left_squared[0, 0] == pytest.approx((lengths.astype(float) ** 2).mean(), rel=0.08)


def test_what_still_runs_is_evidence_of_long_outputs() -> None:
    """Twenty have finished early, eighty are at 1000 tokens: the mean of those that finished would be 50."""
    curves = curves_of(np.full(20, 50), cap=4000)
    classes, ages = np.zeros(80, dtype=np.int32), np.full(80, 1000, dtype=np.int32)
    curves.refresh(classes, ages)
    assert curves.tables.left[0, 0] > 800


def test_the_longer_it_has_run_the_longer_it_goes_on_where_lengths_vary_much() -> None:
    lengths = np.random.default_rng(1).lognormal(5.0, 1.5, 20_000).clip(1, 60_000).astype(np.int64)
    tables = curves_of(lengths).tables
    for age in (50, 200, 1000):
        longer = lengths[lengths > age]
        assert tables.left[0, age_index(age)] == pytest.approx((longer - age).mean(), rel=0.15)


def test_probabilities_to_be_alive_fall_from_one() -> None:
    lengths = np.random.default_rng(2).lognormal(6.0, 1.0, 2000).clip(1, 60_000).astype(np.int64)
    alive = curves_of(lengths).tables.alive[0]
    assert (alive[:, 0] == 1.0).all()
    assert (np.diff(alive, axis=1) <= 1e-12).all()
    assert (alive >= 0.0).all()


def test_nothing_outlives_the_cap_of_its_class() -> None:
    curves = LengthCurves(np.array([100, 10_000]))
    tables = curves.tables
    beyond = tables.points > 130
    assert (tables.alive[0, 0, beyond] == 0.0).all()
    assert tables.alive[1, 0, beyond].max() > 0.3
