"""The C kernels against torch, and torch against plain softmax, on every shape that matters."""

import ctypes
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blendserve.engines.native import attention as attention_module
from blendserve.engines.native import kernels
from blendserve.engines.native.attention import (
    LLAMA_RULES,
    AttentionRules,
    KernelAttention,
    KVShape,
    PagedAttention,
    StepLayout,
    TorchAttention,
    make_attention,
)
from blendserve.errors import ConfigError, EngineError
from blendserve.scheduling.batch import Batch

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
DTYPES = [torch.float32, torch.bfloat16]
VARIANTS = kernels.variants_of_this_cpu()
EMULATION = Path(__file__).with_name("avx512_bf16_emulated.h")


def make_batch(num_computed: list[int], num_tokens: list[int], block_size: int, seed: int = 0) -> Batch:
    """Rows with blocks of their own, scattered over the cache."""
    num_blocks = [-(-(c + n) // block_size) for c, n in zip(num_computed, num_tokens, strict=True)]
    blocks = iter(np.random.default_rng(seed).permutation(sum(num_blocks)))
    tables = np.zeros((len(num_blocks), max(num_blocks)), dtype=np.int32)
    for row, count in enumerate(num_blocks):
        tables[row, :count] = [next(blocks) for _ in range(count)]
    rows = np.arange(len(num_blocks), dtype=np.int32)
    return Batch(
        slots=rows,
        requests=rows,
        num_computed=np.array(num_computed, dtype=np.int32),
        num_tokens=np.array(num_tokens, dtype=np.int32),
        samples=np.ones(len(rows), dtype=np.bool_),
        block_tables=tables,
        num_prefill_tokens=0,
        num_decode_tokens=0,
        kv_tokens_read=0,
        query_key_pairs=0,
    )


def rope_table(head_dim: int, num_positions: int = 1024) -> tuple[Tensor, Tensor]:
    angles = torch.arange(num_positions)[:, None] * 1e4 ** (-torch.arange(0, head_dim, 2) / head_dim)
    return angles.cos()[None], angles.sin()[None]


def run(attention: PagedAttention, batch: Batch, qkv_of_rows: list[Tensor]) -> Tensor:
    """Compute the context of every row in one step, then the batch in another; output of the second."""
    block_size = attention.shape.block_size
    first = Batch(
        **{name: getattr(batch, name) for name in Batch.__dataclass_fields__}
        | {"num_tokens": batch.num_computed, "num_computed": np.zeros_like(batch.num_computed)}
    )
    output = torch.empty(0)
    for part in (first, batch):
        layout = StepLayout.from_batch(part, block_size)
        spans = zip(qkv_of_rows, part.num_computed, part.num_tokens, strict=True)
        qkv = torch.cat([row[start : start + count] for row, start, count in spans])
        attention.begin(layout)
        attention.store(0, qkv)
        output = attention.attend(0, qkv)
    return output


def expected(
    shape: KVShape, batch: Batch, qkv_of_rows: list[Tensor], rules: AttentionRules = LLAMA_RULES
) -> Tensor:
    """Plain softmax in fp64, a row and a head at a time."""
    cosine, sine = (table[0].double() for table in rope_table(shape.head_dim))
    scale = shape.head_dim**-0.5 if rules.scale is None else rules.scale
    [window] = rules.windows or (None,)
    outputs = []
    for qkv, start, count in zip(qkv_of_rows, batch.num_computed, batch.num_tokens, strict=True):
        heads = qkv.double().view(len(qkv), -1, shape.head_dim)
        low, high = heads.chunk(2, dim=-1)
        c, s = cosine[: len(qkv), None], sine[: len(qkv), None]
        rotated = torch.cat((low * c - high * s, high * c + low * s), dim=-1)
        result = []
        for head in range(shape.num_heads):
            kv_head = shape.num_heads + head // shape.heads_per_kv_head
            scores = rotated[start : start + count, head] @ rotated[:, kv_head].T * scale
            if rules.soft_cap is not None:
                scores = rules.soft_cap * torch.tanh(scores / rules.soft_cap)
            hidden = torch.ones(count, len(qkv)).triu(int(start) + 1).bool()
            if window is not None:
                hidden |= torch.ones(count, len(qkv)).tril(int(start) - window).bool()
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            result.append(weights @ heads[:, kv_head + shape.num_kv_heads])
        outputs.append(torch.cat(result, dim=-1))
    return torch.cat(outputs)


def check(shape: KVShape, batch: Batch, backend: str, rules: AttentionRules = LLAMA_RULES) -> None:
    torch.manual_seed(0)
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    totals = batch.num_computed + batch.num_tokens
    qkv_of_rows = [torch.randn(int(total), width).to(shape.dtype) for total in totals]
    attention = make_attention(shape, rope_table(shape.head_dim), backend, rules)
    for pages in attention.keys + attention.values:
        pages.fill_(torch.nan)
    output = run(attention, batch, qkv_of_rows)
    error = (output - expected(shape, batch, qkv_of_rows, rules)).abs().max().item()
    assert error <= TOLERANCE[shape.dtype]


@pytest.fixture(params=["torch", *VARIANTS])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every way to attend: torch, and the kernels in all variants that this CPU can run."""
    if request.param == "torch":
        return "torch"
    monkeypatch.setenv(kernels.CHOICE_VARIABLE, request.param)
    return "c"


@pytest.fixture
def fresh_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, and nothing loaded yet."""
    monkeypatch.setenv("BLENDSERVE_CACHE", str(tmp_path))
    kernels._load.cache_clear()
    yield tmp_path
    kernels._load.cache_clear()


MIXED = ([1, 30, 33, 130, 64, 7], [70, 1, 20, 1, 1, 3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 4, 16, 32, 64])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(9, 3, 64), (4, 4, 16), (8, 1, 128), (14, 2, 64), (7, 1, 80), (5, 1, 96)],
)
def test_backends_compute_attention(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, backend: str, dtype: torch.dtype
) -> None:
    if dtype == torch.bfloat16 and block_size == 1 and backend == "c":
        pytest.skip("bf16 lies in pairs of tokens")
    batch = make_batch(*MIXED, block_size)
    shape = KVShape(
        1, num_heads, num_kv_heads, head_dim, int(batch.block_tables.max()) + 1, block_size, dtype
    )
    check(shape, batch, backend)


RULES = [
    AttentionRules(windows=(1,)),
    AttentionRules(windows=(20,)),
    AttentionRules(windows=(100,), soft_cap=2.0),
    AttentionRules(scale=0.1, soft_cap=3.0),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [4, 32])
@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (8, 4, 256)])
def test_rules_of_other_models(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rules: AttentionRules,
    block_size: int,
    backend: str,
    dtype: torch.dtype,
) -> None:
    batch = make_batch(*MIXED, block_size)
    num_blocks = int(batch.block_tables.max()) + 1
    check(KVShape(1, num_heads, num_kv_heads, head_dim, num_blocks, block_size, dtype), batch, backend, rules)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 150), st.integers(1, 80)), min_size=1, max_size=6),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 8)),
    head_dim=st.sampled_from([16, 32, 48, 64, 112]),
    block_size=st.sampled_from([2, 4, 8, 16, 32]),
    num_threads=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    variant=st.sampled_from(VARIANTS),
    rules=st.sampled_from([LLAMA_RULES, *RULES]),
)
def test_the_kernels_cope_with_any_batch(
    rows: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    num_threads: int,
    dtype: torch.dtype,
    variant: str,
    rules: AttentionRules,
) -> None:
    num_computed, num_tokens = (list(column) for column in zip(*rows, strict=True))
    batch = make_batch(num_computed, num_tokens, block_size)
    num_kv_heads, sharing = heads
    num_blocks = int(batch.block_tables.max()) + 1
    shape = KVShape(1, num_kv_heads * sharing, num_kv_heads, head_dim, num_blocks, block_size, dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setenv(kernels.CHOICE_VARIABLE, variant)
            check(shape, batch, "c", rules)
    finally:
        torch.set_num_threads(before)


# With -O3 the compiler takes eight times as long over vectors that the CPU does not have.
LONG_VECTORS = ("-DLANES=16", "-O1")
PAIRS = ("-include", str(EMULATION), "-O1")
needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="for x86")


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        (LONG_VECTORS, torch.float32),
        (LONG_VECTORS, torch.bfloat16),
        pytest.param(PAIRS, torch.bfloat16, marks=needs_x86),
    ],
    ids=["avx512-float32", "avx512-bfloat16", "avx512_bf16-bfloat16"],
)
def test_vectors_of_other_machines(
    fresh_kernels: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], dtype: torch.dtype
) -> None:
    """The compiler splits vectors that the CPU lacks, so the logic for AVX-512 can run anywhere."""
    monkeypatch.setattr(kernels, "COMPILE_FLAGS", (*kernels.COMPILE_FLAGS, *flags))
    for block_size in (4, 16, 32):
        batch = make_batch(*MIXED, block_size)
        num_blocks = int(batch.block_tables.max()) + 1
        for rules in (LLAMA_RULES, RULES[2]):
            check(KVShape(1, 9, 3, 48, num_blocks, block_size, dtype), batch, "c", rules)
    if dtype == torch.float32:
        loaded = kernels.load_kernels(dtype)
        assert loaded is not None
        x, weight = torch.randn(20, 530), torch.randn(75, 530)
        packed = loaded.pack(weight, None)
        assert packed.weight.shape == (3, 530, 32)
        torch.testing.assert_close(loaded.linear(packed, x), x @ weight.t(), atol=1e-4, rtol=1e-4)


@needs_x86
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", [name for name in kernels.VARIANTS if name not in VARIANTS])
def test_variants_that_cannot_run_here_compile(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    flags = (
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-c",
        str(kernels.SOURCE),
        "-o",
        str(tmp_path / "kernels.o"),
    )
    command = [*kernels.compiler(), *kernels.compile_flags(variant, dtype), *flags]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_huge_scores_stay_finite(backend: str) -> None:
    """Online softmax must rescale by the running maximum: scores of +-1e4 overflow a plain exponential."""
    batch = make_batch([64], [3], 16)
    shape = KVShape(1, 2, 1, 16, int(batch.block_tables.max()) + 1, 16, torch.float32)
    qkv = torch.randn(67, 4 * 16) * 100
    attention = make_attention(shape, rope_table(16), backend)
    output = run(attention, batch, [qkv.clone()])
    torch.testing.assert_close(output.double(), expected(shape, batch, [qkv]), atol=1e-2, rtol=1e-3)


def test_layout_of_a_step() -> None:
    batch = make_batch([0, 5], [3, 1], 4)
    batch.block_tables[:] = [[7, 0], [2, 9]]
    layout = StepLayout.from_batch(batch, 4)
    assert layout.query_starts.tolist() == [0, 3, 4]
    assert layout.context_lens.tolist() == [3, 6]
    assert layout.positions.tolist() == [0, 1, 2, 5]
    assert layout.kv_slots.tolist() == [28, 29, 30, 37]


SMALL = KVShape(1, 2, 1, 16, 4, 16, torch.float32)


def test_kernels_are_built_once(fresh_kernels: Path) -> None:
    assert isinstance(make_attention(SMALL, rope_table(16)), KernelAttention)
    [library] = fresh_kernels.iterdir()
    built = library.stat().st_mtime_ns
    kernels._load.cache_clear()
    make_attention(SMALL, rope_table(16))
    assert [path.stat().st_mtime_ns for path in fresh_kernels.iterdir()] == [built]


@pytest.mark.parametrize("compiler", ["/nonexistent/cc", "false"])
def test_without_a_compiler_torch_attends(
    fresh_kernels: Path, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    monkeypatch.setenv("CC", compiler)
    with pytest.warns(RuntimeWarning, match="falls back to torch"):
        assert isinstance(make_attention(SMALL, rope_table(16)), TorchAttention)
    # One warning is enough, and whoever insists on the kernels hears why not.
    assert isinstance(make_attention(SMALL, rope_table(16)), TorchAttention)
    with pytest.raises(EngineError, match="not available"):
        make_attention(SMALL, rope_table(16), "c")


def test_a_broken_source_reports_what_the_compiler_said(
    fresh_kernels: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = tmp_path / "kernels.c"
    source.write_text("this is no C")
    monkeypatch.setattr(kernels, "SOURCE", source)
    with pytest.warns(RuntimeWarning, match="error: "):
        assert kernels.load_kernels(torch.float32) is None
    assert [path.name for path in fresh_kernels.iterdir()] == ["kernels.c"], "nothing half-built may stay"


def test_an_old_compiler_builds_what_it_knows(fresh_kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = kernels.Variant(frozenset(), ("--no-such-flag",))
    monkeypatch.setattr(kernels, "VARIANTS", {"newest": broken, **kernels.VARIANTS})
    monkeypatch.setattr(kernels, "COMPILE_FLAGS", (*kernels.COMPILE_FLAGS, "-O0"))  # soon done
    loaded = kernels.load_kernels(torch.float32)
    assert loaded is not None
    assert loaded.variant == VARIANTS[0]


def test_the_environment_chooses_the_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = kernels.load_kernels(torch.float32)
    assert loaded is not None
    assert loaded.variant == VARIANTS[0]
    monkeypatch.setenv(kernels.CHOICE_VARIABLE, "portable")
    loaded = kernels.load_kernels(torch.float32)
    assert loaded is not None
    assert loaded.variant == "portable"
    monkeypatch.setenv(kernels.CHOICE_VARIABLE, "none")
    assert kernels.load_kernels(torch.float32) is None
    monkeypatch.setenv(kernels.CHOICE_VARIABLE, "avx1024")
    with pytest.raises(ConfigError, match=r"avx1024: there is no such variant; use one of .*portable, none"):
        kernels.load_kernels(torch.float32)
    monkeypatch.setattr(kernels, "_cpu_flags", lambda: frozenset({"avx2", "fma"}))
    monkeypatch.setenv(kernels.CHOICE_VARIABLE, "avx512")
    with pytest.raises(ConfigError, match="this CPU cannot run it; use one of portable"):
        kernels.load_kernels(torch.float32)


def test_shapes_that_the_kernels_do_not_cover_go_to_torch() -> None:
    odd_head = KVShape(1, 2, 1, 24, 4, 16, torch.float32)
    assert isinstance(make_attention(odd_head, rope_table(24)), TorchAttention)
    odd_block = KVShape(1, 2, 1, 16, 4, 15, torch.bfloat16)
    assert isinstance(make_attention(odd_block, rope_table(16)), TorchAttention)


def test_one_openmp_runtime_and_unharmed_denormals() -> None:
    """Two runtimes would fight for the cores; -ffast-math at link time would flush denormals in the whole process."""
    assert kernels.load_kernels(torch.float32) is not None
    maps = Path("/proc/self/maps")
    if maps.exists():
        names = ("libgomp", "libiomp5", "libomp.so")
        runtimes = {
            line.split()[-1]
            for line in maps.read_text().splitlines()
            if line.split()[-1].split("/")[-1].startswith(names)
        }
        assert len(runtimes) == 1
    assert np.float32(1e-40) * np.float32(0.5) > 0


def test_structures_match_the_source() -> None:
    """Field order is all that ties the ctypes structures to kernels.c."""
    source = kernels.SOURCE.read_text()
    for structure in (kernels.Shape, kernels.Step):
        body = source[: source.index(f"}} {structure.__name__};")].rsplit("typedef struct {", 1)[1]
        places = [body.index(name) for name, _ in structure._fields_]
        assert places == sorted(places)
    assert ctypes.sizeof(kernels.Shape) == 24
    assert attention_module.ROWS_PER_ITEM >= 1
