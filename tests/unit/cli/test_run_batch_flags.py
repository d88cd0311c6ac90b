"""Flags of `vllm run-batch` as flags of `run`."""

import pytest
import typer.main

from blendserve.cli import app
from blendserve.cli.run_batch import translated
from blendserve.errors import ConfigError

RUN = typer.main.get_command(app).commands["run"]


def flags(line: str) -> str:
    return " ".join(translated(line.split(), RUN))


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("--max-num-seqs 8 --dtype float32", "--max-num-seqs 8 --dtype float32"),
        ("--max_num_seqs=8", "--max-num-seqs 8"),
        (
            "--max-model-len 4k --max-num-batched-tokens 4K",
            "--max-model-len 4000 --max-num-batched-tokens 4096",
        ),
        ("--max-model-len 1.5k --seed 3", "--max-model-len 1500 --seed 3"),
        ("--max-model-len auto --block-size 16", "--block-size 16"),
        ("--max-model-len -1", ""),
        ("--kv-cache-memory-bytes 1000000", "--kv-cache-memory 1000000"),
        ("--disable-log-stats --quiet", "--quiet"),
        ("-q --no-engine-process --policy dfs", "-q --no-engine-process --policy dfs"),
        (
            "--engine vllm --tensor-parallel-size 2 --enforce-eager --no-async-scheduling --max-num-seqs 8",
            "--engine vllm --tensor-parallel-size 2 --engine-arg enforce_eager=true "
            "--engine-arg async_scheduling=false --max-num-seqs 8",
        ),
        ("--load-format dummy --device cuda", "--load-format dummy --device cuda"),
        ("--engine vllm --load-format safetensors", "--engine vllm --engine-arg load_format=safetensors"),
        ("--allowed-x a b --engine=vllm", "--engine-arg allowed_x=[a,b] --engine vllm"),
        (
            "--engine vllm --enable-auto-tool-choice --tool-call-parser hermes --reasoning_parser qwen3",
            "--engine vllm --enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3",
        ),
        (
            "--engine vllm --enable-lora --lora-modules a=./a b=./b",
            "--engine vllm --engine-arg enable_lora=true --lora-modules a=./a --lora-modules b=./b",
        ),
    ],
)
def test_flags(given: str, taken: str) -> None:
    assert flags(given) == taken


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("--gpu-memory-utilization 0.9", "--gpu-memory-utilization .*--kv-cache-memory"),
        ("--enable-lora", "--enable-lora is no flag .*--engine native.*--engine vllm"),
        ("--engine openai --chat-template a", "--chat-template is no flag .*--engine openai"),
        ("--max-model-len some", "--max-model-len some"),
        ("input.jsonl", "'input.jsonl' belongs to no flag"),
    ],
)
def test_flags_that_cannot_be(given: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        flags(given)
