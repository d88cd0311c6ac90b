"""Choosing tokens: greedy or drawn from the filtered distribution, with log probabilities where asked for.

Every draw uses one uniform number that depends on the request's seed and the token's place alone, turned into a token
by inverting the cumulative distribution. What a request gets is therefore independent of what it is batched with, up to
the low bits of the logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blendserve.request import SamplingParams, TokenLogprob

GREEDY_BELOW = 1e-5
"""temperatures that mean greedy, as in vLLM"""
NUM_CANDIDATES = 256
"""most likely tokens that top_p and min_p look at first; rows whose filter reaches further sort their vocabulary"""


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What is needed to choose the next token of one request."""

    params: SamplingParams
    seed: int
    """unsigned, 64 bits"""
    position: int
    """tokens generated before this one"""
    suppressed: Sequence[int] = ()
    """token ids that must not be chosen now"""


class Sampled(NamedTuple):
    """The chosen tokens of a batch of rows."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]
    """of the unscaled and unfiltered distribution, where the row asks for them"""
    is_valid: list[bool]
    """False where the logits were not finite and the token means nothing"""


@torch.inference_mode()
def sample(
    logits: Tensor,  # [num_rows, vocab_size] fp32, overwritten
    rows: Sequence[SamplingRow],
) -> Sampled:
    """Choose one token per row."""
    raw = _RawLogprobs(logits, [row.params.logprobs for row in rows])
    for i, row in enumerate(rows):
        if len(row.suppressed):
            logits[i, list(row.suppressed)] = -torch.inf
    highest, token_ids = logits.max(dim=-1)
    is_valid = highest.isfinite()
    drawn = [i for i, row in enumerate(rows) if row.params.temperature >= GREEDY_BELOW and is_valid[i]]
    if drawn:
        chosen = logits if len(drawn) == len(rows) else logits[drawn]
        token_ids[drawn] = _draw(chosen, [rows[i] for i in drawn])
    ids: list[int] = token_ids.tolist()
    return Sampled(ids, raw.of(ids), is_valid.tolist())


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One number in [0, 1) for every (seed, position): a counter-based generator, so that no state is kept."""
    position = np.array(positions, dtype=np.uint64)
    bits = _mix(_mix(np.array(seeds, dtype=np.uint64)) + position * np.uint64(0x9E3779B97F4A7C15))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread every input bit over all output bits. Source: the finaliser of SplitMix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class _Filters(NamedTuple):
    """Sampling parameters of several rows as columns [num_rows, 1]; switched-off filters have a neutral value."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def take(self, rows: Tensor) -> _Filters:
        return _Filters(*(column[rows] for column in self))

    @classmethod
    def of(cls, rows: Sequence[SamplingRow], vocab_size: int) -> _Filters:
        top_k = [row.params.top_k if 0 < row.params.top_k < vocab_size else vocab_size for row in rows]
        columns = (top_k, [row.params.top_p for row in rows], [row.params.min_p for row in rows])
        return cls(*(torch.tensor(column, dtype=torch.float64)[:, None] for column in columns))


def _draw(
    logits: Tensor,  # [num_rows, vocab_size] fp32, overwritten
    rows: Sequence[SamplingRow],
) -> Tensor:  # [num_rows] int64
    """Draw a token per row: temperature, then min_p, then top_k, then top_p, as vLLM does."""
    scaled = logits.div_(torch.tensor([row.params.temperature for row in rows])[:, None])
    uniform = torch.from_numpy(uniforms([row.seed for row in rows], [row.position for row in rows]))[:, None]
    filters = _Filters.of(rows, logits.shape[-1])
    is_plain = ((filters.top_k == logits.shape[-1]) & (filters.top_p >= 1) & (filters.min_p <= 0))[:, 0]
    if is_plain.all():
        return _draw_plain(scaled, uniform)
    token_ids = torch.empty(len(rows), dtype=torch.int64)
    if is_plain.any():
        token_ids[is_plain] = _draw_plain(scaled[is_plain], uniform[is_plain])
    is_filtered = ~is_plain
    token_ids[is_filtered] = _draw_filtered(
        scaled[is_filtered], uniform[is_filtered], filters.take(is_filtered), NUM_CANDIDATES
    )
    return token_ids


def _draw_plain(
    scaled: Tensor,  # [num_rows, vocab_size] fp32
    uniform: Tensor,  # [num_rows, 1] fp64
) -> Tensor:  # [num_rows] int64
    weights = (scaled - scaled.amax(-1, keepdim=True)).exp_()
    return _invert(weights.cumsum(-1, dtype=torch.float64), uniform)


def _draw_filtered(
    scaled: Tensor,  # [num_rows, vocab_size] fp32
    uniform: Tensor,  # [num_rows, 1] fp64
    filters: _Filters,
    num_candidates: int,
) -> Tensor:  # [num_rows] int64
    """Filter the most likely tokens only; rows that may keep more than these start over with all tokens."""
    vocab_size = scaled.shape[-1]
    bounded = filters.top_k[filters.top_k < vocab_size]
    num_candidates = min(vocab_size, max(num_candidates, int(bounded.max()) if len(bounded) else 0))
    top, ids = scaled.topk(num_candidates, dim=-1)
    # Equal logits in order of their ids, whatever the number of candidates.
    ids, order = ids.sort(dim=-1)
    top, order = top.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)

    highest = top[:, :1]
    weights = (top - highest).double().exp_()  # [num_rows, num_candidates], 1 for the most likely token
    kth = weights.gather(-1, (filters.top_k.long() - 1).clamp_(max=num_candidates - 1))
    kept = (weights >= filters.min_p) & ((weights >= kth) | (filters.top_k == vocab_size))
    weights.mul_(kept)
    total = weights.cumsum(
        -1
    )  # also the order in which sums are made is the same for every number of candidates
    mass = total[:, -1:]
    if num_candidates < vocab_size and len(bounded) < len(filters.top_k):
        all_weights = (scaled - highest).exp_()
        all_weights.mul_(all_weights >= filters.min_p)
        mass = torch.where(
            filters.top_k == vocab_size, all_weights.sum(-1, keepdim=True, dtype=torch.float64), mass
        )
    kept &= total - weights < filters.top_p * mass
    weights.mul_(kept)
    token_ids = ids.gather(-1, _invert(weights.cumsum(-1), uniform)[:, None])[:, 0]

    is_cut = kept[:, -1] & (filters.top_k[:, 0] > num_candidates)
    if num_candidates < vocab_size and is_cut.any():
        token_ids[is_cut] = _draw_filtered(scaled[is_cut], uniform[is_cut], filters.take(is_cut), vocab_size)
    return token_ids


def _invert(
    cumulative: Tensor,  # [num_rows, num_tokens] fp64, sums of weights that need not be normalised
    uniform: Tensor,  # [num_rows, 1] fp64 in [0, 1)
) -> Tensor:  # [num_rows] int64
    """The first token whose cumulative weight exceeds `uniform` of the whole; never one of weight 0."""
    target = torch.minimum(
        uniform * cumulative[:, -1:], cumulative[:, -1:].nextafter(cumulative.new_zeros(1))
    )
    return torch.searchsorted(cumulative, target, right=True)[:, 0]


class _RawLogprobs:
    """Log probabilities before anything is scaled, suppressed or filtered; keeps only the rows that ask for them."""

    def __init__(
        self,
        logits: Tensor,  # [num_rows, vocab_size] fp32
        wanted: Sequence[int | None],  # [num_rows] alternatives to report, None for no log probabilities
    ) -> None:
        self._wanted = wanted
        self._rows = [i for i, num_top in enumerate(wanted) if num_top is not None]
        if not self._rows:
            return
        self._logprobs = logits[self._rows].log_softmax(dim=-1)
        num_top = max(num_top or 0 for num_top in wanted)
        top, ids = self._logprobs.topk(min(num_top, logits.shape[-1]), dim=-1)
        self._top, self._top_ids = top.tolist(), ids.tolist()

    def of(self, token_ids: Sequence[int]) -> list[TokenLogprob | None]:
        """Per row, those of the chosen token and of the most likely ones."""
        result: list[TokenLogprob | None] = [None] * len(token_ids)
        for place, i in enumerate(self._rows):
            num_top = self._wanted[i] or 0
            logprob = float(self._logprobs[place, token_ids[i]])
            top = zip(self._top_ids[place][:num_top], self._top[place][:num_top], strict=True)
            result[i] = TokenLogprob(
                token_ids[i], logprob if math.isfinite(logprob) else -math.inf, tuple(top)
            )
        return result
