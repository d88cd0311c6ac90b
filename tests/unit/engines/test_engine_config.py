"""What an engine's configuration means before an engine is opened."""

import importlib.util
from pathlib import Path

import pytest

from blendserve.engines import EngineConfig, EngineName
from blendserve.errors import ConfigError, ModelError
from blendserve.models import ModelFiles, resolve_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 512,
}


def test_a_gpu_has_its_own_defaults() -> None:
    files = ModelFiles("tiny", None, CONFIG)
    on_cpu, on_gpu = (EngineConfig(device=device).cost_model(files) for device in ("cpu", "cuda"))
    assert (on_cpu.hardware.name, on_cpu.hardware.block_size) == ("cpu-2core-avx2", 32)
    assert (on_gpu.hardware.name, on_gpu.hardware.block_size) == ("h200-estimate", 64)
    assert on_gpu.model.bytes_per_kv_element == 2
    # A profile with blocks that the kernels do not have does not change theirs; who asks for a size gets it.
    assert EngineConfig(device="cuda", hardware="a100-80g-paper").hardware_spec().block_size == 64
    assert EngineConfig(device="cuda", block_size=32).hardware_spec().block_size == 32


@pytest.mark.parametrize("options", [{"device": "cuda"}, {"load_format": "dummy"}, {"overlap": "off"}])
@pytest.mark.parametrize("engine", ["simulated", "openai"])
def test_other_engines_have_no_device(engine: str, options: dict[str, str]) -> None:
    [(name, value)] = options.items()
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} {value} is for --engine native"):
        EngineConfig(engine=engine, base_url="http://localhost/v1", **options).check()


def test_without_triton_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"blendserve\[cuda\]"):
        EngineConfig(device="cuda").check()
    EngineConfig(device="auto").check()


def test_random_weights_need_no_files_of_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path), with_weights=False).folder == tmp_path
    with pytest.raises(ModelError, match="safetensors"):
        resolve_model(str(tmp_path))


def test_devices_that_run_a_model_together_add_up() -> None:
    files = ModelFiles("tiny", None, CONFIG | {"num_key_value_heads": 2})
    one, four = (EngineConfig(device="cuda", tensor_parallel_size=n).cost_model(files) for n in (1, 4))
    assert four.hardware.name == "4 x h200-estimate"
    assert four.hardware.flops == 4 * one.hardware.flops
    assert four.hardware.bandwidth == 4 * one.hardware.bandwidth
    assert float(four.compute_s(100, 100)) == pytest.approx(float(one.compute_s(100, 100)) / 4)
    # There are two KV heads, each on two of the devices: they hold and read the KV of two.
    assert four.kv_capacity_tokens == 2 * one.kv_capacity_tokens
    assert float(four.memory_s(100, 100)) == pytest.approx(float(one.memory_s(100, 100)) / 2)
    modelled = EngineConfig(engine="simulated", tensor_parallel_size=4).cost_model(files)
    assert modelled.hardware.name == "4 x a100-80g-paper"


@pytest.mark.parametrize("engine", ["native", "vllm", "sglang", "openai", "simulated"])
def test_keys_and_values_have_the_size_of_the_dtype(engine: EngineName) -> None:
    """A profile measured in float32 says nothing about a simulation with half the bytes."""
    files = ModelFiles("tiny", None, CONFIG)
    wide, narrow = (
        EngineConfig(engine=engine, dtype=dtype).cost_model(files).model for dtype in ("float32", "bfloat16")
    )
    assert wide.bytes_per_kv_element == 2 * narrow.bytes_per_kv_element == 4
    assert wide.bytes_per_weight == 2 * narrow.bytes_per_weight == 4


def test_ranks_on_a_cpu_divide_it() -> None:
    files = ModelFiles("tiny", None, CONFIG)
    one, two = (EngineConfig(tensor_parallel_size=n).cost_model(files) for n in (1, 2))
    assert one == two
    two = EngineConfig(tensor_parallel_size=2, kv_cache_memory=1 << 20).cost_model(files)
    assert two.hardware.kv_cache_bytes == 2 << 20


def test_models_that_cannot_be_divided_are_refused_before_anything_is_read() -> None:
    files = ModelFiles("tiny", None, CONFIG)
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 3 .* use one of 1, 2, 4$"):
        EngineConfig(tensor_parallel_size=3).cost_model(files)
    with pytest.raises(ConfigError, match="--tensor-parallel-size 2 does nothing with --engine openai"):
        EngineConfig(engine="openai", base_url="http://localhost/v1", tensor_parallel_size=2).check()
