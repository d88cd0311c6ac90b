"""From options to a job that is ready to run: model, tokenizer, input, plan, engine, policy, store."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from blendserve.cost_model import CostModel
from blendserve.engines import Engine, EngineConfig, open_engine
from blendserve.engines.supervised import DEFAULT_MAX_RESTARTS, SupervisedEngine
from blendserve.errors import ConfigError
from blendserve.jobs.deadline import Deadline
from blendserve.jobs.job import Job
from blendserve.jobs.manifest import JobSignature, StreamDigest, digest_of_model
from blendserve.jobs.openai_format import LineError, Row, read_rows
from blendserve.jobs.prepare import OnProgress, Prepared, prepare
from blendserve.jobs.publish import InputOrder
from blendserve.jobs.sources import DEFAULT_MAX_LINE_BYTES, Source, find_sources
from blendserve.jobs.store import FLUSH_INTERVAL_S, ResultStore
from blendserve.models import ModelFiles, remote_model, resolve_model
from blendserve.planner.plan import Plan, PlanConfig, make_plan
from blendserve.planner.prefix_tree import Ints
from blendserve.request import RequestTable
from blendserve.scheduling.policies import PolicyName, make_policy
from blendserve.scheduling.policy import Policy
from blendserve.tokenizer import ApproximateTokenizer, Tokenizer

DEFAULT_POLICY: PolicyName = "blend"


@dataclass(frozen=True, slots=True)
class InputConfig:
    """What is run, on which model."""

    inputs: Sequence[str]
    """files, globs, folders, URLs, `-` for standard input"""
    model: str | None = None
    served_model_name: str | None = None
    any_model: bool = False
    """run lines whatever model they name"""
    endpoint: str | None = None
    """the url that all lines must have; None: each its own"""
    strict: bool = False
    """refuse the job at the first line that cannot run"""
    limit: int | None = None
    """only so many lines"""
    output_tokens_field: str | None = None
    """body parameter that tells how long the output will be"""
    column_mapping: Mapping[str, str] = field(default_factory=dict)
    """request key to column, for Parquet and CSV"""
    max_line_bytes: int = DEFAULT_MAX_LINE_BYTES
    """longer lines are errors"""

    def find(self, exclude: Iterable[str | Path] = ()) -> list[Source]:
        """The files of the input; folders and globs leave out those in `exclude`.

        Raises:
            ConfigError: nothing is there, or an option is for other files.
        """
        sources = find_sources(self.inputs, exclude=exclude)
        if self.column_mapping and not any(source.is_table for source in sources):
            raise ConfigError(
                "--column-mapping is for Parquet and CSV files, and there are none; leave it out"
            )
        return sources


@dataclass(frozen=True, slots=True)
class OutputConfig:
    """Where results go, and what happens to those that are there."""

    output: str
    """JSONL file, `-` for standard output; `.gz`, `.zst`, `.parquet` and URLs are made from one"""
    errors: str | None = None
    """file for lines that failed; None: beside the output"""
    ordered: bool = False
    """lines in the order of the input, once the job is complete"""
    errors_in_output: bool = False
    """once the job is complete, a line in the output for each line of the input, failed ones too, in its order"""
    working_dir: str | None = None
    """folder for the files that results grow in; None: beside the output"""
    flush_interval: float = FLUSH_INTERVAL_S
    """seconds between two times that results are forced onto the disk; 0: after every write"""
    restart: bool = False
    """drop earlier results"""
    continue_anyway: bool = False
    """keep earlier results although they are of another job"""


@dataclass(frozen=True, slots=True)
class JobConfig:
    """Everything that decides what a job does."""

    source: InputConfig
    engine: EngineConfig = field(default_factory=EngineConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    policy: PolicyName = DEFAULT_POLICY
    plan_file: Path | None = None
    """a saved plan to use instead of planning"""
    seed: int = 0
    max_engine_restarts: int = DEFAULT_MAX_RESTARTS
    """restarts of a dead engine in a row, without a result in between"""

    def model_name(self, files: ModelFiles) -> str:
        """The name in the results; nobody shall take simulated ones for real."""
        return f"simulated/{files.name}" if self.engine.engine == "simulated" else files.name

    def planned_policy(self, cost_model: CostModel, requests: RequestTable) -> Policy:
        """A policy for some requests, which are planned for it."""
        plan = make_plan(requests, cost_model, self.plan)
        return make_policy(self.policy, plan, seed=self.seed)

    def signature(
        self, files: ModelFiles, sources: Sequence[Source], stdin: StreamDigest | None
    ) -> JobSignature:
        """What results of this job are of; `stdin` digests standard input while that is read."""
        parameters: dict[str, Any] = {
            "engine": self.engine.engine,
            "dtype": self.engine.dtype,
            "max_model_len": self.engine.max_model_len,
            "seed": self.seed,
        }
        if self.engine.is_remote:  # servers of a pool may come and go
            urls = self.engine.base_urls
            parameters["base_url"] = urls[0] if len(urls) == 1 else "several"
        if self.engine.load_format != "auto":
            parameters["load_format"] = self.engine.load_format
        if self.engine.engine in ("vllm", "sglang") or self.engine.output_engine_args:
            parameters["engine_args"] = self.engine.output_engine_args
        if self.engine.engine == "simulated":
            parameters["output_tokens_field"] = self.source.output_tokens_field
        model_digest = "" if files.folder is None else digest_of_model(files.folder)
        return JobSignature(
            [source.path for source in sources], self.model_name(files), model_digest, parameters, stdin
        )


@dataclass(slots=True)
class PlannedJob:
    """A job that was read, checked and planned; nothing heavy is loaded yet."""

    config: JobConfig
    files: ModelFiles
    tokenizer: Tokenizer | ApproximateTokenizer
    cost_model: CostModel
    prepared: Prepared
    plan: Plan

    def start(
        self,
        store: ResultStore,
        *,
        deadline: Deadline | None = None,
        finalize: bool = False,
        on_event: Callable[[str], None] = lambda _line: None,
    ) -> Job:
        """Load the engine, which the job owns. `on_event` gets a line for each failure of the engine."""
        engine = None
        if len(self.prepared.requests):
            engine = SupervisedEngine(
                self._open_engine,
                functools.partial(self.config.planned_policy, self.cost_model),
                max_restarts=self.config.max_engine_restarts,
                on_event=on_event,
            )
        return Job(
            self.prepared,
            engine,
            make_policy(self.config.policy, self.plan, seed=self.config.seed),
            store,
            self.tokenizer,
            model=self.config.model_name(self.files),
            deadline=deadline,
            finalize=finalize,
        )

    def _open_engine(self) -> Engine:
        return open_engine(
            self.config.engine,
            self.files,
            self.tokenizer,
            self.cost_model,
            output_tokens=self.expected_output_tokens,
        )

    @property
    def expected_output_tokens(self) -> Ints:
        """[num_requests] what the simulated engine generates: declared, else assumed of each request by itself."""
        return self.plan.output_tokens_est.round().astype(np.int32)


def find_model(config: JobConfig, on_progress: Callable[[str], None]) -> ModelFiles:
    """The files of the job's model.

    Raises:
        ConfigError: they cannot be had.
    """
    source = config.source
    if config.engine.is_remote:
        return remote_model(source.model, served_model_name=source.served_model_name)
    return resolve_model(
        source.model,
        served_model_name=source.served_model_name,
        with_weights=config.engine.load_format != "dummy",
        on_progress=on_progress,
    )


def open_tokenizer(files: ModelFiles, *, trust_remote_code: bool = False) -> Tokenizer | ApproximateTokenizer:
    """The model's tokenizer, or where that is on a server one that is good enough for planning."""
    if files.folder is None:
        return ApproximateTokenizer()
    return Tokenizer(files.folder, trust_remote_code=trust_remote_code)


def _names_no_model(config: JobConfig) -> bool:
    """Whether it is left to the lines which of a server's models they run on."""
    source = config.source
    return config.engine.is_remote and source.model is None and source.served_model_name is None


def plan_job(
    config: JobConfig,
    files: ModelFiles,
    done: Container[str],
    sources: Sequence[Source] | None = None,
    order: InputOrder | None = None,
    on_progress: OnProgress | None = None,
) -> PlannedJob:
    """Read, check and plan the lines that are not `done`; `order` takes note of the order of all of them.

    `sources` are the files of the input where those were found already.

    Raises:
        ConfigError: an option, the input or the saved plan does not fit.
    """
    tokenizer = open_tokenizer(files, trust_remote_code=config.engine.trust_remote_code)
    cost_model = config.engine.cost_model(files)
    source = config.source
    rows = read_rows(
        source.find() if sources is None else sources,
        output_tokens_field=source.output_tokens_field,
        max_line_bytes=source.max_line_bytes,
        column_mapping=source.column_mapping,
        pass_through=config.engine.forwards,
        extra_parameters=config.engine.extra_parameters,
        chat_features=config.engine.chat_features,
    )
    prepared = prepare(
        rows if order is None else _noted(rows, order),
        tokenizer,
        served_model_name=files.name,
        max_model_len=config.engine.context_limit(cost_model.model),
        any_model=source.any_model or _names_no_model(config),
        endpoint=source.endpoint,
        limit=source.limit,
        done=done,
        seed=config.seed,
        strict=source.strict,
        on_progress=on_progress,
        adapters=config.engine.lora_modules,
        check_params=config.engine.check_params,
    )
    if not prepared.num_lines:
        raise ConfigError(
            f"empty_file: the input {', '.join(map(str, source.inputs))} has no request; write one per line"
        )
    if on_progress is not None:
        on_progress("planning", prepared.num_lines)
    if config.plan_file is not None:
        plan = Plan.load(config.plan_file, prepared.requests, cost_model)
    else:
        plan = make_plan(prepared.requests, cost_model, config.plan)
    return PlannedJob(config, files, tokenizer, cost_model, prepared, plan)


def _noted(rows: Iterable[Row | LineError], order: InputOrder) -> Iterator[Row | LineError]:
    for row in rows:
        order.add(row.custom_id, row.line, row.file)
        yield row
