"""GGUF files as Hugging Face folders: weights dequantized, config and tokenizer rebuilt from the file's metadata.

Blocks are unpacked by llama.cpp's own package `gguf`. Names, orders and offsets are those of llama.cpp's conversion,
undone. What a file holds beyond what is known here is refused: a model without it would talk nonsense.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from blendserve.errors import ModelError

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader, ReaderTensor

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
"""`general.architecture` of a file to `architectures` and `model_type` of a config; Mistral's files say llama"""

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_NAMES = {"ffn_norm": "pre_feedforward_layernorm"}
_ROPE_KEYS = frozenset(
    {"type", "factor", "original_context_length", "finetuned", "yarn_beta_fast", "yarn_beta_slow"}
)
_LLAMA3_TURNS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""of Llama 3.1 to 3.3; files hold what comes of them"""
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
"""layers of the models that scale scores by the width per head, not by the heads' size; llama.cpp knows them so, too"""
_SHARD_BYTES = 2 << 30
_CHUNK_WEIGHTS = 1 << 26
"""weights that are unpacked at a time"""


def write_folder(path: Path, folder: Path) -> None:
    """Write the model in a GGUF file to a new folder, as transformers would save it.

    Matrices that are quantized become bfloat16, others keep their type; vectors are float32.

    Raises:
        ModelError: the file is broken, or holds something that is not known.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
    except Exception as error:  # whatever a number out of place leads to
        raise ModelError(f"it is broken or no GGUF file ({type(error).__name__}: {error})") from error
    config = read_config(reader)
    folder.mkdir(parents=True)
    weights = _save_weights(reader, config, folder)
    config["dtype"] = str(weights["model.embed_tokens.weight"]).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    ends = {_value(reader, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")} - {None}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": sorted(ends)}) + "\n")
    _save_tokenizer(path, folder)


def read_config(reader: GGUFReader) -> dict[str, Any]:
    """What config.json of the model would say."""
    arch = _value(reader, "general.architecture")
    if arch not in ARCHITECTURES:
        raise ModelError(
            f"its architecture is {arch!r}, and those that can be read are {', '.join(ARCHITECTURES)}"
        )
    architecture, model_type = ARCHITECTURES[arch]
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def optional(key: str, default: Any = None) -> Any:
        value = _value(reader, f"{arch}.{key}")
        return default if value is None else value

    def required(key: str) -> Any:
        if (value := optional(key)) is None:
            raise ModelError(f"its metadata lacks {arch}.{key}")
        return value

    if "token_embd.weight" not in tensors:
        raise ModelError("it lacks token_embd.weight")
    hidden, heads = required("embedding_length"), required("attention.head_count")
    head_dim = optional("attention.key_length", optional("rope.dimension_count", hidden // heads))
    if optional("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"its rotary embedding turns a part of each head ({arch}.rope.dimension_count)")
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "attention_bias": arch != "qwen2" and "blk.0.attn_q.bias" in tensors,
        "bos_token_id": _value(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _value(reader, "tokenizer.ggml.eos_token_id"),
        "head_dim": head_dim,
        "hidden_size": hidden,
        "intermediate_size": required("feed_forward_length"),
        "max_position_embeddings": required("context_length"),
        "num_attention_heads": heads,
        "num_hidden_layers": required("block_count"),
        "num_key_value_heads": optional("attention.head_count_kv", heads),
        "pad_token_id": _value(reader, "tokenizer.ggml.padding_token_id"),
        "rms_norm_eps": required("attention.layer_norm_rms_epsilon"),
        "rope_theta": optional("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "vocab_size": int(tensors["token_embd.weight"].shape[-1]),
    }
    if scaling := _rope_scaling(reader, arch, config, tensors):
        config["rope_scaling"] = scaling
    window = optional("attention.sliding_window")
    if arch.startswith("gemma"):
        config |= _gemma_config(arch, config, optional)
    elif arch == "llama" and window is not None:
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    elif window is not None:
        raise ModelError(
            f"it has a sliding window, which is unknown of {arch} ({arch}.attention.sliding_window)"
        )
    return config


def _gemma_config(arch: str, config: dict[str, Any], optional: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["head_dim"],
        "sliding_window": optional("attention.sliding_window", 4096),
        "attn_logit_softcapping": optional("attn_logit_softcapping", 50.0 if arch == "gemma2" else None),
        "final_logit_softcapping": optional("final_logit_softcapping", 30.0 if arch == "gemma2" else None),
    }
    if config["num_hidden_layers"] == _GEMMA_27B_LAYERS[arch]:
        found["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"]
    pattern = optional("attention.sliding_window_pattern", 2 if arch == "gemma2" else 6)
    if isinstance(pattern, list):
        found["layer_types"] = [
            "sliding_attention" if is_sliding else "full_attention" for is_sliding in pattern
        ]
    else:
        found["sliding_window_pattern"] = pattern
    if arch == "gemma3":
        found["rope_local_base_freq"] = optional("rope.freq_base_swa", 10000.0)
    return found


def _rope_scaling(
    reader: GGUFReader, arch: str, config: dict[str, Any], tensors: dict[str, ReaderTensor]
) -> dict[str, Any] | None:
    """How rotary frequencies are scaled: said by the metadata, or for Llama 3 by a tensor of divisors."""
    prefix = f"{arch}.rope.scaling."
    given = {key.removeprefix(prefix): _value(reader, key) for key in reader.fields if key.startswith(prefix)}
    kind = given.get("type", "none")
    if "rope_freqs.weight" in tensors:
        divisors = np.asarray(tensors["rope_freqs.weight"].data, np.float32)
        return _llama3_scaling(divisors, config["rope_theta"], config["head_dim"])
    if kind == "none":
        return None
    if kind not in ("linear", "yarn") or given.keys() - _ROPE_KEYS:
        raise ModelError(f"its rotary embedding is scaled in a way that is not known: {given}")
    if "factor" not in given:
        raise ModelError(f"its metadata lacks {prefix}factor")
    if kind == "linear":
        return {"rope_type": "linear", "factor": given["factor"]}
    original = given.get("original_context_length", config["max_position_embeddings"])
    betas = {name: given[f"yarn_{name}"] for name in ("beta_fast", "beta_slow") if f"yarn_{name}" in given}
    return {
        "rope_type": "yarn",
        "factor": given["factor"],
        "original_max_position_embeddings": original,
        **betas,
    }


def _llama3_scaling(
    divisors: np.ndarray[Any, np.dtype[np.float32]], theta: float, head_dim: int
) -> dict[str, Any] | None:
    """What config.json said before a conversion made these divisors of it."""
    factor = float(divisors.max())
    if factor == 1.0:
        return None
    low, high, original = _LLAMA3_TURNS.values()
    turns = original * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * np.pi)
    kept = ((turns - low) / (high - low)).clip(0, 1)
    if len(turns) != len(divisors) or not np.allclose(divisors, 1 / (kept + (1 - kept) / factor), rtol=1e-3):
        raise ModelError(
            "its rotary frequencies are scaled in a way that is not Llama 3's (rope_freqs.weight)"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3_TURNS}


def _save_weights(reader: GGUFReader, config: dict[str, Any], folder: Path) -> dict[str, torch.dtype]:
    """Write all weights in files of about `_SHARD_BYTES`, and their index; the dtype of each."""
    from safetensors.torch import save_file

    shard: dict[str, torch.Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    files: dict[str, str] = {}

    def save() -> None:
        name = f"model-{len(set(files.values())) + 1:05}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        files.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in _weights(reader, config):
        shard[name] = tensor
        dtypes[name] = tensor.dtype
        if sum(tensor.nbytes for tensor in shard.values()) >= _SHARD_BYTES:
            save()
    if shard:
        save()
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return dtypes


def _weights(reader: GGUFReader, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of each, as the model's class in transformers has them."""
    import torch

    arch = _value(reader, "general.architecture")
    is_gemma = arch.startswith("gemma")
    layer_names = _LAYER_NAMES | (_GEMMA_NAMES if is_gemma else {})
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            continue
        base, _, suffix = tensor.name.rpartition(".")
        name = _NAMES.get(base)
        if base.startswith("blk."):
            _, layer, part = base.split(".", 2)
            name = f"model.layers.{layer}.{layer_names[part]}" if part in layer_names else None
        if name is None:
            raise ModelError(f"it holds a tensor of an unknown purpose: {tensor.name}")
        values = _unpacked(tensor)
        if arch in ("llama", "smollm3") and name.endswith(("q_proj", "k_proj")):
            # Pairs of dimensions that turn together lie side by side there, here half a head apart.
            heads = config["num_attention_heads" if name.endswith("q_proj") else "num_key_value_heads"]
            values = values[torch.arange(len(values)).view(heads, -1, 2).transpose(1, 2).flatten()]
        if is_gemma and base.endswith("norm"):
            values -= 1  # the 1 of 1 + weight is added there
        yield f"{name}.{suffix}", values


def _unpacked(tensor: ReaderTensor) -> torch.Tensor:
    import torch
    from gguf import GGMLQuantizationType, dequantize

    shape = tuple(int(size) for size in reversed(tensor.shape))
    plain = {GGMLQuantizationType.F32: torch.float32, GGMLQuantizationType.F16: torch.float16}
    dtype = torch.float32 if len(shape) == 1 else plain.get(tensor.tensor_type, torch.bfloat16)
    values = torch.empty(shape, dtype=dtype)
    rows = max(1, _CHUNK_WEIGHTS // shape[-1]) if len(shape) > 1 else shape[0]
    for start in range(0, shape[0], rows):
        part = tensor.data[start : start + rows] if len(shape) > 1 else tensor.data
        try:
            unpacked = dequantize(part, tensor.tensor_type)
        except NotImplementedError as error:
            raise ModelError(f"{tensor.name} is of a type that cannot be read: {error}") from error
        values[start : start + rows] = torch.from_numpy(np.array(unpacked, np.float32))
    return values


def _save_tokenizer(path: Path, folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # transformers and tokenizers raise what they like
        raise ModelError(f"its tokenizer cannot be read ({type(error).__name__}: {error})") from error
    tokenizer.save_pretrained(folder)


def _value(reader: GGUFReader, key: str) -> Any:
    """A value of the metadata; None: it is not there."""
    field = reader.get_field(key)
    return None if field is None else field.contents()
