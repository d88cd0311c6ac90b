"""The executor as the scheduler drives it: batches in, finished rows out, state by request."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from blendserve.engines.native import dtype_bytes, resolve_device, resolve_dtype
from blendserve.engines.native import executor as executor_module
from blendserve.engines.native.executor import TorchExecutor
from blendserve.errors import ConfigError, EngineDiedError, EngineError, ModelError
from blendserve.request import Completion, Failure, RequestTable, SamplingParams
from blendserve.scheduling.batch import Batch
from blendserve.tokenizer import TextStream
from blendserve.tokens import PromptTokens
from tests.workload import COST_MODEL

BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0.0)
PROMPTS = [[5, 6, 7, 8, 9], [100, 101, 102], [5, 6, 7, 8, 200, 201, 202], [300]]


@pytest.fixture(scope="module")
def folder(make_tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("executor") / "model")


@pytest.fixture(params=[False, True], ids=["at-once", "late"])
def executor(folder: Path, request: pytest.FixtureRequest) -> Iterator[TorchExecutor]:
    """On a CPU, taking tokens at once, and a step late as on a GPU."""
    executor = TorchExecutor(
        folder,
        None,
        cost_model=COST_MODEL,
        num_blocks=64,
        block_size=BLOCK_SIZE,
        late_results=request.param,
    )
    yield executor
    executor.close()


def table(
    params: list[SamplingParams], prompts: list[list[int]] = PROMPTS, max_tokens: int = 12
) -> RequestTable:
    count = len(prompts)
    return RequestTable(
        tokens=PromptTokens.from_lists(prompts),
        max_tokens=np.full(count, max_tokens, dtype=np.int32),
        declared_tokens=np.zeros(count, dtype=np.int32),
        params=params,
        params_index=np.arange(count, dtype=np.int32) % len(params),
        seeds=np.arange(count, dtype=np.uint64) + 77,
    )


class Driver:
    """A scheduler that admits, advances and retracts what the test says."""

    def __init__(self, executor: TorchExecutor, requests: RequestTable, num_slots: int = 4) -> None:
        self.executor = executor
        self.requests = requests
        self.known = requests.prompt_tokens.copy()
        self.computed = np.zeros(len(requests), dtype=np.int32)
        self.slot_of: dict[int, int] = {}
        self.tables = np.zeros((num_slots, 16), dtype=np.int32)
        self.results: dict[int, Completion | Failure] = {}
        executor.start(requests)

    def admit(self, request: int, slot: int) -> None:
        self.slot_of[request] = slot
        self.computed[request] = 0
        self.tables[slot] = slot * 16 + np.arange(16)[::-1]

    def step(self, chunks: dict[int, int]) -> None:
        """Compute up to so many tokens of each of these requests."""
        requests = np.array(list(chunks), dtype=np.int32)
        counts = np.minimum(list(chunks.values()), (self.known - self.computed)[requests]).astype(np.int32)
        samples = self.computed[requests] + counts == self.known[requests]
        batch = Batch(
            slots=np.array([self.slot_of[request] for request in chunks], dtype=np.int32),
            requests=requests,
            num_computed=self.computed[requests],
            num_tokens=counts,
            samples=samples,
            block_tables=self.tables,
            num_prefill_tokens=0,
            num_decode_tokens=0,
            kv_tokens_read=int(self.computed[requests][counts == 1].sum()),
            query_key_pairs=0,
        )
        result = self.executor.execute(batch)
        assert result.duration_s > 0
        assert result.finished.shape == samples.shape
        self.computed[requests] += counts
        self.known[requests] += samples
        for request in requests[result.finished].tolist():
            self.results[request] = self.executor.collect(request)
            del self.slot_of[request]

    def finish(self, chunk: int = 100) -> dict[int, Completion | Failure]:
        while self.slot_of:
            self.step(dict.fromkeys(self.slot_of, chunk))
        return self.results


def run_all(executor: TorchExecutor, requests: RequestTable, chunk: int = 100) -> list[Completion | Failure]:
    driver = Driver(executor, requests, num_slots=len(requests))
    for request in range(len(requests)):
        driver.admit(request, request)
    results = driver.finish(chunk)
    return [results[request] for request in range(len(requests))]


def token_ids(results: list[Completion | Failure]) -> list[list[int]]:
    assert all(isinstance(result, Completion) for result in results)
    return [result.token_ids for result in results if isinstance(result, Completion)]


def test_greedy_tokens_are_those_of_transformers(executor: TorchExecutor, folder: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = []
    for prompt in PROMPTS:
        sequence = list(prompt)
        for _ in range(12):
            with torch.inference_mode():
                sequence.append(int(reference(torch.tensor([sequence])).logits[0, -1].argmax()))
        expected.append(sequence[len(prompt) :])
    results = run_all(executor, table([GREEDY]))
    assert token_ids(results) == expected
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert isinstance(result, Completion)
        assert (result.num_prompt_tokens, result.finish_reason, result.text) == (len(prompt), "length", "")


def test_a_step_may_sample_nothing(executor: TorchExecutor) -> None:
    whole = run_all(executor, table([GREEDY]))
    assert run_all(executor, table([GREEDY]), chunk=2) == whole


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(temperature=1.5), SamplingParams(top_k=20, logprobs=2)]
)
def test_a_retracted_request_goes_on_where_it_was(executor: TorchExecutor, params: SamplingParams) -> None:
    expected = token_ids(run_all(executor, table([params])))
    driver = Driver(executor, table([params]))
    for request in (0, 1, 2):
        driver.admit(request, request)
    for _ in range(5):
        driver.step({0: 100, 1: 100, 2: 100})
    del driver.slot_of[1]
    driver.admit(3, 1)  # in its slot, over its blocks
    driver.step({0: 1, 2: 1, 3: 100})
    driver.admit(1, 3)  # back in another, recomputing prompt and output in odd chunks
    driver.step({0: 1, 1: 4, 2: 1, 3: 1})
    driver.step({1: 3})
    results = driver.finish()
    assert token_ids([results[request] for request in range(4)]) == expected


def test_sampled_tokens_depend_on_the_seed_and_not_on_the_company(executor: TorchExecutor) -> None:
    params = SamplingParams(temperature=1.0)
    together = token_ids(run_all(executor, table([params])))
    assert together == token_ids(run_all(executor, table([params])))
    reordered = table([params], PROMPTS[::-1])
    reordered.seeds = reordered.seeds[::-1].copy()
    assert token_ids(run_all(executor, reordered)) == together[::-1]
    other = table([params])
    other.seeds = other.seeds + np.uint64(1)
    assert token_ids(run_all(executor, other)) != together


def test_output_that_is_not_finite_fails_its_request_alone(executor: TorchExecutor) -> None:
    healthy = run_all(executor, table([GREEDY]))
    assert executor._loaded is not None
    executor._loaded[0].embedding[PROMPTS[1][1]] = torch.nan
    results = run_all(executor, table([GREEDY]))
    assert isinstance(results[1], Failure)
    assert (results[1].code, results[1].status_code) == ("internal_error", 500)
    assert [results[i] for i in (0, 2, 3)] == [healthy[i] for i in (0, 2, 3)]
    # The blocks it leaves hold NaN; whoever gets them next must not notice.
    driver = Driver(executor, table([GREEDY]))
    driver.admit(2, 1)
    assert driver.finish()[2] == healthy[2]


def test_the_model_length_ends_a_request(folder: Path) -> None:
    executor = TorchExecutor(
        folder, None, cost_model=COST_MODEL, num_blocks=64, block_size=4, max_model_len=10
    )
    [result] = run_all(executor, table([GREEDY], [[3, 4, 5, 6]], max_tokens=100))
    assert isinstance(result, Completion)
    assert (len(result.token_ids), result.finish_reason) == (6, "length")


def test_the_cache_is_sized_in_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 2 tensors x 2 layers x 2 heads x 16 dimensions x 4 bytes = 512 bytes per token
    executor = TorchExecutor(folder, None, cost_model=COST_MODEL, block_size=16, kv_cache_memory=100_000)
    assert (executor.num_blocks, executor.max_model_len) == (12, 192)
    assert TorchExecutor(
        folder, None, cost_model=COST_MODEL, block_size=16, kv_cache_memory=100_000, dtype="bfloat16"
    ).num_blocks == 24  # fmt: skip
    with pytest.raises(ConfigError, match="kv-cache-memory"):
        TorchExecutor(folder, None, cost_model=COST_MODEL, kv_cache_memory=100)
    monkeypatch.setattr(executor_module, "DEFAULT_KV_BYTES", 1 << 20)
    assert TorchExecutor(folder, None, cost_model=COST_MODEL, block_size=16).num_blocks == 128


def test_what_does_not_fit_into_memory_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 2 layers of 64 x (64 + 2 x 32 + 64) + 3 x 64 x 128, embedding and head of 512 x 64: 139264 weights
    weights = 139_264 * 4
    monkeypatch.setattr(executor_module, "available_memory", lambda: weights + 200_000)
    fitting = TorchExecutor(folder, None, cost_model=COST_MODEL, block_size=16, kv_cache_memory=200_000)
    assert fitting.num_blocks == 24
    with pytest.raises(ConfigError, match="lower --kv-cache-memory to at most 200000, or leave it out"):
        TorchExecutor(folder, None, cost_model=COST_MODEL, block_size=16, kv_cache_memory=200_001)
    monkeypatch.setattr(executor_module, "available_memory", lambda: weights - 1)
    with pytest.raises(
        ConfigError, match=r"weights take .* as float32, but .* available; use --dtype bfloat16"
    ):
        TorchExecutor(folder, None, cost_model=COST_MODEL)
    monkeypatch.setattr(executor_module, "available_memory", lambda: None)
    assert TorchExecutor(folder, None, cost_model=COST_MODEL, kv_cache_memory=1 << 20).num_blocks == 64


def test_threads_are_no_more_than_the_container_grants(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        for quota, given, expected in (
            (None, None, 4),
            (2.5, None, 2),
            (0.5, None, 1),
            (16.0, None, 4),
            (1.0, 3, 3),
        ):
            torch.set_num_threads(4)
            monkeypatch.setattr(executor_module, "core_quota", lambda quota=quota: quota)
            TorchExecutor(folder, None, cost_model=COST_MODEL, num_blocks=1, num_threads=given)
            assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


def test_a_prompt_may_fill_the_context(folder: Path) -> None:
    """All 512 positions but one: computed in chunks, with one token of output."""
    prompt = np.random.default_rng(0).integers(3, 500, 511).tolist()
    for backend in ("auto", "torch"):
        executor = TorchExecutor(
            folder, None, cost_model=COST_MODEL, num_blocks=32, block_size=16, attention_backend=backend
        )
        assert executor.max_model_len == 512
        driver = Driver(executor, table([GREEDY], [prompt]), num_slots=1)
        driver.tables = np.arange(32, dtype=np.int32)[None]
        driver.slot_of[0] = 0
        [result] = driver.finish(chunk=100).values()
        assert isinstance(result, Completion)
        assert (len(result.token_ids), result.finish_reason) == (1, "length")


def test_a_closed_executor_says_so(executor: TorchExecutor) -> None:
    driver = Driver(executor, table([GREEDY]))
    driver.admit(0, 0)
    executor.close()
    with pytest.raises(EngineError, match="closed"):
        driver.step({0: 1})


def test_a_missing_model_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        TorchExecutor(tmp_path, None, cost_model=COST_MODEL)


class Words:
    """A tokenizer that knows where sequences end, and no text."""

    def __init__(self, *eos_token_ids: int) -> None:
        self.eos_token_ids = frozenset(eos_token_ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return ""

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        raise NotImplementedError


@pytest.fixture
def late(folder: Path) -> Iterator[tuple[TorchExecutor, list[list[int]]]]:
    """An executor that takes tokens a step late, and what is generated by one that does not."""
    sizes = {"cost_model": COST_MODEL, "num_blocks": 64, "block_size": BLOCK_SIZE}
    expected = token_ids(run_all(TorchExecutor(folder, None, **sizes), table([GREEDY])))
    executor = TorchExecutor(folder, Words(expected[0][4]), late_results=True, **sizes)
    yield executor, expected
    executor.close()


def test_an_end_is_seen_one_step_late(
    late: tuple[TorchExecutor, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, expected = late
    tokens = expected[0]
    eos = tokens[4]
    num_tokens = tokens.index(eos) + 1
    rows: list[int] = []
    monkeypatch.setattr(executor, "_launch", recording(executor._launch, rows))
    driver = Driver(executor, table([GREEDY]))
    driver.admit(0, 0)
    for _ in range(num_tokens):
        driver.step({0: 100})
        assert not driver.results
    driver.step({0: 1})
    [result] = driver.results.values()
    assert isinstance(result, Completion)
    assert (result.token_ids, result.finish_reason) == (tokens[:num_tokens], "stop")
    assert rows == [1] * (num_tokens + 1), "the row behind the end was computed, and its token dropped"


def test_a_row_behind_the_last_token_is_not_computed(
    late: tuple[TorchExecutor, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, expected = late
    rows: list[int] = []
    monkeypatch.setattr(executor, "_launch", recording(executor._launch, rows))
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    driver = Driver(executor, table([params], max_tokens=3))
    driver.admit(0, 0)
    driver.admit(1, 1)
    driver.step({0: 100})
    for _ in range(3):
        driver.step({0: 1, 1: 100})
    assert set(driver.results) == {0}
    driver.step({1: 100})
    assert rows == [1, 2, 2, 1, 0], "a step of rows that have all tokens computes nothing"
    for request in (0, 1):
        result = driver.results[request]
        assert isinstance(result, Completion)
        assert (result.token_ids, result.finish_reason) == (expected[request][:3], "length")


def test_what_is_on_its_way_when_a_job_ends_is_forgotten(late: tuple[TorchExecutor, list[list[int]]]) -> None:
    executor, expected = late
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    driver = Driver(executor, table([params]))
    driver.admit(1, 0)
    driver.step({1: 100})
    again = Driver(executor, table([params]))
    again.admit(1, 0)
    again.finish()
    assert token_ids([again.results[1]]) == [expected[1]]


def test_a_prompt_is_computed_for_those_who_share_it(late: tuple[TorchExecutor, list[list[int]]]) -> None:
    """A request that has ended unnoticed was retracted and comes back: others count on the blocks of its prompt."""
    executor, expected = late
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    driver = Driver(executor, table([params], max_tokens=3))
    driver.admit(0, 0)
    for _ in range(3):
        driver.step({0: 100})
    del driver.slot_of[0]  # its three tokens are generated, the last is on its way
    driver.admit(0, 2)
    driver.admit(2, 1)
    driver.tables[1, 0] = driver.tables[2, 0]
    driver.computed[2] = BLOCK_SIZE  # the block they share, which request 0 fills in the same step
    driver.step({0: BLOCK_SIZE, 2: 100})
    driver.finish()
    assert token_ids([driver.results[0], driver.results[2]]) == [expected[0][:3], expected[2][:3]]


def recording(launch: Callable[[Batch], object], rows: list[int]) -> Callable[[Batch], object]:
    """`launch`, noting how many rows are left of each batch."""

    def recorded(batch: Batch) -> object:
        executor = launch.__self__
        rows.append(len(executor._without_surplus(batch).requests))
        return launch(batch)

    return recorded


def test_a_gpu_that_fails_is_dead(executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(executor, table([GREEDY]))
    driver.admit(0, 0)

    def fail(*_args: object) -> None:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    monkeypatch.setattr(executor, "_launch", fail)
    with pytest.raises(EngineDiedError, match="illegal memory access"):
        driver.step({0: 1})


def test_random_weights(folder: Path, tmp_path: Path) -> None:
    """They need the config alone, are the same each time, and do not decay or explode."""
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    outputs = []
    for _ in range(2):
        executor = TorchExecutor(
            tmp_path, None, cost_model=COST_MODEL, num_blocks=64, block_size=4, load_format="dummy"
        )
        outputs.append(token_ids(run_all(executor, table([GREEDY]))))
    assert outputs[0] == outputs[1]
    assert outputs[0] != token_ids(
        run_all(
            TorchExecutor(folder, None, cost_model=COST_MODEL, num_blocks=64, block_size=4), table([GREEDY])
        )
    )
    with pytest.raises(ModelError, match="safetensors"):
        TorchExecutor(tmp_path, None, cost_model=COST_MODEL, num_blocks=64)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_device_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--device cpu"):
        TorchExecutor(folder, None, cost_model=COST_MODEL, device="cuda")
    with pytest.raises(ConfigError, match=r"needs a GPU|blendserve\[cuda\]"):
        TorchExecutor(folder, None, cost_model=COST_MODEL, attention_backend="triton")


def test_dtypes() -> None:
    assert dtype_bytes("float32") == 4
    assert dtype_bytes("bfloat16") == 2
    assert resolve_dtype("auto") in {"float32", "bfloat16"}
    assert resolve_dtype("auto", "cuda") == "bfloat16"
    assert (resolve_device("cpu"), resolve_device("cuda")) == ("cpu", "cuda")
