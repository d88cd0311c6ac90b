"""vLLM for the tests of this folder: opening an engine takes most of a minute, so there are two for all of them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blendserve.cost_model import CostModel, HardwareSpec
from tests.workload import TINY

COST_MODEL = CostModel(TINY, HardwareSpec.load("cpu-2core-avx2"))


@pytest.fixture(scope="session")
def vllm_model(make_tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its CPU kernels have no head size of 16."""
    pytest.importorskip("vllm")
    path = tmp_path_factory.mktemp("vllm") / "tiny"
    folder: Path = make_tiny_model("llama", path, with_tokenizer=True, head_dim=32)
    return folder


@pytest.fixture(scope="session")
def open_vllm(vllm_model: Path) -> Callable[..., Any]:
    """A new engine, with room for some requests; whoever asks for it closes it."""

    def make(**changes: Any) -> Any:
        from blendserve.engines.vllm import VLLMEngine

        sizes: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64}
        engine_args = {"num_gpu_blocks_override": 33, "enforce_eager": True} | changes.pop("engine_args", {})
        return VLLMEngine(
            vllm_model, COST_MODEL, dtype="float32", engine_args=engine_args, **(sizes | changes)
        )

    return make


@pytest.fixture(scope="session")
def roomy_vllm(open_vllm: Callable[..., Any]) -> Iterator[Any]:
    engine = open_vllm()
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def tight_vllm(open_vllm: Callable[..., Any]) -> Iterator[Any]:
    """With little more KV cache than a request needs, and no tokenizer."""
    engine = open_vllm(
        max_model_len=96,
        max_num_seqs=5,
        max_num_batched_tokens=32,
        engine_args={"num_gpu_blocks_override": 5, "skip_tokenizer_init": True},
    )
    yield engine
    engine.close()
