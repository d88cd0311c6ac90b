"""The offline API on a tiny model in this process, and what it promises to those who come from vLLM."""

import asyncio
import gc
import inspect
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

import blendserve
from blendserve import LLM, CompletionOutput, RequestOutput, SamplingParams
from blendserve.engines.supervised import SupervisedEngine
from blendserve.errors import ConfigError, EngineError, FailedRequestsError, PromptError
from blendserve.request import Completion, Failure, StepOutput, StepStats
from tests.fake_openai import FakeOpenAI, running

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
MAX_MODEL_LEN = 96


@pytest.fixture(scope="module")
def model(make_tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = make_tiny_model("llama", tmp_path_factory.mktemp("llm") / "tiny", with_tokenizer=True)
    return folder


@pytest.fixture(scope="module")
def make_llm(model: Path) -> Callable[..., LLM]:
    def make(**options: Any) -> LLM:
        options = {
            "engine_process": False,
            "dtype": "float32",
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": 4,
            "kv_cache_memory_bytes": 1 << 20,
        } | options
        return LLM(str(model), **options)

    return make


@pytest.fixture(scope="module")
def llm(make_llm: Callable[..., LLM]) -> Iterator[LLM]:
    with make_llm() as llm:
        yield llm


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


# -------- generate and chat --------


def test_outputs_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["one two three", "a", "The capital of France is", "one two"]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    numbers = [int(output.request_id) for output in outputs]
    assert numbers == list(range(numbers[0], numbers[0] + 4))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.finished
        assert output.prompt_token_ids == llm.get_tokenizer()(prompt)["input_ids"]
        (completion,) = output.outputs
        assert (completion.index, completion.finish_reason, completion.stop_reason) == (0, "length", None)
        assert len(completion.token_ids) == 4
        assert completion.text == llm.get_tokenizer().decode(completion.token_ids)
        assert completion.logprobs is completion.cumulative_logprob is None


def test_a_prompt_may_be_written_in_several_ways(llm: LLM) -> None:
    text = "Once upon a time"
    token_ids = llm.get_tokenizer()(text)["input_ids"]
    forms: list[Any] = [text, token_ids, {"prompt": text}, {"prompt_token_ids": token_ids}, tuple(token_ids)]
    together = llm.generate(forms, GREEDY, use_tqdm=False)
    alone = [llm.generate(form, GREEDY, use_tqdm=False)[0] for form in forms[:4]]
    assert len({tuple(output.outputs[0].token_ids) for output in together + alone}) == 1
    assert {tuple(output.prompt_token_ids or ()) for output in together} == {tuple(token_ids)}
    assert [output.prompt for output in together] == [text, None, text, None, None]


def test_prompts_and_parameters_of_any_iterable(llm: LLM) -> None:
    limits = [3, 1, 2]
    outputs = llm.generate(
        (f"prompt {number}" for number in limits),
        (SamplingParams(temperature=0.0, max_tokens=limit) for limit in limits),
        use_tqdm=False,
    )
    assert [len(output.outputs[0].token_ids) for output in outputs] == limits


def test_no_prompts(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_shared_prefixes_are_computed_once(llm: LLM) -> None:
    prefix = list(range(100, 132))  # two blocks
    outputs = llm.generate([[*prefix, 7], [*prefix, 8], [9]], GREEDY, use_tqdm=False)
    assert sorted(output.num_cached_tokens or 0 for output in outputs) == [0, 0, 32]


def test_several_completions_of_a_prompt(llm: LLM) -> None:
    (output,) = llm.generate("Hello", SamplingParams(n=3, seed=5, max_tokens=6), use_tqdm=False)
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3


def test_seeds(llm: LLM) -> None:
    def sampled(seed: int | None) -> str:
        return texts(llm.generate("Hello", SamplingParams(seed=seed, max_tokens=8), use_tqdm=False))[0]

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)
    assert sampled(None) != sampled(-1), "without a seed, no two calls draw the same"


def test_log_probabilities(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=2)
    (completion,) = llm.generate("Hello", params, use_tqdm=False)[0].outputs
    assert completion.logprobs is not None
    chosen = [
        places[token_id] for places, token_id in zip(completion.logprobs, completion.token_ids, strict=True)
    ]
    assert [logprob.rank for logprob in chosen] == [1, 1, 1]
    assert [len(places) for places in completion.logprobs] == [2, 2, 2]
    assert "".join(logprob.decoded_token or "" for logprob in chosen) == completion.text
    assert completion.cumulative_logprob == pytest.approx(sum(logprob.logprob for logprob in chosen))
    answer = llm.chat([{"role": "user", "content": "Hi"}], params, use_tqdm=False)[0].outputs[0]
    assert answer.logprobs is not None
    assert len(answer.logprobs[0]) == 2


def test_stop_strings(llm: LLM) -> None:
    (whole,) = llm.generate("Hello", SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)[0].outputs
    stop = llm.get_tokenizer().decode(whole.token_ids[2:3])
    for given in (stop, [stop, "never"]):
        params = SamplingParams(temperature=0.0, max_tokens=8, stop=given)
        (completion,) = llm.generate("Hello", params, use_tqdm=False)[0].outputs
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        assert completion.text == whole.text[: whole.text.index(stop)]


@pytest.mark.parametrize("max_tokens", [None, 10_000])
def test_to_the_end_of_the_context(llm: LLM, max_tokens: int | None) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    (completion,) = llm.generate([[5] * 90], params, use_tqdm=False)[0].outputs
    assert (len(completion.token_ids), completion.finish_reason) == (MAX_MODEL_LEN - 90, "length")


def test_chat(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Say something."}]
    (answer,) = llm.chat(conversation, GREEDY, use_tqdm=False)
    rendered = llm.get_tokenizer().apply_chat_template(
        conversation, tokenize=False, add_generation_prompt=True
    )
    assert answer.prompt == rendered
    same = llm.generate(rendered, GREEDY, use_tqdm=False, tokenization_kwargs={"add_special_tokens": False})
    assert texts(same) == [answer.outputs[0].text]
    other = [{"role": "system", "content": "Be brief."}, *conversation]
    answers = llm.chat([other, conversation], GREEDY, False)
    assert texts(answers)[1] == answer.outputs[0].text
    assert "Be brief." in (answers[0].prompt or "")
    (bare,) = llm.chat(conversation, GREEDY, use_tqdm=False, add_generation_prompt=False)
    assert len(bare.prompt or "") < len(rendered)


def test_defaults_come_from_the_model(model: Path, make_llm: Callable[..., LLM]) -> None:
    file = model / "generation_config.json"
    before = file.read_text()
    try:
        file.write_text('{"temperature": 0.0, "max_new_tokens": 3, "top_k": null, "do_sample": true}')
        with make_llm() as llm:
            assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, max_tokens=3)
            first, second = (llm.generate("Hello", use_tqdm=False)[0].outputs[0] for _ in range(2))
            assert first.token_ids == second.token_ids
            assert len(first.token_ids) == 3
    finally:
        file.write_text(before)


class Bar:
    """A progress bar that keeps what it was told."""

    def __init__(self, total: int, desc: str, **_options: Any) -> None:
        self.total, self.desc, self.num_done, self.postfix = total, desc, 0, ""
        bars.append(self)

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def update(self, count: int) -> None:
        self.num_done += count

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self.postfix = text


bars: list[Bar] = []


def test_progress(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    bars.clear()
    llm.generate(["a", "b", "c"], GREEDY, use_tqdm=Bar)
    assert [(bar.desc, bar.total, bar.num_done) for bar in bars] == [("Processed prompts", 3, 3)]
    assert "toks/s" in bars[0].postfix
    assert capsys.readouterr().err == ""
    llm.generate(["a"], GREEDY)
    assert "1/1" in capsys.readouterr().err


# -------- what cannot run --------


def test_a_bad_prompt_is_named_and_nothing_runs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SupervisedEngine, "run", lambda *_arguments: pytest.fail("it ran"))
    with pytest.raises(
        ValueError, match=r"prompt 1 .*maximum context length is 96 tokens.*97 tokens"
    ) as caught:
        llm.generate(["fine", [5] * 97], GREEDY)
    assert isinstance(caught.value, PromptError)
    assert caught.value.index == 1


@pytest.mark.parametrize(
    ("prompt", "params", "reason"),
    [
        ("", GREEDY, "non-empty"),
        ([1, 10**6], GREEDY, "vocabulary"),
        ([1, -1], GREEDY, "token ids"),
        (3.5, GREEDY, "float"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, GREEDY, "multi_modal_data"),
        ({}, GREEDY, "prompt_token_ids"),
        ("a", SamplingParams(temperature=-1.0), "temperature"),
        ("a", SamplingParams(top_p=0.0), "top_p"),
        ("a", SamplingParams(n=0), "'n'"),
        ("a", SamplingParams(max_tokens=0), "max_tokens"),
        ("a", SamplingParams(presence_penalty=2.5), "presence_penalty"),
        ("a", SamplingParams(repetition_penalty=0.0), "repetition_penalty"),
        ("a", SamplingParams(prompt_logprobs=-1), "prompt_logprobs"),
        ("a", SamplingParams(logit_bias={10**6: 1.0}), "vocabulary"),
        ("a", SamplingParams(allowed_token_ids=[]), "allowed_token_ids"),
        ("a", SamplingParams(structured_outputs={"regex": "(a"}), "regular expression"),
        ("a", SamplingParams(structured_outputs={"json": {"type": "x"}}), "JSON schema"),
        ("a", SamplingParams(extra_args={"a": 1}), "vllm_xargs"),
        ("a", SamplingParams(bad_words=[""]), "bad_words"),
        ("a", SamplingParams(thinking_token_budget=5), "thinking_token_budget"),
    ],
)
def test_bad_prompts_and_parameters(llm: LLM, prompt: Any, params: SamplingParams, reason: str) -> None:
    with pytest.raises(PromptError, match=reason) as caught:
        llm.generate(["fine", prompt], [GREEDY, params], use_tqdm=False)
    assert caught.value.index == 1
    fine, failed = llm.generate(["fine", prompt], [GREEDY, params], use_tqdm=False, on_error="return")
    assert fine.error is None
    assert len(fine.outputs[0].token_ids) == 4
    assert failed.error is not None
    assert reason in failed.error.message
    assert list(failed.outputs) == []


def test_what_outputs_must_look_like(llm: LLM) -> None:
    params = [
        SamplingParams(max_tokens=20, structured_outputs={"choice": ["yes", "no"]}),
        SamplingParams(max_tokens=20, structured_outputs=Constraint(regex="[0-9]{4}")),
        SamplingParams(max_tokens=4, allowed_token_ids=[50]),
        SamplingParams(max_tokens=4, logit_bias={60: 100.0}),
    ]
    answers = llm.generate(["a"] * 4, params, use_tqdm=False)
    choice, number, allowed, biased = (answer.outputs[0] for answer in answers)
    assert choice.text in {"yes", "no"}
    assert choice.finish_reason == "stop"
    assert len(number.text) == 4
    assert number.text.isdecimal()
    assert allowed.token_ids == [50] * 4
    assert biased.token_ids == [60] * 4


@dataclass
class Constraint:
    """Has the fields of vLLM's StructuredOutputsParams that matter here."""

    json: dict[str, Any] | None = None
    regex: str | None = None


def test_log_probabilities_of_prompts_and_of_named_tokens(llm: LLM) -> None:
    prompt = [5, 6, 7, 8]
    asked = SamplingParams(
        n=2, max_tokens=2, prompt_logprobs=1, logprob_token_ids=[50, 51, 52], temperature=1.0
    )
    [output] = llm.generate([prompt], asked, use_tqdm=False)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == 4
    for token_id, place in zip(prompt[1:], output.prompt_logprobs[1:], strict=True):
        assert place is not None
        assert token_id in place
        assert len(place) in {1, 2}
        assert max(place.values(), key=lambda entry: entry.logprob).rank == 1
    for completion in output.outputs:
        assert completion.logprobs is not None
        for token_id, place in zip(completion.token_ids, completion.logprobs, strict=True):
            assert place.keys() == {token_id, 50, 51, 52}
            assert all(entry.rank is None for entry in place.values())
    [plain] = llm.generate([prompt], SamplingParams(max_tokens=2), use_tqdm=False)
    assert plain.prompt_logprobs is None


def test_arguments_that_cannot_be_honoured(llm: LLM) -> None:
    hello = [{"role": "user", "content": "Hi"}]
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("lora_request", lambda: llm.generate("a", GREEDY, lora_request=object())),
        ("priority", lambda: llm.generate("a", GREEDY, priority=[1])),
        ("tools", lambda: llm.chat(hello, GREEDY, tools=[{"type": "function"}])),
        ("chat_template", lambda: llm.chat(hello, GREEDY, chat_template="{{ x }}")),
        ("continue_final_message", lambda: llm.chat(hello, GREEDY, continue_final_message=True)),
        ("openai", lambda: llm.chat(hello, GREEDY, chat_template_content_format="openai")),
        (
            "truncate_prompt_tokens",
            lambda: llm.generate("a", tokenization_kwargs={"truncate_prompt_tokens": 3}),
        ),
        ("more prompts", lambda: llm.generate(["a", "b"], [GREEDY])),
        ("more sampling_params", lambda: llm.generate(["a"], [GREEDY, GREEDY])),
        ("conversation is a list", lambda: llm.chat("Hi", GREEDY)),
        ("conversation is a list", lambda: llm.chat([3], GREEDY)),
        ("type dict", lambda: llm.generate(["a"], {"n": 1})),
        ("on_error", lambda: llm.generate(["a"], on_error="ignore")),
    ]
    for reason, call in calls:
        with pytest.raises(ConfigError, match=reason):
            call()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_num_seq": 3}, "did you mean max_num_seqs"),
        ({"zzz": 3}, "no option 'zzz'.*max_num_seqs"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2 is not supported"),
        ({"quantization": "awq"}, "quantization"),
        ({"dtype": "float16"}, "dtype='float16'"),
        ({"max_num_seqs": "many"}, "max_num_seqs='many'"),
        ({"max_num_seqs": 0}, "above 0"),
        ({"engine": "tensorrt"}, "tensorrt"),
        ({"base_url": "http://a/v1"}, "base-url"),
        ({"policy": "best"}, "best"),
        ({"engine": "openai"}, "base-url"),
    ],
)
def test_options_that_cannot_be(make_llm: Callable[..., LLM], options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_llm(**options)


def test_options_that_change_nothing(make_llm: Callable[..., LLM]) -> None:
    with pytest.warns(UserWarning, match="gpu_memory_utilization does nothing") as warned:
        llm = make_llm(
            engine="simulated",
            gpu_memory_utilization=0.9,
            tensor_parallel_size=1,
            enable_prefix_caching=True,
        )
    llm.close()
    assert [Path(warning.filename).name for warning in warned] == ["test_llm.py"]


# -------- as requests finish --------


def test_outputs_come_as_requests_finish(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (12, 2, 7)]
    found = list(llm.generate_iter(["a", "b", "c"], params))
    assert [index for index, _ in found] == [1, 2, 0]
    assert [len(output.outputs[0].token_ids) for _, output in found] == [2, 7, 12]


def test_a_stream_that_is_left_frees_the_llm(llm: LLM) -> None:
    stream = llm.generate_iter(["a", "b"], [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 50)])
    index, _ = next(stream)
    assert index == 0
    with pytest.raises(ConfigError, match="runs another call"):
        llm.generate("c", GREEDY)
    stream.close()
    assert len(llm.generate("c", GREEDY, use_tqdm=False)) == 1
    for _ in llm.generate_iter(["a", "b"], GREEDY):
        break
    gc.collect()
    assert len(llm.generate("c", GREEDY, use_tqdm=False)) == 1


def test_nothing_is_read_before_the_first_output_is_asked_for(llm: LLM) -> None:
    def prompts() -> Iterator[str]:
        read.append(True)
        yield "a"

    read: list[bool] = []
    stream = llm.chat_iter([{"role": "user", "content": text}] for text in prompts())
    assert read == []
    next(stream)
    assert read == [True]
    stream.close()


def test_async_iteration_lets_the_event_loop_run(llm: LLM) -> None:
    num_ticks = 0

    async def tick() -> None:
        nonlocal num_ticks
        while True:
            await asyncio.sleep(0)
            num_ticks += 1

    async def main() -> list[int]:
        ticker = asyncio.create_task(tick())
        found = [
            index async for index, output in llm.generate_iter(["a", "b", "c"], GREEDY) if output.finished
        ]
        ticker.cancel()
        return found

    assert sorted(asyncio.run(main())) == [0, 1, 2]
    assert num_ticks > 10


def test_a_cancelled_task_frees_the_llm(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 80)]

    async def use(is_running: asyncio.Event) -> None:
        async for _ in llm.generate_iter(["a", "b"], params):
            is_running.set()

    async def main() -> None:
        is_running = asyncio.Event()
        task = asyncio.create_task(use(is_running))
        await is_running.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(llm.generate("c", GREEDY, use_tqdm=False)) == 1

    asyncio.run(main())


# -------- engines that fail, Ctrl-C, the end --------


class Engine:
    """Answers one request per step, after doing what it is told."""

    max_model_len = MAX_MODEL_LEN
    kv_capacity_tokens = 1000

    def __init__(self, do: Callable[[int], Any]) -> None:
        self.do = do
        self.is_closed = False

    def run(self, requests: Any, policy: Any) -> Iterator[StepOutput]:
        for request in range(len(requests)):
            result = self.do(request) or Completion([5], "five", "stop")
            yield StepOutput(StepStats(0.0, 0, 0, 0, 0, 0, 0.0), [(request, result)])

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def with_engine(make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    def make(do: Callable[[int], Any]) -> LLM:
        llm = make_llm(engine="simulated", kv_cache_memory_bytes=1 << 30)
        llm._engine = Engine(do)
        return llm

    return make


def test_failed_requests_come_after_the_others(with_engine: Callable[..., LLM]) -> None:
    llm = with_engine(lambda request: Failure("engine_error", "it is cursed.") if request == 1 else None)
    with pytest.raises(FailedRequestsError, match=r"1 of 3 .*prompt 1: it is cursed") as caught:
        llm.generate(["a", "b", "c"], use_tqdm=False)
    assert [output.error is not None for output in dict(sorted(caught.value.outputs.items())).values()] == [
        False,
        True,
        False,
    ]
    outputs = llm.generate(["a", "b", "c"], use_tqdm=False, on_error="return")
    assert [output.error.code if output.error else None for output in outputs] == [None, "engine_error", None]
    found: list[int] = []
    with pytest.raises(FailedRequestsError) as caught:
        found.extend(index for index, _ in llm.generate_iter(["a", "b", "c"]))
    assert (found, list(caught.value.outputs)) == ([0, 2], [1])


def test_an_engine_that_broke_is_opened_anew(with_engine: Callable[..., LLM]) -> None:
    def die(_request: int) -> None:
        raise EngineError("gone")

    llm = with_engine(die)
    engine: Any = llm._engine
    with pytest.raises(EngineError, match="gone"):
        llm.generate(["a"], use_tqdm=False)
    assert engine.is_closed
    assert llm.generate(["a"], use_tqdm=False)[0].finished


def test_ctrl_c_waits_for_the_step(with_engine: Callable[..., LLM]) -> None:
    steps = []

    def interrupt(request: int) -> None:
        if request == 1 and not steps.count(1):
            os.kill(os.getpid(), signal.SIGINT)
        steps.append(request)

    llm = with_engine(interrupt)
    engine: Any = llm._engine
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"], use_tqdm=False)
    assert steps == [0, 1]
    assert llm._engine is engine
    assert len(llm.generate(["a", "b", "c"], use_tqdm=False)) == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_twice_breaks_the_step_off(with_engine: Callable[..., LLM]) -> None:
    def interrupt(_request: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the step went on")

    llm = with_engine(interrupt)
    engine: Any = llm._engine
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a"], use_tqdm=False)
    assert engine.is_closed
    assert len(llm.generate(["a"], use_tqdm=False)) == 1


def test_in_another_thread(llm: LLM) -> None:
    found: list[RequestOutput] = []
    thread = threading.Thread(target=lambda: found.extend(llm.generate("a", GREEDY, use_tqdm=False)))
    thread.start()
    thread.join()
    assert len(found) == 1


def test_a_closed_llm(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(engine="simulated", kv_cache_memory_bytes=1 << 30)
    assert len(llm.generate(["a"], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 4
    llm.close()
    llm.close()
    with pytest.raises(ConfigError, match="closed"):
        llm.generate("a", GREEDY)


def test_dropping_an_llm_closes_its_engine(with_engine: Callable[..., LLM]) -> None:
    llm = with_engine(lambda _request: None)
    engine: Any = llm._engine
    llm.generate("a", use_tqdm=False)
    del llm
    assert engine.is_closed


# -------- a server --------


def test_a_server_runs_the_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    with (
        running(FakeOpenAI()) as server,
        LLM("its-name", engine="openai", base_url=server.base_url) as llm,
    ):
        outputs = llm.generate(
            ["a b", [5, 6]], SamplingParams(max_tokens=3, presence_penalty=0.5), use_tqdm=False
        )
        (answer,) = llm.chat(
            [{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=3), use_tqdm=False
        )
        with pytest.raises(PromptError, match="logprobs"):
            llm.generate("a", SamplingParams(logprobs=1))
        with pytest.raises(PromptError, match="max_tokens"):
            llm.generate("a", SamplingParams(max_tokens=None))
        with pytest.raises(ConfigError, match="on a server"):
            llm.get_tokenizer()
        bodies = [body for _, body in server.requests]
    assert [output.prompt_token_ids for output in outputs] == [None, [5, 6]]
    assert all(output.outputs[0].text for output in [*outputs, answer])
    assert all(b'"model":"its-name"' in body for body in bodies)
    assert all(b"presence_penalty" in body for body in bodies[:2])


# -------- vLLM's names --------

# Of vLLM 0.32, as its documentation of the offline API has them.
VLLM_REQUEST_OUTPUT = (
    "request_id prompt prompt_token_ids prompt_logprobs outputs finished metrics lora_request encoder_prompt "
    "encoder_prompt_token_ids num_cached_tokens"
)
VLLM_COMPLETION_OUTPUT = "index text token_ids cumulative_logprob logprobs finish_reason stop_reason"
VLLM_SAMPLING_PARAMS = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "stop": None,
    "stop_token_ids": None,
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "logprob_token_ids": None,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "structured_outputs": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "extra_args": None,
    "bad_words": None,
    "thinking_token_budget": None,
}
VLLM_GENERATE = (
    "self prompts sampling_params use_tqdm lora_request priority tokenization_kwargs mm_processor_kwargs"
)
VLLM_CHAT = (
    "self messages sampling_params use_tqdm lora_request priority chat_template chat_template_content_format "
    "add_generation_prompt continue_final_message tools chat_template_kwargs tokenization_kwargs "
    "mm_processor_kwargs"
)


def test_the_names_are_those_of_vllm() -> None:
    assert [field.name for field in fields(RequestOutput)] == [*VLLM_REQUEST_OUTPUT.split(), "error"]
    assert [field.name for field in fields(CompletionOutput)] == VLLM_COMPLETION_OUTPUT.split()
    assert {field.name: field.default for field in fields(SamplingParams)} == VLLM_SAMPLING_PARAMS
    for method, names in ((LLM.generate, VLLM_GENERATE), (LLM.chat, VLLM_CHAT)):
        parameters = inspect.signature(method).parameters
        assert list(parameters) == [*names.split(), "on_error"]
    kinds = {name: p.kind.name for name, p in inspect.signature(LLM.generate).parameters.items()}
    assert kinds["sampling_params"] == "POSITIONAL_OR_KEYWORD"
    assert kinds["use_tqdm"] == "KEYWORD_ONLY"
    assert inspect.signature(LLM.chat).parameters["use_tqdm"].kind.name == "POSITIONAL_OR_KEYWORD"


def test_the_package_offers_them() -> None:
    assert sorted(blendserve.__all__) == ["CompletionOutput", "LLM", "RequestOutput", "SamplingParams"]
    assert all(getattr(blendserve, name).__name__ == name for name in blendserve.__all__)
    with pytest.raises(AttributeError, match="Engine"):
        blendserve.Engine  # noqa: B018
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)
