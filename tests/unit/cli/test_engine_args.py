"""Arguments for vLLM on the command line, and what engines say to those of others."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from blendserve.cli.options import parse_engine_args
from blendserve.engines import EngineConfig
from blendserve.errors import ConfigError


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("tensor_parallel_size=2", {"tensor_parallel_size": 2}),
        ("--tensor-parallel-size=2", {"tensor_parallel_size": 2}),
        ("enforce_eager=true", {"enforce_eager": True}),
        ("enforce_eager=True", {"enforce_eager": True}),
        ("quantization=fp8", {"quantization": "fp8"}),
        ("quantization=null", {"quantization": None}),
        ("some_rate=1e-3", {"some_rate": 0.001}),
        ("hf_overrides={a: [1, 2]}", {"hf_overrides": {"a": [1, 2]}}),
        ('hf_overrides={"a=b": "c"}', {"hf_overrides": {"a=b": "c"}}),
    ],
)
def test_values_are_json_or_yaml(setting: str, expected: dict[str, Any]) -> None:
    assert parse_engine_args(None, [setting]) == expected


def test_settings_go_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "args.yaml"
    file.write_text("tensor-parallel-size: 2\nquantization: fp8  # or awq\n")
    arguments = parse_engine_args(file, ["tensor_parallel_size=4"])
    assert arguments == {"tensor_parallel_size": 4, "quantization": "fp8"}


@pytest.mark.parametrize("text", ["just words", "- a\n- b", "1: 2", "a: [1", ""])
def test_a_file_that_holds_no_arguments_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "args.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"args\.yaml"):
        parse_engine_args(file, [])


@pytest.mark.parametrize("setting", ["tensor_parallel_size", "=2", "", "a={b"])
def test_a_setting_that_is_none_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match="--engine-arg"):
        parse_engine_args(None, [setting])


def test_engine_args_are_for_vllm_alone() -> None:
    with pytest.raises(ConfigError, match="--engine-arg seed is for --engine vllm"):
        EngineConfig(engine="native", engine_args={"seed": 1}).check()


def test_without_vllm_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"blendserve\[vllm\]"):
        EngineConfig(engine="vllm").check()


def test_only_arguments_that_change_outputs_belong_to_the_job() -> None:
    config = EngineConfig(engine="vllm", engine_args={"quantization": "fp8", "gpu_memory_utilization": 0.8})
    assert config.output_engine_args == {"quantization": "fp8"}
