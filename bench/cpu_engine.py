"""The native engine on a CPU against vLLM's CPU build: same model, dtype, threads and requests, alternating runs.

    python bench/cpu_engine.py --vllm-python .venv-vllm/bin/python [--scale 0.25] [--rounds 3] [--threads 2]
        [--workloads W1,W2,W3,mixed] [--engines native,vllm,vllm-128,vllm-compiled,transformers] [--dtype float32]
        [--preload LIBRARY[:LIBRARY]] [--pin 0,1] [--parts engines,profile,job]

Each engine is a process of its own that loads once and then runs what it is asked for, with the model in that process
on both sides. Prompts are token ids and nobody makes text. Prefix caches are emptied before each run, and each
engine has run a little of everything when the clock starts. Ours plans within the time that is measured.

Prints tables: seconds and ratios (`engines`), where our engine's time goes (`profile`), and of a whole job with 256
requests at a time what is spent outside the model, and the time from start to the first token of the demo (`job`). The
last line of standard output is the same as JSON.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY = 49_000
ENGINES = ("native", "vllm", "vllm-128", "vllm-compiled", "transformers")
"""vLLM runs eagerly with blocks of 32 tokens, with its default of 128, and compiled with blocks of 32; transformers by
its own continuous batching, greedily where others draw"""
BLOCK_SIZE = 32
MAX_NUM_SEQS = 256
MAX_MODEL_LEN = 2048
MAX_KV_BYTES = 4 << 30
WARM_UP_SCALE = 0.02


class Request(NamedTuple):
    """Token ids, and how many to generate."""

    prompt: list[int]
    num_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0


def workload(name: str, scale: float) -> list[Request]:
    """Requests of a workload; `scale` is of their number."""
    rng = random.Random(name)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(count)]

    def number(count: int) -> range:
        return range(max(1, round(count * scale)))

    if name == "W1":  # as much prompt as output
        return [Request(tokens(128), 128) for _ in number(256)]
    if name == "W2":  # a prefix that all share, and short answers
        prefix = tokens(600)
        return [Request(prefix + tokens(30), 4) for _ in number(200)]
    if name == "W3":  # long prompts among long answers
        long = [Request(tokens(1024), 32) for _ in number(40)]
        requests = long + [Request(tokens(32), 128) for _ in number(160)]
        rng.shuffle(requests)
        return requests
    if name == "mixed":
        prefixes = [tokens(400) for _ in range(4)]
        sampling = [(0.0, 1.0), (0.0, 1.0), (1.0, 1.0), (0.7, 0.95)]
        requests = []
        for i in number(200):
            shared = rng.choice(prefixes) if i % 3 == 0 else []
            requests.append(
                Request(shared + tokens(rng.randint(20, 300)), rng.randint(1, 160), *sampling[i % 4])
            )
        return requests
    raise SystemExit(f"there is no workload {name!r}; choose of {', '.join(WORKLOADS)}")


WORKLOADS = ("W1", "W2", "W3", "mixed")


# -------- engines, each in a process of its own --------


class Native:
    """Ours."""

    def __init__(self, options: dict[str, Any]) -> None:
        import torch

        from blendserve.engines import EngineConfig
        from blendserve.engines.batching import BatchingEngine
        from blendserve.engines.native.executor import TorchExecutor
        from blendserve.models import resolve_model
        from blendserve.scheduling.scheduler import SchedulerConfig

        files = resolve_model(options["model"])
        assert files.folder is not None
        config = EngineConfig(dtype=options["dtype"], block_size=BLOCK_SIZE, max_num_seqs=MAX_NUM_SEQS)
        self._cost_model = config.cost_model(files)
        hardware = self._cost_model.hardware
        self.executor = TorchExecutor(
            files.folder,
            None,
            cost_model=self._cost_model,
            dtype=options["dtype"],
            kv_cache_memory=options["kv_bytes"],
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            num_threads=options["threads"],
        )
        scheduler = SchedulerConfig(hardware.max_num_seqs, hardware.max_num_batched_tokens)
        self._engine = BatchingEngine(self.executor, scheduler)
        kernels = self.executor._token_ops
        self.version = f"torch {torch.__version__}, kernels {getattr(kernels, 'variant', 'none')}"
        self.num_steps = 0

    def run(self, requests: list[Request]) -> list[list[int]]:
        """Output tokens of each request."""
        import numpy as np

        from blendserve.planner.plan import make_plan
        from blendserve.request import Completion, RequestTable, SamplingParams
        from blendserve.scheduling.policies import make_policy
        from blendserve.tokens import PromptTokens

        params = [SamplingParams(temperature=r.temperature, top_p=r.top_p, ignore_eos=True) for r in requests]
        lengths = np.array([r.num_tokens for r in requests], np.int32)
        table = RequestTable(
            tokens=PromptTokens.from_lists([r.prompt for r in requests]),
            max_tokens=lengths,
            declared_tokens=lengths,
            params=params,
            params_index=np.arange(len(requests), dtype=np.int32),
            seeds=np.arange(len(requests), dtype=np.uint64),
        )
        outputs: list[list[int]] = [[] for _ in requests]
        self.num_steps = 0
        for step in self._engine.run(table, make_policy("blend", make_plan(table, self._cost_model))):
            self.num_steps += 1
            for request, result in step.results:
                assert isinstance(result, Completion), result
                outputs[request] = result.token_ids
        return outputs

    def profile(self, requests: list[Request]) -> dict[str, float]:
        """Seconds by what they were spent on."""
        from blendserve.engines.native import executor as module
        from blendserve.engines.native.model import Linear

        assert self.executor._loaded is not None
        model, attention = self.executor._loaded[:2]
        spent: dict[str, float] = defaultdict(float)
        kinds = {id(model.head): "lm_head"}
        for layer in model.layers:
            kinds |= {id(getattr(layer, kind)): kind for kind in ("qkv", "output", "gate_up", "down")}

        def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def run(*arguments: Any, **options: Any) -> Any:
                began_s = time.perf_counter()
                result = function(*arguments, **options)
                spent[name] += time.perf_counter() - began_s
                return result

            return run

        multiply, choose, layout = Linear.__call__, module.choose, module.StepLayout.from_batch
        operations = [(attention, "begin"), (attention, "store"), (attention, "attend")]
        operations += [(model.ops, "add_rms_norm"), (model.ops, "silu_mul")]
        Linear.__call__ = lambda linear, *inputs: timed(kinds[id(linear)], multiply)(linear, *inputs)
        module.choose = timed("choose", choose)
        module.StepLayout.from_batch = timed("layout", layout)
        for owner, name in operations:
            setattr(owner, name, timed(name, getattr(owner, name)))
        execute = self.executor.execute
        self.executor.execute = timed("execute", execute)
        try:
            began_s = time.perf_counter()
            self.run(requests)
            whole_s = time.perf_counter() - began_s
        finally:
            Linear.__call__ = multiply
            module.choose = choose
            module.StepLayout.from_batch = layout
            for owner, name in operations:
                delattr(owner, name)
            del self.executor.execute
        execute_s = spent.pop("execute")
        spent["rest of the executor"] = execute_s - sum(spent.values())
        spent["plan, schedule, update"] = whole_s - execute_s
        return dict(sorted(spent.items(), key=lambda item: -item[1]))


class VLLM:
    """vLLM's engine, in this process."""

    def __init__(self, options: dict[str, Any]) -> None:
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        import torch
        import vllm

        torch.set_num_threads(options["threads"])
        name = options["engine"]
        self._llm = vllm.LLM(
            model=options["folder"],
            dtype=options["dtype"],
            block_size=128 if name == "vllm-128" else BLOCK_SIZE,
            enforce_eager=name != "vllm-compiled",
            kv_cache_memory_bytes=options["kv_bytes"],
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=2048,
            enable_prefix_caching=True,
            skip_tokenizer_init=True,
            disable_log_stats=True,
        )
        torch.set_num_threads(options["threads"])
        self.version = f"torch {torch.__version__}, vllm {vllm.__version__}"
        self.num_steps = 0

    def run(self, requests: list[Request]) -> list[list[int]]:
        """Output tokens of each request."""
        import vllm

        self._llm.reset_prefix_cache()
        params = [
            vllm.SamplingParams(
                temperature=r.temperature,
                top_p=r.top_p,
                max_tokens=r.num_tokens,
                ignore_eos=True,
                detokenize=False,
            )
            for r in requests
        ]
        prompts = [{"prompt_token_ids": r.prompt} for r in requests]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


class Transformers:
    """The continuous batching of transformers, in this process."""

    def __init__(self, options: dict[str, Any]) -> None:
        import torch
        import transformers

        torch.set_num_threads(options["threads"])
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            options["folder"], dtype=getattr(torch, options["dtype"]), attn_implementation="sdpa"
        ).eval()
        self._config = transformers.GenerationConfig(do_sample=False, eos_token_id=-1)
        self._num_blocks = 1 + int(options["kv_bytes"] / options["kv_bytes_per_token"]) // BLOCK_SIZE
        self.version = f"torch {torch.__version__}, transformers {transformers.__version__}"
        self.num_steps = 0

    def run(self, requests: list[Request]) -> list[list[int]]:
        """Output tokens of each request."""
        from transformers import ContinuousBatchingConfig

        batching = ContinuousBatchingConfig(
            page_size=BLOCK_SIZE,
            num_blocks=self._num_blocks,
            max_batch_tokens=2048,
            max_requests_per_batch=MAX_NUM_SEQS,
        )
        outputs: dict[str, list[int]] = {}
        with self._model.continuous_batching_context_manager(
            self._config, continuous_batching_config=batching, warmup=False
        ) as manager:
            for i, request in enumerate(requests):
                manager.add_request(request.prompt, request_id=str(i), max_new_tokens=request.num_tokens)
            while len(outputs) < len(requests):
                result = manager.get_result(timeout=1)
                if result is None:
                    assert manager.is_running(), "transformers' generation thread ended"
                elif result.is_finished():
                    assert result.error is None, result.error
                    outputs[result.request_id] = list(result.generated_tokens)
        return [outputs[str(i)] for i in range(len(requests))]


def serve(options: dict[str, Any]) -> None:
    """A worker: loads an engine, then answers requests line by line on standard output, which it keeps for them."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    if options["pin"]:
        os.sched_setaffinity(0, options["pin"])
    began_s = time.perf_counter()
    engine = {"native": Native, "transformers": Transformers}.get(options["engine"], VLLM)(options)
    for name in WORKLOADS:
        engine.run(workload(name, WARM_UP_SCALE))
    replies.write(json.dumps({"load_s": time.perf_counter() - began_s, "version": engine.version}) + "\n")
    for line in sys.stdin:
        asked = json.loads(line)
        requests = workload(asked["workload"], asked["scale"])
        if asked.get("profile"):
            assert isinstance(engine, Native)
            replies.write(json.dumps(engine.profile(requests)) + "\n")
            continue
        load, began_s, began_cpu_s = os.getloadavg()[0], time.perf_counter(), time.process_time()
        outputs = engine.run(requests)
        facts = {
            "wall_s": time.perf_counter() - began_s,
            "cpu_s": time.process_time() - began_cpu_s,
            "load": [load, os.getloadavg()[0]],
            "num_tokens": sum(len(r.prompt) + r.num_tokens for r in requests),
            "num_steps": engine.num_steps,
            "outputs": outputs,
        }
        assert [len(output) for output in outputs] == [r.num_tokens for r in requests]
        replies.write(json.dumps(facts) + "\n")


# -------- the process that asks them --------


class Worker:
    """A process that has an engine loaded."""

    def __init__(self, python: str, options: dict[str, Any], preload: str) -> None:
        environment = dict(os.environ)
        environment |= {"OMP_NUM_THREADS": str(options["threads"]), "KMP_BLOCKTIME": "5"}
        environment.setdefault("GOMP_SPINCOUNT", "20000")
        if preload:
            environment["LD_PRELOAD"] = preload
        self.name = options["engine"]
        self._process = subprocess.Popen(
            [python, __file__, "--serve", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.facts = self._reply()

    def ask(self, **what: Any) -> dict[str, Any]:
        """Have it run something."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self._reply()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with code {self._process.wait()}; see above")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


def kv_bytes_for(names: list[str], scale: float, bytes_per_token: float) -> int:
    """Enough for any of the workloads at once, so that no engine retracts."""
    most = max(
        sum(len(r.prompt) + r.num_tokens + BLOCK_SIZE for r in workload(name, scale)) for name in names
    )
    return min(MAX_KV_BYTES, int(1.1 * bytes_per_token * (most + MAX_MODEL_LEN)))


def compare(workers: list[Worker], names: list[str], scale: float, rounds: int) -> list[dict[str, Any]]:
    """All workloads on all engines, alternating; a row for each pair."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for round_ in range(rounds):
        for name in names:
            for worker in workers if round_ % 2 == 0 else workers[::-1]:
                run = worker.ask(workload=name, scale=scale)
                runs[name, worker.name].append(run)
                print(
                    f"round {round_ + 1} {name} {worker.name}: {run['wall_s']:.2f} s, CPU {run['cpu_s']:.2f} s, "
                    f"load {run['load'][0]:.1f}",
                    file=sys.stderr,
                )
    rows = []
    for name in names:
        ours = runs.get((name, "native"), [])
        for worker in workers:
            of_worker = runs[name, worker.name]
            row: dict[str, Any] = {"workload": name, "engine": worker.name}
            row["num_tokens"] = of_worker[0]["num_tokens"]
            for key in ("wall_s", "cpu_s"):
                row[key] = [round(run[key], 3) for run in of_worker]
                row[f"median_{key}"] = statistics.median(row[key])
                if ours:
                    ratios = [theirs[key] / run[key] for theirs, run in zip(of_worker, ours, strict=True)]
                    row[f"{key}_ratio"] = row[f"median_{key}"] / statistics.median(run[key] for run in ours)
                    row[f"{key}_ratio_by_round"] = [round(ratio, 3) for ratio in ratios]
            row["load"] = [run["load"] for run in of_worker]
            row["num_steps"] = of_worker[-1]["num_steps"]
            if ours:
                greedy = [i for i, r in enumerate(workload(name, scale)) if not r.temperature]
                same = sum(of_worker[-1]["outputs"][i] == ours[-1]["outputs"][i] for i in greedy)
                row["same_greedy_outputs"] = [same, len(greedy)]
            rows.append(row)
    return rows


def print_comparison(rows: list[dict[str, Any]]) -> None:
    headings = ("workload", "engine", "wall s (median)", "CPU s (median)", "tokens/s", "wall over native's")
    print(f"\n| {' | '.join((*headings, 'CPU over native', 'same greedy outputs'))} |")
    print("|" + " --- |" * 8)
    for row in rows:
        cells = [row["workload"], row["engine"]]
        cells += [
            f"{row[f'median_{key}']:.2f} ({', '.join(f'{value:.2f}' for value in row[key])})"
            for key in ("wall_s", "cpu_s")
        ]
        cells.append(f"{row['num_tokens'] / row['median_wall_s']:,.0f}")
        cells += [f"{row[key]:.2f}" if key in row else "" for key in ("wall_s_ratio", "cpu_s_ratio")]
        cells.append("/".join(map(str, row.get("same_greedy_outputs", []))))
        print(f"| {' | '.join(cells)} |")


def print_profile(profiles: dict[str, dict[str, float]]) -> None:
    print(f"\n| seconds, native | {' | '.join(profiles)} |")
    print("|" + " --- |" * (len(profiles) + 1))
    kinds = list(dict.fromkeys(kind for profile in profiles.values() for kind in profile))
    for kind in kinds:
        cells = []
        for profile in profiles.values():
            seconds = profile.get(kind, 0.0)
            cells.append(f"{seconds:.2f} ({seconds / sum(profile.values()):.1%})")
        print(f"| {kind} | {' | '.join(cells)} |")


# -------- whole jobs --------

FIRST_STEP = """
import sys
from blendserve.engines.batching import BatchingEngine
from blendserve.cli import main
stats = BatchingEngine._stats
def first(*arguments):
    print("FIRST STEP", file=sys.stderr, flush=True)
    BatchingEngine._stats = stats
    return stats(*arguments)
BatchingEngine._stats = first
main()
"""


def run_job(lines: Path, output: Path, options: list[str]) -> Iterator[str]:
    """Run `blendserve run` on a file; its lines of standard error, then of standard output."""
    command = [sys.executable, "-c", FIRST_STEP, "run", str(lines), "-o", str(output), "--restart", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen(
        [*command, "--no-report", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stderr is not None
    assert process.stdout is not None
    try:
        yield from process.stderr
        yield from process.stdout
    finally:
        process.kill()
        process.wait()


def job(threads: int, dtype: str, scale: float, folder: Path) -> dict[str, Any]:
    """What a whole job spends outside its steps, with as many requests at a time as there may be; and how it starts."""
    lines = folder / "job.jsonl"
    requests = [r for r in workload("W1", 1.0) if r.num_tokens]
    num_tokens = max(4, round(64 * scale))
    with lines.open("w") as file:
        for i, request in enumerate(requests):
            body = {"model": "any", "prompt": request.prompt[:32], "max_tokens": num_tokens}
            line = {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    options = ["--any-model", "--num-threads", str(threads), "--dtype", dtype]
    options += ["--max-num-seqs", str(MAX_NUM_SEQS)]
    *_, last = run_job(lines, folder / "job.out.jsonl", options)
    summary = json.loads(last)["summary"]
    starts = []
    for _ in range(2):  # the first one fills the disk's cache
        began_s = time.perf_counter()
        demo = run_job(ROOT / "examples/mixed.jsonl", folder / "demo.jsonl", ["--num-threads", str(threads)])
        for line in demo:
            if line.startswith("FIRST STEP"):
                starts.append(time.perf_counter() - began_s)
                demo.close()
                break
    outside_s = summary["elapsed_s"] - summary["engine_s"]
    return {
        "num_requests": len(requests),
        "output_tokens": num_tokens,
        "num_steps": summary["num_steps"],
        "elapsed_s": summary["elapsed_s"],
        "in_steps_s": summary["engine_s"],
        "outside_steps_ratio": outside_s / summary["elapsed_s"],
        "outside_steps_ms_per_step": 1e3 * outside_s / summary["num_steps"],
        "demo_start_to_first_token_s": starts,
    }


def print_job(facts: dict[str, Any]) -> None:
    print(
        f"\nA job of {facts['num_requests']} requests that run together, {facts['num_steps']} steps: "
        f"{facts['elapsed_s']:.1f} s, of which {facts['outside_steps_ratio']:.2%} outside the executor's steps "
        f"({facts['outside_steps_ms_per_step']:.1f} ms a step: scheduling, the way to the engine's process and back, "
        "text, writing results)"
    )
    starts = ", ".join(f"{seconds:.1f}" for seconds in facts["demo_start_to_first_token_s"])
    print(f"Start to first token of the demo: {starts} s")


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return "unknown"


def commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], check=False, cwd=ROOT, capture_output=True, text=True
    )
    return found.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm-python", default=str(ROOT / ".venv-vllm/bin/python"))
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--parts", default="engines,profile,job")
    parser.add_argument("--scale", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--model", help="folder; the bundled model by default")
    parser.add_argument("--preload", default="", help="libraries that every engine is started with")
    parser.add_argument("--pin", default="", help="cores that every engine is kept on, such as 0,1")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(json.loads(arguments.serve))
        return

    from blendserve.engines.native import resolve_dtype
    from blendserve.models import ModelSpec, resolve_model

    parts, names = arguments.parts.split(","), arguments.workloads.split(",")
    dtype = resolve_dtype(arguments.dtype)
    files = resolve_model(arguments.model)
    element_bytes = 4.0 if dtype == "float32" else 2.0
    spec = ModelSpec.from_config(files.config, name="model", bytes_per_kv_element=element_bytes)
    options = {
        "model": arguments.model,
        "folder": str(files.folder),
        "dtype": dtype,
        "threads": arguments.threads,
        "kv_bytes": kv_bytes_for(names, arguments.scale, spec.kv_bytes_per_token),
        "kv_bytes_per_token": spec.kv_bytes_per_token,
        "pin": [int(core) for core in arguments.pin.split(",") if core],
    }
    machine = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load_at_start": os.getloadavg(),
        "commit": commit(),
        "command": sys.argv,
        "options": options,
        "preload": arguments.preload,
        "numpy": importlib.metadata.version("numpy"),
    }
    results: dict[str, Any] = {"machine": machine}
    engines = arguments.engines.split(",") if "engines" in parts else ["native"] * ("profile" in parts)
    workers: list[Worker] = []
    try:
        for engine in engines:
            python = arguments.vllm_python if engine.startswith("vllm") else sys.executable
            try:
                workers.append(Worker(python, {**options, "engine": engine}, arguments.preload))
            except (OSError, RuntimeError) as error:
                print(f"going on without {engine}: {error}", file=sys.stderr)
                continue
            print(f"{engine}: {workers[-1].facts}", file=sys.stderr)
        machine["engines"] = {worker.name: worker.facts for worker in workers}
        if "engines" in parts:
            results["engines"] = compare(workers, names, arguments.scale, arguments.rounds)
            print_comparison(results["engines"])
        if "profile" in parts and workers and workers[0].name == "native":
            results["profile"] = {
                name: workers[0].ask(workload=name, scale=arguments.scale, profile=True) for name in names
            }
            print_profile(results["profile"])
    finally:
        for worker in workers:
            worker.close()
    if "job" in parts:
        with tempfile.TemporaryDirectory() as folder:
            results["job"] = job(arguments.threads, dtype, min(1.0, arguments.scale), Path(folder))
        print_job(results["job"])
    machine["load_at_end"] = os.getloadavg()
    print(
        f"{machine['cpu']}, {machine['cores']} cores, {arguments.threads} threads, {dtype}, scale {arguments.scale}, "
        f"commit {machine['commit']}, load {machine['load_at_start'][0]:.1f} to {machine['load_at_end'][0]:.1f}"
    )
    for worker in workers:
        print(f"{worker.name}: {worker.facts['version']}, loaded in {worker.facts['load_s']:.1f} s")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
