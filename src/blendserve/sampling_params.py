"""Sampling parameters of the offline API, by vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any


@dataclass(slots=True)
class SamplingParams:
    """How the completions of a prompt are sampled; names and defaults are those of vLLM's class.

    `max_tokens` None, or more than fits, means to the end of the context. `logprobs` None asks for none, 0 for those
    of the chosen tokens, k for the k most likely ones besides. What the engine cannot honour is refused by name when
    it is used, never dropped (docs/parameters.md).
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    """None or -1: derived from the seed of the `LLM` and the number of the request"""
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: Any = None
    """a mapping such as {"choice": ["yes", "no"]}, or vLLM's StructuredOutputsParams"""
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: list[str] | None = None
    thinking_token_budget: int | None = None

    def to_body(self, *, chat: bool) -> dict[str, Any]:
        """The same as parameters of a request to /v1/chat/completions, or to /v1/completions; defaults left out."""
        body = {
            field.name: value
            for field in fields(self)
            if (value := getattr(self, field.name)) is not None and value != field.default
        }
        # None, not the default, is what these requests may leave out.
        body.pop("max_tokens", None)
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        if self.seed == -1:
            del body["seed"]
        if self.logprob_token_ids and self.logprobs is None:
            body["logprobs"] = True if chat else 0
        if self.logprobs is not None and chat:
            body |= {"logprobs": True, "top_logprobs": self.logprobs}
        if self.logit_bias:
            body["logit_bias"] = {str(token_id): bias for token_id, bias in self.logit_bias.items()}
        if self.extra_args:
            body["vllm_xargs"] = body.pop("extra_args")
        if is_dataclass(self.structured_outputs) and not isinstance(self.structured_outputs, type):
            body["structured_outputs"] = {
                name: value
                for name, value in asdict(self.structured_outputs).items()
                if value is not None and not name.startswith("_")
            }
        elif isinstance(self.structured_outputs, Mapping):
            body["structured_outputs"] = dict(self.structured_outputs)
        return body
