import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from blendserve.planner.declared_lengths import ALIVE, SQUARE, TOKENS, VALUE, DeclaredLengths, first_end

NOBODY = np.empty(0, dtype=np.int32)
MOST = 60_000


def lengths_of(count: int, sigma: float, seed: int = 0, typical: float = 1000.0) -> NDArray[np.float64]:
    lengths = typical * np.exp(np.random.default_rng(seed).normal(0.0, sigma, count))
    return np.round(lengths.clip(1, MOST))


def learnt(
    declared: NDArray[np.float64],
    actual: NDArray[np.float64],
    num_finished: int,
    classes: NDArray[np.int32] | None = None,
) -> DeclaredLengths:
    """After the first `num_finished` have finished."""
    count = len(declared)
    kinds = np.zeros(count, dtype=np.int32) if classes is None else classes
    lengths = DeclaredLengths(kinds, np.maximum(declared, 1).astype(np.int32))
    lengths.finished(np.arange(num_finished, dtype=np.int32), actual[:num_finished].astype(np.int32))
    lengths.weigh()
    lengths.refresh(NOBODY, NOBODY)
    return lengths


def expected(lengths: DeclaredLengths) -> NDArray[np.float64]:
    return np.asarray(lengths.hint * lengths.mean[0])


def test_with_nothing_known_declared_lengths_are_believed() -> None:
    declared = lengths_of(50, 0.5)
    assert expected(learnt(declared, declared, 0)) == pytest.approx(declared, rel=0.01)


def test_exact_declarations_stay_exact() -> None:
    actual = lengths_of(3000, 0.8)
    lengths = learnt(actual, actual, 2000)
    assert lengths.hint == pytest.approx(actual)
    assert lengths.mean[0] == pytest.approx(1.0, abs=1e-4)
    assert lengths.variation[0] < 0.02


@pytest.mark.parametrize("factor", [0.5, 2.0, 10.0])
def test_a_bias_is_learnt_away(factor: float) -> None:
    actual = lengths_of(400, 0.8, typical=500)
    lengths = learnt(np.round(actual * factor), actual, 200)
    assert expected(lengths)[200:] == pytest.approx(actual[200:], rel=0.1)


def test_a_default_is_forgotten_once_lengths_vary() -> None:
    actual = lengths_of(400, 0.8)
    assert (learnt(np.full(400, float(MOST)), actual, 4).hint == MOST).all()
    assert (learnt(np.full(400, float(MOST)), actual, 40).hint == 0).all()


def test_a_length_that_is_the_same_for_all_is_kept_where_it_is_right() -> None:
    """Another class of the job errs; that says nothing about this one."""
    classes = (np.arange(400) % 2).astype(np.int32)
    declared = np.where(classes == 0, 700.0, lengths_of(400, 0.8, seed=1))
    actual = np.where(classes == 0, 700.0, lengths_of(400, 0.8, seed=2))
    lengths = learnt(declared, actual, 100, classes)
    assert (lengths.hint[classes == 0] == 700).all()
    assert lengths.mean[0] == pytest.approx(1.0, abs=0.01)


def test_declared_lengths_that_have_nothing_to_do_with_actual_ones_are_forgotten() -> None:
    actual = lengths_of(2000, 1.3)
    lengths = learnt(np.random.default_rng(1).permutation(actual), actual, 1500)
    assert (lengths.hint == 0).all()


@pytest.mark.parametrize(("error", "exponent"), [(0.5, 0.5), (1.0, 0.2)])
def test_the_more_declarations_err_the_less_long_ones_stand_out(error: float, exponent: float) -> None:
    """Lengths spread by 0.5 (log scale), declared with an independent error: what to expect is known exactly."""
    actual = lengths_of(4000, 0.5)
    declared = np.round(actual * np.exp(np.random.default_rng(1).normal(0.0, error, 4000))).clip(1)
    lengths = learnt(declared, actual, 2000)
    rest = np.arange(2000, 4000)
    slope = np.polyfit(np.log(declared[rest]), np.log(lengths.hint[rest]), 1)[0]
    assert slope == pytest.approx(exponent, abs=0.07)
    believed = np.abs(declared[rest] - actual[rest]).mean()
    assert np.abs(expected(lengths)[rest] - actual[rest]).mean() < 0.7 * believed


def test_declarations_that_are_right_on_average_are_kept() -> None:
    """Lengths scatter about what was declared, much more than declarations differ: no reason to draw these together."""
    declared = lengths_of(8000, 0.4)
    actual = np.round(declared * np.exp(np.random.default_rng(1).normal(0.0, 0.8, 8000))).clip(1, MOST)
    lengths = learnt(declared, actual, 6000)
    slope = np.polyfit(np.log(declared), np.log(lengths.hint), 1)[0]
    assert slope == pytest.approx(1.0, abs=0.1)


def test_a_class_that_has_not_shown_is_taken_to_err_as_the_others_do() -> None:
    actual = lengths_of(500, 0.8)
    classes = np.where(np.arange(500) < 400, 0, 1).astype(np.int32)
    lengths = learnt(np.round(3 * actual).clip(1), actual, 400, classes)
    assert lengths.mean == pytest.approx([1 / 3, 1 / 3], rel=0.05)


def test_a_class_that_has_shown_stands_for_itself() -> None:
    actual = lengths_of(1000, 0.8)
    classes = (np.arange(1000) % 2).astype(np.int32)
    lengths = learnt(np.where(classes == 0, actual, 4 * actual).round().clip(1), actual, 1000, classes)
    assert lengths.mean == pytest.approx([1.0, 0.25], rel=0.05)


def test_what_still_runs_is_evidence_that_declarations_are_too_short() -> None:
    """Twenty ended as declared, eighty run on at three times what was declared."""
    declared = np.full(100, 100.0)
    lengths = learnt(declared, declared, 20)
    assert lengths.mean[0] < 1.1
    lengths.refresh(np.arange(20, 100, dtype=np.int32), np.full(80, 300, dtype=np.int32))
    assert lengths.mean[0] > 2.3


def test_requests_without_a_declared_length_change_nothing() -> None:
    lengths = DeclaredLengths(np.zeros(4, dtype=np.int32), np.array([0, 0, 50, 0], dtype=np.int32))
    before = lengths.ends.copy()
    everybody = np.array([0, 1, 3], dtype=np.int32)
    lengths.finished(everybody, np.array([1, 2, 3], dtype=np.int32))
    assert not lengths.weigh()
    lengths.refresh(everybody, np.array([400, 400, 400], dtype=np.int32))
    assert np.array_equal(lengths.ends, before)
    assert lengths.hint.tolist() == [0, 0, 50, 0]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 5000), st.integers(1, 5000), st.booleans()), min_size=1
    )
)
def test_ends_are_a_distribution_whatever_is_declared(requests: list[tuple[int, int, int, bool]]) -> None:
    """Those marked have finished, the others run; learning all at once or one by one is the same."""
    classes, declared, tokens, done = (np.array(column) for column in zip(*requests, strict=True))
    at_once, one_by_one = (
        DeclaredLengths(classes.astype(np.int32), declared.astype(np.int32)) for _ in range(2)
    )
    finished, runs = (np.flatnonzero(which).astype(np.int32) for which in (done, ~done))
    at_once.finished(finished, tokens[finished].astype(np.int32))
    for request in finished:
        one_by_one.finished(np.array([request], dtype=np.int32), tokens[[request]].astype(np.int32))
    for lengths in (at_once, one_by_one):
        lengths.weigh()
        lengths.refresh(runs, tokens[runs].astype(np.int32))
    assert np.allclose(at_once.ends[:, :-1], one_by_one.ends[:, :-1])
    assert (declared[at_once.hint > 0] > 0).all()
    for ends in at_once.ends:
        assert (np.diff(ends[:, VALUE]) > -1e-9).all()
        assert (np.diff(ends[:, ALIVE]) <= 0.0).all()
        assert (ends[0, ALIVE], ends[-1, ALIVE]) == (1.0, 0.0)
        probability = ends[:-1, ALIVE] - ends[1:, ALIVE]
        assert ends[0, TOKENS] == pytest.approx((probability * ends[:-1, VALUE]).sum())
        assert ends[0, SQUARE] >= ends[0, TOKENS] ** 2 * (1 - 1e-9)
        assert first_end(ends, 1.0) == np.argmax(ends[:, VALUE] > 1.0)
