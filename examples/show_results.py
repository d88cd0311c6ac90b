"""Show what came out of the example job: one answer of each kind, and how many known answers are right.

python examples/show_results.py examples/mixed.jsonl out/mixed.results.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from make_mixed import CHAT_URL, HERE, make_job

SHOWN = ("mcq-geography-07", "extract-lease-02", "chat-44", "story-05")


def last_words(request: dict[str, Any]) -> str:
    """The end of the prompt: the question itself."""
    body = request["body"]
    text: str = body["messages"][-1]["content"] if request["url"] == CHAT_URL else body["prompt"]
    return text[-180:]


def answer(result: dict[str, Any]) -> str:
    choice = result["response"]["body"]["choices"][0]
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text.strip()


def main() -> None:
    requests_path, results_path = (Path(argument) for argument in sys.argv[1:3])
    requests = {line["custom_id"]: line for line in map(json.loads, requests_path.read_text().splitlines())}
    results = {line["custom_id"]: line for line in map(json.loads, results_path.read_text().splitlines())}
    content = json.loads((HERE / "mixed_content.json").read_text())
    _, known = make_job(content, seed=0)

    for custom_id in SHOWN:
        if custom_id in results:
            print(f"\n--- {custom_id}\n… {last_words(requests[custom_id])}\n>>> {answer(results[custom_id])}")
    print()
    for kind, of_what in (
        ("mcq", "answers right, by chance 25 %"),
        ("extract", "answers contain the fact word for word"),
    ):
        scored = [custom_id for custom_id in known if custom_id.startswith(kind) and custom_id in results]
        right = sum(is_right(kind, known[custom_id], answer(results[custom_id])) for custom_id in scored)
        print(f"{kind}: {right} of {len(scored)} {of_what}")


def is_right(kind: str, known: str, given: str) -> bool:
    """Whether an answer holds the fact, or begins the right option (five tokens may cut it short)."""
    known, given = known.lower(), given.lower()
    return bool(given) and known.startswith(given) if kind == "mcq" else known in given


if __name__ == "__main__":
    main()
