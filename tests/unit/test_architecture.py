"""The rules of the house: imports go one way, heavy packages load on use, every setting has a flag."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import typer.main

import blendserve
from blendserve.cli import app
from blendserve.engines import EngineConfig
from blendserve.jobs.setup import InputConfig, JobConfig, OutputConfig
from blendserve.jobs.telemetry import TelemetryConfig
from blendserve.planner.plan import PlanConfig
from blendserve.planner.tree_order import OrderConfig

SOURCE = Path(blendserve.__file__).parent

LAYERS = [
    {"errors", "tokens", "request"},
    {"gguf_files", "models", "cost_model", "tokenizer"},
    {"planner"},
    {"scheduling"},
    {"engines", "workloads"},
    {"simulator", "workloads"},
    {"report"},
    {"experiments"},
    {"jobs"},
    {"llm", "outputs", "sampling_params"},
    {"cli"},
]
LAYER = {name: depth for depth, names in enumerate(LAYERS) for name in names}

ONLY_IN = {
    "gguf": ("gguf_files.py",),
    "torch": ("engines/native/", "gguf_files.py"),
    "triton": ("engines/native/triton_",),
    "cuda": ("engines/native/device.py",),
    "safetensors": ("engines/native/", "gguf_files.py"),
    "transformers": ("tokenizer.py", "models.py", "gguf_files.py"),
    "huggingface_hub": ("models.py",),
    "tokenizers": ("tokenizer.py",),
    "httpx2": ("engines/openai_api.py",),
    "tqdm": ("llm.py",),
    "llguidance": ("engines/native/grammar.py",),
    "vllm": ("engines/vllm.py", "engines/vllm_chat.py"),
    "psutil": ("engines/vllm.py",),
    "yaml": ("cli/options.py",),
    "plotly": ("report.py",),
    "prometheus_client": ("jobs/metrics.py",),
    "rich": ("cli/",),
    "typer": ("cli/",),
    "fsspec": ("jobs/storage.py",),
    "pyarrow": ("jobs/publish.py", "jobs/sources.py"),
    "zstandard": ("jobs/publish.py", "jobs/sources.py"),
}


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE), ast.parse(path.read_text())


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_module_has_a_layer() -> None:
    for path, _ in modules():
        if path.name != "__init__.py" or path.parent != Path():
            assert path.parts[0].removesuffix(".py") in LAYER, (
                f"{path} is in no layer; say in LAYERS where it belongs"
            )


def test_imports_go_one_way() -> None:
    for path, tree in modules():
        own = LAYER.get(path.parts[0].removesuffix(".py"))
        for name in imported(tree):
            parts = name.split(".")
            if parts[0] == "blendserve" and len(parts) > 1 and parts[1] in LAYER and own is not None:
                assert LAYER[parts[1]] <= own, f"{path} imports {name} from a layer above its own"


def test_heavy_packages_stay_where_they_belong() -> None:
    for path, tree in modules():
        for name in imported(tree):
            package = name.split(".")[0]
            if package in ONLY_IN:
                assert str(path).startswith(ONLY_IN[package]), f"{path} imports {name}"


@pytest.mark.parametrize(
    "module",
    [
        "blendserve",
        "blendserve.cli",
        "blendserve.llm",
        "blendserve.engines.simulated",
        "blendserve.engines.batching",
        "blendserve.engines.process",
        "blendserve.engines.supervised",
    ],
)
def test_importing_loads_no_heavy_package(module: str) -> None:
    heavy = (
        "torch",
        "triton",
        "transformers",
        "tokenizers",
        "safetensors",
        "pyarrow",
        "fsspec",
        "zstandard",
        "ray",
        "vllm",
        "sglang",
        "fastapi",
        "plotly",
        "prometheus_client",
        "llguidance",
    )
    code = f"import sys, {module}; print(sorted(set({heavy!r}) & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def options_of(command: str) -> set[str]:
    group = typer.main.get_command(app)
    return {parameter.name for parameter in group.commands[command].params if parameter.name}


@pytest.mark.parametrize(
    "config", [EngineConfig, PlanConfig, OrderConfig, InputConfig, OutputConfig, JobConfig, TelemetryConfig]
)
def test_every_setting_is_a_flag_of_run(config: type) -> None:
    assert is_dataclass(config)
    options = options_of("run")
    composed = {"source", "engine", "plan", "order"} if config in {JobConfig, PlanConfig} else set()
    for field in fields(config):
        if field.name not in composed:
            assert field.name in options, f"{config.__name__}.{field.name} has no flag"


def test_plan_takes_the_flags_of_run_that_change_the_plan() -> None:
    only_run = {"attention_backend", "overlap", "num_threads", "policy", "plan_file"}
    only_run |= {field.name for field in fields(OutputConfig)}
    only_run |= {field.name for field in fields(TelemetryConfig)} | {"progress", "quiet"}
    only_run |= {
        "engine_arg",
        "engine_args",
        "engine_process",
        "reasoning_parser",
        "max_engine_restarts",
        "deadline",
        "max_time",
        "finalize",
    }
    server = {
        "base_url",
        "api_key_env",
        "max_concurrency",
        "request_timeout",
        "kv_cache_tokens",
        "sglang_python",
    }
    assert options_of("run") - only_run - server <= options_of("plan")
