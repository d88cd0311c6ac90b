"""GGUF files written as llama.cpp's conversion does, of every architecture and type of quantization, read back."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("transformers")

import gguf
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GgufConfig
from transformers.convert_slow_tokenizer import bytes_to_unicode

from blendserve.engines.native.model import LlamaModel, ModelConfig
from blendserve.errors import ModelError
from blendserve.models import resolve_model
from blendserve.tokenizer import Tokenizer
from tests.unit.native.test_model import BASE, check_against_transformers, sharing_sequences

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
LLAMA_NORMS = {"post_attention_layernorm": "ffn_norm"}
GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
SCALES = {Type.Q4_K: slice(0, 4), Type.Q5_K: slice(0, 4), Type.Q6_K: slice(208, 210)}
"""where a block has its fp16 scales, of types that the package only unpacks"""
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}


def packed(weight: np.ndarray, kind: Type, rng: np.random.Generator) -> np.ndarray:
    """Blocks of a matrix; of the types that cannot be made here, blocks of noise in a usual range."""
    if kind not in SCALES:
        return gguf.quantize(weight, kind)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (weight.size // block_size, block_bytes)).astype(np.uint8)
    scales = rng.uniform(1e-4, 1e-3, (len(blocks), 2)).astype(np.float16).view(np.uint8)
    where = SCALES[kind]
    blocks[:, where] = scales[:, : where.stop - where.start]
    return blocks.reshape(len(weight), -1)


def write_gguf(
    folder: Path, path: Path, kind: Type = Type.F16, metadata: Mapping[str, Any] | None = None
) -> dict[str, torch.Tensor]:
    """Write the model in a folder as one file; the weights that are in it."""
    raw = json.loads((folder / "config.json").read_text())
    arch = {"gemma3_text": "gemma3", "mistral": "llama"}.get(raw["model_type"], raw["model_type"])
    writer = gguf.GGUFWriter(path, arch)
    heads, kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
    head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    rope = raw["rope_parameters"]
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_string(f"{arch}.rope.scaling.type", rope["rope_type"])
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, head_dim))
    if raw.get("sliding_window"):
        writer.add_sliding_window(raw["sliding_window"])
    if raw.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(raw["attn_logit_softcapping"])
    if raw.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(raw["final_logit_softcapping"])
    for key, value in (metadata or {}).items():
        writer.add_key_value(f"{arch}.{key}", value, gguf.GGUFValueType.get_type(value))
    add_tokenizer(writer, raw["vocab_size"])

    rng, in_file = np.random.default_rng(0), {}
    norms = GEMMA_NORMS if arch.startswith("gemma") else LLAMA_NORMS
    for name, weight in load_file(folder / "model.safetensors").items():
        base, suffix = name.rsplit(".", 1)
        layer, part = "", base
        if base.startswith("model.layers."):
            _, _, number, part = base.split(".", 3)
            layer = f"blk.{number}."
        to = f"{layer}{(NAMES | norms)[part]}.{suffix}"
        values = weight.numpy().copy()
        is_turned = arch in ("llama", "smollm3") and part.endswith(("q_proj", "k_proj"))
        num_heads = heads if part.endswith("q_proj") else kv_heads
        if is_turned:
            values = values.reshape(num_heads, 2, head_dim // 2, -1).swapaxes(1, 2).reshape(values.shape)
        if arch.startswith("gemma") and part.endswith("norm"):
            values = values + 1
        if values.ndim == 1:
            writer.add_tensor(to, values)
        else:
            blocks = packed(values, kind, rng)
            writer.add_tensor(to, blocks, raw_dtype=kind)
            values = gguf.dequantize(blocks, kind)
        if is_turned:
            values = values.reshape(num_heads, head_dim // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)
        if arch.startswith("gemma") and part.endswith("norm"):
            values = values - 1
        in_file[name] = torch.from_numpy(values.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return in_file


def llama3_divisors(rope: Mapping[str, Any], head_dim: int) -> np.ndarray:
    """What the conversion of Llama 3 writes for its rotary scaling."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (i / head_dim)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = rope["original_max_position_embeddings"] / wavelength
        smooth = min(max((turns - low) / (high - low), 0), 1)
        divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors, np.float32)


def add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """All bytes, one merge, and tokens that end the output."""
    special = ["<|start|>", "<|end|>", "<|turn|>"]
    tokens = [*special, *bytes_to_unicode().values(), "he"]
    tokens += [f"<|unused{i}|>" for i in range(vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_merges(["h e"])
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}<|turn|>{% endfor %}")


MODELS = {
    "llama": ("llama", {}),
    "llama-untied-biased": ("llama", {"attention_bias": True}),
    "llama3-tied": ("llama", {"head_dim": 128, "rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama-linear-rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "mistral-window": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 4}),
    "gemma2-tied": ("gemma2", {"query_pre_attn_scalar": 16, "tie_word_embeddings": True}),
    "gemma3-tied": (
        "gemma3",
        {
            "query_pre_attn_scalar": 16,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_file_is_the_model_that_it_was_made_of(
    make_tiny_model: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    """In fp16, in which these weights lose little: the same config, weights, and logits."""
    kind, changes = MODELS[name]
    folder = make_tiny_model(kind, tmp_path / "model", **changes)
    in_file = write_gguf(folder, tmp_path / "model.gguf")
    files = resolve_model(str(tmp_path / "model.gguf"), cache_dir=tmp_path / "cache")
    assert files.folder is not None
    ours, original = (ModelConfig.from_folder(path) for path in (files.folder, folder))
    assert replace(ours, rms_norm_eps=original.rms_norm_eps) == original
    assert ours.rms_norm_eps == pytest.approx(original.rms_norm_eps)
    weights = load_file(files.folder / "model-00001.safetensors")
    assert weights.keys() == in_file.keys()
    for tensor, expected in in_file.items():
        assert torch.equal(weights[tensor].float(), expected), tensor
    check_against_transformers(
        files.folder,
        sharing_sequences(512)[:2],
        dtype=torch.float32,
        block_size=16,
        backend="torch",
        chunks=[33, 1],
    )


RELEASED_GEMMA = {"head_dim": 256, "query_pre_attn_scalar": 256, "tie_word_embeddings": True}
"""transformers takes these of the models, not of the files"""


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 128}),
        ("gemma2", RELEASED_GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
        ("gemma3", RELEASED_GEMMA | {"layer_types": ["sliding_attention"] * 2}),
    ],
)
def test_transformers_reads_the_same_out_of_a_file(
    make_tiny_model: Callable[..., Path], tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    """So the files of these tests are such as llama.cpp writes, as far as transformers knows them."""
    write_gguf(make_tiny_model(kind, tmp_path / "model", **changes), tmp_path / "model.gguf")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file="model.gguf",
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    folder = resolve_model(str(tmp_path / "model.gguf"), cache_dir=tmp_path / "cache").folder
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor(sharing_sequences(512)[:1])
    with torch.inference_mode():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "kind",
    [Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, *SCALES],
    ids=lambda kind: kind.name,
)
def test_types_of_quantization(
    make_tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Type
) -> None:
    """What gguf unpacks, and what in bfloat16 is left of that; in parts, and in several files."""
    monkeypatch.setattr("blendserve.gguf_files._CHUNK_WEIGHTS", 3 * 256)
    monkeypatch.setattr("blendserve.gguf_files._SHARD_BYTES", 500_000)
    folder = make_tiny_model(
        "llama", tmp_path / "model", hidden_size=256, intermediate_size=512, num_attention_heads=16
    )
    in_file = write_gguf(folder, tmp_path / "model.gguf", kind)
    converted = resolve_model(str(tmp_path / "model.gguf"), cache_dir=tmp_path / "cache").folder
    assert converted is not None
    assert len(list(converted.glob("*.safetensors"))) > 1
    config = ModelConfig.from_folder(converted)
    model = LlamaModel.load(converted, config, torch.float32)
    dtype = {Type.F32: torch.float32, Type.F16: torch.float16}.get(kind, torch.bfloat16)
    expected = in_file["model.embed_tokens.weight"].to(dtype).float()
    assert torch.equal(model.embedding, expected)
    assert expected.std() > 0.01
    weights: dict[str, torch.Tensor] = {}
    for path in converted.glob("*.safetensors"):
        weights |= load_file(path)
    assert weights.keys() == in_file.keys()
    for name, weight in weights.items():
        assert weight.dtype == (torch.float32 if weight.ndim == 1 else dtype)
        assert torch.equal(weight, in_file[name].to(weight.dtype)), name


def test_the_tokenizer_of_a_file(make_tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    write_gguf(make_tiny_model("smollm3", tmp_path / "model"), tmp_path / "model.gguf")
    folder = resolve_model(str(tmp_path / "model.gguf"), cache_dir=tmp_path / "cache").folder
    assert folder is not None
    tokenizer = Tokenizer(folder)
    assert tokenizer.eos_token_ids == {1, 2}
    assert tokenizer.vocab_size == 512
    ids = list(tokenizer.encode("he ate<|turn|>"))
    assert (len(ids), ids[-1]) == (6, 2)


@pytest.mark.parametrize(
    ("kind", "metadata", "message"),
    [
        ("llama", {"rope.scaling.type": "longrope"}, "scaled in a way that is not known"),
        ("qwen2", {"rope.scaling.type": "yarn"}, "lacks qwen2.rope.scaling.factor"),
        ("qwen2", {"attention.sliding_window": 32}, "a sliding window, which is unknown of qwen2"),
    ],
)
def test_what_is_not_known_is_refused(
    make_tiny_model: Callable[..., Path], tmp_path: Path, kind: str, metadata: dict[str, Any], message: str
) -> None:
    write_gguf(make_tiny_model(kind, tmp_path / "model"), tmp_path / "model.gguf", metadata=metadata)
    with pytest.raises(ModelError, match=f"model.gguf.*{message}.*pass the original"):
        resolve_model(str(tmp_path / "model.gguf"), cache_dir=tmp_path / "cache")


def test_other_architectures_and_tensors_are_refused(
    make_tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model("llama", tmp_path / "model")
    monkeypatch.setitem(NAMES, "self_attn.v_proj", "attn_w")
    write_gguf(folder, tmp_path / "tensor.gguf")
    with pytest.raises(ModelError, match=r"unknown purpose: blk\.0\.attn_w\.weight"):
        resolve_model(str(tmp_path / "tensor.gguf"), cache_dir=tmp_path / "cache")
    writer = gguf.GGUFWriter(tmp_path / "arch.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        ModelError, match=r"architecture is 'mamba', and those that can be read are llama, .*gemma3"
    ):
        resolve_model(str(tmp_path / "arch.gguf"), cache_dir=tmp_path / "cache")


def test_frequencies_that_are_not_llama3s_are_refused(
    make_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    changed = LLAMA3_ROPE | {"original_max_position_embeddings": 4096}
    folder = make_tiny_model("llama", tmp_path / "model", head_dim=128, rope_parameters=changed)
    write_gguf(folder, tmp_path / "model.gguf")
    with pytest.raises(ModelError, match="not Llama 3's"):
        resolve_model(str(tmp_path / "model.gguf"), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(("arch", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemmas_scale_by_their_width(arch: str, layers: int) -> None:
    from blendserve import gguf_files

    sizes = {"num_hidden_layers": layers, "hidden_size": 5376, "num_attention_heads": 32, "head_dim": 128}
    found = gguf_files._gemma_config(arch, sizes, lambda _key, default=None: default)
    assert found["query_pre_attn_scalar"] == 168
    smaller = gguf_files._gemma_config(
        arch, sizes | {"num_hidden_layers": 26}, lambda _key, default=None: default
    )
    assert smaller["query_pre_attn_scalar"] == 128
    assert (
        ModelConfig.from_dict(BASE | {"architectures": ["Gemma2ForCausalLM"]} | found).attention_scale
        == 168**-0.5
    )
