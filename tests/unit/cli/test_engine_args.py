"""Arguments for vLLM on the command line, and what engines say to those of others."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from blendserve.cli.options import parse_engine_args, parse_lora_modules
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


@pytest.mark.parametrize(
    ("engine", "name", "value", "flag"),
    [
        *(
            (engine, *option)
            for engine in ("native", "openai", "simulated")
            for option in (
                ("engine_args", {"seed": 1}, "--engine-arg seed"),
                ("lora_modules", {"a": "b"}, "--lora-modules"),
            )
        ),
        *(
            (engine, *option)
            for engine in ("openai", "simulated")
            for option in (
                ("tool_call_parser", "hermes", "--tool-call-parser"),
                ("enable_auto_tool_choice", True, "--enable-auto-tool-choice"),
                ("reasoning_parser", "qwen3", "--reasoning-parser"),
            )
        ),
    ],
)
def test_options_of_vllm_are_for_those_that_have_them(engine: Any, name: str, value: Any, flag: str) -> None:
    url = "http://localhost/v1" if engine == "openai" else None
    with pytest.raises(ConfigError, match=f"{flag} is for --engine vllm"):
        EngineConfig(engine=engine, base_url=url, **{name: value}).check()


def test_parsers_of_the_native_engine() -> None:
    EngineConfig(enable_auto_tool_choice=True, tool_call_parser="mistral", reasoning_parser="qwen3").check()
    with pytest.raises(
        ConfigError, match="--tool-call-parser does nothing without --enable-auto-tool-choice"
    ):
        EngineConfig(tool_call_parser="hermes").check()
    with pytest.raises(ConfigError, match=r"--tool-call-parser hermez: .* did you mean hermes"):
        EngineConfig(enable_auto_tool_choice=True, tool_call_parser="hermez").check()
    with pytest.raises(
        ConfigError, match=r"--reasoning-parser glm45: .* it has deepseek_r1, qwen3.*--engine vllm"
    ):
        EngineConfig(reasoning_parser="glm45").check()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tool_call_parser": "hermes"}, "--tool-call-parser does nothing without --enable-auto-tool-choice"),
        (
            {"enable_auto_tool_choice": True},
            "--enable-auto-tool-choice does nothing without --tool-call-parser",
        ),
        ({"lora_modules": {"a": "b"}}, "--lora-modules needs --engine-arg enable_lora=true"),
        ({"lora_modules": {"a": "."}, "engine_args": {"enable_lora": True}}, "a=.*adapter_config.json"),
    ],
)
def test_options_of_vllm_that_lack_another(
    options: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    with pytest.raises(ConfigError, match=reason):
        EngineConfig(engine="vllm", **options).check()


def test_adapters_are_written_as_vllm_takes_them() -> None:
    assert parse_lora_modules(
        ["sql=./a=b", '{"name": "poems", "path": "org/poems", "base_model_name": "m"}']
    ) == {
        "sql": "./a=b",
        "poems": "org/poems",
    }


@pytest.mark.parametrize(
    "module", ["sql", "=x", "sql=", "{", '{"name": "a"}', '{"name": "a", "path": "b", "rank": 3}']
)
def test_what_is_no_adapter_is_refused(module: str) -> None:
    with pytest.raises(ConfigError, match="--lora-modules"):
        parse_lora_modules([module])


def test_adapters_have_different_names() -> None:
    with pytest.raises(ConfigError, match="'a' twice"):
        parse_lora_modules(["a=b", "a=c"])


def test_without_vllm_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"blendserve\[vllm\]"):
        EngineConfig(engine="vllm").check()


def test_only_arguments_that_change_outputs_belong_to_the_job() -> None:
    config = EngineConfig(engine="vllm", engine_args={"quantization": "fp8", "gpu_memory_utilization": 0.8})
    assert config.output_engine_args == {"quantization": "fp8"}
    config = EngineConfig(engine="vllm", quantization="awq", trust_remote_code=True)
    assert config.vllm_args == {"quantization": "awq", "trust_remote_code": True}
    assert config.output_engine_args == {"quantization": "awq"}
    assert EngineConfig(engine="vllm").vllm_args == {}


@pytest.mark.parametrize("engine", ["native", "simulated", "openai"])
def test_quantized_weights_are_for_vllm(engine: Any) -> None:
    with pytest.raises(ConfigError, match=r"--quantization awq is for --engine vllm.*\.gguf"):
        EngineConfig(engine=engine, quantization="awq").check()
    read = EngineConfig(engine="vllm", reasoning_parser="qwen3", lora_modules={"a": "b"})
    assert read.output_engine_args == {"reasoning_parser": "qwen3", "lora_modules": {"a": "b"}}
    assert EngineConfig(reasoning_parser="qwen3").output_engine_args == {"reasoning_parser": "qwen3"}
