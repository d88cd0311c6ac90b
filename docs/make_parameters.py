"""Writes docs/parameters.md from what the reader of requests knows of each parameter.

Usage: python docs/make_parameters.py
"""

from __future__ import annotations

from pathlib import Path

import orjson

from blendserve.engines import EngineName
from blendserve.jobs.openai_format import parameter_support, values_that_ask_for_nothing
from blendserve.jobs.sources import CHAT_URL, COMPLETIONS_URL

TARGET = Path(__file__).with_name("parameters.md")
ENGINES: dict[EngineName, str] = {"native": "native", "vllm": "vllm", "openai": "openai, sglang"}
"""with the headings of their columns"""
HEAD = """# Parameters of a request

Written by `docs/make_parameters.py` from the code; a test compares it. Bodies are those of OpenAI's
`/v1/chat/completions` and `/v1/completions`, with the parameters that vLLM's server adds; `blendserve.SamplingParams`
has the same names.

| word | what becomes of the parameter |
| --- | --- |
| yes | honoured, with vLLM's meaning |
| no effect | accepted: it changes nothing about a completion |
| refused | the line's error, when it is read, before anything is run; the other lines run |
| forwarded | sent to the server as it is written; what it refuses is the line's error |

Where a parameter is refused, null and the values that ask for nothing (last column) are accepted. A name that is not
in this table is an error of its line, too (`unknown_parameter`, with the nearest name).

"""
NOTES = {
    "allowed_token_ids": "at least one",
    "audio": "speech as output",
    "bad_words": "forbidden as the last token that completes one",
    "best_of": "ask for `n` completions with `logprobs`, and keep the best",
    "continue_final_message": "with `add_generation_prompt` false",
    "documents": "objects of strings, for the template",
    "echo": "the prompt in front of the text, and with `logprobs` its log probabilities",
    "frequency_penalty": "-2 .. 2, per time that the output has a token",
    "guided_choice": "as `structured_outputs.choice`",
    "guided_grammar": "as `structured_outputs.grammar`",
    "guided_json": "as `structured_outputs.json`",
    "guided_regex": "as `structured_outputs.regex`",
    "ignore_eos": "the output is as long as `max_tokens` says",
    "logit_bias": "added to logits, before penalties",
    "logprob_token_ids": "at most 128, in place of the most likely tokens; needs `logprobs`",
    "logprobs": "at most 20 alternatives, of the logits before anything but a constraint",
    "max_tokens": "at least 1",
    "min_p": "0 .. 1",
    "min_tokens": "a constraint that has come to its end goes before it",
    "n": "at most 128",
    "presence_penalty": "-2 .. 2, once for each token that the output has",
    "prompt_logprobs": "0 .. 20 alternatives; such a prompt takes nothing from the prefix cache",
    "repetition_penalty": "above 0, for tokens of prompt and output",
    "response_format": "`text`, `json_object`, `json_schema`",
    "seed": "64 bits; without one, of the job's seed and `custom_id`",
    "stop": "any number; on the native engine they count behind the reasoning only",
    "stop_in_reasoning": "stop strings count in the reasoning, too",
    "stream": "only false",
    "structured_outputs": "`json`, `regex`, `choice`, `grammar`, `json_object`; `disable_any_whitespace`, "
    "`disable_additional_properties`, `whitespace_pattern`",
    "temperature": "0 .. 2; 0 is greedy",
    "tool_choice": "other than `none`: with `--enable-auto-tool-choice --tool-call-parser NAME`",
    "tools": "functions; on the native engine not `strict` ones with `tool_choice` `auto`",
    "top_k": "0 or -1: all tokens",
    "top_logprobs": "at most 20, with `logprobs`",
    "use_beam_search": "ask for `n` completions with `logprobs`, and keep the best",
}


def cell(name: str, engine: EngineName) -> str:
    """What becomes of a parameter on an engine."""
    in_chats, in_completions = (parameter_support(engine, url)[name] for url in (CHAT_URL, COMPLETIONS_URL))
    if in_chats == in_completions:
        return in_chats
    where, support = ("chats", in_chats) if in_completions == "refused" else ("completions", in_completions)
    return f"{support}, in {where}"


def text() -> str:
    """The page."""
    lines = [f"| parameter | {' | '.join(ENGINES.values())} | |", "| --- | --- | --- | --- | --- |"]
    for name in parameter_support("native", CHAT_URL):
        neutral = ", ".join(
            f"`{orjson.dumps(value).decode()}`" for value in values_that_ask_for_nothing(name)
        )
        notes = [NOTES.get(name), f"asks for nothing: {neutral}" if neutral else None]
        cells = [f"`{name}`", *(cell(name, engine) for engine in ENGINES), "; ".join(filter(None, notes))]
        lines.append(f"| {' | '.join(cells)} |")
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text())
