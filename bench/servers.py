"""Policies on servers of vLLM and SGLang over HTTP, and on our native engine: measured, and as their profiles say.

    python bench/servers.py --vllm-python P --sglang-python P [--engines vllm,sglang,native] [--rounds 3]
        [--policies fcfs,dfs,longest-first-dfs,blend] [--parts profile,runs] [--out RUNS.jsonl]

For each engine `blendserve profile` measures it first, on a server with room for long prompts. Then `blendserve run`
does one shuffled file of `bench/engines.py`, its mix `many`, under each policy in turn, on a server whose KV cache does
not hold that file's prefixes; forwards and backwards by turns, the prefix cache emptied before each. `blendserve run
--engine simulated --hardware` says how long each should take by that profile, which has seen nothing of the file.

Wall seconds are those of the job without start-up. Each run is written to --out as it ends, and is not done again when
this is started again. Prints tables; the last line of standard output is the same as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engines import BLOCK_SIZE, MIXES, Kind, Mix, in_form, rows_of, spread
from policies import commit, cpu_name

from blendserve.engines.sglang import SGLangServer, free_port
from blendserve.models import BUNDLED_MODEL, ModelSpec, resolve_model
from blendserve.tokenizer import Tokenizer

POLICIES = ("fcfs", "dfs", "longest-first-dfs", "blend")
NAMES = ("vllm", "sglang", "native")
MAX_MODEL_LEN = 256
PROFILE_MODEL_LEN = 4096
PROFILE_KV_TOKENS = 8192
PROFILE_TIME = "180s"
VLLM_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # it serves /reset_prefix_cache then
    "HF_HUB_OFFLINE": "1",
}
SGLANG_OPTIONS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_overlap_schedule": True,
    "skip_server_warmup": True,
    "sleep_on_idle": True,
    "dtype": "float32",
}
SGLANG_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
COUNTERS = {
    "steps": "vllm:iteration_tokens_total_count",
    "preempted": "vllm:num_preemptions_total",
}
"""what vLLM's server counts"""

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def get(url: str, *, method: str = "GET") -> str:
    with _opener.open(urllib.request.Request(url, method=method), timeout=60.0) as answer:
        text: str = answer.read().decode()
    return text


class Bench:
    """One file, one model and the limits of a mix.

    Args:
        mix: requests and limits.
        folder: for files.
        pythons: interpreters that have vLLM and SGLang, by engine.
    """

    def __init__(self, mix: Mix, folder: Path, pythons: dict[str, str | None]) -> None:
        files = resolve_model(None)
        assert files.folder is not None
        self.model = files.folder
        self.mix = mix
        self.pythons = pythons
        self.folder = folder
        spec = ModelSpec.from_config(files.config, name="model", bytes_per_weight=4, bytes_per_kv_element=4)
        self.kv_bytes_per_token = int(spec.kv_bytes_per_token)
        self.kv_tokens = (mix.num_blocks - 1) * BLOCK_SIZE
        """of which requests can have the use: vLLM keeps a block for itself"""
        tokenizer = Tokenizer(files.folder)
        self.job = self._write(
            "job", [row.line for row in in_form(rows_of(mix.kinds, tokenizer), "shuffled")]
        )
        self.warm_up = self._write(
            "warm-up", [row.line for row in rows_of((Kind(0, 4, 0, 60, 8),), tokenizer)]
        )
        self.num_output_tokens = sum(kind.output * kind.count * max(kind.num_groups, 1) for kind in mix.kinds)
        self.limits = [
            *("--max-num-seqs", str(mix.max_num_seqs)),
            *("--max-num-batched-tokens", str(mix.max_num_batched_tokens)),
        ]

    def _write(self, name: str, lines: list[str]) -> Path:
        path = self.folder / f"{name}.jsonl"
        path.write_text("".join(f"{line}\n" for line in lines))
        return path

    def blendserve(self, *arguments: str) -> dict[str, Any]:
        """What a command says as JSON.

        Raises:
            SystemExit: it failed.
        """
        command = [sys.executable, "-m", "blendserve.cli", *arguments, "--json"]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    def run(self, path: Path, policy: str, options: list[str]) -> dict[str, Any]:
        """Summary of a job."""
        output = self.folder / "results.jsonl"
        line = ["run", str(path), "-o", str(output), "--restart", "--no-report", "--policy", policy, *options]
        summary: dict[str, Any] = self.blendserve(*line)["summary"]
        if summary["completed"] != summary["total"]:
            raise SystemExit(f"{policy}: {summary}")
        return summary

    def profile(self, name: str, path: Path) -> float:
        """Measure an engine; mean error of the fit."""
        with self.server(name, max_model_len=PROFILE_MODEL_LEN, kv_tokens=PROFILE_KV_TOKENS) as options:
            line = ["profile", "-o", str(path), "--max-time", PROFILE_TIME, *options]
            return float(self.blendserve(*line)["mean_error_ratio"])

    def measure(self, name: str, policy: str, options: list[str]) -> dict[str, Any]:
        """One run of the file on an engine that is there."""
        url = (
            options[options.index("--base-url") + 1].removesuffix("/v1") if "--base-url" in options else None
        )
        if name == "vllm":
            get(f"{url}/reset_prefix_cache", method="POST")
        before = vllm_counters(url) if name == "vllm" else {}
        summary = self.run(self.job, policy, options)
        if summary["num_output_tokens"] != self.num_output_tokens:
            raise SystemExit(f"{name}, {policy}: {summary['num_output_tokens']} output tokens")
        facts = {
            "wall_s": summary["elapsed_s"],
            "cached_tokens": summary["num_cached_tokens"],
            "prompt_tokens": summary["num_prompt_tokens"],
        }
        if name == "native":
            return {**facts, "steps": summary["num_steps"], "preempted": summary["num_retracted"]}
        after = vllm_counters(url) if name == "vllm" else {}
        return {**facts, **{key: after[key] - before[key] for key in after}}

    def predict(self, name: str, policy: str, profile: Path) -> dict[str, float]:
        """What the simulated engine says by a profile."""
        options = ["--engine", "simulated", "--hardware", str(profile), "--dtype", "float32", *self.limits]
        options += ["--kv-cache-memory", str(self.kv_tokens * self.kv_bytes_per_token)]
        options += ["--block-size", "1" if name == "sglang" else str(BLOCK_SIZE)]
        summary = self.run(self.job, policy, options)
        return {key: summary[key] for key in ("engine_s", "num_steps", "num_cached_tokens")}

    @contextlib.contextmanager
    def server(self, name: str, *, max_model_len: int, kv_tokens: int) -> Iterator[list[str]]:
        """An engine that is there: options of `blendserve` for it."""
        if name == "native":
            yield [
                *("--dtype", "float32", "--block-size", str(BLOCK_SIZE), *self.limits),
                *("--kv-cache-memory", str(kv_tokens * self.kv_bytes_per_token)),
                *("--max-model-len", str(max_model_len)),
            ]
        elif name == "vllm":
            with self._vllm(max_model_len, kv_tokens) as url:
                yield ["--engine", "openai", "--base-url", url, *self._remote()]
        else:
            with self._sglang(max_model_len, kv_tokens) as url:
                yield ["--engine", "sglang", "--base-url", url, *self._remote()]

    def _remote(self) -> list[str]:
        dtype = ("--dtype", "float32")
        return ["--model", str(self.model), "--served-model-name", BUNDLED_MODEL, *dtype, *self.limits]

    @contextlib.contextmanager
    def _vllm(self, max_model_len: int, kv_tokens: int) -> Iterator[str]:
        port = free_port()
        command = [self.pythons["vllm"] or sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(self.model), "--served-model-name", BUNDLED_MODEL, "--dtype", "float32"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(max_model_len)]
        command += ["--block-size", str(BLOCK_SIZE), *self.limits, "--enable-prompt-tokens-details"]
        command += ["--kv-cache-memory-bytes", str((kv_tokens + BLOCK_SIZE) * self.kv_bytes_per_token)]
        command += ["--enforce-eager", "--enable-prefix-caching", "--disable-uvicorn-access-log"]
        log = self.folder / "vllm.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,
                env={**os.environ, **VLLM_ENVIRONMENT},
            )
        try:
            while True:
                if process.poll() is not None:
                    raise SystemExit(f"vLLM's server ended:\n{log.read_text()[-4000:]}")
                with contextlib.suppress(urllib.error.URLError, OSError):
                    get(f"http://127.0.0.1:{port}/health")
                    break
                time.sleep(1.0)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            process.wait(60)

    @contextlib.contextmanager
    def _sglang(self, max_model_len: int, kv_tokens: int) -> Iterator[str]:
        options = {
            **SGLANG_OPTIONS,
            "context_length": max_model_len,
            "max_total_tokens": kv_tokens,
            "max_running_requests": self.mix.max_num_seqs,
            "chunked_prefill_size": self.mix.max_num_batched_tokens,
        }
        before = dict(os.environ)
        os.environ.update(SGLANG_ENVIRONMENT)
        os.environ.pop("PYTHONPATH", None)
        try:
            server = SGLangServer(
                self.pythons["sglang"] or sys.executable, self.model, BUNDLED_MODEL, options
            )
        finally:
            os.environ.clear()
            os.environ.update(before)
        try:
            yield server.base_url
        finally:
            server.close()


def vllm_counters(url: str | None) -> dict[str, int]:
    """What vLLM's server has counted since it started."""
    values = dict.fromkeys(COUNTERS, 0.0)
    for line in get(f"{url}/metrics").splitlines():
        for key, name in COUNTERS.items():
            if line.startswith(name + "{"):
                values[key] += float(line.rsplit(" ", 1)[1])
    return {key: round(value) for key, value in values.items()}


def table(name: str, runs: list[dict[str, Any]], predictions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print what one engine did; returns it."""
    print(
        f"\n### {name}\n\n| policy | wall s | cached tokens | steps | preempted | fcfs / this | the same, simulated | "
        "simulated s | off by | simulated steps |"
    )
    print("|" + " --- |" * 10)
    predicted = {row["policy"]: row for row in predictions}
    by_policy: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        by_policy.setdefault(run["policy"], []).append(run)
    median = {
        policy: statistics.median(run["wall_s"] for run in of_it) for policy, of_it in by_policy.items()
    }
    rows = []
    for policy, of_it in by_policy.items():
        said = predicted.get(policy, {"engine_s": math.nan, "num_steps": math.nan})
        row = {
            "engine": name,
            "policy": policy,
            "wall_s": [round(run["wall_s"], 2) for run in of_it],
            "cached_tokens": [run["cached_tokens"] for run in of_it],
            "steps": [run.get("steps") for run in of_it],
            "preempted": [run.get("preempted") for run in of_it],
            "over_fcfs": median.get("fcfs", median[policy]) / median[policy],
            "simulated_over_fcfs": predicted.get("fcfs", said)["engine_s"] / said["engine_s"],
            "simulated_s": said["engine_s"],
            "error": said["engine_s"] / median[policy] - 1.0,
            "simulated_steps": said["num_steps"],
        }
        rows.append(row)
        numbers = {key: " ".join(str(x) for x in dict.fromkeys(row[key])) for key in ("steps", "preempted")}
        cached = spread(row["cached_tokens"], 0)
        print(
            f"| {policy} | {spread(row['wall_s'])} | {cached} | {numbers['steps']} | {numbers['preempted']} | "
            f"{row['over_fcfs']:.2f} | {row['simulated_over_fcfs']:.2f} | {row['simulated_s']:.1f} | "
            f"{row['error']:+.1%} | {row['simulated_steps']} |"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", default=",".join(NAMES))
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--mix", default="many")
    parser.add_argument("--parts", default="profile,runs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm-python")
    parser.add_argument("--sglang-python")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    names, policies = arguments.engines.split(","), arguments.policies.split(",")
    parts = arguments.parts.split(",")
    out = arguments.out or Path(tempfile.mkdtemp()) / "runs.jsonl"
    done = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []

    def note(row: dict[str, Any]) -> None:
        done.append(row)
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        pythons = {"vllm": arguments.vllm_python, "sglang": arguments.sglang_python}
        bench = Bench(MIXES[arguments.mix], Path(folder), pythons)
        for name in names:
            profile = out.with_name(f"{out.stem}-{name}.json")
            if "profile" in parts and not profile.exists():
                error = bench.profile(name, profile)
                note({"kind": "profile", "engine": name, "mean_error_ratio": error})
            here = [row for row in done if row["engine"] == name]
            ran = {(row["policy"], row["round"]) for row in here if row["kind"] == "run"}
            wanted = [
                (policy, round_)
                for round_ in range(arguments.rounds)
                for policy in (policies if round_ % 2 == 0 else policies[::-1])
                if (policy, round_) not in ran
            ]
            if wanted and "runs" in parts:
                with bench.server(name, max_model_len=MAX_MODEL_LEN, kv_tokens=bench.kv_tokens) as options:
                    bench.run(bench.warm_up, "fcfs", options)
                    for policy, round_ in wanted:
                        facts = {"load": os.getloadavg()[0], **bench.measure(name, policy, options)}
                        note({"kind": "run", "engine": name, "policy": policy, "round": round_, **facts})
            said = {row["policy"] for row in here if row["kind"] == "prediction"}
            for policy in policies:
                if "profile" in parts and policy not in said:
                    prediction = bench.predict(name, policy, profile)
                    note({"kind": "prediction", "engine": name, "policy": policy, **prediction})
    print(f"{cpu_name()}, {os.cpu_count()} cores, commit {commit()}; {bench.mix}")
    tables = {}
    for name in names:
        of_kind = {
            kind: [row for row in done if row["engine"] == name and row["kind"] == kind]
            for kind in ("profile", "run", "prediction")
        }
        tables[name] = table(name, of_kind["run"], of_kind["prediction"])
        for row in of_kind["profile"]:
            print(f"\nThe profile fits its own steps within {row['mean_error_ratio']:.1%} on average.")
    print(json.dumps({"cpu": cpu_name(), "cores": os.cpu_count(), "commit": commit(), "engines": tables}))


if __name__ == "__main__":
    main()
