"""Choosing tokens: greedy or drawn from the filtered distribution, with log probabilities where asked for.

Every draw uses one uniform number that depends on the request's seed and the token's place alone, turned into a token
by inverting the cumulative distribution. What a request gets is therefore independent of what it is batched with, up to
the low bits of the logits.

Tokens are chosen on the device that holds the logits. The host waits for it in one case only: rows with `top_p` or
`min_p` and no `top_k`, of which only the logits tell how many tokens their filter keeps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blendserve.engines.native.device import Download, upload
from blendserve.request import SamplingParams, TokenLogprob

GREEDY_BELOW = 1e-5
"""temperatures that mean greedy, as in vLLM"""
NUM_CANDIDATES = 256
"""most likely tokens that top_p and min_p look at first; rows whose filter reaches further sort their vocabulary"""


@dataclass(frozen=True, slots=True)
class Seen:
    """Tokens of one request so far, and what they cost."""

    token_ids: NDArray[np.int64]
    """[num_seen] each once: of the output, and of the prompt where that counts"""
    counts: NDArray[np.float32]
    """[num_seen] times it is in the output"""
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """What one row's logits go through, in vLLM's order, before the temperature; None for what it does not ask for.

    ```
    grammar ──▶ log probabilities ──▶ allowed, suppressed ──▶ bias ──▶ repetition, frequency, presence penalty
    ```
    """

    grammar: NDArray[np.int32] | None = None
    """[vocab_size / 32] bit i % 32 of word i // 32: whether token i may be chosen"""
    allowed: NDArray[np.int32] | None = None
    """likewise"""
    bias: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None
    """token ids, each once, and what to add"""
    seen: Seen | None = None


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
    edits: LogitEdits | None = None
    """None, as of most rows: there are none"""


class Sampled(NamedTuple):
    """The chosen tokens of a batch of rows."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]
    """of the unscaled and unfiltered distribution, where the row asks for them"""
    is_valid: list[bool]
    """False where the logits were not finite and the token means nothing"""


class Choice:
    """Tokens chosen for a batch of rows, on the device of the logits and perhaps not computed yet."""

    def __init__(
        self,
        token_ids: Tensor,  # [num_rows] int64
        is_valid: Tensor,  # [num_rows] bool
        logprobs: _Logprobs | None,
    ) -> None:
        self.token_ids = token_ids
        self._is_valid = is_valid
        self._logprobs = logprobs
        self._arriving: Download | None = None

    def download(self) -> None:
        """Begin to copy all to the host."""
        extra = [] if self._logprobs is None else self._logprobs.of(self.token_ids)
        self._arriving = Download([self.token_ids, self._is_valid, *extra])

    def sampled(self) -> Sampled:
        """The chosen tokens on the host; waits for them."""
        if self._arriving is None:
            self.download()
        assert self._arriving is not None
        token_ids, is_valid, *extra = self._arriving.wait()
        ids: list[int] = token_ids.tolist()
        logprobs: list[TokenLogprob | None] = [None] * len(ids)
        if self._logprobs is not None:
            self._logprobs.fill(logprobs, ids, *extra)
        return Sampled(ids, logprobs, is_valid.tolist())


@dataclass(frozen=True, slots=True)
class Draws:
    """Rows to draw a token for, and how, as columns; a filter that is switched off has a neutral value."""

    places: NDArray[np.int64]
    """[num_drawn] rows of the logits"""
    temperature: NDArray[np.float32]
    uniform: NDArray[np.float64]
    """in [0, 1): what decides the draw"""
    top_k: NDArray[np.int64]
    """the size of the vocabulary where it is off"""
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    vocab_size: int

    @classmethod
    def of(cls, rows: Sequence[SamplingRow], vocab_size: int) -> Draws | None:
        """Of those rows that are not greedy; None if all are."""
        places = [i for i, row in enumerate(rows) if row.params.temperature >= GREEDY_BELOW]
        if not places:
            return None
        chosen = [rows[i] for i in places]
        params = [row.params for row in chosen]
        return cls(
            np.array(places, np.int64),
            np.array([p.temperature for p in params], np.float32),
            uniforms([row.seed for row in chosen], [row.position for row in chosen]),
            np.array([p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params], np.int64),
            np.array([p.top_p for p in params], np.float64),
            np.array([p.min_p for p in params], np.float64),
            vocab_size,
        )

    @property
    def is_filtered(self) -> NDArray[np.bool_]:
        """[num_drawn] whether the token is drawn from less than the whole distribution."""
        return (self.top_k < self.vocab_size) | (self.top_p < 1) | (self.min_p > 0)

    def take(self, chosen: NDArray[Any]) -> Draws:
        """Some of them, by index or mask."""
        return Draws(
            self.places[chosen],
            self.temperature[chosen],
            self.uniform[chosen],
            self.top_k[chosen],
            self.top_p[chosen],
            self.min_p[chosen],
            self.vocab_size,
        )


class TokenOps(Protocol):
    """What choosing takes of the whole vocabulary."""

    def highest(
        self,
        logits: Tensor,  # [num_rows, vocab_size]
    ) -> tuple[Tensor, Tensor, Tensor]:  # [num_rows] int64, bool and fp32
        """The first most likely token of each row, whether its logits are sound, and the highest of them."""
        ...

    def draw(
        self,
        logits: Tensor,  # [num_rows, vocab_size], may be overwritten
        maxima: Tensor,  # [num_rows] fp32, see `highest`
        draws: Draws,
    ) -> Tensor:  # [num_drawn] int64
        """A token of each of some rows: temperature, then min_p, then top_k, then top_p, as vLLM does."""
        ...


class TorchTokenOps:
    """`TokenOps` by torch, on any device."""

    def highest(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `TokenOps.highest`."""
        maxima, token_ids = logits.max(dim=-1)
        return token_ids, maxima.isfinite(), maxima.float()

    def draw(self, logits: Tensor, maxima: Tensor, draws: Draws) -> Tensor:
        """See `TokenOps.draw`."""
        is_filtered = draws.is_filtered
        if not is_filtered.any():
            return _draw_plain(logits, maxima, draws)
        if is_filtered.all():
            return _draw_filtered(logits, draws, NUM_CANDIDATES)
        token_ids = torch.empty(len(draws.places), dtype=torch.int64, device=logits.device)
        filtered, plain = upload([np.flatnonzero(is_filtered), np.flatnonzero(~is_filtered)], logits.device)
        token_ids[filtered] = _draw_filtered(logits, draws.take(is_filtered), NUM_CANDIDATES)
        token_ids[plain] = _draw_plain(logits, maxima, draws.take(~is_filtered))
        return token_ids


TORCH_TOKEN_OPS = TorchTokenOps()


@torch.inference_mode()
def choose(
    logits: Tensor,  # [num_rows, vocab_size], overwritten
    rows: Sequence[SamplingRow],
    ops: TokenOps = TORCH_TOKEN_OPS,
) -> Choice:
    """Choose one token per row."""
    edited = [(i, row.edits) for i, row in enumerate(rows) if row.edits is not None]
    if edited:
        _forbid(logits, [(i, edits.grammar) for i, edits in edited if edits.grammar is not None])
    params = [row.params for row in rows]
    raw = _Logprobs(logits, params) if any(p.logprobs is not None for p in params) else None
    if edited:
        _forbid(logits, [(i, edits.allowed) for i, edits in edited if edits.allowed is not None])
    suppressed = [(i, token_id) for i, row in enumerate(rows) for token_id in row.suppressed]
    if suppressed:
        places, banned = upload(list(np.array(suppressed, dtype=np.int64).T), logits.device)
        logits[places, banned] = -torch.inf
    shifted = [(i, edits) for i, edits in edited if edits.bias is not None or edits.seen is not None]
    if not shifted:
        return Choice(*_chosen(logits, rows, ops), raw)
    # In fp32, apart from the other rows, whose tokens must not depend on these.
    [places] = upload([np.array([i for i, _ in shifted], np.int64)], logits.device)
    shifted_logits = _shift(logits[places].float(), [edits for _, edits in shifted])
    shifted_ops = ops if logits.dtype == torch.float32 else TORCH_TOKEN_OPS
    shifted_choice = _chosen(shifted_logits, [rows[i] for i, _ in shifted], shifted_ops)
    token_ids, is_valid = _chosen(logits, rows, ops, without=[i for i, _ in shifted])
    for whole, part in zip((token_ids, is_valid), shifted_choice, strict=True):
        whole[places] = part
    return Choice(token_ids, is_valid, raw)


def _chosen(
    logits: Tensor,  # [num_rows, vocab_size], overwritten
    rows: Sequence[SamplingRow],
    ops: TokenOps,
    without: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:  # [num_rows] int64 and bool
    """A token of each row and whether its logits were sound; for the rows `without`, any."""
    token_ids, is_valid, maxima = ops.highest(logits)
    draws = Draws.of(rows, logits.shape[-1])
    if draws is not None and without:
        draws = draws.take(~np.isin(draws.places, without))
    if draws is not None and len(draws.places):
        [places] = upload([draws.places], logits.device)
        token_ids[places] = ops.draw(logits, maxima, draws)
    return token_ids, is_valid


def _forbid(
    logits: Tensor,  # [num_rows, vocab_size], changed in place
    masks: Sequence[tuple[int, NDArray[np.int32]]],
) -> None:
    """Forbid in some rows what is not in their masks, see `LogitEdits.grammar`."""
    if not masks:
        return
    columns = (np.array([i for i, _ in masks], np.int64), np.stack([mask for _, mask in masks]))
    places, words = upload(columns, logits.device)
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    is_forbidden = ((words[:, :, None] >> bits) & 1).view(len(masks), -1)[:, : logits.shape[-1]] == 0
    logits[places] = logits[places].masked_fill_(is_forbidden, -torch.inf)


def _shift(
    logits: Tensor,  # [num_rows, vocab_size] fp32, changed in place
    edits: Sequence[LogitEdits],  # [num_rows]
) -> Tensor:
    """Add biases, then make tokens seen less likely. Source: `apply_penalties` of vLLM."""
    bias = [(i, *row.bias) for i, row in enumerate(edits) if row.bias is not None]
    if bias:
        places, token_ids, values = upload(
            (
                np.repeat([i for i, _, _ in bias], [len(ids) for _, ids, _ in bias]).astype(np.int64),
                np.concatenate([ids for _, ids, _ in bias]),
                np.concatenate([values for _, _, values in bias]),
            ),
            logits.device,
        )
        logits[places, token_ids] += values
    seen = [(i, row.seen) for i, row in enumerate(edits) if row.seen is not None]
    if seen:
        lengths = [len(tokens.token_ids) for _, tokens in seen]
        penalties = [
            (tokens.repetition_penalty, tokens.frequency_penalty, tokens.presence_penalty)
            for _, tokens in seen
        ]
        places, token_ids, counts, by_row = upload(
            (
                np.repeat([i for i, _ in seen], lengths).astype(np.int64),
                np.concatenate([tokens.token_ids for _, tokens in seen]),
                np.concatenate([tokens.counts for _, tokens in seen]),
                np.repeat(np.array(penalties, np.float32).T, lengths, axis=1),
            ),
            logits.device,
        )
        repetition, frequency, presence = by_row
        values = logits[places, token_ids]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= frequency * counts
        values -= presence * (counts > 0)
        logits[places, token_ids] = values
    return logits


@torch.inference_mode()
def score(
    logits: Tensor,  # [num_rows, vocab_size]
    token_ids: NDArray[np.int64],  # [num_rows]
    params: Sequence[SamplingParams],  # [num_rows] all with `logprobs`
) -> Choice:
    """Tokens that are known, with their log probabilities."""
    [chosen] = upload([token_ids], logits.device)
    return Choice(chosen, torch.ones_like(chosen, dtype=torch.bool), _Logprobs(logits, params))


def sample(
    logits: Tensor,  # [num_rows, vocab_size], overwritten
    rows: Sequence[SamplingRow],
    ops: TokenOps = TORCH_TOKEN_OPS,
) -> Sampled:
    """Choose one token per row, and wait for it."""
    return choose(logits, rows, ops).sampled()


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


def _draw_plain(
    logits: Tensor,  # [num_rows, vocab_size], overwritten
    maxima: Tensor,  # [num_rows] fp32
    draws: Draws,
) -> Tensor:  # [num_drawn] int64
    """A token of each row from all tokens."""
    columns = (draws.places, draws.temperature[:, None], draws.uniform[:, None])
    places, temperature, uniform = upload(columns, logits.device)
    if len(places) < len(logits):
        logits, maxima = logits[places], maxima[places]
    weights = logits.float().sub_(maxima[:, None]).div_(temperature).exp_()
    return _invert(weights.cumsum(-1, dtype=torch.float64), uniform)


def _draw_filtered(
    logits: Tensor,  # [num_rows, vocab_size]
    draws: Draws,
    num_candidates: int,
) -> Tensor:  # [num_drawn] int64
    """Filter the most likely tokens only; rows that may keep more than these start over with all tokens."""
    vocab_size = draws.vocab_size
    is_bounded = draws.top_k < vocab_size
    all_bounded = bool(is_bounded.all())
    num_candidates = min(vocab_size, max(num_candidates, int(draws.top_k[is_bounded].max(initial=0))))
    columns = (draws.temperature, draws.uniform, draws.top_k, draws.top_p, draws.min_p)
    on_device = upload((draws.places, *(column[:, None] for column in columns)), logits.device)
    places, temperature, uniform, top_k, top_p, min_p = on_device
    scaled = logits[places].float().div_(temperature)
    top, ids = scaled.topk(num_candidates, dim=-1)
    # Equal logits in order of their ids, whatever the number of candidates.
    ids, order = ids.sort(dim=-1)
    top, order = top.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)

    highest = top[:, :1]
    weights = (top - highest).double().exp_()  # [num_drawn, num_candidates], 1 for the most likely token
    kth = weights.gather(-1, (top_k - 1).clamp(max=num_candidates - 1))
    kept = (weights >= min_p) & ((weights >= kth) | (top_k == vocab_size))
    weights.mul_(kept)
    # Also the order in which sums are made is the same for every number of candidates.
    total = weights.cumsum(-1)
    mass = total[:, -1:]
    if num_candidates < vocab_size and not all_bounded:
        all_weights = (scaled - highest).exp_()
        all_weights.mul_(all_weights >= min_p)
        mass = torch.where(top_k == vocab_size, all_weights.sum(-1, keepdim=True, dtype=torch.float64), mass)
    kept &= total - weights < top_p * mass
    weights.mul_(kept)
    token_ids = ids.gather(-1, _invert(weights.cumsum(-1), uniform)[:, None])[:, 0]

    if num_candidates == vocab_size or all_bounded:
        return token_ids
    is_cut = (kept[:, -1] & (top_k[:, 0] > num_candidates)).cpu()
    if is_cut.any():
        token_ids[is_cut.to(logits.device)] = _draw_filtered(logits, draws.take(is_cut.numpy()), vocab_size)
    return token_ids


def _invert(
    cumulative: Tensor,  # [num_rows, num_tokens] fp64, sums of weights that need not be normalised
    uniform: Tensor,  # [num_rows, 1] fp64 in [0, 1)
) -> Tensor:  # [num_rows] int64
    """The first token whose cumulative weight exceeds `uniform` of the whole; never one of weight 0."""
    target = torch.minimum(
        uniform * cumulative[:, -1:], cumulative[:, -1:].nextafter(cumulative.new_zeros(1))
    )
    found = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return found.clamp_(max=cumulative.shape[-1] - 1)  # where the weights are not finite


class _Logprobs:
    """Log probabilities before anything is scaled, suppressed or filtered; keeps only the rows that ask for them."""

    def __init__(
        self,
        logits: Tensor,  # [num_rows, vocab_size]
        params_of_rows: Sequence[SamplingParams],  # [num_rows]
    ) -> None:
        self._rows = [i for i, p in enumerate(params_of_rows) if p.logprobs is not None]
        params = [params_of_rows[i] for i in self._rows]
        [self._places] = upload([np.array(self._rows, dtype=np.int64)], logits.device)
        self._logprobs = logits[self._places].float().log_softmax(dim=-1)
        num_top = min(max(p.logprobs or 0 for p in params), logits.shape[-1])
        self._top, self._top_ids = self._logprobs.topk(num_top, dim=-1)
        self._reported = [
            slice(num_top, num_top + len(p.logprob_token_ids)) if p.logprob_token_ids else slice(p.logprobs)
            for p in params
        ]
        """columns of the alternatives that a row reports"""
        num_labels = max(len(p.logprob_token_ids) for p in params)
        if num_labels:
            labels = np.zeros((len(params), num_labels), np.int64)
            for row, p in enumerate(params):
                labels[row, : len(p.logprob_token_ids)] = p.logprob_token_ids
            [label_ids] = upload([labels], logits.device)
            self._top = torch.cat([self._top, self._logprobs.gather(-1, label_ids)], dim=-1)
            self._top_ids = torch.cat([self._top_ids, label_ids], dim=-1)

    def of(
        self,
        token_ids: Tensor,  # [num_rows] int64
    ) -> list[Tensor]:
        """What `fill` needs: of each row kept, the chosen token's, the highest ones and their tokens."""
        chosen = self._logprobs.gather(-1, token_ids[self._places][:, None])[:, 0]
        return [chosen, self._top, self._top_ids]

    def fill(
        self,
        result: list[TokenLogprob | None],
        token_ids: Sequence[int],
        chosen: Tensor,
        top: Tensor,
        top_ids: Tensor,
    ) -> None:
        """Enter those of the chosen token and of the alternatives where the row asks for them."""
        columns = zip(
            self._rows, chosen.tolist(), top.tolist(), top_ids.tolist(), self._reported, strict=True
        )
        for i, logprob, values, ids, reported in columns:
            alternatives = tuple(zip(ids[reported], values[reported], strict=True))
            result[i] = TokenLogprob(
                token_ids[i], logprob if math.isfinite(logprob) else -math.inf, alternatives
            )
