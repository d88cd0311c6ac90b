"""vLLM and SGLang for the tests of this folder: opening an engine takes up to a minute or more, so they share them."""

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blendserve.cost_model import CostModel, HardwareSpec
from blendserve.engines.sglang import SGLangServer, free_port
from blendserve.tokenizer import Tokenizer
from tests.workload import TINY

TEMPLATE = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{%- if message.name %}[{{ message.name }}] {% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
{%- if message.tool_call_id %} ({{ message.tool_call_id }}){% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- if reasoning_effort %}[{{ reasoning_effort }}]{% endif %}{% endif %}"""

COST_MODEL = CostModel(TINY, HardwareSpec.load("cpu-2core-avx2"))


@pytest.fixture(scope="session")
def vllm_model(make_tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its tokenizer has tokens for thinking, and its template takes tools.

    vLLM's CPU kernels have no head size of 16.
    """
    pytest.importorskip("vllm")
    from transformers import AddedToken, AutoTokenizer

    folder: Path = make_tiny_model(
        "llama",
        tmp_path_factory.mktemp("vllm") / "tiny",
        with_tokenizer=True,
        head_dim=32,
        vocab_size=49160,
        max_position_embeddings=1024,
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ("<think>", "</think>")])
    tokenizer.chat_template = TEMPLATE
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def vllm_tokenizer(vllm_model: Path) -> Tokenizer:
    return Tokenizer(vllm_model)


@pytest.fixture(scope="session")
def open_vllm(vllm_model: Path) -> Callable[..., Any]:
    """A new engine, with room for some requests; whoever asks for it closes it."""

    def make(**changes: Any) -> Any:
        from blendserve.engines.vllm import VLLMEngine

        sizes: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64}
        engine_args = {"num_gpu_blocks_override": 33, "enforce_eager": True} | changes.pop("engine_args", {})
        return VLLMEngine(
            vllm_model, COST_MODEL, dtype="float32", engine_args=engine_args, **(sizes | changes)
        )

    return make


@pytest.fixture(scope="session")
def roomy_vllm(open_vllm: Callable[..., Any]) -> Iterator[Any]:
    """With all that chats can ask for."""
    engine = open_vllm(
        max_model_len=1024,
        engine_args={
            "num_gpu_blocks_override": 65,
            "enable_lora": True,
            "max_lora_rank": 8,
            "max_loras": 2,
        },
        tool_call_parser="hermes",
        reasoning_parser="deepseek_r1",
    )
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def tight_vllm(open_vllm: Callable[..., Any]) -> Iterator[Any]:
    """With little more KV cache than a request needs, and no tokenizer."""
    engine = open_vllm(
        max_model_len=96,
        max_num_seqs=5,
        max_num_batched_tokens=32,
        engine_args={"num_gpu_blocks_override": 5, "skip_tokenizer_init": True},
    )
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def vllm_serve_url(vllm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """VLLM's own server."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(vllm_model)]
    command += ["--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--max-model-len", "256", "--max-num-seqs", "8", "--block-size", "32"]
    command += ["--num-gpu-blocks-override", "65", "--kv-cache-memory-bytes", str(64 << 20)]
    command += ["--enable-prompt-tokens-details"]
    log = tmp_path_factory.mktemp("vllm-serve") / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, process_group=0)
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while True:
            assert process.poll() is None, log.read_text()[-4000:]
            try:
                opener.open(f"http://127.0.0.1:{port}/health", timeout=10.0).close()
                break
            except (urllib.error.URLError, OSError):
                time.sleep(1.0)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="session")
def sglang_url(make_tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server of the SGLang in the environment that SGLANG_PYTHON names, on a CPU without its own kernels."""
    if not (python := os.environ.get("SGLANG_PYTHON")):
        pytest.skip("SGLANG_PYTHON names no interpreter")
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("sglang") / "tiny", with_tokenizer=True)
    options = {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_overlap_schedule": True,
        "max_total_tokens": 4096,
        "max_running_requests": 8,
        "chunked_prefill_size": 256,
        "dtype": "float32",
        "skip_server_warmup": True,
        "sleep_on_idle": True,
    }
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {
            "SGLANG_USE_CPU_ENGINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
        }.items():
            environment.setenv(name, value)
        environment.delenv("PYTHONPATH", raising=False)
        server = SGLangServer(python, folder, "tiny", options)
    yield server.base_url
    server.close()
