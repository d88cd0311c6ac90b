import orjson
import pytest

from blendserve.errors import EngineError
from blendserve.jobs import store as store_module
from blendserve.jobs.job import Job
from blendserve.jobs.openai_format import COMPLETIONS_URL, parse_line
from blendserve.jobs.prepare import prepare
from blendserve.jobs.store import ResultStore, default_errors_path
from blendserve.request import Completion, Failure, StepOutput, StepStats


class TokenIds:
    """A tokenizer for prompts that are token ids already."""

    vocab_size = 1000


class EchoEngine:
    """Answers `batch_size` requests per step, last ones first, with their prompt; breaks where told to."""

    name = "echo"

    def __init__(
        self, batch_size=2, *, failing=(), break_at_step=None, break_with=None, skip=(), twice=False
    ):
        self.batch_size = batch_size
        self.failing = failing
        self.break_at_step = break_at_step
        self.break_with = break_with
        self.skip = skip
        self.twice = twice

    def run(self, requests, policy):
        order = [request for request in reversed(range(len(requests))) if request not in self.skip]
        for step, start in enumerate(range(0, len(order), self.batch_size)):
            if step == self.break_at_step:
                raise self.break_with
            batch = order[start : start + self.batch_size]
            results = [(request, self.answer(requests, request)) for request in batch]
            stats = StepStats(
                duration_s=0.5,
                num_prefill_tokens=10,
                num_decode_tokens=len(batch),
                kv_tokens_read=0,
                num_running=len(batch),
                num_waiting=len(order) - start - len(batch),
                kv_usage_ratio=0.25,
                compute_s=0.3,
                memory_s=0.2,
                num_retracted=1,
            )
            yield StepOutput(stats, results * 2 if self.twice else results)

    def answer(self, requests, request):
        if request in self.failing:
            return Failure("engine_error", "the engine refused it", status_code=500)
        prompt = requests.tokens[request].tolist()
        text = f"{prompt} {requests.seeds[request]}"
        return Completion(prompt, text, "stop", num_cached_tokens=1)


def rows(*bodies):
    for line, body in enumerate(bodies, start=1):
        request = {"custom_id": f"r{line}", "method": "POST", "url": COMPLETIONS_URL, "body": body}
        yield parse_line(line, orjson.dumps(request))


@pytest.fixture
def run(tmp_path):
    """Runs bodies through an engine; returns the job, how it ended, and both files by custom_id."""
    output = tmp_path / "out.jsonl"

    def run(engine, *bodies):
        ended_by = None
        with ResultStore(output, model="m") as store:
            prepared = prepare(
                rows(*bodies), TokenIds(), served_model_name="m", max_model_len=100, done=store.done
            )
            job = Job(prepared, engine, None, store, TokenIds(), model="m")
            try:
                for _ in job.run():
                    pass
            except (EngineError, KeyboardInterrupt) as error:
                ended_by = error
        return job, ended_by, by_custom_id(output), by_custom_id(default_errors_path(output))

    return run


def by_custom_id(path):
    results = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    assert len({result["custom_id"] for result in results}) == len(results)
    return {result["custom_id"]: result["response"]["body"] for result in results}


def texts(body):
    return [choice["text"] for choice in body["choices"]]


def test_every_line_ends_in_exactly_one_file(run):
    bodies = [{"prompt": [1]}, {"prompt": [2], "n": 0}, {"prompt": [3]}, {"prompt": [4]}]
    job, ended_by, results, errors = run(EchoEngine(failing={1}), *bodies)
    assert ended_by is None
    assert sorted(results) == ["r1", "r4"]
    assert {name: body["error"]["code"] for name, body in errors.items()} == {
        "r2": "invalid_request",
        "r3": "engine_error",
    }
    assert errors["r3"]["error"]["line"] == 3
    summary = job.summary
    assert (summary.total, summary.completed, summary.failed, summary.num_done) == (4, 2, 2, 0)
    assert summary.is_complete
    assert summary.failures_by_code == {"invalid_request": 1, "engine_error": 1}


def test_completions_of_a_line_are_in_sample_order_however_they_finish(run):
    _, _, results, _ = run(EchoEngine(batch_size=1), {"prompt": [7], "n": 3, "seed": 5}, {"prompt": [8]})
    assert texts(results["r1"]) == ["[7] 5", "[7] 6", "[7] 7"]
    assert results["r1"]["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 3,
        "total_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_one_failed_completion_fails_its_line_once(run):
    job, _, results, errors = run(EchoEngine(batch_size=1, failing={0, 2}), {"prompt": [7], "n": 3})
    assert (results, list(errors)) == ({}, ["r1"])
    assert job.progress.failed == 1


def test_progress_after_every_step(tmp_path):
    prepared = prepare(
        rows({"prompt": [1, 2]}, {"prompt": [3]}, {"prompt": []}),
        TokenIds(),
        served_model_name="m",
        max_model_len=9,
    )
    with ResultStore(tmp_path / "out.jsonl", model="m") as store:
        job = Job(prepared, EchoEngine(batch_size=1), None, store, TokenIds(), model="m")
        seen = [(p.completed, p.failed, p.num_output_tokens, p.num_steps, p.num_waiting) for p in job.run()]
    assert seen == [(0, 1, 0, 0, 0), (1, 1, 1, 1, 1), (2, 1, 3, 2, 0)]
    summary = job.summary
    assert (summary.num_prompt_tokens, summary.num_cached_tokens, summary.num_output_tokens) == (3, 2, 3)
    assert (summary.engine_s, summary.compute_s, summary.memory_s) == (1.0, 0.6, 0.4)
    assert summary.tokens_per_s == 6.0
    assert summary.cached_ratio == pytest.approx(2 / 3)
    assert job.progress.kv_usage_ratio == 0.25
    assert summary.num_retracted == 2
    assert summary.elapsed_s > 0


@pytest.mark.parametrize("error", [KeyboardInterrupt(), EngineError("it died")])
def test_what_was_finished_survives_an_interruption_and_the_rest_runs_later(run, error):
    bodies = [{"prompt": [i], "n": 1 + i % 3, "seed": i} for i in range(1, 12)]
    _, ended_by, first, _ = run(EchoEngine(break_at_step=4, break_with=error), *bodies)
    assert ended_by is error
    assert 0 < len(first) < len(bodies)

    job, ended_by, resumed, _ = run(EchoEngine(), *bodies)
    assert ended_by is None
    assert job.summary.num_done == len(first)
    assert job.summary.is_complete
    assert {name: resumed[name] for name in first} == first
    assert {name: texts(body) for name, body in resumed.items()} == {
        f"r{i}": [f"[{i}] {i + sample}" for sample in range(1 + i % 3)] for i in range(1, 12)
    }


def test_lines_that_failed_run_again(run):
    _, _, _, errors = run(EchoEngine(failing={0}), {"prompt": [1]}, {"prompt": [2]})
    assert list(errors) == ["r1"]
    job, _, results, errors = run(EchoEngine(), {"prompt": [1]}, {"prompt": [2]})
    assert (sorted(results), errors) == (["r1", "r2"], {})
    assert (job.summary.num_done, job.summary.completed) == (1, 1)


def test_results_are_on_the_disk_when_the_caller_stops(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(store_module.os, "fsync", synced.append)
    with ResultStore(tmp_path / "out.jsonl", model="m") as store:
        prepared = prepare(rows({"prompt": [1]}), TokenIds(), served_model_name="m", max_model_len=9)
        steps = Job(prepared, EchoEngine(), None, store, TokenIds(), model="m").run()
        next(steps)
        next(steps)
        synced.clear()
        steps.close()
        assert len(synced) == 1
    assert list(by_custom_id(tmp_path / "out.jsonl")) == ["r1"]


def test_an_engine_that_leaves_requests_unanswered_is_an_error(run):
    _, ended_by, results, _ = run(EchoEngine(skip={0}), {"prompt": [1]}, {"prompt": [2]})
    assert "left 1 of 2 requests unanswered" in str(ended_by)
    assert list(results) == ["r2"]


def test_an_engine_that_answers_twice_is_an_error(run):
    _, ended_by, results, _ = run(EchoEngine(batch_size=1, twice=True), {"prompt": [1]}, {"prompt": [2]})
    assert "twice" in str(ended_by)
    assert list(results) == ["r2"]


def test_a_job_without_requests_needs_no_engine(run):
    job, ended_by, results, errors = run(None, {"prompt": []})
    assert (ended_by, results, list(errors)) == (None, {}, ["r1"])
    assert job.summary.is_complete
