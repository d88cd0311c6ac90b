"""`blendserve profile` in a process of its own, and what its profile is good for."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def blendserve(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "blendserve.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture(scope="module")
def model(make_tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = make_tiny_model("llama", tmp_path_factory.mktemp("model") / "tiny", with_tokenizer=True)
    return folder


@pytest.fixture(scope="module")
def profile(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, "subprocess.CompletedProcess[str]"]:
    path = tmp_path_factory.mktemp("profile") / "mine.json"
    sizes = ("--max-num-batched-tokens", "128", "--max-num-seqs", "16", "--kv-cache-memory", "64MiB")
    return path, blendserve("profile", "--model", model, "--device", "cpu", "-o", path, *sizes, "--json")


def test_steps_are_measured_and_fitted(profile: tuple[Path, "subprocess.CompletedProcess[str]"]) -> None:
    path, done = profile
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert found["name"] == "mine"
    assert found["provenance"].startswith("measured: ")
    assert (found["max_num_batched_tokens"], found["max_num_seqs"]) == (128, 16)
    assert found["kv_cache_bytes"] == pytest.approx(64 << 20, rel=0.01)
    assert found["overlap"] == {"kind": "sum", "parameter": 0.0}
    said = json.loads(done.stdout)
    assert len(said["steps"]) >= 8
    assert all(step["duration_s"] > 0 and step["predicted_s"] > 0 for step in said["steps"])
    assert "measured ms" in done.stderr


def test_other_commands_take_the_profile(
    profile: tuple[Path, "subprocess.CompletedProcess[str]"], model: Path, tmp_path: Path
) -> None:
    path, _ = profile
    line = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "Hello there", "max_tokens": 20}}
    job = tmp_path / "job.jsonl"
    job.write_text("".join(json.dumps({"custom_id": f"r{i}", **line}) + "\n" for i in range(20)))
    planned = blendserve("plan", job, "--model", model, "--hardware", path, "--json")
    assert planned.returncode == 0, planned.stderr
    assert "on mine" in planned.stderr
    simulated = blendserve("simulate", job, "--hardware", path, "--policy", "dfs,blend", "--json")
    assert simulated.returncode == 0, simulated.stderr
    rows = json.loads(simulated.stdout)["simulated"]
    assert [row["system"] for row in rows] == ["dfs", "blend", "sequential dfs", "sequential blend"]
    assert all(row["makespan_s"] > 0 and row["overlap"] == "sequential" for row in rows)


def test_its_help() -> None:
    done = blendserve("profile", "--help")
    assert done.returncode == 0
    for option in ("--output", "--device", "--max-time", "--model"):
        assert option in done.stdout


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (("--engine", "simulated"), "--engine native"),
        (("--max-time", "soon"), "is no duration"),
        (("--model", "./nowhere"), "does not exist"),
        (("--device", "cuda"), "--device cpu"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(
    arguments: tuple[str, ...],
    remedy: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # on a machine with a GPU, too
    given = arguments if "--model" in arguments else (*arguments, "--model", str(model))
    done = blendserve("profile", "-o", tmp_path / "profile.json", *given)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert remedy in done.stderr
    assert not (tmp_path / "profile.json").exists()


def test_a_session_on_a_gpu_is_tried_out_on_a_cpu(tmp_path: Path) -> None:
    """Everything but the figures: sections, time, what fails, a worker that hangs, and the profile at the end."""
    pytest.importorskip("triton", reason="needs blendserve[cuda]")
    only = "probes,attention,gemm,pair,steps,stack,end_to_end,failing,hanging,too_long"
    command = [sys.executable, str(ROOT / "bench" / "gpu_session.py"), "--out", str(tmp_path), "--dry-run"]
    done = subprocess.run(
        [*command, "--only", only], capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    profile = json.loads((tmp_path / "profile.json").read_text())
    statuses = {name: entry["status"] for name, entry in profile["sections"].items()}
    expected = dict.fromkeys(only.split(","), "ok") | {"failing": "error", "too_long": "cut"}
    assert statuses == expected, (tmp_path / "errors.txt").read_text()
    assert [error["where"] for error in profile["errors"]] == ["failing: failing"]
    assert [(loss["label"], loss["reason"]) for loss in profile["losses"]] == [("hanging: hang", "hung")]
    assert profile["skipped"] == ["too_long: does not fit"]
    assert all(
        row["error"] < 1e-3 for label, row in profile["attention"].items() if label.startswith("check")
    )
    assert {row["mode"] for row in profile["stack"].values()} == {"whole", "halves", "split 8", "split 4"}
    runs = profile["end_to_end"]
    assert len(runs) == 6
    assert all(row["tokens_per_s"] > 0 and row["predicted_tokens_per_s"] > 0 for row in runs.values())
    assert len({row["kv_tokens_read"] for row in runs.values()}) == 1, "the same work whatever the order"
    hardware = json.loads((tmp_path / "hardware.json").read_text())
    assert [partition["sm_attention"] for partition in hardware["partitions"]] == [4, 8]
    assert hardware["overlap"]["kind"] == "table"
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["mean_error_ratio"] < 0.1, "the steps of a dry run are modelled"
    assert [name for name, _, _ in said["targets"]][1] == "decode attention over copy bandwidth"
