"""Whether tokens were drawn from a distribution."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def check_drawn_from(probabilities: NDArray[Any], tokens: Sequence[int]) -> None:
    """No token of probability 0, and a chi-square below 4 standard deviations: odds of 1 in 30,000 against.

    Over the tokens expected at least 5 times, the rest as one.
    """
    count = len(tokens)
    observed = np.bincount(tokens, minlength=len(probabilities))
    assert not observed[probabilities == 0].any(), "a token that cannot be chosen was drawn"
    often = probabilities * count >= 5
    expected = np.append(probabilities[often], probabilities[~often].sum()) * count
    found = np.append(observed[often], observed[~often].sum())
    expected, found = expected[expected > 0], found[expected > 0]
    degrees = len(expected) - 1
    if not degrees:
        return
    statistic = ((found - expected) ** 2 / expected).sum()
    # Wilson-Hilferty: about normal.
    deviation = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / (2 / (9 * degrees)) ** 0.5
    assert deviation < 4
