"""Logits of the native model against transformers, driven step by step as the scheduler would."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from blendserve.engines.native.attention import KVShape, PagedAttention, StepLayout, make_attention
from blendserve.engines.native.model import LlamaModel, ModelConfig, Rope
from blendserve.errors import ModelError
from blendserve.models import ModelFiles, ModelSpec
from blendserve.scheduling.batch import Batch

KINDS = {
    "llama": ("llama", {}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear-rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "llama3-tied": ("llama3", {"tie_word_embeddings": True}),
    "llama-multi-head": ("llama", {"num_key_value_heads": 4}),
    "mistral-multi-query": ("mistral", {"num_key_value_heads": 1}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "smollm3": ("smollm3", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3", {}),
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
WINDOW = {"sliding_window": 24, "use_sliding_window": True}
VARIANTS = {
    "llama-dynamic-rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-yarn-of-all-keys": (
        "llama",
        {
            "head_dim": 32,
            "rope_parameters": YARN
            | {"beta_fast": 8, "beta_slow": 2, "mscale": 0.8, "mscale_all_dim": 0.5, "truncate": False},
        },
    ),
    "llama-yarn-of-a-given-amplitude": ("llama", {"rope_parameters": YARN | {"attention_factor": 0.8}}),
    "mistral-window": ("mistral", {"sliding_window": 24}),
    "qwen2-tied-window": ("qwen2", WINDOW | {"max_window_layers": 1, "tie_word_embeddings": True}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3-biased-window": (
        "qwen3",
        WINDOW | {"attention_bias": True, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "smollm3-biased-window": ("smollm3", WINDOW | {"attention_bias": True, "mlp_bias": True}),
    "smollm3-no-rope": ("smollm3", {"no_rope_layers": [0, 1], "tie_word_embeddings": True}),
    "gemma2-tied-uncapped": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": True},
    ),
    "gemma2-biased": ("gemma2", {"attention_bias": True, "num_key_value_heads": 4}),
    "gemma3-tied-scaled-rope": (
        "gemma3",
        {
            "tie_word_embeddings": True,
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}
"""what configs of these architectures may ask for"""
NUM_BLOCKS = 600


def steps_of(sequences: list[list[int]], block_size: int, chunks: list[int]) -> Iterator[Batch]:
    """Hand-made batches that compute every sequence in odd chunks and share the blocks of equal prefixes.

    Sequence i starts in step i // 2. A block is shared as soon as an earlier row computes its last token, be it in the
    same step. Lone tokens and chunks alternate, so that rows of one step decode while others prefill.
    """
    block_of_prefix: dict[tuple[int, ...], int] = {}
    filled: set[int] = set()
    free = iter(np.random.default_rng(0).permutation(NUM_BLOCKS).tolist())
    tables = np.zeros((len(sequences), NUM_BLOCKS), dtype=np.int32)
    computed = [0] * len(sequences)
    for i, sequence in enumerate(sequences):
        for block in range(-(-len(sequence) // block_size)):
            prefix = tuple(sequence[: (block + 1) * block_size])
            is_whole = len(prefix) == (block + 1) * block_size
            tables[i, block] = block_of_prefix.setdefault(prefix, next(free)) if is_whole else next(free)
    step = 0
    while any(done < len(sequence) for done, sequence in zip(computed, sequences, strict=True)):
        rows = []
        for i, sequence in enumerate(sequences):
            if i // 2 > step or computed[i] == len(sequence):
                continue
            # The last token is always computed, for there is a logit to compare.
            while computed[i] + block_size < len(sequence) and tables[i, computed[i] // block_size] in filled:
                computed[i] += block_size - computed[i] % block_size
            count = min(chunks[(step + i) % len(chunks)], len(sequence) - computed[i])
            rows.append((i, computed[i], count))
            computed[i] += count
            filled |= {int(block) for block in tables[i, : computed[i] // block_size]}
        step += 1
        requests, num_computed, num_tokens = np.array(rows, dtype=np.int32).T
        yield Batch(
            slots=requests,
            requests=requests,
            num_computed=num_computed,
            num_tokens=num_tokens,
            samples=np.ones(len(rows), dtype=np.bool_),
            block_tables=tables,
            num_prefill_tokens=0,
            num_decode_tokens=0,
            kv_tokens_read=0,
            query_key_pairs=0,
        )


def make_cache(config: ModelConfig, dtype: torch.dtype, block_size: int, backend: str) -> PagedAttention:
    shape = KVShape(
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        NUM_BLOCKS,
        block_size,
        dtype,
    )
    attention = make_attention(shape, config.rope_tables(), backend, config.attention_rules)
    for pages in attention.keys + attention.values:
        pages.fill_(torch.nan)  # what nobody wrote must not be read
    return attention


def logits_of(
    model: LlamaModel, attention: PagedAttention, sequences: list[list[int]], chunks: list[int]
) -> Iterator[tuple[int, int, Tensor]]:
    """(sequence, position, logits) of every token that some step computed."""
    block_size = attention.shape.block_size
    for batch in steps_of(sequences, block_size, chunks):
        layout = StepLayout.from_batch(batch, block_size)
        rows = np.repeat(batch.requests, batch.num_tokens)
        ids = [sequences[i][p] for i, p in zip(rows, layout.positions, strict=True)]
        every_token = torch.arange(len(ids))
        logits = model.forward(torch.tensor(ids), layout, attention, every_token)
        yield from zip(rows.tolist(), layout.positions.tolist(), logits, strict=True)


def check_against_transformers(
    folder: Path,
    sequences: list[list[int]],
    *,
    dtype: torch.dtype,
    block_size: int,
    backend: str,
    chunks: list[int],
    config: ModelConfig | None = None,
) -> None:
    config = config or ModelConfig.from_folder(folder)
    model = LlamaModel.load(folder, config, dtype)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        if dtype == torch.bfloat16:
            reference = reference.bfloat16().float()
        expected = [reference(torch.tensor([sequence])).logits[0] for sequence in sequences]
        if dtype == torch.bfloat16:
            low = reference.bfloat16()
            losses = [
                (low(torch.tensor([sequence])).logits[0].float() - wanted).abs().max().item()
                for sequence, wanted in zip(sequences, expected, strict=True)
            ]
            tolerance = 2 * max(losses)
        else:
            # Logits of 30 carry errors of 1e-4 in fp32: transformers is as far from its own result in fp64.
            tolerance = max(1e-4, 1e-5 * max(wanted.abs().max().item() for wanted in expected))
    seen = set()
    for i, position, logits in logits_of(
        model, make_cache(config, dtype, block_size, backend), sequences, chunks
    ):
        seen.add((i, position))
        error = (logits - expected[i][position]).abs().max().item()
        assert error <= tolerance, f"sequence {i} position {position}: off by {error}"
    assert all((i, len(sequence) - 1) in seen for i, sequence in enumerate(sequences))


@pytest.fixture(scope="module")
def checkpoints(
    make_tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: make_tiny_model(kind, root / name, **overrides)
        for name, (kind, overrides) in (KINDS | VARIANTS).items()
    }


def sharing_sequences(vocab_size: int) -> list[list[int]]:
    """Sequences with common prefixes of several lengths, and strangers."""
    rng = np.random.default_rng(1)
    root, branch = rng.integers(3, vocab_size, 37).tolist(), rng.integers(3, vocab_size, 40).tolist()
    tails = [rng.integers(3, vocab_size, n).tolist() for n in (1, 23, 64, 2, 90)]
    return [
        root + tails[0],
        root + branch + tails[1],
        root + branch + tails[2],
        tails[4],
        root + branch,
        tails[3],
    ]


@pytest.mark.parametrize("backend", ["torch", "c"])
@pytest.mark.parametrize("kind", KINDS | VARIANTS)
def test_logits_agree_with_transformers(checkpoints: dict[str, Path], kind: str, backend: str) -> None:
    check_against_transformers(
        checkpoints[kind],
        sharing_sequences(512),
        dtype=torch.float32,
        block_size=16,
        backend=backend,
        chunks=[13, 1, 33, 7],
    )


UNIFORM = {"windows": (None, None)}
NO_TURNS = {"ropes": (Rope("none"), Rope("none"))}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama-yarn", {"ropes": (Rope(), Rope())}),
        ("llama-yarn-of-all-keys", {"ropes": (Rope(), Rope())}),
        ("mistral-window", UNIFORM),
        ("qwen2-tied-window", UNIFORM),
        ("qwen2-tied-window", {"windows": (24, 24)}),
        ("qwen3-biased-window", UNIFORM),
        ("smollm3", {"ropes": (Rope(theta=2e6),) * 2}),
        ("smollm3", NO_TURNS),
        ("smollm3-biased-window", UNIFORM),
        ("gemma2", UNIFORM),
        ("gemma2", {"attention_soft_cap": None}),
        ("gemma2", {"logit_soft_cap": None}),
        ("gemma2", {"attention_scale": 16**-0.5}),
        ("gemma3", UNIFORM),
        ("gemma3", {"windows": (25, None)}),
        ("gemma3", {"attention_scale": 16**-0.5}),
        ("gemma3", {"ropes": (Rope(theta=1e6),) * 2}),
        ("gemma3", {"ropes": (Rope(theta=1e4),) * 2}),
    ],
)
def test_the_checkpoints_show_what_is_left_out(
    checkpoints: dict[str, Path], kind: str, changes: dict[str, Any]
) -> None:
    """A model that goes without what its config asks for does not pass."""
    folder = checkpoints[kind]
    with pytest.raises(AssertionError, match="off by"):
        check_against_transformers(
            folder,
            sharing_sequences(512),
            dtype=torch.float32,
            block_size=16,
            backend="torch",
            chunks=[64],
            config=replace(ModelConfig.from_folder(folder), **changes),
        )


@pytest.mark.parametrize("backend", ["torch", "c"])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@pytest.mark.parametrize("block_size", [1, 4, 32])
def test_logits_do_not_depend_on_the_block_size(
    checkpoints: dict[str, Path], block_size: int, kind: str, backend: str
) -> None:
    check_against_transformers(
        checkpoints[kind],
        sharing_sequences(512),
        dtype=torch.float32,
        block_size=block_size,
        backend=backend,
        chunks=[1, 50, 3],
    )


@pytest.mark.parametrize("backend", ["torch", "c"])
@pytest.mark.parametrize(
    "kind", ["llama3-tied", "llama-yarn", "mistral-window", "qwen2", "qwen3", "smollm3", "gemma2", "gemma3"]
)
def test_bfloat16_loses_no_more_than_transformers_does(
    checkpoints: dict[str, Path], kind: str, backend: str
) -> None:
    check_against_transformers(
        checkpoints[kind],
        sharing_sequences(512),
        dtype=torch.bfloat16,
        block_size=16,
        backend=backend,
        chunks=[13, 1, 33, 7],
    )


@pytest.mark.parametrize("backend", ["torch", "c"])
def test_bundled_model_agrees_with_transformers(bundled_model: ModelFiles, backend: str) -> None:
    check_against_transformers(
        bundled_model.folder,
        sharing_sequences(49152)[:2],
        dtype=torch.float32,
        block_size=32,
        backend=backend,
        chunks=[45, 1, 64],
    )


def test_a_step_that_selects_nothing_still_writes_its_kv(checkpoints: dict[str, Path]) -> None:
    config = ModelConfig.from_folder(checkpoints["llama"])
    model = LlamaModel.load(checkpoints["llama"], config, torch.float32)
    [sequence] = sharing_sequences(512)[3:4]
    whole, halves = [], []
    for chunks, found in (([200], whole), ([50], halves)):
        attention = make_cache(config, torch.float32, 16, "torch")
        for batch in steps_of([sequence], 16, chunks):
            layout = StepLayout.from_batch(batch, 16)
            last = torch.tensor(
                [layout.num_tokens - 1] if layout.context_lens[0] == len(sequence) else [], dtype=int
            )
            ids = torch.tensor(sequence)[torch.from_numpy(layout.positions).long()]
            found.append(model.forward(ids, layout, attention, last))
    assert [len(logits) for logits in halves] == [0, 1]
    torch.testing.assert_close(halves[-1], whole[-1], atol=1e-4, rtol=0)


def test_logits_come_in_chunks(checkpoints: dict[str, Path]) -> None:
    config = ModelConfig.from_folder(checkpoints["llama"])
    model = LlamaModel.load(checkpoints["llama"], config, torch.float32)
    hidden = torch.randn(7, config.hidden_size)
    whole = torch.cat(list(model.logits(hidden)))
    model.rows_per_chunk = 3
    chunks = list(model.logits(hidden))
    assert [len(chunk) for chunk in chunks] == [3, 3, 1]
    torch.testing.assert_close(torch.cat(chunks), whole)


def test_sharded_checkpoints_load(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(checkpoints["llama"], dtype=torch.float32)
    reference.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    check_against_transformers(
        tmp_path, [list(range(3, 40))], dtype=torch.float32, block_size=16, backend="torch", chunks=[64]
    )


BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}


def test_config_defaults_and_old_spellings() -> None:
    config = ModelConfig.from_dict(
        BASE
        | {
            "rope_theta": 5e5,
            "rope_scaling": {"type": "linear", "factor": 4.0},
            "head_dim": None,
            "num_key_value_heads": None,
        }
    )
    assert (config.head_dim, config.num_kv_heads, config.tied_embeddings) == (16, 4, False)
    assert config.ropes == (Rope("linear", theta=5e5, factor=4.0),) * 2
    assert ModelConfig.from_dict(BASE, max_model_len=100).max_model_len == 100


def test_old_spellings_of_gemma() -> None:
    """As in the configs of Gemma 2 and 3 on the hub, which leave out what transformers has as a default."""
    raw = BASE | {"num_hidden_layers": 7, "head_dim": 16, "sliding_window": 512}
    gemma2 = ModelConfig.from_dict(raw | {"architectures": ["Gemma2ForCausalLM"], "hidden_act": "gelu"})
    assert gemma2.windows == (512, None) * 3 + (512,)
    assert gemma2.tied_embeddings
    assert (gemma2.attention_soft_cap, gemma2.logit_soft_cap, gemma2.attention_scale) == (
        50.0,
        30.0,
        256**-0.5,
    )
    gemma3 = ModelConfig.from_dict(
        raw
        | {
            "architectures": ["Gemma3ForCausalLM"],
            "query_pre_attn_scalar": 168,
            "rope_local_base_freq": 20000,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "rope_theta": 500000,
        }
    )
    assert gemma3.windows == (512,) * 5 + (None, 512)
    local, full = Rope(theta=20000.0), Rope("linear", theta=500000.0, factor=8.0)
    assert gemma3.ropes == (local,) * 5 + (full, local)
    assert (gemma3.attention_soft_cap, gemma3.logit_soft_cap, gemma3.attention_scale) == (
        None,
        None,
        168**-0.5,
    )
    assert gemma3.attention_rules.rope_tables == (0,) * 5 + (1, 0)


def test_yarn_makes_contexts_longer() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    raw = BASE | {"max_position_embeddings": 40960, "rope_scaling": scaling}
    assert (
        ModelConfig.from_dict(raw).max_model_len
        == ModelSpec.from_config(raw, name="m").max_model_len
        == 131072
    )


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0}}, "longrope"),
        ({"rope_scaling": {"type": "su", "factor": 4.0}}, "su"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "use_bidirectional"),
        ({"architectures": ["Gemma2ForCausalLM"], "hidden_activation": "silu"}, "silu"),
        ({"rope_scaling": {"type": "linear"}}, "lacks 'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": None}}, "not what is expected"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)  # fmt: skip
def test_what_is_not_implemented_is_refused_by_name(overrides: dict[str, object], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        ModelConfig.from_dict(BASE | overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        {"architectures": ["MistralForCausalLM"], "sliding_window": 4096},
        {"architectures": ["MistralForCausalLM"], "sliding_window": None},
        {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False, "sliding_window": 1024},
        {"layer_types": ["full_attention", "full_attention"], "sliding_window": 1024},
    ],
)
def test_sliding_windows_that_never_bind_are_none(overrides: dict[str, object]) -> None:
    assert ModelConfig.from_dict(BASE | overrides).windows == (None, None)


def test_a_sliding_window_binds_only_beyond_it() -> None:
    raw = BASE | {"architectures": ["MistralForCausalLM"], "sliding_window": 1024}
    assert ModelConfig.from_dict(raw, max_model_len=1024).windows == (None, None)
    assert ModelConfig.from_dict(raw, max_model_len=1025).windows == (1024, 1024)


def test_weights_must_fit_the_config(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = checkpoints["qwen2"]
    raw = json.loads((folder / "config.json").read_text())
    for change, message in (
        ({"architectures": ["LlamaForCausalLM"]}, "unknown purpose: .*bias"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "lack .*q_norm"),
        ({"intermediate_size": 64}, "has shape"),
    ):
        config = ModelConfig.from_dict(raw | change)
        with pytest.raises(ModelError, match=message):
            LlamaModel.load(folder, config, torch.float32)
    with pytest.raises(ModelError, match=r"no \.safetensors"):
        LlamaModel.load(tmp_path, ModelConfig.from_dict(raw), torch.float32)


def test_random_weights_of_an_8b_model() -> None:
    """Of any shape that a config gives; on the meta device, which has no memory."""
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 8192,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
    model = LlamaModel.dummy(ModelConfig.from_dict(raw), torch.bfloat16, torch.device("meta"))
    weights = [model.embedding, model.norm.weight, model.head.weight]
    for layer in model.layers:
        weights += [layer.input_norm.weight, layer.mlp_norm.weight]
        weights += [part.weight for part in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    assert sum(weight.numel() for weight in weights) == ModelSpec.from_config(raw, name="8b").params
    assert {weight.dtype for weight in weights} == {torch.bfloat16}
