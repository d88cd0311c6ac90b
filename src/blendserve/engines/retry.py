"""How long to wait before something that failed is tried again."""

from __future__ import annotations

import random


class Backoff:
    """Exponential backoff with full jitter, and a bound on attempts.

    The wait before retry k is drawn evenly from 0 .. min(max_s, base_s · factor^(k-1)), so that clients that
    failed together do not come back together. A server that names a time itself is believed.

    Args:
        base_s: upper end of the first wait.
        factor: by which the upper end grows per attempt.
        max_s: the longest wait that is drawn, and the longest that a server may ask for.
        max_attempts: attempts in all, the first one included.
        seed: of the jitter; None: different each time.
    """

    def __init__(
        self,
        base_s: float = 0.5,
        factor: float = 2.0,
        max_s: float = 60.0,
        max_attempts: int = 6,
        seed: int | None = None,
    ) -> None:
        self.base_s = base_s
        self.factor = factor
        self.max_s = max_s
        self.max_attempts = max_attempts
        self._random = random.Random(seed)

    def delay_s(self, attempt: int, retry_after_s: float | None = None) -> float | None:
        """Seconds to wait after attempt number `attempt` (the first is 1) failed; None: give up.

        With `retry_after_s`, the server's `Retry-After`, the wait is never shorter than that (up to `max_s`);
        jitter comes on top.
        """
        if attempt >= self.max_attempts:
            return None
        # As a power of a float it could overflow; past max_s the exponent says nothing more.
        limit_s = self.base_s
        for _ in range(attempt - 1):
            limit_s *= self.factor
            if limit_s >= self.max_s:
                break
        wait_s = self._random.uniform(0.0, min(limit_s, self.max_s))
        if retry_after_s is not None:
            wait_s += min(max(retry_after_s, 0.0), self.max_s)
        return wait_s
