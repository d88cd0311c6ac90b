"""The example job under several policies on the same engine, alternating; medians over rounds.

    python bench/policies.py [--rounds 2] [--policies dual-scan,fcfs,random] [blendserve run options …]

Prints a table; the last line of standard output is the same as JSON. Wall time is that of the job without start-up.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def run_once(policy: str, options: list[str], output: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "blendserve.cli", "run", str(ROOT / "examples/mixed.jsonl")]
    command += ["-o", str(output), "--restart", "--json", "--policy", policy, *options]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{policy} ended with code {done.returncode}:\n{done.stderr}")
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["summary"]
    return summary


def commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], check=False, cwd=ROOT, capture_output=True, text=True
    )
    return found.stdout.strip() or "unknown"


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--policies", default="blend,dual-scan,fcfs,random")
    arguments, options = parser.parse_known_args()
    policies = arguments.policies.split(",")
    runs: dict[str, list[dict[str, Any]]] = {policy: [] for policy in policies}
    with tempfile.TemporaryDirectory() as folder:
        for round_ in range(arguments.rounds):
            for policy in policies if round_ % 2 == 0 else policies[::-1]:
                summary = run_once(policy, options, Path(folder) / "out.jsonl")
                runs[policy].append(summary)
                print(f"round {round_ + 1} {policy}: {summary['elapsed_s']:.1f} s", file=sys.stderr)

    first = policies[0]
    base = statistics.median(run["elapsed_s"] for run in runs[first])
    rows = []
    for policy, results in runs.items():
        wall_s = statistics.median(run["elapsed_s"] for run in results)
        latest = results[-1]
        rows.append(
            {
                "policy": policy,
                "wall_s": [round(run["elapsed_s"], 2) for run in results],
                "median_wall_s": wall_s,
                f"time_over_{first}": wall_s / base,
                "prefix_tokens_shared": latest["num_cached_tokens"],
                "prompt_tokens_computed": latest["num_prefill_tokens"],
                "steps": latest["num_steps"],
                "output_tokens": latest["num_output_tokens"],
                "retracted": latest["num_retracted"],
            }
        )
    print(f"{cpu_name()}, {os.cpu_count()} cores, commit {commit()}, options {' '.join(options) or 'none'}")
    headings = (
        "policy",
        "median wall s",
        f"time over {first}",
        "prefix tokens shared",
        "prompt tokens computed",
        "steps",
    )
    print(" | ".join(headings))
    for row in rows:
        print(
            f"{row['policy']} | {row['median_wall_s']:.1f} | {row[f'time_over_{first}']:.3f} | "
            f"{row['prefix_tokens_shared']:,} | {row['prompt_tokens_computed']:,} | {row['steps']:,}"
        )
    print(
        json.dumps(
            {"cpu": cpu_name(), "cores": os.cpu_count(), "commit": commit(), "options": options, "runs": rows}
        )
    )


if __name__ == "__main__":
    main()
