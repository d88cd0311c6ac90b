"""What an engine's configuration means before an engine is opened."""

import importlib.util
from pathlib import Path

import pytest

from blendserve.engines import EngineConfig
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
