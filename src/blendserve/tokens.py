"""All prompts of a job as one array of token ids, so that millions of requests do not live as Python lists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray


class PromptTokens:
    """Prompts as slices of one flat array of token ids; several prompts may share a slice.

    Args:
        data: [num_tokens] uint32, may be memory-mapped.
        starts: [num_prompts] int64, first token of each prompt in `data`.
        lengths: [num_prompts] int32, tokens in each prompt.
    """

    def __init__(
        self, data: NDArray[np.uint32], starts: NDArray[np.int64], lengths: NDArray[np.int32]
    ) -> None:
        self.data = data
        self.starts = np.ascontiguousarray(starts, dtype=np.int64)
        self.lengths = np.ascontiguousarray(lengths, dtype=np.int32)

    @classmethod
    def from_lists(cls, prompts: Iterable[Iterable[int]]) -> PromptTokens:
        """Copy prompts given as sequences of token ids."""
        arrays = [np.asarray(list(prompt), dtype=np.uint32) for prompt in prompts]
        lengths = np.array([len(array) for array in arrays], dtype=np.int32)
        starts = (
            np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)[:-1]))
            if arrays
            else np.empty(0, np.int64)
        )
        data = np.concatenate(arrays) if arrays else np.empty(0, np.uint32)
        return cls(data, starts, lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, prompt: int) -> NDArray[np.uint32]:
        """Token ids of one prompt, a view."""
        start = self.starts[prompt]
        return self.data[start : start + self.lengths[prompt]]

    def __iter__(self) -> Iterator[NDArray[np.uint32]]:
        return (self[prompt] for prompt in range(len(self)))

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts together, shared slices counted once per prompt."""
        return int(self.lengths.sum(dtype=np.int64))

    def take(self, prompts: NDArray[np.integer]) -> PromptTokens:
        """The given prompts, in that order, repeated where an index repeats; the tokens are not copied."""
        return PromptTokens(self.data, self.starts[prompts], self.lengths[prompts])
