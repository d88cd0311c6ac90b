"""From options to a job that is ready to run: model, tokenizer, input, plan, engine, policy, store."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from blendserve.cost_model import CostModel
from blendserve.engines import EngineConfig, open_engine
from blendserve.errors import ConfigError
from blendserve.jobs.job import Job
from blendserve.jobs.openai_format import read_rows
from blendserve.jobs.prepare import Prepared, prepare
from blendserve.jobs.sources import DEFAULT_MAX_LINE_BYTES, find_sources
from blendserve.jobs.store import ResultStore
from blendserve.models import ModelFiles, resolve_model
from blendserve.planner.plan import Plan, PlanConfig, make_plan
from blendserve.scheduling.policies import PolicyName, make_policy
from blendserve.tokenizer import Tokenizer

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


@dataclass(slots=True)
class PlannedJob:
    """A job that was read, checked and planned; nothing heavy is loaded yet."""

    config: JobConfig
    files: ModelFiles
    tokenizer: Tokenizer
    cost_model: CostModel
    prepared: Prepared
    plan: Plan

    def start(self, store: ResultStore) -> Job:
        """Load the engine; the job owns it and the store."""
        engine = None
        if len(self.prepared.requests):
            engine = open_engine(self.config.engine, self.files, self.tokenizer, self.cost_model)
        policy = make_policy(self.config.policy, self.plan, seed=self.config.seed)
        return Job(self.prepared, engine, policy, store, self.tokenizer, model=self.files.name)


def find_model(config: JobConfig, on_progress: Callable[[str], None]) -> ModelFiles:
    """The files of the job's model.

    Raises:
        ConfigError: they cannot be had.
    """
    source = config.source
    return resolve_model(source.model, served_model_name=source.served_model_name, on_progress=on_progress)


def plan_job(
    config: JobConfig, files: ModelFiles, done: Container[str], exclude: Sequence[str | Path] = ()
) -> PlannedJob:
    """Read, check and plan the lines that are not `done`; files in `exclude` are not found by folders and globs.

    Raises:
        ConfigError: an option, the input or the saved plan does not fit.
    """
    source = config.source
    sources = find_sources(source.inputs, exclude=exclude)
    if source.column_mapping and not any(found.is_table for found in sources):
        raise ConfigError("--column-mapping is for Parquet and CSV files, and there are none; leave it out")
    tokenizer = Tokenizer(files.folder)
    cost_model = config.engine.cost_model(files)
    prepared = prepare(
        read_rows(
            sources,
            output_tokens_field=source.output_tokens_field,
            max_line_bytes=source.max_line_bytes,
            column_mapping=source.column_mapping,
        ),
        tokenizer,
        served_model_name=files.name,
        max_model_len=config.engine.context_limit(cost_model.model),
        any_model=source.any_model,
        endpoint=source.endpoint,
        limit=source.limit,
        done=done,
        seed=config.seed,
        strict=source.strict,
    )
    if not prepared.num_lines:
        raise ConfigError(
            f"empty_file: the input {', '.join(map(str, source.inputs))} has no request; write one per line"
        )
    if config.plan_file is not None:
        plan = Plan.load(config.plan_file, prepared.requests, cost_model)
    else:
        plan = make_plan(prepared.requests, cost_model, config.plan)
    return PlannedJob(config, files, tokenizer, cost_model, prepared, plan)
