"""Decoder-only models of the Llama type: configuration, weights and the forward pass of one step.

| model | differs from Llama in |
| --- | --- |
| Llama 2 and 3, SmolLM2 | |
| Mistral | a sliding window |
| Qwen2, Qwen2.5 | biases of the projections of queries, keys and values |
| Qwen3 | queries and keys normalised per head |
| SmolLM3 | layers without rotary embedding |
| Gemma 2 | embeddings scaled, norms of 1 + weight, also of what attention and MLP add, GELU, capped scores and logits |
| Gemma 3 | the same without caps, Qwen3's norms, other rotary embeddings in layers with a window |

Any of them may have tied embeddings, biases, windows by layer and scaled rotary embeddings, as its config says. What a
checkpoint asks for beyond that is refused, never ignored.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from blendserve.engines.native import check_tensor_parallel_size
from blendserve.engines.native.attention import AttentionRules, PagedAttention, StepLayout
from blendserve.engines.native.kernels import load_kernels
from blendserve.engines.native.parallel import Part, Ranks
from blendserve.errors import ModelError
from blendserve.models import CONFIG_DEFAULTS, SUPPORTED_ARCHITECTURES, check_supported, max_positions

CPU = torch.device("cpu")
LOGITS_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
"""logits held at a time, counted in fp32, by kind of device: the head runs over this much and no more"""
WHOLE = Part(0, 1)
DUMMY_WEIGHT_SCALE = 0.02
"""standard deviation of random weights"""


@dataclass(frozen=True, slots=True)
class Variant:
    """What an architecture has that Llama does not, and that no key of its config says."""

    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    is_gemma: bool = False


VARIANTS = {
    "LlamaForCausalLM": Variant(),
    "MistralForCausalLM": Variant(),
    "Qwen2ForCausalLM": Variant(has_qkv_bias=True),
    "Qwen3ForCausalLM": Variant(has_qk_norm=True),
    "SmolLM3ForCausalLM": Variant(),
    "Gemma2ForCausalLM": Variant(is_gemma=True),
    "Gemma3ForCausalLM": Variant(has_qk_norm=True, is_gemma=True),
}
assert VARIANTS.keys() == set(SUPPORTED_ARCHITECTURES)

ROPE_KINDS = ("default", "dynamic", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary embedding: how far each pair of dimensions turns per position.

    Long contexts divide frequencies by `factor`: "linear" all of them, "llama3" and "yarn" those of few turns in the
    original context, with a passage between `low_turns` and `high_turns`: along turns, or along dimensions. "dynamic"
    does so only beyond `max_position_embeddings`, where nothing runs. Source: transformers, modeling_rope_utils.py.
    """

    kind: str = "default"
    """one of `ROPE_KINDS`, or "none": nothing turns"""
    theta: float = 10000.0
    factor: float = 1.0
    low_turns: float = 1.0
    high_turns: float = 1.0
    original_max_positions: int = 0
    truncate: bool = True
    """of yarn: the passage begins and ends at whole dimensions"""
    amplitude: float = 1.0
    """of yarn: factor of cosines and sines"""

    def frequencies(self, head_dim: int) -> Tensor:  # [head_dim / 2] fp32
        """Radians per position of each pair of dimensions."""
        plain = self.theta ** (-torch.arange(0, head_dim, 2).float() / head_dim)
        if self.kind == "none":
            return torch.zeros_like(plain)
        if self.kind in ("default", "dynamic"):
            return plain
        if self.kind == "linear":
            return plain / self.factor
        # kept: 0 where a frequency is low and gets divided, 1 where it is high and stays.
        if self.kind == "llama3":
            turns = self.original_max_positions * plain / (2 * math.pi)
            kept = (turns - self.low_turns) / (self.high_turns - self.low_turns)
        else:
            first, last = (self._dimension(head_dim, turns) for turns in (self.high_turns, self.low_turns))
            if self.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, head_dim - 1)
            kept = 1 - (torch.arange(head_dim // 2).float() - first) / ((last - first) or 0.001)
        kept = kept.clamp(0, 1)
        return plain * (kept + (1 - kept) / self.factor)

    def _dimension(self, head_dim: int, turns: float) -> float:
        """Pair of dimensions that makes so many turns in the original context."""
        positions_per_radian = self.original_max_positions / (turns * 2 * math.pi)
        return head_dim * math.log(positions_per_radian) / (2 * math.log(self.theta))


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the forward pass needs to know, read from a checkpoint's `config.json`."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    ropes: tuple[Rope, ...]
    """by layer"""
    windows: tuple[int | None, ...]
    """by layer: keys that a query sees, see `AttentionRules`"""
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    is_gemma: bool
    attention_scale: float
    attention_soft_cap: float | None
    logit_soft_cap: float | None
    max_model_len: int

    @classmethod
    def from_folder(cls, folder: Path, max_model_len: int | None = None) -> ModelConfig:
        """Read `config.json`.

        Args:
            folder: the checkpoint.
            max_model_len: longest sequence that will run; None for what the checkpoint allows.

        Raises:
            ModelError: the file is missing or broken, or asks for something the native engine does not implement.
        """
        path = folder / "config.json"
        try:
            raw = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot read {path}: {error}; --model must name a checkpoint folder") from error
        return cls.from_dict(raw, max_model_len)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], max_model_len: int | None = None) -> ModelConfig:
        """The same from the parsed JSON."""
        check_supported(raw)
        architecture = next(name for name in SUPPORTED_ARCHITECTURES if name in raw["architectures"])
        variant = VARIANTS[architecture]
        raw = CONFIG_DEFAULTS[architecture] | dict(raw)
        _refuse_what_is_missing(raw, variant)
        try:
            limit = max_positions(raw)
            if max_model_len is not None and max_model_len > limit:
                raise ModelError(f"max_model_len {max_model_len} exceeds the model's {limit} positions")
            limit = max_model_len or limit
            num_layers, num_heads = int(raw["num_hidden_layers"]), int(raw["num_attention_heads"])
            head_dim = int(raw.get("head_dim") or raw["hidden_size"] // num_heads)
            # A window that no sequence outgrows is none.
            window = int(raw.get("sliding_window") or limit)
            has_window = [
                window < limit and _is_sliding(raw, architecture, layer) for layer in range(num_layers)
            ]
            bias = bool(raw.get("attention_bias", False))
            return cls(
                architecture=architecture,
                vocab_size=int(raw["vocab_size"]),
                hidden_size=int(raw["hidden_size"]),
                intermediate_size=int(raw["intermediate_size"]),
                num_layers=num_layers,
                num_heads=num_heads,
                num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
                head_dim=head_dim,
                rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
                ropes=tuple(_rope(raw, architecture, layer) for layer in range(num_layers)),
                windows=tuple(window if has else None for has in has_window),
                tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
                qkv_bias=bias or variant.has_qkv_bias,
                output_bias=bias,
                mlp_bias=bool(raw.get("mlp_bias", False)),
                qk_norm=variant.has_qk_norm,
                is_gemma=variant.is_gemma,
                attention_scale=float(raw.get("query_pre_attn_scalar") or head_dim) ** -0.5,
                attention_soft_cap=raw.get("attn_logit_softcapping"),
                logit_soft_cap=raw.get("final_logit_softcapping"),
                max_model_len=limit,
            )
        except KeyError as error:
            raise ModelError(f"the model's config.json lacks {error}") from error
        except (TypeError, ValueError, IndexError) as error:
            raise ModelError(
                f"a value of the model's config.json is not what is expected: {error}"
            ) from error

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Widths of the queries, keys and values of one token."""
        kv_size = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, kv_size, kv_size

    def of_rank(self, size: int) -> ModelConfig:
        """What each of `size` tensor-parallel ranks has of the model; KV heads are copied where they are fewer.

        Raises:
            ConfigError: its sizes do not divide.
        """
        check_tensor_parallel_size(size, self.num_heads, self.num_kv_heads, self.intermediate_size)
        return replace(
            self,
            num_heads=self.num_heads // size,
            num_kv_heads=max(self.num_kv_heads // size, 1),
            intermediate_size=self.intermediate_size // size,
        )

    @property
    def num_matrix_weights(self) -> int:
        """Weights that take memory: embedding and head, which are two copies also where they are one, and layers."""
        queries, keys, values = self.qkv_sizes
        layer = (2 * queries + keys + values + 3 * self.intermediate_size) * self.hidden_size
        return self.num_layers * layer + 2 * self.vocab_size * self.hidden_size

    @property
    def attention_rules(self) -> AttentionRules:
        """How the layers attend."""
        tables = list(dict.fromkeys(self.ropes))
        return AttentionRules(
            scale=self.attention_scale,
            soft_cap=self.attention_soft_cap,
            windows=self.windows,
            rope_tables=tuple(tables.index(rope) for rope in self.ropes),
        )

    def rope_tables(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of every position: two tensors [num_tables, max_model_len, head_dim / 2] fp32."""
        ropes = dict.fromkeys(self.ropes)
        frequencies = torch.stack([rope.frequencies(self.head_dim) for rope in ropes])[:, None]
        amplitudes = torch.tensor([rope.amplitude for rope in ropes])[:, None, None]
        angles = torch.arange(self.max_model_len).float()[:, None] * frequencies
        return angles.cos().mul_(amplitudes), angles.sin_().mul_(amplitudes)


def _refuse(what: str) -> None:
    raise ModelError(f"the native engine does not implement {what}; use --engine vllm for this model")


def _refuse_what_is_missing(raw: Mapping[str, Any], variant: Variant) -> None:
    """Keys that ask for something this file does not compute."""
    key, known = ("hidden_activation", "gelu_pytorch_tanh") if variant.is_gemma else ("hidden_act", "silu")
    if raw.get(key) not in (None, known):
        _refuse(f"the activation {raw[key]!r}")
    if raw.get("quantization_config"):
        _refuse("quantized weights (quantization_config)")
    if raw.get("use_bidirectional_attention"):
        _refuse("attention to later tokens (use_bidirectional_attention)")
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        _refuse("rotary embedding of a part of each head (partial_rotary_factor)")
    if variant.is_gemma and variant.has_qk_norm and raw.get("attn_logit_softcapping"):
        _refuse("Gemma 3 with attn_logit_softcapping, which transformers leaves out")
    if unknown := set(raw.get("layer_types") or ()) - {"full_attention", "sliding_attention"}:
        _refuse(f"layers of type {', '.join(sorted(unknown))}")


def _is_sliding(raw: Mapping[str, Any], architecture: str, layer: int) -> bool:
    """Whether the attention of a layer has the config's window."""
    if raw.get("use_sliding_window") is False:
        return False
    if layer_types := raw.get("layer_types"):
        return bool(layer_types[layer] == "sliding_attention")
    match architecture:
        case "MistralForCausalLM":
            return True
        case "Gemma2ForCausalLM" | "Gemma3ForCausalLM":
            return (layer + 1) % int(raw["sliding_window_pattern"]) != 0
        case "SmolLM3ForCausalLM":
            return not _turns(raw, layer)
        case "Qwen2ForCausalLM" | "Qwen3ForCausalLM":
            return layer >= int(raw["max_window_layers"])
    return False


def _turns(raw: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer of SmolLM3 has a rotary embedding."""
    if (layers := raw.get("no_rope_layers")) is not None:
        return bool(layers[layer])
    return (layer + 1) % int(raw["no_rope_layer_interval"]) != 0


def _rope(raw: Mapping[str, Any], architecture: str, layer: int) -> Rope:
    """The rotary embedding of a layer.

    transformers 5 writes all into `rope_parameters`, by type of layer if they differ; before, there was `rope_theta`,
    with `rope_scaling`, and for Gemma 3's layers with a window `rope_local_base_freq`.
    """
    if architecture == "SmolLM3ForCausalLM" and not _turns(raw, layer):
        return Rope("none")
    is_sliding = _is_sliding(raw, architecture, layer)
    parameters = raw.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in parameters.values()):
        parameters = parameters["sliding_attention" if is_sliding else "full_attention"]
    elif is_sliding and "rope_local_base_freq" in raw:
        return Rope(theta=float(raw["rope_local_base_freq"]))
    else:
        parameters = {"rope_theta": raw["rope_theta"]} | (raw.get("rope_scaling") or {}) | parameters
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ROPE_KINDS:
        _refuse(f"rope scaling of type {kind!r}")
    rope = Rope(kind, float(parameters["rope_theta"]))
    if kind not in ("default", "dynamic"):
        rope = replace(rope, factor=float(parameters["factor"]))
    if kind in ("llama3", "yarn"):
        original = parameters.get("original_max_position_embeddings") or raw["max_position_embeddings"]
        rope = replace(rope, original_max_positions=int(original))
    if kind == "llama3":
        return replace(
            rope,
            low_turns=float(parameters["low_freq_factor"]),
            high_turns=float(parameters["high_freq_factor"]),
        )
    if kind == "yarn":
        return replace(
            rope,
            low_turns=float(parameters.get("beta_slow") or 1),
            high_turns=float(parameters.get("beta_fast") or 32),
            truncate=bool(parameters.get("truncate", True)),
            amplitude=_yarn_amplitude(parameters),
        )
    return rope


def _yarn_amplitude(parameters: Mapping[str, Any]) -> float:
    if (given := parameters.get("attention_factor")) is not None:
        return float(given)
    growth = 0.1 * math.log(max(float(parameters["factor"]), 1.0))
    mscale, of_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and of_all:
        return float((mscale * growth + 1) / (of_all * growth + 1))
    return growth + 1


class Linear:
    """`x @ weight.T + bias`, on a CPU with the weight packed: in fp32 for our own kernel, else for oneDNN.

    Packing is worth 1.2 to 3 times on the few rows of a decode step and a little on many. With `ranks`, which hold
    different inputs and their columns of the weight, the result is the sum of theirs; one of them has the bias.
    """

    PACKED_FOR_ROWS = 256

    def __init__(
        self,
        weight: Tensor,  # [num_outputs, num_inputs]
        bias: Tensor | None = None,  # [num_outputs]
        ranks: Ranks | None = None,
    ) -> None:
        self.weight, self.bias, self.ranks = weight, bias, ranks
        self._multiply: Callable[[Tensor, Tensor | None], Tensor] = self._unpacked
        if weight.device.type != "cpu" or (weight.dtype == torch.bfloat16 and not _has_fast_bf16()):
            return
        if weight.dtype == torch.float32 and (kernels := load_kernels(torch.float32)) is not None:
            packed = kernels.pack(weight, bias)
            self.weight, self.bias = packed.weight, packed.bias
            self._multiply = functools.partial(kernels.linear, packed)
            return
        try:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, self.PACKED_FOR_ROWS)
            self._multiply = self._by_onednn
        except (AttributeError, RuntimeError):
            pass  # not an interface that torch promises

    def __call__(
        self,
        x: Tensor,  # [num_rows, num_inputs]
        out: Tensor | None = None,  # [num_rows, num_outputs]
    ) -> Tensor:  # [num_rows, num_outputs]
        """Apply to every row; the result is in `out` where that is given."""
        result = self._multiply(x, out)
        return result if self.ranks is None else self.ranks.all_reduce(result)

    def _by_onednn(self, x: Tensor, out: Tensor | None) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return result if out is None else out.copy_(result)

    def _unpacked(self, x: Tensor, out: Tensor | None) -> Tensor:
        if out is None:
            return F.linear(x, self.weight, self.bias)
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)


def _has_fast_bf16() -> bool:
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False


class RMSNorm:
    """Root mean square normalisation of the last dimension, in fp32 whatever the dtype.

    With `unit_offset`, as in Gemma, the factors are 1 + weight and are applied before the result is rounded.
    """

    def __init__(
        self,
        weight: Tensor,  # [size]
        eps: float,
        unit_offset: bool = False,
    ) -> None:
        self.weight = weight
        self.eps = eps
        self.unit_offset = unit_offset

    def __call__(
        self,
        x: Tensor,  # [..., size]
    ) -> Tensor:  # like x
        """Normalise."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.unit_offset:
            return (wide * (1 + self.weight.float())).to(x.dtype)
        return self.weight * wide.to(x.dtype)


class LayerOps(Protocol):
    """What a layer does between its products and its attention."""

    def add_rms_norm(
        self,
        residual: Tensor,  # [num_rows, size]
        delta: Tensor | None,  # like residual
        norm: RMSNorm,
    ) -> Tensor:  # like residual
        """Add `delta` to `residual` in place, and normalise the sum."""
        ...

    def silu_mul(
        self,
        gate_up: Tensor,  # [num_rows, 2 * size]
    ) -> Tensor:  # [num_rows, size]
        """SiLU of the first half of every row, times the second."""
        ...

    def gelu_mul(
        self,
        gate_up: Tensor,  # [num_rows, 2 * size]
    ) -> Tensor:  # [num_rows, size]
        """GELU, in its form with tanh, of the first half of every row, times the second."""
        ...


class TorchOps:
    """`LayerOps` by torch, on any device."""

    def add_rms_norm(self, residual: Tensor, delta: Tensor | None, norm: RMSNorm) -> Tensor:
        """See `LayerOps.add_rms_norm`."""
        return norm(residual if delta is None else residual.add_(delta))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `LayerOps.silu_mul`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """See `LayerOps.gelu_mul`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder layer, in the order of their use."""

    input_norm: RMSNorm
    qkv: Linear
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    output: Linear
    output_norm: RMSNorm | None
    """of what attention adds"""
    mlp_norm: RMSNorm
    gate_up: Linear
    down: Linear
    down_norm: RMSNorm | None
    """of what the MLP adds"""


class LlamaModel:
    """A Llama-type model, or one rank's part of it; see `forward`.

    With `ranks`, `config` is that of a rank; `embedding` and `head` are its part of the vocabulary, padded.
    """

    def __init__(
        self,
        config: ModelConfig,
        embedding: Tensor,  # [vocab_size, hidden_size]
        layers: list[Layer],
        norm: RMSNorm,
        head: Linear,
        ops: LayerOps,
        ranks: Ranks | None = None,
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head
        self.ops = ops
        self.dtype = embedding.dtype
        self.embedding_scale: float | None = None
        if config.is_gemma:  # rounded to the dtype, as the models were trained
            self.embedding_scale = torch.tensor(config.hidden_size**0.5, dtype=self.dtype).item()
        logits_bytes = LOGITS_BYTES.get(embedding.device.type, LOGITS_BYTES["cpu"])
        self.rows_per_chunk = max(1, logits_bytes // (4 * config.vocab_size))

    @classmethod
    def load(
        cls,
        folder: Path,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device = CPU,
        ops: LayerOps | None = None,
        ranks: Ranks | None = None,
    ) -> LlamaModel:
        """Read the safetensors files of a checkpoint; with `ranks` only this one's part of them.

        Raises:
            ConfigError: the model cannot be divided among so many ranks.
            ModelError: weights are missing, of the wrong shape, or more than this model has.
        """
        with ExitStack() as stack:
            weights = _Weights(folder, dtype, device, stack)
            model = cls._from_weights(config, weights, ops or TorchOps(), ranks)
            weights.check_all_used()
        return model

    @classmethod
    def dummy(
        cls,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device = CPU,
        ops: LayerOps | None = None,
        ranks: Ranks | None = None,
    ) -> LlamaModel:
        """The same with random weights, made on the device: as fast as a trained model, and what it says is noise."""
        return cls._from_weights(config, _DummyWeights(dtype, device), ops or TorchOps(), ranks)

    @classmethod
    def _from_weights(
        cls, config: ModelConfig, weights: _Weights | _DummyWeights, ops: LayerOps, ranks: Ranks | None
    ) -> LlamaModel:
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        own = WHOLE if ranks is None else Part(ranks.rank, ranks.size)
        num_kv_parts = min(own.count, config.num_kv_heads)
        kv = Part(own.index * num_kv_parts // own.count, num_kv_parts)

        def by_column(prefix: str, outputs: dict[str, tuple[int, Part]], bias: bool) -> Linear:
            """Several projections of the hidden states as one, each with a part of its outputs."""
            parts = [
                weights.take(f"{prefix}{name}.weight", size, hidden, part=part)
                for name, (size, part) in outputs.items()
            ]
            biases = [
                weights.take(f"{prefix}{name}.bias", size, part=part)
                for name, (size, part) in outputs.items()
                if bias
            ]
            return Linear(_join(parts), _join(biases) if bias else None)

        def by_row(name: str, num_inputs: int, bias: bool) -> Linear:
            """A projection to the hidden states, with a part of its inputs."""
            weight = weights.take(f"{name}.weight", hidden, num_inputs, part=own, dim=1)
            if bias and own.index:
                weights.ignore(f"{name}.bias")
                bias = False  # it is added once
            return Linear(weight, weights.take(f"{name}.bias", hidden) if bias else None, ranks)

        def norm(name: str, size: int) -> RMSNorm:
            return RMSNorm(weights.take(f"{name}.weight", size), eps, config.is_gemma)

        embedding = weights.take("model.embed_tokens.weight", config.vocab_size, hidden, part=own)
        qkv = dict(
            zip(
                ("q_proj", "k_proj", "v_proj"), zip(config.qkv_sizes, (own, kv, kv), strict=True), strict=True
            )
        )
        mlp_norm = "pre_feedforward_layernorm" if config.is_gemma else "post_attention_layernorm"
        layers = []
        for i in range(config.num_layers):
            layer, attention, mlp = (f"model.layers.{i}{part}" for part in ("", ".self_attn.", ".mlp."))
            layers.append(
                Layer(
                    input_norm=norm(f"{layer}.input_layernorm", hidden),
                    qkv=by_column(attention, qkv, config.qkv_bias),
                    query_norm=norm(f"{attention}q_norm", config.head_dim) if config.qk_norm else None,
                    key_norm=norm(f"{attention}k_norm", config.head_dim) if config.qk_norm else None,
                    output=by_row(f"{attention}o_proj", config.qkv_sizes[0], config.output_bias),
                    output_norm=norm(f"{layer}.post_attention_layernorm", hidden)
                    if config.is_gemma
                    else None,
                    mlp_norm=norm(f"{layer}.{mlp_norm}", hidden),
                    gate_up=by_column(
                        mlp, {"gate_proj": (inner, own), "up_proj": (inner, own)}, config.mlp_bias
                    ),
                    down=by_row(f"{mlp}down_proj", inner, config.mlp_bias),
                    down_norm=norm(f"{layer}.post_feedforward_layernorm", hidden)
                    if config.is_gemma
                    else None,
                )
            )
        final_norm = norm("model.norm", hidden)
        if config.tied_embeddings:
            weights.ignore("lm_head.weight")
            head = Linear(embedding)
        else:
            head = Linear(weights.take("lm_head.weight", config.vocab_size, hidden, part=own))
        return cls(config.of_rank(own.count), embedding, layers, final_norm, head, ops, ranks)

    @torch.inference_mode()
    def hidden_states(
        self,
        token_ids: Tensor,  # [num_tokens] int64, the rows of the step one after the other
        layout: StepLayout,
        attention: PagedAttention,
        selected: Tensor,  # [num_selected] int64, places in token_ids whose hidden states are wanted
    ) -> Tensor:  # [num_selected, hidden_size]
        """Compute one step: writes the KV of all its tokens, returns the final hidden states of the selected ones."""
        attention.begin(layout)
        residual, delta = self.embed(token_ids), None
        for i in range(len(self.layers)):
            qkv = self.project(i, residual, delta)
            attention.store(i, qkv)
            if i == len(self.layers) - 1 and not len(selected):
                return residual[selected]
            attended = attention.attend(i, qkv)
            if i == len(self.layers) - 1:
                # Nothing reads the other rows any more.
                attended, residual = attended[selected], residual[selected]
            delta = self.feed_forward(i, residual, attended)
        return self.ops.add_rms_norm(residual, delta, self.norm)

    def project(
        self,
        index: int,
        residual: Tensor,  # [num_rows, hidden_size]
        delta: Tensor | None,  # like residual, of the layer before
        out: Tensor | None = None,  # [num_rows, sum of qkv_sizes]
    ) -> Tensor:  # like out
        """What a layer does before attention: its queries, keys and values. Adds `delta` to `residual`."""
        layer = self.layers[index]
        qkv = layer.qkv(self.ops.add_rms_norm(residual, delta, layer.input_norm), out)
        if layer.query_norm is not None and layer.key_norm is not None:
            self._normalise_heads(qkv, layer.query_norm, layer.key_norm)
        return qkv

    def feed_forward(
        self,
        index: int,
        residual: Tensor,  # [num_rows, hidden_size]
        attended: Tensor,  # [num_rows, num_heads * head_dim]
    ) -> Tensor:  # like residual
        """What a layer does after attention: what is still to be added to `residual`, which it adds to as well."""
        layer = self.layers[index]
        added = self._normalised(layer.output(attended), layer.output_norm)
        hidden = self.ops.add_rms_norm(residual, added, layer.mlp_norm)
        activate = self.ops.gelu_mul if self.config.is_gemma else self.ops.silu_mul
        return self._normalised(layer.down(activate(layer.gate_up(hidden))), layer.down_norm)

    @torch.inference_mode()
    def logits(
        self,
        hidden_states: Tensor,  # [num_rows, hidden_size]
    ) -> Iterator[Tensor]:  # [at most rows_per_chunk, vocab_size]
        """Logits of consecutive chunks of rows, so that a large batch never holds all of its logits at once.

        With ranks, rank 0 has them; the others must iterate all the same.
        """
        for start in range(0, len(hidden_states), self.rows_per_chunk):
            logits = self.head(hidden_states[start : start + self.rows_per_chunk])
            if self.ranks is not None:
                logits = self.ranks.gather(logits)[:, : self.config.vocab_size].contiguous()
            if (cap := self.config.logit_soft_cap) is not None:
                logits = logits.div_(cap).tanh_().mul_(cap)
            yield logits

    def forward(
        self, token_ids: Tensor, layout: StepLayout, attention: PagedAttention, selected: Tensor
    ) -> Tensor:
        """Logits [num_selected, vocab_size] fp32 of one step; arguments as in `hidden_states`."""
        chunks = list(self.logits(self.hidden_states(token_ids, layout, attention, selected)))
        return torch.cat(chunks).float() if chunks else torch.empty(0, self.config.vocab_size)

    def embed(
        self,
        token_ids: Tensor,  # [num_tokens] int64
        out: Tensor | None = None,  # [num_tokens, hidden_size]
    ) -> Tensor:  # like out
        """What enters the first layer, in `out` where that is given."""
        if self.ranks is None:
            rows = torch.index_select(self.embedding, 0, token_ids, out=out)
        else:
            places = token_ids - self.ranks.rank * len(self.embedding)
            is_elsewhere = (places < 0) | (places >= len(self.embedding))
            rows = torch.index_select(self.embedding, 0, places.masked_fill_(is_elsewhere, 0), out=out)
            rows = self.ranks.all_reduce(rows.masked_fill_(is_elsewhere[:, None], 0))
        return rows if self.embedding_scale is None else rows.mul_(self.embedding_scale)

    def _normalised(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        return x if norm is None else self.ops.add_rms_norm(x, None, norm)

    def _normalise_heads(self, qkv: Tensor, query_norm: RMSNorm, key_norm: RMSNorm) -> None:
        queries, keys, _ = qkv.split_with_sizes(self.config.qkv_sizes, dim=-1)
        for part, norm in ((queries, query_norm), (keys, key_norm)):
            heads = part.view(len(part), -1, self.config.head_dim)
            heads.copy_(norm(heads))


def _padded(tensor: Tensor, size: int, dim: int) -> Tensor:
    """The tensor with zeros behind the end of dimension `dim`, which is of `size` then."""
    lacking = size - tensor.shape[dim]
    return F.pad(tensor, (0,) * 2 * (tensor.ndim - dim - 1) + (0, lacking)) if lacking else tensor


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _Weights:
    """The tensors of a checkpoint by name, each to be taken once."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device, stack: ExitStack) -> None:
        index = folder / "model.safetensors.index.json"
        if index.exists():
            paths = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
        else:
            paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise ModelError(f"{folder} holds no .safetensors files")
        try:
            files = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
        except Exception as error:  # safetensors has its own exception for broken files
            raise ModelError(f"cannot read the weights in {folder}: {error}") from error
        self._folder, self._dtype, self._device = folder, dtype, device
        self._files = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - not a mapping

    def take(self, name: str, *sizes: int, part: Part = WHOLE, dim: int = 0) -> Tensor:
        """The tensor `name`, which must have the given sizes, in the model's dtype; of dimension `dim`, a part.

        A part that is shorter than others is padded with zeros; no more than the part is read.
        """
        if name not in self._files:
            raise ModelError(f"the weights in {self._folder} lack {name}")
        found = self._files.pop(name).get_slice(name)
        shape = tuple(found.get_shape())
        if shape != sizes:
            raise ModelError(f"{name} in {self._folder} has shape {shape}, config.json implies {sizes}")
        start, end = part.bounds(sizes[dim])
        tensor: Tensor = found[:, start:end] if dim else found[start:end]
        tensor = tensor.to(self._device, self._dtype).contiguous()
        return _padded(tensor, part.size_of(sizes[dim]), dim)

    def ignore(self, name: str) -> None:
        """Do without a tensor that may be there."""
        self._files.pop(name, None)

    def check_all_used(self) -> None:
        """A tensor left over means that the model computes something this file does not."""
        left = [name for name in self._files if not name.endswith("rotary_emb.inv_freq")]
        if left:
            raise ModelError(
                f"the weights in {self._folder} hold tensors of an unknown purpose: {', '.join(left[:5])}"
            )


class _DummyWeights:
    """Tensors of any name: random ones, but neutral norms and biases, so that any depth of layers stays in range."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._generator = None if device.type == "meta" else torch.Generator(device).manual_seed(0)

    def take(self, name: str, *sizes: int, part: Part = WHOLE, dim: int = 0) -> Tensor:
        """A tensor of the given sizes, or a part of it: the ranks have together what one would have alone."""
        if len(sizes) == 1:
            value = 0.0 if name.endswith(".bias") else 1.0
            whole = torch.full(sizes, value, dtype=self._dtype, device=self._device)
        else:
            whole = torch.empty(sizes, dtype=self._dtype, device=self._device)
            whole.normal_(0.0, DUMMY_WEIGHT_SCALE, generator=self._generator)
        if part.count == 1:
            return whole
        start, end = part.bounds(sizes[dim])
        tensor = whole.narrow(dim, start, end - start).clone(memory_format=torch.contiguous_format)
        return _padded(tensor, part.size_of(sizes[dim]), dim)

    def ignore(self, name: str) -> None:
        """See `_Weights.ignore`; there is none."""
