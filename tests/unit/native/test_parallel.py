"""Tensor parallelism: what several ranks compute together is what one computes alone."""

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from blendserve.engines.native.attention import StepLayout
from blendserve.engines.native.executor import TorchExecutor
from blendserve.engines.native.model import LlamaModel, ModelConfig
from blendserve.engines.native.parallel import Leader, Part, open_parallel
from blendserve.errors import ConfigError, ModelError
from blendserve.request import Completion, SamplingParams
from blendserve.scheduling.batch import Batch
from tests.unit.native.several_models import open_several
from tests.unit.native.test_executor import GREEDY, PROMPTS, run_all, table, token_ids
from tests.unit.native.test_model import (
    BASE,
    KINDS,
    logits_of,
    make_cache,
    sharing_sequences,
    steps_of,
)
from tests.workload import COST_MODEL

ALL_KINDS = KINDS | {
    "odd-vocabulary": ("qwen3", {"vocab_size": 509, "tie_word_embeddings": True}),
    "gemma3-odd-vocabulary": ("gemma3", {"vocab_size": 509, "tie_word_embeddings": True}),
}
CHUNKS = [13, 1, 33, 7]
SEQUENCES = sharing_sequences(500)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Ranks share the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoints(
    make_tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: make_tiny_model(kind, root / name, **changes) for name, (kind, changes) in ALL_KINDS.items()
    }


def logits_alone(folder: Path, dtype: torch.dtype = torch.float32) -> dict[tuple[int, int], Tensor]:
    """Of every token of the sequences, by sequence and position."""
    config = ModelConfig.from_folder(folder)
    model, cache = LlamaModel.load(folder, config, dtype), make_cache(config, dtype, 16, "torch")
    return {(i, position): logits for i, position, logits in logits_of(model, cache, SEQUENCES, CHUNKS)}


def last_token_logits(
    model: LlamaModel, attention: Any, lead: Callable[..., None] = lambda *_: None
) -> dict[tuple[int, int], Tensor]:
    """Of the last token of each row of every step, by sequence and position."""
    found = {}
    for batch in steps_of(SEQUENCES, 16, CHUNKS):
        layout = StepLayout.from_batch(batch, 16)
        rows = np.repeat(batch.requests, batch.num_tokens)
        ids = torch.tensor([SEQUENCES[i][p] for i, p in zip(rows, layout.positions, strict=True)])
        lead(batch, 16, ids)
        last = layout.query_starts[1:].astype(np.int64) - 1
        places = zip(rows[last].tolist(), layout.positions[last].tolist(), strict=True)
        logits = model.forward(ids, layout, attention, torch.from_numpy(last))
        found |= dict(zip(places, logits, strict=True))
    return found


def check_close(found: dict[tuple[int, int], Tensor], expected: dict[tuple[int, int], Tensor]) -> None:
    assert {(i, len(sequence) - 1) for i, sequence in enumerate(SEQUENCES)} <= found.keys()
    tolerance = max(1e-4, 1e-5 * max(logits.abs().max().item() for logits in expected.values()))
    for place, logits in found.items():
        torch.testing.assert_close(logits, expected[place], atol=tolerance, rtol=0, msg=str(place))


class ThreadRanks:
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, given: list[Any]) -> None:
        self.rank, self.size = rank, size
        self._barrier, self._given = barrier, given

    def _from_all(self, tensor: Tensor) -> list[Tensor]:
        self._given[self.rank] = tensor.clone()
        self._barrier.wait(300)
        found = list(self._given)
        self._barrier.wait(300)
        return found

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(sum(self._from_all(tensor)))

    def gather(self, columns: Tensor) -> Tensor:
        return torch.cat(self._from_all(columns), dim=-1)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_parts_make_up_the_whole(checkpoints: dict[str, Path], kind: str, size: int) -> None:
    """4 ranks have copies of the KV heads of most of these models."""
    folder = checkpoints[kind]
    config = ModelConfig.from_folder(folder)
    barrier, given = threading.Barrier(size), [None] * size

    def run(rank: int) -> dict[tuple[int, int], Tensor]:
        ranks: Any = ThreadRanks(rank, size, barrier, given)
        try:
            model = LlamaModel.load(folder, config, torch.float32, ranks=ranks)
            return last_token_logits(model, make_cache(model.config, torch.float32, 16, "torch"))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        found, *_ = threads.map(run, range(size))
    check_close(found, logits_alone(folder))


EXECUTORS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in ALL_KINDS} | {
    "bfloat16": ("qwen3", {"dtype": "bfloat16"}),
    "late": ("odd-vocabulary", {"late_results": True}),
    "dummy": ("odd-vocabulary", {"load_format": "dummy"}),
    "sized-in-bytes": ("llama", {"num_blocks": None, "kv_cache_memory": 100_000}),
}


@pytest.fixture(scope="module")
def executors(checkpoints: dict[str, Path]) -> Iterator[dict[str, TorchExecutor]]:
    """All on the same two processes."""
    models = [(checkpoints[kind], options) for kind, options in EXECUTORS.values()]
    opened: Any = open_parallel(functools.partial(open_several, models), None, size=2)
    yield dict(zip(EXECUTORS, opened.executors, strict=True))
    opened.executors[0].close()


def logits_of_two(executors: dict[str, TorchExecutor], name: str) -> dict[tuple[int, int], Tensor]:
    executor, index = executors[name], list(EXECUTORS).index(name)
    assert executor._loaded is not None
    leader = executor._ranks
    assert isinstance(leader, Leader)

    def lead(batch: Batch, block_size: int, ids: Tensor) -> None:
        nothing = np.empty(0, np.int64)
        leader.lead(replace(batch, num_prefill_tokens=index), block_size, ids, nothing)

    return last_token_logits(*executor._loaded[:2], lead)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_two_processes_have_the_logits_of_one(
    executors: dict[str, TorchExecutor], checkpoints: dict[str, Path], kind: str
) -> None:
    """Prompts in chunks and single tokens, with blocks that sequences share."""
    check_close(logits_of_two(executors, kind), logits_alone(checkpoints[kind]))


def test_bfloat16_loses_no_more_than_one_process_does(
    executors: dict[str, TorchExecutor], checkpoints: dict[str, Path]
) -> None:
    exact = logits_alone(checkpoints["qwen3"])

    def loss(found: dict[tuple[int, int], Tensor]) -> float:
        return max((logits - exact[place]).abs().max().item() for place, logits in found.items())

    # The weights are rounded in both; two processes also round what they add.
    found = logits_of_two(executors, "bfloat16")
    assert 0 < loss(found) <= 2 * loss(logits_alone(checkpoints["qwen3"], torch.bfloat16))


SAMPLED = [
    SamplingParams(temperature=1.5),
    SamplingParams(temperature=0.8, top_p=0.9, logprobs=3),
    SamplingParams(temperature=1.0, top_k=20, min_p=0.02),
    SamplingParams(temperature=0.0, logprobs=2),
]


RULED = [
    SamplingParams(temperature=0.0, extra=b'{"repetition_penalty": 1.4, "presence_penalty": 0.5}'),
    SamplingParams(temperature=1.0, prompt_logprobs=2),
    SamplingParams(temperature=1.0, extra=b'{"logit_bias": {"5": 3.0}, "frequency_penalty": 1.0}'),
    SamplingParams(
        temperature=1.0, prompt_logprobs=0, extra=b'{"allowed_token_ids": [3, 5, 7, 11, 300, 508]}'
    ),
]


@pytest.mark.parametrize("params", [[GREEDY], SAMPLED, RULED], ids=["greedy", "sampled", "ruled"])
@pytest.mark.parametrize("name", ["odd-vocabulary", "late", "dummy"])
def test_tokens_are_those_of_one_process(
    executors: dict[str, TorchExecutor], checkpoints: dict[str, Path], name: str, params: list[SamplingParams]
) -> None:
    kind, options = EXECUTORS[name]
    sizes = {"cost_model": COST_MODEL, "num_blocks": 64, "block_size": 4, "num_threads": 1}
    alone = TorchExecutor(checkpoints[kind], None, **sizes, **options)
    expected, found = (run_all(executor, table(params)) for executor in (alone, executors[name]))
    assert token_ids(found) == token_ids(expected)
    assert token_ids(run_all(executors[name], table(params), chunk=2)) == token_ids(expected)
    assert len({tuple(tokens) for tokens in token_ids(expected)}) == len(PROMPTS)
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, Completion)
        assert isinstance(other, Completion)
        assert [one.prompt_logprobs is None] == [other.prompt_logprobs is None]
        both = (one.logprobs, other.logprobs), (one.prompt_logprobs, other.prompt_logprobs)
        for ours, theirs in itertools.chain(*(zip(a or (), b or (), strict=True) for a, b in both)):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [i for i, _ in ours.top] == [i for i, _ in theirs.top]


def test_the_cache_is_sized_per_rank(executors: dict[str, TorchExecutor]) -> None:
    # A rank has 2 tensors x 2 layers x 1 head x 16 dimensions x 4 bytes = 256 bytes per token
    executor = executors["sized-in-bytes"]
    assert (executor.num_blocks, executor.max_model_len) == (24, 384)


def test_what_opening_a_rank_raises(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        open_parallel(functools.partial(TorchExecutor, tmp_path, cost_model=COST_MODEL), None, size=2)


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are GPUs")
def test_more_gpus_than_there_are(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="-size 2 needs so many GPUs, and torch finds"):
        open_parallel(TorchExecutor, None, size=2, device="cuda")


def test_parts_of_a_dimension() -> None:
    assert [Part(i, 3).bounds(12) for i in range(3)] == [(0, 4), (4, 8), (8, 12)]
    assert [Part(i, 4).bounds(5) for i in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]
    assert Part(3, 4).size_of(5) == 2


@pytest.mark.parametrize(
    ("changes", "size", "expected"),
    [
        ({"num_key_value_heads": 2}, 2, (2, 1, 64)),
        ({"num_key_value_heads": 2}, 4, (1, 1, 32)),
        ({"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 96}, 2, None),
        ({"intermediate_size": 130}, 4, None),
        ({}, 8, None),
    ],
)
def test_models_divide_evenly_or_not_at_all(
    changes: dict[str, int], size: int, expected: tuple[int, int, int] | None
) -> None:
    config = ModelConfig.from_dict(BASE | changes)
    if expected is None:
        with pytest.raises(ConfigError, match=f"--tensor-parallel-size {size} .* use one of 1"):
            config.of_rank(size)
        return
    part = config.of_rank(size)
    assert (part.num_heads, part.num_kv_heads, part.intermediate_size) == expected
    assert replace(part, num_heads=4, num_kv_heads=2, intermediate_size=128) == config
