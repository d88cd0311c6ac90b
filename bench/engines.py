"""vLLM driven by its own run-batch, and by our policies, on the same files; alternating, medians over rounds.

    python bench/engines.py [--mixes prefixes,long] [--rounds 3] [--forms …] [--policies …] [--out RUNS.jsonl] [--quick]

Needs an interpreter that has vLLM. `run-batch` is vLLM's command in a process of its own; everything else is our job on
one engine, its prefix cache reset before each run. Both have the same limits, threads and dtype, and both have run a
few lines when the clock starts. Wall and CPU seconds (all processes) are those of the job: from the file that is read
to the file that is written, with the model loaded; loading is shown apart.

Each run is written to --out as soon as it ends, and is not done again when this is started again. Prints a table; the
last line of standard output is the same as JSON. `simulated` is what our simulated engine says for the same file and
policy, with a profile fitted to the steps of the runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
from policies import commit, cpu_name
from vllm_run_batch import EngineCounts, cpu_s

from blendserve.cost_model import CostModel, HardwareSpec, Overlap
from blendserve.engines import Dtype, EngineConfig, open_engine
from blendserve.engines.batching import BatchingEngine
from blendserve.engines.simulated import SimulatedExecutor
from blendserve.engines.vllm import SEQUENCES_SENT_RATIO
from blendserve.jobs import setup
from blendserve.jobs.job import Job
from blendserve.jobs.publish import Publication
from blendserve.jobs.setup import InputConfig, JobConfig
from blendserve.jobs.store import ResultStore
from blendserve.models import BUNDLED_MODEL, ModelSpec, resolve_model
from blendserve.planner.plan import Plan, make_plan
from blendserve.request import RequestTable
from blendserve.scheduling.policies import make_policy
from blendserve.scheduling.policy import Control, Policy
from blendserve.scheduling.scheduler import SchedulerConfig
from blendserve.scheduling.window import Window
from blendserve.tokenizer import Tokenizer

BENCH = Path(__file__).resolve().parent
BLOCK_SIZE = 32
MAX_MODEL_LEN = 256
FORMS = ("shuffled", "interleaved", "grouped")
POLICIES = ("fcfs", "blend", "dfs", "longest-first", "longest-first-dfs", "dual-scan")
RUN_BATCH = "run-batch"
ON_EVERY_FORM = (RUN_BATCH, "fcfs", "blend")
"""the other policies hardly depend on the file's order, and run on the first form alone"""
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "HF_HUB_OFFLINE": "1",
}
"""of both: all cores, and what our engine sets by itself"""


class Kind(NamedTuple):
    """A source of requests; lengths in tokens, about."""

    num_groups: int
    """each with a system prompt of its own; 0: requests have none"""
    count: int
    """requests of a group, or of all"""
    shared: int
    own: int
    output: int


class Mix(NamedTuple):
    """A job, and the engine's limits for it."""

    kinds: tuple[Kind, ...]
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    forms: tuple[str, ...] = FORMS


MIXES = {
    # The system prompts together are more than the KV cache, and outputs are short but for a few.
    "prefixes": Mix((Kind(7, 3, 96, 8, 4), Kind(0, 5, 0, 40, 8), Kind(0, 3, 0, 16, 40)), 16, 32, 128),
    # The same with three times as many requests, on a KV cache of twice the size.
    "many": Mix(
        (Kind(12, 6, 96, 8, 4), Kind(0, 16, 0, 40, 8), Kind(0, 8, 0, 16, 60)), 33, 64, 256, FORMS[:2]
    ),
    # Short work for as many steps as the long outputs take, which do not fit the KV cache together.
    "long": Mix((Kind(4, 3, 64, 8, 4), Kind(0, 8, 0, 40, 8), Kind(0, 7, 0, 16, 40)), 16, 32, 48),
    # Nothing to share, and every request like the others.
    "alike": Mix((Kind(0, 12, 0, 60, 8),), 32, 32, 128, FORMS[:1]),
}
WARM_UP = (Kind(0, 3, 0, 60, 4),)


class Row(NamedTuple):
    """A line of the input, and where it comes from."""

    kind: int
    group: int
    member: int
    line: str


def rows_of(kinds: tuple[Kind, ...], tokenizer: Tokenizer) -> list[Row]:
    """Chat requests of random words, grouped by source."""
    vocabulary = tokenizer.transformers.get_vocab()
    words = sorted(
        token[1:] for token in vocabulary if token[0] == "Ġ" and token[1:].islower() and token.isalpha()
    )
    rng = np.random.default_rng(0)

    def text(num_tokens: int) -> str:
        return " ".join(rng.choice(words, num_tokens))

    rows = []
    for number, kind in enumerate(kinds):
        for group in range(max(kind.num_groups, 1)):
            system = [{"role": "system", "content": text(kind.shared)}] if kind.num_groups else []
            for member in range(kind.count):
                body = {
                    "model": BUNDLED_MODEL,
                    "messages": [*system, {"role": "user", "content": text(kind.own)}],
                    "max_tokens": kind.output,
                    "ignore_eos": True,
                    "temperature": 0,
                }
                request = {"custom_id": f"{number}-{group}-{member}", "method": "POST"}
                line = json.dumps({**request, "url": "/v1/chat/completions", "body": body})
                rows.append(Row(number, group, member, line))
    return rows


def in_form(rows: list[Row], form: str) -> list[Row]:
    """The same lines in another order."""
    if form == "shuffled":
        return [rows[i] for i in np.random.default_rng(1).permutation(len(rows))]
    if form == "interleaved":  # one of each group in turn, and the kinds evenly among each other
        place = {}
        for kind in {row.kind for row in rows}:
            of_kind = sorted(
                (row for row in rows if row.kind == kind), key=lambda row: (row.member, row.group)
            )
            place |= {
                (row.kind, row.group, row.member): (i + 0.5) / len(of_kind) for i, row in enumerate(of_kind)
            }
        return sorted(rows, key=lambda row: place[row[:3]])
    return rows


# -------- runs --------


class Bench:
    """Runs the files of one mix.

    Args:
        mix: what is run, with which limits.
        dtype: of weights and KV cache.
        folder: for inputs and outputs.
    """

    def __init__(self, mix: Mix, dtype: Dtype, folder: Path) -> None:
        self.files = resolve_model(None)
        assert self.files.folder is not None
        self._tokenizer = Tokenizer(self.files.folder)
        setup.open_tokenizer = lambda _files: (
            self._tokenizer
        )  # loading is not part of the job, as in run-batch
        self._folder = folder
        element_bytes = 4 if dtype == "float32" else 2
        self.model = ModelSpec.from_config(
            self.files.config,
            name="model",
            bytes_per_weight=element_bytes,
            bytes_per_kv_element=element_bytes,
        )
        kv_cache_bytes = int(mix.num_blocks * BLOCK_SIZE * self.model.kv_bytes_per_token)
        self.config = EngineConfig(
            engine="vllm",
            dtype=dtype,
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_SIZE,
            kv_cache_memory=kv_cache_bytes,
            max_num_seqs=mix.max_num_seqs,
            max_num_batched_tokens=mix.max_num_batched_tokens,
            engine_args={"enforce_eager": True, "enable_logging_iteration_details": True},
        )
        self._options = [
            *("--model", str(self.files.folder), "--served-model-name", BUNDLED_MODEL, "--dtype", dtype),
            *("--max-model-len", str(MAX_MODEL_LEN), "--block-size", str(BLOCK_SIZE)),
            *("--kv-cache-memory-bytes", str(kv_cache_bytes), "--max-num-seqs", str(mix.max_num_seqs)),
            *("--max-num-batched-tokens", str(mix.max_num_batched_tokens), "--enable-prefix-caching"),
            *("--enforce-eager", "--enable-logging-iteration-details"),
        ]
        self._warm_up = folder / "warm-up.jsonl"
        self._warm_up.write_text("".join(row.line + "\n" for row in rows_of(WARM_UP, self._tokenizer)))
        rows = rows_of(mix.kinds, self._tokenizer)
        self._rows = {form: in_form(rows, form) for form in mix.forms}
        self._num_output_tokens = sum(json.loads(row.line)["body"]["max_tokens"] for row in rows)
        for form, lines in self._rows.items():
            self.path(form).write_text("".join(row.line + "\n" for row in lines))
        self._counts = EngineCounts()
        self._engine: Any = None
        self.load_s = 0.0

    def path(self, form: str) -> Path:
        """The input in this form."""
        return self._folder / f"{form}.jsonl"

    def command(self, form: str) -> list[str]:
        """Options of vLLM's command for a form."""
        paths = ["-i", str(self.path(form)), "-o", str(self._folder / "run-batch.jsonl")]
        return [*paths, *self._options]

    def run(self, form: str, by: str) -> dict[str, Any]:
        """One run.

        Raises:
            RuntimeError: it did not do what all runs of this mix must do.
        """
        facts = self._run_batch(form) if by == RUN_BATCH else self._run_ours(self.path(form), by)
        if facts["output_tokens"] != self._num_output_tokens:
            raise RuntimeError(f"{by}: {facts['output_tokens']} output tokens, not {self._num_output_tokens}")
        return facts

    def _run_batch(self, form: str) -> dict[str, Any]:
        facts = self._folder / "facts.json"
        facts.unlink(missing_ok=True)
        script = [sys.executable, str(BENCH / "vllm_run_batch.py"), str(facts), str(self._warm_up)]
        done = subprocess.run([*script, *self.command(form)], check=False, capture_output=True, text=True)
        if done.returncode or not facts.exists():
            raise RuntimeError(f"run-batch ended with code {done.returncode}:\n{done.stderr}")
        found: dict[str, Any] = json.loads(facts.read_text())
        return found

    def _open(self, by: str) -> None:
        if self._engine is not None:
            return
        began_s = time.perf_counter()
        self._counts.watch()
        self._engine = open_engine(
            self.config, self.files, self._tokenizer, self.config.cost_model(self.files)
        )
        self.load_s = time.perf_counter() - began_s
        self._run_ours(self._warm_up, by)

    def _run_ours(self, path: Path, by: str) -> dict[str, Any]:
        self._open(by)
        self._engine._engine.reset_prefix_cache()
        self._counts.reset()
        config = JobConfig(InputConfig([str(path)]), self.config, policy=by)
        publication = Publication(
            str(self._folder / "ours.jsonl"), None, ordered=False, errors_in_output=True
        )
        used_s, began_s = cpu_s(), time.perf_counter()
        planned = setup.plan_job(config, self.files, (), order=publication.order)
        target = publication.output.working
        with ResultStore(target, publication.working_errors, model=self.files.name, restart=True) as store:
            policy = make_policy(config.policy, planned.plan)
            job = Job(planned.prepared, self._engine, policy, store, self._tokenizer, model=self.files.name)
            for _ in job.run():
                pass
        publication.write()
        wall_s, used_s = time.perf_counter() - began_s, cpu_s() - used_s
        if job.summary.failed:
            raise RuntimeError(
                f"{by}: {job.summary.failed} lines failed: {dict(job.summary.failures_by_code)}"
            )
        return {
            "wall_s": wall_s,
            "cpu_s": used_s,
            "load_s": self.load_s,
            "num_blocks": self._engine.kv_capacity_tokens // BLOCK_SIZE + 1,
            **self._counts.totals,
            "step_facts": self._counts.steps,
        }

    def requests(self, form: str) -> RequestTable:
        """The requests of a form, as the job has them."""
        config = JobConfig(InputConfig([str(self.path(form))]), self.config)
        return setup.plan_job(config, self.files, ()).prepared.requests

    def close(self) -> None:
        """End the engine."""
        if self._engine is not None:
            self._engine.close()


# -------- simulation --------


class FirstComeFirstServed(Policy):
    """vLLM's own scheduler as a policy: what is in line is admitted in order if it fits now, whatever it may become.

    Args:
        plan: of the requests.
        requests: all of them.
        sender: decides, through the window, what comes into the line and when, a step late, as vLLM's core runs ahead;
            None: everything is in line from the start, as with run-batch.
    """

    name = "first-come-first-served"

    def __init__(self, plan: Plan, requests: RequestTable, sender: Policy | None) -> None:
        super().__init__(plan)
        self._requests = requests
        self._sender = sender
        self._line = list(range(len(requests))) if sender is None else []
        self._sent: list[int] = []

    def start(self, control: Control) -> None:
        """See `Policy.start`."""
        self._control = control
        self._window = None
        if self._sender is not None:
            hardware = self.plan.cost_model.hardware
            self._window = Window(
                self._requests,
                self._sender,
                kv_capacity_tokens=control.kv_capacity_tokens,
                max_concurrency=round(hardware.max_num_seqs * SEQUENCES_SENT_RATIO),
                max_num_batched_tokens=hardware.max_num_batched_tokens,
                step_s=1.0,
                block_size=hardware.block_size,
            )

    def step(self, control: Control) -> int:
        """See `Policy.step`."""
        if self._window is not None:
            changes = self._window.fill(control.clock_s, control.step_index)
            assert not changes.withdrawn, "a policy that takes requests back is not simulated here"
            self._line += self._sent
            self._sent = changes.admitted
            if not self._line and control.num_running == 0:
                self._line, self._sent = self._sent, []
        candidates = np.array(self._line, dtype=np.int32)
        most = control.max_num_batched_tokens
        settled = control.admit(candidates, self.output_tokens_est, most, look_ahead=False)
        self._line = self._line[settled:]
        return most

    def finished(self, requests: Any, output_tokens: Any) -> None:
        """See `Policy.finished`."""
        if self._window is not None:
            answers = zip(requests.tolist(), output_tokens.tolist(), strict=True)
            self._window.finish(answers, self._control.clock_s, self._control.step_index)

    def retracted(self, request: int, output_tokens: int) -> None:  # noqa: ARG002
        """See `Policy.retracted`."""
        self._line.insert(0, request)


def simulated(requests: RequestTable, by: str, cost_model: CostModel, num_blocks: int) -> dict[str, float]:
    """Seconds and counts of a run on the simulated engine; `num_blocks` can be used."""
    plan = make_plan(requests, cost_model)
    sender = None if by == RUN_BATCH else make_policy(by, plan)
    executor = SimulatedExecutor(cost_model, kv_cache_tokens=num_blocks * BLOCK_SIZE)
    hardware = cost_model.hardware
    limits = SchedulerConfig(
        hardware.max_num_seqs, hardware.max_num_batched_tokens, free_unused_prefixes=False
    )
    steps = seconds = preemptions = tokens = 0.0
    for step in BatchingEngine(executor, limits).run(requests, FirstComeFirstServed(plan, requests, sender)):
        steps += 1
        seconds += step.stats.duration_s
        preemptions += step.stats.num_retracted
        tokens += step.stats.num_prefill_tokens + step.stats.num_decode_tokens
    return {"wall_s": seconds, "steps": steps, "preemptions": preemptions, "tokens_computed": tokens}


def least_absolute(known: Any, wanted: Any) -> Any:
    """Factors of the columns of `known` with the least sum of absolute deviations; by reweighted least squares."""
    weights = np.ones(len(wanted))
    for _ in range(50):
        root = np.sqrt(weights)
        factors = np.linalg.lstsq(known * root[:, None], wanted * root, rcond=None)[0]
        weights = 1.0 / np.maximum(np.abs(wanted - known @ factors), 1e-4)
    return factors


class Fit(NamedTuple):
    """A step's time as a line, fitted to all steps of some runs."""

    fixed_s: float
    s_per_token: float
    s_per_kv_token: float
    outside_s: float
    """wall time of a step outside of the model"""
    error_per_step: float
    """median over steps of |modelled / measured - 1|"""
    error_per_run: float
    """mean over runs of |modelled / measured wall - 1|"""

    @classmethod
    def of(cls, runs: list[dict[str, Any]]) -> Fit:
        """Least absolute deviations over the steps, as some of them were disturbed."""
        columns = []
        for run in runs:
            facts = {name: np.array(values) for name, values in run["step_facts"].items()}
            capacity = (run["num_blocks"] - 1) * BLOCK_SIZE
            read = facts["kv_used"] * facts["decode_ratio"] * capacity
            columns.append(np.stack([np.ones(len(read)), facts["tokens"], read, facts["s"]]))
        fixed, tokens, read, seconds = np.concatenate(columns, axis=1)
        known = np.stack([fixed, tokens, read], axis=1)
        line = least_absolute(known, seconds)
        if line[2] < 0.0:  # too little was read to tell
            line = np.append(least_absolute(known[:, :2], seconds), 0.0)
        residual = seconds - known @ line
        outside = [(run["wall_s"] - sum(run["step_facts"]["s"])) / run["steps"] for run in runs]
        outside_s = max(statistics.median(outside), 0.0)
        modelled = [float((line @ c[:3]).sum() + outside_s * c.shape[1]) for c in columns]
        errors = [abs(m / run["wall_s"] - 1.0) for m, run in zip(modelled, runs, strict=True)]
        off = float(np.median(np.abs(residual) / seconds))
        return cls(*(float(x) for x in line), outside_s, off, statistics.mean(errors))

    def cost_model(self, model: ModelSpec, mix: Mix) -> CostModel:
        """A sequential device whose steps take that long."""
        hardware = HardwareSpec(
            name="fitted",
            provenance="bench/engines.py",
            flops=2.0 * model.active_params / self.s_per_token,
            bandwidth=model.kv_bytes_per_token / max(self.s_per_kv_token, 1e-12),
            kv_cache_bytes=mix.num_blocks * BLOCK_SIZE * model.kv_bytes_per_token,
            prefill_attention_efficiency=1e9,  # what it takes is part of the time per token
            gemm_overhead_s=(self.fixed_s + self.outside_s) / model.num_layers,
            weight_load_efficiency=1e9,  # what it takes is part of the fixed time
            overlap=Overlap("sum"),
            max_num_batched_tokens=mix.max_num_batched_tokens,
            max_num_seqs=mix.max_num_seqs,
            block_size=BLOCK_SIZE,
        )
        return CostModel(model, hardware)


# -------- results --------


def spread(values: list[float], digits: int = 1) -> str:
    """Median, lowest and highest."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def report(name: str, bench: Bench, mix: Mix, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Print the table of a mix; returns it."""
    fit = Fit.of(runs)
    cost_model = fit.cost_model(bench.model, mix)
    by_case: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for run in runs:
        by_case.setdefault((run["form"], run["by"]), {})[run["round"]] = run
    requests = {form: bench.requests(form) for form in {form for form, _ in by_case}}
    rows = []
    predicted = {
        case: simulated(requests[case[0]], case[1], cost_model, runs[0]["num_blocks"] - 1) for case in by_case
    }
    for (form, by), rounds in by_case.items():
        of_run_batch = by_case.get((form, RUN_BATCH), {})
        latest = rounds[max(rounds)]
        row: dict[str, Any] = {"form": form, "by": by, "rounds": len(rounds)}
        row |= {key: [round(run[key], 2) for run in rounds.values()] for key in ("wall_s", "cpu_s", "load_s")}
        row |= {key: value for key, value in latest.items() if key in bench._counts.totals}
        row["simulated"] = predicted[form, by]
        if of_run_batch:
            measured = statistics.median(run["wall_s"] for run in of_run_batch.values())
            row["speedup"] = measured / statistics.median(row["wall_s"])
            row["speedup_by_round"] = [
                round(of_run_batch[r]["wall_s"] / run["wall_s"], 3)
                for r, run in rounds.items()
                if r in of_run_batch
            ]
            row["simulated_speedup"] = predicted[form, RUN_BATCH]["wall_s"] / predicted[form, by]["wall_s"]
            row["simulated_error"] = row["simulated_speedup"] / row["speedup"] - 1.0
        rows.append(row)
    rows.sort(key=lambda row: (FORMS.index(row["form"]), (RUN_BATCH, *POLICIES).index(row["by"])))
    requests_count = len(next(iter(requests.values())))
    print(f"\n### {name}: {requests_count} requests, {mix}")
    print(f"\nvllm run-batch {' '.join(bench.command('FORM'))}")
    print(
        f"\nstep = {1e3 * fit.fixed_s:.1f} ms + {1e3 * fit.s_per_token:.3f} ms/token + "
        f"{1e6 * fit.s_per_kv_token:.2f} µs/KV token, and {1e3 * fit.outside_s:.1f} ms outside the model; "
        f"a step is off by {fit.error_per_step:.1%} (median), the wall of a run by {fit.error_per_run:.1%} (mean)\n"
    )
    print(
        "| file | run by | wall s | CPU s | loading s | steps | prefix-hit tok | prompt tok computed | tok computed | "
        "preempted | speed-up | simulated | off by | simulated steps |"
    )
    print("|" + " --- |" * 14)
    for row in rows:
        speedup = f"{row['speedup']:.2f}" if "speedup" in row else ""
        if row.get("speedup_by_round"):
            speedup += f" ({min(row['speedup_by_round']):.2f}–{max(row['speedup_by_round']):.2f})"
        prediction = f"{row['simulated_speedup']:.2f}" if "speedup" in row else ""
        error = f"{row['simulated_error']:+.1%}" if "speedup" in row else ""
        print(
            f"| {row['form']} | {row['by']} | {spread(row['wall_s'])} | {spread(row['cpu_s'])} | "
            f"{spread(row['load_s'])} | {row['steps']:,} | {row['prefix_hit_tokens']:,} | "
            f"{row['prompt_tokens_computed']:,} | {row['tokens_computed']:,} | {row['preemptions']} | {speedup} | "
            f"{prediction} | {error} | {row['simulated']['steps']:,.0f} |"
        )
    sys.stdout.flush()
    return {
        "mix": name,
        "settings": mix,
        "fit": fit._asdict(),
        "command": bench.command("FORM"),
        "runs": rows,
    }


def smaller(mix: Mix) -> Mix:
    """A mix of a few seconds, to try the bench out."""
    kinds = [
        k._replace(num_groups=-(-k.num_groups // 4), count=-(-k.count // 3), output=min(k.output, 32))
        for k in mix.kinds
    ]
    return mix._replace(kinds=tuple(kinds), num_blocks=mix.num_blocks // 2, forms=mix.forms[:1])


def cases_of(mix: Mix, forms: list[str], policies: list[str]) -> Iterator[tuple[str, str]]:
    """(form, who runs it), those that are compared near each other."""
    of_mix = [form for form in mix.forms if form in forms]
    for form in of_mix:
        for by in (RUN_BATCH, *policies):
            if by in ON_EVERY_FORM or form == of_mix[0]:
                yield form, by


def main() -> None:
    """Run what is not in --out yet, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mixes", default=",".join(MIXES))
    parser.add_argument("--rounds", type=int, default=3, help="0: only the tables of what is in --out")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--dtype", choices=get_args(Dtype)[1:], default="float32")
    parser.add_argument(
        "--out", type=Path, default=Path("engines.jsonl"), help="finished runs, kept and gone on from"
    )
    parser.add_argument("--quick", action="store_true", help="small mixes in one form, one round")
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    mixes = {
        name: smaller(MIXES[name]) if arguments.quick else MIXES[name] for name in arguments.mixes.split(",")
    }
    num_rounds = 1 if arguments.quick else arguments.rounds
    runs = (
        [json.loads(line) for line in arguments.out.read_text().splitlines()]
        if arguments.out.exists()
        else []
    )
    tables = []
    is_interrupted = False
    for name, mix in mixes.items():
        settings = json.loads(json.dumps([mix, arguments.dtype]))
        of_mix = [run for run in runs if run["mix"] == name]
        if any(run["settings"] != settings for run in of_mix):
            raise SystemExit(
                f"{arguments.out} has runs of {name} with other settings; name another file with --out"
            )
        cases = list(cases_of(mix, arguments.forms.split(","), arguments.policies.split(",")))
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(mix, arguments.dtype, Path(folder))
            cost_model = bench.config.cost_model(bench.files)
            for form, by in cases:  # compiles what the runs will use
                simulated(bench.requests(form), by, cost_model, mix.num_blocks - 1)
            try:
                for round_ in range(num_rounds):
                    for form, by in cases if round_ % 2 == 0 else cases[::-1]:
                        key = {"mix": name, "form": form, "by": by, "round": round_}
                        if any(key.items() <= run.items() for run in of_mix):
                            continue
                        run = {**key, "commit": commit(), **bench.run(form, by), "settings": settings}
                        of_mix.append(run)
                        with arguments.out.open("a") as file:
                            file.write(json.dumps(run) + "\n")
                        print(
                            f"{name} round {round_ + 1} {form} {by}: {run['wall_s']:.1f} s", file=sys.stderr
                        )
            except KeyboardInterrupt:
                print("interrupted; start again to go on", file=sys.stderr)
                is_interrupted = True
            finally:
                bench.close()
            if of_mix:
                tables.append(report(name, bench, mix, of_mix))
        if is_interrupted:
            break
    machine = {"cpu": cpu_name(), "cores": os.cpu_count(), "commit": commit(), "dtype": arguments.dtype}
    print(f"\n{machine}, {' '.join(sys.argv)}")
    print(json.dumps({**machine, "command": sys.argv, "environment": ENVIRONMENT, "mixes": tables}))


if __name__ == "__main__":
    main()
