"""Lines read, checked and kept per second, and the memory they take: `python bench/reading.py 1000000`.

Writes that many short lines to a temporary file. Prompts are token ids, so that encoding is not what is measured.
The last line of standard output is JSON.
"""

import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from blendserve.jobs.openai_format import read_rows
from blendserve.jobs.prepare import prepare
from blendserve.jobs.sources import find_sources

PROMPT_TOKENS = 12


class TokenIds:
    """A tokenizer for prompts that are token ids already."""

    vocab_size = 50_000


def lines(num_lines: int) -> Iterator[bytes]:
    for i in range(num_lines):
        tokens = ",".join(str((i * 7919 + k * 104_729) % 50_000) for k in range(PROMPT_TOKENS))
        body = f'{{"prompt":[{tokens}],"max_tokens":{8 + i % 50},"temperature":0}}'
        yield f'{{"custom_id":"request-{i}","method":"POST","url":"/v1/completions","body":{body}}}\n'.encode()


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def main() -> None:
    num_lines = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        file.writelines(lines(num_lines))
        file.flush()
        sources = find_sources([file.name])
        before_mb = resident_mb()
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        prepared = prepare(read_rows(sources), TokenIds(), served_model_name="m", max_model_len=4096)
        wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
        kept_mb = resident_mb() - before_mb
    assert len(prepared.rows) == num_lines
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3 - before_mb
    print(f"{num_lines:,} lines in {cpu_s:.1f} s of CPU time, {num_lines / cpu_s:,.0f} lines/s")
    print(f"{kept_mb:,.0f} MB kept, {peak_mb:,.0f} MB at most, {kept_mb * 1e6 / num_lines:.0f} bytes a line")
    result = {
        "num_lines": num_lines,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "kept_mb": kept_mb,
        "peak_mb": peak_mb,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
