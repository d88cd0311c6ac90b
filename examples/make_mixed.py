"""Write `mixed.jsonl`, a batch job that mixes four kinds of requests, as merged jobs of several teams do.

The job has 240 lines in OpenAI Batch format:

- `mcq-SUBJECT-NN`: 120 multiple choice questions in 8 subjects. All questions of a subject start with the
  same instruction and the same five worked examples: long shared prompt, answer of a word or two.
- `extract-KIND-NN`: 40 questions, each about one fact of a document of its own: long prompt, short output.
- `chat-NN`: 50 everyday chat turns, some with an earlier exchange: short prompt, medium output.
- `story-NN`: 30 stories: short prompt, long output.

The lines are shuffled, and lines of the same sort are kept apart. In the order of the file, a
shared prefix can drop out of a small prefix cache before its next question comes. Sorted by prefix alone, the
job would fall into stretches that mostly read prompts and stretches that mostly write output.

The texts are in `mixed_content.json`. The same seed always writes the same file:

    python examples/make_mixed.py                     # writes examples/mixed.jsonl
    python examples/make_mixed.py --answers key.json  # and the right answers of the mcq and extract lines
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
NUM_OPTIONS = 4
CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"

Line = dict[str, Any]
Answers = dict[str, str]


def batch_line(custom_id: str, url: str, body: dict[str, Any]) -> Line:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def messages(system: str, turns: list[str]) -> list[dict[str, str]]:
    """Chat messages of a conversation in which `turns` are the user's and the assistant's by turns."""
    roles = ("user", "assistant")
    spoken = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return [{"role": "system", "content": system}, *spoken]


def spread(choices: int, count: int, rng: random.Random) -> list[int]:
    """`count` numbers below `choices` in random order, each about equally often."""
    numbers = [i % choices for i in range(count)]
    rng.shuffle(numbers)
    return numbers


def ask(item: list[str], position: int) -> str:
    """A question with its options, the right one (first in `item`) put at `position`, up to "Answer:"."""
    question, right, *wrong = item
    options = [*wrong[:position], right, *wrong[position:]]
    # A small model that reads the options last tends to repeat the last one.
    return f"Options: {'; '.join(options)}\nQuestion: {question}\nAnswer:"


def mcq_lines(subjects: dict[str, Any], rng: random.Random, answers: Answers) -> list[Line]:
    lines = []
    for subject, content in subjects.items():
        examples = content["examples"]
        positions = spread(NUM_OPTIONS, len(examples), rng)
        shots = [
            f"{ask(item, position)} {item[1]}\n\n" for item, position in zip(examples, positions, strict=True)
        ]
        prefix = content["instruction"] + "\n\n" + "".join(shots)
        questions = content["questions"]
        positions = spread(NUM_OPTIONS, len(questions), rng)
        for number, (item, position) in enumerate(zip(questions, positions, strict=True), start=1):
            custom_id = f"mcq-{subject}-{number:02d}"
            body = {
                "prompt": prefix + ask(item, position),
                "max_tokens": 5,
                "temperature": 0,
                "stop": ["\n"],
            }
            lines.append(batch_line(custom_id, COMPLETIONS_URL, body))
            answers[custom_id] = item[1]
    return lines


def capitalised(text: str) -> str:
    """`text` with a capital letter at the start of every sentence."""
    return re.sub(r"(^|[.?!] )([a-z])", lambda match: match[1] + match[2].upper(), text)


def extract_lines(content: dict[str, Any], rng: random.Random, answers: Answers) -> list[Line]:
    """One line per case; a document has one paragraph per beat, in one of its wordings (empty: left out)."""
    lines = []
    for kind, template in content["kinds"].items():
        cases = template["cases"]
        wordings = [spread(len(beat), len(cases), rng) for beat in template["beats"]]
        for i, case in enumerate(cases):
            paragraphs = [
                capitalised(beat[wording[i]].format(**case))
                for beat, wording in zip(template["beats"], wordings, strict=True)
                if beat[wording[i]]
            ]
            question = template["questions"][i % len(template["questions"])]
            document = "\n\n".join(paragraphs)
            user = f"Document:\n{document}\n\nQuestion: {question['ask']}\nAnswer in one short sentence."
            custom_id = f"extract-{kind}-{i + 1:02d}"
            body = {"messages": messages(content["system"], [user]), "max_tokens": 24, "temperature": 0}
            lines.append(batch_line(custom_id, CHAT_URL, body))
            answers[custom_id] = case[question["answer"]]
    return lines


def chat_lines(content: dict[str, Any]) -> list[Line]:
    return [
        batch_line(
            f"chat-{number:02d}",
            CHAT_URL,
            {
                "messages": messages(content["system"], turns),
                "max_tokens": 96,
                "temperature": 0.7,
                "top_p": 0.9,
                "seed": number,
            },
        )
        for number, turns in enumerate(content["conversations"], start=1)
    ]


def story_lines(content: dict[str, Any]) -> list[Line]:
    return [
        batch_line(
            f"story-{number:02d}",
            CHAT_URL,
            {
                "messages": messages(content["system"], [request["ask"]]),
                "max_tokens": request["max_tokens"],
                "temperature": 0.8,
                "seed": number,
            },
        )
        for number, request in enumerate(content["requests"], start=1)
    ]


def interleave(lines: list[Line], rng: random.Random) -> None:
    """Shuffle in place, then pull other lines forward to part neighbours of the same sort."""
    rng.shuffle(lines)
    sorts = [line["custom_id"].rpartition("-")[0] for line in lines]
    for i in range(1, len(lines)):
        if sorts[i] == sorts[i - 1]:
            j = next((j for j in range(i + 1, len(lines)) if sorts[j] != sorts[i]), i)
            lines[i], lines[j] = lines[j], lines[i]
            sorts[i], sorts[j] = sorts[j], sorts[i]


def make_job(content: dict[str, Any], seed: int) -> tuple[list[Line], Answers]:
    """All lines of the job, interleaved, and the answers that are known beforehand."""
    rng = random.Random(seed)
    answers: Answers = {}
    lines = [
        *mcq_lines(content["mcq"], rng, answers),
        *extract_lines(content["extract"], rng, answers),
        *chat_lines(content["chat"]),
        *story_lines(content["story"]),
    ]
    interleave(lines, rng)
    return lines, answers


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a batch job that mixes four kinds of requests.")
    parser.add_argument("--seed", type=int, default=0, help="of the shuffles (default: 0)")
    parser.add_argument("--out", type=Path, default=HERE / "mixed.jsonl", help="file to write")
    parser.add_argument("--answers", type=Path, help="also write the right answers (JSON) to this file")
    args = parser.parse_args()

    content = json.loads((HERE / "mixed_content.json").read_text(encoding="utf-8"))
    lines, answers = make_job(content, args.seed)
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    args.out.write_text(text, encoding="utf-8", newline="\n")
    if args.answers:
        key = json.dumps(answers, ensure_ascii=False, indent=1, sort_keys=True)
        args.answers.write_text(key + "\n", encoding="utf-8", newline="\n")
    print(f"{len(lines)} requests written to {args.out}")


if __name__ == "__main__":
    main()
