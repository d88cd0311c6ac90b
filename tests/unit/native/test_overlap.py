"""Steps in two halves: how they are cut, that events order what lanes share, that results are those of whole steps."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blendserve.cost_model import CostModel, Partition
from blendserve.engines.native import device as device_module
from blendserve.engines.native import overlap
from blendserve.engines.native.attention import (
    KVShape,
    PagedAttention,
    StepLayout,
    TorchAttention,
    make_attention,
)
from blendserve.engines.native.executor import TorchExecutor
from blendserve.engines.native.model import LlamaModel, ModelConfig
from blendserve.engines.native.overlap import Lanes, OverlappedModel, split_batch
from blendserve.request import RequestTable, SamplingParams
from blendserve.scheduling.batch import Batch
from tests.recording_lanes import ORDERS, RaceError, RecordingLanes
from tests.unit.native import test_executor as executor_tests
from tests.workload import COST_MODEL

BLOCK_SIZE = 4
NUM_BLOCKS = 64
PARTITIONS = (Partition(24, 0.9, 0.5), Partition(64, 0.55, 0.95))
PARTITION = Partition(48, 1.0, 1.0)
OVERLAPPING = CostModel(COST_MODEL.model, replace(COST_MODEL.hardware, partitions=(PARTITION,)))
"""a device on which any step that decodes is through sooner in halves"""


def make_batch(rows: list[tuple[int, int, int, int]], block_size: int = BLOCK_SIZE) -> Batch:
    """Rows of (tokens computed, tokens to compute, earlier row whose blocks it shares, how many of them)."""
    new_blocks = iter(range(10_000))
    tables: list[list[int]] = []
    computed = []
    for num_computed, num_tokens, parent, num_shared in rows:
        shared = tables[parent][:num_shared] if num_shared else []
        computed.append(max(num_computed, len(shared) * block_size))
        num_blocks = -(-(computed[-1] + num_tokens) // block_size)
        tables.append(shared + [next(new_blocks) for _ in range(num_blocks - len(shared))])
    block_tables = np.full((len(rows), max(map(len, tables)) + 1), 9_999, dtype=np.int32)
    for row, table in enumerate(tables):
        block_tables[row, : len(table)] = table
    return Batch(
        slots=np.arange(len(rows), dtype=np.int32),
        requests=np.arange(len(rows), dtype=np.int32) + 100,
        num_computed=np.array(computed, dtype=np.int32),
        num_tokens=np.array([num_tokens for _, num_tokens, _, _ in rows], dtype=np.int32),
        samples=np.array([row % 3 != 1 for row in range(len(rows))]),
        block_tables=block_tables,
        num_prefill_tokens=0,
        num_decode_tokens=0,
        kv_tokens_read=1000,
        query_key_pairs=0.0,
    )


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Decodes, chunks, and rows whose prefix an earlier row writes in the same step."""
    rows: list[tuple[int, int, int, int]] = []
    for row in range(draw(st.integers(1, 24))):
        num_computed = draw(st.integers(0, 60))
        num_tokens = draw(st.sampled_from((1, 1, 1, 2, 7, 30)))
        parent, num_shared = 0, 0
        if row and draw(st.booleans()):
            parent = draw(st.integers(0, row - 1))
            total = rows[parent][0] + rows[parent][1]
            num_shared = draw(st.integers(0, total // BLOCK_SIZE))
            num_computed = max(num_computed, num_shared * BLOCK_SIZE)
        rows.append((num_computed, num_tokens, parent, num_shared))
    return make_batch(rows)


def tokens_of(batch: Batch) -> list[tuple[int, int]]:
    """(request, position) of all tokens."""
    columns = (batch.requests.tolist(), batch.num_computed.tolist(), batch.num_tokens.tolist())
    return [
        (request, first + i) for request, first, count in zip(*columns, strict=True) for i in range(count)
    ]


def slots_of(batch: Batch, row: int, positions: range) -> set[tuple[int, int]]:
    table = batch.block_tables[batch.slots[row]]
    return {(int(table[position // BLOCK_SIZE]), position % BLOCK_SIZE) for position in positions}


def parts_of(batch: Batch, num_rows: int) -> list[list[int]]:
    return [list(range(num_rows)), list(range(num_rows, len(batch.requests)))]


@settings(deadline=None)
@given(batches(), st.sampled_from((1, 2, 8, 128)))
def test_a_split_holds_every_token_once_in_an_order_that_works(batch: Batch, granularity: int) -> None:
    split, num_rows = split_batch(batch, BLOCK_SIZE, granularity)
    assert sorted(tokens_of(split)) == sorted(tokens_of(batch))
    ends = {
        request: int(first + count)
        for request, first, count in zip(batch.requests, batch.num_computed, batch.num_tokens, strict=True)
    }
    sampled = split.requests[split.samples].tolist()
    assert sorted(sampled) == sorted(batch.requests[batch.samples].tolist())
    for row in np.flatnonzero(split.samples):
        assert split.num_computed[row] + split.num_tokens[row] == ends[split.requests[row]]

    ones = split.requests[:num_rows][split.num_tokens[:num_rows] == 1]
    assert set(ones) <= set(batch.requests[batch.num_tokens == 1]), (
        "a cut chunk attends on the lane that writes it"
    )

    being_written = set()
    for row in range(len(batch.requests)):
        first, count = int(batch.num_computed[row]), int(batch.num_tokens[row])
        being_written |= slots_of(batch, row, range(first, first + count))
    written: set[tuple[int, int]] = set()
    for part in parts_of(split, num_rows):
        for row in part:
            first, count = int(split.num_computed[row]), int(split.num_tokens[row])
            written |= slots_of(split, row, range(first, first + count))
        for row in part:
            end = int(split.num_computed[row] + split.num_tokens[row])
            missing = (slots_of(split, row, range(end)) & being_written) - written
            assert not missing, "a row attends to what the other nano-batch has yet to write"


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 300), st.sampled_from((1, 1, 1, 5, 40, 300))), min_size=1, max_size=40),
    st.sampled_from((1, 2, 8, 128)),
)
def test_halves_are_near_equal(rows: list[tuple[int, int]], granularity: int) -> None:
    batch = make_batch([(computed, count, 0, 0) for computed, count in rows])
    split, num_rows = split_batch(batch, BLOCK_SIZE, granularity)
    tokens, kv_read = [], []
    for part in parts_of(split, num_rows):
        tokens.append(int(split.num_tokens[part].sum()))
        decodes = [row for row in part if split.requests[row] in batch.requests[batch.num_tokens == 1]]
        kv_read.append(int((split.num_computed[decodes] + 1).sum()))
    assert abs(tokens[0] - tokens[1]) <= granularity + 2
    longest = max((computed + 1 for computed, count in rows if count == 1), default=0)
    assert abs(kv_read[0] - kv_read[1]) <= longest
    if any(count > 2 * granularity + 2 for _, count in rows) and sum(tokens) >= 2 * granularity:
        assert min(tokens[0] % granularity, -tokens[0] % granularity) <= 1, "no tile of products is in vain"


def test_one_row_is_no_two_halves() -> None:
    model = SimpleNamespace(twin=lambda: None)
    overlapped = OverlappedModel(model, model, OVERLAPPING, {PARTITION: RecordingLanes()})
    assert overlapped.split(make_batch([(50, 1, 0, 0)]), BLOCK_SIZE) is None
    assert overlapped.split(make_batch([(50, 1, 0, 0)] * 2), BLOCK_SIZE) is not None


def test_the_profile_decides() -> None:
    """Whether to split, and onto which lanes."""
    few, many = PARTITIONS
    hardware = replace(
        COST_MODEL.hardware, partitions=PARTITIONS, split_overhead=0.02, attention_overhead_s=0.0
    )
    cost_model = CostModel(COST_MODEL.model, hardware)
    lanes = {few: RecordingLanes(), many: RecordingLanes()}
    model = SimpleNamespace(twin=lambda: None)
    overlapped = OverlappedModel(model, model, cost_model, lanes)
    batch = make_batch([(50, 1, 0, 0), (50, 30, 0, 0)] * 4)
    step = cost_model.step_cost(int(batch.num_tokens.sum()), 10**9)
    balanced = step.compute_s / step.memory_s * 1e9  # KV tokens that take as long to read as the products
    for ratio, chosen in ((0.0, None), (0.01, None), (0.3, few), (1.5, many)):
        halves = overlapped.split(replace(batch, kv_tokens_read=round(balanced * ratio)), BLOCK_SIZE)
        assert (halves and halves.lanes) is (chosen and lanes[chosen])


# -- a step against the whole one ------------------------------------------------------------------------------------


class Case:
    """A tiny model, and one step over a context."""

    def __init__(self, folder: Path, batch: Batch, backend: str = "torch") -> None:
        self.config = ModelConfig.from_folder(folder)
        self.model = LlamaModel.load(folder, self.config, torch.float32)
        self.batch = batch
        self.backend = backend
        generator = torch.Generator().manual_seed(0)
        self.tokens = {
            request: torch.randint(0, 512, (int(end),), generator=generator)
            for request, end in zip(
                batch.requests.tolist(), batch.num_computed + batch.num_tokens, strict=True
            )
        }
        # Rows that share blocks have the tokens of these blocks in common.
        for row, request in enumerate(batch.requests.tolist()):
            for earlier in range(row):
                both = batch.block_tables[[earlier, row]]
                num_shared = int((both[0] == both[1]).cumprod()[both[1] != 9_999].sum()) * BLOCK_SIZE
                self.tokens[request][:num_shared] = self.tokens[int(batch.requests[earlier])][:num_shared]

    def attention(self) -> PagedAttention:
        """Over a cache that holds the context."""
        config = self.config
        shape = KVShape(
            *(config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim),
            *(NUM_BLOCKS, BLOCK_SIZE, torch.float32),
        )
        attention = make_attention(shape, config.rope_tables(), self.backend, config.attention_rules)
        rows = np.flatnonzero(self.batch.num_computed)
        if len(rows):
            before = replace(
                self.batch,
                slots=self.batch.slots[rows],
                requests=self.batch.requests[rows],
                num_computed=np.zeros(len(rows), np.int32),
                num_tokens=self.batch.num_computed[rows],
                samples=np.zeros(len(rows), np.bool_),
            )
            self.whole(attention, before)
        if isinstance(attention, TorchAttention):
            written = torch.from_numpy(StepLayout.from_batch(self.batch, BLOCK_SIZE).kv_slots)
            for pages in cache_of(attention):
                pages.flatten(0, 1)[written] = torch.nan  # nobody may read what the step has yet to write
        return attention

    def ids(self, batch: Batch) -> torch.Tensor:
        return torch.tensor([int(self.tokens[request][position]) for request, position in tokens_of(batch)])

    def selected(self, batch: Batch) -> torch.Tensor:
        return torch.from_numpy(np.cumsum(batch.num_tokens)[batch.samples].astype(np.int64) - 1)

    def whole(self, attention: PagedAttention, batch: Batch) -> torch.Tensor:
        layout = StepLayout.from_batch(batch, BLOCK_SIZE)
        return self.model.hidden_states(self.ids(batch), layout, attention, self.selected(batch))

    def halves(
        self, attention: PagedAttention, lanes: RecordingLanes, num_steps: int = 1
    ) -> dict[int, torch.Tensor]:
        """Hidden states by request, of the last of some equal steps."""
        overlapped = OverlappedModel(self.model, attention, OVERLAPPING, {PARTITION: lanes})
        logits = torch.empty(0)
        for _ in range(num_steps):
            halves = overlapped.split(self.batch, BLOCK_SIZE)
            assert halves is not None
            layout = StepLayout.from_batch(halves.batch, BLOCK_SIZE)
            ids, selected = self.ids(halves.batch), self.selected(halves.batch)
            logits = overlapped.hidden_states(ids, layout, selected, halves) + 0  # main reads it
        lanes.drain()
        return dict(zip(halves.batch.requests[halves.batch.samples].tolist(), logits, strict=True))


MIXED = [
    (37, 1, 0, 0),
    (20, 9, 0, 0),
    (11, 1, 0, 0),
    (0, 14, 0, 0),
    (30, 1, 0, 0),
    (3, 1, 0, 0),
    (0, 2, 3, 2),
]
STEPS = {
    "mixed": MIXED,
    "decodes": [(12, 1, 0, 0), (50, 1, 0, 0), (3, 1, 0, 0)],
    "a chunk that is cut": [(7, 1, 0, 0), (5, 1, 0, 0), (10, 40, 0, 0)],
    "chunks only in the second": [(30, 1, 0, 0), (31, 1, 0, 0), (33, 1, 0, 0), (0, 2, 0, 0)],
    "a prefix written and read": [(0, 17, 0, 0), (0, 1, 0, 4), (16, 5, 0, 4), (40, 1, 0, 0), (40, 1, 0, 0)],
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are tiny, and more threads would wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3", "gemma3"])
def folder(
    request: pytest.FixtureRequest,
    make_tiny_model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    return make_tiny_model(request.param, tmp_path_factory.mktemp("overlap") / "model")


@pytest.fixture(scope="module")
def llama(make_tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("overlap") / "llama")


def cache_of(attention: Any) -> list[torch.Tensor]:
    return [*attention.keys, *attention.values]


@pytest.mark.parametrize("order", ORDERS)
def test_halves_are_as_good_as_the_whole(folder: Path, order: str) -> None:
    case = Case(folder, make_batch(MIXED))
    whole, halved = case.attention(), case.attention()
    expected = case.whole(whole, case.batch)
    lanes = RecordingLanes(order)
    states = case.halves(halved, lanes)
    requests = case.batch.requests[case.batch.samples].tolist()
    torch.testing.assert_close(
        torch.stack([states[request] for request in requests]), expected, atol=1e-5, rtol=1e-5
    )
    for ours, theirs in zip(cache_of(halved), cache_of(whole), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert lanes.num_operations["attention"] == 2 * case.config.num_layers


@pytest.mark.parametrize("backend", ["torch", "c"])
@pytest.mark.parametrize("name", STEPS)
def test_steps_of_all_kinds(llama: Path, name: str, backend: str) -> None:
    for samples in (None, False):
        batch = make_batch(STEPS[name])
        if samples is not None:
            batch.samples[:] = samples
        case = Case(llama, batch, backend)
        whole, halved = case.attention(), case.attention()
        expected = case.whole(whole, batch)
        watched = backend == "torch"  # the others use memory behind the back of torch
        lanes = RecordingLanes("attention")
        with lanes.recording() if watched else nullcontext():
            states = case.halves(halved, lanes, num_steps=2)
        for request, state in zip(batch.requests[batch.samples].tolist(), expected, strict=True):
            torch.testing.assert_close(states[request], state, atol=1e-5, rtol=1e-5)
        for ours, theirs in zip(cache_of(halved), cache_of(whole), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_every_wait_is_needed_and_none_is_missing(llama: Path) -> None:
    """Two steps have no race in any order, and a race as soon as any of their waits is left out."""
    case = Case(llama, make_batch(MIXED))
    for order in ORDERS:
        lanes = RecordingLanes(order)
        with lanes.recording():
            case.halves(case.attention(), lanes, num_steps=2)
    num_waits = lanes.num_waits
    assert num_waits == 2 * (2 + 2 * 2 * case.config.num_layers)
    for dropped in range(num_waits):
        lanes = RecordingLanes("random", dropped)
        attention = case.attention()
        with lanes.recording(), pytest.raises(RaceError):
            case.halves(attention, lanes, num_steps=2)


@pytest.mark.parametrize(
    ("first", "second"), [("write", "read"), ("read", "write"), ("write", "write")], ids=" after ".join
)
def test_what_a_race_is(first: str, second: str) -> None:
    memory, other = torch.zeros(8), torch.zeros(8)
    uses = {
        "write": lambda rows: memory[rows].fill_(1.0),
        "read": lambda rows: other[rows].copy_(memory[rows]),
    }
    for ordered, second_rows in ((True, slice(0, 4)), (False, slice(4, 8)), (False, slice(3, 8))):
        lanes = RecordingLanes("gemm")
        with lanes.recording():
            lanes.run("gemm", partial(uses[first], slice(0, 4)))
            if ordered:
                lanes.wait("attention", lanes.record("gemm"))
            lanes.run("attention", partial(uses[second], second_rows))
            with pytest.raises(RaceError) if second_rows == slice(3, 8) else nullcontext():
                lanes.drain()


def test_what_a_lane_allocates_stays_there() -> None:
    """Else an allocator could hand it out again while another lane still uses it."""
    lanes = RecordingLanes()
    made: list[torch.Tensor] = []
    with lanes.recording():
        lanes.run("gemm", lambda: made.append(torch.ones(3)))
        lanes.wait("attention", lanes.record("gemm"))
        lanes.run("attention", lambda: made[0].add_(1))
        with pytest.raises(RaceError, match="memory that gemm allocated"):
            lanes.drain()


# -- the executor ----------------------------------------------------------------------------------------------------


def open_executor(folder: Path, lanes: Lanes | None = None, **options: Any) -> TorchExecutor:
    return TorchExecutor(
        folder,
        None,
        cost_model=OVERLAPPING,
        num_blocks=64,
        block_size=BLOCK_SIZE,
        lanes=None if lanes is None else {PARTITION: lanes},
        **options,
    )


def run_staggered(executor: TorchExecutor, requests: RequestTable) -> list[list[int]]:
    """Chunks beside decodes, a prefix that is read in the step that writes it, a retraction."""
    driver = executor_tests.Driver(executor, requests)
    driver.admit(0, 0)
    driver.step({0: 3})
    driver.admit(2, 1)
    driver.tables[1, 0] = driver.tables[0, 0]
    driver.computed[2] = BLOCK_SIZE  # what they share, of which request 0 writes the end in the same step
    driver.step({0: 100, 2: 1})
    driver.admit(1, 2)
    driver.step({0: 1, 2: 2, 1: 2})
    driver.step({0: 1, 2: 1, 1: 100})
    del driver.slot_of[1]
    driver.admit(3, 2)
    driver.step({0: 1, 2: 1, 3: 1})
    driver.admit(1, 3)
    results = driver.finish(chunk=3)
    return executor_tests.token_ids([results[request] for request in range(4)])


@pytest.mark.parametrize("late", [False, True], ids=["at-once", "late"])
@pytest.mark.parametrize(
    "params", [executor_tests.GREEDY, SamplingParams(temperature=1.5, top_k=20)], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("order", ["gemm", "attention"])
def test_tokens_are_those_of_whole_steps(llama: Path, order: str, params: SamplingParams, late: bool) -> None:
    requests = executor_tests.table([params])
    lanes = RecordingLanes(order)
    executor = open_executor(llama, lanes, attention_backend="torch", late_results=late)
    expected = run_staggered(open_executor(llama, attention_backend="torch"), requests)
    with lanes.recording():
        assert run_staggered(executor, requests) == expected
    assert lanes.num_operations["attention"] > 40, "most steps ran in halves"
    assert lanes.is_idle


def test_overlap_can_be_turned_off(llama: Path) -> None:
    lanes = RecordingLanes()
    requests = executor_tests.table([executor_tests.GREEDY])
    expected = run_staggered(open_executor(llama), requests)
    assert run_staggered(open_executor(llama, lanes, overlap="off"), requests) == expected
    assert lanes.num_waits == 0


# -- lanes of a GPU --------------------------------------------------------------------------------------------------


class FakeStream:
    """A stream that does at once what it is given; events are the names of the streams that recorded them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.waited_for: list[str] = []

    def record_event(self) -> str:
        return self.name

    def wait_event(self, event: str) -> None:
        self.waited_for.append(event)


def test_streams_do_what_lanes_say(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main, gemm, attention = (FakeStream(name) for name in ("main", "gemm", "attention"))
    current: list[str] = []

    @contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        current.append(stream.name)
        yield

    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    case = Case(llama, make_batch(MIXED))
    expected = case.whole(case.attention(), case.batch)
    lanes = overlap.CudaLanes(gemm, attention, 48)
    overlapped = OverlappedModel(case.model, case.attention(), OVERLAPPING, {PARTITION: lanes})
    halves = overlapped.split(case.batch, BLOCK_SIZE)
    assert halves is not None
    layout = StepLayout.from_batch(halves.batch, BLOCK_SIZE)
    states = overlapped.hidden_states(case.ids(halves.batch), layout, case.selected(halves.batch), halves)
    order = np.argsort(halves.batch.requests[halves.batch.samples], kind="stable")
    torch.testing.assert_close(states[torch.from_numpy(order)], expected, atol=1e-5, rtol=1e-5)
    per_lane = 2 * case.config.num_layers
    assert main.waited_for == ["gemm"]
    assert gemm.waited_for == ["main", *["attention"] * per_lane]
    assert attention.waited_for == ["gemm"] * per_lane
    assert current.count("attention") == per_lane
    assert current[:5] == ["gemm", "attention", "gemm", "gemm", "attention"], (
        "decodes start before chunks attend"
    )


def test_a_profile_without_partitions_is_no_overlap(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert overlap.open_lanes(COST_MODEL.hardware, SimpleNamespace()) == {}
    assert "a100-80g-paper has no measured partitions" in caplog.text


class Failing:
    """Ways to open lanes, of which the first so many fail."""

    def __init__(self, failing: int) -> None:
        self.opened: list[str] = []
        self.ways = {
            name: partial(self.open, name, index < failing) for index, name in enumerate(("good", "fair"))
        }

    def open(self, name: str, fails: bool, partition: Partition) -> Lanes:
        self.opened.append(name)
        if fails and partition == PARTITIONS[1]:
            raise RuntimeError(f"{name} is not to be had")
        return RecordingLanes()


@pytest.mark.parametrize(
    ("failing", "warnings", "num_lanes"),
    [
        (0, [], 2),
        (1, ["by good, which leaves fair: good is not"], 2),
        (2, ["by good, which leaves fair", "by fair, which leaves no overlap: fair is not"], 0),
    ],
)
def test_lanes_fall_back_with_a_reason(failing: int, warnings: list[str], num_lanes: int) -> None:
    ways = Failing(failing)
    with pytest.warns(RuntimeWarning) if warnings else nullcontext() as caught:
        lanes = overlap._open_first(PARTITIONS, ways.ways, lambda _lanes: None)
    assert len(lanes) == num_lanes
    messages = [str(warning.message) for warning in caught or ()]
    assert len(messages) == len(warnings)
    assert all(expected in message for expected, message in zip(warnings, messages, strict=True))


class Eager(RecordingLanes):
    """Runs at once, as tests of a machine's lanes do; or does not run what is on the attention lane."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.broken = broken

    def run(self, lane: str, operation: Callable[[], Any]) -> None:
        super().run(lane, (lambda: None) if self.broken and lane == "attention" else operation)


@pytest.mark.parametrize("broken", [False, True])
def test_lanes_are_tried_out(llama: Path, broken: bool) -> None:
    model = Case(llama, make_batch(MIXED)).model
    lanes = Eager(broken)
    with lanes.recording(), pytest.raises(RuntimeError, match="wrong result") if broken else nullcontext():
        overlap._try_out(model, lanes)


class FakeDriver:
    """The driver's calls for green contexts, on a GPU of 132 multiprocessors that hands them out by eights."""

    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM="sm")
    CUgreenCtxCreate_flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM="default stream")
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING="non-blocking")

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.num_splits = 0
        self.contexts: list[set[int]] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cu") and name == object.__getattribute__(self, "failing"):
            return lambda *_args: (801,)
        return object.__getattribute__(self, name)

    def cuDeviceGet(self, index: int) -> tuple[int, str]:  # noqa: N802
        return 0, f"device {index}"

    def cuDeviceGetDevResource(self, device: str, kind: str) -> tuple[int, Any]:  # noqa: N802
        assert (device, kind) == ("device 1", "sm")
        return 0, resource(range(132))

    def cuDevSmResourceSplitByCount(self, groups: int, whole: Any, flags: int, least: int) -> Any:  # noqa: N802
        assert (groups, flags) == (1, 0)
        self.num_splits += 1
        count = -(-least // 8) * 8
        return 0, [resource(list(whole.ids)[:count])], groups, resource(list(whole.ids)[count:])

    def cuDevResourceGenerateDesc(self, resources: list[Any], count: int) -> tuple[int, Any]:  # noqa: N802
        assert len(resources) == count == 1
        return 0, resources[0]

    def cuGreenCtxCreate(self, description: Any, device: str, flag: str) -> tuple[int, int]:  # noqa: N802
        assert (device, flag) == ("device 1", "default stream")
        self.contexts.append(set(description.ids))
        return 0, len(self.contexts) - 1

    def cuGreenCtxStreamCreate(self, context: int, flag: str, priority: int) -> tuple[int, int]:  # noqa: N802
        assert (flag, priority) == ("non-blocking", 0)
        return 0, 1000 + context


def resource(ids: Any) -> Any:
    return SimpleNamespace(ids=ids, sm=SimpleNamespace(smCount=len(ids)))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver()
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=fake))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: (handle, device))
    device_module.split_gpu.cache_clear()
    yield fake
    device_module.split_gpu.cache_clear()


def test_both_sides_of_a_gpu_come_from_one_split(driver: FakeDriver) -> None:
    attention, rest, num_sms = device_module.split_gpu(1, 44)
    assert (attention, rest, num_sms) == ((1000, 1), (1001, 1), 48)
    assert driver.num_splits == 1
    assert driver.contexts == [set(range(48)), set(range(48, 132))]
    assert device_module.split_gpu(1, 44)[0] is attention, "a GPU that is opened again is not split again"


@pytest.mark.parametrize("failing", ["cuDevSmResourceSplitByCount", "cuGreenCtxCreate"])
def test_what_the_driver_refuses_is_an_error(driver: FakeDriver, failing: str) -> None:
    driver.failing = failing
    with pytest.raises(RuntimeError, match="801"):
        device_module.split_gpu(1, 48)
