"""One pair of tensor-parallel ranks for several models, as a process takes seconds to start."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blendserve.engines.native.executor import TorchExecutor
from blendserve.scheduling.batch import Batch
from tests.workload import COST_MODEL


class SeveralModels:
    """Executors of one rank. A batch says in place of its number of prefill tokens which of them it is for."""

    def __init__(self, executors: list[TorchExecutor]) -> None:
        self.executors = executors
        for index, executor in enumerate(executors):
            executor._launch = self._marking(executor._launch, index)

    @staticmethod
    def _marking(launch: Any, index: int) -> Any:
        return lambda batch: launch(replace(batch, num_prefill_tokens=index))

    def follow(self, batch: Batch, scored: NDArray[np.int64]) -> None:
        self.executors[batch.num_prefill_tokens].follow(batch, scored)


def open_several(models: list[tuple[Path, dict[str, Any]]], *, tokenizer: Any, ranks: Any) -> Any:
    """`SeveralModels` of these folders, each with further arguments of its executor."""
    sizes: dict[str, Any] = {"num_blocks": 600, "block_size": 16, "num_threads": 1}
    return SeveralModels(
        [
            TorchExecutor(folder, tokenizer, cost_model=COST_MODEL, ranks=ranks, **(sizes | options))
            for folder, options in models
        ]
    )
