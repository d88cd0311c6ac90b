"""What a GPU makes of the native engine's kernels, alone and side by side: sections of a measuring session.

Every section is a function of a `session.Session` and the `Subject`, the executor with a model of random weights. In a
dry run the subject is tiny and on a CPU, and Triton's interpreter runs what is checked and no more.
"""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blendserve.cost_model import CostModel, HardwareSpec, Partition
from blendserve.engines import AttentionBackend
from blendserve.engines.native import open_executor, triton_probes
from blendserve.engines.native.attention import StepLayout
from blendserve.engines.native.device import split_gpu
from blendserve.engines.native.executor import TorchExecutor
from blendserve.engines.native.gpu_timing import CudaTimer, HostTimer, Timer, Work, pass_time, shared_rates
from blendserve.engines.native.model import ModelConfig
from blendserve.engines.native.overlap import CudaLanes, Lanes, open_lanes
from blendserve.engines.native.sampler import SamplingRow, choose
from blendserve.engines.native.session import Row, Session
from blendserve.engines.native.step_profile import StepPoint, StepTimer, make_batch, step_points
from blendserve.engines.native.triton_backend import TritonAttention
from blendserve.engines.profile import StepSample
from blendserve.request import SamplingParams

TOLERANCE = 1e-2
"""relative error of a bfloat16 result against float32"""
POINT_S = 0.4
"""estimate of a point of a few milliseconds, measured several times"""
STEP_POINT_S = 1.5
WHOLE, HALVES = "whole", "halves"
"""how the executor runs a step: on one stream, as it is or as two halves; by a partition: its name"""

Mode = Literal["split", "priority", "plain"]
"""of two streams: on disjoint SMs; on all SMs, attention first; on all SMs"""


@dataclass(frozen=True)
class Sizes:
    """What is measured; GB are of all KV that decode attention reads in a layer."""

    splits: tuple[int, ...] = (48, 32, 40, 24, 56, 64, 16)
    """SMs of attention, the most promising first; products have the others"""
    copy_elements: int = 3 << 29
    square: int = 8192
    context: int = 1400
    layer_gb: float = 1.56
    """of one nano-batch"""
    layer_gbs: tuple[float, ...] = (0.4, 3.1)
    contexts: tuple[int, ...] = (512, 2048, 8192)
    programs_per_sm: tuple[int, ...] = (2, 1, 3)
    checked_contexts: tuple[int, ...] = (1, 63, 64, 65, 513, 700, 1500, 2048)
    nano_tokens: tuple[int, ...] = (512, 1024)
    tokens: tuple[int, ...] = (1024, 2048, 512, 256, 1536, 768, 384, 4096, 128)
    window_ms: float = 40.0
    stack: tuple[tuple[int, float], ...] = (
        (1024, 80),
        (1024, 50),
        (2048, 80),
        (2048, 50),
        (1024, 25),
        (512, 50),
    )
    """tokens, GB of KV read in all layers"""
    prefills: tuple[tuple[int, int, int], ...] = (
        *((1, 1024, 0), (1, 1024, 1024), (1, 1024, 3072), (1, 512, 0)),
        *((1, 2048, 0), (4, 256, 0), (2, 512, 2048)),
    )
    """sequences, tokens of each, tokens before"""
    head_rows: tuple[int, ...] = (64, 256, 640)


TINY = Sizes(
    splits=(8, 4),
    copy_elements=1 << 14,
    square=32,
    context=20,
    layer_gb=2e-5,
    layer_gbs=(1e-5,),
    contexts=(40,),
    programs_per_sm=(1,),
    checked_contexts=(1, 15, 16, 17, 40),
    nano_tokens=(16,),
    tokens=(32, 16),
    window_ms=0.01,
    stack=((32, 4e-5),),
    prefills=((1, 16, 0), (2, 16, 16)),
    head_rows=(4,),
)
TINY_SMS = 16
"""of the device that a dry run stands in for"""


class Subject:
    """What is measured.

    Args:
        executor: with a model loaded, at rest.
        timer: of its device.
        sizes: of the points.
    """

    def __init__(self, executor: TorchExecutor, timer: Timer, sizes: Sizes) -> None:
        self.executor, self.timer, self.sizes = executor, timer, sizes
        self.model, self.attention = executor.model, executor.attention
        self.device, self.dtype = self.model.embedding.device, self.model.dtype
        self.rng = np.random.default_rng(0)
        self.num_sms = TINY_SMS
        if self.device.type == "cuda":
            self.num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.full, self.second, self.high = timer.stream(), timer.stream(), timer.stream(priority=-1)
        self.num_layers = len(self.model.layers)
        self.product_sizes = _product_sizes(self.model.config)
        self.layer_params = sum(inputs * outputs for inputs, outputs in self.product_sizes.values())
        shape = self.attention.shape
        self.layer_kv_bytes = 2 * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize
        """of one token in one layer"""

    def is_alive(self) -> bool:
        """Whether the device still answers."""
        try:
            self.timer.synchronize()
            return bool(torch.ones(8, device=self.device).sum().item() == 8.0)
        except Exception:
            return False

    def random(self, *sizes: int, scale: float = 1.0) -> Tensor:
        """Noise."""
        return torch.empty(*sizes, device=self.device, dtype=self.dtype).normal_(0.0, scale)

    def split(self, num_sms: int) -> tuple[Any, Any, int]:
        """Streams of attention and of products on disjoint SMs, and the SMs of the first; see `split_gpu`."""
        if self.device.type == "cuda":
            return split_gpu(self.device.index or 0, num_sms)
        return self.full, self.second, num_sms

    def usable_splits(self, session: Session) -> list[int]:
        """SMs of attention of the splits that passed the probes."""
        rows = session.rows("probes")
        return [n for n in self.sizes.splits if rows.get(f"split {n}", {}).get("ok")]

    def open_lanes(self, hardware: HardwareSpec) -> dict[Partition, Lanes]:
        """Lanes for the partitions of a profile, as the engine opens them."""
        if self.device.type == "cuda":
            return open_lanes(hardware, self.model)
        return {partition: OneLane() for partition in hardware.partitions}

    def layout(self, num_computed: NDArray[np.integer], num_tokens: NDArray[np.integer]) -> StepLayout:
        """Of sequences that share nothing."""
        batch = make_batch(num_computed, num_tokens, self.executor, self.rng)
        return StepLayout.from_batch(batch, self.executor.block_size)

    def heat(self, ms: float = 150.0) -> None:
        """Bring clocks and power to where they are under load."""
        if self.device.type != "cuda":
            return
        a = self.random(2048, self.model.config.hidden_size)
        until_s = time.perf_counter() + ms / 1e3
        while time.perf_counter() < until_s:
            for layer in self.model.layers[:8]:
                layer.gate_up(a)
            self.timer.synchronize()


def _product_sizes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of a layer's products."""
    hidden, inner, attended = config.hidden_size, config.intermediate_size, config.qkv_sizes[0]
    return {
        "qkv": (hidden, sum(config.qkv_sizes)),
        "output": (attended, hidden),
        "gate_up": (hidden, 2 * inner),
        "down": (inner, hidden),
    }


def open_subject(session: Session) -> Subject:
    """Load a model of random weights and fill its KV cache with noise.

    Of the session's options: `engine` (an `EngineConfig`) and `files` (`ModelFiles`).
    """
    began_s = time.perf_counter()
    engine, files = session.config.options["engine"], session.config.options["files"]
    is_dry = session.config.dry_run
    # The interpreter is slow: a dry run has Triton's kernels in the checks alone.
    backend: AttentionBackend = "torch" if is_dry else "triton"
    engine = replace(engine, overlap="off", attention_backend=backend, load_format="dummy")
    torch.manual_seed(0)
    executor = open_executor(engine, files.folder, None, engine.cost_model(files))
    assert isinstance(executor, TorchExecutor)
    subject = Subject(executor, HostTimer() if is_dry else CudaTimer(), TINY if is_dry else Sizes())
    session.is_device_alive = subject.is_alive
    for cache in executor.attention.cache_tensors():
        cache.normal_()
    subject.timer.synchronize()
    session.profile["meta"].update(_describe(subject))
    session.log(f"ready in {time.perf_counter() - began_s:.1f} s")
    return subject


def _describe(subject: Subject) -> Row:
    executor = subject.executor
    found: Row = {
        "model": executor.cost_model.model.name,
        "dtype": str(subject.dtype).removeprefix("torch."),
        "num_sms": subject.num_sms,
        "kv_cache_bytes": executor.num_blocks
        * executor.block_size
        * executor.cost_model.model.kv_bytes_per_token,
        "layer_kv_bytes": subject.layer_kv_bytes,
        "block_size": executor.block_size,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "device": "stand-in",
    }
    if subject.device.type == "cuda":
        properties = torch.cuda.get_device_properties(subject.device)
        found |= {"device": properties.name, "memory_bytes": properties.total_memory}
    return found


# -- probes ----------------------------------------------------------------------------------------------------------


def probes(session: Session, subject: Subject) -> None:
    """Whether products and kernels run on streams of parts of the device, side by side and undisturbed."""
    session.point("kernels", 5.0, lambda: {"error": _kernel_error(subject, subject.full)}, hang_s=90.0)
    session.point(
        "plain streams", 1.0, lambda: {"serialization": _serialization(subject, subject.full, subject.second)}
    )
    for num_sms in subject.sizes.splits:
        session.point(f"split {num_sms}", 1.5, partial(_probe_split, subject, num_sms), hang_s=45.0)
    session.log("splits that work: " + (" ".join(map(str, subject.usable_splits(session))) or "none"))


def _probe_split(subject: Subject, num_sms: int) -> Row:
    attention, gemm, sms = subject.split(num_sms)
    on_attention, on_gemm = (
        _sms_used(subject, stream, count)
        for stream, count in ((attention, sms), (gemm, subject.num_sms - sms))
    )
    product_error, kernel_error = _product_error(subject, gemm), _kernel_error(subject, attention)
    return {
        "sm_attention": sms,
        "sm_gemm": subject.num_sms - sms,
        "sms_seen": [len(on_attention), len(on_gemm)],
        "are_disjoint": not on_attention & on_gemm,
        "serialization": _serialization(subject, attention, gemm),
        "isolation": _isolation(subject, ((attention, sms), (gemm, subject.num_sms - sms))),
        "product_error": product_error,
        "kernel_error": kernel_error,
        "ok": max(product_error, kernel_error) < TOLERANCE,
    }


def _sms_used(subject: Subject, stream: Any, num_sms: int) -> set[int]:
    """Numbers of the SMs that a stream's programs ran on; they may be virtual."""
    if subject.device.type != "cuda":
        return set()
    sms, sink = triton_probes.spin_buffers(num_sms * 16, subject.device)
    subject.timer.synchronize()
    with subject.timer.on(stream):
        triton_probes.spin(sms, sink, 20_000)
    subject.timer.synchronize()
    return set(sms.tolist())


def _isolation(subject: Subject, lanes: Sequence[tuple[Any, int]]) -> float:
    """1 if two streams share no SM, up to 2 if they do: each is filled with arithmetic."""
    if subject.device.type != "cuda":
        return 1.0
    jobs = []
    for stream, num_sms in lanes:
        sms, sink = triton_probes.spin_buffers(num_sms * 16, subject.device)
        jobs.append((stream, partial(triton_probes.spin, sms, sink, 160_000)))
    return subject.timer.together_ratio(jobs)


def _serialization(subject: Subject, *streams: Any) -> float:
    """2 if two streams wait for each other, 1 if not: kernels of one thread that pass the time."""
    if subject.device.type != "cuda":
        return 1.0
    return subject.timer.together_ratio([(stream, partial(pass_time, 1000)) for stream in streams])


def _product_error(subject: Subject, stream: Any) -> float:
    layer = subject.model.layers[0]
    inputs, outputs = subject.product_sizes["output"]
    a = subject.random(64, inputs)
    out = torch.full((64, outputs), math.nan, device=subject.device, dtype=subject.dtype)
    subject.timer.synchronize()
    with torch.inference_mode(), subject.timer.on(stream):
        layer.output(a, out)
    subject.timer.synchronize()
    return relative_error(out, layer.output(a.clone()))


def _kernel_error(subject: Subject, stream: Any) -> float:
    norm = subject.model.layers[0].input_norm
    x = subject.random(8, len(norm.weight))
    subject.timer.synchronize()
    with torch.inference_mode(), subject.timer.on(stream):
        out = subject.model.ops.add_rms_norm(x, None, norm)
    subject.timer.synchronize()
    return relative_error(out, norm(x))


def relative_error(out: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected; infinite where anything is no number."""
    error = float((out.float() - expected.float()).norm() / expected.float().norm())
    return error if math.isfinite(error) else math.inf


# -- ceilings --------------------------------------------------------------------------------------------------------


def ceilings(session: Session, subject: Subject) -> None:
    """A large copy, a large product on noise, and what a kernel reads on some of the SMs."""
    subject.heat()
    session.point("copy", 1.0, partial(_copy, subject))
    session.point("product", 1.5, partial(_square_product, subject))
    session.point("clocks", 0.2, partial(_clocks, subject))
    lanes = [(subject.num_sms, subject.full)]
    for num_sms in subject.usable_splits(session):
        stream, _, sms = subject.split(num_sms)
        lanes.append((sms, stream))
    for sms, stream in lanes:
        session.point(f"read sm={sms}", 0.5, partial(_read, subject, stream, sms), sm=sms)


def _copy(subject: Subject) -> Row:
    source = subject.random(subject.sizes.copy_elements)
    target = torch.empty_like(source)
    us = subject.timer.call_us(lambda _: target.copy_(source), subject.full, sample_ms=0.0)
    return {"gbps": 2 * source.nbytes / us / 1e3}


def _square_product(subject: Subject) -> Row:
    size = subject.sizes.square
    a, b = subject.random(size, size), subject.random(size, size)
    out = torch.empty_like(a)
    us = subject.timer.call_us(lambda _: torch.mm(a, b.t(), out=out), subject.full, sample_ms=25.0)
    return {"tflops": 2 * size**3 / us / 1e6}


def _read(subject: Subject, stream: Any, num_sms: int) -> Row:
    caches = subject.attention.cache_tensors()
    best = 0.0
    for programs in (num_sms * 4, num_sms * 8) if subject.device.type == "cuda" else (num_sms,):
        sums = torch.empty(programs, device=subject.device, dtype=torch.float32)
        moved = triton_probes.read(caches[0], sums, programs)

        def work(i: int, sums: Tensor = sums, programs: int = programs) -> None:
            triton_probes.read(caches[i % len(caches)], sums, programs)

        best = max(best, moved / subject.timer.call_us(work, stream) / 1e3)
    return {"gbps": best}


def _clocks(subject: Subject) -> Row:
    """Under the load of the moment before; nothing where they cannot be read."""
    if subject.device.type != "cuda":
        return {}
    subject.heat(100.0)
    try:
        return {"sm_mhz": torch.cuda.clock_rate(), "power_w": torch.cuda.power_draw() / 1e3}
    except (ImportError, RuntimeError):  # torch asks a package that need not be there
        return {}


# -- decode attention alone ------------------------------------------------------------------------------------------


class DecodeBench:
    """Decode attention over sequences with noise for KV, in turn over the layers' caches."""

    def __init__(self, subject: Subject, layer_gb: float, context: int) -> None:
        self.subject = subject
        num_tokens = layer_gb * 1e9 / subject.layer_kv_bytes
        num_rows = max(1, round(num_tokens / context))
        spread = subject.rng.uniform(0.5, 1.5, num_rows)
        capacity = subject.executor.num_blocks * subject.executor.block_size
        contexts = np.maximum(1, spread * min(num_tokens, 0.95 * capacity) / num_rows).astype(np.int64)
        blocks = -(-contexts // subject.executor.block_size)
        while blocks.sum() > subject.executor.num_blocks:
            contexts = np.maximum(1, contexts * 0.98).astype(np.int64)
            blocks = -(-contexts // subject.executor.block_size)
        self.layout = subject.layout(contexts - 1, np.ones(num_rows, np.int64))
        self.gb = float(contexts.sum()) * subject.layer_kv_bytes / 1e9
        self.qkv = subject.random(num_rows, sum(subject.model.config.qkv_sizes))
        self.out = subject.random(num_rows, subject.model.config.qkv_sizes[0])

    def work(self, num_sms: int, *, tma: bool | None = None, programs_per_sm: int | None = None) -> Work:
        """Calls that run on so many SMs, as the engine would unless told otherwise."""
        attention = self.subject.attention.twin()
        attention.begin(self.layout, num_sms)
        if isinstance(attention, TritonAttention):
            attention.tma = attention.tma if tma is None else tma
            if programs_per_sm is not None:
                attention.num_programs_in_step = num_sms * programs_per_sm
        self.subject.timer.synchronize()
        num_layers = self.subject.num_layers
        return torch.inference_mode()(
            lambda i: attention.attend(i % num_layers, self.qkv, self.out, "decode")
        )


def attention(session: Session, subject: Subject) -> None:
    """Decode attention against a reference; then its bandwidth by variant, SMs, programs, KV size and context."""
    variants = {"pointers": False}
    if isinstance(subject.attention, TritonAttention) and subject.attention.tma:
        variants = {"tma": True, **variants}
    for name, tma in variants.items():
        session.point(f"check {name}", 10.0, partial(_decode_error, subject, tma))
    rows = session.rows("attention")
    good = [name for name in variants if rows.get(f"check {name}", {}).get("error", 1.0) < TOLERANCE]
    if not good:
        raise RuntimeError("no variant of decode attention passed its check")
    subject.heat()
    lanes = [(subject.num_sms, subject.full)]
    for num_sms in subject.usable_splits(session):
        stream, _, sms = subject.split(num_sms)
        lanes.append((sms, stream))
    sizes = subject.sizes
    bench = DecodeBench(subject, sizes.layer_gb, sizes.context)
    cases = [(sms, stream, v, p) for sms, stream in lanes for v in good for p in sizes.programs_per_sm]
    for sms, stream, variant, programs in cases:
        _decode_point(session, bench, sms, stream, variants[variant], variant, programs, sizes.context)
    best = max(
        (row for row in rows.values() if row.get("sm") == subject.num_sms),
        key=lambda row: row["gbps"],
        default=None,
    )
    if best is None:
        return
    for gb in sizes.layer_gbs:
        for context in sizes.contexts:
            other = DecodeBench(subject, gb, context)
            variant, programs = best["variant"], best["programs_per_sm"]
            _decode_point(
                session, other, subject.num_sms, subject.full, variants[variant], variant, programs, context
            )


def _decode_point(
    session: Session,
    bench: DecodeBench,
    num_sms: int,
    stream: Any,
    tma: bool,
    variant: str,
    programs: int,
    context: int,
) -> None:
    def measure() -> Row:
        us = bench.subject.timer.call_us(bench.work(num_sms, tma=tma, programs_per_sm=programs), stream)
        return {"gbps": bench.gb / us * 1e6, "us": us}

    session.point(
        f"{variant} sm={num_sms} x{programs} {bench.gb:.3g} GB context={context}",
        POINT_S,
        measure,
        variant=variant,
        sm=num_sms,
        programs_per_sm=programs,
        context=context,
        kv_gb=bench.gb,
    )


def _decode_error(subject: Subject, tma: bool) -> Row:
    """Worst relative error of a row against float32, at lengths around the ends of blocks."""
    contexts = np.array(subject.sizes.checked_contexts)
    layout = subject.layout(contexts - 1, np.ones(len(contexts), np.int64))
    shape, config = subject.attention.shape, subject.model.config
    if isinstance(subject.attention, TritonAttention):
        attention = subject.attention.twin()
    else:
        attention = TritonAttention(
            replace(shape, num_layers=1), (subject.attention.cosine, subject.attention.sine)
        )
        attention.pages[0].normal_()
    attention.begin(layout)
    attention.tma = tma
    qkv = subject.random(len(contexts), sum(config.qkv_sizes))
    pages = attention.pages[0]
    out = torch.full(
        (len(contexts), config.qkv_sizes[0]), math.nan, device=subject.device, dtype=subject.dtype
    )
    with torch.inference_mode():
        attention.attend(0, qkv, out, "decode")
    subject.timer.synchronize()
    worst = 0.0
    for row, context in enumerate(contexts.tolist()):
        blocks = torch.from_numpy(layout.block_tables[row, : -(-context // shape.block_size)]).to(
            subject.device
        )
        keys, values = (
            part.float().transpose(0, 1).flatten(1, 2)[:, :context] for part in pages[blocks.long()].unbind(1)
        )
        queries = qkv[row, : config.qkv_sizes[0]].float()
        queries = queries.view(shape.num_kv_heads, shape.heads_per_kv_head, shape.head_dim)
        scores = queries @ keys.transpose(1, 2) * shape.head_dim**-0.5
        worst = max(worst, relative_error(out[row], (scores.softmax(-1) @ values).flatten()))
    return {"error": worst}


# -- products alone --------------------------------------------------------------------------------------------------


class ChainBench:
    """What a layer does but for attention, at so many tokens: products, norms, activation."""

    def __init__(self, subject: Subject, num_tokens: int) -> None:
        config = subject.model.config
        self.subject, self.num_tokens = subject, num_tokens
        self.residual = subject.random(num_tokens, config.hidden_size)
        self.attended = subject.random(num_tokens, config.qkv_sizes[0], scale=0.1)
        self.qkv = subject.random(num_tokens, sum(config.qkv_sizes))

    @torch.inference_mode()
    def __call__(self, i: int) -> None:
        """A layer."""
        layer = i % self.subject.num_layers
        self.subject.model.project(layer, self.residual, None, self.qkv)
        self.subject.model.feed_forward(layer, self.residual, self.attended)

    def us(self, stream: Any) -> float:
        """Microseconds of a layer."""
        return self.subject.timer.call_us(self, stream, sample_ms=3.0)

    def tflops(self, us: float) -> float:
        """TFLOP/s of the products alone."""
        return 2 * self.num_tokens * self.subject.layer_params / us / 1e6


def gemm(session: Session, subject: Subject) -> None:
    """Chains of a layer's products by tokens and SMs, then each product by itself."""
    subject.heat()
    lanes = [(subject.num_sms, subject.full)]
    for num_sms in subject.usable_splits(session):
        _, stream, sms = subject.split(num_sms)
        lanes.append((subject.num_sms - sms, stream))

    def chain(num_tokens: int, sms: int, stream: Any) -> None:
        bench = ChainBench(subject, num_tokens)

        def measure() -> Row:
            us = bench.us(stream)
            return {"us": us, "tflops": bench.tflops(us)}

        session.point(
            f"chain M={num_tokens} sm={sms}", POINT_S, measure, product="chain", num_tokens=num_tokens, sm=sms
        )

    for num_tokens in subject.sizes.tokens:
        chain(num_tokens, *lanes[0])
    for sms, stream in lanes[1:]:
        for num_tokens in subject.sizes.nano_tokens:
            chain(num_tokens, sms, stream)
    for name in subject.product_sizes:
        for num_tokens in subject.sizes.tokens:
            _product_point(session, subject, name, num_tokens, *lanes[0])
        for sms, stream in lanes[1:]:
            for num_tokens in subject.sizes.nano_tokens:
                _product_point(session, subject, name, num_tokens, sms, stream)


def _product_point(
    session: Session, subject: Subject, name: str, num_tokens: int, num_sms: int, stream: Any
) -> None:
    products = [getattr(layer, name) for layer in subject.model.layers]
    inputs, outputs = subject.product_sizes[name]

    def measure() -> Row:
        a, out = subject.random(num_tokens, inputs), subject.random(num_tokens, outputs)
        work = torch.inference_mode()(lambda i: products[i % len(products)](a, out))
        us = subject.timer.call_us(work, stream, sample_ms=2.0)
        return {"us": us, "tflops": 2 * num_tokens * inputs * outputs / us / 1e6}

    session.point(
        f"{name} M={num_tokens} sm={num_sms}",
        POINT_S,
        measure,
        product=name,
        num_tokens=num_tokens,
        sm=num_sms,
    )


# -- both at once ----------------------------------------------------------------------------------------------------


def pair(session: Session, subject: Subject) -> None:
    """A layer's products beside decode attention: rates of both, as shares of either alone on the whole device."""
    bench = DecodeBench(subject, subject.sizes.layer_gb, subject.sizes.context)
    for num_tokens in subject.sizes.nano_tokens:
        chain = ChainBench(subject, num_tokens)
        subject.heat()
        alone = session.point(
            f"alone M={num_tokens}",
            POINT_S * 2,
            partial(_alone, subject, chain, bench),
            num_tokens=num_tokens,
        )
        if alone is None:
            continue
        for mode, num_sms, streams in _pair_modes(session, subject):
            measure = partial(_both, subject, chain, bench, num_sms, streams, alone)
            row = session.point(
                f"{mode} {num_sms} M={num_tokens}",
                2.0,
                measure,
                mode=mode,
                sm_attention=num_sms,
                num_tokens=num_tokens,
                kv_gb=bench.gb,
            )
            if row is not None:
                session.log(
                    f"{mode} {num_sms}+{subject.num_sms - num_sms} M={num_tokens}: products {row['gemm_rate']:.2f}, "
                    f"attention {row['attention_rate']:.2f}"
                )


def _pair_modes(session: Session, subject: Subject) -> Iterator[tuple[Mode, int, tuple[Any, Any]]]:
    """(mode, SMs of attention, streams of products and of attention)."""
    splits = subject.usable_splits(session)
    for num_sms in splits:
        attention, gemm, sms = subject.split(num_sms)
        yield "split", sms, (gemm, attention)
    # What is left where the device cannot be split, and two points to compare with where it can.
    for num_sms in subject.sizes.splits if not splits else subject.sizes.splits[:1]:
        yield "priority", num_sms, (subject.full, subject.high)
    yield "plain", subject.num_sms, (subject.full, subject.second)


def _alone(subject: Subject, chain: ChainBench, bench: DecodeBench) -> Row:
    attention_us = subject.timer.call_us(bench.work(subject.num_sms), subject.full)
    return {"gemm_us": chain.us(subject.full), "attention_us": attention_us}


def _both(
    subject: Subject,
    chain: ChainBench,
    bench: DecodeBench,
    num_sms: int,
    streams: tuple[Any, Any],
    alone: Row,
) -> Row:
    """Rates while both are busy: the median of several windows, after one that only sizes the others."""
    attend = bench.work(num_sms)
    alone_us = alone["gemm_us"], alone["attention_us"]
    target_us = subject.sizes.window_ms * 1e3
    rates = (0.6, 0.6)
    found = []
    for _ in range(4):
        counts = tuple(
            int(min(400, max(6, target_us / us * min(max(rate, 0.05), 1.1))))
            for us, rate in zip(alone_us, rates, strict=True)
        )
        ends = subject.timer.run_both((chain, attend), streams, (counts[0], counts[1]))
        shared = shared_rates(*ends)
        rates = (shared.first_per_ms * alone_us[0] / 1e3, shared.second_per_ms * alone_us[1] / 1e3)
        found.append((*rates, shared.window_ms))
    gemm_rate, attention_rate, window_ms = (
        statistics.median(column) for column in zip(*found[1:], strict=True)
    )
    return {"gemm_rate": gemm_rate, "attention_rate": attention_rate, "window_ms": window_ms}


# -- whole steps -----------------------------------------------------------------------------------------------------


def steps(session: Session, subject: Subject) -> None:
    """Steps of the executor, on one stream, to fit a profile to."""
    executor = subject.executor
    hardware = executor.cost_model.hardware
    executor.set_overlap(executor.cost_model, {})
    timer = _step_timer(session, subject, 7)
    points = step_points(
        max_num_batched_tokens=hardware.max_num_batched_tokens,
        max_num_seqs=hardware.max_num_seqs,
        max_model_len=executor.max_model_len,
        kv_capacity_tokens=executor.num_blocks * executor.block_size,
    )
    for point in points:
        session.point(_step_label(point), STEP_POINT_S, partial(_timed, timer, point))


def _step_timer(session: Session, subject: Subject, num_steps: int) -> Callable[[StepPoint], StepSample]:
    """Times steps; in a dry run they run once, and take what the engine's profile says."""
    executor = subject.executor
    if not session.config.dry_run:
        return StepTimer(executor, num_steps=num_steps)
    cost_model, timer = executor.cost_model, StepTimer(executor, num_steps=1, warm_up_steps=0)

    def modelled(point: StepPoint) -> StepSample:
        sample = timer(point)
        cost = cost_model.step_cost(sample.num_tokens, sample.kv_tokens_read, sample.query_key_pairs)
        return sample._replace(duration_s=cost.compute_s + cost.memory_s)

    return modelled


def _timed(timer: Callable[[StepPoint], StepSample], point: StepPoint) -> Row:
    return timer(point)._asdict()


def _step_label(point: StepPoint) -> str:
    longest = max(point.prompts, default=0)
    return f"{len(point.prompts)} prompts to {longest}, {point.num_decode_rows} decodes at {point.context}"


class OneLane:
    """`Lanes` that are all the same: halves one after the other."""

    num_attention_sms: int | None = None

    def run(self, lane: str, operation: Any) -> None:  # noqa: ARG002
        """See `Lanes.run`."""
        operation()

    def record(self, lane: str) -> None:
        """See `Lanes.record`."""

    def wait(self, lane: str, event: None) -> None:
        """See `Lanes.wait`."""


def stack(session: Session, subject: Subject) -> None:
    """Steps of the executor: whole, as two halves on one stream, and overlapped by each of the partitions."""
    executor = subject.executor
    base = executor.cost_model
    timer = _step_timer(session, subject, 9)
    modes: list[tuple[str, Lanes | None]] = [(WHOLE, None), (HALVES, OneLane())]
    modes += [(f"split {n}", _lanes(subject, n)) for n in subject.usable_splits(session)]
    if len(modes) == 2 and subject.device.type == "cuda":
        by_priority = CudaLanes(subject.second, subject.high, subject.sizes.splits[0])
        modes.append((f"priority {subject.sizes.splits[0]}", by_priority))
    try:
        for num_tokens, kv_gb in subject.sizes.stack:
            point = _stack_point(subject, num_tokens, kv_gb)
            subject.heat()
            rows = []
            for mode, lanes in modes:
                forced, partition = _forced(base)
                executor.set_overlap(forced, {} if lanes is None else {partition: lanes})
                row = session.point(
                    f"T={num_tokens} {kv_gb:g} GB {mode}",
                    STEP_POINT_S,
                    partial(_timed, timer, point),
                    mode=mode,
                    num_tokens=num_tokens,
                )
                if row is not None:
                    rows.append(row)
            _log_stack(session, num_tokens, kv_gb, rows)
    finally:
        executor.set_overlap(base, {})


def _stack_point(subject: Subject, num_tokens: int, kv_gb: float) -> StepPoint:
    """Decodes that read so much, beside prompts for the rest of the tokens, at least half of them."""
    executor = subject.executor
    capacity = executor.num_blocks * executor.block_size
    wanted = min(kv_gb * 1e9 / executor.cost_model.model.kv_bytes_per_token, 0.75 * capacity)
    num_rows = int(min(max(wanted / subject.sizes.context, 1), num_tokens // 2))
    left = num_tokens - num_rows
    prompts = (512,) * (left // 512) + ((left % 512,) if left % 512 else ())
    return StepPoint(prompts, num_rows, int(wanted / num_rows))


def _lanes(subject: Subject, num_sms: int) -> Lanes:
    if subject.device.type != "cuda":
        return OneLane()
    attention, gemm, sms = subject.split(num_sms)
    return CudaLanes(gemm, attention, sms)


def _forced(cost_model: CostModel) -> tuple[CostModel, Partition]:
    """A cost model by which every step with decodes runs in its one partition."""
    partition = Partition(1, 1.0, 1.0)
    hardware = replace(cost_model.hardware, partitions=(partition,), split_overhead=0.0)
    return replace(cost_model, hardware=hardware), partition


def _log_stack(session: Session, num_tokens: int, kv_gb: float, rows: list[Row]) -> None:
    times = {row["mode"]: row["duration_s"] * 1e3 for row in rows}
    overlapped = {mode: ms for mode, ms in times.items() if mode not in {WHOLE, HALVES}}
    if WHOLE in times and overlapped:
        best = min(overlapped, key=overlapped.__getitem__)
        session.log(
            f"T={num_tokens} {kv_gb:g} GB: whole {times[WHOLE]:.2f} ms, halves {times.get(HALVES, math.nan):.2f}, "
            f"{best} {overlapped[best]:.2f}: {times[WHOLE] / overlapped[best]:.3f}x"
        )


# -- what is left ----------------------------------------------------------------------------------------------------


def small(session: Session, subject: Subject) -> None:
    """Attention of prompts, and the small operations of a step."""
    config = subject.model.config
    for num_rows, length, prefix in subject.sizes.prefills:
        session.point(
            f"prefill {num_rows}x{length}+{prefix}",
            POINT_S,
            partial(_prefill, subject, num_rows, length, prefix),
            num_rows=num_rows,
            length=length,
            prefix=prefix,
        )
    for num_tokens in subject.sizes.nano_tokens:
        for name, work in _operations(subject, num_tokens).items():
            session.point(
                f"{name} M={num_tokens}",
                POINT_S,
                partial(_call, subject, work),
                operation=name,
                num_tokens=num_tokens,
            )
    for num_rows in subject.sizes.head_rows:
        hidden = subject.random(num_rows, config.hidden_size)
        logits = torch.cat(list(subject.model.logits(hidden)))
        works: dict[str, Work] = {
            "head": partial(_head, subject, hidden),
            "choose": partial(_choose, logits),
        }
        for name, work in works.items():
            session.point(
                f"{name} rows={num_rows}",
                POINT_S,
                partial(_call, subject, work),
                operation=name,
                num_rows=num_rows,
            )
    chain = ChainBench(subject, subject.sizes.nano_tokens[0])
    session.point("host time of a layer", POINT_S, partial(_host_time, subject, chain))


def _call(subject: Subject, work: Work) -> Row:
    return {"us": subject.timer.call_us(work, subject.full)}


def _head(subject: Subject, hidden: Tensor, _call: int) -> None:
    list(subject.model.logits(hidden))


def _choose(logits: Tensor, _call: int) -> None:
    choose(logits, [SamplingRow(SamplingParams(temperature=0.0), 0, 0)] * len(logits))


def _prefill(subject: Subject, num_rows: int, length: int, prefix: int) -> Row:
    config = subject.model.config
    attention = subject.attention.twin()
    attention.begin(subject.layout(np.full(num_rows, prefix), np.full(num_rows, length)))
    qkv = subject.random(num_rows * length, sum(config.qkv_sizes))
    out = subject.random(num_rows * length, config.qkv_sizes[0])
    work = torch.inference_mode()(lambda i: attention.attend(i % subject.num_layers, qkv, out, "prefill"))
    us = subject.timer.call_us(work, subject.full)
    pairs = num_rows * (length * prefix + length * (length + 1) / 2)
    return {"us": us, "tflops": 4 * config.qkv_sizes[0] * pairs / us / 1e6}


def _operations(subject: Subject, num_tokens: int) -> dict[str, Work]:
    config, model = subject.model.config, subject.model
    layer = model.layers[0]
    attention = subject.attention.twin()
    attention.begin(subject.layout(np.zeros(1, np.int64), np.full(1, num_tokens)))
    x, qkv = subject.random(num_tokens, config.hidden_size), subject.random(num_tokens, sum(config.qkv_sizes))
    gate_up = subject.random(num_tokens, subject.product_sizes["gate_up"][1])
    nothing = torch.zeros_like(x)
    ids = torch.zeros(num_tokens, dtype=torch.int64, device=subject.device)
    works: dict[str, Work] = {
        "norm": lambda _: model.ops.add_rms_norm(x, nothing, layer.input_norm),
        "silu_mul": lambda _: model.ops.silu_mul(gate_up),
        "rope_and_store": lambda i: attention.store(i % subject.num_layers, qkv),
        "embedding": lambda _: model.embedding[ids],
    }
    return {name: torch.inference_mode()(work) for name, work in works.items()}


def _host_time(subject: Subject, chain: ChainBench) -> Row:
    calls = 50 if subject.device.type == "cuda" else 1
    subject.timer.synchronize()
    began_s = time.perf_counter()
    for i in range(calls):
        chain(i)
    spent_s = time.perf_counter() - began_s
    subject.timer.synchronize()
    return {"us": spent_s / calls * 1e6}


def drift(session: Session, subject: Subject) -> None:
    """Ceilings and one point of attention again, to see how far the device has moved."""
    subject.heat()
    session.point("copy", 1.0, partial(_copy, subject))
    session.point("product", 1.5, partial(_square_product, subject))
    bench = DecodeBench(subject, subject.sizes.layer_gb, subject.sizes.context)
    session.point(
        "attention",
        POINT_S,
        lambda: {"gbps": bench.gb / subject.timer.call_us(bench.work(subject.num_sms), subject.full) * 1e6},
    )
