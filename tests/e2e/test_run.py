"""The command in a process of its own, on a tiny model with real tokenizer and chat template."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.shared import ErrorObject

from blendserve.models import ModelFiles

Cli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def model(make_tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = make_tiny_model("llama", tmp_path_factory.mktemp("model") / "tiny", with_tokenizer=True)
    return folder


def command(model: Path, *arguments: str | Path) -> list[str]:
    return [
        *(sys.executable, "-m", "blendserve.cli", *map(str, arguments)),
        *("--model", str(model), "--served-model-name", "tiny"),
    ]


@pytest.fixture
def cli(model: Path) -> Cli:
    def run(*arguments: str | Path, stdin: str | None = None) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command(model, *arguments), input=stdin, capture_output=True, text=True, timeout=300, check=False
        )

    return run


def chat(custom_id: str, text: str = "Say something.", **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": messages, "max_tokens": 8, "temperature": 0, **body},
    }


def completion(custom_id: str, prompt: str, **body: Any) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": prompt, "max_tokens": 8, "temperature": 0, **body},
    }


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read(path: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    results = {line["custom_id"]: line for line in lines}
    assert len(results) == len(lines), "a custom_id was answered twice"
    return results


def body(result: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = result["response"]["body"]
    return found


def test_results_have_the_shape_of_openai(cli: Cli, tmp_path: Path) -> None:
    requests = write(
        tmp_path / "in.jsonl",
        [
            chat("chat", n=2, logprobs=True, top_logprobs=2, seed=1, temperature=1.0),
            completion("text", "Once upon a time", logprobs=2, model="tiny"),
        ],
    )
    output = tmp_path / "out.jsonl"
    done = cli("run", requests, "-o", output)
    assert done.returncode == 0, done.stderr
    results = read(output)
    conversation = ChatCompletion.model_validate(body(results["chat"]))
    assert [choice.index for choice in conversation.choices] == [0, 1]
    assert conversation.choices[0].logprobs is not None
    assert conversation.usage is not None
    assert conversation.usage.completion_tokens <= 16
    text = Completion.model_validate(body(results["text"]))
    assert text.choices[0].finish_reason in {"stop", "length"}
    assert text.model == "tiny"
    assert all(result["error"] is None for result in results.values())


def test_bad_lines_are_named_and_the_rest_runs(cli: Cli, tmp_path: Path) -> None:
    requests = write(
        tmp_path / "in.jsonl",
        [
            chat("good-1"),
            "{not json",
            "",
            [1, 2],
            chat("good-1", "the same id again"),
            chat("hot", temperature=9),
            chat("other", model="gpt-5"),
            chat("long", max_tokens=10_000_000),
            {"custom_id": "empty", "method": "POST", "url": "/v1/chat/completions"},
            completion("good-2", "Hello"),
        ],
    )
    output, errors = tmp_path / "out.jsonl", tmp_path / "bad.jsonl"
    done = cli("run", requests, "-o", output, "--errors", errors)
    assert done.returncode == 1, done.stderr
    assert sorted(read(output)) == ["good-1", "good-2"]
    failures = [json.loads(line)["response"]["body"]["error"] for line in errors.read_text().splitlines()]
    assert [failure["line"] for failure in failures] == [2, 4, 5, 6, 7, 8, 9]
    assert [failure["code"] for failure in failures] == [
        "invalid_json_line",
        "invalid_request",
        "duplicate_custom_id",
        "invalid_request",
        "model_not_found",
        "context_length_exceeded",
        "missing_required_parameter",
    ]
    assert "line 2" in done.stderr


def test_a_second_run_does_only_what_is_left(cli: Cli, tmp_path: Path) -> None:
    lines = [chat(f"r{i}", f"Number {i}.") for i in range(6)]
    output = tmp_path / "out.jsonl"
    assert cli("run", write(tmp_path / "in.jsonl", lines[:4]), "-o", output).returncode == 0
    before = output.read_text()
    done = cli("run", write(tmp_path / "in.jsonl", lines), "-o", output, "--json")
    assert done.returncode == 0, done.stderr
    assert output.read_text().startswith(before)
    assert len(read(output)) == 6
    summary = json.loads(done.stdout.splitlines()[-1])["summary"]
    assert (summary["num_done"], summary["completed"]) == (4, 2)
    again = cli("run", tmp_path / "in.jsonl", "-o", output)
    assert again.returncode == 0
    assert len(read(output)) == 6


def test_standard_input_to_standard_output(cli: Cli) -> None:
    done = cli(
        "run",
        "-",
        "-o",
        "-",
        "--limit",
        "2",
        stdin="".join(json.dumps(chat(f"r{i}")) + "\n" for i in range(5)),
    )
    assert done.returncode == 0, done.stderr
    assert {json.loads(line)["custom_id"] for line in done.stdout.splitlines()} == {"r0", "r1"}


def test_greedy_text_does_not_depend_on_policy_or_seeds_on_the_batch(cli: Cli, tmp_path: Path) -> None:
    """On this tiny model, in float32; longer outputs of a real one may differ in low bits."""
    shared = "The quick brown fox jumps over the lazy dog. " * 20
    lines = [chat(f"g{i}", shared + str(i)) for i in range(5)]
    lines += [chat(f"s{i}", str(i), temperature=1.0, seed=7) for i in range(5)]
    requests = write(tmp_path / "in.jsonl", lines)
    texts = []
    for policy, extra in (
        ("blend", ()),
        ("dual-scan", ()),
        ("random", ("--max-num-seqs", "2", "--max-num-batched-tokens", "64")),
    ):
        output = tmp_path / f"{policy}.jsonl"
        done = cli("run", requests, "-o", output, "--policy", policy, "--dtype", "float32", *extra)
        assert done.returncode == 0, done.stderr
        texts.append(
            {key: body(result)["choices"][0]["message"]["content"] for key, result in read(output).items()}
        )
    assert texts[0] == texts[1] == texts[2]


def test_shared_prefixes_are_reported_as_cached_tokens(cli: Cli, tmp_path: Path) -> None:
    shared = "The quick brown fox jumps over the lazy dog. " * 20
    requests = write(tmp_path / "in.jsonl", [completion(f"r{i}", f"{shared} Question {i}") for i in range(4)])
    output = tmp_path / "out.jsonl"
    assert cli("run", requests, "-o", output).returncode == 0
    usage = [body(result)["usage"] for result in read(output).values()]
    cached = sorted(entry["prompt_tokens_details"]["cached_tokens"] for entry in usage)
    assert cached[0] == 0
    assert all(count >= 160 for count in cached[1:])


def test_killed_and_resumed_is_the_same_as_not_killed(model: Path, cli: Cli, tmp_path: Path) -> None:
    lines = [chat(f"r{i:02d}", f"Tell me about {i}.", max_tokens=40) for i in range(40)]
    requests, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    options = ("run", requests, "-o", output, "--max-num-seqs", "2", "--dtype", "float32")
    for attempt in range(2):  # killed twice, each time with a torn last line
        process = subprocess.Popen(command(model, *options), stderr=subprocess.DEVNULL)
        wanted = 5 * (attempt + 1)
        while process.poll() is None and (not output.exists() or output.read_bytes().count(b"\n") < wanted):
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with output.open("ab") as file:
            file.write(b'{"custom_id": "r39", "torn')
    done = cli(*options)
    assert done.returncode == 0, done.stderr
    resumed = read(output)
    whole = tmp_path / "whole.jsonl"
    assert cli("run", requests, "-o", whole, "--dtype", "float32").returncode == 0
    unbroken = read(whole)
    assert resumed.keys() == unbroken.keys()
    for custom_id, result in resumed.items():
        assert body(result)["choices"] == body(unbroken[custom_id])["choices"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_exits_with_130_and_keeps_what_is_done(
    number: signal.Signals, model: Path, cli: Cli, tmp_path: Path
) -> None:
    lines = [chat(f"r{i:02d}", f"Tell me about {i}.", max_tokens=40) for i in range(60)]
    requests, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    options = ("run", requests, "-o", output, "--max-num-seqs", "2")
    as_background_job = [
        "sh",
        "-c",
        'trap "" INT; exec "$@"',
        "sh",
    ]  # a script starts them with Ctrl-C ignored
    process = subprocess.Popen(
        [*as_background_job, *command(model, *options)], stderr=subprocess.PIPE, text=True
    )
    while process.poll() is None and (not output.exists() or output.read_bytes().count(b"\n") < 3):
        time.sleep(0.02)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 130, stderr
    assert "again" in stderr
    kept = read(output)
    assert 3 <= len(kept) < 60
    assert cli(*options).returncode == 0
    assert len(read(output)) == 60


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (("run", "missing.jsonl", "-o", "out.jsonl"), "missing.jsonl"),
        (("run", "in.jsonl"), "-o"),
        (("run", "in.jsonl", "-o", "in.jsonl"), "another file"),
        (("run", "in.jsonl", "-o", "out.jsonl", "--max-model-len", "999999"), "--max-model-len"),
        (("run", "in.jsonl", "-o", "out.jsonl", "--max-num-batched-tokens", "4"), "--max-num-batched-tokens"),
        (("run", "in.jsonl", "-o", "out.jsonl", "--kv-cache-memory", "lots"), "512MiB"),
        (("run", "in.jsonl", "-o", "out.jsonl", "--kv-cache-memory", "1k"), "KV"),
        (("run", "in.jsonl", "-o", "out.jsonl", "--plan", "in.jsonl"), "plan"),
        (("run", "in.jsonl", "-o", "out.jsonl", "--hardware", "b300"), "a100-80g-paper"),
        (("run", "in.jsonl", "-o", "-", "--ordered"), "give -o a file"),
        (("run", "in.jsonl", "-o", "nowhere://bucket/out.jsonl"), "s3://bucket/file"),
        (("run", "in.jsonl", "-o", "nowhere/out.jsonl"), "nowhere"),
        (("run", "in.jsonl", "-o", "out.jsonl", "--quantization", "fp8"), "add --engine vllm"),
    ],
)
def test_a_job_that_cannot_run_says_why_in_one_line(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], remedy: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in.jsonl", [chat("r0")])
    done = cli(*arguments)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "error:" in done.stderr
    assert remedy in done.stderr


def test_an_unsupported_architecture_is_refused_with_the_supported_ones(tmp_path: Path) -> None:
    folder = tmp_path / "gpt2"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"})
    )
    (folder / "model.safetensors").touch()
    requests = write(tmp_path / "in.jsonl", [chat("r0")])
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "blendserve.cli",
            "run",
            requests,
            "-o",
            tmp_path / "out.jsonl",
            "--model",
            folder,
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "GPT2LMHeadModel" in done.stderr
    assert "LlamaForCausalLM" in done.stderr


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 4}),
        ("gemma3", {"query_pre_attn_scalar": 16, "layer_types": ["sliding_attention"] * 2}),
    ],
)
def test_a_gguf_file_runs_as_the_folder_that_it_was_made_of(
    make_tiny_model: Any, tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    pytest.importorskip("gguf")
    from tests.unit.test_gguf_files import write_gguf

    folder = make_tiny_model(kind, tmp_path / "folder", max_position_embeddings=64, **changes)
    write_gguf(folder, tmp_path / "model.gguf")
    requests = write(tmp_path / "in.jsonl", [completion(f"r{i}", "he said " * (i + 1)) for i in range(4)])
    environment = {**os.environ, "BLENDSERVE_CACHE": str(tmp_path / "cache")}
    run = [sys.executable, "-m", "blendserve.cli", "run", str(requests), "--dtype", "float32", "-o"]
    texts = []
    for model, output in (("model.gguf", "gguf.jsonl"), ("folder", "folder.jsonl")):
        done = subprocess.run(
            [*run, str(tmp_path / output), "--model", str(tmp_path / model)],
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
            env=environment,
        )
        assert done.returncode == 0, done.stderr
        results = read(tmp_path / output)
        texts.append({name: body(line)["choices"][0]["text"] for name, line in results.items()})
        if model == "model.gguf":  # the folder has weights alone
            [converted] = (tmp_path / "cache" / "models").iterdir()
            for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
                shutil.copy(converted / name, folder / name)
    assert len(texts[0]) == 4
    assert texts[0] == texts[1]


def test_a_file_without_a_single_good_line(cli: Cli, tmp_path: Path) -> None:
    requests, output = write(tmp_path / "in.jsonl", ["nonsense", "{}"]), tmp_path / "out.jsonl"
    done = cli("run", requests, "-o", output)
    assert done.returncode == 1, done.stderr
    assert output.read_text() == ""
    assert len((tmp_path / "out.errors.jsonl").read_text().splitlines()) == 2


def test_plan_explains_saves_and_is_used(cli: Cli, tmp_path: Path) -> None:
    shared = "The quick brown fox jumps over the lazy dog. " * 20
    lines = [completion(f"q{i}", f"{shared} Question {i}") for i in range(6)]
    lines += [chat(f"c{i}", f"Topic {i}", max_tokens=30) for i in range(6)]
    requests, saved = write(tmp_path / "in.jsonl", lines), tmp_path / "plan.npz"
    done = cli("plan", requests, "--save", saved, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["plan"]["num_requests"] == 12
    assert document["plan"]["sharing_ratio"] > 0.5
    assert all(0 < cost["optimum_ratio"] <= 1 for cost in document["policies"])
    assert {cost["policy"] for cost in document["policies"]} >= {
        "blend",
        "dual-scan",
        "dfs",
        "fcfs",
        "random",
    }
    assert "density" in done.stderr
    output = tmp_path / "out.jsonl"
    used = cli("run", requests, "-o", output, "--plan", saved)
    assert used.returncode == 0, used.stderr
    other = cli(
        "run", write(tmp_path / "other.jsonl", lines[1:]), "-o", tmp_path / "o.jsonl", "--plan", saved
    )
    assert other.returncode == 2
    assert "other requests" in other.stderr


def test_the_simulated_engine_prints_time_and_blend(cli: Cli, tmp_path: Path) -> None:
    requests = write(tmp_path / "in.jsonl", [chat(f"r{i}", f"Number {i}.", max_tokens=50) for i in range(20)])
    done = cli("run", requests, "--engine", "simulated", "--hardware", "a100-80g-paper", "--json")
    assert done.returncode == 0, done.stderr
    simulated = json.loads(done.stdout.splitlines()[-1])["simulated"]
    assert simulated["makespan_s"] > 0
    assert simulated["compute_s"] > 0
    assert simulated["memory_s"] > 0
    assert "simulated" in done.stderr


def test_every_line_of_a_simulated_job_parses_with_the_types_of_openai(cli: Cli, tmp_path: Path) -> None:
    lines: list[Any] = [chat("chat", n=2, logprobs=True), completion("text", "Once", max_tokens=5), "{", [1]]
    lines += [completion("long", "x", max_tokens=10**9), chat("hot", temperature=9), {"custom_id": "bare"}]
    output = tmp_path / "out.jsonl"
    source = write(tmp_path / "in.jsonl", lines)
    done = cli("run", source, "-o", output, "--engine", "simulated")
    assert done.returncode == 1, done.stderr
    results = read(output)
    conversation = ChatCompletion.model_validate(body(results["chat"]), strict=True)
    assert [choice.message.content for choice in conversation.choices] == ["", ""]
    text = Completion.model_validate(body(results["text"]), strict=True)
    assert (text.model, text.choices[0].finish_reason) == ("simulated/tiny", "length")
    assert text.usage is not None
    assert text.usage.completion_tokens == 5
    failures = [json.loads(line) for line in (tmp_path / "out.errors.jsonl").read_text().splitlines()]
    assert len(failures) == 5
    for failure in failures:
        assert failure["error"] is None
        assert failure["response"]["status_code"] == 400
        assert ErrorObject.model_validate(body(failure)["error"], strict=True).code
    real = cli("run", source, "-o", output)
    assert real.returncode == 2, "simulated results were taken for real ones"
    assert "engine: simulated earlier, native now" in real.stderr


def test_the_bundled_model_answers(bundled_model: Any, tmp_path: Path) -> None:
    question = chat("france", "What is the capital of France?", max_tokens=12)
    requests, output = write(tmp_path / "in.jsonl", [question]), tmp_path / "out.jsonl"
    done = subprocess.run(
        [sys.executable, "-m", "blendserve.cli", "run", str(requests), "-o", str(output)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )
    assert done.returncode == 0, done.stderr
    answer = body(read(output)["france"])
    assert answer["model"] == "smollm2-135m-instruct"
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_structured_outputs_of_the_bundled_model(bundled_model: ModelFiles, tmp_path: Path) -> None:
    """A line with a schema that cannot be is an error of its own, named by its number; the others run."""
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "maximum": 150},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    bad = {"type": "json_schema", "json_schema": {"name": "person", "schema": {"type": "persons"}}}
    question = "Who are you? Answer with your name and age."
    requests = write(
        tmp_path / "in.jsonl",
        [
            chat("person", question, response_format=form, max_tokens=80),
            chat("bad", question, response_format=bad),
            chat("choice", "Is the sky blue?", structured_outputs={"choice": ["yes", "no"]}),
            completion("free", "Once upon a time", prompt_logprobs=0, echo=True, presence_penalty=0.5),
        ],
    )
    output = tmp_path / "out.jsonl"
    assert bundled_model.folder is not None
    done = subprocess.run(
        command(bundled_model.folder, "run", requests, "-o", output),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    results = read(output)
    assert results.keys() == {"person", "choice", "free"}
    person = json.loads(body(results["person"])["choices"][0]["message"]["content"])
    assert person.keys() == {"name", "age"}
    assert isinstance(person["age"], int)
    assert body(results["choice"])["choices"][0]["message"]["content"] in {"yes", "no"}
    told = body(results["free"])["choices"][0]
    assert told["text"].startswith("Once upon a time")
    assert len(told["prompt_logprobs"]) == body(results["free"])["usage"]["prompt_tokens"]
    (error,) = read(tmp_path / "out.errors.jsonl").values()
    assert error["custom_id"] == "bad"
    assert body(error)["error"]["line"] == 2
    assert "JSON schema" in body(error)["error"]["message"]
