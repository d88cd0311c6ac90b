"""One step's work, as the scheduler hands it to an executor."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class Batch:
    """The tokens that one step computes; row i of each column belongs to one running sequence.

    Row i computes tokens `num_computed[i] .. num_computed[i] + num_tokens[i]` of its sequence (prompt, then tokens
    generated so far). Rows may share KV blocks, and a row may attend to blocks that an earlier row of the *same* batch
    fills: an executor writes the KV of all rows before any row attends, in every layer.
    """

    slots: NDArray[np.int32]
    """[num_rows] running slot of the sequence, its row in `block_tables`"""
    requests: NDArray[np.int32]
    """[num_rows] request number"""
    num_computed: NDArray[np.int32]
    """[num_rows] tokens of the sequence whose KV exists (or is written by an earlier row of this batch)"""
    num_tokens: NDArray[np.int32]
    """[num_rows] tokens computed now, at least 1"""
    samples: NDArray[np.bool_]
    """[num_rows] True where the row's last token is the last known one, so that a new token is sampled"""
    block_tables: NDArray[np.int32]
    """[max_num_seqs, max_blocks] KV blocks of every slot in token order; zero columns when the executor holds no KV"""
    num_prefill_tokens: int
    num_decode_tokens: int
    kv_tokens_read: int
    """KV tokens attended to by the decode rows"""
    query_key_pairs: float
    """(query, key) pairs of the prefill rows: the work of prefill attention"""

    def with_used_blocks(self, block_size: int) -> Batch:
        """The same with block tables of its own rows only, as wide as they are used: what to send elsewhere."""
        longest = int((self.num_computed + self.num_tokens).max(initial=0))
        tables = np.ascontiguousarray(self.block_tables[self.slots, : -(-longest // block_size)])
        return replace(self, slots=np.arange(len(self.slots), dtype=np.int32), block_tables=tables)
