"""Answers of models in chats, good and broken, for parsers of ours and for vLLM's own."""

from __future__ import annotations

import re
from collections.abc import Iterable

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]")
SPECIAL = "<|im_end|>"

ROME = '{"name": "weather", "arguments": {"city": "Rome"}}'
NOON = '{"name": "time", "arguments": {"zone": "CET", "at": [1, 2.5, null]}}'


def call(body: str) -> str:
    """A call in the manner of Hermes and Qwen."""
    return f"<tool_call>\n{body}\n</tool_call>"


HERMES = [
    "",
    "plain text",
    "  \n",
    call(ROME),
    f"I shall look. {call(ROME)}",
    f"\n\n{call(ROME)}\n{call(NOON)}\n",
    f"{call(ROME)} and then {call(NOON)} after",
    f"before <tool_call>{ROME}",
    f"before <tool_call>{ROME[:-1]}",
    f"{call(ROME)}<tool_call>{{'name': 'time'",
    "<tool_call></tool_call>",
    "<tool_call>",
    "a </tool_call> b",
    "a <tool_call b> c",
    call("not json"),
    call("[1, 2]"),
    call("3"),
    call('{"name": "weather"}'),
    call('{"arguments": {}}'),
    call('{"name": 3, "arguments": {}}'),
    call('{"name": "f", "arguments": "{\\"a\\": 1}"}'),
    call('{"name": "f", "arguments": null, "id": "x"}'),
    call('{"name": "f", "arguments": {"a": {"b": [{"c": {}}]}}}'),
    call('{"name": "f", "arguments": {"a": 1, "a": 2, "b": NaN, "c": 1e400}}'),
    call(
        '{"name": "größe", "arguments": {"wo": "東京 🗼", "esc": "\\u00e9\\ud83d\\ude00", "z": "a\\n\\t\\"q"}}'
    ),
    call('{"name": "f", "arguments": {"text": "</think> in a string"}}'),
    call('{"name": "f", "arguments": {"text": "<tool_call> in a string"}}'),
    f"{call(ROME)}{call('broken')}",
    f"a {SPECIAL} b {call(ROME)}",
]

LLAMA = [
    "",
    "plain text",
    ROME,
    f"<|python_tag|>{ROME}",
    f"{ROME}; {NOON}",
    f"{ROME}{NOON}",
    f"{ROME}\n{NOON}",
    f"Sure: {ROME} there",
    ROME.replace("arguments", "parameters"),
    '{"name": "f", "arguments": {"a": 1}, "parameters": {"a": 2}}',
    '{"name": "f", "parameters": {"a": {"b": {"c": [{}]}}}}',
    '{"name": "f"}',
    '{"arguments": {}}',
    '{"name": 3, "arguments": {}}',
    f"{ROME}; {{broken",
    ROME[:-2],
    "{}",
    "a set {1, 2}",
    '[{"name": "f", "arguments": {}}]',
    '<|python_tag|>print("hi")',
    '{"name": "größe", "parameters": {"wo": "東京 🗼"}}',
    '{"name": "f", "parameters": "text"}',
]

MISTRAL = [
    "plain text",
    f"[TOOL_CALLS][{ROME}]",
    f"[TOOL_CALLS] [{ROME}, {NOON}]",
    f"Sure. [TOOL_CALLS][{ROME}]",
    f"[TOOL_CALLS]{ROME}",
    f"[TOOL_CALLS][{ROME}] and more",
    f"[TOOL_CALLS][TOOL_CALLS][{ROME}]",
    '[TOOL_CALLS][{"name": "f", "arguments": "{\\"a\\": 1}"}]',
    '[TOOL_CALLS][{"name": "größe", "arguments": {"wo": "東京 🗼"}}]',
]
"""of tokenizers without [ARGS]; broken ones are left as they are here, and cut by vLLM"""

MISTRAL_NAMED = [
    "plain text",
    '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}',
    '[TOOL_CALLS]weather{"city": "Rome"}',
    'Sure. [TOOL_CALLS]weather[ARGS]{"city":"Rome"}[TOOL_CALLS]time[ARGS]{"zone": [1, {"a": 2}]}',
    '[TOOL_CALLS]weather[ARGS]{"city": "Ro',
    "[TOOL_CALLS]weather[ARGS]{}",
    '[TOOL_CALLS]weather[ARGS]{"name":"Rome"} and more text',
    "[TOOL_CALLS]weather",
    '[TOOL_CALLS]größe[ARGS]{"wo": "東京 🗼"}',
]

THOUGHTS = [
    "",
    "no tags at all",
    "<think>hm</think>so",
    "<think>\nhm\n</think>\n\nso",
    "hm</think>so",
    "hm</think>",
    "<think>hm",
    "<think></think>so",
    "<think></think>",
    "</think>",
    "<think>",
    " before <think>hm</think>so",
    "<think>a<think>b</think>c</think>d",
    "<think>a</think>b<think>c</think>d",
    "a</think>b<think>c",
    "<think>größe 東京 🗼</think>é🚀",
    "<think>hm</thinkso</think >",
    f"<think>a {SPECIAL} b</think>c {SPECIAL} d",
    "<think>if a < b > c <function=f> x </function></think>d <function=g> e",
    f"<think>hm {call(ROME)}",
    f"hm{call(ROME)}</think>so",
    f"<think>hm</think>{call(ROME)}",
    f"<think>hm</think>\n\n{call(ROME)}\n",
    f"<think>hm</think>so {call(ROME)}{call(NOON)}",
    f"<think>hm</think>so <tool_call>{ROME[:-3]}",
]


class Pieces:
    """A tokenizer for the parsers: marks are tokens, all else is a token per character."""

    special_tokens = frozenset({SPECIAL})
    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self, marks: Iterable[str] = MARKS) -> None:
        self.marks = (*marks, SPECIAL)

    def token_id(self, token: str) -> int | None:
        """Id of a mark."""
        return self.marks.index(token) if token in self.marks else None

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        pieces = re.split(f"({'|'.join(map(re.escape, self.marks))})", text)
        ids: list[int] = []
        for piece in pieces:
            ids += (
                [self.marks.index(piece)] if piece in self.marks else [100 + ord(letter) for letter in piece]
            )
        return ids

    def text(self, token_id: int) -> str:
        """Text of a token."""
        return self.marks[token_id] if token_id < 100 else chr(token_id - 100)

    def stream(self, skip_special_tokens: bool = True) -> PieceStream:
        """See `Tokenizer.stream`."""
        return PieceStream(self, skip_special_tokens)

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """See `Tokenizer.decode`."""
        stream = self.stream(skip_special_tokens)
        return "".join(map(stream.push, token_ids))


class PieceStream:
    """Text token by token."""

    def __init__(self, pieces: Pieces, skip_special_tokens: bool) -> None:
        self.pieces = pieces
        self.skips = skip_special_tokens

    def push(self, token_id: int) -> str:
        """Text of a token."""
        text = self.pieces.text(token_id)
        return "" if self.skips and text == SPECIAL else text

    def flush(self) -> str:
        """Nothing is held back."""
        return ""
